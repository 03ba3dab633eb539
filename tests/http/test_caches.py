"""Caches are keys and values that stay on the server. Every answer is compared with a model in NumPy (caches.py), on
the CPU and on a device with memory of its own (attnd-fake). Other tests in this file cover who may use a cache, what a
failed step leaves behind, a full pool of pages, concurrent requests, and restarts."""
import concurrent.futures
import json
import os
import signal
import subprocess
import threading

import numpy as np
import pytest

import service
import wire
from caches import CACHES, DECODE, Cache, Gone, assert_close, assert_right, attention, bits, decode, walk
from service import eventually
from test_safetensors import MEDIA, read, write
from under_way import GUESTS

ALICE, BOB = {'Authorization': 'Bearer alice'}, {'Authorization': 'Bearer bob'}


READS_STAGING = {'ATTN_FAKE_READS_STAGING': '1'}


@pytest.fixture(params=['cpu', 'fake', 'moves'])
def anywhere(request, serve):
    """Runs a test on three kinds of devices: one that computes in staging memory (the memory of request bodies), one
    that copies tensors to its own memory, and one whose kernels copy small tensors."""
    def start(*options, **more):
        if request.param != 'cpu':
            env = {'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': '', **(READS_STAGING if request.param == 'moves' else {})}
            more = {'binary': service.FAKE, 'env': env, **more}
        return serve('--cpu-threads', 2, *options, **more)
    return start


@pytest.fixture
def rng():
    return np.random.default_rng(20261123)


# ---- Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.limit(120)
# These three seeds choose the three dtypes of caches. A walk of a hundred operations contains every kind of operation.
@pytest.mark.parametrize('seed', [20261103, 20261104, 20261105])
def test_a_random_walk_is_what_its_model_is(anywhere, seed):
    done = walk(anywhere('--kv-bytes', '8M'), 200 if service.SLOWER == 1 else 100, seed)
    assert set(done) == {'create', 'append', 'decode', 'step', 'fork', 'truncate', 'delete', 'get', 'pause', 'expired'} and done['expired'], done


@pytest.mark.limit(240)
def test_a_long_random_walk_is_what_its_model_is(anywhere, request):
    """The seed chooses the dtype, so each kind of device is tested with another dtype. The test takes 15 s per device
    on two cores."""
    seed = ['cpu', 'fake', 'moves'].index(request.node.callspec.params['anywhere'])
    done = walk(anywhere('--kv-bytes', '8M'), 10000 if service.SLOWER == 1 else 300, seed)
    assert done['expired'], done


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_the_half_precision_dtypes(server, rng, dtype):
    cache = Cache(server, kv_heads=2, head_dim=64, dtype=dtype, page_size=128)
    cache.append(rng, 300)
    for Sq in 1, 7:
        assert_right(*decode([cache], rng.standard_normal((1, Sq, 8, 64)), [cache.new(rng, Sq)], causal=True), [cache])
    cache.delete()


@pytest.mark.parametrize('q_dtype', ['float32', 'float16', 'bfloat16'])
def test_float8_caches_with_a_scale_per_head(anywhere, rng, q_dtype):
    """A float8 cache must need half the memory. A value is the stored number times the scale of its head; out has the
    dtype of q."""
    server = anywhere('--kv-bytes', '1M')
    k_scale, v_scale = np.array([0.5, 2.0]), np.array([0.25, 1.5])
    caches = [Cache(server, dtype='float8_e4m3fn', head_dim=16, k_scale=list(k_scale), v_scale=list(v_scale)) for _ in range(2)]
    for cache, length in zip(caches, [150, 7]):
        assert cache.append(rng, length).status == 200
    q, new = rng.standard_normal((2, 3, 4, 16)), [c.new(rng, 3) for c in caches]
    body = {'q': wire.tensor(q, q_dtype), 'caches': [c.id for c in caches], 'causal': True}
    body['k'], body['v'] = (wire.tensor(np.stack([pair[i] for pair in new]), 'float8_e4m3fn') for i in (0, 1))
    answer = server.post(DECODE, body)
    assert answer.status == 200 and answer.json()['out']['dtype'] == q_dtype, answer
    for b, (cache, pair) in enumerate(zip(caches, new)):
        cache.grow(*pair)
        want, _ = attention(wire.rounded(q, q_dtype)[b], cache.k * k_scale[:, None], cache.v * v_scale[:, None], causal=True)
        assert_close(wire.value(answer.json()['out'])[b], want, 'float16' if q_dtype == 'float32' else q_dtype)


@pytest.mark.parametrize('one, other, says', [
    ({'k_scale': [1]}, {'v_scale': [1]}, '[1] has v_scale alone, [0] has k_scale alone'),
    ({'k_scale': [1], 'v_scale': [1]}, {}, '[1] has neither k_scale nor v_scale, [0] has k_scale and v_scale'),
])
def test_who_names_caches_with_other_scales_is_told_which_has_which(server, one, other, says):
    caches = [Cache(server, dtype='float8_e4m3fn', kv_heads=1, head_dim=16, **scales) for scales in (one, other)]
    answer = server.post(DECODE, {'q': wire.tensor(np.zeros((2, 1, 1, 16))), 'caches': [c.id for c in caches]})
    assert answer.status == 400 and answer.json()['pointer'] == '/caches/1', answer
    assert answer.json()['detail'] == f'caches: {says}; one request takes caches that have the same of them', answer
    for cache in caches:
        cache.delete()


@pytest.mark.parametrize('scales, pointer, says', [
    ({'k_scale': [0.5, 2]}, '/v_scale', 'v_scale: is missing, must be the same as k_scale'),
    ({'v_scale': [0.5, 2]}, '/k_scale', 'k_scale: is missing, must be the same as v_scale'),
    ({'k_scale': [0.5, 2], 'v_scale': [0.5, 3]}, '/v_scale/1', 'v_scale: [1] is 3, must be 2 as in k_scale'),
])
def test_a_latent_cache_has_one_scale_for_what_is_key_and_value(server, scales, pointer, says):
    shape = {'kv_heads': 2, 'head_dim': 16, 'head_dim_v': 8, 'dtype': 'float8_e4m3fn'}
    answer = server.post(CACHES, {**shape, 'latent': True, **scales})
    assert answer.status == 400 and answer.json()['pointer'] == pointer, answer
    assert answer.json()['detail'] == f'{says}: values of a latent cache are the first numbers of its keys', answer
    assert server.post(CACHES, {**shape, **scales}).status == 201


def test_the_values_of_a_latent_float8_cache_have_the_scale_of_its_keys(anywhere, rng):
    server = anywhere('--kv-bytes', '1M')
    scale = np.array([0.5, 2.0])
    cache = Cache(server, kv_heads=2, head_dim=16, head_dim_v=8, dtype='float8_e4m3fn', latent=True, k_scale=list(scale), v_scale=list(scale))
    k = wire.rounded(rng.standard_normal((70, 2, 16)), 'float8_e4m3fn')
    assert server.post(cache.path('/append'), {'k': wire.tensor(k, 'float8_e4m3fn')}).status == 200
    q = wire.rounded(rng.standard_normal((1, 2, 4, 16)), 'float16')
    answer = server.post(DECODE, {'q': wire.tensor(q, 'float16'), 'caches': [cache.id]})
    keys = k * scale[:, None]
    want, _ = attention(q[0], keys, keys[..., :8])
    assert answer.status == 200, answer
    assert_close(wire.value(answer.json()['out'])[0], want, 'float16')


def test_latent_caches_have_one_tensor_for_keys_and_values(anywhere, rng):
    """Multi-head Latent Attention: all queries share one head of K, and V is the first columns of each key."""
    server = anywhere('--kv-bytes', '4M')
    cache = Cache(server, kv_heads=1, head_dim=576, head_dim_v=512, latent=True)
    k = wire.rounded(rng.standard_normal((200, 1, 576)), 'float32')
    answer = server.post(cache.path('/append'), {'k': wire.tensor(k)})
    assert answer.status == 200 and answer.json()['lengths'] == [200], answer
    q, new = rng.standard_normal((1, 2, 16, 576)), wire.rounded(rng.standard_normal((1, 2, 1, 576)), 'float32')
    answer = server.post(DECODE, {'q': wire.tensor(q), 'caches': [cache.id], 'k': wire.tensor(new), 'causal': True})
    k = np.concatenate([k, new[0]])
    want, _ = attention(wire.rounded(q, 'float32')[0], k, k[..., :512], causal=True)
    assert answer.status == 200 and answer.json()['out']['shape'] == [1, 2, 16, 512], answer
    assert_close(wire.value(answer.json()['out'])[0], want, 'float32')
    # a page of this cache holds keys only, and no values
    assert cache.info()['page_bytes'] == -(-64 * 576 * 4 // 4096) * 4096
    answer = server.post(cache.path('/append'), {'k': wire.tensor(k[:1]), 'v': wire.tensor(k[:1, :, :512])})
    assert answer.status == 400 and 'part of its keys' in answer.json()['detail'], answer


def test_heads_of_1024_numbers(server, rng):
    cache = Cache(server, kv_heads=1, head_dim=1024, head_dim_v=700)
    k, v = (wire.rounded(rng.standard_normal((70, 1, n)), 'float32') for n in (1024, 700))
    answer = server.post(cache.path('/append'), {'k': wire.tensor(k), 'v': wire.tensor(v)})
    assert answer.status == 200, answer
    q = wire.rounded(rng.standard_normal((1, 2, 2, 1024)), 'float32')
    answer = server.post(DECODE, {'q': wire.tensor(q), 'caches': [cache.id], 'causal': True})
    assert answer.status == 200, answer
    assert_close(wire.value(answer.json()['out'])[0], attention(q[0], k, v, causal=True)[0], 'float32')
    cache.delete()
    for name, size in (('head_dim', 1025), ('head_dim_v', 1025)):
        refused = server.post('/v1/caches', {'kv_heads': 1, 'head_dim': 8, 'dtype': 'float32', name: size})
        assert refused.status == 400 and refused.json()['pointer'] == f'/{name}' and '1024' in refused.json()['detail'], refused


def test_an_empty_cache_is_attended_to_by_nobody(server, rng):
    cache = Cache(server)
    answer, want = decode([cache], rng.standard_normal((1, 2, 4, 8)))
    assert_right(answer, want, [cache])
    assert np.all(wire.value(answer.json()['out']) == 0)
    assert_right(*decode([cache], rng.standard_normal((1, 2, 4, 8)), [cache.new(rng, 2)], causal=True), [cache])
    cache.delete()


def test_rows_of_different_lengths_and_more_keys_than_queries(server, rng):
    caches = [Cache(server) for _ in range(5)]
    for cache, length in zip(caches, [0, 1, 63, 64, 200]):
        if length:
            cache.append(rng, length)
    new = [c.new(rng, 70) for c in caches]  # a prompt of 70 positions, of which only the last queries are computed
    assert_right(*decode(caches, rng.standard_normal((5, 3, 4, 8)), new, causal=True), caches)
    for cache in caches:
        cache.delete()


def test_a_tree_of_guesses_is_verified_by_a_mask_of_the_last_keys(anywhere, rng):
    """Speculative decoding with five guessed tokens that branch after the first. Each guess sees the cache, its
    ancestors and itself."""
    caches = [Cache(anywhere('--kv-bytes', '1M'))]
    caches.append(Cache(caches[0].server))
    for cache, length in zip(caches, [100, 37]):
        cache.append(rng, length)
    parents = [None, 0, 1, 0, 3]
    tree = np.zeros((1, 1, 5, 5))
    for i in range(5):
        at = i
        while at is not None:
            tree[0, 0, i, at] = 1
            at = parents[at]
    assert_right(*decode(caches, rng.standard_normal((2, 5, 4, 8)), [c.new(rng, 5) for c in caches], keep=tree), caches)
    each = np.stack([tree[0], np.tril(np.ones((1, 5, 5)))])  # each batch row has a mask of its own
    assert_right(*decode(caches, rng.standard_normal((2, 5, 4, 8)), keep=each), caches)
    # this mask is longer than the second row's cache; its entries before the first key have no effect
    longer = (rng.random((1, 4, 1, 43)) < .5).astype(float)
    assert_right(*decode(caches, rng.standard_normal((2, 1, 4, 8)), keep=longer), caches)
    answer, _ = decode(caches, rng.standard_normal((2, 1, 4, 8)), keep=np.ones((1, 1, 1, 129)))
    assert answer.status == 400 and answer.json()['pointer'].startswith('/keep_mask'), answer


def test_a_row_has_the_bits_that_it_has_alone(server, rng):
    caches = [Cache(server, kv_heads=2, head_dim=64, dtype='float16', page_size=128) for _ in range(4)]
    for cache, length in zip(caches, [5, 700, 1300, 128]):
        cache.append(rng, length)
    forked = caches[2].fork()
    rows = [*caches, forked]
    q = rng.standard_normal((5, 1, 8, 64))
    q[4] = q[2]
    together = decode(rows, q)[0].json()
    out, lse = wire.value(together['out']), wire.value(together['lse'])
    for b, cache in enumerate(rows):
        alone = decode([cache], q[b:b + 1])[0].json()
        assert np.array_equal(wire.value(alone['out'])[0], out[b]) and np.array_equal(wire.value(alone['lse'])[0], lse[b]), b
    # both batch rows have read the same shared pages, so they have the same results
    assert np.array_equal(out[2], out[4])
    for cache in rows:
        cache.delete()


def test_a_cache_gives_the_bits_that_sending_the_keys_gives(server, rng):
    cache = Cache(server, kv_heads=2, head_dim=64, dtype='float16')
    cache.append(rng, 500)
    q = rng.standard_normal((1, 1, 8, 64))
    sent = server.forward(q=wire.tensor(q, 'float16'), k=wire.tensor(cache.k[None], 'float16'), v=wire.tensor(cache.v[None], 'float16'))
    assert bits(sent) == bits(decode([cache], q)[0])
    cache.delete()


# ---- Formats ---------------------------------------------------------------------------------------------------------


def of_all(form, q, ids):
    """Returns (path, body, headers) of a decode in one format, with JSON as Python's json.dumps() writes it."""
    if form == 'json':
        return DECODE, json.dumps({'q': wire.tensor(q), 'caches': ids}).encode(), {'Content-Type': 'application/json'}
    if form == 'safetensors':
        return DECODE, write({'q': wire.tensor(q)}, {'caches': json.dumps(ids)}), {'Content-Type': MEDIA}
    parameters = {'caches': json.dumps(ids), 'binary_data_output': True}
    head = json.dumps({'inputs': [{'name': 'q', 'shape': q.shape, 'datatype': 'FP32', 'parameters': {'binary_data_size': q.nbytes}}],
                       'parameters': parameters}).encode()
    return '/v2/models/attention_decode/infer', head + q.tobytes(), {'Inference-Header-Content-Length': str(len(head))}


@pytest.mark.limit(120)
@pytest.mark.parametrize('form', ['json', 'safetensors', 'kserve'])
def test_as_many_caches_as_a_step_takes_can_be_named_in_every_format(serve, rng, form):
    server = serve('--kv-bytes', '16M')
    most = 1024
    caches = [Cache(server, kv_heads=1, head_dim=8) for _ in range(3)]
    for cache in caches:
        cache.append(rng, 5)
    ids = [caches[i % 3].id for i in range(most)]
    q = rng.standard_normal((most + 1, 1, 1, 8)).astype('float32')
    path, body, headers = of_all(form, q[:most], ids)
    answer = server.ask('POST', path, body, headers)
    assert answer.status == 200, answer
    path, body, headers = of_all(form, q, ids + [caches[0].id])
    answer = server.ask('POST', path, body, headers)
    assert answer.status == 413 and answer.json()['detail'] == 'caches: has 1025 ids, must have 1 to 1024', answer


def test_a_cache_of_as_many_heads_as_there_may_be_has_scales_for_all(serve, rng):
    server = serve('--kv-bytes', '64M')
    scales = [float(x) for x in np.exp(rng.uniform(-80, -70, 1024))]
    body = {'kv_heads': 1024, 'head_dim': 16, 'dtype': 'float8_e4m3fn', 'page_size': 64, 'k_scale': scales, 'v_scale': scales}
    assert len(json.dumps(body)) > 45 << 10
    answer = server.post(CACHES, body)
    assert answer.status == 201, answer
    more = server.post(CACHES, {**body, 'k_scale': scales + [1.5]})
    assert more.status == 400 and more.json()['detail'] == 'k_scale: has 1025 numbers, must have 1 to 1024, one for each of kv_heads', more


def test_one_scale_is_that_of_every_head(server, rng):
    shape = {'dtype': 'float8_e4m3fn', 'head_dim': 16}
    one, each = Cache(server, k_scale=0.5, v_scale=2, **shape), Cache(server, k_scale=[0.5, 0.5], v_scale=[2, 2], **shape)
    k, v = one.new(rng, 70)
    q = wire.tensor(rng.standard_normal((1, 1, 4, 16)).astype('float32'))
    answers = []
    for cache in (one, each):
        assert server.post(cache.path('/append'), {'k': wire.tensor(k, 'float8_e4m3fn'), 'v': wire.tensor(v, 'float8_e4m3fn')}).status == 200
        answer = server.post(DECODE, {'q': q, 'caches': [cache.id]})
        assert answer.status == 200, answer
        answers.append(answer.json()['out'])
    assert answers[0] == answers[1]


def test_safetensors_append_and_decode(server, rng):
    cache = Cache(server)
    k, v = cache.new(rng, 100)
    body = write({'k': wire.tensor(k), 'v': wire.tensor(v)})
    answer = server.post(cache.path('/append'), body, {'Content-Type': MEDIA, 'Accept': 'application/json'})
    assert answer.status == 200 and answer.json()['lengths'] == [100], answer
    cache.grow(k, v)
    q = rng.standard_normal((1, 3, 4, 8))
    body = write({'q': wire.tensor(q)}, {'caches': json.dumps([cache.id]), 'causal': 'true'})
    answer = server.post(DECODE, body, {'Content-Type': MEDIA})
    assert answer.status == 200 and answer.headers['content-type'] == MEDIA, answer
    tensors, facts = read(answer.body)
    assert facts['lengths'] == [100]
    out = np.frombuffer(tensors['out'][2], np.float32).reshape(tensors['out'][1])
    assert np.allclose(out[0], attention(wire.rounded(q, 'float32')[0], cache.k, cache.v, causal=True)[0], atol=1e-5)
    cache.delete()


# ---- Whose -----------------------------------------------------------------------------------------------------------


def test_a_cache_is_its_tokens_alone(serve, tmp_path, rng):
    (tmp_path / 'tokens').write_text('alice\nbob\n')
    server = serve('--token-file', tmp_path / 'tokens')
    server.page_headers = ALICE
    cache = Cache(server, headers=ALICE)
    cache.append(rng, 10)
    asked = [server.get(cache.path(), BOB), server.ask('DELETE', cache.path(), headers=BOB), server.post(cache.path('/fork'), {}, BOB),
             server.post(cache.path('/truncate'), {'length': 0}, BOB), decode([cache], np.zeros((1, 1, 4, 8)), headers=BOB)[0],
             server.post(cache.path('/append'), {'k': wire.tensor(np.zeros((1, 2, 8))), 'v': wire.tensor(np.zeros((1, 2, 8)))}, BOB)]
    assert [a.status for a in asked] == [404] * 6, asked
    unknown = server.get(f'{CACHES}/{cache.id[:-1]}{"0" if cache.id[-1] != "0" else "1"}', BOB)
    assert {**unknown.json(), 'request_id': ''} == {**asked[0].json(), 'request_id': ''}
    assert server.get(CACHES, BOB).json() == {'count': 0, 'caches': []}
    assert [c['id'] for c in server.get(CACHES, ALICE).json()['caches']] == [cache.id]
    assert server.get(cache.path()).status == 401
    assert_right(*decode([cache], np.ones((1, 1, 4, 8))), [cache])


def test_caches_of_a_token_that_is_taken_out_are_gone(serve, tmp_path, rng):
    """When a token is removed, its caches are deleted. Otherwise no client could delete them until their lifetime ends,
    up to seven days later."""
    tokens = tmp_path / 'tokens'
    tokens.write_text('alice\nbob\n')
    server = serve('--token-file', tokens, '--kv-bytes', '1M')
    mine, other = Cache(server, headers=ALICE, ttl_s=604800), Cache(server, headers=BOB)
    assert mine.append(rng, 100).status == other.append(rng, 100).status == 200

    server.page_headers = BOB

    def there():
        return server.metric('attnd_caches'), server.metric('attnd_cache_pages', kind='all')
    assert there() == (2, 4)
    tokens.write_text('bob\n')
    os.kill(server.pid, signal.SIGHUP)
    assert eventually(lambda: there() == (1, 2))
    assert server.get(mine.path(), ALICE).status == 401
    assert other.append(rng, 100).status == 200 and there() == (1, 4)


def test_an_append_speaks_of_the_cache_that_its_path_names(server, rng):
    """The body of an append has no member `caches`. The error therefore names the cache in the path instead of a member
    of the body."""
    cache = Cache(server)
    assert server.ask('DELETE', cache.path()).status == 204
    answer = cache.append(rng, 1)
    assert answer.status == 404 and answer.json()['error'].startswith('this cache is unknown') and not answer.json().get('pointer'), answer


def test_ids_are_neither_in_the_log_nor_in_the_metrics(serve, rng):
    """Without tokens, any client that knows the id of a cache can read it. The log therefore shows only the first
    characters of an id."""
    for options in ((), ('--log-format', 'json')):
        server = serve('--log-level', 'debug', '--kv-bytes', '1M', *options)
        cache = Cache(server)
        assert cache.append(rng, 3).status == 200
        other = cache.fork(2)
        decode([cache, other], np.ones((2, 1, 4, 8)))
        for method, path, status in (('GET', '', 200), ('POST', '/apend', 404), ('GET', '0' * 200, 404), ('PUT', '', 405), ('GET', f'/%61{cache.id.upper()}', 404),
                                     ('POST', '/truncate', 400), ('DELETE', '', 204), ('DELETE', '', 404)):
            answer = server.ask(method, cache.path(path), b'{' if method == 'POST' else b'')
            assert answer.status == status, (method, path, answer)
        metrics = server.get('/metrics').body.decode()
        assert eventually(lambda: 'method=DELETE' in server.log() or '"DELETE"' in server.log())
        server.stop()
        log = server.log()
        for id_ in (cache.id, other.id):
            assert f'/v1/caches/{cache.id[:12]}...' in log
            for text in (log.lower(), metrics):
                assert id_[:14] not in text and id_[12:26] not in text and id_[-14:] not in text, text


def test_a_token_has_its_share_of_the_pool(serve, tmp_path, rng):
    (tmp_path / 'tokens').write_text('alice\nbob\n')
    server = serve('--token-file', tmp_path / 'tokens', '--kv-bytes', '1M', '--token-share', 50)
    # a page holds 64 positions and takes 8 KiB; a client's token may hold half of the pool of 1 MiB, which is 64 pages
    mine, theirs = Cache(server, headers=ALICE), Cache(server, headers=BOB)
    assert mine.append(rng, 64 * 64).status == 200
    answer = mine.append(rng, 1)
    assert answer.status == 429 and answer.headers['retry-after'], answer
    assert answer.json()['detail'] == ("this token's caches hold 524288 bytes of pages and may hold 524288 (--token-share), this request needs 8192 more; "
                                       'delete or truncate caches'), answer
    assert theirs.append(rng, 64 * 64).status == 200
    mine.truncate(64 * 64 - 1)
    assert mine.append(rng, 1).status == 200
    mine.truncate(0)
    answer = mine.append(rng, 64 * 64 + 1)  # this token uses no memory that it could free, so waiting would not help
    assert answer.status == 413 and 'retry-after' not in answer.headers, answer
    assert answer.json()['detail'] == 'this request needs 532480 bytes of pages, this token may have 524288 in all (--token-share)'


def test_a_token_has_its_share_of_all_gpus_together(serve, tmp_path, rng):
    """The limit of each token is computed from the pools of all GPUs. In an earlier version it was half of that: it
    came from the first GPU's pool, but pages on both GPUs counted."""
    (tmp_path / 'tokens').write_text('alice\nbob\n')
    server = serve('--token-file', tmp_path / 'tokens', '--kv-bytes', '1M', '--token-share', 50, '--cpu-threads', 1, binary=service.FAKE,
                   env={'ATTN_FAKE_DEVICES': '2', 'ATTN_FAKE_SCRIPT': ''})
    for headers in ALICE, BOB:
        on = [Cache(server, headers=headers) for _ in range(2)]
        assert {c.info()['device'] for c in on} == {'fake:0', 'fake:1'}
        for cache in on:
            assert cache.append(rng, 64 * 64).status == 200
        answer = on[0].append(rng, 1)
        assert answer.status == 429 and 'hold 1048576 bytes of pages and may hold 1048576 (--token-share)' in answer.json()['detail'], answer


def test_caches_that_are_made_before_they_are_filled_fill_all_gpus(serve, rng):
    """Servers of language models create caches before they fill them. Such caches must be spread over the GPUs. In an
    earlier version all of them were on the first GPU, and appends failed with status 507 while three quarters of the
    memory was free."""
    server = serve('--kv-bytes', '1M', '--cpu-threads', 1, binary=service.FAKE, env={'ATTN_FAKE_DEVICES': '4', 'ATTN_FAKE_SCRIPT': ''})
    caches = [Cache(server) for _ in range(64)]
    for cache in caches:
        assert cache.append(rng, 192).status == 200
    devices = [c.info()['device'] for c in caches]
    assert [devices.count(f'fake:{i}') for i in range(4)] == [16] * 4


def test_an_id_of_before_a_restart_is_known_as_such(serve, rng):
    first = serve()
    cache = Cache(first)
    cache.append(rng, 3)
    second = serve()
    answer = second.get(cache.path())
    assert answer.status == 404 and 'another process of attnd, before a restart or elsewhere' in answer.json()['detail'], answer
    assert second.metric('attnd_cache_ends_total', why='lost') == 1
    assert 'unknown, deleted or expired' in first.get(CACHES + '/nonsense').json()['detail']


@pytest.mark.limit(90)
def test_a_server_that_is_killed_in_the_middle_never_shows_stale_bytes(serve, rng):
    """After the server process was killed, the supervisor starts a new one. The new process has none of the old
    process's caches, and must hand out cleared pages."""
    server = serve('--supervise', '--kv-bytes', '1M')
    cache = Cache(server)
    cache.append(rng, 500)
    child = int(open(f'/proc/{server.pid}/task/{server.pid}/children').read().split()[0])
    os.kill(child, signal.SIGKILL)

    def answers():
        try:
            return server.get(cache.path()).status
        except OSError:
            return None
    assert eventually(lambda: answers() == 404, seconds=30)
    fresh = Cache(server)
    assert_right(*decode([fresh], rng.standard_normal((1, 1, 4, 8)), [fresh.new(rng, 1)]), [fresh])
    assert decode([cache], np.zeros((1, 1, 4, 8)))[0].status == 404


# ---- Bounds ----------------------------------------------------------------------------------------------------------


def test_a_full_pool_answers_507_and_loses_nothing(anywhere, rng):
    server = anywhere('--kv-bytes', '256K')  # the pool has 32 pages of 64 positions each
    a, b = Cache(server), Cache(server)
    assert a.append(rng, 20 * 64).status == 200
    assert b.append(rng, 10 * 64).status == 200
    # Each cache needs two more pages, but in all only two pages are free.
    answer, _ = decode([a, b], rng.standard_normal((2, 1, 4, 8)), [c.new(rng, 100) for c in (a, b)])
    assert answer.status == 507 and answer.json()['code'] == 'storage-full', answer
    assert '--kv-bytes' in answer.json()['detail']
    assert [a.info()['length'], b.info()['length']] == [20 * 64, 10 * 64]
    assert server.metric('attnd_cache_pages', kind='all') == 30
    assert_right(*decode([a, b], rng.standard_normal((2, 1, 4, 8)), [c.new(rng, 64) for c in (a, b)]), [a, b])
    assert b.append(rng, 1).status == 507
    a.delete()
    assert b.append(rng, 1).status == 200
    assert_right(*decode([b], rng.standard_normal((1, 1, 4, 8))), [b])


def test_what_no_pool_can_hold_is_413(anywhere, rng):
    """A cache that no pool can hold must be refused with 413. In an earlier version the answer was 507 with "1048576 of
    1048576 bytes are in pages", although no page was in use."""
    cache = Cache(anywhere('--kv-bytes', '1M'))
    answer = cache.append(rng, 20000)
    assert answer.status == 413 and 'retry-after' not in answer.headers and answer.json()['code'] == 'too-large', answer
    assert answer.json()['detail'].startswith('this request needs 2564096 bytes of pages, the pool of '), answer
    assert answer.json()['detail'].endswith(' has 1048576 in all (--kv-bytes)'), answer
    assert cache.append(rng, 8192).status == 200


@pytest.mark.parametrize('binary', [service.BINARY, service.FAKE])
def test_more_memory_for_caches_than_a_device_has_is_refused_at_the_start(binary):
    """The server must refuse to start if --kv-bytes exceeds a device's memory. In an earlier version it became ready,
    and then answered 507 to every new cache."""
    name = 'cpu' if binary == service.BINARY else 'fake:0'
    command = [binary, '--listen', '127.0.0.1:0', '--device-bytes', '64M', '--kv-bytes', '65M', '--cpu-threads', '1', *(['--devices', 'cpu'] if name == 'cpu' else [])]
    env = {'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': ''} if binary == service.FAKE else {}
    r = subprocess.run(command, capture_output=True, text=True, timeout=20 * service.SLOWER, env={**os.environ, **env})
    assert r.returncode == 64, r
    assert f'attnd: --kv-bytes: 68157440 is more than {name} has for all that it does, which is 67108864 bytes (--device-bytes)\n' in r.stderr, r


def test_a_fork_copies_nothing_until_somebody_writes(anywhere, rng):
    server = anywhere('--kv-bytes', '1M')
    cache = Cache(server)
    cache.append(rng, 1000)
    pages = server.metric('attnd_cache_pages', kind='all')
    forks = [cache.fork() for _ in range(32)]
    assert server.metric('attnd_cache_pages', kind='all') == pages == 16
    assert server.metric('attnd_cache_pages', kind='shared') == 16
    new = [c.new(rng, 1) for c in forks[:4]]
    assert_right(*decode(forks[:4], rng.standard_normal((4, 1, 4, 8)), new), forks[:4])
    # each of the four forks that appended has got a copy of the last page
    assert server.metric('attnd_cache_pages', kind='all') == 20
    assert_right(*decode([cache, *forks], rng.standard_normal((33, 1, 4, 8))), [cache, *forks])
    for c in [cache, *forks]:
        c.delete()
    assert server.metric('attnd_cache_pages', kind='all') == 0


def test_what_nobody_uses_is_gone_after_its_time(serve, rng):
    server = serve()
    cache = Cache(server, ttl_s=1)
    cache.append(rng, 10)
    assert eventually(lambda: server.metric('attnd_caches') == 0, seconds=20)
    with pytest.raises(Gone):
        cache.append(rng, 1)
    assert server.metric('attnd_cache_ends_total', why='expired') == 1
    assert server.metric('attnd_cache_pages', kind='all') == 0


def test_no_caches_where_there_is_no_pool(serve):
    server = serve('--kv-bytes', 0)
    answer = server.post(CACHES, {'kv_heads': 1, 'head_dim': 8, 'dtype': 'float32'})
    assert answer.status == 507 and '--kv-bytes 0' in answer.json()['detail'], answer


# ---- Steps at the same time, and steps that fail ---------------------------------------------------------------------


def test_clients_that_append_to_one_cache_come_one_after_the_other(anywhere, rng):
    server = anywhere('--kv-bytes', '4M')
    cache = Cache(server)
    wrong = []

    def client(tag):
        for n in range(15):
            x = np.full((1, 2, 2, 8), tag * 100 + n, np.float32)
            answer = server.post(DECODE, {'q': wire.tensor(np.zeros((1, 1, 4, 8))), 'caches': [cache.id], 'k': wire.tensor(x), 'v': wire.tensor(x)})
            if answer.status != 200 or answer.json()['lengths'][0] % 2:
                wrong.append(answer)
    threads = [threading.Thread(target=client, args=(tag,)) for tag in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]
    assert cache.info()['length'] == 8 * 15 * 2
    # After two appends at the same time, the cache must have the positions of both, each append once and in one piece.
    # Queries with a window of one key read the values back one by one.
    q = np.zeros((1, 240, 4, 8))
    told = server.post(DECODE, {'q': wire.tensor(q), 'caches': [cache.id], 'causal': True, 'window': [0, 0]}).json()
    values = wire.value(told['out'])[0, :, 0, 0]
    assert np.array_equal(values[::2], values[1::2])
    assert sorted(values[::2]) == sorted(tag * 100 + n for tag in range(8) for n in range(15))
    for tag in range(8):  # each client's positions are in the order in which it sent them
        mine = [x for x in values[::2] if x // 100 == tag]
        assert mine == sorted(mine)


@pytest.fixture
def gate(tmp_path):
    path = str(tmp_path / 'gate')
    open(path, 'w').close()
    yield path
    if os.path.exists(path):
        os.unlink(path)


def all_at_once(calls):
    """Calls all functions at the same time. Returns their results in the order of `calls`."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize('float8', [False, True])
def test_steps_of_different_clients_are_one_problem(serve, rng, gate, float8):
    """On a device whose kernels read staging memory (the memory of request bodies), steps (decodes) of different
    clients are merged into one problem without a copy. Each step must have the same bits as alone, whatever else the
    batch contains."""
    # The caches are first filled by appends. The server does not merge appends, so the device makes `copies` copies for
    # them: two for each of the six caches.
    lengths, copies = [5, 64, 700, 128, 1, 300], 2 * 6
    os.unlink(gate)
    script = f'hold={gate},copy.err=700@{copies + 1}+'
    together = serve('--cpu-threads', 1, '--http-threads', 8, binary=service.FAKE, env={'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': script, **READS_STAGING})
    shape = {'kv_heads': 2, 'head_dim': 64}
    if float8:
        shape |= {'dtype': 'float8_e4m3fn', 'k_scale': [.5, 2.], 'v_scale': [.25, 1.5]}
    q, new = rng.standard_normal((6, 1, 8, 64)), rng.standard_normal((2, 6, 2, 1, 2, 64))

    def step(cache, i, turn):
        k, v = new[turn, i]
        body = {'q': wire.tensor(q[i:i + 1]), 'caches': [cache.id], 'k': wire.tensor(k[None], cache.dtype), 'v': wire.tensor(v[None], cache.dtype)}
        answer = cache.server.post(DECODE, body)
        assert answer.status == 200, answer
        return bits(answer)

    def filled(server):
        caches = [Cache(server, **shape) for _ in lengths]
        parts = [[wire.tensor(np.random.default_rng(i + n).standard_normal((length, 2, 64)), caches[0].dtype) for n in (0, 9)] for i, length in enumerate(lengths)]
        for answer in all_at_once([lambda c=c, p=p: server.post(c.path('/append'), {'k': p[0], 'v': p[1]}) for c, p in zip(caches, parts)]):
            assert answer.status == 200, answer
        return caches

    alone = filled(serve('--cpu-threads', 1))
    caches = filled(together)
    before = [Cache(together, **shape) for _ in range(4 + GUESTS)]
    for turn in 0, 1:  # in its second turn, a step attends to what the first turn has appended
        open(gate, 'w').close()
        with concurrent.futures.ThreadPoolExecutor(10 + GUESTS) as pool:
            try:
                held = []
                # Each request is one batch. A device also has streams for guests: clients that have no other batch on
                # the device. Later requests have to wait only when these streams have a batch too.
                for n in range(len(before)):
                    held.append(pool.submit(step, before[n], n % 6, turn))
                    assert eventually(lambda: together.metric('attnd_inflight_requests', state='running') == n + 1)
                batches = together.metric('attnd_batch_size_count')
                steps = [pool.submit(step, caches[i], i, turn) for i in range(6)]
                assert eventually(lambda: together.metric('attnd_queue_requests') == 6)
            finally:
                os.unlink(gate)
        for h in held:
            h.result()
        assert together.metric('attnd_batch_size_count') == batches + 1, 'they were to leave together'
        assert [s.result() for s in steps] == [step(alone[i], i, turn) for i in range(6)]


def test_a_step_that_is_given_up_leaves_its_cache_as_it_was(serve, rng, gate):
    server = serve('--cpu-threads', 1, '--kv-bytes', '1M', binary=service.FAKE,
                   env={'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': f'hold={gate}@2'})
    cache = Cache(server)
    assert_right(*decode([cache], rng.standard_normal((1, 1, 4, 8)), [cache.new(rng, 1)]), [cache])
    x = wire.tensor(np.full((1, 3, 2, 8), 77.0))
    body = {'q': wire.tensor(np.zeros((1, 1, 4, 8))), 'caches': [cache.id], 'k': x, 'v': x}
    answer = server.post(DECODE, body, {'X-Request-Timeout-Ms': f'{1000 * service.SLOWER:.0f}'})
    assert answer.status == 504, answer
    assert cache.info()['length'] == 1
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(decode([cache], np.ones((1, 1, 4, 8)))))
    thread.start()  # waits until the device has finished the previous decode
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='queued') == 1)
    os.unlink(gate)
    thread.join()
    assert_right(*waiting[0], [cache])
    assert cache.info()['length'] == 1 and server.metric('attnd_cache_pages', kind='all') == 1


def test_many_steps_that_wait_for_one_cache_hold_nobody_else_up(serve, rng, gate):
    """600 appends to one cache run one after the other, and the first one takes long. Requests of other clients must
    not wait for the appends, because they use other caches and the device has free streams."""
    server = serve('--cpu-threads', 1, '--kv-bytes', '1M', '--timeout-ms', 600000, '--max-receiving', 1000, '--http-threads', 2, binary=service.FAKE,
                   env={'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': f'hold={gate}@1'})
    busy, other = Cache(server), Cache(server)
    k = wire.tensor(np.zeros((1, 1, 2, 8)))
    request = service.request_bytes(DECODE, json.dumps({'q': wire.tensor(np.zeros((1, 1, 4, 8))), 'caches': [busy.id], 'k': k, 'v': k}).encode())
    waiting = []
    try:
        for _ in range(601):
            waiting.append(server.raw())
            waiting[-1].sendall(request)
        assert eventually(lambda: server.metric('attnd_inflight_requests', state='queued') == 600)
        assert server.post('/v1/attention/forward', wire.small_bytes()).status == 200
        assert_right(*decode([other], rng.standard_normal((1, 1, 4, 8)), [other.new(rng, 2)]), [other])
        assert server.metric('attnd_inflight_requests', state='queued') == 600
        os.unlink(gate)
        assert all(service.RawReader(s).answer().status == 200 for s in waiting)
    finally:
        for s in waiting:
            s.close()
    assert busy.info()['length'] == 601


def test_a_batch_that_fails_leaves_its_caches_as_they_were(serve, rng):
    server = serve('--cpu-threads', 1, '--kv-bytes', '1M', binary=service.FAKE,
                   env={'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': 'launch.err=2@2'})
    cache = Cache(server)
    assert_right(*decode([cache], rng.standard_normal((1, 1, 4, 8)), [cache.new(rng, 60)]), [cache])
    failed, _ = decode([cache], rng.standard_normal((1, 1, 4, 8)), [cache.new(rng, 60)])
    assert failed.status in (500, 503), failed
    assert cache.info()['length'] == 60 and server.metric('attnd_cache_pages', kind='all') == 1
    assert_right(*decode([cache], rng.standard_normal((1, 1, 4, 8)), [cache.new(rng, 60)]), [cache])


def test_caches_of_a_lost_device_are_gone_and_new_ones_are_elsewhere(serve, rng):
    server = serve('--cpu-threads', 1, '--kv-bytes', '1M', '--timeout-ms', 20000, binary=service.FAKE,
                   env={'ATTN_FAKE_DEVICES': '2', 'ATTN_FAKE_SCRIPT': '0:launch.err=700@2'})
    q = np.ones((1, 1, 4, 8))
    on = {}
    # the server creates each cache on the device with the most free memory, so soon both devices have one
    while len(on) < 2:
        cache = Cache(server)
        assert cache.append(rng, 200).status == 200
        on.setdefault(cache.info()['device'], []).append(cache)
    lost = on['fake:0'][0]
    assert_right(*decode([lost], q), [lost])
    assert decode([lost], q)[0].status == 503
    assert server.metric('attnd_cache_ends_total', why='lost') == len(on['fake:0'])
    for answer in (decode([lost], q)[0], server.get(lost.path()), lost.append(rng, 1), server.post(lost.path('/fork'), {}), server.ask('DELETE', lost.path())):
        assert answer.status == 404 and 'was on a device that has failed; POST /v1/caches makes one' in answer.json()['detail'], answer
    assert {c['device'] for c in server.get(CACHES).json()['caches']} == {'fake:1'}
    assert server.metric('attnd_cache_pages', kind='all') == 4 * len(on['fake:1'])
    for _ in range(4):
        cache = Cache(server)
        assert cache.info()['device'] == 'fake:1' and cache.append(rng, 100).status == 200
        assert_right(*decode([cache, on['fake:1'][0]], np.ones((2, 1, 4, 8))), [cache, on['fake:1'][0]])


def test_truncate_and_delete_beside_a_step(serve, rng, gate):
    server = serve('--cpu-threads', 1, '--kv-bytes', '1M', binary=service.FAKE,
                   env={'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': f'hold={gate}@1,hold={gate}@2'})
    a, b = Cache(server), Cache(server)
    answers = []

    def step(cache):
        answers.append(decode([cache], np.ones((1, 1, 4, 8)), [cache.new(rng, 50)])[0])
    threads = [threading.Thread(target=step, args=(c,)) for c in (a, b)]
    for t in threads:
        t.start()
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 2)
    b.delete()
    assert server.get(b.path()).status == 404
    os.unlink(gate)
    for t in threads:
        t.join()
    assert [x.status for x in answers] == [200, 200], answers
    assert a.info()['length'] == 50
    assert server.metric('attnd_cache_pages', kind='all') == 1


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused_names_what_and_why(server, rng):
    cache, other = Cache(server), Cache(server, head_dim=16)
    q, kv = wire.tensor(np.zeros((1, 1, 4, 8))), wire.tensor(np.zeros((1, 1, 2, 8)))
    gone = '0' * 40

    def said(path, body):
        answer = server.post(path, body)
        return answer.status, answer.json().get('pointer', ''), answer.json()['detail']
    for body, want in [
        ({'q': q}, (400, '/caches', 'caches: is missing, must be ids of POST /v1/caches, one for each row of q')),
        ({'q': q, 'caches': cache.id}, (400, '/caches', f"caches: is '{cache.id[:24]}")),
        ({'q': q, 'caches': [cache.id, cache.id]}, (400, '/caches', 'caches: has 2 ids, must have 1, one for each row of q')),
        ({'q': q, 'caches': []}, (400, '/caches', 'caches: has 0 ids, must have 1 to 1024')),
        ({'q': q, 'caches': [7]}, (400, '/caches/0', 'caches: [0] is 7, must be an id of POST /v1/caches')),
        ({'q': q, 'caches': [other.id]}, (400, '/q/shape/3', 'q: shape[3] is 8, must be 16, the caches\' head_dim')),
        ({'q': wire.tensor(np.zeros((1, 1, 3, 8))), 'caches': [cache.id]}, (400, '/q/shape/2', 'q: shape[2] is 3, must be a multiple of 2, the caches\' kv_heads')),
        ({'q': wire.tensor(np.zeros((1, 4, 8))), 'caches': [cache.id]}, (400, '/q/shape', 'q: has 3 dimensions, must have 4: [B, Sq, H, D]')),
        ({'q': q, 'caches': [cache.id], 'k': kv}, (400, '/v', 'v: is missing, each position has a key and a value')),
        ({'q': q, 'caches': [cache.id], 'v': kv}, (400, '/v', 'v: is given without k')),
        ({'q': q, 'caches': [cache.id], 'k': wire.tensor(np.zeros((1, 1, 2, 8)), 'float16'), 'v': kv}, (400, '/k/dtype', 'k: dtype is float16, must be float32, the cache\'s')),
        ({'q': q, 'caches': [cache.id], 'k': kv, 'v': wire.tensor(np.zeros((1, 2, 2, 8)))}, (400, '/v/shape/1', 'v: shape[1] is 2, must be 1, k\'s positions')),
        ({'q': q, 'caches': [cache.id], 'bias': kv}, (400, '/bias', 'bias: belongs to forward, POST /v1/attention/forward')),
        ({'q': q, 'caches': [cache.id], 'seqlens_k': kv}, (400, '/seqlens_k', 'seqlens_k: belongs to forward')),
        ({'q': q, 'caches': [gone]}, (404, '/caches/0', 'caches: [0] was made by another process of attnd')),
        ({'q': q, 'caches': ['nonsense']}, (404, '/caches/0', 'caches: [0] is unknown, deleted or expired')),
        ({'requests': []}, (400, '/requests', 'requests: decode takes one problem, with a row of q for each of its caches')),
    ]:
        status, pointer, detail = said(DECODE, body)
        assert (status, pointer) == want[:2] and detail.startswith(want[2]), (body.keys(), status, pointer, detail)
    two = {'q': wire.tensor(np.zeros((2, 1, 4, 8))), 'caches': [cache.id, cache.id]}
    assert server.post(DECODE, two).status == 200
    pair = wire.tensor(np.zeros((2, 1, 2, 8)))
    status, pointer, detail = said(DECODE, {**two, 'k': pair, 'v': pair})
    assert (status, pointer) == (400, '/caches/1') and 'fork it first' in detail, detail
    status, pointer, detail = said(DECODE, {**two, 'caches': [cache.id, other.id]})
    assert (status, pointer) == (400, '/caches/1') and 'one request takes caches of one shape' in detail, detail
    status, pointer, detail = said(cache.path('/append'), {'k': kv, 'v': kv})
    assert (status, pointer) == (400, '/k/shape') and '[S, Hk, D]' in detail, detail
    status, pointer, detail = said(cache.path('/append'), {'k': wire.tensor(np.zeros((1, 2, 8))), 'v': kv})
    assert (status, pointer) == (400, '/v/shape') and detail.endswith('must have 3: [S, Hk, Dv]'), detail
    status, pointer, detail = said(cache.path('/append'), {'q': q})
    assert (status, pointer) == (400, '/q') and 'belongs to forward' in detail, detail
    assert said(cache.path('/append'), {})[2] == 'k: is missing'
    for body, pointer, detail in [
        ({'kv_heads': 0, 'head_dim': 8, 'dtype': 'float32'}, '/kv_heads', 'kv_heads: is 0, must be an integer from 1 to 1024'),
        ({'kv_heads': 1, 'head_dim': 8}, '/dtype', 'dtype: is missing, the body must be like {"kv_heads"'),
        ({'kv_heads': 1, 'head_dim': 8, 'dtype': 'int32'}, '/dtype', 'dtype: is \'int32\', must be float32, float16, bfloat16 or float8_e4m3fn'),
        ({'kv_heads': 1, 'head_dim': 8, 'dtype': 'float16', 'page_size': 100}, '/page_size', 'page_size: is 100, must be 64 or 128'),
        ({'kv_heads': 1, 'head_dim': 8, 'dtype': 'float16', 'heads': 1}, '/heads', 'unknown member \'heads\''),
        ({'kv_heads': 1, 'head_dim': 8, 'dtype': 'float16', 'k_scale': [1]}, '/k_scale', 'k_scale: belongs to dtype float8_e4m3fn, it is float16'),
        ({'kv_heads': 2, 'head_dim': 8, 'dtype': 'float8_e4m3fn', 'k_scale': [1]}, '/k_scale', 'k_scale: has 1 numbers, must have 2'),
        ({'kv_heads': 2, 'head_dim': 8, 'dtype': 'float16', 'k_scale': 1}, '/k_scale', 'k_scale: belongs to dtype float8_e4m3fn, it is float16'),
        ({'kv_heads': 2, 'head_dim': 8, 'dtype': 'float8_e4m3fn', 'k_scale': 1e39}, '/k_scale', 'k_scale: is 1e+39, must be a number within float32'),
        ({'kv_heads': 2, 'head_dim': 8, 'dtype': 'float8_e4m3fn', 'k_scale': '0.5'}, '/k_scale', "k_scale: is '0.5', must be a number, or an array of numbers, one for each of kv_heads"),
    ]:
        got = said(CACHES, body)
        assert got[:2] == (400, pointer) and got[2].startswith(detail), got
    answer = server.post(CACHES, b'{"kv_heads": 1' + b' ' * 70000)
    assert answer.status == 413 and 'more than 65536 bytes, the limit of this path' in answer.json()['detail'], answer
    assert server.post(CACHES, b'').status == 400
    for c in cache, other:
        c.delete()


def test_a_query_changes_nothing(server, rng):
    """A query string must never change what a request does. In an earlier version fork?length=3 forked all positions,
    and DELETE ?dry_run=true deleted the cache."""
    cache = Cache(server)
    cache.append(rng, 5)
    before = {c['id'] for c in server.get('/v1/caches').json()['caches']}
    for method, path, argument in [('POST', '/v1/caches?ttl_s=5', 'ttl_s'), ('POST', cache.path('/fork?length=3'), 'length'), ('POST', cache.path('/truncate?length=0'), 'length'),
                                   ('DELETE', cache.path('?dry_run=true'), 'dry_run'), ('DELETE', cache.path('?'), ''), ('DELETE', cache.path('?=1'), ''),
                                   ('DELETE', cache.path('?' + 'x' * 500), 'x' * 80)]:
        answer = server.ask(method, path)
        assert answer.status == 400 and answer.json()['code'] == 'invalid-request' and f"('?{argument}')" in answer.json()['detail'], answer
    # caches of other tests on this server may have expired meanwhile, so the list may be shorter than before
    assert cache.id in before and {c['id'] for c in server.get('/v1/caches').json()['caches']} <= before
    assert server.get(cache.path('?any=1')).json()['length'] == 5
    cache.delete()


def test_the_document_names_the_shapes_that_are_taken(server, rng):
    cache = Cache(server, head_dim_v=4)
    document = server.get('/openapi.json').json()['components']['schemas']
    for path, schema, more in (cache.path('/append'), 'AppendRequest', {}), (DECODE, 'DecodeRequest', {'q': wire.tensor(np.zeros((1, 1, 4, 8))), 'caches': [cache.id]}):
        for name, width in ('k', 8), ('v', 4):
            shape = document[schema]['properties'][name]['description'].split(';')[0]
            good = {'k': wire.tensor(np.zeros([1, 3, 2, 8][-shape.count(',') - 1:])), 'v': wire.tensor(np.zeros([1, 3, 2, 4][-shape.count(',') - 1:])), **more}
            assert server.post(path, good).status == 200
            answer = server.post(path, {**good, name: wire.tensor(np.zeros((2, width)))})
            assert answer.status == 400 and f': {shape}' in answer.json()['detail'], (shape, answer)
    cache.delete()


def test_info_says_what_there_is_for_caches(serve):
    server = serve('--kv-bytes', '4M')
    info = server.get('/v1/info').json()
    assert info['limits']['kv_bytes'] == 4 << 20 and info['limits']['caches'] == 65536 and info['limits']['decode_caches'] == 1024
    decode = info['features']['cpu']['decode']
    assert {'q', 'k', 'v', 'keep_mask', 'alibi_slopes', 'sinks'} == set(decode['tensors']) and 'caches' in decode['options'] and 'float16' in decode['dtypes']
    assert {k['name'] for k in decode['kernels']} <= {k['name'] for k in info['features']['cpu']['forward']['kernels']}
    assert serve('--kv-bytes', '0').get('/v1/info').json()['limits']['kv_bytes'] == 0


def test_forks_of_a_long_cache_decode_as_each_alone(anywhere):
    server = anywhere()
    rng = np.random.default_rng(17)
    first = Cache(server, kv_heads=1)
    for _ in range(11):
        assert first.append(rng, 100).status == 200
    rows = [first, first.fork(), first.fork(1050), first.fork()]
    for row in rows[1:]:
        assert row.append(rng, 3).status == 200
    q = rng.standard_normal((4, 1, 2, 8))
    answer, want = decode(rows, q)
    assert_right(answer, want, rows)
    for b, row in enumerate(rows):
        alone, _ = decode([row], q[b:b + 1])
        assert np.array_equal(wire.value(alone.json()['out'])[0], wire.value(answer.json()['out'])[b])
