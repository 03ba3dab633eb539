/* backends_wide.c: tests of the kernels for head sizes above 256, which divide a head into chunks of columns. Some of
 * these kernels also compute smaller heads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backends.h"

/* Returns a random problem like random_spec(), but with D or Dv or both from 257 to 1024. It has few heads, because the
 * reference backend is slow. */
static struct spec random_wide_spec(uint64_t seed)
{
    static const int64_t head_sizes[] = { 257, 288, 320, 384, 512, 512, 513, 576, 640, 768, 1023, 1024 };
    struct rng r = { seed * UINT64_C(0x9e3779b97f4a7c15) + 7 };
    struct spec s = random_spec(seed);
    for (int n = 0; n < 2; n++) {
        int64_t *const size = n ? &s.Dv : &s.D;
        *size = rng_chance(&r, 0.5) ? pick(&r, head_sizes, ARRAY_SIZE(head_sizes)) : rng_between(&r, 257, 1024);
    }
    if (rng_chance(&r, 0.3)) s.Dv = s.D;
    else if (rng_chance(&r, 0.2)) s.Dv = rng_between(&r, 1, 256);
    else if (rng_chance(&r, 0.2)) s.D = rng_between(&r, 1, 256);
    s.H /= s.Hk;
    s.Hk = rng_chance(&r, 0.8) ? 1 : 2;
    s.H = s.Hk * (s.H > 2 ? 2 : s.H);
    if (s.B > 2) s.B = 2;
    return s;
}

/* clang-format off: each row of the table stays on one line */

/* All these problems run forward. Those without float8 and without pages also run backward. Hopper's backward kernel
 * for wide heads also computes smaller heads, if a problem has options that the other kernels do not take. */
static const struct spec wide_cases[] = {
    SPEC(.name = "head size 1024", SIZES(70, 90, 1024), F16, HEADS(2, 1), .causal = true),
    SPEC(.name = "head size 1024, float32", SIZES(40, 50, 1024), HEADS(1, 1)),
    SPEC(.name = "v of one channel", .D = 1024, .Dv = 1, BF16),
    SPEC(.name = "k of one channel", .D = 1, .Dv = 1024, F16),
    SPEC(.name = "one query", SIZES(1, 200, 512), BF16, HEADS(4, 1)),
    SPEC(.name = "one key", SIZES(80, 1, 512), BF16, HEADS(1, 1)),
    SPEC(.name = "no queries", .B = 2, SIZES(0, 9, 320), BF16, HEADS(1, 1)),
    SPEC(.name = "no keys", SIZES(9, 0, 320), BF16, HEADS(1, 1)),
    SPEC(.name = "rows that see no key", SIZES(140, 70, 300), F16, HEADS(1, 1), .causal = true),
    SPEC(.name = "NaN at the end", SIZES(150, 140, 520), F16, HEADS(1, 1), .causal = true, .poison = 1),
    SPEC(.name = "infinity at the end", SIZES(60, 90, 520), BF16, HEADS(1, 1), WINDOW(20, 10), .poison = 2),
    SPEC(.name = "NaN at the end, keep_mask", SIZES(60, 70, 320), BF16, HEADS(1, 1), .keep_mask = 8, .keep = 0.5,
         .poison = 1),
    SPEC(.name = "huge scores", SIZES(40, 70, 512), BF16, HEADS(1, 1), .q_amp = 1e5),
    SPEC(.name = "huge scores, softcap", SIZES(40, 70, 512), F16, HEADS(1, 1), .q_amp = 100, .softcap = 10),
    SPEC(.name = "everything", .B = 2, .Sq = 40, .Sk = 70, .D = 272, .Dv = 520, HEADS(4, 2), F16, .bias = 8,
         .bias_hidden = 0.1, .keep_mask = 5, .keep = 0.8, .sinks = 2, .alibi = 1, .softcap = 20, .dropout_p = 0.2,
         .seed = 4, .causal = true),
    SPEC(.name = "FlashMask", SIZES(130, 140, 384), BF16, HEADS(2, 1), .causal = true, .mask_bounds = 2,
         .mask_heads = 1),
    SPEC(.name = "packed", .sequences = 3, .q_lengths = { 30, 0, 140 }, .k_lengths = { 50, 9, 60 }, .causal = true,
         .D = 400, .Dv = 300, BF16, HEADS(2, 1)),
    SPEC(.name = "one tile of keys", SIZES(70, 64, 320), BF16, HEADS(1, 1)),
    SPEC(.name = "two tiles of keys, softcap", SIZES(64, 128, 384), F16, HEADS(2, 1), .softcap = 20, .sinks = 1),
    SPEC(.name = "three tiles of keys, ALiBi", SIZES(65, 192, 448), BF16, HEADS(2, 1), .alibi = 1, .causal = true),
    SPEC(.name = "six tiles of keys, window", SIZES(330, 330, 512), F16, HEADS(1, 1), WINDOW(100, 0)),
    SPEC(.name = "two blocks of columns", SIZES(130, 200, 768), BF16, HEADS(2, 2), .causal = true,
         .alignment = ATTN_TOP_LEFT),
    SPEC(.name = "values of more columns than keys", .Sq = 70, .Sk = 140, .D = 64, .Dv = 1000, F16, HEADS(1, 1)),
    SPEC(.name = "lengths of keys", .B = 3, SIZES(70, 200, 512), BF16, HEADS(2, 1), .causal = true, .seqlens_k = true,
         .poison_unseen = true),
    SPEC(.name = "FlashMask hides tiles in the middle", SIZES(256, 320, 512), F16, HEADS(1, 1), .mask_bounds = 4,
         .mask_heads = 1),
    SPEC(.name = "several parts of a head", SIZES(400, 300, 264), F16, HEADS(2, 1), .causal = true, .dlse = true),
    SPEC(.name = "several parts, packed", .sequences = 4, .q_lengths = { 300, 0, 129, 64 },
         .k_lengths = { 260, 40, 300, 64 }, .D = 264, .Dv = 320, BF16, HEADS(4, 2), WINDOW(150, 20),
         .poison_unseen = true),
    SPEC(.name = "several parts, gaps", .sequences = 3, .q_lengths = { 140, 70, 10 }, .k_lengths = { 100, 300, 9 },
         .gaps = 20, .D = 320, .Dv = 264, BF16, HEADS(2, 1), .causal = true),
    SPEC(.name = "several parts, lengths", .B = 3, SIZES(140, 300, 320), BF16, HEADS(4, 2), .seqlens_k = true,
         .seqlens_q = true, .float_grads = 7, .poison_unseen = true),
    SPEC(.name = "bias and keep_mask, several parts", SIZES(200, 300, 384), F16, HEADS(2, 1), .bias = 5,
         .bias_dtype = ATTN_F16, .bias_hidden = 0.1, .keep_mask = 8, .keep = 0.7),
    SPEC(.name = "keep_mask, dropout, softcap, ALiBi", SIZES(200, 300, 192), BF16, HEADS(4, 2), .keep_mask = 8,
         .keep = 0.7, .dropout_p = 0.2, .seed = 3, .softcap = 20, .alibi = 1),
    SPEC(.name = "keep_mask at the end", .B = 2, SIZES(140, 270, 256), F16, HEADS(2, 1), .keep_mask = 2, .keep = 0.5,
         .keep_tail = 150, .seqlens_k = true, .causal = true),
    SPEC(.name = "FlashMask and dropout", SIZES(256, 320, 256), BF16, HEADS(2, 1), .mask_bounds = 4, .mask_heads = 1,
         .dropout_p = 0.1, .seed = 5),
    SPEC(.name = "softcap and dropout, packed", .sequences = 3, .q_lengths = { 30, 140, 200 },
         .k_lengths = { 50, 300, 60 }, .causal = true, .D = 160, .Dv = 136, F16, HEADS(2, 1), .softcap = 30,
         .dropout_p = 0.3, .seed = 6),
    SPEC(.name = "NaN at the end, packed, softcap", .sequences = 2, .q_lengths = { 100, 60 }, .k_lengths = { 100, 90 },
         .D = 264, .Dv = 264, BF16, HEADS(2, 1), .softcap = 30, .poison = 1),
    SPEC(.name = "bias, D 256", SIZES(140, 300, 256), BF16, HEADS(2, 1), .bias = 8, .bias_dtype = ATTN_BF16,
         .bias_hidden = 0.1, .causal = true),
    SPEC(.name = "bias and softcap, D 64", .B = 2, SIZES(140, 300, 64), F16, HEADS(4, 2), .bias = 5, .softcap = 20,
         .alibi = 1, .dropout_p = 0.1, .seed = 8),
    SPEC(.name = "FlashMask and bias, D 40", SIZES(140, 300, 40), BF16, HEADS(2, 1), .bias = 5, .mask_bounds = 2,
         .mask_heads = 1, .causal = true),
    SPEC(.name = "lengths, keep_mask and dropout, D 128", .B = 3, SIZES(140, 300, 128), BF16, HEADS(2, 1),
         .seqlens_k = true, .seqlens_q = true, .keep_mask = 8, .keep = 0.6, .dropout_p = 0.3, .seed = 2,
         .poison_unseen = true),
    SPEC(.name = "lengths, bias, D 96", .B = 2, SIZES(140, 300, 96), F16, HEADS(2, 1), .seqlens_k = true, .bias = 6,
         .poison_unseen = true),
    SPEC(.name = "rows of odd strides", .Sq = 40, .Sk = 70, .D = 301, .Dv = 515, F16, HEADS(2, 1), .strided = true),
    SPEC(.name = "pages", .B = 2, SIZES(20, 96, 512), PAGES(16), HEADS(2, 1), BF16, .causal = true),
    SPEC(.name = "pages of 7 float8 keys", .B = 2, SIZES(20, 70, 512), PAGES(7), HEADS(2, 1), BF16, .fp8_keys = true,
         .fp8_scales = true),
    SPEC(.name = "float8", SIZES(40, 70, 512), FP8, HEADS(2, 1), .fp8_scales = true, .causal = true),
};
/* clang-format on */

void test_wide_heads_agree_with_the_reference(void **state)
{
    (void)state;
    assert_int_equal(problems_disagree(wide_cases, ARRAY_SIZE(wide_cases)), 0);
}

void test_wide_heads_of_float32_agree_with_the_reference(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec floats[] = {
        SPEC(.name = "two blocks of columns, causal", SIZES(50, 70, 520), HEADS(2, 1), .causal = true, .sinks = 1),
        SPEC(.name = "several tiles of keys and of queries", .Sq = 140, .Sk = 150, .D = 257, .Dv = 40, HEADS(1, 1),
             WINDOW(90, 20)),
        SPEC(.name = "k of one channel", .Sq = 30, .Sk = 40, .D = 1, .Dv = 600, HEADS(1, 1)),
        SPEC(.name = "one key, and rows that see no key", SIZES(40, 20, 300), HEADS(1, 1), .causal = true),
        SPEC(.name = "NaN at the end", SIZES(50, 60, 320), HEADS(1, 1), .causal = true, .poison = 1),
        SPEC(.name = "infinity at the end", SIZES(40, 50, 264), HEADS(1, 1), WINDOW(20, 10), .poison = 2),
        SPEC(.name = "huge scores", SIZES(30, 40, 264), HEADS(1, 1), .q_amp = 1e5),
        SPEC(.name = "tiny numbers", SIZES(30, 40, 264), HEADS(1, 1), .q_amp = 1e-20, .v_amp = 1e-25),
        SPEC(.name = "large numbers", SIZES(30, 40, 264), HEADS(1, 1), .q_amp = 30, .v_amp = 1e18),
        SPEC(.name = "everything", .B = 2, .Sq = 20, .Sk = 40, .D = 272, .Dv = 264, HEADS(4, 2), .bias = 8,
             .bias_hidden = 0.1, .keep_mask = 5, .keep = 0.8, .sinks = 2, .alibi = 1, .softcap = 20, .dropout_p = 0.2,
             .seed = 4, .causal = true),
        SPEC(.name = "FlashMask", SIZES(70, 80, 260), HEADS(2, 1), .mask_bounds = 2, .mask_heads = 1),
        SPEC(.name = "packed, gaps", .sequences = 3, .q_lengths = { 30, 0, 40 }, .k_lengths = { 50, 9, 60 }, .gaps = 20,
             .causal = true, .D = 264, .Dv = 300, HEADS(2, 1)),
        SPEC(.name = "lengths", .B = 3, SIZES(40, 70, 264), HEADS(2, 1), .seqlens_k = true, .seqlens_q = true,
             .poison_unseen = true),
        SPEC(.name = "a bias of huge numbers", SIZES(30, 40, 264), HEADS(2, 1), .bias = 5, .bias_levels = 1),
        SPEC(.name = "rows of odd strides", .Sq = 30, .Sk = 40, .D = 301, .Dv = 515, HEADS(2, 1), .strided = true),
        SPEC(.name = "pages of 7 keys", .B = 2, SIZES(20, 70, 264), PAGES(7), HEADS(2, 1), .causal = true),
    };
    /* clang-format on */
    (void)state;
    assert_int_equal(problems_disagree(floats, ARRAY_SIZE(floats)), 0);
}

/* No query sees the last keys, so no kernel writes their P and dS: a kernel that reads them finds NaN. The library
 * computes rows with NaN again, which hides such a mistake. So the emulator also runs tests named test_scores* without
 * this repair. */
void test_scores_of_wide_heads_that_nobody_sees_are_not_read(void **state)
{
    static const struct spec cases[] = {
        SPEC(.name = "one query, 257 keys", SIZES(1, 257, 264), BF16, HEADS(1, 1), BACK, WINDOW(-1, 200),
             .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "200 queries, 300 keys", SIZES(200, 300, 264), F16, HEADS(2, 1), BACK, WINDOW(-1, 30),
             .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "packed", .sequences = 2, .q_lengths = { 140, 10 }, .k_lengths = { 300, 270 }, .D = 264, .Dv = 264,
             BF16, HEADS(2, 1), BACK, WINDOW(-1, 100), .alignment = ATTN_TOP_LEFT),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        if (!agrees(&cases[n])) fail_msg("%s: wrong", cases[n].name);
}

/* Kernels store an lse of 2^24 or more as two numbers. */
void test_wide_heads_agree_if_lse_is_huge_and_scores_are_not(void **state)
{
    static const struct spec cases[] = {
        SPEC(SIZES(20, 3000, 264), BF16, HEADS(1, 1), BACK, .bias = 5, .q_amp = 1e-6),
        SPEC(SIZES(20, 3000, 264), F16, HEADS(1, 1), BACK, .bias = 5, .q_amp = 1e-6, .give_forward = true),
    };
    (void)state;
    if (!is_ours()) return;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture got, want;
        char why[400];
        fixture_make(&got, &cases[n]);
        for (int64_t at = 0; at < cases[n].Sq * cases[n].Sk; at++) tensor_set(&got.p.bias, at, 16777215);
        got.p.dbias.rank = 0;
        if (cases[n].give_forward) {
            attn_problem forward = got.p;
            forward.op = ATTN_OP_FORWARD;
            run_reference(&forward);
        }
        fixture_copy(&want, &got);
        run_reference(&want.p);
        fixture_run(&bench, &got);
        if (!fixture_compare(&got, &want, NULL, why, sizeof why)) fail_msg("%zu: %s", n, why);
        fixture_clear(&got), fixture_clear(&want);
    }
}

void test_random_wide_heads_agree_with_the_reference(void **state)
{
    (void)state;
    random_problems_agree(random_wide_spec, env_number("ATTN_RANDOM_SEED", 1),
                          env_number("ATTN_RANDOM_COUNT", RANDOM_COUNT / 3));
}

void test_wide_heads_have_the_same_bits_alone_and_among_others(void **state)
{
    (void)state;
    assert_same_bits_alone_and_among_others(random_wide_spec, 6);
}

/* ---- Tests of decoding with wide heads: few queries, many keys --------------------------------------------------- */

/* clang-format off: each row of the table stays on one line */

/* Problems for the decoding kernel of wide heads. It takes up to 16 rows (queries times heads of a group), and splits
 * keys at multiples of 128. It has one form for head sizes up to 512 and another for larger ones. The test sets Sk. */
static const struct spec wide_decode_forms[] = {
    SPEC(.name = "8 heads to 1", SIZES(1, 0, 512), HEADS(8, 1), BF16),
    SPEC(.name = "16 heads to 4, pages", .B = 2, SIZES(1, 0, 512), PAGES(16), HEADS(16, 4), BF16,
         .poison_unseen = true),
    SPEC(.name = "one head, lengths, sinks", .B = 3, SIZES(1, 0, 320), HEADS(1, 1), F16, .seqlens_k = true,
         .poison_unseen = true, .sinks = 1),
    SPEC(.name = "16 rows, causal", SIZES(4, 0, 1024), HEADS(4, 1), BF16, .causal = true),
    SPEC(.name = "17 rows, causal", SIZES(17, 0, 384), HEADS(1, 1), F16, .causal = true),
    SPEC(.name = "pages of 8, window", .B = 2, SIZES(3, 0, 768), PAGES(8), HEADS(2, 1), BF16, WINDOW(300, 2)),
    SPEC(.name = "softcap, ALiBi, pages of 7", .B = 2, SIZES(2, 0, 512), PAGES(7), HEADS(4, 2), F16, .softcap = 20,
         .alibi = 1, .causal = true),
    SPEC(.name = "bias, keep_mask, dropout", SIZES(2, 0, 576), HEADS(6, 1), BF16, .bias = 4, .bias_hidden = 0.2,
         .keep_mask = 8, .keep = 0.6, .dropout_p = 0.2, .seed = 9),
    SPEC(.name = "float8 keys", .B = 2, SIZES(1, 0, 512), HEADS(8, 2), BF16, .fp8_keys = true, .fp8_scales = true),
    SPEC(.name = "float8 keys, pages", .B = 2, SIZES(1, 0, 640), PAGES(16), HEADS(4, 1), F16, .fp8_keys = true),
    SPEC(.name = "float8", SIZES(2, 0, 300), HEADS(4, 1), FP8, .fp8_scales = true),
    SPEC(.name = "values of other sizes than keys", .Sq = 1, .D = 80, .Dv = 1000, HEADS(4, 2), BF16),
    SPEC(.name = "values of one channel", .Sq = 3, .D = 1001, .Dv = 1, HEADS(2, 1), F16, .strided = true),
    SPEC(.name = "NaN in v", SIZES(2, 0, 512), HEADS(4, 1), BF16, .poison = 2, .causal = true),
    SPEC(.name = "NaN in k, window", SIZES(4, 0, 1024), HEADS(1, 1), F16, WINDOW(9, 0), .poison = 1),
    SPEC(.name = "huge scores", SIZES(1, 0, 512), HEADS(2, 1), BF16, .q_amp = 1e5),
};
/* clang-format on */

void test_wide_decoding_agrees_with_the_reference_on_both_sides_of_every_edge(void **state)
{
    static const int64_t keys[] = { 0, 1, 15, 17, 128, 129, 700, 2049 };
    int failed = 0;
    (void)state;
    for (size_t f = 0; f < ARRAY_SIZE(wide_decode_forms); f++)
        for (size_t n = 0; n < ARRAY_SIZE(keys); n++) {
            struct spec s = wide_decode_forms[f];
            s.Sk = s.page_size ? attn_tiles(keys[n], s.page_size) * s.page_size : keys[n];
            s.data_seed = f * 100 + n;
            if (is_brief() && (f + n) % 4) continue;
            if (!agrees(&s)) failed++;
        }
    assert_int_equal(failed, 0);
}

/* Returns a random problem like random_wide_spec(), but a forward with few rows and many keys. */
static struct spec random_wide_decode_spec(uint64_t seed)
{
    struct rng r = { seed * UINT64_C(0xbf58476d1ce4e5b9) + 3 };
    struct spec s = random_wide_spec(seed);
    const int64_t rows = rng_between(&r, 1, 18);
    s.op = ATTN_OP_FORWARD;
    s.dlse = s.give_forward = s.no_dout = false;
    if (s.dtype == ATTN_F32) s.dtype = s.out_dtype = rng_chance(&r, 0.5) ? ATTN_F16 : ATTN_BF16;
    if (s.bias_dtype != ATTN_F32) s.bias_dtype = s.dtype;
    s.Sq = rng_chance(&r, 0.5) ? 1 : rng_between(&r, 1, rows);
    s.H = s.Hk * (rows / s.Sq > 1 ? rng_between(&r, 1, rows / s.Sq) : 1);
    s.Sk = rng_chance(&r, 0.7) ? rng_between(&r, 0, 400) : rng_between(&r, 400, 1200);
    for (int n = 0; n < s.sequences; n++) {
        s.q_lengths[n] = (int)(rng_chance(&r, 0.3) ? rng_between(&r, 0, 40)
                                                   : rng_between(&r, 1, rows / (s.H / s.Hk) + 1));
        s.k_lengths[n] = (int)rng_between(&r, 0, 300);
    }
    s.page_size = 0;
    if (rng_chance(&r, 0.3)) give_pages(&s, pick(&r, page_sizes, ARRAY_SIZE(page_sizes)));
    return s;
}

void test_random_wide_decoding_agrees_with_the_reference(void **state)
{
    (void)state;
    random_problems_agree(random_wide_decode_spec, env_number("ATTN_RANDOM_SEED", 1),
                          env_number("ATTN_RANDOM_COUNT", RANDOM_COUNT / 3));
}

void test_wide_decoding_has_the_same_bits_alone_and_among_others(void **state)
{
    (void)state;
    assert_same_bits_alone_and_among_others(random_wide_decode_spec, 6);
}

/* For few rows of wide heads, a GPU must use the kernel that divides the keys among thread blocks. Latent attention has
 * a faster kernel. */
void test_wide_decoding_splits_keys(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct {
        const char *kernel; /* name of the kernel that Hopper must use */
        struct spec spec;
    } cases[] = {
        { "decode", SPEC(.name = "one query", SIZES(1, 300, 512), HEADS(8, 1), BF16) },
        { "decode", SPEC(.name = "16 rows", SIZES(2, 300, 1024), HEADS(8, 1), F16, .softcap = 5) },
        { "decode", SPEC(.name = "pages", .B = 2, SIZES(1, 320, 320), PAGES(16), HEADS(4, 1), BF16) },
        { "decode", SPEC(.name = "float8 keys", SIZES(1, 300, 512), HEADS(4, 1), BF16, .fp8_keys = true) },
        { "decode", SPEC(.name = "keep_mask", SIZES(1, 300, 512), HEADS(4, 1), BF16, .keep_mask = 8, .keep = 0.5) },
        { "sm90_wide", SPEC(.name = "17 rows", SIZES(17, 300, 512), HEADS(1, 1), BF16) },
        { "sm90_wide", SPEC(.name = "packed", .sequences = 2, .q_lengths = { 1, 40 }, .k_lengths = { 300, 40 },
                            .D = 512, .Dv = 512, HEADS(2, 1), BF16) },
        { "sm90_latent", SPEC(.name = "latent attention", MLA, .latent = true, .Sq = 1, .Sk = 256, BF16) },
    };
    /* clang-format on */
    const attn_capabilities *const can = attn_device_capabilities(bench.device);
    bool hopper = false;
    (void)state;
    for (int n = 0; n < can->kernel_count; n++) hopper |= strcmp(can->kernels[n]->name, "sm90_wide") == 0;
    if (!hopper || getenv("ATTN_CUDA_FAMILY")) return;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture f;
        attn_plan plan;
        attn_error err;
        fixture_make(&f, &cases[n].spec);
        if (cases[n].spec.latent) f.p.v.data = f.p.k.data;
        assert_int_equal(attn_plan_make(can, &f.p, &plan, &err), ATTN_OK);
        if (strcmp(plan.kernel->name, cases[n].kernel) != 0)
            fail_msg("%s: planned on %s, not on %s", cases[n].spec.name, plan.kernel->name, cases[n].kernel);
        fixture_clear(&f);
    }
}
