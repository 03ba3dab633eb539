"""Valid requests that are most likely mistakes: the server computes them as they are written, and `hints` in the answer
says what looks wrong. mistakes.py has the text of each hint."""
import json
import re

import numpy as np
import pytest

import mistakes
from mistakes import FORWARD, GOOD, array, tensor

ZERO = 'scale is 0, and every key weighs the same; leave scale out for 1/sqrt(D)'


def hints(server, **members):
    answer = server.post(FORWARD, {**GOOD, **members})
    assert answer.status == 200, answer
    return answer.json().get('hints')


def test_a_request_as_it_is_meant_has_no_hints(server):
    S, D = mistakes.SK, mistakes.D
    square = tensor(array(mistakes.B, S, mistakes.H, D))
    for members in ({}, {'scale': D**-0.5}, {'scale': 1}, {'window': [4, 0]}, {'window': [-1, -1]}, {'softcap': 0}, {'dropout_p': 0},
                    {'bias': tensor(np.zeros((1, 1, 1, S), 'float32'))}, {'bias': tensor(np.full((1, 1, 1, S), 0.5, 'float16').astype('float32'))},
                    {'keep_mask': tensor(np.tri(mistakes.SQ, S, dtype='uint8')[None, None])}, {'q': square, 'keep_mask': tensor(np.tri(S, dtype='uint8')[None, None])}):
        assert hints(server, **members) is None, members


def test_a_layout_that_is_named_is_meant(server):
    few = {n: tensor(array(1, 2, 8, 4)) for n in 'qkv'}
    assert hints(server, **few) and not hints(server, **few, layout='bshd')
    assert not hints(server, q=tensor(array(1, 1, 8, 4)), k=few['k'], v=few['v']), 'one query has fewer rows than heads in any layout'


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_a_mask_as_bias_is_seen_in_every_dtype(server, dtype):
    bits = {'float32': np.float32(1).view('u4'), 'float16': np.uint16(0x3c00), 'bfloat16': np.uint16(0x3f80)}[dtype]
    mask = tensor(np.tri(mistakes.SQ, mistakes.SK).astype(bits.dtype)[None, None] * bits, dtype=dtype)
    qkv = {n: {**t, 'dtype': dtype, 'data': t['data'] if dtype == 'float32' else mistakes.b64(np.zeros(t['shape'], 'u2'))} for n, t in GOOD.items()}
    assert 'bias holds only 0 and 1' in hints(server, **qkv, bias=mask)[0]


def decode_ms(server, mask):
    """Returns the shortest time in ms that the server takes to decode and check a body with this mask."""
    one = tensor(np.zeros((1, len(mask), 1, 1), 'float32'))
    body = {**{n: one for n in 'qkv'}, 'keep_mask': tensor(mask[None, None])}
    timings = (server.post(FORWARD, body).headers['server-timing'] for _ in range(3))
    return min(float(re.search(r'decode;dur=([0-9.]+)', text)[1]) for text in timings)


def test_a_large_mask_above_the_diagonal_is_checked_as_fast_as_another(server):
    """Checking a large mask for hidden pairs above the diagonal must be as fast as checking another mask. In an earlier
    version the HTTP thread checked each element with two divisions."""
    S = 4000
    other = np.ones((S, S), 'uint8')
    other[0, 0] = 0
    assert decode_ms(server, np.triu(other, 1)) < 3 * decode_ms(server, other) + 10


def test_each_problem_of_an_envelope_and_a_backward_has_its_own(server):
    first, second = server.post(FORWARD, {'requests': [{**GOOD, 'scale': 0}, GOOD]}).json()['responses']
    assert first['hints'] == [ZERO] and 'hints' not in second
    assert server.post('/v1/attention/backward', {**mistakes.BACK, 'scale': 0}).json()['hints'] == [ZERO]


def test_other_formats_have_them_as_a_string_of_json(server):
    header = {n: {'dtype': 'F32', 'shape': [1, 1, 1, 1], 'data_offsets': [4 * i, 4 * i + 4]} for i, n in enumerate('qkv')}
    text = json.dumps({**header, '__metadata__': {'scale': '0'}}).encode()
    answer = server.post(FORWARD, len(text).to_bytes(8, 'little') + text + bytes(12), {'Content-Type': 'application/x-safetensors'})
    assert answer.status == 200, answer
    length = int.from_bytes(answer.body[:8], 'little')
    assert json.loads(json.loads(answer.body[8:8 + length])['__metadata__']['hints']) == [ZERO]
    answer = server.post('/v2/models/attention_forward/infer', {'inputs': mistakes.IN, 'parameters': {'scale': 0}})
    assert json.loads(answer.json()['parameters']['hints']) == [ZERO]


def test_a_step_has_them(server):
    cache = server.post('/v1/caches', {'kv_heads': 1, 'head_dim': 4, 'dtype': 'float32'}).json()['id']
    one = tensor(array(1, 1, 1, 4))
    answer = server.post('/v1/attention/decode', {'caches': [cache], 'q': one, 'k': one, 'v': one, 'scale': 0, 'window': [0, 0]}).json()
    assert server.ask('DELETE', f'/v1/caches/{cache}').status == 204
    assert [hint.split(',')[0] for hint in answer['hints']] == ['scale is 0', 'window [0']
