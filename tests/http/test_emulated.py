"""The daemon with the CUDA kernels in the emulator, a program that `make emulate` builds: the GPU's code verifies
results in float64. Without that program these tests are skipped. test_truth.py tests the same on the fake device."""
import numpy as np
import pytest

import oracle
import service
import test_lengths
import wire

PROGRAM = service.SETTINGS.get('ATTND_EMULATED')
pytestmark = pytest.mark.skipif(not PROGRAM, reason='make emulate runs this')


@pytest.fixture
def emulated(serve):
    return serve('--cpu-threads', '1', '--devices', '0', '--timeout-ms', '600000', '--watchdog-ms', '600000', binary=PROGRAM)


@pytest.mark.parametrize('lengths', ['queries', 'both', 'gaps', 'cache'])
def test_the_distance_that_a_gpu_finds_is_that_of_numpy(emulated, lengths):
    members, exact = test_lengths.problem(lengths)
    answer = emulated.forward(**members, causal=True, verify='all')
    assert answer.status == 200 and answer.json()['backend'].startswith('cuda:0 '), answer
    wanted = oracle.forward({**exact, 'causal': True})[0]['out']
    distance = np.nanmax(np.abs(wire.value(answer.json()['out']) - wanted))
    found = answer.json()['verification']
    assert found['rows'] == 10 * test_lengths.H and found['max_abs'] == pytest.approx(distance, rel=1e-6), found


def test_problems_of_one_body_are_verified_by_the_gpu_and_the_cpu(emulated):
    members, _ = wire.random_problem(np.random.default_rng(1), B=2, Sq=40, Sk=90, H=4, Hk=2, D=64, dtype='bfloat16')
    bodies = [{**members, 'verify': 'all'}, {**members, 'verify': 3}, members, {**members, 'verify': 'all', 'dropout_p': 0.3, 'seed': 4}]
    responses = emulated.forward(requests=bodies).json()['responses']
    assert [r.get('verification', {}).get('rows') for r in responses] == [320, 3, None, 320]
    assert all(0 < r['verification']['max_abs'] < 0.02 for r in responses if 'verification' in r), responses
    kernels, truth = (emulated.metric('attnd_kernel_seconds_total', op=op) for op in ('forward', 'verify'))
    charged = emulated.metric('attnd_caller_seconds_total', caller='everybody', work='device')
    assert kernels > 0 and truth > 0 and charged == pytest.approx(kernels + truth, rel=0.01)
