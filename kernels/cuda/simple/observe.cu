/* observe.cu: computes an observe (which keys the queries attend to; see attn_observe in attention.h) without tensor
 * cores, for every dtype, head dim and option. One warp computes a row, an element of key_mass or a cell of map. One
 * block computes max_logit and mean_entropy of a head.
 *
 * The kernel observe_rows computes row_max, lse, entropy, top_keys and top_weights, and stores two numbers per row in
 * the workspace (observe.h). The kernels for key_mass, weights and map recompute the scores, and get P from these two
 * numbers. Sums of many P are double.
 *
 * sm80/observe.cu launches these kernels for strange rows (rows that tensor cores cannot compute). */
#include "kernels/cuda/common/kernels.h"
#include "left.cuh"
#include "observe_row.cuh"
#include "simple.h"

namespace {

/* Returns whether this launch computes the row with index `at`. There are three kinds of launches: they compute all
 * rows, only strange rows (rows that tensor cores cannot compute), or only the rows that are not strange. */
DEVICE bool is_wanted(const observed_rows &rows, int64_t at)
{
    return !rows.strange || (rows.strange[at] != 0) != rows.nonfinite_sums;
}

DEVICE bool has_wanted(const observed_rows &rows)
{
    return rows.nonfinite_sums ? *rows.nonfinite : !rows.found || *rows.found;
}

/* Returns whether this launch computes an element of key_mass, weights or map whose value so far is `x`. If
 * rows.nonfinite_sums is true, the launch computes only elements that are not finite. */
DEVICE bool is_wanted_sum(const observed_rows &rows, float x)
{
    return !rows.nonfinite_sums || x - x != 0;
}

template <class VISIT> DEVICE void for_work(int64_t first, int64_t count, VISIT visit)
{
    for (int64_t n = warp_index(); n < count; n += (int64_t)gridDim.x * WARPS) visit(first + n);
}

/* Writes a sum to *to, or adds it if kernels on tensor cores have already written the sum of other rows there. */
DEVICE void store_sum(const observed_rows &rows, float *to, double sum)
{
    *to = (float)(rows.strange && !rows.nonfinite_sums ? (double)*to + sum : sum);
}

/* ---- The results of each row ------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(32 * WARPS) observe_rows(const __grid_constant__ cuda_args a, int64_t first,
                                                           int64_t count, const __grid_constant__ observed_rows rows)
{
    if (!has_wanted(rows)) return;
    for_work(first, count, [&](int64_t n) {
        const row r = query_row(a, n);
        if (r.exists && is_wanted(rows, lse_at(a, r.x, r.i))) observe_row(a, r.x, r.i, rows);
    });
}

/* ---- Results that are probabilities, or sums of probabilities ---------------------------------------------------- */

/* Computes key_mass of key n (counted over all query heads): the sum of its probabilities over the queries. */
DEVICE void mass_of_key(const cuda_args &a, int64_t n, const observed_rows &rows)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const bool packed = attn_keys_are_packed(&d);
    const int64_t Sk = d.Sk;
    if (Sk == 0 || n >= Sk * d.H * (packed ? 1 : d.B)) return;
    int64_t line, h;
    const int64_t batch = divide(divide(n, Sk, line), d.H, h), b = packed ? sequence_at(g.cu_k, d.B, line) : batch;
    const head_args x = head_args_of(a, b, h);
    const int64_t j = line - x.s.k_start, shown = g.observe.shown_keys;
    if (j >= x.s.Sk || (shown > 0 && !packed && j >= shown)) return;
    const attn_view &view = g.view[ATTN_T_key_mass];
    float *const to = (float *)view.data + attn_at(&view, b, h, 0) + line;
    if (!is_wanted_sum(rows, *to)) return;
    attn_range queries = attn_rows_of(&g, &x.s, j);
    if (g.observe.key_mass_rows > 0) queries.lo = attn_max64(queries.lo, x.s.Sq - g.observe.key_mass_rows);
    double sum = 0;
    for (int64_t first = queries.lo; first < queries.hi; first += 32) {
        const int64_t i = first + threadIdx.x % 32;
        const bool seen = i < queries.hi && is_wanted(rows, lse_at(a, x, i)) && visible_by_mask(a, x, i, j);
        const unsigned set = __ballot_sync(ALL_LANES, seen);
        if (!set) continue;
        const int64_t mine = seen ? i : first + __ffs(set) - 1;
        float derivative;
        const float z = score_of_lane(a, x, mine, j, g.view[ATTN_T_k], key_at(a, x, j), g.view[ATTN_T_q],
                                      query_at(a, x, mine), &derivative);
        sum += (double)probability(rows, lse_at(a, x, mine), seen, z);
    }
    sum = warp_sum_double(sum);
    if (threadIdx.x % 32 == 0) store_sum(rows, to, sum);
}

__global__ void __launch_bounds__(32 * WARPS) observe_mass(const __grid_constant__ cuda_args a, int64_t first,
                                                           int64_t count, const __grid_constant__ observed_rows rows)
{
    if (has_wanted(rows)) for_work(first, count, [&](int64_t n) { mass_of_key(a, n, rows); });
}

/* Calls visit(j, probability) in each lane for the lane's keys in lo .. hi - 1 that query i sees. */
template <class VISIT>
DEVICE void for_probabilities(const cuda_args &a, const head_args &x, const observed_rows &rows, int64_t i, int64_t lo,
                              int64_t hi, VISIT visit)
{
    const attn_range keys = attn_keys_of(&a.g, &x.s, i);
    lo = attn_max64(lo, keys.lo);
    hi = attn_min64(hi, keys.hi);
    for (int64_t first = lo; first < hi; first += 32) {
        const int64_t j = first + threadIdx.x % 32;
        const bool seen = j < hi && visible_by_mask(a, x, i, j);
        const unsigned set = __ballot_sync(ALL_LANES, seen);
        if (!set) continue;
        const float z = score_of_key(a, x, i, j, set, first);
        if (seen) visit(j, probability(rows, lse_at(a, x, i), seen, z));
    }
}

DEVICE void weights_of_row(const cuda_args &a, int64_t n, const observed_rows &rows)
{
    const attn_geometry &g = a.g;
    const attn_observe &o = g.observe;
    const int64_t height = o.rows[1] - o.rows[0];
    if (n >= height * g.dims.H * (g.dims.packed ? 1 : g.dims.B)) return;
    int64_t r, h;
    const int64_t batch = divide(divide(n, height, r), g.dims.H, h), i = o.rows[0] + r;
    const head_args x = head_args_of(a, g.dims.packed ? o.sequence : batch, h);
    const attn_view &view = g.view[ATTN_T_weights];
    float *const to = (float *)view.data + attn_at(&view, x.b, h, r);
    if (i >= x.s.Sq || !is_wanted(rows, lse_at(a, x, i))) return;
    bool wanted = !rows.nonfinite_sums;
    for (int64_t n = threadIdx.x % 32; n < o.keys[1] - o.keys[0] && rows.nonfinite_sums; n += 32)
        wanted |= is_wanted_sum(rows, to[n]);
    if (!__any_sync(ALL_LANES, wanted)) return;
    for_probabilities(a, x, rows, i, o.keys[0], o.keys[1], [&](int64_t j, float P) {
        if (is_wanted_sum(rows, to[j - o.keys[0]])) to[j - o.keys[0]] = P;
    });
}

__global__ void __launch_bounds__(32 * WARPS) observe_weights(const __grid_constant__ cuda_args a, int64_t first,
                                                              int64_t count, const __grid_constant__ observed_rows rows)
{
    if (has_wanted(rows)) for_work(first, count, [&](int64_t n) { weights_of_row(a, n, rows); });
}

/* Computes cell n (counted over all heads) of the output `map`: the sum of the probabilities in a rectangle of queries
 * and keys. */
DEVICE void sum_of_cell(const cuda_args &a, int64_t n, const observed_rows &rows)
{
    const attn_geometry &g = a.g;
    const attn_observe &o = g.observe;
    if (n >= o.map[0] * o.map[1] * g.dims.H * (g.dims.packed ? 1 : g.dims.B)) return;
    int64_t u, v, h;
    const int64_t batch = divide(divide(divide(n, o.map[1], v), o.map[0], u), g.dims.H, h);
    const head_args x = head_args_of(a, g.dims.packed ? o.sequence : batch, h);
    const int64_t height = o.rows[1] - o.rows[0], width = o.keys[1] - o.keys[0];
    const int64_t i0 = o.rows[0] + attn_tiles(u * height, o.map[0]),
                  i1 = o.rows[0] + attn_tiles((u + 1) * height, o.map[0]);
    const int64_t j0 = o.keys[0] + attn_tiles(v * width, o.map[1]),
                  j1 = o.keys[0] + attn_tiles((v + 1) * width, o.map[1]);
    const attn_view &view = g.view[ATTN_T_map];
    float *const to = (float *)view.data + attn_at(&view, x.b, h, u) + v;
    if (!is_wanted_sum(rows, *to)) return;
    double sum = 0;
    for (int64_t i = i0; i < attn_min64(i1, x.s.Sq); i++)
        if (is_wanted(rows, lse_at(a, x, i)))
            for_probabilities(a, x, rows, i, j0, j1, [&](int64_t, float P) { sum += (double)P; });
    sum = warp_sum_double(sum);
    if (threadIdx.x % 32 == 0) store_sum(rows, to, sum);
}

__global__ void __launch_bounds__(32 * WARPS) observe_map(const __grid_constant__ cuda_args a, int64_t first,
                                                          int64_t count, const __grid_constant__ observed_rows rows)
{
    if (has_wanted(rows)) for_work(first, count, [&](int64_t n) { sum_of_cell(a, n, rows); });
}

/* Tests an output that has `lines` rows of `width` elements for each head. Sets *rows.nonfinite if an element is not
 * finite. */
DEVICE void find_nonfinite_in(const cuda_args &a, const observed_rows &rows, const attn_view &view, int64_t lines,
                              int64_t width)
{
    const int64_t PIECE = 256;
    const attn_dims &d = a.g.dims;
    if (!view.data || width <= 0) return;
    const int64_t pieces = attn_tiles(width, PIECE), count = lines * pieces * d.H * (d.packed ? 1 : d.B);
    for (int64_t n = warp_index(); n < count; n += (int64_t)gridDim.x * WARPS) {
        int64_t piece, line, h;
        const int64_t b = divide(divide(divide(n, pieces, piece), lines, line), d.H, h);
        const float *const from = (const float *)view.data + attn_at(&view, b, h, line);
        const int64_t end = attn_min64((piece + 1) * PIECE, width);
        bool found = false;
        for (int64_t c = piece * PIECE + threadIdx.x % 32; c < end; c += 32) found |= from[c] - from[c] != 0;
        if (!found) continue;
        *rows.nonfinite = 1;
        if (a.rows_found) *a.rows_found = 1;
    }
}

__global__ void __launch_bounds__(32 * WARPS)
    find_nonfinite(const __grid_constant__ cuda_args a, const __grid_constant__ observed_rows rows)
{
    const attn_observe &o = a.g.observe;
    const attn_view &mass = a.g.view[ATTN_T_key_mass];
    const bool shows_some = !a.g.dims.packed && o.shown_keys > 0;
    find_nonfinite_in(a, rows, mass, 1, shows_some ? attn_min64(o.shown_keys, a.g.dims.Sk) : a.g.dims.Sk);
    find_nonfinite_in(a, rows, a.g.view[ATTN_T_weights], o.rows[1] - o.rows[0], o.keys[1] - o.keys[0]);
    find_nonfinite_in(a, rows, a.g.view[ATTN_T_map], o.map[0], o.map[1]);
}

enum { HEAD_THREADS = 512 };

__global__ void __launch_bounds__(HEAD_THREADS)
    observe_heads(const __grid_constant__ cuda_args a, const __grid_constant__ observed_rows rows)
{
    __shared__ float tops[HEAD_THREADS / 32];
    __shared__ double entropies[HEAD_THREADS / 32], counts[HEAD_THREADS / 32];
    const int64_t h = blockIdx.x % a.g.dims.H, b = blockIdx.x / a.g.dims.H;
    const head_args x = head_args_of(a, b, h);
    const int warp = threadIdx.x / 32;
    float most = -CUDART_INF_F;
    double entropy = 0, seen = 0;
    bool nan = false;
    for (int64_t i = threadIdx.x; i < x.s.Sq; i += HEAD_THREADS) {
        const int64_t at = lse_at(a, x, i);
        const float z = rows.most[at];
        if (z == -CUDART_INF_F) continue;
        nan |= z != z;
        most = fmaxf(most, z);
        entropy += (double)rows.entropy[at];
        seen += 1;
    }
    most = warp_max(most);
    entropy = warp_sum_double(entropy);
    seen = warp_sum_double(seen);
    if (threadIdx.x % 32 == 0) tops[warp] = most, entropies[warp] = entropy, counts[warp] = seen;
    nan = __syncthreads_or(nan);
    if (threadIdx.x) return;
    for (int n = 1; n < HEAD_THREADS / 32; n++) {
        most = fmaxf(most, tops[n]);
        entropy += entropies[n];
        seen += counts[n];
    }
    const attn_view &logit = a.g.view[ATTN_T_max_logit], &mean = a.g.view[ATTN_T_mean_entropy];
    if (logit.data) ((float *)logit.data)[attn_at(&logit, b, h, 0)] = nan ? CUDART_NAN_F : most;
    if (mean.data) ((float *)mean.data)[attn_at(&mean, b, h, 0)] = seen > 0 ? (float)(entropy / seen) : 0;
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

/* Launches a kernel on `count` rows, keys or cells in steps: calls launch(blocks, first, count) for each step. If
 * rows.strange is not NULL, the launches compute only strange rows (rows that tensor cores cannot compute). */
template <typename F>
void launch_each(const cuda_chip *chip, const observed_rows &rows, int64_t count, double seconds_each, F launch)
{
    /* this many warps, 32 per multiprocessor, keep the GPU busy */
    const int64_t busy = (int64_t)chip->multiprocessors * 32;
    if (!rows.strange) {
        in_steps(chip, count, seconds_each,
                 [&](int64_t first, int64_t part) { launch(blocks_for(part), first, part); });
    } else if (chip->rows_found) {
        /* `found` is NULL in a problem that takes little time. No launch then computes the strange rows (rows that
         * tensor cores cannot compute). The host sees after the last kernel whether the problem has any, and if so,
         * computes the whole problem again. */
        if (!chip->found) return;
        launch_left(chip, count, seconds_each, [&](unsigned blocks, int64_t first, int64_t part, int64_t) {
            launch((unsigned)attn_min64(blocks, busy), first, part);
        });
    } else if (count > 0 && takes_step(chip, 0)) {
        launch(blocks_for(attn_min64(count, busy)), 0, count);
    }
}

void launch_observed_rows(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream)
{
    launch_each(chip, rows, query_rows(a.g.dims), row_seconds(chip, a.g, FORWARD_PAIR),
                [&](unsigned blocks, int64_t first, int64_t count) {
                    observe_rows<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, rows);
                });
}

void launch_sums(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const attn_observe &o = g.observe;
    const int64_t shown = d.packed ? d.H : d.B * d.H, height = o.rows[1] - o.rows[0], width = o.keys[1] - o.keys[0];
    const double pair = pair_seconds(chip, g, FORWARD_PAIR);
    if (g.view[ATTN_T_key_mass].data)
        launch_each(chip, rows, d.Sk * d.H * (attn_keys_are_packed(&d) ? 1 : d.B),
                    key_seconds(chip, g, FORWARD_PAIR) / (double)g.group,
                    [&](unsigned blocks, int64_t first, int64_t count) {
                        observe_mass<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, rows);
                    });
    if (g.view[ATTN_T_weights].data && height > 0)
        launch_each(chip, rows, height * shown, (double)attn_max64(width, 1) * pair,
                    [&](unsigned blocks, int64_t first, int64_t count) {
                        observe_weights<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, rows);
                    });
    if (g.view[ATTN_T_map].data && height > 0 && width > 0) {
        const double each = (double)attn_tiles(height, o.map[0]) * (double)attn_max64(32, attn_tiles(width, o.map[1]));
        launch_each(chip, rows, o.map[0] * o.map[1] * shown, each * pair,
                    [&](unsigned blocks, int64_t first, int64_t count) {
                        observe_map<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, rows);
                    });
    }
}

bool plan_observe(const cuda_chip *, attn_plan *plan)
{
    plan->workspace_bytes = 4 * sizeof(float) * (size_t)query_rows(plan->geometry.dims);
    return true;
}

cudaError_t launch_observe(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    const cuda_args a = cuda_args_of(chip, plan);
    const int64_t rows = query_rows(a.g.dims);
    float *const memory = (float *)workspace;
    const observed_rows k = { memory, memory + rows, memory + 2 * rows, memory + 3 * rows };
    launch_observed_rows(chip, a, k, stream);
    launch_sums(chip, a, k, stream);
    simple_observe_heads(chip, a, k, stream);
    return cudaPeekAtLastError();
}

} // namespace

void simple_observe_rows_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream)
{
    if (chip->found) look_for_rows(chip, stream);
    launch_observed_rows(chip, a, rows, stream);
}

void simple_observe_find_nonfinite(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream)
{
    if (takes_step(chip, 0)) find_nonfinite<<<chip->multiprocessors * 4, 32 * WARPS, 0, stream>>>(a, rows);
}

void simple_observe_nonfinite_sums(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows,
                                   cudaStream_t stream)
{
    observed_rows again = rows;
    again.nonfinite_sums = true;
    launch_sums(chip, a, again, stream);
}

void simple_observe_sums_left(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream)
{
    launch_sums(chip, a, rows, stream);
}

void simple_observe_heads(const cuda_chip *chip, const cuda_args &a, const observed_rows &rows, cudaStream_t stream)
{
    const attn_geometry &g = a.g;
    const int64_t heads = g.dims.B * g.dims.H;
    if ((g.view[ATTN_T_max_logit].data || g.view[ATTN_T_mean_entropy].data) && heads > 0 && takes_step(chip, 0))
        observe_heads<<<(unsigned)heads, HEAD_THREADS, 0, stream>>>(a, rows);
}

extern const cuda_kernel simple_observe = {
    { "simple", ATTN_OP_OBSERVE, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, ATTN_ALL_SCORES | ATTN_KEY_FEATURES },
    80,
    ANY_COMPUTE,
    plan_observe,
    launch_observe,
};
