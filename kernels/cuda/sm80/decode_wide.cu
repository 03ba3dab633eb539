/* decode_wide.cu: forward of few queries over many keys, with head sizes above 256, in splits of at most 512 keys
 * (decode.cu explains the design).
 *
 * The sums O of 16 rows and all columns of V do not fit in one warp's registers. The warps of a block (four up to head
 * size 512, eight above) therefore divide the channels. For each tile of 16 keys, the block adds up the warps' scores
 * in shared memory (add_up_scores()); every warp then computes the same softmax, and multiplies P by its own columns of
 * V.
 *
 * Problems have at most NARROW rows (queries times heads of a group); wide_forward.cu and sm90/wide compute problems
 * with more rows, and packed sequences. Blocks need 110 KB of shared memory up to head size 512, and 219 KB above. */
#include "decode_launch.cuh"

namespace {

/* bytes of shared memory of a block for head sizes up to D */
template <int D> constexpr size_t decode_wide_bytes = shared_bytes<__half, D, true, KEYS_AS_T, copies_by_threads>();

template <typename T, int D, bool SCORE_MODS, bool PAGED>
cudaError_t launch(const cuda_chip *chip, const cuda_args &a, const launch_plan &y, const attn_plan *of,
                   cudaStream_t stream)
{
    static once known;
    const size_t bytes = shared_bytes<T, D, SCORE_MODS, KEYS_AS_T, copies_by_threads>();
    auto *const kernel = decode_splits<T, D, SCORE_MODS, PAGED, KEYS_AS_T>;
    bool overlap = false;
    cudaError_t code = prepare(known, kernel, combine_splits<D>, bytes, &overlap);
    if (code == cudaSuccess && !wide_decode_by_engine(chip, stream, of, a, y.p, y.blocks, &code))
        code = launch_kernel(overlap, kernel, dim3((unsigned)y.blocks), threads_of<D>, bytes, stream, a, y.p);
    return code == cudaSuccess ? launch_combine<D>(a, y, overlap, stream) : code;
}

template <typename T, int D>
cudaError_t launch_variant(const cuda_chip *chip, const cuda_args &a, const launch_plan &y, const attn_plan *of,
                           cudaStream_t stream)
{
    if (has_pages(of))
        return y.p.options ? launch<T, D, true, true>(chip, a, y, of, stream)
                           : launch<T, D, false, true>(chip, a, y, of, stream);
    return y.p.options ? launch<T, D, true, false>(chip, a, y, of, stream)
                       : launch<T, D, false, false>(chip, a, y, of, stream);
}

template <typename T>
cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, const launch_plan &y, const attn_plan *of,
                       cudaStream_t stream)
{
    return class_of(a.g.dims) == 512 ? launch_variant<T, 512>(chip, a, y, of, stream)
                                     : launch_variant<T, 1024>(chip, a, y, of, stream);
}

bool plan_wide_decode(const cuda_chip *chip, attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const int D = class_of(g.dims);
    const size_t bytes = D == 512 ? decode_wide_bytes<512> : decode_wide_bytes<1024>;
    plan->workspace_bytes = workspace_of(g);
    return D > TILE_HEAD_DIM && !g.dims.packed && g.dims.Sq * g.group <= NARROW && blocks_fit(g) &&
           bytes <= (size_t)chip->shared_bytes;
}

cudaError_t launch_wide_decode(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    const cuda_args a = cuda_args_of(chip, plan);
    launch_plan y = launch_plan_of(a.g, false);
    if (y.blocks == 0 || a.g.dims.Sq == 0) return cudaSuccess;
    y.p.options = has_options(plan);
    y.p.early = reads_no_more(a.g);
    place_partial_results(y, a.g.dims, workspace);
    return plan->problem->q.dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(chip, a, y, plan, stream)
                                               : launch_for<__half>(chip, a, y, plan, stream);
}

} // namespace

extern const cuda_kernel wide_decode_forward = {
    { "decode", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3), ATTN_MAX_HEAD_DIM,
      (ATTN_ALL_SCORES & ~PADDING_FEATURES) | ATTN_KEY_FEATURES, true },
    80,
    ANY_COMPUTE,
    plan_wide_decode,
    launch_wide_decode,
};
