/* caches_internal.h: what caches.c (the table) and cache_steps.c share; caches.h is what others see. */
#ifndef CACHES_INTERNAL_H
#define CACHES_INTERNAL_H

#include <assert.h>
#include <pthread.h>

#include "proto-json/proto.h"
#include "server/base/keyed_hash.h"
#include "server/caches/caches.h"
#include "server/caches/page_lists.h"
#include "server/caches/pages.h"

/* As many buckets as caches. A bucket has one or two, because the hash is keyed and no client can fill a bucket. */
enum { PROCESS_CHARS = 8, BUCKETS = CACHES_MAX_COUNT };
static_assert((BUCKETS & (BUCKETS - 1)) == 0, "a bucket is some bits of a hash");

struct pool {
    struct pages *pages; /* NULL: its memory has not been asked for */
    char *memory;        /* of page 0 */
    const char *device;  /* NULL: there is no such pool, or it is lost */
    bool opening;        /* a thread is asking for it */
    struct caches_source source;
    size_t bytes;
    int64_t numbers;        /* page numbers of all its caches: the sum of their counts */
    int64_t caches, filled; /* of it: all, and those that have pages; a step may still be on some that are deleted */
};

struct cache {
    char id[CACHE_ID_BYTES];     /* as text, which is how it is looked for, 64 at a time */
    struct cache *chain;         /* in its bucket */
    struct cache *older, *newer; /* of all caches */
    struct caller *caller;       /* a reference */
    struct cache *next_sequence; /* in its bucket of sequences, where it has a name */
    char sequence[PROTO_SEQUENCE_BYTES];
    struct cache_shape shape;
    float *k_scale, *v_scale; /* [kv_heads], or NULL */
    int pool;
    size_t page_bytes;
    int32_t run; /* granules of a page */
    int64_t length;
    struct page_list list;
    int64_t ttl_ms, used_ms;
    int users;
    bool writing, dead;
    int64_t truncate_to; /* -1: nothing waits */
    uint64_t wanted;     /* the last scan in which a step waited for it */
    uint64_t looked;     /* the last caches_look() that named it */
};

struct caches {
    pthread_mutex_t lock;
    pthread_cond_t opened;           /* a pool's memory is there, or was refused */
    struct hash_key key;             /* of both tables of buckets */
    char process[PROCESS_CHARS + 1]; /* how the ids of this process begin */
    int max_count, count;
    int64_t expired, lost_ids;
    bool lost_pool; /* there was one */
    uint64_t looks;
    uint64_t burials; /* so far: what was found since the last one is still there */
    struct pool pools[CONFIG_MAX_DEVICES];
    struct cache *buckets[BUCKETS], *sequences[BUCKETS];
    struct cache *oldest, *newest;
    struct cache *looked_at; /* where caches_expire() goes on; NULL: at the oldest */
    int64_t expires_ms;      /* no cache without users expires before this time */
};

/* What a step does to one of its caches. */
struct cache_row {
    struct cache *cache;
    int64_t before; /* its length */
    int64_t first;  /* the page from which on its pages become `pages` */
    int64_t count;  /* of those */
    int32_t *pages; /* of the step */
    bool copied;    /* pages[0] replaces a page that is shared */
};

static inline struct pages *cache_pages_of(const struct caches *caches, const struct cache *cache)
{
    return caches->pools[cache->pool].pages;
}

static inline int64_t cache_pages_for(const struct cache *cache, int64_t length)
{
    return length / cache->shape.page_size + (length % cache->shape.page_size != 0);
}

static inline int64_t cache_run_bytes(const struct caches *caches, const struct cache *cache)
{
    return (int64_t)cache->run * (int64_t)pages_granule(cache_pages_of(caches, cache));
}

static inline bool cache_is_expired(const struct cache *cache, int64_t now_ms)
{
    return cache->users == 0 && now_ms - cache->used_ms >= cache->ttl_ms;
}

/* All with the lock held. */

/* The cache of this id that this caller may use; NULL: there is none. */
struct cache *cache_known(struct caches *caches, const struct caller *caller, const char *id, int64_t now_ms);
/* The same; NULL with the reason in *err, which names `member` and begins with `what`. */
struct cache *cache_find(struct caches *caches, const struct caller *caller, const char *id, const char *member,
                         const char *what, attn_error *err);
/* Charges the cache's caller for `pages` more, or fewer where that is negative. */
void cache_charge(const struct caches *caches, const struct cache *cache, int64_t pages);
/* Bytes of pages that a caller may have, on all devices together; INT64_MAX: whatever there is. */
int64_t cache_share(const struct caches *caches, const struct caller *caller);
/* Counts the cache's pages anew, of which it had `before`. */
void cache_count(struct caches *caches, struct cache *cache, int64_t before);
/* Cuts the cache to its first `length` positions. page_list_may_cut() was called before, unless `length` is 0. */
void cache_keep_first(struct caches *caches, struct cache *cache, int64_t length);
/* It is found by nobody, and its pages are free when the last step on it has ended. */
void cache_bury(struct caches *caches, struct cache *cache);
/* Tells caches_expire_all() when the cache expires. Call this when its last user has left. */
void cache_note_expiry(struct caches *caches, const struct cache *cache);
/* Buries all caches that were not used for their time to live. Before expires_ms it looks at none. */
void caches_expire_all(struct caches *caches, int64_t now_ms);

#endif
