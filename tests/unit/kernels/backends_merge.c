/* backends_merge.c: tests of attn_merge(), which joins results of attention over parts of the keys. Results are
 * compared with float64, and gradients with finite differences. */
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
    bool packed, bhsd; /* bhsd: `out` of each part has the axis of heads before the axis of queries */
    attn_dtype dtype, out_dtype;
};

/* A merge: the results of attention over parts of the keys, and the result for all keys. Each lies in host and device
 * memory. */
struct scene {
    struct shape s;
    int64_t rows, numbers; /* rows: number of elements of lse; numbers: number of elements of `out` */
    size_t part_bytes, out_bytes;
    char *outs, *out; /* outs: `out` of all parts, in blocks of part_bytes bytes; out: the merged `out` */
    float *lses, *lse;
    char *memory; /* device memory for outs, lses, out and lse, in this order */
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

/* Returns the offset in a part's `out` of row n = (b Sq + i) H + h. */
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
    const attn_merge_problem m = { .count = x->s.parts, .parts = x->part, .whole = x->whole };
    if (attn_merge(bench.stream, &m, &err) != ATTN_OK) fail_msg("%s", err.text);
    attn_copy(bench.stream, x->out, x->whole.out.data, x->out_bytes, ATTN_FROM_DEVICE, &err);
    attn_copy(bench.stream, x->lse, x->whole.lse.data, lse_bytes, ATTN_FROM_DEVICE, &err);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
}

/* Computes row n of the merged result in float64: fills out[d] and returns lse. */
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

/* The numbers of elements lie just below and above those that a loop handles at a time. */
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

/* Each case has lse and out of part 0, lse and out of part 1, and the expected lse and out. A part whose lse is -inf is
 * empty. */
void test_merges_of_empty_and_strange_parts(void **state)
{
    static const float cases[][6] = {
        { -INFINITY, 5, -INFINITY, 7, -INFINITY, 0 },
        /* The first part of the merge has no keys (lse is -inf), so its `out` is not read and may be NaN. */
        { -INFINITY, NAN, 3.5f, 7.25f, 3.5f, 7.25f },
        /* The second part of the merge has no keys (lse is -inf), so its infinite `out` is ignored. */
        { -0.75f, 0.1f, -INFINITY, INFINITY, -0.75f, 0.1f },
        { NAN, 1, 0, 1, NAN, NAN },
        { 0, 1, NAN, 1, NAN, NAN },
        { INFINITY, 1, 0, 1, NAN, NAN },
        { -INFINITY, 1, INFINITY, 1, NAN, NAN },
        /* NaN in one part's `out` makes the result NaN, even if the part's weight (here exp(-200)) is tiny */
        { 0, 1, -200, NAN, 0, NAN },
        { 90000, 2, 0, 7, 90000, 2 },
        { -90000, 2, -90200, 7, -90000, 2 },
        { 0, 3e38f, 0, 3e38f, 0.693147182f, 3e38f },
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
        const bool alone = cases[n][0] == -INFINITY || cases[n][2] == -INFINITY;
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
    attn_merge_problem m = { .count = 3, .parts = x.part, .whole = x.whole };
    attn_result gradients[3];
#define REFUSED(where, says)                                            \
    assert_int_equal(attn_merge(bench.stream, &m, &err), ATTN_INVALID); \
    assert_string_equal(err.member, where);                             \
    assert_string_equal(err.text, says)
#define WITH(field, value, where, says)      \
    do {                                     \
        const struct scene kept = x;         \
        const attn_merge_problem kept_m = m; \
        field = value;                       \
        REFUSED(where, says);                \
        x = kept, m = kept_m;                \
    } while (0)
    WITH(m.count, 0, "/parts", "parts: there are 0, must be 1 to 64");
    WITH(m.count, PARTS + 1, "/parts", "parts: there are 65, must be 1 to 64");
    WITH(x.part[0].out.rank, 2, "/parts/0/out/shape",
         "parts.0.out: must have 4 dimensions, [B, Sq, H, Dv], or packed 3, [total_q, H, Dv]");
    WITH(x.part[2].out.dtype, ATTN_F32, "/parts/2/out/dtype",
         "parts.2.out: dtype is float32, must be float16, as in parts.0.out");
    WITH(x.part[0].out.dtype, ATTN_F8E4M3, "/parts/0/out/dtype",
         "parts.0.out: dtype is float8_e4m3fn, must be float32, float16 or bfloat16");
    WITH(x.part[1].out.shape[1], 4, "/parts/1/out/shape/1",
         "parts.1.out: shape[1] is 4, must be 3, the rows of parts.0.out");
    WITH(x.part[1].out.stride[1], 64, "/parts/1/out", "parts.1.out: must have the strides of the first part");
    WITH(x.part[1].out.data, NULL, "/parts/1/out", "parts.1.out: has no memory");
    WITH(x.part[2].lse.dtype, ATTN_F16, "/parts/2/lse/dtype", "parts.2.lse: dtype is float16, must be float32");
    WITH(x.part[2].lse.rank, 2, "/parts/2/lse/shape",
         "parts.2.lse: has 2 dimensions, must have 3: [batch, heads, rows]");
    WITH(x.part[0].lse.shape[2], 4, "/parts/0/lse/shape/2",
         "parts.0.lse: shape[2] is 4, must be 3, the rows of parts.0.out");
    WITH(x.part[2].lse.stride[1], 7, "/parts/2/lse", "parts.2.lse: must have the strides of the first part");
    WITH(m.whole.out.stride[3], 2, "/out", "out: the stride of the last axis must be 1");
    WITH(m.whole.lse.rank, 2, "/lse/shape", "lse: has 2 dimensions, must have 3: [batch, heads, rows]");
    WITH(m.sinks, attn_tensor_make(x.lse, ATTN_F32, 1, (const int64_t[]){ 3 }), "/sinks/shape/0",
         "sinks: shape[0] is 3, must be 4, the heads of parts.0.out");
    WITH(m.dsinks, attn_tensor_make(x.lse, ATTN_F32, 1, (const int64_t[]){ 4 }), "/dsinks",
         "dsinks: there are no sinks");
    memcpy(gradients, x.part, sizeof gradients);
    WITH(m.gradients, gradients, "/dout", "dout: is missing, must be given for gradients");
    WITH(m.dlse, x.whole.lse, "/dout", "dout: is missing, must be given for gradients");
    m.dout = x.whole.out;
    m.gradients = gradients;
    WITH(m.dout.shape[3], 9, "/dout/shape/3", "dout: shape[3] is 9, must be 8, the head size of parts.0.out");
    gradients[1].lse.shape[0] = 1;
    REFUSED("/gradients/1/lse/shape/0", "gradients.1.lse: shape[0] is 1, must be 2, the batch of parts.0.out");
#undef WITH
#undef REFUSED
    m = (attn_merge_problem){ .count = 3, .parts = x.part, .whole = { .lse = x.whole.lse } };
    assert_int_equal(attn_merge(bench.stream, &m, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
    scene_clear(&x);
}

/* A merge must have the same bits whether strides or the member `layout` say that `out` is bhsd. */
void test_merges_of_a_layout_are_those_of_its_views(void **state)
{
    struct scene x;
    attn_error err;
    enum { ROWS = 2 * 5 * 3, NUMBERS = ROWS * 7 };
    float by_strides[NUMBERS], lse[ROWS];
    (void)state;
    scene_make(&x, &(struct shape){ 2, 5, 3, 7, 2, .bhsd = true, .dtype = ATTN_F32 });
    scene_fill(&x, 5);
    scene_run(&x);
    memcpy(by_strides, x.out, sizeof by_strides);
    memcpy(lse, x.lse, sizeof lse);
    attn_merge_problem m = { .count = 2, .layout = ATTN_BHSD, .parts = x.part, .whole = x.whole };
    const int64_t shape[] = { 2, 3, 5, 7 };
    for (int p = 0; p < 2; p++) x.part[p].out = attn_tensor_make(x.part[p].out.data, ATTN_F32, 4, shape);
    m.whole.out = attn_tensor_make(x.whole.out.data, ATTN_F32, 4, shape);
    if (attn_merge(bench.stream, &m, &err) != ATTN_OK) fail_msg("%s", err.text);
    attn_copy(bench.stream, x.out, x.whole.out.data, x.out_bytes, ATTN_FROM_DEVICE, &err);
    attn_copy(bench.stream, x.lse, x.whole.lse.data, sizeof lse, ATTN_FROM_DEVICE, &err);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
    assert_memory_equal(x.lse, lse, sizeof lse);
    for (int64_t n = 0; n < ROWS; n++)
        assert_memory_equal((float *)x.out + out_at(&x.s, n, true), by_strides + 7 * n, 7 * sizeof *by_strides);
    x.part[1].out.shape[1] = 5, x.part[1].out.shape[2] = 3;
    assert_int_equal(attn_merge(bench.stream, &m, &err), ATTN_INVALID);
    assert_string_equal(err.text, "parts.1.out: shape[1] is 5, must be 3, the heads of parts.0.out");
    scene_clear(&x);
}

/* ---- Tests of the gradients of a merge --------------------------------------------------------------------------- */

/* All tensors of a merge, and their gradients for the loss dout . out + dlse . lse. The struct can be read as one array
 * of floats, with the inputs first. */
enum { GB = 2, GS = 3, GH = 2, GD = 5, GP = 4, GROWS = GB * GS * GH, GOUT = GROWS * GD };
struct gradients {
    float outs[GP][GOUT], lses[GP][GROWS], sinks[GH], dout[GOUT], dlse[GROWS];
    float douts[GP][GOUT], dlses[GP][GROWS], dsinks[GH], out[GOUT], lse[GROWS];
};

/* Returns the loss in float64, after `by` is added to the input to which `changed` points. */
static double loss(const struct gradients *g, const float *changed, double by)
{
#define AT(x) ((double)(x) + (&(x) == changed ? by : 0))
    double sum_of_all = 0;
    for (int n = 0; n < GROWS; n++) {
        const int h = n % GH, i = n / GH % GS, b = n / GH / GS, l = (b * GH + h) * GS + i;
        double sum = exp(AT(g->sinks[h]));
        for (int p = 0; p < GP; p++) sum += exp(AT(g->lses[p][l]));
        const double lse = log(sum);
        sum_of_all += g->dlse[l] * lse;
        for (int p = 0; p < GP; p++)
            for (int d = 0; d < GD && g->lses[p][l] != -INFINITY; d++)
                sum_of_all += exp(AT(g->lses[p][l]) - lse) * AT(g->outs[p][n * GD + d]) * g->dout[n * GD + d];
    }
    return sum_of_all;
#undef AT
}

static void check_difference(const struct gradients *g, const float *input, double got, const char *name)
{
    const double step = 1e-4, want = (loss(g, input, step) - loss(g, input, -step)) / (2 * step);
    if (!(fabs(got - want) <= 1e-5 * (1 + fabs(want)))) fail_msg("%s: %.9g, not %.9g", name, got, want);
}

static void run_gradients(struct gradients *g)
{
    const int64_t out[] = { GB, GS, GH, GD }, lse[] = { GB, GH, GS }, heads[] = { GH };
    attn_result parts[GP], gradients[GP];
    attn_error err;
    void *memory;
    assert_int_equal(attn_device_alloc(bench.device, sizeof *g, &memory, &err), ATTN_OK);
    struct gradients *const there = memory;
#define TENSOR(x, rank, shape) attn_tensor_make(x, ATTN_F32, rank, shape)
    for (int p = 0; p < GP; p++) {
        parts[p] = (attn_result){ TENSOR(there->outs[p], 4, out), TENSOR(there->lses[p], 3, lse) };
        gradients[p] = (attn_result){ TENSOR(there->douts[p], 4, out), TENSOR(there->dlses[p], 3, lse) };
    }
    attn_merge_problem m = { .count = GP, .parts = parts, .gradients = gradients };
    m.sinks = TENSOR(there->sinks, 1, heads);
    m.dsinks = TENSOR(there->dsinks, 1, heads);
    m.dout = TENSOR(there->dout, 4, out);
    m.dlse = TENSOR(there->dlse, 3, lse);
    m.whole = (attn_result){ TENSOR(there->out, 4, out), TENSOR(there->lse, 3, lse) };
#undef TENSOR
    attn_copy(bench.stream, there, g, sizeof *g, ATTN_TO_DEVICE, &err);
    if (attn_merge(bench.stream, &m, &err) != ATTN_OK) fail_msg("%s", err.text);
    attn_copy(bench.stream, g, there, sizeof *g, ATTN_FROM_DEVICE, &err);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
    attn_device_free(bench.device, memory);
}

static void fill_gradients(struct gradients *g, uint64_t seed)
{
    struct rng r = { seed };
    float *const numbers = (float *)g;
    memset(g, 0x7f, sizeof *g);
    for (size_t n = 0; n < offsetof(struct gradients, douts) / sizeof *numbers; n++)
        numbers[n] = (float)(rng_uniform(&r) * 4 - 2);
}

void test_gradients_of_a_merge_are_the_differences_of_its_loss(void **state)
{
    struct gradients g;
    (void)state;
    fill_gradients(&g, 7);
    g.lses[1][4] = -INFINITY, g.outs[1][4] = 1;
    for (int p = 0; p < GP; p++) g.lses[p][7] = -INFINITY;
    run_gradients(&g);
    for (int p = 0; p < GP; p++) {
        for (int n = 0; n < GOUT; n++) check_difference(&g, &g.outs[p][n], g.douts[p][n], "dout");
        for (int n = 0; n < GROWS; n++)
            if (g.lses[p][n] == -INFINITY) assert_true(g.dlses[p][n] == 0);
            else check_difference(&g, &g.lses[p][n], g.dlses[p][n], "dlse");
    }
    for (int h = 0; h < GH; h++) check_difference(&g, &g.sinks[h], g.dsinks[h], "dsinks");
}

/* `out` of an empty part (with an lse of -inf) may be NaN without effect, even if dout is infinite. In a row without
 * any part or sink all gradients are 0. */
void test_gradients_of_empty_parts_are_zeros(void **state)
{
    struct gradients g;
    (void)state;
    fill_gradients(&g, 8);
    for (int h = 0; h < GH; h++) g.sinks[h] = -INFINITY;
    for (int n = 0; n < GROWS; n++) g.lses[2][n] = -INFINITY;
    for (int n = 0; n < GOUT; n++) g.outs[2][n] = NAN;
    for (int p = 0; p < GP; p++) g.lses[p][0] = -INFINITY;
    run_gradients(&g);
    for (int n = 0; n < GOUT; n++) assert_true(g.douts[2][n] == 0 && isfinite(g.out[n]) && isfinite(g.douts[1][n]));
    for (int n = 0; n < GROWS; n++) assert_true(g.dlses[2][n] == 0 && isfinite(g.dlses[1][n]));
    for (int p = 0; p < GP; p++)
        for (int d = 0; d < GD; d++) assert_true(g.out[d] == 0 && g.douts[p][d] == 0 && g.dlses[p][0] == 0);
    assert_true(g.lse[0] == -INFINITY);
    for (int h = 0; h < GH; h++) assert_true(g.dsinks[h] == 0);
}

void test_a_sink_is_a_part_without_a_value(void **state)
{
    struct gradients with, without;
    (void)state;
    fill_gradients(&with, 9);
    without = with;
    for (int n = 0; n < GROWS; n++) {
        with.lses[GP - 1][n] = -INFINITY;
        without.lses[GP - 1][n] = with.sinks[n / GS % GH];
    }
    for (int n = 0; n < GOUT; n++) without.outs[GP - 1][n] = 0;
    for (int h = 0; h < GH; h++) without.sinks[h] = -INFINITY;
    run_gradients(&with);
    run_gradients(&without);
    assert_memory_equal(with.out, without.out, sizeof with.out);
    assert_memory_equal(with.lse, without.lse, sizeof with.lse);
    for (int p = 0; p < GP - 1; p++) {
        assert_memory_equal(with.douts[p], without.douts[p], sizeof with.douts[p]);
        assert_memory_equal(with.dlses[p], without.dlses[p], sizeof with.dlses[p]);
    }
    for (int h = 0; h < GH; h++) {
        double sum = 0;
        for (int n = 0; n < GROWS; n++) sum += n / GS % GH == h ? without.dlses[GP - 1][n] : 0;
        assert_true(fabs(with.dsinks[h] - sum) <= 1e-6);
    }
}
