"""Decoding with Triton's own client and its sequences: keys and values stay at the server, and a step sends only the
new ones.

    pip install 'tritonclient[http]'
    python3 triton_sequence.py [http://127.0.0.1:8080]

The first request of a sequence contains the prompt, and the last one ends the sequence. Every answer is compared with
attention over all keys computed here. Copy `step` into your program."""
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


def step(client, sequence, q, k, v, start=False, end=False):
    """Appends k and v [1, S, Hk, D] to the sequence. Each query of q [1, Sq, H, D] attends to its own position and to
    all before it. `start` and `end` mark the sequence's first and last request."""
    inputs = []
    for name, a in ('q', q), ('k', k), ('v', v):
        inputs.append(triton.InferInput(name, list(a.shape), np_to_triton_dtype(a.dtype)))
        inputs[-1].set_data_from_numpy(np.ascontiguousarray(a))
    return client.infer('attention_decode', inputs, sequence_id=sequence, sequence_start=start, sequence_end=end,
                        parameters={'causal': True}).as_numpy('out')


def attention(q, k, v):
    Sq, Sk = q.shape[1], k.shape[1]
    # repeats each key/value head for the query heads that share it
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum('bqhd,bkhd->bhqk', q, k) / q.shape[3]**0.5
    scores[..., np.triu(np.ones((Sq, Sk), bool), 1 + Sk - Sq)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum('bhqk,bkhd->bqhd', weights / weights.sum(-1, keepdims=True), v)


def main(url='http://127.0.0.1:8080'):
    client = triton.InferenceServerClient(url.split('//')[1])
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 305, heads, 64)).astype(np.float32) for heads in (8, 2, 2))
    at, worst = 0, 0.0
    for count in (300, 1, 1, 1, 1, 1):  # the first step is the prompt of 300 tokens, and each later step is one token
        part = slice(at, at + count)
        out = step(client, 7, q[:, part], k[:, part], v[:, part], start=at == 0, end=at == 304)
        at += count
        worst = max(worst, np.abs(out - attention(q[:, part].astype(float), k[:, :at].astype(float), v[:, :at].astype(float))).max())
    print(f'a prompt of 300 and 5 steps, the largest error is {worst:.1e}')
    assert worst < 1e-5, 'float32'
    try:
        step(client, 7, q[:, :1], k[:, :1], v[:, :1])
    except InferenceServerException as refused:
        print(f'refused: {refused.message()} ({refused.status()})')


if __name__ == '__main__':
    main(*sys.argv[1:])
