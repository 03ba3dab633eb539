/* f32_split.cu: converts each float32 number of tensors to two float16 numbers, hi and lo, in two arrays, the planes
 * (split.cuh). A block reads the 128 rows of one tile once, and keeps them in registers. Memory bandwidth bounds the
 * speed. Paged keys and values have a separate variant, because looking up pages takes registers. */
#include "split.cuh"

namespace {

enum { WARPS = 8, ROWS = SPLIT_ROWS / WARPS, MOST = 4 };

struct split_jobs {
    split_planes planes[MOST];
    attn_tensor_id id[MOST];
    /* blocks first[n] to first[n + 1] - 1 of the grid's x axis convert tensor n, one tile per block */
    unsigned first[MOST + 1];
};

/* Splits the float32 numbers of tiles into float16 numbers hi and lo. A lane has D / 32 neighbouring columns of 16
 * rows. */
template <int D, bool PAGES>
__global__ void __launch_bounds__(32 * WARPS)
    split_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ split_jobs jobs)
{
    const int V = D / 32;
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int job = 0;
    while (blockIdx.x >= jobs.first[job + 1]) job++;
    const split_planes &p = jobs.planes[job];
    if ((int)blockIdx.y >= p.heads) return;
    int b = blockIdx.z, tile = (int)(blockIdx.x - jobs.first[job]);
    const int32_t *const cu = p.queries ? g.cu_q : g.cu_k;
    if (p.packed) {
        b = sequence_of_tile(cu, g.dims.B, SPLIT_ROWS, 1, tile);
        tile -= cu[b] / SPLIT_ROWS + b;
    }
    const attn_sequence s = attn_sequence_of(&g, b);
    const int64_t count = p.queries ? s.Sq : s.Sk, start = p.queries ? s.q_start : s.k_start;
    if (p.packed && (int64_t)tile * SPLIT_ROWS >= count) return;
    float x[ROWS][V], top, least;
    load_rows<D, ROWS>(x, g.view[jobs.id[job]], b, blockIdx.y, start, (int64_t)tile * SPLIT_ROWS + warp * ROWS, count,
                       p.width, PAGES && !p.queries ? &g : nullptr);
    range_of_rows(x, top, least);
    __shared__ float tops[WARPS], leasts[WARPS], norms[WARPS];
    if (lane == 0) tops[warp] = top, leasts[warp] = least;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w]), least = fminf(least, leasts[w]);

    const int e = exponent_of(top);
    const float factor = power_of_two(e);
    const int64_t at = split_tile_of(p, b, blockIdx.y, start) + tile;
    uint16_t *to = p.data + (at * 2 * SPLIT_ROWS + warp * ROWS) * D + lane * V;
    float norm = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) norm = fmaxf(norm, warp_sum(split_row(to + r * D, SPLIT_ROWS * D, x[r], factor)));
    if (lane == 0) norms[warp] = norm;
    __syncthreads();
    if (threadIdx.x) return;
#pragma unroll
    for (int w = 0; w < WARPS; w++) norm = fmaxf(norm, norms[w]);
    split_stats stats;
    stats.exponent = e;
    stats.wide = is_wide(top, least);
    stats.top = top;
    stats.norm = sqrtf(norm);
    p.stats[at] = stats;
}

template <int D> void launch(const cuda_args &a, const split_jobs &jobs, dim3 grid, cudaStream_t stream)
{
    const auto kernel = a.g.page_table ? split_tiles<D, true> : split_tiles<D, false>;
    kernel<<<grid, 32 * WARPS, 0, stream>>>(a, jobs);
}

} // namespace

cudaError_t split_tensors(const cuda_args &a, const split_planes *planes, const attn_tensor_id *ids, int count,
                          cudaStream_t stream)
{
    const attn_dims &d = a.g.dims;
    split_jobs jobs = {};
    unsigned blocks = 0, heads = 0;
    for (int n = 0; n < count; n++) {
        jobs.planes[n] = planes[n];
        jobs.id[n] = ids[n];
        jobs.first[n] = blocks;
        blocks += (unsigned)planes[n].tiles;
        if ((unsigned)planes[n].heads > heads) heads = (unsigned)planes[n].heads;
    }
    for (int n = count; n <= MOST; n++) jobs.first[n] = blocks;
    /* either all tensors of a call are packed, or none */
    const dim3 grid(blocks, heads, planes[0].packed ? 1 : (unsigned)d.B);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    switch (split_class(d)) {
    case 64: launch<64>(a, jobs, grid, stream); break;
    case 128: launch<128>(a, jobs, grid, stream); break;
    default: launch<256>(a, jobs, grid, stream); break;
    }
    return cudaPeekAtLastError();
}
