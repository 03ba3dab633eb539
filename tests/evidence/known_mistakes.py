"""The mistakes of kernels that a check names, one class per code. Each class overrides the method of kernel.py in which
an author makes that mistake. The docstring of a class says what the kernel does.

`needs` is what a problem must have for the mistake to matter (arguments of problems.draw). `variants` are forms of a
mistake, such as sizes of tiles; one is drawn for each problem. The same code is right for all variants."""
import numpy as np

import oracle
from kernel import Kernel, as_dtype, back_from_other_layout, other_layout

TILES = (16, 32, 64, 128, 256)
SPLITS = (2, 4, 8, 16)
TABLE = {}  # code: class


def code(*variants, **needs):
    """Class decorator that registers a mistake, its variants, and what a problem must have. A mistake without variants
    has one form."""
    def add(mistake):
        mistake.variants, mistake.needs = variants or (None,), needs
        TABLE[mistake.__name__] = mistake
        return mistake
    return add


class Mistake(Kernel):
    def form(self, mistake):
        return self.variant[mistake.__name__]

    @staticmethod
    def fits(problem, form):
        """Returns whether a kernel can make this mistake, in this form, on the problem."""
        return True


def many_keys(rng):
    return int(rng.choice((130, 150, 200, 257, 290)))


# ---- Layout ----------------------------------------------------------------------------------------------------------
# These kernels read or write a tensor's memory in the other layout's order of axes. The mistake changes results only if
# there are several heads and several positions: H > 1 and S > 1.

several = dict(back=False, packed=False, Sq=lambda r: int(r.integers(5, 130)), Sk=lambda r: int(r.integers(5, 200)), Hk=lambda r: int(r.integers(2, 5)))


class Misread(Mistake):
    misread = ()

    def read(self, name):
        if name not in self.misread:
            return super().read(name)
        # The axes in memory are in the order of the problem's layout, but the kernel reads them in the order of the
        # other layout (bhsd instead of bshd, or the reverse).
        walk = other_layout if self.p.layout == 'bshd' else back_from_other_layout
        return self.times_factor(name, walk(self.p.tensors[name])).astype(self.float)


@code(**several)
class layout_q(Misread):
    misread = ('q',)


@code(**several)
class layout_k(Misread):
    misread = ('k',)


@code(**several)
class layout_v(Misread):
    misread = ('v',)


class Miswritten(Mistake):
    def finish(self, found):
        found = super().finish(found)
        walk = back_from_other_layout if self.p.layout == 'bshd' else other_layout
        found['out'] = walk(found['out'])
        return found


@code(**{**several, 'results': ['out', 'lse']})
class layout_out(Miswritten):
    pass


@code(**several)
class layout_all(Miswritten, Misread):
    misread = ('q', 'k', 'v')


@code(**{**several, 'results': ['out', 'lse']})
class lse_layout(Mistake):
    """lse is written in the order [B, Sq, H] instead of [B, H, Sq]."""

    def finish(self, found):
        found = super().finish(found)
        lse = found['lse']
        found['lse'] = np.ascontiguousarray(lse.swapaxes(1, 2)).reshape(lse.shape)
        return found


@code(**{**several, 'layout': 'bshd'})
class keys_transposed(Mistake):
    """The memory of k is read as [B, D, Hk, Sk] instead of [B, Sk, Hk, D]."""

    def read(self, name):
        if name != 'k':
            return super().read(name)
        B, S, H, D = self.p.tensors['k'].shape
        k = np.ascontiguousarray(self.p.tensors['k']).reshape(B, D, H, S).transpose(0, 3, 2, 1)
        return self.times_factor('k', k).astype(self.float)


@code(back=False, Dv=lambda r: 32, D=32)
class k_v_swapped(Mistake):
    def read(self, name):
        return super().read({'k': 'v', 'v': 'k'}.get(name, name))


# ---- Scale, and the order in which scores are changed ----------------------------------------------------------------

spread = dict(Sq=lambda r: int(r.integers(5, 130)), Sk=lambda r: int(r.integers(7, 257)))


@code(**spread)
class scale_missing(Mistake):
    def scale(self):
        return 1.0


@code(**spread)
class scale_twice(Mistake):
    def scale(self):
        return super().scale() ** 2


@code(D=lambda r: int(r.choice((24, 32, 64))), Dv=lambda r: int(r.choice((16, 48))), scale=False, **spread)
class scale_of_dv(Mistake):
    def scale(self):
        return 1 / np.sqrt(self.p.tensors['v'].shape[-1])


@code(**spread)
class scale_inverse(Mistake):
    def scale(self):
        return 1 / super().scale()


@code(softcap=True, softcap_is=lambda r: float(r.uniform(0.5, 3)), size=lambda r: float(r.choice((2.0, 3.0))), **spread)
class softcap_missing(Mistake):
    def softcap(self):
        return 0.0


@code(softcap=True, softcap_is=lambda r: float(r.uniform(0.5, 5)), **spread)
class softcap_before_scale(Mistake):
    """The products q k are capped (softcap) before they are scaled."""

    def capped(self, s, raw):
        cap = self.float(self.softcap())
        t = np.tanh(raw / cap)
        s.slope = 1 - t * t
        return cap * t * self.float(self.scale())


bias = dict(bias=True, packed=False)


@code(**bias, **spread)
class bias_missing(Mistake):
    def bias(self, s):
        return np.zeros_like(super().bias(s))

    def hidden_by_bias(self, s):
        return np.zeros_like(super().hidden_by_bias(s))


@code(softcap=False, **bias, **spread)
class bias_before_scale(Mistake):
    """The bias is added to the products q k before they are scaled."""

    def bias(self, s):
        return super().bias(s) * self.scale()


@code(**bias, **spread)
class bias_in_base2(Mistake):
    """The kernel's scores are in base 2, but the bias is added without being converted to base 2."""

    def bias(self, s):
        return super().bias(s) * np.log(2)


# ---- Masks -----------------------------------------------------------------------------------------------------------

@code(causal=True, **spread)
class causal_missing(Mistake):
    def causal(self):
        return None


@code(causal=False, window=False, **spread)
class causal_unasked(Mistake):
    def causal(self):
        return 0


@code(causal=True, **spread)
class alignment(Mistake):
    def alignment(self):
        return {'top_left': 'bottom_right', 'bottom_right': 'top_left'}[super().alignment()]


@code(causal=True, window=False, **spread)
class causal_off_by_one(Mistake):
    """The causal mask also lets a query see the first key after its own position."""

    def causal(self):
        return 1


@code(causal=True, window=False, **spread)
class causal_strict(Mistake):
    """The causal mask hides the key at the query's own position."""

    def causal(self):
        return -1


@code(window=True, **spread)
class window_missing(Mistake):
    def window(self):
        return None, None


@code('left more', 'left less', 'both more', 'both less', window=True, window_is=lambda r: int(r.integers(0, 2)), **spread)
class window_off_by_one(Mistake):
    def window(self):
        left, right = super().window()
        form = self.form(window_off_by_one)
        step = 1 if form.endswith('more') else -1
        return max(left + step, 0), right if right is None or form.startswith('left') else max(right + step, 0)


def sometimes(rng):
    return bool(rng.random() < 0.5)


class Masked(Mistake):
    """Base class of mistakes in one mask: keep_mask, or FlashMask's rows."""

    @staticmethod
    def fits(problem, mask):
        other = 'keep_mask' if mask == 'mask_startend_rows' else 'mask_startend_rows'
        return mask in problem.tensors and other not in problem.tensors


def masks():
    return code('keep_mask', 'mask_startend_rows', keep_mask=sometimes, row_mask=sometimes, packed=False, **spread)


@masks()
class mask_inverted(Masked):
    """The mask is read as its opposite: pairs that the mask shows are hidden, and pairs that it hides are seen."""

    def keep(self, s):
        return super().keep(s) ^ (self.form(mask_inverted) == 'keep_mask')

    def hidden_by_rows(self, s):
        return super().hidden_by_rows(s) ^ (self.form(mask_inverted) == 'mask_startend_rows')


@masks()
class mask_ignored(Masked):
    def keep(self, s):
        return super().keep(s) | (self.form(mask_ignored) == 'keep_mask')

    def hidden_by_rows(self, s):
        return super().hidden_by_rows(s) & (self.form(mask_ignored) != 'mask_startend_rows')


@code('seqlens_k', 'pages', seqlens_k=True, pages=sometimes, packed=False, seqlens_q=False, alibi=False, dropout=False, **spread)
class padding_attended(Mistake):
    """seqlens_k is ignored: a query sees all keys up to the end of the padded row, or of the last page."""

    @staticmethod
    def fits(problem, form):
        return ('page_table' in problem.tensors) == (form == 'pages')

    def sequences(self):
        room = self.p.tensors['k'].shape[1]
        return [(b, q0, Sq, k0, -(-Sk // room) * room) for b, q0, Sq, k0, Sk in super().sequences()]


@code(packed=True, back=False, alibi_per_row=False, N=lambda r: int(r.integers(2, 5)))
class sequences_mixed(Mistake):
    """Packed sequences are treated as one long sequence, so that queries see keys of other sequences."""

    def sequences(self):
        t = self.p.tensors
        return [(0, 0, t['q'].shape[0], 0, t['k'].shape[0])]


alibi = dict(alibi=True)


@code(**alibi, **spread)
class alibi_missing(Mistake):
    def slopes(self, s):
        return np.zeros_like(super().slopes(s))


@code(causal=False, **alibi, **spread)
class alibi_corner(Mistake):
    """ALiBi's distances are counted from the top-left corner of the score matrix instead of the bottom-right corner."""

    def distance(self, s):
        return np.abs(np.arange(s.Sq)[:, None] - np.arange(s.Sk)[None, :]).astype(self.float)


@code(**alibi, **spread)
class alibi_sign(Mistake):
    def slopes(self, s):
        return -super().slopes(s)


# ---- Heads -----------------------------------------------------------------------------------------------------------

grouped = dict(Hk=lambda r: int(r.integers(2, 5)), group=lambda r: int(r.integers(2, 4)))


@code(**grouped, **spread)
class heads_interleaved(Mistake):
    def kv_head(self, H, Hk):
        return np.arange(H) % Hk


@code(Hk=lambda r: int(r.integers(2, 5)), **spread)
class heads_reversed(Mistake):
    def kv_head(self, H, Hk):
        return super().kv_head(H, Hk)[::-1]


@code(back=True, dtype=lambda r: str(r.choice(('float32', 'float16', 'bfloat16'))), **grouped, **spread)
class group_not_summed(Mistake):
    """Grouped heads: each query head of a group writes dk and dv instead of adding, so only the last head's remain."""

    def sum_of_groups(self, s, x):
        last = np.zeros((s.Hk,) + x.shape[1:], self.float)
        for h in range(s.H):
            last[s.group[h]] = x[h]
        return last


# ---- Softmax ---------------------------------------------------------------------------------------------------------

with_lse = dict(back=False, results=['out', 'lse'])


@code(**with_lse, **spread)
class lse_base2(Mistake):
    def lse(self, l, m):
        return super().lse(l, m) / np.log(2)


@code(**with_lse, **spread)
class lse_without_max(Mistake):
    def lse(self, l, m):
        return super().lse(l, np.where(m == -np.inf, m, 0))


def empty_rows(rng):
    """Draws a length of q such that the problem has more queries than keys, and its first queries see no key."""
    return int(rng.integers(60, 130))


empty = dict(back=False, causal=True, alignment='bottom_right', Sq=empty_rows, Sk=lambda r: int(r.integers(7, 50)), packed=False, sinks=False, results=['out', 'lse'])


@code(**empty)
class empty_rows_inf(Mistake):
    """A row that sees no key gets lse +inf instead of -inf."""

    def lse(self, l, m):
        return np.where(l > 0, super().lse(l, m), np.inf)


@code(**empty)
class empty_rows_nan(Mistake):
    """In a row that sees no key, -inf is subtracted from -inf, which gives NaN."""

    def normalize(self, acc, l):
        return np.where((l > 0)[..., None], super().normalize(acc, l), np.nan)

    def lse(self, l, m):
        return np.where(l > 0, super().lse(l, m), np.nan)


@code(back=False, **spread)
class not_normalized(Mistake):
    def normalize(self, acc, l):
        return acc


def tiled(**more):
    return dict(back=False, Sk=many_keys, packed=False, seqlens_k=False, **more)


class Tiled(Mistake):
    """Base class of mistakes that depend on a tile size. The kernel itself uses this tile size too."""

    def __init__(self, problem, exact=False, tile=64, variant=None):
        super().__init__(problem, exact, next((variant[n] for n in variant if n in OF_TILES), tile), variant)


@code(*TILES, **tiled(sinks=False))
class not_rescaled(Tiled):
    """When the running maximum grows, the sum is rescaled but out is not. Problems with a sink are left out, because a
    kernel may add the sink first or last."""

    def rescale(self, acc, factor, a):
        return acc


class TileDropped(Tiled):
    @staticmethod
    def fits(problem, tile):
        # The problem must have more keys than a tile, so that the kernel has other tiles than the one that it drops.
        return problem.tensors['k'].shape[1] > tile


@code(*TILES, **tiled())
class last_tile_dropped(TileDropped):
    def key_tiles(self, Sk):
        return super().key_tiles(Sk)[:-1]


@code(*TILES, **tiled())
class first_tile_dropped(TileDropped):
    def key_tiles(self, Sk):
        return super().key_tiles(Sk)[1:]


@code(*TILES, **tiled(causal=False, window=False, keep_mask=False, bias=False))
class tail_unmasked(Tiled):
    """The last tile of keys is padded with zero keys, which count as keys with score 0."""

    def tile_sum(self, s, P, safe, a, b):
        return super().tile_sum(s, P, safe, a, b) + (a + self.tile - b) * np.exp(-safe)

    def new_max(self, z, m):
        new = np.maximum(m, z.max(-1, initial=-np.inf))
        if z.shape[-1] < self.tile:  # pads the scores of the last tile with zeros
            new = np.maximum(new, 0)
        return new, np.where(new == -np.inf, 0, new).astype(self.float)


sinks = dict(sinks=True)


@code(**sinks, **spread)
class sink_missing(Mistake):
    def sinks(self, s):
        return None


@code(*SPLITS, back=False, packed=False, seqlens_k=False, sinks=True, **spread)
class sink_per_split(Mistake):
    """Split keys: each split adds the sink to its sum, so that the sink counts several times."""

    def with_sink(self, s, acc, l, m):
        acc, l, m = super().with_sink(s, acc, l, m)
        sinks = np.broadcast_to(self.sinks(s)[:, None], m.shape).astype(self.float)
        return acc, l + (self.form(sink_per_split) - 1) * np.exp(sinks - m), m


@code(*SPLITS, back=False, packed=False, seqlens_k=False, sinks=False, Sk=lambda r: int(r.choice((64, 128, 160, 256))), causal=False, window=False)
class splits_unweighted(Mistake):
    """Split keys: the splits' results are averaged without their softmax weights."""

    def softmax(self, s, z):
        n = self.form(splits_unweighted)
        acc, l, m = super().softmax(s, z)
        length = -(-s.Sk // n)
        total = 0
        for a in range(0, n * length, length):
            only = np.full_like(z, -np.inf)
            only[..., a:a + length] = z[..., a:a + length]
            part, sum_of_part, _ = super().softmax(s, only)
            total = total + self.normalize(part, sum_of_part)
        return total / n * l[..., None], l, m


# ---- Precision -------------------------------------------------------------------------------------------------------

class Narrow(Mistake):
    def narrow(self, x):
        """Rounds x to 16 bits: to the dtype of 16-bit inputs, or for float32 inputs to one of float16 and bfloat16."""
        return as_dtype(x, self.form(TABLE[self.code]) if self.p.dtype == 'float32' else self.p.dtype)


@code('float16', 'bfloat16', back=False, Sk=many_keys)
class accumulated_in_16_bit(Narrow):
    """The running out is stored in 16 bits between tiles of 16 keys."""
    code = 'accumulated_in_16_bit'

    def __init__(self, problem, exact=False, tile=64, variant=None):
        super().__init__(problem, exact, 16, variant)

    def accumulate(self, acc, more):
        return self.narrow(acc + more)

    def rescale(self, acc, factor, a):
        return self.narrow(super().rescale(acc, factor, a))


@code('float16', 'bfloat16', back=False, size=lambda r: float(r.choice((4.0, 8.0, 16.0))), **spread)
class scores_in_16_bit(Narrow):
    """Scores are rounded to 16 bits before the softmax."""
    code = 'scores_in_16_bit'

    def scores(self, s):
        return self.narrow(super().scores(s))


@code(dtype='float32', **spread)
class tf32_products(Mistake):
    """The kernel rounds float32 tensors to 10 mantissa bits (TF32) before all products."""

    def product(self, a, b):
        return super().product(tf32(a), tf32(b))


def tf32(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000
    return bits.astype(np.uint32).view(np.float32).astype(x.dtype)


@code('results', 'probabilities', dtype=lambda r: str(r.choice(('float32', 'float16'))), **spread)
class truncated(Mistake):
    """Numbers are truncated to bfloat16 instead of rounded. One variant truncates P. The other variant truncates the
    results, which are still sent in their own dtype."""

    def round_result(self, name, x):
        if name not in ('out', 'dq', 'dk', 'dv') or self.form(truncated) != 'results':
            return super().round_result(name, x)
        return cut_to_bf16(x)

    def rounded(self, x, factor=1.0):
        if factor == 1 or self.form(truncated) != 'probabilities':
            return super().rounded(x, factor)
        return cut_to_bf16(x)


def cut_to_bf16(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(x.dtype)


# ---- Dropout ---------------------------------------------------------------------------------------------------------

dropout = dict(dropout=True, packed=False)


@code(**dropout, **spread)
class dropout_missing(Mistake):
    def dropped(self, s):
        return None


@code(**dropout, **spread)
class dropout_unscaled(Mistake):
    """Dropout: elements that are kept are not divided by 1 - dropout_p."""

    def dropped(self, s):
        return super().dropped(s) * self.float(1 - self.p.options['dropout_p'])


@code(**dropout, **spread)
class dropout_scaled_twice(Mistake):
    def dropped(self, s):
        return super().dropped(s) / self.float(1 - self.p.options['dropout_p'])


@code('0', '1', '42', '+1', '-1', **dropout, **spread)
class dropout_other_seed(Mistake):
    def seed(self):
        form = self.form(dropout_other_seed)
        return super().seed() + int(form) if form[0] in '+-' else int(form)


@code(same_length=True, Sq=lambda r: int(r.integers(5, 130)), seqlens_k=False, seqlens_q=False, **dropout)
class dropout_mask_transposed(Mistake):
    """Dropout: the random mask is used with row and column exchanged."""

    def kept(self, s):
        p = self.p.options['dropout_p']
        return np.stack([oracle.kept(self.seed(), s.b * s.H + h, s.Sk, s.Sq, p).T for h in range(s.H)])


# ---- Backward --------------------------------------------------------------------------------------------------------

back = dict(back=True, dtype=lambda r: str(r.choice(('float32', 'float16', 'bfloat16'))))


@code(**back, **spread)
class delta_missing(Mistake):
    def delta(self, s, dout, out):
        return np.zeros_like(super().delta(s, dout, out))


@code(dlse=True, **back, **spread)
class dlse_missing(Mistake):
    def delta(self, s, dout, out):
        return (dout * out).sum(-1)


@code(**back, **spread)
class scale_missing_in_dq(Mistake):
    def scale_of_dq(self):
        return 1.0


@code(**back, **spread)
class scale_missing_in_dk(Mistake):
    def scale_of_dk(self):
        return 1.0


@code(**back, **spread)
class scale_twice_in_dq(Mistake):
    def scale_of_dq(self):
        return super().scale_of_dq() ** 2


@code(**back, **spread)
class scale_twice_in_dk(Mistake):
    def scale_of_dk(self):
        return super().scale_of_dk() ** 2


@code(**back, **spread)
class dv_of_unnormalized_p(Mistake):
    """dv is summed from exp(score - maximum), which is not divided by the row's sum."""

    def P_of_dv(self, s, P):
        safe = np.where(s.m == -np.inf, 0, s.m)[..., None]
        return np.exp(s.z - safe)


@code(softcap=True, softcap_is=lambda r: float(r.uniform(0.5, 3)), size=lambda r: float(r.choice((2.0, 3.0))), **back, **spread)
class softcap_derivative_missing(Mistake):
    def capped_derivative(self, s, dZ):
        return dZ


@code(*TILES, packed=False, seqlens_k=False, Sk=many_keys, **back)
class dq_last_tile_only(Tiled):
    """Each tile of keys overwrites dq instead of adding to it, so only the last tile's dq remains."""

    def add_to_dq(self, dq, more, last):
        return more


OF_TILES = ('not_rescaled', 'last_tile_dropped', 'first_tile_dropped', 'tail_unmasked', 'dq_last_tile_only')
# The ten most frequent mistakes; evidence.py plants pairs of these.
FREQUENT = ('layout_v', 'alignment', 'scale_missing', 'causal_missing', 'padding_attended', 'heads_interleaved', 'lse_base2',
            'window_off_by_one', 'bias_missing', 'dropout_unscaled')
