"""Requests that are under way while a test does something else. Three things keep a request under way: a gate (a file
for which a scripted device waits, kernels/fake/fake.c), a body whose end is still missing, or work that would take for
ever."""
import contextlib
import os
import subprocess
import threading

import service
import wire
from service import SANITIZED, eventually, request_bytes

FORWARD = '/v1/attention/forward'


class Gate:
    """The gate of a script with hold=PATH is the file PATH. Devices hold their work as long as the file exists. The
    fixture `gate` is such a gate."""

    def __init__(self, path):
        self.path = str(path)
        self.shut()

    def shut(self):
        open(self.path, 'w').close()

    def open(self):
        os.unlink(self.path)

    def await_kernels(self):
        """Waits until a device has started kernels that the gate stops. Without kernels, a request that counts as
        running ends at once if its client leaves."""
        assert eventually(lambda: os.path.getsize(self.path) > 0)


class Asking(threading.Thread):
    """One request that is under way. `answer` is its answer, or the exception."""

    def __init__(self, server, body=None, headers=(), path=FORWARD):
        super().__init__()
        self.server, self.path, self.body, self.headers, self.answer = server, path, body or wire.small_bytes(), headers, None
        self.start()

    def ask(self):
        return self.server.post(self.path, self.body, self.headers)

    def run(self):
        try:
            self.answer = self.ask()
        except Exception as e:
            self.answer = e

    def result(self):
        self.join()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Upload(service.Upload):
    """Uploads the small request slowly, so that the server has begun to receive it."""

    def __init__(self, server):
        super().__init__(server, request_bytes(FORWARD, wire.small_bytes()))
        assert eventually(lambda: server.inflight() >= 1)


GUESTS = 6  # DEVICE_GUESTS of server/base/limits.h: a device's additional streams, for guests


@contextlib.contextmanager
def occupied(server, body, headers=(), queued=0):
    """While the block runs, a device of one thread runs two long requests, which is the most that it takes at a time,
    and `queued` more requests wait. All these requests would take practically for ever, so their clients leave at the
    end."""
    with contextlib.ExitStack() as clients:
        for n in range(1, 3 + queued):
            clients.enter_context(server.raw()).sendall(request_bytes(FORWARD, body, headers=headers))
            assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') == min(n, 2)
                              and server.metric('attnd_queue_requests') == max(n - 2, 0)), server.metrics()
        yield


def dies(server, status, seconds=15):
    """Checks that the server's process ends with that status in time."""
    process, server.process = server.process, None
    try:
        got = process.wait(seconds * service.SLOWER)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f'still there after {seconds * service.SLOWER} s:\n{server.log()}')
    assert got == status, f'exit status {got}, not {status}:\n{server.log()}'
    assert not SANITIZED.search(server.log_bytes()), server.log()
