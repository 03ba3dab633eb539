/* simd_gemm.h: the product C = A B of f32 matrices, written with the functions of simd_v256.h or simd_v128.h. The sums
 * of 6 rows and 16 columns of C are in registers. In simd_avx2.c the sums take 12 of 16 registers; two more hold half a
 * row of a panel (32 columns) of B, and one holds an element of A. In simd_neon.c the sums take 24 of 32 registers.
 * Each sum runs along all of k in order and is added to C at the end, as in simd_gemm512.h. */

enum { GEMM_ROWS = 6, GEMM_COLS = 16, GEMM_VECTORS = GEMM_COLS / V_LANES };

/* Computes `rows` rows and 16 columns of C, which are half a panel (32 columns). `rows` is a constant in every inlined
 * copy of the function, so that the sums stay in registers. */
VEC void gemm_block(const int rows, int k, const float *A, int64_t lda, const float *B, float *C, int64_t ldc,
                    int width, bool add, const float *rescale)
{
    vf sum[GEMM_ROWS][GEMM_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int x = 0; x < GEMM_VECTORS; x++) sum[i][x] = v_zero();
    for (int kk = 0; kk < k; kk++) {
        vf b[GEMM_VECTORS];
#pragma GCC unroll 4
        for (int x = 0; x < GEMM_VECTORS; x++) b[x] = v_load(B + x * V_LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const vf a = v_set(A[i * lda]);
#pragma GCC unroll 4
            for (int x = 0; x < GEMM_VECTORS; x++) sum[i][x] = v_fma(a, b[x], sum[i][x]);
        }
        A++;
        B += SIMD_PANEL;
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        const vf factor = v_set(add && rescale ? rescale[i] : 1.0f);
#pragma GCC unroll 4
        for (int x = 0; x < GEMM_VECTORS; x++) {
            const int left = width - x * V_LANES, n = left < 0 ? 0 : left < V_LANES ? left : V_LANES;
            float *c = C + i * ldc + x * V_LANES;
            if (add) sum[i][x] = v_fma(v_load_n(c, n), factor, sum[i][x]);
            v_store_n(c, sum[i][x], n);
        }
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
