/* backends_decode.c: tests of problems with few queries and many keys. Keys lie in pages, batch rows share keys, or
 * keys and values share memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backends.h"

/* ---- Tests of decoding: few queries, many keys ------------------------------------------------------------------- */

/* The numbers of keys and rows (queries of all heads of a group) lie just below and above the limits at which kernels
 * change. Kernels split the keys at multiples of 128 to 2048. One kernel takes up to 16 rows, another up to 64, and
 * others more. */
void test_decoding_agrees_with_the_reference_on_both_sides_of_every_edge(void **state)
{
    static const int64_t keys[] = { 0, 1, 63, 127, 128, 129, 257, 511, 512, 513, 1025, 2047, 2048, 2049, 4100 };
    static const struct spec forms[] = {
        SPEC(SIZES(1, 0, 64), HEADS(8, 2), BF16),
        SPEC(SIZES(1, 0, 128), HEADS(2, 2), F16, .layout = ATTN_BHSD),
        SPEC(SIZES(2, 0, 128), HEADS(16, 2), BF16, .causal = true, .sinks = 2),
        SPEC(SIZES(17, 0, 64), HEADS(1, 1), F16, .causal = true),
        SPEC(SIZES(9, 0, 128), HEADS(7, 1), BF16, WINDOW(300, 5)),
        SPEC(SIZES(16, 0, 80), HEADS(4, 1), F16, .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(SIZES(13, 0, 64), HEADS(5, 1), BF16, .causal = true),
        SPEC(SIZES(1, 0, 256), HEADS(4, 1), BF16, .alibi = 1),
        SPEC(SIZES(20, 0, 256), HEADS(2, 1), F16, .softcap = 20, .bias = 4, .bias_hidden = 0.2),
        SPEC(SIZES(3, 0, 192), HEADS(4, 2), BF16, .strided = true, .B = 2, .seqlens_k = true, .poison_unseen = true),
        SPEC(SIZES(1, 0, 64), HEADS(4, 2), FP8, .fp8_scales = true),
        SPEC(SIZES(1, 0, 40), HEADS(4, 2), F16, .keep_mask = 8, .keep = 0.5, .dropout_p = 0.2, .seed = 9),
        SPEC(SIZES(33, 0, 64), HEADS(1, 1), BF16, .mask_bounds = 2, .mask_kind = MASK_DOCUMENT),
    };
    int failed = 0;
    (void)state;
    for (size_t f = 0; f < ARRAY_SIZE(forms); f++)
        for (size_t n = 0; n < ARRAY_SIZE(keys); n++) {
            struct spec s = forms[f];
            s.Sk = keys[n];
            s.data_seed = f * 100 + n;
            if (!agrees(&s)) failed++;
        }
    const struct spec long_splits = SPEC(SIZES(1, 49200, 64), PAGES(16), HEADS(2, 1), BF16, .fp8_keys = true);
    if (!agrees(&long_splits)) failed++;
    assert_int_equal(failed, 0);
}

/* Returns a random problem like random_spec(), but with few rows and many keys. */
static struct spec random_decode_spec(uint64_t seed)
{
    struct rng r = { seed * UINT64_C(0xd1342543de82ef95) + 1 };
    struct spec s = random_spec(seed);
    const int64_t rows = rng_chance(&r, 0.5) ? rng_between(&r, 1, 16) : rng_between(&r, 1, 70);
    s.op = ATTN_OP_FORWARD;
    s.dlse = s.give_forward = s.no_dout = false;
    if (s.dtype == ATTN_F32) s.dtype = s.out_dtype = rng_chance(&r, 0.5) ? ATTN_F16 : ATTN_BF16;
    if (s.bias_dtype != ATTN_F32) s.bias_dtype = s.dtype;
    s.Hk = rng_between(&r, 1, 3);
    s.Sq = rng_chance(&r, 0.5) ? 1 : rng_between(&r, 1, rows);
    s.H = s.Hk * (rows / s.Sq > 1 ? rng_between(&r, 1, rows / s.Sq) : 1);
    s.Sk = rng_chance(&r, 0.7) ? rng_between(&r, 0, 700) : rng_between(&r, 700, 3000);
    if (s.window_left > 0) s.window_left *= rng_between(&r, 1, 10);
    for (int n = 0; n < s.sequences; n++) {
        s.q_lengths[n] = (int)(rng_chance(&r, 0.3) ? rng_between(&r, 0, 90)
                                                   : rng_between(&r, 1, rows / (s.H / s.Hk) + 1));
        s.k_lengths[n] = (int)(rng_chance(&r, 0.6) ? rng_between(&r, 0, 300) : rng_between(&r, 300, 1500));
    }
    s.page_size = 0;
    if (rng_chance(&r, 0.3)) give_pages(&s, pick(&r, page_sizes, ARRAY_SIZE(page_sizes)));
    return s;
}

void test_random_decoding_agrees_with_the_reference(void **state)
{
    const long first = env_number("ATTN_RANDOM_SEED", 1), count = env_number("ATTN_RANDOM_COUNT", RANDOM_COUNT) / 3;
    int failed = 0;
    (void)state;
    for (long n = 0; n < count && failed < 20; n++) {
        const struct spec s = random_decode_spec((uint64_t)(first + n));
        if (!agrees(&s)) {
            fprintf(stderr, "    (random decode problem %ld)\n", first + n);
            failed++;
        }
    }
    assert_int_equal(failed, 0);
}

/* These problems have at least 65 rows per key/value head, and so many keys that the forward on Hopper GPUs splits
 * them. */
void test_keys_of_a_chunk_agree_with_the_reference(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec chunks[] = {
        SPEC(.name = "grouped heads", SIZES(40, 2300, 64), HEADS(4, 2), BF16, .causal = true, .sinks = 1),
        SPEC(.name = "a head of its own", .B = 2, SIZES(130, 2100, 128), HEADS(1, 1), F16, .layout = ATTN_BHSD),
        SPEC(.name = "three heads", SIZES(30, 3100, 128), HEADS(3, 1), BF16, .causal = true),
        SPEC(.name = "sixteen heads, without lse", SIZES(5, 4100, 64), HEADS(16, 1), F16, .no_lse = true),
        SPEC(.name = "a window", SIZES(100, 3000, 64), HEADS(2, 1), BF16, WINDOW(2200, 0), .sinks = 2),
        SPEC(.name = "top left", SIZES(100, 2100, 64), HEADS(2, 1), BF16, .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "lengths", .B = 4, SIZES(70, 2500, 64), HEADS(2, 1), BF16, .seqlens_k = true, .causal = true,
             .poison_unseen = true),
        SPEC(.name = "packed", .sequences = 5, .q_lengths = { 70, 1, 150, 40, 0 },
             .k_lengths = { 2300, 2500, 700, 2100, 30 }, HEADS(4, 2), BF16, .causal = true, .sinks = 1),
        SPEC(.name = "head size 256", SIZES(70, 1200, 256), HEADS(2, 1), BF16, .causal = true),
        SPEC(.name = "values narrower than keys", SIZES(70, 1200, 192), .Dv = 72, HEADS(2, 1), F16),
        SPEC(.name = "values that are not finite", SIZES(100, 2100, 64), HEADS(2, 1), BF16, .causal = true,
             .poison_unseen = true, .poison = 2),
        SPEC(.name = "keys that are not finite", SIZES(100, 2100, 64), HEADS(2, 1), F16, .causal = true, .poison = 1),
        SPEC(.name = "huge scores", SIZES(80, 2100, 64), HEADS(1, 1), BF16, .q_amp = 3e4),
        SPEC(.name = "softcap and a window", SIZES(40, 2300, 64), HEADS(4, 2), BF16, WINDOW(2200, 0), .softcap = 20,
             .sinks = 1),
        SPEC(.name = "softcap, packed", .sequences = 3, .q_lengths = { 70, 1, 40 }, .k_lengths = { 2300, 2500, 700 },
             HEADS(4, 2), F16, .causal = true, .softcap = 5),
        SPEC(.name = "softcap, head size 256", SIZES(70, 1200, 256), HEADS(2, 1), BF16, .softcap = 50, .no_lse = true),
        SPEC(.name = "ALiBi of grouped heads", SIZES(70, 2300, 128), HEADS(4, 2), BF16, .causal = true, .alibi = 1),
        SPEC(.name = "ALiBi and lengths", .B = 3, SIZES(130, 2500, 64), HEADS(2, 1), F16, .alibi = 2, .seqlens_k = true,
             .poison_unseen = true),
        SPEC(.name = "FlashMask", SIZES(130, 2400, 64), HEADS(4, 2), BF16, .mask_bounds = 2, .mask_heads = 2),
        SPEC(.name = "FlashMask that hides splits", SIZES(70, 2400, 64), HEADS(2, 1), BF16, .causal = true,
             .mask_bounds = 1, .mask_kind = MASK_RANDOM),
        SPEC(.name = "float8", SIZES(70, 2300, 64), HEADS(4, 2), FP8, .causal = true, .softcap = 30, .fp8_scales = true,
             .sinks = 1),
        SPEC(.name = "a bias for each head", SIZES(70, 2300, 64), HEADS(2, 1), BF16, .bias = 7, .sinks = 1),
        SPEC(.name = "a bias that hides keys, head size 128", .B = 2, SIZES(100, 2300, 128), HEADS(1, 1), F16,
             .bias_dtype = ATTN_F16, .bias = 5, .bias_hidden = 0.5, .causal = true),
        SPEC(.name = "float8 without options", SIZES(70, 2300, 64), HEADS(4, 2), FP8, .causal = true,
             .fp8_scales = true),
        SPEC(.name = "float8 without lse", .B = 2, SIZES(70, 1200, 256), HEADS(2, 1), FP8, .no_lse = true),
        SPEC(.name = "a bias of huge numbers", SIZES(70, 2300, 64), HEADS(2, 1), BF16, .bias = 5, .bias_levels = 1,
             .sinks = 1),
        SPEC(.name = "a bias and huge sinks", .B = 2, SIZES(70, 2300, 64), HEADS(2, 1), BF16, .bias = 5, .sinks = 3),
        SPEC(.name = "another bias of huge numbers", SIZES(70, 2300, 64), HEADS(2, 1), BF16, .bias = 5,
             .bias_levels = 2),
        SPEC(.name = "keep_mask and dropout", SIZES(70, 2300, 64), HEADS(4, 2), BF16, .causal = true, .keep_mask = 5,
             .keep = 0.7, .dropout_p = 0.2, .seed = 5),
        SPEC(.name = "a keep_mask that hides whole splits", .B = 2, SIZES(70, 2300, 64), HEADS(2, 1), F16,
             .keep_mask = 2, .keep = 0.001, .sinks = 2),
        SPEC(.name = "dropout of grouped heads, head size 256", SIZES(70, 1200, 256), HEADS(2, 1), BF16,
             .dropout_p = 0.5, .seed = 9),
        SPEC(.name = "dropout, values that are not finite", SIZES(100, 2100, 64), HEADS(2, 1), BF16, .causal = true,
             .dropout_p = 0.1, .seed = 3, .poison_unseen = true, .poison = 2),
        SPEC(.name = "head size 512", SIZES(70, 1300, 512), HEADS(2, 1), BF16, .causal = true, .sinks = 1),
        SPEC(.name = "a query of 32 heads, head size 320", SIZES(1, 2100, 320), HEADS(32, 1), F16),
        SPEC(.name = "lengths, head size 320", .B = 4, SIZES(2, 2100, 320), HEADS(16, 1), BF16, .causal = true,
             .seqlens_k = true, .poison_unseen = true),
        SPEC(.name = "head size 1024", SIZES(20, 1100, 1024), HEADS(2, 2), BF16, WINDOW(1050, 0)),
        SPEC(.name = "head size 512, softcap", SIZES(40, 1300, 512), HEADS(4, 2), F16, .softcap = 30, .causal = true),
        SPEC(.name = "head size 384, ALiBi", SIZES(20, 1300, 384), HEADS(2, 1), BF16, .alibi = 1),
        SPEC(.name = "head size 320, FlashMask", SIZES(70, 1300, 320), HEADS(2, 1), BF16, .mask_bounds = 2),
        SPEC(.name = "head size 320, FlashMask that hides splits", .B = 4, SIZES(40, 1300, 320), HEADS(2, 1), F16,
             .causal = true, .mask_bounds = 1, .mask_kind = MASK_RANDOM),
        SPEC(.name = "head size 512, packed", .sequences = 3, .q_lengths = { 40, 1, 70 },
             .k_lengths = { 1300, 1500, 700 }, HEADS(4, 1), .D = 512, .Dv = 512, BF16, .causal = true),
        SPEC(.name = "head size 1024, values that are not finite", SIZES(30, 1100, 1024), HEADS(1, 1), BF16,
             .causal = true, .poison_unseen = true, .poison = 2),
        SPEC(.name = "head size 320, keys that are not finite", SIZES(40, 1300, 320), HEADS(1, 1), F16, .causal = true,
             .poison = 1),
        SPEC(.name = "head size 320, huge scores", SIZES(40, 1300, 320), HEADS(1, 1), BF16, .q_amp = 3e4),
        SPEC(BACK, .name = "head size 320, a backward without out", SIZES(40, 1300, 320), HEADS(2, 1), BF16),
        SPEC(BACK, .name = "a backward without out", SIZES(40, 2300, 64), HEADS(2, 1), BF16, .causal = true),
    };
    /* clang-format on */
    (void)state;
    assert_all_agree(chunks, ARRAY_SIZE(chunks));
}

/* The library computes a row a second time ("repairs" it) if its results are not finite. All results here are finite,
 * so no row may be computed twice. The GPU emulator fails if that happens in a test named test_scores*. */
void test_scores_of_a_chunk_need_no_repair(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec chunks[] = {
        SPEC(.name = "plain", SIZES(70, 2300, 64), HEADS(2, 1), BF16, .causal = true),
        SPEC(.name = "softcap", SIZES(70, 2300, 64), HEADS(2, 1), F16, .softcap = 20),
        SPEC(.name = "keep_mask", .B = 2, SIZES(70, 2300, 64), HEADS(2, 1), BF16, .keep_mask = 5, .keep = 0.6),
        SPEC(.name = "head size 320", SIZES(40, 1300, 320), HEADS(2, 1), BF16, .causal = true),
        SPEC(.name = "head size 1024, a backward without out", BACK, SIZES(40, 1300, 1024), HEADS(1, 1), BF16),
        SPEC(.name = "head size 320, several sequences", .B = 6, SIZES(24, 1200, 320), HEADS(2, 1), F16),
    };
    /* clang-format on */
    (void)state;
    assert_all_agree(chunks, ARRAY_SIZE(chunks));
}

/* Problems that run together in one call must have the same bits as each problem alone. This must hold even if the GPU
 * starts a kernel before the previous kernel has ended. */
void test_decoding_has_the_same_bits_alone_and_behind_other_decoding(void **state)
{
    enum { COUNT = 24, TIMES = 3 };
    (void)state;
    for (int times = 0; times < TIMES; times++) {
        struct fixture alone[COUNT], together[COUNT], *list[COUNT];
        for (int n = 0; n < COUNT; n++) {
            struct spec s = SPEC(.B = 2, SIZES(1, 1984, 128), HEADS(8, 2), BF16);
            s.seed = (uint64_t)(100 * times + n);
            s.Sk = 300 + 97 * n;
            s.seqlens_k = n % 2;
            s.fp8_keys = n % 3 == 2;
            fixture_make(&alone[n], &s);
            fixture_copy(&together[n], &alone[n]);
            fixture_run(&bench, &alone[n]);
            list[n] = &together[n];
        }
        fixtures_must_run(&bench, list, COUNT);
        for (int n = 0; n < COUNT; n++) assert_outputs_equal(&alone[n], &together[n]);
        for (int n = 0; n < COUNT; n++) fixture_clear(&alone[n]), fixture_clear(&together[n]);
    }
}

static bool same_kernel(const struct fixture *a, const struct fixture *b)
{
    attn_plan first, second;
    attn_error err;
    assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &a->p, &first, &err), ATTN_OK);
    assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &b->p, &second, &err), ATTN_OK);
    return first.kernel == second.kernel;
}

/* Keys in pages must give the same bits as contiguous keys, if one kernel computes both problems. */
void test_pages_do_not_change_a_bit(void **state)
{
    static const int64_t sizes[] = { 1, 7, 16, 64, 128 };
    int compared = 0;
    (void)state;
    for (uint64_t n = 0; n < 60; n++) {
        struct spec s = n % 2 ? random_spec(40000 + n) : random_decode_spec(41000 + n);
        struct fixture pages, whole;
        if (s.op == ATTN_OP_BACKWARD) continue;
        give_pages(&s, sizes[n % ARRAY_SIZE(sizes)]);
        fixture_make(&pages, &s);
        s.page_size = 0;
        fixture_make(&whole, &s);
        fixture_run(&bench, &pages);
        fixture_run(&bench, &whole);
        const bool same = same_kernel(&pages, &whole);
        if (strcmp(bench.info.backend, "cuda") != 0) assert_true(same);
        if (same) assert_outputs_equal(&pages, &whole);
        compared += same;
        fixture_clear(&pages), fixture_clear(&whole);
    }
    assert_true(compared >= 20);
}

/* Returns how many boxes (pieces of tensors) Hopper's copy engine (TMA) has loaded. Only the emulator has this function
 * (tests/emulator/sm90.h); elsewhere it is NULL. */
__attribute__((weak)) unsigned long emu_tma_loads(void);
__attribute__((weak)) void emu_refuse_maps(int refuse);

/* Runs the problem. Returns how many boxes (pieces of a tensor) TMA loaded, or 0 without the emulator. */
static unsigned long boxes_of(struct bench *b, struct fixture *f)
{
    const unsigned long before = emu_tma_loads ? emu_tma_loads() : 0;
    fixture_run(b, f);
    return (emu_tma_loads ? emu_tma_loads() : 0) - before;
}

/* Keys that TMA loads must give the same bits as keys that threads load. `by_engine` says whether TMA can load the
 * keys. */
void test_decoding_has_the_same_bits_by_the_copy_engine_and_by_threads(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct {
        bool by_engine;
        struct spec spec;
    } cases[] = {
        { true, SPEC(.name = "pages of 64", .B = 4, SIZES(1, 1984, 128), PAGES(64), HEADS(8, 2), BF16) },
        { true, SPEC(.name = "pages of 8", .B = 3, SIZES(1, 1000, 128), PAGES(8), HEADS(8, 2), BF16) },
        { true, SPEC(.name = "pages of 24", .B = 3, SIZES(3, 1200, 96), PAGES(24), HEADS(4, 2), F16, .causal = true) },
        { true,
          SPEC(.name = "pages of 16, D 256", .B = 2, SIZES(1, 1200, 256), PAGES(16), HEADS(4, 2), BF16, .sinks = 1) },
        { true, SPEC(.name = "pages of 16, D 512", .B = 2, SIZES(1, 1200, 512), PAGES(16), HEADS(8, 2), BF16) },
        { true, SPEC(.name = "pages of 8, D 320", .B = 2, SIZES(2, 400, 320), PAGES(8), HEADS(4, 2), F16, .sinks = 1,
                     .causal = true) },
        { true, SPEC(.name = "pages of 64, D 1024, NaN in v", .B = 2, SIZES(1, 320, 1024), PAGES(64), HEADS(4, 1), BF16,
                     .poison = 2) },
        { false, SPEC(.name = "pages of 64, D 512, float8", .B = 2, SIZES(1, 320, 512), PAGES(64), HEADS(4, 1), BF16,
                      .fp8_keys = true) },
        { true, SPEC(.name = "pages of 128, D 64", .B = 3, SIZES(2, 2560, 64), PAGES(128), HEADS(4, 2), F16) },
        { true, SPEC(.name = "pages, float8", .B = 4, SIZES(1, 1984, 128), PAGES(64), HEADS(8, 2), BF16,
                     .fp8_keys = true, .fp8_scales = true) },
        { true, SPEC(.name = "pages of 8, float8", .B = 3, SIZES(1, 1000, 128), PAGES(8), HEADS(8, 2), F16,
                     .fp8_keys = true) },
        { true, SPEC(.name = "pages of 16, float8, D 64", .B = 3, SIZES(2, 1600, 64), PAGES(16), HEADS(4, 2), BF16,
                     .fp8_keys = true, .causal = true) },
        { true, SPEC(.name = "pages of 64, float8, D 256", .B = 2, SIZES(1, 640, 256), PAGES(64), HEADS(4, 2), BF16,
                     .fp8_keys = true) },
        { true, SPEC(.name = "pages, float8 queries", .B = 4, SIZES(2, 960, 64), PAGES(64), HEADS(8, 2), FP8,
                     .fp8_scales = true) },
        { true,
          SPEC(.name = "pages, many rows", .B = 3, SIZES(7, 2176, 128), PAGES(64), HEADS(8, 1), BF16, .causal = true) },
        { true, SPEC(.name = "pages, float8, many rows", .B = 3, SIZES(7, 2176, 128), PAGES(32), HEADS(8, 1), BF16,
                     .fp8_keys = true, .causal = true) },
        { true, SPEC(.name = "pages, many rows, D 256", .B = 2, SIZES(7, 640, 256), PAGES(16), HEADS(8, 1), F16) },
        { true,
          SPEC(.name = "pages, a window", .B = 3, SIZES(2, 1984, 128), PAGES(64), HEADS(4, 2), BF16, WINDOW(300, 0)) },
        { true,
          SPEC(.name = "pages, blocks of four splits", .B = 12, SIZES(1, 640, 64), PAGES(64), HEADS(4, 2), BF16) },
        { true, SPEC(.name = "pages, float8, blocks of four splits", .B = 12, SIZES(1, 1152, 128), PAGES(64),
                     HEADS(4, 2), BF16, .fp8_keys = true) },
        { true,
          SPEC(.name = "pages, NaN in v", .B = 12, SIZES(1, 640, 64), PAGES(64), HEADS(4, 2), BF16, .poison = 2) },
        { true, SPEC(.name = "pages, float8, NaN in k", .B = 3, SIZES(1, 640, 128), PAGES(64), HEADS(4, 2), BF16,
                     .fp8_keys = true, .poison = 1) },
        { false, SPEC(.name = "no pages", .B = 3, SIZES(1, 1999, 128), HEADS(8, 2), BF16) },
        { false, SPEC(.name = "no pages, lengths", .B = 5, SIZES(1, 700, 128), HEADS(8, 2), BF16, .seqlens_k = true,
                      .poison_unseen = true) },
        { false, SPEC(.name = "no pages, float8, lengths", .B = 5, SIZES(1, 700, 128), HEADS(8, 2), BF16,
                      .fp8_keys = true, .seqlens_k = true, .poison_unseen = true) },
        { false, SPEC(.name = "no pages, heads outside", .B = 2, SIZES(4, 900, 64), HEADS(8, 2), F16,
                      .layout = ATTN_BHSD, .causal = true) },
        { false, SPEC(.name = "packed", .sequences = 5, .q_lengths = { 1, 1, 2, 1, 1 },
                      .k_lengths = { 700, 1, 33, 0, 128 }, HEADS(4, 2), BF16, .poison_unseen = true) },
        { false, SPEC(.name = "packed, float8", .sequences = 5, .q_lengths = { 1, 1, 2, 1, 1 },
                      .k_lengths = { 700, 1, 33, 0, 128 }, HEADS(4, 2), BF16, .fp8_keys = true) },
        { false, SPEC(.name = "values narrower than keys", .B = 2, SIZES(1, 500, 128), .Dv = 64, HEADS(4, 2), BF16) },
        { false, SPEC(.name = "pages of 7", .B = 3, SIZES(1, 700, 64), PAGES(7), HEADS(4, 2), BF16) },
        { false, SPEC(.name = "pages of 4", .B = 3, SIZES(1, 700, 64), PAGES(4), HEADS(4, 2), BF16) },
        { false, SPEC(.name = "pieces that are not whole", .B = 2, SIZES(1, 700, 36), HEADS(4, 2), BF16) },
        { false, SPEC(.name = "any address", .B = 2, SIZES(1, 700, 64), HEADS(4, 2), BF16, .strided = true) },
        { false, SPEC(.name = "options", .B = 2, SIZES(1, 700, 64), PAGES(64), HEADS(4, 2), BF16, .softcap = 10) },
        { false, SPEC(.name = "no keys", .B = 2, SIZES(1, 0, 64), HEADS(4, 2), BF16, .sinks = 1) },
    };
    /* clang-format on */
    struct bench by_threads;
    const char *const copies = getenv("ATTN_CUDA_COPIES");
    (void)state;
    if (strcmp(bench.info.backend, "cuda") != 0 || copies) return;
    setenv("ATTN_CUDA_COPIES", "threads", 1);
    bench_open(&by_threads, backend, 0);
    unsetenv("ATTN_CUDA_COPIES");
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        const struct spec *const s = &cases[n].spec;
        struct fixture engine, threads, refused;
        fixture_make(&engine, s), fixture_make(&threads, s), fixture_make(&refused, s);
        const unsigned long boxes = boxes_of(&bench, &engine);
        assert_int_equal(boxes_of(&by_threads, &threads), 0);
        if (emu_tma_loads && (boxes > 0) != cases[n].by_engine)
            fail_msg("%s: the copy engine loaded %lu boxes", s->name, boxes);
        assert_outputs_equal(&engine, &threads);
        /* Runs the problem again while the driver refuses TMA's tensor maps. Packed problems are left out, because they
         * also launch a kernel that needs these maps. */
        if (emu_refuse_maps && !s->sequences) {
            emu_refuse_maps(1);
            assert_int_equal(boxes_of(&bench, &refused), 0);
            emu_refuse_maps(0);
            assert_outputs_equal(&refused, &threads);
        }
        fixture_clear(&engine), fixture_clear(&threads), fixture_clear(&refused);
    }
    bench_close(&by_threads);
}

/* With float8 keys, a kernel may convert bfloat16 queries to float16, whose range is smaller. Tiny and huge queries
 * must not be lost. With q times 2^n and the scale times 2^-n, `out` must stay the same. */
void test_queries_of_any_size_meet_float8_keys(void **state)
{
    static const struct {
        int unit;
        double large;
    } cases[] = { { 100, 0 }, { -100, 0 }, { 0, 0x1p25 }, { 0, 0x1p60 }, { 0, 0x1p120 }, { -90, 0x1p40 } };
    static const int64_t queries[] = { 1, 9 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases) * ARRAY_SIZE(queries); n++) {
        const int unit = cases[n / 2].unit;
        const double large = cases[n / 2].large;
        struct spec s = SPEC(SIZES(queries[n % 2], 300, 128), HEADS(4, 2), BF16, .fp8_keys = true, .has_scale = true,
                             .scale = 0.1);
        struct fixture plain, f;
        fixture_make(&plain, &s);
        s.scale = ldexp(0.1, -unit);
        fixture_make(&f, &s);
        for (int64_t e = 0; e < tensor_elements(&f.p.k); e++)
            if (e % s.D == 5) tensor_set(&f.p.k, e, 0), tensor_set(&plain.p.k, e, 0);
        for (int64_t e = 0; e < tensor_elements(&f.p.q); e++)
            tensor_set(&f.p.q, e, e % s.D == 5 && large > 0 ? large : ldexp(tensor_get(&plain.p.q, e), unit));
        fixture_run(&bench, &plain);
        fixture_run(&bench, &f);
        for (int64_t e = 0; e < tensor_elements(&f.p.out); e++)
            if (!(fabs(tensor_get(&f.p.out, e) - tensor_get(&plain.p.out, e)) <= 1e-2 * largest(&plain.p.out)))
                fail_msg("unit 2^%d, large %g: out is %g, must be %g", unit, large, tensor_get(&f.p.out, e),
                         tensor_get(&plain.p.out, e));
        fixture_clear(&plain), fixture_clear(&f);
    }
}

/* Copies one row of a batch to a problem of its own, whose page table has `more` additional columns. */
static void take_row(const struct fixture *whole, struct fixture *row, int64_t b, int64_t more)
{
    static const attn_tensor_id by_row[] = { ATTN_T_q, ATTN_T_seqlens_k, ATTN_T_out, ATTN_T_lse };
    const int64_t most = whole->p.page_table.shape[1];
    fixture_copy(row, whole);
    for (size_t n = 0; n < ARRAY_SIZE(by_row); n++) {
        attn_tensor *t = &row->p.tensor[by_row[n]];
        t->data = (uint8_t *)t->data + (size_t)(b * t->stride[0]) * attn_dtype_bytes(t->dtype);
        t->shape[0] = 1;
    }
    free(row->block[ATTN_T_page_table]);
    fixture_add(row, ATTN_T_page_table, ATTN_I32, 2, (int64_t[]){ 1, most + more });
    for (int64_t n = 0; n < most; n++)
        tensor_set(&row->p.page_table, n, tensor_get(&whole->p.page_table, b * most + n));
    row->spec.B = 1;
    assert_int_equal(attn_check(&row->p, NULL), ATTN_OK);
}

void test_a_row_in_pages_has_the_bits_that_it_has_alone(void **state)
{
    static const struct spec batches[] = {
        SPEC(.B = 5, SIZES(1, 3200, 128), PAGES(16), HEADS(8, 2), BF16, .causal = true),
        SPEC(.B = 5, SIZES(1, 3201, 64), PAGES(3), HEADS(4, 4), .sinks = 1),
        SPEC(.B = 5, SIZES(4, 2560, 64), PAGES(128), HEADS(4, 2), F16, .causal = true),
        SPEC(.B = 5, SIZES(100, 512, 64), PAGES(64), HEADS(4, 2), BF16, .causal = true),
        SPEC(.B = 4, SIZES(70, 512, 64), PAGES(16), HEADS(2, 2), WINDOW(100, 0), .alibi = 1),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(batches); n++) {
        struct fixture whole;
        fixture_make(&whole, &batches[n]);
        fixture_run(&bench, &whole);
        for (int64_t b = 0; b < batches[n].B; b++) {
            struct fixture row;
            take_row(&whole, &row, b, b % 2 ? 0 : 1 + 40 * b);
            fixture_run(&bench, &row);
            assert_part_equal(&whole, &row, ATTN_T_out, b * tensor_elements(&row.p.out));
            assert_part_equal(&whole, &row, ATTN_T_lse, b * tensor_elements(&row.p.lse));
            fixture_clear(&row);
        }
        fixture_clear(&whole);
    }
}

/* Latent attention stores one row per token. The row is the key, and its first columns are the value. */
void test_values_may_be_the_first_columns_of_keys(void **state)
{
    static const struct spec cases[] = {
        SPEC(MLA, .B = 2, .Sq = 1, .Sk = 300, BF16),
        SPEC(MLA, .B = 3, .Sq = 1, .Sk = 320, BF16, PAGES(32)),
        SPEC(.D = 96, .Dv = 64, HEADS(4, 1), .B = 3, .Sq = 3, .Sk = 400, F16, PAGES(16), .causal = true),
        SPEC(.D = 96, .Dv = 64, HEADS(4, 1), .B = 2, .Sq = 90, .Sk = 120, BF16, .causal = true),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        const struct spec *s = &cases[n];
        struct fixture apart, one, want;
        char why[400];
        fixture_make(&apart, s);
        const attn_tensor *k = &apart.p.k;
        for (int64_t row = 0; row < tensor_elements(k) / s->D; row++)
            for (int64_t e = 0; e < s->Dv; e++) tensor_set(&apart.p.v, row * s->Dv + e, tensor_get(k, row * s->D + e));
        fixture_copy(&one, &apart);
        one.p.v = one.p.k;
        one.p.v.shape[3] = s->Dv;
        free(one.block[ATTN_T_v]);
        one.block[ATTN_T_v] = NULL;
        assert_int_equal(attn_check(&one.p, NULL), ATTN_OK);
        if (!bench.info.unified) {
            one.block_bytes[ATTN_T_v] = one.block_bytes[ATTN_T_k];
            one.block[ATTN_T_v] = aligned_alloc(64, (one.block_bytes[ATTN_T_v] + 63) / 64 * 64);
            assert_non_null(one.block[ATTN_T_v]);
            memcpy(one.block[ATTN_T_v], one.block[ATTN_T_k], one.block_bytes[ATTN_T_v]);
            one.p.v.data = one.block[ATTN_T_v] + ((uint8_t *)one.p.k.data - one.block[ATTN_T_k]);
        }
        fixture_copy(&want, &apart);
        run_reference(&want.p);
        fixture_run(&bench, &apart);
        fixture_run(&bench, &one);
        if (!fixture_compare(&apart, &want, NULL, why, sizeof why)) fail_msg("%s", why);
        assert_outputs_equal(&apart, &one);
        fixture_clear(&apart), fixture_clear(&one), fixture_clear(&want);
    }
}

/* Row counts and lengths lie just below and above a kernel's tile and split sizes. */
void test_latent_attention_agrees_with_the_reference(void **state)
{
#define LATENT(h) .latent = true, .D = 576, .Dv = 512, HEADS(h, 1)
    static const struct spec cases[] = {
        SPEC(.name = "one key", LATENT(3), .Sq = 1, .Sk = 1, BF16),
        SPEC(.name = "a tile", LATENT(64), .Sq = 1, .Sk = 64, F16),
        SPEC(.name = "two tiles", LATENT(64), .Sq = 1, .Sk = 128, BF16),
        SPEC(.name = "a tile and a key", LATENT(16), .Sq = 1, .Sk = 65, BF16),
        SPEC(.name = "three tiles less a key", LATENT(65), .Sq = 1, .Sk = 191, F16),
        SPEC(.name = "five tiles", LATENT(7), .Sq = 1, .Sk = 300, BF16),
        SPEC(.name = "a batch of lengths", LATENT(40), .B = 4, .Sq = 1, .Sk = 400, BF16, .seqlens_k = true,
             .poison_unseen = true),
        SPEC(.name = "two queries, causal", LATENT(16), .B = 2, .Sq = 2, .Sk = 130, BF16, .causal = true),
        SPEC(.name = "rows of a tile and more, causal", LATENT(24), .B = 3, .Sq = 3, .Sk = 200, F16, .causal = true,
             .seqlens_k = true),
        SPEC(.name = "more queries than keys", LATENT(8), .Sq = 10, .Sk = 5, BF16, .causal = true),
        SPEC(.name = "top left", LATENT(8), .Sq = 10, .Sk = 150, BF16, .causal = true, .alignment = ATTN_TOP_LEFT,
             .poison_unseen = true),
        SPEC(.name = "a window", LATENT(8), .Sq = 5, .Sk = 700, F16, WINDOW(300, 2), .poison_unseen = true),
        SPEC(.name = "bhsd", LATENT(9), .B = 2, .Sq = 3, .Sk = 100, BF16, .layout = ATTN_BHSD, .causal = true),
        SPEC(.name = "pages of 64", LATENT(16), .B = 4, .Sq = 2, .Sk = 320, BF16, PAGES(64), .causal = true),
        SPEC(.name = "pages of 128", LATENT(70), .B = 3, .Sq = 1, .Sk = 384, F16, PAGES(128)),
        SPEC(.name = "pages of 192", LATENT(4), .B = 3, .Sq = 1, .Sk = 576, BF16, PAGES(192)),
        SPEC(.name = "pages of 16", LATENT(4), .B = 2, .Sq = 1, .Sk = 160, BF16, PAGES(16)),
        SPEC(.name = "splits", LATENT(4), .Sq = 1, .Sk = 1300, BF16),
        SPEC(.name = "splits, pages", LATENT(4), .B = 2, .Sq = 1, .Sk = 1344, F16, PAGES(64)),
        SPEC(.name = "1856 keys seen have more splits than 2112", LATENT(2), .B = 3, .Sq = 1, .Sk = 2112, BF16,
             WINDOW(1800, 0)),
        SPEC(.name = "split groups", LATENT(2), .B = 4, .Sq = 2, .Sk = 4500, BF16, .causal = true, .seqlens_k = true),
        SPEC(.name = "more than four split groups", LATENT(2), .Sq = 1, .Sk = 16500, BF16),
        SPEC(.name = "splits of more rows", LATENT(70), .Sq = 1, .Sk = 1100, F16),
        SPEC(.name = "without lse", LATENT(16), .Sq = 1, .Sk = 100, BF16, .no_lse = true),
        SPEC(.name = "peaky", LATENT(16), .Sq = 2, .Sk = 500, BF16, .q_amp = 3, .causal = true),
        SPEC(.name = "scores of 1e9", LATENT(4), .Sq = 1, .Sk = 200, F16, .q_amp = 50, .has_scale = true, .scale = 1e4),
        SPEC(.name = "NaN in a key", LATENT(16), .B = 2, .Sq = 3, .Sk = 200, BF16, .poison = 1, .causal = true),
        SPEC(.name = "NaN in a key of a split", LATENT(4), .Sq = 1, .Sk = 1300, F16, .poison = 1),
        SPEC(.name = "NaN in keys that few rows see", LATENT(8), .Sq = 8, .Sk = 130, BF16, WINDOW(3, 0), .poison = 1),
        SPEC(.name = "strided", LATENT(4), .Sq = 2, .Sk = 100, BF16, .strided = true),
        SPEC(.name = "sinks and a softcap", LATENT(4), .Sq = 2, .Sk = 100, BF16, .sinks = 1, .softcap = 10),
    };
    (void)state;
    assert_all_agree(cases, ARRAY_SIZE(cases));

    const char *family = getenv("ATTN_CUDA_FAMILY");
    if (family && strcmp(family, "sm90_latent") == 0) {
        struct fixture f;
        attn_error err;
        attn_plan plan;
        fixture_make(&f, &cases[0]);
        f.p.v.data = f.p.k.data;
        assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &f.p, &plan, &err), ATTN_OK);
        fixture_clear(&f);
        assert_string_equal(plan.kernel->name, family);
    }
}

/* A kernel may divide its work among thread blocks differently with pages and without pages, and differently for a
 * batch and for one batch row alone. The bits must be equal nevertheless. */
void test_latent_attention_has_the_same_bits_in_pages_and_alone(void **state)
{
    static const struct spec cases[] = {
        SPEC(LATENT(4), .B = 4, .Sq = 2, .Sk = 256, PAGES(64), BF16, .causal = true),
        SPEC(LATENT(3), .B = 3, .Sq = 1, .Sk = 1536, PAGES(128), F16),
        /* This problem has more thread blocks than a GPU runs at the same time. */
        SPEC(LATENT(1), .B = 150, .Sq = 1, .Sk = 640, PAGES(64), BF16, .many_blocks = true),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture whole, side_by_side;
        struct spec plain = cases[n];
        if (cases[n].many_blocks && is_brief()) continue;
        plain.page_size = 0;
        fixture_make(&whole, &cases[n]);
        fixture_make(&side_by_side, &plain);
        fixture_run(&bench, &whole);
        fixture_run(&bench, &side_by_side);
        if (same_kernel(&whole, &side_by_side)) assert_outputs_equal(&whole, &side_by_side);
        for (int64_t b = 0; b < cases[n].B; b = b < 3 ? b + 1 : b * 3) {
            struct fixture row;
            take_row(&whole, &row, b, b % 2 ? 0 : 1 + 40 * b);
            fixture_run(&bench, &row);
            assert_part_equal(&whole, &row, ATTN_T_out, b * tensor_elements(&row.p.out));
            assert_part_equal(&whole, &row, ATTN_T_lse, b * tensor_elements(&row.p.lse));
            fixture_clear(&row);
        }
        fixture_clear(&whole), fixture_clear(&side_by_side);
    }
}

/* Pages may begin at any key of the pool, so they may overlap. The stride of the page axis is then less than a page. */
void test_pages_may_overlap_and_be_shared(void **state)
{
    enum { B = 3, GRANULE = 4, PAGE = 16, MOST = 5, SHARED = 2, SLOTS = 400 };
    static const int32_t lengths[B] = { 80, 33, 41 };
    const struct spec s = SPEC(.B = B, SIZES(20, PAGE * MOST, 64), PAGES(PAGE), HEADS(4, 2), BF16, .causal = true);
    struct rng r = { 5 };
    struct fixture pages, whole;
    (void)state;
    fixture_make(&pages, &s);
    for (attn_tensor_id id = ATTN_T_k; id <= ATTN_T_v; id++) {
        free(pages.block[id]);
        fixture_add(&pages, id, ATTN_BF16, 4, (int64_t[]){ 1, SLOTS, s.Hk, s.D });
        fill_normal(&pages.p.tensor[id], &r, 1, 0);
        pages.p.tensor[id].shape[0] = (SLOTS - PAGE) / GRANULE + 1;
        pages.p.tensor[id].shape[1] = PAGE;
        pages.p.tensor[id].stride[0] = GRANULE * s.Hk * s.D;
    }
    for (int64_t b = 0; b < B; b++) {
        tensor_set(&pages.p.seqlens_k, b, lengths[b]);
        for (int64_t n = 0; n < MOST; n++)
            tensor_set(&pages.p.page_table, b * MOST + n,
                       (double)(n < SHARED ? 7 + 3 * n : rng_between(&r, 0, pages.p.k.shape[0] - 1)));
    }
    assert_int_equal(attn_check(&pages.p, NULL), ATTN_OK);
    struct spec plain = s;
    plain.page_size = 0;
    fixture_make(&whole, &plain);
    const attn_geometry from = attn_geometry_of(&pages.p), to = attn_geometry_of(&whole.p);
    for (int64_t b = 0; b < B; b++) {
        tensor_set(&whole.p.seqlens_k, b, lengths[b]);
        for (int64_t hk = 0; hk < s.Hk; hk++)
            for (int64_t j = 0; j < lengths[b]; j++)
                for (attn_tensor_id id = ATTN_T_k; id <= ATTN_T_v; id++)
                    memcpy((uint16_t *)to.view[id].data + attn_at(&to.view[id], b, hk, j),
                           (uint16_t *)from.view[id].data + attn_key_at(&from, &from.view[id], b, hk, j),
                           (size_t)s.D * sizeof(uint16_t));
    }
    memcpy(whole.p.q.data, pages.p.q.data, (size_t)tensor_elements(&pages.p.q) * sizeof(uint16_t));
    struct fixture want;
    char why[400];
    fixture_copy(&want, &pages);
    run_reference(&want.p);
    fixture_run(&bench, &pages);
    fixture_run(&bench, &whole);
    if (!fixture_compare(&pages, &want, NULL, why, sizeof why)) fail_msg("%s", why);
    if (same_kernel(&pages, &whole)) assert_outputs_equal(&pages, &whole);
    fixture_clear(&pages), fixture_clear(&whole), fixture_clear(&want);
}

/* Makes a batch in which row b shares its first pages with row b - 1, or shares no pages. prefix_keys[b] becomes the
 * number of keys in the shared pages. */
static void make_forks(struct fixture *f, const struct spec *s, struct rng *r, int32_t *prefix_keys)
{
    const int64_t size = s->page_size, most = s->Sk / size;
    int64_t next = 0;
    fixture_make(f, s);
    fill_normal(&f->p.k, r, 1, 0);
    fill_normal(&f->p.v, r, 1, 0);
    for (int64_t b = 0; b < s->B; b++) {
        const int64_t length = rng_chance(r, 0.2) ? rng_between(r, 0, s->Sk) : s->Sk - rng_between(r, 0, s->Sk / 4);
        const int64_t before = b ? (int64_t)tensor_get(&f->p.seqlens_k, b - 1) : 0, both = attn_min64(before, length);
        const int64_t shared = rng_chance(r, 0.2) ? rng_between(r, 0, both) : both - rng_between(r, 0, both / 4);
        tensor_set(&f->p.seqlens_k, b, (double)length);
        prefix_keys[b] = (int32_t)(b ? shared : 0);
        for (int64_t n = 0; n < most; n++)
            tensor_set(&f->p.page_table, b * most + n,
                       n < attn_tiles(prefix_keys[b], size) ? tensor_get(&f->p.page_table, (b - 1) * most + n)
                                                            : (double)next++);
    }
    f->p.prefix_keys = prefix_keys;
    assert_int_equal(attn_check(&f->p, NULL), ATTN_OK);
}

/* The results must not depend on prefix_keys, which says how many first keys each batch row shares with the row before
 * it. */
void test_a_shared_prefix_does_not_change_a_bit(void **state)
{
    enum { ROWS = 24 };
    static const struct spec batches[] = {
        SPEC(.B = 20, SIZES(1, 960, 128), PAGES(16), HEADS(8, 2), BF16, .many_blocks = true),
        SPEC(.B = 13, SIZES(2, 640, 64), PAGES(32), HEADS(8, 2), F16, .causal = true, .sinks = 1),
        SPEC(.B = ROWS, SIZES(1, 800, 64), PAGES(16), HEADS(1, 1), BF16),
        SPEC(.B = 5, SIZES(1, 2900, 128), PAGES(20), HEADS(16, 1), F16, .many_blocks = true),
        SPEC(.B = 4, SIZES(3, 512, 256), PAGES(64), HEADS(5, 1), BF16, .causal = true),
        SPEC(.B = 7, SIZES(1, 700, 200), PAGES(7), HEADS(6, 2), BF16),
        SPEC(.B = 7, SIZES(1, 1280, 64), PAGES(16), HEADS(4, 2), BF16, WINDOW(600, 0)),
        SPEC(.B = 3, SIZES(6, 640, 64), PAGES(16), HEADS(4, 1), BF16, .causal = true),
        SPEC(.B = 5, SIZES(1, 640, 128), PAGES(16), HEADS(4, 1), BF16, .softcap = 3),
        SPEC(.B = 5, SIZES(1, 640, 64), PAGES(16), HEADS(4, 1), BF16, .fp8_keys = true),
        SPEC(.B = 5, SIZES(1, 640, 64), PAGES(16), HEADS(4, 1)),
        SPEC(.B = 6, SIZES(70, 640, 64), PAGES(16), HEADS(1, 1), BF16),
    };
    (void)state;
    for (size_t n = 0; n < 2 * ARRAY_SIZE(batches); n++) {
        const struct spec *const s = &batches[n / 2];
        struct rng r = { 77 + n };
        if (!is_ours() || (is_brief() && (s->many_blocks || n % 2 != n / 4 % 2))) continue;
        int32_t prefix_keys[ROWS];
        struct fixture with, without;
        make_forks(&with, s, &r, prefix_keys);
        if (n % 2) {
            const attn_tensor *const t = n % 4 == 1 ? &with.p.k : &with.p.v;
            const int64_t page = (int64_t)tensor_get(&with.p.page_table, rng_between(&r, 0, 3));
            tensor_set(t, (page * s->page_size + 2) * s->Hk * s->D + 5, NAN);
            tensor_set(&with.p.q, tensor_elements(&with.p.q) - 1, NAN);
        }
        fixture_copy(&without, &with);
        without.p.prefix_keys = NULL;
        fixture_run(&bench, &with);
        fixture_run(&bench, &without);
        assert_outputs_equal(&with, &without);
        fixture_clear(&with), fixture_clear(&without);
    }
}
