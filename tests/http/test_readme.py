"""Runs what README.md and PROTOCOL.md show. Every fenced block of the README is a transcript, or a program with its
output. The tests find a command by its beginning. They send every request of PROTOCOL.md, and compare its answer."""
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

import service

ROOT = os.path.abspath(os.path.join(service.HERE, '..'))


def text_of(name):
    with open(os.path.join(ROOT, name)) as f:
        return f.read()


README, PROTOCOL = text_of('README.md'), text_of('proto-json/PROTOCOL.md')
FENCED = re.findall(r'^```(\w*)\n(.*?)^```$', README, re.M | re.S)
COMMANDS = re.findall(r'^    (\S.*)$', re.sub(r'^```.*?^```$', '', README, flags=re.M | re.S), re.M)


def only(list, what):
    assert len(list) == 1, (what, list)
    return list[0]


def command(beginning):
    """Returns the README's only line that begins like this, without its comment."""
    return re.sub(r'\s+#.*', '', only([line for line in COMMANDS if line.startswith(beginning)], beginning))


TRANSCRIPTS = re.findall(r'^```\n(\$ curl.*?)^```$', README + PROTOCOL, re.M | re.S)


def program_of(text, beginning):
    """Returns the only Python program of a document that begins like this, and its output."""
    return only(re.findall(rf'^```python\n({beginning}.*?)^```\n\n```\n(.*?)^```$', text, re.M | re.S), beginning)


KERNEL, KERNEL_PRINTED = program_of(README, 'p = ')
(PROGRAM, PRINTED), (FILES, FILES_PRINTED) = program_of(README, 'import base64'), program_of(PROTOCOL, 'import ml_dtypes')


def test_every_block_is_run():
    known = set(TRANSCRIPTS) | {PROGRAM, PRINTED, KERNEL, KERNEL_PRINTED}
    assert {text for _, text in FENCED} <= known and len(TRANSCRIPTS) == 2


@pytest.mark.parametrize('transcript', TRANSCRIPTS, ids=range(len(TRANSCRIPTS)))
def test_a_transcript(server, transcript):
    if not shutil.which('curl'):
        pytest.skip('curl is not here')
    typed, printed = re.fullmatch(r"\$ (curl .*?')\n(\{.*\n)", transcript, re.S).groups()
    got = subprocess.run(['sh', '-c', typed.replace('http://127.0.0.1:8080', server.url)], capture_output=True, text=True, timeout=50 * service.SLOWER)

    # Removes what differs between runs and machines, such as times and a number's last digit, which depends on the CPU.
    def same(text):
        text = re.sub(r'"backend":"[^"]*"', '"backend":""', re.sub(r'"timing_us":\{[^}]*\}', '"timing_us":{}', text))
        return re.sub(r'\d+\.\d+', lambda number: f'{float(number[0]):.5g}', text).rstrip('\n')
    assert got.returncode == 0 and same(got.stdout) == same(printed), got


def test_the_python_program(server):
    run = subprocess.run([sys.executable, '-c', PROGRAM.replace('http://127.0.0.1:8080', server.url)], capture_output=True, text=True, timeout=50 * service.SLOWER)
    assert run.returncode == 0, run.stderr

    def same(text):
        return re.sub(r"cpu \w+|'(max_abs|relative)': [0-9.e-]+", '', text)
    assert same(run.stdout) == same(PRINTED)


def test_the_program_goes_on_with_a_kernel_that_is_wrong(server):
    program = (PROGRAM + KERNEL).replace('http://127.0.0.1:8080', server.url)
    run = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=50 * service.SLOWER)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith(KERNEL_PRINTED)


def in_bfloat16(program, server):
    """Runs a program with the Python that has ml_dtypes and safetensors. Returns what it prints."""
    python = os.path.join(service.BUILD, 'venv/bin/python')
    if not os.path.exists(python) or subprocess.run([python, '-c', 'import ml_dtypes, safetensors'], capture_output=True).returncode != 0:
        pytest.skip('ml_dtypes and safetensors are not here (tests/setup.sh test fetches them from PyPI)')
    run = subprocess.run([python, '-c', program.replace('http://127.0.0.1:8080', server.url)], capture_output=True, text=True, timeout=50 * service.SLOWER)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_python_program_takes_bfloat16(server):
    assert 'needs `import ml_dtypes`' in README
    program = 'import ml_dtypes\n' + PROGRAM.replace('astype(np.float16)', 'astype("bfloat16")')
    printed = in_bfloat16(program, server)
    assert printed.splitlines()[2:] == PRINTED.splitlines()[2:] and 'bfloat16' in program and '(1, 128, 4, 64) (1, 4, 128)' in printed
    answer = in_bfloat16(program.split('\nrng = ')[0] + """
x = np.ones((1, 2, 1, 2)).astype("bfloat16")
print(array(attention("forward", q=tensor(x), k=tensor(x), v=tensor(x))["out"]).dtype)""", server)
    assert answer == 'bfloat16\n'


def test_files_of_safetensors_take_bfloat16(server):
    printed = in_bfloat16(PROGRAM + FILES, server)
    assert printed.endswith('\n' + FILES_PRINTED)


def test_it_is_cloned(tmp_path):
    if not shutil.which('git') or subprocess.run(['git', '-C', ROOT, 'rev-parse', 'HEAD'], capture_output=True).returncode != 0:
        pytest.skip('this is no checkout of git')
    line = command('git clone').replace('<address of this repository>', ROOT) + ' && make help'
    run = subprocess.run(['sh', '-c', line], cwd=tmp_path, capture_output=True, text=True, timeout=50 * service.SLOWER, env=without_make())
    assert run.returncode == 0 and 'build on all cores and serve' in run.stdout, run.stdout + run.stderr


def without_make():
    return {k: v for k, v in os.environ.items() if k not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS')}


@pytest.mark.skipif('MAKELEVEL' not in os.environ, reason='not run by make: its switches are not known, and with others everything would be built anew')
def test_make_run_serves(clone):
    """`make run` in a clone that contains the objects of this build, so that make has nothing to do, as in a second
    run."""
    build = os.path.dirname(service.BINARY)
    inside = os.path.relpath(build, ROOT)
    there = clone / inside
    if inside.startswith('..'):
        pytest.skip(f'{build} is outside of the checkout')
    there.mkdir(parents=True, exist_ok=True)
    for name in ('flags', 'server', 'proto-json', 'kernels', 'libserver.a', 'libproto.a', 'libattn.a', 'attnd'):
        subprocess.run(['cp', '-a', os.path.join(build, name), there], check=True)
    address = f'127.0.0.1:{service.free_port()}'
    run = subprocess.Popen(['sh', '-c', f'exec {command("make run")} ARGS="--listen {address}"'], cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        asked = [os.path.join(build, 'attnd'), 'healthcheck', f'http://{address}']
        assert service.eventually(lambda: run.poll() is not None or subprocess.run(asked, capture_output=True).returncode == 0, 40), 'it does not answer'
    finally:
        os.killpg(run.pid, signal.SIGTERM)
        said, _ = run.communicate(timeout=30 * service.SLOWER)
    assert 'stopped status=0' in said and '  cc ' not in said, said


def test_what_make_is_asked_for_is_there():
    listed = set(re.findall(r'^([a-z0-9-]+):.*## ', text_of('Makefile'), re.M))
    named = set(re.findall(r'`make ([a-z0-9-]+)', README)) | {command(line).split()[1] for line in ('make run', 'make test')}
    assert named <= listed and {'install', 'load'} <= named, named - listed


def test_the_images_are_those_of_the_dockerfile():
    """The README's command for images names a stage of the Dockerfile. `make image` builds and runs the images."""
    docker = text_of('Dockerfile')
    target = re.search(r'--target (\w+) ', command('docker build --target')).group(1)
    stages = re.findall(r'^FROM .* AS ([\w-]+)$', docker, re.M)
    assert target in stages and stages[-1] != target and re.search(r'^EXPOSE 8080\b', docker, re.M), stages


def test_the_wrk_line(server):
    words = command('wrk').split()
    assert os.path.exists(os.path.join(ROOT, words[words.index('-s') + 1]))
    if not shutil.which('wrk'):
        pytest.skip('wrk is not here')
    words = [re.sub('^-d.*', '-d1s', word).replace('http://127.0.0.1:8080', server.url) for word in words]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50 * service.SLOWER)
    assert run.returncode == 0 and 'Requests/sec' in run.stdout and 'Non-2xx' not in run.stdout, run.stdout + run.stderr


def test_links_lead_somewhere():
    for name in ('README.md', 'MEASUREMENTS.md', 'SECURITY.md', 'server/OPTIONS.md', 'deploy/examples/README.md', 'proto-json/PROTOCOL.md', 'tests/README.md',
                 'tests/load/README.md', 'tests/load/MEASUREMENTS.md', 'kernels/README.md', 'kernels/MEASUREMENTS.md', 'deploy/README.md'):
        for link in re.findall(r'\]\(([^)#:]+)\)', text_of(name)):
            assert os.path.exists(os.path.join(ROOT, os.path.dirname(name), link)), (name, link)


def test_the_limits_of_contexts_are_those_that_are_said(server):
    limits = server.get('/v1/info').json()['limits']
    seconds, count = re.search(
        r'must arrive within (\d+) s after its forward .* keeps at most (\d+) saved forwards, in at most a quarter of the staging memory',
        ' '.join(PROTOCOL.split())).groups()
    assert limits['context_ttl_ms'] == int(seconds) * 1000 and limits['contexts'] == int(count)
    assert limits['context_bytes'] == server.get('/v1/info').json()['staging']['limit_bytes'] // 4


def test_the_routes_that_want_no_token_are_those_that_are_said(serve, tmp_path):
    (tmp_path / 'tokens').write_text('secret\n')
    server = serve('--token-file', tmp_path / 'tokens')
    said = set(re.findall(r'`(/[^`]*)`', re.search(r'With `--token-file` every route requires a bearer token, except the probes, (.*?)\. ', text_of('SECURITY.md'), re.S).group(1)))
    gets = [path for path, item in server.get('/openapi.json').json()['paths'].items() if 'get' in item]
    open_ones = {path for path in gets if server.get(path).status == 200}
    assert {path for path in open_ones if 'health' not in path and not path.endswith('z')} == said


def test_every_tensor_and_option_of_the_protocol_is_the_openapi_documents(server):
    """PROTOCOL.md and the OpenAPI document have the same tensors (by name and shape) and options (by name). Tensors
    that only a backward has are in a table of their own."""
    rows = {}
    for names, shape in re.findall(r'^\| (`.*?`) \| (.*?) \|', PROTOCOL, re.M):
        for name in re.findall(r'`(\w+)`', names):
            # a tensor in both tables has its shape in the forward's table, which comes first
            rows.setdefault(name, shape)
    schemas = server.get('/openapi.json').json()['components']['schemas']
    for problem in ('ForwardProblem', 'BackwardProblem'):
        for name, member in schemas[problem]['properties'].items():
            if name not in ('context', 'out', 'lse', 'dout', 'dlse') and '$ref' in member:
                assert re.findall(r'\[.*?\]', member['description'].split(':')[0]) == re.findall(r'\[.*?\]', rows[name]), name
            else:
                assert name in rows, name


@pytest.fixture(scope='module')
def exact():
    """Skips the test unless the server uses the kernel that computed the answers in PROTOCOL.md: on other kernels the
    last digit differs."""
    with service.Server('--devices', 'reference') as server:
        yield server


def without(value, names=('backend', 'timing_us', 'request_id', 'explained', 'limit', 'error_if_so')):
    if isinstance(value, dict):
        return {n: without(v) for n, v in value.items() if n not in names}
    return [without(v) for v in value] if isinstance(value, list) else value


def shown_file(text):
    """Makes a safetensors file from its form in PROTOCOL.md: the header, and on the last line the data in base64."""
    header, data = text.rstrip('\n').rsplit('\n', 1)
    return json.loads(header), base64.b64decode(data)


def file_of(text):
    header, data = shown_file(text)
    header = json.dumps(header).encode()
    return len(header).to_bytes(8, 'little') + header + data


BLOCKS = re.findall(r'^```json (\w+)\n(.*?)^```$', PROTOCOL, re.M | re.S)


@pytest.mark.parametrize('number', [i for i, (mark, _) in enumerate(BLOCKS) if not mark.isdigit()])
def test_a_request_of_the_protocol(exact, number):
    op, body = BLOCKS[number]
    if op == 'safetensors':
        answer = exact.post('/v1/attention/forward', file_of(body), {'Content-Type': 'application/x-safetensors'})
        length = 8 + int.from_bytes(answer.body[:8], 'little')
        header, want, data = json.loads(answer.body[8:length]), *shown_file(BLOCKS[number + 1][1])
        for h in (header, want):
            h['__metadata__'] = without(h['__metadata__'])
        assert (answer.status, header, answer.body[length:]) == (200, want, data)
        return
    if op == 'kserve_binary':
        said, data = shown_file(body)
        text = json.dumps(said).encode()
        answer = exact.ask('POST', '/v2/models/attention_forward/infer', text + data, {'Inference-Header-Content-Length': str(len(text))})
        length = int(answer.headers['inference-header-content-length'])
        header, want, data = json.loads(answer.body[:length]), *shown_file(BLOCKS[number + 1][1])
        assert (answer.status, without(header), answer.body[length:]) == (200, without(want), data)
        return
    answer = exact.post('/v2/models/attention_forward/infer' if op == 'kserve' else '/v1/attention/' + op, body.encode())
    following = BLOCKS[number + 1] if number + 1 < len(BLOCKS) else ('', '')
    if following[0].isdigit():
        assert (answer.status, without(answer.json())) == (int(following[0]), without(json.loads(following[1])))
    else:  # the document shows no answer to this request, because its context does not exist here
        assert '"context"' in body and answer.status == 404, answer
