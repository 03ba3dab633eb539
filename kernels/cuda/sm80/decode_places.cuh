/* decode_places.cuh: functions for the splits of decode.cu (a split is a part of a sequence's keys). They find which
 * keys a split has and which splits a block computes, and combine two partial results into one. */
#ifndef ATTN_SM80_DECODE_PLACES_CUH
#define ATTN_SM80_DECODE_PLACES_CUH

#include "decode.h"
#include "tile.cuh"

/* Says how thread blocks find their splits. In a problem that is not packed, each batch row and key/value head has
 * `walkers` blocks: one for every `splits_per_block` splits. With stacks (decode_stacks()), each block computes every
 * `walkers`-th of the splits that decode_stacks() has not computed. In a packed problem, sequence b has the blocks from
 * number cu_k[b] / unit + extra * b on, and a block finds its sequence by bisection. A sequence may have more blocks
 * than it needs, so some blocks have no work. */
struct decode_plan {
    int splits, splits_per_block; /* splits_per_block: number of splits that a block computes, 1 or SPLIT_GROUP */
    int walkers;                  /* number of thread blocks of each batch row and key/value head */
    int unit, extra;
    /* true: the kernel's arguments alone determine the splits; false: the splits also depend on device memory, which
     * the previous kernel may still write */
    bool early;
    /* true: every sequence has at most FEW_ROWS rows, and decode_few() computes them, with a grid of Hk x walkers x B
     * blocks */
    bool few;
    /* true: apart from the workspace, the stream's previous kernel writes nothing that this kernel reads, so this
     * kernel may read its inputs early; only possible if `few` is true */
    bool ahead;
    bool float8;     /* true: keys and values are float8, and the kernel variant for float8 is launched */
    bool wide_heads; /* true: D or Dv is above 256 */
    bool options;    /* true: the problem has options (softcap, bias, masks, ...), so scores come from in_base_2() */
    /* the largest number of sequences whose rows decode_stacks() computes together; 0: decode_stacks() is not
     * launched */
    int stack;
    /* For packed problems: number of rows of partial results per key/value head. The rows of sequence b begin at index
     * cu_k[b] / KEYS_A_ROW. */
    int64_t head_rows;
    float *O;   /* O of each partial result, in rows of D numbers; NULL if no sequence has more than one split */
    float2 *ml; /* for each row of the partial results: the maximum m in base 2 (as x) and the sum l (as y) */
};

namespace {

enum {
    /* in a sequence of up to this many rows (queries times heads of a group), all warps of a block compute the same 16
     * rows */
    NARROW = 16,
    FEW_ROWS = 8 /* decode_few() computes sequences of up to this many rows (queries times heads of a group) */
};

/* ---- Where the splits of a sequence begin and end ---------------------------------------------------------------- */

/* Every split begins at a multiple of this many keys. The number is a multiple of BN (keys per tile) of every shape. */
const int SPLIT_ALIGN = 128;

/* If keys are float8 and a sequence has more than LONG_FLOAT8 keys, its splits have up to MOST_FLOAT8 keys, unless a
 * block has many rows. */
enum { LONG_FLOAT8 = 48 * 1024, MOST_FLOAT8 = 1408 };

/* Returns the number of keys of a split. Splits must be long enough that writing and combining partial results takes
 * little time, and short enough that all multiprocessors are busy to the end: eight key/value heads with sixteen splits
 * each fill a GPU. If blocks have many rows (`wide`), splits are longer, because partial results are larger. If keys
 * are float8, splits of long sequences are longer, because reading them takes half as long. For head sizes above 256
 * splits are shorter, because their keys are larger. */
template <typename I> __host__ __device__ inline I split_keys(I keys, bool wide, bool float8, bool wide_heads)
{
    const I least = wide ? 512 : 128, /* the smallest number of keys of a split; a power of two, because `& -least`
                                       * rounds to multiples of `least` */
        most = wide_heads                     ? 512
               : wide                         ? 2048
               : float8 && keys > LONG_FLOAT8 ? MOST_FLOAT8
                                              : 1024;
    const I even = ((keys + 15) / 16 + least - 1) & -least;
    return even < least ? least : even > most ? most : even;
}

/* Returns the largest number of splits that a sequence of up to `keys` keys may have. A sequence with more keys may
 * have fewer splits: 2048 keys have 16 splits of 128 keys, but 2049 keys have 9 splits of 256. */
inline int64_t most_splits(int64_t keys, bool wide, bool float8, bool wide_heads)
{
    const int64_t least = wide ? 512 : 128, most = wide_heads ? 512 : wide ? 2048 : 1024;
    if (keys <= 16 * least) return attn_max64(1, attn_tiles(keys, least));
    if (float8 && !wide && keys > LONG_FLOAT8) return attn_max64(LONG_FLOAT8 / most, attn_tiles(keys, MOST_FLOAT8));
    return attn_max64(16, attn_tiles(keys, most));
}

typedef decode_plan plan;

/* In a packed problem the workspace has one row of partial results for every KEYS_A_ROW keys. This is enough: a
 * sequence with n splits (n > 1) has at least n * 64 keys if it has up to 16 rows, and at least n * 256 keys if it has
 * 17 to 64 rows (see split_keys()). */
const int KEYS_A_ROW = 4;

/* What a block computes: one key/value head of a sequence, for all query heads that share this key/value head. */
struct group_place {
    head_args x; /* arguments of score() for the first query head of the group */
    int rows;    /* number of rows (queries times heads of the group); 0: a kernel of another file computes this
                  * sequence */
    /* all keys that rows see lie from `first` to `last` - 1; these keys are divided into `splits` (at least 1) splits
     * of `length` keys */
    int first, last, length, splits;
    /* index of the sequence's first row of partial results in the workspace; all rows of split 0 come first, then all
     * rows of split 1, and so on */
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

/* Like group_place_of(), but only for problems that are not packed and have at most FEW_ROWS rows. A kernel's first
 * copies wait for the result, so the function computes in 32 bits to be fast. It does not set members that only options
 * need. */
DEVICE group_place few_place_of(const cuda_args &a, const plan &p, int b, int hk)
{
    const attn_geometry &g = a.g;
    /* a window is clamped to this many keys to fit in 32 bits, which changes no result for lengths up to 2^30 */
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
 * Neighbouring sequences of a batch have their first keys in the same pages if their KV caches are forks of one cache
 * (attn_problem::prefix_keys). They share a split (a part of the keys that one block computes) under three conditions:
 * it lies wholly in those pages, it begins and ends at the same keys in each sequence, and every row sees all its keys.
 * decode_stacks() reads the keys of a shared split once for all of these sequences. Computing sequences together saves
 * time and changes no bit of a result. */
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

/* Returns the splits that sequences b and b - 1 share in a stack, a group of sequences whose common keys are read once.
 * Stacks begin at multiples of p.stack. */
DEVICE split_range splits_shared(const cuda_args &a, const plan &p, int b, int hk)
{
    if (b >= a.g.dims.B || b % p.stack == 0) return { 0, 0 };
    return splits_in_common(a, group_place_of(a, p, b - 1, hk), group_place_of(a, p, b, hk));
}

/* ---- Combining two partial results ------------------------------------------------------------------------------- */

/* Combines two partial results into one, relative to the larger of their maxima. Two kernels use this struct and must
 * compute the same bits, so its operations are intrinsics, whose rounding the compiler cannot change. */
struct fold {
    float m, keep, add;
    DEVICE fold(float m_before, float m_next)
    {
        m = fmaxf(m_before, m_next);
        /* m is -inf until the row has seen a key; 0 then replaces m, because -inf - -inf would be NaN */
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
