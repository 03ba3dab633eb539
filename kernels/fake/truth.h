/* truth.h: the truth (results in float64) that the fake device computes, with the loops of kernels/judge/compute.h.
 * Only test builds have it. */
#ifndef ATTN_FAKE_TRUTH_H
#define ATTN_FAKE_TRUTH_H

#include "kernels/tiles.h"

/* Computes the results of one of the problem's B * H heads, and stores them in the arrays of `to`, in the order of
 * attn_truth (kernels/attention.h). Head 0 must be computed first, because its call clears the results. Pointers are
 * host memory. Returns false if memory runs out. */
bool fake_truth_of_head(const attn_problem *p, int64_t head, const attn_truth *to);

/* fake_truth_rows() returns the number of rows of queries of all heads, or, if `keys` is true, of rows of keys.
 * fake_truth_row() returns the index, in the arrays of attn_truth, of the first row of a head of a sequence. */
int64_t fake_truth_rows(const attn_dims *d, bool keys);
int64_t fake_truth_row(const attn_dims *d, const attn_sequence *s, bool keys, int64_t b, int64_t h);

#endif
