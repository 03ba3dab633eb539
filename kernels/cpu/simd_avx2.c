/* simd_avx2.c: the table for AVX2 and FMA, 8 floats at a time.
 *
 * The product keeps 6 rows and 16 columns of C in 12 of the 16 registers; two hold half a row of the panel of B, one an
 * element of A. A sum runs along the whole of k in order and meets C at the end, as in simd_gemm512.h. */
#include "kernels/cpu/simd_variants.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/cpu/simd_v256.h"
#include "kernels/cpu/simd_rows.h"
#include "kernels/cpu/simd_f32.h"
#include "kernels/cpu/simd_tiles.h"

enum { GEMM_ROWS = 6, GEMM_COLS = 16 };

/* `rows` rows of half a panel. `rows` is a constant in every copy, so that the sums are registers. */
VEC void gemm_block(const int rows, int k, const float *A, int64_t lda, const float *B, float *C, int64_t ldc,
                    int width, bool add, const float *rescale)
{
    __m256 sum[GEMM_ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
    for (int kk = 0; kk < k; kk++) {
        const __m256 b0 = _mm256_load_ps(B), b1 = _mm256_load_ps(B + 8);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const __m256 a = _mm256_broadcast_ss(A + i * lda);
            sum[i][0] = _mm256_fmadd_ps(a, b0, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(a, b1, sum[i][1]);
        }
        A++;
        B += SIMD_PANEL;
    }
    const int n0 = width < 8 ? width : 8, n1 = width < 8 ? 0 : width - 8;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        float *c = C + i * ldc;
        if (add) {
            const __m256 factor = _mm256_set1_ps(rescale ? rescale[i] : 1.0f);
            sum[i][0] = _mm256_fmadd_ps(v_load_n(c, n0), factor, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(v_load_n(c + 8, n1), factor, sum[i][1]);
        }
        v_store_n(c, sum[i][0], n0);
        v_store_n(c + 8, sum[i][1], n1);
    }
}

static void gemm(int m, int n, int k, const void *A_form, int64_t lda, const void *B_form, int64_t ldb, float *C,
                 int64_t ldc, bool add, const float *rescale)
{
    const float *A = A_form, *B = B_form;
    const int blocks = (m + GEMM_ROWS - 1) / GEMM_ROWS;
    for (int j = 0; j < n; j += GEMM_COLS) {
        const int width = n - j < GEMM_COLS ? n - j : GEMM_COLS;
        const float *panel = B + j / SIMD_PANEL * ldb + j % SIMD_PANEL;
        int i = 0;
        for (int block = 0; block < blocks; block++) {
            const int rows = m / blocks + (block < m % blocks);
            const float *a = A + i * lda;
            const float *factors = rescale ? rescale + i : NULL;
            float *c = C + i * ldc + j;
            switch (rows) {
#define ROWS(count) \
    case count: gemm_block(count, k, a, lda, panel, c, ldc, width, add, factors); break;
                ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
            }
            i += rows;
        }
    }
}

const struct simd simd_avx2 = {
    .name = "avx2",
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
    .leave = leave,
};
#endif
