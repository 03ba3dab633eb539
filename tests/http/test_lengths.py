"""Lengths of queries and keys in every format: padded rows, gaps between packed sequences, and packed queries with
padded keys."""
import numpy as np
import pytest

import formats
import oracle
import wire
from caches import DECODE, Cache

H, HK, D, DV = 4, 2, 16, 8
KINDS = formats.FORMATS + ('envelope',)


def ints(values):
    return wire.tensor(values, 'int32')


def problem(kind, back=False, seed=1):
    """Makes a problem whose padding rows are NaN. Returns ({member: JSON}, the same as arrays for the reference)."""
    r = np.random.default_rng(seed)
    q_lengths, k_lengths = [7, 0, 3], [9, 4, 12]
    lengths = {'seqlens_q': q_lengths, 'seqlens_k': k_lengths}
    q, k = (3, 8), (3, 12)
    if kind == 'gaps':
        lengths.update(cu_seqlens_q=[0, 9, 11, 15], cu_seqlens_k=[0, 9, 15, 30])
        q, k = (15,), (30,)
    if kind == 'cache':
        lengths = {'cu_seqlens_q': [0, 7, 7, 10], 'seqlens_k': k_lengths}
        q = (10,)
    if kind == 'queries':
        lengths.pop('seqlens_k')
    exact = {n: np.array(v) for n, v in lengths.items()}
    shapes = {'q': q + (H, D), 'k': k + (HK, D), 'v': k + (HK, DV), **({'dout': q + (H, DV)} if back else {})}
    exact.update({n: wire.rounded(r.standard_normal(shape), 'float32') for n, shape in shapes.items()})
    for n in shapes:
        exist = np.zeros(shapes[n][:-2], bool)
        for b, q0, Sq, k0, Sk in oracle.sequences(exact):
            first, count = (k0, Sk) if n in 'kv' else (q0, Sq)
            (exist if exist.ndim == 1 else exist[b])[first:first + count] = True
        exact[n][~exist] = np.nan
    return {n: ints(x) if 'seqlens' in n else wire.tensor(x) for n, x in exact.items()}, exact


def close(got, want):
    assert set(got) == set(want)
    for n, x in want.items():
        assert got[n].shape == x.shape, n
        assert np.array_equal(np.isfinite(got[n]), np.isfinite(x)) and np.array_equal(got[n][~np.isfinite(x)], x[~np.isfinite(x)]), n
        np.testing.assert_allclose(got[n][np.isfinite(x)], x[np.isfinite(x)], atol=2e-4, err_msg=n)
        assert np.all(got[n][x == 0] == 0), n


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('lengths', ['queries', 'both', 'gaps', 'cache'])
def test_rows_that_do_not_exist_are_0_and_nan_in_them_changes_nothing(server, kind, lengths):
    members, exact = problem(lengths)
    status, got = formats.results(server, kind, 'forward', {**members, 'causal': True})
    assert status == 200, got
    close(got, oracle.forward({**exact, 'causal': True})[0])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('lengths', ['queries', 'both', 'gaps', 'cache'])
def test_gradients_of_rows_that_do_not_exist_are_0(server, kind, lengths):
    members, exact = problem(lengths, back=True)
    status, got = formats.results(server, kind, 'backward', {**members, 'causal': True})
    assert status == 200, got
    close(got, oracle.backward({**exact, 'causal': True}))


@pytest.mark.parametrize('lengths', ['queries', 'both', 'gaps', 'cache'])
def test_what_was_saved_has_its_lengths(server, lengths):
    members, exact = problem(lengths, back=True)
    dout = members.pop('dout')
    saved = server.forward(**members, save=True)
    assert saved.status == 200, saved
    answer = server.backward(context=saved.json()['context'], dout=dout)
    assert answer.status == 200, answer
    close({n: wire.value(answer.json()[n]) for n in ('dq', 'dk', 'dv')}, oracle.backward(exact))


@pytest.mark.parametrize('lengths', ['queries', 'both', 'gaps', 'cache'])
def test_rows_that_do_not_exist_are_not_verified(server, lengths):
    members, _ = problem(lengths)
    found = server.forward(**members, verify='all').json()['verification']
    assert found['rows'] == 10 * H and found['max_abs'] < 1e-5, found


@pytest.mark.parametrize('kind', KINDS)
def test_a_padded_batch_with_masks_uses_the_lengths_of_its_rows(server, kind):
    """Alignment, ALiBi, windows, masks and dropout use the true lengths of each row, not the padded sizes."""
    members, exact = problem('both', back=True)
    r = np.random.default_rng(3)
    more = {'window': [5, 2], 'softcap': 4.0, 'dropout_p': 0.25, 'seed': 11}
    tensors = {'bias': r.standard_normal((1, H, 8, 12)), 'alibi_slopes': 2.0 ** -np.arange(1, 1 + H), 'sinks': r.standard_normal(H)}
    keep, rows = r.random((3, 1, 8, 12)) < 0.8, np.stack([r.integers(4, 9, (3, 1, 12)), r.integers(0, 3, (3, 1, 12))], -1)
    sent = {**members, **more, **{n: wire.tensor(x) for n, x in tensors.items()}, 'keep_mask': wire.tensor(keep, 'uint8'), 'mask_startend_rows': ints(rows)}
    truth = {**exact, **more, **{n: wire.rounded(x, 'float32') for n, x in tensors.items()}, 'keep_mask': keep.astype(float), 'mask_startend_rows': rows}
    wanted = ['dq', 'dk', 'dv', 'dsinks', 'dbias', 'dalibi_slopes']
    status, got = formats.results(server, kind, 'backward', {**sent, 'outputs': wanted})
    assert status == 200, got
    close(got, oracle.backward(truth))


@pytest.mark.parametrize('kind', formats.FORMATS)
@pytest.mark.parametrize('lengths, sizes', [
    ('both', {'B': 3, 'Sq': 8, 'Sk': 12}), ('gaps', {'sequences': 3, 'total_q': 15, 'total_k': 30}), ('cache', {'sequences': 3, 'total_q': 10, 'Sk': 12})])
def test_the_sizes_are_those_of_the_shapes(server, kind, lengths, sizes):
    status, facts = formats.ask(server, kind, 'forward', problem(lengths)[0])
    assert (status, facts.get('sizes')) == (200, {**sizes, 'H': H, 'Hk': HK, 'D': D, 'Dv': DV}), facts


def test_a_padded_cache_and_its_pages_have_the_same_answer(server):
    """Padded k and v [B, Sk, Hk, D] can be sent as pools of pages, with one page per batch row."""
    members, _ = problem('cache')
    rows = server.forward(**members).json()
    pages = server.forward(**members, page_table=ints([[0], [1], [2]])).json()
    assert np.allclose(wire.value(rows['out']), wire.value(pages['out']), atol=1e-6)


@pytest.mark.parametrize('lengths, change, pointer, says', [
    ('both', {'seqlens_q': ints([8, 9, 0])}, '/seqlens_q/data', 'seqlens_q: [1] is 9, must be between 0 and 8, the queries of q'),
    ('both', {'seqlens_q': ints([8, 1])}, '/seqlens_q/shape/0', 'seqlens_q: shape[0] is 2, must be 3, the batch of q'),
    ('gaps', {'seqlens_q': ints([7, 3, 3])}, '/seqlens_q/data', 'seqlens_q: [1] is 3, must be between 0 and 2, the rows that cu_seqlens_q has for this sequence'),
    ('gaps', {'seqlens_k': ints([9, 4, 16])}, '/seqlens_k/data', 'must be between 0 and 15, the rows that cu_seqlens_k has for this sequence'),
    ('cache', {'seqlens_k': ints([9, 13, 12])}, '/seqlens_k/data', 'seqlens_k: [1] is 13, must be between 0 and 12'),
    ('cache', {'cu_seqlens_q': ints([0, 10])}, '/cu_seqlens_k', 'unless k and v are [1, Sk, Hk, D], a row for each sequence'),
    ('cache', {'keep_mask': wire.tensor(np.ones((3, 1, 1, 12)), 'uint8')}, '/keep_mask', 'cannot be combined with cu_seqlens_q'),
])
def test_the_message_of_lengths_that_do_not_fit_says_what_would(server, lengths, change, pointer, says):
    answer = server.forward(**{**problem(lengths)[0], **change})
    assert answer.status == 400 and answer.json()['pointer'] == pointer and says in answer.json()['detail'], answer


def test_a_decode_has_no_lengths_of_queries(serve):
    server = serve('--kv-bytes', '4M')
    cache = Cache(server, kv_heads=2, head_dim=16)
    answer = server.post(DECODE, {'q': wire.tensor(np.ones((1, 2, 4, 16))), 'caches': [cache.id], 'seqlens_q': ints([1])})
    assert answer.status == 400 and answer.json()['pointer'] == '/seqlens_q', answer
    assert answer.json()['detail'].startswith('seqlens_q: belongs to forward, POST /v1/attention/forward; leave it out'), answer


def test_an_lse_of_another_base_is_found_though_most_rows_do_not_exist(server):
    r = np.random.default_rng(8)
    exact = {n: wire.rounded(r.standard_normal((2, 64, 2, 32)), 'float32') for n in 'qkv'}
    exact['dout'], exact['seqlens_q'] = exact['q'], np.array([5, 4])
    truth = oracle.forward(exact)[0]
    members = {n: ints(x) if n == 'seqlens_q' else wire.tensor(x) for n, x in exact.items()}
    given = {'out': wire.tensor(truth['out']), 'lse': wire.tensor(truth['lse'])}
    assert server.backward(**members, **given).status == 200
    answer = server.backward(**members, **{**given, 'lse': wire.tensor(truth['lse'] * np.log2(np.e))})
    assert answer.status == 400 and 'base 2' in answer.json()['detail'], answer
