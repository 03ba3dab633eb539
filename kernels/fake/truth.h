/* truth.h: the truth (results in float64) that the fake device computes, with the loops of kernels/judge/compute.h.
 * Only test builds have it. */
#ifndef ATTN_FAKE_TRUTH_H
#define ATTN_FAKE_TRUTH_H

#include "kernels/tiles.h"

/* Computes the results of one head of the problem, of which there are B * H, and stores them in the arrays of `to`, in
 * the order of attn_truth (kernels/attention.h). Heads must be computed in order, because the first one clears the
 * results. Pointers are host memory. Returns false if memory runs out. */
bool fake_truth_of_head(const attn_problem *p, int64_t head, const attn_truth *to);

/* fake_truth_rows() returns the number of rows of queries of all heads, or, if `keys` is true, of rows of keys.
 * fake_truth_row() returns the index, in the arrays of attn_truth, of the first row of a head of a sequence. */
int64_t fake_truth_rows(const attn_dims *d, bool keys);
int64_t fake_truth_row(const attn_dims *d, const attn_sequence *s, bool keys, int64_t b, int64_t h);

#endif
