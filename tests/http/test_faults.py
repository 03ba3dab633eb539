"""Devices that fail, several devices, and what a client sees of that. No GPU is needed: attnd-fake is the daemon with
devices that compute on the CPU and fail as a script says (kernels/fake/fake.c). No test here depends on speed: a batch
runs as long as a certain file (the gate) exists."""
import json
import os
import signal
import re
import subprocess
import time

import numpy as np
import pytest

import service
import wire
from service import Server, eventually
from under_way import GUESTS, Asking, dies

FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'
# CUDA error codes after which a device is lost; the last code is in no table of the server
STICKY = [46, 214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 810, 999, 12345]
ONE = ('--cpu-threads', '1')


@pytest.fixture(scope='module', autouse=True)
def there_is_a_program():
    assert os.access(service.FAKE, os.X_OK), f'{service.FAKE} is not there: make {service.FAKE}'


def devices(server):
    return {d['name']: d for d in server.get('/v1/info').json()['devices']}


def running(server):
    return {name: d['running_requests'] for name, d in devices(server).items()}


@pytest.fixture(scope='module')
def right():
    """Returns the right answer to the small request, from a server without faults."""
    with Server(*ONE, '--devices', 'cpu') as server:
        return tensors(server.post(FORWARD, wire.small_bytes()))


def tensors(answer):
    assert answer.status == 200, answer
    return {name: answer.json()[name] for name in ('out', 'lse')}


def fails(answer, status, code, says):
    assert answer.status == status, answer
    problem = answer.json()
    assert problem['code'] == code and says in problem['detail'], problem
    assert ('retry-after' in answer.headers) == (status == 503), answer
    assert 'out' not in problem


# ---- The program -----------------------------------------------------------------------------------------------------


def test_only_the_test_program_has_the_fake_backend(fake, server):
    with open(service.BINARY, 'rb') as product, open(service.FAKE, 'rb') as test:
        assert b'event.never' not in product.read() and b'event.never' in test.read()
    assert 'fake' not in server.get('/v1/info').json()['backends']
    assert fake().get('/v1/info').json()['backends'][0] == 'fake'


def test_without_faults_it_answers_like_the_cpu(fake, right):
    server = fake()
    answer = server.post(FORWARD, wire.small_bytes())
    assert tensors(answer) == right and answer.json()['backend'].startswith('fake:0 ')
    times = answer.json()['timing_us']
    assert times['compute'] > 0 and times['copy_in'] >= 0 and times['copy_out'] >= 0


def test_saved_contexts_and_envelopes_reach_a_device_with_memory_of_its_own(fake):
    server = fake()
    members = wire.small_body()
    saved = server.forward(**members, save=True).json()
    dout = {**saved['out']}
    by_context = server.backward(context=saved['context'], dout=dout)
    whole = server.backward(**members, dout=dout, out=saved['out'], lse=saved['lse'])
    assert by_context.status == whole.status == 200
    for name in ('dq', 'dk', 'dv'):
        assert by_context.json()[name] == whole.json()[name]
    many = server.post(FORWARD, {'requests': [members] * 5}).json()['responses']
    assert len(many) == 5 and all(r['out'] == saved['out'] for r in many)


# ---- Small requests on the thread that received them -----------------------------------------------------------------


def test_a_small_request_runs_where_it_was_received(fake, right):
    # the script lets a copy fail, but this device never copies anything
    server = fake('copy.err=700', reads_staging=True)
    for _ in range(3):
        answer = server.post(FORWARD, wire.small_bytes())
        assert tensors(answer) == right and answer.json()['backend'].startswith('fake:0 ')
        times = answer.json()['timing_us']
        assert times['compute'] > 0 and times['queue'] == times['copy_in'] == times['copy_out'] == 0
    assert server.metric('attnd_device_batches_total', device='fake:0') == 3


def test_the_launch_of_a_small_request_is_told_apart(fake):
    server = fake('launch.slow=500', reads_staging=True)
    answer = server.post(FORWARD, wire.small_bytes())
    parts = {name: float(ms) for name, ms in re.findall(r'(\w+);dur=([0-9.]+)', answer.headers['server-timing'])}
    assert parts['launch'] >= 490 and parts['compute'] < 490 and parts['queue'] == 0
    assert answer.json()['timing_us']['compute'] >= 490e3


def test_what_is_late_is_answered_when_it_ends(fake, right, gate):
    server = fake(f'hold={gate.path}@1', reads_staging=True)
    late = Asking(server)
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 1)
    assert server.get('/livez').status == 200
    behind = Asking(server)  # the device runs a batch, which this request must wait for; it must wait for nothing else
    assert tensors(behind.result()) == right
    gate.open()
    assert tensors(late.result()) == right
    assert late.result().json()['timing_us']['compute'] > 0


def test_who_waits_too_long_for_what_is_late_is_told_so(fake, right, gate):
    server = fake(f'hold={gate.path}@1', reads_staging=True)
    fails(server.forward(**wire.small_body(), timeout_ms=1000), 504, 'deadline-exceeded', 'while the request was running')
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    gate.open()
    assert eventually(lambda: running(server)['fake:0'] == 0)
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right


def test_what_is_late_has_its_time_while_others_come_and_go(fake, right, gate):
    """A late request is one whose HTTP thread has stopped waiting for it. From then on the device's thread waits for
    the request to end. The time until which the request may run must not change, although other requests come and
    go."""
    server = fake(f'hold={gate.path}@1', reads_staging=True)
    late = Asking(server)
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 1)
    for _ in range(3):
        assert tensors(server.post(FORWARD, wire.small_bytes())) == right
        time.sleep(0.1)
    assert server.get('/readyz').status == 200
    gate.open()
    assert tensors(late.result()) == right


def test_what_is_late_runs_on_though_the_queue_is_full(fake, right, gate):
    """A late request is one whose HTTP thread has stopped waiting for it. It runs already, and was admitted before the
    queue filled up. It must end, although the queue is full by then."""
    server = fake(f'hold={gate.path}@1', '--queue-depth', 1, '--batch-window-us', 1000000, '--http-threads', 1, reads_staging=True)
    body = wire.small_bytes()
    with server.raw() as late:
        late.sendall(service.request_bytes(FORWARD, body)[:-1])
        assert eventually(lambda: server.metric('attnd_inflight_requests', state='receiving') == 1)
        # `verify` makes this request wait in a batch, which the batching window delays
        waits = Asking(server, {**wire.small_body(), 'verify': 1})
        assert eventually(lambda: server.metric('attnd_inflight_requests', state='queued') == 1)
        late.sendall(body[-1:])
        assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 1)
        assert server.get('/livez').status == 200
        gate.open()
        assert tensors(service.RawReader(late).answer()) == right
    assert tensors(waits.result()) == right


def test_what_is_late_does_not_hold_up_the_end_of_the_server(fake, gate):
    server = fake(f'hold={gate.path}@1', '--drain-ms', 100, reads_staging=True)
    late = Asking(server)
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 1)
    server.process.send_signal(signal.SIGTERM)
    fails(late.result(), 503, 'draining', 'stopping')
    gate.open()


@pytest.mark.parametrize('script, status, slug, says', [
    ('launch.err=9@1', 500, 'internal', 'error 9'), ('sync.err=98@1', 500, 'internal', 'error 98'), ('launch.err=2@1', 503, 'out-of-memory', 'error 2')])
def test_an_error_of_a_small_request_is_its_own(fake, right, script, status, slug, says):
    server = fake(script, reads_staging=True)
    fails(server.post(FORWARD, wire.small_bytes()), status, slug, says)
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert server.metric('attnd_device_errors_total') == 1


def test_a_device_that_a_small_request_loses_is_lost_for_all(fake, right):
    server = fake('0:sync.err=700@1', devices=2, reads_staging=True)
    answers = []
    # The processor core of the HTTP thread decides which of the two devices computes. Perhaps the device with the fault
    # is never chosen.
    while len(answers) < 30 and all(a.status == 200 for a in answers):
        answers.append(server.post(FORWARD, wire.small_bytes()))
    if answers[-1].status != 200:
        fails(answers.pop(), 503, 'unavailable', 'lost')
        answers += [server.post(FORWARD, wire.small_bytes()) for _ in range(10)]
    assert all(tensors(a) == right for a in answers)


# ---- Errors that pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('script, says', [
    ('launch.err=9@1', 'invalid configuration (error 9)'), ('launch.err=701@1', 'out of launch resources (error 701)'),
    ('copy.err=1@1', 'invalid value (error 1)'), ('copy.err=1@2', 'invalid value (error 1)'), ('sync.err=98@1', 'invalid device function (error 98)')])
def test_an_error_that_passes_fails_its_batch_alone(fake, right, script, says):
    server = fake(script)
    fails(server.post(FORWARD, wire.small_bytes()), 500, 'internal', says)
    assert server.get('/readyz').status == 200
    for _ in range(3):
        assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert server.metric('attnd_device_errors_total', device='fake:0', error='DEVICE') == 1
    assert server.metric('attnd_device_batches_total', device='fake:0') == 4


def test_every_request_of_a_failed_batch_hears_of_it(fake, right, gate):
    """When a batch fails, all of its requests fail, and no others do."""
    server = fake(f'hold={gate.path}@1+,launch.err=9@{5 + GUESTS}')
    first = []
    # Each request is one batch. A device also has streams for guests: clients that have no other batch on the device.
    # Later requests have to wait only when these streams have a batch too.
    for n in range(1, 5 + GUESTS):
        first.append(Asking(server))
        assert eventually(lambda: running(server)['fake:0'] == n)
    batches = server.metric('attnd_batch_size_count')
    waiting = [Asking(server) for _ in range(6)]
    assert eventually(lambda: server.metric('attnd_queue_requests') == 6)
    gate.open()
    assert all(tensors(a.result()) == right for a in first)
    answers = [a.result() for a in waiting]
    assert server.metric('attnd_batch_size_count') == batches + 1, 'they were to leave together'
    for answer in answers:
        fails(answer, 500, 'internal', 'error 9')
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right


def test_out_of_device_memory_is_answered_503_and_passes(fake, right):
    server = fake('alloc.fail@1')
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'out-of-memory', 'out of memory')
    assert server.get('/readyz').status == 200
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert server.metric('attnd_device_errors_total', error='NO_MEMORY') == 1


def test_scratch_memory_of_idle_streams_is_given_up_before_anybody_is_refused(fake, right, gate):
    # The first request of each stream makes three allocations: workspace, inputs and outputs. The script lets the
    # seventh allocation fail, which is the first one of the third request.
    server = fake(f'hold={gate.path}@1,alloc.fail@7')
    first = Asking(server)
    assert eventually(lambda: running(server)['fake:0'] == 1)
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right  # the second request runs on another stream
    gate.open()
    assert tensors(first.result()) == right
    kept = devices(server)['fake:0']['memory_used_bytes']
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert 0 < devices(server)['fake:0']['memory_used_bytes'] < kept
    assert server.metric('attnd_device_errors_total') == 0


def body_of(kilobytes, seed=3):
    """Makes a forward whose inputs and outputs take about this many kilobytes, and that is quick to compute."""
    rng = np.random.default_rng(seed)
    members, _ = wire.random_problem(rng, B=kilobytes, Sq=4, H=1, D=16)  # each batch row has 4 tensors of 256 bytes
    return json.dumps(members).encode()


def test_a_request_larger_than_the_device_is_refused_and_a_smaller_one_served(fake, right):
    server = fake('', '--device-bytes', '2M')
    fails(server.post(FORWARD, body_of(4000)), 413, 'too-large', 'the limit is 2097152 (--device-bytes)')
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert server.get('/readyz').status == 200


def test_what_fits_alone_waits_for_memory_instead_of_failing(fake, gate):
    server = fake(f'hold={gate.path}@1', '--device-bytes', '8M')
    large = body_of(4500)
    first = Asking(server, large)
    assert eventually(lambda: running(server)['fake:0'] == 1)
    others = [Asking(server, large) for _ in range(3)]
    assert eventually(lambda: running(server)['fake:0'] == 4)
    # The small request could run at once, but it must not pass the large ones again and again. So it may have to wait
    # too.
    small = Asking(server)
    gate.open()
    expected = tensors(first.result())
    assert all(tensors(a.result()) == expected for a in others)
    assert small.result().status == 200
    assert server.metric('attnd_device_errors_total') == 0


def test_no_pinned_memory_is_answered_503_and_passes(fake, right):
    server = fake(','.join(f'pinned.fail@{n}' for n in range(1, 7)))
    refused = 0
    while (answer := server.post(FORWARD, wire.small_bytes())).status != 200:
        assert answer.status == 503 and 'retry-after' in answer.headers, answer
        refused += 1
    assert 1 <= refused <= 6 and tensors(answer) == right


@pytest.mark.limit(120)
@pytest.mark.parametrize('code, status, slug', [(9, 500, 'internal'), (2, 503, 'out-of-memory')])
def test_whichever_call_fails_the_request_does_and_nothing_is_lost(fake, right, code, status, slug):
    """The n-th call of the device fails, for n = 1, 2, 3 ..., until a whole request passes without a fault. After each
    fault the next request must succeed."""
    server = fake(f'walk.err={code}')
    failed = passed = 0
    while passed < 3:
        answer = server.post(FORWARD, wire.small_bytes())
        if answer.status == 200:
            assert tensors(answer) == right
            passed += 1
        else:
            fails(answer, status, slug, f'error {code}')
            failed += 1
            assert failed < 200
    assert failed >= 3, 'nothing ever failed'
    assert server.get('/readyz').status == 200 and server.inflight() == 0
    before = devices(server)['fake:0']['memory_used_bytes']
    assert before < 1 << 20, 'device memory of failed batches was kept'


def test_a_device_that_lies_is_found_out_by_verify(fake):
    server = fake('nan@1')
    bad, good = (server.forward(**wire.small_body(verify='all')) for _ in range(2))
    assert good.status == bad.status == 200
    assert good.json()['verification']['max_abs'] < 1e-5 and bad.json()['verification']['max_abs'] == 'Infinity'


# ---- Errors that stay ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('code', STICKY)
def test_a_sticky_error_takes_readiness_down_answers_all_and_ends_with_70(fake, right, gate, code):
    server = fake(f'hold={gate.path}@2,sync.err={code}@2', '--max-batch', '1')
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    asked = [Asking(server) for _ in range(7)]  # four of the seven requests run on streams, and three wait
    assert eventually(lambda: running(server)['fake:0'] >= 1 and server.metric('attnd_device_batches_total') + running(server)['fake:0']
                      + server.metric('attnd_queue_requests') == 8)
    probe = server.raw()  # this connection was opened before the fault, because the listeners are closed after it
    probe.sendall(b'GET /readyz HTTP/1.1\r\nHost: a\r\n')
    gate.open()
    answers = [a.result() for a in asked]
    lost = [a for a in answers if a.status != 200]
    assert len(lost) >= 1, 'nothing failed'
    for answer in lost:
        assert answer.status == 503 and 'retry-after' in answer.headers and answer.json()['code'] == 'unavailable', answer
    for answer in answers:
        assert answer.status == 503 or tensors(answer) == right
    probe.sendall(b'\r\n')
    ready = service.RawReader(probe).answer('GET')
    assert ready is not None and ready.status == 503 and ready.body == b'failed\n', ready
    probe.close()
    dies(server, 70)


@pytest.mark.parametrize('script', ['launch.err=700@1', 'copy.err=719@1', 'copy.err=719@2', 'sync.err=214@1', 'call.err=700@1'])
def test_wherever_a_sticky_error_surfaces(fake, script):
    server = fake(script)
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'unavailable', 'error')
    dies(server, 70)


@pytest.mark.limit(240)
def test_whichever_call_meets_a_sticky_error(right):
    """The n-th call of a request fails permanently, for n = 1, 2, 3 ..., until a request makes fewer than n calls."""
    for n in range(1, 100):
        server = Server(*ONE, env={'ATTN_FAKE_SCRIPT': f'call.err=700@{n}'}, binary=service.FAKE).start()
        answer = server.post(FORWARD, wire.small_bytes())
        if answer.status == 200:
            assert tensors(answer) == right
            server.stop()
            break
        fails(answer, 503, 'unavailable', 'error 700')
        dies(server, 70)
    assert 5 < n < 100


@pytest.mark.limit(120)
def test_a_sticky_error_behind_one_that_passes_is_not_overlooked():
    """A launch fails with a temporary error. Before it, a copy has failed with a permanent error. The device must count
    as lost at once."""
    lost = 0
    for n in range(1, 20):
        server = Server(*ONE, env={'ATTN_FAKE_SCRIPT': f'launch.err=9@1,call.err=700@{n}'}, binary=service.FAKE).start()
        while (answer := server.post(FORWARD, wire.small_bytes())).status != 503:
            assert answer.status in (200, 500), answer
        # the message names the error itself, not that the device "was lost to an earlier error"
        fails(answer, 503, 'unavailable', 'error 700')
        dies(server, 70)
        lost += 1
    assert lost == 19


def test_a_keep_alive_client_does_not_hold_the_end_up(fake):
    server = fake('launch.err=700@1')
    idle, half = server.raw(), server.raw()
    half.sendall(b'POST /v1/attention/forward HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{')
    assert server.post(FORWARD, wire.small_bytes()).status == 503
    dies(server, 70)
    idle.close()
    half.close()


def pids(server):
    """Returns the process ids of the servers that the supervisor says it has started."""
    return [int(line.split('pid=')[1].split()[0]) for line in server.log().splitlines() if 'what=started' in line]


def patient(server, seconds=30):
    """Repeats the small request until it is answered, as a client does that obeys Retry-After."""
    def once():
        try:
            answer = server.post(FORWARD, wire.small_bytes())
            return answer if answer.status == 200 else None
        except (OSError, service.http.client.HTTPException):
            return None
    answer = eventually(once, seconds, 0.05)
    assert answer, server.log()
    return answer


def test_under_a_supervisor_the_next_server_takes_over(fake, right):
    server = fake('sync.err=700@3', '--supervise')
    for _ in range(2):
        assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'unavailable', 'error 700')
    assert tensors(patient(server)) == right
    assert eventually(lambda: 'what=ended status=70' in server.log() and len(pids(server)) == 2)


def test_under_a_supervisor_nobody_is_refused_a_connection(fake, right):
    """The listening socket belongs to the supervisor, so a client that connects while no server runs waits instead of
    being refused."""
    server = fake('launch.err=719@2', '--supervise')
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert server.post(FORWARD, wire.small_bytes()).status == 503
    refused = 0
    while len(pids(server)) < 2 or server.get('/readyz').status != 200:
        try:
            server.raw().close()
        except ConnectionRefusedError:
            refused += 1
    assert refused == 0
    assert tensors(patient(server)) == right


@pytest.mark.parametrize('fault, status', [('abort@2', 134), ('segv@2', 139)])
def test_a_crash_is_survived_under_a_supervisor(fake, right, fault, status):
    server = fake(fault, '--supervise')
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    with pytest.raises((OSError, service.http.client.HTTPException)):
        server.post(FORWARD, wire.small_bytes())
    assert tensors(patient(server)) == right
    assert eventually(lambda: f'what=ended status={status}' in server.log())


# ---- Devices that do not come back -----------------------------------------------------------------------------------


def test_a_batch_that_never_ends_counts_as_a_lost_device(fake):
    server = fake('event.never@1', '--watchdog-ms', '300')
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'unavailable', 'fake:0 did not finish in the time it may take')
    dies(server, 70)


def test_under_a_supervisor_a_hung_device_is_replaced(fake, right):
    server = fake('event.never@2', '--watchdog-ms', '300', '--supervise')
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert server.post(FORWARD, wire.small_bytes()).status == 503
    assert tensors(patient(server)) == right


def test_a_call_that_never_returns_counts_as_a_lost_device(fake):
    """Runs a request on a stream that is never done. The call that marks the stream after the run fails. The device's
    thread then waits for everything on the stream, and so hangs for ever."""
    found = False
    for n in range(1, 30):
        server = fake(f'event.never@1,call.err=9@{n}', '--watchdog-ms', '300')
        answer = server.post(FORWARD, wire.small_bytes())
        # status 500: the call failed while nothing was on the stream yet, so the device's thread did not hang
        if answer.status == 500:
            server.stop()
            continue
        fails(answer, 503, 'unavailable', 'did not finish')
        dies(server, 70)
        found = True
        break
    assert found


def test_slow_is_not_lost(fake, right, gate):
    """A deadline passes while a batch runs. The client gets its answer, the batch ends later, and the device is not
    counted as lost."""
    server = fake(f'hold={gate.path}@1')
    answer = server.post(FORWARD, wire.small_bytes(), {'X-Request-Timeout-Ms': '1000'})
    assert answer.status == 504, answer
    assert running(server)['fake:0'] == 1 and server.get('/readyz').status == 200
    gate.open()
    assert eventually(lambda: running(server)['fake:0'] == 0)
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right


def test_who_leaves_while_his_batch_runs_leaves_nothing_behind(fake, right, gate):
    server = fake(f'hold={gate.path}@1')
    client = server.raw()
    client.sendall(service.request_bytes(FORWARD, wire.small_bytes()))
    gate.await_kernels()
    client.close()
    assert eventually(lambda: server.inflight() == 0)
    assert running(server)['fake:0'] == 1, 'a kernel that runs is not interrupted'
    gate.open()
    assert eventually(lambda: running(server)['fake:0'] == 0 and server.metric('attnd_staging_bytes', kind='used') == 0)
    assert tensors(server.post(FORWARD, wire.small_bytes())) == right


def test_a_hung_device_does_not_hold_up_a_drain(fake):
    server = fake('event.never@1', '--drain-ms', '200')
    asked = Asking(server)
    assert eventually(lambda: running(server)['fake:0'] == 1)
    server.stop()  # stop() fails unless the server ends with status 0 in time
    assert asked.result().status == 503


# ---- Several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('option, names', [
    ('auto', ['fake:0', 'fake:1', 'fake:2']), ('all', ['fake:0', 'fake:1', 'fake:2']), ('2', ['fake:2']), ('2,0', ['fake:2', 'fake:0']), ('cpu', ['cpu'])])
def test_devices_are_those_asked_for(fake, right, option, names):
    server = fake('', '--devices', option, devices=3)
    assert list(devices(server)) == names
    answer = server.post(FORWARD, wire.small_bytes())
    assert tensors(answer) == right and answer.json()['backend'].startswith(names[0] + ' ')


def test_without_a_gpu_auto_is_the_cpu(fake, right):
    server = fake('', devices=0)
    assert list(devices(server)) == ['cpu'] and tensors(server.post(FORWARD, wire.small_bytes())) == right


@pytest.mark.parametrize('option, count, script, says', [
    ('all', 0, '', "--devices: 'all' wants GPUs, and there is none here"), ('0,1', 0, '', "--devices: '0,1' wants GPUs, and there is none here"),
    ('3', 3, '', '--devices: there is no GPU 3, there are 3'), ('0,1', 1, '', '--devices: there is no GPU 1, there is 1'),
    ('auto', 2, '1:open.err=46', 'device unavailable (error 46)'), ('auto', 1, 'no.such.fault', "nothing is known of 'no.such.fault'")])
def test_devices_that_cannot_be_had(option, count, script, says):
    env = {**os.environ, 'ATTN_FAKE_DEVICES': str(count), 'ATTN_FAKE_SCRIPT': script}
    run = subprocess.run([service.FAKE, '--listen', '127.0.0.1:0', '--devices', option, *ONE], env=env, capture_output=True, text=True,
                         timeout=20 * service.SLOWER)
    assert run.returncode == 69 and says in run.stderr, run.stderr


def test_the_program_without_a_gpu_serves_from_the_cpu(serve, right):
    """The program as it was built, with or without CUDA, starts without a GPU driver and computes on the CPU."""
    if os.path.exists('/dev/nvidia0') or os.path.exists('/dev/nvidiactl'):
        pytest.skip('there is a GPU here')
    server = serve(*ONE)
    info = server.get('/v1/info').json()
    assert [d['name'] for d in info['devices']] == ['cpu'] and tensors(server.post(FORWARD, wire.small_bytes())) == right
    run = subprocess.run([service.BINARY, '--devices', 'all'], capture_output=True, text=True, timeout=20 * service.SLOWER)
    why = 'there is none here' if 'cuda' in info['backends'] else 'this program was built without CUDA'
    assert run.returncode == 69 and f"--devices: 'all' wants GPUs, and {why}" in run.stderr, run.stderr


def test_the_least_loaded_device_is_next(fake, gate):
    """A device's load is its work, not the number of its requests: one large request outweighs several small ones."""
    server = fake(f'hold={gate.path}', devices=2)
    large = Asking(server, body_of(2000))
    assert eventually(lambda: sum(running(server).values()) == 1)
    small = []
    for n in range(1, 4):  # the requests are sent one after the other, because otherwise they could leave as one batch
        small.append(Asking(server))
        assert eventually(lambda: sum(running(server).values()) == 1 + n)
        assert running(server) == {'fake:0': 1, 'fake:1': n}
    gate.open()
    assert large.result().json()['backend'].startswith('fake:0 ')
    assert all(a.result().json()['backend'].startswith('fake:1 ') for a in small)


def test_while_one_device_is_slow_the_other_takes_the_work(fake, right, gate):
    server = fake(f'0:hold={gate.path}@1', devices=2)
    slow = Asking(server)
    assert eventually(lambda: running(server) == {'fake:0': 1, 'fake:1': 0})
    for _ in range(20):
        answer = server.post(FORWARD, wire.small_bytes())
        assert tensors(answer) == right and answer.json()['backend'].startswith('fake:1 ')
    assert slow.is_alive()
    gate.open()
    assert tensors(slow.result()) == right


def test_devices_give_the_same_bits(fake, gate):
    server = fake(f'0:hold={gate.path}@1', devices=2)
    body = body_of(50)
    first = Asking(server, body)
    assert eventually(lambda: running(server)['fake:0'] == 1)
    second = server.post(FORWARD, body)
    gate.open()
    first = first.result()
    assert [a.json()['backend'].split()[0] for a in (first, second)] == ['fake:0', 'fake:1'] and tensors(first) == tensors(second)


def test_one_device_lost_of_two_leaves_the_other_serving(fake, right):
    server = fake('0:sync.err=700@1,1:sync.err=700@6', devices=2)
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'unavailable', 'error 700')
    assert server.get('/readyz').status == 200
    for _ in range(5):
        answer = server.post(FORWARD, wire.small_bytes())
        assert tensors(answer) == right and answer.json()['backend'].startswith('fake:1 ')
    m = server.metrics()
    assert m['attnd_device_usable{device="fake:0"}'] == 0 and m['attnd_device_usable{device="fake:1"}'] == 1 and m['attnd_ready'] == 1
    assert {n: d['usable'] for n, d in devices(server).items()} == {'fake:0': False, 'fake:1': True}
    # the last of the devices is lost here
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'unavailable', 'error 700')
    dies(server, 70)


def test_one_device_hung_of_two_leaves_the_other_serving(fake, right):
    server = fake('0:event.never@1', '--watchdog-ms', '300', devices=2)
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'unavailable', 'fake:0 did not finish')
    assert server.get('/readyz').status == 200
    for _ in range(5):
        assert tensors(server.post(FORWARD, wire.small_bytes())) == right
    assert server.metric('attnd_device_errors_total', device='fake:0', error='OVERDUE') == 1
    server.stop()  # the server ends with status 0 although the hung device still holds requests


def test_a_batch_that_comes_back_after_its_device_was_given_up(fake, right, gate):
    server = fake(f'0:hold={gate.path}@1', '--watchdog-ms', '300', devices=2)
    fails(server.post(FORWARD, wire.small_bytes()), 503, 'unavailable', 'fake:0 did not finish')
    assert running(server)['fake:0'] == 1 and server.metric('attnd_staging_bytes', kind='used') > 0, 'its memory is not given to others'
    gate.open()
    assert eventually(lambda: running(server)['fake:0'] == 0 and server.metric('attnd_staging_bytes', kind='used') == 0)
    answer = server.post(FORWARD, wire.small_bytes())
    assert tensors(answer) == right and answer.json()['backend'].startswith('fake:1 '), 'a lost device stays lost'


def test_staging_memory_outlives_the_device_it_came_from(fake):
    """Staging memory (the memory of request bodies) was allocated by a device that is lost. It must then still be
    possible to allocate staging memory in new sizes."""
    server = fake('0:launch.err=700@1', devices=2)
    assert server.post(FORWARD, wire.small_bytes()).status == 503
    assert server.post(FORWARD, body_of(3000)).status == 200


def test_info_and_metrics_tell_about_each_device(fake, gate):
    server = fake(f'0:hold={gate.path}@1,1:launch.err=9@3', '--device-bytes', '64M', devices=2)
    first = Asking(server)
    assert eventually(lambda: running(server)['fake:0'] == 1)
    assert [server.post(FORWARD, wire.small_bytes()).status for _ in range(3)] == [200, 200, 500]
    d = devices(server)
    assert d['fake:0']['memory_used_bytes'] > 0 and d['fake:0']['running_requests'] == 1
    gate.open()
    assert first.result().status == 200
    dout = wire.tensor(np.ones((1, 3, 2, 4)))
    assert server.backward(**wire.small_body(), dout=dout).status == 200
    work = 2 * (4 + 4) * 2 * 9  # operations of one forward: 2 (D + Dv) H Sq Sk
    d, m = devices(server), server.metrics()
    assert [d[n]['batches'] for n in d] == [2, 3] and [d[n]['errors'] for n in d] == [0, 1]
    assert [d[n]['flops'] for n in d] == [work * 3.5, work * 2]
    for n in d:
        assert d[n]['memory_limit_bytes'] == 64 << 20 and d[n]['backend'] == 'fake' and d[n]['usable']
        assert d[n]['kernel_seconds'] > 0
        assert m[f'attnd_device_memory_bytes{{device="{n}",kind="limit"}}'] == 64 << 20
        assert m[f'attnd_device_memory_bytes{{device="{n}",kind="used"}}'] == d[n]['memory_used_bytes']
        assert m[f'attnd_device_batches_total{{device="{n}"}}'] == d[n]['batches']
        assert m[f'attnd_flops_total{{device="{n}",op="forward"}}'] > 0 and m[f'attnd_kernel_seconds_total{{device="{n}",op="forward"}}'] > 0
    assert m['attnd_flops_total{device="fake:0",op="backward"}'] == 2.5 * work
    assert m['attnd_device_errors_total{device="fake:1",error="DEVICE"}'] == 1
    assert server.metric('attnd_device_errors_total') == 1


def test_work_spreads_over_devices_under_load(fake, right):
    server = fake('', devices=2)
    asked = [Asking(server) for _ in range(60)]
    assert all(tensors(a.result()) == right for a in asked)
    assert sum(d['batches'] for d in devices(server).values()) >= 1 and set(running(server).values()) == {0}


# ---- Threads that are stuck ------------------------------------------------------------------------------------------

STUCK_S = 5  # HEARTBEAT_LIMIT_MS


@pytest.fixture
def watched(serve):
    """watched(script, shim variables) starts a server, and opens a connection to its port for metrics
    (--metrics-listen). This port has a thread of its own, which answers even while HTTP threads hang."""
    connections = []

    def start(script='', **shims):
        port = service.free_port()
        env = {'ATTN_FAKE_SCRIPT': script, **(service.shimmed(**shims) if shims else {})}
        # While the thread of a request hangs, the request's body does not arrive either. The limit on stalled bodies
        # must therefore be long.
        server = serve(*ONE, '--metrics-listen', f'127.0.0.1:{port}', '--body-stall-ms', '60000', env=env, binary=service.FAKE)
        # The connection is opened before anything hangs. The scheduler's loop, which may hang later, accepts new
        # connections.
        connections.append(service.Connection(('127.0.0.1', port), 20 * service.SLOWER))
        assert connections[-1].ask('GET', '/readyz').status == 200
        return server, connections[-1]
    yield start
    for connection in connections:
        connection.close()


def becomes_unready(port, why):
    """Waits until /readyz fails with this reason. /livez must stay 200, so that Kubernetes does not restart the
    server."""
    assert eventually(lambda: port.ask('GET', '/readyz').status == 503, seconds=(STUCK_S + 20) * service.SLOWER, every=0.1)
    assert why in port.ask('GET', '/readyz').body.decode()
    assert port.ask('GET', '/livez').status == 200


def busy(port, kind):
    return float(re.search(rf'^attnd_thread_busy_seconds{{thread="{kind}"}} (\S+)$', port.ask('GET', '/metrics').body.decode(), re.M)[1])


@pytest.mark.limit(120)
@pytest.mark.parametrize('kind, why', [('http', 'an HTTP thread has been at one piece of work for'),
                                       ('loop', 'the loop has been at one piece of work for')])
def test_a_thread_that_is_stuck_makes_the_server_unready_and_says_so(watched, gate, kind, why):
    server, port = watched(f'plan.hold={gate.path}@1') if kind == 'http' else watched(HANG_RESUME=gate.path)
    assert busy(port, kind) < STUCK_S
    asking = Asking(server)
    becomes_unready(port, why)
    assert busy(port, kind) > STUCK_S
    gate.open()
    asking.join()
    assert asking.answer.status == 200
    assert eventually(lambda: port.ask('GET', '/readyz').status == 200)


def test_the_probe_notices_a_thread_that_keeps_others_waiting(fake, gate):
    """service.Probe subtracts delays that other work on the machine causes. If the only HTTP thread waits for a second,
    the cause is the server itself. The probe must report this delay."""
    server = fake(f'plan.hold={gate.path}@1', '--http-threads', '1')
    with service.Probe(server) as probe:
        asking = Asking(server)
        time.sleep(1)
        gate.open()
        assert asking.result().status == 200
    with pytest.raises(AssertionError, match='waited'):
        probe.check(service.Probe.BOUND / service.SLOWER)
