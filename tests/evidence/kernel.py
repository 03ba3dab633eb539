"""A FlashAttention kernel in NumPy, forward and backward, made to be broken.

`Kernel` walks over tiles of keys with a running maximum, as GPU kernels do. Each decision that a kernel's author can
get wrong is a small method: which keys a query sees, which head of k it reads, when the sums are rescaled. A mistake
(known_mistakes.py) is a class that overrides one of them, and `planted(A, B)` is a kernel with both.

    truth = Kernel(problem, exact=True).run()            float64, nothing is rounded on the way
    right = Kernel(problem, tile=64).run()               rounded where FlashAttention rounds, float32 sums
    wrong = planted(alignment)(problem, tile=64).run()

Results are {'out': [B, Sq, H, Dv], 'lse': [B, H, Sq]} (packed: [total_q, H, Dv], [H, total_q]), or gradients, in the
logical order of axes. `sent` turns them into what a kernel would have written to memory."""
import types

import numpy as np

import oracle
import wire

# dtype of the results for each dtype of inputs; a dtype that is not listed here is also the dtype of its results
OUT_DTYPE = {'float8_e4m3fn': 'bfloat16'}
P_SCALE = 256.0  # float8 only: probabilities are multiplied by P_SCALE before they are rounded to float8


def as_dtype(x, dtype):
    """Rounds x to the nearest values of the dtype. The result keeps x's NumPy type."""
    if dtype == 'float32':
        return x.astype(np.float32).astype(x.dtype)
    with np.errstate(over='ignore', invalid='ignore'):
        return np.where(np.isfinite(x), wire.rounded(np.where(np.isfinite(x), x, 0), dtype), x).astype(x.dtype)


def other_layout(x):
    """Misreads a tensor: takes the memory of x [B, S, H, D] for [B, H, S, D], and returns it as [B, S, H, D]."""
    B, S, H, D = x.shape
    return np.ascontiguousarray(x).reshape(B, H, S, D).swapaxes(1, 2)


def back_from_other_layout(x):
    B, S, H, D = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(B, S, H, D)


class Kernel:
    """A NumPy kernel for the attention of one problem (problems.py)."""

    def __init__(self, problem, exact=False, tile=64, variant=None):
        """exact: computes in float64 without rounding. tile: keys per tile. variant: {name of a mistake: its
        variant}."""
        self.p, self.exact, self.tile, self.variant = problem, exact, tile, variant or {}
        self.float = np.float64 if exact else np.float32

    # ---- Reading -----------------------------------------------------------------------------------------------------

    def read(self, name):
        """Returns q, k, v or dout as [B, S, H, D] or packed [total, H, D], multiplied by its float8 factors."""
        return self.times_factor(name, self.p.tensors[name]).astype(self.float)

    def times_factor(self, name, x):
        factor = self.p.tensors.get(name + '_scale')  # `factor` is [Hk]: one number for each key/value head
        if factor is None:
            return x
        return x * np.repeat(factor, x.shape[-2] // len(factor))[:, None]

    def sequences(self):
        """Yields (b, first query, number of queries, first key, number of keys) of each sequence, without padding
        rows."""
        return oracle.sequences(self.p.tensors)

    def read_sequence(self, b, q0, Sq, k0, Sk):
        """Returns one sequence's tensors and positions, which all methods below use. The first axis of the tensors is
        the head."""
        packed = self.p.packed
        rows = slice(q0, q0 + Sq) if packed else (b, slice(0, Sq))
        keys = slice(k0, k0 + Sk) if packed else self.slots(b, Sk) if 'page_table' in self.p.tensors else (b, slice(0, Sk))
        s = types.SimpleNamespace(b=b, Sq=Sq, Sk=Sk, rows=rows, keys=keys)
        s.lse_at = (slice(None), slice(q0, q0 + Sq)) if packed else (b, slice(None), slice(0, Sq))
        s.q = self.q[rows].swapaxes(0, 1)
        s.k, s.v = self.k[keys].swapaxes(0, 1), self.v[keys].swapaxes(0, 1)
        s.H, s.Hk = s.q.shape[0], s.k.shape[0]
        s.group = self.kv_head(s.H, s.Hk)
        s.kk, s.vv = s.k[s.group], s.v[s.group]
        return s

    def slots(self, b, Sk):
        """Returns the page and the slot in it of each key of batch row b."""
        size, j = self.p.tensors['k'].shape[1], np.arange(Sk)
        return self.p.tensors['page_table'][b, j // size], j % size

    def kv_head(self, H, Hk):
        """Returns for each head of q which head of k and v it reads."""
        return np.arange(H) // (H // Hk)

    # ---- Scores ------------------------------------------------------------------------------------------------------

    def scale(self):
        return self.p.options.get('scale', 1 / np.sqrt(self.p.tensors['q'].shape[-1]))

    def softcap(self):
        return self.p.options.get('softcap', 0.0)

    def product(self, a, b):
        return np.matmul(a, b)

    def scores(self, s):
        """Returns the scores [H, Sq, Sk]: scaled, capped, biased and masked. Sets s.slope to the derivative of the
        softcap."""
        z = self.capped(s, self.product(s.q, s.kk.swapaxes(1, 2)))
        z = self.biased(s, z)
        if 'alibi_slopes' in self.p.tensors:
            z = z - self.slopes(s)[:, None, None] * self.distance(s)
        return np.where(self.sees(s), z, -np.inf).astype(self.float)

    def capped(self, s, raw):
        z, cap = raw * self.float(self.scale()), self.softcap()
        s.slope = self.float(1)
        if cap > 0:
            t = np.tanh(z / self.float(cap))
            z, s.slope = self.float(cap) * t, 1 - t * t
        return z

    def biased(self, s, z):
        if 'bias' not in self.p.tensors:
            return z
        return z + self.bias(s).astype(self.float)

    def bias(self, s):
        """Returns the bias as [H, 1 or Sq, Sk]. Where the bias is -inf, which hides the pair, the returned bias is 0."""
        bias = self.of_heads(s, self.p.tensors['bias'])
        return np.where(np.isfinite(bias), bias, 0)

    def of_heads(self, s, x):
        """Returns the part of a bias or mask that belongs to this sequence, as [H, 1 or Sq, Sk]. A batch or head axis
        of 1 is broadcast."""
        x = x[s.b if x.shape[0] > 1 else 0]
        x = x if x.shape[0] == s.H else np.repeat(x, s.H, 0)
        return x[:, :s.Sq if x.shape[1] > 1 else 1, :s.Sk]

    def slopes(self, s):
        m = self.p.tensors['alibi_slopes']
        return (m[s.b] if m.ndim == 2 else m).astype(self.float)

    def distance(self, s):
        return np.abs(np.arange(s.Sq)[:, None] + s.Sk - s.Sq - np.arange(s.Sk)[None, :]).astype(self.float)

    # ---- Which pairs count -------------------------------------------------------------------------------------------

    def alignment(self):
        return self.p.options.get('alignment', 'bottom_right')

    def causal(self):
        """Returns how many keys after its own position a query may see (None: all keys)."""
        return 0 if self.p.options.get('causal') else None

    def window(self):
        """Returns how many keys to the left and to the right of its own position a query may see (None: all keys)."""
        return tuple(None if x < 0 else x for x in self.p.options.get('window', (-1, -1)))

    def keep(self, s):
        """Returns the mask keep_mask, true where a query may attend to a key."""
        return self.of_heads(s, self.p.tensors['keep_mask']) != 0

    def sees(self, s):
        i, j = np.arange(s.Sq)[:, None], np.arange(s.Sk)[None, :]
        at = i if self.alignment() == 'top_left' else i + s.Sk - s.Sq
        sees = np.ones((1, s.Sq, s.Sk), bool)
        left, right = self.window()
        for bound in (right, self.causal()):
            if bound is not None:
                sees = sees & (j <= at + bound)
        if left is not None:
            sees = sees & (j >= at - left)
        if 'keep_mask' in self.p.tensors:
            sees = sees & self.keep(s)
        if 'bias' in self.p.tensors:
            sees = sees & ~self.hidden_by_bias(s)
        if 'mask_startend_rows' in self.p.tensors:
            sees = sees & ~self.hidden_by_rows(s)
        return sees

    def hidden_by_bias(self, s):
        return self.of_heads(s, self.p.tensors['bias']) == -np.inf

    def hidden_by_rows(self, s):
        """Returns which pairs FlashMask hides: for each key it has intervals of queries that do not see the key."""
        i, bounds = np.arange(s.Sq)[:, None], self.row_bounds(s)
        hidden = [bounds[:, None, :, n] for n in range(bounds.shape[2])]
        if self.p.options.get('causal'):
            return (i >= hidden[0]) & (i < (hidden[1] if len(hidden) == 2 else self.p.tensors['q'].shape[1]))
        if len(hidden) == 2:
            return (i >= hidden[0]) | (i < hidden[1])
        return (i >= hidden[0]) & (i < hidden[1]) | (i >= hidden[2]) & (i < hidden[3])

    def row_bounds(self, s):
        """Returns this sequence's mask_startend_rows as [H, Sk, n] with n = 1, 2 or 4 bounds."""
        bounds = self.p.tensors['mask_startend_rows'][s.b]
        return bounds[np.arange(s.H) * len(bounds) // s.H, :s.Sk]

    # ---- Softmax, tile by tile ---------------------------------------------------------------------------------------

    def key_tiles(self, Sk):
        return [(a, min(a + self.tile, Sk)) for a in range(0, Sk, self.tile)]

    def dropped(self, s):
        """Returns dropout's factors of the probabilities, each 0 or 1 / (1 - dropout_p), or None without dropout."""
        if not self.p.options.get('dropout_p'):
            return None
        return (self.kept(s) / (1 - self.p.options['dropout_p'])).astype(self.float)

    def kept(self, s):
        return np.stack([oracle.kept(self.seed(), s.b * s.H + h, s.Sq, s.Sk, self.p.options['dropout_p']) for h in range(s.H)])

    def seed(self):
        return self.p.options['seed']

    def softmax(self, s, z):
        """Returns three arrays: out before it is divided by the softmax's sums [H, Sq, Dv], these sums [H, Sq], and the
        maxima [H, Sq]."""
        m = np.full(z.shape[:2], -np.inf, self.float)
        l, acc = np.zeros_like(m), np.zeros(z.shape[:2] + (s.vv.shape[2],), self.float)
        for n, (a, b) in enumerate(self.key_tiles(s.Sk)):
            acc, l, m = self.step(s, z[..., a:b], a, b, acc, l, m)
        return self.with_sink(s, acc, l, m)

    def step(self, s, z, a, b, acc, l, m):
        """Processes one tile of keys, from a to b (exclusive). acc, l and m are the running out, sum and maximum of
        each row."""
        new, safe = self.new_max(z, m)
        P = np.exp(z - self.subtracted(safe, m, a)[..., None])
        factor = np.where(m == -np.inf, 0, np.exp(np.where(m == -np.inf, 0, m) - safe)).astype(self.float)
        l = l * factor + self.tile_sum(s, P, safe, a, b)
        M = s.M[..., a:b] if s.M is not None else 1
        acc = self.accumulate(self.rescale(acc, factor, a), self.product(self.rounded(P * M, P_SCALE), s.vv[:, a:b]))
        return acc, l, new

    def new_max(self, z, m):
        """Returns the new running maximum, and the number that exp subtracts: the maximum, or 0 while a row has seen no
        key."""
        new = np.maximum(m, z.max(-1, initial=-np.inf))
        return new, np.where(new == -np.inf, 0, new).astype(self.float)

    def subtracted(self, safe, m, a):
        """Returns the number that exp subtracts in the tile that begins at key a. A right kernel subtracts `safe`. m is
        the running maximum before this tile."""
        return safe

    def tile_sum(self, s, P, safe, a, b):
        return P.sum(-1)

    def rescale(self, acc, factor, a):
        return acc * factor[..., None]

    def accumulate(self, acc, more):
        return acc + more

    def rounded(self, x, factor=1.0):
        """Rounds P or dS to the dtype of the matrix products. P or dS is first multiplied by `factor`, which brings it
        into the range of float8."""
        dtype = self.p.dtype
        if self.exact or dtype == 'float32':
            return x
        if dtype != 'float8_e4m3fn':
            factor = 1.0
        return as_dtype(x * self.float(factor), dtype) / self.float(factor)

    def sinks(self, s):
        """Returns the sinks [H], which are logits without a row of v, or None."""
        return self.p.tensors['sinks'] if 'sinks' in self.p.tensors else None

    def with_sink(self, s, acc, l, m):
        sinks = self.sinks(s)
        if sinks is None:
            return acc, l, m
        sinks = np.broadcast_to(sinks[:, None], m.shape).astype(self.float)
        new, safe = self.new_max(sinks[..., None], m)
        factor = np.where(m == -np.inf, 0, np.exp(np.where(m == -np.inf, 0, m) - safe)).astype(self.float)
        return acc * factor[..., None], l * factor + np.exp(sinks - safe), new

    def normalize(self, acc, l):
        return np.where(l[..., None] > 0, acc / np.where(l > 0, l, 1)[..., None], 0)

    def lse(self, l, m):
        return np.where(l > 0, m + np.log(np.where(l > 0, l, 1)), -np.inf)

    def forward_sequence(self, s):
        s.M = self.dropped(s)
        s.z = self.scores(s)
        s.acc, s.l, s.m = self.softmax(s, s.z)
        s.out, s.lse = self.normalize(s.acc, s.l), self.lse(s.l, s.m)
        s.out, s.lse = self.finish_rows(s, s.out, s.lse)
        return s.out, s.lse

    def finish_rows(self, s, out, lse):
        """Returns the rows of out [H, Sq, Dv] and of lse [H, Sq] that the kernel writes. Mistakes in writing rows
        override this method."""
        return out, lse

    # ---- Backward ----------------------------------------------------------------------------------------------------

    def backward_sequence(self, s, grads):
        dout = self.dout[s.rows].swapaxes(0, 1)
        out = s.out if self.exact else as_dtype(s.out, self.result_dtype('out'))
        delta = self.delta(s, dout, out)
        safe = np.where(s.lse == -np.inf, 0, s.lse)
        P = np.where((s.lse == -np.inf)[..., None], 0, np.exp(s.z - safe[..., None]))
        M = s.M if s.M is not None else self.float(1)
        dP = M * self.product(dout, s.vv.swapaxes(1, 2))
        dZ = P * (dP - delta[..., None])
        dS = self.rounded(self.capped_derivative(s, dZ))
        # sum_of_groups() adds dk and dv over heads. If several heads have the same row of dv, += with an index array
        # would lose additions.
        dq = self.dq(s, dS) * self.float(self.scale_of_dq())
        dk = self.product(dS.swapaxes(1, 2), s.q) * self.float(self.scale_of_dk())
        dv = self.product(self.rounded(self.P_of_dv(s, P) * M).swapaxes(1, 2), dout)
        dq, dk, dv = self.finish_gradients(s, dq, dk, dv)
        grads['dq'][s.rows] = dq.swapaxes(0, 1)
        grads['dk'][s.keys] += self.sum_of_groups(s, dk).swapaxes(0, 1)
        grads['dv'][s.keys] += self.sum_of_groups(s, dv).swapaxes(0, 1)
        if 'dbias' in grads:
            self.add_dbias(s, dZ, grads['dbias'])
        if 'dalibi_slopes' in grads:
            more, to = -(dZ * self.distance(s)).sum((1, 2)), grads['dalibi_slopes']
            to[s.b if to.ndim == 2 else slice(None)] += more
        if 'dsinks' in grads and self.sinks(s) is not None:
            weight = np.exp(np.where(s.lse == -np.inf, -np.inf, self.sinks(s)[:, None] - safe))
            grads['dsinks'] -= (weight * delta).sum(1)

    def delta(self, s, dout, out):
        delta = (dout * out).sum(-1)
        return delta - self.dlse[s.lse_at] if self.dlse is not None else delta

    def capped_derivative(self, s, dZ):
        return dZ * s.slope

    def dq(self, s, dS):
        dq = np.zeros(s.q.shape, self.float)
        for a, b in self.key_tiles(s.Sk):
            dq = self.add_to_dq(dq, self.product(dS[..., a:b], s.kk[:, a:b]), b == s.Sk)
        return dq

    def add_to_dq(self, dq, more, last):
        return dq + more

    def scale_of_dq(self):
        return self.scale()

    def scale_of_dk(self):
        return self.scale()

    def P_of_dv(self, s, P):
        return P

    def finish_gradients(self, s, dq, dk, dv):
        """Returns the gradients that the kernel writes, each [H, S, D] before the sum over groups of heads. Mistakes in
        writing gradients override this method."""
        return dq, dk, dv

    def sum_of_groups(self, s, x):
        """Sums gradients [H, Sk, D] over the query heads of each key/value head, to [Hk, Sk, D]."""
        total = np.zeros((s.Hk,) + x.shape[1:], self.float)
        for h in range(s.H):
            total[s.group[h]] += x[h]
        return total

    def add_dbias(self, s, dZ, dbias):
        to = dbias[s.b if dbias.shape[0] > 1 else 0]
        if to.shape[0] == 1:
            dZ = dZ.sum(0, keepdims=True)
        if to.shape[1] == 1:
            dZ = dZ.sum(1, keepdims=True)
        to[:, :dZ.shape[1], :dZ.shape[2]] += dZ

    # ---- All of it ---------------------------------------------------------------------------------------------------

    def run(self):
        """Returns {name: result} as float64 arrays. Unless `exact`, values are rounded to the results' dtypes."""
        t = self.p.tensors
        with np.errstate(over='ignore', invalid='ignore', divide='ignore'):
            self.q, self.k, self.v = self.read('q'), self.read('k'), self.read('v')
            shape = self.q.shape[:-1] + (self.v.shape[-1],)
            found = {'out': np.zeros(shape, self.float),
                     'lse': np.full((shape[1], shape[0]) if self.p.packed else (shape[0], shape[2], shape[1]), -np.inf, self.float)}
            if self.p.back:
                self.dout = self.read('dout')
                self.dlse = t['dlse'].astype(self.float) if 'dlse' in t else None
                grads = {'d' + n: np.zeros(t[n].shape, self.float) for n in ('q', 'k', 'v', 'bias', 'sinks', 'alibi_slopes') if n in t}
            for sequence in self.sequences():
                s = self.read_sequence(*sequence)
                out, lse = self.forward_sequence(s)
                found['out'][s.rows], found['lse'][s.lse_at] = out.swapaxes(0, 1), lse
                if self.p.back:
                    self.backward_sequence(s, grads)
            if self.p.back:
                found.update(grads)
            found = self.finish(found)
            if not self.exact:
                found = {n: self.round_result(n, x) for n, x in found.items()}
        return {n: found[n].astype(np.float64) for n in self.p.results}

    def result_dtype(self, name):
        if name in ('out', 'dq', 'dk', 'dv'):
            return OUT_DTYPE.get(self.p.dtype, self.p.dtype)
        return 'float32'

    def round_result(self, name, x):
        return as_dtype(x, self.result_dtype(name))

    def finish(self, found):
        """Returns the results that the kernel writes. Mistakes that concern whole tensors override this method."""
        return found


class NormalizedFirst(Kernel):
    """Another right kernel: it divides the probabilities by their sum before they are rounded and multiplied by v."""

    def softmax(self, s, z):
        acc, l, m = super().softmax(s, z)
        safe, sums = np.where(m == -np.inf, 0, m)[..., None], np.where(l > 0, l, 1)[..., None]
        P = np.exp(z - safe) / sums * (s.M if s.M is not None else 1)
        return self.product(self.rounded(P, P_SCALE), s.vv) * sums, l, m


def planted(*mistakes):
    """Returns a kernel class that makes all these mistakes. If two classes override the same method, the first class
    wins."""
    return type('_and_'.join(m.__name__ for m in mistakes), (*mistakes, Kernel), {})
