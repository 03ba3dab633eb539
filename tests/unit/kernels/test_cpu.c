/* test_cpu.c: tests of the CPU backend's threads, memory and workspace. test_backends.c tests its results. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "../testing.h"
#include "kernels/cpu/flash.h"

/* ---- Tests of the pool of threads -------------------------------------------------------------------------------- */

enum { ITEMS = 1000, CALLERS = 4, LOOPS = 50, THREADS = 5 };

struct counts {
    atomic_int seen[ITEMS];
    atomic_int in_use[THREADS];
    atomic_int clashes;
};

static void count_item(void *context, int worker, int64_t item)
{
    struct counts *c = context;
    if (atomic_fetch_add(&c->in_use[worker], 1) != 0) atomic_fetch_add(&c->clashes, 1);
    atomic_fetch_add(&c->seen[item], 1);
    atomic_fetch_sub(&c->in_use[worker], 1);
}

static void test_every_item_runs_once_and_no_two_threads_share_a_worker_number(void **state)
{
    struct pool *pool;
    attn_error err = { 0 };
    (void)state;
    assert_int_equal(pool_open(THREADS, NULL, &pool, &err), ATTN_OK);
    assert_int_equal(pool_threads(pool), THREADS);
    for (int64_t items = 0; items <= ITEMS; items = items * 3 + 1) {
        struct counts *c = calloc(1, sizeof *c);
        pool_run(pool, items, count_item, c);
        for (int64_t i = 0; i < ITEMS; i++) assert_int_equal(atomic_load(&c->seen[i]), i < items);
        assert_int_equal(atomic_load(&c->clashes), 0);
        free(c);
    }
    pool_close(pool);
}

static void *run_loops(void *argument)
{
    struct pool *pool = argument;
    struct pool_part part = { 0 };
    pool_begin(pool, &part, &part, NULL);
    for (int loop = 0; loop < LOOPS; loop++) {
        struct counts *c = calloc(1, sizeof *c);
        pool_run(pool, ITEMS, count_item, c);
        for (int i = 0; i < ITEMS; i++)
            if (atomic_load(&c->seen[i]) != 1 || atomic_load(&c->clashes)) return c;
        free(c);
    }
    (void)pool_end(pool, &part);
    return NULL;
}

static void test_loops_of_several_callers_run_side_by_side(void **state)
{
    pthread_t callers[CALLERS];
    struct pool *pool;
    attn_error err = { 0 };
    (void)state;
    assert_int_equal(pool_open(THREADS, NULL, &pool, &err), ATTN_OK);
    for (int n = 0; n < CALLERS; n++) assert_int_equal(pthread_create(&callers[n], NULL, run_loops, pool), 0);
    for (int n = 0; n < CALLERS; n++) {
        void *failed;
        pthread_join(callers[n], &failed);
        assert_null(failed);
    }
    pool_close(pool);
}

static void count_worker(void *context, int worker, int64_t item)
{
    (void)item;
    atomic_fetch_add(&((atomic_int *)context)[worker], 1);
}

/* Waits until two threads are in this function at the same time. */
static void meet(void *context, int worker, int64_t item)
{
    atomic_int *const begun = context;
    unsigned spins = 0;
    (void)worker;
    (void)item;
    atomic_fetch_add(begun, 1);
    while (atomic_load(begun) < 2) pool_breathe(&spins);
}

static void test_a_thread_that_begins_takes_the_place_of_a_worker_until_it_ends(void **state)
{
    struct pool *pool;
    attn_error err = { 0 };
    (void)state;
    assert_int_equal(pool_open(2, NULL, &pool, &err), ATTN_OK);
    for (int times = 0; times < LOOPS; times++) {
        atomic_int by[2] = { 0 }, begun = 0;
        struct pool_part own = { 0 }, other = { 0 };
        pool_begin(pool, &other, &other, NULL);
        pool_begin(pool, &own, &own, NULL);
        pool_run(pool, ITEMS, count_worker, by);
        assert_int_equal(atomic_load(&by[0]), ITEMS);
        assert_int_equal(atomic_load(&by[1]), 0);
        (void)pool_end(pool, &own);
        pool_run(pool, 2, meet, &begun);
        (void)pool_end(pool, &other);
    }
    pool_close(pool);
}

/* Waits until the item before `item` is done, as each chunk of keys in a backward waits for the chunk before it. */
static void wait_for_the_one_before(void *context, int worker, int64_t item)
{
    _Atomic int64_t *done = context;
    unsigned spins = 0;
    (void)worker;
    while (atomic_load(done) < item) pool_breathe(&spins);
    atomic_store(done, item + 1);
}

static void test_an_item_may_wait_for_an_earlier_one(void **state)
{
    struct pool *pool;
    attn_error err = { 0 };
    _Atomic int64_t done = 0;
    (void)state;
    assert_int_equal(pool_open(THREADS, NULL, &pool, &err), ATTN_OK);
    pool_run(pool, ITEMS, wait_for_the_one_before, &done);
    assert_int_equal(atomic_load(&done), ITEMS);
    pool_close(pool);
}

/* A thread that runs work on the pool, for one owner (a request), until *stop is set. */
struct computing {
    struct pool *pool;
    const void *owner;
    pthread_t thread;
    _Atomic int64_t items;
    atomic_bool *stop;
    int64_t spent_ns;
};

static void count_own(void *context, int worker, int64_t item)
{
    struct computing *own = context;
    unsigned spins = 0;
    (void)worker, (void)item;
    for (int i = 0; i < 100; i++) pool_breathe(&spins);
    atomic_fetch_add(&own->items, 1);
}

static void *compute_until_stopped(void *argument)
{
    struct computing *own = argument;
    struct pool_part part;
    pool_begin(own->pool, &part, own->owner, NULL);
    while (!atomic_load(own->stop)) pool_run(own->pool, 1000, count_own, own);
    own->spent_ns = pool_end(own->pool, &part);
    return NULL;
}

/* Returns how many of the first `count` threads make progress: a thread does if it finishes more than ten items while
 * some thread finishes 1000. */
static int at_work(struct computing *all, int count)
{
    int64_t before[CALLERS];
    int working = 0;
    bool done = false;
    for (int n = 0; n < count; n++) before[n] = atomic_load(&all[n].items);
    while (!done)
        for (int n = 0; n < count; n++) done |= atomic_load(&all[n].items) >= before[n] + 1000;
    for (int n = 0; n < count; n++) working += atomic_load(&all[n].items) > before[n] + 10;
    return working;
}

/* Two threads compute for one owner (a request), and a third thread for another. In a pool of two threads, each owner
 * must get one. */
static void test_an_owner_with_two_streams_gives_one_up_while_another_owner_computes(void **state)
{
    static const char owners[2];
    struct computing all[3] = { 0 };
    struct pool *pool;
    atomic_bool stop[2] = { false, false };
    attn_error err = { 0 };
    (void)state;
    assert_int_equal(pool_open(2, NULL, &pool, &err), ATTN_OK);
    for (int n = 0; n < 3; n++)
        all[n] = (struct computing){ .pool = pool, .owner = &owners[n / 2], .stop = &stop[n / 2] };
    for (int n = 0; n < 2; n++)
        assert_int_equal(pthread_create(&all[n].thread, NULL, compute_until_stopped, &all[n]), 0);
    while (at_work(all, 2) != 2) continue;
    assert_int_equal(pthread_create(&all[2].thread, NULL, compute_until_stopped, &all[2]), 0);
    /* Waits until thread 2 and only one of threads 0 and 1 compute. If the owners do not share the pool, this never
     * ends. */
    while (atomic_load(&all[2].items) == 0 || at_work(all, 2) != 1) continue;
    atomic_store(&stop[1], true);
    pthread_join(all[2].thread, NULL);
    while (at_work(all, 2) != 2) continue;
    atomic_store(&stop[0], true);
    for (int n = 0; n < 2; n++) pthread_join(all[n].thread, NULL);
    for (int n = 0; n < 3; n++) assert_true(all[n].spent_ns > 0);
    pool_close(pool);
}

/* The sequences are shorter under ThreadSanitizer, which makes filling, reading and comparing a hundred times
 * slower. */
#ifdef __SANITIZE_THREAD__
enum { LONG_PACKED = 500, LONG_PADDED = 300 };
#else
enum { LONG_PACKED = 5000, LONG_PADDED = 3000 };
#endif

/* Returns a packed problem, or one with seqlens_q and seqlens_k. Lengths and dtype are random. */
static struct spec random_lengths(struct rng *r)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    struct spec s = SPEC(.dtype = dtypes[rng_between(r, 0, 2)], .Hk = rng_between(r, 1, 2), .data_seed = rng_next(r));
    s.out_dtype = s.dtype;
    s.H = s.Hk * rng_between(r, 1, 5);
    s.D = s.Dv = rng_between(r, 1, 80);
    s.op = rng_chance(r, 0.4) ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
    s.give_forward = rng_chance(r, 0.5);
    s.causal = rng_chance(r, 0.5);
    s.alibi = rng_chance(r, 0.3);
    s.sinks = rng_chance(r, 0.3);
    s.softcap = rng_chance(r, 0.2) ? 10 : 0;
    s.dropout_p = rng_chance(r, 0.2) ? 0.2 : 0;
    if (rng_chance(r, 0.7)) {
        s.sequences = (int)rng_between(r, 1, SPEC_SEQUENCES);
        for (int n = 0; n < s.sequences; n++) {
            s.q_lengths[n] = (int)rng_between(r, 0, rng_chance(r, 0.3) ? 300 : 10);
            s.k_lengths[n] = (int)rng_between(r, 0, rng_chance(r, 0.2) ? LONG_PACKED : 90);
        }
    } else {
        s.B = rng_between(r, 0, 4);
        s.Sq = rng_between(r, 0, 100);
        s.Sk = rng_between(r, 0, rng_chance(r, 0.2) ? LONG_PADDED : 200);
        s.seqlens_k = true;
        s.bias = rng_chance(r, 0.3) ? (int)rng_between(r, 1, 8) : 0;
        s.mask_bounds = rng_chance(r, 0.3) ? 2 : 0;
        s.seqlens_q = rng_chance(r, 0.6);
    }
    if (s.sequences && rng_chance(r, 0.4)) s.gaps = (int)rng_between(r, 1, 60);
    if (s.sequences) s.key_rows = rng_chance(r, 0.2);
    return s;
}

/* attn_workspace() promises enough memory without reading the lengths. A run gets exactly this much, so that
 * AddressSanitizer reports a run that uses more. */
static void test_the_workspace_that_is_asked_for_is_enough_whatever_the_lengths(void **state)
{
    enum { COUNT = 60 };
    struct rng r = { 5 };
    struct bench bench;
    (void)state;
    bench_open(&bench, "cpu", 3);
    for (int n = 0; n < COUNT; n++) {
        const struct spec s = random_lengths(&r);
        struct fixture alone, within;
        attn_plan plan;
        size_t promised, needed;
        char why[256];
        attn_error err = { 0 };
        fixture_make(&alone, &s);
        fixture_make(&within, &s);
        fixture_run(&bench, &alone);
        assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &within.p, &plan, &err), ATTN_OK);
        assert_int_equal(attn_workspace(attn_device_capabilities(bench.device), &plan, 1, &promised, &err), ATTN_OK);
        assert_int_equal(flash_run_bytes_exact(simd_get(), 3, &plan, 1, &needed, &err), ATTN_OK);
        /* attn_run() skips an empty problem, so the size of its workspace does not matter. */
        if (needed > promised && !attn_is_empty(&within.p)) {
            spec_print(stderr, &s);
            fail_msg("%zu bytes were promised to be enough, %zu are needed", promised, needed);
        }
        char *workspace = aligned_alloc(64, promised);
        assert_non_null(workspace);
        memset(workspace, 0xff, promised);
        assert_int_equal(attn_run(bench.stream, &plan, 1, workspace, &err), ATTN_OK);
        free(workspace);
        if (!outputs_equal(&alone, &within, why, sizeof why)) {
            spec_print(stderr, &s);
            fail_msg("%s", why);
        }
        fixture_clear(&alone);
        fixture_clear(&within);
    }
    bench_close(&bench);
}

/* ---- Tests of strips (parts of a tile's rows) -------------------------------------------------------------------- */

/* Runs a forward. If `strips` is false, every tile of rows is computed whole; otherwise in strips (parts of its
 * rows). */
static void forward_with(const struct simd *simd, bool strips, const struct fixture *f)
{
    struct simd_type types[3];
    struct simd own = *simd;
    const struct simd_type **slots[] = { &own.bf16, &own.half, &own.single };
    struct pool *pool;
    size_t bytes;
    attn_error err = { 0 };
    for (int n = 0; n < 3 && !strips; n++) {
        if (*slots[n] == NULL) continue;
        types[n] = **slots[n];
        types[n].strip = 0;
        *slots[n] = &types[n];
    }
    if (!strips) own.f32.strip = 0;
    const attn_plan plan = { .problem = &f->p };
    assert_int_equal(pool_open(1, NULL, &pool, &err), ATTN_OK);
    assert_int_equal(flash_run_bytes(&own, 1, &plan, 1, &bytes, &err), ATTN_OK);
    char *workspace = aligned_alloc(64, bytes);
    assert_non_null(workspace);
    memset(workspace, 0xff, bytes);
    flash_run(&own, pool, &plan, 1, workspace, NULL);
    free(workspace);
    pool_close(pool);
}

static void test_strips_change_no_bit(void **state)
{
    static const struct spec specs[] = {
        SPEC(.causal = true),
        SPEC(.causal = true, .Sq = 113, .Sk = 300),
        SPEC(.causal = true, .Sq = 300, .Sk = 113), /* the first rows see no key */
        SPEC(.causal = true, .Sq = 200, .Sk = 1100, .D = 40, .Dv = 24),
        /* A window of keys moves with its query, so the windows of the rows of one tile begin in different tiles of
         * keys. */
        SPEC(.window_left = 5, .window_right = 0, .Sq = 700, .Sk = 700),
        SPEC(.window_left = 300, .window_right = 20, .Sq = 130, .Sk = 650),
        SPEC(.causal = true, .Sq = 90, .Sk = 90, .softcap = 5, .alibi = 1, .sinks = 1),
        SPEC(.causal = true, .Sq = 130, .Sk = 130, .mask_bounds = 1, .dropout_p = 0.3),
        /* Several heads share a tile of rows. Such a tile is computed whole, and not in strips (parts of its rows). */
        SPEC(.causal = true, .Sq = 20, .Sk = 150, .H = 6),
        SPEC(.causal = true, .Sq = 70, .Sk = 400, .poison_unseen = true),
        SPEC(.causal = true, .Sq = 70, .Sk = 70, .poison = 2),
    };
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    (void)state;
    for (const char *const *name = simd_names; *name; name++) {
        const struct simd *simd = simd_find(*name);
        for (size_t n = 0; simd && n < ARRAY_SIZE(specs) * ARRAY_SIZE(dtypes); n++) {
            struct spec s = specs[n / ARRAY_SIZE(dtypes)];
            struct fixture whole, strips;
            char why[256];
            s.dtype = s.out_dtype = dtypes[n % ARRAY_SIZE(dtypes)];
            fixture_make(&whole, &s);
            fixture_make(&strips, &s);
            forward_with(simd, false, &whole);
            forward_with(simd, true, &strips);
            if (!outputs_equal(&whole, &strips, why, sizeof why)) {
                spec_print(stderr, &s);
                fail_msg("%s: %s", *name, why);
            }
            fixture_clear(&whole);
            fixture_clear(&strips);
        }
    }
}

/* ---- Tests of cancelled runs ------------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* a feature bit of a problem that the flash attention kernels do not support */
static const uint64_t made_up = UINT64_C(1) << 63;

struct giving_up {
    attn_stream *stream;
    const attn_problem *problem;
    /* A feature bit that is added to the problem, or 0. If it is a bit that no flash attention kernel supports, the
     * kernel that computes in double runs. */
    uint64_t also;
    attn_status status;
    attn_error err;
    double ended;
};

static void *run_to_be_given_up(void *context)
{
    struct giving_up *g = context;
    attn_plan plan;
    g->status = attn_plan_for(attn_device_capabilities(g->stream->device), g->problem,
                              attn_features(g->problem) | g->also, &plan, &g->err);
    if (g->status == ATTN_OK) g->status = attn_run(g->stream, &plan, 1, NULL, &g->err);
    g->ended = seconds();
    return NULL;
}

/* Cancels runs that would take ten seconds or more. In a backward, one chunk of keys waits for another chunk, which may
 * never begin after the cancellation. */
static void ends_soon_after_it_is_cancelled(uint64_t also)
{
    static const struct spec specs[] = {
        SPEC(.Sq = 250000, .Sk = 250000, .H = 1, .Hk = 1, .D = 8, .Dv = 8),
        SPEC(.Sq = 50000, .Sk = 50000, .H = 8, .Hk = 2, .D = 8, .Dv = 8, .causal = true, .window_left = 40000),
        SPEC(.Sq = 100000, .Sk = 100000, .H = 2, .Hk = 2, .D = 8, .Dv = 8, .op = ATTN_OP_BACKWARD),
    };
    for (size_t n = 0; n < ARRAY_SIZE(specs) * 2; n++) {
        /* Without a pause, the run may be cancelled before it begins. */
        const struct timespec pause = { 0, n % 2 ? 150000000 : 0 };
        struct giving_up g = { 0 };
        struct fixture f, after;
        struct bench bench;
        pthread_t thread;
        int cancel = 0;
        struct spec small = specs[n / 2];
        fixture_make(&f, &specs[n / 2]);
        bench_open(&bench, "cpu", 3);
        attn_stream_heed(bench.stream, &cancel);
        g.stream = bench.stream;
        g.problem = &f.p;
        g.also = also;
        assert_int_equal(pthread_create(&thread, NULL, run_to_be_given_up, &g), 0);
        nanosleep(&pause, NULL);
        const double cancelled = seconds();
        attn_cancel(&cancel);
        pthread_join(thread, NULL);
        assert_int_equal(g.status, ATTN_CANCELLED);
        assert_string_equal(g.err.text, "given up: nobody waits for it any more");
        if (g.ended - cancelled > 2)
            fail_msg("case %zu computed for %.2f s after it was cancelled", n, g.ended - cancelled);

        attn_stream_heed(bench.stream, NULL);
        small.Sq = small.Sk = 200;
        fixture_make(&after, &small);
        fixture_run(&bench, &after);
        fixture_clear(&after);
        fixture_clear(&f);
        bench_close(&bench);
    }
}

static void test_a_run_that_nobody_waits_for_ends_between_two_tiles(void **state)
{
    (void)state;
    ends_soon_after_it_is_cancelled(0);
}

static void test_a_run_in_double_that_nobody_waits_for_ends_between_two_rows(void **state)
{
    (void)state;
    ends_soon_after_it_is_cancelled(made_up);
}

/* ---- Tests of the kernel that computes in double ----------------------------------------------------------------- */

/* Some of these problems have gradients of bias, slopes or sinks, which one thread sums over heads and sequences. */
static const struct spec of_any_kind[] = {
    SPEC(.Sq = 40, .Sk = 70, .H = 6, .Hk = 3, .B = 5, .causal = true),
    SPEC(.Sq = 1, .Sk = 300, .H = 8, .Hk = 2, .dtype = ATTN_BF16, .out_dtype = ATTN_BF16, .softcap = 3),
    SPEC(.sequences = 4, .q_lengths = { 30, 0, 1, 17 }, .k_lengths = { 40, 9, 1, 5 }, .dropout_p = 0.2, .seed = 3),
    SPEC(.op = ATTN_OP_BACKWARD, .Sq = 50, .Sk = 60, .H = 4, .Hk = 2, .B = 3, .D = 24, .Dv = 40, .window_left = 20),
    SPEC(.op = ATTN_OP_BACKWARD, .Sq = 50, .Sk = 60, .B = 2, .seqlens_k = true, .alibi = 1, .sinks = 1, .bias = 1),
};

static void test_problems_that_are_computed_in_double_have_the_bits_of_the_reference(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 3; threads += 2)
        for (size_t n = 0; n < ARRAY_SIZE(of_any_kind); n++) {
            struct bench bench;
            struct fixture got, want;
            char why[256];
            fixture_make(&got, &of_any_kind[n]);
            fixture_copy(&want, &got);
            run_reference(&want.p);
            bench_open(&bench, "cpu", threads);
            bench.also = made_up;
            fixture_run(&bench, &got);
            bench_close(&bench);
            if (!outputs_equal(&got, &want, why, sizeof why)) fail_msg("problem %zu, %d threads: %s", n, threads, why);
            fixture_clear(&got);
            fixture_clear(&want);
        }
}

static void test_a_run_may_hold_problems_of_both_kernels(void **state)
{
    enum { COUNT = ARRAY_SIZE(of_any_kind) };
    struct fixture alone[2][COUNT];
    struct bench bench;
    (void)state;
    bench_open(&bench, "cpu", 3);
    for (int kind = 0; kind < 2; kind++)
        for (int n = 0; n < COUNT; n++) {
            bench.also = kind ? made_up : 0;
            fixture_make(&alone[kind][n], &of_any_kind[n]);
            fixture_run(&bench, &alone[kind][n]);
        }
    for (int kinds = 0; kinds < 1 << COUNT; kinds++) {
        struct fixture f[COUNT];
        attn_plan plans[COUNT];
        attn_error err = { 0 };
        size_t bytes;
        char why[256];
        for (int n = 0; n < COUNT; n++) {
            fixture_make(&f[n], &of_any_kind[n]);
            const uint64_t features = attn_features(&f[n].p) | (kinds >> n & 1 ? made_up : 0);
            assert_int_equal(attn_plan_for(attn_device_capabilities(bench.device), &f[n].p, features, &plans[n], &err),
                             ATTN_OK);
            assert_int_equal(strcmp(plans[n].kernel->name, "double") == 0, kinds >> n & 1);
        }
        assert_int_equal(attn_workspace(attn_device_capabilities(bench.device), plans, COUNT, &bytes, &err), ATTN_OK);
        char *workspace = kinds % 2 && bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
        if (workspace) memset(workspace, 0xff, bytes);
        assert_int_equal(attn_run(bench.stream, plans, COUNT, workspace, &err), ATTN_OK);
        free(workspace);
        for (int n = 0; n < COUNT; n++) {
            if (!outputs_equal(&f[n], &alone[kinds >> n & 1][n], why, sizeof why))
                fail_msg("kinds %x, problem %d: %s", (unsigned)kinds, n, why);
            fixture_clear(&f[n]);
        }
    }
    for (int n = 0; n < COUNT; n++) fixture_clear(&alone[0][n]), fixture_clear(&alone[1][n]);
    bench_close(&bench);
}

/* The probability of the second key is 1.8e-35. Such a small probability counts as 0 beside ordinary values, but not
 * beside a value of 1e35. */
static void test_a_small_probability_counts_beside_a_large_value(void **state)
{
    static const attn_tensor_id results[] = { ATTN_T_out, ATTN_T_dq, ATTN_T_dk, ATTN_T_dv };
    (void)state;
    for (int op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++)
        for (int large = 0; large < 2; large++) /* whether v or dout is large */
            for (int64_t Sq = 1; Sq <= 40; Sq += 39) {
                const struct spec s = SPEC(.op = (attn_op)op, .Sq = Sq, .Sk = 2, .D = 1, .Dv = 1, .H = 1, .Hk = 1,
                                           .has_scale = true, .scale = 1);
                struct bench bench;
                struct fixture got, want;
                fixture_make(&got, &s);
                for (int64_t i = 0; i < Sq; i++) {
                    tensor_set(&got.p.q, i, 1);
                    if (op == ATTN_OP_BACKWARD) tensor_set(&got.p.dout, i, large && i == 0 ? 1e35 : 1);
                }
                for (int64_t j = 0; j < 2; j++) {
                    tensor_set(&got.p.k, j, -80 * (double)j);
                    tensor_set(&got.p.v, j, large || j == 0 ? 1 : 1e35);
                }
                fixture_copy(&want, &got);
                run_reference(&want.p);
                bench_open(&bench, "cpu", 1);
                fixture_run(&bench, &got);
                bench_close(&bench);
                for (size_t n = 0; n < ARRAY_SIZE(results); n++)
                    for (int64_t e = 0; e < tensor_elements(&got.p.tensor[results[n]]); e++) {
                        const double x = tensor_get(&got.p.tensor[results[n]], e);
                        const double y = tensor_get(&want.p.tensor[results[n]], e);
                        if (fabs(x - y) > 1e-4 * fabs(y))
                            fail_msg("op %d, large %d, Sq %d: %s[%d] is %g, must be %g", op, large, (int)Sq,
                                     attn_tensors[results[n]].name, (int)e, x, y);
                    }
                fixture_clear(&got), fixture_clear(&want);
            }
}

/* ---- Tests of the limit on memory -------------------------------------------------------------------------------- */

static void test_memory_is_counted_and_limited(void **state)
{
    const attn_device_options options = { .threads = 2, .memory_bytes = 4 << 20 };
    /* K and V alone need 48 MiB or more in the form that the kernel reads, but the device may use only 4 MiB. */
    const struct spec s = SPEC(.B = 4, .H = 8, .Hk = 8, .Sq = 2048, .Sk = 2048);
    attn_device *device;
    attn_stream *stream;
    attn_device_info info;
    attn_error err = { 0 };
    void *memory[2];
    struct fixture f;
    (void)state;
    assert_int_equal(attn_device_open("cpu", 0, &options, &device, &err), ATTN_OK);
    assert_int_equal(attn_stream_open(device, &stream, &err), ATTN_OK);

    assert_int_equal(attn_device_alloc(device, 3 << 20, &memory[0], &err), ATTN_OK);
    assert_int_equal((uintptr_t)memory[0] % 64, 0);
    attn_device_describe(device, &info);
    assert_int_equal(info.memory_limit, 4 << 20);
    assert_true(info.memory_used >= 3 << 20);
    assert_int_equal(attn_staging_alloc(device, 2 << 20, &memory[1], &err), ATTN_NO_MEMORY);
    assert_null(memory[1]);
    attn_device_free(device, memory[0]);
    assert_int_equal(attn_staging_alloc(device, 2 << 20, &memory[1], &err), ATTN_OK);
    attn_staging_free(device, memory[1], 2 << 20);
    attn_device_describe(device, &info);
    assert_int_equal(info.memory_used, 0);

    fixture_make(&f, &s);
    assert_int_equal(attn_forward(stream, &f.p, NULL, &err), ATTN_NO_MEMORY);
    attn_device_describe(device, &info);
    assert_int_equal(info.memory_used, 0);
    fixture_clear(&f);
    attn_stream_close(stream);
    attn_device_close(device);
}

/* A merge joins results over parts of the keys. After a cancelled merge, the next one must be computed. */
static void test_a_merge_gives_up_when_it_is_cancelled(void **state)
{
    enum { ROWS = 1000 };
    static const int64_t out[] = { 1, ROWS, 1, 1 }, lse[] = { 1, 1, ROWS };
    static float outs[ROWS], lses[ROWS], whole[ROWS];
    struct bench bench;
    attn_error err = { 0 };
    int cancel = 0;
    (void)state;
    for (int n = 0; n < ROWS; n++) outs[n] = (float)n;
    const attn_result part = { attn_tensor_make(outs, ATTN_F32, 4, out), attn_tensor_make(lses, ATTN_F32, 3, lse) };
    const attn_merge_problem m = { .count = 1, .parts = &part, .whole.out = attn_tensor_make(whole, ATTN_F32, 4, out) };
    bench_open(&bench, "cpu", 3);
    attn_stream_heed(bench.stream, &cancel);
    attn_cancel(&cancel);
    assert_int_equal(attn_merge(bench.stream, &m, &err), ATTN_CANCELLED);
    for (int n = 0; n < ROWS; n++) assert_true(whole[n] == 0);
    attn_stream_heed(bench.stream, NULL);
    assert_int_equal(attn_merge(bench.stream, &m, &err), ATTN_OK);
    assert_memory_equal(whole, outs, sizeof outs);
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_item_runs_once_and_no_two_threads_share_a_worker_number),
        cmocka_unit_test(test_loops_of_several_callers_run_side_by_side),
        cmocka_unit_test(test_a_thread_that_begins_takes_the_place_of_a_worker_until_it_ends),
        cmocka_unit_test(test_an_item_may_wait_for_an_earlier_one),
        cmocka_unit_test(test_an_owner_with_two_streams_gives_one_up_while_another_owner_computes),
        cmocka_unit_test(test_the_workspace_that_is_asked_for_is_enough_whatever_the_lengths),
        cmocka_unit_test(test_strips_change_no_bit),
        cmocka_unit_test(test_a_run_that_nobody_waits_for_ends_between_two_tiles),
        cmocka_unit_test(test_a_run_in_double_that_nobody_waits_for_ends_between_two_rows),
        cmocka_unit_test(test_problems_that_are_computed_in_double_have_the_bits_of_the_reference),
        cmocka_unit_test(test_a_run_may_hold_problems_of_both_kernels),
        cmocka_unit_test(test_a_small_probability_counts_beside_a_large_value),
        cmocka_unit_test(test_memory_is_counted_and_limited),
        cmocka_unit_test(test_a_merge_gives_up_when_it_is_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
