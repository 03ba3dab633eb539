"""One problem over several GPUs, by groups of heads or by queries: heads.py BUILD [--devices 0 0,1 0,1,2,3] [--sq 32768] ...

Starts attnd once for each list of devices, and sends it the same forward and backward with tensors in system shared
memory. The backward computes the forward too. Prints two times: that of the kernels (on the slowest device) and that of
the request. Both are medians of --reps requests. Also prints how many times as long each of the two times is with the
first list of devices. The exit status is 1 unless all answers have equal bits. If there are fewer key/value heads
(--hk) than devices, the problem is cut by queries. dk and dv are then sums over the parts. They must have equal bits in
all repetitions, and be near those of the first list of devices. BUILD holds attnd, and libraries in BUILD/lib. Needs
python3 with NumPy.

Without a GPU the script can be tried on a fake backend:
ATTND=build/tests/attnd-fake ATTN_FAKE_DEVICES=4 python3 tests/gpu/heads.py build --sq 1024
"""
import argparse
import hashlib
import http.client
import json
import mmap
import os
import statistics
import subprocess
import sys
import time

import numpy as np

PORT = 18183
NAMES = {'forward': ('q', 'k', 'v'), 'backward': ('q', 'k', 'v', 'dout')}
RESULTS = {'forward': ('out', 'lse'), 'backward': ('dq', 'dk', 'dv')}


SUMS = ('dk', 'dv')  # results that are sums of parts if a problem is cut by queries
FAR = 0.02  # largest allowed difference from the first list's sum, in bfloat16, relative to the largest number


class Tensors:
    """The tensors of one problem. Each lies in its own object of /dev/shm."""

    def __init__(self, args):
        heads = {'k': args.hk, 'v': args.hk, 'dk': args.hk, 'dv': args.hk}
        self.prefix = f'attnd_heads_{os.getpid()}_'
        self.shape, self.map = {}, {}
        chunk = np.random.default_rng(7).standard_normal(1 << 22).astype(np.float32).view(np.uint32) >> 16
        bits = chunk.astype(np.uint16).tobytes()
        for number, name in enumerate(('q', 'k', 'v', 'dout', 'out', 'dq', 'dk', 'dv')):
            self.shape[name] = [1, args.sq, heads.get(name, args.heads), args.dim]
            data = self.make(name, 2 * int(np.prod(self.shape[name])))
            for at in range(0, len(data), len(bits)):
                size = min(len(bits), len(data) - at)
                shift = 4096 * number + 2 * 61 * (at // len(bits))
                data[at:at + size] = (bits[shift:] + bits[:shift])[:size]
        self.shape['lse'] = [1, args.heads, args.sq]
        self.make('lse', 4 * int(np.prod(self.shape['lse'])))

    def make(self, name, size):
        with open('/dev/shm/' + self.prefix + name, 'w+b') as f:
            f.truncate(size)
            self.map[name] = mmap.mmap(f.fileno(), size)
        return self.map[name]

    def digest(self, names):
        return hashlib.sha256(b''.join(hashlib.sha256(self.map[n]).digest() for n in names)).hexdigest()

    def numbers(self, name):
        return (np.frombuffer(self.map[name], np.uint16).astype(np.uint32) << 16).view(np.float32)

    def remove(self):
        for name in self.map:
            os.unlink('/dev/shm/' + self.prefix + name)

    def described(self, name, gives_shape):
        place = {'shared_memory_region': name, 'shared_memory_byte_size': len(self.map[name])}
        more = {'shape': self.shape[name], 'datatype': 'FP32' if name == 'lse' else 'BF16'} if gives_shape else {}
        return {'name': name, **more, 'parameters': place}


class Server:
    def __init__(self, args, devices):
        program = os.environ.get('ATTND', os.path.join(args.build, 'attnd'))
        libraries = os.path.join(args.build, 'lib') + ':' + os.environ.get('LD_LIBRARY_PATH', '')
        command = [program, '--listen', f'127.0.0.1:{PORT}', '--allow-shm', 'attnd_heads_', '--max-body-bytes', '6G', '--staging-bytes', '16G', '--max-seconds', '600', '--split-above-ms', str(args.split_above_ms), '--devices', devices]
        self.process = subprocess.Popen(command, env={**os.environ, 'LD_LIBRARY_PATH': libraries}, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if ' ready ' in line:
                break
        else:
            sys.exit('attnd did not start with --devices ' + devices)
        self.connection = http.client.HTTPConnection('127.0.0.1', PORT, timeout=600)

    def post(self, path, body):
        self.connection.request('POST', path, json.dumps(body))
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            sys.exit(f'{path}: {answer.status} {text[:400].decode()}')
        return json.loads(text) if text else {}

    def stop(self):
        self.process.terminate()
        self.process.communicate()


def infer(server, tensors, op, causal):
    parameters = {'causal': causal, **({'deterministic': True} if op == 'backward' else {})}
    body = {'parameters': parameters, 'inputs': [tensors.described(n, True) for n in NAMES[op]], 'outputs': [tensors.described(n, False) for n in RESULTS[op]]}
    began = time.monotonic()
    answer = server.post(f'/v2/models/attention_{op}/infer', body)
    return time.monotonic() - began, answer['parameters']


def distance(one, other):
    """Returns the largest difference of two results, relative to the largest number. If there is a NaN, this is
    infinity."""
    far = np.abs(one - other).max() / np.abs(other).max()
    return far if np.isfinite(far) else np.inf


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('build')
    parser.add_argument('--devices', nargs='+', default=['0', '0,1', '0,1,2,3'], help='lists of devices, as in attnd --devices')
    parser.add_argument('--sq', type=int, default=32768, help='number of queries and of keys')
    parser.add_argument('--heads', type=int, default=16)
    parser.add_argument('--hk', type=int, default=16, help='number of key/value heads')
    parser.add_argument('--dim', type=int, default=128, help='head size')
    parser.add_argument('--split-above-ms', type=int, default=1, help='as in attnd --split-above-ms')
    parser.add_argument('--reps', type=int, default=5)
    args = parser.parse_args()
    tensors = Tensors(args)
    first, digests, sums, equal = {}, {}, {}, True
    try:
        for devices in args.devices:
            server = Server(args, devices)
            for name, data in tensors.map.items():
                server.post(f'/v2/systemsharedmemory/region/{name}/register', {'key': tensors.prefix + name, 'byte_size': len(data)})
            # Soon after the regions are registered, the GPU begins to copy directly from them. The test waits for this.
            time.sleep(1)
            for op in ('forward', 'backward'):
                kernels, whole, seen = [], [], set()
                for _ in range(args.reps + 1):
                    took, facts = infer(server, tensors, op, True)
                    timing = facts['timing_us'] if isinstance(facts['timing_us'], dict) else json.loads(facts['timing_us'])
                    kernels.append(timing['compute'] / 1e3)
                    whole.append(took * 1e3)
                    seen.add(tensors.digest(RESULTS[op]))
                added = SUMS if op == 'backward' and facts['backend'].endswith(' by queries') else ()
                same = [n for n in RESULTS[op] if n not in added]
                digest = tensors.digest(same)
                # With some lists of devices, dk and dv are sums of parts. Their bits are compared only where they are
                # no such sums. The set of results to compare therefore varies, so each result has its own digest.
                equal &= len(seen) == 1 and all(digests.setdefault(n, tensors.digest([n])) == tensors.digest([n]) for n in same)
                for n in SUMS if op == 'backward' else ():
                    far = distance(tensors.numbers(n), sums.setdefault(n, tensors.numbers(n)))
                    equal &= bool(far <= FAR)
                    if n in added:
                        print(f'         {n}: a sum of parts, {far:.2g} from that of the first list   bits {tensors.digest([n])[:12]}')
                k, w = statistics.median(kernels[1:]), statistics.median(whole[1:])
                k1, w1 = first.setdefault(op, (k, w))
                print(f'{op:8s} --devices {devices:8s} {facts["backend"]:28s} kernels {k:9.2f} ms ({k1 / k:5.2f} times)   request {w:9.2f} ms ({w1 / w:5.2f} times)   bits {digest[:12]}', flush=True)
            server.stop()
    finally:
        tensors.remove()
    print('the bits are equal, except those of sums of parts' if equal else 'THE BITS DIFFER')
    return 0 if equal else 1


if __name__ == '__main__':
    sys.exit(main())
