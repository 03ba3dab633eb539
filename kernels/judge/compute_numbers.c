/* compute_numbers.c: roundings of numbers, and products that skip masked keys or round their sums. */
#include <math.h>
#include <string.h>

#include "kernels/judge/compute_internal.h"

int64_t compute_padded(int64_t n)
{
    const int64_t width = PRODUCTS_WIDTH;
    return (n + width - 1) / width * width + (n == 0 ? width : 0);
}

/* ---- Roundings of numbers ---------------------------------------------------------------------------------------- */

double compute_rounded(attn_dtype dtype, double x)
{
    switch (dtype) {
    case ATTN_F32: return (float)x;
    case ATTN_F16: return attn_f16_to_f32(attn_f16_from_double(x));
    case ATTN_BF16: return attn_bf16_to_f32(attn_bf16_from_double(x));
    case ATTN_F8E4M3: return attn_e4m3_to_f32(attn_e4m3_from_double(x));
    default: return x;
    }
}

double compute_cut(attn_dtype dtype, double x)
{
    static const int bits[ATTN_DTYPE_COUNT] = { [ATTN_F32] = 23, [ATTN_F16] = 10, [ATTN_BF16] = 7, [ATTN_F8E4M3] = 3 };
    uint64_t word;
    memcpy(&word, &x, sizeof word);
    if (!isfinite(x)) return x;
    word &= ~((UINT64_C(1) << (52 - bits[dtype])) - 1);
    memcpy(&x, &word, sizeof x);
    return x;
}

/* Rounds x to 10 mantissa bits, as many as TF32 has: towards 0 if `cuts` is true, otherwise to the nearest. */
static double to_tf32(double x, bool cuts)
{
    uint64_t word;
    if (!isfinite(x)) return x;
    memcpy(&word, &x, sizeof word);
    if (!cuts) word += UINT64_C(1) << 41;
    word &= ~((UINT64_C(1) << 42) - 1);
    memcpy(&x, &word, sizeof x);
    return x;
}

void compute_round_operand(const variation *v, bool of_values, double *x, int64_t count)
{
    const bool all = v->rounding == ROUND_TF32_ALL || v->rounding == CUT_TF32_ALL;
    const bool cuts = v->rounding == CUT_TF32 || v->rounding == CUT_TF32_ALL;
    if (!all && (of_values || (v->rounding != ROUND_TF32 && v->rounding != CUT_TF32))) return;
    for (int64_t n = 0; n < count; n++) x[n] = to_tf32(x[n], cuts);
}

/* ---- Products of matrices ---------------------------------------------------------------------------------------- */

/* Computes C += A B, or C += transposed A B if `by_key` is true. Skips pairs of a query and a masked key, whose score
 * in c->z is -inf. */
static void product_seen(const struct compute *c, int64_t rows, int64_t n, const double *A, bool by_key,
                         const double *B, int64_t ldb, double *C, int64_t ldc)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = c->lo; j < c->hi; j++) {
            const double weight = A[r * c->keys + j];
            const double *const from = by_key ? B + r * ldb : B + j * ldb;
            double *const to = by_key ? C + j * ldc : C + r * ldc;
            if (c->z[r * c->keys + j] == -INFINITY) continue;
            for (int64_t e = 0; e < n; e++) to[e] += weight * from[e];
        }
}

void compute_times_keys(const struct compute *c, int64_t rows, int64_t n, const double *A, const double *B, int64_t ldb,
                        double *C)
{
    if (c->strange) product_seen(c, rows, n, A, false, B, ldb, C, ldb);
    else
        c->products->in_double(rows, compute_padded(n), c->hi - c->lo, A + c->lo, c->keys, 1, B + c->lo * ldb, ldb, C,
                               ldb);
}

void compute_add_to_keys(const struct compute *c, int64_t rows, int64_t n, const double *A, const double *B,
                         int64_t ldb, double *C)
{
    if (c->strange) product_seen(c, rows, n, A, true, B, ldb, C, ldb);
    else
        c->products->in_double(c->hi - c->lo, compute_padded(n), rows, A + c->lo, 1, c->keys, B, ldb, C + c->lo * ldb,
                               ldb);
}

void compute_rounded_product(const struct compute *c, const variation *v, int64_t m, int64_t n, int64_t k,
                             const double *A, int64_t row, const double *B, int64_t ldb, double *C, int64_t ldc)
{
    const int64_t terms = v->tile;
    for (int64_t t = 0; t < k; t += terms) {
        c->products->in_double(m, n, attn_min64(terms, k - t), A + t, row, 1, B + t * ldb, ldb, C, ldc);
        for (int64_t r = 0; r < m; r++)
            for (int64_t e = 0; e < n; e++) C[r * ldc + e] = compute_rounded(v->round_dtype, C[r * ldc + e]);
    }
}
