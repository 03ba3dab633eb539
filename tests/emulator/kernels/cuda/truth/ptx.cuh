/* ptx.cuh: replaces kernels/cuda/truth/ptx.cuh in emulator builds: the same function, carried out by the emulator. */
#ifndef ATTN_TRUTH_PTX_CUH
#define ATTN_TRUTH_PTX_CUH

#include "kernels/cuda/common/args.cuh"
#include "tests/emulator/sm80.h"

DEVICE void mma_f64(double (&c)[4], const double (&a)[8], const double (&b)[4])
{
    emu::mma_f64(c, a, b);
}

#endif
