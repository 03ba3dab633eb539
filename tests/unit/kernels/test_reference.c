/* test_reference.c: tests of the reference backend. It defines what is correct for the other backends, so its results
 * are compared with independent sources:
 *
 *   examples     six problems small enough to be computed by hand (kernels/README.md, "Exact examples")
 *   NumPy        results in reference_golden.h, which make_reference_golden.py makes with tests/conformance/ref.py
 *   differences  central differences of the forward, for every gradient and with every option, also dropout
 *   identities   masks that mean the same in different ways must give the same numbers */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"

/* ---- Tests with examples whose results are exact ----------------------------------------------------------------- */

/* All examples have one head, D 2, scale 1, three queries and two keys. */
static void test_the_six_exact_examples(void **state)
{
    static float Q[] = { 1, 0, 0, 1, 1, 1 }, K[] = { 1, 0, 0, 2 }, V[] = { 1, 2, 3, 4 };
    static float dO[] = { 1, -1, 0.5f, 0, 0, 2 }, dLSE[] = { 0, 0, 1 }, sink[] = { 0 }, slope[] = { 0.5f };
    static const struct {
        const char *name;
        bool causal, top_left, sink, alibi;
        double softcap, out[6], lse[3], dq[6], dk[4], dv[4], dsink, dslope;
    } cases[] = {
        { "plain",
          false,
          false,
          false,
          false,
          0,
          { 1.537882843, 2.537882843, 2.761594156, 3.761594156, 2.462117157, 3.462117157 },
          { 1.313261688, 2.126928011, 2.313261688 },
          { 0, 0, -0.104993585, 0.209987171, -0.517506312, 3.035012623 },
          { -0.517506312, -0.622499897, 1.517506312, 1.622499897 },
          { 0.790660040, -0.193175736, 0.709339960, 1.193175736 },
          0,
          0 },
        { "causal, bottom right",
          true,
          false,
          false,
          false,
          0,
          { 0, 0, 1, 2, 2.462117157, 3.462117157 },
          { -INFINITY, 0, 2.313261688 },
          { 0, 0, 0, 0, -0.517506312, 3.035012623 },
          { -0.517506312, -0.517506312, 1.517506312, 1.517506312 },
          { 0.5, 0.537882843, 0, 1.462117157 },
          0,
          0 },
        { "causal, top left",
          true,
          true,
          false,
          false,
          0,
          { 1, 2, 2.761594156, 3.761594156, 2.462117157, 3.462117157 },
          { 1, 2.126928011, 2.313261688 },
          { 0, 0, -0.104993585, 0.209987171, -0.517506312, 3.035012623 },
          { -0.517506312, -0.622499897, 1.517506312, 1.622499897 },
          { 1.059601461, -0.462117157, 0.440398539, 1.462117157 },
          0,
          0 },
        { "causal, bottom right, sink 0",
          true,
          false,
          true,
          false,
          0,
          { 0, 0, 0.5, 1, 2.240451338, 3.150420765 },
          { 0, 0.693147181, 2.407605964 },
          { 0, 0, 0.125, 0, -0.318352959, 3.591181520 },
          { -0.318352959, -0.193352959, 1.795590760, 1.795590760 },
          { 0.25, 0.489456942, 0, 1.330481912 },
          -0.602237801,
          0 },
        { "softcap 1",
          false,
          false,
          false,
          false,
          1,
          { 1.636600516, 2.636600516, 2.447854937, 3.447854937, 2.100872474, 3.100872474 },
          { 1.144760135, 1.287091653, 1.561071737 },
          { 0, 0, -0.199856489, 0.028240052, -0.226895750, 0.217641418 },
          { -0.226895750, -0.426752239, 0.108820709, 0.122940735 },
          { 0.819736008, 0.217427784, 0.680263992, 0.782572216 },
          0,
          0 },
        { "ALiBi slope 0.5",
          false,
          false,
          false,
          true,
          0,
          { 1.364851048, 2.364851048, 2.635148952, 3.635148952, 2.635148952, 3.635148952 },
          { 0.701413278, 1.701413278, 2.201413278 },
          { 0, 0, -0.149146452, 0.298292904, -0.414160284, 2.828320569 },
          { -0.414160284, -0.563306737, 1.414160284, 1.563306737 },
          { 0.908787238, -0.452723429, 0.591212762, 1.452723429 },
          0,
          0.265013832 },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        float out[6], lse[3], dq[6], dk[4], dv[4], dsink[1] = { 0 }, dslope[1] = { 0 };
        attn_error err = { 0 };
        attn_problem p = ATTN_PROBLEM_INIT;
        p.q = attn_tensor_make(Q, ATTN_F32, 4, (int64_t[]){ 1, 3, 1, 2 });
        p.k = attn_tensor_make(K, ATTN_F32, 4, (int64_t[]){ 1, 2, 1, 2 });
        p.v = attn_tensor_make(V, ATTN_F32, 4, (int64_t[]){ 1, 2, 1, 2 });
        p.out = attn_tensor_make(out, ATTN_F32, 4, (int64_t[]){ 1, 3, 1, 2 });
        p.lse = attn_tensor_make(lse, ATTN_F32, 3, (int64_t[]){ 1, 1, 3 });
        p.has_scale = true, p.scale = 1, p.softcap = cases[n].softcap, p.causal = cases[n].causal;
        p.alignment = cases[n].top_left ? ATTN_TOP_LEFT : ATTN_BOTTOM_RIGHT;
        if (cases[n].sink) p.sinks = attn_tensor_make(sink, ATTN_F32, 1, (int64_t[]){ 1 });
        if (cases[n].alibi) p.alibi_slopes = attn_tensor_make(slope, ATTN_F32, 1, (int64_t[]){ 1 });
        assert_int_equal(attn_check(&p, &err), ATTN_OK);
        run_reference(&p);

        p.op = ATTN_OP_BACKWARD;
        p.dout = attn_tensor_make(dO, ATTN_F32, 4, (int64_t[]){ 1, 3, 1, 2 });
        p.dlse = attn_tensor_make(dLSE, ATTN_F32, 3, (int64_t[]){ 1, 1, 3 });
        p.dq = attn_tensor_make(dq, ATTN_F32, 4, (int64_t[]){ 1, 3, 1, 2 });
        p.dk = attn_tensor_make(dk, ATTN_F32, 4, (int64_t[]){ 1, 2, 1, 2 });
        p.dv = attn_tensor_make(dv, ATTN_F32, 4, (int64_t[]){ 1, 2, 1, 2 });
        if (cases[n].sink) p.dsinks = attn_tensor_make(dsink, ATTN_F32, 1, (int64_t[]){ 1 });
        if (cases[n].alibi) p.dalibi_slopes = attn_tensor_make(dslope, ATTN_F32, 1, (int64_t[]){ 1 });
        assert_int_equal(attn_check(&p, &err), ATTN_OK);
        run_reference(&p);

#define SAME(got, want, count)                                                           \
    for (int e = 0; e < count; e++)                                                      \
        if (!(got[e] == want[e] || fabs(got[e] - want[e]) < 4e-7 * (1 + fabs(want[e])))) \
    fail_msg("%s: " #got "[%d] is %.9g, must be %.9g", cases[n].name, e, (double)got[e], want[e])
        SAME(out, cases[n].out, 6);
        SAME(lse, cases[n].lse, 3);
        SAME(dq, cases[n].dq, 6);
        SAME(dk, cases[n].dk, 4);
        SAME(dv, cases[n].dv, 4);
        SAME(dsink, (&cases[n].dsink), 1);
        SAME(dslope, (&cases[n].dslope), 1);
#undef SAME
    }
}

/* ---- Tests against results of NumPy ------------------------------------------------------------------------------ */

struct golden {
    const char *name;
    int B, Sq, Sk, H, Hk, D, Dv, causal, top_left, left, right, has_scale, alibi, sinks, bias, keep, mask, mask_heads,
        dlse;
    double scale, softcap;
    int has_seqlens, seqlens[4], sequences, q_lengths[4], k_lengths[4];
    const double *want[ATTN_TENSOR_COUNT];
};

#include "reference_golden.h"

enum { SALT_Q = 1, SALT_K, SALT_V, SALT_DOUT, SALT_DLSE, SALT_BIAS, SALT_SINKS, SALT_ALIBI, SALT_KEEP };

static double golden_value(int64_t n, int salt)
{
    return (double)((n * 7919 + (int64_t)salt * 104729) % 257 - 128) / 64;
}

static void fill_golden(const attn_tensor *t, int salt)
{
    for (int64_t n = tensor_elements(t), e = 0; e < n; e++) tensor_set(t, e, golden_value(e, salt));
}

static void test_it_agrees_with_numpy(void **state)
{
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(goldens); n++) {
        const struct golden *g = &goldens[n];
        struct spec s = SPEC(.op = ATTN_OP_FORWARD, .B = g->B, .H = g->H, .Hk = g->Hk, .Sq = g->Sq, .Sk = g->Sk,
                             .D = g->D, .Dv = g->Dv, .causal = g->causal,
                             .alignment = g->top_left ? ATTN_TOP_LEFT : ATTN_BOTTOM_RIGHT, .window_left = g->left,
                             .window_right = g->right, .softcap = g->softcap, .has_scale = g->has_scale,
                             .scale = g->scale, .alibi = g->alibi, .sinks = g->sinks, .bias = g->bias,
                             .keep_mask = g->keep, .mask_bounds = g->mask,
                             .mask_heads = g->mask_heads == g->H ? 2 : g->mask_heads == g->Hk,
                             .seqlens_k = g->has_seqlens, .sequences = g->sequences, .dlse = g->dlse, .strided = n & 1);
        for (int b = 0; b < g->sequences; b++) s.q_lengths[b] = g->q_lengths[b], s.k_lengths[b] = g->k_lengths[b];
        for (int back = 0; back < 2; back++) {
            struct fixture f;
            s.op = back ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
            fixture_make(&f, &s);
            fill_golden(&f.p.q, SALT_Q), fill_golden(&f.p.k, SALT_K), fill_golden(&f.p.v, SALT_V);
            fill_golden(&f.p.bias, SALT_BIAS), fill_golden(&f.p.sinks, SALT_SINKS),
                fill_golden(&f.p.alibi_slopes, SALT_ALIBI);
            for (int64_t e = 0; e < tensor_elements(&f.p.keep_mask); e++)
                tensor_set(&f.p.keep_mask, e, golden_value(e, SALT_KEEP) > -0.5);
            for (int64_t e = 0; e < tensor_elements(&f.p.mask_startend_rows); e++)
                tensor_set(&f.p.mask_startend_rows, e, (double)((e * 5 + 3) % (g->Sq + 1)));
            for (int b = 0; g->has_seqlens && b < g->B; b++) tensor_set(&f.p.seqlens_k, b, g->seqlens[b]);
            if (back) fill_golden(&f.p.dout, SALT_DOUT);
            if (back) fill_golden(&f.p.dlse, SALT_DLSE);
            run_reference(&f.p);
            for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
                if (is_output(&f.p, (attn_tensor_id)id))
                    for (int64_t e = 0; e < tensor_elements(&f.p.tensor[id]); e++) {
                        const double got = tensor_get(&f.p.tensor[id], e), want = g->want[id][e];
                        if (!(got == want || fabs(got - want) <= 3e-7 * (1 + fabs(want))))
                            fail_msg("%s: %s: element %lld is %.9g, must be %.9g", g->name, attn_tensors[id].name,
                                     (long long)e, got, want);
                    }
            fixture_clear(&f);
        }
    }
}

/* ---- Tests of gradients against finite differences of the forward ------------------------------------------------ */

/* Returns the number whose gradients a backward computes: dout . out + dlse . lse. */
static double loss(const struct fixture *f)
{
    attn_problem p = f->p;
    float *out = malloc((size_t)tensor_elements(&f->p.dout) * sizeof *out), *lse;
    int64_t shape[ATTN_MAX_RANK];
    attn_tensor t;
    double sum = 0;
    p.op = ATTN_OP_FORWARD;
    assert_int_equal(attn_output(&p, ATTN_T_out, ATTN_F32, &t, NULL), ATTN_OK);
    p.out = t, p.out.data = out;
    assert_int_equal(attn_output(&p, ATTN_T_lse, ATTN_F32, &t, NULL), ATTN_OK);
    lse = malloc((size_t)tensor_elements(&t) * sizeof *lse);
    p.lse = t, p.lse.data = lse;
    memcpy(shape, t.shape, sizeof shape);
    run_reference(&p);
    for (int64_t n = tensor_elements(&p.out), e = 0; e < n; e++) sum += (double)out[e] * tensor_get(&f->p.dout, e);
    for (int64_t n = tensor_elements(&p.lse), e = 0; e < n; e++)
        if (f->p.dlse.rank && isfinite(lse[e])) sum += (double)lse[e] * tensor_get(&f->p.dlse, e);
    free(out), free(lse);
    return sum;
}

static void test_gradients_are_the_slopes_of_forward(void **state)
{
    static const struct spec cases[] = {
        SPEC(.Sq = 4, .Sk = 5, .D = 3, .Dv = 2, .H = 2, .Hk = 1),
        SPEC(.Sq = 6, .Sk = 4, .D = 3, .Dv = 2, .H = 2, .Hk = 2, .causal = true, .dlse = true),
        SPEC(.Sq = 4, .Sk = 6, .D = 3, .Dv = 4, .H = 4, .Hk = 2, .causal = true, .dlse = true, .sinks = 1,
             .softcap = 1.5, .alibi = 1, .B = 2),
        SPEC(.Sq = 5, .Sk = 6, .D = 2, .Dv = 2, .B = 2, .bias = 8, .alibi = 2, .dlse = true, .dropout_p = 0.4,
             .seed = 11),
        SPEC(.Sq = 5, .Sk = 6, .D = 2, .Dv = 2, .B = 2, .bias = 6, .keep_mask = 8, .keep = 0.7, .sinks = 1,
             .dropout_p = 0.3, .seed = 12, .layout = ATTN_BHSD),
        SPEC(.Sq = 7, .Sk = 6, .D = 2, .Dv = 2, .B = 2, .bias = 1, .mask_bounds = 4, .window_left = 3,
             .window_right = 2, .alignment = ATTN_TOP_LEFT, .strided = true),
        SPEC(.Sq = 4, .Sk = 6, .D = 2, .Dv = 2, .B = 4, .seqlens_k = true, .causal = true, .alibi = 1, .sinks = 1,
             .dlse = true, .has_scale = true, .scale = -0.8),
        SPEC(.sequences = 3, .q_lengths = { 3, 0, 4 }, .k_lengths = { 4, 2, 3 }, .D = 2, .Dv = 3, .causal = true,
             .sinks = 1, .alibi = 2, .dropout_p = 0.2, .dlse = true),
        SPEC(.Sq = 2, .Sk = 3, .D = 1024, .Dv = 2, .H = 1, .Hk = 1, .causal = true, .dlse = true),
        SPEC(.Sq = 2, .Sk = 3, .D = 3, .Dv = 600, .H = 2, .Hk = 1, .sinks = 1, .softcap = 1.5, .alibi = 1),
    };
    static const struct {
        attn_tensor_id input, gradient;
    } pairs[] = {
        { ATTN_T_q, ATTN_T_dq },       { ATTN_T_k, ATTN_T_dk },         { ATTN_T_v, ATTN_T_dv },
        { ATTN_T_bias, ATTN_T_dbias }, { ATTN_T_sinks, ATTN_T_dsinks }, { ATTN_T_alibi_slopes, ATTN_T_dalibi_slopes },
    };
    const double step = 0x1p-7;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++)
        for (int give = 0; give < 2; give++) {
            struct spec s = cases[n];
            struct fixture f;
            s.op = ATTN_OP_BACKWARD;
            s.give_forward = give;
            fixture_make(&f, &s);
            run_reference(&f.p);
            for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
                const attn_tensor *x = &f.p.tensor[pairs[i].input], *dx = &f.p.tensor[pairs[i].gradient];
                for (int64_t count = tensor_elements(x), e = 0; e < count; e++) {
                    const double at = tensor_get(x, e);
                    double above, below, up, down, slope;
                    tensor_set(x, e, at + step);
                    up = tensor_get(x, e), above = loss(&f);
                    tensor_set(x, e, at - step);
                    down = tensor_get(x, e), below = loss(&f);
                    tensor_set(x, e, at);
                    slope = (above - below) / (up - down);
                    if (fabs(slope - tensor_get(dx, e)) > 2e-3 * (1 + fabs(slope))) {
                        spec_print(stderr, &s);
                        fail_msg("%s: element %lld is %.9g, the difference quotient %.9g",
                                 attn_tensors[pairs[i].gradient].name, (long long)e, tensor_get(dx, e), slope);
                    }
                }
            }
            fixture_clear(&f);
        }
}

/* ---- Tests of problems that must have equal results -------------------------------------------------------------- */

static void copy_inputs(struct fixture *to, const struct fixture *from)
{
    static const attn_tensor_id ids[] = { ATTN_T_q, ATTN_T_k, ATTN_T_v, ATTN_T_dout };
    for (size_t i = 0; i < ARRAY_SIZE(ids); i++)
        if (to->p.tensor[ids[i]].rank)
            for (int64_t n = tensor_elements(&to->p.tensor[ids[i]]), e = 0; e < n; e++)
                tensor_set(&to->p.tensor[ids[i]], e, tensor_get(&from->p.tensor[ids[i]], e));
}

/* Three documents of 7, 5 and 9 tokens are separated by cu_seqlens, by FlashMask, by keep_mask, and by a bias of
 * -inf. */
static void test_documents_are_the_same_in_four_ways(void **state)
{
    enum { S = 21 };
    static const int end[] = { 7, 12, S };
    (void)state;
    for (attn_op op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
        struct spec specs[4] = {
            SPEC(.op = op, .sequences = 3, .q_lengths = { 7, 5, 9 }, .k_lengths = { 7, 5, 9 }, .causal = true, .D = 8,
                 .Dv = 8),
            SPEC(.op = op, .Sq = S, .Sk = S, .D = 8, .Dv = 8, .causal = true, .mask_bounds = 1),
            SPEC(.op = op, .Sq = S, .Sk = S, .D = 8, .Dv = 8, .keep_mask = 5),
            SPEC(.op = op, .Sq = S, .Sk = S, .D = 8, .Dv = 8, .bias = 5),
        };
        struct fixture f[4];
        char why[400];
        for (int n = 0; n < 4; n++) {
            fixture_make(&f[n], &specs[n]);
            copy_inputs(&f[n], &f[0]);
            for (int j = 0; j < S; j++) {
                const int document = j < end[0] ? 0 : j < end[1] ? 1 : 2;
                if (n == 1) tensor_set(&f[n].p.mask_startend_rows, j, end[document]);
                for (int i = 0; i < S; i++) {
                    const bool may = j <= i && i < end[document];
                    if (n == 2) tensor_set(&f[n].p.keep_mask, i * S + j, may);
                    if (n == 3) tensor_set(&f[n].p.bias, i * S + j, may ? 0 : -INFINITY);
                }
            }
            run_reference(&f[n].p);
            f[n].p.dbias.rank = 0;
            if (!outputs_equal(&f[n], &f[0], why, sizeof why)) fail_msg("way %d: %s", n, why);
        }
        for (int n = 0; n < 4; n++) fixture_clear(&f[n]);
    }
}

static void test_dropout_drops_its_share(void **state)
{
    /* v is 1 and all scores are equal, so out * Sk * (1 - p) is the number of keys that dropout keeps. */
    const struct spec s = SPEC(.Sq = 64, .Sk = 1000, .D = 1, .Dv = 1, .has_scale = true, .scale = 0, .dropout_p = 0.3,
                               .seed = 99);
    struct fixture f;
    double kept = 0;
    (void)state;
    fixture_make(&f, &s);
    for (int64_t e = 0; e < tensor_elements(&f.p.v); e++) tensor_set(&f.p.v, e, 1);
    run_reference(&f.p);
    for (int64_t e = 0; e < tensor_elements(&f.p.out); e++) {
        const double in_row = tensor_get(&f.p.out, e) * 1000 * (1 - 0.3);
        assert_true(fabs(in_row - round(in_row)) < 1e-3);
        kept += in_row;
    }
    for (int64_t e = 0; e < tensor_elements(&f.p.lse); e++)
        assert_true(fabs(tensor_get(&f.p.lse, e) - log(1000)) < 1e-6);
    kept /= 64 * 2 * 1000;
    if (fabs(kept - 0.7) > 0.006) fail_msg("kept %.4f, must be near 0.7", kept);
    fixture_clear(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_six_exact_examples),
        cmocka_unit_test(test_it_agrees_with_numpy),
        cmocka_unit_test(test_gradients_are_the_slopes_of_forward),
        cmocka_unit_test(test_documents_are_the_same_in_four_ways),
        cmocka_unit_test(test_dropout_drops_its_share),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
