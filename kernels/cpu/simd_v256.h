/* simd_v256.h: vector functions for AVX2. A vector has 8 floats. The functions have the same names as those of
 * simd_v512.h.
 *
 * exp2(x) is computed as 2^i 2^r, where x = i + r and |r| <= 1/2. 2^r is 1 + r q(r) with a polynomial q of degree 4;
 * the error is 9.2e-8 at most. The exponent bits of a float make 2^i. A table lookup in registers would be slower with
 * AVX2. */
#ifndef ATTN_CPU_SIMD_V256_H
#define ATTN_CPU_SIMD_V256_H

#include <immintrin.h>

#include "kernels/cpu/simd_scalar.h"

#define VEC static inline __attribute__((always_inline, unused))

enum { V_LANES = 8, V_DOT_QUERIES = 2 };
typedef __m256 vf;
typedef __m256i vi;
typedef __m256d vd;
typedef __m128 v4;
typedef __m256 vm; /* a set of lanes: a lane in the set has all bits 1, any other lane all bits 0 */

/* clang-format off */
VEC vi v_iota_i(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
VEC vi v_first_i(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), v_iota_i()); }
VEC vm v_first(int n) { return _mm256_castsi256_ps(v_first_i(n)); }
VEC vf v_zero(void) { return _mm256_setzero_ps(); }
VEC vf v_set(float x) { return _mm256_set1_ps(x); }
VEC vf v_iota(void) { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
VEC vf v_load(const float *p) { return _mm256_loadu_ps(p); }
VEC vf v_load_n(const float *p, int n) { return _mm256_maskload_ps(p, v_first_i(n)); }
VEC void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
VEC void v_store_n(float *p, vf x, int n) { _mm256_maskstore_ps(p, v_first_i(n), x); }
VEC vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
VEC vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
VEC vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
VEC vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
VEC vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
VEC vf v_fms(vf a, vf b, vf c) { return _mm256_fmsub_ps(a, b, c); }
VEC vf v_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
VEC vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
VEC vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
VEC vf v_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
VEC vf v_copysign(vf x, vf sign)
{
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, x), _mm256_and_ps(bit, sign));
}
VEC vm v_less(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
VEC vf v_select(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
VEC vf v_mul_unless_zero(vf a, vf b) { return _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ), _mm256_mul_ps(a, b)); }
VEC vm v_or(vm a, vm b) { return _mm256_or_ps(a, b); }
VEC vm v_and(vm a, vm b) { return _mm256_and_ps(a, b); }
VEC vm v_none(void) { return _mm256_setzero_ps(); }
VEC vi v_load_i_n(const int32_t *p, int n) { return _mm256_maskload_epi32(p, v_first_i(n)); }
VEC vi v_set_i(int32_t x) { return _mm256_set1_epi32(x); }
VEC vi v_add_i(vi a, vi b) { return _mm256_add_epi32(a, b); }
VEC vi v_sub_i(vi a, vi b) { return _mm256_sub_epi32(a, b); }
VEC vi v_high_bits(vi x, int low) { return _mm256_slli_epi32(_mm256_srai_epi32(x, low), low); }
VEC vf v_from_i(vi x) { return _mm256_cvtepi32_ps(x); }
VEC vi v_bits(vf x) { return _mm256_castps_si256(x); }
VEC vf v_of_bits(vi x) { return _mm256_castsi256_ps(x); }
VEC vd v_zero_d(void) { return _mm256_setzero_pd(); }
VEC vd v_low_d(vf x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
VEC vd v_high_d(vf x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
VEC vd v_fma_d(vd a, vd b, vd c) { return _mm256_fmadd_pd(a, b, c); }
VEC double v_hsum_d(vd a, vd b)
{
    const __m256d sum = _mm256_add_pd(a, b);
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd(sum, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}
VEC vm v_less_i(vi a, vi b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)); }
VEC v4 v4_load(const float *p) { return _mm_loadu_ps(p); }
VEC void v4_store(float *p, v4 x) { _mm_storeu_ps(p, x); }
VEC v4 v4_add(v4 a, v4 b) { return _mm_add_ps(a, b); }
/* clang-format on */

/* Loads the first `bytes` bytes at p (up to 8 elements of 1 or 2 bytes), and sets the remaining lanes to 0. AVX2
 * cannot mask loads of such elements, so they are first copied to a buffer on the stack. */
VEC __m128i v_load_bytes_n(const void *p, int bytes)
{
    uint8_t buffer[16] __attribute__((aligned(16))) = { 0 };
    memcpy(buffer, p, (size_t)bytes);
    return _mm_load_si128((const __m128i *)buffer);
}

VEC vm v_zero_bytes_n(const uint8_t *p, int n)
{
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_cvtepu8_epi32(v_load_bytes_n(p, n)), _mm256_setzero_si256()));
}

VEC float v_hsum(vf x)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

VEC bool v_any(vm m)
{
    return _mm256_movemask_ps(m) != 0;
}

VEC bool v_any_nan(vf x)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0;
}

VEC v4 v_hsum4(vf a, vf b, vf c, vf d)
{
    const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

VEC v4 v_hmax4(vf a, vf b, vf c, vf d)
{
    const __m256 ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256 abcd = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return _mm_max_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

/* returns 2^x, or 0 in the lanes in which x is below `low` (at least -126) */
VEC vf v_exp2_from(vf x, vf low)
{
    const __m256 enough = _mm256_cmp_ps(x, low, _CMP_NLT_UQ); /* the comparison is true for a NaN, so a NaN stays NaN */
    x = v_max(low, v_min(_mm256_set1_ps(128.0f), x));
    const __m256 rounded = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 r = _mm256_sub_ps(x, rounded);
    __m256 q = _mm256_fmadd_ps(r, _mm256_set1_ps(0x1.5bba14p-10f), _mm256_set1_ps(0x1.3cea88p-7f));
    q = _mm256_fmadd_ps(r, q, _mm256_set1_ps(0x1.c6b752p-5f));
    q = _mm256_fmadd_ps(r, q, _mm256_set1_ps(0x1.ebf9bcp-3f));
    q = _mm256_fmadd_ps(r, q, _mm256_set1_ps(0x1.62e42ap-1f));
    const __m256 y = _mm256_fmadd_ps(r, q, _mm256_set1_ps(1.0f));
    const __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(rounded), _mm256_set1_epi32(127));
    return _mm256_and_ps(enough, _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(i, 23))));
}

/* ---- Integers of 32 bits, for random bits ------------------------------------------------------------------------ */

VEC vi v_xor_i(vi a, vi b)
{
    return _mm256_xor_si256(a, b);
}

/* Multiplies each lane of x by c as unsigned numbers. Returns the low 32 bits of the products, and writes the high 32
 * bits to *high. */
VEC vi v_mul_wide(vi x, uint32_t c, vi *high)
{
    const __m256i factor = _mm256_set1_epi64x(c);
    const __m256i even = _mm256_mul_epu32(x, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

/* Stores four vectors interleaved: lane 0 of a, b, c and d, then lane 1 of a, b, c and d, and so on. */
VEC void v_store4_i(uint32_t *p, vi a, vi b, vi c, vi d)
{
    const __m256i ab = _mm256_unpacklo_epi32(a, b), AB = _mm256_unpackhi_epi32(a, b);
    const __m256i cd = _mm256_unpacklo_epi32(c, d), CD = _mm256_unpackhi_epi32(c, d);
    const __m256i lanes[4] = { _mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd),
                               _mm256_unpacklo_epi64(AB, CD), _mm256_unpackhi_epi64(AB, CD) };
    for (int i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(p + 4 * i), _mm256_castsi256_si128(lanes[i]));
        _mm_storeu_si128((__m128i *)(p + 16 + 4 * i), _mm256_extracti128_si256(lanes[i], 1));
    }
}

VEC vi v_load_u16(const uint16_t *p)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}

/* ---- Loading and storing numbers of the floating dtypes ---------------------------------------------------------- */

VEC vf v_from_e4m3(__m128i bytes)
{
    const __m128i wide = _mm_cvtepu8_epi16(bytes), rest = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f));
    const __m128i half = _mm_or_si128(_mm_slli_epi16(rest, 7), _mm_slli_epi16(_mm_srli_epi16(wide, 7), 15));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)))),
                         _mm256_set1_ps(256.0f));
}

VEC vf v_from_bf16(__m128i h)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

VEC __m128i v_to_bf16(vf x)
{
    const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i y = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    const __m256i z = _mm256_blendv_epi8(y, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm_packus_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
}

/* v_get() loads the V_LANES elements of a row from element c on. v_get_n() loads only n <= 8 of these, and sets the
 * remaining lanes to 0. v_put() and v_put_n() store elements in the same way. */
VEC vf v_get(const void *row, attn_dtype dtype, int64_t c)
{
    switch (dtype) {
    case ATTN_F16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)row + c)));
    case ATTN_BF16: return v_from_bf16(_mm_loadu_si128((const __m128i *)((const uint16_t *)row + c)));
    case ATTN_F8E4M3: return v_from_e4m3(_mm_loadl_epi64((const __m128i *)((const uint8_t *)row + c)));
    default: return _mm256_loadu_ps((const float *)row + c);
    }
}

VEC vf v_get_n(const void *row, attn_dtype dtype, int64_t c, int n)
{
    switch (dtype) {
    case ATTN_F16: return _mm256_cvtph_ps(v_load_bytes_n((const uint16_t *)row + c, 2 * n));
    case ATTN_BF16: return v_from_bf16(v_load_bytes_n((const uint16_t *)row + c, 2 * n));
    case ATTN_F8E4M3: return v_from_e4m3(v_load_bytes_n((const uint8_t *)row + c, n));
    default: return v_load_n((const float *)row + c, n);
    }
}

VEC void v_put_n(void *row, attn_dtype dtype, int64_t c, vf x, int n)
{
    uint16_t half[8] __attribute__((aligned(16)));
    float single[8] __attribute__((aligned(32)));
    switch (dtype) {
    case ATTN_F16:
        _mm_store_si128((__m128i *)half, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        memcpy((uint16_t *)row + c, half, 2 * (size_t)n);
        break;
    case ATTN_BF16:
        _mm_store_si128((__m128i *)half, v_to_bf16(x));
        memcpy((uint16_t *)row + c, half, 2 * (size_t)n);
        break;
    case ATTN_F8E4M3:
        _mm256_store_ps(single, x);
        for (int i = 0; i < n; i++) ((uint8_t *)row)[c + i] = simd_to_e4m3(single[i]);
        break;
    default: v_store_n((float *)row + c, x, n); break;
    }
}

VEC void v_put(void *row, attn_dtype dtype, int64_t c, vf x)
{
    v_put_n(row, dtype, c, x, V_LANES);
}

VEC void v_transpose(vf x[V_LANES])
{
    __m256 t[8];
#define UNPACK(i)                                                                                        \
    {                                                                                                    \
        const __m256 a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpacklo_ps(x[i + 2], x[i + 3]); \
        const __m256 c = _mm256_unpackhi_ps(x[i], x[i + 1]), d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]); \
        t[i] = _mm256_shuffle_ps(a, b, 0x44), t[i + 1] = _mm256_shuffle_ps(a, b, 0xee);                  \
        t[i + 2] = _mm256_shuffle_ps(c, d, 0x44), t[i + 3] = _mm256_shuffle_ps(c, d, 0xee);              \
    }
    UNPACK(0)
    UNPACK(4)
#undef UNPACK
    for (int s = 0; s < 4; s++) {
        x[s] = _mm256_permute2f128_ps(t[s], t[4 + s], 0x20);
        x[4 + s] = _mm256_permute2f128_ps(t[s], t[4 + s], 0x31);
    }
}

#endif
