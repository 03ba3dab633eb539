/* table.c: the table of caches; see caches.h. Invariants, all under the lock:
 * 1. `users` counts the steps (transactions) on a cache that have begun and not ended. If `writing` is set, one step
 * appends, and no other step uses the cache. A truncation (`truncate_to`) or deletion (`dead`) is carried out when the
 * last step ends.
 * 2. A step that has begun has reserved all memory that its end needs, so the end cannot fail.
 * 3. A page is charged to one account, from its allocation until its last reference is dropped.
 * 4. While the memory of a pool is allocated, the lock is not held, and `opening` is set. All other work holds the lock
 * only for short times: a search of all caches for expired ones is needed only when caches or pages run out. */
#include "server/caches/internal.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/base/metrics.h"

/* ---- Ids of caches ----------------------------------------------------------------------------------------------- */

static void write_digits(const uint8_t *bytes, int count, char *text)
{
    for (int i = 0; i < count; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
}

static bool is_id(const char *id)
{
    return strlen(id) == CACHE_ID_CHARS && strspn(id, "0123456789abcdef") == CACHE_ID_CHARS;
}

static struct cache **bucket_of(struct caches *caches, const struct caller *caller, const char *id)
{
    const uint64_t hash = keyed_hash(&caches->key, (uint64_t)(uintptr_t)caller, id + PROCESS_CHARS,
                                     CACHE_ID_CHARS - PROCESS_CHARS);
    return &caches->buckets[hash % BUCKETS];
}

struct cache *cache_known(struct caches *caches, const struct caller *caller, const char *id, int64_t now_ms)
{
    if (strnlen(id, CACHE_ID_BYTES) != CACHE_ID_CHARS) return NULL;
    struct cache *cache = *bucket_of(caches, caller, id);
    while (cache && (cache->caller != caller || memcmp(cache->id, id, CACHE_ID_CHARS) != 0)) cache = cache->chain;
    return cache && !cache_is_expired(cache, now_ms) ? cache : NULL;
}

struct cache *cache_find(struct caches *caches, const struct caller *caller, const char *id, const char *member,
                         const char *what, attn_error *err)
{
    struct cache *const cache = cache_known(caches, caller, id, clock_ms());
    if (cache) return cache;
    if (is_id(id) && memcmp(id, caches->process, PROCESS_CHARS) != 0) {
        caches->lost_ids++;
        metrics_add(METRIC_CACHE_ENDS, "lost", NULL, 1);
        attn_fail(err, ATTN_NOT_FOUND, member,
                  "%s was made by another process of attnd, before a restart or elsewhere, and its keys and values are "
                  "not here; create it again",
                  what);
        return NULL;
    }
    attn_fail(err, ATTN_NOT_FOUND, member, "%s is unknown, deleted%s; POST /v1/caches makes one", what,
              caches->lost_pool ? ", expired, or was on a device that has failed" : " or expired");
    return NULL;
}

/* ---- Opening and closing the table and its pools ----------------------------------------------------------------- */

struct caches *caches_new(int max_count)
{
    struct caches *caches = calloc(1, sizeof *caches);
    if (caches == NULL) return NULL;
    uint8_t process[PROCESS_CHARS / 2];
    if (getrandom(process, sizeof process, 0) != sizeof process || !keyed_hash_draw(&caches->key)) {
        free(caches);
        return NULL;
    }
    write_digits(process, sizeof process, caches->process);
    pthread_mutex_init(&caches->lock, NULL);
    pthread_cond_init(&caches->opened, NULL);
    caches->max_count = max_count;
    caches->expires_ms = INT64_MAX;
    return caches;
}

void caches_add_pool(struct caches *caches, int device, const char *name, const struct caches_source *source,
                     size_t bytes)
{
    assert(device >= 0 && device < CONFIG_MAX_DEVICES && caches->pools[device].device == NULL);
    caches->pools[device] = (struct pool){ .device = name, .source = *source, .bytes = bytes };
}

int64_t caches_held_bytes(struct caches *caches)
{
    int64_t least = INT64_MAX;
    pthread_mutex_lock(&caches->lock);
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) {
        const struct pool *const pool = &caches->pools[i];
        const int64_t held = pool->pages ? (int64_t)pool->bytes : 0;
        if (pool->device && held < least) least = held;
    }
    pthread_mutex_unlock(&caches->lock);
    return least == INT64_MAX ? 0 : least;
}

/* Allocates the memory of the pool (for the pages of caches on one device), or waits if another thread is allocating
 * it. The lock is released meanwhile. The table of pages is allocated first: if it failed after the device memory was
 * allocated, the device memory could not be given back. */
static attn_status open_pool(struct caches *caches, struct pool *pool, attn_error *err)
{
    /* a copy, because pool->device becomes NULL if the device is lost while the lock is released */
    const char *const device = pool->device;
    attn_error why = { 0 };
    void *memory = NULL;
    if (pool->opening) {
        pthread_cond_wait(&caches->opened, &caches->lock);
        return ATTN_OK;
    }
    pool->opening = true;
    pthread_mutex_unlock(&caches->lock);
    attn_status status = ATTN_OK;
    struct pages *pages = pages_new(pool->bytes, pages_granule_for(pool->bytes));
    if (pages == NULL) status = attn_fail(err, ATTN_NO_MEMORY, NULL, "no memory to keep account of pages");
    else if (pool->source.alloc(pool->source.context, pool->bytes, &memory, &why) != ATTN_OK) {
        status = attn_fail(err, ATTN_FULL, NULL, "%s has not %zu bytes for caches (--kv-bytes): %s", device,
                           pool->bytes, why.text);
        pages_free(pages);
        pages = NULL;
    }
    pthread_mutex_lock(&caches->lock);
    pool->opening = false;
    pool->pages = pages;
    pool->memory = memory;
    pthread_cond_broadcast(&caches->opened);
    return status;
}

/* ---- Pages of a cache, and shares of accounts (tokens) ----------------------------------------------------------- */

void cache_charge(const struct caches *caches, const struct cache *cache, int64_t pages)
{
    cache->caller->cache_bytes += pages * cache_run_bytes(caches, cache);
    assert(cache->caller->cache_bytes >= 0);
}

/* Sums bound() over all pools, and returns the share of this sum that the account may use. INT64_MAX: there is no
 * limit, because the account may use the whole sum. */
static int64_t share_of_pools(const struct caches *caches, const struct caller *caller,
                              int64_t (*bound)(const struct pool *pool))
{
    int64_t all = 0;
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++)
        if (caches->pools[i].device) all += bound(&caches->pools[i]);
    const int64_t share = caller_share(caller, all);
    return share < all ? share : INT64_MAX;
}

static int64_t pool_bytes(const struct pool *pool)
{
    return pool->pages ? (int64_t)pages_bytes(pool->pages) : (int64_t)pool->bytes;
}

int64_t cache_share(const struct caches *caches, const struct caller *caller)
{
    return share_of_pools(caches, caller, pool_bytes);
}

void cache_count(struct caches *caches, struct cache *cache, int64_t before)
{
    struct pool *const pool = &caches->pools[cache->pool];
    const int64_t more = cache->list.count - before;
    pool->filled += (cache->list.count > 0) - (before > 0);
    cache->caller->cache_numbers += more;
    pool->numbers += more;
    assert(cache->caller->cache_numbers >= 0 && pool->numbers >= 0 && pool->filled >= 0);
}

void cache_keep_first(struct caches *caches, struct cache *cache, int64_t length)
{
    struct pages *const pages = cache_pages_of(caches, cache);
    const int64_t before = cache->list.count, count = cache_pages_for(cache, length);
    cache_charge(caches, cache, -page_list_cut(&cache->list, pages, cache->run, count));
    cache_count(caches, cache, before);
    cache->length = length;
}

/* ---- Caches in the table, and removing them ---------------------------------------------------------------------- */

static void link_in(struct caches *caches, struct cache *cache)
{
    struct cache **bucket = bucket_of(caches, cache->caller, cache->id);
    cache->chain = *bucket;
    *bucket = cache;
    cache->older = caches->newest;
    *(caches->newest ? &caches->newest->newer : &caches->oldest) = cache;
    caches->newest = cache;
    caches->count++;
    cache_note_expiry(caches, cache);
    cache->caller->caches++;
}

static void link_out(struct caches *caches, struct cache *cache)
{
    struct cache **at = bucket_of(caches, cache->caller, cache->id);
    while (*at != cache) at = &(*at)->chain;
    *at = cache->chain;
    if (caches->looked_at == cache) caches->looked_at = cache->newer;
    *(cache->older ? &cache->older->newer : &caches->oldest) = cache->newer;
    *(cache->newer ? &cache->newer->older : &caches->newest) = cache->older;
    caches->count--;
    cache->caller->caches--;
}

static struct cache **sequence_bucket(struct caches *caches, const struct caller *caller, const char *name)
{
    return &caches->sequences[keyed_hash_name(&caches->key, caller, name) % BUCKETS];
}

static void forget_sequence(struct caches *caches, struct cache *cache)
{
    struct cache **at = sequence_bucket(caches, cache->caller, cache->sequence);
    if (*cache->sequence == '\0') return;
    while (*at != cache) at = &(*at)->next_sequence;
    *at = cache->next_sequence;
    *cache->sequence = '\0';
}

static void cache_free(struct caches *caches, struct cache *cache)
{
    assert(cache->list.count == 0);
    caches->pools[cache->pool].caches--;
    caller_release(cache->caller);
    free(cache->k_scale);
    free(cache->v_scale);
    page_list_clear(&cache->list);
    free(cache);
}

void cache_bury(struct caches *caches, struct cache *cache)
{
    caches->burials++;
    if (!cache->dead) link_out(caches, cache);
    forget_sequence(caches, cache);
    cache->dead = true;
    if (cache->users > 0) return;
    cache_keep_first(caches, cache, 0);
    cache_free(caches, cache);
}

void caches_free(struct caches *caches)
{
    if (caches == NULL) return;
    while (caches->oldest) {
        assert(caches->oldest->users == 0);
        cache_bury(caches, caches->oldest);
    }
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) pages_free(caches->pools[i].pages);
    pthread_cond_destroy(&caches->opened);
    pthread_mutex_destroy(&caches->lock);
    free(caches);
}

void caches_forget(struct caches *caches, bool (*is_known)(void *context, const struct caller *caller), void *context)
{
    pthread_mutex_lock(&caches->lock);
    for (struct cache *cache = caches->oldest, *next; cache; cache = next) {
        next = cache->newer;
        if (!is_known(context, cache->caller)) cache_bury(caches, cache);
    }
    pthread_mutex_unlock(&caches->lock);
}

void caches_lose(struct caches *caches, int device)
{
    pthread_mutex_lock(&caches->lock);
    struct pool *const pool = &caches->pools[device];
    for (struct cache *cache = caches->oldest, *next; cache && pool->device; cache = next) {
        next = cache->newer;
        if (cache->pool != device) continue;
        metrics_add(METRIC_CACHE_ENDS, "lost", NULL, 1);
        cache_bury(caches, cache);
    }
    caches->lost_pool |= pool->device != NULL;
    pool->device = NULL;
    pthread_mutex_unlock(&caches->lock);
}

static void expire(struct caches *caches, struct cache *cache)
{
    caches->expired++;
    metrics_add(METRIC_CACHE_ENDS, "expired", NULL, 1);
    cache_bury(caches, cache);
}

void cache_note_expiry(struct caches *caches, const struct cache *cache)
{
    const int64_t at_ms = cache->used_ms + cache->ttl_ms;
    if (cache->users == 0 && at_ms < caches->expires_ms) caches->expires_ms = at_ms;
}

void caches_expire_all(struct caches *caches, int64_t now_ms)
{
    if (now_ms < caches->expires_ms) return;
    caches->expires_ms = INT64_MAX;
    for (struct cache *cache = caches->oldest, *next; cache; cache = next) {
        next = cache->newer;
        if (cache_is_expired(cache, now_ms)) expire(caches, cache);
        else cache_note_expiry(caches, cache);
    }
}

void caches_expire(struct caches *caches, int64_t now_ms)
{
    pthread_mutex_lock(&caches->lock);
    struct cache *cache = caches->looked_at ? caches->looked_at : caches->oldest;
    caches->looked_at = NULL;
    for (int i = 0; cache && i < CACHES_EXPIRE_LOOKS; i++) {
        struct cache *const next = cache->newer;
        if (cache_is_expired(cache, now_ms)) expire(caches, cache);
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
                                 .pages = cache->list.count,
                                 .shared_pages = page_list_shared(&cache->list),
                                 .page_bytes = cache_run_bytes(caches, cache),
                                 .ttl_ms = cache->ttl_ms,
                                 .expires_in_ms = cache->users > 0 ? cache->ttl_ms
                                                  : left > 0       ? left
                                                                   : 0,
                                 .device = caches->pools[cache->pool].device };
    memcpy(info->id, cache->id, sizeof cache->id);
}

/* ---- The public functions: create, get, fork, truncate, delete --------------------------------------------------- */

static attn_status admit(struct caches *caches, const struct caller *caller, attn_error *err)
{
    const int share = (int)caller_share(caller, caches->max_count);
    if (caches->count >= caches->max_count || caller->caches >= share) caches_expire_all(caches, clock_ms());
    if (caches->count >= caches->max_count)
        return attn_fail(err, ATTN_FULL, NULL, "there are %d caches already, the most that this server keeps",
                         caches->max_count);
    if (share < caches->max_count && caller->caches >= share)
        return attn_fail(err, ATTN_QUOTA, NULL, "this token has %d caches already (--token-share)", share);
    return ATTN_OK;
}

static struct cache *new_cache(struct caches *caches, struct caller *caller, int pool, attn_error *err)
{
    struct cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) {
        attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
        return NULL;
    }
    uint8_t own[(CACHE_ID_CHARS - PROCESS_CHARS) / 2];
    if (getrandom(own, sizeof own, 0) != sizeof own) {
        attn_fail(err, ATTN_INTERNAL, NULL, "the system gave no random bytes");
        free(cache);
        return NULL;
    }
    memcpy(cache->id, caches->process, PROCESS_CHARS);
    write_digits(own, sizeof own, cache->id + PROCESS_CHARS);
    cache->caller = caller_hold(caller);
    cache->pool = pool;
    caches->pools[pool].caches++;
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
    if (shape->page_size != CACHES_PAGE_SIZE_LEAST && shape->page_size != CACHES_PAGE_SIZE_MOST)
        return attn_fail(err, ATTN_INVALID, "/page_size", "page_size: is %lld, must be %d or %d",
                         (long long)shape->page_size, CACHES_PAGE_SIZE_LEAST, CACHES_PAGE_SIZE_MOST);
    return ATTN_OK;
}

static size_t shape_page_bytes(const struct cache_shape *shape)
{
    const int64_t columns = shape->head_dim + (shape->latent ? 0 : shape->head_dim_v);
    return (size_t)(shape->page_size * shape->kv_heads * columns) * attn_dtype_bytes(shape->dtype);
}

/* Returns the number of the pool with the most free room; -1: there is none. If `open` is true, only allocated pools
 * count. An empty cache counts as if it had the average size of the other caches. */
static int roomiest(const struct caches *caches, bool open)
{
    int64_t used = 0, filled = 0, most = 0;
    int best = -1;
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) {
        const struct pool *const pool = &caches->pools[i];
        if (pool->device && pool->pages) used += (int64_t)pages_used(pool->pages), filled += pool->filled;
    }
    const int64_t average = filled > 0 ? used / filled + 1 : 1;
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) {
        const struct pool *const pool = &caches->pools[i];
        if (pool->device == NULL || (open && pool->pages == NULL)) continue;
        const int64_t has = pool->pages ? (int64_t)pages_used(pool->pages) : 0;
        const int64_t room = pool_bytes(pool) - has - (pool->caches - pool->filled) * average;
        if (best < 0 || room > most) best = i, most = room;
    }
    return best;
}

/* Makes sure that a pool can hold a new cache: allocates the memory of the pool with the most free room, unless it is
 * allocated. If that fails, a pool that is allocated already is enough. May release the lock for a time. */
static attn_status make_ready(struct caches *caches, attn_error *err)
{
    for (;;) {
        const int pool = roomiest(caches, false);
        if (pool < 0)
            return attn_fail(err, ATTN_FULL, NULL,
                             caches->lost_pool ? "the device that had memory for caches has failed"
                                               : "this server keeps no caches (--kv-bytes 0)");
        if (caches->pools[pool].pages) return ATTN_OK;
        const attn_status status = open_pool(caches, &caches->pools[pool], err);
        if (status != ATTN_OK) return roomiest(caches, true) >= 0 ? ATTN_OK : status;
    }
}

static attn_status create(struct caches *caches, struct caller *caller, const struct cache_shape *shape,
                          const float *k_scale, const float *v_scale, int64_t ttl_ms, struct cache_info *info,
                          attn_error *err)
{
    const attn_status status = admit(caches, caller, err);
    const int pool = roomiest(caches, true);
    const size_t page_bytes = shape_page_bytes(shape);
    assert(pool >= 0 && caches->pools[pool].pages != NULL);
    if (status != ATTN_OK) return status;
    const int32_t run = pages_run(caches->pools[pool].pages, page_bytes);
    if (run == 0)
        return attn_fail(err, ATTN_TOO_LARGE, NULL,
                         "a page of %lld positions takes %zu bytes, the pool has %zu (--kv-bytes)",
                         (long long)shape->page_size, page_bytes, pages_bytes(caches->pools[pool].pages));
    struct cache *cache = new_cache(caches, caller, pool, err);
    if (cache == NULL) return err ? err->status : ATTN_NO_MEMORY;
    cache->shape = *shape;
    cache->page_bytes = page_bytes;
    cache->run = run;
    cache->ttl_ms = ttl_ms;
    cache->used_ms = clock_ms();
    if (!copy_scale(&cache->k_scale, k_scale, shape->kv_heads) ||
        !copy_scale(&cache->v_scale, v_scale, shape->kv_heads)) {
        cache_free(caches, cache);
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
    status = make_ready(caches, err);
    if (status == ATTN_OK) status = create(caches, caller, shape, k_scale, v_scale, ttl_ms, info, err);
    pthread_mutex_unlock(&caches->lock);
    return status;
}

/* Returns the cache of the sequence with this name (KServe's parameter sequence_id), or NULL. An expired cache is
 * removed and not returned. */
static struct cache *sequence_of(struct caches *caches, const struct caller *caller, const char *name)
{
    struct cache *cache = *sequence_bucket(caches, caller, name);
    while (cache && (cache->caller != caller || strcmp(cache->sequence, name) != 0)) cache = cache->next_sequence;
    if (cache == NULL || !cache_is_expired(cache, clock_ms())) return cache;
    expire(caches, cache);
    return NULL;
}

attn_status caches_sequence(struct caches *caches, struct caller *caller, const char *name,
                            const struct cache_shape *shape, char id[CACHE_ID_BYTES], attn_error *err)
{
    attn_status status = shape ? check_shape(shape, err) : ATTN_OK;
    struct cache_info info;
    if (status != ATTN_OK) return status;
    pthread_mutex_lock(&caches->lock);
    if (shape && (status = make_ready(caches, err)) != ATTN_OK) {
        pthread_mutex_unlock(&caches->lock);
        return status;
    }
    struct cache *cache = sequence_of(caches, caller, name);
    if (shape) {
        if (cache) cache_bury(caches, cache);
        status = create(caches, caller, shape, NULL, NULL, CACHES_TTL_MS, &info, err);
        if (status == ATTN_OK) {
            struct cache **bucket = sequence_bucket(caches, caller, name);
            cache = caches->newest;
            snprintf(cache->sequence, sizeof cache->sequence, "%s", name);
            cache->next_sequence = *bucket;
            *bucket = cache;
        }
    } else if (cache == NULL)
        status = attn_fail(err, ATTN_NOT_FOUND, "/parameters/sequence_id",
                           "sequence_id: '%s' has not been started (sequence_start), has ended or expired", name);
    if (status == ATTN_OK) memcpy(id, cache->id, sizeof cache->id);
    pthread_mutex_unlock(&caches->lock);
    return status;
}

void caches_end_sequence(struct caches *caches, const struct caller *caller, const char *name)
{
    pthread_mutex_lock(&caches->lock);
    struct cache *cache = sequence_of(caches, caller, name);
    if (cache) cache_bury(caches, cache);
    pthread_mutex_unlock(&caches->lock);
}

attn_status caches_get(struct caches *caches, const struct caller *caller, const char *id, struct cache_info *info,
                       attn_error *err)
{
    pthread_mutex_lock(&caches->lock);
    const struct cache *const cache = cache_find(caches, caller, id, "", "this cache", err);
    if (cache) describe(caches, cache, info);
    pthread_mutex_unlock(&caches->lock);
    return cache ? ATTN_OK : ATTN_NOT_FOUND;
}

void caches_list(struct caches *caches, const struct caller *caller, struct cache_info *infos, int room, int *written,
                 int *count)
{
    const int64_t now_ms = clock_ms();
    int found = 0;
    *written = *count = 0;
    pthread_mutex_lock(&caches->lock);
    for (const struct cache *cache = caches->oldest; cache; cache = cache->newer) {
        if (cache->caller != caller || cache_is_expired(cache, now_ms)) continue;
        if (found < room) memcpy(infos[found++].id, cache->id, sizeof cache->id);
        ++*count;
    }
    pthread_mutex_unlock(&caches->lock);
    /* takes the lock for each cache separately, because counting the shared pages of one cache may go through a
     * thousand blocks */
    for (int i = 0; i < found; i++) {
        pthread_mutex_lock(&caches->lock);
        const struct cache *const cache = cache_known(caches, caller, infos[i].id, clock_ms());
        if (cache) describe(caches, cache, &infos[(*written)++]);
        pthread_mutex_unlock(&caches->lock);
    }
}

static attn_status check_length(int64_t length, int64_t most, attn_error *err)
{
    if (length <= most) return ATTN_OK;
    return attn_fail(err, ATTN_INVALID, "/length", "length: is %lld, the cache has %lld positions", (long long)length,
                     (long long)most);
}

static int64_t pool_numbers(const struct pool *pool)
{
    const int64_t granules = (int64_t)(pool->bytes / pages_granule_for(pool->bytes));
    return granules > CACHES_NUMBERS / CACHES_SHARING ? granules * CACHES_SHARING : CACHES_NUMBERS;
}

/* Checks that a fork (a cache that shares the pages of another) stays within the limits on page-table entries. A fork
 * takes no new pages. */
static attn_status may_share(const struct caches *caches, const struct cache *from, int64_t count, attn_error *err)
{
    const struct pool *const pool = &caches->pools[from->pool];
    const int64_t most = pool_numbers(pool), share = share_of_pools(caches, from->caller, pool_numbers);
    if (count > share - from->caller->cache_numbers)
        return attn_fail(
            err, ATTN_QUOTA, NULL,
            "this token's caches have %lld pages together, those that they share counted for each, and may "
            "have %lld (--token-share); delete forks",
            (long long)from->caller->cache_numbers, (long long)share);
    if (pool->numbers + count > most)
        return attn_fail(err, ATTN_FULL, NULL,
                         "the caches of %s have %lld pages together, those that they share counted for each, and may "
                         "have %lld; delete forks",
                         pool->device, (long long)pool->numbers, (long long)most);
    return ATTN_OK;
}

static attn_status fork_of(struct caches *caches, const struct cache *from, struct caller *caller, int64_t length,
                           struct cache_info *info, attn_error *err)
{
    const int64_t has = from->truncate_to >= 0 ? from->truncate_to : from->length;
    if (length < 0) length = has;
    attn_status status = check_length(length, has, err);
    const int64_t count = cache_pages_for(from, length);
    if (status == ATTN_OK) status = admit(caches, caller, err);
    if (status == ATTN_OK) status = may_share(caches, from, count, err);
    if (status != ATTN_OK) return status;
    struct cache *cache = new_cache(caches, caller, from->pool, err);
    if (cache == NULL) return err ? err->status : ATTN_NO_MEMORY;
    cache->shape = from->shape;
    cache->page_bytes = from->page_bytes;
    cache->run = from->run;
    cache->ttl_ms = from->ttl_ms;
    cache->used_ms = clock_ms();
    if (!copy_scale(&cache->k_scale, from->k_scale, from->shape.kv_heads) ||
        !copy_scale(&cache->v_scale, from->v_scale, from->shape.kv_heads) ||
        !page_list_fork(&cache->list, &from->list, cache_pages_of(caches, from), count,
                        length / from->shape.page_size)) {
        cache_free(caches, cache);
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    }
    cache_count(caches, cache, 0);
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
    struct cache *from = cache_find(caches, caller, id, "", "this cache", err);
    if (from) {
        from->used_ms = clock_ms();
        /* counts the fork as a user of `from`, because admit() removes expired caches that have no users */
        from->users++;
        status = fork_of(caches, from, caller, length, info, err);
        from->users--;
        cache_note_expiry(caches, from);
    }
    pthread_mutex_unlock(&caches->lock);
    return status;
}

attn_status caches_truncate(struct caches *caches, const struct caller *caller, const char *id, int64_t length,
                            struct cache_info *info, attn_error *err)
{
    attn_status status = ATTN_NOT_FOUND;
    pthread_mutex_lock(&caches->lock);
    struct cache *cache = cache_find(caches, caller, id, "", "this cache", err);
    if (cache) {
        status = check_length(length, cache->truncate_to >= 0 ? cache->truncate_to : cache->length, err);
        cache->used_ms = clock_ms();
        if (status == ATTN_OK && !page_list_may_cut(&cache->list, cache_pages_for(cache, length)))
            status = attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
        if (status == ATTN_OK && cache->users > 0) cache->truncate_to = length;
        else if (status == ATTN_OK) cache_keep_first(caches, cache, length);
        if (status == ATTN_OK) describe(caches, cache, info);
    }
    pthread_mutex_unlock(&caches->lock);
    return status;
}

attn_status caches_delete(struct caches *caches, const struct caller *caller, const char *id, attn_error *err)
{
    pthread_mutex_lock(&caches->lock);
    struct cache *cache = cache_find(caches, caller, id, "", "this cache", err);
    if (cache) cache_bury(caches, cache);
    pthread_mutex_unlock(&caches->lock);
    return cache ? ATTN_OK : ATTN_NOT_FOUND;
}

void caches_totals(struct caches *caches, struct caches_totals *totals)
{
    pthread_mutex_lock(&caches->lock);
    *totals =
        (struct caches_totals){ .caches = caches->count, .expired = caches->expired, .lost_ids = caches->lost_ids };
    for (int i = 0; i < CONFIG_MAX_DEVICES; i++) {
        const struct pages *const pages = caches->pools[i].pages;
        if (caches->pools[i].device == NULL) continue;
        totals->bytes += (int64_t)caches->pools[i].bytes;
        if (pages == NULL) continue;
        totals->pages += pages_count(pages);
        totals->shared_pages += pages_shared(pages);
        totals->used_bytes += (int64_t)pages_used(pages);
    }
    pthread_mutex_unlock(&caches->lock);
}
