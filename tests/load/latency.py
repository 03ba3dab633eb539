"""Measures how long one request takes, and in which stages: latency.py [--url URL] [--shape 1,1,1,64] [--format json]
[--count 2000]

Starts build/attnd (or ATTND_BINARY), unless --url names a running server. Repeats the same forward over one keep-alive
connection, each request after the answer to the one before. Prints the median and the 99th percentile of the time at
the client, and the medians of the server's stages (Server-Timing). With --connections N, N processes do the same at the
same time, and their requests per second are printed too. Needs NumPy.
"""
import argparse
import contextlib
import json
import multiprocessing
import os
import re
import select
import socket
import sys
import time
from multiprocessing import shared_memory

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..'))
import service  # noqa: E402
import wire  # noqa: E402


@contextlib.contextmanager
def service_of(url, options=()):
    """Yields (host, port) of the server at the URL, or of a server that is started here and ended afterwards."""
    if url:
        host, port = url.split('//')[1].rstrip('/').rsplit(':', 1)
        yield host, int(port)
    else:
        with service.Server('--log-level', 'warn', *options) as server:
            yield server.address


def safetensors(tensors, metadata=None):
    """Returns a safetensors file of {name: (dtype, shape, bytes)}, with the metadata as JSON strings."""
    names = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float8_e4m3fn': 'F8_E4M3', 'int32': 'I32', 'uint8': 'U8'}
    head, at = {}, 0
    if metadata:
        head['__metadata__'] = {n: x if isinstance(x, str) else json.dumps(x) for n, x in metadata.items()}
    for name, (dtype, shape, data) in tensors.items():
        head[name] = {'dtype': names[dtype], 'shape': list(shape), 'data_offsets': [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b' ' * (-len(text) % 8)
    return len(text).to_bytes(8, 'little') + text + b''.join(data for _, _, data in tensors.values())


def body(shape, form, dtype='float16'):
    B, S, H, D = shape
    rng = np.random.default_rng(1)
    values = {name: rng.standard_normal((B, S, H, D), np.float32) for name in 'qkv'}
    if form == 'safetensors':
        return safetensors({n: (dtype, x.shape, wire.raw(x, dtype)) for n, x in values.items()}, {'causal': True})
    return json.dumps({**{n: wire.tensor(x, dtype) for n, x in values.items()}, 'causal': True}).encode()


class Line:
    """One keep-alive connection that needs little Python per request. With nap_us (microseconds) it waits for an answer
    in naps of that length. An idle core takes 0.1 ms to wake on some machines, and naps keep the core awake at a few
    percent of its time."""
    nap_us = 0

    def __init__(self, host, port):
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.room = bytearray(1 << 16)

    def wait(self):
        while self.nap_us and not select.select([self.socket], [], [], self.nap_us / 1e6)[0]:
            pass

    def ask(self, request):
        """Returns (status, head in lower case, body) of the answer."""
        self.socket.sendall(request)
        self.wait()
        view, got, end = memoryview(self.room), 0, -1
        while end < 0:
            count = self.socket.recv_into(view[got:])
            if count == 0:
                raise ConnectionError('the server closed the connection')
            got += count
            end = self.room.find(b'\r\n\r\n', 0, got)
        head = bytes(self.room[:end]).lower()
        at = head.find(b'\ncontent-length:')
        # an answer with status 204 has no Content-Length
        length = int(head[at + 16:].split(b'\r\n', 1)[0]) if at >= 0 else 0
        total = end + 4 + length
        if total > len(self.room):
            view.release()
            self.room.extend(bytes(total - len(self.room)))
            view = memoryview(self.room)
        while got < total:
            count = self.socket.recv_into(view[got:total], 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError('the server closed the connection')
            got += count
        return int(head[9:12]), head, bytes(view[end + 4:total])


def request_of(path, payload, form, accept=None):
    kind = {'json': 'application/json', 'safetensors': 'application/x-safetensors'}
    return (f'POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind[form]}\r\nAccept: {kind[accept or form]}\r\n'
            f'Content-Length: {len(payload)}\r\n\r\n').encode() + payload


def post(line, path, payload=b'', form='json'):
    """Sends a POST and returns the body of the answer, whose status must be 200."""
    status, _, answer = line.ask(request_of(path, payload, form))
    if status != 200:
        sys.exit(f'{path}: {status}: {answer[:500].decode("utf-8", "replace")}')
    return answer


class SystemMemory:
    """An object of POSIX shared memory with this key and size."""
    kind = 'system'

    def __init__(self, key, size):
        self.memory = shared_memory.SharedMemory(key.strip('/'), create=True, size=size)
        self.names = {'key': key, 'offset': 0}

    def write(self, data, at):
        self.memory.buf[at:at + len(data)] = data

    def read(self, size, at):
        return bytes(self.memory.buf[at:at + size])

    def free(self):
        self.memory.close()
        self.memory.unlink()


def gpu_memory(key, size):
    """Allocates `size` bytes on the first GPU, to be shared by a CUDA handle. Needs PyTorch."""
    sys.path.insert(0, os.path.join(HERE, '..', 'gpu'))
    from cuda_shared_memory import Memory
    memory = Memory(size)
    memory.kind, memory.names = 'cuda', {'raw_handle': {'b64': memory.raw_handle()}, 'device_id': 0}
    return memory


@contextlib.contextmanager
def region(line, key, inputs, outputs, memory_of=SystemMemory):
    """Registers shared memory that contains `inputs` (name: bytes) and has space for `outputs` (name: number of bytes).
    Yields each tensor's KServe parameters (name: parameters), and a function that reads an output."""
    name, places, end = key.strip('/'), {}, 0
    for part, size in [*((part, len(data)) for part, data in inputs.items()), *outputs.items()]:
        places[part] = {'shared_memory_region': name, 'shared_memory_byte_size': size, 'shared_memory_offset': end}
        end += (size + 255) // 256 * 256
    memory = memory_of(key, end)
    try:
        for part, data in inputs.items():
            memory.write(data, places[part]['shared_memory_offset'])
        path = f'/v2/{memory.kind}sharedmemory/region/{name}'
        post(line, path + '/register', json.dumps({**memory.names, 'byte_size': end}).encode())
        yield places, lambda part: memory.read(outputs[part], places[part]['shared_memory_offset'])
        post(line, path + '/unregister')
    finally:
        memory.free()


def repeat(line, request, count, warm=100):
    """Sends the request `count` times. Returns the seconds of each request, and {stage: microseconds of each
    request}."""
    times, stages = [], {}
    for n in range(count + warm):
        began = time.perf_counter()
        status, head, answer = line.ask(request)
        took = time.perf_counter() - began
        if status != 200:
            sys.exit(f'{status}: {answer[:500].decode("utf-8", "replace")}')
        if n < warm:
            continue
        times.append(took)
        for name, ms in re.findall(rb'(\w+);dur=([\d.]+)', head):
            stages.setdefault(name.decode(), []).append(float(ms) * 1000)
    return times, stages


def percentile(times, share):
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] * 1e6


def _run(address, request, count, pipe):
    line = Line(*address)
    repeat(line, request, 100, 0)
    pipe.send(0)
    pipe.recv()
    pipe.send(repeat(line, request, count, 0)[0])


def at_once(address, requests, count, counter=lambda: 0):
    """Runs one process for each request in parallel, and each process repeats its request. Returns the times of all
    requests, the number of requests per second, and by how much counter() grows per second."""
    pipes = []
    for request in requests:
        here, there = multiprocessing.Pipe()
        multiprocessing.Process(target=_run, args=(address, request, count, there), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    before, began = counter(), time.perf_counter()
    for pipe in pipes:
        pipe.send(0)
    times = [t for pipe in pipes for t in pipe.recv()]
    took = time.perf_counter() - began
    return times, len(times) / took, (counter() - before) / took


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--url')
    ap.add_argument('--shape', default='1,1,1,64', help='B,S,H,D')
    ap.add_argument('--dtype', default='float16')
    ap.add_argument('--format', default='json', choices=['json', 'safetensors'])
    ap.add_argument('--count', type=int, default=2000)
    ap.add_argument('--connections', type=int, default=1)
    ap.add_argument('--nap-us', type=int, default=0, help='a client that waits in pieces of so many microseconds')
    ap.add_argument('--options', default='', help='more words for the server that is started')
    a = ap.parse_args()
    Line.nap_us = a.nap_us
    request = request_of('/v1/attention/forward', body([int(n) for n in a.shape.split(',')], a.format, a.dtype), a.format)
    with service_of(a.url, a.options.split()) as address:
        show(address, request, a)


def show(address, request, a):
    if a.connections > 1:
        times, rate, _ = at_once(address, [request] * a.connections, a.count)
        print(f'{a.shape} {a.dtype} {a.format}: {rate:.0f} per second over {a.connections} connections, '
              f'p50 {percentile(times, .5):.0f} us, p99 {percentile(times, .99):.0f} us')
        return
    times, stages = repeat(Line(*address), request, a.count)
    print(f'{a.shape} {a.dtype} {a.format}: p50 {percentile(times, .5):.0f} us, p99 {percentile(times, .99):.0f} us; at the server: ' +
          ', '.join(f'{name} {sorted(us)[len(us) // 2]:.0f}' for name, us in stages.items()))


if __name__ == '__main__':
    main()
