/* caller.h: the account of one tenant. A tenant is the bearer of one token; without tokens all clients are one tenant.
 *
 * A server's resources are bounded as a whole (--staging-bytes, --queue-depth, contexts). If there are several tokens,
 * each may use --token-share percent of each bound, and the rest stays free for the others. The file that keeps a
 * bound also keeps its counts here, under its own lock.
 *
 * Accounts are counted by references: a request, its job and its contexts may outlive a token that was removed. */
#ifndef CALLER_H
#define CALLER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Stages in which a request takes a slot (queue.h); a request goes through them in this order. */
enum caller_place { CALLER_RECEIVING, CALLER_WAITING, CALLER_PLACES };

struct flow;

struct caller {
    atomic_int references; /* 0: CALLER_EVERYBODY, which is part of another struct and never freed */
    struct flow *flow;   /* a reference to the tenant's share of device time; NULL: each connection has its own flow */
    _Atomic int percent; /* the tenant's part of each bound; 100 while there is only one token */

    _Atomic int places[CALLER_PLACES]; /* slots in use, kept by queue.c; not counted for CALLER_EVERYBODY */
    int64_t staging_bytes;             /* leased bytes, kept by staging.c under its lock */
    int64_t context_bytes;             /* bytes of contexts, kept by contexts.c under its lock */
    int contexts;
    /* Bytes of pages of KV caches, each page counted once; kept by server/caches under its lock. */
    int64_t cache_bytes;
    int64_t cache_numbers; /* page-table entries: a page that several caches share counts once for each of them */
    int caches;
    int regions; /* number of shared memory regions, kept by server/regions under its lock */
    int64_t region_bytes;
};

struct caller *caller_new(void); /* returns one reference; the caller has no flow yet; NULL when out of memory */
struct caller *caller_hold(struct caller *caller);
void caller_release(struct caller *caller); /* NULL is fine */

/* Initialiser of the anonymous caller: it is not counted by references and may use 100 percent of each bound. */
#define CALLER_EVERYBODY \
    {                    \
        .percent = 100   \
    }

bool caller_is_anonymous(const struct caller *caller);

/* How much of `bound` the caller may use, at least 1. A NULL caller may use all of it. */
int64_t caller_share(const struct caller *caller, int64_t bound);

#endif
