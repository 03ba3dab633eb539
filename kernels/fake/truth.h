/* truth.h: the truth (results in float64) that the fake device computes, with the loops of kernels/judge/compute.h.
 * Only test builds have it. */
#ifndef ATTN_FAKE_TRUTH_H
#define ATTN_FAKE_TRUTH_H

#include "kernels/tiles.h"

/* Computes the results of one of the problem's B * H heads, and stores them in the arrays of `to`, in the order of
 * attn_truth (kernels/attention.h). Head 0 must be computed first, because the call for head 0 clears the arrays. All
 * memory is on the host. Returns false if memory runs out. */
bool fake_truth_of_head(const attn_problem *p, int64_t head, const attn_truth *to);

/* The arrays out, lse and dq of attn_truth have one row per query and query head. The arrays dk and dv have one row per
 * key and key/value head; `keys` is true for these. fake_truth_rows() returns the number of rows of an array.
 * fake_truth_row() returns the index of the first row that belongs to head h of batch row b. */
int64_t fake_truth_rows(const attn_dims *d, bool keys);
int64_t fake_truth_row(const attn_dims *d, const attn_sequence *s, bool keys, int64_t b, int64_t h);

#endif
