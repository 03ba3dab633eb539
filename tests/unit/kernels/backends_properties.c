/* backends_properties.c: tests of properties that hold without a reference result. For example, a problem has the same
 * bits alone and among others, packed and not packed, in one launch and in several. The order of keys must not matter,
 * and neither may keys that no query sees. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "backends.h"

#include "kernels/queries.h"

/* ---- Tests of properties that need no reference ------------------------------------------------------------------ */

void assert_same_bits_alone_and_among_others(struct spec (*draw)(uint64_t seed), int count)
{
    enum { MOST = 16 };
    struct fixture alone[MOST], together[MOST], *list[MOST];
    assert_true(count <= MOST);
    for (int n = 0; n < count; n++) {
        const struct spec s = draw(9000 + (uint64_t)n);
        fixture_make(&alone[n], &s);
        fixture_copy(&together[n], &alone[n]);
        fixture_run(&bench, &alone[n]);
        list[count - 1 - n] = &together[n];
    }
    fixtures_must_run(&bench, list, count);
    for (int n = 0; n < count; n++) assert_outputs_equal(&alone[n], &together[n]);
    for (int n = 0; n < count; n++) fixture_clear(&alone[n]), fixture_clear(&together[n]);
}

void test_a_problem_has_the_same_bits_alone_and_among_others(void **state)
{
    (void)state;
    assert_same_bits_alone_and_among_others(random_spec, 16);
}

/* ATTN_CUDA_FAMILY may name a family of kernels. This family must then compute both the forward and the backward. */
void test_a_family_that_is_asked_for_computes_both_ways(void **state)
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
            assert_int_equal(attn_plan_make(attn_device_capabilities(other.device), &f.p, &plan, &err), ATTN_OK);
            assert_string_equal(plan.kernel->name, families[n]);
            fixture_clear(&f);
        }
        bench_close(&other);
    }
}

void test_the_number_of_threads_does_not_change_a_bit(void **state)
{
    static const int threads[] = { 1, 2, 3 };
    static const struct spec large[] = {
        SPEC(SIZES(1, 5000, 64), HEADS(2, 1), BF16),
        SPEC(SIZES(400, 700, 64), HEADS(2, 1), .causal = true),
        SPEC(BACK, SIZES(300, 500, 64), HEADS(4, 1), .causal = true, BF16, .sinks = 1, .bias = 1, .alibi = 1),
    };
    (void)state;
    /* A brief run leaves this test out for the cuda backend, which has no CPU threads whose number could matter. */
    if (is_brief() && strcmp(backend, "cuda") == 0) skip();
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

/* dq is a sum of terms from several thread blocks. If the terms are added in a fixed order, repeated runs must give the
 * same bits. */
void test_gradients_of_several_tiles_agree_with_the_reference(void **state)
{
    /* clang-format off: each row of the table stays on one line */
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

/* Hopper's backward kernels divide the work for a tile of keys among several blocks if there are few tiles of keys:
 * each block has some query heads of the group, or some tiles of queries. */
void test_gradients_of_few_tiles_of_keys_agree_with_the_reference(void **state)
{
    /* clang-format off: each row of the table stays on one line */
    static const struct spec cases[] = {
        SPEC(.name = "four heads to one", SIZES(200, 100, 64), HEADS(4, 1), BACK, BF16, .any_order = true),
        SPEC(.name = "six heads to one, D 128", SIZES(130, 120, 128), HEADS(6, 1), BACK, F16, .any_order = true,
             .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(.name = "four heads to one, D 256", SIZES(200, 60, 256), HEADS(4, 1), BACK, BF16, .any_order = true),
        SPEC(.name = "one head", SIZES(600, 100, 128), HEADS(1, 1), BACK, BF16, .any_order = true),
        SPEC(.name = "one head, causal", SIZES(500, 250, 64), HEADS(1, 1), BACK, F16, .any_order = true, .causal = true,
             .alignment = ATTN_TOP_LEFT, .dlse = true),
        SPEC(.name = "one head, D 192, Dv 128", SIZES(600, 60, 192), .Dv = 128, HEADS(1, 1), BACK, BF16,
             .any_order = true, .float_grads = 7),
        SPEC(.name = "two heads to one, window", SIZES(700, 60, 64), HEADS(2, 1), BACK, BF16, .any_order = true,
             WINDOW(400, 300)),
        SPEC(.name = "batch, lengths", .B = 2, SIZES(400, 120, 128), HEADS(4, 1), BACK, F16, .any_order = true,
             .seqlens_k = true, .seqlens_q = true, .poison_unseen = true, .float_grads = 2),
        SPEC(.name = "batch, lengths, D 256", .B = 2, SIZES(300, 60, 256), HEADS(2, 1), BACK, BF16, .any_order = true,
             .seqlens_k = true, .poison_unseen = true),
        SPEC(.name = "packed, gaps", .sequences = 3, .q_lengths = { 300, 0, 90 }, .k_lengths = { 90, 20, 30 },
             .gaps = 20, HEADS(4, 1), BACK, BF16, .any_order = true, .D = 64, .Dv = 64, .poison_unseen = true),
        SPEC(.name = "packed, D 256", .sequences = 2, .q_lengths = { 300, 90 }, .k_lengths = { 50, 30 }, HEADS(4, 2),
             BACK, F16, .any_order = true, .D = 256, .Dv = 256),
        SPEC(.name = "FlashMask", SIZES(400, 120, 64), HEADS(4, 1), BACK, BF16, .any_order = true, .mask_bounds = 4,
             .mask_heads = 2),
        SPEC(.name = "FlashMask, one head", SIZES(700, 120, 128), HEADS(1, 1), BACK, F16, .any_order = true,
             .mask_bounds = 2, .mask_heads = 1, .mask_kind = MASK_DOCUMENT),
        SPEC(.name = "bias and keep_mask", SIZES(300, 120, 128), HEADS(4, 1), BACK, F16, .any_order = true, .bias = 5,
             .bias_hidden = 0.1, .keep_mask = 8, .keep = 0.6),
        SPEC(.name = "dropout and ALiBi", SIZES(500, 100, 64), HEADS(2, 1), BACK, BF16, .any_order = true, .alibi = 1,
             .dropout_p = 0.2, .seed = 3),
        SPEC(.name = "softcap and sinks", SIZES(300, 120, 128), HEADS(2, 1), BACK, BF16, .any_order = true,
             .softcap = 20, .sinks = 1),
        SPEC(.name = "a key is NaN", SIZES(300, 100, 64), HEADS(4, 1), BACK, BF16, .any_order = true, .poison = 1,
             WINDOW(100, 50)),
        SPEC(.name = "a value is infinite, D 256", SIZES(300, 60, 256), HEADS(2, 1), BACK, F16, .any_order = true,
             .poison = 2, WINDOW(100, 50)),
        SPEC(.name = "large queries", SIZES(300, 100, 128), HEADS(2, 1), BACK, F16, .any_order = true, .q_amp = 3e4),
    };
    /* clang-format on */
    (void)state;
    assert_all_agree(cases, ARRAY_SIZE(cases));
}

void test_repeats_give_the_same_bits(void **state)
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

void assert_part_equal(const struct fixture *whole, const struct fixture *part, attn_tensor_id id, int64_t first)
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

/* Copies elements of tensor `id` from problem `whole`, from element `first` on, to problem `part`. */
static void copy_part(const struct fixture *whole, struct fixture *part, attn_tensor_id id, int64_t first)
{
    for (int64_t n = tensor_elements(&part->p.tensor[id]), e = 0; e < n; e++)
        tensor_set(&part->p.tensor[id], e, tensor_get(&whole->p.tensor[id], first + e));
}

/* A server may pack the problems of several clients into one. */
void test_a_packed_sequence_has_the_bits_of_the_problem_alone(void **state)
{
    static const struct spec packs[] = {
        SPEC(.sequences = 5, .q_lengths = { 70, 1, 128, 33, 5 }, .k_lengths = { 90, 500, 128, 33, 64 }, HEADS(4, 2),
             .causal = true, BF16, .sinks = 1),
        SPEC(.sequences = 3, .q_lengths = { 1, 1, 1 }, .k_lengths = { 2500, 17, 640 }, HEADS(8, 2), F16),
        SPEC(.sequences = 3, .q_lengths = { 64, 64, 64 }, .k_lengths = { 64, 64, 64 }, HEADS(4, 4), .causal = true,
             F16),
        SPEC(.sequences = 4, .q_lengths = { 130, 50, 200, 3 }, .k_lengths = { 2100, 3200, 90, 2500 }, HEADS(4, 2),
             .causal = true, BF16, .sinks = 1),
        SPEC(.sequences = 9, .q_lengths = { 1, 4, 70, 1, 0, 16, 5, 1, 17 },
             .k_lengths = { 2100, 129, 90, 1, 77, 1300, 0, 128, 600 }, HEADS(8, 2), .D = 128, .Dv = 128, BF16,
             .causal = true, .sinks = 1),
        SPEC(.sequences = 5, .q_lengths = { 1, 3, 90, 2, 1 }, .k_lengths = { 1000, 640, 90, 2050, 1 }, HEADS(6, 2), F16,
             .softcap = 20, .alibi = 1),
        SPEC(.sequences = 3, .q_lengths = { 130, 70, 3 }, .k_lengths = { 2100, 3200, 2500 }, HEADS(4, 2), BF16,
             .softcap = 20, .causal = true, .sinks = 1),
        SPEC(.sequences = 2, .q_lengths = { 100, 140 }, .k_lengths = { 2300, 2600 }, HEADS(2, 2), F16, .alibi = 1),
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
        /* The GPU emulator limits the memory in which the backward keeps dS. In this problem dS of all query heads of
         * the first sequence does not fit into that memory. */
        SPEC(BACK, .sequences = 2, .q_lengths = { 300, 30 }, .k_lengths = { 300, 30 }, HEADS(8, 1), .D = 256, .Dv = 256,
             BF16),
        /* This window is longer than the first sequence, but shorter than all packed keys together. */
        SPEC(BACK, .sequences = 2, .q_lengths = { 400, 30 }, .k_lengths = { 400, 300 }, HEADS(4, 2), .D = 128,
             .Dv = 128, F16, WINDOW(500, 450)),
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

void test_a_batch_row_has_the_bits_of_the_problem_alone(void **state)
{
    static const struct spec batches[] = {
        SPEC(.B = 3, SIZES(50, 90, 64), HEADS(4, 2), .causal = true, BF16),
        SPEC(.B = 3, SIZES(1, 3000, 64), HEADS(4, 1)),
        SPEC(.B = 24, SIZES(1, 2048, 64), HEADS(4, 2), BF16),
        SPEC(.B = 3, SIZES(2, 3000, 128), HEADS(8, 2), BF16, .causal = true),
        SPEC(.B = 3, SIZES(16, 1300, 64), HEADS(8, 2), F16, WINDOW(500, 0)),
        SPEC(.B = 7, SIZES(50, 2100, 64), HEADS(4, 2), BF16, .causal = true, .sinks = 1),
        SPEC(.B = 7, SIZES(70, 2100, 64), HEADS(2, 1), F16, .causal = true, .alibi = 2),
        SPEC(.B = 4, SIZES(70, 2300, 64), HEADS(2, 1), BF16, .causal = true, .mask_bounds = 1, .mask_heads = 2),
        SPEC(.B = 4, SIZES(70, 2300, 64), HEADS(2, 1), BF16, .bias = 1 + 7, .keep_mask = 1 + 5, .keep = 0.6),
        SPEC(.B = 6, SIZES(24, 1200, 320), HEADS(2, 1), BF16, .causal = true),
        SPEC(.B = 4, SIZES(70, 2300, 64), HEADS(2, 1), FP8, .causal = true),
        SPEC(.B = 5, SIZES(20, 1100, 1024), HEADS(2, 1), F16),
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

/* Runs only the key/value heads [first, end). A plan is the choice of a kernel for a problem; `whole` is the plan for
 * all heads. Returns false if the plan for these heads has another kernel than `whole`. */
static bool run_heads(struct fixture *f, const attn_plan *whole, int64_t first, int64_t end)
{
    const attn_problem all = f->p;
    const attn_part part = { 0, attn_dims_of(&all).B, first, end - first };
    attn_plan plan;
    attn_error err;
    f->p = attn_part_of(&all, &part);
    const bool alike = attn_plan_make(attn_device_capabilities(bench.device), &f->p, &plan, &err) == ATTN_OK &&
                       plan.kernel == whole->kernel && plan.variant == whole->variant;
    if (alike) fixture_run(&bench, f);
    f->p = all;
    return alike;
}

/* Divides the problem's heads into `count` parts. If all parts run on the same kernel as the whole problem, asserts
 * that the parts and the whole problem have the same bits, and adds 1 to *compared. */
static void assert_same_bits_by_heads(const struct spec *s, int count, int *compared)
{
    struct fixture whole, parts;
    attn_plan plan;
    attn_error err;
    bool alike = true;
    fixture_make(&whole, s);
    const int64_t Hk = attn_dims_of(&whole.p).Hk;
    const bool sums_heads = whole.p.dbias.rank && whole.p.dbias.shape[1] == 1;
    if (Hk >= count && !sums_heads &&
        attn_plan_make(attn_device_capabilities(bench.device), &whole.p, &plan, &err) == ATTN_OK) {
        fixture_copy(&parts, &whole);
        fixture_run(&bench, &whole);
        for (int n = 0; n < count && alike; n++) alike = run_heads(&parts, &plan, Hk * n / count, Hk * (n + 1) / count);
        if (alike) assert_outputs_equal(&whole, &parts);
        *compared += alike;
        fixture_clear(&parts);
    }
    fixture_clear(&whole);
}

void test_heads_have_the_same_bits_in_parts_and_together(void **state)
{
    static const struct spec cases[] = {
        SPEC(.B = 2, SIZES(130, 200, 64), HEADS(8, 4), BF16, .causal = true, .dropout_p = 0.3, .seed = 11),
        SPEC(BACK, .B = 2, SIZES(130, 200, 64), HEADS(8, 4), BF16, .causal = true, .dropout_p = 0.3, .seed = 11),
        SPEC(.sequences = 3, .q_lengths = { 30, 70, 9 }, .k_lengths = { 60, 40, 30 }, HEADS(8, 4), .D = 64, .Dv = 64,
             BF16, .dropout_p = 0.2, .alibi = 1),
        SPEC(BACK, .sequences = 3, .q_lengths = { 30, 70, 9 }, .k_lengths = { 60, 40, 30 }, HEADS(8, 4), .D = 64,
             .Dv = 64, BF16, .dropout_p = 0.2, .sinks = 1),
        SPEC(.B = 2, SIZES(1, 3000, 128), HEADS(8, 4), F16, .layout = ATTN_BHSD),
        SPEC(SIZES(50, 2100, 64), HEADS(8, 4), BF16, .causal = true),
        SPEC(.B = 2, SIZES(100, 120, 32), HEADS(4, 4), .bias = 1 + 2 + 4, .keep_mask = 1 + 1, .keep = 0.7, .alibi = 2),
        SPEC(BACK, SIZES(100, 120, 32), HEADS(4, 4), .bias = 1 + 2, .alibi = 2, .layout = ATTN_BHSD),
        SPEC(BACK, .B = 2, SIZES(200, 150, 128), HEADS(8, 4), F16, .mask_bounds = 2, .mask_heads = 2, .softcap = 20),
        SPEC(.op = ATTN_OP_OBSERVE, .B = 2, SIZES(100, 120, 64), HEADS(8, 4), BF16),
    };
    enum { BRIEF_COUNT = 20 };
    int compared = 0;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        if (is_ours()) assert_same_bits_by_heads(&cases[n], 2 + (int)n % 3, &compared);
    for (int n = 0; n < env_number("ATTN_RANDOM_COUNT", is_brief() ? BRIEF_COUNT : RANDOM_COUNT); n++) {
        struct spec s = random_spec(31000 + (uint64_t)n);
        s.Hk *= 1 + n % 4, s.H *= 1 + n % 4;
        if (is_ours()) assert_same_bits_by_heads(&s, 2 + n % 3, &compared);
    }
    assert_true(compared > 0 || strcmp(backend, "paper") == 0);
}

enum { MOST_PARTS = 4 };

/* Runs only the queries [first, end). If a gradient is a sum over queries, adds it in float32 to the gradient's array
 * in `sums`. A plan is the choice of a kernel for a problem; `whole` is the plan for all queries. Returns false if the
 * plan for these queries has another kernel than `whole`. */
static bool run_queries(struct fixture *f, const attn_plan *whole, int64_t first, int64_t end, float **sums)
{
    const struct fixture all = *f;
    attn_plan plan;
    attn_error err;
    f->p = attn_queries_of(&all.p, first, end);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (sums[id]) fixture_add(f, (attn_tensor_id)id, ATTN_F32, all.p.tensor[id].rank, all.p.tensor[id].shape);
    const bool alike = attn_plan_make(attn_device_capabilities(bench.device), &f->p, &plan, &err) == ATTN_OK &&
                       plan.kernel == whole->kernel && plan.variant == whole->variant;
    if (alike) fixture_run(&bench, f);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const float *const part = f->p.tensor[id].data;
        if (sums[id] == NULL) continue;
        for (int64_t n = tensor_elements(&f->p.tensor[id]), e = 0; e < n; e++) sums[id][e] += part[e];
        free(f->block[id]);
    }
    *f = all;
    return alike;
}

/* Divides the problem's queries into `count` parts and computes each part. Asserts that out, lse and dq have the same
 * bits as in the whole problem, and that gradients that are sums over queries are correct. Returns false if a part
 * needs another kernel than the whole problem. */
static bool same_bits_by_queries(const struct spec *s, int count)
{
    int64_t ends[MOST_PARTS];
    double shares[MOST_PARTS];
    float *sums[ATTN_TENSOR_COUNT] = { NULL };
    struct fixture whole, parts, rows;
    char why[400];
    attn_plan plan;
    attn_error err;
    fixture_make(&whole, s);
    bool alike = attn_queries_divide(&whole.p) && attn_queries_share(&whole.p, count, ends, shares) &&
                 attn_plan_make(attn_device_capabilities(bench.device), &whole.p, &plan, &err) == ATTN_OK;
    fixture_copy(&parts, &whole);
    if (alike) fixture_run(&bench, &whole);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (attn_is_sum_of_queries(&whole.p, (attn_tensor_id)id))
            sums[id] = calloc((size_t)tensor_elements(&whole.p.tensor[id]), sizeof *sums[id]);
    for (int n = 0; n < count && alike; n++) alike = run_queries(&parts, &plan, n > 0 ? ends[n - 1] : 0, ends[n], sums);
    rows = whole;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *const t = &parts.p.tensor[id];
        if (sums[id] == NULL) continue;
        for (int64_t n = tensor_elements(t), e = 0; e < n; e++) tensor_set(t, e, (double)sums[id][e]);
        rows.p.tensor[id].rank = 0;
        free(sums[id]);
    }
    if (alike &&
        (!outputs_equal(&rows, &parts, why, sizeof why) || !fixture_compare(&parts, &whole, NULL, why, sizeof why))) {
        spec_print(stderr, s);
        fail_msg("in %d parts: %s", count, why);
    }
    fixture_clear(&parts);
    fixture_clear(&whole);
    return alike;
}

void test_queries_have_the_same_bits_in_parts_and_together(void **state)
{
    static const struct spec cases[] = {
        SPEC(SIZES(700, 700, 64), HEADS(2, 1), BF16, .causal = true),
        SPEC(SIZES(600, 1200, 64), HEADS(1, 1), F16, .causal = true),
        SPEC(SIZES(600, 700, 128), HEADS(2, 1), BF16, .causal = true, .layout = ATTN_BHSD),
        SPEC(SIZES(500, 1100, 128), HEADS(1, 1), F16, .causal = true),
        SPEC(SIZES(450, 450, 96), HEADS(1, 1), BF16, .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(SIZES(450, 500, 192), HEADS(1, 1), BF16, .Dv = 128, .causal = true),
        SPEC(SIZES(450, 500, 256), HEADS(1, 1), BF16, .causal = true),
        SPEC(SIZES(450, 300, 64), HEADS(3, 1), BF16),
        SPEC(SIZES(500, 2100, 64), HEADS(2, 1), BF16, .causal = true),
        SPEC(SIZES(450, 600, 64), HEADS(1, 1), BF16, .window_right = 90, .alignment = ATTN_TOP_LEFT),
        SPEC(SIZES(450, 450, 64), HEADS(1, 1), BF16, .causal = true, .softcap = 20, .sinks = 1),
        SPEC(SIZES(450, 450, 64), HEADS(1, 1), BF16, .causal = true, .bias = 1 + 4, .keep_mask = 1 + 4, .keep = 0.7),
        SPEC(SIZES(450, 450, 32), HEADS(2, 1), .causal = true),
        SPEC(SIZES(300, 300, 300), HEADS(1, 1), BF16, .causal = true),
        SPEC(SIZES(450, 450, 128), HEADS(1, 1), .dtype = ATTN_F8E4M3, .out_dtype = ATTN_BF16, .causal = true),
        SPEC(BACK, SIZES(450, 450, 64), HEADS(2, 1), BF16, .causal = true),
        SPEC(BACK, SIZES(450, 520, 64), HEADS(1, 1), F16, .causal = true, .give_forward = true, .dlse = true),
        SPEC(BACK, SIZES(450, 450, 128), HEADS(2, 1), BF16, .causal = true, .layout = ATTN_BHSD),
        SPEC(BACK, SIZES(450, 300, 128), HEADS(1, 1), BF16),
        SPEC(BACK, SIZES(450, 450, 192), HEADS(1, 1), BF16, .Dv = 128, .causal = true),
        SPEC(BACK, SIZES(450, 470, 256), HEADS(1, 1), F16, .causal = true),
        SPEC(BACK, SIZES(450, 450, 64), HEADS(1, 1), BF16, .causal = true, .softcap = 20, .sinks = 1),
        SPEC(BACK, SIZES(450, 450, 64), HEADS(1, 1), BF16, .causal = true, .bias = 1 + 4, .keep_mask = 1, .keep = 0.7),
        SPEC(BACK, SIZES(300, 300, 64), HEADS(1, 1), BF16, .bias = 1, .float_grads = 1),
        SPEC(BACK, SIZES(450, 450, 32), HEADS(2, 1), .causal = true),
        SPEC(BACK, SIZES(300, 300, 300), HEADS(1, 1), BF16, .causal = true),
    };
    /* ATTN_PART and ATTN_THIN may leave few cases to this process. If there are FEW cases or fewer, perhaps none can be
     * compared, because each part may need another kernel than the whole problem. */
    enum { FEW = 4 };
    int compared = 0, ours = 0;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        if (is_ours()) {
            ours++;
            const bool alike = same_bits_by_queries(&cases[n], 2 + (int)n % 2);
            compared += alike;
            if (!alike) print_message("case %zu: other kernels\n", n);
        }
    assert_true(compared > 0 || ours <= FEW || strcmp(backend, "paper") == 0);
}

void test_the_past_does_not_depend_on_the_future(void **state)
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

/* Keys and values that no query sees may be any finite numbers, because callers leave their memory unfilled. Even a
 * huge one must not change a result, as it would if a kernel scaled all keys by their maximum. */
void test_hidden_numbers_of_any_size_do_not_matter(void **state)
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

void test_no_dout_gives_gradients_of_exactly_zero(void **state)
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

void test_the_order_of_keys_does_not_matter(void **state)
{
    const struct spec s = SPEC(SIZES(90, 211, 64), HEADS(2, 2));
    const int64_t row = s.Hk * s.D;
    struct fixture a, b;
    (void)state;
    fixture_make(&a, &s);
    fixture_copy(&b, &a);
    for (int64_t j = 0; j < s.Sk; j++)
        for (int64_t e = 0; e < row; e++) {
            /* Moves every key to another place. No key is used twice, because 100 and Sk (211) have no common divisor
             * above 1. */
            const int64_t from = j * 100 % s.Sk;
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

void test_a_shifted_bias_shifts_lse_and_nothing_else(void **state)
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

void test_attention_is_linear_in_v(void **state)
{
    const struct spec s = SPEC(SIZES(90, 130, 64), .causal = true, .sinks = 1);
    struct fixture a, b;
    (void)state;
    fixture_make(&a, &s);
    fixture_copy(&b, &a);
    for (int64_t e = 0; e < tensor_elements(&b.p.v); e++) tensor_set(&b.p.v, e, -4 * tensor_get(&a.p.v, e));
    fixture_run(&bench, &a);
    fixture_run(&bench, &b);
    for (int64_t e = 0; e < tensor_elements(&a.p.out); e++)
        assert_true(tensor_get(&b.p.out, e) == -4 * tensor_get(&a.p.out, e));
    fixture_clear(&a), fixture_clear(&b);
}

/* Rows lie more than 2^31 elements apart, in memory most of which is never touched. This needs unified memory. */
void test_offsets_past_two_billion_elements(void **state)
{
    enum { S = 20 };
    /* Distance of rows in elements. The last row begins at element 19 * 2^28, which is more than 2^32. */
    const int64_t far = INT64_C(1) << 28;
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

/* Asserts that rows `far` elements apart in device memory give the same bits as contiguous rows. Returns false if the
 * device has too little memory. */
static bool same_bits_far_apart(const struct spec *s, int64_t far)
{
    /* Rows of different tensors alternate in memory, this many elements apart. */
    enum { SLOT = 256 };
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

/* Each case runs with three distances of rows. The last row of a tensor ends before element 2^31, begins at element
 * 2^31 or later, or begins at element 2^32 or later. */
void test_offsets_on_both_sides_of_2_31(void **state)
{
    static const struct spec cases[] = {
        SPEC(SIZES(80, 80, 64), HEADS(1, 1), BF16, .causal = true),
        SPEC(SIZES(80, 80, 64), HEADS(1, 1), BF16, .softcap = 5),
        /* With only 20 queries, a GPU uses its kernel for decoding. */
        SPEC(SIZES(20, 20, 64), HEADS(1, 1), BF16, .causal = true),
        SPEC(SIZES(80, 80, 64), HEADS(1, 1), .causal = true),
        SPEC(BACK, SIZES(80, 80, 64), HEADS(1, 1), BF16, .causal = true),
        SPEC(BACK, SIZES(80, 80, 64), HEADS(1, 1), .causal = true),
    };
    (void)state;
    if (bench.info.unified) skip();
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        /* Rows are a multiple of `unit` elements apart, because TMA needs multiples of 16 bytes. */
        const int64_t gaps = cases[n].Sq - 1, unit = 64;
        const int64_t below = ((INT64_C(1) << 31) - 64) / gaps / unit * unit;
        if (!same_bits_far_apart(&cases[n], below) || !same_bits_far_apart(&cases[n], below + unit) ||
            !same_bits_far_apart(&cases[n], 2 * below + 2 * unit))
            skip();
    }
}

void test_outputs_that_nobody_wants_are_not_needed(void **state)
{
    static const struct spec cases[] = {
        SPEC(.causal = true, BF16, .sinks = 1, .bias = 8, .alibi = 1),
        SPEC(BACK, .causal = true, BF16, .sinks = 1, .bias = 8, .alibi = 1),
        SPEC(BACK, .causal = true, BF16, SIZES(150, 140, 256)),
        SPEC(BACK, .causal = true, F16, SIZES(150, 140, 264), .alibi = 1),
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        for (int wanted = -1; wanted < ATTN_TENSOR_COUNT; wanted++) {
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

/* A long problem runs as several launches of limited time (steps). The results must have the same bits as those of a
 * single launch. */
void test_work_in_steps_has_the_bits_of_work_at_once(void **state)
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
        SPEC(BACK, SIZES(300, 150, 264), BF16, HEADS(2, 1), .causal = true),
        SPEC(BACK, SIZES(140, 100, 320), F16, HEADS(1, 1), .q_amp = 3e5),
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
        fixtures_must_run(&bench, list, 2);
        bench.in_steps = false;
        assert_outputs_equal(&steps, &at_once);
        assert_true(agrees(&cases[n]));
        fixture_clear(&at_once), fixture_clear(&steps);
    }
}

/* Returns a lower limit of the time in seconds that the library expects for the problem. The limit assumes the fastest
 * kernel (Hopper's for bfloat16 without options, see kernels/cuda/simple/simple.h), on as many multiprocessors as this
 * device has. */
static double least_tile_seconds(const struct spec *s)
{
    const double columns = (double)(s->D < 64 ? 64 : s->D) + (double)(s->Dv < 64 ? 64 : s->Dv);
    double pairs = (double)(s->B * s->H) * (double)s->Sq * (double)s->Sk;
    /* The library does not read the lengths of packed sequences. It assumes that all have equally many keys. */
    if (s->sequences) {
        int64_t queries = 0, keys = 0;
        for (int n = 0; n < s->sequences; n++) queries += s->q_lengths[n], keys += s->k_lengths[n];
        pairs = (double)(queries * s->H) * (double)(keys / s->sequences);
    }
    return 2 * pairs * columns / 3e14 * (s->op == ATTN_OP_BACKWARD ? 2.5 : 1) * 132 / bench.info.units;
}

/* If a device limits each launch to a very short time, a problem takes several launches. These launches must
 * compute the same tiles as a single launch. */
void test_one_head_in_steps_has_the_bits_of_one_launch(void **state)
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

/* ---- Tests of copying and clearing ranges of device memory ------------------------------------------------------- */

/* One call copies or clears more memory ranges (moves) than fit in one kernel launch. They have every length and
 * alignment, and one is long enough for several thread blocks. */
void test_moves_copy_and_clear_what_they_say_and_nothing_else(void **state)
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
        const size_t bytes = i == COUNT ? LONG : (size_t)i % 41;
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
