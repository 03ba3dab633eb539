/* simd_bf16.c: the compute type bf16: operands rounded to bf16, sums in f32, for AVX512_BF16 (VDPBF16PS).
 * simd_amx.c puts another product in its place and keeps the rest.
 *
 * Pairs along k are the unit: VDPBF16PS adds the products of two pairs to a lane, and so does AMX. Of the operands,
 *
 *   A    has rows along k, so that pairs are neighbours as they lie
 *   B    has the two elements of a pair in one 32-bit lane, 32 lanes (columns) to a line of the panel:
 *
 *            line k/2 of a panel:   X[k][0] X[k+1][0] | X[k][1] X[k+1][1] | ... | X[k][31] X[k+1][31]
 *
 * pack_b (B = X) interleaves two rows of X; pack_bt (B = X^T) transposes X in units of 32 bits; pack_at (A = X^T)
 * interleaves, then transposes. k is padded to 32, the depth of an AMX tile. Both kinds of product flush subnormal
 * bf16 to zero. */
#include "kernels/cpu/simd_variants.h"

#if defined(__AVX512F__) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#include "kernels/cpu/simd_v512.h"

enum { K_MULTIPLE = 32, TAME_BITS = (127 + 58) << 7 /* of SIMD_TAME in bf16 */ };

/* ---- How simd_tiles.h writes operands ---------------------------------------------------------------------------- */

#define OPERAND uint16_t
enum { STEP = 2, PAD_ROWS = K_MULTIPLE };

/* 16 columns of two rows: the low half is the first row. */
struct pair {
    __m512i rows;
};

/* Elements 0 16 1 17 ...: the two halves interleaved, each element of the one beside that of the other. */
VEC __m512i interleave(__m512i x)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
}

VEC __m512i to_bf16(vf low, vf high)
{
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

VEC void put_row(uint16_t *A, int64_t lda, const vf *x, int n)
{
    (void)lda, (void)n; /* the rest is zero and belongs to the row's padding */
    _mm512_storeu_si512(A, to_bf16(x[0], x[1]));
}

VEC int64_t pair_offset(int r, int column)
{
    return (int64_t)(r / 2) * 2 * SIMD_PANEL + 2 * column;
}

VEC struct pair make_pair(vf x0, vf x1)
{
    return (struct pair){ to_bf16(x0, x1) };
}

VEC void put_pair_a(uint16_t *A, int64_t lda, struct pair p, int n, int rows)
{
    (void)n;
    _mm256_storeu_si256((__m256i *)A, _mm512_castsi512_si256(p.rows));
    if (rows == 2) _mm256_storeu_si256((__m256i *)(A + lda), _mm512_extracti64x4_epi64(p.rows, 1));
}

VEC void put_pair_b(uint16_t *B, int64_t ldb, struct pair p, int rows)
{
    (void)ldb, (void)rows; /* a missing second row is zero and belongs to the padding of k */
    _mm512_storeu_si512(B, interleave(p.rows));
}

#include "kernels/cpu/simd_tiles.h"

/* ---- Packing ----------------------------------------------------------------------------------------------------- */

/* Elements c .. c + 31 of a row as bf16, 0 from `cols` on and where there is no such row; *bad gathers those of
 * SIMD_TAME and more, infinities and NaN. */
VEC __m512i get_bf16(const void *X, attn_dtype dtype, int64_t stride, int rows, int cols, int r, int c, __mmask32 *bad)
{
    __m512i x = _mm512_setzero_si512();
    const int n = cols - c < 32 ? cols - c : 32;
    if (r >= rows || n <= 0) return x;
    const void *row = simd_row(X, dtype, stride, r);
    if (dtype == ATTN_BF16) {
        x = _mm512_maskz_loadu_epi16((__mmask32)_bzhi_u32(UINT32_MAX, (unsigned)n), (const uint16_t *)row + c);
    } else {
        const vf low = v_get_n(row, dtype, c, n < 16 ? n : 16), high = v_get_n(row, dtype, c + 16, n < 16 ? 0 : n - 16);
        x = to_bf16(low, high);
    }
    const __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)), tame = _mm512_set1_epi16(TAME_BITS - 1);
    *bad |= _mm512_cmpgt_epi16_mask(size, tame);
    return x;
}

static bool pack_a(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    __mmask32 bad = 0;
    for (int r = 0; r < rows; r++) {
        uint16_t *a = (uint16_t *)A + r * lda;
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < cols; c += 32)
            _mm512_storeu_si512(a + c, get_bf16(X, dtype, stride, rows, cols, r, c, &bad));
    }
    return !bad;
}

static bool pack_b(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    __mmask32 bad = 0;
    for (int r = 0; r < simd_round_up(rows, K_MULTIPLE); r += 2) {
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < cols; c += SIMD_PANEL) {
            const __m512i x0 = get_bf16(X, dtype, stride, rows, cols, r, c, &bad);
            const __m512i x1 = get_bf16(X, dtype, stride, rows, cols, r + 1, c, &bad);
            uint16_t *b = (uint16_t *)B + c / SIMD_PANEL * ldb + pair_offset(r, 0);
            _mm512_storeu_si512(b, interleave(_mm512_inserti64x4(x0, _mm512_castsi512_si256(x1), 1)));
            _mm512_storeu_si512(b + 32, interleave(_mm512_shuffle_i64x2(x0, x1, 0xee)));
        }
    }
    return !bad;
}

static bool pack_bt(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    __mmask32 bad = 0;
    vf t[16];
    for (int r = 0; r < simd_round_up(rows, SIMD_PANEL); r += 16) {
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < cols; c += 32) {
            for (int i = 0; i < 16; i++)
                t[i] = _mm512_castsi512_ps(get_bf16(X, dtype, stride, rows, cols, r + i, c, &bad));
            v_transpose(t);
            uint16_t *b = (uint16_t *)B + r / SIMD_PANEL * ldb + pair_offset(c, r % SIMD_PANEL);
            for (int i = 0; i < 16; i++) _mm512_storeu_ps(b + i * 2 * SIMD_PANEL, t[i]);
        }
    }
    return !bad;
}

static bool pack_at(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    __mmask32 bad = 0;
    vf t[2][16];
    for (int r = 0; r < rows; r += 32) {
        for (int c = 0; c < cols; c += 32) {
            for (int i = 0; i < 16; i++) {
                const __m512i x0 = get_bf16(X, dtype, stride, rows, cols, r + 2 * i, c, &bad);
                const __m512i x1 = get_bf16(X, dtype, stride, rows, cols, r + 2 * i + 1, c, &bad);
                t[0][i] = _mm512_castsi512_ps(interleave(_mm512_inserti64x4(x0, _mm512_castsi512_si256(x1), 1)));
                t[1][i] = _mm512_castsi512_ps(interleave(_mm512_shuffle_i64x2(x0, x1, 0xee)));
            }
            v_transpose(t[0]);
            v_transpose(t[1]);
            for (int i = 0; i < 32 && c + i < cols; i++)
                _mm512_storeu_ps((uint16_t *)A + (c + i) * lda + r, t[i / 16][i % 16]);
        }
    }
    return !bad;
}

/* ---- The product ------------------------------------------------------------------------------------------------- */

#define GEMM_ELEMENT         uint16_t
#define GEMM_PER_LANE        2
#define GEMM_BROADCAST(a)    _mm512_set1_epi32(*(const simd_pair *)(a))
#define GEMM_LOAD(b)         _mm512_load_si512(b)
#define GEMM_STEP(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
typedef int32_t __attribute__((may_alias, aligned(2))) simd_pair;
#include "kernels/cpu/simd_gemm512.h"

const struct simd_type simd_bf16_type = { ATTN_BF16, K_MULTIPLE, 1,    16,      pack_a,  pack_at,
                                          pack_b,    pack_bt,    gemm, softmax, gradient };
#endif
