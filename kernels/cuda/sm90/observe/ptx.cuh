/* ptx.cuh: wrappers for the instructions that only the passes of an observe (statistics of attention weights) use, in
 * addition to sm90/layer/ptx.cuh. Section numbers are those of PTX ISA 9.0. */
#ifndef ATTN_SM90_OBSERVE_PTX_CUH
#define ATTN_SM90_OBSERVE_PTX_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"

/* Returns the larger of two numbers, or NaN if one of them is NaN. PTX ISA 9.7.3.12. */
DEVICE float max_or_nan(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

#endif
