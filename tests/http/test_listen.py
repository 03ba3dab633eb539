"""Where the server listens: TCP, IPv6, unix sockets, several addresses, TLS, and a port for metrics only."""
import os
import re
import socket
import ssl
import stat
import subprocess
import time
import warnings

import pytest

import service
import wire
from service import Connection, free_port

FORWARD = '/v1/attention/forward'


def test_unix_socket(serve, tmp_path):
    path = str(tmp_path / 'attnd.sock')
    server = serve(listen=f'unix:{path}')
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    answer = server.post(FORWARD, wire.small_bytes())
    assert answer.status == 200
    server.stop()
    assert not os.path.exists(path), 'the socket file stays behind'


def test_unix_socket_left_behind_by_a_dead_server(serve, tmp_path):
    path = str(tmp_path / 'attnd.sock')
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    assert serve(listen=f'unix:{path}').get('/livez').status == 200


def test_unix_socket_in_use_is_not_stolen(serve, tmp_path):
    path = str(tmp_path / 'attnd.sock')
    first = serve(listen=f'unix:{path}')
    second = subprocess.run([service.BINARY, '--listen', f'unix:{path}'], capture_output=True, timeout=20 * service.SLOWER)
    assert second.returncode != 0 and b'in use' in second.stderr.lower(), second
    assert first.get('/livez').status == 200


def test_a_file_is_not_taken_for_a_socket(tmp_path):
    path = tmp_path / 'precious'
    path.write_text('data')
    run = subprocess.run([service.BINARY, '--listen', f'unix:{path}'], capture_output=True, timeout=20 * service.SLOWER)
    assert run.returncode != 0 and path.read_text() == 'data'


def has_ipv6():
    try:
        free_port(socket.AF_INET6)
        return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason='no IPv6 on this machine')
def test_ipv6(serve):
    server = serve(listen=f'[::1]:{free_port(socket.AF_INET6)}')
    assert server.post(FORWARD, wire.small_bytes()).status == 200


def test_several_at_once(serve, tmp_path):
    path, port = str(tmp_path / 'a.sock'), free_port()
    server = serve(listen=[f'127.0.0.1:{port}', f'unix:{path}'])
    want = server.post(FORWARD, wire.small_bytes()).json()['out']
    over_unix = Connection(path, 30 * service.SLOWER)
    assert over_unix.ask('POST', FORWARD, wire.small_bytes()).json()['out'] == want
    over_unix.close()


def test_a_port_in_use_is_one_clear_line(serve):
    first = serve()
    run = subprocess.run([service.BINARY, '--listen', f'127.0.0.1:{first.port}'], capture_output=True, timeout=20 * service.SLOWER)
    lines = run.stderr.decode().strip().splitlines()
    assert run.returncode not in (0, -6, -11) and any(str(first.port) in line and 'in use' in line.lower() for line in lines), run


def test_metrics_have_a_port_of_their_own(serve):
    port = free_port()
    server = serve('--metrics-listen', f'127.0.0.1:{port}')
    side = Connection(('127.0.0.1', port), 30 * service.SLOWER)
    assert b'attnd_build_info' in side.ask('GET', '/metrics').body
    assert side.ask('GET', '/livez').status == 200
    assert side.ask('GET', '/readyz').status == 200
    side.close()
    side = Connection(('127.0.0.1', port), 30 * service.SLOWER)
    assert side.ask('POST', FORWARD, wire.small_bytes()).status == 404
    side.close()
    assert server.post(FORWARD, wire.small_bytes()).status == 200


@pytest.mark.limit(180)
def test_more_connections_to_the_metrics_port_than_it_has_room_for_do_not_end_it(serve):
    """Opens and closes bursts of connections. A burst has more connections than the metrics port has room for. In an
    earlier version libmicrohttpd's own limit left a mutex locked for ever."""
    port = free_port()
    server = serve('--metrics-listen', f'127.0.0.1:{port}', '--log-level', 'error')

    def side(path):
        connection = Connection(('127.0.0.1', port), 5 * service.SLOWER)
        try:
            return connection.ask('GET', path).status
        except OSError:
            return None
        finally:
            connection.close()
    with service.Probe(server) as probe:
        for burst in range(12):
            crowd = []
            for i in range(700):
                s = socket.socket()
                s.settimeout(5 * service.SLOWER)
                try:
                    s.connect(('127.0.0.1', port))
                except OSError:
                    pass
                crowd.append(s)
                if burst % 3 == 1:
                    s.close()
                elif burst % 3 == 2 and i % 2:
                    s.close()
            for s in crowd:
                s.close()
        assert service.eventually(lambda: side('/livez') == 200, 10), 'the port is dead'
    probe.check()
    assert service.eventually(lambda: server.metric('attnd_connections') <= 2, 10)


def test_the_metrics_port_is_full_at_256_and_the_others_are_not(serve):
    port = free_port()
    server = serve('--metrics-listen', f'127.0.0.1:{port}', '--max-connections', '8')
    crowd = [socket.create_connection(('127.0.0.1', port)) for _ in range(256)]
    refused = Connection(('127.0.0.1', port), 10 * service.SLOWER)
    answer = refused.ask('GET', '/livez')
    assert answer.status == 503 and 'retry-after' in answer.headers, answer
    refused.close()
    assert server.get('/livez').status == 200
    for s in crowd:
        s.close()

    def side():
        again = Connection(('127.0.0.1', port), 10 * service.SLOWER)
        try:
            return again.ask('GET', '/livez').status
        finally:
            again.close()
    assert service.eventually(lambda: side() == 200)


@pytest.mark.parametrize('memory', ['NO_CONNECTION', 'NO_POOL'])
def test_a_connection_for_which_libmicrohttpd_has_no_memory_is_not_counted_for_ever(serve, tmp_path, memory):
    gate = tmp_path / 'gate'
    server = serve('--max-connections', '40', env=service.shimmed(**{memory: gate}))
    for round_ in range(3):
        gate.touch()
        for i in range(30):
            with server.raw() as s:
                s.sendall(b'GET /livez HTTP/1.1\r\nHost: x\r\n\r\n')
                assert service.RawReader(s).answer('GET') is None
        gate.unlink()
        assert service.eventually(lambda: server.metric('attnd_connections') == 1)
    assert server.metric('attnd_rejected_total', reason='connections') == 90
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < 10 * service.SLOWER, 'the drain waited for connections that are no more'


def test_two_free_ports_are_two_addresses(tmp_path):
    log = tmp_path / 'log'
    with open(log, 'wb') as f:
        process = subprocess.Popen([service.BINARY, '--listen', '127.0.0.1:0', '--metrics-listen', '127.0.0.1:0'], stderr=f)
    try:
        assert service.eventually(lambda: b' ready ' in log.read_bytes() or process.poll() is not None), log.read_bytes()
        assert process.poll() is None, log.read_bytes()
        ports = [int(line.rsplit(b':', 1)[1]) for line in log.read_bytes().splitlines() if b' listening ' in line]
        assert len(set(ports)) == 2, log.read_bytes()
        for port in ports:
            connection = Connection(('127.0.0.1', port), 30 * service.SLOWER)
            assert connection.ask('GET', '/livez').status == 200
            connection.close()
    finally:
        process.terminate()
        assert process.wait(30 * service.SLOWER) == 0


def test_the_option_whose_address_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        where = f'127.0.0.1:{taken.getsockname()[1]}'
        for option, other in (('--metrics-listen', '--listen'), ('--listen', '--metrics-listen')):
            ended = subprocess.run([service.BINARY, option, where, other, '127.0.0.1:0'], capture_output=True, text=True)
            assert ended.returncode == 69 and f'attnd: {option} {where}: Address already in use' in ended.stderr, ended


def test_tls(serve, tmp_path):
    cert, key = service.self_signed(str(tmp_path))
    server = serve('--tls-cert', cert, '--tls-key', key, tls=service.client_tls(cert))
    assert server.get('/livez').status == 200
    connection = server.connect()
    want = None
    for _ in range(3):
        answer = connection.ask('POST', FORWARD, wire.small_bytes())
        assert answer.status == 200
        want = want or answer.json()['out']
        assert answer.json()['out'] == want
    members, _ = wire.random_problem(__import__('numpy').random.default_rng(1), Sq=700, H=4, D=64)
    # this answer is larger than a TLS record, so it takes several
    assert connection.ask('POST', FORWARD, members).status == 200
    connection.close()
    with server.raw() as s:  # plain HTTP sent to the TLS port
        s.sendall(b'GET /livez HTTP/1.1\r\nHost: x\r\n\r\n')
        s.settimeout(20 * service.SLOWER)
        try:
            data = s.recv(100)
        except (ConnectionResetError, TimeoutError):
            data = b''
        assert not data.startswith(b'HTTP/1.1 200')
    assert server.get('/livez').status == 200


def test_tls_begins_with_1_2(serve, tmp_path):
    cert, key = service.self_signed(str(tmp_path))
    server = serve('--tls-cert', cert, '--tls-key', key, tls=service.client_tls(cert))
    for version, good in ((ssl.TLSVersion.TLSv1, False), (ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)):
        client = service.client_tls(cert)
        client.set_ciphers('ALL:@SECLEVEL=0')  # otherwise OpenSSL in the client would not offer the old versions of TLS
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)
            client.minimum_version = client.maximum_version = version
        with server.raw() as s:
            if good:
                assert client.wrap_socket(s, server_hostname='localhost').version() == version.name.replace('_', '.')
            else:
                with pytest.raises((ssl.SSLError, ConnectionResetError)) as refusal:
                    client.wrap_socket(s, server_hostname='localhost')
                # the error must come from the server, not from this client's own settings
                assert 'no protocols available' not in str(refusal.value).lower(), refusal.value
    assert server.get('/livez').status == 200


@pytest.mark.parametrize('key', ['rsa:2048', 'ec -pkeyopt ec_paramgen_curve:prime256v1', 'ed25519'])
def test_healthcheck_finds_tls_whatever_the_key(serve, tmp_path, key):
    cert, pem = str(tmp_path / 'cert.pem'), str(tmp_path / 'key.pem')
    subprocess.run(['openssl', 'req', '-x509', '-nodes', '-days', '2', '-subj', '/CN=localhost', '-out', cert, '-keyout', pem, '-newkey',
                    *key.split()], check=True, capture_output=True)
    server = serve('--tls-cert', cert, '--tls-key', pem, tls=service.client_tls(cert))
    environment = {**os.environ, 'ATTND_LISTEN': f'0.0.0.0:{server.port}', 'ATTND_TLS_CERT': cert}
    run = subprocess.run([service.BINARY, 'healthcheck'], env=environment, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and 'speaks TLS' in run.stdout, run


@pytest.mark.parametrize('options', [['--tls-cert'], ['--tls-key']])
def test_a_certificate_needs_its_key(tmp_path, options):
    cert, key = service.self_signed(str(tmp_path))
    run = subprocess.run([service.BINARY, options[0], cert if 'cert' in options[0] else key], capture_output=True, timeout=20 * service.SLOWER)
    assert run.returncode == 64 and b'--tls' in run.stderr, run


def test_a_broken_certificate_is_refused_at_the_start(tmp_path):
    bad = tmp_path / 'bad.pem'
    bad.write_text('nonsense')
    run = subprocess.run([service.BINARY, '--listen', f'127.0.0.1:{free_port()}', '--tls-cert', bad, '--tls-key', bad],
                         capture_output=True, timeout=20 * service.SLOWER)
    assert run.returncode > 0 and run.stderr, run


# ---- What is said at the start ---------------------------------------------------------------------------------------


def log_at_the_start(server):
    """Returns everything that the server has logged when it becomes ready."""
    assert service.eventually(lambda: ' ready ' in server.log()), server.log()
    return server.log()


def test_the_start_up_line_has_a_url_to_click(serve):
    server = serve()
    assert f' ready url={server.url}/ version=' in log_at_the_start(server)
    assert 'open_to_all' not in server.log()


@pytest.mark.parametrize('host', ['0.0.0.0', '[::]'])
def test_an_address_that_others_can_reach_without_a_token_is_warned_about(serve, host, tmp_path):
    port = free_port()
    try:
        server = serve(listen=[f'127.0.0.1:{free_port()}', f'{host}:{port}'])
    except AssertionError:
        pytest.skip('no IPv6 here') if host == '[::]' else pytest.fail('did not start')
    assert re.search(rf'WARN open_to_all address={re.escape(host)}:{port} .*--token-file', log_at_the_start(server)), server.log()
    assert server.log().count('open_to_all') == 1
    tokens = tmp_path / 'tokens'
    tokens.write_text('t\n')
    guarded = serve('--token-file', tokens, listen=[f'127.0.0.1:{free_port()}', f'{host}:{free_port()}'])
    assert 'open_to_all' not in log_at_the_start(guarded)


def test_the_url_of_every_address_is_one_of_this_machine(tmp_path):
    for listen, url in ((['0.0.0.0'], 'http://127.0.0.1'), (['unix', '127.0.0.1'], 'http://127.0.0.1'), (['unix'], None)):
        port = free_port()
        addresses = [f'unix:{tmp_path}/socket' if a == 'unix' else f'{a}:{port}' for a in listen]
        with service.Server(listen=addresses) as server:
            found = re.search(r' ready (url=(\S+) )?version=', log_at_the_start(server))
            assert found and found[2] == (f'{url}:{port}/' if url else None), server.log()
