/* sum.cu: attn_sum_parts() on a GPU: adds up arrays element by element, in the order of the arrays. */
#include "kernels/cuda/common/args.cuh"

namespace {

enum { THREADS = 256, MOST_BLOCKS = 2048 };

__global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ attn_sum s)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x; n < s.elements; n += step) {
        float total = s.parts[0][n];
#pragma unroll 4
        for (int part = 1; part < s.count; part++) total += s.parts[part][n];
        store_float(s.dtype, s.to, n, total);
    }
}

} // namespace

cudaError_t cuda_sum(cudaStream_t stream, const attn_sum *sum)
{
    const int64_t blocks = attn_min64(attn_tiles(sum->elements, THREADS), MOST_BLOCKS);
    sum_parts<<<(unsigned)blocks, THREADS, 0, stream>>>(*sum);
    return cudaPeekAtLastError();
}
