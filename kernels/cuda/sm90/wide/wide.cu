/* wide.cu: shapes of the Hopper forward for head sizes above 256, and the choice of a shape for a problem. The kernel
 * is in wide_tiles.cuh. */
#include "kernels/cuda/sm90/wide/wide_tiles.cuh"

namespace {

typedef cudaError_t launch_function(const forward_job &);

struct shape_row {
    int D, Dv, columns; /* columns: how many columns of `out` a work tile computes */
    /* first index: 1 with softcap, ALiBi or FlashMask; second index: 0 for bfloat16, 1 for float16 */
    launch_function *launch[2][2];
};
template <int DC, int DVC, bool SPLITS> constexpr shape_row row(int column_blocks)
{
    typedef wide_shape<DC, DVC, false, SPLITS> plain;
    typedef wide_shape<DC, DVC, true, SPLITS> options;
    return { DC * 64,
             DVC * 64 * column_blocks,
             DVC * 64,
             { { launch<__nv_bfloat16, plain>, launch<compiled_half, plain> },
               { launch<__nv_bfloat16, options>, launch<compiled_half, options> } } };
}

enum { MOST_COLUMN_BLOCKS = 2 };

/* A problem takes the first row of `shapes` that has at least its head sizes. Sequences whose keys are split take a row
 * of split_shapes. */
/* clang-format off */
const shape_row shapes[] = {
    /* row<A, B, SPLITS>(C). A: number of boxes (64 columns) of q and k. B: number of boxes of `out` that a work tile
     * computes. C: number of work tiles among which the columns of `out` are divided. */
    row<5,  5, false>(1),
    row<6,  6, false>(1),
    row<7,  7, false>(1),
    row<8,  8, false>(1),
    row<12, 6, false>(MOST_COLUMN_BLOCKS),
    row<16, 8, false>(MOST_COLUMN_BLOCKS),
};
/* the table has fewer shapes than `shapes`, because each takes some ten seconds to compile */
const shape_row split_shapes[] = {
    row<6,  6, true>(1),
    row<8,  8, true>(1),
    row<16, 8, true>(MOST_COLUMN_BLOCKS),
};
/* clang-format on */

const shape_row &shape_of(const attn_dims &d, bool splits)
{
    const shape_row *x = splits ? split_shapes : shapes; /* the last row takes all head sizes */
    while (x->D < d.D || x->Dv < d.Dv) x++;
    return *x;
}

/* Returns the rule by which keys are split. It gives a key/value head at most 33 work tiles, because four key/value
 * heads then fill the 132 multiprocessors of an H100. */
split_rule splits_of(const attn_plan *plan)
{
    const attn_problem *const p = plan->problem;
    /* with ALiBi or FlashMask, a work tile has rows of one head, because slopes and masks may differ from head to
     * head */
    return split_rule_of(plan, { BM, BN, 512, 33, !p->alibi_slopes.rank && !p->mask_startend_rows.rank });
}

/* Offsets in bytes of what the workspace holds. At its beginning are the flags that warps set for rows that must be
 * recomputed. */
struct wide_layout {
    int64_t extremes, bytes;
};
wide_layout wide_layout_of(const attn_problem *p, const attn_dims &d)
{
    const int64_t tiles = per_head_of(d, BM) * d.H * (d.packed ? 1 : d.B);
    wide_layout x;
    x.extremes = (tiles * MOST_COLUMN_BLOCKS * FLAGS + 127) / 128 * 128;
    x.bytes = x.extremes;
    if (p->mask_startend_rows.rank)
        x.bytes += (d.B * d.H * attn_tiles(d.Sk, BN) * (int64_t)sizeof(attn_mask_extremes) + 127) / 128 * 128;
    return x;
}

bool plan_wide(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    if (attn_max64(d.D, d.Dv) <= TILE_HEAD_DIM || !plan_forward(chip, plan)) return false;
    const wide_layout place = wide_layout_of(plan->problem, d);
    const int columns = shape_of(d, true).columns;
    plan->workspace_bytes = (size_t)place.bytes +
                            split_workspace(chip, plan, splits_of(plan), columns, (int)attn_tiles(d.Dv, columns));
    return place.extremes < INT32_MAX; /* work tiles are counted in 32 bits */
}

cudaError_t launch_wide(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const attn_problem *const p = plan->problem;
    forward_job job;
    job.chip = chip, job.stream = stream, job.problem = p, job.memory = (char *)memory;
    job.given = cuda_args_of(chip, plan);
    const attn_dims &d = job.given.g.dims;
    job.place = {};
    job.place.extremes = wide_layout_of(p, d).extremes;
    job.read = job.given;
    const bool options = p->softcap > 0 || p->alibi_slopes.rank || p->mask_startend_rows.rank,
               f16 = p->q.dtype == ATTN_F16;
    const split_rule splits = splits_of(plan);
    const split_part part = split_part_of(splits, job.given.g);
    if (part != SPLITS_NONE) job.splits = splits;
    if (part != SPLITS_ALL) {
        const cudaError_t code = shape_of(d, false).launch[options][f16](job);
        if (code != cudaSuccess || part == SPLITS_NONE) return code;
    }
    job.split_memory = job.memory + wide_layout_of(p, d).bytes;
    return shape_of(d, true).launch[options][f16](job);
}

const uint64_t FEATURES = BASIC_FEATURES | LENGTH_FEATURES | PADDING_FEATURES | ATTN_OPTION_BIT(SOFTCAP) |
                          ATTN_TENSOR_BIT(alibi_slopes) | ATTN_TENSOR_BIT(mask_startend_rows);

} // namespace

extern const cuda_kernel sm90_wide_forward = {
    { "sm90_wide", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), ATTN_MAX_HEAD_DIM, FEATURES },
    90,
    90,
    plan_wide,
    launch_wide,
    true,
};
