"""Tests deploy/examples/shards.py and its clients on Dask and Ray, which spread the keys of one sequence over servers.
A server and a worker are killed while they have a request, and the result must still be the same as from one server.
The commands are those of the examples' README. A client is skipped if Dask or Ray is not installed."""
import contextlib
import functools
import glob
import http.client
import http.server
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest

import service

FOLDER = os.path.join(service.HERE, '../deploy/examples')
# The lines that the clients print, as regular expressions. Ray may print lines of its own between these lines.
SAYS = (r'servers: 3; parts: 3; the largest error is (\d\.\de-\d+)', r'refused: k: shape\[2\] is 3, must divide the 4 heads of q')


@pytest.fixture(scope='module')
def shards():
    if service.optional('safetensors.numpy') is None:
        pytest.skip('safetensors is not here (tests/setup.sh test fetches it from PyPI)')
    sys.path.insert(0, FOLDER)
    import shards
    sys.path.remove(FOLDER)
    return shards


# ---- The arithmetic --------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def cpu():
    # on the CPU, because these tests expect smaller errors in float32 than a GPU promises
    with service.Server('--devices', 'cpu') as server:
        yield server


def draw(Sq, Sk, H=4, Hk=2, D=16, Dv=16, dtype=np.float32):
    rng = np.random.default_rng([Sq, Sk])
    return {name: rng.standard_normal((2, *shape)).astype(dtype) for name, shape in
            (('q', (Sq, H, D)), ('k', (Sk, Hk, D)), ('v', (Sk, Hk, Dv)), ('dout', (Sq, H, Dv)))}


CASES = {
    'as many queries as keys': ((60, 60), {'causal': True}),
    'more keys than queries': ((37, 113), {'causal': True}),
    'parts that every query sees': ((5, 113), {'causal': True}),
    'queries that see no key': ((113, 37), {'causal': True}),
    'one query': ((1, 113), {'causal': True}),
    'no mask': ((37, 113), {}),
    'fewer keys than parts': ((37, 3), {'causal': True}),
    'one key': ((37, 1), {}),
    'scale and softcap': ((60, 60), {'causal': True, 'scale': 0.7, 'softcap': 2.0}),
}


@pytest.mark.parametrize('count', (1, 3, 7))
@pytest.mark.parametrize('name', CASES)
def test_parts_of_the_keys_give_what_one_request_gives(cpu, shards, name, count):
    (Sq, Sk), options = CASES[name]
    t = draw(Sq, Sk)
    inputs = {'q': t['q'], 'k': t['k'], 'v': t['v']}
    parts = shards.cut(**inputs, count=count, **options)
    assert 1 <= len(parts) <= count and all(part['k'].size for part in parts)
    assert np.array_equal(np.concatenate([part['k'] for part in parts], 1), t['k'])
    whole, gradients = shards.one_after_the_other([cpu.url], parts, t['dout'])
    want = shards.post([cpu.url], 0, 'forward', inputs, **options)
    want.update(shards.post([cpu.url], 0, 'backward', {**inputs, 'dout': t['dout']}, **options))
    got = {**whole, **gradients}
    assert set(got) == set(want)
    for key in want:
        seen = np.isfinite(want[key])
        assert np.array_equal(got[key][~seen], want[key][~seen]), key  # a query that sees no key has lse -inf
        bound = 2e-6 * max(1, np.abs(want[key][seen]).max())
        assert np.abs(got[key][seen] - want[key][seen]).max() < bound, (key, np.abs(got[key][seen] - want[key][seen]).max())


def test_parts_of_float16_are_rounded_nowhere_before_the_end(server, shards):
    """The parts of a float16 problem have results and gradients in float32, and so have the merged results."""
    t = draw(37, 113, dtype=np.float16)
    inputs = {'q': t['q'], 'k': t['k'], 'v': t['v']}
    whole, gradients = shards.one_after_the_other([server.url], shards.cut(**inputs, count=3, causal=True), t['dout'])
    want = shards.post([server.url], 0, 'forward', inputs, causal=True, out_dtype='float32')
    want.update(shards.post([server.url], 0, 'backward', {**inputs, 'dout': t['dout'], **want}, causal=True, grad_dtype='float32'))
    for key, value in {**whole, **gradients}.items():
        assert value.dtype == np.float32 and np.abs(value - want[key]).max() < 1e-5, key


def test_parts_under_a_causal_mask_have_equal_work(shards):
    """The work of a part is the number of its pairs. A pair is a query and a key that the query sees."""
    for Sq, Sk in ((3000, 3000), (1000, 3000)):
        t = draw(Sq, Sk, H=1, Hk=1, D=1, Dv=1)
        works = []
        for part in shards.cut(t['q'], t['k'], t['v'], 3, causal=True):
            rows, keys = np.ogrid[:Sq - part['first'], :part['k'].shape[1]]
            works.append(int((keys <= rows + part['options']['window'][1]).sum()))
        assert sum(works) == Sq * Sk - Sq * (Sq - 1) // 2 and max(works) / min(works) < 1.01, works


def test_an_option_that_depends_on_positions_is_refused(shards):
    """An option that depends on positions must be refused: the server would apply it to the positions within a part,
    and the result would be wrong without an error."""
    t = draw(4, 9)
    for option in ('window', 'bias', 'alibi_slopes', 'keep_mask', 'dropout_p', 'sinks', 'seqlens_k'):
        with pytest.raises(ValueError, match=option):
            shards.cut(t['q'], t['k'], t['v'], 2, **{option: [1, 1]})


def test_the_bytes_that_a_server_moves_are_those_of_the_readme(serve, shards):
    """The bytes are those that each of three servers counts. They include the tensors, the headers, and the answers of
    /readyz."""
    servers = [serve() for _ in range(3)]
    Sq, Sk, H, Hk, D = 120, 3000, 4, 2, 16
    t = draw(Sq, Sk, H, Hk, D, D)
    shards.one_after_the_other([s.url for s in servers], shards.cut(t['q'], t['k'], t['v'], 3), t['dout'])
    q = out = 2 * Sq * H * D * 4
    lse, kv = 2 * H * Sq * 4, 2 * Sk * Hk * 2 * D * 4
    step = (q + kv / 3) + (out + lse) + (q + kv / 3 + out + lse + out) + (q + kv / 3)
    merge = 3 * (out + lse) + (out + lse)
    for n, s in enumerate(servers):
        moved, _ = shards.moved(s.url)
        assert 0 <= moved - step - (merge if n == 0 else 0) < 4000, (n, moved, step, merge)


# ---- What fails ------------------------------------------------------------------------------------------------------


def process_of(client, server):
    """Returns the process that has the client's end of the open TCP connection between two addresses. Only open
    connections are searched: a closed one that is still in the system's table (TIME_WAIT) may have the same client
    address."""
    wanted = [f'{int.from_bytes(bytes(map(int, host.split("."))), sys.byteorder):08X}:{port:04X}' for host, port in (client, server)]
    with open('/proc/net/tcp') as f:
        inode = next(words[9] for words in map(str.split, f) if words[1:4] == [*wanted, '01'])
    for path in glob.glob('/proc/[0-9]*/fd/*'):
        with contextlib.suppress(OSError):  # the file descriptor may just have been closed
            if os.readlink(path) == f'socket:[{inode}]':
                return int(path.split('/')[2])
    raise AssertionError(f'no process has the connection from {client} to {server}')


class Front(http.server.ThreadingHTTPServer):
    """A proxy that passes requests on to one server, and causes faults. The proxy counts the POSTs that arrive, from 1.
    `plan` is {number of a POST: its fault}. 'server' kills the server, and 'worker' kills the process that sent the
    request. 'half' passes on half of the answer. For 'full' the proxy answers like a server whose queue is full, and
    for 'proxy' like a proxy that finds no server. `done` lists what happened. After its server was killed, a front
    closes every connection without an answer."""
    daemon_threads = True

    def __init__(self, server, plan):
        super().__init__(('127.0.0.1', 0), Passing)
        self.attnd, self.plan, self.done, self.posts = server, plan, [], itertools.count(1)
        self.url = f'http://127.0.0.1:{self.server_port}'
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # the client may have been killed before it has read the answer


class Passing(http.server.BaseHTTPRequestHandler):
    def pass_on(self, body=None, part=1.0):
        try:
            answer = self.server.attnd.ask(self.command, self.path, body, dict(self.headers))
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        self.answer(answer.status, answer.headers, answer.body, part)

    def answer(self, status, headers, body, part=1.0):
        self.send_response(status)
        for name, value in headers.items():
            if name not in ('connection', 'date', 'server'):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:int(len(body) * part)])
        self.close_connection = True

    def do_GET(self):
        self.pass_on()

    def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        what = self.server.plan.get(next(self.server.posts))
        if what == 'server':
            self.server.attnd.process.kill()
            self.server.attnd.process.wait()
        if what == 'worker':
            os.kill(process_of(self.client_address, self.server.server_address), signal.SIGKILL)
        if what:
            self.server.done.append(what)
        if what == 'full':
            self.answer(503, {'Retry-After': '0'}, b'{"detail": "The queue is full"}')
            return
        if what == 'proxy':
            self.answer(502, {}, b'<html>')
            return
        self.pass_on(body, 0.5 if what == 'half' else 1.0)

    def log_message(self, *args):
        pass


@pytest.fixture
def fronts():
    """fronts({2: 'server'}, {}) starts one server for each plan, and a Front before each server."""
    started = []

    def start(*plans):
        started.extend(Front(service.Server('--devices', 'cpu').start(), plan) for plan in plans)
        return started
    yield start
    for front in started:
        front.shutdown()
        front.server_close()
        if front.attnd.process.poll() is None:
            front.attnd.stop()


def test_half_an_answer_and_no_answer_are_no_result(fronts, shards):
    half, dead = fronts({1: 'half'}, {1: 'server'})
    t = draw(4, 9)
    inputs = {'q': t['q'], 'k': t['k'], 'v': t['v']}
    with pytest.raises(shards.Unavailable, match='IncompleteRead'):
        shards.post([half.url], 0, 'forward', inputs)
    with pytest.raises(shards.Unavailable, match='RemoteDisconnected'):
        shards.post([dead.url], 0, 'forward', inputs)
    with pytest.raises(shards.Unavailable, match='none of .* is ready'):
        shards.post([dead.url], 0, 'forward', inputs)
    # the answer comes from the next server that is ready
    assert shards.post([dead.url, half.url], 0, 'forward', inputs)['out'].shape == (2, 4, 4, 16)


def test_a_full_server_is_tried_again_and_a_wrong_request_is_not(fronts, shards):
    front, = fronts({1: 'full', 2: 'proxy'})
    t = draw(4, 9)
    inputs = {'q': t['q'], 'k': t['k'], 'v': t['v']}
    with pytest.raises(shards.Unavailable, match='The queue is full'):
        shards.post([front.url], 0, 'forward', inputs)
    with pytest.raises(shards.Unavailable, match='status 502'):
        shards.post([front.url], 0, 'forward', inputs)
    wrong = r'^v: shape\[1\] is 8, must be 9, the keys of k$'
    with pytest.raises(shards.Refused, match=wrong):
        shards.post([front.url], 0, 'forward', {**inputs, 'v': t['v'][:, :8]})
    # cut() refuses a v that is longer or shorter than k. Without this check the server would refuse a part that lacks
    # rows of v, and a longer v would be cut without an error.
    with pytest.raises(ValueError, match=wrong):
        shards.cut(t['q'], t['k'], t['v'][:, :8], 3)


@contextlib.contextmanager
def surroundings():
    """Returns the environment for a program that starts Dask or Ray: its files go into a folder of its own, which is
    removed afterwards, and it sends no usage statistics. The folder's path is short, because Ray makes sockets in
    it."""
    folder = tempfile.mkdtemp(prefix='attnd-')
    env = {name: value for name, value in os.environ.items() if name not in ('RAY_ADDRESS', 'DASK_SCHEDULER_ADDRESS')}
    try:
        yield {**env, 'HOME': folder, 'RAY_TMPDIR': folder, 'DASK_TEMPORARY_DIRECTORY': folder, 'RAY_USAGE_STATS_ENABLED': '0'}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.limit(180)
@pytest.mark.parametrize('calls', ((1, 2), (2, 1)))
@pytest.mark.parametrize('engine', ('dask', 'ray'))
def test_a_server_and_a_worker_are_killed_and_the_result_is_right(fronts, clone, engine, calls):
    """The second server is killed at its request number calls[0] (a forward or a backward). The worker that sends
    request number calls[1] to the third server is killed too."""
    if not os.path.isdir(os.path.join(service.FETCHED, {'dask': 'distributed', 'ray': 'ray'}[engine])):
        pytest.skip(f'{engine} is not here (tests/setup.sh test fetches it from PyPI)')
    name = f'{engine}_client.py'
    with open(os.path.join(FOLDER, 'README.md')) as f:
        command = shlex.split(re.search(rf'\| \[{name}\].*\| `(.*)` \|$', f.read(), re.M).group(1))
    assert command == ['python3', name]
    command[0] = os.path.join(service.BUILD, 'venv/bin/python')
    three = fronts({}, {calls[0]: 'server'}, {calls[1]: 'worker'})
    with surroundings() as env:
        done = subprocess.run(command + [front.url for front in three], env=env, cwd=clone / 'deploy/examples',
                              capture_output=True, text=True, timeout=170 * service.SLOWER)
    said = [re.search(f'^{line}$', done.stdout, re.M) for line in SAYS]
    assert done.returncode == 0 and all(said), done.stdout + done.stderr
    assert float(said[0].group(1)) < 1e-6
    assert [front.done for front in three] == [[], ['server'], ['worker']]
    assert three[1].attnd.process.poll() == -signal.SIGKILL
