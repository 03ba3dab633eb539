/* head_sums.cu: computes dalibi_slopes and dsinks, which are sums over the queries of a head. A block computes one
 * head, and adds in a fixed order, so results have the same bits in every run. */
#include "kernels/cuda/common/kernels.h"
#include "head_sums.h"

namespace {

enum { THREADS = 1024 };

/* Returns the sum over the block in thread 0. All threads of the block call it. */
DEVICE float sum_of_block(float x)
{
    __shared__ float part[THREADS / 32];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    x = warp_sum(x);
    if (lane == 0) part[warp] = x;
    __syncthreads();
    return warp == 0 ? warp_sum(part[lane]) : 0;
}

/* Computes dalibi_slopes of each head: minus the sum of dZ (the gradient of the scores) times the distance from query
 * to key. The sum is over all pairs of one batch row, or of all batch rows. */
__global__ void __launch_bounds__(THREADS)
    dslope_heads(const __grid_constant__ cuda_args a, const __grid_constant__ saved s, int64_t batches)
{
    const attn_dims &d = a.g.dims;
    const int64_t h = blockIdx.x % d.H, b0 = blockIdx.x / d.H;
    float sum = 0;
    for (int64_t b = b0; b < (batches == 1 ? d.B : b0 + 1); b++) {
        const attn_sequence q = attn_sequence_of(&a.g, b);
        const float *const far = s.far + b * a.lse_batch + h * a.lse_head + q.q_start;
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < q.Sq; i += THREADS) sum -= far[i];
    }
    sum = sum_of_block(sum);
    const attn_view &view = a.g.view[ATTN_T_dalibi_slopes];
    if (threadIdx.x == 0) ((float *)view.data)[attn_at(&view, b0, h, 0)] = sum;
}

/* Computes dsinks = -sum of exp(sink - lse) * delta over batch rows and queries. */
__global__ void __launch_bounds__(THREADS)
    dsink_heads(const __grid_constant__ cuda_args a, const __grid_constant__ saved s)
{
    const int64_t h = blockIdx.x;
    const float sink = sink_of(a, h);
    float sum = 0;
    for (int64_t b = 0; b < a.g.dims.B; b++) {
        const attn_sequence q = attn_sequence_of(&a.g, b);
        const int64_t first = b * a.lse_batch + h * a.lse_head + q.q_start;
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < q.Sq; i += THREADS) {
            const float lse = s.lse[first + i], rest = s.rest[first + i], delta = s.delta[first + i];
            if (lse != -CUDART_INF_F) sum -= expf(sink - lse - rest) * delta;
        }
    }
    sum = sum_of_block(sum);
    const attn_view &view = a.g.view[ATTN_T_dsinks];
    if (threadIdx.x == 0) ((float *)view.data)[attn_at(&view, 0, h, 0)] = sum;
}

} // namespace

cudaError_t sum_heads(const cuda_chip *chip, const attn_problem *p, const cuda_args &a, const saved &s,
                      cudaStream_t stream)
{
    const attn_dims &d = a.g.dims;
    const int64_t batches = p->dalibi_slopes.rank == 2 ? d.B : 1;
    if (a.g.view[ATTN_T_dalibi_slopes].data && batches * d.H > 0 && takes_step(chip, 0))
        dslope_heads<<<(unsigned)(batches * d.H), THREADS, 0, stream>>>(a, s, batches);
    if (a.g.view[ATTN_T_dsinks].data && d.H > 0 && takes_step(chip, 0))
        dsink_heads<<<(unsigned)d.H, THREADS, 0, stream>>>(a, s);
    return cudaPeekAtLastError();
}
