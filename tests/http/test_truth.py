"""`verify` on a device that computes results in float64 itself (attn_truth_some()). The devices are fake ones, whose
float64 results are right unless a script says otherwise. test_forward.py tests rows that the CPU verifies."""
import os

import numpy as np
import pytest

import service
import test_lengths
import wire
from service import eventually
from under_way import Asking, dies

FORWARD = '/v1/attention/forward'


@pytest.fixture(scope='module', autouse=True)
def there_is_a_program():
    assert os.access(service.FAKE, os.X_OK), f'{service.FAKE} is not there: make {service.FAKE}'


def verification(answer):
    assert answer.status == 200, answer
    return answer.json()['verification']


def verified_by_device(server):
    return server.metric('attnd_kernel_seconds_total', op='verify')


@pytest.mark.parametrize('lengths', ['none', 'queries', 'both', 'gaps', 'cache'])
def test_a_device_finds_what_the_cpu_finds(fake, lengths):
    """One server verifies on a device that computes results in float64. The other server has a device that does not, so
    its CPU verifies. Both compare all rows, and must find the same errors."""
    members = wire.small_body() if lengths == 'none' else test_lengths.problem(lengths)[0]
    device, cpu = fake(), fake('truth.none')
    for options in ({}, {'causal': True}, {'dropout_p': 0.5, 'seed': 3}, {'out_dtype': 'bfloat16'}):
        found, wanted = (verification(server.forward(**members, **options, verify='all')) for server in (device, cpu))
        assert found == wanted and 0 < found['max_abs'] < 1e-2, (options, found)
    assert verified_by_device(device) > 0 and verified_by_device(cpu) == 0


@pytest.mark.parametrize('heads', [(4, 4), (2, 1)])
def test_each_device_compares_its_part_of_a_problem(fake, heads):
    rng = np.random.default_rng(3)
    members = {n: wire.tensor(rng.standard_normal((1, 1024, heads[n != 'q'], 32)), 'float16') for n in 'qkv'}
    one, two = fake('', devices=1), fake('', '--split-above-ms', 1, devices=2)
    for options in ({'causal': True}, {'softcap': 3}):
        wanted, found = (server.forward(**members, **options, verify='all') for server in (one, two))
        assert verification(found) == verification(wanted)
        assert found.json()['backend'].endswith(' by heads' if heads == (4, 4) else ' by queries'), found.json()['backend']
    assert two.metric('attnd_kernel_seconds_total', op='verify', device='fake:1') > 0


def test_a_device_that_is_lost_in_the_truth_is_made_up_for_by_the_others(fake):
    members = {n: wire.tensor(np.random.default_rng(4).standard_normal((1, 1024, 2, 32)), 'float16') for n in 'qkv'}
    server = fake('1:truth.err=700@1', '--split-above-ms', 1, devices=2)
    first, again = (server.forward(**members, verify='all') for _ in range(2))
    assert verification(first) == verification(again) and first.json()['backend'].startswith('fake:0 ')


def test_a_few_rows_stay_with_the_cpu(fake):
    server = fake('truth.err=700')
    assert verification(server.forward(**wire.small_body(), verify=5))['rows'] == 5
    assert server.get('/readyz').status == 200


def much(**options):
    """Makes a forward of 4097 rows, more than the CPU may verify."""
    q = wire.tensor(np.ones((1, 4097, 1, 32)), 'float32')
    return {'q': q, 'k': q, 'v': q, 'outputs': ['out'], 'causal': True, **options}


def test_info_says_which_devices_verify(fake, server):
    assert fake().get('/v1/info').json()['devices'][0]['verifies'] is True
    info = server.get('/v1/info').json()
    assert all(d['verifies'] == (d['backend'] == 'cuda') for d in info['devices'])
    assert info['limits']['verify_multiply_adds'] == 2**30 and info['limits']['verify_head_elements'] == 2**24


def test_a_device_verifies_more_than_the_cpu_may(fake):
    server = fake()
    for rows in ('all', 4096, 4097):  # asks for more rows than the CPU may verify; the device verifies even all 4097
        found = verification(server.forward(**much(verify=rows)))
        assert found['rows'] == 4097 and found['relative'] < 1e-6, found
    answer = fake('truth.none').forward(**much(verify='all'))
    assert answer.status == 422 and answer.json()['detail'] == 'verify: at most 4095 of the 4097 rows can be verified here', answer


def test_what_a_device_verifies_is_in_no_budget_of_the_cpu(fake):
    """A body has three problems. The CPU would verify only the first one. The device must verify all of them."""
    responses = fake().forward(requests=[much(verify='all')] * 3).json()['responses']
    assert [r['verification']['rows'] for r in responses] == [4097] * 3


def test_the_time_of_a_truth_is_expected_before_it_is_spent(fake):
    """The server estimates the time of a verification, and counts it toward --max-seconds and the deadline. The fake
    device says that a multiply-add takes a nanosecond, so verifying all rows takes 1.07 s."""
    server = fake('', '--max-seconds', 1)
    assert server.forward(**much()).status == 200
    answer = server.forward(**much(verify='all'))
    assert answer.status == 422 and answer.json()['detail'].endswith(', most of them for verify, a request may take 1 (--max-seconds)'), answer
    late = fake().forward(**much(verify='all'), timeout_ms=200)
    assert late.status == 504 and 'at the very least' in late.json()['detail'], late


def test_a_truth_is_charged_to_its_token(fake, tmp_path):
    (tmp_path / 'tokens').write_text('alice-secret # alice\n')
    server = fake('', '--token-file', tmp_path / 'tokens')
    server.page_headers = {'Authorization': 'Bearer alice-secret'}
    assert server.post(FORWARD, much(verify='all'), server.page_headers).status == 200
    charged = server.metric('attnd_caller_seconds_total', caller='alice', work='device')
    in_kernels = server.metric('attnd_kernel_seconds_total', op='forward')
    assert verified_by_device(server) > 0 and in_kernels > 0
    assert charged == pytest.approx(in_kernels + verified_by_device(server), rel=0.01)


@pytest.mark.parametrize('where', ['first', 'second'])
def test_an_error_of_the_truth_fails_its_request(fake, where):
    """The two heads of the problem are verified in two steps. Each of the steps may fail."""
    server = fake(f'truth.err=9@{1 if where == "first" else 2}')
    answer = server.forward(**wire.small_body(), verify='all')
    assert answer.status == 500 and 'truth' in answer.json()['detail'] and 'error 9' in answer.json()['detail'], answer
    assert verification(server.forward(**wire.small_body(), verify='all'))['rows'] == 6


def test_a_sticky_error_of_the_truth_ends_the_server(fake):
    server = fake('truth.err=700@2')
    assert server.forward(**wire.small_body(), verify='all').status == 503
    dies(server, 70)


def test_nobody_waits_for_the_truth_of_another(fake, gate):
    server = fake(f'truth.hold={gate.path}@1')
    slow = Asking(server, {**wire.small_body(), 'verify': 'all'})
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 1)
    assert server.forward(**wire.small_body()).status == 200
    gate.open()
    assert verification(slow.result())['rows'] == 6


def test_a_deadline_ends_the_truth(fake, gate):
    """The deadline must end the verification after its first step. If the second step began, it would fail as the
    script says, and the device would be lost."""
    server = fake(f'truth.hold={gate.path}@1,truth.err=700@2')
    answer = server.forward(**wire.small_body(), verify='all', timeout_ms=500)
    assert answer.status == 504 and answer.json()['code'] == 'deadline-exceeded', answer
    gate.open()
    assert eventually(lambda: server.get('/v1/info').json()['devices'][0]['running_requests'] == 0)
    assert server.forward(**wire.small_body()).status == 200


def test_a_truth_that_never_ends_is_overdue(fake, gate):
    server = fake(f'truth.hold={gate.path}@1', '--watchdog-ms', 200)
    answer = server.forward(**wire.small_body(), verify='all')
    assert answer.status == 503 and 'did not finish in the time it may take' in answer.json()['detail'], answer
    gate.open()
    dies(server, 70)
