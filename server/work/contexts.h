/* contexts.h: contexts (saved forwards), each for one later backward. The forward's request has the member `save`, and
 * the backward's request names the `context`. Thread-safe.
 *
 * A context is an id of 128 random bits, an account, and a reference to the forward's job. The job's whole staging
 * memory stays in use and is charged to the account once, until the last of its contexts is gone. The first backward of
 * the same account that names a context takes it. If that backward did not run (it was refused or failed, or its client
 * left), the context can be taken again. */
#ifndef CONTEXTS_H
#define CONTEXTS_H

#include <stdint.h>

#include "server/base/limits.h"
#include "server/work/job.h"

/* The states of a context (saved forward): id, label in /metrics. A RESERVED one waits for its forward, a READY one can
 * be taken, and a TAKEN one is used by a backward. */
#define CONTEXT_STATE_MAP(X) X(RESERVED, "reserved") X(READY, "ready") X(TAKEN, "taken")

enum context_state {
    CONTEXT_FREE,
#define X(id, label) CONTEXT_##id,
    CONTEXT_STATE_MAP(X)
#undef X
        CONTEXT_STATE_COUNT
};

struct contexts;

/* Makes an empty table of contexts (saved forwards). Aborts when out of memory. */
struct contexts *contexts_new(int64_t limit_bytes, int max_count, int64_t ttl_ms);
void contexts_free(struct contexts *contexts);

/* Reserves room for a context (saved forward) of problem `item`, before the forward runs. The job's staging memory must
 * be leased already (job->tensor_bytes). The id is written into the item's result. Until contexts_fill() the context
 * cannot be taken. Errors: BUSY (no room), QUOTA (no room for this account), TOO_LARGE (more than an empty table has
 * room for). */
attn_status contexts_reserve(struct contexts *contexts, struct job *job, int item, attn_error *err);
/* Called when the forward of a context (saved forward) has run: the context now holds a reference to the job, and a
 * backward can take it. */
void contexts_fill(struct contexts *contexts, const char *id, int64_t now_ms);
/* Frees the entry of a context (saved forward) whose forward has failed. */
void contexts_drop(struct contexts *contexts, const char *id);

/* Takes a context (saved forward) for a backward. *job becomes a new reference to the job of the saved forward, and
 * *item the forward's index in that job. Until contexts_finish() it cannot be taken again. NOT_FOUND: the context is
 * unknown, another account's, expired, used, or not ready. IN_USE: a backward of this account uses it. */
attn_status contexts_take(struct contexts *contexts, const struct caller *caller, const char *id, int64_t now_ms,
                          struct job **job, int *item, attn_error *err);
/* Ends the use of a context (saved forward). If `used` is true, the backward ran, and the context is removed. Otherwise
 * the context can be taken again. */
void contexts_finish(struct contexts *contexts, const char *id, bool used);

void contexts_expire(struct contexts *contexts, int64_t now_ms);
/* Ends contexts (saved forwards) that have expired, or whose accounts is_known() rejects because their access tokens
 * were removed. Contexts in use stay. */
void contexts_forget(struct contexts *contexts, int64_t now_ms,
                     bool (*is_known)(void *context, const struct caller *caller), void *context);
/* bytes of staging memory (memory for tensors) that the contexts use */
int64_t contexts_bytes(struct contexts *contexts);
void contexts_count(struct contexts *contexts, int counts[CONTEXT_STATE_COUNT]);

/* Calls contexts_fill() for each context that the job has reserved for an item (problem) without an error. The job's
 * kernels must have run. */
void contexts_fill_job(struct job *job);
/* Ends the job's use of contexts (saved forwards), when the outcome is known. `answered` is true if the client will get
 * the results. In that case, for each problem without an error, the context that it used is deleted, and the context
 * that it made can be taken. In all other cases the contexts that were used can be taken again, and those that were
 * made are deleted. Further calls do nothing. */
void contexts_finish_job(struct job *job, bool answered);

#endif
