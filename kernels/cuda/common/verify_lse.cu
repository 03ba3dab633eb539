/* verify_lse.cu: attn_lse_start() on a GPU: adds up the exponentials of the scores of some rows in double.
 * kernels/verify_lse.c compares the sums with the client's lse. A block computes one row with one variant of the scores
 * (for example without a mask); its threads share the keys. */
#include "kernels/verify_lse.h"

#include "kernels/cuda/common/kernels.h"

namespace {

/* many threads, because each of them waits for its loads, one after the other */
enum { THREADS = 1024 };

struct lse_args {
    attn_geometry g;
    attn_score_options options;
    lse_variants variants;
    attn_lse_row row[ATTN_LSE_ROWS];
};

/* Returns q . k; *squares becomes the sum of the squared products. */
__device__ double dot_of(const attn_view &q, int64_t q_at, const attn_view &k, int64_t k_at, int64_t D, double *squares)
{
    /* four independent sums of products, and four of squares, to hide latency */
    double dot[4] = { 0, 0, 0, 0 }, sum[4] = { 0, 0, 0, 0 };
    for (int64_t d = 0; d < D; d += 4)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (d + n >= D) break;
            const double x = attn_load(q.dtype, q.data, q_at + d + n) * attn_load(k.dtype, k.data, k_at + d + n);
            dot[n] += x;
            sum[n] += x * x;
        }
    *squares = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    return (dot[0] + dot[1]) + (dot[2] + dot[3]);
}

__global__ void __launch_bounds__(THREADS) sum_rows(const __grid_constant__ lse_args a, double *found)
{
    __shared__ lse_sum sums[THREADS];
    const attn_lse_row row = a.row[blockIdx.x];
    const lse_variant variant = a.variants.list[blockIdx.y];
    double *const to = found + (int64_t)blockIdx.x * ATTN_LSE_NUMBERS;
    if (!variant.applies) {
        if (threadIdx.x == 0) to[blockIdx.y] = NAN;
        return;
    }
    const attn_geometry &g = a.g;
    const attn_view &q = g.view[ATTN_T_q], &k = g.view[ATTN_T_k];
    const attn_sequence s = attn_sequence_of(&g, row.b);
    const attn_range seen = attn_keys_of(&g, &s, row.i);
    const bool whole = variant.without & LSE_PLACES;
    const int64_t from = whole ? 0 : seen.lo, to_key = whole ? s.Sk : seen.hi;
    const int64_t q_at = attn_at(&q, row.b, row.h, s.q_start + row.i);
    const double factor = lse_factor(&g, &row);
    lse_sum sum = lse_sum_init();
    for (int64_t j = from + threadIdx.x; j < to_key; j += THREADS) {
        if (!lse_sees(&g, &s, &row, j, variant.without)) continue;
        double squares;
        const int64_t k_at = attn_key_at(&g, &k, row.b, row.h / g.group, s.k_start + j);
        const double dot = factor * dot_of(q, q_at, k, k_at, g.dims.D, &squares);
        lse_sum_add(&sum, lse_score(&g, &a.options, &s, &row, j, dot, &variant), fabs(factor) * sqrt(squares));
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) lse_sum_join(&sums[threadIdx.x], sums[threadIdx.x + half]);
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    sum = sums[0];
    lse_add_sink(&g, &row, &variant, &sum);
    to[blockIdx.y] = lse_of(&sum);
    if (blockIdx.y == 0) to[ATTN_LSE_VARIANTS] = lse_size_of(&sum);
}

} // namespace

cudaError_t cuda_sum_lse(cudaStream_t stream, const attn_problem *problem, const attn_lse_look *look, double *found)
{
    lse_args a = {};
    if (look->count == 0) return cudaSuccess;
    a.g = attn_geometry_of(problem);
    a.options = attn_score_options_of(&a.g);
    a.variants = lse_variants_of(problem);
    for (int n = 0; n < look->count; n++) a.row[n] = look->row[n];
    sum_rows<<<dim3(look->count, ATTN_LSE_VARIANTS), THREADS, 0, stream>>>(a, found);
    return cudaPeekAtLastError();
}
