/* test_contexts.c: tests of contexts (forwards saved for a later backward): their lifetime, limits and memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/work/contexts.h"
#include "server/intake/prepare.h"

enum { TTL_MS = 1000, MAX = 4 };

struct bench {
    struct staging_pool *staging;
    struct contexts *contexts;
};

static struct caller everybody = CALLER_EVERYBODY;

static void open_bench(struct bench *b)
{
    b->staging = staging_new(1 << 20, 0, NULL);
    b->contexts = contexts_new(1000, MAX, TTL_MS);
}

static void close_bench(struct bench *b)
{
    contexts_free(b->contexts);
    assert_int_equal(staging_leased_bytes(b->staging), 0);
    staging_free(b->staging);
}

/* Returns a job (one request's problems) with `items` forwards. Its memory counts as `bytes` bytes. */
static struct job *make_job(struct bench *b, struct caller *caller, int items, size_t bytes)
{
    struct staging_block *block;
    proto_call *call = calloc(1, sizeof *call);
    call->count = items;
    call->envelope = items > 1;
    call->items = calloc((size_t)items, sizeof *call->items);
    assert_int_equal(staging_lease(b->staging, caller, 1000, &block, NULL), ATTN_OK);
    struct job *job = job_new(b->staging, b->contexts, caller, block, call);
    job->tensor_bytes = bytes;
    return job;
}

/* Returns a job (one request's problems) whose forwards are saved as contexts for a later backward. id[i] becomes the
 * id of context i. */
static struct job *saved_job(struct bench *b, struct caller *caller, int items, size_t bytes,
                             char id[][PROTO_CONTEXT_BYTES])
{
    struct job *job = make_job(b, caller, items, bytes);
    for (int i = 0; i < items; i++) {
        assert_int_equal(contexts_reserve(b->contexts, job, i, NULL), ATTN_OK);
        strcpy(id[i], job->results[i].context);
    }
    job->holds_contexts = true;
    contexts_finish_job(job, true);
    job_release(job);
    return job;
}

static int count(struct bench *b)
{
    int counts[CONTEXT_STATE_COUNT];
    contexts_count(b->contexts, counts);
    assert_int_equal(counts[CONTEXT_FREE] + counts[CONTEXT_RESERVED] + counts[CONTEXT_READY] + counts[CONTEXT_TAKEN],
                     MAX);
    return MAX - counts[CONTEXT_FREE];
}

static void test_saved_taken_used(void **state)
{
    (void)state;
    struct bench b;
    attn_error err = { 0 };
    struct job *taken, *second;
    int item;
    open_bench(&b);
    struct job *job = make_job(&b, &everybody, 1, 100);
    const char *id = job->results[0].context;
    assert_int_equal(contexts_reserve(b.contexts, job, 0, &err), ATTN_OK);
    assert_int_equal(strlen(id), 32);
    assert_int_equal(contexts_take(b.contexts, &everybody, id, 0, &taken, &item, &err), ATTN_NOT_FOUND); /* not ready */
    assert_string_equal(err.text, "context: unknown, expired or already used");
    contexts_fill(b.contexts, id, 0);
    job_release(job); /* the context (saved forward) keeps the memory of its job */
    assert_true(staging_leased_bytes(b.staging) > 0);
    assert_int_equal(contexts_take(b.contexts, &everybody, id, 1, &taken, &item, &err), ATTN_OK);
    assert_ptr_equal(taken, job);
    assert_int_equal(contexts_take(b.contexts, &everybody, id, 1, &second, &item, &err), ATTN_IN_USE);
    assert_string_equal(err.member, "/context");
    assert_string_equal(err.text, "context: another backward uses it and is not answered yet; it can be used again "
                                  "only if that one does not run");
    contexts_finish(b.contexts, id, true);
    assert_int_equal(count(&b), 0);
    assert_true(staging_leased_bytes(b.staging) > 0);
    job_release(taken);
    assert_int_equal(staging_leased_bytes(b.staging), 0);
    close_bench(&b);
}

static void test_a_backward_that_never_ran_puts_it_back(void **state)
{
    (void)state;
    struct bench b;
    char id[1][PROTO_CONTEXT_BYTES];
    struct job *taken;
    int item;
    open_bench(&b);
    saved_job(&b, &everybody, 1, 100, id);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(contexts_take(b.contexts, &everybody, id[0], clock_ms(), &taken, &item, NULL), ATTN_OK);
        contexts_finish(b.contexts, id[0], false);
        job_release(taken);
    }
    close_bench(&b);
}

static void test_time_runs_out(void **state)
{
    (void)state;
    struct bench b;
    struct job *taken;
    int item;
    open_bench(&b);
    struct job *job = make_job(&b, &everybody, 1, 100);
    const char *id = job->results[0].context;
    contexts_reserve(b.contexts, job, 0, NULL);
    contexts_fill(b.contexts, id, 5000);
    assert_int_equal(contexts_take(b.contexts, &everybody, id, 5000 + TTL_MS, &taken, &item, NULL), ATTN_NOT_FOUND);
    job_release(job);
    contexts_expire(b.contexts, 5000 + TTL_MS - 1);
    assert_int_equal(count(&b), 1);
    contexts_expire(b.contexts, 5000 + TTL_MS);
    assert_int_equal(count(&b), 0);
    assert_int_equal(staging_leased_bytes(b.staging), 0);
    close_bench(&b);
}

/* Tries to save a forward of `bytes` bytes. This must fail; returns the error. */
static attn_status refusal(struct bench *b, struct caller *caller, size_t bytes, attn_error *err)
{
    struct job *job = make_job(b, caller, 1, bytes);
    const attn_status status = contexts_reserve(b->contexts, job, 0, err);
    if (status == ATTN_OK) contexts_drop(b->contexts, job->results[0].context);
    job_release(job);
    return status;
}

static void test_bounds_in_bytes_and_in_number(void **state)
{
    (void)state;
    struct bench b;
    char id[MAX][PROTO_CONTEXT_BYTES];
    attn_error err = { 0 };
    open_bench(&b);
    /* A forward that is larger than the limit can never be saved, so the error is TOO_LARGE, not BUSY. */
    assert_int_equal(refusal(&b, &everybody, 1001, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text, "save: the request holds 1001 bytes, saved contexts may hold 1000 bytes");
    assert_int_equal(refusal(&b, &everybody, 1000, &err), ATTN_OK);
    saved_job(&b, &everybody, 1, 1000, id);
    assert_int_equal(refusal(&b, &everybody, 1, &err), ATTN_BUSY);
    assert_string_equal(err.text, "save: 1 bytes do not fit, saved contexts may hold 1000 bytes and number 4");
    contexts_drop(b.contexts, id[0]);
    for (int i = 0; i < MAX; i++) saved_job(&b, &everybody, 1, 1, &id[i]);
    assert_int_equal(refusal(&b, &everybody, 1, &err), ATTN_BUSY);
    for (int i = 0; i < MAX; i++) contexts_drop(b.contexts, id[i]);
    assert_int_equal(contexts_bytes(b.contexts), 0);
    close_bench(&b);
}

static void test_a_job_is_charged_whole_until_its_last_context_is_gone(void **state)
{
    (void)state;
    struct bench b;
    char id[3][PROTO_CONTEXT_BYTES];
    struct job *taken;
    int item;
    open_bench(&b);
    saved_job(&b, &everybody, 3, 900, id);
    assert_int_equal(contexts_bytes(b.contexts), 900);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(contexts_take(b.contexts, &everybody, id[i], clock_ms(), &taken, &item, NULL), ATTN_OK);
        assert_int_equal(item, i);
        contexts_finish(b.contexts, id[i], true);
        job_release(taken);
        assert_int_equal(contexts_bytes(b.contexts), 900);
        assert_int_equal(refusal(&b, &everybody, 200, NULL), ATTN_BUSY);
    }
    contexts_drop(b.contexts, id[2]);
    assert_int_equal(contexts_bytes(b.contexts), 0);
    assert_int_equal(staging_leased_bytes(b.staging), 0);
    close_bench(&b);
}

static void test_a_context_is_its_callers_alone(void **state)
{
    (void)state;
    struct bench b;
    char id[1][PROTO_CONTEXT_BYTES];
    struct job *taken;
    attn_error err = { 0 };
    int item;
    open_bench(&b);
    struct caller *one = caller_new(), *other = caller_new();
    saved_job(&b, one, 1, 100, id);
    assert_int_equal(contexts_take(b.contexts, other, id[0], clock_ms(), &taken, &item, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.text, "context: unknown, expired or already used");
    assert_int_equal(contexts_take(b.contexts, one, id[0], clock_ms(), &taken, &item, &err), ATTN_OK);
    /* For another caller, a context (saved forward) that is in use does not exist. */
    struct job *second;
    assert_int_equal(contexts_take(b.contexts, other, id[0], clock_ms(), &second, &item, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.text, "context: unknown, expired or already used");
    contexts_finish(b.contexts, id[0], true);
    job_release(taken);
    caller_release(one);
    caller_release(other);
    close_bench(&b);
}

static void test_each_caller_has_a_share(void **state)
{
    (void)state;
    struct bench b;
    char id[MAX][PROTO_CONTEXT_BYTES];
    attn_error err = { 0 };
    open_bench(&b);
    struct caller *one = caller_new(), *other = caller_new();
    atomic_store(&one->percent, 50);
    atomic_store(&other->percent, 50);
    assert_int_equal(refusal(&b, one, 501, &err), ATTN_TOO_LARGE);
    assert_string_equal(
        err.text, "save: the request holds 501 bytes, saved contexts may hold 500 bytes for one token (--token-share)");
    saved_job(&b, one, 1, 400, id);
    assert_int_equal(refusal(&b, one, 101, &err), ATTN_QUOTA);
    assert_string_equal(err.text,
                        "save: 101 bytes do not fit, this token's contexts hold 400 of 500 bytes and number 1 of 2 "
                        "(--token-share)");
    assert_int_equal(refusal(&b, one, 100, &err), ATTN_OK);
    saved_job(&b, one, 1, 1, id + 1);
    assert_int_equal(refusal(&b, one, 1, &err), ATTN_QUOTA);
    saved_job(&b, other, 2, 500, id + 2);
    for (int i = 0; i < MAX; i++) contexts_drop(b.contexts, id[i]);
    assert_int_equal(one->context_bytes + other->context_bytes + one->contexts + other->contexts, 0);
    caller_release(one);
    caller_release(other);
    close_bench(&b);
}

static void test_finishing_twice_does_nothing(void **state)
{
    (void)state;
    struct bench b;
    char id[1][PROTO_CONTEXT_BYTES];
    int item;
    open_bench(&b);
    saved_job(&b, &everybody, 1, 100, id);
    struct job *backward = make_job(&b, &everybody, 1, 100);
    backward->saved = calloc(1, sizeof *backward->saved);
    strcpy(backward->call->items[0].context, id[0]);
    assert_int_equal(contexts_take(b.contexts, &everybody, id[0], clock_ms(), &backward->saved[0], &item, NULL),
                     ATTN_OK);
    backward->holds_contexts = true;
    /* `false` means that the client left without an answer, so another backward may use the context (saved forward). */
    contexts_finish_job(backward, false);
    assert_int_equal(count(&b), 1);
    contexts_finish_job(backward, true);
    assert_int_equal(count(&b), 1);
    job_release(backward);
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
        assert_int_equal(contexts_take(b.contexts, &everybody, ids[i], 0, &taken, &item, NULL), ATTN_NOT_FOUND);
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
        cmocka_unit_test(test_a_job_is_charged_whole_until_its_last_context_is_gone),
        cmocka_unit_test(test_a_context_is_its_callers_alone),
        cmocka_unit_test(test_each_caller_has_a_share),
        cmocka_unit_test(test_finishing_twice_does_nothing),
        cmocka_unit_test(test_what_is_no_id_is_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
