"""Compares attnd's CPU kernels with PyTorch's CPU scaled_dot_product_attention on the same cores.

    python tests/bench/rival_torch.py                      # any Python with torch; build/attn-bench must be built
    python tests/bench/rival_torch.py --repeats 5 --threads 2 --json

A cell is a problem to time. There are sixteen: each of forward and backward, with each of float32 and bfloat16, each of
the head sizes 64 and 128, and each with and without a causal mask. By default B=1, H=8, S=2048. A repeat goes through
all cells, and in each cell times first attnd and then PyTorch. Other load of the machine therefore affects both alike.
One timing is the median of --reps warm runs, and the table shows the median over the repeats. Inputs are N(0, 1), in
the layout that each program prefers (PyTorch: [B, H, S, D]). The exit status is 1 if PyTorch is faster in any cell."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def cells(a):
    for op in ('forward', 'backward'):
        for dtype in ('float32', 'bfloat16'):
            for D in (64, 128):
                for causal in (False, True):
                    if (op in a.only or not a.only) and (not a.dtype or dtype == a.dtype):
                        yield op, dtype, D, causal


def ours(a, op, dtype, D, causal):
    """Returns the milliseconds that build/attn-bench measures for a cell, run as a child process."""
    command = [a.bench, '--json', '--op', op, '--dtype', dtype, '-B', str(a.B), '-H', str(a.H), '--sq', str(a.S), '-D', str(D), '--device', 'cpu',
               '--threads', str(a.threads), '--reps', str(a.reps)] + (['--causal'] if causal else [])
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    return json.loads(line)['ms']


def torchs(a, op, dtype, D, causal, tensors={}):
    """Returns the milliseconds that scaled_dot_product_attention takes. For a backward, this is the time of its
    backward alone, through autograd."""
    key = (dtype, D)
    if key not in tensors:
        torch.manual_seed(1)
        tensors[key] = [torch.randn(a.B, a.H, a.S, D).to(getattr(torch, dtype)) for _ in range(4)]
    q, k, v, dout = tensors[key]
    attention = torch.nn.functional.scaled_dot_product_attention
    times = []
    if op == 'forward':
        with torch.no_grad():
            for n in range(2 + a.reps):
                began = time.perf_counter()
                attention(q, k, v, is_causal=causal)
                times.append(time.perf_counter() - began)
    else:
        q, k, v = (x.detach().requires_grad_(True) for x in (q, k, v))
        out = attention(q, k, v, is_causal=causal)
        for n in range(2 + a.reps):
            began = time.perf_counter()
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            times.append(time.perf_counter() - began)
    return statistics.median(times[2:]) * 1e3


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--bench', default=os.path.join(ROOT, 'build', 'attn-bench'), help='the attn-bench program')
    p.add_argument('--threads', type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument('--repeats', type=int, default=5, help='visits of every cell')
    p.add_argument('--reps', type=int, default=5, help='warm runs in a visit')
    p.add_argument('-B', type=int, default=1)
    p.add_argument('-H', type=int, default=8)
    p.add_argument('-S', type=int, default=2048)
    p.add_argument('--dtype', default='', help='only this one')
    p.add_argument('--only', action='append', default=[], choices=('forward', 'backward'))
    p.add_argument('--json', action='store_true', help='one object a line instead of the table')
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    results = {cell: ([], []) for cell in cells(a)}
    for repeat in range(a.repeats):
        for cell, (mine, theirs) in results.items():
            mine.append(ours(a, *cell))
            theirs.append(torchs(a, *cell))
            if sys.stderr.isatty():
                print(f'\r{repeat + 1}/{a.repeats} {cell}          ', end='', file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print('\r' + ' ' * 60 + '\r', end='', file=sys.stderr)
    behind = 0
    if not a.json:
        print(f'B={a.B} H={a.H} S={a.S}, {a.threads} threads, PyTorch {torch.__version__}; medians of {a.repeats} visits, GFLOP/s')
        print(f'{"":9}{"":10}{"":5}{"":7}{"attnd":>10}{"PyTorch":>10}{"ratio":>8}')
    for (op, dtype, D, causal), (mine, theirs) in results.items():
        x, y = statistics.median(mine), statistics.median(theirs)
        pairs = a.S * (a.S + 1) / 2 if causal else a.S * a.S
        flops = 4 * a.B * a.H * D * pairs * (2.5 if op == 'backward' else 1)
        behind += x > y
        if a.json:
            print(json.dumps({'op': op, 'dtype': dtype, 'D': D, 'causal': causal, 'attnd_ms': x, 'torch_ms': y, 'attnd_gflops': flops / x / 1e6,
                              'torch_gflops': flops / y / 1e6, 'ratio': y / x}))
        else:
            print(f'{op:9}{dtype:10}{D:5}{" causal" if causal else " full  "}{flops / x / 1e6:10.0f}{flops / y / 1e6:10.0f}{y / x:8.2f}')
    if not a.json:
        print(f'ahead in {len(results) - behind} of {len(results)}')
    return 1 if behind else 0


if __name__ == '__main__':
    sys.exit(main())
