"""Measures how long one client waits while another one floods the server.

    python3 tests/load/fairness.py build/attnd [other/attnd ...]

Two clients have different tokens. Alice sends one problem after another, first alone, and then while Bob keeps many
connections busy. The programs run in turns. For each program, the script prints the median, the 99th percentile and the
longest of Alice's times in milliseconds. It also prints how many answers per second Bob gets at the same time. The aim:
a problem that takes a time t alone is answered within 2 t + 50 ms, whatever Bob sends. `--devices` is passed on to the
server."""
import argparse
import base64
import http.client
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

FORWARD = '/v1/attention/forward'


def problem(B, S, H, D, **options):
    data = os.urandom(2 * B * S * H * D)
    data = bytes(b & 0x3b if n % 2 else b for n, b in enumerate(data[:4096])) * (len(data) // 4096 + 1)
    tensor = {'shape': [B, S, H, D], 'dtype': 'float16', 'data': base64.b64encode(data[:2 * B * S * H * D]).decode()}
    return json.dumps({'q': tensor, 'k': tensor, 'v': tensor, **options}).encode()


# Bob's floods by name: (number of connections, body of each request)
FLOODS = {
    'long rows that leave float32': (3, lambda: problem(1, 50000, 1, 1, scale=3e38, outputs=['lse'])),
    'long': (9, lambda: problem(1, 50000, 1, 4, softcap=30.0, outputs=['lse'])),
    'long of one step': (9, lambda: problem(1, 24000, 1, 4, softcap=30.0, outputs=['lse'])),
    'medium': (200, lambda: problem(1, 2048, 8, 64)),
    'small': (200, lambda: problem(1, 64, 2, 64)),
    'verified': (50, lambda: problem(1, 2048, 2, 64, verify=1000)),
}


def flood(port, connections, body, stop, answers):
    """Keeps this many connections busy until `stop` is set, and counts the answers. Takes little processor time
    itself."""
    import selectors
    request = (f'POST {FORWARD} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer bob\r\nContent-Type: application/json\r\n'
               f'Content-Length: {len(body)}\r\n\r\n').encode() + body
    ready = selectors.DefaultSelector()

    def connect():
        s = socket.create_connection(('127.0.0.1', port))
        s.setblocking(False)
        ready.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE, [0, b''])
    for _ in range(connections):
        connect()
    while not stop.is_set():
        for key, events in ready.select(0.1):
            s, state = key.fileobj, key.data
            try:
                if events & selectors.EVENT_WRITE:
                    state[0] += s.send(request[state[0]:state[0] + 65536])
                    if state[0] == len(request):
                        ready.modify(s, selectors.EVENT_READ, state)
                if events & selectors.EVENT_READ:
                    state[1] += s.recv(1 << 20)
                    head, _, rest = state[1].partition(b'\r\n\r\n')
                    if not state[1]:
                        raise ConnectionError
                    at = head.lower().find(b'content-length:')
                    if at >= 0 and len(rest) >= int(head[at + 15:].split(b'\r\n')[0]):
                        answers.value += 1
                        ready.modify(s, selectors.EVENT_READ | selectors.EVENT_WRITE, [0, b''])
            except OSError:
                ready.unregister(s)
                s.close()
                connect()


class Server:
    def __init__(self, binary, arguments):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            self.port = s.getsockname()[1]
        self.tokens = tempfile.NamedTemporaryFile('w')
        self.tokens.write('alice\nbob\n')
        self.tokens.flush()
        self.process = subprocess.Popen([binary, '--listen', f'127.0.0.1:{self.port}', '--token-file', self.tokens.name,
                                         '--log-level', 'error', *arguments])
        self.connection = http.client.HTTPConnection('127.0.0.1', self.port)
        for _ in range(600):
            try:
                self.connection.request('GET', '/readyz')
                if self.connection.getresponse().read() is not None:
                    return
            except OSError:
                self.connection.close()
                time.sleep(0.1)
        sys.exit('the server does not start')

    def times(self, body, seconds):
        """Sends at least three requests, one after the other. Returns how long each took."""
        took, until = [], time.monotonic() + seconds
        while len(took) < 3 or time.monotonic() < until:
            began = time.monotonic()
            self.connection.request('POST', FORWARD, body, {'Authorization': 'Bearer alice', 'Content-Type': 'application/json'})
            answer = self.connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                print('  ', answer.status, text[:200])
            took.append(1e3 * (time.monotonic() - began))
            time.sleep(0.01)
        return took

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def described(times):
    times = sorted(times)
    return f'{statistics.median(times):9.1f} {times[min(len(times) - 1, len(times) * 99 // 100)]:9.1f} {times[-1]:9.1f}'


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument('binaries', nargs='+')
    options.add_argument('--devices')
    options.add_argument('--seconds', type=float, default=8)
    options.add_argument('--turns', type=int, default=2)
    options.add_argument('--floods', nargs='*', default=list(FLOODS), choices=list(FLOODS))
    given = options.parse_args()
    arguments = ['--devices', given.devices] if given.devices else []
    print(f'{"flood":32}{"program":24}{"alone p50":>10}{"p99":>10}{"worst":>10}{"beside p50":>11}{"p99":>10}{"worst":>10}'
          f'{"of Bob/s":>10}')
    for name in given.floods:
        connections, body = FLOODS[name]
        for _ in range(given.turns):
            for binary in given.binaries:
                server, stop = Server(binary, arguments), multiprocessing.Event()
                answers = multiprocessing.Value('q', 0)
                asked = problem(1, 512, 4, 64)
                try:
                    server.times(asked, 1)
                    alone = server.times(asked, given.seconds / 2)
                    bob = multiprocessing.Process(target=flood, daemon=True,
                                                  args=(server.port, connections, body(), stop, answers))
                    bob.start()
                    time.sleep(1)
                    began, before = time.monotonic(), answers.value
                    beside = server.times(asked, given.seconds)
                    rate = (answers.value - before) / (time.monotonic() - began)
                finally:
                    stop.set()
                    server.stop()
                bob.terminate()
                print(f'{name:32}{binary[-23:]:24}{described(alone)}  {described(beside)} {rate:9.1f}', flush=True)


if __name__ == '__main__':
    main()
