/* staging.h: staging memory. Every tensor that a request brings or takes away lies in a block of one pool with a bound
 * (--staging-bytes), so that no number of clients can make the process grow beyond it.
 *
 *   struct staging_block *e;
 *   if (staging_lease(pool, caller, bytes, &e, &err) != ATTN_OK) ...   // BUSY: come back later; TOO_LARGE: never fits
 *   memcpy(e->memory, ...);                                  // e->bytes >= bytes, 64-byte aligned, contents undefined
 *   staging_grow(pool, &e, used, more, &err);                  // may move; the first `used` bytes stay
 *   staging_release(pool, e);
 *
 * Announced bytes: a body's length is known before its bytes are there, and one block for all of it is faster than one
 * that grows. But whoever announces much and sends nothing must not take it away from those who send. So what is leased
 * ahead of its bytes is at most a part of the pool (STAGING_AHEAD_SHARE); beyond that a lease grows with what arrives.
 *
 *   if (staging_lease_ahead(pool, caller, announced, &e)) ...          // false: begin small and grow
 *   staging_arrived(pool, e);                                          // half of it is there: it counts as any other
 *
 * Thread-safe. A block belongs to one owner at a time, who alone touches it. */
#ifndef STAGING_H
#define STAGING_H

#include "server/base/limits.h"

#include "kernels/attention.h"

struct staging_pool;
struct caller;

/* One piece of memory, leased or kept warm. Read `memory` and `bytes`; the rest is staging.c's. */
struct staging_block {
    void *memory;
    size_t bytes;
    int size_class;
    int core;              /* that released it */
    bool leased;           /* not warm */
    bool ahead;            /* leased ahead of its bytes */
    struct caller *caller; /* on whose account, while it is leased; who has it keeps a reference. NULL: nobody's */
    int64_t idle_since_ms;
    struct staging_block *next_in_class, *older, *newer;
};

/* Where the memory comes from. NULL in staging_new(): anonymous memory, with huge pages for large blocks. A GPU's
 * pinned memory is another source. grow() may be NULL: then the bytes are copied. */
struct staging_source {
    void *(*map)(void *context, size_t bytes); /* NULL when there is none */
    void (*unmap)(void *context, void *memory, size_t bytes);
    void *(*grow)(void *context, void *memory, size_t bytes,
                  size_t new_bytes); /* moves the pages; NULL: old stays valid */
    void *context;
};

/* `limit_bytes` bounds leased and warm memory together; `warm_bytes` of it, at most, is kept for the next request when
 * nobody leases it. Aborts when there is no memory for the pool itself. */
struct staging_pool *staging_new(int64_t limit_bytes, int64_t warm_bytes, const struct staging_source *source);
void staging_free(struct staging_pool *staging); /* everything must have been released */

/* Errors: TOO_LARGE (more than the whole pool, or the caller's share), BUSY (others have it now), QUOTA (the caller's
 * other leases have used up its share). `caller` may be NULL. */
attn_status staging_lease(struct staging_pool *staging, struct caller *caller, size_t bytes,
                          struct staging_block **block, attn_error *err);
/* The same, or false with *block NULL, for bytes that are announced. */
bool staging_lease_ahead(struct staging_pool *staging, struct caller *caller, size_t bytes,
                         struct staging_block **block);
/* What it was leased ahead of is there, or enough of it. May be said of every block. */
void staging_arrived(struct staging_pool *staging, struct staging_block *block);
/* *block holds at least `bytes` afterwards, with its first `used` bytes unchanged. On an error it is as it was. */
attn_status staging_grow(struct staging_pool *staging, struct staging_block **block, size_t used, size_t bytes,
                         attn_error *err);
void staging_release(struct staging_pool *staging, struct staging_block *block); /* NULL is fine */

/* Counts memory that is allocated elsewhere and bounded with the pool's: the text of a body, an answer. BUSY or QUOTA,
 * as staging_lease(). The memory counts as leased until it is given back. */
attn_status staging_count(struct staging_pool *staging, struct caller *caller, size_t bytes, attn_error *err);
void staging_count_back(struct staging_pool *staging, struct caller *caller, size_t bytes);

/* Gives back warm memory that nobody wanted for `idle_ms`. */
void staging_trim(struct staging_pool *staging, int64_t now_ms, int64_t idle_ms);

int64_t staging_limit_bytes(const struct staging_pool *staging);
int64_t staging_leased_bytes(const struct staging_pool *staging);
int64_t staging_warm_bytes(const struct staging_pool *staging);
int64_t staging_ahead_bytes(const struct staging_pool *staging); /* of the leased */

#endif
