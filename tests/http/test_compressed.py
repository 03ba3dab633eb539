"""Compressed bodies (Content-Encoding: gzip, x-gzip, deflate) in every format have the same answers as the uncompressed
bodies. Other tests send malformed streams, and bodies that unpack to a thousand times their size. triton_calls.py has
the tests with tritonclient."""
import contextlib
import gzip
import json
import select
import struct
import time
import zlib

import numpy as np
import pytest

import service
import test_kserve
import test_safetensors
import wire
from service import RawReader, request_bytes

FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'
CODINGS = {'gzip': gzip.compress, 'x-gzip': gzip.compress, 'GZip': gzip.compress, 'deflate': zlib.compress}
BEYOND = 'the server\'s --max-body-bytes'


def bodies():
    """Returns (path, headers, body) of a request in each format."""
    members, _ = wire.random_problem(np.random.default_rng(2), B=2, Sq=40, Sk=50, H=4, Hk=2, D=32, dtype='float16', causal=True)
    text, tail, _ = test_kserve.problem(parameters={'binary_data_output': True})
    tensors, options = test_safetensors.split(members)
    return {'json': (FORWARD, {'Content-Type': 'application/json'}, json.dumps(members).encode()),
            'safetensors': (FORWARD, {'Content-Type': test_safetensors.MEDIA}, test_safetensors.write(tensors, options)),
            'kserve': (test_kserve.INFER, {test_kserve.LENGTH: str(len(text))}, text + tail)}


BODIES = bodies()


def numbers_of(kind, answer):
    """Returns everything in an answer except its times, for comparison."""
    assert answer.status == 200, answer
    if kind == 'json':
        return {name: t for name, t in answer.json().items() if name in ('out', 'lse')}
    if kind == 'safetensors':
        return test_safetensors.read(answer.body)[0]
    return answer.body[int(answer.headers[test_kserve.LENGTH.lower()]):]


@pytest.mark.parametrize('coding', CODINGS)
@pytest.mark.parametrize('kind', BODIES)
def test_a_compressed_body_has_the_answer_of_the_same_body(server, kind, coding):
    path, headers, body = BODIES[kind]
    want = numbers_of(kind, server.ask('POST', path, body, headers))
    answer = server.ask('POST', path, CODINGS[coding](body), {**headers, 'Content-Encoding': coding})
    assert numbers_of(kind, answer) == want
    assert 'content-encoding' not in answer.headers


def in_pieces(server, path, headers, body, size, chunked):
    """Sends the body in packets of `size` bytes, with pauses, so that the server receives every packet separately."""
    lines = [f'POST {path} HTTP/1.1', 'Host: x', *(f'{n}: {v}' for n, v in headers.items()),
             'Transfer-Encoding: chunked' if chunked else f'Content-Length: {len(body)}']
    with server.raw() as s:
        s.setsockopt(service.socket.IPPROTO_TCP, service.socket.TCP_NODELAY, 1)
        s.sendall('\r\n'.join(lines).encode() + b'\r\n\r\n')
        for i in range(0, len(body), size):
            piece = body[i:i + size]
            s.sendall(b'%x\r\n%s\r\n' % (len(piece), piece) if chunked else piece)
            time.sleep(0.001)
        if chunked:
            s.sendall(b'0\r\n\r\n')
        return service.RawReader(s).answer('POST')


@pytest.mark.parametrize('chunked', [False, True])
@pytest.mark.parametrize('kind', BODIES)
def test_it_may_come_in_pieces(server, kind, chunked):
    path, headers, body = BODIES[kind]
    want = numbers_of(kind, server.ask('POST', path, body, headers))
    packed = gzip.compress(body)
    for size in (len(packed) // 300 + 1, 1000):
        assert numbers_of(kind, in_pieces(server, path, {**headers, 'Content-Encoding': 'gzip'}, packed, size, chunked)) == want


def test_an_encoding_of_nothing_is_none(server):
    path, headers, body = BODIES['json']
    for said in ('identity', ''):
        assert server.ask('POST', path, body, {**headers, 'Content-Encoding': said}).status == 200
    answer = server.ask('POST', path, b'', {**headers, 'Content-Encoding': 'gzip'})
    assert answer.status == 400 and 'the body is empty' in answer.json()['detail']
    answer = server.ask('POST', path, gzip.compress(b''), {**headers, 'Content-Encoding': 'gzip'})
    assert answer.status == 400 and 'the body is empty' in answer.json()['detail']


GZIP, DEFLATE = gzip.compress(b'{"q": 1, "q": 2}', mtime=0), zlib.compress(b'{"q": 1}')


@pytest.mark.parametrize('coding, body, status, says', [
    ('gzip', GZIP[:-1], 400, f'the body ends inside its gzip stream, after {len(GZIP) - 1} bytes that unpack to 16 (was it cut off?)'),
    ('gzip', GZIP[:5], 400, 'the body ends inside its gzip stream, after 5 bytes that unpack to 0 (was it cut off?)'),
    ('deflate', DEFLATE[:-3], 400, f'the body ends inside its deflate stream, after {len(DEFLATE) - 3} bytes that unpack to 8 (was it cut off?)'),
    ('gzip', GZIP + b'x', 400, f'the body goes on behind byte {len(GZIP)}, where its gzip stream ends'),
    ('gzip', GZIP + GZIP, 400, f'the body goes on behind byte {len(GZIP)}, where its gzip stream ends; a second gzip member is not taken'),
    ('deflate', DEFLATE + DEFLATE, 400, f'the body goes on behind byte {len(DEFLATE)}, where its deflate stream ends'),
    ('gzip', GZIP[:-8] + b'\0\0\0\0' + GZIP[-4:], 400, 'the body is no sound gzip: behind 16 bytes that it unpacks to, the checksum at its end is of other bytes (was it changed on its way?)'),
    ('gzip', GZIP[:-4] + b'\0\0\0\0', 400, 'the body is no sound gzip: behind 16 bytes that it unpacks to, the length at its end is another one (was it changed on its way?)'),
    ('deflate', DEFLATE[:-4] + b'\0\0\0\0', 400, 'the body is no sound deflate: behind 8 bytes that it unpacks to, the checksum at its end is of other bytes (was it changed on its way?)'),
    ('gzip', GZIP[:10] + b'\xff' + GZIP[11:], 400, 'the body is no sound gzip: behind 0 bytes that it unpacks to, invalid block type'),
    ('gzip', b'{"q": 1}', 400, 'Content-Encoding is gzip, but the body does not begin with 1f 8b, as gzip does, it begins like JSON: was it compressed?'),
    ('gzip', DEFLATE, 400, "Content-Encoding is gzip, but the body does not begin with 1f 8b, as gzip does, it begins like zlib's format, which is called deflate"),
    ('deflate', GZIP, 400, "Content-Encoding is deflate, but the body does not begin like zlib's format (RFC 1950), which deflate means in HTTP, it begins like gzip"),
    ('deflate', DEFLATE[2:-4], 400, "Content-Encoding is deflate, but the body does not begin like zlib's format (RFC 1950), which deflate means in HTTP"),
    ('br', b'x', 415, "Content-Encoding is 'br', must be gzip or deflate; or send the body uncompressed, without it"),
    (', br,', b'x', 415, "Content-Encoding is ', br,', must be gzip or deflate; or send the body uncompressed, without it"),
    ('gzip, gzip', b'x', 415, "Content-Encoding is 'gzip, gzip', which names several, one is taken: must be gzip or deflate; or send the body uncompressed, without it"),
])
@pytest.mark.parametrize('path', [FORWARD, test_kserve.INFER])
def test_what_is_no_such_stream_is_refused_by_name(server, path, coding, body, status, says):
    answer = server.ask('POST', path, body, {'Content-Encoding': coding})
    assert answer.status == status, answer
    assert says in answer.json()['error'], answer.body
    assert (answer.headers.get('accept-encoding') == 'gzip, deflate') == (status == 415)


@pytest.mark.parametrize('coding', [', gzip,', ',,gzip', 'gzip ,', '\t, gzip'])
def test_empty_elements_of_content_encoding_name_nothing(server, coding):
    path, headers, body = BODIES['json']
    with server.raw() as s:
        packed = gzip.compress(body)
        s.sendall(request_bytes(path, packed, headers=[f'Content-Length: {len(packed)}', f'Content-Encoding: {coding}', 'Content-Type: application/json']))
        assert RawReader(s).answer().status == 200
    for nothing in (',', ', identity ,'):
        assert server.ask('POST', path, body, {**headers, 'Content-Encoding': nothing}).status == 200


def test_a_request_behind_a_broken_stream_is_served(server):
    path, headers, body = BODIES['json']
    with contextlib.closing(server.connect()) as c:
        for packed in (gzip.compress(body)[:-3], gzip.compress(body) + b'x', b'nothing'):
            assert c.ask('POST', path, packed, {**headers, 'Content-Encoding': 'gzip'}).status == 400
            assert c.ask('POST', path, gzip.compress(body), {**headers, 'Content-Encoding': 'gzip'}).status == 200


def test_the_length_of_the_json_counts_unpacked_bytes(server):
    """KServe's header with the length of the JSON counts the bytes before compression, as in Triton. Here that number
    is larger than the Content-Length."""
    path = test_kserve.INFER
    text, tail, _ = test_kserve.problem(parameters={'binary_data_output': True}, id='x' * 500)
    packed = gzip.compress(text + tail)
    assert len(packed) < len(text)
    assert server.ask('POST', path, packed, {test_kserve.LENGTH: str(len(text)), 'Content-Encoding': 'gzip'}).status == 200
    text, _, _ = test_kserve.problem(binary=False)
    answer = server.ask('POST', path, gzip.compress(text), {test_kserve.LENGTH: '5000', 'Content-Encoding': 'gzip'})
    assert answer.status == 400 and answer.json()['error'] == f'{test_kserve.LENGTH} is 5000, but the body has only {len(text)} bytes'


# ---- sizes -----------------------------------------------------------------------------------------------------------

def zeros(megabytes):
    """Makes a safetensors body whose q has this many megabytes of zeros; k and v are small."""
    rows = (megabytes << 20) // 64
    header = json.dumps({'q': {'dtype': 'F32', 'shape': [1, rows, 1, 16], 'data_offsets': [0, rows * 64]},
                         'k': {'dtype': 'F32', 'shape': [1, 1, 1, 16], 'data_offsets': [rows * 64, rows * 64 + 64]},
                         'v': {'dtype': 'F32', 'shape': [1, 1, 1, 1], 'data_offsets': [rows * 64 + 64, rows * 64 + 68]},
                         '__metadata__': {'outputs': '["lse"]'}}).encode()
    return struct.pack('<Q', len(header)) + header + bytes(rows * 64 + 68)


PACKED = {'Content-Type': test_safetensors.MEDIA, 'Content-Encoding': 'gzip'}


def test_what_a_body_unpacks_to_is_bounded(serve):
    server = serve('--max-body-bytes', '2M', '--staging-bytes', '64M')
    limit = 2 << 20
    body = zeros(2)
    over = f'the body unpacks to more than {limit} bytes, the limit ({BEYOND})'
    for packed, coding in ((gzip.compress(body), 'gzip'), (zlib.compress(body), 'deflate')):
        assert len(packed) < 8000
        answer = server.post(FORWARD, packed, {**PACKED, 'Content-Encoding': coding})
        assert answer.status == 413 and answer.json()['detail'] == over
    assert server.post(FORWARD, gzip.compress(zeros(1)), PACKED).status == 200
    # A body that unpacks to exactly the limit is accepted, and one byte more is refused.
    text = json.dumps(wire.small_body()).encode()
    for bytes_, status in ((limit, 200), (limit + 1, 413)):
        assert server.post(FORWARD, gzip.compress(text + b' ' * (bytes_ - len(text))), {'Content-Encoding': 'gzip'}).status == status
    assert server.metric('attnd_staging_bytes', kind='used') == 0


@pytest.mark.limit(120)
def test_a_bomb_is_refused_after_64_mib(serve):
    """A body may unpack to 1000 times its size up to 64 MiB, and to 256 times its size beyond. A bomb (a small body
    that unpacks to a huge one) is therefore refused after 64 MiB."""
    server = serve('--max-body-bytes', '1G', '--staging-bytes', '2G')
    assert server.post(FORWARD, gzip.compress(zeros(40), 1), PACKED).status == 200
    header = json.dumps({'q': {'dtype': 'F32', 'shape': [1, 300 << 14, 1, 16], 'data_offsets': [0, 300 << 20]}}).encode()
    answer = server.post(FORWARD, gzip.compress(struct.pack('<Q', len(header)) + header + bytes(300 << 20), 9), PACKED)
    assert answer.status == 413
    assert answer.json()['detail'] == 'the body unpacks to more than 256 times its bytes, and to more than 64 MiB; send it uncompressed'
    assert server.metric('attnd_staging_bytes', kind='used') == 0
    assert server.memory_kb('VmHWM') < (2 * 64 + 200) << 10


def test_memory_is_leased_for_what_was_unpacked(serve):
    """The server must lease memory for the bytes that it has unpacked. It must not lease the announced length of the
    body, nor the sizes in the file's header."""
    server = serve('--staging-bytes', '512M', '--max-body-bytes', '256M')
    packed = gzip.compress(zeros(100), 9)
    half = len(packed) // 2
    with server.raw() as s:
        lines = ['POST /v1/attention/forward HTTP/1.1', 'Host: x', f'Content-Length: {len(packed)}', *(f'{n}: {v}' for n, v in PACKED.items())]
        s.sendall('\r\n'.join(lines).encode() + b'\r\n\r\n' + packed[:200])
        used = lambda: server.metric('attnd_staging_bytes', kind='used')
        assert service.eventually(lambda: used() > 0)
        assert used() < 4 << 20
        s.sendall(packed[200:half])
        assert service.eventually(lambda: used() > 40 << 20)
        assert used() < 256 << 20
    assert service.eventually(lambda: used() == 0)


def test_one_thread_serves_others_while_it_unpacks(serve):
    """One packet may unpack to a thousand times its size. The HTTP thread must therefore unpack a limited part at a
    time, and serve other connections in between. In an earlier version another connection got at most two answers
    before the answer to this request."""
    server = serve('--http-threads', 1, '--max-body-bytes', '256M', '--staging-bytes', '2G')
    packed = bytearray(gzip.compress(zeros(30), 9))
    packed[-1] ^= 1  # makes the checksum wrong, so that the body is unpacked, but nothing is computed
    assert len(packed) < 32 << 10
    request = service.request_bytes(FORWARD, bytes(packed), headers=[f'{n}: {v}' for n, v in PACKED.items()])

    def served_meanwhile():
        count = 0
        with server.raw() as one, contextlib.closing(server.connect()) as other:
            other.ask('GET', '/livez')
            one.sendall(request)
            while not select.select([one], [], [], 0)[0]:
                other.ask('GET', '/livez')
                count += 1
            assert service.RawReader(one).answer('POST').status == 400
        return count
    assert service.eventually(lambda: served_meanwhile() > 8)


def test_turns_over_tls(serve, tmp_path):
    cert, key = service.self_signed(tmp_path)
    server = serve('--tls-cert', cert, '--tls-key', key, tls=service.client_tls(cert))
    with contextlib.closing(server.connect()) as c:
        for _ in range(3):
            answer = c.ask('POST', FORWARD, gzip.compress(zeros(8), 9), PACKED)
            assert answer.status == 200 and test_safetensors.read(answer.body)[0]['lse'][1] == [1, 1, (8 << 20) // 64]


@pytest.mark.parametrize('end', ['hang-up', 'stop'])
def test_an_end_between_two_turns(serve, end):
    """While the body is being unpacked, the client leaves, or the server is stopped without a drain. The server must
    give the memory back, and end with status 0."""
    server = serve('--http-threads', 2, '--max-body-bytes', '256M', '--staging-bytes', '2G', '--drain-ms', 1)
    packed = gzip.compress(zeros(60), 9)
    request = service.request_bytes(FORWARD, packed, headers=[f'{n}: {v}' for n, v in PACKED.items()])
    sockets = [server.raw() for _ in range(6)]
    for s in sockets:
        s.sendall(request)
    if end == 'stop':
        server.stop()  # stop() fails unless the server ends with status 0
    for s in sockets:
        s.close()
    if end == 'hang-up':
        assert service.eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0 and server.inflight() == 0)
        assert server.get('/readyz').status == 200


def test_a_path_that_takes_a_few_bytes_takes_them_uncompressed(server):
    body = gzip.compress(json.dumps({'kv_heads': 1, 'head_dim': 8, 'dtype': 'float32'}).encode())
    answer = server.ask('POST', '/v1/caches', body, {'Content-Encoding': 'gzip'})
    assert answer.status == 415 and answer.json()['detail'] == "Content-Encoding is 'gzip', this path takes its few bytes uncompressed"
    assert answer.headers['accept-encoding'] == 'identity'
