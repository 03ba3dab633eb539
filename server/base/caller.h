/* caller.h: the account of one tenant. A tenant consists of all clients that send the same token. On a server without
 * tokens, all clients are one tenant.
 *
 * The server bounds each of its resources as a whole: staging memory (--staging-bytes), queue slots (--queue-depth) and
 * contexts (saved forward passes). If there are several tokens, each token may use --token-share percent of each bound,
 * and the rest stays free for the other tokens. The account counts for each bound how much of the resource the tenant
 * uses.
 *
 * Accounts have reference counts, because a request, its job and its contexts may outlive a token that was removed. */
#ifndef CALLER_H
#define CALLER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A request occupies a slot of the queue (work/queue.h), first while it is received, then while it waits for a
 * device. */
enum caller_place { CALLER_RECEIVING, CALLER_WAITING, CALLER_PLACES };

struct flow;

struct caller {
    /* number of references; always 0 for CALLER_EVERYBODY, the account of all clients without a token */
    atomic_int references;
    /* record of the tenant's device time (flow.h), a counted reference; NULL: each connection has a record of its
     * own */
    struct flow *flow;
    /* percentage of each of the server's bounds (memory, queue slots) that the tenant may use; 100 with only one
     * token */
    _Atomic int percent;

    /* number of queue slots that the tenant's requests occupy; changed by queue.c, and not counted for CALLER_EVERYBODY
     * (clients without a token) */
    _Atomic int places[CALLER_PLACES];
    /* staging memory (memory for tensors) that the tenant's requests have leased, in bytes; staging.c changes it under
     * its lock */
    int64_t staging_bytes;
    /* memory of the tenant's contexts (saved forward passes), in bytes; contexts.c changes it under its lock */
    int64_t context_bytes;
    int contexts;
    /* bytes of the pages of the tenant's KV caches, each shared page counted once; changed under the lock of
     * server/caches */
    int64_t cache_bytes;
    /* number of entries in the page tables of the tenant's caches; a page that several caches share counts once for
     * each of them */
    int64_t cache_numbers;
    int caches;
    /* number of shared memory segments that the tenant has registered; the code in server/regions changes it under its
     * lock */
    int regions;
    int64_t region_bytes;
};

/* Makes an account with one reference, and without a flow (the record of a client's device time). Returns NULL when out
 * of memory. */
struct caller *caller_new(void);
struct caller *caller_hold(struct caller *caller);
void caller_release(struct caller *caller);

/* Initialiser for the account of clients without a token: no references are counted, and it may use 100 percent of each
 * bound. */
#define CALLER_EVERYBODY \
    {                    \
        .percent = 100   \
    }

bool caller_is_anonymous(const struct caller *caller);

/* `bound` is a limit of the server, such as the bytes of staging memory. Returns how much of it this account may use,
 * at least 1. If `caller` is NULL, returns the whole bound. */
int64_t caller_share(const struct caller *caller, int64_t bound);

#endif
