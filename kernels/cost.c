/* cost.c: attn_cost_of(), the time that a problem is expected to take, from a table of measured rates.
 *
 * An estimate multiplies the number of (query, key, head) triples by the kernel's rates, adds the extra time of tensors
 * and options, and divides by the number of the device's units that have work. All rates are nanoseconds of one unit
 * (attn_device_info.units: a thread of a CPU, a multiprocessor of a GPU). A GPU block for 128 rows takes as long for a
 * single row as for 128. On another machine of the same kind the real time may be a third or three times the estimate.
 * `build/cost-bench` prints estimates beside measurements; use it to measure a new or faster kernel.
 *
 * Machines on which the rates were measured:
 *   cpu    two cores of an AMD EPYC (Zen 5, avx512_bf16) in a virtual machine, one thread, processor time, 2026-11-26.
 *          The rates of amx are from MEASUREMENTS.md ("The CPU kernels": Sapphire Rapids, 2026-11-20). neon and
 *          neon_bf16 were not measured, and have avx2's rates. Where neon_bf16 multiplies in bf16, its `product` is
 *          half of avx2's.
 *   cuda   one H100 (132 multiprocessors), 2026-11-26. The rates of float8, latent and decode are from
 *          MEASUREMENTS.md. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/strange.h"
#include "kernels/tiles.h"

/* ---- Rates: the measured times of kernels ------------------------------------------------------------------------ */

/* Families of kernels. An option costs the same in all kernels of a family. NARROW are the Hopper kernels for problems
 * with few query rows, HOPPER the other Hopper kernels. */
enum family { CPU, PORTABLE, DOUBLE, HOPPER, NARROW, GENERIC, DECODE, SIMPLE };

/* the largest score that CPU kernels compute in float32: SIMD_SCORE_MOST of cpu/simd.h, converted from base 2 to base
 * e */
#define CPU_MOST 5.8e37
/* the largest score that CUDA kernels compute in float32 (see kernels/README.md, "The CUDA backend") */
#define CUDA_MOST 0x1p27
#define LSE_MOST  ((double)ATTN_LSE_MOST)

/* If a row's scores exceed the range of float32, kernels repair the row: they compute it a second time. The generic
 * kernel for options does not repair rows with scores of GENERIC_CHEAP or more (HUGE_SCORE of cuda/common/args.cuh),
 * unless dq of a backward exceeds the range of float32. The float32 kernels look at tiles: if q and k are so large that
 * scores of SINGLE_BOUND are possible, they repair every row of the tile (cuda/sm80/f32_forward.cu). */
#define GENERIC_CHEAP 0x1p33
#define SINGLE_BOUND  0x1p22

#define BFLOAT (ATTN_DTYPE_BIT(BF16))
#define SINGLE (ATTN_DTYPE_BIT(F32))
#define FLOAT8 (ATTN_DTYPE_BIT(F8E4M3))
#define ANY    ATTN_DTYPES_FORWARD

/* Rates of a kernel, in nanoseconds of one unit (a thread of a CPU, a multiprocessor of a GPU). A triple (query, key,
 * head) costs pair + product * (D + Dv). In a row whose scores exceed the range of float32, a triple costs strange +
 * strange_product * (D + Dv) more. */
struct rate {
    const char *kernel;
    attn_op op;
    unsigned dtypes; /* dtypes of q: bits of ATTN_DTYPE_BIT() */
    enum family family;
    /* nanoseconds for each head of each sequence; for GPU kernels whose thread blocks compute tiles of rows,
     * nanoseconds for each thread block */
    double head;
    /* nanoseconds to read or pack one number of K or V */
    double number;
    double pair, product;
    double strange, strange_product;
    /* time of each (query, key, head) triple in a cheap row: a row whose scores exceed the range of float32, but which
     * kernels compute nearly as fast as other rows (strange.h) */
    double cheap;
    /* A row whose largest score is above this number is computed a second time. In a backward with a given lse, the
     * lse is compared instead of the score. */
    double most;
};

/* largest number of rows of a tile for which a CPU reads K and V without packing them: FLASH_DOT_ROWS of cpu/flash.h */
enum { FEW_ROWS = 8 };

/* The measured rates of all kernels. The columns are the members of struct rate: kernel, operation, dtypes, family;
 * head, number, pair, product; strange, strange_product, cheap, most.
 *
 * The generic backward must compute a row again if its scores exceed the range of float32. With head size 64, such a
 * row takes 400 ns per (query, key, head) triple if each block has a multiprocessor to itself, and 1450 ns on a full
 * device. The rate in the table lies between the two. */
/* clang-format off */
static const struct rate rates[] = {
    { "amx",            ATTN_OP_FORWARD,  BFLOAT,          CPU,      250,  .08, .12, .0017,  8,   .13,  .8, CPU_MOST },
    { "amx",            ATTN_OP_FORWARD,  ANY,             CPU,      250,  .08, .12, .0060,  8,   .13,  .8, CPU_MOST },
    { "amx",            ATTN_OP_BACKWARD, BFLOAT,          CPU,      400,  .08, .20, .0070,  10,  .125, .8, LSE_MOST },
    { "amx",            ATTN_OP_BACKWARD, ANY,             CPU,      400,  .08, .20, .0220,  10,  .125, .8, LSE_MOST },
    { "bf16",           ATTN_OP_FORWARD,  BFLOAT | FLOAT8, CPU,      250,  .08, .16, .0041,  8,   .13,  .8, CPU_MOST },
    { "bf16",           ATTN_OP_FORWARD,  ANY,             CPU,      250,  .08, .22, .0082,  8,   .13,  .8, CPU_MOST },
    { "bf16",           ATTN_OP_BACKWARD, BFLOAT,          CPU,      400,  .08, .22, .0128,  10,  .125, .8, LSE_MOST },
    { "bf16",           ATTN_OP_BACKWARD, ANY,             CPU,      400,  .08, .25, .0240,  10,  .125, .8, LSE_MOST },
    { "avx512",         ATTN_OP_FORWARD,  ANY,             CPU,      250,  .08, .22, .0084,  8,   .13,  .8, CPU_MOST },
    { "avx512",         ATTN_OP_BACKWARD, ANY,             CPU,      400,  .08, .25, .0240,  10,  .125, .8, LSE_MOST },
    { "avx2",           ATTN_OP_FORWARD,  ANY,             CPU,      250,  .08, .45, .0160,  10,  .20,  1,  CPU_MOST },
    { "avx2",           ATTN_OP_BACKWARD, ANY,             CPU,      400,  .08, .60, .0480,  14,  .22,  1,  LSE_MOST },
    { "neon_bf16",      ATTN_OP_FORWARD,  BFLOAT | FLOAT8, CPU,      250,  .08, .45, .0080,  10,  .20,  1,  CPU_MOST },
    { "neon_bf16",      ATTN_OP_FORWARD,  ANY,             CPU,      250,  .08, .45, .0160,  10,  .20,  1,  CPU_MOST },
    { "neon_bf16",      ATTN_OP_BACKWARD, BFLOAT,          CPU,      400,  .08, .60, .0240,  14,  .22,  1,  LSE_MOST },
    { "neon_bf16",      ATTN_OP_BACKWARD, ANY,             CPU,      400,  .08, .60, .0480,  14,  .22,  1,  LSE_MOST },
    { "neon",           ATTN_OP_FORWARD,  ANY,             CPU,      250,  .08, .45, .0160,  10,  .20,  1,  CPU_MOST },
    { "neon",           ATTN_OP_BACKWARD, ANY,             CPU,      400,  .08, .60, .0480,  14,  .22,  1,  LSE_MOST },
    { "portable",       ATTN_OP_FORWARD,  ANY,             PORTABLE, 500,  .3,  6,   .11,    20,  .5,   3,  CPU_MOST },
    { "portable",       ATTN_OP_BACKWARD, ANY,             PORTABLE, 800,  .3,  7,   .30,    40,  .8,   3,  LSE_MOST },
    { "double",         ATTN_OP_FORWARD,  ANY,             DOUBLE,   500,  1,   9,   .31,    0,   0,    0,  FLT_MAX },
    { "double",         ATTN_OP_BACKWARD, ANY,             DOUBLE,   500,  1,   9,   .75,    0,   0,    0,  FLT_MAX },
    { "flash2",         ATTN_OP_FORWARD,  ANY,             DOUBLE,   500,  1,   9,   .25,    0,   0,    0,  FLT_MAX },
    { "flash2",         ATTN_OP_BACKWARD, ANY,             DOUBLE,   500,  1,   9,   1.4,    0,   0,    0,  FLT_MAX },
    { "sm90",           ATTN_OP_FORWARD,  FLOAT8,          HOPPER,   1000, .02, .04, .00020, 80,  2,    1,  CUDA_MOST },
    { "sm90",           ATTN_OP_FORWARD,  ANY,             HOPPER,   1000, .02, .04, .00028, 80,  2,    1,  CUDA_MOST },
    { "sm90",           ATTN_OP_BACKWARD, ANY,             HOPPER,   2000, .02, .05, .0010,  300, 9,    4,  LSE_MOST },
    { "sm90+decode",    ATTN_OP_FORWARD,  ANY,             NARROW,   1900, .05, .04, .00028, 80,  2,    1,  CUDA_MOST },
    { "sm90_f8",        ATTN_OP_FORWARD,  ANY,             HOPPER,   1000, .02, .04, .00020, 80,  2,    1,  CUDA_MOST },
    { "sm90_latent",    ATTN_OP_FORWARD,  ANY,             NARROW,   1900, .08, .02, .00045, 60,  1.5,  1,  CUDA_MOST },
    { "sm90_wide",      ATTN_OP_FORWARD,  ANY,             HOPPER,   1000, .02, .04, .00042, 60,  1.5,  .2, CUDA_MOST },
    { "sm90_wide",      ATTN_OP_BACKWARD, ANY,             HOPPER,   2000, .02, .05, .0013,  300, 9,    4,  LSE_MOST },
    { "decode",         ATTN_OP_FORWARD,  ANY,             DECODE,   1900, .08, .05, .0006,  60,  1.5,  .2, CUDA_MOST },
    { "generic+decode", ATTN_OP_FORWARD,  ANY,             DECODE,   1900, .05, .05, .0006,  60,  1.5,  .2, CUDA_MOST },
    { "generic",        ATTN_OP_FORWARD,  SINGLE,          GENERIC,  1000, .05, .02, .0022,  60,  1.2,  .2, CUDA_MOST },
    { "generic",        ATTN_OP_FORWARD,  ANY,             GENERIC,  1000, .02, .05, .0006,  60,  1.5,  .2, CUDA_MOST },
    { "generic",        ATTN_OP_BACKWARD, SINGLE,          GENERIC,  2000, .05, .02, .0065,  300, 9,    4,  LSE_MOST },
    { "generic",        ATTN_OP_BACKWARD, ANY,             GENERIC,  2000, .02, .07, .0022,  200, 4.5,  4,  LSE_MOST },
    { "simple",         ATTN_OP_FORWARD,  ANY,             SIMPLE,   0,    .1,  55,  .42,    0,   0,    0,  CUDA_MOST },
    { "simple",         ATTN_OP_BACKWARD, ANY,             SIMPLE,   0,    .1,  115, .95,    0,   0,    0,  LSE_MOST },
};

/* Rates of the CPU kernels for a forward with few query rows (FEW_ROWS), which reads K and V without packing. */
static const struct rate few_rows[] = {
    [CPU]      = { "",  ATTN_OP_FORWARD,  ANY,             CPU,      200, .12,  .5,  .035,      8, .13, .8, CPU_MOST },
    [PORTABLE] = { "",  ATTN_OP_FORWARD,  ANY,             PORTABLE, 500, .3,   6,   .7,       20, .5,  3,  CPU_MOST },
};

/* Options for which the generic kernels have a separate variant, which computes the scores one by one. */
#define SCORES                                                                                                       \
    (ATTN_TENSOR_BIT(bias) | ATTN_TENSOR_BIT(keep_mask) | ATTN_TENSOR_BIT(mask_startend_rows) |                      \
     ATTN_TENSOR_BIT(alibi_slopes) | ATTN_OPTION_BIT(SOFTCAP) | ATTN_OPTION_BIT(SCALE))
#define OPTIONS (SCORES | ATTN_OPTION_BIT(DROPOUT))
#define SOFTCAP ATTN_OPTION_BIT(SOFTCAP)
#define DROPOUT ATTN_OPTION_BIT(DROPOUT)
#define BIAS    ATTN_TENSOR_BIT(bias)
#define KEEP    ATTN_TENSOR_BIT(keep_mask)
#define SLOPES  ATTN_TENSOR_BIT(alibi_slopes)
#define BOUNDS  ATTN_TENSOR_BIT(mask_startend_rows)
#define DBIAS   ATTN_TENSOR_BIT(dbias)
#define DSLOPES ATTN_TENSOR_BIT(dalibi_slopes)

/* The parts of the device that do the extra work of an option (struct extra).
 *   TILES  the blocks that compute the kernel's tiles
 *   WAITS  the blocks that compute the kernel's tiles; if a block is alone on its multiprocessor, it waits for memory
 *          half of the time
 *   ROWS   one warp for each row */
enum by { TILES, WAITS, ROWS };

/* Each row has the time that some features (tensors or options) add to the work of one (query, key, head) triple. If a
 * problem has at least one of the features of a row, the row's time is added once. */
static const struct extra {
    enum family family;
    attn_op op;
    uint64_t features;
    const char *name; /* name that attn_cost.because reports if this feature costs most */
    double pair, product;
    enum by by;
} extras[] = {
    { CPU,      ATTN_OP_FORWARD,  SOFTCAP,                   "softcap",               .40, 0,     TILES },
    { CPU,      ATTN_OP_FORWARD,  BIAS,                      "bias",                  .60, 0,     TILES },
    { CPU,      ATTN_OP_FORWARD,  KEEP,                      "keep_mask",             .45, 0,     TILES },
    { CPU,      ATTN_OP_FORWARD,  SLOPES,                    "alibi_slopes",          .25, 0,     TILES },
    { CPU,      ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             1.3, 0,     TILES },
    { CPU,      ATTN_OP_BACKWARD, SOFTCAP,                   "softcap",               .40, 0,     TILES },
    { CPU,      ATTN_OP_BACKWARD, BIAS,                      "bias",                  .70, 0,     TILES },
    { CPU,      ATTN_OP_BACKWARD, KEEP,                      "keep_mask",             .45, 0,     TILES },
    { CPU,      ATTN_OP_BACKWARD, SLOPES,                    "alibi_slopes",          .20, 0,     TILES },
    { CPU,      ATTN_OP_BACKWARD, DBIAS,                     "dbias",                 1.5, 0,     TILES },
    { CPU,      ATTN_OP_BACKWARD, DSLOPES,                   "dalibi_slopes",         .80, 0,     TILES },
    { CPU,      ATTN_OP_BACKWARD, DROPOUT,                   "dropout_p",             1.4, 0,     TILES },
    { PORTABLE, ATTN_OP_FORWARD,  SOFTCAP,                   "softcap",               11,  0,     TILES },
    { PORTABLE, ATTN_OP_FORWARD,  BIAS,                      "bias",                  2,   0,     TILES },
    { PORTABLE, ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             3,   0,     TILES },
    { PORTABLE, ATTN_OP_BACKWARD, SOFTCAP,                   "softcap",               11,  0,     TILES },
    { PORTABLE, ATTN_OP_BACKWARD, BIAS,                      "bias",                  2,   0,     TILES },
    { PORTABLE, ATTN_OP_BACKWARD, DBIAS,                     "dbias",                 2,   0,     TILES },
    { PORTABLE, ATTN_OP_BACKWARD, DSLOPES,                   "dalibi_slopes",         2,   0,     TILES },
    { PORTABLE, ATTN_OP_BACKWARD, DROPOUT,                   "dropout_p",             3,   0,     TILES },
    { DOUBLE,   ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             30,  0,     TILES },
    { DOUBLE,   ATTN_OP_BACKWARD, DROPOUT,                   "dropout_p",             30,  0,     TILES },
    { HOPPER,   ATTN_OP_FORWARD,  SOFTCAP,                   "softcap",               .08, 0,     TILES },
    { HOPPER,   ATTN_OP_FORWARD,  BIAS,                      "bias",                  .06, .0002, TILES },
    { HOPPER,   ATTN_OP_FORWARD,  KEEP,                      "keep_mask",             .04, .0001, TILES },
    { HOPPER,   ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             .13, 0,     TILES },
    { HOPPER,   ATTN_OP_BACKWARD, SOFTCAP,                   "softcap",               .10, 0,     TILES },
    { HOPPER,   ATTN_OP_BACKWARD, BIAS,                      "bias",                  .32, 0,     TILES },
    { HOPPER,   ATTN_OP_BACKWARD, KEEP,                      "keep_mask",             .22, 0,     TILES },
    { HOPPER,   ATTN_OP_BACKWARD, DROPOUT,                   "dropout_p",             .25, 0,     TILES },
    { HOPPER,   ATTN_OP_BACKWARD, DBIAS,                     "dbias",                 .73, .0019, TILES },
    { HOPPER,   ATTN_OP_BACKWARD, DSLOPES,                   "dalibi_slopes",         .35, .001,  TILES },
    { NARROW,   ATTN_OP_FORWARD,  SOFTCAP,                   "softcap",               .08, 0,     TILES },
    { NARROW,   ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             .13, 0,     TILES },
    { GENERIC,  ATTN_OP_FORWARD,  OPTIONS,                   "options, or dropout_p", .53, .0025, WAITS },
    { GENERIC,  ATTN_OP_FORWARD,  BIAS,                      "options of the scores", 1.5, 0,     WAITS },
    { GENERIC,  ATTN_OP_FORWARD,  KEEP,                      "options of the scores", 1,   0,     WAITS },
    { GENERIC,  ATTN_OP_FORWARD,  SOFTCAP | SLOPES | BOUNDS, "options of the scores", .3,  0,     WAITS },
    { GENERIC,  ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             .2,  0,     WAITS },
    { GENERIC,  ATTN_OP_BACKWARD, OPTIONS,                   "options, or dropout_p", 1,   0,     TILES },
    { GENERIC,  ATTN_OP_BACKWARD, BIAS,                      "options of the scores", 2.2, 0,     TILES },
    { GENERIC,  ATTN_OP_BACKWARD, KEEP,                      "options of the scores", 1.5, 0,     TILES },
    { GENERIC,  ATTN_OP_BACKWARD, SOFTCAP | SLOPES | BOUNDS, "options of the scores", .4,  0,     TILES },
    { GENERIC,  ATTN_OP_BACKWARD, DROPOUT,                   "dropout_p",             .5,  0,     TILES },
    { GENERIC,  ATTN_OP_BACKWARD, DBIAS,                     "dbias",                 .73, .0019, TILES },
    { GENERIC,  ATTN_OP_BACKWARD, DSLOPES,                   "dalibi_slopes",         .35, .001,  TILES },
    { GENERIC,  ATTN_OP_BACKWARD, DBIAS,                     "dbias",                 225, .38,   ROWS },
    { GENERIC,  ATTN_OP_BACKWARD, DSLOPES,                   "dalibi_slopes",         70,  .44,   ROWS },
    { DECODE,   ATTN_OP_FORWARD,  SCORES,                    "options of the scores", 1.5, .0042, TILES },
    { DECODE,   ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             1,   0,     TILES },
    { SIMPLE,   ATTN_OP_FORWARD,  DROPOUT,                   "dropout_p",             15,  0,     ROWS },
    { SIMPLE,   ATTN_OP_BACKWARD, DROPOUT,                   "dropout_p",             30,  0,     ROWS },
    { SIMPLE,   ATTN_OP_BACKWARD, DBIAS,                     "dbias",                 225, .38,   ROWS },
    { SIMPLE,   ATTN_OP_BACKWARD, DSLOPES,                   "dalibi_slopes",         70,  .44,   ROWS },
};
/* clang-format on */

/* Seconds that a call takes before and after the computation itself. On a GPU this is the time to launch a few
 * kernels. */
#define CALL_S         5e-6
#define GPU_FORWARD_S  10e-6
#define GPU_BACKWARD_S 20e-6

/* If a head size is not a multiple of eight, the GPU cannot copy 16 bytes at a time, and each block takes longer.
 * ODD_FORWARD and ODD_BACKWARD are the additional nanoseconds for each key and its value, per 64 columns. */
#define ODD_FORWARD  50
#define ODD_BACKWARD 115

static double call_seconds(const struct rate *r)
{
    if (r->family < HOPPER) return CALL_S;
    return r->op == ATTN_OP_FORWARD ? GPU_FORWARD_S : GPU_BACKWARD_S;
}

/* An observe (statistics of probabilities) has the rates of a forward, because both compute scores. */
static attn_op op_of_rates(attn_op op)
{
    return op == ATTN_OP_OBSERVE ? ATTN_OP_FORWARD : op;
}

static const struct rate *rate_of(const char *kernel, attn_op op, attn_dtype dtype)
{
    op = op_of_rates(op);
    for (size_t n = 0; n < sizeof rates / sizeof *rates; n++)
        if (rates[n].op == op && (rates[n].dtypes >> dtype & 1) && strcmp(rates[n].kernel, kernel) == 0)
            return &rates[n];
    /* a kernel that is missing in `rates` gets the rates of the slowest kernel */
    return &rates[sizeof rates / sizeof *rates - 1];
}

bool attn_cost_knows(const char *kernel, attn_op op, attn_dtype dtype)
{
    const struct rate *r = rate_of(kernel, op, dtype);
    return strcmp(r->kernel, kernel) == 0;
}

/* ---- The expected time of a problem, as a sum of parts ----------------------------------------------------------- */

enum {
    UNIT_ROWS = 64, /* number of rows of a head that a CPU thread computes together */
    /* number of keys that a CPU thread, or a GPU block of the decode kernel, computes at a time if query rows are
     * few */
    UNIT_KEYS = 2048,
    /* number of query rows (in a backward: of keys) that one block computes in the Hopper and the generic kernels */
    BLOCK = 128,
    OPTIONS_BLOCK = 64, /* number of query rows in a block of the generic forward with options */
    /* number of rows that a multiprocessor computes at a time in kernels with one warp per query row */
    WARPS = 32,
    COLUMNS = 64, /* tiles have this many columns of a head, or a multiple of it */
    /* number of columns that one block of the generic kernels computes; heads up to this size need only one block */
    WIDE_COLUMNS = 256,
    WIDE_ROWS = 64,            /* number of rows that a block of sm90_wide computes */
    HOPPER_WIDE_COLUMNS = 512, /* number of columns of a result that a block of sm90_wide computes */
};

/* The amounts of work that a problem needs. Each rate of a kernel (struct rate) is multiplied by one of these
 * amounts. */
struct work {
    /* `heads` is the number of query heads, summed over all sequences; for DECODE and NARROW that of key/value heads.
     * For HOPPER and GENERIC it is the number of thread blocks. Each head (or block) takes the time rate.head. */
    double heads, columns, numbers, triples;
    /* tiled: number of (query, key, head) triples in all tiles, where every tile counts as full; tile_columns: number
     * of columns that blocks multiply for each triple */
    double tiled, tile_columns;
    /* number of keys that a block copies, summed over all blocks, if D or Dv is not a multiple of 8 (see ODD_FORWARD);
     * otherwise 0 */
    double key_blocks;
    /* for each kind of work (enum by): how many of the device's units (CPU threads or GPU multiprocessors) share it */
    double by[ROWS + 1];
};

static double at_most(double x, double most)
{
    return x < 1 ? 1 : x < most ? x : most;
}

static double rounded_up(double x, double to)
{
    return ceil(x / to) * to;
}

/* Returns whether the generic kernels for wide heads (more than WIDE_COLUMNS columns) compute the problem. On GPUs of
 * compute capability 8.x they also compute float32 problems with narrower heads. */
static bool is_wide(const struct rate *r, const attn_plan *plan, const attn_dims *d)
{
    const bool takes_wide_floats = plan->problem->q.dtype == ATTN_F32 && plan->problem->op != ATTN_OP_OBSERVE &&
                                   plan->kernel->head_dim > WIDE_COLUMNS;
    return r->family == GENERIC && (d->D > WIDE_COLUMNS || d->Dv > WIDE_COLUMNS || takes_wide_floats);
}

/* The time of a float32 column in the generic kernels for wide heads, divided by its time in the generic kernels for
 * head sizes up to WIDE_COLUMNS. The table `rates` has the time for head sizes up to WIDE_COLUMNS. The quotient was
 * measured on an H200 on 2026-11-28: 3.8 in a forward, and 4 in a backward with head size 512. */
#define WIDE_FLOAT 4

/* Returns the number of columns that the generic kernels multiply per (query, key) pair if heads are wide (more than
 * WIDE_COLUMNS columns). For float32 it is multiplied by WIDE_FLOAT. For a backward it is divided by 2.5, because the
 * backward's rates cover five products of (D + Dv) / 2 columns each, per column of D + Dv. */
static double wide_columns(const attn_dims *d, attn_dtype dtype, bool back)
{
    const double D = rounded_up((double)d->D, COLUMNS), Dv = rounded_up((double)d->Dv, COLUMNS);
    const double of_D = ceil(D / WIDE_COLUMNS), of_Dv = ceil(Dv / WIDE_COLUMNS);
    const double forward = of_Dv * (D + WIDE_COLUMNS);
    return (dtype == ATTN_F32 ? WIDE_FLOAT : 1) *
           (back ? (forward + 2 * of_D * (D + Dv + WIDE_COLUMNS)) / 2.5 : forward);
}

/* Counts the blocks of `block` rows that all sequences and heads need together. Rows are queries; in a backward they
 * are keys. A block takes the time of `block` rows even if it has fewer rows. */
static void count_blocks(struct work *w, const struct rate *r, const attn_plan *plan, const attn_dims *d, int units)
{
    const bool back = r->op == ATTN_OP_BACKWARD;
    const double sequences = d->B > 0 ? (double)d->B : 1;
    const double total = (double)(back ? d->Sk : d->Sq), each = d->packed ? total / sequences : total;
    const bool wide = is_wide(r, plan, d), hopper_wide = r->family == HOPPER && attn_max64(d->D, d->Dv) > WIDE_COLUMNS;
    const bool options = r->family == GENERIC && (plan->features & OPTIONS) && !back && !wide;
    const double block = options ? OPTIONS_BLOCK : hopper_wide && !back ? WIDE_ROWS : BLOCK, tiles = ceil(each / block);
    const double column_blocks = wide           ? ceil((double)(back ? d->D : d->Dv) / WIDE_COLUMNS)
                                 : !hopper_wide ? 1
                                 : back         ? ceil((double)d->D / WIDE_COLUMNS) + ceil((double)d->Dv / WIDE_COLUMNS)
                                                : ceil((double)d->Dv / HOPPER_WIDE_COLUMNS);
    /* each block of columns computes the scores again, except in the backward of sm90_wide, where it reads them from
     * memory */
    const double scores = hopper_wide && back ? 1 : column_blocks;
    const double blocks = tiles * sequences * (double)(back ? d->Hk : d->H) * column_blocks;
    const bool odd = (d->D % 8 || d->Dv % 8) && plan->problem->q.dtype != ATTN_F32;
    w->heads = blocks;
    w->tiled = w->triples * (each > 0 ? tiles * block / each : 1);
    w->tile_columns = wide ? wide_columns(d, plan->problem->q.dtype, back)
                           : scores * rounded_up((double)d->D, COLUMNS) + rounded_up((double)d->Dv, COLUMNS);
    w->key_blocks = odd ? w->tiled / block : 0;
    w->by[TILES] = at_most(blocks, units);
    w->by[WAITS] = at_most(blocks / 2, units);
}

static struct work work_of(const attn_plan *plan, const struct rate *r, const attn_dims *d, double triples, int units)
{
    const attn_problem *const p = plan->problem;
    const double each = (double)d->B * (double)d->H, rows = (double)d->Sq * (d->packed ? (double)d->H : each);
    struct work w = { .heads = each, .triples = triples, .tiled = triples };
    w.columns = w.tile_columns = (double)(d->D + d->Dv);
    w.numbers = (double)d->Sk * (double)d->Hk * (d->packed ? 1 : (double)d->B) * w.columns;
    if (p->page_table.rank)
        w.numbers = triples / (rows > 0 ? rows : 1) * each / (double)d->H * (double)d->Hk * w.columns;
    const bool splits = d->Sq < UNIT_ROWS && p->op != ATTN_OP_OBSERVE;
    const double pieces = rows / UNIT_ROWS + each + each * (splits ? (double)d->Sk / UNIT_KEYS : 0);
    w.by[TILES] = w.by[WAITS] = at_most(pieces, units);
    w.by[ROWS] = at_most(rows / WARPS, units);
    if (r->family == HOPPER || r->family == GENERIC) count_blocks(&w, r, plan, d, units);
    else if (r->family == DECODE || r->family == NARROW) w.heads = (double)d->B * (double)d->Hk;
    else if (r->family == SIMPLE) w.by[TILES] = w.by[WAITS] = w.by[ROWS];
    return w;
}

/* A sum of costs in nanoseconds. `because` names the feature with the largest cost so far, and `most` is this cost in
 * nanoseconds. The products of q, k and v are not counted as a feature. */
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
    const double each = r->op == ATTN_OP_FORWARD ? ODD_FORWARD / w->by[WAITS] : ODD_BACKWARD / w->by[TILES];
    return (w->heads * r->head + w->numbers * r->number + w->tiled * (r->pair + r->product * w->tile_columns)) /
               w->by[TILES] +
           w->key_blocks * (w->tile_columns / 2 / COLUMNS) * each;
}

static void add_extras(struct sum *sum, const struct rate *r, const struct work *w, const attn_plan *plan)
{
    /* in float32 problems, the generic kernels compute the gradients of options (dbias, dalibi_slopes) with one warp
     * for each row */
    const enum by other = plan->problem->q.dtype == ATTN_F32 ? TILES : ROWS;
    for (size_t n = 0; n < sizeof extras / sizeof *extras; n++) {
        const struct extra *e = &extras[n];
        if (e->family != r->family || e->op != r->op || !(plan->features & e->features)) continue;
        if (r->family == GENERIC && (e->features & (DBIAS | DSLOPES)) && e->by == other) continue;
        const double ns = e->by == ROWS ? w->triples * (e->pair + e->product * w->columns)
                                        : w->tiled * (e->pair + e->product * w->tile_columns);
        add(sum, ns / w->by[e->by], e->name);
    }
}

static bool reads_as_it_lies(const struct rate *r, const attn_problem *p, const attn_dims *d)
{
    return r->family <= PORTABLE && p->op == ATTN_OP_FORWARD && !d->packed && d->Sq * (d->H / d->Hk) <= FEW_ROWS;
}

/* Returns how many times an observe (statistics of probabilities) computes the score of a (query, key) pair, on
 * average. All scores are computed once, for the outputs with one number per row. For each output that shows or sums
 * probabilities, some of the scores are computed once more. */
static double scores_made(const attn_problem *p, const attn_dims *d)
{
    const attn_observe *const o = &p->observe;
    const double rows = d->Sq > 0 ? (double)d->Sq : 1, keys = d->Sk > 0 ? (double)d->Sk : 1;
    const double region = (double)(o->rows[1] - o->rows[0]) / rows * ((double)(o->keys[1] - o->keys[0]) / keys);
    double times = 1;
    if (p->op != ATTN_OP_OBSERVE) return 1;
    if (p->key_mass.rank) times += o->key_mass_rows > 0 ? fmin(1, (double)o->key_mass_rows / rows) : 1;
    else if (p->weights.rank) times += region;
    return p->map.rank ? times + region : times;
}

/* Time that the output top_keys adds to each (query, key, head) triple, in nanoseconds of one unit (a thread of a CPU,
 * a multiprocessor of a GPU). The generic kernel has a separate pass for top_keys, which was measured on an H200 on
 * 2026-11-27: 1.35 ns for 8 keys and D = 128. */
#define TOP_PAIR         0.5
#define TOP_PAIR_GENERIC 1.3

/* Adds the cost of the forward that a backward runs first if it is given no out and lse. */
static void add_first(struct sum *sum, const struct rate *r, const attn_plan *plan, const attn_dims *d, double triples,
                      int units)
{
    const char *kernel = r->family == HOPPER ? "generic" : r->kernel;
    const struct rate *first = rate_of(kernel, ATTN_OP_FORWARD, plan->problem->q.dtype);
    const struct work w = work_of(plan, first, d, triples, units);
    sum->ns += plain_ns(first, &w);
    add_extras(sum, first, &w, plan);
}

/* Returns the bytes of all tensors that are given or written. If k and v lie in pages, only the elements that kernels
 * read are counted; `numbers` is the number of these elements. If k and v share their memory, this memory is counted
 * once. */
static double bytes_of(const attn_problem *p, double numbers)
{
    double bytes = p->page_table.rank ? numbers * (double)attn_dtype_bytes(p->k.dtype) : 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *t = &p->tensor[id];
        const bool in_pages = p->page_table.rank && (id == ATTN_T_k || id == ATTN_T_v);
        if (t->rank == 0 || in_pages || (id == ATTN_T_v && t->data != NULL && t->data == p->k.data)) continue;
        double size = (double)attn_dtype_bytes(t->dtype);
        for (int axis = 0; axis < t->rank; axis++) size *= (double)t->shape[axis];
        bytes += size;
    }
    return bytes;
}

static attn_cost cost_of(const attn_device_info *info, const attn_plan *plan, double flops, double triples,
                         const attn_strange *strange)
{
    const attn_problem *const p = plan->problem;
    const attn_dims d = attn_dims_of(p);
    const double columns = (double)(d.D + d.Dv);
    const struct rate *r = rate_of(plan->kernel->name, p->op, p->q.dtype);
    struct sum sum = { .because = "" };
    const double call = call_seconds(r);
    if (flops <= 0 || (p->op == ATTN_OP_OBSERVE && attn_is_empty(p)))
        return (attn_cost){ flops, bytes_of(p, 0), call, call, "" };
    if (reads_as_it_lies(r, p, &d)) r = &few_rows[r->family];
    triples *= scores_made(p, &d);
    const struct work w = work_of(plan, r, &d, triples, info->units);
    const double each = r->strange + r->strange_product * columns;
    sum.ns = plain_ns(r, &w);
    add_extras(&sum, r, &w, plan);
    const double top_pair = r->family == GENERIC || r->family == HOPPER ? TOP_PAIR_GENERIC : TOP_PAIR;
    if (p->op == ATTN_OP_OBSERVE && p->observe.top > 0) add(&sum, w.triples * top_pair / w.by[TILES], "top_keys");
    if (p->op == ATTN_OP_BACKWARD && p->out.rank == 0) add_first(&sum, r, plan, &d, triples, info->units);
    const double worst = sum.ns + triples * each / w.by[TILES];
    add(&sum, triples * (strange->costly * each + strange->cheap * r->cheap) / w.by[TILES],
        "rows whose scores leave float32");
    return (attn_cost){ .flops = flops,
                        .bytes = bytes_of(p, w.numbers),
                        .seconds = call + sum.ns / 1e9,
                        .worst = call + worst / 1e9,
                        .because = sum.most > sum.ns / 2 ? sum.because : "" };
}

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
    const bool generic = r->family == GENERIC || r->family == DECODE;
    /* Number of (query, key, head) triples that the kernel computes. The generic and decode kernels do not skip tiles
     * that FlashMask hides, so they compute more triples than attn_scores() counts. */
    const double triples = generic ? flops / flops_of_triple(p) : attn_scores(p);
    const attn_strange_limits limits = { .from = r->most,
                                         .cheap_from = generic && (plan->features & OPTIONS) ? GENERIC_CHEAP : INFINITY,
                                         .bound_from = generic && p->op == ATTN_OP_FORWARD ? SINGLE_BOUND : 0,
                                         .gradients = generic && (plan->features & ATTN_OPTION_BIT(SCALE)) };
    const attn_strange strange = attn_strange_of(p, &limits, readable, draw);
    return cost_of(info, plan, flops, triples, &strange);
}

/* ---- The expected time of a merge -------------------------------------------------------------------------------- */

/* Rates of a merge (it joins results over parts of the keys), in nanoseconds of one unit (a thread of a CPU, a
 * multiprocessor of a GPU). Each rate is for one element of a part's `out`. `sum` is the time to add the element to the
 * merged out, and `back` the time to compute its gradient. `sink` is the time that the element adds to dsinks, on which
 * at most one unit per head works. The CPU's rates were measured with one thread on 2026-11-27. The GPU's rates are
 * those of a decode, which also reads each number once. */
static const struct merge_rate {
    double sum, back, sink;
} merge_cpu = { 1.6, 2.5, 1.3 }, merge_gpu = { .05, .1, .05 };

attn_cost attn_merge_cost(const attn_device_info *info, const attn_merge_problem *m)
{
    const struct merge_rate r = attn_is_gpu(info->backend) ? merge_gpu : merge_cpu;
    const attn_tensor *const out = &m->parts[0].out, *const lse = &m->parts[0].lse;
    int64_t numbers = 0, rows = 0;
    /* the number of elements cannot overflow, because attn_merge_check() has checked the merge */
    (void)attn_shape_elements(out->rank, out->shape, &numbers);
    (void)attn_shape_elements(lse->rank, lse->shape, &rows);
    const double all = (double)numbers * m->count, units = at_most((double)rows / UNIT_ROWS, info->units);
    double ns = all * (r.sum + (m->gradients ? r.back : 0)) / units;
    if (m->dsinks.rank) ns += all * r.sink / at_most((double)m->dsinks.shape[0], info->units);
    const double seconds = (attn_is_gpu(info->backend) ? GPU_FORWARD_S : CALL_S) + ns / 1e9;
    /* bytes of out and lse of one partial result; the merged out and lse have the same size */
    const double one = (double)numbers * (double)attn_dtype_bytes(out->dtype) + 4 * (double)rows;
    return (attn_cost){ .flops = 2 * all * (m->gradients ? 3 : 1),
                        .bytes = one * (m->count + 1) * (m->gradients ? 2 : 1),
                        .seconds = seconds,
                        .worst = seconds,
                        .because = "" };
}
