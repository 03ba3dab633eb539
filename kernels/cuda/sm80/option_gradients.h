/* option_gradients.h: dbias and dalibi_slopes on tensor cores, for backwards with 16-bit inputs and head dims up to
 * TILE_HEAD_DIM. For other backwards, simple/simple.cu computes these gradients. */
#ifndef ATTN_SM80_OPTION_GRADIENTS_H
#define ATTN_SM80_OPTION_GRADIENTS_H

#include "kernels/cuda/common/rows.cuh"

/* Returns the bytes of workspace that option_gradients() needs. */
size_t option_gradient_bytes(const attn_plan *plan);

/* Computes those of dbias, dalibi_slopes and dsinks that the problem requests. `s` has, for each row, lse, rest (the
 * second part of a huge lse), delta and out. */
cudaError_t option_gradients(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a,
                             const saved &s, float *workspace);

#endif
