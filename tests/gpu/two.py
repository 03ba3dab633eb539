"""Several GPUs behind one server: two.py URL COUNT

Sends problems of several kinds from many connections at once, until each problem was answered by every device (for at
most LIMIT_S seconds). Checks that the server lists COUNT devices, that each device's counters rose, and that the
answers of all devices have the same bits. With --only NAME the server must list only that device, and every answer must
come from it. Prints one line for each check and a count of them. The digests of the answers are written to the file
that --digests names, or compared with it if it exists.
"""
import argparse
import base64
import hashlib
import http.client
import json
import os
import sys
import threading
import time
import urllib.parse

import numpy as np

LIMIT_S, CONNECTIONS = 60, 16


def tensor(r, shape, dtype):
    x = r.standard_normal(shape).astype(np.float32)
    if dtype == 'bfloat16':
        raw = (x.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = x.astype(dtype).tobytes()
    return {'shape': list(shape), 'dtype': dtype, 'data': base64.b64encode(raw).decode()}


def problem(seed, dtype, B, S, H, Hk, D, back=False, **options):
    r = np.random.default_rng(seed)
    members = {'q': tensor(r, (B, S, H, D), dtype), 'k': tensor(r, (B, S, Hk, D), dtype), 'v': tensor(r, (B, S, Hk, D), dtype), **options}
    if back:
        members['dout'] = tensor(r, (B, S, H, D), dtype)
        members['deterministic'] = True
    return f'/v1/attention/{"backward" if back else "forward"}', json.dumps(members).encode()


PROBLEMS = [
    problem(1, 'float16', 1, 64, 4, 4, 64),
    problem(2, 'bfloat16', 2, 333, 8, 2, 128, causal=True),
    problem(3, 'float32', 1, 200, 4, 4, 64, window=[50, 0]),
    problem(4, 'bfloat16', 1, 1024, 8, 8, 64),
    problem(5, 'float16', 1, 150, 4, 1, 256, softcap=20),
    problem(6, 'float16', 2, 250, 4, 4, 64, back=True, causal=True),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('url')
    parser.add_argument('count', type=int)
    parser.add_argument('--only')
    parser.add_argument('--digests')
    args = parser.parse_args()
    url = urllib.parse.urlparse(args.url)
    passed = failed = 0

    def check(good, what):
        nonlocal passed, failed
        passed, failed = passed + bool(good), failed + (not good)
        print('ok  ' if good else 'FAIL', what)

    def info():
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request('GET', '/v1/info')
        return {d['name']: d for d in json.loads(connection.getresponse().read())['devices']}

    before = info()
    names = [args.only] if args.only else sorted(before)
    check(len(before) == args.count and names == sorted(before), f'the server has {args.count} device(s): {" ".join(before)}')

    seen = {n: {} for n in range(len(PROBLEMS))}  # {problem: {device: digests of its answers}}
    errors, lock, stop = [], threading.Lock(), threading.Event()

    def complete():
        return all(set(names) <= set(by_device) for by_device in seen.values())

    def client(first):
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        n = first % len(PROBLEMS)
        while not stop.is_set():
            path, body = PROBLEMS[n]
            connection.request('POST', path, body, {'Content-Type': 'application/json'})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                with lock:
                    errors.append(text[:300])
                return
            answer = json.loads(text)
            device = answer['backend'].split()[0]
            digest = hashlib.sha256(''.join(answer[t]['data'] for t in sorted(answer) if isinstance(answer[t], dict) and 'data' in answer[t]).encode())
            with lock:
                seen[n].setdefault(device, set()).add(digest.hexdigest())
            n = (n + 1) % len(PROBLEMS)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and not complete() and not errors:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    after = info()

    check(not errors, f'every request is answered with 200 {errors[:1] or ""}')
    check(complete(), 'every device answered every kind of request')
    digests = {}
    for n, by_device in seen.items():
        found = set().union(*by_device.values())
        check(len(found) == 1, f'problem {n}: one answer, to the bit, from {" ".join(sorted(by_device))}')
        digests[str(n)] = sorted(found)
    for name in names:
        rose = [key for key in ('batches', 'kernel_seconds', 'flops') if after[name][key] > before[name][key]]
        check(len(rose) == 3, f'{name}: {after[name]["batches"] - before[name]["batches"]:.0f} batches, '
              f'{after[name]["kernel_seconds"] - before[name]["kernel_seconds"]:.3f} s of kernels, '
              f'{after[name]["memory_used_bytes"]} of {after[name]["memory_limit_bytes"]} bytes in use')
    check(all(d['usable'] and d['errors'] == 0 and d['running_requests'] == 0 for d in after.values()), 'no device failed, none is busy')
    if args.digests and os.path.exists(args.digests):
        with open(args.digests) as f:
            check(json.load(f) == digests, 'the answers are those of the run before, to the bit')
    elif args.digests:
        with open(args.digests, 'w') as f:
            json.dump(digests, f)
    print(f'{passed} passed, {failed} failed')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
