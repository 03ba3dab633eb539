/* dtype.h: conversions of one number between the stored dtypes and float or double, on host and device.
 *
 * Conversions to narrower types round once, to nearest, ties to even. A double is converted to float16 directly, never
 * through float, because two roundings may give another result than one. float8_e4m3fn has no infinity: a number that
 * is too large, or infinite, becomes 448, its largest number, with its sign; NaN stays NaN. The other types overflow to
 * infinity as IEEE 754 says. Subnormals are exact. The vector code of the backends must agree with these functions on
 * every input; a unit test tries all 65536 patterns of 16 bits. */
#ifndef ATTN_DTYPE_H
#define ATTN_DTYPE_H

#include <stdint.h>
#include <string.h>

#include "attention.h"

/* ATTN_HD marks a function that is compiled for the host (C and C++) and for the device. */
#if defined(__CUDACC__)
#define ATTN_HD static inline __host__ __device__
#else
#define ATTN_HD static inline
#endif

ATTN_HD uint32_t attn_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ATTN_HD float attn_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- Conversions to wider types, which are always exact ---------------------------------------------------------- */

ATTN_HD float attn_bf16_to_f32(uint16_t bits)
{
    return attn_f32_from_bits((uint32_t)bits << 16);
}

/* Converts the bits `magnitude` of a number of a small format, without the sign bit, to float. The format has
 * `mantissa` stored bits of fraction and an exponent bias of `bias`. Subnormals are multiples of 2^(1 - bias -
 * mantissa). */
ATTN_HD float attn_widen(uint32_t magnitude, int mantissa, int bias)
{
    const uint32_t exponent = magnitude >> mantissa, fraction = magnitude & ((1u << mantissa) - 1);
    if (exponent == 0) /* subnormal: a small integer times a power of two, which is exact */
        return (float)fraction * attn_f32_from_bits((uint32_t)(1 - bias - mantissa + 127) << 23);
    return attn_f32_from_bits(((exponent + 127 - (uint32_t)bias) << 23) | (fraction << (23 - mantissa)));
}

ATTN_HD float attn_f16_to_f32(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    /* infinity and NaN: the fraction bits tell them apart */
    if (magnitude >= 0x7c00u) return attn_f32_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return attn_f32_from_bits(sign | attn_f32_bits(attn_widen(magnitude, 10, 15)));
}

ATTN_HD float attn_e4m3_to_f32(uint8_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    if (magnitude == 0x7fu) return attn_f32_from_bits(sign | 0x7fc00000u);
    return attn_f32_from_bits(sign | attn_f32_bits(attn_widen(magnitude, 3, 7)));
}

/* ---- Conversions to narrower types, which round once ------------------------------------------------------------- */

/* Rounds |x|, which is finite, to a format with `mantissa` stored bits of fraction and exponent bias `bias`. Returns
 * the bits as an integer. The result may exceed the largest number of the format, so the caller must compare it with
 * that number. */
ATTN_HD uint64_t attn_narrow(double x, int mantissa, int bias)
{
    uint64_t bits, significand, kept, rest, half;
    int exponent, shift;
    memcpy(&bits, &x, sizeof bits);
    bits &= UINT64_C(0x7fffffffffffffff);
    exponent = (int)(bits >> 52);
    /* subnormal doubles become 0: they are less than half of the smallest positive number of each dtype */
    if (exponent == 0) return 0;
    exponent -= 1023;
    significand = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52;
    shift = 52 - mantissa;
    /* x is subnormal in the target format, which keeps fewer bits of such a number, so more bits are cut */
    if (exponent < 1 - bias) shift += 1 - bias - exponent;
    if (shift > 54) return 0;
    kept = significand >> shift;
    rest = significand & ((UINT64_C(1) << shift) - 1);
    half = UINT64_C(1) << (shift - 1);
    if (rest > half || (rest == half && (kept & 1))) kept++;
    /* If rounding carries out of the fraction bits, the carry adds one to the exponent. The result is then the next
     * power of two, as it should be. */
    if (exponent < 1 - bias) return kept;
    return ((uint64_t)(exponent + bias - 1) << mantissa) + kept;
}

ATTN_HD uint16_t attn_f16_from_double(double x)
{
    const uint16_t sign = x < 0 || (x == 0 && 1 / x < 0) ? 0x8000u : 0;
    uint64_t code;
    if (x != x) return 0x7e00u;
    if (x - x != 0) return (uint16_t)(sign | 0x7c00u);
    code = attn_narrow(x, 10, 15);
    return (uint16_t)(sign | (code < 0x7c00u ? code : 0x7c00u));
}

ATTN_HD uint16_t attn_bf16_from_double(double x)
{
    const uint16_t sign = x < 0 || (x == 0 && 1 / x < 0) ? 0x8000u : 0;
    uint64_t code;
    if (x != x) return 0x7fc0u;
    if (x - x != 0) return (uint16_t)(sign | 0x7f80u);
    code = attn_narrow(x, 7, 127);
    return (uint16_t)(sign | (code < 0x7f80u ? code : 0x7f80u));
}

ATTN_HD uint8_t attn_e4m3_from_double(double x)
{
    const uint8_t sign = x < 0 || (x == 0 && 1 / x < 0) ? 0x80u : 0;
    uint64_t code;
    if (x != x) return 0x7fu;
    if (x - x != 0) return (uint8_t)(sign | 0x7eu);
    code = attn_narrow(x, 3, 7);
    return (uint8_t)(sign | (code < 0x7eu ? code : 0x7eu));
}

ATTN_HD uint16_t attn_f16_from_f32(float x)
{
    return attn_f16_from_double(x);
}
ATTN_HD uint8_t attn_e4m3_from_f32(float x)
{
    return attn_e4m3_from_double(x);
}

ATTN_HD uint16_t attn_bf16_from_f32(float x)
{
    const uint32_t bits = attn_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(0x7fc0u | (bits >> 16 & 0x8000u));
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* ---- Loading and storing element `index` of an array `data` of any dtype ----------------------------------------- */

ATTN_HD double attn_load(attn_dtype dtype, const void *data, int64_t index)
{
    switch (dtype) {
    case ATTN_F32: return ((const float *)data)[index];
    case ATTN_F16: return attn_f16_to_f32(((const uint16_t *)data)[index]);
    case ATTN_BF16: return attn_bf16_to_f32(((const uint16_t *)data)[index]);
    case ATTN_F8E4M3: return attn_e4m3_to_f32(((const uint8_t *)data)[index]);
    case ATTN_I32: return ((const int32_t *)data)[index];
    case ATTN_U8: return ((const uint8_t *)data)[index];
    default: return 0;
    }
}

/* Stores `x` in this dtype, rounded once. Integer types are not supported, because no output has one. */
ATTN_HD void attn_store(attn_dtype dtype, void *data, int64_t index, double x)
{
    switch (dtype) {
    case ATTN_F32: ((float *)data)[index] = (float)x; break;
    case ATTN_F16: ((uint16_t *)data)[index] = attn_f16_from_double(x); break;
    case ATTN_BF16: ((uint16_t *)data)[index] = attn_bf16_from_double(x); break;
    case ATTN_F8E4M3: ((uint8_t *)data)[index] = attn_e4m3_from_double(x); break;
    default: break;
    }
}

#endif
