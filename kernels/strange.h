/* strange.h: how much of a problem lies in rows that leave what float32 holds. Kernels compute such rows one by one,
 * which may cost a hundred times as much (cost.c). */
#ifndef ATTN_STRANGE_H
#define ATTN_STRANGE_H

#include "kernels/attention.h"

/* Shares of a problem's (query, key, head) triples in such rows.
 *   cheap    kernels compute these nearly as others: all scores are the same bias, as in rows of a mask that has the
 *            most negative number in place of -inf; or they are so large that no repair is needed
 *   costly   the others */
typedef struct attn_strange {
    double cheap, costly;
} attn_strange;

/* A row is ordinary where its largest score is below `from` in size; in a backward that is given lse: where that is.
 * From `cheap_from` on it is cheap. Two things make a row costly all the same:
 *   bound_from  the largest number of q near it, that of its keys, D and the scale multiply to so much, whatever its
 *               scores are; in float32 alone. 0: no matter
 *   gradients   its scores are cheap, but the backward's dq leaves float32, for it is a multiple of the scale */
typedef struct attn_strange_limits {
    double from, cheap_from, bound_from;
    bool gradients;
} attn_strange_limits;

/* Of a checked problem. First by the largest numbers of q, k and v. They say of nearly all problems that no row can be
 * strange. Where they do not, by the scores of a few rows that `draw` picks. The shares are estimates, then. A client
 * that does not know `draw` cannot write a problem whose costly rows are never picked.
 *
 * `readable`: the tensors (bits of attn_tensor_id) that this thread may read; the others count as ordinary. It reads q,
 * k and v once at most, at some 10 GB/s, and then some milliseconds of multiply-adds. */
attn_strange attn_strange_of(const attn_problem *p, const attn_strange_limits *limits, uint64_t readable,
                             uint64_t draw);

#endif
