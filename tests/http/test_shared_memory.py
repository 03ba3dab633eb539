"""Triton's shared memory extension (--allow-shm). Some tests use Triton's unmodified client and its library
(triton_shared.py). Other tests send raw requests that no good client sends. They truncate, rewrite, unlink and
unregister regions while a request uses them. Their keys name something else, or their regions belong to other tokens,
or exceed limits. After each test the server must still serve, and hold no region and no memory."""
import ctypes
import fcntl
import json
import mmap
import os
import re
import signal
import subprocess
import threading
import uuid

import numpy as np
import pytest

import service
import under_way
import wire
from service import eventually
from test_kserve import HAS_CLIENT, INFER, PYTHON
from test_operations import find_schemathesis

CALLS = os.path.join(service.HERE, 'http/triton_shared.py')
CHECKS = re.findall(r'\w+', re.search(r'^CHECKS = \[(.*)\]$', open(CALLS).read(), re.M)[1])
SHM = '/dev/shm/'
ALLOW = ('--allow-shm', 'attn_')
AT_ONCE = 256 << 10  # REGIONS_AT_ONCE_BYTES

pytestmark = pytest.mark.skipif(not os.access(SHM, os.W_OK), reason='/dev/shm cannot be written here')


@pytest.fixture(scope='module')
def shm_server():
    with service.Server(*ALLOW, '--log-level', 'debug') as server:
        yield server


class Object:
    """An object of /dev/shm that a test made."""

    def __init__(self, size=0, data=b'', name=None):
        self.name = name or 'attn_' + uuid.uuid4().hex
        self.path = SHM + self.name
        with open(self.path, 'xb') as f:
            f.write(data)
            f.truncate(max(size, len(data)))

    def read(self, offset=0, count=-1):
        with open(self.path, 'rb') as f:
            f.seek(offset)
            return f.read(count)

    def write(self, data, offset=0):
        with open(self.path, 'r+b') as f:
            f.seek(offset)
            f.write(data)

    def truncate(self, size):
        os.truncate(self.path, size)

    @property
    def size(self):
        return os.stat(self.path).st_size

    def close(self):
        if os.path.exists(self.path):
            os.unlink(self.path)


@pytest.fixture
def shm():
    """shm(size, data) makes an object of /dev/shm, which is deleted after the test."""
    made = []

    def make(*args, **more):
        made.append(Object(*args, **more))
        return made[-1]
    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if 'shm_server' in request.fixturenames:
        server = request.getfixturevalue('shm_server')
        server.post('/v2/systemsharedmemory/unregister', b'')
        assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0 and server.inflight() == 0)


def register(server, name, key, size, offset=0, headers=()):
    return server.ask('POST', f'/v2/systemsharedmemory/region/{name}/register', json.dumps({'key': key, 'offset': offset, 'byte_size': size}).encode(), headers)


def test_parts_of_a_merge_lie_in_a_region_and_so_does_the_whole(shm_server, shm):
    rng = np.random.default_rng(2)
    parts = [(rng.standard_normal((1, 4, 2, 8)).astype(np.float32), rng.standard_normal((1, 2, 4)).astype(np.float32)) for _ in range(2)]
    want = shm_server.post('/v1/attention/merge', {'parts': [{'out': wire.tensor(out), 'lse': wire.tensor(lse)} for out, lse in parts]}).json()
    inputs, at = [], 0
    for p, part in enumerate(parts):
        for name, a in zip(('out', 'lse'), part):
            inputs.append({'name': f'parts.{p}.{name}', 'shape': a.shape, 'datatype': 'FP32', 'parameters': place('in', a.nbytes, at)})
            at += a.nbytes
    given, taken = shm(data=b''.join(a.tobytes() for part in parts for a in part)), shm(parts[0][0].nbytes)
    register(shm_server, 'in', given.name, at)
    register(shm_server, 'to', taken.name, taken.size)
    outputs = [{'name': 'out', 'parameters': place('to', taken.size)}]
    answer = shm_server.post('/v2/models/attention_merge/infer', {'inputs': inputs, 'outputs': outputs})
    assert answer.status == 200, answer
    assert taken.read() == wire.raw(wire.value(want['out']), 'float32')
    inputs.append({'name': 'dout', 'shape': [1, 4, 2, 8], 'datatype': 'FP32', 'parameters': place('in', parts[0][0].nbytes)})
    outputs.append({'name': 'parts.0.dout', 'parameters': place('to', taken.size)})
    refusal = shm_server.post('/v2/models/attention_merge/infer', {'inputs': inputs, 'outputs': outputs}).json()
    assert (refusal['pointer'], refusal['detail']) == ('/outputs/1/parameters', 'parts.0.dout: gradients of parts cannot go to shared memory')


def unregister(server, name='', headers=()):
    return server.ask('POST', '/v2/systemsharedmemory' + (f'/region/{name}' if name else '') + '/unregister', b'', headers)


def status(server, name='', headers=()):
    return server.ask('GET', '/v2/systemsharedmemory' + (f'/region/{name}' if name else '') + '/status', None, headers)


def place(region, size, offset=0):
    return {'shared_memory_region': region, 'shared_memory_byte_size': size, **({'shared_memory_offset': offset} if offset else {})}


def problem(S=4, H=2, D=8, names='qkv', seed=1):
    """Returns {name: float32 array} of these sizes, and the bytes of all arrays in this order."""
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal((1, S, H, D)).astype(np.float32) for n in names}
    return arrays, b''.join(a.tobytes() for a in arrays.values())


def body(arrays, region='in', shared=None, outputs=None, **members):
    """Makes a request whose inputs lie one after the other in a region of shared memory. Inputs that are not in
    `shared` are sent as numbers."""
    inputs, at = [], 0
    for name, a in arrays.items():
        one = {'name': name, 'shape': list(a.shape), 'datatype': {'f4': 'FP32', 'f2': 'FP16', 'i4': 'INT32'}[a.dtype.str[1:]]}
        if shared is None or name in shared:
            one['parameters'] = place(region, a.nbytes, at)
            at += a.nbytes
        else:
            one['data'] = a.ravel().tolist()
        inputs.append(one)
    made = {'inputs': inputs, 'parameters': {'binary_data_output': True}, **members}
    if outputs is not None:
        made['outputs'] = [{'name': n, 'parameters': p} for n, p in outputs.items()]
    return json.dumps(made).encode()


def infer(server, arrays, path=INFER, headers=(), **more):
    return server.ask('POST', path, body(arrays, **more), headers)


def by_json(server, arrays, op='forward', **members):
    answer = server.post(f'/v1/attention/{op}', {**{n: wire.tensor(a, 'float32') for n, a in arrays.items()}, **members}).json()
    return {n: wire.base64.b64decode(t['data']) for n, t in answer.items() if isinstance(t, dict) and 'data' in t}


def outputs_of(answer):
    """Returns {name: bytes} of an answer with binary outputs."""
    assert answer.status == 200, answer.body
    length = int(answer.headers['inference-header-content-length'])
    at, made = length, {}
    for output in json.loads(answer.body[:length])['outputs']:
        size = output['parameters']['binary_data_size']
        made[output['name']] = answer.body[at:at + size]
        at += size
    return made


def refused(answer, status, *says, pointer=None):
    assert answer.status == status and answer.headers['content-type'] == 'application/json', answer
    for part in says:
        assert part in answer.json()['error'], answer.body
    if pointer is not None:
        assert answer.json().get('pointer', '') == pointer, answer.body


def descriptors(server):
    """Returns the server's open descriptors of objects in /dev/shm, unlinked or not."""
    count = 0
    for fd in os.listdir(f'/proc/{server.pid}/fd'):
        try:
            count += os.readlink(f'/proc/{server.pid}/fd/{fd}').startswith(SHM)
        except FileNotFoundError:
            pass
    return count


# ---- the stock client ------------------------------------------------------------------------------------------------

@pytest.mark.limit(120)
@pytest.mark.skipif(not HAS_CLIENT, reason='tritonclient is not here (tests/setup.sh test fetches it from PyPI)')
@pytest.mark.parametrize('check', CHECKS)
def test_the_stock_client(shm_server, check):
    done = subprocess.run([PYTHON, CALLS, check, shm_server.url], capture_output=True, text=True, timeout=110 * service.SLOWER)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- S1: what may be registered --------------------------------------------------------------------------------------

def test_without_the_option_all_of_it_is_501_and_says_how_to_switch_it_on(server, shm):
    one = shm(64)
    for kind in ('system', 'cuda'):
        for method, path in (('GET', '/status'), ('GET', '/region/a/status'), ('POST', '/region/a/register'), ('POST', '/region/a/unregister'), ('POST', '/unregister')):
            answer = server.ask(method, f'/v2/{kind}sharedmemory{path}', json.dumps({'key': one.name, 'byte_size': 64}).encode() if method == 'POST' else None)
            refused(answer, 501, 'shared memory is not offered here', '--allow-shm PREFIX')
    arrays, _ = problem()
    refused(infer(server, arrays), 400, 'q: shared memory is not offered here', '--allow-shm', pointer='/inputs/0/parameters/shared_memory_region')
    refused(infer(server, arrays, shared=(), outputs={'out': place('a', 256)}), 400, 'out: shared memory is not offered here', pointer='/outputs/0/parameters/shared_memory_region')
    assert 'system_shared_memory' not in server.get('/v2').json()['extensions']
    assert '/v2/systemsharedmemory/status' not in server.get('/openapi.json').json()['paths']
    assert server.get('/v1/info').json()['limits']['shared_memory_regions'] == 0


@pytest.mark.parametrize('key, says', [
    ('/other', 'key: must begin with /attn_ (the server\'s --allow-shm)'),
    ('//attn_x', 'key: must begin with'),
    ('.attn_x', 'key: must begin with'),
    ('..', 'key: must begin with'),
    ('/dev/shm/attn_x', 'key: must begin with'),
    ('attn', 'key: must begin with'),
    ('/attn_/x', 'key: has a character'),
    ('attn_x/', 'key: has a character'),
    ('attn_/../x', 'key: has a character'),
    ('attn_..', 'two dots in a row'),
    ('attn_\u00e9', 'key: has a character'),
    ('attn_ x', 'key: has a character'),
    ('attn_\n', 'key: has a character'),
    ('attn_x\0', 'byte 20: \\u0000 is not accepted'),
    ('attn_' + 124 * 'x', 'must be a string of 1 to 128 bytes'),
    ('', 'must be a string of 1 to 128 bytes'),
    ('attn_' + 123 * 'x', 'there is no such object in the server\'s /dev/shm'),
])
def test_a_key_that_is_not_allowed_is_refused_with_a_fixed_text(shm_server, key, says):
    refused(register(shm_server, 'r', key, 64), 400, says)
    assert status(shm_server).json() == []


def test_whether_an_object_is_there_is_not_told_of_keys_that_are_not_allowed(shm_server, shm):
    there = shm(64, name='other_' + uuid.uuid4().hex)
    texts = {register(shm_server, 'r', key, 64).json()['error'] for key in (there.name, 'other_nothing')}
    assert len(texts) == 1


def test_only_a_regular_file_with_one_name_is_taken(shm_server, shm, tmp_path):
    name = 'attn_' + uuid.uuid4().hex
    path, one = SHM + name, shm(4096)

    def check(says):
        try:
            refused(register(shm_server, 'r', name, 64), 400, f"key: '{name}'", says, pointer='/key')
        finally:
            os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    os.symlink(one.path, path)
    check('symbolic link')
    os.symlink('/etc/passwd', path)
    check('symbolic link')
    os.mkdir(path)
    check('is a directory')
    os.mkfifo(path)
    check('is not a regular file')
    os.link(one.path, path)
    check('an object with a second name')
    assert register(shm_server, 'r', one.name, 64).status == 200


def test_an_object_that_its_mode_does_not_open_is_not_taken(shm_server, shm):
    one = shm(64)
    if os.geteuid() != 0:
        os.chmod(one.path, 0o400)
        refused(register(shm_server, 'r', one.name, 64), 400, 'its mode does not let the server read and write it')
        return
    # The test runs as root, who can open every object. The server must refuse an object of another user, unless its
    # mode lets everybody read and write it.
    os.chown(one.path, 12345, 12345)
    for mode, taken in ((0o600, False), (0o644, False), (0o660, False), (0o606, True), (0o666, True)):
        os.chmod(one.path, mode)
        answer = register(shm_server, f'r{mode}', one.name, 64)
        if taken:
            assert answer.status == 200, answer.body
        else:
            refused(answer, 400, 'belongs to user 12345', pointer='/key')


def test_a_lease_on_an_object_keeps_nobody_waiting(shm_server, shm):
    one = shm(64)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        with open(one.path, 'r+b') as f:
            fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            refused(register(shm_server, 'r', one.name, 64), 400, 'another process has a lease on it')
    finally:
        signal.signal(signal.SIGIO, before)
    assert register(shm_server, 'r', one.name, 64).status == 200


def test_two_prefixes_by_flags_and_by_the_variable(serve, shm):
    for server in (serve('--allow-shm', 'attn_', '--allow-shm', '/other.'), serve(env={'ATTND_ALLOW_SHM': 'attn_,other.'})):
        one, other = shm(64), shm(64, name='other.' + uuid.uuid4().hex)
        assert register(server, 'a', one.name, 64).status == 200 and register(server, 'b', '/' + other.name, 64).status == 200
        refused(register(server, 'c', 'third', 64), 400, 'key: must begin with /attn_ or /other.')


@pytest.mark.parametrize('value', ['', '/', '.x', 'a/b', 'a b', 33 * 'x'])
def test_a_prefix_that_is_none(value):
    run = subprocess.run([service.BINARY, '--allow-shm', value], capture_output=True, text=True, timeout=20 * service.SLOWER)
    assert run.returncode == 64 and f"--allow-shm: '{value}' is not the beginning of a key" in run.stderr


@pytest.mark.parametrize('text, says', [
    (b'', 'the body is empty, must be like {"key": "/name", "offset": 0, "byte_size": 4096}'),
    (b'[]', 'the body is an array'),
    (b'{"key": "attn_x"}', 'byte_size is missing'),
    (b'{"key": "attn_x", "byte_size": 0}', 'byte_size: is 0, must be a number of bytes: an integer from 1 to 2^53'),
    (b'{"key": "attn_x", "byte_size": 64, "offset": -1}', 'offset: is -1'),
    (b'{"key": "attn_x", "byte_size": 64, "size": 1}', "unknown member 'size'"),
    (b'{"key": "attn_x", "byte_size": 64} x', 'not JSON at byte'),
    (b'{"key": "attn_' + 70000 * b'x' + b'", "byte_size": 64}', None),
])
def test_a_register_that_makes_no_sense(shm_server, text, says):
    answer = shm_server.ask('POST', '/v2/systemsharedmemory/region/r/register', text)
    refused(answer, 400 if says else 413, says or 'the body has more than 65536 bytes')


def test_a_page_of_another_site_cannot_register(shm_server, shm):
    one = shm(64)
    for path in ('/region/r/register', '/unregister'):
        answer = shm_server.ask('POST', '/v2/systemsharedmemory' + path, json.dumps({'key': one.name, 'byte_size': 64}).encode(), {'Origin': 'https://elsewhere.example', 'Content-Type': 'text/plain'})
        assert answer.status == 403
    assert status(shm_server).json() == []


# ---- S2: sizes and offsets -------------------------------------------------------------------------------------------

def test_a_region_ends_where_its_object_does(shm_server, shm):
    one = shm(4096)
    for size, offset in ((4097, 0), (1, 4096), (4096, 1), (1, 2**53), (2**53, 2**53), (2**53, 0)):
        refused(register(shm_server, 'r', one.name, size, offset), 400, f"go past the end of '{one.name}', which has 4096 bytes")
    assert register(shm_server, 'r', one.name, 4095, 1).status == 200
    assert status(shm_server, 'r').json() == [{'name': 'r', 'key': one.name, 'offset': 1, 'byte_size': 4095}]


def test_a_tensor_ends_where_its_region_does(shm_server, shm):
    arrays, data = problem()
    one = shm(4096, data)
    size = arrays['q'].nbytes
    assert register(shm_server, 'r', one.name, 3 * size).status == 200
    want = by_json(shm_server, arrays)
    q = {'name': 'q', 'shape': [1, 4, 2, 8], 'datatype': 'FP32'}

    def ask(offset, size=size):
        made = json.loads(body(arrays, 'r'))
        made['inputs'][0] = {**q, 'parameters': {**place('r', size), 'shared_memory_offset': offset}}
        return shm_server.ask('POST', INFER, json.dumps(made).encode())
    assert outputs_of(ask(0)) == want
    for offset in (2 * size + 1, 3 * size, 2**53):
        refused(ask(offset), 400, 'q: shared_memory_offset', 'go past the end of the region')
    for bytes_, says in ((0, 'q: data has 0 bytes'), (size - 1, f'q: data has {size - 1} bytes'), (size + 4, f'q: data has {size + 4} bytes')):
        refused(ask(0, bytes_), 400, says, pointer='/inputs/0/parameters/shared_memory_byte_size')
    refused(ask(0, 3 * size + 1), 400, 'go past the end of the region', pointer='/inputs/0/parameters/shared_memory_byte_size')
    refused(ask(0, 2**53), 400, 'go past the end of the region')


def test_offsets_need_not_be_aligned(shm_server, shm):
    arrays, data = problem()
    want = by_json(shm_server, arrays)
    one = shm(0, b'xyz' + data + bytes(300))
    assert register(shm_server, 'r', one.name, one.size - 1, 1).status == 200
    made = json.loads(body(arrays, 'r', outputs={'out': place('r', 256, len(data) + 5), 'lse': {'binary_data': True}}))
    for i, one_input in enumerate(made['inputs']):
        one_input['parameters']['shared_memory_offset'] = 2 + 256 * i
    assert outputs_of_some(shm_server.ask('POST', INFER, json.dumps(made).encode())) == {'lse': want['lse']}
    assert one.read(len(data) + 6, 256) == want['out']


def outputs_of_some(answer):
    """Returns {name: bytes} of an answer. Some outputs went into shared memory, and are read there."""
    assert answer.status == 200, answer.body
    length = int(answer.headers['inference-header-content-length'])
    at, made = length, {}
    for output in json.loads(answer.body[:length])['outputs']:
        if 'parameters' in output:
            made[output['name']] = answer.body[at:at + output['parameters']['binary_data_size']]
            at += output['parameters']['binary_data_size']
    return made


def test_an_empty_tensor_has_no_bytes_in_shared_memory_either(shm_server, shm):
    one = shm(4096)
    assert register(shm_server, 'r', one.name, 64).status == 200
    arrays = {'q': np.zeros((1, 0, 1, 8), np.float32), 'k': np.ones((1, 1, 1, 8), np.float32), 'v': np.ones((1, 1, 1, 8), np.float32)}
    answer = infer(shm_server, arrays, region='r', outputs={'out': place('r', 0, 64), 'lse': place('r', 64)})
    assert answer.status == 200 and [o['shape'] for o in answer.json()['outputs']] == [[1, 0, 1, 8], [1, 1, 0]], answer.body
    assert one.read() == np.ones(16, np.float32).tobytes()[:0] + bytes(4096)


def test_outputs_that_do_not_fit_are_refused_before_anything_is_computed(shm_server, shm):
    arrays, data = problem()
    one = shm(4096)
    assert register(shm_server, 'r', one.name, 512).status == 200
    for outputs, says, pointer in (
            ({'out': place('r', 255)}, 'out: has 256 bytes, shared_memory_byte_size is 255', '/outputs/0/parameters/shared_memory_byte_size'),
            ({'lse': {}, 'out': place('r', 256, 257)}, 'out: shared_memory_offset 257 and shared_memory_byte_size 256 go past the end', '/outputs/1/parameters/shared_memory_byte_size'),
            ({'out': place('r', 256), 'lse': place('r', 32, 255)}, "lse: would be written over out, in the region 'r'", '/outputs/1/parameters/shared_memory_offset')):
        refused(infer(shm_server, arrays, shared=(), outputs=outputs), 400, says, pointer=pointer)
    assert register(shm_server, 'again', one.name, 512).status == 200  # the same memory registered under a second name
    refused(infer(shm_server, arrays, shared=(), outputs={'out': place('r', 256), 'lse': place('again', 32, 255)}), 400, 'lse: would be written over out',
            pointer='/outputs/1/parameters/shared_memory_offset')
    refused(infer(shm_server, arrays, shared=(), outputs={'out': place('r', 0)}), 400, 'out: has 256 bytes')
    assert one.read() == bytes(4096)
    # memory behind the output must stay unchanged
    assert infer(shm_server, arrays, shared=(), outputs={'out': place('r', 512), 'lse': {}}).status == 200
    assert one.read() == by_json(shm_server, arrays)['out'] + bytes(4096 - 256)


def test_what_a_request_names_in_shared_memory_counts_as_its_body(serve, shm):
    server = serve(*ALLOW, '--max-body-bytes', '1M')
    arrays, data = problem(S=2048)
    one = shm(0, data)
    assert len(data) > 1 << 18 and register(server, 'in', one.name, one.size).status == 200
    assert infer(server, {'q': arrays['q'], 'k': arrays['k'], 'v': arrays['v']}, parameters={}, outputs={'lse': {'binary_data': True}}).status == 200
    big = shm(1 << 30)
    assert register(server, 'big', big.name, big.size).status == 200
    made = {'inputs': [{'name': 'q', 'shape': [1, 1 << 20, 1, 256], 'datatype': 'FP32', 'parameters': place('big', 1 << 30)}]}
    refused(server.ask('POST', INFER, json.dumps(made).encode()), 413, 'with those in shared memory', '--max-body-bytes', pointer='/inputs')


# ---- S3: objects that become shorter ---------------------------------------------------------------------------------

@pytest.mark.parametrize('S', [4, 8192])  # tensors of 4 rows are read at once, those of 8192 rows in pieces
def test_an_input_that_was_truncated_is_refused(shm_server, shm, S):
    arrays, data = problem(S=S)
    one = shm(0, data)
    assert register(shm_server, 'in', one.name, len(data)).status == 200
    assert S == 4 or len(data) > AT_ONCE
    shared = {'k'}  # only k is shared, because computing with 8192 queries and keys takes long
    for size in (arrays['q'].nbytes - 1, 1, 0):
        one.truncate(size)
        refused(infer(shm_server, {'k': arrays['k'], 'v': arrays['v'][:, :1], 'q': arrays['q'][:, :1]}, shared=shared), 400,
                "k: the shared memory of the region 'in' has become shorter than it was when it was registered", pointer='/inputs/0/parameters/shared_memory_region')
    one.close()  # unlinking the object does not affect a region
    refused(infer(shm_server, {'k': arrays['k'], 'v': arrays['v'][:, :1], 'q': arrays['q'][:, :1]}, shared=shared), 400, 'has become shorter')


@pytest.mark.parametrize('S', [4, 8192])
def test_an_output_whose_object_was_truncated_is_refused_and_the_object_stays_short(shm_server, shm, S):
    q = np.ones((1, S, 2, 8), np.float32)
    arrays = {'q': q, 'k': q[:, :1], 'v': q[:, :1]}
    one = shm(2 * q.nbytes)
    assert register(shm_server, 'out', one.name, 2 * q.nbytes).status == 200
    for size in (q.nbytes - 1, 0):
        one.truncate(size)
        refused(infer(shm_server, arrays, shared=(), outputs={'out': place('out', q.nbytes)}), 400, "out: the shared memory of the region 'out' has become shorter",
                pointer='/outputs/0/parameters/shared_memory_region')
        assert one.size == size
    one.truncate(2 * q.nbytes)
    assert infer(shm_server, arrays, shared=(), outputs={'out': place('out', q.nbytes)}).status == 200
    assert one.read() == q.tobytes() + bytes(q.nbytes)


@pytest.mark.limit(120)
def test_objects_that_are_truncated_and_rewritten_all_the_time_cost_nobody_anything(shm_server, shm):
    """While clients truncate and rewrite objects all the time, every answer must have status 200 or 400. The server
    checks a mask in its own copy, so a client cannot change the mask after the check."""
    arrays, data = problem(S=3000, H=1)
    lengths = np.array([3000], np.int32)
    arrays = {'seqlens_k': lengths, **arrays}
    one = shm(0, lengths.tobytes() + data)
    size = one.size
    out = shm(arrays['q'].nbytes)
    assert register(shm_server, 'in', one.name, size).status == 200 and register(shm_server, 'out', out.name, out.size).status == 200
    end = threading.Event()

    def disturb():
        i = 0
        while not end.is_set():
            i += 1
            one.truncate((0, 7, size // 2, size)[i % 4])
            one.truncate(size)
            one.write(np.array([(3000, -1, 2**31 - 1, 1)[i % 4]], np.int32).tobytes())
            out.truncate((0, out_size // 2, out_size)[i % 3])
            out.truncate(out_size)
    out_size = out.size
    threads = [threading.Thread(target=disturb) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        statuses = set()
        for _ in range(30):
            answer = infer(shm_server, arrays, outputs={'out': place('out', out_size), 'lse': {'binary_data': True}})
            statuses.add(answer.status)
            if answer.status == 400:
                assert re.search('has become shorter|seqlens_k: ', answer.json()['error']), answer.body
        assert statuses <= {200, 400}
    finally:
        end.set()
        for t in threads:
            t.join()
    assert shm_server.get('/livez').status == 200
    assert out.size <= out_size


def test_a_limit_on_file_sizes_is_an_error_and_not_the_end(serve, shm, tmp_path):
    """If the system limits the size of files (`ulimit -f`), a write beyond the limit causes the signal SIGXFSZ. The
    server must answer with an error, and must not end."""
    script = tmp_path / 'attnd'
    # 2048 blocks are 1 or 2 MiB, depending on the shell
    script.write_text(f'#!/bin/sh\nulimit -f 2048\nexec {os.path.abspath(service.BINARY)} "$@"\n')
    script.chmod(0o755)
    server = serve(*ALLOW, binary=str(script))
    arrays, _ = problem()
    one = shm(8 << 20)
    assert register(server, 'r', one.name, one.size).status == 200
    assert infer(server, arrays, shared=(), outputs={'out': place('r', 256)}).status == 200
    refused(infer(server, arrays, shared=(), outputs={'out': place('r', 256, 4 << 20)}), 400, "the region 'r' cannot be written: the system's limit on file sizes")
    assert server.get('/livez').status == 200


# ---- S4, S5: while a request runs ------------------------------------------------------------------------------------

class Asking(under_way.Asking):
    def ask(self):
        return self.server.ask('POST', INFER, self.body, self.headers)


def running(server, count=1):
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == count)


@pytest.mark.parametrize('S', [4, 2048])
def test_what_happens_to_a_region_while_a_request_runs(fake, gate, shm, S):
    """While a request runs, a client rewrites the request's region. The request must use the copy that the server has
    made. The client also unregisters and unlinks the region. The request must still hold the region's memory. At the
    end the server must hold nothing."""
    server = fake(f'hold={gate.path}@1', *ALLOW)
    arrays, data = problem(S=S)
    one, out = shm(0, data), shm(arrays['q'].nbytes)
    assert register(server, 'in', one.name, len(data)).status == 200 and register(server, 'out', out.name, out.size).status == 200
    asking = Asking(server, body(arrays, outputs={'out': place('out', out.size), 'lse': {'binary_data': True}}))
    running(server)
    one.write(b'\xff' * len(data))
    assert unregister(server).status == 200 and status(server).json() == []
    assert eventually(lambda: descriptors(server) == 1)  # the output's
    with open(out.path, 'rb') as f:
        out.close()
        refused(infer(server, arrays), 404, "q: there is no region 'in'")
        gate.open()
        answer = asking.result()
        want = by_json(server, arrays)
        assert outputs_of_some(answer) == {'lse': want['lse']}
        assert f.read() == want['out']
    assert eventually(lambda: descriptors(server) == 0)
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)


def test_a_name_is_free_for_another_object_while_the_first_is_used(fake, gate, shm):
    server = fake(f'hold={gate.path}@1', *ALLOW)
    arrays, data = problem()
    first, second = shm(256), shm(256)
    assert register(server, 'out', first.name, 256).status == 200
    asking = Asking(server, body(arrays, shared=(), outputs={'out': place('out', 256)}))
    running(server)
    assert unregister(server, 'out').status == 200 and register(server, 'out', second.name, 256).status == 200
    gate.open()
    assert asking.result().status == 200
    assert first.read() == by_json(server, arrays)['out'] and second.read() == bytes(256)


@pytest.mark.parametrize('how', ['deadline', 'hang-up'])
def test_nothing_is_written_for_a_request_that_is_over(fake, gate, shm, how):
    """After a request's deadline, or after its client left, the server must not write to its region any more."""
    server = fake(f'hold={gate.path}@1', *ALLOW)
    arrays, _ = problem()
    one = shm(256)
    assert register(server, 'out', one.name, 256).status == 200
    data = body(arrays, shared=(), outputs={'out': place('out', 256)})
    if how == 'deadline':
        answer = server.ask('POST', INFER, data, {'X-Request-Timeout-Ms': '300'})
        assert answer.status == 504, answer.body
    else:
        with server.raw() as s:
            s.sendall(service.request_bytes(INFER, data))
            gate.await_kernels()
        assert eventually(lambda: server.metric('attnd_cancelled_total', state='running') == 1)
    gate.open()
    assert eventually(lambda: server.inflight() == 0)
    # the first request has ended, because this request has waited for it
    assert infer(server, arrays, shared=()).status == 200
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)
    assert one.read() == bytes(256)
    assert unregister(server).status == 200 and eventually(lambda: descriptors(server) == 0)


def test_a_saved_context_does_not_keep_regions(shm_server, shm):
    arrays, data = problem()
    one = shm(0, data + bytes(256))
    assert register(shm_server, 'in', one.name, one.size).status == 200
    parameters = {'save': True, 'binary_data_output': True}
    answer = infer(shm_server, arrays, parameters=parameters, outputs={'out': place('in', 256, len(data)), 'lse': {'binary_data': True}})
    assert answer.status == 200
    context = json.loads(answer.body[:int(answer.headers['inference-header-content-length'])])['parameters']['context']
    assert one.read(len(data)) == by_json(shm_server, arrays)['out']
    assert unregister(shm_server).status == 200 and eventually(lambda: descriptors(shm_server) == 0)
    # Gradients can be written to shared memory too. If they cannot be written, the context (the saved forward) stays
    # usable.
    dout = {'dout': np.ones((1, 4, 2, 8), np.float32)}
    three, short = shm(256), shm(256)
    assert register(shm_server, 'dq', three.name, 256).status == 200 and register(shm_server, 'short', short.name, 256).status == 200
    short.truncate(10)
    backward = INFER.replace('forward', 'backward')
    refused(infer(shm_server, dout, shared=(), path=backward, parameters={'context': context}, outputs={'dq': place('short', 256)}), 400, 'dq: the shared memory', 'has become shorter')
    refused(infer(shm_server, dout, shared=(), path=backward, parameters={'context': context}, outputs={'dq': place('dq', 255)}), 400, 'dq: has 256 bytes')
    answer = infer(shm_server, dout, shared=(), path=backward, parameters={'context': context}, outputs={'dq': place('dq', 256)})
    assert answer.status == 200, answer.body
    # This request sends the tensors of the saved forward again, to compute the same gradients.
    want = np.frombuffer(by_json(shm_server, {**arrays, **dout}, 'backward')['dq'], np.float32)
    assert np.allclose(np.frombuffer(three.read(), np.float32), want, atol=1e-5)
    assert eventually(lambda: shm_server.metric('attnd_staging_bytes', kind='used') == 0)


def test_float32_gradients_of_16_bit_inputs_take_four_bytes_each(shm_server, shm):
    r = np.random.default_rng(5)
    arrays = {n: r.standard_normal((1, 4, 2, 8)).astype(np.float16) for n in ('q', 'k', 'v', 'dout')}
    one, path = shm(256), INFER.replace('forward', 'backward')
    assert register(shm_server, 'dq', one.name, 256).status == 200
    asked = {'grad_dtype': 'float32', 'deterministic': True}
    refused(infer(shm_server, arrays, shared=(), path=path, parameters=asked, outputs={'dq': place('dq', 255)}), 400, 'dq: has 256 bytes')
    assert infer(shm_server, arrays, shared=(), path=path, parameters=asked, outputs={'dq': place('dq', 256)}).status == 200
    wide = np.frombuffer(one.read(), np.float32)
    assert infer(shm_server, arrays, shared=(), path=path, parameters={'deterministic': True}, outputs={'dq': place('dq', 128)}).status == 200
    assert np.array_equal(np.frombuffer(one.read(0, 128), np.float16), wide.astype(np.float16))


def test_verified_outputs_and_numbers_beside_shared_memory(shm_server, shm):
    arrays, data = problem(S=64)
    one = shm(0, data + bytes(arrays['q'].nbytes))
    assert register(shm_server, 'in', one.name, one.size).status == 200
    made = {'parameters': {'verify': 4}, 'outputs': {'out': place('in', arrays['q'].nbytes, len(data)), 'lse': {'binary_data': False}}}
    answer = infer(shm_server, arrays, **made)
    assert answer.status == 200 and 'verification' in answer.json()['parameters']
    out, lse = answer.json()['outputs']
    want = by_json(shm_server, arrays)
    assert set(out) == {'name', 'datatype', 'shape'} and np.array(lse['data'], np.float32).tobytes() == want['lse']
    assert one.read(len(data)) == want['out']


def test_a_storm_of_registrations_leaves_nothing(shm_server, shm):
    one = shm(4096)

    def storm(name):
        connection = shm_server.connect()
        for _ in range(100):
            connection.ask('POST', f'/v2/systemsharedmemory/region/{name}/register', json.dumps({'key': one.name, 'byte_size': 4096}).encode())
            connection.ask('POST', f'/v2/systemsharedmemory/region/{name}/unregister', b'')
        connection.close()
    threads = [threading.Thread(target=storm, args=(f'r{i % 2}',)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert status(shm_server).json() == [] and eventually(lambda: descriptors(shm_server) == 0)


def test_regions_have_a_limit(shm_server, shm):
    one = shm(4096)
    limits = shm_server.get('/v1/info').json()['limits']
    connection = shm_server.connect()
    for i in range(limits['shared_memory_regions']):
        answer = connection.ask('POST', f'/v2/systemsharedmemory/region/{i}/register', json.dumps({'key': one.name, 'byte_size': 4096}).encode())
        assert answer.status == 200, answer.body
    assert len(status(shm_server).json()) == 1024
    refused(register(shm_server, 'more', one.name, 64), 507, 'unregister what is not used')
    refused(register(shm_server, '7', one.name, 64), 409, "the region '7' is registered already")
    assert shm_server.metric('attnd_shared_memory_regions', kind='system') == 1024
    assert unregister(shm_server, '7').status == 200 and register(shm_server, 'more', one.name, 64).status == 200
    assert unregister(shm_server).status == 200 and eventually(lambda: descriptors(shm_server) == 0)
    connection.close()


def test_bytes_of_regions_have_a_limit(shm_server, shm):
    limit = shm_server.get('/v1/info').json()['limits']['shared_memory_bytes']
    one = shm(2 * limit)  # without pages
    refused(register(shm_server, 'all', one.name, limit + 1), 413, f'byte_size: is {limit + 1}, all regions may have {limit} bytes together')
    assert register(shm_server, 'most', one.name, limit - 10).status == 200
    refused(register(shm_server, 'more', one.name, 11), 507)
    assert register(shm_server, 'rest', one.name, 10).status == 200
    assert shm_server.metric('attnd_shared_memory_bytes', kind='system') == limit


def test_regions_belong_to_the_token_that_registered_them(serve, shm, tmp_path):
    tokens = tmp_path / 'tokens'
    tokens.write_text('token-of-anna\ntoken-of-bert\n')
    server = serve(*ALLOW, '--token-file', tokens)
    anna, bert = ({'Authorization': f'Bearer token-of-{n}'} for n in ('anna', 'bert'))
    server.page_headers = bert
    arrays, data = problem()
    one, other = shm(0, data), shm(0, data)
    assert register(server, 'in', one.name, one.size).status == 401
    assert register(server, 'in', one.name, one.size, headers=anna).status == 200
    # Bert does not see Alice's region, cannot use it, and cannot unregister it. Each token has its own names of
    # regions, but all tokens share the objects of /dev/shm.
    refused(status(server, 'in', bert), 404, "there is no region 'in'")
    assert status(server, headers=bert).json() == []
    refused(infer(server, arrays, headers=bert), 404, "q: there is no region 'in'")
    assert unregister(server, 'in', bert).status == 200 and unregister(server, headers=bert).status == 200
    refused(register(server, 'mine', one.name, 64, headers=bert), 409, 'is registered by another token')
    assert register(server, 'in', other.name, other.size, headers=bert).status == 200
    assert infer(server, arrays, headers=anna).status == 200 and infer(server, arrays, headers=bert).status == 200
    # One token may hold at most half of all regions of shared memory.
    connection = server.connect()
    answers = [connection.ask('POST', f'/v2/systemsharedmemory/region/{i}/register', json.dumps({'key': one.name, 'byte_size': 64}).encode(), anna) for i in range(512)]
    connection.close()
    assert [a.status for a in answers] == 511 * [200] + [429] and 'its share is 512' in answers[-1].json()['error']
    assert register(server, 'more', other.name, 64, headers=bert).status == 200
    big = shm(1 << 40)
    refused(register(server, 'big', big.name, (1 << 39) + 1, headers=bert), 413, 'all regions of a token may have')
    # When a token is removed from the token file, its regions are removed too.
    assert server.metric('attnd_shared_memory_regions', kind='system') == 514
    tokens.write_text('token-of-bert\n')
    os.kill(server.pid, signal.SIGHUP)
    assert eventually(lambda: server.metric('attnd_shared_memory_regions', kind='system') == 2)
    assert eventually(lambda: descriptors(server) == 2)
    assert infer(server, arrays, headers=bert).status == 200


# ---- cost ------------------------------------------------------------------------------------------------------------

@pytest.mark.limit(180)
def test_nobody_waits_while_much_is_read(shm_server, shm):
    """The server reads 512 MiB of shared memory, and then refuses the tensors for their shape. A probe must not wait
    meanwhile. test_loop.c tests that outputs are written by another thread than the scheduler's loop."""
    one = shm(256 << 20)
    assert register(shm_server, 'in', one.name, one.size).status == 200
    bad = {'inputs': [{'name': n, 'shape': [1, 1 << 20, 2, 32 if n != 'v' else 31], 'datatype': 'FP32', 'parameters': place('in', 256 << 20)} for n in 'qv']}
    before = shm_server.metric('attnd_shared_memory_moved_bytes_total', how='read')
    with service.Probe(shm_server) as probe:
        for _ in range(3):
            refused(shm_server.ask('POST', INFER, json.dumps(bad).encode()), 400, 'v: data has 268435456 bytes')
    probe.check()
    assert shm_server.metric('attnd_shared_memory_moved_bytes_total', how='read') - before == 3 * (512 << 20)


@pytest.mark.limit(120)
def test_much_is_written_whole(shm_server, shm):
    """The server writes 64 MiB of out to shared memory. There is one key, so every row of out is the value of that key."""
    q = np.ones((1, 1 << 18, 1, 64), np.float32)
    v = np.arange(64, dtype=np.float32).reshape(1, 1, 1, 64)
    one, out = shm(0, q.tobytes() + v.tobytes() + v.tobytes()), shm(q.nbytes + 1)
    assert register(shm_server, 'in', one.name, one.size).status == 200 and register(shm_server, 'out', out.name, out.size).status == 200
    assert infer(shm_server, {'q': q, 'k': v, 'v': v}, outputs={'out': place('out', q.nbytes)}).status == 200
    assert out.read() == np.broadcast_to(v, q.shape).tobytes() + b'\0'


def test_a_request_without_room_is_refused_and_gives_back_what_it_had(serve, shm):
    server = serve(*ALLOW, '--staging-bytes', '4M', '--max-body-bytes', '4M')
    one = shm(1 << 20)
    assert register(server, 'in', one.name, one.size).status == 200
    made = {'inputs': [{'name': n, 'shape': [1, 8192, 2, 16], 'datatype': 'FP32', 'parameters': place('in', 1 << 20)} for n in 'qkv']}
    # 3 MiB of inputs and 1 MiB of outputs, each rounded up to pages
    answer = server.ask('POST', INFER, json.dumps(made).encode())
    assert answer.status in (413, 503), answer.body
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)
    small, _ = problem()
    assert infer(server, small, shared=()).status == 200


# ---- what is told ----------------------------------------------------------------------------------------------------

def test_metrics_log_metadata_and_openapi_tell_of_it(serve, shm):
    server = serve(*ALLOW)
    assert server.metric('attnd_shared_memory_regions', kind='system') == 0
    arrays, data = problem()
    one = shm(0, data + bytes(256))
    assert register(server, 'my%20"region"', one.name, one.size).status == 200
    assert server.metric('attnd_shared_memory_regions', kind='system') == 1
    assert server.metric('attnd_shared_memory_bytes', kind='system') == one.size
    assert infer(server, arrays, region='my "region"', outputs={'out': place('my "region"', 256, len(data))}).status == 200
    assert server.metric('attnd_shared_memory_moved_bytes_total', how='read') == len(data)
    assert server.metric('attnd_shared_memory_moved_bytes_total', how='written') == 256
    assert unregister(server, 'my%20"region"').status == 200
    assert eventually(lambda: 'region_unregistered' in server.log())
    assert f'region_registered region="my \\"region\\"" bytes={one.size}' in server.log()
    assert one.name not in server.log()  # the log must not contain keys
    assert 'system_shared_memory' in server.get('/v2').json()['extensions']
    paths = server.get('/openapi.json').json()['paths']
    assert len([p for p in paths if p.startswith('/v2/systemsharedmemory')]) == 5 and not [p for p in paths if 'cuda' in p]


def test_a_gpus_memory_is_not_offered_without_its_option(shm_server):
    """Without --allow-cuda-shm, the list of GPU regions is empty and unregistering succeeds, because Triton's examples
    and perf_analyzer do both before they begin. test_cuda_shared_memory.py tests the server with that option."""
    assert shm_server.get('/v2/cudasharedmemory/status').json() == []
    refused(shm_server.get('/v2/cudasharedmemory/region/r/status'), 404, "there is no region 'r'")
    for path in ('/unregister', '/region/r/unregister'):
        assert shm_server.ask('POST', '/v2/cudasharedmemory' + path, b'').status == 200
    handle = json.dumps({'raw_handle': {'b64': 86 * 'A' + '=='}, 'device_id': 0, 'byte_size': 64}).encode()
    refused(shm_server.ask('POST', '/v2/cudasharedmemory/region/r/register', handle), 501, 'shared memory of a GPU is not offered here: start the server with --allow-cuda-shm')


@pytest.mark.limit(200)
@pytest.mark.skipif(not find_schemathesis(), reason='schemathesis is not here (tests/setup.sh test fetches it from PyPI)')
def test_schemathesis(shm_server, tmp_path):
    """Runs schemathesis as test_operations.py does, on the routes that --allow-shm adds."""
    run = subprocess.run(
        [find_schemathesis(), '--config-file', os.path.join(service.HERE, 'http/schemathesis.toml'), 'run', f'{shm_server.url}/openapi.json', '--checks', 'all', '--max-examples', '15',
         '--phases', 'examples,coverage,fuzzing', '--seed', '1', '--request-timeout', '20', '--no-color', '--include-path-regex', 'sharedmemory'],
        cwd=tmp_path, env=dict(os.environ, SCHEMATHESIS_HOOKS='schemathesis_hooks', PYTHONPATH=os.path.join(service.HERE, 'http')),
        capture_output=True, text=True, timeout=190 * service.SLOWER)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]


def test_the_answers_of_register_and_unregister_are_empty(shm_server, shm):
    one = shm(64)
    for answer in (register(shm_server, 'r', one.name, 64), unregister(shm_server, 'r'), unregister(shm_server)):
        assert answer.status == 200 and answer.body == b'' and answer.headers['content-length'] == '0'


# ---- Pinned: copied by the device ------------------------------------------------------------------------------------

LEAST = 256 << 10  # least number of bytes of a tensor that the device copies directly from a region


def moved(server):
    return {how: server.metric('attnd_shared_memory_moved_bytes_total', how=how) or 0 for how in ('read', 'written', 'device')}


def moved_since(server, before):
    return {how: n - before[how] for how, n in moved(server).items() if n != before[how]}


def map_into(one, data, offset=0):
    """Writes to an object through a mapping, as clients do."""
    with open(one.path, 'r+b') as f, mmap.mmap(f.fileno(), 0) as view:
        view[offset:offset + len(data)] = data


@pytest.fixture
def pinned(fake, shm):
    """pinned(data, size) returns (server, object). The object is registered as region 'r', and it is pinned: the
    devices copy directly from it."""
    def start(data, size, *options, script='', **more):
        server = fake(script, *ALLOW, *options, **more)
        one = shm(size, data)
        assert register(server, 'r', one.name, size).status == 200
        assert eventually(lambda: server.metric('attnd_shared_memory_pinned_bytes') == size)
        return server, one
    yield start


def test_large_tensors_are_copied_by_the_device(pinned):
    arrays, data = problem(S=1024, H=8)
    each = len(data) // 3
    assert each == LEAST
    server, one = pinned(data, 4 * each)
    right = by_json(server, arrays)
    for seed in (1, 2):  # the server must see what a client writes through a mapping
        arrays, data = problem(S=1024, H=8, seed=seed)
        right = by_json(server, arrays)
        map_into(one, data)  # a client's write modifies the object; the server notices that, and pins the memory again

        def ask():
            before = moved(server)
            answer = infer(server, arrays, region='r', outputs={'out': place('r', each, 3 * each), 'lse': {'binary_data': True}})
            assert outputs_of_some(answer)['lse'] == right['lse'] and one.read(3 * each) == right['out']
            return moved_since(server, before)
        assert ask() in ({'read': 3 * each, 'written': each}, {'device': 4 * each})
        # the server's own writes must not count as modifications by a client
        assert eventually(lambda: ask() == {'device': 4 * each})
        assert ask() == {'device': 4 * each}
    assert unregister(server, 'r').status == 200
    assert eventually(lambda: server.metric('attnd_shared_memory_pinned_bytes') == 0)
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0 and server.inflight() == 0)


def test_each_device_copies_its_heads_of_pinned_tensors(pinned):
    arrays, data = problem(S=2048, H=8)
    each = len(data) // 3
    server, one = pinned(data, 4 * each, '--split-above-ms', 1, devices=2)
    right = by_json(server, arrays)
    answer = infer(server, arrays, region='r', outputs={'out': place('r', each, 3 * each), 'lse': {'binary_data': True}})
    assert outputs_of_some(answer)['lse'] == right['lse'] and one.read(3 * each) == right['out']
    assert server.metric('attnd_device_parts_total', device='fake:1') == 2
    assert unregister(server, 'r').status == 200
    assert eventually(lambda: server.metric('attnd_shared_memory_pinned_bytes') == 0)


def test_sums_over_queries_of_several_devices_are_written_to_pinned_regions(pinned):
    """Two devices compute a problem in parts. Each device writes its own queries of dq to the region, and the elements
    of dk and dv for which it has added up the parts' sums. The CPU writes nothing."""
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal((1, 2048, 1 if n in 'kv' else 2, 64)).astype(np.float32) for n in ('q', 'k', 'v', 'dout')}
    data = b''.join(a.tobytes() for a in arrays.values())
    small = arrays['k'].nbytes
    server, one = pinned(data, 10 * small, '--split-above-ms', 1, devices=2)
    right = by_json(server, arrays, 'backward')
    outputs = {'dq': place('r', 2 * small, 6 * small), 'dk': place('r', small, 8 * small), 'dv': place('r', small, 9 * small)}

    def ask():
        before = moved(server)
        answer = infer(server, arrays, region='r', outputs=outputs, path='/v2/models/attention_backward/infer')
        assert answer.status == 200 and json.loads(answer.body)['parameters']['backend'].endswith(' by queries'), answer.body
        assert [one.read(6 * small, 2 * small), one.read(8 * small, small), one.read(9 * small, small)] == [right[n] for n in ('dq', 'dk', 'dv')]
        return moved_since(server, before)
    assert eventually(lambda: ask() == {'device': 10 * small})
    assert unregister(server, 'r').status == 200
    assert eventually(lambda: server.metric('attnd_shared_memory_pinned_bytes') == 0)
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)


def test_tensors_of_a_pinned_region_may_overlap(pinned):
    """In a pinned region, k begins in the middle of q, and v is k. The device must copy each tensor as a whole."""
    arrays, data = problem(S=2048, H=8, names='x')
    raw, q = data, np.frombuffer(data[:LEAST], np.float32).reshape(1, 1024, 8, 8)
    k = np.frombuffer(data[LEAST // 2:LEAST // 2 + LEAST], np.float32).reshape(1, 1024, 8, 8)
    server, one = pinned(raw, len(raw))
    right = by_json(server, {'q': q, 'k': k, 'v': k})
    where = {'q': 0, 'k': LEAST // 2, 'v': LEAST // 2}
    text = json.dumps({'inputs': [{'name': n, 'shape': [1, 1024, 8, 8], 'datatype': 'FP32', 'parameters': place('r', LEAST, at)} for n, at in where.items()],
                       'outputs': [{'name': 'out', 'parameters': place('r', LEAST, LEAST)}]}).encode()
    before = moved(server)
    assert server.ask('POST', INFER, text).status == 200
    assert one.read(LEAST, LEAST) == right['out'] and moved_since(server, before) == {'device': 4 * LEAST}


def test_gradients_of_pinned_tensors(pinned):
    arrays, data = problem(S=1024, H=8, names=('q', 'k', 'v', 'dout'))
    forward = {n: a for n, a in arrays.items() if n != 'dout'}
    server, one = pinned(data, 7 * LEAST)
    outs = by_json(server, forward)
    lse = np.frombuffer(outs['lse'], np.float32).reshape(1, 8, 1024)
    out = np.frombuffer(outs['out'], np.float32).reshape(1, 1024, 8, 8)
    right = by_json(server, {**arrays, 'out': out, 'lse': lse}, 'backward')
    outputs = {n: place('r', LEAST, (4 + i) * LEAST) for i, n in enumerate(('dq', 'dk', 'dv'))}
    answer = infer(server, {**arrays, 'out': out, 'lse': lse}, region='r', shared=set(arrays), outputs=outputs, path='/v2/models/attention_backward/infer')
    assert answer.status == 200, answer.body
    assert [one.read((4 + i) * LEAST, LEAST) == right[n] for i, n in enumerate(('dq', 'dk', 'dv'))] == [True] * 3
    # The CPU cannot read tensors in a GPU's memory, so the device checks their lse.
    wrong = (lse / np.log(2)).astype(np.float32)
    answer = infer(server, {**arrays, 'out': out, 'lse': wrong}, region='r', shared=set(arrays), outputs=outputs, path='/v2/models/attention_backward/infer')
    refused(answer, 400, 'your lse is in base 2: multiply it by 0.6931472', pointer='/inputs/5')


@pytest.mark.parametrize('how', ['verify', 'save', 'small', 'write', 'grown again', 'hole'])
def test_what_devices_do_not_copy_is_copied_by_the_processor(pinned, how):
    H = 4 if how == 'small' else 8
    arrays, data = problem(S=1024, H=H)
    each = len(data) // 3
    server, one = pinned(data, max(4 * each, LEAST))
    parameters = {'binary_data_output': True}
    if how in ('verify', 'save'):
        parameters[how] = 1 if how == 'verify' else True
    if how == 'write':
        one.write(data)
    if how == 'grown again':
        one.truncate(0)
        one.write(data)
        one.truncate(4 * each)
    if how == 'hole':
        ctypes.CDLL(None, use_errno=True).fallocate(os.open(one.path, os.O_RDWR), 3, ctypes.c_long(0), ctypes.c_long(4096))
        map_into(one, data)
    before, right = moved(server), by_json(server, arrays)
    answer = infer(server, arrays, region='r', outputs={'out': place('r', each, 3 * each)}, parameters=parameters)
    assert answer.status == 200 and one.read(3 * each, each) == right['out']
    assert moved_since(server, before) == {'read': 3 * each, 'written': each}


def test_holes_of_pinned_regions_are_filled_and_small_and_huge_regions_are_not_pinned(fake, shm):
    server, sparse, small, huge = fake('', *ALLOW), shm(LEAST), shm(LEAST - 1), shm((1 << 30) + 1)
    for name, one in (('small', small), ('huge', huge), ('sparse', sparse)):
        assert register(server, name, one.name, one.size).status == 200
    assert eventually(lambda: server.metric('attnd_shared_memory_pinned_bytes') == LEAST)
    assert os.stat(sparse.path).st_blocks == LEAST // 512 and os.stat(huge.path).st_blocks == 0


def test_a_pinned_region_that_was_truncated_is_refused_and_one_without_a_name_is_not(pinned):
    arrays, data = problem(S=1024, H=8)
    server, one = pinned(data, 4 * LEAST)
    outputs = {'out': place('r', LEAST, 3 * LEAST)}
    one.close()
    before = moved(server)
    assert infer(server, arrays, region='r', outputs=outputs).status == 200 and moved_since(server, before) == {'device': 4 * LEAST}
    server2, other = pinned(data, 4 * LEAST)
    other.truncate(4 * LEAST - 1)
    refused(infer(server2, arrays, region='r', outputs=outputs), 400, "out: the shared memory of the region 'r' has become shorter", pointer='/outputs/0/parameters/shared_memory_region')


def test_a_region_is_unregistered_while_a_device_copies_to_it(pinned, gate):
    arrays, data = problem(S=1024, H=8)
    server, one = pinned(data, 4 * LEAST, script=f'hold={gate.path}@1')
    late = Asking(server, body(arrays, 'r', outputs={'out': place('r', LEAST, 3 * LEAST)}))
    running(server)
    assert unregister(server, 'r').status == 200
    gate.open()
    assert late.result().status == 200
    assert one.read(3 * LEAST) == by_json(server, arrays)['out']
    assert eventually(lambda: server.metric('attnd_shared_memory_pinned_bytes') == 0)
