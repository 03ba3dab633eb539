/* observe.h: declarations that all kernel families share for an observe (which keys the queries attend to). */
#ifndef ATTN_CUDA_SIMPLE_OBSERVE_H
#define ATTN_CUDA_SIMPLE_OBSERVE_H

#include "kernels/cuda/common/kernels.h"

struct cuda_args;

/* Numbers of each row, at index lse_at(), that the first kernel of an observe stores for later kernels: P = exp2(z -
 * base) * inverse, where z is a score in base 2. `base` is INFINITY if all P of the row are 0, and NaN if all results
 * of the row are NaN. */
struct observed_rows {
    float *base, *inverse, *most, *entropy;
    /* `strange` has one byte per row, which is 1 if tensor cores cannot compute the row; *found is 1 if there is such a
     * row. Both are NULL for kernels without tensor cores. */
    uint8_t *strange;
    int *found;
    /* *nonfinite is 1 if an element of key_mass, weights or map is not finite. If nonfinite_sums is true, this launch
     * recomputes only the elements that are not finite. They become sums over all rows that are not strange (rows that
     * tensor cores can compute). */
    int *nonfinite;
    bool nonfinite_sums;
};

/* Computes strange rows (rows that tensor cores cannot compute). Without such rows this costs at most one short
 * launch. */
void simple_observe_rows_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* These functions are for problems with the client's lse. There, a score that tensor cores cannot compute makes
 * elements of key_mass, weights or map NaN or infinite. The first function finds such elements. The second recomputes
 * them without the strange rows (rows that tensor cores cannot compute), which simple_observe_sums_left() adds later.
 * Both need base and inverse of all rows. */
void simple_observe_find_nonfinite(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream);
void simple_observe_nonfinite_sums(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream);

/* Adds the probabilities of strange rows (rows that tensor cores cannot compute) to key_mass and map, and writes the
 * `weights` of these rows. */
void simple_observe_sums_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* Computes max_logit and mean_entropy of each head, if the problem requests them. */
void simple_observe_heads(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream);

#endif
