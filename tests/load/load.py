"""Loads a server with wrk and prints a table: load.py [--url URL] [--seconds N] [--sizes small,medium,large] [--json]

Without --url it starts build/attnd (or ATTND_BINARY) on a free port. The load is a closed loop: each connection sends
its next request when it has the answer to the last one. Each row is printed with its wrk command, so that it can be
repeated by hand.
"""
import argparse
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..'))
import service  # noqa: E402

# name: (connections, a description of the request)
SIZES = {
    'small': (64, '1x64x4x64 float16 causal, 131 KB'),
    'medium': (64, '1x1024x8x64 float16 causal, 4.2 MB'),
    'large': (8, '1x4096x16x128 float16 causal, 67 MB'),
}


def wrk_line(size, url, seconds, connections=None, threads=2):
    connections = connections or SIZES[size][0]
    return ['wrk', f'-t{min(threads, connections)}', f'-c{connections}', f'-d{seconds}s', '--timeout', '60s',
            '-s', os.path.relpath(os.path.join(HERE, f'{size}.lua')), url]


def run(size, url, seconds, connections=None, threads=2):
    """Runs wrk once with the body of this size. Returns {'rps', 'p50_ms', 'p99_ms', 'bad_status', 'socket_errors',
    ...}."""
    line = wrk_line(size, url, seconds, connections, threads)
    out = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    result = json.loads(re.search(r'^RESULT (.*)$', out, re.M).group(1))
    result['rps'] = result['requests'] / result['seconds']
    result['command'] = ' '.join(line)
    return result


def row(name, r):
    trouble = f'  {r["bad_status"]} bad answers, {r["socket_errors"]} socket errors' if r['bad_status'] or r['socket_errors'] else ''
    return f'{name:<10} {r["rps"]:>10.1f} {r["p50_ms"]:>10.2f} {r["p99_ms"]:>10.2f}{trouble}'


HEADER = f'{"":<10} {"req/s":>10} {"p50 ms":>10} {"p99 ms":>10}'


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--url')
    ap.add_argument('--seconds', type=int, default=10)
    ap.add_argument('--sizes', default='small,medium,large')
    ap.add_argument('--json', action='store_true')
    a = ap.parse_args()
    server = None if a.url else service.Server().start()
    url = a.url or server.url
    bad = 0
    try:
        if not a.json:
            print(HEADER)
        for size in a.sizes.split(','):
            r = run(size, url, a.seconds)
            bad += r['bad_status'] + r['socket_errors']
            print(json.dumps({'size': size, **r}) if a.json else row(size, r) + f'    {r["command"]}', flush=True)
    finally:
        if server:
            server.stop()
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
