/* forward_pairs.cu: tile shapes of the Hopper forward for bias, keep_mask and dropout (pairs.cuh). The kernel is in
 * forward_tiles.cuh. Shapes with a bias have fewer keys per tile, because the next tile's bias takes registers. */
#include "kernels/cuda/sm80/decode.h"
#include "kernels/cuda/sm90/forward/forward_split.cuh"

namespace {

struct pair_row {
    int D, BN;
    bool bias;
    /* [0]: bfloat16, [1]: float16 */
    cudaError_t (*launch[2])(const forward_job &, int least_Sk, int most_Sk);
    cudaError_t (*launch_split[2])(const forward_job &);
};
template <class X> constexpr pair_row row()
{
    return { X::D,
             X::BN,
             X::BIAS,
             { launch<__nv_bfloat16, X>, launch<compiled_half, X> },
             { launch_splits<__nv_bfloat16, typename X::split_shape>,
               launch_splits<compiled_half, typename X::split_shape> } };
}

/* clang-format off */
const pair_row pair_shapes[] = {
    /* D, Dv: largest head sizes of q and v; C: consumers; BN: keys per tile; stages: buffers of a ring
     *        D    C  BN stages Dv, variant */
    row<shape<64,  2, 128, 4, 64,  WITH_PAIRS>>(),
    row<shape<128, 2, 128, 2, 128, WITHOUT_BIAS>>(),
    row<shape<128, 2, 96,  2, 128, WITH_PAIRS>>(),
    row<shape<256, 2, 64,  2, 256, WITHOUT_BIAS>>(),
    row<shape<256, 2, 48,  2, 256, WITH_PAIRS>>(),
};
/* clang-format on */

/* Returns the first shape that has at least the problem's head sizes and, if needed, can add a bias. The last two
 * shapes take every problem that plan_forward() accepts. */
const pair_row &shape_of(const attn_geometry &g, bool bias)
{
    const pair_row *x = pair_shapes;
    while (x->D < attn_max64(g.dims.D, g.dims.Dv) || x->bias < bias) x++;
    return *x;
}

split_rule splits_of(const attn_plan *plan)
{
    const pair_row &x = shape_of(plan->geometry, plan->problem->bias.rank);
    return split_rule_of(plan, split_tile_of_shape(x.D, x.BN, false));
}

bool plan_pairs(const cuda_chip *chip, attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const int BN = shape_of(g, p->bias.rank).BN;
    if (!plan_forward(chip, plan)) return false;
    if ((p->keep_mask.rank || p->mask_startend_rows.rank) && attn_tiles(g.dims.Sk, BN) > MOST_KEY_TILES) return false;
    if (p->keep_mask.rank && (g.dims.B * g.dims.H > 65535 || attn_tiles(g.dims.Sq, KIND_ROWS) > 65535)) return false;
    plan->workspace_bytes = (size_t)pair_layout_of(p, g, BN).bytes +
                            split_workspace(chip, plan, splits_of(plan), shape_of(g, p->bias.rank).D);
    return true;
}

cudaError_t launch_pairs(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const attn_problem *const p = plan->problem;
    forward_job job;
    job.chip = chip, job.stream = stream, job.problem = p, job.memory = (char *)memory;
    job.given = cuda_args_of(chip, plan);
    job.given.decode_rows = chip->decode_rows;
    job.read = job.given;
    job.place = layout_of(p, job.given.g.dims);
    const attn_geometry &g = job.given.g;
    const pair_row &shape = shape_of(g, p->bias.rank);
    const split_rule splits = splits_of(plan);
    const split_part part = split_part_of(splits, g);
    const bool f16 = p->q.dtype == ATTN_F16;
    if (part != SPLITS_NONE) job.splits = splits;
    if (part != SPLITS_ALL) {
        const cudaError_t code = shape.launch[f16](job, 0, INT32_MAX);
        if (code != cudaSuccess || part == SPLITS_NONE) return code;
    }
    job.split_memory = job.memory + pair_layout_of(p, g, shape.BN).bytes;
    return shape.launch_split[f16](job);
}

const uint64_t PAIR_FEATURES = BASIC_FEATURES | LENGTH_FEATURES | ATTN_OPTION_BIT(SOFTCAP) |
                               ATTN_TENSOR_BIT(alibi_slopes) | ATTN_TENSOR_BIT(mask_startend_rows) |
                               ATTN_TENSOR_BIT(bias) | ATTN_TENSOR_BIT(keep_mask) | ATTN_OPTION_BIT(KEEP_MASK_AT_END) |
                               ATTN_OPTION_BIT(DROPOUT);

} // namespace

extern const cuda_kernel sm90_pairs_forward = {
    { "sm90", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), TILE_HEAD_DIM,
      PAIR_FEATURES | PADDING_FEATURES },
    90,
    90,
    plan_pairs,
    launch_pairs,
    true,
};
extern const cuda_kernel sm90_packed_pairs_forward = {
    { "sm90+decode", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), TILE_HEAD_DIM, PAIR_FEATURES },
    90,
    90,
    plan_with_decode<sm90_pairs_forward>,
    launch_with_decode<sm90_pairs_forward>,
    true,
};
