/* backward_prepare.cuh: the kernel prepare_ahead, which computes delta = rowsum(dO O) - dlse and lse in base 2 for the
 * kernel backward_tiles.
 *
 * prepare_ahead is memory bound and backward_tiles is bound by products, so both run at the same time. A few blocks of
 * prepare_ahead, each alone on a multiprocessor, prepare head after head. The producer of backward_tiles waits until
 * all queries of a head are prepared. This wait ends, because all blocks of prepare_ahead run before the first block of
 * backward_tiles begins (launch_dependents()). */
#ifndef ATTN_SM90_BACKWARD_PREPARE_CUH
#define ATTN_SM90_BACKWARD_PREPARE_CUH

#include "kernels/cuda/sm90/backward/backward_rounds.cuh"

namespace {

/* Number of queries that one warp prepares at a time: 8 KB of O and 8 KB of dO. */
template <class X> constexpr int UNIT_ROWS = 64 / X::CHUNKS;
template <class X> constexpr int UNITS_OF_TILE = QUERY_TILE / UNIT_ROWS<X>;

/* Queries i0 to i0 + UNIT_ROWS - 1 of a head. At the end of a sequence, some of them may not exist. `place` is the
 * number of the tile of 64 queries in which they lie. */
struct query_unit {
    attn_sequence s;
    int place, b, h, i0;
};
template <class X> DEVICE query_unit query_unit_of(const cuda_args &a, int n)
{
    const attn_dims &d = a.g.dims;
    const int per_head = (int)(d.packed ? d.total_q / QUERY_TILE + d.B : attn_tiles(d.Sq, QUERY_TILE));
    query_unit x;
    x.place = n / UNITS_OF_TILE<X>;
    x.h = x.place / per_head;
    int tile = x.place - x.h * per_head;
    x.b = x.h / (int)d.H;
    x.h -= x.b * (int)d.H;
    if (d.packed) {
        x.b = sequence_of_tile(a.g.cu_q, d.B, QUERY_TILE, 1, tile);
        tile -= a.g.cu_q[x.b] / QUERY_TILE + x.b;
    }
    x.s = attn_sequence_of(&a.g, x.b);
    x.i0 = tile * QUERY_TILE + n % UNITS_OF_TILE<X> * UNIT_ROWS<X>;
    return x;
}

const int PREPARER_SHARE = 4; /* at least one of every PREPARER_SHARE multiprocessors runs prepare_ahead */
/* threads of a block; they take so many registers that no second block fits on the multiprocessor */
const int PREPARER_THREADS = 512;

template <typename T, class X> struct preparer {
    static const int D = X::D, ROWS = UNIT_ROWS<X>, LANES = D / 8 /* number of lanes that share a row */,
                     STEP = 32 / LANES /* rows that a warp processes at the same time */;
    /* number of rows that a lane loads before it uses the first: many loads in flight hide latency */
    static const int TOGETHER = 8;
    const cuda_args &a;
    const plan &p;
    float *const products; /* shared memory of this warp: the dot product of dO and O of each row */
    const int lane;

    DEVICE void prepare(int n) const
    {
        const query_unit x = query_unit_of<X>(a, n);
        const int rows = max(min((int)x.s.Sq - x.i0, ROWS), 0);
        /* backward_tiles loads lse and delta of whole query tiles, so rows past the end of the sequence are prepared
         * too. */
        if (x.i0 / QUERY_TILE * QUERY_TILE < x.s.Sq) prepare_rows(x, rows);
        __syncwarp();
        if (lane == 0) add_release(p.prepared + n / p.units_of_head, 1);
    }

    DEVICE void prepare_rows(const query_unit &x, int rows) const
    {
        const attn_view &lse = a.g.view[ATTN_T_lse], &dlse = a.g.view[ATTN_T_dlse];
        const int64_t line = x.s.q_start + x.i0;
        const int first = x.i0 % QUERY_TILE;
        /* lse (y) and dlse (less) of the lane's rows. They are loaded before the dot products are computed, and used
         * afterwards. */
        float y[ROWS / 32], less[ROWS / 32];
#pragma unroll
        for (int n = 0; n < ROWS / 32; n++) {
            const int row = n * 32 + lane;
            y[n] = -CUDART_INF_F;
            less[n] = 0;
            if (row < rows) y[n] = ((const float *)lse.data)[attn_at(&lse, x.b, x.h, line + row)];
            if (row < rows && dlse.data) less[n] = ((const float *)dlse.data)[attn_at(&dlse, x.b, x.h, line + row)];
        }
        if (p.zeros) {
            float *const sums = p.scratch.sums + (int64_t)x.place * (QUERY_TILE * D) + fragment_at<D>(first, 0);
#pragma unroll 8
            for (int n = 0; n < ROWS * D / 128; n++) *(float4 *)(sums + (n * 32 + lane) * 4) = make_float4(0, 0, 0, 0);
        }
        multiply_rows_of(x, line, rows);
        __syncwarp();
        bool huge = false;
#pragma unroll
        for (int n = 0; n < ROWS / 32; n++) {
            const int row = n * 32 + lane;
            const float delta = y[n] == -CUDART_INF_F ? 0 : products[row] - less[n];
            if (row < rows) {
                const int64_t at = x.b * a.lse_batch + x.h * a.lse_head + line + row;
                p.scratch.s.lse[at] = y[n];
                p.scratch.s.rest[at] = 0;
                p.scratch.s.delta[at] = delta;
            }
            p.scratch.values[x.place].lse2[first + row] = lse_in_base_2(y[n]);
            p.scratch.values[x.place].delta[first + row] = delta;
            huge |= !(fabsf(y[n]) < ATTN_LSE_MOST) && y[n] != -CUDART_INF_F;
        }
        if (__any_sync(0xffffffff, huge)) part_lse(x, rows);
        /* after this barrier the warp may overwrite `products` with the dot products of its next queries */
        __syncwarp();
    }

    /* Splits lse of these queries into two numbers, lse and rest (saved.rest), because the lse of some rows is huge. */
    DEVICE void part_lse(const query_unit &x, int rows) const
    {
        const head_args head = head_args_of(a, x.b, x.h);
        const attn_view &lse = a.g.view[ATTN_T_lse];
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            const int64_t i = x.i0 + row;
            const float given = ((const float *)lse.data)[attn_at(&lse, x.b, x.h, x.s.q_start + i)];
            const float2 parts = lse_in_parts(a, head, i, given);
            if (lane) continue;
            p.scratch.s.lse[lse_at(a, head, i)] = parts.x;
            p.scratch.s.rest[lse_at(a, head, i)] = parts.y;
        }
    }

    static DEVICE float dot(uint32_t x, uint32_t y, float sum)
    {
        const float2 u = unpack<T>(x), v = unpack<T>(y);
        return fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }

    DEVICE void multiply_rows_of(const query_unit &x, int64_t line, int rows) const
    {
        const attn_view &out = p.scratch.s.out, &dout = a.g.view[ATTN_T_dout];
        const int Dv = (int)a.g.dims.Dv, d = lane % LANES * 8;
        const int64_t out_at = attn_at(&out, x.b, x.h, line) + d, dout_at = attn_at(&dout, x.b, x.h, line) + d;
#pragma unroll 1
        for (int first = lane / LANES; first < ROWS; first += TOGETHER * STEP) {
            float sum[TOGETHER] = {};
            if (p.out_in_pieces) {
                uint4 o[TOGETHER] = {}, dO[TOGETHER] = {};
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
                    if (first + k * STEP < rows && d < Dv) {
                        o[k] = *(const uint4 *)((const uint16_t *)out.data + out_at + (first + k * STEP) * out.row);
                        dO[k] = *(const uint4 *)((const uint16_t *)dout.data + dout_at + (first + k * STEP) * dout.row);
                    }
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
                    sum[k] = dot(o[k].x, dO[k].x, dot(o[k].y, dO[k].y, dot(o[k].z, dO[k].z, dot(o[k].w, dO[k].w, 0))));
            } else {
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
                    if (first + k * STEP < rows)
#pragma unroll 1
                        for (int e = 0; e < 8 && d + e < Dv; e++)
                            sum[k] += load_float(out.dtype, out.data, out_at + (first + k * STEP) * out.row + e) *
                                      load_float(dout.dtype, dout.data, dout_at + (first + k * STEP) * dout.row + e);
            }
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
#pragma unroll
                for (int n = LANES / 2; n; n /= 2) sum[k] += __shfl_xor_sync(0xffffffff, sum[k], n);
                if (lane % LANES == 0) products[first + k * STEP] = sum[k];
            }
        }
    }
};

/* Computes delta and lse of all queries. A warp takes 32 or 64 queries of one head at a time. Neighbouring groups of
 * queries go to different multiprocessors. */
template <typename T, class X>
__global__ void __launch_bounds__(PREPARER_THREADS, 1)
    prepare_ahead(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    __shared__ float products[PREPARER_THREADS / 32][UNIT_ROWS<X>];
    const int warp = threadIdx.x / 32, step = (int)gridDim.x * (PREPARER_THREADS / 32);
    wait_for_prerequisites();
    launch_dependents();
    const preparer<T, X> me = { a, p, products[warp], (int)threadIdx.x % 32 };
    for (int n = warp * (int)gridDim.x + (int)blockIdx.x; n < p.units; n += step) me.prepare(n);
}

} // namespace

#endif
