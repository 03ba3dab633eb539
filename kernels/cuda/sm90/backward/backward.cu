/* backward.cu: tile shapes of the Hopper backward up to head size 128, for problems without bias, keep_mask and
 * dropout. The kernel is in backward_tiles.cuh. */
#include "kernels/cuda/sm90/backward/backward_tiles.cuh"

namespace {

const shape_row shapes[] = {
    row<shape<64, 128, PLAIN>>(),  row<shape<128, 64, PLAIN>>(),        row<shape<64, 128, CAPPED>>(),
    row<shape<128, 64, CAPPED>>(), row<shape<64, 128, WITH_OPTIONS>>(), row<shape<128, 64, WITH_OPTIONS>>(),
};

bool plan_backward(const cuda_chip *chip, attn_plan *plan)
{
    const uint64_t options = plan->features & OPTIONS;
    if ((options & ~ATTN_OPTION_BIT(SOFTCAP)) && (plan->features & PADDING_FEATURES)) return false;
    return plan_tiles(chip, plan);
}

cudaError_t launch_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const uint64_t options = plan->features & OPTIONS;
    return launch_tiles(chip, stream, plan, memory, shapes,
                        !options                              ? PLAIN
                        : options == ATTN_OPTION_BIT(SOFTCAP) ? CAPPED
                                                              : WITH_OPTIONS);
}

} // namespace

extern const cuda_kernel sm90_backward = {
    { "sm90", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), 128,
      FEATURES | OPTIONS | ATTN_TENSOR_BIT(dalibi_slopes) },
    90,
    90,
    plan_backward,
    launch_backward,
};
