"""Attention with Triton's own, unmodified client: attnd implements KServe v2 with binary tensors.

    pip install 'tritonclient[http]'
    python3 triton_client.py [http://127.0.0.1:8080]

Sends random tensors, and compares the answer with softmax(q k^T / sqrt(D)) v computed here. Copy `attention` into your
program."""
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


def attention(client, model, tensors, **parameters):
    """Sends a request; model is attention_forward or attention_backward. Returns the arrays of the answer by name, and
    the answer's parameters."""
    inputs = []
    for name, a in tensors.items():
        inputs.append(triton.InferInput(name, list(a.shape), np_to_triton_dtype(a.dtype)))
        inputs[-1].set_data_from_numpy(np.ascontiguousarray(a))
    result = client.infer(model, inputs, parameters=parameters or None)
    said = result.get_response()
    return {output['name']: result.as_numpy(output['name']) for output in said['outputs']}, said['parameters']


def main(url='http://127.0.0.1:8080'):
    client = triton.InferenceServerClient(url.split('//')[1])
    rng = np.random.default_rng(0)
    # axes: batch, position, head, channel [B, S, H, D]
    tensors = {name: rng.standard_normal((2, 100, 4, 64)).astype(np.float16) for name in ('q', 'k', 'v')}
    answer, facts = attention(client, 'attention_forward', tensors, causal=True)

    q, k, v = (t.astype(float) for t in tensors.values())
    scores = np.einsum('bqhd,bkhd->bhqk', q, k) / 64**0.5
    scores[..., np.triu(np.ones((100, 100), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum('bhqk,bkhd->bqhd', weights / weights.sum(-1, keepdims=True), v)
    error = np.abs(answer['out'] - want).max()
    print(f'{facts["backend"]}: out {answer["out"].shape}, the largest error is {error:.1e}')
    assert error < 2e-3, 'float16 has 11 bits'

    gradients, _ = attention(client, 'attention_backward', {**tensors, **answer, 'dout': np.ones_like(tensors['q'])}, causal=True)
    # with dout = 1, each query adds 1 to the sum of dv, because its weights sum to 1
    total = gradients['dv'].astype(float).sum((0, 1))
    assert np.allclose(total, 200, atol=0.5), total
    print('dq', gradients['dq'].shape, 'dk', gradients['dk'].shape, 'dv', gradients['dv'].shape)
    try:
        attention(client, 'attention_forward', {**tensors, 'k': tensors['k'][:, :, :3]})
    except InferenceServerException as refused:
        print(f'refused: {refused.message()} ({refused.status()})')


if __name__ == '__main__':
    main(*sys.argv[1:])
