/* score_mods.cuh: options that change scores before the softmax: float8's scales, softcap and ALiBi. */
#ifndef ATTN_SM90_SCORE_MODS_CUH
#define ATTN_SM90_SCORE_MODS_CUH

#include "kernels/cuda/sm90/layer/softmax.cuh"
#include "kernels/cuda/sm90/layer/tma.cuh"

/* ---- The scales of float8 tensors -------------------------------------------------------------------------------- */

enum { SCALE_Q, SCALE_K, SCALE_V };

/* Scale factors of q, k and v for each batch row and key/value head. NULL stands for a factor of 1. */
struct input_scales {
    const float *data[3];
    int64_t batch[3], head[3];
};

static inline input_scales input_scales_of(const attn_geometry &g)
{
    static const attn_tensor_id tensors[3] = { ATTN_T_q_scale, ATTN_T_k_scale, ATTN_T_v_scale };
    input_scales x;
    for (int n = 0; n < 3; n++) {
        const attn_view &view = g.view[tensors[n]];
        x.data[n] = (const float *)view.data, x.batch[n] = view.batch, x.head[n] = view.head;
    }
    return x;
}

DEVICE float input_scale(const input_scales &x, int n, int b, int hk)
{
    return x.data[n] ? x.data[n][b * x.batch[n] + hk * x.head[n]] : 1;
}

/* The smallest factor by which the softmax multiplies scores. It is above 0, because 0 times a score of -inf would be
 * NaN. */
const float LEAST_C = 1e-30f;

/* ---- Softcap and ALiBi ------------------------------------------------------------------------------------------- */

/* The largest softcap: tanh(x) = 1 - 2 / (1 + e^2x) gives lse an error of 1.2e-7 times the softcap, but lse must be
 * exact to 2e-5. */
const double MOST_SOFTCAP = 64;
const int EXACT = 1 << 24; /* limit on ALiBi's distances: float32 holds all integers up to this number */

struct score_mods {
    /* 0: no softcap. Otherwise a score s becomes tanh(s scale / softcap), computed as 1 - 2 / (1 + 2^(s cap)). */
    float cap;
    const float *slopes; /* ALiBi's slopes; NULL: no ALiBi */
    int64_t slope_batch, slope_head;
    float per_slope; /* factor of ALiBi's slopes, because the kernel's scores are the true scores times this number */
};

/* Returns whether the functions of this file are exact enough for the problem's softcap and ALiBi. */
static inline bool mods_fit(const attn_problem *p, const attn_geometry &g)
{
    const extent e = extent_of(g.dims);
    if (p->softcap > 0 && (p->softcap > MOST_SOFTCAP || p->softcap < 1e-6 || g.scale / p->softcap > 1e30)) return false;
    return !p->alibi_slopes.rank || (e.rows_q < EXACT && e.rows_k < EXACT);
}

/* Makes the score_mods of a problem. A score in softmax_step() times `unit` is the true score. */
static inline score_mods score_mods_of(const attn_geometry &g, float unit)
{
    const attn_view &slopes = g.view[ATTN_T_alibi_slopes];
    score_mods x;
    x.cap = g.softcap > 0 ? (float)(2 * g.scale / g.softcap) * LOG2E : 0;
    x.slopes = (const float *)slopes.data, x.slope_batch = slopes.batch, x.slope_head = slopes.head;
    x.per_slope = 1 / unit;
    return x;
}

struct head_mods {
    float cap, slope; /* score_mods::cap and ALiBi's slope of this head, for products q.k before they are scaled */
    float factor;     /* scores are multiplied by `factor` before softcap and ALiBi */
};

/* Makes the head_mods of a head. `scale` is the product of the head's q_scale and k_scale, and may be 0, negative or
 * tiny. `scaled` is false if the problem has neither; `scale` is then 1. The product is applied in one of three places:
 *   - With softcap, head_mods::cap is multiplied by `scale`.
 *   - Without softcap, if `scale` is negative or the head has an ALiBi slope, head_mods::factor is `scale`. Dividing
 *     the slope by a tiny scale instead might give infinity.
 *   - Otherwise reference.c, the factor by which the softmax multiplies scores, is multiplied by `scale`. */
DEVICE head_mods head_mods_of(const score_mods &mods, int b, int h, float scale, bool scaled, lazy_reference &reference)
{
    head_mods y;
    y.cap = mods.cap * scale;
    y.factor = 1;
    y.slope = mods.slopes ? mods.slopes[b * mods.slope_batch + h * mods.slope_head] * mods.per_slope : 0;
    if (mods.cap == 0 && scaled) {
        if (scale < 0 || y.slope != 0) y.factor = scale;
        else reference.c = fmaxf(reference.c * scale, LEAST_C), reference.slack = 8 / reference.c;
    }
    return y;
}

/* Computes tanh(x ln 2 / 2) = 1 - 2 / (1 + 2^x) of four numbers with one division, with an error below 3e-7. x is
 * limited to 30, where tanh is 1, so that the product of the four denominators stays finite. A NaN becomes 1, and does
 * not change the other three results. */
DEVICE void tanh_of_four(float (&x)[4])
{
    float d[4];
#pragma unroll
    for (int e = 0; e < 4; e++) d[e] = 1 + exp2_fast(fminf(x[e], 30));
    const float first = d[0] * d[1], last = d[2] * d[3], each = __fdividef(2, first * last);
    const float of_first = each * last, of_last = each * first;
    x[0] = fmaf(-of_first, d[1], 1);
    x[1] = fmaf(-of_first, d[0], 1);
    x[2] = fmaf(-of_last, d[3], 1);
    x[3] = fmaf(-of_last, d[2], 1);
}

/* Computes tanh(s * cap * ln(2) / 2) for s near 0 by a power series in s, with a relative error below 5.5e-7. */
struct near_tanh {
    float most; /* the series is used for |s| up to this limit, where tanh is 0.46 */
    float a[4];
};
static inline near_tanh near_tanh_of(float cap)
{
    const double x = cap;
    near_tanh y;
    y.most = (float)fmin(1.4426950 / fabs(x), 1e18);
    y.a[0] = (float)(0.346573402 * x);
    y.a[1] = (float)(-1.3873107e-02 * x * x * x);
    y.a[2] = (float)(6.59526067e-04 * x * x * x * x * x);
    y.a[3] = (float)(-2.66669262e-05 * x * x * x * x * x * x * x);
    return y;
}
DEVICE float tanh_near_0(const near_tanh &by, float s)
{
    const float y = s * s;
    return s * fmaf(fmaf(fmaf(by.a[3], y, by.a[2]), y, by.a[1]), y, by.a[0]);
}

/* Applies softcap and ALiBi to the scores of rows i0 and i0 + 8 with the keys from j0 on. Of the work tile x, only the
 * members Sq and Sk are read. The caller's between() is called after softcap and before ALiBi. */
template <int N, class WORK, class F>
DEVICE void modify_scores(float (&S)[N / 2], const score_mods &mods, const head_mods &head, const WORK &x, int i0,
                          int j0, int lane, F between)
{
    if (head.factor != 1)
#pragma unroll
        for (int i = 0; i < N / 2; i++) S[i] *= head.factor;
    if (mods.cap != 0)
#pragma unroll
        for (int i = 0; i < N / 2; i++) S[i] = 1 - __fdividef(2, 1 + exp2_fast(S[i] * head.cap));
    between();
    if (head.slope != 0)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float behind = (float)(i0 + half * 8 + x.Sk - x.Sq - (j0 + lane % 4 * 2));
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &s = S[n * 4 + half * 2 + e];
                    s = fmaf(-head.slope, fabsf(behind - (float)(n * 8 + e)), s);
                }
        }
}

#endif
