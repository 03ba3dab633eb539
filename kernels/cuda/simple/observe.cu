/* observe.cu: what the queries look at (attention.h, attn_observe), without tensor cores. It computes every dtype, head
 * dim and option. One warp computes each number, in an order that depends only on the problem.
 *
 *   kernel    a warp computes                                       outputs
 *   rows      a query row of one head, 32 keys at a time            row_max, lse, entropy, top_keys, top_weights
 *   mass      the sum of a key's probabilities over the queries     key_mass
 *   weights   a row of the region                                   weights
 *   map       a cell                                                map
 *   heads     a head, from the results of its rows                  max_logit, mean_entropy
 *
 * The first kernel leaves two numbers of each row in the workspace, and the others compute the scores anew:
 *     P = exp2(z - base) * inverse                    z, base: by in_base_2()
 * base is INFINITY where P is 0, and NaN where all numbers of the row are NaN. Sums of many P are double.
 *
 * Entropy: e = sum exp2(z - m) (z - m), and -sum P ln P is made of l and e without a difference of large numbers, as in
 * cpu/observe.c. */
#include "kernels/cuda/common/kernels.h"
#include "simple.h"
#include "work.cuh"

namespace {

/* Results for each row that the first kernel writes and the later kernels read. lse_at() gives the index of a row. */
struct kept {
    float *base, *inverse, *most, *entropy;
};

DEVICE float warp_max(float x)
{
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lane));
    return x;
}

DEVICE double warp_sum_double(double x)
{
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(ALL_LANES, x, lane);
    return x;
}

DEVICE int64_t query_at(const cuda_args &a, const head_args &x, int64_t i)
{
    return attn_at(&a.g.view[ATTN_T_q], x.b, x.h, x.s.q_start + i);
}

DEVICE int64_t key_at(const cuda_args &a, const head_args &x, int64_t j)
{
    return attn_key_at(&a.g, &a.g.view[ATTN_T_k], x.b, x.hk, x.s.k_start + j);
}

/* Returns the score of query i, which is the same in all lanes, and of key j, of which each lane has its own. It is
 * valid where the lane's bit in `set` is 1. The whole warp calls it, and at least one bit of `set` must be 1. */
DEVICE float score_of_key(const cuda_args &a, const head_args &x, int64_t i, int64_t j, unsigned set, int64_t first)
{
    const int64_t mine = set >> (threadIdx.x % 32) & 1 ? j : first + __ffs(set) - 1;
    float derivative;
    return score_of_lane(a, x, i, mine, a.g.view[ATTN_T_q], query_at(a, x, i), a.g.view[ATTN_T_k], key_at(a, x, mine),
                         &derivative);
}

/* Returns the probability of a lane's score, or 0 if the row does not see the lane's key. */
DEVICE float probability(const kept &rows, int64_t row, bool seen, float z)
{
    const float base = rows.base[row];
    if (!seen) return 0;
    return base != base ? base : exp2f(in_base_2(z) - base) * rows.inverse[row];
}

/* ---- The largest scores of a row --------------------------------------------------------------------------------- */

/* Up to 64 scores of a row in descending order. Number n is in slot n / 32 of lane n % 32. */
struct top_list {
    float z[2];
    int key[2];
};

DEVICE float top_least(const top_list &top, int64_t most)
{
    return __shfl_sync(ALL_LANES, most > 32 ? top.z[1] : top.z[0], (int)(most - 1) % 32);
}

template <typename T> DEVICE void shift(T (&slot)[2], int at, T x)
{
    const int lane = threadIdx.x % 32;
    const T before = __shfl_up_sync(ALL_LANES, slot[0], 1), last = __shfl_sync(ALL_LANES, slot[0], 31);
    T before1 = __shfl_up_sync(ALL_LANES, slot[1], 1);
    if (lane == 0) before1 = last;
    slot[0] = lane < at ? slot[0] : lane == at ? x : before;
    slot[1] = lane + 32 < at ? slot[1] : lane + 32 == at ? x : before1;
}

/* Adds the lanes' scores to the list. Lane n has key first + n. The lower of two keys with equal scores comes first. */
DEVICE void add_to_top(top_list &top, int64_t most, bool seen, float z, int64_t first)
{
    for (;;) {
        const float least = top_least(top, most);
        const bool better = seen && z > least;
        if (!__any_sync(ALL_LANES, better)) return;
        const float best = warp_max(better ? z : -CUDART_INF_F);
        const int winner = __ffs(__ballot_sync(ALL_LANES, better && z == best)) - 1;
        const int at = __popc(__ballot_sync(ALL_LANES, top.z[0] >= best)) +
                       __popc(__ballot_sync(ALL_LANES, top.z[1] >= best));
        shift(top.z, at, best);
        shift(top.key, at, (int)(first + winner));
        if ((int)threadIdx.x % 32 == winner) seen = false;
    }
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

/* The results of a row, and what other kernels need of it. In end_of_row(), `from` is log2 of the probability of the
 * row's largest score. */
struct row_end {
    float lse, base, inverse, entropy;
};

DEVICE row_end end_of_row(float m, float l, float e, float sink, bool given, float given_lse)
{
    const float FAR = 64, sink2 = sink_in_base_2(sink);
    row_end end;
    float from, sink_from;
    if (given && (fabsf(given_lse) < ATTN_LSE_MOST || given_lse == -CUDART_INF_F || given_lse != given_lse)) {
        end.lse = given_lse;
        from = m - given_lse * LOG2E;
        sink_from = sink2 - given_lse * LOG2E;
    } else {
        const float top = fmaxf(m, sink2);
        const float keys = m == -CUDART_INF_F ? 0 : l * exp2f(m - top);
        const float sum = keys + (sink2 == -CUDART_INF_F ? 0 : exp2f(sink2 - top));
        end.lse = lse_of_sum(top, sum);
        from = (m - top) - log2f(sum);
        sink_from = (sink2 - top) - log2f(sum);
    }
    const bool nothing = m == -CUDART_INF_F || end.lse == -CUDART_INF_F;
    const float P = exp2f(from), sink_P = exp2f(sink_from);
    end.base = nothing ? CUDART_INF_F : from > FAR ? end.lse * LOG2E : m;
    end.inverse = nothing || from > FAR ? 1 : P;
    end.entropy = nothing || P == 0 ? 0 : P * (-from * l - e) * LN2;
    if (!nothing && sink_P > 0) end.entropy -= sink_P * sink_from * LN2;
    return end;
}

__global__ void __launch_bounds__(32 * WARPS)
    observe_rows(const __grid_constant__ cuda_args a, int64_t first_row, const __grid_constant__ kept rows)
{
    const row r = query_row(a, first_row + warp_index());
    if (!r.exists) return;
    const attn_geometry &g = a.g;
    const head_args &x = r.x;
    const int64_t i = r.i, most_keys = g.observe.top, line = x.s.q_start + i;
    const int lane = threadIdx.x % 32;
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    float m = -CUDART_INF_F, most = -CUDART_INF_F, l = 0, e = 0;
    bool nan = false;
    top_list top = { { -CUDART_INF_F, -CUDART_INF_F }, { -1, -1 } };
    for (int64_t first = keys.lo; first < keys.hi; first += 32) {
        const int64_t j = first + lane;
        const bool seen = j < keys.hi && visible_by_mask(a, x, i, j);
        const unsigned set = __ballot_sync(ALL_LANES, seen);
        if (!set) continue;
        const float z = score_of_key(a, x, i, j, set, first), y = seen ? in_base_2(z) : -CUDART_INF_F;
        nan |= __any_sync(ALL_LANES, seen && z != z);
        most = fmaxf(most, warp_max(seen ? z : -CUDART_INF_F));
        const float m_new = fmaxf(m, warp_max(y));
        if (m_new > m) { /* all lanes take the same branch */
            const float by = m - m_new, scale = exp2f(by);
            e = scale == 0 ? 0 : scale * (e + by * l);
            l *= scale;
            m = m_new;
        }
        const float p = seen ? exp2f(y - m) : 0;
        l += p;
        if (p > 0) e += p * (y - m);
        if (most_keys > 0) add_to_top(top, most_keys, seen, z, first);
    }
    l = warp_sum(l);
    e = warp_sum(e);
    const attn_view &lse_view = g.view[ATTN_T_lse];
    const int64_t lse_index = attn_at(&lse_view, x.b, x.h, line);
    const float given_lse = g.observe.given_lse ? ((const float *)lse_view.data)[lse_index] : 0;
    row_end end = end_of_row(m, l, e, sink_of(a, x.h), g.observe.given_lse, given_lse);
    const bool sees = m > -CUDART_INF_F || nan;
    nan |= sees && end.lse != end.lse;
    if (nan) {
        end.base = end.entropy = most = CUDART_NAN_F;
        if (!g.observe.given_lse) end.lse = CUDART_NAN_F;
    }
    const attn_view &keys_view = g.view[ATTN_T_top_keys], &weights = g.view[ATTN_T_top_weights];
    for (int slot = 0; slot < 2; slot++) {
        const int64_t n = lane + 32 * slot;
        if (n >= most_keys) continue;
        const bool there = top.key[slot] >= 0 && !nan;
        const float P = there ? exp2f(in_base_2(top.z[slot]) - end.base) * end.inverse : nan ? CUDART_NAN_F : 0;
        if (keys_view.data)
            ((int32_t *)keys_view.data)[attn_at(&keys_view, x.b, x.h, line) + n] = there ? top.key[slot] : -1;
        if (weights.data) ((float *)weights.data)[attn_at(&weights, x.b, x.h, line) + n] = P;
    }
    if (lane) return;
    const attn_view &max_view = g.view[ATTN_T_row_max], &entropy_view = g.view[ATTN_T_entropy];
    if (max_view.data) ((float *)max_view.data)[attn_at(&max_view, x.b, x.h, line)] = most;
    if (entropy_view.data) ((float *)entropy_view.data)[attn_at(&entropy_view, x.b, x.h, line)] = end.entropy;
    if (lse_view.data && !g.observe.given_lse) ((float *)lse_view.data)[lse_index] = end.lse;
    const int64_t at = lse_at(a, x, i);
    rows.base[at] = end.base;
    rows.inverse[at] = end.inverse;
    rows.most[at] = most;
    rows.entropy[at] = end.entropy;
}

/* ---- Sums and parts of the probabilities ------------------------------------------------------------------------- */

/* Computes key_mass. A warp has one key of one query head, and its lanes share the queries. Neighbouring warps have
 * neighbouring keys. */
__global__ void __launch_bounds__(32 * WARPS)
    observe_mass(const __grid_constant__ cuda_args a, int64_t first_key, const __grid_constant__ kept rows)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const bool packed = attn_keys_are_packed(&d);
    const int64_t n = first_key + warp_index(), Sk = d.Sk;
    if (Sk == 0 || n >= Sk * d.H * (packed ? 1 : d.B)) return;
    int64_t line, h;
    const int64_t batch = divide(divide(n, Sk, line), d.H, h), b = packed ? sequence_at(g.cu_k, d.B, line) : batch;
    const head_args x = head_args_of(a, b, h);
    const int64_t j = line - x.s.k_start, shown = g.observe.shown_keys;
    if (j >= x.s.Sk || (shown > 0 && !packed && j >= shown)) return;
    attn_range queries = attn_rows_of(&g, &x.s, j);
    if (g.observe.key_mass_rows > 0) queries.lo = attn_max64(queries.lo, x.s.Sq - g.observe.key_mass_rows);
    double sum = 0;
    for (int64_t first = queries.lo; first < queries.hi; first += 32) {
        const int64_t i = first + threadIdx.x % 32;
        const bool seen = i < queries.hi && visible_by_mask(a, x, i, j);
        const unsigned set = __ballot_sync(ALL_LANES, seen);
        if (!set) continue;
        const int64_t mine = seen ? i : first + __ffs(set) - 1;
        float derivative;
        const float z = score_of_lane(a, x, mine, j, g.view[ATTN_T_k], key_at(a, x, j), g.view[ATTN_T_q],
                                      query_at(a, x, mine), &derivative);
        sum += (double)probability(rows, lse_at(a, x, mine), seen, z);
    }
    sum = warp_sum_double(sum);
    const attn_view &view = g.view[ATTN_T_key_mass];
    if (threadIdx.x % 32 == 0) ((float *)view.data)[attn_at(&view, b, h, 0) + line] = (float)sum;
}

/* Calls visit(j, probability) in each lane for those of the lane's keys in [lo, hi) that query i sees. */
template <class VISIT>
DEVICE void for_probabilities(const cuda_args &a, const head_args &x, const kept &rows, int64_t i, int64_t lo,
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

/* Computes weights. A warp has row n of the region's rows in all heads. */
__global__ void __launch_bounds__(32 * WARPS)
    observe_weights(const __grid_constant__ cuda_args a, int64_t first_row, const __grid_constant__ kept rows)
{
    const attn_geometry &g = a.g;
    const attn_observe &o = g.observe;
    const int64_t n = first_row + warp_index(), height = o.rows[1] - o.rows[0];
    if (n >= height * g.dims.H * (g.dims.packed ? 1 : g.dims.B)) return;
    int64_t r, h;
    const int64_t batch = divide(divide(n, height, r), g.dims.H, h), i = o.rows[0] + r;
    const head_args x = head_args_of(a, g.dims.packed ? o.sequence : batch, h);
    const attn_view &view = g.view[ATTN_T_weights];
    float *const to = (float *)view.data + attn_at(&view, x.b, h, r);
    if (i >= x.s.Sq) return;
    for_probabilities(a, x, rows, i, o.keys[0], o.keys[1], [&](int64_t j, float P) { to[j - o.keys[0]] = P; });
}

/* Computes map. A warp has cell n of all heads' maps. */
__global__ void __launch_bounds__(32 * WARPS)
    observe_map(const __grid_constant__ cuda_args a, int64_t first_cell, const __grid_constant__ kept rows)
{
    const attn_geometry &g = a.g;
    const attn_observe &o = g.observe;
    const int64_t n = first_cell + warp_index();
    if (n >= o.map[0] * o.map[1] * g.dims.H * (g.dims.packed ? 1 : g.dims.B)) return;
    int64_t u, v, h;
    const int64_t batch = divide(divide(divide(n, o.map[1], v), o.map[0], u), g.dims.H, h);
    const head_args x = head_args_of(a, g.dims.packed ? o.sequence : batch, h);
    const int64_t height = o.rows[1] - o.rows[0], width = o.keys[1] - o.keys[0];
    const int64_t i0 = o.rows[0] + attn_tiles(u * height, o.map[0]),
                  i1 = o.rows[0] + attn_tiles((u + 1) * height, o.map[0]);
    const int64_t j0 = o.keys[0] + attn_tiles(v * width, o.map[1]),
                  j1 = o.keys[0] + attn_tiles((v + 1) * width, o.map[1]);
    double sum = 0;
    for (int64_t i = i0; i < attn_min64(i1, x.s.Sq); i++)
        for_probabilities(a, x, rows, i, j0, j1, [&](int64_t, float P) { sum += (double)P; });
    sum = warp_sum_double(sum);
    const attn_view &view = g.view[ATTN_T_map];
    if (threadIdx.x % 32 == 0) ((float *)view.data)[attn_at(&view, x.b, h, u) + v] = (float)sum;
}

/* Computes max_logit and mean_entropy. A warp has one head; each lane has every 32nd row. */
__global__ void __launch_bounds__(32)
    observe_heads(const __grid_constant__ cuda_args a, const __grid_constant__ kept rows)
{
    const int64_t h = blockIdx.x % a.g.dims.H, b = blockIdx.x / a.g.dims.H;
    const head_args x = head_args_of(a, b, h);
    float most = -CUDART_INF_F;
    double entropy = 0, seen = 0;
    bool nan = false;
    for (int64_t i = threadIdx.x; i < x.s.Sq; i += 32) {
        const int64_t at = lse_at(a, x, i);
        const float z = rows.most[at];
        if (z == -CUDART_INF_F) continue;
        nan |= z != z;
        most = fmaxf(most, z);
        entropy += (double)rows.entropy[at];
        seen += 1;
    }
    nan = __any_sync(ALL_LANES, nan);
    most = warp_max(most);
    entropy = warp_sum_double(entropy);
    seen = warp_sum_double(seen);
    if (threadIdx.x) return;
    const attn_view &logit = a.g.view[ATTN_T_max_logit], &mean = a.g.view[ATTN_T_mean_entropy];
    if (logit.data) ((float *)logit.data)[attn_at(&logit, b, h, 0)] = nan ? CUDART_NAN_F : most;
    if (mean.data) ((float *)mean.data)[attn_at(&mean, b, h, 0)] = seen > 0 ? (float)(entropy / seen) : 0;
}

/* ---- Launcher ---------------------------------------------------------------------------------------------------- */

bool plan_observe(const cuda_chip *, attn_plan *plan)
{
    plan->workspace_bytes = 4 * sizeof(float) * (size_t)query_rows(plan->geometry.dims);
    return true;
}

cudaError_t launch_observe(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    const cuda_args a = cuda_args_of(chip, plan);
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const attn_observe &o = g.observe;
    const int64_t rows = query_rows(d), heads = d.B * d.H, shown = d.packed ? d.H : heads;
    float *const memory = (float *)workspace;
    const kept k = { memory, memory + rows, memory + 2 * rows, memory + 3 * rows };
    const double pair = pair_seconds(chip, g, FORWARD_PAIR);
    const int64_t height = o.rows[1] - o.rows[0], width = o.keys[1] - o.keys[0];
    in_steps(chip, rows, row_seconds(chip, g, FORWARD_PAIR), [&](int64_t first, int64_t count) {
        observe_rows<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, k);
    });
    if (g.view[ATTN_T_key_mass].data)
        in_steps(chip, d.Sk * d.H * (attn_keys_are_packed(&d) ? 1 : d.B),
                 key_seconds(chip, g, FORWARD_PAIR) / (double)g.group, [&](int64_t first, int64_t count) {
                     observe_mass<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, k);
                 });
    if (g.view[ATTN_T_weights].data && height > 0)
        in_steps(chip, height * shown, (double)attn_max64(width, 1) * pair, [&](int64_t first, int64_t count) {
            observe_weights<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, k);
        });
    if (g.view[ATTN_T_map].data && height > 0 && width > 0) {
        const double each = (double)attn_tiles(height, o.map[0]) * (double)attn_max64(32, attn_tiles(width, o.map[1]));
        in_steps(chip, o.map[0] * o.map[1] * shown, each * pair, [&](int64_t first, int64_t count) {
            observe_map<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, k);
        });
    }
    if ((g.view[ATTN_T_max_logit].data || g.view[ATTN_T_mean_entropy].data) && heads > 0 && takes_step(chip, 0))
        observe_heads<<<(unsigned)heads, 32, 0, stream>>>(a, k);
    return cudaPeekAtLastError();
}

} // namespace

extern const cuda_kernel simple_observe = {
    { "simple", ATTN_OP_OBSERVE, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, ATTN_ALL_SCORES | ATTN_KEY_FEATURES },
    80,
    ANY_COMPUTE,
    plan_observe,
    launch_observe,
};
