"""Fixtures for all tests that use sockets: a server that tests share, servers with options of their own, and a time
limit."""
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'conformance'))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'differential'))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'evidence'))
import service  # noqa: E402
import under_way  # noqa: E402


def pytest_sessionstart(session):
    if not os.access(service.BINARY, os.X_OK):
        pytest.exit(f'{service.BINARY} is not there: build it with make', 2)


class TestTooLong(Exception):
    pass


def limit_of(item):
    mark = item.get_closest_marker('limit')
    return mark.args[0] if mark else 60


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """ATTND_PART=1/2 selects the first of two parts of the tests (run_parts.sh). Tests with the longest time limits are
    distributed first."""
    part = service.SETTINGS.get('ATTND_PART')
    if not part:
        return
    n, count = (int(x) for x in part.split('/'))
    # The order alternates (1 2 2 1 ...), so that part 1 does not get the longer one of every two tests.
    mine = {id(item) for i, item in enumerate(sorted(items, key=limit_of, reverse=True)) if (i % count if i // count % 2 == 0 else count - 1 - i % count) == n - 1}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in mine])
    items[:] = [item for item in items if id(item) in mine]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Ends a test that hangs. The limit is 60 seconds, or what @pytest.mark.limit says, times ATTND_SLOWER."""
    seconds = limit_of(item) * service.SLOWER

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
    """A server that all tests share. Each test must leave it unchanged. If a test kills it, that test fails, and the
    next test gets a new server."""
    if shared_server.process.poll() is not None:
        shared_server.start()
    mark = len(shared_server.log_bytes())
    yield shared_server
    log = shared_server.log_bytes()[mark:].decode('utf-8', 'replace')
    print(f'---- log of the server during this test ----\n{log[-8000:]}')
    assert shared_server.process.poll() is None, f'the server died in this test, status {shared_server.process.poll()}'


@pytest.fixture
def serve():
    """serve('--queue-depth', 4) starts a server for one test. After the test the server must end without an error."""
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


@pytest.fixture
def fake(serve):
    """fake('sync.err=700@2', '--max-batch', 1, devices=2) starts a daemon with two fake devices, which do what the
    script in the first argument says."""
    def start(script='', *options, devices=1, reads_staging=False, **more):
        env = {'ATTN_FAKE_SCRIPT': script, 'ATTN_FAKE_DEVICES': str(devices), **({'ATTN_FAKE_READS_STAGING': '1'} if reads_staging else {})}
        return serve('--cpu-threads', '1', *options, env=env, binary=service.FAKE, **more)
    return start


@pytest.fixture
def gate(tmp_path):
    gate = under_way.Gate(tmp_path / 'gate')
    yield gate
    if os.path.exists(gate.path):
        # opens the gate (a file for which devices wait), because a server with a hanging device could not end well
        gate.open()


def pytest_configure(config):
    seeds = [str(random.SystemRandom().randrange(2**31)) for _ in range(3)]
    service.SETTINGS['ATTND_SEEDS'] = service.SETTINGS.get('ATTND_SEEDS') or ','.join(seeds)


def pytest_report_header(config):
    return [f'attnd: {service.BINARY}, time limits x {service.SLOWER:g}', f'random seeds: ATTND_SEEDS={service.SETTINGS["ATTND_SEEDS"]}']


@pytest.fixture(scope='session')
def clone(tmp_path_factory):
    """A copy of the checkout: the files that git tracks, with their present contents, and nothing else. Without git:
    all files except build/."""
    root, copy = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'), tmp_path_factory.mktemp('clone')
    listed = shutil.which('git') and subprocess.run(['git', '-C', root, 'ls-files', '-z'], capture_output=True)
    if not listed or listed.returncode != 0:
        shutil.copytree(root, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns('build', '.git'))
        return copy
    for name in filter(None, listed.stdout.decode().split('\0')):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if os.path.exists(os.path.join(root, name)):  # git may list a file that was removed and not committed yet
            # copies the modification time too, because make uses it
            shutil.copy2(os.path.join(root, name), copy / name)
    return copy
