"""Compares attnd with a Python server (python_peer.py) on the same machine, under load from the same wrk commands:
compare.py [--seconds N] [--rounds N] [--sizes small,medium]

    PEER_PYTHON=build/peer/bin/python python3 tests/load/compare.py

The two servers are loaded in turns, never at the same time. The table has the median round of each server. The ratio is
the median of the rounds' own ratios, because a virtual machine's speed changes from minute to minute. In the first
round, one answer of the Python server is compared with attnd's, to be sure that both compute the same. A third program
shows the most that this machine and wrk allow with the small body. It is bare_mhd.c, a libmicrohttpd program with one
thread for each core. It reads the body, computes nothing, and answers with as many constant bytes as attnd's answer
has."""
import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import time

import load
import service

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = os.environ.get('PEER_PYTHON', sys.executable)
# bytes of an answer to the small body: the base64 of out (32768 bytes) and of lse (1024 bytes), and the JSON around
# both
SMALL_ANSWER = 45400


class Peer:
    def __init__(self, words):
        self.words = words

    def __enter__(self):
        self.port = service.free_port()
        self.url = f'http://127.0.0.1:{self.port}'
        self.process = subprocess.Popen([PYTHON, os.path.join(HERE, 'python_peer.py'), '--port', str(self.port), *self.words], start_new_session=True)
        self.client = service.Server()
        self.client.address = ('127.0.0.1', self.port)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if self.client.get('/livez').status == 200:
                    time.sleep(1)  # gives the other processes of the Python server time to start
                    return self
            except OSError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.1)
        sys.exit(f'the peer did not come up with {PYTHON}: it needs tests/load/requirements.txt')

    def __exit__(self, *_):
        os.killpg(self.process.pid, 15)
        self.process.wait()


class Bare:
    def __enter__(self):
        self.port = service.free_port()
        self.url = f'http://127.0.0.1:{self.port}'
        program = os.path.join(os.path.dirname(service.BINARY), 'tests/load/bare_mhd')
        self.process = subprocess.Popen([program, str(self.port), str(64 << 10), str(SMALL_ANSWER), str(len(os.sched_getaffinity(0)))])
        time.sleep(0.3)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def same_answer(a, b):
    """Fails unless both servers' answers to one small problem agree to the accuracy of float16."""
    import struct
    data = base64.b64encode(struct.pack('<512e', *[(i * 37 % 101 - 50) / 40 for i in range(512)])).decode()
    x = {'shape': [1, 16, 4, 8], 'dtype': 'float16', 'data': data}
    body = json.dumps({'q': x, 'k': x, 'v': x, 'causal': True}).encode()
    outs = []
    for server in (a, b):
        answer = json.loads(server.post('/v1/attention/forward', body).body)
        outs.append([struct.unpack('<512e', base64.b64decode(answer['out']['data'])), struct.unpack('<64f', base64.b64decode(answer['lse']['data']))])
    for x, y in zip(*outs):
        worst = max(abs(p - q) for p, q in zip(x, y))
        assert worst < 4e-3, f'the two do not compute the same: {worst}'


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--seconds', type=int, default=8)
    ap.add_argument('--rounds', type=int, default=3)
    ap.add_argument('--sizes', default='small,medium,large')
    ap.add_argument('--peer', default='', help='words for python_peer.py: "--cuda --processes 8"')
    ap.add_argument('--threads', type=int, default=2, help='of wrk')
    a = ap.parse_args()
    sizes, words = a.sizes.split(','), a.peer.split()
    results = {}
    for round_ in range(a.rounds):
        with service.Server() as server:
            for size in sizes:
                results.setdefault(('attnd', size), []).append(load.run(size, server.url, a.seconds, threads=a.threads))
            if round_ == 0:
                with Peer(words) as peer:
                    same_answer(server, peer.client)
        with Peer(words) as peer:
            for size in sizes:
                results.setdefault(('Python', size), []).append(load.run(size, peer.url, a.seconds, threads=a.threads))
        if 'small' in sizes:
            with Bare() as bare:
                results.setdefault(('bare', 'small'), []).append(load.run('small', bare.url, a.seconds, threads=a.threads))
    print(f'{"":<18}{load.HEADER.strip():>34}')
    for size in sizes:
        for who in ('attnd', 'Python', 'bare'):
            if (runs := sorted(results.get((who, size), []), key=lambda r: r['rps'])):
                print(load.row(f'{size} {who}'.ljust(18), runs[len(runs) // 2]))
        ratios = [ours['rps'] / theirs['rps'] for ours, theirs in zip(results['attnd', size], results['Python', size]) if theirs['rps'] > 0]
        if not ratios:
            print(f'{size}: Python answered nothing in {a.seconds} s: give it more --seconds')
            continue
        p50 = statistics.median(ours['p50_ms'] / theirs['p50_ms'] for ours, theirs in zip(results['attnd', size], results['Python', size]))
        print(f'{size}: attnd serves {statistics.median(ratios):.1f} times as many ({min(ratios):.1f} to {max(ratios):.1f} of '
              f'{len(ratios)} rounds), p50 {p50:.3f} of the peer\'s; {results["attnd", size][0]["command"]}')


if __name__ == '__main__':
    main()
