"""Random valid problems over the whole contract, sent to a server and compared with float64, number by number.

    differential.py [--seed N] [--count N] [--seconds S] [--case N] [--url http://127.0.0.1:8080] [--token T]

Case n of a seed is always the same problem. Without --url the script starts a server (ATTND_BINARY, default
build/attnd) and ends it; any report of a sanitizer about that server is a failure. --case runs one case alone; each
failure prints the command for it. The truth comes from oracle.py, which shares no code with the server. The limits are
those of kernels/README.md, Accuracy, and of tests/unit/testing.c: an answer may differ from the truth by

    max(limit |truth|, bound) + noise

in its largest entry and as a whole (Frobenius norm). `limit` of out and lse grows with the size of the scores, as their
rounding error in float32 does. `bound` is the largest rounding error of a right kernel (bounds.py), for sums that
cancel and for large scores; out has no such bound. `noise` covers sums in float32.
"""
import argparse
import base64
import http.client
import json
import os
import sys
import time
import urllib.parse

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
import wire  # noqa: E402

import bounds  # noqa: E402
import oracle  # noqa: E402

# For each dtype, in this order: relative limit of out; relative limit of dq, dk and dv; relative limit of the gradients
# of options; noise (error of sums in float32); least absolute error.
LIMITS = {
    'float32': (1e-5, 3e-5, 1e-4, 1e-6, 1e-45),
    'float16': (1e-3, 3e-3, 5e-3, 1e-5, 6e-8),
    'bfloat16': (8e-3, 2e-2, 3e-2, 1e-4, 1.2e-38),
    'float8_e4m3fn': (4e-2, 0, 0, 1e-4, 2e-38),
}
LENGTHS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129)
WIDE_SHARE = 0.05  # fraction of the problems whose D or Dv is above 256
HEAD_SIZES = (1, 3, 8, 16, 24, 31, 32, 40, 64, 64, 64, 65, 72, 80, 96, 128, 160, 192, 256)
# the lowest finite numbers of float32, bfloat16 and float16
LOWEST = [float(np.finfo(np.float32).min), float(wire.bf16_value(np.uint16([0xFF7F]))[0]), -65504.0]
LOG2_E = float(np.log2(np.e))
# Biases so large that adding an ordinary score to one of them changes nothing in float32.
LEVELS = np.array([-3.38e38, -2.4e38, -1e38, 1e38, 2.4e38, 3.38e38])


# ---- A problem -------------------------------------------------------------------------------------------------------

class Case:
    """One random case. members: the request as JSON members. problem: the same problem in the form that oracle.py
    reads. back: whether it is a backward. out_dtype: the dtype of out, or of dout in a backward. dtype, grad_dtype and
    layout are those of the request."""

    def __init__(self, seed, number):
        self.seed, self.number = seed, number
        r = np.random.default_rng([seed, number])
        self.members, self.problem, self.tags = {}, {}, []

        def chance(p):
            return r.random() < p

        def pick(options):
            return options[int(r.integers(len(options)))]

        # A second random generator, for choices that were added to this class later. So the first generator still gives
        # the same numbers as before they were added.
        self.more = np.random.default_rng([seed, number, 1])
        self.back = back = chance(0.5)
        self.dtype = dtype = pick(('float32', 'float16', 'bfloat16')) if back or not chance(0.12) else 'float8_e4m3fn'
        self.out_dtype = 'bfloat16' if dtype == 'float8_e4m3fn' else dtype
        if chance(0.15):
            self.out_dtype = self.members['out_dtype'] = pick(('float32', 'float16', 'bfloat16'))
        Hk = int(r.integers(1, 4))
        H = Hk * (1 if chance(0.5) else int(r.integers(2, 6)))
        B = 1 if chance(0.6) else 0 if chance(0.05) else int(r.integers(2, 4))
        D = int(r.integers(1, 257)) if chance(0.2) else pick(HEAD_SIZES)
        Dv = pick(HEAD_SIZES) if chance(0.2) else D
        # a random generator of its own, so that these choices do not change the other random numbers
        wide = np.random.default_rng([seed, number, 2])
        if wide.random() < WIDE_SHARE:
            D, Dv = (int(wide.integers(257, 1025)) if wide.random() < 0.7 else n for n in (D, Dv))
        Sq = int(r.integers(1, 130)) if chance(0.4) else pick(LENGTHS)
        Sk = Sq if chance(0.3) else int(r.integers(1, 200)) if chance(0.5) else pick(LENGTHS)
        if chance(0.08):
            Sq, Sk, back = int(r.integers(1, 5)), int(r.integers(500, 2500)), False
            self.back = back
        if back and chance(0.2) and 'out_dtype' in self.members:
            del self.members['out_dtype']
            self.out_dtype = dtype
        packed = chance(0.2)
        self.layout = 'bhsd' if not packed and chance(0.3) else 'bshd'
        if self.layout == 'bhsd':
            self.members['layout'] = 'bhsd'
        extreme = pick(('mask', 'levels', 'values', 'sinks', 'softcap', 'scale')) if chance(0.15) else ''
        if packed:
            n = int(r.integers(1, 7))
            lq = [0 if chance(0.15) else int(r.integers(1, 80)) for _ in range(n)]
            lk = [q if chance(0.4) else 0 if chance(0.15) else int(r.integers(1, 110)) for q in lq]
            room_q, room_k = self.rooms(lq, lk)
            Sq, Sk, B = sum(room_q), sum(room_k), n
        lead = () if packed else (B,)
        shapes = {'q': lead + (Sq, H, D), 'k': lead + (Sk, Hk, D), 'v': lead + (Sk, Hk, Dv)}
        # k and v are padded rows [B, Sk, Hk, D] although q is packed
        if packed and 'cu_seqlens_k' not in self.problem:
            shapes.update(k=(n, room_k[0], Hk, D), v=(n, room_k[0], Hk, Dv))
        elif not packed and self.more.random() < 0.2:
            self.add('seqlens_q', self.more.integers(0, Sq + 1, B), 'int32')

        # options
        causal = chance(0.4)
        for name, given, value in (('causal', causal, True), ('alignment', chance(0.25), 'top_left'),
                                   ('scale', chance(0.15), 0 if chance(0.2) else float(r.normal() * 0.3)),
                                   ('softcap', chance(0.15), float(1 + 20 * r.random())),
                                   ('dropout_p', chance(0.15), float(r.random() * 0.9))):
            if given:
                self.members[name] = self.problem[name] = value
        if 'dropout_p' in self.members:
            self.members['seed'] = self.problem['seed'] = int(r.integers(0, 2**64, dtype=np.uint64))
        left, right = int(r.integers(0, 100)) if chance(0.25) else -1, int(r.integers(0, 60)) if chance(0.2) else -1
        if left >= 0 or right >= 0:
            self.members['window'] = self.problem['window'] = [left, right]
        if extreme == 'softcap':
            self.members['softcap'] = self.problem['softcap'] = pick((2e-38, 1e-30, 1e30, 3e38))
        if extreme == 'scale':
            # a float16 backward gets no `huge` scale, because noise (errors of float32 sums) may overflow its gradients
            huge = (1e20, -1e9)
            scale = pick((1e-37, 1e-20) + (huge[1:] if back and dtype != 'float16' else (50.0,) if back else huge))
            self.members['scale'] = self.problem['scale'] = scale

        # tensors
        amp = 4.0 if chance(0.1) else 1.0
        x = {n: r.standard_normal(s) * (1.0 if n == 'v' else amp) for n, s in shapes.items()}
        if extreme == 'values' and dtype in ('float32', 'bfloat16') and not back:
            x['v'] = 3e38 * (0.5 + 0.5 * r.random(shapes['v']))
        if chance(0.15):
            self.add('alibi_slopes', 2.0 ** (-8.0 * (1 + r.random((B, H) if chance(0.5) else H))), 'float32')
        if chance(0.2) or extreme == 'sinks':
            sinks = r.normal(size=H) * 2
            if extreme == 'sinks':
                sinks = np.array([pick((3e38, -3e38, 1e30, -np.inf, 100.0)) for _ in range(H)])
            self.add('sinks', sinks, 'float32')
        broadcast = lambda: (B if chance(0.5) else 1, H if chance(0.5) else 1, Sq if chance(0.5) else 1, Sk)
        self.levels = self.exact = False
        if not packed:
            if chance(0.2) or extreme in ('mask', 'levels'):
                shape = broadcast()
                bias = r.standard_normal(shape)
                if chance(0.5):
                    bias[r.random(shape) < r.random() * 0.6] = -np.inf
                kind = dtype if dtype != 'float8_e4m3fn' and chance(0.4) else 'float32'
                if extreme in ('mask', 'levels') and kind == 'float16':
                    kind = 'float32'
                if extreme == 'mask':
                    bias = np.where(r.random(shape) < 0.5, -3.38e38, bias)
                    bias[r.random(shape[:3]) < 0.3] = -3.38e38
                    self.levels = True
                if extreme == 'levels':
                    bias = LEVELS[np.minimum(r.integers(0, 6, shape), r.integers(0, 6, shape[:3] + (1,)))]
                    self.levels = True
                self.add('bias', bias, kind)
            if chance(0.2):
                keep = r.random(broadcast()) < r.random()
                keep[:, :, 3::7] = False
                self.add('keep_mask', keep, 'uint8')
            if chance(0.2):
                self.add('seqlens_k', r.integers(0, Sk + 1, B), 'int32')
            if chance(0.2):
                n = pick((1, 2)) if causal else pick((2, 4))
                rows = r.integers(0, Sq + 1, (B, pick((1, Hk, H)), Sk, n))
                if n == 2 and not causal:
                    rows.sort(-1)
                    rows = rows[..., ::-1]
                self.add('mask_startend_rows', rows, 'int32')
        if not extreme and self.more.random() < 0.15:
            extreme = self.beyond_float32(x, packed)
        if dtype == 'float8_e4m3fn' and chance(0.7):
            for n in ('q_scale', 'k_scale', 'v_scale'):
                scale = 0.5 + r.random((B, Hk))
                shape = ((B, Hk), (1, Hk), (B, 1), (Hk,), (1,), ())[self.more.integers(6) if B else 0]
                scale = scale[:shape[0] if len(shape) == 2 else 1, :shape[-1] if shape else 1].reshape(shape)
                self.add(n, scale, 'float32')
                if shape == ():
                    self.members[n] = float(self.problem[n])
        for n in 'qkv':
            self.problem[n] = wire.rounded(x[n], dtype)
        if chance(0.3):
            self.poison(x, r)
        if any(f'seqlens_{n}' in self.problem for n in 'qk'):
            self.poison_padding(x)
        for n in 'qkv':
            self.add(n, x[n], dtype)
        self.give = self.context = self.base_2 = False
        if back:
            dout = {'q': r.standard_normal(shapes['q'][:-1] + (Dv,))}
            if 'seqlens_q' in self.problem:
                self.poison_padding(dout)
            self.add('dout', dout['q'], self.out_dtype)
            if chance(0.3):
                self.add('dlse', r.standard_normal((H, Sq) if packed else (B, H, Sq)), 'float32')
            self.give = chance(0.4)
            self.context = not self.give and chance(0.15)
            if chance(0.3):
                self.members['deterministic'] = True
            self.base_2 = not extreme and not self.context and self.more.random() < 0.1
            self.give |= self.base_2
            self.members['outputs'] = ['dq', 'dk', 'dv'] + ['d' + n for n in ('sinks', 'bias', 'alibi_slopes') if n in self.problem]
            self.members.pop('out_dtype', None)
        self.grad_dtype = dtype
        if back and self.more.random() < 0.3:
            self.grad_dtype = self.members['grad_dtype'] = 'float32' if self.more.random() < 0.8 else dtype
        if chance(0.1):
            self.members['encoding'] = 'array'
        self.envelope = not self.context and chance(0.15)
        self.extreme = extreme
        self.observe = not back and self.more.random() < 0.5
        self.cells = [int(n) for n in self.more.integers(1, 9, 2)]

    def rooms(self, lq, lk):
        """Adds cu_seqlens. If there are padding rows after sequences, also adds seqlens. Returns for q and for k the
        number of rows from each sequence's start to the next sequence's start."""
        gaps, rows = self.more.random() < 0.3, self.more.random() < 0.25
        room_q, room_k = ([n + int(self.more.integers(0, 40)) * gaps for n in lengths] for lengths in (lq, lk))
        if rows:
            room_k = [max(room_k)] * len(lk)
        self.add('cu_seqlens_q', np.cumsum([0] + room_q), 'int32')
        if gaps:
            self.add('seqlens_q', lq, 'int32')
        if gaps or rows:
            self.add('seqlens_k', lk, 'int32')
        if not rows:
            self.add('cu_seqlens_k', np.cumsum([0] + room_k), 'int32')
        return room_q, room_k

    def poison_padding(self, x):
        """Puts NaN into the padding rows of these tensors."""
        exist = {n: np.zeros(a.shape[:-2], bool) for n, a in x.items()}
        for b, q0, Sq, k0, Sk in oracle.sequences(self.problem):
            for n, a in exist.items():
                first, count = (q0, Sq) if n == 'q' else (k0, Sk)
                (a if a.ndim == 1 else a[b])[first:first + count] = True
        for n, a in x.items():
            a[~exist[n]] = np.nan

    def beyond_float32(self, x, packed):
        """Changes the problem so that scores, or parts of them, overflow float32. Returns the kind of change, or '' if
        none fits."""
        r, p = self.more, self.problem
        if not packed and r.random() < 0.5:
            self.mask_of_lowest(p, x['q'].shape, x['k'].shape[1])
            return 'lowest'
        # the product q k overflows float32, but scale * q k does not
        if self.dtype in ('float32', 'bfloat16') and r.random() < 0.6:
            for n, most in (('q', 2e19), ('k', 1.8e19)):
                x[n] = most * (1 - 2 * r.random(x[n].shape))
            self.members['scale'] = p['scale'] = (1e-38, -1e-38, 3e-38)[int(r.integers(3))]
            return 'beyond'
        if not self.back and self.dtype != 'float8_e4m3fn':  # scale * q k overflows float32, and is exact until then
            for n in 'qk':
                x[n] = r.integers(-1, 2, x[n].shape) * (r.random(x[n].shape[-1]) < 4 / x[n].shape[-1]).astype(float)
            self.members['scale'] = p['scale'] = (3e38, -3e38)[int(r.integers(2))]
            self.levels = self.exact = True
            return 'huge'
        return ''

    def mask_of_lowest(self, p, shape, Sk):
        """Adds a bias like a 4-D mask of Hugging Face: finfo.min hides later keys, and the keys of the padding on the
        left. If a query is padding itself, the bias hides every key that the other masks let it see."""
        r, (B, Sq) = self.more, shape[:2]
        kind = self.dtype if self.dtype != 'float8_e4m3fn' and r.random() < 0.5 else 'float32'
        lowest = {'float16': LOWEST[2], 'bfloat16': LOWEST[1]}.get(kind) or LOWEST[int(r.integers(3))]
        padding = r.integers(0, Sk + 1, B) if r.random() < 0.8 else np.zeros(B, int)
        i, j = np.arange(Sq)[:, None] + Sk - Sq, np.arange(Sk)[None, :]
        hidden = j[None] < padding[:, None, None]
        if r.random() < 0.7:
            hidden = hidden | (j > i)
        if r.random() < 0.1:
            hidden = hidden | True
        hidden = np.broadcast_to(hidden, (B, Sq, Sk))
        self.add('bias', np.where(hidden, lowest, 0.0)[:, None], kind)
        self.levels = lowest < -1e30

    def add(self, name, x, dtype):
        x = np.asarray(x)
        self.problem[name] = x.astype(np.float64) if dtype == 'uint8' else wire.rounded(x, dtype)
        if name in ('cu_seqlens_q', 'cu_seqlens_k', 'seqlens_q', 'seqlens_k', 'mask_startend_rows'):
            self.problem[name] = x.astype(np.int64)
        if self.layout == 'bhsd' and name in ('q', 'k', 'v', 'dout'):
            x = x.swapaxes(1, 2)
        self.members[name] = wire.tensor(x, dtype)
        if dtype == 'float8_e4m3fn':  # wire.e4m3_bits() cannot encode NaN, so the byte of NaN (0x7f) is set here
            bits = wire.e4m3_bits(np.nan_to_num(x))
            bits = np.where(np.isnan(x), 0x7F, bits).astype(np.uint8)
            self.members[name]['data'] = base64.b64encode(bits.tobytes()).decode()
            self.problem[name] = np.where(np.isnan(x), np.nan, wire.rounded(np.nan_to_num(x), dtype))
            if self.layout == 'bhsd':
                self.problem[name] = self.problem[name].swapaxes(1, 2)

    def poison(self, x, r):
        """Puts NaN and infinities into keys and values that no query sees."""
        p = self.problem
        H, Hk = p['q'].shape[-2], p['k'].shape[-2]
        for b, q0, Sq, k0, Sk in oracle.sequences(p):
            for hk in range(Hk):
                seen = np.zeros(Sk, bool)
                for h in range(hk * H // Hk, (hk + 1) * H // Hk):
                    seen |= oracle.visible(p, b, h, Sq, Sk).any(0)
                hidden = np.flatnonzero(~seen)
                at = (k0 + hidden, hk) if oracle.keys_are_packed(p) else (b, hidden, hk)
                x['k'][at] = np.nan
                x['v'][at] = np.nan if self.dtype == 'float8_e4m3fn' or r.random() < 0.5 else np.inf

    def describe(self):
        said = [f'{n}={v["dtype"]}{v["shape"]}' if isinstance(v, dict) and 'shape' in v else f'{n}={v}' for n, v in self.members.items()]
        return ('backward ' if self.back else 'forward ') + ' '.join(said) + (' context' if self.context else '') + \
            (' envelope' if self.envelope else '') + (' base 2' if self.base_2 else '') + (' observe' if self.observe else '') + \
            (f' extreme={self.extreme}' if self.extreme else '')


# ---- Judging ---------------------------------------------------------------------------------------------------------

def largest(x):
    x = np.abs(np.asarray(x, np.float64))
    return float(np.max(x[np.isfinite(x)], initial=0))


def blur_of(case, size):
    """Returns the float32 rounding error of the largest score. `size` is the largest sum of |q k| times the scale, as
    oracle.py returns it."""
    p = case.problem
    if case.exact and not p.get('softcap'):
        size = 0
    bias = 0 if case.levels else largest(p.get('bias', 0))
    return 2.4e-7 * (size + bias + largest(p.get('alibi_slopes', 0)) * max(p['q'].shape[-3], p['k'].shape[-3]))


def tolerances(case, size):
    """Returns {name: (relative, absolute)}: each tensor's limit and noise, without the bounds of bounds.py."""
    p, limit, as_out, as_grad = case.problem, LIMITS[case.dtype], LIMITS[case.out_dtype], LIMITS[case.grad_dtype]
    Sq, Sk = p['q'].shape[-3], p['k'].shape[-3]
    scale = abs(p['scale']) if 'scale' in p else 1 / np.sqrt(p['q'].shape[-1])
    keep = 1 / (1 - p.get('dropout_p', 0))
    q, k, v = (largest(p[n]) * largest(p.get(n + '_scale', 1)) for n in 'qkv')
    dout, dlse = largest(p.get('dout', 0)), largest(p.get('dlse', 0))
    group = p['q'].shape[-2] // p['k'].shape[-2]
    dz = dout * v * np.sqrt(p['v'].shape[-1]) * keep + dlse
    noise = limit[3]
    return {
        'out': (max(limit[0], as_out[0]) + blur_of(case, size), noise * v * keep + as_out[4]),
        'lse': (2.4e-7 if case.levels or case.extreme == 'sinks' else 0, 2e-5),
        'dq': (limit[1], noise * scale * k * dz + as_grad[4]),
        'dk': (limit[1], noise * scale * q * dz * group + as_grad[4]),
        'dv': (limit[1], noise * dout * keep + as_grad[4]),
        'dbias': (limit[2], noise * dz + limit[4]),
        'dsinks': (limit[2], noise * dz + limit[4]),
        'dalibi_slopes': (limit[2], noise * dz * max(Sq, Sk) + limit[4]),
    }


MOST = {'float32': oracle.MOST, 'float16': 65504.0, 'bfloat16': float(wire.bf16_value(np.uint16([0x7F7F]))[0])}


def overflowed(want, got, dtype, relative):
    """Returns the true results as the dtype holds them: beyond the dtype's largest number they are infinite. If the
    truth is so near the largest number that a right kernel may exceed it, an infinite answer counts as right."""
    most = MOST[dtype]
    want = np.where(np.abs(want) > most * (1 + relative), np.copysign(np.inf, want), want)
    if want.shape != got.shape:
        return want
    near = np.isfinite(want) & (np.abs(want) > most * (1 - relative)) & (got == np.copysign(np.inf, want))
    return np.where(near, got, want)


def rounded_to(x, dtype):
    with np.errstate(over='ignore'):
        return wire.rounded(x, dtype)


def differs(name, got, want, bound, tolerance):
    """Returns what is wrong with a tensor of the answer, or ''. `bound` (of bounds.py) is one number, or one per
    element."""
    if got.shape != want.shape:
        return f'{name}: shape {got.shape}, must be {want.shape}'
    if want.size == 0:
        return ''
    finite = np.isfinite(want)
    if np.isnan(bound).any():
        return f'{name}: bounds.py gives NaN'
    known = bound < oracle.MOST  # where the bound exceeds float32, the answer may be anything, even infinite
    strange = known & (~finite & ~((got == want) | (np.isnan(got) & np.isnan(want))) | finite & ~np.isfinite(got))
    if strange.any():
        at = tuple(int(n) for n in np.argwhere(strange)[0])
        return f'{name}: {list(at)} is {got[at]!r}, must be {want[at]!r}'
    finite &= known & np.isfinite(got)
    error = np.where(finite, np.abs(np.where(finite, got, 0) - np.where(finite, want, 0)), 0)
    truth, bound = np.where(finite, want, 0), np.where(finite, bound, 0)
    relative, absolute = tolerance
    with np.errstate(over='ignore'):
        allowed = np.maximum(relative * np.abs(truth).max(), bound) + absolute
    def norm(x):  # Returns the Frobenius norm of numbers whose squares may overflow float64.
        top = float(np.abs(x).max()) or 1.0
        return float(np.linalg.norm(x / top)) * top
    worst = tuple(int(n) for n in np.unravel_index(np.argmax(error - allowed), error.shape))
    if error[worst] > allowed[worst]:
        return f'{name}: {list(worst)} is {got[worst]:.9g}, must be {want[worst]:.9g}; allowed {allowed[worst]:.3g} (largest {np.abs(truth).max():.3g})'
    if norm(error) > max(relative * norm(truth), norm(bound)) + absolute * np.sqrt(want.size):
        return f'{name}: norm of the error is {norm(error):.3g}, of the tensor {norm(truth):.3g}'
    return ''


class Refused(Exception):
    pass


def check_base_2(case, members, exact, size, post):
    """Sends a backward whose lse is in base 2, and returns what is wrong with the answer, or ''. The server must refuse
    the request under four conditions. It checks at least 16 rows. All lse are finite. Each lse is so far from 0 that
    the base shows. The rows' lse differ by more than the tolerance of kernels/verify_lse.c. (If the scores are equal,
    an lse in base 2 is also a right lse over more keys.) The server checks few rows of a small body. It spends 8
    multiply-adds per byte of the body (PROTOCOL.md), and each key of a row takes D + 32 of them."""
    lse, D = exact['lse'], case.problem['q'].shape[-1]
    sent = sum(int(np.prod(t['shape'])) * wire.BYTES[t['dtype']] for t in members.values() if isinstance(t, dict) and 'dtype' in t)
    rows = 8 * sent // (max(1, case.problem['k'].shape[-3]) * (D + 32))
    tolerance = 2.0 ** -10 + 2.0 ** (-8 if case.dtype == 'bfloat16' else -10) * size / np.sqrt(D)
    must = min(lse.size, rows) >= 16 and np.isfinite(lse).all() and np.abs(lse).min() > 1 + 8 * tolerance and \
        (LOG2_E - 1) * lse.std() > 12 * tolerance
    try:
        post('/v1/attention/backward', {**members, 'lse': wire.tensor(lse * LOG2_E, 'float32')})
    except Refused as e:
        return '' if str(e).startswith('400 ') and 'base 2' in str(e) else str(e)
    return 'an lse in base 2 was accepted' if must else ''


def check_observe(case, size, post):
    """Sends an observe with the tensors of the forward. Returns what is wrong with the answer, or ''."""
    p = case.problem
    want = oracle.observe(p, case.cells)
    if not p['q'].size or not p['k'].size:
        want.pop('map', None)
    members = {n: x for n, x in case.members.items() if n not in ('v', 'v_scale', 'out_dtype')}
    members.update(observe=list(want), **({'map': case.cells} if 'map' in want else {}))
    got, answer = post('/v1/attention/observe', members)
    pairs = want.pop('pairs')
    if answer['pairs'] != pairs:
        return f'pairs: {answer["pairs"]}, must be {pairs}'
    blur = blur_of(case, size)
    score = np.maximum(blur, bounds.of_lse(p, case.exact))
    share, rows, most = np.expm1(min(2 * float(np.max(score, initial=0)), 80.0)), p['q'].shape[-3], np.log(p['k'].shape[-3] + 2)
    mass = {n: np.minimum(share * want[n], rows) for n in ('key_mass', 'map') if n in want}
    bound = {'row_max': score, 'lse': score, 'max_logit': np.max(score, initial=0), 'entropy': min(2 * share, 1) * most,
             'mean_entropy': min(2 * share, 1) * most, **mass}
    scores, noise = tolerances(case, size)['lse'], LIMITS[case.dtype][3]
    for name in want:
        if name not in got:
            return f'{name}: missing'
        tolerance = scores if name in ('row_max', 'lse', 'max_logit') else (1e-5, noise)
        why = differs(name, got[name], want[name], bound[name], tolerance)
        if why:
            return why
    return ''


def check(case, ask):
    """Sends the case by ask(path, members), which returns (status, answer). Compares the answer with the float64
    results. Returns what is wrong, or ''."""
    p = case.problem
    swap = (lambda name, x: x.swapaxes(1, 2) if case.layout == 'bhsd' and name in ('out', 'dq', 'dk', 'dv') else x)

    def post(path, members):
        status, answer = ask(path, {'requests': [members, members]} if case.envelope else members)
        if status == 200 and case.envelope:
            first, second = answer['responses']
            for timing in (first, second):
                timing.pop('timing_us', None)
            if case.members.get('deterministic', True) and not case.back and first != second:
                raise Refused('two equal problems of a body have different answers')
            answer = first
            if 'error' in answer:
                status, answer = answer['error']['status'], answer['error']
        if status != 200:
            raise Refused(f'{status} {answer.get("detail", answer)}')
        return {n: swap(n, wire.value(t)) for n, t in answer.items() if isinstance(t, dict) and 'data' in t}, answer

    try:
        if not case.back:
            want, size = oracle.forward(p)
            got, answer = post('/v1/attention/forward', case.members)
            bound = {'lse': np.maximum(blur_of(case, size), bounds.of_lse(p, case.exact))}
        else:
            members = dict(case.members)
            exact, size = oracle.forward(p)
            if case.give:
                for n, dtype in (('out', case.out_dtype), ('lse', 'float32')):
                    members[n] = wire.tensor(exact[n].swapaxes(1, 2) if n == 'out' and case.layout == 'bhsd' else exact[n], dtype)
                    p = {**p, n: rounded_to(exact[n], dtype)}
            if case.base_2:
                return check_base_2(case, members, exact, size, post)
            if case.context:
                forward = {n: v for n, v in members.items() if n not in ('dout', 'dlse', 'outputs', 'deterministic', 'grad_dtype')}
                forward.update(save=True, out_dtype=case.out_dtype)
                context = post('/v1/attention/forward', forward)[1]['context']
                members = {n: v for n, v in members.items() if n in ('dout', 'dlse', 'outputs', 'deterministic', 'grad_dtype', 'encoding')}
                members['context'] = context
            got, answer = post('/v1/attention/backward', members)
            want = oracle.backward(p)
            bound = bounds.of_gradients(p, case.dtype, case.out_dtype, case.give, case.exact)
    except Refused as e:
        return str(e)
    limits = tolerances(case, size)
    for name in want:
        if name not in got:
            return f'{name}: missing'
        dtype = case.out_dtype if name == 'out' else case.grad_dtype if name in ('dq', 'dk', 'dv') else 'float32'
        if answer[name]['dtype'] != dtype:
            return f'{name}: dtype is {answer[name]["dtype"]}, must be {dtype}'
        why = differs(name, got[name], overflowed(want[name], got[name], dtype, limits[name][0]), bound.get(name, 0.0), limits[name])
        if why:
            return why
    try:
        return check_observe(case, size, post) if case.observe else ''
    except Refused as e:
        return f'observe: {e}'


# ---- The command -----------------------------------------------------------------------------------------------------

def client(url, token=None):
    """Returns a function ask(path, members). It sends requests over one connection, and opens a new connection when the
    server has closed it."""
    parts = urllib.parse.urlsplit(url)
    state = {}

    def ask(path, members):
        body = json.dumps(members).encode()
        headers = {'Content-Type': 'application/json', **({'Authorization': 'Bearer ' + token} if token else {})}
        for attempt in (0, 1):
            try:
                if 'c' not in state:
                    state['c'] = http.client.HTTPConnection(parts.hostname, parts.port, timeout=300)
                state['c'].request('POST', path, body, headers)
                answer = state['c'].getresponse()
                return answer.status, json.loads(answer.read())
            except (http.client.RemoteDisconnected, ConnectionError):
                state.pop('c').close()
                if attempt:
                    raise
    return ask


def run(seed, numbers, ask, seconds=None, say=print):
    """Runs the cases of a seed until `count` cases or `seconds` are over. Returns (passed, failed)."""
    passed = failed = 0
    end = time.monotonic() + seconds if seconds else None
    kinds = {}
    for n in numbers:
        if end and time.monotonic() > end:
            break
        case = Case(seed, n)
        why = check(case, ask)
        kind = ('backward ' if case.back else 'forward ') + case.dtype
        kinds[kind] = kinds.get(kind, 0) + 1
        if why:
            failed += 1
            say(f'FAIL seed {seed} case {n}: {why}\n     {case.describe()}\n     again: make differential ARGS="--seed {seed} --case {n}"')
        else:
            passed += 1
    say(f'seed {seed}: ' + ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items())))
    say(f'{passed} passed, {failed} failed')
    return passed, failed


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--seed', type=int)
    ap.add_argument('--count', type=int, default=1 << 40, help='cases (default: until --seconds)')
    ap.add_argument('--seconds', type=float, help='stop after these')
    ap.add_argument('--case', type=int, help='this case alone')
    ap.add_argument('--url')
    ap.add_argument('--token')
    a = ap.parse_args()
    seed = a.seed if a.seed is not None else int(np.random.SeedSequence().entropy % 2**31)
    if a.case is None and a.count == 1 << 40 and not a.seconds:
        a.seconds = 60
    numbers = [a.case] if a.case is not None else range(a.count)
    if a.url:
        failed = run(seed, numbers, client(a.url, a.token), a.seconds)[1]
    else:
        import service
        with service.Server() as server:
            failed = run(seed, numbers, client(f'http://127.0.0.1:{server.port}'), a.seconds)[1]
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
