/* ptx.cuh: replaces kernels/cuda/sm90/observe/ptx.cuh in emulator builds: the same functions and arguments, carried out
 * by the emulator. The include path finds this file first. */
#ifndef ATTN_SM90_OBSERVE_PTX_CUH
#define ATTN_SM90_OBSERVE_PTX_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"

DEVICE float max_or_nan(float x, float y)
{
    return x != x || y != y ? NAN : fmaxf(x, y);
}

#endif
