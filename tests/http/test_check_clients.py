"""Tests the files of deploy/examples for authors of kernels: pytest_attnd.py in a pytest run of its own, and
flashinfer_bench.py on files in FlashInfer-Bench's format. test_examples.py runs both as the README of the examples
says."""
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import service
import wire

FOLDER = os.path.join(service.HERE, '../deploy/examples')


def example(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join(FOLDER, name + '.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- pytest_attnd.py -------------------------------------------------------------------------------------------------

KERNEL = '''
import numpy as np
rng = np.random.default_rng(3)
q, k, v, dout = (rng.standard_normal((1, 40, 2, 16), dtype=np.float32) for _ in range(4))

def forward(scale, causal=False):
    z = np.einsum('bihd,bjhd->bhij', q.astype(float), k.astype(float)) * scale
    if causal:
        z = np.where(np.tri(40, dtype=bool), z, -np.inf)
    lse = np.log(np.exp(z).sum(-1))
    p = np.exp(z - lse[..., None])
    return p, np.einsum('bhij,bjhd->bihd', p, v).astype(np.float32), lse.astype(np.float32)

def backward(scale, scale_of_dq):
    p, out, _ = forward(scale)
    delta = np.einsum('bihd,bihd->bhi', dout, out)
    ds = p * (np.einsum('bihd,bjhd->bhij', dout, v) - delta[..., None])
    dq, dk, dv = np.einsum('bhij,bjhd->bihd', ds, k) * scale_of_dq, np.einsum('bhij,bihd->bjhd', ds, q) * scale, np.einsum('bhij,bihd->bjhd', p, dout)
    return {n: x.astype(np.float32) for n, x in (('dq', dq), ('dk', dk), ('dv', dv))}
'''


def run_pytest(tmp_path, tests, url, seconds=50, **env):
    (tmp_path / 'kernel.py').write_text(KERNEL)
    (tmp_path / 'test_kernel.py').write_text('import pytest\nfrom kernel import *\n' + tests)
    path = os.pathsep.join(filter(None, [FOLDER, os.environ.get('PYTHONPATH')]))
    done = subprocess.run([sys.executable, '-m', 'pytest', '-p', 'pytest_attnd', '-p', 'no:cacheprovider', '-rN', '-q', '--rootdir', str(tmp_path), str(tmp_path)],
                          cwd=tmp_path, env={**os.environ, 'PYTHONPATH': path, 'ATTND_URL': url, **env}, capture_output=True, text=True, timeout=seconds * service.SLOWER)
    return done.returncode, done.stdout + done.stderr


def test_right_results_pass_and_the_answer_is_returned(server, tmp_path):
    status, said = run_pytest(tmp_path, '''
def test_forward(assert_attention):
    _, out, lse = forward(0.25)
    assert assert_attention(out, lse=lse, q=q, k=k, v=v)['verdict'] in ('match', 'rounding')

def test_one_result_alone_and_an_option(assert_attention):
    assert_attention(lse=forward(0.25, causal=True)[2], q=q, k=k, v=v, causal=True)

def test_gradients(assert_attention):
    assert_attention(q=q, k=k, v=v, dout=dout, **backward(0.25, 0.25))

def test_the_other_layout(assert_attention):
    assert_attention(*(x.swapaxes(1, 2) for x in forward(0.25)[1:2]), q=q.swapaxes(1, 2), k=k.swapaxes(1, 2), v=v.swapaxes(1, 2), layout='bhsd')
''', server.url)
    assert status == 0 and '4 passed' in said, said


def test_a_wrong_forward_fails_with_the_reason_and_the_line_of_the_test(server, tmp_path):
    status, said = run_pytest(tmp_path, '''
def test_forward(assert_attention):
    _, out, lse = forward(1)
    assert_attention(out, lse=lse, q=q, k=k, v=v)
''', server.url)
    assert status == 1 and '1 failed' in said, said
    assert re.search(r'mismatch: forward of attention\n.* out: \d+ of 1280 are wrong by more than .*; the largest error is [\d.]+', said), said
    assert re.search(r'  where: out, .+: \d+ of the \d+ that are wrong\n', said), said
    assert re.search(r'  worst: out\[0, \d+, \d, \d+\] is -?[\d.]+, must be -?[\d.]+', said), said
    assert re.search(r'  because \(scale_missing\): .+\n.*  to fix: .+', said), said
    assert 'assert_attention(out, lse=lse, q=q, k=k, v=v)' in said and 'pytest_attnd.py' not in said, said


def test_two_mistakes_at_once_are_both_named(server, tmp_path):
    status, said = run_pytest(tmp_path, '''
def test_forward(assert_attention):
    _, out, lse = forward(1)
    assert_attention(out, lse=lse / np.float32(np.log(2)), q=q, k=k, v=v)
''', server.url)
    assert status == 1 and re.search(r'  because \((scale_missing and lse_base2|lse_base2 and scale_missing)\): ', said), said


def test_a_wrong_gradient_fails_and_right_ones_beside_it_are_not_blamed(server, tmp_path):
    status, said = run_pytest(tmp_path, '''
def test_gradients(assert_attention):
    assert_attention(q=q, k=k, v=v, dout=dout, **backward(0.25, 1))
''', server.url)
    assert status == 1 and 'mismatch: backward of attention' in said, said
    assert '(scale_missing_in_dq)' in said and re.search(r'  dk: 0 of 1280 ', said) and re.search(r'  dv: 0 of 1280 ', said), said


def test_what_cannot_be_checked_says_why(server, tmp_path):
    status, said = run_pytest(tmp_path, '''
def test_refused(assert_attention):
    with pytest.raises(ValueError, match='attnd refused to check: k: '):
        assert_attention(q, q=q, k=k[..., :8], v=v)

def test_no_result(assert_attention):
    with pytest.raises(TypeError, match='no result to check'):
        assert_attention(q=q, k=k, v=v)

def test_float64(assert_attention):
    with pytest.raises(TypeError, match='out is float64'):
        assert_attention(q.astype(float), q=q, k=k, v=v)

def test_nobody_answers(assert_attention, monkeypatch):
    monkeypatch.setenv('ATTND_URL', 'http://127.0.0.1:1')
    with pytest.raises(ConnectionError, match='Set ATTND_URL, or start it'):
        assert_attention(q, q=q, k=k, v=v)
''', server.url)
    assert status == 0 and '4 passed' in said, said


def test_the_token_is_sent(serve, tmp_path):
    (tmp_path / 'tokens').write_text('secret-of-the-tests-0123456789abcdef\n')
    os.chmod(tmp_path / 'tokens', 0o600)
    server = serve('--token-file', tmp_path / 'tokens')
    tests = 'def test_forward(assert_attention):\n    assert_attention(forward(0.25)[1], q=q, k=k, v=v)\n'
    assert run_pytest(tmp_path, tests, server.url, ATTND_TOKEN='secret-of-the-tests-0123456789abcdef')[0] == 0
    status, said = run_pytest(tmp_path, tests, server.url)
    assert status == 1 and 'attnd refused to check' in said, said


@pytest.mark.limit(200)  # importing PyTorch may take long on a busy machine
def test_pytorch_tensors_are_taken_as_they_are(server, tmp_path):
    if subprocess.run([sys.executable, '-c', 'import torch'], capture_output=True).returncode != 0:
        pytest.skip('PyTorch is not here')
    status, said = run_pytest(tmp_path, '''
import torch

@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_forward_and_backward(assert_attention, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16).to(dtype).requires_grad_() for _ in range(3))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = torch.softmax(exact[0] @ exact[1].transpose(-1, -2) / 4, -1) @ exact[2]
    dout = torch.randn(1, 2, 40, 16).to(dtype)
    out.backward(dout.double())
    dq, dk, dv = (t.grad.to(dtype) for t in exact)
    assert_attention(out.to(dtype), dq=dq, dk=dk, dv=dv, q=q, k=k, v=v, dout=dout, layout='bhsd')
    with pytest.raises(pytest.fail.Exception, match='mismatch'):
        assert_attention(2 * out.to(dtype), q=q, k=k, v=v, layout='bhsd')
''', server.url, seconds=150)
    assert status == 0 and '3 passed' in said, said


# ---- flashinfer_bench.py ---------------------------------------------------------------------------------------------


def attention(q, k, v, scale, causal):
    """Returns attention of q [Sq, H, D] over k and v [Sk, H, D], as out [Sq, H, D] and lse in base 2 [Sq, H]."""
    z = np.einsum('ihd,jhd->hij', q, k) * scale
    if causal:
        z = np.where(np.tri(*z.shape[1:], z.shape[2] - z.shape[1], dtype=bool), z, -np.inf)
    lse = np.log(np.exp(z).sum(-1))
    return np.einsum('hij,jhd->ihd', np.exp(z - lse[..., None]), v), lse.T / np.log(2)


class TraceSet:
    """A trace set (folder of files) of FlashInfer-Bench with one definition and one workload. All numbers in its files
    are bfloat16."""

    def __init__(self, folder, op_type, name, inputs, files):
        """`files` has the inputs that the workload stores in a file. The other inputs are random, or single numbers."""
        self.module, self.folder, self.name = example('flashinfer_bench'), folder, name
        specs = {}
        for n, x in inputs.items():
            specs[n] = {'type': 'safetensors', 'path': './blob/a.safetensors', 'tensor_key': n} if n in files else {'type': 'random'}
            if np.ndim(x) == 0:
                specs[n] = {'type': 'scalar', 'value': x}
        for kind in ('definitions', 'workloads'):
            (folder / kind / op_type).mkdir(parents=True)
        (folder / 'blob').mkdir()
        (folder / f'definitions/{op_type}/{name}.json').write_text(json.dumps({'name': name, 'op_type': op_type}))
        line = {'definition': name, 'solution': None, 'workload': {'uuid': 'the-second', 'axes': {}, 'inputs': specs}, 'evaluation': None}
        other = {**line, 'workload': {**line['workload'], 'uuid': 'the-first', 'inputs': {}}}
        (folder / f'workloads/{op_type}/{name}.jsonl').write_text(json.dumps(other) + '\n' + json.dumps(line) + '\n')
        (folder / 'blob/a.safetensors').write_bytes(self.module.dump({n: self.raw(n, inputs[n]) for n in files}, {}))
        self.random = {n: self.raw(n, x) for n, x in inputs.items() if n not in files and np.ndim(x)}

    def raw(self, name, x):
        if np.issubdtype(x.dtype, np.integer):
            return 'I32', x.astype(np.int32)
        return ('F32', x.astype(np.float32)) if name == 'lse' else ('BF16', wire.bf16_bits(x))

    def check(self, url, **outputs):
        """Runs flashinfer_bench.py. Returns (exit status, what it prints)."""
        (self.folder / 'out.safetensors').write_bytes(self.module.dump({**self.random, **{n: self.raw(n, x) for n, x in outputs.items()}}, {}))
        done = subprocess.run([sys.executable, os.path.join(FOLDER, 'flashinfer_bench.py'), str(self.folder), self.name, 'the-second', str(self.folder / 'out.safetensors'), url],
                              capture_output=True, text=True, timeout=50 * service.SLOWER)
        return done.returncode, done.stdout + done.stderr


def random(rng, *shape):
    return wire.rounded(rng.standard_normal(shape), 'bfloat16')


def test_a_ragged_prefill_of_flashinfer_bench(server, tmp_path):
    rng = np.random.default_rng(1)
    starts = np.array([0, 5, 5, 12])
    q, k, v = random(rng, 12, 4, 16), random(rng, 12, 2, 16), random(rng, 12, 2, 16)
    traces = TraceSet(tmp_path, 'gqa_ragged', 'gqa_ragged_prefill_causal_h4_kv2_d16',
                      {'q': q, 'k': k, 'v': v, 'qo_indptr': starts, 'kv_indptr': starts, 'sm_scale': 0.25}, ('qo_indptr', 'kv_indptr'))

    def solve(causal=True):
        output, lse = np.zeros_like(q), np.zeros((12, 4))
        for a, b in zip(starts, starts[1:]):
            output[a:b], lse[a:b] = attention(q[a:b], k[a:b].repeat(2, 1), v[a:b].repeat(2, 1), 0.25, causal)
        return {'output': output, 'lse': lse}
    assert traces.check(server.url, **solve())[0] == 0
    assert traces.check(server.url, lse=solve()['lse'])[0] == 0
    status, said = traces.check(server.url, **solve(causal=False))
    assert status == 1 and said.startswith(f'{traces.name} the-second: mismatch\n') and 'because (causal_missing)' in said, said
    right = solve()
    status, said = traces.check(server.url, output=right['output'], lse=right['lse'] * np.log(2))
    assert status == 1 and re.search(r'lse: the largest error is .*; 4[78] of 48 are wrong', said), said


def test_a_paged_prefill_and_a_latent_decode_of_flashinfer_bench(server, tmp_path):
    rng = np.random.default_rng(2)
    # Two rows of 7 and 4 tokens, in pages of one token each, with 3 and 4 queries.
    pages, starts, queries = rng.permutation(20), np.array([0, 7, 11]), np.array([0, 3, 7])
    q, k, v = random(rng, 7, 4, 16), random(rng, 20, 1, 2, 16), random(rng, 20, 1, 2, 16)
    output, lse = np.zeros_like(q), np.zeros((7, 4))
    for b in range(2):
        rows, of = slice(queries[b], queries[b + 1]), pages[starts[b]:starts[b + 1]]
        output[rows], lse[rows] = attention(q[rows], k[of, 0].repeat(2, 1), v[of, 0].repeat(2, 1), 0.25, True)
    traces = TraceSet(tmp_path / 'prefill', 'gqa_paged', 'gqa_paged_prefill_causal_h4_kv2_d16_ps1',
                      {'q': q, 'k_cache': k, 'v_cache': v, 'qo_indptr': queries, 'kv_indptr': starts, 'kv_indices': pages[:11], 'sm_scale': 0.25}, ('qo_indptr', 'kv_indptr', 'kv_indices'))
    assert traces.check(server.url, output=output, lse=lse)[0] == 0
    assert traces.check(server.url, output=output * 1.5, lse=lse)[0] == 1

    # Latent attention: one head whose keys have 32 + 8 numbers, the first 32 of which are the values. One row has 7
    # tokens in pages of 4 tokens, and one row has none.
    ckv, kpe = random(rng, 5, 4, 32), random(rng, 5, 4, 8)
    q_nope, q_pe = random(rng, 2, 3, 32), random(rng, 2, 3, 8)
    keys, values = (x[[3, 1]].reshape(8, 1, -1)[:7].repeat(3, 1) for x in (np.concatenate((ckv, kpe), -1), ckv))
    output, lse = np.zeros((2, 3, 32)), np.full((2, 3), -np.inf)
    output[:1], lse[:1] = attention(np.concatenate((q_nope, q_pe), -1)[:1], keys, values, 0.1, False)
    traces = TraceSet(tmp_path / 'latent', 'mla_paged', 'mla_paged_decode_h3_ckv32_kpe8_ps4',
                      {'q_nope': q_nope, 'q_pe': q_pe, 'ckv_cache': ckv, 'kpe_cache': kpe, 'kv_indptr': np.array([0, 2, 2]), 'kv_indices': np.array([3, 1]),
                       'kv_last_page_len': np.array([3, 0]), 'sm_scale': 0.1}, ('kv_indptr', 'kv_indices', 'kv_last_page_len'))
    status, said = traces.check(server.url, output=output, lse=lse)
    assert status == 0, said
    assert traces.check(server.url, output=np.roll(output, 1, 1), lse=lse)[0] == 1


def test_what_is_missing_is_named(server, tmp_path):
    rng = np.random.default_rng(1)
    inputs = {'q': random(rng, 3, 2, 8), 'k': random(rng, 3, 2, 8), 'v': random(rng, 3, 2, 8), 'qo_indptr': np.array([0, 3]), 'kv_indptr': np.array([0, 3]), 'sm_scale': 0.3}
    traces = TraceSet(tmp_path, 'gqa_ragged', 'gqa_ragged_prefill_causal_h2_kv2_d8', inputs, ('qo_indptr', 'kv_indptr'))
    assert traces.check(server.url) == (2, 'flashinfer_bench.py: neither "output" nor "lse" is among the saved tensors\n')
    v = traces.random.pop('v')
    assert traces.check(server.url, output=inputs['q']) == (2, 'flashinfer_bench.py: v is random in this workload: save it beside the outputs\n')
    traces.random['v'] = v
    status, said = traces.check(server.url, output=inputs['q'][:2])
    assert status == 2 and said.startswith('flashinfer_bench.py: out: '), said
    for path in pathlib.Path(tmp_path).rglob('definitions/*/*.json'):
        path.write_text(json.dumps({'name': traces.name, 'op_type': 'rmsnorm'}))
    assert traces.check(server.url, output=inputs['q']) == (2, 'flashinfer_bench.py: op_type rmsnorm is not one of gqa_ragged, gqa_paged, mla_paged\n')
