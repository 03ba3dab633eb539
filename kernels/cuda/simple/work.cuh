/* work.cuh: tells a warp which row it computes. A block has WARPS warps. */
#ifndef ATTN_CUDA_WORK_CUH
#define ATTN_CUDA_WORK_CUH

#include "kernels/cuda/common/rows.cuh"

namespace {

enum { WARPS = 4 };

DEVICE int64_t warp_index()
{
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

struct row {
    head_args x;
    int64_t i;
    bool exists;
};

/* Returns n / by; `rest` becomes the remainder. Nearly all n fit in 32 bits, where a division takes far fewer
 * instructions. */
DEVICE int64_t divide(int64_t n, int64_t by, int64_t &rest)
{
    const int64_t quotient = ((n | by) >> 32) == 0 ? (int64_t)((uint32_t)n / (uint32_t)by) : n / by;
    rest = n - quotient * by;
    return quotient;
}

/* Returns head and position of query row number n, counted over all heads, head after head. */
DEVICE row query_row(const cuda_args &a, int64_t n)
{
    const attn_dims &d = a.g.dims;
    row r;
    r.exists = d.Sq > 0 && n < d.Sq * d.H * (d.packed ? 1 : d.B);
    if (!r.exists) return r;
    int64_t line, h;
    const int64_t b = divide(divide(n, d.Sq, line), d.H, h);
    r.x = head_args_of(a, d.packed ? sequence_at(a.g.cu_q, d.B, line) : b, h);
    r.i = line - r.x.s.q_start;
    r.exists = r.i < r.x.s.Sq;
    return r;
}

static inline unsigned blocks_for(int64_t warps)
{
    return (unsigned)attn_tiles(warps, WARPS);
}

} // namespace

#endif
