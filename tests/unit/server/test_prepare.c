/* test_prepare.c: tests how a decoded body becomes a job (one request's problems) that a device can run: where its
 * outputs lie, which jobs may share a batch, which memory and contexts it holds, and what is refused. */
#include "tests/unit/server/jobs.h"

#include "server/intake/prepare.h"
#include "server/work/contexts.h"

struct bench {
    struct config config;
    struct server server;
    attn_device *device;
    attn_device_info info;
};

static void open_bench(struct bench *b, const char *backend, int64_t memory_bytes)
{
    const attn_device_options options = { .threads = 1, .memory_bytes = memory_bytes };
    attn_error err = { 0 };
    config_default(&b->config);
    server_open(&b->server, &b->config);
    if (attn_device_open(backend, 0, &options, &b->device, &err) != ATTN_OK) fail_msg("%s", err.text);
    attn_device_describe(b->device, &b->info);
}

static void close_bench(struct bench *b)
{
    attn_device_close(b->device);
    server_close(&b->server);
}

static struct job *prepared(struct bench *b, attn_op op, char *body)
{
    attn_error err = { 0 };
    struct job *job = job_of(&b->server, op, body);
    if (prepare_job(job, attn_device_capabilities(b->device), &b->info, &err) != ATTN_OK) fail_msg("%s", err.text);
    return job;
}

/* Checks that a job (one request's problems) is refused with `status` and, unless `text` is NULL, with the message
 * `text`. */
static void assert_refused(struct bench *b, attn_op op, char *body, attn_status status, const char *text)
{
    attn_error err = { 0 };
    struct job *job = job_of(&b->server, op, body);
    assert_int_equal(prepare_job(job, attn_device_capabilities(b->device), &b->info, &err), status);
    assert_int_equal(err.status, status);
    if (text) assert_string_equal(err.text, text);
    contexts_finish_job(job, false);
    job_release(job);
}

static int contexts_in(struct bench *b, enum context_state state)
{
    int counts[CONTEXT_STATE_COUNT];
    contexts_count(b->server.contexts, counts);
    return counts[state];
}

/* ---- Tests of where a job's outputs lie in memory ---------------------------------------------------------------- */

static void test_outputs_lie_behind_the_inputs_in_one_piece(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    struct job *job = prepared(&b, ATTN_OP_FORWARD, forward_body(5, 3, ""));
    const attn_problem *p = &job->call->items[0].problem;
    const char *inputs = job->inputs->memory;
    assert_null(job->spare);
    assert_int_equal(job->tensor_bytes, job->inputs->bytes);
    assert_true(job->inputs_used >= 3 * 5 * 3 * sizeof(float));
    assert_int_equal((job->outputs.memory - inputs) % 64, 0);
    assert_true(job->outputs.memory >= inputs + job->inputs_used);
    assert_true(job->outputs.memory < inputs + job->inputs_used + 64);
    assert_ptr_equal(p->out.data, job->outputs.memory);
    assert_ptr_equal(p->lse.data, job->outputs.memory + 64); /* out has 60 bytes, rounded up to 64 */
    assert_int_equal(job->outputs.bytes, 128);               /* lse has 20 bytes, also rounded up to 64 */
    job_release(job);
    close_bench(&b);
}

static void test_the_outputs_of_an_envelope_lie_one_after_the_other(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    char *bodies[] = { forward_body(5, 3, ""), forward_body(5, 3, "\"outputs\": [\"lse\"]"), forward_body(17, 4, "") };
    struct job *job = prepared(&b, ATTN_OP_FORWARD, envelope_of(bodies, 3));
    const proto_item *items = job->call->items;
    const char *at = job->outputs.memory;
    assert_ptr_equal(items[0].problem.out.data, at);
    assert_ptr_equal(items[0].problem.lse.data, at + 64);
    assert_int_equal(items[1].problem.out.rank, 0);
    assert_ptr_equal(items[1].problem.lse.data, at + 128);
    assert_ptr_equal(items[2].problem.out.data, at + 192);
    assert_ptr_equal(items[2].problem.lse.data, at + 192 + 320);
    assert_int_equal(job->outputs.bytes, 192 + 320 + 128);
    assert_int_equal(job->runnable, 3);
    job_release(job);
    close_bench(&b);
}

static void test_outputs_that_do_not_fit_behind_the_inputs_get_an_extent_of_their_own(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    struct job *job = prepared(&b, ATTN_OP_FORWARD, wide_body());
    assert_non_null(job->spare);
    assert_ptr_equal(job->outputs.memory, job->spare->memory);
    assert_true(job->outputs.bytes >= 100 * 64 * 4 && job->outputs.bytes <= job->spare->bytes);
    assert_int_equal(job->tensor_bytes, job->inputs->bytes + job->spare->bytes);
    assert_int_equal(staging_leased_bytes(b.server.staging), job->tensor_bytes);
    job_release(job);
    assert_int_equal(staging_leased_bytes(b.server.staging), 0);
    close_bench(&b);
}

static void test_outputs_for_which_there_is_no_memory_are_refused_as_busy(void **state)
{
    (void)state;
    struct bench b;
    struct staging_block *rest;
    attn_error err = { 0 };
    open_bench(&b, "fake", 0);
    struct job *job = job_of(&b.server, ATTN_OP_FORWARD, wide_body());
    const int64_t left = staging_limit_bytes(b.server.staging) - staging_leased_bytes(b.server.staging);
    assert_int_equal(staging_lease(b.server.staging, NULL, (size_t)left / 8 * 7, &rest, &err), ATTN_OK);
    struct staging_block *more;
    while (staging_lease(b.server.staging, NULL, 25600, &more, NULL) == ATTN_OK) {
        /* The leased blocks are linked by next_in_class, which is unused while a block is leased. */
        more->next_in_class = rest->next_in_class;
        rest->next_in_class = more;
    }
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &b.info, &err), ATTN_BUSY);
    assert_non_null(strstr(err.text, "bytes of staging memory are needed, and other requests hold them"));
    job_release(job);
    while ((more = rest->next_in_class) != NULL) {
        rest->next_in_class = more->next_in_class;
        staging_release(b.server.staging, more);
    }
    staging_release(b.server.staging, rest);
    close_bench(&b);
}

/* ---- Tests of which jobs may be computed in one batch ------------------------------------------------------------ */

static job_kind kind_of(struct bench *b, attn_op op, char *body)
{
    struct job *job = prepared(b, op, body);
    const job_kind kind = job->kind;
    contexts_finish_job(job, false);
    job_release(job);
    return kind;
}

/* Returns a body with D numbers per head of q and k, and Dv per head of v. */
static char *mixed_body(int D, int Dv)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL) abort();
    fprintf(f, "{");
    put_tensor(f, "q", 5, D, 0);
    fprintf(f, ", ");
    put_tensor(f, "k", 5, D, 1);
    fprintf(f, ", ");
    put_tensor(f, "v", 5, Dv, 2);
    fprintf(f, "}");
    fclose(f);
    return text;
}

static void test_small_problems_of_one_op_dtype_and_head_are_of_one_kind(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    const job_kind kind = kind_of(&b, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    char *one[] = { forward_body(5, 4, "") };
    assert_int_not_equal(kind, 0);
    assert_true(kind == kind_of(&b, ATTN_OP_FORWARD, forward_body(9, 4, "\"causal\": true")));
    assert_true(kind != kind_of(&b, ATTN_OP_FORWARD, forward_body(5, 8, "")));
    assert_true(kind != kind_of(&b, ATTN_OP_FORWARD, mixed_body(8, 4)));
    assert_true(kind != kind_of(&b, ATTN_OP_FORWARD, mixed_body(4, 8)));
    assert_true(kind != kind_of(&b, ATTN_OP_BACKWARD, body_of("q k v dout", 5, 4, "")));
    /* An envelope is a body with a list of problems. A body with a single problem can share a batch with an envelope
     * that holds one problem. */
    assert_int_equal(kind_of(&b, ATTN_OP_FORWARD, envelope_of(one, 1)), kind);
    char *two[] = { forward_body(5, 4, ""), forward_body(5, 4, "") };
    assert_int_equal(kind_of(&b, ATTN_OP_FORWARD, envelope_of(two, 2)), 0);
    assert_int_equal(kind_of(&b, ATTN_OP_FORWARD, forward_body(3000, 4, "")), 0); /* 144e6 operations */
    close_bench(&b);
}

static void test_what_a_job_wants_is_noted(void **state)
{
    (void)state;
    static const struct {
        int rows;
        const char *extra;
        bool verify, measure, save;
    } cases[] = {
        { 5, "\"verify\": 0", false, false, false },
        { 5, "\"verify\": 2", true, false, false },
        { 5, "\"save\": true", false, false, true },
        /* The answer has at most 4096 numbers, so its length is not measured beforehand. */
        { 200, "\"encoding\": \"array\"", false, false, false },
        /* The answer has more than 4096 numbers, so its length is measured beforehand. */
        { 250, "\"encoding\": \"array\"", false, true, false },
        { 250, "\"encoding\": \"array\", \"outputs\": [\"out\"]", false, false, false },
        { 250, "\"encoding\": \"base64\"", false, false, false },
    };
    struct bench b;
    open_bench(&b, "fake", 0);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct job *job = prepared(&b, ATTN_OP_FORWARD, forward_body(cases[c].rows, 16, cases[c].extra));
        assert_int_equal(job->wants_verify, cases[c].verify);
        assert_int_equal(job->wants_measure, cases[c].measure);
        assert_int_equal(job->wants_save, cases[c].save);
        assert_int_equal(job->holds_contexts, cases[c].save);
        assert_int_equal(job->runnable, 1);
        assert_true(job->flops == 2.0 * (16 + 16) * cases[c].rows * cases[c].rows);
        contexts_finish_job(job, false);
        job_release(job);
    }
    close_bench(&b);
}

/* A forward without a seed gets a random one, and a backward of its context (saved forward) uses the same seed. */
static void test_a_forward_without_a_seed_draws_one_and_a_backward_of_its_context_has_it(void **state)
{
    (void)state;
    struct bench b;
    uint64_t seeds[8];
    open_bench(&b, "fake", 0);
    for (int i = 0; i < 8; i++) {
        struct job *job = prepared(&b, ATTN_OP_FORWARD, forward_body(5, 4, "\"dropout_p\": 0.5"));
        seeds[i] = job->call->items[0].problem.seed;
        assert_true(seeds[i] < UINT64_C(1) << 53);
        for (int before = 0; before < i; before++) assert_true(seeds[before] != seeds[i]);
        job_release(job);
    }
    struct job *job = prepared(&b, ATTN_OP_FORWARD, forward_body(5, 4, "\"dropout_p\": 0.5, \"seed\": 0"));
    assert_true(job->call->items[0].problem.seed == 0); /* a seed of 0 is like any other */
    job_release(job);
    job = prepared(&b, ATTN_OP_FORWARD, forward_body(5, 4, "\"dropout_p\": 0"));
    assert_true(job->call->items[0].problem.seed == 0);
    job_release(job);

    char id[PROTO_CONTEXT_BYTES];
    struct job *forward = prepared(&b, ATTN_OP_FORWARD, forward_body(5, 4, "\"dropout_p\": 0.5, \"save\": true"));
    strcpy(id, forward->results[0].context);
    contexts_finish_job(forward, true);
    job = prepared(&b, ATTN_OP_BACKWARD, backward_body(id, 5, 4));
    assert_true(job->call->items[0].problem.dropout_p == 0.5);
    assert_true(job->call->items[0].problem.seed == forward->call->items[0].problem.seed);
    contexts_finish_job(job, true);
    job_release(job);
    job_release(forward);
    close_bench(&b);
}

/* ---- Tests of refused jobs --------------------------------------------------------------------------------------- */

static void test_what_no_device_has_memory_for_is_refused_with_the_bytes(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 1 << 20);
    attn_error err = { 0 };
    struct job *job = job_of(&b.server, ATTN_OP_FORWARD, forward_body(2000, 64, ""));
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &b.info, &err), ATTN_TOO_LARGE);
    size_t bytes;
    long long limit;
    assert_int_equal(
        sscanf(err.text,
               "%zu bytes of device memory are needed for inputs, outputs and scratch memory, the limit is "
               "%lld (--device-bytes)",
               &bytes, &limit),
        2);
    assert_int_equal(limit, 1 << 20);
    assert_int_equal(proto_errors[proto_error_of(err.status)].http, 413);
    attn_plan plan;
    size_t scratch;
    assert_int_equal(attn_plan_make(attn_device_capabilities(b.device), &job->call->items[0].problem, &plan, &err),
                     ATTN_OK);
    assert_int_equal(attn_workspace(attn_device_capabilities(b.device), &plan, 1, &scratch, &err), ATTN_OK);
    /* A device with its own memory needs room for inputs, outputs and scratch memory. */
    assert_int_equal(bytes, job->inputs_used + job->outputs.bytes + scratch);
    job_release(job);
    struct job *small = prepared(&b, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    job_release(small);
    close_bench(&b);
}

static void test_a_device_that_computes_in_staging_memory_needs_scratch_memory_alone(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    struct job *job = job_of(&b.server, ATTN_OP_FORWARD, forward_body(2000, 64, ""));
    attn_device_info largest = b.info;
    attn_plan plan;
    size_t scratch;
    attn_error err = { 0 };
    assert_int_equal(attn_plan_make(attn_device_capabilities(b.device), &job->call->items[0].problem, &plan, &err),
                     ATTN_OK);
    assert_int_equal(attn_workspace(attn_device_capabilities(b.device), &plan, 1, &scratch, &err), ATTN_OK);
    largest.unified = true;
    largest.memory_limit = (int64_t)scratch;
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &largest, &err), ATTN_OK);
    job_release(job);
    job = job_of(&b.server, ATTN_OP_FORWARD, forward_body(2000, 64, ""));
    largest.memory_limit = (int64_t)scratch - 1;
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &largest, &err), ATTN_TOO_LARGE);
    job_release(job);
    close_bench(&b);
}

static void test_a_refused_problem_of_an_envelope_is_left_out_and_the_others_go_on(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    char *bodies[] = { forward_body(5, 4, ""), forward_body(5, 4, "\"outputs\": [\"lse\"], \"verify\": 1"),
                       forward_body(7, 4, "") };
    struct job *job = prepared(&b, ATTN_OP_FORWARD, envelope_of(bodies, 3));
    const proto_item *items = job->call->items;
    assert_int_equal(job->runnable, 2);
    assert_int_equal(items[0].error.status, ATTN_OK);
    assert_int_equal(items[1].error.status, ATTN_UNSUPPORTED);
    assert_string_equal(items[1].error.text, "verify: only the out of a forward can be verified");
    assert_int_equal(items[2].error.status, ATTN_OK);
    assert_false(job->wants_verify);
    assert_true(job->flops == 2.0 * 8 * (5 * 5 + 7 * 7));
    assert_true(job->seconds > 0 && job->seconds < 1 && job->worst_seconds >= job->seconds);
    assert_string_equal(job->because, "");
    assert_ptr_equal(items[2].problem.out.data, (char *)items[0].problem.lse.data + 64);
    job_release(job);
    assert_refused(&b, ATTN_OP_FORWARD, forward_body(5, 4, "\"outputs\": [\"lse\"], \"verify\": 1"), ATTN_UNSUPPORTED,
                   "verify: only the out of a forward can be verified");
    close_bench(&b);
}

/* ---- Tests of which jobs are verified ---------------------------------------------------------------------------- */

/* Returns a forward of 4097 queries and keys with heads of 64 numbers. The client wants `rows` rows verified; the
 * CPU verifies at most 2048 rows. */
static struct job *verifying(struct bench *b, int64_t rows)
{
    struct job *job = job_of(&b->server, ATTN_OP_FORWARD, forward_body(5, 64, "\"verify\": 1"));
    proto_item *item = &job->call->items[0];
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *const t = &item->problem.tensor[id];
        if (t->rank > 0)
            *t = attn_tensor_make(t->data, t->dtype, t->rank,
                                  t->rank == 4 ? (int64_t[]){ 1, 4097, 1, 64 } : (int64_t[]){ 1, 1, 4097 });
    }
    item->verify_rows = rows;
    return job;
}

static void test_a_device_verifies_all_rows_and_more_than_the_cpu_may(void **state)
{
    static const struct {
        const char *script;
        int64_t rows;
        bool device;
        const char *refused;
    } cases[] = {
        { "", 5, false, NULL },
        { "", 2047, false, NULL },
        { "", 2048, true, NULL },
        { "", 4097, true, NULL },
        { "", -1, true, NULL },
        { "truth.none", 5, false, NULL },
        { "truth.none", 2048, false, "verify: at most 2047 of the 4097 rows can be verified here" },
        { "truth.none", -1, false, "verify: at most 2047 of the 4097 rows can be verified here" },
    };
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct bench b;
        attn_error err = { 0 };
        setenv("ATTN_FAKE_SCRIPT", cases[c].script, 1);
        open_bench(&b, "fake", 0);
        struct job *job = verifying(&b, cases[c].rows);
        const attn_status status = prepare_job(job, attn_device_capabilities(b.device), &b.info, &err);
        assert_int_equal(status, cases[c].refused ? ATTN_UNSUPPORTED : ATTN_OK);
        assert_string_equal(err.text, cases[c].refused ? cases[c].refused : "");
        assert_int_equal(job->truths != NULL, cases[c].device);
        /* If the device verifies the results, the job's expected time includes the verification, and no other job
         * joins its batch. */
        if (cases[c].device) {
            assert_true(job->truth_seconds > 0 && job->seconds > job->truth_seconds && job->kind == 0);
            assert_string_equal(job->because, "verify");
            assert_in_range((uintptr_t)job->truth_found, (uintptr_t)job->outputs.memory,
                            (uintptr_t)job->outputs.memory + job->outputs.bytes - sizeof *job->truth_found);
            const double seconds = job->seconds;
            job->worst_seconds = 0;
            prepare_look_closer(job, &b.info);
            assert_true(job->seconds >= job->truth_seconds && job->seconds < 2 * seconds);
        } else assert_true(job->truth_seconds == 0);
        job_release(job);
        close_bench(&b);
    }
    setenv("ATTN_FAKE_SCRIPT", "", 1);
}

static void test_a_truth_that_no_device_can_hold_is_refused(void **state)
{
    (void)state;
    struct bench b;
    attn_error err = { 0 };
    open_bench(&b, "fake", 0);
    struct job *job = verifying(&b, -1);
    b.info.memory_limit = 0;
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &b.info, &err), ATTN_TOO_LARGE);
    job_release(job);
    b.info.memory_limit = strtoll(err.text, NULL, 10) - 1;
    job = verifying(&b, -1);
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &b.info, &err), ATTN_TOO_LARGE);
    job_release(job);
    /* The device's memory is now one byte too small for `out` in float64. */
    b.info.memory_limit -= 4097 * 64 * (int64_t)sizeof(double) - 1;
    job = verifying(&b, 5);
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &b.info, &err), ATTN_OK);
    job_release(job);
    close_bench(&b);
}

/* ---- Tests of contexts (saved forwards) -------------------------------------------------------------------------- */

/* Runs and answers a forward with `save`, so that a backward can use its context (the saved forward). */
static void save(struct bench *b, char id[PROTO_CONTEXT_BYTES], int rows, int D)
{
    struct job *job = prepared(b, ATTN_OP_FORWARD, forward_body(rows, D, "\"save\": true, \"outputs\": [\"out\"]"));
    assert_int_equal(strspn(job->results[0].context, "0123456789abcdef"), 32);
    /* A later backward needs lse, so the forward computes it although the client did not ask for it. */
    assert_int_equal(job->call->items[0].problem.lse.rank, 3);
    assert_in_range((uintptr_t)job->call->items[0].problem.lse.data, (uintptr_t)job->outputs.memory,
                    (uintptr_t)job->outputs.memory + job->outputs.bytes - 1);
    strcpy(id, job->results[0].context);
    assert_int_equal(contexts_in(b, CONTEXT_RESERVED), 1);
    contexts_finish_job(job, true);
    assert_int_equal(contexts_in(b, CONTEXT_RESERVED), 0);
    job_release(job);
}

static void test_a_context_is_taken_by_a_backward_and_gone_when_it_ran(void **state)
{
    (void)state;
    struct bench b;
    char id[PROTO_CONTEXT_BYTES];
    open_bench(&b, "fake", 0);
    save(&b, id, 5, 4);
    const int64_t leased = staging_leased_bytes(b.server.staging);
    assert_true(leased > 0); /* the context (saved forward) keeps this memory, although the forward's request was
                              * freed */
    struct job *job = prepared(&b, ATTN_OP_BACKWARD, backward_body(id, 5, 4));
    const attn_problem *p = &job->call->items[0].problem, *forward = &job->saved[0]->call->items[0].problem;
    assert_int_equal(contexts_in(&b, CONTEXT_TAKEN), 1);
    assert_int_equal(p->op, ATTN_OP_BACKWARD);
    assert_ptr_equal(p->q.data, forward->q.data);
    assert_ptr_equal(p->out.data, forward->out.data);
    assert_in_range((uintptr_t)p->dout.data, (uintptr_t)job->inputs->memory,
                    (uintptr_t)job->inputs->memory + job->inputs_used - 1);
    assert_ptr_equal(p->dq.data, job->outputs.memory);
    assert_refused(&b, ATTN_OP_BACKWARD, backward_body(id, 5, 4), ATTN_IN_USE,
                   "context: another backward uses it and is not answered yet; it can be used again only if that one "
                   "does not run");
    contexts_finish_job(job, true);
    assert_refused(&b, ATTN_OP_BACKWARD, backward_body(id, 5, 4), ATTN_NOT_FOUND,
                   "context: unknown, expired or already used");
    assert_int_equal(contexts_in(&b, CONTEXT_FREE), CONTEXTS_MAX_COUNT);
    assert_true(staging_leased_bytes(b.server.staging) > leased);
    job_release(job);
    assert_int_equal(staging_leased_bytes(b.server.staging), 0);
    close_bench(&b);
}

static void test_a_context_is_given_back_when_the_backward_did_not_run(void **state)
{
    (void)state;
    struct bench b;
    char id[PROTO_CONTEXT_BYTES];
    open_bench(&b, "fake", 0);
    save(&b, id, 5, 4);
    struct job *job = prepared(&b, ATTN_OP_BACKWARD, backward_body(id, 5, 4));
    contexts_finish_job(job, false);
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    contexts_finish_job(job, true);
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    job_release(job);
    close_bench(&b);
}

static void test_a_refused_backward_does_not_use_its_context(void **state)
{
    (void)state;
    struct bench b;
    char id[PROTO_CONTEXT_BYTES];
    open_bench(&b, "fake", 0);
    save(&b, id, 5, 4);
    assert_refused(&b, ATTN_OP_BACKWARD, backward_body(id, 6, 4), ATTN_INVALID, NULL);
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    /* The backward is refused for lack of memory, after its context (saved forward) was looked up. */
    const attn_device_info whole = b.info;
    b.info.memory_limit = 100;
    assert_refused(&b, ATTN_OP_BACKWARD, backward_body(id, 5, 4), ATTN_TOO_LARGE, NULL);
    b.info = whole;
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    struct job *job = prepared(&b, ATTN_OP_BACKWARD, backward_body(id, 5, 4));
    contexts_finish_job(job, true);
    job_release(job);
    close_bench(&b);
}

/* The second of three backwards is refused, so its context (saved forward) can be used again. The third names the
 * context of the first, so it is refused too. */
static void test_contexts_are_given_back_problem_by_problem(void **state)
{
    (void)state;
    struct bench b;
    char first[PROTO_CONTEXT_BYTES], second[PROTO_CONTEXT_BYTES];
    open_bench(&b, "fake", 0);
    save(&b, first, 5, 4);
    save(&b, second, 5, 4);
    char *bodies[] = { backward_body(first, 5, 4), backward_body(second, 6, 4), backward_body(first, 5, 4) };
    struct job *job = prepared(&b, ATTN_OP_BACKWARD, envelope_of(bodies, 3));
    assert_int_equal(job->runnable, 1);
    assert_int_equal(job->call->items[1].error.status, ATTN_INVALID);
    assert_int_equal(job->call->items[2].error.status, ATTN_NOT_FOUND);
    assert_int_equal(contexts_in(&b, CONTEXT_TAKEN), 1);
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    assert_null(job->saved[1]);
    contexts_finish_job(job, true);
    assert_int_equal(contexts_in(&b, CONTEXT_TAKEN), 0);
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    job_release(job);
    job = prepared(&b, ATTN_OP_BACKWARD, backward_body(second, 5, 4));
    contexts_finish_job(job, false);
    job_release(job);
    close_bench(&b);
}

/* A problem may be refused after its context (saved forward) was looked up. It must then give the context back. */
static void test_a_context_is_given_back_at_once_when_its_problem_is_refused_later(void **state)
{
    (void)state;
    struct bench b;
    attn_error err = { 0 };
    char ids[2][PROTO_CONTEXT_BYTES];
    open_bench(&b, "fake", 0);
    for (int i = 0; i < 2; i++) save(&b, ids[i], 5, 4);
    char *bodies[] = { backward_body(ids[0], 5, 4), backward_body(ids[1], 5, 4) };
    struct job *job = job_of(&b.server, ATTN_OP_BACKWARD, envelope_of(bodies, 2));
    job->call->items[0].verify_rows = 1;
    assert_int_equal(prepare_job(job, attn_device_capabilities(b.device), &b.info, &err), ATTN_OK);
    assert_int_equal(job->call->items[0].error.status, ATTN_UNSUPPORTED);
    assert_int_equal(contexts_in(&b, CONTEXT_TAKEN), 1);
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    assert_null(job->saved[0]);
    contexts_finish_job(job, false);
    job_release(job);
    close_bench(&b);
}

/* If a problem ran but could not be verified, the client gets an error, and the problem's context (saved forward) is
 * deleted. */
static void test_a_problem_that_fails_after_it_ran_keeps_no_context(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    char *bodies[] = { forward_body(5, 4, "\"save\": true"), forward_body(5, 4, "\"save\": true") };
    struct job *job = prepared(&b, ATTN_OP_FORWARD, envelope_of(bodies, 2));
    assert_int_equal(contexts_in(&b, CONTEXT_RESERVED), 2);
    job->call->items[1].error.status = ATTN_NO_MEMORY;
    contexts_finish_job(job, true);
    assert_int_equal(contexts_in(&b, CONTEXT_READY), 1);
    assert_int_equal(contexts_in(&b, CONTEXT_RESERVED), 0);
    assert_int_not_equal(job->results[0].context[0], '\0');
    assert_int_equal(job->results[1].context[0], '\0');
    job_release(job);
    close_bench(&b);
}

static void test_a_save_without_room_is_refused_and_its_neighbours_are_not(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    contexts_free(b.server.contexts);
    b.server.contexts = contexts_new(b.config.staging_bytes, 1, CONTEXTS_TTL_MS);
    char *bodies[] = { forward_body(5, 4, "\"save\": true"), forward_body(5, 4, "\"save\": true"),
                       forward_body(5, 4, "") };
    struct job *job = prepared(&b, ATTN_OP_FORWARD, envelope_of(bodies, 3));
    assert_int_equal(job->runnable, 2);
    assert_int_equal(job->call->items[1].error.status, ATTN_BUSY);
    assert_int_equal(contexts_in(&b, CONTEXT_RESERVED), 1);
    assert_refused(&b, ATTN_OP_FORWARD, forward_body(5, 4, "\"save\": true"), ATTN_BUSY, NULL);
    assert_int_equal(contexts_in(&b, CONTEXT_RESERVED), 1);
    contexts_finish_job(job, false);
    assert_int_equal(contexts_in(&b, CONTEXT_RESERVED), 0);
    job_release(job);
    close_bench(&b);
}

/* ---- Tests of rows whose scores leave float32's range ------------------------------------------------------------ */

/* Rows whose scores leave float32's range are slow. The server looks for such rows if the problem would take long with
 * them. */
static void test_rows_that_leave_float32_are_looked_for_where_they_might_take_long(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    struct job *job = prepared(&b, ATTN_OP_FORWARD, forward_body(200, 1, "\"scale\": 3e38, \"outputs\": [\"lse\"]"));
    const double seconds = job->seconds, worst = job->worst_seconds;
    prepare_look_closer(job, &b.info);
    /* Even if all rows were slow, the problem would take only a millisecond, so the server does not look for slow
     * rows. */
    assert_true(job->seconds == seconds && job->worst_seconds == worst);
    job->worst_seconds = 1e6;
    prepare_look_closer(job, &b.info);
    assert_true(job->seconds > 1.5 * seconds && job->worst_seconds == worst);
    assert_string_equal(job->because, "rows whose scores leave float32");
    job_release(job);
    close_bench(&b);
}

/* ---- Tests of references to jobs --------------------------------------------------------------------------------- */

static void test_the_last_reference_gives_the_memory_back(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, "fake", 0);
    struct job *job = prepared(&b, ATTN_OP_FORWARD, wide_body());
    const int64_t leased = staging_leased_bytes(b.server.staging);
    assert_ptr_equal(job_hold(job), job);
    job_release(job);
    assert_int_equal(staging_leased_bytes(b.server.staging), leased);
    job_release_memory(job);
    assert_int_equal(staging_leased_bytes(b.server.staging), 0);
    assert_null(job->inputs);
    assert_null(job->spare);
    job_release(job);
    job_release(NULL);
    close_bench(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_outputs_lie_behind_the_inputs_in_one_piece),
        cmocka_unit_test(test_the_outputs_of_an_envelope_lie_one_after_the_other),
        cmocka_unit_test(test_outputs_that_do_not_fit_behind_the_inputs_get_an_extent_of_their_own),
        cmocka_unit_test(test_outputs_for_which_there_is_no_memory_are_refused_as_busy),
        cmocka_unit_test(test_small_problems_of_one_op_dtype_and_head_are_of_one_kind),
        cmocka_unit_test(test_what_a_job_wants_is_noted),
        cmocka_unit_test(test_a_forward_without_a_seed_draws_one_and_a_backward_of_its_context_has_it),
        cmocka_unit_test(test_what_no_device_has_memory_for_is_refused_with_the_bytes),
        cmocka_unit_test(test_a_device_that_computes_in_staging_memory_needs_scratch_memory_alone),
        cmocka_unit_test(test_a_refused_problem_of_an_envelope_is_left_out_and_the_others_go_on),
        cmocka_unit_test(test_a_device_verifies_all_rows_and_more_than_the_cpu_may),
        cmocka_unit_test(test_a_truth_that_no_device_can_hold_is_refused),
        cmocka_unit_test(test_a_context_is_taken_by_a_backward_and_gone_when_it_ran),
        cmocka_unit_test(test_a_context_is_given_back_when_the_backward_did_not_run),
        cmocka_unit_test(test_a_refused_backward_does_not_use_its_context),
        cmocka_unit_test(test_contexts_are_given_back_problem_by_problem),
        cmocka_unit_test(test_a_context_is_given_back_at_once_when_its_problem_is_refused_later),
        cmocka_unit_test(test_a_problem_that_fails_after_it_ran_keeps_no_context),
        cmocka_unit_test(test_a_save_without_room_is_refused_and_its_neighbours_are_not),
        cmocka_unit_test(test_rows_that_leave_float32_are_looked_for_where_they_might_take_long),
        cmocka_unit_test(test_the_last_reference_gives_the_memory_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
