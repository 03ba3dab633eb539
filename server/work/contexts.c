/* contexts.c: the table of contexts (saved forwards), with at most CONTEXTS_MAX_COUNT entries, searched by id.
 *
 *   FREE --reserve--> RESERVED --fill--> READY --take--> TAKEN --finish(used)--> FREE
 *                         \--drop--> FREE   ^----finish(not used)---/
 *
 * A linear search over 16-byte keys costs a microsecond when the table is full. */
#include "server/work/contexts.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/base/caller.h"
#include "server/base/clock.h"

struct entry {
    enum context_state state;
    uint8_t key[16];
    struct job *job;
    int item;
    int64_t expires_ms;
};

struct contexts {
    pthread_mutex_t lock;
    int64_t limit_bytes, ttl_ms, bytes;
    int max_count, count;
    struct entry entries[];
};

struct contexts *contexts_new(int64_t limit_bytes, int max_count, int64_t ttl_ms)
{
    struct contexts *contexts = calloc(1, sizeof *contexts + (size_t)max_count * sizeof(struct entry));
    if (contexts == NULL) {
        fprintf(stderr, "attnd: out of memory for %d contexts\n", max_count);
        abort();
    }
    pthread_mutex_init(&contexts->lock, NULL);
    contexts->limit_bytes = limit_bytes;
    contexts->max_count = max_count;
    contexts->ttl_ms = ttl_ms;
    return contexts;
}

static bool parse_id(const char *id, uint8_t key[16])
{
    for (int i = 0; i < 32; i++) {
        const char *digits = "0123456789abcdef", *at = id[i] ? strchr(digits, id[i]) : NULL;
        if (at == NULL) return false;
        key[i / 2] = (uint8_t)(key[i / 2] << 4 | (at - digits));
    }
    return id[32] == '\0';
}

/* Returns the entry of the context (saved forward) with this id, or NULL. To be called with the lock held. */
static struct entry *find(struct contexts *contexts, const char *id)
{
    uint8_t key[16] = { 0 };
    if (!parse_id(id, key)) return NULL;
    for (int i = 0; i < contexts->max_count; i++)
        if (contexts->entries[i].state != CONTEXT_FREE && memcmp(contexts->entries[i].key, key, sizeof key) == 0)
            return &contexts->entries[i];
    return NULL;
}

/* Empties the entry of a context (saved forward). Returns the job to which the entry held a reference, or NULL. The
 * caller releases this reference without the lock. */
static struct job *empty(struct contexts *contexts, struct entry *entry)
{
    struct job *job = entry->job;
    const bool held = entry->state != CONTEXT_RESERVED;
    assert(entry->state != CONTEXT_FREE && job->context_count > 0);
    if (--job->context_count == 0) {
        contexts->bytes -= (int64_t)job->tensor_bytes;
        if (job->caller) job->caller->context_bytes -= (int64_t)job->tensor_bytes;
    }
    if (job->caller) job->caller->contexts--;
    contexts->count--;
    assert(contexts->count >= 0 && contexts->bytes >= 0 && (contexts->count > 0 || contexts->bytes == 0));
    assert(job->caller == NULL || (job->caller->contexts >= 0 && job->caller->context_bytes >= 0));
    *entry = (struct entry){ .state = CONTEXT_FREE };
    return held ? job : NULL;
}

void contexts_free(struct contexts *contexts)
{
    if (contexts == NULL) return;
    for (int i = 0; i < contexts->max_count; i++) {
        struct entry *entry = &contexts->entries[i];
        /* A context (saved forward) that is RESERVED or TAKEN would belong to a running request, but no request runs
         * any more. */
        assert(entry->state == CONTEXT_FREE || entry->state == CONTEXT_READY);
        if (entry->state == CONTEXT_READY) job_release(empty(contexts, entry));
    }
    assert(contexts->count == 0 && contexts->bytes == 0);
    pthread_mutex_destroy(&contexts->lock);
    free(contexts);
}

/* Checks that one more context (saved forward) of this job is within the limits. To be called with the lock held. */
static attn_status has_room(const struct contexts *contexts, const struct job *job, attn_error *err)
{
    const struct caller *caller = job->caller;
    const int64_t bytes = job->context_count == 0 ? (int64_t)job->tensor_bytes : 0;
    const int64_t own_bytes = caller_share(caller, contexts->limit_bytes);
    const int own_count = (int)caller_share(caller, contexts->max_count);
    if (bytes > own_bytes)
        return attn_fail(err, ATTN_TOO_LARGE, "/save",
                         "save: the request holds %lld bytes, saved contexts may hold %lld bytes%s", (long long)bytes,
                         (long long)own_bytes,
                         own_bytes < contexts->limit_bytes ? " for one token (--token-share)" : "");
    if (caller && own_bytes < contexts->limit_bytes &&
        (caller->context_bytes + bytes > own_bytes || caller->contexts >= own_count))
        return attn_fail(
            err, ATTN_QUOTA, "/save",
            "save: %lld bytes do not fit, this token's contexts hold %lld of %lld bytes and number %d of %d "
            "(--token-share)",
            (long long)bytes, (long long)caller->context_bytes, (long long)own_bytes, caller->contexts, own_count);
    if (contexts->bytes + bytes > contexts->limit_bytes || contexts->count >= contexts->max_count)
        return attn_fail(err, ATTN_BUSY, "/save",
                         "save: %lld bytes do not fit, saved contexts may hold %lld bytes and number %d",
                         (long long)bytes, (long long)contexts->limit_bytes, contexts->max_count);
    return ATTN_OK;
}

attn_status contexts_reserve(struct contexts *contexts, struct job *job, int item, attn_error *err)
{
    struct entry *entry = contexts->entries;
    uint8_t key[16];
    char *id = job->results[item].context;
    if (getrandom(key, sizeof key, 0) != (ssize_t)sizeof key)
        return attn_fail(err, ATTN_INTERNAL, "/save", "save: the system gave no random bytes");
    pthread_mutex_lock(&contexts->lock);
    const attn_status status = has_room(contexts, job, err);
    if (status == ATTN_OK) {
        /* there is a free entry, because count < max_count */
        while (entry->state != CONTEXT_FREE) entry++;
        assert(entry < contexts->entries + contexts->max_count);
        *entry = (struct entry){ .state = CONTEXT_RESERVED, .job = job, .item = item };
        memcpy(entry->key, key, sizeof key);
        if (job->context_count++ == 0) {
            contexts->bytes += (int64_t)job->tensor_bytes;
            if (job->caller) job->caller->context_bytes += (int64_t)job->tensor_bytes;
        }
        if (job->caller) job->caller->contexts++;
        contexts->count++;
    }
    pthread_mutex_unlock(&contexts->lock);
    for (int i = 0; status == ATTN_OK && i < 16; i++) snprintf(id + 2 * i, 3, "%02x", key[i]);
    return status;
}

void contexts_fill(struct contexts *contexts, const char *id, int64_t now_ms)
{
    pthread_mutex_lock(&contexts->lock);
    struct entry *entry = find(contexts, id);
    if (entry && entry->state == CONTEXT_RESERVED) {
        entry->state = CONTEXT_READY;
        job_hold(entry->job);
        entry->expires_ms = now_ms + contexts->ttl_ms;
    }
    pthread_mutex_unlock(&contexts->lock);
}

void contexts_drop(struct contexts *contexts, const char *id)
{
    struct job *job = NULL;
    pthread_mutex_lock(&contexts->lock);
    struct entry *entry = find(contexts, id);
    if (entry) job = empty(contexts, entry);
    pthread_mutex_unlock(&contexts->lock);
    job_release(job);
}

attn_status contexts_take(struct contexts *contexts, const struct caller *caller, const char *id, int64_t now_ms,
                          struct job **job, int *item, attn_error *err)
{
    attn_status status = ATTN_NOT_FOUND;
    pthread_mutex_lock(&contexts->lock);
    struct entry *entry = find(contexts, id);
    if (entry && entry->job->caller == caller) {
        if (entry->state == CONTEXT_READY && now_ms < entry->expires_ms) {
            entry->state = CONTEXT_TAKEN;
            *job = job_hold(entry->job);
            *item = entry->item;
            status = ATTN_OK;
        } else if (entry->state == CONTEXT_TAKEN) status = ATTN_IN_USE;
    }
    pthread_mutex_unlock(&contexts->lock);
    if (status == ATTN_NOT_FOUND) attn_fail(err, status, "/context", "context: unknown, expired or already used");
    if (status == ATTN_IN_USE)
        attn_fail(err, status, "/context",
                  "context: another backward uses it and is not answered yet; it can be used again only if that one "
                  "does not run");
    return status;
}

void contexts_finish(struct contexts *contexts, const char *id, bool used)
{
    struct job *job = NULL;
    pthread_mutex_lock(&contexts->lock);
    struct entry *entry = find(contexts, id);
    if (entry && entry->state == CONTEXT_TAKEN) {
        if (used) job = empty(contexts, entry);
        else entry->state = CONTEXT_READY;
    }
    pthread_mutex_unlock(&contexts->lock);
    job_release(job);
}

/* Removes READY contexts (saved forwards) that have expired, or whose account is_known() rejects. */
static void end_some(struct contexts *contexts, int64_t now_ms,
                     bool (*is_known)(void *context, const struct caller *caller), void *context)
{
    for (int i = 0; i < contexts->max_count; i++) {
        struct job *job = NULL;
        pthread_mutex_lock(&contexts->lock);
        struct entry *entry = &contexts->entries[i];
        if (entry->state == CONTEXT_READY &&
            (now_ms >= entry->expires_ms || (is_known && !is_known(context, entry->job->caller))))
            job = empty(contexts, entry);
        pthread_mutex_unlock(&contexts->lock);
        job_release(job);
    }
}

void contexts_expire(struct contexts *contexts, int64_t now_ms)
{
    end_some(contexts, now_ms, NULL, NULL);
}

void contexts_forget(struct contexts *contexts, int64_t now_ms,
                     bool (*is_known)(void *context, const struct caller *caller), void *context)
{
    end_some(contexts, now_ms, is_known, context);
}

int64_t contexts_bytes(struct contexts *contexts)
{
    pthread_mutex_lock(&contexts->lock);
    const int64_t bytes = contexts->bytes;
    pthread_mutex_unlock(&contexts->lock);
    return bytes;
}

void contexts_count(struct contexts *contexts, int counts[CONTEXT_STATE_COUNT])
{
    memset(counts, 0, CONTEXT_STATE_COUNT * sizeof counts[0]);
    pthread_mutex_lock(&contexts->lock);
    for (int i = 0; i < contexts->max_count; i++) counts[contexts->entries[i].state]++;
    pthread_mutex_unlock(&contexts->lock);
}

void contexts_fill_job(struct job *job)
{
    for (int i = 0; job->holds_contexts && i < job->call->count; i++)
        if (job->results[i].context[0] && job->call->items[i].error.status == ATTN_OK)
            contexts_fill(job->contexts, job->results[i].context, clock_ms());
}

void contexts_finish_job(struct job *job, bool answered)
{
    if (!job->holds_contexts) return;
    if (answered) contexts_fill_job(job);
    job->holds_contexts = false;
    for (int i = 0; i < job->call->count; i++) {
        proto_result *result = &job->results[i];
        const bool good = answered && job->call->items[i].error.status == ATTN_OK;
        if (job->saved && job->saved[i]) contexts_finish(job->contexts, job->call->items[i].context, good);
        if (good || result->context[0] == '\0') continue;
        contexts_drop(job->contexts, result->context);
        result->context[0] = '\0';
    }
}
