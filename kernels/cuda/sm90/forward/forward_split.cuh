/* forward_split.cuh: launches the Hopper forward for sequences whose keys are split: few rows over many keys, such as
 * chunks of a prompt. The keys of a work tile are divided into splits (split_rule.h), so that all multiprocessors have
 * work. forward_tiles leaves the sums of splits in the workspace, and merge_splits adds them (splits.cuh). Where a batch
 * has enough tiles of rows, one work tile computes all splits of its rows, one after the other. Both ways give the same
 * bits. */
#ifndef ATTN_SM90_FORWARD_SPLIT_CUH
#define ATTN_SM90_FORWARD_SPLIT_CUH

#include "kernels/cuda/sm90/forward/forward_tiles.cuh"

namespace {

/* ---- The kernel that adds up splits ------------------------------------------------------------------------------ */

enum { MERGE_COLUMNS = 32 }; /* number of columns of out that a warp of merge_splits computes */

/* Adds the results of the splits (parts of the keys) of 16 rows, and stores out of these rows. Each warp has
 * MERGE_COLUMNS columns. */
template <typename T, int BM, int BN, int DV>
__global__ void __launch_bounds__(DV)
    merge_splits(const __grid_constant__ split_plan p, const __grid_constant__ cuda_args a)
{
    const int WARPS = BM / 16, AHEAD = 4;
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32, warp = blockIdx.x % WARPS;
    const int N = MERGE_COLUMNS / 2;
    launch_dependents();
    wait_for_prerequisites();
    const work_tile x = split_rows_of<BM, BN>(p, (int)(blockIdx.x / WARPS));
    const int row = x.i0 + warp * 16;
    if (x.i0 == SKIP || row >= x.Sq) return;
    const int first = (int)(blockIdx.x / WARPS) * p.most * WARPS + warp;
    const float4 *const sums = p.sums + ((int64_t)first * (DV / 8) + chunk * (N / 4)) * 32 + lane,
                        *const of_row = p.of_row + (int64_t)first * 32 + lane;
    const auto end_at = [&](int n) {
        const float4 y = of_row[(int64_t)n * WARPS * 32];
        return split_end{ { y.x, y.z }, { y.y, y.w } };
    };
    const auto load = [&](float(&O)[N], int n) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float4 y = sums[((int64_t)n * WARPS * (DV / 8) + i) * 32];
            O[i * 4] = y.x, O[i * 4 + 1] = y.y, O[i * 4 + 2] = y.z, O[i * 4 + 3] = y.w;
        }
    };
    float O[N];
    split_end end = end_at(0);
    bool flagged = p.nonfinite[first];
    load(O, 0);
#pragma unroll 1
    for (int n = 1; n < x.splits; n += AHEAD) {
        float next[AHEAD][N];
        split_end next_end[AHEAD];
#pragma unroll
        for (int e = 0; e < AHEAD; e++)
            if (n + e < x.splits) {
                next_end[e] = end_at(n + e);
                load(next[e], n + e);
                flagged |= p.nonfinite[first + (n + e) * WARPS];
            }
#pragma unroll
        for (int e = 0; e < AHEAD; e++)
            if (n + e < x.splits) {
                const float4 before = make_float4(end.top[0], end.l[0], end.top[1], end.l[1]);
                add_split(
                    before, [&](int i) { return make_float4(O[i * 4], O[i * 4 + 1], O[i * 4 + 2], O[i * 4 + 3]); },
                    next[e], next_end[e]);
                end = next_end[e];
#pragma unroll
                for (int i = 0; i < N; i++) O[i] = next[e][i];
            }
    }
    const bool finite = store_split_rows<T, MERGE_COLUMNS>(p, x, row + lane / 4, chunk * MERGE_COLUMNS, O, end, lane);
    if (!__syncthreads_or(flagged || !finite)) return;
    repair_begins();
    for (int r = row + chunk; r < row + 16; r += DV / MERGE_COLUMNS) repair_split_row<DV / 32>(p, a, x, r);
}

/* ---- Functions of the host that plan and launch ------------------------------------------------------------------ */

/* Return the number of tiles of rows per head, and the number of heads, where 2^shift query heads of a group count as
 * one. */
int64_t tiles_per_head(const split_rule &r, const attn_dims &d)
{
    return d.packed ? (d.total_q << r.shift) / SPLIT_BM + d.B : attn_tiles(d.Sq << r.shift, SPLIT_BM);
}
int64_t heads_of(const split_rule &r, const attn_dims &d)
{
    return extent_of(d).B * (d.H >> r.shift);
}

struct split_layout {
    int64_t per_head, heads, tiles;
    int most;
    bool in_turn;
    int64_t slots, of_row, sums, bytes; /* of_row, sums, bytes: offsets in the workspace, in bytes */
};

/* With at most MANY splits and MOST_TILES tiles of rows per multiprocessor, each split is a work tile. The sums of MANY
 * splits per multiprocessor fit into the L2 cache. */
const int MANY = 6;
const double MOST_TILES = 1.6;

/* Returns whether a work tile computes all splits (parts of the keys) of its rows, which does not change the results'
 * bits. `count`: the largest number of splits. */
bool runs_in_turn(const cuda_chip *chip, const attn_dims &d, int64_t tiles, int64_t count)
{
    /* The host does not know the lengths of packed sequences. If work tiles were planned for the largest possible
     * number of splits, most would be empty. */
    if (d.packed) return true;
    const int64_t fill = chip->multiprocessors;
    return tiles * 2 > fill && ((double)tiles > MOST_TILES * (double)fill || tiles * count > MANY * fill);
}

void place_sums(split_layout &x, int DV)
{
    const int64_t warps = SPLIT_BM / 16;
    x.of_row = (x.tiles * (4 + warps) + 127) / 128 * 128;
    x.sums = x.of_row + x.slots * warps * 32 * (int64_t)sizeof(float4);
    x.bytes = x.sums + x.slots * SPLIT_BM * DV * (int64_t)sizeof(float);
}

/* Divides a problem into work tiles, and plans the memory for the sums of splits. At least one sequence must have
 * splits (parts of its keys). */
split_layout split_layout_of(const cuda_chip *chip, const split_rule &r, const attn_dims &d, int DV)
{
    split_layout x;
    x.per_head = tiles_per_head(r, d), x.heads = heads_of(r, d);
    const int64_t rows = x.per_head * x.heads;
    const int count = d.packed ? 1 : split_count(r, (int)d.Sq, (int)d.Sk);
    x.in_turn = runs_in_turn(chip, d, rows, count);
    x.most = x.in_turn ? 1 : count;
    x.tiles = rows * x.most;
    x.slots = x.in_turn ? chip->multiprocessors : x.tiles;
    place_sums(x, DV);
    return x;
}

template <typename T, class X> cudaError_t launch_splits(const forward_job &job)
{
    static_assert(X::BM == SPLIT_BM, "the rule counts tiles of this many rows");
    const attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const split_rule &r = job.splits;
    if (r.BN != X::BN) return cudaErrorInvalidValue;
    kv_maps maps;
    const CUtensorMap none = {};
    const attn_view &q = g.view[ATTN_T_q];
    tma_tensor queries = tma_tensor_of(q, e.B, e.rows_q, d.H, d.D); /* the rows of this tensor map are heads, and its
                                                                     * heads are queries */
    queries.head = q.row, queries.row = q.head;
    if (!tma_map(&maps.Q, queries, 1 << r.shift, 128, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, 64 >> r.shift) ||
        !tma_map(&maps.K, tma_tensor_of(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D), X::BN) ||
        !tma_map(&maps.V, tma_tensor_of(g.view[ATTN_T_v], e.B, d.Hk, e.rows_k, d.Dv), X::BN))
        return cudaErrorInvalidValue;
    cudaError_t code = allow_shared<forward_tiles<T, X>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;
    const split_layout y = split_layout_of(job.chip, r, d, X::DV);
    plan_of<X> p;
    code = begin_plan<X>(job, p);
    if (code != cudaSuccess) return code;
    p.is_split = true, p.shift = r.shift;
    p.out_scale = 1, p.huge_scores = X::PAIRS;
    if constexpr (X::PAIRS) p.out_scale = p.dropout.scale;
    (tile_order &)p.order = tile_order_of(y.per_head, y.heads, 0, false);
    p.order.last_heads = p.order.heads, p.order.short_tiles = 0;
    p.order.tiles = p.order.end = (int)y.tiles;
    p.H = (int)(d.H >> r.shift);
    p.least_Sk = 0, p.most_Sk = INT32_MAX;
    p.most = y.most, p.in_turn = y.in_turn;
    p.before = (int32_t *)job.split_memory;
    p.nonfinite = (uint8_t *)(p.before + y.tiles);
    p.of_row = (float4 *)(job.split_memory + y.of_row), p.sums = (float4 *)(job.split_memory + y.sums);
    take_share(job.chip, p.order);
    if (p.order.first < p.order.end)
        code = launch_dependent(forward_tiles<T, X>, attn_min64(p.order.end - p.order.first, job.chip->multiprocessors),
                                X::THREADS, sizeof(shared<X>), job.stream, p, maps, none, job.given);
    if (code != cudaSuccess || y.in_turn || !is_last_share(job.chip)) return code;
    return launch_dependent(merge_splits<T, X::BM, X::BN, X::DV>, y.per_head * y.heads * 4 * X::C, X::DV, 0, job.stream,
                            (const split_plan &)p, job.given);
}

} // namespace

#endif
