/* internal.h: what table.c and transactions.c share. The public header is caches.h. */
#ifndef CACHES_INTERNAL_H
#define CACHES_INTERNAL_H

#include <assert.h>
#include <pthread.h>

#include "proto-json/proto.h"
#include "server/base/keyed_hash.h"
#include "server/caches/caches.h"
#include "server/caches/page_lists.h"
#include "server/caches/pages.h"

/* There are as many buckets as caches. A bucket has one or two caches, as the keyed hash keeps
 * clients from filling it. */
enum { PROCESS_CHARS = 8, BUCKETS = CACHES_MAX_COUNT };
static_assert((BUCKETS & (BUCKETS - 1)) == 0, "a bucket is some bits of a hash");

struct pool {
    struct pages *pages; /* NULL: its memory was not allocated yet */
    char *memory;        /* address of page 0 */
    const char *device;  /* NULL: there is no pool here, or it is lost */
    bool opening;        /* a thread is allocating its memory */
    struct caches_source source;
    size_t bytes;
    int64_t numbers; /* page-table entries of all its caches */
    /* Number of all its caches, and of those with pages; deleted ones count while a step uses them. */
    int64_t caches, filled;
};

struct cache {
    char id[CACHE_ID_BYTES];     /* the id as text, because lookups compare 64 characters at a time */
    struct cache *chain;         /* next cache in its bucket */
    struct cache *older, *newer; /* list of all caches */
    struct caller *caller;       /* a reference to the cache's owner */
    struct cache *next_sequence; /* next in its bucket of sequences, if it has a name */
    char sequence[PROTO_SEQUENCE_BYTES];
    struct cache_shape shape;
    float *k_scale, *v_scale; /* [kv_heads]; NULL: the cache has no scales */
    int pool;
    size_t page_bytes;
    int32_t run; /* number of granules in a page */
    int64_t length;
    struct page_list list;
    int64_t ttl_ms, used_ms;
    int users;
    bool writing, dead;
    int64_t truncate_to; /* -1: no truncation waits */
    uint64_t wanted;     /* the last scan in which a step waited for it */
    uint64_t looked;     /* number of the last caches_look() that named this cache */
};

struct caches {
    pthread_mutex_t lock;
    pthread_cond_t opened;           /* signalled when a pool's memory was allocated or refused */
    struct hash_key key;             /* key of both hash tables */
    char process[PROCESS_CHARS + 1]; /* first characters of the ids of this process */
    int max_count, count;
    int64_t expired, lost_ids;
    bool lost_pool; /* true if there was a pool that was lost */
    uint64_t looks;
    uint64_t burials; /* caches deleted so far: pointers found at the same count are valid */
    struct pool pools[CONFIG_MAX_DEVICES];
    struct cache *buckets[BUCKETS], *sequences[BUCKETS];
    struct cache *oldest, *newest;
    struct cache *looked_at; /* where caches_expire() continues; NULL: at the oldest */
    int64_t expires_ms;      /* no cache without users expires before this time */
};

/* The changes that a step makes to one of its caches. */
struct cache_row {
    struct cache *cache;
    int64_t before; /* length of the cache before the step */
    int64_t first;  /* first page that the step's `pages` replace or add */
    int64_t count;  /* number of pages in `pages` */
    int32_t *pages; /* pages taken by the step */
    bool copied;    /* pages[0] is a copy of a shared page, which it replaces */
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

/* Call all of these with the lock held. */

/* Returns the cache with this id if the caller may use it, else NULL. */
struct cache *cache_known(struct caches *caches, const struct caller *caller, const char *id, int64_t now_ms);
/* Does what cache_known() does. If the result is NULL, *err names `member`, and its text begins with `what`. */
struct cache *cache_find(struct caches *caches, const struct caller *caller, const char *id, const char *member,
                         const char *what, attn_error *err);
/* Charges the cache's caller for `pages` more, or fewer if it is negative. */
void cache_charge(const struct caches *caches, const struct cache *cache, int64_t pages);
/* Bytes of pages that a caller may have on all devices together; INT64_MAX: no limit. */
int64_t cache_share(const struct caches *caches, const struct caller *caller);
/* Updates the sums that include the cache's pages, of which it had `before`. */
void cache_count(struct caches *caches, struct cache *cache, int64_t before);
/* Cuts the cache to its first `length` positions. Call page_list_may_cut() before, unless `length` is 0. */
void cache_keep_first(struct caches *caches, struct cache *cache, int64_t length);
/* Removes the cache from the table. Its pages are freed when the last step on it has ended. */
void cache_bury(struct caches *caches, struct cache *cache);
/* Records when the cache expires, for caches_expire_all(). Call this when its last user has left. */
void cache_note_expiry(struct caches *caches, const struct cache *cache);
/* Removes all caches that were not used for their time to live. Before expires_ms it does nothing. */
void caches_expire_all(struct caches *caches, int64_t now_ms);

#endif
