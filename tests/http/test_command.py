"""The program as a command: --help, the option table, bad options, environment variables, and `attnd healthcheck`."""
import os
import re
import signal
import socket
import subprocess
import time

import pytest

import service
import wire


def run(*args, env=None, **more):
    clean = {k: v for k, v in os.environ.items() if not k.startswith('ATTND_')}
    return subprocess.run([service.BINARY, *map(str, args)], capture_output=True, text=True, timeout=20 * service.SLOWER, env={**clean, **(env or {})}, **more)


def test_help_goes_to_stdout():
    r = run('--help')
    assert r.returncode == 0 and not r.stderr
    for flag in ('--listen', '--devices', '--http-threads', '--cpu-threads', '--max-body-bytes', '--staging-bytes', '--device-bytes', '--max-connections',
                 '--max-receiving', '--queue-depth', '--batch-window-us', '--max-batch', '--timeout-ms', '--body-timeout-ms', '--body-stall-ms', '--discard-ms', '--discard-bytes', '--drain-ms', '--token-file', '--token-share', '--tls-cert',
                 '--tls-key', '--cors-origin', '--supervise', '--log-format', '--log-level', '--metrics-listen'):
        assert flag in r.stdout, flag
        assert 'ATTND_' + flag[2:].upper().replace('-', '_') in r.stdout, flag


def test_version():
    r = run('--version')
    assert r.returncode == 0 and re.fullmatch(r'attnd \d+\.\d+\.\d+ \((x86-64|arm64)\)\n', r.stdout)


def test_the_document_and_help_list_the_same_options():
    with open(os.path.join(service.HERE, '../server/OPTIONS.md')) as f:
        document = set(re.findall(r'^\| `(--[a-z-]+)', f.read(), re.M))
    helped = set(re.findall(r'^ +(--[a-z-]+)', run('--help').stdout, re.M)) - {'--help', '--version'}
    assert document == helped, f'only in OPTIONS.md: {document - helped}, only in --help: {helped - document}'


BAD = [
    (['--listen', '9000'], '; write 127.0.0.1:9000'), (['--listen', ':9000'], '; write 127.0.0.1:9000'), (['--staging-bytes', '1.5G'], '; write 1536M'),
    (['--queue-depth', '0'], "--queue-depth: '0' is not a whole number from 1 to 1048576"),
    (['--queue-depth', 'many'], "--queue-depth: 'many' is not a whole number from 1 to 1048576"),
    (['--queue-depth=1.5'], "--queue-depth: '1.5' is not a whole number from 1 to 1048576"),
    (['--max-body-bytes', '12Q'], "--max-body-bytes: '12Q' is not a size from 1K to 1024G (bytes, or with K, M or G)"),
    (['--log-format', 'xml'], "--log-format: 'xml' is not one of: text json"),
    (['--devices', 'tpu'], '--devices: '), (['--listen', 'nowhere'], "--listen: 'nowhere'"), (['--listen', '127.0.0.1:99999'], '--listen: '),
    (['--cors-origin', 'example.org'], '--cors-origin: '),
    (['--quue-depth', '1'], '--quue-depth'), (['serve'], 'serve'), (['--queue-depth'], '--queue-depth'), (['--timeout-ms', '-5'], '--timeout-ms: '),
    (['--timeout-ms', '99999999999999999999'], '--timeout-ms: '),
]


@pytest.mark.parametrize('args, says', BAD, ids=[' '.join(b[0]) for b in BAD])
def test_a_bad_option_is_refused_in_one_line_with_its_range(args, says):
    r = run(*args)
    assert r.returncode == 64 and not r.stdout, r
    assert len(r.stderr.strip().splitlines()) == 1 and says in r.stderr, r.stderr


def ended(*args, env=None):
    """Runs attnd with wrong arguments. Checks that it writes one line on standard error, and returns its exit
    status."""
    r = run('--listen', '127.0.0.1:0', *args, env=env)
    assert r.stderr.count('attnd: ') == 1 and not r.stdout, r
    return r.returncode


def test_status_64_is_an_option_that_is_wrong():
    assert ended('--queue-depth', '0') == 64
    assert ended(env={'ATTND_QUEUE_DEPTH': '0'}) == 64
    assert ended(env={'ATTND_QEUE_DEPTH': '1'}) == 64
    # each of these options is valid, but not together with the others
    assert ended('--devices', 'cpu', '--device-bytes', '64M', '--kv-bytes', '1G') == 64


@pytest.mark.parametrize('supervised', [(), ('--supervise',)])
def test_status_69_is_an_address_that_cannot_be_had(supervised):
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        assert ended('--listen', f'127.0.0.1:{taken.getsockname()[1]}', *supervised) == 69
    assert ended('--listen', 'no-such-host.invalid:0', *supervised) == 69
    assert ended('--listen', 'unix:/no/such/folder/attnd.sock', *supervised) == 69


@pytest.mark.parametrize('supervised', [(), ('--supervise',)])
def test_status_78_is_a_file_that_is_wrong(tmp_path, supervised):
    for name, text in (('empty', ''), ('text', 'no certificate\n'), ('spaces', 'two words\n'), ('long', 'x' * 5000 + '\n')):
        (tmp_path / name).write_text(text)
    missing = ['--token-file', '/nope'], ['--tls-cert', '/nope', '--tls-key', tmp_path / 'text'], ['--tls-cert', tmp_path / 'text', '--tls-key', '/nope']
    wrong = ['--token-file', tmp_path / 'empty'], ['--token-file', tmp_path / 'spaces'], ['--token-file', tmp_path / 'long'], ['--token-file', tmp_path], \
        ['--tls-cert', tmp_path / 'text', '--tls-key', tmp_path / 'text'], ['--tls-cert', tmp_path / 'empty', '--tls-key', tmp_path / 'empty']
    for args in (*missing, *wrong):
        r = run('--listen', '127.0.0.1:0', '--devices', 'cpu', *args, *supervised)
        assert r.returncode == 78 and sum(line.startswith('attnd: ') for line in r.stderr.splitlines()) == 1, (args, r)
    assert ended(env={'ATTND_TOKEN_FILE': '/nope'}) == 78


def test_a_server_that_dies_again_and_again_ends_with_128_and_the_signal(serve):
    """The server is killed five times in a row, each time within two seconds of its start. The supervisor pauses 0, 1,
    2 and 4 s between the starts, and gives up after the fifth kill."""
    server = serve('--supervise')
    supervisor, server.process = server.process, None
    last = None
    while supervisor.poll() is None:
        pids = [int(line.rsplit('pid=', 1)[1]) for line in server.log().splitlines() if 'what=started pid=' in line]
        if pids and pids[-1] != last:
            last = pids[-1]
            os.kill(last, signal.SIGKILL)
        time.sleep(0.02)
    assert supervisor.returncode == 128 + signal.SIGKILL, server.log()


def test_the_log_warns_of_more_staging_memory_than_there_is(serve):
    def warned(*options):
        server = serve(*options)
        assert service.eventually(lambda: ' ready ' in server.log())
        return [line for line in server.log().splitlines() if ' beyond_memory ' in line]
    assert warned() == warned('--staging-bytes', '1G') == []
    line, = warned('--staging-bytes', '16384G')
    assert 'WARN beyond_memory option=--staging-bytes bytes=17592186044416 machine_bytes=' in line and 'text="requests may take more' in line, line


def test_a_bad_variable_is_named(serve):
    r = run(env={'ATTND_QUEUE_DEPTH': '0'})
    assert r.returncode == 64 and 'ATTND_QUEUE_DEPTH' in r.stderr, r


def test_variables_of_the_projects_own_makefile_and_tests_do_not_stop_a_server():
    names = set()
    for path in ('Makefile', 'tests/setup.sh', 'tests/run_parts.sh', 'tests/deploy/check.sh', 'deploy/compose.yaml'):
        with open(os.path.join(service.HERE, '..', path)) as f:
            names |= set(re.findall(r'(?<![A-Z-])(?:\$[({])?(ATTND_[A-Z]+)(?:=|:-)', f.read()))
    assert {'ATTND_BINARY', 'ATTND_SEEDS', 'ATTND_PART', 'ATTND_PYTHON', 'ATTND_PUBLISH'} <= names, names
    # attnd reads environment variables before options, and must ignore those of this project's own tests and scripts
    for name in sorted(names):
        r = run('--queue-depth', '0', env={name: '3'})
        assert r.stderr.startswith('attnd: --queue-depth: '), (name, r)
    assert run('--queue-depth', '0', env={'ATTND_BINARYS': '3'}).stderr.startswith('attnd: ATTND_BINARYS is not an option')


def test_the_environment_counts_and_flags_count_more(serve):
    server = serve(env={'ATTND_MAX_BODY_BYTES': '2K', 'ATTND_QUEUE_DEPTH': '33'})
    assert server.post('/v1/attention/forward', b' ' * 2049).status == 413
    limits = str(server.get('/v1/info').json())
    assert '2048' in limits and '33' in limits
    other = serve('--max-body-bytes', '4K', env={'ATTND_MAX_BODY_BYTES': '2K'})
    assert other.post('/v1/attention/forward', b' ' * 2049).status == 400


# ---- healthcheck -----------------------------------------------------------------------------------------------------


def test_healthcheck_of_a_running_server(serve, tmp_path):
    server = serve(listen=[f'127.0.0.1:{service.free_port()}', f'unix:{tmp_path}/s'])
    for target in (f'http://127.0.0.1:{server.port}', f'http://127.0.0.1:{server.port}/livez', f'127.0.0.1:{server.port}', f'unix:{tmp_path}/s'):
        r = run('healthcheck', target)
        assert r.returncode == 0 and r.stdout and not r.stderr, r
    r = run('healthcheck', env={'ATTND_LISTEN': f'0.0.0.0:{server.port}'})
    assert r.returncode == 0, r


def test_healthcheck_of_nothing():
    r = run('healthcheck', f'http://127.0.0.1:{service.free_port()}')
    assert r.returncode == 1 and len(r.stderr.strip().splitlines()) == 1, r


def test_healthcheck_of_a_server_that_says_no(serve):
    assert run('healthcheck', f'http://127.0.0.1:{serve().port}/v1/nothing').returncode == 1


@pytest.mark.parametrize('args', [['ftp://x'], ['one', 'two'], ['--what']])
def test_healthcheck_of_nonsense(args):
    assert run('healthcheck', *args).returncode == 64


def test_default_address_is_loopback():
    assert '127.0.0.1:8080' in run('--help').stdout


def test_the_first_line_says_where_it_listens(serve):
    server = serve()
    assert service.eventually(lambda: f'127.0.0.1:{server.port}' in server.log())
    assert server.post('/v1/attention/forward', wire.small_bytes()).status == 200


@pytest.mark.parametrize('args, env, says', [
    (['--port', '8000'], {}, 'attnd: --port is not an option; write --listen 127.0.0.1:PORT (attnd --help lists them)\n'),
    ([], {'ATTND_PORT': '8000'}, 'attnd: ATTND_PORT is not an option; write ATTND_LISTEN=127.0.0.1:PORT (attnd --help lists them)\n'),
    ([], {'ATTND_QEUE_DEPTH': '8'}, 'attnd: ATTND_QEUE_DEPTH is not an option; did you mean ATTND_QUEUE_DEPTH? (attnd --help lists them)\n'),
])
def test_habits_from_other_servers_get_the_right_option(args, env, says):
    result = run(*args, env=env)
    assert (result.returncode, result.stderr) == (64, says)
