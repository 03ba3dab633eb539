/* plain.h: what plain.c makes a device of, besides the reference. */
#ifndef ATTN_CPU_PLAIN_H
#define ATTN_CPU_PLAIN_H

#include "kernels/attention.h"

/* Computes a problem whose features the device's rows name, on the calling thread, by the two algorithms of paper.c.
 * Errors: NO_MEMORY; CANCELLED when *cancel (may be NULL) was set, which is looked at for each block of rows. */
attn_status paper_run(const attn_problem *p, const int *cancel, attn_error *err);

#endif
