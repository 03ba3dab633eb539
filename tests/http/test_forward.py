"""POST /v1/attention/forward: every member of PROTOCOL.md's table, alone and combined with others.

Numbers are compared with float64 (conformance/ref.py), computed from the values that the tensors hold after
rounding."""
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ref
import wire
from service import request_bytes
from wire import random_problem, tensor, value

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
RTOL = {'float32': 1e-5, 'float16': 1e-3, 'bfloat16': 8e-3, 'float8_e4m3fn': 4e-2}


def rng(seed=0):
    return np.random.default_rng(seed)


def close(got, want, rtol=1e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f'shape {got.shape}, expected {want.shape}'
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    if finite.any():
        worst = np.abs(got[finite] - want[finite]).max()
        assert worst <= rtol * max(np.abs(want[finite]).max(), 0.05), f'off by {worst}\ngot  {got}\nwant {want}'


def ok(answer):
    assert answer.status == 200, answer
    return answer.json()


# ---- the numbers -----------------------------------------------------------------------------------------------------

# Small exact examples with H 1, D 2, scale 1, and the Q, K and V below. Each row has the options, then out and lse.
Q, K, V = [[1, 0], [0, 1], [1, 1]], [[1, 0], [0, 2]], [[1, 2], [3, 4]]
EXACT = [
    ({}, [[1.537882843, 2.537882843], [2.761594156, 3.761594156], [2.462117157, 3.462117157]], [1.313261688, 2.126928011, 2.313261688]),
    ({'causal': True}, [[0, 0], [1, 2], [2.462117157, 3.462117157]], [-np.inf, 0, 2.313261688]),
    ({'causal': True, 'alignment': 'top_left'}, [[1, 2], [2.761594156, 3.761594156], [2.462117157, 3.462117157]], [1, 2.126928011, 2.313261688]),
    ({'causal': True, 'sinks': [0]}, [[0, 0], [0.5, 1], [2.240451338, 3.150420765]], [0, 0.693147181, 2.407605964]),
    ({'softcap': 1}, [[1.636600516, 2.636600516], [2.447854937, 3.447854937], [2.100872474, 3.100872474]], [1.144760135, 1.287091653, 1.561071737]),
    ({'alibi_slopes': [0.5]}, [[1.364851048, 2.364851048], [2.635148952, 3.635148952], [2.635148952, 3.635148952]], [0.701413278, 1.701413278, 2.201413278]),
]


@pytest.mark.parametrize('options, out, lse', EXACT, ids=[json.dumps(e[0]) for e in EXACT])
def test_small_exact_examples(server, options, out, lse):
    options = {k: tensor(v) if isinstance(v, list) else v for k, v in options.items()}
    members = {n: tensor(np.array(x, float).reshape(1, len(x), 1, 2)) for n, x in (('q', Q), ('k', K), ('v', V))}
    a = ok(server.forward(**members, scale=1, **options))
    close(value(a['out']).reshape(3, 2), out)
    close(value(a['lse']).reshape(3), lse)


@pytest.mark.parametrize('layout', ['bshd', 'bhsd'])
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16', 'float8_e4m3fn'])
def test_every_dtype_in_both_layouts(server, dtype, layout):
    members, x = random_problem(rng(1), B=2, Sq=37, Sk=53, H=4, Hk=2, D=24, Dv=16, dtype=dtype, layout=layout, causal=True)
    a = ok(server.forward(**members))
    out, lse, _ = ref.forward(x['q'], x['k'], x['v'], causal=True)
    assert a['out']['dtype'] == ('bfloat16' if dtype == 'float8_e4m3fn' else dtype)
    assert a['lse']['dtype'] == 'float32' and a['lse']['shape'] == [2, 4, 37]
    got = value(a['out'])
    close(got.swapaxes(1, 2) if layout == 'bhsd' else got, out, RTOL[dtype])
    close(value(a['lse']), lse, 1e-4 if dtype == 'float8_e4m3fn' else 1e-5)


@pytest.mark.parametrize('out_dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16', 'float8_e4m3fn'])
def test_out_dtype(server, dtype, out_dtype):
    members, x = random_problem(rng(2), Sq=9, D=16, dtype=dtype, out_dtype=out_dtype)
    a = ok(server.forward(**members))
    assert a['out']['dtype'] == out_dtype
    close(value(a['out']), ref.forward(x['q'], x['k'], x['v'])[0], max(RTOL[dtype], RTOL[out_dtype]))


def test_fp8_scales(server):
    members, x = random_problem(rng(3), B=2, Sq=20, H=4, Hk=2, D=32, dtype='float8_e4m3fn', out_dtype='float32')
    scales = {n: rng(4).uniform(0.5, 2, (2, 2)) for n in ('q_scale', 'k_scale', 'v_scale')}
    a = ok(server.forward(**members, **{n: tensor(s) for n, s in scales.items()}))
    per_head = {n: s[:, None, :, None] for n, s in scales.items()}
    out, lse, _ = ref.forward(x['q'] * np.repeat(per_head['q_scale'], 2, 2), x['k'] * per_head['k_scale'], x['v'] * per_head['v_scale'])
    close(value(a['out']), out, RTOL['float8_e4m3fn'])
    close(value(a['lse']), lse, 1e-4)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_keys_and_values_in_fp8(server, dtype):
    members, x = random_problem(rng(80), B=2, Sq=9, Sk=40, H=4, Hk=2, D=32, dtype=dtype, causal=True)
    scales = {n: rng(81).uniform(0.5, 2, (2, 2)) for n in ('k_scale', 'v_scale')}
    keys = {n: wire.rounded(x[n], 'float8_e4m3fn') for n in 'kv'}
    a = ok(server.forward(**{**members, **{n: tensor(k, 'float8_e4m3fn') for n, k in keys.items()}}, **{n: tensor(s) for n, s in scales.items()}))
    out, lse, _ = ref.forward(x['q'], *(keys[n] * scales[f'{n}_scale'][:, None, :, None] for n in 'kv'), causal=True)
    assert a['out']['dtype'] == dtype
    close(value(a['out']), out, RTOL[dtype])
    close(value(a['lse']), lse, 1e-4)


@pytest.mark.parametrize('scale', [0, -0.7, 0.01, 3])
def test_scale_may_be_zero_or_negative(server, scale):
    members, x = random_problem(rng(5), Sq=17, D=8, scale=scale)
    a = ok(server.forward(**members))
    out, lse, _ = ref.forward(x['q'], x['k'], x['v'], scale=scale)
    close(value(a['out']), out)
    close(value(a['lse']), lse)


@pytest.mark.parametrize('window', [[0, 0], [3, 0], [0, 5], [2, 2], [-1, 4], [4, -1], [1000, 1000], [-1, -1]])
@pytest.mark.parametrize('alignment', ['bottom_right', 'top_left'])
@pytest.mark.parametrize('Sq, Sk', [(20, 31), (31, 20)])
def test_windows(server, window, alignment, Sq, Sk):
    members, x = random_problem(rng(6), Sq=Sq, Sk=Sk, D=8, window=window, alignment=alignment)
    a = ok(server.forward(**members))
    out, lse, _ = ref.forward(x['q'], x['k'], x['v'], window=window, top_left=alignment == 'top_left')
    close(value(a['out']), out)
    close(value(a['lse']), lse)


@pytest.mark.parametrize('shape', [(1, 1, 1, 30), (2, 1, 1, 30), (1, 3, 20, 30), (2, 3, 1, 30), (2, 3, 20, 30)])
def test_bias_and_keep_mask_broadcast(server, shape):
    members, x = random_problem(rng(7), B=2, Sq=20, Sk=30, H=3, D=8)
    bias, keep = rng(8).standard_normal(shape), rng(9).random(shape) < 0.7
    a = ok(server.forward(**members, bias=tensor(bias), keep_mask=tensor(keep, 'uint8')))
    mask = np.broadcast_to(keep, (2, 3, 20, 30))
    out, lse, _ = ref.forward(x['q'], x['k'], x['v'], bias=bias.astype(np.float32), mask=mask)
    close(value(a['out']), out)
    close(value(a['lse']), lse)


@pytest.mark.parametrize('n', [1, 7, 30])
def test_a_mask_of_the_last_keys(server, n):
    members, x = random_problem(rng(70), B=3, Sq=7, Sk=30, H=2, D=8)
    tail, lengths = rng(71).random((3, 1, 7, n)) < 0.6, [30, 9, 4]
    a = ok(server.forward(**members, keep_mask=tensor(tail, 'uint8'), keep_mask_at_end=True, seqlens_k=tensor(np.array(lengths), 'int32')))
    for b, length in enumerate(lengths):
        mask = np.ones((1, 1, 7, max(length, n)), bool)
        mask[..., mask.shape[3] - n:] = tail[b]
        one = slice(b, b + 1)
        out, lse, _ = ref.forward(x['q'][one], x['k'][one, :length], x['v'][one, :length], mask=mask[..., mask.shape[3] - length:])
        close(value(a['out'])[one], out)
        close(value(a['lse'])[one], lse)


def test_bias_of_minus_infinity_hides(server):
    members, x = random_problem(rng(10), Sq=6, Sk=9, H=1, D=8)
    bias = np.zeros((1, 1, 6, 9))
    bias[..., 4:] = -np.inf
    bias[0, 0, 2] = -np.inf
    a = ok(server.forward(**members, bias=tensor(bias)))
    out, lse, _ = ref.forward(x['q'], x['k'], x['v'], mask=np.isfinite(bias))
    close(value(a['out']), out)
    close(value(a['lse']), lse)
    assert value(a['lse'])[0, 0, 2] == -np.inf and not value(a['out'])[0, 2].any()


def test_dropout_is_repeatable_and_of_the_right_size(server):
    members, x = random_problem(rng(11), Sq=64, Sk=256, H=2, D=8, scale=0, dropout_p=0.3, seed=12345)
    members['v'] = tensor(np.ones((1, 256, 2, 8)))
    first, again = ok(server.forward(**members)), ok(server.forward(**members))
    assert first['out'] == again['out']
    # with scale 0 and values of 1, out is the fraction of the keys that dropout keeps, divided by 1 - p
    out = value(first['out'])
    assert abs(out.mean() - 1) < 0.02 and out.std() > 0.02
    members['seed'] = 12346
    assert ok(server.forward(**members))['out'] != first['out']
    close(value(first['lse']), np.full((1, 2, 64), np.log(256)))
    members['dropout_p'] = 0
    close(value(ok(server.forward(**members))['out']), np.ones((1, 64, 2, 8)))


def philox(counter, key):
    c, k = [int(x) for x in counter], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_dropout_drops_the_elements_that_philox_says(server):
    assert philox([0] * 4, 0) == [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]
    B, H, S, p, seed = 2, 2, 24, 0.4, 0x0123456789ABCD
    members, x = random_problem(rng(12), B=B, Sq=S, H=H, D=8, dropout_p=p, seed=seed)
    keep = np.zeros((B, H, S, S), bool)
    for b in range(B):
        for h in range(H):
            for i in range(S):
                for j8 in range(S // 8):
                    words = philox([j8, i, b * H + h, 0], seed)
                    lanes = [(words[n // 2] >> 16 * (n % 2)) & 0xFFFF for n in range(8)]
                    keep[b, h, i, j8 * 8:j8 * 8 + 8] = [lane >= round(p * 65536) for lane in lanes]
    _, lse, (P, _, _, _, vv) = ref.forward(x['q'], x['k'], x['v'])
    a = ok(server.forward(**members))
    close(value(a['out']), np.einsum('bhij,bjhd->bihd', P * keep / (1 - p), vv))
    close(value(a['lse']), lse)


def test_infinity_and_nan_stay_in_their_rows(server):
    members, x = random_problem(rng(13), Sq=6, H=1, D=4, causal=True)
    q = x['q'].copy()
    q[0, 2, 0, 1] = np.nan
    k = x['k'].copy()
    k[0, 4, 0, 0] = np.nan  # only queries 4 and 5 see this key
    a = ok(server.forward(**{**members, 'q': tensor(q), 'k': tensor(k)}))
    out, clean = value(a['out']), ref.forward(x['q'], x['k'], x['v'], causal=True)[0]
    assert np.isnan(out[0, [2, 4, 5]]).all()
    close(out[:, [0, 1, 3]], clean[:, [0, 1, 3]])


# ---- how requests may be written -------------------------------------------------------------------------------------

def test_members_in_any_order_and_data_before_shape(server):
    members = wire.small_body(causal=True)
    want = ok(server.forward(**members))['out']
    turned = {n: {'data': t['data'], 'dtype': t['dtype'], 'shape': t['shape']} for n, t in members.items() if isinstance(t, dict)}
    assert ok(server.post('/v1/attention/forward', {'causal': True, **dict(reversed(turned.items()))}))['out'] == want


def test_escapes_in_base64_are_json(server):
    members = wire.small_body()
    want = ok(server.forward(**members))['out']
    text = json.dumps(members)
    assert '/' in text
    assert ok(server.post('/v1/attention/forward', text.replace('/', '\\/').encode()))['out'] == want
    data = members['q']['data']
    spelled = text.replace(data, ''.join(f'\\u{ord(c):04x}' for c in data))
    assert ok(server.post('/v1/attention/forward', spelled.encode()))['out'] == want


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16', 'float8_e4m3fn'])
@pytest.mark.parametrize('nested', [True, False])
def test_data_as_numbers(server, dtype, nested):
    members, x = random_problem(rng(14), Sq=3, H=2, D=4, dtype=dtype)
    want = ok(server.forward(**members))
    typed = {n: {'shape': t['shape'], 'dtype': dtype, 'data': (x[n] if nested else x[n].ravel()).tolist()} for n, t in members.items()}
    a = ok(server.forward(**typed))
    assert a['out'] == want['out'] and a['lse'] == want['lse']


def test_numbers_are_rounded_to_nearest_even(server):
    """With one key, out equals v, so the answer shows how v was rounded."""
    one = tensor(np.ones((1, 1, 1, 1)), 'float16')
    numbers = [2049, 2051, 0.1, 1e-7, 6e-8, 65504, 65519, -0.0, 1e-30, 5.960464477539063e-08]
    v = {'shape': [1, 1, 1, len(numbers)], 'dtype': 'float16', 'data': numbers}
    a = ok(server.forward(q=one, k=one, v=v))
    got = value(a['out']).ravel()
    np.testing.assert_array_equal(got, np.array(numbers).astype(np.float16).astype(np.float64))


def test_words_for_what_json_has_no_number_for(server):
    one = tensor(np.ones((1, 1, 1, 1)))
    v = {'shape': [1, 1, 1, 4], 'dtype': 'float32', 'data': ['NaN', 'Infinity', '-Infinity', 1.5]}
    a = ok(server.forward(q=one, k=one, v=v, encoding='array'))
    np.testing.assert_array_equal(value(a['out']).ravel(), [np.nan, np.inf, -np.inf, 1.5])


@pytest.mark.parametrize('name, dtype', [('F32', 'float32'), ('fp32', 'float32'), ('FP16', 'float16'), ('f16', 'float16'), ('BF16', 'bfloat16'),
                                         ('Float16', 'float16'), ('F8_E4M3', 'float8_e4m3fn'), ('BFLOAT16', 'bfloat16')])
def test_other_names_of_dtypes_in_any_case(server, name, dtype):
    members, _ = random_problem(rng(15), Sq=3, D=4, dtype=dtype)
    a = ok(server.forward(**{n: {**t, 'dtype': name} for n, t in members.items()}))
    assert a['out']['dtype'] == ('bfloat16' if dtype == 'float8_e4m3fn' else dtype)
    assert a['out'] == ok(server.forward(**members))['out']


@pytest.mark.parametrize('content_type', [None, 'application/json', 'application/json; charset=utf-8', 'Application/JSON',
                                          'application/x-www-form-urlencoded'])
def test_content_types_that_count_as_json(server, content_type):
    answer = server.post('/v1/attention/forward', wire.small_bytes(), {'Content-Type': content_type} if content_type else {})
    ok(answer)
    assert answer.headers['content-type'].startswith('application/json')


def test_chunked_bodies(server):
    body = wire.small_bytes()
    want = ok(server.post('/v1/attention/forward', body))['out']
    for size in (1, 7, 100, len(body)):
        pieces = (body[i:i + size] for i in range(0, len(body), size))
        connection = server.connect()
        connection.request('POST', '/v1/attention/forward', pieces, {'Content-Type': 'application/json'}, encode_chunked=True)
        answer = connection.getresponse()
        text = json.loads(answer.read())
        assert answer.status == 200 and text['out'] == want, text
        connection.close()


# ---- how answers are written -----------------------------------------------------------------------------------------

def test_answer_has_the_documented_members(server):
    answer = server.forward(**wire.small_body())
    a = ok(answer)
    assert set(a) == {'out', 'lse', 'sizes', 'backend', 'timing_us'}
    assert a['out']['shape'] == [1, 3, 2, 4] and a['out']['dtype'] == 'float32'
    assert set(a['out']) == {'shape', 'dtype', 'data'}
    assert isinstance(a['backend'], str) and a['backend']
    assert set(a['timing_us']) == {'queue', 'copy_in', 'compute', 'copy_out'}
    assert all(isinstance(t, (int, float)) and 0 <= t < 60e6 for t in a['timing_us'].values())
    assert int(answer.headers['content-length']) == len(answer.body)
    assert answer.headers['content-type'] == 'application/json'


@pytest.mark.parametrize('outputs', [['out'], ['lse'], ['lse', 'out']])
def test_outputs_chooses_what_is_sent(server, outputs):
    a = ok(server.forward(**wire.small_body(), outputs=outputs))
    assert {'out', 'lse'} & set(a) == set(outputs)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_array_encoding_says_the_same_as_base64(server, dtype):
    # two query rows see no key, so their lse is -inf
    members, _ = random_problem(rng(16), B=2, Sq=5, Sk=3, H=2, D=4, dtype=dtype, causal=True)
    numbers, text = ok(server.forward(**members, encoding='array')), ok(server.forward(**members))
    for n in ('out', 'lse'):
        assert numbers[n]['shape'] == text[n]['shape'] and numbers[n]['dtype'] == text[n]['dtype']
        got = wire.raw(value(numbers[n]), text[n]['dtype'])
        assert got == wire.raw(value(text[n]), text[n]['dtype'])
    assert '"-Infinity"' in json.dumps(numbers['lse'])


@pytest.mark.parametrize('size', range(1, 9))
def test_base64_of_every_remainder(server, size):
    """Answers are encoded in blocks. The base64 must be the same wherever the boundaries between blocks fall."""
    q, k = np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1))
    v = rng(17).standard_normal((1, 1, 1, size))
    a = ok(server.forward(q=tensor(q, 'float16'), k=tensor(k, 'float16'), v=tensor(v, 'float16')))
    assert a['out']['data'] == tensor(v, 'float16')['data']


def test_a_large_answer_is_whole(server):
    q = np.zeros((1, 3001, 1, 1))
    v = rng(18).standard_normal((1, 1, 1, 255))
    a = ok(server.forward(q=tensor(q, 'float16'), k=tensor(np.ones((1, 1, 1, 1)), 'float16'), v=tensor(v, 'float16'), outputs=['out']))
    assert (value(a['out'])[0, :, 0] == wire.rounded(v, 'float16')[0, 0, 0]).all()


@pytest.mark.parametrize('B, Sq, Sk', [(0, 3, 3), (1, 0, 3), (1, 3, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize('encoding', ['base64', 'array'])
def test_sizes_of_zero_are_exact(server, B, Sq, Sk, encoding):
    members, _ = random_problem(rng(19), B=B, Sq=Sq, Sk=Sk, H=2, D=4, encoding=encoding)
    a = ok(server.forward(**members))
    assert a['out']['shape'] == [B, Sq, 2, 4] and a['lse']['shape'] == [B, 2, Sq]
    assert not value(a['out']).any() and (value(a['lse']) == -np.inf).all()


# ---- pages -----------------------------------------------------------------------------------------------------------

def in_pages(x, lengths, page_size, r):
    """Stores k and v of x [B, Sk, Hk, D] in pages. Returns (k, v, page_table, seqlens_k). The pages are in random
    order, and rows share some of them. Every slot that holds no key has NaN."""
    B, most = len(lengths), -(-max(lengths) // page_size)
    order = r.permutation(B * most + 2)
    table = np.where(np.arange(most) < -(-np.array(lengths)[:, None] // page_size), order[:B * most].reshape(B, most), 2**31 - 1)
    pools = {}
    for name in 'kv':
        pools[name] = np.full((B * most + 2, page_size, *x[name].shape[2:]), np.nan)
        for b, length in enumerate(lengths):
            for j in range(length):
                pools[name][table[b, j // page_size], j % page_size] = x[name][b, j]
    return pools['k'], pools['v'], table, np.array(lengths)


def rows_of(x, lengths, **options):
    """Computes each batch row alone, with only the keys that the row has. Returns out and lse."""
    parts = [ref.forward(x['q'][b:b + 1], x['k'][b:b + 1, :n], x['v'][b:b + 1, :n], **options) for b, n in enumerate(lengths)]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


@pytest.mark.parametrize('page_size', [1, 7, 16, 64])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float8_e4m3fn'])
@pytest.mark.parametrize('Sq', [1, 40])
def test_pages(server, page_size, dtype, Sq):
    lengths = [150, 0, 64, 1]
    members, x = random_problem(rng(60), B=4, Sq=Sq, Sk=150, H=4, Hk=2, D=24, Dv=16, dtype=dtype, causal=True)
    k, v, table, lens = in_pages(x, lengths, page_size, rng(61))
    paged = {'k': tensor(k, dtype), 'v': tensor(v, dtype), 'page_table': tensor(table, 'int32'), 'seqlens_k': tensor(lens, 'int32')}
    a = ok(server.forward(**{**members, **paged}))
    out, lse = rows_of(x, lengths, causal=True)
    close(value(a['out']), out, RTOL[dtype])
    close(value(a['lse']), lse, 1e-4 if dtype == 'float8_e4m3fn' else 1e-5)
    whole = ok(server.forward(**members, seqlens_k=tensor(lens, 'int32')))
    if whole['backend'] == a['backend']:
        assert whole['out'] == a['out'] and whole['lse'] == a['lse']


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_latent_attention(server, dtype):
    members, x = random_problem(rng(68), B=2, Sq=2, Sk=40, H=16, Hk=1, D=576, Dv=512, dtype=dtype, causal=True, scale=0.07)
    a = ok(server.forward(**members))
    out, lse, _ = ref.forward(x['q'], x['k'], x['v'], causal=True, scale=0.07)
    close(value(a['out']), out, RTOL[dtype])
    close(value(a['lse']), lse, 1e-5)


def test_pages_with_packed_queries_and_verify(server):
    lengths, queries = [90, 33, 0], [5, 1, 4]
    members, x = random_problem(rng(62), B=3, Sq=5, Sk=90, H=4, Hk=2, D=16)
    k, v, table, lens = in_pages(x, lengths, 16, rng(63))
    a = ok(server.forward(q=tensor(np.concatenate([x['q'][b, :n] for b, n in enumerate(queries)])), k=tensor(k), v=tensor(v),
                          page_table=tensor(table, 'int32'), seqlens_k=tensor(lens, 'int32'), causal=True, verify='all',
                          cu_seqlens_q=tensor(np.cumsum([0] + queries), 'int32')))
    want = [ref.forward(x['q'][b:b + 1, :n], x['k'][b:b + 1, :m], x['v'][b:b + 1, :m], causal=True) for b, (n, m) in enumerate(zip(queries, lengths))]
    close(value(a['out']), np.concatenate([w[0][0] for w in want]))
    close(value(a['lse']), np.concatenate([w[1][0] for w in want], 1))
    assert a['verification']['rows'] == 4 * sum(queries) and a['verification']['relative'] < 1e-5


def test_pages_as_flashinfer_has_them(server):
    """Uses the conversion from FlashInfer's page table that PROTOCOL.md shows."""
    with open(f'{ROOT}/proto-json/PROTOCOL.md') as f:
        code = re.search(r'### Pages.*?```python\n(.*?)```', f.read(), re.S).group(1)
    page_size, lengths = 4, [9, 0, 4, 1]
    pages = [-(-n // page_size) for n in lengths]
    members, x = random_problem(rng(64), B=4, Sq=2, Sk=9, H=2, D=8, causal=True)
    k, v, table, lens = in_pages(x, lengths, page_size, rng(65))
    names = {'np': np, 'page_size': page_size, 'kv_indptr': np.cumsum([0] + pages),
             'kv_indices': np.concatenate([table[b, :n] for b, n in enumerate(pages)]),
             'kv_last_page_len': np.array([n - (p - 1) * page_size if p else 0 for n, p in zip(lengths, pages)])}
    exec(code, names)
    assert (names['seqlens_k'] == lens).all()
    a = ok(server.forward(**{**members, 'k': tensor(k), 'v': tensor(v)}, page_table=tensor(names['page_table'], 'int32'),
                          seqlens_k=tensor(names['seqlens_k'], 'int32')))
    out, lse = rows_of(x, lengths, causal=True)
    close(value(a['out']), out)
    close(value(a['lse']), lse)


def test_pages_are_checked(server):
    members, x = random_problem(rng(66), B=2, Sq=1, Sk=6, H=2, D=4)
    k, v, table, lens = in_pages(x, [6, 2], 2, rng(67))
    good = {**members, 'k': tensor(k), 'v': tensor(v), 'page_table': tensor(table, 'int32'), 'seqlens_k': tensor(lens, 'int32')}
    ok(server.forward(**good))
    wrong, unused = table.copy(), table.copy()
    wrong[0, 1] = len(k)
    unused[1, 1] = -7  # no kernel reads this entry of the page table, so any int32 is allowed
    ok(server.forward(**{**good, 'page_table': tensor(unused, 'int32')}))
    far = {'shape': [2, 3], 'dtype': 'int64', 'data': [*unused.ravel().tolist()[:-1], 2**40]}
    for change, pointer, says in [
            ({'page_table': tensor(wrong, 'int32')}, '/page_table/data', f'page_table: [0, 1] is {len(k)}, must be between 0 and {len(k) - 1}'),
            ({'page_table': far}, '/page_table/data', 'the number is out of the range of int32'),
            ({'seqlens_k': tensor(np.array([7, 2]), 'int32')}, '/seqlens_k/data', 'seqlens_k: [0] is 7, must be between 0 and 6'),
            ({'k': tensor(k[:, :1])}, '/v/shape/1', 'v: shape[1] is 2, must be 1, the slots of a page of k'),
            ({'layout': 'bhsd'}, '/layout', 'layout: is bhsd, must be bshd with page_table')]:
        answer = server.forward(**{**good, **change})
        assert answer.status == 400 and answer.json()['pointer'] == pointer and says in answer.json()['detail'], answer
    backward = server.post('/v1/attention/backward', {**good, 'dout': good['q']})
    assert backward.status == 422 and 'backward has no pages' in backward.json()['detail']
    del good['seqlens_k']
    assert 'seqlens_k: is required with page_table' in server.forward(**good).json()['detail']


# ---- verify ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('verify, rows', [(5, 5), ('all', 2 * 3 * 40)])
def test_verify_reports_the_error(server, verify, rows):
    members, x = random_problem(rng(20), B=2, Sq=40, H=3, D=16, dtype='bfloat16', causal=True, verify=verify)
    a = ok(server.forward(**members))
    v = a['verification']
    assert set(v) == {'max_abs', 'relative', 'rows'} and v['rows'] == rows
    assert 0 <= v['max_abs'] < 2e-2 and 0 <= v['relative'] < 8e-3
    if verify == 'all':
        error = np.abs(value(a['out']) - ref.forward(x['q'], x['k'], x['v'], causal=True)[0]).max()
        assert v['max_abs'] == pytest.approx(error, rel=1e-3)


def test_verify_of_more_rows_than_there_are(server):
    assert ok(server.forward(**wire.small_body(), verify=10**6))['verification']['rows'] == 6


def test_verifying_while_clients_leave_and_deadlines_pass(server):
    """Other threads verify rows by computing them again. When a client leaves, the server must not free memory that
    these threads read."""
    body = json.dumps({'requests': [random_problem(rng(21 + i), B=2, Sq=96, H=3, D=32, dtype='float16', verify='all')[0] for i in range(2)]}).encode()
    def client(me):
        for turn in range(6):
            if (me + turn) % 3 == 0:  # leaves
                connection = server.connect()
                connection.connect()
                connection.sock.sendall(request_bytes('/v1/attention/forward', body))
                connection.close()
            # this client waits only briefly, and gets 200 if the verification is done by then
            elif (me + turn) % 3 == 1:
                assert server.post('/v1/attention/forward', body, {'X-Request-Timeout-Ms': str(2 + 3 * turn)}).status in (200, 504)
            else:
                responses = ok(server.post('/v1/attention/forward', body))['responses']
                assert [r['verification']['rows'] for r in responses] == [2 * 3 * 96] * 2

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(client, range(6)))  # list() raises any exception of a client here
    assert ok(server.forward(**wire.small_body(), verify='all'))['verification']['rows'] == 6


# ---- batches ---------------------------------------------------------------------------------------------------------

def test_requests_are_answered_in_order_each_with_its_own(server):
    problems = [random_problem(rng(s), Sq=3 + s, H=1 + s % 2, D=4 + s, dtype=['float32', 'float16'][s % 2], causal=bool(s % 3))[0] for s in range(9)]
    alone = [ok(server.forward(**p)) for p in problems]
    a = ok(server.post('/v1/attention/forward', {'requests': problems}))
    assert set(a) == {'responses'}
    for one, many in zip(alone, a['responses'], strict=True):
        assert one['out'] == many['out'] and one['lse'] == many['lse']


def test_a_bad_problem_in_a_batch_is_answered_alone(server):
    good, bad = wire.small_body(), wire.small_body(scale='much')
    a = ok(server.post('/v1/attention/forward', {'requests': [good, bad, good]}))['responses']
    assert a[0]['out'] == a[2]['out'] == ok(server.forward(**good))['out']
    error = a[1]['error']
    assert error['status'] == 400 and error['code'] == 'invalid-request' and error['pointer'] == '/requests/1/scale'


def test_an_empty_batch_is_a_mistake(server):
    answer = server.post('/v1/attention/forward', {'requests': []})
    assert answer.status == 400 and answer.json()['pointer'] == '/requests'


def test_the_device_paper_serves_what_its_paper_has(serve):
    server = serve('--devices', 'paper')
    problem, arrays = random_problem(rng(5), Sq=40, Sk=50, H=2, D=16, causal=True)
    answer = ok(server.post('/v1/attention/forward', problem))
    out, lse = ref.forward(arrays['q'], arrays['k'], arrays['v'], causal=True)[:2]
    close(value(answer['out']), out)
    close(value(answer['lse']), lse)
    assert answer['backend'] == 'paper flash2'
    grouped, _ = random_problem(rng(5), Sq=4, H=4, Hk=2, D=16)
    refused = server.post('/v1/attention/forward', grouped)
    assert refused.status == 422 and 'several query heads read one key/value head' in refused.json()['error'], refused
