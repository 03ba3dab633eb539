/* caches.h: KV caches that stay on the server between requests (/v1/caches). A table keeps the owner and the length of
 * each cache. Requests read or extend caches in transactions.
 *
 * A cache is a sequence of positions, each with Hk keys of D numbers and Hk values of Dv numbers. Keys and values lie
 * in pages of page_size positions (caches/pages.h) in the memory of one device:
 *
 *   page:  | K: [page_size, Hk, D] | V: [page_size, Hk, Dv] |        latent: V is the first Dv columns of K
 *
 * A fork of a cache shares the pages of that cache. A shared page is copied before it is written to. A page is cleared
 * before it is read, so a cache never shows what the page's last owner left.
 *
 * A step (struct cache_step) is the transaction of one request (decode, append) on its caches:
 *
 *   caches_look()    HTTP thread     Checks that the caches exist and fit together. Takes no pages.
 *   caches_begin()   main or HTTP    Takes pages, lists the pages that the device must copy, and writes the page table.
 *                                    Must wait while another step uses one of the caches, if either step appends.
 *   (the device copies pages and computes)
 *   caches_end()     main or HTTP    If `commit` is true, the caches keep the new positions. Otherwise they are as
 *                                    before the step.
 *
 * During a step, requests that get or fork a cache see it as it was before the step. Requests that truncate or delete a
 * cache are answered at once, but take effect when the step has ended.
 *
 * An id of a cache is 20 bytes in hexadecimal. The first 4 bytes are random, but the same for all ids of one process,
 * so ids of an earlier process are recognised. The other 16 bytes are random for each cache. A cache belongs to the
 * account (token, base/caller.h) that made it. For other accounts it seems not to exist. All functions are thread-safe,
 * and share one lock.
 *
 * Source: PagedAttention (arXiv:2309.06180). */
#ifndef CACHES_H
#define CACHES_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "server/base/limits.h"

struct caches;
struct caller;
struct cache;

enum { CACHE_ID_CHARS = 40, CACHE_ID_BYTES = CACHE_ID_CHARS + 1 };

struct cache_shape {
    int64_t kv_heads, head_dim, head_dim_v;
    attn_dtype dtype;
    /* whether values are the first head_dim_v numbers of the keys (Multi-head Latent Attention) and are not stored
     * separately */
    bool latent;
    int64_t page_size;
};

struct cache_info {
    char id[CACHE_ID_BYTES];
    struct cache_shape shape;
    int64_t length;
    int64_t pages, shared_pages;
    int64_t page_bytes;
    /* time for which the cache may be unused before it is deleted, and how much of this time is left */
    int64_t ttl_ms, expires_in_ms;
    const char *device;
};

/* Makes a table for at most max_count caches. It has no pools (memory for pages) yet. Returns NULL if there
 * is no memory. */
struct caches *caches_new(int max_count);
void caches_free(struct caches *caches); /* frees the table, which may be NULL; no transaction may be running */

/* The source of a pool's memory. A pool is the memory for all pages of caches on one device. alloc() is called once,
 * when the first cache is made on the device, and sets *memory to a 64-byte aligned address. The device owns this
 * memory. */
struct caches_source {
    attn_status (*alloc)(void *context, size_t bytes, void **memory, attn_error *err);
    void *context;
};
/* Adds a pool of `bytes` bytes on the device with the number `device` (devices.h). Call this before the first
 * request. */
void caches_add_pool(struct caches *caches, int device, const char *name, const struct caches_source *source,
                     size_t bytes);
/* Deletes the caches of each account for which is_known() returns false. The token of such an account was removed, so
 * no client can reach its caches. A cache that a transaction uses is deleted when the transaction ends. */
void caches_forget(struct caches *caches, bool (*is_known)(void *context, const struct caller *caller), void *context);
/* Call this when the device has failed. Its caches are deleted, and the device gets no new caches. */
void caches_lose(struct caches *caches, int device);
/* Returns the size in bytes of the smallest cache pool of all devices. A pool that is not allocated yet counts as 0.
 * The pool's memory is not available for the tensors of requests. */
int64_t caches_held_bytes(struct caches *caches);

/* ---- Functions for caches; any thread may call them, and they never wait for a transaction ----------------------- */

/* Makes a cache. The scales may be NULL; for float8_e4m3fn they are arrays of kv_heads numbers. Errors: INVALID,
 * UNSUPPORTED (sizes that the server does not support), TOO_LARGE (a page is larger than the pool), QUOTA (the account
 * has used up its share), FULL (no pool, or too many caches). */
attn_status caches_create(struct caches *caches, struct caller *caller, const struct cache_shape *shape,
                          const float *k_scale, const float *v_scale, int64_t ttl_ms, struct cache_info *info,
                          attn_error *err);
attn_status caches_get(struct caches *caches, const struct caller *caller, const char *id, struct cache_info *info,
                       attn_error *err);
/* Lists at most `room` caches of the account, the oldest first. *count becomes the number of all caches of the
 * account. */
void caches_list(struct caches *caches, const struct caller *caller, struct cache_info *infos, int room, int *written,
                 int *count);
/* Makes a cache (a fork) that shares the first `length` positions of another cache. If `length` is -1, the fork shares
 * all positions. */
attn_status caches_fork(struct caches *caches, struct caller *caller, const char *id, int64_t length,
                        struct cache_info *info, attn_error *err);
attn_status caches_truncate(struct caches *caches, const struct caller *caller, const char *id, int64_t length,
                            struct cache_info *info, attn_error *err);
attn_status caches_delete(struct caches *caches, const struct caller *caller, const char *id, attn_error *err);

/* Finds the cache of a KServe sequence, and writes the cache's id. `name` is the name that the account has given to the
 * sequence, and is shorter than PROTO_SEQUENCE_BYTES. If a shape is given, the sequence starts: a new cache replaces
 * any earlier cache of that name. */
attn_status caches_sequence(struct caches *caches, struct caller *caller, const char *name,
                            const struct cache_shape *shape, char id[CACHE_ID_BYTES], attn_error *err);

void caches_end_sequence(struct caches *caches, const struct caller *caller, const char *name);

/* Deletes the caches that were unused for longer than their time to live. */
void caches_expire(struct caches *caches, int64_t now_ms);

struct caches_totals {
    int64_t caches, pages, shared_pages, used_bytes, bytes;
    /* counts since the server's start: caches that expired, and requests for caches of an earlier process */
    int64_t expired, lost_ids;
};
void caches_totals(struct caches *caches, struct caches_totals *totals);

/* ---- Steps: transactions on caches ------------------------------------------------------------------------------- */

/* A step: the transaction of one request on its caches, which lasts from caches_look() to caches_drop_step(). Arrays of
 * the step have one row for each cache. */
struct cache_step {
    struct caches *caches;
    struct caller *caller;
    /* [rows]: ids of the caches; the array belongs to the caller */
    char (*ids)[CACHE_ID_BYTES];
    int rows;
    int64_t append; /* number of positions (tokens) that the step appends to each cache; 0: none */
    /* Whether the URL's path names the cache. If not, the body's member `caches` names the caches, and errors point to
     * it. */
    bool of_path;
    /* New keys and values of all caches, one cache after the other, set by the caller before the transaction begins. v
     * is NULL if the values are a part of the keys. */
    const char *k, *v;
    int64_t k_row_bytes, v_row_bytes;

    struct cache_shape shape;
    int device;
    const char *pool; /* address of page 0 in the device's memory */
    size_t pool_bytes, page_bytes;
    /* bytes of a granule, the unit of the pool's memory; page n begins at byte n * granule */
    size_t granule;
    bool k_scaled, v_scaled; /* whether the caches have quantisation scales for keys and for values */
    int64_t most;            /* number of pages of the transaction's largest cache */
    /* [rows]: lengths of the caches after the transaction; until the transaction has begun, these are estimates */
    int32_t *lengths;

    bool begun;
    /* [rows, most]: page numbers of each cache. This array and the arrays below are in the memory given to
     * caches_begin(). */
    int32_t *table;
    int32_t *table_lengths; /* [rows]: a copy of `lengths`, in the memory given to caches_begin() */
    /* [rows]: how many positions at its beginning the cache shares with the cache of the previous row (in common
     * pages) */
    int32_t *prefix_keys;
    /* whether the caches of successive rows have so many pages in common that the device should read these pages only
     * once (prefix_keys) */
    bool shares;
    /* [rows, kv_heads]: the caches' quantisation scales; NULL: none. Until the transaction has begun they lie in
     * `scales`, and from then on in the memory given to caches_begin(), after the page tables. */
    float *k_scale, *v_scale;
    /* copies that the device makes before it computes: of shared pages, and of new keys and values to pages */
    attn_move *moves;
    int64_t move_count;
    /* whether this is the last transaction of a KServe sequence, so that committing it deletes the sequence's caches */
    bool ends;
    struct cache_row *row; /* the members from here on are for the code of server/caches only */
    /* value of caches->burials (number of caches deleted so far) when the pointers row[].cache were looked up. The
     * pointers are valid as long as caches->burials has this value. */
    uint64_t burials;
    float *scales;
};

/* Fills in *step, a transaction on the caches with the ids `ids`. Checks that the caches exist and all have the same
 * shape and device. `rows` is the number of caches, at most CACHES_ROWS. Errors name the row (the index in `ids`):
 * NOT_FOUND, INVALID (the caches differ in shape or device, or a step that appends names a cache twice), TOO_LARGE (a
 * cache would become too long). TOO_LARGE also means that the caches have too many pages for one transaction. Call
 * caches_drop_step() also after an error. */
attn_status caches_look(struct caches *caches, struct caller *caller, char (*ids)[CACHE_ID_BYTES], int rows,
                        int64_t append, bool of_path, struct cache_step *step, attn_error *err);

/* Sets step->most (pages of the largest cache) and *bytes, the memory that the tables of the transaction `step` need
 * (64-byte aligned). TOO_LARGE: the caches have grown since caches_look(), and are now too large for a transaction. */
attn_status caches_table_bytes(struct cache_step *step, size_t *bytes, attn_error *err);

/* Begins the step (a cache transaction). `memory` is for its page tables. *wait becomes true if the step cannot begin
 * yet. It must wait while another step uses one of its caches, if one of the two steps appends. It must also wait for
 * an older waiting step that needs one of its caches, and while one of its caches is about to be truncated.
 *
 * Waiting steps are retried in passes. A pass calls this function for all waiting steps, from the oldest to the
 * youngest. `scan` is the number of the pass: it is the same in all calls of a pass, and new in each pass. A caller
 * that will not let its step wait passes 0 in `scan`, but only if no other step waits.
 *
 * Errors: NOT_FOUND, TOO_LARGE (for the pool or the account's share), FULL, QUOTA, NO_MEMORY, BUSY (a row needs a
 * larger table than caches_table_bytes() said). */
attn_status caches_begin(struct cache_step *step, uint64_t scan, void *memory, bool *wait, attn_error *err);
/* Sets *wait as caches_begin() does, but does not begin the step (a cache transaction). The function is fast, so it can
 * be called for many waiting steps. */
attn_status caches_ask(struct cache_step *step, uint64_t scan, bool *wait, attn_error *err);
/* Ends a step (a cache transaction) when the device is done. If `commit` is true, its caches keep the new positions.
 * Otherwise they are as they were before the step. Does nothing if the step has not begun. */
void caches_end(struct cache_step *step, bool commit);
/* frees the memory of a step (a cache transaction), which must have ended */
void caches_drop_step(struct cache_step *step);

#endif
