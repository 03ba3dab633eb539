"""Every limit from both sides: body sizes (413), overload (503 with Retry-After), the queue, and connections. A client
that is refused must be able to read the answer."""
import http.client
import json
import os
import socket
import threading
import time

import numpy as np
import pytest

import service
import slow
import wire
from service import RawReader, eventually, request_bytes

FORWARD = '/v1/attention/forward'


def padded(size):
    """Makes a valid body of exactly `size` bytes."""
    body = wire.small_bytes()
    return body + b' ' * (size - len(body))


def test_a_body_at_the_limit_and_one_byte_more(serve):
    server = serve('--max-body-bytes', '64K')
    assert server.post(FORWARD, padded(65536)).status == 200
    answer = server.post(FORWARD, padded(65537))
    assert answer.status == 413, answer
    problem = answer.json()
    assert problem['code'] == 'too-large' and '65536' in problem['detail'] and '65537' in problem['detail'], problem
    # the server counts a refusal after it has sent the answer
    assert eventually(lambda: server.metric('attnd_rejected_total') == 1)


def test_a_chunked_body_over_the_limit(serve):
    server = serve('--max-body-bytes', '64K')
    body = padded(65537)
    with server.raw() as s:
        s.sendall(request_bytes(FORWARD, b'%x\r\n%s\r\n0\r\n\r\n' % (len(body), body), headers=['Transfer-Encoding: chunked']))
        assert RawReader(s).answer().status == 413
    began = time.monotonic()
    with server.raw() as s:  # without end
        s.sendall(request_bytes(FORWARD, None, headers=['Transfer-Encoding: chunked']))
        try:
            for _ in range(100):
                s.sendall(b'10000\r\n' + b' ' * 65536 + b'\r\n')
        except OSError:
            pass
        answer = RawReader(s).answer()
        assert answer is None or answer.status == 413, answer
    assert time.monotonic() - began < 8  # the server reads the rest of a refused body for at most LINGER_MS
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)
    assert server.post(FORWARD, padded(1000)).status == 200


@pytest.mark.parametrize('megabytes', [1, 4, 30])
def test_a_refusal_reaches_a_client_that_is_still_sending(serve, megabytes):
    """http.client sends the whole body before it reads. It would fail with a broken pipe if the server closed the
    connection with unread data."""
    server = serve('--max-body-bytes', '64M')
    for path, status in (('/v1/nothing', 404), ('/livez', 405), (FORWARD, 415)):
        headers = {'Content-Type': 'text/html'} if status == 415 else {}
        answer = server.ask('POST', path, b' ' * (megabytes << 20), headers)
        assert answer.status == status, answer


def test_a_syntax_error_reaches_a_client_that_is_still_sending(server):
    answer = server.post(FORWARD, b'{]' + b' ' * (20 << 20))
    assert answer.status == 400, answer


def test_past_the_limit_the_body_is_not_awaited(serve):
    server = serve('--max-body-bytes', '64K')
    with server.raw() as s:
        s.sendall(request_bytes(FORWARD, None, headers=[f'Content-Length: {1 << 40}']))
        reader = RawReader(s)
        assert reader.answer().status == 413
        assert reader.closed()


def test_expect_is_answered_413_before_the_body(serve):
    server = serve('--max-body-bytes', '64K')
    with server.raw() as s:
        s.sendall(request_bytes(FORWARD, None, headers=['Content-Length: 65537', 'Expect: 100-continue']))
        assert RawReader(s).answer().status == 413


def test_tensors_over_the_staging_memory(serve):
    server = serve('--staging-bytes', '4M', '--max-body-bytes', '4M')
    q = {'shape': [1, 3 << 20, 1, 1], 'dtype': 'float8_e4m3fn', 'data': ''}
    one = {'shape': [1, 1, 1, 1], 'dtype': 'float8_e4m3fn', 'data': 'OA=='}
    answer = server.forward(q={**q, 'data': 'A' * 3000000}, k=one, v=one)
    assert answer.status in (400, 413, 503), answer
    assert server.forward(**wire.small_body()).status == 200


def retry_after(answer):
    assert answer.status == 503, answer
    seconds = answer.headers['retry-after']
    assert seconds.isdigit() and 1 <= int(seconds) <= 300
    return int(seconds)


def test_the_queue_is_full(serve):
    server = serve('--queue-depth', 2, '--max-batch', 1, '--cpu-threads', 1)
    body = slow.calibrated(server, 1.5)
    answers = []

    def ask():
        answers.append(server.post(FORWARD, body))
    threads = [threading.Thread(target=ask) for _ in range(12)]
    for t in threads:
        t.start()
    assert eventually(lambda: any(a.status == 503 for a in list(answers)))
    assert server.get('/livez').status == 200  # /livez stays 200 whatever the load
    for t in threads:
        t.join()
    refused = [a for a in answers if a.status != 200]
    assert 1 <= len(refused) < 12
    for a in refused:
        retry_after(a)
        assert a.json()['code'] == 'queue-full', a
    assert len({a.json()['lse']['data'] for a in answers if a.status == 200}) == 1
    assert eventually(lambda: server.metric('attnd_rejected_total') == len(refused))
    assert eventually(lambda: server.metric('attnd_requests_total', status='503') == len(refused))
    assert server.post(FORWARD, wire.small_bytes()).status == 200


def test_staging_memory_is_short(serve):
    """Two bodies that arrive slowly hold all staging memory (memory of request bodies). A third body is refused with
    503, and is served after the first two are gone."""
    server = serve('--staging-bytes', '8M', '--max-body-bytes', '8M')
    size = 6 << 20
    holders = []
    try:
        for _ in range(2):
            s = server.raw()
            holders.append(s)
            head = b'{"q":{"shape":[1,4194304,1,1],"dtype":"float8_e4m3fn","data":"'
            s.sendall(request_bytes(FORWARD, None, headers=[f'Content-Length: {size}']) + head + b'A' * (4 << 20))
        assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 8 << 20)
        answer = server.post(FORWARD, padded(size))
        retry_after(answer)
    finally:
        for s in holders:
            s.close()
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)
    assert eventually(lambda: server.post(FORWARD, padded(size)).status == 200)


@pytest.fixture
def beside():
    """A connection to the metrics port (--metrics-listen), for a test that watches a server without free connections.
    Connections to this port are counted apart. beside.listen is the value of the option, and beside.metric() reads a
    metric."""
    page = service.Server()
    page.port = service.free_port()
    page.address = ('127.0.0.1', page.port)
    page.listen = f'127.0.0.1:{page.port}'
    return page


def uploading(page, server, count, headers=()):
    """Opens `count` connections that have sent their body except for the last byte. `page` is the connection that reads
    metrics."""
    request = request_bytes(FORWARD, wire.small_bytes(), headers=['Content-Type: application/json', *headers])
    held = []
    assert eventually(lambda: page.metric('attnd_connections') == 1), 'one that asked whether the server is up is still there'
    for _ in range(count):
        held.append(server.raw())
        held[-1].sendall(request[:-1])
    assert eventually(lambda: page.metric('attnd_inflight_requests', state='receiving') == count)
    return held


def finish(held):
    for s in held:
        s.sendall(wire.small_bytes()[-1:])
        assert RawReader(s).answer().status == 200
        s.close()


def is_cut(s):
    """Waits until the server has closed this connection, with or without an answer."""
    s.settimeout(10 * service.SLOWER)
    try:
        while s.recv(65536):
            pass
        return True
    except ConnectionResetError:
        return True
    except socket.timeout:
        return False


def test_the_connections_are_full(serve, beside):
    """If every connection has a request, the server must not close one of them to make room for a new connection. It
    must refuse the new connection, with a reason."""
    server = serve('--max-connections', 4, '--metrics-listen', beside.listen)
    held = uploading(beside, server, 4)
    with server.raw() as s:
        s.sendall(request_bytes('/livez', None, 'GET'))
        reader = RawReader(s)
        answer = reader.answer('GET')
        retry_after(answer)
        assert reader.closed()
    finish(held)
    assert eventually(lambda: server.get('/livez').status == 200)


def opened(server, headers=()):
    """Opens a connection that has finished one request and is now idle."""
    s = server.raw()
    s.sendall(request_bytes('/livez', None, 'GET', headers=list(headers)))
    assert RawReader(s).answer('GET').status == 200
    return s


def test_when_connections_are_full_the_longest_idle_one_makes_room(serve, beside):
    server = serve('--max-connections', 4, '--metrics-listen', beside.listen)
    busy = uploading(beside, server, 1)
    idle = []
    for _ in range(3):
        idle.append(opened(server))
        # By this time each connection has been idle for longer than CONNECTION_BETWEEN_MS. The first connection has
        # been idle for the longest time.
        time.sleep(0.2)
    one_more = opened(server)
    assert is_cut(idle[0])
    for s in idle[1:] + [one_more]:
        s.sendall(request_bytes('/livez', None, 'GET'))
        assert RawReader(s).answer('GET').status == 200
        s.close()
    finish(busy)
    assert beside.metric('attnd_connections_made_room_total') == 1


def test_who_never_showed_a_token_makes_room_for_who_has_one(serve, tmp_path, beside):
    """When the server has as many connections as it allows, it closes connections of clients that never sent a token.
    This makes room for clients with a token. The test opens a connection without a token in each state that can last:
    between two requests, with half a head, silent, and in the middle of a refused body."""
    (tmp_path / 'tokens').write_text('alice\nbob\n')
    server = serve('--max-connections', 5, '--token-file', tmp_path / 'tokens', '--metrics-listen', beside.listen)
    alice = 'Authorization: Bearer alice'
    known = [opened(server, [alice])]
    known[0].sendall(request_bytes('/v1/info', None, 'GET', headers=[alice]))
    assert RawReader(known[0]).answer('GET').status == 200
    time.sleep(0.2)
    half = server.raw()
    half.sendall(b'GET /livez HTTP/1.1\r\nX: ' + b'a' * 40000)
    strangers = [opened(server), half, server.raw(), server.raw()]
    strangers[3].sendall(request_bytes(FORWARD, wire.small_bytes(), headers=['Content-Type: application/json'])[:-1])
    # longer than CONNECTION_STRANGER_MS: after this time the server may close a connection without a token, although
    # the body of its refused request still arrives
    time.sleep(1.2)
    # There are six connections: the five above, and the one that reads the metric.
    assert eventually(lambda: beside.metric('attnd_connections') == 6)
    for _ in range(4):
        s = server.raw()
        known.append(s)
        s.sendall(request_bytes(FORWARD, wire.small_bytes(), headers=['Content-Type: application/json', alice]))
        assert RawReader(s).answer().status == 200
    assert beside.metric('attnd_connections_made_room_total') == 4
    for s in strangers:
        assert is_cut(s)
    for s in known:  # connections of clients with a token must still work
        s.sendall(request_bytes(FORWARD, wire.small_bytes(), headers=['Content-Type: application/json', alice]))
        assert RawReader(s).answer().status == 200
        s.close()


def test_the_memory_of_connections_is_told_and_counted(serve):
    server = serve('--max-connections', 100)
    limit = server.get('/v1/info').json()['limits']['connection_bytes']
    assert eventually(lambda: f' connection_bytes={limit} ' in server.log()) and limit == (100 + 64) * 192 << 10
    assert server.metric('attnd_connection_bytes', kind='limit') == limit
    held = uploading(server, server, 20)
    assert 20 * (192 << 10) <= server.metric('attnd_connection_bytes', kind='used') <= limit
    finish(held)
    # The connection that reads this metric also has a request, so the metric includes the memory of that connection.
    assert eventually(lambda: server.metric('attnd_connection_bytes', kind='used') <= 192 << 10)


def test_a_thousand_idle_connections(server):
    held = []
    try:
        for _ in range(1000):
            held.append(socket.create_connection(server.address))
        assert server.post(FORWARD, wire.small_bytes()).status == 200
        held[500].sendall(request_bytes(FORWARD, wire.small_bytes()))
        assert RawReader(held[500]).answer().status == 200
    finally:
        for s in held:
            s.close()
    assert eventually(lambda: server.metric('attnd_connections') < 10)


@pytest.mark.parametrize('count, status', [(1024, 200), (1025, 400)])
def test_problems_in_one_request(server, count, status):
    problem = wire.small_bytes()
    answer = server.post(FORWARD, b'{"requests":[' + b','.join([problem] * count) + b']}')
    assert answer.status in ((200,) if status == 200 else (400, 413)), answer
    if status == 200:
        assert len(answer.json()['responses']) == count


def test_limits_are_told(serve):
    server = serve('--max-body-bytes', '3M', '--queue-depth', 17, '--max-connections', 99, '--max-batch', 5, '--timeout-ms', 1234)
    limits = json.dumps(server.get('/v1/info').json())
    for value in ('3145728', '17', '99', '5', '1234'):
        assert value in limits


def test_memory_does_not_grow_with_every_storm(serve):
    """The server keeps memory for later requests, as much as the largest load needed. Memory may therefore grow with
    the first bursts of connections, but a leak would grow with every burst."""
    server = serve()
    big, bad = padded(2 << 20), b'{"q":' + b'[' * 100
    x = wire.tensor(np.zeros((1, 2000, 4, 64)), 'float16')
    tensors = json.dumps({'q': x, 'k': x, 'v': x, 'causal': True}).encode()

    def storm(rounds):
        for i in range(rounds):
            server.post(FORWARD, tensors)
            server.post(FORWARD, big)
            server.post(FORWARD, bad)
            with server.raw() as s:
                s.sendall(request_bytes(FORWARD, tensors)[:(i * 7919) % len(tensors)])
        assert eventually(lambda: server.inflight() == 0)
        return server.memory_kb()
    grown = [storm(10)]
    files = server.descriptors()
    while len(grown) < 8 and (len(grown) < 3 or grown[-1] - grown[-2] > 2048):
        grown.append(storm(25))
    assert eventually(lambda: server.descriptors() <= files + 2), 'descriptors leak'
    if service.SLOWER == 1:  # not under a sanitizer, which keeps freed memory
        assert grown[-1] - grown[-2] <= 2048, f'kB after each storm: {grown}'


def test_with_128_open_files_it_starts_with_fewer_connections_and_says_so(tmp_path):
    script = tmp_path / 'attnd'
    script.write_text(f'#!/bin/sh\nulimit -n 128\nexec {os.path.abspath(service.BINARY)} "$@"\n')
    script.chmod(0o755)
    with service.Server('--http-threads', 16, binary=str(script)) as server:
        assert eventually(lambda: ' ready ' in server.log())
        assert 'WARN few_open_files limit=128 connections=31 ' in server.log(), server.log()
        assert server.get('/v1/info').json()['limits']['max_connections'] == 31
        clients = [server.connect() for _ in range(31)]
        try:
            for client in clients:  # all clients send at the same time, and each is served
                assert client.ask('POST', FORWARD, wire.small_bytes()).status == 200
        finally:
            for client in clients:
                client.close()
        assert server.post(FORWARD, wire.small_bytes()).status == 200
    assert ' few_open_files ' not in log_of_a_start()


def log_of_a_start():
    with service.Server() as server:
        assert eventually(lambda: ' ready ' in server.log())
        return server.log()
