/* rows.cuh: one row by one warp: forward, dq, dk and dv that skip hidden pairs instead of multiplying them by zero.
 *
 * simple.cu is made of it, and the tensor core kernels call it for tiles whose result is not finite (see
 * sm80/forward.cu). A lane holds every 32nd channel: N registers for D up to 32 N. */
#ifndef ATTN_CUDA_ROWS_CUH
#define ATTN_CUDA_ROWS_CUH

#include "kernels/cuda/args.cuh"
#include "kernels/cuda/kernels.h"

enum { CHANNELS = TILE_HEAD_DIM / 32, WIDE_CHANNELS = ATTN_MAX_HEAD_DIM / 32 };

template <int N>
DEVICE void load_row(const attn_view &view, int64_t b, int64_t h, int64_t line, int64_t D, float (&channel)[N])
{
    const int64_t at = attn_at(&view, b, h, line);
    for (int c = 0; c < N; c++) {
        const int64_t d = c * 32 + threadIdx.x % 32;
        channel[c] = d < D ? load_float(view.dtype, view.data, at + d) : 0;
    }
}

/* The same of a key or value. */
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

template <int N> DEVICE float dot(const float (&x)[N], const float (&y)[N])
{
    float sum = 0;
    for (int c = 0; c < N; c++) sum += x[c] * y[c];
    return warp_sum(sum);
}

/* The kernels of tensor cores round the score that a row's exponents are relative to (m c, in base 2), but not the
 * exponents: from 2^24 on P's largest is no longer 1, and from 2^28 on it may leave float16. Rows with scores
 * beyond this are forward_row's, in any unit. */
const float SCORE_MOST = 1 << 27;

/* Online softmax over the visible keys of query i. Writes out and lse; lse_dense: lse goes there, dense, instead.
 * repair: written is only what the tensor cores cannot give: a result that is not finite, one of huge scores, or
 * where theirs (in out) is not finite, for their sums have overflowed. A row's own numbers decide. */
template <int N = CHANNELS>
static __device__ __noinline__ void forward_row(const cuda_args &a, const head_args &x, int64_t i, const attn_view &out,
                                                float *lse_dense, bool repair)
{
    const attn_geometry &g = a.g;
    const int64_t hk = x.hk, D = g.dims.D, Dv = g.dims.Dv;
    float unit = 1; /* of o: sums of values up to 3.4e38 may overflow where their mean does not */
    float q[N], k[N], v[N], derivative;
    load_row(g.view[ATTN_T_q], x.b, x.h, x.s.q_start + i, D, q);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
again:
    float o[N] = {};
    float m = sink_of(a, x.h), l = m == -CUDART_INF_F ? 0 : 1; /* the sink joins the denominator once, first */
    for (int64_t j = keys.lo; j < keys.hi; j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_key(g, g.view[ATTN_T_k], x.b, hk, x.s.k_start + j, D, k);
        const float z = score(a, x, i, j, dot(q, k), &derivative);
        const float m_new = z > m || z != z ? z : m;
        const float rescale = m == -CUDART_INF_F ? 0 : expf(m - m_new), p = expf(z - m_new);
        load_key(g, g.view[ATTN_T_v], x.b, hk, x.s.k_start + j, Dv, v);
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
    if (repair) {
        finite &= unit == 1 && (m == -CUDART_INF_F || fabsf(m) < SCORE_MOST);
        if (out.data) {
            load_row(out, x.b, x.h, x.s.q_start + i, Dv, v);
            for (int c = 0; c < N; c++) finite &= v[c] - v[c] == 0;
        }
        if (__all_sync(0xffffffff, finite)) return;
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

/* ---- Backward ---------------------------------------------------------------------------------------------------- */

/* Backward's forward results, recomputed in the workspace or given. */
struct saved {
    float *lse, *delta;
    float *rest;   /* 0, or of an lse of LSE_MOST and more, which is the largest score: the logarithm of what is left */
    attn_view out; /* by the same strides of meaning as every out */
};

/* lse in base 2 for the tensor cores: +inf for a row that sees nothing, and NaN, which has its tiles computed one by
 * one, where P cannot be found from it. */
DEVICE float lse_in_base_2(float lse)
{
    return lse == -CUDART_INF_F ? CUDART_INF_F : fabsf(lse) < ATTN_LSE_MOST ? lse * LOG2E : CUDART_NAN_F;
}

/* lse and rest of row i, given its lse: beside a large score that has lost the logarithm of the sum, so both are found
 * anew. The whole warp calls it. */
static __device__ __noinline__ float2 lse_in_parts(const cuda_args &a, const head_args &x, int64_t i, float lse)
{
    if (lse != lse || lse == -CUDART_INF_F || fabsf(lse) < ATTN_LSE_MOST) return make_float2(lse, 0);
    const attn_geometry &g = a.g;
    float q[CHANNELS], k[CHANNELS], derivative, m = sink_of(a, x.h), l = m == -CUDART_INF_F ? 0 : 1;
    load_row(g.view[ATTN_T_q], x.b, x.h, x.s.q_start + i, g.dims.D, q);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    for (int64_t j = keys.lo; j < keys.hi; j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_row(g.view[ATTN_T_k], x.b, x.hk, x.s.k_start + j, g.dims.D, k);
        const float z = score(a, x, i, j, dot(q, k), &derivative), m_new = z > m || z != z ? z : m;
        l = (m == -CUDART_INF_F ? 0 : l * expf(m - m_new)) + expf(z - m_new);
        m = m_new;
    }
    return make_float2(m, l == 0 ? 0 : logf(l));
}

/* P and dZ of a visible pair; dS = dZ * derivative. The whole warp calls it. */
struct pair_gradient {
    float p, drop, dz, ds;
};

DEVICE pair_gradient gradient(const cuda_args &a, const head_args &x, int64_t i, int64_t j, float lse, float rest,
                              float delta, float qk, float dout_v)
{
    pair_gradient y;
    float derivative;
    const float z = score(a, x, i, j, qk, &derivative);
    y.p = z == -CUDART_INF_F || lse == -CUDART_INF_F ? 0 : expf(z - lse - rest);
    y.drop = dropout(a, x, i, j);
    y.dz = y.p == 0 ? 0 : y.p * (y.drop == 0 ? -delta : y.drop * dout_v - delta);
    y.ds = y.dz * derivative;
    return y;
}

/* dq of query i, whole. */
static __device__ __noinline__ void dq_row(const cuda_args &a, const saved &s, const head_args &x, int64_t i)
{
    const attn_geometry &g = a.g;
    const int64_t D = g.dims.D, Dv = g.dims.Dv, line = x.s.q_start + i;
    const float lse = s.lse[lse_at(a, x, i)], rest = s.rest[lse_at(a, x, i)], delta = s.delta[lse_at(a, x, i)];
    float q[CHANNELS], dout[CHANNELS], k[CHANNELS], v[CHANNELS], dq[CHANNELS] = {};
    load_row(g.view[ATTN_T_q], x.b, x.h, line, D, q);
    load_row(g.view[ATTN_T_dout], x.b, x.h, line, Dv, dout);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    for (int64_t j = keys.lo; j < keys.hi && lse != -CUDART_INF_F; j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_row(g.view[ATTN_T_k], x.b, x.hk, x.s.k_start + j, D, k);
        load_row(g.view[ATTN_T_v], x.b, x.hk, x.s.k_start + j, Dv, v);
        const pair_gradient y = gradient(a, x, i, j, lse, rest, delta, dot(q, k), dot(dout, v));
        if (y.p == 0) continue;
        for (int c = 0; c < CHANNELS; c++) dq[c] += y.ds * k[c];
    }
    store_row(g.view[ATTN_T_dq], x.b, x.h, line, D, dq, x.scale);
}

/* dk and dv (those that are wanted) of key j of key/value head hk, whole: all heads of the group, head after head. */
static __device__ __noinline__ void dkdv_row(const cuda_args &a, const saved &s, int64_t b, int64_t hk, int64_t j)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const attn_sequence sequence = attn_sequence_of(&g, b);
    const int64_t line = sequence.k_start + j;
    float k[CHANNELS], v[CHANNELS], q[CHANNELS], dout[CHANNELS], dk[CHANNELS] = {}, dv[CHANNELS] = {};
    float scale = 0;
    load_row(g.view[ATTN_T_k], b, hk, line, d.D, k);
    load_row(g.view[ATTN_T_v], b, hk, line, d.Dv, v);
    const attn_range rows = j < sequence.Sk ? attn_rows_of(&g, &sequence, j) : attn_range{ 0, 0 };
    for (int64_t h = hk * g.group; h < (hk + 1) * g.group; h++) {
        const head_args x = head_args_of(a, b, h);
        scale = x.scale;
        for (int64_t i = rows.lo; i < rows.hi; i++) {
            const float lse = s.lse[lse_at(a, x, i)];
            if (lse == -CUDART_INF_F || !visible_by_mask(a, x, i, j)) continue;
            load_row(g.view[ATTN_T_q], b, h, x.s.q_start + i, d.D, q);
            load_row(g.view[ATTN_T_dout], b, h, x.s.q_start + i, d.Dv, dout);
            const pair_gradient y = gradient(a, x, i, j, lse, s.rest[lse_at(a, x, i)], s.delta[lse_at(a, x, i)],
                                             dot(q, k), dot(dout, v));
            if (y.p == 0) continue;
            for (int c = 0; c < CHANNELS; c++) {
                dk[c] += y.ds * q[c];
                if (y.drop != 0) dv[c] += y.p * y.drop * dout[c];
            }
        }
    }
    if (g.view[ATTN_T_dk].data) store_row(g.view[ATTN_T_dk], b, hk, line, d.D, dk, scale);
    if (g.view[ATTN_T_dv].data) store_row(g.view[ATTN_T_dv], b, hk, line, d.Dv, dv, 1);
}

#endif
