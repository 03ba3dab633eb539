/* observe.cu: an observe (statistics of attention weights) on Hopper GPUs, for problems without softcap, ALiBi, bias,
 * keep_mask and FlashMask. The passes for rows and key_mass use wgmma (observe_rows.cu, observe_mass.cu); all other
 * passes, and the order of the passes, are those of sm80/observe.cu. */
#include "kernels/cuda/sm90/layer/tma.cuh"
#include "kernels/cuda/sm90/layer/scheduler.cuh"
#include "kernels/cuda/sm90/observe/observe.h"

namespace {

const observe_passes PASSES = { SM90_OBSERVE_ROWS, 3, sm90_rows_pass, sm90_mass_pass };

bool plan_observe(const cuda_chip *chip, attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    if (e.rows_q <= 0 || e.rows_k <= 0 || d.B <= 0 || d.H <= 0 || e.rows_q >= FAR || e.rows_k >= FAR) return false;
    /* tiles are counted in 32 bits */
    if (e.B * d.H * (e.rows_k / 64 + d.B + 1) >= INT32_MAX) return false;
    return tma_walkable(g.view[ATTN_T_q], e.B, d.H, e.rows_q, d.D, 8) &&
           tma_walkable(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D, 8) && observe_plan(chip, plan, PASSES);
}

cudaError_t launch_observe(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    return observe_launch(chip, stream, plan, workspace, PASSES);
}

const uint64_t OBSERVED = ATTN_TENSOR_BIT(row_max) | ATTN_TENSOR_BIT(entropy) | ATTN_TENSOR_BIT(max_logit) |
                          ATTN_TENSOR_BIT(mean_entropy) | ATTN_TENSOR_BIT(key_mass) | ATTN_TENSOR_BIT(top_keys) |
                          ATTN_TENSOR_BIT(top_weights) | ATTN_TENSOR_BIT(weights) | ATTN_TENSOR_BIT(map);

} // namespace

extern const cuda_kernel sm90_observe = {
    { "sm90", ATTN_OP_OBSERVE, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), TILE_HEAD_DIM,
      BASIC_FEATURES | LENGTH_FEATURES | PADDING_FEATURES | OBSERVED },
    90,
    90,
    plan_observe,
    launch_observe,
};
