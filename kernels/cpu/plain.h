/* plain.h: declares paper_run(), which computes problems for the device "paper". plain.c makes that device. */
#ifndef ATTN_CPU_PLAIN_H
#define ATTN_CPU_PLAIN_H

#include "kernels/attention.h"

/* Computes a problem on the calling thread, by the two algorithms of paper.c. The problem may have only features in
 * PAPER_FEATURES (plain.c). Errors: NO_MEMORY; CANCELLED when *cancel was set. The function reads *cancel before each
 * block of rows; `cancel` may be NULL. */
attn_status paper_run(const attn_problem *p, const int *cancel, attn_error *err);

#endif
