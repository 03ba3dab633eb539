/* strange.h: how much of a problem lies in strange rows, whose numbers exceed the range of float32. Kernels compute
 * such rows one by one, which may cost a hundred times as much as other rows (cost.c). */
#ifndef ATTN_STRANGE_H
#define ATTN_STRANGE_H

#include "kernels/attention.h"

/* Shares of a problem's (query, key, head) triples that lie in strange rows.
 *   cheap    kernels compute these rows nearly as fast as rows within range: all their scores are the same bias (a mask
 *            that has the most negative number in place of -inf), or so large that they need no repair
 *   costly   all other such rows */
typedef struct attn_strange {
    double cheap, costly;
} attn_strange;

/* A row is not strange where the size of its largest score is below `from`; in a backward with a given lse, the size of
 * lse counts instead. From `cheap_from` on a row is cheap. Two things make a row costly whatever the size of its
 * scores:
 *
 *   bound_from  the product of the largest number of q near it, that of its keys, D and the scale reaches this bound,
 *               whatever the scores are. It concerns float32 alone; 0: no bound
 *   gradients   its scores are cheap, but the backward's dq exceeds the range of float32, because dq is a multiple of
 *               the scale */
typedef struct attn_strange_limits {
    double from, cheap_from, bound_from;
    bool gradients;
} attn_strange_limits;

/* The shares of a checked problem. For nearly all problems the largest numbers of q, k and v show that no row is
 * strange. For the others the shares are estimated from the scores of a few rows, which `draw` picks. A client that
 * does not know `draw` cannot write a problem whose costly rows are never picked.
 *
 * `readable`: the tensors (bits of attn_tensor_id) that this thread may read; the rows of others count as not strange.
 * The call reads q, k and v once at most, at some 10 GB/s, and then computes for a few milliseconds. */
attn_strange attn_strange_of(const attn_problem *p, const attn_strange_limits *limits, uint64_t readable,
                             uint64_t draw);

#endif
