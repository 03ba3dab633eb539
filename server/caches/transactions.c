/* transactions.c: transactions that read the caches of a request and may append to them. A transaction changes all of
 * these caches or none. See caches.h; table.c lists the invariants. */
#include "server/caches/internal.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/caller.h"
#include "server/base/clock.h"

enum { ALIGNMENT = 64 };

/* ---- Checking a transaction, before it begins ------------------------------------------------------------------- */

static bool same_shape(const struct cache_shape *a, const struct cache_shape *b)
{
    return a->kv_heads == b->kv_heads && a->head_dim == b->head_dim && a->head_dim_v == b->head_dim_v &&
           a->dtype == b->dtype && a->latent == b->latent && a->page_size == b->page_size;
}

static const char *shape_text(const struct cache_shape *shape, char text[96])
{
    snprintf(text, 96, "kv_heads %lld, head_dim %lld, head_dim_v %lld, %s%s, page_size %lld",
             (long long)shape->kv_heads, (long long)shape->head_dim, (long long)shape->head_dim_v,
             attn_dtype_name(shape->dtype), shape->latent ? ", latent" : "", (long long)shape->page_size);
    return text;
}

static const char *scales_text(const struct cache *cache)
{
    if (cache->k_scale) return cache->v_scale ? "k_scale and v_scale" : "k_scale alone";
    return cache->v_scale ? "v_scale alone" : "neither k_scale nor v_scale";
}

/* Returns the cache with the id step->ids[row], or NULL with an error. Reuses the pointer that an earlier search has
 * found, as long as that pointer is valid. */
static struct cache *find_row(const struct cache_step *step, int row, int64_t now_ms, attn_error *err)
{
    char member[32], what[32];
    struct cache *cache = step->burials == step->caches->burials ? step->row[row].cache : NULL;
    if (cache == NULL || cache_is_expired(cache, now_ms))
        cache = cache_known(step->caches, step->caller, step->ids[row], now_ms);
    if (cache) return cache;
    if (step->of_path) return cache_find(step->caches, step->caller, step->ids[row], "", "this cache", err);
    snprintf(member, sizeof member, "/caches/%d", row);
    snprintf(what, sizeof what, "caches: [%d]", row);
    return cache_find(step->caches, step->caller, step->ids[row], member, what, err);
}

static attn_status goes_along(const struct cache_step *step, const struct cache *first, const struct cache *cache,
                              int row, attn_error *err)
{
    char member[32], one[96], other[96];
    if (same_shape(&first->shape, &cache->shape) && cache->pool == first->pool &&
        (cache->k_scale == NULL) == (first->k_scale == NULL) && (cache->v_scale == NULL) == (first->v_scale == NULL))
        return ATTN_OK;
    snprintf(member, sizeof member, "/caches/%d", row);
    if (!same_shape(&first->shape, &cache->shape))
        return attn_fail(err, ATTN_INVALID, member,
                         "caches: [%d] has %s, [0] has %s; one request takes caches of one shape", row,
                         shape_text(&cache->shape, one), shape_text(&first->shape, other));
    if (cache->pool != first->pool)
        return attn_fail(
            err, ATTN_INVALID, member,
            "caches: [%d] is on %s, [0] is on %s; one request takes caches of one device (a fork is where its "
            "origin is)",
            row, step->caches->pools[cache->pool].device, step->caches->pools[first->pool].device);
    return attn_fail(err, ATTN_INVALID, member,
                     "caches: [%d] has %s, [0] has %s; one request takes caches that have the same of them", row,
                     scales_text(cache), scales_text(first));
}

/* Refuses a request that appends to the same cache twice, because the order of the two appends would be undefined. */
static attn_status twice(const struct cache_step *step, int row, attn_error *err)
{
    char member[32];
    int before = 0;
    while (memcmp(step->ids[row], step->ids[before], CACHE_ID_CHARS) != 0) before++;
    snprintf(member, sizeof member, "/caches/%d", row);
    return attn_fail(err, ATTN_INVALID, member,
                     "caches: [%d] is [%d] again, and k and v are appended to each; fork it first", row, before);
}

static void copy_scales(const struct cache *cache, int row, float *k_scale, float *v_scale)
{
    const size_t heads = (size_t)cache->shape.kv_heads, bytes = heads * sizeof *k_scale;
    if (k_scale) memcpy(k_scale + (size_t)row * heads, cache->k_scale, bytes);
    if (v_scale) memcpy(v_scale + (size_t)row * heads, cache->v_scale, bytes);
}

/* Copies the caches' quantisation scales to `step`, because the problem (the computation of the request) is checked
 * before the transaction begins. The scales are copied again when it begins. */
static attn_status look_at_scales(struct cache_step *step, attn_error *err)
{
    const size_t count = (size_t)step->rows * (size_t)step->shape.kv_heads;
    if (!step->k_scaled && !step->v_scaled) return ATTN_OK;
    step->scales = malloc(2 * count * sizeof *step->scales);
    if (step->scales == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    step->k_scale = step->k_scaled ? step->scales : NULL;
    step->v_scale = step->v_scaled ? step->scales + count : NULL;
    for (int row = 0; row < step->rows; row++) copy_scales(step->row[row].cache, row, step->k_scale, step->v_scale);
    return ATTN_OK;
}

static attn_status check_pages(const struct cache_step *step, attn_error *err)
{
    if (step->most <= CACHES_STEP_PAGES / step->rows) return ATTN_OK;
    return attn_fail(err, ATTN_TOO_LARGE, "/caches",
                     "caches: %d rows of up to %lld pages, at most %d are taken at once", step->rows,
                     (long long)step->most, CACHES_STEP_PAGES);
}

static attn_status look(struct cache_step *step, attn_error *err)
{
    struct cache *first = NULL;
    const uint64_t number = ++step->caches->looks;
    step->burials = step->caches->burials;
    const int64_t now_ms = clock_ms();
    for (int row = 0; row < step->rows; row++) {
        struct cache *cache = find_row(step, row, now_ms, err);
        if (cache == NULL) return ATTN_NOT_FOUND;
        if (step->append > 0 && cache->looked == number) return twice(step, row, err);
        cache->looked = number;
        /* find_row() uses this pointer again, unless any cache was removed meanwhile */
        step->row[row].cache = cache;
        if (first == NULL) first = cache;
        const attn_status status = goes_along(step, first, cache, row, err);
        if (status != ATTN_OK) return status;
        int64_t length;
        if (__builtin_add_overflow(cache->length, step->append, &length) || length > INT32_MAX - CACHES_STEP_PAGES)
            return attn_fail(err, ATTN_TOO_LARGE, "/k/shape", "k: %lld positions more are longer than a cache can be",
                             (long long)step->append);
        step->lengths[row] = (int32_t)length;
        const int64_t pages = cache_pages_for(cache, length);
        if (pages > step->most) step->most = pages;
        cache->used_ms = now_ms;
    }
    const attn_status status = check_pages(step, err);
    if (status != ATTN_OK) return status;
    step->shape = first->shape;
    step->device = first->pool;
    step->pool = step->caches->pools[first->pool].memory;
    step->pool_bytes = pages_bytes(step->caches->pools[first->pool].pages);
    step->page_bytes = first->page_bytes;
    step->granule = pages_granule(step->caches->pools[first->pool].pages);
    step->k_scaled = first->k_scale != NULL;
    step->v_scaled = first->v_scale != NULL;
    const int64_t row_bytes = step->append * step->shape.kv_heads * (int64_t)attn_dtype_bytes(step->shape.dtype);
    step->k_row_bytes = row_bytes * step->shape.head_dim;
    step->v_row_bytes = step->shape.latent ? 0 : row_bytes * step->shape.head_dim_v;
    return look_at_scales(step, err);
}

attn_status caches_look(struct caches *caches, struct caller *caller, char (*ids)[CACHE_ID_BYTES], int rows,
                        int64_t append, bool of_path, struct cache_step *step, attn_error *err)
{
    *step = (struct cache_step){
        .caches = caches, .caller = caller, .ids = ids, .rows = rows, .append = append, .of_path = of_path
    };
    assert(rows > 0 && rows <= CACHES_ROWS && append >= 0);
    step->lengths = calloc((size_t)rows, sizeof *step->lengths);
    step->row = calloc((size_t)rows, sizeof *step->row);
    if (step->lengths == NULL || step->row == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    pthread_mutex_lock(&caches->lock);
    const attn_status status = look(step, err);
    pthread_mutex_unlock(&caches->lock);
    return status;
}

/* ---- Beginning a transaction: taking pages ---------------------------------------------------------------------- */

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

attn_status caches_table_bytes(struct cache_step *step, size_t *bytes, attn_error *err)
{
    struct caches *const caches = step->caches;
    const size_t rows = (size_t)step->rows, scale = rows * (size_t)step->shape.kv_heads * sizeof(float);
    const int64_t now_ms = clock_ms();
    int64_t most = 0;
    pthread_mutex_lock(&caches->lock);
    for (int row = 0; row < step->rows; row++) {
        const struct cache *cache = find_row(step, row, now_ms, NULL);
        const int64_t pages = cache ? cache_pages_for(cache, cache->length + step->append) : 0;
        if (pages > most) most = pages;
    }
    pthread_mutex_unlock(&caches->lock);
    step->most = most > 0 ? most : 1;
    *bytes = aligned(rows * (size_t)step->most * sizeof(int32_t)) + 2 * aligned(rows * sizeof(int32_t)) +
             (step->k_scaled ? aligned(scale) : 0) + (step->v_scaled ? aligned(scale) : 0);
    return check_pages(step, err);
}

static void place_tables(struct cache_step *step, char *memory)
{
    const size_t rows = (size_t)step->rows, scale = rows * (size_t)step->shape.kv_heads * sizeof(float);
    step->table = (int32_t *)memory;
    memory += aligned(rows * (size_t)step->most * sizeof(int32_t));
    step->table_lengths = (int32_t *)memory;
    memory += aligned(rows * sizeof(int32_t));
    step->prefix_keys = (int32_t *)memory;
    memory += aligned(rows * sizeof(int32_t));
    step->k_scale = step->k_scaled ? (float *)memory : NULL;
    if (step->k_scaled) memory += aligned(scale);
    step->v_scale = step->v_scaled ? (float *)memory : NULL;
}

/* Determines the first page that the transaction adds to one cache, or replaces there, and returns the number of the
 * cache's new pages. */
static int64_t count_pages(struct cache_step *step, int index)
{
    struct cache_row *const row = &step->row[index];
    const struct cache *const cache = row->cache;
    const bool partial = row->before % cache->shape.page_size != 0;
    row->copied = partial && pages_is_shared(cache_pages_of(step->caches, cache),
                                             page_list_at(&cache->list, cache->list.count - 1));
    row->first = cache->list.count - row->copied;
    return cache_pages_for(cache, row->before + step->append) - row->first;
}

/* Checks that the pool has room for `count` pages and that the account may have them. TOO_LARGE: the pages are larger
 * than the whole pool or the whole share, so waiting will not help. */
static attn_status check_room(const struct cache_step *step, int64_t count, attn_error *err)
{
    const struct caches *const caches = step->caches;
    const struct cache *const cache = step->row[0].cache;
    const struct pages *const pages = cache_pages_of(caches, cache);
    const char *const device = caches->pools[cache->pool].device;
    const long long needs = (long long)(count * cache_run_bytes(caches, cache));
    const long long all = (long long)pages_bytes(pages), used = (long long)pages_used(pages);
    const long long share = (long long)cache_share(caches, cache->caller), held = (long long)cache->caller->cache_bytes;
    if (needs > all)
        return attn_fail(err, ATTN_TOO_LARGE, NULL,
                         "this request needs %lld bytes of pages, the pool of %s has %lld in all (--kv-bytes)", needs,
                         device, all);
    if (needs > share)
        return attn_fail(err, ATTN_TOO_LARGE, NULL,
                         "this request needs %lld bytes of pages, this token may have %lld in all (--token-share)",
                         needs, share);
    if (needs > share - held)
        return attn_fail(err, ATTN_QUOTA, NULL,
                         "this token's caches hold %lld bytes of pages and may hold %lld (--token-share), this request "
                         "needs %lld more; delete or truncate caches",
                         held, share, needs);
    if (needs > all - used)
        return attn_fail(err, ATTN_FULL, NULL,
                         "the pool of %s is full: %lld of %lld bytes are in pages (--kv-bytes), this request needs "
                         "%lld more; delete or truncate caches",
                         device, used, all, needs);
    return ATTN_OK;
}

/* Makes the error for a fragmented pool: enough memory is free, but no free range is long enough for a page. */
static attn_status in_pieces(const struct cache_step *step, int64_t count, attn_error *err)
{
    const struct caches *const caches = step->caches;
    const struct cache *const cache = step->row[0].cache;
    const struct pages *const pages = cache_pages_of(caches, cache);
    const int64_t page_bytes = cache_run_bytes(caches, cache), all = (int64_t)pages_bytes(pages);
    int64_t used = (int64_t)pages_used(pages);
    for (int row = 0; row < step->rows; row++) used -= step->row[row].count * page_bytes;
    return attn_fail(err, ATTN_FULL, NULL,
                     "the pool of %s has %lld of %lld bytes free (--kv-bytes), but in pieces between pages: "
                     "this request does not find %lld times %lld bytes there; delete or truncate caches",
                     caches->pools[cache->pool].device, (long long)(all - used), (long long)all, (long long)count,
                     (long long)page_bytes);
}

/* Allocates the new pages of a row (a cache of the transaction) in the pool. Returns FULL if the pool has no room. The
 * pages that were already allocated stay in the row in this case, and begin() gives them back to the pool. */
static attn_status take_row(struct cache_step *step, int index, attn_error *err)
{
    struct caches *const caches = step->caches;
    struct cache_row *const row = &step->row[index];
    struct cache *const cache = row->cache;
    struct pages *const pages = cache_pages_of(caches, cache);
    const int64_t after = cache_pages_for(cache, row->before + step->append);
    row->pages = malloc((size_t)(after - row->first + 1) * sizeof *row->pages);
    if (row->pages == NULL || !page_list_reserve(&cache->list, after))
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    for (int64_t i = row->first; i < after; i++) {
        int32_t page = pages_take(pages, cache->run);
        if (page < 0) {
            caches_expire_all(caches, clock_ms());
            page = pages_take(pages, cache->run);
        }
        if (page < 0) return ATTN_FULL;
        cache_charge(caches, cache, 1);
        row->pages[row->count++] = page;
    }
    return ATTN_OK;
}

static attn_status take_pages(struct cache_step *step, attn_error *err)
{
    int64_t count = 0;
    for (int row = 0; row < step->rows; row++) {
        count += count_pages(step, row);
        /* counts the transaction as a user of the cache, because expired caches without users may now be removed */
        step->row[row].cache->users++;
    }
    attn_status status = check_room(step, count, NULL);
    if (status != ATTN_OK) {
        caches_expire_all(step->caches, clock_ms());
        status = check_room(step, count, err);
    }
    for (int row = 0; row < step->rows && status == ATTN_OK; row++) {
        status = take_row(step, row, err);
        if (status == ATTN_FULL) (void)in_pieces(step, count, err);
    }
    for (int row = 0; row < step->rows; row++) {
        step->row[row].cache->users--;
        cache_note_expiry(step->caches, step->row[row].cache);
    }
    return status;
}

static char *page_at(const struct cache_step *step, int32_t page)
{
    return (char *)step->pool + (size_t)page * step->granule;
}

static void add_move(struct cache_step *step, void *to, const void *from, int64_t bytes)
{
    if (bytes > 0) step->moves[step->move_count++] = (attn_move){ to, from, (size_t)bytes };
}

/* Adds the moves (copies that the device makes) for the keys or the values of one page. Positions [0, kept) of the page
 * are copied from `old`; if `old` is NULL, they are in the page already. Positions [kept, end) are copied from `rows`.
 * If `fresh` is true, the rest of the page is cleared. */
static void fill_part(struct cache_step *step, char *part, const char *old, bool fresh, const char *rows, int64_t kept,
                      int64_t end, int64_t position_bytes)
{
    if (old) add_move(step, part, old, kept * position_bytes);
    add_move(step, part + kept * position_bytes, rows, (end - kept) * position_bytes);
    if (fresh) add_move(step, part + end * position_bytes, NULL, (step->shape.page_size - end) * position_bytes);
}

/* Plans the copies of one cache's new keys and values to its pages, page by page. */
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
        const char *const old = row->copied && number == row->first ? page_at(step, page_list_at(&cache->list, number))
                                                                    : NULL;
        char *const page = page_at(step, fresh ? row->pages[number - row->first] : page_list_at(&cache->list, number));
        fill_part(step, page, old, fresh, k + done * k_bytes, kept, end, k_bytes);
        if (v)
            fill_part(step, page + page_size * k_bytes, old ? old + page_size * k_bytes : NULL, fresh,
                      v + done * v_bytes, kept, end, v_bytes);
        at += end - kept;
    }
}

static void write_table(struct cache_step *step, int index)
{
    const struct cache_row *const row = &step->row[index];
    const struct cache *const cache = row->cache;
    int32_t *const table = step->table + (int64_t)index * step->most;
    const int64_t old = step->append > 0 ? row->first : cache->list.count;
    page_list_copy(&cache->list, old, table);
    if (row->count > 0) memcpy(table + old, row->pages, (size_t)row->count * sizeof *table);
    for (int64_t i = old + row->count; i < step->most; i++) table[i] = 0;
    step->lengths[index] = (int32_t)(row->before + step->append);
    step->table_lengths[index] = step->lengths[index];
    copy_scales(cache, index, step->k_scale, step->v_scale);
}

/* True if `step` (a transaction) must wait for one of its caches. This is so if another step appends to the cache, if
 * `step` appends and another step uses the cache, if an older step waits for the cache, or if the cache is about to be
 * truncated. */
static bool is_blocked(const struct cache_step *step, uint64_t scan)
{
    for (int row = 0; row < step->rows; row++) {
        const struct cache *cache = step->row[row].cache;
        if ((scan != 0 && cache->wanted == scan) || cache->writing || (step->append > 0 && cache->users > 0) ||
            cache->truncate_to >= 0)
            return true;
    }
    return false;
}

static void give_back(const struct caches *caches, struct cache_row *row)
{
    for (int64_t i = 0; i < row->count; i++)
        (void)pages_drop(cache_pages_of(caches, row->cache), row->pages[i], row->cache->run, NULL);
    if (row->count > 0) cache_charge(caches, row->cache, -row->count);
    free(row->pages);
    row->pages = NULL;
    row->count = 0;
}

/* Returns how many positions at its beginning the cache of this row shares with the cache of the previous row. */
static int32_t prefix_of(const struct cache_step *step, int row)
{
    if (row == 0) return 0;
    const int32_t *const own = step->table + (int64_t)row * step->most, *const before = own - step->most;
    const int64_t least = step->table_lengths[row] < step->table_lengths[row - 1] ? step->table_lengths[row]
                                                                                  : step->table_lengths[row - 1];
    const int64_t size = step->shape.page_size, pages = (least + size - 1) / size;
    enum { AT_ONCE = 32 };
    int64_t same = 0;
    while (same + AT_ONCE <= pages && memcmp(own + same, before + same, AT_ONCE * sizeof *own) == 0) same += AT_ONCE;
    while (same < pages && own[same] == before[same]) same++;
    return (int32_t)(same * size < least ? same * size : least);
}

/* Finds the caches of the step (a transaction). Sets *wait to whether the step must wait for one of them. If it must
 * wait and `scan` is not 0, also marks the caches (`wanted`), so that younger steps wait behind this step. */
static attn_status ask(struct cache_step *step, uint64_t scan, bool *wait, attn_error *err)
{
    const int64_t now_ms = clock_ms();
    *wait = false;
    for (int row = 0; row < step->rows; row++) {
        struct cache *cache = find_row(step, row, now_ms, err);
        if (cache == NULL) return ATTN_NOT_FOUND;
        step->row[row] = (struct cache_row){ .cache = cache, .before = cache->length };
    }
    step->burials = step->caches->burials;
    *wait = is_blocked(step, scan);
    for (int row = 0; row < step->rows && *wait && scan != 0; row++) step->row[row].cache->wanted = scan;
    return ATTN_OK;
}

static attn_status begin(struct cache_step *step, uint64_t scan, bool *wait, attn_error *err)
{
    int64_t moves = 0;
    attn_status status = ask(step, scan, wait, err);
    if (status != ATTN_OK || *wait) return status;
    for (int row = 0; row < step->rows; row++) {
        const int64_t pages = cache_pages_for(step->row[row].cache, step->row[row].before + step->append);
        /* another transaction has extended the cache since caches_table_bytes() */
        if (pages > step->most) return attn_fail(err, ATTN_BUSY, NULL, "caches: [%d] has grown meanwhile", row);
        moves += 6 * (pages - step->row[row].before / step->shape.page_size + 1);
    }
    if (step->append > 0) {
        step->moves = malloc((size_t)moves * sizeof *step->moves);
        if (step->moves == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    }
    if (step->append > 0) status = take_pages(step, err);
    if (status != ATTN_OK) {
        for (int row = 0; row < step->rows; row++) give_back(step->caches, &step->row[row]);
        free(step->moves);
        step->moves = NULL;
        return status;
    }
    for (int row = 0; row < step->rows; row++) {
        step->row[row].cache->users++;
        step->row[row].cache->writing = step->append > 0;
    }
    step->begun = true;
    return ATTN_OK;
}

/* Fills the page tables of a transaction and its list of moves (copies on the device). It needs no lock: what it reads
 * does not change before the transaction ends. */
static void plan(struct cache_step *step, char *memory)
{
    place_tables(step, memory);
    step->shares = false;
    for (int row = 0; row < step->rows; row++) {
        if (step->append > 0) plan_moves(step, row);
        write_table(step, row);
        step->prefix_keys[row] = prefix_of(step, row);
        step->shares |= step->prefix_keys[row] >= CACHES_PREFIX_KEYS;
    }
}

attn_status caches_ask(struct cache_step *step, uint64_t scan, bool *wait, attn_error *err)
{
    assert(!step->begun);
    pthread_mutex_lock(&step->caches->lock);
    const attn_status status = ask(step, scan, wait, err);
    pthread_mutex_unlock(&step->caches->lock);
    return status;
}

attn_status caches_begin(struct cache_step *step, uint64_t scan, void *memory, bool *wait, attn_error *err)
{
    assert(!step->begun);
    pthread_mutex_lock(&step->caches->lock);
    const attn_status status = begin(step, scan, wait, err);
    pthread_mutex_unlock(&step->caches->lock);
    if (step->begun) plan(step, memory);
    return status;
}

/* ---- Ending a transaction --------------------------------------------------------------------------------------- */

static void commit_row(struct caches *caches, struct cache_row *row, int64_t append)
{
    struct cache *const cache = row->cache;
    struct pages *const pages = cache_pages_of(caches, cache);
    const int64_t before = cache->list.count;
    if (append == 0) return;
    assert(cache->writing && cache->length == row->before && row->first + row->copied == before);
    if (row->copied && page_list_drop_last(&cache->list, pages, cache->run)) cache_charge(caches, cache, -1);
    for (int64_t i = 0; i < row->count; i++) page_list_put(&cache->list, pages, row->pages[i]);
    cache_count(caches, cache, before);
    cache->length = row->before + append;
    assert(cache->list.count == cache_pages_for(cache, cache->length));
    row->count = 0;
}

static void leave(struct caches *caches, struct cache *cache, bool ends, int64_t now_ms)
{
    cache->users--;
    cache->writing = false;
    cache->used_ms = now_ms;
    if (ends && !cache->dead) {
        cache_bury(caches, cache);
        return;
    }
    if (cache->users > 0) return;
    if (cache->dead) {
        cache_bury(caches, cache);
        return;
    }
    if (cache->truncate_to >= 0) cache_keep_first(caches, cache, cache->truncate_to);
    cache->truncate_to = -1;
    cache_note_expiry(caches, cache);
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
        give_back(caches, r);
        leave(caches, r->cache, commit && step->ends, now_ms);
        *r = (struct cache_row){ 0 };
    }
    pthread_mutex_unlock(&caches->lock);
}

void caches_drop_step(struct cache_step *step)
{
    assert(!step->begun);
    free(step->lengths);
    free(step->scales);
    free(step->row);
    free(step->moves);
    *step = (struct cache_step){ 0 };
}
