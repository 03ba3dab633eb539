/* simd_gemm512.h: the matrix product in 512-bit registers, for f32 and for pairs of bf16. simd_avx512.c and simd_bf16.c
 * include it after they define an element:
 *
 *   GEMM_ELEMENT             the element of an operand
 *   GEMM_PER_LANE            number of elements, neighbours along k, that share a 32-bit lane
 *   GEMM_BROADCAST(a)        a register whose lanes all hold the lane at address `a`
 *   GEMM_LOAD(b)             16 lanes of a panel of B
 *   GEMM_STEP(sum, a, b)     sum + a * b in every lane
 *
 * Each lane of a register sums the products for one element of C over all of k, in order. The sum is added to C at
 * the end. */

enum { GEMM_ROWS = 14, GEMM_POINTERS = (GEMM_ROWS + 2) / 3 };

/* Does one step along k for `rows` rows of A. One pointer serves three rows: the numbers of A are read at row[0][at],
 * row[0][lda + at], row[0][2 lda + at], row[1][at], and so on. `both` says whether both halves of the panel's columns
 * are computed, or only the first half. */
VEC void gemm_step(const int rows, const bool both, const GEMM_ELEMENT *const *row, int64_t lda, int at,
                   const GEMM_ELEMENT *B, __m512 sum[GEMM_ROWS][2])
{
    const __m512 b0 = (__m512)GEMM_LOAD(B), b1 = both ? (__m512)GEMM_LOAD(B + 16 * GEMM_PER_LANE) : b0;
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        const __m512 a = (__m512)GEMM_BROADCAST(row[i / 3] + (i % 3) * lda + at);
        sum[i][0] = GEMM_STEP(sum[i][0], a, b0);
        if (both) sum[i][1] = GEMM_STEP(sum[i][1], a, b1);
    }
}

/* Computes `rows` rows of C, in the 32 columns of one panel. `rows` is a constant in every inlined copy of the
 * function, so that the sums stay in registers. One pointer serves three rows (an address may be pointer + lda or
 * pointer + 2 lda), because the processor has too few general registers for fourteen pointers. */
VEC void gemm_block(const int rows, const bool both, int steps, const GEMM_ELEMENT *A, int64_t lda,
                    const GEMM_ELEMENT *B, float *C, int64_t ldc, int width, bool add, const float *rescale)
{
    __m512 sum[GEMM_ROWS][2];
    const GEMM_ELEMENT *row[GEMM_POINTERS];
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
#pragma GCC unroll 5
    for (int i = 0; i < GEMM_POINTERS; i++) row[i] = A + (3 * i < rows ? 3 * i : 0) * lda;
    for (; steps >= 2; steps -= 2) {
        gemm_step(rows, both, row, lda, 0, B, sum);
        gemm_step(rows, both, row, lda, GEMM_PER_LANE, B + SIMD_PANEL * GEMM_PER_LANE, sum);
        B += 2 * SIMD_PANEL * GEMM_PER_LANE;
#pragma GCC unroll 5
        for (int i = 0; i < GEMM_POINTERS; i++) {
            row[i] += 2 * GEMM_PER_LANE;
            /* This statement keeps the compiler from computing the addresses of all fourteen rows of A before the loop.
             * There are too few registers for fourteen addresses. */
            __asm__("" : "+r"(row[i]));
        }
    }
    if (steps) gemm_step(rows, both, row, lda, 0, B, sum);
    const __mmask16 m0 = v_first(width < 16 ? width : 16), m1 = v_first(both ? width - 16 : 0);
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        float *c = C + i * ldc;
        if (add) {
            const __m512 factor = _mm512_set1_ps(rescale ? rescale[i] : 1.0f);
            sum[i][0] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m0, c), factor, sum[i][0]);
            if (both) sum[i][1] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m1, c + 16), factor, sum[i][1]);
        }
        _mm512_mask_storeu_ps(c, m0, sum[i][0]);
        if (both) _mm512_mask_storeu_ps(c + 16, m1, sum[i][1]);
    }
}

static void gemm(int m, int n, int k, const void *A_form, int64_t lda, const void *B_form, int64_t ldb, float *C,
                 int64_t ldc, bool add, const float *rescale)
{
    const GEMM_ELEMENT *A = A_form, *B = B_form;
    const int steps = (k + GEMM_PER_LANE - 1) / GEMM_PER_LANE, blocks = (m + GEMM_ROWS - 1) / GEMM_ROWS;
    for (int j = 0; j < n; j += SIMD_PANEL) {
        const int width = n - j < SIMD_PANEL ? n - j : SIMD_PANEL;
        const GEMM_ELEMENT *panel = B + j / SIMD_PANEL * ldb;
        int i = 0;
        for (int block = 0; block < blocks; block++) {
            const int rows = m / blocks + (block < m % blocks);
            const GEMM_ELEMENT *a = A + i * lda;
            const float *factors = rescale ? rescale + i : NULL;
            float *c = C + i * ldc + j;
            switch (width > 16 ? rows : -rows) {
#define ROWS(count)                                                                                \
    case count: gemm_block(count, true, steps, a, lda, panel, c, ldc, width, add, factors); break; \
    case -count: gemm_block(count, false, steps, a, lda, panel, c, ldc, width, add, factors); break;
                ROWS(1)
                ROWS(2)
                ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
#undef ROWS
            }
            i += rows;
        }
    }
}
