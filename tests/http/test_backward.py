"""POST /v1/attention/backward: gradients, which tensors may be given or are recomputed, and contexts (saved
forwards)."""
import numpy as np
import pytest

import ref
import wire
from test_forward import RTOL, Q, K, V, close, ok, rng
from wire import random_problem, tensor, value

# The small exact examples of test_forward.py, here with dout and dlse. Each row has the options, then dq, dk and dv,
# and in some rows a further gradient.
DOUT, DLSE = [[1, -1], [0.5, 0], [0, 2]], [0, 0, 1]
EXACT = [
    ({}, [[0, 0], [-0.104993585, 0.209987171], [-0.517506312, 3.035012623]],
     [[-0.517506312, -0.622499897], [1.517506312, 1.622499897]], [[0.790660040, -0.193175736], [0.709339960, 1.193175736]], {}),
    ({'causal': True}, [[0, 0], [0, 0], [-0.517506312, 3.035012623]],
     [[-0.517506312, -0.517506312], [1.517506312, 1.517506312]], [[0.5, 0.537882843], [0, 1.462117157]], {}),
    ({'causal': True, 'alignment': 'top_left'}, [[0, 0], [-0.104993585, 0.209987171], [-0.517506312, 3.035012623]],
     [[-0.517506312, -0.622499897], [1.517506312, 1.622499897]], [[1.059601461, -0.462117157], [0.440398539, 1.462117157]], {}),
    ({'causal': True, 'sinks': [0]}, [[0, 0], [0.125, 0], [-0.318352959, 3.591181520]],
     [[-0.318352959, -0.193352959], [1.795590760, 1.795590760]], [[0.25, 0.489456942], [0, 1.330481912]], {'dsinks': [-0.602237801]}),
    ({'softcap': 1}, [[0, 0], [-0.199856489, 0.028240052], [-0.226895750, 0.217641418]],
     [[-0.226895750, -0.426752239], [0.108820709, 0.122940735]], [[0.819736008, 0.217427784], [0.680263992, 0.782572216]], {}),
    ({'alibi_slopes': [0.5]}, [[0, 0], [-0.149146452, 0.298292904], [-0.414160284, 2.828320569]],
     [[-0.414160284, -0.563306737], [1.414160284, 1.563306737]], [[0.908787238, -0.452723429], [0.591212762, 1.452723429]],
     {'dalibi_slopes': [0.265013832]}),
]


@pytest.mark.parametrize('options, dq, dk, dv, more', EXACT, ids=[str(e[0]) for e in EXACT])
def test_small_exact_examples(server, options, dq, dk, dv, more):
    options = {k: tensor(v) if isinstance(v, list) else v for k, v in options.items()}
    members = {n: tensor(np.array(x, float).reshape(1, len(x), 1, 2)) for n, x in (('q', Q), ('k', K), ('v', V), ('dout', DOUT))}
    a = ok(server.backward(**members, dlse=tensor(np.array(DLSE, float).reshape(1, 1, 3)), scale=1, **options,
                           outputs=['dq', 'dk', 'dv', *more]))
    for name, want in dict(dq=dq, dk=dk, dv=dv, **more).items():
        close(value(a[name]).reshape(np.shape(want)), want)


@pytest.mark.parametrize('layout', ['bshd', 'bhsd'])
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('given', [True, False])
def test_every_dtype_in_both_layouts(server, dtype, layout, given):
    members, x = random_problem(rng(1), B=2, Sq=33, Sk=41, H=4, Hk=2, D=16, Dv=8, dtype=dtype, layout=layout, back=True, causal=True)
    out, lse, dq, dk, dv, _ = ref.backward(x['q'], x['k'], x['v'], x['dout'], causal=True)
    if given:
        members['out'] = tensor(out.swapaxes(1, 2) if layout == 'bhsd' else out, dtype)
        members['lse'] = tensor(lse)
    a = ok(server.backward(**members))
    assert {'dq', 'dk', 'dv'} <= set(a) and not {'out', 'lse'} & set(a)
    for name, want in dict(dq=dq, dk=dk, dv=dv).items():
        got = value(a[name])
        assert a[name]['dtype'] == dtype
        close(got.swapaxes(1, 2) if layout == 'bhsd' else got, want, 3 * RTOL[dtype])


@pytest.mark.parametrize('member', ['out', 'lse'])
def test_out_and_lse_come_together_or_not_at_all(server, member):
    members, x = random_problem(rng(2), back=True)
    out, lse, _ = ref.forward(x['q'], x['k'], x['v'])
    members[member] = tensor({'out': out, 'lse': lse}[member])
    answer = server.backward(**members)
    assert answer.status == 400 and answer.json()['code'] == 'invalid-request', answer


@pytest.mark.parametrize('missing', ['q', 'k', 'v', 'dout'])
def test_what_is_required(server, missing):
    members, _ = random_problem(rng(3), back=True)
    del members[missing]
    answer = server.backward(**members)
    assert answer.status == 400 and missing in answer.json()['detail'], answer


def test_dout_is_no_member_of_forward(server):
    members, _ = random_problem(rng(3), back=True)
    answer = server.forward(**members)
    assert answer.status == 400 and answer.json()['pointer'] == '/dout', answer


@pytest.mark.parametrize('shape', [(1, 1, 1, 7), (2, 1, 1, 7), (1, 2, 5, 7), (2, 2, 1, 7), (2, 2, 5, 7)])
def test_gradient_of_bias_has_the_shape_of_bias(server, shape):
    members, x = random_problem(rng(4), B=2, Sq=5, Sk=7, H=2, D=4, back=True)
    bias = rng(5).standard_normal(shape).astype(np.float32)
    a = ok(server.backward(**members, bias=tensor(bias), outputs=['dbias']))
    assert a['dbias']['dtype'] == 'float32' and not {'dq', 'dk', 'dv'} & set(a)
    close(value(a['dbias']), ref.backward(x['q'], x['k'], x['v'], x['dout'], bias=bias)[5]['dbias'])


@pytest.mark.parametrize('name, needs', [('dsinks', 'sinks'), ('dbias', 'bias'), ('dalibi_slopes', 'alibi_slopes')])
def test_a_gradient_without_its_input_is_refused(server, name, needs):
    members, _ = random_problem(rng(6), back=True)
    answer = server.backward(**members, outputs=[name])
    assert answer.status == 400 and needs in answer.json()['detail'], answer
    dout = members.pop('dout')  # the same gradients from a context (saved forward), which this backward does not use up
    context = ok(server.forward(**members, save=True))['context']
    answer = server.backward(context=context, dout=dout, outputs=[name])
    assert answer.status == 400 and answer.json()['pointer'] == '/outputs' and needs in answer.json()['detail'], answer
    assert server.backward(context=context, dout=dout).status == 200


def test_packed_sequences(server):
    lq, lk = [3, 0, 7, 1], [5, 4, 0, 1]
    r = rng(7)
    x = {'q': r.standard_normal((11, 4, 8)), 'k': r.standard_normal((10, 2, 8)), 'v': r.standard_normal((10, 2, 8)), 'dout': r.standard_normal((11, 4, 8))}
    x = {n: wire.rounded(a, 'float32') for n, a in x.items()}
    cu_q, cu_k = np.cumsum([0] + lq), np.cumsum([0] + lk)
    a = ok(server.backward(**{n: tensor(t) for n, t in x.items()}, cu_seqlens_q=tensor(cu_q, 'int32'), cu_seqlens_k=tensor(cu_k, 'int32'), causal=True))
    for s in range(4):
        qs, ks = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        _, _, dq, dk, dv, _ = ref.backward(x['q'][None, qs], x['k'][None, ks], x['v'][None, ks], x['dout'][None, qs], causal=True)
        close(value(a['dq'])[qs], dq[0])
        close(value(a['dk'])[ks], dk[0])
        close(value(a['dv'])[ks], dv[0])


def test_dropout_of_backward_is_that_of_forward(server):
    """sum(dout * out) is linear in v, and dv is its gradient. A forward whose v has a single 1 and otherwise zeros
    therefore gives the element of dv at the place of the 1. Forward and backward must drop the same elements."""
    members, x = random_problem(rng(8), Sq=6, H=1, D=4, back=True, dropout_p=0.5, seed=99)
    dv = value(ok(server.backward(**members, outputs=['dv']))['dv'])
    forward = {n: t for n, t in members.items() if n != 'dout'}
    for j in range(6):
        for d in range(4):
            e = np.zeros((1, 6, 1, 4))
            e[0, j, 0, d] = 1
            out = value(ok(server.forward(**{**forward, 'v': tensor(e)}))['out'])
            assert abs((out * x['dout']).sum() - dv[0, j, 0, d]) < 1e-5


def test_float8_has_no_backward(server):
    members, _ = random_problem(rng(9), back=True, dtype='float8_e4m3fn')
    answer = server.backward(**members)
    assert answer.status in (400, 422), answer


@pytest.mark.parametrize('deterministic', [True, False])
def test_the_same_bits_again(server, deterministic):
    members, _ = random_problem(rng(10), B=2, Sq=130, H=4, Hk=2, D=32, dtype='bfloat16', back=True, causal=True, deterministic=deterministic)
    answers = [ok(server.backward(**members)) for _ in range(5)]
    for n in ('dq', 'dk', 'dv'):
        assert all(a[n] == answers[0][n] for a in answers)


def test_requests(server):
    problems = [random_problem(rng(s), Sq=3 + s, D=4 + s, back=True)[0] for s in range(5)]
    alone = [ok(server.backward(**p)) for p in problems]
    together = ok(server.post('/v1/attention/backward', {'requests': problems}))['responses']
    for one, many in zip(alone, together, strict=True):
        assert all(one[n] == many[n] for n in ('dq', 'dk', 'dv'))


# ---- dtypes of gradients ---------------------------------------------------------------------------------------------

GRADIENTS = ('dq', 'dk', 'dv')


def rounds_to(wide, narrow):
    """Returns whether a tensor in 16 bits is the other, wider tensor after rounding."""
    for name in GRADIENTS:
        assert wide[name]['dtype'] == 'float32' and wide[name]['shape'] == narrow[name]['shape'], name
        assert tensor(value(wide[name]), narrow[name]['dtype']) == narrow[name], name


@pytest.mark.parametrize('layout', ['bshd', 'bhsd'])
@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_float32_gradients_round_to_those_in_16_bits_and_are_closer_to_the_truth(server, dtype, layout):
    members, x = random_problem(rng(20), B=2, Sq=33, Sk=41, H=4, Hk=2, D=16, Dv=8, dtype=dtype, layout=layout, back=True, causal=True, deterministic=True)
    narrow, wide = ok(server.backward(**members)), ok(server.backward(**members, grad_dtype='float32'))
    assert all(narrow[n] == ok(server.backward(**members, grad_dtype=dtype))[n] for n in GRADIENTS)
    rounds_to(wide, narrow)
    _, _, *want, _ = ref.backward(x['q'], x['k'], x['v'], x['dout'], causal=True)
    for name, truth in zip(GRADIENTS, want, strict=True):
        truth = truth.swapaxes(1, 2) if layout == 'bhsd' else truth
        error = [np.linalg.norm(value(a[name]) - truth) for a in (wide, narrow)]
        assert error[0] < error[1], name


def test_packed_sequences_have_float32_gradients(server):
    members, _ = random_problem(rng(21), Sq=12, H=4, Hk=2, D=16, dtype='bfloat16', back=True, deterministic=True)
    for name in ('q', 'k', 'v', 'dout'):
        members[name]['shape'] = members[name]['shape'][1:]
    members.update({n: tensor([0, 5, 5, 12], 'int32') for n in ('cu_seqlens_q', 'cu_seqlens_k')})
    rounds_to(ok(server.backward(**members, grad_dtype='float32')), ok(server.backward(**members)))


def test_other_gradients_are_float32_whatever_is_asked(server):
    members, _ = random_problem(rng(22), H=2, dtype='float16', back=True)
    more = dict(bias=tensor(np.zeros((1, 2, 5, 5)), 'float16'), sinks=tensor([0, 1]), alibi_slopes=tensor([0.5, 0.25]),
                outputs=['dq', 'dbias', 'dsinks', 'dalibi_slopes'])
    for asked, dtype in (({}, 'float16'), ({'grad_dtype': 'float16'}, 'float16'), ({'grad_dtype': 'float32'}, 'float32')):
        a = ok(server.backward(**members, **more, **asked))
        assert [a[n]['dtype'] for n in more['outputs']] == [dtype, 'float32', 'float32', 'float32']


def test_each_problem_of_an_envelope_has_its_own_dtype_of_gradients(server):
    members, _ = random_problem(rng(23), D=16, dtype='bfloat16', back=True, deterministic=True)
    asked = [{}, {'grad_dtype': 'float32'}, {'grad_dtype': 'float16'}, {'out_dtype': 'float32'}]
    narrow, wide, *refused = ok(server.post('/v1/attention/backward', {'requests': [{**members, **a} for a in asked]}))['responses']
    rounds_to(wide, narrow)
    assert [r['error']['pointer'] for r in refused] == ['/requests/2/grad_dtype', '/requests/3/out_dtype']


def test_a_context_has_float32_gradients_and_a_refusal_does_not_use_it_up(server):
    members, _ = random_problem(rng(24), B=2, Sq=9, H=4, Hk=2, D=16, dtype='float16', back=True, causal=True)
    dout = members.pop('dout')
    first, second = (ok(server.forward(**members, save=True))['context'] for _ in range(2))
    refused = server.backward(context=first, dout=dout, grad_dtype='bfloat16')
    assert (refused.status, refused.json()['pointer']) == (400, '/grad_dtype'), refused
    assert refused.json()['detail'] == "grad_dtype: is bfloat16, must be float32 or float16, q's dtype"
    # the refused request has not used up the context (saved forward)
    rounds_to(ok(server.backward(context=first, dout=dout, grad_dtype='float32', deterministic=True)),
              ok(server.backward(context=second, dout=dout, deterministic=True)))


# ---- contexts --------------------------------------------------------------------------------------------------------

def test_a_saved_forward_serves_one_backward(server):
    members, x = random_problem(rng(11), B=2, Sq=9, H=4, Hk=2, D=8, dtype='float16', back=True, causal=True, softcap=3.0)
    dout = members.pop('dout')
    forward = ok(server.forward(**members, save=True))
    context = forward['context']
    assert isinstance(context, str) and len(context) >= 16
    whole = ok(server.backward(**members, dout=dout, out=forward['out'], lse=forward['lse']))
    saved = ok(server.backward(context=context, dout=dout))
    for n in ('dq', 'dk', 'dv'):
        assert saved[n] == whole[n]
    again = server.backward(context=context, dout=dout)
    assert again.status == 404 and again.json()['code'] == 'not-found', again


@pytest.mark.parametrize('D, Dv', [(512, 512), (1024, 1), (1, 1024)])
def test_a_context_of_wide_heads(server, D, Dv):
    members, x = random_problem(rng(26), Sq=20, Sk=33, H=2, Hk=1, D=D, Dv=Dv, dtype='float16', back=True, causal=True)
    dout = members.pop('dout')
    context = ok(server.forward(**members, save=True))['context']
    a = ok(server.backward(context=context, dout=dout))
    _, _, dq, dk, dv, _ = ref.backward(x['q'], x['k'], x['v'], x['dout'], causal=True)
    for name, want in dict(dq=dq, dk=dk, dv=dv).items():
        close(value(a[name]), want, 3 * RTOL['float16'])


@pytest.mark.parametrize('back', [False, True])
def test_heads_of_up_to_1024_numbers(server, back):
    members, _ = random_problem(rng(27), Sq=2, D=1024, back=back)
    post = server.backward if back else server.forward
    ok(post(**members))
    wider = random_problem(rng(27), Sq=2, D=1025, back=back)[0]
    refused = post(**wider)
    assert refused.status == 422 and refused.json()['pointer'] == '/q/shape/3', refused
    assert refused.json()['detail'] == 'q: shape[3] is 1025, head sizes up to 1024 are supported', refused
    refused = post(**{**members, 'v': wider['v']})
    assert refused.status == 422 and refused.json()['pointer'] == '/v/shape/3', refused


def test_an_unknown_context(server):
    answer = server.backward(context='0' * 32, dout=tensor(np.zeros((1, 1, 1, 1))))
    assert answer.status == 404 and answer.headers['content-type'] == 'application/problem+json', answer


def test_context_excludes_the_tensors_it_stands_for(server):
    members, _ = random_problem(rng(12), back=True)
    answer = server.backward(**members, context='0' * 32)
    assert answer.status == 400, answer


def test_without_save_there_is_no_context(server):
    assert 'context' not in ok(server.forward(**wire.small_body(), save=False))
