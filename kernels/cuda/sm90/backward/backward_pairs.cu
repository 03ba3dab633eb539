/* backward_pairs.cu: tile shapes of the Hopper backward up to head size 128, for problems with bias, keep_mask or
 * dropout (pairs.cuh). The kernel is in backward_tiles.cuh. */
#include "kernels/cuda/sm90/backward/backward_tiles.cuh"

namespace {

const shape_row pair_shapes[] = {
    row<shape<64, 128, WITHOUT_BIAS>>(),
    row<shape<128, 64, WITHOUT_BIAS>>(),
    row<shape<64, 128, WITH_BIAS>>(),
    row<shape<128, 64, WITH_BIAS>>(),
};

const uint64_t PAIRS = ATTN_TENSOR_BIT(bias) | ATTN_TENSOR_BIT(keep_mask) | ATTN_OPTION_BIT(KEEP_MASK_AT_END) |
                       ATTN_OPTION_BIT(DROPOUT);

bool plan_pairs(const cuda_chip *chip, attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_dims &d = plan->geometry.dims;
    if (plan->features & PADDING_FEATURES) return false;
    /* softcap is applied to q.k before the bias is added, but these kernels' products add q.k to the bias */
    if (p->bias.rank && p->softcap > 0) return false;
    if (p->keep_mask.rank && (d.B * d.H > 65535 || attn_tiles(d.Sk, KIND_KEYS) > 65535)) return false;
    return plan_tiles(chip, plan);
}

cudaError_t launch_pairs(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    return launch_tiles(chip, stream, plan, memory, pair_shapes, plan->problem->bias.rank ? WITH_BIAS : WITHOUT_BIAS);
}

} // namespace

extern const cuda_kernel sm90_pairs_backward = {
    { "sm90", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), 128,
      FEATURES | OPTIONS | PAIRS | ATTN_TENSOR_BIT(dalibi_slopes) | ATTN_TENSOR_BIT(dbias) },
    90,
    90,
    plan_pairs,
    launch_pairs,
};
