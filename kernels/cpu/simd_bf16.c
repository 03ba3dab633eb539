/* simd_bf16.c: the compute type bf16 for AVX512_BF16 (VDPBF16PS). Operands are rounded to bf16, and sums are f32.
 * simd_amx.c replaces the product and uses all other functions of this file.
 *
 * The operands are those of simd_pairs.h with W = 32, because an AMX tile is 32 deep along k. Both VDPBF16PS and AMX
 * flush subnormal bf16 to zero. */
#include "kernels/cpu/simd_variants.h"

#if defined(__AVX512F__) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#include "kernels/cpu/simd_v512.h"

/* The vector types and functions that simd_pairs.h uses. W is the number of bf16 numbers in a vector. */
enum { W = 32 };
typedef __m512i vh;
typedef __mmask32 vh_flags;

/* clang-format off */
VEC vh vh_zero(void) { return _mm512_setzero_si512(); }
VEC vh vh_load_n(const uint16_t *p, int n) { return _mm512_maskz_loadu_epi16((__mmask32)_bzhi_u32(UINT32_MAX, (unsigned)n), p); }
VEC void vh_store(uint16_t *p, vh x) { _mm512_storeu_si512(p, x); }
VEC void vh_store_half(uint16_t *p, vh x, bool high)
{
    _mm256_storeu_si256((__m256i *)p, high ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
}
VEC vh vh_of(vf low, vf high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
VEC vf vh_as_f(vh x) { return _mm512_castsi512_ps(x); }
VEC vh vh_of_f(vf x) { return _mm512_castps_si512(x); }
VEC vh vh_halves(vh x)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
}
VEC vh vh_zip(vh a, vh b, bool high)
{
    return vh_halves(high ? _mm512_shuffle_i64x2(a, b, 0xee) : _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1));
}
VEC vh_flags vh_flag(vh x, int most, vh_flags flags)
{
    const __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    return flags | _mm512_cmpgt_epi16_mask(size, _mm512_set1_epi16((short)most));
}
VEC bool vh_flagged(vh_flags flags) { return flags != 0; }
/* clang-format on */

#include "kernels/cpu/simd_pairs.h"

/* ---- The product of two packed matrices -------------------------------------------------------------------------- */

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
