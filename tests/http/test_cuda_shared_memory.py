"""Triton's CUDA shared memory extension (--allow-cuda-shm), tested without a GPU on attnd-fake. A fake device's handle
is the name of an object in /dev/shm, and only the device's kernels can access that memory (kernels/fake/fake.c): the
server would crash if it read the memory itself. The bodies are those that tritonclient sends (http/_client.py,
register_cuda_shared_memory). tests/gpu/cuda_shared_memory.py tests a real GPU."""
import base64
import json
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

import service
import wire
from service import eventually
from test_kserve import INFER
from test_operations import find_schemathesis
from test_shared_memory import SHM, Asking, Object, by_json, infer, outputs_of, outputs_of_some, place, problem, refused, body, running, shm  # noqa: F401
from under_way import GUESTS, dies

ALLOW = ('--allow-cuda-shm',)
BOTH = (*ALLOW, '--allow-shm', 'attn_')

pytestmark = pytest.mark.skipif(not os.access(SHM, os.W_OK), reason='/dev/shm cannot be written here')


LATE_S = 1.5 * service.SLOWER  # seconds after which the deadline of soon() has passed, and the server has noticed that


def soon():
    """Returns a header with a deadline that passes during the request's computation."""
    return {'X-Request-Timeout-Ms': f'{1000 * service.SLOWER:.0f}'}


def raw_handle(one, device=0):
    """Returns what cudashm.get_raw_handle() would: base64 of 64 bytes, here a handle of the fake device."""
    return base64.b64encode(f'{device}/{one.name}'.encode().ljust(64, b'\0'))


def register_raw(server, name, raw, size, device=0, headers=()):
    request = {'raw_handle': {'b64': raw.decode()}, 'device_id': device, 'byte_size': size}
    return server.ask('POST', f'/v2/cudasharedmemory/region/{name}/register', json.dumps(request).encode(), headers)


def register(server, name, one, size=None, device=0, headers=()):
    return register_raw(server, name, raw_handle(one, device), one.size if size is None else size, device, headers)


def register_system(server, name, one):
    return server.ask('POST', f'/v2/systemsharedmemory/region/{name}/register', json.dumps({'key': one.name, 'byte_size': one.size}).encode())


def unregister(server, name='', headers=(), kind='cuda'):
    return server.ask('POST', f'/v2/{kind}sharedmemory' + (f'/region/{name}' if name else '') + '/unregister', b'', headers)


def status(server, name='', headers=()):
    return server.ask('GET', '/v2/cudasharedmemory' + (f'/region/{name}' if name else '') + '/status', None, headers)


def mappings(server):
    """Returns which objects of /dev/shm the server has mapped, unlinked or not. Only fake devices map any."""
    with open(f'/proc/{server.pid}/maps') as f:
        return sum(SHM + 'attn_' in line for line in f)


def nothing_left(server, headers=()):
    assert unregister(server, headers=headers).status == 200
    assert eventually(lambda: mappings(server) == 0)
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0 and server.inflight() == 0)


# ---- registering -----------------------------------------------------------------------------------------------------

def test_a_region_is_registered_listed_and_unregistered_as_triton_does(fake, shm):
    server = fake('', *ALLOW, devices=2)
    one, other = shm(4096), shm(1 << 20)
    for answer in (register(server, 'a', one, 4096), register(server, 'b', other, 100, device=1)):
        assert answer.status == 200 and answer.body == b''
    a, b = {'name': 'a', 'device_id': 0, 'byte_size': 4096}, {'name': 'b', 'device_id': 1, 'byte_size': 100}
    assert status(server).json() == [a, b] and status(server, 'b').json() == [b]
    refused(status(server, 'c'), 404, "there is no region 'c'")
    refused(register(server, 'a', other), 409, "the region 'a' is registered already")
    assert server.metric('attnd_shared_memory_regions', kind='cuda') == 2 and server.metric('attnd_shared_memory_regions', kind='system') == 0
    assert server.metric('attnd_shared_memory_bytes', kind='cuda') == 4196
    assert 'cuda_shared_memory' in server.get('/v2').json()['extensions'] and 'system_shared_memory' not in server.get('/v2').json()['extensions']
    assert len([p for p in server.get('/openapi.json').json()['paths'] if p.startswith('/v2/cudasharedmemory')]) == 5
    assert server.get('/v1/info').json()['limits']['shared_memory_regions'] == 1024
    assert unregister(server, 'a').status == 200 and unregister(server, 'a').status == 200
    assert status(server).json() == [b] and eventually(lambda: mappings(server) == 1)
    assert one.name not in server.log() and raw_handle(one).decode() not in server.log()
    nothing_left(server)


def test_kinds_share_their_names_and_are_unregistered_each_by_its_own_path(fake, shm):
    server = fake('', *BOTH)
    one, other = shm(4096), shm(4096)
    assert register_system(server, 's', one).status == 200 and register(server, 'c', other).status == 200
    refused(register(server, 's', other), 409, "the region 's' is registered already")
    refused(register_system(server, 'c', one), 409, "the region 'c' is registered already")
    for name in ('s', ''):
        assert unregister(server, name).status == 200
    assert server.metric('attnd_shared_memory_regions', kind='system') == 1 and server.metric('attnd_shared_memory_regions', kind='cuda') == 0
    assert register(server, 'c', other).status == 200
    assert unregister(server, kind='system').status == 200 and [r['name'] for r in status(server).json()] == ['c']


def test_a_handle_that_opens_nothing_is_the_clients_fault_and_costs_nobody_anything(fake, shm):
    server = fake('', *ALLOW, devices=2)
    one = shm(4096)
    for raw in (base64.b64encode(bytes(64)), base64.b64encode(bytes(range(64))), base64.b64encode(64 * b'\xff'), base64.b64encode(b'0/attn_nothing'.ljust(64, b'\0'))):
        refused(register_raw(server, 'r', raw, 64), 400, 'raw_handle: cannot be opened as 64 bytes of device 0', 'invalid resource handle', pointer='/raw_handle')
    refused(register(server, 'r', one, 4097), 400, 'as 4097 bytes of device 0', 'the allocation has 4096 bytes', pointer='/raw_handle')
    refused(register(server, 'r', one, 2**53), 413, 'byte_size: is 9007199254740992')
    refused(register_raw(server, 'r', raw_handle(one, 1), 64), 400, 'the memory is of device 1, not of device 0', pointer='/raw_handle')
    refused(register(server, 'r', one, device=2), 400, 'device_id: is 2, this server has no such device', pointer='/device_id')
    assert status(server).json() == [] and mappings(server) == 0
    assert server.get('/readyz').status == 200 and register(server, 'r', one).status == 200


@pytest.mark.parametrize('text, says, pointer', [
    (b'', 'the body is empty, must be like {"raw_handle": {"b64": "..."}, "device_id": 0, "byte_size": 4096}', ''),
    (b'{"key": "attn_x", "byte_size": 64}', "unknown member 'key'", '/key'),
    (b'{"raw_handle": "AAAA", "device_id": 0, "byte_size": 64}', 'raw_handle: must be {"b64": "..."}', '/raw_handle'),
    (b'{"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}', 'raw_handle: b64 has 4 characters', '/raw_handle/b64'),
    (b'{"raw_handle": {"b64": "' + 86 * b'A' + b'=="}, "device_id": 0.5, "byte_size": 64}', 'device_id: is 0.5', '/device_id'),
    (b'{"raw_handle": {"b64": "' + 86 * b'A' + b'=="}, "device_id": 0, "byte_size": 0}', 'byte_size: is 0', '/byte_size'),
    (b'{"raw_handle": {"b64": "' + 86 * b'A' + b'=="}, "device_id": 0}', 'byte_size is missing', ''),
])
def test_a_register_that_makes_no_sense(fake, text, says, pointer):
    refused(fake('', *ALLOW).ask('POST', '/v2/cudasharedmemory/region/r/register', text), 400, says, pointer=pointer)


def test_what_is_not_offered(fake, serve, shm):
    one = shm(64)
    cpu = serve(*ALLOW, '--devices', 'cpu')
    refused(register(cpu, 'r', one), 501, 'this server computes on the CPU')
    assert status(cpu).json() == [] and unregister(cpu).status == 200
    server = fake('', *ALLOW)
    refused(register_system(server, 'r', one), 501, 'system shared memory is not offered here: start the server with --allow-shm PREFIX')
    assert server.get('/v2/systemsharedmemory/status').json() == [] and unregister(server, kind='system').status == 200
    refused(register(fake(), 'r', one), 501, 'shared memory is not offered here', '--allow-cuda-shm')


def test_opening_may_fail_for_want_of_memory_and_by_a_device_that_is_lost(fake, shm):
    server = fake('import.err=2@1,import.err=999@2', *ALLOW)
    one = shm(64)
    refused(register(server, 'r', one), 503, 'out of memory')
    refused(register(server, 'r', one), 503, 'unknown error')
    dies(server, 70)


# ---- tensors ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('where', ['all', 'inputs', 'outputs', 'k', 'with system'])
@pytest.mark.parametrize('S', [4, 2048])
def test_tensors_are_used_where_they_are(fake, shm, where, S):
    """The numbers must be the same whether tensors lie in the device's memory or in the server's. The device's tensors
    must never pass through the server's memory."""
    server = fake('', *BOTH)
    arrays, data = problem(S=S, H=1)
    want = by_json(server, arrays)
    size = arrays['q'].nbytes
    one, out, system = shm(0, data), shm(size + 64), shm(0, arrays['v'].tobytes() + bytes(len(want['lse'])))
    assert register(server, 'in', one).status == 200 and register(server, 'out', out).status == 200 and register_system(server, 'sys', system).status == 200
    read = server.metric('attnd_shared_memory_moved_bytes_total', how='read') or 0
    outputs = {'out': place('out', size, 32), 'lse': {'binary_data': True}}
    if where == 'all':
        answer = infer(server, arrays, outputs=outputs)
    elif where == 'inputs':
        answer = infer(server, arrays, outputs={'out': {'binary_data': True}, 'lse': {'binary_data': True}})
    elif where == 'outputs':
        answer = infer(server, arrays, shared=(), outputs=outputs)
    elif where == 'k':
        one.write(arrays['k'].tobytes())
        answer = infer(server, arrays, shared=('k',), outputs=outputs)
    else:  # in this case q and k are on the device, v and lse in system memory
        inputs = [{'name': n, 'shape': list(a.shape), 'datatype': 'FP32', 'parameters': place('sys', size) if n == 'v' else place('in', size, i * size)} for i, (n, a) in enumerate(arrays.items())]
        outs = [{'name': 'out', 'parameters': place('out', size, 32)}, {'name': 'lse', 'parameters': place('sys', len(want['lse']), size)}]
        answer = server.ask('POST', INFER, json.dumps({'inputs': inputs, 'outputs': outs}).encode())
        assert answer.status == 200, answer.body
        assert system.read(size) == want['lse']
        assert server.metric('attnd_shared_memory_moved_bytes_total', how='read') - read == size
    if where == 'inputs':
        assert outputs_of(answer) == want
    else:
        if where != 'with system':
            assert outputs_of_some(answer) == {'lse': want['lse']}
        assert out.read(32, size) == want['out'] and out.read(0, 32) == out.read(32 + size, 32) == bytes(32)
    nothing_left(server)


def test_a_backward_in_place_of_a_context_and_of_all(fake, shm):
    server = fake('', *ALLOW)
    arrays, data = problem(names=('q', 'k', 'v', 'dout'))
    forward = {n: arrays[n] for n in 'qkv'}
    want = by_json(server, arrays, 'backward')
    one, out = shm(0, data), shm(3 * 256)
    assert register(server, 'in', one).status == 200 and register(server, 'out', out).status == 200
    backward = INFER.replace('forward', 'backward')
    outputs = {n: place('out', 256, 256 * i) for i, n in enumerate(('dq', 'dk', 'dv'))}
    assert infer(server, arrays, path=backward, outputs=outputs).status == 200
    assert [out.read(256 * i, 256) for i in range(3)] == [want[n] for n in ('dq', 'dk', 'dv')]
    out.write(bytes(3 * 256))
    saved = infer(server, forward, shared=(), parameters={'save': True, 'binary_data_output': True})
    context = json.loads(saved.body[:int(saved.headers['inference-header-content-length'])])['parameters']['context']
    one.write(arrays['dout'].tobytes())
    answer = infer(server, {'dout': arrays['dout']}, path=backward, parameters={'context': context}, outputs=outputs)
    assert answer.status == 200, answer.body
    got = [np.frombuffer(out.read(256 * i, 256), np.float32) for i in range(3)]
    assert all(np.allclose(g, np.frombuffer(want[n], np.float32), atol=1e-5) for g, n in zip(got, ('dq', 'dk', 'dv')))
    nothing_left(server)


def test_what_cannot_be_done_with_a_devices_memory(fake, shm):
    server = fake('', *BOTH, devices=2)
    arrays, data = problem()
    one, two, out = shm(0, data), shm(0, data), shm(4096)
    lengths = np.array([4], np.int32)
    assert register(server, 'in', one).status == 200 and register(server, 'there', two, device=1).status == 200 and register(server, 'out', out).status == 200
    cure = 'cannot lie in the memory of a GPU, its values are checked first; send it in the body or in system shared memory'
    refused(infer(server, {'seqlens_k': lengths, **arrays}, shared=('seqlens_k',)), 400, f'seqlens_k: {cure}', pointer='/inputs/0/parameters/shared_memory_region')
    refused(infer(server, {**arrays, 'bias': np.zeros((1, 1, 4, 4), np.float32)}, shared=('bias',)), 400, f'bias: {cure}', pointer='/inputs/3/parameters/shared_memory_region')
    refused(infer(server, arrays, parameters={'save': True}), 400, 'save: cannot be true where tensors are in the memory of a GPU', pointer='/parameters/save')
    refused(infer(server, arrays, outputs={'out': place('there', 256)}), 400, "out: the region 'there' is in the memory of device 1", 'all must be of one', pointer='/outputs/0/parameters/shared_memory_region')
    refused(infer(server, arrays, outputs={'out': place('in', 256, 256)}), 400, "out: would be written over k, in the region 'in'", pointer='/outputs/0/parameters/shared_memory_offset')
    refused(infer(server, arrays, outputs={'out': place('out', 256), 'lse': place('out', 32, 252)}), 400, 'lse: would be written over out')
    refused(infer(server, arrays, outputs={'out': place('out', 255)}), 400, 'out: has 256 bytes, shared_memory_byte_size is 255')
    refused(infer(server, arrays, outputs={'out': place('out', 256, 4096 - 255)}), 400, 'go past the end of the region')
    refused(infer(server, arrays, outputs={'out': place('out', 256, 2**53)}), 400, 'go past the end of the region')
    refused(infer(server, arrays, outputs={'out': place('out', 256, 2)}), 400, 'out: shared_memory_offset is 2, must be a multiple of 4 in the memory of a GPU', pointer='/outputs/0/parameters/shared_memory_offset')
    made = {'inputs': [{'name': n, 'shape': list(a.shape), 'datatype': 'FP32', 'parameters': place('in', 256, 256 * i + (n == 'k'))} for i, (n, a) in enumerate(arrays.items())]}
    refused(server.ask('POST', INFER, json.dumps(made).encode()), 400, 'k: data is not aligned to 4 bytes')
    made['inputs'][1]['parameters'] = place('in', 252, 256)
    refused(server.ask('POST', INFER, json.dumps(made).encode()), 400, 'k: data has 252 bytes', pointer='/inputs/1/parameters/shared_memory_byte_size')
    assert out.read() == bytes(4096) and one.read() == data
    # one allocation is registered under a second name, and must not be opened a second time
    assert register(server, 'again', one).status == 200
    refused(infer(server, arrays, outputs={'out': place('again', 256, 256)}), 400, 'out: would be written over k')
    nothing_left(server)


def test_unaligned_memory_gives_the_same_numbers(fake, shm):
    """The tensors' addresses are aligned only to the size of an element. Kernels that need more alignment leave such
    problems to other kernels."""
    server = fake('', *ALLOW)
    arrays, data = problem(S=40)
    size = arrays['q'].nbytes
    one = shm(0, b'abcd' + data + bytes(size))
    want = by_json(server, arrays)
    assert register(server, 'in', one).status == 200
    made = {'inputs': [{'name': n, 'shape': list(a.shape), 'datatype': 'FP32', 'parameters': place('in', size, 4 + i * size)} for i, (n, a) in enumerate(arrays.items())],
            'outputs': [{'name': 'out', 'parameters': place('in', size, 4 + 3 * size)}]}
    assert server.ask('POST', INFER, json.dumps(made).encode()).status == 200
    assert one.read(4 + 3 * size, size) == want['out']


def test_a_devices_memory_is_not_counted_as_the_body_or_as_staging_memory(fake, shm):
    server = fake('', *ALLOW, '--max-body-bytes', '64K', '--staging-bytes', '1M')
    arrays, data = problem(S=16384, H=1)
    arrays = {'q': arrays['q'][:, :8], 'k': arrays['k'], 'v': arrays['v']}
    one = shm(0, b''.join(a.tobytes() for a in arrays.values()))
    assert one.size > 1 << 20 and register(server, 'in', one).status == 200
    answer = infer(server, arrays)
    assert answer.status == 200, answer.body
    nothing_left(server)


def test_each_region_is_computed_by_its_own_device(fake, shm):
    server = fake('', *ALLOW, devices=2)
    arrays, data = problem()
    want = by_json(server, arrays)
    for device in (1, 0, 1):
        one = shm(0, data)
        assert register(server, 'in', one, device=device).status == 200
        for _ in range(3):
            answer = infer(server, arrays)
            assert outputs_of(answer) == want and f'"fake:{device} ' in answer.body[:int(answer.headers['inference-header-content-length'])].decode()
        assert unregister(server).status == 200


@pytest.mark.parametrize('in_place', [('q', 'k'), ('q',), ('k',), ('q', 'k', 'v', 'dout')], ids=' '.join)
@pytest.mark.parametrize('reads_staging', [False, True])
def test_an_lse_is_held_against_scores_that_only_the_device_can_read(fake, shm, in_place, reads_staging):
    server = fake('', *ALLOW, reads_staging=reads_staging)
    arrays, _ = problem(S=20, names=('q', 'k', 'v', 'dout'))
    arrays = {n: arrays[n] for n in in_place + tuple(n for n in arrays if n not in in_place)}
    data = b''.join(arrays[n].tobytes() for n in in_place)
    assert register(server, 'in', shm(len(data), data)).status == 200
    outs = by_json(server, {n: a for n, a in arrays.items() if n != 'dout'})
    out, lse = (np.frombuffer(outs[n], np.float32) for n in ('out', 'lse'))
    backward = INFER.replace('forward', 'backward')

    def ask(lse, arrays=arrays, **parameters):
        more = {'out': out.reshape(1, 20, 2, 8), 'lse': lse.astype(np.float32).reshape(1, 2, 20)}
        return infer(server, {**arrays, **more}, path=backward, shared=in_place, parameters={'binary_data_output': True, **parameters})
    want = by_json(server, {**arrays, 'out': out.reshape(1, 20, 2, 8), 'lse': lse.reshape(1, 2, 20)}, 'backward')
    for _ in range(3):
        assert outputs_of(ask(lse)) == want
        refused(ask(lse / np.log(2)), 400, 'your lse is in base 2: multiply it by 0.6931472', pointer='/inputs/5')
    refused(ask(lse - 1), 400, 'sum to 2.718, must be at most 1', pointer='/inputs/5')
    refused(ask(lse, causal=True), 400, 'your lse was computed with no causal and no window', pointer='/inputs/5')
    assert ask(lse + 1).status == 200 and ask(np.full(40, -np.inf)).status == 200
    assert server.metric('attnd_device_errors_total') in (None, 0)
    nothing_left(server)


@pytest.mark.parametrize('S', [4, 100])
def test_the_device_verifies_what_only_it_can_read(fake, shm, S):
    server, blind = fake('', *ALLOW), fake('truth.none', *ALLOW)
    arrays, data = problem(S=S)
    size = arrays['q'].nbytes
    rows = S * arrays['q'].shape[2]
    outputs = {'out': place('out', size)}
    for one in (server, blind):
        assert register(one, 'in', shm(len(data), data)).status == 200 and register(one, 'out', shm(size)).status == 200
    for verify in (1, 'all'):
        answer = infer(server, arrays, outputs=outputs, parameters={'verify': verify})
        assert answer.status == 200, answer
        found = json.loads(answer.body[:int(answer.headers.get('inference-header-content-length', len(answer.body)))])['parameters']['verification']
        found = json.loads(found)
        assert found['rows'] == rows and 0 < found['max_abs'] < 1e-6, found
        refused(infer(blind, arrays, outputs=outputs, parameters={'verify': verify}), 400,
                'verify: cannot be asked for where tensors are in the memory of a GPU that computes nothing in float64', pointer='/parameters/verify')
    nothing_left(server)
    nothing_left(blind)


@pytest.mark.parametrize('reads_staging', [False, True])
def test_an_observe_is_told_of_an_lse_in_base_2_of_scores_that_only_the_device_can_read(fake, shm, reads_staging):
    server = fake('', *ALLOW, reads_staging=reads_staging)
    arrays, _ = problem(S=20)
    lse = np.frombuffer(by_json(server, arrays)['lse'], np.float32).reshape(1, 2, 20)
    q, k = arrays['q'], arrays['k']
    assert register(server, 'in', shm(2 * q.nbytes, q.tobytes() + k.tobytes())).status == 200

    def ask(lse):
        return infer(server, {'q': q, 'k': k, 'lse': lse}, path=INFER.replace('forward', 'observe'), shared=('q', 'k'),
                     parameters={'binary_data_output': True, 'observe': '["key_mass"]'})
    assert ask(lse).status == 200
    refused(ask((lse / np.log(2)).astype(np.float32)), 400, 'your lse is in base 2: multiply it by 0.6931472', pointer='/inputs/2')
    nothing_left(server)


DECODE = INFER.replace('attention_forward', 'attention_decode_causal')


def step_body(arrays, at, parameters, outputs=None):
    inputs = [{'name': n, 'shape': list(a.shape), 'datatype': 'FP16', 'parameters': place('in', a.nbytes, at[n])} for n, a in arrays.items()]
    made = {'inputs': inputs, 'parameters': {'binary_data_output': True, **parameters}}
    if outputs:
        made['outputs'] = outputs
    return json.dumps(made).encode()


@pytest.mark.parametrize('in_place', [False, True], ids=['by a batch', 'by the thread that received it'])
def test_a_step_takes_new_keys_and_values_from_a_devices_memory(fake, shm, in_place):
    server = fake('', *ALLOW, reads_staging=in_place)
    rng = np.random.default_rng(5)
    keys = {n: rng.standard_normal((1, 6, 2, 8)).astype(np.float16) for n in 'qkv'}
    one = shm(4096)
    assert register(server, 'in', one).status == 200
    at = {'q': 4, 'k': 1000, 'v': 2000}
    for first, last in ((0, 4), (4, 6)):
        new = {n: a[:, first:last] for n, a in keys.items()}
        for n, a in new.items():
            one.write(a.tobytes(), at[n])
        size = new['q'].nbytes
        answer = server.ask('POST', DECODE, step_body(new, at, {'sequence_id': 7, 'sequence_start': first == 0}, [{'name': 'out', 'parameters': place('in', size, 3000)}]))
        assert answer.status == 200, answer.body
        queue = json.loads(answer.json()['parameters']['timing_us'])['queue']
        assert (queue == 0) == in_place, answer
        want = server.post('/v1/attention/forward', {'q': wire.tensor(new['q'], 'float16'), **{n: wire.tensor(keys[n][:, :last], 'float16') for n in 'kv'}, 'causal': True}).json()
        got = np.frombuffer(one.read(3000, size), np.float16).astype(float)
        assert np.abs(got - np.frombuffer(base64.b64decode(want['out']['data']), np.float16).astype(float)).max() < 4e-3
    new = {n: a[:, :1] for n, a in keys.items()}
    refused(server.ask('POST', DECODE, step_body(new, {**at, 'k': 1002}, {'sequence_id': 7})), 400, 'k: shared_memory_offset is 1002, must be a multiple of 4 in the memory of a GPU')
    nothing_left(server)


class Growing:
    """A cache that grows by one position per step (decode). All tensors are in device memory. If the device is idle,
    the HTTP thread that receives a step therefore launches the step itself."""

    def __init__(self, server, shm):
        self.server, self.region = server, shm(4096)
        rng = np.random.default_rng(5)
        self.new = {n: rng.standard_normal((1, 1, 2, 8)).astype(np.float16) for n in 'qkv'}
        self.at = {'q': 0, 'k': 1000, 'v': 2000}
        for n, a in self.new.items():
            self.region.write(a.tobytes(), self.at[n])
        assert register(server, 'in', self.region).status == 200
        self.id = server.post('/v1/caches', {'kv_heads': 2, 'head_dim': 8, 'dtype': 'float16'}).json()['id']

    def step(self, headers=()):
        outputs = [{'name': 'out', 'parameters': place('in', 32, 3000)}]
        return self.server.ask('POST', DECODE, step_body(self.new, self.at, {'caches': json.dumps([self.id])}, outputs), headers)

    def length(self):
        return self.server.get(f'/v1/caches/{self.id}').json()['length']


@pytest.mark.parametrize('script, status', [('launch.err=9@2', 500), ('sync.err=98@2', 500), ('launch.err=2@2', 503)])
def test_a_step_that_fails_in_the_thread_that_received_it_leaves_its_cache_as_it_was(fake, shm, script, status):
    server = fake(script, *ALLOW, reads_staging=True)
    growing = Growing(server, shm)
    assert growing.step().status == 200 and growing.length() == 1
    assert growing.step().status == status and growing.length() == 1
    assert growing.step().status == 200 and growing.length() == 2
    nothing_left(server)


def test_a_step_whose_device_is_lost_in_the_thread_that_received_it(fake, shm):
    server = fake('0:launch.err=700@1', *ALLOW, devices=2, reads_staging=True)
    growing = Growing(server, shm)
    refused(growing.step(), 503, 'fake:0')
    assert server.get(f'/v1/caches/{growing.id}').status == 404 and server.get('/readyz').status == 200
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0 and server.inflight() == 0)


@pytest.mark.parametrize('late', [False, True], ids=['in time', 'after its deadline'])
def test_a_step_that_is_late_goes_on_as_a_batch(fake, gate, shm, late):
    """A step (a decode) is late if it is not done when its HTTP thread stops waiting for it. The answer is sent when
    the step has ended. The cache gets the new position only if a client still waits. The next step on the cache waits
    until the late step has ended."""
    server = fake(f'hold={gate.path}@1', *ALLOW, reads_staging=True)
    growing = Growing(server, shm)
    asking = AskingStep(growing, soon() if late else {})
    running(server)
    behind = AskingStep(growing)
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='queued') == 1)
    if late:
        asking.join(LATE_S)
    assert asking.is_alive() and growing.length() == 0
    gate.open()
    assert asking.result().status == (504 if late else 200) and behind.result().status == 200
    assert growing.length() == (1 if late else 2)
    nothing_left(server)


class AskingStep(threading.Thread):
    def __init__(self, growing, headers=()):
        super().__init__()
        self.growing, self.headers, self.answer = growing, headers, None
        self.start()

    def run(self):
        self.answer = self.growing.step(self.headers)

    def result(self):
        self.join()
        return self.answer


@pytest.mark.limit(120)
def test_steps_of_threads_and_of_batches_on_one_cache_come_one_after_the_other(fake, shm):
    """A step (a decode) that uses the same cache as another thread's step waits in the queue until the other step has
    ended."""
    server = fake('delay=1', *ALLOW, '--http-threads', 8, reads_staging=True)
    growing, statuses = Growing(server, shm), []

    def grow():
        for _ in range(25):
            statuses.append(growing.step().status)
    threads = [threading.Thread(target=grow) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert statuses == [200] * 200 and growing.length() == 200
    nothing_left(server)


@pytest.mark.parametrize('Sq, batches', [(1, 1), (64, 2)], ids=['short', 'long'])
def test_long_steps_that_cannot_be_one_problem_are_not_joined(fake, gate, shm, Sq, batches):
    """A client whose step (decode) is in a batch waits for the whole batch. Only short steps may therefore share a
    batch. A step of more than PREPARE_ALONE_FLOPS operations is a batch of its own."""
    server = fake(f'hold={gate.path}@1+', *ALLOW)
    rng = np.random.default_rng(5)
    q, keys = rng.standard_normal((1, Sq, 8, 64)).astype(np.float16), wire.tensor(rng.standard_normal((8192, 2, 64)), 'float16')
    assert 4 * q.size * 8192 > 1e9 or Sq == 1
    region = shm(4 * q.nbytes, q.tobytes())
    assert register(server, 'in', region).status == 200
    ids = [server.post('/v1/caches', {'kv_heads': 2, 'head_dim': 64, 'dtype': 'float16'}).json()['id'] for _ in range(2)]
    for id_ in ids:
        assert server.post(f'/v1/caches/{id_}/append', {'k': keys, 'v': keys}).status == 200
    first = []
    for n in range(4 + GUESTS):  # sends as many requests as the device takes at the same time
        first.append(Asking(server, body(problem()[0], shared=())))
        running(server, n + 1)
    before = server.metric('attnd_batch_size_count')
    asking = []
    for n, id_ in enumerate(ids):
        outputs = [{'name': 'out', 'parameters': place('in', q.nbytes, (n + 1) * q.nbytes)}]
        data = step_body({'q': q}, {'q': 0}, {'caches': json.dumps([id_])}, outputs)
        asking.append(threading.Thread(target=lambda data=data: asked.append(server.ask('POST', DECODE, data).status)))
    asked = []
    for thread in asking:
        thread.start()
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='queued') == 2)
    gate.open()
    for thread in asking:
        thread.join()
    assert asked == [200, 200] and all(a.result().status == 200 for a in first)
    assert server.metric('attnd_batch_size_count') == before + batches
    nothing_left(server)


def test_caches_and_regions_must_be_of_one_device(fake, shm):
    server = fake('', *ALLOW, devices=2)
    q = {'q': np.ones((1, 1, 2, 8), np.float16)}
    one = shm(0, q['q'].tobytes())
    statuses = []
    ids = [server.post('/v1/caches', {'kv_heads': 2, 'head_dim': 8, 'dtype': 'float16'}).json()['id'] for _ in range(4)]
    for device in (0, 1):
        assert register(server, 'in', one, device=device).status == 200
        for id_ in ids:
            answer = server.ask('POST', DECODE, step_body(q, {'q': 0}, {'caches': json.dumps([id_])}))
            statuses.append(answer.status)
            if answer.status != 200:
                refused(answer, 400, 'the caches are in the memory of another device than the regions of shared memory')
        assert unregister(server).status == 200
    assert all(a != b for a, b in zip(statuses[:4], statuses[4:])), statuses


# ---- while a request runs --------------------------------------------------------------------------------------------

def test_a_region_that_is_unregistered_stays_open_for_the_request_that_uses_it(fake, gate, shm):
    server = fake(f'hold={gate.path}@1', *ALLOW)
    arrays, data = problem()
    one, out = shm(0, data), shm(256)
    assert register(server, 'in', one).status == 200 and register(server, 'out', out).status == 200
    asking = Asking(server, body(arrays, outputs={'out': place('out', 256), 'lse': {'binary_data': True}}))
    running(server)
    assert unregister(server).status == 200 and status(server).json() == []
    refused(infer(server, arrays), 404, "q: there is no region 'in'")
    assert mappings(server) == 2
    # the region was unregistered, so its name is free, although a request still uses the memory
    assert register(server, 'out', shm(64)).status == 200
    gate.open()
    answer = asking.result()
    want = by_json(server, arrays)
    assert outputs_of_some(answer) == {'lse': want['lse']} and out.read() == want['out']
    assert eventually(lambda: mappings(server) == 1)
    nothing_left(server)


@pytest.mark.parametrize('first', ['deadline', 'hang-up'])
def test_a_deadline_and_a_hang_up_give_it_up_once(fake, gate, shm, first):
    server = fake(f'hold={gate.path}@1', *ALLOW)
    arrays, data = problem()
    assert register(server, 'in', shm(0, data)).status == 200
    (name, value), = soon().items()
    s = server.raw()
    s.sendall(service.request_bytes(INFER, body(arrays), headers=[f'{name}: {value}']))
    gate.await_kernels()
    if first == 'deadline':
        time.sleep(LATE_S)
    s.close()
    assert eventually(lambda: server.metric('attnd_cancelled_total', state='running') == 1)
    if first == 'hang-up':
        time.sleep(LATE_S)
    assert server.get('/readyz').status == 200 and server.metric('attnd_inflight_requests', state='running') == 1
    gate.open()
    nothing_left(server)


@pytest.mark.parametrize('how', ['deadline', 'hang-up'])
def test_no_answer_before_the_kernels_are_done_with_the_clients_memory(fake, gate, shm, how):
    """A client may reuse its memory once it has an answer. If a request's deadline passes while its kernels run, the
    server therefore answers only when the kernels have ended."""
    server = fake(f'hold={gate.path}@1', *ALLOW)
    arrays, data = problem()
    one = shm(0, data)
    assert register(server, 'in', one).status == 200
    if how == 'deadline':
        asking = Asking(server, body(arrays), soon())
        gate.await_kernels()
        asking.join(LATE_S)
        assert asking.is_alive() and server.metric('attnd_inflight_requests', state='running') == 1
        gate.open()
        assert asking.result().status == 504
    else:
        with server.raw() as s:
            s.sendall(service.request_bytes(INFER, body(arrays)))
            gate.await_kernels()
        assert eventually(lambda: server.metric('attnd_cancelled_total', state='running') == 1)
        assert server.metric('attnd_inflight_requests', state='running') == 1
        gate.open()
    assert eventually(lambda: server.inflight() == 0)
    assert infer(server, arrays).status == 200
    nothing_left(server)


def test_closing_keeps_nobody_waiting(fake, gate, shm):
    """Before it closes shared memory, the driver may wait for everything that runs on the device. Neither clients nor
    the scheduler's loop (the server's main thread) must wait for that."""
    server = fake(f'release.hold={gate.path}@1', *ALLOW)
    arrays, data = problem()
    one, other = shm(0, data), shm(0, data)
    assert register(server, 'a', one).status == 200 and register(server, 'in', other).status == 200
    assert unregister(server, 'a').status == 200
    with service.Probe(server) as probe:
        for _ in range(5):
            assert infer(server, arrays).status == 200
        assert register(server, 'b', shm(64)).status == 200 and unregister(server, 'b').status == 200
    probe.check()
    assert mappings(server) == 3  # the mappings of the regions a, in and b
    gate.open()
    assert eventually(lambda: mappings(server) == 1)
    nothing_left(server)


@pytest.mark.parametrize('devices', [1, 2])
def test_a_device_that_is_lost_takes_its_regions_with_it(fake, shm, devices):
    server = fake('0:sync.err=700@1', *ALLOW, devices=devices)
    arrays, data = problem()
    one, two = shm(0, data), shm(0, data)
    assert register(server, 'in', one).status == 200
    assert devices == 1 or register(server, 'two', two, device=1).status == 200
    assert infer(server, arrays).status == 503
    if devices == 1:
        dies(server, 70)
        return
    refused(infer(server, arrays), 503, 'the GPU in whose memory the tensors are has failed')
    refused(register(server, 'more', one), 503, 'device 0 has failed')
    assert infer(server, arrays, region='two').status == 200
    assert unregister(server).status == 200 and eventually(lambda: mappings(server) == 0)


def test_what_waits_for_a_device_that_is_lost_does_not_wait_for_its_deadline(fake, gate, shm, tmp_path):
    """All requests have one token. The device has additional streams for guests, which are clients without another
    batch on the device (server/base/limits.h). With several tokens, requests would therefore run beside each other, and
    none would wait."""
    tokens = tmp_path / 'tokens'
    tokens.write_text('token-of-anna\n')
    anna = {'Authorization': 'Bearer token-of-anna'}
    server = fake(f'0:hold={gate.path}@1+,0:sync.err=700@1+', *ALLOW, '--max-batch', 1, '--token-file', tokens, devices=2)
    server.page_headers = anna
    arrays, data = problem()
    one = shm(0, data)
    assert register(server, 'in', one, headers=anna).status == 200
    asking = [Asking(server, body(arrays), anna) for _ in range(6)]
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == 4 and server.metric('attnd_inflight_requests', state='queued') == 2)
    gate.open()
    assert [a.result().status for a in asking] == 6 * [503]
    nothing_left(server, anna)


def test_a_device_that_is_lost_while_its_request_is_checked(fake, gate, shm):
    """The server looks up the regions of device memory that a request names. Then the device is lost. No other device
    can read these regions, so the request must fail at once instead of waiting for its deadline."""
    server = fake(f'0:plan.hold={gate.path}@1,0:import.err=700@2', *ALLOW, '--timeout-ms', 30000, devices=2)
    arrays, data = problem()
    assert register(server, 'in', shm(0, data)).status == 200
    # the spaces make the body so long that another thread than an HTTP thread checks it
    checked = Asking(server, body(arrays) + b' ' * (9 << 20))
    assert eventually(lambda: server.metric('attnd_inflight_requests', state='checking') == 1)
    assert register(server, 'more', shm(64)).status == 503
    assert eventually(lambda: server.metric('attnd_device_usable', device='fake:0') == 0)
    gate.open()
    refused(checked.result(), 503, 'the device that alone can compute this has failed')
    nothing_left(server)


def test_the_thread_that_received_a_request_may_launch_it_in_place(fake, gate, shm, monkeypatch):
    """If a device reads staging memory (the memory of request bodies) and is idle, the HTTP thread launches the request
    at once. If the deadline passes after the launch, the request is answered only when its kernels have ended."""
    monkeypatch.setenv('ATTN_FAKE_READS_STAGING', '1')
    gate.open()
    server = fake(f'0:hold={gate.path}', *ALLOW, devices=2)
    arrays, data = problem()
    one, out = shm(0, data), shm(256)
    assert register(server, 'in', one).status == 200 and register(server, 'out', out).status == 200
    want = by_json(server, arrays)
    outputs = {'out': place('out', 256), 'lse': {'binary_data': True}}
    for _ in range(3):
        out.write(bytes(256))
        assert outputs_of_some(infer(server, arrays, outputs=outputs)) == {'lse': want['lse']} and out.read() == want['out']
    gate.shut()
    asking = Asking(server, body(arrays, outputs=outputs), soon())
    running(server)
    asking.join(LATE_S)
    assert asking.is_alive() and server.metric('attnd_inflight_requests', state='running') == 1
    gate.open()
    assert asking.result().status == 504
    nothing_left(server)


@pytest.mark.parametrize('Sq, Sk', [(8192, 8), (1024, 1024)], ids=['many bytes', 'much work'])
def test_a_large_problem_is_launched_by_that_thread_where_all_of_it_is_on_the_device(fake, shm, monkeypatch, Sq, Sk):
    """If all tensors of a problem are on the device, an HTTP thread launches the problem itself, whatever its size. The
    limits on bytes (INLINE_BYTES) and work (PREPARE_SMALL_FLOPS) do not apply, because nothing is copied. If the
    tensors of the same problem are in the body, the problem waits in the queue."""
    monkeypatch.setenv('ATTN_FAKE_READS_STAGING', '1')
    server = fake('', *ALLOW)
    rng = np.random.default_rng(7)
    arrays = {n: rng.standard_normal((1, Sq if n == 'q' else Sk, 1, 64)).astype(np.float32) for n in 'qkv'}
    want = by_json(server, arrays)
    data = b''.join(a.tobytes() for a in arrays.values())
    assert len(data) + len(want['out']) > 1 << 20 or 4 * Sq * Sk * 64 > 1e8
    region = shm(len(data) + len(want['out']) + len(want['lse']), data)
    assert register(server, 'in', region).status == 200
    at, places = len(data), {}
    for name in ('out', 'lse'):
        places[name] = place('in', len(want[name]), at)
        at += len(want[name])

    def waited(outputs):
        region.write(bytes(len(want['out']) + len(want['lse'])), len(data))
        answer = infer(server, arrays, outputs=outputs)
        assert answer.status == 200, answer
        length = int(answer.headers.get('inference-header-content-length', len(answer.body)))
        queue = json.loads(json.loads(answer.body[:length])['parameters']['timing_us'])['queue']
        got = {n: region.read(p.get('shared_memory_offset', 0), len(want[n])) for n, p in outputs.items() if 'shared_memory_region' in p}
        assert got == {n: want[n] for n in got} and len(got) > 0
        return queue
    assert [waited(places) for _ in range(3)] == [0, 0, 0]
    assert waited({**places, 'out': {'binary_data': True}}) > 0
    nothing_left(server)


@pytest.mark.parametrize('late', [False, True], ids=['at once', 'after its deadline'])
@pytest.mark.parametrize('devices', [1, 2])
def test_a_device_that_hangs_is_not_waited_for(fake, shm, devices, late):
    server = fake('0:event.never@1', *ALLOW, '--watchdog-ms', 3000, devices=devices)
    arrays, data = problem()
    one, two = shm(0, data), shm(0, data)
    assert register(server, 'in', one).status == 200
    assert devices == 1 or register(server, 'two', two, device=1).status == 200
    answer = server.ask('POST', INFER, body(arrays), {'X-Request-Timeout-Ms': '1000'} if late else ())
    assert answer.status == (504 if late else 503), answer.body
    if devices == 1:
        dies(server, 70)
        return
    refused(infer(server, arrays), 503, 'the GPU in whose memory the tensors are has failed')
    assert infer(server, arrays, region='two').status == 200
    os.kill(server.pid, signal.SIGTERM)
    dies(server, 0, 30)


def test_a_neighbour_in_the_batch_is_computed_though_a_request_is_given_up(fake, gate, shm):
    server = fake(f'hold={gate.path}@1+', *ALLOW, '--batch-window-us', 300000)
    arrays, data = problem()
    one = shm(0, data)
    assert register(server, 'in', one).status == 200
    late = Asking(server, body(arrays), {'X-Request-Timeout-Ms': '1500'})
    patient = Asking(server, body(arrays, shared=()))
    running(server, 2)
    late.join(2)
    assert late.is_alive() and patient.is_alive()
    gate.open()
    assert late.result().status == 504 and outputs_of(patient.result()) == by_json(server, arrays)
    nothing_left(server)


@pytest.mark.limit(120)
def test_many_at_once_while_regions_come_and_go(fake, shm):
    server = fake('', *BOTH, devices=2)
    arrays, data = problem()
    want = by_json(server, arrays)
    regions = [shm(0, data + bytes(256)) for _ in range(2)]
    wrong = []

    def ask(n):
        connection = server.connect()
        for i in range(60):
            name = f'r{n % 2}'
            if i % 10 == n:
                connection.ask('POST', f'/v2/cudasharedmemory/region/{name}/unregister', b'')
            made = {'raw_handle': {'b64': raw_handle(regions[n % 2], n % 2).decode()}, 'device_id': n % 2, 'byte_size': regions[n % 2].size}
            if i % 3 == 0:
                connection.ask('POST', f'/v2/cudasharedmemory/region/{name}/register', json.dumps(made).encode())
            answer = connection.ask('POST', INFER, body(arrays, region=name, shared='q' if i % 2 else 'qkv'))
            if answer.status not in (200, 404) or (answer.status == 200 and i % 2 == 0 and outputs_of(answer) != want):
                wrong.append(answer)
        connection.close()
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[:3]
    nothing_left(server)


def test_a_server_stops_with_regions_and_with_a_request_that_uses_them(fake, gate, shm):
    server = fake(f'hold={gate.path}@1', *ALLOW, '--drain-ms', 200)
    arrays, data = problem()
    one = shm(0, data)
    assert register(server, 'in', one).status == 200
    asking = Asking(server, body(arrays))
    running(server)
    os.kill(server.pid, signal.SIGTERM)
    assert asking.result().status == 503
    gate.open()
    dies(server, 0)


# ---- tokens and limits -----------------------------------------------------------------------------------------------

def test_regions_belong_to_the_token_that_registered_them(fake, shm, tmp_path):
    tokens = tmp_path / 'tokens'
    tokens.write_text('token-of-anna\ntoken-of-bert\n')
    server = fake('', *ALLOW, '--token-file', tokens)
    anna, bert = ({'Authorization': f'Bearer token-of-{n}'} for n in ('anna', 'bert'))
    server.page_headers = bert
    arrays, data = problem()
    one, other = shm(0, data), shm(0, data)
    assert register(server, 'in', one).status == 401
    assert register(server, 'in', one, headers=anna).status == 200
    refused(status(server, 'in', bert), 404, "there is no region 'in'")
    assert status(server, headers=bert).json() == []
    refused(infer(server, arrays, headers=bert), 404, "q: there is no region 'in'")
    assert unregister(server, 'in', bert).status == 200 and unregister(server, headers=bert).status == 200
    refused(register(server, 'mine', one, headers=bert), 409, 'raw_handle: is registered by another token', pointer='/raw_handle')
    assert register(server, 'in', other, headers=bert).status == 200
    assert infer(server, arrays, headers=anna).status == 200 and infer(server, arrays, headers=bert).status == 200
    connection = server.connect()
    made = json.dumps({'raw_handle': {'b64': raw_handle(one).decode()}, 'device_id': 0, 'byte_size': 64}).encode()
    answers = [connection.ask('POST', f'/v2/cudasharedmemory/region/{i}/register', made, anna) for i in range(512)]
    connection.close()
    assert [a.status for a in answers] == 511 * [200] + [429] and 'its share is 512' in answers[-1].json()['error']
    tokens.write_text('token-of-bert\n')
    os.kill(server.pid, signal.SIGHUP)
    assert eventually(lambda: server.metric('attnd_shared_memory_regions', kind='cuda') == 1)
    assert eventually(lambda: mappings(server) == 1)
    assert infer(server, arrays, headers=bert).status == 200


def test_bytes_of_regions_have_a_limit_that_both_kinds_share(fake, shm):
    server = fake('', *BOTH)
    limit = server.get('/v1/info').json()['limits']['shared_memory_bytes']
    one, two = shm(limit), shm(64)
    refused(register(server, 'all', one, limit + 1), 413, f'byte_size: is {limit + 1}, all regions may have {limit} bytes together')
    assert register_system(server, 'most', one).status == 200
    refused(register(server, 'more', two), 507, 'unregister what is not used')
    assert mappings(server) == 0


@pytest.mark.limit(200)
@pytest.mark.skipif(not find_schemathesis(), reason='schemathesis is not here (tests/setup.sh test fetches it from PyPI)')
def test_schemathesis(fake, tmp_path):
    """Runs schemathesis as test_shared_memory.py does, on the routes that --allow-cuda-shm adds."""
    server = fake('', *ALLOW)
    run = subprocess.run(
        [find_schemathesis(), '--config-file', os.path.join(service.HERE, 'http/schemathesis.toml'), 'run', f'{server.url}/openapi.json', '--checks', 'all', '--max-examples', '15',
         '--phases', 'examples,coverage,fuzzing', '--seed', '1', '--request-timeout', '20', '--no-color', '--include-path-regex', 'cudasharedmemory'],
        cwd=tmp_path, env=dict(os.environ, SCHEMATHESIS_HOOKS='schemathesis_hooks', PYTHONPATH=os.path.join(service.HERE, 'http')),
        capture_output=True, text=True, timeout=190 * service.SLOWER)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]


def test_a_page_of_another_site_cannot_register(fake, shm):
    server = fake('', *ALLOW)
    answer = server.ask('POST', '/v2/cudasharedmemory/region/r/register', b'{}', {'Origin': 'https://elsewhere.example', 'Content-Type': 'text/plain'})
    assert answer.status == 403
