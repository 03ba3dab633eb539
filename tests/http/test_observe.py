"""POST /v1/attention/observe returns what attention looks at. Every name that `observe` may contain is compared with
float64, in every format. There are also tests of caches, and of the exact text of refusals."""
import json

import numpy as np
import pytest

import formats
import ref
import service
import wire
from caches import Cache
from wire import tensor, value

OBSERVE = '/v1/attention/observe'
ROWS = ['row_max', 'lse', 'entropy', 'max_logit', 'mean_entropy', 'key_mass', 'top_keys']
ALL = ROWS + ['weights', 'map']
NUMBERS = ['pairs', 'flops_forward', 'flops_backward', 'tiles']


def problem(rng, **options):
    members, values = wire.random_problem(rng, **options)
    del members['v']
    return members, values


def cells(first, end, count):
    """Returns, for each index from `first` to `end`, the cell of the map (a coarse picture of the probabilities) that
    contains it."""
    return [(i - first) * count // (end - first) for i in range(first, end)]


def expected(p, lse, z, sinks=None, rows=None, keys=None, top=None, grid=None, mass_rows=None):
    """Returns the expected answer of an observe (statistics of attention weights) in float64. p has probabilities and
    z has scores, both [B, H, Sq, Sk]; a hidden score is -inf."""
    B, H, Sq, Sk = p.shape
    seen = np.isfinite(z)
    want = {'row_max': z.max(-1) if Sk else np.full((B, H, Sq), -np.inf), 'lse': lse}
    with np.errstate(divide='ignore', invalid='ignore'):
        entropy = -np.where(p > 0, p * (z - lse[..., None]), 0).sum(-1)
        if sinks is not None:
            s = np.asarray(sinks)[None, :, None] - lse
            entropy -= np.where(seen.any(-1), np.exp(s) * s, 0)
        entropy = np.where(seen.any(-1), entropy, 0)
        want['entropy'] = entropy
        want['max_logit'] = want['row_max'].max(-1)
        some = seen.any(-1).sum(-1)
        want['mean_entropy'] = np.where(some > 0, entropy.sum(-1) / np.maximum(some, 1), 0)
    want['key_mass'] = p[:, :, max(0, Sq - mass_rows) if mass_rows else 0:].sum(2)
    if top:
        order = np.argsort(-np.where(seen, z, -np.inf), axis=-1, kind='stable')[..., :top]
        weights = np.take_along_axis(p, order, -1)
        there = np.take_along_axis(seen, order, -1)
        pad = [(0, 0)] * 3 + [(0, top - order.shape[-1])]
        want['top_keys'] = np.pad(np.where(there, order, -1), pad, constant_values=-1)
        want['top_weights'] = np.pad(np.where(there, weights, 0), pad)
    (a, b), (c, d) = rows or (0, Sq), keys or (0, Sk)
    want['weights'] = p[:, :, a:b, c:d]
    if grid:
        want['map'] = np.zeros((B, H, *grid))
        for r, u in zip(range(a, b), cells(a, b, grid[0])):
            for j, v in zip(range(c, d), cells(c, d, grid[1])):
                want['map'][:, :, u, v] += p[:, :, r, j]
    return want


def scores(q, k, **options):
    """Returns (probabilities, lse, scores) of a problem in float64."""
    v = np.zeros((*k.shape[:3], 1))
    _, lse, (p, *_) = ref.forward(q, k, v, **options)
    shift = ref.forward(q, k, v, **{**options, 'sinks': None})
    with np.errstate(divide='ignore'):
        z = np.log(shift[2][0]) + shift[1][..., None]
    return p, lse, np.where(shift[2][0] > 0, z, -np.inf)


def agree(got, want, names):
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=5e-5, atol=1e-5, err_msg=name)


CASES = [
    {},
    {'causal': True},
    {'causal': True, 'alignment': 'top_left'},
    {'window': [7, 2]},
    {'softcap': 2.0, 'scale': 0.7},
    {'sinks': True, 'causal': True},
    {'alibi': True},
    {'mask': True},
    {'layout': 'bhsd'},
]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('case', CASES, ids=json.dumps)
def test_observables_are_those_of_float64(server, case, dtype):
    rng, case = np.random.default_rng(3), dict(case)
    plain = {n: case.pop(n) for n in ('causal', 'softcap', 'scale', 'window') if n in case}
    layout = case.pop('layout', 'bshd')
    members, x = problem(rng, B=2, Sq=33, Sk=29, H=4, Hk=2, D=16, dtype=dtype, layout=layout, **plain)
    options = {'top_left': True} if case.pop('alignment', None) else {}
    if options:
        members['alignment'] = 'top_left'
    if case.pop('sinks', None):
        options['sinks'] = rng.standard_normal(4).astype(np.float32)
        members['sinks'] = tensor(options['sinks'])
    if case.pop('alibi', None):
        options['alibi'] = np.array([0.5, 0.25, 0.125, 0.0625])
        members['alibi_slopes'] = tensor(options['alibi'])
    if case.pop('mask', None):
        keep = rng.random((2, 1, 33, 29)) < 0.5
        keep[:, :, 5] = False  # the query at index 5 sees no key
        options['mask'] = keep
        members['keep_mask'] = tensor(keep.astype(np.uint8), 'uint8')
    p, lse, z = scores(x['q'], x['k'], **plain, **options)
    want = expected(p, lse, z, options.get('sinks'), rows=(4, 31), keys=(3, 28), top=5, grid=(6, 4), mass_rows=9)
    answer = server.post(OBSERVE, {**members, 'observe': ALL, 'rows': [4, 31], 'keys': [3, 28], 'top': 5, 'map': [6, 4], 'key_mass_rows': 9})
    assert answer.status == 200, answer
    got = {n: value(t) for n, t in answer.json().items() if isinstance(t, dict) and 'data' in t}
    assert set(got) == {*ALL, 'top_weights'}
    agree(got, want, [n for n in ALL if n != 'top_keys'] + ['top_weights'])
    np.testing.assert_array_equal(got['top_keys'], want['top_keys'])


def test_the_exact_examples_of_the_contract(server):
    """The examples of PROTOCOL.md have two keys, so a probability is 1 / (1 + exp(z2 - z1)), where z1 and z2 are the
    scores."""
    members = {'q': tensor(np.array([[1, 0], [0, 1], [1, 1]], float).reshape(1, 3, 1, 2)), 'k': tensor(np.array([[1, 0], [0, 2]], float).reshape(1, 2, 1, 2)), 'scale': 1}
    a = server.post(OBSERVE, {**members, 'causal': True, 'observe': ALL + ['pairs'], 'top': 2, 'map': [1, 1]}).json()
    e = np.e / (1 + np.e)
    assert value(a['row_max']).tolist() == [[[-np.inf, 0, 2]]] and a['pairs'] == 3
    np.testing.assert_allclose(value(a['lse'])[0, 0], [-np.inf, 0, 2.313261688], rtol=1e-6)
    h = -e * np.log(e) - (1 - e) * np.log(1 - e)
    np.testing.assert_allclose(value(a['entropy'])[0, 0], [0, 0, h], rtol=1e-6)
    np.testing.assert_allclose(value(a['mean_entropy'])[0, 0], h / 2, rtol=1e-6)
    np.testing.assert_allclose(value(a['key_mass'])[0, 0], [1 + 1 - e, e], rtol=1e-6)
    assert value(a['top_keys'])[0, 0].tolist() == [[-1, -1], [0, -1], [1, 0]] and value(a['max_logit']) == 2
    np.testing.assert_allclose(value(a['map']), 2, rtol=1e-6)


@pytest.mark.parametrize('kind', ['safetensors', 'kserve', 'envelope'])
def test_every_format_has_the_same_bits(server, kind):
    members, _ = problem(np.random.default_rng(5), B=2, Sq=40, Sk=70, H=4, Hk=1, D=32, dtype='bfloat16', causal=True)
    members = {**members, 'observe': ALL, 'top': 3, 'map': [3, 5], 'keys': [10, 60]}
    status, want = formats.results(server, 'json', 'observe', members)
    assert status == 200, want
    status, got = formats.results(server, kind, 'observe', members)
    assert status == 200, got
    assert set(got) == set(want)
    for name in want:
        if kind == 'kserve':  # KServe answers in decimal text, which is rounded
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_numbers_are_told_in_every_format(server, kind):
    members, _ = problem(np.random.default_rng(5), B=2, Sq=40, Sk=70, H=4, Hk=1, D=32, causal=True)
    status, facts = formats.ask(server, kind, 'observe', {**members, 'observe': NUMBERS, 'tile_size': [16, 32], 'head_dim_v': 8})
    assert status == 200, facts
    pairs = 2 * 4 * ref.allowed(40, 70, causal=True).sum()
    assert facts['pairs'] == pairs and facts['flops_forward'] == 2 * pairs * (32 + 8) and facts['flops_backward'] == 2 * pairs * (3 * 32 + 2 * 8)
    seen, tiles = ref.allowed(40, 70, causal=True), {'skipped': 0, 'whole': 0, 'partial': 0}
    for i in range(0, 40, 16):
        for j in range(0, 70, 32):
            part = seen[i:i + 16, j:j + 32]
            tiles['skipped' if not part.any() else 'whole' if part.all() else 'partial'] += 8
    assert facts['tiles'] == {'size': [16, 32], **tiles}


def test_kserve_names_what_it_wants_among_its_outputs_too(server):
    members, _ = problem(np.random.default_rng(6), Sq=4)
    both = {**members, 'observe': ['pairs', 'entropy'], 'outputs': ['entropy', 'row_max']}
    status, got = formats.results(server, 'kserve', 'observe', both)
    assert status == 200 and set(got) == {'entropy', 'row_max'}
    assert formats.ask(server, 'kserve', 'observe', both)[1]['pairs'] == 2 * 16


def test_masks_that_are_tensors_are_counted_element_by_element(server):
    rng = np.random.default_rng(8)
    keep = (rng.random((1, 2, 20, 30)) < 0.3).astype(np.uint8)
    members, _ = problem(rng, B=3, Sq=20, Sk=30, H=2)
    a = server.post(OBSERVE, {**members, 'keep_mask': tensor(keep, 'uint8'), 'observe': ['pairs', 'tiles'], 'tile_size': [8, 8]}).json()
    assert a['pairs'] == 3 * keep.sum()
    blocks = [keep[0, h, i:i + 8, j:j + 8] for h in range(2) for i in range(0, 20, 8) for j in range(0, 30, 8)]
    assert a['tiles']['skipped'] == 3 * sum(not b.any() for b in blocks) and a['tiles']['whole'] == 3 * sum(bool(b.all()) for b in blocks)
    rows = np.array([[[[25], [3], [0], [20]] * 5]], np.int32)[:, :, :20]
    members, _ = problem(rng, B=1, Sq=20, Sk=20, H=2)
    a = server.post(OBSERVE, {**members, 'causal': True, 'mask_startend_rows': tensor(np.minimum(rows, 20), 'int32'), 'observe': ['pairs']}).json()
    assert a['pairs'] == 2 * (ref.flashmask(20, np.minimum(rows, 20), True)[0, 0] & ref.allowed(20, 20, causal=True)).sum()


def test_packed_sequences(server):
    rng = np.random.default_rng(9)
    q_lengths, k_lengths = [5, 0, 33], [9, 4, 40]
    q, k = (rng.standard_normal((sum(n), 2, 16)).astype(np.float32) for n in (q_lengths, k_lengths))
    starts = [np.cumsum([0, *n]) for n in (q_lengths, k_lengths)]
    members = {'q': tensor(q), 'k': tensor(k), 'cu_seqlens_q': tensor(starts[0], 'int32'), 'cu_seqlens_k': tensor(starts[1], 'int32'), 'causal': True}
    answer = server.post(OBSERVE, {**members, 'observe': ALL, 'sequence': 2, 'rows': [3, 30], 'top': 2, 'map': [2, 4]})
    assert answer.status == 200, answer
    got = {n: value(t) for n, t in answer.json().items() if isinstance(t, dict) and 'data' in t}
    for n in range(3):
        (q0, q1), (k0, k1) = starts[0][n:n + 2], starts[1][n:n + 2]
        p, lse, z = scores(q[None, q0:q1].astype(float), k[None, k0:k1].astype(float), causal=True)
        want = expected(p, lse, z, rows=(3, 30) if n == 2 else None, top=2, grid=(2, 4) if n == 2 else None) if q1 > q0 else {}
        for name in ('row_max', 'lse', 'entropy', 'top_weights'):
            if want:
                np.testing.assert_allclose(got[name][:, q0:q1], want[name][0], rtol=5e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(got['key_mass'][:, k0:k1], want['key_mass'][0] if want else 0, rtol=5e-5, atol=1e-5)
        np.testing.assert_allclose(got['max_logit'][n], want['max_logit'][0] if want else -np.inf, rtol=5e-5)
        if n == 2:
            for name in ('weights', 'map'):
                np.testing.assert_allclose(got[name], want[name][0], rtol=5e-5, atol=1e-5, err_msg=name)


def test_a_given_lse_makes_the_probabilities(server):
    """A request has half of the keys and the lse of all keys, so its probabilities do not sum to 1."""
    members, x = problem(np.random.default_rng(10), Sq=20, Sk=60, H=2, D=16)
    p, lse, z = scores(x['q'], x['k'])
    half = {**members, 'k': tensor(x['k'][:, :30]), 'lse': tensor(lse)}
    a = server.post(OBSERVE, {**half, 'observe': ['key_mass', 'weights']}).json()
    np.testing.assert_allclose(value(a['key_mass']), p[..., :30].sum(2), rtol=2e-5)
    np.testing.assert_allclose(value(a['weights']), p[..., :30], rtol=2e-5)


# ---- Caches ----------------------------------------------------------------------------------------------------------


def test_caches_are_looked_at_and_stay_as_they_are(server):
    rng = np.random.default_rng(11)
    caches = [Cache(server, 2, 16, dtype='float32') for _ in range(2)]
    for cache, length in zip(caches, (150, 70)):
        assert cache.append(rng, length).status == 200
    q = rng.standard_normal((2, 3, 4, 16))
    body = {'q': tensor(q), 'caches': [c.id for c in caches], 'causal': True, 'observe': ALL + ['pairs'], 'top': 4, 'map': [1, 5]}
    answer = server.post(OBSERVE, body)
    assert answer.status == 200, answer
    told = answer.json()
    assert told['lengths'] == [150, 70] and told['sizes']['Sk'] == 150 and 'Dv' not in told['sizes']
    got = {n: value(t) for n, t in told.items() if isinstance(t, dict) and 'data' in t}
    assert got['key_mass'].shape == (2, 4, 150) and got['weights'].shape == (2, 4, 3, 150)
    pairs = 0
    for b, cache in enumerate(caches):
        k = np.asarray(cache.k, float)[None]
        p, lse, z = scores(wire.rounded(q[b:b + 1], 'float32'), k, causal=True)
        want = expected(p, lse, z, top=4)
        for name in ('row_max', 'lse', 'entropy', 'max_logit', 'top_keys'):
            np.testing.assert_allclose(got[name][b], want[name][0], rtol=5e-5, atol=1e-5, err_msg=name)
        for name in ('key_mass', 'weights'):
            np.testing.assert_allclose(got[name][b][..., :k.shape[1]], want[name][0], rtol=5e-5, atol=1e-5, err_msg=name)
            assert not got[name][b][..., k.shape[1]:].any()
        pairs += 4 * ref.allowed(3, k.shape[1], causal=True).sum()
    assert told['pairs'] == pairs
    assert server.post(OBSERVE, body).json()['lengths'] == [150, 70]
    status, tensors = formats.results(server, 'kserve', 'observe', body)
    assert status == 200, tensors
    np.testing.assert_allclose(tensors['key_mass'], got['key_mass'], rtol=1e-6)
    for cache in caches:
        assert cache.ask('DELETE').status == 204


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_a_device_with_memory_of_its_own_has_the_same_bits(server, serve, kind):
    """The fake device has memory of its own, and copies every input and output. It computes as the CPU does, so the
    bits must be the same."""
    other = serve(binary=service.FAKE, env={'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': ''})
    members, _ = problem(np.random.default_rng(15), B=2, Sq=50, Sk=90, H=4, Hk=2, D=24, dtype='float16', causal=True)
    members = {**members, 'observe': ALL + ['pairs'], 'top': 3, 'map': [3, 5], 'rows': [10, 40]}
    (status, want), (there, got) = (formats.results(s, kind, 'observe', members) for s in (server, other))
    assert status == there == 200 and set(want) == set(got) == {*ALL, 'top_weights'}
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    rng = np.random.default_rng(16)
    cache = Cache(other, 2, 16, dtype='float32')
    assert cache.append(rng, 200).status == 200
    q = rng.standard_normal((1, 1, 4, 16))
    told = other.post(OBSERVE, {'q': tensor(q), 'caches': [cache.id], 'observe': ['key_mass', 'pairs']}).json()
    p, *_ = scores(wire.rounded(q, 'float32'), np.asarray(cache.k, float)[None])
    np.testing.assert_allclose(value(told['key_mass']), p.sum(2), rtol=5e-5, atol=1e-6)
    assert told['pairs'] == 4 * 200


# ---- Refusals --------------------------------------------------------------------------------------------------------

SAYS = [
    ({'observe': None}, '/observe', 'observe: is missing, must name what is wanted, such as ["entropy", "key_mass"]'),
    ({'observe': []}, '/observe', 'observe: is empty, must name lse, row_max, entropy, max_logit, mean_entropy, key_mass, top_keys, top_weights, weights, map, pairs, flops_forward, flops_backward or tiles'),
    ({'observe': ['entropi']}, '/observe/0', "observe: [0] is 'entropi', must be lse, row_max, entropy, max_logit, mean_entropy, key_mass, top_keys, top_weights, weights, map, pairs, flops_forward, flops_backward or tiles, did you mean 'entropy'?"),
    ({'observe': ['entropy', 'entropy']}, '/observe/1', "observe: [1] names 'entropy' a second time"),
    ({'observe': ['top_keys']}, '/top', 'top: is missing, must be between 1 and 64 with top_keys'),
    ({'observe': ['top_keys'], 'top': 65}, '/top', 'top: is 65, must be an integer from 1 to 64'),
    ({'observe': ['lse'], 'top': 3}, '/top', 'top: belongs to top_keys, which observe does not name'),
    ({'observe': ['map']}, '/map', 'map: is missing, must be [cells of queries, cells of keys], each between 1 and 1024'),
    ({'observe': ['map'], 'map': [0, 4]}, '/map/0', 'map: [0] is 0, must be an integer from 1 to 1024'),
    ({'observe': ['map'], 'map': 4}, '/map', 'map: is 4, must be [cells of queries, cells of keys]'),
    ({'observe': ['map'], 'map': [4]}, '/map', 'map: has 1 element, must have 2: [cells of queries, cells of keys]'),
    ({'observe': ['weights'], 'rows': [2, 1]}, '/rows/1', 'rows: [1] is 1, must be between 2 and 5, the queries of q'),
    ({'observe': ['weights'], 'keys': [0, 6]}, '/keys/1', 'keys: [1] is 6, must be between 0 and 5, the keys of k'),
    ({'observe': ['lse'], 'keys': [0, 3]}, '/keys', 'keys: belongs to weights and map, which observe does not name'),
    ({'observe': ['pairs'], 'tile_size': [8, 8]}, '/tile_size', 'tile_size: belongs to tiles, which observe does not name'),
    ({'observe': ['tiles']}, '/tile_size', 'tile_size: is missing, must be [queries, keys] of a tile with tiles'),
    ({'observe': ['lse'], 'lse': tensor(np.zeros((1, 2, 5)))}, '/lse', 'lse: is given, and cannot be asked for beside that'),
    ({'observe': ['lse'], 'sequence': 0}, '/sequence', 'sequence: belongs to packed sequences, cu_seqlens_q'),
    ({'observe': ['lse'], 'v': tensor(np.zeros((1, 5, 2, 8)))}, '/v', 'v: belongs to forward, POST /v1/attention/forward; leave it out, an observe needs q and k alone'),
    ({'observe': ['lse'], 'caches': ['a']}, '/k', 'k: cannot stand beside caches, whose keys and lengths are looked at'),
    ({'observe': ['lse'], 'k': None}, '/k', 'k: is required; an observe has q and k'),
]


@pytest.mark.parametrize('change, pointer, words', SAYS, ids=[f'{p} {n}' for n, (_, p, _) in enumerate(SAYS)])
def test_refusals_say_what_is_wrong(server, change, pointer, words):
    members, _ = problem(np.random.default_rng(12))
    body = {n: m for n, m in {**members, **change}.items() if m is not None}
    answer = server.post(OBSERVE, body)
    assert answer.status == 400, answer
    assert answer.json()['detail'] == words
    assert answer.json()['pointer'] == pointer


def test_too_many_weights_are_refused_and_name_the_way_out(server):
    members, _ = problem(np.random.default_rng(12), Sq=3000, Sk=3000, H=2, D=1)
    answer = server.post(OBSERVE, {**members, 'observe': ['weights']})
    assert answer.status == 413 and answer.json()['detail'].startswith('observe: weights of 3000 rows and 3000 keys are 18000000 numbers, at most 16777216 are answered; give')
    assert server.post(OBSERVE, {**members, 'observe': ['weights'], 'rows': [0, 10]}).status == 200


def test_one_problem_of_several_may_be_wrong(server):
    members, _ = problem(np.random.default_rng(13))
    good = {**members, 'observe': ['entropy', 'pairs']}
    told = server.post(OBSERVE, {'requests': [good, {**good, 'observe': ['x']}, {**good, 'caches': ['a'], 'k': None}, good]}).json()['responses']
    assert told[0] == {**told[3], 'timing_us': told[0]['timing_us'], 'backend': told[0]['backend']} and told[0]['pairs'] == 50
    assert told[1]['error']['status'] == 400 and told[1]['error']['pointer'] == '/requests/1/observe/0'


def test_counting_that_takes_too_long_is_refused_at_once(serve):
    server = serve('--max-seconds', '1')
    rows = np.full((1, 1, 2000, 1), 2000, np.int32)
    q = np.zeros((1, 2000, 1, 1))
    body = {'q': tensor(q), 'k': tensor(q), 'causal': True, 'mask_startend_rows': tensor(rows, 'int32'), 'observe': ['tiles'], 'tile_size': [1, 1]}
    assert server.post(OBSERVE, body).json()['tiles']['whole'] == 2000 * 2001 // 2
    long = {**body, 'q': tensor(np.zeros((1, 10 ** 6, 1, 1))), 'mask_startend_rows': tensor(rows * 500, 'int32')}
    answer = server.post(OBSERVE, long)
    assert answer.status == 422 and 'this is expected to take' in answer.json()['detail'], answer


def test_a_request_is_counted_and_named_as_an_observe(server):
    members, _ = problem(np.random.default_rng(14))
    before = server.metric('attnd_requests_total', endpoint='observe', status='200') or 0
    assert server.post(OBSERVE, {**members, 'observe': ['lse']}).status == 200
    assert server.metric('attnd_requests_total', endpoint='observe', status='200') == before + 1
    assert 'observe' in server.get('/v1/info').json()['features']['cpu']
