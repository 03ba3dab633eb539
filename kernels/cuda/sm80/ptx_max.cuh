#ifndef PTX_MAX
#define PTX_MAX
#include "kernels/cuda/common/args.cuh"
/* The larger of two numbers; NaN if one of them is NaN. 9.7.3.12. */
DEVICE float max_or_nan(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
#endif
