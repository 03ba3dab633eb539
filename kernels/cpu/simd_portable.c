/* simd_portable.c: the table of vector functions (struct simd) in plain C. Processors without a table of their own use
 * it, and tests compare all other tables with it.
 *
 * The code is simple enough to be checked by reading: one element at a time, libm for exp2 and tanh. gemm() keeps the
 * sums of a row of 32 columns in an array, so that every compiler vectorises the loop. */
#include "kernels/cpu/simd_scalar.h"
#include "kernels/cpu/simd_variants.h"
#include "kernels/philox.h"

#define LOG2E 1.44269504088896340736f

/* ---- Operands of a product A B in float32: columns of B are padded, the dimension k is not ----------------------- */

static bool pack_a(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    bool tame = true;
    for (int r = 0; r < rows; r++) {
        const void *x = simd_row(X, dtype, stride, r);
        float *a = (float *)A + r * lda;
        for (int c = 0; c < cols; c++) {
            a[c] = simd_get_element(x, dtype, c);
            tame &= fabsf(a[c]) < SIMD_TAME; /* becomes false if a[c] is large, infinite or NaN */
        }
    }
    return tame;
}

static bool pack_at(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    bool tame = true;
    for (int r = 0; r < rows; r++) {
        const void *x = simd_row(X, dtype, stride, r);
        for (int c = 0; c < cols; c++) {
            const float a = simd_get_element(x, dtype, c);
            ((float *)A)[c * lda + r] = a;
            tame &= fabsf(a) < SIMD_TAME;
        }
    }
    return tame;
}

static bool pack_b(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    bool tame = true;
    for (int r = 0; r < rows; r++) {
        const void *x = simd_row(X, dtype, stride, r);
        for (int c = 0; c < simd_round_up(cols, SIMD_PANEL); c++) {
            const float b = c < cols ? simd_get_element(x, dtype, c) : 0.0f;
            ((float *)B)[c / SIMD_PANEL * ldb + (int64_t)r * SIMD_PANEL + c % SIMD_PANEL] = b;
            tame &= fabsf(b) < SIMD_TAME;
        }
    }
    return tame;
}

static bool pack_bt(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    bool tame = true;
    for (int r = 0; r < simd_round_up(rows, SIMD_PANEL); r++) {
        const void *x = r < rows ? simd_row(X, dtype, stride, r) : NULL;
        for (int c = 0; c < cols; c++) {
            const float b = x ? simd_get_element(x, dtype, c) : 0.0f;
            ((float *)B)[r / SIMD_PANEL * ldb + (int64_t)c * SIMD_PANEL + r % SIMD_PANEL] = b;
            tame &= fabsf(b) < SIMD_TAME;
        }
    }
    return tame;
}

static void gemm(int m, int n, int k, const void *A, int64_t lda, const void *B, int64_t ldb, float *C, int64_t ldc,
                 bool add, const float *rescale)
{
    for (int j0 = 0; j0 < n; j0 += SIMD_PANEL) {
        const float *panel = (const float *)B + j0 / SIMD_PANEL * ldb;
        const int width = n - j0 < SIMD_PANEL ? n - j0 : SIMD_PANEL;
        for (int i = 0; i < m; i++) {
            const float *a = (const float *)A + i * lda;
            float *c = C + i * ldc + j0;
            float sum[SIMD_PANEL] = { 0 };
            if (add) {
                for (int j = 0; j < width; j++) sum[j] = rescale ? c[j] * rescale[i] : c[j];
            }
            for (int kk = 0; kk < k; kk++) {
                for (int j = 0; j < SIMD_PANEL; j++) sum[j] += a[kk] * panel[(int64_t)kk * SIMD_PANEL + j];
            }
            for (int j = 0; j < width; j++) c[j] = sum[j];
        }
    }
}

/* ---- Scores, softmax and their gradient -------------------------------------------------------------------------- */

/* Returns 2^x, or 0 for x below `least`. */
static float exp2_from(float x, float least)
{
    return x < least ? 0.0f : exp2f(x);
}

static float exp2_one(float x)
{
    return exp2_from(x, SIMD_EXP2_LEAST);
}

static bool softmax(int rows, int cols, const float *S, int64_t lds, float c, float *m, float *l, float *rescale,
                    void *P, int64_t ldp, const float *drop, float least)
{
    bool any = false;
    for (int r = 0; r < rows; r++) {
        const float *s = S + r * lds;
        float *p = (float *)P + r * ldp, max = m[r], sum = 0;
        for (int j = 0; j < cols; j++) max = s[j] * c > max ? s[j] * c : max;
        /* max is -inf while all keys so far are hidden; base is then 0, because -inf - -inf would be NaN */
        const float base = max == -INFINITY ? 0.0f : max;
        rescale[r] = m[r] == max ? 1.0f : exp2_one(m[r] - base);
        any |= rescale[r] != 1.0f;
        for (int j = 0; j < cols; j++) {
            /* s[j] * c - base must not become a fused multiply-add, with which the largest score would not give exactly
             * 1 */
            const float e = exp2_from(s[j] * c - base, least);
            sum += e;
            p[j] = drop ? e * drop[r * lds + j] : e;
        }
        l[r] = l[r] * rescale[r] + sum;
        m[r] = max;
    }
    return any;
}

static void score(int rows, int cols, float *S, int64_t lds, const struct simd_score *how)
{
    for (int r = 0; r < rows; r++) {
        float *s = S + r * lds;
        const void *bias = how->bias ? simd_row(how->bias, how->bias_dtype, how->bias_stride, r) : NULL;
        const uint8_t *keep = how->keep ? how->keep + r * how->keep_stride : NULL;
        for (int j = 0; j < cols; j++) {
            float t = s[j] * how->scale, slope = 1.0f;
            if (how->softcap > 0) {
                const float tanh_t = tanhf(t / how->softcap);
                t = how->softcap * tanh_t;
                slope = 1.0f - tanh_t * tanh_t;
            }
            if (how->cap) how->cap[r * lds + j] = slope;
            const float b = bias ? simd_get_element(bias, how->bias_dtype, j) : 0.0f;
            t += b;
            if (how->slope != 0) t -= how->slope * fabsf((float)(how->distance + r - j));
            bool hidden = b == -INFINITY || (keep && !keep[j]) || (how->lo && (j < how->lo[r] || j >= how->hi[r]));
            for (int x = 0; x < 2; x++) {
                const int32_t row = how->row0 + r;
                if (how->hide_lo[x]) hidden |= how->hide_lo[x][j] <= row && row < how->hide_hi[x][j];
            }
            t *= LOG2E;
            s[j] = hidden ? -INFINITY : t == -INFINITY ? -FLT_MAX : t;
        }
    }
}

static void hide(int rows, int cols, float *S, int64_t lds, const int *lo, const int *hi)
{
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < cols; j++)
            if (j < lo[r] || j >= hi[r]) S[r * lds + j] = -INFINITY;
}

static void gradient(const struct simd_gradient *g)
{
    for (int r = 0; r < g->rows; r++) {
        for (int j = 0; j < simd_round_up(g->cols, SIMD_PANEL); j++) {
            const int64_t at = r * g->ld + j, b_at = (int64_t)r * SIMD_PANEL + j % SIMD_PANEL;
            const bool inside = j < g->cols;
            float P = 0, kept = 0, dZ = 0, dS = 0;
            if (inside) {
                const float drop = g->drop ? g->drop[at] : 1.0f, M = g->drop ? drop * g->drop_scale : 1.0f;
                P = exp2_from(fmaf(g->S[at], g->c, -g->lse2[r]), g->least);
                kept = P * drop;
                if (P != 0) dZ = P * (M * g->dP[at] - g->delta[r]);
                /* Where dZ is 0, dS is 0 too, and `cap` is not used: `cap` (the derivative of softcap) of a hidden
                 * score may be NaN, and 0 times NaN would be NaN. */
                dS = g->cap && dZ != 0 ? dZ * g->cap[at] : dZ;
                if (g->dZ) g->dZ[at] = dZ;
                if (g->dS_a) ((float *)g->dS_a)[r * g->dS_lda + j] = dS;
            }
            if (g->P_b) ((float *)g->P_b)[j / SIMD_PANEL * g->P_ldb + b_at] = kept;
            if (g->dS_b) ((float *)g->dS_b)[j / SIMD_PANEL * g->dS_ldb + b_at] = dS;
        }
    }
}

/* ---- Functions for rows of any dtype ----------------------------------------------------------------------------- */

static void dots(int nq, int n, int d, const float *q, int64_t ldq, const void *K, attn_dtype dtype, int64_t stride,
                 float *S, int64_t lds)
{
    for (int j = 0; j < n; j++) {
        const void *k = simd_row(K, dtype, stride, j);
        for (int r = 0; r < nq; r++) {
            float sum = 0;
            for (int c = 0; c < d; c++) sum += q[r * ldq + c] * simd_get_element(k, dtype, c);
            S[r * lds + j] = sum;
        }
    }
}

static void dots_exact(int n, int d, const float *q, const void *K, attn_dtype dtype, int64_t stride, double *S)
{
    for (int j = 0; j < n; j++) {
        S[j] = 0;
        for (int c = 0; c < d; c++) S[j] += (double)q[c] * simd_get_element(simd_row(K, dtype, stride, j), dtype, c);
    }
}

static bool all_finite(int rows, int cols, const float *S, int64_t lds)
{
    bool all = true;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) all &= isfinite(S[r * lds + c]) != 0;
    return all;
}

static float most(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride)
{
    float all = 0;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) {
            const float x = fabsf(simd_get_element(simd_row(X, dtype, stride, r), dtype, c));
            all = !isfinite(x) ? INFINITY : x > all ? x : all;
        }
    return all;
}

static void axpys(int nq, int n, int d, const float *P, int64_t ldp, const void *V, attn_dtype dtype, int64_t stride,
                  float *O, int64_t ldo)
{
    for (int j = 0; j < n; j++) {
        const void *v = simd_row(V, dtype, stride, j);
        for (int r = 0; r < nq; r++) {
            const float p = P[r * ldp + j];
            if (p == 0) continue;
            for (int c = 0; c < d; c++) O[r * ldo + c] += p * simd_get_element(v, dtype, c);
        }
    }
}

static void row_dots(int rows, int cols, const void *X, attn_dtype x_dtype, int64_t x_stride, const void *Y,
                     attn_dtype y_dtype, int64_t y_stride, float *y)
{
    for (int r = 0; r < rows; r++) {
        const void *a = simd_row(X, x_dtype, x_stride, r), *b = simd_row(Y, y_dtype, y_stride, r);
        float sum = 0;
        for (int c = 0; c < cols; c++) sum += simd_get_element(a, x_dtype, c) * simd_get_element(b, y_dtype, c);
        y[r] = sum;
    }
}

static void load(int64_t n, const void *from, attn_dtype dtype, float *to)
{
    for (int64_t c = 0; c < n; c++) to[c] = simd_get_element(from, dtype, c);
}

static void save(int64_t n, const float *from, void *to, attn_dtype dtype)
{
    for (int64_t c = 0; c < n; c++) simd_put_element(to, dtype, c, from[c]);
}

static void store(int rows, int cols, const float *X, int64_t ldx, float scale, const float *row_scale, void *Y,
                  attn_dtype dtype, int64_t stride)
{
    for (int r = 0; r < rows; r++) {
        const float s = row_scale ? scale * row_scale[r] : scale;
        void *y = simd_row_out(Y, dtype, stride, r);
        for (int c = 0; c < cols; c++)
            simd_put_element(y, dtype, c, row_scale && row_scale[r] == 0 ? 0.0f : X[r * ldx + c] * s);
    }
}

static void store_t(int rows, int cols, const float *X, int64_t ldx, float scale, const float *row_scale, void *Y,
                    attn_dtype dtype, int64_t stride)
{
    for (int r = 0; r < rows; r++) {
        const float s = row_scale ? scale * row_scale[r] : scale;
        void *y = simd_row_out(Y, dtype, stride, r);
        for (int c = 0; c < cols; c++)
            simd_put_element(y, dtype, c, row_scale && row_scale[r] == 0 ? 0.0f : X[c * ldx + r] * s);
    }
}

static bool close_rows(int n, const float *m, const float *l, float *inverse, float *lse)
{
    bool tame = true;
    for (int r = 0; r < n; r++) {
        tame &= fabsf(m[r]) < SIMD_SCORE_MOST && isfinite(l[r]);
        inverse[r] = l[r] == 0 ? 0.0f : 1 / l[r];
        lse[r] = l[r] == 0 ? -INFINITY : (float)(((double)m[r] + log2f(l[r])) * M_LN2);
    }
    return tame;
}

static void drop_bits(uint64_t seed, int64_t head_index, int64_t i, int64_t group, uint32_t threshold,
                      float kept[SIMD_DROPS])
{
    for (int j = 0; j < SIMD_DROPS; j += 8) {
        const attn_philox words = attn_dropout_words(seed, head_index, i, group + j / 8);
        for (int half = 0; half < 8; half++) kept[j + half] = attn_dropout_half(words, half) >= threshold ? 1.0f : 0.0f;
    }
}

static void exp2_all(int64_t n, const float *x, float *y)
{
    for (int64_t i = 0; i < n; i++) y[i] = exp2_one(x[i]);
}

static void observe(int rows, int cols, const float *S, int64_t lds, float c, float *m, float *l, float *e)
{
    for (int r = 0; r < rows; r++) {
        const float *s = S + r * lds;
        float most = m[r], sum = 0, part = 0;
        for (int j = 0; j < cols; j++) most = s[j] * c > most ? s[j] * c : most;
        const float base = most == -INFINITY ? 0.0f : most;
        for (int j = 0; j < cols; j++) {
            const float x = s[j] * c - base, p = exp2_one(x);
            sum += p;
            if (p != 0) part += p * x;
        }
        simd_join_entropy(most, sum, part, &m[r], &l[r], &e[r]);
    }
}

static void weigh(int rows, int cols, float *S, int64_t lds, float c, const float *m, const float *inverse)
{
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < cols; j++) S[r * lds + j] = exp2_one(S[r * lds + j] * c - m[r]) * inverse[r];
}

static void add_rows(int rows, int cols, const float *S, int64_t lds, float *sums)
{
    for (int j = 0; j < cols; j++) sums[j] = 0;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < cols; j++) sums[j] += S[r * lds + j];
}

static void leave(void) {}

const struct simd simd_portable = {
    .name = "portable",
    .f32 = { ATTN_F32, 1, 1, 16, pack_a, pack_at, pack_b, pack_bt, gemm, softmax, gradient },
    .score = score,
    .hide = hide,
    .dots = dots,
    .axpys = axpys,
    .dots_exact = dots_exact,
    .all_finite = all_finite,
    .most = most,
    .row_dots = row_dots,
    .load = load,
    .save = save,
    .store = store,
    .store_t = store_t,
    .close = close_rows,
    .exp2 = exp2_all,
    .drop = drop_bits,
    .observe = observe,
    .weigh = weigh,
    .add_rows = add_rows,
    .leave = leave,
};
