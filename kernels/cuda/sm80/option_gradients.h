/* option_gradients.h: dbias and dalibi_slopes on tensor cores, for 16-bit inputs. For float32, simple/simple.cu
 * computes them. */
#ifndef ATTN_SM80_OPTION_GRADIENTS_H
#define ATTN_SM80_OPTION_GRADIENTS_H

#include "kernels/cuda/common/rows.cuh"

size_t option_gradient_bytes(const attn_plan *plan);

/* Computes dbias, dalibi_slopes and dsinks, if the problem requests them, from lse, rest, delta and out in `s`. */
cudaError_t option_gradients(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const cuda_args &a,
                             const saved &s, float *workspace);

#endif
