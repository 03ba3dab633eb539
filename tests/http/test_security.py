"""Bearer tokens, and requests from other sites (CORS)."""
import gzip
import os
import signal

import pytest

import service
import wire
from service import eventually

FORWARD = '/v1/attention/forward'
PROBES = ['/livez', '/readyz', '/healthz', '/health', '/v2/health/live', '/v2/health/ready']


@pytest.fixture
def guarded(serve, tmp_path):
    tokens = tmp_path / 'tokens'
    tokens.write_text('first-token\nsecond-token-0123456789\n')
    tokens.chmod(0o600)
    return serve('--token-file', tokens)


def bearer(token):
    return {'Authorization': f'Bearer {token}'}


@pytest.mark.parametrize('garbage', [gzip.compress(b'first-token'), 'first-token\n'.encode('utf-16'), b'\x7fELF\2\1\1\0\0\0', b'first-token\n\xff\xfe\n', b'', bytes(300)],
                         ids=['gzip', 'utf-16', 'program', 'a_line', 'empty', 'zeros'])
def test_a_token_file_of_garbage_at_sighup_is_refused_and_the_old_stays(guarded, tmp_path, garbage):
    (tmp_path / 'tokens').write_bytes(garbage)
    os.kill(guarded.pid, signal.SIGHUP)
    assert eventually(lambda: 'reload_failed' in guarded.log()), guarded.log()
    assert guarded.get('/v1/info', bearer('first-token')).status == 200
    (tmp_path / 'tokens').write_text('third-token\n')
    os.kill(guarded.pid, signal.SIGHUP)
    assert eventually(lambda: guarded.get('/v1/info', bearer('third-token')).status == 200)
    assert guarded.get('/v1/info', bearer('first-token')).status == 401


@pytest.mark.parametrize('token', ['first-token', 'second-token-0123456789'])
def test_each_token_of_the_file_opens(guarded, token):
    assert guarded.post(FORWARD, wire.small_bytes(), bearer(token)).status == 200
    assert guarded.get('/v1/info', bearer(token)).status == 200


@pytest.mark.parametrize('headers', [
    {}, bearer(''), bearer('first-toke'), bearer('first-token1'), bearer('FIRST-TOKEN'), bearer('first-token second-token-0123456789'),
    {'Authorization': 'first-token'}, {'Authorization': 'Basic Zmlyc3QtdG9rZW46'}, {'Authorization': 'Bearer'}, bearer('x' * 5000)],
    ids=['none', 'empty', 'short', 'long', 'capitals', 'two', 'no_scheme', 'basic', 'scheme_alone', 'very_long'])
def test_nothing_else_does(guarded, headers):
    for method, path, body in (('POST', FORWARD, wire.small_bytes()), ('GET', '/v1/info', None), ('POST', FORWARD, b' ' * (3 << 20))):
        answer = guarded.ask(method, path, body, headers)
        assert answer.status == 401, answer
        assert answer.headers['www-authenticate'].startswith('Bearer') and answer.json()['code'] == 'unauthorized'


def test_the_scheme_is_any_case(guarded):
    assert guarded.post(FORWARD, wire.small_bytes(), {'Authorization': 'bearer first-token'}).status == 200


@pytest.mark.parametrize('path', PROBES)
def test_probes_need_none(guarded, path):
    assert guarded.get(path).status == 200


def test_tokens_are_not_logged(guarded):
    guarded.post(FORWARD, wire.small_bytes(), bearer('first-token'))
    guarded.post(FORWARD, wire.small_bytes(), bearer('wrong-and-secret'))
    assert 'first-token' not in guarded.log() and 'wrong-and-secret' not in guarded.log()


# ---- CORS ------------------------------------------------------------------------------------------------------------

PREFLIGHT = {'Access-Control-Request-Method': 'POST', 'Access-Control-Request-Headers': 'content-type, x-request-id'}


@pytest.mark.parametrize('kind', ['application/json', 'text/plain;charset=UTF-8', 'application/x-www-form-urlencoded'])
@pytest.mark.parametrize('origin', ['https://example.org', 'http://localhost.example.org', 'null', 'http://localhost:1', 'file://', 'x'])
def test_a_page_of_another_site_cannot_compute_here(server, origin, kind):
    """A page of another site can make a browser send text to any server, even to 127.0.0.1 on the browser's own
    machine. The browser does not ask the server first. The server must refuse such requests."""
    answer = server.ask('POST', FORWARD, wire.small_bytes(), {'Origin': origin, 'Content-Type': kind})
    assert answer.status == 403 and answer.json()['code'] == 'forbidden-origin', answer
    assert origin in answer.json()['detail'] and '--cors-origin' in answer.json()['detail']
    assert server.ask('POST', '/v1/attention/backward', b'{}', {'Origin': origin}).status == 403


def test_a_page_of_this_server_can(server):
    for host in ('localhost', f'127.0.0.1:{server.port}', 'attention.example.org'):
        answer = server.ask('POST', FORWARD, wire.small_bytes(), {'Origin': f'http://{host}', 'Host': host, 'Content-Type': 'text/plain'})
        assert answer.status == 200, answer


def test_reading_is_left_to_the_browser(server):
    answer = server.ask('GET', '/v1/info', headers={'Origin': 'https://example.org'})
    assert answer.status == 200 and not [h for h in answer.headers if h.startswith('access-control-')]


def test_off_by_default(server):
    answer = server.ask('POST', FORWARD, wire.small_bytes(), {'Origin': 'https://example.org'})
    assert answer.status == 403 and not [h for h in answer.headers if h.startswith('access-control-')]
    assert server.ask('OPTIONS', FORWARD, headers={'Origin': 'https://example.org', **PREFLIGHT}).status == 405


def test_one_origin(serve):
    server = serve('--cors-origin', 'https://example.org')
    here, there = {'Origin': 'https://example.org'}, {'Origin': 'https://example.com'}
    answer = server.ask('POST', FORWARD, wire.small_bytes(), here)
    assert answer.status == 200 and answer.headers['access-control-allow-origin'] == 'https://example.org'
    assert 'origin' in answer.headers['vary'].lower()
    exposed = answer.headers['access-control-expose-headers'].lower()
    assert all(h in exposed for h in ('x-request-id', 'retry-after', 'server-timing'))
    refused = server.ask('POST', FORWARD, wire.small_bytes(), there)
    assert refused.status == 403 and 'access-control-allow-origin' not in refused.headers
    preflight = server.ask('OPTIONS', FORWARD, headers={**here, **PREFLIGHT})
    assert preflight.status in (200, 204) and preflight.headers['access-control-allow-origin'] == 'https://example.org'
    assert 'POST' in preflight.headers['access-control-allow-methods']
    assert 'content-type' in preflight.headers['access-control-allow-headers'].lower()
    assert server.ask('POST', FORWARD, b'{', here).headers['access-control-allow-origin'] == 'https://example.org'  # errors too
    assert server.ask('POST', '/v1/nothing', b'{', here).headers['access-control-allow-origin'] == 'https://example.org'


def test_any_origin(serve):
    answer = serve('--cors-origin', '*').ask('POST', FORWARD, wire.small_bytes(), {'Origin': 'https://example.org'})
    assert answer.status == 200 and answer.headers['access-control-allow-origin'] == '*'


def test_any_origin_does_not_go_with_tokens(tmp_path):
    import subprocess
    tokens = tmp_path / 'tokens'
    tokens.write_text('t\n')
    run = subprocess.run([service.BINARY, '--cors-origin', '*', '--token-file', tokens], capture_output=True, timeout=20 * service.SLOWER)
    assert run.returncode == 64 and b'--cors-origin' in run.stderr, run
