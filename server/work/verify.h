/* verify.h: numbers that are held against float64: the lse that a backward is given; and by the member `verify` some
 * rows of a forward's out, which are recomputed after the kernel, and the answer says how far it was off. That may be
 * slow, so it is bounded, and it is done in pieces on libuv's worker threads (sched/finish.h). */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/base/limits.h"
#include "server/work/job.h"

/* UNSUPPORTED when it is over the bounds, or not a forward whose out is sent back. *left is what the problems before it
 * in the same body leave of VERIFY_MAX_MULTIPLY_ADDS. */
attn_status verify_check(const proto_item *item, int64_t *left, attn_error *err);

/* The lse of a backward: INVALID where it cannot be that of the scores (attn_check_lse()). Before it runs; where only a
 * device can read q or k, rows are drawn, which that sums up (job->lse) and verify_found_lse() judges when it ran. */
attn_status verify_lse(struct job *job, int index, attn_error *err);
attn_status verify_found_lse(const struct job *job, attn_error *err);

#endif
