/* verify.h: the member `verify`: some rows of a forward's out are recomputed in float64 after the kernel, and the
 * answer says how far it was off. It may be slow, so it is bounded, and it runs on libuv's worker threads. */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/work/job.h"

/* What one problem may ask for: multiply-adds (rows * Sk * (D + Dv), about a second), and the K and V of one head as
 * doubles. */
#define VERIFY_MAX_MULTIPLY_ADDS (INT64_C(1) << 30)
#define VERIFY_MAX_HEAD_ELEMENTS (INT64_C(1) << 24)

/* UNSUPPORTED when it is over the bounds, or not a forward whose out is sent back. */
attn_status verify_check(const proto_item *item, attn_error *err);

/* All items of the job that ask for it; results go to job->results. An item that cannot be verified after all gets
 * an error.
 * */
void verify_job(struct job *job);

#endif
