"""The seed of dropout: if a forward has none, the server draws a seed and returns it. A backward must have one."""
import numpy as np
import pytest

import formats
import wire

WORDS = "seed: is missing, must be that of the forward with this dropout_p; the forward's answer has it (a context has its own)"


def problem(back=False, **options):
    return wire.random_problem(np.random.default_rng(5), Sq=9, H=2, D=8, back=back, dropout_p=0.5, **options)[0]


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_a_forward_without_a_seed_draws_one_for_each_request(server, kind):
    facts = [formats.ask(server, kind, 'forward', problem()) for _ in range(4)]
    seeds = [f['seed'] for status, f in facts if status == 200]
    assert len(set(seeds)) == 4 and all(isinstance(s, int) and 0 <= s < 2**53 for s in seeds), facts
    assert formats.ask(server, kind, 'forward', problem(seed=2**64 - 1))[1]['seed'] == 2**64 - 1
    assert 'seed' not in formats.ask(server, kind, 'forward', {**problem(), 'dropout_p': 0})[1]


def test_the_seed_in_an_answer_drops_the_same_elements_again(server):
    first, second = (server.forward(**problem()).json() for _ in range(2))
    again = server.forward(**problem(seed=first['seed'])).json()
    assert (again['out'], again['lse'], again['seed']) == (first['out'], first['lse'], first['seed'])
    assert second['out'] != first['out'] and second['lse'] == first['lse']


def test_each_problem_of_an_envelope_draws_its_own_seed(server):
    answers = server.forward(requests=[problem(), problem(), problem(seed=7), {**problem(), 'dropout_p': 0}]).json()['responses']
    assert answers[0]['seed'] != answers[1]['seed'] and answers[2]['seed'] == 7 and 'seed' not in answers[3]


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_a_backward_with_dropout_wants_the_seed_of_its_forward(server, kind):
    members = problem(back=True)
    status, refusal = formats.ask(server, kind, 'backward', members)
    assert (status, refusal.get('code'), refusal['pointer'], refusal['detail']) == (400, 'invalid-request', formats.pointer_of(kind, members, '/seed'), WORDS)
    status, facts = formats.ask(server, kind, 'backward', {**members, 'seed': 7})
    assert (status, facts['seed']) == (200, 7)
    assert formats.ask(server, kind, 'backward', {**members, 'dropout_p': 0})[0] == 200


def test_a_backward_without_a_seed_fails_alone_in_an_envelope(server):
    answers = server.backward(requests=[problem(back=True), problem(back=True, seed=3)]).json()['responses']
    assert (answers[0]['error']['pointer'], answers[0]['error']['detail']) == ('/requests/0/seed', WORDS) and answers[1]['seed'] == 3


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_a_context_has_the_seed_that_was_drawn(server, kind):
    status, saved = formats.ask(server, kind, 'forward', {**problem(), 'save': True})
    dout = {'dout': problem(back=True)['dout']}
    whole = server.backward(**problem(back=True, seed=saved['seed'])).json()
    of_context = server.backward(context=saved['context'], **dout).json()
    assert status == 200 and of_context['seed'] == saved['seed']
    for name in ('dq', 'dk', 'dv'):
        assert np.allclose(wire.value(of_context[name]), wire.value(whole[name]), atol=1e-5), name
