/* rows.cuh: functions with which one warp computes one row of out, of dq, or of dk and dv. They skip hidden pairs of a
 * query and a key. simple.cu consists of these functions; kernels on tensor cores call them for tiles whose result is
 * not finite. A lane holds every 32nd channel: N registers for D up to 32 N.
 *
 * Scores are computed in one of two ways, with the same bits (except the sign of a 0 in out):
 * BY_WARP: the warp computes one pair at a time; each lane has some channels. This takes little code and few registers.
 * BY_LANES: the warp computes 32 pairs at a time, one per lane. This is for rows of huge scores, where nearly all keys
 * have a P of 0 and are skipped together. BY_WARP would take 1.2 us per pair there (one warp per multiprocessor, H100,
 * D 1). */
#ifndef ATTN_CUDA_ROWS_CUH
#define ATTN_CUDA_ROWS_CUH

#include "kernels/cuda/common/args.cuh"
#include "kernels/cuda/common/kernels.h"

/* Values of N, the channels per lane: for head sizes up to TILE_HEAD_DIM, up to 576 (multi-head latent attention), and
 * up to ATTN_MAX_HEAD_DIM. */
enum { CHANNELS = TILE_HEAD_DIM / 32, LATENT_CHANNELS = 576 / 32, WIDE_CHANNELS = ATTN_MAX_HEAD_DIM / 32 };

template <int N>
DEVICE void load_row(const attn_view &view, int64_t b, int64_t h, int64_t line, int64_t D, float (&channel)[N])
{
    const int64_t at = attn_at(&view, b, h, line);
    for (int c = 0; c < N; c++) {
        const int64_t d = c * 32 + threadIdx.x % 32;
        channel[c] = d < D ? load_float(view.dtype, view.data, at + d) : 0;
    }
}

/* Loads the lane's channels of a row of k or v, which may lie in a page (page_table). */
template <int N>
DEVICE void load_key(const attn_geometry &g, const attn_view &view, int64_t b, int64_t hk, int64_t line, int64_t D,
                     float (&channel)[N])
{
    const int64_t at = attn_key_at(&g, &view, b, hk, line);
    for (int c = 0; c < N; c++) {
        const int64_t d = c * 32 + threadIdx.x % 32;
        channel[c] = d < D ? load_float(view.dtype, view.data, at + d) : 0;
    }
}

template <int N>
DEVICE void store_row(const attn_view &view, int64_t b, int64_t h, int64_t line, int64_t D, const float (&channel)[N],
                      float factor)
{
    const int64_t at = attn_at(&view, b, h, line);
    for (int c = 0; c < N; c++) {
        const int64_t d = c * 32 + threadIdx.x % 32;
        if (d < D) store_float(view.dtype, view.data, at + d, channel[c] * factor);
    }
}

enum row_way { BY_WARP, BY_LANES };

const unsigned ALL_LANES = 0xffffffff;

/* Calls add(n, channels) for each bit n that is 1 in `set`, in the order of n. `channels` are the lane's N channels of
 * a row, which begins at element at(n) of `data`. Loads several rows in advance, to hide latency. */
template <int N, attn_dtype DTYPE, class AT, class ADD>
DEVICE void for_rows_as(const void *data, int64_t D, unsigned set, AT at, ADD add)
{
    enum { TOGETHER = 4 };
    for (int first = 0; first < 32; first += TOGETHER) {
        float channel[TOGETHER][N];
        if (!(set >> first & ((1u << TOGETHER) - 1))) continue;
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
            for (int c = 0; c < N; c++) {
                const int64_t d = c * 32 + threadIdx.x % 32;
                const bool there = d < D && (set >> (first + n) & 1);
                channel[n][c] = there ? load_float(DTYPE, data, at(first + n) + d) : 0;
            }
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
            if (set >> (first + n) & 1) add(first + n, channel[n]);
    }
}

template <int N, class AT, class ADD>
DEVICE void for_rows(const attn_view &view, int64_t D, unsigned set, AT at, ADD add)
{
    if (!set) return;
    switch (view.dtype) {
    case ATTN_F32: return for_rows_as<N, ATTN_F32>(view.data, D, set, at, add);
    case ATTN_F16: return for_rows_as<N, ATTN_F16>(view.data, D, set, at, add);
    case ATTN_BF16: return for_rows_as<N, ATTN_BF16>(view.data, D, set, at, add);
    default: return for_rows_as<N, ATTN_F8E4M3>(view.data, D, set, at, add);
    }
}

template <int N> DEVICE float dot(const float (&x)[N], const float (&y)[N])
{
    float sum = 0;
    for (int c = 0; c < N; c++) sum += x[c] * y[c];
    return warp_sum(sum);
}

/* Returns the dot product of row x, which is the same for all lanes, and the lane's own row y. The result has the same
 * bits as that of dot(), because the order of additions is the same: first channels d, d + 32, ... for each d below 32,
 * and then the 32 sums, as warp_sum() adds them. */
template <typename SUM, attn_dtype DTYPE>
DEVICE SUM dot_of_lane_as(const attn_view &x, int64_t x_at, const void *y, int64_t y_at, int64_t D)
{
    SUM sum[32] = {};
    for (int64_t first = 0; first < D; first += 32) {
        const int64_t d = first + threadIdx.x % 32;
        const float mine = d < D ? load_float(x.dtype, x.data, x_at + d) : 0;
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const float of_x = __shfl_sync(ALL_LANES, mine, n);
            if (first + n < D) sum[n] += (SUM)of_x * (SUM)load_float(DTYPE, y, y_at + first + n);
        }
    }
#pragma unroll
    for (int half = 16; half; half /= 2)
#pragma unroll
        for (int n = 0; n < half; n++) sum[n] += sum[n + half];
    return sum[0];
}

template <typename SUM>
static __device__ __noinline__ SUM dot_of_lane(const attn_view &x, int64_t x_at, const attn_view &y, int64_t y_at,
                                               int64_t D)
{
    switch (y.dtype) {
    case ATTN_F32: return dot_of_lane_as<SUM, ATTN_F32>(x, x_at, y.data, y_at, D);
    case ATTN_F16: return dot_of_lane_as<SUM, ATTN_F16>(x, x_at, y.data, y_at, D);
    case ATTN_BF16: return dot_of_lane_as<SUM, ATTN_BF16>(x, x_at, y.data, y_at, D);
    default: return dot_of_lane_as<SUM, ATTN_F8E4M3>(x, x_at, y.data, y_at, D);
    }
}

/* Returns 0 times the elements of the lane's row y: 0, or NaN if an element is not finite. */
template <attn_dtype DTYPE> DEVICE float zero_of_lane_as(const void *y, int64_t y_at, int64_t D)
{
    float sum[4] = {};
    for (int64_t d = 0; d < D; d += 4)
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (d + n < D) sum[n] += 0 * load_float(DTYPE, y, y_at + d + n);
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

static __device__ __noinline__ float zero_of_lane(const attn_view &y, int64_t y_at, int64_t D)
{
    switch (y.dtype) {
    case ATTN_F32: return zero_of_lane_as<ATTN_F32>(y.data, y_at, D);
    case ATTN_F16: return zero_of_lane_as<ATTN_F16>(y.data, y_at, D);
    case ATTN_BF16: return zero_of_lane_as<ATTN_BF16>(y.data, y_at, D);
    default: return zero_of_lane_as<ATTN_F8E4M3>(y.data, y_at, D);
    }
}

/* Returns, in each lane, the score of the lane's own pair (i, j). One of x and y is q, the other is k; the pair's rows
 * begin at x_at and y_at. */
DEVICE float score_of_lane(const cuda_args &a, const head_args &head, int64_t i, int64_t j, const attn_view &x,
                           int64_t x_at, const attn_view &y, int64_t y_at, float *derivative)
{
    const float qk = dot_of_lane<float>(x, x_at, y, y_at, a.g.dims.D);
    const bool fits = fabsf(qk) <= FLT_MAX;
    float z = score(a, head, i, j, fits ? qk : 0, derivative);
    if (__all_sync(ALL_LANES, fits)) return z;
    const double sum = dot_of_lane<double>(x, x_at, y, y_at, a.g.dims.D);
    if (fits) return z;
    const float2 in_double = score_in_double(a, head, i, j, sum);
    *derivative = in_double.y;
    return in_double.x;
}

/* Computes the running maxima of an online softmax over 32 keys. Each lane has one key with score `z`, or no key if
 * `seen` is false. Returns the maximum of *m and the scores of this lane and all lower lanes. *before becomes the
 * maximum of *m and the scores of the lower lanes only. *m becomes the maximum over all lanes. After a NaN, all later
 * maxima are NaN. */
DEVICE float maximum_of_lanes(float z, bool seen, float *before, float *m)
{
    const int lane = threadIdx.x % 32;
    float most = seen ? z : -CUDART_INF_F;
    for (int step = 1; step < 32; step *= 2) {
        const float earlier = __shfl_up_sync(ALL_LANES, most, step);
        if (lane >= step && !(most > earlier || most != most)) most = earlier;
    }
    if (!(most > *m || most != most)) most = *m;
    const float earlier = __shfl_up_sync(ALL_LANES, most, 1);
    *before = lane ? earlier : *m;
    *m = __shfl_sync(ALL_LANES, most, 31);
    return most;
}

/* Returns the score z of a visible pair from its rows of q and k, computed in double if q.k does not fit in float32.
 * The whole warp calls it. */
template <int N>
DEVICE float score_of_rows(const cuda_args &a, const head_args &x, int64_t i, int64_t j, const float (&q)[N],
                           const float (&k)[N], float *derivative)
{
    const float qk = dot(q, k);
    if (fabsf(qk) <= FLT_MAX) return score(a, x, i, j, qk, derivative);
    double sum = 0;
    for (int c = 0; c < N; c++) sum += (double)q[c] * (double)k[c];
    for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    const float2 z = score_in_double(a, x, i, j, sum);
    *derivative = z.y;
    return z.x;
}

/* Tensor cores compute only rows whose largest score is below this limit in size, and in some kernels rows of huge
 * scores (is_sound_score()). forward_row() computes all other rows. The largest score is rounded to float32 in base 2
 * before it is subtracted from the scores, which are not rounded. If the largest score is 2^24 or more, the largest P
 * is therefore not exactly 1. If it is 2^28 or more, P may overflow float16. */
const float SCORE_MOST = 1 << 27;

/* Returns whether tensor cores computed a row correctly, given its largest score m. BUT_HUGE is true for kernels that
 * convert scores with in_base_2(): they compute rows of huge scores correctly, too. */
template <bool BUT_HUGE> DEVICE bool is_sound_score(float m)
{
    return m == -CUDART_INF_F || fabsf(m) < SCORE_MOST || (BUT_HUGE && fabsf(m) >= HUGE_SCORE);
}

/* Marks a query or a key, so that a later launch computes its row; `what` says which results of the row. The whole warp
 * calls it. */
DEVICE void leave_to_later(const cuda_args &a, uint8_t *mark, int what)
{
    if (threadIdx.x % 32) return;
    *mark = (uint8_t)what;
    *a.rows_found = 1; /* several warps may write at the same time, because all write 1 */
}

/* Says which rows forward_row() writes. UNSOUND_ROWS: only rows that tensor cores cannot compute, because their result
 * is not finite or their largest score is SCORE_MOST or more in size. UNSOUND_ROWS_BUT_HUGE: only rows whose result is
 * not finite, or whose largest score is at least SCORE_MOST but below HUGE_SCORE in size. This is for kernels that
 * compute rows of huge scores correctly (see in_base_2()). */
enum rows_written : uint8_t { EVERY_ROW, UNSOUND_ROWS, UNSOUND_ROWS_BUT_HUGE };

/* Returns whether the out or the lse that tensor cores computed for a row is not finite. */
template <int N>
DEVICE bool is_unsound(const cuda_args &a, const head_args &x, int64_t i, const attn_view &out, float m, float l)
{
    const attn_view &view = a.g.view[ATTN_T_lse];
    const int64_t line = x.s.q_start + i;
    bool finite = true;
    if (out.data) {
        float stored[N];
        load_row(out, x.b, x.h, line, a.g.dims.Dv, stored);
        for (int c = 0; c < N; c++) finite &= stored[c] - stored[c] == 0;
    }
    if (view.data) {
        const float stored = ((const float *)view.data)[attn_at(&view, x.b, x.h, line)];
        finite &= stored - stored == 0 || (stored == -CUDART_INF_F && l == 0);
    }
    return !__all_sync(0xffffffff, finite);
}

/* Computes an online softmax over the visible keys of query i, and writes out and lse. If lse_dense is not NULL, lse is
 * written to lse_dense, not to the tensor lse. */
template <int N = CHANNELS, row_way WAY = BY_WARP>
static __device__ __noinline__ void forward_row(const cuda_args &a, const head_args &x, int64_t i, const attn_view &out,
                                                float *lse_dense, rows_written which)
{
    const attn_geometry &g = a.g;
    if (a.rows_later) {
        leave_to_later(a, a.rows_later + lse_at(a, x, i), 1 + which);
        return;
    }
    const int64_t hk = x.hk, D = g.dims.D, Dv = g.dims.Dv;
    const attn_view &view_q = g.view[ATTN_T_q], &view_k = g.view[ATTN_T_k], &view_v = g.view[ATTN_T_v];
    /* o is the sum of P V times the factor `unit`; if o overflows, the row is recomputed with a unit of 2^-40 */
    float unit = 1;
    float q[N], k[N], v[N], derivative;
    if (WAY == BY_WARP) load_row(view_q, x.b, x.h, x.s.q_start + i, D, q);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
again:
    float o[N] = {};
    /* the sums begin with the sink: m is its score, and l is exp(m - m) = 1 */
    float m = sink_of(a, x.h), l = m == -CUDART_INF_F ? 0 : 1;
    for (int64_t first = keys.lo; first < keys.hi && WAY == BY_LANES; first += 32) {
        const int64_t j = first + threadIdx.x % 32;
        const bool seen = j < keys.hi && visible_by_mask(a, x, i, j);
        const unsigned set = __ballot_sync(ALL_LANES, seen);
        if (!set) continue;
        const int64_t mine = seen ? j : first + __ffs(set) - 1;
        const float z = score_of_lane(a, x, i, mine, view_q, attn_at(&view_q, x.b, x.h, x.s.q_start + i), view_k,
                                      attn_key_at(&g, &view_k, x.b, hk, x.s.k_start + mine), &derivative);
        float before;
        const float m_new = maximum_of_lanes(z, seen, &before, &m);
        const float rescale = before == -CUDART_INF_F ? 0 : expf(before - m_new), p = expf(z - m_new);
        const float kept = p * dropout(a, x, i, mine) * unit;
        /* a key with a P of 0 changes nothing, unless its row of v has a number that is not finite */
        const float zero = zero_of_lane(view_v, attn_key_at(&g, &view_v, x.b, hk, x.s.k_start + mine), Dv);
        const bool counts = seen && !(p == 0 && rescale == 1 && zero == 0);
        for_rows<N>(
            view_v, Dv, __ballot_sync(ALL_LANES, counts),
            [&](int n) { return attn_key_at(&g, &view_v, x.b, hk, x.s.k_start + first + n); },
            [&](int n, const float(&channel)[N]) {
                const float rescale_n = __shfl_sync(ALL_LANES, rescale, n), kept_n = __shfl_sync(ALL_LANES, kept, n);
                l = l * rescale_n + __shfl_sync(ALL_LANES, p, n);
                for (int c = 0; c < N; c++) o[c] = o[c] * rescale_n + kept_n * channel[c];
            });
    }
    for (int64_t j = keys.lo; j < keys.hi && WAY == BY_WARP; j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_key(g, view_k, x.b, hk, x.s.k_start + j, D, k);
        load_key(g, view_v, x.b, hk, x.s.k_start + j, Dv, v);
        const float z = score_of_rows(a, x, i, j, q, k, &derivative);
        const float m_new = z > m || z != z ? z : m;
        const float rescale = m == -CUDART_INF_F ? 0 : expf(m - m_new), p = expf(z - m_new);
        const float kept = p * dropout(a, x, i, j) * unit;
        l = l * rescale + p;
        for (int c = 0; c < N; c++) o[c] = o[c] * rescale + kept * v[c];
        m = m_new;
    }
    const float lse = l == 0 ? -CUDART_INF_F : m + logf(l);
    bool finite = l - l == 0;
    for (int c = 0; c < N; c++) finite &= o[c] - o[c] == 0;
    if (unit == 1 && !__all_sync(0xffffffff, finite)) {
        unit = 1.0f / (1ll << 40);
        goto again;
    }
    if (which != EVERY_ROW) {
        const bool sound = which == UNSOUND_ROWS_BUT_HUGE ? is_sound_score<true>(m) : is_sound_score<false>(m);
        finite &= unit == 1 && sound;
        if (__all_sync(0xffffffff, finite) && !is_unsound<N>(a, x, i, out, m, l)) return;
    }
    if (unit != 1) {
        for (int c = 0; c < N; c++) o[c] = o[c] / l / unit;
        l = 1;
    }
    if (out.data) store_row(out, x.b, x.h, x.s.q_start + i, Dv, o, l == 0 ? 0 : x.v_scale / l);
    if (threadIdx.x % 32 == 0) {
        const attn_view &view = g.view[ATTN_T_lse];
        if (lse_dense) lse_dense[lse_at(a, x, i)] = lse;
        else if (view.data) ((float *)view.data)[attn_at(&view, x.b, x.h, x.s.q_start + i)] = lse;
    }
}

/* ---- The backward of one row ------------------------------------------------------------------------------------- */

/* The value of saved.rest for a row that sees exactly one key. Kernels subtract saved.rest from exponents of P, and
 * this value is too small to change them. */
const float ONE_KEY = FLT_MIN;

/* Results of the forward that a backward needs, from the client or recomputed in the workspace. */
struct saved {
    float *lse, *delta;
    /* For a row with |lse| < ATTN_LSE_MOST: ONE_KEY if the row sees exactly one key, otherwise 0. For any other row,
     * `lse` is the row's largest score, and `rest` is the logarithm of the sum of exp(score - lse). */
    float *rest;
    /* for each row, the sum of dZ (the gradient of the scores after softcap) times the distance from query to key, for
     * dalibi_slopes */
    float *far;
    attn_view out;
};

/* Returns the number of floats that lse, delta, rest and far take in the workspace. */
static inline size_t saved_floats(const attn_plan *plan)
{
    return (size_t)query_rows(plan->geometry.dims) * (plan->problem->dalibi_slopes.rank ? 4 : 3);
}
static inline void lay_out_saved(saved *s, const attn_dims &d, void *memory)
{
    s->lse = (float *)memory;
    s->delta = s->lse + query_rows(d);
    s->rest = s->delta + query_rows(d);
    s->far = s->rest + query_rows(d);
}

/* Returns lse in base 2, as kernels on tensor cores use it. The result is +inf for a row that sees no key, and NaN if P
 * cannot be computed from lse. A tile with such a NaN is computed pair by pair, without tensor cores. */
DEVICE float lse_in_base_2(float lse)
{
    return lse == -CUDART_INF_F ? CUDART_INF_F : fabsf(lse) < ATTN_LSE_MOST ? lse * LOG2E : CUDART_NAN_F;
}

/* True: kernels on tensor cores compute the two parts (lse and rest) of this row's huge lse. False: a single warp
 * computes them. */
DEVICE bool is_parted_by_tiles(const cuda_args &a, float lse)
{
    return a.part_lse && fabsf(lse) >= HUGE_SCORE && lse != -CUDART_INF_F;
}

/* Returns log2 of P for a score y (in base 2) of query i; `lse2` is lse_in_base_2() of the row. */
DEVICE float exponent_of(const cuda_args &a, const saved &s, const head_args &x, int64_t i, float y, float lse2)
{
    if (lse2 == lse2) return y - lse2;
    const int64_t at = lse_at(a, x, i);
    const float m = s.lse[at];
    return is_parted_by_tiles(a, m) ? y - m - s.rest[at] * LOG2E : CUDART_NAN_F;
}

/* Returns the lse of row i as two numbers (x, y). For most rows x is lse, and y is 0. A huge lse (ATTN_LSE_MOST or more
 * in size) has lost its low bits, so the function computes it again from q and k: x is the row's largest score, and y
 * the logarithm of the sum of exp(score - x). If `now` is false, the function may leave such a row to another launch,
 * and then returns x = lse and y = 0. The whole warp calls it. */
template <int N = CHANNELS, row_way WAY = BY_WARP>
static __device__ __noinline__ float2 lse_in_parts(const cuda_args &a, const head_args &x, int64_t i, float lse,
                                                   bool now = false)
{
    if (lse != lse || lse == -CUDART_INF_F || fabsf(lse) < ATTN_LSE_MOST) return make_float2(lse, 0);
    if (!now && is_parted_by_tiles(a, lse)) return make_float2(lse, 0);
    /* leaves the row to a later launch (lse_in_parts_left()), which finds it by its huge lse */
    if (!now && a.rows_later) {
        leave_to_later(a, a.rows_found, 1);
        return make_float2(lse, 0);
    }
    const attn_geometry &g = a.g;
    float q[N], k[N], derivative, m = sink_of(a, x.h), l = m == -CUDART_INF_F ? 0 : 1;
    const attn_view &view_q = g.view[ATTN_T_q], &view_k = g.view[ATTN_T_k];
    if (WAY == BY_WARP) load_row(view_q, x.b, x.h, x.s.q_start + i, g.dims.D, q);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    for (int64_t first = keys.lo; first < keys.hi && WAY == BY_LANES; first += 32) {
        const int64_t j = first + threadIdx.x % 32;
        const bool seen = j < keys.hi && visible_by_mask(a, x, i, j);
        const unsigned set = __ballot_sync(ALL_LANES, seen);
        if (!set) continue;
        const int64_t mine = seen ? j : first + __ffs(set) - 1;
        const float z = score_of_lane(a, x, i, mine, view_q, attn_at(&view_q, x.b, x.h, x.s.q_start + i), view_k,
                                      attn_at(&view_k, x.b, x.hk, x.s.k_start + mine), &derivative);
        float before;
        const float m_new = maximum_of_lanes(z, seen, &before, &m);
        const float rescale = before == -CUDART_INF_F ? 0 : expf(before - m_new), p = expf(z - m_new);
        for (unsigned left = set; left; left &= left - 1) {
            const int n = __ffs(left) - 1;
            const float rescale_n = __shfl_sync(ALL_LANES, rescale, n);
            l = (__shfl_sync(ALL_LANES, before, n) == -CUDART_INF_F ? 0 : l * rescale_n) + __shfl_sync(ALL_LANES, p, n);
        }
    }
    for (int64_t j = keys.lo; j < keys.hi && WAY == BY_WARP; j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_row(view_k, x.b, x.hk, x.s.k_start + j, g.dims.D, k);
        const float z = score_of_rows(a, x, i, j, q, k, &derivative), m_new = z > m || z != z ? z : m;
        l = (m == -CUDART_INF_F ? 0 : l * expf(m - m_new)) + expf(z - m_new);
        m = m_new;
    }
    return make_float2(m, l == 0 ? 0 : logf(l));
}

/* Returns whether query i sees exactly one key. First tests two keys near its own position, because most queries see
 * both. The whole warp calls it. */
DEVICE bool sees_one_key(const cuda_args &a, const head_args &x, int64_t i)
{
    const attn_geometry &g = a.g;
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    const bool masked = g.view[ATTN_T_bias].data || g.view[ATTN_T_keep_mask].data ||
                        g.view[ATTN_T_mask_startend_rows].data;
    int seen = 0;
    if (keys.hi - keys.lo <= 1 || !masked) return keys.hi - keys.lo == 1;
    const int64_t own = attn_clamp64(i + attn_align(&g, &x.s), keys.lo + 1, keys.hi - 1);
    if (visible_by_mask(a, x, i, own) && visible_by_mask(a, x, i, own - 1)) return false;
    for (int64_t j = keys.lo; j < keys.hi && seen < 2; j += 32) {
        const int64_t mine = j + threadIdx.x % 32;
        seen += __popc(__ballot_sync(0xffffffff, mine < keys.hi && visible_by_mask(a, x, i, mine)));
    }
    return seen == 1;
}

/* Returns the largest difference that rounding causes between the lse of a row that sees exactly one key and this key's
 * score. f32_forward.cu adds 15 to exponents in base 2, so it rounds small scores as coarsely as scores of 15. */
DEVICE float one_key_slack(float lse)
{
    return 0x1p-18f + ATTN_LSE_SLACK * fabsf(lse);
}

/* The gradient of a visible pair of a query and a key: the probability P, the factor of dropout, dZ (the gradient of
 * the score after softcap), and dS = dZ times the derivative of softcap. */
struct pair_gradient {
    float p, drop, dz, ds;
};

DEVICE pair_gradient gradient_of_score(const cuda_args &a, const head_args &x, int64_t i, int64_t j, float z,
                                       float derivative, float lse, float rest, float delta, float dout_v)
{
    pair_gradient y;
    y.p = z == -CUDART_INF_F || lse == -CUDART_INF_F ? 0 : expf(z - lse - rest);
    if (rest == ONE_KEY && fabsf(z - lse) <= one_key_slack(lse)) y.p = 1;
    y.drop = dropout(a, x, i, j);
    y.dz = y.p == 0 ? 0 : y.p * (y.drop == 0 ? -delta : y.drop * dout_v - delta);
    y.ds = y.dz * derivative;
    return y;
}

template <int N>
DEVICE pair_gradient gradient(const cuda_args &a, const head_args &x, int64_t i, int64_t j, float lse, float rest,
                              float delta, const float (&q)[N], const float (&k)[N], float dout_v)
{
    float derivative;
    const float z = score_of_rows(a, x, i, j, q, k, &derivative);
    return gradient_of_score(a, x, i, j, z, derivative, lse, rest, delta, dout_v);
}

template <int N = CHANNELS, row_way WAY = BY_WARP>
static __device__ __noinline__ void dq_row(const cuda_args &a, const saved &s, const head_args &x, int64_t i)
{
    const attn_geometry &g = a.g;
    if (a.rows_later) {
        leave_to_later(a, a.rows_later + lse_at(a, x, i), 1);
        return;
    }
    const int64_t D = g.dims.D, Dv = g.dims.Dv, line = x.s.q_start + i;
    const float lse = s.lse[lse_at(a, x, i)], rest = s.rest[lse_at(a, x, i)], delta = s.delta[lse_at(a, x, i)];
    float q[N], dout[N], k[N], v[N], dq[N] = {};
    const attn_view &view_q = g.view[ATTN_T_q], &view_k = g.view[ATTN_T_k], &view_v = g.view[ATTN_T_v],
                    &view_dout = g.view[ATTN_T_dout];
    if (WAY == BY_WARP) load_row(view_q, x.b, x.h, line, D, q);
    if (WAY == BY_WARP) load_row(view_dout, x.b, x.h, line, Dv, dout);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    const int64_t end = lse == -CUDART_INF_F ? keys.lo : keys.hi;
    for (int64_t first = keys.lo; first < end && WAY == BY_LANES; first += 32) {
        const int64_t j = first + threadIdx.x % 32;
        const bool seen = j < end && visible_by_mask(a, x, i, j);
        const unsigned set = __ballot_sync(ALL_LANES, seen);
        if (!set) continue;
        const int64_t mine = seen ? j : first + __ffs(set) - 1, at = x.s.k_start + mine;
        float derivative;
        const float z = score_of_lane(a, x, i, mine, view_q, attn_at(&view_q, x.b, x.h, line), view_k,
                                      attn_at(&view_k, x.b, x.hk, at), &derivative),
                    dout_v = dot_of_lane<float>(view_dout, attn_at(&view_dout, x.b, x.h, line), view_v,
                                                attn_at(&view_v, x.b, x.hk, at), Dv);
        const pair_gradient y = gradient_of_score(a, x, i, mine, z, derivative, lse, rest, delta, dout_v);
        for_rows<N>(
            view_k, D, set & __ballot_sync(ALL_LANES, y.p != 0),
            [&](int n) { return attn_at(&view_k, x.b, x.hk, x.s.k_start + first + n); },
            [&](int n, const float(&channel)[N]) {
                const float ds = __shfl_sync(ALL_LANES, y.ds, n);
                for (int c = 0; c < N; c++) dq[c] += ds * channel[c];
            });
    }
    for (int64_t j = keys.lo; j < end && WAY == BY_WARP; j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_row(view_k, x.b, x.hk, x.s.k_start + j, D, k);
        load_row(view_v, x.b, x.hk, x.s.k_start + j, Dv, v);
        const pair_gradient y = gradient(a, x, i, j, lse, rest, delta, q, k, dot(dout, v));
        if (y.p == 0) continue;
        for (int c = 0; c < N; c++) dq[c] += y.ds * k[c];
    }
    store_row(g.view[ATTN_T_dq], x.b, x.h, line, D, dq, x.scale);
}

/* Computes the rows of dk and dv (those requested) for key j of key/value head hk, as sums over the group's query heads
 * in order. */
template <int N = CHANNELS, row_way WAY = BY_WARP>
static __device__ __noinline__ void dkdv_row(const cuda_args &a, const saved &s, int64_t b, int64_t hk, int64_t j)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const attn_sequence sequence = attn_sequence_of(&g, b);
    const int64_t line = sequence.k_start + j;
    if (a.keys_later) {
        leave_to_later(a, a.keys_later + ((d.packed ? 0 : b * d.Hk) + hk) * d.Sk + line, 1);
        return;
    }
    float k[N], v[N], q[N], dout[N], dk[N] = {}, dv[N] = {};
    float scale = 0;
    const attn_view &view_q = g.view[ATTN_T_q], &view_k = g.view[ATTN_T_k], &view_v = g.view[ATTN_T_v],
                    &view_dout = g.view[ATTN_T_dout];
    if (WAY == BY_WARP) load_row(view_k, b, hk, line, d.D, k);
    if (WAY == BY_WARP) load_row(view_v, b, hk, line, d.Dv, v);
    const attn_range rows = j < sequence.Sk ? attn_rows_of(&g, &sequence, j) : attn_range{ 0, 0 };
    for (int64_t h = hk * g.group; h < (hk + 1) * g.group; h++) {
        const head_args x = head_args_of(a, b, h);
        scale = x.scale;
        for (int64_t first = rows.lo; first < rows.hi && WAY == BY_LANES; first += 32) {
            const int64_t i = first + threadIdx.x % 32;
            const bool seen = i < rows.hi && s.lse[lse_at(a, x, i)] != -CUDART_INF_F && visible_by_mask(a, x, i, j);
            const unsigned set = __ballot_sync(ALL_LANES, seen);
            if (!set) continue;
            const int64_t mine = seen ? i : first + __ffs(set) - 1, at = lse_at(a, x, mine), row = x.s.q_start + mine;
            float derivative;
            const float z = score_of_lane(a, x, mine, j, view_k, attn_at(&view_k, b, hk, line), view_q,
                                          attn_at(&view_q, b, h, row), &derivative),
                        dout_v = dot_of_lane<float>(view_v, attn_at(&view_v, b, hk, line), view_dout,
                                                    attn_at(&view_dout, b, h, row), d.Dv);
            const pair_gradient y = gradient_of_score(a, x, mine, j, z, derivative, s.lse[at], s.rest[at], s.delta[at],
                                                      dout_v);
            const unsigned some = set & __ballot_sync(ALL_LANES, y.p != 0);
            for_rows<N>(
                view_q, d.D, some, [&](int n) { return attn_at(&view_q, b, h, x.s.q_start + first + n); },
                [&](int n, const float(&channel)[N]) {
                    const float ds = __shfl_sync(ALL_LANES, y.ds, n);
                    for (int c = 0; c < N; c++) dk[c] += ds * channel[c];
                });
            const float kept = y.p * y.drop;
            for_rows<N>(
                view_dout, d.Dv, some & __ballot_sync(ALL_LANES, y.drop != 0),
                [&](int n) { return attn_at(&view_dout, b, h, x.s.q_start + first + n); },
                [&](int n, const float(&channel)[N]) {
                    const float kept_n = __shfl_sync(ALL_LANES, kept, n);
                    for (int c = 0; c < N; c++) dv[c] += kept_n * channel[c];
                });
        }
        for (int64_t i = rows.lo; i < rows.hi && WAY == BY_WARP; i++) {
            const float lse = s.lse[lse_at(a, x, i)];
            if (lse == -CUDART_INF_F || !visible_by_mask(a, x, i, j)) continue;
            load_row(view_q, b, h, x.s.q_start + i, d.D, q);
            load_row(view_dout, b, h, x.s.q_start + i, d.Dv, dout);
            const pair_gradient y = gradient(a, x, i, j, lse, s.rest[lse_at(a, x, i)], s.delta[lse_at(a, x, i)], q, k,
                                             dot(dout, v));
            if (y.p == 0) continue;
            for (int c = 0; c < N; c++) {
                dk[c] += y.ds * q[c];
                if (y.drop != 0) dv[c] += y.p * y.drop * dout[c];
            }
        }
    }
    if (g.view[ATTN_T_dk].data) store_row(g.view[ATTN_T_dk], b, hk, line, d.D, dk, scale);
    if (g.view[ATTN_T_dv].data) store_row(g.view[ATTN_T_dv], b, hk, line, d.Dv, dv, 1);
}

#endif
