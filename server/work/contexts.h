/* contexts.h: contexts. A context is a saved forward, for one later backward. The forward's request has the member
 * `save`, and the backward's request names the `context`. Saved forwards are limited in bytes, number and time, in
 * total and for each account. Thread-safe.
 *
 * A context is an id of 128 random bits, an account, and a reference to the forward's job. The job's block of staging
 * memory stays in use (leased) as a whole, even if the context needs a small part of it. So the whole memory is charged
 * to the account, once for all contexts of a job, until the last of them is gone.
 *
 * The first backward of the same account that names a context takes it. The owner of that backward's request reports
 * the outcome with contexts_finish_job(). If the backward did not run (it was refused, it failed, its client left, its
 * deadline passed), the context can be taken again. */
#ifndef CONTEXTS_H
#define CONTEXTS_H

#include <stdint.h>

#include "server/base/limits.h"
#include "server/work/job.h"

/* The states of a context (a saved forward). Each row: id, label in /metrics. A RESERVED context waits for its forward,
 * a READY one can be taken, and a TAKEN one is used by a backward. contexts.c shows how the states change. */
#define CONTEXT_STATE_MAP(X) X(RESERVED, "reserved") X(READY, "ready") X(TAKEN, "taken")

enum context_state {
    CONTEXT_FREE,
#define X(id, label) CONTEXT_##id,
    CONTEXT_STATE_MAP(X)
#undef X
        CONTEXT_STATE_COUNT
};

struct contexts;

/* makes an empty table of contexts (saved forwards); aborts when out of memory */
struct contexts *contexts_new(int64_t limit_bytes, int max_count, int64_t ttl_ms);
void contexts_free(struct contexts *contexts);

/* Reserves room for a context (saved forward) of problem `item`. Call this before the forward runs: without room it
 * need not run. The job's staging memory must already be leased (job->tensor_bytes). The context's id is written into
 * the item's result. Until contexts_fill() the context cannot be taken and holds no reference. Errors: BUSY (no room),
 * QUOTA (no room for this account), TOO_LARGE (more than even an empty table has room for). */
attn_status contexts_reserve(struct contexts *contexts, struct job *job, int item, attn_error *err);
/* Call this when the forward of the context has run. From now on the context holds a reference to the job, and a
 * backward can take the context. */
void contexts_fill(struct contexts *contexts, const char *id, int64_t now_ms);
/* Call this if the forward of a context has failed. Frees the context's entry, filled or not. */
void contexts_drop(struct contexts *contexts, const char *id);

/* Takes a context (saved forward) for a backward. *job becomes a new reference to the job of the saved forward, and
 * *item the forward's index in that job. Until contexts_finish() the entry stays in the table and cannot be taken
 * again. NOT_FOUND: the context is unknown, another account's, expired, used, or not ready (the text is the same for
 * all). IN_USE: a backward of this account uses it now. */
attn_status contexts_take(struct contexts *contexts, const struct caller *caller, const char *id, int64_t now_ms,
                          struct job **job, int *item, attn_error *err);
/* Ends the use of a context (saved forward) by a backward. `used`: the backward ran, and the context is removed.
 * Otherwise the context can be taken again. */
void contexts_finish(struct contexts *contexts, const char *id, bool used);

void contexts_expire(struct contexts *contexts, int64_t now_ms);
/* Ends contexts (saved forwards) that have expired, or that belong to accounts which is_known() rejects (their access
 * tokens were removed). A context that a backward is using stays. */
void contexts_forget(struct contexts *contexts, int64_t now_ms,
                     bool (*is_known)(void *context, const struct caller *caller), void *context);
/* returns how many bytes of staging memory (memory for tensors) the contexts use */
int64_t contexts_bytes(struct contexts *contexts);
/* writes how many contexts (saved forwards) are in each state */
void contexts_count(struct contexts *contexts, int counts[CONTEXT_STATE_COUNT]);

/* Calls contexts_fill() for the contexts (saved forwards) that the job makes, for all items (problems) that succeeded.
 * Each of these contexts then holds a reference to the job. The job's kernels must have run. */
void contexts_fill_job(struct job *job);
/* Ends the job's use of contexts (saved forwards). The owner of the job's request calls this when the outcome is known.
 * `answered`: the kernels ran, and the client will get the results. For each problem without an error, the context that
 * it used is then deleted, and the context that it made can be taken. If `answered` is false, the contexts that the job
 * used can be taken again, and those that it made are deleted. Further calls do nothing. */
void contexts_finish_job(struct job *job, bool answered);

#endif
