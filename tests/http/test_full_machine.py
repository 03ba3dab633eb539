"""A machine without free threads or without address space. If a server cannot get what it needs at the start, it prints
why and does not start. After the start it answers 503 and goes on."""
import http.client
import json
import mmap
import struct
import subprocess
import time

import numpy as np
import pytest

import service
import wire
from service import Server

FORWARD = '/v1/attention/forward'
FEW = ('--http-threads', '2', '--cpu-threads', '2', '--devices', 'cpu')
# The smallest body that a thread of libuv checks instead of an HTTP thread (CHECK_LONG_BODY_BYTES).
LONG = json.dumps({n: wire.tensor(np.ones((1, 2100, 8, 64)), 'float16') for n in 'qkv'}).encode()
assert len(LONG) > 8 << 20


def start(*options, env=None, limit=None):
    """Starts a server under a limit. Returns the server, or (exit status, what it printed) if it did not start."""
    server = Server(*options, env=env)
    server.port = service.free_port()
    server.address = ('127.0.0.1', server.port)
    args = [service.BINARY, '--listen', f'127.0.0.1:{server.port}', *map(str, options)]
    if limit:
        args = ['prlimit', f'--as={limit}', *args]
    server.process = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=server.log_file, stderr=server.log_file,
                                      env={**service.os.environ, **(env or {})})
    if server._wait_until_up():
        return server, None
    status, server.process = server.process.returncode, None
    return None, (status, server.log())


def refused(ended, *says):
    """Checks that the server did not start, and printed one sentence with these words."""
    status, log = ended
    sentence = [line for line in log.splitlines() if line.startswith('attnd: ')]
    assert status == 69 and len(sentence) == 1 and all(text in sentence[0] for text in says), (status, log)


def asked(server, body):
    """Sends a body and returns the status of the answer. The client sends its whole body before it reads, so it may
    miss an earlier refusal. A connection that breaks therefore counts as 503."""
    try:
        status = server.post(FORWARD, body).status
    except OSError as gone:
        status = 503
        time.sleep(0.2)  # an ending process needs some time
        assert server.process.poll() is None, f'{gone}: status {server.process.returncode}: {server.log()}'
    assert server.process.poll() is None, (server.process.returncode, server.log())
    return status


def serves(server):
    """Sends a long and a small body, and checks that the server then ends with status 0. Returns both statuses."""
    answers = [asked(server, LONG), asked(server, wire.small_bytes())]
    server.stop()
    return answers


def test_a_server_begins_with_all_its_threads_or_not_at_all():
    """The number of threads is limited, as a cgroup may do. Without a check at the start, libuv would abort the process
    at the first long body."""
    started = []
    for threads in range(2, 24):
        server, ended = start(*FEW, env=service.shimmed(THREADS=threads))
        started.append(server is not None)
        if server:
            assert serves(server) == [200, 200], threads
        else:
            refused(ended, 'thread')
    assert started == sorted(started) and True in started and False in started, started


@pytest.mark.skipif(service.SLOWER > 1, reason='a sanitizer needs all of the address space')
@pytest.mark.parametrize('megabytes', range(40, 700, 60))
def test_under_a_limit_of_address_space_nothing_dies(megabytes):
    if megabytes * 1000000 < service.os.path.getsize(service.BINARY) + (20 << 20):
        pytest.skip('the system cannot load the program')
    server, ended = start(*FEW, limit=megabytes * 1000000)
    if server:
        assert set(serves(server)) <= {200, 503}
    else:
        refused(ended, f'address space is limited to {megabytes}000000 bytes (RLIMIT_AS, ulimit -v)')


def test_no_allocation_of_a_tls_handshake_ends_the_server(serve, tmp_path):
    """In each turn another allocation of a TLS handshake fails. The server must go on. Without help of the server, GMP
    (the library with which GnuTLS computes) would abort the process."""
    file = tmp_path / 'countdown'
    file.write_bytes(bytes(4096))
    cert, key = service.self_signed(str(tmp_path))
    server = serve('--tls-cert', cert, '--tls-key', key, '--log-level', 'error', env=service.shimmed(NO_MEMORY=file), tls=service.client_tls(cert))
    answers = []
    with open(file, 'r+b') as f, mmap.mmap(f.fileno(), 4) as countdown:
        for n in range(1, 1000):
            countdown[:] = struct.pack('<i', n)
            try:
                answers.append(server.get('/livez').status)
            except (OSError, http.client.HTTPException):
                answers.append('closed')
            left, = struct.unpack('<i', countdown[:])
            countdown[:] = bytes(4)
            assert server.process.poll() is None, (n, server.process.returncode, server.log())
            if left > 0:
                break
    assert left > 0 and answers[-1] == 200 and 'closed' in answers, answers
