"""Calls of the unmodified Triton client (tritonclient[http], from PyPI) for test_kserve.py, run by the Python that has
the client:

    python triton_calls.py CHECK http://127.0.0.1:8080

Each CHECK is a function below, which raises an exception if the check fails."""
import asyncio
import base64
import json
import sys
import urllib.request

import ml_dtypes
import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

URL = sys.argv[2]
HOST = URL.removeprefix('http://')
RNG = np.random.default_rng(3)
NAMES = {np.dtype(np.float32): 'float32', np.dtype(np.float16): 'float16', np.dtype(ml_dtypes.bfloat16): 'bfloat16', np.dtype(np.int32): 'int32'}


def tensors(names='qkv', shape=(2, 7, 4, 16), dtype=np.float16, **more):
    made = {name: RNG.standard_normal(shape).astype(dtype) for name in names}
    made.update(more)
    return made


def given(arrays, binary=True):
    inputs = []
    for name, a in arrays.items():
        inputs.append(triton.InferInput(name, list(a.shape), np_to_triton_dtype(a.dtype)))
        inputs[-1].set_data_from_numpy(a, binary_data=binary)
    return inputs


def wanted(names, binary=True):
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def by_json(op, arrays, **options):
    """Sends a problem to /v1 as JSON, for comparison with the Triton client. Returns the answer's tensors as {name:
    bytes}."""
    body = {name: {'shape': a.shape, 'dtype': NAMES[a.dtype], 'data': base64.b64encode(a.tobytes()).decode()} for name, a in arrays.items()}
    request = urllib.request.Request(f'{URL}/v1/attention/{op}', json.dumps({**body, **options}).encode(), {'Content-Type': 'application/json'})
    with urllib.request.urlopen(request) as answer:
        answer = json.load(answer)
    return {name: base64.b64decode(t['data']) for name, t in answer.items() if isinstance(t, dict) and 'data' in t}


def same(result, want):
    for name, must in want.items():
        got = result.as_numpy(name)
        assert got is not None and got.tobytes() == must, name


def refused(call, *says, status):
    try:
        answer = call()
    except InferenceServerException as e:
        assert e.status() == str(status), e
        for part in says:
            assert part in e.message(), e.message()
        return
    raise AssertionError(f'{answer} was not refused')


def metadata():
    with triton.InferenceServerClient(HOST) as c:
        assert c.is_server_live() and c.is_server_ready()
        names = [m['name'] for m in c.get_model_repository_index()]
        assert len(names) == len(set(names)) and {'attention_forward', 'attention_backward_bf16_causal', 'attention_decode_fp16', 'attention_merge'} <= set(names), names
        assert c.get_server_metadata()['name'] == 'attnd' and 'statistics' in c.get_server_metadata()['extensions']
        for name in names:
            assert c.is_model_ready(name) and c.is_model_ready(name, '1')
            meta, config = c.get_model_metadata(name), c.get_model_config(name, '1')
            assert meta['name'] == config['name'] == name and meta['versions'] == ['1']
            for of, conf in (('inputs', 'input'), ('outputs', 'output')):
                assert [t['name'] for t in meta[of]] == [t['name'] for t in config[conf]]
                assert ['TYPE_' + t['datatype'].replace('BYTES', 'STRING') for t in meta[of]] == [t['data_type'] for t in config[conf]]
            inputs = ['parts.0.out', 'parts.0.lse'] if name == 'attention_merge' else ['q', 'k'] if 'observe' in name else ['q', 'k', 'v'] + (['dout'] if 'backward' in name else [])
            assert [t['name'] for t in meta['inputs']] == inputs
            for inputs in meta['inputs'], config['input']:
                assert [t['name'] for t in inputs if t.get('optional')] == (['k', 'v'] if 'decode' in name else [])
        assert not c.is_model_ready('attention') and not c.is_model_ready('attention_forward', '2')
        refused(lambda: c.get_model_metadata('attn fwd'), "there is no model 'attn fwd'", 'attention_backward', status=404)
        refused(lambda: c.get_model_config('attention_forward', '2'), "no version '2'", status=404)
        refused(lambda: c.get_inference_statistics('atention_forward'), "did you mean 'attention_forward'?", status=404)


def infer_forward():
    with triton.InferenceServerClient(HOST) as c:
        for dtype, model in ((np.float32, 'attention_forward'), (np.float16, 'attention_forward_fp16'), (ml_dtypes.bfloat16, 'attention_forward_bf16')):
            t = tensors(dtype=dtype)
            want = by_json('forward', t)
            result = c.infer(model, given(t), request_id='a "quoted" id')
            same(result, want)
            assert result.get_response()['id'] == 'a "quoted" id' and result.get_response()['model_name'] == model
            assert result.get_output('lse')['shape'] == [2, 4, 7]
            same(c.infer(model + '_causal', given(t)), by_json('forward', t, causal=True))
            # bfloat16 is left out, because the client sends and reads it only as bytes
            if dtype is not ml_dtypes.bfloat16:
                same(c.infer(model, given(t, binary=False), outputs=wanted(['out', 'lse'], binary=False), model_version='1'), want)
                same(c.infer(model, given(t, binary=False), outputs=wanted(['lse'])), {'lse': want['lse']})
                same(c.infer(model, given(t), outputs=wanted(['lse']) + wanted(['out'], binary=False)), want)
        t = tensors(shape=(1, 300, 2, 64))  # a body so large that it arrives in many pieces
        same(c.infer('attention_forward', given(t)), by_json('forward', t))


def infer_options():
    with triton.InferenceServerClient(HOST) as c:
        t = tensors(dtype=np.float32, bias=RNG.standard_normal((1, 1, 7, 7)).astype(np.float32), seqlens_k=np.array([7, 3], np.int32))
        t['bias'][..., 2] = -np.inf
        options = {'scale': 0.25, 'layout': 'bshd', 'causal': True, 'window': [3, -1], 'softcap': 5.5, 'alignment': 'top_left'}
        parameters = {**options, 'window': '[3,-1]'}
        want = by_json('forward', t, **options)
        for binary in (True, False):  # if not binary, the client writes -Infinity and true into its JSON
            same(c.infer('attention_forward', given(t, binary), parameters=parameters, priority=2, timeout=60_000_000), want)
        mask = RNG.random((1, 1, 7, 7)) < 0.7
        t = tensors()
        plain = {**t, 'keep_mask': mask}
        want = by_json_mask(t, mask)
        for binary in (True, False):
            same(c.infer('attention_forward', given(plain, binary)), want)
        t = {**tensors(), 'cu_seqlens_q': np.array([0, 3, 7], np.int64), 'cu_seqlens_k': np.array([0, 2, 7], np.int64)}
        t.update({n: t[n][0] for n in 'qkv'})
        same(c.infer('attention_forward', given(t)), by_json('forward', {n: a.astype(np.int32) if n[0] == 'c' else a for n, a in t.items()}))


def by_json_mask(t, mask):
    body = {name: {'shape': a.shape, 'dtype': NAMES[a.dtype], 'data': base64.b64encode(a.tobytes()).decode()} for name, a in t.items()}
    body['keep_mask'] = {'shape': mask.shape, 'dtype': 'bool', 'data': base64.b64encode(mask.tobytes()).decode()}
    with urllib.request.urlopen(urllib.request.Request(f'{URL}/v1/attention/forward', json.dumps(body).encode(), {'Content-Type': 'application/json'})) as answer:
        answer = json.load(answer)
    return {name: base64.b64decode(answer[name]['data']) for name in ('out', 'lse')}


def infer_backward():
    with triton.InferenceServerClient(HOST) as c:
        t = tensors(['q', 'k', 'v', 'dout'], dtype=np.float32)
        for model, options in (('attention_backward', {}), ('attention_backward_fp32_causal', {'causal': True})):
            same(c.infer(model, given(t)), by_json('backward', t, **options))
        contexts = [c.infer('attention_forward', given({n: t[n] for n in 'qkv'}), parameters={'save': True}).get_response()['parameters']['context'] for _ in range(2)]
        dout = {'dout': t['dout']}
        same(c.infer('attention_backward', given(dout), parameters={'context': contexts[0]}), by_json('backward', dout, context=contexts[1]))


def async_infer():
    t = tensors()
    want = by_json('forward', t)
    with triton.InferenceServerClient(HOST, concurrency=4) as c:
        waiting = [c.async_infer('attention_forward', given(t), request_id=str(i)) for i in range(16)]
        for i, one in enumerate(waiting):
            result = one.get_result()
            same(result, want)
            assert result.get_response()['id'] == str(i)
        refused(lambda: c.async_infer('attention_forward', given({'q': t['q']})).get_result(), 'k: is required', status=400)


def empty_and_unseen():
    with triton.InferenceServerClient(HOST) as c:
        t = {'q': np.zeros((1, 3, 1, 8), np.float32), 'k': np.zeros((1, 1, 1, 8), np.float32), 'v': np.ones((1, 1, 1, 8), np.float32)}
        for binary in (True, False):  # two queries see no key, so their lse is -inf, sent as bytes or as -Infinity
            lse = c.infer('attention_forward_causal', given(t, binary), outputs=wanted(['lse'], binary)).as_numpy('lse')
            assert lse.tolist() == [[[-np.inf, -np.inf, 0]]], lse
        t['q'] = t['q'][:, :0]
        result = c.infer('attention_forward', given(t))
        assert result.as_numpy('out').shape == (1, 0, 1, 8) and result.as_numpy('lse').shape == (1, 1, 0)


def refusals():
    with triton.InferenceServerClient(HOST) as c:
        t = tensors()
        refused(lambda: c.infer('nothing', given(t)), "there is no model 'nothing'", status=404)
        refused(lambda: c.infer('attention_forward', given(t), model_version='7'), "no version '7'", status=404)
        refused(lambda: c.infer('attention_forward_fp32', given(t)), 'takes FP32', status=400)
        refused(lambda: c.infer('attention_forward', given({**t, 'k': t['k'][..., :8]})), 'k: shape[3] is 8, must be 16, the head size of q', status=400)
        refused(lambda: c.infer('attention_forward', given(t), outputs=wanted(['dq'])), 'must be out or lse', status=400)
        refused(lambda: c.infer('attention_forward', given(t), parameters={'casual': True}), "did you mean 'causal'?", status=400)
        refused(lambda: c.infer('attention_forward', given(t), sequence_id=4, sequence_start=True), 'there are no sequences here', status=400)
        refused(lambda: c.infer('attention_forward', given(t), outputs=[triton.InferRequestedOutput('out', class_count=2)]), 'nothing is classified here', status=400)
        shared = triton.InferInput('q', [1, 1, 1, 1], 'FP32')
        shared.set_shared_memory('region', 4)
        refused(lambda: c.infer('attention_forward', [shared]), 'shared memory is not offered here', status=400)
        no_shared = 'shared memory is not offered here'
        for call in (c.get_system_shared_memory_status, c.get_cuda_shared_memory_status, c.unregister_system_shared_memory, c.unregister_cuda_shared_memory,
                     lambda: c.get_system_shared_memory_status('r'), lambda: c.unregister_cuda_shared_memory('r'),
                     lambda: c.register_system_shared_memory('r', '/r', 64), lambda: c.register_cuda_shared_memory('r', b'aGFuZGxl', 0, 64)):
            refused(call, no_shared, status=501)
        for call in (lambda: c.load_model('attention_forward'), lambda: c.unload_model('attention_forward')):
            refused(call, 'models are not loaded or unloaded here', status=501)
        for call in (c.get_trace_settings, c.get_log_settings, lambda: c.get_trace_settings('attention_forward'),
                     lambda: c.update_trace_settings(settings={'trace_level': ['OFF']}), lambda: c.update_log_settings({'log_info': True})):
            refused(call, 'traces and logs are set when the server starts', status=501)
        # the connection must still be usable after an error
        same(c.infer('attention_forward', given(t)), by_json('forward', t))


def compression():
    """The server unpacks compressed requests, but never compresses answers, whatever the client accepts."""
    t = tensors()
    mask = {**t, 'keep_mask': RNG.random((1, 1, 7, 7)) < 0.7}
    large = tensors(shape=(1, 500, 4, 64))
    want, want_large, want_mask = by_json('forward', t), by_json('forward', large), by_json_mask(t, mask['keep_mask'])
    with triton.InferenceServerClient(HOST) as c:
        for how in ('gzip', 'deflate'):
            for binary in (True, False):
                same(c.infer('attention_forward', given(t, binary), request_compression_algorithm=how), want)
            same(c.infer('attention_forward', given(large), request_compression_algorithm=how, response_compression_algorithm=how), want_large)
            same(c.infer('attention_forward', given(mask), request_compression_algorithm=how), want_mask)
            for kind in (True, False):
                same(c.infer('attention_forward', given(t), outputs=wanted(['out', 'lse'], kind), response_compression_algorithm=how), want)
            same(c.async_infer('attention_forward', given(t), request_compression_algorithm=how, response_compression_algorithm=how).get_result(), want)
            refused(lambda: c.infer('attention_forward', given({'q': t['q']}), request_compression_algorithm=how), 'k: is required', status=400)

    async def all_of_it():
        async with triton_aio.InferenceServerClient(HOST) as c:
            for how in ('gzip', 'deflate'):
                for result in await asyncio.gather(*[c.infer('attention_forward', given(large), request_compression_algorithm=how, response_compression_algorithm=how)
                                                     for _ in range(4)]):
                    same(result, want_large)
    asyncio.run(all_of_it())


def statistics():
    with triton.InferenceServerClient(HOST) as c:
        def stats():
            one, = c.get_inference_statistics('attention_backward_fp16_causal', '1')['model_stats']
            return one
        before = stats()
        t = tensors(['q', 'k', 'v', 'dout'])
        for _ in range(3):
            c.infer('attention_backward_fp16_causal', given(t))
        refused(lambda: c.infer('attention_backward_fp16_causal', given({'q': t['q']})), 'is required', status=400)
        after = stats()
        assert after['inference_count'] == before['inference_count'] + 3 and after['execution_count'] == before['execution_count'] + 3
        for part in ('success', 'queue', 'compute_input', 'compute_infer', 'compute_output'):
            assert after['inference_stats'][part]['count'] == before['inference_stats'][part]['count'] + 3, part
        for part in ('success', 'compute_input', 'compute_infer', 'compute_output'):
            assert after['inference_stats'][part]['ns'] > before['inference_stats'][part]['ns'], part
        assert after['inference_stats']['fail']['count'] == before['inference_stats']['fail']['count'] + 1
        assert after['last_inference'] > 1_600_000_000_000 and after['batch_stats'][0]['compute_infer']['count'] >= 3
        assert [s['name'] for s in c.get_inference_statistics()['model_stats']] == [m['name'] for m in c.get_model_repository_index()]


def decoding():
    """Decodes with sequences (decode sessions of KServe) and with caches. The results of the last queries agree, within
    float16's accuracy, with a causal forward over all keys at /v1."""
    def close(result, q, k, v):
        want = by_json('forward', {'q': q, 'k': k, 'v': v}, causal=True)['out']
        got = result.as_numpy('out')
        assert np.abs(got.astype(float) - np.frombuffer(want, np.float16).reshape(got.shape).astype(float)).max() < 4e-3

    def step(c, n, arrays, **more):
        new = {name: RNG.standard_normal((1, n, *shape)).astype(np.float16) for name, shape in (('q', (4, 16)), ('k', (2, 16)), ('v', (2, 16)))}
        arrays['q'] = new['q']
        for name in 'kv':
            arrays[name] = np.concatenate([arrays[name], new[name]], 1) if name in arrays else new[name]
        result = c.infer('attention_decode_causal', given(new), **more)
        close(result, **arrays)
        return result
    with triton.InferenceServerClient(HOST) as c:
        assert 'sequence_batching' in c.get_model_config('attention_decode')
        one, other = {}, {}
        result = step(c, 70, one, sequence_id=7, sequence_start=True)
        assert json.loads(result.get_response()['parameters']['lengths']) == [70]
        step(c, 3, other, sequence_id='a name', sequence_start=True)
        step(c, 1, one, sequence_id=7)
        step(c, 1, other, sequence_id='a name')
        close(c.infer('attention_decode_causal', given({'q': one['q']}), sequence_id=7), **one)
        step(c, 2, one, sequence_id=7, sequence_end=True)
        refused(lambda: c.infer('attention_decode', given({'q': one['q']}), sequence_id=7), "sequence_id: '7' has not been started", status=404)
        again = {}
        # a new sequence with the same id replaces the old one
        step(c, 5, again, sequence_id='a name', sequence_start=True)
        step(c, 5, again, sequence_id='a name', sequence_end=True)
        long = {}
        step(c, 2, long, sequence_id='n' * 128, sequence_start=True)
        step(c, 1, long, sequence_id='n' * 128, sequence_end=True)
        refused(lambda: c.infer('attention_decode', given({'q': one['q']}), sequence_id=9, sequence_start=True), 'has k and v', status=400)
        refused(lambda: c.infer('attention_decode', given({'q': one['q']})), 'caches: is missing', status=400)
        made = json.load(urllib.request.urlopen(urllib.request.Request(f'{URL}/v1/caches', json.dumps({'kv_heads': 2, 'head_dim': 16, 'dtype': 'float16'}).encode())))
        by_id = {}
        for n in 10, 1:
            result = step(c, n, by_id, parameters={'caches': json.dumps([made['id']])})
        assert json.loads(result.get_response()['parameters']['lengths']) == [11]
        refused(lambda: c.infer('attention_decode', given({'q': one['q']}), sequence_id=7, parameters={'caches': json.dumps([made['id']])}), 'cannot stand beside sequence_id', status=400)
        urllib.request.urlopen(urllib.request.Request(f'{URL}/v1/caches/{made["id"]}', method='DELETE'))


def aio():
    async def all_of_it():
        async with triton_aio.InferenceServerClient(HOST) as c:
            assert await c.is_server_live() and await c.is_server_ready() and await c.is_model_ready('attention_forward')
            assert not await c.is_model_ready('nothing')
            assert (await c.get_server_metadata())['name'] == 'attnd'
            assert (await c.get_model_metadata('attention_forward'))['name'] == 'attention_forward'
            assert (await c.get_model_config('attention_forward'))['max_batch_size'] == 0
            assert 'attention_merge' in {m['name'] for m in await c.get_model_repository_index()}
            assert (await c.get_inference_statistics('attention_forward'))['model_stats'][0]['version'] == '1'
            t = tensors()
            want = by_json('forward', t)
            for result in await asyncio.gather(*[c.infer('attention_forward', given(t)) for _ in range(16)]):
                same(result, want)
            same(await c.infer('attention_forward', given(t, binary=False), outputs=wanted(['out', 'lse'], binary=False)), want)
            for call, status, says in ((c.infer('attention_forward', given({'q': t['q']})), '400', 'k: is required'),
                                       (c.get_model_metadata('nothing'), '404', 'there is no model'),
                                       (c.get_system_shared_memory_status(), '501', 'shared memory is not offered here'),
                                       (c.register_system_shared_memory('r', '/r', 64), '501', 'shared memory is not offered here'),
                                       (c.load_model('attention_forward'), '501', 'models are not loaded'),
                                       (c.get_log_settings(), '501', 'traces and logs')):
                try:
                    await call
                except InferenceServerException as e:
                    assert e.status() == status and says in e.message(), e
                else:
                    raise AssertionError(f'{says}: not refused')
    asyncio.run(all_of_it())


def merging():
    """Merges results over parts of the keys, and asks for the gradients by name."""
    parts = {}
    for p in range(2):
        parts[f'parts.{p}.out'] = RNG.standard_normal((1, 5, 2, 8)).astype(np.float32)
        parts[f'parts.{p}.lse'] = RNG.standard_normal((1, 2, 5)).astype(np.float32)
    with triton.InferenceServerClient(HOST) as c:
        result = c.infer('attention_merge', given({**parts, 'dout': np.ones((1, 5, 2, 8), np.float32)}), outputs=wanted(['out', 'lse', 'parts.0.dout', 'parts.1.dlse']))
    lse = np.logaddexp(parts['parts.0.lse'], parts['parts.1.lse'])
    weights = [np.exp(parts[f'parts.{p}.lse'] - lse).swapaxes(1, 2)[..., None] for p in range(2)]
    out = sum(w * parts[f'parts.{p}.out'] for p, w in enumerate(weights))
    np.testing.assert_allclose(result.as_numpy('out'), out, atol=1e-6)
    np.testing.assert_allclose(result.as_numpy('lse'), lse, atol=1e-6)
    np.testing.assert_allclose(result.as_numpy('parts.0.dout'), np.broadcast_to(weights[0], out.shape), atol=1e-6)
    dlse = weights[1][..., 0] * (parts['parts.1.out'] - out).sum(-1)
    np.testing.assert_allclose(result.as_numpy('parts.1.dlse'), dlse.swapaxes(1, 2), atol=3e-6)


CHECKS = [metadata, infer_forward, infer_options, infer_backward, async_infer, empty_and_unseen, refusals, compression, statistics, decoding, merging, aio]

if __name__ == '__main__':
    {check.__name__: check for check in CHECKS}[sys.argv[1]]()
