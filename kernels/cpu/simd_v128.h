/* simd_v128.h: vector functions for NEON, which every arm64 processor has. A vector has 4 floats. The functions have
 * the same names as those of simd_v512.h, and exp2() is computed as in simd_v256.h.
 *
 * v_max() and v_min() compare and choose, because NEON's own instructions give NaN where either number is NaN. NEON has
 * no masked loads: the first n elements are loaded one by one. */
#ifndef ATTN_CPU_SIMD_V128_H
#define ATTN_CPU_SIMD_V128_H

#include <arm_neon.h>

#include "kernels/cpu/simd_scalar.h"

#define VEC static inline __attribute__((always_inline, unused))

enum { V_LANES = 4, V_DOT_QUERIES = 4 };
typedef float32x4_t vf;
typedef int32x4_t vi;
typedef float64x2_t vd;
typedef uint32x4_t vm; /* a set of lanes: a lane in the set has all bits 1, any other lane all bits 0 */
typedef float32x4_t v4;

/* clang-format off */
VEC vi v_iota_i(void) { return (vi){ 0, 1, 2, 3 }; }
VEC vm v_first(int n) { return vcltq_s32(v_iota_i(), vdupq_n_s32(n)); }
VEC vf v_zero(void) { return vdupq_n_f32(0); }
VEC vf v_set(float x) { return vdupq_n_f32(x); }
VEC vf v_iota(void) { return (vf){ 0, 1, 2, 3 }; }
VEC vf v_load(const float *p) { return vld1q_f32(p); }
VEC void v_store(float *p, vf x) { vst1q_f32(p, x); }
VEC vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
VEC vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
VEC vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
VEC vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
VEC vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
VEC vf v_fms(vf a, vf b, vf c) { return vfmaq_f32(vnegq_f32(c), a, b); }
VEC vf v_fnma(vf a, vf b, vf c) { return vfmsq_f32(c, a, b); }
VEC vf v_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } /* the larger of a and b; b where either is NaN */
/* the smaller of a and b; b where either is NaN */
VEC vf v_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
VEC vf v_abs(vf x) { return vabsq_f32(x); }
VEC vf v_copysign(vf x, vf sign) { return vbslq_f32(vdupq_n_u32(0x80000000), sign, x); }
VEC vm v_less(vf a, vf b) { return vcltq_f32(a, b); }
VEC vf v_select(vm m, vf yes, vf no) { return vbslq_f32(m, yes, no); }
VEC vm v_or(vm a, vm b) { return vorrq_u32(a, b); }
VEC vm v_and(vm a, vm b) { return vandq_u32(a, b); }
VEC vm v_none(void) { return vdupq_n_u32(0); }
VEC vi v_set_i(int32_t x) { return vdupq_n_s32(x); }
VEC vi v_add_i(vi a, vi b) { return vaddq_s32(a, b); }
VEC vi v_sub_i(vi a, vi b) { return vsubq_s32(a, b); }
VEC vm v_less_i(vi a, vi b) { return vcltq_s32(a, b); }
VEC vi v_high_bits(vi x, int low) { return vandq_s32(x, vdupq_n_s32(-(1 << low))); }
VEC vf v_from_i(vi x) { return vcvtq_f32_s32(x); }
VEC vi v_bits(vf x) { return vreinterpretq_s32_f32(x); }
VEC vf v_of_bits(vi x) { return vreinterpretq_f32_s32(x); }
VEC vd v_zero_d(void) { return vdupq_n_f64(0); }
VEC vd v_low_d(vf x) { return vcvt_f64_f32(vget_low_f32(x)); }
VEC vd v_high_d(vf x) { return vcvt_high_f64_f32(x); }
VEC vd v_fma_d(vd a, vd b, vd c) { return vfmaq_f64(c, a, b); }
VEC double v_hsum_d(vd a, vd b) { return vaddvq_f64(vaddq_f64(a, b)); }
VEC float v_hsum(vf x) { return vaddvq_f32(x); }
VEC bool v_any(vm m) { return vmaxvq_u32(m) != 0; }
VEC bool v_any_nan(vf x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }
/* A v4 is a vector of four floats. In this file a vf has four floats too; in simd_v256.h and simd_v512.h it has
 * more. */
VEC v4 v4_load(const float *p) { return vld1q_f32(p); }
VEC void v4_store(float *p, v4 x) { vst1q_f32(p, x); }
VEC v4 v4_add(v4 a, v4 b) { return vaddq_f32(a, b); }
VEC v4 v_hsum4(vf a, vf b, vf c, vf d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }
VEC v4 v_hmax4(vf a, vf b, vf c, vf d) { return vpmaxq_f32(vpmaxq_f32(a, b), vpmaxq_f32(c, d)); }
/* clang-format on */

VEC vf v_mul_unless_zero(vf a, vf b)
{
    const vi product = v_bits(vmulq_f32(a, b));
    return v_of_bits(vbicq_s32(product, vreinterpretq_s32_u32(vceqzq_f32(a))));
}

VEC vf v_load_n(const float *p, int n)
{
    if (n >= V_LANES) return v_load(p);
    vf x = v_zero();
    if (n > 0) x = vld1q_lane_f32(p, x, 0);
    if (n > 1) x = vld1q_lane_f32(p + 1, x, 1);
    if (n > 2) x = vld1q_lane_f32(p + 2, x, 2);
    return x;
}

VEC vi v_load_i_n(const int32_t *p, int n)
{
    int32_t all[V_LANES] = { 0 };
    if (n >= V_LANES) return vld1q_s32(p);
    for (int i = 0; i < n; i++) all[i] = p[i];
    return vld1q_s32(all);
}

VEC uint16x4_t v_load_halves_n(const uint16_t *p, int n)
{
    uint64_t bits = 0;
    if (n >= V_LANES) return vld1_u16(p);
    for (int i = 0; i < n; i++) bits |= (uint64_t)p[i] << 16 * i;
    return vcreate_u16(bits);
}

VEC uint16x4_t v_load_bytes_n(const uint8_t *p, int n) /* loads n <= 4 bytes, each widened to 16 bits */
{
    uint32_t bits = 0;
    if (n >= V_LANES) memcpy(&bits, p, sizeof bits);
    for (int i = 0; n < V_LANES && i < n; i++) bits |= (uint32_t)p[i] << 8 * i;
    return vget_low_u16(vmovl_u8(vcreate_u8(bits)));
}

VEC void v_store_n(float *p, vf x, int n)
{
    if (n >= V_LANES) {
        v_store(p, x);
        return;
    }
    if (n > 0) vst1q_lane_f32(p, x, 0);
    if (n > 1) vst1q_lane_f32(p + 1, x, 1);
    if (n > 2) vst1q_lane_f32(p + 2, x, 2);
}

VEC void v_store_halves_n(uint16_t *p, uint16x4_t x, int n)
{
    uint16_t all[V_LANES];
    vst1_u16(n >= V_LANES ? p : all, x);
    for (int i = 0; n < V_LANES && i < n; i++) p[i] = all[i];
}

VEC vm v_zero_bytes_n(const uint8_t *p, int n)
{
    return vceqzq_u32(vmovl_u16(v_load_bytes_n(p, n)));
}

/* returns 2^x, or 0 in the lanes in which x is below `low` (at least -126) */
VEC vf v_exp2_from(vf x, vf low)
{
    const vm below = v_less(x, low); /* the comparison with a NaN is false, and `below` then leaves the NaN as it is */
    x = v_max(low, v_min(v_set(128.0f), x));
    const vf rounded = vrndnq_f32(x), r = v_sub(x, rounded);
    vf q = v_fma(r, v_set(0x1.5bba14p-10f), v_set(0x1.3cea88p-7f));
    q = v_fma(r, q, v_set(0x1.c6b752p-5f));
    q = v_fma(r, q, v_set(0x1.ebf9bcp-3f));
    q = v_fma(r, q, v_set(0x1.62e42ap-1f));
    const vf y = v_fma(r, q, v_set(1.0f));
    const vi i = vshlq_n_s32(v_add_i(vcvtq_s32_f32(rounded), v_set_i(127)), 23);
    return v_select(below, v_zero(), v_mul(y, v_of_bits(i)));
}

/* ---- Integers of 32 bits, for random bits ------------------------------------------------------------------------ */

VEC vi v_xor_i(vi a, vi b)
{
    return veorq_s32(a, b);
}

/* Multiplies each lane of x by c as unsigned numbers. Returns the low 32 bits of the products, and writes the high 32
 * bits to *high. */
VEC vi v_mul_wide(vi x, uint32_t c, vi *high)
{
    const uint32x4_t u = vreinterpretq_u32_s32(x);
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(u), c));
    const uint32x4_t last = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(u), c));
    *high = vreinterpretq_s32_u32(vuzp2q_u32(first, last));
    return vreinterpretq_s32_u32(vuzp1q_u32(first, last));
}

/* Stores four vectors interleaved: lane 0 of a, b, c and d, then lane 1 of a, b, c and d, and so on. */
VEC void v_store4_i(uint32_t *p, vi a, vi b, vi c, vi d)
{
    vst4q_u32(p, (uint32x4x4_t){ { vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b), vreinterpretq_u32_s32(c),
                                   vreinterpretq_u32_s32(d) } });
}

VEC vi v_load_u16(const uint16_t *p)
{
    return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p)));
}

/* ---- Loading and storing numbers of the floating dtypes ---------------------------------------------------------- */

VEC vf v_from_f16(uint16x4_t h)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(h));
}

VEC uint16x4_t v_to_f16(vf x)
{
    return vreinterpret_u16_f16(vcvt_f16_f32(x));
}

VEC vf v_from_e4m3(uint16x4_t bytes)
{
    const uint16x4_t rest = vand_u16(bytes, vdup_n_u16(0x7f));
    const uint16x4_t nan = vand_u16(vceq_u16(rest, vdup_n_u16(0x7f)), vdup_n_u16(0x7e00));
    const uint16x4_t half = vorr_u16(vshl_n_u16(rest, 7), vshl_n_u16(vshr_n_u16(bytes, 7), 15));
    return v_mul(v_from_f16(vorr_u16(half, nan)), v_set(256.0f));
}

VEC vf v_from_bf16(uint16x4_t h)
{
    return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
}

VEC uint16x4_t v_to_bf16(vf x)
{
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t y = vshrq_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), 16);
    const uint32x4_t quiet = vorrq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(0x40));
    return vmovn_u32(vbslq_u32(vceqq_f32(x, x), y, quiet));
#endif
}

VEC vf v_get_n(const void *row, attn_dtype dtype, int64_t c, int n)
{
    switch (dtype) {
    case ATTN_F16: return v_from_f16(v_load_halves_n((const uint16_t *)row + c, n));
    case ATTN_BF16: return v_from_bf16(v_load_halves_n((const uint16_t *)row + c, n));
    case ATTN_F8E4M3: return v_from_e4m3(v_load_bytes_n((const uint8_t *)row + c, n));
    default: return v_load_n((const float *)row + c, n);
    }
}

VEC vf v_get(const void *row, attn_dtype dtype, int64_t c)
{
    return v_get_n(row, dtype, c, V_LANES);
}

VEC void v_put_n(void *row, attn_dtype dtype, int64_t c, vf x, int n)
{
    float single[V_LANES];
    switch (dtype) {
    case ATTN_F16: v_store_halves_n((uint16_t *)row + c, v_to_f16(x), n); break;
    case ATTN_BF16: v_store_halves_n((uint16_t *)row + c, v_to_bf16(x), n); break;
    case ATTN_F8E4M3:
        v_store(single, x);
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
    const vf a = vtrn1q_f32(x[0], x[1]), b = vtrn2q_f32(x[0], x[1]);
    const vf c = vtrn1q_f32(x[2], x[3]), d = vtrn2q_f32(x[2], x[3]);
    x[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
    x[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
    x[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
    x[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
}

#endif
