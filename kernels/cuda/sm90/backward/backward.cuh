/* backward.cuh: code that the Hopper backward kernels of this folder share.
 *
 * The template parameter X is the shape of a kernel instance. BM: queries per tile, which are UNITS times 64. BN: keys
 * per block. CHUNKS: number of chunks of 64 channels in a row of Q and K. CHUNKS_V: the same for V and dO. The template
 * parameter SHARED is the block's shared memory. */
#ifndef ATTN_SM90_BACKWARD_CUH
#define ATTN_SM90_BACKWARD_CUH

#include "kernels/cuda/sm90/layer/epilogue.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm80/backward_steps.h"
#include "kernels/cuda/sm90/backward/key_parts.cuh"
#include "kernels/cuda/sm90/layer/masks.cuh"
#include "kernels/cuda/sm90/layer/pipeline.cuh"
#include "kernels/cuda/sm90/layer/products.cuh"

namespace {

/* CONSUMERS: number of threads of the two consumer warpgroups together. ZERO_BARRIER: the named barrier of
 * zero_rows(). */
enum { CONSUMERS = 256, ZERO_BARRIER = 12 };

/* ---- A block of keys --------------------------------------------------------------------------------------------- */

struct maps {
    CUtensorMap Q, K, V, dO;
};

/* The work of a block: a tile of keys, and the query heads and query tiles over which the block sums. If tiles of keys
 * have parts (key_parts.cuh), the block works on one part, with the heads and query tiles of this part. */
struct block_place {
    attn_sequence s;
    int t; /* number of this tile of keys in the order in which blocks claim tiles */
    /* index of the group of `group` query heads that the part sums over; groups are counted over all batch rows, and a
     * packed problem has one batch row */
    int head;
    int b, hk, j0;
    int h; /* the part's first query head */
    /* index of the head of dk and dv that the block writes; if tiles of keys have parts, each part of a key/value head
     * writes a head of its own */
    int to;
    int rows;        /* number of rows of dk and dv to write, including rows of padding, which get zeros */
    int first, last; /* query tiles `first` to `last` - 1 of the part see at least one of the tile's keys */
    /* the query tile with which the block begins; after tile last - 1 it continues with tile `first` */
    int begin;
    key_band band;
    int Sq;
    DEVICE int tiles() const { return last - first; }

    /* Returns how many of the key tiles after this block's key tile the queries of query tile `tile` see. (Query i sees
     * keys i + lo to i + hi - 1.) */
    template <class X> DEVICE int after(int tile) const
    {
        return min((tile * X::BM + X::BM + band.hi - 2) / X::BN, (band.Sk - 1) / X::BN) - j0 / X::BN;
    }
};

DEVICE key_band band_of(const attn_geometry &g, const attn_sequence &s)
{
    const int left = (int)attn_min64(g.left, FAR), right = (int)attn_min64(g.right, FAR);
    return key_band_of((int)attn_align(&g, &s), left, right, (int)s.Sk);
}

/* Does what attn_sequence_of() does, with less code, for problems without PADDING_FEATURES. */
DEVICE attn_sequence sequence_without_padding(const attn_geometry &g, int b)
{
    attn_sequence s;
    s.q_start = g.cu_q ? g.cu_q[b] : 0;
    s.k_start = g.cu_k ? g.cu_k[b] : 0;
    s.Sq = g.cu_q ? g.cu_q[b + 1] - s.q_start : g.dims.Sq;
    s.Sk = g.cu_k ? g.cu_k[b + 1] - s.k_start : g.seqlens_k ? g.seqlens_k[b] : g.dims.Sk;
    return s;
}

/* Fills x for the tile of keys (or part of its work) that `at` names. In at.head, each part of a key/value head counts
 * as a head of its own. group: number of query heads of a part. This function sets x.first and x.last to the query
 * tiles of all parts; take_part() then reduces them to those of one part. x is passed by reference, because the calling
 * thread has few registers. */
template <class X, bool PADDING = true>
DEVICE void find_key_place(block_place &x, const cuda_args &a, const key_parts &parts, int group, const head_tile &at)
{
    const attn_geometry &g = a.g;
    const int groups = (int)g.dims.Hk * parts.heads;
    int tile = at.tile;
    x.head = at.head >> parts.log2_of_ranges;
    x.b = x.head / groups;
    x.to = at.head - (x.b * groups << parts.log2_of_ranges);
    x.hk = x.to >> parts.log2_of_ranges;
    x.h = x.hk * group;
    if (parts.heads > 1) x.hk /= parts.heads;
    if (g.dims.packed) {
        x.b = sequence_of_tile(g.cu_k, g.dims.B, X::BN, 1, tile);
        tile -= g.cu_k[x.b] / X::BN + x.b;
    }
    x.s = PADDING ? attn_sequence_of(&g, x.b) : sequence_without_padding(g, x.b);
    x.j0 = tile * X::BN;
    x.Sq = (int)x.s.Sq;
    x.band = band_of(g, x.s);
    x.rows = max(min((int)(g.dims.packed ? x.s.Sk : g.dims.Sk) - x.j0, X::BN), 0);
    /* key j is seen by the queries i with j - hi < i <= j - lo */
    const int last_key = min(x.j0 + X::BN, x.band.Sk) - 1;
    int first = 0, last = 0;
    if (last_key >= x.j0) {
        first = max(x.j0 - x.band.hi + 1, 0) / X::BM;
        last = max((min(last_key - x.band.lo + 1, x.Sq) + X::BM - 1) / X::BM, first);
    }
    x.first = x.begin = first;
    x.last = last;
}
/* Reduces x's range of query tiles to those of its part (key_parts.cuh). */
DEVICE void take_part(block_place &x, const key_parts &parts)
{
    const int shift = parts.log2_of_ranges, n = x.to & ((1 << shift) - 1), all = x.tiles();
    x.last = x.first + (all * (n + 1) >> shift);
    x.first = x.begin = x.first + (all * n >> shift);
}
template <class X>
DEVICE block_place key_place_of(const cuda_args &a, const key_parts &parts, int group, const head_tile &at)
{
    block_place x;
    find_key_place<X>(x, a, parts, group, at);
    take_part(x, parts);
    return x;
}

/* In query tiles `first` to `last` - 1, all queries see all of a consumer's 64 keys, so no score needs a mask. */
struct free_queries {
    int first, last;
};
template <int BM> DEVICE free_queries free_queries_of(const block_place &x, int first_key)
{
    const int last_key = first_key + 63;
    return { (max(last_key - x.band.hi + 1, 0) + BM - 1) / BM,
             last_key < x.band.Sk ? min(x.Sq, max(first_key - x.band.lo + 1, 0)) / BM : 0 };
}

/* ---- Loading tiles of queries ------------------------------------------------------------------------------------ */

template <class X, class SHARED>
DEVICE void load_Q(SHARED &sm, const cuda_args &a, const backward_scratch &scratch, const maps &m, const block_place &x,
                   const ring<X::STAGES_Q> &at, int h, int tile)
{
    const uint32_t bar = smem_addr(&sm.bars_Q.full[at.stage]);
    const int last_unit = (x.Sq - 1) / QUERY_TILE;
    await_empty(sm.bars_Q, at);
    load_tile<X::BM, X::CHUNKS, 64>(smem_addr(sm.Q[at.stage]), &m.Q,
                                    { 0, (int)x.s.q_start + tile * X::BM, h, a.g.dims.packed ? 0 : x.b }, bar,
                                    X::UNITS * sizeof(row_values));
    /* If one of the tile's units of 64 queries lies past the end of the sequence, it has no lse and delta. The values
     * of the sequence's last unit are loaded in its place, because these are finite; the scores are masked. */
    for (int n = 0; n < X::UNITS; n++) {
        const int unit = min(tile * X::UNITS + n, last_unit);
        bulk_load(smem_addr(&sm.values[at.stage][n]), scratch.values + query_tile(a, x.s, x.b, h, unit),
                  sizeof(row_values), bar);
    }
}

template <class X, class SHARED>
DEVICE void load_dO(SHARED &sm, const cuda_args &a, const maps &m, const block_place &x, const ring<X::STAGES_DO> &at,
                    int h, int tile)
{
    fill_stage<X::BM, X::CHUNKS_V, 64>(sm.bars_dO, at, smem_addr(sm.dO[at.stage]), &m.dO,
                                       { 0, (int)x.s.q_start + tile * X::BM, h, a.g.dims.packed ? 0 : x.b });
}

/* Sets the rows of a tile from row `first` on to zero. All threads of both consumers must call it, because it ends with
 * a barrier. */
template <int ROWS, int CHUNKS> DEVICE void zero_rows(uint16_t *tile, int first)
{
    const int n = (int)threadIdx.x - 128, piece = n % 8;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        for (int row = first + n / 8; row < ROWS; row += CONSUMERS / 8)
            ((uint4 *)(tile + (chunk * ROWS + row) * 64))[piece] = make_uint4(0, 0, 0, 0);
    fence_proxy_async_shared();
    named_barrier_sync(ZERO_BARRIER, CONSUMERS);
}

/* ---- Computing P^T and dS^T, whose rows are keys and whose columns are queries ----------------------------------- */

/* Sets scores to -inf where a query does not see the key. The thread's keys are j and j + 8; the tile's queries begin
 * at i. */
template <int BM> DEVICE void hide_queries(float (&S)[BM / 2], const block_place &x, int j, int i, int lane)
{
    const int column = i + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = j + half * 8;
        const int lo = key < x.band.Sk ? key - x.band.hi + 1 - column : BM,
                  hi = min(key - x.band.lo + 1, x.Sq) - column;
#pragma unroll
        for (int n = 0; n < BM / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e < lo || n * 8 + e >= hi) S[n * 4 + half * 2 + e] = -CUDART_INF_F;
    }
}

/* Turns scores S into probabilities P = exp2(S c - lse2). The factor c is log2(e) times the scale. */
template <int BM> DEVICE void exponents_of(float (&S)[BM / 2], const row_values *values, float c, int lane)
{
#pragma unroll
    for (int n = 0; n < BM / 8; n++) {
        const float2 lse2 = *(const float2 *)&values[n / 8].lse2[n % 8 * 8 + lane % 4 * 2];
#pragma unroll
        for (int e = 0; e < 4; e++) S[n * 4 + e] = exp2_fast(fmaf(S[n * 4 + e], c, -(e % 2 ? lse2.y : lse2.x)));
    }
}

/* Turns dP into dS = P (dP - delta) for queries FIRST to LAST - 1 of the tile. Two neighbouring P of the thread are a
 * `pair`, and n is the number of the pair. For each pair, the result of instead_of(pair, n) is used in place of the two
 * P. */
template <int FIRST, int LAST, int N, class F>
DEVICE void differences_of(float (&dP)[N], const float (&P)[N], const row_values *values, int lane, F instead_of)
{
#pragma unroll
    for (int n = FIRST / 8; n < LAST / 8; n++) {
        const float2 delta = *(const float2 *)&values[n / 8].delta[n % 8 * 8 + lane % 4 * 2];
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float2 y = instead_of(make_float2(P[n * 4 + e], P[n * 4 + e + 1]), n * 2 + e / 2);
            dP[n * 4 + e] = y.x * (dP[n * 4 + e] - delta.x);
            dP[n * 4 + e + 1] = y.y * (dP[n * 4 + e + 1] - delta.y);
        }
    }
}

/* Replaces each P (a probability) by dS = P (dP - delta), the gradient of the score. P has 16 bits, because it was
 * rounded for the product that gives dV. */
template <typename T, int BM>
DEVICE void differences_of_rounded(uint32_t (&P)[BM / 16][4], const float (&dP)[BM / 2], const row_values *values,
                                   int lane)
{
#pragma unroll
    for (int n = 0; n < BM / 8; n++) {
        const float2 delta = *(const float2 *)&values[n / 8].delta[n % 8 * 8 + lane % 4 * 2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t &pair = P[n / 2][n % 2 * 2 + e];
            const float2 y = unpack<T>(pair);
            pair = pack<T>(y.x * (dP[n * 4 + e * 2] - delta.x), y.y * (dP[n * 4 + e * 2 + 1] - delta.y));
        }
    }
}

/* ---- Recomputing rows whose results are not finite --------------------------------------------------------------- */

/* Recomputes dK and dV of 16 keys, one key after the other: the keys that warp n of a block has computed. */
template <class X> DEVICE void repair_keys_of(const cuda_args &a, const saved &s, const block_place &x, int n)
{
    const int first = n % (X::BN / 16) * 16;
    for (int r = first; r < first + 16 && r < x.rows; r++) dkdv_row(a, s, x.b, x.hk, x.j0 + r);
}

/* ---- Functions of the host --------------------------------------------------------------------------------------- */

/* Return how many tiles of keys (key_tiles_per_head) or of queries (query_tiles_per_head) a head has. In packed
 * problems a few of these tiles have no rows. */
int64_t key_tiles_per_head(const attn_dims &d, int keys)
{
    return d.packed ? d.total_k / keys + d.B : attn_tiles(d.Sk, keys);
}
int64_t query_tiles_per_head(const attn_dims &d, int queries)
{
    return d.packed ? d.total_q / queries + d.B : attn_tiles(d.Sq, queries);
}

template <class X> bool make_maps(maps &m, const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    return tma_map(&m.Q, tma_tensor_of(g.view[ATTN_T_q], e.B, d.H, e.rows_q, d.D), X::BM) &&
           tma_map(&m.K, tma_tensor_of(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D), X::BN) &&
           tma_map(&m.V, tma_tensor_of(g.view[ATTN_T_v], e.B, d.Hk, e.rows_k, d.Dv), X::BN) &&
           tma_map(&m.dO, tma_tensor_of(g.view[ATTN_T_dout], e.B, d.H, e.rows_q, d.Dv), X::BM);
}

/* Returns whether TMA can load the problem: it needs at least one row, numbers of rows that fit in 32 bits, and
 * suitable strides. */
bool backward_walkable(const attn_plan *plan)
{
    static const struct {
        attn_tensor_id tensor;
        bool of_keys, value;
    } walked[] = { { ATTN_T_q, false, false },   { ATTN_T_k, true, false },  { ATTN_T_v, true, true },
                   { ATTN_T_dout, false, true }, { ATTN_T_dk, true, false }, { ATTN_T_dv, true, true },
                   { ATTN_T_dq, false, false } };
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    if (e.rows_q <= 0 || e.rows_k <= 0 || d.B <= 0 || d.H <= 0 || e.rows_q >= FAR || e.rows_k >= FAR) return false;
    if (!tile_grid_fits(d)) return false;
    for (const auto &x : walked)
        if (plan->problem->tensor[x.tensor].rank &&
            !tma_walkable(g.view[x.tensor], e.B, x.of_keys ? d.Hk : d.H, x.of_keys ? e.rows_k : e.rows_q,
                          x.value ? d.Dv : d.D, 8))
            return false;
    return true;
}

} // namespace

#endif
