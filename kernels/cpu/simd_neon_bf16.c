/* simd_neon_bf16.c: the compute type bf16 for arm64 processors with BFMMLA. Operands are rounded to bf16, and sums are
 * f32.
 *
 * BFMMLA multiplies two rows of A by two columns of B, with four numbers along k each, and adds the products to 2 x 2
 * sums. A panel of B consists of lines (simd_pairs.h): line k/2 has the numbers k and k + 1 of each of its 32 columns.
 * Two neighbouring lines, interleaved in units of 32 bits, give four numbers of each column:
 *
 *     line k/2      c0: k k+1     c1: k k+1     c2: k k+1     c3: k k+1
 *     line k/2 + 1  c0: k+2 k+3   c1: k+2 k+3   ...
 *     zip1          c0: k k+1 k+2 k+3           c1: k k+1 k+2 k+3            zip2: c2, c3
 *
 * BFMMLA rounds each sum to odd and treats subnormal bf16 as zero. If the number of rows is odd, the row behind the
 * last is multiplied too, and its sums are dropped. */
#include "kernels/cpu/simd_variants.h"

#if SIMD_ARM64
#include "kernels/cpu/simd_v128.h"

/* The vector types and functions that simd_pairs.h uses. W is the number of bf16 numbers in a vector. */
enum { W = 8 };
typedef uint16x8_t vh;
typedef uint16x8_t vh_flags;

/* clang-format off */
VEC vh vh_zero(void) { return vdupq_n_u16(0); }
VEC vh vh_load_n(const uint16_t *p, int n)
{
    if (n >= W) return vld1q_u16(p);
    return vcombine_u16(v_load_halves_n(p, n), v_load_halves_n(p + 4, n - 4));
}
VEC void vh_store(uint16_t *p, vh x) { vst1q_u16(p, x); }
VEC void vh_store_half(uint16_t *p, vh x, bool high) { vst1_u16(p, high ? vget_high_u16(x) : vget_low_u16(x)); }
VEC vh vh_of(vf low, vf high) { return vcombine_u16(v_to_bf16(low), v_to_bf16(high)); }
VEC vf vh_as_f(vh x) { return vreinterpretq_f32_u16(x); }
VEC vh vh_of_f(vf x) { return vreinterpretq_u16_f32(x); }
VEC vh vh_halves(vh x) { return vzip1q_u16(x, vextq_u16(x, x, 4)); }
VEC vh vh_zip(vh a, vh b, bool high) { return high ? vzip2q_u16(a, b) : vzip1q_u16(a, b); }
VEC vh_flags vh_flag(vh x, int most, vh_flags flags)
{
    return vorrq_u16(flags, vcgtq_u16(vandq_u16(x, vdupq_n_u16(0x7fff)), vdupq_n_u16((uint16_t)most)));
}
VEC bool vh_flagged(vh_flags flags) { return vmaxvq_u16(flags) != 0; }
/* clang-format on */

#include "kernels/cpu/simd_pairs.h"

/* ---- The product of two packed matrices -------------------------------------------------------------------------- */

/* Registers limit the block: its sums of C take 16 registers, columns of B take 4 and rows of A take 2. */
enum { GEMM_ROWS = 8, GEMM_COLS = 8 };

VEC bfloat16x8_t first_fours(vh a, vh b)
{
    return vreinterpretq_bf16_u64(vzip1q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}

VEC bfloat16x8_t second_fours(vh a, vh b)
{
    return vreinterpretq_bf16_u64(vzip2q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}

/* Loads eight columns of B, with four numbers along k for each. B is stored in pairs along k: two of the numbers come
 * from one row of pairs, and two from the next row of pairs. */
VEC void get_columns(const uint16_t *B, bfloat16x8_t columns[4])
{
#pragma GCC unroll 2
    for (int x = 0; x < 2; x++) {
        const uint32x4_t line = vreinterpretq_u32_u16(vld1q_u16(B + 8 * x));
        const uint32x4_t next = vreinterpretq_u32_u16(vld1q_u16(B + 2 * SIMD_PANEL + 8 * x));
        columns[2 * x] = vreinterpretq_bf16_u32(vzip1q_u32(line, next));
        columns[2 * x + 1] = vreinterpretq_bf16_u32(vzip2q_u32(line, next));
    }
}

/* Computes `pairs` pairs of rows of C in eight columns, a quarter of a panel. The second row of the last pair may not
 * exist. `pairs` is a constant in every copy of this inlined function, so that the sums stay in registers. */
VEC void gemm_block(const int pairs, int rows, int k, const uint16_t *A, int64_t lda, const uint16_t *B, float *C,
                    int64_t ldc, int width, bool add, const float *rescale)
{
    vf sum[GEMM_ROWS / 2][4];
#pragma GCC unroll 4
    for (int i = 0; i < pairs; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = v_zero();
    for (int kk = 0; kk < k; kk += W) {
        bfloat16x8_t b[2][4];
        get_columns(B, b[0]);
        get_columns(B + 4 * SIMD_PANEL, b[1]);
#pragma GCC unroll 4
        for (int i = 0; i < pairs; i++) {
            const vh a0 = vld1q_u16(A + 2 * i * lda + kk), a1 = vld1q_u16(A + (2 * i + 1) * lda + kk);
#pragma GCC unroll 4
            for (int x = 0; x < 4; x++) {
                sum[i][x] = vbfmmlaq_f32(sum[i][x], first_fours(a0, a1), b[0][x]);
                sum[i][x] = vbfmmlaq_f32(sum[i][x], second_fours(a0, a1), b[1][x]);
            }
        }
        B += W * SIMD_PANEL;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * pairs; i++) {
        if (i >= rows) break;
        const vf factor = v_set(rescale ? rescale[i] : 1.0f);
#pragma GCC unroll 2
        for (int x = 0; x < 2; x++) {
            const vf s0 = sum[i / 2][2 * x], s1 = sum[i / 2][2 * x + 1];
            vf s = i % 2 ? vcombine_f32(vget_high_f32(s0), vget_high_f32(s1))
                         : vcombine_f32(vget_low_f32(s0), vget_low_f32(s1));
            float *c = C + i * ldc + x * V_LANES;
            if (add) s = v_fma(v_load_n(c, width - x * V_LANES), factor, s);
            v_store_n(c, s, width - x * V_LANES);
        }
    }
}

static void gemm(int m, int n, int k, const void *A_form, int64_t lda, const void *B_form, int64_t ldb, float *C,
                 int64_t ldc, bool add, const float *rescale)
{
    const uint16_t *A = A_form, *B = B_form;
    for (int j = 0; j < n; j += GEMM_COLS) {
        const int width = n - j < GEMM_COLS ? n - j : GEMM_COLS;
        const uint16_t *panel = B + j / SIMD_PANEL * ldb + 2 * (j % SIMD_PANEL);
        for (int i = 0; i < m; i += GEMM_ROWS) {
            const int rows = m - i < GEMM_ROWS ? m - i : GEMM_ROWS;
            const uint16_t *a = A + i * lda;
            const float *factors = rescale ? rescale + i : NULL;
            float *c = C + i * ldc + j;
            switch ((rows + 1) / 2) {
#define PAIRS(count) \
    case count: gemm_block(count, rows, k, a, lda, panel, c, ldc, width, add, factors); break;
                PAIRS(1) PAIRS(2) PAIRS(3) PAIRS(4)
#undef PAIRS
            }
        }
    }
}

const struct simd_type simd_neon_bf16_type = { ATTN_BF16, K_MULTIPLE, 1,    16,      pack_a,  pack_at,
                                               pack_b,    pack_bt,    gemm, softmax, gradient };
#endif
