"""A real attnd on a free port, and the clients with which the tests use it.

    with Server('--queue-depth', '4') as server:
        answer = server.post('/v1/attention/forward', {...})
        answer.status, answer.headers['x-request-id'], answer.json()

A Server that is stopped must exit with status 0 and without a sanitizer's report; otherwise the failure shows its log.
The program under test is ATTND_BINARY (default build/attnd). ATTND_SLOWER says how many times slower than usual it may
be, and multiplies time limits (the Makefile sets 10 for the sanitizer builds)."""
import base64
import glob
import http.client
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
# Variables that the user or the Makefile has set for the tests. Started programs do not see them: attnd would take them for options.
SETTINGS = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith('ATTND_')}
BUILD = SETTINGS.get('ATTND_BUILD', os.path.join(HERE, '..', 'build'))
BINARY = SETTINGS.get('ATTND_BINARY', os.path.join(HERE, '..', 'build', 'attnd'))
# the daemon whose devices fail as a script says
FAKE = SETTINGS.get('ATTND_FAKE', os.path.join(HERE, '..', 'build', 'tests', 'attnd-fake'))
# tests/http/shim.c as a library, for shimmed()
SHIM = SETTINGS.get('ATTND_SHIM', os.path.join(HERE, '..', 'build', 'tests', 'shim.so'))
SLOWER = float(SETTINGS.get('ATTND_SLOWER', '1'))
SANITIZED = re.compile(rb'ERROR: (Address|Leak|Thread)Sanitizer|WARNING: ThreadSanitizer|runtime error:')


# Packages that tests/setup.sh fetched from PyPI. They come last in the search path, so that only those missing from
# this Python are used.
FETCHED = (glob.glob(os.path.join(BUILD, 'venv/lib/python3*/site-packages')) or [''])[0]


def optional(name):
    """Imports the module, or returns None if it is not installed."""
    if FETCHED and FETCHED not in sys.path:
        sys.path.append(FETCHED)
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def free_port(family=socket.AF_INET):
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(('::1' if family == socket.AF_INET6 else '127.0.0.1', 0))
        return s.getsockname()[1]


def eventually(condition, seconds=10.0, every=0.01):
    """Waits until condition() is true, or until the time is up. Returns the last result of condition()."""
    end = time.monotonic() + seconds * SLOWER
    while True:
        value = condition()
        if value or time.monotonic() > end:
            return value
        time.sleep(every)


def shimmed(**variables):
    """Environment variables that make tests/http/shim.c cause these faults in a server:
    serve(env=shimmed(NO_POOL=file))."""
    options = os.environ.get('ASAN_OPTIONS', '')
    return {'LD_PRELOAD': os.path.abspath(SHIM), 'ASAN_OPTIONS': options + ':verify_asan_link_order=0',
            **{'SHIM_' + name: str(value) for name, value in variables.items()}}


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.body = status, body
        self.headers = {}
        for name, value in headers:  # several headers of one name are joined, as RFC 9110 section 5.3 says
            name = name.lower()
            self.headers[name] = self.headers[name] + ', ' + value if name in self.headers else value

    def json(self):
        def unique(pairs):
            names = [n for n, _ in pairs]
            assert len(names) == len(set(names)), f'duplicate members in an answer: {names}'
            return dict(pairs)

        def never(text):
            raise AssertionError(f'{text} is not JSON')
        return json.loads(self.body, object_pairs_hook=unique, parse_constant=never)

    def __repr__(self):
        return f'<{self.status} {self.headers} {self.body[:600]!r}>'


class Connection(http.client.HTTPConnection):
    """One keep-alive connection over TCP, TLS or a unix socket."""

    def __init__(self, address, timeout, tls=None):
        super().__init__('localhost', timeout=timeout)
        self.address, self.tls = address, tls

    def connect(self):
        if isinstance(self.address, str):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self.address)
        else:
            self.sock = socket.create_connection(self.address, self.timeout)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname='localhost')

    def ask(self, method, path, body=None, headers=()):
        headers = dict(headers)
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
            headers.setdefault('Content-Type', 'application/json')
        self.request(method, path, body, headers)
        answer = self.getresponse()
        return Answer(answer.status, answer.getheaders(), answer.read())


class Upload(threading.Thread):
    """Sends all of a request except its end. Until finish(), one byte of the end is sent every half second, because a
    draining server closes a connection that sends nothing for 2 s."""

    def __init__(self, server, request, tail=200):
        """tail: number of bytes at the end that are not sent at once. One of them is sent every half second."""
        super().__init__(daemon=True)
        self.socket, self.left, self.enough = server.raw(), request[-tail:], threading.Event()
        self.socket.sendall(request[:-tail])
        self.start()

    def run(self):
        while not self.enough.wait(0.5) and len(self.left) > 1:
            try:
                self.socket.sendall(self.left[:1])
            except OSError:
                return  # the server closed the connection; finish() notices that
            self.left = self.left[1:]

    def leave(self):
        self.enough.set()
        self.join()
        self.socket.close()

    def finish(self):
        """Sends the rest of the request, and returns the answer."""
        self.enough.set()
        self.join()
        with self.socket:
            self.socket.sendall(self.left)
            return RawReader(self.socket).answer()


class Server:
    def __init__(self, *options, listen=None, env=None, ready=True, tls=None, scheme_tcp=True, binary=None):
        self.options, self.extra_env, self.want_ready, self.tls = options, env or {}, ready, tls
        self.listen, self.binary = listen, binary or BINARY
        self.process = None
        self.page_headers = ()  # headers for /metrics, if it needs a token
        self.log_file = tempfile.TemporaryFile()

    # ---- life ----

    def start(self):
        for attempt in range(3):
            if self.listen is None or attempt:
                self.port = free_port()
                self.address = ('127.0.0.1', self.port)
                listen = [f'127.0.0.1:{self.port}']
            else:
                listen = [self.listen] if isinstance(self.listen, str) else list(self.listen)
                first = listen[0]
                if first.startswith('unix:'):
                    self.address, self.port = first[5:], None
                else:
                    host, port = first.rsplit(':', 1)
                    self.address, self.port = (host.strip('[]'), int(port)), int(port)
            args = [self.binary] + [x for a in listen for x in ('--listen', a)] + [str(o) for o in self.options]
            env = {**os.environ, **self.extra_env}
            self.process = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=self.log_file, stderr=self.log_file, env=env)
            if self._wait_until_up():
                return self
            if 'in use' not in self.log():
                break
        raise AssertionError(f'{" ".join(args)} did not come up, status {self.process.poll()}:\n{self.log()}')

    def _wait_until_up(self):
        end = time.monotonic() + 20 * SLOWER
        while time.monotonic() < end and self.process.poll() is None:
            try:
                status = self.get('/readyz' if self.want_ready else '/livez').status
                if status == 200 or status == 401:
                    return True
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.01)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        return False

    def stop(self, sig=signal.SIGTERM, seconds=40):
        """Ends the server, and fails unless it ended with status 0 and without a report."""
        if self.process is None:
            return
        process, self.process = self.process, None
        if process.poll() is None:
            process.send_signal(sig)
        try:
            status = process.wait(seconds * SLOWER)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f'still there {seconds * SLOWER} s after signal {sig}:\n{self.log()}')
        log = self.log_bytes()
        assert status == 0, f'exit status {status}:\n{self.log()}'
        assert not SANITIZED.search(log), f'a sanitizer reported:\n{self.log()}'

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process = None

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.stop()
        else:
            self.kill()
            print(f'---- log of the server ----\n{self.log()}')

    def log_bytes(self):
        size = os.fstat(self.log_file.fileno()).st_size
        return os.pread(self.log_file.fileno(), size, 0)

    def log(self):
        text = self.log_bytes().decode('utf-8', 'replace')
        return text if len(text) < 20000 else text[:8000] + '\n...\n' + text[-12000:]

    @property
    def pid(self):
        return self.process.pid

    # ---- clients ----

    @property
    def url(self):
        return f'{"https" if self.tls else "http"}://127.0.0.1:{self.port}'

    def connect(self, timeout=None):
        return Connection(self.address, timeout or 60 * SLOWER, self.tls)

    def ask(self, method, path, body=None, headers=(), timeout=None):
        connection = self.connect(timeout)
        try:
            return connection.ask(method, path, body, headers)
        finally:
            connection.close()

    def get(self, path, headers=()):
        return self.ask('GET', path, headers=headers)

    def post(self, path, body, headers=()):
        return self.ask('POST', path, body, headers)

    def forward(self, **members):
        return self.post('/v1/attention/forward', members)

    def backward(self, **members):
        return self.post('/v1/attention/backward', members)

    def raw(self, timeout=None):
        """A plain socket, for bytes that no HTTP client would send."""
        if isinstance(self.address, str):
            s = socket.socket(socket.AF_UNIX)
            s.connect(self.address)
        else:
            s = socket.create_connection(self.address)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.settimeout(timeout or 20 * SLOWER)
        return s

    # ---- what the server says about itself ----

    def metrics(self):
        """Returns /metrics as {'name{label="value"}': number}."""
        values = {}
        for line in self.get('/metrics', self.page_headers).body.decode().splitlines():
            if line and not line.startswith('#'):
                name, value = line.rsplit(' ', 1)
                values[name] = float(value)
        return values

    def metric(self, name, **labels):
        """Returns the sum of a metric's series that have these labels."""
        total = 0.0
        for series, value in self.metrics().items():
            if series.split('{')[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += value
        return total

    def inflight(self):
        """Returns the number of requests that hold a slot (a place among the requests that the server allows). A
        request whose answer is being sent holds none. The request for /metrics itself counts as one. The numbers of all
        states are from one answer of /metrics, because they would change between two answers."""
        states = {series: n for series, n in self.metrics().items() if series.startswith('attnd_inflight_requests{')}
        return sum(states.values()) - states['attnd_inflight_requests{state="answering"}']

    def memory_kb(self, field='VmRSS'):
        with open(f'/proc/{self.pid}/status') as f:
            return int(next(line for line in f if line.startswith(field + ':')).split()[1])

    def descriptors(self):
        return len(os.listdir(f'/proc/{self.pid}/fd'))


# ---- is it alive meanwhile? ------------------------------------------------------------------------------------------


class Probe:
    """Sends GET /livez again and again from a separate process, each time on a new connection. At the end of the `with`
    block, `longest` is the longest time that an answer took.

    On a busy machine every process waits for a core now and then. Before each request, the probe therefore also sends a
    byte to another process, which sends it back. `control` is the longest time that such a byte took. A request changes
    threads twice in the server (the thread that accepts, the thread that answers), and the byte changes processes once.
    check() therefore subtracts twice the control, and compares the rest with 100 ms (times ATTND_SLOWER). On an idle
    machine the control is a few milliseconds.

    The control does not show delays in the middle of a request. The system reports for how long a thread was ready to
    run but had no core. Two such times are first subtracted from the time of each request: that of the probe, and that
    of the server's thread for which it is longest. `unexplained` is the longest rest. If a thread waits for another
    thread of the server, it is not ready to run. If a thread makes another one wait, it has a core. Such delays are the
    server's own, and are not subtracted."""
    BOUND = 0.1
    HOPS = 2

    def __init__(self, server, path='/livez', status=200):
        self.server, self.path, self.status = server, path, status

    def _ask(self):
        connection = self.server.connect(timeout=30 * SLOWER)
        try:
            assert connection.ask('GET', self.path).status == self.status
        finally:
            connection.close()

    @staticmethod
    def _coreless(pid):
        """Returns {thread: seconds in which it was ready to run but had no core}."""
        threads = {}
        # the files do not exist if the system does not measure these times
        for path in glob.glob(f'/proc/{pid}/task/*/schedstat'):
            try:
                with open(path) as f:
                    threads[path] = int(f.read().split()[1]) / 1e9
            except OSError:  # the thread has just ended
                pass
        return threads

    def _both_coreless(self):
        return self._coreless(os.getpid()), self._coreless(self.server.pid)

    def _run(self, pipe, here, there):
        if os.fork() == 0:
            here.close()
            while there.recv(1):
                there.send(b'x')
            os._exit(0)
        there.close()
        longest = unexplained = control = count = 0
        failure = None
        while count < 3 or not pipe.poll(0.005):
            start = time.monotonic()
            here.send(b'x')
            here.recv(1)
            control = max(control, time.monotonic() - start)
            before = self._both_coreless()
            start = time.monotonic()
            try:
                self._ask()
            except Exception as e:
                failure = repr(e)
            took, count = time.monotonic() - start, count + 1
            coreless = sum(max([0, *(now[thread] - then[thread] for thread in now.keys() & then)]) for then, now in zip(before, self._both_coreless()))
            longest, unexplained = max(longest, took), max(unexplained, took - coreless)
        pipe.send((longest, unexplained, control, count, failure))
        os._exit(0)

    def __enter__(self):
        self.pipe, theirs = multiprocessing.Pipe()
        here, there = socket.socketpair()
        self.child = os.fork()
        if self.child == 0:
            self._run(theirs, here, there)
        for end in (theirs, here, there):
            end.close()
        return self

    def __exit__(self, kind, value, trace):
        try:
            self.pipe.send(None)
            self.longest, self.unexplained, self.control, self.count, self.failure = self.pipe.recv()
            os.waitpid(self.child, 0)
        finally:
            self.pipe.close()
        print(f'{self.path}: {self.count} answers, {self._waits()}')

    def _waits(self):
        return f'the longest wait {self.longest * 1e3:.0f} ms, unexplained {self.unexplained * 1e3:.0f} ms, of the control {self.control * 1e3:.0f} ms'

    def check(self, bound=None):
        bound = bound or self.BOUND
        assert self.failure is None, f'{self.path}: {self.failure}'
        assert self.unexplained - self.HOPS * self.control <= bound * SLOWER, f'{self.path} waited: {self._waits()}, the bound is {bound * 1e3:.0f} ms'


# ---- raw HTTP --------------------------------------------------------------------------------------------------------


class RawReader:
    """Reads answers from a raw socket one after the other, as strictly as a good client would."""

    def __init__(self, sock):
        self.sock, self.buffer = sock, b''

    def fill(self):
        piece = self.sock.recv(1 << 16)
        self.buffer += piece
        return bool(piece)

    def answer(self, method='POST'):
        """Returns the next answer, or None if the peer closed or reset the connection before an answer."""
        try:
            while b'\r\n\r\n' not in self.buffer:
                if not self.fill():
                    assert not self.buffer, f'closed in the middle of a head: {self.buffer!r}'
                    return None
        except ConnectionResetError:
            return None
        head, self.buffer = self.buffer.split(b'\r\n\r\n', 1)
        lines = head.decode('latin1').split('\r\n')
        assert re.fullmatch(r'HTTP/1\.[01] \d{3} .*', lines[0]), lines[0]
        status = int(lines[0].split()[1])
        headers = [tuple(part.strip() for part in line.split(':', 1)) for line in lines[1:]]
        found = {k.lower(): v for k, v in headers}
        if status < 200 or status == 204 or method == 'HEAD':
            return Answer(status, headers, b'')
        if 'content-length' in found:
            length = int(found['content-length'])
            while len(self.buffer) < length:
                if not self.fill():
                    raise AssertionError(f'closed {length - len(self.buffer)} bytes before the end of a body')
            body, self.buffer = self.buffer[:length], self.buffer[length:]
        else:  # the body lasts until the connection closes
            try:
                while self.fill():
                    pass
            except ConnectionResetError:
                pass
            body, self.buffer = self.buffer, b''
        return Answer(status, headers, body)

    def closed(self):
        """Returns True if the other side closes the connection and sends nothing more."""
        try:
            while True:
                if self.buffer:
                    return False
                if not self.fill():
                    return True
        except ConnectionResetError:
            return True
        except (socket.timeout, TimeoutError):
            return False


def request_bytes(path, body=b'', method='POST', headers=(), host=True):
    head = [f'{method} {path} HTTP/1.1'] + (['Host: localhost'] if host else []) + list(headers)
    if body is not None and not any(h.lower().startswith(('content-length', 'transfer-encoding')) for h in headers):
        head.append(f'Content-Length: {len(body)}')
    return ('\r\n'.join(head) + '\r\n\r\n').encode('latin1') + (body or b'')


def self_signed(folder):
    """Makes (certificate, key) files for localhost with openssl."""
    cert, key = os.path.join(folder, 'cert.pem'), os.path.join(folder, 'key.pem')
    subprocess.run(['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-keyout', key, '-out', cert, '-days', '2',
                    '-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost,IP:127.0.0.1'],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return cert, key


def client_tls(cert):
    return ssl.create_default_context(cafile=cert)


def b64(raw):
    return base64.b64encode(raw).decode()
