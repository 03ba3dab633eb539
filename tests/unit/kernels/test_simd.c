/* test_simd.c: compares the vector tables of simd.h with simple loops in double. A vector table is a set of functions
 * for one kind of processor. All tables that this processor can run are tested. The sizes of operands are 1, and just
 * below and just above the sizes of each vector, panel and tile. Canaries reveal a write outside a buffer. Expected
 * packed operands follow their description in simd.h, never another table. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_scalar.h"
#include "kernels/philox.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

static const int sizes[] = { 1, 7, 15, 16, 17, 31, 33, 63, 65, 100, 113, 256 };
static const attn_dtype floating[] = { ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8E4M3 };
static const double LN2 = 0.69314718055994530942;

static uint64_t random_state = 88172645463325252u;

static double uniform(void) /* Returns a random number between -1 and 1. */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(int64_t)random_state / 9223372036854775808.0;
}

/* Memory between canaries (bytes that must not change). */
struct area {
    char *memory, *data;
    size_t bytes;
};

enum { CANARY = 256 };

static struct area area_new(size_t bytes)
{
    struct area a = { .bytes = (bytes + 63) / 64 * 64 };
    a.memory = aligned_alloc(64, a.bytes + 2 * CANARY);
    assert_non_null(a.memory);
    memset(a.memory, 0xa5, a.bytes + 2 * CANARY);
    a.data = a.memory + CANARY;
    return a;
}

static void area_free(struct area *a)
{
    for (int i = 0; i < CANARY; i++) {
        assert_int_equal((uint8_t)a->memory[i], 0xa5);
        assert_int_equal((uint8_t)a->data[a->bytes + (size_t)i], 0xa5);
    }
    free(a->memory);
}

static float *floats(struct area a)
{
    return (float *)a.data;
}

static size_t dtype_bytes(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? 4 : dtype == ATTN_F8E4M3 ? 1 : 2;
}

static struct area area_random(int64_t n, attn_dtype dtype)
{
    struct area a = area_new((size_t)n * dtype_bytes(dtype));
    for (int64_t i = 0; i < n; i++) simd_put_element(a.data, dtype, i, (float)uniform());
    return a;
}

static void near_(double got, double want, double tolerance, const char *table, const char *what, int64_t at)
{
    if (fabs(got - want) <= tolerance || (isnan(got) && isnan(want)) || got == want) return;
    fail_msg("%s: %s[%lld] is %.9g, should be %.9g within %.2g", table, what, (long long)at, got, want, tolerance);
}

/* The macro FOR_TABLES iterates over the vector tables (each a set of functions for one kind of processor). FOR_TYPES
 * also iterates over the types in which a table computes. */
#define FOR_TABLES(simd)                   \
    for (int t_ = 0; simd_names[t_]; t_++) \
        for (const struct simd *simd = simd_find(simd_names[t_]); simd; simd = NULL)
static const struct simd_type *type_of(const struct simd *simd, int i)
{
    const struct simd_type *const types[] = { &simd->f32, simd->bf16, simd->half, simd->single };
    return types[i];
}

#define FOR_TYPES(simd, type)      \
    for (int y_ = 0; y_ < 4; y_++) \
        for (const struct simd_type *type = type_of(simd, y_); type; type = NULL)

/* operand() returns the number that a packed operand holds for x. A packed operand is a matrix in the form that
 * products read. slack_of() returns the relative error of that number, which may be stored as a sum of rounded parts
 * (simd_split.h). */
static float operand(const struct simd_type *type, float x)
{
    return type->dtype == ATTN_F32 || type->parts > 1 ? x : simd_from_bf16(simd_to_bf16(x));
}

static double slack_of(const struct simd_type *type)
{
    return type->parts == 3 ? 0x1p-22 : type->parts == 2 ? 0x1p-16 : 0;
}

/* Returns the relative error that P and dS may have in the type in which products read them. */
static double precision_of(const struct simd_type *type)
{
    return type->dtype == ATTN_F32 || type->parts == 3 ? 4e-6 : type->parts == 2 ? 2e-5 : 0.0041;
}

/* Returns an element of a packed operand (a matrix in the form that products read): the sum of the parts into which it
 * was split. `at` is the index of the first part. */
static double element(const struct simd_type *type, const void *data, int64_t ld, int64_t at)
{
    double sum = 0;
    for (int p = 0; p < type->parts; p++) sum += simd_get_element(data, type->dtype, at + p * (ld / type->parts));
    return sum;
}

static int64_t b_at(const struct simd_type *type, int64_t ldb, int kk, int j)
{
    if (type->dtype == ATTN_F32) return j / 32 * ldb + (int64_t)kk * 32 + j % 32;
    return j / 32 * ldb + (int64_t)(kk / 2) * 64 + j % 32 * 2 + kk % 2;
}

static int pad_k(const struct simd_type *type, int k)
{
    return (k + type->k_multiple - 1) / type->k_multiple * type->k_multiple;
}

/* ---- Tests of loading and saving numbers ------------------------------------------------------------------------- */

static void test_every_number_of_a_dtype_loads_exactly_and_saves_as_itself(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    {
        for (size_t d = 0; d < ARRAY_SIZE(floating); d++) {
            const attn_dtype dtype = floating[d];
            const int n = dtype == ATTN_F32 ? 1000 : dtype == ATTN_F8E4M3 ? 256 : 65536;
            struct area from = area_new((size_t)n * dtype_bytes(dtype)),
                        back = area_new((size_t)n * dtype_bytes(dtype));
            struct area wide = area_new((size_t)n * 4);
            for (int i = 0; i < n; i++) {
                if (dtype == ATTN_F8E4M3) ((uint8_t *)from.data)[i] = (uint8_t)i;
                else if (dtype == ATTN_F32) floats(from)[i] = (float)uniform();
                else ((uint16_t *)from.data)[i] = (uint16_t)i;
            }
            simd->load(n, from.data, dtype, floats(wide));
            simd->save(n, floats(wide), back.data, dtype);
            for (int i = 0; i < n; i++) {
                double want;
                const int bits = dtype == ATTN_F8E4M3 ? i : i & 0xffff, fraction = dtype == ATTN_F16    ? 10
                                                                                   : dtype == ATTN_BF16 ? 7
                                                                                                        : 3;
                const int top = dtype == ATTN_F8E4M3 ? 7 : 15, bias = dtype == ATTN_F16    ? 15
                                                                      : dtype == ATTN_BF16 ? 127
                                                                                           : 7;
                const int exponent = (bits & ((1 << top) - 1)) >> fraction, rest = bits & ((1 << fraction) - 1);
                const int largest = (1 << (top - fraction)) - 1;
                if (dtype == ATTN_F32) want = floats(from)[i];
                else if (dtype == ATTN_F8E4M3 && (bits & 0x7f) == 0x7f) want = NAN;
                else if (dtype != ATTN_F8E4M3 && exponent == largest) want = rest ? NAN : INFINITY;
                else
                    want = exponent ? ldexp(1 + ldexp(rest, -fraction), exponent - bias)
                                    : ldexp(rest, 1 - bias - fraction);
                if (dtype != ATTN_F32 && bits >> top) want = -want;
                near_(floats(wide)[i], want, 0, simd->name, "load", i);
                if (isnan(want)) assert_true(isnan(simd_get_element(back.data, dtype, i)));
                else
                    assert_memory_equal(from.data + (size_t)i * dtype_bytes(dtype),
                                        back.data + (size_t)i * dtype_bytes(dtype), dtype_bytes(dtype));
            }
            area_free(&from), area_free(&back), area_free(&wide);
        }
    }
}

/* Tests numbers just below, at and just above the midpoint of two neighbouring numbers of the dtype. */
static void test_saving_rounds_to_nearest_even(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    {
        for (size_t d = 1; d < ARRAY_SIZE(floating); d++) {
            const attn_dtype dtype = floating[d];
            const int last = dtype == ATTN_F16 ? 0x7bff : dtype == ATTN_BF16 ? 0x7f7f : 0x7e;
            float x[6];
            char y[6 * 2];
            for (int bits = 0; bits < last; bits++) {
                const uint16_t pair[4] = { (uint16_t)bits, (uint16_t)(bits + 1) };
                const uint8_t small[8] = { (uint8_t)bits, (uint8_t)(bits + 1) };
                const void *both = dtype == ATTN_F8E4M3 ? (const void *)small : (const void *)pair;
                const float low = simd_get_element(both, dtype, 0), high = simd_get_element(both, dtype, 1);
                const float middle = (float)(((double)low + (double)high) / 2);
                const float want[6] = { low, bits & 1 ? high : low, high, -low, bits & 1 ? -high : -low, -high };
                x[0] = nextafterf(middle, low), x[1] = middle, x[2] = nextafterf(middle, high);
                for (int i = 0; i < 3; i++) x[3 + i] = -x[i];
                simd->save(6, x, y, dtype);
                for (int i = 0; i < 6; i++) {
                    if (simd_get_element(y, dtype, i) != want[i])
                        fail_msg("%s: %s of %.9g is %.9g, should be %.9g", simd->name,
                                 dtype == ATTN_F16    ? "f16"
                                 : dtype == ATTN_BF16 ? "bf16"
                                                      : "e4m3",
                                 (double)x[i], (double)simd_get_element(y, dtype, i), (double)want[i]);
                }
            }
            const float far[6] = { 1e30f, -1e30f, INFINITY, -INFINITY, NAN, 3e38f };
            simd->save(6, far, y, dtype);
            for (int i = 0; i < 6; i++) {
                const float got = simd_get_element(y, dtype, i);
                if (isnan(far[i])) assert_true(isnan(got));
                else if (dtype == ATTN_F8E4M3) assert_true(got == copysignf(448, far[i]));
                else if (dtype == ATTN_F16) assert_true(got == copysignf(INFINITY, far[i]));
                else assert_true(isinf(far[i]) ? got == far[i] : fabsf(got / far[i] - 1) < 0.004f);
            }
        }
    }
}

static void test_close_ends_rows(void **state)
{
    (void)state;
    enum { N = 1 << 18 };
    struct area m = area_new(N * 4), l = area_new(N * 4), inverse = area_new(N * 4), lse = area_new(N * 4);
    FOR_TABLES(simd)
    {
        static const float ranges[][2] = { { 1, 1.001f }, { 1, 2 }, { 1, 65536 }, { 1, 1e30f } };
        for (size_t range = 0; range < ARRAY_SIZE(ranges); range++) {
            double worst = 0;
            for (int i = 0; i < N; i++) {
                floats(l)[i] = ranges[range][0] + (ranges[range][1] - ranges[range][0]) * (float)i / N;
                floats(m)[i] = (float)(i % 7 - 3) * (float)(i % 1013);
            }
            simd->close(N, floats(m), floats(l), floats(inverse), floats(lse));
            for (int i = 0; i < N; i++) {
                const double part = log2(floats(l)[i]), want = ((double)floats(m)[i] + part) * M_LN2;
                const double room = (fabs((double)floats(m)[i]) + part) * M_LN2, error = fabs(floats(lse)[i] - want);
                if (error > 0 && error / room > worst) worst = error / room;
                near_(floats(inverse)[i], 1 / (double)floats(l)[i], 6e-8 / (double)floats(l)[i], simd->name, "inverse",
                      i);
            }
            if (worst > 3e-7)
                fail_msg("%s: lse is off by %.3g with l to %g", simd->name, worst, (double)ranges[range][1]);
        }
        const float m_of[6] = { -INFINITY, 3, 0, NAN, 2, INFINITY }, l_of[6] = { 0, 1, INFINITY, 1, NAN, NAN };
        const float inverses[6] = { 0, 1, 0, 1, NAN, NAN };
        const float lses[6] = { -INFINITY, (float)(3 * M_LN2), INFINITY, NAN, NAN, NAN };
        for (int n = 0; n <= 6; n++) {
            float got[2][7] = { { 77, 77, 77, 77, 77, 77, 77 }, { 77, 77, 77, 77, 77, 77, 77 } };
            simd->close(n, m_of, l_of, got[0], got[1]);
            for (int i = 0; i < n; i++) {
                near_(got[0][i], inverses[i], 0, simd->name, "inverse", i);
                near_(got[1][i], lses[i], 2e-7, simd->name, "lse", i);
            }
            assert_true(got[0][n] == 77 && got[1][n] == 77);
        }
    }
    area_free(&m), area_free(&l), area_free(&inverse), area_free(&lse);
}

static void test_exp2_is_within_2e_7_and_keeps_special_values(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    struct area x = area_new(N * 4), y = area_new(N * 4);
    FOR_TABLES(simd)
    {
        static const float ranges[][2] = { { -1, 1 }, { SIMD_EXP2_LEAST, 0 }, { 0, 127 }, { -0.02f, 0.02f } };
        for (size_t range = 0; range < ARRAY_SIZE(ranges); range++) {
            double worst = 0;
            for (int i = 0; i < N; i++)
                floats(x)[i] = ranges[range][0] + (ranges[range][1] - ranges[range][0]) * (float)i / N;
            simd->exp2(N, floats(x), floats(y));
            for (int i = 0; i < N; i++) {
                const double want = exp2(floats(x)[i]), error = fabs(floats(y)[i] / want - 1);
                if (error > worst) worst = error;
            }
            if (worst > 2e-7)
                fail_msg("%s: exp2 is off by %.3g in %g .. %g", simd->name, worst, (double)ranges[range][0],
                         (double)ranges[range][1]);
        }
        const float special[8] = { -INFINITY, INFINITY, NAN, 0, -151, -1e30f, 128, -1 };
        const float want[8] = { 0, INFINITY, NAN, 1, 0, 0, INFINITY, 0.5f };
        float got[8];
        simd->exp2(8, special, got);
        for (int i = 0; i < 8; i++) near_(got[i], want[i], 0, simd->name, "exp2", i);
        simd->exp2(3, special, got);
        assert_true(isnan(got[2]));
        for (float low = SIMD_EXP2_LEAST - 0.01f; low > -152; low -= 0.37f) {
            simd->exp2(1, &low, got);
            assert_true(got[0] == 0);
        }
    }
    area_free(&x), area_free(&y);
}

static void test_dropout_keeps_the_pairs_that_philox_says(void **state)
{
    (void)state;
    static const struct {
        uint64_t seed;
        int64_t head_index, i, group;
    } draws[] = {
        { 0, 0, 0, 0 },
        { UINT64_MAX, INT32_MAX, INT32_MAX, INT32_MAX / 8 },
        { UINT64_C(0x123456789abcdef0), 7, 1000000007, 12345 },
    };
    static const uint32_t thresholds[] = { 0, 1, 6554, 32768, 65535, 65536 };
    FOR_TABLES(simd)
    for (size_t d = 0; d < ARRAY_SIZE(draws); d++)
        for (size_t t = 0; t < ARRAY_SIZE(thresholds); t++) {
            float kept[SIMD_DROPS];
            simd->drop(draws[d].seed, draws[d].head_index, draws[d].i, draws[d].group, thresholds[t], kept);
            for (int j = 0; j < SIMD_DROPS; j++)
                near_(kept[j],
                      attn_dropout_keep(draws[d].seed, draws[d].head_index, draws[d].i, draws[d].group * 8 + j,
                                        thresholds[t]),
                      0, simd->name, "drop", j);
        }
}

/* ---- Tests of packed operands (matrices in the form that products read) and their products ----------------------- */

static void test_operands_have_the_forms_of_the_header(void **state)
{
    (void)state;
    FOR_TABLES(simd) FOR_TYPES(simd, type)
    {
        const attn_dtype kept = type->dtype;
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++)
            for (size_t b = 0; b < ARRAY_SIZE(sizes); b += 1 + a % 3)
                for (size_t d = 0; d < ARRAY_SIZE(floating); d++) {
                    const int rows = sizes[a], cols = sizes[b];
                    const int64_t stride = cols + 3;
                    struct area X = area_random(rows * stride, floating[d]);
                    for (int form = 0; form < 4; form++) {
                        const bool is_a = form < 2, transposed = form % 2;
                        const int k = is_a ? (transposed ? rows : cols) : (transposed ? cols : rows),
                                  other = rows + cols - k;
                        const int kp = pad_k(type, k), otherp = is_a ? other : (other + 31) / 32 * 32;
                        const int64_t ld = is_a ? simd_lda(type, k) : simd_ldb(type, k) + 64 * type->parts;
                        const int64_t elements = is_a ? ld * other : otherp / 32 * ld;
                        struct area Y = area_new((size_t)elements * (size_t)simd_element_bytes(type));
                        bool (*const pack[4])(int, int, const void *, attn_dtype, int64_t, void *,
                                              int64_t) = { type->pack_a, type->pack_at, type->pack_b, type->pack_bt };
                        assert_true(pack[form](rows, cols, X.data, floating[d], stride, Y.data, ld));
                        int64_t written = 0;
                        for (int o = 0; o < otherp; o++)
                            for (int kk = 0; kk < kp; kk++) {
                                const int64_t at = is_a ? o * ld + kk : b_at(type, ld, kk, o);
                                const int r = (form == 0 || form == 3) ? o : kk, c = (form == 0 || form == 3) ? kk : o;
                                const float want = r < rows && c < cols
                                                       ? operand(type,
                                                                 simd_get_element(X.data, floating[d], r * stride + c))
                                                       : 0.0f;
                                near_(element(type, Y.data, ld, at), want, slack_of(type) * fabsf(want), simd->name,
                                      form == 0   ? "pack_a"
                                      : form == 1 ? "pack_at"
                                      : form == 2 ? "pack_b"
                                                  : "pack_bt",
                                      at);
                                for (int p = 0; p < type->parts; p++) {
                                    simd_put_element(Y.data, kept, at + p * (ld / type->parts), -0.5f);
                                    written++;
                                }
                            }
                        for (int64_t i = 0; i < elements; i++) {
                            const uint16_t *bits = (const uint16_t *)Y.data;
                            if (simd_get_element(Y.data, kept, i) != -0.5f)
                                assert_int_equal(kept == ATTN_F32 ? bits[2 * i] : bits[i], 0xa5a5);
                            else written--;
                        }
                        assert_int_equal(written, 0);
                        /* The packing function must report an infinity or a NaN. */
                        const int64_t at = (int64_t)(rows / 2) * stride + cols - 1;
                        simd_put_element(X.data, floating[d], at,
                                         floating[d] == ATTN_F8E4M3 || form % 2 ? NAN : -INFINITY);
                        assert_false(pack[form](rows, cols, X.data, floating[d], stride, Y.data, ld));
                        simd_put_element(X.data, floating[d], at, 0.25f);
                        area_free(&Y);
                    }
                    area_free(&X);
                }
    }
}

struct product {
    int m, n, k;
    int64_t lda, ldb, ldc;
    struct area X, Y, A, B;
};

static struct product product_new(const struct simd_type *type, int m, int n, int k)
{
    struct product p = { m, n, k, simd_lda(type, k), simd_ldb(type, k), simd_ld(n, 4), { 0 }, { 0 }, { 0 }, { 0 } };
    p.X = area_random((int64_t)m * k, ATTN_F32), p.Y = area_random((int64_t)k * n, ATTN_F32);
    p.A = area_new((size_t)simd_a_bytes(type, m, p.lda)), p.B = area_new((size_t)simd_b_bytes(type, n, p.ldb));
    assert_true(type->pack_a(m, k, p.X.data, ATTN_F32, k, p.A.data, p.lda));
    assert_true(type->pack_b(k, n, p.Y.data, ATTN_F32, n, p.B.data, p.ldb));
    return p;
}

static void product_free(struct product *p)
{
    area_free(&p->X), area_free(&p->Y), area_free(&p->A), area_free(&p->B);
}

static void test_gemm_is_the_product(void **state)
{
    (void)state;
    FOR_TABLES(simd) FOR_TYPES(simd, type)
    {
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++)
            for (size_t b = 0; b < ARRAY_SIZE(sizes); b++)
                for (size_t c = a % 2; c < ARRAY_SIZE(sizes); c += 2) {
                    const int m = sizes[a], n = sizes[b], k = sizes[c];
                    if ((int64_t)m * n * k > 2000000) continue;
                    struct product p = product_new(type, m, n, k);
                    struct area C = area_new((size_t)(m * p.ldc * 4)), old = area_random(m * p.ldc, ATTN_F32);
                    float rescale[256];
                    for (int i = 0; i < m; i++) rescale[i] = i % 3 ? (float)uniform() : 1.0f;
                    /* for each element of the product: the sum of its terms, and the sum of their absolute values */
                    struct area sum = area_new((size_t)(m * n) * sizeof(double)), size = area_new(sum.bytes);
                    memset(sum.data, 0, sum.bytes);
                    memset(size.data, 0, size.bytes);
                    for (int i = 0; i < m; i++)
                        for (int j = 0; j < n; j++)
                            for (int kk = 0; kk < k; kk++) {
                                const double term = (double)operand(type, floats(p.X)[i * k + kk]) *
                                                    operand(type, floats(p.Y)[kk * n + j]);
                                ((double *)sum.data)[i * n + j] += term;
                                ((double *)size.data)[i * n + j] += fabs(term);
                            }
                    for (int mode = 0; mode < 3; mode++) {
                        if (mode) memcpy(C.data, old.data, (size_t)(m * p.ldc * 4));
                        else memset(C.data, 0xff, C.bytes); /* NaN: this memory must not be read */
                        type->gemm(m, n, k, p.A.data, p.lda, p.B.data, p.ldb, floats(C), p.ldc, mode > 0,
                                   mode == 2 ? rescale : NULL);
                        for (int i = 0; i < m; i++)
                            for (int64_t j = 0; j < p.ldc; j++) {
                                const float before = floats(old)[i * p.ldc + j];
                                if (j >= n) {
                                    const uint32_t untouched = mode ? simd_bits(before) : UINT32_MAX;
                                    assert_int_equal(simd_bits(floats(C)[i * p.ldc + j]), untouched);
                                    continue;
                                }
                                const double added = mode == 2 ? (double)before * rescale[i] : mode ? before : 0;
                                const double all = fabs(added) + ((const double *)size.data)[i * n + j];
                                near_(floats(C)[i * p.ldc + j], added + ((const double *)sum.data)[i * n + j],
                                      (1e-7 * sqrt(k + 2) + slack_of(type)) * all + 1e-12, simd->name, "gemm",
                                      i * p.ldc + j);
                            }
                    }
                    area_free(&C), area_free(&old), area_free(&sum), area_free(&size);
                    product_free(&p);
                }
        simd->leave();
    }
}

static void test_a_row_of_gemm_does_not_depend_on_its_neighbours(void **state)
{
    (void)state;
    enum { M = 70, N = 100, K = 96 };
    FOR_TABLES(simd) FOR_TYPES(simd, type)
    {
        struct product p = product_new(type, M, N, K);
        struct area all = area_random(M * p.ldc, ATTN_F32), some = area_new(M * (size_t)p.ldc * 4);
        memcpy(some.data, all.data, M * (size_t)p.ldc * 4);
        float rescale[M];
        for (int i = 0; i < M; i++) rescale[i] = (float)uniform();
        type->gemm(M, N, K, p.A.data, p.lda, p.B.data, p.ldb, floats(all), p.ldc, true, rescale);
        for (int i = 0, count = 1; i < M; i += count, count++) {
            if (count > M - i) count = M - i;
            /* A holds only `count` rows. Bytes after these rows may have any value. */
            struct area A = area_new((size_t)simd_a_bytes(type, count, p.lda));
            memcpy(A.data, p.A.data + i * p.lda * simd_element_bytes(type),
                   (size_t)(count * p.lda * simd_element_bytes(type)));
            type->gemm(count, N, K, A.data, p.lda, p.B.data, p.ldb, floats(some) + i * p.ldc, p.ldc, true, rescale + i);
            area_free(&A);
        }
        assert_memory_equal(all.data, some.data, M * (size_t)p.ldc * 4);
        memset(some.data, 0, M * (size_t)p.ldc * 4);
        memset(all.data, 0, M * (size_t)p.ldc * 4);
        const size_t e = (size_t)simd_element_bytes(type);
        type->gemm(M, N, K, p.A.data, p.lda, p.B.data, p.ldb, floats(all), p.ldc, false, NULL);
        for (int j = 0; j < N; j += 64)
            for (int kk = 0; kk < K; kk += 32)
                type->gemm(M, N - j < 64 ? N - j : 64, 32, p.A.data + (size_t)kk * e, p.lda,
                           p.B.data + ((size_t)(j / 32 * p.ldb) + (size_t)kk * 32) * e, p.ldb, floats(some) + j, p.ldc,
                           kk > 0, NULL);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                near_(floats(some)[i * p.ldc + j], floats(all)[i * p.ldc + j], 1e-5, simd->name, "part", i * p.ldc + j);
        area_free(&all), area_free(&some);
        product_free(&p);
        simd->leave();
    }
}

/* ---- Tests of the softmax ---------------------------------------------------------------------------------------- */

static void test_softmax_steps_give_the_softmax(void **state)
{
    (void)state;
    static const float scales[] = { 1.3f, -0.7f, 0.0f, 1.0f };
    FOR_TABLES(simd) FOR_TYPES(simd, type)
    {
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++)
            for (size_t b = 0; b < ARRAY_SIZE(sizes); b++)
                for (size_t v = 0; v < ARRAY_SIZE(scales); v++) {
                    const int rows = sizes[a], cols = sizes[b];
                    const float c = scales[v];
                    const int64_t ld = simd_ld(cols, 4), ldp = simd_lda(type, cols);
                    struct area S = area_new((size_t)(rows * ld * 4)),
                                P = area_new((size_t)simd_a_bytes(type, rows, ldp)),
                                drop = area_random(rows * ld, ATTN_F32);
                    float m[256], l[256], rescale[256];
                    double true_m[256], true_l[256];
                    for (int r = 0; r < rows; r++) m[r] = -INFINITY, l[r] = 0, true_m[r] = -INFINITY, true_l[r] = 0;
                    for (int step = 0; step < 3; step++) {
                        for (int r = 0; r < rows; r++)
                            for (int j = 0; j < cols; j++) {
                                float *s = floats(S) + r * ld + j;
                                *s = (float)(uniform() * 20);
                                if (c > 0 && ((step == 0 && r % 4 == 1) || r % 8 == 5 || uniform() < -0.8))
                                    *s = -INFINITY;
                            }
                        const bool any = type->softmax(rows, cols, floats(S), ld, c, m, l, rescale, P.data, ldp,
                                                       step == 2 ? floats(drop) : NULL, SIMD_EXP2_LEAST);
                        bool some = false;
                        for (int r = 0; r < rows; r++) {
                            const float *s = floats(S) + r * ld;
                            double max = true_m[r], sum = 0;
                            for (int j = 0; j < cols; j++) max = fmax(max, (double)s[j] * c);
                            const double base = isinf(max) ? 0 : max,
                                         factor = true_m[r] == max ? 1 : exp2(true_m[r] - base);
                            near_(m[r], max, 1e-6 * fabs(max), simd->name, "m", r);
                            near_(rescale[r], factor, 4e-6 * factor, simd->name, "rescale", r);
                            some |= rescale[r] != 1.0f;
                            for (int j = 0; j < pad_k(type, cols); j++) {
                                double p = j < cols ? exp2((double)s[j] * c - base) : 0;
                                sum += p;
                                if (step == 2 && j < cols) p *= floats(drop)[r * ld + j];
                                const double got = element(type, P.data, ldp, r * ldp + j);
                                if (j >= cols || isinf(s[j])) assert_true(got == 0);
                                near_(got, p, precision_of(type) * fabs(p) + 1e-36, simd->name, "P", r * ldp + j);
                            }
                            true_l[r] = true_l[r] * factor + sum;
                            true_m[r] = max;
                            near_(l[r], true_l[r], 4e-6 * true_l[r], simd->name, "l", r);
                        }
                        assert_int_equal(any, some);
                    }
                    area_free(&S), area_free(&P), area_free(&drop);
                }
    }
}

static void test_a_row_of_softmax_does_not_depend_on_its_neighbours(void **state)
{
    (void)state;
    enum { ROWS = 37, COLS = 100 };
    FOR_TABLES(simd) FOR_TYPES(simd, type)
    {
        const int64_t ld = simd_ld(COLS, 4), ldp = simd_lda(type, COLS);
        struct area S = area_random(ROWS * ld, ATTN_F32), P = area_new((size_t)simd_a_bytes(type, ROWS, ldp)),
                    p = area_new((size_t)simd_a_bytes(type, ROWS, ldp));
        float m[2][ROWS], l[2][ROWS], rescale[2][ROWS];
        for (int r = 0; r < ROWS; r++) m[0][r] = m[1][r] = (float)uniform(), l[0][r] = l[1][r] = 1;
        type->softmax(ROWS, COLS, floats(S), ld, 2.5f, m[0], l[0], rescale[0], P.data, ldp, NULL, SIMD_EXP2_LEAST);
        for (int r = 0; r < ROWS; r++) {
            type->softmax(1, COLS, floats(S) + r * ld, ld, 2.5f, m[1] + r, l[1] + r, rescale[1] + r,
                          p.data + r * ldp * simd_element_bytes(type), ldp, NULL, SIMD_EXP2_LEAST);
        }
        assert_memory_equal(m[0], m[1], sizeof m[0]);
        assert_memory_equal(l[0], l[1], sizeof l[0]);
        assert_memory_equal(rescale[0], rescale[1], sizeof l[0]);
        assert_memory_equal(P.data, p.data, (size_t)(ROWS * ldp * simd_element_bytes(type)));
        area_free(&S), area_free(&P), area_free(&p);
    }
}

static void test_a_nan_score_gives_a_nan_row_and_only_that(void **state)
{
    (void)state;
    enum { ROWS = 6, COLS = 70 };
    FOR_TABLES(simd) FOR_TYPES(simd, type) for (int place = 0; place < COLS; place += 23)
    {
        const int64_t ld = simd_ld(COLS, 4), ldp = simd_lda(type, COLS);
        struct area S = area_random(ROWS * ld, ATTN_F32), P = area_new((size_t)simd_a_bytes(type, ROWS, ldp));
        float m[ROWS], l[ROWS], rescale[ROWS];
        for (int r = 0; r < ROWS; r++) m[r] = -INFINITY, l[r] = 0;
        floats(S)[2 * ld + place] = NAN;
        type->softmax(ROWS, COLS, floats(S), ld, 1, m, l, rescale, P.data, ldp, NULL, SIMD_EXP2_LEAST);
        for (int r = 0; r < ROWS; r++) {
            assert_true(isnan(l[r]) == (r == 2));
            assert_true(isnan(element(type, P.data, ldp, r * ldp + place)) == (r == 2));
        }
        area_free(&S), area_free(&P);
    }
}

/* c * S must be rounded before the maximum is subtracted. A fused operation would round only the maximum, and overflow
 * with enormous scores. */
static void test_the_largest_of_enormous_scores_has_p_1(void **state)
{
    (void)state;
    enum { COLS = 70 };
    FOR_TABLES(simd) FOR_TYPES(simd, type)
    {
        const int64_t ld = simd_ld(COLS, 4), ldp = simd_lda(type, COLS);
        struct area S = area_random(ld, ATTN_F32), P = area_new((size_t)simd_a_bytes(type, 1, ldp));
        float m = -INFINITY, l = 0, rescale;
        for (int j = 0; j < COLS; j++) floats(S)[j] = (float)((j * 31 % COLS) * 1e34 + 1e30 * uniform());
        type->softmax(1, COLS, floats(S), ld, 0.7213475f, &m, &l, &rescale, P.data, ldp, NULL, SIMD_EXP2_LEAST);
        near_(l, 1, 0, simd->name, "l", 0);
        for (int j = 0; j < COLS; j++)
            near_(element(type, P.data, ldp, j), j * 31 % COLS == COLS - 1, 0, simd->name, "P", j);
        area_free(&S), area_free(&P);
    }
}

static void test_lse_of_4096_keys_is_within_2e_5(void **state)
{
    (void)state;
    enum { ROWS = 16, KEYS = 4096, TILE = 128 };
    static const double spreads[] = { 0.1, 4, 40 };
    FOR_TABLES(simd) FOR_TYPES(simd, type) for (size_t v = 0; v < ARRAY_SIZE(spreads); v++)
    {
        const int64_t ld = simd_ld(TILE, 4), ldp = simd_lda(type, TILE);
        struct area S = area_new(ROWS * (size_t)ld * 4), P = area_new((size_t)simd_a_bytes(type, ROWS, ldp));
        float m[ROWS], l[ROWS], rescale[ROWS];
        double max[ROWS], sum[ROWS];
        const double log2e = 1 / LN2;
        for (int r = 0; r < ROWS; r++) m[r] = -INFINITY, l[r] = 0, max[r] = -INFINITY, sum[r] = 0;
        for (int j0 = 0; j0 < KEYS; j0 += TILE) {
            for (int r = 0; r < ROWS; r++)
                for (int j = 0; j < TILE; j++) {
                    const double z = floats(S)[r * ld + j] = (float)(uniform() * spreads[v]);
                    if (z > max[r]) sum[r] *= exp(max[r] - z), max[r] = z;
                    sum[r] += exp(z - max[r]);
                }
            type->softmax(ROWS, TILE, floats(S), ld, (float)log2e, m, l, rescale, P.data, ldp, NULL, SIMD_EXP2_LEAST);
        }
        for (int r = 0; r < ROWS; r++)
            near_((m[r] + log2((double)l[r])) * LN2, max[r] + log(sum[r]), 1e-5, simd->name, "lse", r);
        area_free(&S), area_free(&P);
    }
}

/* ---- Tests of the gradient of a tile ----------------------------------------------------------------------------- */

static void test_gradient_of_a_tile(void **state)
{
    (void)state;
    FOR_TABLES(simd) FOR_TYPES(simd, type)
    {
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++)
            for (size_t b = 0; b < ARRAY_SIZE(sizes); b++)
                for (int options = 0; options < 8; options++) {
                    const int rows = sizes[a], cols = sizes[b];
                    const int64_t ld = simd_ld(cols, 4), lda = simd_lda(type, cols),
                                  ldb = simd_ldb(type, rows) + 64 * type->parts;
                    struct area S = area_random(rows * ld, ATTN_F32), dP = area_random(rows * ld, ATTN_F32),
                                cap = area_random(rows * ld, ATTN_F32);
                    struct area drop = area_random(rows * ld, ATTN_F32), dZ = area_new((size_t)(rows * ld * 4));
                    struct area P_b = area_new((size_t)simd_b_bytes(type, cols, ldb)),
                                dS_b = area_new((size_t)simd_b_bytes(type, cols, ldb));
                    struct area dS_a = area_new((size_t)simd_a_bytes(type, rows, lda));
                    float lse2[256], delta[256];
                    for (int r = 0; r < rows; r++) {
                        lse2[r] = r % 7 == 3 ? INFINITY : (float)uniform() + 1;
                        delta[r] = (float)uniform();
                        if (r % 5 == 1) floats(S)[r * ld + cols / 2] = -INFINITY, floats(dP)[r * ld + cols / 2] = NAN;
                    }
                    struct simd_gradient g = { .rows = rows,
                                               .least = SIMD_EXP2_LEAST,
                                               .cols = cols,
                                               .ld = ld,
                                               .S = floats(S),
                                               .dP = floats(dP),
                                               .c = 1.7f,
                                               .lse2 = lse2,
                                               .delta = delta,
                                               .drop_scale = 1.9f };
                    g.cap = options & 1 ? floats(cap) : NULL;
                    g.drop = options & 2 ? floats(drop) : NULL;
                    g.dZ = options & 4 ? floats(dZ) : NULL;
                    g.P_b = P_b.data, g.P_ldb = ldb, g.dS_a = dS_a.data, g.dS_lda = lda, g.dS_b = dS_b.data,
                    g.dS_ldb = ldb;
                    type->gradient(&g);
                    const double precision = precision_of(type);
                    for (int r = 0; r < pad_k(type, rows); r++)
                        for (int j = 0; j < (cols + 31) / 32 * 32; j++) {
                            /* slack: the allowed error of dS in a row where dP and delta cancel */
                            double P = 0, z = 0, dS = 0, slack = 0;
                            const bool inside = r < rows && j < cols;
                            const int64_t at = r * ld + j;
                            if (inside) {
                                const double M = g.drop ? g.drop[at] * (double)g.drop_scale : 1;
                                P = exp2((double)g.S[at] * g.c - lse2[r]);
                                z = P == 0 ? 0 : P * (M * g.dP[at] - delta[r]);
                                dS = g.cap ? z * g.cap[at] : z;
                                if (g.dZ) near_(g.dZ[at], z, 8e-6 * P, simd->name, "dZ", at);
                                slack = P == 0 ? 0 : 1e-6 * P * (fabs(M * g.dP[at]) + fabs(delta[r]));
                                P *= g.drop ? g.drop[at] : 1;
                            }
                            near_(element(type, P_b.data, ldb, b_at(type, ldb, r, j)), P, precision * fabs(P),
                                  simd->name, "P_b", at);
                            near_(element(type, dS_b.data, ldb, b_at(type, ldb, r, j)), dS,
                                  precision * fabs(dS) + slack, simd->name, "dS_b", at);
                            if (r < rows && j < pad_k(type, cols))
                                near_(element(type, dS_a.data, lda, r * lda + j), dS, precision * fabs(dS) + slack,
                                      simd->name, "dS_a", at);
                        }
                    /* The function must give the same dZ without the outputs P_b, dS_a and dS_b, and with dZ in the
                     * memory of dP. */
                    g.P_b = g.dS_a = g.dS_b = NULL;
                    g.dZ = floats(dP);
                    type->gradient(&g);
                    if (options & 4)
                        for (int r = 0; r < rows; r++)
                            assert_memory_equal(floats(dP) + r * ld, floats(dZ) + r * ld, (size_t)cols * 4);
                    area_free(&S), area_free(&dP), area_free(&cap), area_free(&drop), area_free(&dZ), area_free(&P_b),
                        area_free(&dS_b), area_free(&dS_a);
                }
    }
}

/* ---- Tests of scores, masks and options -------------------------------------------------------------------------- */

static void test_score_scales_caps_adds_and_hides(void **state)
{
    (void)state;
    const double log2e = 1 / LN2;
    FOR_TABLES(simd)
    {
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++)
            for (int options = 0; options < 128; options += 1 + (int)a % 2) {
                const int rows = 1 + (int)a, cols = sizes[a];
                const int64_t ld = simd_ld(cols, 4), stride = cols + 5;
                struct area S = area_random(rows * ld, ATTN_F32), before = area_new((size_t)(rows * ld * 4)),
                            cap = area_new((size_t)(rows * ld * 4));
                struct simd_score how = { .scale = options % 3 ? 12.5f : -0.25f, .row0 = 40 };
                how.bias_dtype = floating[a % 3];
                struct area bias = area_random(rows * stride, how.bias_dtype), keep = area_new((size_t)(rows * stride));
                int lo[16], hi[16];
                int32_t hide[4][256];
                for (int r = 0; r < rows; r++)
                    lo[r] = (int)(uniform() * cols), hi[r] = r % 4 == 3   ? INT32_MIN
                                                             : r % 4 == 2 ? INT32_MAX
                                                                          : cols / 2 + (int)(uniform() * cols);
                for (int64_t i = 0; i < rows * stride; i++) keep.data[i] = uniform() > -0.5;
                for (int x = 0; x < 4; x++)
                    for (int j = 0; j < cols; j++) hide[x][j] = 40 + (int)(uniform() * 12);
                if (options & 1) how.softcap = 5.0f, how.cap = floats(cap);
                if (options & 2) how.bias = bias.data, how.bias_stride = options & 4 ? 0 : stride;
                if (options & 8) how.slope = 0.125f, how.distance = 3 - cols / 2;
                if (options & 16) how.keep = (const uint8_t *)keep.data, how.keep_stride = options & 4 ? stride : 0;
                if (options & 32) how.lo = lo, how.hi = hi;
                if (options & 64) {
                    for (int x = 0; x < 2; x++) how.hide_lo[x] = hide[2 * x], how.hide_hi[x] = hide[2 * x + 1];
                }
                if (how.lo && lo[0] > 0) floats(S)[0] = NAN;
                memcpy(before.data, S.data, (size_t)(rows * ld * 4));
                simd->score(rows, cols, floats(S), ld, &how);
                for (int r = 0; r < rows; r++)
                    for (int j = 0; j < cols; j++) {
                        const double s = (double)floats(before)[r * ld + j] * how.scale;
                        double t = how.softcap > 0 ? how.softcap * tanh(s / how.softcap) : s, slack = 5e-7 * fabs(t);
                        if (how.softcap > 0 && !isnan(s))
                            near_(floats(cap)[r * ld + j], 1 - pow(tanh(s / how.softcap), 2), 1e-6, simd->name, "cap",
                                  r * ld + j);
                        if (how.bias) t += simd_get_element(bias.data, how.bias_dtype, r * how.bias_stride + j);
                        if (how.slope != 0) t -= how.slope * fabs((double)(how.distance + r - j));
                        bool hidden = how.keep && !keep.data[r * how.keep_stride + j];
                        hidden |= how.lo && (j < lo[r] || j >= hi[r]);
                        for (int x = 0; x < 2; x++)
                            hidden |= how.hide_lo[x] && hide[2 * x][j] <= 40 + r && 40 + r < hide[2 * x + 1][j];
                        slack += 3e-7 * (fabs(t) + fabs(s) * (how.softcap <= 0) + 10 * (how.slope != 0));
                        near_(floats(S)[r * ld + j], hidden ? -INFINITY : t * log2e, slack * log2e, simd->name, "score",
                              r * ld + j);
                    }
                area_free(&S), area_free(&before), area_free(&cap), area_free(&bias), area_free(&keep);
            }
    }
}

static void test_hide_leaves_what_a_row_sees_and_nothing_else(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    {
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++) {
            const int rows = 9, cols = sizes[a];
            const int64_t ld = simd_ld(cols, 4);
            struct area S = area_random(rows * ld, ATTN_F32), before = area_new((size_t)(rows * ld * 4));
            int lo[9], hi[9];
            for (int r = 0; r < rows; r++) {
                lo[r] = r == 0 ? 0 : (int)((uniform() + 1) / 2 * cols);
                hi[r] = r == 0 ? cols : r == 1 ? lo[r] : lo[r] + (int)((uniform() + 1) / 2 * (cols - lo[r]));
            }
            floats(S)[ld] = NAN; /* row 1 sees no key, so its scores do not matter */
            memcpy(before.data, S.data, (size_t)(rows * ld * 4));
            simd->hide(rows, cols, floats(S), ld, lo, hi);
            for (int r = 0; r < rows; r++) {
                for (int j = 0; j < ld; j++) {
                    const bool hidden = j < cols && (j < lo[r] || j >= hi[r]);
                    near_(floats(S)[r * ld + j], hidden ? -INFINITY : floats(before)[r * ld + j], 0, simd->name, "hide",
                          r * ld + j);
                }
            }
            area_free(&S), area_free(&before);
        }
    }
}

static void test_a_capped_score_is_within_1e_6_of_itself(void **state)
{
    (void)state;
    enum { N = 4096 };
    FOR_TABLES(simd) for (float softcap = 0.5f; softcap < 100; softcap *= 3)
    {
        struct area S = area_new(N * 4);
        struct simd_score how = { .scale = 1, .softcap = softcap };
        static double want[N];
        for (int i = 0; i < N; i++) {
            const double x = pow(10, 8 * uniform() - 5) * (i % 2 ? 1 : -1);
            floats(S)[i] = (float)x;
            want[i] = softcap * tanh(floats(S)[i] / (double)softcap) / LN2;
        }
        simd->score(1, N, floats(S), N, &how);
        for (int i = 0; i < N; i++) near_(floats(S)[i], want[i], 1e-6 * fabs(want[i]), simd->name, "capped", i);
        area_free(&S);
    }
}

/* ---- Tests of functions for rows of any dtype -------------------------------------------------------------------- */

static void test_decode_kernels(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    for (size_t d = 0; d < ARRAY_SIZE(floating); d++)
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++)
            for (int nq = 1; nq < 7; nq += 1 + (int)a % 3) {
                const attn_dtype dtype = floating[d];
                const int dim = sizes[a], n = sizes[(a * 5 + 3) % ARRAY_SIZE(sizes)];
                const int64_t stride = dim + 9, ldq = dim + 1, lds = n + 2;
                struct area q = area_random(nq * ldq, ATTN_F32), K = area_random(n * stride, dtype),
                            S = area_new((size_t)(nq * lds) * 4);
                struct area O = area_random(nq * ldq, ATTN_F32), old = area_new((size_t)(nq * ldq) * 4),
                            one = area_new((size_t)lds * 4);
                simd->dots(nq, n, dim, floats(q), ldq, K.data, dtype, stride, floats(S), lds);
                for (int r = 0; r < nq; r++) {
                    for (int j = 0; j < n; j++) {
                        double want = 0;
                        for (int c = 0; c < dim; c++)
                            want += (double)floats(q)[r * ldq + c] * simd_get_element(K.data, dtype, j * stride + c);
                        near_(floats(S)[r * lds + j], want, 2e-6 * sqrt(dim), simd->name, "dots", r * lds + j);
                    }
                    simd->dots(1, n, dim, floats(q) + r * ldq, ldq, K.data, dtype, stride, floats(one), lds);
                    /* The result must not depend on how many queries are computed together. */
                    assert_memory_equal(one.data, floats(S) + r * lds, (size_t)n * 4);
                }
                /* axpys() adds S[r][j] * K[j] to row r of O. If S[r][j] is 0 for every r, it does not read row j of
                 * K. */
                for (int j = 0; j < n; j++) {
                    const bool skipped = j % 11 == 4;
                    for (int r = 0; r < nq; r++) floats(S)[r * lds + j] = skipped ? 0.0f : (float)uniform();
                    if (skipped)
                        for (int c = 0; c < dim; c++) simd_put_element(K.data, dtype, j * stride + c, NAN);
                }
                memcpy(old.data, O.data, (size_t)(nq * ldq) * 4);
                simd->axpys(nq, n, dim, floats(S), lds, K.data, dtype, stride, floats(O), ldq);
                for (int r = 0; r < nq; r++)
                    for (int c = 0; c < dim; c++) {
                        double want = floats(old)[r * ldq + c];
                        for (int j = 0; j < n; j++)
                            if (j % 11 != 4)
                                want += (double)floats(S)[r * lds + j] *
                                        simd_get_element(K.data, dtype, j * stride + c);
                        near_(floats(O)[r * ldq + c], want, 2e-6 * sqrt(n), simd->name, "axpys", r * ldq + c);
                    }
                area_free(&q), area_free(&K), area_free(&S), area_free(&O), area_free(&old), area_free(&one);
            }
}

static void test_what_finds_and_mends_rows_beyond_float32(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    for (size_t d = 0; d < ARRAY_SIZE(floating); d++)
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++) {
            const attn_dtype dtype = floating[d];
            const int dim = sizes[a], n = sizes[(a * 5 + 3) % ARRAY_SIZE(sizes)];
            const int64_t stride = dim + 9;
            struct area q = area_random(dim, ATTN_F32), K = area_random(n * stride, dtype),
                        S = area_new((size_t)n * sizeof(double)), X = area_random(n * stride, ATTN_F32);
            float largest = 0;
            simd->dots_exact(n, dim, floats(q), K.data, dtype, stride, (double *)S.data);
            for (int j = 0; j < n; j++) {
                double want = 0;
                for (int c = 0; c < dim; c++) {
                    const float k = simd_get_element(K.data, dtype, j * stride + c);
                    want += (double)floats(q)[c] * k;
                    largest = fmaxf(largest, fabsf(k));
                }
                near_(((double *)S.data)[j], want, 1e-13, simd->name, "dots_exact", j);
            }
            assert_true(simd->most(n, dim, K.data, dtype, stride) == largest);
            assert_true(simd->all_finite(n, dim, floats(X), stride));
            if (n > 0 && dim > 0) {
                const int64_t at = (n - 1) * stride + dim - 1;
                simd_put_element(K.data, dtype, at, NAN);
                assert_true(simd->most(n, dim, K.data, dtype, stride) == INFINITY);
                floats(X)[at] = a % 2 ? INFINITY : NAN;
                assert_false(simd->all_finite(n, dim, floats(X), stride));
            }
            area_free(&q), area_free(&K), area_free(&S), area_free(&X);
        }
}

static void test_stores_scale_and_transpose(void **state)
{
    (void)state;
    FOR_TABLES(simd)
    for (size_t d = 0; d < ARRAY_SIZE(floating); d++)
        for (size_t a = 0; a < ARRAY_SIZE(sizes); a++)
            for (int options = 0; options < 4; options++) {
                const attn_dtype dtype = floating[d];
                const int rows = sizes[a], cols = sizes[(a * 7 + 2) % ARRAY_SIZE(sizes)];
                const bool transposed = options & 1;
                const int64_t ldx = (transposed ? rows : cols) + 4, stride = cols + 2;
                struct area X = area_random((transposed ? cols : rows) * ldx, ATTN_F32),
                            Y = area_new((size_t)(rows * stride) * dtype_bytes(dtype)),
                            Z = area_random(rows * stride, ATTN_F16);
                float row_scale[256], sums[256];
                for (int r = 0; r < rows; r++) row_scale[r] = r % 5 == 2 ? 0.0f : (float)uniform();
                if (options & 2 && rows > 2) floats(X)[transposed ? 2 : 2 * ldx] = NAN;
                (transposed ? simd->store_t : simd->store)(rows, cols, floats(X), ldx, -3.5f,
                                                           options & 2 ? row_scale : NULL, Y.data, dtype, stride);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < cols; c++) {
                        const float scale = options & 2 ? -3.5f * row_scale[r] : -3.5f;
                        const float x = floats(X)[transposed ? c * ldx + r : r * ldx + c];
                        float want;
                        simd_put_element(&want, dtype, 0, options & 2 && row_scale[r] == 0 ? 0.0f : x * scale);
                        near_(simd_get_element(Y.data, dtype, r * stride + c), simd_get_element(&want, dtype, 0), 0,
                              simd->name, "store", r * stride + c);
                    }
                simd->row_dots(rows, cols, Y.data, dtype, stride, Z.data,
                               options             ? ATTN_F16
                               : dtype == ATTN_F16 ? ATTN_F16
                                                   : ATTN_BF16,
                               stride, sums);
                if (options)
                    for (int r = 0; r < rows; r++) {
                        double want = 0;
                        for (int c = 0; c < cols; c++)
                            want += (double)simd_get_element(Y.data, dtype, r * stride + c) *
                                    simd_get_element(Z.data, ATTN_F16, r * stride + c);
                        near_(sums[r], want, 1e-5 * sqrt(cols), simd->name, "row_dots", r);
                    }
                area_free(&X), area_free(&Y), area_free(&Z);
            }
}

static void test_tables_are_found_by_name(void **state)
{
    (void)state;
    assert_string_equal(simd_find("portable")->name, "portable");
    assert_null(simd_find("sse9"));
    assert_non_null(simd_find(simd_get()->name));
    for (int i = 0; simd_names[i]; i++) {
        const struct simd *simd = simd_find(simd_names[i]);
        if (!simd) continue;
        assert_string_equal(simd->name, simd_names[i]);
        assert_ptr_equal(simd_type_for(simd, ATTN_F8E4M3), &simd->f32);
        assert_ptr_equal(simd_type_for(simd, ATTN_F16), simd->half ? simd->half : &simd->f32);
        assert_ptr_equal(simd_type_for(simd, ATTN_F32), simd->single ? simd->single : &simd->f32);
        assert_ptr_equal(simd_type_for(simd, ATTN_BF16), simd->bf16 ? simd->bf16 : &simd->f32);
        print_message("  %s is tested\n", simd->name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables_are_found_by_name),
        cmocka_unit_test(test_every_number_of_a_dtype_loads_exactly_and_saves_as_itself),
        cmocka_unit_test(test_saving_rounds_to_nearest_even),
        cmocka_unit_test(test_close_ends_rows),
        cmocka_unit_test(test_exp2_is_within_2e_7_and_keeps_special_values),
        cmocka_unit_test(test_dropout_keeps_the_pairs_that_philox_says),
        cmocka_unit_test(test_operands_have_the_forms_of_the_header),
        cmocka_unit_test(test_gemm_is_the_product),
        cmocka_unit_test(test_a_row_of_gemm_does_not_depend_on_its_neighbours),
        cmocka_unit_test(test_softmax_steps_give_the_softmax),
        cmocka_unit_test(test_a_row_of_softmax_does_not_depend_on_its_neighbours),
        cmocka_unit_test(test_a_nan_score_gives_a_nan_row_and_only_that),
        cmocka_unit_test(test_the_largest_of_enormous_scores_has_p_1),
        cmocka_unit_test(test_lse_of_4096_keys_is_within_2e_5),
        cmocka_unit_test(test_gradient_of_a_tile),
        cmocka_unit_test(test_score_scales_caps_adds_and_hides),
        cmocka_unit_test(test_hide_leaves_what_a_row_sees_and_nothing_else),
        cmocka_unit_test(test_a_capped_score_is_within_1e_6_of_itself),
        cmocka_unit_test(test_decode_kernels),
        cmocka_unit_test(test_what_finds_and_mends_rows_beyond_float32),
        cmocka_unit_test(test_stores_scale_and_transpose),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
