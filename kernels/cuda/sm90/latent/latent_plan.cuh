/* latent_plan.cuh: the plan shared by the blocks and the combine of latent.cu: the tiles, where a
 * sequence's keys are cut into splits, which splits a block takes, and how two partial results
 * become one. */
#ifndef ATTN_SM90_LATENT_PLAN_CUH
#define ATTN_SM90_LATENT_PLAN_CUH

#include "kernels/cuda/sm90/layer/epilogue.cuh"

namespace {

/* ---- Shapes ------------------------------------------------------------------------------------------------------ */

enum { D = 576, DV = 512, BM = 64, BN = 64, HALF = DV / 2 };
enum { BOXES = D / 64, BOX = BN * 64 }; /* of 64 columns; elements of one */
enum { MOST_ROWS = 1024 };
enum { SPLIT_GROUP = 4 };

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

struct plan {
    lazy_reference reference;
    results to;
    int tiles, units; /* of 64 rows; the most units that a sequence may have: splits, or split groups */
    int walks;        /* a unit is a split group */
    float4 *O;        /* sums of units: 64 rows of 512 columns, as piece_of() has them */
    float2 *ml;       /* reference in base 2 and l of each of those rows */
    uint8_t *flags;   /* two per row: a half of what its block wrote to out is not to be trusted */
};

/* Keys of a split. Long sequences have as many splits as fill a GPU; with fewer rows there are fewer blocks, and the
 * sums of a split are less to write. */
__host__ __device__ inline int64_t split_keys(int64_t keys, bool wide)
{
    const int64_t least = wide ? 1024 : 512, most = wide ? 2048 : 1024;
    return attn_clamp64(attn_tiles(keys, SPLIT_GROUP * 256) * 256, least, most);
}

/* Grows with the keys. */
__host__ __device__ inline int64_t splits_of(int64_t keys, bool wide)
{
    return attn_max64(1, attn_tiles(keys, split_keys(keys, wide)));
}

/* The splits of a sequence. */
struct sequence_place {
    attn_sequence s;
    int rows;
    int first, last, length, splits; /* keys that any row sees; of a split */
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

/* What a block is to do: rows from r0 on, splits [begin, end). */
struct block_place {
    sequence_place q;
    int b, r0, begin, end;
    int open_lo, open_hi; /* keys that all rows of the sequence see */
    int64_t unit;         /* its place in the workspace */

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

/* A row of a unit's sums is PIECES_OF_ROW of four floats: of columns first_column(n), the next one, and those 8 further
 * on, as a thread of a product has them. They lie in the order of the threads, so that a warp writes whole lines. */
enum { PIECES_OF_ROW = DV / 4, UNIT = BM * PIECES_OF_ROW };
DEVICE int first_column(int n)
{
    return n / 4 * 16 + n % 4 * 2;
}
DEVICE int piece_of(int row, int n)
{
    return (n / 4 * 2 + row % 16 / 8) * 128 + row / 16 * 32 + row % 8 * 4 + n % 4;
}

/* ---- Two partial results become one ------------------------------------------------------------------------------ */

/* Two kernels compute this and must get the same bits, so every rounding is written explicitly. */
struct fold {
    float m, keep, add;
    DEVICE fold(float m_before, float m_next)
    {
        m = fmaxf(m_before, m_next);
        const float base = m == -CUDART_INF_F ? 0 : m; /* nothing seen yet: -inf - -inf would be NaN */
        keep = exp2_fast(__fsub_rn(m_before, base));
        add = exp2_fast(__fsub_rn(m_next, base));
    }
    DEVICE float operator()(float before, float next) const { return fmaf(add, next, __fmul_rn(keep, before)); }
};

/* Can a row's sum be trusted? `seen`: does the row see a key? */
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
