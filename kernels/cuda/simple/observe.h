/* observe.h: what all kernel families share for an observe (the operation that reports which keys the queries attend
 * to). */
#ifndef ATTN_CUDA_SIMPLE_OBSERVE_H
#define ATTN_CUDA_SIMPLE_OBSERVE_H

#include "kernels/cuda/common/kernels.h"

struct cuda_args;

/* The first kernel of an observe stores these numbers of each row for later kernels, at index lse_at(). From them a
 * later kernel computes P = exp2(z - base) * inverse, where z is a score in base 2 (in_base_2()). `base` is INFINITY
 * where P is 0, and NaN where all numbers of the row are NaN. */
struct observed_rows {
    float *base, *inverse, *most, *entropy;
    /* `strange` has one byte per row, which is 1 if tiles cannot compute the row; *found is 1 if there is such a row.
     * Both pointers are NULL where the kernels use no tiles. */
    uint8_t *strange;
    int *found;
    /* *nonfinite is 1 if an element of key_mass, weights or map is not finite. If `nonfinite_sums` is true, this launch
     * computes only elements that are not finite, and leaves out strange rows (those that tiles cannot compute). */
    int *nonfinite;
    bool nonfinite_sums;
};

/* Computes strange rows: rows that the kernels on tensor cores cannot compute, and have marked. Without a strange row
 * this function costs one short launch, or none if the host looks for marked rows (chip->found). */
void simple_observe_rows_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* The functions simple_observe_find_nonfinite() and simple_observe_nonfinite_sums() are for problems whose lse is
 * given. In these problems no kernel has looked for scores that tiles cannot compute. A score that tiles cannot compute
 * makes an element of key_mass, weights or map NaN or infinite. simple_observe_find_nonfinite() looks for these
 * elements after tiles have computed the outputs. simple_observe_nonfinite_sums() computes the elements again, before
 * the sums of strange rows (rows that tiles cannot compute) are added. Both functions need rows.base and rows.inverse
 * of all rows. */
void simple_observe_find_nonfinite(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream);
void simple_observe_nonfinite_sums(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream);

/* Adds the probabilities of strange rows (those that tiles cannot compute) to key_mass and map, and writes weights of
 * these rows. */
void simple_observe_sums_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* Computes the outputs max_logit and mean_entropy of each head, where wanted, from the largest scores and the entropies
 * of the head's rows. */
void simple_observe_heads(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream);

#endif
