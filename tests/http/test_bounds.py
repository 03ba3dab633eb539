"""No request of one client may freeze a thread of the server. During each attack, a probe on /livez must not wait more
than 100 ms (service.Probe). The server must end when it is told to. The attacks are bounded in count and in time, and
each test has a server of its own."""
import json
import re
import struct
import threading
import time

import service
import wire
from service import Probe, eventually, request_bytes
from under_way import Asking

FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'


def nothing(B, S=0, H=1, D=1, **options):
    """Makes a forward with B empty batch rows. Its body has 300 bytes, whatever B is."""
    t = {'shape': [B, S, H, D], 'dtype': 'float16', 'data': ''}
    return {'q': t, 'k': t, 'v': t, **options}


def leave_behind(server, body, count):
    """Opens `count` connections that send the body and never read an answer."""
    sockets = []
    for _ in range(count):
        s = server.raw()
        s.sendall(request_bytes(FORWARD, body))
        sockets.append(s)
    return sockets


def processor_seconds(server):
    """Returns the processor time that the server has used so far, which does not depend on other load of the
    machine."""
    return server.metric('process_cpu_seconds_total')


def stops_at_once(server, seconds):
    start = time.monotonic()
    server.stop()
    took = time.monotonic() - start
    assert took < seconds * service.SLOWER, f'it took {took:.1f} s to end after SIGTERM'


# ---- Problems of nothing ---------------------------------------------------------------------------------------------


def test_two_thousand_million_batch_rows_of_nothing_are_refused_at_once(serve):
    server = serve()
    with Probe(server) as probe:
        before = processor_seconds(server)
        answer = server.post(FORWARD, nothing(2**31 - 1))
        took = processor_seconds(server) - before
    assert answer.status == 413, answer
    problem = answer.json()
    assert problem['code'] == 'too-large' and problem['pointer'] == '/q/shape', problem
    assert problem['detail'] == 'q: 2147483647 batch rows of 1 heads are 2147483647, B times H must be at most 1048576'
    assert took < 1 * service.SLOWER, f'{took:.1f} s of the processor'
    probe.check()


def test_envelopes_of_nothing_from_80_sockets_freeze_no_thread(serve):
    server = serve()
    most = json.dumps({'requests': [nothing(2**31 - 1)] * 40}).encode()
    full = json.dumps({'requests': [nothing(1 << 20), nothing(1 << 17, H=8, causal=True), nothing(1 << 20, D=4)] * 200}).encode()
    with Probe(server) as probe:
        left = leave_behind(server, most, 70) + leave_behind(server, full, 10)
        answers = [server.post(FORWARD, body) for body in (most, full)]
        for s in left:
            s.close()
        time.sleep(0.3)
    assert [r['error']['code'] for r in answers[0].json()['responses']] == ['too-large'] * 40
    assert all(r['out']['data'] == '' for r in answers[1].json()['responses']), answers[1]
    probe.check()
    assert eventually(lambda: server.inflight() == 0)
    stops_at_once(server, 5)


def test_a_million_batch_rows_of_nothing_take_no_workspace(serve):
    server = serve('--device-bytes', '1M')
    for members in (nothing(1 << 20, verify='all'), nothing(1 << 17, H=8, save=True), nothing(1 << 20, outputs=['out'])):
        answer = server.post(FORWARD, members)
        assert answer.status == 200 and answer.json().get('out', {'data': ''})['data'] == '', answer
    answer = server.post(BACKWARD, {**nothing(1 << 20), 'dout': nothing(1 << 20)['q']})
    assert answer.status == 200 and all(answer.json()[name]['data'] == '' for name in ('dq', 'dk', 'dv')), answer


def test_an_envelope_that_is_checked_elsewhere_still_has_its_deadline_and_its_place(serve):
    """The body has 1024 problems, which another thread than the HTTP thread decodes in 40 ms. The server must then
    notice which clients have left, and whose deadline has passed."""
    server = serve('--queue-depth', 8)
    body = json.dumps({'requests': [wire.small_body()] * 1024}).encode()
    answer = server.post(FORWARD, body, {'X-Request-Timeout-Ms': '1'})
    assert answer.status == 504 and answer.json()['code'] == 'deadline-exceeded', answer
    for _ in range(3):
        for s in leave_behind(server, body, 4):
            s.close()
    assert eventually(lambda: server.inflight() == 0)
    answer = server.post(FORWARD, body)
    assert answer.status == 200 and len(answer.json()['responses']) == 1024
    bad = json.dumps({'requests': [{'q': i} for i in range(1024)], 'more': ' ' * 40000}).encode()
    assert server.post(FORWARD, bad).status == 400
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)


# ---- Work for minutes in a small body --------------------------------------------------------------------------------


def thin(S, **options):
    """Makes a forward with S x S scores and D = 1: the server computes S^2 exponentials for a body of about 4 S
    bytes."""
    t = {'shape': [1, S, 1, 1], 'dtype': 'float8_e4m3fn', 'data': service.b64(bytes(S))}
    return json.dumps({'q': t, 'k': t, 'v': t, **options}).encode()


def test_a_body_of_4_mb_does_not_take_the_device_from_everybody_else(serve):
    """Seven clients each send work of a minute or more, and wait one second for the answer. An eighth client sends a
    small request to the same device, and must be served."""
    server = serve('--max-seconds', 86400)
    big = thin(10**6)
    answers = []

    def attack():
        answers.append(server.post(FORWARD, big, {'X-Request-Timeout-Ms': '1000'}))
    attackers = [threading.Thread(target=attack) for _ in range(7)]
    with Probe(server) as probe:
        for t in attackers:
            t.start()
        for t in attackers:
            t.join()
        start = time.monotonic()
        # with `verify`, even a small request waits in the device's queue, where it competes with the seven clients'
        # requests
        little = server.forward(**wire.small_body(), verify=1)
        took = time.monotonic() - start
    assert little.status == 200, little
    assert took < 5 * service.SLOWER, f'somebody else waited {took:.1f} s'
    assert [a.status for a in answers] == [504] * 7, answers
    probe.check()
    stops_at_once(server, 5)


def test_work_that_a_deadline_or_a_client_left_behind_ends_at_once(serve):
    """When no client waits for a request any more, the server stops computing it between two tiles, and the device is
    then free."""
    server = serve('--max-batch', 1, '--cpu-threads', 2)
    body = thin(200000, softcap=30.0)  # this work takes at least 2 s, and typically 12 s

    def idle():
        return server.get('/v1/info').json()['devices'][0]['running_requests'] == 0
    with Probe(server) as probe:
        answer = server.post(FORWARD, body, {'X-Request-Timeout-Ms': '4000'})
        assert answer.status == 504 and 'while the request was running' in answer.json()['detail'], answer
        assert eventually(idle, 4), 'it computes for a client that has its 504'

        sockets = leave_behind(server, body, 2)
        assert eventually(lambda: not idle())
        for s in sockets:
            s.close()
        assert eventually(idle, 4), 'it computes for clients that left'
        assert server.forward(**wire.small_body(), verify=1).status == 200
    assert server.metric('attnd_device_errors_total') == 0
    probe.check()


def test_a_batch_goes_on_while_one_of_its_clients_waits(fake, gate):
    """A batch waits for more requests for a time, the batching window. The wait must end when the batch is full. A gate
    (a file) holds the device, so all nine requests are in one batch."""
    server = fake(f'hold={gate.path}', '--max-batch', 9, '--batch-window-us', 1000000)

    def running():
        return server.metric('attnd_inflight_requests', state='running')
    alike = json.dumps({**wire.small_body(), 'save': True}).encode()
    left = leave_behind(server, alike, 6)
    staying = [Asking(server, alike) for _ in range(3)]
    assert eventually(lambda: running() == 9)
    assert server.metric('attnd_batch_size_count') == 1, 'they were to leave together'
    for s in left:
        s.close()
    assert eventually(lambda: server.metric('attnd_cancelled_total', state='running') == 6)
    gate.open()
    assert [request.result().status for request in staying] == [200] * 3


def expected_seconds(server, body, most, because=''):
    """Returns the error message for a request that is refused because it needs more than `most` seconds."""
    answer = server.post(FORWARD, body)
    assert answer.status == 422 and answer.json()['code'] == 'too-much-work', answer
    detail = answer.json()['detail']
    found = re.fullmatch(fr'this is expected to take ([0-9.e+]+) seconds here{because}, a request may take {most} \(--max-seconds\)', detail)
    assert found and float(found[1]) > most, detail
    return float(found[1])


def test_more_work_than_a_request_may_be_is_refused_by_name(serve):
    server = serve('--max-seconds', 1, '--cpu-threads', 1)
    expected_seconds(server, thin(200000), 1)
    # FlashMask hides most pairs, which then need no work: here 256 queries see each key
    start = [min(200000, j + 256) for j in range(200000)]
    rows = {'shape': [1, 1, 200000, 1], 'dtype': 'int32', 'data': service.b64(b''.join(r.to_bytes(4, 'little') for r in start))}
    masked = json.loads(thin(200000, causal=True, outputs=['lse']))
    assert server.post(FORWARD, {**masked, 'mask_startend_rows': rows}).status == 200
    assert server.post(FORWARD, masked).status == 422


STRANGE = ', most of them for rows whose scores leave float32'


def strange(S, number=b'\x00\x3c', **options):
    """Makes a forward of S queries and S keys with D = 1 whose scores overflow float32. The body has 6 bytes per
    query."""
    t = {'shape': [1, S, 1, 1], 'dtype': 'float16', 'data': service.b64(number * S)}
    return json.dumps({'q': t, 'k': t, 'v': t, 'scale': 3e38, 'outputs': ['lse'], **options}).encode()


def test_300_kb_whose_rows_all_leave_float32_are_refused_by_name_and_their_neighbours_are_not(serve):
    server = serve('--max-seconds', 3, '--cpu-threads', 1)
    expected_seconds(server, strange(50000), 3, STRANGE)
    # rows are slow in this test because of the values of q and k, not because of the scale
    S = 30000
    expected_seconds(server, strange(S), 3, STRANGE)
    neighbours = {'small': strange(5000), 'scores of 0': strange(S, b'\0\0'), 'a scale of 1': strange(S, scale=1.0),
                  'capped': strange(S, softcap=1.0), 'few keys': strange(S, window=[0, 0]),
                  'hidden': strange(S, causal=True, mask_startend_rows={
                      'shape': [1, 1, S, 1], 'dtype': 'int32', 'data': service.b64(bytes(4 * S))})}
    for name, body in neighbours.items():
        answer = server.post(FORWARD, body)
        assert answer.status == 200, (name, answer)


def test_gradients_of_options_are_in_the_estimate_and_named(serve):
    server = serve('--max-seconds', 2, '--cpu-threads', 1)
    S = 43000
    zeros = {'shape': [1, S, 1, 1], 'dtype': 'bfloat16', 'data': service.b64(bytes(2 * S))}
    lse = {'shape': [1, 1, S], 'dtype': 'float32', 'data': service.b64(struct.pack('<f', 20) * S)}
    body = {'q': zeros, 'k': zeros, 'v': zeros, 'dout': zeros, 'out': zeros, 'lse': lse,
            'alibi_slopes': {'shape': [1], 'dtype': 'float32', 'data': 'AACAPw=='}, 'outputs': ['dq']}
    plain = json.dumps(body).encode()
    costly = json.dumps({**body, 'outputs': ['dq', 'dalibi_slopes']}).encode()
    answer = server.post(BACKWARD, costly)
    assert answer.status == 422 and ', most of them for dalibi_slopes, a request may take 2' in answer.json()['detail'], answer
    assert server.post(BACKWARD, plain).status == 200


def test_a_mask_of_the_most_negative_number_is_no_reason_to_refuse(serve):
    """A mask of the most negative number, as Hugging Face writes it, hides the left half of some batch rows as padding.
    Queries of the padding see only padding, with equal scores, which the server must not refuse as expensive."""
    server = serve('--max-seconds', 10, '--cpu-threads', 1)
    S = 2048
    hidden, seen = struct.pack('<e', -65504), b'\0\0'
    mask = b''.join(hidden * S if i < S // 2 else hidden * (S // 2) + seen * (i + 1 - S // 2) + hidden * (S - 1 - i) for i in range(S))
    t = {'shape': [1, S, 1, 8], 'dtype': 'float16', 'data': service.b64(b'\x00\x3c' * 8 * S)}
    assert server.forward(q=t, k=t, v=t, bias={'shape': [1, 1, S, S], 'dtype': 'float16', 'data': service.b64(mask)}, outputs=['lse']).status == 200
    lowest = b''.join(mask[n:n + 2] == seen and bytes(4) or b'\xff\xff\x7f\xff' for n in range(0, len(mask), 2))
    assert server.forward(q=t, k=t, v=t, bias={'shape': [1, 1, S, S], 'dtype': 'float32', 'data': service.b64(lowest)}, outputs=['lse']).status == 200


def test_what_cannot_be_done_before_its_deadline_is_refused_at_once(serve):
    server = serve('--cpu-threads', 1)
    start = time.monotonic()
    answer = server.post(FORWARD, thin(400000), {'X-Request-Timeout-Ms': '12000'})
    assert time.monotonic() - start < 8 * service.SLOWER
    assert answer.status == 504 and answer.json()['code'] == 'deadline-exceeded', answer
    assert answer.json()['detail'].startswith('this takes 16 seconds here at the very least, and the deadline is in '), answer


# ---- Answers written as numbers, rows recomputed ---------------------------------------------------------------------


def wordy(rows, **options):
    """Makes a forward of rows x 256 numbers that are written as text. The body has 10 bytes per row."""
    q = {'shape': [1, rows, 1, 1], 'dtype': 'float16', 'data': service.b64(b'\x00\x3c' * rows)}
    k = {'shape': [1, 1, 1, 1], 'dtype': 'float16', 'data': 'ADw='}
    v = {'shape': [1, 1, 1, 256], 'dtype': 'float16', 'data': service.b64(bytes(range(1, 65)) * 8)}
    return json.dumps({'q': q, 'k': k, 'v': v, 'out_dtype': 'float32', 'outputs': ['out'], 'encoding': 'array', **options}).encode()


def test_answers_of_16_million_numbers_hold_no_thread_while_their_length_is_measured(serve):
    server = serve('--http-threads', 4)
    body = wordy(1 << 16)
    with Probe(server) as probe:
        left = leave_behind(server, body, 4)  # one client for each HTTP thread
        time.sleep(2)
        for s in left[:2]:
            s.close()
        answer = server.post(FORWARD, wordy(4096))
        for s in left[2:]:
            s.close()
    assert answer.status == 200 and int(answer.headers['content-length']) == len(answer.body)
    out = wire.value(answer.json()['out'])
    assert out.shape == (1, 4096, 1, 256) and (out == out[0, 0, 0]).all()
    probe.check()
    assert eventually(lambda: server.inflight() == 0, 5)
    stops_at_once(server, 5)


def ends_what_is_finished(server, body):
    """Sends a body whose deadline passes after the computation, while another thread verifies rows or measures the
    length of the answer's numbers as text. Measures processor time, because other load of the machine does not change
    it."""
    def finishing():
        return server.metric('attnd_inflight_requests', state='finishing') == 1
    # Measures the time from sending until the computation has ended. The first request takes longer, because memory is
    # allocated for it, so the second request's time counts.
    for _ in range(2):
        start = time.monotonic()
        left = leave_behind(server, body, 1)[0]
        assert eventually(finishing)
        ms = 100 + 1000 * (time.monotonic() - start)
        left.close()
        assert eventually(lambda: server.inflight() == 0)
    for _ in range(12):  # repeats until a deadline passes during this work, neither before nor after it
        before = processor_seconds(server)
        asking = Asking(server, body, {'X-Request-Timeout-Ms': f'{ms:.0f}'})
        assert eventually(lambda: finishing() or not asking.is_alive())
        seen, status = asking.is_alive(), asking.result().status
        told = processor_seconds(server)
        assert status in (200, 504), status
        if seen and status == 504:
            break
        ms *= 0.75 if status == 200 else 1.25
    assert seen and status == 504, 'no deadline ended it'
    assert told - before < (2 * ms / 1000 + 0.5) * service.SLOWER, f'504 after {told - before:.1f} s'
    time.sleep(1)
    assert processor_seconds(server) - told < 0.3, 'it went on for nobody'


def test_a_deadline_ends_the_measuring(serve):
    ends_what_is_finished(serve(), wordy(1 << 17))  # a second


def proven(rows, **options):
    """Makes a forward whose verification in float64 needs rows * 2^16 multiply-adds."""
    q = {'shape': [1, rows, 1, 16], 'dtype': 'float16', 'data': service.b64(b'\x00\x2c' * (16 * rows))}
    k = {'shape': [1, 2048, 1, 16], 'dtype': 'float16', 'data': service.b64(b'\x00\x2c' * (16 * 2048))}
    return {'q': q, 'k': k, 'v': k, 'outputs': ['out'], 'verify': 'all', **options}


def test_a_body_has_one_budget_for_all_rows_that_it_wants_verified(serve):
    # serves on the CPU, because a GPU would verify the rows itself, without this work of the CPU
    server = serve('--devices', 'cpu')
    answer = server.post(FORWARD, {'requests': [proven(6000)] * 40})
    assert answer.status == 200
    responses = answer.json()['responses']
    assert [r.get('verification', {}).get('rows', 0) for r in responses] == [6000] * 2 + [0] * 38
    assert responses[2]['error']['detail'] == \
        'verify: takes 393281536 multiply-adds, and the problems before it leave 287178752 of the 1073741824 of a body'
    assert responses[2]['error']['status'] == 422


def test_verification_ends_with_the_deadline_and_with_the_server(serve):
    server = serve('--devices', 'cpu', '--drain-ms', 300)
    body = json.dumps(proven(15000)).encode()  # verifying this body takes almost one second
    ends_what_is_finished(server, body)
    with Probe(server) as probe:
        left = leave_behind(server, body, 12)
        time.sleep(0.3)
    probe.check()
    stops_at_once(server, 4)
    for s in left:
        s.close()
