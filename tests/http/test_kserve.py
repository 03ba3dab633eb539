"""KServe v2 as Triton's clients use it: the exact bytes that they send, and the unmodified Python client itself
(tritonclient[http] from PyPI, tests/requirements.txt), whose calls are in triton_calls.py."""
import json
import os
import re
import socket
import subprocess

import numpy as np
import pytest

import service
import wire

INFER = '/v2/models/attention_forward/infer'
PYTHON = os.path.abspath(os.path.join(service.BUILD, 'venv/bin/python'))
HAS_CLIENT = bool(service.FETCHED) and os.path.isdir(os.path.join(service.FETCHED, 'tritonclient/http'))
LENGTH = 'Inference-Header-Content-Length'

CHECKS = re.findall(r'\w+', re.search(r'^CHECKS = \[(.*)\]$', open(os.path.join(service.HERE, 'http/triton_calls.py')).read(), re.M)[1])


@pytest.mark.limit(120)
@pytest.mark.skipif(not HAS_CLIENT, reason='tritonclient is not here (tests/setup.sh test fetches it from PyPI)')
@pytest.mark.parametrize('check', CHECKS)
def test_the_stock_client(server, check):
    done = subprocess.run([PYTHON, os.path.join(service.HERE, 'http/triton_calls.py'), check, server.url], capture_output=True, text=True, timeout=110 * service.SLOWER)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- raw -------------------------------------------------------------------------------------------------------------

def talk(server, head, body=b'', pieces=None):
    """Sends these bytes unchanged, and reads one answer. Returns (status, headers, body)."""
    with socket.create_connection(server.address, 10) as s:
        s.sendall(head)
        for piece in pieces or [body]:
            s.sendall(piece)
        with s.makefile('rb') as f:
            status = int(f.readline().split()[1])
            headers = {}
            while (line := f.readline().strip()):
                name, value = line.decode().split(':', 1)
                headers[name.lower()] = value.strip()
            return status, headers, f.read(int(headers['content-length']))


def problem(rng=None, binary=True, **members):
    """Makes a forward of 2 queries over 3 keys. Returns it for KServe as (JSON, bytes that follow the JSON), and the
    same problem for /v1."""
    plain, _ = wire.random_problem(rng or np.random.default_rng(1), Sq=2, Sk=3, H=2, Hk=1, D=4, dtype='float16')
    inputs, tail = [], b''
    for name, t in plain.items():
        raw = wire.base64.b64decode(t['data'])
        one = {'name': name, 'shape': t['shape'], 'datatype': 'FP16'}
        if binary:
            one['parameters'] = {'binary_data_size': len(raw)}
            tail += raw
        else:
            one['data'] = np.frombuffer(raw, np.float16).astype(float).tolist()
        inputs.append(one)
    return json.dumps({'inputs': inputs, **members}).encode(), tail, plain


def test_what_the_python_client_sends(server):
    """These bytes were captured from tritonclient 2.x. It sends no content type and no Connection header, and has this
    order of headers."""
    text, tail, plain = problem(parameters={'binary_data_output': True}, id='1')
    head = (f'POST {INFER} HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Length: {len(text + tail)}\r\n{LENGTH}: {len(text)}\r\n\r\n').encode()
    want = server.post('/v1/attention/forward', plain).json()
    for pieces in ([text + tail], [text, tail], [(text + tail)[i:i + 1] for i in range(len(text + tail))]):
        status, headers, body = talk(server, head, pieces=pieces)
        assert status == 200 and headers['content-type'] == 'application/octet-stream', body
        answer = json.loads(body[:int(headers[LENGTH.lower()])])
        assert answer['id'] == '1' and answer['model_version'] == '1'
        rest = body[int(headers[LENGTH.lower()]):]
        for output in answer['outputs']:
            size = output['parameters']['binary_data_size']
            assert rest[:size] == wire.base64.b64decode(want[output['name']]['data']), output['name']
            rest = rest[size:]
        assert rest == b''


def test_what_the_cpp_client_sends(server):
    """Triton's C++ client always sends the length of the JSON, an empty id, and the content type of an HTML form."""
    text, _, plain = problem(binary=False, id='')
    head = (f'POST /v2/models/attention_forward/versions/1/infer HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n{LENGTH}: {len(text)}\r\n'
            f'Content-Length: {len(text)}\r\nContent-Type: application/x-www-form-urlencoded\r\n\r\n').encode()
    status, headers, body = talk(server, head, text)
    answer = json.loads(body)
    assert status == 200 and headers['content-type'] == 'application/json' and LENGTH.lower() not in headers
    assert 'id' not in answer
    want = server.post('/v1/attention/forward', {**plain, 'encoding': 'array'}).json()
    assert np.array(answer['outputs'][0]['data']).tolist() == np.array(want['out']['data']).flatten().tolist()


def test_a_post_without_a_body_and_without_a_length(server):
    status, headers, body = talk(server, b'POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n\r\n')
    assert status == 200 and {m['state'] for m in json.loads(body)} == {'READY'}
    status, headers, body = talk(server, b'POST /v2/systemsharedmemory/unregister HTTP/1.1\r\nHost: localhost\r\n\r\n')
    assert status == 501 and json.loads(body)['error'].startswith('shared memory is not offered here')
    status, headers, body = talk(server, f'POST {INFER} HTTP/1.1\r\nHost: localhost\r\n\r\n'.encode())
    assert status == 400 and json.loads(body)['error'] == 'the body is empty, expected a JSON object with inputs'


def test_the_index_has_those_that_are_ready_where_they_are_asked_for(server, serve):
    index = '/v2/repository/index'
    every = server.ask('POST', index).json()
    assert [m['name'] for m in every] == server.get('/v2/models').json()['models'] and {m['state'] for m in every} == {'READY'}
    for body in (b'{}', b'{"ready": true}', b'{"ready": false}', b' {"ready":true} '):
        assert server.ask('POST', index, body).json() == every
    # a draining server still answers a connection that is in the middle of a request
    draining = serve('--drain-ms', 5000)
    with draining.raw() as ready, draining.raw() as all_:
        for s, body in ((ready, b'{"ready": true}'), (all_, b'{"ready": false}')):
            s.sendall(b'POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (index.encode(), len(body), body[:-1]))
        assert service.eventually(lambda: draining.metric('attnd_connections') == 3)
        draining.process.terminate()
        assert service.eventually(lambda: 'draining' in draining.log())
        ready.sendall(b'}'), all_.sendall(b'}')
        assert service.RawReader(ready).answer().json() == []
        assert [m['state'] for m in service.RawReader(all_).answer().json()] == ['UNAVAILABLE'] * len(every)


@pytest.mark.parametrize('body, pointer, says', [
    (b'{"ready": 1}', '/ready', 'ready: is 1, must be true or false'),
    (b'{"raedy": true}', '/raedy', "unknown member 'raedy', did you mean 'ready'?"),
    (b'{"ready": true, "ready": true}', '/ready', "member 'ready' is given twice"),
    (b'[]', None, 'the body is an array, must be an object: {"ready": true}'),
    (b'{"ready"', None, 'not JSON: the body ends after 8 bytes, before the value is complete (was it cut off?)'),
])
def test_what_the_index_does_not_take(server, body, pointer, says):
    answer = server.ask('POST', '/v2/repository/index', body)
    assert answer.status == 400 and answer.headers['content-type'] == 'application/json'
    assert answer.json()['error'] == says and answer.json().get('pointer') == pointer


def test_in_chunks(server):
    text, tail, _ = problem()
    body = text + tail
    chunks = [b'%x\r\n%s\r\n' % (len(body[i:i + 17]), body[i:i + 17]) for i in range(0, len(body), 17)] + [b'0\r\n\r\n']
    head = f'POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{LENGTH}: {len(text)}\r\n\r\n'.encode()
    assert talk(server, head, pieces=chunks)[0] == 200


@pytest.mark.parametrize('said, status, says', [
    ('x', 400, LENGTH + " is 'x', must be how many bytes of the body are JSON"),
    ('-1', 400, LENGTH + " is '-1', must be how many bytes of the body are JSON"),
    ('9223372036854775808', 400, LENGTH + " is '9223372036854775808', must be how many bytes of the body are JSON"),
    ('2147483648', 400, LENGTH + ' is 2147483648, but the body has only {all} bytes'),
    ('0', 400, LENGTH + ' is 0, which says that the body is one tensor and no JSON; attention takes several'),
    ('7', 400, 'the JSON is not complete after 7 bytes (' + LENGTH + ')'),
    (None, 400, 'not JSON at byte {json}: expected nothing after the value, found .*'),
    ('{json}', 200, None),
])
def test_the_length_of_the_json(server, said, status, says):
    text, tail, _ = problem()
    sizes = {'json': len(text), 'all': len(text + tail)}
    answer = server.ask('POST', INFER, text + tail, {LENGTH: said.format(**sizes)} if said else {})
    assert answer.status == status, answer.body
    assert answer.headers['content-type'] == 'application/json'
    if says:
        assert re.fullmatch(re.escape(says.format(**sizes)).replace(r'\.\*', '.*'), answer.json()['error']), answer.body


def test_json_alone_whose_length_is_said(server):
    text, _, _ = problem(binary=False)
    assert server.ask('POST', INFER, text, {LENGTH: str(len(text))}).status == 200
    assert server.ask('POST', INFER, text, {'Content-Type': 'text/anything'}).status == 200


@pytest.mark.parametrize('method, path, status, says', [
    ('GET', '/v2/models/attention', 404, "there is no model 'attention'; there are attention_forward, .*"),
    ('GET', '/v2/models/attention_forwards', 404, "there is no model 'attention_forwards', did you mean 'attention_forward'\\?; .*"),
    ('GET', '/v2/models/attention_forward/versions/2/config', 404, "the model attention_forward has no version '2', only 1"),
    ('GET', '/v2/models/attention_forward/versions/11', 404, "the model attention_forward has no version '11', only 1"),
    ('GET', '/v2/nothing', 404, "there is nothing at '/v2/nothing'.*"),
    ('GET', INFER, 405, r'GET came, this path answers POST with tensors in the body, as JSON or binary \(application/json or application/octet-stream\)'),
    ('POST', '/v2/models/x/infer', 404, "there is no model 'x'; .*"),
    ('GET', '/v2/logging', 501, 'traces and logs are set when the server starts.*'),
])
def test_every_refusal_under_v2_is_json_with_error(server, method, path, status, says):
    answer = server.ask(method, path, b'{}' if method == 'POST' else None)
    assert answer.status == status and answer.headers['content-type'] == 'application/json'
    assert re.fullmatch(says, answer.json()['error']), answer.body


def test_faults_that_are_found_after_decoding_point_into_the_body(server):
    """If a fault is found after decoding, the error has a pointer into the KServe body. In an earlier version it was a
    pointer into a body for /v1, such as /dout/shape/1."""
    rng = np.random.default_rng(1)

    def infer(model, shapes, parameters=(), **more):
        inputs = [{'name': n, 'shape': s, 'datatype': 'FP32', 'data': rng.standard_normal(s).flatten().tolist()} for n, s in shapes.items()]
        return server.post(f'/v2/models/{model}/infer', {'inputs': inputs, 'parameters': dict(parameters), **more}).json()
    shape = [1, 3, 2, 4]
    context = infer('attention_forward', {n: shape for n in 'qkv'}, {'save': True})['parameters']['context']
    for shapes, parameters, pointer, says in (
            ({'dout': [1, 2, 2, 4]}, {'context': context}, '/inputs/0/shape/1', 'dout: shape[1] is 2, must be 3'),
            ({'dlse': [1, 2, 2], 'dout': shape}, {'context': context}, '/inputs/0/shape/2', 'dlse: shape[2] is 2, must be 3'),
            ({'dout': shape}, {'context': 'unknown'}, '/parameters/context', 'context: unknown, expired or already used')):
        answer = infer('attention_backward', shapes, parameters)
        assert answer['pointer'] == pointer and answer['error'].startswith(says), answer
    # this backward uses up the context (a saved forward), so no later backward can name it
    assert 'outputs' in infer('attention_backward', {'dout': shape}, {'context': context})
    answer = infer('attention_forward', {n: shape for n in 'qkv'}, {'verify': 1}, outputs=[{'name': 'lse'}])
    assert answer['pointer'] == '/parameters/verify', answer


@pytest.fixture(scope='module')
def impatient():
    with service.Server('--body-timeout-ms', 700, '--max-body-bytes', '1K') as server:
        yield server


ENDLESS = b'%x\r\n%s\r\n' % (6000, b' ' * 6000)


@pytest.mark.parametrize('path, media', [(INFER, 'application/json'), ('/v2', 'application/json'), ('/%762/models', 'application/json'),
                                         ('/v1/attention/forward', 'application/problem+json'), ('/v22', 'application/problem+json')])
@pytest.mark.parametrize('what, status, sent', [
    ('a head that is not complete', 408, 'POST {path} HTTP/1.1\r\nHost: x\r\n'),
    ('a body that is not complete', 408, 'POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{'),
    ('a length that is none', 400, 'POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1x\r\n\r\n'),
    ('two lengths', 400, 'POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n'),
    ('a query of many arguments', 414, 'GET {path}?' + '&'.join(['a'] * 101) + ' HTTP/1.1\r\nHost: x\r\n\r\n'),
    ('a body without end', 413, 'POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n' + ENDLESS.decode()),
])
def test_refusals_past_the_web_server_are_of_the_kind_that_the_path_has(impatient, path, media, what, status, sent):
    if '%' in path and 'body' not in what and what != 'two lengths':
        media = 'application/problem+json'  # the server decodes escapes in a path once the head is complete
    with impatient.raw() as s:
        s.sendall(sent.format(path=path).encode())
        answer = service.RawReader(s).answer()
    assert answer.status == status and answer.headers['content-type'] == media, answer
    assert answer.json()['error'] == answer.json()['detail']


def test_a_model_by_an_escaped_name(server):
    assert server.get('/v2/models/attention%5Fforward/ready').json() == {'name': 'attention_forward', 'ready': True}


def test_a_version_alone_is_a_version(server):
    for path in ('', '/ready', '/config', '/stats'):
        assert server.get('/v2/models/attention_forward/versions/1' + path).status == 200
    assert server.get('/v2').body == server.get('/v2/').body


# ---- Sequences -------------------------------------------------------------------------------------------------------

def step(server, sequence, positions=1, v_positions=None, headers=(), **parameters):
    """Sends one request of a sequence (a decode session of KServe), with one query and `positions` keys and values.
    v_positions gives v another length, which the server must refuse."""
    sizes = {'q': 1, 'k': positions, 'v': positions if v_positions is None else v_positions}
    inputs = [{'name': n, 'shape': [1, size, 1, 4], 'datatype': 'FP32', 'data': size * 4 * [0 if n == 'q' else 1]} for n, size in sizes.items() if size]
    return server.ask('POST', '/v2/models/attention_decode/infer', json.dumps({'inputs': inputs, 'parameters': {'sequence_id': sequence, **parameters}}).encode(), headers)


def lengths(answer):
    assert answer.status == 200, answer
    return json.loads(answer.json()['parameters']['lengths'])


def test_a_sequence_whose_start_failed_has_not_started(serve):
    """A request that starts a sequence may fail after its cache was made, or on the device. The sequence must then not
    exist: its next request would otherwise attend to an empty cache."""
    for script, bad in (('', {'v_positions': 2}), ('', {'positions': 40000}), ('', {'positions': 0}), ('', {'causal': 7}), ('launch.err=2@2', {})):
        server = serve('--cpu-threads', 1, '--kv-bytes', '1M', binary=service.FAKE, env={'ATTN_FAKE_SCRIPT': script})
        assert lengths(step(server, 7, 3, sequence_start=True)) == [3]
        assert step(server, 7, **bad, sequence_start=True).status in (400, 413, 503)
        answer = step(server, 7)
        assert answer.status == 404 and "sequence_id: '7' has not been started" in answer.json()['error'], answer
        assert server.get('/v1/caches').json()['count'] == 0 and server.metric('attnd_cache_pages', kind='all') == 0
        assert lengths(step(server, 7, 2, sequence_start=True)) == [2]
        # a failed request does not end the sequence; only a start begins a new one
        assert step(server, 7, v_positions=2).status == 400
        assert lengths(step(server, 7)) == [3]
        assert lengths(step(server, 7, sequence_end=True)) == [4]
        assert step(server, 7).status == 404 and server.get('/v1/caches').json()['count'] == 0
        assert lengths(step(server, 'one', 2, sequence_start=True, sequence_end=True)) == [2]
        assert server.get('/v1/caches').json()['count'] == 0


def test_the_name_of_a_sequence_may_have_128_bytes_as_triton_takes(server):
    before = server.get('/v1/caches').json()['count']
    for name in ('n' * 64, 'n' * 128, 'é' * 64, int('9' * 19)):
        assert lengths(step(server, name, 2, sequence_start=True)) == [2]
        assert lengths(step(server, name)) == [3]
        if isinstance(name, str):
            answer = step(server, name[:-1])
            assert answer.status == 404 and f"sequence_id: '{name[:-1]}' has not been started" in answer.json()['error'], answer
        assert lengths(step(server, name, sequence_end=True)) == [4]
    for name in ('n' * 129, 'é' * 65):
        answer = step(server, name, 2, sequence_start=True)
        assert answer.status == 400 and answer.json()['pointer'] == '/parameters/sequence_id', answer
        assert 'must be an integer from 0 on, or a string of at most 128 bytes' in answer.json()['error'], answer
    assert server.get('/v1/caches').json()['count'] == before


def test_without_a_sequence_there_is_none_to_start_or_to_end(server):
    """Outside a sequence, a request may name a cache in `caches`. sequence_start and sequence_end must be refused
    there: in an earlier version, sequence_end in such a request deleted the cache."""
    cache = server.post('/v1/caches', {'kv_heads': 1, 'head_dim': 4, 'dtype': 'float32'}).json()['id']
    for name in ('sequence_start', 'sequence_end'):
        for none in ({}, {'sequence_id': 0}, {'sequence_id': ''}):
            parameters = {'caches': json.dumps([cache]), name: True, **none}
            body = {'inputs': [{'name': n, 'shape': [1, 1, 1, 4], 'datatype': 'FP32', 'data': [1] * 4} for n in 'qkv'], 'parameters': parameters}
            answer = server.post('/v2/models/attention_decode/infer', body)
            assert answer.status == 400 and answer.json()['pointer'] == '/parameters/' + name and 'wants the sequence\'s sequence_id' in answer.json()['error'], answer
            assert server.post('/v2/models/attention_decode/infer', {**body, 'parameters': {**parameters, name: False}}).status == 200
    assert server.get(f'/v1/caches/{cache}').json()['length'] == 6
    server.ask('DELETE', f'/v1/caches/{cache}')


def test_what_is_wrong_with_a_sequence_is_said_of_its_tensors(server):
    def start(rows, *shape):
        inputs = [{'name': n, 'shape': [rows if n == 'q' else 1, 1, *shape], 'datatype': 'FP32', 'data': [1] * (rows if n == 'q' else 1) * int(np.prod(shape))} for n in 'qkv']
        return server.post('/v2/models/attention_decode/infer', {'inputs': inputs, 'parameters': {'sequence_id': 3, 'sequence_start': True}})
    for answer, pointer, says in ((start(1, 1, 1025), '/inputs/1/shape/3', 'head_dim: is 1025'), (start(1, 0, 4), '/inputs/1/shape/2', 'kv_heads: is 0'),
                                  (start(2, 1, 4), '/inputs/0/shape/0', 'q: shape[0] is 2, must be 1, as a sequence has one row')):
        assert answer.status == 400 and answer.json()['pointer'] == pointer and says in answer.json()['error'], answer


def test_a_sequence_is_its_tokens_alone(serve, tmp_path):
    """Two tokens may use the same name for a sequence. Neither token sees, continues or ends the other's sequence."""
    (tmp_path / 'tokens').write_text('alice\nbob\n')
    server = serve('--token-file', tmp_path / 'tokens', '--kv-bytes', '1M')
    alice, bob = {'Authorization': 'Bearer alice'}, {'Authorization': 'Bearer bob'}

    def ids(headers):
        return [c['id'] for c in server.get('/v1/caches', headers).json()['caches']]
    assert lengths(step(server, 7, 3, headers=alice, sequence_start=True)) == [3]
    for more in ({}, {'sequence_end': True}):
        answer = step(server, 7, headers=bob, **more)
        assert answer.status == 404 and "sequence_id: '7' has not been started" in answer.json()['error'], answer
    assert lengths(step(server, 7, 10, headers=bob, sequence_start=True)) == [10]
    assert lengths(step(server, 7, headers=alice)) == [4]
    (mine,), (theirs,) = ids(alice), ids(bob)
    assert mine != theirs and server.get(f'/v1/caches/{mine}', alice).json()['length'] == 4
    for id_, headers in ((mine, bob), (theirs, alice)):
        assert server.get(f'/v1/caches/{id_}', headers).status == server.ask('DELETE', f'/v1/caches/{id_}', headers=headers).status == 404
    assert lengths(step(server, 7, headers=bob, sequence_end=True)) == [11]
    assert lengths(step(server, 7, headers=alice)) == [5] and ids(bob) == []
    assert step(server, 7).status == 401


def test_what_perf_analyzer_reads(server):
    """Sends the requests of Triton's tool perf_analyzer in the tool's order. The tool reads some members of the answers
    without checking that they exist. The test checks all of these."""
    model = 'attention_backward_fp16'
    meta = server.get(f'/v2/models/{model}').json()
    config = server.get(f'/v2/models/{model}/config').json()
    assert 'statistics' in server.get('/v2').json()['extensions']
    assert isinstance(config['max_batch_size'], int) and 'sequence_batching' not in config
    assert {t['name'] for t in config['input']} <= {t['name'] for t in meta['inputs']} and {t['name'] for t in config['output']} <= {t['name'] for t in meta['outputs']}

    def stats():
        one, = server.get(f'/v2/models/{model}/stats').json()['model_stats']
        assert one['version'].isdigit() and one['inference_count'] >= 0 and one['execution_count'] >= 0
        for part in ('success', 'queue', 'compute_input', 'compute_infer', 'compute_output', 'cache_hit', 'cache_miss'):
            assert all(isinstance(one['inference_stats'][part][leaf], int) for leaf in ('count', 'ns')), part
        return one
    before = stats()
    sizes = {'q': [1, 4, 2, 8], 'k': [1, 4, 2, 8], 'v': [1, 4, 2, 8], 'dout': [1, 4, 2, 8]}
    rng = np.random.default_rng(5)
    # bodies of perf_analyzer: zeros, or random bytes, which contain NaN and infinities
    for data in (lambda n: bytes(n), lambda n: rng.bytes(n)):
        inputs, tail = [], b''
        for t in meta['inputs']:  # perf_analyzer sends all inputs and asks for all outputs of the metadata
            inputs.append({'name': t['name'], 'shape': sizes[t['name']], 'datatype': t['datatype'], 'parameters': {'binary_data_size': 128}})
            tail += data(128)
        text = json.dumps({'id': '', 'inputs': inputs, 'outputs': [{'name': t['name'], 'parameters': {'binary_data': True}} for t in meta['outputs']]}).encode()
        answer = server.ask('POST', f'/v2/models/{model}/infer', text + tail, {LENGTH: str(len(text))})
        assert answer.status == 200 and len(answer.body) == int(answer.headers[LENGTH.lower()]) + 3 * 128
    after = stats()
    assert after['inference_stats']['queue']['count'] == before['inference_stats']['queue']['count'] + 2
    assert after['inference_stats']['success']['ns'] > before['inference_stats']['success']['ns']


def test_a_tool_that_fills_all_inputs_starts_a_sequence(server):
    """The metadata must list q, k and v as inputs. In an earlier version they listed q alone, and clients that send
    only listed inputs could not start a sequence (a decode session), which needs k and v."""
    model = 'attention_decode_fp16'
    meta = server.get(f'/v2/models/{model}').json()
    assert [(t['name'], t.get('optional', False)) for t in meta['inputs']] == [('q', False), ('k', True), ('v', True)]
    config = server.get(f'/v2/models/{model}/config').json()
    assert [(t['name'], t.get('optional', False)) for t in config['input']] == [('q', False), ('k', True), ('v', True)]
    assert config['parameters']['optional_inputs']['string_value'] == 'alibi_slopes,keep_mask,sinks'
    schemas = server.get('/openapi.json').json()['components']['schemas']
    assert set(config) <= set(schemas['ModelConfig']['properties']) and set(meta['inputs'][1]) <= set(schemas['TensorMetadata']['properties'])
    for start, length in (True, 4), (False, 8):
        inputs = [{'name': t['name'], 'shape': [1, 4, 2, 8], 'datatype': t['datatype'], 'data': [0] * 64} for t in meta['inputs']]
        answer = server.post(f'/v2/models/{model}/infer', {'inputs': inputs, 'parameters': {'sequence_id': 5, 'sequence_start': start, 'sequence_end': not start}})
        assert answer.status == 200 and lengths(answer) == [length], answer


def test_the_smaller_time_limit_counts(serve):
    server = serve('--timeout-ms', 60000)
    members, _ = wire.random_problem(np.random.default_rng(1), Sq=2048, H=16, D=128, dtype='float16')
    inputs, tail = [], b''
    for name, t in members.items():
        raw = wire.base64.b64decode(t['data'])
        inputs.append({'name': name, 'shape': t['shape'], 'datatype': 'FP16', 'parameters': {'binary_data_size': len(raw)}})
        tail += raw
    for parameters in ({'timeout': 1000}, {'timeout': 3_000_000_000, 'timeout_ms': 1}):
        text = json.dumps({'inputs': inputs, 'parameters': parameters}).encode()
        answer = server.ask('POST', INFER, text + tail, {LENGTH: str(len(text))})
        assert answer.status == 504 and answer.json()['code'] == 'deadline-exceeded', answer.body[:300]


def test_requests_that_ran_together_are_one_execution(serve):
    """Triton's statistics have an entry for each batch size. They must count a batch as one execution in the entry for
    its number of requests."""
    server = serve('--batch-window-us', 200000, '--max-batch', 4)
    import threading
    members, _ = wire.random_problem(np.random.default_rng(1), Sq=64, H=8, D=64)
    text = json.dumps({'inputs': [{'name': n, 'shape': t['shape'], 'datatype': 'FP32', 'data': np.frombuffer(wire.base64.b64decode(t['data']), np.float32).tolist()}
                                  for n, t in members.items()], 'parameters': {'binary_data_output': True}}).encode()
    threads = [threading.Thread(target=lambda: server.connect().ask('POST', INFER, text)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    one, = server.get('/v2/models/attention_forward/stats').json()['model_stats']
    assert one['inference_count'] == 8 and 1 <= one['execution_count'] <= 8
    assert sum(b['compute_infer']['count'] for b in one['batch_stats']) == one['execution_count']
    assert sum(b['batch_size'] * b['compute_infer']['count'] for b in one['batch_stats']) == 8, one['batch_stats']


def test_a_token_is_wanted(serve, tmp_path):
    (tmp_path / 'tokens').write_text('secret-token-of-one\n')
    server = serve('--token-file', tmp_path / 'tokens')
    assert server.get('/v2/health/live').status == 200
    for path in ('/v2', '/v2/models/attention_forward', '/v2/models/stats'):
        answer = server.get(path)
        assert answer.status == 401 and answer.headers['content-type'] == 'application/json' and 'error' in answer.json()
    assert server.ask('POST', INFER, b'{}').status == 401
