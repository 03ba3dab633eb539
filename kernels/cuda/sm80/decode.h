/* decode.h: declarations of decode.cu, and how other kernels use it. In a packed problem, a kernel for long sequences
 * runs first and skips sequences of few rows (cuda_chip::decode_rows), which decode.cu then computes.
 *
 * A kernel for long sequences therefore has a second entry in the table cuda_kernels[]. This entry has the same
 * features, except PADDING_FEATURES and, in "generic+decode", page_table. For example: { { "sm90+decode", ... }, 90,
 * 90, plan_with_decode<sm90_forward>, launch_with_decode<sm90_forward> } */
#ifndef ATTN_CUDA_DECODE_H
#define ATTN_CUDA_DECODE_H

#include "kernels/cuda/common/kernels.h"

enum { DECODE_ROWS = 64 };

bool decode_fits(const attn_geometry &g);
size_t decode_workspace(const attn_geometry &g); /* Returns the bytes of workspace that decode.cu needs, a multiple of
                                                  * 1024. */
cudaError_t decode_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace);

/* Computes the splits of decode.cu with TMA (sm90/decode/decode.cu). Returns false, and launches nothing, unless all of
 * these hold: the compute capability is 9.0, keys lie in pages of a multiple of 8 keys, strides are multiples of 16
 * bytes, and the driver can make tensor maps. The problem must have no options (softcap, bias, masks, ...), except
 * q_scale and k_scale with float8 keys. */
struct cuda_args;
struct decode_plan;
bool decode_by_engine(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a,
                      const decode_plan &p, int64_t blocks, cudaError_t *code);

/* Like decode_by_engine(), but for decode_wide.cu, and only for 16-bit keys. */
bool wide_decode_by_engine(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a,
                           const decode_plan &p, int64_t blocks, cudaError_t *code);

/* Returns whether this problem can be computed by the variant of decode.cu that keeps keys as float8 in shared memory.
 * Its results are correct for scales (scale, q_scale, k_scale) of any size (see load_permuted_queries()). */
static inline bool decode_has_float8_form(const attn_plan *plan)
{
    const uint64_t features = PLAIN_FEATURES | ATTN_TENSOR_BIT(q_scale) | ATTN_TENSOR_BIT(k_scale);
    return plan->problem->k.dtype == ATTN_F8E4M3 && !(plan->features & ~features);
}

template <const cuda_kernel &other> bool plan_with_decode(const cuda_chip *chip, attn_plan *plan)
{
    if (!plan->geometry.dims.packed || !other.plan(chip, plan) || !decode_fits(plan->geometry)) return false;
    plan->workspace_bytes += decode_workspace(plan->geometry);
    return true;
}

/* Launches the kernel `other`, then the kernels of decode.cu, whose memory is at the beginning of the workspace. */
template <const cuda_kernel &other>
cudaError_t launch_with_decode(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    cuda_chip without = *chip;
    without.decode_rows = DECODE_ROWS;
    const cudaError_t code = other.launch(&without, stream, plan, (char *)workspace + decode_workspace(plan->geometry));
    return code == cudaSuccess && is_last_share(chip) ? decode_launch(chip, stream, plan, workspace) : code;
}

#endif
