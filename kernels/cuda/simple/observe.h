/* observe.h: declarations for an observe (the operation that reports which keys the queries attend to) that all kernel
 * families share. */
#ifndef ATTN_CUDA_SIMPLE_OBSERVE_H
#define ATTN_CUDA_SIMPLE_OBSERVE_H

#include "kernels/cuda/common/kernels.h"

struct cuda_args;

/* Numbers of each row, at index lse_at(), that the first kernel of an observe stores for later kernels. A later kernel
 * computes P = exp2(z - base) * inverse, where z is a score in base 2 (in_base_2()). `base` is INFINITY if all P of the
 * row are 0, and NaN if all results of the row are NaN. */
struct observed_rows {
    float *base, *inverse, *most, *entropy;
    /* `strange` has one byte per row, which is 1 if tensor cores cannot compute the row; *found is 1 if there is such a
     * row. Both pointers are NULL if the kernels do not use tensor cores. */
    uint8_t *strange;
    int *found;
    /* *nonfinite is 1 if an element of key_mass, weights or map is not finite. If `nonfinite_sums` is true, this launch
     * computes only elements that are not finite. It omits the strange rows (rows that tensor cores cannot compute)
     * from their sums. */
    int *nonfinite;
    bool nonfinite_sums;
};

/* Computes strange rows (rows that tensor cores cannot compute, and that earlier kernels have marked). If there is no
 * strange row, this function costs one short launch, or none if the host has checked for marked rows (chip->found). */
void simple_observe_rows_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* The functions simple_observe_find_nonfinite() and simple_observe_nonfinite_sums() are for problems in which the
 * client gives lse. In these problems no kernel has looked for scores that tensor cores cannot compute. Such a score
 * makes an element of key_mass, weights or map NaN or infinite. simple_observe_find_nonfinite() looks for these
 * elements after tensor cores have computed the outputs. simple_observe_nonfinite_sums() then recomputes the elements
 * without the strange rows (rows that tensor cores cannot compute), whose sums are added later. Both functions need
 * rows.base and rows.inverse of all rows. */
void simple_observe_find_nonfinite(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream);
void simple_observe_nonfinite_sums(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream);

/* Adds the probabilities of strange rows (rows that tensor cores cannot compute) to key_mass and map, and writes the
 * weights of these rows. */
void simple_observe_sums_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                              cudaStream_t stream);

/* Computes the outputs max_logit and mean_entropy of each head, if requested, from the largest scores and the entropies
 * of the head's rows. */
void simple_observe_heads(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream);

#endif
