/* backward_common.cuh: code that the variants of backward.cu share: the kernels before and after the main kernel
 * (prepare, finish), and functions that find a block's keys and the queries that see them. */
#ifndef ATTN_SM80_BACKWARD_COMMON_CUH
#define ATTN_SM80_BACKWARD_COMMON_CUH

#include "backward_steps.h"
#include "scores.cuh"

namespace {

enum { BM = QUERY_TILE }; /* number of queries of a query tile */
typedef backward_scratch scratch;

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

DEVICE void load_values(row_values *to, const row_values *from)
{
    static_assert(sizeof(row_values) == 32 * 16);
    if (threadIdx.x < 32) cp_async_16(smem_addr(to) + threadIdx.x * 16, (const char *)from + threadIdx.x * 16, true);
}

/* ---- The kernel `prepare`: lse and delta of each row ------------------------------------------------------------- */

/* For each row of the tile whose lse is too large for one float32, computes the two numbers that together stand for
 * this lse: s.lse and s.rest (see saved.rest). The indices of the block's tile are computed a second time here, because
 * keeping them would take registers in prepare(). */
__device__ __noinline__ void lse_of_tile_in_parts(const cuda_args &a, const saved &s, unsigned tile)
{
    const tile_place place = tile_place_of<BM>(a, tile);
    const attn_view &lse = a.g.view[ATTN_T_lse];
    const int64_t rows = attn_min64(BM, place.x.s.Sq - place.i0);
    for (int64_t i = place.i0 + threadIdx.x / 32; i < place.i0 + rows; i += 4) {
        const float given = ((const float *)lse.data)[attn_at(&lse, place.x.b, place.x.h, place.x.s.q_start + i)];
        const float2 parts = lse_in_parts(a, place.x, i, given);
        if (threadIdx.x % 32) continue;
        s.lse[lse_at(a, place.x, i)] = parts.x;
        s.rest[lse_at(a, place.x, i)] = parts.y;
    }
}

/* Computes delta = rowsum(dO O) - dlse, writes lse to a dense array and to row_values, and zeroes the sums of dQ. One
 * block computes one query tile of one head. The launch bound saves registers: eight blocks instead of six fit on a
 * multiprocessor, so more loads are in flight. */
template <typename T, int D>
__global__ void __launch_bounds__(128, 8)
    prepare(const __grid_constant__ cuda_args a, const __grid_constant__ scratch w)
{
    /* LANES: number of threads that share a row; STEP: number of rows that the block's 128 threads process at a time */
    const int LANES = D / 8, STEP = 128 / LANES;
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
    const int mine = threadIdx.x;
    float y = -CUDART_INF_F, less = 0;
    if (mine < rows) {
        y = ((const float *)lse.data)[attn_at(&lse, x.b, x.h, line + mine)];
        if (dlse.data) less = ((const float *)dlse.data)[attn_at(&dlse, x.b, x.h, line + mine)];
    }
    __shared__ float sums[BM];
    const int TOGETHER = BM / STEP < 4 ? BM / STEP : 4;
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
    const bool huge = mine < rows && !(fabsf(y) < ATTN_LSE_MOST) && y != -CUDART_INF_F;
    const bool any_huge = __syncthreads_or(huge);
    if (mine < BM) {
        const float delta = y == -CUDART_INF_F ? 0 : sums[mine] - less;
        if (mine < rows) {
            const int64_t at = lse_at(a, x, place.i0 + mine);
            w.s.lse[at] = y;
            w.s.rest[at] = 0;
            w.s.delta[at] = delta;
        }
        w.values[tile].lse2[mine] = lse_in_base_2(y);
        w.values[tile].delta[mine] = delta;
    }
    if (any_huge) { /* rare case: a row's huge lse is stored as two numbers (see saved.rest) */
        __syncthreads();
        lse_of_tile_in_parts(a, w.s, kept(blockIdx.x));
    }
}

/* ---- dK, dV and the sums of dQ: code shared by dkdv_wide and dkdv_tiles --------------------------------------- */

/* A block's keys, and the query tiles that see at least one of these keys. In a packed problem, key tiles are numbered
 * across all sequences: those of sequence b have the numbers from cu_k[b] / BN + b on. */
struct key_place {
    attn_sequence s;
    limits limit;
    int b, hk, j0;
    int rows;        /* number of rows of dk and dv to write; rows past the length in seqlens_k become zeros */
    int first, last; /* the query tiles `first` to `last` - 1 see at least one of the block's keys */
};

/* Returns the block's tile of keys. The members about query tiles are not set: find_queries() sets them later, while
 * the keys are loaded. */
template <int BN> DEVICE key_place key_place_of(const cuda_args &a, const limits &whole, uint3 block)
{
    const attn_geometry &g = a.g;
    const int tile = a.first_tile + (int)block.x;
    key_place place;
    place.b = block.z;
    place.hk = block.y;
    place.j0 = tile * BN;
    place.limit = whole;
    place.s.q_start = place.s.k_start = 0;
    place.s.Sq = g.dims.Sq;
    place.s.Sk = g.dims.Sk;
    if (!is_whole(a)) {
        if (g.dims.packed) {
            place.b = sequence_of_tile(g.cu_k, g.dims.B, BN, 1, tile);
            place.j0 = (tile - (g.cu_k[place.b] / BN + place.b)) * BN;
        }
        place.s = attn_sequence_of(&g, place.b);
        place.limit = limits_of(g, place.s);
    }
    place.rows = max(min((int)(g.dims.packed ? place.s.Sk : g.dims.Sk) - place.j0, BN), 0);
    place.first = place.last = 0;
    return place;
}

/* Finds the query tiles that see the block's keys. Query i sees keys i + lo to i + hi - 1 (struct limits), so key j is
 * seen by the queries i with j - hi < i <= j - lo. */
template <int BN, int TILE = BM> DEVICE void find_queries(key_place &place)
{
    const int Sq = (int)place.s.Sq, j_last = min(place.j0 + BN, place.limit.Sk) - 1;
    if (j_last < place.j0) return;
    place.first = max(place.j0 - place.limit.hi + 1, 0) / TILE;
    place.last = max((min(j_last - place.limit.lo + 1, Sq) + TILE - 1) / TILE, place.first);
}

/* Stores a warp's sums (blocks of 16 x 8) in shared memory, from where store_rows() writes them to global memory. */
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

/* Multiplies a warp's accumulators by `factor`. Returns whether all products are finite. */
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
                /* `zero` becomes NaN if the product is not finite */
                zero = fmaf(c[mt][nt][e], 0, zero);
            }
    return zero == 0;
}

/* ---- The kernel `finish`: dQ from its sums ----------------------------------------------------------------------- */

/* Stores dQ = scale * sums, in the dtype of dq. One block computes one query tile of one head. */
/* The launch bound limits registers, so that four blocks fit on a multiprocessor and many loads are in flight. Without
 * the launch bound, dq_row() would take so many registers that only two blocks fit. */
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
                  /* EACH: number of blocks of 16 queries x 8 channels that a warp loads; CHUNK: number of these blocks
                   * that it loads at a time */
            CHUNK = EACH < 8 ? EACH : 8;
#pragma unroll
        for (int chunk = 0; chunk < EACH; chunk += CHUNK) {
            float4 sum[CHUNK];
#pragma unroll
            for (int k = 0; k < CHUNK; k++) sum[k] = read_fragment(sums + ((chunk + k) * 8 + warp) * 128, lane);
#pragma unroll
            for (int k = 0; k < CHUNK; k++) {
                const int n = (chunk + k) * 8 + warp;
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
    /* the index of the block's tile is computed a second time, because keeping it would take registers */
    if (poisoned) {
        __syncthreads();
        const tile_place again = tile_place_of<BM>(a, kept(blockIdx.x));
        for (int r = warp; r < rows; r += 8) dq_row(a, w.s, again.x, again.i0 + r);
    }
}

} // namespace

#endif
