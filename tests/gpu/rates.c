/* rates.c: measures the time that each kernel takes for one pair of a query and a key. Two things are based on it: how
 * much the simple kernels compute in one launch (kernels/cuda/simple/simple.h), and the server's estimate of a
 * request's time.
 *
 *   build/tests/gpu/rates [CASE]      on the first GPU; with CASE only the cases whose name contains it
 *
 * Pairs are those that the causal mask permits, over all heads. For a case of several launches the program
 * prints the number of calls of attn_run_some(), and the time of the longest launch. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/attention.h"
#include "kernels/dtype.h"

enum bias_kind { NO_BIAS, KEY_BIAS, WHOLE_BIAS, PADDED };

struct rate_case {
    const char *name, *family;
    attn_op op;
    attn_dtype dtype;
    int64_t H, S, D;
    double amplitude; /* largest magnitude of the numbers in q and k */
    enum bias_kind bias;
    /* the bias of hidden pairs of a query and a key, in a case with PADDED. The first half of the queries and the first
     * half of the keys are padding, whose pairs are hidden. Keys after the query are hidden too. */
    float hidden;
    bool alibi, sinks;
    double dropout;
    const char *wanted; /* gradients to compute; "" means dq, dk and dv */
};

/* The compiler would warn of members that a row of the table does not set; they are 0. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

#define F ATTN_OP_FORWARD
#define B ATTN_OP_BACKWARD

/* clang-format off: each row of the table stays on one line */
static const struct rate_case cases[] = {
    { "plain forward D 64", "", F, ATTN_BF16, 16, 8192, 64, 1 },
    { "plain forward D 128", "", F, ATTN_BF16, 16, 8192, 128, 1 },
    { "plain forward D 256", "", F, ATTN_BF16, 8, 8192, 256, 1 },
    { "plain backward D 128", "", B, ATTN_BF16, 16, 8192, 128, 1 },
    { "plain backward D 256", "", B, ATTN_BF16, 8, 8192, 256, 1 },
    { "generic forward D 128", "generic", F, ATTN_BF16, 16, 8192, 128, 1 },
    { "generic backward D 128", "generic", B, ATTN_BF16, 16, 4096, 128, 1 },
    { "float32 forward D 64", "", F, ATTN_F32, 16, 4096, 64, 1 },
    { "float32 forward D 128", "", F, ATTN_F32, 16, 4096, 128, 1 },
    { "float32 forward D 256", "", F, ATTN_F32, 8, 4096, 256, 1 },
    { "float32 backward D 64", "", B, ATTN_F32, 16, 4096, 64, 1 },
    { "float32 backward D 128", "", B, ATTN_F32, 16, 4096, 128, 1 },
    { "float32 backward D 256", "", B, ATTN_F32, 8, 4096, 256, 1 },
    { "bias forward D 64", "", F, ATTN_BF16, 16, 4096, 64, 1, WHOLE_BIAS },
    { "bias forward D 128", "", F, ATTN_BF16, 16, 4096, 128, 1, WHOLE_BIAS },
    { "bias backward D 64", "", B, ATTN_BF16, 16, 4096, 64, 1, WHOLE_BIAS },
    { "bias backward D 128", "", B, ATTN_BF16, 16, 4096, 128, 1, WHOLE_BIAS },
    { "bias backward float32 D 64", "", B, ATTN_F32, 16, 4096, 64, 1, WHOLE_BIAS },
    { "dropout forward D 128", "", F, ATTN_BF16, 16, 4096, 128, 1, .dropout = 0.1 },
    { "dropout backward D 128", "", B, ATTN_BF16, 16, 4096, 128, 1, .dropout = 0.1 },
    { "dropout forward float32 D 64", "", F, ATTN_F32, 16, 4096, 64, 1, .dropout = 0.1 },
    { "dropout backward float32 D 64", "", B, ATTN_F32, 16, 4096, 64, 1, .dropout = 0.1 },
    { "simple forward D 64", "simple", F, ATTN_BF16, 16, 4096, 64, 1 },
    { "simple forward D 128", "simple", F, ATTN_BF16, 16, 4096, 128, 1 },
    { "simple forward D 256", "simple", F, ATTN_BF16, 16, 4096, 256, 1 },
    { "simple forward D 512", "", F, ATTN_BF16, 16, 4096, 512, 1 },
    { "simple forward D 512 float32", "", F, ATTN_F32, 8, 4096, 512, 1 },
    { "simple forward D 64 dropout", "simple", F, ATTN_BF16, 16, 4096, 64, 1, .dropout = 0.1 },
    { "simple dq D 64", "simple", B, ATTN_BF16, 16, 4096, 64, 1, .wanted = "dq" },
    { "simple dq D 128", "simple", B, ATTN_BF16, 16, 4096, 128, 1, .wanted = "dq" },
    { "simple dq D 256", "simple", B, ATTN_BF16, 8, 4096, 256, 1, .wanted = "dq" },
    { "simple dk dv D 64", "simple", B, ATTN_BF16, 16, 4096, 64, 1, .wanted = "dk dv" },
    { "simple dk dv D 128", "simple", B, ATTN_BF16, 16, 4096, 128, 1, .wanted = "dk dv" },
    { "simple dk dv D 256", "simple", B, ATTN_BF16, 8, 4096, 256, 1, .wanted = "dk dv" },
    { "dbias [1,1,1,S] D 64", "simple", B, ATTN_BF16, 16, 2048, 64, 1, KEY_BIAS, .wanted = "dbias" },
    { "dbias [1,H,S,S] D 64", "simple", B, ATTN_BF16, 16, 4096, 64, 1, WHOLE_BIAS, .wanted = "dbias" },
    { "dbias [1,H,S,S] D 128", "simple", B, ATTN_BF16, 16, 4096, 128, 1, WHOLE_BIAS, .wanted = "dbias" },
    { "dalibi_slopes D 64", "simple", B, ATTN_BF16, 16, 4096, 64, 1, .alibi = true, .wanted = "dalibi_slopes" },
    { "dalibi_slopes D 128", "simple", B, ATTN_BF16, 16, 4096, 128, 1, .alibi = true, .wanted = "dalibi_slopes" },
    { "dsinks D 64", "simple", B, ATTN_BF16, 16, 8192, 64, 1, .sinks = true, .wanted = "dsinks" },
    { "huge scores forward D 64", "", F, ATTN_BF16, 16, 4096, 64, 1e5 },
    { "huge scores forward D 128", "", F, ATTN_BF16, 16, 4096, 128, 1e5 },
    { "huge scores forward D 256", "", F, ATTN_BF16, 16, 4096, 256, 1e5 },
    { "huge scores forward float32 D 64", "", F, ATTN_F32, 16, 4096, 64, 1e5 },
    { "huge scores backward D 64", "", B, ATTN_BF16, 16, 4096, 64, 1e5 },
    { "huge scores backward D 128", "", B, ATTN_BF16, 16, 4096, 128, 1e5 },
    { "huge scores backward float32 D 64", "", B, ATTN_F32, 16, 4096, 64, 1e5 },
    { "huge scores and a bias, forward D 64", "", F, ATTN_BF16, 16, 4096, 64, 1e5, WHOLE_BIAS },
    { "huge scores and a bias, backward D 64", "", B, ATTN_BF16, 16, 4096, 64, 1e5, WHOLE_BIAS },
    { "mask of -inf, forward", "", F, ATTN_BF16, 8, 2048, 64, 1, PADDED, -INFINITY },
    { "mask of -1e30, forward", "", F, ATTN_BF16, 8, 2048, 64, 1, PADDED, -1e30f },
    { "mask of -3.4e38, forward", "", F, ATTN_BF16, 8, 2048, 64, 1, PADDED, -3.4028234e38f },
    { "mask of -inf, backward", "", B, ATTN_BF16, 8, 2048, 64, 1, PADDED, -INFINITY },
    { "mask of -1e30, backward", "", B, ATTN_BF16, 8, 2048, 64, 1, PADDED, -1e30f },
    { "mask of -3.4e38, backward", "", B, ATTN_BF16, 8, 2048, 64, 1, PADDED, -3.4028234e38f },
    { "mask of -inf, float32 forward", "", F, ATTN_F32, 8, 2048, 64, 1, PADDED, -INFINITY },
    { "mask of -3.4e38, float32 forward", "", F, ATTN_F32, 8, 2048, 64, 1, PADDED, -3.4028234e38f },
    { "mask of -inf, float32 backward", "", B, ATTN_F32, 8, 2048, 64, 1, PADDED, -INFINITY },
    { "mask of -3.4e38, float32 backward", "", B, ATTN_F32, 8, 2048, 64, 1, PADDED, -3.4028234e38f },
    { "one head of 50000, D 1, huge scores", "", F, ATTN_F16, 1, 50000, 1, 1.5e4 },
    { "one head of 50000, D 512", "", F, ATTN_BF16, 1, 50000, 512, 1 },
    { "one head of 250000, forward D 128", "", F, ATTN_BF16, 1, 250000, 128, 1 },
    { "one head of 250000, forward D 256", "", F, ATTN_BF16, 1, 250000, 256, 1 },
    { "one head of 150000, generic forward D 128", "generic", F, ATTN_BF16, 1, 150000, 128, 1 },
    { "one head of 60000, float32 forward D 64", "", F, ATTN_F32, 1, 60000, 64, 1 },
    { "one head of 150000, backward D 64", "", B, ATTN_BF16, 1, 150000, 64, 1 },
    { "one head of 150000, backward D 128", "", B, ATTN_BF16, 1, 150000, 128, 1 },
    { "one head of 100000, backward D 256", "", B, ATTN_BF16, 1, 100000, 256, 1 },
    { "one head of 60000, generic backward D 128", "generic", B, ATTN_BF16, 1, 60000, 128, 1 },
    { "one head of 30000, float32 backward D 64", "", B, ATTN_F32, 1, 30000, 64, 1 },
    { "one head of 30000, huge scores, backward D 64", "", B, ATTN_BF16, 1, 30000, 64, 1e5 },
};
/* clang-format on */

static void must(attn_status status, const attn_error *err)
{
    if (status == ATTN_OK) return;
    fprintf(stderr, "rates: %s\n", err->text);
    exit(1);
}

static float drawn(uint64_t *state)
{
    float sum = 0;
    for (int n = 0; n < 4; n++) {
        *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        sum += (float)(*state >> 40) / 16777216.0f - 0.5f;
    }
    return sum * 1.7f;
}

static void put(attn_dtype dtype, void *to, int64_t n, float x)
{
    if (dtype == ATTN_F32) ((float *)to)[n] = x;
    else ((uint16_t *)to)[n] = dtype == ATTN_F16 ? attn_f16_from_f32(x) : attn_bf16_from_f32(x);
}

struct rig {
    attn_device *device;
    attn_stream *stream;
    uint64_t random;
    void *blocks[64];
    int count;
};

/* Makes a tensor in device memory. If `padded`, its numbers are a mask for attention to padded sequences. Otherwise
 * they are random, or 0 if the amplitude is 0. */
static attn_tensor tensor_of(struct rig *r, const struct rate_case *c, attn_dtype dtype, int rank, const int64_t *shape,
                             double amplitude, bool padded)
{
    attn_error err;
    int64_t elements;
    void *host, *memory;
    attn_shape_elements(rank, shape, &elements);
    const size_t bytes = (size_t)elements * attn_dtype_bytes(dtype);
    must(attn_staging_alloc(r->device, bytes, &host, &err), &err);
    must(attn_device_alloc(r->device, bytes, &memory, &err), &err);
    r->blocks[r->count++] = memory;
    for (int64_t n = 0; n < elements; n++) {
        const int64_t j = n % c->S, i = n / c->S % c->S;
        const bool hidden = i < c->S / 2 || j < c->S / 2 || j > i;
        put(dtype, host, n, padded ? (hidden ? c->hidden : 0) : amplitude ? (float)amplitude * drawn(&r->random) : 0);
    }
    must(attn_copy(r->stream, memory, host, bytes, ATTN_TO_DEVICE, &err), &err);
    must(attn_stream_wait(r->stream, &err), &err);
    attn_staging_free(r->device, host, bytes);
    return attn_tensor_make(memory, dtype, rank, shape);
}

static bool wants(const struct rate_case *c, const char *name)
{
    return strstr(c->wanted ? c->wanted : "dq dk dv", name) != NULL;
}

static attn_problem problem_of(struct rig *r, const struct rate_case *c)
{
    const int64_t shape[4] = { 1, c->S, c->H, c->D }, lse[3] = { 1, c->H, c->S }, heads[1] = { c->H };
    const int64_t key_bias[4] = { 1, 1, 1, c->S }, whole_bias[4] = { 1, c->bias == PADDED ? 1 : c->H, c->S, c->S };
    const int64_t *const bias = c->bias == KEY_BIAS ? key_bias : whole_bias;
    attn_problem p = ATTN_PROBLEM_INIT;
    p.op = ATTN_OP_FORWARD;
    p.causal = c->bias == PADDED;
    p.q = tensor_of(r, c, c->dtype, 4, shape, c->amplitude, false);
    p.k = tensor_of(r, c, c->dtype, 4, shape, c->amplitude, false);
    p.v = tensor_of(r, c, c->dtype, 4, shape, 1, false);
    p.out = tensor_of(r, c, c->dtype, 4, shape, 0, false);
    p.lse = tensor_of(r, c, ATTN_F32, 3, lse, 0, false);
    if (c->bias) p.bias = tensor_of(r, c, ATTN_F32, 4, bias, 1, c->bias == PADDED);
    if (c->alibi) p.alibi_slopes = tensor_of(r, c, ATTN_F32, 1, heads, 0.01, false);
    if (c->sinks) p.sinks = tensor_of(r, c, ATTN_F32, 1, heads, 1, false);
    p.dropout_p = c->dropout;
    if (c->op == ATTN_OP_FORWARD) return p;
    p.dout = tensor_of(r, c, c->dtype, 4, shape, 1, false);
    if (wants(c, "dq")) p.dq = tensor_of(r, c, c->dtype, 4, shape, 0, false);
    if (wants(c, "dk")) p.dk = tensor_of(r, c, c->dtype, 4, shape, 0, false);
    if (wants(c, "dv")) p.dv = tensor_of(r, c, c->dtype, 4, shape, 0, false);
    if (wants(c, "dbias")) p.dbias = tensor_of(r, c, ATTN_F32, 4, bias, 0, false);
    if (wants(c, "dalibi")) p.dalibi_slopes = tensor_of(r, c, ATTN_F32, 1, heads, 0, false);
    if (wants(c, "dsinks")) p.dsinks = tensor_of(r, c, ATTN_F32, 1, heads, 0, false);
    return p;
}

static double run_once(struct rig *r, const attn_plan *plan, void *workspace, int64_t *steps, double *longest)
{
    attn_error err = { 0 };
    int64_t step = 0, before = 0;
    double all = 0;
    *longest = 0;
    do {
        must(attn_stream_mark(r->stream, 0, &err), &err);
        must(attn_run_some(r->stream, plan, 1, workspace, &step, &err), &err);
        must(attn_stream_mark(r->stream, 1, &err), &err);
        must(attn_stream_wait(r->stream, &err), &err);
        const double ms = attn_stream_elapsed_us(r->stream, 0, 1) / 1e3;
        const int64_t made = step == ATTN_NO_MORE_STEPS ? 1 : step - before;
        if (ms / (double)made > *longest) *longest = ms / (double)made;
        all += ms;
        ++*steps;
        if (step == ATTN_NO_MORE_STEPS && attn_stream_left_rows(r->stream)) step = ATTN_EVERY_ROW;
        before = step;
    } while (step != ATTN_NO_MORE_STEPS);
    return all;
}

static void measure(const struct rate_case *c)
{
    struct rig r = { 0 };
    attn_error err = { 0 };
    attn_plan plan;
    size_t bytes;
    void *workspace = NULL;
    setenv("ATTN_CUDA_FAMILY", c->family, 1);
    r.random = 1;
    must(attn_device_open("cuda", 0, NULL, &r.device, &err), &err);
    must(attn_stream_open(r.device, &r.stream, &err), &err);
    attn_problem p = problem_of(&r, c);
    if (c->op == ATTN_OP_BACKWARD) must(attn_forward(r.stream, &p, NULL, &err), &err);
    p.op = c->op;
    must(attn_plan_make(attn_device_capabilities(r.device), &p, &plan, &err), &err);
    must(attn_workspace(attn_device_capabilities(r.device), &plan, 1, &bytes, &err), &err);
    if (bytes) must(attn_device_alloc(r.device, bytes, &workspace, &err), &err);
    double best = INFINITY, longest = 0;
    int64_t calls = 0;
    for (int n = 0; n < 4 && (n < 2 || best < 100); n++) {
        double step_ms;
        calls = 0;
        const double ms = run_once(&r, &plan, workspace, &calls, &step_ms);
        if (n == 0) continue; /* the first run only warms up the device */
        if (ms < best) best = ms;
        if (step_ms > longest) longest = step_ms;
    }
    const double pairs = (double)c->H * (double)c->S * (double)(p.causal ? (c->S + 1) / 2 : c->S);
    printf("%-42s %-10s %10.3f ms %10.4f ns a pair  %4lld calls, steps of %6.2f ms\n", c->name, plan.kernel->name, best,
           best * 1e6 / pairs, (long long)calls, longest);
    fflush(stdout);
    if (workspace) attn_device_free(r.device, workspace);
    for (int n = 0; n < r.count; n++) attn_device_free(r.device, r.blocks[n]);
    attn_stream_close(r.stream);
    attn_device_close(r.device);
}

int main(int argc, char **argv)
{
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        if (argc < 2 || strstr(cases[n].name, argv[1])) measure(&cases[n]);
    return 0;
}
