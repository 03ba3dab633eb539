#ifndef PTX_MAX
#define PTX_MAX
#include "kernels/cuda/common/args.cuh"
DEVICE float max_or_nan(float x, float y)
{
    return x != x || y != y ? NAN : fmaxf(x, y);
}
#endif
