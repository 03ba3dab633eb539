/* verify.h: the member `verify`: some rows of a forward's out are recomputed in float64 after the kernel, and the
 * answer says how far it was off. It may be slow, so it is bounded, and it is done in pieces on libuv's worker threads
 * (sched/finish.h). */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/work/job.h"

/* What the problems of one body may ask for together: multiply-adds (rows and heads * Sk * (D + Dv), about a second); and
 * one of them: the K and V of one head as doubles. */
#define VERIFY_MAX_MULTIPLY_ADDS (INT64_C(1) << 30)
#define VERIFY_MAX_HEAD_ELEMENTS (INT64_C(1) << 24)

/* UNSUPPORTED when it is over the bounds, or not a forward whose out is sent back. *left is what the problems before it in
 * the same body leave of VERIFY_MAX_MULTIPLY_ADDS. */
attn_status verify_check(const proto_item *item, int64_t *left, attn_error *err);

#endif
