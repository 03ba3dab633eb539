"""Requests that the server refuses before it has received them completely. The clients send everything before they
read."""
import http.client
import ssl
import time
import urllib.error
import urllib.request

import pytest

import service
import wire
from service import RawReader, eventually, request_bytes

FORWARD = '/v1/attention/forward'
PIECE = b' ' * (1 << 16)  # white space before the JSON of a body
MEGABYTES = [8, 64]


def pieces(megabytes):
    return (PIECE for _ in range(megabytes * 16))


def by_urllib(server, path, body, headers, context=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, body, headers), timeout=60 * service.SLOWER, context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def by_http_client(server, path, body, headers, context=None):
    make = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = make('127.0.0.1', server.port, timeout=60 * service.SLOWER, **({'context': context} if context else {}))
    try:
        connection.request('POST', path, body, headers, encode_chunked=not isinstance(body, bytes))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


CLIENTS = {'urllib': by_urllib, 'http.client': by_http_client}


def body_of(megabytes, chunked):
    return (pieces(megabytes), {'Transfer-Encoding': 'chunked'}) if chunked else (PIECE * (megabytes * 16), {})


@pytest.mark.parametrize('chunked', [False, True], ids=['length', 'chunked'])
@pytest.mark.parametrize('megabytes', MEGABYTES)
@pytest.mark.parametrize('client', CLIENTS)
def test_a_client_that_sends_all_of_a_body_over_the_limit_before_it_reads_sees_413(serve, client, megabytes, chunked):
    server = serve('--max-body-bytes', '1M')
    for round_ in range(3):
        body, headers = body_of(megabytes, chunked)
        status, text = CLIENTS[client](server, FORWARD, body, {'Content-Type': 'application/json', **headers})
        assert status == 413 and b'--max-body-bytes' in text, text
    assert server.post(FORWARD, wire.small_bytes()).status == 200
    assert eventually(lambda: server.inflight() == 0)


def test_a_client_that_sends_all_first_sees_413_over_tls_too(serve, tmp_path):
    cert, key = service.self_signed(tmp_path)
    server = serve('--max-body-bytes', '1M', '--tls-cert', cert, '--tls-key', key, tls=service.client_tls(cert))
    for client in CLIENTS.values():
        for chunked in (False, True):
            body, headers = body_of(8, chunked)
            status, text = client(server, FORWARD, body, {'Content-Type': 'application/json', **headers}, ssl.create_default_context(cafile=cert))
            assert status == 413 and b'--max-body-bytes' in text, text


REFUSALS = {
    401: (FORWARD, {'Content-Type': 'application/json', 'Authorization': 'Bearer none'}),
    404: ('/v1/attention/none', {'Content-Type': 'application/json'}),
    405: ('/livez', {'Content-Type': 'application/json'}),
    415: (FORWARD, {'Content-Type': 'text/html', 'Authorization': 'Bearer secret'}),
    417: (FORWARD, {'Content-Type': 'application/json', 'Expect': 'nothing'}),
    # two Origin headers, of which urllib would send only one
    400: (FORWARD, {'Content-Type': 'application/json', 'Origin': 'http://127.0.0.1', 'origin': 'http://localhost'}),
}


@pytest.mark.parametrize('client, status', [(c, s) for c in CLIENTS for s in REFUSALS if (c, s) != ('urllib', 400)])
def test_a_client_that_sends_all_before_it_reads_sees_every_other_refusal(serve, tmp_path, client, status):
    (tmp_path / 'tokens').write_text('secret\n')
    server = serve('--token-file', tmp_path / 'tokens')
    server.page_headers = {'Authorization': 'Bearer secret'}
    path, headers = REFUSALS[status]
    for chunked in (False, True):
        body, more = body_of(8 if chunked else 64, chunked)
        assert CLIENTS[client](server, path, body, {**headers, **more})[0] == status
    assert eventually(lambda: server.inflight() == 0)


def test_a_client_that_is_one_too_many_sees_503_whatever_it_sends(serve):
    port = service.free_port()
    server = serve('--max-connections', 1, '--metrics-listen', f'127.0.0.1:{port}')

    def page():
        return urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics').read()
    # The only connection that is left is the one that reads the metrics page.
    assert eventually(lambda: b'\nattnd_connections 1\n' in page())
    upload = service.Upload(server, request_bytes(FORWARD, wire.small_bytes()))
    try:
        # A connection whose body is still arriving is not closed to make room for another.
        assert eventually(lambda: b'attnd_inflight_requests{state="receiving"} 1' in page())
        for client in CLIENTS.values():
            status, text = client(server, FORWARD, PIECE * 128, {'Content-Type': 'application/json'})
            assert status == 503 and b'too many connections' in text, text
    finally:
        assert upload.finish().status == 200


def sends(s, seconds, piece=PIECE, every=0.0):
    """Sends bytes for this many seconds, or until the server resets the connection. Returns (seconds, bytes sent)."""
    start, count = time.monotonic(), 0
    try:
        while time.monotonic() - start < seconds:
            s.sendall(piece)
            count += len(piece)
            time.sleep(every)
    except OSError:
        pass
    return time.monotonic() - start, count


def test_what_a_refused_client_sends_is_dropped_up_to_discard_bytes(serve):
    for chunked in (False, True):
        server = serve('--max-body-bytes', '1M', '--discard-bytes', '16M', '--discard-ms', 60000)
        before = server.descriptors()
        with server.raw() as s:
            s.sendall(request_bytes(FORWARD, None, headers=['Transfer-Encoding: chunked' if chunked else 'Content-Length: 10000000000']))
            piece = b'10000\r\n' + PIECE + b'\r\n' if chunked else PIECE
            took, count = sends(s, 30 * service.SLOWER, piece)
            assert took < 30 * service.SLOWER and 16 << 20 <= count, (took, count)
        assert eventually(lambda: server.descriptors() <= before + 4 and server.inflight() == 0)


def test_what_a_refused_client_sends_is_dropped_for_discard_ms(serve):
    for chunked in (False, True):
        server = serve('--max-body-bytes', '1K', '--discard-ms', 1000, '--body-stall-ms', 60000)
        before = server.descriptors()
        with server.raw() as s:
            s.sendall(request_bytes(FORWARD, None, headers=['Transfer-Encoding: chunked' if chunked else 'Content-Length: 10000000000']))
            s.sendall(b'400\r\n' + PIECE[:1024] + b'\r\n' if chunked else PIECE)
            took, count = sends(s, 30 * service.SLOWER, b'1\r\nx\r\n' if chunked else b'x', 0.05)
            assert 0.9 < took < 30 * service.SLOWER, took
            answer = RawReader(s).answer() if not chunked else None
            assert answer is None or answer.status == 413, answer
        assert eventually(lambda: server.descriptors() <= before + 4 and server.inflight() == 0)


def test_with_discard_bytes_0_nothing_is_waited_for(serve):
    server = serve('--max-body-bytes', '1M', '--discard-bytes', 0)
    before = server.descriptors()
    with server.raw() as s:
        s.sendall(request_bytes(FORWARD, None, headers=['Content-Length: 10000000000']))
        assert RawReader(s).answer().status == 413
        assert eventually(lambda: server.descriptors() <= before + 4)


@pytest.mark.limit(120)
def test_refused_clients_that_stay_hold_neither_a_thread_nor_a_connection_nor_more_than_so_many_sockets(serve):
    server = serve('--max-body-bytes', '1M', '--http-threads', 1)
    before = server.descriptors()
    clients = []
    try:
        with service.Probe(server) as probe:
            for _ in range(400):  # more connections than LINGER_MOST (256), the most that are closed slowly at a time
                clients.append(server.raw())
                clients[-1].sendall(request_bytes(FORWARD, None, headers=['Content-Length: 10000000000']) + PIECE)
            assert eventually(lambda: server.metric('attnd_connections') <= 3)
            assert before + 200 < server.descriptors() <= before + 256 + 8
            assert server.post(FORWARD, wire.small_bytes()).status == 200
        probe.check()
    finally:
        for s in clients:
            s.close()
    assert eventually(lambda: server.descriptors() <= before + 4)
