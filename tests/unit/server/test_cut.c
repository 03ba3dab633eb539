/* test_cut.c: tests of problems that are cut over several devices of the fake backend, by heads, batch rows or queries.
 * Results must have the same bits as on one device, and nothing may be copied twice. The tests take the place of the
 * server's loop. */
#include "tests/unit/server/jobs.h"
#include "tests/unit/testing.h"

#include <math.h>

#include "kernels/dtype.h"
#include "server/device/devices.h"
#include "server/device/internal.h"
#include "server/work/contexts.h"

#define HEADS(h, hk)   .H = h, .Hk = hk
#define SIZES(q, k, d) .Sq = q, .Sk = k, .D = d, .Dv = d

enum { BATCH_KIND = 7, MOST_DEVICES = 4 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { PROBLEMS = 100 };
#else
enum { PROBLEMS = 500 };
#endif

struct site {
    struct config config;
    struct server server;
    uv_loop_t uv;
    struct mailbox box;
    int back; /* number of batches that devices have finished and the test has not collected yet */
    struct batch *batches[MOST_DEVICES];
};

static void on_message(void *context, struct message *message)
{
    struct site *s = context;
    assert_true(s->back < MOST_DEVICES);
    s->batches[s->back++] = (struct batch *)message;
}

/* Opens devices with `bytes` bytes of memory each; 0 stands for the fake backend's default. */
static void open_small_site(struct site *s, int devices, const char *script, int64_t bytes)
{
    char number[8];
    attn_error err = { 0 };
    *s = (struct site){ 0 };
    config_default(&s->config);
    s->config.device_bytes = bytes;
    assert_int_equal(uv_loop_init(&s->uv), 0);
    assert_int_equal(mailbox_open(&s->box, &s->uv, on_message, s), 0);
    snprintf(number, sizeof number, "%d", devices);
    setenv("ATTN_FAKE_DEVICES", number, 1);
    setenv("ATTN_FAKE_SCRIPT", script, 1);
    server_open(&s->server, &s->config);
    if (devices_open(&s->config, &s->box, BATCH_KIND, &s->server.devices, &err) != ATTN_OK) fail_msg("%s", err.text);
}

static void open_site(struct site *s, int devices, const char *script)
{
    open_small_site(s, devices, script, 0);
}

static void close_site(struct site *s)
{
    assert_true(devices_stop(s->server.devices, PATIENCE_MS));
    mailbox_close(&s->box);
    while (uv_run(&s->uv, UV_RUN_DEFAULT)) continue;
    assert_int_equal(uv_loop_close(&s->uv), 0);
    devices_close(s->server.devices);
    server_close(&s->server);
}

/* Returns a job (one request's problems) with the problem p. Its expected time is one second, because the server does
 * not cut shorter jobs. */
static struct job *job_with(struct site *s, const attn_problem *p)
{
    struct job *job = job_of(&s->server, ATTN_OP_FORWARD, forward_body(5, 4, ""));
    job->call->items[0].problem = *p;
    job->runnable = 1;
    job->seconds = 1;
    job->flops = attn_flops(p);
    return job;
}

static int cut(struct site *s, struct job *job, struct device *over[CONFIG_MAX_DEVICES])
{
    return cut_over_devices(s->server.devices, devices_pick(s->server.devices, 0), job, clock_ns(), over);
}

/* Gives a device the next part of a job that is cut over several devices. */
static struct job_part *send_part(struct site *s, struct job *job, struct device *device)
{
    struct batch *batch = calloc(1, sizeof *batch + sizeof batch->parts[0]);
    batch->count = batch->waiting = 1;
    batch->parts[0] = job_part_leaves(job_part_for(job, device_number(device)), batch);
    batch->flops = job->flops * batch->parts[0]->range.share;
    devices_submit(s->server.devices, batch, device);
    return batch->parts[0];
}

/* Handles the devices' messages. Returns the number of finished batches that the test has not collected yet. */
static int look(struct site *s)
{
    uv_run(&s->uv, UV_RUN_NOWAIT);
    return s->back;
}

/* Waits until a device finishes a batch, which consists of one part of a job. Returns the part. */
static struct job_part *part_back(struct site *s)
{
    WAIT_UNTIL(look(s) > 0);
    struct batch *const batch = s->batches[0];
    struct job_part *const part = batch->parts[0];
    memmove(s->batches, s->batches + 1, (size_t)--s->back * sizeof s->batches[0]);
    devices_collect(s->server.devices, batch);
    part->batch = NULL;
    part->job->parts_out--;
    job_release(part->job);
    free(batch);
    return part;
}

/* Waits until a device finishes a part of a job. Fails unless the part is `part` and has run without an error. */
static void assert_back(struct site *s, const struct job_part *part)
{
    assert_ptr_equal(part_back(s), part);
    if (!part->ran) fail_msg("%s", part->error.text);
}

static void run_parts(struct site *s, struct job *job, struct device *const *over, int parts)
{
    for (int n = 0; n < parts; n++) send_part(s, job, over[n]);
    assert_null(job_part_for(job, 0));
    for (int n = 0; n < parts; n++) {
        const struct job_part *const part = part_back(s);
        if (!part->ran) fail_msg("%s", part->error.text);
    }
}

/* Lets the devices add up the partial gradients of the job's parts. Each part has computed gradients that are sums
 * over its own queries. */
static void add_up(struct site *s, struct job *job, int parts)
{
    struct device *over[CONFIG_MAX_DEVICES];
    struct job_part *part = &job->part;
    if (!sums_begin(job)) return;
    for (int n = 0; n < parts; n++, part = part->next) over[n] = part->sums_on;
    run_parts(s, job, over, parts);
    sums_free(job);
    assert_false(sums_begin(job));
}

static int64_t bytes_in_use(struct site *s)
{
    int64_t bytes = 0;
    for (int n = 0; n < devices_count(s->server.devices); n++) {
        attn_device_info info;
        attn_device_describe(s->server.devices->device[n]->handle, &info);
        bytes += info.memory_used;
    }
    return bytes;
}

/* Returns the problem with a part of its outputs: those that are sums over queries if `sums` is true, and otherwise all
 * other outputs. */
static struct fixture with_outputs(const struct fixture *f, bool sums)
{
    struct fixture some = *f;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (attn_writes(&f->p, (attn_tensor_id)id) && attn_is_sum_of_queries(&f->p, (attn_tensor_id)id) != sums)
            some.p.tensor[id].rank = 0;
    return some;
}

/* Cuts the problem into ranges of queries, and runs each on a device. `parts` becomes a copy of the fixture with the
 * results. Returns the number of ranges; 1: nothing was cut, and nothing ran. */
static int run_by_queries(struct site *s, const struct fixture *whole, struct fixture *parts)
{
    struct device *over[CONFIG_MAX_DEVICES];
    fixture_copy(parts, whole);
    struct job *const job = job_with(s, &parts->p);
    cut_prepare(s->server.devices, job);
    const int count = cut(s, job, over);
    if (count > 1) {
        assert_int_equal(job->part.way, JOB_BY_QUERIES);
        run_parts(s, job, over, count);
        add_up(s, job, count);
    }
    job_release(job);
    return count;
}

static struct spec spec_of(uint64_t seed)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8E4M3 };
    struct rng r = { seed * UINT64_C(0x9e3779b97f4a7c15) + 7 };
    struct spec s = SPEC(.data_seed = seed);
    s.op = rng_chance(&r, 0.5) ? ATTN_OP_BACKWARD : rng_chance(&r, 0.7) ? ATTN_OP_FORWARD : ATTN_OP_OBSERVE;
    s.dtype = dtypes[rng_between(&r, 0, s.op == ATTN_OP_BACKWARD ? 2 : 3)];
    s.out_dtype = s.dtype == ATTN_F8E4M3 ? ATTN_BF16 : s.dtype;
    s.Hk = rng_between(&r, 2, 6);
    s.H = s.Hk * rng_between(&r, 1, 3);
    s.B = rng_between(&r, 1, 3);
    s.D = rng_chance(&r, 0.5) ? 8 * rng_between(&r, 1, 8) : rng_between(&r, 1, 40);
    s.Dv = rng_chance(&r, 0.7) ? s.D : rng_between(&r, 1, 40);
    s.Sq = rng_chance(&r, 0.3) ? rng_between(&r, 1, 3) : rng_between(&r, 1, 90);
    s.Sk = rng_between(&r, 1, rng_chance(&r, 0.1) ? 1500 : 120);
    s.causal = rng_chance(&r, 0.4);
    if (rng_chance(&r, 0.2)) s.alignment = ATTN_TOP_LEFT;
    if (rng_chance(&r, 0.2)) s.window_left = rng_between(&r, 0, 60);
    if (rng_chance(&r, 0.2)) s.softcap = 5;
    if (rng_chance(&r, 0.3)) s.dropout_p = 0.9 * rng_uniform(&r), s.seed = rng_next(&r);
    if (rng_chance(&r, 0.3)) s.alibi = (int)rng_between(&r, 1, 2);
    if (rng_chance(&r, 0.2)) s.sinks = 1;
    if (s.op == ATTN_OP_BACKWARD) s.dlse = rng_chance(&r, 0.3), s.give_forward = rng_chance(&r, 0.5);
    if (s.op == ATTN_OP_BACKWARD && rng_chance(&r, 0.3)) s.float_grads = 7;
    if (s.dtype == ATTN_F8E4M3) s.fp8_scales = true, s.scale_axes = (int)rng_between(&r, 0, 4);
    if (rng_chance(&r, 0.25)) {
        s.sequences = (int)rng_between(&r, 1, 5);
        for (int n = 0; n < s.sequences; n++)
            s.q_lengths[n] = (int)rng_between(&r, 0, 50), s.k_lengths[n] = (int)rng_between(&r, 0, 60);
        return s;
    }
    if (rng_chance(&r, 0.4)) s.layout = ATTN_BHSD;
    if (rng_chance(&r, 0.3)) s.bias = (int)rng_between(&r, 1, 8), s.plain_grads = rng_chance(&r, 0.5);
    if (rng_chance(&r, 0.3)) s.keep_mask = (int)rng_between(&r, 1, 8), s.keep = 0.8;
    if (rng_chance(&r, 0.2)) s.seqlens_k = true;
    if (rng_chance(&r, 0.2)) s.seqlens_q = true;
    if (rng_chance(&r, 0.2)) s.mask_bounds = s.causal ? 1 : 2, s.mask_heads = (int)rng_between(&r, 0, 2);
    if (s.op == ATTN_OP_OBSERVE) s.given_lse = rng_chance(&r, 0.3);
    if (s.op == ATTN_OP_FORWARD && rng_chance(&r, 0.1)) s.page_size = 16, s.Sk = 16 * rng_between(&r, 1, 6);
    if (s.page_size) s.seqlens_k = true, s.layout = ATTN_BSHD;
    return s;
}

/* Runs the problem over all devices of the test. Returns the number of parts; 1: the problem was not cut. */
static int run_over(struct site *s, const struct fixture *whole, int *unused)
{
    struct device *over[CONFIG_MAX_DEVICES];
    struct fixture parts;
    char why[400];
    fixture_copy(&parts, whole);
    struct job *const job = job_with(s, &parts.p);
    const int count = cut(s, job, over);
    if (count > 1) {
        run_parts(s, job, over, count);
        if (!outputs_equal(whole, &parts, why, sizeof why)) {
            spec_print(stderr, &whole->spec);
            fail_msg("in %d parts: %s", count, why);
        }
    } else ++*unused;
    job_release(job);
    fixture_clear(&parts);
    return count;
}

static void test_problems_have_the_same_bits_over_any_number_of_devices(void **state)
{
    static struct site sites[MOST_DEVICES + 1];
    int parts[MOST_DEVICES + 1] = { 0 }, whole_ones = 0, tried = 0;
    struct bench cpu;
    (void)state;
    bench_open(&cpu, "cpu", 1);
    for (int devices = 2; devices <= MOST_DEVICES; devices++) open_site(&sites[devices], devices, "");
    for (uint64_t seed = 0; tried < PROBLEMS; seed++) {
        const struct spec s = spec_of(seed);
        struct fixture whole;
        fixture_make(&whole, &s);
        if (!attn_is_empty(&whole.p)) {
            fixture_run(&cpu, &whole);
            for (int devices = 2; devices <= MOST_DEVICES; devices++)
                parts[run_over(&sites[devices], &whole, &whole_ones)]++;
            tried++;
        }
        fixture_clear(&whole);
    }
    for (int devices = 2; devices <= MOST_DEVICES; devices++) close_site(&sites[devices]);
    bench_close(&cpu);
    assert_true(parts[2] > tried / 2 && parts[3] > tried / 3 && parts[4] > tried / 10);
    assert_true(whole_ones < tried / 2);
}

static struct spec spec_of_queries(uint64_t seed)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8E4M3 };
    struct rng r = { seed * UINT64_C(0x9e3779b97f4a7c15) + 11 };
    struct spec s = SPEC(.data_seed = seed);
    s.op = rng_chance(&r, 0.6) ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
    s.dtype = dtypes[rng_between(&r, 0, s.op == ATTN_OP_FORWARD ? 3 : 2)];
    s.out_dtype = s.dtype == ATTN_F8E4M3 ? ATTN_BF16 : s.dtype;
    s.Hk = 1;
    s.H = rng_between(&r, 1, 3);
    s.D = rng_chance(&r, 0.5) ? 8 * rng_between(&r, 1, 4) : rng_between(&r, 1, 40);
    s.Dv = rng_chance(&r, 0.7) ? s.D : rng_between(&r, 1, 40);
    s.Sq = rng_between(&r, 4 * ATTN_QUERY_UNIT, 6 * ATTN_QUERY_UNIT);
    s.Sk = rng_between(&r, 1, 500);
    s.causal = rng_chance(&r, 0.5);
    if (s.causal) s.Sk = s.Sq + (rng_chance(&r, 0.5) ? 0 : rng_between(&r, 1, 200));
    if (rng_chance(&r, 0.3)) s.alignment = ATTN_TOP_LEFT;
    if (!s.causal && rng_chance(&r, 0.2)) {
        s.alignment = ATTN_TOP_LEFT;
        s.window_right = rng_between(&r, 0, 100);
        s.Sk = s.Sq + s.window_right + rng_between(&r, 0, 50);
    }
    if (rng_chance(&r, 0.2)) s.softcap = 5;
    if (rng_chance(&r, 0.2)) s.sinks = 1;
    if (s.op == ATTN_OP_BACKWARD) s.dlse = rng_chance(&r, 0.3), s.give_forward = rng_chance(&r, 0.5);
    if (s.op == ATTN_OP_BACKWARD && rng_chance(&r, 0.4)) s.float_grads = (int)rng_between(&r, 0, 7);
    if (s.dtype == ATTN_F8E4M3) s.fp8_scales = true, s.scale_axes = (int)rng_between(&r, 0, 4);
    if (rng_chance(&r, 0.4)) s.layout = ATTN_BHSD;
    if (rng_chance(&r, 0.3)) s.bias = (int)rng_between(&r, 1, 8), s.plain_grads = rng_chance(&r, 0.3);
    if (rng_chance(&r, 0.3)) s.keep_mask = (int)rng_between(&r, 1, 8), s.keep = 0.8;
    if (rng_chance(&r, 0.2) && (!s.causal || s.alignment == ATTN_TOP_LEFT)) s.seqlens_k = true;
    return s;
}

/* On 2 to 4 devices, out, lse and dq must have the same bits as on one. Gradients that are sums over queries must be
 * correct within rounding, and have the same bits in each run. */
static void test_queries_have_the_same_bits_over_any_number_of_devices(void **state)
{
    static struct site sites[MOST_DEVICES + 1];
    int with_sums = 0;
    struct bench cpu;
    (void)state;
    bench_open(&cpu, "cpu", 1);
    for (int devices = 2; devices <= MOST_DEVICES; devices++) open_site(&sites[devices], devices, "");
    for (uint64_t seed = 0; seed < PROBLEMS; seed++) {
        const struct spec s = spec_of_queries(seed);
        struct fixture whole;
        fixture_make(&whole, &s);
        fixture_run(&cpu, &whole);
        for (int devices = 2; devices <= MOST_DEVICES; devices++) {
            struct fixture parts, again;
            char why[400];
            const int count = run_by_queries(&sites[devices], &whole, &parts);
            run_by_queries(&sites[devices], &whole, &again);
            const struct fixture rows[2] = { with_outputs(&whole, false), with_outputs(&parts, false) };
            const struct fixture sums[2] = { with_outputs(&parts, true), with_outputs(&whole, true) };
            if (count != devices || !outputs_equal(&rows[0], &rows[1], why, sizeof why) ||
                !fixture_compare(&sums[0], &sums[1], NULL, why, sizeof why) ||
                !outputs_equal(&parts, &again, why, sizeof why)) {
                spec_print(stderr, &s);
                fail_msg("in %d parts: %s", count, count == devices ? why : "too few");
            }
            fixture_clear(&parts);
            fixture_clear(&again);
        }
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
            with_sums += attn_is_sum_of_queries(&whole.p, (attn_tensor_id)id) ? 1 : 0;
        fixture_clear(&whole);
    }
    for (int devices = 2; devices <= MOST_DEVICES; devices++) close_site(&sites[devices]);
    bench_close(&cpu);
    assert_true(with_sums > PROBLEMS);
}

/* Returns element n of the sum of three arrays, as the devices must add it up. */
static float sum_of(const float *parts, int64_t elements, int64_t n)
{
    float sum = parts[n];
    for (int part = 1; part < 3; part++) sum += parts[part * elements + n];
    return sum;
}

/* The devices must add the parts' sums in the order of the parts, in float32, and round once. The test replaces each
 * part's sums by numbers whose total depends on the order. */
static void test_parts_are_added_in_their_order(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    struct site s;
    (void)state;
    open_site(&s, 3, "");
    for (size_t d = 0; d < ARRAY_SIZE(dtypes); d++) {
        struct fixture f;
        struct device *over[CONFIG_MAX_DEVICES];
        const struct spec spec = SPEC(.op = ATTN_OP_BACKWARD, .dtype = dtypes[d], .out_dtype = dtypes[d], HEADS(2, 1),
                                      SIZES(384, 333, 24), .sinks = 1);
        const int64_t elements = 333 * 24;
        struct rng r = { 5 };
        fixture_make(&f, &spec);
        struct job *const job = job_with(&s, &f.p);
        cut_prepare(s.server.devices, job);
        assert_int_equal(cut(&s, job, over), 3);
        run_parts(&s, job, over, 3);
        float *const parts = malloc(3 * (size_t)elements * sizeof *parts);
        for (int64_t n = 0; n < 3 * elements; n++)
            parts[n] = (float)((rng_uniform(&r) - 0.5) * pow(2, (double)rng_between(&r, -8, 8)));
        /* Replaces the partial dk of each part, which is at the beginning of part->sums. The fake device's memory is
         * the host's. */
        for (const struct job_part *part = &job->part; part; part = part->next)
            memcpy(part->sums, parts + part->number * elements, (size_t)elements * sizeof *parts);
        add_up(&s, job, 3);
        for (int64_t n = 0; n < elements; n++) {
            float want[1] = { 0 };
            attn_store(dtypes[d], want, 0, sum_of(parts, elements, n));
            if (attn_load(dtypes[d], f.p.dk.data, n) != attn_load(dtypes[d], want, 0))
                fail_msg("%s: dk[%d] is not the sum of the parts", attn_dtype_name(dtypes[d]), (int)n);
        }
        free(parts);
        job_release(job);
        fixture_clear(&f);
    }
    close_site(&s);
}

/* Each device computes a part of a job, and keeps the part's gradients (sums over its queries) in its memory until the
 * job is over. If a device is lost before that, all devices free the sums of the job. */
static void test_sums_stay_on_the_devices_until_the_job_is_over(void **state)
{
    const struct spec spec = SPEC(.op = ATTN_OP_BACKWARD, HEADS(1, 1), SIZES(256, 512, 32));
    /* Sizes in bytes of partial gradients. own: one part's gradient. share: the half of a gradient that the other
     * device copies and adds up. */
    const int64_t own = 512 * 32 * 4, share = own / 2;
    struct site s;
    struct fixture f;
    struct device *over[CONFIG_MAX_DEVICES];
    (void)state;
    open_site(&s, 2, "");
    fixture_make(&f, &spec);
    struct job *const job = job_with(&s, &f.p);
    cut_prepare(s.server.devices, job);
    assert_int_equal(cut(&s, job, over), 2);
    assert_int_equal(bytes_in_use(&s), 0);
    run_parts(&s, job, over, 2);
    const int64_t kept = bytes_in_use(&s);
    if (kept < 2 * 2 * (own + 2 * share)) fail_msg("%d bytes are kept", (int)kept);
    assert_true(device_disable(over[1]));
    assert_false(sums_begin(job));
    assert_true(job_lost_devices(job));
    sums_free(job);
    if (bytes_in_use(&s) > kept - 2 * 2 * (own + 2 * share)) fail_msg("%d bytes are left", (int)bytes_in_use(&s));
    job_join(job);
    job_release(job);
    fixture_clear(&f);
    close_site(&s);
}

/* SMALL_BYTES is the memory of each device in the tests below. A job of SUMS or LARGE is cut into parts. Each part of
 * SUMS keeps a quarter of SMALL_BYTES until the job is over, and each part of LARGE needs more than three quarters. */
enum { SMALL_BYTES = 8 << 20 };
#define SUMS  SPEC(.op = ATTN_OP_BACKWARD, HEADS(1, 1), SIZES(256, 4096, 32))
#define LARGE SPEC(HEADS(2, 2), SIZES(12500, 100, 64))

/* Cuts a new job into two parts, one for each of the devices over[0] and over[1]. */
static struct job *job_in_two(struct site *s, struct fixture *f, const struct spec *spec,
                              struct device *over[CONFIG_MAX_DEVICES])
{
    fixture_make(f, spec);
    struct job *const job = job_with(s, &f->p);
    cut_prepare(s->server.devices, job);
    assert_int_equal(cut(s, job, over), 2);
    return job;
}

/* Waits until the device holds back the part for lack of free memory. */
static void assert_held(struct site *s, struct device *device, const struct job_part *part)
{
    bool held = false;
    while (!held && look(s) == 0) {
        pthread_mutex_lock(&device->lock);
        held = device->held && device->held->parts[0] == part && !device->held_may_run;
        pthread_mutex_unlock(&device->lock);
        nanosleep(&(struct timespec){ 0, 500000 }, NULL);
    }
    if (!held) fail_msg("a batch came back: %s", s->batches[0]->parts[0]->error.text);
}

/* A device keeps partial gradients (sums over queries) of one job in its memory. A batch of another job that needs this
 * memory waits until the first job's sums are freed. */
static void test_a_batch_waits_for_the_sums_of_another_job(void **state)
{
    struct site s;
    struct fixture f[2];
    struct device *over[CONFIG_MAX_DEVICES], *ignored[CONFIG_MAX_DEVICES];
    (void)state;
    open_small_site(&s, 2, "", SMALL_BYTES);
    struct job *const job = job_in_two(&s, &f[0], &SUMS, over), *const large = job_in_two(&s, &f[1], &LARGE, ignored);
    assert_back(&s, send_part(&s, job, over[1]));
    const struct job_part *const waits = send_part(&s, large, over[1]);
    assert_held(&s, over[1], waits);
    assert_back(&s, send_part(&s, job, over[0]));
    assert_true(sums_begin(job));
    assert_back(&s, send_part(&s, job, over[0]));
    assert_back(&s, send_part(&s, job, over[1]));
    assert_held(&s, over[1], waits);
    sums_free(job);
    assert_back(&s, waits);
    job_release(large);
    job_release(job);
    for (int n = 0; n < 2; n++) fixture_clear(&f[n]);
    close_site(&s);
}

static void test_a_batch_does_not_wait_for_sums_that_a_device_that_hangs_may_read(void **state)
{
    struct site s;
    struct fixture f[2];
    struct device *over[CONFIG_MAX_DEVICES], *ignored[CONFIG_MAX_DEVICES];
    (void)state;
    open_small_site(&s, 2, "", SMALL_BYTES);
    struct job *const job = job_in_two(&s, &f[0], &SUMS, over), *const large = job_in_two(&s, &f[1], &LARGE, ignored);
    run_parts(&s, job, over, 2);
    const struct job_part *const waits = send_part(&s, large, over[1]);
    assert_held(&s, over[1], waits);
    assert_true(sums_begin(job));
    sums_lose(job);
    assert_ptr_equal(part_back(&s), waits);
    assert_int_equal(waits->error.status, ATTN_NO_MEMORY);
    sums_free(job);
    job_release(large);
    job_release(job);
    for (int n = 0; n < 2; n++) fixture_clear(&f[n]);
    close_site(&s);
}

static void test_parts_pass_a_batch_that_waits_for_their_sums(void **state)
{
    struct site s;
    struct fixture f[2];
    struct device *over[CONFIG_MAX_DEVICES], *ignored[CONFIG_MAX_DEVICES];
    (void)state;
    open_small_site(&s, 2, "", SMALL_BYTES);
    struct job *const large = job_in_two(&s, &f[1], &LARGE, ignored);
    assert_true(device_disable(ignored[1]));
    struct job *const job = job_in_two(&s, &f[0], &SUMS, over);
    assert_ptr_equal(over[0], over[1]);
    assert_back(&s, send_part(&s, job, over[0]));
    const struct job_part *const waits = send_part(&s, large, over[0]);
    assert_held(&s, over[0], waits);
    assert_back(&s, send_part(&s, job, over[0]));
    add_up(&s, job, 2);
    assert_back(&s, waits);
    job_release(large);
    job_release(job);
    for (int n = 0; n < 2; n++) fixture_clear(&f[n]);
    close_site(&s);
}

/* A part of a job may run before a batch that waits for memory. If there is too little memory for the part too, both
 * wait, and the part runs first. */
static void test_a_part_that_passes_a_held_batch_may_be_held_itself(void **state)
{
    const struct spec half = SPEC(HEADS(2, 2), SIZES(6500, 100, 64));
    struct site s;
    struct gate gate;
    struct fixture f[3];
    struct device *over[CONFIG_MAX_DEVICES], *ignored[CONFIG_MAX_DEVICES];
    char script[128];
    (void)state;
    gate_shut(&gate);
    gate_script(&gate, "0:hold=GATE@2", script, sizeof script);
    open_small_site(&s, 2, script, SMALL_BYTES);
    struct job *const large = job_in_two(&s, &f[1], &LARGE, ignored), *const running = job_in_two(&s, &f[2], &half,
                                                                                                  over);
    assert_true(device_disable(over[1]));
    struct job *const job = job_in_two(&s, &f[0], &SUMS, over);
    assert_back(&s, send_part(&s, job, over[0]));
    const struct job_part *const runs = send_part(&s, running, over[0]), *const waits = send_part(&s, large, over[0]);
    assert_held(&s, over[0], waits);
    const struct job_part *const passes = send_part(&s, job, over[0]);
    assert_held(&s, over[0], passes);
    gate_open(&gate);
    assert_back(&s, runs);
    assert_back(&s, passes);
    add_up(&s, job, 2);
    assert_back(&s, waits);
    job_release(running);
    job_release(large);
    job_release(job);
    for (int n = 0; n < 3; n++) fixture_clear(&f[n]);
    close_site(&s);
}

/* A device has no memory left for adding up a job's partial gradients, and another batch waits for memory on this
 * device. The job fails at once, and the batch runs later. */
static void test_a_part_that_adds_up_takes_no_place_of_a_held_batch(void **state)
{
    const struct spec little = SPEC(HEADS(2, 2));
    struct site s;
    struct gate gate;
    struct fixture f[3];
    struct device *over[CONFIG_MAX_DEVICES], *ignored[CONFIG_MAX_DEVICES];
    char script[128];
    (void)state;
    gate_shut(&gate);
    gate_script(&gate, "1:peer.err=2@1,1:hold=GATE@2", script, sizeof script);
    open_small_site(&s, 2, script, SMALL_BYTES);
    struct job *const job = job_in_two(&s, &f[0], &SUMS, over), *const large = job_in_two(&s, &f[1], &LARGE, ignored),
                      *const small = job_in_two(&s, &f[2], &little, ignored);
    run_parts(&s, job, over, 2);
    const struct job_part *const runs = send_part(&s, small, over[1]), *const waits = send_part(&s, large, over[1]);
    assert_held(&s, over[1], waits);
    assert_true(sums_begin(job));
    assert_back(&s, send_part(&s, job, over[0]));
    send_part(&s, job, over[1]);
    assert_int_equal(part_back(&s)->error.status, ATTN_NO_MEMORY);
    assert_held(&s, over[1], waits);
    gate_open(&gate);
    assert_back(&s, runs);
    sums_free(job);
    assert_back(&s, waits);
    job_release(small);
    job_release(large);
    job_release(job);
    for (int n = 0; n < 3; n++) fixture_clear(&f[n]);
    close_site(&s);
}

/* A job is cut by queries only if devices that can take a batch now have memory for the partial gradients of all
 * parts. */
static void test_sums_of_several_parts_must_fit_on_a_device(void **state)
{
    const struct spec spec = SPEC(.op = ATTN_OP_BACKWARD, HEADS(1, 1), SIZES(512, 4096, 32));
    struct site s;
    struct fixture f;
    struct device *over[CONFIG_MAX_DEVICES];
    int64_t wait_ns = INT64_MAX;
    (void)state;
    open_small_site(&s, MOST_DEVICES, "", SMALL_BYTES);
    fixture_make(&f, &spec);
    struct job *const job = job_with(&s, &f.p);
    cut_prepare(s.server.devices, job);
    assert_int_equal(job->sum_parts, MOST_DEVICES);
    struct devices *const all = s.server.devices;
    for (int busy = 1; busy < MOST_DEVICES; busy++) {
        all->device[busy]->outstanding += 1000; /* makes the device count as full */
        assert_int_equal(cut_may_leave(all, all->device[0], job, clock_ns(), &wait_ns), busy < 3);
    }
    for (int n = 1; n < MOST_DEVICES; n++) all->device[n]->outstanding = 0;
    assert_true(device_disable(all->device[3]) && device_disable(all->device[2]));
    assert_int_equal(cut(&s, job, over), MOST_DEVICES);
    job_join(job);
    assert_true(device_disable(all->device[1]));
    assert_true(cut_may_leave(all, all->device[0], job, clock_ns(), &wait_ns));
    assert_int_equal(cut(&s, job, over), 1);
    assert_false(job_is_cut(job) || sums_begin(job));
    job_release(job);
    fixture_clear(&f);
    close_site(&s);
}

static void test_a_device_with_little_room_may_get_all_parts(void **state)
{
    const struct spec spec = SPEC(.op = ATTN_OP_BACKWARD, HEADS(1, 1), SIZES(512, 512, 32));
    struct site s;
    struct fixture f;
    struct device *over[CONFIG_MAX_DEVICES];
    (void)state;
    open_site(&s, MOST_DEVICES, "");
    for (int n = 1; n < MOST_DEVICES; n++) assert_true(device_disable(s.server.devices->device[n]));
    fixture_make(&f, &spec);
    struct job *const job = job_with(&s, &f.p);
    cut_prepare(s.server.devices, job);
    assert_int_equal(cut(&s, job, over), MOST_DEVICES);
    over[0]->outstanding += 7;
    run_parts(&s, job, over, MOST_DEVICES);
    add_up(&s, job, MOST_DEVICES);
    over[0]->outstanding -= 7;
    job_release(job);
    fixture_clear(&f);
    close_site(&s);
}

static void test_ranges_of_queries_have_equal_work(void **state)
{
    static const int64_t lengths[] = { 4096, 32768, 131072 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(lengths); n++) {
        attn_problem p = ATTN_PROBLEM_INIT;
        int64_t ends[MOST_DEVICES], first = 0;
        double shares[MOST_DEVICES], sum = 0;
        p.q = attn_tensor_make(NULL, ATTN_BF16, 4, (int64_t[]){ 1, lengths[n], 2, 64 });
        p.k = p.v = attn_tensor_make(NULL, ATTN_BF16, 4, (int64_t[]){ 1, lengths[n], 1, 64 });
        p.causal = true;
        assert_true(attn_queries_divide(&p) && attn_queries_share(&p, MOST_DEVICES, ends, shares));
        for (int part = 0; part < MOST_DEVICES; part++) {
            assert_true(ends[part] > first && ends[part] % ATTN_QUERY_UNIT == 0);
            assert_true(fabs(shares[part] - 0.25) <= 2.0 * ATTN_QUERY_UNIT / (double)lengths[n]);
            sum += shares[part];
            first = ends[part];
        }
        assert_int_equal(first, lengths[n]);
        assert_true(fabs(sum - 1) < 1e-12);
    }
}

static void test_sums_over_queries_do_not_depend_on_which_devices_have_room(void **state)
{
    const struct spec spec = SPEC(.op = ATTN_OP_BACKWARD, .dtype = ATTN_BF16, .out_dtype = ATTN_BF16, HEADS(3, 1),
                                  SIZES(700, 700, 32), .causal = true);
    struct site s;
    struct fixture whole, first;
    char why[400];
    (void)state;
    open_site(&s, MOST_DEVICES, "");
    fixture_make(&whole, &spec);
    assert_int_equal(run_by_queries(&s, &whole, &first), MOST_DEVICES);
    for (int lost = 1; lost < MOST_DEVICES; lost++) {
        struct fixture again;
        assert_true(device_disable(devices_pick(s.server.devices, ~(UINT64_C(1) << lost))));
        assert_int_equal(run_by_queries(&s, &whole, &again), MOST_DEVICES);
        if (!outputs_equal(&first, &again, why, sizeof why)) fail_msg("without %d devices: %s", lost, why);
        fixture_clear(&again);
    }
    fixture_clear(&first);
    fixture_clear(&whole);
    close_site(&s);
}

static void test_what_cannot_be_cut_or_is_short_goes_to_one_device(void **state)
{
    static const struct {
        const char *what;
        struct spec spec;
        double seconds;
        int parts, devices; /* devices: number of the server's devices; 0 stands for 4 */
    } cases[] = {
        { "four heads", SPEC(HEADS(4, 4)), 1, 4, 0 },
        { "queries of more heads", SPEC(HEADS(8, 2)), 1, 2, 0 },
        { "five heads: three devices are as fast as four", SPEC(HEADS(5, 5)), 1, 3, 0 },
        { "six heads on four devices", SPEC(HEADS(6, 6)), 1, 3, 0 },
        { "seven heads on four devices", SPEC(HEADS(7, 7)), 1, 4, 0 },
        { "one key/value head", SPEC(HEADS(8, 1)), 1, 1, 0 },
        { "two batch rows", SPEC(.B = 2, HEADS(8, 1)), 1, 2, 0 },
        { "four batch rows of a backward", SPEC(.op = ATTN_OP_BACKWARD, .B = 4, HEADS(8, 1)), 1, 4, 0 },
        { "and the gradient of sinks", SPEC(.op = ATTN_OP_BACKWARD, .B = 4, HEADS(8, 1), .sinks = 1), 1, 1, 0 },
        { "and a bias that all rows share", SPEC(.op = ATTN_OP_BACKWARD, .B = 4, HEADS(1, 1), .bias = 3), 1, 1, 0 },
        { "packed sequences", SPEC(HEADS(8, 1), .sequences = 2, .q_lengths = { 600, 9 }, .k_lengths = { 600, 9 }), 1, 1,
          0 },
        { "many queries", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .causal = true), 1, 4, 0 },
        { "many queries of two heads", SPEC(HEADS(8, 2), SIZES(512, 600, 8), .causal = true), 1, 4, 0 },
        { "three devices for queries", SPEC(HEADS(8, 2), SIZES(512, 600, 8)), 1, 3, 3 },
        { "few queries of two heads", SPEC(HEADS(8, 2), SIZES(511, 600, 8)), 1, 2, 0 },
        { "many queries of a backward", SPEC(.op = ATTN_OP_BACKWARD, HEADS(8, 1), SIZES(512, 600, 8)), 1, 4, 0 },
        { "a mask that is aligned to the beginning",
          SPEC(HEADS(8, 1), SIZES(512, 512, 8), .causal = true, .alignment = ATTN_TOP_LEFT), 1, 4, 0 },
        { "fewer keys than queries", SPEC(HEADS(8, 1), SIZES(512, 500, 8), .causal = true), 1, 1, 0 },
        { "a window to the left", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .window_left = 7), 1, 1, 0 },
        { "a window to the right", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .window_right = 7), 1, 1, 0 },
        { "ALiBi", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .alibi = 1), 1, 1, 0 },
        { "dropout", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .dropout_p = 0.5), 1, 1, 0 },
        { "FlashMask", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .mask_bounds = 2), 1, 1, 0 },
        { "lengths of queries", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .seqlens_q = true), 1, 1, 0 },
        { "lengths of keys", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .seqlens_k = true), 1, 4, 0 },
        { "lengths of keys and a causal mask", SPEC(HEADS(8, 1), SIZES(512, 600, 8), .seqlens_k = true, .causal = true),
          1, 1, 0 },
        { "a short problem", SPEC(HEADS(4, 4)), 0.02, 1, 0 },
        { "one device", SPEC(HEADS(4, 4)), 1, 1, 1 },
        { "a bias that all heads share", SPEC(HEADS(4, 4), .bias = 1 + 4), 1, 4, 0 },
        { "and its gradient", SPEC(.op = ATTN_OP_BACKWARD, HEADS(4, 4), .bias = 1 + 4), 1, 1, 0 },
        { "the gradient of a bias of each head", SPEC(.op = ATTN_OP_BACKWARD, HEADS(4, 4), .bias = 1 + 2), 1, 4, 0 },
        { "an observe", SPEC(.op = ATTN_OP_OBSERVE, HEADS(4, 4)), 1, 4, 0 },
        { "an observe of many queries", SPEC(.op = ATTN_OP_OBSERVE, HEADS(8, 1), SIZES(512, 600, 8)), 1, 1, 0 },
        { "an observe of four batch rows", SPEC(.op = ATTN_OP_OBSERVE, .B = 4, HEADS(8, 1)), 1, 4, 0 },
        { "gaps between rows", SPEC(HEADS(4, 4), .strided = true), 1, 1, 0 },
        { "no queries", SPEC(HEADS(4, 4), .Sq = 0), 1, 1, 0 },
    };
    (void)state;
    for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
        struct site s;
        struct fixture f;
        struct device *over[CONFIG_MAX_DEVICES];
        open_site(&s, cases[c].devices ? cases[c].devices : MOST_DEVICES, "");
        fixture_make(&f, &cases[c].spec);
        struct job *const job = job_with(&s, &f.p);
        job->seconds = cases[c].seconds;
        cut_prepare(s.server.devices, job);
        const int parts = cut(&s, job, over);
        if (parts != cases[c].parts) fail_msg("%s: %d parts, must be %d", cases[c].what, parts, cases[c].parts);
        assert_int_equal(job_is_cut(job), parts > 1);
        job_release(job);
        fixture_clear(&f);
        close_site(&s);
    }
}

static struct device *device_at(struct site *s, int number)
{
    return devices_pick(s->server.devices, ~(UINT64_C(1) << number));
}

/* Devices that failed or have no room for a further batch get no part of a problem. With --split-above-ms 0, no problem
 * is cut. */
static void test_devices_that_have_room_share_a_problem(void **state)
{
    const struct spec spec = SPEC(HEADS(6, 6));
    struct site s;
    struct fixture f;
    struct device *over[CONFIG_MAX_DEVICES];
    struct batch *filling[MOST_DEVICES * 16];
    int count = 0;
    (void)state;
    open_site(&s, MOST_DEVICES, "2:event.never");
    fixture_make(&f, &spec);
    struct job *const job = job_with(&s, &f.p);
    s.server.devices->split_above_ms = 0;
    assert_int_equal(cut(&s, job, over), 1);
    assert_int_equal(cut_most_parts(s.server.devices, job), 1);
    s.server.devices->split_above_ms = s.config.split_above_ms;
    /* Each of three devices gets two of the six heads. With a fourth device, the largest part would still have two
     * heads. */
    assert_int_equal(cut_most_parts(s.server.devices, job), 3);
    assert_true(device_disable(device_at(&s, 1)));
    assert_int_equal(cut(&s, job, over), 3);
    for (int n = 0; n < 3; n++) assert_int_equal(device_number(over[n]), n == 0 ? 0 : n + 1);
    job_join(job);
    struct device *const full = device_at(&s, 2);
    struct job *const other = job_with(&s, &f.p);
    int64_t wait_ns = INT64_MAX;
    while (device_has_room(full, job, clock_ns(), &wait_ns)) {
        struct batch *const batch = filling[count++] = calloc(1, sizeof *batch + sizeof batch->parts[0]);
        batch->count = batch->waiting = 1;
        batch->parts[0] = &other->part;
        full->outstanding++;
        batch->device = full;
        batch->next = full->batches;
        full->batches = batch;
    }
    assert_int_equal(cut(&s, job, over), 2);
    for (int n = 0; n < 2; n++) assert_int_equal(device_number(over[n]), n == 0 ? 0 : 3);
    full->batches = NULL;
    full->outstanding = 0;
    while (count > 0) free(filling[--count]);
    job_release(other);
    job_release(job);
    fixture_clear(&f);
    close_site(&s);
}

static void test_the_device_with_the_least_work_gets_the_first_heads(void **state)
{
    static const double work[MOST_DEVICES] = { 5, 1, 3, 2 };
    static const int order[MOST_DEVICES] = { 1, 3, 2, 0 };
    const struct spec spec = SPEC(HEADS(4, 4));
    struct site s;
    struct fixture f;
    struct device *over[CONFIG_MAX_DEVICES];
    (void)state;
    open_site(&s, MOST_DEVICES, "");
    fixture_make(&f, &spec);
    struct job *const job = job_with(&s, &f.p);
    for (int n = 0; n < MOST_DEVICES; n++) device_at(&s, n)->flops = work[n];
    assert_int_equal(cut(&s, job, over), MOST_DEVICES);
    for (int n = 0; n < MOST_DEVICES; n++) assert_int_equal(device_number(over[n]), order[n]);
    for (int n = 0; n < MOST_DEVICES; n++) device_at(&s, n)->flops = 0;
    job_release(job);
    fixture_clear(&f);
    close_site(&s);
}

static void test_the_backend_of_an_answer_names_the_devices(void **state)
{
    static const struct {
        int index[MOST_DEVICES], parts;
        enum job_way way;
        const char *backend;
    } cases[] = {
        { { 0, 1, 2, 3 }, 4, JOB_BY_HEADS, "fake:0-3 sm90 by heads" },
        { { 3, 1, 0, 2 }, 4, JOB_BY_HEADS, "fake:0-3 sm90 by heads" },
        { { 2, 0 }, 2, JOB_BY_BATCH, "fake:0,2 sm90 by batch" },
        { { 1, 0 }, 2, JOB_BY_HEADS, "fake:0-1 sm90 by heads" },
        { { 7, 0, 6 }, 3, JOB_BY_QUERIES, "fake:0,6-7 sm90 by queries" },
        { { 5, 0, 3, 1 }, 4, JOB_BY_HEADS, "fake:0-1,3,5 sm90 by heads" },
        { { 1, 0, 1, 0 }, 4, JOB_BY_QUERIES, "fake:0-1 sm90 by queries" },
    };
    const struct job_range ranges[MOST_DEVICES] = { { 0, 1, 0.25 }, { 1, 2, 0.25 }, { 2, 3, 0.25 }, { 3, 4, 0.25 } };
    struct site s;
    (void)state;
    open_site(&s, 1, "");
    for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
        struct job *const job = job_of(&s.server, ATTN_OP_FORWARD, forward_body(5, 4, ""));
        const int *index = cases[c].index;
        assert_true(job_cut(job, cases[c].way, cases[c].parts, ranges));
        job->part.kernel = "sm90";
        for (struct job_part *part = &job->part; part; part = part->next) part->index = *index++;
        cut_name_backend(s.server.devices, job);
        assert_string_equal(job->results[0].backend, cases[c].backend);
        job_release(job);
    }
    close_site(&s);
}

/* Each device gets only the tensors of its heads, with one copy command per tensor. */
static void test_a_device_has_memory_for_its_heads_alone(void **state)
{
    const struct spec spec = SPEC(.B = 2, SIZES(64, 64, 64), HEADS(8, 4), .causal = true);
    struct site s;
    struct fixture f;
    struct device *over[CONFIG_MAX_DEVICES];
    attn_error err = { 0 };
    attn_problem part;
    (void)state;
    open_site(&s, 2, "");
    fixture_make(&f, &spec);
    struct job *const job = job_with(&s, &f.p);
    assert_int_equal(cut(&s, job, over), 2);
    struct slot *const slot = &over[1]->slots[0];
    assert_int_equal(parts_take(over[1], slot, &job->more_parts[0], &part, &err), ATTN_OK);
    attn_device_info info;
    attn_device_describe(over[1]->handle, &info);
    const int64_t q = 2 * 64 * 4 * 64 * 4, k = q / 2, lse = 2 * 4 * 64 * 4;
    assert_int_equal(info.memory_used, q + 2 * k + q + lse);
    assert_int_equal(part.q.shape[2], 4);
    assert_int_equal(part.k.shape[2], 2);
    memory_drop_mirrors(over[1], slot);
    job_release(job);
    fixture_clear(&f);
    close_site(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_problems_have_the_same_bits_over_any_number_of_devices),
        cmocka_unit_test(test_queries_have_the_same_bits_over_any_number_of_devices),
        cmocka_unit_test(test_ranges_of_queries_have_equal_work),
        cmocka_unit_test(test_parts_are_added_in_their_order),
        cmocka_unit_test(test_sums_stay_on_the_devices_until_the_job_is_over),
        cmocka_unit_test(test_a_batch_waits_for_the_sums_of_another_job),
        cmocka_unit_test(test_a_batch_does_not_wait_for_sums_that_a_device_that_hangs_may_read),
        cmocka_unit_test(test_parts_pass_a_batch_that_waits_for_their_sums),
        cmocka_unit_test(test_a_part_that_passes_a_held_batch_may_be_held_itself),
        cmocka_unit_test(test_a_part_that_adds_up_takes_no_place_of_a_held_batch),
        cmocka_unit_test(test_sums_of_several_parts_must_fit_on_a_device),
        cmocka_unit_test(test_a_device_with_little_room_may_get_all_parts),
        cmocka_unit_test(test_sums_over_queries_do_not_depend_on_which_devices_have_room),
        cmocka_unit_test(test_what_cannot_be_cut_or_is_short_goes_to_one_device),
        cmocka_unit_test(test_devices_that_have_room_share_a_problem),
        cmocka_unit_test(test_the_device_with_the_least_work_gets_the_first_heads),
        cmocka_unit_test(test_the_backend_of_an_answer_names_the_devices),
        cmocka_unit_test(test_a_device_has_memory_for_its_heads_alone),
    };
    /* With AMX, the CPU's kernels need more memory than the small devices of these tests have. */
    setenv("ATTN_CPU_ISA", "avx512", 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
