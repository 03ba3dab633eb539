/* simd_split.h: float16 and float32 on AMX tiles, which multiply only bf16. simd_half_bf16.c (PARTS 2) and
 * simd_single_bf16.c (PARTS 3) include it.
 *
 * The idea. A number is stored as the sum of bf16 numbers, its parts: the nearest bf16 number, then the nearest to the
 * remainder, and so on. A bf16 number has 8 bits of mantissa. Two parts have 16, so a float16 (11 bits) is exact; three
 * parts have 24, so a float32 is exact. The product of two numbers is the sum, in f32, of the products of their parts,
 * which are exact in f32. The size of part p is at most 2^(-8 p) of the number. In the table, 01 is the product of part
 * 0 of one number and part 1 of the other:
 *
 *     PARTS   products              products that are left out, and their size relative to the whole product
 *     2       00 01 10 11           none (11 is up to 2^-16: without it, lse of large scores was off by 2e-4)
 *     3       00 01 02 10 11 20     12, 21 and 22: 2^-24 each at most, as much as f32 rounds off
 *
 * A product of float16 numbers thus takes 4 products of AMX, and one of float32 numbers 6. AMX is 16 times as fast as
 * f32 multiply-adds. P and dS are f32 when they are computed, and are then split in the same way for the next product.
 *
 * Limits. The parts of numbers below 3e-36 are subnormal, and AMX treats these as 0. Infinity becomes NaN, because its
 * second part is inf minus inf. Numbers above 3.38e38 become NaN too, because they round to infinity in bf16.
 *
 * Each part has the format of the operands of simd_bf16.c. The parts follow each other in a row of A, lda / PARTS
 * elements apart, and in a panel of B, ldb / PARTS elements apart. */
#include "kernels/cpu/simd_v512.h"

enum { K_MULTIPLE = 32 };

/* Interleaves the two halves of x: elements 0 16 1 17 ... */
VEC __m512i interleave(__m512i x)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
}

/* Splits 32 numbers into PARTS bf16 parts each. part[p] holds part p of the 16 numbers of `low`, then part p of the 16
 * numbers of `high`. Every part but the last is rounded by adding half a unit in its last place. This is fast, but may
 * turn a NaN into another number. The last part is rounded by an instruction that keeps NaN. The remainder of a NaN is
 * NaN, so the last part shows every NaN. */
VEC void split(vf low, vf high, __m512i part[PARTS])
{
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i half = _mm512_set1_epi32(0x8000), kept = _mm512_set1_epi32((int)0xffff0000);
#pragma GCC unroll 3
    for (int p = 0; p < PARTS - 1; p++) {
        const __m512i a = _mm512_add_epi32(_mm512_castps_si512(low), half),
                      b = _mm512_add_epi32(_mm512_castps_si512(high), half);
        part[p] = _mm512_permutex2var_epi16(a, odd, b);
        low = v_sub(low, _mm512_castsi512_ps(_mm512_and_si512(a, kept)));
        high = v_sub(high, _mm512_castsi512_ps(_mm512_and_si512(b, kept)));
    }
    part[PARTS - 1] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* ---- The format in which simd_tiles.h stores the matrices that a product multiplies ------------------------------ */

#define OPERAND uint16_t
enum { STEP = 2, PAD_ROWS = K_MULTIPLE };

/* Two rows of 16 columns of an operand (matrix of a product). Vector p has part p of all numbers, with the first row in
 * its low half. */
struct pair {
    __m512i rows[PARTS];
};

VEC void put_row(uint16_t *A, int64_t lda, const vf *x, int n)
{
    __m512i part[PARTS];
    (void)n; /* all of x is stored, because x holds zeros from n on, which pad the row */
    split(x[0], x[1], part);
#pragma GCC unroll 3
    for (int p = 0; p < PARTS; p++) _mm512_storeu_si512(A + p * (lda / PARTS), part[p]);
}

VEC int64_t pair_offset(int r, int column)
{
    return (int64_t)(r / 2) * 2 * SIMD_PANEL + 2 * column;
}

VEC struct pair make_pair(vf x0, vf x1)
{
    struct pair p;
    split(x0, x1, p.rows);
    return p;
}

VEC void put_pair_a(uint16_t *A, int64_t lda, struct pair pair, int n, int rows)
{
    (void)n;
#pragma GCC unroll 3
    for (int p = 0; p < PARTS; p++) {
        uint16_t *a = A + p * (lda / PARTS);
        _mm256_storeu_si256((__m256i *)a, _mm512_castsi512_si256(pair.rows[p]));
        if (rows == 2) _mm256_storeu_si256((__m256i *)(a + lda), _mm512_extracti64x4_epi64(pair.rows[p], 1));
    }
}

VEC void put_pair_b(uint16_t *B, int64_t ldb, struct pair pair, int rows)
{
    (void)rows; /* `rows` is not needed: if the pair's second row does not exist, pair.rows holds zeros in its place */
#pragma GCC unroll 3
    for (int p = 0; p < PARTS; p++) _mm512_storeu_si512(B + p * (ldb / PARTS), interleave(pair.rows[p]));
}

#include "kernels/cpu/simd_tiles.h"

/* ---- Packing rows of tensors as operands ------------------------------------------------------------------------- */

/* Loads columns c to c + 15 of row r of X; elements that do not exist are 0. *bad marks infinities, NaN and elements
 * whose absolute value is SIMD_TAME or more. */
VEC vf get(attn_dtype dtype, const void *X, int64_t stride, int rows, int cols, int r, int c, __mmask16 *bad)
{
    const int n = cols - c < V_LANES ? cols - c : V_LANES;
    if (r >= rows || n <= 0) return v_zero();
    const void *row = simd_row(X, dtype, stride, r);
    const vf x = n == V_LANES ? v_get(row, dtype, c) : v_get_n(row, dtype, c, n);
    *bad |= _mm512_cmp_ps_mask(v_abs(x), v_set(SIMD_TAME), _CMP_NLT_UQ);
    return x;
}

VEC bool pack_a_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, uint16_t *A, int64_t lda)
{
    __mmask16 bad = 0;
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c += 32) {
            const vf x[2] = { get(dtype, X, stride, rows, cols, r, c, &bad),
                              get(dtype, X, stride, rows, cols, r, c + 16, &bad) };
            put_row(A + r * lda + c, lda, x, 32);
        }
    }
    return !bad;
}

VEC bool pack_b_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, uint16_t *B, int64_t ldb)
{
    __mmask16 bad = 0;
    for (int r = 0; r < simd_round_up(rows, K_MULTIPLE); r += 2) {
        for (int c = 0; c < simd_round_up(cols, SIMD_PANEL); c += V_LANES)
            put_pair_b(B + c / SIMD_PANEL * ldb + pair_offset(r, c % SIMD_PANEL), ldb,
                       make_pair(get(dtype, X, stride, rows, cols, r, c, &bad),
                                 get(dtype, X, stride, rows, cols, r + 1, c, &bad)),
                       2);
    }
    return !bad;
}

VEC bool pack_bt_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, uint16_t *B, int64_t ldb)
{
    __mmask16 bad = 0;
    vf t[PARTS][16];
    for (int r = 0; r < simd_round_up(rows, SIMD_PANEL); r += 16) {
        for (int c = 0; c < cols; c += 32) {
            for (int i = 0; i < 16; i++) {
                __m512i part[PARTS];
                split(get(dtype, X, stride, rows, cols, r + i, c, &bad),
                      get(dtype, X, stride, rows, cols, r + i, c + 16, &bad), part);
                for (int p = 0; p < PARTS; p++) t[p][i] = _mm512_castsi512_ps(part[p]);
            }
            for (int p = 0; p < PARTS; p++) {
                uint16_t *b = B + r / SIMD_PANEL * ldb + p * (ldb / PARTS) + pair_offset(c, r % SIMD_PANEL);
                v_transpose(t[p]);
                for (int i = 0; i < 16; i++) _mm512_storeu_ps(b + i * 2 * SIMD_PANEL, t[p][i]);
            }
        }
    }
    return !bad;
}

VEC bool pack_at_as(attn_dtype dtype, int rows, int cols, const void *X, int64_t stride, uint16_t *A, int64_t lda)
{
    __mmask16 bad = 0;
    vf t[PARTS][16];
    for (int r = 0; r < rows; r += 32) {
        for (int c = 0; c < cols; c += 16) {
            for (int i = 0; i < 16; i++) {
                const struct pair pair = make_pair(get(dtype, X, stride, rows, cols, r + 2 * i, c, &bad),
                                                   get(dtype, X, stride, rows, cols, r + 2 * i + 1, c, &bad));
                for (int p = 0; p < PARTS; p++) t[p][i] = _mm512_castsi512_ps(interleave(pair.rows[p]));
            }
            for (int p = 0; p < PARTS; p++) {
                uint16_t *a = A + p * (lda / PARTS) + r;
                v_transpose(t[p]);
                for (int i = 0; i < 16 && c + i < cols; i++) _mm512_storeu_ps(a + (c + i) * lda, t[p][i]);
            }
        }
    }
    return !bad;
}

/* Makes a packing function, which has two copies of the code. In the first copy, the dtype of the inputs is a constant,
 * OWN_DTYPE. The second copy is for inputs of any other dtype, such as a float32 dout of a problem with float16
 * inputs. */
#define PACK(name)                                                                                              \
    static bool name(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *to, int64_t ld) \
    {                                                                                                           \
        if (dtype == OWN_DTYPE) return name##_as(OWN_DTYPE, rows, cols, X, stride, to, ld);                     \
        return name##_as(dtype, rows, cols, X, stride, to, ld);                                                 \
    }
PACK(pack_a)
PACK(pack_at)
PACK(pack_b)
PACK(pack_bt)
