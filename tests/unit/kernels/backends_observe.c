/* backends_observe.c: tests of observe problems, which ask for attention weights and their statistics. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backends.h"

#define LOOK .op = ATTN_OP_OBSERVE

/* the outputs of an observe (a request for attention weights) that consist of probabilities; computing them needs lse
 * */
#define PROBABILITIES (ATTN_TENSOR_BIT(weights) | ATTN_TENSOR_BIT(key_mass) | ATTN_TENSOR_BIT(map))

/* Runs observe problems (requests for attention weights). Those in float32 also run in bfloat16, and in float16 if q is
 * in its range. Returns how many results disagree with the reference backend. */
static int disagree(const struct spec *list, size_t count)
{
    static const attn_dtype narrow[] = { ATTN_BF16, ATTN_F16 };
    int failed = 0;
    for (size_t n = 0; n < count; n++) {
        const bool large = list[n].Sq * list[n].Sk * list[n].H * list[n].B > 40000;
        if (large && is_brief()) continue;
        failed += !agrees(&list[n]);
        for (size_t at = 0; at < ARRAY_SIZE(narrow) && list[n].dtype == ATTN_F32; at++) {
            struct spec s = list[n];
            s.dtype = s.out_dtype = narrow[at];
            if (s.dtype != ATTN_F16 || s.q_amp <= 30) failed += !agrees(&s);
        }
    }
    return failed;
}

void test_observables_agree_with_the_reference(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec list[] = {
        SPEC(.name = "plain", LOOK),
        SPEC(.name = "one pair", LOOK, SIZES(1, 1, 1)),
        SPEC(.name = "no keys", LOOK, SIZES(3, 0, 8)),
        SPEC(.name = "no keys, sinks", LOOK, SIZES(3, 0, 8), .sinks = 1),
        SPEC(.name = "no queries", LOOK, SIZES(0, 5, 8)),
        SPEC(.name = "no batch", LOOK, .B = 0, SIZES(4, 5, 8)),
        SPEC(.name = "several tiles", LOOK, F16, SIZES(300, 1100, 64), HEADS(4, 2)),
        SPEC(.name = "several tiles, causal", LOOK, BF16, SIZES(333, 1111, 72), HEADS(2, 1), .causal = true),
        SPEC(.name = "wide heads, causal", LOOK, BF16, SIZES(150, 200, 256), .causal = true),
        SPEC(.name = "heads of 192", LOOK, F16, SIZES(140, 140, 192), HEADS(2, 1), WINDOW(100, 3)),
        SPEC(.name = "many queries, few keys", LOOK, BF16, SIZES(1700, 20, 64)),
        SPEC(.name = "rows that see nothing", LOOK, SIZES(200, 70, 40), .causal = true),
        SPEC(.name = "rows that see nothing but a sink", LOOK, SIZES(200, 70, 40), .causal = true, .sinks = 2,
             HEADS(4, 2)),
        SPEC(.name = "one query, many keys", LOOK, BF16, SIZES(1, 5000, 128), HEADS(8, 2)),
        SPEC(.name = "few queries in pages", LOOK, BF16, SIZES(3, 512, 64), HEADS(8, 2), .B = 3, PAGES(16)),
        SPEC(.name = "float8 keys", LOOK, BF16, SIZES(40, 512, 64), HEADS(4, 2), .fp8_keys = true, .fp8_scales = true),
        SPEC(.name = "float8", LOOK, FP8, SIZES(40, 130, 64), .fp8_scales = true),
        SPEC(.name = "window", LOOK, SIZES(150, 250, 64), WINDOW(20, 9)),
        SPEC(.name = "FlashMask", LOOK, SIZES(150, 250, 64), .mask_bounds = 4, .mask_heads = 2,
             .mask_kind = MASK_UNION),
        SPEC(.name = "packed", LOOK, .sequences = 4, .q_lengths = { 67, 0, 35, 1 }, .k_lengths = { 133, 9, 1, 0 },
             .causal = true),
        SPEC(.name = "packed, gaps", LOOK, .sequences = 3, .q_lengths = { 67, 3, 35 }, .k_lengths = { 133, 9, 1 },
             .gaps = 9),
        SPEC(.name = "lengths", LOOK, .B = 4, .seqlens_q = true, .seqlens_k = true, SIZES(70, 90, 32)),
        SPEC(.name = "a given lse", LOOK, SIZES(130, 140, 64), .given_lse = true, .causal = true),
        SPEC(.name = "a given lse, sinks", LOOK, BF16, SIZES(130, 140, 64), .given_lse = true, .sinks = 2),
        SPEC(.name = "a given lse alone", LOOK, SIZES(130, 140, 64), .given_lse = true, .observe = PROBABILITIES),
        SPEC(.name = "a given lse alone, products that overflow", LOOK, SIZES(20, 70, 64), .q_amp = 1e19,
             .has_scale = true, .scale = 1e-38, .given_lse = true, .observe = PROBABILITIES),
        SPEC(.name = "a given lse alone, hidden NaN", LOOK, SIZES(90, 170, 64), .causal = true, .poison_unseen = true,
             .given_lse = true, .observe = PROBABILITIES),
        SPEC(.name = "a given lse alone, NaN that some see", LOOK, SIZES(90, 90, 64), .causal = true, .poison = 1,
             .given_lse = true, .observe = PROBABILITIES),
        SPEC(.name = "a given lse alone, options", LOOK, SIZES(90, 170, 64), .softcap = 5, .alibi = 1, .bias = 8,
             .bias_hidden = 0.3, .given_lse = true, .observe = PROBABILITIES),
        SPEC(.name = "large scores", LOOK, SIZES(40, 300, 64), .q_amp = 30),
        SPEC(.name = "scores that leave float32", LOOK, SIZES(20, 70, 64), .q_amp = 3e18),
        SPEC(.name = "products that overflow", LOOK, SIZES(20, 70, 64), .q_amp = 1e19, .has_scale = true,
             .scale = 1e-38),
        SPEC(.name = "a mask of huge numbers", LOOK, SIZES(20, 70, 64), .bias = 8, .bias_levels = 1),
        SPEC(.name = "padding on the left", LOOK, SIZES(3, 2260, 8), .bias = 8, .bias_levels = 3, .sinks = 2),
        SPEC(.name = "scale 0", LOOK, SIZES(20, 70, 64), .has_scale = true),
        SPEC(.name = "a negative scale", LOOK, SIZES(20, 170, 64), .has_scale = true, .scale = -0.3),
        SPEC(.name = "softcap, ALiBi, bias", LOOK, SIZES(90, 170, 64), .softcap = 5, .alibi = 1, .bias = 8,
             .bias_hidden = 0.3),
        SPEC(.name = "sinks of all sizes", LOOK, SIZES(9, 70, 64), HEADS(4, 4), .sinks = 3),
        SPEC(.name = "hidden NaN", LOOK, SIZES(90, 170, 64), .causal = true, .poison_unseen = true),
        SPEC(.name = "NaN that some see", LOOK, SIZES(90, 90, 64), .causal = true, .poison = 1),
        SPEC(.name = "dropout is ignored", LOOK, SIZES(90, 90, 64), .dropout_p = 0.5, .seed = 7),
        SPEC(.name = "a wide head", LOOK, BF16, SIZES(70, 90, 576), HEADS(4, 1)),
        SPEC(.name = "gaps between rows", LOOK, SIZES(70, 90, 60), .strided = true, .layout = ATTN_BHSD),
    };
    /* clang-format on */
    (void)state;
    assert_int_equal(disagree(list, ARRAY_SIZE(list)), 0);
}

/* Returns a random observe (a request for attention weights). */
static struct spec random_look(uint64_t seed)
{
    struct spec s = random_spec(seed);
    struct rng r = { seed * 3 + 1 };
    s.op = ATTN_OP_OBSERVE;
    s.dlse = s.give_forward = s.no_dout = false;
    s.float_grads = 0;
    if (s.dtype == ATTN_F8E4M3) s.out_dtype = ATTN_BF16;
    s.given_lse = rng_chance(&r, 0.25);
    return s;
}

enum { RANDOM_LOOKS = RANDOM_COUNT / 3 * 5, BRIEF_LOOKS = 60 };

void test_random_observables_agree_with_the_reference(void **state)
{
    const long first = env_number("ATTN_RANDOM_SEED", 1),
               count = env_number("ATTN_RANDOM_COUNT", is_brief() ? BRIEF_LOOKS : RANDOM_LOOKS);
    int failed = 0;
    (void)state;
    for (long n = 0; n < count && failed < 20; n++) {
        const struct spec s = random_look((uint64_t)(first + n));
        if (!is_ours() || agrees(&s)) continue;
        fprintf(stderr, "    (random problem %ld)\n", first + n);
        failed++;
    }
    assert_int_equal(failed, 0);
}

/* Each entry of top_keys must name a key whose probability is the top_weight at the same index. No key may occur twice,
 * and the probabilities must descend. No key that top_keys leaves out may have a larger probability than the last
 * entry. The problem must have `weights` for all queries and keys. */
static void look_at_top_keys(const struct fixture *f)
{
    const int64_t top = f->p.observe.top, Sk = f->spec.Sk;
    for (int64_t row = 0; row < tensor_elements(&f->p.row_max); row++) {
        double left = 0, last = INFINITY;
        bool *const taken = calloc((size_t)Sk + 1, 1);
        assert_non_null(taken);
        for (int64_t n = 0; n < top; n++) {
            const double key = tensor_get(&f->p.top_keys, row * top + n),
                         P = tensor_get(&f->p.top_weights, row * top + n);
            if (key < 0) {
                assert_true(key == -1 && P == 0);
                last = 0;
                continue;
            }
            assert_true(key < (double)Sk && !taken[(int64_t)key]);
            taken[(int64_t)key] = true;
            assert_true(P <= last);
            assert_true(fabs(P - tensor_get(&f->p.weights, row * Sk + (int64_t)key)) <= 1e-5 * P + 1e-30);
            last = P;
        }
        for (int64_t j = 0; j < Sk; j++)
            if (!taken[j]) left = fmax(left, tensor_get(&f->p.weights, row * Sk + j));
        assert_true(left <= last * (1 + 1e-5));
        free(taken);
    }
}

void test_top_keys_are_the_keys_of_the_largest_probabilities(void **state)
{
    static const struct spec list[] = {
        SPEC(LOOK, SIZES(33, 300, 64), HEADS(4, 2), .causal = true),
        SPEC(LOOK, BF16, SIZES(70, 12, 32), .keep_mask = 8, .keep = 0.4),
        SPEC(LOOK, F16, SIZES(5, 700, 64), .alibi = 1, HEADS(2, 1)),
        SPEC(LOOK, BF16, SIZES(70, 300, 64), HEADS(4, 2), .causal = true),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(list); n++) {
        struct fixture f;
        fixture_make(&f, &list[n]);
        free(f.block[ATTN_T_weights]);
        f.block[ATTN_T_weights] = NULL;
        f.p.observe.rows[0] = f.p.observe.keys[0] = 0;
        f.p.observe.rows[1] = list[n].Sq, f.p.observe.keys[1] = list[n].Sk;
        fixture_add(&f, ATTN_T_weights, ATTN_F32, 4, (int64_t[]){ 1, list[n].H, list[n].Sq, list[n].Sk });
        fixture_run(&bench, &f);
        look_at_top_keys(&f);
        fixture_clear(&f);
    }
    /* Of two keys with equal probabilities, the key with the lower number comes first. */
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16 };
    for (size_t at = 0; at < ARRAY_SIZE(dtypes); at++) {
        struct spec alike = SPEC(LOOK, SIZES(70, 600, 64), .has_scale = true, .observe = ATTN_TENSOR_BIT(top_keys));
        struct fixture f;
        alike.dtype = alike.out_dtype = dtypes[at];
        fixture_make(&f, &alike);
        fixture_run(&bench, &f);
        for (int64_t n = 0; n < tensor_elements(&f.p.top_keys); n++)
            assert_int_equal((int)tensor_get(&f.p.top_keys, n), (int)(n % f.p.observe.top));
        fixture_clear(&f);
    }
}

void test_observables_have_the_same_bits_alone_and_among_others(void **state)
{
    enum { COUNT = 12 };
    struct fixture together[COUNT], *list[COUNT];
    (void)state;
    for (int n = 0; n < COUNT; n++) {
        struct spec s = random_look(1000 + (uint64_t)n);
        if (n % 4 == 3) s = random_spec(2000 + (uint64_t)n);
        fixture_make(&together[n], &s);
        list[n] = &together[n];
    }
    fixtures_must_run(&bench, list, COUNT);
    for (int n = 0; n < COUNT; n++) {
        struct fixture alone;
        fixture_make(&alone, &together[n].spec);
        alone.spec = together[n].spec;
        fixture_run(&bench, &alone);
        if (together[n].p.op == ATTN_OP_OBSERVE) assert_outputs_equal(&together[n], &alone);
        fixture_clear(&alone), fixture_clear(&together[n]);
    }
}

void test_one_observable_has_the_bits_that_it_has_among_all(void **state)
{
    struct spec s = SPEC(LOOK, BF16, SIZES(130, 600, 64), HEADS(4, 2), .causal = true, .sinks = 1);
    struct fixture all;
    (void)state;
    fixture_make(&all, &s);
    fixture_run(&bench, &all);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        struct fixture one;
        char why[400];
        if (!is_output(&all.p, (attn_tensor_id)id)) continue;
        s.observe = UINT64_C(1) << id;
        fixture_make(&one, &s);
        fixture_run(&bench, &one);
        if (!outputs_equal(&one, &all, why, sizeof why)) fail_msg("%s", why);
        fixture_clear(&one);
    }
    fixture_clear(&all);
}

static const char *kernel_of(const attn_problem *p)
{
    attn_plan plan;
    attn_error err = { 0 };
    assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), p, &plan, &err), ATTN_OK);
    return plan.kernel->name;
}

/* Runs an observe (a request for attention weights) with contiguous keys, with keys in pages, and with contiguous keys
 * and one thread. The number of threads must not change a bit. If the same kernel takes contiguous keys and keys in
 * pages, then pages must not change a bit either, and the function returns true. */
static bool same_bits_in_pages_and_by_one_thread(struct spec s)
{
    struct bench one;
    struct fixture plain, paged, single;
    char why[400];
    fixture_make(&plain, &s);
    fixture_make(&single, &s);
    s.page_size = 16;
    fixture_make(&paged, &s);
    fixture_run(&bench, &plain);
    fixture_run(&bench, &paged);
    bench_open(&one, backend, 1);
    fixture_run(&one, &single);
    bench_close(&one);
    const bool alike = !strcmp(kernel_of(&plain.p), kernel_of(&paged.p));
    if (alike && !outputs_equal(&plain, &paged, why, sizeof why)) fail_msg("pages: %s", why);
    if (!outputs_equal(&plain, &single, why, sizeof why)) fail_msg("threads: %s", why);
    fixture_clear(&plain), fixture_clear(&paged), fixture_clear(&single);
    return alike;
}

/* With softcap, one kernel takes keys in pages and contiguous keys. Without options, Hopper has one kernel for keys in
 * pages and another for contiguous keys. */
void test_pages_and_threads_do_not_change_a_bit_of_an_observe(void **state)
{
    struct spec s = SPEC(LOOK, BF16, SIZES(150, 640, 64), HEADS(4, 2), .B = 2, .causal = true, .seqlens_k = true);
    (void)state;
    (void)same_bits_in_pages_and_by_one_thread(s);
    s.softcap = 20;
    assert_true(same_bits_in_pages_and_by_one_thread(s));
}

/* If Hopper's kernels compute a forward, they must also compute an observe (a request for attention weights) of the
 * same q and k. */
void test_an_observe_without_options_is_computed_by_the_family_of_the_forward(void **state)
{
    static const struct spec list[] = {
        SPEC(BF16, SIZES(200, 200, 64)),
        SPEC(F16, SIZES(200, 300, 128), HEADS(4, 2), .causal = true, .sinks = 1),
        SPEC(BF16, SIZES(70, 90, 256), WINDOW(20, 9)),
        SPEC(BF16, .B = 3, SIZES(70, 90, 96), .seqlens_q = true, .seqlens_k = true),
        SPEC(F16, .D = 64, .Dv = 64, .sequences = 3, .q_lengths = { 67, 3, 35 }, .k_lengths = { 133, 9, 1 }),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(list); n++) {
        const char *names[2];
        for (int look = 0; look < 2; look++) {
            struct fixture f;
            struct spec s = list[n];
            if (look) s.op = ATTN_OP_OBSERVE;
            fixture_make(&f, &s);
            names[look] = kernel_of(&f.p);
            fixture_clear(&f);
        }
        if (!strncmp(names[0], "sm90", 4) && strcmp(names[1], "sm90"))
            fail_msg("problem %d: the forward is computed by %s, the observe by %s", (int)n, names[0], names[1]);
    }
}
