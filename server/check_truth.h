/* check_truth.h: lets a GPU compute the truth (results in float64) for `attnd check`. */
#ifndef CHECK_TRUTH_H
#define CHECK_TRUTH_H

#include "proto-json/proto.h"

/* The truth of a check in host memory. check_truth_free() frees it. */
struct check_truth {
    attn_truth results;
    double *memory;
};

/* Computes the truth (exact results) of a check on a GPU, if judge_wants() asks for it. `devices` is "auto", "cpu"
 * or the number of a GPU. *computed becomes false where the judge must compute the truth itself: for a small
 * problem, for "cpu", and for "auto" if no GPU computes this truth. Errors: INVALID (there is no such GPU), or an
 * error of the GPU. */
attn_status check_truth_compute(const char *devices, const proto_item *item, struct check_truth *truth, bool *computed,
                                attn_error *err);
void check_truth_free(struct check_truth *truth);

#endif
