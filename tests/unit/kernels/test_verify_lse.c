/* test_verify_lse.c: tests which lse verify_lse.c accepts as input of a backward: the lse of the problem's keys, or
 * of more keys (as in ring attention). It must recognise and name other conventions, such as base 2. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"
#include "kernels/verify_lse.h"

enum { PLENTY = 1 << 28 };

static attn_status look(const struct fixture *f, attn_error *err)
{
    *err = (attn_error){ 0 };
    return attn_check_lse(&f->p, PLENTY, err);
}

/* Returns a random backward that is given out and lse. Each option occurs in some of these random problems. */
static struct spec random_spec(uint64_t seed)
{
    static const double amps[] = { 1, 1, 1, 0.1, 1e-3, 3, 10 };
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    struct rng r = { seed };
    struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .give_forward = true, .data_seed = seed);
    s.dtype = dtypes[rng_next(&r) % 3];
    s.out_dtype = s.dtype;
    s.bias_dtype = rng_chance(&r, 0.5) ? ATTN_F32 : s.dtype;
    s.Hk = rng_between(&r, 1, 2);
    s.H = s.Hk * rng_between(&r, 1, 3);
    s.B = rng_between(&r, 1, 2);
    s.Sq = rng_between(&r, 1, 20);
    s.Sk = rng_chance(&r, 0.1) ? 1 : rng_between(&r, 1, 40);
    s.D = rng_between(&r, 1, 40);
    s.Dv = rng_chance(&r, 0.5) ? s.D : rng_between(&r, 1, 20);
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
    if (rng_chance(&r, 0.2)) s.sinks = (int)rng_between(&r, 1, 3);
    s.strided = rng_chance(&r, 0.3);
    if (rng_chance(&r, 0.25)) {
        s.layout = ATTN_BSHD;
        s.sequences = (int)rng_between(&r, 1, 4);
        for (int n = 0; n < s.sequences; n++)
            s.q_lengths[n] = (int)rng_between(&r, 0, 9), s.k_lengths[n] = (int)rng_between(&r, 0, 20);
        return s;
    }
    if (rng_chance(&r, 0.25)) s.bias = (int)rng_between(&r, 1, 8), s.bias_hidden = rng_chance(&r, 0.5) ? 0.3 : 0;
    if (s.bias && s.bias_dtype == ATTN_F32 && rng_chance(&r, 0.3)) s.bias_levels = (int)rng_between(&r, 1, 2);
    if (rng_chance(&r, 0.25)) s.keep_mask = (int)rng_between(&r, 1, 8), s.keep = rng_uniform(&r);
    if (s.keep_mask && rng_chance(&r, 0.2)) s.keep_tail = (int)rng_between(&r, 1, 9);
    if (rng_chance(&r, 0.2))
        s.mask_bounds = s.causal ? (int)rng_between(&r, 1, 2) : 2 * (int)rng_between(&r, 1, 2),
        s.mask_heads = (int)rng_between(&r, 0, 2), s.mask_kind = (enum mask_kind)rng_between(&r, 0, MASK_KINDS - 1);
    s.seqlens_k = rng_chance(&r, 0.2);
    return s;
}

/* Returns a random observe (a request for attention weights) that gets lse as an input. */
static struct spec random_observe(uint64_t seed)
{
    struct rng r = { seed + 4711 };
    struct spec s = random_spec(seed);
    s.op = ATTN_OP_OBSERVE;
    s.given_lse = true;
    s.give_forward = false;
    s.dropout_p = 0;
    s.observe = ATTN_TENSOR_BIT(entropy);
    if (rng_chance(&r, 0.3)) {
        if (rng_chance(&r, 0.5)) s.dtype = ATTN_F8E4M3, s.out_dtype = ATTN_BF16, s.bias_dtype = ATTN_F32;
        else s.fp8_keys = true;
        s.fp8_scales = rng_chance(&r, 0.7);
        s.scale_axes = (int)rng_between(&r, 0, 4);
    }
    if (!s.sequences && !s.bias && !s.keep_mask && !s.mask_bounds && rng_chance(&r, 0.5)) {
        s.layout = ATTN_BSHD;
        s.strided = false;
        s.page_size = (int)rng_between(&r, 1, 8);
        s.Sk = s.page_size * rng_between(&r, 1, 6);
        s.seqlens_k = true;
    }
    return s;
}

static void must_pass(const struct fixture *f, const char *what)
{
    attn_error err;
    if (look(f, &err) == ATTN_OK) return;
    spec_print(stderr, &f->spec);
    fail_msg("%s: %s", what, err.text);
}

static void test_the_lse_of_the_scores_passes_with_every_option(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        const struct spec s = random_spec(seed);
        struct fixture f;
        fixture_make(&f, &s);
        must_pass(&f, "the right lse");
        fixture_clear(&f);
    }
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        const struct spec s = random_observe(seed);
        struct fixture f;
        fixture_make(&f, &s);
        must_pass(&f, "the right lse of an observe");
        fixture_clear(&f);
    }
}

/* The lse of an observe (a request for attention weights) is checked too. Float8 has wide tolerances, so only rows with
 * many keys and small scores show that it is in base 2. */
static void test_an_observe_is_told_that_its_lse_is_in_base_2(void **state)
{
    static const struct spec specs[] = {
        SPEC(.op = ATTN_OP_OBSERVE, .given_lse = true, .Sk = 100),
        SPEC(.op = ATTN_OP_OBSERVE, .given_lse = true, .Sk = 100, .causal = true, .dtype = ATTN_BF16),
        SPEC(.op = ATTN_OP_OBSERVE, .given_lse = true, .causal = true, .Sq = 1000, .Sk = 1000, .dtype = ATTN_F8E4M3,
             .out_dtype = ATTN_BF16, .fp8_scales = true, .scale_axes = 1, .q_amp = 0.3),
        SPEC(.op = ATTN_OP_OBSERVE, .given_lse = true, .B = 4, .H = 4, .Sq = 1000, .Sk = 1024, .dtype = ATTN_BF16,
             .fp8_keys = true, .fp8_scales = true, .page_size = 16, .seqlens_k = true, .causal = true),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(specs); n++) {
        struct fixture f;
        attn_error err;
        fixture_make(&f, &specs[n]);
        must_pass(&f, "the right lse of an observe");
        for (int64_t i = 0; i < tensor_elements(&f.p.lse); i++)
            tensor_set(&f.p.lse, i, tensor_get(&f.p.lse, i) / M_LN2);
        if (look(&f, &err) != ATTN_INVALID || !strstr(err.text, "your lse is in base 2: multiply it by 0.6931472"))
            fail_msg("%zu: %s", n, err.text);
        fixture_clear(&f);
    }
}

static void test_the_lse_of_the_kernels_passes(void **state)
{
    struct bench cpu;
    (void)state;
    bench_open(&cpu, "cpu", 1);
    for (uint64_t seed = 1; seed <= 400; seed++) {
        struct spec s = random_spec(seed);
        struct fixture f;
        attn_error err = { 0 };
        attn_plan plan;
        fixture_make(&f, &s);
        attn_problem forward = f.p;
        forward.op = ATTN_OP_FORWARD;
        assert_int_equal(attn_plan_make(attn_device_capabilities(cpu.device), &forward, &plan, &err), ATTN_OK);
        assert_int_equal(attn_run(cpu.stream, &plan, 1, NULL, &err), ATTN_OK);
        must_pass(&f, "the kernels' lse");
        fixture_clear(&f);
    }
    bench_close(&cpu);
}

/* A client's forward may have used q and k in float32, before they were rounded to 16 bits. */
static void test_the_lse_of_unrounded_tensors_passes(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 1000; seed++) {
        struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .give_forward = true, .Sq = 20, .Sk = 50, .D = 64, .Dv = 8,
                             .q_amp = seed % 3 == 0 ? 3 : 1, .causal = seed % 2 == 0, .data_seed = seed);
        struct fixture whole, rounded;
        fixture_make(&whole, &s);
        s.dtype = seed % 4 < 2 ? ATTN_BF16 : ATTN_F16;
        s.out_dtype = s.dtype;
        fixture_make(&rounded, &s); /* the same problem as `whole`, with q and k rounded to 16 bits */
        memcpy(rounded.p.lse.data, whole.p.lse.data, (size_t)tensor_elements(&whole.p.lse) * sizeof(float));
        must_pass(&rounded, "the lse of unrounded tensors");
        fixture_clear(&whole);
        fixture_clear(&rounded);
    }
}

/* Restricts the problem to keys [first, end) without copying. */
static void cut_keys(struct fixture *f, int64_t first, int64_t end)
{
    attn_tensor *const of_keys[] = { &f->p.k, &f->p.v, &f->p.dk, &f->p.dv }, *const of_pairs[] = { &f->p.bias,
                                                                                                   &f->p.keep_mask };
    const int axis = f->p.layout == ATTN_BHSD ? 2 : 1;
    for (size_t n = 0; n < ARRAY_SIZE(of_keys); n++) {
        attn_tensor *const t = of_keys[n];
        if (t->rank == 0) continue;
        t->data = (char *)t->data + (size_t)(first * t->stride[axis]) * attn_dtype_bytes(t->dtype);
        t->shape[axis] = end - first;
    }
    for (size_t n = 0; n < ARRAY_SIZE(of_pairs); n++) {
        attn_tensor *const t = of_pairs[n];
        if (t->rank == 0) continue;
        t->data = (char *)t->data + (size_t)first * attn_dtype_bytes(t->dtype);
        t->shape[3] = end - first;
    }
}

/* In ring attention, a server gets a part of the keys together with the lse of all keys. If parts have equal lengths,
 * the sum of e^score over all keys is about a whole number of times the sum over one part. */
static void test_a_part_of_the_keys_with_the_lse_of_all_passes(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        struct rng r = { seed + 1000000 };
        struct spec s = random_spec(seed);
        struct fixture f;
        if (s.sequences) continue;
        s.seqlens_k = false, s.mask_bounds = 0, s.window_left = s.window_right = -1, s.alibi = 0, s.keep_tail = 0;
        s.alignment = ATTN_BOTTOM_RIGHT;
        const int64_t parts = rng_between(&r, 2, 8), part = rng_between(&r, 0, parts - 1), of_part = s.Sk;
        s.Sk *= parts;
        /* With a causal mask, the queries belong to the last tokens of the sequence. Their number is the number of keys
         * in one part. */
        if (s.causal) s.Sq = of_part;
        fixture_make(&f, &s);
        cut_keys(&f, part * of_part, (part + 1) * of_part);
        if (f.p.causal && part < parts - 1) f.p.causal = false;
        /* The lse includes the sinks, but a client may send the backward without them. */
        if (f.p.sinks.rank && rng_chance(&r, 0.5)) f.p.sinks.rank = 0, f.p.dsinks.rank = 0;
        must_pass(&f, "a part of the keys");
        fixture_clear(&f);
    }
}

/* If all scores are equal, the lse of n keys in base 2 equals the natural lse of a larger number of keys. The check
 * must accept such an lse, because in ring attention a part of the keys comes with the lse of all keys. */
static void test_parts_of_equal_scores_pass_whatever_their_number(void **state)
{
    struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .give_forward = true, .Sq = 16, .Sk = 128, .D = 8, .Dv = 8,
                         .has_scale = true, .scale = 0);
    struct fixture f;
    (void)state;
    fixture_make(&f, &s);
    for (int keys = 128; keys <= 1 << 15; keys++) {
        for (int64_t n = 0; n < tensor_elements(&f.p.lse); n++) tensor_set(&f.p.lse, n, log(keys));
        must_pass(&f, "equal scores");
    }
    fixture_clear(&f);
}

static void test_rows_that_say_nothing_pass(void **state)
{
    static const double values[] = { -INFINITY, INFINITY, NAN, 3e38, -3e38 };
    struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .give_forward = true, .Sq = 9, .Sk = 5, .D = 8, .Dv = 8,
                         .causal = true);
    struct fixture f;
    (void)state;
    fixture_make(&f, &s);
    must_pass(&f, "rows that see nothing");
    for (size_t v = 0; v < ARRAY_SIZE(values); v++) {
        for (int64_t n = 0; n < tensor_elements(&f.p.lse); n++) tensor_set(&f.p.lse, n, values[v]);
        must_pass(&f, "lse that is no sum's");
    }
    fixture_clear(&f);
    for (int empty = 0; empty < 3; empty++) {
        s.B = empty == 0 ? 0 : 1, s.Sq = empty == 1 ? 0 : 9, s.Sk = empty == 2 ? 0 : 5;
        fixture_make(&f, &s);
        must_pass(&f, "no rows, or no keys");
        fixture_clear(&f);
    }
}

/* ---- Tests of lse in other conventions, such as base 2 ----------------------------------------------------------- */

#define OF_FORWARD ": send the options of that forward"

static const struct {
    const char *says;
    double factor; /* factor by which lse is multiplied; 0 stands for 1 */
    enum { NONE, SCALE_1, SCALE_DV, SCALE_2, PLACES, KEEP, ROWS, BIAS, ALIBI, SOFTCAP, SINKS, ALL } without;
} conversions[] = {
    { "your lse is in base 2: multiply it by 0.6931472, for the natural logarithm is wanted", 1 / 0.6931471805599453,
      NONE },
    { "your lse was computed with scale 1, 1" OF_FORWARD, 0, SCALE_1 },
    { "your lse was computed with scale 1/sqrt(Dv), 0.25" OF_FORWARD, 0, SCALE_DV },
    { "your lse was computed with the square of scale, 0.09" OF_FORWARD, 0, SCALE_2 },
    { "your lse was computed with no causal and no window" OF_FORWARD, 0, PLACES },
    { "your lse was computed with no keep_mask" OF_FORWARD, 0, KEEP },
    { "your lse was computed with no mask_startend_rows" OF_FORWARD, 0, ROWS },
    { "your lse was computed with no bias" OF_FORWARD, 0, BIAS },
    { "your lse was computed with no alibi_slopes" OF_FORWARD, 0, ALIBI },
    { "your lse was computed with no softcap" OF_FORWARD, 0, SOFTCAP },
    { "your lse was computed with no sinks" OF_FORWARD, 0, SINKS },
    { "your lse was computed with no mask at all" OF_FORWARD, 0, ALL },
};

static void convert(attn_problem *p, int without)
{
    switch (without) {
    case SCALE_1: p->has_scale = true, p->scale = 1; break;
    case SCALE_DV: p->has_scale = true, p->scale = 0.25; break;
    case SCALE_2: p->has_scale = true, p->scale = 0.09; break;
    case ALL: p->keep_mask.rank = p->bias.rank = p->mask_startend_rows.rank = 0; /* fall through */
    case PLACES: p->causal = false, p->window_left = p->window_right = -1; break;
    case KEEP: p->keep_mask.rank = 0; break;
    case ROWS: p->mask_startend_rows.rank = 0; break;
    case BIAS: p->bias.rank = 0; break;
    case ALIBI: p->alibi_slopes.rank = 0; break;
    case SOFTCAP: p->softcap = 0; break;
    case SINKS: p->sinks.rank = 0; break;
    default: break;
    }
}

static void test_each_conversion_is_named(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    (void)state;
    for (size_t c = 0; c < ARRAY_SIZE(conversions); c++)
        for (uint64_t seed = 1; seed <= 60; seed++) {
            const int without = conversions[c].without;
            struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .give_forward = true, .H = 4, .Hk = 2, .Sq = 40, .Sk = 60,
                                 .D = 32, .Dv = 16, .data_seed = seed);
            struct fixture f;
            attn_error err;
            s.dtype = s.out_dtype = dtypes[seed % 3];
            s.layout = seed % 2 ? ATTN_BHSD : ATTN_BSHD;
            s.causal = without == PLACES || without == ALL || (without != ROWS && seed % 5 == 0);
            if (without == PLACES && seed % 2) s.window_left = 7;
            if (without == KEEP || without == ALL) s.keep_mask = 8, s.keep = 0.6;
            if (without == ROWS) s.mask_bounds = 2, s.mask_kind = MASK_WINDOW;
            if (without == BIAS) s.bias = 8, s.bias_hidden = seed % 2 ? 0.3 : 0;
            if (without == ALIBI) s.alibi = 1;
            if (without == SOFTCAP) s.softcap = 1;
            if (without == SINKS) s.sinks = 1;
            if (without == SCALE_2) s.has_scale = true, s.scale = 0.3;
            if (seed % 7 == 0 && without < KEEP)
                s.layout = ATTN_BSHD, s.sequences = 3, s.q_lengths[0] = 20, s.q_lengths[2] = 20, s.k_lengths[0] = 30,
                s.k_lengths[1] = 4, s.k_lengths[2] = 25;
            fixture_make(&f, &s);
            for (int64_t h = 0; f.p.sinks.rank && h < s.H; h++) tensor_set(&f.p.sinks, h, 2 + 0.5 * (double)h);
            attn_problem forward = f.p;
            forward.op = ATTN_OP_FORWARD;
            convert(&forward, without);
            run_reference(&forward);
            for (int64_t n = 0; conversions[c].factor != 0 && n < tensor_elements(&f.p.lse); n++)
                tensor_set(&f.p.lse, n, tensor_get(&f.p.lse, n) * conversions[c].factor);
            if (look(&f, &err) != ATTN_INVALID || !strstr(err.text, conversions[c].says) ||
                strcmp(err.member, "/lse")) {
                spec_print(stderr, &s);
                fail_msg("%s: is '%s'", conversions[c].says, err.text);
            }
            fixture_clear(&f);
        }
}

static void test_a_sum_above_1_is_refused_by_row_sum_and_rule(void **state)
{
    float q[] = { 0, 0, 0, 0, 0, 0 }, lse[] = { 1, 2, 2 }, packed[] = { 0, 1.0986123f, 1.0986123f };
    int32_t cu[] = { 0, 1, 3 };
    attn_problem p = ATTN_PROBLEM_INIT;
    attn_error err = { 0 };
    (void)state;
    p.op = ATTN_OP_BACKWARD;
    p.q = p.k = p.v = p.out = p.dout = attn_tensor_make(q, ATTN_F32, 4, (int64_t[]){ 1, 3, 1, 2 });
    p.lse = attn_tensor_make(lse, ATTN_F32, 3, (int64_t[]){ 1, 1, 3 });
    assert_int_equal(attn_check(&p, &err), ATTN_OK);
    assert_int_equal(attn_check_lse(&p, PLENTY, &err), ATTN_INVALID);
    assert_string_equal(err.text,
                        "lse: [0, 0, 0] is 1, with which the probabilities of the row sum to 1.104, must be at most 1");
    assert_string_equal(err.member, "/lse");
    /* attn_check_lse() may read 0 rows of lse here, so it finds no error and accepts everything. */
    assert_int_equal(attn_check_lse(&p, 0, &err), ATTN_OK);
    lse[0] = 1.0986123f;
    assert_int_equal(attn_check_lse(&p, PLENTY, &err), ATTN_OK);

    p.q = p.k = p.v = p.out = p.dout = attn_tensor_make(q, ATTN_F32, 3, (int64_t[]){ 3, 1, 2 });
    p.lse = attn_tensor_make(packed, ATTN_F32, 2, (int64_t[]){ 1, 3 });
    p.cu_seqlens_q = p.cu_seqlens_k = attn_tensor_make(cu, ATTN_I32, 1, (int64_t[]){ 3 });
    assert_int_equal(attn_check(&p, &err), ATTN_OK);
    assert_int_equal(attn_check_lse(&p, PLENTY, &err), ATTN_OK);
    packed[2] = -1;
    assert_int_equal(attn_check_lse(&p, PLENTY, &err), ATTN_INVALID);
    assert_string_equal(err.text,
                        "lse: [0, 2] is -1, with which the probabilities of the row sum to 5.437, must be at most 1");
}

/* attn_check_lse() reads only some heads and rows. It must read the same ones if a request is repeated. */
static void test_the_same_request_gets_the_same_answer(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 50; seed++) {
        struct spec s = random_spec(seed);
        struct fixture f;
        attn_error first, second;
        fixture_make(&f, &s);
        for (int64_t n = 0; n < tensor_elements(&f.p.lse); n += 3) tensor_set(&f.p.lse, n, tensor_get(&f.p.lse, n) - 1);
        assert_int_equal(look(&f, &first), look(&f, &second));
        assert_string_equal(first.text, second.text);
        fixture_clear(&f);
    }
}

/* Needs a device, which ATTN_BACKEND names. The device's sums over rows of scores must agree with the host's sums
 * within 1e-9. */
static void test_a_device_sums_up_what_the_host_does(void **state)
{
    const char *const backend = getenv("ATTN_BACKEND"), *const brief = getenv("ATTN_BRIEF");
    const uint64_t seeds = brief && strcmp(brief, "0") != 0 ? 100 : 400;
    struct bench b;
    (void)state;
    if (!backend) skip();
    bench_open(&b, backend, 0);
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        const struct spec s = seed % 2 ? random_spec(seed) : random_observe(seed);
        struct fixture f;
        attn_lse_look found = { 0 }, want;
        attn_error err = { 0 };
        void *blocks[ATTN_TENSOR_COUNT] = { 0 }, *memory;
        fixture_make(&f, &s);
        attn_problem p = f.p;
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            if (!f.block[id]) continue;
            assert_int_equal(attn_device_alloc(b.device, f.block_bytes[id], &blocks[id], &err), ATTN_OK);
            assert_int_equal(attn_copy(b.stream, blocks[id], f.block[id], f.block_bytes[id], ATTN_TO_DEVICE, &err),
                             ATTN_OK);
            p.tensor[id].data = (char *)blocks[id] + ((uint8_t *)p.tensor[id].data - f.block[id]);
        }
        attn_lse_choose(&f.p, PLENTY, &want);
        lse_sum_rows(&f.p, &want, want.found[0]);
        assert_int_equal(attn_device_alloc(b.device, sizeof found.found, &memory, &err), ATTN_OK);
        assert_int_equal(attn_lse_start(b.stream, &p, &want, memory, &err), ATTN_OK);
        assert_int_equal(attn_copy(b.stream, found.found, memory, sizeof found.found, ATTN_FROM_DEVICE, &err), ATTN_OK);
        assert_int_equal(attn_stream_wait(b.stream, &err), ATTN_OK);
        for (int r = 0; r < want.count; r++)
            for (int n = 0; n < ATTN_LSE_NUMBERS; n++) {
                const double x = found.found[r][n], y = want.found[r][n];
                if (x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= 1e-9 * (1 + fabs(y))) continue;
                spec_print(stderr, &s);
                fail_msg("row %d, number %d: is %.17g, must be %.17g", r, n, x, y);
            }
        attn_device_free(b.device, memory);
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) attn_device_free(b.device, blocks[id]);
        fixture_clear(&f);
    }
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_lse_of_the_scores_passes_with_every_option),
        cmocka_unit_test(test_an_observe_is_told_that_its_lse_is_in_base_2),
        cmocka_unit_test(test_the_lse_of_the_kernels_passes),
        cmocka_unit_test(test_the_lse_of_unrounded_tensors_passes),
        cmocka_unit_test(test_a_part_of_the_keys_with_the_lse_of_all_passes),
        cmocka_unit_test(test_parts_of_equal_scores_pass_whatever_their_number),
        cmocka_unit_test(test_rows_that_say_nothing_pass),
        cmocka_unit_test(test_each_conversion_is_named),
        cmocka_unit_test(test_a_sum_above_1_is_refused_by_row_sum_and_rule),
        cmocka_unit_test(test_the_same_request_gets_the_same_answer),
        cmocka_unit_test(test_a_device_sums_up_what_the_host_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
