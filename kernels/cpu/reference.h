/* reference.h: computes one problem by the textbook loops of reference.c. Two backends use it: "reference", and
 * "cpu" for its kernel "double". */
#ifndef ATTN_CPU_REFERENCE_H
#define ATTN_CPU_REFERENCE_H

#include "kernels/cpu/pool.h"

/* Computes the problem and returns when it is done. The pool's threads share the key/value heads; if `pool` is NULL,
 * the calling thread computes all heads. A gradient that is a sum over heads or sequences is summed in one order on one
 * thread, so the bits do not depend on the number of threads. reference_run() allocates memory for each thread: 8 bytes
 * for every number of k and v of one head (16 in a backward), and 8 bytes for every number of the summed gradients.
 * Errors: NO_MEMORY; CANCELLED if *cancel was set. The function reads *cancel before each row; `cancel` may be NULL. */
attn_status reference_run(const attn_problem *p, struct pool *pool, const int *cancel, attn_error *err);

#endif
