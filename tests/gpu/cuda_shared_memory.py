"""CUDA shared memory on a real GPU: cuda_shared_memory.py URL [--device N] [--server-device N] [--seconds S] [--nap-us
N]

Tests a server that was started with --allow-cuda-shm on the same machine. Needs Python 3 and PyTorch, nothing of
Triton. Allocates memory with cudaMalloc, because a handle stands for a whole allocation (PyTorch's pool puts many
tensors into one). Registers the memory, sends forwards that read q, k and v there and write out there, and checks:

 - numbers: out agrees with PyTorch's scaled_dot_product_attention in float32, for aligned tensors and for unaligned
   tensors (which other kernels compute);
 - refusals: the server refuses a forged handle, a size beyond the allocation, and, with a second GPU, a handle of
   another device, and then still serves;
 - lifetime: after a region was unregistered, requests cannot use it, and its memory can be registered again.

Then the script measures over one connection: the time of a request (p50, p99), the kernel's time as the server reports
it, the time of the same forward in PyTorch, and the difference. The goal is a request that takes at most 60 us more
than its kernel. Prints one JSON document and a line that counts checks; the exit status is 1 if a check failed.
"""
import argparse
import base64
import ctypes
import http.client
import json
import re
import select
import socket
import statistics
import sys
import time
import urllib.parse

import torch

SHAPES = [(1, 1024, 16, 128), (1, 4096, 16, 128)]
INFER = '/v2/models/attention_forward/infer'
GOAL_US = 60


class Handle(ctypes.Structure):
    _fields_ = [('reserved', ctypes.c_byte * 64)]


def load_runtime():
    torch.cuda.init()
    for name in ('libcudart.so', 'libcudart.so.12', 'libcudart.so.13'):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    import glob
    import os
    places = [os.path.join(os.path.dirname(torch.__file__), 'lib'), os.path.join(os.path.dirname(torch.__file__), '../nvidia/*/lib'), '/usr/local/cuda/lib64']
    for place in places:
        for path in sorted(glob.glob(os.path.join(place, 'libcudart*.so*'))):
            return ctypes.CDLL(path)
    sys.exit('libcudart was not found')


RUNTIME = load_runtime()


def cuda(call, *args):
    code = getattr(RUNTIME, call)(*args)
    if code != 0:
        sys.exit(f'{call}: CUDA error {code}')


class Memory:
    """`size` bytes of GPU memory that can be shared with another process."""

    def __init__(self, size, device=0):
        self.size, self.device, self.at = size, device, ctypes.c_void_p()
        cuda('cudaSetDevice', ctypes.c_int(device))
        cuda('cudaMalloc', ctypes.byref(self.at), ctypes.c_size_t(size))

    def raw_handle(self):
        handle = Handle()
        cuda('cudaIpcGetMemHandle', ctypes.byref(handle), self.at)
        return base64.b64encode(bytes(handle)).decode()

    def put(self, tensor, offset=0):
        tensor = tensor.contiguous()
        torch.cuda.synchronize()
        cuda('cudaMemcpy', ctypes.c_void_p(self.at.value + offset), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), ctypes.c_int(4))
        # The server does not wait for this copy. cudaMemcpy may return before a copy on the device has ended.
        cuda('cudaDeviceSynchronize')

    def get(self, like, offset=0):
        made = torch.empty_like(like)
        torch.cuda.synchronize()
        cuda('cudaMemcpy', ctypes.c_void_p(made.data_ptr()), ctypes.c_void_p(self.at.value + offset), ctypes.c_size_t(made.nbytes), ctypes.c_int(4))
        cuda('cudaDeviceSynchronize')
        return made

    def write(self, data, offset):
        cuda('cudaMemcpy', ctypes.c_void_p(self.at.value + offset), ctypes.c_char_p(data), ctypes.c_size_t(len(data)), ctypes.c_int(4))

    def read(self, size, offset):
        made = ctypes.create_string_buffer(size)
        cuda('cudaMemcpy', made, ctypes.c_void_p(self.at.value + offset), ctypes.c_size_t(size), ctypes.c_int(4))
        return made.raw

    def free(self):
        cuda('cudaFree', self.at)


class Raw:
    """Sends one request repeatedly over one connection, by a plain socket: http.client would take longer than the
    server does."""

    def __init__(self, url, path, body, nap_us):
        self.nap_us = nap_us
        parts = urllib.parse.urlparse(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = f'POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body

    def ask(self):
        """Sends the request once. Returns the status and the body of the answer."""
        self.socket.sendall(self.request)
        while self.nap_us and not select.select([self.socket], [], [], self.nap_us / 1e6)[0]:
            pass
        got = self.socket.recv(1 << 16)
        while b'\r\n\r\n' not in got:
            got += self.socket.recv(1 << 16)
        head, text = got.split(b'\r\n\r\n', 1)
        length = int(re.search(rb'content-length: *(\d+)', head, re.IGNORECASE)[1])
        while len(text) < length:
            text += self.socket.recv(1 << 16)
        return int(head[9:12]), text


class Client:
    def __init__(self, url):
        parts = urllib.parse.urlparse(url)
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)

    def ask(self, method, path, body=None):
        self.connection.request(method, path, body=body if body is None or isinstance(body, bytes) else json.dumps(body).encode(), headers={'Content-Type': 'application/json'})
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def register(self, name, raw, size, device):
        return self.ask('POST', f'/v2/cudasharedmemory/region/{name}/register', {'raw_handle': {'b64': raw}, 'device_id': device, 'byte_size': size})

    def unregister(self, name=None):
        return self.ask('POST', f'/v2/cudasharedmemory/region/{name}/unregister' if name else '/v2/cudasharedmemory/unregister', b'')


def place(region, size, offset):
    return {'shared_memory_region': region, 'shared_memory_byte_size': size, **({'shared_memory_offset': offset} if offset else {})}


def forward(shape, size, region='t', gap=0):
    """Returns the JSON of a forward whose q, k, v and out lie one after the other in a region (registered GPU memory),
    with `gap` unused bytes before each."""
    inputs = [{'name': n, 'shape': list(shape), 'datatype': 'BF16', 'parameters': place(region, size, i * size + (i + 1) * gap)} for i, n in enumerate('qkv')]
    return json.dumps({'inputs': inputs, 'outputs': [{'name': 'out', 'parameters': place(region, size, 3 * size + 4 * gap)}]}).encode()


def bare_us(q, k, v, count=200):
    """Returns the microseconds of the same forward in PyTorch, with many calls queued one behind the other."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    for _ in range(20):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('url')
    parser.add_argument('--device', type=int, default=0, help='as PyTorch counts')
    parser.add_argument('--server-device', type=int, default=None, help='as the server counts')
    parser.add_argument('--seconds', type=float, default=3)
    parser.add_argument('--nap-us', type=int, default=0, help='the client waits in pieces of so many microseconds, for its core to stay awake')
    args = parser.parse_args()
    there = args.device if args.server_device is None else args.server_device
    torch.cuda.set_device(args.device)
    torch.manual_seed(1)
    client, checks, measured = Client(args.url), {}, []
    client.unregister()

    def check(what, good, says=''):
        checks[what] = True if good else str(says)[:300] or False

    def error(answer):
        return json.loads(answer[1] or b'{}').get('error', '')

    answer = client.register('forged', base64.b64encode(bytes(range(64))).decode(), 64, there)
    check('a forged handle is 400', answer[0] == 400, answer)
    answer = client.register('zeros', base64.b64encode(bytes(64)).decode(), 64, there)
    check('a handle of zeros is 400', answer[0] == 400, answer)
    check('the server is ready after that', client.ask('GET', '/readyz')[0] == 200)

    for shape in SHAPES:
        q, k, v = (torch.randn(shape, device=f'cuda:{args.device}', dtype=torch.bfloat16) for _ in 'qkv')
        size = q.nbytes
        memory = Memory(4 * size + 4096, args.device)
        name = 'x'.join(map(str, shape))
        answer = client.register('beyond', memory.raw_handle(), 1 << 38, there)
        check(f'{name}: more than the allocation is 400', answer[0] == 400, answer)
        if torch.cuda.device_count() > 1:
            answer = client.register('elsewhere', memory.raw_handle(), size, 1 - min(there, 1))
            check(f'{name}: another device is 400', answer[0] == 400, answer)
        answer = client.register('t', memory.raw_handle(), memory.size, there)
        check(f'{name}: registered', answer[0] == 200, answer)
        answer = client.ask('GET', '/v2/cudasharedmemory/region/t/status')
        check(f'{name}: listed', answer[0] == 200 and json.loads(answer[1]) == [{'name': 't', 'device_id': there, 'byte_size': memory.size}], answer)
        want = torch.nn.functional.scaled_dot_product_attention(*(t.float().transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        outs, parameters = {}, {}
        for gap in (0, 2):
            for i, t in enumerate((q, k, v)):
                memory.put(t, i * size + (i + 1) * gap)
            memory.put(torch.full_like(q, float('nan')), 3 * size + 4 * gap)
            body = forward(shape, size, gap=gap)
            answer = client.ask('POST', INFER, body)
            outs[gap] = memory.get(q, 3 * size + 4 * gap)
            off = (outs[gap].float() - want).abs().max().item()
            check(f'{name}: out at offset {3 * size + 4 * gap}', answer[0] == 200 and off < 0.02, (answer[0], off, error(answer)))
            if answer[0] == 200:
                parameters[gap] = json.loads(answer[1])['parameters']
        # All outputs of this shape were checked above. Now measures requests that follow one another without pauses
        # over one connection.
        for i, t in enumerate((q, k, v)):
            memory.put(t, i * size)
        body, times, kernel = forward(shape, size), [], []
        raw = Raw(args.url, INFER, body, args.nap_us)
        until = time.perf_counter() + args.seconds + 0.5
        while time.perf_counter() < until:
            began = time.perf_counter_ns()
            status, text = raw.ask()
            took = (time.perf_counter_ns() - began) / 1e3
            if status != 200:
                check(f'{name}: measured', False, text)
                break
            if until - time.perf_counter() < args.seconds:  # the first half second only warms up clocks and caches
                times.append(took)
                timing = json.loads(text)['parameters'].get('timing_us')
                timing = json.loads(timing) if isinstance(timing, str) else timing or {}
                kernel.append(float(timing.get('compute', 'nan')))
        raw.socket.close()
        if times:
            times.sort()
            compute = statistics.median(kernel)
            p50 = statistics.median(times)
            measured.append({'shape': list(shape), 'dtype': 'bfloat16', 'requests': len(times), 'p50_us': round(p50, 1), 'p99_us': round(times[len(times) * 99 // 100], 1),
                             'least_us': round(times[0], 1), 'compute_us': round(compute, 1), 'beyond_compute_us': round(p50 - compute, 1),
                             'torch_us': round(bare_us(q, k, v), 1), 'goal_met': p50 - compute <= GOAL_US, 'backend': parameters.get(0, {}).get('backend'),
                             'backend_unaligned': parameters.get(2, {}).get('backend')})
        check(f'{name}: unregistered', client.unregister('t')[0] == 200 and client.ask('POST', INFER, body)[0] == 404)
        again = client.register('t', memory.raw_handle(), memory.size, there)
        check(f'{name}: registered again', again[0] == 200 and client.ask('POST', INFER, body)[0] == 200, again)
        client.unregister()
        # the server closes the memory in another thread, so the owner of the memory must wait before it frees it
        time.sleep(0.2)
        memory.free()
    failed = sum(c is not True for c in checks.values())
    print(json.dumps({'device': torch.cuda.get_device_name(args.device), 'goal_us': GOAL_US, 'checks': checks, 'measured': measured}, indent=1))
    print(f'{len(checks) - failed} passed, {failed} failed')
    sys.exit(failed > 0)


if __name__ == '__main__':
    main()
