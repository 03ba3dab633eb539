"""Mistakes of kernels for which a check has no code: wrong indices, races, wrong widths, stale values. A check must
answer "mismatch", say where the wrong elements are, and not explain them by another mistake.

The classes are written as those of known_mistakes.py. `self.rng` draws where the mistake strikes: which head, row or
tile."""
import numpy as np

from kernel import Kernel, as_dtype

ALL = {}  # name: class


def invented(**needs):
    def add(mistake):
        mistake.variants, mistake.needs = (None,), needs
        ALL[mistake.__name__] = mistake
        return mistake
    return add


class Invention(Kernel):
    def __init__(self, problem, exact=False, tile=64, variant=None):
        super().__init__(problem, exact, tile, variant)
        self.rng = np.random.default_rng(self.variant.get('seed', 0))
        self.sequence = 0

    def sequences(self):
        """Draws one sequence, the only one that the mistake affects."""
        found = super().sequences()
        self.struck = self.rng.integers(len(found))
        return found

    def strikes(self, s):
        return s.b == self.struck

    def some(self, n):
        return int(self.rng.integers(n))

    def stretch(self, n, length):
        """Draws a tile: `length` neighbours among n elements. The last tile may be shorter."""
        a = self.some(-(-n // length)) * length
        return slice(a, min(a + length, n))


large = dict(Sq=lambda r: int(r.integers(33, 130)), Sk=lambda r: int(r.integers(40, 257)), packed=False, seqlens_k=False, seqlens_q=False)
forward = dict(back=False, **large)
backward = dict(back=True, dtype=lambda r: str(r.choice(('float32', 'float16', 'bfloat16'))), **large)
heads = dict(Hk=lambda r: int(r.integers(2, 5)))


# ---- What is read ----------------------------------------------------------------------------------------------------

@invented(**forward)
class row_of_v_is_the_next(Invention):
    """In one tile of keys, the kernel reads row j + 1 of v instead of row j."""

    def read_sequence(self, *sequence):
        s = super().read_sequence(*sequence)
        if self.strikes(s):
            tile = self.stretch(s.Sk, 32)
            h = self.some(s.H)
            s.vv = s.vv.copy()
            s.vv[h, tile] = s.vv[h, np.minimum(np.arange(tile.start, tile.stop) + 1, s.Sk - 1)]
        return s


@invented(**forward)
class tile_of_k_starts_one_row_late(Invention):
    def read_sequence(self, *sequence):
        s = super().read_sequence(*sequence)
        if self.strikes(s):
            tile = self.stretch(s.Sk, 64)
            s.kk = s.kk.copy()
            s.kk[:, tile] = s.kk[:, np.minimum(np.arange(tile.start, tile.stop) + 1, s.Sk - 1)]
        return s


@invented(**forward)
class last_chunk_of_the_head_is_not_multiplied(Invention):
    """The products q k leave out the last 8 of the D terms."""

    def read_sequence(self, *sequence):
        s = super().read_sequence(*sequence)
        s.q = s.q.copy()
        s.q[..., -8:] = 0
        return s


@invented(**forward, **heads)
class last_head_of_k_is_that_before_it(Invention):
    def read_sequence(self, *sequence):
        s = super().read_sequence(*sequence)
        s.kk = s.kk.copy()
        s.kk[s.group == s.Hk - 1] = s.k[s.Hk - 2]
        return s


@invented(**{**forward, 'B': lambda r: int(r.integers(2, 4))})
class v_of_the_first_row_of_the_batch(Invention):
    """The kernel reads v of the first batch row in every batch row."""

    def read_sequence(self, *sequence):
        s = super().read_sequence(*sequence)
        s.vv = self.v[0, :s.Sk].swapaxes(0, 1)[s.group]
        return s


@invented(**forward)
class q_has_8_bits(Invention):
    """q is rounded to three mantissa bits before the product."""

    def read(self, name):
        x = super().read(name)
        return as_dtype(x, 'float8_e4m3fn') if name == 'q' else x


@invented(**forward)
class block_of_v_is_transposed(Invention):
    """The kernel loads a block of 8 x 8 numbers of v with rows and columns exchanged."""

    def read_sequence(self, *sequence):
        s = super().read_sequence(*sequence)
        if self.strikes(s):
            a, d, h = self.some(s.Sk // 8) * 8, self.some(s.vv.shape[2] // 8) * 8, self.some(s.H)
            s.vv = s.vv.copy()
            s.vv[h, a:a + 8, d:d + 8] = s.vv[h, a:a + 8, d:d + 8].T.copy()
        return s


# ---- Scores ----------------------------------------------------------------------------------------------------------

@invented(**{**forward, 'bias': True, 'bias_per_head': True, **heads})
class bias_of_the_head_before(Invention):
    def bias(self, s):
        return np.roll(super().bias(s), 1, 0)


@invented(**{**forward, 'alibi': True, **heads})
class slope_of_the_next_head(Invention):
    def slopes(self, s):
        return np.roll(super().slopes(s), -1)


@invented(**{**forward, 'causal': True, 'alignment': 'top_left', 'window': False})
class diagonal_tile_is_not_masked(Invention):
    """The kernel skips tiles of keys that lie wholly above the causal diagonal, but does not mask tiles that the
    diagonal crosses."""

    def sees(self, s):
        sees = super().sees(s)
        i, j = np.arange(s.Sq)[:, None], np.arange(s.Sk)[None, :]
        return sees | ((i // 32 == j // 32) & (s.b == self.struck))


@invented(**{**forward, 'window': True, 'window_is': lambda r: 1, 'causal': True})
class window_ends_with_its_tile(Invention):
    """The left end of the sliding window is rounded to a tile of 16 keys."""

    def window(self):
        return None, super().window()[1]

    def sees(self, s):
        left = Kernel.window(self)[0]
        i, j = np.arange(s.Sq)[:, None], np.arange(s.Sk)[None, :]
        at = i if self.alignment() == 'top_left' else i + s.Sk - s.Sq
        return super().sees(s) & ((j // 16) * 16 + 15 >= at - left)


@invented(**{**forward, 'softcap': True, 'softcap_is': lambda r: 20.0, 'size': 3.0})
class tanh_is_a_polynomial(Invention):
    def capped(self, s, raw):
        x = raw * self.float(self.scale()) / self.float(self.softcap())
        return self.float(self.softcap()) * np.clip(x - x ** 3 / 3, -1, 1)


@invented(**{**forward, 'dropout': True, 'B': lambda r: int(r.integers(2, 4))})
class dropout_forgets_the_batch(Invention):
    """Dropout drops the same elements in every batch row as in the first."""

    def kept(self, s):
        b, s.b = s.b, 0
        try:
            return super().kept(s)
        finally:
            s.b = b


# ---- FlashMask rows --------------------------------------------------------------------------------------------------

class Bounds(Invention):
    def row_bounds(self, s):
        return self.changed(super().row_bounds(s).copy())


row_mask = {**forward, 'row_mask': True}


@invented(**row_mask)
class a_bound_of_the_rows_is_off_by_one(Bounds):
    """FlashMask: one bound of each key's hidden rows is one row too low or too high."""

    def changed(self, bounds):
        bounds[..., self.some(bounds.shape[-1])] += (-1, 1)[self.some(2)]
        return bounds


@invented(**{**row_mask, 'causal': False, 'row_bounds': 2})
class lower_and_upper_rows_are_exchanged(Bounds):
    """FlashMask: the start of the lower hidden rows and the end of the upper hidden rows are exchanged."""

    def changed(self, bounds):
        return bounds[..., ::-1]


@invented(**{**row_mask, 'causal': True, 'row_bounds': 2})
class first_and_last_hidden_row_are_exchanged(Bounds):
    """FlashMask: start (LTS) and end (LTE) of the hidden rows are exchanged. The interval is then empty, and all rows
    see the key."""

    def changed(self, bounds):
        return bounds[..., ::-1]


@invented(**{**row_mask, 'causal': False, 'row_bounds': 4})
class both_intervals_run_backwards(Bounds):
    """FlashMask: the four bounds are read as LTE, LTS, UTE, UTS instead of LTS, LTE, UTS, UTE."""

    def changed(self, bounds):
        return bounds[..., [1, 0, 3, 2]]


@invented(**{**row_mask, 'causal': False, 'row_bounds': 4})
class upper_interval_is_ignored(Bounds):
    """FlashMask: of four bounds the last two, which hide the upper rows, are not read."""

    def changed(self, bounds):
        bounds[..., 2:] = 0
        return bounds


# ---- Pages -----------------------------------------------------------------------------------------------------------

pages = {**forward, 'pages': True, 'page_size': lambda r: int(r.choice((4, 8, 16, 32)))}


@invented(**pages)
class page_table_is_read_one_entry_late(Invention):
    def slots(self, b, Sk):
        table, size, j = self.p.tensors['page_table'], self.p.tensors['k'].shape[1], np.arange(Sk)
        return table[b, np.minimum(j // size + 1, table.shape[1] - 1)], j % size


class PageSize(Invention):
    def slots(self, b, Sk):
        """Returns the page and the slot in the page of each key, as a wrong kernel computes them. The kernel takes a
        page of `size` keys for a page of self.size(size) keys."""
        table, (pages, size), j = self.p.tensors['page_table'], self.p.tensors['k'].shape[:2], np.arange(Sk)
        taken = self.size(size)
        line = table[b, np.minimum(j // taken, table.shape[1] - 1)] * taken + j % taken
        return np.divmod(np.minimum(line, pages * size - 1), size)


@invented(**pages)
class pages_are_taken_for_twice_as_large(PageSize):
    def size(self, size):
        return 2 * size


@invented(**pages)
class pages_are_taken_for_half_as_large(PageSize):
    def size(self, size):
        return size // 2


@invented(**{**pages, 'B': lambda r: int(r.integers(2, 4))})
class all_rows_have_the_pages_of_the_first(Invention):
    def slots(self, b, Sk):
        return super().slots(0, Sk)


# ---- Factors of float8 -----------------------------------------------------------------------------------------------

float8 = {**forward, 'dtype': 'float8_e4m3fn'}


@invented(**float8)
class factor_of_one_tensor_is_ignored(Invention):
    """One of the float8 factors q_scale, k_scale and v_scale is ignored."""

    def times_factor(self, name, x):
        return x if name == 'qkv'[self.variant['seed'] % 3] else super().times_factor(name, x)


@invented(**float8)
class factors_of_k_and_v_are_exchanged(Invention):
    def times_factor(self, name, x):
        return super().times_factor({'k': 'v', 'v': 'k'}.get(name, name), x)


@invented(**float8)
class factor_of_one_tensor_divides(Invention):
    """One of q, k and v is divided by its float8 factor instead of multiplied."""

    def times_factor(self, name, x):
        right = super().times_factor(name, x)
        if name != 'qkv'[self.variant['seed'] % 3]:
            return right
        return x * (x / np.where(right == 0, 1, right))


@invented(**{**float8, **heads})
class factor_of_the_first_head_is_used_for_all(Invention):
    def times_factor(self, name, x):
        factor = self.p.tensors[name + '_scale']
        return x * factor[0]


# ---- Softmax ---------------------------------------------------------------------------------------------------------

@invented(**forward)
class exp_is_a_short_series(Invention):
    """exp is computed as 2^n times a polynomial whose degree is too low."""

    def scores(self, s):
        z = super().scores(s)
        x = np.where(z == -np.inf, 0, z) * self.float(np.log2(np.e))
        f = x - np.floor(x)
        with np.errstate(divide='ignore'):
            bad = np.floor(x) + np.log2(1 + f * self.float(0.9))
        return np.where(z == -np.inf, z, bad * self.float(np.log(2))).astype(self.float)


@invented(**forward)
class one_row_is_not_rescaled(Invention):
    def softmax(self, s, z):
        self.row = (self.some(s.H), self.some(s.Sq)) if self.strikes(s) else None
        return super().softmax(s, z)

    def rescale(self, acc, factor, a):
        if self.row:
            factor = factor.copy()
            factor[self.row] = 1
        return super().rescale(acc, factor, a)


@invented(**forward)
class maximum_is_stale(Invention):
    """In one tile of keys, exp subtracts the running maximum as it was before this tile."""

    def softmax(self, s, z):
        self.stale = self.stretch(s.Sk, self.tile).start
        return super().softmax(s, z)

    def subtracted(self, safe, m, a):
        return np.where(m == -np.inf, safe, m) if a == self.stale else safe


@invented(**forward)
class tile_is_counted_twice(Invention):
    def key_tiles(self, Sk):
        tiles = [(a, min(a + 32, Sk)) for a in range(0, Sk, 32)]
        return tiles + [tiles[self.some(len(tiles))]]


@invented(**forward)
class sum_of_one_head_misses_a_key(Invention):
    """In one head, the softmax denominator omits a key that the sum for out contains."""

    def softmax(self, s, z):
        self.missed = (self.some(s.H), self.some(s.Sk)) if self.strikes(s) else None
        return super().softmax(s, z)

    def tile_sum(self, s, P, safe, a, b):
        l = super().tile_sum(s, P, safe, a, b)
        if self.missed and a <= self.missed[1] < b:
            l[self.missed[0]] -= P[self.missed[0], :, self.missed[1] - a]
        return l


@invented(**{**forward, 'sinks': True})
class sink_without_the_maximum(Invention):
    """exp(sink) is added to the softmax denominator without subtracting the row's maximum, which all other terms
    subtract."""

    def with_sink(self, s, acc, l, m):
        sinks = self.sinks(s)[:, None].astype(self.float)
        return acc, np.where(l > 0, l + np.exp(sinks), l), m


# ---- What is written -------------------------------------------------------------------------------------------------

@invented(**forward)
class race_zeroes_a_tile(Invention):
    def finish_rows(self, s, out, lse):
        if self.strikes(s):
            out = out.copy()
            out[self.some(s.H), self.stretch(s.Sq, 16)] = 0
        return out, lse


@invented(**forward)
class last_columns_are_not_written(Invention):
    def finish_rows(self, s, out, lse):
        out = out.copy()
        out[..., -8:] = 0
        return out, lse


@invented(**{**forward, **heads, 'Hk': lambda r: int(r.integers(3, 5))})
class two_heads_are_exchanged(Invention):
    def finish_rows(self, s, out, lse):
        if self.strikes(s):
            a = self.some(s.H - 1)
            out, lse = out.copy(), lse.copy()
            out[[a, a + 1]], lse[[a, a + 1]] = out[[a + 1, a]], lse[[a + 1, a]]
        return out, lse


@invented(**forward)
class a_nan_is_left(Invention):
    def finish_rows(self, s, out, lse):
        if self.strikes(s):
            out = out.copy()
            out[self.some(s.H), self.some(s.Sq), self.some(out.shape[2])] = np.nan
        return out, lse


@invented(**forward)
class one_head_has_the_other_sign(Invention):
    def finish_rows(self, s, out, lse):
        if self.strikes(s):
            out = out.copy()
            out[self.some(s.H)] *= -1
        return out, lse


@invented(**{**forward, 'results': ['out', 'lse']})
class lse_of_a_tile_is_that_of_the_tile_before(Invention):
    def finish_rows(self, s, out, lse):
        if self.strikes(s):
            a = 16 * (1 + self.some(s.Sq // 16 - 1))
            lse = lse.copy()
            lse[:, a:a + 16] = lse[:, a - 16:a][:, :lse[:, a:a + 16].shape[1]]
        return out, lse


@invented(**forward)
class rows_of_a_tile_move_down_by_one(Invention):
    def finish_rows(self, s, out, lse):
        if self.strikes(s):
            tile, h = self.stretch(s.Sq, 32), self.some(s.H)
            out = out.copy()
            out[h, tile] = np.roll(out[h, tile], 1, 0)
        return out, lse


# ---- Gradients -------------------------------------------------------------------------------------------------------

@invented(**backward)
class an_update_of_dk_is_lost(Invention):
    """Two tiles of queries add to dk at the same time, and one of the two sums is lost."""

    def finish_gradients(self, s, dq, dk, dv):
        if self.strikes(s):
            tile, h = self.stretch(s.Sk, 32), self.some(s.H)
            dk = dk.copy()
            dk[h, tile] *= self.float(0.5)
        return dq, dk, dv


@invented(**backward)
class delta_is_that_of_the_next_row(Invention):
    def delta(self, s, dout, out):
        return np.roll(super().delta(s, dout, out), -1, 1)


@invented(**backward)
class last_tile_of_dv_is_not_written(Invention):
    def finish_gradients(self, s, dq, dk, dv):
        dv = dv.copy()
        dv[:, (s.Sk - 1) // 32 * 32:] = 0
        return dq, dk, dv


@invented(**backward)
class rows_of_dq_move_down_by_one(Invention):
    def finish_gradients(self, s, dq, dk, dv):
        return np.roll(dq, 1, 1), dk, dv


@invented(**{**backward, 'Hk': lambda r: int(r.integers(1, 4)), 'group': 3})
class a_group_misses_one_head(Invention):
    """Grouped heads: dk and dv are summed over all query heads of a group except the first."""

    def sum_of_groups(self, s, x):
        x = x.copy()
        x[::s.H // s.Hk] = 0
        return super().sum_of_groups(s, x)


@invented(**backward)
class one_head_of_dk_is_negative(Invention):
    def finish_gradients(self, s, dq, dk, dv):
        if self.strikes(s):
            dk = dk.copy()
            dk[self.some(s.H)] *= -1
        return dq, dk, dv
