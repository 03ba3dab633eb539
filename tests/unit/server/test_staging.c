/* test_staging.c: tests of the staging pool (memory of request bodies): its limit, memory that it keeps for reuse,
 * growing blocks, and use by several threads. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/base/staging.h"
#include "server/base/caller.h"
#include "server/base/clock.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)

/* A leased block wastes an eighth at most, apart from rounding to whole pages. */
static void test_an_extent_holds_what_was_asked_for_and_wastes_an_eighth_at_most(void **state)
{
    (void)state;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct staging_pool *staging = staging_new(1024 * (int64_t)MIB, 0, NULL);
    for (size_t bytes = 16 * KIB; bytes < 300 * MIB; bytes += bytes / 7 + 1) {
        struct staging_block *e;
        assert_int_equal(staging_lease(staging, NULL, bytes, &e, NULL), ATTN_OK);
        assert_true(e->bytes >= bytes && e->bytes - bytes <= (bytes < 8 * page ? page - 1 : bytes / 8 + 1));
        assert_int_equal((uintptr_t)e->memory % 64, 0);
        ((char *)e->memory)[0] = ((char *)e->memory)[bytes - 1] = 1;
        staging_release(staging, e);
    }
    assert_int_equal(staging_leased_bytes(staging), 0);
    staging_free(staging);
}

static int mappings(void)
{
    FILE *f = fopen("/proc/self/maps", "r");
    int lines = 0;
    assert_non_null(f);
    for (int c; (c = getc(f)) != EOF;) lines += c == '\n';
    fclose(f);
    return lines;
}

/* The pool must count and unmap whole pages, even on systems with pages of 64 KiB. */
static void test_a_block_is_whole_pages_of_this_system_and_all_of_it_is_given_back(void **state)
{
    (void)state;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct staging_pool *staging = staging_new(1024 * (int64_t)MIB, 0, NULL);
    int before = 0;
    for (int round = 0; round < 40; round++) {
        struct staging_block *small, *large;
        assert_int_equal(staging_lease(staging, NULL, 17 * KIB, &small, NULL), ATTN_OK);
        assert_int_equal(staging_lease(staging, NULL, 33 * MIB + 4 * KIB, &large, NULL), ATTN_OK);
        assert_true(small->bytes % page == 0 && large->bytes % page == 0);
        staging_release(staging, small);
        staging_release(staging, large);
        if (round == 0) before = mappings();
    }
    assert_in_range(mappings(), 0, before + 3);
    staging_free(staging);
}

static size_t resident_bytes(void)
{
    char line[256];
    size_t kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) && sscanf(line, "VmRSS: %zu kB", &kib) != 1) continue;
    fclose(f);
    assert_true(kib > 0);
    return kib * KIB;
}

/* Fills the pool with blocks of `bytes` bytes, and writes every byte. If `grown` is true, each block starts at half of
 * that size. */
static void fill_and_measure(size_t bytes, bool grown)
{
    const size_t limit = 256 * MIB;
    struct staging_pool *staging = staging_new((int64_t)limit, 0, NULL);
    struct staging_block *held[256] = { NULL };
    int count = 0;
    const size_t before = resident_bytes();
    while (count < 256 && staging_lease(staging, NULL, grown ? bytes / 2 : bytes, &held[count], NULL) == ATTN_OK) {
        struct staging_block **last = &held[count++];
        if (grown) {
            memset((*last)->memory, 1, (*last)->bytes);
            if (staging_grow(staging, last, (*last)->bytes, bytes, NULL) != ATTN_OK) break;
        }
        memset((*last)->memory, 1, (*last)->bytes);
    }
    const size_t more = resident_bytes() - before;
    assert_true(staging_leased_bytes(staging) > (int64_t)(limit / 2) && count < 256);
    if (more > limit + limit / 20) fail_msg("%zu KiB a block: %zu MiB are resident", bytes / KIB, more / MIB);
    while (count > 0) staging_release(staging, held[--count]);
    staging_free(staging);
}

static void test_what_is_resident_is_no_more_than_the_limit_whatever_the_size_of_blocks(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip();
#endif
    static const size_t sizes[] = { 1300 * KIB, 2200 * KIB, 2304 * KIB, 4608 * KIB, 9216 * KIB };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        fill_and_measure(sizes[i], false);
        fill_and_measure(sizes[i], true);
    }
}

static void test_what_was_released_last_is_leased_next(void **state)
{
    (void)state;
    struct staging_pool *staging = staging_new(64 * MIB, 64 * MIB, NULL);
    struct staging_block *a, *b, *c;
    staging_lease(staging, NULL, 100 * KIB, &a, NULL);
    staging_lease(staging, NULL, 100 * KIB, &b, NULL);
    staging_release(staging, a);
    staging_release(staging, b);
    assert_int_equal(staging_lease(staging, NULL, 99 * KIB, &c, NULL), ATTN_OK);
    assert_ptr_equal(c, b);
    staging_release(staging, c);
    staging_free(staging);
}

static void test_the_bound_holds_and_says_why(void **state)
{
    (void)state;
    struct staging_pool *staging = staging_new(MIB, MIB, NULL);
    struct staging_block *a, *b;
    attn_error err = { 0 };
    assert_int_equal(staging_lease(staging, NULL, MIB + 1, &a, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text, "1048577 bytes of tensors are needed, the limit is 1048576 (--staging-bytes)");
    assert_null(a);
    assert_int_equal(staging_lease(staging, NULL, MIB - 5, &a, &err), ATTN_OK);
    assert_int_equal(staging_lease(staging, NULL, 1, &b, &err), ATTN_BUSY);
    assert_string_equal(err.text, "1 bytes of staging memory are needed, and other requests hold them");
    staging_release(staging, a);
    /* The pool unmaps a free block that it had kept for reuse. */
    assert_int_equal(staging_lease(staging, NULL, 1, &b, &err), ATTN_OK);
    assert_true(staging_leased_bytes(staging) + staging_warm_bytes(staging) <= (int64_t)MIB);
    staging_release(staging, b);
    staging_free(staging);
}

static void test_a_pool_that_is_no_class_can_be_leased_whole(void **state)
{
    (void)state;
    const size_t limit = 1000 * KIB + 123;
    struct staging_pool *staging = staging_new((int64_t)limit, (int64_t)limit, NULL);
    struct staging_block *a;
    for (int round = 0; round < 3; round++) {
        assert_int_equal(staging_lease(staging, NULL, limit, &a, NULL), ATTN_OK);
        assert_true(a->bytes == limit);
        memset(a->memory, round, limit);
        staging_release(staging, a);
    }
    staging_free(staging);
}

static void test_growing_keeps_what_is_there(void **state)
{
    (void)state;
    struct staging_pool *staging = staging_new(256 * MIB, 256 * MIB, NULL);
    struct staging_block *e;
    size_t used = 16 * KIB;
    staging_lease(staging, NULL, used, &e, NULL);
    for (size_t i = 0; i < used; i++) ((uint8_t *)e->memory)[i] = (uint8_t)(i * 7);
    while (used < 40 * MIB) {
        const size_t more = used * 3;
        assert_int_equal(staging_grow(staging, &e, used, more, NULL), ATTN_OK);
        for (size_t i = 0; i < used; i += 61) assert_int_equal(((uint8_t *)e->memory)[i], (uint8_t)(i * 7));
        for (size_t i = used; i < more; i++) ((uint8_t *)e->memory)[i] = (uint8_t)(i * 7);
        used = more;
    }
    assert_true(staging_leased_bytes(staging) == (int64_t)e->bytes);
    assert_int_equal(staging_grow(staging, &e, used, 257 * MIB, NULL), ATTN_TOO_LARGE);
    assert_int_equal(((uint8_t *)e->memory)[used - 1], (uint8_t)((used - 1) * 7));
    staging_release(staging, e);
    staging_free(staging);
}

static void test_growing_over_the_bound_is_refused_and_leaves_the_extent(void **state)
{
    (void)state;
    struct staging_pool *staging = staging_new(4 * MIB, 0, NULL);
    struct staging_block *a, *b;
    staging_lease(staging, NULL, MIB, &a, NULL);
    staging_lease(staging, NULL, 2 * MIB, &b, NULL);
    const int64_t leased = staging_leased_bytes(staging);
    assert_int_equal(staging_grow(staging, &a, 100, 3 * MIB, NULL), ATTN_BUSY);
    assert_true(staging_leased_bytes(staging) == leased && a->bytes == MIB);
    staging_release(staging, a);
    staging_release(staging, b);
    staging_free(staging);
}

/* A source of memory that counts mapped bytes, and fails when told to. */
struct counted {
    int64_t mapped;
    bool fail;
};

static void *counted_map(void *context, size_t bytes)
{
    struct counted *c = context;
    if (c->fail) return NULL;
    c->mapped += (int64_t)bytes;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void counted_unmap(void *context, void *memory, size_t bytes)
{
    ((struct counted *)context)->mapped -= (int64_t)bytes;
    free(memory);
}

static void test_warm_memory_is_bounded_and_given_back_when_nobody_wants_it(void **state)
{
    (void)state;
    struct counted c = { 0 };
    const struct staging_source source = { counted_map, counted_unmap, NULL, &c };
    struct staging_pool *staging = staging_new(64 * MIB, 3 * MIB, &source);
    struct staging_block *e[8];
    for (int i = 0; i < 8; i++) assert_int_equal(staging_lease(staging, NULL, MIB, &e[i], NULL), ATTN_OK);
    for (int i = 0; i < 8; i++) staging_release(staging, e[i]);
    assert_true(staging_warm_bytes(staging) == (int64_t)(3 * MIB) && c.mapped == (int64_t)(3 * MIB));
    staging_trim(staging, clock_ms(), 1000);
    assert_true(c.mapped == (int64_t)(3 * MIB));
    staging_trim(staging, clock_ms() + 1001, 1000);
    assert_true(c.mapped == 0 && staging_warm_bytes(staging) == 0);
    staging_free(staging);
}

static void test_a_system_without_memory_is_told_apart_from_a_full_pool(void **state)
{
    (void)state;
    struct counted c = { .fail = true };
    const struct staging_source source = { counted_map, counted_unmap, NULL, &c };
    struct staging_pool *staging = staging_new(MIB, MIB, &source);
    struct staging_block *e;
    attn_error err = { 0 };
    assert_int_equal(staging_lease(staging, NULL, 1000, &e, &err), ATTN_NO_MEMORY);
    assert_int_equal(staging_leased_bytes(staging), 0);
    c.fail = false;
    assert_int_equal(staging_lease(staging, NULL, MIB / 4, &e, &err), ATTN_OK);
    memset(e->memory, 5, MIB / 4);
    /* This source cannot grow a block, so the pool copies it. */
    assert_int_equal(staging_grow(staging, &e, MIB / 4, MIB / 2, &err), ATTN_OK);
    assert_int_equal(((char *)e->memory)[MIB / 4 - 1], 5);
    staging_release(staging, e);
    staging_free(staging);
    assert_true(c.mapped == 0);
}

static void *hammer(void *context)
{
    struct staging_pool *staging = context;
    unsigned seed = (unsigned)(uintptr_t)&staging;
    for (int i = 0; i < 3000; i++) {
        const size_t bytes = (size_t)rand_r(&seed) % (512 * KIB) + 1;
        struct staging_block *e;
        if (staging_lease(staging, NULL, bytes, &e, NULL) != ATTN_OK) continue;
        ((char *)e->memory)[bytes - 1] = 1;
        if (i % 5 == 0) staging_grow(staging, &e, bytes, 2 * bytes, NULL);
        if (i % 64 == 0) staging_trim(staging, clock_ms(), 0);
        staging_release(staging, e);
    }
    return NULL;
}

static void test_many_threads_never_exceed_the_bound(void **state)
{
    (void)state;
    struct staging_pool *staging = staging_new(2 * MIB, MIB, NULL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, hammer, staging);
    for (int i = 0; i < 1000; i++) assert_true(staging_leased_bytes(staging) <= (int64_t)(2 * MIB));
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    assert_int_equal(staging_leased_bytes(staging), 0);
    assert_true(staging_warm_bytes(staging) <= (int64_t)MIB);
    staging_free(staging);
}

static void test_what_is_leased_ahead_of_its_bytes_is_a_quarter_at_most(void **state)
{
    (void)state;
    struct staging_pool *staging = staging_new(64 * MIB, 64 * MIB, NULL);
    struct staging_block *e[8];
    for (int i = 0; i < 4; i++) assert_true(staging_lease_ahead(staging, NULL, 4 * MIB, &e[i]));
    assert_true(staging_ahead_bytes(staging) == 16 * (int64_t)MIB);
    assert_false(staging_lease_ahead(staging, NULL, 16 * KIB, &e[4]));
    assert_null(e[4]);
    /* The limit on memory that is leased before its bytes arrive is reached. Other leases still succeed. */
    assert_int_equal(staging_lease(staging, NULL, 40 * MIB, &e[4], NULL), ATTN_OK);
    staging_arrived(staging, e[0]);
    staging_arrived(staging, e[0]);
    assert_true(staging_lease_ahead(staging, NULL, 4 * MIB, &e[5]));
    /* Memory whose bytes have arrived may grow. */
    assert_int_equal(staging_grow(staging, &e[1], 100, 5 * MIB, NULL), ATTN_OK);
    assert_true(staging_ahead_bytes(staging) == 12 * (int64_t)MIB);
    for (int i = 0; i < 6; i++) staging_release(staging, e[i]);
    assert_true(staging_ahead_bytes(staging) == 0 && staging_leased_bytes(staging) == 0);
    assert_true(staging_lease_ahead(staging, NULL, 4 * MIB, &e[0]));
    staging_release(staging, e[0]);
    assert_true(staging_ahead_bytes(staging) == 0);
    staging_free(staging);
}

/* The caller's new share of the pool is smaller than a free block that the pool has kept. A lease that fits the share
 * must succeed. */
static void test_warm_memory_above_a_callers_share_is_left_alone(void **state)
{
    (void)state;
    struct staging_pool *pool = staging_new(64 << 20, 64 << 20, NULL);
    struct caller *caller = caller_new();
    struct staging_block *block;
    attn_error err;
    /* The pool leases 20 MiB for these 18.5 MiB. The caller's limit below is 30 percent of the pool, 19.2 MiB. */
    const size_t bytes = 37 << 19;
    assert_int_equal(staging_lease(pool, caller, bytes, &block, &err), ATTN_OK);
    assert_int_equal(block->bytes, 20 << 20);
    staging_release(pool, block);
    caller->percent = 30;
    assert_true(caller_share(caller, 64 << 20) < 20 << 20);
    if (staging_lease(pool, caller, bytes, &block, &err) != ATTN_OK) fail_msg("%s", err.text);
    staging_release(pool, block);
    caller_release(caller);
    staging_free(pool);
}

static void test_each_caller_has_a_share_of_the_pool(void **state)
{
    (void)state;
    struct staging_pool *staging = staging_new(4 * MIB, 4 * MIB, NULL);
    struct caller *one = caller_new(), *other = caller_new();
    struct staging_block *a, *b, *c;
    attn_error err = { 0 };
    atomic_store(&one->percent, 50);
    atomic_store(&other->percent, 50);
    assert_int_equal(staging_lease(staging, one, 2 * MIB + 1, &a, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text, "2097153 bytes of tensors are needed, the limit is 2097152 for one token "
                                  "(--staging-bytes, --token-share)");
    assert_int_equal(staging_lease(staging, one, MIB, &a, &err), ATTN_OK);
    assert_int_equal(staging_lease(staging, one, MIB + 1, &b, &err), ATTN_QUOTA);
    assert_string_equal(err.text, "1048577 bytes of staging memory are needed, this token holds 1048576 of 2097152 "
                                  "(--token-share)");
    assert_int_equal(staging_lease(staging, one, MIB, &b, &err), ATTN_OK);
    assert_int_equal(staging_grow(staging, &b, 0, MIB + 1, &err), ATTN_QUOTA);
    assert_int_equal(staging_lease(staging, other, 2 * MIB, &c, &err), ATTN_OK);
    staging_release(staging, a);
    assert_int_equal(staging_grow(staging, &b, 0, MIB + 1, &err), ATTN_OK);
    staging_release(staging, b);
    staging_release(staging, c);
    assert_true(one->staging_bytes == 0 && other->staging_bytes == 0);
    caller_release(one);
    caller_release(other);
    staging_free(staging);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_extent_holds_what_was_asked_for_and_wastes_an_eighth_at_most),
        cmocka_unit_test(test_a_block_is_whole_pages_of_this_system_and_all_of_it_is_given_back),
        cmocka_unit_test(test_what_is_resident_is_no_more_than_the_limit_whatever_the_size_of_blocks),
        cmocka_unit_test(test_what_was_released_last_is_leased_next),
        cmocka_unit_test(test_the_bound_holds_and_says_why),
        cmocka_unit_test(test_a_pool_that_is_no_class_can_be_leased_whole),
        cmocka_unit_test(test_growing_keeps_what_is_there),
        cmocka_unit_test(test_growing_over_the_bound_is_refused_and_leaves_the_extent),
        cmocka_unit_test(test_warm_memory_is_bounded_and_given_back_when_nobody_wants_it),
        cmocka_unit_test(test_a_system_without_memory_is_told_apart_from_a_full_pool),
        cmocka_unit_test(test_what_is_leased_ahead_of_its_bytes_is_a_quarter_at_most),
        cmocka_unit_test(test_warm_memory_above_a_callers_share_is_left_alone),
        cmocka_unit_test(test_each_caller_has_a_share_of_the_pool),
        cmocka_unit_test(test_many_threads_never_exceed_the_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
