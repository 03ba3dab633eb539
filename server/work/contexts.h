/* contexts.h: what forwards left behind for one backward each (`save`, `context`). Bounded by bytes, count and
 * time. Thread-safe.
 *
 * A context is an id of 128 random bits and a reference to the forward's job, whose staging memory stays leased. It
 * is taken by the first backward that names it; when that backward never ran (a full queue, a deadline), it is put
 * back. */
#ifndef CONTEXTS_H
#define CONTEXTS_H

#include <stdint.h>

#include "server/work/job.h"

enum {
    CONTEXTS_MAX_COUNT = 1024,
    CONTEXTS_TTL_MS = 300000,
    CONTEXTS_SHARE = 4, /* they may hold a quarter of the staging memory */
};

struct contexts;

struct contexts *contexts_new(int64_t limit_bytes, int max_count, int64_t ttl_ms); /* aborts when out of memory */
void contexts_free(struct contexts *contexts);

/* Makes room for a forward's result before it runs, so that it is not computed in vain. `bytes` is what the context
 * pins. Fills `id`. Until contexts_fill() nobody finds it. Errors: BUSY (no room). */
attn_status contexts_reserve(struct contexts *contexts, int64_t bytes, char id[PROTO_CONTEXT_BYTES], attn_error *err);
/* The forward is done: item `item` of `job` can be taken from now on. Holds a reference to the job. */
void contexts_fill(struct contexts *contexts, const char *id, struct job *job, int item, int64_t now_ms);
/* Forgets it, filled or not: the forward failed. */
void contexts_drop(struct contexts *contexts, const char *id);

/* Takes a filled one out: *job is the caller's reference. The entry stays, invisible, until contexts_finish(). Errors:
 * NOT_FOUND (unknown, expired, used, or not ready), always with the same text. */
attn_status contexts_take(struct contexts *contexts, const char *id, int64_t now_ms, struct job **job, int *item,
                          attn_error *err);
/* The backward ran (used: it is gone) or never did (it can be taken again). */
void contexts_finish(struct contexts *contexts, const char *id, bool used);

void contexts_expire(struct contexts *contexts, int64_t now_ms);
int64_t contexts_bytes(struct contexts *contexts);
int contexts_count(struct contexts *contexts);

#endif
