/* no_sm90.cc: replaces the folder kernels/cuda/sm90 in builds for older chips, for which the dispatcher never selects a
 * kernel of that folder. */
#include <cuda.h>

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/sm80/decode.h"

extern "C" CUresult emu_cuTensorMapEncodeTiled()
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

static bool plan(const cuda_chip *, attn_plan *)
{
    return false;
}
static cudaError_t launch(const cuda_chip *, cudaStream_t, const attn_plan *, void *)
{
    return cudaErrorNotSupported;
}

static constexpr cuda_kernel never = { { "sm90", ATTN_OP_FORWARD, 0, 0, 0 }, 90, 90, plan, launch };
extern const cuda_kernel sm90_backward = never;
extern const cuda_kernel sm90_backward_256 = never;
extern const cuda_kernel sm90_f8_forward = never;
extern const cuda_kernel sm90_forward = never;
extern const cuda_kernel sm90_latent_forward = never;
extern const cuda_kernel sm90_observe = never;
extern const cuda_kernel sm90_wide_backward = never;
extern const cuda_kernel sm90_wide_forward = never;
extern const cuda_kernel sm90_packed_forward = never;
extern const cuda_kernel sm90_packed_pairs_forward = never;
extern const cuda_kernel sm90_pairs_backward = never;
extern const cuda_kernel sm90_pairs_forward = never;

bool decode_by_engine(const cuda_chip *, cudaStream_t, const attn_plan *, const cuda_args &, const decode_plan &,
                      int64_t, cudaError_t *)
{
    return false;
}

bool wide_decode_by_engine(const cuda_chip *, cudaStream_t, const attn_plan *, const cuda_args &, const decode_plan &,
                           int64_t, cudaError_t *)
{
    return false;
}
