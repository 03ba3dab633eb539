"""Calls of the unmodified Triton client and of its library for shared memory, for test_shared_memory.py, run by the
Python that has them:

    python triton_shared.py CHECK http://127.0.0.1:8080

The server must have --allow-shm attn_. Each CHECK is a function below, which raises an exception if the check fails."""
import asyncio
import contextlib
import sys
import uuid

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from triton_calls import HOST, by_json, given, refused, same, tensors, wanted
from tritonclient.utils import np_to_triton_dtype


@contextlib.contextmanager
def memory(byte_size):
    """Makes an object of /dev/shm with Triton's library. Yields its handle and its key."""
    key = '/attn_' + uuid.uuid4().hex
    handle = shm.create_shared_memory_region('region', key, byte_size)
    try:
        yield handle, key
    finally:
        shm.destroy_shared_memory_region(handle)


def sizes(arrays):
    """Lays the arrays out one after the other. Returns {name: offset}, and the offset of the first byte after the last
    array."""
    at, end = {}, 0
    for name, a in arrays.items():
        at[name] = end
        end += a.nbytes
    return at, end


def in_region(arrays, region, at):
    inputs = []
    for name, a in arrays.items():
        inputs.append(triton.InferInput(name, list(a.shape), np_to_triton_dtype(a.dtype)))
        inputs[-1].set_shared_memory(region, a.nbytes, offset=at[name])
    return inputs


def to_region(name, region, byte_size, offset=0):
    output = triton.InferRequestedOutput(name)
    output.set_shared_memory(region, byte_size, offset=offset)
    return output


def holds(handle, array, at, must):
    got = shm.get_contents_as_numpy(handle, array.dtype, list(array.shape), offset=at)
    assert got.tobytes() == must
    del got


def inputs_and_outputs():
    with triton.InferenceServerClient(HOST) as c:
        c.unregister_system_shared_memory()  # Triton's examples and its tool perf_analyzer begin with this call
        c.unregister_cuda_shared_memory()
        assert 'system_shared_memory' in c.get_server_metadata()['extensions']
        # small tensors are read at once, and large tensors in pieces
        for dtype, shape in ((np.float32, (1, 7, 2, 8)), (np.float16, (2, 300, 4, 64)), (np.float32, (1, 512, 8, 64))):
            t = tensors(dtype=dtype, shape=shape)
            at, end = sizes(t)
            want = by_json('forward', t)
            lse = np.zeros((shape[0], shape[2], shape[1]), np.float32)
            with memory(end) as (inputs, input_key), memory(t['q'].nbytes + lse.nbytes) as (outputs, output_key):
                c.register_system_shared_memory('input data', input_key, end)
                c.register_system_shared_memory('output data', output_key, t['q'].nbytes + lse.nbytes)
                shm.set_shared_memory_region(inputs, list(t.values()))
                result = c.infer('attention_forward', in_region(t, 'input data', at), request_id='7',
                                 outputs=[to_region('out', 'output data', t['q'].nbytes), to_region('lse', 'output data', lse.nbytes, t['q'].nbytes)])
                holds(outputs, t['q'], 0, want['out'])
                holds(outputs, lse, t['q'].nbytes, want['lse'])
                assert result.get_response()['id'] == '7'
                for output in result.get_response()['outputs']:
                    # Triton's C++ client accepts no parameters in an output that was written to shared memory
                    assert set(output) == {'name', 'datatype', 'shape'}, output
                assert result.get_output('lse')['shape'] == list(lse.shape)
                same(c.infer('attention_forward', in_region(t, 'input data', at)), want)
                c.unregister_system_shared_memory('input data')
                c.unregister_system_shared_memory()


def mixtures():
    """Among the inputs and among the outputs, some tensors are in shared memory, some are bytes after the JSON, and
    some are numbers in the JSON."""
    with triton.InferenceServerClient(HOST) as c:
        t = tensors(['q', 'k', 'v', 'dout'], dtype=np.float32)
        want = by_json('backward', t)
        size = t['q'].nbytes
        with memory(5 * size + 3) as (handle, key):
            # an offset of 1 makes every tensor's address unaligned
            c.register_system_shared_memory('all', key, 5 * size + 2, offset=1)
            for shared in (['k'], ['q', 'dout'], ['v'], ['q', 'k', 'v', 'dout']):
                for i, name in enumerate(shared):
                    shm.set_shared_memory_region(handle, [t[name]], offset=1 + i * size + 1)
                inputs = in_region({n: t[n] for n in shared}, 'all', {n: i * size + 1 for i, n in enumerate(shared)})
                left = [n for n in t if n not in shared]
                for binary in ({n: i % 2 == 0 for i, n in enumerate(left)}, {n: i % 2 == 1 for i, n in enumerate(left)}):
                    rest = [given({n: t[n]}, binary[n])[0] for n in left]
                    result = c.infer('attention_backward', inputs + rest,
                                     outputs=[to_region('dk', 'all', size + 1, 4 * size + 1)] + wanted(['dq']) + wanted(['dv'], binary=False))
                    same(result, {n: want[n] for n in ('dq', 'dv')})
                    holds(handle, t['k'], 1 + 4 * size + 1, want['dk'])
            c.unregister_system_shared_memory('all')


def status():
    with triton.InferenceServerClient(HOST) as c:
        assert c.get_system_shared_memory_status() == [] and c.get_cuda_shared_memory_status() == []
        with memory(8192) as (_, key):
            c.register_system_shared_memory('one', key, 4096)
            c.register_system_shared_memory('the "other"', key.lstrip('/'), 100, offset=64)
            one = {'name': 'one', 'key': key, 'offset': 0, 'byte_size': 4096}
            other = {'name': 'the "other"', 'key': key.lstrip('/'), 'offset': 64, 'byte_size': 100}
            assert sorted(c.get_system_shared_memory_status(), key=lambda r: r['name']) == [one, other]
            assert c.get_system_shared_memory_status('the "other"') == [other]
            refused(lambda: c.get_system_shared_memory_status('two'), "there is no region 'two'", status=404)
            refused(lambda: c.register_system_shared_memory('one', key, 64), "the region 'one' is registered already", status=409)
            # unregistering an unknown region succeeds, as Triton's server does it
            c.unregister_system_shared_memory('two')
            c.unregister_system_shared_memory('one')
            assert c.get_system_shared_memory_status() == [other]
            c.register_system_shared_memory('one', key, 64)
            c.unregister_system_shared_memory()
            assert c.get_system_shared_memory_status() == []


def refusals():
    with triton.InferenceServerClient(HOST) as c:
        t = tensors(dtype=np.float32, shape=(1, 4, 2, 8))
        size = t['q'].nbytes
        refused(lambda: c.register_system_shared_memory('r', '/other', 64), 'key: must begin with /attn_', status=400)
        refused(lambda: c.register_system_shared_memory('r', '/attn_nothing', 64), 'there is no such object', status=400)
        refused(lambda: c.register_cuda_shared_memory('r', b'aGFuZGxl', 0, 64), 'shared memory of a GPU is not offered here', status=501)
        with memory(size) as (_, key):
            refused(lambda: c.register_system_shared_memory('r', key, 10 * size + 5000), 'go past the end', status=400)
            c.register_system_shared_memory('r', key, size)
            q, k, v = given(t)
            shared, = in_region({'q': t['q']}, 'r', {'q': 0})
            refused(lambda: c.infer('attention_forward', in_region({'q': t['q']}, 'none', {'q': 0}) + [k, v]), "q: there is no region 'none'", status=404)
            refused(lambda: c.infer('attention_forward', in_region({'q': t['q']}, 'r', {'q': 4}) + [k, v]), 'go past the end of the region', status=400)
            shared.set_shared_memory('r', size - 4)
            refused(lambda: c.infer('attention_forward', [shared, k, v]), f'q: data has {size - 4} bytes', status=400)
            refused(lambda: c.infer('attention_forward', [q, k, v], outputs=[to_region('out', 'r', size - 1)]), f'out: has {size} bytes, shared_memory_byte_size is {size - 1}', status=400)
            refused(lambda: c.infer('attention_forward', [q, k, v], outputs=[to_region('out', 'r', size), to_region('lse', 'r', 32, size - 32)]), 'would be written over out', status=400)
            # the connection must still be usable after an error
            same(c.infer('attention_forward', [q, k, v]), by_json('forward', t))
            c.unregister_system_shared_memory()


def aio():
    async def all_of_it():
        t = tensors(shape=(1, 200, 4, 64))
        at, end = sizes(t)
        want = by_json('forward', t)
        async with triton_aio.InferenceServerClient(HOST) as c:
            with memory(end + 4 * t['q'].nbytes) as (handle, key):
                await c.register_system_shared_memory('r', key, end + 4 * t['q'].nbytes)
                assert (await c.get_system_shared_memory_status('r'))[0]['key'] == key
                shm.set_shared_memory_region(handle, list(t.values()))
                results = await asyncio.gather(*[c.infer('attention_forward', in_region(t, 'r', at), outputs=[to_region('out', 'r', t['q'].nbytes, end + i * t['q'].nbytes)] + wanted(['lse']))
                                                 for i in range(4)])
                for i, result in enumerate(results):
                    same(result, {'lse': want['lse']})
                    holds(handle, t['q'], end + i * t['q'].nbytes, want['out'])
                await c.unregister_system_shared_memory('r')
                await c.unregister_system_shared_memory()
                assert await c.get_system_shared_memory_status() == []
    asyncio.run(all_of_it())


CHECKS = [inputs_and_outputs, mixtures, status, refusals, aio]

if __name__ == '__main__':
    {check.__name__: check for check in CHECKS}[sys.argv[1]]()
