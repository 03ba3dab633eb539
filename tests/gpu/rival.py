"""Compares attnd's CUDA kernels with PyTorch's cuDNN and flash backends, and with other programs, on one GPU.

    python3 tests/gpu/rival.py                           # any Python with torch and CUDA; attn-bench built with CUDA
    python3 tests/gpu/rival.py --cells decode gqa --json
    python3 tests/gpu/rival.py --cells one chunk --list  # the shapes alone, without timing; needs no GPU
    python3 tests/gpu/rival.py --cells forward --head-sizes 128 --lengths 512 8192
    python3 tests/gpu/rival.py --cells backward float8 --rivals cudnn \\
        --program 'fa3=./fa3_bench --op {op} --dtype {dtype} -B {B} -H {H} --hk {Hk} -S {Sq} -D {D} {causal} --reps {reps}'

Kinds of cells:

  forward, backward, float8, gqa   many tokens: the grid of thread blocks fills the card
  decode                           one query over long caches
  one                              forward and backward of one sequence, with 4 to 32 heads and lengths from 256 to 4096
  latent                           latent attention: caches of 576 numbers per position, of which 512 are also the values
  chunk                            a chunk of a prompt, or speculation: few queries at the end of many keys
  waves                            batches of 9 or more short sequences (--batches)

A cell is a shape. A program (--program) is a command that times one cell. The last line that it prints must be JSON
with the milliseconds of a call as "ms". These words in the command are replaced: {op}, {B}, {H}, {Hk}, {Sq}, {Sk}, {D},
{Dv} and {page} (number of keys per page, or 0) by those of the cell, {dtype} by bf16 or e4m3, {causal} by --causal or
nothing, and {reps} by --reps of this program. A causal mask is aligned to the last query and the last key. A program
without {reps} is refused, because a card that is busy for a second per turn runs 10 % slower than one that is busy for
20 milliseconds. Without PyTorch, programs are the only rivals.

For each cell, attn-bench (as a child of this program) and each rival run --turns times. The card's clock falls under
load, so a program that always ran last would be slower. The order is therefore random each time, and there is a pause
before each run. A figure is the median of its turns. Both sides time the same way: a run has as many calls as fill two
milliseconds, between two events of the device, and the time is the median over the runs. Inputs are N(0, 1) in bfloat16
(in cells of the kind float8: in float8_e4m3fn, with only out as answer). attn-bench's tensors are [B, S, H, D],
PyTorch's are contiguous [B, H, S, D]. Where reading K and V takes most of the time (decode), calls use several copies
of K and V in turn. A rival that refuses a shape shows as '-'.

The table shows TFLOP/s (for decode: GB/s of K and V). The last column is the fastest rival's time divided by attnd's
time; above 1, attnd is faster. The exit status is 1 if attnd is slower in some cell."""
import argparse
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RIVALS = {'cudnn': SDPBackend.CUDNN_ATTENTION, 'flash': SDPBackend.FLASH_ATTENTION} if torch else {}
KINDS = ('forward', 'backward', 'float8', 'gqa', 'decode', 'one', 'latent', 'chunk', 'waves')
RUN_MS = 2
PAUSE_S = 0.1  # seconds of pause before each run, so that the card cools down
COPIES_BYTES = 512 << 20


def cell(op, B, H, Hk, Sq, Sk, D, causal, dtype='bf16', Dv=None, page=0):
    """Returns a shape to time. page: number of keys per page; 0: keys and values are contiguous."""
    return dict(op=op, dtype=dtype, B=B, H=H, Hk=Hk, Sq=Sq, Sk=Sk, D=D, Dv=Dv or D, page=page, causal=causal)


def cells(a):
    """Returns the cells of all kinds that were asked for."""
    for kind in a.cells:
        if kind in ('forward', 'backward', 'float8'):
            op, dtype, sizes = ('forward', 'e4m3', [128]) if kind == 'float8' else (kind, 'bf16', a.head_sizes)
            for D in sizes:
                for causal in (False, True):
                    for S in a.lengths:
                        H = 2048 // D
                        yield cell(op, max(1, a.tokens // S), H, H, S, S, D, causal, dtype)
        elif kind == 'gqa':
            for op in ('forward', 'backward'):
                yield cell(op, 2, 32, 8, 8192, 8192, 128, True)
        elif kind == 'decode':
            for B, Sk, H, Hk in ((1, 131072, 32, 8), (16, 8192, 32, 8), (64, 8192, 32, 8), (1, 8192, 32, 32), (1, 8192, 32, 8), (1, 2048, 32, 8)):
                yield cell('decode', B, H, Hk, 1, Sk, 128, False)
        elif kind == 'one':
            for op, D, causal in itertools.product(('forward', 'backward'), a.head_sizes, (False, True)):
                for H, Hk in ((4, 4), (8, 8), (16, 16), (32, 32), (32, 8), (32, 4), (8, 1)):
                    for S in (256, 512, 1024, 2048, 4096):
                        yield cell(op, 1, H, Hk, S, S, D, causal)
        elif kind == 'latent':
            for B, H, Sq, Sk in itertools.product((64, 128), (16, 64, 128), (1, 2), (4096, 8192, 16384, 32768)):
                yield cell('latent', B, H, 1, Sq, Sk, 576, True, Dv=512, page=64)
        elif kind == 'chunk':
            for D, causal, (H, Hk) in itertools.product(a.head_sizes, (False, True), ((32, 8), (16, 16), (8, 1))):
                for Sq, Sk in itertools.product((16, 32, 64, 128, 256, 512, 1000), (2048, 16384, 131072)):
                    yield cell('forward', 1, H, Hk, Sq, Sk, D, causal)
        elif kind == 'waves':
            for op, H, D in itertools.product(('forward', 'backward'), (8, 16), (64, 128)):
                for B in a.batches:
                    yield cell(op, B, H, H, 1024, 1024, D, False)


def tera_operations(c):
    """Returns the number of floating-point operations of a cell, in units of 1e12. In a causal cell, only visible pairs
    of a query and a key count."""
    pairs = c['Sq'] * c['Sk'] - (c['Sq'] * (c['Sq'] - 1) // 2 if c['causal'] else 0)
    return 2 * c['B'] * c['H'] * (c['D'] + c['Dv']) * pairs * (2.5 if c['op'] == 'backward' else 1) / 1e12


def attn_bench(a, options):
    """Runs build/attn-bench on one shape as a child process. Returns the JSON that it prints."""
    command = [a.bench, '--json', '--device', 'cuda', '--reps', str(a.reps), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f'{shlex.join(command)}: status {done.returncode}: {done.stderr.strip()[-300:]}')
    return json.loads(done.stdout.strip().splitlines()[-1])


def ours(a, c):
    """Returns attn-bench's milliseconds for a cell, and the name of the kernel that ran."""
    options = ['--op', 'backward' if c['op'] == 'backward' else 'forward', '-B', str(c['B']), '-H', str(c['H']), '--hk', str(c['Hk']),
               '--sq', str(c['Sq']), '--sk', str(c['Sk']), '-D', str(c['D']), '--dv', str(c['Dv'])]
    options += ['--causal'] * c['causal'] + ['--cold'] * (c['op'] == 'decode') + ['--latent'] * (c['op'] == 'latent')
    options += ['--page-size', str(c['page'])] * (c['page'] > 0)
    options += ['--dtype', 'float8_e4m3fn', '--no-lse'] if c['dtype'] == 'e4m3' else []
    line = attn_bench(a, options)
    return line['ms'], line['backend']


def timed(call, reps):
    """Returns the median milliseconds that one call takes on the device; call(n) makes the n-th call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(calls, first):
        start.record()
        for n in range(calls):
            call(first + n)
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / calls

    run(1, 0)
    calls = max(1, min(500, int(RUN_MS / run(2, 0)) + 1))
    return statistics.median(run(calls, n * calls) for n in range(reps))


def theirs(a, c, backend):
    """Returns the milliseconds of PyTorch's scaled_dot_product_attention with this backend. Returns None if the backend
    refuses, has no pages, or aligns a causal mask to the first query and the first key. A backward is timed without its
    forward: flash's is called directly, cuDNN's through autograd."""
    if c['dtype'] != 'bf16' or c['page'] or (c['causal'] and c['Sq'] != c['Sk']):
        return None

    def make(heads, length):
        return torch.randn(c['B'], heads, length, c['D'], device='cuda', dtype=torch.bfloat16)

    sets = 1
    if c['op'] == 'decode':
        sets = max(1, min(64, -(-COPIES_BYTES // (c['B'] * c['Hk'] * c['Sk'] * c['D'] * 4))))
    try:
        q, kv = make(c['H'], c['Sq']), [(make(c['Hk'], c['Sk']), make(c['Hk'], c['Sk'])) for _ in range(sets)]
        attention = torch.nn.functional.scaled_dot_product_attention
        options = dict(is_causal=c['causal'], enable_gqa=c['H'] != c['Hk'])
        with sdpa_kernel([backend]):
            if c['op'] != 'backward':
                with torch.no_grad():
                    return timed(lambda n: attention(q, *kv[n % sets], **options), a.reps)
            if backend == SDPBackend.FLASH_ATTENTION:
                of = torch.ops.aten
                with torch.no_grad():
                    k, v = kv[0]
                    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = of._scaled_dot_product_flash_attention(q, k, v, 0.0, c['causal'])
                    dout = torch.randn_like(out)
                    return timed(lambda n: of._scaled_dot_product_flash_attention_backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0,
                                                                                           c['causal'], seed, offset), a.reps)
            leaves = [x.requires_grad_(True) for x in (q, *kv[0])]
            out = attention(*leaves, **options)
            dout = torch.randn_like(out)
            return timed(lambda n: torch.autograd.grad(out, leaves, dout, retain_graph=True), a.reps)
    except RuntimeError as error:
        print(f'# {c}: {str(error).splitlines()[0]}', file=sys.stderr)
        return None


def program(text):
    """Splits the text NAME=COMMAND of --program into the name and the command's words."""
    name, equals, command = text.partition('=')
    words = shlex.split(command)
    if not name or not equals or not words:
        raise argparse.ArgumentTypeError(f"must be NAME=COMMAND, not {text!r}")
    try:
        words_for(words, cell('', 0, 0, 0, 0, 0, 0, False), 0)
    except (KeyError, IndexError, ValueError) as error:
        raise argparse.ArgumentTypeError(f'{name}: {error} is none of op, dtype, B, H, Hk, Sq, Sk, D, Dv, page, causal, reps') from None
    if not any('{reps}' in word for word in words):
        raise argparse.ArgumentTypeError(f'{name}: must be timed as often as attn-bench is: give it {{reps}}')
    return name, words


def words_for(words, c, reps):
    """Returns the words of a program's command for a cell. A word that becomes empty is left out."""
    filled = (word.format(**{**c, 'causal': '--causal' if c['causal'] else '', 'reps': reps}) for word in words)
    return [word for word in filled if word]


def program_ms(words, c, reps):
    """Returns the milliseconds that a rival program prints for a cell, or None if it refuses."""
    done = subprocess.run(words_for(words, c, reps), capture_output=True, text=True)
    try:
        return float(json.loads(done.stdout.strip().splitlines()[-1])['ms'])
    except (IndexError, KeyError, TypeError, ValueError):
        print(f'# {shlex.join(words_for(words, c, reps))}: status {done.returncode}: {done.stderr.strip()[-200:]}', file=sys.stderr)
        return None


def in_turns(a, c):
    """Times attnd and all rivals in random order. Returns the milliseconds of each (None: it refused), and the name of
    attnd's kernel."""
    names = ['ours', *a.rivals, *(name for name, _ in a.program)]
    turns, programs = {name: [] for name in names}, dict(a.program)
    kernel = None
    for _ in range(a.turns):
        for name in random.sample(names, len(names)):
            time.sleep(PAUSE_S)
            if name == 'ours':
                ms, kernel = ours(a, c)
            elif name in RIVALS:
                ms = theirs(a, c, RIVALS[name])
                torch.cuda.empty_cache()
            else:
                ms = program_ms(programs[name], c, a.reps)
            turns[name].append(ms)
    return {name: None if None in ms else statistics.median(ms) for name, ms in turns.items()}, kernel


def has_gpu():
    if torch:
        return torch.cuda.is_available()
    try:
        return subprocess.run(['nvidia-smi', '-L'], capture_output=True).returncode == 0
    except OSError:
        return False


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--bench', default=os.path.join(ROOT, 'build', 'attn-bench'), help='the attn-bench program')
    p.add_argument('--cells', nargs='+', default=list(KINDS), choices=KINDS)
    p.add_argument('--head-sizes', nargs='+', type=int, default=[64, 128, 256])
    p.add_argument('--lengths', nargs='+', type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    p.add_argument('--tokens', type=int, default=16384)
    p.add_argument('--batches', nargs='+', type=int, default=list(range(9, 257, 13)), help='numbers of sequences of the cells `waves`')
    p.add_argument('--list', action='store_true', help='print the cells as JSON, one per line, and time nothing')
    p.add_argument('--reps', type=int, default=15)
    p.add_argument('--turns', type=int, default=3, help='how often each is timed per cell')
    p.add_argument('--rivals', nargs='+', default=list(RIVALS), choices=list(RIVALS))
    p.add_argument('--program', action='append', default=[], type=program, metavar='NAME=COMMAND', help='a rival that is a program (see above)')
    p.add_argument('--json', action='store_true', help='one object per line instead of the table')
    a = p.parse_args()
    if a.list:
        for c in cells(a):
            print(json.dumps(c))
        return 0
    if not torch and not a.program:
        print('rival.py: no PyTorch here and no --program: skipped')
        return 0
    if not has_gpu():
        print('rival.py: no GPU here: skipped')
        return 0
    if not a.json:
        peers = f'{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}' if torch else 'no PyTorch'
        names = [*a.rivals, *(name for name, _ in a.program)]
        print(f'{peers}; TFLOP/s, decode: GB/s of K and V')
        print(f'{"":8}{"B":>4}{"H":>4}{"Hk":>4}{"Sq":>7}{"Sk":>8}{"D":>5}{"":8}{"ours":>8}' + ''.join(f'{name:>8}' for name in names) + f'{"ratio":>8}')
    behind = total = 0
    for c in cells(a):
        others, kernel = in_turns(a, c)
        mine = others.pop('ours')
        best = min((ms for ms in others.values() if ms is not None), default=None)
        work = tera_operations(c) * 1e3
        if c['op'] == 'decode':
            work = 4 * c['B'] * c['Hk'] * c['Sk'] * c['D'] / 1e6
        total += 1
        behind += best is not None and best < mine
        if a.json:
            print(json.dumps({**c, 'kernel': kernel, 'ms': mine, 'rivals_ms': others, 'ratio': best and best / mine}), flush=True)
        else:
            rates = ''.join(f'{work / ms:8.0f}' if ms else f'{"-":>8}' for ms in [mine, *others.values()])
            print(f'{c["op"]:8}{c["B"]:4}{c["H"]:4}{c["Hk"]:4}{c["Sq"]:7}{c["Sk"]:8}{c["D"]:5}{" causal " if c["causal"] else " full   "}{rates}'
                  + (f'{best / mine:8.3f}' if best else f'{"-":>8}') + f'  {kernel}', flush=True)
    if not a.json:
        print(f'ahead in {total - behind} of {total}')
    return 1 if behind else 0


if __name__ == '__main__':
    sys.exit(main())
