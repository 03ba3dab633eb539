/* plain.h: the computation of the device "paper", which plain.c makes. */
#ifndef ATTN_CPU_PLAIN_H
#define ATTN_CPU_PLAIN_H

#include "kernels/attention.h"

/* Computes a problem whose features the device's rows name, on the calling thread, by the two algorithms of paper.c.
 * Errors: NO_MEMORY; CANCELLED when *cancel was set. It is read for each block of rows; `cancel` may be NULL. */
attn_status paper_run(const attn_problem *p, const int *cancel, attn_error *err);

#endif
