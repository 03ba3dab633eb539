/* latent_plan.cuh: what the kernels of latent.cu share: tile sizes, how a sequence's keys are divided into splits,
 * which splits a block computes, and how two partial results are combined. */
#ifndef ATTN_SM90_LATENT_PLAN_CUH
#define ATTN_SM90_LATENT_PLAN_CUH

#include "kernels/cuda/sm90/layer/epilogue.cuh"

namespace {

/* ---- The sizes of tiles ------------------------------------------------------------------------------------------ */

enum { D = 576, DV = 512, BM = 64, BN = 64, HALF = DV / 2 };
/* BOXES: number of boxes (BN keys by 64 columns) in a tile of keys. BOX: number of elements in a box. */
enum { BOXES = D / 64, BOX = BN * 64 };
enum { MOST_ROWS = 1024 };
enum { SPLIT_GROUP = 4 };

/* ---- The plan: the numbers of a problem that the kernels read ---------------------------------------------------- */

struct plan {
    lazy_reference reference;
    results to;
    /* tiles: number of tiles of 64 rows per sequence. units: the most units of a sequence (a unit is a split, or a
     * group of splits). */
    int tiles, units;
    /* Whether a block computes a group of splits, one after the other, instead of one split. A "unit" is what a block
     * computes: a group or a split. */
    int walks;
    float4 *O;  /* [unit][piece_of()]: partial sums O, 64 rows of 512 columns for each unit (split or split group) */
    float2 *ml; /* for each row of O: its reference m (x), which was subtracted from its scores before exp2, and its
                     * sum l (y) */
    uint8_t *flags; /* two flags per row of out: nonzero if the row's left or right half must be recomputed */
};

/* Returns the least number of keys of a split (a part of a sequence's keys). With few rows (not `wide`), longer splits
 * would give too few blocks. */
__host__ __device__ inline int64_t least_split_keys(bool wide)
{
    return wide ? 1024 : 512;
}

/* Returns the number of keys per split: least_split_keys(), and up to twice as many in long sequences. */
__host__ __device__ inline int64_t split_keys(int64_t keys, bool wide)
{
    const int64_t least = least_split_keys(wide);
    return attn_clamp64(attn_tiles(keys, SPLIT_GROUP * 256) * 256, least, 2 * least);
}

/* Returns the number of splits, which may shrink when keys are added: with few rows, 2048 keys have 4 splits, 2049 keys
 * 3. */
__host__ __device__ inline int64_t splits_of(int64_t keys, bool wide)
{
    return attn_max64(1, attn_tiles(keys, split_keys(keys, wide)));
}

/* Returns the largest number of splits that a sequence of at most `keys` keys can have; a shorter sequence may have
 * more splits than a longer one. */
inline int64_t most_splits_of(int64_t keys, bool wide)
{
    const int64_t group_of_shortest = SPLIT_GROUP * least_split_keys(wide);
    return attn_max64(splits_of(keys, wide), splits_of(attn_min64(keys, group_of_shortest), wide));
}

struct sequence_place {
    attn_sequence s;
    int rows;
    /* The rows see keys `first` (rounded down to the beginning of a tile) to `last` - 1, in `splits` splits of `length`
     * keys. */
    int first, last, length, splits;
    DEVICE bool ends_in_block(const plan &p) const { return splits == 1 || (p.walks && splits <= SPLIT_GROUP); }
};

DEVICE sequence_place sequence_place_of(const attn_geometry &g, int b)
{
    sequence_place y;
    y.s = attn_sequence_of(&g, b);
    y.rows = (int)(y.s.Sq * g.group);
    const attn_range seen = attn_keys_of_rows(&g, &y.s, 0, y.s.Sq);
    const int64_t first = seen.lo / BN * BN, keys = seen.hi > seen.lo ? seen.hi - first : 0;
    y.first = (int)first;
    y.last = (int)(first + keys);
    y.length = (int)split_keys(keys, y.rows > BM);
    y.splits = (int)splits_of(keys, y.rows > BM);
    return y;
}

/* What a block computes: rows from r0 on, over splits (parts of the keys) `begin` to `end` - 1. */
struct block_place {
    sequence_place q;
    int b, r0, begin, end;
    int open_lo, open_hi; /* all rows of the sequence see keys open_lo to open_hi - 1 */
    int64_t unit;         /* index in the workspace of the unit (split or split group) that the block computes */

    DEVICE int first_key(int split) const { return q.first + split * q.length; }
    DEVICE int last_key(int split) const { return min(first_key(split) + q.length, q.last); }
    DEVICE int tiles(int split) const { return (last_key(split) - first_key(split) + BN - 1) / BN; }
};

DEVICE block_place block_place_of(const attn_geometry &g, const plan &p, int block)
{
    block_place y;
    const int tile = block % p.tiles, rest = block / p.tiles, u = rest % p.units, each = p.walks ? SPLIT_GROUP : 1;
    y.b = rest / p.units;
    y.q = sequence_place_of(g, y.b);
    y.r0 = tile * BM;
    y.begin = u * each;
    y.end = min(y.begin + each, y.q.splits);
    y.unit = ((int64_t)y.b * p.tiles + tile) * p.units + u;
    const attn_range open = attn_keys_of_all_rows(&g, &y.q.s, 0, y.q.s.Sq);
    y.open_lo = (int)open.lo;
    y.open_hi = (int)attn_max64(open.lo, open.hi);
    return y;
}

/* The layout of the result of a split or a split group. A row has pieces of four floats: piece n has columns c, c + 1,
 * c + 8 and c + 9, where c = first_column(n). Pieces lie in the order of the threads, so that a warp writes whole cache
 * lines. */
enum { PIECES_OF_ROW = DV / 4, UNIT = BM * PIECES_OF_ROW };
DEVICE int first_column(int n)
{
    return n / 4 * 16 + n % 4 * 2;
}
DEVICE int piece_of(int row, int n)
{
    return (n / 4 * 2 + row % 16 / 8) * 128 + row / 16 * 32 + row % 8 * 4 + n % 4;
}

/* ---- Combining two partial results ------------------------------------------------------------------------------- */

/* Combines two partial results of a row. Each operation is an intrinsic, so that the two kernels that combine results
 * (latent_tiles and combine_latent) get the same bits. */
struct fold {
    float m, keep, add;
    DEVICE fold(float m_before, float m_next)
    {
        m = fmaxf(m_before, m_next);
        /* m is -inf if no key was seen yet; -inf - -inf would be NaN */
        const float base = m == -CUDART_INF_F ? 0 : m;
        keep = exp2_fast(__fsub_rn(m_before, base));
        add = exp2_fast(__fsub_rn(m_next, base));
    }
    DEVICE float operator()(float before, float next) const { return fmaf(add, next, __fmul_rn(keep, before)); }
};

/* Returns whether tensor cores have computed a row correctly, given its maximum m and sum l. `seen`: the row sees a
 * key. */
DEVICE bool is_sound(float m, float l, bool seen)
{
    return l - l == 0 && (m == -CUDART_INF_F || fabsf(m) < SCORE_MOST) && (l != 0 || !seen);
}
DEVICE float factor_of(float l)
{
    return l == 0 ? 0 : 1 / l;
}
DEVICE float lse_of(float m, float l)
{
    return l == 0 ? -CUDART_INF_F : m * LN2 + logf(l);
}

} // namespace

#endif
