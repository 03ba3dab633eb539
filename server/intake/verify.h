/* verify.h: two checks in float64. One checks the lse of a backward. The other, for the member `verify`, recomputes
 * some rows of a forward's out after the kernel, and the answer reports their errors. It may be slow, so it is
 * bounded, and done in pieces on libuv's threads (sched/finish.h). */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/base/limits.h"
#include "server/work/job.h"

/* Checks that an item may be verified. UNSUPPORTED: its work exceeds the bounds, or it is no forward whose out is sent
 * back. *left is what the body's earlier problems have left of VERIFY_MAX_MULTIPLY_ADDS. */
attn_status verify_check(const proto_item *item, int64_t *left, attn_error *err);

/* Checks the lse of a backward before it runs. INVALID: it cannot belong to the scores (attn_check_lse()). If only a
 * device can read q or k, it draws rows (job->lse); the device sums them and verify_found_lse() judges the sums. */
attn_status verify_lse(struct job *job, int index, attn_error *err);
attn_status verify_found_lse(const struct job *job, attn_error *err);

#endif
