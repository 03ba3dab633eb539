/* cost.c: what a problem is expected to take: attn_cost_of(), by a table of measured rates.
 *
 *   rates    a row for each kernel, operation and kind of numbers: what a triple (query, key, head) costs
 *   extras   what a tensor or an option adds to a triple, by family of kernels
 *   sums     triples times rates, over the units of the device that find work
 *
 * All rates are nanoseconds of one unit (attn_device_info.units: a thread of a CPU, a multiprocessor of a GPU), so that
 * they hold for any number of them. Another machine of the same kind is up to three times as fast or slow.
 * `build/cost-bench` prints estimates beside what it measures: a new kernel, or one that has become faster, is measured
 * with it, and its row changed.
 *
 * Machines
 *   cpu    two cores of an AMD EPYC (Zen 5, avx512_bf16) in a virtual machine, one thread, processor time, 2026-11-26;
 *          amx from MEASUREMENTS.md ("The CPU ladder": Sapphire Rapids, 2026-11-20)
 *   cuda   one H100 SXM (132 multiprocessors), 2026-11-26; sm90 and f32 from MEASUREMENTS.md */
#include <string.h>

#include "kernels/backend.h"
#include "kernels/tiles.h"

/* ---- Rates ------------------------------------------------------------------------------------------------------- */

/* Kernels whose options cost alike. */
enum family { CPU, CPU_PLAIN, DOUBLE, HOPPER, GENERIC, SIMPLE };

#define BITS16 (ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16))
#define HALF   (ATTN_DTYPE_BIT(F16))
#define BFLOAT (ATTN_DTYPE_BIT(BF16))
#define SINGLE (ATTN_DTYPE_BIT(F32))
#define FLOAT8 (ATTN_DTYPE_BIT(F8E4M3))
#define ANY    (ATTN_DTYPES_FORWARD)

/* Nanoseconds of a unit. A triple costs pair + product * (D + Dv), in a row that leaves float32 also
 * strange + strange_product * (D + Dv). */
struct rate {
    const char *kernel;
    attn_op op;
    unsigned dtypes; /* of q */
    enum family family;
    double head;   /* each head of each sequence, whatever it holds */
    double number; /* each number of K and V of each key/value head: reading or packing it */
    double pair, product;
    double strange, strange_product;
};

enum { FEW_ROWS = 8 }; /* FLASH_DOT_ROWS of cpu/flash.h: tiles with fewer rows read K and V as they lie */

static const struct rate rates[] = {
    /*  kernel           op                  numbers         family    head  number   pair  product  strange, product */
    { "amx", ATTN_OP_FORWARD, BFLOAT, CPU, 250, .08, .12, .0017, 44, .34 },
    { "amx", ATTN_OP_FORWARD, ANY, CPU, 250, .08, .12, .0060, 44, .34 },
    { "amx", ATTN_OP_BACKWARD, BFLOAT, CPU, 400, .08, .20, .0070, 71, .53 },
    { "amx", ATTN_OP_BACKWARD, ANY, CPU, 400, .08, .20, .0220, 71, .53 },
    { "bf16", ATTN_OP_FORWARD, BFLOAT | FLOAT8, CPU, 250, .08, .12, .0041, 44, .34 },
    { "bf16", ATTN_OP_FORWARD, ANY, CPU, 250, .08, .12, .0082, 44, .34 },
    { "bf16", ATTN_OP_BACKWARD, BFLOAT, CPU, 400, .08, .19, .0128, 71, .53 },
    { "bf16", ATTN_OP_BACKWARD, ANY, CPU, 400, .08, .20, .0245, 71, .53 },
    { "avx512", ATTN_OP_FORWARD, ANY, CPU, 250, .08, .12, .0084, 44, .34 },
    { "avx512", ATTN_OP_BACKWARD, ANY, CPU, 400, .08, .20, .0245, 71, .53 },
    { "avx2", ATTN_OP_FORWARD, ANY, CPU, 250, .08, .30, .0168, 44, .34 },
    { "avx2", ATTN_OP_BACKWARD, ANY, CPU, 400, .08, .40, .0490, 71, .53 },
    { "portable", ATTN_OP_FORWARD, ANY, CPU_PLAIN, 250, .3, 5, .10, 44, .8 },
    { "portable", ATTN_OP_BACKWARD, ANY, CPU_PLAIN, 400, .3, 8, .30, 71, 1.2 },
    { "double", ATTN_OP_FORWARD, ANY, DOUBLE, 500, 1, 60, 2, 0, 0 },
    { "double", ATTN_OP_BACKWARD, ANY, DOUBLE, 500, 1, 150, 6, 0, 0 },
    { "sm90", ATTN_OP_FORWARD, FLOAT8, HOPPER, 0, .02, .02, .00028, 2, .6 },
    { "sm90", ATTN_OP_FORWARD, ANY, HOPPER, 0, .02, .02, .00038, 2, .6 },
    { "sm90", ATTN_OP_BACKWARD, ANY, HOPPER, 0, .02, .05, .0011, 4, 1.2 },
    { "sm90+decode", ATTN_OP_FORWARD, ANY, HOPPER, 0, .05, .02, .00038, 2, .6 },
    { "sm90_f8", ATTN_OP_FORWARD, ANY, HOPPER, 0, .02, .02, .00028, 2, .6 },
    { "sm90_latent", ATTN_OP_FORWARD, ANY, HOPPER, 0, .08, .02, .00045, 2, .6 },
    { "decode", ATTN_OP_FORWARD, ANY, GENERIC, 0, .08, .02, .0008, 2, .6 },
    { "generic+decode", ATTN_OP_FORWARD, ANY, GENERIC, 0, .05, .05, .0008, 2, .6 },
    { "generic", ATTN_OP_FORWARD, SINGLE, GENERIC, 0, .05, .05, .0024, 2, .6 },
    { "generic", ATTN_OP_FORWARD, ANY, GENERIC, 0, .02, .05, .0008, 2, .6 },
    { "generic", ATTN_OP_BACKWARD, SINGLE, GENERIC, 0, .05, .10, .0060, 4, 1.2 },
    { "generic", ATTN_OP_BACKWARD, ANY, GENERIC, 0, .02, .10, .0022, 4, 1.2 },
    { "simple", ATTN_OP_FORWARD, ANY, SIMPLE, 0, .1, 2, .6, 0, 0 },
    { "simple", ATTN_OP_BACKWARD, ANY, SIMPLE, 0, .1, 4, 1.8, 0, 0 },
};

/* What reads K and V as they lie in memory, for at most FEW_ROWS rows of queries, replaces the row of a CPU's kernel.
 * */
static const struct rate few_rows = { "", ATTN_OP_FORWARD, ANY, CPU, 1000, .12, .5, .035, 44, .34 };

/* What a triple costs more. The first line of a kernel's family, operation and feature counts. */
static const struct extra {
    enum family family;
    attn_op op;
    uint64_t features; /* one of these, and all of these are added once */
    const char *name;
    double pair, product;
    int heads; /* not 0: so many heads are computed beside each other on a unit, whatever else is there */
} extras[] = {
#define OPTIONS                                                                                 \
    (ATTN_TENSOR_BIT(bias) | ATTN_TENSOR_BIT(keep_mask) | ATTN_TENSOR_BIT(mask_startend_rows) | \
     ATTN_TENSOR_BIT(alibi_slopes) | ATTN_OPTION_BIT(SOFTCAP) | ATTN_OPTION_BIT(SCALE))
#define DROPOUT ATTN_OPTION_BIT(DROPOUT)
    { CPU, ATTN_OP_FORWARD, ATTN_OPTION_BIT(SOFTCAP), "softcap", .35, 0, 0 },
    { CPU, ATTN_OP_FORWARD, ATTN_TENSOR_BIT(bias), "bias", .55, 0, 0 },
    { CPU, ATTN_OP_FORWARD, ATTN_TENSOR_BIT(keep_mask), "keep_mask", .35, 0, 0 },
    { CPU, ATTN_OP_FORWARD, ATTN_TENSOR_BIT(alibi_slopes), "alibi_slopes", .20, 0, 0 },
    { CPU, ATTN_OP_FORWARD, DROPOUT, "dropout_p", 3, 0, 0 },
    { CPU, ATTN_OP_BACKWARD, ATTN_OPTION_BIT(SOFTCAP), "softcap", .40, 0, 0 },
    { CPU, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(bias), "bias", .45, 0, 0 },
    { CPU, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(keep_mask), "keep_mask", .35, 0, 0 },
    { CPU, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(alibi_slopes), "alibi_slopes", .15, 0, 0 },
    { CPU, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(dbias), "dbias", .90, 0, 0 },
    { CPU, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(dalibi_slopes), "dalibi_slopes", .70, 0, 0 },
    { CPU, ATTN_OP_BACKWARD, DROPOUT, "dropout_p", 3, 0, 0 },
    { CPU_PLAIN, ATTN_OP_FORWARD, DROPOUT, "dropout_p", 4, 0, 0 },
    { CPU_PLAIN, ATTN_OP_BACKWARD, DROPOUT, "dropout_p", 4, 0, 0 },
    { HOPPER, ATTN_OP_FORWARD, ATTN_OPTION_BIT(SOFTCAP), "softcap", .08, 0, 0 },
    { HOPPER, ATTN_OP_BACKWARD, ATTN_OPTION_BIT(SOFTCAP), "softcap", .10, 0, 0 },
    { GENERIC, ATTN_OP_FORWARD, OPTIONS, "options", 2.7, 0, 0 },
    { GENERIC, ATTN_OP_FORWARD, DROPOUT, "dropout_p", 1.2, 0, 0 },
    { GENERIC, ATTN_OP_BACKWARD, OPTIONS, "options", 6, 0, 0 },
    { GENERIC, ATTN_OP_BACKWARD, DROPOUT, "dropout_p", 3, 0, 0 },
    { GENERIC, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(dbias), "dbias", 230, .2, 0 },
    { GENERIC, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(dalibi_slopes), "dalibi_slopes", 690, 0, 8 },
    { SIMPLE, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(dbias), "dbias", 230, .2, 0 },
    { SIMPLE, ATTN_OP_BACKWARD, ATTN_TENSOR_BIT(dalibi_slopes), "dalibi_slopes", 690, 0, 8 },
};

/* What a call takes that finds everything ready: seconds. */
#define LAUNCH_S 5e-6

static const struct rate *rate_of(const char *kernel, attn_op op, attn_dtype dtype)
{
    for (size_t n = 0; n < sizeof rates / sizeof *rates; n++)
        if (rates[n].op == op && (rates[n].dtypes >> dtype & 1) && strcmp(rates[n].kernel, kernel) == 0)
            return &rates[n];
    return NULL;
}

/* ---- Sums -------------------------------------------------------------------------------------------------------- */

enum { ROWS = 64, KEYS = 2048 }; /* a unit works on so many rows of a head, and where there are few on so many keys */

/* A problem in the sizes that rates are of. */
struct work {
    double heads, rows, columns, numbers, triples;
    double units; /* of the device's, those that find work */
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

/* Nanoseconds of units; *most and *because: the largest part that is no product, so far. */
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
        double ns = w->triples * (e->pair + e->product * w->columns);
        if (e->heads && w->heads < w->units * e->heads) ns *= w->units / w->heads; /* the other units wait */
        add(sum, ns, e->name);
    }
}

attn_cost attn_cost_of(const attn_device_info *info, const attn_plan *plan, const attn_strange *strange)
{
    const attn_problem *const p = plan->problem;
    const attn_dims d = attn_dims_of(p);
    const bool backward = p->op == ATTN_OP_BACKWARD;
    const double columns = (double)(d.D + d.Dv), each = 2 * columns * (backward ? 2.5 : 1);
    const struct rate *r = rate_of(plan->kernel->name, p->op, p->q.dtype);
    struct sum sum = { .because = "" };
    const double flops = attn_flops(p);
    if (flops <= 0 || r == NULL) return (attn_cost){ flops, LAUNCH_S, "" };
    const struct work w = work_of(p, &d, strange ? attn_scores(p) : flops / each, info->units);
    if (r->family == CPU && !backward && d.Sq * (d.H / (d.Hk ? d.Hk : 1)) <= FEW_ROWS && !d.packed) r = &few_rows;
    sum.ns = plain_ns(r, &w);
    add_extras(&sum, r, &w, plan->features);
    if (backward && p->out.rank == 0) {
        const struct rate *first = rate_of(r->family == HOPPER ? "generic" : r->kernel, ATTN_OP_FORWARD, p->q.dtype);
        if (first) sum.ns += plain_ns(first, &w), add_extras(&sum, first, &w, plan->features);
    }
    if (strange && strange->alike + strange->other > 0)
        add(&sum, (strange->other + strange->alike) * w.triples * (r->strange + r->strange_product * columns),
            "rows whose scores leave float32");
    return (attn_cost){ flops, LAUNCH_S + sum.ns / w.units / 1e9, sum.most > sum.ns / 2 ? sum.because : "" };
}
