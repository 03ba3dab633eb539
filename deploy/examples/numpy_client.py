"""Attention from NumPy, with only the standard library besides.

    python3 numpy_client.py [http://127.0.0.1:8080]

Sends random tensors, and compares the answer with softmax(q k^T / sqrt(D)) v computed here. Copy `attention` into your
program.
After `import ml_dtypes` (a package of PyPI) it accepts bfloat16 too."""
import base64
import json
import sys
import urllib.error
import urllib.request

import numpy as np


class Refused(Exception):
    """Raised for a request that the server refuses. The text is the reason in one sentence, `code` is stable, and
    `pointer` names the wrong member of the request."""

    def __init__(self, problem):
        super().__init__(problem['detail'])
        self.code, self.pointer = problem['code'], problem.get('pointer')


def tensor(a):
    return {'shape': a.shape, 'dtype': str(a.dtype), 'data': base64.b64encode(np.ascontiguousarray(a).tobytes()).decode()}


def attention(url, op, **members):
    """Sends a request; op is forward, backward, observe or merge. Arrays among the members are sent as tensors, and
    tensors of the answer become arrays."""
    body = json.dumps({name: tensor(m) if isinstance(m, np.ndarray) else m for name, m in members.items()}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f'{url}/v1/attention/{op}', body, {'Content-Type': 'application/json'})) as answer:
            answer = json.load(answer)
    except urllib.error.HTTPError as e:
        raise Refused(json.load(e)) from None
    return {name: np.frombuffer(base64.b64decode(m['data']), m['dtype']).reshape(m['shape']) if isinstance(m, dict) and 'dtype' in m else m
            for name, m in answer.items()}


def main(url='http://127.0.0.1:8080'):
    rng = np.random.default_rng(0)
    # axes: batch, position, head, channel [B, S, H, D]
    q, k, v = (rng.standard_normal((2, 100, 4, 64)).astype(np.float16) for _ in range(3))
    answer = attention(url, 'forward', q=q, k=k, v=v, causal=True)

    scores = np.einsum('bqhd,bkhd->bhqk', q.astype(float), k.astype(float)) / 64**0.5
    scores[..., np.triu(np.ones((100, 100), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum('bhqk,bkhd->bqhd', weights / weights.sum(-1, keepdims=True), v.astype(float))
    error = np.abs(answer['out'] - want).max()
    print(f'{answer["backend"]}: out {answer["out"].shape}, the largest error is {error:.1e}')
    assert error < 2e-3, 'float16 has 11 bits'

    # an observe needs no v
    looks = attention(url, 'observe', q=q, k=k, causal=True, observe=['entropy', 'key_mass', 'pairs'])
    p = weights / weights.sum(-1, keepdims=True)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    assert np.allclose(looks['entropy'], entropy, atol=1e-4) and np.allclose(looks['key_mass'], p.sum(2), atol=1e-4)
    assert looks['pairs'] == 2 * 4 * 100 * 101 // 2
    print(f'observe: mean entropy {looks["entropy"].mean():.2f} nats, the first key has {looks["key_mass"][..., 0].mean():.1f} of 100 queries')

    gradients = attention(url, 'backward', q=q, k=k, v=v, dout=np.ones_like(q), causal=True)
    # with dout = 1, each query adds 1 to the sum of dv, because its weights sum to 1
    total = gradients['dv'].astype(float).sum((0, 1))
    assert np.allclose(total, 200, atol=0.5), total
    print('dq', gradients['dq'].shape, 'dk', gradients['dk'].shape, 'dv', gradients['dv'].shape)
    try:
        attention(url, 'forward', q=q, k=k[:, :, :3], v=v)
        sys.exit('three heads of k were not refused')
    except Refused as refused:
        print(f'refused: {refused} ({refused.code} at {refused.pointer})')


if __name__ == '__main__':
    main(*sys.argv[1:])
