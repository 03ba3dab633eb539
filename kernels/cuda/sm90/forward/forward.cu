/* forward.cu: tile shapes of the Hopper forward for problems without bias, keep_mask and dropout. The kernel is in
 * forward_tiles.cuh. Sequences of few rows and many keys, without options, are left to forward_split.cu. */
#include "kernels/cuda/sm80/decode.h"
#include "kernels/cuda/sm90/forward/forward_split.cuh"
#include "kernels/cuda/sm90/forward/widen.cuh"

namespace {

/* Kinds of masks. OPEN: none. CAUSAL: limits keys on the right only. WINDOW: limits keys on the left too. */
enum { OPEN = 1, CAUSAL = 2, WINDOW = 4, ANY = OPEN | CAUSAL | WINDOW };

struct shape_row {
    int D, Dv, BN;
    bool score_mods;
    int masks;
    int least_Sk;
    /* [0]: bfloat16, [1]: float16 */
    cudaError_t (*launch[2])(const forward_job &, int least_Sk, int most_Sk);
    /* launches the forward of the sequences whose keys are split; set only if score_mods is true */
    cudaError_t (*launch_split[2])(const forward_job &);
};
template <class X> constexpr shape_row row(int masks, int least_Sk)
{
    shape_row x = {
        X::D, X::DV, X::BN, X::SCORE_MODS, masks, least_Sk, { launch<__nv_bfloat16, X>, launch<compiled_half, X> }, {}
    };
    if constexpr (X::SCORE_MODS)
        x.launch_split[0] = launch_splits<__nv_bfloat16, typename X::split_shape>,
        x.launch_split[1] = launch_splits<compiled_half, typename X::split_shape>;
    return x;
}

/* A problem takes the first row of this table that suits it. Such a row has at least the problem's head sizes, and is
 * meant for its kind of mask and its number of keys. Which row of the table a sequence takes never depends on other
 * sequences. */
/* clang-format off */
const shape_row shapes[] = {
    /* D, Dv: largest head sizes of q and v; C: consumers; BN: keys per tile; stages: buffers of a ring
     *        D    C  BN stages Dv, variant         masks             least number of keys */
    row<shape<64,  3, 128, 4>>                     (OPEN | CAUSAL,    1025),
    row<shape<64,  4, 64,  4>>                     (OPEN | CAUSAL,    0),
    row<shape<64,  3, 128, 4, 64,  WINDOWED>>      (WINDOW,           0),
    row<shape<96,  2, 128, 2>>                     (ANY,              0),
    row<shape<128, 2, 128, 2>>                     (OPEN | CAUSAL,    1024),
    row<shape<128, 3, 64,  3>>                     (OPEN | CAUSAL,    0),
    row<shape<128, 3, 64,  3, 128, WINDOWED>>      (WINDOW,           0),
    row<shape<192, 2, 128, 2, 128>>                (ANY,              0),
    row<shape<192, 2, 112, 2>>                     (ANY,              0),
    row<shape<256, 2, 80,  2>>                     (OPEN,             0),
    row<shape<256, 2, 80,  2>>                     (CAUSAL | WINDOW,  1025),
    row<shape<256, 2, 64,  2>>                     (CAUSAL | WINDOW,  0),
    /* shapes for softcap, ALiBi, FlashMask or float8's scales */
    row<shape<64,  2, 128, 4, 64,  WITH_OPTIONS>>  (ANY,              0),
    row<shape<128, 2, 128, 2, 128, WITH_OPTIONS>>  (ANY,              0),
    /* 64 keys per tile, because ptxas would spill registers with 80 */
    row<shape<256, 2, 64,  2, 256, WITH_OPTIONS>>  (ANY,              0),
};
/* clang-format on */

bool has_score_mods(const attn_problem *p)
{
    return p->q.dtype == ATTN_F8E4M3 || p->softcap > 0 || p->alibi_slopes.rank || p->mask_startend_rows.rank;
}
/* Returns the shape that computes problems with softcap, ALiBi, FlashMask or float8's scales. */
const shape_row &shape_of_options(const attn_dims &d)
{
    const shape_row *x = shapes;
    while (!x->score_mods || x->D < d.D || x->Dv < d.Dv) x++;
    return *x;
}

split_rule splits_of(const attn_plan *plan)
{
    const attn_problem *const p = plan->problem;
    if (!has_score_mods(p)) return plain_split_rule(plan);
    const shape_row &x = shape_of_options(plan->geometry.dims);
    /* with ALiBi or FlashMask, a work tile has rows of one head, because slopes and masks may differ from head to
     * head */
    return split_rule_of(plan, split_tile_of_shape(x.D, x.BN, !p->alibi_slopes.rank && !p->mask_startend_rows.rank));
}

/* Launches one kernel. If sequences have different lengths, launches one kernel for each row of the table whose range
 * of lengths may occur. */
cudaError_t launch_shapes(const forward_job &job, bool f16, bool score_mods)
{
    const attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    const int masks = g.left < ATTN_UNBOUNDED ? WINDOW : g.right < ATTN_UNBOUNDED ? CAUSAL : OPEN;
    const bool lengths_differ = g.cu_k || g.seqlens_k;
    int most_Sk = INT32_MAX;
    for (const shape_row &x : shapes) {
        if (x.D < d.D || x.Dv < d.Dv || x.score_mods != score_mods || !(x.masks & masks)) continue;
        if (d.Sk >= x.least_Sk) {
            const cudaError_t code = x.launch[f16](job, lengths_differ ? x.least_Sk : 0, most_Sk);
            if (code != cudaSuccess || !lengths_differ || x.least_Sk == 0) return code;
        }
        if (lengths_differ) most_Sk = x.least_Sk - 1;
    }
    /* never reached: the last rows of the table take every problem that plan_forward() accepts */
    return cudaErrorInvalidValue;
}

cudaError_t widen_all(forward_job &job)
{
    attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const auto widened = [&](attn_tensor_id tensor, int n, int64_t H, int64_t rows, int64_t D) {
        return widen_view<8>(g.view[tensor], e.B, H, rows, D, pitch_of(D), job.memory + job.place.wide[n],
                             job.chip->multiprocessors, job.stream);
    };
    cudaError_t code = widened(ATTN_T_q, 0, d.H, e.rows_q, d.D);
    if (code == cudaSuccess) code = widened(ATTN_T_k, 1, d.Hk, e.rows_k, d.D);
    if (code == cudaSuccess) code = widened(ATTN_T_v, 2, d.Hk, e.rows_k, d.Dv);
    return code;
}

cudaError_t launch_forward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const attn_problem *const p = plan->problem;
    const bool narrow = p->q.dtype == ATTN_F8E4M3, f16 = p->q.dtype == ATTN_F16, score_mods = has_score_mods(p);
    forward_job job;
    job.chip = chip, job.stream = stream, job.problem = p, job.memory = (char *)memory;
    job.given = cuda_args_of(chip, plan);
    job.given.decode_rows = chip->decode_rows;
    job.read = job.given;
    job.place = layout_of(p, job.given.g.dims);
    const split_rule splits = splits_of(plan);
    const split_part part = split_part_of(splits, job.given.g);
    if (part == SPLITS_SOME) job.splits = splits;
    cudaError_t code = narrow ? widen_all(job) : cudaSuccess;
    if (code == cudaSuccess && part != SPLITS_ALL) code = launch_shapes(job, f16, score_mods);
    if (code != cudaSuccess || part == SPLITS_NONE) return code;
    job.split_memory = job.memory + job.place.bytes;
    job.splits = splits;
    return score_mods ? shape_of_options(job.read.g.dims).launch_split[f16](job)
                      : split_launch(chip, stream, plan, job.split_memory);
}

bool plan_with_splits(const cuda_chip *chip, attn_plan *plan)
{
    if (!plan_forward(chip, plan)) return false;
    plan->workspace_bytes += has_score_mods(plan->problem) ? split_workspace(chip, plan, splits_of(plan),
                                                                             shape_of_options(plan->geometry.dims).Dv)
                                                           : plain_split_workspace(chip, plan);
    return true;
}

const uint32_t DTYPES = ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3);
const uint64_t DECODE_FEATURES = BASIC_FEATURES | LENGTH_FEATURES | ATTN_OPTION_BIT(SOFTCAP) |
                                 ATTN_TENSOR_BIT(alibi_slopes) | ATTN_TENSOR_BIT(mask_startend_rows) |
                                 ATTN_TENSOR_BIT(q_scale) | ATTN_TENSOR_BIT(k_scale) | ATTN_TENSOR_BIT(v_scale),
               FEATURES = DECODE_FEATURES | PADDING_FEATURES;

} // namespace

bool splits_float8(const cuda_chip *chip, const attn_plan *plan)
{
    attn_plan here = *plan;
    return plan_forward(chip, &here) && split_part_of(splits_of(plan), plan->geometry) == SPLITS_ALL;
}

extern const cuda_kernel sm90_forward = {
    { "sm90", ATTN_OP_FORWARD, DTYPES, TILE_HEAD_DIM, FEATURES }, 90, 90, plan_with_splits, launch_forward, true,
};
extern const cuda_kernel sm90_packed_forward = {
    { "sm90+decode", ATTN_OP_FORWARD, DTYPES, TILE_HEAD_DIM, DECODE_FEATURES },
    90,
    90,
    plan_with_decode<sm90_forward>,
    launch_with_decode<sm90_forward>,
    true,
};
