/* merge.cu: attn_merge() on the GPU. A warp merges one row. Its lanes share the parts to find the weight of each
 * part. Then each lane sums every 32nd column over the parts, in their order. */
#include "kernels/merge.h"

#include "kernels/cuda/common/args.cuh"

namespace {

enum { WARPS = 4, MOST_BLOCKS = 1 << 16 };

__global__ void __launch_bounds__(32 * WARPS) merge_rows(const __grid_constant__ attn_merge_plan m, int64_t rows)
{
    __shared__ float share_of_part[WARPS][ATTN_MERGE_PARTS];
    float *const share = share_of_part[threadIdx.x / 32];
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; n < rows; n += (int64_t)gridDim.x * WARPS) {
        const attn_merge_row row = attn_merge_row_of(&m, n);
        const int64_t from = attn_at(&m.out_of_part, row.b, row.h, row.i), to = attn_at(&m.out, row.b, row.h, row.i);
        __syncwarp(); /* from here on no lane reads the shares of this row */
        for (int p = threadIdx.x % 32; p < m.count; p += 32) share[p] = attn_merge_share(&m, &row, p);
        __syncwarp();
        for (int64_t d = threadIdx.x % 32; d < m.Dv && m.out.data; d += 32) {
            float sum = 0;
            for (int p = 0; p < m.count; p++) {
                if (m.part_lse[p][row.lse_at] == -CUDART_INF_F) continue;
                const float part = load_float(m.out_of_part.dtype, m.part_out[p], from + d);
                attn_merge_add(&sum, share[p], &part, 1);
            }
            store_float(m.out.dtype, m.out.data, to + d, sum);
        }
        if (threadIdx.x % 32 == 0 && m.lse.data)
            ((float *)m.lse.data)[attn_at(&m.lse, row.b, row.h, row.i)] = attn_merge_lse(&row);
    }
}

} // namespace

cudaError_t cuda_merge(cudaStream_t stream, const attn_merge_plan *plan)
{
    const int64_t rows = attn_merge_count(plan);
    const int64_t blocks = attn_min64(attn_tiles(rows, WARPS), MOST_BLOCKS);
    merge_rows<<<(unsigned)blocks, 32 * WARPS, 0, stream>>>(*plan, rows);
    return cudaPeekAtLastError();
}
