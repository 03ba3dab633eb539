/* observe_common.cuh: code for an observe (statistics of attention weights) that the kernels with mma.sync (sm80/) and
 * with wgmma (sm90/observe/) share: launching, and merging a row's maximum m and sums l and e over parts of the keys
 * (observe.h). First include sm80/ptx.cuh or sm90/observe/ptx.cuh, which define exp2_fast() and max_or_nan(). */
#ifndef ATTN_SM80_OBSERVE_COMMON_CUH
#define ATTN_SM80_OBSERVE_COMMON_CUH

#include "kernels/cuda/common/args.cuh"
#include "kernels/cuda/sm80/observe.h"

namespace {

/* ---- Adding up the sums of a row --------------------------------------------------------------------------------- */

/* Returns the sums l (x) and e (y) of a part of the keys, rescaled to a new maximum. `by` is the part's maximum minus
 * the new one, in base 2. */
DEVICE float2 relative_to(const float4 &part, float by)
{
    const float scale = part.x == -CUDART_INF_F ? 0 : exp2_fast(by);
    if (scale == 0) return make_float2(0, 0);
    return make_float2(__fmul_rn(part.y, scale), __fmul_rn(scale, fmaf(by, part.y, part.z)));
}

template <bool SCORE_MODS> DEVICE float in_unit_2(float most, float scale_log2)
{
    return SCORE_MODS ? in_base_2(most) : __fmul_rn(most, scale_log2);
}

template <bool SCORE_MODS> DEVICE float4 merged(const float4 &x, const float4 &y, float scale_log2)
{
    const float most = max_or_nan(x.x, y.x), m = in_unit_2<SCORE_MODS>(most, scale_log2);
    const float2 u = relative_to(x, in_unit_2<SCORE_MODS>(x.x, scale_log2) - m),
                 v = relative_to(y, in_unit_2<SCORE_MODS>(y.x, scale_log2) - m);
    return make_float4(most, __fadd_rn(u.x, v.x), __fadd_rn(u.y, v.y), 1);
}

/* A thread's maximum and sums of one of its rows. `most` is the largest q.k or, if there are options (softcap, bias,
 * masks, ...), the largest score. l and e are relative to `m`, a score in base 2. */
struct lane_row {
    float most, m, l, e;
};

DEVICE lane_row no_keys()
{
    return { -CUDART_INF_F, -CUDART_INF_F, 0, 0 };
}

/* Merges a row's maximum and sums over its four lanes. The result is valid in the first lane. */
template <bool SCORE_MODS> DEVICE float4 whole_row(const lane_row &row, float scale_log2)
{
    const float by = row.m == -CUDART_INF_F ? 0 : row.m - in_unit_2<SCORE_MODS>(row.most, scale_log2);
    const float scale = exp2_fast(by);
    float4 sum = make_float4(row.most, __fmul_rn(row.l, scale), __fmul_rn(scale, fmaf(by, row.l, row.e)), 1);
#pragma unroll
    for (int with = 1; with <= 2; with *= 2) {
        const float4 other = make_float4(__shfl_xor_sync(0xffffffff, sum.x, with),
                                         __shfl_xor_sync(0xffffffff, sum.y, with),
                                         __shfl_xor_sync(0xffffffff, sum.z, with), 1);
        sum = merged<SCORE_MODS>(sum, other, scale_log2);
    }
    return sum;
}

/* ---- Launching a share of the blocks ----------------------------------------------------------------------------- */

/* Launches a kernel on part number chip->share of a grid's tiles, or on all tiles if chip->shares is 0. `blocks` blocks
 * compute each tile together. */
template <auto kernel, typename... Args>
cudaError_t launch_share(const cuda_chip *chip, cuda_args a, dim3 grid, int blocks, int threads, size_t bytes,
                         cudaStream_t stream, const Args &...args)
{
    take_share(chip, a, grid);
    grid.x *= (unsigned)blocks;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    const cudaError_t code = allow_shared<kernel>(bytes);
    if (code == cudaSuccess) kernel<<<grid, threads, bytes, stream>>>(a, args...);
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

/* Returns the block's tile. Several blocks compute a tile together; *number becomes the block's number among them. The
 * first blocks get the last tiles, because under a causal mask these take longest. */
DEVICE int shared_tile(const cuda_args &a, int blocks, int *number)
{
    const int n = (int)(gridDim.x - 1 - blockIdx.x);
    *number = n % blocks;
    return a.first_tile + n / blocks;
}

} // namespace

#endif
