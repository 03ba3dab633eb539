"""Attention on tensors in the GPU's memory, which the server's kernels read in place: nothing is sent or copied.

    attnd --allow-cuda-shm                     (on the same machine; in containers both need one PID namespace,
    `docker run --pid`)
    python3 cuda_shared_memory_client.py [http://127.0.0.1:8080]

Puts random tensors into memory of the first GPU, lets the server write the results behind them, and compares these with
softmax(q k^T / sqrt(D)) v computed here. Copy `Region` into your program: it uses CUDA's runtime by ctypes, and
Triton's cuda_shared_memory extension by http.client. Tensors of PyTorch or CuPy are copied into the region within the
GPU (cudaMemcpy); synchronize their stream before you send the request."""
import base64
import ctypes
import http.client
import json
import sys
from math import prod

import numpy as np

DATATYPE = {'float16': 'FP16', 'float32': 'FP32'}  # bfloat16 would be BF16, but NumPy has no bfloat16
# The smallest allocation in bytes. CUDA shares whole blocks of 2 MiB, and one block may hold several smaller
# allocations.
LEAST = 2 << 20


class Refused(Exception):
    """Raised for a request that the server refuses. The text is the reason in one sentence."""


class Cuda:
    """Calls CUDA's runtime library by ctypes. Every function of the library returns 0 or an error code."""

    def __init__(self):
        for name in ('libcudart.so', 'libcudart.so.13', 'libcudart.so.12'):
            try:
                self.library = ctypes.CDLL(name)
                return
            except OSError:
                continue
        sys.exit('no libcudart: add its folder, /usr/local/cuda/lib64 say, to LD_LIBRARY_PATH')

    def __getattr__(self, name):
        def call(*args):
            error = getattr(self.library, name)(*args)
            if error:
                sys.exit(f'{name}: CUDA error {error}')
        return call


class Region:
    """Memory of a GPU that is registered with the server. Its tensors lie one after the other."""

    def __init__(self, connection, name, byte_size, device=0):
        self.connection, self.name, self.byte_size, self.end = connection, name, max(byte_size, LEAST), 0
        self.cuda, self.memory, handle = Cuda(), ctypes.c_void_p(), (ctypes.c_byte * 64)()
        self.cuda.cudaSetDevice(ctypes.c_int(device))
        self.cuda.cudaMalloc(ctypes.byref(self.memory), ctypes.c_size_t(self.byte_size))
        self.cuda.cudaIpcGetMemHandle(ctypes.byref(handle), self.memory)
        try:
            self.post(f'/v2/cudasharedmemory/region/{name}/register',
                      {'raw_handle': {'b64': base64.b64encode(bytes(handle)).decode()}, 'device_id': device, 'byte_size': self.byte_size})
        except Refused:
            self.cuda.cudaFree(self.memory)
            raise

    def post(self, path, body):
        self.connection.request('POST', path, json.dumps(body), {'Content-Type': 'application/json'})
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise Refused(f'{json.loads(text)["error"]} ({answer.status})')
        return json.loads(text or '{}')

    def place(self, name, byte_size):
        # tensors begin at multiples of 256 bytes, because aligned tensors are faster
        at, self.end = self.end, (self.end + byte_size + 255) // 256 * 256
        assert at + byte_size <= self.byte_size, 'the region is too small'
        return {'name': name, 'parameters': {'shared_memory_region': self.name, 'shared_memory_byte_size': byte_size, 'shared_memory_offset': at}}

    def copy(self, to, source, byte_size):
        # 4 is cudaMemcpyDefault: CUDA finds out which of the two addresses is on the GPU
        self.cuda.cudaMemcpy(to, source, ctypes.c_size_t(byte_size), ctypes.c_int(4))

    def address(self, placed):
        return ctypes.c_void_p(self.memory.value + placed['parameters']['shared_memory_offset'])

    def input(self, name, array):
        placed = self.place(name, array.nbytes)
        self.copy(self.address(placed), np.ascontiguousarray(array).ctypes.data_as(ctypes.c_void_p), array.nbytes)
        return {**placed, 'shape': array.shape, 'datatype': DATATYPE[str(array.dtype)]}

    def output(self, name, dtype, shape):
        return self.place(name, np.dtype(dtype).itemsize * prod(shape))

    def array(self, placed, dtype, shape):
        """Returns an array that the server has written, copied from the GPU."""
        array = np.empty(shape, dtype)
        self.copy(array.ctypes.data_as(ctypes.c_void_p), self.address(placed), array.nbytes)
        return array

    def infer(self, model, inputs, outputs, **parameters):
        return self.post(f'/v2/models/{model}/infer', {'inputs': inputs, 'outputs': outputs, 'parameters': parameters})

    def close(self):
        """Unregisters the memory and frees it. Call it after every request that uses the region was answered."""
        self.post(f'/v2/cudasharedmemory/region/{self.name}/unregister', {})
        self.cuda.cudaFree(self.memory)


def main(url='http://127.0.0.1:8080'):
    connection = http.client.HTTPConnection(url.split('//')[1])
    rng = np.random.default_rng(0)
    # axes: batch, position, head, channel [B, S, H, D]
    tensors = {name: rng.standard_normal((2, 100, 4, 64)).astype(np.float16) for name in ('q', 'k', 'v')}
    shape, lse_shape = (2, 100, 4, 64), (2, 4, 100)
    region = Region(connection, 'example', 1 << 20)
    try:
        inputs = [region.input(name, array) for name, array in tensors.items()]
        out, lse = region.output('out', np.float16, shape), region.output('lse', np.float32, lse_shape)
        answer = region.infer('attention_forward', inputs, [out, lse], causal=True)
        got, sums = region.array(out, np.float16, shape), region.array(lse, np.float32, lse_shape)

        q, k, v = (t.astype(float) for t in tensors.values())
        scores = np.einsum('bqhd,bkhd->bhqk', q, k) / 64**0.5
        scores[..., np.triu(np.ones((100, 100), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum('bhqk,bkhd->bqhd', weights / weights.sum(-1, keepdims=True), v)
        error = np.abs(got - want).max()
        print(f'{answer["parameters"]["backend"]}: out {got.shape}, the largest error is {error:.1e}; lse {sums.shape}')
        assert error < 2e-3, 'float16 has 11 bits'
        assert np.allclose(sums, np.log(np.exp(scores).sum(-1)), atol=1e-3)
        try:
            region.infer('attention_forward', inputs, [region.place('out', 1000)])
        except Refused as refused:
            print(f'refused: {refused}')
    finally:
        region.close()


if __name__ == '__main__':
    main(*sys.argv[1:])
