/* forward_split.cu: which problems are computed with split keys, and the tile shapes of those without options. The
 * launch is in forward_split.cuh. */
#include "kernels/cuda/sm90/forward/forward_split.cuh"

namespace {

struct plain_shape {
    int D;
    /* [0]: bfloat16, [1]: float16 */
    cudaError_t (*launch[2])(const forward_job &);
};
template <class X> constexpr plain_shape row()
{
    return { X::D, { launch_splits<__nv_bfloat16, X>, launch_splits<__half, X> } };
}

/* clang-format off */
const plain_shape plain_shapes[] = {
    /* D, Dv: largest head sizes of q and v; C: consumers; BN: keys per tile; stages: buffers of a ring
     *        D    C  BN stages Dv, variant */
    row<shape<64,  2, 128, 4, 64,  SPLIT>>(),
    row<shape<128, 2, 128, 2, 128, SPLIT>>(),
    row<shape<256, 2, 80,  2, 256, SPLIT>>(),
};

/* What the rule knows about tile shapes. */
struct split_size {
    int D;     /* the largest head size of q and v */
    int least; /* the least number of keys of a split */
    int BN[4]; /* keys per tile, for each split_shapes */
};
const split_size sizes[] = {
    /* D  least   plain options pairs with bias */
    { 64,  1024, { 128, 128,    128,  128 } },
    { 128, 1024, { 128, 128,    128,  96 } },
    { 256, 512,  { 80,  64,     64,   48 } },
};
/* clang-format on */

template <class ROW> const ROW &row_of(const ROW *x, const attn_dims &d)
{
    while (x->D < attn_max64(d.D, d.Dv)) x++;
    return *x;
}

} // namespace

split_rule split_rule_of(const attn_plan *plan, split_shapes shapes)
{
    const attn_problem *const p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    split_rule r = NO_SPLITS;
    if (p->seqlens_q.rank) return r;
    const split_size &x = row_of(sizes, d);
    /* other options differ from head to head, or read their tensors row by row */
    const bool same_for_heads = shapes == SHAPES_PLAIN || (shapes == SHAPES_WITH_OPTIONS && !p->alibi_slopes.rank &&
                                                           !p->mask_startend_rows.rank);
    const bool fits = same_for_heads && g.group <= 64 && (g.group & (g.group - 1)) == 0;
    while (fits && 1 << r.shift < g.group) r.shift++;
    /* the rows of a packed problem are counted in an int, so there must be fewer than FAR */
    if (d.packed && d.total_q << r.shift >= FAR) return NO_SPLITS;
    r.BN = x.BN[shapes], r.least = x.least;
    r.queries = (int)attn_min64(p->whole_queries, FAR);
    r.per_tile = (int)attn_min64(g.group >> r.shift, FAR);
    /* FlashMask and keep_mask may hide most keys of a row, but the rule does not read them */
    r.window = (int)attn_min64(attn_min64(g.left, FAR) + attn_min64(g.right, FAR) + (SPLIT_BM >> r.shift), FAR);
    r.least_keys = (int)attn_max64(2 * r.least, 4 * (int64_t)attn_min64(r.queries, FAR / 4));
    r.most_queries = (SPLIT_TILES / 2 / r.per_tile * SPLIT_BM) >> r.shift;
    if (r.window < 2 * r.least || r.queries > r.most_queries) r.most_queries = 0;
    return r;
}

split_part split_part_of(const split_rule &r, const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    if (r.most_queries <= 0) return SPLITS_NONE;
    if (d.packed) return d.total_k >= r.least_keys ? SPLITS_SOME : SPLITS_NONE;
    if (d.Sq > r.most_queries || !has_splits(r, (int)d.Sq, (int)attn_min64(d.Sk, FAR))) return SPLITS_NONE;
    return g.seqlens_k ? SPLITS_SOME : SPLITS_ALL;
}

size_t split_workspace(const cuda_chip *chip, const attn_plan *plan, split_shapes shapes)
{
    const split_rule r = split_rule_of(plan, shapes);
    if (split_part_of(r, plan->geometry) == SPLITS_NONE) return 0;
    const attn_dims &d = plan->geometry.dims;
    const int DV = row_of(sizes, d).D;
    split_layout x = split_layout_of(chip, r, d, DV);
    const int64_t bytes = x.bytes;
    if (d.packed || !x.in_turn) return (size_t)bytes;
    /* device.cu may compute this problem in parts (some of its heads or queries), one after the other in the same
     * workspace. In such a part each split may be a work tile, which needs more memory. */
    const int64_t count = split_count(r, (int)d.Sq, (int)d.Sk);
    x.tiles = x.slots = attn_max64(chip->multiprocessors / 2 * count, (int64_t)MANY * chip->multiprocessors);
    place_sums(x, DV);
    return (size_t)attn_max64(bytes, x.bytes);
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
    job.splits = split_rule_of(plan, SHAPES_PLAIN);
    return row_of(plain_shapes, plan->geometry.dims).launch[plan->problem->q.dtype == ATTN_F16](job);
}
