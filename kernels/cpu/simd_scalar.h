/* simd_scalar.h: conversions of f16, bf16 and e4m3 to f32 and back, one number at a time. simd_portable.c uses them for
 * all conversions; the other variants use them for tables and for the last elements of a row. Conversions to f32 are
 * exact; conversions from f32 round to nearest even.
 *
 *            sign exponent mantissa  bias   largest   subnormals   infinity   NaN
 *     f16       1        5       10    15     65504   yes          yes        yes
 *     bf16      1        8        7   127   3.39e38   yes          yes        yes
 *     e4m3      1        4        3     7       448   yes          no         0x7f, 0xff only */
#ifndef ATTN_CPU_SIMD_SCALAR_H
#define ATTN_CPU_SIMD_SCALAR_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/attention.h"

static inline uint32_t simd_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float simd_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float simd_from_bf16(uint16_t h)
{
    return simd_float((uint32_t)h << 16);
}

static inline uint16_t simd_to_bf16(float x)
{
    uint32_t u = simd_bits(x);
    /* a NaN becomes a quiet NaN here, because rounding its bits might turn it into infinity */
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float simd_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return simd_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* a float16 number that is zero or subnormal has the value `rest` times 2^-24 */
    if (rest < 0x400) return simd_float(sign | simd_bits((float)rest * 0x1p-24f));
    return simd_float(sign | (rest + ((127 - 15) << 10)) << 13);
}

static inline uint16_t simd_to_f16(float x)
{
    uint32_t u = simd_bits(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    /* numbers of 65520 and more become infinity: they would be rounded to 65536 or more, which float16 does not have */
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    /* A number below 2^-14 is subnormal in float16: a multiple of 2^-24. Adding 0.5 rounds the number to a multiple of
     * 2^-24, and the low bits of the sum then count these multiples. */
    if (rest < 0x38800000) return (uint16_t)(sign | (simd_bits(simd_float(rest) + 0.5f) - simd_bits(0.5f)));
    rest -= (uint32_t)(127 - 15) << 23;
    return (uint16_t)(sign | (rest + 0xfff + (rest >> 13 & 1)) >> 13);
}

static inline float simd_from_e4m3(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80) << 24, rest = b & 0x7f;
    if (rest == 0x7f) return simd_float(sign | 0x7fc00000);
    if (rest < 8) return simd_float(sign | simd_bits((float)rest * 0x1p-9f));
    return simd_float(sign | (rest + ((127 - 7) << 3)) << 20);
}

static inline uint8_t simd_to_e4m3(float x)
{
    uint32_t u = simd_bits(x), sign = u >> 24 & 0x80, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return (uint8_t)(sign | 0x7f);
    /* infinity and numbers of 448 and more become 448, the largest e4m3 number */
    if (rest >= 0x43e00000) return (uint8_t)(sign | 0x7e);
    /* A number below 2^-6 is subnormal in e4m3: a multiple of 2^-9. Adding 2^14 rounds the number to a multiple of
     * 2^-9, and the low bits of the sum then count these multiples. */
    if (rest < 0x3c800000) return (uint8_t)(sign | (simd_bits(simd_float(rest) + 16384.0f) - simd_bits(16384.0f)));
    rest -= (uint32_t)(127 - 7) << 23;
    return (uint8_t)(sign | (rest + 0x7ffff + (rest >> 20 & 1)) >> 20);
}

static inline float simd_get_element(const void *row, attn_dtype dtype, int64_t c)
{
    switch (dtype) {
    case ATTN_F16: return simd_from_f16(((const uint16_t *)row)[c]);
    case ATTN_BF16: return simd_from_bf16(((const uint16_t *)row)[c]);
    case ATTN_F8E4M3: return simd_from_e4m3(((const uint8_t *)row)[c]);
    default: return ((const float *)row)[c];
    }
}

static inline void simd_put_element(void *row, attn_dtype dtype, int64_t c, float x)
{
    switch (dtype) {
    case ATTN_F16: ((uint16_t *)row)[c] = simd_to_f16(x); break;
    case ATTN_BF16: ((uint16_t *)row)[c] = simd_to_bf16(x); break;
    case ATTN_F8E4M3: ((uint8_t *)row)[c] = simd_to_e4m3(x); break;
    default: ((float *)row)[c] = x; break;
    }
}

/* Ends observe() for one row. `sum` and `part` are sums over the columns of this call; they are added to the row's
 * running sum l and entropy sum e. m is the row's maximum before this call, and `most` is the maximum of m and of this
 * call's columns. */
static inline void simd_join_entropy(float most, float sum, float part, float *m, float *l, float *e)
{
    const float by = *m < most ? *m - most : 0;
    if (*l == 0) *l = sum, *e = part;
    else {
        const float scale = by == 0 ? 1.0f : exp2f(by);
        *e = part + (scale > 0 ? scale * (*e + by * *l) : 0);
        *l = sum + scale * *l;
    }
    *m = most;
}

static inline int64_t simd_dtype_bytes(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? 4 : dtype == ATTN_F8E4M3 ? 1 : 2;
}

static inline const void *simd_row(const void *X, attn_dtype dtype, int64_t stride, int64_t r)
{
    return (const char *)X + r * stride * simd_dtype_bytes(dtype);
}

/* Prefetching of rows. The rows of one head are far apart in memory, because rows of other heads lie between them. The
 * processor's own prefetcher does not follow such reads, so code that reads rows prefetches them by instructions,
 * SIMD_AHEAD rows in advance. simd_ahead() returns how many of the `rows` rows to prefetch: 0 if all rows lie within
 * SIMD_CLOSE bytes, which a cache probably holds, and otherwise `rows`. */
enum { SIMD_AHEAD = 16, SIMD_CLOSE = 48 << 10 };
static inline int simd_ahead(attn_dtype dtype, int64_t stride, int rows)
{
    return rows * stride * simd_dtype_bytes(dtype) > SIMD_CLOSE ? rows : 0;
}

/* Prefetches rows `from` to `to` - 1 of X. The function is not inlined, because it would take registers from the loops
 * around its call. */
static __attribute__((noinline, unused)) void simd_ask_for(const void *X, attn_dtype dtype, int64_t stride, int cols,
                                                           int from, int to)
{
    for (int r = from; r < to; r++) {
        const char *row = simd_row(X, dtype, stride, r);
        for (int at = 0; at < cols * simd_dtype_bytes(dtype); at += 64) __builtin_prefetch(row + at);
    }
    __asm__ volatile(""); /* without this statement, gcc removes calls of a function that only prefetches */
}

/* Call this when row r is read. If r is a multiple of SIMD_AHEAD, the function prefetches the next SIMD_AHEAD rows,
 * from row r + SIMD_AHEAD on. It does not prefetch row `ahead` or later rows. */
static inline void simd_ask_ahead(const void *X, attn_dtype dtype, int64_t stride, int cols, int r, int ahead)
{
    const int from = r + SIMD_AHEAD;
    if (r % SIMD_AHEAD == 0 && from < ahead)
        simd_ask_for(X, dtype, stride, cols, from, from + SIMD_AHEAD < ahead ? from + SIMD_AHEAD : ahead);
}

static inline void *simd_row_out(void *X, attn_dtype dtype, int64_t stride, int64_t r)
{
    return (char *)X + r * stride * simd_dtype_bytes(dtype);
}

#endif
