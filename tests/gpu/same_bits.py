"""Sends one request many times, alone and beside random other requests: same_bits.py URL COUNT [backward|chunk]

Every answer must have the same bytes as the first, except for its timings; otherwise the exit status is not 0. With
`backward` the request is a deterministic backward over several tiles of keys. With `chunk` it is a forward of few
queries over many keys, which different thread blocks share. The last line counts answers.
"""
import base64
import http.client
import json
import sys
import threading
import urllib.parse

import numpy as np


def tensor(r, shape):
    return {'shape': list(shape), 'dtype': 'float16', 'data': base64.b64encode(r.standard_normal(shape).astype(np.float16).tobytes()).decode()}


def body(r, B, Sq, Sk, H, Hk, D, causal, **more):
    return json.dumps({'q': tensor(r, (B, Sq, H, D)), 'k': tensor(r, (B, Sk, Hk, D)), 'v': tensor(r, (B, Sk, Hk, D)), 'causal': causal, **more}).encode()


def post(connection, data, op='forward'):
    connection.request('POST', '/v1/attention/' + op, data, {'Content-Type': 'application/json'})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, text[:300]
    answer = json.loads(text)
    return [answer[name]['data'] for name in (('out', 'lse') if op == 'forward' else ('dq', 'dk', 'dv'))]


def main():
    url, count = urllib.parse.urlparse(sys.argv[1]), int(sys.argv[2])
    connect = lambda: http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    op, r = 'backward' if 'backward' in sys.argv[3:] else 'forward', np.random.default_rng(1)
    if 'chunk' in sys.argv[3:]:
        fixed = body(r, 2, 50, 4200, 8, 2, 128, True)
    elif op == 'forward':
        fixed = body(r, 2, 190, 333, 8, 2, 64, True)
    else:
        fixed = body(r, 2, 700, 1000, 4, 2, 128, True, dout=tensor(r, (2, 700, 4, 128)), deterministic=True)
    connection = connect()
    want = post(connection, fixed, op)
    different, stop = 0, threading.Event()

    def neighbour(seed):
        r, c = np.random.default_rng(seed), connect()
        while not stop.is_set():
            H = int(r.choice([1, 2, 4, 8]))
            post(c, body(r, int(r.integers(1, 4)), int(r.integers(1, 300)), int(r.integers(1, 400)), H, 1, int(r.choice([32, 64, 128])), bool(r.integers(2))))

    for n in range(count // 2):
        different += post(connection, fixed, op) != want
    neighbours = [threading.Thread(target=neighbour, args=(seed,)) for seed in range(6)]
    for thread in neighbours:
        thread.start()
    for n in range(count - count // 2):
        different += post(connection, fixed, op) != want
    stop.set()
    for thread in neighbours:
        thread.join()
    print(f'{count - different} passed, {different} failed')
    return 1 if different else 0


if __name__ == '__main__':
    sys.exit(main())
