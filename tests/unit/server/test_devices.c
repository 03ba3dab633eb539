/* test_devices.c: tests of batches (jobs that are computed together) on devices of the fake backend: which device gets
 * a batch, when the batch ends, and with which results. The tests take the place of the server's loop. */
#include <pthread.h>

#include "tests/unit/server/jobs.h"

#include "server/device/devices.h"
#include "server/device/inline.h"
#include "server/intake/prepare.h"
#include "server/intake/verify.h"
#include "server/work/contexts.h"

enum { BATCH_KIND = 7, LOG_MAX = 16 };

struct bench {
    struct config config;
    struct server server;
    uv_loop_t uv;
    struct mailbox box;
    int back_count;
    struct batch *back[LOG_MAX]; /* batches in the order in which devices finished them */
};

static void on_message(void *context, struct message *message)
{
    struct bench *b = context;
    assert_int_equal(message->kind, BATCH_KIND);
    assert_true(b->back_count < LOG_MAX);
    b->back[b->back_count++] = (struct batch *)message;
}

/* Prepares a test's configuration, which the test may change before open_devices(). */
static void begin(struct bench *b)
{
    *b = (struct bench){ 0 };
    config_default(&b->config);
    assert_int_equal(uv_loop_init(&b->uv), 0);
    assert_int_equal(mailbox_open(&b->box, &b->uv, on_message, b), 0);
}

static void open_devices(struct bench *b, int count, const char *script)
{
    char number[8];
    attn_error err = { 0 };
    snprintf(number, sizeof number, "%d", count);
    setenv("ATTN_FAKE_DEVICES", number, 1);
    setenv("ATTN_FAKE_SCRIPT", script, 1);
    server_open(&b->server, &b->config);
    if (devices_open(&b->config, &b->box, BATCH_KIND, &b->server.devices, &err) != ATTN_OK) fail_msg("%s", err.text);
}

static void open_bench(struct bench *b, int count, const char *script)
{
    begin(b);
    open_devices(b, count, script);
}

/* Opens fake devices that behave as the script says. A batch with hold=GATE waits until the test opens the gate. */
static void open_gated(struct bench *b, int count, const char *script, struct gate *gate)
{
    char text[256];
    gate_shut(gate);
    gate_script(gate, script, text, sizeof text);
    open_devices(b, count, text);
}

static void close_bench(struct bench *b)
{
    assert_true(devices_stop(b->server.devices, PATIENCE_MS));
    mailbox_close(&b->box);
    while (uv_run(&b->uv, UV_RUN_DEFAULT)) continue;
    assert_int_equal(uv_loop_close(&b->uv), 0);
    devices_close(b->server.devices);
    server_close(&b->server);
}

/* Returns a job (one request's problems) that is ready to run, whatever memory the devices have. */
static struct job *ready(struct bench *b, attn_op op, char *body)
{
    attn_error err = { 0 };
    attn_device_info ample = *devices_largest(b->server.devices);
    struct job *job = job_of(&b->server, op, body);
    ample.memory_limit = INT64_MAX;
    if (prepare_job(job, devices_capabilities(b->server.devices), &ample, &err) != ATTN_OK) fail_msg("%s", err.text);
    return job;
}

static struct job *ready_forward(struct bench *b, int rows)
{
    return ready(b, ATTN_OP_FORWARD, forward_body(rows, 4, ""));
}

/* Returns a batch that owns `jobs`. Its cost is set to `flops` operations. */
static struct batch *batch_of(struct job *const *jobs, int count, double flops)
{
    struct batch *batch = calloc(1, sizeof *batch + (size_t)count * sizeof batch->parts[0]);
    for (int i = 0; i < count; i++) batch->parts[i] = &jobs[i]->part;
    batch->count = batch->waiting = count;
    batch->flops = flops;
    return batch;
}

static struct batch *submit_one(struct bench *b, struct device *device, double flops)
{
    struct job *job = ready_forward(b, 5);
    struct batch *batch = batch_of(&job, 1, flops);
    devices_submit(b->server.devices, batch, device);
    return batch;
}

static struct batch *next_back(struct bench *b)
{
    while (b->back_count == 0) uv_run(&b->uv, UV_RUN_ONCE);
    struct batch *batch = b->back[0];
    memmove(b->back, b->back + 1, (size_t)--b->back_count * sizeof b->back[0]);
    devices_collect(b->server.devices, batch);
    return batch;
}

static void forget(struct batch *batch)
{
    for (int i = 0; i < batch->count; i++) {
        contexts_finish_job(batch_job(batch, i), false);
        job_release(batch_job(batch, i));
    }
    free(batch);
}

static struct device_state state_of(struct bench *b, int index)
{
    struct device_state states[4];
    devices_describe(b->server.devices, states);
    return states[index];
}

static void assert_ran(const struct batch *batch)
{
    for (int j = 0; j < batch->count; j++) {
        if (!batch->parts[j]->ran) fail_msg("%s", batch->parts[j]->error.text);
        for (int i = 0; i < batch_job(batch, j)->call->count; i++)
            if (batch_job(batch, j)->call->items[i].error.status == ATTN_OK) assert_computed(batch_job(batch, j), i);
    }
}

static void assert_failed(const struct batch *batch, attn_status status)
{
    for (int j = 0; j < batch->count; j++) {
        assert_false(batch->parts[j]->ran);
        assert_int_equal(batch->parts[j]->error.status, status);
    }
}

/* ---- Tests of the results and the times of batches --------------------------------------------------------------- */

static void test_numbers_come_back_right_through_memory_of_the_device(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, 1, "");
    char *bodies[] = { forward_body(5, 4, ""), forward_body(33, 8, "\"outputs\": [\"lse\"]"),
                       forward_body(7, 4, "\"outputs\": [\"lse\"], \"verify\": 1") /* refused */ };
    struct job *jobs[] = { ready_forward(&b, 5), ready_forward(&b, 113),
                           ready(&b, ATTN_OP_FORWARD, envelope_of(bodies, 3)),
                           ready(&b, ATTN_OP_BACKWARD, body_of("q k v dout", 9, 4, "")) };
    struct batch *batch = batch_of(jobs, 4, 1);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    assert_ptr_equal(next_back(&b), batch);
    assert_ran(batch);
    assert_int_equal(strncmp(jobs[0]->results[0].backend, "fake:0 ", 7), 0);
    assert_string_equal(jobs[2]->results[2].backend, "");
    assert_true(batch->started_ns > 0 && batch->ended_ns >= batch->started_ns);
    batch_note_times(batch, jobs[0]);
    const double *us = jobs[0]->results[0].timing_us;
    assert_true(us[PROTO_STAGE_launch] == batch->launch_us);
    assert_true(us[PROTO_STAGE_compute] == batch->compute_us - batch->launch_us);
    forget(batch);
    close_bench(&b);
}

static void test_what_the_kernels_launch_takes_is_not_their_own_time(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, 1, "launch.slow=500@1,delay=500@2");
    submit_one(&b, devices_pick(b.server.devices, 0), 1);
    struct batch *batch = next_back(&b);
    assert_true(batch->launch_us >= 490e3 && batch->compute_us - batch->launch_us < 490e3);
    const double whole_us = (double)(batch->ended_ns - batch->started_ns) / 1e3;
    assert_true(batch->prepare_us > 0 && batch->prepare_us + batch->copy_in_us < 490e3);
    assert_true(batch->prepare_us + batch->copy_in_us + batch->compute_us + batch->copy_out_us <= whole_us);
    forget(batch);

    submit_one(&b, devices_pick(b.server.devices, 0), 1);
    batch = next_back(&b);
    assert_true(batch->compute_us >= 490e3 && batch->launch_us < 490e3);
    forget(batch);
    close_bench(&b);
}

/* The tensors of contexts (saved forwards) lie in the memory of the forwards' job, which is copied to the device once
 * for all their backwards. */
static void test_a_backward_of_a_saved_forward_finds_its_tensors_on_the_device(void **state)
{
    (void)state;
    struct bench b;
    char ids[2][PROTO_CONTEXT_BYTES];
    open_bench(&b, 1, "");
    char *forwards[] = { forward_body(5, 4, "\"save\": true"), forward_body(6, 4, "\"save\": true") };
    struct job *forward = ready(&b, ATTN_OP_FORWARD, envelope_of(forwards, 2));
    struct batch *batch = batch_of(&forward, 1, 1);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    next_back(&b);
    assert_ran(batch);
    for (int i = 0; i < 2; i++) strcpy(ids[i], forward->results[i].context);
    contexts_finish_job(forward, true);
    forget(batch);

    char *backwards[] = { backward_body(ids[0], 5, 4), backward_body(ids[1], 6, 4) };
    struct job *backward = ready(&b, ATTN_OP_BACKWARD, envelope_of(backwards, 2));
    batch = batch_of(&backward, 1, 1);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    next_back(&b);
    assert_ran(batch);
    contexts_finish_job(backward, true);
    forget(batch);
    close_bench(&b);
}

static void test_memory_of_the_device_goes_back_after_each_batch(void **state)
{
    (void)state;
    struct bench b;
    int64_t used = 0;
    open_bench(&b, 1, "");
    for (int i = 0; i < 5; i++) {
        submit_one(&b, devices_pick(b.server.devices, 0), 1);
        forget(next_back(&b));
        /* Every batch uses the device's first stream, so no other stream has scratch memory. */
        if (i == 0) used = state_of(&b, 0).info.memory_used;
        assert_int_equal(state_of(&b, 0).info.memory_used, used);
    }
    assert_int_equal(state_of(&b, 0).running_requests, 0);
    close_bench(&b);
}

static bool can_wait(const struct device *device)
{
    int64_t wait_ns;
    return device_can_wait(device, clock_ns(), &wait_ns);
}

static bool has_room(const struct bench *b, struct flow *flow)
{
    const struct job job = { .flow = flow };
    int64_t wait_ns = INT64_MAX;
    const struct device *device = devices_pick(b->server.devices, 0);
    return device && device_has_room(device, &job, clock_ns(), &wait_ns);
}

static void test_the_device_with_the_least_work_is_picked_until_all_are_full(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    begin(&b);
    open_gated(&b, 2, "hold=GATE", &gate);
    static const struct {
        double flops;
        const char *device;
    } picks[] = {
        { 100, "fake:0" }, { 10, "fake:1" }, { 50, "fake:1" },
        { 30, "fake:1" },  { 20, "fake:1" }, /* after these, fake:1 has a batch on each of its four streams */
        { 1, "fake:0" },   { 1, "fake:0" },  { 1, "fake:0" },
    };
    for (size_t i = 0; i < sizeof picks / sizeof *picks; i++) {
        struct device *device = devices_pick(b.server.devices, 0);
        assert_non_null(device);
        assert_string_equal(device_name(device), picks[i].device);
        assert_false(can_wait(device));
        submit_one(&b, device, picks[i].flops);
    }
    assert_false(has_room(&b, NULL));
    assert_int_equal(state_of(&b, 0).running_requests, 4);
    gate_open(&gate);
    for (int i = 0; i < 8; i++) {
        struct batch *batch = next_back(&b);
        assert_ran(batch);
        forget(batch);
    }
    assert_string_equal(device_name(devices_pick(b.server.devices, 0)), "fake:0");
    assert_int_equal(state_of(&b, 1).running_requests, 0);
    close_bench(&b);
}

static void test_devices_that_are_not_there_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *devices, *says;
    } cases[] = {
        { "0,2", "--devices: there is no GPU 2, there are 2" },
        { "5", "--devices: there is no GPU 5, there are 2" },
    };
    setenv("ATTN_FAKE_DEVICES", "2", 1);
    setenv("ATTN_FAKE_SCRIPT", "", 1);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct bench b;
        attn_error err = { 0 };
        begin(&b);
        b.config.devices = cases[c].devices;
        struct devices *devices = NULL;
        assert_int_equal(devices_open(&b.config, &b.box, BATCH_KIND, &devices, &err), ATTN_NOT_FOUND);
        assert_string_equal(err.text, cases[c].says);
        assert_null(devices);
        mailbox_close(&b.box);
        uv_run(&b.uv, UV_RUN_DEFAULT);
        assert_int_equal(uv_loop_close(&b.uv), 0);
    }
}

/* ---- Tests of devices that fail ---------------------------------------------------------------------------------- */

static void test_an_error_that_passes_fails_one_batch(void **state)
{
    (void)state;
    static const char *const scripts[] = { "launch.err=1@1", "sync.err=1@1", "copy.err=1@1", "copy.err=1@2" };
    for (size_t c = 0; c < sizeof scripts / sizeof *scripts; c++) {
        struct bench b;
        open_bench(&b, 1, scripts[c]);
        struct job *jobs[] = { ready_forward(&b, 5), ready_forward(&b, 7) };
        struct batch *first = batch_of(jobs, 2, 1);
        devices_submit(b.server.devices, first, devices_pick(b.server.devices, 0));
        assert_ptr_equal(next_back(&b), first);
        assert_failed(first, ATTN_DEVICE);
        assert_non_null(strstr(jobs[1]->part.error.text, "(error 1)"));
        struct batch *second = submit_one(&b, devices_pick(b.server.devices, 0), 1);
        assert_ptr_equal(next_back(&b), second);
        assert_ran(second);
        forget(first);
        forget(second);
        close_bench(&b);
    }
}

static void test_a_sticky_error_loses_the_device_and_every_batch_that_it_has(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    begin(&b);
    open_gated(&b, 2, "0:hold=GATE,0:sync.err=700", &gate);
    struct device *lost = devices_pick(b.server.devices, 0);
    for (int i = 0; i < 3; i++) submit_one(&b, lost, 1);
    gate_open(&gate);
    for (int i = 0; i < 3; i++) {
        struct batch *batch = next_back(&b);
        assert_failed(batch, ATTN_DEVICE_LOST);
        forget(batch);
    }
    assert_true(device_disable(lost));
    assert_false(device_disable(lost));
    assert_true(devices_usable(b.server.devices));
    assert_false(state_of(&b, 0).usable);
    for (int i = 0; i < 2; i++) {
        struct device *other = devices_pick(b.server.devices, 0);
        assert_string_equal(device_name(other), "fake:1");
        struct batch *batch = submit_one(&b, other, 1);
        assert_ptr_equal(next_back(&b), batch);
        assert_ran(batch);
        forget(batch);
    }
    assert_true(device_disable(devices_pick(b.server.devices, 0)));
    assert_null(devices_pick(b.server.devices, 0));
    assert_false(devices_usable(b.server.devices));
    close_bench(&b);
}

/* A batch for which scratch memory is missing must wait for the other batch on its device, and then run. */
static void test_a_batch_without_memory_waits_for_those_beside_it_and_is_tried_again(void **state)
{
    (void)state;
    struct bench b;
    struct gate run, size;
    char script[256];
    gate_shut(&run);
    gate_shut(&size);
    /* Each batch makes three allocations, of which the last is scratch memory. So allocation 6 is the scratch memory
     * of the second batch. */
    snprintf(script, sizeof script, "hold=%s@1,size.hold=%s@2,alloc.fail@6", run.path, size.path);
    open_bench(&b, 1, script);
    struct job *jobs[] = { ready_forward(&b, 5), ready_forward(&b, 7) };
    struct batch *first = batch_of(&jobs[0], 1, 1), *second = batch_of(&jobs[1], 1, 1);
    struct device *device = devices_pick(b.server.devices, 0);
    const int64_t regions[] = { (int64_t)(jobs[0]->inputs_used + jobs[0]->outputs.bytes),
                                (int64_t)(jobs[1]->inputs_used + jobs[1]->outputs.bytes) };
    devices_submit(b.server.devices, first, device);
    WAIT_UNTIL(state_of(&b, 0).info.memory_used > regions[0]);
    const int64_t of_first = state_of(&b, 0).info.memory_used;
    devices_submit(b.server.devices, second, device);
    WAIT_UNTIL(state_of(&b, 0).info.memory_used == of_first + regions[1]);
    gate_open(&size);
    WAIT_UNTIL(state_of(&b, 0).info.memory_used == of_first);
    uv_run(&b.uv, UV_RUN_NOWAIT);
    assert_int_equal(b.back_count, 0);
    gate_open(&run);
    assert_ptr_equal(next_back(&b), first);
    assert_ptr_equal(next_back(&b), second);
    assert_ran(first);
    assert_ran(second);
    forget(first);
    forget(second);
    close_bench(&b);
}

static void test_a_batch_that_has_no_memory_alone_fails(void **state)
{
    (void)state;
    struct bench b;
    begin(&b);
    b.config.device_bytes = 1 << 20;
    open_devices(&b, 1, "");
    struct job *job = ready(&b, ATTN_OP_FORWARD, forward_body(2000, 64, ""));
    struct batch *large = batch_of(&job, 1, 1);
    devices_submit(b.server.devices, large, devices_pick(b.server.devices, 0));
    next_back(&b);
    assert_failed(large, ATTN_NO_MEMORY);
    assert_int_equal(state_of(&b, 0).info.memory_used, 0);
    struct batch *small = submit_one(&b, devices_pick(b.server.devices, 0), 1);
    next_back(&b);
    assert_ran(small);
    forget(large);
    forget(small);
    close_bench(&b);
}

static void test_a_device_that_is_not_done_in_its_time_is_overdue(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    bool is_overdue;
    begin(&b);
    b.config.watchdog_ms = 1;
    open_gated(&b, 2, "1:hold=GATE", &gate);
    assert_null(devices_to_disable(b.server.devices, &is_overdue));
    struct device *first = devices_pick(b.server.devices, 0);
    struct job *job = ready_forward(&b, 5);
    struct batch *batch = batch_of(&job, 1, 1e9);
    devices_submit(b.server.devices, batch, first);
    struct device *stuck = devices_pick(b.server.devices, 0);
    struct batch *never = submit_one(&b, stuck, 1);
    next_back(&b);
    forget(batch);
    struct device *overdue = NULL;
    WAIT_UNTIL((overdue = devices_to_disable(b.server.devices, &is_overdue)) != NULL);
    assert_true(is_overdue);
    assert_string_equal(device_name(overdue), "fake:1");
    assert_ptr_equal(device_batches(overdue), never);
    assert_null(never->next);
    assert_true(device_disable(overdue));
    assert_null(devices_to_disable(b.server.devices, &is_overdue));
    gate_open(&gate);
    assert_ptr_equal(next_back(&b), never);
    assert_ran(never);
    assert_null(device_batches(overdue));
    forget(never);
    close_bench(&b);
}

static void test_a_device_that_has_time_left_is_not_overdue(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    bool is_overdue;
    begin(&b);
    b.config.watchdog_ms = 3600000;
    open_gated(&b, 1, "hold=GATE", &gate);
    submit_one(&b, devices_pick(b.server.devices, 0), 1);
    WAIT_UNTIL(state_of(&b, 0).info.memory_used > 0);
    assert_null(devices_to_disable(b.server.devices, &is_overdue));
    gate_open(&gate);
    forget(next_back(&b));
    devices_note_lost(b.server.devices, 0);
    assert_non_null(devices_to_disable(b.server.devices, &is_overdue));
    assert_false(is_overdue);
    close_bench(&b);
}

/* ---- Tests of cancelled batches, and of stopping ----------------------------------------------------------------- */

/* Returns a batch with so much work that its four problems are launched one by one. */
static struct batch *four_launches(struct bench *b)
{
    char *bodies[4];
    for (int i = 0; i < 4; i++) bodies[i] = forward_body(5 + i, 4, "");
    struct job *job = ready(b, ATTN_OP_FORWARD, envelope_of(bodies, 4));
    return batch_of(&job, 1, 4e13);
}

static void test_a_batch_that_nobody_waits_for_ends_between_two_launches(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    begin(&b);
    open_gated(&b, 1, "hold=GATE@1", &gate);
    struct batch *batch = four_launches(&b);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    WAIT_UNTIL(state_of(&b, 0).info.memory_used > 0);
    attn_cancel(&batch->cancel);
    gate_open(&gate);
    assert_ptr_equal(next_back(&b), batch);
    assert_failed(batch, ATTN_CANCELLED);
    struct batch *next = submit_one(&b, devices_pick(b.server.devices, 0), 1);
    next_back(&b);
    assert_ran(next);
    forget(batch);
    forget(next);
    close_bench(&b);
}

/* ---- Tests of devices that verify their outputs in float64 ------------------------------------------------------- */

/* Returns a job with three problems. The device verifies the first and the third by computing them in float64. */
static struct job *two_truths(struct bench *b)
{
    char *bodies[] = { forward_body(9, 4, "\"verify\": \"all\""), forward_body(5, 4, "\"verify\": 2"),
                       forward_body(33, 8, "\"verify\": \"all\", \"causal\": true") };
    return ready(b, ATTN_OP_FORWARD, envelope_of(bodies, 3));
}

static struct batch *submit_two_truths(struct bench *b)
{
    struct job *job = two_truths(b);
    struct batch *batch = batch_of(&job, 1, job->flops);
    devices_submit(b->server.devices, batch, devices_pick(b->server.devices, 0));
    return batch;
}

/* Only the workspaces of the streams may still be allocated on the device. */
static void assert_only_workspace_is_left(struct bench *b)
{
    const int64_t used = state_of(b, 0).info.memory_used;
    char *bodies[] = { forward_body(9, 4, ""), forward_body(5, 4, ""), forward_body(33, 8, "\"causal\": true") };
    struct job *job = ready(b, ATTN_OP_FORWARD, envelope_of(bodies, 3));
    struct batch *batch = batch_of(&job, 1, job->flops);
    devices_submit(b->server.devices, batch, devices_pick(b->server.devices, 0));
    next_back(b);
    forget(batch);
    assert_int_equal(used, state_of(b, 0).info.memory_used);
}

static void test_a_device_compares_what_it_computed_with_its_truth(void **state)
{
    static const struct {
        const char *script;
        bool right;
    } cases[] = { { "", true }, { "nan@1", false }, { "left@1", true } };
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct bench b;
        open_bench(&b, 1, cases[c].script);
        struct batch *batch = submit_two_truths(&b);
        const struct job *job = batch_job(batch, 0);
        assert_true(job->truths[0].wanted && !job->truths[1].wanted && job->truths[2].wanted);
        assert_ptr_equal(next_back(&b), batch);
        assert_true(batch->parts[0]->ran && job->truth_known);
        assert_true(batch->compute_us > 0 && batch->truth_us > 0);
        assert_int_equal(batch->charged_ns, (int64_t)((batch->compute_us + batch->truth_us) * 1e3));
        for (int i = 0; i < 3; i++) {
            proto_verification found;
            assert_int_equal(verify_found_truth(job, i, &found), i != 1);
            if (i == 1) continue;
            assert_int_equal(found.rows, i == 0 ? 9 : 33);
            if (cases[c].right) assert_true(found.max_abs > 0 && found.max_abs < 1e-6 && found.relative < 1e-5);
            else assert_true(found.max_abs > 1e300 && found.relative > 1e300);
        }
        if (cases[c].right) assert_ran(batch);
        forget(batch);
        assert_only_workspace_is_left(&b);
        close_bench(&b);
    }
}

static void test_an_error_in_the_middle_of_the_truth_fails_its_batch(void **state)
{
    static const struct {
        const char *script;
        attn_status status;
    } cases[] = { { "truth.err=9@1", ATTN_DEVICE },
                  { "truth.err=9@2", ATTN_DEVICE },
                  { "truth.err=700@2", ATTN_DEVICE_LOST } };
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct bench b;
        open_bench(&b, 1, cases[c].script);
        struct batch *batch = submit_two_truths(&b);
        assert_ptr_equal(next_back(&b), batch);
        assert_failed(batch, cases[c].status);
        assert_true(batch->charged_ns > 0);
        if (cases[c].status == ATTN_DEVICE) {
            struct batch *next = submit_two_truths(&b);
            assert_ptr_equal(next_back(&b), next);
            assert_ran(next);
            assert_true(batch_job(next, 0)->truth_known);
            forget(next);
            assert_only_workspace_is_left(&b);
        }
        forget(batch);
        close_bench(&b);
    }
}

static void test_a_truth_that_nobody_waits_for_ends_between_two_steps(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    begin(&b);
    /* The script makes the device fail in the second step of the verification. The verification must end before this
     * step. */
    open_gated(&b, 1, "truth.hold=GATE@1,truth.err=700@2", &gate);
    struct batch *batch = submit_two_truths(&b);
    struct batch *beside = submit_one(&b, devices_pick(b.server.devices, 0), 1);
    assert_ptr_equal(next_back(&b), beside);
    assert_ran(beside);
    attn_cancel(&batch->cancel);
    gate_open(&gate);
    assert_ptr_equal(next_back(&b), batch);
    assert_failed(batch, ATTN_CANCELLED);
    assert_true(batch_job(batch, 0)->truth_known == false && state_of(&b, 0).usable);
    forget(beside);
    forget(batch);
    close_bench(&b);
}

static void test_a_device_without_a_truth_only_computes(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, 2, "1:truth.none");
    struct batch *first = submit_two_truths(&b), *second = submit_two_truths(&b);
    assert_ptr_not_equal(first->device, second->device);
    next_back(&b);
    next_back(&b);
    for (int i = 0; i < 2; i++) {
        struct batch *batch = i == 0 ? first : second;
        proto_verification found;
        assert_ran(batch);
        assert_int_equal(verify_found_truth(batch_job(batch, 0), 0, &found), device_number(batch->device) == 0);
    }
    forget(first);
    forget(second);
    close_bench(&b);
}

static void test_a_truth_needs_memory_of_its_device(void **state)
{
    (void)state;
    struct bench b;
    /* Allocation 3 is the first one for the verification. */
    open_bench(&b, 1, "alloc.fail@3+");
    struct batch *batch = submit_two_truths(&b);
    assert_ptr_equal(next_back(&b), batch);
    assert_failed(batch, ATTN_NO_MEMORY);
    forget(batch);
    close_bench(&b);
}

/* An error of earlier work has made the device unusable. The device must count as lost, even if a copy then fails
 * with another error that alone would leave it usable. */
static void test_a_device_that_fails_for_good_after_an_error_that_passes_is_lost(void **state)
{
    (void)state;
    static const char *const scripts[] = { "copy.err=1@2,sync.err=700@1", "copy.err=1@2,sync.err=700@4" };
    for (int launches = 0; launches < 2; launches++) {
        struct bench b;
        open_bench(&b, 1, scripts[launches]);
        struct job *job = launches ? NULL : ready_forward(&b, 5);
        struct batch *batch = launches ? four_launches(&b) : batch_of(&job, 1, 1);
        devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
        next_back(&b);
        assert_failed(batch, ATTN_DEVICE_LOST);
        forget(batch);
        close_bench(&b);
    }
}

static void test_work_in_several_launches_comes_back_whole(void **state)
{
    (void)state;
    struct bench b;
    /* Each batch has four launches, so launch 8, which fails, is the last launch of the second batch. */
    open_bench(&b, 1, "launch.err=1@8");
    for (int round = 0; round < 2; round++) {
        struct batch *batch = four_launches(&b);
        devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
        next_back(&b);
        if (round == 0) assert_ran(batch);
        else assert_failed(batch, ATTN_DEVICE);
        forget(batch);
    }
    close_bench(&b);
}

/* While another caller has a batch on a GPU, the caller `busy` may run only one of its two batches there. */
static void test_a_flow_with_several_streams_has_one_group_on_a_gpu_beside_another_flow(void **state)
{
    (void)state;
    struct bench b;
    struct gate busy_gate, other_gate;
    char script[256];
    struct flow *busy = flow_new("busy"), *other = flow_new("other");
    struct batch *batches[3];
    begin(&b);
    gate_shut(&busy_gate);
    gate_shut(&other_gate);
    /* The fake device has a gate before the first launch of the batch of `other`, and one before the first launch of
     * the first batch of `busy`. A launch waits until the test opens its gate. Each batch has four launches. */
    snprintf(script, sizeof script, "hold=%s@1,hold=%s@2", other_gate.path, busy_gate.path);
    open_devices(&b, 1, script);
    struct device *device = devices_pick(b.server.devices, 0);
    for (int i = 0; i < 3; i++) {
        batches[i] = four_launches(&b);
        batches[i]->flow = i == 0 ? other : busy;
        batches[i]->seconds = 1;
        const int64_t used = state_of(&b, 0).info.memory_used;
        devices_submit(b.server.devices, batches[i], device);
        WAIT_UNTIL(state_of(&b, 0).info.memory_used > used);
    }
    nanosleep(&(struct timespec){ 0, 50000000 }, NULL);
    uv_run(&b.uv, UV_RUN_NOWAIT);
    assert_int_equal(b.back_count, 0);
    gate_open(&other_gate);
    assert_ptr_equal(next_back(&b), batches[0]);
    assert_ptr_equal(next_back(&b), batches[2]);
    gate_open(&busy_gate);
    assert_ptr_equal(next_back(&b), batches[1]);
    for (int i = 0; i < 3; i++) {
        assert_ran(batches[i]);
        forget(batches[i]);
    }
    close_bench(&b);
    flow_release(busy);
    flow_release(other);
}

/* Even alone on a GPU, a caller does not queue all its batches there, because the next caller would have to wait for
 * them. */
static void test_long_batches_of_one_flow_take_turns_on_a_gpu(void **state)
{
    (void)state;
    struct bench b;
    struct gate first, second;
    char script[256];
    struct flow *busy = flow_new("busy");
    struct batch *batches[3];
    begin(&b);
    gate_shut(&first);
    gate_shut(&second);
    snprintf(script, sizeof script, "hold=%s@1,hold=%s@2", first.path, second.path);
    open_devices(&b, 1, script);
    for (int i = 0; i < 3; i++) {
        batches[i] = four_launches(&b);
        batches[i]->flow = busy;
        batches[i]->seconds = 1;
        const int64_t used = state_of(&b, 0).info.memory_used;
        devices_submit(b.server.devices, batches[i], devices_pick(b.server.devices, 0));
        WAIT_UNTIL(state_of(&b, 0).info.memory_used > used);
    }
    /* No batch may finish in this time. */
    nanosleep(&(struct timespec){ 0, 50000000 }, NULL);
    uv_run(&b.uv, UV_RUN_NOWAIT);
    assert_int_equal(b.back_count, 0);
    gate_open(&second);
    assert_ptr_equal(next_back(&b), batches[1]);
    gate_open(&first);
    for (int i = 0; i < 2; i++) (void)next_back(&b);
    for (int i = 0; i < 3; i++) {
        assert_ran(batches[i]);
        forget(batches[i]);
    }
    close_bench(&b);
    flow_release(busy);
}

static void test_stopping_waits_for_what_runs_and_says_when_it_does_not_end(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    begin(&b);
    open_gated(&b, 1, "hold=GATE", &gate);
    struct batch *batch = submit_one(&b, devices_pick(b.server.devices, 0), 1);
    assert_false(devices_stop(b.server.devices, 1));
    uv_run(&b.uv, UV_RUN_NOWAIT);
    assert_int_equal(b.back_count, 0);
    gate_open(&gate);
    assert_true(devices_stop(b.server.devices, PATIENCE_MS));
    uv_run(&b.uv, UV_RUN_NOWAIT);
    assert_int_equal(b.back_count, 1);
    assert_ptr_equal(next_back(&b), batch);
    assert_ran(batch);
    forget(batch);
    close_bench(&b);
}

/* ---- Tests of the CPU's streams ---------------------------------------------------------------------------------- */

/* While a CPU device computes for minutes, other batches must run, and the long one must end when it is cancelled. */
static void test_what_takes_the_cpu_long_does_not_keep_others_waiting(void **state)
{
    (void)state;
    struct bench b;
    begin(&b);
    b.config.devices = "cpu";
    b.config.cpu_threads = 2;
    open_devices(&b, 1, "");
    struct device *cpu = devices_pick(b.server.devices, 0);
    struct job *job = ready_forward(&b, 100000);
    struct batch *longer = batch_of(&job, 1, job->flops);
    devices_submit(b.server.devices, longer, cpu);
    assert_false(can_wait(cpu));
    struct batch *shorter = submit_one(&b, devices_pick(b.server.devices, 0), 1);
    struct batch *next = submit_one(&b, devices_pick(b.server.devices, 0), 1);
    assert_false(has_room(&b, NULL));
    assert_ptr_equal(next_back(&b), shorter);
    assert_ptr_equal(next_back(&b), next);
    assert_ran(shorter);
    assert_ran(next);
    attn_cancel(&longer->cancel);
    assert_ptr_equal(next_back(&b), longer);
    assert_failed(longer, ATTN_CANCELLED);
    forget(shorter);
    forget(next);
    forget(longer);
    close_bench(&b);
}

/* Gives the device a batch of one job with `rows` rows, which belongs to the caller of `flow`. */
static struct batch *submit_for(struct bench *b, struct flow *flow, int rows)
{
    struct job *job = ready_forward(b, rows);
    struct batch *batch = batch_of(&job, 1, job->flops);
    job->flow = flow_hold(flow);
    batch->flow = flow;
    devices_submit(b->server.devices, batch, devices_pick(b->server.devices, 0));
    return batch;
}

/* Batches of several callers run on a device. A short batch of a further caller may join them once the oldest batch has
 * run for much longer than the short batch takes. */
static void test_equal_work_of_several_flows_makes_no_guests_and_short_work_does(void **state)
{
    (void)state;
    struct bench b;
    struct flow *flows[4];
    struct batch *longer[3];
    begin(&b);
    b.config.devices = "cpu";
    b.config.cpu_threads = 2;
    open_devices(&b, 1, "");
    for (int i = 0; i < 4; i++) flows[i] = flow_new("flow");
    for (int i = 0; i < 3; i++) longer[i] = submit_for(&b, flows[i], 100000);
    const struct device *cpu = devices_pick(b.server.devices, 0);
    const int64_t oldest_ns = longer[0]->left_ns, later_ns = longer[2]->left_ns + DEVICE_GUEST_AFTER_NS;
    const struct job equal = { .flow = flows[3], .seconds = 1000 }, shorter = { .flow = flows[3], .seconds = 1e-3 };
    int64_t wait_ns = INT64_MAX;
    assert_true(device_has_room(cpu, &shorter, later_ns, &wait_ns));
    assert_false(device_has_room(cpu, &equal, later_ns, &wait_ns));
    /* With four callers, a batch that needs 1000 s may start when the oldest batch has run for this many ns. */
    const int64_t needs_ns = DEVICE_GUEST_FACTOR * 4 * INT64_C(1000000000000);
    assert_int_equal(wait_ns, oldest_ns + needs_ns - later_ns);
    assert_true(device_has_room(cpu, &equal, oldest_ns + needs_ns, &wait_ns));
    for (int i = 0; i < 3; i++) attn_cancel(&longer[i]->cancel);
    for (int i = 0; i < 3; i++) forget(next_back(&b));
    close_bench(&b);
    for (int i = 0; i < 4; i++) flow_release(flows[i]);
}

/* One caller fills both streams of a device with long batches, and has a third batch waiting. A batch of another
 * caller must be able to start nevertheless. */
static void test_a_flow_that_has_none_finds_room_beside_one_that_has_all_streams(void **state)
{
    (void)state;
    struct bench b;
    struct flow *busy = flow_new("busy"), *other = flow_new("other");
    struct batch *longer[3];
    begin(&b);
    b.config.devices = "cpu";
    b.config.cpu_threads = 2;
    open_devices(&b, 1, "");
    for (int i = 0; i < 3; i++) {
        assert_true(has_room(&b, busy));
        longer[i] = submit_for(&b, busy, 100000);
    }
    assert_false(has_room(&b, busy));
    int64_t wait_ns = INT64_MAX;
    const struct device *cpu = devices_pick(b.server.devices, 0);
    const struct job of_other = { .flow = other, .seconds = 1e6 }, of_busy = { .flow = busy };
    assert_false(device_has_room(cpu, &of_other, longer[2]->left_ns, &wait_ns));
    assert_int_equal(wait_ns, DEVICE_GUEST_AFTER_NS);
    assert_true(device_has_room(cpu, &of_other, longer[2]->left_ns + wait_ns, &wait_ns));
    assert_false(device_has_room(cpu, &of_busy, longer[2]->left_ns + wait_ns, &wait_ns));
    struct batch *shorter = submit_for(&b, other, 5);
    assert_ptr_equal(next_back(&b), shorter);
    assert_ran(shorter);
    assert_true(shorter->charged_ns > 0);
    for (int i = 0; i < 3; i++) attn_cancel(&longer[i]->cancel);
    for (int i = 0; i < 3; i++) assert_failed(next_back(&b), ATTN_CANCELLED);
    for (int i = 0; i < 3; i++) forget(longer[i]);
    forget(shorter);
    close_bench(&b);
    flow_release(busy);
    flow_release(other);
}

static void test_a_short_batch_of_the_cpu_is_worth_waiting_for(void **state)
{
    (void)state;
    struct bench b;
    begin(&b);
    b.config.devices = "cpu";
    open_devices(&b, 1, "");
    struct device *cpu = devices_pick(b.server.devices, 0);
    assert_false(can_wait(cpu));
    struct batch *batch = submit_one(&b, cpu, QUEUE_BATCH_FLOPS);
    assert_true(can_wait(cpu));
    next_back(&b);
    assert_false(can_wait(cpu));
    forget(batch);
    close_bench(&b);
}

/* ---- Tests of small problems that HTTP threads compute ----------------------------------------------------------- */

static void test_small_problems_of_the_cpu_are_computed_by_the_thread_that_has_them(void **state)
{
    (void)state;
    static const struct {
        int rows;
        const char *extra;
        enum inline_outcome here;
    } cases[] = {
        { 5, "", INLINE_DONE },
        { 5, "\"verify\": 1", INLINE_NOT },
        { 5, "\"save\": true", INLINE_NOT },
        /* 2 * 64 * 2 * 1500^2 operations (D is padded to 64), more than an HTTP thread may compute itself */
        { 1500, "", INLINE_NOT },
        { 5000, "\"encoding\": \"array\"", INLINE_NOT },
    };
    struct bench b;
    double seconds;
    begin(&b);
    b.config.devices = "cpu";
    open_devices(&b, 1, "");
    assert_true(inline_near(b.server.devices));
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct job *job = ready(&b, ATTN_OP_FORWARD, forward_body(cases[c].rows, 4, cases[c].extra));
        assert_int_equal(inline_run(b.server.devices, job), cases[c].here);
        assert_int_equal(job->part.ran, cases[c].here == INLINE_DONE);
        if (cases[c].here == INLINE_DONE) assert_computed(job, 0);
        contexts_finish_job(job, false);
        job_release(job);
    }
    assert_int_equal(inline_learn(b.server.devices, &seconds), 1);
    assert_int_equal(inline_learn(b.server.devices, &seconds), 0);
    close_bench(&b);
}

static void test_small_problems_wait_for_a_gpu_that_does_not_read_staging_memory(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b, 1, "");
    struct job *job = ready_forward(&b, 5);
    assert_false(inline_near(b.server.devices));
    assert_int_equal(inline_run(b.server.devices, job), INLINE_NOT);
    assert_null(job->part.handed_over);
    job_release(job);
    close_bench(&b);
}

/* Opens devices that read staging memory (the memory of request bodies) in place. */
static void open_readers(struct bench *b, int count, const char *script, struct gate *gate)
{
    begin(b);
    /* With two HTTP threads, a device has two streams on which these threads run small problems. */
    b->config.http_threads = 2;
    setenv("ATTN_FAKE_READS_STAGING", "1", 1);
    if (gate) open_gated(b, count, script, gate);
    else open_devices(b, count, script);
    unsetenv("ATTN_FAKE_READS_STAGING");
}

static void test_a_gpu_reads_small_problems_where_they_are(void **state)
{
    (void)state;
    struct bench b;
    open_readers(&b, 1, "copy.err=700", NULL);
    assert_false(inline_near(b.server.devices));
    struct job *job = ready_forward(&b, 5), *large = ready_forward(&b, 5000);
    assert_int_equal(inline_run(b.server.devices, job), INLINE_DONE);
    assert_computed(job, 0);
    assert_int_equal(inline_run(b.server.devices, large), INLINE_NOT);
    assert_null(large->part.handed_over);
    job_release(job);
    job_release(large);
    close_bench(&b);
}

/* Returns a forward whose numbers differ from those of all other forwards in the test. */
static struct job *own_forward(struct bench *b, int rows, const char *extra, int number)
{
    struct job *job = ready(b, ATTN_OP_FORWARD, forward_body(rows, 4, extra));
    const attn_problem *p = &job->call->items[0].problem;
    for (int i = 0; i < rows * 4; i++)
        ((float *)p->q.data)[i] += (float)number, ((float *)p->v.data)[i] *= 2.0f * (float)number;
    return job;
}

static void test_equal_small_problems_leave_as_one(void **state)
{
    (void)state;
    struct bench b;
    struct job *jobs[9];
    /* These devices fail at every copy, but they read request bodies in place. */
    open_readers(&b, 1, "copy.err=700", NULL);
    for (int n = 0; n < 9; n++) jobs[n] = own_forward(&b, n % 3 ? 12 : 8, n % 3 == 1 ? "\"causal\": true" : "", n);
    struct batch *batch = batch_of(jobs, 9, 1);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    assert_ptr_equal(next_back(&b), batch);
    assert_ran(batch);
    for (int n = 0; n < 9; n++) assert_int_equal(strncmp(jobs[n]->results[0].backend, "fake:0 ", 7), 0);
    forget(batch);
    close_bench(&b);
}

/* Problems are not joined into one larger problem if they differ in an option, if they share a body, or if the size
 * of lse is no multiple of 16 bytes. */
static void test_problems_that_differ_are_computed_side_by_side(void **state)
{
    (void)state;
    struct bench b;
    open_readers(&b, 1, "", NULL);
    char *two[] = { forward_body(5, 4, ""), forward_body(5, 4, "") };
    struct job *jobs[] = { own_forward(&b, 8, "", 1),
                           own_forward(&b, 8, "\"scale\": 0.25", 2),
                           own_forward(&b, 8, "\"softcap\": 3", 3),
                           own_forward(&b, 8, "\"dropout_p\": 0.5, \"seed\": 1", 4),
                           own_forward(&b, 8, "\"dropout_p\": 0.5, \"seed\": 1", 5),
                           own_forward(&b, 5, "", 6),
                           own_forward(&b, 5, "", 7),
                           ready(&b, ATTN_OP_FORWARD, envelope_of(two, 2)),
                           own_forward(&b, 5, "", 8) };
    struct batch *batch = batch_of(jobs, 9, 1);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    assert_ptr_equal(next_back(&b), batch);
    assert_ran(batch);
    forget(batch);
    close_bench(&b);
}

static void test_problems_that_left_as_one_fail_together(void **state)
{
    (void)state;
    struct bench b;
    struct job *jobs[3];
    open_readers(&b, 1, "launch.err=2@1", NULL); /* CUDA's error 2: out of memory */
    for (int n = 0; n < 3; n++) jobs[n] = own_forward(&b, 4, "", n);
    struct batch *batch = batch_of(jobs, 3, 1);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    next_back(&b);
    assert_failed(batch, ATTN_NO_MEMORY);
    forget(batch);
    for (int n = 0; n < 3; n++) jobs[n] = own_forward(&b, 4, "", n);
    batch = batch_of(jobs, 3, 1);
    devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 0));
    next_back(&b);
    assert_ran(batch);
    forget(batch);
    close_bench(&b);
}

static void test_no_thread_waits_behind_a_batch(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    open_readers(&b, 1, "hold=GATE@1", &gate);
    struct batch *batch = submit_one(&b, devices_pick(b.server.devices, 0), 1);
    struct job *job = ready_forward(&b, 5);
    assert_int_equal(inline_run(b.server.devices, job), INLINE_NOT);
    assert_null(job->part.handed_over);
    gate_open(&gate);
    assert_ptr_equal(next_back(&b), batch);
    forget(batch);
    assert_int_equal(inline_run(b.server.devices, job), INLINE_DONE);
    job_release(job);
    close_bench(&b);
}

static void test_what_takes_longer_becomes_a_batch_of_its_own(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    open_readers(&b, 1, "hold=GATE@1", &gate);
    struct job *late = ready_forward(&b, 5), *other = ready_forward(&b, 6);
    assert_int_equal(inline_run(b.server.devices, late), INLINE_LATE);
    assert_non_null(late->part.handed_over);
    assert_false(late->part.ran);
    assert_int_equal(inline_run(b.server.devices, other), INLINE_DONE);
    assert_computed(other, 0);
    struct batch *batch = batch_of(&late, 1, 1);
    devices_submit_late(b.server.devices, batch);
    assert_int_equal(state_of(&b, 0).running_requests, 1);
    gate_open(&gate);
    assert_ptr_equal(next_back(&b), batch);
    assert_ran(batch);
    assert_true(batch->compute_us > 0 && batch->copy_in_us == 0 && batch->copy_out_us == 0);
    forget(batch);
    for (int n = 0; n < 8; n++) assert_int_equal(inline_run(b.server.devices, other), INLINE_DONE);
    job_release(other);
    close_bench(&b);
}

static void test_what_is_late_and_never_ends_is_overdue(void **state)
{
    (void)state;
    struct bench b;
    begin(&b);
    b.config.watchdog_ms = 1;
    setenv("ATTN_FAKE_READS_STAGING", "1", 1);
    struct gate gate;
    open_gated(&b, 1, "hold=GATE@1", &gate);
    unsetenv("ATTN_FAKE_READS_STAGING");
    struct job *late = ready_forward(&b, 5);
    assert_int_equal(inline_run(b.server.devices, late), INLINE_LATE);
    struct batch *batch = batch_of(&late, 1, 1);
    devices_submit_late(b.server.devices, batch);
    struct device *overdue;
    bool is_overdue;
    while ((overdue = devices_to_disable(b.server.devices, &is_overdue)) == NULL)
        nanosleep(&(struct timespec){ 0, 500000 }, NULL);
    assert_true(is_overdue && device_disable(overdue));
    struct job *job = ready_forward(&b, 5);
    assert_int_equal(inline_run(b.server.devices, job), INLINE_NOT);
    assert_null(job->part.handed_over);
    job_release(job);
    gate_open(&gate);
    assert_ptr_equal(next_back(&b), batch);
    forget(batch);
    close_bench(&b);
}

static void *open_soon(void *gate)
{
    nanosleep(&(struct timespec){ 0, 30000000 }, NULL);
    gate_open(gate);
    return NULL;
}

static void test_who_cannot_hand_a_late_job_over_waits_for_its_end(void **state)
{
    (void)state;
    struct bench b;
    struct gate gate;
    pthread_t opens;
    open_readers(&b, 1, "hold=GATE@1", &gate);
    struct job *late = ready_forward(&b, 5);
    assert_int_equal(inline_run(b.server.devices, late), INLINE_LATE);
    assert_non_null(late->part.handed_over);
    assert_int_equal(pthread_create(&opens, NULL, open_soon, &gate), 0);
    inline_settle(late);
    assert_int_not_equal(access(gate.path, F_OK), 0);
    assert_null(late->part.handed_over);
    assert_computed(late, 0);
    pthread_join(opens, NULL);
    inline_settle(late);
    job_release(late);
    close_bench(&b);
}

static void test_the_loop_hears_of_a_gpu_that_a_small_problem_lost(void **state)
{
    (void)state;
    struct bench b;
    open_readers(&b, 2, "0:sync.err=700@1", NULL);
    struct job *job = ready_forward(&b, 5), *jobs[4] = { 0 };
    int lost = -1;
    for (int n = 0; n < 4 && lost < 0; n++) {
        jobs[n] = ready_forward(&b, 5);
        const enum inline_outcome here = inline_run(b.server.devices, jobs[n]);
        assert_true(here == INLINE_DONE || here == INLINE_LOST);
        if (here == INLINE_LOST) lost = n;
    }
    /* This thread's core decides which device gets a job, so possibly no job reached the device that fails. */
    if (lost >= 0) {
        assert_int_equal(jobs[lost]->part.device, 0);
        struct job *held = job_hold(jobs[lost]);
        struct batch *batch = batch_of(&held, 1, 1);
        devices_submit(b.server.devices, batch, devices_pick(b.server.devices, 2));
        assert_ptr_equal(next_back(&b), batch);
        assert_failed(batch, ATTN_DEVICE_LOST);
        forget(batch);
    }
    for (int n = 0; n < 4; n++) job_release(jobs[n]);
    job_release(job);
    close_bench(&b);
}

/* ---- Tests of jobs that are cut into parts for several devices --------------------------------------------------- */

static void run_part(struct bench *b, struct job *job, int device)
{
    struct batch *batch = calloc(1, sizeof *batch + sizeof batch->parts[0]);
    batch->count = batch->waiting = 1;
    batch->flops = 1;
    batch->parts[0] = job_part_leaves(job_part_for(job, device), batch);
    assert_int_equal(batch->parts[0]->device, device);
    devices_submit(b->server.devices, batch, devices_pick(b->server.devices, ~(UINT64_C(1) << device)));
    assert_ptr_equal(next_back(b), batch);
    batch->parts[0]->batch = NULL;
    job->parts_out--;
    job_release(job);
    free(batch);
}

static void test_a_job_is_over_when_all_its_parts_are(void **state)
{
    (void)state;
    static const struct {
        const char *script;
        const char *error;
    } cases[] = {
        { "", NULL },
        { "0:launch.err=1@1", "launch" },
        { "1:copy.err=1@1", "copy" },
        /* A job gets the error of its first failed part in the list, even if another part failed earlier. */
        { "0:launch.err=1@1,1:copy.err=1@1", "launch" },
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct bench b;
        open_bench(&b, 2, cases[c].script);
        struct job *job = ready_forward(&b, 5);
        struct job_part second = { .job = job, .device = 1 };
        assert_ptr_equal(job_part_for(job, 1), &job->part);
        job->part.device = 0;
        assert_null(job_part_for(job, 1));
        job->part.next = &second;
        assert_true(job_needs_device(job, 0) && job_needs_device(job, 1) && !job_needs_device(job, 2));
        run_part(&b, job, 1);
        assert_true(!job_needs_device(job, 1) && job_part_for(job, 1) == NULL);
        assert_false(job_ran(job));
        run_part(&b, job, 0);
        assert_int_equal(job_ran(job), cases[c].error == NULL);
        if (cases[c].error) assert_non_null(strstr(job_error(job)->text, cases[c].error));
        else assert_computed(job, 0);
        job->part.next = NULL;
        contexts_finish_job(job, false);
        job_release(job);
        close_bench(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers_come_back_right_through_memory_of_the_device),
        cmocka_unit_test(test_what_the_kernels_launch_takes_is_not_their_own_time),
        cmocka_unit_test(test_a_backward_of_a_saved_forward_finds_its_tensors_on_the_device),
        cmocka_unit_test(test_memory_of_the_device_goes_back_after_each_batch),
        cmocka_unit_test(test_the_device_with_the_least_work_is_picked_until_all_are_full),
        cmocka_unit_test(test_devices_that_are_not_there_are_refused_by_name),
        cmocka_unit_test(test_an_error_that_passes_fails_one_batch),
        cmocka_unit_test(test_a_sticky_error_loses_the_device_and_every_batch_that_it_has),
        cmocka_unit_test(test_a_batch_without_memory_waits_for_those_beside_it_and_is_tried_again),
        cmocka_unit_test(test_a_batch_that_has_no_memory_alone_fails),
        cmocka_unit_test(test_a_device_that_is_not_done_in_its_time_is_overdue),
        cmocka_unit_test(test_a_device_that_has_time_left_is_not_overdue),
        cmocka_unit_test(test_a_batch_that_nobody_waits_for_ends_between_two_launches),
        cmocka_unit_test(test_a_device_compares_what_it_computed_with_its_truth),
        cmocka_unit_test(test_an_error_in_the_middle_of_the_truth_fails_its_batch),
        cmocka_unit_test(test_a_truth_that_nobody_waits_for_ends_between_two_steps),
        cmocka_unit_test(test_a_device_without_a_truth_only_computes),
        cmocka_unit_test(test_a_truth_needs_memory_of_its_device),
        cmocka_unit_test(test_a_device_that_fails_for_good_after_an_error_that_passes_is_lost),
        cmocka_unit_test(test_work_in_several_launches_comes_back_whole),
        cmocka_unit_test(test_a_flow_with_several_streams_has_one_group_on_a_gpu_beside_another_flow),
        cmocka_unit_test(test_long_batches_of_one_flow_take_turns_on_a_gpu),
        cmocka_unit_test(test_stopping_waits_for_what_runs_and_says_when_it_does_not_end),
        cmocka_unit_test(test_what_takes_the_cpu_long_does_not_keep_others_waiting),
        cmocka_unit_test(test_equal_work_of_several_flows_makes_no_guests_and_short_work_does),
        cmocka_unit_test(test_a_flow_that_has_none_finds_room_beside_one_that_has_all_streams),
        cmocka_unit_test(test_a_short_batch_of_the_cpu_is_worth_waiting_for),
        cmocka_unit_test(test_small_problems_of_the_cpu_are_computed_by_the_thread_that_has_them),
        cmocka_unit_test(test_small_problems_wait_for_a_gpu_that_does_not_read_staging_memory),
        cmocka_unit_test(test_a_gpu_reads_small_problems_where_they_are),
        cmocka_unit_test(test_equal_small_problems_leave_as_one),
        cmocka_unit_test(test_problems_that_differ_are_computed_side_by_side),
        cmocka_unit_test(test_problems_that_left_as_one_fail_together),
        cmocka_unit_test(test_no_thread_waits_behind_a_batch),
        cmocka_unit_test(test_what_takes_longer_becomes_a_batch_of_its_own),
        cmocka_unit_test(test_what_is_late_and_never_ends_is_overdue),
        cmocka_unit_test(test_who_cannot_hand_a_late_job_over_waits_for_its_end),
        cmocka_unit_test(test_the_loop_hears_of_a_gpu_that_a_small_problem_lost),
        cmocka_unit_test(test_a_job_is_over_when_all_its_parts_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
