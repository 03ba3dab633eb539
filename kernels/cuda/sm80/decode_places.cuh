/* decode_places.cuh: which keys a split of decode.cu has (a split is a part of a sequence's keys), which splits a block
 * computes, and how two partial results are combined. */
#ifndef ATTN_SM80_DECODE_PLACES_CUH
#define ATTN_SM80_DECODE_PLACES_CUH

#include "decode.h"
#include "tile.cuh"

/* How blocks find their splits (parts of a sequence's keys). Each batch row and key/value head has `walkers` blocks,
 * one for every `splits_per_block` splits. If decode_stacks() runs first, a block instead takes every `walkers`-th
 * split, and skips the splits that decode_stacks() has computed. In a packed problem, the blocks of a key/value head
 * are numbered across all sequences: those of sequence b have the numbers from cu_k[b] / unit + extra * b on. Some
 * blocks may have no work. */
struct decode_plan {
    int splits, splits_per_block;
    int walkers; /* number of blocks that share the splits of a batch row and key/value head */
    int unit, extra;
    /* whether blocks can find their splits without reading device memory that the previous kernel may still write */
    bool early;
    /* whether decode_few() computes the problem, with a grid of Hk x walkers x B blocks */
    bool few;
    /* whether this kernel may read its inputs before the stream's previous kernel ends (only if `few`): true if that
     * kernel writes nothing that this one reads */
    bool ahead;
    bool float8;
    bool wide_heads;
    bool options;
    /* the most sequences whose rows decode_stacks() computes together; 0: decode_stacks() is not launched */
    int stack;
    /* number of rows of partial results per key/value head in packed problems; the rows of sequence b begin at row
     * cu_k[b] / KEYS_A_ROW */
    int64_t head_rows;
    float *O;   /* O of the partial results, in rows of D floats; NULL: no sequence has more than one split */
    float2 *ml; /* maximum m in base 2 (x) and sum l (y) of each row of partial results */
};

namespace {

enum {
    /* if a sequence has at most this many rows (queries times heads of a group), all warps of a block compute the same
     * 16 rows */
    NARROW = 16,
    FEW_ROWS = 8 /* decode_few() computes sequences of up to this many rows */
};

/* ---- Where the splits of a sequence begin and end ---------------------------------------------------------------- */

/* Every split begins at a multiple of this many keys, which is a multiple of BN (keys per tile) of every shape. */
const int SPLIT_ALIGN = 128;

/* With float8 keys, a split of a sequence with more than LONG_FLOAT8 keys has up to MOST_FLOAT8 keys, if the sequence
 * has at most NARROW rows. */
enum { LONG_FLOAT8 = 48 * 1024, MOST_FLOAT8 = 1408 };

/* Returns the number of keys of a split. Long splits need fewer partial results; short splits keep all multiprocessors
 * busy to the end (eight key/value heads with sixteen splits each fill a GPU). Splits are longer for many rows (`wide`)
 * and for many float8 keys, and shorter for head sizes above 256. */
template <typename I> __host__ __device__ inline I split_keys(I keys, bool wide, bool float8, bool wide_heads)
{
    const I least = wide ? 512 : 128, /* a power of two, because `& -least` below rounds to multiples of `least` */
        most = wide_heads                     ? 512
               : wide                         ? 2048
               : float8 && keys > LONG_FLOAT8 ? MOST_FLOAT8
                                              : 1024;
    const I even = ((keys + 15) / 16 + least - 1) & -least;
    return even < least ? least : even > most ? most : even;
}

/* Returns the most splits of any sequence of up to `keys` keys. More keys may have fewer splits: 2048 keys have 16
 * splits of 128 keys, but 2049 keys have 9 splits of 256 keys. */
inline int64_t most_splits(int64_t keys, bool wide, bool float8, bool wide_heads)
{
    const int64_t least = wide ? 512 : 128, most = wide_heads ? 512 : wide ? 2048 : 1024;
    if (keys <= 16 * least) return attn_max64(1, attn_tiles(keys, least));
    if (float8 && !wide && keys > LONG_FLOAT8) return attn_max64(LONG_FLOAT8 / most, attn_tiles(keys, MOST_FLOAT8));
    return attn_max64(16, attn_tiles(keys, most));
}

typedef decode_plan plan;

/* A packed problem's workspace has one row of partial results for every KEYS_A_ROW keys. This is enough: a sequence
 * with n > 1 splits has at least n * 64 keys (up to 16 rows) or n * 256 keys (17 to 64 rows), see split_keys(). */
const int KEYS_A_ROW = 4;

struct group_place {
    head_args x;
    int rows; /* number of rows (queries times heads of the group); 0: another kernel computes this sequence */
    /* the rows see keys from `first` to `last` - 1, which are divided into `splits` (at least 1) splits of `length`
     * keys */
    int first, last, length, splits;
    /* number of the sequence's first row of partial results in the workspace, where all rows of split 0 come first,
     * then those of split 1, ... */
    int64_t saved;
};

DEVICE group_place group_place_of(const cuda_args &a, const plan &p, int b, int hk)
{
    const attn_geometry &g = a.g;
    group_place place;
    place.x = head_args_of(a, b, (int64_t)hk * g.group);
    const attn_sequence &s = place.x.s;
    const int64_t rows = s.Sq * g.group;
    place.rows = rows <= DECODE_ROWS ? (int)rows : 0;
    const attn_range seen = attn_keys_of_rows(&g, &s, 0, s.Sq);
    const int64_t first = seen.lo / SPLIT_ALIGN * SPLIT_ALIGN,
                  length = split_keys(seen.hi - first, rows > NARROW, p.float8, p.wide_heads);
    place.first = (int)first;
    place.last = (int)seen.hi;
    place.length = (int)length;
    place.splits = seen.hi > seen.lo ? (int)((uint32_t)(seen.hi - first + length - 1) / (uint32_t)length) : 1;
    place.saved = g.dims.packed ? hk * p.head_rows + g.cu_k[b] / KEYS_A_ROW
                                : ((int64_t)b * g.dims.Hk + hk) * p.splits * rows;
    return place;
}

/* Like group_place_of(), but only for problems that are not packed, have at most FEW_ROWS rows, and have no options
 * (softcap, bias, masks, ...). This function computes in 32 bits to be fast, because a kernel's first copies wait for
 * the result. */
DEVICE group_place few_place_of(const cuda_args &a, const plan &p, int b, int hk)
{
    const attn_geometry &g = a.g;
    /* limits a window to numbers that fit in 32 bits; this changes no result for lengths up to 2^30 */
    const int64_t far = INT64_C(1) << 30;
    const int group = (int)g.group, Sq = (int)g.dims.Sq, Sk = g.seqlens_k ? g.seqlens_k[b] : (int)g.dims.Sk,
              align = g.top_left ? 0 : Sk - Sq, left = (int)attn_min64(g.left, far),
              right = (int)attn_min64(g.right, far);
    group_place place;
    head_args &x = place.x;
    x.b = b, x.h = hk * group, x.hk = hk;
    x.s = { 0, 0, Sq, Sk };
    x.scale = (float)g.scale * scale_of(g.view[ATTN_T_q_scale], b, hk) * scale_of(g.view[ATTN_T_k_scale], b, hk);
    x.v_scale = scale_of(g.view[ATTN_T_v_scale], b, hk);
    x.slope = 0;
    const int lo = min(max(align - left, 0), Sk), hi = right >= Sk - align - Sq ? Sk : max(align + Sq + right, lo);
    place.rows = Sq * group;
    place.first = lo & -SPLIT_ALIGN;
    place.last = hi;
    const int keys = hi - place.first;
    place.length = (int)split_keys(keys, false, p.float8, false);
    place.splits = hi > lo ? (int)((uint32_t)(keys + place.length - 1) / (uint32_t)place.length) : 1;
    place.saved = ((int64_t)b * g.dims.Hk + hk) * p.splits * place.rows;
    return place;
}

/* ---- Sequences with a common prefix -------------------------------------------------------------------------------
 *
 * Neighbouring sequences whose KV caches are forks of one cache have their first keys in the same pages
 * (attn_problem::prefix_keys). Two sequences share a split (a part of the keys) if the split lies in those pages,
 * begins and ends at the same keys in both sequences, and is visible to every row. decode_stacks() reads a shared split
 * once. */
struct split_range {
    int first, end;
    DEVICE bool has(int index) const { return index >= first && index < end; }
};

DEVICE split_range splits_in_common(const cuda_args &a, const group_place &before, const group_place &place)
{
    const attn_geometry &g = a.g;
    const attn_range open = attn_keys_of_all_rows(&g, &place.x.s, 0, place.x.s.Sq),
                     open_before = attn_keys_of_all_rows(&g, &before.x.s, 0, before.x.s.Sq);
    const int64_t lo = attn_max64(open.lo, open_before.lo) - place.first,
                  hi = attn_min64(g.prefix_keys[place.x.b], attn_min64(open.hi, open_before.hi)) - place.first;
    if (before.first != place.first || before.length != place.length || before.splits == 1 || place.splits == 1 ||
        hi <= 0)
        return { 0, 0 };
    return { lo > 0 ? (int)attn_tiles(lo, place.length) : 0, (int)(hi / place.length) };
}

/* Returns the splits that sequences b and b - 1 share. Both must be in the same stack (sequences that are computed
 * together); stacks begin at multiples of p.stack. */
DEVICE split_range splits_shared(const cuda_args &a, const plan &p, int b, int hk)
{
    if (b >= a.g.dims.B || b % p.stack == 0) return { 0, 0 };
    return splits_in_common(a, group_place_of(a, p, b - 1, hk), group_place_of(a, p, b, hk));
}

/* ---- Combining two partial results ------------------------------------------------------------------------------- */

/* Combines two partial results (m, l, O), relative to the larger of their maxima m. Both the kernels that compute
 * splits and combine_splits() do this, and must compute the same bits. The operations are therefore intrinsics, whose
 * rounding the compiler cannot change. */
struct fold {
    float m, keep, add;
    DEVICE fold(float m_before, float m_next)
    {
        m = fmaxf(m_before, m_next);
        /* m is -inf until the row has seen a key; -inf - -inf would be NaN */
        const float base = m == -CUDART_INF_F ? 0 : m;
        keep = exp2_fast(__fsub_rn(m_before, base));
        add = exp2_fast(__fsub_rn(m_next, base));
    }
    DEVICE float operator()(float before, float next) const { return fmaf(add, next, __fmul_rn(keep, before)); }
    DEVICE float4 operator()(const float4 &x, const float4 &y) const
    {
        return make_float4((*this)(x.x, y.x), (*this)(x.y, y.y), (*this)(x.z, y.z), (*this)(x.w, y.w));
    }
};

} // namespace

#endif
