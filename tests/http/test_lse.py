"""A backward may be given lse. Before the server computes anything, it checks a few rows of lse against the scores."""
import numpy as np
import pytest

import formats
import wire

S, H, D = 24, 2, 16
BASE_2 = 'your lse is in base 2: multiply it by 0.6931472, for the natural logarithm is wanted'


def problem(server, of_forward=None, **options):
    """Makes a backward with the out and lse of a forward, which may have had other options (`of_forward`)."""
    members, _ = wire.random_problem(np.random.default_rng(3), Sq=S, H=H, D=D, back=True)
    forward = {n: m for n, m in members.items() if n != 'dout'} | (options if of_forward is None else of_forward)
    answer = server.forward(**forward).json()
    return {**members, **options, 'out': answer['out'], 'lse': answer['lse']}


def with_lse(members, change):
    return {**members, 'lse': wire.tensor(change(wire.value(members['lse'])))}


def refusal(server, kind, members):
    status, document = formats.ask(server, kind, 'backward', members)
    assert (status, document.get('code')) == (400, 'invalid-request'), (status, document)
    assert document['pointer'] == formats.pointer_of(kind, members, '/lse') and document['detail'] == document['error']
    return document['detail']


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_an_lse_in_base_2_is_refused_and_named(server, kind):
    """A backward with lse in base 2 must be refused. In an earlier version it was accepted, and the gradients were
    wrong without an error."""
    members = problem(server, causal=True)
    assert formats.ask(server, kind, 'backward', members)[0] == 200
    text = refusal(server, kind, with_lse(members, lambda lse: lse / np.log(2)))
    assert text.startswith('lse: [0, ') and text.endswith(BASE_2), text


OTHERS = [
    ('scale_1', {'scale': 1}, {}, 'your lse was computed with scale 1, 1: send the options of that forward'),
    ('scale_of_dv', {}, {'scale': 1}, 'your lse was computed with scale 1/sqrt(Dv), 0.25: send the options of that forward'),
    ('scale_squared', {'scale': 0.0625}, {}, 'your lse was computed with the square of scale, 0.0625: send the options of that forward'),
    ('no_causal', {}, {'causal': True}, 'your lse was computed with no causal and no window: send the options of that forward'),
    ('no_window', {}, {'window': [3, 0]}, 'your lse was computed with no causal and no window: send the options of that forward'),
    ('no_softcap', {}, {'softcap': 1}, 'your lse was computed with no softcap: send the options of that forward'),
]


@pytest.mark.parametrize('kind', formats.FORMATS)
@pytest.mark.parametrize('name, forward, backward, says', OTHERS, ids=[o[0] for o in OTHERS])
def test_an_lse_of_other_options_is_refused_and_they_are_named(server, kind, name, forward, backward, says):
    assert refusal(server, kind, problem(server, of_forward=forward, **backward)).endswith(says)


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_probabilities_that_sum_to_more_than_1_are_refused(server, kind):
    """The test compares the whole message: row, value, sum and rule."""
    zeros = {n: wire.tensor(np.zeros((1, 1, 1, 4))) for n in ('q', 'k', 'v', 'out', 'dout')}
    text = refusal(server, kind, {**zeros, 'lse': wire.tensor(np.full((1, 1, 1), -1))})
    assert text == 'lse: [0, 0, 0] is -1, with which the probabilities of the row sum to 2.718, must be at most 1'


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_parts_of_the_keys_with_the_lse_of_all_are_computed(server, kind):
    """Ring attention: a backward over part of the keys takes the lse over all keys, and the gradients of the parts add
    up to those of the whole."""
    members = problem(server)
    whole = server.backward(**members).json()
    dk = []
    for part in (slice(0, 7), slice(7, 24)):
        cut = {n: wire.tensor(wire.value(members[n])[:, part]) for n in 'kv'}
        assert formats.ask(server, kind, 'backward', {**members, **cut})[0] == 200
        dk.append(wire.value(server.backward(**{**members, **cut}).json()['dk']))
    assert np.allclose(np.concatenate(dk, 1), wire.value(whole['dk']), atol=1e-5)


def test_a_wrong_lse_fails_alone_in_an_envelope(server):
    members = problem(server)
    answers = server.backward(requests=[members, with_lse(members, lambda lse: lse / np.log(2)), members]).json()['responses']
    assert 'dq' in answers[0] and 'dq' in answers[2]
    assert answers[1]['error']['pointer'] == '/requests/1/lse' and answers[1]['error']['detail'].endswith(BASE_2), answers[1]


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('options', [{}, {'layout': 'bhsd'}, {'causal': True, 'softcap': 5}, {'dropout_p': 0.3, 'seed': 1}], ids=str)
def test_what_a_forward_has_answered_is_taken(server, dtype, options):
    members, _ = wire.random_problem(np.random.default_rng(4), Sq=200, Sk=300, H=4, Hk=2, D=64, dtype=dtype, back=True, **options)
    answer = server.forward(**{n: m for n, m in members.items() if n != 'dout'}).json()
    answer = server.backward(**members, out=answer['out'], lse=answer['lse'])
    assert answer.status == 200, answer


def test_a_body_of_megabytes_is_refused_as_well(server):
    """A large body is checked by another thread than the HTTP thread, and must have the same result."""
    members, _ = wire.random_problem(np.random.default_rng(5), Sq=1024, H=4, D=64, dtype='bfloat16', back=True)
    answer = server.forward(**{n: m for n, m in members.items() if n != 'dout'}).json()
    lse = wire.tensor(wire.value(answer['lse']) / np.log(2))
    answer = server.backward(**members, out=answer['out'], lse=lse)
    assert answer.status == 400 and answer.json()['detail'].endswith(BASE_2), answer


@pytest.mark.parametrize('D', [1, 2, 4, 8, 16, 64])
def test_the_lse_of_a_forward_in_bfloat16_is_taken_beside_unrounded_tensors(server, D):
    """In mixed precision, a client sends the lse of bfloat16 tensors together with unrounded tensors. If the head size
    is small, the rounding of q and k changes a row's sum of probabilities by several per cent. The server must allow
    this."""
    rng = np.random.default_rng(D)
    tensors = {n: (3 if n in 'qk' else 1) * rng.standard_normal((1, 256, 4, D)) for n in ('q', 'k', 'v', 'dout')}
    forward = server.forward(**{n: wire.tensor(tensors[n], 'bfloat16') for n in 'qkv'}).json()
    for dtype in ('float32', 'float16'):
        backward = {n: wire.tensor(x, dtype) for n, x in tensors.items()}
        answer = server.backward(**backward, out=wire.tensor(wire.value(forward['out']), dtype), lse=forward['lse'])
        assert answer.status == 200, answer


# ---- An observe that is given an lse ---------------------------------------------------------------------------------


def observe(server, of_forward=None, dtype='float32', **options):
    """Makes an observe with the lse of a forward, which may have had other options."""
    members, _ = wire.random_problem(np.random.default_rng(6), Sq=S, H=H, D=D, dtype=dtype)
    answer = server.forward(**members, **(options if of_forward is None else of_forward)).json()
    members.pop('v')
    return {**members, **options, 'lse': answer['lse'], 'observe': ['key_mass']}


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_an_observe_is_told_that_its_lse_is_in_base_2(server, kind):
    """An observe with lse in base 2 must be refused. In an earlier version it was accepted, and the probabilities were
    wrong without an error."""
    members = observe(server, causal=True)
    assert formats.ask(server, kind, 'observe', members)[0] == 200
    members = with_lse(members, lambda lse: lse / np.log(2))
    status, document = formats.ask(server, kind, 'observe', members)
    assert (status, document['code'], document['pointer']) == (400, 'invalid-request', formats.pointer_of(kind, members, '/lse')), document
    assert document['detail'].startswith('lse: [0, ') and document['detail'].endswith(BASE_2), document


def test_an_observe_is_told_which_options_its_lse_has(server):
    answer = server.post('/v1/attention/observe', observe(server, of_forward={}, causal=True))
    assert answer.status == 400 and answer.json()['detail'].endswith('computed with no causal and no window: send the options of that forward'), answer


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_an_observe_of_a_part_of_the_keys_with_the_lse_of_all_is_computed(server, dtype):
    members = observe(server, dtype=dtype)
    whole = server.post('/v1/attention/observe', members).json()
    parts = []
    for part in (slice(0, 7), slice(7, S)):
        cut = {**members, 'k': wire.tensor(wire.value(members['k'])[:, part], dtype)}
        answer = server.post('/v1/attention/observe', cut)
        assert answer.status == 200, answer
        parts.append(wire.value(answer.json()['key_mass']))
    assert np.allclose(np.concatenate(parts, -1), wire.value(whole['key_mass']), rtol=1e-3)


def test_an_observe_with_float8_is_checked_with_its_scales(server):
    """The lse was computed with q_scale 2, and the request has q_scale 16. So the scores are larger, and the
    probabilities sum to more than 1. The server must notice this."""
    r = np.random.default_rng(8)
    q, k, v = (wire.tensor(r.standard_normal((1, 64, 2, 16)), 'float8_e4m3fn') for _ in range(3))
    scaled = {'q': q, 'k': k, 'q_scale': 2, 'k_scale': 0.5, 'scale': 0.25, 'causal': True}
    lse = server.forward(**scaled, v=v).json()['lse']
    assert server.post('/v1/attention/observe', {**scaled, 'lse': lse, 'observe': ['entropy']}).status == 200
    wrong = {**scaled, 'q_scale': 16}
    answer = server.post('/v1/attention/observe', {**wrong, 'lse': lse, 'observe': ['entropy']})
    assert answer.status == 400 and 'must be at most 1' in answer.json()['detail'], answer
