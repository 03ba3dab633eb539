"""Random problems of attention, small enough that thousands take minutes.

    problem = draw(np.random.default_rng(5), causal=True, back=False)

draw() chooses at random what is not given. `problem.tensors` are float64 arrays [B, S, H, D] (packed: [total, H, D])
with values of their dtype, `problem.options` have their names of the protocol, and `problem.results` names the results
of the kernel under test."""
import types

import numpy as np

import wire

LAYOUT_TENSORS = ('q', 'k', 'v', 'dout', 'out', 'dq', 'dk', 'dv')
DTYPES = ('float32', 'float16', 'bfloat16')
FLOAT8 = 'float8_e4m3fn'


class Wants:
    """Returns the value that the caller gave for an option. If the caller gave a function, calls it with the random
    generator. If the caller gave nothing, draws a value."""
    NAMES = set('''back dtype packed B Hk group D Dv Sq Sk same_length size N same_lengths dlse scale scale_is causal window window_is
                   alignment softcap softcap_is alibi alibi_per_row sinks bias bias_per_row bias_per_head bias_per_query bias_hides keep_mask
                   mask_per_row mask_per_head mask_per_query kept hidden_rows seqlens_k seqlens_q dropout layout results
                   row_mask row_bounds pages page_size'''.split())

    def __init__(self, rng, given):
        self.rng, self.given = rng, given
        assert set(given) <= self.NAMES, set(given) - self.NAMES

    def __call__(self, name, draw):
        value = self.given[name] if name in self.given else draw()
        return value(self.rng) if callable(value) else value

    def chance(self, name, p):
        return self(name, lambda: bool(self.rng.random() < p))

    def pick(self, name, values):
        return self(name, lambda: values[int(self.rng.integers(len(values)))])


def lengths(rng, N, most):
    """Returns N random lengths from 1 to `most`, and their cumulative sums beginning with 0."""
    n = rng.integers(1, most + 1, N)
    return n, np.concatenate(([0], np.cumsum(n))).astype(np.int64)


def draw(rng, **given):
    w = Wants(rng, given)
    o = {}
    back = w.chance('back', 0.3)
    dtype = w.pick('dtype', DTYPES)
    back = back and dtype != FLOAT8
    packed = w.chance('packed', 0.12)
    packed = packed and not back
    B = w.pick('B', (1, 1, 2, 3))
    Hk = w.pick('Hk', (1, 2, 2, 3, 4))
    group = w.pick('group', (1, 1, 2, 3, 4))
    D = w.pick('D', (16, 24, 32, 40, 64))
    Dv = w('Dv', lambda: int(D if rng.random() < 0.7 else rng.choice((16, 32, 48))))
    Sq = w('Sq', lambda: int(rng.choice((1, 5, 17, 33, 64, 100, 129))))
    Sk = w('Sk', lambda: int(Sq if rng.random() < 0.4 else rng.choice((7, 40, 64, 113, 150, 200, 257))))
    if w.chance('same_length', 0):
        Sk = Sq
    H = Hk * group
    # standard deviation of q: a larger one spreads the scores further apart
    size = w('size', lambda: float(rng.choice((1.0, 1.0, 2.0, 3.0))))
    t = {}

    def tensor(name, shape, dtype=dtype, factor=1.0):
        t[name] = wire.rounded(rng.standard_normal(shape) * factor, dtype)

    if packed:
        N = w.pick('N', (1, 2, 3, 4))
        nq, cq = lengths(rng, N, max(Sq, 2))
        nk, ck = (nq, cq) if w.chance('same_lengths', 0.5) else lengths(rng, N, max(Sk, 2))
        t['cu_seqlens_q'], t['cu_seqlens_k'] = cq, ck
        lead_q, lead_k = (int(cq[-1]),), (int(ck[-1]),)
        Sq, Sk, B = int(nq.max()), int(nk.max()), N
    else:
        lead_q, lead_k = (B, Sq), (B, Sk)
    tensor('q', (*lead_q, H, D), factor=size)
    tensor('k', (*lead_k, Hk, D))
    tensor('v', (*lead_k, Hk, Dv))
    if back:
        tensor('dout', (*lead_q, H, Dv))
        if w.chance('dlse', 0.3):
            tensor('dlse', (B, H, Sq), 'float32')
    if dtype == FLOAT8:
        for name, n in (('q', Hk), ('k', Hk), ('v', Hk)):
            t[name + '_scale'] = wire.rounded(np.exp(rng.uniform(-0.7, 0.7, n)), 'float32')

    if w.chance('scale', 0.25):
        o['scale'] = float(np.float32(w('scale_is', lambda: float(rng.uniform(0.5, 2.0))) / np.sqrt(D)))
    if w.chance('causal', 0.4):
        o['causal'] = True
    if w.chance('window', 0.2):
        left = int(rng.integers(0, max(Sk // 2, 2)))
        right = int(rng.integers(0, max(Sk // 2, 2)))
        o['window'] = [[left, right], [left, -1], [-1, right]][w.pick('window_is', (0, 0, 1, 2))]
    if w.pick('alignment', ('bottom_right', 'bottom_right', 'top_left')) == 'top_left':
        o['alignment'] = 'top_left'
    if w.chance('softcap', 0.15):
        o['softcap'] = float(np.float32(w('softcap_is', lambda: float(rng.uniform(1.0, 8.0)))))
    if w.chance('alibi', 0.15):
        per_row = w.chance('alibi_per_row', 0.2)
        tensor('alibi_slopes', (B, H) if per_row else (H,), 'float32')
        t['alibi_slopes'] = wire.rounded(np.abs(t['alibi_slopes']) * 0.1 + 0.01, 'float32')
    if w.chance('sinks', 0.15):
        tensor('sinks', (H,), 'float32')
    if w.chance('bias', 0.15) and not packed:
        shape = (B if w.chance('bias_per_row', 0.5) else 1, H if w.chance('bias_per_head', 0.5) else 1, Sq if w.chance('bias_per_query', 0.5) else 1, Sk)
        tensor('bias', shape, 'float32', factor=1.5)
        if w.chance('bias_hides', 0.3):
            t['bias'] = np.where(rng.random(shape) < 0.2, -np.inf, t['bias'])
    if w.chance('keep_mask', 0.15) and not packed:
        shape = (B if w.chance('mask_per_row', 0.5) else 1, H if w.chance('mask_per_head', 0.5) else 1, Sq if w.chance('mask_per_query', 0.5) else 1, Sk)
        t['keep_mask'] = (rng.random(shape) < w('kept', lambda: float(rng.uniform(0.3, 0.9)))).astype(np.uint8)
        if w.chance('hidden_rows', 0.3):
            t['keep_mask'][:, :, :, :] *= (rng.random(shape[:3] + (1,)) < 0.8).astype(np.uint8)
    if w.chance('seqlens_k', 0.15) and not packed:
        t['seqlens_k'] = rng.integers(1, Sk + 1, B)
    if w.chance('seqlens_q', 0.05) and not packed:
        t['seqlens_q'] = rng.integers(1, Sq + 1, B)
    if w.chance('dropout', 0.1) and not packed:
        o['dropout_p'] = float(rng.choice((0.1, 0.25, 0.5)))
        o['seed'] = int(rng.integers(2, 2**40))
    layout = w.pick('layout', ('bshd', 'bshd', 'bshd', 'bhsd'))
    layout = 'bshd' if packed else layout
    if w('row_mask', lambda: False) and not packed:
        t['mask_startend_rows'] = row_mask(rng, B, (1, Hk, H)[int(rng.integers(3))], Sq, Sk, w.pick('row_bounds', (1, 2) if o.get('causal') else (2, 4)), o.get('causal'))
    if w('pages', lambda: False) and not packed and not back:
        layout = 'bshd'
        page_keys(rng, t, w.pick('page_size', (4, 8, 16, 32, 64)))
    gradients = ['dq', 'dk', 'dv'] + ['d' + n for n in ('bias', 'sinks', 'alibi_slopes') if n in t]
    results = w.pick('results', (['out', 'lse'], ['out'], ['out', 'lse']))
    if back and 'results' not in given:
        results = gradients + (['out', 'lse'] if rng.random() < 0.3 else [])
    return types.SimpleNamespace(tensors=t, options=o, dtype=dtype, layout=layout, back=back, packed=packed, results=results)


def row_mask(rng, B, heads, Sq, Sk, n, causal):
    """Draws FlashMask rows [B, heads, Sk, n]: either documents that do not see each other, or bounds drawn for each key
    alone."""
    shape = (B, heads, Sk)
    a, b, c, d = np.sort(rng.integers(0, Sq + 1, (4, *shape)), 0)
    if rng.random() < 0.5:
        document = np.sort(rng.integers(0, 4, shape), -1)
        cuts = np.sort(rng.integers(0, Sq + 1, (B, heads, 5)), -1)
        b, c = (np.take_along_axis(cuts, document + more, -1) for more in (0, 1))
        a, d = np.zeros(shape, int), np.full(shape, Sq)
    return np.stack([c] if n == 1 else [c, d] if causal else [c, b] if n == 2 else [c, d, a, b], -1)


def page_keys(rng, t, size):
    """Moves k and v [B, Sk, ...] into pools of pages in random order. Slots that hold no key get numbers of the same
    tensor in random order."""
    B, Sk = t['k'].shape[:2]
    most = -(-Sk // size)
    spare = int(rng.integers(1, 4))
    t['page_table'] = rng.permutation(B * most + spare)[:B * most].reshape(B, most)
    t.setdefault('seqlens_k', rng.integers(1, Sk + 1, B))
    for name in ('k', 'v'):
        rows = t[name]
        pool = rng.permuted(np.resize(rows, (B * most + spare, size, *rows.shape[2:])), axis=0)
        j = np.arange(Sk)
        pool[t['page_table'][:, j // size], j % size] = rows
        t[name] = pool
    for name in ('bias', 'keep_mask'):
        if name in t:
            t[name] = np.pad(t[name], [(0, 0)] * 3 + [(0, most * size - Sk)])
    if 'mask_startend_rows' in t:
        t['mask_startend_rows'] = np.pad(t['mask_startend_rows'], [(0, 0)] * 2 + [(0, most * size - Sk), (0, 0)])


def without_pages(tensors):
    """Returns the problem's tensors with k and v as [B, Sk, Hk, D] instead of pages."""
    t = dict(tensors)
    table = t.pop('page_table', None)
    if table is not None:
        for name in ('k', 'v'):
            t[name] = t[name][table].reshape(len(table), -1, *t[name].shape[2:])
    return t


INT32 = ('cu_seqlens_q', 'cu_seqlens_k', 'seqlens_q', 'seqlens_k', 'page_table', 'mask_startend_rows')


def dtype_of(problem, name):
    if name in ('q', 'k', 'v', 'dout'):
        return problem.dtype
    return 'uint8' if name == 'keep_mask' else 'int32' if name in INT32 else 'float32'


def in_layout(problem, name, x):
    """Returns a tensor with its axes in the order of the problem's layout, as memory has them."""
    return x.swapaxes(1, 2) if problem.layout == 'bhsd' and name in LAYOUT_TENSORS else x


def members(problem, found, dtype_of_result):
    """Returns the JSON members of a check: the problem, and the results to be checked."""
    m = {n: wire.tensor(in_layout(problem, n, x), dtype_of(problem, n)) for n, x in problem.tensors.items()}
    m.update({n: wire.tensor(in_layout(problem, n, x), dtype_of_result(n)) for n, x in found.items()})
    if problem.layout != 'bshd':
        m['layout'] = problem.layout
    return {**m, **problem.options}


def describe(problem):
    t = problem.tensors
    shapes = ', '.join(f'{n} {list(np.shape(x))}' for n, x in t.items())
    return f'{problem.dtype} {"backward" if problem.back else "forward"} {problem.layout} {shapes} {problem.options}'
