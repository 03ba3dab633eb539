"""Clients that close the connection (FIN) or abort it (RST) in any stage of a request. The server must free their slot
at once."""
import json
import os
import signal
import socket
import struct
import time

import numpy as np
import pytest

import service
import slow
import wire
from service import RawReader, eventually, request_bytes
from under_way import occupied

FORWARD = '/v1/attention/forward'


def leave(s, how):
    if how == 'rst':
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    s.close()


@pytest.mark.parametrize('count', [127, 128, 129, 256])
def test_requests_that_arrive_in_one_moment_are_all_answered(serve, count):
    """While the server is stopped (SIGSTOP), many requests arrive. When it goes on, one HTTP thread finds them all at
    once. libmicrohttpd takes 128 events at a time from the kernel. In an earlier version it waited for more events
    after it had got exactly 128."""
    server = serve('--http-threads', '1')
    get = b'GET /livez HTTP/1.1\r\nHost: x\r\n\r\n'
    crowd = [socket.create_connection(server.address, 10 * service.SLOWER) for _ in range(count)]
    for s in crowd:  # from then on the HTTP thread watches each of these connections
        s.sendall(get)
        assert s.recv(4096).startswith(b'HTTP/1.1 200')
    os.kill(server.process.pid, signal.SIGSTOP)
    for s in crowd:
        s.sendall(get)
    os.kill(server.process.pid, signal.SIGCONT)
    for s in crowd:
        assert s.recv(4096).startswith(b'HTTP/1.1 200')
        s.close()


def at_rest(server):
    """Waits until no request is in flight or queued, and no staging memory (memory of request bodies) is held."""
    def busy():
        m = server.metrics()
        m['attnd_inflight_requests{state="answering"}'] = max(0, m['attnd_inflight_requests{state="answering"}'] - 1)  # that asks
        return {n: v for n, v in m.items() if v and "limit" not in n and (n.startswith(('attnd_inflight', 'attnd_queue_')) or n == 'attnd_staging_bytes{kind="used"}')}
    assert eventually(lambda: not busy()), busy()
    assert server.post(FORWARD, wire.small_bytes()).status == 200


@pytest.fixture(scope='module')
def quiet():
    """One server for all tests of this file. It has one compute thread, so that a slow request holds the device."""
    with service.Server('--cpu-threads', '1', '--max-batch', '1', '--log-level', 'debug') as server:
        # work of 20 s, which must be given up when its client has left
        server.endless_body = slow.calibrated(server, 20)
        yield server


@pytest.mark.parametrize('how', ['fin', 'rst'])
@pytest.mark.parametrize('part', [1, 20, 60])
def test_in_the_head(quiet, how, part):
    s = quiet.raw()
    s.sendall(request_bytes(FORWARD, wire.small_bytes())[:part])
    leave(s, how)
    at_rest(quiet)


@pytest.mark.parametrize('how', ['fin', 'rst'])
def test_while_uploading(quiet, how):
    x = wire.tensor(np.zeros((1, 1000, 4, 64)), 'float16')
    body = json.dumps({'q': x, 'k': x, 'v': x}).encode()
    before = quiet.metric('attnd_cancelled_total')
    for part in (1, len(body) // 3, len(body) - 1):
        s = quiet.raw()
        s.sendall(request_bytes(FORWARD, None, headers=[f'Content-Length: {len(body)}']) + body[:part])
        assert eventually(lambda: quiet.inflight() > 0)
        leave(s, how)
        assert eventually(lambda: quiet.inflight() == 0)
    at_rest(quiet)
    assert eventually(lambda: quiet.metric('attnd_cancelled_total') - before == 3), quiet.metric('attnd_cancelled_total')


@pytest.mark.parametrize('how', ['fin', 'rst'])
def test_while_waiting_in_the_queue(quiet, how):
    """When the client of a waiting request leaves, the request's place in the queue is free at once, and its work must
    never start."""
    flops = quiet.metric('attnd_flops_total')
    cancelled = quiet.metric('attnd_cancelled_total')
    with occupied(quiet, quiet.endless_body, queued=1):
        waiting = []
        for _ in range(3):
            s = quiet.raw()
            s.sendall(request_bytes(FORWARD, quiet.endless_body))
            waiting.append(s)
        assert eventually(lambda: quiet.metric('attnd_queue_requests') == 4), quiet.metrics()
        for s in waiting:
            leave(s, how)
        assert eventually(lambda: quiet.metric('attnd_queue_requests') == 1), 'still in the queue'
        assert quiet.metric('attnd_inflight_requests', state='running') == 2, 'the queue was not looked at while the device was busy'
        assert eventually(lambda: quiet.metric('attnd_cancelled_total') - cancelled == 3)
    at_rest(quiet)
    assert eventually(lambda: quiet.metric('attnd_cancelled_total') - cancelled == 6)
    # 1e6 operations allow for the small request that at_rest() sends itself
    assert quiet.metric('attnd_flops_total') - flops < 1e6, 'work of a client that had gone was run'


@pytest.mark.parametrize('how', ['fin', 'rst'])
def test_while_it_computes(quiet, how):
    """When the client of a running request leaves, its work stops, and does not count as work done."""
    flops = quiet.metric('attnd_flops_total')
    cancelled = quiet.metric('attnd_cancelled_total')
    s = quiet.raw()
    s.sendall(request_bytes(FORWARD, quiet.endless_body))
    assert eventually(lambda: quiet.inflight() == 1)
    time.sleep(0.2)
    leave(s, how)
    at_rest(quiet)
    assert eventually(lambda: quiet.metric('attnd_cancelled_total') - cancelled == 1)
    # 1e6 operations allow for the small request that at_rest() sends itself
    assert quiet.metric('attnd_flops_total') - flops < 1e6


@pytest.mark.parametrize('how', ['fin', 'rst'])
def test_while_the_answer_is_sent(quiet, how):
    one = wire.tensor(np.ones((1, 1, 1, 1)), 'float16')
    q, v = wire.tensor(np.zeros((1, 40000, 1, 1)), 'float16'), wire.tensor(np.ones((1, 1, 1, 256)), 'float16')
    s = quiet.raw()
    s.sendall(request_bytes(FORWARD, json.dumps({'q': q, 'k': one, 'v': v, 'outputs': ['out']}).encode()))
    assert s.recv(1000).startswith(b'HTTP/1.1 200')  # the client reads the first part of an answer of 27 MB
    leave(s, how)
    at_rest(quiet)


def test_many_at_random_moments(quiet):
    rng = np.random.default_rng(5)
    sent = request_bytes(FORWARD, wire.small_bytes())
    files = quiet.descriptors()
    for i in range(300):
        s = quiet.raw()
        s.sendall(sent[:int(rng.integers(1, len(sent) + 1))])
        if i % 3 == 0:
            time.sleep(float(rng.random()) * 0.003)
        leave(s, 'rst' if i % 2 else 'fin')
    at_rest(quiet)
    assert eventually(lambda: quiet.descriptors() <= files + 3)


def test_a_neighbour_that_leaves_changes_nothing(quiet):
    want = quiet.post(FORWARD, wire.small_bytes()).json()['out']
    for _ in range(30):
        gone = quiet.raw()
        gone.sendall(request_bytes(FORWARD, wire.small_bytes()))
        with quiet.raw() as s:
            s.sendall(request_bytes(FORWARD, wire.small_bytes()))
            leave(gone, 'rst')
            assert RawReader(s).answer().json()['out'] == want
