/* check_truth.h: lets a GPU compute the truth for `attnd check`: the exact results, in float64, with which the results
 * in the file are compared. */
#ifndef CHECK_TRUTH_H
#define CHECK_TRUTH_H

#include "proto-json/proto.h"

/* The exact results for a check, in host memory. check_truth_free() frees them. */
struct check_truth {
    attn_truth results;
    double *memory;
};

/* Computes the exact results for a check on a GPU, if judge_wants() asks for them. `devices` is "auto", "cpu" or the
 * number of a GPU. *computed becomes false if the CPU must compute the exact results later. This is so for small
 * problems, for "cpu", and for "auto" if no GPU can compute the results. Errors: INVALID (there is no such GPU), or an
 * error of the GPU. */
attn_status check_truth_compute(const char *devices, const proto_item *item, struct check_truth *truth, bool *computed,
                                attn_error *err);
void check_truth_free(struct check_truth *truth);

#endif
