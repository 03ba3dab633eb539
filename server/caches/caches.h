/* caches.h: keys and values that stay at the server between requests (/v1/caches): who has which, how long each is, and
 * what a step that reads or extends some of them has to do.
 *
 * A cache is a sequence of positions, each with Hk keys of D and Hk values of Dv numbers. They lie in pages of
 * page_size positions (caches/pages.h) in the memory of one device:
 *
 *   page:  | K: [page_size, Hk, D] | V: [page_size, Hk, Dv] |        latent: V is the first Dv columns of K
 *
 * A fork shares the pages of what it was made from; a shared page is copied before somebody writes to it. A page is
 * cleared before it is read, so nobody ever sees what its last owner left.
 *
 * A step is one request's work on its caches (decode, append):
 *
 *   caches_look()    HTTP thread     are they there, do they fit? What is planned is checked, nothing is held
 *   caches_begin()   who runs it     now: pages are taken, moves and page table are written. Later, while another step
 *                                    is on one of them; a step that appends is alone on its caches, others may share
 *   (the device does the moves and computes)
 *   caches_end()     the same        commit: the caches are longer; or not: they are as they were. All of them, or none
 *
 * What is asked of a cache meanwhile: get and fork see it as it was before the step; truncate and delete take effect
 * when the step has ended, and are answered at once.
 *
 * An id is 20 bytes in hexadecimal: 4 that this process drew when it started, so that an id of before a restart is
 * known as such, and 16 random ones. It belongs to the caller who made it;
 * to others there is no such cache. Thread-safe, one lock.
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

/* What all positions of a cache have in common. */
struct cache_shape {
    int64_t kv_heads, head_dim, head_dim_v;
    attn_dtype dtype;
    /* Values are the first head_dim_v numbers of the keys, and are not stored (Multi-head Latent Attention). */
    bool latent;
    int64_t page_size; /* positions */
};

struct cache_info {
    char id[CACHE_ID_BYTES];
    struct cache_shape shape;
    int64_t length; /* positions */
    int64_t pages, shared_pages;
    int64_t page_bytes;
    int64_t ttl_ms, expires_in_ms; /* since it was last used, and from now on */
    const char *device;
};

/* No pool yet. At most max_count caches. NULL when out of memory. */
struct caches *caches_new(int max_count);
void caches_free(struct caches *caches); /* NULL is fine. No step is under way */

/* There may be `bytes` of the memory of the device whose number in devices.h is `device`. They are asked for when its
 * first cache is made: alloc() sets *memory (64-byte aligned, stays the device's), on any thread, once.
 * Before the first request. */
struct caches_source {
    attn_status (*alloc)(void *context, size_t bytes, void **memory, attn_error *err);
    void *context;
};
void caches_add_pool(struct caches *caches, int device, const char *name, const struct caches_source *source,
                     size_t bytes);
/* Forgets the caches of callers who are known no more: nobody else can reach them.
 * Those of steps stay until these have ended. */
void caches_forget(struct caches *caches, bool (*is_known)(void *context, const struct caller *caller), void *context);
/* This device has failed: its caches are forgotten, and it gets no more.
 * Those of steps on it stay until these have ended. */
void caches_lose(struct caches *caches, int device);
/* What every device has given for caches at least: no request can have it. */
int64_t caches_held_bytes(struct caches *caches);

/* ---- Caches: any thread, no waiting ------------------------------------------------------------------------------ */

/* Errors: INVALID, UNSUPPORTED (sizes), TOO_LARGE (a page is more than the pool), QUOTA, FULL (no pool, or too many
 * caches). Scales may be NULL; else kv_heads of each, for float8_e4m3fn. */
attn_status caches_create(struct caches *caches, struct caller *caller, const struct cache_shape *shape,
                          const float *k_scale, const float *v_scale, int64_t ttl_ms, struct cache_info *info,
                          attn_error *err);
attn_status caches_get(struct caches *caches, const struct caller *caller, const char *id, struct cache_info *info,
                       attn_error *err);
/* Those of the caller, at most `room` of them, oldest first; *count says how many there are. */
void caches_list(struct caches *caches, const struct caller *caller, struct cache_info *infos, int room, int *written,
                 int *count);
/* A new cache of the first `length` positions (-1: all). */
attn_status caches_fork(struct caches *caches, struct caller *caller, const char *id, int64_t length,
                        struct cache_info *info, attn_error *err);
attn_status caches_truncate(struct caches *caches, const struct caller *caller, const char *id, int64_t length,
                            struct cache_info *info, attn_error *err);
attn_status caches_delete(struct caches *caches, const struct caller *caller, const char *id, attn_error *err);

/* The cache of a sequence, by the caller's own name for it (less than PROTO_SEQUENCE_BYTES). *id: of the one that there
 * is, or, to start it, of a new one in its place; shape NULL: not to start it. */
attn_status caches_sequence(struct caches *caches, struct caller *caller, const char *name,
                            const struct cache_shape *shape, char id[CACHE_ID_BYTES], attn_error *err);

/* Deletes the cache of a sequence, where there is one. */
void caches_end_sequence(struct caches *caches, const struct caller *caller, const char *name);

/* Forgets what nobody used for its time to live. */
void caches_expire(struct caches *caches, int64_t now_ms);

struct caches_totals {
    int64_t caches, pages, shared_pages, used_bytes, bytes;
    int64_t expired, lost_ids; /* since the start: caches that expired, ids of another process that were asked for */
};
void caches_totals(struct caches *caches, struct caches_totals *totals);

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

/* What a step is made of, from caches_look() until caches_drop_step(). */
struct cache_step {
    struct caches *caches;
    struct caller *caller;
    char (*ids)[CACHE_ID_BYTES]; /* [rows]: whoever made the step keeps them */
    int rows;
    int64_t append;    /* positions that each row gains; 0: none */
    bool of_path;      /* the one cache is named by the path, not by `caches`: errors say "this cache" */
    const char *k, *v; /* those, row by row, whoever made the step sets them before it begins; v NULL: latent */
    int64_t k_row_bytes, v_row_bytes; /* of one row of them */

    struct cache_shape shape; /* of all its caches */
    int device;               /* where they are */
    const char *pool;         /* address of page 0 there */
    size_t pool_bytes, page_bytes;
    size_t granule;          /* bytes from one page number to the next */
    bool k_scaled, v_scaled; /* they have scales */
    int64_t most;            /* pages of the longest row */
    int32_t *lengths;        /* [rows]: after the step; as it seems until it has begun */

    bool begun;
    int32_t *table;         /* [rows, most]: page numbers, in the memory that caches_begin() was given, as are: */
    int32_t *table_lengths; /* [rows]: the lengths again */
    int32_t
        *prefix_keys; /* [rows]: positions that lie in the same pages as those of the row before: see attn_problem */
    bool shares;      /* enough of them, in some row, that a device should look for it */
    float *k_scale, *v_scale; /* [rows, kv_heads], or NULL; until it has begun: in `scales` */
    attn_move *moves;         /* what the device does before it computes */
    int64_t move_count;
    bool ends;             /* a commit deletes its caches: a sequence ends */
    struct cache_row *row; /* caches.c's */
    uint64_t burials; /* caches->burials when row[].cache was found: those pointers are good while it is the same */
    float *scales;    /* of its own memory */
};

/* Makes a step: are they there, and do they go together? `rows` is at most CACHES_ROWS. Errors name the row: NOT_FOUND,
 * INVALID (shapes differ, devices differ, the same cache twice in a step that appends), TOO_LARGE. On an error too
 * caches_drop_step() is called. */
attn_status caches_look(struct caches *caches, struct caller *caller, char (*ids)[CACHE_ID_BYTES], int rows,
                        int64_t append, bool of_path, struct cache_step *step, attn_error *err);

/* How much memory its tables need now, 64-byte aligned. Sets step->most.
 * TOO_LARGE: its caches have grown too much meanwhile. */
attn_status caches_table_bytes(struct cache_step *step, size_t *bytes, attn_error *err);

/* *wait: not now, another step is on one of them (or an older one waits for one: `scan` is the number of this look at
 * all that wait, from the oldest on; 0: nobody waits, and nor will this one). Otherwise the step has begun, or this is
 * why it cannot: NOT_FOUND, TOO_LARGE (for the pool, or for the caller's share of all), FULL, QUOTA, NO_MEMORY, BUSY (a
 * row needs a larger table than caches_table_bytes() said). `memory` is for the tables. */
attn_status caches_begin(struct cache_step *step, uint64_t scan, void *memory, bool *wait, attn_error *err);
/* Whether it must wait, without beginning: cheap, for many may. */
attn_status caches_ask(struct cache_step *step, uint64_t scan, bool *wait, attn_error *err);
/* The device is done with it: the caches are longer, or as they were. A step that has not begun is left alone. */
void caches_end(struct cache_step *step, bool commit);
void caches_drop_step(struct cache_step *step); /* its own memory; it has ended */

#endif
