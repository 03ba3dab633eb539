"""Finds options that the kernels with tensor cores do not compute, or compute too slowly. Times a problem with each
option, and the same problem without it. With --pairs, also times two options together, for most pairs of options.

    python3 tests/gpu/cliffs.py [--bench build/attn-bench] [--ops forward backward] [--head-sizes 64 128] [--pairs]
    [--json]

The time with an option, divided by the time without it, must be at most the option's figure in OPTIONS. For two options
this ratio must be at most the product of their figures. The gradient of an option has a figure in GRADIENTS. It limits
the time of the backward with this gradient, divided by the time of the backward without it. Some options and gradients
read or write a tensor with an element for each pair of a query and a key. They may always take SLACK times as long as
moving the bytes of this tensor at READ_BYTES_PER_MS. The two calls run in turns as children of this program, so that
the card's clock is nearly the same for both. Each time is the median of its turns. Only ratios can be compared with
those of another day. The exit status is 1 if a figure is exceeded, or if an option changes the family of kernels. Only
above head size 128 may a backward with an option run on `sm90_wide`, and without it on `sm90`. Needs only a GPU and
attn-bench built with CUDA."""
import argparse
import itertools
import json
import os
import statistics
import sys

from rival import ROOT, attn_bench, has_gpu

# name: (options of attn-bench; bytes read per pair of a query and a key; {operation: figures}). A figure is a limit
# of a ratio: the time with the option divided by the time without it. The figures are for head sizes up to 64, 128 and
# 256. They are 10 % above the ratios of an H100 on 2026-11-27. Those of head size 256 in a backward are 10 % above the
# ratios of an H200 on 2026-11-28.
FORWARD, BACKWARD = 'forward', 'backward'
OPTIONS = {
    'causal': ('--causal', 0, {FORWARD: (0.62, 0.62, 0.62), BACKWARD: (0.66, 0.63, 0.63)}),
    'window': ('--window 512,0', 0, {FORWARD: (0.3, 0.3, 0.3), BACKWARD: (0.35, 0.3, 0.3)}),
    'softcap': ('--softcap 30', 0, {FORWARD: (2.6, 2.0, 1.5), BACKWARD: (1.5, 1.25, 1.65)}),
    'alibi': ('--alibi', 0, {FORWARD: (1.55, 1.35, 1.3), BACKWARD: (2.0, 1.5, 1.45)}),
    'documents': ('--documents 4', 0, {FORWARD: (0.5, 0.45, 0.45), BACKWARD: (0.55, 0.5, 1.3)}),
    'sinks': ('--sinks', 0, {FORWARD: (1.1, 1.1, 1.1), BACKWARD: (1.1, 1.1, 1.1)}),
    'dropout': ('--dropout 0.1', 0, {FORWARD: (3.2, 2.6, 2.0), BACKWARD: (2.85, 2.05, 1.95)}),
    'bias': ('--bias', 0, {FORWARD: (2.7, 2.05, 2.2), BACKWARD: (3.3, 2.35, 1.95)}),
    'bias of 16 bits': ('--bias --bias-dtype bfloat16', 0, {FORWARD: (2.4, 1.9, 1.9), BACKWARD: (3.2, 2.35, 1.95)}),
    'keep_mask': ('--keep-mask 0.5', 0, {FORWARD: (2.3, 1.7, 1.65), BACKWARD: (2.45, 2.0, 1.8)}),
    'bias of each head': ('--bias --bias-dtype bfloat16 --each-head', 2, {FORWARD: (2.4, 2.0, 2.0), BACKWARD: (3.25, 2.4, 1.95)}),
    'keep_mask of each head': ('--keep-mask 0.5 --each-head', 1, {FORWARD: (3.7, 2.75, 2.7), BACKWARD: (2.85, 2.2, 2.05)}),
}
# Gradients of options in a backward. name: (options of attn-bench; the same options without the gradient; bytes written
# per pair of a query and a key; figures). A figure is a limit of a ratio: the time with the gradient divided by the
# time without it. The figures are for head sizes up to 64, 128 and 256. They are 10 % above the ratios of an H200 on
# 2026-11-27.
GRADIENTS = {
    'dbias': ('--bias --grads dbias', '--bias', 0, (3.35, 3.35, 2.75)),
    'dbias of each head': ('--bias --bias-dtype bfloat16 --each-head --grads dbias', '--bias --bias-dtype bfloat16 --each-head', 8, (None, 3.2, None)),
    'dalibi_slopes': ('--alibi --grads dalibi_slopes', '--alibi', 0, (2.95, 2.9, 1.25)),
    'dsinks': ('--sinks --grads dsinks', '--sinks', 0, (1.1, 1.1, 1.1)),
}
# Pairs of options that attn-bench or a problem cannot have together.
NOT_TOGETHER = [{'causal', 'documents'}, {'window', 'documents'}, {'causal', 'window'}]
READ_BYTES_PER_MS = 3.0e9  # bytes per ms that an H100 copies; half of them are read and half are written
SLACK = 1.15


def together(a, b):
    return {a, b} not in NOT_TOGETHER and a.split()[0] != b.split()[0] and 'each head' not in a + b


def rows(op, pairs):
    """Yields the rows to measure for an operation: name, options, the options of the problem beside which the row is
    timed, figures, bytes per pair."""
    for name, (options, size, most) in OPTIONS.items():
        yield name, options, '', most[op], size
    for name, (options, beside, size, most) in GRADIENTS.items() if op == BACKWARD else ():
        yield name, options, beside, most, size
    for a, b in itertools.combinations(OPTIONS, 2) if pairs else ():
        if together(a, b):
            (first, _, of_first), (second, _, of_second) = OPTIONS[a], OPTIONS[b]
            both = tuple(x * y if x and y else None for x, y in zip(of_first[op], of_second[op]))
            yield f'{a}, {b}', f'{first} {second}', '', both, 0


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--bench', default=os.path.join(ROOT, 'build', 'attn-bench'), help='the attn-bench program')
    p.add_argument('--ops', nargs='*', default=['forward', 'backward'], choices=['forward', 'backward'])
    p.add_argument('--head-sizes', nargs='*', type=int, default=[64, 128, 256])
    p.add_argument('--length', type=int, default=4096)
    p.add_argument('--heads', type=int, default=16)
    p.add_argument('--rows', default='', help='only rows whose name has this in it')
    p.add_argument('--pairs', action='store_true', help='also every two options together')
    p.add_argument('--turns', type=int, default=3)
    p.add_argument('--reps', type=int, default=9)
    p.add_argument('--json', action='store_true', help='one object per line instead of the table')
    a = p.parse_args()
    if not has_gpu():
        print('cliffs.py: no GPU here: skipped')
        return 0
    over = 0
    for op, D in itertools.product(a.ops, a.head_sizes):
        shape = ['--op', op, '-B', '1', '-H', str(a.heads), '--sq', str(a.length), '-D', str(D)]
        for name, options, alone, most, size in rows(op, a.pairs):
            if a.rows not in name:
                continue
            turns = [[attn_bench(a, shape + text.split()) for text in (options, alone)] for _ in range(a.turns)]
            ms, plain = (statistics.median(turn[n]['ms'] for turn in turns) for n in range(2))
            backend, beside = (turns[0][n]['backend'] for n in range(2))
            reading = a.heads * a.length * a.length * size / READ_BYTES_PER_MS
            figure = most[0 if D <= 64 else 1 if D <= 128 else 2]
            allowed = figure and max(figure, SLACK * reading / plain)
            family = backend.replace('sm90_wide', 'sm90') if op == BACKWARD and D > 128 else backend
            bad = figure is not None and (ms / plain > allowed or (family != beside and backend != beside))
            over += bad
            if a.json:
                print(json.dumps(dict(op=op, D=D, name=name, ms=ms, plain_ms=plain, ratio=ms / plain, most=allowed, backend=backend)), flush=True)
            else:
                print(f'{op:9}D {D:<4} {name:34}{ms:10.4f} ms{plain:10.4f} ms{ms / plain:8.3f} {backend}'
                      + (f' (at most {allowed:.2f})' if figure else '') + ('  OVER' if bad else ''), flush=True)
    print(f'{over} over', file=sys.stderr if a.json else sys.stdout)
    return 1 if over else 0


if __name__ == '__main__':
    sys.exit(main())
