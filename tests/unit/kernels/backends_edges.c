/* backends_edges.c: tests that compare results with those of the reference backend. There are three groups of problems:
 * those that broke other libraries (kernels/README.md, "Where attention breaks"), a grid of sizes and options, and
 * random problems. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backends.h"

/* ---- Tests of edge cases ----------------------------------------------------------------------------------------- */

/* clang-format off: each row of the table stays on one line */

/* Each problem runs forward and backward, with two exceptions: float8 and pages run only forward, and those with BACK
 * only backward. */
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
    /* This scale becomes 0 when it is rounded to float32. */
    SPEC(.name = "fp8, scales of 0", SIZES(50, 60, 64), FP8, .fp8_scales = true, .fp8_scale = 1e-60),
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

/* These problems run forward only, because their gradients would be beyond the range of their dtype. */
static const struct spec huge_cases[] = {
    SPEC(.name = "scale 1e20", SIZES(60, 80, 64), .has_scale = true, .scale = 1e20),
    /* At scores of 1e9 and more, score * factor - x depends greatly on whether the product is rounded before the
     * subtraction or a fused multiply-add computes both. If a kernel mixes the two ways, P may be far above 1. */
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

/* The numbers of these problems are as large as float32 can hold. Problems with float8, `v_most` or a `q_amp` of 1e-19
 * run forward only. */
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

/* Problems with padding rows, which are filled with NaN. There is padding after the queries that seqlens_q counts, and
 * between packed sequences. If queries are packed, there is also padding after the keys that seqlens_k counts. */
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
    SPEC(.name = "seqlens_q, ALiBi, head size 128", .B = 4, SIZES(200, 190, 128), HEADS(4, 2), .seqlens_q = true,
         .seqlens_k = true, .alibi = 2, .causal = true, BF16),
    SPEC(.name = "seqlens_q, FlashMask and softcap", .B = 4, SIZES(260, 190, 64), HEADS(2, 1), .seqlens_q = true,
         .mask_bounds = 2, .softcap = 9, F16),
    SPEC(.name = "seqlens_q, keep_mask and dropout", .B = 4, SIZES(260, 190, 64), HEADS(2, 1), .seqlens_q = true,
         .seqlens_k = true, .keep_mask = 6, .keep = 0.5, .dropout_p = 0.2, .seed = 5, BF16),
    SPEC(.name = "seqlens_q, bias, head size 128", .B = 4, SIZES(150, 290, 128), HEADS(2, 1), .seqlens_q = true,
         .bias = 5, .bias_hidden = 0.1, .causal = true, F16),
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

void test_huge_scores_and_values_agree_with_the_reference(void **state)
{
    (void)state;
    assert_all_agree(huge_cases, ARRAY_SIZE(huge_cases));
}

void test_the_largest_numbers_of_float32_agree_with_the_reference(void **state)
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

int problems_disagree(const struct spec *list, size_t count)
{
    int failed = 0;
    for (size_t i = 0; i < count; i++)
        for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
            struct spec s = list[i];
            if (op == ATTN_OP_FORWARD && s.op == ATTN_OP_BACKWARD) continue;
            if (op == ATTN_OP_BACKWARD &&
                (s.dtype == ATTN_F8E4M3 || s.page_size || s.fp8_keys || (s.many_blocks && is_brief())))
                continue;
            s.op = op;
            if (!agrees(&s)) failed++;
        }
    return failed;
}

void test_edge_cases_agree_with_the_reference(void **state)
{
    (void)state;
    assert_int_equal(problems_disagree(edge_cases, ARRAY_SIZE(edge_cases)), 0);
}

void test_lengths_agree_with_the_reference(void **state)
{
    (void)state;
    assert_int_equal(problems_disagree(length_cases, ARRAY_SIZE(length_cases)), 0);
}

enum { NARROW_HEADS = 256 }; /* every backend has a fast kernel for head sizes up to this */

/* The last kernel in each backend's list computes every problem, but slowly. Problems with packed or padded sequences
 * must run on another kernel. The backend "paper" has only one kernel, so this test skips it. */
void test_lengths_do_not_need_the_slowest_kernel(void **state)
{
    const attn_kernel *slow[ATTN_OP_OBSERVE + 1] = { NULL };
    const attn_capabilities *const can = attn_device_capabilities(bench.device);
    (void)state;
    if (strcmp(backend, "paper") == 0) skip();
    for (int n = 0; n < can->kernel_count; n++) slow[can->kernels[n]->op] = can->kernels[n];
    for (size_t i = 0; i < ARRAY_SIZE(length_cases) && strcmp(backend, "reference") != 0; i++) {
        struct fixture f;
        attn_plan plan;
        attn_error err = { 0 };
        if (length_cases[i].D > NARROW_HEADS) continue;
        fixture_make(&f, &length_cases[i]);
        assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &f.p, &plan, &err), ATTN_OK);
        if (plan.kernel == slow[f.p.op]) fail_msg("%s: is computed by %s", length_cases[i].name, plan.kernel->name);
        fixture_clear(&f);
    }
}

/* Backward problems of several tiles, with the gradients of options: of a bias, broadcast in each possible way, and of
 * ALiBi slopes. */
static const struct spec option_gradient_cases[] = {
    SPEC(.name = "dbias of each pair", .B = 2, SIZES(200, 300, 64), HEADS(4, 2), BACK, F16, .bias = 8,
         .bias_hidden = 0.1, .causal = true),
    SPEC(.name = "dbias of each pair, head size 256", SIZES(150, 260, 256), HEADS(2, 1), BACK, BF16, .bias = 8,
         .dlse = true, WINDOW(150, 60)),
    SPEC(.name = "dbias of each pair, narrower values, odd strides", SIZES(140, 151, 192), .Dv = 72, HEADS(2, 1), BACK,
         BF16, .bias = 7, .bias_dtype = ATTN_BF16, .give_forward = true, .strided = true),
    SPEC(.name = "dbias over batch rows", .B = 3, SIZES(150, 301, 128), HEADS(2, 1), BACK, BF16, .bias = 7,
         .bias_hidden = 0.2, .dropout_p = 0.3, .seed = 9),
    SPEC(.name = "dbias over heads", .B = 2, SIZES(260, 150, 128), HEADS(6, 2), BACK, F16, .bias = 6, .sinks = 1,
         .bias_dtype = ATTN_F16, .causal = true, .give_forward = true),
    SPEC(.name = "dbias over heads and batch rows", .B = 2, SIZES(200, 290, 64), HEADS(4, 4), BACK, BF16, .bias = 5,
         .bias_dtype = ATTN_BF16, .keep_mask = 8, .keep = 0.7, .softcap = 9, .q_amp = 2),
    SPEC(.name = "dbias over queries", .B = 2, SIZES(300, 270, 64), HEADS(4, 2), BACK, F16, .bias = 4, .causal = true,
         .mask_bounds = 1, .mask_kind = MASK_DOCUMENT),
    SPEC(.name = "dbias over all but keys", .B = 3, SIZES(270, 140, 96), HEADS(4, 2), BACK, BF16, .bias = 1, .alibi = 2,
         .dropout_p = 0.1, .seed = 4),
    SPEC(.name = "dbias over many heads", .B = 9, SIZES(33, 40, 32), HEADS(8, 4), BACK, F16, .bias = 5, .alibi = 1),
    SPEC(.name = "dbias of one query", .B = 3, SIZES(1, 300, 64), HEADS(4, 2), BACK, F16, .bias = 6),
    SPEC(.name = "dbias, lengths", .B = 5, SIZES(140, 200, 64), HEADS(2, 2), BACK, BF16, .bias = 8, .seqlens_k = true,
         .seqlens_q = true, .poison_unseen = true),
    SPEC(.name = "dbias over batch rows, lengths", .B = 5, SIZES(140, 200, 128), HEADS(2, 2), BACK, F16, .bias = 5,
         .seqlens_k = true, .seqlens_q = true, .alibi = 1, .keep_mask = 6, .keep = 0.9, .keep_tail = 70),
    SPEC(.name = "dbias, a key is NaN", SIZES(150, 200, 64), HEADS(2, 1), BACK, BF16, .bias = 5, .poison = 1,
         .causal = true),
    SPEC(.name = "dbias, a value is NaN", SIZES(150, 200, 64), HEADS(2, 1), BACK, F16, .bias = 8, .poison = 2,
         WINDOW(50, 20)),
    SPEC(.name = "dbias, large scores", SIZES(40, 150, 64), BACK, F16, .bias = 8, .q_amp = 2500, .give_forward = true),
    SPEC(.name = "dbias, rows of one huge number", SIZES(40, 150, 64), BACK, F16, .bias = 5, .bias_levels = 1),
    SPEC(.name = "dbias, huge numbers", SIZES(40, 150, 64), BACK, BF16, .bias = 6, .bias_levels = 2),
    SPEC(.name = "dbias, a negative scale", SIZES(140, 150, 64), BACK, F16, .bias = 5, .has_scale = true,
         .scale = -0.1),
    SPEC(.name = "dalibi_slopes", .B = 2, SIZES(300, 390, 128), HEADS(4, 2), BACK, BF16, .alibi = 2, .causal = true,
         .give_forward = true, .dlse = true),
    SPEC(.name = "dalibi_slopes, more queries", .B = 2, SIZES(390, 300, 64), HEADS(4, 2), BACK, F16, .alibi = 1,
         .sinks = 1, .softcap = 10),
    SPEC(.name = "dalibi_slopes, head size 192", SIZES(300, 200, 192), .Dv = 128, HEADS(3, 1), BACK, F16, .alibi = 1,
         WINDOW(90, 90), .keep_mask = 5, .keep = 0.8),
    SPEC(.name = "dalibi_slopes, packed", .sequences = 4, .q_lengths = { 300, 0, 129, 64 },
         .k_lengths = { 260, 40, 300, 64 }, HEADS(4, 2), BACK, BF16, .D = 64, .Dv = 64, .alibi = 2, .causal = true),
    SPEC(.name = "dalibi_slopes, gaps", .sequences = 3, .q_lengths = { 140, 1, 70 }, .k_lengths = { 140, 30, 200 },
         .gaps = 20, HEADS(4, 2), BACK, F16, .D = 64, .Dv = 64, .alibi = 1),
    SPEC(.name = "dsinks", .B = 3, SIZES(300, 100, 64), HEADS(4, 2), BACK, F16, .sinks = 2, .dlse = true),
};

void test_gradients_of_options_agree_with_the_reference(void **state)
{
    (void)state;
    assert_int_equal(problems_disagree(option_gradient_cases, ARRAY_SIZE(option_gradient_cases)), 0);
}

/* Options that change the score of each (query, key) pair, such as a bias, must run on the same kernel as problems
 * without options. Their gradients must run on that kernel too. */
void test_options_of_pairs_do_not_need_a_slower_kernel_than_none(void **state)
{
    static const int64_t head_sizes[] = { 64, 96, 128 };
    (void)state;
    if (strcmp(backend, "paper") == 0) skip();
    for (int n = 0; n < 2 * 16 * (int)ARRAY_SIZE(head_sizes); n++) {
        const int64_t D = head_sizes[n / 32];
        struct spec plain = SPEC(BF16, .op = n % 2 ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD, SIZES(200, 200, D),
                                 HEADS(2, 1), .any_order = true),
                    s = plain;
        const char *names[2] = { NULL, NULL };
        s.bias = n & 2 ? 3 : 0, s.keep_mask = n & 4 ? 5 : 0, s.keep = 0.5, s.dropout_p = n & 8 ? 0.1 : 0;
        s.alibi = n & 16 ? 1 : 0;
        for (int m = 0; m < 2; m++) {
            struct fixture f;
            attn_plan plan;
            attn_error err = { 0 };
            fixture_make(&f, m ? &s : &plain);
            assert_int_equal(attn_plan_make(attn_device_capabilities(bench.device), &f.p, &plan, &err), ATTN_OK);
            names[m] = plan.kernel->name;
            fixture_clear(&f);
        }
        if (strcmp(names[0], names[1]))
            fail_msg("D %d: bias %d, keep_mask %d, dropout_p %g, alibi %d, %s: is computed by %s and not by %s", (int)D,
                     s.bias, s.keep_mask, s.dropout_p, s.alibi, n % 2 ? "backward" : "forward", names[1], names[0]);
    }
}

/* On Hopper GPUs, 16-bit problems must run on kernels for Hopper, whichever options they combine. For head sizes above
 * 256, the Hopper forward does not compute bias, keep_mask and dropout. */
void test_options_together_do_not_need_generic_kernels_on_hopper(void **state)
{
    static const int64_t head_sizes[] = { 64, 128, 192, 256, 320 };
    const attn_capabilities *const can = attn_device_capabilities(bench.device);
    bool hopper = false;
    (void)state;
    for (int n = 0; n < can->kernel_count; n++) hopper |= strcmp(can->kernels[n]->name, "sm90") == 0;
    if (!hopper || getenv("ATTN_CUDA_FAMILY")) return;
    for (int n = 0; n < 2 << 8; n++)
        for (size_t size = 0; size < ARRAY_SIZE(head_sizes); size++) {
            struct spec s = SPEC(BF16, .op = n % 2 ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD,
                                 SIZES(70, 70, head_sizes[size]), HEADS(2, 1));
            struct fixture f;
            attn_plan plan;
            attn_error err = { 0 };
            s.bias = n & 2 ? 3 : 0, s.keep_mask = n & 4 ? 5 : 0, s.keep = 0.5, s.dropout_p = n & 8 ? 0.1 : 0;
            s.alibi = n & 16 ? 1 : 0, s.softcap = n & 32 ? 30 : 0, s.mask_bounds = n & 64 ? 2 : 0, s.mask_heads = 1;
            s.seqlens_k = n & 128, s.any_order = n & 256;
            if (s.op == ATTN_OP_FORWARD && s.D > 256 && (s.bias || s.keep_mask || s.dropout_p > 0)) continue;
            fixture_make(&f, &s);
            assert_int_equal(attn_plan_make(can, &f.p, &plan, &err), ATTN_OK);
            if (strncmp(plan.kernel->name, "sm90", 4) != 0) {
                spec_print(stderr, &s);
                fail_msg("is computed by %s", plan.kernel->name);
            }
            fixture_clear(&f);
        }
}

/* ---- Tests of random problems ------------------------------------------------------------------------------------ */

int64_t pick(struct rng *r, const int64_t *from, size_t count)
{
    return from[rng_next(r) % count];
}

const int64_t page_sizes[] = { 1, 3, 7, 16, 16, 32, 48, 64, 128 };

void give_pages(struct spec *s, int64_t page_size)
{
    s->page_size = (int)page_size;
    s->layout = ATTN_BSHD;
    s->Sk = (s->Sk + page_size - 1) / page_size * page_size;
    s->seqlens_k = !s->sequences;
}

struct spec random_spec(uint64_t seed)
{
    static const int64_t lengths[] = { 0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200 };
    static const int64_t head_sizes[] = { 1,  3,  8,  16, 24, 31,  32,  40,  64,  64,
                                          64, 65, 72, 80, 96, 128, 128, 160, 192, 256 };
    /* The factor must differ from the constant that rng_next() adds to its state. With that constant as factor, seeds n
     * and n + 1 would draw almost the same random numbers. */
    struct rng r = { seed * UINT64_C(0x2545f4914f6cdd1d) + 1 };
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
    if (rng_chance(&r, 0.08)) s.Sq = rng_between(&r, 1, 4), s.Sk = rng_between(&r, 500, 2500), s.op = ATTN_OP_FORWARD;
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

/* Tests each mask of the table with each head size and each dtype, at odd lengths. tests/gpu/sanitize.sh, which runs
 * compute-sanitizer, sets ATTN_GRID_D to run one head size at a time. */
void test_grid_agrees_with_the_reference(void **state)
{
    /* clang-format off: each row of the table stays on one line */
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
                    s.plain_grads = (m + n) / 2 % 2 == 0;
                    if (!agrees(&s)) failed++;
                }
    assert_int_equal(failed, 0);
    assert_int_not_equal(ran, 0);
}

void random_problems_agree(struct spec (*draw)(uint64_t seed), long first, long count)
{
    int failed = 0;
    for (long n = 0; n < count && failed < 20; n++) {
        struct spec s = draw((uint64_t)(first + n));
        s.any_order = s.op == ATTN_OP_BACKWARD && (first + n) % 2 == 0;
        s.plain_grads = s.op == ATTN_OP_BACKWARD && (first + n) / 2 % 2 == 0;
        if (!agrees(&s)) {
            fprintf(stderr, "    (random problem %ld)\n", first + n);
            failed++;
        }
    }
    assert_int_equal(failed, 0);
}

void test_random_problems_agree_with_the_reference(void **state)
{
    (void)state;
    random_problems_agree(random_spec, env_number("ATTN_RANDOM_SEED", 1),
                          env_number("ATTN_RANDOM_COUNT", RANDOM_COUNT));
}
