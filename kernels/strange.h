/* strange.h: estimates which share of a problem lies in strange rows: rows whose numbers exceed the range of float32.
 * Kernels compute such rows one by one. A strange row may take a hundred times as long as another row (cost.c). */
#ifndef ATTN_STRANGE_H
#define ATTN_STRANGE_H

#include "kernels/attention.h"

/* Shares of a problem's (query, key, head) triples that belong to strange rows (rows whose numbers exceed the range of
 * float32).
 *   cheap    rows that kernels compute nearly as fast as rows within range. Either all scores of the row equal one bias
 *            (from a mask that has the most negative number in place of -inf), or the scores are so large that kernels
 *            do not compute the row a second time
 *   costly   all other strange rows */
typedef struct attn_strange {
    double cheap, costly;
} attn_strange;

/* Limits that decide whether a row is strange (its numbers exceed the range of float32). A row is not strange if the
 * absolute value of its largest score (in a backward with a given lse: of its lse) is below `from`. If that value is
 * `cheap_from` or more, the row is cheap (computed nearly as fast as an ordinary row). Each of two things makes a row
 * costly (slow), however large its scores are:
 *
 *   bound_from  float32 only: the product of D, the scale, the largest |q| in the row's tile and the largest |k| of the
 *               row's keys reaches this bound; 0: no bound
 *   gradients   the row would be cheap by its scores, but dq of the backward exceeds the range of float32, because dq
 *               grows with the scale */
typedef struct attn_strange_limits {
    double from, cheap_from, bound_from;
    bool gradients;
} attn_strange_limits;

/* Estimates the shares of strange rows in a checked problem. For nearly all problems the largest elements of q, k and v
 * show that no row is strange. For other problems the shares are estimated from the scores of a few rows, which the
 * random number `draw` picks. A client that does not know `draw` cannot write a problem whose costly rows are never
 * picked.
 *
 * `readable`: the tensors (bits of attn_tensor_id) that this thread may read; rows that depend on other tensors count
 * as not strange. The call reads q, k and v once at most, at some 10 GB/s, and then computes for a few milliseconds. */
attn_strange attn_strange_of(const attn_problem *p, const attn_strange_limits *limits, uint64_t readable,
                             uint64_t draw);

#endif
