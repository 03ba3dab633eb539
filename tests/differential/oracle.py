"""Attention and its gradients in float64, from the definitions in kernels/README.md and nothing else.

A problem is a dict of tensors and options by their names in the protocol; an absent name is not given. Tensors are
float64 arrays [B, S, H, D], whatever layout and dtype the request had. Sequences and heads are computed one after the
other, with whole matrices: nothing is tiled.

    answer = forward(problem)                      {'out': [B, Sq, H, Dv], 'lse': [B, H, Sq]}       packed: [total_q, ...], [H, total_q]
    grads = backward(problem)                      dq dk dv, and dsinks dbias dalibi_slopes where those are given
    what the queries look at = observe(problem)    row_max lse entropy max_logit mean_entropy key_mass map pairs
"""
import numpy as np

MOST = float(np.finfo(np.float32).max)
# A backward ignores a given lse of at least this size, and computes lse from the scores. Float32 is too coarse at this
# size.
LSE_MOST = 2.0 ** 24


# ---- Dropout: PROTOCOL.md, "Dropout" --------------------------------------------------------------------------------

def philox(counter, key):
    """Philox4x32-10, a random number generator: returns the words [4, ...] of the counters [4, ...] under a key of two
    words."""
    c = [np.asarray(x, np.uint64) for x in counter]
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(*c))


def kept(seed, head, Sq, Sk, p):
    """Returns a boolean [Sq, Sk]: the pairs of query and key that dropout keeps in one head. `head` is the number b * H
    + h."""
    groups = (Sk + 7) // 8
    words = philox((np.arange(groups)[None, :], np.arange(Sq)[:, None], head, 0), (seed & 0xFFFFFFFF, seed >> 32))
    # the axes are [word of Philox, half of the word, Sq, groups of 8 keys]
    lanes = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], 1)
    lanes = np.moveaxis(lanes, (0, 1), (2, 3)).reshape(Sq, groups * 8)[:, :Sk]
    return lanes >= np.floor(p * 65536 + 0.5)


# ---- Which pairs count -----------------------------------------------------------------------------------------------

def sequences(p):
    """Returns (b, first query, number of queries, first key, number of keys) of every sequence, without padding
    rows."""
    B = len(p['cu_seqlens_q']) - 1 if 'cu_seqlens_q' in p else p['q'].shape[0]

    def of(x, b):
        cu, used, rows = p.get('cu_seqlens_' + x), p.get('seqlens_' + x), p[x].shape[1]
        start, room = (0, rows) if cu is None else (int(cu[b]), int(cu[b + 1] - cu[b]))
        return start, room if used is None else int(used[b])
    return [(b, *of('q', b), *of('k', b)) for b in range(B)]


def keys_are_packed(p):
    """Returns whether k and v are packed [total, Hk, D]. Packed queries may also be used with padded k [B, Sk, Hk,
    D]."""
    return p['k'].ndim == 3


def visible(p, b, h, Sq, Sk):
    """Returns a boolean [Sq, Sk]: the pairs of query and key that the masks of head h of sequence b let through."""
    H, Hk = p['q'].shape[-2], p['k'].shape[-2]
    i, j = np.arange(Sq)[:, None], np.arange(Sk)[None, :]
    at = i if p.get('alignment') == 'top_left' else i + Sk - Sq
    left, right = p.get('window', (-1, -1))
    sees = np.ones((Sq, Sk), bool)
    if p.get('causal'):
        sees &= j <= at
    if left >= 0:
        sees &= j >= at - left
    if right >= 0:
        sees &= j <= at + right
    if 'keep_mask' in p:
        sees &= of_head(p['keep_mask'], b, h, Sq, Sk) != 0
    if 'bias' in p:
        sees &= of_head(p['bias'], b, h, Sq, Sk) != -np.inf
    if 'mask_startend_rows' in p:
        rows = p['mask_startend_rows']
        heads = rows.shape[1]
        m = rows[b, h * heads // H if heads > 1 else 0][:Sk]
        c = [m[None, :, n] for n in range(m.shape[1])]
        if p.get('causal'):
            sees &= ~((i >= c[0]) & (i < (c[1] if len(c) == 2 else Sq)))
        elif len(c) == 2:
            sees &= ~((i >= c[0]) | (i < c[1]))
        else:
            sees &= ~(((i >= c[0]) & (i < c[1])) | ((i >= c[2]) & (i < c[3])))
    return sees


def of_head(x, b, h, Sq, Sk):
    """Returns the part of a bias or mask that belongs to head h of batch row b, as [1 or Sq, Sk]. A batch or head axis
    of length 1 is broadcast."""
    return x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0][:Sq if x.shape[2] > 1 else 1, :Sk]


# ---- One head --------------------------------------------------------------------------------------------------------

class Head:
    """Scores, probabilities and output of head h of sequence b, in float64."""

    def __init__(self, p, b, q0, Sq, k0, Sk, h):
        packed = 'cu_seqlens_q' in p
        H, Hk = p['q'].shape[-2], p['k'].shape[-2]
        self.hk = hk = h * Hk // H
        self.rows = (slice(q0, q0 + Sq), h) if packed else (b, slice(0, Sq), h)
        self.keys = (slice(k0, k0 + Sk), hk) if keys_are_packed(p) else (b, slice(0, Sk), hk)
        self.lse_at = (h, slice(q0, q0 + Sq)) if packed else (b, h, slice(0, Sq))
        N = len(p['cu_seqlens_q']) - 1 if packed else len(p['q'])
        factor = [np.broadcast_to(p[n], (N, Hk))[b, hk] if n in p else 1.0 for n in ('q_scale', 'k_scale', 'v_scale')]
        self.q, self.k, self.v = p['q'][self.rows] * factor[0], p['k'][self.keys] * factor[1], p['v'][self.keys] * factor[2]
        self.sees = sees = visible(p, b, h, Sq, Sk)
        D = p['q'].shape[-1]
        self.scale = p['scale'] if 'scale' in p else 1 / np.sqrt(D)
        # Sets keys that no query sees to 0, because they may be NaN. All other keys are finite here.
        seen = sees.any(0)
        self.k, self.v = np.where(seen[:, None], self.k, 0), np.where(seen[:, None], self.v, 0)
        s = self.q @ self.k.T * self.scale
        # the largest sum of |q k| times the scale: the size of the terms of a score before they cancel
        self.size = float(np.max(np.abs(self.q) @ np.abs(self.k).T, initial=0)) * abs(self.scale)
        self.slope = 1.0  # derivative of the softcap, 1 without a softcap
        cap = p.get('softcap', 0)
        if cap > 0:
            t = np.tanh(s / cap)
            s, self.slope = cap * t, 1 - t * t
            self.size = min(self.size, 8 * cap)
        self.distance = np.abs(np.arange(Sq)[:, None] + Sk - Sq - np.arange(Sk)[None, :])
        if 'bias' in p:
            bias = of_head(p['bias'], b, h, Sq, Sk)
            s = s + np.where(np.isfinite(bias), bias, 0)
        if 'alibi_slopes' in p:
            m = p['alibi_slopes']
            s = s - (m[b, h] if m.ndim == 2 else m[h]) * self.distance
        z = np.where(sees, np.clip(s, -MOST, MOST), -np.inf)
        self.sink = p['sinks'][h] if 'sinks' in p else -np.inf
        top = np.maximum(np.max(z, 1, initial=-np.inf), self.sink)
        self.top = np.where(top > -np.inf, top, 0)
        self.z = z
        total = np.exp(z - self.top[:, None]).sum(1) + np.exp(self.sink - self.top)
        self.empty = total == 0
        self.rest = np.log(np.where(self.empty, 1, total))
        self.lse = np.where(self.empty, -np.inf, self.top + self.rest)
        self.P = np.exp(z - self.top[:, None] - self.rest[:, None])
        self.M = 1.0
        if p.get('dropout_p', 0) > 0:
            self.M = kept(p.get('seed', 0), b * H + h, Sq, Sk, p['dropout_p']) / (1 - p['dropout_p'])
        self.out = (self.P * self.M) @ self.v

    def statistics(self, p):
        """Returns out, P, two numbers per row whose sum is lse, and which rows see no key. If the problem p has out and
        lse, they are used unchanged."""
        if 'out' not in p:
            return self.out, np.where(self.empty[:, None], 0, self.P), self.top, self.rest, self.empty
        lse = p['lse'][self.lse_at]
        use = np.abs(lse) < LSE_MOST
        top, rest, empty = np.where(use, lse, self.top), np.where(use, 0, self.rest), lse == -np.inf
        P = np.exp(self.z - top[:, None] - rest[:, None])
        return p['out'][self.rows], np.where(empty[:, None], 0, P), top, rest, empty


def heads(p):
    for b, q0, Sq, k0, Sk in sequences(p):
        for h in range(p['q'].shape[-2]):
            yield b, h, Head(p, b, q0, Sq, k0, Sk, h)


def empty_answer(p):
    q, Dv = p['q'], p['v'].shape[-1]
    lse = (q.shape[1], q.shape[0]) if 'cu_seqlens_q' in p else (q.shape[0], q.shape[2], q.shape[1])
    return np.zeros(q.shape[:-1] + (Dv,)), np.full(lse, -np.inf)


def forward(p):
    out, lse = empty_answer(p)
    size = 0.0
    for _, _, x in heads(p):
        out[x.rows], lse[x.lse_at] = x.out, x.lse
        size = max(size, x.size)
    return {'out': out, 'lse': lse}, size


def observe(p, cells):
    """Returns the results of an observe by their definition ("Observe" in PROTOCOL.md). `cells` is the map's shape [m,
    n]; packed problems have no map."""
    H, N, packed = p['q'].shape[-2], len(sequences(p)), 'cu_seqlens_q' in p
    lse = empty_answer(p)[1]
    g = {'row_max': lse, 'lse': lse.copy(), 'entropy': np.zeros(lse.shape), 'max_logit': np.full((N, H), -np.inf),
         'mean_entropy': np.zeros((N, H)), 'pairs': 0}
    # number of key rows from one sequence to the next; 0: packed keys follow each other directly
    rows = 0 if keys_are_packed(p) else p['k'].shape[1]
    mass = np.zeros((H, p['k'].shape[0] if keys_are_packed(p) else N * rows))
    if not packed:
        g['map'] = np.zeros((N, H, *cells))
    for b, h, x in heads(p):
        seen, keys = x.sees.any(1), x.keys[0].start if keys_are_packed(p) else b * rows
        largest = np.max(x.z, 1, initial=-np.inf)
        log = np.where(x.P > 0, x.z - x.top[:, None] - x.rest[:, None], 0)
        sink = np.where(x.empty | (x.sink == -np.inf), -np.inf, x.sink - x.top - x.rest)
        entropy = -(x.P * log).sum(1) - np.where(sink > -np.inf, np.exp(sink) * np.where(sink > -np.inf, sink, 0), 0)
        g['row_max'][x.lse_at], g['lse'][x.lse_at], g['entropy'][x.lse_at] = largest, x.lse, np.where(seen, entropy, 0)
        g['max_logit'][b, h] = np.max(largest, initial=-np.inf)
        g['mean_entropy'][b, h] = entropy[seen].mean() if seen.any() else 0
        mass[h, keys:keys + x.P.shape[1]] = x.P.sum(0)
        g['pairs'] += int(x.sees.sum())
        if not packed:
            row, column = (np.arange(n) * m // total for n, m, total in zip(x.P.shape, cells, (p['q'].shape[1], p['k'].shape[1])))
            np.add.at(g['map'][b, h], (row[:, None], column[None, :]), x.P)
    g['key_mass'] = mass if packed else mass.reshape(H, N, rows).swapaxes(0, 1)
    return g


def backward(p):
    """Returns the gradients. If the problem p has out and lse, the backward uses these unchanged."""
    g = {n: np.zeros(p[n[1:]].shape) for n in ('dq', 'dk', 'dv')}
    g.update({'d' + n: np.zeros(p[n].shape) for n in ('sinks', 'bias', 'alibi_slopes') if n in p})
    for b, h, x in heads(p):
        out, P, top, rest, empty = x.statistics(p)
        dout = p['dout'][x.rows]
        delta = (dout * out).sum(1)
        if 'dlse' in p:
            delta = delta - p['dlse'][x.lse_at]
        dZ = P * (x.M * (dout @ x.v.T) - delta[:, None])
        dS = dZ * x.slope
        g['dq'][x.rows] = x.scale * dS @ x.k
        g['dk'][x.keys] += x.scale * dS.T @ x.q
        g['dv'][x.keys] += (P * x.M).T @ dout
        if 'dbias' in g:
            whole = g['dbias'][b if p['bias'].shape[0] > 1 else 0, h if p['bias'].shape[1] > 1 else 0]
            if whole.shape[0] > 1:
                whole[:dZ.shape[0], :dZ.shape[1]] += dZ
            else:
                whole[:, :dZ.shape[1]] += dZ.sum(0)
        if 'dalibi_slopes' in g:
            at = (b, h) if p['alibi_slopes'].ndim == 2 else h
            g['dalibi_slopes'][at] -= (dZ * x.distance).sum()
        if 'dsinks' in g:
            weight = np.where(empty | (x.sink == -np.inf), 0, np.exp(np.where(empty, 0, x.sink - top - rest)))
            g['dsinks'][h] -= (weight * delta).sum()
    return g
