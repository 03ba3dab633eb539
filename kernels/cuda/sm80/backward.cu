/* backward.cu: flash attention backward on tensor cores by mma.sync, for any GPU from compute capability 8.0 on.
 *
 * FlashAttention-2 (arXiv:2307.08691), Algorithm 2, with transposed scores. A block owns BN keys of one key/value head; K and V
 * stay in shared memory, and the queries that see them pass by in tiles of BM, for every head of the group:
 *
 *     S^T = K Q^T            dP^T = V dO^T                      a warp owns 16 keys: rows of both
 *     P^T = exp(S^T - lse)   dS^T = P^T (dP^T - delta)          in registers, where they are A operands at once
 *     dV += P^T dO           dK += dS^T Q                       accumulators of the warp's 16 keys: no sum crosses a warp
 *     dQ  = dS K                                                dS by shared memory; added to float32 sums in global memory
 *
 * The additions to dQ come in any order, so its last bits vary from run to run. With `deterministic` they are left out, and a second
 * kernel makes dQ by query tiles: S and dP once more, seven products instead of five. dK and dV are always deterministic: the heads
 * of a group follow each other in one block.
 *
 * Head dims above 128 do not leave registers for both dK and dV: two launches make one each (S is computed twice).
 *
 *   prepare    delta = rowsum(dO O) - dlse (simple.cu), lse dense
 *   dkdv       as above, one block a key tile
 *   finish     dQ = scale * sum, in its dtype               or: dq, one block a query tile
 *   simple.cu  dbias, dalibi_slopes, dsinks where wanted
 *
 * Rows that are not finite are computed once more by rows.cuh, which skips hidden pairs (see forward.cu). */
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/simple/simple.h"
#include "tile.cuh"

extern const cuda_kernel generic_forward; /* forward.cu */

namespace {

enum { BM = 64 }; /* queries a tile */

/* Head dims up to D; keys a block, one warp for 16. */
template <int D> struct tile;
template <> struct tile<64> { static const int BN = 128; };
template <> struct tile<128> { static const int BN = 128; };
template <> struct tile<256> { static const int BN = 64; };

enum part { DK = 1, DV = 2 };

/* Scores on their way through the options: a warp's 16 keys x BM queries, with 1 - tanh^2 and the dropout bits of eight keys. */
struct staged {
    float z[16][BM + 2];
    float cap[16][BM + 2];
    uint8_t kept[BM][2];
};

template <int D, bool OPTIONS> struct shared {
    static const int STAGES = D == 256 || OPTIONS ? 1 : 2;
    alignas(128) uint16_t K[tile<D>::BN * D];
    alignas(128) uint16_t V[tile<D>::BN * D];
    alignas(128) uint16_t Q[STAGES][BM * D];
    alignas(128) uint16_t dO[STAGES][BM * D];
    alignas(128) uint16_t dS[tile<D>::BN * BM]; /* dS^T: rows are keys */
    float lse2[STAGES][BM], delta[STAGES][BM];
    staged options[OPTIONS ? tile<D>::BN / 16 : 1];
};

/* Where the float32 sums of a query tile are: fragments of the dQ product, thread after thread, so that additions are coalesced. */
DEVICE float *sums_of(float *sums, const cuda_args &a, const head_args &x, int query_tile, int D)
{
    const int64_t tiles = a.g.dims.packed ? a.g.dims.total_q / BM + a.g.dims.B : attn_tiles(a.g.dims.Sq, BM);
    const int64_t slot = a.g.dims.packed ? x.s.q_start / BM + x.b : 0;
    const int64_t head = a.g.dims.packed ? x.h : x.b * a.g.dims.H + x.h;
    return sums + (head * tiles + slot + query_tile) * BM * D;
}

/* lse in base 2 and delta of a query tile; past the end, and where a row sees nothing, lse is +inf: P becomes 0. */
DEVICE void load_row_values(float *lse2, float *delta, const cuda_args &a, const saved &s, const head_args &x, int i0, int threads)
{
    for (int r = threadIdx.x; r < BM; r += threads) {
        const bool exists = i0 + r < x.s.Sq;
        const float lse = exists ? s.lse[lse_at(a, x, i0 + r)] : -CUDART_INF_F;
        lse2[r] = lse == -CUDART_INF_F ? CUDART_INF_F : lse * LOG2E;
        delta[r] = exists ? s.delta[lse_at(a, x, i0 + r)] : 0;
    }
}

/* ---- dK, dV and the sums of dQ ------------------------------------------------------------------------------------------------ */

template <typename T, int D, bool OPTIONS, int PARTS>
__global__ void __launch_bounds__(tile<D>::BN * 2, 1) dkdv_tiles(const __grid_constant__ cuda_args a, saved s, float *sums)
{
    typedef shared<D, OPTIONS> Shared;
    const int BN = tile<D>::BN, WARPS = BN / 16, THREADS = 32 * WARPS, NT = BM / 8, DT = D / 8, STAGES = Shared::STAGES;
    extern __shared__ __align__(128) char memory[];
    Shared &sm = *reinterpret_cast<Shared *>(memory);
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    /* Which keys. Packed, sequences own tiles as in tile_place_of(), of keys here. */
    int b = blockIdx.z, j0 = blockIdx.x * BN;
    if (g.dims.packed) {
        int low = 0, high = (int)g.dims.B;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (g.cu_k[middle] / BN + middle <= (int)blockIdx.x) low = middle;
            else high = middle;
        }
        b = low;
        j0 = ((int)blockIdx.x - (g.cu_k[b] / BN + b)) * BN;
    }
    const int hk = blockIdx.y;
    const attn_sequence sequence = attn_sequence_of(&g, b);
    const int Sk_all = g.dims.packed ? (int)sequence.Sk : (int)g.dims.Sk; /* rows of dk to write: seqlens_k leaves zeros behind it */
    if (j0 >= Sk_all) return;
    const int Sk = (int)sequence.Sk, Sq = (int)sequence.Sq;
    const limits limit = limits_of(g, sequence);
    int first = 0, last = 0; /* query tiles */
    if (j0 < Sk) {
        const attn_range lowest = attn_rows_of(&g, &sequence, j0), highest = attn_rows_of(&g, &sequence, attn_min64(j0 + BN, Sk) - 1);
        first = (int)(lowest.lo / BM);
        last = (int)attn_tiles(highest.hi, BM);
    }
    const int tiles = last > first ? last - first : 0, rounds = tiles * (int)g.group;

    loader<D, THREADS>(g.view[ATTN_T_k], b, hk, sequence.k_start, Sk, g.dims.D).template load<BN>(sm.K, j0);
    loader<D, THREADS>(g.view[ATTN_T_v], b, hk, sequence.k_start, Sk, g.dims.Dv).template load<BN>(sm.V, j0);

    /* Queries of round n: head n / tiles of the group, tile n % tiles. */
    auto fetch = [&](int n, int stage) {
        const head_args x = head_args_of(a, b, hk * (int)g.group + n / tiles);
        const int i0 = (first + n % tiles) * BM;
        loader<D, THREADS>(g.view[ATTN_T_q], b, x.h, sequence.q_start, Sq, g.dims.D).template load<BM>(sm.Q[stage], i0);
        loader<D, THREADS>(g.view[ATTN_T_dout], b, x.h, sequence.q_start, Sq, g.dims.Dv).template load<BM>(sm.dO[stage], i0);
        load_row_values(sm.lse2[stage], sm.delta[stage], a, s, x, i0, THREADS);
    };
    if (rounds > 0) fetch(0, 0);
    cp_async_commit();

    float dK[DT][4] = {}, dV[DT][4] = {};
    const float scale_log2 = (float)g.scale * LOG2E;
    const bool want_dq = (PARTS & DK) && sums;

    for (int n = 0; n < rounds; n++) {
        const int stage = STAGES == 2 ? n % 2 : 0, i0 = (first + n % tiles) * BM;
        cp_async_wait<0>();
        __syncthreads(); /* this round's queries are here, and nobody reads the last round's any more */
        if (STAGES == 2 && n + 1 < rounds) {
            fetch(n + 1, 1 - stage);
            cp_async_commit();
        }
        const uint16_t *const Q = sm.Q[stage], *const dO = sm.dO[stage];

        /* S^T = K Q^T, dP^T = V dO^T */
        float S[NT][4] = {}, dP[NT][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            uint32_t ak[4], av[4];
            a_rows<D>(ak, sm.K, warp * 16, kk * 16, lane);
            if (PARTS & DK) a_rows<D>(av, sm.V, warp * 16, kk * 16, lane);
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                uint32_t bq[4];
                b_rows<D>(bq, Q, nt * 8, kk * 16, lane);
                mma<T>(S[nt], ak, bq[0], bq[1]);
                mma<T>(S[nt + 1], ak, bq[2], bq[3]);
                if (PARTS & DK) {
                    b_rows<D>(bq, dO, nt * 8, kk * 16, lane);
                    mma<T>(dP[nt], av, bq[0], bq[1]);
                    mma<T>(dP[nt + 1], av, bq[2], bq[3]);
                }
            }
        }

        /* Masks and options. Element e of block nt: key j0 + 16 warp + 8 (e / 2) + lane / 4, query i0 + 8 nt + 2 (lane % 4) + e % 2. */
        float c = scale_log2;
        if (OPTIONS) {
            staged &st = sm.options[warp];
            const head_args x = head_args_of(a, b, hk * (int)g.group + n / tiles);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) st.z[e / 2 * 8 + lane / 4][nt * 8 + lane % 4 * 2 + e % 2] = S[nt][e];
            __syncwarp();
#pragma unroll 1
            for (int m = lane; m < 16 * BM; m += 32) {
                const int r = m % 16, i = i0 + m / 16, j = j0 + warp * 16 + r;
                float tanh_s = 0, &z = st.z[r][m / 16];
                const bool sees = i < Sq && j < Sk && j >= i + limit.lo && j < i + limit.hi && visible_by_mask(a, x, i, j);
                z = sees ? score(a, x, i, j, z, &tanh_s) * LOG2E : -CUDART_INF_F;
                st.cap[r][m / 16] = 1 - tanh_s * tanh_s;
            }
            if (a.drop_below)
#pragma unroll 1
                for (int m = lane; m < 2 * BM; m += 32) {
                    const attn_philox lanes = attn_dropout_lanes(a.seed, (int64_t)b * g.dims.H + x.h, i0 + m / 2, (j0 + warp * 16) / 8 + m % 2);
                    uint32_t bits = 0;
                    for (int e = 0; e < 8; e++) bits |= (attn_dropout_lane(lanes, e) >= a.drop_below ? 1u : 0u) << e;
                    st.kept[m / 2][m % 2] = (uint8_t)bits;
                }
            __syncwarp();
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) S[nt][e] = st.z[e / 2 * 8 + lane / 4][nt * 8 + lane % 4 * 2 + e % 2];
            c = 1;
        } else {
            /* Is every pair of this warp's keys and these queries permitted? */
            const int jl = j0 + warp * 16, jh = jl + 15;
            const bool free = jl >= i0 + BM - 1 + limit.lo && jh < i0 + limit.hi && jh < Sk;
            if (!free) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int j = jl + half * 8 + lane / 4, i = i0 + lane % 4 * 2;
                    /* key j is seen by queries j - hi < i' <= j - lo */
                    const int low = j < Sk ? j - limit.hi - i : BM, high = j - limit.lo - i;
#pragma unroll
                    for (int nt = 0; nt < NT; nt++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (nt * 8 + e <= low || nt * 8 + e > high) S[nt][half * 2 + e] = -CUDART_INF_F;
                }
            }
        }

        /* P = exp(S - lse), dS = P (dP - delta) */
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float2 lse2 = *(const float2 *)&sm.lse2[stage][nt * 8 + lane % 4 * 2], delta = *(const float2 *)&sm.delta[stage][nt * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = exp2_fast(fmaf(S[nt][e], c, -(e % 2 ? lse2.y : lse2.x)));
                float drop = 1, cap = 1;
                if (OPTIONS) {
                    const staged &st = sm.options[warp];
                    const int query = nt * 8 + lane % 4 * 2 + e % 2, key = e / 2 * 8 + lane / 4;
                    if (a.drop_below) drop = st.kept[query][key / 8] >> (key % 8) & 1 ? a.drop_scale : 0;
                    cap = st.cap[key][query];
                }
                S[nt][e] = p * drop;
                if (PARTS & DK) dP[nt][e] = p * (dP[nt][e] * drop - (e % 2 ? delta.y : delta.x)) * cap;
            }
        }

        /* dS^T to shared memory, for dQ */
        if (want_dq) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint32_t *)(sm.dS + at<BM>(warp * 16 + half * 8 + lane / 4, nt) + lane % 4 * 2) = pack<T>(dP[nt][half * 2], dP[nt][half * 2 + 1]);
        }

        /* dV += P^T dO, dK += dS^T Q */
#pragma unroll
        for (int kk = 0; kk < BM / 16; kk++) {
            uint32_t ap[4], as[4];
            ap[0] = pack<T>(S[kk * 2][0], S[kk * 2][1]);
            ap[1] = pack<T>(S[kk * 2][2], S[kk * 2][3]);
            ap[2] = pack<T>(S[kk * 2 + 1][0], S[kk * 2 + 1][1]);
            ap[3] = pack<T>(S[kk * 2 + 1][2], S[kk * 2 + 1][3]);
            if (PARTS & DK) {
                as[0] = pack<T>(dP[kk * 2][0], dP[kk * 2][1]);
                as[1] = pack<T>(dP[kk * 2][2], dP[kk * 2][3]);
                as[2] = pack<T>(dP[kk * 2 + 1][0], dP[kk * 2 + 1][1]);
                as[3] = pack<T>(dP[kk * 2 + 1][2], dP[kk * 2 + 1][3]);
            }
#pragma unroll
            for (int dt = 0; dt < DT; dt += 2) {
                uint32_t bx[4];
                if (PARTS & DV) {
                    b_columns<D>(bx, dO, dt * 8, kk * 16, lane);
                    mma<T>(dV[dt], ap, bx[0], bx[1]);
                    mma<T>(dV[dt + 1], ap, bx[2], bx[3]);
                }
                if (PARTS & DK) {
                    b_columns<D>(bx, Q, dt * 8, kk * 16, lane);
                    mma<T>(dK[dt], as, bx[0], bx[1]);
                    mma<T>(dK[dt + 1], as, bx[2], bx[3]);
                }
            }
        }

        /* dQ = dS K: four groups of 16 queries, the other warps share the columns, at most 64 at a time */
        if (want_dq) {
            const int GROUPS = BM / 16, SHARES = WARPS / GROUPS, COLUMNS = D / SHARES, CHUNK = COLUMNS < 64 ? COLUMNS : 64;
            __syncthreads();
            const head_args x = head_args_of(a, b, hk * (int)g.group + n / tiles);
            float *const to = sums_of(sums, a, x, first + n % tiles, D) + threadIdx.x;
#pragma unroll
            for (int chunk = 0; chunk < COLUMNS / CHUNK; chunk++) {
                const int column = warp / GROUPS * COLUMNS + chunk * CHUNK;
                float dQ[CHUNK / 8][4] = {};
#pragma unroll
                for (int kk = 0; kk < BN / 16; kk++) {
                    uint32_t as[4];
                    a_columns<BM>(as, sm.dS, warp % GROUPS * 16, kk * 16, lane);
#pragma unroll
                    for (int dt = 0; dt < CHUNK / 8; dt += 2) {
                        uint32_t bk[4];
                        b_columns<D>(bk, sm.K, column + dt * 8, kk * 16, lane);
                        mma<T>(dQ[dt], as, bk[0], bk[1]);
                        mma<T>(dQ[dt + 1], as, bk[2], bk[3]);
                    }
                }
#pragma unroll
                for (int dt = 0; dt < CHUNK / 8; dt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) atomicAdd(to + (chunk * CHUNK / 2 + dt * 4 + e) * THREADS, dQ[dt][e]);
            }
        }
        if (STAGES == 1 && n + 1 < rounds) {
            __syncthreads();
            fetch(n + 1, 0);
            cp_async_commit();
        }
    }

    /* Out. Two 16-bit elements a store; 8 rows of 4 lanes each. */
    const float scale = (float)g.scale;
    bool finite = true;
#pragma unroll
    for (int dt = 0; dt < DT; dt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (PARTS & DK) {
                dK[dt][e] *= scale;
                finite &= dK[dt][e] - dK[dt][e] == 0;
            }
            if (PARTS & DV) finite &= dV[dt][e] - dV[dt][e] == 0;
        }
    const attn_view &dk = g.view[ATTN_T_dk], &dv = g.view[ATTN_T_dv];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int j = j0 + warp * 16 + half * 8 + lane / 4;
        if (j >= Sk_all) continue;
        const int64_t to_k = attn_at(&dk, b, hk, sequence.k_start + j), to_v = attn_at(&dv, b, hk, sequence.k_start + j);
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int d = dt * 8 + lane % 4 * 2 + e;
                if ((PARTS & DK) && dk.data && d < g.dims.D) store_float(dk.dtype, dk.data, to_k + d, dK[dt][half * 2 + e]);
                if ((PARTS & DV) && dv.data && d < g.dims.Dv) store_float(dv.dtype, dv.data, to_v + d, dV[dt][half * 2 + e]);
            }
    }
    if (__syncthreads_or(!finite))
        for (int r = warp; r < BN && j0 + r < Sk_all; r += WARPS) dkdv_row(a, s, b, hk, j0 + r);
}

/* dq from the sums: undoes the order of sums_of(). A block a query tile and head. */
template <int D> __global__ void __launch_bounds__(tile<D>::BN * 2) finish_dq(const __grid_constant__ cuda_args a, saved s, const float *sums)
{
    const int WARPS = tile<D>::BN / 16, THREADS = 32 * WARPS, GROUPS = BM / 16, SHARES = WARPS / GROUPS, COLUMNS = D / SHARES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const tile_place place = tile_place_of<BM>(a, blockIdx.x);
    if (!place.exists) return;
    const head_args &x = place.x;
    const float *from = sums_of(const_cast<float *>(sums), a, x, place.i0 / BM, D) + threadIdx.x;
    const attn_view &dq = a.g.view[ATTN_T_dq];
    bool finite = true;
    for (int n = 0; n < COLUMNS / 2; n++) {
        const int e = n % 4, d = warp / GROUPS * COLUMNS + n / 4 * 8 + lane % 4 * 2 + e % 2;
        const int i = place.i0 + warp % GROUPS * 16 + e / 2 * 8 + lane / 4;
        const float y = from[n * THREADS] * x.scale;
        finite &= y - y == 0;
        if (i < x.s.Sq && d < a.g.dims.D) store_float(dq.dtype, dq.data, attn_at(&dq, x.b, x.h, x.s.q_start + i) + d, y);
    }
    if (__syncthreads_or(!finite))
        for (int r = warp; r < BM && place.i0 + r < x.s.Sq; r += WARPS) dq_row(a, s, x, place.i0 + r);
}

/* ---- dQ by query tiles: deterministic -------------------------------------------------------------------------------------------- */

template <int D, bool OPTIONS> struct shared_dq {
    alignas(128) uint16_t Q[BM * D];
    alignas(128) uint16_t dO[BM * D];
    alignas(128) uint16_t K[BM * D]; /* tiles of BM keys */
    alignas(128) uint16_t V[BM * D];
    struct { float z[16][BM + 4], cap[16][BM + 4]; uint32_t kept[16][BM / 8]; } options[OPTIONS ? BM / 16 : 1];
};

template <typename T, int D, bool OPTIONS>
__global__ void __launch_bounds__(BM * 2) dq_tiles(const __grid_constant__ cuda_args a, saved s)
{
    const int BN = BM, WARPS = BM / 16, THREADS = 32 * WARPS, NT = BN / 8, DT = D / 8;
    extern __shared__ __align__(128) char memory[];
    shared_dq<D, OPTIONS> &sm = *reinterpret_cast<shared_dq<D, OPTIONS> *>(memory);
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const tile_place place = tile_place_of<BM>(a, blockIdx.x);
    if (!place.exists) return;
    const head_args &x = place.x;
    const int i0 = place.i0;
    const limits limit = limits_of(g, x.s);
    const attn_range seen = attn_keys_of_rows(&g, &x.s, i0, attn_min64(i0 + BM, x.s.Sq));
    const int first = (int)(seen.lo / BN), last = (int)attn_tiles(seen.hi, BN);

    loader<D, THREADS>(g.view[ATTN_T_q], x.b, x.h, x.s.q_start, x.s.Sq, g.dims.D).template load<BM>(sm.Q, i0);
    loader<D, THREADS>(g.view[ATTN_T_dout], x.b, x.h, x.s.q_start, x.s.Sq, g.dims.Dv).template load<BM>(sm.dO, i0);
    const loader<D, THREADS> K(g.view[ATTN_T_k], x.b, x.hk, x.s.k_start, x.s.Sk, g.dims.D);
    const loader<D, THREADS> V(g.view[ATTN_T_v], x.b, x.hk, x.s.k_start, x.s.Sk, g.dims.Dv);

    float lse2[2], delta[2], dQ[DT][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = i0 + warp * 16 + half * 8 + lane / 4;
        const float lse = i < x.s.Sq ? s.lse[lse_at(a, x, i)] : -CUDART_INF_F;
        lse2[half] = lse == -CUDART_INF_F ? CUDART_INF_F : lse * LOG2E;
        delta[half] = i < x.s.Sq ? s.delta[lse_at(a, x, i)] : 0;
    }
    for (int j = first; j < last; j++) {
        __syncthreads(); /* nobody reads the last tile any more */
        K.template load<BN>(sm.K, j * BN);
        V.template load<BN>(sm.V, j * BN);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();

        float S[NT][4] = {}, dP[NT][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            uint32_t aq[4], ao[4];
            a_rows<D>(aq, sm.Q, warp * 16, kk * 16, lane);
            a_rows<D>(ao, sm.dO, warp * 16, kk * 16, lane);
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                uint32_t bx[4];
                b_rows<D>(bx, sm.K, nt * 8, kk * 16, lane);
                mma<T>(S[nt], aq, bx[0], bx[1]);
                mma<T>(S[nt + 1], aq, bx[2], bx[3]);
                b_rows<D>(bx, sm.V, nt * 8, kk * 16, lane);
                mma<T>(dP[nt], ao, bx[0], bx[1]);
                mma<T>(dP[nt + 1], ao, bx[2], bx[3]);
            }
        }
        float c = x.scale * LOG2E;
        if (OPTIONS) {
            auto &st = sm.options[warp];
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) st.z[e / 2 * 8 + lane / 4][nt * 8 + lane % 4 * 2 + e % 2] = S[nt][e];
            __syncwarp();
#pragma unroll 1
            for (int m = lane; m < 16 * BN; m += 32) {
                const int r = m / BN, i = i0 + warp * 16 + r, key = j * BN + m % BN;
                float tanh_s = 0, &z = st.z[r][m % BN];
                const bool sees = i < x.s.Sq && key < x.s.Sk && key >= i + limit.lo && key < i + limit.hi && visible_by_mask(a, x, i, key);
                z = sees ? score(a, x, i, key, z, &tanh_s) * LOG2E : -CUDART_INF_F;
                st.cap[r][m % BN] = 1 - tanh_s * tanh_s;
            }
            if (a.drop_below)
#pragma unroll 1
                for (int m = lane; m < 16 * NT; m += 32) {
                    const attn_philox lanes = attn_dropout_lanes(a.seed, x.b * g.dims.H + x.h, i0 + warp * 16 + m / NT, j * NT + m % NT);
                    uint32_t bits = 0;
                    for (int e = 0; e < 8; e++) bits |= (attn_dropout_lane(lanes, e) >= a.drop_below ? 1u : 0u) << e;
                    st.kept[m / NT][m % NT] = bits;
                }
            __syncwarp();
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) S[nt][e] = st.z[e / 2 * 8 + lane / 4][nt * 8 + lane % 4 * 2 + e % 2];
            c = 1;
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = i0 + warp * 16 + half * 8 + lane / 4, column = j * BN + lane % 4 * 2;
                const int low = i + limit.lo - column, high = min(i + limit.hi, limit.Sk) - column;
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (nt * 8 + e < low || nt * 8 + e >= high) S[nt][half * 2 + e] = -CUDART_INF_F;
            }
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = exp2_fast(fmaf(S[nt][e], c, -lse2[e / 2]));
                float drop = 1, cap = 1;
                if (OPTIONS) {
                    const int r = e / 2 * 8 + lane / 4;
                    if (a.drop_below) drop = sm.options[warp].kept[r][nt] >> (lane % 4 * 2 + e % 2) & 1 ? a.drop_scale : 0;
                    cap = sm.options[warp].cap[r][nt * 8 + lane % 4 * 2 + e % 2];
                }
                S[nt][e] = p * (dP[nt][e] * drop - delta[e / 2]) * cap;
            }
        if (OPTIONS) __syncwarp();

        /* dQ += dS K */
#pragma unroll
        for (int kk = 0; kk < BN / 16; kk++) {
            uint32_t as[4];
            as[0] = pack<T>(S[kk * 2][0], S[kk * 2][1]);
            as[1] = pack<T>(S[kk * 2][2], S[kk * 2][3]);
            as[2] = pack<T>(S[kk * 2 + 1][0], S[kk * 2 + 1][1]);
            as[3] = pack<T>(S[kk * 2 + 1][2], S[kk * 2 + 1][3]);
#pragma unroll
            for (int dt = 0; dt < DT; dt += 2) {
                uint32_t bk[4];
                b_columns<D>(bk, sm.K, dt * 8, kk * 16, lane);
                mma<T>(dQ[dt], as, bk[0], bk[1]);
                mma<T>(dQ[dt + 1], as, bk[2], bk[3]);
            }
        }
    }
    const attn_view &dq = g.view[ATTN_T_dq];
    bool finite = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = i0 + warp * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int d = dt * 8 + lane % 4 * 2 + e;
                const float y = dQ[dt][half * 2 + e] * x.scale;
                finite &= y - y == 0;
                if (i < x.s.Sq && d < g.dims.D) store_float(dq.dtype, dq.data, attn_at(&dq, x.b, x.h, x.s.q_start + i) + d, y);
            }
    }
    if (__syncthreads_or(!finite))
        for (int r = warp; r < BM && i0 + r < x.s.Sq; r += WARPS) dq_row(a, s, x, i0 + r);
}

/* ---- Launchers ---------------------------------------------------------------------------------------------------------------------- */

bool has_options(const attn_problem *p, const attn_geometry &g)
{
    return p->softcap > 0 || p->bias.rank || p->alibi_slopes.rank || p->keep_mask.rank || p->mask_startend_rows.rank || p->dropout_p > 0
           || g.scale <= 0;
}

int class_of(const attn_dims &d)
{
    const int64_t D = attn_max64(d.D, d.Dv);
    return D <= 64 ? 64 : D <= 128 ? 128 : 256;
}

int64_t query_rows(const attn_dims &d) { return d.Sq * d.H * (d.packed ? 1 : d.B); }

size_t align_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Parts of the workspace, in this order: lse and delta, sums of dQ, and the forward's results where they are not given. */
struct parts {
    size_t rows, sums, out, lse, total;
};

parts parts_of(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    const attn_dims &d = g.dims;
    const dim3 grid = tile_grid(g, BM);
    parts w;
    w.rows = align_up((size_t)query_rows(d) * 2 * sizeof(float));
    w.sums = p->deterministic || !p->dq.rank ? 0 : align_up((size_t)grid.x * grid.y * grid.z * BM * class_of(d) * sizeof(float));
    w.out = p->out.rank ? 0 : align_up((size_t)query_rows(d) * (size_t)d.Dv * sizeof(float));
    w.lse = p->out.rank ? 0 : align_up((size_t)query_rows(d) * sizeof(float));
    w.total = w.rows + w.sums + w.out + w.lse;
    return w;
}

template <typename K> cudaError_t allow(K kernel, size_t bytes)
{
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

template <typename T, int D, bool OPTIONS, int PARTS>
cudaError_t launch_dkdv(const cuda_args &a, const saved &s, float *sums, cudaStream_t stream)
{
    const attn_dims &d = a.g.dims;
    const int BN = tile<D>::BN;
    const dim3 grid = d.packed ? dim3((unsigned)(d.total_k / BN + d.B), (unsigned)d.Hk) : dim3((unsigned)attn_tiles(d.Sk, BN), (unsigned)d.Hk, (unsigned)d.B);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    const cudaError_t code = allow(dkdv_tiles<T, D, OPTIONS, PARTS>, sizeof(shared<D, OPTIONS>));
    if (code == cudaSuccess) dkdv_tiles<T, D, OPTIONS, PARTS><<<grid, BN * 2, sizeof(shared<D, OPTIONS>), stream>>>(a, s, sums);
    return code;
}

template <typename T, int D, bool OPTIONS> cudaError_t launch_form(const cuda_args &a, const saved &s, float *sums, cudaStream_t stream)
{
    const dim3 grid = tile_grid(a.g, BM);
    const bool queries = grid.x && grid.y && grid.z, dq = a.g.view[ATTN_T_dq].data != nullptr;
    cudaError_t code = cudaSuccess;
    if constexpr (D <= 128) code = launch_dkdv<T, D, OPTIONS, DK | DV>(a, s, sums, stream);
    else {
        code = launch_dkdv<T, D, OPTIONS, DK>(a, s, sums, stream);
        if (code == cudaSuccess) code = launch_dkdv<T, D, OPTIONS, DV>(a, s, nullptr, stream);
    }
    if (code == cudaSuccess && dq && queries) {
        if (sums) finish_dq<D><<<grid, tile<D>::BN * 2, 0, stream>>>(a, s, sums);
        else {
            code = allow(dq_tiles<T, D, OPTIONS>, sizeof(shared_dq<D, OPTIONS>));
            if (code == cudaSuccess) dq_tiles<T, D, OPTIONS><<<grid, BM * 2, sizeof(shared_dq<D, OPTIONS>), stream>>>(a, s);
        }
    }
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

template <typename T> cudaError_t launch(const cuda_args &a, const saved &s, float *sums, bool options, cudaStream_t stream)
{
    switch (class_of(a.g.dims)) {
    case 64: return options ? launch_form<T, 64, true>(a, s, sums, stream) : launch_form<T, 64, false>(a, s, sums, stream);
    case 128: return options ? launch_form<T, 128, true>(a, s, sums, stream) : launch_form<T, 128, false>(a, s, sums, stream);
    default: return options ? launch_form<T, 256, true>(a, s, sums, stream) : launch_form<T, 256, false>(a, s, sums, stream);
    }
}

template <int D> size_t most_shared()
{
    const size_t dkdv = sizeof(shared<D, true>) > sizeof(shared<D, false>) ? sizeof(shared<D, true>) : sizeof(shared<D, false>);
    return dkdv > sizeof(shared_dq<D, true>) ? dkdv : sizeof(shared_dq<D, true>);
}

bool covers(const cuda_chip *chip, const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    const int D = class_of(d);
    const size_t bytes = D == 64 ? most_shared<64>() : D == 128 ? most_shared<128>() : most_shared<256>();
    return (p->q.dtype == ATTN_F16 || p->q.dtype == ATTN_BF16) && p->dout.dtype == p->q.dtype && tile_grid_fits(d) && bytes <= (size_t)chip->shared_bytes;
}

size_t workspace(const cuda_chip *, const attn_problem *p) { return parts_of(p).total; }

cudaError_t run(const cuda_chip *chip, cudaStream_t stream, const attn_problem *p, void *memory)
{
    const parts w = parts_of(p);
    char *at = (char *)memory;
    attn_problem whole = *p;
    saved s;
    cudaError_t code = cudaSuccess;
    s.lse = (float *)at;
    s.delta = s.lse + query_rows(attn_dims_of(p));
    float *const sums = w.sums ? (float *)(at + w.rows) : nullptr;
    if (!p->out.rank) { /* the forward first, with out in float32 */
        attn_problem forward = *p;
        const attn_dims d = attn_dims_of(p);
        int64_t shape[4], lse_shape[3] = { d.B, d.H, d.Sq };
        for (int i = 0; i < p->q.rank; i++) shape[i] = p->q.shape[i];
        shape[p->q.rank - 1] = d.Dv;
        forward.op = ATTN_OP_FORWARD;
        forward.out = attn_tensor_make(at + w.rows + w.sums, ATTN_F32, p->q.rank, shape);
        forward.lse = d.packed ? attn_tensor_make(at + w.rows + w.sums + w.out, ATTN_F32, 2, lse_shape + 1)
                               : attn_tensor_make(at + w.rows + w.sums + w.out, ATTN_F32, 3, lse_shape);
        code = generic_forward.run(chip, stream, &forward, nullptr);
        whole.out = forward.out;
        whole.lse = forward.lse;
    }
    const cuda_args a = cuda_args_of(&whole);
    s.out = a.g.view[ATTN_T_out];
    simple_delta(a, s, true, stream);
    if (code == cudaSuccess && sums) code = cudaMemsetAsync(sums, 0, w.sums, stream);
    const bool options = has_options(p, a.g);
    if (code == cudaSuccess)
        code = p->q.dtype == ATTN_BF16 ? launch<__nv_bfloat16>(a, s, sums, options, stream) : launch<__half>(a, s, sums, options, stream);
    simple_gradients(p, a, s, stream);
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

} // namespace

extern const cuda_kernel generic_backward = { "generic", ATTN_OP_BACKWARD, 80, covers, workspace, run };
