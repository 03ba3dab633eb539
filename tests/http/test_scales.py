"""Scales of float8 tensors: one number, or one for each head, for each batch row, or for both, in every format."""
import numpy as np
import pytest

import formats
import ref
import wire

B, H, HK, D = 2, 4, 2, 16
KINDS = formats.FORMATS + ('envelope',)
SHAPES = {'number': (), '[1]': (1,), '[Hk]': (HK,), '[B, 1]': (B, 1), '[1, Hk]': (1, HK), '[1, 1]': (1, 1), '[B, Hk]': (B, HK)}


def scales_of(shape):
    """Returns ({member: JSON}, {name: its scales as [B, Hk]}) of scales with this shape."""
    r = np.random.default_rng(4)
    values = {n: wire.rounded(r.uniform(0.5, 2, shape), 'float32') for n in ('q_scale', 'k_scale', 'v_scale')}
    return {n: float(x) if shape == () else wire.tensor(x) for n, x in values.items()}, {n: np.broadcast_to(x, (B, HK)) for n, x in values.items()}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_a_float8_scale_has_any_shape_that_broadcasts(server, kind, shape):
    members, x = wire.random_problem(np.random.default_rng(3), B=B, Sq=9, Sk=20, H=H, Hk=HK, D=D, dtype='float8_e4m3fn', out_dtype='float32')
    given, scales = scales_of(shape)
    status, got = formats.results(server, kind, 'forward', {**members, **given})
    assert status == 200, got
    per_head = {n: s[:, None, :, None] for n, s in scales.items()}
    out, lse, _ = ref.forward(x['q'] * np.repeat(per_head['q_scale'], H // HK, 2), x['k'] * per_head['k_scale'], x['v'] * per_head['v_scale'])
    np.testing.assert_allclose(got['out'], out, atol=2e-2)
    np.testing.assert_allclose(got['lse'], lse, atol=1e-4)
    status, same = formats.results(server, kind, 'forward', {**members, **{n: wire.tensor(s) for n, s in scales.items()}})
    assert status == 200 and all(np.array_equal(got[n], same[n]) for n in got)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('shape', [(), (1,), (HK,), (3, 1), (1, HK)], ids=str)
def test_scales_of_packed_sequences_broadcast_over_them(server, kind, shape):
    r = np.random.default_rng(5)
    members = {n: wire.tensor(r.standard_normal((S, heads, D)), 'float8_e4m3fn') for n, S, heads in (('q', 9, H), ('k', 14, HK), ('v', 14, HK))}
    members |= {'cu_seqlens_q': wire.tensor([0, 4, 4, 9], 'int32'), 'cu_seqlens_k': wire.tensor([0, 6, 9, 14], 'int32')}
    scale = wire.rounded(r.uniform(0.5, 2, shape), 'float32')
    status, got = formats.results(server, kind, 'forward', {**members, 'v_scale': float(scale) if shape == () else wire.tensor(scale)})
    assert status == 200, got
    status, same = formats.results(server, kind, 'forward', {**members, 'v_scale': wire.tensor(np.broadcast_to(scale, (3, HK)))})
    assert status == 200 and np.array_equal(got['out'], same['out'])


@pytest.mark.parametrize('given, pointer, says', [
    ({'q_scale': 1e39}, '/q_scale', 'q_scale: is 1e+39, must be between -3.4e38 and 3.4e38 (a float32)'),
    ({'k_scale': '0.5'}, '/k_scale', 'k_scale: is \'0.5\', must be a number or an object'),
    ({'v_scale': wire.tensor(np.ones(3))}, '/v_scale/shape/0', 'must be 1 or 2, the heads of k; one dimension is that of the heads, and a scale of each batch row is [B, 1]'),
    ({'v_scale': wire.tensor(np.ones((3, 2)))}, '/v_scale/shape/0', 'must be 1 or 2, the batch of q'),
    ({'q': wire.tensor(np.ones((B, 9, H, D))), 'q_scale': 2}, '/q_scale', 'q has dtype float32, scales are for float8_e4m3fn'),
], ids=['beyond_float32', 'text', 'one_dimension', 'batch', 'not_float8'])
def test_the_message_of_a_scale_that_does_not_fit_says_what_would(server, given, pointer, says):
    members, _ = wire.random_problem(np.random.default_rng(3), B=B, Sq=9, H=H, Hk=HK, D=D, dtype='float8_e4m3fn')
    answer = server.forward(**{**members, **given})
    assert answer.status == 400 and answer.json()['pointer'] == pointer and says in answer.json()['detail'], answer


def test_a_scale_that_is_no_number_cannot_be_a_parameter(server):
    members, _ = wire.random_problem(np.random.default_rng(3), B=B, Sq=9, H=H, Hk=HK, D=D, dtype='float8_e4m3fn')
    status, why = formats.results(server, 'kserve', 'forward', {**members, 'k_scale': '0.5'})
    assert status == 400 and why['pointer'] == '/parameters/k_scale' and 'must be a number; as a tensor it goes into inputs' in why['detail'], why
    status, why = formats.results(server, 'safetensors', 'forward', {**members, 'k_scale': 'high'})
    assert status == 400 and why['pointer'] == '/k_scale' and 'must be a number' in why['detail'], why
    status, why = formats.results(server, 'safetensors', 'forward', {**members, 'k_scale': [1, 2]})
    assert status == 400 and why['pointer'] == '/k_scale' and why['detail'] == 'k_scale: is an array in __metadata__, must be a number; as a tensor it is one of the file\'s tensors', why
    assert 'q_scale' in server.get('/v2/models/attention_forward/config').json()['parameters']['request_parameters']['string_value']


def test_a_scale_that_came_as_a_parameter_is_pointed_to_there(server):
    members, _ = wire.random_problem(np.random.default_rng(3), B=B, Sq=9, H=H, Hk=HK, D=D, dtype='float8_e4m3fn')
    float32 = {**members, 'q': wire.tensor(np.ones((B, 9, H, D)))}
    for given in ({**members, 'q_scale': 1e39}, {**float32, 'q_scale': 2}):
        status, why = formats.results(server, 'kserve', 'forward', given)
        assert status == 400 and why['pointer'] == '/parameters/q_scale', why
