/* cost.c: attn_cost_of(), the time that a problem is expected to take, from a table of measured rates.
 *
 *   rates    a row for each kernel, operation and kind of numbers: what a triple (query, key, head) costs
 *   extras   what a tensor or an option adds to a triple, by family of kernels
 *   sums     triples times rates, over the units of the device that find work
 *
 * All rates are nanoseconds of one unit (attn_device_info.units: a thread of a CPU, a multiprocessor of a GPU), so that
 * they hold for any number of them. Another machine of the same kind is up to three times as fast or slow.
 * `build/cost-bench` prints estimates beside measured times. Measure a new or faster kernel with it, and change its
 * row.
 *
 * Machines
 *   cpu    two cores of an AMD EPYC (Zen 5, avx512_bf16) in a virtual machine, one thread, processor time, 2026-11-26;
 *          amx from MEASUREMENTS.md ("The CPU ladder": Sapphire Rapids, 2026-11-20)
 *   cuda   one H100 (132 multiprocessors), 2026-11-26; float8, latent and decode from MEASUREMENTS.md */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/strange.h"
#include "kernels/tiles.h"

/* ---- Rates ------------------------------------------------------------------------------------------------------- */

/* Kernels whose options cost alike. */
enum family { CPU, PORTABLE, DOUBLE, HOPPER, GENERIC, SIMPLE };

#define CPU_MOST  5.8e37 /* SIMD_SCORE_MOST of cpu/simd.h, in natural units */
#define CUDA_MOST 0x1p27 /* kernels/README.md, "The CUDA backend" */
#define LSE_MOST  ((double)ATTN_LSE_MOST)

/* Scores from which on the variant with options of GENERIC's kernels needs no repair. */
#define GENERIC_CHEAP 0x1p33

#define BFLOAT (ATTN_DTYPE_BIT(BF16))
#define SINGLE (ATTN_DTYPE_BIT(F32))
#define FLOAT8 (ATTN_DTYPE_BIT(F8E4M3))
#define ANY    ATTN_DTYPES_FORWARD

/* Nanoseconds of a unit. A triple costs pair + product * (D + Dv), in a row that leaves float32 also
 * strange + strange_product * (D + Dv). */
struct rate {
    const char *kernel;
    attn_op op;
    unsigned dtypes; /* of q */
    enum family family;
    double head;   /* each head of each sequence, whatever its size */
    double number; /* each number of K and V of each key/value head: reading or packing it */
    double pair, product;
    double strange, strange_product;
    double cheap; /* a triple of a row that counts as cheap in attn_strange (strange.h) */
    double most;  /* the largest score of an ordinary row; in a backward that is given lse, the largest lse */
};

enum { FEW_ROWS = 8 }; /* FLASH_DOT_ROWS of cpu/flash.h: tiles of so few rows read K and V as they lie */

/* Columns: kernel, operation, numbers, family; head, number, pair, product; strange, strange_product, cheap, most. */
/* clang-format off */
static const struct rate rates[] = {
    { "amx",            ATTN_OP_FORWARD,  BFLOAT,          CPU,      250, .08,  .12, .0017,     8, .13, .8, CPU_MOST },
    { "amx",            ATTN_OP_FORWARD,  ANY,             CPU,      250, .08,  .12, .0060,     8, .13, .8, CPU_MOST },
    { "amx",            ATTN_OP_BACKWARD, BFLOAT,          CPU,      400, .08,  .20, .0070,    10, .125, .8, LSE_MOST },
    { "amx",            ATTN_OP_BACKWARD, ANY,             CPU,      400, .08,  .20, .0220,    10, .125, .8, LSE_MOST },
    { "bf16",           ATTN_OP_FORWARD,  BFLOAT | FLOAT8, CPU,      250, .08,  .16, .0041,     8, .13, .8, CPU_MOST },
    { "bf16",           ATTN_OP_FORWARD,  ANY,             CPU,      250, .08,  .22, .0082,     8, .13, .8, CPU_MOST },
    { "bf16",           ATTN_OP_BACKWARD, BFLOAT,          CPU,      400, .08,  .22, .0128,    10, .125, .8, LSE_MOST },
    { "bf16",           ATTN_OP_BACKWARD, ANY,             CPU,      400, .08,  .25, .0240,    10, .125, .8, LSE_MOST },
    { "avx512",         ATTN_OP_FORWARD,  ANY,             CPU,      250, .08,  .22, .0084,     8, .13, .8, CPU_MOST },
    { "avx512",         ATTN_OP_BACKWARD, ANY,             CPU,      400, .08,  .25, .0240,    10, .125, .8, LSE_MOST },
    { "avx2",           ATTN_OP_FORWARD,  ANY,             CPU,      250, .08,  .45, .0160,    10, .20, 1,  CPU_MOST },
    { "avx2",           ATTN_OP_BACKWARD, ANY,             CPU,      400, .08,  .60, .0480,    14, .22, 1,  LSE_MOST },
    { "portable",       ATTN_OP_FORWARD,  ANY,             PORTABLE, 500, .3,   6,   .11,      20, .5,  3,  CPU_MOST },
    { "portable",       ATTN_OP_BACKWARD, ANY,             PORTABLE, 800, .3,   7,   .30,      40, .8,  3,  LSE_MOST },
    { "double",         ATTN_OP_FORWARD,  ANY,             DOUBLE,   500, 1,    9,   .31,       0, 0,   0,  FLT_MAX },
    { "double",         ATTN_OP_BACKWARD, ANY,             DOUBLE,   500, 1,    9,   .75,       0, 0,   0,  FLT_MAX },
    { "sm90",           ATTN_OP_FORWARD,  FLOAT8,          HOPPER,   0,   .02,  .04, .00020,   60, 1.5, 1,  CUDA_MOST },
    { "sm90",           ATTN_OP_FORWARD,  ANY,             HOPPER,   0,   .02,  .04, .00028,   60, 1.5, 1,  CUDA_MOST },
    { "sm90",           ATTN_OP_BACKWARD, ANY,             HOPPER,   0,   .02,  .05, .0010,   300, 9,   4,  LSE_MOST },
    { "sm90+decode",    ATTN_OP_FORWARD,  ANY,             HOPPER,   0,   .05,  .04, .00028,   60, 1.5, 1,  CUDA_MOST },
    { "sm90_f8",        ATTN_OP_FORWARD,  ANY,             HOPPER,   0,   .02,  .04, .00020,   60, 1.5, 1,  CUDA_MOST },
    { "sm90_latent",    ATTN_OP_FORWARD,  ANY,             HOPPER,   0,   .08,  .02, .00045,   60, 1.5, 1,  CUDA_MOST },
    { "decode",         ATTN_OP_FORWARD,  ANY,             GENERIC,  0,   .08,  .05, .0006,    60, 1.5, 1,  CUDA_MOST },
    { "generic+decode", ATTN_OP_FORWARD,  ANY,             GENERIC,  0,   .05,  .05, .0006,    60, 1.5, 1,  CUDA_MOST },
    { "generic",        ATTN_OP_FORWARD,  SINGLE,          GENERIC,  0,   .05,  .02, .0022,    60, 1.2, 1,  CUDA_MOST },
    { "generic",        ATTN_OP_FORWARD,  ANY,             GENERIC,  0,   .02,  .05, .0006,    60, 1.5, 1,  CUDA_MOST },
    { "generic",        ATTN_OP_BACKWARD, SINGLE,          GENERIC,  0,   .05,  .02, .0065,   300, 9,   4,  LSE_MOST },
    { "generic",        ATTN_OP_BACKWARD, ANY,             GENERIC,  0,   .02,  .07, .0022,   300, 9,   4,  LSE_MOST },
    { "simple",         ATTN_OP_FORWARD,  ANY,             SIMPLE,   0,   .1,   55,  .42,       0, 0,   0,  CUDA_MOST },
    { "simple",         ATTN_OP_BACKWARD, ANY,             SIMPLE,   0,   .1,   115, .95,       0, 0,   0,  LSE_MOST },
};

/* Rates of the CPU for a forward that reads K and V as they lie in memory, by family. */
static const struct rate few_rows[] = {
    [CPU]      = { "",  ATTN_OP_FORWARD,  ANY,             CPU,      200, .12,  .5,  .035,      8, .13, .8, CPU_MOST },
    [PORTABLE] = { "",  ATTN_OP_FORWARD,  ANY,             PORTABLE, 500, .3,   6,   .7,       20, .5,  3,  CPU_MOST },
};

/* Features that GENERIC's kernels compute in their variant with options, and dropout. */
#define OPTIONS                                                                                                      \
    (ATTN_TENSOR_BIT(bias) | ATTN_TENSOR_BIT(keep_mask) | ATTN_TENSOR_BIT(mask_startend_rows) |                      \
     ATTN_TENSOR_BIT(alibi_slopes) | ATTN_OPTION_BIT(SOFTCAP) | ATTN_OPTION_BIT(SCALE))
#define SOFTCAP ATTN_OPTION_BIT(SOFTCAP)
#define DROPOUT ATTN_OPTION_BIT(DROPOUT)
#define BIAS    ATTN_TENSOR_BIT(bias)
#define KEEP    ATTN_TENSOR_BIT(keep_mask)
#define SLOPES  ATTN_TENSOR_BIT(alibi_slopes)
#define DBIAS   ATTN_TENSOR_BIT(dbias)
#define DSLOPES ATTN_TENSOR_BIT(dalibi_slopes)

/* The extra cost of a triple where the problem has one of these features. A row of the table counts once. */
static const struct extra {
    enum family family;
    attn_op op;
    uint64_t features;
    const char *name; /* of the feature, for attn_cost.because */
    double pair, product;
} extras[] = {
    { CPU,      ATTN_OP_FORWARD,  SOFTCAP, "softcap",       .40, 0 },
    { CPU,      ATTN_OP_FORWARD,  BIAS,    "bias",          .60, 0 },
    { CPU,      ATTN_OP_FORWARD,  KEEP,    "keep_mask",     .45, 0 },
    { CPU,      ATTN_OP_FORWARD,  SLOPES,  "alibi_slopes",  .25, 0 },
    { CPU,      ATTN_OP_FORWARD,  DROPOUT, "dropout_p",     1.3, 0 },
    { CPU,      ATTN_OP_BACKWARD, SOFTCAP, "softcap",       .40, 0 },
    { CPU,      ATTN_OP_BACKWARD, BIAS,    "bias",          .70, 0 },
    { CPU,      ATTN_OP_BACKWARD, KEEP,    "keep_mask",     .45, 0 },
    { CPU,      ATTN_OP_BACKWARD, SLOPES,  "alibi_slopes",  .20, 0 },
    { CPU,      ATTN_OP_BACKWARD, DBIAS,   "dbias",         1.5, 0 },
    { CPU,      ATTN_OP_BACKWARD, DSLOPES, "dalibi_slopes", .80, 0 },
    { CPU,      ATTN_OP_BACKWARD, DROPOUT, "dropout_p",     1.4, 0 },
    { PORTABLE, ATTN_OP_FORWARD,  SOFTCAP, "softcap",       11, 0 },
    { PORTABLE, ATTN_OP_FORWARD,  BIAS,    "bias",          2, 0 },
    { PORTABLE, ATTN_OP_FORWARD,  DROPOUT, "dropout_p",     3, 0 },
    { PORTABLE, ATTN_OP_BACKWARD, SOFTCAP, "softcap",       11, 0 },
    { PORTABLE, ATTN_OP_BACKWARD, BIAS,    "bias",          2, 0 },
    { PORTABLE, ATTN_OP_BACKWARD, DBIAS,   "dbias",         2, 0 },
    { PORTABLE, ATTN_OP_BACKWARD, DSLOPES, "dalibi_slopes", 2, 0 },
    { PORTABLE, ATTN_OP_BACKWARD, DROPOUT, "dropout_p",     3, 0 },
    { DOUBLE,   ATTN_OP_FORWARD,  DROPOUT, "dropout_p",     30, 0 },
    { DOUBLE,   ATTN_OP_BACKWARD, DROPOUT, "dropout_p",     30, 0 },
    { HOPPER,   ATTN_OP_FORWARD,  SOFTCAP, "softcap",       .08, 0 },
    { HOPPER,   ATTN_OP_BACKWARD, SOFTCAP, "softcap",       .10, 0 },
    { GENERIC,  ATTN_OP_FORWARD,  OPTIONS, "options of the scores", 1.5, .0042 },
    { GENERIC,  ATTN_OP_FORWARD,  DROPOUT, "dropout_p",     1,   0 },
    { GENERIC,  ATTN_OP_BACKWARD, OPTIONS, "options of the scores", 3.6, 0 },
    { GENERIC,  ATTN_OP_BACKWARD, DROPOUT, "dropout_p",     1.8, 0 },
    { GENERIC,  ATTN_OP_BACKWARD, DBIAS,   "dbias",         225, .38 },
    { GENERIC,  ATTN_OP_BACKWARD, DSLOPES, "dalibi_slopes", 70,  .44 },
    { SIMPLE,   ATTN_OP_FORWARD,  DROPOUT, "dropout_p",     15,  0 },
    { SIMPLE,   ATTN_OP_BACKWARD, DROPOUT, "dropout_p",     30,  0 },
    { SIMPLE,   ATTN_OP_BACKWARD, DBIAS,   "dbias",         225, .38 },
    { SIMPLE,   ATTN_OP_BACKWARD, DSLOPES, "dalibi_slopes", 70,  .44 },
};
/* clang-format on */

/* Seconds that a call takes beside all computing. */
#define LAUNCH_S 5e-6

static const struct rate *rate_of(const char *kernel, attn_op op, attn_dtype dtype)
{
    for (size_t n = 0; n < sizeof rates / sizeof *rates; n++)
        if (rates[n].op == op && (rates[n].dtypes >> dtype & 1) && strcmp(rates[n].kernel, kernel) == 0)
            return &rates[n];
    return &rates[sizeof rates / sizeof *rates - 1]; /* the slowest; a test looks for a row of each kernel */
}

bool attn_cost_knows(const char *kernel, attn_op op, attn_dtype dtype)
{
    const struct rate *r = rate_of(kernel, op, dtype);
    return strcmp(r->kernel, kernel) == 0;
}

/* ---- Sums -------------------------------------------------------------------------------------------------------- */

enum { ROWS = 64, KEYS = 2048 }; /* a unit works on this many rows of a head; where rows are few, on this many keys */

/* The sizes of a problem that rates are multiplied with. */
struct work {
    double heads, rows, columns, numbers, triples;
    double units; /* units of the device that find work */
};

static struct work work_of(const attn_problem *p, const attn_dims *d, double triples, int units)
{
    const double each = (double)d->B * (double)d->H;
    struct work w = { .heads = each, .rows = (double)d->Sq * (d->packed ? (double)d->H : each), .triples = triples };
    w.columns = (double)(d->D + d->Dv);
    w.numbers = (double)d->Sk * (double)d->Hk * (d->packed ? 1 : (double)d->B) * w.columns;
    if (p->page_table.rank)
        w.numbers = triples / (w.rows > 0 ? w.rows : 1) * each / (double)d->H * (double)d->Hk * w.columns;
    const double pieces = w.rows / ROWS + each + each * (d->Sq < ROWS ? (double)d->Sk / KEYS : 0);
    w.units = pieces < units ? pieces : units;
    if (w.units < 1) w.units = 1;
    return w;
}

/* Nanoseconds, summed over units, and the largest part so far that is not products of q, k and v. */
struct sum {
    double ns, most;
    const char *because;
};

static void add(struct sum *sum, double ns, const char *what)
{
    sum->ns += ns;
    if (ns > sum->most) sum->most = ns, sum->because = what;
}

static double plain_ns(const struct rate *r, const struct work *w)
{
    return w->heads * r->head + w->numbers * r->number + w->triples * (r->pair + r->product * w->columns);
}

static void add_extras(struct sum *sum, const struct rate *r, const struct work *w, uint64_t features)
{
    for (size_t n = 0; n < sizeof extras / sizeof *extras; n++) {
        const struct extra *e = &extras[n];
        if (e->family != r->family || e->op != r->op || !(features & e->features)) continue;
        add(sum, w->triples * (e->pair + e->product * w->columns), e->name);
    }
}

static bool reads_as_it_lies(const struct rate *r, const attn_problem *p, const attn_dims *d)
{
    return r->family <= PORTABLE && p->op == ATTN_OP_FORWARD && !d->packed && d->Sq * (d->H / d->Hk) <= FEW_ROWS;
}

/* The forward that a backward without `out` and `lse` runs first. */
static void add_first(struct sum *sum, const struct rate *r, const struct work *w, const attn_plan *plan)
{
    const char *kernel = r->family == HOPPER ? "generic" : r->kernel;
    const struct rate *first = rate_of(kernel, ATTN_OP_FORWARD, plan->problem->q.dtype);
    sum->ns += plain_ns(first, w);
    add_extras(sum, first, w, plan->features);
}

static attn_cost cost_of(const attn_device_info *info, const attn_plan *plan, double flops, double triples,
                         const attn_strange *strange)
{
    const attn_problem *const p = plan->problem;
    const attn_dims d = attn_dims_of(p);
    const double columns = (double)(d.D + d.Dv);
    const struct rate *r = rate_of(plan->kernel->name, p->op, p->q.dtype);
    struct sum sum = { .because = "" };
    if (flops <= 0) return (attn_cost){ flops, LAUNCH_S, LAUNCH_S, "" };
    if (reads_as_it_lies(r, p, &d)) r = &few_rows[r->family];
    const struct work w = work_of(p, &d, triples, info->units);
    const double each = r->strange + r->strange_product * columns;
    sum.ns = plain_ns(r, &w);
    add_extras(&sum, r, &w, plan->features);
    if (p->op == ATTN_OP_BACKWARD && p->out.rank == 0) add_first(&sum, r, &w, plan);
    const double worst = sum.ns + triples * each;
    add(&sum, triples * (strange->costly * each + strange->cheap * r->cheap), "rows whose scores leave float32");
    return (attn_cost){ .flops = flops,
                        .seconds = LAUNCH_S + sum.ns / w.units / 1e9,
                        .worst = LAUNCH_S + worst / w.units / 1e9,
                        .because = sum.most > sum.ns / 2 ? sum.because : "" };
}

/* Operations of a triple, as attn_flops() counts them. */
static double flops_of_triple(const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    return 2 * (double)(d.D + d.Dv) * (p->op == ATTN_OP_BACKWARD ? 2.5 : 1);
}

attn_cost attn_cost_of(const attn_device_info *info, const attn_plan *plan)
{
    const attn_strange none = { 0, 0 };
    const double flops = attn_flops(plan->problem);
    return cost_of(info, plan, flops, flops / flops_of_triple(plan->problem), &none);
}

attn_cost attn_cost_closer(const attn_device_info *info, const attn_plan *plan, uint64_t readable, uint64_t draw)
{
    const attn_problem *const p = plan->problem;
    const struct rate *r = rate_of(plan->kernel->name, p->op, p->q.dtype);
    const double flops = attn_flops(p);
    const double triples = r->family == GENERIC ? flops / flops_of_triple(p) : attn_scores(p); /* it skips no tiles */
    const bool no_repair = r->family == GENERIC && (plan->features & OPTIONS);
    const attn_strange_limits limits = { r->most, no_repair ? GENERIC_CHEAP : INFINITY };
    const attn_strange strange = attn_strange_of(p, &limits, readable, draw);
    return cost_of(info, plan, flops, triples, &strange);
}
