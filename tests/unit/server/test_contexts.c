/* Saved contexts: the life of an entry, its bounds, and the memory that hangs on it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/work/contexts.h"

enum { TTL_MS = 1000, MAX = 4 };

struct bench {
    struct arena *arena;
    struct contexts *contexts;
};

static void open_bench(struct bench *b)
{
    b->arena = arena_new(1 << 20, 0, NULL);
    b->contexts = contexts_new(1000, MAX, TTL_MS);
}

static void close_bench(struct bench *b)
{
    contexts_free(b->contexts);
    assert_int_equal(arena_leased_bytes(b->arena), 0);
    arena_free(b->arena);
}

/* A job as a forward leaves it: one item, some memory. */
static struct job *make_job(struct bench *b)
{
    struct extent *extent;
    proto_call *call = calloc(1, sizeof *call);
    call->count = 1;
    call->items = calloc(1, sizeof *call->items);
    assert_int_equal(arena_lease(b->arena, 1000, &extent, NULL), ATTN_OK);
    return job_new(b->arena, b->contexts, extent, call);
}

static void test_saved_taken_used(void **state)
{
    (void)state;
    struct bench b;
    char id[PROTO_CONTEXT_BYTES];
    attn_error err = { 0 };
    struct job *taken;
    int item;
    open_bench(&b);
    struct job *job = make_job(&b);
    assert_int_equal(contexts_reserve(b.contexts, 100, id, &err), ATTN_OK);
    assert_int_equal(strlen(id), 32);
    assert_int_equal(contexts_take(b.contexts, id, 0, &taken, &item, &err), ATTN_NOT_FOUND); /* not ready */
    assert_string_equal(err.text, "context: unknown, expired or already used");
    contexts_fill(b.contexts, id, job, 0, 0);
    job_release(job); /* the forward has been answered; its memory stays */
    assert_true(arena_leased_bytes(b.arena) > 0);
    assert_int_equal(contexts_take(b.contexts, id, 1, &taken, &item, &err), ATTN_OK);
    assert_ptr_equal(taken, job);
    struct job *second;
    assert_int_equal(contexts_take(b.contexts, id, 1, &second, &item, &err), ATTN_NOT_FOUND); /* one backward */
    contexts_finish(b.contexts, id, true);
    assert_int_equal(contexts_count(b.contexts), 0);
    assert_true(arena_leased_bytes(b.arena) > 0); /* the backward still reads it */
    job_release(taken);
    assert_int_equal(arena_leased_bytes(b.arena), 0);
    close_bench(&b);
}

static void test_a_backward_that_never_ran_puts_it_back(void **state)
{
    (void)state;
    struct bench b;
    char id[PROTO_CONTEXT_BYTES];
    struct job *taken;
    int item;
    open_bench(&b);
    struct job *job = make_job(&b);
    contexts_reserve(b.contexts, 100, id, NULL);
    contexts_fill(b.contexts, id, job, 0, 0);
    job_release(job);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(contexts_take(b.contexts, id, 1, &taken, &item, NULL), ATTN_OK);
        contexts_finish(b.contexts, id, false);
        job_release(taken);
    }
    close_bench(&b);
}

static void test_time_runs_out(void **state)
{
    (void)state;
    struct bench b;
    char id[PROTO_CONTEXT_BYTES];
    struct job *taken;
    int item;
    open_bench(&b);
    struct job *job = make_job(&b);
    contexts_reserve(b.contexts, 100, id, NULL);
    contexts_fill(b.contexts, id, job, 0, 5000);
    job_release(job);
    assert_int_equal(contexts_take(b.contexts, id, 5000 + TTL_MS, &taken, &item, NULL), ATTN_NOT_FOUND);
    contexts_expire(b.contexts, 5000 + TTL_MS - 1);
    assert_int_equal(contexts_count(b.contexts), 1);
    contexts_expire(b.contexts, 5000 + TTL_MS);
    assert_int_equal(contexts_count(b.contexts), 0);
    assert_int_equal(arena_leased_bytes(b.arena), 0);
    close_bench(&b);
}

static void test_bounds_in_bytes_and_in_number(void **state)
{
    (void)state;
    struct bench b;
    char ids[MAX + 1][PROTO_CONTEXT_BYTES];
    attn_error err = { 0 };
    open_bench(&b);
    assert_int_equal(contexts_reserve(b.contexts, 1001, ids[0], &err), ATTN_BUSY);
    assert_string_equal(err.text, "save: 1001 bytes do not fit, saved contexts may hold 1000 bytes and number 4");
    assert_int_equal(contexts_reserve(b.contexts, 1000, ids[0], &err), ATTN_OK);
    assert_int_equal(contexts_reserve(b.contexts, 1, ids[1], &err), ATTN_BUSY);
    contexts_drop(b.contexts, ids[0]);
    for (int i = 0; i < MAX; i++) assert_int_equal(contexts_reserve(b.contexts, 1, ids[i], &err), ATTN_OK);
    assert_int_equal(contexts_reserve(b.contexts, 1, ids[MAX], &err), ATTN_BUSY);
    for (int i = 0; i < MAX; i++) contexts_drop(b.contexts, ids[i]);
    assert_int_equal(contexts_bytes(b.contexts), 0);
    close_bench(&b);
}

static void test_what_is_no_id_is_not_found(void **state)
{
    (void)state;
    static const char *const ids[] = { "",
                                       "0",
                                       "zz",
                                       "0123456789abcdef0123456789abcde",
                                       "0123456789abcdef0123456789abcdef0",
                                       "0123456789ABCDEF0123456789ABCDEF",
                                       "00000000000000000000000000000000" };
    struct bench b;
    struct job *taken;
    int item;
    open_bench(&b);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        assert_int_equal(contexts_take(b.contexts, ids[i], 0, &taken, &item, NULL), ATTN_NOT_FOUND);
        contexts_drop(b.contexts, ids[i]);
        contexts_finish(b.contexts, ids[i], true);
    }
    close_bench(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_saved_taken_used),
        cmocka_unit_test(test_a_backward_that_never_ran_puts_it_back),
        cmocka_unit_test(test_time_runs_out),
        cmocka_unit_test(test_bounds_in_bytes_and_in_number),
        cmocka_unit_test(test_what_is_no_id_is_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
