/* backends_truth.c: compares results that a device computes in float64 (attn_truth_some()) with the reference
 * backend. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backends.h"

/* Returns whether the backend has attn_truth_some(), and checks that wrong calls of it are refused. */
static bool has_truth(void)
{
    const struct spec s = SPEC(.name = NULL);
    struct fixture f;
    attn_truth_cost cost;
    attn_error err = { 0 };
    const int cancel = 1;
    const attn_truth nothing = { 0 };
    int64_t step = 0;
    fixture_make(&f, &s);
    const attn_status status = attn_truth_need(attn_device_capabilities(bench.device), &f.p, &cost, &err);
    if (status != ATTN_OK) {
        assert_int_equal(status, ATTN_UNSUPPORTED);
        assert_int_equal(attn_truth_some(bench.stream, &f.p, &nothing, NULL, &step, &err), ATTN_UNSUPPORTED);
        assert_int_equal(attn_truth_compare(bench.stream, &f.p, &nothing, NULL, &err), ATTN_UNSUPPORTED);
    } else {
        assert_true(cost.workspace_bytes > 0 && cost.seconds > 0);
        assert_int_equal(attn_truth_some(bench.stream, &f.p, &nothing, NULL, &step, &err), ATTN_INVALID);
        attn_stream_heed(bench.stream, &cancel);
        assert_int_equal(attn_truth_some(bench.stream, &f.p, &nothing, &f, &step, &err), ATTN_CANCELLED);
        attn_stream_heed(bench.stream, NULL);
    }
    fixture_clear(&f);
    return status == ATTN_OK;
}

static const struct spec problems[] = {
    SPEC(.name = "several tiles", HEADS(4, 2), SIZES(150, 203, 64), .causal = true),
    SPEC(.name = "several tiles back", BACK, HEADS(4, 2), SIZES(150, 203, 64), .causal = true),
    SPEC(.name = "wide heads", SIZES(70, 90, 256)),
    SPEC(.name = "wide heads back", BACK, BF16, .Sq = 70, .Sk = 90, .D = 256, .Dv = 192),
    SPEC(.name = "narrow heads back", BACK, F16, .Sq = 33, .Sk = 65, .D = 8, .Dv = 40),
    SPEC(.name = "latent", BF16, MLA, .Sq = 3, .Sk = 70, .latent = true, .causal = true),
    SPEC(.name = "every option back", BACK, BF16, HEADS(4, 2), SIZES(70, 100, 64), .causal = true, .bias = 7,
         .bias_hidden = 0.3, .keep_mask = 3, .keep = 0.8, .alibi = 2, .softcap = 5, .dropout_p = 0.3, .seed = 7,
         .sinks = 1, .dlse = true, .give_forward = true),
    SPEC(.name = "windows and FlashMask back", BACK, HEADS(4, 2), SIZES(100, 130, 64), WINDOW(20, 30), .mask_bounds = 4,
         .mask_heads = 1, .mask_kind = MASK_DOCUMENT, .dropout_p = 0.1, .seed = 3),
    SPEC(.name = "rows that see nothing back", BACK, SIZES(90, 40, 64), .causal = true, .sinks = 2),
    SPEC(.name = "packed with gaps back", BACK, .sequences = 4, .q_lengths = { 70, 0, 3, 130 },
         .k_lengths = { 65, 9, 80, 130 }, .gaps = 5, .causal = true),
    SPEC(.name = "lengths back", BACK, .B = 3, HEADS(4, 2), SIZES(70, 100, 64), .seqlens_q = true, .seqlens_k = true),
    SPEC(.name = "pages", FP8, .B = 3, HEADS(4, 2), SIZES(5, 96, 64), PAGES(16), .fp8_scales = true, .causal = true),
    SPEC(.name = "float8 keys", BF16, .fp8_keys = true, .fp8_scales = true, .scale_axes = 2, SIZES(40, 70, 64)),
    SPEC(.name = "NaN that nobody sees back", BACK, SIZES(70, 140, 64), .causal = true, .keep_mask = 4, .keep = 0.7,
         .poison_unseen = true),
    SPEC(.name = "a NaN among the keys back", BACK, SIZES(70, 70, 64), .causal = true, .poison = 1),
    SPEC(.name = "a NaN among the values back", BACK, SIZES(70, 70, 64), .causal = true, .poison = 2),
    SPEC(.name = "a NaN among the values", SIZES(70, 70, 64), .causal = true, .poison = 2, .dropout_p = 0.5, .seed = 2),
    SPEC(.name = "scores of 1e8 back", BACK, SIZES(70, 70, 64), .q_amp = 4e3, .give_forward = true),
    SPEC(.name = "no scale", SIZES(40, 40, 64), .has_scale = true, .scale = 0),
};

void test_the_truth_rounds_to_the_results_of_the_reference(void **state)
{
    int failed = 0;
    (void)state;
    if (!has_truth()) return;
    for (size_t n = 0; n < ARRAY_SIZE(problems); n++)
        if (is_ours() && !truth_agrees(&bench, &problems[n])) {
            fprintf(stderr, "    (%s)\n", problems[n].name);
            failed++;
        }
    assert_int_equal(failed, 0);
}

void test_random_truths_round_to_the_results_of_the_reference(void **state)
{
    enum { BRIEF_COUNT = 60 };
    const long first = env_number("ATTN_RANDOM_SEED", 1),
               count = env_number("ATTN_RANDOM_COUNT", is_brief() ? BRIEF_COUNT : RANDOM_COUNT);
    int failed = 0;
    (void)state;
    if (!has_truth()) return;
    for (long n = 0; n < count && failed < 20; n++) {
        const struct spec s = random_spec((uint64_t)(first + n));
        if (is_ours() && !truth_agrees(&bench, &s)) {
            fprintf(stderr, "    (random problem %ld)\n", first + n);
            failed++;
        }
    }
    assert_int_equal(failed, 0);
}
