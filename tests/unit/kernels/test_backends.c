/* test_backends.c: does a backend compute attention?
 *
 *   edge cases   a table of problems that broke other libraries (kernels/README.md, "Where attention breaks"),
 *                against the reference
 *   random       problems with options drawn at random, against the reference
 *   properties   what must hold without a reference: equal bits alone and among others, packed and not, with one thread
 *                and several; keys in another order; a shifted bias; a future that the past cannot see
 *
 *   ATTN_BACKEND=cpu         the backend (default cpu); "paper" runs the comparisons alone, with the problems that it
 *                            takes
 *   ATTN_RANDOM_SEED=1       first seed of the random problems; each failure prints its SPEC(...),
 *                            which can become an edge case
 *   ATTN_RANDOM_COUNT=300    how many
 *   ATTN_GRID_D=64           of the grid, the problems of one head size alone
 *   ATTN_TESTS='test_grid*'  only the tests whose names match
 *   ATTN_BRIEF=1             leaves out what takes the emulator minutes: the backward of edge cases of very many
 *                            blocks, that of the largest numbers once more with out and lse given, each batch of forks
 *                            a second time (one is with NaN, one without), and numbers of threads, which a GPU has not
 *   ATTN_PART=1/2            one of two halves, for two processes at once: half of the problems of each list, and of
 *                            the tests of properties every second
 *   ATTN_PRINT_BITS=1        a line per problem with checksums of its outputs: do two builds give the same bits? */
#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "../testing.h"
#include "kernels/backend.h"

static struct bench bench;
static const char *backend = "cpu";

#if defined(__SANITIZE_THREAD__)
enum { RANDOM_COUNT = 30 };
#elif defined(__SANITIZE_ADDRESS__)
enum { RANDOM_COUNT = 100 };
#else
enum { RANDOM_COUNT = 300 };
#endif

static long env_number(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

static bool is_brief(void)
{
    return env_number("ATTN_BRIEF", 0) != 0;
}

/* ATTN_PART=2/3 is the second of three shares, number 1. */
static long share = 0, share_count = 1;

static void read_share(void)
{
    const char *text = getenv("ATTN_PART");
    if (text == NULL || *text == '\0') return;
    if (sscanf(text, "%ld/%ld", &share, &share_count) != 2 || share < 1 || share > share_count) {
        fprintf(stderr, "ATTN_PART: is %s, must be such as 1/2\n", text);
        exit(2);
    }
    share--;
}

/* Is the next problem of a list one of this share? Scattered, for a list has forward and backward in turn, which do not
 * take equally long. */
static bool is_ours(void)
{
    static uint32_t count;
    return (count++ * UINT32_C(2654435761) >> 16) % (uint32_t)share_count == (uint32_t)share;
}

/* Does the backend have a kernel for the problem? All but "paper" have one for every problem. */
static bool is_taken(const struct spec *s)
{
    struct fixture f;
    attn_plan plan;
    attn_error err;
    if (strcmp(backend, "paper") != 0) return true;
    fixture_make(&f, s);
    const attn_status status = attn_plan_make(bench.device, &f.p, &plan, &err);
    fixture_clear(&f);
    assert_true(status == ATTN_OK || status == ATTN_UNSUPPORTED);
    return status == ATTN_OK;
}

/* Does the backend agree with the reference? Problems of other shares are passed over. */
static bool agrees(const struct spec *s)
{
    return !is_ours() || !is_taken(s) || spec_agrees(&bench, s);
}

/* ---- Edge cases -------------------------------------------------------------------------------------------------- */

#define BACK           .op = ATTN_OP_BACKWARD
#define F16            .dtype = ATTN_F16, .out_dtype = ATTN_F16
#define BF16           .dtype = ATTN_BF16, .out_dtype = ATTN_BF16
#define FP8            .dtype = ATTN_F8E4M3, .out_dtype = ATTN_BF16
#define HEADS(h, hk)   .H = h, .Hk = hk
#define SIZES(q, k, d) .Sq = q, .Sk = k, .D = d, .Dv = d
#define MLA            .D = 576, .Dv = 512, .H = 16, .Hk = 1 /* multi-head latent attention */
#define PAGES(n)       .page_size = n, .seqlens_k = true
#define WINDOW(l, r)   .window_left = l, .window_right = r

/* clang-format off: a row is a line */

/* The whole list runs forward and backward, the fp8 rows forward only; rows that say `op` run as they say. */
static const struct spec edge_cases[] = {
    /* Shapes */
    SPEC(.name = "one by one", SIZES(1, 1, 64)),
    SPEC(.name = "one by one, causal", SIZES(1, 1, 64), .causal = true),
    SPEC(.name = "one by one, one channel", SIZES(1, 1, 1), HEADS(1, 1)),
    SPEC(.name = "decode, group of 1", SIZES(1, 1500, 64), BF16),
    SPEC(.name = "decode, group of 4", SIZES(1, 1500, 128), HEADS(8, 2), F16, .causal = true),
    SPEC(.name = "decode, group of 7", SIZES(1, 700, 64), HEADS(7, 1), .causal = true),
    SPEC(.name = "decode with sinks: one sink, however many splits", SIZES(1, 5000, 64), HEADS(8, 2), .sinks = 1,
         .many_blocks = true),
    SPEC(.name = "decode, several queries", SIZES(5, 900, 64), HEADS(8, 2), BF16, .causal = true, .B = 3),
    SPEC(.name = "many queries, one key", SIZES(300, 1, 64)),
    SPEC(.name = "113 x 203", SIZES(113, 203, 64), .causal = true),
    SPEC(.name = "127 x 513", SIZES(127, 513, 64), .causal = true, F16),
    SPEC(.name = "1023 x 1024", SIZES(1023, 1024, 32), HEADS(1, 1), .causal = true, BF16),
    SPEC(.name = "1024 x 1023", SIZES(1024, 1023, 32), HEADS(1, 1), .causal = true, BF16),
    SPEC(.name = "31 x 33", SIZES(31, 33, 64), .causal = true),
    SPEC(.name = "tiles of queries that see no key", SIZES(203, 113, 64), HEADS(4, 2), BF16, .causal = true,
         .sinks = 1),
    SPEC(.name = "a row of the batch without keys", SIZES(129, 200, 128), F16, .B = 3, .seqlens_k = true),
    SPEC(.name = "tiles of keys that no query sees", SIZES(16, 300, 128), BF16, .causal = true,
         .alignment = ATTN_TOP_LEFT, .softcap = 5),
    SPEC(.name = "sequences without queries or keys, wide heads", F16, .D = 256, .Dv = 256, .sequences = 3,
         .q_lengths = { 67, 0, 35 }, .k_lengths = { 133, 9, 1 }),
    SPEC(.name = "dropout of 0.999, float16", SIZES(60, 300, 64), F16, .dropout_p = 0.999, .seed = 7, .q_amp = 2),
    SPEC(.name = "63 x 65", SIZES(63, 65, 64), .causal = true),
    SPEC(.name = "64 x 64", SIZES(64, 64, 64), .causal = true, BF16),
    SPEC(.name = "65 x 63", SIZES(65, 63, 64), .causal = true, F16),
    SPEC(.name = "127 x 129", SIZES(127, 129, 128)),
    SPEC(.name = "128 x 128", SIZES(128, 128, 128), BF16, .causal = true),
    SPEC(.name = "129 x 127", SIZES(129, 127, 128), F16),
    SPEC(.name = "255 x 257", SIZES(255, 257, 40)),
    SPEC(.name = "257 x 255", SIZES(257, 255, 40), BF16),
    SPEC(.name = "head size 1", SIZES(50, 60, 1), .causal = true),
    SPEC(.name = "head size 2, bf16", SIZES(50, 60, 2), BF16),
    SPEC(.name = "head size 8", SIZES(50, 60, 8), F16),
    SPEC(.name = "head size 15", SIZES(50, 60, 15)),
    SPEC(.name = "head size 17, bf16", SIZES(50, 60, 17), BF16),
    SPEC(.name = "head size 32", SIZES(50, 60, 32), BF16),
    SPEC(.name = "head size 33, f16", SIZES(50, 60, 33), F16),
    SPEC(.name = "head size 40", SIZES(50, 60, 40), .causal = true),
    SPEC(.name = "head size 59", SIZES(50, 60, 59), F16, .causal = true),
    SPEC(.name = "head size 80", SIZES(50, 60, 80), BF16),
    SPEC(.name = "head size 96", SIZES(50, 60, 96)),
    SPEC(.name = "head size 111", SIZES(50, 60, 111), BF16, .causal = true),
    SPEC(.name = "head size 192", SIZES(50, 60, 192), F16),
    SPEC(.name = "head size 255", SIZES(50, 60, 255), BF16),
    SPEC(.name = "head size 256", SIZES(50, 60, 256), .causal = true),
    SPEC(.name = "head size 256, bf16", SIZES(150, 160, 256), BF16),
    SPEC(.name = "head size 257", SIZES(50, 60, 257), BF16, .causal = true),
    SPEC(.name = "head size 512", SIZES(70, 130, 512), F16, HEADS(2, 1)),
    SPEC(.name = "head size 576, float32", SIZES(70, 130, 576), .causal = true),
    SPEC(.name = "latent attention", MLA, .Sq = 40, .Sk = 150, BF16, .causal = true),
    SPEC(.name = "latent attention, decode", MLA, .B = 3, .Sq = 1, .Sk = 700, BF16, .seqlens_k = true,
         .poison_unseen = true),
    SPEC(.name = "latent attention, one query of few heads", .D = 576, .Dv = 512, HEADS(4, 1), .Sq = 1, .Sk = 1500,
         F16),
    SPEC(.name = "latent attention, pages", MLA, .B = 3, .Sq = 2, .Sk = 640, BF16, PAGES(64), .causal = true),
    SPEC(.name = "latent attention, pages, float8 keys", MLA, .B = 2, .Sq = 1, .Sk = 320, BF16, PAGES(16),
         .fp8_keys = true, .fp8_scales = true),
    SPEC(.name = "latent attention with everything", MLA, .Sq = 9, .Sk = 96, F16, .bias = 8, .bias_hidden = 0.1,
         .sinks = 2, .alibi = 1, .softcap = 20, .dropout_p = 0.2, .seed = 4),
    SPEC(.name = "latent attention, float8", MLA, .Sq = 20, .Sk = 90, FP8, .fp8_scales = true),
    SPEC(.name = "v wider", .D = 64, .Dv = 128, BF16),
    SPEC(.name = "v narrower", .D = 192, .Dv = 128, F16, .causal = true),
    SPEC(.name = "v of one channel", .D = 96, .Dv = 1),
    SPEC(.name = "k of one channel", .D = 1, .Dv = 96, BF16),
    SPEC(.name = "no keys", SIZES(5, 0, 64)),
    SPEC(.name = "no keys, sinks", SIZES(5, 0, 64), .sinks = 1),
    SPEC(.name = "no queries", SIZES(0, 7, 64)),
    SPEC(.name = "no queries, no keys", SIZES(0, 0, 64)),
    SPEC(.name = "no batch", .B = 0),
    SPEC(.name = "no batch, everything on", .B = 0, .sinks = 1, .alibi = 2, .bias = 8, .keep_mask = 8,
         .seqlens_k = true),
    SPEC(.name = "70000 heads", HEADS(70000, 70000), SIZES(1, 2, 1), .many_blocks = true),
    SPEC(.name = "70000 batches", .B = 70000, HEADS(1, 1), SIZES(1, 2, 1), .many_blocks = true),
    SPEC(.name = "32769 keys", SIZES(3, 32769, 8), HEADS(1, 1), .causal = true, .many_blocks = true),
    SPEC(.name = "32769 queries", SIZES(32769, 3, 8), HEADS(1, 1), .many_blocks = true),
    SPEC(.name = "group of 7", SIZES(70, 90, 64), HEADS(14, 2), .causal = true, BF16),
    SPEC(.name = "multi-query", SIZES(70, 90, 64), HEADS(6, 1), .causal = true, F16),
    SPEC(.name = "bhsd", SIZES(33, 47, 64), .layout = ATTN_BHSD, .B = 2, HEADS(6, 3), BF16, .causal = true),
    SPEC(.name = "strided", SIZES(70, 85, 64), .strided = true, .B = 2, F16, .causal = true),
    SPEC(.name = "strided, bhsd, odd head size", SIZES(70, 85, 37), .strided = true, .layout = ATTN_BHSD, .B = 2,
         HEADS(4, 2), BF16),
    SPEC(.name = "strided, f32", SIZES(33, 45, 50), .strided = true, .B = 2, .bias = 8, .keep_mask = 8, .keep = 0.7,
         .sinks = 1, .alibi = 2),

    /* Masks */
    SPEC(.name = "causal, more queries than keys: the first rows are empty", SIZES(203, 113, 64), .causal = true),
    SPEC(.name = "the same with sinks", SIZES(203, 113, 64), .causal = true, .sinks = 1, BF16, HEADS(4, 2)),
    SPEC(.name = "causal, top left, fewer queries than keys", SIZES(40, 90, 64), .causal = true,
         .alignment = ATTN_TOP_LEFT, .poison_unseen = true),
    SPEC(.name = "causal, top left, more queries than keys", SIZES(90, 40, 64), .causal = true,
         .alignment = ATTN_TOP_LEFT),
    SPEC(.name = "window (0, 0)", SIZES(70, 70, 64), WINDOW(0, 0)),
    SPEC(.name = "window (0, -1)", SIZES(70, 90, 64), WINDOW(0, -1)),
    SPEC(.name = "window (-1, 0)", SIZES(70, 90, 64), WINDOW(-1, 0), BF16),
    SPEC(.name = "window (huge, huge)", SIZES(70, 90, 64), WINDOW(INT64_MAX, INT64_MAX)),
    SPEC(.name = "window to the right, but causal", SIZES(70, 90, 64), WINDOW(10, 20), .causal = true),
    SPEC(.name = "window, more queries than keys", SIZES(150, 60, 64), WINDOW(20, 10)),
    SPEC(.name = "window of Sk to the left, more queries than keys", SIZES(150, 60, 64), WINDOW(60, 0)),
    SPEC(.name = "window of Sk to the right, top left", SIZES(150, 60, 64), WINDOW(0, 60), .alignment = ATTN_TOP_LEFT),
    SPEC(.name = "window, top left, rows past the end are empty", SIZES(150, 60, 64), WINDOW(20, 5),
         .alignment = ATTN_TOP_LEFT, .sinks = 1),
    SPEC(.name = "window of 1023, causal", SIZES(1500, 1500, 32), HEADS(1, 1), WINDOW(1023, 0), .causal = true, BF16),
    SPEC(.name = "narrow window, many tiles skipped", SIZES(700, 700, 64), HEADS(1, 1), WINDOW(3, 2), F16,
         .poison_unseen = true),
    SPEC(.name = "first tile hidden, scores around -100", SIZES(200, 300, 64), .q_mean = 0, .q_amp = 4, .bias = 5,
         .bias_hidden = 0.9),
    SPEC(.name = "row with exactly one key", SIZES(60, 60, 64), WINDOW(0, 0), .q_amp = 5, F16),
    SPEC(.name = "bias of full shape", SIZES(50, 70, 64), .B = 2, .bias = 8, .causal = true),
    SPEC(.name = "bias of a row", SIZES(50, 70, 64), .B = 2, .bias = 1),
    SPEC(.name = "bias of batch and key", SIZES(50, 70, 64), .B = 2, .bias = 2, BF16),
    SPEC(.name = "bias of head and query", SIZES(50, 70, 64), .B = 2, .bias = 7, F16, .bias_dtype = ATTN_F16),
    SPEC(.name = "bias in bf16 with hidden keys", SIZES(50, 70, 64), .bias = 8, .bias_hidden = 0.5, BF16,
         .bias_dtype = ATTN_BF16, .poison_unseen = true),
    SPEC(.name = "bias hides everything", SIZES(50, 70, 64), .bias = 8, .bias_hidden = 1, .poison_unseen = true),
    SPEC(.name = "keep mask, some rows empty", SIZES(60, 80, 64), .B = 2, .keep_mask = 8, .keep = 0.6, F16),
    SPEC(.name = "keep mask of keys", SIZES(60, 80, 64), .B = 2, .keep_mask = 2, .keep = 0.5, .poison_unseen = true),
    SPEC(.name = "keep mask hides everything", SIZES(60, 80, 64), .keep_mask = 8, .keep = 0, .sinks = 1,
         .poison_unseen = true),
    SPEC(.name = "keep mask, broadcast queries and heads", SIZES(60, 300, 64), .keep_mask = 1, .keep = 0.3, BF16,
         .causal = true),
    SPEC(.name = "keep mask of the last keys", .B = 4, SIZES(40, 300, 64), .keep_mask = 8, .keep = 0.5, .keep_tail = 40,
         .seqlens_k = true, .poison_unseen = true, BF16),
    SPEC(.name = "keep mask of the last keys, decode", .B = 3, SIZES(6, 1900, 64), HEADS(4, 2), .keep_mask = 6,
         .keep = 0.6, .keep_tail = 6, .seqlens_k = true, F16),
    SPEC(.name = "keep mask of the last keys, a tile and one", SIZES(8, 700, 64), HEADS(1, 1), .keep_mask = 8,
         .keep = 0.6, .keep_tail = 257),
    SPEC(.name = "keep mask of the last keys, pages", .B = 4, SIZES(9, 640, 128), HEADS(4, 2), PAGES(16),
         .keep_mask = 6, .keep = 0.6, .keep_tail = 9, BF16, .sinks = 1),
    SPEC(.name = "keep mask of the last key", SIZES(70, 90, 64), .keep_mask = 5, .keep = 0.5, .keep_tail = 1,
         .causal = true),
    SPEC(.name = "FlashMask 1 bound, documents", SIZES(300, 300, 64), .causal = true, .mask_bounds = 1,
         .mask_kind = MASK_DOCUMENT, BF16),
    SPEC(.name = "FlashMask 1 bound, random", SIZES(150, 170, 64), .causal = true, .mask_bounds = 1, .B = 2,
         .mask_heads = 1, HEADS(4, 2)),
    SPEC(.name = "FlashMask 2 bounds causal, random", SIZES(150, 170, 64), .causal = true, .mask_bounds = 2,
         .mask_heads = 2, HEADS(4, 2), F16),
    SPEC(.name = "FlashMask 2 bounds, documents both ways", SIZES(300, 300, 64), .mask_bounds = 2,
         .mask_kind = MASK_DOCUMENT, HEADS(4, 2)),
    SPEC(.name = "FlashMask 2 bounds, window", SIZES(300, 300, 64), .mask_bounds = 2, .mask_kind = MASK_WINDOW, BF16),
    SPEC(.name = "FlashMask 2 bounds, random", SIZES(150, 170, 64), .mask_bounds = 2, .mask_heads = 1, HEADS(4, 2)),
    SPEC(.name = "FlashMask 4 bounds, random", SIZES(150, 170, 64), .mask_bounds = 4, .B = 2),
    SPEC(.name = "FlashMask 4 bounds, window", SIZES(200, 260, 64), .mask_bounds = 4, .mask_kind = MASK_WINDOW, F16),
    SPEC(.name = "FlashMask hides everything", SIZES(150, 170, 64), .mask_bounds = 2, .mask_kind = MASK_ALL,
         .poison_unseen = true),
    SPEC(.name = "FlashMask, two halves hide everything", SIZES(150, 170, 64), .mask_bounds = 4,
         .mask_kind = MASK_UNION, .sinks = 1),
    SPEC(.name = "FlashMask with window, top left", SIZES(150, 170, 64), .mask_bounds = 4, WINDOW(50, 50),
         .alignment = ATTN_TOP_LEFT),
    SPEC(.name = "FlashMask, more queries than keys, causal", SIZES(170, 90, 64), .causal = true, .mask_bounds = 1),
    SPEC(.name = "FlashMask, one query", SIZES(1, 90, 64), .mask_bounds = 4, HEADS(4, 1)),

    /* Values */
    SPEC(.name = "scores below -5e4", SIZES(60, 80, 64), .q_amp = 1, .has_scale = true, .scale = -4000),
    SPEC(.name = "scores of 1e6", SIZES(60, 80, 64), .q_amp = 300),
    SPEC(.name = "all scores equal", SIZES(60, 80, 64), .q_amp = 1e-30, .q_mean = 0),
    SPEC(.name = "all scores equal and large", SIZES(60, 80, 64), .q_amp = 1e-30, .q_mean = 30),
    SPEC(.name = "one key dominates", SIZES(60, 80, 64), .q_amp = 20, F16),
    SPEC(.name = "fp16 near its largest", SIZES(60, 80, 64), F16, .q_amp = 15000, .has_scale = true, .scale = 1e-9),
    SPEC(.name = "fp16 subnormals", SIZES(60, 80, 64), F16, .q_amp = 2e-5, .v_amp = 2e-5),
    SPEC(.name = "bf16 subnormals", SIZES(60, 80, 64), BF16, .q_amp = 1e-38, .v_amp = 1),
    SPEC(.name = "large values of v", SIZES(60, 80, 64), BF16, .v_amp = 1e15),
    SPEC(.name = "scale 0", SIZES(60, 80, 64), .has_scale = true, .scale = 0, .causal = true),
    SPEC(.name = "scale -0.2", SIZES(60, 80, 64), .has_scale = true, .scale = -0.2, BF16, .causal = true),
    SPEC(.name = "scale 1e-20", SIZES(60, 80, 64), .has_scale = true, .scale = 1e-20),
    SPEC(.name = "softcap 1e-3", SIZES(60, 80, 64), .softcap = 1e-3),
    SPEC(.name = "softcap 15", SIZES(60, 80, 64), .softcap = 15, .q_amp = 3, .causal = true),
    SPEC(.name = "softcap 50", SIZES(60, 80, 64), .softcap = 50, .q_amp = 4, BF16),
    SPEC(.name = "softcap 1e6", SIZES(60, 80, 64), .softcap = 1e6),
    SPEC(.name = "softcap alone, causal, D 128", SIZES(203, 213, 128), BF16, HEADS(4, 2), .softcap = 3, .causal = true,
         .q_amp = 3),
    SPEC(.name = "softcap alone, window, negative scale", SIZES(200, 300, 64), F16, .softcap = 2, .has_scale = true,
         .scale = -0.3, WINDOW(40, 50)),
    SPEC(.name = "softcap alone, lengths, NaN in keys that rows do not see", SIZES(150, 290, 64), BF16, .B = 3,
         .softcap = 20, .seqlens_k = true, .causal = true, .poison_unseen = true),
    SPEC(.name = "softcap alone, packed", BF16, .D = 128, .Dv = 128, .softcap = 5, .causal = true, .sequences = 3,
         .q_lengths = { 170, 2, 126 }, .k_lengths = { 212, 69, 126 }),
    SPEC(.name = "softcap and ALiBi", SIZES(150, 290, 128), BF16, .softcap = 5, .alibi = 1, .causal = true),
    SPEC(.name = "softcap with a negative scale", SIZES(60, 80, 64), .softcap = 2, .has_scale = true, .scale = -0.3),
    SPEC(.name = "ALiBi", SIZES(90, 120, 64), HEADS(4, 4), .alibi = 1, .causal = true),
    SPEC(.name = "ALiBi of a batch, not causal", SIZES(120, 90, 64), .B = 2, HEADS(4, 2), .alibi = 2, BF16),
    SPEC(.name = "ALiBi, top left", SIZES(90, 120, 64), .alibi = 1, .causal = true, .alignment = ATTN_TOP_LEFT),
    SPEC(.name = "ALiBi of 65536 keys", SIZES(2, 65536, 8), HEADS(1, 1), .alibi = 1, .many_blocks = true),
    SPEC(.name = "sinks", SIZES(90, 120, 64), HEADS(4, 2), .sinks = 1, .causal = true, WINDOW(31, 0)),
    SPEC(.name = "sinks of 100, -100 and -inf", SIZES(90, 120, 64), HEADS(4, 4), .sinks = 2, BF16),
    SPEC(.name = "sinks of 100, -100 and -inf on empty rows", SIZES(120, 90, 64), HEADS(4, 4), .sinks = 2,
         .causal = true),
    SPEC(.name = "fp8", SIZES(90, 120, 64), FP8, .fp8_scales = true, HEADS(4, 2)),
    SPEC(.name = "fp8, causal, head size 128", SIZES(200, 200, 128), FP8, .causal = true),
    SPEC(.name = "fp8, odd head size, to f32", SIZES(50, 60, 59), .dtype = ATTN_F8E4M3, .fp8_scales = true),
    SPEC(.name = "fp8, odd head size, packed", FP8, .D = 31, .Dv = 64, .softcap = 4.3, .sequences = 3,
         .q_lengths = { 70, 2, 26 }, .k_lengths = { 112, 69, 26 }, .fp8_scales = true),
    SPEC(.name = "fp8, scales of each head", SIZES(90, 120, 64), FP8, .B = 2, HEADS(4, 2), .fp8_scales = true,
         .scale_axes = 1),
    SPEC(.name = "fp8, scales of each batch row", SIZES(90, 120, 128), FP8, .B = 2, HEADS(4, 2), .fp8_scales = true,
         .scale_axes = 2),
    SPEC(.name = "fp8, scales of each head, packed", FP8, .D = 64, .Dv = 64, .sequences = 3, HEADS(4, 2),
         .q_lengths = { 70, 2, 26 }, .k_lengths = { 112, 69, 26 }, .fp8_scales = true, .scale_axes = 3),
    SPEC(.name = "fp8, one scale", SIZES(90, 120, 64), FP8, .B = 2, HEADS(4, 2), .fp8_scales = true, .scale_axes = 4),
    SPEC(.name = "decode, float8 keys with one scale", SIZES(1, 1500, 128), BF16, .B = 3, HEADS(8, 2), .fp8_keys = true,
         .fp8_scales = true, .scale_axes = 4),
    SPEC(.name = "decode, float8 keys with scales of each batch row", SIZES(1, 1500, 64), F16, .B = 3, HEADS(8, 2),
         .fp8_keys = true, .fp8_scales = true, .scale_axes = 2),
    SPEC(.name = "fp8, scales of 1e-6", SIZES(50, 60, 64), FP8, .fp8_scales = true, .fp8_scale = 1e-6, .q_amp = 100),
    SPEC(.name = "fp8, scales of 1e6", SIZES(50, 60, 64), FP8, .fp8_scales = true, .fp8_scale = 1e6, .q_amp = 0.1,
         .has_scale = true, .scale = 1e-12),
    SPEC(.name = "fp8, scales of 0", SIZES(50, 60, 64), FP8, .fp8_scales = true, .fp8_scale = 1e-60), /* 0 in float32 */
    SPEC(.name = "fp8, saturated", SIZES(50, 60, 64), FP8, .q_amp = 400, .has_scale = true, .scale = 1e-6),
    SPEC(.name = "fp8, scores of 1e10", SIZES(200, 300, 64), FP8, .q_amp = 100, .fp8_scales = true, .fp8_scale = 1e3),
    SPEC(.name = "fp8, scales too small for a slope", SIZES(150, 160, 64), FP8, .fp8_scales = true, .fp8_scale = 1e-60,
         .has_scale = true, .scale = 1e-15, .alibi = 1),
    SPEC(.name = "fp8, scales small for a slope", SIZES(150, 160, 64), FP8, .fp8_scales = true, .fp8_scale = 1e-12,
         .has_scale = true, .scale = 1e-15, .alibi = 1),
    SPEC(.name = "fp8, scales of 0, small softmax_scale", SIZES(150, 160, 64), FP8, .fp8_scales = true,
         .fp8_scale = 1e-60, .has_scale = true, .scale = 1e-29),
    SPEC(.name = "keys in float8, float32", SIZES(50, 70, 64), .fp8_keys = true, .fp8_scales = true, HEADS(4, 2)),
    SPEC(.name = "keys in float8, float16", SIZES(150, 260, 128), F16, .fp8_keys = true, .fp8_scales = true,
         HEADS(4, 2), .causal = true),
    SPEC(.name = "keys in float8, bfloat16, no scales", SIZES(150, 260, 64), BF16, .fp8_keys = true,
         .poison_unseen = true, .causal = true, .alignment = ATTN_TOP_LEFT),
    SPEC(.name = "keys in float8, bfloat16, odd head size", SIZES(60, 90, 59), BF16, .fp8_keys = true,
         .fp8_scales = true, .softcap = 5),
    SPEC(.name = "keys in float8, decode", .B = 3, SIZES(1, 2600, 128), HEADS(8, 2), BF16, .fp8_keys = true,
         .fp8_scales = true, .seqlens_k = true),
    SPEC(.name = "keys in float8, decode, float32", .B = 3, SIZES(2, 2600, 64), HEADS(8, 2), .fp8_keys = true,
         .fp8_scales = true),
    SPEC(.name = "keys in float8, decode, scales below 0", .B = 2, SIZES(2, 900, 128), HEADS(8, 2), BF16,
         .fp8_keys = true, .fp8_scales = true, .fp8_scale = -0.7, .causal = true),
    SPEC(.name = "keys in float8, decode, scales of 0", SIZES(1, 300, 64), F16, .fp8_keys = true, .fp8_scales = true,
         .fp8_scale = 1e-60, .poison = 1),
    SPEC(.name = "keys in float8, decode, scales of 1e-12", SIZES(1, 300, 256), BF16, .fp8_keys = true,
         .fp8_scales = true, .fp8_scale = 1e-12),
    SPEC(.name = "keys in float8, decode, scores of 1e8", SIZES(1, 300, 128), BF16, .fp8_keys = true,
         .fp8_scales = true, .fp8_scale = 1e5, .q_amp = 100),
    SPEC(.name = "fp8, decode, scales below 0", SIZES(3, 700, 96), HEADS(8, 1), FP8, .fp8_scales = true,
         .fp8_scale = -0.5, .causal = true),
    SPEC(.name = "fp8, decode, many rows", SIZES(13, 700, 128), HEADS(8, 2), FP8, .fp8_scales = true, .causal = true),
    SPEC(.name = "keys in float8, decode, any address", .B = 2, SIZES(1, 1700, 128), HEADS(8, 2), F16, .fp8_keys = true,
         .strided = true),
    SPEC(.name = "keys in float8, pages", .B = 4, SIZES(3, 960, 64), PAGES(64), HEADS(8, 2), BF16, .fp8_keys = true,
         .fp8_scales = true, .causal = true),
    SPEC(.name = "keys in float8, packed", .sequences = 4, .q_lengths = { 1, 40, 0, 70 },
         .k_lengths = { 300, 40, 9, 130 }, HEADS(4, 2), BF16, .fp8_keys = true, .fp8_scales = true, .causal = true,
         .sinks = 1),
    SPEC(.name = "f16 to f32", SIZES(50, 60, 64), .dtype = ATTN_F16),
    SPEC(.name = "f32 to bf16", SIZES(50, 60, 64), .out_dtype = ATTN_BF16),
    SPEC(.name = "bf16 to f16", SIZES(50, 60, 64), .dtype = ATTN_BF16, .out_dtype = ATTN_F16),
    SPEC(.name = "dropout", SIZES(90, 120, 64), .dropout_p = 0.3, .seed = 42, .B = 2, .causal = true),
    SPEC(.name = "dropout, bf16, group", SIZES(90, 120, 64), .dropout_p = 0.17, .seed = UINT64_C(0xfedcba9876543210),
         HEADS(4, 2), BF16),
    SPEC(.name = "dropout of 0.999", SIZES(60, 80, 64), .dropout_p = 0.999, .seed = 7),
    SPEC(.name = "dropout with a window", SIZES(150, 170, 40), .dropout_p = 0.5, .seed = 7, WINDOW(20, 10), F16),

    /* Variable lengths */
    SPEC(.name = "packed", .sequences = 4, .q_lengths = { 5, 128, 1, 77 }, .k_lengths = { 5, 128, 1, 77 },
         .causal = true, BF16),
    SPEC(.name = "packed, empty sequences first, last, in a row", .sequences = 6, .q_lengths = { 0, 40, 0, 0, 33, 0 },
         .k_lengths = { 0, 40, 0, 0, 33, 0 }),
    SPEC(.name = "packed, all empty", .sequences = 3),
    SPEC(.name = "packed, lengths that differ", .sequences = 4, .q_lengths = { 3, 0, 40, 70 },
         .k_lengths = { 90, 12, 0, 30 }, HEADS(4, 2), .causal = true, .sinks = 1),
    SPEC(.name = "packed with everything", .sequences = 3, .q_lengths = { 30, 64, 65 }, .k_lengths = { 50, 64, 60 },
         HEADS(4, 2), WINDOW(20, 3), .softcap = 10, .alibi = 2, .dropout_p = 0.2, .seed = 5, F16, .strided = true),
    SPEC(.name = "packed decode", .sequences = 5, .q_lengths = { 1, 1, 1, 1, 1 }, .k_lengths = { 700, 1, 33, 0, 128 },
         HEADS(8, 2), BF16, .causal = true),
    SPEC(.name = "packed, fp8", .sequences = 2, .q_lengths = { 30, 64 }, .k_lengths = { 50, 64 }, FP8,
         .fp8_scales = true),
    SPEC(.name = "seqlens_k", .B = 5, SIZES(40, 150, 64), HEADS(4, 2), .seqlens_k = true, .causal = true,
         .poison_unseen = true, F16),
    SPEC(.name = "seqlens_k, decode", .B = 4, SIZES(1, 1000, 64), HEADS(8, 2), .seqlens_k = true, .poison_unseen = true,
         BF16),
    SPEC(.name = "seqlens_k with ALiBi, top left and a mask", .B = 4, SIZES(60, 90, 64), .seqlens_k = true, .alibi = 1,
         .causal = true, .alignment = ATTN_TOP_LEFT, .mask_bounds = 1),
    SPEC(.name = "pages of one slot", .B = 3, SIZES(40, 90, 64), PAGES(1), HEADS(4, 2), .causal = true),
    SPEC(.name = "pages of 7", .B = 3, SIZES(40, 91, 64), PAGES(7), HEADS(4, 2), BF16, .causal = true, .sinks = 1),
    SPEC(.name = "pages of 16", .B = 5, SIZES(70, 160, 64), PAGES(16), HEADS(4, 2), F16, .poison_unseen = true,
         WINDOW(50, 0)),
    SPEC(.name = "pages of 48", .B = 2, SIZES(70, 480, 72), PAGES(48), BF16, .causal = true, .strided = true),
    SPEC(.name = "pages of 64", .B = 5, SIZES(130, 192, 128), PAGES(64), HEADS(8, 2), BF16, .causal = true),
    SPEC(.name = "pages of 128, more than the row has keys", .B = 3, SIZES(9, 128, 64), PAGES(128), HEADS(2, 1), F16,
         .alibi = 2, .softcap = 10),
    SPEC(.name = "pages, decode", .B = 5, SIZES(1, 3200, 128), PAGES(16), HEADS(8, 2), BF16, .causal = true),
    SPEC(.name = "pages of one slot, decode", .B = 3, SIZES(1, 1500, 64), PAGES(1), HEADS(8, 2), BF16),
    SPEC(.name = "pages of 7, decode", .B = 4, SIZES(3, 2800, 64), PAGES(7), HEADS(4, 2), .causal = true, .sinks = 2),
    SPEC(.name = "pages, float8, decode", .B = 4, SIZES(2, 960, 64), PAGES(64), HEADS(8, 2), FP8, .fp8_scales = true),
    SPEC(.name = "pages, float8", .B = 2, SIZES(90, 192, 64), PAGES(16), HEADS(4, 2), FP8, .fp8_scales = true),
    SPEC(.name = "pages with bias, mask, dropout", .B = 4, SIZES(50, 96, 40), PAGES(32), HEADS(4, 2), .bias = 8,
         .bias_hidden = 0.2, .keep_mask = 2, .keep = 0.8, .mask_bounds = 4, .dropout_p = 0.2, .seed = 3),
    SPEC(.name = "pages, top left, FlashMask", .B = 4, SIZES(60, 96, 64), PAGES(16), .causal = true,
         .alignment = ATTN_TOP_LEFT, .mask_bounds = 1, BF16),
    SPEC(.name = "pages, packed queries", .sequences = 6, .q_lengths = { 1, 40, 0, 3, 70, 1 },
         .k_lengths = { 700, 40, 9, 0, 130, 64 }, PAGES(16), HEADS(4, 2), .causal = true, BF16),
    SPEC(.name = "pages, packed queries, nothing else", .sequences = 3, .q_lengths = { 5, 1, 90 },
         .k_lengths = { 5, 2500, 91 }, PAGES(7), F16),
    SPEC(.name = "pages, no keys at all", .B = 3, SIZES(5, 0, 64), PAGES(16), .sinks = 1),
    SPEC(.name = "pages, no batch", .B = 0, SIZES(5, 32, 64), PAGES(16)),
    SPEC(.name = "seqlens_k with bias and sinks", .B = 4, SIZES(60, 90, 64), .seqlens_k = true, .bias = 8, .sinks = 1,
         .keep_mask = 2, .keep = 0.8),

    /* Gradients */
    SPEC(.name = "dlse", BACK, SIZES(60, 80, 64), .dlse = true, .causal = true),
    SPEC(.name = "dlse, empty rows, sinks", BACK, SIZES(80, 60, 64), .dlse = true, .causal = true, .sinks = 1, BF16),
    SPEC(.name = "dlse alone", BACK, SIZES(60, 80, 64), .dlse = true, .no_dout = true, F16),
    SPEC(.name = "out and lse given", BACK, SIZES(60, 80, 64), .give_forward = true, BF16, .causal = true),
    SPEC(.name = "out and lse given, sinks, empty rows", BACK, SIZES(80, 60, 64), .give_forward = true, .sinks = 2,
         HEADS(4, 4), .causal = true, .dlse = true),
    SPEC(.name = "out given in f32 for f16", BACK, SIZES(60, 80, 64), .give_forward = true, .dtype = ATTN_F16),
    SPEC(.name = "packed, dlse, out given", BACK, .sequences = 3, .q_lengths = { 30, 0, 65 },
         .k_lengths = { 50, 6, 60 }, HEADS(4, 2), .give_forward = true, .dlse = true),
    SPEC(.name = "everything at once", BACK, .B = 2, SIZES(75, 130, 72), HEADS(6, 2), .sinks = 1, .alibi = 2, .bias = 7,
         .bias_hidden = 0.1, .keep_mask = 2, .keep = 0.9, .mask_bounds = 2, .mask_heads = 1, .softcap = 8,
         .dropout_p = 0.1, .seed = 3, WINDOW(60, 30), .seqlens_k = true, .dlse = true, .strided = true,
         .poison_unseen = true),
    SPEC(.name = "scores of 1e6, peaky", BACK, SIZES(60, 80, 64), .q_amp = 10, F16),
};

/* Forward alone: the gradients of such scores and values are beyond their type. */
static const struct spec huge_cases[] = {
    SPEC(.name = "scale 1e20", SIZES(60, 80, 64), .has_scale = true, .scale = 1e20),
    /* A score c, rounded, beside s c in a fused multiply-add: they differ by up to 2^-24 of it, and P leaves its
     * range */
    SPEC(.name = "scores of 1e9, float16", SIZES(200, 300, 64), F16, .q_amp = 15000),
    SPEC(.name = "scores of 1e9, decoding", SIZES(1, 3000, 64), HEADS(8, 2), F16, .q_amp = 15000),
    SPEC(.name = "scores of 1e10, bfloat16", SIZES(200, 300, 64), BF16, .q_amp = 3e4),
    SPEC(.name = "scores of 1e15, bfloat16", SIZES(200, 300, 64), BF16, .q_amp = 1e7),
    SPEC(.name = "scores of 1e15, D 128", SIZES(200, 300, 128), BF16, .q_amp = 1e7, .softcap = 30),
    SPEC(.name = "scores of 1e15, decoding", SIZES(2, 3000, 128), BF16, .q_amp = 1e7),
    SPEC(.name = "scores of 1e15, decoding, sinks", SIZES(1, 90, 128), BF16, .q_amp = 1e7, .sinks = 1),
    SPEC(.name = "scores of 1e15, float32", SIZES(200, 300, 64), .q_amp = 1e7),
    SPEC(.name = "scores of 1e15, float32, D 128", SIZES(200, 300, 128), .q_amp = 1e7, .causal = true),
    SPEC(.name = "scale 1e20, float16, causal", SIZES(300, 300, 64), F16, .has_scale = true, .scale = 1e20,
         .causal = true),
    SPEC(.name = "values of 1e36, bfloat16", SIZES(300, 300, 64), BF16, .causal = true, .v_amp = 1e36),
    SPEC(.name = "values of 1e36, decoding", SIZES(1, 3000, 64), BF16, .v_amp = 1e36),
};

/* As large as float32 can hold. All run forward, and backward where they do not say otherwise. */
static const struct spec extreme_cases[] = {
    SPEC(.name = "a mask of the most negative numbers", SIZES(50, 70, 64), .bias = 5, .bias_levels = 1),
    SPEC(.name = "the same, float16", SIZES(50, 70, 64), F16, .bias = 5, .bias_levels = 1, .causal = true),
    SPEC(.name = "the same, bfloat16 bias", SIZES(50, 300, 64), BF16, .bias = 5, .bias_dtype = ATTN_BF16,
         .bias_levels = 1),
    SPEC(.name = "the same, decoding", SIZES(3, 3000, 64), HEADS(4, 2), BF16, .bias = 5, .bias_levels = 1),
    SPEC(.name = "the same, one query", SIZES(1, 130, 128), HEADS(4, 2), BF16, .bias = 1, .bias_levels = 1),
    SPEC(.name = "the same, one query, nothing else", SIZES(1, 130, 128), HEADS(4, 2), BF16, .B = 3, .bias = 2,
         .bias_levels = 1),
    SPEC(.name = "the same, one query of many keys, nothing else", SIZES(1, 3100, 64), .B = 3, .bias = 2,
         .bias_levels = 1),
    SPEC(.name = "the same with sinks", SIZES(50, 70, 64), HEADS(4, 4), .bias = 5, .bias_levels = 1, .sinks = 2),
    SPEC(.name = "the same, float8", SIZES(50, 70, 64), FP8, .bias = 5, .bias_levels = 1),
    SPEC(.name = "bias from -3.4e38 to 3.4e38", SIZES(50, 70, 64), .bias = 8, .bias_levels = 2),
    SPEC(.name = "bias from -3.4e38 to 3.4e38, bfloat16", SIZES(90, 130, 128), BF16, .bias = 5, .bias_levels = 2,
         .causal = true),
    SPEC(.name = "bias from -3.4e38 to 3.4e38, float16, softcap, ALiBi", SIZES(60, 200, 64), F16, .bias = 5,
         .bias_levels = 2, .softcap = 20, .alibi = 1),
    SPEC(.name = "bias from -3.4e38 to 3.4e38, D 256", SIZES(60, 70, 256), BF16, .bias = 5, .bias_levels = 2),
    SPEC(.name = "bias from -3.4e38 to 3.4e38, decoding", SIZES(2, 2500, 64), HEADS(4, 2), F16, .bias = 5,
         .bias_levels = 2),
    SPEC(.name = "bias from -3.4e38 to 3.4e38, dropout", SIZES(50, 70, 64), .bias = 5, .bias_levels = 2,
         .dropout_p = 0.25, .seed = 11),
    SPEC(.name = "values of 3e38, float32", SIZES(50, 300, 64), .v_most = 3e38),
    SPEC(.name = "values of 3e38, bfloat16", SIZES(150, 300, 64), BF16, .v_most = 3e38, .causal = true),
    SPEC(.name = "values of 3e38, D 128", SIZES(150, 300, 128), BF16, .v_most = 3e38),
    SPEC(.name = "values of 3e38, decoding", SIZES(1, 3000, 64), BF16, .v_most = 3e38),
    SPEC(.name = "values of 3e38, decoding, float32", SIZES(1, 3000, 64), .v_most = 3e38),
    SPEC(.name = "values of 3e38, a mask", SIZES(90, 130, 64), BF16, .v_most = 3e38, .keep_mask = 8, .keep = 0.7),
    SPEC(.name = "sinks of 3e38", SIZES(50, 70, 64), HEADS(4, 4), .sinks = 3, .dlse = true),
    SPEC(.name = "sinks of 3e38, bfloat16", SIZES(200, 300, 64), HEADS(4, 4), BF16, .sinks = 3, .causal = true),
    SPEC(.name = "sinks of 3e38, empty rows", SIZES(120, 90, 64), HEADS(4, 4), F16, .sinks = 3, .causal = true),
    SPEC(.name = "sinks of 3e38, decoding", SIZES(1, 3000, 64), HEADS(4, 4), BF16, .sinks = 3),
    SPEC(.name = "sinks of 3e38, float8", SIZES(90, 120, 64), HEADS(4, 4), FP8, .sinks = 3),
    SPEC(.name = "scores of 1e10, a float32 dout for bfloat16", .dtype = ATTN_BF16, SIZES(1, 34, 80), HEADS(3, 3),
         .B = 2, .has_scale = true, .scale = -1e9),
    SPEC(.name = "softcap 2e-38", SIZES(60, 80, 64), .softcap = 2e-38, .causal = true),
    SPEC(.name = "softcap 3e38", SIZES(60, 80, 64), .softcap = 3e38),
    SPEC(.name = "softcap 3e38, bfloat16", SIZES(200, 300, 64), BF16, .softcap = 3e38, .causal = true),
    SPEC(.name = "softcap 2e-38, bfloat16", SIZES(200, 300, 64), BF16, .softcap = 2e-38),
    SPEC(.name = "scale 1e-37", SIZES(60, 80, 64), .has_scale = true, .scale = 1e-37),
    SPEC(.name = "scale 3e38, q of 1e-38", SIZES(60, 80, 64), .has_scale = true, .scale = 3e38, .q_amp = 1e-19),
};

/* Rows that do not exist: behind seqlens_q, between packed sequences, behind the keys of rows beside packed queries.
 * NaN is in all of them. */
static const struct spec length_cases[] = {
    SPEC(.name = "seqlens_q", .B = 5, SIZES(150, 150, 64), HEADS(4, 2), .seqlens_q = true, .causal = true, BF16),
    SPEC(.name = "seqlens_q, bhsd, wider heads", .B = 4, SIZES(70, 200, 128), HEADS(4, 2), .seqlens_q = true,
         .layout = ATTN_BHSD, F16, .sinks = 1),
    SPEC(.name = "seqlens_q and seqlens_k", .B = 5, SIZES(140, 300, 128), HEADS(4, 2), .seqlens_q = true,
         .seqlens_k = true, .causal = true, .poison_unseen = true, BF16),
    SPEC(.name = "seqlens_q and seqlens_k, float32", .B = 5, SIZES(140, 150, 64), HEADS(4, 2), .seqlens_q = true,
         .seqlens_k = true, WINDOW(40, 10)),
    SPEC(.name = "seqlens_q, head size 256", .B = 4, SIZES(140, 150, 256), .seqlens_q = true, .seqlens_k = true,
         .causal = true, F16),
    SPEC(.name = "seqlens_q, head size 192, 128 of v", .B = 4, .Sq = 200, .Sk = 140, .D = 192, .Dv = 128,
         .seqlens_q = true, .causal = true, BF16),
    SPEC(.name = "seqlens_q with bias and dbias over rows", .B = 4, SIZES(60, 90, 64), HEADS(4, 2), .seqlens_q = true,
         .bias = 5, .bias_hidden = 0.1, F16),
    SPEC(.name = "seqlens_q with everything", .B = 4, SIZES(75, 130, 72), HEADS(6, 2), .sinks = 1, .alibi = 2,
         .bias = 7, .bias_hidden = 0.1, .keep_mask = 2, .keep = 0.9, .mask_bounds = 2, .mask_heads = 1, .softcap = 8,
         .dropout_p = 0.1, .seed = 3, WINDOW(60, 30), .seqlens_k = true, .seqlens_q = true, .strided = true),
    SPEC(.name = "seqlens_q, FlashMask, top left", .B = 4, SIZES(160, 190, 64), .seqlens_q = true, .causal = true,
         .alignment = ATTN_TOP_LEFT, .mask_bounds = 1, BF16),
    SPEC(.name = "seqlens_q, few queries", .B = 6, SIZES(4, 900, 128), HEADS(8, 2), .seqlens_q = true,
         .seqlens_k = true, .causal = true, BF16),
    SPEC(.name = "seqlens_q, float8", .B = 4, SIZES(150, 190, 128), HEADS(4, 2), .seqlens_q = true, .seqlens_k = true,
         FP8, .fp8_scales = true, .causal = true),
    SPEC(.name = "seqlens_q, latent attention", MLA, .B = 4, .Sq = 9, .Sk = 150, BF16, .seqlens_q = true,
         .seqlens_k = true, .causal = true),
    SPEC(.name = "seqlens_q, pages", .B = 4, SIZES(40, 96, 64), PAGES(16), HEADS(4, 2), F16, .seqlens_q = true,
         .causal = true),
    SPEC(.name = "gaps", .sequences = 4, .q_lengths = { 5, 128, 1, 77 }, .k_lengths = { 5, 128, 1, 77 }, .gaps = 20,
         .causal = true, BF16),
    SPEC(.name = "gaps, empty sequences, one key head", .sequences = 5, .q_lengths = { 0, 3, 0, 140, 70 },
         .k_lengths = { 9, 90, 12, 0, 300 }, .gaps = 150, HEADS(4, 1), .sinks = 1, .D = 128, .Dv = 128, F16),
    SPEC(.name = "gaps, float32", .sequences = 3, .q_lengths = { 30, 140, 65 }, .k_lengths = { 50, 64, 160 },
         .gaps = 40, HEADS(4, 2), .causal = true),
    SPEC(.name = "gaps with everything", .sequences = 3, .q_lengths = { 30, 64, 65 }, .k_lengths = { 50, 64, 60 },
         .gaps = 30, HEADS(4, 2), WINDOW(20, 3), .softcap = 10, .alibi = 2, .dropout_p = 0.2, .seed = 5, F16,
         .strided = true, .sinks = 1),
    SPEC(.name = "gaps, head size 256", .sequences = 3, .q_lengths = { 67, 0, 135 }, .k_lengths = { 133, 9, 100 },
         .gaps = 70, .D = 256, .Dv = 256, BF16, .causal = true),
    SPEC(.name = "gaps, decode", .sequences = 5, .q_lengths = { 1, 1, 1, 1, 2 }, .k_lengths = { 700, 1, 33, 0, 128 },
         .gaps = 9, HEADS(8, 2), BF16, .causal = true),
    SPEC(.name = "gaps, float8", .sequences = 2, .q_lengths = { 30, 64 }, .k_lengths = { 50, 64 }, .gaps = 9, FP8,
         .fp8_scales = true),
    SPEC(.name = "gaps, pages", .sequences = 4, .q_lengths = { 1, 40, 0, 70 }, .k_lengths = { 700, 40, 9, 130 },
         .gaps = 9, PAGES(16), HEADS(4, 2), .causal = true, BF16),
    SPEC(.name = "packed queries and rows of keys", .sequences = 4, .q_lengths = { 5, 128, 1, 77 },
         .k_lengths = { 45, 128, 0, 90 }, .key_rows = true, HEADS(4, 2), .causal = true, BF16),
    SPEC(.name = "packed queries and rows of keys, gaps", .sequences = 3, .q_lengths = { 30, 0, 165 },
         .k_lengths = { 150, 64, 160 }, .key_rows = true, .gaps = 11, HEADS(4, 2), .D = 128, .Dv = 128, F16),
    SPEC(.name = "packed queries and rows of one key", .sequences = 3, .q_lengths = { 3, 1, 6 },
         .k_lengths = { 1, 0, 1 }, .key_rows = true),
    SPEC(.name = "packed queries and rows of keys, strided", .sequences = 3, .q_lengths = { 30, 10, 65 },
         .k_lengths = { 50, 64, 60 }, .key_rows = true, .strided = true, .softcap = 10, .alibi = 1),
    SPEC(.name = "seqlens_q, out and lse given, dlse", BACK, .B = 5, SIZES(140, 150, 64), HEADS(4, 2),
         .seqlens_q = true, .give_forward = true, .dlse = true, .causal = true, BF16, .sinks = 1),
    SPEC(.name = "seqlens_q, out and lse given, float32", BACK, .B = 4, SIZES(70, 80, 64), .seqlens_q = true,
         .give_forward = true, .dlse = true),
    SPEC(.name = "seqlens_q, any order", BACK, .B = 5, SIZES(280, 260, 128), HEADS(4, 2), .seqlens_q = true,
         .seqlens_k = true, .any_order = true, BF16, .causal = true),
    SPEC(.name = "gaps, out and lse given, dlse", BACK, .sequences = 3, .q_lengths = { 30, 0, 165 },
         .k_lengths = { 50, 6, 160 }, .gaps = 70, HEADS(4, 2), .give_forward = true, .dlse = true, F16, .D = 128,
         .Dv = 128),
    SPEC(.name = "gaps, any order", BACK, .sequences = 3, .q_lengths = { 130, 5, 265 }, .k_lengths = { 150, 300, 160 },
         .gaps = 70, HEADS(4, 2), .any_order = true, BF16),
};

/* clang-format on */

static void test_huge_scores_and_values_agree_with_the_reference(void **state)
{
    int failed = 0;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(huge_cases); i++)
        if (!agrees(&huge_cases[i])) failed++;
    assert_int_equal(failed, 0);
}

static void test_the_largest_numbers_of_float32_agree_with_the_reference(void **state)
{
    int failed = 0;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(extreme_cases); i++)
        for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
            struct spec s = extreme_cases[i];
            if (op == ATTN_OP_BACKWARD && (s.dtype == ATTN_F8E4M3 || s.v_most != 0 || s.q_amp == 1e-19)) continue;
            s.op = op;
            if (!agrees(&s)) failed++;
            s.give_forward = true;
            if (op == ATTN_OP_BACKWARD && !is_brief() && !agrees(&s)) failed++;
        }
    assert_int_equal(failed, 0);
}

/* How many problems of a list do not agree with the reference, forward and backward. */
static int disagree(const struct spec *list, size_t count)
{
    int failed = 0;
    for (size_t i = 0; i < count; i++)
        for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
            struct spec s = list[i];
            if (op == ATTN_OP_FORWARD && s.op == ATTN_OP_BACKWARD) continue;
            if (op == ATTN_OP_BACKWARD &&
                (s.dtype == ATTN_F8E4M3 || s.page_size || s.fp8_keys || s.D > ATTN_MAX_BACKWARD_HEAD_DIM ||
                 s.Dv > ATTN_MAX_BACKWARD_HEAD_DIM || (s.many_blocks && is_brief())))
                continue;
            s.op = op;
            if (!agrees(&s)) failed++;
        }
    return failed;
}

static void test_edge_cases_agree_with_the_reference(void **state)
{
    (void)state;
    assert_int_equal(disagree(edge_cases, ARRAY_SIZE(edge_cases)), 0);
}

static void test_lengths_agree_with_the_reference(void **state)
{
    (void)state;
    assert_int_equal(disagree(length_cases, ARRAY_SIZE(length_cases)), 0);
}

/* The last kernel of an operation takes every problem, and is slow. `paper` has one kernel alone. */
static void test_lengths_do_not_need_the_slowest_kernel(void **state)
{
    const attn_kernel *slow[2] = { NULL, NULL };
    (void)state;
    if (strcmp(backend, "paper") == 0) skip();
    for (int n = 0; attn_kernel_at(bench.device, n); n++)
        slow[attn_kernel_at(bench.device, n)->op] = attn_kernel_at(bench.device, n);
    for (size_t i = 0; i < ARRAY_SIZE(length_cases) && strcmp(backend, "reference") != 0; i++) {
        struct fixture f;
        attn_plan plan;
        attn_error err = { 0 };
        if (length_cases[i].D > ATTN_MAX_BACKWARD_HEAD_DIM) continue;
        fixture_make(&f, &length_cases[i]);
        assert_int_equal(attn_plan_make(bench.device, &f.p, &plan, &err), ATTN_OK);
        if (plan.kernel == slow[f.p.op]) fail_msg("%s: is computed by %s", length_cases[i].name, plan.kernel->name);
        fixture_clear(&f);
    }
}

/* ---- Random problems --------------------------------------------------------------------------------------------- */

static int64_t pick(struct rng *r, const int64_t *from, size_t count)
{
    return from[rng_next(r) % count];
}

static const int64_t page_sizes[] = { 1, 3, 7, 16, 16, 32, 48, 64, 128 };

/* Puts keys and values in pages: rows then have any length up to Sk, which is whole pages. */
static void give_pages(struct spec *s, int64_t page_size)
{
    s->page_size = (int)page_size;
    s->layout = ATTN_BSHD;
    s->Sk = (s->Sk + page_size - 1) / page_size * page_size;
    s->seqlens_k = !s->sequences;
}

/* A legal problem with options drawn at random: each is absent most of the time, so that pairs and triples of them
 * come up.
 * */
static struct spec random_spec(uint64_t seed)
{
    static const int64_t lengths[] = { 0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200 };
    static const int64_t head_sizes[] = { 1,  3,  8,  16, 24, 31,  32,  40,  64,  64,
                                          64, 65, 72, 80, 96, 128, 128, 160, 192, 256 };
    struct rng r = { seed * UINT64_C(0x2545f4914f6cdd1d) +
                     1 }; /* not the step of the stream: seeds would share their draws */
    struct spec s = SPEC(.data_seed = seed);
    s.op = rng_chance(&r, 0.5) ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
    s.dtype = rng_chance(&r, 0.4) ? ATTN_F32 : rng_chance(&r, 0.5) ? ATTN_F16 : ATTN_BF16;
    if (s.op == ATTN_OP_FORWARD && rng_chance(&r, 0.12)) s.dtype = ATTN_F8E4M3;
    s.out_dtype = s.dtype == ATTN_F8E4M3 ? ATTN_BF16 : s.dtype;
    if (rng_chance(&r, 0.15)) s.out_dtype = (attn_dtype)rng_between(&r, ATTN_F32, ATTN_BF16);
    s.Hk = rng_between(&r, 1, 3);
    s.H = s.Hk * (rng_chance(&r, 0.5) ? 1 : rng_between(&r, 2, 5));
    s.B = rng_chance(&r, 0.6) ? 1 : rng_chance(&r, 0.05) ? 0 : rng_between(&r, 2, 3);
    s.D = s.Dv = rng_chance(&r, 0.3) ? rng_between(&r, 1, 256) : pick(&r, head_sizes, ARRAY_SIZE(head_sizes));
    if (rng_chance(&r, 0.2)) s.Dv = pick(&r, head_sizes, ARRAY_SIZE(head_sizes));
    s.Sq = rng_chance(&r, 0.4) ? rng_between(&r, 1, 150) : pick(&r, lengths, ARRAY_SIZE(lengths));
    s.Sk = rng_chance(&r, 0.3)   ? s.Sq
           : rng_chance(&r, 0.5) ? rng_between(&r, 1, 300)
                                 : pick(&r, lengths, ARRAY_SIZE(lengths));
    if (rng_chance(&r, 0.08))
        s.Sq = rng_between(&r, 1, 4), s.Sk = rng_between(&r, 500, 2500), s.op = ATTN_OP_FORWARD; /* decode */
    if (rng_chance(&r, 0.3)) s.layout = ATTN_BHSD;
    if (rng_chance(&r, 0.25)) s.alignment = ATTN_TOP_LEFT;
    if (rng_chance(&r, 0.15)) s.has_scale = true, s.scale = rng_chance(&r, 0.2) ? 0 : rng_normal(&r) * 0.3;
    if (rng_chance(&r, 0.4)) s.causal = true;
    if (rng_chance(&r, 0.25)) s.window_left = rng_between(&r, 0, 100);
    if (rng_chance(&r, 0.2)) s.window_right = rng_between(&r, 0, 60);
    if (rng_chance(&r, 0.15)) s.softcap = 1 + 20 * rng_uniform(&r);
    if (rng_chance(&r, 0.15)) s.dropout_p = rng_uniform(&r) * 0.9, s.seed = rng_next(&r);
    if (rng_chance(&r, 0.15)) s.alibi = (int)rng_between(&r, 1, 2);
    if (rng_chance(&r, 0.2)) s.sinks = (int)rng_between(&r, 1, 2);
    if (rng_chance(&r, 0.2)) s.strided = true;
    if (s.dtype == ATTN_F8E4M3 && rng_chance(&r, 0.7)) s.fp8_scales = true;
    if (rng_chance(&r, 0.2)) {
        s.layout = ATTN_BSHD;
        s.sequences = (int)rng_between(&r, 1, 6);
        for (int n = 0; n < s.sequences; n++) {
            s.q_lengths[n] = (int)(rng_chance(&r, 0.15) ? 0 : rng_between(&r, 1, 90));
            s.k_lengths[n] = rng_chance(&r, 0.4) ? s.q_lengths[n]
                                                 : (int)(rng_chance(&r, 0.15) ? 0 : rng_between(&r, 1, 120));
        }
    } else {
        if (rng_chance(&r, 0.2)) {
            s.bias = (int)rng_between(&r, 1, 8);
            s.bias_hidden = rng_chance(&r, 0.5) ? 0 : rng_uniform(&r) * 0.6;
            if (s.dtype != ATTN_F8E4M3 && rng_chance(&r, 0.4)) s.bias_dtype = s.dtype;
        }
        if (rng_chance(&r, 0.2)) s.keep_mask = (int)rng_between(&r, 1, 8), s.keep = rng_uniform(&r);
        if (rng_chance(&r, 0.2)) s.seqlens_k = true;
        if (rng_chance(&r, 0.2)) {
            s.mask_bounds = s.causal ? (int)rng_between(&r, 1, 2) : 2 * (int)rng_between(&r, 1, 2);
            s.mask_heads = (int)rng_between(&r, 0, 2);
            s.mask_kind = (enum mask_kind)rng_between(&r, 0, MASK_KINDS - 1);
        }
    }
    if (rng_chance(&r, 0.3)) s.poison_unseen = true;
    if (s.op == ATTN_OP_BACKWARD) {
        s.dlse = rng_chance(&r, 0.3);
        s.give_forward = rng_chance(&r, 0.4);
        s.no_dout = rng_chance(&r, 0.03);
    }
    if (rng_chance(&r, 0.1)) s.q_amp = 4;
    if (s.op == ATTN_OP_FORWARD && rng_chance(&r, 0.15)) give_pages(&s, pick(&r, page_sizes, ARRAY_SIZE(page_sizes)));
    if (s.keep_mask && rng_chance(&r, 0.4)) s.keep_tail = (int)rng_between(&r, 1, s.Sk + 1);
    if (s.sequences == 0) s.seqlens_q = rng_chance(&r, 0.25);
    else if (rng_chance(&r, 0.4)) s.gaps = (int)rng_between(&r, 1, 40);
    if (s.sequences && s.page_size == 0) s.key_rows = rng_chance(&r, 0.3);
    if (s.op == ATTN_OP_FORWARD && rng_chance(&r, 0.06)) s.D = rng_between(&r, 1, 576), s.Dv = rng_between(&r, 1, 576);
    if (s.op == ATTN_OP_FORWARD && s.dtype != ATTN_F8E4M3 && rng_chance(&r, 0.12))
        s.fp8_keys = true, s.fp8_scales = rng_chance(&r, 0.7);
    if (s.op == ATTN_OP_BACKWARD && rng_chance(&r, 0.3))
        s.float_grads = rng_chance(&r, 0.6) ? 7 : (int)rng_between(&r, 1, 6);
    return s;
}

/* Every dtype, class of head size and mask, forward and backward, at odd lengths: few enough problems to be run under
 * compute-sanitizer (tests/gpu/sanitize.sh), which takes one head size at a time: ATTN_GRID_D=64. */
static void test_grid_agrees_with_the_reference(void **state)
{
    /* clang-format off: a row is a line */
    static const struct spec masks[] = {
        SPEC(.name = "none"),
        SPEC(.name = "causal", .causal = true),
        SPEC(.name = "causal, top left", .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "window", WINDOW(21, 13)),
        SPEC(.name = "keep_mask", .keep_mask = 1 + 7, .keep = 0.6),
        SPEC(.name = "FlashMask, 1 bound", .causal = true, .mask_bounds = 1, .mask_heads = 1),
        SPEC(.name = "FlashMask, 4 bounds", .mask_bounds = 4, .mask_heads = 2),
        SPEC(.name = "softcap and ALiBi", .softcap = 5, .alibi = 1),
        SPEC(.name = "bias", .bias = 1 + 7, .bias_hidden = 0.2),
        SPEC(.name = "dropout", .causal = true, .dropout_p = 0.3, .seed = 77),
        SPEC(.name = "sinks and seqlens_k", .sinks = 1, .seqlens_k = true, .B = 3),
        SPEC(.name = "packed", .causal = true, .sequences = 3, .q_lengths = { 67, 0, 35 }, .k_lengths = { 133, 9, 1 }),
    };
    /* clang-format on */
    static const int head_sizes[] = { 40, 64, 96, 128, 192, 256 };
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8E4M3 };
    const char *const only = getenv("ATTN_GRID_D");
    int failed = 0, ran = 0;
    (void)state;
    for (size_t m = 0; m < ARRAY_SIZE(masks); m++)
        for (size_t n = 0; n < ARRAY_SIZE(head_sizes); n++)
            for (size_t t = 0; t < ARRAY_SIZE(dtypes); t++)
                for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
                    struct spec s = masks[m];
                    if (op == ATTN_OP_BACKWARD && dtypes[t] == ATTN_F8E4M3) continue;
                    if (only && *only && atoi(only) != head_sizes[n]) continue;
                    ran++;
                    s.op = op;
                    s.dtype = dtypes[t];
                    s.out_dtype = dtypes[t] == ATTN_F8E4M3 ? ATTN_BF16 : dtypes[t];
                    s.H = 2, s.Hk = 1;
                    s.D = s.Dv = head_sizes[n];
                    if (s.sequences == 0) s.Sq = 67, s.Sk = 133;
                    s.any_order = (m + n) % 2;
                    if (!agrees(&s)) failed++;
                }
    assert_int_equal(failed, 0);
    assert_int_not_equal(ran, 0);
}

/* Compares dq, dk and dv in the inputs' dtype with those in float32: how many float32 numbers do not round to the
 * others, how many do not fit into 16 bits, and the squares of both errors. */
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

/* dq may be summed in any order where it need not be deterministic. Its bits then differ from run to run. */
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

/* For float32 gradients a kernel leaves out the last rounding to 16 bits, and changes nothing else. */
static void test_float32_gradients_round_to_those_of_16_bits(void **state)
{
    /* clang-format off: a row is a line */
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

/* A kernel may begin a block's next work (queries of a head) while it ends the one at hand, also where that is of queries
 * that see no keys, or has none at all. Problems of more work than a device runs at once, of which some is such. */
static void test_work_that_sees_no_keys_between_other_work(void **state)
{
    /* clang-format off: a row is a line */
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
        int D, more_keys; /* from 1024 keys on, heads of 128 are computed otherwise */
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
            if (s.Sq > s.Sk - heads[n].more_keys + 200) s.Sq += heads[n].more_keys; /* still more than keys */
            if (s.sequences > 0) s.k_lengths[0] += heads[n].more_keys, s.k_lengths[3] += heads[n].more_keys;
            if (!agrees(&s)) failed++;
        }
    assert_int_equal(failed, 0);
}

/* float8 kernels may treat scores otherwise where lse is not wanted. Each row at three head sizes, for 64 that of
 * the row; with lse too where something is NaN. */
static void test_float8_without_lse_agrees_with_the_reference(void **state)
{
    /* clang-format off: a row is a line */
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
            s.no_lse = false; /* rows that see a NaN are computed apart, with their lse */
            if (s.poison && !agrees(&s)) failed++;
        }
    assert_int_equal(failed, 0);

    /* Where a kernel is asked for by name: that it is the one. */
    const char *family = getenv("ATTN_CUDA_FAMILY");
    if (family && strcmp(family, "sm90_f8") == 0) {
        const struct spec s = SPEC(SIZES(200, 300, 128), FP8, .no_lse = true);
        struct fixture f;
        attn_error err;
        fixture_make(&f, &s);
        attn_plan plan;
        assert_int_equal(attn_plan_make(bench.device, &f.p, &plan, &err), ATTN_OK);
        fixture_clear(&f);
        assert_string_equal(plan.kernel->name, family);
    }
}

/* A row that sees one key has its value, however large their score: tolerances elsewhere grow with scores. These are up
 * to 1e4 to 1e9: on both sides of those from which on a kernel's exponentials are relative to what it has rounded. */
static void test_float8_rows_of_one_key_are_its_value(void **state)
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

/* Where one key has half of the weight, or nine tenths, the others count for the rest, wherever that key is: the tensor
 * cores of Hopper keep 14 bits of a sum of float8, so beside that key others are lost until the sum begins anew. All
 * values are one number, and so must every row of out be, as exactly as float8's out has to be. */
static void test_float8_sums_keep_what_lies_beside_a_heavy_key(void **state)
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
        const int64_t heavy = (int64_t)(Sk - 1) * D; /* its score is the sum of two numbers of float8 */
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

/* Kernels may find the largest score of a row in another way once it is above 0, or not far below: rows whose scores
 * are all below, that cross 0 from tile to tile, and beside rows that do not. */
static void test_scores_of_either_side_of_0_agree_with_the_reference(void **state)
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

/* A problem with a feature that no row names goes to the kernels that take everything: an option that is added to the
 * contract is never computed by a kernel that does not know it, though not a line of that kernel has changed. And those
 * compute it. */
static void test_a_feature_that_no_kernel_names_is_computed_by_one_that_takes_everything(void **state)
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
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(problems); i++) {
        struct fixture f;
        attn_plan plan, usual;
        attn_error err;
        fixture_make(&f, &problems[i]);
        const uint64_t features = attn_features(&f.p);
        assert_int_equal(features & made_up, 0);
        for (int n = 0; attn_kernel_at(bench.device, n); n++) {
            const attn_kernel *k = attn_kernel_at(bench.device, n);
            if (k->op != f.p.op || !attn_kernel_takes(k, &f.p, features)) continue;
            assert_int_equal(attn_kernel_takes(k, &f.p, features | made_up), (k->features & made_up) != 0);
        }
        assert_int_equal(attn_plan_for(bench.device, &f.p, features | made_up, &plan, &err), ATTN_OK);
        assert_true(plan.kernel->features & made_up);
        if (strncmp(plan.kernel->name, "sm90", 4) == 0) fail_msg("%s took it", plan.kernel->name);
        assert_int_equal(attn_plan_make(bench.device, &f.p, &usual, &err), ATTN_OK);
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

/* dslope = -sum dZ distance, where distances are hundreds: whatever error a row's delta has counts that much. P rounded
 * to bfloat16 in the product that gives the out that delta is made of was enough for 0.01 of the largest here (and 0.1
 * with more terms), and a float32 dout rounded for dP but not for delta for 0.03. Compared without the allowances of
 * fixture_compare(), for nothing here is rounded before it is summed but such a dout. */
static void test_slopes_in_bfloat16_are_as_exact_as_other_sums(void **state)
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
        s.out_dtype = n % 3 == 1 ? ATTN_F32 : ATTN_BF16; /* dout's too */
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

static void test_random_problems_agree_with_the_reference(void **state)
{
    const long first = env_number("ATTN_RANDOM_SEED", 1), count = env_number("ATTN_RANDOM_COUNT", RANDOM_COUNT);
    int failed = 0;
    (void)state;
    for (long n = 0; n < count && failed < 20; n++) {
        struct spec s = random_spec((uint64_t)(first + n));
        s.any_order = s.op == ATTN_OP_BACKWARD && (first + n) % 2 == 0;
        if (!agrees(&s)) {
            fprintf(stderr, "    (random problem %ld)\n", first + n);
            failed++;
        }
    }
    assert_int_equal(failed, 0);
}

/* ---- Decoding: few queries, many keys ---------------------------------------------------------------------------- */

/* Backends that cut the keys into splits do so at multiples of 128 to 2048 keys, and treat up to 16 and up to 64
 * rows (queries times heads of a group) differently: lengths on both sides of every such edge, in forms on both
 * sides of every such size. */
static void test_decoding_agrees_with_the_reference_on_both_sides_of_every_edge(void **state)
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

/* As random_spec(), but of few rows and many keys. */
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
    for (int n = 0; n < s.sequences; n++) { /* some of them short, so that both kinds meet in one problem */
        s.q_lengths[n] = (int)(rng_chance(&r, 0.3) ? rng_between(&r, 0, 90)
                                                   : rng_between(&r, 1, rows / (s.H / s.Hk) + 1));
        s.k_lengths[n] = (int)(rng_chance(&r, 0.6) ? rng_between(&r, 0, 300) : rng_between(&r, 300, 1500));
    }
    s.page_size = 0;
    if (rng_chance(&r, 0.3)) give_pages(&s, pick(&r, page_sizes, ARRAY_SIZE(page_sizes)));
    return s;
}

static void test_random_decoding_agrees_with_the_reference(void **state)
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

/* ---- Properties -------------------------------------------------------------------------------------------------- */

#define assert_outputs_equal(a, b)                     \
    do {                                               \
        char why_[400];                                \
        if (!outputs_equal(a, b, why_, sizeof why_)) { \
            spec_print(stderr, &(a)->spec);            \
            fail_msg("%s", why_);                      \
        }                                              \
    } while (0)

/* Sixteen different problems in one call give the bits that each gives alone, in any order. */
static void test_a_problem_has_the_same_bits_alone_and_among_others(void **state)
{
    enum { COUNT = 16 };
    struct fixture alone[COUNT], together[COUNT], *list[COUNT];
    (void)state;
    for (int n = 0; n < COUNT; n++) {
        const struct spec s = random_spec(9000 + (uint64_t)n);
        fixture_make(&alone[n], &s);
        fixture_copy(&together[n], &alone[n]);
        fixture_run(&bench, &alone[n]);
        list[COUNT - 1 - n] = &together[n];
    }
    fixtures_must_run(&bench, list, COUNT);
    for (int n = 0; n < COUNT; n++) assert_outputs_equal(&alone[n], &together[n]);
    for (int n = 0; n < COUNT; n++) fixture_clear(&alone[n]), fixture_clear(&together[n]);
}

/* The same of decoding, whose next call begins to read before the last one has ended. */
static void test_decoding_has_the_same_bits_alone_and_behind_other_decoding(void **state)
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

/* ATTN_CUDA_FAMILY, of which both operations have a row: it is taken for both. */
static void test_a_family_that_is_asked_for_computes_both_ways(void **state)
{
    static const char *const families[] = { "generic", "simple" };
    static const struct spec cases[] = {
        SPEC(SIZES(128, 256, 128), BF16),
        SPEC(BACK, SIZES(128, 256, 128), BF16),
        SPEC(BACK, SIZES(128, 256, 256), BF16),
    };
    (void)state;
    if (strcmp(bench.info.backend, "cuda") != 0 || getenv("ATTN_CUDA_FAMILY")) return;
    for (size_t n = 0; n < ARRAY_SIZE(families); n++) {
        struct bench other;
        setenv("ATTN_CUDA_FAMILY", families[n], 1);
        bench_open(&other, backend, 0);
        unsetenv("ATTN_CUDA_FAMILY");
        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
            struct fixture f;
            attn_error err;
            attn_plan plan;
            fixture_make(&f, &cases[i]);
            assert_int_equal(attn_plan_make(other.device, &f.p, &plan, &err), ATTN_OK);
            assert_string_equal(plan.kernel->name, families[n]);
            fixture_clear(&f);
        }
        bench_close(&other);
    }
}

static void test_the_number_of_threads_does_not_change_a_bit(void **state)
{
    static const int threads[] = { 1, 2, 3 };
    static const struct spec large[] = {
        SPEC(SIZES(1, 5000, 64), HEADS(2, 1), BF16), /* split over keys */
        SPEC(SIZES(400, 700, 64), HEADS(2, 1), .causal = true),
        SPEC(BACK, SIZES(300, 500, 64), HEADS(4, 1), .causal = true, BF16, .sinks = 1, .bias = 1, .alibi = 1),
    };
    (void)state;
    if (is_brief() && strcmp(backend, "cuda") == 0) skip(); /* it has no such number: repeats, which others test */
    for (int n = 0; n < 24; n++) {
        struct fixture first = { 0 };
        for (size_t t = 0; t < ARRAY_SIZE(threads); t++) {
            const struct spec s = n < (int)ARRAY_SIZE(large) ? large[n] : random_spec(7000 + (uint64_t)n);
            struct bench other;
            struct fixture f;
            bench_open(&other, backend, threads[t]);
            fixture_make(&f, &s);
            fixture_run(&other, &f);
            bench_close(&other);
            if (t == 0) first = f;
            else {
                assert_outputs_equal(&first, &f);
                fixture_clear(&f);
            }
        }
        fixture_clear(&first);
    }
}

/* Gradients whose sums of dq are added to by several blocks, in their turns or in any order, and the same bits each
 * time where in their turns. */
static void test_gradients_of_several_tiles_agree_with_the_reference(void **state)
{
    /* clang-format off: a row is a line */
    static const struct spec cases[] = {
        SPEC(.name = "causal", SIZES(390, 390, 64), HEADS(2, 1), .causal = true),
        SPEC(.name = "causal, more keys", SIZES(130, 400, 128), HEADS(2, 1), .causal = true),
        SPEC(.name = "causal, more queries", SIZES(300, 200, 128), .causal = true),
        SPEC(.name = "causal, top left", SIZES(200, 390, 64), .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "no mask", .B = 2, SIZES(200, 400, 128), HEADS(2, 1)),
        SPEC(.name = "window on both sides", SIZES(200, 400, 64), WINDOW(70, 30)),
        SPEC(.name = "window of the past", SIZES(300, 300, 128), WINDOW(100, 0)),
        SPEC(.name = "window on the left alone", SIZES(200, 390, 64), WINDOW(90, 1000)),
        SPEC(.name = "window on the right alone", SIZES(390, 200, 64), WINDOW(1000, 60)),
        SPEC(.name = "packed", .sequences = 5, .q_lengths = { 300, 0, 129, 64, 20 },
             .k_lengths = { 260, 40, 300, 64, 0 }, .D = 64, .Dv = 64, .causal = true),
        SPEC(.name = "lengths", .B = 3, SIZES(140, 400, 64), HEADS(4, 2), .seqlens_k = true, .causal = true,
             .poison_unseen = true),
        SPEC(.name = "documents", .B = 2, SIZES(390, 390, 128), HEADS(4, 2), .mask_bounds = 2, .mask_heads = 2,
             .mask_kind = MASK_DOCUMENT),
        SPEC(.name = "documents, causal", SIZES(390, 390, 64), HEADS(4, 2), .causal = true, .mask_bounds = 1,
             .mask_kind = MASK_DOCUMENT),
        SPEC(.name = "two intervals", SIZES(200, 390, 64), HEADS(2, 1), .mask_bounds = 4, .mask_kind = MASK_WINDOW),
        SPEC(.name = "intervals at random, lengths", .B = 3, SIZES(270, 300, 128), HEADS(4, 2), .mask_bounds = 4,
             .mask_heads = 2, .seqlens_k = true),
        SPEC(.name = "all hidden", SIZES(200, 300, 64), .mask_bounds = 4, .mask_kind = MASK_ALL),
        SPEC(.name = "two intervals that hide everything", SIZES(200, 300, 128), .mask_bounds = 4,
             .mask_kind = MASK_UNION),
        SPEC(.name = "softcap", SIZES(270, 300, 64), HEADS(4, 2), .softcap = 10, .q_amp = 3, .causal = true),
        SPEC(.name = "softcap, D 128", SIZES(270, 300, 128), .softcap = 30, .q_amp = 3),
        SPEC(.name = "softcap, a window, D 128", SIZES(400, 420, 128), HEADS(4, 2), .softcap = 30, WINDOW(130, 0)),
        SPEC(.name = "a window, grouped heads, D 128", SIZES(400, 420, 128), HEADS(4, 2), WINDOW(130, 0)),
        SPEC(.name = "ALiBi", .B = 2, SIZES(270, 300, 128), HEADS(4, 2), .alibi = 2, .causal = true),
        SPEC(.name = "softcap, ALiBi, packed", .sequences = 3, .q_lengths = { 300, 70, 129 },
             .k_lengths = { 260, 140, 300 }, HEADS(4, 2), .D = 96, .Dv = 96, .softcap = 10, .alibi = 1, .sinks = 1,
             WINDOW(150, 20)),
        SPEC(.name = "ALiBi and documents", SIZES(300, 300, 64), .alibi = 1, .mask_bounds = 1, .causal = true,
             .mask_kind = MASK_DOCUMENT, .dlse = true),
        SPEC(.name = "wide", .B = 2, SIZES(330, 200, 256), HEADS(2, 1)),
        SPEC(.name = "wide, causal", SIZES(390, 390, 256), HEADS(4, 2), .causal = true, .dlse = true, .sinks = 1),
        SPEC(.name = "wide, causal, more keys", SIZES(130, 400, 192), HEADS(3, 1), .causal = true),
        SPEC(.name = "wide, causal, more queries", SIZES(400, 150, 256), .causal = true),
        SPEC(.name = "wide, top left", SIZES(200, 390, 200), .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "wide, window on both sides", SIZES(300, 400, 256), HEADS(2, 1), WINDOW(70, 30)),
        SPEC(.name = "wide, narrower values", .B = 2, .Sq = 300, .Sk = 270, .D = 192, .Dv = 128, .causal = true),
        SPEC(.name = "wide, values of 40 channels", .Sq = 140, .Sk = 200, .D = 136, .Dv = 40),
        SPEC(.name = "wide, narrower keys", .Sq = 200, .Sk = 140, .D = 64, .Dv = 256),
        SPEC(.name = "wide, a key", SIZES(200, 1, 256), HEADS(2, 1)),
        SPEC(.name = "wide, packed", .sequences = 6, .q_lengths = { 300, 0, 129, 64, 20, 1 },
             .k_lengths = { 260, 40, 300, 64, 0, 65 }, HEADS(4, 2), .D = 256, .Dv = 256, .causal = true),
        SPEC(.name = "wide, packed, values narrower", .sequences = 4, .q_lengths = { 100, 200, 0, 64 },
             .k_lengths = { 130, 70, 9, 128 }, .D = 192, .Dv = 128, WINDOW(90, 20), .poison_unseen = true),
        SPEC(.name = "wide, parts of the heads", .B = 4, SIZES(70, 600, 256), HEADS(4, 4), WINDOW(300, 0)),
        SPEC(.name = "wide, lengths", .B = 4, SIZES(140, 300, 256), HEADS(4, 2), .seqlens_k = true, .causal = true,
             .poison_unseen = true),
    };
    /* clang-format on */
    int failed = 0;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        for (int any_order = 0; any_order < 1 + (n % 3 == 0); any_order++) {
            struct spec s = cases[n];
            struct fixture first, again;
            s.op = ATTN_OP_BACKWARD;
            s.dtype = s.out_dtype = n % 2 ? ATTN_F16 : ATTN_BF16;
            s.any_order = any_order;
            if (!is_ours()) continue;
            if (!spec_agrees(&bench, &s)) failed++;
            if (any_order) continue;
            fixture_make(&first, &s);
            fixture_make(&again, &s);
            fixture_run(&bench, &first);
            fixture_run(&bench, &again);
            assert_outputs_equal(&first, &again);
            fixture_clear(&first), fixture_clear(&again);
        }
    assert_int_equal(failed, 0);
}

static void test_repeats_give_the_same_bits(void **state)
{
    (void)state;
    for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
        const struct spec s = SPEC(.op = op, SIZES(130, 260, 64), HEADS(4, 2), BF16, .causal = true, .sinks = 1);
        struct fixture first, f;
        fixture_make(&first, &s);
        fixture_run(&bench, &first);
        for (int n = 0; n < 50; n++) {
            fixture_make(&f, &s);
            fixture_run(&bench, &f);
            assert_outputs_equal(&first, &f);
            fixture_clear(&f);
        }
        fixture_clear(&first);
    }
}

/* Element n of batch row b of `whole` against problem `part`, for tensors whose first axis is the batch or the
 * packed rows.
 * */
static void assert_part_equal(const struct fixture *whole, const struct fixture *part, attn_tensor_id id, int64_t first)
{
    const attn_tensor *w = &whole->p.tensor[id], *p = &part->p.tensor[id];
    for (int64_t n = tensor_elements(p), e = 0; e < n; e++) {
        const double a = tensor_get(w, first + e), b = tensor_get(p, e);
        if (!(a == b || (isnan(a) && isnan(b)))) {
            spec_print(stderr, &whole->spec);
            fail_msg("%s: element %lld is %.9g in the batch and %.9g alone", attn_tensors[id].name,
                     (long long)(first + e), a, b);
        }
    }
}

/* Copies rows of q k v dout from `whole` at element `first` into `part`. */
static void copy_part(const struct fixture *whole, struct fixture *part, attn_tensor_id id, int64_t first)
{
    for (int64_t n = tensor_elements(&part->p.tensor[id]), e = 0; e < n; e++)
        tensor_set(&part->p.tensor[id], e, tensor_get(&whole->p.tensor[id], first + e));
}

/* What a server does when it packs the problems of several clients into one: each must get the bits of its own
 * problem. */
static void test_a_packed_sequence_has_the_bits_of_the_problem_alone(void **state)
{
    static const struct spec packs[] = {
        SPEC(.sequences = 5, .q_lengths = { 70, 1, 128, 33, 5 }, .k_lengths = { 90, 500, 128, 33, 64 }, HEADS(4, 2),
             .causal = true, BF16, .sinks = 1),
        SPEC(.sequences = 3, .q_lengths = { 1, 1, 1 }, .k_lengths = { 2500, 17, 640 }, HEADS(8, 2), F16),
        SPEC(.sequences = 3, .q_lengths = { 64, 64, 64 }, .k_lengths = { 64, 64, 64 }, HEADS(4, 4), .causal = true,
             F16),
        SPEC(.sequences = 9, .q_lengths = { 1, 4, 70, 1, 0, 16, 5, 1, 17 },
             .k_lengths = { 2100, 129, 90, 1, 77, 1300, 0, 128, 600 }, HEADS(8, 2), .D = 128, .Dv = 128, BF16,
             .causal = true, .sinks = 1),
        SPEC(.sequences = 5, .q_lengths = { 1, 3, 90, 2, 1 }, .k_lengths = { 1000, 640, 90, 2050, 1 }, HEADS(6, 2), F16,
             .softcap = 20, .alibi = 1),
        SPEC(BACK, .sequences = 4, .q_lengths = { 70, 1, 128, 33 }, .k_lengths = { 90, 300, 128, 33 }, HEADS(4, 2),
             .causal = true, BF16, .sinks = 1),
        SPEC(BACK, .sequences = 3, .q_lengths = { 40, 65, 7 }, .k_lengths = { 40, 65, 100 }, .softcap = 9,
             WINDOW(20, 20)),
        SPEC(BACK, .sequences = 3, .q_lengths = { 150, 65, 7 }, .k_lengths = { 170, 65, 100 }, HEADS(4, 2),
             .causal = true, .D = 256, .Dv = 256, BF16),
        SPEC(.sequences = 3, .q_lengths = { 150, 70, 128 }, .k_lengths = { 300, 65, 128 }, .gaps = 90, HEADS(4, 2),
             .causal = true, BF16, .sinks = 1),
        SPEC(BACK, .sequences = 3, .q_lengths = { 150, 65, 7 }, .k_lengths = { 170, 65, 100 }, .gaps = 90, HEADS(4, 2),
             .causal = true, .D = 128, .Dv = 128, F16),
        SPEC(BACK, .sequences = 3, .q_lengths = { 150, 65, 7 }, .k_lengths = { 170, 65, 100 }, .key_rows = true,
             HEADS(4, 2)),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(packs); n++) {
        struct fixture whole;
        fixture_make(&whole, &packs[n]);
        fixture_run(&bench, &whole);
        const attn_geometry g = attn_geometry_of(&whole.p);
        for (int b = 0; b < packs[n].sequences; b++) {
            const int64_t q_rows = attn_sequence_of(&g, b).q_start, k_rows = attn_sequence_of(&g, b).k_start;
            struct spec s = packs[n];
            struct fixture part;
            s.sequences = s.gaps = 0;
            s.key_rows = false;
            s.B = 1, s.Sq = packs[n].q_lengths[b], s.Sk = packs[n].k_lengths[b];
            fixture_make(&part, &s);
            copy_part(&whole, &part, ATTN_T_q, q_rows * s.H * s.D);
            copy_part(&whole, &part, ATTN_T_k, k_rows * s.Hk * s.D);
            copy_part(&whole, &part, ATTN_T_v, k_rows * s.Hk * s.Dv);
            if (s.sinks) copy_part(&whole, &part, ATTN_T_sinks, 0);
            if (s.alibi) copy_part(&whole, &part, ATTN_T_alibi_slopes, 0);
            if (s.op == ATTN_OP_BACKWARD) copy_part(&whole, &part, ATTN_T_dout, q_rows * s.H * s.Dv);
            fixture_run(&bench, &part);
            if (s.op == ATTN_OP_FORWARD) {
                assert_part_equal(&whole, &part, ATTN_T_out, q_rows * s.H * s.Dv);
                for (int64_t h = 0; h < s.H; h++)
                    for (int64_t i = 0; i < s.Sq; i++)
                        assert_true(tensor_get(&whole.p.lse, h * whole.spec.Sq + q_rows + i) ==
                                    tensor_get(&part.p.lse, h * s.Sq + i));
            } else {
                assert_part_equal(&whole, &part, ATTN_T_dq, q_rows * s.H * s.D);
                assert_part_equal(&whole, &part, ATTN_T_dk, k_rows * s.Hk * s.D);
                assert_part_equal(&whole, &part, ATTN_T_dv, k_rows * s.Hk * s.Dv);
            }
            fixture_clear(&part);
        }
        fixture_clear(&whole);
    }
}

/* The same for rows of a batch. */
static void test_a_batch_row_has_the_bits_of_the_problem_alone(void **state)
{
    static const struct spec batches[] = {
        SPEC(.B = 3, SIZES(50, 90, 64), HEADS(4, 2), .causal = true, BF16),
        SPEC(.B = 3, SIZES(1, 3000, 64), HEADS(4, 1)),
        SPEC(.B = 24, SIZES(1, 2048, 64), HEADS(4, 2), BF16),
        SPEC(.B = 3, SIZES(2, 3000, 128), HEADS(8, 2), BF16, .causal = true),
        SPEC(.B = 3, SIZES(16, 1300, 64), HEADS(8, 2), F16, WINDOW(500, 0)),
        SPEC(BACK, .B = 3, SIZES(50, 90, 64), HEADS(4, 2), .causal = true, F16),
        SPEC(BACK, .B = 3, SIZES(150, 90, 192), HEADS(4, 2), .causal = true, F16),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(batches); n++) {
        struct fixture whole;
        fixture_make(&whole, &batches[n]);
        fixture_run(&bench, &whole);
        for (int64_t b = 0; b < batches[n].B; b++) {
            struct spec s = batches[n];
            struct fixture part;
            s.B = 1;
            fixture_make(&part, &s);
            for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
                if (part.p.tensor[id].rank && !is_output(&part.p, (attn_tensor_id)id))
                    copy_part(&whole, &part, (attn_tensor_id)id, b * tensor_elements(&part.p.tensor[id]));
            fixture_run(&bench, &part);
            for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
                if (is_output(&part.p, (attn_tensor_id)id))
                    assert_part_equal(&whole, &part, (attn_tensor_id)id, b * tensor_elements(&part.p.tensor[id]));
            fixture_clear(&part);
        }
        fixture_clear(&whole);
    }
}

/* Are these two problems computed by the same kernel? */
static bool same_kernel(const struct fixture *a, const struct fixture *b)
{
    attn_plan first, second;
    attn_error err;
    assert_int_equal(attn_plan_make(bench.device, &a->p, &first, &err), ATTN_OK);
    assert_int_equal(attn_plan_make(bench.device, &b->p, &second, &err), ATTN_OK);
    return first.kernel == second.kernel;
}

/* Keys and values in pages give the bits of the same keys and values side by side, where the kernel is the same: always
 * on the CPU. */
static void test_pages_do_not_change_a_bit(void **state)
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

/* The emulator's, see tests/emulator/sm90.h; there are none elsewhere. */
__attribute__((weak)) unsigned long emu_tma_loads(void);
__attribute__((weak)) void emu_refuse_maps(int refuse);

/* Runs it; of the emulator, returns the number of boxes that the copy engine loaded. */
static unsigned long boxes_of(struct bench *b, struct fixture *f)
{
    const unsigned long before = emu_tma_loads ? emu_tma_loads() : 0;
    fixture_run(b, f);
    return (emu_tma_loads ? emu_tma_loads() : 0) - before;
}

/* Decoding has its keys brought by the copy engine or by threads: the same bits. `by_engine`: it can, on Hopper. */
static void test_decoding_has_the_same_bits_by_the_copy_engine_and_by_threads(void **state)
{
    /* clang-format off: a row is a line */
    static const struct {
        bool by_engine;
        struct spec spec;
    } cases[] = {
        { true, SPEC(.name = "pages of 64", .B = 4, SIZES(1, 1984, 128), PAGES(64), HEADS(8, 2), BF16) },
        { true, SPEC(.name = "pages of 8", .B = 3, SIZES(1, 1000, 128), PAGES(8), HEADS(8, 2), BF16) },
        { true, SPEC(.name = "pages of 24", .B = 3, SIZES(3, 1200, 96), PAGES(24), HEADS(4, 2), F16, .causal = true) },
        { true,
          SPEC(.name = "pages of 16, D 256", .B = 2, SIZES(1, 1200, 256), PAGES(16), HEADS(4, 2), BF16, .sinks = 1) },
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
        if (emu_refuse_maps && !s->sequences) { /* packed, another kernel runs too, which has no other way */
            emu_refuse_maps(1);
            assert_int_equal(boxes_of(&bench, &refused), 0);
            emu_refuse_maps(0);
            assert_outputs_equal(&refused, &threads);
        }
        fixture_clear(&engine), fixture_clear(&threads), fixture_clear(&refused);
    }
    bench_close(&by_threads);
}

/* Queries of bfloat16, which may become float16 beside keys in float8: a unit of any size, which the scale takes back;
 * and a channel whose keys are all zeros, with queries so large that the others are nothing beside it in float16. */
static void test_queries_of_any_size_meet_float8_keys(void **state)
{
    static const struct {
        int unit; /* of queries, a power of two */
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

/* A row of a batch as a problem of its own, with a wider page table. */
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

/* What a row of a batch comes to does not depend on the other rows, on how many there are, or on how many pages the
 * table has room for. */
static void test_a_row_in_pages_has_the_bits_that_it_has_alone(void **state)
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

/* Latent attention keeps one row for a token, of which all is the key and the first columns are the value: v may be the
 * memory of k. */
static void test_values_may_be_the_first_columns_of_keys(void **state)
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
        if (!bench.info.unified) { /* two copies there, of the same memory here */
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

/* The same where a kernel of its own may compute it: rows of queries on both sides of its tiles, lengths on both sides
 * of its tiles and splits, one split and several, in pages and not. */
static void test_latent_attention_agrees_with_the_reference(void **state)
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
    int failed = 0;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        if (!agrees(&cases[n])) failed++;
    assert_int_equal(failed, 0);

    /* Where a kernel is asked for by name: that it is the one. */
    const char *family = getenv("ATTN_CUDA_FAMILY");
    if (family && strcmp(family, "sm90_latent") == 0) {
        struct fixture f;
        attn_error err;
        attn_plan plan;
        fixture_make(&f, &cases[0]);
        f.p.v.data = f.p.k.data;
        assert_int_equal(attn_plan_make(bench.device, &f.p, &plan, &err), ATTN_OK);
        fixture_clear(&f);
        assert_string_equal(plan.kernel->name, family);
    }
}

/* Many rows of a batch or one, which a kernel may hand out to blocks in other ways, in pages or not: the same bits. */
static void test_latent_attention_has_the_same_bits_in_pages_and_alone(void **state)
{
    static const struct spec cases[] = {
        SPEC(LATENT(4), .B = 4, .Sq = 2, .Sk = 256, PAGES(64), BF16, .causal = true),
        SPEC(LATENT(3), .B = 3, .Sq = 1, .Sk = 1536, PAGES(128), F16),
        SPEC(LATENT(1), .B = 150, .Sq = 1, .Sk = 640, PAGES(64), BF16), /* more blocks than a GPU has places for */
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture whole, side_by_side;
        struct spec plain = cases[n];
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

/* Pages that begin at any slot of a pool, as a server has them that hands out memory by the granule: the stride of the
 * page axis is less than a page. Rows share their first pages. */
static void test_pages_may_overlap_and_be_shared(void **state)
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
                       (double)(n < SHARED ? 7 + 3 * n /* and these two overlap */
                                           : rng_between(&r, 0, pages.p.k.shape[0] - 1)));
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

/* A batch of forks, in pages: row b has some of its first pages, or none, in common with row b - 1.
 * Fills `prefix_keys`. */
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

/* Forks that are said to share a prefix have the bits that they have without a word. */
static void test_a_shared_prefix_does_not_change_a_bit(void **state)
{
    enum { ROWS = 24 };
    static const struct spec batches[] = {
        SPEC(.B = 20, SIZES(1, 960, 128), PAGES(16), HEADS(8, 2), BF16),
        SPEC(.B = 13, SIZES(2, 640, 64), PAGES(32), HEADS(8, 2), F16, .causal = true, .sinks = 1),
        SPEC(.B = ROWS, SIZES(1, 800, 64), PAGES(16), HEADS(1, 1), BF16),
        SPEC(.B = 5, SIZES(1, 2900, 128), PAGES(20), HEADS(16, 1), F16),
        SPEC(.B = 4, SIZES(3, 512, 256), PAGES(64), HEADS(5, 1), BF16, .causal = true),
        SPEC(.B = 7, SIZES(1, 700, 200), PAGES(7), HEADS(6, 2), BF16),
        SPEC(.B = 7, SIZES(1, 1280, 64), PAGES(16), HEADS(4, 2), BF16, WINDOW(600, 0)),
        SPEC(.B = 3, SIZES(6, 640, 64), PAGES(16), HEADS(4, 1), BF16, .causal = true), /* too many rows */
        SPEC(.B = 5, SIZES(1, 640, 64), PAGES(16), HEADS(4, 1), BF16, .softcap = 3),
        SPEC(.B = 5, SIZES(1, 640, 64), PAGES(16), HEADS(4, 1), BF16, .fp8_keys = true),
        SPEC(.B = 5, SIZES(1, 640, 64), PAGES(16), HEADS(4, 1)),
        SPEC(.B = 6, SIZES(70, 640, 64), PAGES(16), HEADS(1, 1), BF16),
    };
    (void)state;
    for (size_t n = 0; n < 2 * ARRAY_SIZE(batches); n++) {
        const struct spec *const s = &batches[n / 2];
        struct rng r = { 77 + n };
        if (!is_ours() || (is_brief() && n % 2 != n / 4 % 2)) continue;
        int32_t prefix_keys[ROWS];
        struct fixture with, without;
        make_forks(&with, s, &r, prefix_keys);
        if (n % 2) { /* a key or a value that most of them see is NaN, and a query of one of them */
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

static void test_the_past_does_not_depend_on_the_future(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    enum { S = 200, SEEN = 77 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(dtypes); n++) {
        const struct spec s = SPEC(.dtype = dtypes[n], .out_dtype = dtypes[n], SIZES(S, S, 64), .causal = true);
        struct fixture a, b;
        const int64_t row = s.Hk * s.D;
        fixture_make(&a, &s);
        fixture_copy(&b, &a);
        for (int64_t e = SEEN * row; e < S * row; e++)
            tensor_set(&b.p.k, e, 3.0), tensor_set(&b.p.v, e, e & 1 ? NAN : 100.0);
        fixture_run(&bench, &a);
        fixture_run(&bench, &b);
        for (int64_t e = 0; e < SEEN * s.H * s.Dv; e++) assert_true(tensor_get(&a.p.out, e) == tensor_get(&b.p.out, e));
        for (int64_t h = 0; h < s.H; h++)
            for (int64_t i = 0; i < SEEN; i++)
                assert_true(tensor_get(&a.p.lse, h * S + i) == tensor_get(&b.p.lse, h * S + i));
        fixture_clear(&a), fixture_clear(&b);
    }
}

/* Keys and values that a query does not see may be finite and as large as numbers are (memory that nobody filled): its
 * answer and its gradient keep their accuracy. Where numbers share a scale, they must not share it with these. */
static void test_hidden_numbers_of_any_size_do_not_matter(void **state)
{
    enum { S = 200, SEEN = 77 };
    (void)state;
    for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
        const struct spec s = SPEC(.op = op, SIZES(S, S, 64), .causal = true);
        const attn_tensor_id id = op == ATTN_OP_FORWARD ? ATTN_T_out : ATTN_T_dq;
        struct fixture a, b;
        const int64_t row = s.Hk * s.D;
        fixture_make(&a, &s);
        fixture_copy(&b, &a);
        for (int64_t e = SEEN * row; e < S * row; e++)
            tensor_set(&b.p.k, e, 1e15 * tensor_get(&a.p.k, e)), tensor_set(&b.p.v, e, 1e15 * tensor_get(&a.p.v, e));
        fixture_run(&bench, &a);
        fixture_run(&bench, &b);
        for (int64_t e = 0; e < SEEN * s.H * s.Dv; e++) {
            const double x = tensor_get(&a.p.tensor[id], e), y = tensor_get(&b.p.tensor[id], e);
            if (!(fabs(x - y) <= 1e-5))
                fail_msg("%s: element %lld is %.9g beside huge ones and %.9g alone", attn_tensors[id].name,
                         (long long)e, y, x);
        }
        fixture_clear(&a), fixture_clear(&b);
    }
}

static void test_a_row_with_one_key_is_that_value_to_the_bit(void **state)
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

/* All 256 codes of float8: as a value that is the whole answer, and as a key's only channel, whose score is lse. */
static void test_every_float8_is_its_number(void **state)
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

/* NaN that some rows see reaches these rows and no other. (fixture_compare() wants NaN exactly where the reference
 * has it.)
 * */
static void test_nan_reaches_exactly_the_rows_that_see_it(void **state)
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
        SPEC(.B = 24, SIZES(1, 2000, 128), .poison = 2, HEADS(4, 2), BF16),
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
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) failed += !agrees(&cases[n]);
    assert_int_equal(failed, 0);
}

/* Backward too: what a query may not see cannot change its gradient, nor can the query change the key's. */
static void test_nan_reaches_exactly_the_gradients_that_see_it(void **state)
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

static void test_no_dout_gives_gradients_of_exactly_zero(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(dtypes); n++) {
        const struct spec s = SPEC(BACK, .dtype = dtypes[n], .out_dtype = dtypes[n], SIZES(100, 130, 64),
                                   .no_dout = true, .sinks = 1, .bias = 8, .alibi = 1);
        struct fixture f;
        fixture_make(&f, &s);
        fixture_run(&bench, &f);
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
            if (is_output(&f.p, (attn_tensor_id)id))
                for (int64_t e = 0; e < tensor_elements(&f.p.tensor[id]); e++)
                    assert_true(tensor_get(&f.p.tensor[id], e) == 0);
        fixture_clear(&f);
    }
}

static void test_the_order_of_keys_does_not_matter(void **state)
{
    const struct spec s = SPEC(SIZES(90, 211, 64), HEADS(2, 2));
    const int64_t row = s.Hk * s.D;
    struct fixture a, b;
    (void)state;
    fixture_make(&a, &s);
    fixture_copy(&b, &a);
    for (int64_t j = 0; j < s.Sk; j++)
        for (int64_t e = 0; e < row; e++) {
            const int64_t from = j * 100 % s.Sk; /* 100 and 211 have no common divisor */
            tensor_set(&b.p.k, j * row + e, tensor_get(&a.p.k, from * row + e));
            tensor_set(&b.p.v, j * row + e, tensor_get(&a.p.v, from * row + e));
        }
    fixture_run(&bench, &a);
    fixture_run(&bench, &b);
    for (int64_t e = 0; e < tensor_elements(&a.p.out); e++)
        assert_true(fabs(tensor_get(&a.p.out, e) - tensor_get(&b.p.out, e)) < 2e-6);
    for (int64_t e = 0; e < tensor_elements(&a.p.lse); e++)
        assert_true(fabs(tensor_get(&a.p.lse, e) - tensor_get(&b.p.lse, e)) < 4e-6);
    fixture_clear(&a), fixture_clear(&b);
}

static void test_a_shifted_bias_shifts_lse_and_nothing_else(void **state)
{
    const struct spec s = SPEC(SIZES(90, 130, 64), .bias = 8, .causal = true);
    struct fixture a, b;
    (void)state;
    fixture_make(&a, &s);
    fixture_copy(&b, &a);
    for (int64_t e = 0; e < tensor_elements(&b.p.bias); e++) tensor_set(&b.p.bias, e, tensor_get(&a.p.bias, e) + 3);
    fixture_run(&bench, &a);
    fixture_run(&bench, &b);
    for (int64_t e = 0; e < tensor_elements(&a.p.out); e++)
        assert_true(fabs(tensor_get(&a.p.out, e) - tensor_get(&b.p.out, e)) < 5e-6);
    for (int64_t e = 0; e < tensor_elements(&a.p.lse); e++)
        assert_true(fabs(tensor_get(&a.p.lse, e) + 3 - tensor_get(&b.p.lse, e)) < 5e-6);
    fixture_clear(&a), fixture_clear(&b);
}

static void test_attention_is_linear_in_v(void **state)
{
    const struct spec s = SPEC(SIZES(90, 130, 64), .causal = true, .sinks = 1);
    struct fixture a, b;
    (void)state;
    fixture_make(&a, &s);
    fixture_copy(&b, &a);
    for (int64_t e = 0; e < tensor_elements(&b.p.v); e++)
        tensor_set(&b.p.v, e, -4 * tensor_get(&a.p.v, e)); /* exact in float */
    fixture_run(&bench, &a);
    fixture_run(&bench, &b);
    for (int64_t e = 0; e < tensor_elements(&a.p.out); e++)
        assert_true(tensor_get(&b.p.out, e) == -4 * tensor_get(&a.p.out, e));
    fixture_clear(&a), fixture_clear(&b);
}

/* Rows more than 2^31 elements apart, in memory that is mostly not there. Unified memory only: the next test is for the
 * others. */
static void test_offsets_past_two_billion_elements(void **state)
{
    enum { S = 20 };
    const int64_t far = INT64_C(1) << 28; /* elements between rows: the last starts at 19 * 2^28 > 2^32 */
    const struct spec s = SPEC(SIZES(S, S, 64), HEADS(1, 1), BF16, .causal = true);
    const size_t bytes = (size_t)far * S * 2;
    struct fixture near, wide;
    void *map[3];
    (void)state;
    if (!bench.info.unified) skip();
    fixture_make(&near, &s);
    fixture_copy(&wide, &near);
    for (int n = 0; n < 3; n++) {
        attn_tensor *t = &wide.p.tensor[ATTN_T_q + n], old = *t;
        map[n] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map[n] == MAP_FAILED) skip();
        t->data = map[n];
        t->stride[1] = far;
        for (int64_t e = 0; e < tensor_elements(t); e++) tensor_set(t, e, tensor_get(&old, e));
        free(wide.block[ATTN_T_q + n]);
        wide.block[ATTN_T_q + n] = NULL;
    }
    assert_int_equal(attn_check(&wide.p, NULL), ATTN_OK);
    fixture_run(&bench, &near);
    fixture_run(&bench, &wide);
    assert_outputs_equal(&near, &wide);
    for (int n = 0; n < 3; n++) munmap(map[n], bytes);
    fixture_clear(&near), fixture_clear(&wide);
}

/* The same problem with its rows `far` elements apart, all tensors side by side in one block of device memory, has
 * the same bits. False where the device has not so much memory. */
static bool same_bits_far_apart(const struct spec *s, int64_t far)
{
    enum { SLOT = 256 }; /* elements between the tensors' beginnings */
    struct fixture near, wide;
    void *small[ATTN_TENSOR_COUNT] = { 0 }, *block = NULL;
    const int64_t rows = s->Sq;
    attn_error err = { 0 };
    fixture_make(&near, s);
    near.p.deterministic = true;
    fixture_copy(&wide, &near);
    fixture_run(&bench, &near);
    attn_problem p = wide.p;
    const size_t size = attn_dtype_bytes(p.q.dtype);
    const bool room = attn_device_alloc(bench.device, (size_t)(rows * far + ATTN_TENSOR_COUNT * SLOT) * size, &block,
                                        &err) == ATTN_OK;
    for (int id = 0, slot = 0; id < ATTN_TENSOR_COUNT && room; id++) {
        attn_tensor *t = &p.tensor[id];
        if (t->rank == 0) continue;
        if (t->rank != 4) {
            assert_int_equal(attn_device_alloc(bench.device, wide.block_bytes[id], &small[id], &err), ATTN_OK);
            assert_int_equal(
                attn_copy(bench.stream, small[id], wide.block[id], wide.block_bytes[id], ATTN_TO_DEVICE, &err),
                ATTN_OK);
            t->data = (uint8_t *)small[id] + ((uint8_t *)t->data - wide.block[id]);
            continue;
        }
        assert_int_equal(attn_dtype_bytes(t->dtype), size);
        t->stride[1] = far;
        t->data = (uint8_t *)block + (size_t)(slot++ * SLOT) * size;
        for (int64_t i = 0; i < rows; i++)
            assert_int_equal(
                attn_copy(bench.stream, (uint8_t *)t->data + (size_t)(i * far) * size,
                          (uint8_t *)wide.p.tensor[id].data + (size_t)(i * wide.p.tensor[id].stride[1]) * size,
                          (size_t)t->shape[3] * size, ATTN_TO_DEVICE, &err),
                ATTN_OK);
    }
    if (room) {
        assert_int_equal(attn_check(&p, &err), ATTN_OK);
        assert_int_equal((p.op == ATTN_OP_FORWARD ? attn_forward : attn_backward)(bench.stream, &p, NULL, &err),
                         ATTN_OK);
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            const attn_tensor *t = &p.tensor[id];
            if (!is_output(&p, (attn_tensor_id)id)) continue;
            if (small[id]) {
                assert_int_equal(
                    attn_copy(bench.stream, wide.block[id], small[id], wide.block_bytes[id], ATTN_FROM_DEVICE, &err),
                    ATTN_OK);
                continue;
            }
            for (int64_t i = 0; i < rows; i++)
                assert_int_equal(
                    attn_copy(bench.stream,
                              (uint8_t *)wide.p.tensor[id].data + (size_t)(i * wide.p.tensor[id].stride[1]) * size,
                              (uint8_t *)t->data + (size_t)(i * far) * size, (size_t)t->shape[3] * size,
                              ATTN_FROM_DEVICE, &err),
                    ATTN_OK);
        }
        assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
        assert_outputs_equal(&near, &wide);
    }
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) attn_device_free(bench.device, small[id]);
    attn_device_free(bench.device, block);
    fixture_clear(&near), fixture_clear(&wide);
    return room;
}

/* The last row ends at element 2^31 - 1, begins past it, and begins past 2^32: in every family of kernels. */
static void test_offsets_on_both_sides_of_2_31(void **state)
{
    static const struct spec cases[] = {
        SPEC(SIZES(80, 80, 64), HEADS(1, 1), BF16, .causal = true),
        SPEC(SIZES(80, 80, 64), HEADS(1, 1), BF16, .softcap = 5),
        SPEC(SIZES(20, 20, 64), HEADS(1, 1), BF16, .causal = true), /* decoding, on a GPU */
        SPEC(SIZES(80, 80, 64), HEADS(1, 1), .causal = true),
        SPEC(BACK, SIZES(80, 80, 64), HEADS(1, 1), BF16, .causal = true),
        SPEC(BACK, SIZES(80, 80, 64), HEADS(1, 1), .causal = true),
    };
    (void)state;
    if (bench.info.unified) skip(); /* the test above */
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        const int64_t gaps = cases[n].Sq - 1, unit = 64; /* elements: TMA wants rows at multiples of 16 bytes */
        const int64_t below = ((INT64_C(1) << 31) - 64) / gaps / unit * unit;
        if (!same_bits_far_apart(&cases[n], below) || !same_bits_far_apart(&cases[n], below + unit) ||
            !same_bits_far_apart(&cases[n], 2 * below + 2 * unit))
            skip(); /* not so much memory */
    }
}

static void test_outputs_that_nobody_wants_are_not_needed(void **state)
{
    static const struct spec cases[] = {
        SPEC(.causal = true, BF16, .sinks = 1, .bias = 8, .alibi = 1),
        SPEC(BACK, .causal = true, BF16, .sinks = 1, .bias = 8, .alibi = 1),
        SPEC(BACK, .causal = true, BF16, SIZES(150, 140, 256)),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        for (int wanted = -1; wanted < ATTN_TENSOR_COUNT; wanted++) { /* one output alone, or none */
            struct fixture all, one;
            fixture_make(&all, &cases[n]);
            if (wanted >= 0 && !is_output(&all.p, (attn_tensor_id)wanted)) {
                fixture_clear(&all);
                continue;
            }
            fixture_copy(&one, &all);
            for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
                if (id != wanted && is_output(&one.p, (attn_tensor_id)id)) one.p.tensor[id].rank = 0;
            fixture_run(&bench, &all);
            fixture_run(&bench, &one);
            assert_outputs_equal(&one, &all);
            fixture_clear(&all), fixture_clear(&one);
        }
}

/* ---- Scores beyond float32, rows of masks, one order of sums ------------------------------------------------------ */

/* clang-format off: a row is a line */

/* q.k leaves float32, in a partial sum or at the end, and scale q.k does not. */
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

static void test_products_beyond_float32_count_where_their_scores_are_ordinary(void **state)
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

/* Latent attention's head sizes, which have kernels of their own. */
static void test_products_beyond_float32_count_in_latent_attention(void **state)
{
    const struct spec s = SPEC(.name = "products of 1e39, latent", MLA, .latent = true, BF16, .Sq = 1, .Sk = 200,
                               .q_amp = 1e19, .has_scale = true, .scale = 1.2e-38);
    (void)state;
    assert_true(spec_agrees(&bench, &s));
}

/* All of a row's products are so negative that they leave float32. The row still sees its keys, all with one score. */
static void test_a_row_whose_products_all_leave_float32_sees_its_keys(void **state)
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

/* The first half of a dot product leaves float32 and the second half brings it back to 0. */
static void test_lse_alone_is_the_lse_beside_out(void **state)
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

/* A mask as libraries make it: `hidden` for keys of padding, and for every key of a query of padding. */
static void pad_left(struct fixture *f, double hidden)
{
    const int64_t Sq = f->spec.Sq, Sk = f->spec.Sk;
    for (int64_t i = 0; i < Sq; i++)
        for (int64_t j = 0; j < Sk; j++)
            tensor_set(&f->p.bias, i * Sk + j, i < Sq / 3 || j < Sk / 3 || j > i + Sk - Sq ? hidden : 0);
}

static void test_rows_that_a_mask_fills_with_one_huge_number_agree_with_the_reference(void **state)
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

/* Products of 1e4 and more that add up to a score of some units: the last channel of each key sees to that. */
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

/* Is the problem computed row by row, with sums in an order that no other kernel has? */
static bool is_by_rows(const attn_problem *p, attn_op op)
{
    attn_problem one_way = *p;
    attn_plan plan;
    attn_error err = { 0 };
    one_way.op = op;
    assert_int_equal(attn_plan_make(bench.device, &one_way, &plan, &err), ATTN_OK);
    return strcmp(plan.kernel->name, "simple") == 0;
}

/* A query that sees one key, whose products cancel: however their sum is rounded, lse and the backward's score are the
 * same sum, so that P is 1 and dv is dout. A float32 lse has an error of its own. */
static void test_one_key_has_a_probability_of_one(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    static const int64_t head_sizes[] = { 4, 64, 80, 128, 192, 256 }, queries[] = { 1, 40 };
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
        if (given && is_by_rows(&f.p, ATTN_OP_FORWARD) != is_by_rows(&f.p, ATTN_OP_BACKWARD)) { /* some GPUs: 8.x */
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

/* The ways in which a row sees one key alone. */
enum one_key { ALONE, WINDOWED, KEPT, BIASED, FLASHMASKED, ONE_KEYS };

static void show_one_key(struct fixture *f, int64_t key)
{
    for (int64_t n = 0; f->p.keep_mask.rank && n < tensor_elements(&f->p.keep_mask); n++)
        tensor_set(&f->p.keep_mask, n, n % f->p.keep_mask.shape[3] == key);
    for (int64_t n = 0; f->p.bias.rank && n < tensor_elements(&f->p.bias); n++)
        tensor_set(&f->p.bias, n, n % f->p.bias.shape[3] == key ? 0.25 : -INFINITY);
    for (int64_t n = 0; f->p.mask_startend_rows.rank && n < tensor_elements(&f->p.mask_startend_rows); n++) {
        const bool seen = n / 2 % f->p.mask_startend_rows.shape[2] == key; /* hidden from lts on, and before ute */
        tensor_set(&f->p.mask_startend_rows, n, n % 2 == 0 && seen ? (double)f->spec.Sq : 0);
    }
}

/* Where dout is 1, dv of a key is the number of the rows that see it alone, to the bit. The problems are computed in
 * tiles, in tiles with a separate kernel for dq, and row by row. */
static void test_one_key_has_p_1_to_the_last_bit(void **state)
{
    static const int64_t head_sizes[] = { 5, 64, 100, 128, 200, 256 };
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
        if (!given || is_by_rows(&f.p, ATTN_OP_FORWARD) == is_by_rows(&f.p, ATTN_OP_BACKWARD)) {
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

/* Work that is queued in steps has the same bits as work that is queued at once. */
static void test_work_in_steps_has_the_bits_of_work_at_once(void **state)
{
    static const struct spec cases[] = {
        SPEC(.D = 300, .Dv = 280, .Sq = 50, .Sk = 100, BF16, .causal = true),
        SPEC(SIZES(130, 120, 64), BF16, .q_amp = 3e5, .causal = true),
        SPEC(SIZES(60, 100, 64), HEADS(4, 2), .q_amp = 3e5),
        SPEC(BACK, SIZES(100, 130, 64), BF16, .q_amp = 3e5, .sinks = 1),
        SPEC(BACK, SIZES(60, 100, 64), HEADS(4, 2), .q_amp = 3e5),
        SPEC(BACK, SIZES(60, 70, 64), .bias = 1, .alibi = 2, .sinks = 1, .B = 2),
        SPEC(BACK, .dtype = ATTN_BF16, SIZES(50, 70, 64), .bias = 2, .alibi = 1, .B = 2),
        SPEC(BACK, SIZES(60, 90, 128), F16, .bias = 5, .bias_levels = 2, .dropout_p = 0.5, .seed = 3, .B = 2),
        SPEC(SIZES(150, 120, 64), BF16, .q_amp = 3e5, .causal = true, .B = 3, .seqlens_q = true),
        SPEC(BACK, .sequences = 3, .q_lengths = { 130, 5, 65 }, .k_lengths = { 150, 100, 60 }, .gaps = 70, BF16,
             .q_amp = 3e5, .alibi = 1),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture at_once, steps, *list[2] = { &steps, &at_once };
        if (!is_ours()) continue;
        fixture_make(&at_once, &cases[n]);
        fixture_copy(&steps, &at_once);
        fixture_run(&bench, &at_once);
        bench.in_steps = true;
        fixture_run(&bench, &steps);
        assert_outputs_equal(&steps, &at_once);
        fixtures_must_run(&bench, list, 2); /* the steps of several problems */
        bench.in_steps = false;
        assert_outputs_equal(&steps, &at_once);
        assert_true(agrees(&cases[n]));
        fixture_clear(&at_once), fixture_clear(&steps);
    }
}

/* Upper bound on the seconds of a problem's tiles on an H100, by the rates of kernels/cuda/simple/simple.h for bfloat16
 * in a Hopper kernel without options. No other kernel has a smaller bound. */
static double least_tile_seconds(const struct spec *s)
{
    const double columns = (double)(s->D < 64 ? 64 : s->D) + (double)(s->Dv < 64 ? 64 : s->Dv);
    double pairs = (double)(s->B * s->H) * (double)s->Sq * (double)s->Sk;
    if (s->sequences) { /* the library, which does not read lengths, gives each the same share of the keys */
        int64_t queries = 0, keys = 0;
        for (int n = 0; n < s->sequences; n++) queries += s->q_lengths[n], keys += s->k_lengths[n];
        pairs = (double)(queries * s->H) * (double)(keys / s->sequences);
    }
    return 2 * pairs * columns / 3e14 * (s->op == ATTN_OP_BACKWARD ? 2.5 : 1) * 132 / bench.info.units;
}

/* One head takes several steps on a device whose steps are very short, and one on an ordinary device. Its bits are the
 * same, because each launch computes a share of the same tiles. */
static void test_one_head_in_steps_has_the_bits_of_one_launch(void **state)
{
    static const struct spec cases[] = {
        SPEC(BF16, HEADS(1, 1), SIZES(420, 150, 64), .causal = true),
        SPEC(BF16, HEADS(1, 1), SIZES(300, 90, 128)),
        SPEC(BF16, HEADS(3, 1), SIZES(260, 110, 128), WINDOW(70, 20), .sinks = 1),
        SPEC(F16, HEADS(1, 1), SIZES(300, 70, 192), .seqlens_k = true, .causal = true),
        SPEC(BF16, HEADS(2, 1), .sequences = 3, .q_lengths = { 230, 7, 150 }, .k_lengths = { 70, 40, 110 }, .D = 64,
             .Dv = 64, .causal = true),
        SPEC(BF16, HEADS(1, 1), SIZES(300, 100, 64), .softcap = 20, .alibi = 1),
        SPEC(BF16, HEADS(1, 1), SIZES(150, 100, 100), .bias = 4, .dropout_p = 0.3, .seed = 5),
        SPEC(BF16, HEADS(1, 1), SIZES(300, 130, 64), .mask_bounds = 2, .causal = true),
        SPEC(FP8, HEADS(1, 1), SIZES(420, 130, 64), .causal = true),
        SPEC(FP8, HEADS(1, 1), SIZES(300, 130, 128), .fp8_scales = true, .softcap = 30, .no_lse = true),
        SPEC(FP8, HEADS(1, 1), SIZES(300, 130, 128), .no_lse = true),
        SPEC(HEADS(1, 1), SIZES(260, 70, 64), .causal = true),
        SPEC(HEADS(2, 1), SIZES(150, 60, 128), .keep_mask = 4, .keep = 0.7),
        SPEC(BF16, HEADS(1, 1), SIZES(260, 40, 64), .q_amp = 3e5),
        SPEC(BACK, BF16, HEADS(1, 1), SIZES(110, 300, 64), .causal = true, .give_forward = true),
        SPEC(BACK, BF16, HEADS(2, 1), SIZES(90, 280, 128), WINDOW(200, 0), .sinks = 1, .dlse = true),
        SPEC(BACK, BF16, HEADS(1, 1), SIZES(70, 280, 128), .softcap = 20, .give_forward = true),
        SPEC(BACK, BF16, HEADS(1, 1), SIZES(130, 130, 64), .alibi = 1, .bias = 1),
        SPEC(BACK, BF16, HEADS(2, 1), .sequences = 2, .q_lengths = { 150, 40 }, .k_lengths = { 50, 130 }, .D = 200,
             .Dv = 200),
        SPEC(BACK, BF16, HEADS(1, 1), .sequences = 3, .q_lengths = { 70, 7, 40 }, .k_lengths = { 200, 40, 150 },
             .D = 96, .Dv = 96, .causal = true),
        SPEC(BACK, HEADS(1, 1), SIZES(130, 150, 64), .causal = true),
        SPEC(BACK, HEADS(2, 1), SIZES(70, 130, 128), .dropout_p = 0.5, .seed = 3, .bias = 1),
        SPEC(BACK, BF16, HEADS(1, 1), SIZES(70, 260, 64), .q_amp = 3e5, .sinks = 1),
        SPEC(BACK, HEADS(1, 1), SIZES(70, 130, 64), .q_amp = 3e5),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture whole, steps;
        struct bench quick;
        char step[32];
        if (!is_ours()) continue;
        fixture_make(&whole, &cases[n]);
        fixture_copy(&steps, &whole);
        snprintf(step, sizeof step, "%.9f", 1e6 * least_tile_seconds(&whole.spec) / 4);
        setenv("ATTN_CUDA_STEP_US", step, 1);
        bench_open(&quick, backend, 0);
        unsetenv("ATTN_CUDA_STEP_US");
        quick.in_steps = true;
        fixture_run(&bench, &whole);
        fixture_run(&quick, &steps);
        assert_outputs_equal(&steps, &whole);
        if (strcmp(backend, "cuda") == 0 && quick.calls < 2) fail_msg("case %zu: one call", n);
        bench_close(&quick);
        fixture_clear(&whole), fixture_clear(&steps);
    }
}

/* ---- Moves ------------------------------------------------------------------------------------------------------- */

/* More than one launch takes, of every length and alignment, one of them long enough for several blocks. */
static void test_moves_copy_and_clear_what_they_say_and_nothing_else(void **state)
{
    (void)state;
    enum { COUNT = 300, LONG = 200000, BYTES = COUNT * 64 + LONG + 64 };
    uint8_t *const from = malloc(BYTES), *const want = malloc(BYTES), *const got = malloc(BYTES);
    static attn_move moves[COUNT + 1];
    void *source, *target;
    attn_error err;
    for (int i = 0; i < BYTES; i++) from[i] = (uint8_t)(i * 7 + i / 251), want[i] = 0xee;
    assert_int_equal(attn_device_alloc(bench.device, BYTES, &source, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(bench.device, BYTES, &target, &err), ATTN_OK);
    for (int i = 0; i <= COUNT; i++) {
        const size_t to = (size_t)i * 64 + (size_t)i % 17, at = (size_t)(COUNT - i) * 64 + (size_t)i % 5;
        const size_t bytes = i == COUNT ? LONG : (size_t)i % 41; /* some have none */
        const bool clears = i % 7 == 3;
        moves[i] = (attn_move){ (char *)target + to, clears ? NULL : (char *)source + at, bytes };
        if (clears) memset(want + to, 0, bytes);
        else memcpy(want + to, from + at, bytes);
    }
    memset(got, 0xee, BYTES);
    assert_int_equal(attn_copy(bench.stream, source, from, BYTES, ATTN_TO_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_copy(bench.stream, target, got, BYTES, ATTN_TO_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_moves(bench.stream, moves, COUNT + 1, &err), ATTN_OK);
    assert_int_equal(attn_copy(bench.stream, got, target, BYTES, ATTN_FROM_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
    assert_memory_equal(got, want, BYTES);
    attn_device_free(bench.device, source);
    attn_device_free(bench.device, target);
    free(from), free(want), free(got);
}

static size_t matching(const char *pattern, const struct CMUnitTest *tests, size_t count)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++) found += fnmatch(pattern, tests[i].name, FNM_NOESCAPE) == 0;
    return found;
}

int main(void)
{
    const struct CMUnitTest comparisons[] = {
        /* a problem that the backend has no kernel for is left out */
        cmocka_unit_test(test_edge_cases_agree_with_the_reference),
        cmocka_unit_test(test_lengths_agree_with_the_reference),
        cmocka_unit_test(test_lengths_do_not_need_the_slowest_kernel),
        cmocka_unit_test(test_huge_scores_and_values_agree_with_the_reference),
        cmocka_unit_test(test_the_largest_numbers_of_float32_agree_with_the_reference),
        cmocka_unit_test(test_products_beyond_float32_count_where_their_scores_are_ordinary),
        cmocka_unit_test(test_grid_agrees_with_the_reference),
        cmocka_unit_test(test_scores_of_either_side_of_0_agree_with_the_reference),
        cmocka_unit_test(test_random_problems_agree_with_the_reference),
        cmocka_unit_test(test_decoding_agrees_with_the_reference_on_both_sides_of_every_edge),
        cmocka_unit_test(test_random_decoding_agrees_with_the_reference),
        cmocka_unit_test(test_nan_reaches_exactly_the_rows_that_see_it),
        cmocka_unit_test(test_nan_reaches_exactly_the_gradients_that_see_it),
        cmocka_unit_test(test_latent_attention_agrees_with_the_reference),
    };
    const struct CMUnitTest lists[] = {
        cmocka_unit_test(test_rows_that_a_mask_fills_with_one_huge_number_agree_with_the_reference),
        cmocka_unit_test(test_one_key_has_a_probability_of_one),
        cmocka_unit_test(test_one_key_has_p_1_to_the_last_bit),
        cmocka_unit_test(test_float32_gradients_round_to_those_of_16_bits),
        cmocka_unit_test(test_work_in_steps_has_the_bits_of_work_at_once),
        cmocka_unit_test(test_one_head_in_steps_has_the_bits_of_one_launch),
        cmocka_unit_test(test_work_that_sees_no_keys_between_other_work),
        cmocka_unit_test(test_float8_without_lse_agrees_with_the_reference),
        cmocka_unit_test(test_float8_rows_of_one_key_are_its_value),
        cmocka_unit_test(test_float8_sums_keep_what_lies_beside_a_heavy_key),
        cmocka_unit_test(test_slopes_in_bfloat16_are_as_exact_as_other_sums),
        cmocka_unit_test(test_a_shared_prefix_does_not_change_a_bit),
        cmocka_unit_test(test_gradients_of_several_tiles_agree_with_the_reference),
    };
    const struct CMUnitTest properties[] = {
        cmocka_unit_test(test_a_feature_that_no_kernel_names_is_computed_by_one_that_takes_everything),
        cmocka_unit_test(test_a_problem_has_the_same_bits_alone_and_among_others),
        cmocka_unit_test(test_decoding_has_the_same_bits_alone_and_behind_other_decoding),
        cmocka_unit_test(test_a_family_that_is_asked_for_computes_both_ways),
        cmocka_unit_test(test_the_number_of_threads_does_not_change_a_bit),
        cmocka_unit_test(test_repeats_give_the_same_bits),
        cmocka_unit_test(test_a_packed_sequence_has_the_bits_of_the_problem_alone),
        cmocka_unit_test(test_a_batch_row_has_the_bits_of_the_problem_alone),
        cmocka_unit_test(test_moves_copy_and_clear_what_they_say_and_nothing_else),
        cmocka_unit_test(test_pages_do_not_change_a_bit),
        cmocka_unit_test(test_decoding_has_the_same_bits_by_the_copy_engine_and_by_threads),
        cmocka_unit_test(test_queries_of_any_size_meet_float8_keys),
        cmocka_unit_test(test_a_row_in_pages_has_the_bits_that_it_has_alone),
        cmocka_unit_test(test_values_may_be_the_first_columns_of_keys),
        cmocka_unit_test(test_latent_attention_has_the_same_bits_in_pages_and_alone),
        cmocka_unit_test(test_pages_may_overlap_and_be_shared),
        cmocka_unit_test(test_the_past_does_not_depend_on_the_future),
        cmocka_unit_test(test_hidden_numbers_of_any_size_do_not_matter),
        cmocka_unit_test(test_a_row_with_one_key_is_that_value_to_the_bit),
        cmocka_unit_test(test_every_float8_is_its_number),
        cmocka_unit_test(test_no_dout_gives_gradients_of_exactly_zero),
        cmocka_unit_test(test_the_order_of_keys_does_not_matter),
        cmocka_unit_test(test_a_shifted_bias_shifts_lse_and_nothing_else),
        cmocka_unit_test(test_attention_is_linear_in_v),
        cmocka_unit_test(test_offsets_past_two_billion_elements),
        cmocka_unit_test(test_offsets_on_both_sides_of_2_31),
        cmocka_unit_test(test_outputs_that_nobody_wants_are_not_needed),
        cmocka_unit_test(test_products_beyond_float32_count_in_latent_attention),
        cmocka_unit_test(test_a_row_whose_products_all_leave_float32_sees_its_keys),
        cmocka_unit_test(test_lse_alone_is_the_lse_beside_out),
    };
    struct CMUnitTest tests[ARRAY_SIZE(comparisons) + ARRAY_SIZE(lists) + ARRAY_SIZE(properties)];
    size_t count = 0;
    const char *const pattern = getenv("ATTN_TESTS");
    int failed;
    read_share();
    if (getenv("ATTN_BACKEND") && *getenv("ATTN_BACKEND")) backend = getenv("ATTN_BACKEND");
    const bool takes_all = strcmp(backend, "paper") != 0;
    for (size_t i = 0; i < ARRAY_SIZE(comparisons); i++) tests[count++] = comparisons[i];
    for (size_t i = 0; takes_all && i < ARRAY_SIZE(lists); i++) tests[count++] = lists[i];
    for (size_t i = 0; takes_all && i < ARRAY_SIZE(properties); i++)
        if ((long)i % share_count == share) tests[count++] = properties[i];
    if (pattern && *pattern) {
        /* cmocka would call a run of no test a success; a share may well have none. */
        if (strchr(pattern, '[') || matching(pattern, comparisons, ARRAY_SIZE(comparisons)) +
                                            matching(pattern, lists, ARRAY_SIZE(lists)) +
                                            matching(pattern, properties, ARRAY_SIZE(properties)) ==
                                        0) {
            fprintf(stderr, "ATTN_TESTS: no test is called %s (only * and ? stand for others)\n", pattern);
            return 1;
        }
        cmocka_set_test_filter(pattern);
    }
    bench_open(&bench, backend, 0);
    failed = _cmocka_run_group_tests("test_backends", tests, count, NULL, NULL);
    bench_close(&bench);
    return failed;
}
