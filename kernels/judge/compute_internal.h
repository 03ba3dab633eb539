/* compute_internal.h: functions that the compute*.c files share. compute.h has their public functions.
 *
 *   compute.c              memory, loading, the forward of a tile
 *   compute_numbers.c      roundings and products
 *   compute_scores.c       scores, dropout and softmax of a row
 *   compute_gradients.c    the backward of a tile */
#ifndef JUDGE_COMPUTE_INTERNAL_H
#define JUDGE_COMPUTE_INTERNAL_H

#include "kernels/judge/compute.h"

/* compute.c */

/* Returns the index in the sequence of the tile's row number `n`. */
int64_t compute_row_of(const variation *v, const struct compute_rows *rows, int64_t n);
/* Loads the tile's rows of q or dout, multiplied by `factor`. Rows past the sequence's length become 0. */
void compute_load_existing(struct compute *c, const variation *v, const struct compute_rows *rows,
                           const attn_view *view, int64_t column, double factor, int64_t columns, int64_t ld,
                           double *to);

/* compute_numbers.c */

/* Returns n rounded up to a multiple of PRODUCTS_WIDTH, and at least PRODUCTS_WIDTH. */
int64_t compute_padded(int64_t n);
/* Rounds `count` numbers of x to TF32, if the variation's mistake is that factors of products are rounded to TF32.
 * `of_values`: x are numbers of P or v, not of q or k. */
void compute_round_operand(const variation *v, bool of_values, double *x, int64_t count);
/* Computes C[rows, n] += A[rows, Sk] B[Sk, n], summed only over the keys c->lo to c->hi - 1. If an input is NaN or
 * infinite (c->strange), pairs of a query and a masked key are skipped. */
void compute_times_keys(const struct compute *c, int64_t rows, int64_t n, const double *A, const double *B, int64_t ldb,
                        double *C);
/* Computes C[Sk, n] += transpose(A[rows, Sk]) B[rows, n], but only rows c->lo to c->hi - 1 of C. Each row of C belongs
 * to a key. If an input is NaN or infinite (c->strange), pairs of a query and a masked key are skipped. */
void compute_add_to_keys(const struct compute *c, int64_t rows, int64_t n, const double *A, const double *B,
                         int64_t ldb, double *C);
/* Computes C += A B. Each sum is rounded to v->round_dtype after every v->tile terms. This imitates kernels that keep
 * their sums in this dtype. */
void compute_rounded_product(const struct compute *c, const variation *v, int64_t m, int64_t n, int64_t k,
                             const double *A, int64_t row, const double *B, int64_t ldb, double *C, int64_t ldc);

/* compute_scores.c */

/* Returns the range of keys that the causal mask and the window let query row i see. */
attn_range compute_keys_of(const struct compute *c, const variation *v, int64_t i);
/* Computes the softmax of row i from its scores, which are row r of c->z: the weights P, the largest score `top`, lse,
 * and `rest` = lse - top. */
void compute_softmax(struct compute *c, const variation *v, int64_t h, int64_t i, int64_t r);

#endif
