/* observe.h: the passes of an observe (statistics of attention weights) that use wgmma. */
#ifndef ATTN_SM90_OBSERVE_H
#define ATTN_SM90_OBSERVE_H

#include "kernels/cuda/sm80/observe.h"

/* The number of rows of a block of sm90_rows_pass(). */
enum { SM90_OBSERVE_ROWS = 128 };

/* Functions that launch the passes of an observe (statistics of attention weights) over rows, and for key_mass.
 * observe.cu puts them into a struct observe_passes. */
cudaError_t sm90_rows_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                           const observed_parts &parts, int sums, cudaStream_t stream);
cudaError_t sm90_mass_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                           cudaStream_t stream);

#endif
