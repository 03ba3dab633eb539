/* test_judge.c: tests the verdicts of a judge (kernels/judge/judge.h), which compares a client's results with exact
 * ones. Results of the reference backend and of the fast kernels must be judged correct. Results of a problem with one
 * option changed must be judged wrong, and the judge must name the change. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"
#include "kernels/fake/truth.h"
#include "kernels/judge/judge.h"

/* AddressSanitizer makes the judge (the check of a client's results) five times slower. Tests therefore use SHORTER
 * times fewer problems under AddressSanitizer. */
#ifdef __SANITIZE_ADDRESS__
enum { SHORTER = 5 };
#else
enum { SHORTER = 1 };
#endif

enum { TENSORS = ATTN_TENSOR_COUNT, SAMPLED_SEEDS = 200 / SHORTER };

static struct bench reference, cpu;

static int open_benches(void **state)
{
    (void)state;
    bench_open(&reference, "reference", 1);
    bench_open(&cpu, "cpu", 1);
    return 0;
}

static int close_benches(void **state)
{
    (void)state;
    bench_close(&reference);
    bench_close(&cpu);
    return 0;
}

static void compute(const struct bench *bench, const attn_problem *p)
{
    attn_error err = { 0 };
    attn_plan plan;
    if (attn_plan_make(attn_device_capabilities(bench->device), p, &plan, &err) != ATTN_OK ||
        attn_run(bench->stream, &plan, 1, NULL, &err) != ATTN_OK || attn_stream_wait(bench->stream, &err) != ATTN_OK)
        fail_msg("%s", err.text);
}

/* Moves a problem's results into the list `results`, because the judge reads a client's results from a list. Returns
 * the problem without its results. */
static attn_problem take_results(const attn_problem *p, attn_tensor results[TENSORS])
{
    attn_problem bare = *p;
    for (int id = 0; id < TENSORS; id++) {
        results[id] = (attn_tensor){ 0 };
        if (!(JUDGE_RESULTS >> id & 1)) continue;
        results[id] = p->tensor[id];
        bare.tensor[id] = (attn_tensor){ 0 };
    }
    return bare;
}

/* Lets the judge compare a client's results with exact ones. truth: float64 results of all rows, or NULL if the judge
 * must compute them. */
static void judge_with(const attn_problem *p, const attn_truth *truth, double seconds, judge_result *result)
{
    attn_tensor results[TENSORS];
    attn_error err = { 0 };
    judge *j;
    const attn_problem bare = take_results(p, results);
    if (judge_open(&bare, results, truth, seconds, &j, &err) != ATTN_OK) fail_msg("judge_open: %s", err.text);
    while (!judge_step(j)) {
    }
    judge_report(j, result);
    judge_close(j);
}

static void judge_all(const attn_problem *p, judge_result *result)
{
    judge_with(p, NULL, 1e9, result);
}

/* Computes the float64 results of all rows as a device stores them, in arrays from malloc(). */
static attn_truth truth_of(const attn_problem *p)
{
    attn_tensor results[TENSORS];
    const attn_problem bare = take_results(p, results);
    const attn_dims d = attn_dims_of(&bare);
    const size_t queries = (size_t)fake_truth_rows(&d, false) + 1, keys = (size_t)fake_truth_rows(&d, true) + 1;
    const bool backward = p->op == ATTN_OP_BACKWARD;
    const attn_truth t = { .out = malloc(queries * (size_t)d.Dv * sizeof(double)),
                           .lse = malloc(queries * sizeof(double)),
                           .dq = backward ? malloc(queries * (size_t)d.D * sizeof(double)) : NULL,
                           .dk = backward ? malloc(keys * (size_t)d.D * sizeof(double)) : NULL,
                           .dv = backward ? malloc(keys * (size_t)d.Dv * sizeof(double)) : NULL };
    for (int64_t head = 0; head < d.B * d.H; head++) assert_true(fake_truth_of_head(&bare, head, &t));
    return t;
}

/* Removes the gradients that no device computes in float64. */
static void without_sums(attn_problem *p)
{
    p->dbias = p->dsinks = p->dalibi_slopes = (attn_tensor){ 0 };
}

static void free_truth(attn_truth *t)
{
    free(t->out), free(t->lse), free(t->dq), free(t->dk), free(t->dv);
}

static void print(const judge_result *r)
{
    for (int id = 0; id < TENSORS; id++)
        if (r->given >> id & 1)
            fprintf(stderr, "  %s: %s max_abs %.3g explained %.3g limit %.3g wrong %lld of %lld nan %lld\n",
                    attn_tensors[id].name, judge_verdict_name(r->tensor[id].verdict), r->tensor[id].max_abs,
                    r->tensor[id].explained, r->tensor[id].limit, (long long)r->tensor[id].wrong,
                    (long long)r->tensor[id].of, (long long)r->tensor[id].nan);
    for (int n = 0; n < r->worst_count; n++)
        fprintf(stderr, "  worst: %s [%lld %lld %lld %lld] got %.9g want %.9g\n", attn_tensors[r->worst[n].id].name,
                (long long)r->worst[n].index[0], (long long)r->worst[n].index[1], (long long)r->worst[n].index[2],
                (long long)r->worst[n].index[3], r->worst[n].got, r->worst[n].want);
    for (int n = 0; n < r->place_count; n++)
        fprintf(stderr, "  where: %s %s\n", attn_tensors[r->place[n].id].name, r->place[n].what);
    for (int n = 0; n < r->explanation_count; n++)
        fprintf(stderr, "  %s %s: %s; now %.3g, if so %.3g\n", r->explanation[n].code,
                r->explanation[n].and_code ? r->explanation[n].and_code : "", r->explanation[n].detail,
                r->explanation[n].now, r->explanation[n].if_so);
}

static struct spec random_spec(uint64_t seed, attn_op op)
{
    static const double amps[] = { 1, 1, 1, 0.1, 3 };
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    struct rng r = { seed };
    struct spec s = SPEC(.op = op, .data_seed = seed);
    s.dtype = dtypes[rng_next(&r) % 3];
    s.out_dtype = s.dtype;
    s.bias_dtype = rng_chance(&r, 0.5) ? ATTN_F32 : s.dtype;
    s.Hk = rng_between(&r, 1, 3);
    s.H = s.Hk * rng_between(&r, 1, 3);
    s.B = rng_between(&r, 1, 2);
    s.Sq = rng_between(&r, 1, 80);
    s.Sk = rng_chance(&r, 0.1) ? 1 : rng_between(&r, 1, 150);
    s.D = rng_between(&r, 1, 70);
    s.Dv = rng_chance(&r, 0.5) ? s.D : rng_between(&r, 1, 40);
    s.q_amp = amps[rng_next(&r) % ARRAY_SIZE(amps)];
    s.layout = rng_chance(&r, 0.3) ? ATTN_BHSD : ATTN_BSHD;
    s.alignment = rng_chance(&r, 0.3) ? ATTN_TOP_LEFT : ATTN_BOTTOM_RIGHT;
    s.causal = rng_chance(&r, 0.4);
    if (rng_chance(&r, 0.2)) s.window_left = rng_between(&r, 0, 20);
    if (rng_chance(&r, 0.2)) s.window_right = rng_between(&r, 0, 20);
    if (rng_chance(&r, 0.2)) s.has_scale = true, s.scale = rng_chance(&r, 0.2) ? 0 : rng_normal(&r);
    if (rng_chance(&r, 0.2)) s.softcap = 1 + 20 * rng_uniform(&r);
    if (rng_chance(&r, 0.2)) s.dropout_p = 0.5, s.seed = rng_next(&r);
    if (rng_chance(&r, 0.2)) s.alibi = (int)rng_between(&r, 1, 2);
    if (rng_chance(&r, 0.2)) s.sinks = (int)rng_between(&r, 1, 2);
    s.dlse = op == ATTN_OP_BACKWARD && rng_chance(&r, 0.3);
    s.poison_unseen = rng_chance(&r, 0.2);
    if (rng_chance(&r, 0.25)) {
        s.layout = ATTN_BSHD;
        s.sequences = (int)rng_between(&r, 1, 4);
        for (int n = 0; n < s.sequences; n++)
            s.q_lengths[n] = (int)rng_between(&r, 0, 30), s.k_lengths[n] = (int)rng_between(&r, 0, 60);
        if (rng_chance(&r, 0.3)) s.gaps = 3;
        return s;
    }
    if (rng_chance(&r, 0.25)) s.bias = (int)rng_between(&r, 1, 8), s.bias_hidden = rng_chance(&r, 0.5) ? 0.3 : 0;
    if (rng_chance(&r, 0.25)) s.keep_mask = (int)rng_between(&r, 1, 8), s.keep = rng_uniform(&r);
    if (rng_chance(&r, 0.2))
        s.mask_bounds = s.causal ? (int)rng_between(&r, 1, 2) : 2 * (int)rng_between(&r, 1, 2),
        s.mask_heads = (int)rng_between(&r, 0, 2), s.mask_kind = (enum mask_kind)rng_between(&r, 0, MASK_KINDS - 1);
    s.seqlens_k = rng_chance(&r, 0.2);
    s.seqlens_q = rng_chance(&r, 0.1);
    return s;
}

static void right_results(const struct bench *bench, attn_op op, uint64_t seeds, judge_verdict most)
{
    for (uint64_t seed = 1; seed <= seeds / SHORTER; seed++) {
        const struct spec s = random_spec(seed, op);
        struct fixture f;
        judge_result result;
        fixture_make(&f, &s);
        compute(bench, &f.p);
        judge_all(&f.p, &result);
        if (result.verdict > most) {
            spec_print(stderr, &f.spec);
            print(&result);
            fail_msg("seed %llu: %s", (unsigned long long)seed, judge_verdict_name(result.verdict));
        }
        fixture_clear(&f);
    }
}

static void test_the_reference_matches_with_every_option(void **state)
{
    (void)state;
    right_results(&reference, ATTN_OP_FORWARD, 300, JUDGE_MATCH);
    right_results(&reference, ATTN_OP_BACKWARD, 300, JUDGE_MATCH);
}

static void test_the_fast_kernels_are_right_with_every_option(void **state)
{
    (void)state;
    right_results(&cpu, ATTN_OP_FORWARD, 600, JUDGE_ROUNDING);
    right_results(&cpu, ATTN_OP_BACKWARD, 300, JUDGE_ROUNDING);
}

/* ---- Tests of the mistakes that the judge of a client's results finds -------------------------------------------- */

static void without_causal(attn_problem *p)
{
    p->causal = false;
}

static void at_the_other_corner(attn_problem *p)
{
    p->alignment = p->alignment == ATTN_TOP_LEFT ? ATTN_BOTTOM_RIGHT : ATTN_TOP_LEFT;
}

static void with_scale_one(attn_problem *p)
{
    p->has_scale = true, p->scale = 1;
}

static void with_scale_squared(attn_problem *p)
{
    p->scale = 1.0 / (double)p->q.shape[3], p->has_scale = true;
}

static void without_softcap(attn_problem *p)
{
    p->softcap = 0;
}

static void without_bias(attn_problem *p)
{
    p->bias = (attn_tensor){ 0 };
}

static void without_keep_mask(attn_problem *p)
{
    p->keep_mask = (attn_tensor){ 0 };
}

static void without_alibi(attn_problem *p)
{
    p->alibi_slopes = (attn_tensor){ 0 };
}

static void without_sinks(attn_problem *p)
{
    p->sinks = (attn_tensor){ 0 };
}

static void without_lengths(attn_problem *p)
{
    p->seqlens_k = (attn_tensor){ 0 };
}

static void without_window(attn_problem *p)
{
    p->window_left = -1;
}

static void with_a_wider_window(attn_problem *p)
{
    p->window_left++;
}

static void without_dropout(attn_problem *p)
{
    p->dropout_p = 0;
}

static void with_seed_42(attn_problem *p)
{
    p->seed = 42;
}

static void with_q_in_the_other_layout(attn_problem *p)
{
    const attn_tensor q = p->q;
    p->q.stride[1] = q.shape[3], p->q.stride[2] = q.shape[1] * q.shape[3];
}

static void with_heads_reversed(attn_problem *p)
{
    p->k.data = (char *)p->k.data + (p->k.shape[2] - 1) * p->k.stride[2] * (int64_t)attn_dtype_bytes(p->k.dtype);
    p->v.data = (char *)p->v.data + (p->v.shape[2] - 1) * p->v.stride[2] * (int64_t)attn_dtype_bytes(p->v.dtype);
    p->k.stride[2] *= -1, p->v.stride[2] *= -1;
}

/* The judge gets the results of a problem with one mistake. It must name this mistake before any other. */
static void test_a_mistake_is_named(void **state)
{
    static const struct {
        const char *code;
        struct spec spec;
        void (*change)(attn_problem *p);
    } cases[] = {
        { "causal_missing", SPEC(.causal = true), without_causal },
        { "alignment", SPEC(.causal = true, .Sk = 90), at_the_other_corner },
        { "scale_missing", SPEC(.Sk = 50), with_scale_one },
        { "scale_twice", SPEC(.Sk = 50), with_scale_squared },
        { "softcap_missing", SPEC(.softcap = 1), without_softcap },
        { "bias_missing", SPEC(.bias = 8), without_bias },
        { "mask_ignored", SPEC(.keep_mask = 8, .keep = 0.5), without_keep_mask },
        { "alibi_missing", SPEC(.alibi = 1), without_alibi },
        { "sink_missing", SPEC(.H = 6, .sinks = 1), without_sinks },
        { "padding_attended", SPEC(.seqlens_k = true, .B = 4), without_lengths },
        { "window_missing", SPEC(.window_left = 5), without_window },
        { "window_off_by_one", SPEC(.window_left = 5), with_a_wider_window },
        { "dropout_missing", SPEC(.dropout_p = 0.3, .seed = 7), without_dropout },
        { "dropout_other_seed", SPEC(.dropout_p = 0.3, .seed = 7), with_seed_42 },
        { "layout_q", SPEC(.H = 4, .Hk = 4), with_q_in_the_other_layout },
        { "heads_reversed", SPEC(.H = 6, .Hk = 3), with_heads_reversed },
    };
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    (void)state;
    /* In the second half of the loop, the judge (the check of a client's results) gets float64 results, and a time
     * limit of 0. Within this limit it computes only a few rows with the rounding errors of a kernel. */
    for (size_t n = 0; n < ARRAY_SIZE(cases) * 12; n += SHORTER) {
        const bool sampled = n >= ARRAY_SIZE(cases) * 6;
        const size_t at = n / 6 % ARRAY_SIZE(cases);
        struct spec s = cases[at].spec;
        struct fixture f;
        judge_result result;
        s.op = n % 2 ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
        s.dtype = s.out_dtype = dtypes[n / 2 % 3];
        if (sampled) s.B = 8;
        fixture_make(&f, &s);
        if (sampled) without_sums(&f.p);
        attn_problem wrong = f.p;
        cases[at].change(&wrong);
        if (wrong.bias.rank == 0) wrong.dbias = (attn_tensor){ 0 }, f.p.dbias = wrong.dbias;
        if (wrong.sinks.rank == 0) wrong.dsinks = (attn_tensor){ 0 }, f.p.dsinks = wrong.dsinks;
        if (wrong.alibi_slopes.rank == 0)
            wrong.dalibi_slopes = (attn_tensor){ 0 }, f.p.dalibi_slopes = wrong.dalibi_slopes;
        compute(&reference, &wrong);
        attn_truth truth = truth_of(&f.p);
        judge_with(&f.p, sampled ? &truth : NULL, sampled ? 0 : 1e9, &result);
        assert_int_equal(result.rows_checked, result.rows_of);
        if (result.verdict != JUDGE_MISMATCH || result.explanation_count == 0 ||
            strcmp(result.explanation[0].code, cases[at].code)) {
            spec_print(stderr, &s);
            print(&result);
            fail_msg("%s is not named first%s", cases[at].code, sampled ? ", where few rows are emulated" : "");
        }
        free_truth(&truth);
        fixture_clear(&f);
    }
}

/* ---- Tests of the judge with float64 results (the truth) that a device has computed ------------------------------ */

/* Checks that two reports are equal bit for bit. */
static void expect_equal(const struct fixture *f, const judge_result *a, const judge_result *b)
{
    if (memcmp(a, b, sizeof *a) == 0) return;
    spec_print(stderr, &f->spec);
    print(a);
    print(b);
    fail_msg("the report depends on who computed the truth");
}

/* The judge's report must be the same whether the caller gives the float64 results or the judge computes them. The
 * client's results are alternately correct and wrong. */
static void test_a_given_truth_makes_no_difference(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 120 / SHORTER; seed++) {
        const struct spec s = random_spec(seed, seed % 2 ? ATTN_OP_FORWARD : ATTN_OP_BACKWARD);
        static judge_result own, given;
        struct fixture f;
        fixture_make(&f, &s);
        without_sums(&f.p);
        attn_problem computed = f.p;
        if (seed % 8 < 2) computed.causal = !computed.causal && computed.mask_startend_rows.rank == 0;
        compute(&cpu, &computed);
        attn_truth truth = truth_of(&f.p);
        judge_all(&f.p, &own);
        judge_with(&f.p, &truth, 1e9, &given);
        expect_equal(&f, &own, &given);
        free_truth(&truth);
        fixture_clear(&f);
    }
}

/* The judge (the check of a client's results) emulates a kernel for some rows, to learn the usual rounding errors.
 * It must not call a correct result wrong if there is only time for a few rows. */
static void test_right_results_are_right_where_few_rows_are_emulated(void **state)
{
    int sampled = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= SAMPLED_SEEDS; seed++) {
        struct spec s = random_spec(seed, seed % 3 ? ATTN_OP_FORWARD : ATTN_OP_BACKWARD);
        struct fixture f;
        judge_result result;
        s.B += 2, s.Hk += 3, s.H = s.Hk * (1 + (int64_t)seed % 2), s.mask_heads = 0;
        fixture_make(&f, &s);
        without_sums(&f.p);
        compute(&cpu, &f.p);
        attn_truth truth = truth_of(&f.p);
        judge_with(&f.p, &truth, 0, &result);
        assert_int_equal(result.rows_checked, result.rows_of);
        sampled += result.rows_emulated < result.rows_of;
        if (result.verdict > JUDGE_ROUNDING) {
            spec_print(stderr, &f.spec);
            print(&result);
            fail_msg("seed %llu: %s", (unsigned long long)seed, judge_verdict_name(result.verdict));
        }
        free_truth(&truth);
        fixture_clear(&f);
    }
    assert_true(sampled > SAMPLED_SEEDS / 2);
}

/* The judge tries mistakes such as reading a tensor at wrong addresses. It must not combine two of these, because it
 * would read past the end of the tensor. Here the client reads k transposed, and one head has an error that nothing
 * explains, so the judge tries pairs. */
static void test_mistakes_of_addresses_are_not_combined(void **state)
{
    struct spec s = SPEC(.H = 4, .Hk = 4, .Sq = 24, .Sk = 24, .D = 16, .Dv = 16);
    struct fixture f;
    judge_result result;
    float k[24 * 4 * 16];
    (void)state;
    for (int backward = 0; backward < 2; backward++) {
        s.op = backward ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
        fixture_make(&f, &s);
        attn_problem computed = f.p;
        const float *const own = f.p.k.data;
        for (int row = 0; row < 24; row++)
            for (int h = 0; h < 4; h++)
                for (int d = 0; d < 16; d++) k[(row * 4 + h) * 16 + d] = own[(d * 4 + h) * 24 + row];
        computed.k.data = k;
        compute(&cpu, &computed);
        for (int n = 0; n < 24 * 4 * 16; n++)
            if (n / 16 % 4 == 3) tensor_set(&f.p.out, n, 7 + n % 5);
        judge_all(&f.p, &result);
        assert_int_equal(result.verdict, JUDGE_MISMATCH);
        for (int n = 0; n < result.explanation_count; n++) assert_null(result.explanation[n].and_code);
        fixture_clear(&f);
    }
}

/* All heads share one head of k (stride 0), which must not be read with the strides of four heads. */
static void test_a_broadcast_tensor_is_not_read_with_another_layout(void **state)
{
    const struct spec s = SPEC(.H = 4, .Hk = 4, .Sq = 24, .Sk = 24, .D = 16, .Dv = 16);
    float *const one_head = malloc(24 * 16 * sizeof *one_head);
    struct fixture f;
    judge_result result;
    (void)state;
    fixture_make(&f, &s);
    for (int n = 0; n < 24 * 16; n++) one_head[n] = (float)tensor_get(&f.p.k, n);
    f.p.k.data = one_head;
    f.p.k.stride[1] = 16, f.p.k.stride[2] = 0;
    compute(&cpu, &f.p);
    for (int n = 0; n < 24 * 4 * 16; n += 3) tensor_set(&f.p.out, n, 7 + n % 5);
    judge_all(&f.p, &result);
    assert_int_equal(result.verdict, JUDGE_MISMATCH);
    fixture_clear(&f);
    free(one_head);
}

/* ---- Tests that a judge compares all rows of all results --------------------------------------------------------- */

/* Does what judge_with() does, but without a search for mistakes. Calls judge_hurry() after `hurry` steps; -1: does not
 * call it. */
static void only_verdict(const attn_problem *p, const attn_truth *truth, double seconds, int hurry,
                         judge_result *result)
{
    attn_tensor results[TENSORS];
    attn_error err = { 0 };
    judge *j;
    const attn_problem bare = take_results(p, results);
    if (judge_open(&bare, results, truth, seconds, &j, &err) != ATTN_OK) fail_msg("judge_open: %s", err.text);
    for (int n = 0; !judge_has_verdict(j); n++) {
        if (n == hurry) judge_hurry(j);
        judge_step(j);
    }
    judge_report(j, result);
    judge_close(j);
}

/* Problems with queries that see no key, keys that no query sees, or padding rows. */
static const struct spec lonely[] = {
    SPEC(.sequences = 3, .q_lengths = { 4, 3, 5 }, .k_lengths = { 4, 0, 6 }),
    SPEC(.op = ATTN_OP_BACKWARD, .sequences = 2, .q_lengths = { 0, 4 }, .k_lengths = { 4, 4 }),
    SPEC(.op = ATTN_OP_BACKWARD, .sequences = 7, .q_lengths = { 2, 0, 12, 3, 0, 5, 0 },
         .k_lengths = { 4, 9, 8, 0, 3, 6, 5 }),
    SPEC(.op = ATTN_OP_BACKWARD, .sequences = 7, .q_lengths = { 2, 0, 12, 3, 0, 5, 0 },
         .k_lengths = { 4, 9, 8, 0, 3, 6, 5 }, .gaps = 3),
    SPEC(.op = ATTN_OP_BACKWARD, .sequences = 2, .q_lengths = { 0, 0 }, .k_lengths = { 3, 2 }),
    SPEC(.op = ATTN_OP_BACKWARD, .B = 1, .Sq = 0, .Sk = 70),
    SPEC(.op = ATTN_OP_BACKWARD, .Sq = 5, .Sk = 0),
    SPEC(.op = ATTN_OP_BACKWARD, .B = 4, .Sq = 7, .Sk = 9, .seqlens_q = true, .seqlens_k = true),
    SPEC(.B = 4, .Sq = 7, .Sk = 9, .seqlens_q = true, .seqlens_k = true),
};

static void make_lonely(size_t n, struct fixture *f)
{
    struct spec s = lonely[n];
    s.H = 4, s.Hk = 2, s.D = 3, s.Dv = 2;
    fixture_make(f, &s);
    compute(&reference, &f->p);
}

static void expect_found(const struct fixture *f, attn_tensor_id id, int64_t at, const attn_truth *truth,
                         double seconds)
{
    const attn_tensor *const t = &f->p.tensor[id];
    const double right = tensor_get(t, at);
    judge_result result;
    tensor_set(t, at, 7);
    only_verdict(&f->p, truth, seconds, -1, &result);
    if (result.verdict != JUDGE_MISMATCH || result.tensor[id].wrong != 1 || result.worst_count != 1 ||
        result.worst[0].id != id || result.worst[0].got != 7) {
        spec_print(stderr, &f->spec);
        print(&result);
        fail_msg("element %lld of %s is not compared%s", (long long)at, attn_tensors[id].name,
                 !truth         ? ""
                 : seconds == 0 ? ", where few rows are emulated"
                                : ", where a device computes the truth");
    }
    tensor_set(t, at, right);
}

/* In these rows the correct number is 0 (or -inf for lse): out and dq of queries without keys, dk and dv of keys
 * without queries, and padding. */
static void test_a_wrong_number_is_found_in_any_row(void **state)
{
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(lonely); n++) {
        struct fixture f;
        judge_result result;
        make_lonely(n, &f);
        attn_truth truth = truth_of(&f.p);
        judge_all(&f.p, &result);
        assert_int_equal(result.verdict, JUDGE_MATCH);
        for (int id = 0; id < TENSORS; id++) {
            const attn_tensor *const t = &f.p.tensor[id];
            if (!(JUDGE_RESULTS >> id & 1) || t->rank == 0) continue;
            assert_int_equal(result.tensor[id].of, tensor_elements(t));
            const int64_t columns = id == ATTN_T_lse ? 1 : t->shape[t->rank - 1];
            for (int64_t at = 0; at < tensor_elements(t); at += columns) {
                expect_found(&f, (attn_tensor_id)id, at, NULL, 1e9);
                expect_found(&f, (attn_tensor_id)id, at, &truth, 1e9);
                expect_found(&f, (attn_tensor_id)id, at, &truth, 0);
            }
        }
        free_truth(&truth);
        fixture_clear(&f);
    }
}

static void test_a_wrong_key_without_queries_is_located(void **state)
{
    struct fixture f;
    judge_result result;
    (void)state;
    make_lonely(2, &f);
    attn_truth truth = truth_of(&f.p);
    for (int64_t e = 0; e < 3; e++) tensor_set(&f.p.dk, ((4 + 7) * 2 + 1) * 3 + e, 7);
    for (int way = 0; way < 3; way++) {
        judge_with(&f.p, way ? &truth : NULL, way == 2 ? 0 : 1e9, &result);
        if (result.place_count != 1 || strcmp(result.place[0].what, "key 7 of head 1 of sequence 1") ||
            result.explanation_count > 0) {
            print(&result);
            fail_msg("the wrong key is not located");
        }
    }
    free_truth(&truth);
    fixture_clear(&f);
}

/* A judge that is told to hurry does not judge keys whose dk and dv it has not computed yet. It must not call any
 * correct result wrong. */
static void test_a_judge_that_hurries_calls_no_right_result_wrong(void **state)
{
    bool hurried = false;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(lonely); n++)
        for (int steps = 0; steps < 60; steps++) {
            struct fixture f;
            judge_result result;
            make_lonely(n, &f);
            only_verdict(&f.p, NULL, 1e9, steps, &result);
            hurried |= result.rows_checked < result.rows_of;
            if (result.verdict > JUDGE_MATCH || result.place_count > 0) {
                spec_print(stderr, &f.spec);
                print(&result);
                fail_msg("a right result is wrong after %d steps", steps);
            }
            fixture_clear(&f);
        }
    assert_true(hurried);
}

/* ---- Tests of long backwards (with many queries and keys) -------------------------------------------------------- */

/* A backward so long that the judge emulates a kernel for only a few of its tiles. Four query heads share a
 * key/value head. */
static const struct spec long_backward = SPEC(.op = ATTN_OP_BACKWARD, .dtype = ATTN_BF16, .out_dtype = ATTN_BF16,
                                              .H = 8, .Hk = 2, .Sq = 800, .Sk = 800, .D = 64, .Dv = 64,
                                              .plain_grads = true);

/* A head of this problem takes 5 * 10^10 multiply-adds. The judge (the check of a client's results) does not compute so
 * many itself, but asks for float64 results that a device computes. */
static void test_the_truth_of_a_long_backward_is_for_a_device(void **state)
{
    static const attn_tensor_id long_tensors[] = { ATTN_T_q,  ATTN_T_k,  ATTN_T_v, ATTN_T_dout,
                                                   ATTN_T_dq, ATTN_T_dk, ATTN_T_dv };
    const uint64_t wanted = ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) |
                            ATTN_TENSOR_BIT(dv);
    struct spec s = long_backward;
    struct fixture f;
    attn_tensor results[TENSORS];
    (void)state;
    s.H = s.Hk = 16, s.Sq = s.Sk = 8, s.D = s.Dv = 128;
    fixture_make(&f, &s);
    for (size_t n = 0; n < ARRAY_SIZE(long_tensors); n++) f.p.tensor[long_tensors[n]].shape[1] = 8192;
    const attn_problem bare = take_results(&f.p, results);
    assert_int_equal(judge_wants(&bare, results), wanted);
    fixture_clear(&f);
}

/* Computes a long backward with the fast kernels, and returns its float64 results. If `change` is given, the kernels
 * compute the changed problem. */
static attn_truth make_long(struct fixture *f, bool causal, void (*change)(attn_problem *p))
{
    struct spec s = long_backward;
    s.causal = causal;
    fixture_make(f, &s);
    attn_problem computed = f->p;
    if (change) change(&computed);
    compute(&cpu, &computed);
    return truth_of(&f->p);
}

static void test_a_right_long_backward_is_right(void **state)
{
    (void)state;
    for (int causal = 0; causal < 2; causal++) {
        struct fixture f;
        judge_result result;
        attn_truth truth = make_long(&f, causal, NULL);
        judge_with(&f.p, &truth, 1, &result);
        assert_int_equal(result.rows_checked, 6400);
        assert_in_range(result.rows_emulated, 1, 3200);
        if (result.verdict > JUDGE_ROUNDING) print(&result);
        assert_true(result.verdict <= JUDGE_ROUNDING);
        free_truth(&truth);
        fixture_clear(&f);
    }
}

/* The judge must locate a few wrong numbers of one gradient, and accept the other two gradients. */
static void test_a_wrong_tile_of_a_long_backward_is_found(void **state)
{
    static const struct {
        attn_tensor_id id;
        int64_t head, first, count;
        const char *says;
    } cases[] = {
        { ATTN_T_dq, 3, 512, 64, "queries 512 to 575 of head 3" },
        { ATTN_T_dk, 1, 704, 32, "keys 704 to 735 of head 1" },
        { ATTN_T_dv, 0, 799, 1, "key 799 of head 0" },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n += SHORTER) {
        struct fixture f;
        judge_result result;
        attn_truth truth = make_long(&f, true, NULL);
        attn_tensor *const t = &f.p.tensor[cases[n].id];
        for (int64_t row = 0; row < cases[n].count; row++)
            for (int64_t e = 0; e < 64; e++) {
                const int64_t at = ((cases[n].first + row) * t->shape[2] + cases[n].head) * 64 + e;
                attn_store(t->dtype, t->data, at, attn_load(t->dtype, t->data, at) + 1);
            }
        judge_with(&f.p, &truth, 1, &result);
        if (result.verdict != JUDGE_MISMATCH || result.place_count != 1 || result.explanation_count != 0 ||
            result.tensor[cases[n].id].wrong != cases[n].count * 64 || strcmp(result.place[0].what, cases[n].says)) {
            print(&result);
            fail_msg("%s is not found", cases[n].says);
        }
        free_truth(&truth);
        fixture_clear(&f);
    }
}

static const judge_explanation *first_explanation(const judge_result *result, const char *code)
{
    if (result->explanation_count == 0 || strcmp(result->explanation[0].code, code)) {
        print(result);
        fail_msg("%s is not named first", code);
    }
    return &result->explanation[0];
}

static void test_a_mistake_in_a_long_backward_is_named(void **state)
{
    const uint64_t gradients = ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv);
    struct fixture f;
    judge_result result;
    bool left_out = false;
    (void)state;
    /* Other tests run the same code, so this one is skipped under AddressSanitizer, where it takes a minute. */
    if (SHORTER > 1) skip();
    attn_truth truth = make_long(&f, true, without_causal);
    judge_with(&f.p, &truth, 1, &result);
    assert_int_equal(first_explanation(&result, "causal_missing")->tensors, gradients);
    f.p.dq = (attn_tensor){ 0 };
    judge_with(&f.p, &truth, 1, &result);
    assert_int_equal(result.verdict, JUDGE_MISMATCH);
    for (int n = 0; n < result.not_tried_count; n++) left_out |= strcmp(result.not_tried[n], "causal_missing") == 0;
    assert_true(left_out);
    free_truth(&truth);
    fixture_clear(&f);
}

static void with_dk_of_scale_one(attn_tensor *dk, double scale)
{
    const int64_t elements = dk->shape[0] * dk->shape[1] * dk->shape[2] * dk->shape[3];
    for (int64_t n = 0; n < elements; n++)
        attn_store(dk->dtype, dk->data, n, attn_load(dk->dtype, dk->data, n) / scale);
}

/* Only dk is wrong here. The problem has no dq, so the judge (the check of a client's results) tests mistakes on tiles
 * of keys only. */
static void test_a_mistake_in_long_gradients_is_named(void **state)
{
    struct fixture f;
    judge_result result;
    (void)state;
    attn_truth truth = make_long(&f, true, NULL);
    f.p.dq = (attn_tensor){ 0 };
    with_dk_of_scale_one(&f.p.dk, 0.125);
    judge_with(&f.p, &truth, 1, &result);
    assert_int_equal(first_explanation(&result, "scale_missing_in_dk")->tensors, ATTN_TENSOR_BIT(dk));
    assert_int_equal(result.rows_emulated, 0);
    free_truth(&truth);
    fixture_clear(&f);
}

/* In a long backward, the judge tests pairs of mistakes on tiles of keys. This needs correct out and lse: with wrong
 * ones, the judge would have to compute a forward of a whole group of heads. */
static void test_two_mistakes_in_long_gradients_are_named(void **state)
{
    struct spec s = long_backward;
    struct fixture f;
    judge_result result;
    (void)state;
    if (SHORTER > 1) skip();
    s.causal = s.dlse = true;
    fixture_make(&f, &s);
    attn_problem wrong = f.p;
    wrong.dlse = (attn_tensor){ 0 };
    compute(&cpu, &wrong);
    with_dk_of_scale_one(&f.p.dk, 0.125);
    attn_truth truth = truth_of(&f.p);
    judge_with(&f.p, &truth, 1, &result);
    const judge_explanation *const e = first_explanation(&result, "dlse_missing");
    if (!e->and_code || strcmp(e->and_code, "scale_missing_in_dk") != 0) {
        print(&result);
        fail_msg("the second mistake is not named");
    }
    assert_int_equal(e->tensors, ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk));
    free_truth(&truth);
    fixture_clear(&f);
}

static void test_a_mask_missing_in_long_gradients_is_named(void **state)
{
    struct spec s = long_backward;
    struct fixture f;
    judge_result result;
    (void)state;
    /* Other tests run the same code, so this one is skipped under AddressSanitizer to save time. */
    if (SHORTER > 1) skip();
    s.causal = s.give_forward = true;
    fixture_make(&f, &s);
    attn_problem wrong = f.p;
    wrong.causal = false;
    compute(&reference, &wrong);
    f.p.out = f.p.lse = f.p.dq = (attn_tensor){ 0 };
    attn_truth truth = truth_of(&f.p);
    judge_with(&f.p, &truth, 1, &result);
    const judge_explanation *const e = first_explanation(&result, "causal_missing");
    assert_int_equal(e->tensors, ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv));
    assert_non_null(strstr(e->detail, "in the backward"));
    free_truth(&truth);
    fixture_clear(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_results_are_right_where_few_rows_are_emulated),
        cmocka_unit_test(test_a_given_truth_makes_no_difference),
        cmocka_unit_test(test_the_reference_matches_with_every_option),
        cmocka_unit_test(test_the_fast_kernels_are_right_with_every_option),
        cmocka_unit_test(test_a_mistake_is_named),
        cmocka_unit_test(test_mistakes_of_addresses_are_not_combined),
        cmocka_unit_test(test_a_broadcast_tensor_is_not_read_with_another_layout),
        cmocka_unit_test(test_a_wrong_number_is_found_in_any_row),
        cmocka_unit_test(test_a_wrong_key_without_queries_is_located),
        cmocka_unit_test(test_a_judge_that_hurries_calls_no_right_result_wrong),
        cmocka_unit_test(test_the_truth_of_a_long_backward_is_for_a_device),
        cmocka_unit_test(test_a_right_long_backward_is_right),
        cmocka_unit_test(test_a_wrong_tile_of_a_long_backward_is_found),
        cmocka_unit_test(test_a_mistake_in_a_long_backward_is_named),
        cmocka_unit_test(test_a_mistake_in_long_gradients_is_named),
        cmocka_unit_test(test_two_mistakes_in_long_gradients_are_named),
        cmocka_unit_test(test_a_mask_missing_in_long_gradients_is_named),
    };
    return cmocka_run_group_tests(tests, open_benches, close_benches);
}
