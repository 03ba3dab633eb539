/* backward.cu: flash attention backward on tensor cores by mma.sync, for any GPU from compute capability 8.0 on.
 *
 * FlashAttention-2 (arXiv:2307.08691), Algorithm 2, with transposed scores. A block owns BN keys of one key/value
 * head; K and V stay in shared memory, and the queries that see them pass by in tiles of BM, for every head of the
 * group:
 *
 *     S^T = K Q^T            dP^T = V dO^T
 *     P^T = exp(S^T - lse)   dS^T = P^T (dP^T - delta)          in registers
 *     dV += P^T dO           dK += dS^T Q                       accumulators of a warp's own keys: no sum crosses a warp
 *     dQ  = dS K                                                dS by shared memory; added to float32 sums in global memory
 *
 * The additions to dQ come in any order, so its last bits vary from run to run. With `deterministic` they are left
 * out, and a second kernel makes dQ by query tiles: S and dP once more, seven products instead of five. dK and dV
 * are always deterministic: the heads of a group follow each other in one block.
 *
 *   prepare     delta = rowsum(dO O) - dlse, lse dense; both by query tiles, lse in base 2; zeros in the sums
 *   dkdv_wide   as above, one block a key tile: no options, head dims to 128. It has the design that speed asks for
 *   dkdv_tiles  the same with every option, and head dims above 128, which do not leave registers for both dK and dV: two launches
 *               make one each (S is computed twice). A warp has 16 keys and all queries of the tile
 *   finish      dQ = scale * sum, in its dtype               or: dq_tiles, one block a query tile
 *   simple.cu   dbias, dalibi_slopes, dsinks where wanted
 *
 * Rows that are not finite are computed once more by rows.cuh, which skips hidden pairs (see forward.cu). */
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/simple/simple.h"
#include "recompute.h"
#include "tile.cuh"

extern const cuda_kernel generic_forward; /* forward.cu */

namespace {

enum { BM = 64 }; /* queries a tile */

/* Head dims up to D; keys a block, one warp for 16. */
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

/* Scores on their way through the options: a warp's 16 keys x BM queries, with 1 - tanh^2 and the dropout bits of
 * eight keys. */
struct staged {
    float z[16][BM + 2];
    float cap[16][BM + 2];
    uint8_t kept[BM][2];
};

/* Query tiles of all heads are counted through; packed, sequence b owns those from cu[b] / BM + b on, as in
 * tile_place_of(). */
DEVICE int64_t query_tile(const cuda_args &a, const attn_sequence &s, int b, int h, int tile)
{
    const int64_t tiles = a.g.dims.packed ? a.g.dims.total_q / BM + a.g.dims.B : attn_tiles(a.g.dims.Sq, BM);
    return (a.g.dims.packed ? h * tiles + s.q_start / BM + b : (b * a.g.dims.H + h) * tiles) + tile;
}

/* What the rows of a query tile have in common with nobody: lse in base 2, +inf where there is no row or the row
 * sees nothing (P becomes 0), and delta. */
struct row_values {
    float lse2[BM], delta[BM];
};

/* The workspace as kernels see it: rows.cuh's part, the values of every query tile and its float32 sums of dQ
 * (NULL: not wanted). */
struct scratch {
    saved s;
    row_values *values;
    float *sums;
};

/* Sums of a query tile are blocks of 16 queries x 8 channels, as fragments: four floats a lane. Those of 32 queries
 * lie together, pairs of blocks channel by channel: a warp's 32 x 32 is one piece. red_add_4() takes four floats
 * that lie together, where there is such an instruction; elsewhere a warp's additions to one of the four had better
 * lie together. */
template <int D> DEVICE int fragment_at(int q, int d)
{
    return ((q / 32 * (D / 8) + d / 8) * 2 + q / 16 % 2) * 128;
}
DEVICE void add_fragment(float *sums, int lane, const float (&x)[4])
{
#if __CUDA_ARCH__ >= 900
    red_add_4(sums + lane * 4, x);
#else
    for (int e = 0; e < 4; e++) atomicAdd(sums + e * 32 + lane, x[e]);
#endif
}
DEVICE float4 read_fragment(const float *sums, int lane)
{
#if __CUDA_ARCH__ >= 900
    return *(const float4 *)(sums + lane * 4);
#else
    return make_float4(sums[lane], sums[32 + lane], sums[64 + lane], sums[96 + lane]);
#endif
}

/* row_values to shared memory, by 32 threads of the block. */
DEVICE void load_values(row_values *to, const row_values *from)
{
    static_assert(sizeof(row_values) == 32 * 16);
    if (threadIdx.x < 32) cp_async_16(smem_addr(to) + threadIdx.x * 16, (const char *)from + threadIdx.x * 16, true);
}

/* ---- prepare ----------------------------------------------------------------------------------------------------- */

/* delta = rowsum(dO O) - dlse, lse dense and as row_values; zeros in the sums. A block a query tile and head. */
template <typename T, int D>
__global__ void __launch_bounds__(128) prepare(const __grid_constant__ cuda_args a, const __grid_constant__ scratch w)
{
    const int LANES = D / 8, STEP = 128 / LANES; /* threads a row, rows at a time */
    const attn_geometry &g = a.g;
    const tile_place place = tile_place_of<BM>(a, blockIdx.x);
    if (!place.exists) return;
    const head_args &x = place.x;
    const int64_t tile = query_tile(a, x.s, (int)x.b, (int)x.h, place.i0 / BM);
    if (w.sums)
        for (int n = threadIdx.x; n < BM * D / 4; n += 128) zero_4(w.sums + tile * BM * D + n * 4);

    const attn_view &dout = g.view[ATTN_T_dout], &dlse = g.view[ATTN_T_dlse], &lse = g.view[ATTN_T_lse];
    const int Dv = (int)g.dims.Dv, rows = (int)attn_min64(BM, x.s.Sq - place.i0), d = threadIdx.x % LANES * 8;
    const int64_t line = x.s.q_start + place.i0, o_at = attn_at(&w.s.out, x.b, x.h, line) + d,
                  do_at = attn_at(&dout, x.b, x.h, line) + d;
    const bool pieces = in_pieces<T>(w.s.out, x.b, x.h, line, Dv) && in_pieces<T>(dout, x.b, x.h, line, Dv);
    const int mine = threadIdx.x; /* a row a thread, at the end: its lse is asked for now */
    float y = -CUDART_INF_F, less = 0;
    if (mine < rows) {
        y = ((const float *)lse.data)[attn_at(&lse, x.b, x.h, line + mine)];
        if (dlse.data) less = ((const float *)dlse.data)[attn_at(&dlse, x.b, x.h, line + mine)];
    }
    __shared__ float sums[BM];
    const int TOGETHER = BM / STEP < 4 ? BM / STEP : 4; /* rows of a thread that are on their way together */
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < BM; first += TOGETHER * STEP) {
        float delta[TOGETHER] = {};
        if (pieces) {
            uint4 o[TOGETHER] = {}, p[TOGETHER] = {};
#pragma unroll
            for (int k = 0; k < TOGETHER; k++)
                if (first + k * STEP < rows && d < Dv) {
                    o[k] = *(const uint4 *)((const uint16_t *)w.s.out.data + o_at + (first + k * STEP) * w.s.out.row);
                    p[k] = *(const uint4 *)((const uint16_t *)dout.data + do_at + (first + k * STEP) * dout.row);
                }
#pragma unroll
            for (int k = 0; k < TOGETHER; k++)
                delta[k] = dot_pair<T>(
                    o[k].x, p[k].x,
                    dot_pair<T>(o[k].y, p[k].y, dot_pair<T>(o[k].z, p[k].z, dot_pair<T>(o[k].w, p[k].w, 0))));
        } else {
#pragma unroll
            for (int k = 0; k < TOGETHER; k++)
                if (first + k * STEP < rows)
#pragma unroll 1
                    for (int e = 0; e < 8 && d + e < Dv; e++)
                        delta[k] += load_float(w.s.out.dtype, w.s.out.data,
                                               o_at + (first + k * STEP) * w.s.out.row + e) *
                                    load_float(dout.dtype, dout.data, do_at + (first + k * STEP) * dout.row + e);
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
#pragma unroll
            for (int lane = LANES / 2; lane; lane /= 2) delta[k] += __shfl_xor_sync(0xffffffff, delta[k], lane);
            if (threadIdx.x % LANES == 0) sums[first + k * STEP] = delta[k];
        }
    }
    __syncthreads();
    if (mine >= BM) return;
    const float delta = y == -CUDART_INF_F ? 0 : sums[mine] - less;
    if (mine < rows) {
        w.s.lse[lse_at(a, x, place.i0 + mine)] = y;
        w.s.delta[lse_at(a, x, place.i0 + mine)] = delta;
    }
    w.values[tile].lse2[mine] = y == -CUDART_INF_F ? CUDART_INF_F : y * LOG2E;
    w.values[tile].delta[mine] = delta;
}

/* ---- dK, dV and the sums of dQ: what the forms have in common ---------------------------------------------------- */

/* The keys of a block, and the query tiles that see any of them. Packed, sequences own tiles as in tile_place_of(),
 * of keys here. */
struct key_place {
    attn_sequence s;
    limits limit;
    int b, hk, j0;
    int rows;        /* of dk and dv to write; seqlens_k leaves rows of zeros behind the keys */
    int first, last; /* query tiles */
};

/* Where the block is; the query tiles later, by find_queries(), when the keys are on their way. */
template <int BN> DEVICE key_place key_place_of(const cuda_args &a, const limits &whole, uint3 block)
{
    const attn_geometry &g = a.g;
    key_place place;
    place.b = block.z;
    place.hk = block.y;
    place.j0 = block.x * BN;
    place.limit = whole;
    place.s.q_start = place.s.k_start = 0;
    place.s.Sq = g.dims.Sq;
    place.s.Sk = g.dims.Sk;
    if (!is_whole(a)) {
        if (g.dims.packed) {
            int low = 0, high = (int)g.dims.B;
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                if (g.cu_k[middle] / BN + middle <= (int)block.x) low = middle;
                else high = middle;
            }
            place.b = low;
            place.j0 = ((int)block.x - (g.cu_k[low] / BN + low)) * BN;
        }
        place.s = attn_sequence_of(&g, place.b);
        place.limit = limits_of(g, place.s);
    }
    place.rows = max(min((int)(g.dims.packed ? place.s.Sk : g.dims.Sk) - place.j0, BN), 0);
    place.first = place.last = 0;
    return place;
}

/* Key j is seen by the queries i with j - hi < i <= j - lo. */
template <int BN> DEVICE void find_queries(key_place &place)
{
    const int Sq = (int)place.s.Sq, j_last = min(place.j0 + BN, place.limit.Sk) - 1;
    if (j_last < place.j0) return;
    place.first = max(place.j0 - place.limit.hi + 1, 0) / BM;
    place.last = max((min(j_last - place.limit.lo + 1, Sq) + BM - 1) / BM, place.first);
}

/* Blocks of 16 x 8 to the rows of a result that are staged from `memory` on (see tile.cuh). */
template <typename T, int D, int MT, int NT>
DEVICE void stage_block(void *memory, bool pieces, const float (&c)[MT][NT][4], int row, int column, int lane)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
                stage_pair<T, D>(memory, pieces, row + mt * 16 + half * 8 + lane / 4, column + nt * 8 + lane % 4 * 2,
                                 c[mt][nt][half * 2], c[mt][nt][half * 2 + 1]);
}

/* Multiplies by `factor`. Is every element finite then? */
template <int MT, int NT> DEVICE bool scale_block(float (&c)[MT][NT][4], float factor)
{
    float zero = 0;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                c[mt][nt][e] *= factor;
                zero = fmaf(c[mt][nt][e], 0, zero); /* NaN if it is not */
            }
    return zero == 0;
}

/* ---- The plain form: no options, head dims to 128 ---------------------------------------------------------------- */

/* What limits the products is reading shared memory for them: a fragment of 512 bytes takes it 4 cycles, and the
 * tensor cores make one to two products meanwhile. So a warp has blocks of 32 x 32 or 32 x 64, in which a fragment
 * serves two to four products:
 *
 *   S^T, dP^T   32 keys x 32 queries; head dims to 64: two rounds a tile; above, two warps share the keys (a pair)
 *   dV, dK      32 keys x 64 channels, over the tile's queries: P^T and dS^T from registers; above 64 from the pair's shared memory
 *   dQ          32 queries x 32 channels, over the block's keys
 *
 * dQ of a tile needs dS of all warps. It is made one tile later, so that a tile costs one barrier of the block. */
template <int D> struct wide;
template <> struct wide<64> {
    static const int QW = 1, BLOCKS = 2;
}; /* warps that share 32 keys; blocks a multiprocessor */
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
    alignas(1024) uint16_t P[wide<D>::QW == 2 ? BN * BM : 512]; /* P^T: rows are keys */
    alignas(1024)
        uint16_t dS[2][BN * BM]; /* dS^T, of this tile and the last. The second is left out where it does not fit */
};

/* A warp's 32 x 32 block of P^T or dS^T to its place in a tile of BM columns. */
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

/* The two warps of a pair wait for each other. Both come at every tile, also where the pair sees nothing: skipping
 * together would be as right (P and dS are written and read by those that come, and written again behind a barrier
 * of the block), but tools could not follow it. */
DEVICE void pair_barrier(int pair)
{
    switch (pair) {
    case 0: barrier<1, 64>(); break;
    case 1: barrier<2, 64>(); break;
    case 2: barrier<3, 64>(); break;
    default: barrier<4, 64>(); break;
    }
}

/* The A fragments of columns k .. k + 15 of a block in registers. */
template <typename T> DEVICE void pack_block(uint32_t (&f)[2][4], const float (&c)[2][4][4], int k)
{
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f[mt][e] = pack<T>(c[mt][k / 8 + e / 2][e % 2 * 2], c[mt][k / 8 + e / 2][e % 2 * 2 + 1]);
}

/* Fragments of MT (NT) blocks of 16: rows (columns) from `from` on, step k. */
#define FRAGMENTS(how, D, count, tile, from, k) \
    _Pragma("unroll") for (int t_ = 0; t_ < count; t_++) how<D>(f[t_], tile, (from) + t_ * 16, k, lane)

/* ds_stride: elements from one dS to the other; 0: there is one. */
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
    const int key = warp / QW * 32, part = warp % QW; /* this warp's keys in the block, and which of the pair it is */

    key_place place = key_place_of<BN>(a, whole, blockIdx);
    if (place.rows == 0) return;
    const limits limit = place.limit;

    loader<D, THREADS>(g.view[ATTN_T_k], place.b, place.hk, place.s.k_start, limit.Sk, g.dims.D)
        .template load<BN>(sm.K, place.j0);
    loader<D, THREADS>(g.view[ATTN_T_v], place.b, place.hk, place.s.k_start, limit.Sk, g.dims.Dv)
        .template load<BN>(sm.V, place.j0);
    find_queries<BN>(place);
    const int jl = place.j0 + key, first = place.first, last = place.last, rounds = (last - first) * (int)g.group;

    /* The next tile to fetch: its head and its number. */
    int h = place.hk * (int)g.group, tile = first, i0 = 0, i0_next = 0;
    loader<D, THREADS> Q(g.view[ATTN_T_q], place.b, h, place.s.q_start, place.s.Sq, g.dims.D);
    loader<D, THREADS> dO(g.view[ATTN_T_dout], place.b, h, place.s.q_start, place.s.Sq, g.dims.Dv);
    int tiles_of_head = (int)query_tile(a, place.s, place.b, h,
                                        0);       /* a tile has kilobytes, so their number has 31 bits */
    int sums_next = 0, sums_now = 0, sums_before; /* of tiles n + 1, n, n - 1 */

    const float scale_log2 = (float)g.scale * LOG2E;
    float dK[2][8][4] = {}, dV[2][8][4] = {};
    const uint32_t tileK = smem_addr(sm.K), tileV = smem_addr(sm.V), tileP = smem_addr(sm.P);

    /* Step n: tile n + 1 is fetched; dQ of tile n - 1 and the rest of tile n are made. */
#pragma unroll 1
    for (int n = -1; n <= rounds; n++) {
        const int stage = n & 1;
        cp_async_wait<0>();
        __syncthreads(); /* tile n and dS of n - 1 are here; nobody reads the queries of n - 1 or dS of n - 2 any more */
        sums_before = sums_now;
        sums_now = sums_next;
        i0 = i0_next;
        /* Where a scheduler has two warps they begin with different things: addresses of the one are made under
         * products of the other. */
#pragma unroll 1
        for (int turn = 0; turn < 2; turn++) {
            const bool dQ_now = (warp / 4 + turn) % 2 == 1;
            /* dQ = dS K of the tile before */
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
            const int q = QW == 2 ? part * 32 : round * 32,
                      il = i0 + q; /* this warp's queries in the tile, and the first of them */
            /* Does any query (of the pair's) see any of these keys? */
            const int low_q = QW == 2 ? i0 : il, high_q = QW == 2 ? i0 + BM - 1 : il + 31;
            if (jl + 31 < low_q + limit.lo || jl >= high_q + limit.hi || jl >= limit.Sk) {
                const float zero[2][4][4] = {};
                if (QW == 2) pair_barrier(warp / 2);
                write_block<T>(dS_to, zero, key, q, lane);
                continue;
            }

            /* S^T = K Q^T */
            float S[2][4][4] = {}, dP[2][4][4] = {};
            product<T, D / 16>(
                S, [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(a_rows, D, 2, tileK, key, kk * 16); },
                [&](uint32_t(&f)[2][4], int kk) { FRAGMENTS(b_rows, D, 2, tileQ, q, kk * 16); });
            if (jl < il + 31 + limit.lo || jl + 31 >= min(il + limit.hi, limit.Sk)) { /* some pair is hidden */
#pragma unroll
                for (int mt = 0; mt < 2; mt++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int j = jl + mt * 16 + half * 8 + lane / 4, i = il + lane % 4 * 2;
                        /* key j is seen by queries j - hi < i' <= j - lo */
                        const int low = j < limit.Sk ? j - limit.hi - i : BM, high = j - limit.lo - i;
#pragma unroll
                        for (int nt = 0; nt < 4; nt++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (nt * 8 + e <= low || nt * 8 + e > high) S[mt][nt][half * 2 + e] = -CUDART_INF_F;
                    }
            }

            /* P^T = exp(S^T - lse) */
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

            /* dV += P^T dO, dK += dS^T Q */
            if constexpr (QW == 2) {
                const uint32_t tileS = smem_addr(dS_to);
                pair_barrier(warp / 2); /* P and dS of the pair are here */
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

    /* The place is found anew, for registers are short in the loop. */
    place = key_place_of<BN>(a, whole, make_uint3(kept(blockIdx.x), kept(blockIdx.y), kept(blockIdx.z)));
    const attn_view &dk = g.view[ATTN_T_dk], &dv = g.view[ATTN_T_dv];
    bool finite = scale_block(dK, (float)g.scale);
    finite &= scale_block(dV, 1);
    const bool poisoned = __syncthreads_or(!finite); /* and nobody reads shared memory any more */
    const int64_t line = place.s.k_start + place.j0;
    const bool k_pieces = in_pieces<T>(dk, place.b, place.hk, line, g.dims.D),
               v_pieces = in_pieces<T>(dv, place.b, place.hk, line, g.dims.Dv);
    stage_block<T, D>(sm.K, k_pieces, dK, key, part * 64, lane); /* K and V hold D floats a row, and so do Q and dO */
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

/* ---- Options, and head dims above 128 ---------------------------------------------------------------------------- */

template <int D, bool OPTIONS> struct shared {
    static const int STAGES = D == 256 || OPTIONS ? 1 : 2;
    alignas(1024) uint16_t K[tile<D>::BN * D];
    alignas(1024) uint16_t V[tile<D>::BN * D];
    alignas(1024) uint16_t Q[STAGES][BM * D];
    alignas(1024) uint16_t dO[STAGES][BM * D];
    alignas(1024) uint16_t dS[tile<D>::BN * BM]; /* dS^T: rows are keys */
    alignas(16) row_values values[STAGES];
    staged options[OPTIONS ? tile<D>::BN / 16 : 1];
};

template <typename T, int D, bool OPTIONS, int PARTS>
__global__ void __launch_bounds__(tile<D>::BN * 2, 1)
    dkdv_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ scratch w)
{
    typedef shared<D, OPTIONS> Shared;
    const int BN = tile<D>::BN, WARPS = BN / 16, THREADS = 32 * WARPS, NT = BM / 8, DT = D / 8, STAGES = Shared::STAGES;
    extern __shared__ __align__(1024) char memory[];
    Shared &sm = *reinterpret_cast<Shared *>(memory);
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    key_place place = key_place_of<BN>(a, limits_of_whole(a.g), blockIdx);
    if (place.rows == 0) return;
    find_queries<BN>(place);
    const int b = place.b, hk = place.hk, j0 = place.j0, Sk = (int)place.s.Sk, Sq = (int)place.s.Sq,
              first = place.first;
    const limits limit = place.limit;
    const int tiles = place.last - first, rounds = tiles * (int)g.group;

    loader<D, THREADS>(g.view[ATTN_T_k], b, hk, place.s.k_start, Sk, g.dims.D).template load<BN>(sm.K, j0);
    loader<D, THREADS>(g.view[ATTN_T_v], b, hk, place.s.k_start, Sk, g.dims.Dv).template load<BN>(sm.V, j0);

    /* Queries of round n: head n / tiles of the group, tile n % tiles. */
    auto fetch = [&](int n, int stage) {
        const head_args x = head_args_of(a, b, hk * (int)g.group + n / tiles);
        const int i0 = (first + n % tiles) * BM;
        loader<D, THREADS>(g.view[ATTN_T_q], b, x.h, place.s.q_start, Sq, g.dims.D).template load<BM>(sm.Q[stage], i0);
        loader<D, THREADS>(g.view[ATTN_T_dout], b, x.h, place.s.q_start, Sq, g.dims.Dv)
            .template load<BM>(sm.dO[stage], i0);
        load_values(&sm.values[stage], w.values + query_tile(a, place.s, b, (int)x.h, first + n % tiles));
    };
    if (rounds > 0) fetch(0, 0);
    cp_async_commit();

    float dK[1][DT][4] = {}, dV[1][DT][4] = {};
    const uint32_t tileK = smem_addr(sm.K);
    const float scale_log2 = (float)g.scale * LOG2E;
    const bool want_dq = (PARTS & DK) && w.sums;

    for (int n = 0; n < rounds; n++) {
        const int stage = STAGES == 2 ? n % 2 : 0, i0 = (first + n % tiles) * BM;
        cp_async_wait<0>();
        __syncthreads(); /* this round's queries are here, and nobody reads the last round's any more */
        if (STAGES == 2 && n + 1 < rounds) {
            fetch(n + 1, 1 - stage);
            cp_async_commit();
        }
        const uint32_t Q = smem_addr(sm.Q[stage]), dO = smem_addr(sm.dO[stage]);

        /* S^T = K Q^T, dP^T = V dO^T */
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

        /* Masks and options. Element e of block nt: key j0 + 16 warp + 8 (e / 2) + lane / 4, query i0 + 8 nt + 2
         * (lane % 4) + e % 2. */
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
                const bool sees = i < Sq && j < Sk && j >= i + limit.lo && j < i + limit.hi &&
                                  visible_by_mask(a, x, i, j);
                z = sees ? score(a, x, i, j, z, &tanh_s) * LOG2E : -CUDART_INF_F;
                st.cap[r][m / 16] = 1 - tanh_s * tanh_s;
            }
            if (a.drop_below)
#pragma unroll 1
                for (int m = lane; m < 2 * BM; m += 32) {
                    const attn_philox lanes = attn_dropout_lanes(a.seed, (int64_t)b * g.dims.H + x.h, i0 + m / 2,
                                                                 (j0 + warp * 16) / 8 + m % 2);
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
            const float2 lse2 = *(const float2 *)&sm.values[stage].lse2[nt * 8 + lane % 4 * 2],
                         delta = *(const float2 *)&sm.values[stage].delta[nt * 8 + lane % 4 * 2];
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
                    *(uint32_t *)(sm.dS + at<BM>(warp * 16 + half * 8 + lane / 4, nt) +
                                  lane % 4 * 2) = pack<T>(dP[nt][half * 2], dP[nt][half * 2 + 1]);
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

        /* dQ = dS K: four groups of 16 queries, the other warps share the columns, at most 64 at a time */
        if (want_dq) {
            const int GROUPS = BM / 16, SHARES = WARPS / GROUPS, COLUMNS = D / SHARES,
                      CHUNK = COLUMNS < 64 ? COLUMNS : 64;
            __syncthreads();
            float *const to = w.sums +
                              query_tile(a, place.s, b, hk * (int)g.group + n / tiles, first + n % tiles) * (BM * D);
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
                    add_fragment(to + fragment_at<D>(warp % GROUPS * 16, column + dt * 8), lane, dQ[dt]);
            }
        }
        if (STAGES == 1 && n + 1 < rounds) {
            __syncthreads();
            fetch(n + 1, 0);
            cp_async_commit();
        }
    }

    const attn_view &dk = g.view[ATTN_T_dk], &dv = g.view[ATTN_T_dv];
    const int64_t line = place.s.k_start + j0;
    bool finite = true;
    if (PARTS & DK) finite &= scale_block(dK, (float)g.scale);
    if (PARTS & DV) finite &= scale_block(dV, 1);
    cp_async_wait<0>(); /* K and V of a block that no query sees are still on their way to where dK and dV are staged */
    const bool poisoned = __syncthreads_or(!finite); /* and nobody reads shared memory any more */
    if ((PARTS & DK) && dk.data) {
        const bool pieces = in_pieces<T>(dk, b, hk, line, g.dims.D);
        stage_block<T, D>(sm.K, pieces, dK, warp * 16, 0, lane); /* K and V hold D floats a row */
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

/* ---- finish ------------------------------------------------------------------------------------------------------ */

/* dQ = scale * sums, in its dtype. A block a query tile and head. */
/* Four blocks a multiprocessor: repairs (dq_row) would take the registers of two, and reading needs many loads on
 * their way. */
template <typename T, int D>
__global__ void __launch_bounds__(256, 4) finish(const __grid_constant__ cuda_args a, const __grid_constant__ scratch w)
{
    __shared__ __align__(16) uint16_t staged_rows[BM * D];
    const tile_place place = tile_place_of<BM>(a, blockIdx.x);
    if (!place.exists) return;
    const head_args &x = place.x;
    const attn_view &dq = a.g.view[ATTN_T_dq];
    const float *sums = w.sums + query_tile(a, x.s, (int)x.b, (int)x.h, place.i0 / BM) * (BM * D);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (int)a.g.dims.D,
              rows = (int)attn_min64(BM, x.s.Sq - place.i0);
    const int64_t line = x.s.q_start + place.i0, to = attn_at(&dq, x.b, x.h, line);
    const bool pieces = in_pieces<T>(dq, x.b, x.h, line, width);
    bool finite = true;
    if (pieces) {
        const int EACH = BM / 16 * (D / 8) / 8,
                  CHUNK = EACH < 8 ? EACH : 8; /* blocks of 16 queries x 8 channels a warp; on their way together */
#pragma unroll
        for (int chunk = 0; chunk < EACH; chunk += CHUNK) {
            float4 sum[CHUNK];
#pragma unroll
            for (int k = 0; k < CHUNK; k++) sum[k] = read_fragment(sums + ((chunk + k) * 8 + warp) * 128, lane);
#pragma unroll
            for (int k = 0; k < CHUNK; k++) {
                const int n = (chunk + k) * 8 + warp; /* in the order of fragment_at() */
                const int r = n / (D / 4) * 32 + n % 2 * 16 + lane / 4, d = n / 2 % (D / 8) * 8 + lane % 4 * 2;
                const float y[4] = { sum[k].x * x.scale, sum[k].y * x.scale, sum[k].z * x.scale, sum[k].w * x.scale };
                for (int e = 0; e < 4; e++) finite &= y[e] - y[e] == 0;
                stage_pair<T, D>(staged_rows, true, r, d, y[0], y[1]);
                stage_pair<T, D>(staged_rows, true, r + 8, d, y[2], y[3]);
            }
        }
    } else {
#pragma unroll 1
        for (int n = warp; n < BM / 16 * (D / 8); n += 8) {
            const int r = n / (D / 4) * 32 + n % 2 * 16 + lane / 4, d = n / 2 % (D / 8) * 8 + lane % 4 * 2;
            const float4 sum = read_fragment(sums + n * 128, lane);
#pragma unroll 1
            for (int e = 0; e < 4; e++) {
                const float y = (e == 0 ? sum.x : e == 1 ? sum.y : e == 2 ? sum.z : sum.w) * x.scale;
                finite &= y - y == 0;
                if (r + e / 2 * 8 < rows && d + e % 2 < width)
                    store_float(dq.dtype, dq.data, to + (r + e / 2 * 8) * dq.row + d + e % 2, y);
            }
        }
    }
    const bool poisoned = __syncthreads_or(!finite);
    if (pieces) store_rows<D, 256>(dq, x.b, x.h, line, 0, rows, width, staged_rows, true, threadIdx.x);
    if (poisoned) { /* the place is found anew, rather than kept in registers */
        __syncthreads();
        const tile_place again = tile_place_of<BM>(a, kept(blockIdx.x));
        for (int r = warp; r < rows; r += 8) dq_row(a, w.s, again.x, again.i0 + r);
    }
}

/* ---- dQ by query tiles: deterministic ---------------------------------------------------------------------------- */

template <int D, bool OPTIONS> struct shared_dq {
    alignas(1024) uint16_t Q[BM * D];
    alignas(1024) uint16_t dO[BM * D];
    alignas(1024) uint16_t K[BM * D]; /* tiles of BM keys */
    alignas(1024) uint16_t V[BM * D];
    struct {
        float z[16][BM + 4], cap[16][BM + 4];
        uint32_t kept[16][BM / 8];
    } options[OPTIONS ? BM / 16 : 1];
};

template <typename T, int D, bool OPTIONS>
__global__ void __launch_bounds__(BM * 2) dq_tiles(const __grid_constant__ cuda_args a, saved s)
{
    const int BN = BM, WARPS = BM / 16, THREADS = 32 * WARPS, NT = BN / 8, DT = D / 8;
    extern __shared__ __align__(1024) char memory[];
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
    cp_async_commit();
    const loader<D, THREADS> K(g.view[ATTN_T_k], x.b, x.hk, x.s.k_start, x.s.Sk, g.dims.D);
    const loader<D, THREADS> V(g.view[ATTN_T_v], x.b, x.hk, x.s.k_start, x.s.Sk, g.dims.Dv);

    float lse2[2], delta[2], dQ[1][DT][4] = {};
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
                const bool sees = i < x.s.Sq && key < x.s.Sk && key >= i + limit.lo && key < i + limit.hi &&
                                  visible_by_mask(a, x, i, key);
                z = sees ? score(a, x, i, key, z, &tanh_s) * LOG2E : -CUDART_INF_F;
                st.cap[r][m % BN] = 1 - tanh_s * tanh_s;
            }
            if (a.drop_below)
#pragma unroll 1
                for (int m = lane; m < 16 * NT; m += 32) {
                    const attn_philox lanes = attn_dropout_lanes(a.seed, x.b * g.dims.H + x.h, i0 + warp * 16 + m / NT,
                                                                 j * NT + m % NT);
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
                    if (a.drop_below)
                        drop = sm.options[warp].kept[r][nt] >> (lane % 4 * 2 + e % 2) & 1 ? a.drop_scale : 0;
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
                b_columns<D>(bk, smem_addr(sm.K), dt * 8, kk * 16, lane);
                mma<T>(dQ[0][dt], as, bk[0], bk[1]);
                mma<T>(dQ[0][dt + 1], as, bk[2], bk[3]);
            }
        }
    }
    cp_async_wait<0>(); /* Q and dO of a tile that sees no key are still on their way to where dQ is staged */
    const attn_view &dq = g.view[ATTN_T_dq];
    const bool poisoned = __syncthreads_or(!scale_block(dQ, x.scale)); /* and nobody reads shared memory any more */
    const int64_t line = x.s.q_start + i0;
    const int rows = (int)attn_min64(BM, x.s.Sq - i0);
    const bool pieces = in_pieces<T>(dq, x.b, x.h, line, g.dims.D);
    stage_block<T, D>(sm.Q, pieces, dQ, warp * 16, 0, lane); /* Q and dO hold D floats a row */
    __syncthreads();
    store_rows<D, THREADS>(dq, x.b, x.h, line, 0, rows, (int)g.dims.D, sm.Q, pieces, threadIdx.x);
    if (poisoned) {
        __syncthreads();
        for (int r = warp; r < rows; r += WARPS) dq_row(a, s, x, i0 + r);
    }
}

/* ---- Launchers --------------------------------------------------------------------------------------------------- */

int class_of(const attn_dims &d)
{
    const int64_t D = attn_max64(d.D, d.Dv);
    return D <= 64 ? 64 : D <= 128 ? 128 : 256;
}

size_t align_up(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Parts of the workspace, in this order: lse and delta, both by query tiles, sums of dQ, and the forward's results
 * where they are not given. */
struct parts {
    size_t rows, values, sums, out, lse, total;
};

parts parts_of(const attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_dims &d = plan->geometry.dims;
    const dim3 grid = tile_grid(plan->geometry, BM);
    parts w;
    w.rows = align_up((size_t)query_rows(d) * 2 * sizeof(float));
    w.values = align_up((size_t)grid.x * grid.y * grid.z * sizeof(row_values));
    w.sums = p->deterministic || !p->dq.rank
                 ? 0
                 : align_up((size_t)grid.x * grid.y * grid.z * BM * class_of(d) * sizeof(float));
    w.out = p->out.rank ? 0 : align_up(recomputed_out_bytes(d));
    w.lse = p->out.rank ? 0 : align_up(recomputed_lse_bytes(d));
    w.total = w.rows + w.values + w.sums + w.out + w.lse;
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

template <typename T, int D, bool OPTIONS, int PARTS>
cudaError_t launch_dkdv(const cuda_args &a, const scratch &w, cudaStream_t stream)
{
    const dim3 grid = key_grid(a.g.dims, tile<D>::BN);
    if (is_empty(grid)) return cudaSuccess;
    const cudaError_t code = allow_shared<dkdv_tiles<T, D, OPTIONS, PARTS>>(sizeof(shared<D, OPTIONS>));
    if (code == cudaSuccess)
        dkdv_tiles<T, D, OPTIONS, PARTS><<<grid, tile<D>::BN * 2, sizeof(shared<D, OPTIONS>), stream>>>(a, w);
    return code;
}

/* Bytes without the second dS. */
template <int D> constexpr size_t least_wide = sizeof(shared_wide<D>) - sizeof(shared_wide<D>::dS) / 2;

template <typename T, int D>
cudaError_t launch_wide(const cuda_chip *chip, const cuda_args &a, const scratch &w, cudaStream_t stream)
{
    typedef shared_wide<D> Shared;
    const dim3 grid = key_grid(a.g.dims, Shared::BN);
    if (is_empty(grid)) return cudaSuccess;
    const bool both = sizeof(Shared) <= (size_t)chip->shared_bytes;
    const size_t bytes = both ? sizeof(Shared) : least_wide<D>;
    const cudaError_t code = allow_shared<dkdv_wide<T, D>>(bytes);
    if (code == cudaSuccess)
        dkdv_wide<T, D>
            <<<grid, Shared::THREADS, bytes, stream>>>(a, w, limits_of_whole(a.g), both ? Shared::BN * BM : 0);
    return code;
}

template <typename T, int D, bool OPTIONS>
cudaError_t launch_form(const cuda_chip *chip, const cuda_args &a, const scratch &w, cudaStream_t stream)
{
    const dim3 grid = tile_grid(a.g, BM);
    cudaError_t code = cudaSuccess;
    if (!is_empty(grid)) prepare<T, D><<<grid, 128, 0, stream>>>(a, w);
    if constexpr (D <= 128 && !OPTIONS) code = launch_wide<T, D>(chip, a, w, stream);
    else if constexpr (D <= 128) code = launch_dkdv<T, D, OPTIONS, DK | DV>(a, w, stream);
    else {
        const scratch without_dq = { w.s, w.values, nullptr };
        code = launch_dkdv<T, D, OPTIONS, DK>(a, w, stream);
        if (code == cudaSuccess) code = launch_dkdv<T, D, OPTIONS, DV>(a, without_dq, stream);
    }
    if (code == cudaSuccess && a.g.view[ATTN_T_dq].data && !is_empty(grid)) {
        if (w.sums) finish<T, D><<<grid, 256, 0, stream>>>(a, w);
        else {
            code = allow_shared<dq_tiles<T, D, OPTIONS>>(sizeof(shared_dq<D, OPTIONS>));
            if (code == cudaSuccess)
                dq_tiles<T, D, OPTIONS><<<grid, BM * 2, sizeof(shared_dq<D, OPTIONS>), stream>>>(a, w.s);
        }
    }
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

template <typename T>
cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, const scratch &w, bool options, cudaStream_t stream)
{
    switch (class_of(a.g.dims)) {
    case 64:
        return options ? launch_form<T, 64, true>(chip, a, w, stream) : launch_form<T, 64, false>(chip, a, w, stream);
    case 128:
        return options ? launch_form<T, 128, true>(chip, a, w, stream) : launch_form<T, 128, false>(chip, a, w, stream);
    default:
        return options ? launch_form<T, 256, true>(chip, a, w, stream) : launch_form<T, 256, false>(chip, a, w, stream);
    }
}

/* Most that a block takes in the form of these problems. */
template <int D> size_t most_shared(bool options, bool deterministic)
{
    size_t keys = options ? sizeof(shared<D, true>) : sizeof(shared<D, false>);
    if constexpr (D <= 128) keys = options ? sizeof(shared<D, true>) : least_wide<D>;
    const size_t dq = !deterministic ? 0 : options ? sizeof(shared_dq<D, true>) : sizeof(shared_dq<D, false>);
    return keys > dq ? keys : dq;
}

bool plan(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    const int D = class_of(d);
    const bool options = has_options(plan), deterministic = plan->problem->deterministic;
    const size_t bytes = D == 64    ? most_shared<64>(options, deterministic)
                         : D == 128 ? most_shared<128>(options, deterministic)
                                    : most_shared<256>(options, deterministic);
    recomputed_forward forward;
    if (!tile_grid_fits(d) || bytes > (size_t)chip->shared_bytes) return false;
    if (!plan->problem->out.rank && !plan_recomputed(&forward, generic_forward, chip, plan, nullptr, nullptr))
        return false;
    plan->workspace_bytes = parts_of(plan).total;
    return true;
}

cudaError_t launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const parts w = parts_of(plan);
    cuda_args a = cuda_args_of(plan);
    char *const at = (char *)memory, *const out = at + w.rows + w.values + w.sums;
    scratch k;
    cudaError_t code = cudaSuccess;
    k.s.lse = (float *)at;
    k.s.delta = k.s.lse + query_rows(a.g.dims);
    k.values = (row_values *)(at + w.rows);
    k.sums = w.sums ? (float *)(at + w.rows + w.values) : nullptr;
    if (!plan->problem->out.rank) { /* the forward first */
        recomputed_forward forward;
        if (!plan_recomputed(&forward, generic_forward, chip, plan, out, out + w.out))
            return cudaErrorInvalidConfiguration;
        code = generic_forward.launch(chip, stream, &forward.plan, nullptr);
        a.g.view[ATTN_T_out] = forward.plan.geometry.view[ATTN_T_out];
        a.g.view[ATTN_T_lse] = forward.plan.geometry.view[ATTN_T_lse];
    }
    k.s.out = a.g.view[ATTN_T_out];
    if (code == cudaSuccess)
        code = plan->problem->q.dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(chip, a, k, has_options(plan), stream)
                                                   : launch_for<__half>(chip, a, k, has_options(plan), stream);
    simple_gradients(plan->problem, a, k.s, stream);
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

} // namespace

extern const cuda_kernel generic_backward = {
    { "generic", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), ATTN_MAX_HEAD_DIM,
      ATTN_EVERYTHING & ~ATTN_OPTION_BIT(DOUT_DTYPE) },
    80,
    ANY_COMPUTE,
    plan,
    launch,
};
