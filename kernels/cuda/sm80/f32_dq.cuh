/* f32_dq.cuh: the two kernels with which f32_backward.cu computes dQ, and code that they share with the kernel of dK
 * and dV. f32_finish_dq() converts the float32 sums that all blocks of keys have added up. With `deterministic`,
 * f32_dq_tiles() computes dQ by tiles of queries instead. */
#ifndef ATTN_SM80_F32_DQ_CUH
#define ATTN_SM80_F32_DQ_CUH

#include "kernels/cuda/simple/simple.h"
#include "seen_tiles.cuh"
#include "split.cuh"

namespace {

const float P_BITS = 15, P_UNIT = 1.0f / 32768;

struct backward_planes {
    split_planes q, k, v, dout;
};

/* Returns the address of a query tile's float32 sums of dQ. The sums lie in blocks of 16 rows x 8 columns. A lane of a
 * warp holds four numbers of a block, and number e of lane n is element 32 e + n of the block. */
template <int D, int BM> DEVICE float *sums_of(float *sums, const cuda_args &a, const head_args &x, int query_tile)
{
    const int64_t tiles = a.g.dims.packed ? a.g.dims.total_q / BM + a.g.dims.B : attn_tiles(a.g.dims.Sq, BM);
    const int64_t slot = a.g.dims.packed ? x.s.q_start / BM + x.b : 0;
    const int64_t head = a.g.dims.packed ? x.h : x.b * a.g.dims.H + x.h;
    return sums + (head * tiles + slot + query_tile) * BM * D;
}

/* Computes sum += unit * A B. A is 16 rows in registers; B is a tile of ROWS rows and D columns in shared memory, at
 * the address `b` from by_16(). */
template <int D, int ROWS>
DEVICE void add_products_of_columns(float (&sum)[D / 8][4], const uint32_t (&ah)[ROWS / 16][4],
                                    const uint32_t (&al)[ROWS / 16][4], uint32_t b, float unit)
{
    /* number of pairs of 8-column blocks that are multiplied at a time: as many as fit in registers */
    const int PAIRS = D == 64 ? 4 : D == 128 ? 2 : 1;
#pragma unroll
    for (int dt = 0; dt < D / 8; dt += 2 * PAIRS) {
        float part[1][2 * PAIRS][4] = {};
#pragma unroll
        for (int kk = 0; kk < ROWS / 16; kk++) {
            const uint32_t(&h)[1][4] = reinterpret_cast<const uint32_t(&)[1][4]>(ah[kk]),
                  (&l)[1][4] = reinterpret_cast<const uint32_t(&)[1][4]>(al[kk]);
            multiply_columns<1, PAIRS, ROWS * 2 * D>(part, h, l, b, dt / 2, kk * 32 * D);
        }
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[dt + n][e] = fmaf(part[0][n][e], unit, sum[dt + n][e]);
    }
}

/* Stores columns d and d + 1 of a row of `width` columns. `pairs` says that rows are 8-byte aligned and `width` is
 * even; one instruction then stores both columns. */
DEVICE void store_two(float *row, int d, int width, bool pairs, float x, float y)
{
    if (pairs && d < width) *(float2 *)(row + d) = make_float2(x, y);
    if (pairs) return;
    if (d < width) row[d] = x;
    if (d + 1 < width) row[d + 1] = y;
}

DEVICE bool starts_on_pairs(const attn_view &view, const float *row, int64_t width)
{
    return width % 2 == 0 && view.row % 2 == 0 && (uint64_t)row % 8 == 0;
}

/* Returns `p`, which is P times 2^P_BITS, with one correction: if the query sees only one key, and P differs from 1 by
 * at most the factor `slack`, P becomes exactly 1. `slack` is 0 for queries with several keys. */
DEVICE float of_one_key(float p, float slack)
{
    const float unit = 1 / P_UNIT;
    return p * slack >= unit && p <= unit * slack ? unit : p;
}

/* Returns an exponent e such that |dS| 2^e is at most about 2^14, which float16 can hold, for all |dS| <= bound. */
DEVICE int exponent_for(float bound)
{
    const int E = (int)(__float_as_uint(bound) >> 23 & 255) - 127;
    return bound > 0 && E < 128 ? min(13 - E, 110) : 0;
}

/* ---- The kernel that computes dQ from its sums ------------------------------------------------------------------- */

/* Returns whether the query tile from i0 on is wide, or sees a wide tile of k or v. A tile is wide if it has a row
 * whose numbers are all too small for the exponent that its 128 rows share (split.cuh). All threads of the block call
 * it. */
DEVICE bool sees_wide(const cuda_args &a, const backward_planes &planes, const head_args &x, int i0, attn_range seen)
{
    const int64_t k_tile = split_tile_of(planes.k, x.b, x.hk, x.s.k_start);
    const int64_t q_tile = split_tile_of(planes.q, x.b, x.h, x.s.q_start) + i0 / SPLIT_ROWS;
    const int first = (int)(seen.lo / SPLIT_ROWS), last = (int)attn_tiles(seen.hi, SPLIT_ROWS);
    const bool k = any_wide(planes.k.stats + k_tile, first, last), v = any_wide(planes.v.stats + k_tile, first, last);
    return k || v || planes.q.stats[q_tile].wide;
}

template <int D, int BM>
__global__ void __launch_bounds__(128)
    f32_finish_dq(const __grid_constant__ cuda_args a, const __grid_constant__ backward_planes planes, saved s,
                  const float *sums)
{
    const tile_place place = tile_place_of<BM>(a, blockIdx.x);
    if (!place.exists) return;
    const head_args &x = place.x;
    const float *const from = sums_of<D, BM>(const_cast<float *>(sums), a, x, place.i0 / BM);
    const attn_view &dq = a.g.view[ATTN_T_dq];
    bool is_finite = true;
    float *const to = (float *)dq.data + attn_at(&dq, x.b, x.h, x.s.q_start);
    const bool pairs = starts_on_pairs(dq, to, a.g.dims.D);
#pragma unroll 4
    for (int n = threadIdx.x; n < BM * D / 2; n += 128) {
        const int lane = n % 32, half = n / 32 % 2, fragment = n / 64;
        const int64_t i = place.i0 + fragment / (D / 8) * 16 + half * 8 + lane / 4;
        const float y0 = from[fragment * 128 + half * 64 + lane] * x.scale,
                    y1 = from[fragment * 128 + half * 64 + 32 + lane] * x.scale;
        is_finite &= y0 - y0 == 0 && y1 - y1 == 0;
        if (i < x.s.Sq)
            store_two(to + i * dq.row, fragment % (D / 8) * 8 + lane % 4 * 2, (int)a.g.dims.D, pairs, y0, y1);
    }
    const attn_range seen = attn_keys_of_rows(&a.g, &x.s, place.i0, attn_min64(place.i0 + BM, x.s.Sq));
    const bool wide = sees_wide(a, planes, x, place.i0, seen);
    if (__syncthreads_or(!is_finite || wide))
        for (int r = threadIdx.x / 32; r < BM && place.i0 + r < x.s.Sq; r += 4) dq_row(a, s, x, place.i0 + r);
}

/* ---- The kernel that computes dQ by tiles of queries, for the option `deterministic` ----------------------------- */

enum { DQ_BM = 64 };

template <int D, bool SCORE_MODS> struct shared_dq {
    static const int BN = D == 256 ? 32 : 64;
    alignas(1024) uint16_t Q[2 * DQ_BM * D];
    alignas(1024) uint16_t dO[2 * DQ_BM * D];
    alignas(1024) uint16_t K[2 * BN * D];
    alignas(1024) uint16_t V[2 * BN * D];
    struct {
        float z[16][BN + 4], cap[16][BN + 4], lse2[16];
        uint32_t kept[16][BN / 8];
    } options[SCORE_MODS ? DQ_BM / 16 : 1];
    std::conditional_t<SCORE_MODS, seen_tiles, char> visible;
};

template <int D, bool SCORE_MODS>
__global__ void __launch_bounds__(DQ_BM * 2)
    f32_dq_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ backward_planes planes, saved s)
{
    const int BM = DQ_BM, BN = shared_dq<D, SCORE_MODS>::BN, WARPS = BM / 16, THREADS = 32 * WARPS, NT = BN / 8,
              DT = D / 8;
    extern __shared__ __align__(1024) char memory[];
    shared_dq<D, SCORE_MODS> &sm = *reinterpret_cast<shared_dq<D, SCORE_MODS> *>(memory);
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const tile_place place = tile_place_of<BM>(a, blockIdx.x);
    if (!place.exists) return;
    const head_args &x = place.x;
    const int i0 = place.i0;
    const limits limit = limits_of(g, x.s);
    const attn_range seen = attn_keys_of_rows(&g, &x.s, i0, attn_min64(i0 + BM, x.s.Sq));
    const int first = (int)(seen.lo / BN), last = (int)attn_tiles(seen.hi, BN);

    const int64_t q_tile = split_tile_of(planes.q, x.b, x.h, x.s.q_start) + i0 / SPLIT_ROWS;
    const int64_t k_tile = split_tile_of(planes.k, x.b, x.hk, x.s.k_start);
    load_planes<D, BM, THREADS>(sm.Q, planes.q.data + q_tile * 2 * SPLIT_ROWS * D, i0 % SPLIT_ROWS);
    load_planes<D, BM, THREADS>(sm.dO, planes.dout.data + q_tile * 2 * SPLIT_ROWS * D, i0 % SPLIT_ROWS);
    const split_stats q_stats = planes.q.stats[q_tile], o_stats = planes.dout.stats[q_tile];

    uint32_t q_at = by_16<D>(sm.Q, lane) + warp * 32 * D, o_at = by_16<D>(sm.dO, lane) + warp * 32 * D;
    uint32_t k_at = by_8<D>(sm.K, lane), v_at = by_8<D>(sm.V, lane), k_columns_at = by_16<D>(sm.K, lane);
    float lse2[2], delta[2], dQ[DT][4] = {}, top_delta = 0;
    /* for a row that sees only one key, the factor by which P may differ from its true value 1 (see of_one_key()); for
     * other rows, 0 */
    float one_key[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = i0 + warp * 16 + half * 8 + lane / 4;
        const float lse = i < x.s.Sq ? s.lse[lse_at(a, x, i)] : -CUDART_INF_F;
        lse2[half] = lse_in_base_2(lse) - P_BITS;
        delta[half] = i < x.s.Sq ? s.delta[lse_at(a, x, i)] : 0;
        one_key[half] = i < x.s.Sq && s.rest[lse_at(a, x, i)] == ONE_KEY ? expf(one_key_slack(lse)) : 0;
        if (SCORE_MODS && lane % 4 == 0) sm.options[warp].lse2[half * 8 + lane / 4] = lse2[half];
        top_delta = fmaxf(top_delta, fabsf(delta[half]));
    }
    top_delta = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(top_delta)));
    const bool any_one_key = __any_sync(0xffffffff, one_key[0] + one_key[1] > 0);
    const float drop_scale = SCORE_MODS && a.drop_below ? a.drop_scale : 1, o_unit = power_of_two(-o_stats.exponent);
    int j = first;
    const auto above = [&](int n) {
        if constexpr (SCORE_MODS) return seen_tile_above(sm.visible, n, last);
        else return n + 1;
    };
    if constexpr (SCORE_MODS) {
        const int end = (int)attn_min64(i0 + BM, x.s.Sq);
        list_seen_keys<BN, THREADS>(a, (int)x.b, (int)x.h, i0, end, first, last, sm.visible);
        j = above(first - 1);
    }
    for (; j < last; j = above(j)) {
        const int64_t t = k_tile + j * BN / SPLIT_ROWS;
        const split_stats k_stats = planes.k.stats[t], v_stats = planes.v.stats[t];
        __syncthreads(); /* after this barrier no thread reads the previous tile */
        load_planes<D, BN, THREADS>(sm.K, planes.k.data + t * 2 * SPLIT_ROWS * D, j * BN % SPLIT_ROWS);
        load_planes<D, BN, THREADS>(sm.V, planes.v.data + t * 2 * SPLIT_ROWS * D, j * BN % SPLIT_ROWS);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();

        float rows_of_S[1][NT][4], rows_of_dP[1][NT][4], (&S)[NT][4] = rows_of_S[0], (&dP)[NT][4] = rows_of_dP[0];
        opaque(q_at);
        opaque(k_at);
        multiply_rows<D, 1, BN, BM>(rows_of_S, q_at, k_at);
        opaque(o_at);
        opaque(v_at);
        multiply_rows<D, 1, BN, BM>(rows_of_dP, o_at, v_at);
        const float unit = power_of_two(-q_stats.exponent) * power_of_two(-k_stats.exponent);
        const float c = fmaxf(x.scale * LOG2E * unit, 1.2e-38f);
        if (SCORE_MODS) {
            auto &st = sm.options[warp];
            change_scores<false>(S, st.z, lane, [&](int r, int column, float &z) {
                const int i = i0 + warp * 16 + r, key = j * BN + column;
                float derivative = 1;
                z = exponent_of(a, s, x, i, score_log2(a, x, limit, i < x.s.Sq, i, key, z * unit, &derivative),
                                st.lse2[r]);
                if (st.lse2[r] != st.lse2[r]) z += P_BITS;
                st.cap[r][column] = derivative;
            });
            if (a.drop_below)
#pragma unroll 1
                for (int m = lane; m < 16 * NT; m += 32)
                    st.kept[m / NT][m % NT] = kept_of(a, dropout_head(a, x.b, x.h), i0 + warp * 16 + m / NT,
                                                      j * NT + m % NT);
            __syncwarp();
        } else hide_keys(S, limit, i0 + warp * 16 + lane / 4, j * BN + lane % 4 * 2);
        const float v_unit = power_of_two(-v_stats.exponent);
        const int exponent = exponent_for(o_stats.norm * o_unit * (v_stats.norm * v_unit) * drop_scale + top_delta);
        const float to_ds = power_of_two(exponent) * P_UNIT, dp_unit = o_unit * v_unit * drop_scale * to_ds;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = exp2_fast(SCORE_MODS ? S[nt][e] : fmaf(S[nt][e], c, -lse2[e / 2]));
                if (any_one_key) p = of_one_key(p, one_key[e / 2]);
                float factor = dp_unit, cap = 1;
                if (SCORE_MODS) {
                    const int r = e / 2 * 8 + lane / 4;
                    if (a.drop_below && !(sm.options[warp].kept[r][nt] >> (lane % 4 * 2 + e % 2) & 1)) factor = 0;
                    cap = sm.options[warp].cap[r][nt * 8 + lane % 4 * 2 + e % 2];
                }
                S[nt][e] = p * fmaf(dP[nt][e], factor, -delta[e / 2] * to_ds) * cap;
            }
        if (SCORE_MODS) __syncwarp();

        /* dQ += dS K */
        uint32_t ah[NT / 2][4], al[NT / 2][4];
        split_fragments<BN>(ah, al, S);
        opaque(k_columns_at);
        add_products_of_columns<D, BN>(dQ, ah, al, k_columns_at,
                                       power_of_two(-exponent) * power_of_two(-k_stats.exponent));
    }
    cp_async_wait<0>();
    const attn_view &dq = g.view[ATTN_T_dq];
    float *const to = (float *)dq.data + attn_at(&dq, x.b, x.h, x.s.q_start);
    const bool pairs = starts_on_pairs(dq, to, g.dims.D);
    bool is_finite = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t i = i0 + warp * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            const float y0 = dQ[dt][half * 2] * x.scale, y1 = dQ[dt][half * 2 + 1] * x.scale;
            is_finite &= y0 - y0 == 0 && y1 - y1 == 0;
            if (i < x.s.Sq) store_two(to + i * dq.row, dt * 8 + lane % 4 * 2, (int)g.dims.D, pairs, y0, y1);
        }
    }
    const bool wide = sees_wide(a, planes, x, i0, seen);
    if (__syncthreads_or(!is_finite || wide))
        for (int r = warp; r < BM && i0 + r < x.s.Sq; r += WARPS) dq_row(a, s, x, i0 + r);
}

} // namespace

#endif
