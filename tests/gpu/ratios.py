"""What options, pages and dtypes cost: compares calls of attn-bench with each other, on one GPU.

    python3 tests/gpu/ratios.py [--bench build/attn-bench] [--turns 3] [--rows decode] [--json]

A row of ROWS has two calls of attn-bench and a least ratio. The second call's time, divided by the first call's time,
must be at least this ratio. Both calls run in turns as children of this program, so that the card's clock is nearly the
same for both. Each time is the median of its turns. Only ratios can be compared with those of another day. The exit
status is 1 if a row is below its ratio. Needs only a GPU and attn-bench built with CUDA. For packed lengths beside one
length see attn-bench --sweep masks."""
import argparse
import json
import os
import shlex
import statistics
import sys

from rival import ROOT, attn_bench, has_gpu

LONG = '-B 1 -H 16 --sq 16384'                                     # options of attn-bench for 16384 queries and keys
HEADS = {64: '-B 2 -H 32 --sq 8192 -D 64', 128: '-B 2 -H 16 --sq 8192 -D 128'}
CACHES = {f'{B} x {keys}': f'-B {B} -H 32 --hk 8 --sq 1 --sk {keys} --cold' for B, keys in ((1, 131072), (16, 8192), (64, 8192))}
SEPARATE = '-B 32 -H 32 --hk 8 --sq 1 --sk 100032 --page-size 64'

# Each row has its name, the options of the timed call, the options of the call beside it, and a least ratio. The ratio
# is the second call's time divided by the first call's time. None instead of a least ratio: the ratio is only printed.
ROWS = [(f'{op} window of 1024 keys at 16384, beside causal', f'--op {op} {LONG} --causal --window 1023,0', f'--op {op} {LONG} --causal', 6)
        for op in ('forward', 'backward')]
ROWS += [(f'{op} 16 documents at 16384, beside none', f'--op {op} {LONG} --documents 16', f'--op {op} {LONG}', 8) for op in ('forward', 'backward')]
ROWS += [(f'backward deterministic D {D} causal, beside any order', f'--op backward {shape} --causal --deterministic', f'--op backward {shape} --causal', 0.8)
         for D, shape in HEADS.items()]
ROWS += [(f'{op} softcap D {D}, beside none', f'--op {op} {shape} --softcap 30', f'--op {op} {shape}', None)
         for op in ('forward', 'backward') for D, shape in HEADS.items()]
ROWS += [(f'decode {name} in pages of {page}, beside unpaged', f'{shape} --page-size {page}', shape, 0.97)
         for name, shape in CACHES.items() for page in (64, 128)]
ROWS += [(f'decode {name} of float8, beside bfloat16', f'{shape} --key-dtype float8_e4m3fn', shape, 1.7) for name, shape in CACHES.items()]
ROWS += [(f'decode {name} of float8 in pages of 64, beside bfloat16', f'{shape} --page-size 64 --key-dtype float8_e4m3fn', f'{shape} --page-size 64', 1.7)
         for name, shape in CACHES.items()]
ROWS += [('decode 32 forks of 100032 keys, beside 32 caches', f'{SEPARATE} --forks', SEPARATE, 5)]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--bench', default=os.path.join(ROOT, 'build', 'attn-bench'), help='the attn-bench program')
    p.add_argument('--rows', default='', help='only rows whose name has this in it')
    p.add_argument('--turns', type=int, default=3)
    p.add_argument('--reps', type=int, default=9)
    p.add_argument('--json', action='store_true', help='one object per line instead of the table')
    a = p.parse_args()
    if not has_gpu():
        print('ratios.py: no GPU here: skipped')
        return 0
    below = 0
    for name, first, second, least in ROWS:
        if a.rows not in name:
            continue
        turns = [[attn_bench(a, shlex.split(options))['ms'] for options in (first, second)] for _ in range(a.turns)]
        ms, beside = (statistics.median(column) for column in zip(*turns))
        below += least is not None and beside / ms < least
        if a.json:
            print(json.dumps(dict(name=name, ms=ms, beside_ms=beside, ratio=beside / ms, least=least)), flush=True)
        else:
            print(f'{name:60}{ms:10.4f} ms{beside:10.4f} ms{beside / ms:8.3f}' + (f'  (at least {least})' if least else ''), flush=True)
    print(f'{below} below', file=sys.stderr if a.json else sys.stdout)
    return 1 if below else 0


if __name__ == '__main__':
    sys.exit(main())
