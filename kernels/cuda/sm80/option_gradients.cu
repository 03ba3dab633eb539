/* option_gradients.cu: computes dbias and dalibi_slopes of 16-bit inputs on tensor cores (mma.sync), after other
 * kernels have computed dq, dk and dv. The kernel recomputes S = Q K^T, dP = dO V^T, P = exp(S with all options - lse)
 * and dZ = P (dP - delta), tile by tile. There are four kinds of launches:
 *
 * EACH_PAIR: dbias is not shared, and each tile of dZ is a tile of dbias.
 * OVER_HEADS: batch rows or heads share dbias; a block adds up the dZ of all of them for one tile of dbias.
 * OVER_QUERIES: all queries share dbias; a block adds up the dZ of all queries for 128 keys.
 * OF_ROWS: for dalibi_slopes, a block adds up dZ times distance for each of 128 queries; then head_sums.cu runs.
 *
 * Every sum has a fixed order. If dbias has few tiles, several blocks share the terms of a tile, and add_parts adds up
 * their sums. A block has 8 warps and a tile of 128 queries by 128 keys, which arrive in chunks of 64 channels. If a
 * score is not finite, or P cannot be computed from lse in base 2, careful_block() computes the tile pair by pair. */
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/pair.cuh"
#include "kernels/cuda/simple/head_sums.h"
#include "kernels/cuda/simple/simple.h"
#include "backward_common.cuh"
#include "option_gradients.h"

namespace {

enum sum_kind { EACH_PAIR, OVER_HEADS, OVER_QUERIES, OF_ROWS };

enum {
    SIDE = 128, /* number of queries, and of keys, of a tile */
    CHUNK = 64, /* number of channels (columns of q, k, v, dout) of a chunk */
    THREADS = 256,
    STAGES = 3, /* number of chunks in shared memory: one is in use, the others are being loaded */
    MT = 2,     /* a warp computes MT blocks of 16 queries x NT blocks of 8 keys */
    NT = 8,
    PIECE = SIDE * CHUNK, /* number of elements of a chunk of one tensor */
    BLOCK = 16,           /* careful_block() computes BLOCK x BLOCK pairs at a time */
    LINE = BLOCK + 2
};

struct work {
    saved s;
    attn_view to; /* where sums are written: to dbias, or to the workspace, where each block has its own sums */
    /* number of elements from one block's sums to the next block's, if several blocks share a tile */
    int64_t part_elements;
    int batches, heads; /* an element of dbias is a sum over this many batch rows and heads */
    int q_tiles, key_tiles;
    int parts; /* number of blocks that share the terms of an element of dbias */
    /* whether Q and dO stay in shared memory while the block visits tiles of keys */
    bool resident;
    bool bias_stays; /* whether the block's tile of the bias stays in shared memory */
    bool given;
    /* bias_in_pairs: whether one instruction can read elements 2 n and 2 n + 1 of a row of the bias; dbias_in_pairs:
     * whether one instruction can write them in a row of dbias */
    bool bias_in_pairs, dbias_in_pairs;
};

struct pair_tile_place {
    int b, h, i0, j0;
};

/* ---- Which tiles a block visits ---------------------------------------------------------------------------------- */

template <sum_kind KIND> struct visits {
    int b, h, i0, j0, part, begin, end;
    int heads, q_tiles;

    DEVICE pair_tile_place place(int n) const
    {
        if (KIND == EACH_PAIR || KIND == OF_ROWS) return { b, h, i0, n * SIDE };
        const int tile = KIND == OVER_QUERIES ? n % q_tiles : 0, term = KIND == OVER_QUERIES ? n / q_tiles : n;
        return { b + term / heads, h + term % heads, KIND == OVER_QUERIES ? tile * SIDE : i0, j0 };
    }

    /* Returns the first tile from n on with a pair that causal, window and lengths leave visible, or `end` if there is
     * none. */
    DEVICE int visible_from(const attn_geometry &g, int n) const
    {
        const auto is_visible = [&](const pair_tile_place &at) {
            const attn_sequence s = attn_sequence_of(&g, at.b);
            const attn_range keys = attn_keys_of_rows(&g, &s, at.i0, attn_min64(at.i0 + SIDE, s.Sq));
            return keys.lo < at.j0 + SIDE && keys.hi > at.j0 && keys.lo < keys.hi;
        };
        if constexpr (KIND == OVER_HEADS || KIND == OVER_QUERIES)
            while (n < end && !is_visible(place(n))) n++;
        return n;
    }
};

template <sum_kind KIND> DEVICE void visit_keys(visits<KIND> &v, const attn_geometry &g, const attn_sequence &s)
{
    const attn_range keys = attn_keys_of_rows(&g, &s, v.i0, attn_min64(v.i0 + SIDE, s.Sq));
    const bool any = keys.lo < keys.hi;
    v.begin = any ? (int)(keys.lo / SIDE) : 0;
    v.end = any ? (int)attn_tiles(keys.hi, SIDE) : 0;
}

template <sum_kind KIND> DEVICE visits<KIND> visits_of(const cuda_args &a, const work &w)
{
    const int index = a.first_tile + (int)blockIdx.x;
    visits<KIND> v = {};
    v.heads = w.heads, v.q_tiles = w.q_tiles;
    v.h = (int)blockIdx.y, v.b = (int)blockIdx.z;
    if (KIND == OF_ROWS) {
        const tile_place found = tile_place_of<SIDE>(a, blockIdx.x);
        v.b = (int)found.x.b, v.i0 = found.i0;
        visit_keys(v, a.g, found.x.s);
    } else if (KIND == EACH_PAIR) {
        v.i0 = index * SIDE;
        visit_keys(v, a.g, attn_sequence_of(&a.g, v.b));
    } else {
        const int cell = index / w.parts;
        const int64_t terms = (int64_t)w.batches * w.heads * (KIND == OVER_QUERIES ? w.q_tiles : 1);
        v.part = index % w.parts;
        v.i0 = KIND == OVER_QUERIES ? 0 : cell / w.key_tiles * SIDE;
        v.j0 = cell % w.key_tiles * SIDE;
        v.begin = (int)(terms * v.part / w.parts);
        v.end = (int)(terms * (v.part + 1) / w.parts);
    }
    return v;
}

/* ---- Loading chunks to shared memory ----------------------------------------------------------------------------- */

/* Where chunks (64 channels of a tile) lie in shared memory. If `resident` is true: all chunks of Q and dO, then STAGES
 * buffers for K or V. If it is false: STAGES buffers, each for a chunk of K or V and one of Q or dO. */
struct chunks {
    uint16_t *memory;
    /* of_qk: number of chunks of Q (and of K) of a tile; all: number of chunks of Q and dO together */
    int of_qk, all;
    bool resident;

    DEVICE uint16_t *keys(int stage) const { return memory + (resident ? all + stage : stage * 2) * PIECE; }
    DEVICE uint16_t *queries(int stage, int chunk) const { return memory + (resident ? chunk : stage * 2 + 1) * PIECE; }
};

DEVICE void load_columns(const attn_view &view, int b, int64_t h, int64_t line, int64_t rows, int64_t width, int column,
                         uint16_t *to, int first)
{
    loader<CHUNK, THREADS> from(view, b, h, line, rows, width);
    from.data += column * 2;
    from.columns -= column;
    from.template load<SIDE>(to, first);
}

DEVICE void load_queries(const cuda_args &a, const pair_tile_place &at, const chunks &c, int chunk, int stage)
{
    const attn_geometry &g = a.g;
    const attn_sequence s = attn_sequence_of(&g, at.b);
    const bool of_qk = chunk < c.of_qk;
    load_columns(g.view[of_qk ? ATTN_T_q : ATTN_T_dout], at.b, at.h, s.q_start, s.Sq, of_qk ? g.dims.D : g.dims.Dv,
                 (of_qk ? chunk : chunk - c.of_qk) * CHUNK, c.queries(stage, chunk), at.i0);
}

DEVICE void load_keys(const cuda_args &a, const pair_tile_place &at, const chunks &c, int chunk, int stage)
{
    const attn_geometry &g = a.g;
    const attn_sequence s = attn_sequence_of(&g, at.b);
    const bool of_qk = chunk < c.of_qk;
    load_columns(g.view[of_qk ? ATTN_T_k : ATTN_T_v], at.b, key_head(a, at.h), s.k_start, s.Sk,
                 of_qk ? g.dims.D : g.dims.Dv, (of_qk ? chunk : chunk - c.of_qk) * CHUNK, c.keys(stage), at.j0);
}

/* The next chunk to load: chunk number `chunk` of tile n. */
template <sum_kind KIND> struct load_cursor {
    int n, chunk;

    DEVICE void load(const cuda_args &a, const visits<KIND> &v, const chunks &c, int stage)
    {
        if (n < v.end) {
            const pair_tile_place at = v.place(n);
            load_keys(a, at, c, chunk, stage);
            if (!c.resident) load_queries(a, at, c, chunk, stage);
            if (++chunk == c.all) chunk = 0, n = v.visible_from(a.g, n + 1);
        }
        cp_async_commit();
    }
    DEVICE void begin(const cuda_args &a, const visits<KIND> &v, const chunks &c, int first)
    {
        n = first, chunk = 0;
        for (int stage = 0; stage < STAGES - 1; stage++) load(a, v, c, stage);
    }
};

/* ---- Computing P and dZ (the gradient of scores after softcap) from scores --------------------------------------- */

/* The pairs of a query and a key whose gradients a warp computes. In a lane, element e of block (mt, nt) belongs to
 * query i + 16 mt + 8 (e / 2) and key j + 8 nt + e % 2. */
struct warp_pairs {
    head_args x;
    limits limit;
    int i, j;
};
typedef float pair_numbers[MT][NT][4];
typedef float row_numbers[MT][2];

/* Calls visit(mt, half, i) for each query i of the lane's pairs. In block mt of 16 rows, a lane has two rows, `half` =
 * 0 and `half` = 1. */
template <class F> DEVICE void for_queries(const warp_pairs &x, F visit)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) visit(mt, half, x.i + mt * 16 + half * 8);
}

DEVICE void load_row_numbers(const cuda_args &a, const saved &s, const warp_pairs &x, row_numbers &lse2,
                             row_numbers &delta)
{
    for_queries(x, [&](int mt, int half, int i) {
        const bool exists = i < x.x.s.Sq;
        lse2[mt][half] = exists ? lse_in_base_2(s.lse[lse_at(a, x.x, i)]) : CUDART_INF_F;
        delta[mt][half] = exists ? s.delta[lse_at(a, x.x, i)] : 0;
    });
}

/* Adds the bias to scores in base 2. IN_PAIRS: reads two neighbouring elements at once. */
template <attn_dtype DTYPE, bool IN_PAIRS>
DEVICE void add_bias_of(const cuda_args &a, const warp_pairs &x, pair_numbers &S)
{
    const attn_view &bias = a.g.view[ATTN_T_bias];
    for_queries(x, [&](int mt, int half, int i) {
        if (i >= x.x.s.Sq) return;
        const int64_t row = attn_at(&bias, x.x.b, x.x.h, i) + x.j;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float low = 0, high = 0;
            if (IN_PAIRS && x.j + nt * 8 < x.limit.Sk) {
                if (DTYPE == ATTN_F32) {
                    const float2 both = *(const float2 *)((const float *)bias.data + row + nt * 8);
                    low = both.x, high = both.y;
                } else {
                    const uint32_t both = *(const uint32_t *)((const uint16_t *)bias.data + row + nt * 8);
                    const uint16_t halves[2] = { (uint16_t)both, (uint16_t)(both >> 16) };
                    low = load_float(DTYPE, halves, 0), high = load_float(DTYPE, halves, 1);
                }
            } else {
                if (x.j + nt * 8 < x.limit.Sk) low = load_float(DTYPE, bias.data, row + nt * 8);
                if (x.j + nt * 8 + 1 < x.limit.Sk) high = load_float(DTYPE, bias.data, row + nt * 8 + 1);
            }
            S[mt][nt][half * 2] = fmaf(low, LOG2E, S[mt][nt][half * 2]);
            S[mt][nt][half * 2 + 1] = fmaf(high, LOG2E, S[mt][nt][half * 2 + 1]);
        }
    });
}

template <bool IN_PAIRS> DEVICE void add_bias(const cuda_args &a, const warp_pairs &x, pair_numbers &S)
{
    switch (a.g.view[ATTN_T_bias].dtype) {
    case ATTN_F32: add_bias_of<ATTN_F32, IN_PAIRS>(a, x, S); break;
    case ATTN_F16: add_bias_of<ATTN_F16, IN_PAIRS>(a, x, S); break;
    default: add_bias_of<ATTN_BF16, IN_PAIRS>(a, x, S); break;
    }
}

/* A tile of the bias, in base 2. Only launches of the kind OVER_HEADS use it: there, a block adds up the gradients of
 * all heads and batch rows that have the same bias. Rows are 136 floats apart to avoid bank conflicts. */
struct shared_bias {
    float z[SIDE][SIDE + 8];
};

DEVICE shared_bias &bias_behind_stages(void *memory)
{
    return *(shared_bias *)((uint16_t *)memory + 2 * STAGES * PIECE);
}

/* Loads the block's tile of the bias. A barrier must follow before any thread reads it. */
template <sum_kind KIND> DEVICE void load_bias(const cuda_args &a, const visits<KIND> &v, shared_bias &to)
{
    const attn_view &bias = a.g.view[ATTN_T_bias];
    const int rows = (int)attn_min64(SIDE, a.g.dims.Sq - v.i0), keys = (int)attn_min64(SIDE, a.g.dims.Sk - v.j0);
    const int64_t at = attn_at(&bias, v.b, v.h, v.i0) + v.j0;
#pragma unroll 8
    for (int n = (int)threadIdx.x; n < SIDE * SIDE; n += THREADS) {
        const int r = n / SIDE, c = n % SIDE;
        to.z[r][c] = r < rows && c < keys ? load_float(bias.dtype, bias.data, at + r * bias.row + c) * LOG2E : 0;
    }
}

DEVICE void add_bias_of_block(const shared_bias &bias, const warp_pairs &x, int i0, int j0, pair_numbers &S)
{
    for_queries(x, [&](int mt, int half, int i) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float2 both = *(const float2 *)&bias.z[i - i0][x.j - j0 + nt * 8];
            S[mt][nt][half * 2] += both.x;
            S[mt][nt][half * 2 + 1] += both.y;
        }
    });
}

DEVICE float first_distance(const warp_pairs &x, int i)
{
    return (float)(i + x.x.s.Sk - x.x.s.Sq - x.j);
}

DEVICE void add_alibi(const warp_pairs &x, pair_numbers &S)
{
    const float slope = x.x.slope * LOG2E;
    for_queries(x, [&](int mt, int half, int i) {
        const float far = first_distance(x, i);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) S[mt][nt][half * 2 + e] -= slope * fabsf(far - (float)(nt * 8 + e));
    });
}

DEVICE void hide_by_keep_mask(const cuda_args &a, const warp_pairs &x, pair_numbers &S)
{
    const attn_view &keep = a.g.view[ATTN_T_keep_mask];
    const int64_t from = attn_keep_from(&a.g, &x.x.s);
    for_queries(x, [&](int mt, int half, int i) {
        if (i >= x.x.s.Sq) return;
        const int64_t row = attn_at(&keep, x.x.b, x.x.h, i) - from;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int key = x.j + nt * 8 + e;
                if (key >= from && key < x.limit.Sk && !((const uint8_t *)keep.data)[row + key])
                    S[mt][nt][half * 2 + e] = -CUDART_INF_F;
            }
    });
}

DEVICE void hide_by_flash_mask(const cuda_args &a, const warp_pairs &x, pair_numbers &S)
{
    const attn_view &view = a.g.view[ATTN_T_mask_startend_rows];
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = x.j + nt * 8 + e;
            if (key >= x.limit.Sk) continue;
            const int32_t *bounds = (const int32_t *)view.data + attn_at(&view, x.x.b, x.x.h / a.g.mask_group, key);
            const attn_mask mask = attn_mask_of(bounds, a.g.mask_bounds, a.g.causal, x.x.s.Sq);
            for_queries(x, [&](int mt, int half, int i) {
                if (attn_mask_hides(mask, i)) S[mt][nt][half * 2 + e] = -CUDART_INF_F;
            });
        }
}

/* Multiplies dP by the factors of dropout. Of the four lanes with the same queries, each computes the random bits of
 * two of the warp's eight blocks of keys. */
DEVICE void drop_pairs(const cuda_args &a, const warp_pairs &x, int lane, pair_numbers &dP)
{
    uint32_t mine[2] = {};
    const int64_t head = dropout_head(a, x.x.b, x.x.h), eighth = (x.j - lane % 4 * 2) / 8 + lane % 4 * 2;
#pragma unroll 1
    for (int r = 0; r < 2 * MT; r++)
#pragma unroll
        for (int n = 0; n < 2; n++) mine[n] |= kept_of(a, head, x.i + r * 8, eighth + n) << (r * 8);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const uint32_t kept = __shfl_sync(ALL_LANES, mine[nt % 2], lane / 4 * 4 + nt / 2) >> (lane % 4 * 2);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dP[mt][nt][e] = kept >> (mt * 16 + e / 2 * 8 + e % 2) & 1 ? dP[mt][nt][e] * a.drop_scale : 0;
    }
}

/* Returns whether all scores are finite in base 2; S is q.k. */
DEVICE bool scores_are_finite(const warp_pairs &x, const pair_numbers &S)
{
    const float factor = x.x.scale * LOG2E;
    float zero = 0;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            /* `zero` becomes NaN if a score is not finite */
            for (int e = 0; e < 4; e++) zero = fmaf(S[mt][nt][e] * factor, 0, zero);
    return zero == 0;
}

DEVICE void scale_scores(const warp_pairs &x, pair_numbers &S)
{
    const float cap = x.x.options.softcap;
    scale_block(S, cap > 0 ? x.x.scale / cap : x.x.scale * LOG2E);
    if (cap <= 0) return;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[mt][nt][e] = cap * LOG2E * tanhf(S[mt][nt][e]);
}

/* Replaces scores in base 2 by P, and dP by dZ, the gradient of the scores after softcap. If w.bias_stays is true, the
 * caller has already added the bias to the scores. */
DEVICE void gradients_of_pairs(const cuda_args &a, const work &w, const warp_pairs &x, int lane,
                               const row_numbers &lse2, const row_numbers &delta, pair_numbers &S, pair_numbers &dP)
{
    const attn_geometry &g = a.g;
    if (g.view[ATTN_T_bias].data && !w.bias_stays && w.bias_in_pairs) add_bias<true>(a, x, S);
    if (g.view[ATTN_T_bias].data && !w.bias_stays && !w.bias_in_pairs) add_bias<false>(a, x, S);
    if (x.x.slope != 0) add_alibi(x, S);
    if (g.view[ATTN_T_keep_mask].data) hide_by_keep_mask(a, x, S);
    if (g.view[ATTN_T_mask_startend_rows].data) hide_by_flash_mask(a, x, S);
    const int i = x.i - lane / 4, j = x.j - lane % 4 * 2;
    if (j < i + 31 + x.limit.lo || j + 63 >= min(i + x.limit.hi, x.limit.Sk))
#pragma unroll
        for (int mt = 0; mt < MT; mt++) hide_keys(S[mt], x.limit, x.i + mt * 16, x.j);
    if (a.drop_below) drop_pairs(a, x, lane, dP);
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = exp2_fast(S[mt][nt][e] - lse2[mt][e / 2]);
                /* a pair with a P of 0 has a dZ of 0, even if dP is not finite */
                dP[mt][nt][e] = p > 0 ? p * (dP[mt][nt][e] - delta[mt][e / 2]) : 0;
                S[mt][nt][e] = p > 0 ? p : 0;
            }
}

/* A warp's pairs of BLOCK queries and BLOCK keys. `z` has q.k and later P; `w` has dP and later dZ (the gradient of the
 * scores after softcap). */
struct careful_pairs {
    float z[BLOCK][LINE], w[BLOCK][LINE];
};

/* Computes P and dZ (the gradient of the scores after softcap) of BLOCK queries from i on and BLOCK keys from j on,
 * without tensor cores. The whole warp calls it. */
__device__ __noinline__ void careful_block(const cuda_args &a, const saved &s, const head_args &x, const limits &limit,
                                           int i, int j, careful_pairs &pairs)
{
    const bool wide = a.g.dims.D > TILE_HEAD_DIM || a.g.dims.Dv > TILE_HEAD_DIM;
#pragma unroll 1
    for (int n = (int)threadIdx.x % 32; n < BLOCK * BLOCK; n += 32) {
        const int r = n / BLOCK, c = n % BLOCK, query = i + r, key = j + c;
        const bool exists = query < x.s.Sq;
        const float lse = exists ? s.lse[lse_at(a, x, query)] : -CUDART_INF_F,
                    delta = exists ? s.delta[lse_at(a, x, query)] : 0;
        float derivative;
        const float z = score_log2(a, x, limit, exists, query, key, pairs.z[r][c], &derivative);
        const bool hidden = z == -CUDART_INF_F || lse == -CUDART_INF_F;
        float p = hidden ? 0 : exp2_fast(exponent_of(a, s, x, query, z, lse_in_base_2(lse)));
        const float drop = hidden ? 0 : dropout(a, x, query, key);
        float dz = p == 0 ? 0 : p * (drop == 0 ? -delta : drop * pairs.w[r][c] - delta);
        /* P is NaN although lse is not, so P is recomputed from the rows of q and k */
        unsigned again = __ballot_sync(ALL_LANES, p != p && lse == lse);
        for (; again; again &= again - 1) {
            const int from = __ffs(again) - 1, m = n - (int)threadIdx.x % 32 + from;
            const pair_gradient y = wide ? gradient_of_pair<WIDE_CHANNELS>(a, s, x, i + m / BLOCK, j + m % BLOCK)
                                         : gradient_of_pair<CHANNELS>(a, s, x, i + m / BLOCK, j + m % BLOCK);
            if ((int)threadIdx.x % 32 == from) p = y.p, dz = y.dz;
        }
        pairs.z[r][c] = p;
        pairs.w[r][c] = dz;
    }
    __syncwarp();
}

DEVICE void careful_gradients(const cuda_args &a, const work &w, const warp_pairs &x, int lane, careful_pairs &pairs,
                              pair_numbers &S, pair_numbers &dP)
{
    const int r = lane / 4, c = lane % 4 * 2;
    /* these are copies, because a reference to a member of `x` would keep `x` out of registers */
    const head_args head = x.x;
    const limits limit = x.limit;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt += 2) {
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const int row = r + e % 4 / 2 * 8, column = c + e / 4 * 8 + e % 2;
                pairs.z[row][column] = S[mt][nt + e / 4][e % 4];
                pairs.w[row][column] = dP[mt][nt + e / 4][e % 4];
            }
            __syncwarp();
            careful_block(a, w.s, head, limit, x.i - r + mt * 16, x.j - c + nt * 8, pairs);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const int row = r + e % 4 / 2 * 8, column = c + e / 4 * 8 + e % 2;
                S[mt][nt + e / 4][e % 4] = pairs.z[row][column];
                dP[mt][nt + e / 4][e % 4] = pairs.w[row][column];
            }
            __syncwarp();
        }
}

/* ---- Storing dZ (the gradient of scores after softcap) in dbias, or adding it up --------------------------------- */

DEVICE void store_pairs(const cuda_args &a, const work &w, const warp_pairs &x, int64_t at, const pair_numbers &dZ)
{
    const int Sq = (int)a.g.dims.Sq, Sk = (int)a.g.dims.Sk;
    for_queries(x, [&](int mt, int half, int i) {
        if (i >= Sq) return;
        float *const row = (float *)w.to.data + at + i * w.to.row + x.j;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float low = dZ[mt][nt][half * 2], high = dZ[mt][nt][half * 2 + 1];
            if (w.dbias_in_pairs && x.j + nt * 8 < Sk) *(float2 *)(row + nt * 8) = make_float2(low, high);
            if (!w.dbias_in_pairs && x.j + nt * 8 < Sk) row[nt * 8] = low;
            if (!w.dbias_in_pairs && x.j + nt * 8 + 1 < Sk) row[nt * 8 + 1] = high;
        }
    });
}

/* Writes zeros to the block's rows of dbias, for keys that none of its queries sees. */
DEVICE void store_zeros(const cuda_args &a, const work &w, const visits<EACH_PAIR> &v)
{
    const int Sk = (int)a.g.dims.Sk, rows = (int)attn_min64(SIDE, a.g.dims.Sq - v.i0);
    const int64_t at = attn_at(&w.to, v.b, v.h, v.i0);
    for (int r = (int)threadIdx.x / 32; r < rows; r += THREADS / 32)
        for (int j = (int)threadIdx.x % 32; j < Sk; j += 32)
            if (j < v.begin * SIDE || j >= v.end * SIDE) ((float *)w.to.data)[at + r * w.to.row + j] = 0;
}

/* Sums over the keys of one query. p: the sum of the probabilities P. dz: the sum of dZ (the gradient of the scores
 * after softcap). p_far and dz_far: the sums of P and of dZ, each multiplied by the distance between the positions of
 * the query and the key. */
struct far_sums {
    float p, dz, p_far, dz_far;
};

template <bool GIVEN>
DEVICE void add_far(const warp_pairs &x, const pair_numbers &P, const pair_numbers &dZ, far_sums (&sums)[MT][2])
{
    for_queries(x, [&](int mt, int half, int i) {
        const float first = first_distance(x, i);
        far_sums &sum = sums[mt][half];
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float far = fabsf(first - (float)(nt * 8 + e)), p = P[mt][nt][half * 2 + e],
                            dz = dZ[mt][nt][half * 2 + e];
                sum.dz_far = fmaf(dz, far, sum.dz_far);
                if (GIVEN) continue; /* far_of_row() needs the sums below only if the client did not give out and lse */
                sum.p += p;
                sum.dz += dz;
                sum.p_far = fmaf(p, far, sum.p_far);
            }
    });
}

/* For each query, four lanes of each of two warps have partial sums. Adds them up, and writes the sum of dZ (the
 * gradient of the scores after softcap) times distance (far_of_row()). `other` is shared memory with one struct per
 * query. */
DEVICE void store_far(const cuda_args &a, const work &w, const warp_pairs &x, far_sums (&sums)[MT][2], far_sums *other)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for_queries(x, [&](int mt, int half, int) {
        far_sums &sum = sums[mt][half];
        for (int n = 1; n <= 2; n *= 2) {
            sum.p += __shfl_xor_sync(ALL_LANES, sum.p, n);
            sum.dz += __shfl_xor_sync(ALL_LANES, sum.dz, n);
            sum.p_far += __shfl_xor_sync(ALL_LANES, sum.p_far, n);
            sum.dz_far += __shfl_xor_sync(ALL_LANES, sum.dz_far, n);
        }
        if (warp % 2 && lane % 4 == 0) other[warp / 2 * 32 + mt * 16 + half * 8 + lane / 4] = sum;
    });
    __syncthreads();
    if (warp % 2 || lane % 4) return;
    for_queries(x, [&](int mt, int half, int i) {
        const far_sums &mine = sums[mt][half], &more = other[warp / 2 * 32 + mt * 16 + half * 8 + lane / 4];
        const row_far_sums sum = { mine.p + more.p, mine.dz + more.dz, mine.p_far + more.p_far,
                                   mine.dz_far + more.dz_far };
        if (i < x.x.s.Sq) w.s.far[lse_at(a, x.x, i)] = far_of_row(a, w.s, x.x, i, sum, w.given);
    });
}

/* Writes the sums of dZ (the gradient of the scores after softcap) over the block's queries. `columns` is shared memory
 * with one sum per key and group of 32 queries. */
DEVICE void store_columns(const cuda_args &a, const work &w, int64_t at, int j0, float (&sums)[NT][2],
                          float (*columns)[SIDE])
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, thread = (int)threadIdx.x;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            for (int n = 4; n < 32; n *= 2) sums[nt][e] += __shfl_xor_sync(ALL_LANES, sums[nt][e], n);
            if (lane < 4) columns[warp / 2][warp % 2 * 64 + nt * 8 + lane * 2 + e] = sums[nt][e];
        }
    __syncthreads();
    if (thread < SIDE && j0 + thread < a.g.dims.Sk)
        ((float *)w.to.data)[at + j0 + thread] = columns[0][thread] + columns[1][thread] + columns[2][thread] +
                                                 columns[3][thread];
}

/* ---- The kernels ------------------------------------------------------------------------------------------------- */

template <sum_kind KIND> struct kept_sums {
    float pairs[KIND == OVER_HEADS ? MT : 1][NT][4] = {};
    float columns[NT][2] = {};
    far_sums far[MT][2] = {};
};

template <typename T, sum_kind KIND>
__global__ void __launch_bounds__(THREADS, 1)
    option_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ work w)
{
    extern __shared__ __align__(1024) char memory[];
    const attn_geometry &g = a.g;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, row = warp / 2 * 32, column = warp % 2 * 64;
    const uint32_t down = lane_down<CHUNK>(lane), across = lane_across<CHUNK>(lane);
    const visits<KIND> v = visits_of<KIND>(a, w);
    const int of_qk = (int)attn_tiles(g.dims.D, CHUNK);
    const chunks c = { (uint16_t *)memory, of_qk, of_qk + (int)attn_tiles(g.dims.Dv, CHUNK), w.resident };
    kept_sums<KIND> sums;

    int n = v.visible_from(g, v.begin), stage = 0;
    if (c.resident && n < v.end)
        for (int chunk = 0; chunk < c.all; chunk++) load_queries(a, v.place(n), c, chunk, 0);
    load_cursor<KIND> ahead;
    ahead.begin(a, v, c, n);
    if constexpr (KIND == EACH_PAIR) store_zeros(a, w, v);
    if (KIND == OVER_HEADS && w.bias_stays) load_bias(a, v, bias_behind_stages(memory));

    warp_pairs x = {};
    for (; n < v.end; n = v.visible_from(g, n + 1)) {
        const pair_tile_place at = v.place(n);
        x.x = head_args_of(a, at.b, at.h);
        x.limit = limits_of(g, x.x.s);
        x.i = at.i0 + row + lane / 4;
        x.j = at.j0 + column + lane % 4 * 2;
        row_numbers lse2, delta;
        load_row_numbers(a, w.s, x, lse2, delta);

        /* adds the products of chunk number `chunk` to `to`, and begins to load chunk number `chunk` + STAGES - 1 */
        const auto add_product = [&](float(&to)[MT][NT][4], int chunk) {
            cp_async_wait<STAGES - 2>();
            /* after this barrier the chunk has arrived, and no thread reads the buffer that the next copy overwrites */
            __syncthreads();
            ahead.load(a, v, c, (stage + STAGES - 1) % STAGES);
            const uint32_t rows = smem_addr(c.queries(stage, chunk)), keys = smem_addr(c.keys(stage));
            scores<T, CHUNK>(
                to, [&](uint32_t(&f)[4], int mt, int kk) { a_rows_of<CHUNK>(f, down, rows, row + mt * 16, kk * 16); },
                [&](uint32_t(&f)[4], int nt, int kk) { b_rows_of<CHUNK>(f, across, keys, column + nt * 8, kk * 16); });
            stage = (stage + 1) % STAGES;
        };
        pair_numbers S = {}, dP = {};
#pragma unroll 1
        for (int chunk = 0; chunk < of_qk; chunk++) add_product(S, chunk);
#pragma unroll 1
        for (int chunk = of_qk; chunk < c.all; chunk++) add_product(dP, chunk);

        bool odd = !scores_are_finite(x, S);
        for_queries(x, [&](int mt, int half, int) { odd |= lse2[mt][half] != lse2[mt][half]; });
        if (__syncthreads_or(odd)) {
            cp_async_wait<0>();
            /* after this barrier no thread uses the chunks, so careful_gradients() may overwrite them */
            __syncthreads();
            careful_gradients(a, w, x, lane, ((careful_pairs *)c.keys(0))[warp], S, dP);
            __syncthreads();
            ahead.begin(a, v, c, v.visible_from(g, n + 1));
            stage = 0;
        } else {
            scale_scores(x, S);
            if (KIND == OVER_HEADS && w.bias_stays) add_bias_of_block(bias_behind_stages(memory), x, at.i0, at.j0, S);
            gradients_of_pairs(a, w, x, lane, lse2, delta, S, dP);
        }

        if constexpr (KIND == EACH_PAIR) store_pairs(a, w, x, attn_at(&w.to, at.b, at.h, 0), dP);
        if constexpr (KIND == OF_ROWS) {
            if (w.given) add_far<true>(x, S, dP, sums.far);
            else add_far<false>(x, S, dP, sums.far);
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if constexpr (KIND == OVER_HEADS) sums.pairs[mt][nt][e] += dP[mt][nt][e];
                    if constexpr (KIND == OVER_QUERIES) sums.columns[nt][e % 2] += dP[mt][nt][e];
                }
    }
    cp_async_wait<0>();
    __syncthreads(); /* after this barrier no thread uses the chunks */
    const int64_t to = attn_at(&w.to, v.b, v.h, 0) + v.part * w.part_elements;
    x.i = v.i0 + row + lane / 4;
    x.j = v.j0 + column + lane % 4 * 2;
    if constexpr (KIND == OVER_HEADS) store_pairs(a, w, x, to, sums.pairs);
    if constexpr (KIND == OVER_QUERIES) store_columns(a, w, to, v.j0, sums.columns, (float(*)[SIDE])memory);
    if constexpr (KIND == OF_ROWS) {
        x.x = head_args_of(a, v.b, v.h);
        store_far(a, w, x, sums.far, (far_sums *)memory);
    }
}

/* Adds up, in order, the sums that several blocks have written for each element of dbias. */
__global__ void __launch_bounds__(256)
    add_parts(attn_view to, const float *from, int64_t Sk, int64_t Sq, int64_t heads, int64_t elements, int parts)
{
    const int64_t n = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (n >= elements) return;
    float sum = from[n];
    for (int part = 1; part < parts; part++) sum += from[part * elements + n];
    const int64_t line = n / Sk, h = line / Sq;
    ((float *)to.data)[attn_at(&to, h / heads, h % heads, line % Sq) + n % Sk] = sum;
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

struct division {
    sum_kind kind;
    /* cells: number of tiles of dbias; terms: number of tiles of dZ that are added up to one tile of dbias */
    int64_t elements, cells, terms, batches, heads;
    /* sizes of dbias along batch rows, heads and queries; the size of an axis over which dbias is shared is 1 */
    int64_t nb, nh, nq;
    int parts;
};

/* The number of blocks that a launch should have: twice the multiprocessors of a large GPU. It is a constant, so that
 * the order of sums does not depend on the GPU. */
const int64_t ENOUGH_BLOCKS = 264;
/* At most this many blocks share the terms of one tile of dbias. */
const int64_t MOST_PARTS = 64;

division division_of(const attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    const int64_t *n = plan->problem->dbias.shape, q_tiles = attn_tiles(d.Sq, SIDE), key_tiles = attn_tiles(d.Sk, SIDE);
    division x;
    x.nb = n[0], x.nh = n[1], x.nq = n[2];
    x.elements = x.nb * x.nh * x.nq * d.Sk;
    x.batches = x.nb == d.B ? 1 : d.B;
    x.heads = x.nh == d.H ? 1 : d.H;
    x.terms = x.batches * x.heads;
    x.kind = x.nq != d.Sq ? OVER_QUERIES : x.terms == 1 ? EACH_PAIR : OVER_HEADS;
    if (x.kind == OVER_QUERIES) x.terms *= q_tiles;
    x.cells = key_tiles * (x.kind == OVER_QUERIES ? 1 : q_tiles);
    const int64_t all = attn_max64(x.cells * x.nb * x.nh, 1);
    x.parts = (int)attn_clamp64(attn_tiles(ENOUGH_BLOCKS, all), 1, attn_clamp64(x.terms, 1, MOST_PARTS));
    return x;
}

/* Returns whether one instruction can read or write elements 2 n and 2 n + 1 of each row of the tensor. */
bool in_pairs(const attn_view &view, int64_t Sk)
{
    const size_t pair = view.dtype == ATTN_F32 ? 8 : 4;
    return (Sk | view.row | view.head | view.batch) % 2 == 0 && (uintptr_t)view.data % pair == 0;
}

work work_of(const cuda_chip *chip, const attn_plan *plan, const cuda_args &a, const saved &s)
{
    const attn_dims &d = a.g.dims;
    const int64_t chunks = attn_tiles(d.D, CHUNK) + attn_tiles(d.Dv, CHUNK);
    work w = {};
    w.s = s;
    w.parts = 1;
    w.batches = w.heads = 1;
    w.q_tiles = (int)attn_tiles(d.Sq, SIDE);
    w.key_tiles = (int)attn_tiles(d.Sk, SIDE);
    w.given = plan->problem->out.rank > 0;
    w.bias_in_pairs = in_pairs(a.g.view[ATTN_T_bias], d.Sk);
    w.resident = (size_t)(chunks + STAGES) * PIECE * 2 <= (size_t)chip->shared_bytes;
    return w;
}

/* A launch takes at most this constant times the estimate tile_seconds(). On an H200, dbias with head size 64 took 1.97
 * ms; the estimate was 1.7 ms. */
const double SECONDS_OVER_TILES = 1.2;

template <sum_kind KIND>
cudaError_t launch_tiles(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a, work w,
                         dim3 grid)
{
    const attn_dims &d = a.g.dims;
    const int64_t chunks = attn_tiles(d.D, CHUNK) + attn_tiles(d.Dv, CHUNK);
    if (KIND == OVER_HEADS || KIND == OVER_QUERIES) w.resident = false;
    const size_t pieces = w.resident ? (size_t)chunks + STAGES : 2 * STAGES, stages = pieces * PIECE * 2;
    w.bias_stays = KIND == OVER_HEADS && stages + sizeof(shared_bias) <= (size_t)chip->shared_bytes;
    const size_t bytes = stages + (w.bias_stays ? sizeof(shared_bias) : 0);
    static_assert(2 * STAGES * PIECE * 2 <= 99 << 10, "every GPU from compute capability 8.0 on has the memory");
    static_assert(sizeof(careful_pairs) * (THREADS / 32) <= STAGES * PIECE * 2, "the stages have room for the pairs");
    return in_shares(chip, tile_seconds(chip, plan) * SECONDS_OVER_TILES, [&](const cuda_chip *part) {
        cuda_args now = a;
        dim3 share = grid;
        cudaError_t code = cudaSuccess;
        take_share(part, now, share);
        if (share.x == 0 || share.y == 0 || share.z == 0) return code;
        const auto launch = [&](auto number) {
            typedef decltype(number) T;
            code = allow_shared<option_tiles<T, KIND>>((size_t)chip->shared_bytes);
            if (code == cudaSuccess) option_tiles<T, KIND><<<share, THREADS, bytes, stream>>>(now, w);
        };
        if (plan->problem->q.dtype == ATTN_BF16) launch(__nv_bfloat16());
        else launch(__half());
        return code == cudaSuccess ? cudaPeekAtLastError() : code;
    });
}

cudaError_t launch_dbias(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a,
                         const saved &s, float *workspace)
{
    const attn_dims &d = a.g.dims;
    const attn_view &dbias = a.g.view[ATTN_T_dbias];
    const division x = division_of(plan);
    work w = work_of(chip, plan, a, s);
    if (x.elements == 0) return cudaSuccess;
    w.to = dbias;
    w.parts = x.parts;
    w.part_elements = x.parts > 1 ? x.elements : 0;
    w.batches = (int)x.batches, w.heads = (int)x.heads;
    if (x.parts > 1) {
        w.to.data = workspace;
        w.to.row = d.Sk;
        w.to.head = x.nq * d.Sk;
        w.to.batch = x.nh * w.to.head;
    }
    w.dbias_in_pairs = in_pairs(w.to, d.Sk);
    const dim3 grid((unsigned)(x.cells * x.parts), (unsigned)x.nh, (unsigned)x.nb);
    cudaError_t code;
    if (x.kind == EACH_PAIR)
        code = launch_tiles<EACH_PAIR>(chip, stream, plan, a, w, dim3((unsigned)w.q_tiles, grid.y, grid.z));
    else if (x.kind == OVER_HEADS) code = launch_tiles<OVER_HEADS>(chip, stream, plan, a, w, grid);
    else code = launch_tiles<OVER_QUERIES>(chip, stream, plan, a, w, grid);
    if (code != cudaSuccess || x.parts == 1 || !takes_step(chip, 0)) return code;
    add_parts<<<(unsigned)attn_tiles(x.elements, 256), 256, 0, stream>>>(dbias, workspace, d.Sk, x.nq, x.nh, x.elements,
                                                                         x.parts);
    return cudaPeekAtLastError();
}

} // namespace

size_t option_gradient_bytes(const attn_plan *plan)
{
    if (!plan->problem->dbias.rank || plan->problem->q.dtype == ATTN_F32) return 0;
    const division x = division_of(plan);
    return x.parts > 1 ? (size_t)(x.elements * x.parts) * sizeof(float) : 0;
}

cudaError_t option_gradients(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a,
                             const saved &s, float *workspace)
{
    cudaError_t code = cudaSuccess;
    if (a.g.view[ATTN_T_dbias].data) code = launch_dbias(chip, stream, plan, a, s, workspace);
    if (a.g.view[ATTN_T_dalibi_slopes].data && code == cudaSuccess)
        code = launch_tiles<OF_ROWS>(chip, stream, plan, a, work_of(chip, plan, a, s), tile_grid(a.g, SIDE));
    return code == cudaSuccess ? sum_heads(chip, plan->problem, a, s, stream) : code;
}
