"""Measures a large upload to attnd, and the same upload to a bare libmicrohttpd server, which discards it (bare_mhd.c):
upload.py [--keys 65536] [--rounds 9]

One query over 65536 keys, 8 heads, D = 128, float16: 360 MB of JSON over one connection on the loopback device
(upload.c). The two servers take turns on the same machine, and the table has medians. Then the script prints attnd's
peak resident memory (VmHWM) and the size of the decoded tensors.
"""
import argparse
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..'))
import service  # noqa: E402

TOOLS = os.path.join(os.path.dirname(service.BINARY), 'tests/load')


def rounds(port, keys, count):
    out = subprocess.run([os.path.join(TOOLS, 'upload'), str(port), str(keys), str(count)], capture_output=True, text=True, check=True).stdout
    found = []
    for line in out.splitlines():
        size, taken, whole, status = line.split()
        assert status == '200', line
        found.append((int(size), float(taken), float(whole)))
    return found


class Bare:
    def __enter__(self):
        self.port = service.free_port()
        self.process = subprocess.Popen([os.path.join(TOOLS, 'bare_mhd'), str(self.port)])
        time.sleep(0.3)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--keys', type=int, default=65536)
    ap.add_argument('--rounds', type=int, default=9)
    a = ap.parse_args()
    bare, ours = [], []
    with Bare() as b, service.Server() as server:
        before = server.memory_kb('VmHWM')
        for i in range((a.rounds + 2) // 3):  # the servers take turns: each gets three rounds on one connection
            bare += rounds(b.port, a.keys, 3)
            ours += rounds(server.port, a.keys, 3)
        peak = server.memory_kb('VmHWM')
    size = bare[0][0]
    decoded = (2 * a.keys + 1) * 8 * 128 * 2

    def rate(runs, which):
        return size / statistics.median(r[which] for r in runs) / 1e9
    print(f'body {size / 1e6:.0f} MB, {len(ours)} rounds each, medians, GB/s')
    print(f'{"":<34}{"bare":>8}{"attnd":>8}{"ratio":>8}')
    for which, name in ((1, 'until the last byte was taken'), (2, 'until the answer was there')):
        x, y = rate(bare, which), rate(ours, which)
        print(f'{name:<34}{x:>8.2f}{y:>8.2f}{y / x:>8.2f}')
    print(f'peak resident memory {peak / 1024:.1f} MiB (before the first upload {before / 1024:.1f}), decoded tensors {decoded / 2**20:.1f} MiB, '
          f'above them {peak / 1024 - decoded / 2**20:.1f} MiB')


if __name__ == '__main__':
    main()
