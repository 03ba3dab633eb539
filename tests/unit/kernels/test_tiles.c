/* test_tiles.c: compares intervals, counts and kinds of tiles (kernels/tiles.h) with a loop over all pairs, for all
 * small sizes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"

static const int64_t windows[] = { -1, 0, 1, 2, 5, 9, INT64_MAX };

/* Returns whether query i may see key j, by the definition of the masks in kernels/README.md. */
static bool permitted(bool causal, bool top_left, int64_t left, int64_t right, int64_t Sq, int64_t Sk, int64_t i,
                      int64_t j)
{
    const int64_t shifted = i + (top_left ? 0 : Sk - Sq);
    if (j < 0 || j >= Sk) return false;
    if (causal && j > shifted) return false;
    if (left >= 0 && left < 1000 && j < shifted - left) return false;
    if (right >= 0 && right < 1000 && j > shifted + right) return false;
    return true;
}

static void test_intervals_and_pairs_are_those_of_the_definition(void **state)
{
    (void)state;
    for (int64_t Sq = 0; Sq <= 7; Sq++)
        for (int64_t Sk = 0; Sk <= 7; Sk++)
            for (int options = 0; options < 4; options++)
                for (size_t l = 0; l < ARRAY_SIZE(windows); l++)
                    for (size_t r = 0; r < ARRAY_SIZE(windows); r++) {
                        attn_problem p = ATTN_PROBLEM_INIT;
                        p.q = attn_tensor_make(NULL, ATTN_F32, 4, (int64_t[]){ 1, Sq, 1, 8 });
                        p.k = p.v = attn_tensor_make(NULL, ATTN_F32, 4, (int64_t[]){ 1, Sk, 1, 8 });
                        p.causal = options & 1;
                        p.alignment = options & 2 ? ATTN_TOP_LEFT : ATTN_BOTTOM_RIGHT;
                        p.window_left = windows[l], p.window_right = windows[r];
                        const attn_geometry g = attn_geometry_of(&p);
                        const attn_sequence s = attn_sequence_of(&g, 0);
                        int64_t pairs = 0;
                        for (int64_t i = 0; i < Sq; i++) {
                            const attn_range keys = attn_keys_of(&g, &s, i);
                            assert_true(0 <= keys.lo && keys.lo <= keys.hi && keys.hi <= Sk);
                            for (int64_t j = 0; j < Sk; j++) {
                                const attn_range rows = attn_rows_of(&g, &s, j);
                                const bool may = permitted(p.causal, options & 2, windows[l], windows[r], Sq, Sk, i, j);
                                assert_true(0 <= rows.lo && rows.lo <= rows.hi && rows.hi <= Sq);
                                assert_int_equal(j >= keys.lo && j < keys.hi, may);
                                assert_int_equal(i >= rows.lo && i < rows.hi, may);
                                pairs += may;
                            }
                        }
                        assert_int_equal(attn_pairs_of(&g, &s), pairs);
                        assert_true(attn_flops(&p) == (double)pairs * 2 * 16);
                        for (int64_t r0 = 0; r0 < Sq; r0++)
                            for (int64_t r1 = r0 + 1; r1 <= Sq; r1++) {
                                const attn_range any = attn_keys_of_rows(&g, &s, r0, r1),
                                                 all = attn_keys_of_all_rows(&g, &s, r0, r1);
                                for (int64_t j = 0; j < Sk; j++) {
                                    bool one = false, every = true;
                                    for (int64_t i = r0; i < r1; i++) {
                                        const bool may = permitted(p.causal, options & 2, windows[l], windows[r], Sq,
                                                                   Sk, i, j);
                                        one |= may, every &= may;
                                    }
                                    if (one) assert_true(j >= any.lo && j < any.hi);
                                    assert_int_equal(j >= all.lo && j < all.hi, every);
                                }
                            }
                    }
}

static void test_clamped_sums_of_large_numbers(void **state)
{
    (void)state;
    assert_int_equal(attn_clamped_sum(1, INT32_MAX, INT32_MAX), (int64_t)INT32_MAX * ((int64_t)INT32_MAX + 1) / 2);
    assert_int_equal(attn_clamped_sum(ATTN_UNBOUNDED, INT32_MAX, INT32_MAX), (int64_t)INT32_MAX * INT32_MAX);
    assert_int_equal(attn_clamped_sum(-ATTN_UNBOUNDED, INT32_MAX, INT32_MAX), 0);
}

static void test_floor_division(void **state)
{
    (void)state;
    for (int64_t a = -20; a <= 20; a++)
        for (int64_t b = 1; b <= 6; b++) assert_int_equal(attn_floor_div(a, b), (int64_t)floor((double)a / (double)b));
}

/* A mask hides no pair of a free tile, and every pair of a hidden tile. The library may overlook such tiles, but must
 * never call another tile free or hidden. */
static void test_tile_kinds_are_never_wrong(void **state)
{
    static const struct {
        int n;
        bool causal;
    } kinds[] = { { 1, true }, { 2, true }, { 2, false }, { 4, false } };
    enum { SQ = 6, COLUMNS = 3 };
    struct rng r = { 3 };
    int free_tiles = 0, hidden_tiles = 0, missed_free = 0, missed_hidden = 0;
    (void)state;
    for (int n = 0; n < 40000; n++) {
        const int kind = n % 4;
        const int64_t r0 = rng_between(&r, 0, SQ - 1), r1 = rng_between(&r, r0 + 1, SQ);
        attn_mask columns[COLUMNS];
        attn_mask_extremes extremes = attn_mask_extremes_init();
        int hides = 0;
        for (int c = 0; c < COLUMNS; c++) {
            int32_t bounds[4];
            for (int b = 0; b < 4; b++) bounds[b] = (int32_t)rng_between(&r, 0, SQ);
            columns[c] = attn_mask_of(bounds, kinds[kind].n, kinds[kind].causal, SQ);
            attn_mask_extremes_add(&extremes, columns[c]);
            for (int64_t i = r0; i < r1; i++) {
                bool hidden;
                if (kinds[kind].n == 1) hidden = i >= bounds[0];
                else if (kinds[kind].causal) hidden = i >= bounds[0] && i < bounds[1];
                else if (kinds[kind].n == 2) hidden = i >= bounds[0] || i < bounds[1];
                else hidden = (i >= bounds[0] && i < bounds[1]) || (i >= bounds[2] && i < bounds[3]);
                assert_int_equal(attn_mask_hides(columns[c], i), hidden);
                hides += hidden;
            }
        }
        const attn_tile_kind said = attn_mask_classify(&extremes, r0, r1);
        if (said == ATTN_TILE_FREE) assert_int_equal(hides, 0), free_tiles++;
        else if (said == ATTN_TILE_HIDDEN) assert_int_equal(hides, COLUMNS * (r1 - r0)), hidden_tiles++;
        else if (hides == 0) missed_free++;
        else if (hides == COLUMNS * (r1 - r0)) missed_hidden++;
    }
    assert_true(free_tiles > 2000 && hidden_tiles > 500);
    (void)missed_free, (void)missed_hidden;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_intervals_and_pairs_are_those_of_the_definition),
        cmocka_unit_test(test_clamped_sums_of_large_numbers),
        cmocka_unit_test(test_floor_division),
        cmocka_unit_test(test_tile_kinds_are_never_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
