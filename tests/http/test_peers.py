"""What the log says about clients: addresses, addresses that trusted proxies forward, names of tokens, why a request
was refused, and protocols that the port does not have. No text from a client may add a line to the log, or a pair of
name and value."""
import contextlib
import json
import re
import socket
import ssl
import subprocess

import pytest

import service
import wire
from service import RawReader, eventually, request_bytes

FORWARD = '/v1/attention/forward'
PAIR = re.compile(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "]*)')


def pairs(line):
    """Splits a line of the log into its event and its pairs. Checks that no name occurs twice, and that the line has
    nothing else."""
    head = re.match(r'^\S+Z (?:DEBUG|INFO|WARN|ERROR)(?: req=\S+)? (\w+)', line)
    rest = line[head.end():]
    found = PAIR.findall(rest)
    assert ''.join(f' {n}={v}' for n, v in found) == rest and len(dict(found)) == len(found), line
    return {'event': head[1], **{n: v[1:-1] if v.startswith('"') else v for n, v in found}}


def lines(server, event):
    return [p for p in (pairs(line) for line in server.log().splitlines() if f' {event} ' in line) if p['event'] == event]


def request_of(server, answer):
    """Returns the log line of the request that got this answer."""
    id_ = answer.headers['x-request-id']
    return eventually(lambda: next((pairs(line) for line in server.log().splitlines() if f' req={id_} request ' in line), None))


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / 'tokens'
    path.write_text('# two teams\ns3cret # team a\n0ther-s3cret\nth1rd # x" status=200 peer=9.9.9.9 token="y\n')
    return path


def bearer(token, **more):
    return {'Authorization': 'Bearer ' + token, **more}


def test_a_line_says_who_sent_it_with_which_token_and_why_it_was_refused(serve, tokens):
    server = serve('--token-file', tokens)
    server.page_headers = bearer('s3cret')
    good = server.post(FORWARD, wire.small_bytes(), bearer('s3cret'))
    line = request_of(server, good)
    assert (line['peer'], line['token'], line['status']) == ('127.0.0.1', 'team a', '200') and 'code' not in line and 'pointer' not in line, line
    body = wire.small_body()
    body['k'] = {**body['k'], 'dtype': 'int7'}
    line = request_of(server, server.post(FORWARD, body, bearer('0ther-s3cret')))
    assert (line['token'], line['code'], line['pointer']) == ('line 3', 'invalid-request', '/k/dtype'), line
    line = request_of(server, server.post(FORWARD, b'{}', bearer('wrong')))
    assert line['code'] == 'unauthorized' and 'token' not in line and line['peer'] == '127.0.0.1', line
    line = request_of(server, server.get('/nothing', bearer('s3cret')))
    assert line['code'] == 'not-found' and 'pointer' not in line, line
    for secret in ('s3cret', 'wrong', 'th1rd'):
        assert secret not in server.log().replace(str(tokens), '')


@pytest.mark.parametrize('sent', [b'GET /livez HTTX/1.1\r\nHost: a\r\n\r\n', b'GET /livez\r\n\r\n'])
def test_a_line_says_who_sent_a_request_whose_first_line_cannot_be_read(server, sent):
    with server.raw() as s:
        s.sendall(sent)
        answer = RawReader(s).answer('GET')
    assert answer.status == 400 and request_of(server, answer)['peer'] == '127.0.0.1', server.log()


@pytest.mark.parametrize('options, forwarded, peer', [
    ((), ['1.2.3.4'], '127.0.0.1'),
    (('--trusted-proxy', '127.0.0.1'), [], '127.0.0.1'),
    (('--trusted-proxy', '127.0.0.1'), ['6.6.6.6, 1.2.3.4'], '1.2.3.4'),
    (('--trusted-proxy', '127.0.0.1', '--trusted-proxy', '10.0.0.0/8'), ['6.6.6.6', '2001:DB8::0:1 , 10.0.0.7', '10.0.0.8'], '2001:db8::1'),
    (('--trusted-proxy', '127.0.0.2'), ['1.2.3.4'], '127.0.0.1'),
    (('--trusted-proxy', '127.0.0.0/8'), ['1.2.3.4" status=200, x'], '127.0.0.1'),
    (('--trusted-proxy', '127.0.0.0/8'), ['1.2.3.4'] * 3 + ['127.0.0.9'] * 9, '127.0.0.9')])
def test_behind_a_trusted_proxy_the_peer_is_the_last_untrusted_address(serve, options, forwarded, peer):
    server = serve(*options)
    with server.raw() as s:
        s.sendall(request_bytes('/v1/info', None, method='GET', headers=[f'X-Forwarded-For: {line}' for line in forwarded]))
        answer = RawReader(s).answer('GET')
    assert answer.status == 200 and request_of(server, answer)['peer'] == peer


def test_a_client_of_every_kind_of_socket_has_an_address(serve, tmp_path):
    path = tmp_path / 's'
    kinds = [('unix', f'unix:{path}')] + ([('::1', '[::1]:0')] if socket.has_ipv6 else [])
    server = serve(*(x for _, address in kinds for x in ('--listen', address)), '--trusted-proxy', 'unix', '--trusted-proxy', '::1')
    assert eventually(lambda: ' ready ' in server.log())
    text = server.log()
    for kind, address in kinds:
        if kind == 'unix':
            s = socket.socket(socket.AF_UNIX)
            s.connect(str(path))
        else:
            s = socket.create_connection(('::1', int(re.search(r'address=\[::1\]:(\d+)', text)[1])))
        with s:
            for header, peer in (([], kind), (['X-Forwarded-For: fd00::7'], 'fd00::7')):
                s.sendall(request_bytes('/v1/info', None, method='GET', headers=header))
                answer = RawReader(s).answer('GET')
                assert answer.status == 200 and request_of(server, answer)['peer'] == peer


@pytest.mark.parametrize('network', ['10.0.0.0/33', 'localhost', '10.0.0.1:80', '*', ''])
def test_what_is_no_network_is_no_trusted_proxy(network):
    run = subprocess.run([service.BINARY, '--trusted-proxy', network], capture_output=True, text=True, timeout=20 * service.SLOWER)
    assert run.returncode == 64 and run.stderr.startswith(f"attnd: --trusted-proxy: '{network}' is not an address, a network or unix"), run


EVIL = 'x" status=200 peer=9.9.9.9 token="y'


@pytest.mark.parametrize('form', ['text', 'json'])
def test_what_a_client_writes_is_one_value_of_one_line(serve, tokens, form):
    server = serve('--token-file', tokens, '--log-format', form, '--trusted-proxy', '127.0.0.1')
    server.page_headers = bearer('s3cret')
    evil = bearer('th1rd', **{'X-Forwarded-For': EVIL, 'traceparent': f'00-{"a" * 32}-{"b" * 16}-01'})
    path = '/' + ''.join(f'%{b:02x}' for b in (EVIL + '\n2026-01-01T00:00:00.000Z INFO req=1 request method=GET\x1b[2J\xff').encode('latin-1')) + '%ff' * 200
    member = EVIL + '\n\x1b\u2028' + '\x01' * 60
    asked = [server.get(path, evil), server.post(FORWARD, {**wire.small_body(), member: 1}, evil)]
    assert [a.status for a in asked] == [404, 400]
    assert '9.9.9.9' in tokens.read_text() and not any(line.startswith('2026-01-01') for line in server.log().splitlines())
    for answer in asked:
        id_ = answer.headers['x-request-id']
        line, = eventually(lambda: [line for line in server.log().splitlines() if id_ in line])
        found = json.loads(line) if form == 'json' else request_of(server, answer)
        assert str(found['status']) == str(answer.status) and found['peer'] == '127.0.0.1', line
        assert found.get('token', EVIL).replace('\\', '') == 'x" status=200 peer=9.9.9.9 token="y', line
        assert not re.search(r'[\x00-\x1f\x7f]', line) and found['code'] in ('not-found', 'invalid-request'), line
        if form == 'json':
            assert set(found) <= {'time', 'level', 'request_id', 'event', 'method', 'path', 'status', 'ms', 'bytes_in', 'bytes_out', 'peer', 'token', 'trace_id', 'span_id', 'code', 'pointer'}


def test_a_connection_that_is_refused_or_closed_for_another_is_named(serve):
    server = serve('--max-connections', '1')
    with contextlib.ExitStack() as clients:
        def asks(event, path, body=None, length=None):  # connections stay open until the end of the test
            s = clients.enter_context(server.raw())
            s.sendall(request_bytes(path, body, method='GET' if body is None else 'POST', headers=[f'Content-Length: {length}'] if length else []))
            s.settimeout(0.2)
            with contextlib.suppress(OSError):
                s.recv(1000)
            return lines(server, event)
        assert eventually(lambda: asks('made_room', '/livez'), every=0.1)
        # the first of these requests holds the only connection, so a later one is refused
        assert eventually(lambda: asks('refused', FORWARD, b'{', 100), every=0.1)
    assert all(line['peer'] == '127.0.0.1' for line in lines(server, 'made_room') + lines(server, 'refused'))


# ---- Other protocols -------------------------------------------------------------------------------------------------

PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes(9)


def hello(server):
    """Returns a TLS ClientHello, which the test sends to a port without TLS."""
    context = ssl._create_unverified_context()
    with socket.create_connection(('127.0.0.1', server.port), 10) as s, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(s)


def send(server, first, tls=False):
    with socket.create_connection(('127.0.0.1', server.port), 10) as s:
        s = ssl._create_unverified_context().wrap_socket(s) if tls else s
        s.sendall(first)
        try:
            s.recv(1000)
        except OSError:
            pass
        s.close()


def reasons(server):
    return [(line['reason'], line['peer'], line['connections']) for line in lines(server, 'wrong_protocol')]


TLS = 'a TLS client on a plain port: write http:// there, or start the server with --tls-cert and --tls-key'
PLAIN = 'plain HTTP on a TLS port: write https:// there'
HTTP2 = 'HTTP/2, which is not spoken here (nor gRPC, which needs it): use HTTP/1.1'


def test_another_protocol_on_a_plain_port_is_logged_once_a_minute_with_the_reason(serve):
    server = serve()
    for _ in range(20):
        hello(server)
        send(server, PREFACE)
    assert eventually(lambda: len(reasons(server)) == 2)
    assert sorted(reasons(server)) == [(HTTP2, '127.0.0.1', '1'), (TLS, '127.0.0.1', '1')]
    send(server, request_bytes('/livez', None, method='GET'))
    assert len(reasons(server)) == 2


def test_another_protocol_on_a_tls_port_is_logged_once_a_minute_with_the_reason(serve, tmp_path):
    cert, key = service.self_signed(tmp_path)
    server = serve('--tls-cert', cert, '--tls-key', key, tls=service.client_tls(cert))
    for _ in range(5):
        send(server, request_bytes('/livez', None, method='GET'))
        send(server, PREFACE, tls=True)
    assert eventually(lambda: len(reasons(server)) == 2)
    assert sorted(reasons(server)) == [(HTTP2, '127.0.0.1', '1'), (PLAIN, '127.0.0.1', '1')]
    send(server, request_bytes('/livez', None, method='GET'), tls=True)
    assert len(reasons(server)) == 2


def test_http2_without_tls_on_a_tls_port_is_called_that(serve, tmp_path):
    cert, key = service.self_signed(tmp_path)
    server = serve('--tls-cert', cert, '--tls-key', key, tls=service.client_tls(cert))
    send(server, PREFACE)
    assert eventually(lambda: reasons(server) == [(HTTP2, '127.0.0.1', '1')]), server.log()
