/* backward_wide.cuh: dkdv_wide(), the main kernel of backward.cu for head dims up to 128 without options (softcap,
 * bias, masks, ...). */
#ifndef ATTN_SM80_BACKWARD_WIDE_CUH
#define ATTN_SM80_BACKWARD_WIDE_CUH

#include "backward_common.cuh"

namespace {

/* Reading operands from shared memory limits the speed. A warp therefore computes blocks of 32 x 32 or 32 x 64 results:
 * it then uses each fragment that it has loaded in two to four products.
 *
 * S^T, dP^T: a warp computes 32 keys x 32 queries. For head dims above 64, two warps share 32 keys, and each computes
 * half of the queries.
 * dV, dK: a warp computes 32 keys x 64 channels. P^T and dS^T come from shared memory for head dims above 64, otherwise
 * from registers.
 * dQ: a warp computes 32 queries x 32 channels, one iteration after dS, so that an iteration needs only one barrier of
 * the block. */
template <int D> struct wide;
template <> struct wide<64> {
    static const int QW = 1, BLOCKS = 2;
}; /* QW: number of warps that share 32 keys; BLOCKS: number of blocks that run on a multiprocessor at the same time */
template <> struct wide<128> {
    static const int QW = 2, BLOCKS = 1;
};

template <int D> struct shared_wide {
    static const int BN = 128, THREADS = 128 * wide<D>::QW;
    alignas(1024) uint16_t K[BN * D];
    alignas(1024) uint16_t V[BN * D];
    alignas(1024) uint16_t Q[2][BM * D];
    alignas(1024) uint16_t dO[2][BM * D];
    alignas(1024) row_values values[2];
    /* P^T (transposed): a row is a key, a column a query */
    alignas(1024) uint16_t P[wide<D>::QW == 2 ? BN * BM : 512];
    /* dS^T of the current query tile, and, if shared memory has room, of the previous one */
    alignas(1024) uint16_t dS[2][BN * BM];
};

template <typename T> DEVICE void write_block(uint16_t *tile, const float (&c)[2][4][4], int row, int column, int lane)
{
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int nt = 0; nt < 4; nt++)
                *(uint32_t *)(tile + at<BM>(row + mt * 16 + half * 8 + lane / 4, column / 8 + nt) +
                              lane % 4 * 2) = pack<T>(c[mt][nt][half * 2], c[mt][nt][half * 2 + 1]);
}

/* The two warps that share 32 keys meet at this barrier once for every query tile. For tiles without visible pairs, the
 * barrier is needed only by tools that check for races. */
DEVICE void pair_barrier(int pair)
{
    switch (pair) {
    case 0: barrier<1, 64>(); break;
    case 1: barrier<2, 64>(); break;
    case 2: barrier<3, 64>(); break;
    default: barrier<4, 64>(); break;
    }
}

template <typename T> DEVICE void pack_block(uint32_t (&f)[2][4], const float (&c)[2][4][4], int k)
{
#pragma unroll
    for (int mt = 0; mt < 2; mt++) to_operand<T>(f[mt], c[mt], k / 16);
}

/* Loads the operands of step k of a matrix product: `count` blocks of 16 rows (or columns) of a tile. The first block
 * begins at row (or column) `from`. `how` is a_rows, a_columns, b_rows or b_columns (tile.cuh). */
#define FRAGMENTS(how, D, count, tile, from, k) \
    _Pragma("unroll") for (int t_ = 0; t_ < count; t_++) how<D>(f[t_], tile, (from) + t_ * 16, k, lane)

/* `ds_stride`: number of elements from one buffer for dS to the other; 0: there is only one buffer */
template <typename T, int D>
__global__ void __launch_bounds__(shared_wide<D>::THREADS, wide<D>::BLOCKS)
    dkdv_wide(const __grid_constant__ cuda_args a, const __grid_constant__ scratch w, limits whole, int ds_stride)
{
    typedef shared_wide<D> Shared;
    const int BN = Shared::BN, THREADS = Shared::THREADS, QW = wide<D>::QW, ROUNDS = BM / 32 / QW;
    extern __shared__ __align__(1024) char memory[];
    Shared &sm = *reinterpret_cast<Shared *>(memory);
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    /* key: the warp's first key in the block; part: the warp's number among the QW warps that share its keys */
    const int key = warp / QW * 32, part = warp % QW;

    key_place place = key_place_of<BN>(a, whole, blockIdx);
    if (place.rows == 0) return;
    const limits limit = place.limit;

    loader<D, THREADS>(g.view[ATTN_T_k], place.b, place.hk, place.s.k_start, limit.Sk, g.dims.D)
        .template load<BN>(sm.K, place.j0);
    loader<D, THREADS>(g.view[ATTN_T_v], place.b, place.hk, place.s.k_start, limit.Sk, g.dims.Dv)
        .template load<BN>(sm.V, place.j0);
    find_queries<BN>(place);
    const int jl = place.j0 + key, first = place.first, last = place.last, rounds = (last - first) * (int)g.group;

    /* h, tile: head and index of the query tile to load next; i0_next: first query of the tile that is being loaded;
     * i0: first query of the current tile */
    int h = place.hk * (int)g.group, tile = first, i0 = 0, i0_next = 0;
    loader<D, THREADS> Q(g.view[ATTN_T_q], place.b, h, place.s.q_start, place.s.Sq, g.dims.D);
    loader<D, THREADS> dO(g.view[ATTN_T_dout], place.b, h, place.s.q_start, place.s.Sq, g.dims.Dv);
    int tiles_of_head = (int)query_tile(a, place.s, place.b, h, 0);
    /* indices of the next, current and previous query tile in the array of the sums of dQ; an int is large enough,
     * because the sums of a tile take kilobytes of memory */
    int sums_next = 0, sums_now = 0, sums_before;

    const float scale_log2 = (float)g.scale * LOG2E;
    float dK[2][8][4] = {}, dV[2][8][4] = {};
    const uint32_t tileK = smem_addr(sm.K), tileV = smem_addr(sm.V), tileP = smem_addr(sm.P);

    /* Iteration n loads query tile n + 1, computes S, dP, dK and dV of tile n, and dQ of tile n - 1. */
#pragma unroll 1
    for (int n = -1; n <= rounds; n++) {
        const int stage = n & 1;
        cp_async_wait<0>();
        /* After this barrier query tile n and dS of tile n - 1 are in shared memory. No thread reads query tile n - 1
         * or dS of tile n - 2 any more. */
        __syncthreads();
        sums_before = sums_now;
        sums_now = sums_next;
        i0 = i0_next;
        /* Two warps share each scheduler. One begins with dQ of tile n - 1, the other with loads, so that one computes
         * addresses while the other computes products. */
#pragma unroll 1
        for (int turn = 0; turn < 2; turn++) {
            const bool dQ_now = (warp / 4 + turn) % 2 == 1;
            /* dQ = dS K of the previous query tile */
            if (dQ_now && n > 0 && w.sums) {
                const int q = warp % 2 * 32, d = warp / 2 * 32;
                const uint32_t tileS = smem_addr(sm.dS[0] + (1 - stage) * ds_stride);
                float dQ[2][4][4] = {};
                product<T, BN / 16>(
                    dQ, [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(a_columns, BM, 2, tileS, q, kk * 16); },
                    [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(b_columns, D, 2, tileK, d, kk * 16); });
                float *const to = w.sums + (int64_t)sums_before * (BM * D) + fragment_at<D>(q, d);
#pragma unroll
                for (int mt = 0; mt < 2; mt++)
#pragma unroll
                    for (int nt = 0; nt < 4; nt++) add_fragment(to + fragment_at<D>(mt * 16, nt * 8), lane, dQ[mt][nt]);
            }
            if (!dQ_now && n + 1 < rounds) {
                if (tile == last) {
                    tile = first;
                    h++;
                    Q = loader<D, THREADS>(g.view[ATTN_T_q], place.b, h, place.s.q_start, place.s.Sq, g.dims.D);
                    dO = loader<D, THREADS>(g.view[ATTN_T_dout], place.b, h, place.s.q_start, place.s.Sq, g.dims.Dv);
                    tiles_of_head = (int)query_tile(a, place.s, place.b, h, 0);
                }
                i0_next = tile * BM;
                sums_next = tiles_of_head + tile;
                Q.template load<BM>(sm.Q[1 - stage], i0_next);
                dO.template load<BM>(sm.dO[1 - stage], i0_next);
                load_values(&sm.values[1 - stage], w.values + tiles_of_head + tile);
                tile++;
            }
        }
        cp_async_commit();
        if (ds_stride == 0) __syncthreads();
        if (n < 0 || n == rounds) continue;

        const uint32_t tileQ = smem_addr(sm.Q[stage]), tileO = smem_addr(sm.dO[stage]);
        uint16_t *const dS_to = sm.dS[0] + stage * ds_stride;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int q = QW == 2 ? part * 32 : round * 32, il = i0 + q;
            /* skips the tile if no query of the warp (with QW = 2: of the pair of warps) sees any of the warp's keys */
            const int low_q = QW == 2 ? i0 : il, high_q = QW == 2 ? i0 + BM - 1 : il + 31;
            if (jl + 31 < low_q + limit.lo || jl >= high_q + limit.hi || jl >= limit.Sk) {
                const float zero[2][4][4] = {};
                if (QW == 2) pair_barrier(warp / 2);
                write_block<T>(dS_to, zero, key, q, lane);
                continue;
            }

            float S[2][4][4] = {}, dP[2][4][4] = {};
            product<T, D / 16>(
                S, [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(a_rows, D, 2, tileK, key, kk * 16); },
                [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(b_rows, D, 2, tileQ, q, kk * 16); });
            /* tests single pairs only if causal, window or length hides some of the 32 x 32 pairs */
            if (jl < il + 31 + limit.lo || jl + 31 >= min(il + limit.hi, limit.Sk)) {
#pragma unroll
                for (int mt = 0; mt < 2; mt++) hide_queries(S[mt], limit, jl + mt * 16 + lane / 4, il + lane % 4 * 2);
            }

            /* P^T = exp(S - lse) */
#pragma unroll
            for (int nt = 0; nt < 4; nt++) {
                const float2 lse2 = *(const float2 *)&sm.values[stage].lse2[q + nt * 8 + lane % 4 * 2];
#pragma unroll
                for (int mt = 0; mt < 2; mt++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        S[mt][nt][e] = exp2_fast(fmaf(S[mt][nt][e], scale_log2, -(e % 2 ? lse2.y : lse2.x)));
            }
            if (QW == 2) write_block<T>(sm.P, S, key, q, lane);

            /* dP^T = V dO^T, dS^T = P^T (dP^T - delta) */
            product<T, D / 16>(
                dP, [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(a_rows, D, 2, tileV, key, kk * 16); },
                [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(b_rows, D, 2, tileO, q, kk * 16); });
#pragma unroll
            for (int nt = 0; nt < 4; nt++) {
                const float2 delta = *(const float2 *)&sm.values[stage].delta[q + nt * 8 + lane % 4 * 2];
#pragma unroll
                for (int mt = 0; mt < 2; mt++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        dP[mt][nt][e] = S[mt][nt][e] * (dP[mt][nt][e] - (e % 2 ? delta.y : delta.x));
            }
            write_block<T>(dS_to, dP, key, q, lane);

            if constexpr (QW == 2) {
                const uint32_t tileS = smem_addr(dS_to);
                /* after this barrier P and dS of both warps are in shared memory */
                pair_barrier(warp / 2);
                product<T, BM / 16>(
                    dV, [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(a_rows, BM, 2, tileP, key, kk * 16); },
                    [&](uint32_t(&f)[4][4], int kk) { FRAGMENTS(b_columns, D, 4, tileO, part * 64, kk * 16); });
                product<T, BM / 16>(
                    dK, [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(a_rows, BM, 2, tileS, key, kk * 16); },
                    [&](uint32_t(&f)[4][4], int kk) { FRAGMENTS(b_columns, D, 4, tileQ, part * 64, kk * 16); });
            } else {
                product<T, 2>(
                    dV, [&](uint32_t(&f)[2][4], int kk) { pack_block<T>(f, S, kk * 16); },
                    [&](uint32_t(&f)[4][4], int kk) { FRAGMENTS(b_columns, D, 4, tileO, 0, q + kk * 16); });
                product<T, 2>(
                    dK, [&](uint32_t(&f)[2][4], int kk) { pack_block<T>(f, dP, kk * 16); },
                    [&](uint32_t(&f)[4][4], int kk) { FRAGMENTS(b_columns, D, 4, tileQ, 0, q + kk * 16); });
            }
        }
    }

    /* The block's range of keys is computed a second time here, because keeping it during the loop would take
     * registers. */
    place = key_place_of<BN>(a, whole, make_uint3(kept(blockIdx.x), kept(blockIdx.y), kept(blockIdx.z)));
    const attn_view &dk = g.view[ATTN_T_dk], &dv = g.view[ATTN_T_dv];
    bool finite = scale_block(dK, (float)g.scale);
    finite &= scale_block(dV, 1);
    /* after this barrier no thread reads the tiles in shared memory, so results may overwrite them */
    const bool poisoned = __syncthreads_or(!finite);
    const int64_t line = place.s.k_start + place.j0;
    const bool k_pieces = in_pieces<T>(dk, place.b, place.hk, line, g.dims.D),
               v_pieces = in_pieces<T>(dv, place.b, place.hk, line, g.dims.Dv);
    /* the shared memory of K and V has room for D floats for each of the block's keys, and so has the shared memory of
     * Q and dO */
    stage_block<T, D>(sm.K, k_pieces, dK, key, part * 64, lane);
    stage_block<T, D>(sm.Q, v_pieces, dV, key, part * 64, lane);
    __syncthreads();
    if (dk.data)
        store_rows<D, THREADS>(dk, place.b, place.hk, line, 0, place.rows, (int)g.dims.D, sm.K, k_pieces, threadIdx.x);
    if (dv.data)
        store_rows<D, THREADS>(dv, place.b, place.hk, line, 0, place.rows, (int)g.dims.Dv, sm.Q, v_pieces, threadIdx.x);
    if (poisoned) {
        __syncthreads();
        for (int r = warp; r < place.rows; r += THREADS / 32) dkdv_row(a, w.s, place.b, place.hk, place.j0 + r);
    }
}

} // namespace

#endif
