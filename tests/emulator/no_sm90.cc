/* no_sm90.cc: stands in for the folder sm90 in builds for older chips, where its rows of the table of kernels are never
 * tried. */
#include <cuda.h>

#include "kernels/cuda/kernels.h"

extern "C" CUresult emu_cuTensorMapEncodeTiled()
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

static bool covers(const cuda_chip *, const attn_problem *)
{
    return false;
}
static size_t workspace(const cuda_chip *, const attn_problem *)
{
    return 0;
}
static cudaError_t run(const cuda_chip *, cudaStream_t, const attn_problem *, void *)
{
    return cudaErrorNotSupported;
}

extern const cuda_kernel sm90_f8_forward = { "sm90", ATTN_OP_FORWARD, 90, covers, workspace, run };
extern const cuda_kernel sm90_forward = { "sm90", ATTN_OP_FORWARD, 90, covers, workspace, run };
