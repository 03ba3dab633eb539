/* backends_merge.c: attn_merge() against float64, and what its contract says of empty parts, NaN and infinities. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/dtype.h"

#include "backends.h"

enum { PARTS = ATTN_MERGE_PARTS };

struct shape {
    int64_t B, Sq, H, Dv;
    int parts;
    bool packed, bhsd; /* bhsd: out of the parts lies with its heads before its rows */
    attn_dtype dtype, out_dtype;
};

/* Parts and results in host memory, and views of the same in the device's. */
struct scene {
    struct shape s;
    int64_t rows, numbers; /* of lse and of out */
    size_t part_bytes, out_bytes;
    char *outs, *out; /* [parts] of part_bytes */
    float *lses, *lse;
    char *memory; /* the device's: outs, lses, out, lse */
    attn_result part[PARTS], whole;
};

static attn_tensor out_of(const struct shape *s, void *data, attn_dtype dtype, bool swapped)
{
    const int64_t shape[] = { s->B, s->Sq, s->H, s->Dv };
    attn_tensor t = attn_tensor_make(data, dtype, s->packed ? 3 : 4, s->packed ? shape + 1 : shape);
    if (swapped) t.stride[t.rank - 3] = s->Dv, t.stride[t.rank - 2] = s->Sq * s->Dv;
    return t;
}

static attn_tensor lse_of(const struct shape *s, void *data)
{
    const int64_t shape[] = { s->B, s->H, s->Sq };
    return attn_tensor_make(data, ATTN_F32, s->packed ? 2 : 3, s->packed ? shape + 1 : shape);
}

/* Where element d of row n = (b Sq + i) H + h is in a part's out; its lse. */
static int64_t out_at(const struct shape *s, int64_t n, bool swapped)
{
    const int64_t h = n % s->H, i = n / s->H % s->Sq, b = n / s->H / s->Sq;
    return (swapped ? (b * s->H + h) * s->Sq + i : n) * s->Dv;
}

static int64_t lse_at(const struct shape *s, int64_t n)
{
    return (n / s->H / s->Sq * s->H + n % s->H) * s->Sq + n / s->H % s->Sq;
}

static void scene_make(struct scene *x, const struct shape *s)
{
    attn_error err;
    *x = (struct scene){ .s = *s, .rows = s->B * s->Sq * s->H };
    x->numbers = x->rows * s->Dv;
    x->part_bytes = (size_t)x->numbers * 4, x->out_bytes = (size_t)x->numbers * 4;
    x->outs = calloc((size_t)s->parts, x->part_bytes), x->out = calloc(1, x->out_bytes);
    x->lses = calloc((size_t)s->parts, (size_t)x->rows * 4), x->lse = calloc((size_t)x->rows, 4);
    const size_t lse_bytes = (size_t)x->rows * 4;
    void *memory;
    assert_int_equal(
        attn_device_alloc(bench.device, (size_t)(s->parts + 1) * (x->part_bytes + lse_bytes), &memory, &err), ATTN_OK);
    x->memory = memory;
    for (int p = 0; p <= s->parts; p++) {
        void *const out = x->memory + (size_t)p * x->part_bytes;
        void *const lse = x->memory + (size_t)(s->parts + 1) * x->part_bytes + (size_t)p * lse_bytes;
        attn_result *r = p < s->parts ? &x->part[p] : &x->whole;
        r->out = out_of(s, out, p < s->parts ? s->dtype : s->out_dtype, p < s->parts && s->bhsd);
        r->lse = lse_of(s, lse);
    }
}

static void scene_clear(struct scene *x)
{
    attn_device_free(bench.device, x->memory);
    free(x->outs), free(x->out), free(x->lses), free(x->lse);
}

static void scene_fill(struct scene *x, uint64_t seed)
{
    struct rng r = { seed };
    for (int p = 0; p < x->s.parts; p++) {
        for (int64_t n = 0; n < x->rows; n++)
            x->lses[p * x->rows + n] = rng_chance(&r, 0.125) ? -INFINITY : (float)(rng_uniform(&r) * 12 - 6);
        for (int64_t n = 0; n < x->numbers; n++)
            attn_store(x->s.dtype, x->outs + (size_t)p * x->part_bytes, n, rng_uniform(&r) * 4 - 2);
    }
}

static void scene_run(struct scene *x)
{
    attn_error err;
    const size_t lse_bytes = (size_t)x->rows * 4;
    for (int p = 0; p < x->s.parts; p++) {
        attn_copy(bench.stream, x->part[p].out.data, x->outs + (size_t)p * x->part_bytes, x->part_bytes, ATTN_TO_DEVICE,
                  &err);
        attn_copy(bench.stream, x->part[p].lse.data, x->lses + p * x->rows, lse_bytes, ATTN_TO_DEVICE, &err);
    }
    if (attn_merge(bench.stream, x->part, x->s.parts, &x->whole, &err) != ATTN_OK) fail_msg("%s", err.text);
    attn_copy(bench.stream, x->out, x->whole.out.data, x->out_bytes, ATTN_FROM_DEVICE, &err);
    attn_copy(bench.stream, x->lse, x->whole.lse.data, lse_bytes, ATTN_FROM_DEVICE, &err);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
}

/* Row n in float64; out[d] and the lse. */
static double want_row(const struct scene *x, int64_t n, double *out)
{
    const struct shape *s = &x->s;
    double top = -INFINITY, sum = 0;
    for (int p = 0; p < s->parts; p++) top = fmax(top, x->lses[p * x->rows + lse_at(s, n)]);
    for (int64_t d = 0; d < s->Dv; d++) out[d] = 0;
    for (int p = 0; p < s->parts; p++) {
        const double lse = x->lses[p * x->rows + lse_at(s, n)];
        if (lse == -INFINITY) continue;
        sum += exp(lse - top);
        for (int64_t d = 0; d < s->Dv; d++)
            out[d] += exp(lse - top) *
                      attn_load(s->dtype, x->outs + (size_t)p * x->part_bytes, out_at(s, n, s->bhsd) + d);
    }
    for (int64_t d = 0; d < s->Dv; d++) out[d] = sum == 0 ? 0 : out[d] / sum;
    return sum == 0 ? -INFINITY : top + log(sum);
}

/* Of every dtype and layout, and lengths on both sides of what a loop does at a time. */
void test_merged_parts_are_the_whole(void **state)
{
    static const struct shape shapes[] = {
        { 1, 1, 1, 64, 1, .dtype = ATTN_F32 },
        { 2, 5, 3, 64, 2, .dtype = ATTN_F32 },
        { 2, 7, 4, 128, 3, .bhsd = true, .dtype = ATTN_F16, .out_dtype = ATTN_F32 },
        { 1, 33, 2, 129, 5, .packed = true, .dtype = ATTN_BF16, .out_dtype = ATTN_BF16 },
        { 1, 70, 3, 1, 8, .packed = true, .bhsd = true, .dtype = ATTN_F32, .out_dtype = ATTN_F16 },
        { 3, 2, 1, 512, PARTS, .dtype = ATTN_F16, .out_dtype = ATTN_F16 },
    };
    static const double tolerance[] = { [ATTN_F32] = 2e-6, [ATTN_F16] = 1e-3, [ATTN_BF16] = 8e-3 };
    (void)state;
    for (size_t c = 0; c < ARRAY_SIZE(shapes); c++) {
        struct scene x;
        double want[512];
        scene_make(&x, &shapes[c]);
        scene_fill(&x, 100 + c);
        scene_run(&x);
        for (int64_t n = 0; n < x.rows; n++) {
            const double lse = want_row(&x, n, want), got = x.lse[lse_at(&x.s, n)];
            if (!(got == lse || fabs(got - lse) < 4e-6))
                fail_msg("case %zu row %lld: lse %g, not %g", c, (long long)n, got, lse);
            for (int64_t d = 0; d < x.s.Dv; d++) {
                const double out = attn_load(x.s.out_dtype, x.out, n * x.s.Dv + d);
                if (!(fabs(out - want[d]) <= tolerance[x.s.out_dtype] * 2))
                    fail_msg("case %zu row %lld column %lld: %g, not %g", c, (long long)n, (long long)d, out, want[d]);
            }
        }
        scene_clear(&x);
    }
}

/* Two parts of a row a case: (lse, out) of each, and what comes out. */
void test_merges_of_empty_and_strange_parts(void **state)
{
    static const float cases[][6] = {
        { -INFINITY, 5, -INFINITY, 7, -INFINITY, 0 },        /* all empty */
        { -INFINITY, NAN, 3.5f, 7.25f, 3.5f, 7.25f },        /* an empty part's out is not read */
        { -0.75f, 0.1f, -INFINITY, INFINITY, -0.75f, 0.1f }, /* the merge of one part is that part */
        { NAN, 1, 0, 1, NAN, NAN },                          /* a NaN in lse */
        { 0, 1, NAN, 1, NAN, NAN },                          /* the same behind */
        { INFINITY, 1, 0, 1, NAN, NAN },                     /* inf / inf is not known */
        { -INFINITY, 1, INFINITY, 1, NAN, NAN },             /* not of one part either */
        { 0, 1, -200, NAN, 0, NAN },                         /* a NaN counts however little it weighs */
        { 90000, 2, 0, 7, 90000, 2 },                        /* far apart: no overflow, no -inf - -inf */
        { -90000, 2, -90200, 7, -90000, 2 },                 /* the same below */
        { 0, 3e38f, 0, 3e38f, 0.693147182f, 3e38f },         /* a sum of shares does not overflow */
    };
    enum { ROWS = ARRAY_SIZE(cases) };
    struct scene x;
    (void)state;
    scene_make(&x, &(struct shape){ 1, ROWS, 1, 1, 2, .dtype = ATTN_F32 });
    for (int n = 0; n < ROWS; n++)
        for (int p = 0; p < 2; p++) {
            x.lses[p * ROWS + n] = cases[n][2 * p];
            attn_store(ATTN_F32, x.outs + (size_t)p * x.part_bytes, n, cases[n][2 * p + 1]);
        }
    scene_run(&x);
    for (int n = 0; n < ROWS; n++) {
        const float got[] = { x.lse[n], ((const float *)x.out)[n] };
        const bool alone = cases[n][0] == -INFINITY || cases[n][2] == -INFINITY; /* then it is exact */
        for (int e = 0; e < 2; e++) {
            const float want = cases[n][4 + e];
            if (!(isnan(want) ? isnan(got[e])
                              : got[e] == want || (!alone && fabsf(got[e] - want) <= fabsf(want) * 2e-7f)))
                fail_msg("case %d, %s: %g, not %g", n, e ? "out" : "lse", got[e], want);
        }
    }
    scene_clear(&x);
}

void test_merges_that_disagree_are_refused(void **state)
{
    struct scene x;
    attn_error err;
    (void)state;
    scene_make(&x, &(struct shape){ 2, 3, 4, 8, 3, .dtype = ATTN_F16 });
#define REFUSED(where)                                                                   \
    assert_int_equal(attn_merge(bench.stream, x.part, 3, &x.whole, &err), ATTN_INVALID); \
    assert_string_equal(err.member, where)
#define WITH(field, value, where)    \
    do {                             \
        const struct scene kept = x; \
        x.field = value;             \
        REFUSED(where);              \
        x = kept;                    \
    } while (0)
    assert_int_equal(attn_merge(bench.stream, x.part, 0, &x.whole, &err), ATTN_INVALID);
    assert_int_equal(attn_merge(bench.stream, x.part, PARTS + 1, &x.whole, &err), ATTN_INVALID);
    assert_string_equal(err.member, "/parts");
    WITH(part[0].out.rank, 2, "/parts/0/out");
    WITH(part[2].out.dtype, ATTN_F32, "/parts/2/out");
    WITH(part[2].out.dtype, ATTN_F8E4M3, "/parts/2/out");
    WITH(part[1].out.shape[1], 4, "/parts/1/out");
    WITH(part[1].out.stride[1], 64, "/parts/1/out");
    WITH(part[1].out.data, NULL, "/parts/1/out");
    WITH(part[2].lse.dtype, ATTN_F16, "/parts/2/lse");
    WITH(part[2].lse.shape[2], 4, "/parts/2/lse");
    WITH(part[2].lse.stride[1], 7, "/parts/2/lse");
    WITH(whole.out.stride[3], 2, "/out");
    WITH(whole.lse.rank, 2, "/lse");
#undef WITH
#undef REFUSED
    x.whole.out.rank = 0; /* not wanted */
    assert_int_equal(attn_merge(bench.stream, x.part, 3, &x.whole, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
    scene_clear(&x);
}
