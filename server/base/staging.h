/* staging.h: staging memory, which is host memory for the tensors of requests and answers. All these tensors lie in
 * blocks of one pool with a bound (--staging-bytes), so that many clients cannot make the process grow beyond this
 * bound.
 *
 *   struct staging_block *e;
 *   if (staging_lease(pool, caller, bytes, &e, &err) != ATTN_OK) ...   // BUSY: come back later; TOO_LARGE: never fits
 *   memcpy(e->memory, ...);                                  // e->bytes >= bytes, 64-byte aligned, contents undefined
 *   staging_grow(pool, &e, used, more, &err);                  // may move; the first `used` bytes stay
 *   staging_release(pool, e);
 *
 * Announced bytes: a body's length is known before its bytes arrive, and one block for the whole body is faster than a
 * block that grows. But a client that announces a long body and sends nothing must not use up the pool. Blocks leased
 * ahead of their bytes therefore take at most a part of the pool (STAGING_AHEAD_SHARE). The block of any other body
 * grows as its bytes arrive.
 *
 *   if (staging_lease_ahead(pool, caller, announced, &e)) ...          // false: begin small and grow
 *   staging_arrived(pool, e);                                          // call it when half of the bytes have arrived
 *
 * The functions are thread-safe. A block belongs to one owner at a time, and only the owner uses it. */
#ifndef STAGING_H
#define STAGING_H

#include "server/base/limits.h"

#include "kernels/attention.h"

struct staging_pool;
struct caller;

/* A block of memory, leased or warm (kept for the next request). Callers read `memory` and `bytes`; only staging.c uses
 * the other members. */
struct staging_block {
    void *memory;
    size_t bytes;
    int size_class;
    int core;
    bool leased; /* whether the block is leased; if not, it is warm (kept for the next request) */
    /* whether the block was leased before the bytes of its body arrived; staging_arrived() sets it to false */
    bool ahead;
    /* account to which the block is charged; the block's owner holds a reference to it; NULL: none */
    struct caller *caller;
    int64_t idle_since_ms;
    struct staging_block *next_in_class, *older, *newer;
};

/* The functions that provide the pool's memory. Without them (NULL), staging_new() uses anonymous memory, with huge
 * pages for large blocks. If grow() is NULL, a block grows by being copied to a larger block. */
struct staging_source {
    void *(*map)(void *context, size_t bytes);
    void (*unmap)(void *context, void *memory, size_t bytes);
    void *(*grow)(void *context, void *memory, size_t bytes,
                  /* moves the pages to a larger mapping; on failure returns NULL, and the old memory stays valid */
                  size_t new_bytes);
    void *context;
};

/* Makes a pool. Leased blocks and warm blocks (free blocks kept for later requests) have at most `limit_bytes` bytes
 * together. Warm blocks have at most `warm_bytes`. Aborts the process if there is no memory for the pool itself. */
struct staging_pool *staging_new(int64_t limit_bytes, int64_t warm_bytes, const struct staging_source *source);
void staging_free(struct staging_pool *staging); /* frees the pool; all its blocks must have been released */

/* Leases a block of memory and charges it to the account `caller`, which may be NULL. TOO_LARGE: the size exceeds the
 * pool or the account's share. BUSY: other leases use the memory now. QUOTA: the account's own leases have used up its
 * share. */
attn_status staging_lease(struct staging_pool *staging, struct caller *caller, size_t bytes,
                          struct staging_block **block, attn_error *err);
/* Leases a block for the announced bytes of a body (its Content-Length), before the bytes arrive. On failure returns
 * false and sets *block to NULL. */
bool staging_lease_ahead(struct staging_pool *staging, struct caller *caller, size_t bytes,
                         struct staging_block **block);
/* Turns a block that was leased ahead of its bytes into an ordinary one, because enough of the bytes have arrived. Does
 * nothing to other blocks. */
void staging_arrived(struct staging_pool *staging, struct staging_block *block);
/* Enlarges *block to at least `bytes`. The first `used` bytes of the block are kept. After an error the block is
 * unchanged. */
attn_status staging_grow(struct staging_pool *staging, struct staging_block **block, size_t used, size_t bytes,
                         attn_error *err);
void staging_release(struct staging_pool *staging, struct staging_block *block);

/* Counts memory that is allocated elsewhere, such as a body's text or an answer, towards the pool's bound. The
 * memory counts as leased until staging_count_back(). Errors: BUSY, QUOTA (see staging_lease()). */
attn_status staging_count(struct staging_pool *staging, struct caller *caller, size_t bytes, attn_error *err);
void staging_count_back(struct staging_pool *staging, struct caller *caller, size_t bytes);

/* Returns warm memory (kept for the next request) to the system if nothing leased it for `idle_ms`. */
void staging_trim(struct staging_pool *staging, int64_t now_ms, int64_t idle_ms);

int64_t staging_limit_bytes(const struct staging_pool *staging);
int64_t staging_leased_bytes(const struct staging_pool *staging);
int64_t staging_warm_bytes(const struct staging_pool *staging);
/* Returns how many bytes of leased blocks have not arrived from clients yet. */
int64_t staging_ahead_bytes(const struct staging_pool *staging);

#endif
