"""The short form of evidence.py. Other tests here show that the NumPy kernel is right without a planted mistake, and
that evidence.py rejects bad answers."""
import numpy as np
import pytest

import evidence
import known_mistakes as mistakes
import oracle
import places
import problems
from kernel import Kernel, planted


def problem(seed, **given):
    return problems.draw(np.random.default_rng(seed), **given)


@pytest.mark.parametrize('given', [{'dtype': d} for d in problems.DTYPES + (problems.FLOAT8,)] + [dict(pages=True), dict(row_mask=True), dict(row_mask=True, pages=True)], ids=str)
def test_the_kernel_without_a_mistake_computes_what_the_oracle_does(given):
    for seed in range(40):
        p = problem(seed, **given)
        members = {**problems.without_pages(p.tensors), **p.options}
        want = {**oracle.forward(members)[0], **(oracle.backward(members) if p.back else {})}
        got = Kernel(p, exact=True, tile=(32, 64, 128, 256)[seed % 4]).run()
        assert set(got) == set(p.results)
        for name in got:
            np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-9, err_msg=f'{seed} {name}: {problems.describe(p)}')


@pytest.mark.parametrize('code', mistakes.TABLE)
def test_a_planted_mistake_changes_a_result(code):
    """Every mistake must change a result in each of four cases. evidence.Case draws problems until the mistake changes
    one."""
    mistake, changed = mistakes.TABLE[code], 0
    for number in range(4):
        case = evidence.Case('table', code, number)
        changed += any(not np.array_equal(case.sent[n], case.right[n], equal_nan=True) for n in case.sent)
        assert case.exceeds() or code in evidence.PRECISION, number
    assert changed == 4 and mistake.__name__ == code


def answer_of(case, verdict, code=None, limit=1e-3):
    """Makes the answer that a server would give for this case, with this verdict."""
    errors = {n: {'max_abs': 1.0, 'explained': 1e-9, 'limit': limit, 'wrong': int(case.wrong(n, limit).sum()), 'of': case.sent[n].size, 'nan': 0} for n in case.sent}
    explanations = [{**dict(zip(('code', 'and'), code.split('+'))), 'error_if_so': 0.0, 'error_now': 1.0}] if code else []
    return {'verdict': verdict, 'errors': errors, 'explanations': explanations, 'worst': [], 'where': []}


def broken(kind, names, verdict, code=None, **more):
    found = [evidence.judge(case, answer_of(case, verdict, code(case) if code else None, **more))
             for case in (evidence.Case(kind, name, n) for name in names for n in range(2))]
    return set(evidence.report(found, say=lambda *_: None))


CODES = ('alignment', 'scale_missing', 'lse_base2')


def test_a_server_that_lies_breaks_a_bound():
    assert ('table', 'passed') in broken('table', CODES, 'match', lambda case: case.name)
    assert ('table', 'named first') in broken('table', CODES, 'mismatch', lambda case: 'bias_missing')
    assert ('right', 'mismatch') in broken('right', ('float16',), 'mismatch')
    assert ('right', 'limit is wide') in broken('right', ('float32',), 'match', limit=0.5)
    assert ('invented', 'mismatch') in broken('invented', ('race_zeroes_a_tile',), 'rounding')
    assert ('invented', 'located') in broken('invented', ('race_zeroes_a_tile',), 'mismatch')
    assert ('invented', 'explained falsely') in broken('invented', ('race_zeroes_a_tile',), 'mismatch', lambda case: 'causal_missing')
    assert ('pair', 'both named') in broken('pair', ('layout_v+causal_missing',), 'mismatch', lambda case: 'layout_v')
    assert not broken('table', CODES, 'mismatch', lambda case: case.name)
    assert not broken('pair', ('layout_v+causal_missing',), 'mismatch', lambda case: 'causal_missing+layout_v')


def test_another_code_is_accepted_only_where_it_computes_the_same():
    case = evidence.Case('table', 'heads_reversed', 0)
    says = answer_of(case, 'mismatch', 'heads_interleaved')
    assert not case.computes_the_same('heads_interleaved', says) and case.computes_the_same('heads_reversed', says)
    # With one query, a causal mask of the wrong alignment hides all keys but one.
    p = problem(1, causal=True, window=False, Sq=1, Sk=64, packed=False, back=False)
    missing, one_more = (planted(mistakes.TABLE[c])(p, exact=True, variant={}).run()['out'] for c in ('causal_missing', 'causal_off_by_one'))
    assert (np.abs(missing - one_more) < 1e-12).all() == (p.options.get('alignment') != 'top_left')


def test_every_code_of_the_server_is_planted(server):
    assert sorted(server.get('/v1/info').json()['checks']) == sorted(mistakes.TABLE)


@pytest.mark.parametrize('text, tensor, count', [
    ('queries 128 to 255 of every head', 'out', 2 * 128 * 4 * 64),
    ('query 3, columns 0, 8 of head 3 of batch row 1', 'out', 2),
    ('every 8th of the columns from 0 to 56 of heads 1 to 2', 'out', 2 * 256 * 2 * 8),
    ('9 queries between 3 and 40 of every head', 'lse', 2 * 4 * 38),
    ('keys 0 to 31 of head 1', 'dk', 2 * 32 * 64),
    ('axis 1 from the end: 5', 'dbias', 4 * 256),
    ('elements of every head, query and column', 'out', 2 * 256 * 4 * 64),
    ('elements of every head and query', 'lse', 2 * 4 * 256),
])
def test_a_sentence_of_where_is_understood(text, tensor, count):
    shape = {'lse': (2, 4, 256), 'dbias': (1, 4, 256, 256)}.get(tensor, (2, 256, 4, 64))
    assert places.mask(text, tensor, shape).sum() == count
    with pytest.raises(ValueError):
        places.mask(text + ' of wheel 5', tensor, shape)
    with pytest.raises(ValueError):
        places.mask('heads 2 to 900', tensor, shape)


@pytest.mark.limit(900)  # this test takes half a minute on two idle cores
def test_the_check_is_right_about_the_short_list(server, capsys):
    """The 131 problems of the short list must satisfy all bounds of BOUNDS. The long list has the same bounds."""
    assert evidence.main(['--url', server.url, '--jobs', '2']) == 0, capsys.readouterr().out
