"""Attention from NumPy with the package safetensors: a request and an answer are files of tensors, without conversion
to text.

    python3 safetensors_client.py [http://127.0.0.1:8080]

Sends random tensors, and compares the answer with softmax(q k^T / sqrt(D)) v computed here. Copy `load` and `attention`
into your program; for PyTorch import save and load from safetensors.torch. After `import ml_dtypes` (a package of PyPI)
they accept bfloat16 too."""
import json
import sys
import urllib.error
import urllib.request

import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

DTYPES = {'BF16': 'bfloat16', 'F16': 'float16', 'F32': 'float32'}


def load(file):
    """Reads a safetensors file as safetensors.numpy's load() does, but bfloat16 too."""
    return {name: np.frombuffer(t['data'], DTYPES[t['dtype']]).reshape(t['shape']) for name, t in deserialize(file)}


class Refused(Exception):
    """Raised for a request that the server refuses. The text is the reason in one sentence, `code` is stable, and
    `pointer` names the wrong member of the request."""

    def __init__(self, problem):
        super().__init__(problem['detail'])
        self.code, self.pointer = problem['code'], problem.get('pointer')


def attention(url, op, tensors, **options):
    """Sends a request; op is forward or backward. Returns the tensors of the answer by name, and the other members of
    the answer."""
    body = save(tensors, {name: json.dumps(value) for name, value in options.items()})
    try:
        with urllib.request.urlopen(urllib.request.Request(f'{url}/v1/attention/{op}', body, {'Content-Type': 'application/x-safetensors'})) as answer:
            answer = answer.read()
    except urllib.error.HTTPError as e:
        raise Refused(json.load(e)) from None  # a refusal is JSON, even if the request was a safetensors file
    header = json.loads(answer[8:8 + int.from_bytes(answer[:8], 'little')])
    return load(answer), {name: json.loads(value) for name, value in header['__metadata__'].items()}


def main(url='http://127.0.0.1:8080'):
    rng = np.random.default_rng(0)
    # axes: batch, position, head, channel [B, S, H, D]
    tensors = {name: rng.standard_normal((2, 100, 4, 64)).astype(np.float16) for name in ('q', 'k', 'v')}
    answer, facts = attention(url, 'forward', tensors, causal=True)

    q, k, v = (t.astype(float) for t in tensors.values())
    scores = np.einsum('bqhd,bkhd->bhqk', q, k) / 64**0.5
    scores[..., np.triu(np.ones((100, 100), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum('bhqk,bkhd->bqhd', weights / weights.sum(-1, keepdims=True), v)
    error = np.abs(answer['out'] - want).max()
    print(f'{facts["backend"]}: out {answer["out"].shape}, the largest error is {error:.1e}')
    assert error < 2e-3, 'float16 has 11 bits'

    gradients, _ = attention(url, 'backward', {**tensors, **answer, 'dout': np.ones_like(tensors['q'])}, causal=True)
    # with dout = 1, each query adds 1 to the sum of dv, because its weights sum to 1
    total = gradients['dv'].astype(float).sum((0, 1))
    assert np.allclose(total, 200, atol=0.5), total
    print('dq', gradients['dq'].shape, 'dk', gradients['dk'].shape, 'dv', gradients['dv'].shape)
    try:
        attention(url, 'forward', {**tensors, 'k': np.ascontiguousarray(tensors['k'][:, :, :3])})
    except Refused as refused:
        print(f'refused: {refused} ({refused.code} at {refused.pointer})')


if __name__ == '__main__':
    main(*sys.argv[1:])
