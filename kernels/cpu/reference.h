/* reference.h: one problem by the textbook loops of reference.c, for the backends that offer them as a kernel,
 * "double". */
#ifndef ATTN_CPU_REFERENCE_H
#define ATTN_CPU_REFERENCE_H

#include "kernels/cpu/pool.h"

/* Computes the problem; returns when all is done. Key/value heads are shared out over the pool's threads (NULL: the
 * calling thread does all), but where a gradient is a sum over heads or sequences, which is taken in one order on one
 * thread. So the bits are the same on any number of threads. Each thread needs 8 bytes for every number of k and v of
 * one head, twice that in a backward, and the sums as doubles; they are allocated here. Errors: NO_MEMORY; CANCELLED
 * when *cancel (may be NULL) was set, which is looked at before each row. */
attn_status reference_run(const attn_problem *p, struct pool *pool, const int *cancel, attn_error *err);

#endif
