/* strange.h: how much of a problem lies in rows that leave what float32 holds. Kernels compute such rows one by one,
 * which may cost a hundred times as much (cost.c). */
#ifndef ATTN_STRANGE_H
#define ATTN_STRANGE_H

#include "kernels/attention.h"

/* Shares of a problem's (query, key, head) triples. `alike`: in rows whose scores are all the same bias, as those of a
 * mask that has the most negative number in place of -inf. */
typedef struct attn_strange {
    double alike, other;
} attn_strange;

/* Of a checked problem whose rows are ordinary where their largest score is below `most` in size; in a backward that is
 * given lse: where their lse is. First by the largest numbers of q, k and v. They say of nearly all problems that no
 * row can be strange. Where they do not, by the scores of a few rows that `draw` picks. The shares are estimates,
 * then. A client that does not know `draw` cannot write a problem whose costly rows are never picked.
 *
 * `readable`: the tensors (bits of attn_tensor_id) that this thread may read; the others count as ordinary. It reads q,
 * k and v once at most, at some 10 GB/s, and then some milliseconds of multiply-adds. */
attn_strange attn_strange_of(const attn_problem *p, double most, uint64_t readable, uint64_t draw);

#endif
