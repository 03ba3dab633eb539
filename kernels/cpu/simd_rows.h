/* simd_rows.h: functions on rows of f32 numbers (scores, decode, conversions, f32 operands), written with the vector
 * functions of a simd_v*.h. simd_avx2.c, simd_avx512.c and simd_neon.c each include it once and put the functions into
 * their tables.
 *
 * A function over elements of any dtype is written once, as an inline function with the dtype as a constant. FOR_DTYPE
 * makes one copy for each dtype, so the loops have no branch on the dtype. */

#include "kernels/philox.h"

#define LOG2E 1.44269504088896340736f

#define FOR_DTYPE(dtype, call)            \
    switch (dtype) {                      \
    case ATTN_F16: {                      \
        const attn_dtype T = ATTN_F16;    \
        call;                             \
    } break;                              \
    case ATTN_BF16: {                     \
        const attn_dtype T = ATTN_BF16;   \
        call;                             \
    } break;                              \
    case ATTN_F8E4M3: {                   \
        const attn_dtype T = ATTN_F8E4M3; \
        call;                             \
    } break;                              \
    default: {                            \
        const attn_dtype T = ATTN_F32;    \
        call;                             \
    } break;                              \
    }

VEC vf v_exp2(vf x)
{
    return v_exp2_from(x, v_set(SIMD_EXP2_LEAST));
}

VEC int min_int(int a, int b)
{
    return a < b ? a : b;
}

/* ---- Packing rows of tensors as f32 operands --------------------------------------------------------------------- */

/* Adds the vector x to a sum. A lane of the sum becomes infinite or NaN if x has infinity, NaN or an absolute value of
 * SIMD_TAME or more in that lane. Thousands of smaller numbers close to SIMD_TAME may have the same effect. */
VEC vf v_tame(vf sum, vf x)
{
    /* adds 2^70 x: if x is SIMD_TAME or more, 2^70 x is infinite, and the sum becomes infinite or NaN */
    return v_fma(x, v_set(0x1p70f), sum);
}

VEC bool is_tame(vf sum)
{
    return !v_any_nan(v_mul(sum, v_zero()));
}

VEC bool pack_a_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, float *A, int64_t lda)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    vf tame = v_zero();
    for (int r = 0; r < rows; r++) {
        const void *x = simd_row(X, dtype, stride, r);
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        float *a = A + r * lda;
        for (int c = 0; c < cols; c += V_LANES) {
            const int n = min_int(cols - c, V_LANES);
            const vf v = n == V_LANES ? v_get(x, dtype, c) : v_get_n(x, dtype, c, n);
            tame = v_tame(tame, v);
            v_store_n(a + c, v, n);
        }
    }
    return is_tame(tame);
}

static bool pack_a(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    bool tame = true;
    FOR_DTYPE(dtype, tame = pack_a_as(T, rows, cols, X, stride, A, lda))
    return tame;
}

VEC bool pack_b_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, float *B, int64_t ldb)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    vf tame = v_zero();
    for (int r = 0; r < rows; r++) {
        const void *x = simd_row(X, dtype, stride, r);
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < (int)simd_round_up(cols, SIMD_PANEL); c += V_LANES) {
            const int n = cols - c;
            const vf v = n >= V_LANES ? v_get(x, dtype, c) : n > 0 ? v_get_n(x, dtype, c, n) : v_zero();
            tame = v_tame(tame, v);
            v_store(B + c / SIMD_PANEL * ldb + (int64_t)r * SIMD_PANEL + c % SIMD_PANEL, v);
        }
    }
    return is_tame(tame);
}

static bool pack_b(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    bool tame = true;
    FOR_DTYPE(dtype, tame = pack_b_as(T, rows, cols, X, stride, B, ldb))
    return tame;
}

/* Loads a square of V_LANES rows and columns of X, from row r and column c on, and transposes it: t[i] is column c + i.
 * Elements outside X are 0. */
VEC vf get_square(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, int r, int c, vf t[V_LANES])
{
    vf tame = v_zero();
    const int nc = min_int(cols - c, V_LANES);
#pragma GCC unroll 16
    for (int i = 0; i < V_LANES; i++) {
        t[i] = v_zero();
        if (r + i < rows)
            t[i] = nc == V_LANES ? v_get(simd_row(X, dtype, stride, r + i), dtype, c)
                                 : v_get_n(simd_row(X, dtype, stride, r + i), dtype, c, nc);
        tame = v_tame(tame, t[i]);
    }
    v_transpose(t);
    return tame;
}

VEC bool pack_at_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, float *A, int64_t lda)
{
    vf tame = v_zero(), t[V_LANES];
    for (int r = 0; r < rows; r += V_LANES) {
        for (int c = 0; c < cols; c += V_LANES) {
            tame = v_add(tame, get_square(dtype, rows, cols, X, stride, r, c, t));
            for (int i = 0; i < min_int(cols - c, V_LANES); i++)
                v_store_n(A + (c + i) * lda + r, t[i], min_int(rows - r, V_LANES));
        }
    }
    return is_tame(tame);
}

static bool pack_at(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    bool tame = true;
    FOR_DTYPE(dtype, tame = pack_at_as(T, rows, cols, X, stride, A, lda))
    return tame;
}

VEC bool pack_bt_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, float *B, int64_t ldb)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    vf tame = v_zero(), t[V_LANES];
    for (int r = 0; r < (int)simd_round_up(rows, SIMD_PANEL); r += V_LANES) {
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < cols; c += V_LANES) {
            tame = v_add(tame, get_square(dtype, rows, cols, X, stride, r, c, t));
            float *b = B + r / SIMD_PANEL * ldb + (int64_t)c * SIMD_PANEL + r % SIMD_PANEL;
            if (cols - c >= V_LANES) {
#pragma GCC unroll 16
                for (int i = 0; i < V_LANES; i++) v_store(b + i * SIMD_PANEL, t[i]);
            } else {
                for (int i = 0; i < cols - c; i++) v_store(b + i * SIMD_PANEL, t[i]);
            }
        }
    }
    return is_tame(tame);
}

static bool pack_bt(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    bool tame = true;
    FOR_DTYPE(dtype, tame = pack_bt_as(T, rows, cols, X, stride, B, ldb))
    return tame;
}

/* ---- Options and masks of scores --------------------------------------------------------------------------------- */

/* Returns tanh x with a relative error below 5e-7. For |x| below 0.625 the function uses an odd polynomial, because the
 * formula for all other x, 1 - 2 / (e^2x + 1), would lose digits near 0. */
VEC vf v_tanh(vf x)
{
    const vf a = v_abs(x), u = v_mul(x, x);
    vf p = v_fma(u, v_set(-0.005704987f), v_set(0.020639088f));
    p = v_fma(u, p, v_set(-0.053739715f));
    p = v_fma(u, p, v_set(0.13331442f));
    p = v_fma(u, p, v_set(-0.3333328f));
    const vf near = v_fma(v_mul(x, u), p, x);
    const vf e = v_exp2(v_min(v_set(100.0f), v_mul(a, v_set(2 * LOG2E))));
    const vf far = v_copysign(v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(e, v_set(1.0f)))), x);
    return v_select(v_less(a, v_set(0.625f)), near, far);
}

VEC void score_as(attn_dtype dtype, int rows, int cols, float *S, int64_t lds, const struct simd_score *how)
{
    const float inverse_cap = how->softcap > 0 ? 1.0f / how->softcap : 0.0f;
    for (int r = 0; r < rows; r++) {
        float *s = S + r * lds;
        const void *bias = how->bias ? simd_row(how->bias, dtype, how->bias_stride, r) : NULL;
        const uint8_t *keep = how->keep ? how->keep + r * how->keep_stride : NULL;
        for (int j = 0; j < cols; j += V_LANES) {
            const int n = min_int(cols - j, V_LANES);
            vf t = v_mul(v_load_n(s + j, n), v_set(how->scale));
            if (how->softcap > 0) {
                const vf tanh_t = v_tanh(v_mul(t, v_set(inverse_cap)));
                t = v_mul(v_set(how->softcap), tanh_t);
                if (how->cap) v_store_n(how->cap + r * lds + j, v_fnma(tanh_t, tanh_t, v_set(1.0f)), n);
            } else if (how->cap) {
                v_store_n(how->cap + r * lds + j, v_set(1.0f), n);
            }
            vm hidden = v_none();
            if (bias) {
                const vf b = v_get_n(bias, dtype, j, n);
                /* a bias of -inf hides the key, even if the score is NaN */
                hidden = v_less(b, v_set(-0x1.fffffep127f));
                t = v_add(t, b);
            }
            if (how->slope != 0) {
                const vf distance = v_abs(v_sub(v_set((float)(how->distance + r - j)), v_iota()));
                t = v_fnma(v_set(how->slope), distance, t);
            }
            /* max() raises scores to at least -FLT_MAX, and keeps NaN; hidden scores become -inf further below */
            t = v_max(v_set(-FLT_MAX), v_mul(t, v_set(LOG2E)));
            if (keep) hidden = v_or(hidden, v_zero_bytes_n(keep + j, n));
            if (how->lo) {
                const vi column = v_add_i(v_iota_i(), v_set_i(j));
                hidden = v_or(hidden, v_less_i(column, v_set_i(how->lo[r])));
                hidden = v_or(hidden, v_less_i(v_set_i(how->hi[r]), v_add_i(column, v_set_i(1))));
            }
            for (int x = 0; x < 2; x++) {
                if (!how->hide_lo[x]) continue;
                const vi row = v_set_i(how->row0 + r);
                const vm from = v_less_i(v_load_i_n(how->hide_lo[x] + j, n), v_add_i(row, v_set_i(1)));
                hidden = v_or(hidden, v_and(from, v_less_i(row, v_load_i_n(how->hide_hi[x] + j, n))));
            }
            v_store_n(s + j, v_select(hidden, v_set(-INFINITY), t), n);
        }
    }
}

static void score(int rows, int cols, float *S, int64_t lds, const struct simd_score *how)
{
    FOR_DTYPE(how->bias_dtype, score_as(T, rows, cols, S, lds, how))
}

static void hide(int rows, int cols, float *S, int64_t lds, const int *lo, const int *hi)
{
    const vf hidden = v_set(-INFINITY);
    for (int r = 0; r < rows; r++) {
        float *s = S + r * lds;
        for (int j = 0; j < lo[r]; j += V_LANES) v_store_n(s + j, hidden, min_int(lo[r] - j, V_LANES));
        for (int j = hi[r]; j < cols; j += V_LANES) v_store_n(s + j, hidden, min_int(cols - j, V_LANES));
    }
}

/* ---- Functions for decoding (few queries) ------------------------------------------------------------------------ */

/* Computes the dot products of nq <= V_DOT_QUERIES queries with four keys at a time. Registers hold the sums (up to
 * sixteen), and each key is converted once. The lanes and the order of a sum depend on d alone. Where fewer than four
 * keys are left, the last key is used again in place of the missing keys, and these extra sums are dropped. */
VEC void dots_as(attn_dtype dtype, int nq, int n, int d, const float *q, int64_t ldq, const void *K, int64_t stride,
                 float *S, int64_t lds)
{
    for (int j = 0; j < n; j += 4) {
        const int keys = min_int(n - j, 4);
        const void *k[4];
        vf sum[V_DOT_QUERIES][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) k[i] = simd_row(K, dtype, stride, j + min_int(i, keys - 1));
#pragma GCC unroll 4
        for (int r = 0; r < nq; r++) sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = v_zero();
        int c = 0;
        for (; c + V_LANES <= d; c += V_LANES) {
            const vf k0 = v_get(k[0], dtype, c), k1 = v_get(k[1], dtype, c), k2 = v_get(k[2], dtype, c),
                     k3 = v_get(k[3], dtype, c);
#pragma GCC unroll 4
            for (int r = 0; r < nq; r++) {
                const vf x = v_load(q + r * ldq + c);
                sum[r][0] = v_fma(x, k0, sum[r][0]), sum[r][1] = v_fma(x, k1, sum[r][1]);
                sum[r][2] = v_fma(x, k2, sum[r][2]), sum[r][3] = v_fma(x, k3, sum[r][3]);
            }
        }
        if (c < d) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const vf y = v_get_n(k[i], dtype, c, d - c);
#pragma GCC unroll 4
                for (int r = 0; r < nq; r++) sum[r][i] = v_fma(v_load_n(q + r * ldq + c, d - c), y, sum[r][i]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < nq; r++) {
            float s[4];
            v4_store(s, v_hsum4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
            for (int i = 0; i < keys; i++) S[r * lds + j + i] = s[i];
        }
    }
}

static void dots(int nq, int n, int d, const float *q, int64_t ldq, const void *K, attn_dtype dtype, int64_t stride,
                 float *S, int64_t lds)
{
    for (int r = 0; r < nq;) {
        const float *x = q + r * ldq;
        float *s = S + r * lds;
        if (nq - r >= V_DOT_QUERIES) {
            FOR_DTYPE(dtype, dots_as(T, V_DOT_QUERIES, n, d, x, ldq, K, stride, s, lds))
            r += V_DOT_QUERIES;
        } else {
            FOR_DTYPE(dtype, dots_as(T, 1, n, d, x, ldq, K, stride, s, lds))
            r++;
        }
    }
}

VEC void dots_exact_as(attn_dtype dtype, int n, int d, const float *q, const void *K, int64_t stride, double *S)
{
    for (int j = 0; j < n; j++) {
        const void *k = simd_row(K, dtype, stride, j);
        vd low = v_zero_d(), high = v_zero_d();
        int c = 0;
        for (; c + V_LANES <= d; c += V_LANES) {
            const vf x = v_load(q + c), y = v_get(k, dtype, c);
            low = v_fma_d(v_low_d(x), v_low_d(y), low);
            high = v_fma_d(v_high_d(x), v_high_d(y), high);
        }
        if (c < d) {
            const vf x = v_load_n(q + c, d - c), y = v_get_n(k, dtype, c, d - c);
            low = v_fma_d(v_low_d(x), v_low_d(y), low);
            high = v_fma_d(v_high_d(x), v_high_d(y), high);
        }
        S[j] = v_hsum_d(low, high);
    }
}

static void dots_exact(int n, int d, const float *q, const void *K, attn_dtype dtype, int64_t stride, double *S)
{
    FOR_DTYPE(dtype, dots_exact_as(T, n, d, q, K, stride, S))
}

static bool all_finite(int rows, int cols, const float *S, int64_t lds)
{
    vf sum = v_zero();
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < cols; j += V_LANES)
            sum = v_fma(v_load_n(S + r * lds + j, min_int(cols - j, V_LANES)), v_zero(), sum);
    return !v_any_nan(sum);
}

VEC float most_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride)
{
    vf most = v_zero(), nan = v_zero();
    float lanes[V_LANES], all = 0;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c += V_LANES) {
            const vf x = v_get_n(simd_row(X, dtype, stride, r), dtype, c, min_int(cols - c, V_LANES));
            most = v_max(v_abs(x), most);
            nan = v_fma(x, v_zero(), nan);
        }
    v_store(lanes, most);
    for (int n = 0; n < V_LANES; n++) all = lanes[n] > all ? lanes[n] : all;
    return v_any_nan(nan) ? INFINITY : all;
}

static float most(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride)
{
    float result = 0;
    FOR_DTYPE(dtype, result = most_as(T, rows, cols, X, stride))
    return result;
}

/* Adds P V to O, eight rows of V at a time. In each step along d, registers hold one vector of each of the eight rows.
 * A vector of V is thus read and converted once for all queries, and a vector of O is read and written once for eight
 * rows of V. */
VEC void axpys_as(attn_dtype dtype, int nq, int n, int d, const float *P, int64_t ldp, const void *V, int64_t stride,
                  float *O, int64_t ldo)
{
    for (int j = 0; j < n; j += 8) {
        const int keys = min_int(n - j, 8);
        bool all = keys == 8;
        for (int r = 0; r < nq; r++) {
            for (int i = 0; i < keys; i++) all &= P[r * ldp + j + i] != 0;
        }
        int c = 0;
        for (; all && c + V_LANES <= d; c += V_LANES) {
            vf v[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) v[i] = v_get(simd_row(V, dtype, stride, j + i), dtype, c);
            for (int r = 0; r < nq; r++) {
                const float *p = P + r * ldp + j;
                vf sum = v_load(O + r * ldo + c);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) sum = v_fma(v_set(p[i]), v[i], sum);
                v_store(O + r * ldo + c, sum);
            }
        }
        for (; c < d; c += V_LANES) {
            const int w = min_int(d - c, V_LANES);
            for (int r = 0; r < nq; r++) {
                const float *p = P + r * ldp + j;
                vf sum = v_load_n(O + r * ldo + c, w);
                for (int i = 0; i < keys; i++) {
                    if (p[i] != 0)
                        sum = v_fma(v_set(p[i]), v_get_n(simd_row(V, dtype, stride, j + i), dtype, c, w), sum);
                }
                v_store_n(O + r * ldo + c, sum, w);
            }
        }
    }
}

static void axpys(int nq, int n, int d, const float *P, int64_t ldp, const void *V, attn_dtype dtype, int64_t stride,
                  float *O, int64_t ldo){ FOR_DTYPE(dtype, axpys_as(T, nq, n, d, P, ldp, V, stride, O, ldo)) }

/* ---- Functions for rows of any dtype ----------------------------------------------------------------------------- */

VEC void row_dots_as(attn_dtype x_dtype, attn_dtype y_dtype, int rows, int cols, const void *X, int64_t x_stride,
                     const void *Y, int64_t y_stride, float *y)
{
    for (int r = 0; r < rows; r++) {
        const void *a = simd_row(X, x_dtype, x_stride, r), *b = simd_row(Y, y_dtype, y_stride, r);
        vf sum = v_zero();
        for (int c = 0; c < cols; c += V_LANES) {
            const int n = min_int(cols - c, V_LANES);
            sum = v_fma(v_get_n(a, x_dtype, c, n), v_get_n(b, y_dtype, c, n), sum);
        }
        y[r] = v_hsum(sum);
    }
}

static void row_dots(int rows, int cols, const void *X, attn_dtype x_dtype, int64_t x_stride, const void *Y,
                     attn_dtype y_dtype, int64_t y_stride, float *y)
{
    if (x_dtype == y_dtype) FOR_DTYPE(x_dtype, row_dots_as(T, T, rows, cols, X, x_stride, Y, y_stride, y))
    else row_dots_as(x_dtype, y_dtype, rows, cols, X, x_stride, Y, y_stride, y);
}

VEC void load_as(attn_dtype dtype, int64_t n, const void *from, float *to)
{
    int64_t c = 0;
    for (; c + V_LANES <= n; c += V_LANES) v_store(to + c, v_get(from, dtype, c));
    if (c < n) v_store_n(to + c, v_get_n(from, dtype, c, (int)(n - c)), (int)(n - c));
}

static void load(int64_t n, const void *from, attn_dtype dtype, float *to){ FOR_DTYPE(dtype, load_as(T, n, from, to)) }

VEC void save_as(attn_dtype dtype, int64_t n, const float *from, void *to)
{
    int64_t c = 0;
    for (; c + V_LANES <= n; c += V_LANES) v_put(to, dtype, c, v_load(from + c));
    if (c < n) v_put_n(to, dtype, c, v_load_n(from + c, (int)(n - c)), (int)(n - c));
}

static void save(int64_t n, const float *from, void *to, attn_dtype dtype){ FOR_DTYPE(dtype, save_as(T, n, from, to)) }

VEC void store_as(attn_dtype dtype, int rows, int cols, const float *X, int64_t ldx, float scale,
                  const float *row_scale, void *Y, int64_t stride)
{
    for (int r = 0; r < rows; r++) {
        const bool zero = row_scale && row_scale[r] == 0;
        const vf s = v_set(row_scale ? scale * row_scale[r] : scale);
        void *y = simd_row_out(Y, dtype, stride, r);
        int c = 0;
        for (; c + V_LANES <= cols; c += V_LANES)
            v_put(y, dtype, c, zero ? v_zero() : v_mul(v_load(X + r * ldx + c), s));
        if (c < cols) v_put_n(y, dtype, c, zero ? v_zero() : v_mul(v_load_n(X + r * ldx + c, cols - c), s), cols - c);
    }
}

static void store(int rows, int cols, const float *X, int64_t ldx, float scale, const float *row_scale, void *Y,
                  attn_dtype dtype,
                  int64_t stride){ FOR_DTYPE(dtype, store_as(T, rows, cols, X, ldx, scale, row_scale, Y, stride)) }

VEC void store_t_as(attn_dtype dtype, int rows, int cols, const float *X, int64_t ldx, float scale,
                    const float *row_scale, void *Y, int64_t stride)
{
    vf t[V_LANES];
    for (int r = 0; r < rows; r += V_LANES) {
        for (int c = 0; c < cols; c += V_LANES) {
            const int n = min_int(cols - c, V_LANES);
            get_square(ATTN_F32, cols, rows, X, ldx, c, r, t);
            for (int i = 0; i < min_int(rows - r, V_LANES); i++) {
                const bool zero = row_scale && row_scale[r + i] == 0;
                const vf s = v_set(row_scale ? scale * row_scale[r + i] : scale);
                v_put_n(simd_row_out(Y, dtype, stride, r + i), dtype, c, zero ? v_zero() : v_mul(t[i], s), n);
            }
        }
    }
}

static void store_t(int rows, int cols, const float *X, int64_t ldx, float scale, const float *row_scale, void *Y,
                    attn_dtype dtype,
                    int64_t stride){ FOR_DTYPE(dtype, store_t_as(T, rows, cols, X, ldx, scale, row_scale, Y, stride)) }

/* Returns log2 x for positive normal numbers and infinity; NaN gives NaN. x is split into 2^e y, where y is between 1
 * / sqrt 2 and sqrt 2. With s = (y - 1) / (y + 1), so |s| < 0.172: log2 y = 2 / ln 2 (s + s^3 / 3 + s^5 / 5 + ...).
 * The code sums up to s^9. */
VEC vf v_log2(vf x)
{
    const vi half_root = v_bits(v_set(0.70710677f)), e = v_high_bits(v_sub_i(v_bits(x), half_root), 23);
    const vf y = v_of_bits(v_sub_i(v_bits(x), e)), one = v_set(1.0f);
    const vf s = v_div(v_sub(y, one), v_add(y, one)), u = v_mul(s, s);
    vf p = v_fma(u, v_set(0.3205989f), v_set(0.4121986f));
    p = v_fma(u, p, v_set(0.57707802f));
    p = v_fma(u, p, v_set(0.96179669f));
    p = v_fma(u, p, v_set(2.88539008f));
    const vf result = v_fma(s, p, v_mul(v_from_i(e), v_set(0x1p-23f)));
    return v_select(v_less(x, v_set(INFINITY)), result, x);
}

/* Computes 1 / l, and lse from m and l, for n <= V_LANES rows of a softmax. close() of struct simd calls it. The
 * returned vector has NaN in the lane of each row whose m or l is too large or not finite. */
VEC vf close_some(const float *m, const float *l, float *inverse, float *lse, int n)
{
    const vf sum = v_load_n(l, n);
    const vm none = v_and(v_less(sum, v_set(0x1p-126f)), v_less(v_set(-1.0f), sum));
    /* ln 2 is written as the sum of two constants, because every bit of the product of ln 2 and a large m counts */
    const vf max = v_load_n(m, n), small = v_fma(max, v_set(-0x1.05c61p-29f), v_mul(v_log2(sum), v_set(0x1.62e43p-1f)));
    const vf ends = v_fma(max, v_set(0x1.62e43p-1f), small);
    v_store_n(inverse, v_select(none, v_zero(), v_div(v_set(1.0f), sum)), n);
    v_store_n(lse, v_select(none, v_set(-INFINITY), ends), n);
    /* The result is NaN in each lane whose maximum or sum is too large: 4 times a maximum of SIMD_SCORE_MOST or more
     * is infinite, and 0 times infinity is NaN. */
    return v_mul(v_fma(max, v_set(4), sum), v_zero());
}

static bool close_rows(int n, const float *m, const float *l, float *inverse, float *lse)
{
    vf strange = v_zero();
    for (int r = 0; r < n; r += V_LANES)
        strange = v_add(strange, close_some(m + r, l + r, inverse + r, lse + r, min_int(n - r, V_LANES)));
    return !v_any_nan(strange);
}

static void exp2_all(int64_t n, const float *x, float *y)
{
    int64_t i = 0;
    for (; i + V_LANES <= n; i += V_LANES) v_store(y + i, v_exp2(v_load(x + i)));
    if (i < n) v_store_n(y + i, v_exp2(v_load_n(x + i, (int)(n - i))), (int)(n - i));
}

/* ---- Random bits of dropout -------------------------------------------------------------------------------------- */

/* Draws dropout's random bits with the generator Philox4x32-10, as attn_dropout_words() does. Each lane draws the four
 * words of one group of 8 keys. */
static void drop_bits(uint64_t seed, int64_t head_index, int64_t i, int64_t group, uint32_t threshold,
                      float kept[SIMD_DROPS])
{
    uint16_t halves[SIMD_DROPS];
    for (int g = 0; g < SIMD_DROPS / 8; g += V_LANES) {
        vi w0 = v_add_i(v_set_i((int32_t)(uint32_t)(group + g)), v_iota_i()), w1 = v_set_i((int32_t)(uint32_t)i);
        vi w2 = v_set_i((int32_t)(uint32_t)head_index), w3 = v_set_i(0);
        uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32), words[4 * V_LANES];
        for (int round = 0; round < 10; round++) {
            vi high0, high2;
            const vi low0 = v_mul_wide(w0, ATTN_PHILOX_FACTOR0, &high0),
                     low2 = v_mul_wide(w2, ATTN_PHILOX_FACTOR2, &high2);
            w0 = v_xor_i(v_xor_i(high2, w1), v_set_i((int32_t)key0));
            w1 = low2;
            w2 = v_xor_i(v_xor_i(high0, w3), v_set_i((int32_t)key1));
            w3 = low0;
            key0 += ATTN_PHILOX_STEP0;
            key1 += ATTN_PHILOX_STEP1;
        }
        v_store4_i(words, w0, w1, w2, w3);
        memcpy(halves + 8 * g, words, sizeof words);
    }
    const vi last_dropped = v_set_i((int32_t)threshold - 1);
    for (int j = 0; j < SIMD_DROPS; j += V_LANES)
        v_store(kept + j, v_select(v_less_i(last_dropped, v_load_u16(halves + j)), v_set(1.0f), v_zero()));
}

/* ---- Functions for an observe (statistics of probabilities) ------------------------------------------------------ */

VEC vf scaled_or_hidden(const float *s, int n, vf c)
{
    return n == V_LANES ? v_mul(v_load(s), c) : v_select(v_first(n), v_mul(v_load_n(s, n), c), v_set(-INFINITY));
}

static void observe(int rows, int cols, const float *S, int64_t lds, float c, float *m, float *l, float *e)
{
    for (int r = 0; r < rows; r++) {
        const float *s = S + r * lds;
        float lanes[V_LANES], most = m[r];
        vf top = v_set(-INFINITY), sum = v_zero(), part = v_zero();
        for (int j = 0; j < cols; j += V_LANES)
            top = v_max(scaled_or_hidden(s + j, min_int(cols - j, V_LANES), v_set(c)), top);
        v_store(lanes, top);
        for (int i = 0; i < V_LANES; i++) most = lanes[i] > most ? lanes[i] : most;
        const vf base = v_set(most == -INFINITY ? 0.0f : most);
        for (int j = 0; j < cols; j += V_LANES) {
            const vf x = v_sub(scaled_or_hidden(s + j, min_int(cols - j, V_LANES), v_set(c)), base), p = v_exp2(x);
            sum = v_add(sum, p);
            part = v_add(part, v_mul_unless_zero(p, x));
        }
        simd_join_entropy(most, v_hsum(sum), v_hsum(part), &m[r], &l[r], &e[r]);
    }
}

static void weigh(int rows, int cols, float *S, int64_t lds, float c, const float *m, const float *inverse)
{
    for (int r = 0; r < rows; r++) {
        float *s = S + r * lds;
        const vf base = v_set(m[r]), factor = v_set(inverse[r]);
        for (int j = 0; j < cols; j += V_LANES) {
            const int n = min_int(cols - j, V_LANES);
            const vf x = v_sub(v_mul(v_load_n(s + j, n), v_set(c)), base);
            v_store_n(s + j, v_mul(v_exp2(x), factor), n);
        }
    }
}

static void add_rows(int rows, int cols, const float *S, int64_t lds, float *sums)
{
    for (int j = 0; j < cols; j += V_LANES) {
        const int n = min_int(cols - j, V_LANES);
        vf sum = v_zero();
        for (int r = 0; r < rows; r++) sum = v_add(sum, v_load_n(S + r * lds + j, n));
        v_store_n(sums + j, sum, n);
    }
}

static void leave(void) {}
