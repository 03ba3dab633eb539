"""Attention without sending a tensor: Triton's unmodified client uses memory that it shares with attnd on the same
machine.

    attnd --allow-shm attn_                                  (in containers both need the same /dev/shm)
    pip install 'tritonclient[http]'
    python3 shared_memory_client.py [http://127.0.0.1:8080]

Puts random tensors into one object of /dev/shm, lets the server write the results behind them, and compares these with
softmax(q k^T / sqrt(D)) v computed here. Copy `Region` into your program."""
import os
import sys

import numpy as np
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


class Region:
    """An object of shared memory that is registered with the server. Its arrays are placed one after the other."""

    def __init__(self, client, name, key, byte_size):
        self.client, self.name, self.byte_size, self.end = client, name, byte_size, 0
        self.handle = shm.create_shared_memory_region(name, key, byte_size)
        client.register_system_shared_memory(name, key, byte_size)

    def place(self, byte_size):
        at, self.end = self.end, (self.end + byte_size + 63) // 64 * 64
        assert at + byte_size <= self.byte_size, 'the region is too small'
        return at

    def input(self, name, array):
        at = self.place(array.nbytes)
        shm.set_shared_memory_region(self.handle, [np.ascontiguousarray(array)], offset=at)
        made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_shared_memory(self.name, array.nbytes, offset=at)
        return made

    def output(self, name, byte_size):
        made = triton.InferRequestedOutput(name)
        made.at = self.place(byte_size)
        made.set_shared_memory(self.name, byte_size, offset=made.at)
        return made

    def array(self, output, dtype, shape):
        """Returns an array that the server has written, as a copy, because the memory may be used again."""
        return np.array(shm.get_contents_as_numpy(self.handle, dtype, shape, offset=output.at))

    def close(self):
        self.client.unregister_system_shared_memory(self.name)
        shm.destroy_shared_memory_region(self.handle)


def main(url='http://127.0.0.1:8080'):
    client = triton.InferenceServerClient(url.split('//')[1])
    rng = np.random.default_rng(0)
    # axes: batch, position, head, channel [B, S, H, D]
    tensors = {name: rng.standard_normal((2, 100, 4, 64)).astype(np.float16) for name in ('q', 'k', 'v')}
    shape, lse_shape = [2, 100, 4, 64], [2, 4, 100]
    region = Region(client, 'example', f'/attn_example_{os.getpid()}', 4 * tensors['q'].nbytes + 4096)
    try:
        inputs = [region.input(name, array) for name, array in tensors.items()]
        out, lse = region.output('out', tensors['q'].nbytes), region.output('lse', 2 * 4 * 100 * 4)
        result = client.infer('attention_forward', inputs, outputs=[out, lse], parameters={'causal': True})
        got, sums = region.array(out, np.float16, shape), region.array(lse, np.float32, lse_shape)

        q, k, v = (t.astype(float) for t in tensors.values())
        scores = np.einsum('bqhd,bkhd->bhqk', q, k) / 64**0.5
        scores[..., np.triu(np.ones((100, 100), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum('bhqk,bkhd->bqhd', weights / weights.sum(-1, keepdims=True), v)
        error = np.abs(got - want).max()
        print(f'{result.get_response()["parameters"]["backend"]}: out {got.shape}, the largest error is {error:.1e}; lse {sums.shape}')
        assert error < 2e-3, 'float16 has 11 bits'
        assert np.allclose(sums, np.log(np.exp(scores).sum(-1)), atol=1e-3)
        try:
            too_small = triton.InferRequestedOutput('out')
            too_small.set_shared_memory(region.name, 1000)
            client.infer('attention_forward', inputs, outputs=[too_small])
        except InferenceServerException as refused:
            print(f'refused: {refused.message()} ({refused.status()})')
    finally:
        region.close()


if __name__ == '__main__':
    main(*sys.argv[1:])
