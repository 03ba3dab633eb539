/* internal.h: the types and functions that table.c and transactions.c share. */
#ifndef CACHES_INTERNAL_H
#define CACHES_INTERNAL_H

#include <assert.h>
#include <pthread.h>

#include "proto-json/proto.h"
#include "server/base/keyed_hash.h"
#include "server/caches/caches.h"
#include "server/caches/page_lists.h"
#include "server/caches/pages.h"

/* BUCKETS: number of buckets of the hash table, one for each cache that may exist. The hash function has a secret key,
 * so clients cannot choose ids that fall into one bucket. */
enum { PROCESS_CHARS = 8, BUCKETS = CACHES_MAX_COUNT };
static_assert((BUCKETS & (BUCKETS - 1)) == 0, "a bucket is some bits of a hash");

struct pool {
    struct pages *pages; /* the table of the pool's pages; NULL: the pool's memory is not allocated yet */
    char *memory;        /* address of page 0, on the device */
    const char *device;  /* name of the device; NULL: the device has no pool, or has failed */
    bool opening;        /* whether a thread is allocating the pool's memory while other threads wait for it */
    struct caches_source source;
    size_t bytes;
    int64_t numbers; /* number of page-table entries of all caches in the pool */
    /* caches: number of all caches in the pool. filled: number of those that have pages. A deleted cache counts until
     * its last transaction has ended. */
    int64_t caches, filled;
};

struct cache {
    char id[CACHE_ID_BYTES];
    struct cache *chain; /* next cache in the same bucket of `buckets` */
    struct cache *older, *newer;
    struct caller *caller; /* account (token) that owns the cache, a counted reference */
    /* next cache in the same bucket of `sequences` */
    struct cache *next_sequence;
    char sequence[PROTO_SEQUENCE_BYTES];
    struct cache_shape shape;
    /* [kv_heads]: quantisation scales of the keys and of the values; NULL: the cache has none */
    float *k_scale, *v_scale;
    int pool;
    size_t page_bytes;
    int32_t run; /* number of granules (units of the pool's memory) in a page */
    int64_t length;
    struct page_list list;
    int64_t ttl_ms, used_ms;
    int users;
    bool writing, dead;
    /* length to which the cache is cut when its running transactions end; -1: it is not cut */
    int64_t truncate_to;
    /* number `scan` of the last pass (see caches_begin()) in which a step (transaction) that uses this cache had to
     * wait; younger steps of that pass wait behind it */
    uint64_t wanted;
    /* number of the last call of caches_look() that named this cache; it shows whether a call names the cache twice */
    uint64_t looked;
};

struct caches {
    pthread_mutex_t lock;
    pthread_cond_t opened; /* signalled when the allocation of a pool's memory has succeeded or failed */
    struct hash_key key;
    /* all ids that this process makes begin with these characters; an id that begins differently is from another
     * process */
    char process[PROCESS_CHARS + 1];
    int max_count, count;
    int64_t expired, lost_ids;
    /* whether a device has failed and its caches are lost; if so, errors about unknown caches say that */
    bool lost_pool;
    uint64_t looks;
    /* number of caches deleted so far; while it is unchanged, a pointer to a cache stays valid */
    uint64_t burials;
    struct pool pools[CONFIG_MAX_DEVICES];
    struct cache *buckets[BUCKETS], *sequences[BUCKETS];
    struct cache *oldest, *newest;
    /* where the next call of caches_expire() continues the search; NULL: at the oldest cache */
    struct cache *looked_at;
    int64_t expires_ms; /* earliest time at which an unused cache may expire */
};

/* The changes that a step (a cache transaction) makes to one of its caches. */
struct cache_row {
    struct cache *cache;
    int64_t before;
    int64_t first; /* index in the cache's page list of the first page of `pages` */
    int64_t count;
    int32_t *pages;
    bool copied; /* whether pages[0] is a copy of a shared page, and replaces that page in the cache */
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

/* The caller of the functions below must hold the lock of the table of caches. */

/* Returns the cache with this id if the account may use it, otherwise NULL. */
struct cache *cache_known(struct caches *caches, const struct caller *caller, const char *id, int64_t now_ms);
/* Finds a cache as cache_known() does. If there is none, *err names `member`, and its text begins with `what`. */
struct cache *cache_find(struct caches *caches, const struct caller *caller, const char *id, const char *member,
                         const char *what, attn_error *err);
/* Charges the cache's account (token) for `pages` more pages, or for fewer if the number is negative. */
void cache_charge(const struct caches *caches, const struct cache *cache, int64_t pages);
/* Returns how many bytes of KV cache pages an account may have on all devices together. INT64_MAX: there is no
 * limit. */
int64_t cache_share(const struct caches *caches, const struct caller *caller);
/* Updates the counters of the pool and of the account after the number of the cache's pages has changed. `before` is
 * the number before the change. */
void cache_count(struct caches *caches, struct cache *cache, int64_t before);
/* Cuts the cache to its first `length` positions. Call page_list_may_cut() first, unless `length` is 0. */
void cache_keep_first(struct caches *caches, struct cache *cache, int64_t length);
/* Removes the cache from the table. Its pages are freed when the last step (transaction) on it has ended. */
void cache_bury(struct caches *caches, struct cache *cache);
/* Updates the time at which the next cache of the table expires. Call this when the last transaction on `cache` has
 * ended. */
void cache_note_expiry(struct caches *caches, const struct cache *cache);
/* Removes all caches that were unused for longer than their time to live. */
void caches_expire_all(struct caches *caches, int64_t now_ms);

#endif
