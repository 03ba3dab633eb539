/* option_gradients.h: dbias and dalibi_slopes on tensor cores, for backwards with inputs of 16 bits and head dims up to
 * TILE_HEAD_DIM. The other backwards compute these gradients in simple/simple.cu. */
#ifndef ATTN_SM80_OPTION_GRADIENTS_H
#define ATTN_SM80_OPTION_GRADIENTS_H

#include "kernels/cuda/common/rows.cuh"

/* Returns the bytes of workspace that option_gradients() needs. */
size_t option_gradient_bytes(const attn_plan *plan);

/* Computes those of dbias, dalibi_slopes and dsinks that the problem requests. `s` has lse, rest and delta of all rows,
 * and out, which is given or recomputed. */
cudaError_t option_gradients(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a,
                             const saved &s, float *workspace);

#endif
