/* test_loop.c: tests of the scheduler: what happens to a request between the end of its body and its answer. The
 * server's loop runs in a thread of its own. The tests take the place of the HTTP threads: they post requests to the
 * loop, and get them back. Devices are those of the fake backend.
 *
 * No test depends on speed. A gate (hold=PATH in a device's script) keeps a batch waiting until the test deletes the
 * file PATH. turns() waits until the loop has handled everything that was posted before the call. */
#include "tests/unit/server/jobs.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "text/text.h"
#include "server/base/metrics.h"
#include "server/device/devices.h"
#include "server/sched/loop_internal.h"
#include "server/intake/prepare.h"
#include "server/work/contexts.h"
#include "server/regions/regions.h"

enum { MOST = 16 };

struct scene {
    struct config config;
    struct server server; /* on_resume() finds the struct scene by the address of this member */
    struct gate gate;
    /* blocks the only thread of libuv's thread pool until the test opens the gate `pool` */
    uv_work_t blocker;
    struct gate pool;
    pthread_t thread;
    int exit_status;
    _Atomic int connections, sweeps, reloads, drains, hurries;

    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct request *resumed[MOST];
    int resumed_count;
};

/* ---- Functions that replace the HTTP side of the server ---------------------------------------------------------- */

static void on_resume(struct request *request)
{
    struct scene *s = (struct scene *)((char *)request->server - offsetof(struct scene, server));
    assert_int_equal(request_role(), ROLE_LOOP);
    request_move(request, REQUEST_ANSWERING);
    pthread_mutex_lock(&s->lock);
    s->resumed[s->resumed_count++] = request;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

static int on_connections(void *context)
{
    return atomic_load(&((struct scene *)context)->connections);
}

static void on_sweep(void *context, int64_t now_ms, bool draining)
{
    (void)now_ms, (void)draining;
    atomic_fetch_add(&((struct scene *)context)->sweeps, 1);
}

static void on_reload(void *context)
{
    atomic_fetch_add(&((struct scene *)context)->reloads, 1);
}

static void on_drain(void *context)
{
    atomic_fetch_add(&((struct scene *)context)->drains, 1);
}

static void on_close_metrics(void *context)
{
    atomic_fetch_add(&((struct scene *)context)->hurries, 1);
}

/* ---- A server with a scheduler's loop, for one test -------------------------------------------------------------- */

/* The settings of a test's server, loop and devices. 0 stands for the default. */
struct opening {
    /* What the fake devices do (kernels/fake/fake.c). With hold=GATE a batch waits until the test opens the gate. */
    const char *script;
    int devices;   /* 0: one */
    int max_batch; /* 1 makes every request a batch of its own */
    int64_t batch_window_us, drain_ms, watchdog_ms, kv_bytes;
};

/* Sets up a test. *state is first the test's struct opening, and then its struct scene. */
static int open_scene(void **state)
{
    static struct scene scene;
    const struct opening *const o = *state;
    struct scene *const s = *state = &scene;
    char number[8], text[512];
    attn_error err = { 0 };
    pthread_condattr_t monotonic;
    *s = (struct scene){ .exit_status = -1 };
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    gate_shut(&s->gate);
    config_default(&s->config);
    if (o->max_batch) s->config.max_batch = o->max_batch;
    if (o->batch_window_us) s->config.batch_window_us = o->batch_window_us;
    if (o->drain_ms) s->config.drain_ms = o->drain_ms;
    if (o->watchdog_ms) s->config.watchdog_ms = o->watchdog_ms;
    if (o->kv_bytes) s->config.kv_bytes = o->kv_bytes;
    request_set_role(ROLE_HTTP);
    snprintf(number, sizeof number, "%d", o->devices ? o->devices : 1);
    gate_script(&s->gate, o->script ? o->script : "", text, sizeof text);
    setenv("ATTN_FAKE_DEVICES", number, 1);
    setenv("ATTN_FAKE_SCRIPT", text, 1);
    server_open(&s->server, &s->config);
    s->server.loop = loop_open(&s->server);
    if (devices_open(&s->config, loop_mailbox(s->server.loop), LOOP_BATCH, &s->server.devices, &err) != ATTN_OK)
        fail_msg("%s", err.text);
    return 0;
}

static void *run_loop(void *context)
{
    struct scene *s = context;
    const struct loop_frontend frontend = { s,         on_resume, on_connections,  on_sweep,
                                            on_reload, on_drain,  on_close_metrics };
    s->exit_status = loop_run(s->server.loop, &frontend);
    return NULL;
}

static void start(struct scene *s)
{
    assert_int_equal(pthread_create(&s->thread, NULL, run_loop, s), 0);
}

/* Waits until the loop has handled everything that was posted before the call. */
static void turns(struct scene *s)
{
    for (int i = 0; i < 2; i++) {
        const int before = atomic_load(&s->reloads);
        loop_signal(s->server.loop, SIGHUP);
        WAIT_UNTIL(atomic_load(&s->reloads) > before);
    }
}

/* Waits until the loop has ended, and returns its exit status. If `tell` is true, tells the loop to end first. */
static int end(struct scene *s, bool tell)
{
    atomic_store(&s->connections, 0);
    if (tell) loop_signal(s->server.loop, SIGTERM);
    pthread_join(s->thread, NULL);
    assert_int_equal(atomic_load(&s->server.suspended), 0);
    assert_int_equal(s->resumed_count, 0);
    if (access(s->gate.path, F_OK) == 0) gate_open(&s->gate);
    assert_true(devices_stop(s->server.devices, PATIENCE_MS));
    loop_close(s->server.loop);
    server_close(&s->server);
    devices_close(s->server.devices);
    for (int state = 0; state < REQUEST_STATE_COUNT; state++)
        assert_int_equal(request_count((enum request_state)state), 0);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake);
    return s->exit_status;
}

/* ---- Allocations that tests can make fail ------------------------------------------------------------------------ */

/* One calloc() of exactly this many bytes fails. 0: no call fails. */
static _Atomic size_t refused_bytes;
static atomic_int passed_calls; /* number of calls of calloc() for refused_bytes bytes that succeed before one fails */

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    size_t whole = count * bytes;
    if (whole != 0 && whole == atomic_load(&refused_bytes) && atomic_fetch_sub(&passed_calls, 1) > 0)
        return __real_calloc(count, bytes);
    if (whole != 0 && atomic_compare_exchange_strong(&refused_bytes, &whole, 0)) {
        atomic_store(&passed_calls, 0);
        return NULL;
    }
    return __real_calloc(count, bytes);
}

/* ---- What a test does in place of HTTP threads ------------------------------------------------------------------- */

/* Suspends a request's connection as body_done() of server/http/body.c does. The request then waits for the scheduler's
 * loop. */
static void suspend(struct scene *s, struct request *request, enum request_state state)
{
    attn_error err = { 0 };
    /* In the state COMPUTING, an HTTP thread of the daemon computes a small request itself. */
    if (request->job) request_move(request, REQUEST_COMPUTING);
    assert_int_equal(request_enter(request, CALLER_WAITING, &err), ATTN_OK);
    atomic_fetch_add(&s->server.suspended, 1);
    request_move(request, state);
    loop_post(s->server.loop, request);
}

/* Returns a request whose body was checked, but which was not posted to the scheduler's loop. */
static struct request *checked(struct scene *s, attn_op op, char *body)
{
    struct check_result result;
    struct request *request = received(&s->server, op, body);
    check_body(request, &result);
    check_apply(request, &result);
    if (request->failed) fail_msg("%s", request->why.text);
    request->job->request = request;
    return request;
}

static struct request *posted(struct scene *s, attn_op op, char *body)
{
    struct request *request = checked(s, op, body);
    suspend(s, request, REQUEST_QUEUED);
    return request;
}

static struct request *posted_forward(struct scene *s)
{
    return posted(s, ATTN_OP_FORWARD, forward_body(5, 4, ""));
}

static int position(const struct scene *s, const struct request *request)
{
    for (int i = 0; i < s->resumed_count; i++)
        if (s->resumed[i] == request) return i;
    return -1;
}

/* Waits until the scheduler's loop gives `request` back, ready to be answered. */
static void answered(struct scene *s, struct request *request)
{
    const int64_t until_ns = clock_ns() + PATIENCE_MS * CLOCK_NS_PER_MS;
    const struct timespec until = { until_ns / CLOCK_NS_PER_S, until_ns % CLOCK_NS_PER_S };
    int error = 0, at;
    pthread_mutex_lock(&s->lock);
    while ((at = position(s, request)) < 0 && error == 0) error = pthread_cond_timedwait(&s->wake, &s->lock, &until);
    if (at >= 0) s->resumed[at] = s->resumed[--s->resumed_count];
    pthread_mutex_unlock(&s->lock);
    if (at < 0) fail_msg("a request was not given back");
    atomic_fetch_sub(&s->server.suspended, 1);
}

static bool is_answered(struct scene *s, const struct request *request)
{
    pthread_mutex_lock(&s->lock);
    const bool is = position(s, request) >= 0;
    pthread_mutex_unlock(&s->lock);
    return is;
}

static void assert_ok(struct scene *s, struct request *request)
{
    answered(s, request);
    if (request->failed) fail_msg("%s: %s", proto_errors[request->error].code, request->why.text);
    assert_false(request->gone);
    assert_true(request->job->part.ran);
    for (int i = 0; i < request->job->call->count; i++)
        if (request->job->call->items[i].error.status == ATTN_OK) assert_computed(request->job, i);
    contexts_finish_job(request->job, true);
    request_free(request);
}

static void assert_fails(struct scene *s, struct request *request, proto_error error, const char *text)
{
    answered(s, request);
    assert_true(request->failed);
    assert_string_equal(proto_errors[request->error].code, proto_errors[error].code);
    if (text) assert_string_equal(request->why.text, text);
    request_free(request);
}

static void assert_gone(struct scene *s, struct request *request)
{
    answered(s, request);
    assert_true(request->gone);
    assert_false(request->failed);
    request_free(request);
}

static double batches_of(const char *device)
{
    return metrics_sum(METRIC_DEVICE_BATCHES, device);
}

/* ---- Tests of requests that are computed together in batches ----------------------------------------------------- */

static void test_a_request_is_computed_and_given_back(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *request = posted_forward(s);
    answered(s, request);
    assert_int_equal(request->state, REQUEST_ANSWERING);
    assert_false(request->failed);
    assert_true(request->job->part.ran);
    assert_computed(request->job, 0);
    assert_true(request->job->results[0].timing_us[PROTO_STAGE_queue] > 0);
    assert_int_equal(atomic_load(&request->job->references), 1);
    assert_null(request->watch);
    assert_int_equal(request->deadline.place, 0);
    request_free(request);
    assert_int_equal(end(s, true), 0);
}

/* Five requests alternate between head sizes 4 and 8. A batch takes at most two requests, of one head size, the
 * oldest first. The second batch fails. */
static void test_what_waits_leaves_in_batches_of_one_kind(void **state)
{
    struct scene *const s = *state;
    const double before = batches_of("fake:0");
    struct request *requests[5];
    for (int i = 0; i < 5; i++) requests[i] = posted(s, ATTN_OP_FORWARD, forward_body(5 + i, i % 2 ? 8 : 4, ""));
    start(s);
    for (int i = 0; i < 5; i++)
        if (i % 2) assert_fails(s, requests[i], PROTO_E_INTERNAL, NULL);
        else assert_ok(s, requests[i]);
    assert_true(batches_of("fake:0") - before == 3);
    assert_int_equal(end(s, true), 0);
}

static void test_with_a_window_a_batch_waits_until_it_is_full(void **state)
{
    struct scene *const s = *state;
    const double before = batches_of("fake:0");
    start(s);
    struct request *requests[3];
    for (int i = 0; i < 2; i++) requests[i] = posted_forward(s);
    turns(s);
    assert_int_equal(request_count(REQUEST_QUEUED), 2);
    requests[2] = posted_forward(s);
    for (int i = 0; i < 3; i++) assert_ok(s, requests[i]);
    assert_true(batches_of("fake:0") - before == 1);
    assert_int_equal(end(s, true), 0);
}

static void test_a_window_that_is_over_sends_what_there_is(void **state)
{
    struct scene *const s = *state;
    const double before = batches_of("fake:0");
    struct request *requests[2];
    for (int i = 0; i < 2; i++) requests[i] = posted_forward(s);
    start(s);
    for (int i = 0; i < 2; i++) assert_ok(s, requests[i]);
    assert_true(batches_of("fake:0") - before == 1);
    assert_int_equal(end(s, true), 0);
}

static void test_batches_go_to_every_device(void **state)
{
    struct scene *const s = *state;
    const double before[] = { batches_of("fake:0"), batches_of("fake:1") };
    struct request *requests[8];
    for (int i = 0; i < 8; i++) requests[i] = posted_forward(s);
    start(s);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 8);
    gate_open(&s->gate);
    for (int i = 0; i < 8; i++) assert_ok(s, requests[i]);
    assert_true(batches_of("fake:0") - before[0] == 4);
    assert_true(batches_of("fake:1") - before[1] == 4);
    assert_int_equal(end(s, true), 0);
}

static void test_a_refused_problem_of_an_envelope_does_not_keep_the_others(void **state)
{
    struct scene *const s = *state;
    char text[8192] = "";
    start(s);
    char *bodies[] = { forward_body(5, 4, ""), forward_body(5, 4, "\"outputs\": [\"lse\"], \"verify\": 1"),
                       forward_body(7, 4, "") };
    struct request *request = posted(s, ATTN_OP_FORWARD, envelope_of(bodies, 3));
    answered(s, request);
    assert_false(request->failed);
    assert_computed(request->job, 0);
    assert_computed(request->job, 2);
    proto_encoder *encoder;
    attn_error err;
    assert_int_equal(proto_encoder_new(request->job->call, request->job->results, "id", &encoder, &err), ATTN_OK);
    proto_encoder_read(encoder, text, sizeof text - 1);
    assert_non_null(strstr(text, "\"detail\":\"verify: only the out of a forward can be verified\""));
    assert_non_null(strstr(text, "/requests/1"));
    proto_encoder_free(encoder);
    request_free(request);
    assert_int_equal(end(s, true), 0);
}

/* ---- Tests of deadlines ------------------------------------------------------------------------------------------ */

static void test_a_deadline_ends_the_wait_for_a_device(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *running[4], *late;
    for (int i = 0; i < 4; i++) running[i] = posted_forward(s);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 4);
    late = checked(s, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    late->deadline.at_ns = clock_ns();
    suspend(s, late, REQUEST_QUEUED);
    assert_fails(s, late, PROTO_E_DEADLINE, "the deadline passed while the request waited for a device");
    assert_int_equal(s->server.queue.count, 0);
    gate_open(&s->gate);
    for (int i = 0; i < 4; i++) assert_ok(s, running[i]);
    assert_int_equal(end(s, true), 0);
}

/* A request whose deadline passes while its batch runs must be answered at once. */
static void test_a_deadline_ends_the_wait_for_a_batch_that_runs(void **state)
{
    struct scene *const s = *state;
    char id[PROTO_CONTEXT_BYTES];
    start(s);
    struct request *forward = posted(s, ATTN_OP_FORWARD, forward_body(5, 4, "\"save\": true"));
    answered(s, forward);
    strcpy(id, forward->job->results[0].context);
    contexts_finish_job(forward->job, true);
    request_free(forward);
    const int64_t saved_bytes = staging_leased_bytes(s->server.staging);

    struct request *late = checked(s, ATTN_OP_BACKWARD, backward_body(id, 5, 4));
    late->deadline.at_ns = clock_ns();
    suspend(s, late, REQUEST_QUEUED);
    answered(s, late);
    assert_true(late->failed);
    assert_string_equal(late->why.text, "the deadline passed while the request was running");
    assert_null(late->job);
    request_free(late);
    assert_int_equal(staging_leased_bytes(s->server.staging), 2 * saved_bytes);
    gate_open(&s->gate);
    WAIT_UNTIL(staging_leased_bytes(s->server.staging) == saved_bytes);
    /* Although the first backward missed its deadline, another backward may use the context (saved forward). */
    assert_ok(s, posted(s, ATTN_OP_BACKWARD, backward_body(id, 5, 4)));
    assert_int_equal(end(s, true), 0);
}

static void connect_client(struct request *request, int ends[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    request->socket = ends[0];
}

static void test_a_client_that_leaves_while_it_waits_is_found_out(void **state)
{
    struct scene *const s = *state;
    int queued[2], running[2], patient[2];
    start(s);
    struct request *requests[6];
    const double before[] = { metrics_sum(METRIC_CANCELLED, "queued"), metrics_sum(METRIC_CANCELLED, "running") };
    for (int i = 0; i < 6; i++) {
        requests[i] = checked(s, ATTN_OP_FORWARD, forward_body(5, 4, ""));
        if (i == 1) connect_client(requests[i], running);
        if (i == 2) connect_client(requests[i], patient);
        if (i == 4) connect_client(requests[i], queued);
        suspend(s, requests[i], REQUEST_QUEUED);
    }
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 4 && request_count(REQUEST_QUEUED) == 2);
    close(queued[1]);
    assert_gone(s, requests[4]);
    assert_true(metrics_sum(METRIC_CANCELLED, "queued") - before[0] == 1);
    close(running[1]);
    assert_gone(s, requests[1]);
    assert_true(metrics_sum(METRIC_CANCELLED, "running") - before[1] == 1);
    gate_open(&s->gate);
    for (int i = 0; i < 6; i++)
        if (i != 1 && i != 4) assert_ok(s, requests[i]);
    close(queued[0]);
    close(running[0]);
    close(patient[0]);
    close(patient[1]);
    assert_int_equal(end(s, true), 0);
}

/* ---- Tests of work on libuv's threads: verification, statistics, checks ------------------------------------------ */

static void block(uv_work_t *work)
{
    const struct scene *s = (struct scene *)((char *)work - offsetof(struct scene, blocker));
    while (access(s->pool.path, F_OK) == 0) nanosleep(&(struct timespec){ 0, 500000 }, NULL);
}

static void unblocked(uv_work_t *work, int status)
{
    (void)work, (void)status;
}

/* Blocks the only thread of libuv's thread pool until gate_open(&s->pool). Must be called before start(). */
static void block_pool(struct scene *s)
{
    gate_shut(&s->pool);
    assert_int_equal(uv_queue_work(loop_uv(s->server.loop), &s->blocker, block, unblocked), 0);
}

static void test_what_is_verified_is_compared_with_float64(void **state)
{
    struct scene *const s = *state;
    start(s);
    for (int round = 0; round < 2; round++) {
        struct request *request = posted(s, ATTN_OP_FORWARD, forward_body(9, 4, "\"verify\": 4"));
        answered(s, request);
        const proto_result *result = &request->job->results[0];
        assert_true(result->verified);
        assert_int_equal(result->verification.rows, 4);
        if (round == 0) assert_true(result->verification.max_abs < 1e-6);
        else assert_false(result->verification.max_abs < 1e300);
        request_free(request);
    }
    assert_int_equal(end(s, true), 0);
}

/* The device verifies the results of the first request. It cannot compute those of the second in float64, so the CPU
 * verifies them. */
static void test_all_rows_are_verified_where_they_were_computed_or_on_the_cpu(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *requests[2];
    const char *const body = "\"verify\": \"all\"";
    for (int i = 0; i < 2; i++) requests[i] = posted(s, ATTN_OP_FORWARD, forward_body(9, 4, body));
    answered(s, requests[1]);
    gate_open(&s->gate);
    answered(s, requests[0]);
    for (int i = 0; i < 2; i++) {
        const struct job *job = requests[i]->job;
        assert_false(requests[i]->failed);
        assert_int_equal(job->truth_known, i == 0);
        assert_true(job->results[0].verified);
        assert_int_equal(job->results[0].verification.rows, 9);
    }
    assert_true(requests[0]->job->results[0].verification.max_abs == requests[1]->job->results[0].verification.max_abs);
    assert_true(requests[0]->job->results[0].verification.relative ==
                requests[1]->job->results[0].verification.relative);
    for (int i = 0; i < 2; i++) request_free(requests[i]);
    assert_int_equal(end(s, true), 0);
}

static void test_a_client_that_leaves_during_the_truth_is_found_out(void **state)
{
    struct scene *const s = *state;
    int client[2];
    char *bodies[] = { forward_body(9, 4, "\"verify\": \"all\""), forward_body(9, 4, "\"verify\": \"all\"") };
    start(s);
    struct request *request = checked(s, ATTN_OP_FORWARD, envelope_of(bodies, 2));
    connect_client(request, client);
    suspend(s, request, REQUEST_QUEUED);
    assert_ok(s, posted_forward(s));
    close(client[1]);
    assert_gone(s, request);
    gate_open(&s->gate);
    close(client[0]);
    /* The verification ended before the step in which the device would fail, so the device is still usable. */
    WAIT_UNTIL(batches_of("fake:0") >= 2);
    assert_int_equal(end(s, true), 0);
}

static void test_a_deadline_that_passes_during_the_truth_is_answered(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *request = posted(s, ATTN_OP_FORWARD,
                                     forward_body(9, 4, "\"verify\": \"all\", \"timeout_ms\": 100"));
    assert_fails(s, request, PROTO_E_DEADLINE, NULL);
    gate_open(&s->gate);
    assert_int_equal(end(s, true), 0);
}

static void test_a_batch_that_left_rows_out_runs_once_more(void **state)
{
    struct scene *const s = *state;
    start(s);
    for (int round = 0; round < 2; round++) {
        struct request *request = posted(s, ATTN_OP_FORWARD, forward_body(9, 4, "\"verify\": 4"));
        answered(s, request);
        const proto_result *result = &request->job->results[0];
        assert_true(result->verified && result->verification.max_abs < 1e-6);
        request_free(request);
    }
    assert_int_equal(end(s, true), 0);
}

static void test_the_length_of_many_numbers_is_known_when_the_answer_begins(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *request = posted(s, ATTN_OP_FORWARD, forward_body(1200, 4, "\"encoding\": \"array\""));
    answered(s, request);
    assert_false(request->failed);
    assert_non_null(request->encoder);
    assert_true(proto_encoder_measure(request->encoder, 0));
    const uint64_t length = proto_encoder_length(request->encoder);
    uint64_t sum = 0;
    char piece[1000];
    for (size_t got; (got = proto_encoder_read(request->encoder, piece, sizeof piece)) > 0;) sum += got;
    assert_int_equal(sum, length);
    assert_true(length > 4800 * 2);
    request_free(request);
    assert_int_equal(end(s, true), 0);
}

/* If the client of a request that waits to be verified leaves, the server drops the request at once. */
static void test_nobody_waits_for_a_verification_whose_client_has_left(void **state)
{
    struct scene *const s = *state;
    int client[2];
    block_pool(s);
    start(s);
    struct request *left = checked(s, ATTN_OP_FORWARD, forward_body(9, 4, "\"verify\": 4"));
    struct request *stays = checked(s, ATTN_OP_FORWARD, forward_body(9, 4, "\"verify\": 4"));
    connect_client(left, client);
    suspend(s, left, REQUEST_QUEUED);
    suspend(s, stays, REQUEST_QUEUED);
    WAIT_UNTIL(request_count(REQUEST_FINISHING) == 2);
    close(client[1]);
    assert_gone(s, left);
    assert_false(is_answered(s, stays));
    gate_open(&s->pool);
    assert_ok(s, stays);
    close(client[0]);
    assert_int_equal(end(s, true), 0);
}

enum { OBJECT_BYTES = 8 << 20 };
static const char object_key[] = "/attn_unit_loop";

/* Registers a region "r" of 8 MiB of shared memory. Returns a file descriptor of the shared memory object. */
static int begin_shared(struct scene *s)
{
    static const char *const prefixes[] = { "attn_unit_" };
    proto_region wanted = { .bytes = OBJECT_BYTES };
    proto_error error;
    attn_error why = { 0 };
    shm_unlink(object_key);
    const int fd = shm_open(object_key, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, OBJECT_BYTES), 0);
    strcpy(wanted.key, object_key);
    s->server.regions = regions_new(prefixes, 1);
    if (!regions_register(s->server.regions, &s->server.everybody, "r", &wanted, &error, &why))
        fail_msg("%s", why.text);
    return fd;
}

static void end_shared(struct scene *s, int fd)
{
    regions_free(s->server.regions);
    shm_unlink(object_key);
    close(fd);
}

/* Returns a request whose body has been checked: a forward whose `out` is to be written to the region "r" of shared
 * memory. */
static struct request *checked_to_region(struct scene *s)
{
    struct request *request = checked(s, ATTN_OP_FORWARD, forward_body(9, 4, ""));
    const proto_shared shared = { .id = ATTN_T_out, .output = true, .region = "r", .bytes = 9 * 4 * 4 };
    attn_error err = { 0 };
    assert_int_equal(region_uses_new(s->server.regions, &s->server.everybody, &shared, 1, &request->job->shared, &err),
                     ATTN_OK);
    assert_int_equal(region_uses_bind(request->job->shared, &request->job->call->items[0].problem, 1, &err), ATTN_OK);
    return request;
}

static bool is_written(int fd, const struct request *request)
{
    float out[9 * 4];
    assert_int_equal(pread(fd, out, sizeof out, 0), sizeof out);
    return memcmp(out, request->job->call->items[0].problem.out.data, sizeof out) == 0;
}

static void test_outputs_are_in_shared_memory_when_the_request_is_given_back(void **state)
{
    struct scene *const s = *state;
    const int fd = begin_shared(s);
    block_pool(s);
    start(s);
    struct request *request = checked_to_region(s);
    suspend(s, request, REQUEST_QUEUED);
    WAIT_UNTIL(request_count(REQUEST_FINISHING) == 1);
    assert_false(is_answered(s, request));
    gate_open(&s->pool);
    answered(s, request);
    assert_false(request->failed);
    assert_true(is_written(fd, request));
    assert_null(request->job->shared);
    assert_computed(request->job, 0);
    request_free(request);
    assert_int_equal(ftruncate(fd, 10), 0);
    request = checked_to_region(s);
    suspend(s, request, REQUEST_QUEUED);
    assert_fails(s, request, PROTO_E_INVALID_REQUEST,
                 "out: the shared memory of the region 'r' has become shorter than it was when it was registered");
    assert_int_equal(end(s, true), 0);
    end_shared(s, fd);
}

/* A client that has its answer may reuse its shared memory. So even after its deadline, a request is answered only when
 * the last byte of its outputs is written to this memory. */
static void test_a_deadline_that_passes_while_outputs_are_written_is_answered_after_it(void **state)
{
    struct scene *const s = *state;
    int client[2];
    const int fd = begin_shared(s);
    block_pool(s);
    start(s);
    struct request *late = checked_to_region(s), *left = checked_to_region(s);
    const double before = metrics_sum(METRIC_CANCELLED, "finishing");
    connect_client(left, client);
    suspend(s, left, REQUEST_QUEUED);
    WAIT_UNTIL(request_count(REQUEST_FINISHING) == 1);
    close(client[1]);
    WAIT_UNTIL(metrics_sum(METRIC_CANCELLED, "finishing") - before == 1);
    late->deadline.at_ns = clock_ns() + 2000 * CLOCK_NS_PER_MS;
    suspend(s, late, REQUEST_QUEUED);
    WAIT_UNTIL(clock_ns() > late->deadline.at_ns + 50 * CLOCK_NS_PER_MS);
    turns(s);
    assert_false(is_answered(s, late));
    assert_false(is_answered(s, left));
    gate_open(&s->pool);
    assert_fails(s, late, PROTO_E_DEADLINE, NULL);
    assert_gone(s, left);
    close(client[0]);
    assert_int_equal(end(s, true), 0);
    end_shared(s, fd);
}

static void test_a_second_signal_waits_for_what_is_being_written(void **state)
{
    struct scene *const s = *state;
    const int fd = begin_shared(s);
    block_pool(s);
    atomic_store(&s->connections, 1);
    start(s);
    struct request *request = checked_to_region(s);
    suspend(s, request, REQUEST_QUEUED);
    WAIT_UNTIL(request_count(REQUEST_FINISHING) == 1);
    loop_signal(s->server.loop, SIGTERM);
    loop_signal(s->server.loop, SIGTERM);
    WAIT_UNTIL(atomic_load(&s->hurries) == 1);
    assert_false(is_answered(s, request));
    gate_open(&s->pool);
    assert_fails(s, request, PROTO_E_DRAINING, NULL);
    assert_int_equal(end(s, false), 0);
    end_shared(s, fd);
}

/* Returns a KServe request. q has `rows` rows of 64 numbers, and k and v have one row each. All three lie in the same
 * bytes of the region of shared memory. */
static struct request *received_from_region(struct scene *s, int rows)
{
    static const proto_model model = { .name = "attention_forward", .op = ATTN_OP_FORWARD };
    char text[1024];
    struct text t = text_in(text, sizeof text);
    attn_error err = { 0 };
    struct request *request = received(&s->server, ATTN_OP_FORWARD, forward_body(1, 1, ""));
    const proto_memory memory = { grow_extent, request };
    proto_parser_free(request->parser);
    text_put_string(&t, "{\"inputs\":[");
    for (int i = 0; i < 3; i++)
        text_printf(&t,
                    "%s{\"name\":\"%c\",\"shape\":[1,%d,1,64],\"datatype\":\"FP32\",\"parameters\":{"
                    "\"shared_memory_region\":\"r\",\"shared_memory_byte_size\":%d}}",
                    i ? "," : "", "qkv"[i], i ? 1 : rows, (i ? 1 : rows) * 256);
    text_put_string(&t, "]}");
    request->parser = proto_parser_new(&proto_kserve, ATTN_OP_FORWARD, &s->server.limits, &memory);
    proto_parser_kserve(request->parser, &model, -1);
    request->answer_as = &proto_kserve;
    request->decoded_bytes = t.used;
    assert_int_equal(proto_parser_feed(request->parser, text, t.used, &err), ATTN_OK);
    if (!check_shared(request)) fail_msg("%s", request->why.text);
    return request;
}

static void test_much_shared_memory_is_read_beside_the_loop(void **state)
{
    struct scene *const s = *state;
    int client[2];
    const int fd = begin_shared(s);
    block_pool(s);
    start(s);
    struct request *much = received_from_region(s, OBJECT_BYTES / 256),
                   *left = received_from_region(s, OBJECT_BYTES / 256), *little = received_from_region(s, 4);
    const double before = metrics_sum(METRIC_CANCELLED, "checking");
    assert_true(check_takes_long(much));
    assert_false(check_takes_long(little));
    request_free(little);
    much->deadline.at_ns = left->deadline.at_ns = check_deadline(much, NULL);
    connect_client(left, client);
    suspend(s, much, REQUEST_CHECKING);
    suspend(s, left, REQUEST_CHECKING);
    close(client[1]);
    WAIT_UNTIL(metrics_sum(METRIC_CANCELLED, "checking") - before == 1);
    assert_ok(s, posted_forward(s));
    /* No memory is leased for inputs before they are read from shared memory. */
    assert_int_equal(staging_leased_bytes(s->server.staging) < OBJECT_BYTES, 1);
    gate_open(&s->pool);
    assert_ok(s, much);
    assert_gone(s, left);
    close(client[0]);
    assert_int_equal(end(s, true), 0);
    end_shared(s, fd);
}

/* The loop reads a region of shared memory in pieces, and checks the body after the last one. */
static void test_a_body_is_checked_when_the_last_piece_is_read(void **state)
{
    struct scene *const s = *state;
    const int fd = begin_shared(s);
    struct request *request = received_from_region(s, OBJECT_BYTES / 256);
    struct check_result result = { 0 };
    int pieces = 0;
    while (!check_piece(request, &result, 0)) pieces++;
    assert_int_equal(pieces, 10); /* q is read in eight pieces of 1 MiB, k and v in one piece each */
    assert_false(result.failed);
    assert_non_null(request->job);
    assert_null(request->shared);
    request_free(request);
    start(s);
    assert_int_equal(end(s, true), 0);
    end_shared(s, fd);
}

/* ---- Tests of the check of a large body -------------------------------------------------------------------------- */

/* Returns a body of 200 problems, the last of which is `last`. It has too many names and shapes to be checked by an
 * HTTP thread. */
static char *long_body(char *last)
{
    char *bodies[200];
    for (int i = 0; i < 199; i++) bodies[i] = forward_body(1 + i % 3, 4, "");
    bodies[199] = last;
    return envelope_of(bodies, 200);
}

static void test_a_body_that_takes_long_to_check_is_checked_beside_the_loop(void **state)
{
    struct scene *const s = *state;
    block_pool(s);
    start(s);
    struct request *request = received(&s->server, ATTN_OP_FORWARD, long_body(forward_body(5, 4, "")));
    struct request *small = received(&s->server, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    assert_true(check_takes_long(request));
    assert_false(check_takes_long(small));
    request_free(small);
    request->deadline.at_ns = check_deadline(request, NULL);
    suspend(s, request, REQUEST_CHECKING);
    WAIT_UNTIL(request_count(REQUEST_CHECKING) == 1);
    assert_ok(s, posted_forward(s));
    assert_int_equal(request_count(REQUEST_CHECKING), 1);
    gate_open(&s->pool);
    assert_ok(s, request);
    assert_int_equal(end(s, true), 0);
}

static void test_what_the_check_finds_is_answered(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *bad = received(&s->server, ATTN_OP_FORWARD, body_of("q k", 5, 4, ""));
    bad->deadline.at_ns = check_deadline(bad, NULL);
    suspend(s, bad, REQUEST_CHECKING);
    assert_fails(s, bad, PROTO_E_INVALID_REQUEST, NULL);
    /* If every problem is refused, nothing is queued, and the answer still has status 200. */
    char *bodies[] = { body_of("q k", 5, 4, ""), body_of("q v", 5, 4, "") };
    struct request *none = received(&s->server, ATTN_OP_FORWARD, envelope_of(bodies, 2));
    none->deadline.at_ns = check_deadline(none, NULL);
    suspend(s, none, REQUEST_CHECKING);
    answered(s, none);
    assert_false(none->failed);
    assert_int_equal(none->job->runnable, 0);
    assert_false(none->job->part.ran);
    request_free(none);
    assert_int_equal(end(s, true), 0);
}

/* The deadline passes during the check of the body, which runs in another thread. The request is answered only after
 * the check has ended. */
static void test_a_deadline_that_passes_during_the_check_is_answered_after_it(void **state)
{
    struct scene *const s = *state;
    int client[2];
    block_pool(s);
    start(s);
    struct request *late = received(&s->server, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    struct request *left = received(&s->server, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    const double before = metrics_sum(METRIC_CANCELLED, "checking");
    late->deadline.at_ns = clock_ns();
    left->deadline.at_ns = check_deadline(left, NULL);
    connect_client(left, client);
    close(client[1]);
    suspend(s, late, REQUEST_CHECKING);
    suspend(s, left, REQUEST_CHECKING);
    WAIT_UNTIL(metrics_sum(METRIC_CANCELLED, "checking") - before == 1);
    turns(s);
    assert_false(is_answered(s, late));
    assert_false(is_answered(s, left));
    gate_open(&s->pool);
    assert_fails(s, late, PROTO_E_DEADLINE, "the deadline passed while the request was running");
    assert_gone(s, left);
    close(client[0]);
    assert_int_equal(end(s, true), 0);
}

/* ---- Tests of stopping the server -------------------------------------------------------------------------------- */

static void test_a_drain_finishes_what_there_is_and_what_still_comes(void **state)
{
    struct scene *const s = *state;
    atomic_store(&s->connections, 2);
    start(s);
    struct request *held = posted_forward(s);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 1);
    loop_signal(s->server.loop, SIGTERM);
    WAIT_UNTIL(atomic_load(&s->server.phase) == SERVER_DRAINING);
    turns(s);
    assert_int_equal(atomic_load(&s->drains), 1);
    assert_int_equal(atomic_load(&s->hurries), 0);
    assert_false(is_answered(s, held));
    assert_true(atomic_load(&s->server.drain_since_ms) > 0);
    assert_ok(s, posted_forward(s)); /* the request's connection was opened before the server began to stop */
    gate_open(&s->gate);
    assert_ok(s, held);
    assert_int_equal(end(s, false), 0);
    assert_int_equal(atomic_load(&s->hurries), 1);
    assert_int_equal(atomic_load(&s->drains), 1);
}

static void test_a_second_signal_answers_what_waits(void **state)
{
    struct scene *const s = *state;
    block_pool(s);
    atomic_store(&s->connections, 7);
    start(s);
    struct request *requests[6];
    for (int i = 0; i < 5; i++) requests[i] = posted_forward(s);
    requests[5] = received(&s->server, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    requests[5]->deadline.at_ns = check_deadline(requests[5], NULL);
    suspend(s, requests[5], REQUEST_CHECKING);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 4 && request_count(REQUEST_CHECKING) == 1);
    loop_signal(s->server.loop, SIGTERM);
    loop_signal(s->server.loop, SIGTERM);
    WAIT_UNTIL(atomic_load(&s->hurries) == 1);
    assert_true(s->server.stopping);
    for (int i = 0; i < 5; i++) assert_fails(s, requests[i], PROTO_E_DRAINING, "the server is stopping");
    struct request *later = posted_forward(s);
    struct request *unchecked = received(&s->server, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    suspend(s, unchecked, REQUEST_CHECKING);
    assert_fails(s, later, PROTO_E_DRAINING, "the server is stopping");
    assert_fails(s, unchecked, PROTO_E_DRAINING, "the server is stopping");
    assert_false(is_answered(s, requests[5]));
    gate_open(&s->pool);
    assert_fails(s, requests[5], PROTO_E_DRAINING, "the server is stopping");
    assert_int_equal(end(s, false), 0);
}

static void test_a_drain_ends_when_its_time_is_over(void **state)
{
    struct scene *const s = *state;
    atomic_store(&s->connections, 1);
    start(s);
    struct request *held = posted_forward(s);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 1);
    loop_signal(s->server.loop, SIGTERM);
    assert_fails(s, held, PROTO_E_DRAINING, "the server is stopping");
    assert_int_equal(atomic_load(&s->hurries), 1);
    assert_int_equal(end(s, false), 0);
}

static struct cache_info new_cache(struct scene *s)
{
    const struct cache_shape shape = { 1, 4, 4, ATTN_F32, false, 64 };
    struct cache_info info;
    attn_error err;
    if (caches_create(s->server.caches, &s->server.everybody, &shape, NULL, NULL, CACHES_TTL_MS, &info, &err) !=
        ATTN_OK)
        fail_msg("%s", err.text);
    return info;
}

static int64_t length_of(struct scene *s, struct cache_info info)
{
    attn_error err;
    assert_int_equal(caches_get(s->server.caches, &s->server.everybody, info.id, &info, &err), ATTN_OK);
    return info.length;
}

/* Returns a request whose body has been checked: a decode that appends `rows` positions to a cache. */
static struct request *checked_decode(struct scene *s, const struct cache_info *info, int rows, const char *more)
{
    char extra[128];
    snprintf(extra, sizeof extra, "\"caches\": [\"%s\"]%s", info->id, more);
    return checked(s, (attn_op)PROTO_OP_DECODE, forward_body(rows, 4, extra));
}

static struct request *posted_decode(struct scene *s, const struct cache_info *info, int rows, const char *more)
{
    struct request *request = checked_decode(s, info, rows, more);
    suspend(s, request, REQUEST_QUEUED);
    return request;
}

static void test_a_step_without_memory_for_its_batch_leaves_its_cache_as_it_was(void **state)
{
    struct scene *const s = *state;
    assert_int_equal(devices_add_caches(s->server.devices, &s->config, s->server.caches, NULL), ATTN_OK);
    start(s);
    const struct cache_info info = new_cache(s);
    for (int n = 0; n < 2; n++) {
        atomic_store(&refused_bytes, n == 0 ? sizeof(struct batch) + sizeof(struct job *) : 0);
        struct request *request = posted_decode(s, &info, 1, "");
        answered(s, request);
        assert_int_equal(request->failed, n == 0);
        if (n == 0) assert_string_equal(request->why.text, "no memory for a batch");
        request_free(request);
        assert_int_equal(length_of(s, info), n);
    }
    assert_int_equal(end(s, true), 0);
}

/* If a client leaves before its answer is finished, the cache must stay as it was before the decode. */
static void test_a_step_that_is_left_while_its_answer_is_finished_leaves_its_cache_as_it_was(void **state)
{
    struct scene *const s = *state;
    assert_int_equal(devices_add_caches(s->server.devices, &s->config, s->server.caches, NULL), ATTN_OK);
    block_pool(s);
    start(s);
    const struct cache_info info = new_cache(s);
    int client[2];
    struct request *left = checked_decode(s, &info, 1200, ", \"encoding\": \"array\"");
    connect_client(left, client);
    suspend(s, left, REQUEST_QUEUED);
    WAIT_UNTIL(request_count(REQUEST_FINISHING) == 1);
    struct request *next = posted_decode(s, &info, 3, "");
    close(client[1]);
    assert_gone(s, left);
    close(client[0]);
    assert_int_equal(length_of(s, info), 0);
    gate_open(&s->pool);
    answered(s, next);
    assert_false(next->failed);
    assert_int_equal(next->job->results[0].lengths[0], 3);
    request_free(next);
    struct request *good = posted_decode(s, &info, 1200, ", \"encoding\": \"array\"");
    answered(s, good);
    assert_false(good->failed);
    request_free(good);
    assert_int_equal(length_of(s, info), 1203);
    assert_int_equal(end(s, true), 0);
}

/* Posts a decode that appends nothing, with one row for each of the caches. */
static struct request *posted_rows(struct scene *s, int rows, const struct cache_info *infos)
{
    char text[256];
    snprintf(text, sizeof text,
             "{\"q\": {\"shape\": [%d, 1, 1, 4], \"dtype\": \"float32\", \"data\": [%s]}, \"caches\": [\"%s\"%s%s%s]}",
             rows, rows == 2 ? "1,1,1,1,1,1,1,1" : "1,1,1,1", infos[0].id, rows == 2 ? ", \"" : "",
             rows == 2 ? infos[1].id : "", rows == 2 ? "\"" : "");
    return posted(s, (attn_op)PROTO_OP_DECODE, strdup(text));
}

/* The first decode writes cache a, the second needs a and b, and the third needs b, so each waits for the one before
 * it. A decode on cache c begins at once. */
static void test_steps_that_come_wait_behind_older_ones_and_for_nobody_else(void **state)
{
    struct scene *const s = *state;
    assert_int_equal(devices_add_caches(s->server.devices, &s->config, s->server.caches, NULL), ATTN_OK);
    start(s);
    struct cache_info infos[3];
    struct request *requests[5];
    for (int i = 0; i < 3; i++) infos[i] = new_cache(s);
    requests[0] = posted_decode(s, &infos[0], 1, "");
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 1);
    requests[1] = posted_rows(s, 2, infos);
    turns(s);
    requests[2] = posted_rows(s, 1, &infos[1]);
    turns(s);
    assert_int_equal(request_count(REQUEST_RUNNING), 1);
    requests[3] = posted_forward(s);
    requests[4] = posted_rows(s, 1, &infos[2]);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 3);
    turns(s);
    assert_int_equal(request_count(REQUEST_RUNNING), 3);
    assert_int_equal(request_count(REQUEST_QUEUED), 2);
    gate_open(&s->gate);
    for (int i = 0; i < 5; i++) {
        answered(s, requests[i]);
        assert_false(requests[i]->failed);
        request_free(requests[i]);
    }
    assert_int_equal(end(s, true), 0);
}

/* ---- Tests of devices that fail ---------------------------------------------------------------------------------- */

static void test_without_its_last_device_the_server_ends_with_70(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *requests[6];
    for (int i = 0; i < 6; i++) requests[i] = posted_forward(s);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 4 && request_count(REQUEST_QUEUED) == 2);
    gate_open(&s->gate);
    for (int i = 0; i < 4; i++) assert_fails(s, requests[i], PROTO_E_UNAVAILABLE, NULL);
    for (int i = 4; i < 6; i++) assert_fails(s, requests[i], PROTO_E_UNAVAILABLE, "no device is usable");
    assert_int_equal(end(s, false), 70);
    assert_int_equal(atomic_load(&s->server.phase), SERVER_FAILED);
    assert_int_equal(atomic_load(&s->hurries), 1);
}

static void test_with_another_device_the_server_goes_on(void **state)
{
    struct scene *const s = *state;
    const double before = batches_of("fake:0");
    start(s);
    assert_fails(s, posted_forward(s), PROTO_E_UNAVAILABLE, NULL);
    for (int i = 0; i < 3; i++) assert_ok(s, posted_forward(s));
    assert_true(batches_of("fake:0") - before == 1);
    assert_int_equal(atomic_load(&s->server.phase), SERVER_READY);
    assert_int_equal(end(s, true), 0);
}

static void test_who_waits_for_a_device_that_does_not_end_is_answered(void **state)
{
    struct scene *const s = *state;
    struct request *requests[2];
    for (int i = 0; i < 2; i++) requests[i] = posted_forward(s);
    start(s);
    for (int i = 0; i < 2; i++)
        assert_fails(s, requests[i], PROTO_E_UNAVAILABLE, "fake:0 did not finish in the time it may take");
    /* The device may still write the job's outputs, so their memory stays leased. */
    assert_true(staging_leased_bytes(s->server.staging) > 0);
    assert_int_equal(end(s, false), 70);
}

/* ---- Tests of a problem that is cut over several devices --------------------------------------------------------- */

static double parts_of(const char *device)
{
    return metrics_sum(METRIC_DEVICE_PARTS, device);
}

/* Returns a request whose expected time is one second, so that the server cuts it over several devices. */
static struct request *checked_long(struct scene *s, attn_op op, char *body)
{
    struct request *request = checked(s, op, body);
    request->job->seconds = 1;
    return request;
}

static struct request *posted_long(struct scene *s, attn_op op, char *body)
{
    struct request *request = checked_long(s, op, body);
    suspend(s, request, REQUEST_QUEUED);
    return request;
}

/* Posts a request of four heads. The CPU verifies 19 of its 20 rows. */
static struct request *posted_heads(struct scene *s)
{
    return posted_long(s, ATTN_OP_FORWARD, heads_body("q k v", 5, 4, 8, "\"verify\": 19"));
}

/* Checks that the answer is correct, and that exactly the devices in `devices` computed it. */
static void assert_by_heads(struct scene *s, struct request *request, const char *devices)
{
    char backend[80];
    answered(s, request);
    if (request->failed) fail_msg("%s: %s", proto_errors[request->error].code, request->why.text);
    const proto_result *const result = &request->job->results[0];
    snprintf(backend, sizeof backend, "fake:%s ", devices);
    if (strncmp(result->backend, backend, strlen(backend)) != 0 || !strstr(result->backend, " by heads"))
        fail_msg("the backend is '%s', must be of %s", result->backend, devices);
    assert_true(result->timing_us[PROTO_STAGE_queue] > 0 && result->timing_us[PROTO_STAGE_compute] > 0);
    assert_computed(request->job, 0);
    assert_int_equal(atomic_load(&request->job->references), 1);
    contexts_finish_job(request->job, true);
    request_free(request);
}

static void test_a_long_problem_is_cut_over_all_devices(void **state)
{
    struct scene *const s = *state;
    const double before[] = { parts_of("fake:0"), parts_of("fake:3"), parts_of(NULL) };
    start(s);
    assert_by_heads(s, posted_heads(s), "0-3");
    assert_by_heads(s, posted_long(s, ATTN_OP_BACKWARD, heads_body("q k v dout", 9, 4, 8, "\"causal\": true")), "0-3");
    assert_true(parts_of("fake:0") - before[0] == 2 && parts_of("fake:3") - before[1] == 2);
    assert_ok(s, posted(s, ATTN_OP_FORWARD, heads_body("q k v", 5, 4, 8, "")));
    assert_true(parts_of(NULL) - before[2] == 8);
    assert_by_heads(s, posted_long(s, ATTN_OP_FORWARD, heads_body("q k v", 5, 4, 8, "\"verify\": \"all\"")), "0-3");
    assert_true(parts_of(NULL) - before[2] == 12);
    assert_int_equal(end(s, true), 0);
}

static void test_a_saved_forward_and_its_backward_are_both_cut(void **state)
{
    struct scene *const s = *state;
    char context[128];
    start(s);
    struct request *forward = posted_long(s, ATTN_OP_FORWARD,
                                          heads_body("q k v", 7, 4, 8, "\"save\": true, \"dropout_p\": 0.4"));
    answered(s, forward);
    assert_non_null(strstr(forward->job->results[0].backend, "fake:0-1 "));
    snprintf(context, sizeof context, "\"context\": \"%s\"", forward->job->results[0].context);
    contexts_finish_job(forward->job, true);
    request_free(forward);
    assert_by_heads(s, posted_long(s, ATTN_OP_BACKWARD, heads_body("dout", 7, 4, 8, context)), "0-1");
    assert_int_equal(end(s, true), 0);
}

static void test_a_problem_whose_device_is_lost_is_computed_by_the_others(void **state)
{
    struct scene *const s = *state;
    start(s);
    assert_by_heads(s, posted_heads(s), "0,2");
    assert_by_heads(s, posted_heads(s), "0,2");
    assert_int_equal(atomic_load(&s->server.phase), SERVER_READY);
    assert_int_equal(end(s, true), 0);
}

static void test_a_problem_that_loses_all_devices_but_one_is_computed_there(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *request = posted_heads(s);
    assert_ok(s, request);
    assert_int_equal(atomic_load(&s->server.phase), SERVER_READY);
    assert_int_equal(end(s, true), 0);
}

static void test_a_problem_that_loses_all_devices_is_answered(void **state)
{
    struct scene *const s = *state;
    struct request *request = posted_heads(s);
    start(s);
    assert_fails(s, request, PROTO_E_UNAVAILABLE, NULL);
    assert_int_equal(end(s, false), 70);
}

/* A problem whose device is lost is queued again, or answered with an error if the queue is full. */
static void test_a_problem_that_loses_a_device_while_the_queue_is_full_is_answered(void **state)
{
    struct scene *const s = *state;
    struct request *request = posted_heads(s);
    s->server.queue.places[CALLER_WAITING].limit = 0;
    start(s);
    assert_fails(s, request, PROTO_E_UNAVAILABLE, "fake: query: illegal address (error 700)");
    assert_int_equal(atomic_load(&s->server.phase), SERVER_READY);
    assert_int_equal(end(s, true), 0);
}

static void test_a_part_without_memory_fails_the_problem_and_cancels_the_others(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *request = posted_heads(s);
    gate_open(&s->gate);
    answered(s, request);
    assert_true(request->failed);
    assert_non_null(strstr(request->why.text, "fake: alloc"));
    request_free(request);
    assert_by_heads(s, posted_heads(s), "0-1");
    assert_int_equal(end(s, true), 0);
}

/* If the deadline of a problem that was cut into parts passes, the answer does not wait for the devices. The parts keep
 * their memory until their devices are done. */
static void test_a_deadline_ends_the_wait_for_all_parts(void **state)
{
    struct scene *const s = *state;
    start(s);
    struct request *late = checked_long(s, ATTN_OP_FORWARD, heads_body("q k v", 5, 4, 8, ""));
    late->deadline.at_ns = clock_ns();
    suspend(s, late, REQUEST_QUEUED);
    assert_fails(s, late, PROTO_E_DEADLINE, "the deadline passed while the request was running");
    gate_open(&s->gate);
    WAIT_UNTIL(staging_leased_bytes(s->server.staging) == 0);
    assert_by_heads(s, posted_heads(s), "0-1");
    assert_int_equal(end(s, true), 0);
}

static void test_a_client_that_leaves_cancels_all_parts(void **state)
{
    struct scene *const s = *state;
    int client[2];
    start(s);
    struct request *request = checked_long(s, ATTN_OP_FORWARD, heads_body("q k v", 5, 4, 8, ""));
    connect_client(request, client);
    suspend(s, request, REQUEST_QUEUED);
    WAIT_UNTIL(request_count(REQUEST_RUNNING) == 1);
    close(client[1]);
    assert_gone(s, request);
    gate_open(&s->gate);
    WAIT_UNTIL(staging_leased_bytes(s->server.staging) == 0);
    close(client[0]);
    assert_int_equal(end(s, true), 0);
}

static void test_a_part_that_never_ends_fails_the_problem_and_no_other(void **state)
{
    struct scene *const s = *state;
    start(s);
    assert_fails(s, posted_heads(s), PROTO_E_UNAVAILABLE, "fake:1 did not finish in the time it may take");
    assert_ok(s, posted_heads(s));
    assert_int_equal(atomic_load(&s->server.phase), SERVER_READY);
    gate_open(&s->gate);
    assert_int_equal(end(s, true), 0);
}

static void test_a_cut_problem_without_memory_for_a_batch_is_answered(void **state)
{
    struct scene *const s = *state;
    start(s);
    /* Each request needs two batches. For the first request, the allocation of its first batch fails. For the second
     * request, that of its second batch fails. */
    for (int before = 0; before < 2; before++) {
        struct request *request = checked_long(s, ATTN_OP_FORWARD, heads_body("q k v", 5, 4, 8, ""));
        atomic_store(&passed_calls, before);
        atomic_store(&refused_bytes, sizeof(struct batch) + sizeof(struct job *));
        suspend(s, request, REQUEST_QUEUED);
        assert_fails(s, request, PROTO_E_OUT_OF_MEMORY, "no memory for a batch");
        assert_true(atomic_load(&refused_bytes) == 0);
    }
    struct request *whole = checked_long(s, ATTN_OP_FORWARD, heads_body("q k v", 5, 4, 8, ""));
    /* Without memory for the list of parts, one device computes the whole problem. */
    atomic_store(&refused_bytes, sizeof(struct job_part));
    suspend(s, whole, REQUEST_QUEUED);
    assert_ok(s, whole);
    assert_by_heads(s, posted_heads(s), "0-1");
    assert_int_equal(end(s, true), 0);
}

/* clang-format off */
#define SCENE(test, ...) { #test, test, open_scene, NULL, &(struct opening){ __VA_ARGS__ } }
/* clang-format on */

int main(void)
{
    setenv("UV_THREADPOOL_SIZE", "1", 1);
    const struct CMUnitTest tests[] = {
        SCENE(test_a_request_is_computed_and_given_back),
        SCENE(test_what_waits_leaves_in_batches_of_one_kind, .script = "launch.err=1@2", .max_batch = 2),
        SCENE(test_with_a_window_a_batch_waits_until_it_is_full, .max_batch = 3,
              .batch_window_us = INT64_C(3600) * 1000000),
        SCENE(test_a_window_that_is_over_sends_what_there_is, .max_batch = 3, .batch_window_us = 1500),
        SCENE(test_batches_go_to_every_device, .devices = 2, .script = "hold=GATE", .max_batch = 1),
        SCENE(test_a_refused_problem_of_an_envelope_does_not_keep_the_others),
        SCENE(test_a_deadline_ends_the_wait_for_a_device, .script = "hold=GATE", .max_batch = 1),
        SCENE(test_a_deadline_ends_the_wait_for_a_batch_that_runs, .script = "hold=GATE@2"),
        SCENE(test_a_client_that_leaves_while_it_waits_is_found_out, .script = "hold=GATE", .max_batch = 1),
        SCENE(test_what_is_verified_is_compared_with_float64, .script = "nan@2"),
        SCENE(test_all_rows_are_verified_where_they_were_computed_or_on_the_cpu, .devices = 2, .max_batch = 1,
              .script = "0:truth.hold=GATE,1:truth.none"),
        SCENE(test_a_client_that_leaves_during_the_truth_is_found_out, .script = "truth.hold=GATE@1,truth.err=700@2"),
        SCENE(test_a_deadline_that_passes_during_the_truth_is_answered, .script = "truth.hold=GATE"),
        SCENE(test_a_batch_that_left_rows_out_runs_once_more, .script = "left@1,left@2,left@3"),
        SCENE(test_the_length_of_many_numbers_is_known_when_the_answer_begins),
        SCENE(test_nobody_waits_for_a_verification_whose_client_has_left),
        SCENE(test_outputs_are_in_shared_memory_when_the_request_is_given_back),
        SCENE(test_a_deadline_that_passes_while_outputs_are_written_is_answered_after_it, .max_batch = 1),
        SCENE(test_a_second_signal_waits_for_what_is_being_written),
        SCENE(test_much_shared_memory_is_read_beside_the_loop),
        SCENE(test_a_body_is_checked_when_the_last_piece_is_read),
        SCENE(test_a_body_that_takes_long_to_check_is_checked_beside_the_loop),
        SCENE(test_what_the_check_finds_is_answered),
        SCENE(test_a_deadline_that_passes_during_the_check_is_answered_after_it),
        SCENE(test_a_drain_finishes_what_there_is_and_what_still_comes, .script = "hold=GATE@1"),
        SCENE(test_a_second_signal_answers_what_waits, .script = "hold=GATE", .max_batch = 1,
              .drain_ms = INT64_C(3600) * 1000),
        SCENE(test_a_drain_ends_when_its_time_is_over, .script = "hold=GATE", .drain_ms = 1),
        SCENE(test_a_step_without_memory_for_its_batch_leaves_its_cache_as_it_was, .kv_bytes = 1 << 20),
        SCENE(test_a_step_that_is_left_while_its_answer_is_finished_leaves_its_cache_as_it_was, .kv_bytes = 1 << 20),
        SCENE(test_steps_that_come_wait_behind_older_ones_and_for_nobody_else, .script = "hold=GATE",
              .kv_bytes = 1 << 20, .max_batch = 1),
        SCENE(test_without_its_last_device_the_server_ends_with_70, .script = "hold=GATE,sync.err=700", .max_batch = 1),
        SCENE(test_with_another_device_the_server_goes_on, .devices = 2, .script = "0:launch.err=700@1"),
        SCENE(test_who_waits_for_a_device_that_does_not_end_is_answered, .script = "hold=GATE", .watchdog_ms = 1),
        SCENE(test_a_long_problem_is_cut_over_all_devices, .devices = 4),
        SCENE(test_a_saved_forward_and_its_backward_are_both_cut, .devices = 2),
        SCENE(test_a_problem_whose_device_is_lost_is_computed_by_the_others, .devices = 3,
              .script = "1:sync.err=700@1"),
        SCENE(test_a_problem_whose_device_is_lost_is_computed_by_the_others, .devices = 3,
              .script = "1:copy.err=700@2"),
        SCENE(test_a_problem_whose_device_is_lost_is_computed_by_the_others, .devices = 3,
              .script = "1:launch.err=700@1,0:delay=5"),
        SCENE(test_a_problem_that_loses_all_devices_but_one_is_computed_there, .devices = 3,
              .script = "0:sync.err=700@1,2:sync.err=700@2"),
        SCENE(test_a_problem_that_loses_all_devices_is_answered, .devices = 2, .script = "sync.err=700"),
        SCENE(test_a_problem_that_loses_a_device_while_the_queue_is_full_is_answered, .devices = 2,
              .script = "1:sync.err=700"),
        SCENE(test_a_part_without_memory_fails_the_problem_and_cancels_the_others, .devices = 2,
              .script = "0:hold=GATE@1,1:alloc.fail@1"),
        SCENE(test_a_deadline_ends_the_wait_for_all_parts, .devices = 2, .script = "1:hold=GATE@1"),
        SCENE(test_a_client_that_leaves_cancels_all_parts, .devices = 2, .script = "hold=GATE@1"),
        SCENE(test_a_part_that_never_ends_fails_the_problem_and_no_other, .devices = 2, .script = "1:hold=GATE@1",
              .watchdog_ms = 2000),
        SCENE(test_a_cut_problem_without_memory_for_a_batch_is_answered, .devices = 2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
