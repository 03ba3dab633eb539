"""Checks for which a device computes the float64 results (attn_truth_some()). The judge, which compares a client's
results with exact ones on the CPU, can then compare all rows of a large problem. The devices are fake ones, whose
float64 results are right. test_check.py tests checks that the CPU makes alone."""
import base64
import json
import os
import struct
import subprocess

import numpy as np
import pytest

import service
import wire
from service import eventually
from under_way import Asking, dies

CHECK = '/v1/attention/check'


@pytest.fixture(scope='module', autouse=True)
def there_is_a_program():
    assert os.access(service.FAKE, os.X_OK), f'{service.FAKE} is not there: make {service.FAKE}'


@pytest.fixture(scope='module')
def problem():
    """A causal problem that is large enough for a device: 1.5 * 2^27 multiply-adds."""
    members, _ = wire.random_problem(np.random.default_rng(0), Sq=600, H=4, Hk=2, D=32, dtype='float16', causal=True)
    return members


@pytest.fixture(scope='module')
def long_problem():
    """A problem so large that the judge (the comparison on the CPU) computes only a part of it as a kernel would."""
    members, _ = wire.random_problem(np.random.default_rng(1), Sq=1024, H=16, D=64, dtype='bfloat16')
    return members


def check(server, members, **more):
    answer = server.post(CHECK, {**members, **more})
    assert answer.status == 200, answer.body
    return answer.json()


def report_of(answer):
    return {name: member for name, member in answer.items() if name not in ('backend', 'timing_us')}


def truth_seconds(server):
    return server.metric('attnd_kernel_seconds_total', op='check')


def results_of(server, members, **options):
    answer = server.forward(**members, **options).json()
    return {'out': answer['out'], 'lse': answer['lse']}


def test_a_device_and_the_cpu_find_the_same(fake, problem):
    device, cpu = fake(), fake('truth.none')
    results = results_of(device, problem)
    for members in (problem, {**problem, 'causal': False}, {**problem, 'scale': 0.2}):
        found, wanted = check(device, members, **results), check(cpu, members, **results)
        assert found['backend'] == 'fake:0 float64' and wanted['backend'] == 'cpu float64'
        assert report_of(found) == report_of(wanted) and found['rows']['checked'] == 2400
    assert truth_seconds(device) > 0 and truth_seconds(cpu) == 0


def test_gradients_have_a_truth_of_a_device(fake, problem):
    rng = np.random.default_rng(2)
    server, cpu = fake(), fake('truth.none')
    dout = wire.tensor(rng.standard_normal((1, 600, 4, 32)), 'float16')
    backward = server.backward(**problem, dout=dout).json()
    gradients = {name: backward[name] for name in ('dq', 'dk', 'dv')}
    for members in (problem, {**problem, 'causal': False}):
        found, wanted = (check(s, members, dout=dout, **gradients) for s in (server, cpu))
        assert found['backend'] == 'fake:0 float64' and report_of(found) == report_of(wanted)


def test_a_small_problem_stays_with_the_cpu(fake):
    server = fake('truth.err=700')
    members = wire.small_body()
    assert check(server, members, **results_of(server, members))['backend'] == 'cpu float64'


def test_a_gradient_that_no_device_computes_stays_with_the_cpu(fake, problem):
    server = fake('truth.err=700')
    sinks = wire.tensor(np.zeros(4), 'float32')
    members = {**problem, 'dout': problem['q'], 'sinks': sinks}
    assert check(server, members, dsinks=sinks)['backend'] == 'cpu float64'


def test_all_rows_of_a_long_problem_are_compared(fake, long_problem):
    """One wrong number among 16384 rows must be found, wherever it is. To learn the usual rounding errors, the server
    also computes some rows as a right kernel would. The wrong number need not be in these rows."""
    server = fake()
    results = results_of(server, long_problem)
    right = check(server, long_problem, **results)
    assert right['verdict'] in ('match', 'rounding') and right['rows']['checked'] == right['rows']['of'] == 16384
    assert 0 < right['rows']['emulated'] < 16384
    out = wire.value(results['out'])
    out[0, 777, 11, 3] += 1
    wrong = check(server, long_problem, out=wire.tensor(out, 'bfloat16'), lse=results['lse'], timeout_ms=int(8000 * service.SLOWER))
    assert wrong['verdict'] == 'mismatch' and wrong['errors']['out']['wrong'] == 1
    assert wrong['where'][0]['what'] == 'query 777, column 3 of head 11' and wrong['worst'][0]['index'] == [0, 777, 11, 3]


def test_all_rows_of_a_long_backward_are_compared(fake):
    """The check must find a wrong tile of keys and a wrong tile of queries. One head of this problem takes 1.1 * 2^31
    multiply-adds."""
    rng = np.random.default_rng(3)
    members, _ = wire.random_problem(rng, Sq=1800, H=1, D=128, dtype='bfloat16', causal=True)
    members['dout'] = wire.tensor(rng.standard_normal((1, 1800, 1, 128)), 'bfloat16')
    server = fake()
    backward = server.backward(**members).json()
    gradients = {name: backward[name] for name in ('dq', 'dk', 'dv')}
    right = check(server, members, **gradients)
    assert right['backend'] == 'fake:0 float64' and right['verdict'] in ('match', 'rounding')
    assert 0 < right['rows']['emulated'] < right['rows']['checked'] == right['rows']['of'] == 1800
    for name, of in (('dk', 'keys'), ('dq', 'queries')):
        values = wire.value(gradients[name])
        values[0, 1024:1088] += 1
        wrong = check(server, members, **{**gradients, name: wire.tensor(values, 'bfloat16')}, timeout_ms=int(8000 * service.SLOWER))
        assert wrong['verdict'] == 'mismatch' and [n for n, e in wrong['errors'].items() if e['wrong']] == [name]
        assert wrong['where'] == [{'tensor': name, 'what': f'{of} 1024 to 1087', 'wrong': 64 * 128, 'of_wrong': 64 * 128}]
        assert wrong['explanations'] == []


def test_several_checks_of_one_body(fake, problem):
    server = fake()
    results = results_of(server, problem)
    bodies = [{**problem, **results}, {**wire.small_body(), 'out': wire.small_body()['q']}, {'q': problem['q']},
              {**problem, **results, 'causal': False}]
    answers = server.post(CHECK, {'requests': bodies}).json()['responses']
    assert [a.get('backend') for a in answers] == ['fake:0 float64', 'cpu float64', None, 'fake:0 float64']
    assert answers[0]['verdict'] != 'mismatch' and answers[1]['verdict'] == answers[3]['verdict'] == 'mismatch'


def test_what_takes_a_device_too_long_is_checked_by_the_cpu(fake, problem):
    """The fake device says that it needs 92 ms for the float64 results. This is more than half of the time until the
    deadline, so the CPU makes the check."""
    server = fake('truth.err=700')
    answer = server.post(CHECK, {**problem, **results_of(server, problem), 'timeout_ms': 100})
    assert answer.status in (200, 504) and server.get('/readyz').status == 200
    assert truth_seconds(server) == 0


def test_its_device_time_is_charged(fake, problem, tmp_path):
    (tmp_path / 'tokens').write_text('alice-secret # alice\n')
    server = fake('', '--token-file', tmp_path / 'tokens')
    server.page_headers = {'Authorization': 'Bearer alice-secret'}
    answer = server.post(CHECK, {**problem, 'out': problem['q']}, server.page_headers)
    assert answer.status == 200 and answer.json()['timing_us']['compute'] >= 1e6 * truth_seconds(server) > 0
    charged = server.metric('attnd_caller_seconds_total', caller='alice', work='device')
    assert charged == pytest.approx(truth_seconds(server), rel=0.01)


def test_an_error_of_the_device_fails_the_check(fake, problem):
    server = fake('truth.err=9@2')
    answer = server.post(CHECK, {**problem, 'out': problem['q']})
    assert answer.status == 500 and 'error 9' in answer.json()['detail'], answer
    assert check(server, problem, out=problem['q'])['verdict'] == 'mismatch'


def test_a_lost_device_ends_the_check(fake, problem):
    server = fake('truth.err=700@2')
    assert server.post(CHECK, {**problem, 'out': problem['q']}).status == 503
    dies(server, 70)


def test_others_do_not_wait_for_a_check(fake, problem, gate):
    server = fake(f'truth.hold={gate.path}@1')
    slow = Asking(server, {**problem, 'out': problem['q']}, path=CHECK)
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 1)
    assert server.forward(**wire.small_body()).status == 200
    gate.open()
    assert slow.result().json()['verdict'] == 'mismatch'


def test_a_device_without_float64_beside_one_with_it(fake, problem, gate):
    """The first device is busy, so the second device gets the second check. The second device computes nothing in
    float64, so the CPU computes these results."""
    server = fake(f'0:truth.hold={gate.path}@1,1:truth.none', devices=2)
    slow = Asking(server, {**problem, 'out': problem['q']}, path=CHECK)
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 1)
    by_cpu = check(server, problem, out=problem['q'])
    gate.open()
    by_device = slow.result().json()
    assert (by_device['backend'], by_cpu['backend']) == ('fake:0 float64', 'cpu float64')
    assert report_of(by_device) == report_of(by_cpu)


def test_a_deadline_ends_the_truth_of_a_check(fake, problem, gate):
    """The deadline must end the work after its first step. If the second step began, it would fail as the script says,
    and the device would be lost."""
    server = fake(f'truth.hold={gate.path}@1,truth.err=700@2')
    answer = server.post(CHECK, {**problem, 'out': problem['q'], 'timeout_ms': 1000})
    assert answer.status == 504 and answer.json()['code'] == 'deadline-exceeded', answer
    gate.open()
    assert eventually(lambda: server.get('/v1/info').json()['devices'][0]['running_requests'] == 0)
    assert server.forward(**wire.small_body()).status == 200


def test_without_memory_for_the_truth_the_cpu_checks(fake, problem):
    """The tensors take 0.5 MB, and their float64 results 0.6 MB more. The device has less memory."""
    server = fake('truth.err=700', '--device-bytes', '1M')
    assert check(server, problem, out=problem['q'])['backend'] == 'cpu float64'


# ---- The command -----------------------------------------------------------------------------------------------------


def command(*args, script=''):
    return subprocess.run([service.FAKE, 'check', *args], capture_output=True, text=True, timeout=100 * service.SLOWER,
                          env={**os.environ, 'ATTN_FAKE_SCRIPT': script})


@pytest.fixture(scope='module')
def file(problem, tmp_path_factory):
    """A safetensors file with the problem, and with a wrong result: its `out` is q."""
    names, header, data = ('q', 'k', 'v'), {'__metadata__': {'causal': 'true'}}, b''
    for name, member in [*((n, problem[n]) for n in names), ('out', problem['q'])]:
        content = base64.b64decode(member['data'])
        header[name] = {'dtype': 'F16', 'shape': member['shape'], 'data_offsets': [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp('check') / 'wrong.safetensors'
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)
    return str(path)


def test_the_command_finds_the_same_with_and_without_a_device(file):
    with_device, without = command(file, '--json', '--devices', '0'), command(file, '--json', '--devices', 'cpu', script='truth.err=700')
    assert with_device.returncode == without.returncode == 1 and with_device.stdout == without.stdout, (with_device, without)
    assert json.loads(without.stdout)['rows']['checked'] == 2400


@pytest.mark.parametrize('devices, script, says', [
    ('1', '', '--devices: there is no GPU 1, there is 1'),
    ('x', '', "--devices: 'x' is not auto, cpu or the number of a GPU"),
    ('0', 'truth.err=9@2', 'truth'),
    ('0', 'alloc.fail', 'memory'),
])
def test_a_device_that_the_command_names_must_compute(file, devices, script, says):
    r = command(file, '--devices', devices, script=script)
    assert r.returncode == 65 and says in r.stderr and r.stdout == '', r


@pytest.mark.parametrize('script', ['', 'truth.none', 'truth.err=9', 'open.err=2', 'alloc.fail@3', 'copy.err=9@2'])
def test_without_devices_the_command_takes_what_there_is(file, script):
    r = command(file, script=script)
    assert r.returncode == 1 and r.stdout.startswith('mismatch\n') and r.stderr == '', r
