"""Tests deploy/examples: every client runs against a real server, checks its results, and prints why a request was
refused. The commands are those of the table in deploy/examples/README.md, and run in a clone of the git checkout. A
client whose language is not installed is skipped."""
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import service

FOLDER = os.path.join(service.HERE, '../deploy/examples')
with open(os.path.join(FOLDER, 'README.md')) as f:
    TABLE = dict(re.findall(r'^\| \[([a-z_]+\.[a-z]+)\]\(\1\) \|.*\| `(.*)` \|$', f.read(), re.M))

# what each example prints, without its numbers, as a regular expression
SAYS = {
    'curl.sh': r'numbers: the first row of out is 1 2\nbase64: the same out and lse\nobserve: 3 pairs, the queries look at keys 0 and 1\nrefused: v: .+\n',
    'numpy_client.py': r'cpu \w+: out \(2, 100, 4, 64\), the largest error is .+\nobserve: mean entropy .+ nats, the first key has .+ of 100 queries\ndq \(2, 100, 4, 64\) dk .+ dv .+\nrefused: k: .+ \(invalid-request at /k/shape.*\)\n',
    'cache_client.py': r'prompt: 500 positions\ncpu \w+: 5 steps, 505 positions, the largest error is .+\ntwo continuations: \[508, 503\]\na tree of 6 guesses, 3 of them kept: \[512\]\nback to position 500, and on: \[504\]\nrefused: caches: .+ \(invalid-request at /caches\)\n',
    'block_tables.py': r'cpu \w+: lengths \[192, 1, 273\], the largest error is .+\nrefused: page_table: .+ \(invalid-request at /page_table.*\)\n',
    'triton_sequence.py': r'a prompt of 300 and 5 steps, the largest error is .+\nrefused: sequence_id: .+ \(404\)\n',
    'safetensors_client.py': r'cpu \w+: out \(2, 100, 4, 64\), the largest error is .+\ndq \(2, 100, 4, 64\) dk .+ dv .+\nrefused: k: .+ \(invalid-request at /k/shape.*\)\n',
    'triton_client.py': r'cpu \w+: out \(2, 100, 4, 64\), the largest error is .+\ndq \(2, 100, 4, 64\) dk .+ dv .+\nrefused: k: .+ \(400\)\n',
    'shared_memory_client.py': r'cpu \w+: out \(2, 100, 4, 64\), the largest error is .+; lse \(2, 4, 100\)\nrefused: out: .+ \(400\)\n',
    'cuda_shared_memory_client.py': r'(cuda|fake):0 \w+: out \(2, 100, 4, 64\), the largest error is .+; lse \(2, 4, 100\)\nrefused: out: .+ \(400\)\n',
    'torch_client.py': r'out: .+\ndq: .+\ndk: .+\ndv: .+\ndbias: \(1, 4, 100, 100\), the largest error is .+ of the largest number\n'
                       r'gradcheck: passed with eps 1e-2, atol 1e-3, rtol 1e-2\ncompiled in one graph, and mapped over three problems\nrefused: k: .+\n',
    'pytest_attnd.py': r'right: (match|rounding)\nwrong: mismatch: forward of attention\n  out: .+\n(  where: .+\n)+(  worst: .+\n)+  because \(scale_missing\): .+\n  to fix: .+\n(.+\n)*',
    'flashinfer_bench.py': r'gqa_paged_decode_h4_kv2_d16_ps4 \w+: (match|rounding)\n  out: .+\n  lse: .+\ngqa_paged_decode_h4_kv2_d16_ps4 \w+: mismatch\n  out: .+\n  lse: .+\n'
                           r'(  where: .+\n)+  because \(heads_interleaved\): .+\n  to fix: .+\n(.+\n)*',
    'node_client.mjs': r'cpu \w+: out 1\.0000 2\.0000 2\.3395 3\.3395, the largest error is .+\nobserve: 3 pairs, entropy 0\.0000 0\.\d+\nrefused: v: .+ \(invalid-request at /v/shape.*\)\n',
    'merge.sh': r'merge: out is 3\nrefused: parts: there are 0, must be 1 to 64\n',
    'merge_client.py': r'3 parts: out \(1, 90, 4, 32\), the largest error is .+\ngradients of all parts together: the largest error is .+\n'
                       r'refused: parts\.1\.lse: .+ \(invalid-request at /parts/1/lse/data\)\n',
    'shards.py': r'servers: 1; KB of bodies to and from each: \d+\nservers: 1; parts: 3; the largest error is .+\nrefused: k: .+\n',
    'merge.mjs': r'2 parts: out (\d\.\d{4} ?)+, the largest error is .+\nrefused: parts\.0\.lse: .+ \(invalid-request at /parts/0/lse/data\)\n',
    'go_client.go': r'cpu \w+: out \[1\.0000 2\.0000 2\.3395 3\.3395\] is right\nrefused: v: .+ \(invalid-request at /v/shape.*\)\n',
}


def test_every_example_is_in_the_table_and_tested():
    files = {name for name in os.listdir(FOLDER) if name != 'README.md'}
    # Three examples are not in this table. test_install.py builds attention.c, and test_clusters.py runs dask_client.py
    # and ray_client.py.
    assert files == set(TABLE) == set(SAYS) | {'dask_client.py', 'ray_client.py', 'attention.c'}


@pytest.fixture(scope='module')
def shm_server():
    with service.Server('--allow-shm', 'attn_') as server:
        yield server


@pytest.fixture(scope='module')
def cuda_shm(tmp_path_factory):
    """Starts a server whose GPU memory can be shared, and returns the folder of the libcudart to use: CUDA's own, or,
    if attnd finds no GPU, cudart.c for the fake device."""
    with service.Server('--allow-cuda-shm') as server:
        if server.get('/v1/info').json()['devices'][0]['name'].startswith('cuda:'):
            yield server, '/usr/local/cuda/lib64'
            return
    folder = tmp_path_factory.mktemp('cudart')
    subprocess.run([os.environ.get('CC', 'cc'), '-shared', '-fPIC', '-o', folder / 'libcudart.so', os.path.join(service.HERE, 'http/cudart.c')], check=True)
    with service.Server('--allow-cuda-shm', binary=service.FAKE) as server:
        yield server, str(folder)


@pytest.mark.limit(180)  # the first run is slow, because the Go compiler builds its own library then
@pytest.mark.parametrize('name', sorted(SAYS))
def test_an_example_runs_and_says_why_it_was_refused(server, shm_server, cuda_shm, clone, name):
    command = [sys.executable if word == 'python3' else word for word in shlex.split(TABLE[name])]
    if not shutil.which(command[0]):
        pytest.skip(f'{command[0]} is not here')
    if name == 'torch_client.py' and subprocess.run([command[0], '-c', 'import torch'], capture_output=True).returncode != 0:
        pytest.skip('PyTorch is not here')
    if name in ('triton_client.py', 'triton_sequence.py', 'shared_memory_client.py'):
        # the client's extension was built for the NumPy of this Python
        command[0] = os.path.join(service.BUILD, 'venv/bin/python')
        if not os.path.isdir(os.path.join(service.FETCHED, 'tritonclient/http')):
            pytest.skip('tritonclient is not here (tests/setup.sh test fetches it from PyPI)')
    if name == 'shared_memory_client.py':
        server = shm_server
    env = dict(os.environ)
    if name == 'cuda_shared_memory_client.py':
        server, folder = cuda_shm
        env['LD_LIBRARY_PATH'] = ':'.join(filter(None, (folder, env.get('LD_LIBRARY_PATH'))))
    if name in ('safetensors_client.py', 'shards.py'):
        if service.optional('safetensors.numpy') is None:
            pytest.skip('safetensors is not here (tests/setup.sh test fetches it from PyPI)')
        env['PYTHONPATH'] = service.FETCHED
    done = subprocess.run(command + [server.url], env=env, cwd=clone / 'deploy/examples', stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=170 * service.SLOWER)
    assert done.returncode == 0 and re.fullmatch(SAYS[name], done.stdout), done.stdout


def test_an_example_fails_where_nobody_answers(clone):
    """Without a server an example prints an error message, and no result."""
    done = subprocess.run(['sh', clone / 'deploy/examples/curl.sh', f'http://127.0.0.1:{service.free_port()}'], capture_output=True, text=True, timeout=50)
    assert done.returncode != 0 and not done.stdout and 'curl' in done.stderr
