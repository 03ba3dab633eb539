/* steps.h: requests whose keys and values are in caches (decode, append): from a decoded body to a step (caches.h) and
 * the problem that a device computes, and to the step's end.
 *
 *   step_prepare()  whoever prepares the job      the caches are looked at, the problem is completed and checked
 *   step_begin()    loop, as often as it says     the tables lie in staging memory, the problem points at them
 *   step_end()      loop, when the device is done commit or not; also when nobody waits for it any more
 *                   or both: the HTTP thread that runs it (device/inline.c), where no other step waits
 *   step_free()     with the job */
#ifndef STEPS_H
#define STEPS_H

#include "server/work/job.h"

/* For a call with one item without error. `ids` of an append: the cache that its path names. */
attn_status step_prepare(struct job *job, attn_error *err);
/* See caches_begin(). */
attn_status step_begin(struct job *job, uint64_t scan, bool *wait, attn_error *err);
void step_end(struct job *job, bool commit);
/* step_begin() made the step begin, and step_end() was not called since. False for a job without a step. */
bool step_has_begun(const struct job *job);
/* Its keys and values are in the caches: from then on no error may be answered, which would say that they are not. */
bool step_is_committed(const struct job *job);
void step_free(struct job *job); /* a job without a step is fine */

/* Of keys and values that a device reads for it, as long as the caches are now; of forks those of each. */
int64_t step_bytes(const struct job *job);

/* What the device does before it computes. Returns how many. */
int64_t step_moves(const struct job *job, const attn_move **moves);

#endif
