/* observe.h: parts of an observe that all families of kernels share. */
#ifndef ATTN_CUDA_SIMPLE_OBSERVE_H
#define ATTN_CUDA_SIMPLE_OBSERVE_H

#include "kernels/cuda/common/kernels.h"

struct cuda_args;

/* What the first kernels leave of each row for the others. lse_at() gives the index of a row.
 *     P = exp2(z - base) * inverse                    z, base: by in_base_2()
 * base is INFINITY where P is 0, and NaN where all numbers of the row are NaN. */
struct observed_rows {
    float *base, *inverse, *most, *entropy;
    /* Rows that tiles cannot compute have a 1 in `strange`; *found is 1 if there is such a row. Both are NULL where
     * no tiles compute. */
    uint8_t *strange;
    int *found;
};

/* Computes the rows that tiles have marked as strange. A problem without such a row costs one short launch, or, where
 * the host looks for marked rows (chip->found), no launch. */
void simple_observe_rows_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* Adds the probabilities of strange rows to key_mass and map, and writes their weights. */
void simple_observe_sums_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* Computes max_logit and mean_entropy, where wanted, from the numbers of the rows. */
void simple_observe_heads(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream);

#endif
