"""X-Request-Id, traceparent, Server-Timing, and the log lines that carry them."""
import gzip
import json
import re

import pytest

import wire
from service import RawReader, eventually, request_bytes

FORWARD = '/v1/attention/forward'
STAGES = ['recv', 'decode', 'queue', 'prepare', 'copy_in', 'launch', 'compute', 'copy_out', 'encode']


@pytest.mark.parametrize('given', ['a', 'job-17', 'A.b_c-9', 'x' * 128])
def test_a_request_id_comes_back_and_is_logged(server, given):
    answer = server.post(FORWARD, wire.small_bytes(), {'X-Request-Id': given})
    assert answer.headers['x-request-id'] == given
    assert eventually(lambda: given in server.log())


@pytest.mark.parametrize('given', [None, '', 'x' * 129, 'two words', 'semi;colon', 'quote"', 'slash/', '\xe9'])
def test_otherwise_one_is_made(server, given):
    headers = {} if given is None else {'X-Request-Id': given}
    made = [server.post(FORWARD, wire.small_bytes(), headers).headers['x-request-id'] for _ in range(3)]
    assert len(set(made)) == 3
    for id_ in made:
        assert re.fullmatch(r'[A-Za-z0-9._-]{1,128}', id_) and id_ != given


def test_every_answer_has_one(server):
    for method, path, body in (('GET', '/livez', None), ('GET', '/metrics', None), ('GET', '/nothing', None), ('PUT', FORWARD, b'x'), ('POST', FORWARD, b'{')):
        answer = server.ask(method, path, body, {'X-Request-Id': 'mine'})
        assert answer.headers['x-request-id'] == 'mine', (method, path)
        if answer.status >= 400:
            assert answer.json()['request_id'] == 'mine'


def test_ids_of_a_batch_are_in_its_errors(server):
    a = server.post(FORWARD, {'requests': [wire.small_body(scale='x')]}, {'X-Request-Id': 'envelope-1'})
    assert a.json()['responses'][0]['error']['request_id'] == 'envelope-1'


@pytest.mark.parametrize('method', ['GET\x01status=200', 'A\xffB', 'A"B'])
def test_a_method_that_is_no_token_is_refused_and_not_logged(server, method):
    with server.raw() as s:
        s.sendall(f'{method} /livez HTTP/1.1\r\nHost: x\r\n\r\n'.encode('latin-1'))
        answer = RawReader(s).answer()
    assert answer.status == 400 and answer.json()['code'] == 'invalid-framing', answer
    line = eventually(lambda: next((line for line in server.log().splitlines() if answer.headers['x-request-id'] in line), None))
    assert line and 'method=- ' in line and line.count('status=') == 1, line


def test_white_space_behind_a_value_is_none_of_it(serve, tmp_path):
    (tmp_path / 'tokens').write_text('secret\n')
    server = serve('--token-file', tmp_path / 'tokens')
    body = wire.small_bytes()

    def ask(body, *lines):
        with server.raw() as s:
            s.sendall(request_bytes(FORWARD, None, headers=[f'Content-Length: {len(body)}', *lines]) + body)
            return RawReader(s).answer()
    spaced = ['Authorization: Bearer secret \t', 'Content-Type: application/json ', 'Content-Encoding: gzip  ', 'X-Request-Timeout-Ms: 60000\t', 'X-Request-Id: spaced ']
    answer = ask(gzip.compress(body), *spaced)
    assert answer.status == 200 and answer.headers['x-request-id'] == 'spaced', answer
    # two header lines of the same name have the meaning of one line with both values
    answer = ask(body, 'Authorization: Bearer secret', 'Accept: text/html ', 'Accept: application/x-safetensors')
    assert answer.status == 200 and answer.headers['content-type'] == 'application/x-safetensors', answer
    # One header line may be as long as a whole head. Several lines of one name may have only 2048 bytes in all. White
    # space around their values changes neither limit.
    for end in ('', ' '):
        assert ask(body, 'Authorization: Bearer secret', 'Accept: ' + 3000 * 'x' + end).status == 200
        answer = ask(body, 'Authorization: Bearer secret', 'Accept: ' + 2000 * 'x' + end, 'Accept: ' + 100 * 'x' + end)
        assert answer.status == 400 and answer.json()['detail'] == 'Accept has several lines of more than 2048 bytes in all', answer
    assert ask(body, 'Authorization: Bearer secret', 'Expect: 100-continue ').status in (100, 200)


def test_server_timing_has_every_stage(server):
    timing = server.post(FORWARD, wire.small_bytes()).headers['server-timing']
    parts = dict(re.fullmatch(r'([a-z_]+);dur=([0-9.]+)', p.strip()).groups() for p in timing.split(','))
    assert list(parts) == STAGES
    assert all(0 <= float(v) < 60000 for v in parts.values())


def test_server_timing_is_in_milliseconds(server):
    import slow
    answer = server.post(FORWARD, slow.calibrated(server, 0.4))
    compute = float(re.search(r'compute;dur=([0-9.]+)', answer.headers['server-timing']).group(1))
    assert compute == pytest.approx(answer.json()['timing_us']['compute'] / 1000, rel=0.05)


TRACE, SPAN = '0af7651916cd43dd8448eb211c80319c', 'b7ad6b7169203331'


def test_traceparent_is_logged(server):
    server.post(FORWARD, wire.small_bytes(), {'traceparent': f'00-{TRACE}-{SPAN}-01', 'X-Request-Id': 'traced-1'})
    line = eventually(lambda: next((line for line in server.log().splitlines() if 'traced-1' in line and TRACE in line), None))
    assert line and SPAN in line, server.log()[-2000:]


@pytest.mark.parametrize('given', [f'00-{"0" * 32}-{SPAN}-01', f'00-{TRACE}-{"0" * 16}-01', f'00-{TRACE.upper()}-{SPAN}-01', f'00-{TRACE}-{SPAN}', 'ff' + f'-{TRACE}-{SPAN}-01',
                                   f'00-{TRACE[:-1]}-{SPAN}-01', f'00-{TRACE}-{SPAN}-01-more', 'nonsense'])
def test_a_bad_traceparent_is_ignored(server, given):
    mark = len(server.log_bytes())
    assert server.post(FORWARD, wire.small_bytes(), {'traceparent': given}).status == 200
    assert TRACE.encode() not in server.log_bytes()[mark:]


def test_one_line_an_event_in_text(serve):
    server = serve('--log-format', 'text')
    server.post(FORWARD, wire.small_bytes(), {'X-Request-Id': 'line-1'})
    server.post(FORWARD, b'{', {'X-Request-Id': 'line-2'})
    assert eventually(lambda: 'line-2' in server.log())
    one = [line for line in server.log().splitlines() if 'line-1' in line]
    assert len(one) == 1 and 'status=200' in one[0], server.log()
    two = [line for line in server.log().splitlines() if 'line-2' in line]
    assert len(two) == 1 and 'status=400' in two[0], server.log()


def test_one_object_an_event_in_json(serve):
    server = serve('--log-format', 'json', '--log-level', 'debug')
    server.post(FORWARD, wire.small_bytes(), {'X-Request-Id': 'line-1', 'traceparent': f'00-{TRACE}-{SPAN}-00'})
    with server.raw() as s:
        s.sendall(b'GET /quote"\\\x7f%0a HTTP/1.1\r\nHost: x\r\n\r\n')
        s.recv(1000)
    server.get('/' + 'long' * 500)
    assert eventually(lambda: server.log().count('"event":"request"') >= 4)
    lines = [json.loads(line) for line in server.log().splitlines()]
    (mine,) = [line for line in lines if line.get('request_id') == 'line-1' and str(line.get('status')) == '200']
    assert str(mine.get('trace_id')) == TRACE
    assert all(len(line) < 3000 for line in server.log().splitlines())


def test_what_a_client_sends_cannot_forge_a_line(serve):
    server = serve()
    server.get('/x%0astatus=200%20forged')
    server.get('/a b=c'.replace(' ', '%20'))
    with server.raw() as s:
        s.sendall(b'GET /x\x1b[31m HTTP/1.1\r\nHost: x\r\n\r\n')
        s.recv(1000)
    assert eventually(lambda: '404' in server.log() or '400' in server.log())
    assert not [line for line in server.log().splitlines() if line.startswith('status=')] and '\x1b' not in server.log()


def test_log_levels(serve):
    server = serve('--log-level', 'error')
    server.post(FORWARD, wire.small_bytes(), {'X-Request-Id': 'unseen'})
    assert 'unseen' not in server.log()


def test_p3_a_full_disk_does_not_stop_it():
    """Standard error is /dev/full, so every write of a log line fails."""
    import subprocess
    import service
    port = service.free_port()
    with open('/dev/full', 'w') as full:
        process = subprocess.Popen([service.BINARY, '--listen', f'127.0.0.1:{port}', '--log-level', 'debug'], stderr=full, stdout=full)
    server = service.Server()
    server.address, server.port, server.process = ('127.0.0.1', port), port, process
    try:
        def up():
            try:
                return server.get('/livez').status == 200
            except OSError:
                return False
        assert eventually(up)
        for _ in range(50):
            assert server.post(FORWARD, wire.small_bytes()).status == 200
        assert eventually(lambda: server.metric('attnd_log_lines_dropped_total') > 0)
    finally:
        server.stop()
