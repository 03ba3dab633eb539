/* observe.cu: computes an observe (which keys the queries attend to; see attn_observe in attention.h) on tensor cores
 * by mma.sync, from compute capability 8.0 on. Each pass (kernel) computes the scores itself, so no array of Sq x Sk is
 * stored:
 *
 * rows (observe_rows.cu): maxima, and sums of exponentials
 * finish: row_max, lse, entropy; base and inverse of each row, so that later passes compute P = exp2(z - base) *
 * inverse
 * top (observe_rows.cu): top_keys, top_weights
 * mass (observe_mass.cu): key_mass
 * cells (observe_cells.cu): weights, and partial sums of the cells of map; add_strips then adds these up to map
 * heads (simple/observe.cu): max_logit, mean_entropy
 *
 * Tensor cores cannot compute a row that has a NaN, a product outside float32's range, or a score of 2^27 or more.
 * `finish` marks such rows as strange. Later passes skip them, and simple/observe.cu computes them.
 *
 * If the client gives lse and requests only key_mass, weights or map, take_given_lse replaces `rows` and `finish`.
 * Scores that tensor cores cannot compute then make elements of these outputs NaN or infinite, and simple/observe.cu
 * recomputes these elements. */
#include "kernels/cuda/simple/observe_row.cuh"
#include "kernels/cuda/simple/simple.h"
#include "kernels/cuda/simple/work.cuh"
#include "ptx.cuh"
#include "observe_common.cuh"

namespace {

enum { THREADS = 128 };

struct finish_args {
    observed_parts parts;
    float scale, scale_log2;
    /* whether there are options (softcap, bias, masks, ...): with options, the stored maxima are scores; without
     * options, they are q.k without the scale */
    bool options;
    /* which numbers are stored for each part of a row's keys (observed_parts). 0: only the maximum; 1: the maximum and
     * the sum l; 2: the maximum and the sums l and e (observe_rows.cu) */
    int sums;
};

DEVICE bool is_computed(const cuda_args &a, const finish_args &f, const row &r, const float4 &part, float m,
                        float given)
{
    const bool sound = f.options ? is_sound_score<true>(m) : is_sound_score<false>(m);
    const bool sums = f.sums == 0 || (part.y - part.y == 0 && (f.sums == 1 || part.z - part.z == 0));
    const bool sees_no_key = f.options || m > -CUDART_INF_F || !sees_keys(a.g, r.x.s, r.i);
    return sound && sums && sees_no_key && (!a.g.observe.given_lse || (says_lse(given) && given == given));
}

__global__ void __launch_bounds__(THREADS)
    finish_rows(const __grid_constant__ cuda_args a, const __grid_constant__ finish_args f,
                const __grid_constant__ observed_rows rows, const __grid_constant__ tile_rows tiles)
{
    const row r = query_row(a, (int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (!r.exists) return;
    const int64_t at = lse_at(a, r.x, r.i);
    float4 sum = make_float4(-CUDART_INF_F, 0, 0, 1);
    const int64_t chunks = f.parts.blocks == 1 ? 1 : attn_tiles(r.x.s.Sk, OBSERVE_CHUNK);
    for (int64_t n = 0; n < chunks; n++) {
        const float4 part = f.parts.part[n * f.parts.rows + at];
        if (f.parts.blocks == 1) sum = part;
        else if (part.w != 0)
            sum = f.options ? merged<true>(sum, part, f.scale_log2) : merged<false>(sum, part, f.scale_log2);
    }
    const float m = f.options ? in_unit_2<true>(sum.x, 0) : in_unit_2<false>(sum.x, f.scale_log2);
    const float most = f.options || sum.x == -CUDART_INF_F ? sum.x : sum.x * f.scale;
    const float given = given_lse_of(a, r.x, r.i);
    const bool strange = !is_computed(a, f, r, sum, m, given);
    rows.strange[at] = strange;
    if (strange) {
        tiles.end[at] = make_float2(CUDART_INF_F, 0);
        *rows.found = 1;
        if (a.rows_found) *a.rows_found = 1;
        return;
    }
    const row_end end = end_of_row(m, f.sums > 0 ? sum.y : 1, f.sums > 1 ? sum.z : 0, sink_of(a, r.x.h),
                                   a.g.observe.given_lse, given);
    tiles.end[at] = make_float2(end.base, end.inverse);
    store_end(a, r.x, r.i, end, most, rows);
}

/* Computes `base` and `inverse` of each row from the client's lse, so that P = exp(z - lse). One warp computes one row.
 * A row is strange (tensor cores cannot compute it) if its q is not finite, if its lse is NaN, or if its lse is so
 * large that P cannot be computed from it (says_lse()). */
__global__ void __launch_bounds__(32 * WARPS)
    take_given_lse(const __grid_constant__ cuda_args a, const __grid_constant__ observed_rows rows,
                   const __grid_constant__ tile_rows tiles)
{
    const row r = query_row(a, warp_index());
    if (!r.exists) return;
    const attn_view &q = a.g.view[ATTN_T_q];
    const int64_t at = lse_at(a, r.x, r.i), from = query_at(a, r.x, r.i);
    const float lse = given_lse_of(a, r.x, r.i);
    const bool nothing = lse == -CUDART_INF_F;
    bool strange = !says_lse(lse) || lse != lse;
    for (int64_t n = threadIdx.x % 32; n < a.g.dims.D && !nothing; n += 32) {
        const float x = load_float(q.dtype, q.data, from + n);
        strange |= x - x != 0;
    }
    strange = __any_sync(ALL_LANES, strange);
    if (threadIdx.x % 32) return;
    rows.base[at] = nothing ? CUDART_INF_F : lse * LOG2E;
    rows.inverse[at] = 1;
    rows.strange[at] = strange;
    tiles.end[at] = strange ? make_float2(CUDART_INF_F, 0) : make_float2(rows.base[at], 1);
    if (!strange) return;
    *rows.found = 1;
    if (a.rows_found) *a.rows_found = 1;
}

/* One thread adds up the partial sums of one cell of the map, one for each strip (the rows of one warp), in order. */
__global__ void __launch_bounds__(THREADS)
    add_strips(const __grid_constant__ cuda_args a, const __grid_constant__ observed_cells cells, int strip_rows,
               int64_t count)
{
    const attn_observe &o = a.g.observe;
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x, height = o.rows[1] - o.rows[0];
    if (n >= count) return;
    int64_t u, v, h;
    const int64_t batch = divide(divide(divide(n, o.map[1], v), o.map[0], u), a.g.dims.H, h),
                  b = a.g.dims.packed ? o.sequence : batch;
    const int64_t r0 = attn_tiles(u * height, o.map[0]), r1 = attn_tiles((u + 1) * height, o.map[0]);
    const float *const from = cells.part + (batch * a.g.dims.H + h) * (cells.strips + o.map[0]) * o.map[1] + v;
    double sum = 0;
    for (int64_t strip = r0 / strip_rows; r0 < r1 && strip <= (r1 - 1) / strip_rows; strip++)
        sum += (double)from[(strip + u) * o.map[1]];
    const attn_view &view = a.g.view[ATTN_T_map];
    ((float *)view.data)[attn_at(&view, b, h, u) + v] = (float)sum;
}

/* ---- The parts of the workspace ---------------------------------------------------------------------------------- */

struct layout {
    observed_rows rows;
    tile_rows tiles;
    observed_parts parts;
    observed_cells cells;
    size_t part_bytes, cell_bytes, bytes;
};

template <typename X> X *take(char *memory, size_t *used, int64_t count)
{
    X *const at = (X *)(memory + *used);
    *used += ((size_t)count * sizeof(X) + 255) / 256 * 256;
    return at;
}

/* Returns the number of blocks (at most `most`) that share the work of one tile, so that the blocks of `tiles` tiles
 * fill the GPU. */
int blocks_of(const cuda_chip *chip, int64_t tiles, int64_t most)
{
    const int64_t busy = (int64_t)chip->multiprocessors * 4;
    return (int)attn_max64(attn_min64(attn_tiles(busy, attn_max64(tiles, 1)), most), 1);
}

layout layout_of(const cuda_chip *chip, const attn_plan *plan, const observe_passes &passes, void *memory)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const attn_observe &o = g.observe;
    const int64_t rows = query_rows(d), shown = d.packed ? d.H : d.B * d.H, chunks = attn_tiles(d.Sk, OBSERVE_CHUNK);
    const dim3 grid = tile_grid(g, passes.block_rows);
    char *const at = (char *)memory;
    layout x = {};
    x.rows.base = take<float>(at, &x.bytes, rows);
    x.rows.inverse = take<float>(at, &x.bytes, rows);
    x.rows.most = take<float>(at, &x.bytes, rows);
    x.rows.entropy = take<float>(at, &x.bytes, rows);
    x.rows.strange = take<uint8_t>(at, &x.bytes, rows);
    x.rows.found = take<int>(at, &x.bytes, 2);
    x.rows.nonfinite = x.rows.found + 1;
    x.tiles.end = take<float2>(at, &x.bytes, rows);
    x.parts.blocks = blocks_of(chip, (int64_t)grid.x * grid.y * grid.z, chunks);
    x.parts.rows = rows;
    size_t before = x.bytes;
    x.parts.part = take<float4>(at, &x.bytes, rows * (x.parts.blocks == 1 ? 1 : chunks));
    /* Number of bytes of `parts` to clear before the launch. If several blocks share a row's keys, some elements of
     * `parts` may never be written. */
    x.part_bytes = x.parts.blocks == 1 ? 0 : x.bytes - before;
    if (!plan->problem->map.rank) return x;
    before = x.bytes;
    x.cells.map = true;
    x.cells.strips = attn_tiles(o.rows[1] - o.rows[0], observe_strip_rows(plan));
    x.cells.blocks = blocks_of(chip, attn_tiles(o.rows[1] - o.rows[0], observe_block_rows(plan)) * shown, o.map[1]);
    x.cells.part = take<float>(at, &x.bytes, shown * (x.cells.strips + o.map[0]) * o.map[1]);
    x.cell_bytes = x.bytes - before;
    return x;
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

/* Returns whether the client gave lse, and the requested outputs need nothing else from the pass over the rows. */
bool is_known(const attn_problem *p)
{
    return p->observe.given_lse && !p->row_max.rank && !p->max_logit.rank && !p->entropy.rank &&
           !p->mean_entropy.rank && !p->top_keys.rank && !p->top_weights.rank;
}

/* Returns which sums over a row's keys the requested outputs need. 0: none; 1: the sum l; 2: the sums l and e (see
 * observed_parts and observe_rows.cu). */
int needed_sums(const attn_problem *p)
{
    if (p->entropy.rank || p->mean_entropy.rank) return 2;
    return !p->observe.given_lse &&
           (p->lse.rank || p->top_weights.rank || p->key_mass.rank || p->weights.rank || p->map.rank);
}

/* Estimated seconds of four passes: over the rows; for key_mass; for top_keys; and for weights and map. */
struct pass_seconds {
    double rows, mass, top, region;
};

pass_seconds seconds_of(const cuda_chip *chip, const attn_plan *plan, const observe_passes &passes)
{
    const attn_observe &o = plan->geometry.observe;
    const attn_dims &d = plan->geometry.dims;
    const double all = tile_seconds(chip, plan), rows = (double)attn_max64(d.Sq, 1), keys = (double)attn_max64(d.Sk, 1);
    const double of_rows = (double)(o.rows[1] - o.rows[0]) / rows, of_keys = (double)(o.keys[1] - o.keys[0]) / keys;
    const bool few = o.key_mass_rows > 0 && o.key_mass_rows < d.Sq && !d.packed;
    return { all, few ? all * (double)o.key_mass_rows / rows : all, 6 * all * passes.others,
             all * of_rows * of_keys * passes.others };
}

cudaError_t launch_rows(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const layout &x,
                        const observe_passes &passes, const pass_seconds &seconds, cudaStream_t stream)
{
    const attn_problem *const p = plan->problem;
    const float scale = (float)a.g.scale;
    const finish_args f = { x.parts, scale, scale * LOG2E, has_options(plan), needed_sums(p) };
    const int64_t rows = query_rows(a.g.dims);
    cudaError_t code = in_shares(
        chip, seconds.rows, [&](const cuda_chip *part) { return passes.rows(part, a, plan, x.parts, f.sums, stream); });
    if (code == cudaSuccess && rows > 0 && takes_step(chip, 0))
        finish_rows<<<(unsigned)attn_tiles(rows, THREADS), THREADS, 0, stream>>>(a, f, x.rows, x.tiles);
    simple_observe_rows_left(chip, a, x.rows, stream);
    if (code == cudaSuccess && (p->top_keys.rank || p->top_weights.rank))
        code = in_shares(chip, seconds.top,
                         [&](const cuda_chip *part) { return observe_top_pass(part, a, plan, x.rows, stream); });
    return code;
}

void take_lse(const cuda_chip *chip, const cuda_args &a, const layout &x, cudaStream_t stream)
{
    const int64_t rows = query_rows(a.g.dims);
    if (rows > 0 && takes_step(chip, 0))
        take_given_lse<<<blocks_for(rows), 32 * WARPS, 0, stream>>>(a, x.rows, x.tiles);
}

cudaError_t launch_region(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const layout &x,
                          const pass_seconds &seconds, cudaStream_t stream)
{
    const attn_problem *const p = plan->problem;
    const attn_observe &o = a.g.observe;
    const int64_t shown = a.g.dims.packed ? a.g.dims.H : a.g.dims.B * a.g.dims.H, cells = o.map[0] * o.map[1] * shown;
    const int64_t height = o.rows[1] - o.rows[0], width = o.keys[1] - o.keys[0];
    const auto pass = [&](const observed_cells &what) {
        return in_shares(chip, seconds.region, [&](const cuda_chip *part) {
            return observe_cells_pass(part, a, plan, x.tiles, what, stream);
        });
    };
    cudaError_t code = cudaSuccess;
    if (height <= 0 || width <= 0) return code;
    if (p->weights.rank) {
        observed_cells weights = {};
        weights.blocks = blocks_of(chip, attn_tiles(height, observe_block_rows(plan)) * shown, attn_tiles(width, 64));
        code = pass(weights);
    }
    if (code != cudaSuccess || !p->map.rank) return code;
    code = pass(x.cells);
    if (code == cudaSuccess && cells > 0 && takes_step(chip, 0))
        add_strips<<<(unsigned)attn_tiles(cells, THREADS), THREADS, 0, stream>>>(a, x.cells, observe_strip_rows(plan),
                                                                                 cells);
    return code;
}

} // namespace

bool observe_plan(const cuda_chip *chip, attn_plan *plan, const observe_passes &passes)
{
    const int64_t most_bytes = INT64_C(4) << 30;
    const size_t shared = observe_rows_shared(plan), cells = observe_cells_shared(plan),
                 mass = observe_mass_shared(plan), most = shared > cells ? shared : cells;
    if (!tile_grid_fits(plan->geometry.dims) || (most > mass ? most : mass) > (size_t)chip->shared_bytes) return false;
    plan->workspace_bytes = layout_of(chip, plan, passes, nullptr).bytes;
    return plan->workspace_bytes < (size_t)most_bytes;
}

cudaError_t observe_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace,
                           const observe_passes &passes)
{
    const cuda_args a = cuda_args_of(chip, plan);
    const layout x = layout_of(chip, plan, passes, workspace);
    const pass_seconds seconds = seconds_of(chip, plan, passes);
    cudaError_t code = cudaSuccess;
    if (takes_step(chip, 0)) {
        code = cudaMemsetAsync(x.rows.found, 0, 2 * sizeof *x.rows.found, stream);
        if (code == cudaSuccess && x.part_bytes) code = cudaMemsetAsync(x.parts.part, 0, x.part_bytes, stream);
        if (code == cudaSuccess && x.cell_bytes) code = cudaMemsetAsync(x.cells.part, 0, x.cell_bytes, stream);
    }
    const bool known = is_known(plan->problem);
    if (code == cudaSuccess && known) take_lse(chip, a, x, stream);
    if (code == cudaSuccess && !known) code = launch_rows(chip, a, plan, x, passes, seconds, stream);
    if (code == cudaSuccess && plan->problem->key_mass.rank)
        code = in_shares(chip, seconds.mass,
                         [&](const cuda_chip *part) { return passes.mass(part, a, plan, x.tiles, stream); });
    if (code == cudaSuccess) code = launch_region(chip, a, plan, x, seconds, stream);
    if (code != cudaSuccess) return code;
    if (known) {
        simple_observe_find_nonfinite(chip, a, x.rows, stream);
        simple_observe_rows_left(chip, a, x.rows, stream);
        simple_observe_nonfinite_sums(chip, a, x.rows, stream);
    }
    simple_observe_sums_left(chip, a, x.rows, stream);
    simple_observe_heads(chip, a, x.rows, stream);
    return cudaPeekAtLastError();
}

namespace {

observe_passes own_passes(const attn_plan *plan)
{
    return { observe_block_rows(plan), 1, observe_rows_pass, observe_mass_pass };
}

bool plan_generic(const cuda_chip *chip, attn_plan *plan)
{
    return observe_plan(chip, plan, own_passes(plan));
}

cudaError_t launch_generic(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    return observe_launch(chip, stream, plan, workspace, own_passes(plan));
}

const uint32_t DTYPES = ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3);

} // namespace

extern const cuda_kernel generic_observe = {
    { "generic", ATTN_OP_OBSERVE, DTYPES, TILE_HEAD_DIM, ATTN_ALL_SCORES | ATTN_KEY_FEATURES },
    80,
    ANY_COMPUTE,
    plan_generic,
    launch_generic,
};
