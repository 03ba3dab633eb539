/* cost-bench: compares the estimated time of problems (kernels/cost.c) with the measured time. A line has both, their
 * ratio (estimate / measurement), the time of the estimate itself, and the costliest part of the problem.
 *
 *   cost-bench                      the first backend of the build
 *   cost-bench --device cpu         one thread of the CPU (--threads 2: two)
 *   cost-bench --only strange       problems whose names contain this word
 *   ATTN_CPU_ISA=avx2 cost-bench    without instructions beyond AVX2
 *
 * A measured time is the shortest of the runs in 0.2 seconds, at least two. It is processor time with one thread of the
 * CPU, and the time of the device's own clock otherwise. If an estimate is wrong by a factor of more than three, the
 * exit status is 1. */
#include <float.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/attention.h"
#include "kernels/dtype.h"

enum { MOST_RUNS = 50 };
static const double RUNS_S = 0.2, MOST_OFF = 3;

/* tensors and options that a problem of the table may have, one bit each */
enum {
    BIAS = 1,
    KEEP = 2,
    ALIBI = 4,
    SINKS = 8,
    DBIAS = 16,
    DSLOPES = 32,
    DSINKS = 64,
    CAUSAL = 128,
    PAGES = 256,
    FORWARD_FIRST = 512,
    DOCUMENTS = 1024,
    LATENT = 2048
};

static const struct problem {
    const char *name;
    attn_op op;
    attn_dtype dtype;
    /* Hk: number of heads of k and v; 0: as many as q has. Sk: number of keys; 0: as many as there are queries. */
    int64_t B, H, Hk, Sq, Sk, D;
    unsigned with;
    double scale, softcap, dropout;
    /* `hidden` is the value of the bias for hidden pairs of a query and a key; 0: no bias. Pairs above the causal
     * diagonal are hidden, and so are the pairs of the first `padded` queries and of the first `padded` keys. */
    double hidden;
    int64_t padded;
    /* v_size: the factor by which v is multiplied; 0: v stays as it is. lse: the value that all elements of lse get; 0:
     * lse stays as it is. */
    double v_size, lse;
} problems[] = {
#define P(n, o, type, b, h, hk, sq, sk, d) \
    .name = n, .op = o, .dtype = type, .B = b, .H = h, .Hk = hk, .Sq = sq, .Sk = sk, .D = d
#define F ATTN_OP_FORWARD
#define G ATTN_OP_BACKWARD
    { P("bf16", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64) },
    { P("bf16", F, ATTN_BF16, 1, 8, 0, 2048, 0, 128) },
    { P("bf16 causal", F, ATTN_BF16, 1, 8, 0, 2048, 0, 128), .with = CAUSAL },
    { P("bf16 grouped", F, ATTN_BF16, 1, 8, 2, 2048, 0, 128) },
    { P("bf16 wide", F, ATTN_BF16, 1, 4, 0, 1024, 0, 256) },
    { P("bf16 wider", F, ATTN_BF16, 1, 4, 0, 1024, 0, 512) },
    { P("bf16 narrow", F, ATTN_BF16, 1, 4, 0, 4096, 0, 16) },
    { P("bf16 narrowest", F, ATTN_BF16, 1, 1, 0, 8192, 0, 1) },
    { P("f16", F, ATTN_F16, 1, 8, 0, 2048, 0, 64) },
    { P("f16", F, ATTN_F16, 1, 8, 0, 2048, 0, 128) },
    { P("f16 narrowest", F, ATTN_F16, 1, 1, 0, 8192, 0, 1) },
    { P("f32", F, ATTN_F32, 1, 8, 0, 2048, 0, 64) },
    { P("f32", F, ATTN_F32, 1, 8, 0, 2048, 0, 128) },
    { P("f32 wide", F, ATTN_F32, 1, 4, 0, 1024, 0, 512) },
    { P("f32 narrowest", F, ATTN_F32, 1, 1, 0, 8192, 0, 1) },
    { P("f8", F, ATTN_F8E4M3, 1, 8, 0, 2048, 0, 128) },
    { P("many heads", F, ATTN_F16, 4096, 8, 0, 4, 0, 16) },
    { P("small", F, ATTN_F16, 1, 4, 0, 64, 0, 64), .with = CAUSAL },
    { P("decode", F, ATTN_BF16, 4, 32, 8, 1, 16384, 128) },
    { P("decode f32", F, ATTN_F32, 4, 32, 8, 1, 8192, 128) },
    { P("decode pages", F, ATTN_BF16, 4, 32, 8, 1, 16384, 128), .with = PAGES },
    { P("decode latent", F, ATTN_BF16, 4, 16, 1, 1, 8192, 576), .with = LATENT },
    { P("documents", F, ATTN_BF16, 1, 8, 0, 4096, 0, 64), .with = DOCUMENTS },
    { P("softcap", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .softcap = 30 },
    { P("alibi", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = ALIBI },
    { P("bias", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = BIAS },
    { P("keep_mask", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = KEEP },
    { P("dropout", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .dropout = 0.1 },
    { P("dropout half", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .dropout = 0.5 },
    { P("dropout f32", F, ATTN_F32, 1, 8, 0, 2048, 0, 64), .dropout = 0.5 },
    { P("dropout narrowest", F, ATTN_F16, 1, 1, 0, 8192, 0, 1), .dropout = 0.5 },
    { P("all options", F, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = BIAS | KEEP | ALIBI | SINKS, .softcap = 30,
      .dropout = 0.1 },
    { P("hidden -1e30", F, ATTN_F16, 1, 8, 0, 2048, 0, 64), .with = BIAS | CAUSAL, .hidden = -1e30, .padded = 256 },
    { P("alike finfo.min", F, ATTN_F16, 1, 8, 0, 2048, 0, 64), .with = BIAS | CAUSAL, .hidden = -FLT_MAX,
      .padded = 256 },
    { P("alike finfo.min", F, ATTN_F16, 1, 8, 0, 2048, 0, 64), .with = BIAS | CAUSAL, .hidden = -FLT_MAX,
      .padded = 1024 },
    { P("alike finfo.min", F, ATTN_BF16, 1, 8, 0, 2048, 0, 128), .with = BIAS | CAUSAL, .hidden = -FLT_MAX,
      .padded = 1024 },
    { P("strange scale", F, ATTN_F16, 1, 1, 0, 4096, 0, 1), .scale = 3e38 },
    { P("strange scale", F, ATTN_F16, 1, 2, 0, 1024, 0, 64), .scale = 3e38 },
    { P("strange scale", F, ATTN_BF16, 1, 2, 0, 1024, 0, 128), .scale = 3e38 },
    { P("strange scale f32", F, ATTN_F32, 1, 2, 0, 1024, 0, 64), .scale = 3e38 },
    { P("strange, dropout", F, ATTN_F16, 1, 1, 0, 2048, 0, 1), .scale = 3e38, .dropout = 0.1 },
    { P("strange, options", F, ATTN_F16, 1, 1, 0, 2048, 0, 64), .with = BIAS | KEEP | ALIBI, .scale = 3e38,
      .softcap = 30 },
    { P("strange values", F, ATTN_BF16, 1, 2, 0, 1024, 0, 64), .v_size = 3e38 },
    { P("backward bf16", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64) },
    { P("backward bf16", G, ATTN_BF16, 1, 8, 0, 2048, 0, 128) },
    { P("backward causal", G, ATTN_BF16, 1, 8, 0, 2048, 0, 128), .with = CAUSAL },
    { P("backward wide", G, ATTN_BF16, 1, 4, 0, 1024, 0, 256) },
    { P("backward narrowest", G, ATTN_BF16, 1, 1, 0, 8192, 0, 1) },
    { P("backward f16", G, ATTN_F16, 1, 8, 0, 2048, 0, 64) },
    { P("backward f32", G, ATTN_F32, 1, 8, 0, 2048, 0, 64) },
    { P("backward f32", G, ATTN_F32, 1, 8, 0, 2048, 0, 128) },
    { P("backward, forward first", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = FORWARD_FIRST },
    { P("backward softcap", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .softcap = 30 },
    { P("backward alibi", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = ALIBI },
    { P("backward dslopes", G, ATTN_BF16, 1, 8, 0, 1024, 0, 64), .with = ALIBI | DSLOPES },
    { P("backward dslopes", G, ATTN_BF16, 1, 16, 0, 2048, 0, 128), .with = ALIBI | DSLOPES },
    { P("backward bias", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = BIAS },
    { P("backward dbias", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = BIAS | DBIAS },
    { P("backward dsinks", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .with = SINKS | DSINKS },
    { P("backward dropout", G, ATTN_BF16, 1, 8, 0, 2048, 0, 64), .dropout = 0.5 },
    { P("backward alike finfo.min", G, ATTN_F16, 1, 8, 0, 2048, 0, 64), .with = BIAS | CAUSAL, .hidden = -FLT_MAX,
      .padded = 1024 },
    { P("backward strange scale", G, ATTN_F16, 1, 1, 0, 2048, 0, 1), .scale = 3e38 },
    { P("backward strange scale", G, ATTN_F16, 1, 2, 0, 1024, 0, 64), .scale = 3e38 },
    { P("backward strange, forward first", G, ATTN_F16, 1, 2, 0, 1024, 0, 64), .with = FORWARD_FIRST, .scale = 3e38 },
    { P("backward strange lse", G, ATTN_BF16, 1, 2, 0, 1024, 0, 64), .lse = 1e9 },
};

struct machine {
    attn_device *device;
    attn_stream *stream;
    attn_device_info info;
    bool by_processor; /* whether processor time is measured instead of time on the device's clock */
};

struct block {
    void *host, *device;
    int64_t bytes;
};

static attn_error err;

static void die(const char *what, const char *why)
{
    fprintf(stderr, "cost-bench: %s: %s\n", what, why);
    exit(2);
}

static void must(attn_status status)
{
    if (status != ATTN_OK) die(attn_status_name(status), err.text);
}

static double seconds_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- Making the inputs of problems ------------------------------------------------------------------------------- */

static double next_normal(void)
{
    static uint64_t state = 88172645463325252u;
    double sum = 0;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    for (int part = 0; part < 4; part++) sum += (double)(state >> 16 * part & 0xffff) / 65536 - 0.5;
    return sum * 1.7320508;
}

static int64_t allocate(attn_tensor *t, struct block *b)
{
    int64_t elements = 0;
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &b->bytes)) die(t->rank ? "sizes" : "ranks", "too large");
    attn_shape_elements(t->rank, t->shape, &elements);
    if (!(b->host = calloc(1, (size_t)b->bytes + 1))) die("host", "out of memory");
    t->data = b->host;
    return elements;
}

static void give_floats(attn_tensor *t, struct block *b, attn_dtype dtype, int rank, const int64_t *shape, double size)
{
    *t = attn_tensor_make(NULL, dtype, rank, shape);
    const int64_t elements = allocate(t, b);
    for (int64_t n = 0; n < elements; n++) attn_store(dtype, b->host, n, next_normal() * size);
}

static int32_t *give_indices(attn_tensor *t, struct block *b, int rank, const int64_t *shape)
{
    *t = attn_tensor_make(NULL, ATTN_I32, rank, shape);
    allocate(t, b);
    return b->host;
}

/* Hides (query, key) pairs as Hugging Face does: by a bias for all heads, with a large negative number for each hidden
 * pair. */
static void hide_by_bias(const struct problem *spec, attn_problem *p)
{
    const int64_t Sq = p->bias.shape[2], Sk = p->bias.shape[3];
    p->causal = false;
    for (int64_t i = 0; i < Sq; i++)
        for (int64_t j = 0; j < Sk; j++) {
            const bool hidden = i < spec->padded || j < spec->padded || j > i + Sk - Sq;
            ((float *)p->bias.data)[i * Sk + j] = hidden ? (float)spec->hidden : 0;
        }
}

static void give_masks(const struct problem *spec, attn_problem *p, struct block *blocks)
{
    const int64_t Sq = spec->Sq, Sk = spec->Sk ? spec->Sk : Sq;
    const int64_t square[] = { 1, 1, Sq, Sk };
    if (spec->with & BIAS) {
        give_floats(&p->bias, &blocks[ATTN_T_bias], ATTN_F32, 4, square, 1);
        if (spec->hidden != 0) hide_by_bias(spec, p);
    }
    if (spec->with & KEEP) {
        p->keep_mask = attn_tensor_make(NULL, ATTN_U8, 4, square);
        const int64_t elements = allocate(&p->keep_mask, &blocks[ATTN_T_keep_mask]);
        for (int64_t n = 0; n < elements; n++) ((uint8_t *)p->keep_mask.data)[n] = n % 5 != 0;
    }
    if (spec->with & ALIBI) give_floats(&p->alibi_slopes, &blocks[ATTN_T_alibi_slopes], ATTN_F32, 1, &spec->H, 0.1);
    if (spec->with & SINKS) give_floats(&p->sinks, &blocks[ATTN_T_sinks], ATTN_F32, 1, &spec->H, 1);
    if (spec->with & DOCUMENTS) {
        int32_t *bounds = give_indices(&p->mask_startend_rows, &blocks[ATTN_T_mask_startend_rows], 4,
                                       (int64_t[]){ spec->B, 1, Sk, 2 });
        for (int64_t n = 0; n < spec->B * Sk; n++) {
            const int64_t start = n % Sk / (Sk / 16) * (Sk / 16);
            bounds[2 * n] = (int32_t)(start + Sk / 16);
            bounds[2 * n + 1] = (int32_t)start;
        }
    }
}

enum { PAGE = 64 };

static void give_inputs(const struct problem *spec, attn_problem *p, struct block *blocks)
{
    const int64_t Hk = spec->Hk ? spec->Hk : spec->H, Sk = spec->Sk ? spec->Sk : spec->Sq, D = spec->D;
    const int64_t keys[] = { spec->B, Sk, Hk, D }, pages[] = { spec->B * Sk / PAGE, PAGE, Hk, D };
    const int64_t *const k = spec->with & PAGES ? pages : keys;
    give_floats(&p->q, &blocks[ATTN_T_q], spec->dtype, 4, (int64_t[]){ spec->B, spec->Sq, spec->H, D }, 1);
    give_floats(&p->k, &blocks[ATTN_T_k], spec->dtype, 4, k, 1);
    if (spec->with & LATENT) {
        p->v = p->k;
        p->v.shape[3] = 512;
    } else give_floats(&p->v, &blocks[ATTN_T_v], spec->dtype, 4, k, spec->v_size > 0 ? spec->v_size / 4 : 1);
    if (spec->with & PAGES) {
        int32_t *table = give_indices(&p->page_table, &blocks[ATTN_T_page_table], 2, (int64_t[]){ spec->B, Sk / PAGE });
        for (int64_t n = 0; n < spec->B * Sk / PAGE; n++) table[n] = (int32_t)n;
        int32_t *lengths = give_indices(&p->seqlens_k, &blocks[ATTN_T_seqlens_k], 1, (int64_t[]){ spec->B });
        for (int64_t n = 0; n < spec->B; n++) lengths[n] = (int32_t)Sk;
    }
    give_masks(spec, p, blocks);
}

static void make(const struct problem *spec, attn_problem *p, struct block *blocks)
{
    const attn_dtype result = spec->dtype == ATTN_F8E4M3 ? ATTN_BF16 : spec->dtype;
    p->causal = spec->with & CAUSAL;
    p->has_scale = spec->scale != 0;
    p->scale = spec->scale;
    p->softcap = spec->softcap;
    p->dropout_p = spec->dropout;
    p->seed = 1;
    give_inputs(spec, p, blocks);
    const bool given = spec->op == ATTN_OP_FORWARD || !(spec->with & FORWARD_FIRST);
    for (int id = ATTN_T_out; given && id <= ATTN_T_lse; id++) {
        must(attn_output(p, (attn_tensor_id)id, result, &p->tensor[id], &err));
        allocate(&p->tensor[id], &blocks[id]);
    }
}

/* Makes dout and the gradients of a backward, and computes out and lse by a forward. */
static void make_backward(const struct problem *spec, attn_problem *p, struct block *blocks)
{
    static const struct {
        attn_tensor_id id;
        unsigned wish;
    } gradients[] = { { ATTN_T_dq, 0 },
                      { ATTN_T_dk, 0 },
                      { ATTN_T_dv, 0 },
                      { ATTN_T_dbias, DBIAS },
                      { ATTN_T_dalibi_slopes, DSLOPES },
                      { ATTN_T_dsinks, DSINKS } };
    attn_tensor out;
    must(attn_output(p, ATTN_T_out, spec->dtype, &out, &err));
    give_floats(&p->dout, &blocks[ATTN_T_dout], spec->dtype, 4, out.shape, 1);
    for (int64_t n = 0; p->lse.rank && spec->lse != 0 && n < blocks[ATTN_T_lse].bytes / 4; n++)
        ((float *)p->lse.data)[n] = (float)spec->lse;
    p->op = ATTN_OP_BACKWARD;
    for (size_t n = 0; n < sizeof gradients / sizeof *gradients; n++) {
        const attn_tensor_id id = gradients[n].id;
        if (gradients[n].wish && !(spec->with & gradients[n].wish)) continue;
        must(attn_output(p, id, spec->dtype, &p->tensor[id], &err));
        allocate(&p->tensor[id], &blocks[id]);
    }
}

/* ---- Measuring times --------------------------------------------------------------------------------------------- */

/* Copies the tensors to the device, and returns the problem there. */
static attn_problem place(const struct machine *m, const attn_problem *p, struct block *blocks)
{
    attn_problem placed = *p;
    if (m->info.unified) return placed;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        struct block *b = &blocks[id];
        if (b->host && !b->device) must(attn_device_alloc(m->device, (size_t)b->bytes + 1, &b->device, &err));
        if (b->host) must(attn_copy(m->stream, b->device, b->host, (size_t)b->bytes, ATTN_TO_DEVICE, &err));
        if (placed.tensor[id].rank) placed.tensor[id].data = b->device;
    }
    if (p->v.data == p->k.data) placed.v.data = placed.k.data;
    must(attn_stream_wait(m->stream, &err));
    return placed;
}

static double run_once(const struct machine *m, const attn_plan *plan, void *workspace)
{
    const double began = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    must(attn_stream_mark(m->stream, 0, &err));
    must(attn_run(m->stream, plan, 1, workspace, &err));
    must(attn_stream_mark(m->stream, 1, &err));
    must(attn_stream_wait(m->stream, &err));
    return m->by_processor ? seconds_of(CLOCK_PROCESS_CPUTIME_ID) - began
                           : attn_stream_elapsed_us(m->stream, 0, 1) / 1e6;
}

static double time_of(const struct machine *m, const attn_problem *placed, int runs_most)
{
    void *workspace = NULL;
    size_t bytes;
    attn_plan plan;
    double least = INFINITY, sum = 0;
    must(attn_plan_make(attn_device_capabilities(m->device), placed, &plan, &err));
    must(attn_workspace(attn_device_capabilities(m->device), &plan, 1, &bytes, &err));
    must(attn_device_alloc(m->device, bytes + 1, &workspace, &err));
    for (int run = 0; run < runs_most && (run < 2 || sum < RUNS_S); run++) {
        const double took = run_once(m, &plan, workspace);
        sum += took;
        least = took < least ? took : least;
    }
    attn_device_free(m->device, workspace);
    return least;
}

static attn_cost expected(const struct machine *m, const attn_problem *p)
{
    attn_plan plan;
    must(attn_plan_make(attn_device_capabilities(m->device), p, &plan, &err));
    return attn_cost_closer(&m->info, &plan, ATTN_EVERYTHING, 1);
}

/* Measures a problem, and prints a line about it. Returns whether the measured and the estimated time differ by less
 * than a factor of MOST_OFF. */
static bool look_at(const struct machine *m, const struct problem *spec)
{
    struct block blocks[ATTN_TENSOR_COUNT] = { 0 };
    attn_problem p = ATTN_PROBLEM_INIT;
    attn_plan plan;
    char sizes[64];
    make(spec, &p, blocks);
    must(attn_check(&p, &err));
    if (spec->op == ATTN_OP_BACKWARD) {
        if (p.out.rank) {
            const attn_problem forward = place(m, &p, blocks);
            time_of(m, &forward, 1);
            for (int id = ATTN_T_out; id <= ATTN_T_lse && !m->info.unified; id++)
                must(attn_copy(m->stream, blocks[id].host, blocks[id].device, (size_t)blocks[id].bytes,
                               ATTN_FROM_DEVICE, &err));
            must(attn_stream_wait(m->stream, &err));
        }
        make_backward(spec, &p, blocks);
        must(attn_check(&p, &err));
    }
    const double began = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    const attn_cost cost = expected(m, &p);
    const double looking = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - began;
    const attn_problem placed = place(m, &p, blocks);
    must(attn_plan_make(attn_device_capabilities(m->device), &placed, &plan, &err));
    const double took = time_of(m, &placed, MOST_RUNS);
    const double off = cost.seconds / took;
    const bool good = off < MOST_OFF && off > 1 / MOST_OFF;
    snprintf(sizes, sizeof sizes, "%lldx%lldx%lld", (long long)spec->B, (long long)spec->H, (long long)spec->Sq);
    if (spec->Sk) snprintf(sizes + strlen(sizes), sizeof sizes - strlen(sizes), ":%lld", (long long)spec->Sk);
    snprintf(sizes + strlen(sizes), sizeof sizes - strlen(sizes), "x%lld", (long long)spec->D);
    printf("%-32s %-18s %-12s %10.3f %10.3f %6.2f%s %8.3f  %s\n", spec->name, sizes, plan.kernel->name, took * 1e3,
           cost.seconds * 1e3, off, good ? " " : "!", looking * 1e3, cost.because);
    fflush(stdout);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        free(blocks[id].host);
        attn_device_free(m->device, blocks[id].device);
    }
    return good;
}

int main(int argc, char **argv)
{
    static const struct option flags[] = { { "device", required_argument, NULL, 'd' },
                                           { "threads", required_argument, NULL, 't' },
                                           { "only", required_argument, NULL, 'o' },
                                           { 0 } };
    struct machine m = { 0 };
    attn_device_options options = { .threads = 1 };
    const char *device = NULL, *only = "";
    int bad = 0, all = 0;
    for (int flag; (flag = getopt_long(argc, argv, "", flags, NULL)) != -1;) switch (flag) {
        case 'd': device = optarg; break;
        case 't': options.threads = atoi(optarg); break;
        case 'o': only = optarg; break;
        default: fputs("usage: cost-bench [--device NAME] [--threads N] [--only TEXT]\n", stderr); return 2;
        }
    for (const char *const *backend = attn_backends(); !device && *backend; backend++)
        if (attn_device_count(*backend) > 0) device = *backend;
    must(attn_device_open(device, 0, &options, &m.device, &err));
    must(attn_stream_open(m.device, &m.stream, &err));
    attn_device_describe(m.device, &m.info);
    m.by_processor = m.info.unified && options.threads == 1;
    printf("# %s: %s; least of some runs\n", m.info.name, m.info.description);
    printf("%-32s %-18s %-12s %10s %10s %6s %9s\n", "problem, times in ms", "B x H x S x D", "kernel", "took",
           "expected", "ratio", "looking");
    for (size_t n = 0; n < sizeof problems / sizeof *problems; n++) {
        if (!strstr(problems[n].name, only)) continue;
        all++;
        bad += !look_at(&m, &problems[n]);
    }
    printf("# %d of %d are off by a factor of more than %g\n", bad, all, MOST_OFF);
    attn_stream_close(m.stream);
    attn_device_close(m.device);
    return bad > 0;
}
