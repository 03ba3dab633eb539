"""Fixtures for everything that crosses a socket: a server for all, servers with options of their own, a time limit."""
import os
import random
import signal
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'conformance'))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'differential'))
import service  # noqa: E402


def pytest_sessionstart(session):
    if not os.access(service.BINARY, os.X_OK):
        pytest.exit(f'{service.BINARY} is not there: build it with make', 2)


class TestTooLong(Exception):
    pass


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """No test hangs: 60 seconds each, or what @pytest.mark.limit says, longer by ATTND_SLOWER."""
    mark = item.get_closest_marker('limit')
    seconds = (mark.args[0] if mark else 60) * service.SLOWER

    def too_long(signum, frame):
        raise TestTooLong(f'took longer than {seconds:g} s')
    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope='session')
def shared_server():
    server = service.Server('--log-level', 'debug')
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server):
    """The server that tests share. Each test leaves it as it was; one that kills it fails, and the next gets a new one."""
    if shared_server.process.poll() is not None:
        shared_server.start()
    mark = len(shared_server.log_bytes())
    yield shared_server
    log = shared_server.log_bytes()[mark:].decode('utf-8', 'replace')
    print(f'---- log of the server during this test ----\n{log[-8000:]}')
    assert shared_server.process.poll() is None, f'the server died in this test, status {shared_server.process.poll()}'


@pytest.fixture
def serve():
    """serve('--queue-depth', 4) starts a server for one test; it must end well with the test."""
    started = []

    def start(*options, **more):
        server = service.Server(*options, **more)
        started.append(server)
        return server.start()
    yield start
    failures = []
    for server in started:
        try:
            server.stop()
        except AssertionError as e:
            failures.append(str(e))
        print(f'---- log of a server ----\n{server.log()}')
    assert not failures, '\n'.join(failures)


def pytest_configure(config):
    seeds = [str(random.SystemRandom().randrange(2**31)) for _ in range(3)]
    os.environ['ATTND_SEEDS'] = os.environ.get('ATTND_SEEDS') or ','.join(seeds)


def pytest_report_header(config):
    return [f'attnd: {service.BINARY}, time limits x {service.SLOWER:g}', f'random seeds: ATTND_SEEDS={os.environ["ATTND_SEEDS"]}']
