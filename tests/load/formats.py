"""Measures the same forwards as JSON, as safetensors, as KServe binary, and through system shared memory:
formats.py [--url URL] [--seconds N]

    python3 tests/load/formats.py --sizes small,medium,large --rounds 3

Starts build/attnd (or ATTND_BINARY), unless --url names a running server (which must have --allow-shm /attnd). First,
wrk (own.lua) sends the bodies of load.py's sizes (float16, causal) in each form in turn. The table has the median round
of each form, and the ratio to JSON in the same round. Then one Python process measures over one connection:

    tritonclient     Triton's own client with binary tensors, if it is installed; the time includes building the inputs
                     and reading the output
    shared memory    KServe with q, k, v and out in POSIX shared memory; a request and its answer are one line each
    bare             PyTorch without a server, if it has a GPU: it copies the same bytes from pinned memory, computes
                     attention, and copies out back

Needs NumPy and wrk.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from latency import Line, percentile, region, repeat, request_of, safetensors, service_of, wire  # noqa: E402
from load import HEADER, SIZES, row, wrk_line  # noqa: E402

SHAPES = {'small': (1, 64, 4, 64), 'medium': (1, 1024, 8, 64), 'large': (1, 4096, 16, 128)}
FORWARD, INFER = '/v1/attention/forward', '/v2/models/attention_forward/infer'
REGION = '/attnd_formats'


def kserve(values, places=None):
    """Returns (JSON, bytes of the tensors) of a KServe request. The tensors follow the JSON, or lie in shared memory at
    `places` (name: parameters)."""
    tensors = [] if places else [x.tobytes() for x in values.values()]
    inputs = [{'name': n, 'shape': list(x.shape), 'datatype': 'FP16', 'parameters': places[n] if places else {'binary_data_size': x.nbytes}} for n, x in values.items()]
    outputs = [{'name': n, 'parameters': places[n] if places else {'binary_data': True}} for n in (('out',) if places else ('out', 'lse'))]
    return json.dumps({'parameters': {'causal': True}, 'inputs': inputs, 'outputs': outputs}).encode(), b''.join(tensors)


def bodies(values):
    """Returns {form: (path, options of own.lua, body)} of one forward in each form."""
    text, tensors = kserve(values)
    return {
        'json': (FORWARD, ['type=application/json'], json.dumps({**{n: wire.tensor(x, 'float16') for n, x in values.items()}, 'causal': True}).encode()),
        'safetensors': (FORWARD, ['type=application/x-safetensors', 'accept=application/x-safetensors'],
                        safetensors({n: ('float16', x.shape, x.tobytes()) for n, x in values.items()}, {'causal': True})),
        'kserve': (INFER, ['type=application/octet-stream', f'inference={len(text)}'], text + tensors),
    }


def by_wrk(a, url, folder):
    for size in a.sizes.split(','):
        results, words = {}, {}
        for form, (path, given, body) in bodies(values_of(size)).items():
            file = os.path.join(folder, f'{size}.{form}')
            with open(file, 'wb') as f:
                f.write(body)
            words[form] = ['--', f'body={file}', f'path={path}', *given]
        for _ in range(a.rounds):
            for form in words:
                line = wrk_line('own', url, a.seconds, SIZES[size][0], a.threads) + words[form]
                out = subprocess.run(line, capture_output=True, text=True)
                if out.returncode:
                    sys.exit(out.stderr)
                result = json.loads(out.stdout.split('\nRESULT ')[1])
                result['rps'] = result['requests'] / result['seconds']
                results.setdefault(form, []).append(result)
        for form, runs in results.items():
            ratios = [r['rps'] / j['rps'] for r, j in zip(runs, results['json'])]
            middle = sorted(runs, key=lambda r: r['rps'])[len(runs) // 2]
            print(row(f'{size} {form}'.ljust(18), middle) + (f'   {statistics.median(ratios):.2f} times JSON' if form != 'json' else ''), flush=True)


def values_of(size):
    rng = np.random.default_rng(1)
    return {n: rng.standard_normal(SHAPES[size], np.float32).astype(np.float16) for n in 'qkv'}


def report(size, what, times):
    print(f'{size + " " + what:<28} p50 {percentile(times, .5):>8.0f} us   p99 {percentile(times, .99):>8.0f} us   {1 / statistics.mean(times):>8.1f} per second', flush=True)
    return percentile(times, .5)


def timed(call, seconds):
    times, end = [], time.perf_counter() + seconds
    for n in range(1 << 30):
        began = time.perf_counter()
        call()
        now = time.perf_counter()
        if n >= 5:
            times.append(now - began)
        if now > end and n > 20:
            return times


def by_triton(a, size, address):
    try:
        import tritonclient.http as triton
    except ImportError:
        print('tritonclient is not installed')
        return
    client = triton.InferenceServerClient(f'{address[0]}:{address[1]}')
    values = values_of(size)

    def ask():
        inputs = []
        for n, x in values.items():
            inputs.append(triton.InferInput(n, x.shape, 'FP16'))
            inputs[-1].set_data_from_numpy(x)
        outputs = [triton.InferRequestedOutput(n) for n in ('out', 'lse')]
        client.infer('attention_forward', inputs, outputs=outputs, parameters={'causal': True}).as_numpy('out')
    report(size, 'tritonclient', timed(ask, a.seconds))


def shared(a, size, address):
    """Returns the median time in microseconds that a request takes if its tensors lie in system shared memory."""
    values = values_of(size)
    each = values['q'].nbytes
    line = Line(*address)
    with region(line, REGION, {n: x.tobytes() for n, x in values.items()}, {'out': each}) as (places, read):
        text, _ = kserve(values, places)
        request = request_of(INFER, text, 'json')
        repeat(line, request, 5, 15)
        count = max(20, int(a.seconds / max(1e-5, statistics.median(repeat(line, request, 5, 0)[0]))))
        times, stages = repeat(line, request, count, 0)
        took = report(size, 'shared memory', times)
        path, _, given = bodies(values)['kserve']
        length = len(kserve(values)[0])
        _, head, answer = line.ask(f'POST {path} HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {length}\r\nContent-Length: {len(given)}\r\n\r\n'.encode() + given)
        text = int(re.search(rb'inference-header-content-length: *(\d+)', head)[1])
        if answer[text:text + each] != read('out'):
            sys.exit('out in shared memory is not what it is in a body')
        print(' ' * 28, ', '.join(f'{n} {statistics.median(us):.0f}' for n, us in stages.items()))
        return took


def bare(a, size):
    try:
        import torch
        if not torch.cuda.is_available():
            return None
    except ImportError:
        return None
    here = [torch.from_numpy(x).pin_memory() for x in values_of(size).values()]
    back = torch.empty_like(here[0]).pin_memory()
    there = [torch.empty_like(x, device='cuda') for x in here]

    def run():
        for x, y in zip(here, there):
            y.copy_(x, non_blocking=True)
        q, k, v = (x.transpose(1, 2) for x in there)
        back.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), non_blocking=True)
        torch.cuda.synchronize()
    return report(size, 'bare', timed(run, a.seconds))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--url')
    ap.add_argument('--sizes', default='small,medium,large')
    ap.add_argument('--seconds', type=int, default=4)
    ap.add_argument('--rounds', type=int, default=3)
    ap.add_argument('--threads', type=int, default=2, help='of wrk')
    ap.add_argument('--options', default='', help='more words for the server that is started')
    a = ap.parse_args()
    with service_of(a.url, ['--allow-shm', REGION, *a.options.split()]) as address, tempfile.TemporaryDirectory() as folder:
        print(f'{"":<8}{HEADER}')
        by_wrk(a, f'http://{address[0]}:{address[1]}', folder)
        for size in a.sizes.split(','):
            by_triton(a, size, address)
            took, alone = shared(a, size, address), bare(a, size)
            if alone:
                print(f'{size}: through shared memory at {alone / took:.2f} of the rate without a server')


if __name__ == '__main__':
    main()
