/* test_caches.c: tests of pages and caches (keys and values that stay on a device between requests): who owns which
 * page, what a decode or an append does, and that nothing is lost. The test itself makes the copies and writes that a
 * step (a decode or an append) requests, in real memory. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/caches/caches.h"
#include "server/caches/internal.h"
#include "text/text.h"

/* ---- A clock that tests can set ---------------------------------------------------------------------------------- */

static int64_t late_s;    /* number of seconds by which the test's clock is ahead of the real clock */
static int leap_in, by_s; /* at its `leap_in`-th reading from now, the test's clock jumps ahead by `by_s` seconds */

int __real_clock_gettime(clockid_t clock, struct timespec *t);
int __wrap_clock_gettime(clockid_t clock, struct timespec *t);
int __wrap_clock_gettime(clockid_t clock, struct timespec *t)
{
    const int result = __real_clock_gettime(clock, t);
    if (leap_in > 0 && --leap_in == 0) late_s += by_s;
    t->tv_sec += late_s;
    return result;
}

/* ---- Allocations that tests can make fail ------------------------------------------------------------------------ */

static size_t refused_bytes; /* the next calloc() of this many bytes fails; 0: none fails */

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    if (count * bytes != refused_bytes || refused_bytes == 0) return __real_calloc(count, bytes);
    refused_bytes = 0;
    return NULL;
}

/* ---- Tests of the pages of a pool -------------------------------------------------------------------------------- */

static void test_pages_are_runs_of_granules(void **state)
{
    (void)state;
    struct pages *pages = pages_new(100 * 4096 + 17, 4096);
    assert_int_equal(pages_bytes(pages), 100 * 4096);
    assert_int_equal(pages_run(pages, 1), 1);
    assert_int_equal(pages_run(pages, 4097), 2);
    assert_int_equal(pages_run(pages, 100 * 4096), 100);
    assert_int_equal(pages_run(pages, 100 * 4096 + 1), 0);
    int32_t taken[33];
    for (int i = 0; i < 33; i++) {
        taken[i] = pages_take(pages, 3);
        assert_int_equal(taken[i], 3 * i);
    }
    assert_int_equal(pages_take(pages, 3), -1);
    assert_int_equal(pages_take(pages, 1), 99);
    assert_int_equal(pages_used(pages), 100 * 4096);
    assert_int_equal(pages_take(pages, 1), -1);
    assert_true(pages_drop(pages, taken[7], 3, NULL));
    assert_true(pages_drop(pages, taken[9], 3, NULL));
    assert_int_equal(pages_take(pages, 4), -1);
    assert_true(pages_drop(pages, taken[8], 3, NULL));
    assert_int_equal(pages_take(pages, 9), 21);
    pages_free(pages);
}

static void test_a_page_that_is_shared_stays_until_the_last_drops_it(void **state)
{
    (void)state;
    struct pages *pages = pages_new(10 * 4096, 4096);
    const int32_t page = pages_take(pages, 10);
    int a, b, c;
    assert_null(pages_owner(pages, page));
    pages_own(pages, page, &a);
    assert_ptr_equal(pages_owner(pages, page), &a);
    pages_hold(pages, page, &b);
    pages_hold(pages, page, &c);
    assert_true(pages_is_shared(pages, page));
    assert_null(pages_owner(pages, page));
    assert_int_equal(pages_shared(pages), 1);
    assert_false(pages_drop(pages, page, 10, &a));
    assert_false(pages_drop(pages, page, 10, &c));
    assert_ptr_equal(pages_owner(pages, page), &b);
    assert_false(pages_is_shared(pages, page));
    assert_int_equal(pages_take(pages, 1), -1);
    assert_true(pages_drop(pages, page, 10, &b));
    assert_int_equal(pages_used(pages) + pages_count(pages) + pages_shared(pages), 0);
    pages_free(pages);
}

static void test_granules_grow_with_the_memory(void **state)
{
    (void)state;
    assert_int_equal(pages_granule_for(1 << 20), 4096);
    assert_int_equal(pages_granule_for((size_t)4 << 30), 4096);
    assert_int_equal(pages_granule_for(((size_t)4 << 30) + ((size_t)1 << 30)), 8192);
    assert_int_equal(pages_granule_for((size_t)141 << 30), 262144);
}

/* ---- Tests of a pool of pages and its callers -------------------------------------------------------------------- */

enum { HEADS = 2, DIM = 4, DIM_V = 3, PAGE = 64, POOL_BYTES = 64 * 4096 };

struct rig {
    struct caches *caches;
    struct caller *caller, *other;
    char *memory;
    int given;
    bool refuses;
};

static const struct cache_shape shape = { HEADS, DIM, DIM_V, ATTN_F32, false, PAGE };

/* Gives the pool its device's memory. Fails the test at the second call, because the pool must ask only once. */
static attn_status give(void *context, size_t bytes, void **memory, attn_error *err)
{
    struct rig *rig = context;
    assert_int_equal(bytes, POOL_BYTES);
    if (rig->given++ > 0) fail_msg("asked for memory twice");
    if (rig->refuses) return attn_fail(err, ATTN_NO_MEMORY, NULL, "there is none");
    *memory = rig->memory;
    return ATTN_OK;
}

static int set_up(void **state)
{
    struct rig *rig = calloc(1, sizeof *rig);
    rig->memory = aligned_alloc(64, POOL_BYTES);
    memset(rig->memory, 0xee, POOL_BYTES);
    rig->caches = caches_new(CACHES_MAX_COUNT);
    rig->caller = caller_new();
    rig->other = caller_new();
    rig->caller->percent = rig->other->percent = 100;
    caches_add_pool(rig->caches, 0, "cpu", &(struct caches_source){ give, rig }, POOL_BYTES);
    assert_int_equal(caches_held_bytes(rig->caches), 0);
    *state = rig;
    return 0;
}

static int tear_down(void **state)
{
    struct rig *rig = *state;
    struct caches_totals totals;
    caches_expire(rig->caches, INT64_MAX);
    caches_totals(rig->caches, &totals);
    assert_int_equal(totals.caches + totals.pages + totals.used_bytes + totals.shared_pages, 0);
    assert_int_equal(rig->caller->cache_bytes + rig->caller->caches + rig->other->cache_bytes, 0);
    assert_int_equal(rig->caller->cache_numbers + rig->other->cache_numbers, 0);
    caches_free(rig->caches);
    caller_release(rig->caller);
    caller_release(rig->other);
    free(rig->memory);
    free(rig);
    return 0;
}

static struct cache_info made(struct rig *rig, struct caller *caller)
{
    struct cache_info info;
    attn_error err;
    assert_int_equal(caches_create(rig->caches, caller, &shape, NULL, NULL, CACHES_TTL_MS, &info, &err), ATTN_OK);
    return info;
}

/* a step (a decode or an append) on caches, with the memory that it needs */
struct trial {
    struct cache_step step;
    char ids[8][CACHE_ID_BYTES];
    float *k, *v;
    void *table;
};

/* Looks up `rows` caches for a step (a decode or an append) that appends `append` positions to each. The new positions
 * of cache b hold the numbers tags[b], tags[b] + 1, and so on. */
static attn_status look(struct rig *rig, struct trial *t, int rows, const struct cache_info *infos, int64_t append,
                        const int *tags, attn_error *err)
{
    *t = (struct trial){ 0 };
    for (int r = 0; r < rows; r++) memcpy(t->ids[r], infos[r].id, CACHE_ID_BYTES);
    const attn_status status = caches_look(rig->caches, rig->caller, t->ids, rows, append, false, &t->step, err);
    t->k = calloc((size_t)(rows * append + 1) * HEADS * DIM, sizeof *t->k);
    t->v = calloc((size_t)(rows * append + 1) * HEADS * DIM_V, sizeof *t->v);
    for (int64_t i = 0; i < rows * append; i++) {
        for (int c = 0; c < HEADS * DIM; c++) t->k[i * HEADS * DIM + c] = (float)(tags[i / append] + i % append);
        for (int c = 0; c < HEADS * DIM_V; c++) t->v[i * HEADS * DIM_V + c] = -(float)(tags[i / append] + i % append);
    }
    t->step.k = (char *)t->k;
    t->step.v = (char *)t->v;
    return status;
}

static attn_status begin(struct trial *t, uint64_t scan, bool *wait, attn_error *err)
{
    size_t bytes;
    const attn_status status = caches_table_bytes(&t->step, &bytes, err);
    if (status != ATTN_OK) return status;
    t->table = aligned_alloc(64, bytes);
    return caches_begin(&t->step, scan, t->table, wait, err);
}

static void carry_out(const struct trial *t)
{
    for (int64_t i = 0; i < t->step.move_count; i++) {
        const attn_move *m = &t->step.moves[i];
        if (m->from) memcpy(m->to, m->from, m->bytes);
        else memset(m->to, 0, m->bytes);
    }
}

static void end(struct trial *t, bool commit)
{
    caches_end(&t->step, commit);
    caches_drop_step(&t->step);
    free(t->k), free(t->v), free(t->table);
}

static attn_status append(struct rig *rig, const struct cache_info *info, int64_t count, int tag, bool commit,
                          attn_error *err)
{
    struct trial t;
    bool wait = false;
    attn_status status = look(rig, &t, 1, info, count, &tag, err);
    if (status == ATTN_OK) status = begin(&t, 1, &wait, err);
    assert_false(wait);
    if (status == ATTN_OK) carry_out(&t);
    end(&t, commit && status == ATTN_OK);
    return status;
}

/* Reads a cache with a decode that appends nothing, and compares every position. Memory after the last position must be
 * cleared, or hold data of the same cache. */
static void assert_holds(struct rig *rig, const struct cache_info *info, const int *want, int64_t length)
{
    struct trial t;
    attn_error err;
    bool wait;
    assert_int_equal(look(rig, &t, 1, info, 0, NULL, &err), ATTN_OK);
    assert_int_equal(begin(&t, 1, &wait, &err), ATTN_OK);
    assert_false(wait);
    assert_int_equal(t.step.lengths[0], length);
    assert_int_equal(t.step.move_count, 0);
    for (int64_t i = 0; i < (length + PAGE - 1) / PAGE * PAGE; i++) {
        const float *page = (const float *)(t.step.pool + (size_t)t.step.table[i / PAGE] * t.step.granule);
        for (int c = 0; c < HEADS * DIM; c++) {
            const float x = page[i % PAGE * HEADS * DIM + c];
            assert_true(i < length ? x == (float)want[i] : x == x && x > -1 && x < 1e6f);
        }
        for (int c = 0; c < HEADS * DIM_V; c++) {
            const float x = page[PAGE * HEADS * DIM + i % PAGE * HEADS * DIM_V + c];
            assert_true(i < length ? x == -(float)want[i] : x == x && x < 1 && x > -1e6f);
        }
    }
    end(&t, true);
}

static void test_positions_are_where_the_table_says(void **state)
{
    struct rig *rig = *state;
    struct cache_info info = made(rig, rig->caller);
    attn_error err;
    int want[300];
    for (int i = 0; i < 300; i++) want[i] = i;
    assert_holds(rig, &info, want, 0);
    assert_int_equal(append(rig, &info, 1, 0, true, &err), ATTN_OK);
    assert_holds(rig, &info, want, 1);
    assert_int_equal(append(rig, &info, 63, 1, true, &err), ATTN_OK);
    assert_holds(rig, &info, want, 64);
    assert_int_equal(append(rig, &info, 200, 64, true, &err), ATTN_OK);
    assert_holds(rig, &info, want, 264);
    /* Because the device fails in this append, the appended positions do not count. */
    assert_int_equal(append(rig, &info, 36, 9999, false, &err), ATTN_OK);
    assert_holds(rig, &info, want, 264);
    assert_int_equal(caches_get(rig->caches, rig->caller, info.id, &info, &err), ATTN_OK);
    assert_int_equal(info.length, 264);
    assert_int_equal(info.pages, 5);
    assert_int_equal(caches_truncate(rig->caches, rig->caller, info.id, 65, &info, &err), ATTN_OK);
    assert_int_equal(info.pages, 2);
    assert_int_equal(append(rig, &info, 235, 65, true, &err), ATTN_OK);
    assert_holds(rig, &info, want, 300);
    assert_int_equal(caches_delete(rig->caches, rig->caller, info.id, &err), ATTN_OK);
    assert_int_equal(caches_delete(rig->caches, rig->caller, info.id, &err), ATTN_NOT_FOUND);
}

static void test_a_fork_shares_pages_until_one_of_them_writes(void **state)
{
    struct rig *rig = *state;
    struct cache_info a = made(rig, rig->caller), b, c;
    attn_error err;
    int want[200], other[200];
    for (int i = 0; i < 200; i++) want[i] = i, other[i] = i < 100 ? i : 5000 + i - 100;
    assert_int_equal(append(rig, &a, 130, 0, true, &err), ATTN_OK);
    assert_int_equal(caches_fork(rig->caches, rig->caller, a.id, 100, &b, &err), ATTN_OK);
    assert_int_equal(b.length, 100);
    assert_int_equal(b.pages, 2);
    assert_int_equal(b.shared_pages, 2);
    struct caches_totals totals;
    caches_totals(rig->caches, &totals);
    assert_int_equal(totals.pages, 3);
    /* Another cache shares the second page, so the append copies that page. */
    assert_int_equal(append(rig, &b, 100, 5000, true, &err), ATTN_OK);
    assert_holds(rig, &b, other, 200);
    assert_holds(rig, &a, want, 130);
    assert_int_equal(append(rig, &a, 70, 130, true, &err), ATTN_OK);
    assert_holds(rig, &a, want, 200);
    assert_holds(rig, &b, other, 200);
    assert_int_equal(caches_fork(rig->caches, rig->caller, b.id, -1, &c, &err), ATTN_OK);
    assert_int_equal(caches_delete(rig->caches, rig->caller, b.id, &err), ATTN_OK);
    assert_holds(rig, &c, other, 200);
    assert_int_equal(caches_fork(rig->caches, rig->caller, c.id, 201, &b, &err), ATTN_INVALID);
    assert_string_equal(err.text, "length: is 201, the cache has 200 positions");
}

static void test_what_goes_between_look_and_begin_is_gone(void **state)
{
    struct rig *rig = *state;
    struct cache_info two[] = { made(rig, rig->caller), made(rig, rig->caller) }, third = made(rig, rig->caller);
    struct trial t;
    attn_error err;
    bool wait;
    for (int i = 0; i < 2; i++) assert_int_equal(append(rig, &two[i], 10, 100 * i, true, &err), ATTN_OK);

    assert_int_equal(look(rig, &t, 2, two, 0, NULL, &err), ATTN_OK);
    assert_int_equal(caches_delete(rig->caches, rig->caller, third.id, &err), ATTN_OK);
    assert_int_equal(begin(&t, 0, &wait, &err), ATTN_OK);
    assert_int_equal(t.step.table_lengths[1], 10);
    end(&t, true);

    assert_int_equal(look(rig, &t, 2, two, 0, NULL, &err), ATTN_OK);
    assert_int_equal(caches_delete(rig->caches, rig->caller, two[1].id, &err), ATTN_OK);
    assert_int_equal(caches_ask(&t.step, 1, &wait, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.member, "/caches/1");
    assert_int_equal(begin(&t, 0, &wait, &err), ATTN_NOT_FOUND);
    end(&t, false);
    assert_int_equal(append(rig, &two[0], 5, 10, true, &err), ATTN_OK);
}

static void test_a_step_knows_what_its_rows_have_in_common(void **state)
{
    struct rig *rig = *state;
    struct cache_info infos[4];
    attn_error err;
    bool wait;
    infos[0] = made(rig, rig->caller);
    assert_int_equal(append(rig, &infos[0], 200, 0, true, &err), ATTN_OK);
    assert_int_equal(caches_fork(rig->caches, rig->caller, infos[0].id, 150, &infos[1], &err), ATTN_OK);
    assert_int_equal(caches_fork(rig->caches, rig->caller, infos[1].id, -1, &infos[2], &err), ATTN_OK);
    infos[3] = made(rig, rig->caller);
    assert_int_equal(append(rig, &infos[3], 200, 0, true, &err), ATTN_OK);
    struct trial t;
    const int tags[4] = { 0 };
    assert_int_equal(look(rig, &t, 4, infos, 0, tags, &err), ATTN_OK);
    assert_int_equal(begin(&t, 1, &wait, &err), ATTN_OK);
    const int32_t reading[] = { 0, 150, 150, 0 };
    assert_memory_equal(t.step.prefix_keys, reading, sizeof reading);
    assert_false(t.step.shares);
    end(&t, true);
    /* The append first copies the last page of each fork, because that page is shared and only partly filled. */
    assert_int_equal(look(rig, &t, 4, infos, 1, tags, &err), ATTN_OK);
    assert_int_equal(begin(&t, 2, &wait, &err), ATTN_OK);
    const int32_t appending[] = { 0, 128, 128, 0 };
    assert_memory_equal(t.step.prefix_keys, appending, sizeof appending);
    end(&t, true);
}

/* Forks are caches that share pages. Their page-table entries are limited, because forks of one long cache could use up
 * the host's memory. */
static void test_forks_of_a_long_cache_have_a_limit(void **state)
{
    struct rig *rig = *state;
    enum { PAGES = 60, FORKS = CACHES_NUMBERS / PAGES - 1 };
    struct cache_info a = made(rig, rig->caller), *forks = calloc(FORKS, sizeof *forks), one;
    attn_error err;
    assert_int_equal(append(rig, &a, PAGES * PAGE, 0, true, &err), ATTN_OK);
    for (int i = 0; i < FORKS; i++)
        assert_int_equal(caches_fork(rig->caches, rig->caller, a.id, -1, &forks[i], &err), ATTN_OK);
    assert_int_equal(caches_fork(rig->caches, rig->caller, a.id, -1, &one, &err), ATTN_FULL);
    assert_string_equal(err.text,
                        "the caches of cpu have 65520 pages together, those that they share counted for each, "
                        "and may have 65536; delete forks");
    assert_int_equal(caches_fork(rig->caches, rig->caller, a.id, 16 * PAGE, &one, &err), ATTN_OK);
    assert_int_equal(caches_truncate(rig->caches, rig->caller, forks[0].id, 0, &one, &err), ATTN_OK);
    assert_int_equal(caches_fork(rig->caches, rig->caller, a.id, -1, &one, &err), ATTN_OK);
    rig->caller->percent = 50;
    assert_int_equal(caches_fork(rig->caches, rig->caller, a.id, 1, &one, &err), ATTN_QUOTA);
    rig->caller->percent = 100;
    assert_int_equal(caches_delete(rig->caches, rig->caller, a.id, &err), ATTN_OK);
    for (int i = 0; i < FORKS; i++) (void)caches_delete(rig->caches, rig->caller, forks[i].id, &err);
    free(forks);
}

static attn_status give_all(void *context, size_t bytes, void **memory, attn_error *err)
{
    (void)err;
    *memory = *(void **)context = aligned_alloc(64, bytes);
    return ATTN_OK;
}

/* A step (a decode or an append) has a page table, which lists the pages of its caches. In this test the table has the
 * largest size allowed. If a cache then grows by a page before the step begins, the table is too large, and
 * caches_table_bytes() fails. */
static void test_a_table_has_its_limit_when_its_caches_have_grown(void **state)
{
    enum { PAGES = CACHES_STEP_PAGES / CACHES_ROWS };
    struct rig *rig = *state, large = { .caches = caches_new(CACHES_MAX_COUNT), .caller = rig->caller };
    struct cache_step step;
    static char ids[CACHES_ROWS][CACHE_ID_BYTES];
    void *memory = NULL;
    size_t bytes;
    attn_error err;
    caches_add_pool(large.caches, 0, "cpu", &(struct caches_source){ give_all, &memory }, (PAGES + 4) * 4096);
    const struct cache_info info = made(&large, rig->caller);
    for (int row = 0; row < CACHES_ROWS; row++) memcpy(ids[row], info.id, CACHE_ID_BYTES);
    assert_int_equal(append(&large, &info, PAGES * PAGE, 0, true, &err), ATTN_OK);
    memset(&step, 0, sizeof step);
    assert_int_equal(caches_look(large.caches, rig->caller, ids, CACHES_ROWS, 0, false, &step, &err), ATTN_OK);
    assert_int_equal(caches_table_bytes(&step, &bytes, &err), ATTN_OK);
    assert_true(bytes >= CACHES_STEP_PAGES * sizeof(int32_t));
    assert_int_equal(append(&large, &info, 1, 0, true, &err), ATTN_OK);
    assert_int_equal(caches_table_bytes(&step, &bytes, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text, "caches: 1024 rows of up to 1025 pages, at most 1048576 are taken at once");
    caches_drop_step(&step);
    assert_int_equal(caches_delete(large.caches, rig->caller, info.id, &err), ATTN_OK);
    caches_free(large.caches);
    free(memory);
}

/* ---- Tests of caches on several devices -------------------------------------------------------------------------- */

enum { POOLS = 4 };

struct several {
    struct rig rig;
    void *memory[POOLS];
};

static void add_several(struct several *s, struct caller *caller)
{
    static const char *const names[POOLS] = { "a", "b", "c", "d" };
    *s = (struct several){ .rig = { .caches = caches_new(CACHES_MAX_COUNT), .caller = caller } };
    for (int i = 0; i < POOLS; i++)
        caches_add_pool(s->rig.caches, i, names[i], &(struct caches_source){ give_all, &s->memory[i] }, POOL_BYTES);
}

static void drop_several(struct several *s)
{
    for (int64_t more = 1; more > 0;) {
        struct caches_totals totals;
        caches_expire(s->rig.caches, INT64_MAX);
        caches_totals(s->rig.caches, &totals);
        more = totals.caches;
    }
    assert_int_equal(s->rig.caller->cache_bytes + s->rig.caller->cache_numbers, 0);
    caches_free(s->rig.caches);
    for (int i = 0; i < POOLS; i++) free(s->memory[i]);
}

static void test_caches_that_are_made_before_they_are_filled_are_on_all_devices(void **state)
{
    struct rig *rig = *state;
    struct several s;
    struct cache_info infos[64];
    attn_error err;
    int on[POOLS] = { 0 };
    add_several(&s, rig->caller);
    for (int i = 0; i < 64; i++) {
        infos[i] = made(&s.rig, rig->caller);
        on[infos[i].device[0] - 'a']++;
    }
    for (int i = 0; i < POOLS; i++) assert_int_equal(on[i], 16);
    for (int i = 0; i < 64; i++) assert_int_equal(append(&s.rig, &infos[i], 4 * PAGE, 0, true, &err), ATTN_OK);
    struct caches_totals totals;
    caches_totals(s.rig.caches, &totals);
    assert_int_equal(totals.used_bytes, POOLS * POOL_BYTES);

    for (int i = 0; i < 64; i++)
        if (infos[i].device[0] != 'a' || i % 8 == 0)
            assert_int_equal(caches_delete(s.rig.caches, rig->caller, infos[i].id, &err), ATTN_OK);
    memset(on, 0, sizeof on);
    for (int i = 0; i < 44; i++) on[made(&s.rig, rig->caller).device[0] - 'a']++;
    assert_int_equal(on[0] + 8, on[1]);
    assert_int_equal(on[1], on[2]);
    assert_int_equal(on[2], on[3]);
    drop_several(&s);
}

static void test_a_token_has_its_share_of_all_devices_together(void **state)
{
    struct rig *rig = *state;
    struct several s;
    struct cache_info infos[3], fork;
    attn_error err;
    add_several(&s, rig->caller);
    rig->caller->percent = 50;
    for (int i = 0; i < 3; i++) infos[i] = made(&s.rig, rig->caller);
    /* The cache fills all pages of one device, and so has 64 page-table entries. */
    assert_int_equal(append(&s.rig, &infos[0], 64 * PAGE, 0, true, &err), ATTN_OK);
    assert_int_equal(append(&s.rig, &infos[1], 63 * PAGE, 0, true, &err), ATTN_OK);
    assert_int_equal(append(&s.rig, &infos[2], 2 * PAGE, 0, true, &err), ATTN_QUOTA);
    assert_string_equal(err.text, "this token's caches hold 520192 bytes of pages and may hold 524288 (--token-share), "
                                  "this request needs 8192 more; delete or truncate caches");
    assert_int_equal(append(&s.rig, &infos[2], PAGE, 0, true, &err), ATTN_OK);
    for (int i = 0; i < CACHES_NUMBERS / 64 - 1; i++)
        assert_int_equal(caches_fork(s.rig.caches, rig->caller, infos[0].id, -1, &fork, &err), ATTN_OK);
    assert_int_equal(caches_fork(s.rig.caches, rig->caller, infos[0].id, -1, &fork, &err), ATTN_FULL);
    rig->caller->percent = 25;
    assert_int_equal(caches_fork(s.rig.caches, rig->caller, infos[0].id, -1, &fork, &err), ATTN_QUOTA);
    assert_int_equal(caches_delete(s.rig.caches, rig->caller, infos[1].id, &err), ATTN_OK);
    rig->caller->percent = 50;
    caches_lose(s.rig.caches, infos[0].device[0] - 'a');
    fork = made(&s.rig, rig->caller);
    assert_int_equal(append(&s.rig, &fork, 64 * PAGE, 0, true, &err), ATTN_OK);
    infos[0] = made(&s.rig, rig->caller);
    assert_int_equal(append(&s.rig, &infos[0], 32 * PAGE, 0, true, &err), ATTN_QUOTA);
    assert_int_equal(append(&s.rig, &infos[0], 31 * PAGE, 0, true, &err), ATTN_OK);
    rig->caller->percent = 100;
    drop_several(&s);
}

static void test_where_one_device_has_no_memory_the_others_have_the_caches(void **state)
{
    struct rig *rig = *state;
    struct rig refusing = { .refuses = true };
    struct caches *const caches = caches_new(10);
    void *memory = NULL;
    caches_add_pool(caches, 0, "a", &(struct caches_source){ give_all, &memory }, POOL_BYTES);
    caches_add_pool(caches, 1, "b", &(struct caches_source){ give, &refusing }, POOL_BYTES);
    for (int i = 0; i < 3; i++) {
        struct cache_info info;
        attn_error err;
        /* Device b has refused to give the pool memory, so the pool asks again for each new cache. give() accepts only
         * one call, so its count of calls is set back to 0. */
        refusing.given = 0;
        assert_int_equal(caches_create(caches, rig->caller, &shape, NULL, NULL, 1000, &info, &err), ATTN_OK);
        assert_string_equal(info.device, "a");
    }
    caches_expire(caches, INT64_MAX);
    caches_free(caches);
    free(memory);
}

/* ---- Tests of the limits on caches ------------------------------------------------------------------------------- */

static void test_a_full_pool_changes_nothing(void **state)
{
    struct rig *rig = *state;
    struct cache_info infos[2] = { made(rig, rig->caller), made(rig, rig->caller) };
    attn_error err;
    int want[64 * 64];
    for (int i = 0; i < 64 * 64; i++) want[i] = i;
    assert_int_equal(append(rig, &infos[0], 60, 0, true, &err), ATTN_OK);
    struct caches_totals before, after;
    caches_totals(rig->caches, &before);
    struct trial t;
    bool wait;
    const int tags[2] = { 60, 0 };
    assert_int_equal(look(rig, &t, 2, infos, 32 * PAGE, tags, &err), ATTN_OK);
    assert_int_equal(begin(&t, 1, &wait, &err), ATTN_FULL);
    assert_string_equal(err.text,
                        "the pool of cpu is full: 4096 of 262144 bytes are in pages (--kv-bytes), this request "
                        "needs 262144 more; delete or truncate caches");
    end(&t, false);
    caches_totals(rig->caches, &after);
    assert_memory_equal(&before, &after, sizeof before);
    assert_holds(rig, &infos[0], want, 60);
    assert_int_equal(append(rig, &infos[0], 63 * PAGE + 4, 60, true, &err), ATTN_OK);
    assert_holds(rig, &infos[0], want, 64 * 64);
    assert_int_equal(append(rig, &infos[1], 1, 0, true, &err), ATTN_FULL);
}

static void test_a_token_may_use_its_share(void **state)
{
    struct rig *rig = *state;
    struct cache_info info = made(rig, rig->caller);
    attn_error err;
    rig->caller->percent = 50;
    assert_int_equal(append(rig, &info, 20 * PAGE, 0, true, &err), ATTN_OK);
    assert_int_equal(append(rig, &info, 13 * PAGE, 0, true, &err), ATTN_QUOTA);
    assert_string_equal(err.text, "this token's caches hold 81920 bytes of pages and may hold 131072 (--token-share), "
                                  "this request needs 53248 more; delete or truncate caches");
    assert_int_equal(append(rig, &info, 12 * PAGE, 0, true, &err), ATTN_OK);
    assert_int_equal(append(rig, &info, 1, 0, true, &err), ATTN_QUOTA);
    rig->caller->percent = 100;
    assert_int_equal(append(rig, &info, 1, 0, true, &err), ATTN_OK);
}

/* A step (a decode or an append) that needs more memory than the whole pool has is refused as too large, however much
 * is free. */
static void test_what_can_never_fit_is_too_large(void **state)
{
    struct rig *rig = *state;
    struct cache_info info = made(rig, rig->caller);
    attn_error err;
    assert_int_equal(append(rig, &info, 65 * PAGE, 0, true, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text,
                        "this request needs 266240 bytes of pages, the pool of cpu has 262144 in all (--kv-bytes)");
    rig->caller->percent = 50;
    assert_int_equal(append(rig, &info, 33 * PAGE, 0, true, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text,
                        "this request needs 135168 bytes of pages, this token may have 131072 in all (--token-share)");
    assert_int_equal(append(rig, &info, 32 * PAGE, 0, true, &err), ATTN_OK);
}

static void test_room_that_is_in_pieces_is_said_to_be(void **state)
{
    struct rig *rig = *state;
    static const struct cache_shape wide = { HEADS, 2 * DIM, 2 * DIM_V, ATTN_F32, false, PAGE };
    struct cache_info infos[64], two;
    attn_error err;
    for (int i = 0; i < 64; i++) {
        infos[i] = made(rig, rig->caller);
        assert_int_equal(append(rig, &infos[i], 1, 0, true, &err), ATTN_OK);
    }
    for (int i = 0; i < 64; i += 2)
        assert_int_equal(caches_delete(rig->caches, rig->caller, infos[i].id, &err), ATTN_OK);
    assert_int_equal(caches_create(rig->caches, rig->caller, &wide, NULL, NULL, CACHES_TTL_MS, &two, &err), ATTN_OK);
    assert_int_equal(append(rig, &two, 3 * PAGE, 0, true, &err), ATTN_FULL);
    assert_string_equal(err.text,
                        "the pool of cpu has 131072 of 262144 bytes free (--kv-bytes), but in pieces between "
                        "pages: this request does not find 3 times 8192 bytes there; delete or truncate caches");
    assert_int_equal(caches_delete(rig->caches, rig->caller, infos[1].id, &err), ATTN_OK);
    assert_int_equal(append(rig, &two, 3 * PAGE, 0, true, &err), ATTN_FULL);
    assert_memory_equal(err.text, "the pool of cpu has 135168 of ", 30);
}

static void test_what_has_expired_is_in_nobodys_way(void **state)
{
    struct rig *rig = *state;
    struct cache_info old = made(rig, rig->caller), info;
    attn_error err;
    rig->caller->percent = 50;
    assert_int_equal(append(rig, &old, 32 * PAGE, 0, true, &err), ATTN_OK);
    late_s += CACHES_TTL_MS / 1000;
    info = made(rig, rig->caller);
    assert_int_equal(append(rig, &info, 32 * PAGE, 0, true, &err), ATTN_OK);
}

static void test_a_cache_belongs_to_who_made_it(void **state)
{
    struct rig *rig = *state;
    struct cache_info mine = made(rig, rig->caller), theirs = made(rig, rig->other), info;
    attn_error err;
    struct trial t;
    assert_int_equal(caches_get(rig->caches, rig->other, mine.id, &info, &err), ATTN_NOT_FOUND);
    assert_int_equal(caches_fork(rig->caches, rig->other, mine.id, 0, &info, &err), ATTN_NOT_FOUND);
    assert_int_equal(caches_truncate(rig->caches, rig->other, mine.id, 0, &info, &err), ATTN_NOT_FOUND);
    assert_int_equal(caches_delete(rig->caches, rig->other, mine.id, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.text, "this cache is unknown, deleted or expired; POST /v1/caches makes one");
    const struct cache_info both[2] = { mine, theirs };
    assert_int_equal(look(rig, &t, 2, both, 0, NULL, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.member, "/caches/1");
    end(&t, false);
    struct cache_info listed[4];
    int written, count;
    caches_list(rig->caches, rig->caller, listed, 4, &written, &count);
    assert_int_equal(written, 1);
    assert_int_equal(count, 1);
    assert_string_equal(listed[0].id, mine.id);
    mine.id[0] = mine.id[0] == '0' ? '1' : '0';
    assert_int_equal(caches_get(rig->caches, rig->caller, mine.id, &info, &err), ATTN_NOT_FOUND);
    assert_non_null(strstr(err.text, "made by another process"));
}

static char *sequence(struct rig *rig, struct caller *caller, const char *name, bool start, char id[CACHE_ID_BYTES])
{
    attn_error err;
    const attn_status status = caches_sequence(rig->caches, caller, name, start ? &shape : NULL, id, &err);
    if (status == ATTN_OK) return id;
    assert_int_equal(status, ATTN_NOT_FOUND);
    assert_string_equal(err.member, "/parameters/sequence_id");
    return NULL;
}

static void test_a_sequence_belongs_to_who_started_it(void **state)
{
    struct rig *rig = *state;
    char mine[CACHE_ID_BYTES], theirs[CACHE_ID_BYTES], again[CACHE_ID_BYTES];
    struct cache_info info;
    attn_error err;
    assert_null(sequence(rig, rig->caller, "7", false, mine));
    assert_non_null(sequence(rig, rig->caller, "7", true, mine));
    assert_null(sequence(rig, rig->other, "7", false, theirs));
    assert_non_null(sequence(rig, rig->other, "7", true, theirs));
    assert_string_not_equal(mine, theirs);
    assert_string_equal(sequence(rig, rig->caller, "7", false, again), mine);
    assert_string_equal(sequence(rig, rig->other, "7", false, again), theirs);
    assert_int_equal(caches_get(rig->caches, rig->other, mine, &info, &err), ATTN_NOT_FOUND);
    assert_null(sequence(rig, rig->caller, "70", false, again));
    /* A new sequence (a named cache of KServe) replaces the caller's older one of that name, but not another
     * caller's. */
    assert_string_not_equal(sequence(rig, rig->other, "7", true, again), theirs);
    assert_int_equal(caches_get(rig->caches, rig->other, theirs, &info, &err), ATTN_NOT_FOUND);
    assert_string_equal(sequence(rig, rig->caller, "7", false, again), mine);
    assert_int_equal(caches_delete(rig->caches, rig->caller, mine, &err), ATTN_OK);
    assert_null(sequence(rig, rig->caller, "7", false, again));
    assert_non_null(sequence(rig, rig->other, "7", false, again));
}

static void test_names_that_meet_under_a_known_hash_do_not_share_a_bucket(void **state)
{
    struct rig *rig = *state;
    char name[16], id[CACHE_ID_BYTES];
    int longest = 0, started = 0;
    for (int i = 0; started < 4096; i++) {
        snprintf(name, sizeof name, "%d", i);
        if (text_hash(TEXT_HASH_BEGIN, name, SIZE_MAX) % 4096 != 7) continue;
        assert_non_null(sequence(rig, rig->caller, name, true, id));
        started++;
    }
    for (int i = 0; i < BUCKETS; i++) {
        int names = 0, ids = 0;
        for (const struct cache *cache = rig->caches->sequences[i]; cache; cache = cache->next_sequence) names++;
        for (const struct cache *cache = rig->caches->buckets[i]; cache; cache = cache->chain) ids++;
        if (names > longest) longest = names;
        if (ids > longest) longest = ids;
    }
    assert_in_range(longest, 1, 8); /* Because the hash key is random, nine names in one bucket would occur once in
                                     * 10^11 runs. */
    for (int more = 1; more > 0; more = rig->caches->count) caches_expire(rig->caches, INT64_MAX);
}

static int bucket_of_name(const struct caches *caches, const struct caller *caller, const char *name)
{
    for (int i = 0; i < BUCKETS; i++)
        for (const struct cache *cache = caches->sequences[i]; cache; cache = cache->next_sequence)
            if (cache->caller == caller && strcmp(cache->sequence, name) == 0) return i;
    return -1;
}

static void test_the_names_of_one_caller_say_nothing_about_those_of_another(void **state)
{
    struct rig *rig = *state;
    char name[16], id[CACHE_ID_BYTES];
    int same = 0;
    for (int i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "%d", i);
        assert_non_null(sequence(rig, rig->caller, name, true, id));
        assert_non_null(sequence(rig, rig->other, name, true, id));
        same += bucket_of_name(rig->caches, rig->caller, name) == bucket_of_name(rig->caches, rig->other, name);
    }
    assert_in_range(same, 0, 4);
}

/* Starting a sequence (a named cache) again must leave no old entry of that name. */
static void test_a_name_is_never_there_twice(void **state)
{
    struct rig *rig = *state;
    char id[CACHE_ID_BYTES];
    for (int i = 0; i < 3; i++) {
        assert_non_null(sequence(rig, rig->caller, "again", true, id));
        late_s += CACHES_TTL_MS / 1000;
    }
    assert_int_equal(rig->caches->count, 1);
    assert_int_equal(rig->caches->expired, 2);
    assert_null(sequence(rig, rig->caller, "again", false, id));
    assert_int_equal(rig->caches->count, 0);
}

static void test_a_sequence_that_nobody_goes_on_with_expires(void **state)
{
    struct rig *rig = *state;
    char idle[CACHE_ID_BYTES], used[CACHE_ID_BYTES], again[CACHE_ID_BYTES];
    struct cache_info info = { .device = "" };
    struct caches_totals totals;
    attn_error err;
    assert_non_null(sequence(rig, rig->caller, "idle", true, idle));
    assert_non_null(sequence(rig, rig->caller, "used", true, used));
    memcpy(info.id, used, sizeof info.id);
    late_s += CACHES_TTL_MS / 1000 - 1;
    assert_int_equal(append(rig, &info, 1, 0, true, &err), ATTN_OK);
    /* Looking up a sequence (a named cache) does not count as using it. */
    assert_string_equal(sequence(rig, rig->caller, "idle", false, again), idle);
    late_s += 2;
    assert_null(sequence(rig, rig->caller, "idle", false, again));
    assert_string_equal(sequence(rig, rig->caller, "used", false, again), used);
    /* The expired sequence (a named cache of KServe) still exists beside the new one of the same name. */
    assert_non_null(sequence(rig, rig->caller, "idle", true, again));
    assert_string_not_equal(again, idle);
    caches_expire(rig->caches, clock_ms());
    caches_totals(rig->caches, &totals);
    assert_int_equal(totals.expired, 1);
    assert_int_equal(totals.caches, 2);
    assert_string_equal(sequence(rig, rig->caller, "idle", false, idle), again);
}

static void test_an_id_is_forty_digits_in_small_letters(void **state)
{
    struct rig *rig = *state;
    struct cache_info one = made(rig, rig->caller), info;
    attn_error err;
    for (int at = 0; at < CACHE_ID_CHARS; at++) {
        for (int c = -128; c < 128; c++) {
            char id[CACHE_ID_BYTES];
            memcpy(id, one.id, sizeof id);
            id[at] = (char)c;
            const attn_status want = id[at] == one.id[at] ? ATTN_OK : ATTN_NOT_FOUND;
            assert_int_equal(caches_get(rig->caches, rig->caller, id, &info, &err), want);
            /* Only for an id of hexadecimal digits may the error say that it is from another process. */
            const bool digit = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
            if (want != ATTN_OK && at < 8) assert_true(digit == (strstr(err.text, "another process") != NULL));
        }
    }
    assert_int_equal(caches_get(rig->caches, rig->caller, "", &info, &err), ATTN_NOT_FOUND);
}

static void test_a_step_of_a_thread_that_does_not_wait_keeps_nobody_waiting(void **state)
{
    struct rig *rig = *state;
    struct cache_info a = made(rig, rig->caller);
    attn_error err;
    struct trial writes, tries, next;
    const int tags[1] = { 0 };
    bool wait;
    assert_int_equal(look(rig, &tries, 1, &a, 1, tags, &err), ATTN_OK);
    assert_int_equal(begin(&tries, 0, &wait, &err), ATTN_OK);
    assert_false(wait);
    carry_out(&tries);
    end(&tries, true);
    assert_int_equal(look(rig, &writes, 1, &a, 1, tags, &err), ATTN_OK);
    assert_int_equal(begin(&writes, 1, &wait, &err), ATTN_OK);
    assert_int_equal(look(rig, &tries, 1, &a, 0, tags, &err), ATTN_OK);
    assert_int_equal(begin(&tries, 0, &wait, &err), ATTN_OK);
    assert_true(wait);
    end(&writes, false);
    assert_int_equal(look(rig, &next, 1, &a, 1, tags, &err), ATTN_OK);
    /* The append `tries` still waits for the cache. It was not tried again in this scan of the queue, so `next` may
     * begin first. */
    assert_int_equal(begin(&next, 2, &wait, &err), ATTN_OK);
    assert_false(wait);
    end(&next, false);
    free(tries.table);
    assert_int_equal(begin(&tries, 0, &wait, &err), ATTN_OK);
    assert_false(wait);
    end(&tries, true);
}

static void test_steps_on_one_cache_come_one_after_the_other(void **state)
{
    struct rig *rig = *state;
    struct cache_info a = made(rig, rig->caller), b = made(rig, rig->caller), c = made(rig, rig->caller);
    attn_error err;
    struct trial writes, reads, also, waits, behind, apart;
    const struct cache_info ab[2] = { a, b }, bc[2] = { b, c };
    const int tags[2] = { 0, 0 };
    bool wait;
    assert_int_equal(look(rig, &writes, 1, &a, 1, tags, &err), ATTN_OK);
    assert_int_equal(look(rig, &reads, 1, &a, 0, tags, &err), ATTN_OK);
    assert_int_equal(begin(&writes, 1, &wait, &err), ATTN_OK);
    assert_false(wait);
    assert_int_equal(begin(&reads, 2, &wait, &err), ATTN_OK);
    assert_true(wait);
    /* An older append waits for caches a and b. A later append to b must wait too, but not an append to c alone. */
    assert_int_equal(look(rig, &waits, 2, ab, 1, tags, &err), ATTN_OK);
    assert_int_equal(look(rig, &behind, 2, bc, 1, tags, &err), ATTN_OK);
    assert_int_equal(look(rig, &apart, 1, &c, 1, tags, &err), ATTN_OK);
    assert_int_equal(begin(&waits, 3, &wait, &err), ATTN_OK);
    assert_true(wait);
    assert_int_equal(begin(&behind, 3, &wait, &err), ATTN_OK);
    assert_true(wait);
    assert_int_equal(begin(&apart, 4, &wait, &err), ATTN_OK);
    assert_false(wait);
    end(&apart, true);
    carry_out(&writes);
    end(&writes, true);
    free(reads.table);
    assert_int_equal(begin(&reads, 5, &wait, &err), ATTN_OK);
    assert_false(wait);
    assert_int_equal(reads.step.lengths[0], 1);
    assert_int_equal(look(rig, &also, 1, &a, 0, tags, &err), ATTN_OK);
    assert_int_equal(begin(&also, 5, &wait, &err), ATTN_OK);
    assert_false(wait);
    free(waits.table);
    assert_int_equal(begin(&waits, 6, &wait, &err), ATTN_OK);
    assert_true(wait);
    end(&reads, true);
    end(&also, true);
    free(waits.table);
    assert_int_equal(begin(&waits, 7, &wait, &err), ATTN_OK);
    assert_false(wait);
    carry_out(&waits);
    end(&waits, true);
    end(&behind, false);
    const struct cache_info twice[3] = { c, a, c };
    assert_int_equal(look(rig, &behind, 3, twice, 1, (const int[]){ 0, 0, 0 }, &err), ATTN_INVALID);
    assert_string_equal(err.text, "caches: [2] is [0] again, and k and v are appended to each; fork it first");
    end(&behind, false);
}

static void test_truncate_and_delete_take_effect_when_the_step_has_ended(void **state)
{
    struct rig *rig = *state;
    struct cache_info a = made(rig, rig->caller), info;
    attn_error err;
    struct trial t, next;
    bool wait;
    int want[100];
    for (int i = 0; i < 100; i++) want[i] = i;
    assert_int_equal(append(rig, &a, 100, 0, true, &err), ATTN_OK);
    assert_int_equal(look(rig, &t, 1, &a, 0, NULL, &err), ATTN_OK);
    assert_int_equal(begin(&t, 1, &wait, &err), ATTN_OK);
    assert_int_equal(caches_truncate(rig->caches, rig->caller, a.id, 10, &info, &err), ATTN_OK);
    assert_int_equal(info.length, 10);
    assert_int_equal(caches_truncate(rig->caches, rig->caller, a.id, 11, &info, &err), ATTN_INVALID);
    /* A decode in progress still reads the page after the cache's new end, so the pool keeps the page. */
    assert_int_equal(info.pages, 2);
    assert_int_equal(look(rig, &next, 1, &a, 0, NULL, &err), ATTN_OK);
    assert_int_equal(begin(&next, 2, &wait, &err), ATTN_OK);
    assert_true(wait);
    end(&t, true);
    end(&next, false);
    assert_holds(rig, &a, want, 10);
    assert_int_equal(look(rig, &t, 1, &a, 90, (const int[]){ 10 }, &err), ATTN_OK);
    assert_int_equal(begin(&t, 3, &wait, &err), ATTN_OK);
    assert_int_equal(caches_delete(rig->caches, rig->caller, a.id, &err), ATTN_OK);
    struct caches_totals totals;
    caches_totals(rig->caches, &totals);
    assert_int_equal(totals.caches, 0);
    /* The device still writes to the deleted cache's pages, so the pool keeps them. */
    assert_int_equal(totals.pages, 2);
    end(&t, true);
}

static void test_a_device_that_is_lost_takes_its_caches_with_it(void **state)
{
    struct rig *rig = *state;
    struct cache_info a = made(rig, rig->caller), fork, idle = made(rig, rig->caller);
    attn_error err;
    bool wait;
    assert_int_equal(append(rig, &a, 70, 0, true, &err), ATTN_OK);
    assert_int_equal(append(rig, &idle, 70, 0, true, &err), ATTN_OK);
    assert_int_equal(caches_fork(rig->caches, rig->caller, a.id, -1, &fork, &err), ATTN_OK);
    struct trial t;
    assert_int_equal(look(rig, &t, 1, &a, 5, (const int[]){ 70 }, &err), ATTN_OK);
    assert_int_equal(begin(&t, 1, &wait, &err), ATTN_OK);
    caches_lose(rig->caches, 0);
    caches_lose(rig->caches, 0);
    const struct cache_info *const all[] = { &a, &fork, &idle };
    for (int i = 0; i < 3; i++) {
        struct cache_info info;
        assert_int_equal(caches_get(rig->caches, rig->caller, all[i]->id, &info, &err), ATTN_NOT_FOUND);
        assert_non_null(strstr(err.text, "or was on a device that has failed;"));
    }
    assert_true(rig->caller->cache_bytes > 0);
    end(&t, false);
    assert_int_equal(rig->caller->cache_bytes, 0);
    assert_int_equal(caches_create(rig->caches, rig->caller, &shape, NULL, NULL, CACHES_TTL_MS, &a, &err), ATTN_FULL);
    assert_string_equal(err.text, "the device that had memory for caches has failed");
}

static void test_what_nobody_uses_expires(void **state)
{
    struct rig *rig = *state;
    struct cache_info a, info;
    attn_error err;
    struct caches_totals totals;
    assert_int_equal(caches_create(rig->caches, rig->caller, &shape, NULL, NULL, 60000, &a, &err), ATTN_OK);
    const int64_t now_ms = clock_ms();
    caches_expire(rig->caches, now_ms);
    assert_int_equal(caches_get(rig->caches, rig->caller, a.id, &info, &err), ATTN_OK);
    caches_expire(rig->caches, now_ms + 60001);
    assert_int_equal(caches_get(rig->caches, rig->caller, a.id, &info, &err), ATTN_NOT_FOUND);
    caches_totals(rig->caches, &totals);
    assert_int_equal(totals.expired, 1);
}

/* Caches that a step (a decode or an append) uses must not expire, even if the clock jumps ahead by more than a cache's
 * lifetime. */
static void test_time_that_passes_at_once_takes_nothing_away_that_is_in_use(void **state)
{
    (void)state;
    struct caller *const caller = caller_new();
    const float scales[HEADS] = { 1 };
    void *const memory = aligned_alloc(64, POOL_BYTES);
    struct rig rig = { .memory = memory };
    by_s = 2 * CACHES_TTL_MS / 1000;
    caller->percent = 100;
    for (int leap = 1; leap < 10; leap++) {
        struct cache_info info, fork;
        struct trial t;
        attn_error err;
        rig.given = 0;
        rig.caller = caller;
        /* The table has room for one cache only, so caches_fork() looks for an expired cache to remove. */
        rig.caches = caches_new(1);
        caches_add_pool(rig.caches, 0, "cpu", &(struct caches_source){ give, &rig }, POOL_BYTES);
        assert_int_equal(caches_create(rig.caches, caller, &shape, scales, scales, CACHES_TTL_MS, &info, &err),
                         ATTN_OK);
        leap_in = leap;
        const attn_status status = caches_fork(rig.caches, caller, info.id, -1, &fork, &err);
        assert_true(status == ATTN_FULL || status == ATTN_NOT_FOUND);
        leap_in = 0;
        if (status == ATTN_FULL) {
            leap_in = leap;
            (void)look(&rig, &t, 1, &info, 0, NULL, &err);
            leap_in = 0;
            end(&t, false);
        }
        caches_free(rig.caches);
    }
    caller_release(caller);
    free(memory);
}

static void test_shapes_that_cannot_be(void **state)
{
    struct rig *rig = *state;
    struct cache_info info;
    attn_error err;
    static const struct {
        struct cache_shape shape;
        attn_status status;
        const char *text;
    } cases[] = {
        { { 0, 4, 4, ATTN_F16, false, 64 }, ATTN_INVALID, "kv_heads: is 0, must be from 1 to 1024" },
        { { 1, -1, 4, ATTN_F16, false, 64 }, ATTN_INVALID, "head_dim: is -1, must be from 1 to " },
        { { 1, 4, 1 << 20, ATTN_F16, false, 64 }, ATTN_INVALID, "head_dim_v: is 1048576, must be from 1 to " },
        { { 1, 4, 8, ATTN_F16, true, 64 },
          ATTN_INVALID,
          "head_dim_v: is 8, with latent it must be at most head_dim, which is 4" },
        { { 1, 4, 4, ATTN_I32, false, 64 }, ATTN_INVALID, "dtype: is int32, must be float32, float16, bfloat16" },
        { { 1, 4, 4, ATTN_F16, false, 65 }, ATTN_INVALID, "page_size: is 65, must be 64 or 128" },
        { { 1024, 256, 256, ATTN_F32, false, 128 },
          ATTN_TOO_LARGE,
          "a page of 128 positions takes 268435456 bytes, the pool has 262144 (--kv-bytes)" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(caches_create(rig->caches, rig->caller, &cases[i].shape, NULL, NULL, 1000, &info, &err),
                         cases[i].status);
        assert_memory_equal(err.text, cases[i].text, strlen(cases[i].text));
    }
}

static void test_a_device_without_memory_has_no_caches(void **state)
{
    struct rig *rig = *state;
    struct cache_info info;
    attn_error err;
    rig->refuses = true;
    assert_int_equal(caches_create(rig->caches, rig->caller, &shape, NULL, NULL, 1000, &info, &err), ATTN_FULL);
    assert_string_equal(err.text, "cpu has not 262144 bytes for caches (--kv-bytes): there is none");
    rig->refuses = false;
    rig->given = 0;
    (void)made(rig, rig->caller);
    assert_int_equal(caches_held_bytes(rig->caches), POOL_BYTES);
}

/* If the pool cannot allocate its own tables, it must not ask the device for memory, which would then be lost. */
static void test_a_device_gives_nothing_before_there_is_memory_for_the_account_of_it(void **state)
{
    struct rig *rig = *state;
    struct cache_info info;
    attn_error err;
    refused_bytes = (POOL_BYTES / 4096 + 1) * sizeof(int32_t);
    assert_int_equal(caches_create(rig->caches, rig->caller, &shape, NULL, NULL, 1000, &info, &err), ATTN_NO_MEMORY);
    assert_string_equal(err.text, "no memory to keep account of pages");
    assert_int_equal(refused_bytes, 0);
    assert_int_equal(rig->given, 0);
    (void)made(rig, rig->caller);
    assert_int_equal(rig->given, 1);
}

/* A device driver that gives memory only after other threads have used the caches. */
struct slow {
    struct caches *caches;
    struct caller *caller;
    char *memory;
    pthread_t thread;
    _Atomic int asked, looked, made;
    _Atomic bool seen;
};

static void *looker(void *argument)
{
    struct slow *slow = argument;
    struct caches_totals totals;
    caches_totals(slow->caches, &totals);
    atomic_store(&slow->looked, 1);
    return NULL;
}

static void *maker(void *argument)
{
    struct slow *slow = argument;
    struct cache_info info;
    attn_error err;
    if (caches_create(slow->caches, slow->caller, &shape, NULL, NULL, 1000, &info, &err) == ATTN_OK)
        atomic_fetch_add(&slow->made, 1);
    return NULL;
}

static attn_status give_slowly(void *context, size_t bytes, void **memory, attn_error *err)
{
    struct slow *slow = context;
    (void)bytes, (void)err;
    atomic_fetch_add(&slow->asked, 1);
    assert_int_equal(pthread_create(&slow->thread, NULL, looker, slow), 0);
    for (int i = 0; i < 2000 && !atomic_load(&slow->looked); i++) nanosleep(&(struct timespec){ 0, 5000000 }, NULL);
    atomic_store(&slow->seen, atomic_load(&slow->looked) != 0);
    *memory = slow->memory;
    return ATTN_OK;
}

static void test_nobody_waits_while_a_device_gives_memory(void **state)
{
    struct slow slow = { .caches = caches_new(10), .caller = caller_new(), .memory = aligned_alloc(64, POOL_BYTES) };
    pthread_t makers[4];
    (void)state;
    slow.caller->percent = 100;
    caches_add_pool(slow.caches, 0, "cpu", &(struct caches_source){ give_slowly, &slow }, POOL_BYTES);
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&makers[i], NULL, maker, &slow), 0);
    for (int i = 0; i < 4; i++) pthread_join(makers[i], NULL);
    pthread_join(slow.thread, NULL);
    /* /metrics and the scheduler's loop must not wait for the slow driver. */
    assert_true(atomic_load(&slow.seen));
    assert_int_equal(atomic_load(&slow.made), 4);
    assert_int_equal(atomic_load(&slow.asked), 1);
    caches_expire(slow.caches, INT64_MAX);
    caches_free(slow.caches);
    caller_release(slow.caller);
    free(slow.memory);
}

/* ---- Tests of shared pages and of several threads ---------------------------------------------------------------- */

/* A page has 64 positions and 4096 bytes. MANY_PAGES are enough for four lists of several blocks of page numbers. */
enum { MANY_PAGES = 1 << 13, FORKERS = 9, FORK_STEPS = 3000 };
static const struct cache_shape slim = { 1, 1, 1, ATTN_F8E4M3, false, PAGE };

static attn_status give_nothing_to_touch(void *context, size_t bytes, void **memory, attn_error *err)
{
    static char page;
    (void)context, (void)bytes, (void)err;
    *memory = &page; /* the test does not use this memory, so any address will do */
    return ATTN_OK;
}

/* Counts for each page how many caches use it, and compares with the pool's own counts. */
static void assert_counted(struct caches *caches, struct caller *caller)
{
    static int times[MANY_PAGES];
    struct caches_totals totals;
    int64_t pages = 0, shared = 0, numbers = 0;
    memset(times, 0, sizeof times);
    for (const struct cache *cache = caches->oldest; cache; cache = cache->newer)
        for (int64_t i = 0; i < cache->list.count; i++) times[page_list_at(&cache->list, i)]++;
    for (const struct cache *cache = caches->oldest; cache; cache = cache->newer) {
        struct cache_info info;
        attn_error err;
        int64_t own = 0;
        for (int64_t i = 0; i < cache->list.count; i++) own += times[page_list_at(&cache->list, i)] > 1;
        numbers += cache->list.count;
        assert_int_equal(caches_get(caches, caller, cache->id, &info, &err), ATTN_OK);
        assert_int_equal(info.shared_pages, own);
        assert_int_equal(info.pages, cache->list.count);
    }
    for (int i = 0; i < MANY_PAGES; i++) pages += times[i] > 0, shared += times[i] > 1;
    caches_totals(caches, &totals);
    assert_int_equal(totals.shared_pages, shared);
    assert_int_equal(totals.pages, pages);
    assert_int_equal(caller->cache_numbers, numbers);
    assert_int_equal(caller->cache_bytes, pages * 4096);
}

struct under_way {
    struct cache_step step;
    char ids[1][CACHE_ID_BYTES];
    void *table;
};

static void begin_one(struct caches *caches, struct caller *caller, const char *id, int64_t append, struct under_way *w)
{
    size_t bytes;
    bool wait;
    attn_error err;
    memcpy(w->ids[0], id, CACHE_ID_BYTES);
    assert_int_equal(caches_look(caches, caller, w->ids, 1, append, false, &w->step, &err), ATTN_OK);
    assert_int_equal(caches_table_bytes(&w->step, &bytes, &err), ATTN_OK);
    w->table = aligned_alloc(64, bytes);
    w->step.k = w->step.v = w->table;
    const attn_status status = caches_begin(&w->step, 0, w->table, &wait, &err);
    assert_true(status == ATTN_OK || status == ATTN_FULL);
}

static void end_one(struct under_way *w, bool commit)
{
    caches_end(&w->step, commit && w->step.begun);
    caches_drop_step(&w->step);
    free(w->table);
}

/* Returns a random length of a cache, often near the end of a block of page numbers. */
static int64_t some_length(unsigned *seed, int64_t most)
{
    const int64_t blocks = rand_r(seed) % 4 * PAGE_BLOCK + rand_r(seed) % 3 - 1;
    const int64_t pages = rand_r(seed) % 2 ? blocks : rand_r(seed) % (3 * PAGE_BLOCK);
    const int64_t length = pages * PAGE + rand_r(seed) % 2 * (rand_r(seed) % PAGE);
    return length < 0 ? 0 : length < most ? length : most;
}

static void do_something(struct caches *caches, struct caller *caller, struct cache_info *of, struct cache_info *other,
                         unsigned *seed)
{
    attn_error err;
    const int what = rand_r(seed) % 8;
    assert_int_equal(caches_get(caches, caller, of->id, of, &err), ATTN_OK);
    if (what < 3 && *other->id == '\0')
        assert_int_equal(caches_fork(caches, caller, of->id, some_length(seed, of->length), other, &err), ATTN_OK);
    else if (what < 6)
        assert_int_equal(caches_truncate(caches, caller, of->id, some_length(seed, of->length), of, &err), ATTN_OK);
    else if (what == 6) {
        assert_int_equal(caches_delete(caches, caller, of->id, &err), ATTN_OK);
        *of->id = '\0';
    }
}

static void test_shared_pages_are_counted_right_whatever_is_forked_and_cut(void **state)
{
    struct caches *const caches = caches_new(CACHES_MAX_COUNT);
    struct caller *const caller = caller_new();
    struct cache_info infos[FORKERS] = { 0 };
    attn_error err;
    unsigned seed = 20261126;
    (void)state;
    caches_add_pool(caches, 0, "cpu", &(struct caches_source){ give_nothing_to_touch, NULL }, MANY_PAGES * 4096);
    for (int i = 0; i < FORK_STEPS; i++) {
        struct cache_info *const of = &infos[rand_r(&seed) % FORKERS], *const other = &infos[rand_r(&seed) % FORKERS];
        if (*of->id == '\0')
            assert_int_equal(caches_create(caches, caller, &slim, NULL, NULL, CACHES_TTL_MS, of, &err), ATTN_OK);
        else if (rand_r(&seed) % 2) do_something(caches, caller, of, other, &seed);
        else {
            struct under_way w;
            const int64_t append = rand_r(&seed) % 4 ? 1 + some_length(&seed, INT64_MAX) : 0;
            begin_one(caches, caller, of->id, append, &w);
            while (*of->id && rand_r(&seed) % 3 == 0) do_something(caches, caller, of, other, &seed);
            end_one(&w, rand_r(&seed) % 5 != 0);
        }
        assert_counted(caches, caller);
    }
    caches_free(caches);
    assert_int_equal(caller->cache_bytes + caller->cache_numbers + caller->caches, 0);
    caller_release(caller);
}

static void test_a_fork_of_a_long_cache_has_its_blocks(void **state)
{
    struct caches *const caches = caches_new(10);
    struct caller *const caller = caller_new();
    struct cache_info a, b;
    struct under_way w;
    attn_error err;
    (void)state;
    caches_add_pool(caches, 0, "cpu", &(struct caches_source){ give_nothing_to_touch, NULL }, MANY_PAGES * 4096);
    assert_int_equal(caches_create(caches, caller, &slim, NULL, NULL, CACHES_TTL_MS, &a, &err), ATTN_OK);
    begin_one(caches, caller, a.id, 2 * PAGE_BLOCK * PAGE - 1, &w);
    end_one(&w, true);
    assert_int_equal(caches_fork(caches, caller, a.id, -1, &b, &err), ATTN_OK);
    const struct page_list *const one = &caches->oldest->list, *const two = &caches->newest->list;
    assert_ptr_equal(one->blocks[0], two->blocks[0]);
    assert_ptr_not_equal(one->blocks[1], two->blocks[1]);
    assert_int_equal(one->blocks[1]->shared, PAGE_BLOCK);
    assert_int_equal(b.shared_pages, 2 * PAGE_BLOCK);

    /* Each call below needs memory for a block of page numbers. Without it the call fails, and changes nothing. */
    refused_bytes = sizeof(struct page_block);
    assert_int_equal(caches_truncate(caches, caller, b.id, PAGE, &b, &err), ATTN_NO_MEMORY);
    assert_int_equal(caches_get(caches, caller, b.id, &b, &err), ATTN_OK);
    assert_int_equal(b.length, 2 * PAGE_BLOCK * PAGE - 1);
    refused_bytes = sizeof(struct page_block);
    assert_int_equal(caches_fork(caches, caller, a.id, PAGE, &a, &err), ATTN_NO_MEMORY);
    assert_counted(caches, caller);
    caches_free(caches);
    caller_release(caller);
}

/* ---- A random sequence of operations on caches, compared with a model -------------------------------------------- */

enum { WALKERS = 12, LONGEST = 5 * PAGE, STEPS = 20000 };

struct model {
    bool lives;
    struct cache_info info;
    int length;
    int at[LONGEST];
};

static void walk_append(struct rig *rig, struct model *model, int picks, int tag)
{
    struct cache_info infos[3];
    struct model *rows[3];
    int tags[3], count = 0;
    for (int i = 0; i < 3; i++) {
        struct model *m = &model[(picks + 5 * i) % WALKERS];
        if (!m->lives) continue;
        rows[count] = m, infos[count] = m->info, tags[count] = tag + 1000 * i, count++;
    }
    const int room = PAGE + picks % PAGE;
    int most = LONGEST;
    for (int i = 0; i < count; i++) most = LONGEST - rows[i]->length < most ? LONGEST - rows[i]->length : most;
    const int n = most < room ? most : room;
    if (count == 0 || n == 0) return;
    struct trial t;
    attn_error err;
    bool wait;
    const bool commit = picks % 7 != 0;
    assert_int_equal(look(rig, &t, count, infos, n, tags, &err), ATTN_OK);
    const attn_status status = begin(&t, 1, &wait, &err);
    assert_true(status == ATTN_OK || status == ATTN_FULL);
    if (status == ATTN_OK) carry_out(&t);
    for (int i = 0; i < count && commit && status == ATTN_OK; i++)
        for (int p = 0; p < n; p++) rows[i]->at[rows[i]->length++] = tags[i] + p;
    end(&t, commit);
}

static void test_a_random_walk_holds_what_its_model_holds(void **state)
{
    struct rig *rig = *state;
    static struct model model[WALKERS];
    attn_error err;
    unsigned seed = 20261123;
    for (int i = 0; i < STEPS; i++) {
        struct model *m = &model[rand_r(&seed) % WALKERS];
        const int what = rand_r(&seed) % 10;
        if (!m->lives) {
            m->info = made(rig, rig->caller);
            m->lives = true;
            m->length = 0;
        } else if (what < 5) walk_append(rig, model, rand_r(&seed) % 1000, rand_r(&seed) % 100000);
        else if (what == 5) {
            m->length = m->length > 0 ? rand_r(&seed) % (m->length + 1) : 0;
            assert_int_equal(caches_truncate(rig->caches, rig->caller, m->info.id, m->length, &m->info, &err), ATTN_OK);
        } else if (what < 8) {
            struct model *to = &model[rand_r(&seed) % WALKERS];
            if (to == m || to->lives) continue;
            to->length = m->length > 0 ? rand_r(&seed) % (m->length + 1) : 0;
            memcpy(to->at, m->at, sizeof to->at);
            assert_int_equal(caches_fork(rig->caches, rig->caller, m->info.id, to->length, &to->info, &err), ATTN_OK);
            to->lives = true;
        } else if (what == 8) {
            assert_int_equal(caches_delete(rig->caches, rig->caller, m->info.id, &err), ATTN_OK);
            m->lives = false;
        } else assert_holds(rig, &m->info, m->at, m->length);
    }
    for (int i = 0; i < WALKERS; i++)
        if (model[i].lives) assert_holds(rig, &model[i].info, model[i].at, model[i].length);
}

int main(void)
{
#define WITH_RIG(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_are_runs_of_granules),
        cmocka_unit_test(test_a_page_that_is_shared_stays_until_the_last_drops_it),
        cmocka_unit_test(test_granules_grow_with_the_memory),
        WITH_RIG(test_positions_are_where_the_table_says),
        WITH_RIG(test_a_fork_shares_pages_until_one_of_them_writes),
        WITH_RIG(test_what_goes_between_look_and_begin_is_gone),
        WITH_RIG(test_a_step_knows_what_its_rows_have_in_common),
        WITH_RIG(test_forks_of_a_long_cache_have_a_limit),
        WITH_RIG(test_a_table_has_its_limit_when_its_caches_have_grown),
        WITH_RIG(test_caches_that_are_made_before_they_are_filled_are_on_all_devices),
        WITH_RIG(test_a_token_has_its_share_of_all_devices_together),
        WITH_RIG(test_where_one_device_has_no_memory_the_others_have_the_caches),
        WITH_RIG(test_a_full_pool_changes_nothing),
        WITH_RIG(test_a_token_may_use_its_share),
        WITH_RIG(test_what_can_never_fit_is_too_large),
        WITH_RIG(test_room_that_is_in_pieces_is_said_to_be),
        WITH_RIG(test_what_has_expired_is_in_nobodys_way),
        WITH_RIG(test_a_cache_belongs_to_who_made_it),
        WITH_RIG(test_a_sequence_belongs_to_who_started_it),
        WITH_RIG(test_names_that_meet_under_a_known_hash_do_not_share_a_bucket),
        WITH_RIG(test_the_names_of_one_caller_say_nothing_about_those_of_another),
        WITH_RIG(test_a_name_is_never_there_twice),
        WITH_RIG(test_a_sequence_that_nobody_goes_on_with_expires),
        WITH_RIG(test_an_id_is_forty_digits_in_small_letters),
        WITH_RIG(test_a_step_of_a_thread_that_does_not_wait_keeps_nobody_waiting),
        WITH_RIG(test_steps_on_one_cache_come_one_after_the_other),
        WITH_RIG(test_truncate_and_delete_take_effect_when_the_step_has_ended),
        WITH_RIG(test_a_device_that_is_lost_takes_its_caches_with_it),
        WITH_RIG(test_what_nobody_uses_expires),
        WITH_RIG(test_a_device_without_memory_has_no_caches),
        WITH_RIG(test_a_device_gives_nothing_before_there_is_memory_for_the_account_of_it),
        cmocka_unit_test(test_nobody_waits_while_a_device_gives_memory),
        cmocka_unit_test(test_time_that_passes_at_once_takes_nothing_away_that_is_in_use),
        WITH_RIG(test_shapes_that_cannot_be),
        cmocka_unit_test(test_shared_pages_are_counted_right_whatever_is_forked_and_cut),
        cmocka_unit_test(test_a_fork_of_a_long_cache_has_its_blocks),
        WITH_RIG(test_a_random_walk_holds_what_its_model_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
