/* backward.cu: flash attention backward on tensor cores by mma.sync, from compute capability 8.0 on: Algorithm 2 of
 * FlashAttention-2 (arXiv:2307.08691), with transposed scores. A block owns BN keys of one key/value head, whose K and
 * V stay in shared memory. It visits, in tiles of BM queries, all queries that see one of these keys:
 *
 * S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q, dQ = dS K
 *
 * dQ is added to float32 sums in global memory in any order, so its last bits vary from run to run. With
 * `deterministic`, the kernel dq_tiles computes dQ by query tiles instead. dK and dV are always deterministic. With
 * head dims above 128, dK and dV do not both fit in registers: one launch computes dK and another dV.
 *
 * The kernels are, in order (without `deterministic`):
 * prepare: delta, and lse in base 2
 * dkdv_wide (head dims up to 128, no options such as softcap, bias or masks) or dkdv_tiles: dK, dV and the sums of dQ
 * finish: dQ = scale * sum
 *
 * Rows whose result is not finite are recomputed with rows.cuh (see forward.cu). */
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/simple/simple.h"
#include "backward_wide.cuh"
#include "option_gradients.h"
#include "seen_tiles.cuh"
#include "recompute.h"

cudaError_t forward_parts(const cuda_chip *chip, cuda_args a, const attn_plan *plan, cudaStream_t stream);

namespace {

/* Tile sizes for head sizes up to D. A block computes dK, dV or both for BN keys, with one warp for each 16 keys. */
template <int D> struct tile;
template <> struct tile<64> {
    static const int BN = 128;
};
template <> struct tile<128> {
    static const int BN = 128;
};
template <> struct tile<256> {
    static const int BN = 64;
};

enum part { DK = 1, DV = 2 };

/* ---- The kernel for options, and for head dims above 128 --------------------------------------------------------- */

template <int D, bool SCORE_MODS> struct shared {
    static const int STAGES = D == 256 || SCORE_MODS ? 1 : 2;
    alignas(1024) uint16_t K[tile<D>::BN * D];
    alignas(1024) uint16_t V[tile<D>::BN * D];
    alignas(1024) uint16_t Q[STAGES][BM * D];
    alignas(1024) uint16_t dO[STAGES][BM * D];
    /* dS^T (transposed): a row is a key, a column a query */
    alignas(1024) uint16_t dS[tile<D>::BN * BM];
    alignas(16) row_values values[STAGES];
    staged_queries<BM> options[SCORE_MODS ? tile<D>::BN / 16 : 1];
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
};

/* Computes this block's part of dQ for one query tile: dS K, summed over the block's keys. Adds it to the tile's
 * float32 sums of dQ (`sums`). Each warp computes 16 of the 64 queries, in chunks of at most 64 columns. */
template <typename T, int D, bool SCORE_MODS>
DEVICE void add_dq(shared<D, SCORE_MODS> &sm, float *sums, uint32_t tileK, int warp, int lane)
{
    const int BN = tile<D>::BN, GROUPS = BM / 16, SHARES = BN / 16 / GROUPS, COLUMNS = D / SHARES,
              CHUNK = COLUMNS < 64 ? COLUMNS : 64;
#pragma unroll
    for (int chunk = 0; chunk < COLUMNS / CHUNK; chunk++) {
        const int column = warp / GROUPS * COLUMNS + chunk * CHUNK;
        float dQ[CHUNK / 8][4] = {};
#pragma unroll
        for (int kk = 0; kk < BN / 16; kk++) {
            uint32_t as[4];
            a_columns<BM>(as, smem_addr(sm.dS), warp % GROUPS * 16, kk * 16, lane);
#pragma unroll
            for (int dt = 0; dt < CHUNK / 8; dt += 2) {
                uint32_t bk[4];
                b_columns<D>(bk, tileK, column + dt * 8, kk * 16, lane);
                mma<T>(dQ[dt], as, bk[0], bk[1]);
                mma<T>(dQ[dt + 1], as, bk[2], bk[3]);
            }
        }
#pragma unroll
        for (int dt = 0; dt < CHUNK / 8; dt++)
            add_fragment(sums + fragment_at<D>(warp % GROUPS * 16, column + dt * 8), lane, dQ[dt]);
    }
}

template <typename T, int D, bool SCORE_MODS, int PARTS>
__global__ void __launch_bounds__(tile<D>::BN * 2, 1)
    dkdv_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ scratch w)
{
    typedef shared<D, SCORE_MODS> Shared;
    const int BN = tile<D>::BN, WARPS = BN / 16, THREADS = 32 * WARPS, NT = BM / 8, DT = D / 8, STAGES = Shared::STAGES;
    Shared &sm = block_memory<Shared>();
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    key_place place = key_place_of<BN>(a, limits_of_whole(a.g), blockIdx);
    if (place.rows == 0) return;
    find_queries<BN>(place);
    const int b = place.b, hk = place.hk, j0 = place.j0, Sk = (int)place.s.Sk, Sq = (int)place.s.Sq,
              first = place.first;
    const limits limit = place.limit;
    const int tiles = place.last - first, rounds = tiles * (int)g.group;
    int n = 0;
    if constexpr (SCORE_MODS) {
        list_seen_rounds<BM, THREADS>(a, b, hk, j0, min(j0 + BN, Sk), first, tiles, sm.seen);
        n = seen_tile_above(sm.seen, -1, rounds);
    }
    const auto above = [&](int n) {
        if constexpr (SCORE_MODS) return seen_tile_above(sm.seen, n, rounds);
        else return n + 1;
    };

    loader<D, THREADS>(g.view[ATTN_T_k], b, hk, place.s.k_start, Sk, g.dims.D).template load<BN>(sm.K, j0);
    loader<D, THREADS>(g.view[ATTN_T_v], b, hk, place.s.k_start, Sk, g.dims.Dv).template load<BN>(sm.V, j0);

    auto fetch = [&](int n, int stage) {
        const head_args x = head_args_of(a, b, hk * (int)g.group + n / tiles);
        const int i0 = (first + n % tiles) * BM;
        loader<D, THREADS>(g.view[ATTN_T_q], b, x.h, place.s.q_start, Sq, g.dims.D).template load<BM>(sm.Q[stage], i0);
        loader<D, THREADS>(g.view[ATTN_T_dout], b, x.h, place.s.q_start, Sq, g.dims.Dv)
            .template load<BM>(sm.dO[stage], i0);
        load_values(&sm.values[stage], w.values + query_tile(a, place.s, b, (int)x.h, first + n % tiles));
    };
    if (n < rounds) fetch(n, 0);
    cp_async_commit();

    float dK[1][DT][4] = {}, dV[1][DT][4] = {};
    const uint32_t tileK = smem_addr(sm.K);
    const float scale_log2 = (float)g.scale * LOG2E;
    const bool want_dq = (PARTS & DK) && w.sums;

    for (int next; n < rounds; n = next) {
        const int stage = STAGES == 2 ? n % 2 : 0, i0 = (first + n % tiles) * BM;
        cp_async_wait<0>();
        /* after this barrier the tile's queries have arrived, and no thread reads those of the previous tile */
        __syncthreads();
        next = above(n);
        if (STAGES == 2 && next < rounds) {
            fetch(next, 1 - stage);
            cp_async_commit();
        }
        const uint32_t Q = smem_addr(sm.Q[stage]), dO = smem_addr(sm.dO[stage]);

        float S[NT][4] = {}, dP[NT][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            uint32_t ak[4], av[4];
            a_rows<D>(ak, tileK, warp * 16, kk * 16, lane);
            if (PARTS & DK) a_rows<D>(av, smem_addr(sm.V), warp * 16, kk * 16, lane);
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

        /* element e of a thread's n-th block of accumulators belongs to query i0 + 8 n + 2 (lane % 4) + e % 2 and key
         * j0 + 16 warp + 8 (e / 2) + lane / 4 */
        if (SCORE_MODS) {
            const head_args x = head_args_of(a, b, hk * (int)g.group + n / tiles);
            apply_options(S, sm.options[warp], a, w.s, x, limit, Sq, i0, j0 + warp * 16, 1, sm.values[stage].lse2, 0,
                          lane);
        } else hide_hidden_queries<BM>(S, limit, Sk, i0, j0 + warp * 16, lane);

            /* P = exp(S - lse), dS = P (dP - delta) */
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float2 lse2 = *(const float2 *)&sm.values[stage].lse2[nt * 8 + lane % 4 * 2],
                         delta = *(const float2 *)&sm.values[stage].delta[nt * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = exp2_fast(SCORE_MODS ? S[nt][e]
                                                     : fmaf(S[nt][e], scale_log2, -(e % 2 ? lse2.y : lse2.x)));
                float drop = 1, cap = 1;
                if (SCORE_MODS) {
                    const auto &st = sm.options[warp];
                    const int query = nt * 8 + lane % 4 * 2 + e % 2, key = e / 2 * 8 + lane / 4;
                    if (a.drop_below) drop = st.kept[query][key / 8] >> (key % 8) & 1 ? a.drop_scale : 0;
                    cap = st.cap[key][query];
                }
                S[nt][e] = p * drop;
                if (PARTS & DK) dP[nt][e] = p * (dP[nt][e] * drop - (e % 2 ? delta.y : delta.x)) * cap;
            }
        }

        /* each warp needs dS^T of all warps to compute dQ, so dS^T goes to shared memory */
        if (want_dq) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint32_t *)(sm.dS + at<BM>(warp * 16 + half * 8 + lane / 4, nt) +
                                  lane % 4 * 2) = pack<T>(dP[nt][half * 2], dP[nt][half * 2 + 1]);
        }

#pragma unroll
        for (int kk = 0; kk < BM / 16; kk++) {
            uint32_t ap[4], as[4];
            to_operand<T>(ap, S, kk);
            if (PARTS & DK) to_operand<T>(as, dP, kk);
#pragma unroll
            for (int dt = 0; dt < DT; dt += 2) {
                uint32_t bx[4];
                if (PARTS & DV) {
                    b_columns<D>(bx, dO, dt * 8, kk * 16, lane);
                    mma<T>(dV[0][dt], ap, bx[0], bx[1]);
                    mma<T>(dV[0][dt + 1], ap, bx[2], bx[3]);
                }
                if (PARTS & DK) {
                    b_columns<D>(bx, Q, dt * 8, kk * 16, lane);
                    mma<T>(dK[0][dt], as, bx[0], bx[1]);
                    mma<T>(dK[0][dt + 1], as, bx[2], bx[3]);
                }
            }
        }

        if (want_dq) {
            __syncthreads();
            add_dq<T>(sm,
                      w.sums + query_tile(a, place.s, b, hk * (int)g.group + n / tiles, first + n % tiles) * (BM * D),
                      tileK, warp, lane);
        }
        if (STAGES == 1 && next < rounds) {
            __syncthreads();
            fetch(next, 0);
            cp_async_commit();
        }
    }

    const attn_view &dk = g.view[ATTN_T_dk], &dv = g.view[ATTN_T_dv];
    const int64_t line = place.s.k_start + j0;
    bool finite = true;
    if (PARTS & DK) finite &= scale_block(dK, (float)g.scale);
    if (PARTS & DV) finite &= scale_block(dV, 1);
    /* The loop waits for the copies of K and V. If no query sees the block's keys, the loop did not run, and these
     * copies may still be in flight. */
    cp_async_wait<0>();
    /* after this barrier no thread reads the tiles in shared memory, so results may overwrite them */
    const bool poisoned = __syncthreads_or(!finite);
    if ((PARTS & DK) && dk.data) {
        const bool pieces = in_pieces<T>(dk, b, hk, line, g.dims.D);
        /* the shared memory of K and V together has room for D floats for each of the block's keys */
        stage_block<T, D>(sm.K, pieces, dK, warp * 16, 0, lane);
        __syncthreads();
        store_rows<D, THREADS>(dk, b, hk, line, 0, place.rows, (int)g.dims.D, sm.K, pieces, threadIdx.x);
        __syncthreads();
    }
    if ((PARTS & DV) && dv.data) {
        const bool pieces = in_pieces<T>(dv, b, hk, line, g.dims.Dv);
        stage_block<T, D>(sm.K, pieces, dV, warp * 16, 0, lane);
        __syncthreads();
        store_rows<D, THREADS>(dv, b, hk, line, 0, place.rows, (int)g.dims.Dv, sm.K, pieces, threadIdx.x);
    }
    if (poisoned) {
        __syncthreads();
        for (int r = warp; r < place.rows; r += WARPS) dkdv_row(a, w.s, b, hk, j0 + r);
    }
}

/* ---- The kernel that computes dQ by tiles of queries, for the option `deterministic` ----------------------------- */

template <int D, bool SCORE_MODS> struct shared_dq {
    alignas(1024) uint16_t Q[BM * D];
    alignas(1024) uint16_t dO[BM * D];
    alignas(1024) uint16_t K[BM * D]; /* K and V each hold one tile of BM keys */
    alignas(1024) uint16_t V[BM * D];
    struct {
        float z[16][BM + 4], cap[16][BM + 4], lse2[16];
        uint32_t kept[16][BM / 8];
    } options[SCORE_MODS ? BM / 16 : 1];
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
};

template <typename T, int D, bool SCORE_MODS>
__global__ void __launch_bounds__(BM * 2) dq_tiles(const __grid_constant__ cuda_args a, saved s)
{
    const int BN = BM, WARPS = BM / 16, THREADS = 32 * WARPS, NT = BN / 8, DT = D / 8;
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

    loader<D, THREADS>(g.view[ATTN_T_q], x.b, x.h, x.s.q_start, x.s.Sq, g.dims.D).template load<BM>(sm.Q, i0);
    loader<D, THREADS>(g.view[ATTN_T_dout], x.b, x.h, x.s.q_start, x.s.Sq, g.dims.Dv).template load<BM>(sm.dO, i0);
    cp_async_commit();
    const loader<D, THREADS> K(g.view[ATTN_T_k], x.b, x.hk, x.s.k_start, x.s.Sk, g.dims.D);
    const loader<D, THREADS> V(g.view[ATTN_T_v], x.b, x.hk, x.s.k_start, x.s.Sk, g.dims.Dv);

    float lse2[2], delta[2], dQ[1][DT][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = i0 + warp * 16 + half * 8 + lane / 4;
        const float lse = i < x.s.Sq ? s.lse[lse_at(a, x, i)] : -CUDART_INF_F;
        lse2[half] = lse_in_base_2(lse);
        delta[half] = i < x.s.Sq ? s.delta[lse_at(a, x, i)] : 0;
        if (SCORE_MODS && lane % 4 == 0) sm.options[warp].lse2[half * 8 + lane / 4] = lse2[half];
    }
    if constexpr (SCORE_MODS) {
        const int end = (int)attn_min64(i0 + BM, x.s.Sq);
        list_seen_keys<BN, THREADS>(a, (int)x.b, (int)x.h, i0, end, first, last, sm.seen);
    }
    for (int j = first; j < last; j++) {
        if constexpr (SCORE_MODS) {
            j = seen_tile_above(sm.seen, j - 1, last);
            if (j == last) break;
        }
        __syncthreads(); /* after this barrier no thread reads the previous tile */
        K.template load<BN>(sm.K, j * BN);
        V.template load<BN>(sm.V, j * BN);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();

        float S[NT][4] = {}, dP[NT][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            uint32_t aq[4], ao[4];
            a_rows<D>(aq, smem_addr(sm.Q), warp * 16, kk * 16, lane);
            a_rows<D>(ao, smem_addr(sm.dO), warp * 16, kk * 16, lane);
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                uint32_t bx[4];
                b_rows<D>(bx, smem_addr(sm.K), nt * 8, kk * 16, lane);
                mma<T>(S[nt], aq, bx[0], bx[1]);
                mma<T>(S[nt + 1], aq, bx[2], bx[3]);
                b_rows<D>(bx, smem_addr(sm.V), nt * 8, kk * 16, lane);
                mma<T>(dP[nt], ao, bx[0], bx[1]);
                mma<T>(dP[nt + 1], ao, bx[2], bx[3]);
            }
        }
        const float c = x.scale * LOG2E;
        if (SCORE_MODS) {
            auto &st = sm.options[warp];
            change_scores<false>(S, st.z, lane, [&](int r, int column, float &z) {
                const int i = i0 + warp * 16 + r, key = j * BN + column;
                float derivative = 1;
                z = exponent_of(a, s, x, i, score_log2(a, x, limit, i < x.s.Sq, i, key, z, &derivative), st.lse2[r]);
                st.cap[r][column] = derivative;
            });
            if (a.drop_below)
#pragma unroll 1
                for (int m = lane; m < 16 * NT; m += 32)
                    st.kept[m / NT][m % NT] = kept_of(a, dropout_head(a, x.b, x.h), i0 + warp * 16 + m / NT,
                                                      j * NT + m % NT);
            __syncwarp();
        } else hide_keys(S, limit, i0 + warp * 16 + lane / 4, j * BN + lane % 4 * 2);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = exp2_fast(SCORE_MODS ? S[nt][e] : fmaf(S[nt][e], c, -lse2[e / 2]));
                float drop = 1, cap = 1;
                if (SCORE_MODS) {
                    const int r = e / 2 * 8 + lane / 4;
                    if (a.drop_below)
                        drop = sm.options[warp].kept[r][nt] >> (lane % 4 * 2 + e % 2) & 1 ? a.drop_scale : 0;
                    cap = sm.options[warp].cap[r][nt * 8 + lane % 4 * 2 + e % 2];
                }
                S[nt][e] = p * (dP[nt][e] * drop - delta[e / 2]) * cap;
            }
        if (SCORE_MODS) __syncwarp();

            /* dQ += dS K */
#pragma unroll
        for (int kk = 0; kk < BN / 16; kk++) {
            uint32_t as[4];
            to_operand<T>(as, S, kk);
#pragma unroll
            for (int dt = 0; dt < DT; dt += 2) {
                uint32_t bk[4];
                b_columns<D>(bk, smem_addr(sm.K), dt * 8, kk * 16, lane);
                mma<T>(dQ[0][dt], as, bk[0], bk[1]);
                mma<T>(dQ[0][dt + 1], as, bk[2], bk[3]);
            }
        }
    }
    /* The loop waits for the copies of Q and dO. If the queries see no key, the loop did not run, and these copies may
     * still be in flight. */
    cp_async_wait<0>();
    const attn_view &dq = g.view[ATTN_T_dq];
    /* after this barrier no thread reads the tiles in shared memory, so results may overwrite them */
    const bool poisoned = __syncthreads_or(!scale_block(dQ, x.scale));
    const int64_t line = x.s.q_start + i0;
    const int rows = (int)attn_min64(BM, x.s.Sq - i0);
    const bool pieces = in_pieces<T>(dq, x.b, x.h, line, g.dims.D);
    /* the shared memory of Q and dO together has room for D floats for each of the block's queries */
    stage_block<T, D>(sm.Q, pieces, dQ, warp * 16, 0, lane);
    __syncthreads();
    store_rows<D, THREADS>(dq, x.b, x.h, line, 0, rows, (int)g.dims.D, sm.Q, pieces, threadIdx.x);
    if (poisoned) {
        __syncthreads();
        for (int r = warp; r < rows; r += WARPS) dq_row(a, s, x, i0 + r);
    }
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

size_t align_up(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Sizes in bytes of the parts of the workspace, in the order of the parts: lse, delta and rest (see struct saved) of
 * each row; row_values of each query tile; the float32 sums of dQ; the workspace of option_gradients(); and, if the
 * client did not give them, the recomputed tensors out and lse. */
struct parts {
    size_t rows, values, sums, gradients, out, lse, total;
};

parts parts_of(const attn_plan *plan, bool adds)
{
    const attn_problem *p = plan->problem;
    const attn_dims &d = plan->geometry.dims;
    const dim3 grid = tile_grid(plan->geometry, BM);
    parts w;
    w.rows = align_up(saved_floats(plan) * sizeof(float));
    w.values = align_up((size_t)grid.x * grid.y * grid.z * sizeof(row_values));
    w.sums = adds && p->dq.rank ? align_up((size_t)grid.x * grid.y * grid.z * BM * backward_class(d) * sizeof(float))
                                : 0;
    w.gradients = align_up(option_gradient_bytes(plan));
    w.out = p->out.rank ? 0 : align_up(recomputed_out_bytes(d));
    w.lse = p->out.rank ? 0 : align_up(recomputed_lse_bytes(d));
    w.total = w.rows + w.values + w.sums + w.gradients + w.out + w.lse;
    return w;
}

dim3 key_grid(const attn_dims &d, int BN)
{
    return d.packed ? dim3((unsigned)(d.total_k / BN + d.B), (unsigned)d.Hk)
                    : dim3((unsigned)attn_tiles(d.Sk, BN), (unsigned)d.Hk, (unsigned)d.B);
}

bool is_empty(dim3 grid)
{
    return grid.x == 0 || grid.y == 0 || grid.z == 0;
}

template <typename T, int D, bool SCORE_MODS, int PARTS>
cudaError_t launch_dkdv(const cuda_chip *chip, cuda_args a, const scratch &w, cudaStream_t stream)
{
    dim3 grid = key_grid(a.g.dims, tile<D>::BN);
    take_share(chip, a, grid);
    if (is_empty(grid)) return cudaSuccess;
    const cudaError_t code = allow_shared<dkdv_tiles<T, D, SCORE_MODS, PARTS>>(sizeof(shared<D, SCORE_MODS>));
    if (code == cudaSuccess)
        dkdv_tiles<T, D, SCORE_MODS, PARTS><<<grid, tile<D>::BN * 2, sizeof(shared<D, SCORE_MODS>), stream>>>(a, w);
    return code;
}

/* bytes of shared memory that dkdv_wide() needs if it has one tile of dS instead of two */
template <int D> constexpr size_t least_wide = sizeof(shared_wide<D>) - sizeof(shared_wide<D>::dS) / 2;

template <typename T, int D>
cudaError_t launch_wide(const cuda_chip *chip, cuda_args a, const scratch &w, cudaStream_t stream)
{
    typedef shared_wide<D> Shared;
    dim3 grid = key_grid(a.g.dims, Shared::BN);
    take_share(chip, a, grid);
    if (is_empty(grid)) return cudaSuccess;
    const bool both = sizeof(Shared) <= (size_t)chip->shared_bytes;
    const size_t bytes = both ? sizeof(Shared) : least_wide<D>;
    const cudaError_t code = allow_shared<dkdv_wide<T, D>>(bytes);
    if (code == cudaSuccess)
        dkdv_wide<T, D>
            <<<grid, Shared::THREADS, bytes, stream>>>(a, w, limits_of_whole(a.g), both ? Shared::BN * BM : 0);
    return code;
}

template <typename T, int D, bool SCORE_MODS>
cudaError_t launch_variant(const cuda_chip *chip, cuda_args a, const scratch &w, cudaStream_t stream)
{
    dim3 grid = tile_grid(a.g, BM);
    cudaError_t code = cudaSuccess;
    if constexpr (D <= 128 && !SCORE_MODS) code = launch_wide<T, D>(chip, a, w, stream);
    else if constexpr (D <= 128) code = launch_dkdv<T, D, SCORE_MODS, DK | DV>(chip, a, w, stream);
    else {
        const scratch without_dq = { w.s, w.values };
        code = launch_dkdv<T, D, SCORE_MODS, DK>(chip, a, w, stream);
        if (code == cudaSuccess) code = launch_dkdv<T, D, SCORE_MODS, DV>(chip, a, without_dq, stream);
    }
    take_share(chip, a, grid);
    if (code == cudaSuccess && a.g.view[ATTN_T_dq].data && !w.sums && !is_empty(grid)) {
        code = allow_shared<dq_tiles<T, D, SCORE_MODS>>(sizeof(shared_dq<D, SCORE_MODS>));
        if (code == cudaSuccess)
            dq_tiles<T, D, SCORE_MODS><<<grid, BM * 2, sizeof(shared_dq<D, SCORE_MODS>), stream>>>(a, w.s);
    }
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

template <typename T>
cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, const scratch &w, bool options, cudaStream_t stream)
{
    switch (backward_class(a.g.dims)) {
    case 64:
        return options ? launch_variant<T, 64, true>(chip, a, w, stream)
                       : launch_variant<T, 64, false>(chip, a, w, stream);
    case 128:
        return options ? launch_variant<T, 128, true>(chip, a, w, stream)
                       : launch_variant<T, 128, false>(chip, a, w, stream);
    default:
        return options ? launch_variant<T, 256, true>(chip, a, w, stream)
                       : launch_variant<T, 256, false>(chip, a, w, stream);
    }
}

template <int D> size_t most_shared(bool options, bool deterministic)
{
    size_t keys = options ? sizeof(shared<D, true>) : sizeof(shared<D, false>);
    if constexpr (D <= 128) keys = options ? sizeof(shared<D, true>) : least_wide<D>;
    const size_t dq = !deterministic ? 0 : options ? sizeof(shared_dq<D, true>) : sizeof(shared_dq<D, false>);
    return keys > dq ? keys : dq;
}

template <typename T, int D> void launch_prepare(const cuda_args &a, const scratch &w, dim3 grid, cudaStream_t stream)
{
    prepare<T, D><<<grid, 128, 0, stream>>>(a, w);
}
template <typename T, int D> void launch_finish(const cuda_args &a, const scratch &w, dim3 grid, cudaStream_t stream)
{
    finish<T, D><<<grid, 256, 0, stream>>>(a, w);
}

struct steps_row {
    int D;
    void (*prepare[2])(const cuda_args &, const scratch &, dim3, cudaStream_t);
    void (*finish[2])(const cuda_args &, const scratch &, dim3, cudaStream_t);
};
template <int D> constexpr steps_row steps_of()
{
    return { D,
             { launch_prepare<__nv_bfloat16, D>, launch_prepare<__half, D> },
             { launch_finish<__nv_bfloat16, D>, launch_finish<__half, D> } };
}
const steps_row steps[] = { steps_of<64>(), steps_of<128>(), steps_of<256>() };

const steps_row &steps_for(const attn_dims &d)
{
    const int D = backward_class(d);
    return steps[D == 64 ? 0 : D == 128 ? 1 : 2];
}

bool adds_dq(const attn_plan *plan)
{
    return !plan->problem->deterministic;
}

bool plan(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    const int D = backward_class(d);
    const bool options = has_options(plan), deterministic = plan->problem->deterministic;
    const size_t bytes = D == 64    ? most_shared<64>(options, deterministic)
                         : D == 128 ? most_shared<128>(options, deterministic)
                                    : most_shared<256>(options, deterministic);
    if (!tile_grid_fits(d) || bytes > (size_t)chip->shared_bytes) return false;
    plan->workspace_bytes = backward_bytes(chip, plan, adds_dq(plan));
    return plan->workspace_bytes > 0;
}

cudaError_t finish_dq(const attn_plan *plan, const backward_run &run, cudaStream_t stream)
{
    const dim3 grid = tile_grid(run.args.g, BM);
    if (run.scratch.sums && !is_empty(grid))
        steps_for(run.args.g.dims).finish[plan->problem->q.dtype == ATTN_F16](run.args, run.scratch, grid, stream);
    return cudaPeekAtLastError();
}

cudaError_t launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const bool by_tiles = parts_by_tiles(plan), options = has_options(plan);
    const double seconds = tile_seconds(chip, plan);
    backward_run run = {};
    cudaError_t code = begin_backward(chip, stream, plan, adds_dq(plan), memory, &run);
    if (code != cudaSuccess) return code;
    if (by_tiles) run.args.part_lse = run.scratch.s.lse, run.args.part_rest = run.scratch.s.rest;
    const auto before = [&](const cuda_chip *part) {
        const cudaError_t prepared = is_first_share(part) ? prepare_backward(stream, plan, run) : cudaSuccess;
        return prepared == cudaSuccess && by_tiles ? forward_parts(part, run.args, plan, stream) : prepared;
    };
    const auto tiles = [&](const cuda_chip *part) {
        const cudaError_t launched = plan->problem->q.dtype == ATTN_BF16
                                         ? launch_for<__nv_bfloat16>(part, run.args, run.scratch, options, stream)
                                         : launch_for<__half>(part, run.args, run.scratch, options, stream);
        return launched == cudaSuccess && is_last_share(part) ? finish_dq(plan, run, stream) : launched;
    };
    code = in_shares_after(chip, by_tiles ? seconds : 0, before, seconds, tiles);
    return code == cudaSuccess ? end_backward(chip, stream, plan, run) : code;
}

} // namespace

int backward_class(const attn_dims &d)
{
    const int64_t D = attn_max64(d.D, d.Dv);
    return D <= 64 ? 64 : D <= 128 ? 128 : 256;
}

size_t backward_bytes(const cuda_chip *chip, const attn_plan *plan, bool adds)
{
    recomputed_forward forward;
    if (plan->problem->out.rank) return parts_of(plan, adds).total;
    if (!plan_first_recomputed(&forward, chip, plan, nullptr, nullptr)) return 0;
    return parts_of(plan, adds).total + align_up(forward.plan.workspace_bytes);
}

cudaError_t begin_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, bool adds, void *memory,
                           backward_run *run)
{
    const parts w = parts_of(plan, adds);
    cuda_args &a = run->args;
    scratch &k = run->scratch;
    char *const at = (char *)memory, *const gradients = at + w.rows + w.values + w.sums,
                *const out = gradients + w.gradients;
    cudaError_t code = cudaSuccess;
    a = cuda_args_of(chip, plan);
    lay_out_saved(&k.s, a.g.dims, at);
    k.values = (row_values *)(at + w.rows);
    k.sums = w.sums ? (float *)(at + w.rows + w.values) : nullptr;
    run->gradients = (float *)gradients;
    if (!plan->problem->out.rank) {
        recomputed_forward forward;
        const cuda_kernel *const kernel = plan_first_recomputed(&forward, chip, plan, out, out + w.out);
        if (!kernel) return cudaErrorInvalidConfiguration;
        const auto launch_share = [&](const cuda_chip *part) {
            return kernel->launch(part, stream, &forward.plan, at + w.total);
        };
        const double seconds = tile_seconds(chip, &forward.plan);
        if (kernel->shares) code = in_shares(chip, seconds, launch_share);
        else if (takes_step(chip, seconds)) code = launch_share(chip);
        if (code != cudaSuccess) return code;
        simple_rows_left(chip, &forward.plan, stream);
        a.g.view[ATTN_T_out] = forward.plan.geometry.view[ATTN_T_out];
        a.g.view[ATTN_T_lse] = forward.plan.geometry.view[ATTN_T_lse];
    }
    k.s.out = a.g.view[ATTN_T_out];
    return code;
}

cudaError_t prepare_backward(cudaStream_t stream, const attn_plan *plan, const backward_run &run)
{
    const dim3 grid = tile_grid(run.args.g, BM);
    if (!is_empty(grid))
        steps_for(run.args.g.dims).prepare[plan->problem->q.dtype == ATTN_F16](run.args, run.scratch, grid, stream);
    return cudaPeekAtLastError();
}

cudaError_t end_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const backward_run &run)
{
    simple_gradients_left(chip, plan, run.args, run.scratch.s, stream);
    return option_gradients(chip, stream, plan, run.args, run.scratch.s, run.gradients);
}

extern const cuda_kernel generic_backward = {
    { "generic", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), TILE_HEAD_DIM,
      ATTN_ALL_SCORES & ~ATTN_OPTION_BIT(DOUT_DTYPE) },
    80,
    ANY_COMPUTE,
    plan,
    launch,
};
