/* decode.cu: forward of few queries over many keys: decoding, speculation, short questions to a long context. Sources:
 * Flash-Decoding (Dao et al. 2023); FlashAttention-2, arXiv:2307.08691, section 3.2.
 *
 * All query heads of a key/value head and all queries of a sequence are the rows of one tile ("packed GQA"), at most
 * DECODE_ROWS. The keys of a sequence are divided into splits. A block computes a split, and writes its partial result
 * (O not divided by l, maximum m, sum l) to the workspace. combine_splits() adds up the partial results in order: first
 * within groups of SPLIT_GROUP splits, then the groups. In a large batch a block computes a whole group, with the same
 * additions, so the bits stay the same. The bits of a result depend only on the keys that a sequence sees and on its
 * number of rows (split_keys()).
 *
 * A block has four warps. Its shared memory is a ring of SLOTS tiles of BN keys, alternately of K and of V. With up to
 * 16 rows, each warp takes some of the tile's keys for all rows. With up to 64 rows, each warp takes 16 rows and all
 * keys. decode_few() (at most 8 rows, head sizes 65 to 128) computes O^T += V^T P^T, which takes half the products and
 * registers of O += P V. decode_stacks() is for sequences with a common prefix: it reads the prefix once for several
 * sequences (decode_places.cuh).
 *
 * If a call reads no results of the previous call, its first reads overlap the previous call's combine_splits()
 * (plan::ahead). Every kernel in this file must therefore wait for the previous kernel before it writes anything, and
 * before it calls launch_dependents(). Only combine_splits() calls launch_dependents() at once: the kernel that let it
 * start has waited already.
 *
 * If a result of a block is not finite, the block repeats its split with zeros in place of infinities and NaN of V. It
 * then computes the rows that see such a value one by one. */
#include "decode_launch.cuh"

namespace {

template <typename T, int D, bool PAGED, keys_as AS>
__global__ void __launch_bounds__(THREADS, (blocks_of<D, false>))
    decode_few(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    extern __shared__ __align__(128) char memory[];
    typename copies_by_threads<T, few_shape<D, PAGED, AS>>::kept kept;
    walk_few<T, D, PAGED, AS, copies_by_threads>(a, p, memory, kept);
}

/* ---- The kernel that computes several sequences over a common prefix --------------------------------------------- */

template <typename T, int D>
__global__ void __launch_bounds__(stack_shape<D>::THREADS, D == 256 ? 1 : 2)
    decode_stacks(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    typedef stack_shape<D> X;
    static_assert(sizeof(shared<X>) <= LEAST_SHARED_BYTES, "what every GPU from compute capability 8.0 on has");
    extern __shared__ __align__(128) char memory[];
    typename copies_by_threads<T, X>::kept kept;
    walk_stack<T, X, copies_by_threads>(a, p, memory, kept);
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

template <typename T, int D> cudaError_t launch_stacks(const cuda_args &a, const launch_plan &y, cudaStream_t stream)
{
    static once known;
    const size_t bytes = sizeof(shared<stack_shape<D>>);
    bool overlap = false;
    const cudaError_t code = prepare(known, decode_stacks<T, D>, combine_splits<D>, bytes, &overlap);
    if (code != cudaSuccess) return code;
    decode_stacks<T, D><<<(unsigned)blocks_of_stacks(a.g.dims, y.p), stack_shape<D>::THREADS, bytes, stream>>>(a, y.p);
    return cudaPeekAtLastError();
}

constexpr bool has_few_form(int D)
{
    return D == 128;
}

template <typename T, int D, bool SCORE_MODS, bool PAGED, keys_as AS, bool FEW> auto *splits_kernel()
{
    if constexpr (FEW) return decode_few<T, D, PAGED, AS>;
    else return decode_splits<T, D, SCORE_MODS, PAGED, AS>;
}

template <typename T, int D, bool SCORE_MODS, bool PAGED, keys_as AS, bool FEW = false>
cudaError_t launch(const cuda_chip *chip, const cuda_args &a, const launch_plan &y, const attn_plan *of,
                   cudaStream_t stream)
{
    static once known;
    const size_t bytes = FEW ? sizeof(typename copies_by_threads<T, few_shape<D, PAGED, AS>>::memory)
                             : shared_bytes<T, D, SCORE_MODS, AS, copies_by_threads>();
    auto *const kernel = splits_kernel<T, D, SCORE_MODS, PAGED, AS, FEW>();
    bool overlap = false;
    cudaError_t code = prepare(known, kernel, combine_splits<D>, bytes, &overlap);
    if (code != cudaSuccess) return code;
    if (!decode_by_engine(chip, stream, of, a, y.p, y.blocks, &code)) {
        if constexpr (PAGED && !SCORE_MODS && AS == KEYS_AS_T && !FEW)
            if (y.p.stack) code = launch_stacks<T, D>(a, y, stream);
        if (code == cudaSuccess)
            code = launch_kernel(overlap, kernel, grid_of_splits(a.g.dims, y.p, y.blocks), THREADS, bytes, stream, a,
                                 y.p);
    }
    return code == cudaSuccess ? launch_combine<D>(a, y, overlap, stream) : code;
}

template <typename T, int D, bool PAGED>
cudaError_t launch_variant(const cuda_chip *chip, const cuda_args &a, const launch_plan &y, const attn_plan *of,
                           cudaStream_t stream)
{
    const bool float8 = decode_has_float8_form(of);
    if constexpr (has_few_form(D))
        if (y.p.few)
            return float8 ? launch<T, D, false, PAGED, KEYS_AS_FLOAT8, true>(chip, a, y, of, stream)
                          : launch<T, D, false, PAGED, KEYS_AS_T, true>(chip, a, y, of, stream);
    if (float8) return launch<T, D, false, PAGED, KEYS_AS_FLOAT8>(chip, a, y, of, stream);
    return has_options(of) ? launch<T, D, true, PAGED, KEYS_AS_T>(chip, a, y, of, stream)
                           : launch<T, D, false, PAGED, KEYS_AS_T>(chip, a, y, of, stream);
}

template <typename T, bool PAGED>
cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, const launch_plan &y, const attn_plan *of,
                       cudaStream_t stream)
{
    const int D = class_of(a.g.dims);
    if (D == 64) return launch_variant<T, 64, PAGED>(chip, a, y, of, stream);
    return D == 128 ? launch_variant<T, 128, PAGED>(chip, a, y, of, stream)
                    : launch_variant<T, 256, PAGED>(chip, a, y, of, stream);
}

/* Returns whether decode_few() computes this problem. decode_few() counts keys in 32 bits, and its grid allows 65535
 * blocks per key/value head and 65535 batch rows. */
bool is_few(const launch_plan &y, const attn_plan *plan, int64_t rows)
{
    const attn_dims &d = plan->geometry.dims;
    return has_few_form(class_of(d)) && !d.packed && rows <= FEW_ROWS && !y.p.stack && y.p.walkers <= UINT16_MAX &&
           d.B <= UINT16_MAX && d.Sk <= INT32_MAX / 2 && (!has_options(plan) || decode_has_float8_form(plan));
}

/* FULL: a block takes several splits only if the grid then still has at least FULL times as many blocks as the GPU runs
 * at a time. PLACES: number of blocks that a multiprocessor runs at a time. */
const int FULL = 4, PLACES = 3;

/* Lets each block compute a whole group of SPLIT_GROUP splits (parts of a sequence's keys), if the smaller number of
 * blocks still fills the GPU. This changes no bit of the results. */
void let_blocks_walk(launch_plan &y, const cuda_chip *chip, const attn_dims &d, int64_t rows)
{
    const int64_t groups = attn_tiles(y.p.splits, SPLIT_GROUP), blocks = d.B * d.Hk * groups;
    if (d.packed || y.p.splits == 1 || rows > SPLIT_GROUP_ROWS ||
        blocks < (int64_t)FULL * PLACES * chip->multiprocessors)
        return;
    y.p.splits_per_block = SPLIT_GROUP;
    y.p.walkers = (int)groups;
    y.blocks = blocks;
}

template <int D> int sequences_of_stack(int64_t rows)
{
    return (int)attn_min64(32, stack_shape<D>::BM / rows);
}

void let_rows_be_stacked(launch_plan &y, const cuda_chip *chip, const attn_dims &d, int64_t rows)
{
    const int D = class_of(d);
    const int64_t fill = attn_tiles((int64_t)FULL * PLACES * chip->multiprocessors, d.B * d.Hk);
    y.p.stack = D == 64    ? sequences_of_stack<64>(rows)
                : D == 128 ? sequences_of_stack<128>(rows)
                           : sequences_of_stack<256>(rows);
    y.p.walkers = (int)attn_min64(y.p.splits, fill);
    y.blocks = d.B * d.Hk * y.p.walkers;
}

bool plan_decode(const cuda_chip *, attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    plan->workspace_bytes = workspace_of(g);
    return !g.dims.packed && g.dims.Sq * g.group <= DECODE_ROWS && decode_fits(g);
}

} // namespace

/* Returns whether a key/value head has at most DECODE_ROWS query heads, and the numbers of blocks are within a grid's
 * limits. */
bool decode_fits(const attn_geometry &g)
{
    return g.group <= DECODE_ROWS && blocks_fit(g);
}

size_t decode_workspace(const attn_geometry &g)
{
    return (workspace_of(g) + 1023) / 1024 * 1024;
}

cudaError_t decode_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    const cuda_args a = cuda_args_of(chip, plan);
    launch_plan y = launch_plan_of(a.g, decode_has_float8_form(plan));
    y.p.options = has_options(plan);
    if (y.blocks == 0 || a.g.dims.Sq == 0) return cudaSuccess;
    const int64_t rows = a.g.dims.Sq * a.g.group;
    if (a.g.prefix_keys && !a.g.dims.packed && rows <= NARROW && y.p.splits > 1 && !has_options(plan) &&
        plan->problem->k.dtype != ATTN_F8E4M3)
        let_rows_be_stacked(y, chip, a.g.dims, rows);
    else let_blocks_walk(y, chip, a.g.dims, rows);
    y.p.early = reads_no_more(a.g);
    y.p.few = is_few(y, plan, rows);
    y.p.ahead = y.p.few && chip->after_decode;
    place_partial_results(y, a.g.dims, workspace);
    if (plan->problem->q.dtype == ATTN_BF16)
        return has_pages(plan) ? launch_for<__nv_bfloat16, true>(chip, a, y, plan, stream)
                               : launch_for<__nv_bfloat16, false>(chip, a, y, plan, stream);
    return has_pages(plan) ? launch_for<__half, true>(chip, a, y, plan, stream)
                           : launch_for<__half, false>(chip, a, y, plan, stream);
}

extern const cuda_kernel decode_forward = {
    { "decode", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3), TILE_HEAD_DIM,
      (ATTN_ALL_SCORES & ~PADDING_FEATURES) | ATTN_KEY_FEATURES, true },
    80,
    ANY_COMPUTE,
    plan_decode,
    decode_launch,
};
