/* sm80.cc: implements the instructions that sm80.h declares. */
#include "sm80.h"

#include <immintrin.h>
#include <math.h>

#include "emulator.h"
#include "kernels/dtype.h"

namespace emu {

uint32_t pack_f16(float low, float high)
{
    return (uint32_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_setr_ps(low, high, 0, 0), _MM_FROUND_TO_NEAREST_INT));
}

uint32_t pack_bf16(float low, float high)
{
    return attn_bf16_from_f32(low) | (uint32_t)attn_bf16_from_f32(high) << 16;
}

/* ---- ldmatrix ---------------------------------------------------------------------------------------------------- */

struct matrix_rows {
    uint32_t row, *r;
};

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row)
{
    matrix_rows mine = { row, r };
    warp<matrix_rows>("ldmatrix", mine, [](matrix_rows *const *all) {
        /* n numbers the 32 rows of the four 8 x 8 matrices. The eight elements of row n lie in four lanes, two elements
         * in each lane. */
        for (int n = 0; n < 32; n++) {
            uint32_t pairs[4];
            memcpy(pairs, shared_row(thread() / 32 * 32 + n, all[n]->row, "ldmatrix"), sizeof pairs);
            for (int q = 0; q < 4; q++) all[n % 8 * 4 + q]->r[n / 8] = pairs[q];
        }
    });
}

void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row)
{
    matrix_rows mine = { row, r };
    warp<matrix_rows>("ldmatrix.trans", mine, [](matrix_rows *const *all) {
        uint16_t element[4][8][8];
        for (int n = 0; n < 32; n++)
            memcpy(element[n / 8][n % 8], shared_row(thread() / 32 * 32 + n, all[n]->row, "ldmatrix.trans"), 16);
        for (int m = 0; m < 4; m++)
            for (int n = 0; n < 32; n++)
                all[n]->r[m] = element[m][n % 4 * 2][n / 4] | (uint32_t)element[m][n % 4 * 2 + 1][n / 4] << 16;
    });
}

/* ---- mma.m16n8k16 ------------------------------------------------------------------------------------------------ */

struct mma_operands {
    float *c;
    const uint32_t *a;
    uint32_t b[2];
};

/* Converts eight elements, which four neighbouring lanes hold in one register each, to float. */
static __m256 widen(bool bf16, const uint32_t *pairs)
{
    const __m128i x = _mm_loadu_si128((const __m128i *)pairs);
    return bf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)) : _mm256_cvtph_ps(x);
}

static void multiply(bool bf16, mma_operands *const *all)
{
    uint32_t a[4][32], b[2][32];
    float A[16][16], B[8][16], C[16][8];
    for (int n = 0; n < 32; n++) {
        const mma_operands &x = *all[n];
        for (int e = 0; e < 4; e++) a[e][n] = x.a[e];
        for (int e = 0; e < 2; e++) b[e][n] = x.b[e];
        for (int e = 0; e < 4; e++) C[n / 4 + e / 2 * 8][n % 4 * 2 + e % 2] = x.c[e];
    }
    for (int g = 0; g < 8; g++) {
        for (int e = 0; e < 4; e++) _mm256_storeu_ps(&A[g + e % 2 * 8][e / 2 * 8], widen(bf16, &a[e][g * 4]));
        for (int e = 0; e < 2; e++) _mm256_storeu_ps(&B[g][e * 8], widen(bf16, &b[e][g * 4]));
    }
    for (int k = 0; k < 16; k++) {
        const __m256 row = _mm256_setr_ps(B[0][k], B[1][k], B[2][k], B[3][k], B[4][k], B[5][k], B[6][k], B[7][k]);
        for (int m = 0; m < 16; m++)
            _mm256_storeu_ps(C[m], _mm256_fmadd_ps(_mm256_set1_ps(A[m][k]), row, _mm256_loadu_ps(C[m])));
    }
    for (int n = 0; n < 32; n++)
        for (int e = 0; e < 4; e++) all[n]->c[e] = C[n / 4 + e / 2 * 8][n % 4 * 2 + e % 2];
}

void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma_operands mine = { c, a, { b0, b1 } };
    warp<mma_operands>("mma.f16", mine, [](mma_operands *const *all) { multiply(false, all); });
}

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma_operands mine = { c, a, { b0, b1 } };
    warp<mma_operands>("mma.bf16", mine, [](mma_operands *const *all) { multiply(true, all); });
}

uint32_t tf32_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & ~0x1fffu;
}

void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma_operands mine = { c, a, { b0, b1 } };
    warp<mma_operands>("mma.tf32", mine, [](mma_operands *const *all) {
        alignas(32) uint32_t A[16][8], B[8][8];
        alignas(32) float C[16][8];
        for (int n = 0; n < 32; n++) {
            const mma_operands &x = *all[n];
            for (int e = 0; e < 4; e++) {
                A[n / 4 + e % 2 * 8][n % 4 + e / 2 * 4] = x.a[e] & ~0x1fffu;
                C[n / 4 + e / 2 * 8][n % 4 * 2 + e % 2] = x.c[e];
            }
            for (int e = 0; e < 2; e++) B[n % 4 + e * 4][n / 4] = x.b[e] & ~0x1fffu;
        }
        for (int k = 0; k < 8; k++) {
            const __m256 row = _mm256_load_ps((const float *)B[k]);
            for (int m = 0; m < 16; m++)
                _mm256_store_ps(C[m], _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_set1_epi32((int)A[m][k])), row,
                                                      _mm256_load_ps(C[m])));
        }
        for (int n = 0; n < 32; n++)
            for (int e = 0; e < 4; e++) all[n]->c[e] = C[n / 4 + e / 2 * 8][n % 4 * 2 + e % 2];
    });
}

struct mma_doubles {
    double *c;
    const double *a, *b;
};

void mma_f64(double (&c)[4], const double (&a)[8], const double (&b)[4])
{
    mma_doubles mine = { c, a, b };
    warp<mma_doubles>("mma.f64", mine, [](mma_doubles *const *all) {
        for (int n = 0; n < 32; n++)
            for (int e = 0; e < 4; e++) {
                const int row = n / 4, column = n % 4 * 2 + e % 2, below = e / 2;
                double sum = all[n]->c[e];
                for (int k = 0; k < 16; k++)
                    sum = fma(all[row * 4 + k % 4]->a[k / 4 * 2 + below], all[column * 4 + k % 4]->b[k / 4], sum);
                all[n]->c[e] = sum;
            }
    });
}

} // namespace emu
