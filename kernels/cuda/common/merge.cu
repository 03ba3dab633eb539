/* merge.cu: attn_merge() for GPUs: merges attention results over parts of the keys into the result over all keys. A
 * warp computes one row, and each lane every 32nd column. A second kernel, with a block for each head, computes dsinks,
 * which is a sum over rows. The order of additions is always the same. */
#include "kernels/merge.h"

#include "kernels/cuda/common/args.cuh"

namespace {

enum { WARPS = 4, SINK_WARPS = 16, MOST_BLOCKS = 1 << 16 };

/* For each part of the keys: `share` is the weight of the part's result in the row's result, `dot` the dot product of
 * dout with the part's out. */
struct weights {
    float share[ATTN_MERGE_PARTS], dot[ATTN_MERGE_PARTS];
};

DEVICE int lane()
{
    return threadIdx.x % 32;
}

DEVICE void find_shares(const attn_merge_plan &m, const attn_merge_row &row, weights &w)
{
    /* waits until all lanes have read the previous row's weights, which are overwritten next */
    __syncwarp();
    for (int p = lane(); p < m.count; p += 32) w.share[p] = attn_merge_share(&row, m.part_lse[p][row.lse_at]);
    __syncwarp();
}

DEVICE void merge_out(const attn_merge_plan &m, const attn_merge_row &row, const weights &w)
{
    const int64_t from = attn_at(&m.out_of_part, row.b, row.h, row.i), to = attn_at(&m.out, row.b, row.h, row.i);
    for (int64_t d = lane(); d < m.Dv; d += 32) {
        float sum = 0;
        for (int p = 0; p < m.count; p++) {
            if (m.part_lse[p][row.lse_at] == -CUDART_INF_F) continue;
            const float part = load_float(m.out_of_part.dtype, m.part_out[p], from + d);
            attn_merge_add(&sum, w.share[p], &part, 1);
        }
        store_float(m.out.dtype, m.out.data, to + d, sum);
    }
}

/* Computes w.dot for each part of the keys. Returns, in all lanes, the mean of these dot products, weighted by
 * w.share. */
DEVICE float find_dots(const attn_merge_plan &m, const attn_merge_row &row, weights &w)
{
    const int64_t from = attn_at(&m.out_of_part, row.b, row.h, row.i), at = attn_at(&m.dout, row.b, row.h, row.i);
    float mean = 0;
    for (int p = 0; p < m.count; p++) {
        float dot = 0;
        /* whether the part has no visible keys; all lanes get the same value */
        const bool empty = m.part_lse[p][row.lse_at] == -CUDART_INF_F;
        for (int64_t d = lane(); d < m.Dv && !empty; d += 32)
            dot += load_float(m.dout.dtype, m.dout.data, at + d) *
                   load_float(m.out_of_part.dtype, m.part_out[p], from + d);
        for (int other = 16; other; other /= 2) dot += __shfl_xor_sync(0xffffffff, dot, other);
        if (!empty) mean += w.share[p] * dot;
        if (lane() == 0) w.dot[p] = dot;
    }
    __syncwarp();
    return mean;
}

DEVICE void write_gradients(const attn_merge_plan &m, const attn_merge_row &row, weights &w)
{
    const int64_t from = attn_at(&m.dout, row.b, row.h, row.i), to = attn_at(&m.dout_of_part, row.b, row.h, row.i);
    const float mean = find_dots(m, row, w);
    for (int p = lane(); p < m.count; p += 32)
        m.part_dlse[p][attn_at(&m.dlse_of_part, row.b, row.h, row.i)] = attn_merge_dlse(
            &m, &row, m.part_lse[p][row.lse_at], w.dot[p], mean);
    for (int64_t d = lane(); d < m.Dv; d += 32) {
        const float dout = load_float(m.dout.dtype, m.dout.data, from + d);
        for (int p = 0; p < m.count; p++) {
            const bool empty = m.part_lse[p][row.lse_at] == -CUDART_INF_F;
            store_float(m.dout_of_part.dtype, m.part_dout[p], to + d, empty ? 0 : w.share[p] * dout);
        }
    }
}

__global__ void __launch_bounds__(32 * WARPS) merge_rows(const __grid_constant__ attn_merge_plan m, int64_t rows)
{
    __shared__ weights all[WARPS];
    weights &w = all[threadIdx.x / 32];
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; n < rows; n += (int64_t)gridDim.x * WARPS) {
        const attn_merge_row row = attn_merge_row_of(&m, n);
        find_shares(m, row, w);
        if (m.out.data) merge_out(m, row, w);
        if (lane() == 0 && m.lse.data)
            ((float *)m.lse.data)[attn_at(&m.lse, row.b, row.h, row.i)] = attn_merge_lse(&row);
        if (m.gradients) write_gradients(m, row, w);
    }
}

__global__ void __launch_bounds__(32 * SINK_WARPS) merge_sinks(const __grid_constant__ attn_merge_plan m, int64_t rows)
{
    __shared__ weights all[SINK_WARPS];
    __shared__ double sums[SINK_WARPS];
    const int warp = threadIdx.x / 32;
    weights &w = all[warp];
    for (int64_t h = blockIdx.x; h < m.H; h += gridDim.x) {
        double sum = 0;
        for (int64_t n = h + warp * m.H; n < rows && m.sinks[h] != -CUDART_INF_F; n += SINK_WARPS * m.H) {
            const attn_merge_row row = attn_merge_row_of(&m, n);
            find_shares(m, row, w);
            sum += attn_merge_dlse(&m, &row, row.sink, 0, find_dots(m, row, w));
        }
        if (lane() == 0) sums[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            double total = 0;
            for (int other = 0; other < SINK_WARPS; other++) total += sums[other];
            m.dsinks[h] = (float)total;
        }
        __syncthreads();
    }
}

} // namespace

cudaError_t cuda_merge(cudaStream_t stream, const attn_merge_plan *plan)
{
    const int64_t rows = attn_merge_count(plan);
    const int64_t blocks = attn_min64(attn_tiles(rows, WARPS), MOST_BLOCKS);
    if (rows > 0) merge_rows<<<(unsigned)blocks, 32 * WARPS, 0, stream>>>(*plan, rows);
    if (plan->dsinks)
        merge_sinks<<<(unsigned)attn_min64(plan->H, MOST_BLOCKS), 32 * SINK_WARPS, 0, stream>>>(*plan, rows);
    return cudaPeekAtLastError();
}
