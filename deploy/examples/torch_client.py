"""Attention for PyTorch, computed by the server, forward and backward. It works with autograd, torch.compile and vmap.

    python3 torch_client.py [http://127.0.0.1:8080]

Copy `attention` and everything above it into your program. Tensors are [B, H, S, D], as for
scaled_dot_product_attention. Every member of POST /v1/attention/forward is an argument of the same name, for example
attention(q, k, v, causal=True, window=[128, 0], bias=bias). Gradients go to q, k, v, bias, alibi_slopes and sinks. Run
as a program, this file compares its results with PyTorch's own."""
import ast
import base64
import json
import sys
import urllib.error
import urllib.request
import warnings

import torch

URL = 'http://127.0.0.1:8080'
FORWARD_ONLY = {'out_dtype', 'verify'}  # options that a backward does not take
BACKWARD_ONLY = {'deterministic', 'grad_dtype'}  # options that a forward does not take
# tensors with a gradient, which is named "d" plus the tensor's name
LEARNT = {'q', 'k', 'v', 'bias', 'alibi_slopes', 'sinks'}


def to_wire(t):
    t = t.detach().cpu().contiguous()
    # NumPy has no bfloat16, so it gets the tensor's bytes as uint8.
    return {'shape': list(t.shape), 'dtype': str(t.dtype).removeprefix('torch.'), 'data': base64.b64encode(t.flatten().view(torch.uint8).numpy().tobytes()).decode()}


def from_wire(m, like):
    return torch.frombuffer(bytearray(base64.b64decode(m['data'])), dtype=getattr(torch, m['dtype'])).reshape(m['shape']).to(like.device)


def post(op, problems):
    """Sends the problems in one request. Returns the answers to them."""
    body = json.dumps({'requests': problems}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f'{URL}/v1/attention/{op}', body, {'Content-Type': 'application/json'})) as answer:
            answers = json.load(answer)['responses']
    except urllib.error.HTTPError as e:
        # the server's reason is one sentence: what is wrong, where, and the rule
        raise ValueError(json.load(e)['detail']) from None
    for answer in answers:
        if 'error' in answer:
            raise ValueError(answer['error']['detail'])
    return answers


# A PyTorch operator that computes all problems. Operators take only tensors and text: `names` has the tensors' names,
# separated by spaces, and `options` is the repr() of the options.


def forward_all(problems, names, options):
    options = {n: x for n, x in ast.literal_eval(options).items() if n not in BACKWARD_ONLY}
    answers = post('forward', [{**dict(zip(names.split(), map(to_wire, tensors))), **options} for tensors in problems])
    return [(from_wire(a['out'], t[0]), from_wire(a['lse'], t[0]), torch.tensor(a.get('seed', 0))) for a, t in zip(answers, problems)]


def backward_all(problems, names, options, wanted):
    options = {n: x for n, x in ast.literal_eval(options).items() if n not in FORWARD_ONLY}
    bodies = []
    for tensors, out, lse, seed, dout, dlse in problems:
        members = {**dict(zip(names.split(), tensors)), 'out': out, 'lse': lse, 'dout': dout, 'dlse': dlse}
        bodies.append({**{n: to_wire(t) for n, t in members.items()}, **options, 'outputs': wanted.split()})
        if options.get('dropout_p'):
            # the forward returned this seed, with which the backward drops the same elements
            bodies[-1]['seed'] = int(seed)
    return [[from_wire(answer[n], p[1]) for n in wanted.split()] for answer, p in zip(post('backward', bodies), problems)]


@torch.library.custom_op('attnd::forward', mutates_args=())
def forward(tensors: list[torch.Tensor], names: str, options: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return forward_all([tensors], names, options)[0]


@torch.library.custom_op('attnd::backward', mutates_args=())
def backward(tensors: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, seed: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor,
             names: str, options: str, wanted: str) -> list[torch.Tensor]:
    return backward_all([(tensors, out, lse, seed, dout, dlse)], names, options, wanted)[0]


# Tells torch.compile the shapes of the results, without computing them.


@forward.register_fake
def _(tensors, names, options):
    options, (q, _, v) = ast.literal_eval(options), tensors[:3]
    # shape of out without its last axis: [B, H, Sq], [B, Sq, H], or for packed tensors [total_q, H]
    rows = list(q.shape[:-1])
    heads = rows if options.get('layout') == 'bhsd' else [*rows[:-2], rows[-1], rows[-2]]
    dtype = getattr(torch, options.get('out_dtype', str(q.dtype).removeprefix('torch.')))
    return q.new_empty([*rows, v.shape[-1]], dtype=dtype), q.new_empty(heads, dtype=torch.float32), torch.empty((), dtype=torch.int64)


@backward.register_fake
def _(tensors, out, lse, seed, dout, dlse, names, options, wanted):
    named, of_qkv = dict(zip(names.split(), tensors)), ast.literal_eval(options).get('grad_dtype')
    found = []
    for name in wanted.split():
        like = named[name[1:]]
        dtype = torch.float32 if name not in ('dq', 'dk', 'dv') else getattr(torch, of_qkv) if of_qkv else like.dtype
        found.append(torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format))
    return found


# Connects forward and backward for autograd. The combination of torch.func's vmap() and grad() needs setup_context()
# and generate_vmap_rule.


class Gradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(names, options, wanted, out, lse, seed, dout, dlse, *tensors):
        return tuple(backward(list(tensors), out, lse, seed, dout, dlse, names, options, wanted))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError('the server computes no second derivatives')


class Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(names, options, *tensors):
        return forward(list(tensors), names, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.names, ctx.options, *tensors = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, dout, dlse, _):
        *tensors, out, lse, seed = ctx.saved_tensors
        wanted = ['d' + name for name in ctx.names.split() if name in LEARNT]
        found = dict(zip(wanted, Gradients.apply(ctx.names, ctx.options, ' '.join(wanted), out, lse, seed, dout, dlse, *tensors)))
        return None, None, *(found.get('d' + name) for name in ctx.names.split())


# Returns the part of x that belongs to problem i. With vmap, x has many problems, and one request sends them all.


def one_of(x, dim, i):
    if isinstance(x, (list, tuple)):
        return [one_of(part, d, i) for part, d in zip(x, dim)]
    return x if dim is None else x.select(dim, i)


@forward.register_vmap
def _(info, in_dims, tensors, *texts):
    answers = forward_all([one_of(tensors, in_dims[0], i) for i in range(info.batch_size)], *texts)
    return tuple(torch.stack(part) for part in zip(*answers)), (0, 0, 0)


@backward.register_vmap
def _(info, in_dims, *arguments):
    answers = backward_all([[one_of(x, d, i) for x, d in zip(arguments[:6], in_dims)] for i in range(info.batch_size)], *arguments[6:])
    return [torch.stack(part) for part in zip(*answers)], [0] * len(answers[0])


def attention(q, k, v, **members):
    """Computes attention of q, k and v [B, H, S, D] on the server. Returns out and lse."""
    tensors = {'q': q, 'k': k, 'v': v, **{n: x for n, x in members.items() if isinstance(x, torch.Tensor)}}
    options = {n: x for n, x in members.items() if n not in tensors and x is not None}
    if 'cu_seqlens_q' not in tensors:  # packed tensors have only one layout
        options = {'layout': 'bhsd', 'alignment': 'top_left', **options}
    return Attention.apply(' '.join(tensors), repr(options), *tensors.values())[:2]


# ---- What follows compares the results with PyTorch's own -------------------------------------------------------------


def plain(q, k, v, bias=0, causal=False):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1) @ v


def error(got, right):
    return ((got.double() - right).abs().max() / right.abs().max()).item()


def main():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 100, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 4, 100, 100).requires_grad_()
    out, _ = attention(q, k, v, causal=True, bias=bias)
    out.float().square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    want = plain(*exact, causal=True)
    want.square().sum().backward()
    for name, got, right in [('out', out, want), *((n, t.grad, e.grad) for n, t, e in zip(('dq', 'dk', 'dv', 'dbias'), (q, k, v, bias), exact))]:
        print(f'{name}: {tuple(got.shape)}, the largest error is {error(got, right):.1e} of the largest number')
        assert error(got, right) < 0.02, 'bfloat16 has 8 bits'

    # With dropout, the forward draws a seed, and the backward drops the same elements.
    ones = torch.ones(1, 1, 64, 64)
    zeros, eye = torch.zeros(1, 1, 64, 64), torch.eye(64)[None, None].requires_grad_()
    dropped, _ = attention(zeros, zeros, eye, dropout_p=0.5)
    (dv,) = torch.autograd.grad(dropped, eye, ones)
    assert torch.allclose(dropped.sum(-2), dv[..., 0], atol=1e-5) and (dropped == 0).any()

    # The defaults of gradcheck are for float64. float32 has only 24 bits, so the steps and tolerances are larger here.
    # gradcheck would print a warning about float32, which is hidden.
    warnings.filterwarnings('ignore', message='.*double precision')
    small = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)] + [torch.randn(*shape, requires_grad=True) for shape in ((1, 1, 3, 3), (2,), (2,))]
    assert torch.autograd.gradcheck(lambda q, k, v, bias, slopes, sinks: attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, causal=True, softcap=5),
                                    small, eps=1e-2, atol=1e-3, rtol=1e-2)
    print('gradcheck: passed with eps 1e-2, atol 1e-3, rtol 1e-2')

    def loss(q, k, v):
        return attention(q, k, v, causal=True)[0].square().sum()
    # torch.compile's default backend gives the same results, but needs a C++ compiler
    compiled = torch.compile(loss, backend='aot_eager', fullgraph=True)
    q, k, v = (torch.randn(3, 2, 4, 10, 8, requires_grad=True) for _ in range(3))
    assert torch.allclose(compiled(q[0], k[0], v[0]), loss(q[0], k[0], v[0]))
    each = torch.func.vmap(torch.func.grad(loss))(q, k, v)  # computes the gradients of three problems with vmap
    right = torch.stack([torch.autograd.grad(loss(*(t[i] for t in (q, k, v))), q)[0][i] for i in range(3)])
    assert torch.allclose(each, right, atol=1e-5)
    print('compiled in one graph, and mapped over three problems')
    try:
        attention(q[0], k[0][:, :3], v[0])
        sys.exit('three heads of k were not refused')
    except ValueError as refused:
        print('refused:', refused)


if __name__ == '__main__':
    URL = sys.argv[1] if len(sys.argv) > 1 else URL
    main()
