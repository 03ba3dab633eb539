/* simd_v512.h: vector functions for AVX-512. A vector has 16 floats. simd_v256.h has functions of the same names for
 * AVX2. simd_rows.h and simd_tiles.h call these functions.
 *
 *   vf is 16 floats, vi is 16 int32, vm is a set of lanes. Functions whose names end in _n access only the first n
 *   lanes of memory (n is 0 to 16) and read the others as zero.
 *
 * exp2(x) is computed as 2^i * 2^(f/32) * 2^r, where x = i + f / 32 + r, with i an integer, f in 0..31 and
 * 0 <= r < 1/32:
 *
 *   r          comes from vreduceps
 *   2^r        is 1 + r (c1 + c2 r), whose error is 6.5e-8 at most
 *   f          is in the low bits of x + 1.5 * 2^18, rounded down
 *   2^(f/32)   comes from a table of 32 numbers in two registers (vpermi2ps)
 *   2^i        is the factor by which vscalefps multiplies
 *
 * These are seven instructions. A polynomial for the usual |r| <= 1/2 alone takes nine. Infinities need no extra code:
 * their r is 0, and vscalefps gives the correct result. All rounding errors together are at most 1.8e-7. */
#ifndef ATTN_CPU_SIMD_V512_H
#define ATTN_CPU_SIMD_V512_H

#include <immintrin.h>

#include "kernels/cpu/simd_scalar.h"

#define VEC static inline __attribute__((always_inline, unused))

enum { V_LANES = 16, V_DOT_QUERIES = 4 };
typedef __m512 vf;
typedef __m512i vi;
typedef __m512d vd;
typedef __m128 v4;
typedef __mmask16 vm;

/* clang-format off */
VEC vm v_first(int n) { return (__mmask16)_bzhi_u32(0xffff, (unsigned)n); }
VEC vf v_zero(void) { return _mm512_setzero_ps(); }
VEC vf v_set(float x) { return _mm512_set1_ps(x); }
VEC vf v_iota(void) { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
VEC vf v_load(const float *p) { return _mm512_loadu_ps(p); }
VEC vf v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(v_first(n), p); }
VEC void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
VEC void v_store_n(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, v_first(n), x); }
VEC vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
VEC vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
VEC vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
VEC vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
VEC vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VEC vf v_fms(vf a, vf b, vf c) { return _mm512_fmsub_ps(a, b, c); }
VEC vf v_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
VEC vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* the larger of a and b; b if one of them is NaN */
VEC vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); } /* the smaller of a and b; b if one of them is NaN */
VEC vf v_abs(vf x) { return _mm512_abs_ps(x); }
VEC vf v_copysign(vf x, vf sign)
{
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign), _mm512_castps_si512(x), 0xca));
}
VEC vm v_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VEC vf v_select(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
/* Returns a * b, but 0 where a is 0, even if b is infinite or NaN. */
VEC vf v_mul_unless_zero(vf a, vf b) { return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ), a, b); }
VEC vm v_or(vm a, vm b) { return a | b; }
VEC vm v_and(vm a, vm b) { return a & b; }
VEC vm v_none(void) { return 0; }
VEC vi v_load_i_n(const int32_t *p, int n) { return _mm512_maskz_loadu_epi32(v_first(n), p); }
VEC vi v_set_i(int32_t x) { return _mm512_set1_epi32(x); }
VEC vi v_iota_i(void) { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
VEC vi v_add_i(vi a, vi b) { return _mm512_add_epi32(a, b); }
VEC vi v_sub_i(vi a, vi b) { return _mm512_sub_epi32(a, b); }
VEC vm v_less_i(vi a, vi b) { return _mm512_cmplt_epi32_mask(a, b); }
/* Returns x with its `low` lowest bits set to 0. */
VEC vi v_high_bits(vi x, int low) { return _mm512_slli_epi32(_mm512_srai_epi32(x, (unsigned)low), (unsigned)low); }
VEC vf v_from_i(vi x) { return _mm512_cvtepi32_ps(x); }
VEC vi v_bits(vf x) { return _mm512_castps_si512(x); }
VEC vf v_of_bits(vi x) { return _mm512_castsi512_ps(x); }
/* v_low_d() and v_high_d() convert the first and the second half of the lanes to double. */
VEC vd v_zero_d(void) { return _mm512_setzero_pd(); }
VEC vd v_low_d(vf x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
VEC vd v_high_d(vf x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
VEC vd v_fma_d(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
VEC double v_hsum_d(vd a, vd b) { return _mm512_reduce_add_pd(_mm512_add_pd(a, b)); }
/* A v4 is a vector of four floats, while a vf has V_LANES floats. */
VEC v4 v4_load(const float *p) { return _mm_loadu_ps(p); }
VEC void v4_store(float *p, v4 x) { _mm_storeu_ps(p, x); }
VEC v4 v4_add(v4 a, v4 b) { return _mm_add_ps(a, b); }
/* clang-format on */

VEC vm v_zero_bytes_n(const uint8_t *p, int n) /* returns the set of lanes whose byte at p is 0 */
{
    return _mm_testn_epi8_mask(_mm_maskz_loadu_epi8(v_first(n), p), _mm_set1_epi8(-1));
}

VEC float v_hsum(vf x)
{
    return _mm512_reduce_add_ps(x);
}

VEC bool v_any(vm m)
{
    return m != 0;
}

VEC bool v_any_nan(vf x)
{
    return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0;
}

/* Returns the sum of the lanes of each of four vectors, in the order of the arguments. All four sums add their lanes in
 * the same order. */
VEC v4 v_hsum4(vf a, vf b, vf c, vf d)
{
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* Returns the largest lane of each of four vectors, in the order of the arguments. */
VEC v4 v_hmax4(vf a, vf b, vf c, vf d)
{
    const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 abcd = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* returns 2^x, or 0 in the lanes in which x is below `low` (at least -126) */
VEC vf v_exp2_from(vf x, vf low)
{
    const __m512 table_low = _mm512_setr_ps(1.0f, 1.0218972f, 1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f,
                                            1.13878858f, 1.1637249f, 1.18920708f, 1.21524739f, 1.24185777f, 1.26905096f,
                                            1.29683959f, 1.32523668f, 1.35425556f, 1.38390994f);
    const __m512 table_high = _mm512_setr_ps(
        1.41421354f, 1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f, 1.61049032f, 1.64575553f,
        1.68179286f, 1.71861935f, 1.75625217f, 1.79470909f, 1.8340081f, 1.87416768f, 1.91520655f, 1.95714414f);
    const __m512 shifted = _mm512_add_round_ps(x, _mm512_set1_ps(0x1.8p+18f),
                                               _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_reduce_ps(x, 5 << 4 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 power = _mm512_permutex2var_ps(table_low, _mm512_castps_si512(shifted), table_high);
    const __m512 q = _mm512_fmadd_ps(r, _mm512_set1_ps(0x1.f0f3e6p-3f), _mm512_set1_ps(0x1.62e11ep-1f));
    /* the comparison is true for a NaN, so a NaN stays NaN */
    const __mmask16 enough = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(enough, _mm512_fmadd_ps(_mm512_mul_ps(r, power), q, power), x);
}

/* ---- Integers of 32 bits, for random bits ------------------------------------------------------------------------ */

VEC vi v_xor_i(vi a, vi b)
{
    return _mm512_xor_si512(a, b);
}

/* Multiplies each lane of x by c as unsigned numbers. Returns the low 32 bits of the products, and writes the high 32
 * bits to *high. */
VEC vi v_mul_wide(vi x, uint32_t c, vi *high)
{
    const __m512i factor = _mm512_set1_epi64(c);
    const __m512i even = _mm512_mul_epu32(x, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), factor);
    *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    return _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
}

/* Stores four vectors interleaved: lane 0 of a, b, c and d, then lane 1 of a, b, c and d, and so on. */
VEC void v_store4_i(uint32_t *p, vi a, vi b, vi c, vi d)
{
    const __m512i ab = _mm512_unpacklo_epi32(a, b), AB = _mm512_unpackhi_epi32(a, b);
    const __m512i cd = _mm512_unpacklo_epi32(c, d), CD = _mm512_unpackhi_epi32(c, d);
    const __m512i lanes[4] = { _mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd),
                               _mm512_unpacklo_epi64(AB, CD), _mm512_unpackhi_epi64(AB, CD) };
    for (int i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(p + 4 * i), _mm512_castsi512_si128(lanes[i]));
        _mm_storeu_si128((__m128i *)(p + 16 + 4 * i), _mm512_extracti32x4_epi32(lanes[i], 1));
        _mm_storeu_si128((__m128i *)(p + 32 + 4 * i), _mm512_extracti32x4_epi32(lanes[i], 2));
        _mm_storeu_si128((__m128i *)(p + 48 + 4 * i), _mm512_extracti32x4_epi32(lanes[i], 3));
    }
}

VEC vi v_load_u16(const uint16_t *p)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}

/* ---- Loading and storing numbers of the floating dtypes ---------------------------------------------------------- */

VEC vf v_from_e4m3(__m128i bytes)
{
    /* The seven low bits of an e4m3 number are moved to the corresponding places of an f16. The f16 then has the
     * number's value times 2^-8. This holds for subnormals too, but not for NaN (0x7f). */
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    __m256i half = _mm256_and_si256(_mm256_srai_epi16(wide, 1),
                                    /* clears the copy of the sign that the shift leaves in bit 14 */
                                    _mm256_set1_epi16((int16_t)0xbfff));
    const __mmask16 nan = _mm_testn_epi8_mask(_mm_xor_si128(bytes, _mm_set1_epi8(0x7f)), _mm_set1_epi8(0x7f));
    half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

VEC __m128i v_to_e4m3(vf x)
{
    const __m512i u = _mm512_castps_si512(x), a = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512 limited = _mm512_min_ps(_mm512_castsi512_ps(a), _mm512_set1_ps(448.0f));
    /* Changes the exponent from the bias of f32 to that of e4m3, and rounds off the 20 lowest mantissa bits, to nearest
     * even. */
    const __m512i t = _mm512_sub_epi32(_mm512_castps_si512(limited), _mm512_set1_epi32(120 << 23));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(t, 20), _mm512_set1_epi32(1));
    const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(t, _mm512_set1_epi32(0x7ffff)), odd),
                                             20);
    /* A number below 2^-6 is subnormal in e4m3: a multiple of 2^-9. Adding 2^14 rounds the number to a multiple of
     * 2^-9, and the low bits of the sum then count these multiples. */
    const __m512 big = _mm512_set1_ps(16384.0f);
    const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(limited, big)), _mm512_castps_si512(big));
    const __mmask16 is_small = _mm512_cmp_ps_mask(limited, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    __m512i y = _mm512_mask_mov_epi32(normal, is_small, small);
    y = _mm512_mask_mov_epi32(y, nan, _mm512_set1_epi32(0x7f));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(y, sign));
}

VEC vf v_from_bf16(__m256i h)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

VEC __m256i v_to_bf16(vf x)
{
    const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i y = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    y = _mm512_mask_mov_epi32(y, nan, _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40)));
    return _mm512_cvtepi32_epi16(y);
}

/* v_get_n() loads elements c to c + n - 1 of a row, n <= 16, with 0 in the other lanes. v_put_n() stores them. */
VEC vf v_get_n(const void *row, attn_dtype dtype, int64_t c, int n)
{
    const __mmask16 m = v_first(n);
    switch (dtype) {
    case ATTN_F16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, (const uint16_t *)row + c));
    case ATTN_BF16: return v_from_bf16(_mm256_maskz_loadu_epi16(m, (const uint16_t *)row + c));
    case ATTN_F8E4M3: return v_from_e4m3(_mm_maskz_loadu_epi8(m, (const uint8_t *)row + c));
    default: return _mm512_maskz_loadu_ps(m, (const float *)row + c);
    }
}

VEC vf v_get(const void *row, attn_dtype dtype, int64_t c)
{
    switch (dtype) {
    case ATTN_F16: return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)row + c)));
    case ATTN_BF16: return v_from_bf16(_mm256_loadu_si256((const __m256i *)((const uint16_t *)row + c)));
    case ATTN_F8E4M3: return v_from_e4m3(_mm_loadu_si128((const __m128i *)((const uint8_t *)row + c)));
    default: return _mm512_loadu_ps((const float *)row + c);
    }
}

VEC void v_put(void *row, attn_dtype dtype, int64_t c, vf x)
{
    switch (dtype) {
    case ATTN_F16:
        _mm256_storeu_si256((__m256i *)((uint16_t *)row + c), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        break;
    case ATTN_BF16: _mm256_storeu_si256((__m256i *)((uint16_t *)row + c), v_to_bf16(x)); break;
    case ATTN_F8E4M3: _mm_storeu_si128((__m128i *)((uint8_t *)row + c), v_to_e4m3(x)); break;
    default: _mm512_storeu_ps((float *)row + c, x); break;
    }
}

VEC void v_put_n(void *row, attn_dtype dtype, int64_t c, vf x, int n)
{
    const __mmask16 m = v_first(n);
    switch (dtype) {
    case ATTN_F16:
        _mm256_mask_storeu_epi16((uint16_t *)row + c, m, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        break;
    case ATTN_BF16: _mm256_mask_storeu_epi16((uint16_t *)row + c, m, v_to_bf16(x)); break;
    case ATTN_F8E4M3: _mm_mask_storeu_epi8((uint8_t *)row + c, m, v_to_e4m3(x)); break;
    default: _mm512_mask_storeu_ps((float *)row + c, m, x); break;
    }
}

/* Transposes V_LANES vectors: lane j of x[i] becomes lane i of x[j]. */
VEC void v_transpose(vf x[V_LANES])
{
    __m512 t[16];
#define UNPACK(i)                                                                                        \
    {                                                                                                    \
        const __m512 a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpacklo_ps(x[i + 2], x[i + 3]); \
        const __m512 c = _mm512_unpackhi_ps(x[i], x[i + 1]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]); \
        t[i] = _mm512_shuffle_ps(a, b, 0x44), t[i + 1] = _mm512_shuffle_ps(a, b, 0xee);                  \
        t[i + 2] = _mm512_shuffle_ps(c, d, 0x44), t[i + 3] = _mm512_shuffle_ps(c, d, 0xee);              \
    }
    UNPACK(0)
    UNPACK(4)
    UNPACK(8)
    UNPACK(12)
#undef UNPACK
    /* UNPACK has transposed each square of 4 rows and 4 columns: t[4 g + s] holds columns s, 4 + s, 8 + s and 12 + s of
     * rows 4 g .. 4 g + 3. */
#define QUARTERS(s)                                                                                \
    {                                                                                              \
        const __m512 a = _mm512_shuffle_f32x4(t[s], t[4 + s], 0x88),                               \
                     b = _mm512_shuffle_f32x4(t[8 + s], t[12 + s], 0x88);                          \
        const __m512 c = _mm512_shuffle_f32x4(t[s], t[4 + s], 0xdd),                               \
                     d = _mm512_shuffle_f32x4(t[8 + s], t[12 + s], 0xdd);                          \
        x[s] = _mm512_shuffle_f32x4(a, b, 0x88), x[8 + s] = _mm512_shuffle_f32x4(a, b, 0xdd);      \
        x[4 + s] = _mm512_shuffle_f32x4(c, d, 0x88), x[12 + s] = _mm512_shuffle_f32x4(c, d, 0xdd); \
    }
    QUARTERS(0) QUARTERS(1) QUARTERS(2) QUARTERS(3)
#undef QUARTERS
}

#endif
