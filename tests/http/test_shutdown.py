"""SIGTERM under load: no accepted request is lost, and the exit status is 0. A second signal makes the server hurry.
SIGINT has the same effect as SIGTERM."""
import http.client
import os
import signal
import subprocess
import threading
import time

import pytest

import service
import slow
import wire
from service import Server, eventually, request_bytes
from test_faults import running
from under_way import GUESTS, Asking, Upload

FORWARD = '/v1/attention/forward'


def drain(server):
    """Sends SIGTERM, and waits until the server has begun to drain."""
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: ' draining ' in server.log()), server.log()


class Load:
    """Threads that send requests without pause, and note the outcome of each request."""

    def __init__(self, server, threads=6, body=None):
        self.server, self.body = server, body or wire.small_bytes()
        self.answered, self.refused, self.lost, self.stop = [], 0, [], False
        self.threads = [threading.Thread(target=self.run) for _ in range(threads)]
        for t in self.threads:
            t.start()

    def run(self):
        while not self.stop:
            connection = self.server.connect(timeout=30 * service.SLOWER)
            try:
                connection.connect()
            except OSError:
                self.refused += 1  # the server no longer listens, so this connection is refused
                return
            try:
                while not self.stop:
                    got = b''
                    sent = False
                    try:
                        connection.request('POST', FORWARD, self.body)
                        sent = True
                        answer = connection.getresponse()
                        got = answer.read()
                        self.answered.append(answer.status)
                        if answer.will_close:
                            break
                    except (OSError, http.client.HTTPException) as e:
                        # If the server closes a kept connection before it has read a byte of the next request, it did
                        # not accept that request. It did accept a connection's first request, and every request whose
                        # answer was cut. `lost` has requests of both kinds.
                        self.lost.append((type(e).__name__, sent, len(got)))
                        break
            finally:
                connection.close()

    def end(self):
        self.stop = True
        for t in self.threads:
            t.join()


@pytest.mark.parametrize('sig', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('pause', [0.05, 0.3])
def test_under_load_everything_accepted_is_answered(sig, pause):
    server = Server('--log-level', 'info').start()
    load = Load(server)
    time.sleep(pause * service.SLOWER)
    assert eventually(lambda: len(load.answered) > 20)
    server.stop(sig)
    load.end()
    assert set(load.answered) <= {200, 503}, set(load.answered)
    cut = [x for x in load.lost if x[0] not in ('RemoteDisconnected', 'ConnectionResetError', 'BrokenPipeError')]
    assert not cut, cut
    # each of the six threads has one connection, and at most one request was on its way there when the server closed it
    assert len(load.lost) <= 6, f'{load.lost}\n{server.log()}'


@pytest.mark.limit(120)
def test_again_and_again(tmp_path):
    """Several threads take part in a shutdown, in an order that varies. The test therefore starts and stops many
    servers, with requests in every stage."""
    for round_ in range(8 if service.SLOWER > 1 else 20):
        server = Server('--cpu-threads', '1').start()
        load = Load(server, threads=4)
        half = server.raw()
        half.sendall(request_bytes(FORWARD, wire.small_bytes())[:100])
        time.sleep(0.002 * round_)
        server.stop()
        load.end()
        half.close()
        assert set(load.answered) <= {200, 503}


def test_what_runs_and_what_waits_is_finished(fake, gate):
    server = fake(f'hold={gate.path}', '--max-batch', 1)
    requests = [Asking(server) for _ in range(8 + GUESTS)]
    assert eventually(lambda: running(server)['fake:0'] == 4 + GUESTS and server.metric('attnd_queue_requests') == 4)
    drain(server)
    gate.open()
    answers = [r.result() for r in requests]
    assert [a.status for a in answers] == [200] * len(requests), answers
    assert all(a.headers.get('connection', '').lower() == 'close' for a in answers)
    # the server must end by itself; a second signal would make it hurry
    assert server.process.wait(40 * service.SLOWER) == 0, server.log()


def test_an_upload_that_has_begun_is_finished():
    server = Server().start()
    upload = Upload(server)
    drain(server)
    time.sleep(0.3)
    assert server.process.poll() is None
    assert upload.finish().status == 200
    server.stop()


def test_readiness_goes_first():
    """During a drain /readyz fails first. A new connection is refused or gets 503. An existing connection is told to
    close."""
    server = Server('--cpu-threads', '1', '--max-batch', '1').start()
    body = slow.calibrated(server, 1.0)
    held = server.connect()
    assert held.ask('GET', '/readyz').status == 200
    computed = Asking(server, body)
    assert eventually(lambda: server.inflight() == 1)
    drain(server)
    try:
        answer = held.ask('GET', '/readyz')
        assert answer.status == 503, answer
    except (OSError, http.client.HTTPException):
        pass  # the server may have closed the idle connection
    assert computed.result().status == 200
    server.stop()


@pytest.mark.parametrize('options', [[], ['--supervise']])
def test_who_comes_during_a_drain_is_refused_at_once(options):
    """A draining server refuses new connections at once, and a load balancer then takes the next server. If it accepted
    connections, their clients would wait for a server that is about to end."""
    server = Server(*options).start()
    upload = Upload(server)
    server.process.send_signal(signal.SIGTERM)

    def refused():
        try:
            server.connect().connect()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            # the server closed its socket just after this handshake; from this time on connections are refused
            return False
    assert eventually(refused)
    assert upload.finish().status == 200
    server.stop()


@pytest.mark.parametrize('options', [[], ['--supervise']])
def test_nobody_is_let_in_by_a_socket_that_is_about_to_close(tmp_path, options):
    """The system's kernel may complete a handshake between the server's last accept() and its close(). The client then
    sends a request and gets a reset. A load balancer may not repeat such a request, so the server must prevent this."""
    gate = tmp_path / 'gate'
    server = Server(*options, env=service.shimmed(HANG_CLOSE=gate)).start()
    gate.touch()
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: os.path.exists(f'{gate}.reached')), 'it does not come to close()'
    with pytest.raises(ConnectionRefusedError):
        server.connect().connect()
    gate.unlink()
    server.stop()


def ask_those_kept(server):
    """Lets the server drain, and then sends a request on each connection that a load balancer has kept. Returns False
    if this machine paused the test so long that the server may have closed some of the connections."""
    kept = [server.connect() for _ in range(8)]
    for connection in kept:
        assert connection.ask('GET', '/livez').status == 200
    kept.append(server.connect())  # a kept connection that was opened in advance and not used yet
    kept[-1].connect()
    time.sleep(0.8)  # longer than the silence after which a draining server closes a connection
    last = time.monotonic()
    drain(server)
    for connection in kept:
        time.sleep(0.1)
        began, sent, failure = time.monotonic(), None, None
        try:
            connection.request('POST', FORWARD, wire.small_bytes())
            sent = time.monotonic()
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as e:
            failure = e
        if (sent or time.monotonic()) - last > 0.45:
            return False
        assert failure is None, failure
        assert answer.status == 200 and answer.headers['connection'].lower() == 'close', answer.headers
        last = began
    with pytest.raises(ConnectionRefusedError):
        server.connect().connect()
    return True


def test_connections_that_a_balancer_keeps_are_good_for_its_next_requests(serve):
    """A load balancer does not know yet that the server drains. The server must therefore answer requests on
    connections that the balancer keeps. If it closed these connections, a request would sometimes be on its way at that
    moment, and would be lost."""
    assert any(ask_those_kept(serve()) for _ in range(8)), 'this machine never asks in time'


def test_a_second_signal_hurries():
    server = Server('--cpu-threads', '1', '--max-batch', '1', '--drain-ms', '600000').start()
    upload = Upload(server)  # this unfinished request keeps the drain waiting
    process = server.process
    drain(server)
    time.sleep(0.3)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(20 * service.SLOWER)
    assert time.monotonic() - start < 10 * service.SLOWER
    upload.leave()
    assert process.returncode is not None and process.returncode >= 0, f'killed by signal {-process.returncode}:\n{server.log()}'
    assert not service.SANITIZED.search(server.log_bytes()), server.log()


def test_draining_has_a_limit():
    server = Server('--drain-ms', '500').start()
    upload = Upload(server)
    start = time.monotonic()
    server.stop()
    assert 0.3 < time.monotonic() - start < 15 * service.SLOWER
    upload.leave()


def test_idle_it_stops_at_once():
    server = Server().start()
    held = server.connect()
    assert held.ask('GET', '/livez').status == 200
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < 8 * service.SLOWER
    held.close()


def test_the_port_is_free_again():
    server = Server().start()
    server.stop()
    again = Server(listen=f'127.0.0.1:{server.port}').start()
    assert again.get('/livez').status == 200
    again.stop()


def test_sigpipe_and_sighup_do_not_kill(server):
    server.process.send_signal(signal.SIGPIPE)
    time.sleep(0.05)
    assert server.post(FORWARD, wire.small_bytes()).status == 200


# ---- From the first moment to the last -------------------------------------------------------------------------------


def during_its_start(tmp_path, *options):
    """Returns (process, gate, log) of a server that is starting. The server hangs in listen() until the gate (a file)
    is gone."""
    gate, log = tmp_path / 'gate', tmp_path / 'log'
    gate.touch()
    port = service.free_port()
    with open(log, 'wb') as f:
        process = subprocess.Popen([service.BINARY, '--listen', f'127.0.0.1:{port}', *options], stderr=f,
                                   env={**os.environ, **service.shimmed(HANG_LISTEN=gate)})
    assert eventually(lambda: os.path.exists(f'{gate}.reached')), 'it does not come to listen()'
    return process, gate, log


@pytest.mark.parametrize('options', [[], ['--supervise']])
def test_sighup_during_the_start_does_not_kill(tmp_path, options):
    process, gate, log = during_its_start(tmp_path, *options)
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    gate.unlink()
    assert eventually(lambda: b' ready ' in log.read_bytes() or process.poll() is not None), log.read_bytes()
    assert process.poll() is None, f'{process.returncode}: {log.read_bytes()}'
    process.terminate()
    assert process.wait(30 * service.SLOWER) == 0, log.read_bytes()


@pytest.mark.parametrize('sig', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('options', [[], ['--supervise']])
def test_a_stop_during_the_start_is_an_orderly_one(tmp_path, options, sig):
    process, gate, log = during_its_start(tmp_path, *options)
    process.send_signal(sig)
    time.sleep(0.05)
    gate.unlink()
    assert process.wait(30 * service.SLOWER) == 0, log.read_bytes()


HARD_STOP_S = 2 + 5  # a server that hangs ends this many seconds after the drain: LOOP_HURRY_MS and SIGNALS_GRACE_MS


@pytest.mark.parametrize('where', ['HANG_STOP', 'HANG_RESUME'])
def test_a_stop_that_hangs_ends_with_71(tmp_path, where):
    """A signal tells the server to stop, but the shutdown hangs: in libmicrohttpd, which waits for its threads, or in
    the scheduler's loop, which never gets the signal. In both cases the server must end with status 71."""
    gate = tmp_path / 'gate'
    server = Server('--drain-ms', '100', env=service.shimmed(**{where: gate})).start()
    body = slow.calibrated(server, 0.2)
    gate.touch()
    s = server.raw()
    s.sendall(request_bytes(FORWARD, body))
    if where == 'HANG_RESUME':
        assert eventually(lambda: os.path.exists(f'{gate}.reached')), 'the loop answers nothing'
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait((HARD_STOP_S + 20) * service.SLOWER)
    assert status == 71 and HARD_STOP_S - 1 < time.monotonic() - start, (status, time.monotonic() - start)
    assert 'it did not end in time' in server.log()
    s.close()


def test_a_second_signal_brings_the_hard_stop_nearer(tmp_path):
    gate = tmp_path / 'gate'
    server = Server('--drain-ms', '600000', env=service.shimmed(HANG_STOP=gate)).start()
    gate.touch()
    upload = Upload(server)
    drain(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait((HARD_STOP_S + 20) * service.SLOWER) == 71
    upload.leave()


def test_a_server_that_cannot_end_itself_is_killed_by_its_supervisor():
    server = Server('--drain-ms', '100', '--supervise').start()
    with open(f'/proc/{server.pid}/task/{server.pid}/children') as f:
        child = int(f.read().split()[0])
    os.kill(child, signal.SIGSTOP)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait((HARD_STOP_S + 20) * service.SLOWER)
    assert status == 128 + signal.SIGKILL and HARD_STOP_S < time.monotonic() - start, (status, server.log())
    assert eventually(lambda: not os.path.exists(f'/proc/{child}'))
