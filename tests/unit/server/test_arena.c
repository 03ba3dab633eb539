/* The staging pool: its bound, what it keeps warm, growing, and several threads at it. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/base/arena.h"
#include "server/base/caller.h"
#include "server/base/clock.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)

static void test_an_extent_holds_what_was_asked_for_and_wastes_an_eighth_at_most(void **state)
{
    (void)state;
    struct arena *arena = arena_new(1024 * (int64_t)MIB, 0, NULL);
    for (size_t bytes = 16 * KIB; bytes < 300 * MIB; bytes += bytes / 7 + 1) {
        struct extent *e;
        assert_int_equal(arena_lease(arena, NULL, bytes, &e, NULL), ATTN_OK);
        assert_true(e->bytes >= bytes && e->bytes <= bytes + bytes / 8 + 1);
        assert_int_equal((uintptr_t)e->memory % 64, 0);
        ((char *)e->memory)[0] = ((char *)e->memory)[bytes - 1] = 1;
        arena_release(arena, e);
    }
    assert_int_equal(arena_leased_bytes(arena), 0);
    arena_free(arena);
}

static void test_what_was_released_last_is_leased_next(void **state)
{
    (void)state;
    struct arena *arena = arena_new(64 * MIB, 64 * MIB, NULL);
    struct extent *a, *b, *c;
    arena_lease(arena, NULL, 100 * KIB, &a, NULL);
    arena_lease(arena, NULL, 100 * KIB, &b, NULL);
    arena_release(arena, a);
    arena_release(arena, b);
    assert_int_equal(arena_lease(arena, NULL, 99 * KIB, &c, NULL), ATTN_OK);
    assert_ptr_equal(c, b);
    arena_release(arena, c);
    arena_free(arena);
}

static void test_the_bound_holds_and_says_why(void **state)
{
    (void)state;
    struct arena *arena = arena_new(MIB, MIB, NULL);
    struct extent *a, *b;
    attn_error err = { 0 };
    assert_int_equal(arena_lease(arena, NULL, MIB + 1, &a, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text, "1048577 bytes of tensors are needed, the limit is 1048576 (--staging-bytes)");
    assert_null(a);
    assert_int_equal(arena_lease(arena, NULL, MIB - 5, &a, &err),
                     ATTN_OK); /* the whole pool, though its class is no larger */
    assert_int_equal(arena_lease(arena, NULL, 1, &b, &err), ATTN_BUSY);
    assert_string_equal(err.text, "1 bytes of staging memory are needed, and other requests hold them");
    arena_release(arena, a);
    assert_int_equal(arena_lease(arena, NULL, 1, &b, &err), ATTN_OK); /* the warm extent makes room */
    assert_true(arena_leased_bytes(arena) + arena_warm_bytes(arena) <= (int64_t)MIB);
    arena_release(arena, b);
    arena_free(arena);
}

static void test_a_pool_that_is_no_class_can_be_leased_whole(void **state)
{
    (void)state;
    const size_t limit = 1000 * KIB + 123;
    struct arena *arena = arena_new((int64_t)limit, (int64_t)limit, NULL);
    struct extent *a;
    for (int round = 0; round < 3; round++) {
        assert_int_equal(arena_lease(arena, NULL, limit, &a, NULL), ATTN_OK);
        assert_true(a->bytes == limit);
        memset(a->memory, round, limit);
        arena_release(arena, a);
    }
    arena_free(arena);
}

static void test_growing_keeps_what_is_there(void **state)
{
    (void)state;
    struct arena *arena = arena_new(256 * MIB, 256 * MIB, NULL);
    struct extent *e;
    size_t used = 16 * KIB;
    arena_lease(arena, NULL, used, &e, NULL);
    for (size_t i = 0; i < used; i++) ((uint8_t *)e->memory)[i] = (uint8_t)(i * 7);
    while (used < 40 * MIB) {
        const size_t more = used * 3;
        assert_int_equal(arena_grow(arena, &e, used, more, NULL), ATTN_OK);
        for (size_t i = 0; i < used; i += 61) assert_int_equal(((uint8_t *)e->memory)[i], (uint8_t)(i * 7));
        for (size_t i = used; i < more; i++) ((uint8_t *)e->memory)[i] = (uint8_t)(i * 7);
        used = more;
    }
    assert_true(arena_leased_bytes(arena) == (int64_t)e->bytes);
    assert_int_equal(arena_grow(arena, &e, used, 257 * MIB, NULL), ATTN_TOO_LARGE);
    assert_int_equal(((uint8_t *)e->memory)[used - 1], (uint8_t)((used - 1) * 7)); /* a failure leaves it alone */
    arena_release(arena, e);
    arena_free(arena);
}

static void test_growing_over_the_bound_is_refused_and_leaves_the_extent(void **state)
{
    (void)state;
    struct arena *arena = arena_new(4 * MIB, 0, NULL);
    struct extent *a, *b;
    arena_lease(arena, NULL, MIB, &a, NULL);
    arena_lease(arena, NULL, 2 * MIB, &b, NULL);
    const int64_t leased = arena_leased_bytes(arena);
    assert_int_equal(arena_grow(arena, &a, 100, 3 * MIB, NULL), ATTN_BUSY);
    assert_true(arena_leased_bytes(arena) == leased && a->bytes == MIB);
    arena_release(arena, a);
    arena_release(arena, b);
    arena_free(arena);
}

/* A source that counts, and fails on demand. */
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
    const struct arena_source source = { counted_map, counted_unmap, NULL, &c };
    struct arena *arena = arena_new(64 * MIB, 3 * MIB, &source);
    struct extent *e[8];
    for (int i = 0; i < 8; i++) assert_int_equal(arena_lease(arena, NULL, MIB, &e[i], NULL), ATTN_OK);
    for (int i = 0; i < 8; i++) arena_release(arena, e[i]);
    assert_true(arena_warm_bytes(arena) == (int64_t)(3 * MIB) && c.mapped == (int64_t)(3 * MIB));
    arena_trim(arena, clock_ms(), 1000);
    assert_true(c.mapped == (int64_t)(3 * MIB));
    arena_trim(arena, clock_ms() + 1001, 1000);
    assert_true(c.mapped == 0 && arena_warm_bytes(arena) == 0);
    arena_free(arena);
}

static void test_a_system_without_memory_is_told_apart_from_a_full_pool(void **state)
{
    (void)state;
    struct counted c = { .fail = true };
    const struct arena_source source = { counted_map, counted_unmap, NULL, &c };
    struct arena *arena = arena_new(MIB, MIB, &source);
    struct extent *e;
    attn_error err = { 0 };
    assert_int_equal(arena_lease(arena, NULL, 1000, &e, &err), ATTN_NO_MEMORY);
    assert_int_equal(arena_leased_bytes(arena), 0);
    c.fail = false;
    assert_int_equal(arena_lease(arena, NULL, MIB / 4, &e, &err), ATTN_OK);
    memset(e->memory, 5, MIB / 4);
    assert_int_equal(arena_grow(arena, &e, MIB / 4, MIB / 2, &err), ATTN_OK); /* a source without grow: copied */
    assert_int_equal(((char *)e->memory)[MIB / 4 - 1], 5);
    arena_release(arena, e);
    arena_free(arena);
    assert_true(c.mapped == 0);
}

static void *hammer(void *context)
{
    struct arena *arena = context;
    unsigned seed = (unsigned)(uintptr_t)&arena;
    for (int i = 0; i < 3000; i++) {
        const size_t bytes = (size_t)rand_r(&seed) % (512 * KIB) + 1;
        struct extent *e;
        if (arena_lease(arena, NULL, bytes, &e, NULL) != ATTN_OK) continue;
        ((char *)e->memory)[bytes - 1] = 1;
        if (i % 5 == 0) arena_grow(arena, &e, bytes, 2 * bytes, NULL);
        if (i % 64 == 0) arena_trim(arena, clock_ms(), 0);
        arena_release(arena, e);
    }
    return NULL;
}

static void test_many_threads_never_exceed_the_bound(void **state)
{
    (void)state;
    struct arena *arena = arena_new(2 * MIB, MIB, NULL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, hammer, arena);
    for (int i = 0; i < 1000; i++) assert_true(arena_leased_bytes(arena) <= (int64_t)(2 * MIB));
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    assert_int_equal(arena_leased_bytes(arena), 0);
    assert_true(arena_warm_bytes(arena) <= (int64_t)MIB);
    arena_free(arena);
}

static void test_what_is_leased_ahead_of_its_bytes_is_a_quarter_at_most(void **state)
{
    (void)state;
    struct arena *arena = arena_new(64 * MIB, 64 * MIB, NULL);
    struct extent *e[8];
    for (int i = 0; i < 4; i++) assert_true(arena_lease_ahead(arena, NULL, 4 * MIB, &e[i]));
    assert_true(arena_ahead_bytes(arena) == 16 * (int64_t)MIB);
    assert_false(arena_lease_ahead(arena, NULL, 16 * KIB, &e[4]));
    assert_null(e[4]);
    assert_int_equal(arena_lease(arena, NULL, 40 * MIB, &e[4], NULL), ATTN_OK); /* who sends is served */
    arena_arrived(arena, e[0]);
    arena_arrived(arena, e[0]); /* once is enough */
    assert_true(arena_lease_ahead(arena, NULL, 4 * MIB, &e[5]));
    assert_int_equal(arena_grow(arena, &e[1], 100, 5 * MIB, NULL), ATTN_OK); /* it was filled, or it would not grow */
    assert_true(arena_ahead_bytes(arena) == 12 * (int64_t)MIB);
    for (int i = 0; i < 6; i++) arena_release(arena, e[i]);
    assert_true(arena_ahead_bytes(arena) == 0 && arena_leased_bytes(arena) == 0);
    assert_true(arena_lease_ahead(arena, NULL, 4 * MIB, &e[0])); /* a warm one */
    arena_release(arena, e[0]);
    assert_true(arena_ahead_bytes(arena) == 0);
    arena_free(arena);
}

static void test_each_caller_has_a_share_of_the_pool(void **state)
{
    (void)state;
    struct arena *arena = arena_new(4 * MIB, 4 * MIB, NULL);
    struct caller *one = caller_new(), *other = caller_new();
    struct extent *a, *b, *c;
    attn_error err = { 0 };
    atomic_store(&one->percent, 50);
    atomic_store(&other->percent, 50);
    assert_int_equal(arena_lease(arena, one, 2 * MIB + 1, &a, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text, "2097153 bytes of tensors are needed, the limit is 2097152 for one token "
                                  "(--staging-bytes, --token-share)");
    assert_int_equal(arena_lease(arena, one, MIB, &a, &err), ATTN_OK);
    assert_int_equal(arena_lease(arena, one, MIB + 1, &b, &err), ATTN_QUOTA);
    assert_string_equal(err.text, "1048577 bytes of staging memory are needed, this token holds 1048576 of 2097152 "
                                  "(--token-share)");
    assert_int_equal(arena_lease(arena, one, MIB, &b, &err), ATTN_OK);
    assert_int_equal(arena_grow(arena, &b, 0, MIB + 1, &err), ATTN_QUOTA);
    assert_int_equal(arena_lease(arena, other, 2 * MIB, &c, &err), ATTN_OK); /* what is left is the other's */
    arena_release(arena, a);
    assert_int_equal(arena_grow(arena, &b, 0, MIB + 1, &err), ATTN_OK);
    arena_release(arena, b);
    arena_release(arena, c);
    assert_true(one->staging_bytes == 0 && other->staging_bytes == 0);
    caller_release(one);
    caller_release(other);
    arena_free(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_extent_holds_what_was_asked_for_and_wastes_an_eighth_at_most),
        cmocka_unit_test(test_what_was_released_last_is_leased_next),
        cmocka_unit_test(test_the_bound_holds_and_says_why),
        cmocka_unit_test(test_a_pool_that_is_no_class_can_be_leased_whole),
        cmocka_unit_test(test_growing_keeps_what_is_there),
        cmocka_unit_test(test_growing_over_the_bound_is_refused_and_leaves_the_extent),
        cmocka_unit_test(test_warm_memory_is_bounded_and_given_back_when_nobody_wants_it),
        cmocka_unit_test(test_a_system_without_memory_is_told_apart_from_a_full_pool),
        cmocka_unit_test(test_what_is_leased_ahead_of_its_bytes_is_a_quarter_at_most),
        cmocka_unit_test(test_each_caller_has_a_share_of_the_pool),
        cmocka_unit_test(test_many_threads_never_exceed_the_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
