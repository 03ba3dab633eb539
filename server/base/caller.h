/* caller.h: on whose account something is: the bearer of one token, or everybody where there are no tokens.
 *
 * What a server has is bounded as a whole (--staging-bytes, --queue-depth, contexts). Where several tokens share it,
 * each may use --token-share percent of every such bound, so that one that takes all it can get leaves something to the
 * others. The parts that keep the bounds keep the accounts too, each under its own lock.
 *
 * Counted by references: a request, its job and its contexts may outlive a token that is taken out of the file. */
#ifndef CALLER_H
#define CALLER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Places that a request may have, one after the other; queue.h */
enum caller_place { CALLER_RECEIVING, CALLER_WAITING, CALLER_PLACES };

struct flow;

struct caller {
    atomic_int references; /* 0: everybody, who is part of something else and never freed */
    struct flow *flow;     /* a reference: the caller's share of the devices' time; NULL: each connection has a flow */
    _Atomic int percent;   /* of each bound; 100 while there is no other token */

    _Atomic int places[CALLER_PLACES]; /* queue.c's; not kept of everybody */
    int64_t staging_bytes;             /* leased: staging.c's, under its lock */
    int64_t context_bytes;             /* contexts.c's, under its lock */
    int contexts;
    int64_t cache_bytes;   /* pages of KV caches, each counted once: caches.c's, under its lock */
    int64_t cache_numbers; /* and of those pages, as often as caches have them */
    int caches;
    int regions; /* of shared memory: regions.c's, under its lock */
    int64_t region_bytes;
};

struct caller *caller_new(void); /* one reference, and no flow; NULL when out of memory */
struct caller *caller_hold(struct caller *caller);
void caller_release(struct caller *caller); /* NULL is fine */

/* Everybody: a caller without references, who may use all. */
#define CALLER_EVERYBODY \
    {                    \
        .percent = 100   \
    }

bool caller_is_everybody(const struct caller *caller);

/* How much of `bound` the caller may use; NULL: all. At least 1. */
int64_t caller_share(const struct caller *caller, int64_t bound);

#endif
