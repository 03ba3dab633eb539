/* test_count.c: tests the counts of (query, key) pairs and of tiles that masks leave visible, against a loop over
 * all pairs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"

static bool is_seen(const attn_problem *p, const attn_geometry *g, const attn_sequence *s, int64_t b, int64_t h,
                    int64_t i, int64_t j)
{
    const attn_range keys = attn_keys_of(g, s, i);
    const attn_view *const keep = &g->view[ATTN_T_keep_mask], *const bias = &g->view[ATTN_T_bias];
    const attn_view *const bounds = &g->view[ATTN_T_mask_startend_rows];
    const int64_t column = j - attn_keep_from(g, s);
    if (j < keys.lo || j >= keys.hi) return false;
    if (p->keep_mask.rank && column >= 0 && attn_load(ATTN_U8, keep->data, attn_at(keep, b, h, i) + column) == 0)
        return false;
    if (p->bias.rank && attn_load(bias->dtype, bias->data, attn_at(bias, b, h, i) + j) == -INFINITY) return false;
    if (!p->mask_startend_rows.rank) return true;
    const int32_t *const at = (const int32_t *)bounds->data + attn_at(bounds, b, h / g->mask_group, j);
    return !attn_mask_hides(attn_mask_of(at, g->mask_bounds, g->causal, g->dims.Sq), i);
}

static attn_counts by_pairs(const attn_problem *p, const int64_t tile[2])
{
    const attn_geometry g = attn_geometry_of(p);
    attn_counts found = { 0 };
    for (int64_t b = 0; b < g.dims.B; b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        for (int64_t h = 0; h < g.dims.H; h++)
            for (int64_t r0 = 0; r0 < s.Sq; r0 += tile[0])
                for (int64_t j0 = 0; j0 < s.Sk; j0 += tile[1]) {
                    int64_t seen = 0, all = 0;
                    for (int64_t i = r0; i < attn_min64(s.Sq, r0 + tile[0]); i++)
                        for (int64_t j = j0; j < attn_min64(s.Sk, j0 + tile[1]); j++, all++)
                            seen += is_seen(p, &g, &s, b, h, i, j);
                    found.pairs += (double)seen;
                    *(seen == 0 ? &found.skipped : seen == all ? &found.whole : &found.partial) += 1;
                }
    }
    return found;
}

static attn_counts count(const attn_problem *p, const int64_t tile[2])
{
    attn_counter *counter;
    attn_error err = { 0 };
    if (attn_counter_open(p, tile, &counter, &err) != ATTN_OK) fail_msg("%s", err.text);
    while (!attn_counter_step(counter)) continue;
    return attn_counter_close(counter);
}

/* Returns whether attn_counter's counts of pairs and tiles equal those of a loop over all pairs. */
static bool counts_well(const struct fixture *f, const int64_t tile[2])
{
    const attn_counts want = by_pairs(&f->p, tile), got = count(&f->p, tile), plain = count(&f->p, NULL);
    if (got.pairs == want.pairs && got.skipped == want.skipped && got.whole == want.whole &&
        got.partial == want.partial && plain.pairs == want.pairs)
        return true;
    fprintf(stderr,
            "tiles of %lld, %lld: %.0f pairs (%.0f alone), %.0f skipped, %.0f whole, %.0f partial; must be "
            "%.0f, %.0f, %.0f, %.0f\n",
            (long long)tile[0], (long long)tile[1], got.pairs, plain.pairs, got.skipped, got.whole, got.partial,
            want.pairs, want.skipped, want.whole, want.partial);
    spec_print(stderr, &f->spec);
    return false;
}

static void test_pairs_and_tiles_are_those_that_a_look_at_every_pair_finds(void **state)
{
    static const int64_t sizes[] = { 1, 7, 16, 64, 128, 1000 };
    struct rng r = { 5 };
    int failed = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= 300 && failed < 5; seed++) {
        static const int64_t lengths[] = { 0, 1, 17, 40, 64, 75 };
        struct spec s = SPEC(.data_seed = seed, .D = 1, .Dv = 1, .Hk = 2, .H = 4);
        s.Sq = lengths[rng_next(&r) % ARRAY_SIZE(lengths)], s.Sk = lengths[rng_next(&r) % ARRAY_SIZE(lengths)];
        s.B = rng_between(&r, 1, 3);
        s.causal = rng_chance(&r, 0.4);
        if (rng_chance(&r, 0.3)) s.alignment = ATTN_TOP_LEFT;
        if (rng_chance(&r, 0.4)) s.window_left = rng_between(&r, 0, 30);
        if (rng_chance(&r, 0.3)) s.window_right = rng_between(&r, 0, 30);
        if (rng_chance(&r, 0.2)) {
            s.sequences = 3;
            for (int n = 0; n < 3; n++)
                s.q_lengths[n] = (int)rng_between(&r, 0, 30), s.k_lengths[n] = (int)rng_between(&r, 0, 40);
        } else {
            s.seqlens_k = rng_chance(&r, 0.3), s.seqlens_q = rng_chance(&r, 0.2);
            if (rng_chance(&r, 0.25)) s.keep_mask = (int)rng_between(&r, 1, 8), s.keep = rng_uniform(&r);
            if (s.keep_mask && rng_chance(&r, 0.3)) s.keep_tail = (int)rng_between(&r, 1, 20);
            if (rng_chance(&r, 0.2)) s.bias = (int)rng_between(&r, 1, 8), s.bias_hidden = 0.3;
            if (rng_chance(&r, 0.5)) {
                s.mask_bounds = s.causal ? (int)rng_between(&r, 1, 2) : 2 * (int)rng_between(&r, 1, 2);
                s.mask_heads = (int)rng_between(&r, 0, 2);
                s.mask_kind = (enum mask_kind)rng_between(&r, 0, MASK_KINDS - 1);
            }
        }
        struct fixture f;
        fixture_make(&f, &s);
        const int64_t tile[2] = { sizes[rng_next(&r) % ARRAY_SIZE(sizes)], sizes[rng_next(&r) % ARRAY_SIZE(sizes)] };
        failed += !counts_well(&f, tile);
        fixture_clear(&f);
    }
    assert_int_equal(failed, 0);
}

/* The expected counts come from formulas, because counting pair by pair would take a day. */
static void test_long_problems_are_counted_at_once(void **state)
{
    const int64_t S = 1 << 20;
    attn_problem p = ATTN_PROBLEM_INIT;
    (void)state;
    p.op = ATTN_OP_OBSERVE;
    p.q = attn_tensor_make(NULL, ATTN_BF16, 4, (int64_t[]){ 1, S, 8, 64 });
    p.k = attn_tensor_make(NULL, ATTN_BF16, 4, (int64_t[]){ 1, S, 2, 64 });
    p.causal = true;
    const attn_counts causal = count(&p, (int64_t[]){ 128, 128 });
    assert_true(causal.pairs == 8.0 * (double)(S * (S + 1) / 2));
    assert_true(causal.partial == 8.0 * (S / 128));
    assert_true(causal.whole == 8.0 * (double)(S / 128 * (S / 128 - 1) / 2));
    assert_true(causal.skipped == causal.whole);

    int32_t *const ends = malloc((size_t)S * sizeof *ends); /* a FlashMask of documents of 1024 rows each */
    assert_non_null(ends);
    for (int64_t j = 0; j < S; j++) ends[j] = (int32_t)((j / 1024 + 1) * 1024);
    p.mask_startend_rows = attn_tensor_make(ends, ATTN_I32, 4, (int64_t[]){ 1, 1, S, 1 });
    const attn_counts documents = count(&p, (int64_t[]){ 1024, 1024 });
    assert_true(documents.pairs == 8.0 * (double)(S / 1024) * (1024 * 1025 / 2));
    assert_true(documents.partial == 8.0 * (S / 1024) && documents.whole == 0);
    free(ends);
}

static void test_what_would_take_too_long_is_refused(void **state)
{
    static const int32_t bounds[2] = { 1, 1 };
    attn_problem p = ATTN_PROBLEM_INIT;
    attn_counter *counter;
    attn_error err;
    (void)state;
    p.op = ATTN_OP_OBSERVE;
    p.q = attn_tensor_make(NULL, ATTN_BF16, 4, (int64_t[]){ 1, 1 << 24, 8, 64 });
    p.k = attn_tensor_make(NULL, ATTN_BF16, 4, (int64_t[]){ 1, 1 << 24, 2, 64 });
    p.causal = true;
    p.mask_startend_rows = attn_tensor_make((void *)bounds, ATTN_I32, 4, (int64_t[]){ 1, 1, 1 << 24, 1 });
    assert_int_equal(attn_counter_open(&p, (int64_t[]){ 16, 16 }, &counter, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.member, "/tile_size");
    assert_string_equal(err.text, "observe: counting pairs and tiles here takes 1.1e+12 steps, at most 4.29e+09 are "
                                  "taken; larger tiles take fewer");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pairs_and_tiles_are_those_that_a_look_at_every_pair_finds),
        cmocka_unit_test(test_long_problems_are_counted_at_once),
        cmocka_unit_test(test_what_would_take_too_long_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
