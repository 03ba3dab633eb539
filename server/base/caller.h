/* caller.h: the account of one tenant. A tenant is the bearer of one token; without tokens all clients are one tenant.
 *
 * The server bounds each of its resources as a whole: staging memory (--staging-bytes), queue slots (--queue-depth) and
 * contexts (saved forwards). If there are several tokens, each may use --token-share percent of each bound, and the
 * rest stays free for the other tokens. A count in the account says how much of one bound the tenant uses. The file
 * that enforces this bound changes the count under a lock of its own.
 *
 * Accounts have reference counts, because a request, its job and its contexts may outlive a token that was removed. */
#ifndef CALLER_H
#define CALLER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Stages in which a request occupies a slot (work/queue.h), in the order in which a request goes through them. */
enum caller_place { CALLER_RECEIVING, CALLER_WAITING, CALLER_PLACES };

struct flow;

struct caller {
    /* number of references; 0 marks CALLER_EVERYBODY (the account of clients without a token), which is part of another
     * struct and is never freed */
    atomic_int references;
    /* the tenant's share of device time, held by a reference; NULL: each connection has a share of its own */
    struct flow *flow;
    /* percentage of each of the server's bounds (memory, queue slots) that the tenant may use; 100 with only one
     * token */
    _Atomic int percent;

    /* slots of the queue that the tenant's requests occupy, by stage; queue.c counts them, but not for CALLER_EVERYBODY
     * (clients without a token) */
    _Atomic int places[CALLER_PLACES];
    /* staging memory that the tenant's requests have leased, in bytes; kept by staging.c under its lock */
    int64_t staging_bytes;
    /* memory of the tenant's contexts (saved forwards), in bytes; kept by contexts.c under its lock */
    int64_t context_bytes;
    int contexts;
    /* Bytes of the pages of the tenant's KV caches. A page that several caches share counts once. server/caches keeps
     * this number under its lock. */
    int64_t cache_bytes;
    /* entries in the page tables of the tenant's caches; a page that several caches share counts once for each cache */
    int64_t cache_numbers;
    int caches;
    /* number of shared memory segments that the tenant has registered; kept by server/regions under its lock */
    int regions;
    int64_t region_bytes;
};

/* Makes an account with one reference and without a flow. Returns NULL when out of memory. */
struct caller *caller_new(void);
struct caller *caller_hold(struct caller *caller);
void caller_release(struct caller *caller); /* does nothing if `caller` is NULL */

/* Initialiser of the account of clients without a token. The account has no reference count and may use 100 percent
 * of each bound. */
#define CALLER_EVERYBODY \
    {                    \
        .percent = 100   \
    }

bool caller_is_anonymous(const struct caller *caller);

/* Returns how much of `bound` (a limit of the server) the account may use, at least 1. A NULL account may use the whole
 * bound. */
int64_t caller_share(const struct caller *caller, int64_t bound);

#endif
