"""A Python server of POST /v1/attention/forward, written as a good Python programmer would write it: with aiohttp,
uvloop and PyTorch. compare.py measures attnd against it.

    python tests/load/python_peer.py --port 8090 [--processes N] [--cuda]

One process per core shares the port (SO_REUSEPORT). Each process has one PyTorch thread. binascii, the fastest module
of the standard library for this, decodes base64. orjson parses JSON if it is installed. PyTorch's own CPU flash kernel
computes the attention, or with --cuda its GPU flash kernel, because these return the log-sum-exp too. The answer is
joined from bytes without another pass over the tensors. The only options are causal and scale."""
import argparse
import binascii
import json
import os
import warnings

import aiohttp.web
import torch
import uvloop

try:
    import orjson
    loads = orjson.loads
except ImportError:
    loads = json.loads

warnings.filterwarnings('ignore', 'The given buffer is not writable')
DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
NAMES = {v: k for k, v in DTYPES.items()}
CUDA = False


def tensor(members, name):
    t = members[name]
    return torch.frombuffer(binascii.a2b_base64(t['data'], strict_mode=True), dtype=DTYPES[t['dtype']]).reshape(t['shape'])


def written(t):
    text = binascii.b2a_base64(memoryview(t.contiguous().view(torch.uint8).numpy()), newline=False)
    return b'{"shape":%s,"dtype":"%s","data":"%s"}' % (json.dumps(list(t.shape)).encode(), NAMES[t.dtype].encode(), text)


PINNED = {}


def pinned(direction, sizes):
    """Page-locked host memory for one request at a time, divided into pieces of these sizes."""
    if direction not in PINNED or PINNED[direction].numel() < sum(sizes):
        PINNED[direction] = torch.empty(sum(sizes), dtype=torch.uint8).pin_memory()
    return PINNED[direction][:sum(sizes)].split(sizes)


def there(tensors):
    """Copies tensors to the GPU with a single copy."""
    pieces = pinned('there', [t.nbytes for t in tensors])
    for piece, t in zip(pieces, tensors):
        piece.copy_(t.transpose(1, 2).reshape(-1).view(torch.uint8))
    whole = PINNED['there'][:sum(p.numel() for p in pieces)].to('cuda', non_blocking=True)
    parts = whole.split([p.numel() for p in pieces])
    return [p.view(t.dtype).view(t.transpose(1, 2).shape).transpose(1, 2) for p, t in zip(parts, tensors)]


def back(tensors):
    """Copies tensors from the GPU and waits once for all of them."""
    pieces = pinned('back', [t.nbytes for t in tensors])
    made = [p.view(t.dtype).view(t.shape) for p, t in zip(pieces, tensors)]
    for to, t in zip(made, tensors):
        to.copy_(t, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return made


async def forward(request):
    try:
        members = loads(await request.read())
        q, k, v = (tensor(members, n).transpose(1, 2) for n in 'qkv')
        causal, scale = bool(members.get('causal', False)), members.get('scale')
        with torch.inference_mode():
            if CUDA:
                q, k, v = there((q, k, v))
                out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
                out, lse = back((out, lse))
            else:
                out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    except (KeyError, ValueError, TypeError, RuntimeError) as e:
        return aiohttp.web.json_response({'status': 400, 'detail': str(e)}, status=400)
    body = b'{"out":%s,"lse":%s}' % (written(out.transpose(1, 2)), written(lse.float()))
    return aiohttp.web.Response(body=body, content_type='application/json')


async def alive(request):
    return aiohttp.web.Response(text='ok')


def serve(port):
    torch.set_num_threads(1)
    app = aiohttp.web.Application(client_max_size=1 << 30)
    app.router.add_post('/v1/attention/forward', forward)
    app.router.add_get('/livez', alive)
    uvloop.install()
    aiohttp.web.run_app(app, host='127.0.0.1', port=port, reuse_port=True, print=None, access_log=None)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('--port', type=int, default=8090)
    ap.add_argument('--processes', type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument('--cuda', action='store_true')
    a = ap.parse_args()
    global CUDA
    CUDA = a.cuda
    for _ in range(a.processes - 1):
        if os.fork() == 0:
            break
    serve(a.port)


if __name__ == '__main__':
    main()
