/* verify.h: two checks in float64. The first checks the lse of a backward before it runs. The second, for the member
 * `verify`, recomputes some rows of a forward's out after the kernel, and the answer reports their errors. This second
 * check may be slow, so it is bounded, and done in pieces on libuv's threads (sched/finish.h). */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/base/limits.h"
#include "server/work/job.h"

/* Checks that an item may be verified. UNSUPPORTED: its work exceeds the bounds, or the item is not a forward whose
 * answer contains out. *left is the part of VERIFY_MAX_MULTIPLY_ADDS that earlier problems of the body have left. */
attn_status verify_check(const proto_item *item, int64_t *left, attn_error *err);

/* Checks the lse of a backward before the backward runs. INVALID: the lse cannot belong to the scores
 * (attn_check_lse()). If only a device can read q or k, this function chooses rows (job->lse). The device sums them,
 * and verify_found_lse() judges the sums. */
attn_status verify_lse(struct job *job, int index, attn_error *err);
attn_status verify_found_lse(const struct job *job, attn_error *err);

#endif
