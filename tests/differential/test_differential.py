"""The short form of differential.py: a fixed number of cases with fixed seeds, so that neither chance nor the machine's
speed decides what is tested. Other tests show that differential.py rejects wrong answers, and that PROTOCOL.md suffices
to know which elements dropout drops."""
import json
import os
import re

import numpy as np
import pytest

import bounds
import differential
import oracle
import wire

SEED, GROUPS, CASES = 20261122, 8, 50
OBSERVED = ['row_max', 'entropy', 'max_logit', 'mean_entropy', 'key_mass']
NEEDS = {'out': 'q', 'lse': 'q', **dict.fromkeys(OBSERVED, 'q'), 'key_mass': 'k'}


@pytest.mark.limit(240)
@pytest.mark.parametrize('group', range(GROUPS))
def test_random_problems_over_the_whole_contract_agree_with_float64(server, group):
    failures = []
    numbers = range(group * CASES, (group + 1) * CASES)
    passed, failed = differential.run(SEED, numbers, differential.client(f'http://127.0.0.1:{server.port}'), say=failures.append)
    assert not failed, '\n'.join(failures)
    assert passed == CASES


def test_the_judge_can_say_no(server):
    """differential.check() notices a change of one number in each tensor of an answer, and a missing tensor."""
    ask = differential.client(f'http://127.0.0.1:{server.port}')
    noticed = set()
    for number in range(60):
        case = differential.Case(SEED, number)
        if case.context or case.envelope or case.extreme or case.base_2:
            continue
        for name in case.members.get('outputs', ['out', 'lse'] + [n for n in OBSERVED if case.observe and n not in noticed]):
            def wrong(path, members, name=name):
                status, answer = ask(path, members)
                if name not in answer:
                    return status, answer
                value = wire.value(answer[name]).astype(np.float64)
                if value.size:
                    at = np.unravel_index(value.size // 2, value.shape)
                    value[at] = 1.5 * np.nan_to_num(np.abs(value), posinf=1, neginf=1).max() + 1
                answer[name] = wire.tensor(value, 'float32')
                return status, answer
            if np.prod(case.members[NEEDS.get(name, name[1:])]['shape']) and case.members['v']['shape'][-1]:
                assert differential.check(case, wrong).startswith(name), (number, name)
                noticed.add(name)
    assert noticed >= {'out', 'lse', 'dq', 'dk', 'dv', 'dsinks', 'dbias', 'dalibi_slopes', *OBSERVED}
    case = differential.Case(SEED, 0)
    assert differential.check(case, lambda path, members: (200, {})).endswith('missing')
    assert differential.check(case, lambda path, members: (400, {'detail': 'no'})) == '400 no'


def test_the_new_kinds_are_among_the_cases_and_the_judge_knows_what_an_lse_in_base_2_must_be_answered():
    kinds, accepted = {}, 0
    for number in range(GROUPS * CASES):
        case = differential.Case(SEED, number)
        kinds[case.extreme] = kinds.get(case.extreme, 0) + 1
        if case.base_2:
            kinds['base 2'] = kinds.get('base 2', 0) + 1
            accepted += differential.check(case, lambda path, members: (200, {'responses': [{}, {}]} if case.envelope else {})) != ''
            for detail, wrong in (('your lse is in base 2', ''), ('no', '400 no')):
                assert differential.check(case, lambda path, members: (400, {'detail': detail})) == wrong
    assert min(kinds[kind] for kind in ('beyond', 'huge', 'lowest', 'base 2')) >= 5 and accepted >= 3, (kinds, accepted)


def test_an_lse_in_base_2_need_not_be_refused_where_the_body_is_too_small_to_look_at_its_rows():
    """The server checks as many rows of lse as a body allows. With a head size of 1 in bfloat16, a row of 128 keys
    takes 4224 multiply-adds, and a body of 1746 bytes allows 13,968: three rows."""
    case = differential.Case(202, 5662)
    assert case.base_2 and case.problem['k'].shape == (3, 128, 1, 1)
    assert differential.check(case, lambda path, members: (200, {})) == ''


@pytest.mark.parametrize('seed, number', [(101, 6024), (101, 6113), (7, 2219), (7, 2552)])
def test_gradients_that_cancel_are_held_to_the_roundings_of_what_was_added(server, seed, number):
    """Four cases in which the terms of a gradient cancel. They are dalibi_slopes of keys at distance 119 with a bias of
    -65504, a given lse with scores of 1e9, dv of 16 rows in bfloat16, and dalibi_slopes in bfloat16."""
    case = differential.Case(seed, number)
    assert differential.check(case, differential.client(f'http://127.0.0.1:{server.port}')) == ''


def test_an_lse_is_held_to_the_roundings_of_products_that_are_added_one_after_the_other(server):
    """With D = 256 and scores of 255, rounding errors may change the lse of a right kernel by 3.6e-4."""
    assert differential.check(differential.Case(201, 4095), differential.client(f'http://127.0.0.1:{server.port}')) == ''


def test_dropout_leaves_no_gradient_to_a_row_of_one_key_in_bfloat16(server):
    assert differential.check(differential.Case(101, 5388), differential.client(f'http://127.0.0.1:{server.port}')) == ''


def with_roundings(p, dtype, out_dtype, given):
    """Returns the gradients that the simplest kernel computes: it rounds scores and lse to float32, P and dS to dtype,
    and out to out_dtype. Everything else is float64."""
    rounded = (lambda x: differential.rounded_to(x, dtype))
    single = (lambda x: differential.rounded_to(x, 'float32'))
    g = {n: np.zeros(p[n[1:]].shape) for n in ('dq', 'dk', 'dv')}
    for _, _, x in oracle.heads(p):
        z = np.where(x.sees, single(np.where(x.sees, x.z, 0)), -np.inf)
        top = np.where(x.empty, 0, np.maximum(z.max(1, initial=-np.inf), x.sink))
        lse = single(top + np.log(np.where(x.empty, 1, np.exp(z - top[:, None]).sum(1) + np.exp(x.sink - top))))
        P = np.where(x.empty[:, None], 0, np.exp(z - np.where(x.empty, 0, p['lse'][x.lse_at] if given else lse)[:, None]))
        dout, out = p['dout'][x.rows], p['out'][x.rows] if given else differential.rounded_to(rounded(P) * x.M @ x.v, out_dtype)
        delta = (dout * out).sum(1) - (p['dlse'][x.lse_at] if 'dlse' in p else 0)
        dS = rounded(P * (x.M * (dout @ x.v.T) - delta[:, None]) * x.slope)
        g['dq'][x.rows] = x.scale * dS @ x.k
        g['dk'][x.keys] += x.scale * dS.T @ x.q
        g['dv'][x.keys] += (rounded(P) * x.M).T @ dout
    return g


def test_the_bound_of_gradients_is_neither_passed_by_a_plain_kernel_nor_far_above_it():
    nearest = {}
    for number in range(150):
        case = differential.Case(SEED, number)
        p = case.problem
        if not case.back or case.extreme or case.base_2 or p['q'].size == 0 or p['k'].size == 0:
            continue
        if case.give:
            exact = oracle.forward(p)[0]
            p = {**p, 'out': differential.rounded_to(exact['out'], case.out_dtype), 'lse': differential.rounded_to(exact['lse'], 'float32')}
        want, got = oracle.backward(p), with_roundings(p, case.dtype, case.out_dtype, case.give)
        bound = bounds.of_gradients(p, case.dtype, case.out_dtype, case.give, case.exact)
        for name in got:
            error = np.abs(got[name] - want[name])
            # This term allows for probabilities below float16's normal numbers. Their relative rounding error is
            # larger.
            least = 1e-6 * np.abs(want[name]).max()
            assert (error <= bound[name] + least).all(), (number, name)
            nearest.setdefault((case.dtype, name), []).append(float((error / np.maximum(bound[name], 1e-30)).max()))
    # float32 is left out. Most of its bound allows for the rounding of products, and this simple kernel does not round
    # products.
    assert len(nearest) == 9 and all(np.median(ratios) > 0.15 for of, ratios in nearest.items() if of[0] != 'float32'), nearest


def test_what_dropout_drops_is_what_the_protocol_says(server):
    """Sends the dropout example of PROTOCOL.md, and computes its answer from the rules above the example."""
    text = open(os.path.join(os.path.dirname(__file__), '..', '..', 'proto-json', 'PROTOCOL.md')).read()
    section = text[text.index('## Dropout'):text.index('## Backward')]
    request, answer = (json.loads(block) for block in re.findall(r'```json \S+\n(.*?)```', section, re.S))
    said = np.array(answer['out']['data'], np.int64)[0, :, :, 0]  # [query, head]
    for head in range(2):
        kept = oracle.kept(request['seed'], head, 2, 16, request['dropout_p'])
        assert [int((row * 2 ** np.arange(16)).sum()) for row in kept] == list(said[:, head])
    assert server.post('/v1/attention/forward', request).json()['out'] == answer['out']


def test_the_oracles_philox_has_the_published_answers():
    for counter, key, want in (((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
                               ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
                               ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
                                (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))):
        assert tuple(int(x) for x in oracle.philox(counter, key)) == want
