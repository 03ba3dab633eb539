/* contexts.c: a table of at most CONTEXTS_MAX_COUNT entries, searched by id.
 *
 *   FREE --reserve--> RESERVED --fill--> READY --take--> TAKEN --finish(used)--> FREE
 *                         \--drop--> FREE   ^----finish(not used)---/
 *
 * Ids are random and the table is small: a linear search over 16-byte keys costs a microsecond when it is full.
 * Invariant: `bytes` is the sum over all entries that are not FREE, and an entry holds a reference exactly in READY and
 * TAKEN. */
#include "server/work/contexts.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum state { FREE, RESERVED, READY, TAKEN };

struct entry {
    enum state state;
    uint8_t key[16];
    struct job *job;
    int item;
    int64_t bytes, expires_ms;
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

void contexts_free(struct contexts *contexts)
{
    if (contexts == NULL) return;
    for (int i = 0; i < contexts->max_count; i++) job_release(contexts->entries[i].job);
    pthread_mutex_destroy(&contexts->lock);
    free(contexts);
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

/* The entry of this id, in any state but FREE; NULL where there is none. Call with the lock held. */
static struct entry *find(struct contexts *contexts, const char *id)
{
    uint8_t key[16] = { 0 };
    if (!parse_id(id, key)) return NULL;
    for (int i = 0; i < contexts->max_count; i++)
        if (contexts->entries[i].state != FREE && memcmp(contexts->entries[i].key, key, sizeof key) == 0)
            return &contexts->entries[i];
    return NULL;
}

/* Empties the entry and returns the job that it held, to be released after the lock is gone. */
static struct job *empty(struct contexts *contexts, struct entry *entry)
{
    struct job *job = entry->job;
    contexts->bytes -= entry->bytes;
    contexts->count--;
    *entry = (struct entry){ .state = FREE };
    return job;
}

attn_status contexts_reserve(struct contexts *contexts, int64_t bytes, char id[PROTO_CONTEXT_BYTES], attn_error *err)
{
    struct entry *entry = NULL;
    uint8_t key[16];
    if (getrandom(key, sizeof key, 0) != (ssize_t)sizeof key)
        return attn_fail(err, ATTN_INTERNAL, "/save", "save: the system gave no random bytes");
    pthread_mutex_lock(&contexts->lock);
    if (contexts->bytes + bytes <= contexts->limit_bytes)
        for (int i = 0; i < contexts->max_count && entry == NULL; i++)
            if (contexts->entries[i].state == FREE) entry = &contexts->entries[i];
    if (entry) {
        *entry = (struct entry){ .state = RESERVED, .bytes = bytes };
        memcpy(entry->key, key, sizeof key);
        contexts->bytes += bytes;
        contexts->count++;
    }
    pthread_mutex_unlock(&contexts->lock);
    if (entry == NULL)
        return attn_fail(err, ATTN_BUSY, "/save",
                         "save: %lld bytes do not fit, saved contexts may hold %lld bytes and number %d",
                         (long long)bytes, (long long)contexts->limit_bytes, contexts->max_count);
    for (int i = 0; i < 16; i++) snprintf(id + 2 * i, 3, "%02x", key[i]);
    return ATTN_OK;
}

void contexts_fill(struct contexts *contexts, const char *id, struct job *job, int item, int64_t now_ms)
{
    pthread_mutex_lock(&contexts->lock);
    struct entry *entry = find(contexts, id);
    if (entry && entry->state == RESERVED) {
        entry->state = READY;
        entry->job = job_hold(job);
        entry->item = item;
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

attn_status contexts_take(struct contexts *contexts, const char *id, int64_t now_ms, struct job **job, int *item,
                          attn_error *err)
{
    attn_status status = ATTN_NOT_FOUND;
    pthread_mutex_lock(&contexts->lock);
    struct entry *entry = find(contexts, id);
    if (entry && entry->state == READY && now_ms < entry->expires_ms) {
        entry->state = TAKEN;
        *job = job_hold(entry->job);
        *item = entry->item;
        status = ATTN_OK;
    }
    pthread_mutex_unlock(&contexts->lock);
    if (status != ATTN_OK) return attn_fail(err, status, "/context", "context: unknown, expired or already used");
    return ATTN_OK;
}

void contexts_finish(struct contexts *contexts, const char *id, bool used)
{
    struct job *job = NULL;
    pthread_mutex_lock(&contexts->lock);
    struct entry *entry = find(contexts, id);
    if (entry && entry->state == TAKEN) {
        if (used) job = empty(contexts, entry);
        else entry->state = READY;
    }
    pthread_mutex_unlock(&contexts->lock);
    job_release(job);
}

void contexts_expire(struct contexts *contexts, int64_t now_ms)
{
    for (int i = 0; i < contexts->max_count; i++) {
        struct job *job = NULL;
        pthread_mutex_lock(&contexts->lock);
        struct entry *entry = &contexts->entries[i];
        if (entry->state == READY && now_ms >= entry->expires_ms) job = empty(contexts, entry);
        pthread_mutex_unlock(&contexts->lock);
        job_release(job);
    }
}

int64_t contexts_bytes(struct contexts *contexts)
{
    pthread_mutex_lock(&contexts->lock);
    const int64_t bytes = contexts->bytes;
    pthread_mutex_unlock(&contexts->lock);
    return bytes;
}

int contexts_count(struct contexts *contexts)
{
    pthread_mutex_lock(&contexts->lock);
    const int count = contexts->count;
    pthread_mutex_unlock(&contexts->lock);
    return count;
}
