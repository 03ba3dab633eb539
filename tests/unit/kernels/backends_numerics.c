/* backends_numerics.c: tests of the limits of float32 and of narrower types. Examples are float8, rounded sums, scores
 * beyond float32, rows that see one key, and NaN. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backends.h"

/* Compares gradients in float32 with the same gradients in 16 bits. `nonzero` counts elements that are not 0, `unlike`
 * those whose float32 number does not round to the 16-bit number, and `finer` those whose float32 number needs more
 * than 16 bits. wide2 and narrow2 are the sums of squared errors of the float32 and the 16-bit gradients. */
struct widened {
    int64_t unlike, nonzero, finer;
    double wide2, narrow2;
};

static void compare_widened(const attn_tensor *wide, const attn_tensor *narrow, const attn_tensor *want,
                            struct widened *x)
{
    for (int64_t n = tensor_elements(wide), e = 0; e < n; e++) {
        const double is = tensor_get(wide, e), rounded = tensor_get(narrow, e), must = tensor_get(want, e);
        const uint16_t bits = narrow->dtype == ATTN_F16 ? attn_f16_from_double(is) : attn_bf16_from_double(is);
        x->unlike += bits != ((const uint16_t *)narrow->data)[tensor_offset(narrow, e)];
        x->nonzero += is != 0;
        x->finer += is != rounded;
        x->wide2 += (is - must) * (is - must);
        x->narrow2 += (rounded - must) * (rounded - must);
    }
}

/* Returns whether the problem's float32 gradients, rounded to 16 bits, equal its 16-bit gradients. Ignores dq if its
 * terms may be added in any order, because its bits then vary. */
static bool widens(const struct spec *narrow_spec)
{
    struct spec wide_spec = *narrow_spec;
    struct fixture narrow, wide, want, before;
    struct widened x = { 0 };
    char why[400] = "";
    wide_spec.float_grads = 7;
    fixture_make(&narrow, narrow_spec);
    fixture_make(&wide, &wide_spec);
    fixture_copy(&want, &wide), fixture_copy(&before, &wide);
    run_reference(&want.p);
    fixture_run(&bench, &narrow);
    fixture_run(&bench, &wide);
    bool good = fixture_intact(&wide, &before, why, sizeof why);
    for (int id = narrow_spec->any_order ? ATTN_T_dk : ATTN_T_dq; id <= ATTN_T_dv; id++)
        compare_widened(&wide.p.tensor[id], &narrow.p.tensor[id], &want.p.tensor[id], &x);
    if (x.unlike || x.finer * 2 < x.nonzero || !(x.wide2 < x.narrow2)) {
        snprintf(why, sizeof why,
                 "%lld of %lld numbers round to others than 16-bit gradients, %lld are finer; errors %.3g and %.3g",
                 (long long)x.unlike, (long long)x.nonzero, (long long)x.finer, sqrt(x.wide2), sqrt(x.narrow2));
        good = false;
    }
    if (!good) {
        fprintf(stderr, "%s: %s\n", narrow_spec->name, why);
        spec_print(stderr, &wide_spec);
    }
    fixture_clear(&narrow), fixture_clear(&wide), fixture_clear(&want), fixture_clear(&before);
    return good;
}

/* A kernel for float32 gradients must compute the same numbers as the kernel for 16-bit gradients, but without the last
 * rounding. */
void test_float32_gradients_round_to_those_of_16_bits(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec cases[] = {
        SPEC(.name = "float32 gradients", SIZES(67, 133, 0), HEADS(2, 1)),
        SPEC(.name = "float32 gradients, causal, bhsd", SIZES(130, 130, 0), .B = 2, .causal = true,
             .layout = ATTN_BHSD),
        SPEC(.name = "float32 gradients, dq in any order", SIZES(200, 150, 0), HEADS(2, 1), .any_order = true),
        SPEC(.name = "float32 gradients, window, sinks", SIZES(90, 140, 0), WINDOW(40, 13), .sinks = 1),
        SPEC(.name = "float32 gradients, softcap", SIZES(70, 130, 0), .softcap = 5),
        SPEC(.name = "float32 gradients, softcap, ALiBi", SIZES(70, 130, 0), .softcap = 5, .alibi = 1, .causal = true),
        SPEC(.name = "float32 gradients, bias, dropout", SIZES(67, 70, 0), .bias = 1 + 7, .dropout_p = 0.3, .seed = 7),
        SPEC(.name = "float32 gradients, seqlens_k", SIZES(67, 133, 0), .B = 3, .seqlens_k = true),
        SPEC(.name = "float32 gradients, strided", SIZES(67, 90, 0), .strided = true),
        SPEC(.name = "float32 gradients, dout of another dtype", SIZES(67, 90, 0), .out_dtype = ATTN_F16),
        SPEC(.name = "float32 gradients, packed", HEADS(4, 2), .causal = true, .sequences = 4,
             .q_lengths = { 67, 0, 35, 3 }, .k_lengths = { 133, 9, 1, 200 }),
    };
    /* clang-format on */
    static const int head_sizes[][2] = { { 33, 40 }, { 64, 64 }, { 128, 128 }, { 192, 128 }, { 256, 256 } };
    int failed = 0;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        for (size_t n = 0; n < ARRAY_SIZE(head_sizes); n++) {
            struct spec s = cases[i];
            s.op = ATTN_OP_BACKWARD;
            s.dtype = s.out_dtype == ATTN_F16 || (i + n) % 2 ? ATTN_BF16 : ATTN_F16;
            if (s.out_dtype == ATTN_F32) s.out_dtype = s.dtype;
            s.D = head_sizes[n][0], s.Dv = head_sizes[n][1];
            if (is_ours() && !widens(&s)) failed++;
        }
    assert_int_equal(failed, 0);
}

/* A thread block may begin its next work item (some queries of a head) before it has finished the present one. Here
 * some items have no queries or see no keys. There are more items than a device runs at the same time. */
void test_work_that_sees_no_keys_between_other_work(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec cases[] = {
        SPEC(.name = "work, causal", SIZES(330, 200, 64), HEADS(2, 1), .causal = true),
        SPEC(.name = "work, more queries than keys", SIZES(400, 130, 64), HEADS(1, 1), .causal = true),
        SPEC(.name = "work, rows of few and of no keys", SIZES(200, 200, 64), HEADS(2, 1), .B = 4, .seqlens_k = true,
             .causal = true, .sinks = 1),
        SPEC(.name = "work, packed, some without keys", HEADS(2, 1), .D = 64, .Dv = 64, .causal = true, .sequences = 5,
             .q_lengths = { 130, 70, 0, 200, 30 }, .k_lengths = { 130, 0, 5, 200, 9 }),
        SPEC(.name = "work, NaN in v", SIZES(300, 200, 64), HEADS(2, 1), .causal = true, .poison = 2),
    };
    /* clang-format on */
    static const struct {
        /* more_keys is added to Sk. With D 128, problems of 1024 keys or more use another kernel. */
        int D, more_keys;
        double softcap;
    } heads[] = { { 64, 0, 0 },  { 96, 0, 0 }, { 128, 0, 0 }, { 128, 900, 0 }, { 192, 0, 0 },
                  { 256, 0, 0 }, { 64, 0, 5 }, { 128, 0, 5 }, { 256, 0, 5 } };
    int failed = 0;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        for (size_t n = 0; n < ARRAY_SIZE(heads); n++) {
            struct spec s = cases[i];
            s.dtype = s.out_dtype = n % 2 ? ATTN_F16 : ATTN_BF16;
            s.D = s.Dv = heads[n].D, s.softcap = heads[n].softcap;
            s.Sk += heads[n].more_keys;
            /* more_keys was added to Sk. If the problem had over 200 more queries than keys before, more_keys is added
             * to Sq too. The surplus of queries then stays the same. */
            if (s.Sq > s.Sk - heads[n].more_keys + 200) s.Sq += heads[n].more_keys;
            if (s.sequences > 0) s.k_lengths[0] += heads[n].more_keys, s.k_lengths[3] += heads[n].more_keys;
            if (!agrees(&s)) failed++;
        }
    assert_int_equal(failed, 0);
}

/* Kernels for float8 multiply q and k in float8 only if lse is not wanted. Problems with NaN run a second time with
 * lse, because the code that computes rows with NaN needs it. */
void test_float8_without_lse_agrees_with_the_reference(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec cases[] = {
        SPEC(.name = "float8, one by one", SIZES(1, 1, 64), HEADS(1, 1)),
        SPEC(.name = "float8, a tile", SIZES(64, 64, 64), HEADS(1, 1)),
        SPEC(.name = "float8, scales, a group", SIZES(90, 120, 64), HEADS(4, 2), .fp8_scales = true),
        SPEC(.name = "float8, causal, more keys", SIZES(130, 401, 64), HEADS(2, 1), .causal = true, .fp8_scales = true),
        SPEC(.name = "float8, causal, empty rows", SIZES(401, 130, 64), HEADS(2, 1), .causal = true, .sinks = 2,
             .B = 2),
        SPEC(.name = "float8, causal, top left", SIZES(300, 130, 64), HEADS(2, 1), .causal = true,
             .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "float8, top left, fewer rows", SIZES(130, 400, 64), HEADS(3, 1), .causal = true,
             .alignment = ATTN_TOP_LEFT, .poison_unseen = true),
        SPEC(.name = "float8, window", SIZES(400, 400, 64), WINDOW(70, 3), .poison_unseen = true),
        SPEC(.name = "float8, bhsd, sinks", SIZES(150, 260, 64), HEADS(2, 1), .layout = ATTN_BHSD, .sinks = 1, .B = 2),
        SPEC(.name = "float8, strided", SIZES(150, 260, 64), HEADS(2, 1), .strided = true, .B = 2),
        SPEC(.name = "float8, sums promoted", SIZES(70, 2500, 64), HEADS(1, 1)),
        SPEC(.name = "float8, sums promoted, causal", SIZES(300, 2100, 64), HEADS(1, 1), .causal = true),
        SPEC(.name = "float8, many keys", SIZES(40, 4300, 64), HEADS(4, 2), .B = 2, .causal = true),
        SPEC(.name = "float8, peaky", SIZES(130, 333, 64), HEADS(2, 1), .q_amp = 4),
        SPEC(.name = "float8, scales of 1e-6", SIZES(50, 60, 64), .fp8_scales = true, .fp8_scale = 1e-6, .q_amp = 100),
        SPEC(.name = "float8, scales of 0", SIZES(50, 60, 64), .fp8_scales = true, .fp8_scale = 1e-60),
        SPEC(.name = "float8, negative scales", SIZES(150, 260, 64), .fp8_scales = true, .fp8_scale = -0.7),
        SPEC(.name = "float8, scores of 1e10", SIZES(150, 160, 64), .fp8_scales = true, .fp8_scale = 1e3, .q_amp = 100),
        SPEC(.name = "float8, saturated", SIZES(50, 60, 64), .q_amp = 400, .has_scale = true, .scale = 1e-6),
        SPEC(.name = "float8, NaN in v", SIZES(200, 300, 64), HEADS(2, 1), .poison = 2, .causal = true),
        SPEC(.name = "float8, NaN in k", SIZES(200, 300, 64), HEADS(2, 1), .poison = 1, .causal = true),
        SPEC(.name = "float8, NaN in v, window", SIZES(200, 300, 64), HEADS(2, 1), .poison = 2, WINDOW(30, 10),
             .fp8_scales = true),
        SPEC(.name = "float8, NaN in v, no mask", SIZES(70, 300, 64), HEADS(1, 1), .poison = 2),
        SPEC(.name = "float8, NaN in v, more keys", SIZES(70, 1030, 64), HEADS(1, 1), .poison = 2),
        SPEC(.name = "float8, NaN in v, many keys, window", SIZES(4200, 4200, 64), HEADS(1, 1), .poison = 2,
             WINDOW(60, 20)),
        SPEC(.name = "float8, NaN in v, many heads", .B = 2, SIZES(200, 200, 64), HEADS(6, 1), .poison = 2,
             WINDOW(20, 10)),
        SPEC(.name = "float8, NaN in k, many heads", .B = 2, SIZES(200, 200, 64), HEADS(6, 1), .poison = 1,
             WINDOW(20, 10)),
        SPEC(.name = "float8, scores of 1e10, many heads", .B = 2, SIZES(150, 50, 64), HEADS(4, 1), .fp8_scales = true,
             .fp8_scale = 1e3, .q_amp = 100),
        SPEC(.name = "float8, a row is one key", SIZES(200, 200, 64), WINDOW(0, 0), .q_amp = 3),
        SPEC(.name = "float8, narrower values", .Sq = 100, .Sk = 150, .D = 64, .Dv = 32),
        SPEC(.name = "float8, narrower keys", .Sq = 100, .Sk = 150, .D = 48, .Dv = 64, .causal = true),
    };
    /* clang-format on */
    static const int head_sizes[] = { 64, 128, 256 };
    int failed = 0;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        for (size_t n = 0; n < ARRAY_SIZE(head_sizes); n++) {
            struct spec s = cases[i];
            s.dtype = ATTN_F8E4M3, s.out_dtype = ATTN_BF16;
            s.no_lse = true;
            s.D += head_sizes[n] - 64, s.Dv += head_sizes[n] - 64;
            if (!agrees(&s)) failed++;
            s.no_lse = false;
            if (s.poison && !agrees(&s)) failed++;
        }
    assert_int_equal(failed, 0);

    const char *family = getenv("ATTN_CUDA_FAMILY");
    if (family && strcmp(family, "sm90_f8") == 0) {
        const struct spec s = SPEC(SIZES(200, 300, 128), FP8, .no_lse = true);
        struct fixture f;
        attn_error err;
        fixture_make(&f, &s);
        attn_plan plan;
        assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &f.p, &plan, &err), ATTN_OK);
        fixture_clear(&f);
        assert_string_equal(plan.kernel->name, family);
    }
}

/* If a query sees only one key, its output must be that key's value, even for scores of 1e4 to 1e9. At such scores
 * kernels begin to subtract a rounded maximum before the exponential. */
void test_float8_rows_of_one_key_are_its_value(void **state)
{
    static const double scales[] = { 1, 10, 32, 55, 100, 320 };
    static const int head_sizes[] = { 64, 128, 256 };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(scales); i++)
        for (size_t n = 0; n < ARRAY_SIZE(head_sizes); n++) {
            const struct spec s = SPEC(SIZES(200, 200, head_sizes[n]), HEADS(1, 1), FP8, WINDOW(0, 0), .no_lse = true,
                                       .fp8_scales = true, .fp8_scale = scales[i], .q_amp = 100);
            struct fixture f;
            fixture_make(&f, &s);
            fixture_run(&bench, &f);
            for (int64_t e = 0; e < tensor_elements(&f.p.out); e++) {
                const double got = tensor_get(&f.p.out, e), want = tensor_get(&f.p.v, e) * scales[i];
                if (!(fabs(got - want) <= 0.07 * fabs(want))) {
                    spec_print(stderr, &s);
                    fail_msg("element %lld is %g, must be %g", (long long)e, got, want);
                }
            }
            fixture_clear(&f);
        }
}

/* One key has at least half of the weight, but the others must still count. Hopper's tensor cores keep 14 bits of a sum
 * of float8 products, so other keys are lost unless the kernel begins a new sum after some keys. All values are one
 * number, which `out` must equal. */
void test_float8_sums_keep_what_lies_beside_a_heavy_key(void **state)
{
    static const int head_sizes[] = { 64, 128, 256 }, lengths[] = { 1344, 1792, 2016, 2560, 3584 };
    static const double odds[] = { 1, 3, 9 }, values[] = { 1, 1.375, 1.875 };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(lengths) * ARRAY_SIZE(head_sizes) * 9; i++) {
        const int Sk = lengths[i / 27], D = head_sizes[i / 9 % 3];
        const double odd = odds[i / 3 % 3], value = values[i % 3];
        const struct spec s = SPEC(SIZES(65, Sk, D), HEADS(1, 1), FP8, .no_lse = true, .has_scale = true, .scale = 1);
        if (!is_ours()) continue;
        struct fixture f;
        fixture_make(&f, &s);
        memset(f.p.q.data, 0, (size_t)tensor_elements(&f.p.q));
        memset(f.p.k.data, 0, (size_t)tensor_elements(&f.p.k));
        memset(f.p.v.data, attn_e4m3_from_double(value), (size_t)tensor_elements(&f.p.v));
        for (int row = 0; row < s.Sq; row++) tensor_set(&f.p.q, row * D, 1), tensor_set(&f.p.q, row * D + 1, 1);
        /* The last key's score is the sum of two channels, because one float8 number is not exact enough. */
        const int64_t heavy = (int64_t)(Sk - 1) * D;
        tensor_set(&f.p.k, heavy, log(Sk * odd));
        tensor_set(&f.p.k, heavy + 1, log(Sk * odd) - tensor_get(&f.p.k, heavy));
        fixture_run(&bench, &f);
        for (int64_t e = 0; e < tensor_elements(&f.p.out); e++) {
            const double off = fabs(tensor_get(&f.p.out, e) / value - 1);
            if (!(off <= 4e-2))
                fail_msg("%d keys, D %d, odds of %g, %g: element %lld is off by %g", Sk, D, odd, value, (long long)e,
                         off);
        }
        fixture_clear(&f);
    }
}

/* A kernel may have several ways to find a row's maximum: for a maximum above 0, slightly below 0, and far below 0. */
void test_scores_of_either_side_of_0_agree_with_the_reference(void **state)
{
    static const int head_sizes[] = { 64, 96, 128, 192 };
    int failed = 0;
    (void)state;
    for (int i = 0; i < (int)ARRAY_SIZE(head_sizes) * SIDES_BY_ROW * 2; i++) {
        const int D = head_sizes[i / (SIDES_BY_ROW * 2)];
        struct spec s = SPEC(.name = "bfloat16", SIZES(130, 700, D), HEADS(1, 1), BF16);
        s.sides = (enum score_sides)(1 + i % SIDES_BY_ROW);
        s.causal = i / SIDES_BY_ROW % 2;
        if (!agrees(&s)) failed++;
        if (D == 96 || D == 192) continue;
        s.name = "float8", s.dtype = ATTN_F8E4M3, s.Sk = 1100;
        if (!agrees(&s)) failed++;
        s.name = "float8 without lse", s.no_lse = true;
        if (!agrees(&s)) failed++;
    }
    assert_int_equal(failed, 0);
}

/* A feature is an option or a tensor. A problem with an unknown feature goes to a kernel that takes every feature. */
void test_a_feature_that_no_kernel_names_is_computed_by_one_that_takes_everything(void **state)
{
    static const struct spec problems[] = {
        SPEC(SIZES(300, 300, 128), BF16),
        SPEC(SIZES(300, 300, 64), F16, .causal = true, HEADS(4, 2)),
        SPEC(SIZES(300, 300, 64), FP8, .no_lse = true),
        SPEC(SIZES(1, 300, 64), BF16),
        SPEC(SIZES(300, 300, 64)),
        SPEC(.sequences = 2, .q_lengths = { 1, 100 }, .k_lengths = { 300, 100 }, BF16),
        SPEC(BACK, SIZES(300, 300, 64), BF16),
        SPEC(BACK, SIZES(300, 300, 64)),
        SPEC(BACK, SIZES(70, 90, 40), HEADS(4, 2), .B = 2, F16, .softcap = 5, .alibi = 2, .bias = 3, .sinks = 1),
    };
    const uint64_t made_up = UINT64_C(1) << 63;
    const attn_capabilities *const can = attn_device_capabilities(bench.device);
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(problems); i++) {
        struct fixture f;
        attn_plan plan, usual;
        attn_error err;
        fixture_make(&f, &problems[i]);
        const uint64_t features = attn_features(&f.p);
        assert_int_equal(features & made_up, 0);
        for (int n = 0; n < can->kernel_count; n++) {
            const attn_kernel *k = can->kernels[n];
            if (k->op != f.p.op || !attn_kernel_takes(k, &f.p, features)) continue;
            assert_int_equal(attn_kernel_takes(k, &f.p, features | made_up), (k->features & made_up) != 0);
        }
        assert_int_equal(attn_plan_for(attn_device_capabilities(bench.device), &f.p, features | made_up, &plan, &err),
                         ATTN_OK);
        assert_true(plan.kernel->features & made_up);
        if (strncmp(plan.kernel->name, "sm90", 4) == 0) fail_msg("%s took it", plan.kernel->name);
        assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &f.p, &usual, &err), ATTN_OK);
        if (strcmp(bench.info.backend, "cpu") == 0) {
            assert_string_not_equal(usual.kernel->name, "double");
            assert_string_equal(plan.kernel->name, "double");
        }
        fixture_clear(&f);
        bench.also = made_up;
        const bool right = spec_agrees(&bench, &problems[i]);
        bench.also = 0;
        assert_true(right);
    }
}

/* The gradient of an ALiBi slope is the sum of -dZ times distance, where dZ is the gradient of the scores. Distances in
 * the hundreds magnify any rounding error of delta = sum(dout * out). */
void test_slopes_in_bfloat16_are_as_exact_as_other_sums(void **state)
{
    int failed = 0;
    (void)state;
    for (uint64_t n = 0; n < 24; n++) {
        if (!is_ours()) continue;
        struct rng r = { n + 1 };
        struct spec s = SPEC(BACK, BF16, .alibi = 1 + (int)(n % 2), .data_seed = n + 1);
        s.Hk = rng_between(&r, 1, 2), s.H = s.Hk * rng_between(&r, 1, 3);
        s.B = rng_between(&r, 1, 2);
        s.Sq = rng_between(&r, 20, 200), s.Sk = rng_between(&r, 20, 300);
        s.D = s.Dv = n % 3 ? 64 : rng_between(&r, 8, 128);
        s.causal = n % 4 == 1;
        s.sinks = n % 5 == 2;
        s.dlse = n % 7 == 3;
        s.dropout_p = n % 6 == 4 ? 0.3 : 0;
        s.out_dtype = n % 3 == 1 ? ATTN_F32 : ATTN_BF16;
        s.give_forward = n % 8 >= 6;
        struct fixture got, want;
        double error = 0;
        fixture_make(&got, &s);
        fixture_copy(&want, &got);
        run_reference(&want.p);
        fixture_run(&bench, &got);
        const double top = largest(&want.p.dalibi_slopes);
        for (int64_t e = 0; e < tensor_elements(&want.p.dalibi_slopes); e++)
            error = fmax(error, fabs(tensor_get(&got.p.dalibi_slopes, e) - tensor_get(&want.p.dalibi_slopes, e)) / top);
        if (!(error <= limits_of[ATTN_BF16].sums / (s.out_dtype == ATTN_BF16 ? 100 : 4))) {
            fprintf(stderr, "dalibi_slopes: error %.3g of the largest\n", error);
            spec_print(stderr, &s);
            failed++;
        }
        fixture_clear(&got), fixture_clear(&want);
    }
    assert_int_equal(failed, 0);
}

void test_a_row_with_one_key_is_that_value_to_the_bit(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(dtypes); n++) {
        const struct spec s = SPEC(.dtype = dtypes[n], .out_dtype = dtypes[n], SIZES(150, 150, 64), WINDOW(0, 0),
                                   .q_amp = 4);
        struct fixture f;
        fixture_make(&f, &s);
        fixture_run(&bench, &f);
        for (int64_t e = 0; e < tensor_elements(&f.p.out); e++)
            assert_true(tensor_get(&f.p.out, e) == tensor_get(&f.p.v, e));
        fixture_clear(&f);
    }
}

/* Tests each float8 code in two ways. As the only value it must be the output, and as the only channel of a key it must
 * be the score. */
void test_every_float8_is_its_number(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8E4M3 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(dtypes); n++) {
        const struct spec s = SPEC(.dtype = dtypes[n], .out_dtype = dtypes[n] == ATTN_F8E4M3 ? ATTN_BF16 : dtypes[n],
                                   .fp8_keys = true, .B = 256, SIZES(1, 1, 64), HEADS(1, 1), .has_scale = true,
                                   .scale = 1);
        struct fixture f;
        fixture_make(&f, &s);
        for (int b = 0; b < 256; b++)
            for (int d = 0; d < 64; d++) {
                tensor_set(&f.p.q, b * 64 + d, d == b % 64);
                ((uint8_t *)f.p.k.data)[b * 64 + d] = (uint8_t)(d == b % 64 ? b : 0);
                ((uint8_t *)f.p.v.data)[b * 64 + d] = (uint8_t)(b + 5 * d);
            }
        fixture_run(&bench, &f);
        for (int b = 0; b < 256; b++) {
            const double score = attn_e4m3_to_f32((uint8_t)b), lse = tensor_get(&f.p.lse, b);
            assert_true(isnan(score) ? isnan(lse) : fabs(lse - score) <= 1e-6 * fabs(score));
            for (int d = 0; d < 64 && !isnan(score); d++) {
                const double want = attn_e4m3_to_f32((uint8_t)(b + 5 * d)), got = tensor_get(&f.p.out, b * 64 + d);
                assert_true(isnan(want) ? isnan(got) : got == want);
            }
        }
        fixture_clear(&f);
    }
}

/* fixture_compare(), which compares the results, requires a NaN exactly where the reference backend has one. */
void test_nan_reaches_exactly_the_rows_that_see_it(void **state)
{
    static const struct spec cases[] = {
        SPEC(SIZES(150, 170, 64), .causal = true, .poison = 1),
        SPEC(SIZES(150, 170, 64), .causal = true, .poison = 2),
        SPEC(SIZES(150, 170, 64), WINDOW(20, 10), .poison = 1, BF16),
        SPEC(SIZES(150, 170, 64), WINDOW(20, 10), .poison = 2, BF16),
        SPEC(SIZES(150, 170, 40), .keep_mask = 8, .keep = 0.5, .poison = 2, F16),
        SPEC(SIZES(150, 170, 64), .bias = 8, .bias_hidden = 0.5, .poison = 2),
        SPEC(SIZES(150, 170, 64), .mask_bounds = 4, .poison = 2, F16),
        SPEC(SIZES(150, 170, 64), .poison = 1, HEADS(4, 2)),
        SPEC(SIZES(1, 3000, 64), .poison = 2, HEADS(4, 2)),
        SPEC(SIZES(1, 3000, 64), .poison = 2, HEADS(4, 2), BF16),
        SPEC(.B = 24, SIZES(1, 2000, 128), .poison = 2, HEADS(4, 2), BF16, .many_blocks = true),
        SPEC(SIZES(5, 900, 128), .poison = 1, HEADS(8, 2), BF16, .causal = true, .fp8_keys = true, .fp8_scales = true),
        SPEC(SIZES(5, 900, 64), .poison = 2, HEADS(8, 2), F16, WINDOW(100, 0), .fp8_keys = true),
        SPEC(SIZES(9, 900, 256), .poison = 2, HEADS(8, 2), FP8, .causal = true),
        SPEC(SIZES(5, 900, 64), .poison = 1, HEADS(8, 2), BF16, .causal = true, .sinks = 1),
        SPEC(SIZES(5, 900, 128), .poison = 2, HEADS(8, 2), F16, WINDOW(100, 0)),
        SPEC(SIZES(60, 70, 64), .poison = 2, HEADS(2, 2), BF16, .causal = true),
        SPEC(SIZES(3, 700, 256), .poison = 2, HEADS(4, 1), BF16, .keep_mask = 8, .keep = 0.5),
        SPEC(.sequences = 3, .q_lengths = { 30, 64, 65 }, .k_lengths = { 50, 64, 60 }, .causal = true, .poison = 2,
             BF16),
    };
    int failed = 0;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        if (!cases[n].many_blocks || !is_brief()) failed += !agrees(&cases[n]);
    assert_int_equal(failed, 0);
}

/* A NaN in a key must reach the gradients of just those queries that see the key. */
void test_nan_reaches_exactly_the_gradients_that_see_it(void **state)
{
    static const struct spec cases[] = {
        SPEC(BACK, SIZES(150, 170, 64), .causal = true, .poison = 1),
        SPEC(BACK, SIZES(150, 170, 64), .causal = true, .poison = 2),
        SPEC(BACK, SIZES(150, 170, 64), WINDOW(20, 10), .poison = 2, BF16),
        SPEC(BACK, SIZES(150, 170, 40), .keep_mask = 8, .keep = 0.02, .poison = 1, F16),
    };
    int failed = 0;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) failed += !agrees(&cases[n]);
    assert_int_equal(failed, 0);
}

/* ---- Tests of scores beyond float32, of masks with large numbers, and of the order of sums ----------------------- */

/* clang-format off: each row of the table stays on one line */

/* The products q.k overflow float32, but the scores (scale times q.k) do not. */
static const struct spec far_products[] = {
    SPEC(.name = "products of 1e39", SIZES(70, 90, 64), .q_amp = 1e19, .has_scale = true, .scale = 1.2e-38),
    SPEC(.name = "products of 1e39, bfloat16", SIZES(70, 90, 64), BF16, .q_amp = 1e19, .has_scale = true,
         .scale = 1.2e-38),
    SPEC(.name = "products of 1e39, bfloat16, D 128", SIZES(140, 200, 128), BF16, .q_amp = 1e19, .causal = true,
         .has_scale = true, .scale = 1.2e-38),
    SPEC(.name = "products of 1e39, bfloat16, D 256", SIZES(40, 70, 256), BF16, .q_amp = 1e19, .has_scale = true,
         .scale = 1.2e-38),
    SPEC(.name = "some products beyond 3.4e38", SIZES(70, 90, 64), .q_amp = 4e18, .has_scale = true, .scale = 2e-38),
    SPEC(.name = "some products beyond 3.4e38, bfloat16", SIZES(70, 90, 64), BF16, .q_amp = 4e18, .has_scale = true,
         .scale = 2e-38),
    SPEC(.name = "products of 1e39, softcap", SIZES(70, 90, 64), .q_amp = 1e19, .has_scale = true, .scale = 1.2e-38,
         .softcap = 10),
    SPEC(.name = "products of 1e39, softcap, bfloat16", SIZES(70, 90, 64), BF16, .q_amp = 1e19, .has_scale = true,
         .scale = -1.2e-38, .softcap = 10),
    SPEC(.name = "products of 1e39, ALiBi, packed", BF16, .q_amp = 1e19, .has_scale = true, .scale = 1.2e-38,
         .alibi = 1, .sequences = 2, .q_lengths = { 30, 50 }, .k_lengths = { 40, 70 }),
    SPEC(.name = "products of 1e39, decoding", SIZES(1, 1500, 128), BF16, .q_amp = 1e19, .has_scale = true,
         .scale = 1.2e-38),
    SPEC(.name = "products of 1e39, decoding, grouped", SIZES(2, 300, 64), BF16, HEADS(4, 2), .q_amp = 1e19,
         .has_scale = true, .scale = 1.2e-38),
    SPEC(.name = "products of 1e39, head size 1", SIZES(1, 2, 1), HEADS(1, 1), .q_amp = 2e19, .has_scale = true,
         .scale = 1.2e-38),
    SPEC(.name = "products of 1e39, the default scale", SIZES(70, 90, 64), .q_amp = 1e19),
    SPEC(.name = "products of 1e39, the default scale, bfloat16", SIZES(70, 90, 64), BF16, .q_amp = 1e19),
};

/* clang-format on */

void test_products_beyond_float32_count_where_their_scores_are_ordinary(void **state)
{
    int failed = 0;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(far_products); i++)
        for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
            struct spec s = far_products[i];
            s.op = op;
            if (!agrees(&s)) failed++;
        }
    assert_int_equal(failed, 0);
}

void test_products_beyond_float32_count_in_latent_attention(void **state)
{
    const struct spec s = SPEC(.name = "products of 1e39, latent", MLA, .latent = true, BF16, .Sq = 1, .Sk = 200,
                               .q_amp = 1e19, .has_scale = true, .scale = 1.2e-38);
    (void)state;
    assert_true(spec_agrees(&bench, &s));
}

/* All products q.k of a row are below -3.4e38, the lowest float32. The row must still attend to its keys, with equal
 * weights. */
void test_a_row_whose_products_all_leave_float32_sees_its_keys(void **state)
{
    static const struct spec cases[] = {
        SPEC(BF16, SIZES(40, 50, 64), HEADS(1, 1)),
        SPEC(BF16, SIZES(1, 300, 128), HEADS(1, 1)),
        SPEC(SIZES(40, 50, 64), HEADS(1, 1)),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture got, want;
        char why[400];
        fixture_make(&got, &cases[n]);
        for (int64_t e = 0; e < tensor_elements(&got.p.q); e++) tensor_set(&got.p.q, e, 0x1p64);
        for (int64_t e = 0; e < tensor_elements(&got.p.k); e++) tensor_set(&got.p.k, e, -0x1p64);
        fixture_copy(&want, &got);
        run_reference(&want.p);
        fixture_run(&bench, &got);
        if (!fixture_compare(&got, &want, NULL, why, sizeof why)) fail_msg("%zu: %s", n, why);
        fixture_clear(&got), fixture_clear(&want);
    }
}

void test_lse_alone_is_the_lse_beside_out(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_BF16 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(dtypes); n++) {
        struct spec s = SPEC(.dtype = dtypes[n], .out_dtype = dtypes[n], SIZES(70, 90, 64));
        struct fixture both, alone;
        fixture_make(&both, &s);
        for (int64_t e = 0; e < tensor_elements(&both.p.q); e++) tensor_set(&both.p.q, e, 0x1p63);
        for (int64_t e = 0; e < tensor_elements(&both.p.k); e++)
            tensor_set(&both.p.k, e, e % 64 < 32 ? 0x1p63 : -0x1p63);
        fixture_copy(&alone, &both);
        alone.p.out.rank = 0;
        fixture_run(&bench, &both);
        fixture_run(&bench, &alone);
        for (int64_t e = 0; e < tensor_elements(&both.p.lse); e++) {
            const double x = tensor_get(&alone.p.lse, e), y = tensor_get(&both.p.lse, e);
            if (!(fabs(x - log(90)) <= 2e-5) || x != y)
                fail_msg("lse %lld is %.9g alone and %.9g beside out, and should be %.9g", (long long)e, x, y, log(90));
        }
        fixture_clear(&both), fixture_clear(&alone);
    }
}

/* Writes a bias that masks padding on the left, as libraries do: `hidden` for padding keys, for all keys of padding
 * queries, and for later keys. */
static void pad_left(struct fixture *f, double hidden)
{
    const int64_t Sq = f->spec.Sq, Sk = f->spec.Sk;
    for (int64_t i = 0; i < Sq; i++)
        for (int64_t j = 0; j < Sk; j++)
            tensor_set(&f->p.bias, i * Sk + j, i < Sq / 3 || j < Sk / 3 || j > i + Sk - Sq ? hidden : 0);
}

void test_rows_that_a_mask_fills_with_one_huge_number_agree_with_the_reference(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    static const double hidden[] = { -3.4028234663852886e38, -1e30, -1e10, -1e9, 1e30 };
    static const int64_t head_sizes[] = { 64, 128, 256 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(dtypes) * ARRAY_SIZE(hidden) * ARRAY_SIZE(head_sizes) * 3; n++) {
        const size_t form = n % 3, size = n / 3 % ARRAY_SIZE(head_sizes);
        const size_t number = n / 3 / ARRAY_SIZE(head_sizes) % ARRAY_SIZE(hidden);
        const attn_dtype dtype = dtypes[n / 3 / ARRAY_SIZE(head_sizes) / ARRAY_SIZE(hidden)];
        struct spec s = SPEC(.dtype = dtype, .out_dtype = dtype, SIZES(80, 90, head_sizes[size]), HEADS(2, 1),
                             .bias = 5, .sinks = form == 2, .dropout_p = form == 1 ? 0.25 : 0, .seed = 7);
        struct fixture got, want;
        char why[400];
        s.op = form == 0 ? ATTN_OP_FORWARD : ATTN_OP_BACKWARD;
        s.dlse = s.give_forward = form == 2;
        s.any_order = number % 2;
        if (!is_ours() || (is_brief() && number > 1 && size > 0)) continue;
        fixture_make(&got, &s);
        pad_left(&got, hidden[number]);
        got.p.dbias.rank = 0;
        if (s.give_forward) {
            attn_problem forward = got.p;
            forward.op = ATTN_OP_FORWARD;
            run_reference(&forward);
        }
        fixture_copy(&want, &got);
        run_reference(&want.p);
        fixture_run(&bench, &got);
        if (!fixture_compare(&got, &want, NULL, why, sizeof why)) {
            spec_print(stderr, &s);
            fail_msg("hidden by %g: %s", hidden[number], why);
        }
        fixture_clear(&got), fixture_clear(&want);
    }
}

/* Sets the last channel of q and k so that products of 1e4 and more cancel: q.k is 5 sqrt(D) for query i and key i. */
static void make_products_cancel(struct fixture *f)
{
    const int64_t D = f->spec.D;
    for (int64_t i = 0; i < f->spec.Sq; i++) {
        double sum = 0;
        for (int64_t d = 0; d < D - 1; d++) sum += tensor_get(&f->p.q, i * D + d) * tensor_get(&f->p.k, i * D + d);
        tensor_set(&f->p.q, i * D + D - 1, 256);
        tensor_set(&f->p.k, i * D + D - 1, (5 * sqrt((double)D) - sum) / 256);
    }
}

static const attn_kernel *kernel_of(const attn_problem *p, attn_op op)
{
    attn_problem one_way = *p;
    attn_plan plan;
    attn_error err = { 0 };
    one_way.op = op;
    assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &one_way, &plan, &err), ATTN_OK);
    return plan.kernel;
}

/* Returns whether forward and backward of the problem add up q.k in the same order. They do not if one of them
 * runs on the kernel "simple", which computes row by row, and the other does not. In float32 they also do not if only
 * one of them runs on a kernel for wide heads. */
static bool sums_are_alike(const attn_problem *p)
{
    const attn_kernel *const forward = kernel_of(p, ATTN_OP_FORWARD), *const backward = kernel_of(p, ATTN_OP_BACKWARD);
    const bool by_rows = strcmp(forward->name, "simple") == 0;
    if (by_rows != (strcmp(backward->name, "simple") == 0)) return false;
    return by_rows || p->q.dtype != ATTN_F32 || forward->head_dim == backward->head_dim;
}

/* If a query sees one key, P is 1 and dv is dout. P is exactly 1 only if the forward's lse and the backward's score are
 * the same sum, rounded in the same way. In float32 P may be off by 4e-6, because lse itself is rounded. */
void test_one_key_has_a_probability_of_one(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    static const int64_t head_sizes[] = { 4, 64, 80, 128, 192, 256, 320 }, queries[] = { 1, 40 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(dtypes) * ARRAY_SIZE(head_sizes) * ARRAY_SIZE(queries) * 2; n++) {
        const bool given = n % 2;
        const attn_dtype dtype = dtypes[n / 2 % ARRAY_SIZE(dtypes)];
        const int64_t D = head_sizes[n / 2 / ARRAY_SIZE(dtypes) % ARRAY_SIZE(head_sizes)],
                      Sq = queries[n / 2 / ARRAY_SIZE(dtypes) / ARRAY_SIZE(head_sizes)];
        const struct spec s = SPEC(BACK, .dtype = dtype, .out_dtype = dtype, SIZES(Sq, Sq, D), HEADS(1, 1),
                                   WINDOW(0, 0), .q_amp = 30, .give_forward = given, .data_seed = 3 + n);
        struct fixture f;
        if (!is_ours()) continue;
        fixture_make(&f, &s);
        make_products_cancel(&f);
        /* P is exactly 1 only if forward and backward add in the same order. Other problems are skipped. */
        if (given && !sums_are_alike(&f.p)) {
            fixture_clear(&f);
            continue;
        }
        if (given) {
            f.p.op = ATTN_OP_FORWARD;
            fixture_run(&bench, &f);
            f.p.op = ATTN_OP_BACKWARD;
        }
        fixture_run(&bench, &f);
        for (int64_t e = 0; e < tensor_elements(&f.p.dv); e++) {
            const double p = tensor_get(&f.p.dv, e) / tensor_get(&f.p.dout, e);
            if (!(fabs(p - 1) <= (dtype == ATTN_F32 ? 4e-6 : 0)))
                fail_msg("%s, D %lld, %lld queries, %s: P is %.9g", attn_dtype_name(dtype), (long long)D, (long long)Sq,
                         given ? "out and lse given" : "no out", p);
        }
        fixture_clear(&f);
    }
}

/* What makes a row see only one key: the problem has one key (ALONE), or a window, a keep_mask, a bias or FlashMask
 * hides the others. */
enum one_key { ALONE, WINDOWED, KEPT, BIASED, FLASHMASKED, ONE_KEYS };

static void show_one_key(struct fixture *f, int64_t key)
{
    for (int64_t n = 0; f->p.keep_mask.rank && n < tensor_elements(&f->p.keep_mask); n++)
        tensor_set(&f->p.keep_mask, n, n % f->p.keep_mask.shape[3] == key);
    for (int64_t n = 0; f->p.bias.rank && n < tensor_elements(&f->p.bias); n++)
        tensor_set(&f->p.bias, n, n % f->p.bias.shape[3] == key ? 0.25 : -INFINITY);
    for (int64_t n = 0; f->p.mask_startend_rows.rank && n < tensor_elements(&f->p.mask_startend_rows); n++) {
        /* FlashMask: all queries see `key` (lts is Sq, ute is 0), and no query sees another key. */
        const bool seen = n / 2 % f->p.mask_startend_rows.shape[2] == key;
        tensor_set(&f->p.mask_startend_rows, n, n % 2 == 0 && seen ? (double)f->spec.Sq : 0);
    }
}

/* Every query sees at most one key, and dout is 1. So dv of a key must be exactly the number of rows (queries, in all
 * heads of the group) that see it. */
void test_one_key_has_p_1_to_the_last_bit(void **state)
{
    static const int64_t head_sizes[] = { 5, 64, 100, 128, 200, 256, 320 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(head_sizes) * ONE_KEYS * 4; n++) {
        const enum one_key how = (enum one_key)(n / 4 % ONE_KEYS);
        const int64_t Sk = how == ALONE ? 1 : 70, key = how == ALONE ? 0 : (int64_t)(n * 13 % 70), Sq = 50;
        const bool given = n % 2;
        struct spec s = SPEC(BACK, SIZES(Sq, Sk, head_sizes[n / 4 / ONE_KEYS]), HEADS(4, 2), .q_amp = 30,
                             .any_order = n / 2 % 2, .give_forward = given, .data_seed = 5 + n);
        struct fixture f;
        if (!is_ours()) continue;
        if (how == WINDOWED) s.window_left = s.window_right = 0;
        if (how == KEPT) s.keep_mask = 1 + (int)n % 8, s.keep = 1;
        if (how == BIASED) s.bias = 1 + (int)n % 8;
        if (how == FLASHMASKED) s.mask_bounds = 2;
        fixture_make(&f, &s);
        show_one_key(&f, key);
        for (int64_t e = 0; e < tensor_elements(&f.p.dout); e++) tensor_set(&f.p.dout, e, 1);
        if (!given || sums_are_alike(&f.p)) {
            if (given) {
                f.p.op = ATTN_OP_FORWARD;
                fixture_run(&bench, &f);
                f.p.op = ATTN_OP_BACKWARD;
            }
            fixture_run(&bench, &f);
            for (int64_t e = 0; e < tensor_elements(&f.p.dv); e++) {
                const int64_t j = e / s.Dv / s.Hk, seen = how == WINDOWED ? j >= Sk - Sq : j == key ? Sq : 0;
                if (tensor_get(&f.p.dv, e) != (double)(seen * (s.H / s.Hk)))
                    fail_msg("D %lld, kind %d, %s: dv is %.9g, not %lld", (long long)s.D, (int)how,
                             given ? "out and lse given" : "no out", tensor_get(&f.p.dv, e),
                             (long long)(seen * (s.H / s.Hk)));
            }
        }
        fixture_clear(&f);
    }
}
