/* verify.h: the member `verify`: some rows of a forward's out are recomputed in float64 after the kernel, and the
 * answer says how far it was off. It may be slow, so it is bounded, and it is done in pieces on libuv's worker threads
 * (sched/finish.h). */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/base/limits.h"
#include "server/work/job.h"

/* UNSUPPORTED when it is over the bounds, or not a forward whose out is sent back. *left is what the problems before it
 * in the same body leave of VERIFY_MAX_MULTIPLY_ADDS. */
attn_status verify_check(const proto_item *item, int64_t *left, attn_error *err);

#endif
