"""SIGTERM under load: nothing that was accepted is lost, and the exit status is 0. A second one hurries;
SIGINT is the same."""
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
from service import RawReader, Server, eventually, request_bytes

FORWARD = '/v1/attention/forward'


class Load:
    """Threads that ask without pause and note what became of each request."""

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
                self.refused += 1  # the listener is gone
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
                        # A keep-alive connection may be closed between two requests; that one was not accepted. A
                        # connection's first request, or a cut answer, was.
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
    assert len(load.lost) <= 6, f'{load.lost}\n{server.log()}'  # at most the idle moment of each connection


@pytest.mark.limit(120)
def test_again_and_again(tmp_path):
    """Shutdown has races of its own: many starts and stops, with requests in every stage."""
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


def test_what_runs_and_what_waits_is_finished():
    server = Server('--cpu-threads', '1', '--max-batch', '1').start()
    body = slow.calibrated(server, 0.7)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(server.post(FORWARD, body))) for _ in range(8)]
    for t in threads:
        t.start()
    assert eventually(lambda: server.metric('attnd_queue_requests') >= 2)
    server.stop()
    for t in threads:
        t.join()
    assert [a.status for a in answers] == [200] * 8, answers
    assert all(a.headers.get('connection', '').lower() == 'close' for a in answers)


def test_an_upload_that_has_begun_is_finished():
    server = Server().start()
    body = wire.small_bytes()
    s = server.raw()
    s.sendall(request_bytes(FORWARD, body)[:-50])
    assert eventually(lambda: server.inflight() >= 1)
    process = server.process
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    s.sendall(body[-50:])
    assert RawReader(s).answer().status == 200
    s.close()
    server.stop()


def test_readiness_goes_first():
    """While it drains a new connection is refused or told 503, and a held one is told to close."""
    server = Server('--cpu-threads', '1', '--max-batch', '1').start()
    body = slow.calibrated(server, 1.0)
    running = threading.Thread(target=lambda: server.post(FORWARD, body))
    held = server.connect()
    assert held.ask('GET', '/readyz').status == 200
    running.start()
    assert eventually(lambda: server.inflight() == 1)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    try:
        answer = held.ask('GET', '/readyz')
        assert answer.status == 503, answer
    except (OSError, http.client.HTTPException):
        pass  # an idle connection may be closed at once
    running.join()
    server.stop()


@pytest.mark.parametrize('options', [[], ['--supervise']])
def test_who_comes_during_a_drain_is_refused_at_once(options):
    """Let in, they would wait for a server that is about to end; refused, a balancer takes the next one."""
    server = Server(*options).start()
    s = server.raw()
    s.sendall(request_bytes(FORWARD, wire.small_bytes())[:-5])
    assert eventually(lambda: server.inflight() >= 1)
    server.process.send_signal(signal.SIGTERM)

    def refused():
        try:
            server.connect().connect()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            return False  # its handshake met the close; from now on they are refused
    assert eventually(refused, 2)
    s.sendall(wire.small_bytes()[-5:])
    assert RawReader(s).answer().status == 200
    s.close()
    server.stop()


@pytest.mark.parametrize('options', [[], ['--supervise']])
def test_nobody_is_let_in_by_a_socket_that_is_about_to_close(tmp_path, options):
    """Between the last accept() and close() the kernel would: the client sends its request and is reset, and a balancer
    may not send it again."""
    gate = tmp_path / 'gate'
    server = Server(*options, env=service.shimmed(HANG_CLOSE=gate)).start()
    gate.touch()
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: os.path.exists(f'{gate}.reached')), 'it does not come to close()'
    with pytest.raises(ConnectionRefusedError):
        server.connect().connect()
    gate.unlink()
    server.stop()


def test_connections_that_a_balancer_keeps_are_good_for_its_next_requests():
    """It does not know yet that the server drains. If they were closed, a request would be on its way in the same
    moment, now and then."""
    server = Server().start()
    kept = [server.connect() for _ in range(5)]
    for connection in kept:
        assert connection.ask('GET', '/livez').status == 200
    kept.append(server.connect())  # made ahead, and not used yet
    kept[-1].connect()
    time.sleep(0.8 * service.SLOWER)  # longer than the silence that ends a connection
    server.process.send_signal(signal.SIGTERM)
    for connection in kept:
        time.sleep(0.2)
        answer = connection.ask('POST', FORWARD, wire.small_bytes())
        assert answer.status == 200 and answer.headers['connection'].lower() == 'close', answer
    with pytest.raises(ConnectionRefusedError):
        server.connect().connect()
    server.stop()


def test_a_second_signal_hurries():
    server = Server('--cpu-threads', '1', '--max-batch', '1', '--drain-ms', '600000').start()
    s = server.raw()
    s.sendall(request_bytes(FORWARD, wire.small_bytes())[:-5])  # would be waited for
    assert eventually(lambda: server.inflight() >= 1)
    process = server.process
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(20 * service.SLOWER)
    assert time.monotonic() - start < 10 * service.SLOWER
    s.close()
    assert process.returncode is not None and process.returncode >= 0, f'killed by signal {-process.returncode}:\n{server.log()}'
    assert not service.SANITIZED.search(server.log_bytes()), server.log()


def test_draining_has_a_limit():
    server = Server('--drain-ms', '500').start()
    s = server.raw()
    s.sendall(request_bytes(FORWARD, wire.small_bytes())[:-5])
    assert eventually(lambda: server.inflight() >= 1)
    start = time.monotonic()
    server.stop()
    assert 0.3 < time.monotonic() - start < 15 * service.SLOWER
    s.close()


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
    """(process, gate, log): a server that has begun to start and stands still until the gate is gone."""
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


HARD_STOP_S = 2 + 5  # after the drain: LOOP_HURRY_MS and SIGNALS_GRACE_MS


@pytest.mark.parametrize('where', ['HANG_STOP', 'HANG_RESUME'])
def test_a_stop_that_hangs_ends_with_71(tmp_path, where):
    """In libmicrohttpd, when its threads are ended; and in the loop, which then does not even see the signal."""
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
    s = server.raw()
    s.sendall(request_bytes(FORWARD, wire.small_bytes())[:-5])
    assert eventually(lambda: server.inflight() >= 1)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait((HARD_STOP_S + 20) * service.SLOWER) == 71
    s.close()


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
