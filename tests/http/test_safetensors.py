"""Safetensors in both directions. The tests cover files that the package `safetensors` makes and reads, the same bits
as in JSON, the effect of the Accept header, and refusals."""
import base64
import json
import struct

import numpy as np
import pytest

import service
import wire

MEDIA = 'application/x-safetensors'
FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'
NAMES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float8_e4m3fn': 'F8_E4M3', 'int32': 'I32', 'uint8': 'U8', 'int64': 'I64', 'bool': 'BOOL'}

package = service.optional('safetensors.numpy')
with_package = pytest.mark.skipif(package is None, reason='safetensors is not here (tests/setup.sh test fetches it from PyPI)')


def write(tensors, metadata=None, pad=True):
    """Writes a file of {name: JSON tensor} without the package, because some of its dtypes are unknown to NumPy."""
    header, data = {'__metadata__': metadata} if metadata is not None else {}, b''
    for name, t in tensors.items():
        raw = base64.b64decode(t['data'])
        header[name] = {'dtype': NAMES[t['dtype']], 'shape': t['shape'], 'data_offsets': [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(header).encode()
    header += b' ' * (-len(header) % 8 if pad else 0)
    return struct.pack('<Q', len(header)) + header + data


def read(body):
    """Reads a file as ({name: (dtype, shape, bytes)}, {name: value in the metadata})."""
    length, = struct.unpack('<Q', body[:8])
    assert length % 8 == 0
    header = json.loads(body[8:8 + length])
    data = body[8 + length:]
    facts = {name: json.loads(text) for name, text in header.pop('__metadata__').items()}
    assert max(t['data_offsets'][1] for t in header.values()) == len(data)
    return {name: (t['dtype'], t['shape'], data[slice(*t['data_offsets'])]) for name, t in header.items()}, facts


def split(members):
    """Splits a JSON problem into its tensors, and its options as strings."""
    tensors = {n: m for n, m in members.items() if isinstance(m, dict)}
    return tensors, {n: json.dumps(m) for n, m in members.items() if n not in tensors}


def ask(server, path, body, headers=()):
    return server.post(path, body, {'Content-Type': MEDIA, **dict(headers)})


def same(answer, want):
    """Checks that a safetensors answer has the same bits as a JSON answer, except for its times."""
    assert answer.status == 200 and answer.headers['content-type'] == MEDIA, answer
    assert int(answer.headers['content-length']) == len(answer.body)
    tensors, facts = read(answer.body)
    told = {n: m for n, m in want.items() if not (isinstance(m, dict) and 'data' in m)}
    assert set(tensors) == set(want) - set(told) and set(facts) == set(told)
    for name, (dtype, shape, data) in tensors.items():
        assert (dtype, shape, data) == (NAMES[want[name]['dtype']], want[name]['shape'], base64.b64decode(want[name]['data'])), name
    for name in set(facts) - {'timing_us', 'context'}:
        assert facts[name] == told[name], name
    assert set(facts['timing_us']) == {'queue', 'copy_in', 'compute', 'copy_out'}
    return facts


@pytest.mark.parametrize('back', [False, True], ids=['forward', 'backward'])
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16', 'float8_e4m3fn'])
@pytest.mark.parametrize('pad', [True, False], ids=['padded', 'misaligned'])
def test_the_same_bits_as_json(server, dtype, back, pad):
    if back and dtype == 'float8_e4m3fn':
        pytest.skip('forward alone')
    members, _ = wire.random_problem(np.random.default_rng(1), B=2, Sq=37, Sk=53, H=4, Hk=2, D=24, Dv=16, dtype=dtype, back=back, causal=True, scale=0.2, window=[9, -1])
    path = BACKWARD if back else FORWARD
    want = server.post(path, members).json()
    same(ask(server, path, write(*split(members), pad=pad)), want)
    same(server.post(path, json.dumps(members).encode(), {'Content-Type': 'application/json', 'Accept': MEDIA}), want)
    answer = ask(server, path, write(*split(members)), {'Accept': 'application/json'})
    assert answer.headers['content-type'] == 'application/json' and {n: answer.json()[n] for n in want if n != 'timing_us'} == {n: want[n] for n in want if n != 'timing_us'}


def test_every_kind_of_tensor_and_option(server):
    rng = np.random.default_rng(2)
    members, _ = wire.random_problem(rng, B=2, Sq=7, Sk=9, H=2, D=8, layout='bhsd', alignment='top_left', softcap=3, dropout_p=0.25, seed=2**64 - 1,
                                     out_dtype='float16', outputs=['lse', 'out'], timeout_ms=30000, causal=True)
    members.update(bias=wire.tensor(rng.standard_normal((2, 1, 7, 9))), alibi_slopes=wire.tensor([0.1, 0.2]), sinks=wire.tensor([0, 1]),
                   seqlens_k={'shape': [2], 'dtype': 'int64', 'data': base64.b64encode(np.array([9, 4]).tobytes()).decode()},
                   keep_mask={'shape': [1, 1, 7, 9], 'dtype': 'bool', 'data': base64.b64encode((rng.random((7, 9)) < .8).tobytes()).decode()})
    want = server.post(FORWARD, members).json()
    tensors, options = split(members)
    facts = same(ask(server, FORWARD, write(tensors, options)), want)
    assert facts['seed'] == 2**64 - 1
    same(ask(server, FORWARD, write(tensors, {**options, 'layout': 'bhsd', 'alignment': 'top_left', 'out_dtype': 'F16'})), want)  # bare words


def test_a_file_may_ask_for_float32_gradients(server):
    members, _ = wire.random_problem(np.random.default_rng(1), B=2, Sq=7, Sk=9, H=4, Hk=2, D=8, dtype='bfloat16', back=True, grad_dtype='float32')
    want = server.post(BACKWARD, members).json()
    assert {want[n]['dtype'] for n in ('dq', 'dk', 'dv')} == {'float32'}
    tensors, options = split(members)
    same(ask(server, BACKWARD, write(tensors, options)), want)
    # a word in the metadata, without the quotation marks of JSON
    same(ask(server, BACKWARD, write(tensors, {'grad_dtype': 'F32'})), want)


def test_packed_sequences(server):
    rng = np.random.default_rng(3)
    members = {n: wire.tensor(rng.standard_normal((12, 2, 8)), 'float16') for n in 'qkv'}
    members.update({n: wire.tensor([0, 5, 12], 'int32') for n in ('cu_seqlens_q', 'cu_seqlens_k')})
    same(ask(server, FORWARD, write(members)), server.post(FORWARD, members).json())


def test_verify_and_save(server):
    members, _ = wire.random_problem(np.random.default_rng(4), Sq=9, D=16, back=True)
    dout = members.pop('dout')
    saved = server.post(FORWARD, {**members, 'save': True}).json()
    want = server.post(BACKWARD, {'dout': dout, 'context': saved['context']}).json()
    answer = ask(server, FORWARD, write(members, {'save': 'true', 'verify': 'all'}))
    _, facts = read(answer.body)
    assert facts['verification']['rows'] == 18 and facts['verification']['max_abs'] < 1e-5
    same(ask(server, BACKWARD, write({'dout': dout}, {'context': facts['context']})), want)
    again = ask(server, BACKWARD, write({'dout': dout}, {'context': json.dumps(facts['context'])}))
    assert again.status == 404 and again.headers['content-type'] == 'application/problem+json'


@pytest.mark.parametrize('size', [1, 7, 64, 1000])
def test_pieces_of_any_size(server, size):
    members, _ = wire.random_problem(np.random.default_rng(5), Sq=5, D=8)
    body = write(members, {'causal': 'true'})
    with server.raw() as s:
        s.sendall(b'POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n' % (FORWARD.encode(), MEDIA.encode()))
        for i in range(0, len(body), size):
            piece = body[i:i + size]
            s.sendall(b'%x\r\n%s\r\n' % (len(piece), piece))
        s.sendall(b'0\r\n\r\n')
        got = b''.join(iter(lambda: s.recv(1 << 16), b''))
    head, _, answer = got.partition(b'\r\n\r\n')
    want = server.post(FORWARD, {**members, 'causal': True}).json()
    assert b' 200 ' in head.split(b'\r\n')[0] and read(answer)[0]['out'][2] == base64.b64decode(want['out']['data'])


def test_a_large_body_both_ways(server):
    """In a large request, another thread than the HTTP thread checks the body, and the answer is sent in blocks."""
    members, _ = wire.random_problem(np.random.default_rng(6), Sq=1000, Sk=40, H=32, Hk=1, D=128, dtype='float16')
    members['bias'] = wire.tensor(np.zeros((1, 32, 1000, 40)))
    tensors, options = split(members)
    body = write(tensors, options)
    assert len(body) > 12 << 20
    facts = same(ask(server, FORWARD, body), server.post(FORWARD, members).json())
    assert facts['backend']
    assert service.eventually(lambda: server.get('/v1/info').json()['staging']['used_bytes'] == 0, 10)


# ---- the package -----------------------------------------------------------------------------------------------------


@with_package
@pytest.mark.parametrize('dtype', [np.float32, np.float16])
def test_files_of_the_package(server, dtype):
    rng = np.random.default_rng(7)
    arrays = {n: rng.standard_normal((2, 33, 2, 17)).astype(dtype) for n in ('q', 'k', 'v', 'dout')}
    members = {n: wire.tensor(a, np.dtype(dtype).name) for n, a in arrays.items()}
    dout = arrays.pop('dout')
    for path, more, given in ((FORWARD, {}, arrays), (BACKWARD, {'dout': dout}, {**arrays, 'dout': dout})):
        want = server.post(path, {**{n: members[n] for n in given}, 'causal': True}).json()
        answer = ask(server, path, package.save(given, {'causal': 'true'}))
        same(answer, want)
        for name, array in package.load(answer.body).items():
            assert array.dtype == want[name]['dtype'] and list(array.shape) == want[name]['shape']
            assert array.tobytes() == base64.b64decode(want[name]['data'])
    # metadata that files of the Hugging Face libraries contain, and that is ignored
    described = {'format': 'pt', 'total_size': '1', 'modelspec.title': 'x', 'causal': 'true'}
    a = package.load(ask(server, FORWARD, package.save(arrays, described)).body)
    # a forward's out and lse are sent back unchanged
    sent_back = ask(server, BACKWARD, package.save({**arrays, **a, 'dout': dout}, {'causal': 'true'}))
    assert set(package.load(sent_back.body)) == {'dq', 'dk', 'dv'}


@with_package
def test_an_odd_answer_has_its_tensors_aligned(server):
    """An answer with float16 and float32 tensors has them in the order that the package safetensors uses. Each tensor
    is aligned as a memory map needs it."""
    ones = np.ones((1, 3, 1, 1), np.float16)
    body = ask(server, FORWARD, package.save({'q': ones, 'k': ones, 'v': ones})).body
    length, = struct.unpack('<Q', body[:8])
    assert json.loads(body[8:8 + length])['lse']['data_offsets'] == [0, 12]
    assert package.load(body)['out'].tolist() == ones.tolist()


def test_files_of_pytorch(server):
    torch, package = service.optional('torch'), service.optional('safetensors.torch')
    if torch is None or package is None:
        pytest.skip('PyTorch or safetensors is not here')
    tensors = {n: torch.randn(1, 20, 2, 16, dtype=torch.bfloat16) for n in 'qkv'}
    out = package.load(ask(server, FORWARD, package.save(tensors, {'causal': 'true'})).body)['out']
    want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2).float() for t in tensors.values()), is_causal=True).transpose(1, 2)
    assert out.dtype == torch.bfloat16 and (out.float() - want).abs().max() < 0.03


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(answer, status=400, code='invalid-request'):
    assert answer.status == status and answer.headers['content-type'] == 'application/problem+json', answer
    assert answer.json()['code'] == code
    return answer.json()['detail']


def test_a_refusal_is_a_problem_document_whatever_accept_says(server):
    members, _ = wire.random_problem(np.random.default_rng(8), Sq=3, D=4)
    for headers in ({}, {'Accept': MEDIA}, {'Accept': 'application/json'}):
        assert refused(ask(server, FORWARD, write(members, {'casual': 'true'}), headers)) == "unknown member 'casual', did you mean 'causal'?"
        short = {**members, 'k': wire.tensor(np.ones((1, 3, 2, 3)))}
        assert refused(ask(server, FORWARD, write(short), headers)).startswith('k: shape[3] is 3, must be 4')


def test_several_problems_go_and_come_in_json(server):
    body = json.dumps({'requests': [wire.small_body()]}).encode()
    json_type = {'Content-Type': 'application/json'}
    assert 'one problem' in refused(server.post(FORWARD, body, {**json_type, 'Accept': MEDIA}))
    assert server.post(FORWARD, body, json_type).status == 200
    assert 'one problem' in refused(ask(server, FORWARD, write({}, {'requests': body.decode()})))


def test_every_length_that_is_too_short_and_one_too_long(server):
    body = write(wire.small_body(), {'causal': 'true'})
    connection = server.connect()
    for length in range(len(body)):
        refused(connection.ask('POST', FORWARD, body[:length], {'Content-Type': MEDIA}))
    assert 'goes on behind' in refused(connection.ask('POST', FORWARD, body + b'x', {'Content-Type': MEDIA}))
    assert connection.ask('POST', FORWARD, body, {'Content-Type': MEDIA}).status == 200


def test_what_is_announced_takes_no_memory(serve):
    server = serve('--staging-bytes', 64 << 20)

    def header(end):
        text = json.dumps({'q': {'dtype': 'F16', 'shape': [1], 'data_offsets': [0, end]}}).encode()
        return struct.pack('<Q', len(text)) + text
    for end in (2**53, (64 << 20) + 1):
        assert f'at most {64 << 20} are taken' in refused(ask(server, FORWARD, header(end)), 413, 'too-large')
    refused(ask(server, FORWARD, struct.pack('<Q', 2**63)), 413, 'too-large')
    with server.raw() as s:
        s.sendall(b'POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n'
                  % (FORWARD.encode(), MEDIA.encode(), len(header(60 << 20)) + 100, header(60 << 20) + bytes(100)))
        assert service.eventually(lambda: server.get('/v1/info').json()['staging']['used_bytes'] > 0, 10)
        assert server.get('/v1/info').json()['staging']['used_bytes'] < 1 << 20
    assert service.eventually(lambda: server.get('/v1/info').json()['staging']['used_bytes'] == 0, 10)


def test_other_names_are_not_taken(server):
    body = write(wire.small_body())
    for name in ('application/safetensors', 'application/octet-stream'):
        assert MEDIA in refused(server.post(FORWARD, body, {'Content-Type': name}), 415, 'unsupported-media-type')
    assert 'application/json' in refused(ask(server, FORWARD, wire.small_bytes()))


@pytest.mark.parametrize('path', [FORWARD, BACKWARD])
def test_openapi_has_the_content_type_in_and_out(server, path):
    operation = server.get('/openapi.json').json()['paths'][path]['post']
    for content in operation['requestBody']['content'], operation['responses']['200']['content']:
        assert list(content) == ['application/json', MEDIA]
    assert server.get('/v1/info').json()['limits']['safetensors_header_bytes'] == 64 << 10
