"""Attention from PyTorch, as a function that autograd knows: forward and backward both run on the server.

    python3 torch_client.py [http://127.0.0.1:8080]

Holds out and the gradients against PyTorch's own."""
import base64
import json
import sys
import urllib.error
import urllib.request

import torch

URL = 'http://127.0.0.1:8080'


def to_wire(t):
    t = t.detach().cpu().contiguous()
    # NumPy has no bfloat16: the bytes are taken as they are.
    return {'shape': list(t.shape), 'dtype': str(t.dtype).removeprefix('torch.'), 'data': base64.b64encode(t.flatten().view(torch.uint8).numpy().tobytes()).decode()}


def from_wire(m):
    return torch.frombuffer(bytearray(base64.b64decode(m['data'])), dtype=getattr(torch, m['dtype'])).reshape(m['shape'])


def post(op, **members):
    try:
        with urllib.request.urlopen(urllib.request.Request(f'{URL}/v1/attention/{op}', json.dumps(members).encode(), {'Content-Type': 'application/json'})) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise ValueError(json.load(e)['detail']) from None  # one sentence: what, where, and the rule


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):  # [B, H, S, D], as scaled_dot_product_attention has it
        answer = post('forward', q=to_wire(q), k=to_wire(k), v=to_wire(v), causal=causal, layout='bhsd', alignment='top_left')
        out, lse = from_wire(answer['out']), from_wire(answer['lse'])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out.to(q.device)

    @staticmethod
    def backward(ctx, dout):
        names = dict(zip(('q', 'k', 'v', 'out', 'lse'), map(to_wire, ctx.saved_tensors)))
        answer = post('backward', **names, dout=to_wire(dout), causal=ctx.causal, layout='bhsd', alignment='top_left')
        return *(from_wire(answer[name]).to(dout.device) for name in ('dq', 'dk', 'dv')), None


def main():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 100, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    out = Attention.apply(q, k, v, True)
    out.float().square().sum().backward()

    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True) if hasattr(torch.nn.functional, 'scaled_dot_product_attention') else plain(*exact)
    want.square().sum().backward()
    for name, got, right in [('out', out, want), *((f'd{n}', t.grad, e.grad) for n, t, e in zip('qkv', (q, k, v), exact))]:
        error = ((got.double() - right).abs().max() / right.abs().max()).item()
        print(f'{name}: {tuple(got.shape)}, the largest error is {error:.1e} of the largest number')
        assert error < 0.02, 'bfloat16 has 8 bits'
    try:
        Attention.apply(q, k[:, :3], v, True)
        sys.exit('three heads of k were not refused')
    except ValueError as refused:
        print('refused:', refused)


def plain(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf), -1) @ v


if __name__ == '__main__':
    URL = sys.argv[1] if len(sys.argv) > 1 else URL
    main()
