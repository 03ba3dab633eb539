/* contexts.h: what forwards left behind for one backward each (`save`, `context`). Bounded by bytes, count and
 * time, as a whole and for each caller. Thread-safe.
 *
 * A context is an id of 128 random bits, whose it is, and a reference to the forward's job, whose staging memory stays
 * leased: all of it, however small the part that the context needs. So that is what is charged, once for all contexts
 * of a job, until the last of them is gone.
 *
 * It is taken by the first backward of the same caller that names it. Whoever knows what became of that backward says
 * so (contexts_finish_job()): when it did not run (refused, failed, its client gone, its deadline over), the
 * context can be taken again. */
#ifndef CONTEXTS_H
#define CONTEXTS_H

#include <stdint.h>

#include "server/base/limits.h"
#include "server/work/job.h"

/* id, label in /metrics. A RESERVED context waits for its forward, a READY one can be taken, and a TAKEN one is in the
 * hands of a backward. contexts.c has the ways between the states. */
#define CONTEXT_STATE_MAP(X) X(RESERVED, "reserved") X(READY, "ready") X(TAKEN, "taken")

enum context_state {
    CONTEXT_FREE,
#define X(id, label) CONTEXT_##id,
    CONTEXT_STATE_MAP(X)
#undef X
        CONTEXT_STATE_COUNT
};

struct contexts;

struct contexts *contexts_new(int64_t limit_bytes, int max_count, int64_t ttl_ms); /* aborts when out of memory */
void contexts_free(struct contexts *contexts);

/* Makes room for item `item` of a forward before it runs, so that it is not computed in vain. Its memory must be leased
 * already (job->tensor_bytes). Writes the id into the item's result. Until contexts_fill() nobody finds it, and it
 * holds no reference. Errors: BUSY (no room), QUOTA (none for this caller), TOO_LARGE (there never is). */
attn_status contexts_reserve(struct contexts *contexts, struct job *job, int item, attn_error *err);
/* The forward is done: it can be taken from now on. Holds a reference to the job. */
void contexts_fill(struct contexts *contexts, const char *id, int64_t now_ms);
/* Forgets it, filled or not: the forward failed. */
void contexts_drop(struct contexts *contexts, const char *id);

/* Takes a filled one out: *job is a reference for the one who asks. The entry stays, invisible, until
 * contexts_finish(). Errors: NOT_FOUND (unknown, another caller's, expired, used, or not ready),
 * always with the same text; IN_USE (the same caller has taken it, and has not finished). */
attn_status contexts_take(struct contexts *contexts, const struct caller *caller, const char *id, int64_t now_ms,
                          struct job **job, int *item, attn_error *err);
/* The backward ran (used: it is gone) or did not (it can be taken again). */
void contexts_finish(struct contexts *contexts, const char *id, bool used);

void contexts_expire(struct contexts *contexts, int64_t now_ms);
/* And those of callers that is_known() does not know: nobody could use them. One that is being used stays. */
void contexts_forget(struct contexts *contexts, int64_t now_ms,
                     bool (*is_known)(void *context, const struct caller *caller), void *context);
int64_t contexts_bytes(struct contexts *contexts); /* staging memory that is leased because of them */
void contexts_count(struct contexts *contexts, int counts[CONTEXT_STATE_COUNT]); /* by state */

/* The contexts that the job makes, of each item without an error, can be taken and hold the job, whose kernels ran. */
void contexts_fill_job(struct job *job);
/* The end of the contexts that the job uses or makes, called by the owner of its request, who knows what became of it.
 * `answered`: the kernels ran and there is an answer that says so; of each item without an error, the context that it
 * used is gone and the one that it made can be taken. Otherwise what it used is given back and what it made, or would
 * have, is forgotten. Once is enough, further calls do nothing. */
void contexts_finish_job(struct job *job, bool answered);

#endif
