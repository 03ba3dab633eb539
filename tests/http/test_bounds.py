"""What one client asks for never freezes a thread: beside each attack a probe on /livez waits no more than 100 ms (service.Probe), and
the server ends when it is told to. The attacks are bounded in count and in time, and go to a server of this test alone."""
import json
import threading
import time

import pytest

import service
import wire
from service import Probe, eventually, request_bytes

FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'


def nothing(B, S=0, H=1, D=1, **options):
    """A forward of B batch rows with nothing in them: 300 bytes whatever B is."""
    t = {'shape': [B, S, H, D], 'dtype': 'float16', 'data': ''}
    return {'q': t, 'k': t, 'v': t, **options}


def leave_behind(server, body, count):
    """So many clients send it and wait for nothing."""
    sockets = []
    for _ in range(count):
        s = server.raw()
        s.sendall(request_bytes(FORWARD, body))
        sockets.append(s)
    return sockets


def stops_at_once(server, seconds):
    start = time.monotonic()
    server.stop()
    took = time.monotonic() - start
    assert took < seconds * service.SLOWER, f'it took {took:.1f} s to end after SIGTERM'


# ---- Problems of nothing ----------------------------------------------------------------------------------------------


def test_two_thousand_million_batch_rows_of_nothing_are_refused_at_once(serve):
    server = serve()
    with Probe(server) as probe:
        start = time.monotonic()
        answer = server.post(FORWARD, nothing(2**31 - 1))
        took = time.monotonic() - start
    assert answer.status == 413, answer
    problem = answer.json()
    assert problem['code'] == 'too-large' and problem['pointer'] == '/q/shape', problem
    assert problem['detail'] == 'q: 2147483647 batch rows of 1 heads are 2147483647, B times H must be at most 1048576'
    assert took < 1 * service.SLOWER
    probe.check()


def test_a_million_batch_rows_of_nothing_take_no_workspace(serve):
    server = serve('--device-bytes', '1M')
    for members in (nothing(1 << 20, verify='all'), nothing(1 << 17, H=8, save=True), nothing(1 << 20, outputs=['out'])):
        answer = server.post(FORWARD, members)
        assert answer.status == 200 and answer.json().get('out', {'data': ''})['data'] == '', answer
    answer = server.post(BACKWARD, {**nothing(1 << 20), 'dout': nothing(1 << 20)['q']})
    assert answer.status == 200 and all(answer.json()[name]['data'] == '' for name in ('dq', 'dk', 'dv')), answer
