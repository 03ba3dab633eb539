/* verify.h: two checks in float64. One checks the lse that a backward is given. The other, for the member `verify`,
 * recomputes some rows of a forward's out after the kernel, and the answer says how far they were off. It may be slow:
 * therefore it is bounded, and done in pieces on libuv's worker threads (sched/finish.h). */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/base/limits.h"
#include "server/work/job.h"

/* UNSUPPORTED when it is over the bounds, or not a forward whose out is sent back. *left is what the problems before it
 * in the same body leave of VERIFY_MAX_MULTIPLY_ADDS. */
attn_status verify_check(const proto_item *item, int64_t *left, attn_error *err);

/* Checks the lse of a backward before it runs: INVALID where it cannot belong to the scores (attn_check_lse()). Where
 * only a device can read q or k, this draws rows (job->lse), which the device sums and verify_found_lse() judges. */
attn_status verify_lse(struct job *job, int index, attn_error *err);
attn_status verify_found_lse(const struct job *job, attn_error *err);

#endif
