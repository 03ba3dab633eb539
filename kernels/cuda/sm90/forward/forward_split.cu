/* forward_split.cu: the Hopper forward without options of few rows over many keys, such as chunks of a prompt. The
 * launch is in forward_split.cuh. */
#include "kernels/cuda/sm90/forward/forward_split.cuh"

namespace {

struct split_row {
    int D, BN;
    /* [0]: bfloat16, [1]: float16 */
    cudaError_t (*launch[2])(const forward_job &);
};
template <class X> constexpr split_row row()
{
    return { X::D,
             X::BN,
             { launch_splits<__nv_bfloat16, typename X::split_shape>,
               launch_splits<compiled_half, typename X::split_shape> } };
}

/* clang-format off */
const split_row shapes[] = {
    /* D, Dv: largest head sizes of q and v; C: consumers; BN: keys per tile; stages: buffers of a ring
     *        D    C  BN stages */
    row<shape<64,  2, 128, 4>>(),
    row<shape<128, 2, 128, 2>>(),
    row<shape<256, 2, 80,  2>>(),
};
/* clang-format on */

const split_row &shape_of(const attn_dims &d)
{
    const split_row *x = shapes;
    while (x->D < attn_max64(d.D, d.Dv)) x++;
    return *x;
}

} // namespace

split_rule plain_split_rule(const attn_plan *plan)
{
    const split_row &x = shape_of(plan->geometry.dims);
    return split_rule_of(plan, split_tile_of_shape(x.D, x.BN, true));
}

size_t plain_split_workspace(const cuda_chip *chip, const attn_plan *plan)
{
    return split_workspace(chip, plan, plain_split_rule(plan), shape_of(plan->geometry.dims).D);
}

cudaError_t split_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    forward_job job;
    job.chip = chip, job.stream = stream, job.problem = plan->problem;
    job.memory = job.split_memory = (char *)memory;
    job.given = cuda_args_of(chip, plan);
    job.given.decode_rows = chip->decode_rows;
    job.read = job.given;
    job.place = {};
    job.splits = plain_split_rule(plan);
    return shape_of(plan->geometry.dims).launch[plan->problem->q.dtype == ATTN_F16](job);
}
