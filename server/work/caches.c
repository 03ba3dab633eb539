/* caches.c: see caches.h.
 *
 * Invariants, all under the lock:
 * 1. pages[0 .. count) of a cache are its own references; count is length rounded up to pages, but for the part of a step that
 * has begun.
 * 2. users counts the steps that have begun on a cache and not ended; writing: one of them appends, and is the only one. What a
 * step reads does not change before it ends: truncate waits in `truncate_to`, delete in `dead`, and both happen when the
 * last of them ends.
 * 3. A step that has begun has memory for everything that its end does: the end cannot fail.
 * 4. What a page costs is charged to its caller once, when it is taken, until its last reference is dropped: caches that
 * share pages belong to one caller. */
#include "server/work/caches.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/work/pages.h"

enum { PROCESS_BYTES = 4, KEY_BYTES = CACHE_ID_CHARS / 2, BUCKETS = 1 << 12, ALIGNMENT = 64 };

struct pool {
    struct pages *pages;
    const char *device;
};

struct cache {
    uint8_t key[KEY_BYTES];
    struct cache *chain;         /* in its bucket */
    struct cache *older, *newer; /* of all caches */
    struct caller *caller;       /* a reference */
    struct cache_shape shape;
    float *k_scale, *v_scale; /* [kv_heads], or NULL */
    int pool;
    size_t page_bytes;
    int32_t run; /* granules of a page */
    int64_t length;
    int32_t *pages;
    int64_t count, room;
    int64_t ttl_ms, used_ms;
    int users;
    bool writing, dead;
    int64_t truncate_to; /* -1: nothing waits */
    uint64_t wanted;     /* the last scan in which a step waited for it */
    uint64_t looked;     /* the last caches_look() that named it */
};

struct caches {
    pthread_mutex_t lock;
    uint8_t process[PROCESS_BYTES]; /* how the ids of this process begin */
    int max_count, count;
    int64_t expired, lost_ids;
    uint64_t looks;
    struct pool pools[CONFIG_MAX_DEVICES];
    struct cache *buckets[BUCKETS];
    struct cache *oldest, *newest;
    struct cache *looked_at; /* where caches_expire() goes on; NULL: at the oldest */
};

/* What a step does to one of its caches. */
struct cache_row {
    struct cache *cache;
    int64_t before;   /* its length */
    int64_t first;    /* the page from which on its pages become `pages` */
    int64_t count;    /* of those */
    int32_t *pages;   /* of the step */
    bool copied;      /* pages[0] replaces a page that is shared */
};

/* ---- Ids --------------------------------------------------------------------------------------------------------- */

static bool parse_id(const char *id, uint8_t key[KEY_BYTES])
{
    for (int i = 0; i < CACHE_ID_CHARS; i++) {
        static const char digits[] = "0123456789abcdef";
        const char *const at = id[i] ? strchr(digits, id[i]) : NULL;
        if (at == NULL) return false;
        key[i / 2] = (uint8_t)(key[i / 2] << 4 | (at - digits));
    }
    return id[CACHE_ID_CHARS] == '\0';
}

static void write_id(const struct cache *cache, char id[CACHE_ID_BYTES])
{
    for (int i = 0; i < KEY_BYTES; i++) snprintf(id + 2 * i, 3, "%02x", cache->key[i]);
}

static struct cache **bucket_of(struct caches *caches, const uint8_t key[KEY_BYTES])
{
    uint32_t random;
    memcpy(&random, key + PROCESS_BYTES, sizeof random);
    return &caches->buckets[random % BUCKETS];
}

static bool is_expired(const struct cache *cache, int64_t now_ms)
{
    return cache->users == 0 && now_ms - cache->used_ms >= cache->ttl_ms;
}

/* The cache of this id that this caller may use; NULL with the reason in *err. */
static struct cache *find(struct caches *caches, const struct caller *caller, const char *id, const char *member,
                          const char *what, attn_error *err)
{
    uint8_t key[KEY_BYTES] = { 0 };
    if (parse_id(id, key)) {
        struct cache *cache = *bucket_of(caches, key);
        while (cache && memcmp(cache->key, key, KEY_BYTES) != 0) cache = cache->chain;
        if (cache && cache->caller == caller && !is_expired(cache, clock_ms())) return cache;
        if (memcmp(key, caches->process, PROCESS_BYTES) != 0) {
            caches->lost_ids++;
            attn_fail(err, ATTN_NOT_FOUND, member,
                      "%s: was made by another process of attnd, before a restart or elsewhere, and its keys and values are "
                      "not here; create it again",
                      what);
            return NULL;
        }
    }
    attn_fail(err, ATTN_NOT_FOUND, member, "%s: is unknown, deleted or expired; POST /v1/caches makes one", what);
    return NULL;
}

/* ---- Open and close ---------------------------------------------------------------------------------------------- */

struct caches *caches_new(int max_count)
{
    struct caches *caches = calloc(1, sizeof *caches);
    if (caches == NULL) return NULL;
    if (getrandom(caches->process, PROCESS_BYTES, 0) != PROCESS_BYTES) {
        free(caches);
        return NULL;
    }
    pthread_mutex_init(&caches->lock, NULL);
    caches->max_count = max_count;
    return caches;
}

attn_status caches_add_pool(struct caches *caches, int device, const char *name, void *memory, size_t bytes,
                            attn_error *err)
{
    assert(device >= 0 && device < CONFIG_MAX_DEVICES && caches->pools[device].pages == NULL);
    struct pages *pages = pages_new(memory, bytes, pages_granule_for(bytes));
    if (pages == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "--kv-bytes: no memory to keep account of pages");
    caches->pools[device] = (struct pool){ pages, name };
    return ATTN_OK;
}

/* ---- Pages of a cache -------------------------------------------------------------------------------------------- */

static struct pages *pages_of(const struct caches *caches, const struct cache *cache)
{
    return caches->pools[cache->pool].pages;
}

static int64_t pages_for(const struct cache *cache, int64_t length)
{
    return length / cache->shape.page_size + (length % cache->shape.page_size != 0);
}

static int64_t run_bytes(const struct caches *caches, const struct cache *cache)
{
    return (int64_t)cache->run * (int64_t)pages_granule(pages_of(caches, cache));
}

static void drop_page(struct caches *caches, struct cache *cache, int32_t page)
{
    if (pages_drop(pages_of(caches, cache), page, cache->run)) cache->caller->cache_bytes -= run_bytes(caches, cache);
    assert(cache->caller->cache_bytes >= 0);
}

static bool may_hold(const struct caches *caches, const struct cache *cache, int64_t more)
{
    const int64_t bytes = (int64_t)pages_bytes(pages_of(caches, cache)), share = caller_share(cache->caller, bytes);
    return share >= bytes || cache->caller->cache_bytes + more <= share;
}

static void keep_first(struct caches *caches, struct cache *cache, int64_t length)
{
    const int64_t count = pages_for(cache, length);
    while (cache->count > count) drop_page(caches, cache, cache->pages[--cache->count]);
    cache->length = length;
}

/* Room for `count` pages in all. */
static bool reserve(struct cache *cache, int64_t count)
{
    if (count <= cache->room) return true;
    const int64_t room = count + count / 2 + 8;
    int32_t *pages = realloc(cache->pages, (size_t)room * sizeof *pages);
    if (pages == NULL) return false;
    cache->pages = pages;
    cache->room = room;
    return true;
}

/* ---- The table of caches ----------------------------------------------------------------------------------------- */

static void link_in(struct caches *caches, struct cache *cache)
{
    struct cache **bucket = bucket_of(caches, cache->key);
    cache->chain = *bucket;
    *bucket = cache;
    cache->older = caches->newest;
    *(caches->newest ? &caches->newest->newer : &caches->oldest) = cache;
    caches->newest = cache;
    caches->count++;
    cache->caller->caches++;
}

/* Nobody finds it from now on. */
static void link_out(struct caches *caches, struct cache *cache)
{
    struct cache **at = bucket_of(caches, cache->key);
    while (*at != cache) at = &(*at)->chain;
    *at = cache->chain;
    if (caches->looked_at == cache) caches->looked_at = cache->newer;
    *(cache->older ? &cache->older->newer : &caches->oldest) = cache->newer;
    *(cache->newer ? &cache->newer->older : &caches->newest) = cache->older;
    caches->count--;
    cache->caller->caches--;
}

static void cache_free(struct cache *cache)
{
    assert(cache->count == 0);
    caller_release(cache->caller);
    free(cache->k_scale);
    free(cache->v_scale);
    free(cache->pages);
    free(cache);
}

/* It is found by nobody, and its pages are free when the last step on it has ended. */
static void bury(struct caches *caches, struct cache *cache)
{
    if (!cache->dead) link_out(caches, cache);
    cache->dead = true;
    if (cache->users > 0) return;
    keep_first(caches, cache, 0);
    cache_free(cache);
}

void caches_free(struct caches *caches)
{
    if (caches == NULL) return;
    while (caches->oldest) {
        assert(caches->oldest->users == 0);
        bury(caches, caches->oldest);
    }
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) pages_free(caches->pools[i].pages);
    pthread_mutex_destroy(&caches->lock);
    free(caches);
}

static void expire_all(struct caches *caches, int64_t now_ms)
{
    for (struct cache *cache = caches->oldest, *next; cache; cache = next) {
        next = cache->newer;
        if (!is_expired(cache, now_ms)) continue;
        caches->expired++;
        bury(caches, cache);
    }
}

void caches_expire(struct caches *caches, int64_t now_ms)
{
    pthread_mutex_lock(&caches->lock);
    struct cache *cache = caches->looked_at ? caches->looked_at : caches->oldest;
    caches->looked_at = NULL;
    for (int i = 0; cache && i < CACHES_EXPIRE_LOOKS; i++) {
        struct cache *const next = cache->newer;
        if (is_expired(cache, now_ms)) {
            caches->expired++;
            bury(caches, cache);
        }
        cache = next;
    }
    caches->looked_at = cache;
    pthread_mutex_unlock(&caches->lock);
}

static void describe(const struct caches *caches, const struct cache *cache, struct cache_info *info)
{
    const int64_t left = cache->used_ms + cache->ttl_ms - clock_ms();
    *info = (struct cache_info){ .shape = cache->shape,
                                 .length = cache->truncate_to >= 0 ? cache->truncate_to : cache->length,
                                 .pages = cache->count,
                                 .page_bytes = run_bytes(caches, cache),
                                 .ttl_ms = cache->ttl_ms,
                                 .expires_in_ms = cache->users > 0 ? cache->ttl_ms : left > 0 ? left : 0,
                                 .device = caches->pools[cache->pool].device };
    for (int64_t i = 0; i < cache->count; i++) info->shared_pages += pages_is_shared(pages_of(caches, cache), cache->pages[i]);
    write_id(cache, info->id);
}

/* ---- Create, look at, fork, shorten, delete ---------------------------------------------------------------------- */

/* Does the caller have room for one more cache? */
static attn_status admit(struct caches *caches, const struct caller *caller, attn_error *err)
{
    const int share = (int)caller_share(caller, caches->max_count);
    if (caches->count >= caches->max_count) expire_all(caches, clock_ms());
    if (caches->count >= caches->max_count)
        return attn_fail(err, ATTN_FULL, NULL, "there are %d caches already, the most that this server keeps",
                         caches->max_count);
    if (share < caches->max_count && caller->caches >= share)
        return attn_fail(err, ATTN_QUOTA, NULL, "this token has %d caches already (--token-share)", share);
    return ATTN_OK;
}

static struct cache *new_cache(struct caches *caches, struct caller *caller, attn_error *err)
{
    struct cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) {
        attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
        return NULL;
    }
    memcpy(cache->key, caches->process, PROCESS_BYTES);
    if (getrandom(cache->key + PROCESS_BYTES, KEY_BYTES - PROCESS_BYTES, 0) != KEY_BYTES - PROCESS_BYTES) {
        attn_fail(err, ATTN_INTERNAL, NULL, "the system gave no random bytes");
        free(cache);
        return NULL;
    }
    cache->caller = caller_hold(caller);
    cache->truncate_to = -1;
    return cache;
}

static bool copy_scale(float **to, const float *from, int64_t heads)
{
    if (from == NULL) return true;
    *to = malloc((size_t)heads * sizeof **to);
    if (*to) memcpy(*to, from, (size_t)heads * sizeof **to);
    return *to != NULL;
}

static attn_status check_shape(const struct cache_shape *shape, attn_error *err)
{
    const struct {
        const char *name;
        int64_t value, most;
    } sizes[] = { { "kv_heads", shape->kv_heads, CACHES_HEADS },
                  { "head_dim", shape->head_dim, ATTN_MAX_HEAD_DIM },
                  { "head_dim_v", shape->head_dim_v, ATTN_MAX_HEAD_DIM } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char member[32];
        snprintf(member, sizeof member, "/%s", sizes[i].name);
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].most)
            return attn_fail(err, ATTN_INVALID, member, "%s: is %lld, must be from 1 to %lld", sizes[i].name,
                             (long long)sizes[i].value, (long long)sizes[i].most);
    }
    if (shape->latent && shape->head_dim_v > shape->head_dim)
        return attn_fail(err, ATTN_INVALID, "/head_dim_v",
                         "head_dim_v: is %lld, with latent it must be at most head_dim, which is %lld",
                         (long long)shape->head_dim_v, (long long)shape->head_dim);
    if (!(ATTN_DTYPES_FORWARD >> shape->dtype & 1)) {
        char list[ATTN_DTYPE_LIST_BYTES];
        return attn_fail(err, ATTN_INVALID, "/dtype", "dtype: is %s, must be %s", attn_dtype_name(shape->dtype),
                         attn_dtype_list(ATTN_DTYPES_FORWARD, list));
    }
    if (shape->page_size != 64 && shape->page_size != 128)
        return attn_fail(err, ATTN_INVALID, "/page_size", "page_size: is %d, must be 64 or 128", shape->page_size);
    return ATTN_OK;
}

static size_t shape_page_bytes(const struct cache_shape *shape)
{
    const int64_t columns = shape->head_dim + (shape->latent ? 0 : shape->head_dim_v);
    return (size_t)(shape->page_size * shape->kv_heads * columns) * attn_dtype_bytes(shape->dtype);
}

/* The pool with the most room; -1: there is none at all. */
static int roomiest(const struct caches *caches)
{
    int best = -1;
    size_t most = 0;
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) {
        const struct pages *const pages = caches->pools[i].pages;
        const size_t room = pages ? pages_bytes(pages) - pages_used(pages) : 0;
        if (pages && (best < 0 || room > most)) best = i, most = room;
    }
    return best;
}

static attn_status create(struct caches *caches, struct caller *caller, const struct cache_shape *shape,
                          const float *k_scale, const float *v_scale, int64_t ttl_ms, struct cache_info *info,
                          attn_error *err)
{
    attn_status status = admit(caches, caller, err);
    const int pool = roomiest(caches);
    const size_t page_bytes = shape_page_bytes(shape);
    if (status != ATTN_OK) return status;
    if (pool < 0) return attn_fail(err, ATTN_FULL, NULL, "this server keeps no caches (--kv-bytes 0)");
    const int32_t run = pages_run(caches->pools[pool].pages, page_bytes);
    if (run == 0)
        return attn_fail(err, ATTN_TOO_LARGE, NULL, "a page of %d positions takes %zu bytes, the pool has %zu (--kv-bytes)",
                         shape->page_size, page_bytes, pages_bytes(caches->pools[pool].pages));
    struct cache *cache = new_cache(caches, caller, err);
    if (cache == NULL) return err ? err->status : ATTN_NO_MEMORY;
    cache->shape = *shape;
    cache->pool = pool;
    cache->page_bytes = page_bytes;
    cache->run = run;
    cache->ttl_ms = ttl_ms;
    cache->used_ms = clock_ms();
    if (!copy_scale(&cache->k_scale, k_scale, shape->kv_heads) || !copy_scale(&cache->v_scale, v_scale, shape->kv_heads)) {
        cache_free(cache);
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    }
    link_in(caches, cache);
    describe(caches, cache, info);
    return ATTN_OK;
}

attn_status caches_create(struct caches *caches, struct caller *caller, const struct cache_shape *shape,
                          const float *k_scale, const float *v_scale, int64_t ttl_ms, struct cache_info *info,
                          attn_error *err)
{
    attn_status status = check_shape(shape, err);
    if (status != ATTN_OK) return status;
    pthread_mutex_lock(&caches->lock);
    status = create(caches, caller, shape, k_scale, v_scale, ttl_ms, info, err);
    pthread_mutex_unlock(&caches->lock);
    return status;
}

attn_status caches_get(struct caches *caches, const struct caller *caller, const char *id, struct cache_info *info,
                       attn_error *err)
{
    pthread_mutex_lock(&caches->lock);
    const struct cache *cache = find(caches, caller, id, "", "this cache", err);
    if (cache) describe(caches, cache, info);
    pthread_mutex_unlock(&caches->lock);
    return cache ? ATTN_OK : ATTN_NOT_FOUND;
}

void caches_list(struct caches *caches, const struct caller *caller, struct cache_info *infos, int room, int *written,
                 int *count)
{
    const int64_t now_ms = clock_ms();
    *written = *count = 0;
    pthread_mutex_lock(&caches->lock);
    for (const struct cache *cache = caches->oldest; cache; cache = cache->newer) {
        if (cache->caller != caller || is_expired(cache, now_ms)) continue;
        if (*written < room) describe(caches, cache, &infos[(*written)++]);
        ++*count;
    }
    pthread_mutex_unlock(&caches->lock);
}

static attn_status check_length(int64_t length, int64_t most, attn_error *err)
{
    if (length <= most) return ATTN_OK;
    return attn_fail(err, ATTN_INVALID, "/length", "length: is %lld, the cache has %lld positions", (long long)length,
                     (long long)most);
}

static attn_status fork_of(struct caches *caches, const struct cache *from, struct caller *caller, int64_t length,
                           struct cache_info *info, attn_error *err)
{
    const int64_t has = from->truncate_to >= 0 ? from->truncate_to : from->length;
    if (length < 0) length = has;
    attn_status status = check_length(length, has, err);
    if (status == ATTN_OK) status = admit(caches, caller, err);
    if (status != ATTN_OK) return status;
    struct cache *cache = new_cache(caches, caller, err);
    if (cache == NULL) return err ? err->status : ATTN_NO_MEMORY;
    cache->shape = from->shape;
    cache->pool = from->pool;
    cache->page_bytes = from->page_bytes;
    cache->run = from->run;
    cache->ttl_ms = from->ttl_ms;
    cache->used_ms = clock_ms();
    const int64_t count = pages_for(from, length);
    if (!reserve(cache, count) || !copy_scale(&cache->k_scale, from->k_scale, from->shape.kv_heads) ||
        !copy_scale(&cache->v_scale, from->v_scale, from->shape.kv_heads)) {
        cache_free(cache);
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    }
    for (int64_t i = 0; i < count; i++) {
        cache->pages[i] = from->pages[i];
        pages_hold(pages_of(caches, cache), cache->pages[i]);
    }
    cache->count = count;
    cache->length = length;
    link_in(caches, cache);
    describe(caches, cache, info);
    return ATTN_OK;
}

attn_status caches_fork(struct caches *caches, struct caller *caller, const char *id, int64_t length,
                        struct cache_info *info, attn_error *err)
{
    attn_status status = ATTN_NOT_FOUND;
    pthread_mutex_lock(&caches->lock);
    struct cache *from = find(caches, caller, id, "", "this cache", err);
    if (from) {
        from->used_ms = clock_ms(); /* before admit(), which may forget what has expired */
        status = fork_of(caches, from, caller, length, info, err);
    }
    pthread_mutex_unlock(&caches->lock);
    return status;
}

attn_status caches_truncate(struct caches *caches, const struct caller *caller, const char *id, int64_t length,
                            struct cache_info *info, attn_error *err)
{
    attn_status status = ATTN_NOT_FOUND;
    pthread_mutex_lock(&caches->lock);
    struct cache *cache = find(caches, caller, id, "", "this cache", err);
    if (cache) {
        status = check_length(length, cache->truncate_to >= 0 ? cache->truncate_to : cache->length, err);
        cache->used_ms = clock_ms();
        if (status == ATTN_OK && cache->users > 0) cache->truncate_to = length;
        else if (status == ATTN_OK) keep_first(caches, cache, length);
        if (status == ATTN_OK) describe(caches, cache, info);
    }
    pthread_mutex_unlock(&caches->lock);
    return status;
}

attn_status caches_delete(struct caches *caches, const struct caller *caller, const char *id, attn_error *err)
{
    pthread_mutex_lock(&caches->lock);
    struct cache *cache = find(caches, caller, id, "", "this cache", err);
    if (cache) bury(caches, cache);
    pthread_mutex_unlock(&caches->lock);
    return cache ? ATTN_OK : ATTN_NOT_FOUND;
}

void caches_totals(struct caches *caches, struct caches_totals *totals)
{
    pthread_mutex_lock(&caches->lock);
    *totals = (struct caches_totals){ .caches = caches->count, .expired = caches->expired, .lost_ids = caches->lost_ids };
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) {
        const struct pages *const pages = caches->pools[i].pages;
        if (pages == NULL) continue;
        totals->pages += pages_count(pages);
        totals->shared_pages += pages_shared(pages);
        totals->used_bytes += (int64_t)pages_used(pages);
        totals->bytes += (int64_t)pages_bytes(pages);
    }
    pthread_mutex_unlock(&caches->lock);
}

/* ---- Steps: look ------------------------------------------------------------------------------------------------- */

static bool same_shape(const struct cache_shape *a, const struct cache_shape *b)
{
    return a->kv_heads == b->kv_heads && a->head_dim == b->head_dim && a->head_dim_v == b->head_dim_v &&
           a->dtype == b->dtype && a->latent == b->latent && a->page_size == b->page_size;
}

static const char *shape_text(const struct cache_shape *shape, char text[96])
{
    snprintf(text, 96, "kv_heads %lld, head_dim %lld, head_dim_v %lld, %s%s, page_size %d", (long long)shape->kv_heads,
             (long long)shape->head_dim, (long long)shape->head_dim_v, attn_dtype_name(shape->dtype),
             shape->latent ? ", latent" : "", shape->page_size);
    return text;
}

/* The cache of a row, or why there is none. */
static struct cache *find_row(const struct cache_step *step, int row, attn_error *err)
{
    char member[32], what[32];
    snprintf(member, sizeof member, "/caches/%d", row);
    snprintf(what, sizeof what, "caches: [%d]", row);
    return find(step->caches, step->caller, step->ids[row], member, what, err);
}

/* Does row `row` go with row 0? */
static attn_status goes_along(const struct cache_step *step, const struct cache *first, const struct cache *cache, int row,
                              attn_error *err)
{
    char member[32], one[96], other[96];
    snprintf(member, sizeof member, "/caches/%d", row);
    if (!same_shape(&first->shape, &cache->shape))
        return attn_fail(err, ATTN_INVALID, member, "caches: [%d] has %s, [0] has %s; one request takes caches of one shape",
                         row, shape_text(&cache->shape, one), shape_text(&first->shape, other));
    if (cache->pool != first->pool)
        return attn_fail(err, ATTN_INVALID, member,
                         "caches: [%d] is on %s, [0] is on %s; one request takes caches of one device (a fork is where its "
                         "origin is)",
                         row, step->caches->pools[cache->pool].device, step->caches->pools[first->pool].device);
    if ((cache->k_scale == NULL) != (first->k_scale == NULL) || (cache->v_scale == NULL) != (first->v_scale == NULL))
        return attn_fail(err, ATTN_INVALID, member, "caches: [%d] and [0] must both have k_scale and v_scale, or neither",
                         row);
    return ATTN_OK;
}

/* Appending to one cache twice: which would be first? */
static attn_status twice(const struct cache_step *step, int row, attn_error *err)
{
    char member[32];
    int before = 0;
    while (memcmp(step->ids[row], step->ids[before], CACHE_ID_CHARS) != 0) before++;
    snprintf(member, sizeof member, "/caches/%d", row);
    return attn_fail(err, ATTN_INVALID, member, "caches: [%d] is [%d] again, and k and v are appended to each; fork it first",
                     row, before);
}

static void copy_scales(const struct cache *cache, int row, float *k_scale, float *v_scale)
{
    const size_t heads = (size_t)cache->shape.kv_heads, bytes = heads * sizeof *k_scale;
    if (k_scale) memcpy(k_scale + (size_t)row * heads, cache->k_scale, bytes);
    if (v_scale) memcpy(v_scale + (size_t)row * heads, cache->v_scale, bytes);
}

static attn_status look(struct cache_step *step, attn_error *err)
{
    struct cache *first = NULL;
    const uint64_t number = ++step->caches->looks;
    for (int row = 0; row < step->rows; row++) {
        struct cache *cache = find_row(step, row, err);
        if (cache == NULL) return ATTN_NOT_FOUND;
        if (step->append > 0 && cache->looked == number) return twice(step, row, err);
        cache->looked = number;
        if (first == NULL) first = cache;
        const attn_status status = goes_along(step, first, cache, row, err);
        if (status != ATTN_OK) return status;
        int64_t length;
        if (__builtin_add_overflow(cache->length, step->append, &length) || length > INT32_MAX - CACHES_STEP_PAGES)
            return attn_fail(err, ATTN_TOO_LARGE, "/k/shape", "k: %lld positions more are longer than a cache can be",
                             (long long)step->append);
        step->lengths[row] = (int32_t)length;
        const int64_t pages = pages_for(cache, length);
        if (pages > step->most) step->most = pages;
        cache->used_ms = clock_ms();
    }
    if (step->most * step->rows > CACHES_STEP_PAGES)
        return attn_fail(err, ATTN_TOO_LARGE, "/caches", "caches: %d rows of up to %lld pages, at most %d are taken at once",
                         step->rows, (long long)step->most, CACHES_STEP_PAGES);
    step->shape = first->shape;
    step->device = first->pool;
    step->pool = pages_base(step->caches->pools[first->pool].pages);
    step->granule = pages_granule(step->caches->pools[first->pool].pages);
    step->k_scaled = first->k_scale != NULL;
    step->v_scaled = first->v_scale != NULL;
    const int64_t row_bytes = step->append * step->shape.kv_heads * (int64_t)attn_dtype_bytes(step->shape.dtype);
    step->k_row_bytes = row_bytes * step->shape.head_dim;
    step->v_row_bytes = step->shape.latent ? 0 : row_bytes * step->shape.head_dim_v;
    return ATTN_OK;
}

attn_status caches_look(struct caches *caches, struct caller *caller, char (*ids)[CACHE_ID_BYTES], int rows,
                        int64_t append, struct cache_step *step, attn_error *err)
{
    *step = (struct cache_step){ .caches = caches, .caller = caller, .ids = ids, .rows = rows, .append = append };
    assert(rows > 0 && rows <= CACHES_ROWS && append >= 0);
    step->lengths = calloc((size_t)rows, sizeof *step->lengths);
    step->row = calloc((size_t)rows, sizeof *step->row);
    if (step->lengths == NULL || step->row == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    pthread_mutex_lock(&caches->lock);
    const attn_status status = look(step, err);
    pthread_mutex_unlock(&caches->lock);
    return status;
}

/* ---- Steps: begin ------------------------------------------------------------------------------------------------ */

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

size_t caches_table_bytes(struct cache_step *step)
{
    struct caches *const caches = step->caches;
    const size_t rows = (size_t)step->rows, scale = rows * (size_t)step->shape.kv_heads * sizeof(float);
    int64_t most = 0;
    pthread_mutex_lock(&caches->lock);
    for (int row = 0; row < step->rows; row++) {
        const struct cache *cache = find_row(step, row, NULL);
        const int64_t pages = cache ? pages_for(cache, cache->length + step->append) : 0;
        if (pages > most) most = pages;
    }
    pthread_mutex_unlock(&caches->lock);
    step->most = most > 0 ? most : 1;
    return aligned(rows * (size_t)step->most * sizeof(int32_t)) + aligned(rows * sizeof(int32_t)) +
           (step->k_scaled ? aligned(scale) : 0) + (step->v_scaled ? aligned(scale) : 0);
}

/* Where each table lies in `memory`. */
static void place_tables(struct cache_step *step, char *memory)
{
    const size_t rows = (size_t)step->rows, scale = rows * (size_t)step->shape.kv_heads * sizeof(float);
    step->table = (int32_t *)memory;
    memory += aligned(rows * (size_t)step->most * sizeof(int32_t));
    step->table_lengths = (int32_t *)memory;
    memory += aligned(rows * sizeof(int32_t));
    step->k_scale = step->k_scaled ? (float *)memory : NULL;
    if (step->k_scaled) memory += aligned(scale);
    step->v_scale = step->v_scaled ? (float *)memory : NULL;
}

/* Pages for what a row gains. What was taken stays in the row, for the end to drop, whatever this returns. */
static attn_status take_pages(struct cache_step *step, int index, attn_error *err)
{
    struct caches *const caches = step->caches;
    struct cache_row *const row = &step->row[index];
    struct cache *const cache = row->cache;
    struct pages *const pages = pages_of(caches, cache);
    const int64_t after = pages_for(cache, row->before + step->append);
    const bool partial = row->before % cache->shape.page_size != 0;
    row->copied = partial && pages_is_shared(pages, cache->pages[cache->count - 1]);
    row->first = cache->count - row->copied;
    row->count = 0;
    row->pages = malloc((size_t)(after - row->first + 1) * sizeof *row->pages);
    if (row->pages == NULL || !reserve(cache, after)) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    for (int64_t i = row->first; i < after; i++) {
        if (!may_hold(caches, cache, run_bytes(caches, cache)))
            return attn_fail(err, ATTN_QUOTA, NULL, "this token's caches hold %lld bytes of pages already (--token-share)",
                             (long long)cache->caller->cache_bytes);
        int32_t page = pages_take(pages, cache->run);
        if (page < 0) {
            expire_all(caches, clock_ms());
            page = pages_take(pages, cache->run);
        }
        if (page < 0)
            return attn_fail(err, ATTN_FULL, NULL,
                             "the pool of %s is full: %zu of %zu bytes are in pages (--kv-bytes), and a page takes %lld; delete "
                             "or truncate caches",
                             caches->pools[cache->pool].device, pages_used(pages), pages_bytes(pages),
                             (long long)run_bytes(caches, cache));
        cache->caller->cache_bytes += run_bytes(caches, cache);
        row->pages[row->count++] = page;
    }
    return ATTN_OK;
}

static char *page_at(const struct cache_step *step, int32_t page)
{
    return (char *)step->pool + (size_t)page * step->granule;
}

static void add_move(struct cache_step *step, void *to, const void *from, int64_t bytes)
{
    if (bytes > 0) step->moves[step->move_count++] = (attn_move){ to, from, (size_t)bytes };
}

/* One part of a page (its keys, or its values) of which positions [0, kept) were there, [kept, end) are new and the others
 * cleared. `old`: where the kept ones are copied from, NULL: they are there. `fresh`: nothing is. */
static void fill_part(struct cache_step *step, char *part, const char *old, bool fresh, const char *rows, int64_t kept,
                      int64_t end, int64_t position_bytes)
{
    if (old) add_move(step, part, old, kept * position_bytes);
    add_move(step, part + kept * position_bytes, rows, (end - kept) * position_bytes);
    if (fresh) add_move(step, part + end * position_bytes, NULL, (step->shape.page_size - end) * position_bytes);
}

/* The moves of one row: its new positions, page by page. */
static void plan_moves(struct cache_step *step, int index)
{
    const struct cache_row *const row = &step->row[index];
    const struct cache *const cache = row->cache;
    const int64_t page_size = step->shape.page_size, element = (int64_t)attn_dtype_bytes(step->shape.dtype);
    const int64_t k_bytes = step->shape.kv_heads * step->shape.head_dim * element;
    const int64_t v_bytes = step->shape.kv_heads * step->shape.head_dim_v * element;
    const char *const k = step->k + index * step->k_row_bytes;
    const char *const v = step->v ? step->v + index * step->v_row_bytes : NULL;
    for (int64_t at = row->before; at < row->before + step->append;) {
        const int64_t number = at / page_size, kept = at % page_size, done = at - row->before;
        const int64_t end = kept + (step->append - done) < page_size ? kept + (step->append - done) : page_size;
        const bool fresh = number >= row->first;
        const char *const old = row->copied && number == row->first ? page_at(step, cache->pages[number]) : NULL;
        char *const page = page_at(step, fresh ? row->pages[number - row->first] : cache->pages[number]);
        fill_part(step, page, old, fresh, k + done * k_bytes, kept, end, k_bytes);
        if (v)
            fill_part(step, page + page_size * k_bytes, old ? old + page_size * k_bytes : NULL, fresh, v + done * v_bytes,
                      kept, end, v_bytes);
        at += end - kept;
    }
}

static void write_table(struct cache_step *step, int index)
{
    const struct cache_row *const row = &step->row[index];
    const struct cache *const cache = row->cache;
    int32_t *const table = step->table + (int64_t)index * step->most;
    const int64_t old = step->append > 0 ? row->first : cache->count;
    memcpy(table, cache->pages, (size_t)old * sizeof *table);
    if (row->count > 0) memcpy(table + old, row->pages, (size_t)row->count * sizeof *table);
    for (int64_t i = old + row->count; i < step->most; i++) table[i] = 0;
    step->lengths[index] = (int32_t)(row->before + step->append);
    step->table_lengths[index] = step->lengths[index];
    copy_scales(cache, index, step->k_scale, step->v_scale);
}

/* Is another step on one of them, or does an older one wait for one? */
static bool is_blocked(const struct cache_step *step, uint64_t scan)
{
    for (int row = 0; row < step->rows; row++) {
        const struct cache *cache = step->row[row].cache;
        if (cache->wanted == scan || cache->writing || (step->append > 0 && cache->users > 0) || cache->truncate_to >= 0)
            return true;
    }
    return false;
}

/* What a step had taken goes back. */
static void give_back(struct cache_step *step)
{
    for (int row = 0; row < step->rows; row++) {
        struct cache_row *const r = &step->row[row];
        for (int64_t i = 0; i < r->count; i++) drop_page(step->caches, r->cache, r->pages[i]);
        free(r->pages);
        *r = (struct cache_row){ 0 };
    }
}

static attn_status begin(struct cache_step *step, uint64_t scan, char *memory, bool *wait, attn_error *err)
{
    int64_t moves = 0;
    *wait = false;
    for (int row = 0; row < step->rows; row++) {
        struct cache *cache = find_row(step, row, err);
        if (cache == NULL) return ATTN_NOT_FOUND;
        step->row[row] = (struct cache_row){ .cache = cache, .before = cache->length };
    }
    if (is_blocked(step, scan)) {
        for (int row = 0; row < step->rows; row++) step->row[row].cache->wanted = scan;
        *wait = true;
        return ATTN_OK;
    }
    for (int row = 0; row < step->rows; row++) {
        const int64_t pages = pages_for(step->row[row].cache, step->row[row].before + step->append);
        if (pages > step->most) /* another step has made it longer since the table was made */
            return attn_fail(err, ATTN_BUSY, NULL, "caches: [%d] has grown meanwhile", row);
        moves += 6 * (pages - step->row[row].before / step->shape.page_size + 1);
    }
    if (step->append > 0) {
        step->moves = malloc((size_t)moves * sizeof *step->moves);
        if (step->moves == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    }
    for (int row = 0; row < step->rows && step->append > 0; row++) step->row[row].cache->users++; /* not to expire */
    attn_status status = ATTN_OK;
    for (int row = 0; row < step->rows && step->append > 0 && status == ATTN_OK; row++)
        status = take_pages(step, row, err);
    for (int row = 0; row < step->rows && step->append > 0; row++) step->row[row].cache->users--;
    if (status != ATTN_OK) {
        give_back(step);
        return status;
    }
    place_tables(step, memory);
    for (int row = 0; row < step->rows; row++) {
        if (step->append > 0) plan_moves(step, row);
        write_table(step, row);
        step->row[row].cache->users++;
        step->row[row].cache->writing = step->append > 0;
    }
    assert(step->move_count <= moves);
    step->begun = true;
    return ATTN_OK;
}

attn_status caches_begin(struct cache_step *step, uint64_t scan, void *memory, bool *wait, attn_error *err)
{
    assert(!step->begun);
    pthread_mutex_lock(&step->caches->lock);
    const attn_status status = begin(step, scan, memory, wait, err);
    pthread_mutex_unlock(&step->caches->lock);
    return status;
}

/* ---- Steps: end -------------------------------------------------------------------------------------------------- */

/* The row's pages become the cache's. */
static void commit_row(struct caches *caches, struct cache_row *row, int64_t append)
{
    struct cache *const cache = row->cache;
    if (append == 0) return;
    assert(cache->writing && cache->length == row->before && row->first + row->count <= cache->room);
    if (row->copied) drop_page(caches, cache, cache->pages[row->first]);
    memcpy(cache->pages + row->first, row->pages, (size_t)row->count * sizeof *row->pages);
    cache->count = row->first + row->count;
    cache->length = row->before + append;
    assert(cache->count == pages_for(cache, cache->length));
    row->count = 0; /* they are no longer the step's */
}

static void leave(struct caches *caches, struct cache *cache, int64_t now_ms)
{
    cache->users--;
    cache->writing = false;
    cache->used_ms = now_ms;
    if (cache->users > 0) return;
    if (cache->dead) {
        bury(caches, cache);
        return;
    }
    if (cache->truncate_to >= 0) keep_first(caches, cache, cache->truncate_to);
    cache->truncate_to = -1;
}

void caches_end(struct cache_step *step, bool commit)
{
    struct caches *const caches = step->caches;
    const int64_t now_ms = clock_ms();
    if (!step->begun) return;
    step->begun = false;
    pthread_mutex_lock(&caches->lock);
    for (int row = 0; row < step->rows; row++) {
        struct cache_row *const r = &step->row[row];
        if (commit) commit_row(caches, r, step->append);
        for (int64_t i = 0; i < r->count; i++) drop_page(caches, r->cache, r->pages[i]);
        free(r->pages);
        leave(caches, r->cache, now_ms);
        *r = (struct cache_row){ 0 };
    }
    pthread_mutex_unlock(&caches->lock);
}

void caches_drop_step(struct cache_step *step)
{
    assert(!step->begun);
    free(step->lengths);
    free(step->row);
    free(step->moves);
    *step = (struct cache_step){ 0 };
}
