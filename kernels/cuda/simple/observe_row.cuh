/* observe_row.cuh: one warp computes a row of an observe (which keys the queries attend to): maximum, sums and largest
 * scores.
 *
 * As in cpu/observe.c, the entropy -sum P ln P comes from l = sum exp2(z - m) and e = sum exp2(z - m) (z - m), which
 * avoids subtracting large numbers. */
#ifndef ATTN_CUDA_SIMPLE_OBSERVE_ROW_CUH
#define ATTN_CUDA_SIMPLE_OBSERVE_ROW_CUH

#include "kernels/cuda/common/rows.cuh"
#include "observe.h"

namespace {

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

/* Returns the score of a pair: query i, which is the same in all lanes, and key j, of which each lane has its own. Only
 * lanes whose bit in `set` is 1 get a result. The whole warp calls it. */
DEVICE float score_of_key(const cuda_args &a, const head_args &x, int64_t i, int64_t j, unsigned set, int64_t first)
{
    const int64_t mine = set >> (threadIdx.x % 32) & 1 ? j : first + __ffs(set) - 1;
    float derivative;
    return score_of_lane(a, x, i, mine, a.g.view[ATTN_T_q], query_at(a, x, i), a.g.view[ATTN_T_k], key_at(a, x, mine),
                         &derivative);
}

DEVICE float probability(const observed_rows &rows, int64_t row, bool seen, float z)
{
    const float base = rows.base[row];
    if (!seen || base == CUDART_INF_F) return 0;
    return base != base ? base : exp2f(in_base_2(z) - base) * rows.inverse[row];
}

/* ---- The largest scores of a row --------------------------------------------------------------------------------- */

/* up to 64 scores of a row, with their keys, in descending order: element n is in slot n / 32 of lane n % 32 */
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

/* Adds one score z per lane to the list; lane n has the key `first` + n. Of equal scores, the lower key comes first. */
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

/* ---- The other results of a row ---------------------------------------------------------------------------------- */

DEVICE float given_lse_of(const cuda_args &a, const head_args &x, int64_t i)
{
    const attn_view &view = a.g.view[ATTN_T_lse];
    return a.g.observe.given_lse ? ((const float *)view.data)[attn_at(&view, x.b, x.h, x.s.q_start + i)] : 0;
}

/* Returns whether the client's lse determines the sum of a row's exponentials. A large lse does not, because rounding
 * to float32 has removed all bits of the sum. */
DEVICE bool says_lse(float lse)
{
    return fabsf(lse) < ATTN_LSE_MOST || lse == -CUDART_INF_F || lse != lse;
}

/* The results of a row; later kernels compute P from `base` and `inverse` (see observed_rows). */
struct row_end {
    float lse, base, inverse, entropy;
};

DEVICE row_end end_of_row(float m, float l, float e, float sink, bool given, float given_lse)
{
    const float FAR = 64, sink2 = sink_in_base_2(sink);
    row_end end;
    float from, sink_from;
    if (given && says_lse(given_lse)) {
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

/* Writes a row's outputs, and stores the row's numbers for later kernels (observed_rows). One thread calls it. */
DEVICE void store_end(const cuda_args &a, const head_args &x, int64_t i, const row_end &end, float most,
                      const observed_rows &rows)
{
    const attn_geometry &g = a.g;
    const int64_t line = x.s.q_start + i, at = lse_at(a, x, i);
    const attn_view &max_view = g.view[ATTN_T_row_max], &entropy_view = g.view[ATTN_T_entropy],
                    &lse_view = g.view[ATTN_T_lse];
    if (max_view.data) ((float *)max_view.data)[attn_at(&max_view, x.b, x.h, line)] = most;
    if (entropy_view.data) ((float *)entropy_view.data)[attn_at(&entropy_view, x.b, x.h, line)] = end.entropy;
    if (lse_view.data && !g.observe.given_lse) ((float *)lse_view.data)[attn_at(&lse_view, x.b, x.h, line)] = end.lse;
    rows.base[at] = end.base;
    rows.inverse[at] = end.inverse;
    rows.most[at] = most;
    rows.entropy[at] = end.entropy;
}

/* Computes maximum, lse, entropy and largest scores of query i. The whole warp calls it. */
static __device__ __noinline__ void observe_row(const cuda_args &a, const head_args &x, int64_t i,
                                                const observed_rows &rows)
{
    const attn_geometry &g = a.g;
    const int64_t most_keys = g.observe.top, line = x.s.q_start + i;
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
        if (m_new > m) {
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
    row_end end = end_of_row(m, l, e, sink_of(a, x.h), g.observe.given_lse, given_lse_of(a, x, i));
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
    if (lane == 0) store_end(a, x, i, end, most, rows);
}

} // namespace

#endif
