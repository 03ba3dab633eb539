/* test_cpu_range.c: tests of the limits of float32: products that overflow, scores that are clamped, products of a
 * single key that cancel. Every test runs with each vector table (functions for one kind of processor) that works here.
 * test_backends.c tests the default table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"
#include "kernels/cpu/flash.h"

/* The vector table under test: a set of functions for one kind of processor. run_with() replaces its dots_exact() by
 * counting_dots(). */
static const struct simd *counted;
static int64_t exact_keys;

static void counting_dots(int n, int d, const float *q, const void *K, attn_dtype dtype, int64_t stride, double *S)
{
    exact_keys += n;
    counted->dots_exact(n, d, q, K, dtype, stride, S);
}

/* Runs the problem with the vector functions `simd`, or with the reference backend if `simd` is NULL. */
static void run_with(const struct simd *simd, const struct fixture *f)
{
    if (simd == NULL) {
        run_reference(&f->p);
        return;
    }
    struct simd own = *simd;
    struct pool *pool;
    size_t bytes;
    attn_error err = { 0 };
    const attn_plan plan = { .problem = &f->p };
    counted = simd;
    own.dots_exact = counting_dots;
    assert_int_equal(pool_open(1, NULL, &pool, &err), ATTN_OK);
    assert_int_equal(flash_run_bytes(&own, 1, &plan, 1, &bytes, &err), ATTN_OK);
    char *workspace = aligned_alloc(64, bytes);
    assert_non_null(workspace);
    memset(workspace, 0xff, bytes);
    flash_run(&own, pool, &plan, 1, workspace, NULL);
    free(workspace);
    pool_close(pool);
}

/* Computes out and lse, the inputs of a backward, by a forward with the vector functions `simd`. */
static void give_forward_of(const struct simd *simd, struct fixture *f)
{
    struct fixture forward = *f;
    attn_error err = { 0 };
    const attn_tensor_id outputs[] = { ATTN_T_out, ATTN_T_lse };
    forward.p.op = ATTN_OP_FORWARD;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (attn_tensors[id].role == ATTN_ROLE_OUT_BACK || id == ATTN_T_dout || id == ATTN_T_dlse)
            forward.p.tensor[id] = (attn_tensor){ 0 };
    for (size_t n = 0; n < ARRAY_SIZE(outputs); n++) {
        attn_tensor *t = &forward.p.tensor[outputs[n]];
        assert_false(attn_output(&forward.p, outputs[n], f->p.q.dtype, t, &err));
        free(f->block[outputs[n]]);
        fixture_add(f, outputs[n], t->dtype, t->rank, t->shape);
        *t = f->p.tensor[outputs[n]];
    }
    run_with(simd, &forward);
}

#define FOR_TABLES(simd)                                      \
    for (const char *const *name = simd_names; *name; name++) \
        for (const struct simd *simd = simd_find(*name); simd; simd = NULL)

/* ---- Tests of products beyond float32's range -------------------------------------------------------------------- */

/* clang-format off */
#define F32  .dtype = ATTN_F32, .out_dtype = ATTN_F32
#define BF16 .dtype = ATTN_BF16, .out_dtype = ATTN_BF16
#define WILD .q_amp = 3e19, .has_scale = true, .scale = 2e-39
static const struct spec wild_specs[] = {
    SPEC(.name = "packed products", F32, WILD, .Sq = 70, .Sk = 90, .D = 16, .Dv = 24),
    SPEC(.name = "packed products, bfloat16", BF16, WILD, .Sq = 70, .Sk = 90, .D = 16, .Dv = 24),
    SPEC(.name = "few rows", F32, WILD, .Sq = 3, .Sk = 90, .D = 16, .Dv = 24),
    SPEC(.name = "few rows, bfloat16", BF16, WILD, .Sq = 1, .Sk = 1300, .D = 16, .Dv = 24),
    SPEC(.name = "grouped heads in one tile", F32, WILD, .H = 6, .Hk = 2, .Sq = 7, .Sk = 300, .D = 64, .Dv = 64),
    SPEC(.name = "many keys in several parts", BF16, WILD, .Sq = 40, .Sk = 4200, .D = 16, .Dv = 8),
    SPEC(.name = "softcap", F32, WILD, .softcap = 10, .Sq = 70, .Sk = 90, .D = 16, .Dv = 24),
    SPEC(.name = "softcap, a negative scale", F32, .q_amp = 3e19, .has_scale = true, .scale = -2e-39, .softcap = 2,
         .Sq = 70, .Sk = 90, .D = 16, .Dv = 24),
    SPEC(.name = "softcap, few rows", BF16, WILD, .softcap = 10, .Sq = 2, .Sk = 90, .D = 16, .Dv = 24),
    SPEC(.name = "causal", F32, WILD, .causal = true, .Sq = 130, .Sk = 150, .D = 16, .Dv = 24),
    SPEC(.name = "every option", F32, WILD, .causal = true, .Sq = 90, .Sk = 90, .bias = 5, .alibi = 1, .sinks = 1,
         .keep_mask = 5, .keep = 0.8, .dropout_p = 0.3, .seed = 5),
    SPEC(.name = "FlashMask", F32, WILD, .Sq = 90, .Sk = 150, .mask_bounds = 2, .mask_kind = 1),
    SPEC(.name = "packed sequences", BF16, WILD, .sequences = 4, .q_lengths = { 1, 30, 70, 2 },
         .k_lengths = { 9, 30, 130, 70 }),
    SPEC(.name = "NaN and infinity that nobody sees", F32, WILD, .causal = true, .Sq = 60, .Sk = 90,
         .poison_unseen = true),
    SPEC(.name = "NaN in a key", F32, WILD, .causal = true, .Sq = 60, .Sk = 60, .poison = 1),
    SPEC(.name = "the default scale", F32, .q_amp = 1e19, .Sq = 50, .Sk = 60),
    SPEC(.name = "the default scale, few rows", BF16, .q_amp = 1e19, .Sq = 2, .Sk = 60),
    SPEC(.name = "pages", F32, WILD, .Sq = 2, .Sk = 128, .page_size = 16, .seqlens_k = true),
    SPEC(.name = "pages, packed products", BF16, WILD, .Sq = 40, .Sk = 128, .page_size = 16, .seqlens_k = true),
    SPEC(.name = "float8 keys", F32, .fp8_keys = true, .q_amp = 3e37, .has_scale = true, .scale = 1e-37, .Sq = 2,
         .Sk = 70, .fp8_scales = true),
};
/* clang-format on */

static bool agrees(const struct simd *simd, const struct spec *s)
{
    struct fixture got, want;
    char why[256] = "";
    fixture_make(&want, s);
    fixture_make(&got, s);
    run_reference(&want.p);
    run_with(simd, &got);
    const bool good = fixture_compare(&got, &want, NULL, why, sizeof why);
    if (!good) {
        fprintf(stderr, "%s, %s: %s\n", simd->name, s->name, why);
        spec_print(stderr, s);
    }
    fixture_clear(&got);
    fixture_clear(&want);
    return good;
}

static void test_a_product_beyond_float32_counts_where_its_score_is_ordinary(void **state)
{
    int failed = 0;
    (void)state;
    FOR_TABLES(simd)
    for (size_t n = 0; n < ARRAY_SIZE(wild_specs); n++)
        /* way 0: a forward; 1: a backward; 2: a backward that is given out and lse */
        for (int way = 0; way < 3; way++) {
            struct spec s = wild_specs[n];
            s.op = way ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
            s.give_forward = way == 2;
            if (way && (s.page_size || s.fp8_keys)) continue;
            if (!agrees(simd, &s)) failed++;
        }
    assert_int_equal(failed, 0);
}

static void set_all(const attn_tensor *t, const double *values)
{
    for (int64_t n = 0; n < tensor_elements(t); n++) tensor_set(t, n, values[n]);
}

/* q . k is -3.6e38 for one key, which is beyond float32, and 2e37 for the other. The score (scale times the product) is
 * only -3.6 and must count. */
static void test_a_key_whose_product_overflows_below_is_not_lost(void **state)
{
    static const struct {
        double q, softcap, out, lse, dv[2];
    } cases[] = {
        { 2e19, 0, 1.97811873, 0.2221242, { 0.0218812, 0.9781188 } },
        { -2e19, 10, 1.0252797, 3.47774581, { 0.9747203, 0.0252797 } },
    };
    (void)state;
    FOR_TABLES(simd)
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        for (int rows = 1; rows <= 40; rows += 39) {
            const struct spec s = SPEC(.H = 1, .Hk = 1, .Sq = rows, .Sk = 2, .D = 1, .Dv = 1, .has_scale = true,
                                       .scale = 1e-38, .softcap = cases[n].softcap);
            struct spec back = s;
            struct fixture f, b;
            back.op = ATTN_OP_BACKWARD;
            fixture_make(&f, &s);
            fixture_make(&b, &back);
            struct fixture *const both[] = { &f, &b };
            for (int i = 0; i < 2; i++) {
                for (int r = 0; r < rows; r++) tensor_set(&both[i]->p.q, r, cases[n].q);
                set_all(&both[i]->p.k, (double[]){ -1.8e19, 1e18 });
                set_all(&both[i]->p.v, (double[]){ 1, 2 });
            }
            for (int r = 0; r < rows; r++) tensor_set(&b.p.dout, r, 1);
            run_with(simd, &f);
            run_with(simd, &b);
            for (int r = 0; r < rows; r++) {
                assert_float_equal(tensor_get(&f.p.out, r), cases[n].out, 2e-6);
                assert_float_equal(tensor_get(&f.p.lse, r), cases[n].lse, 2e-6);
            }
            for (int key = 0; key < 2; key++)
                assert_float_equal(tensor_get(&b.p.dv, key) / rows, cases[n].dv[key], 2e-6);
            fixture_clear(&f);
            fixture_clear(&b);
        }
}

/* ---- Tests of rows whose scores are all clamped to one number ---------------------------------------------------- */

/* Writes a bias like a mask of Hugging Face's models: `least` for the first 24 keys and for keys after the query, and 0
 * for all others. */
static void put_mask(const attn_tensor *bias, double least)
{
    const int64_t Sq = bias->shape[2], Sk = bias->shape[3];
    for (int64_t n = 0; n < tensor_elements(bias); n++) {
        const int64_t i = n / Sk % Sq, j = n % Sk;
        tensor_set(bias, n, j > i + Sk - Sq || j < 24 ? least : 0);
    }
}

static void test_rows_whose_scores_are_all_clamped_alike_take_no_score_in_double(void **state)
{
    static const struct spec specs[] = {
        SPEC(.name = "padded", .Sq = 70, .Sk = 70, .bias = 5, .causal = true),
        SPEC(.name = "padded, not causal", .Sq = 70, .Sk = 90, .bias = 5, .alibi = 1),
        SPEC(.name = "float16", .dtype = ATTN_F16, .out_dtype = ATTN_F16, .Sq = 70, .Sk = 70, .bias = 1 + 4),
        SPEC(.name = "bfloat16", .dtype = ATTN_BF16, .out_dtype = ATTN_BF16, .bias_dtype = ATTN_BF16, .Sq = 70,
             .Sk = 70, .bias = 8, .softcap = 20),
        SPEC(.name = "few rows", .Sq = 3, .Sk = 20, .bias = 5),
        SPEC(.name = "few rows, many keys", .Sq = 1, .Sk = 1300, .bias = 1, .alibi = 1),
        SPEC(.name = "sinks", .Sq = 70, .Sk = 70, .bias = 5, .H = 4, .Hk = 4, .sinks = 2),
        SPEC(.name = "dropout", .Sq = 70, .Sk = 70, .bias = 5, .dropout_p = 0.5, .seed = 3),
        SPEC(.name = "with a mask", .Sq = 70, .Sk = 70, .bias = 5, .keep_mask = 5, .keep = 0.6),
        SPEC(.name = "grouped heads in a tile", .Sq = 6, .Sk = 70, .bias = 5, .H = 6, .Hk = 2),
    };
    static const double levels[] = { -FLT_MAX, -3.38e38, -1e30 };
    int failed = 0;
    (void)state;
    FOR_TABLES(simd)
    for (size_t n = 0; n < ARRAY_SIZE(specs) * ARRAY_SIZE(levels) * 3; n++) {
        struct spec s = specs[n / 3 / ARRAY_SIZE(levels)];
        const double level = s.bias_dtype == ATTN_BF16 ? fmax(-3.38e38, levels[n / 3 % ARRAY_SIZE(levels)])
                                                       : levels[n / 3 % ARRAY_SIZE(levels)];
        struct fixture got, want;
        char why[256] = "";
        s.op = n % 3 ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
        /* `bias_levels` = 1 widens the tolerances, because the sum with so large a bias keeps few bits of an
         * ordinary score. */
        s.bias_levels = 1;
        fixture_make(&want, &s);
        fixture_make(&got, &s);
        put_mask(&want.p.bias, level);
        put_mask(&got.p.bias, level);
        if (n % 3 == 2) give_forward_of(simd, &got);
        exact_keys = 0;
        run_reference(&want.p);
        run_with(simd, &got);
        if (!fixture_compare(&got, &want, NULL, why, sizeof why) || exact_keys > 0) {
            fprintf(stderr, "%s, %s, %g, way %d: %s; %lld keys in double\n", simd->name, s.name, level, (int)(n % 3),
                    why, (long long)exact_keys);
            failed++;
        }
        fixture_clear(&got);
        fixture_clear(&want);
    }
    assert_int_equal(failed, 0);
}

/* ---- Tests of rows that see one key ------------------------------------------------------------------------------ */

/* Fills a tensor with large numbers whose products add up to little, so that float32's result depends on the order of
 * the sum. */
static void put_cancelling(const attn_tensor *t, struct rng *r, double sign)
{
    const int64_t D = t->shape[t->rank - 1];
    for (int64_t n = 0; n < tensor_elements(t); n++)
        tensor_set(t, n, (n % D % 2 ? sign : 1) * 400 * (0.5 + rng_uniform(r)));
}

/* What makes a row see only one key: the problem has one key (ALONE), or a keep_mask, a bias, FlashMask or a window
 * hides the others. */
enum one_key { ALONE, KEPT, BIASED, FLASHMASKED, WINDOWED, ONE_KEYS };

static void show_one_key(struct fixture *f, enum one_key how, int64_t key)
{
    for (int64_t n = 0; how == KEPT && n < tensor_elements(&f->p.keep_mask); n++)
        tensor_set(&f->p.keep_mask, n, n % f->p.keep_mask.shape[3] == key);
    for (int64_t n = 0; how == BIASED && n < tensor_elements(&f->p.bias); n++)
        tensor_set(&f->p.bias, n, n % f->p.bias.shape[3] == key ? 0.25 : -INFINITY);
    for (int64_t n = 0; how == FLASHMASKED && n < tensor_elements(&f->p.mask_startend_rows); n++) {
        /* FlashMask: all queries see `key` (lts is Sq, ute is 0), and no query sees another key. */
        const bool seen = n / 2 % f->p.mask_startend_rows.shape[2] == key;
        tensor_set(&f->p.mask_startend_rows, n, n % 2 == 0 && seen ? (double)f->spec.Sq : 0);
    }
}

/* Returns whether P is exactly 1 in rows that see one key. dout is 1, so dv of a key must be the number of rows that
 * see only this key. */
static bool has_p_1(const struct simd *simd, const struct spec *s, enum one_key how, bool given)
{
    struct rng r = { s->data_seed };
    struct fixture f;
    bool good = true;
    const int64_t key = how == ALONE ? 0 : rng_between(&r, 0, s->Sk - 1);
    fixture_make(&f, s);
    put_cancelling(&f.p.q, &r, -1);
    put_cancelling(&f.p.k, &r, 1);
    show_one_key(&f, how, key);
    for (int64_t n = 0; n < tensor_elements(&f.p.dout); n++) tensor_set(&f.p.dout, n, 1);
    if (given) give_forward_of(simd, &f);
    run_with(simd, &f);
    const int64_t Dv = s->Dv, H = s->H, Hk = s->Hk;
    double *sum = calloc((size_t)(s->Sk * Hk * Dv), sizeof *sum);
    for (int64_t n = 0; n < tensor_elements(&f.p.dout); n++) {
        const int64_t i = n / Dv / H, h = n / Dv % H, j = how == WINDOWED ? i + s->Sk - s->Sq : key;
        if (j >= 0) sum[(j * Hk + h / (H / Hk)) * Dv + n % Dv] += tensor_get(&f.p.dout, n);
    }
    for (int64_t n = 0; n < tensor_elements(&f.p.dv); n++) good &= tensor_get(&f.p.dv, n) == sum[n];
    free(sum);
    fixture_clear(&f);
    return good;
}

static int count_rows_without_p_1(const struct simd *simd)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    static const int64_t groups[] = { 1, 1, 2, 5 };
    enum { COUNT = 250 };
    struct rng r = { 77 };
    int failed = 0;
    for (int n = 0; n < COUNT; n++) {
        const enum one_key how = (enum one_key)rng_between(&r, 0, ONE_KEYS - 1);
        struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .dtype = dtypes[n % 3], .Hk = rng_between(&r, 1, 2), .Dv = 8,
                             .data_seed = rng_next(&r));
        s.out_dtype = s.dtype;
        s.H = s.Hk * groups[rng_between(&r, 0, 3)];
        s.D = rng_chance(&r, 0.5) ? rng_between(&r, 1, 64) : rng_between(&r, 1, 256);
        s.Sq = rng_between(&r, 1, 40);
        s.Sk = how == ALONE ? 1 : rng_between(&r, 2, 300);
        s.alibi = how != BIASED && s.dtype == ATTN_BF16 && rng_chance(&r, 0.3);
        if (how == KEPT) s.keep_mask = 1 + (int)rng_between(&r, 0, 7), s.keep = 1;
        if (how == BIASED) s.bias = 1 + (int)rng_between(&r, 0, 7);
        if (how == FLASHMASKED) s.mask_bounds = 2;
        if (how == WINDOWED) s.window_left = s.window_right = 0;
        const bool given = rng_chance(&r, 0.5);
        if (has_p_1(simd, &s, how, given)) continue;
        fprintf(stderr, "%s, one key of kind %d, %s: P is not 1\n", simd ? simd->name : "reference", (int)how,
                given ? "given" : "alone");
        spec_print(stderr, &s);
        failed++;
    }
    return failed;
}

static void test_one_key_has_p_1_to_the_last_bit(void **state)
{
    int failed = count_rows_without_p_1(NULL);
    (void)state;
    FOR_TABLES(simd)
    failed += count_rows_without_p_1(simd);
    assert_int_equal(failed, 0);
}

static void test_products_that_cancel_give_the_one_key_all_of_dout(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    for (int way = 0; way < 2; way++) {
        const struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .H = 1, .Hk = 1, .Sq = 1, .Sk = 1, .D = 4, .Dv = 1);
        struct fixture f;
        fixture_make(&f, &s);
        set_all(&f.p.q, (double[]){ 261.6, 217, -374.8, 331.9 });
        set_all(&f.p.k, (double[]){ -63.1, 184.6, 376.1, 353.8 });
        set_all(&f.p.v, (double[]){ 1 });
        set_all(&f.p.dout, (double[]){ 1 });
        if (way) give_forward_of(simd, &f);
        run_with(simd, &f);
        assert_true(tensor_get(&f.p.dv, 0) == 1);
        fixture_clear(&f);
    }
}

/* P is e^(score - lse), and the caller gives an exact lse. A score that is computed in float32 would have an error of
 * 30, because it is a sum of products of 1e7 that cancel. */
static void test_one_key_has_p_1_where_a_given_lse_holds_more_of_its_score_than_float32(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    for (int n = 0; n < 24; n++) {
        const struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .Sq = n % 2 ? 40 : 5, .Sk = n % 4 < 2 ? 1 : 50, .D = 16,
                                   .Dv = 8, .H = 3, .Hk = 1, .has_scale = true, .scale = n % 3 ? -1e7 : 1e7,
                                   .keep_mask = 1, .keep = 1, .give_forward = true, .data_seed = (uint64_t)n + 1);
        struct fixture f;
        fixture_make(&f, &s);
        show_one_key(&f, KEPT, 0);
        attn_problem forward = f.p;
        forward.op = ATTN_OP_FORWARD;
        run_reference(&forward);
        for (int64_t at = 0; at < tensor_elements(&f.p.dout); at++) tensor_set(&f.p.dout, at, 1);
        run_with(simd, &f);
        for (int64_t d = 0; d < s.Dv; d++)
            if (tensor_get(&f.p.dv, d) != (double)(s.Sq * s.H)) {
                spec_print(stderr, &s);
                fail_msg("%s: dv is %.9g, must be %d", simd->name, tensor_get(&f.p.dv, d), (int)(s.Sq * s.H));
            }
        fixture_clear(&f);
    }
}

/* For two equal keys, P = e^(score - lse) must be exactly one half. So forward and backward must add the products of
 * a score in the same order. */
static void test_lse_is_that_of_the_scores_that_gradients_are_made_of(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    struct rng r = { 78 };
    (void)state;
    FOR_TABLES(simd)
    for (int n = 0; n < 120; n++) {
        struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .dtype = dtypes[n % 3], .H = 1, .Hk = 1, .Sk = 2, .Dv = 1,
                             .data_seed = rng_next(&r));
        struct fixture f;
        s.out_dtype = s.dtype;
        s.D = rng_between(&r, 1, 256);
        s.Sq = n % 2 ? rng_between(&r, 1, 8) : rng_between(&r, 9, 40);
        fixture_make(&f, &s);
        put_cancelling(&f.p.q, &r, -1);
        put_cancelling(&f.p.k, &r, 1);
        for (int64_t d = 0; d < s.D; d++) tensor_set(&f.p.k, s.D + d, tensor_get(&f.p.k, d));
        for (int64_t i = 0; i < s.Sq; i++) tensor_set(&f.p.dout, i, 1);
        if (n % 4 < 2) give_forward_of(simd, &f);
        /* The largest |score|. Scores and lse may each have an error of 2^-24 times this number. */
        double size = 0;
        for (int64_t i = 0; i < s.Sq; i++) {
            double z = 0;
            for (int64_t d = 0; d < s.D; d++) z += tensor_get(&f.p.q, i * s.D + d) * tensor_get(&f.p.k, d);
            size = fmax(size, fabs(z) / sqrt((double)s.D));
        }
        run_with(simd, &f);
        for (int64_t key = 0; key < 2; key++) {
            const double error = fabs(tensor_get(&f.p.dv, key) / (double)s.Sq - 0.5);
            const double rounding = s.dtype == ATTN_F32 ? 0 : s.dtype == ATTN_F16 ? 0x1p-11 : 0x1p-8;
            /* A sum in float32 would be off by 1e-7 * 64000 sqrt(D), far more than this limit. */
            if (error > 3e-7 * (1 + size) + rounding) {
                spec_print(stderr, &s);
                fail_msg("%s: P is off by %g; scores are of %g", simd->name, error, size);
            }
        }
        fixture_clear(&f);
    }
}

/* P must be rounded to bfloat16 before it is multiplied by dropout's factor 1 / (1 - p). Otherwise dq is not 0. */
static void test_dropout_leaves_the_one_key_its_value_times_one_factor(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    static const double rounding[] = { 0x1p-24, 0x1p-11, 0x1p-8 };
    struct rng r = { 79 };
    (void)state;
    FOR_TABLES(simd)
    for (int n = 0; n < 120; n++) {
        struct spec s = SPEC(.op = ATTN_OP_BACKWARD, .dtype = dtypes[n % 3], .out_dtype = dtypes[n % 3], .H = 3,
                             .Hk = 1, .Sk = 1, .D = 24, .Dv = 24, .seed = rng_next(&r), .data_seed = rng_next(&r));
        struct fixture f;
        const bool given = n % 2;
        s.Sq = n % 4 < 2 ? 1 : rng_between(&r, 9, 40);
        s.dropout_p = 0.1 + 0.8 * rng_uniform(&r);
        fixture_make(&f, &s);
        if (given) give_forward_of(simd, &f);
        run_with(simd, &f);
        for (int64_t at = 0; given && at < tensor_elements(&f.p.out); at++) {
            const double got = tensor_get(&f.p.out, at), want = tensor_get(&f.p.v, at % s.Dv) / (1 - s.dropout_p);
            if (got != 0 && fabs(got - want) > (rounding[n % 3] + 3e-7) * fabs(want)) {
                spec_print(stderr, &s);
                fail_msg("%s: out is %.9g, must be %.9g", simd->name, got, want);
            }
        }
        for (int64_t at = 0; !given && at < tensor_elements(&f.p.dq); at++)
            /* dP is about 20, so one rounding of dP to float32 gives dq an error of about 20 * 1e-7. */
            if (fabs(tensor_get(&f.p.dq, at)) > 1e-4) {
                spec_print(stderr, &s);
                fail_msg("%s: dq is %.9g, must be 0", simd->name, tensor_get(&f.p.dq, at));
            }
        fixture_clear(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_product_beyond_float32_counts_where_its_score_is_ordinary),
        cmocka_unit_test(test_a_key_whose_product_overflows_below_is_not_lost),
        cmocka_unit_test(test_rows_whose_scores_are_all_clamped_alike_take_no_score_in_double),
        cmocka_unit_test(test_one_key_has_p_1_to_the_last_bit),
        cmocka_unit_test(test_products_that_cancel_give_the_one_key_all_of_dout),
        cmocka_unit_test(test_one_key_has_p_1_where_a_given_lse_holds_more_of_its_score_than_float32),
        cmocka_unit_test(test_lse_is_that_of_the_scores_that_gradients_are_made_of),
        cmocka_unit_test(test_dropout_leaves_the_one_key_its_value_times_one_factor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
