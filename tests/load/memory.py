#!/usr/bin/env python3
"""Measures how much memory many connections take.

    python3 tests/load/memory.py bodies        connections that send bodies of 2.2 MB of tensors at the same time
    python3 tests/load/memory.py connections   connections that send one GET /livez each with a head of 49 KB, and stay
                                               open. Then a client with a token sends requests; prints how long it waits

Each of the two starts a server of its own (--binary build/attnd). Resident memory is VmRSS of /proc, and its peak is
VmHWM. For `bodies` the expected bound is --staging-bytes, plus what the server counts for each connection
(attnd_connection_bytes)."""
import argparse
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
import service  # noqa: E402
import wire  # noqa: E402

FORWARD = '/v1/attention/forward'
MIB = 1 << 20


def memory(server, what):
    with open(f'/proc/{server.process.pid}/status') as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(what + ':'))


def body(args):
    """Returns the JSON of a forward whose tensors have args.bytes bytes. If args.kind is 'json', the forward has one
    query, so its answer is short. Otherwise it has so many queries that its answer is large too."""
    keys = args.bytes // (2 * 64 * 2)
    queries = 1 if args.kind == 'json' else keys // 2
    x = {n: wire.tensor(np.zeros((1, m, 1, 64)), 'float16') for n, m in (('q', queries), ('k', keys - queries // 2), ('v', keys - queries // 2))}
    return json.dumps({**x, 'window': [1, 0]} if queries > 1 else x).encode()


def crowd(server, count, rounds, request):
    """Runs `rounds` rounds. In each round, every connection first sends its body except for the last byte. After all
    connections have done so, they hold as much memory as they can get. Then the last bytes are sent and the answers
    read."""
    answers, lock, gate = {}, threading.Lock(), threading.Barrier(count)

    def client():
        for _ in range(rounds):
            with socket.create_connection(server.address, timeout=60) as s:
                try:
                    s.sendall(service.request_bytes(FORWARD, request, headers=['Content-Type: application/json'])[:-1])
                except OSError:
                    pass  # the server refused this connection, which counts as an answer
                gate.wait()
                try:
                    s.sendall(request[-1:])
                    status = service.RawReader(s).answer().status
                except (OSError, AssertionError, ValueError):
                    status = 'closed'
            with lock:
                answers[status] = answers.get(status, 0) + 1
    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def bodies(args):
    staging = args.staging << 20
    with service.Server('--staging-bytes', staging, '--log-level', 'error', binary=args.binary) as server:
        server.post(FORWARD, wire.small_bytes())
        idle, request = memory(server, 'VmRSS'), body(args)
        answers = crowd(server, args.connections, args.rounds, request)
        peak = memory(server, 'VmHWM')
    each = 192 << 10
    more = peak - idle
    print(f'{args.connections} connections, bodies of {len(request)} bytes ({args.kind}), staging memory {staging / MIB:.0f} MiB: answers {answers}')
    print(f'idle {idle / MIB:.1f} MiB, peak {peak / MIB:.1f}: {more / MIB:.1f} more, {more / staging:.3f} of the limit; '
          f'without {each >> 10} KiB for each connection {(more - args.connections * each) / staging:.3f}')


def connections(args):
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.connections + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    head = b'GET /livez HTTP/1.1\r\nHost: a\r\n' + b''.join(b'X-%d: %s\r\n' % (i, b'a' * 8100) for i in range(6))
    with tempfile.NamedTemporaryFile('w') as tokens:
        tokens.write('alice\nbob\n')
        tokens.flush()
        with service.Server('--token-file', tokens.name, '--log-level', 'error', binary=args.binary) as server:
            idle, held = memory(server, 'VmRSS'), []
            for _ in range(args.connections):
                held.append(socket.create_connection(server.address, timeout=10))
                held[-1].sendall(head)
            time.sleep(0.5)
            unfinished = memory(server, 'VmRSS')
            for s in held:
                try:
                    s.sendall(b'\r\n')
                    s.recv(4096)
                except OSError:
                    pass  # the server closed this connection to make room for others
            print(f'{len(held)} connections: idle {idle / MIB:.1f} MiB, heads not finished {unfinished / MIB:.1f}, answered {memory(server, "VmRSS") / MIB:.1f}')
            times, others = [], []
            for _ in range(100):
                began = time.perf_counter()
                try:
                    with_token = server.post(FORWARD, wire.small_bytes(), headers={'Authorization': 'Bearer alice'}).status
                except OSError as error:
                    with_token = type(error).__name__
                (times if with_token == 200 else others).append((time.perf_counter() - began) * 1e3)
            print(f'with a token: {len(times)} answered, {len(others)} not' +
                  (f'; p50 {statistics.median(times):.2f} ms, worst {max(times):.2f} ms' if times else ''))
            for s in held:
                s.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=('bodies', 'connections'))
    parser.add_argument('--binary', default=service.BINARY)
    parser.add_argument('--connections', type=int, help='200 and 10000')
    parser.add_argument('--rounds', type=int, default=4)
    parser.add_argument('--staging', type=int, default=256, help='MiB')
    parser.add_argument('--bytes', type=int, default=2200000)
    parser.add_argument('--kind', choices=('json', 'answers'), default='json', help='json: one query; answers: long answers too')
    args = parser.parse_args()
    args.connections = args.connections or {'bodies': 200, 'connections': 10000}[args.what]
    {'bodies': bodies, 'connections': connections}[args.what](args)


if __name__ == '__main__':
    main()
