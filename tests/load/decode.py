"""Measures a decode step over HTTP, and where its time goes: decode.py [--caches 1,8,64] [--lengths 1024,8192,131072]

Starts build/attnd (or ATTND_BINARY), unless --url names a running server. Makes caches (--heads 32:8, -D 128,
bfloat16), fills them, and repeats one request over one keep-alive connection (safetensors): a decode step with a query
for each cache. The step also appends each query's key and value, unless --read-only is given. A row has the median and
the 99th percentile of the time at the client, in microseconds. It also has the medians of the stages that the server
reports (Server-Timing), and the bytes of a request and its answer. The stages add up to the median at the client:

    wire             the rest of the client's time: network, receiving, hand-overs between threads, the client itself
    decode, encode   decoding the body, and encoding the answer
    wait             waiting until a device takes the request
    launch           work of the device's thread until the device begins. After the copies, the device may be idle until
                     its kernels are on the stream; this time is added
    copy             copying inputs to the device, and outputs back
    kernel           kernels on the device. If tensors lie in CUDA shared memory, an idle device is used at once. The
                     stage is then the time from the last call of the launch until the server sees the end

    --forks          the caches of a row are forks of one cache
    --shm system     queries, keys, values and outputs lie in POSIX shared memory, and a request (KServe,
                     attention_decode) says where
    --shm cuda       the same tensors lie in the memory of the GPU (needs PyTorch)
    --nap-us 50      the client waits in naps of 50 us, which keeps its core awake
    --clients 1,64   instead of the table, prints a line for 1 client and a line for 64 clients at the same time. Each
                     client has --caches (one number) caches of --lengths (the first length). A line shows steps per
                     second, and the share of the time in which kernels run
Needs NumPy.
"""
import argparse
import contextlib
import json
import os
import re
import sys

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from latency import Line, SystemMemory, at_once, gpu_memory, percentile, region, repeat, request_of, safetensors, service_of, wire  # noqa: E402

PIECE = 8192  # number of positions that one append sends
REGION, DECODE, METRICS = '/attnd_decode', '/v2/models/attention_decode/infer', b'GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n'
ALLOW = {None: [], 'system': ['--allow-shm', REGION], 'cuda': ['--allow-cuda-shm']}
SHARED = {'system': SystemMemory, 'cuda': gpu_memory}
COLUMNS = [('decode', 'encode'), ('queue',), ('prepare', 'launch'), ('copy_in', 'copy_out'), ('compute',)]
KSERVE = {'float32': 'FP32', 'float16': 'FP16', 'bfloat16': 'BF16'}


class Caches:
    def __init__(self, address, a):
        self.a, self.line = a, Line(*address)
        self.H, self.Hk = (int(n) for n in a.heads.split(':'))
        rng = np.random.default_rng(1)
        self.piece = wire.raw(rng.standard_normal((PIECE, self.Hk, a.D), np.float32), a.dtype)
        self.q = wire.raw(rng.standard_normal((64, self.H, a.D), np.float32), a.query_dtype)

    def ask(self, request, status=200):
        got, _, answer = self.line.ask(request)
        if got != status:
            sys.exit(f'{got}: {answer[:500].decode("utf-8", "replace")}')
        return json.loads(answer) if answer else None

    def post(self, path, status=200, **members):
        return self.ask(request_of(path, json.dumps(members).encode(), 'json'), status)

    def make(self, length):
        members = {'kv_heads': self.Hk, 'head_dim': self.a.D, 'dtype': self.a.dtype, 'page_size': self.a.page_size, 'ttl_s': 600}
        name = self.post('/v1/caches', 201, **members)['id']
        row = len(self.piece) // PIECE
        while length > 0:
            count = min(length, PIECE)
            part = self.a.dtype, (count, self.Hk, self.a.D), self.piece[:count * row]
            self.ask(request_of(f'/v1/caches/{name}/append', safetensors({'k': part, 'v': part}), 'safetensors', 'json'))
            length -= count
        return name

    def fork(self, name):
        return self.post(f'/v1/caches/{name}/fork', 201)['id']

    def drop(self, name):
        self.ask(f'DELETE /v1/caches/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n'.encode(), 204)

    def new(self, B):
        """Returns a query for each of B caches, and the key and value to append: {name: (dtype, shape, bytes)}."""
        row = len(self.piece) // PIECE
        tensors = {'q': (self.a.query_dtype, (B, 1, self.H, self.a.D), self.q[:B * len(self.q) // 64])}
        if not self.a.read_only:
            tensors['k'] = tensors['v'] = self.a.dtype, (B, 1, self.Hk, self.a.D), self.piece[:B * row]
        return tensors

    def step(self, names):
        return request_of('/v1/attention/decode', safetensors(self.new(len(names)), {'caches': list(names)}), 'safetensors')

    @contextlib.contextmanager
    def step_by(self, names, shared, place=0):
        """Yields the request of one decode step on these caches. `shared` is a kind of shared memory, or None. With a
        kind, a region holds the step's tensors until the end of the `with` block. The region's name ends in `place`, so
        that several regions can exist at the same time."""
        if not shared:
            yield self.step(names)
            return
        tensors = self.new(len(names))
        inputs = {name: data for name, (_, _, data) in tensors.items()}
        with region(self.line, f'{REGION}_{place}', inputs, {'out': len(inputs['q'])}, SHARED[shared]) as (places, _):
            inputs = [{'name': name, 'shape': shape, 'datatype': KSERVE[dtype], 'parameters': places[name]} for name, (dtype, shape, _) in tensors.items()]
            yield request_of(DECODE, json.dumps({'parameters': {'caches': json.dumps(list(names))}, 'inputs': inputs,
                                                 'outputs': [{'name': 'out', 'parameters': places['out']}]}).encode(), 'json')


def table(address, a):
    print('| caches, positions of each | p50 | p99 | wire | decode, encode | wait | launch | copy | kernel | bytes |\n' + '|---' * 10 + '|')
    for length in (int(n) for n in a.lengths.split(',')):
        c = Caches(address, a)
        names = [c.make(length)]
        for count in sorted(int(n) for n in a.caches.split(',')):
            while len(names) < count:
                names.append(c.fork(names[0]) if a.forks else c.make(length))
            with c.step_by(names[:count], a.shm) as request:
                _, _, answer = c.line.ask(request)
                times, stages = repeat(c.line, request, a.count, 20)
            p50, medians = percentile(times, .5), {name: sorted(us)[len(us) // 2] for name, us in stages.items()}
            parts = [sum(medians[name] for name in stage) for stage in COLUMNS]
            row = [p50, percentile(times, .99), p50 - sum(parts), *parts]
            print(f'| {count}, {length} | ' + ' | '.join(f'{us:.0f}' for us in row) + f' | {len(request)}, {len(answer)} |', flush=True)
        for name in names:
            c.drop(name)


def clients(address, a):
    length, each = int(a.lengths.split(',')[0]), int(a.caches.split(',')[0])
    c = Caches(address, a)

    def kernel_seconds():
        return float(re.search(rb'^attnd_kernel_seconds_total\{.*op="decode".*\} (\S+)$', c.line.ask(METRICS)[2], re.M)[1])
    most = max(int(n) for n in a.clients.split(','))
    names = [[c.make(length) for _ in range(each)] for _ in range(most)]
    for count in (int(n) for n in a.clients.split(',')):
        with contextlib.ExitStack() as stack:
            steps = [stack.enter_context(c.step_by(of, a.shm, n)) for n, of in enumerate(names[:count])]
            times, rate, share = at_once(address, steps, a.count, kernel_seconds)
        print(f'{count} clients, {each} x {length} positions each: {rate:.0f} steps per second, p50 {percentile(times, .5):.0f} us, '
              f'kernels {1e6 * share / rate:.0f} us of each, {100 * share:.0f} % of the time (more than 100: several at once)', flush=True)
    for name in sum(names, []):
        c.drop(name)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--url')
    ap.add_argument('--caches', help='1,8,64; of each of --clients 1')
    ap.add_argument('--lengths', default='1024,8192,131072')
    ap.add_argument('--heads', default='32:8')
    ap.add_argument('-D', type=int, default=128)
    ap.add_argument('--dtype', default='bfloat16')
    ap.add_argument('--query-dtype', default='bfloat16')
    ap.add_argument('--page-size', type=int, default=64)
    ap.add_argument('--count', type=int, default=300)
    ap.add_argument('--read-only', action='store_true')
    ap.add_argument('--forks', action='store_true')
    ap.add_argument('--shm', choices=SHARED)
    ap.add_argument('--clients')
    ap.add_argument('--nap-us', type=int, default=0)
    ap.add_argument('--options', default='', help='more words for the server that is started')
    a = ap.parse_args()
    Line.nap_us = a.nap_us
    a.caches = a.caches or ('1' if a.clients else '1,8,64')
    if a.shm and (a.query_dtype not in KSERVE or not a.read_only and a.dtype not in KSERVE):
        ap.error('--shm: KServe has no type for float8: caches of it are read with --read-only')
    with service_of(a.url, [*ALLOW[a.shm], *a.options.split()]) as address:
        clients(address, a) if a.clients else table(address, a)


if __name__ == '__main__':
    main()
