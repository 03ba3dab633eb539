/* check_truth.h: lets a GPU compute the exact results, in float64, for `attnd check`. */
#ifndef CHECK_TRUTH_H
#define CHECK_TRUTH_H

#include "proto-json/proto.h"

struct check_truth {
    attn_truth results;
    double *memory;
};

/* Computes the exact results for a check on a GPU. `devices` is "auto", "cpu" or the number of a GPU. *computed becomes
 * false if the CPU must compute them later: for small problems, for "cpu", and for "auto" without a GPU that can
 * compute them. Errors: INVALID (no such GPU), or an error of the GPU. */
attn_status check_truth_compute(const char *devices, const proto_item *item, struct check_truth *truth, bool *computed,
                                attn_error *err);
void check_truth_free(struct check_truth *truth);

#endif
