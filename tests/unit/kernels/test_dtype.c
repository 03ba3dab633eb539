/* test_dtype.c: tests the conversion of every bit pattern of the small types in both directions. Tests the rounding
 * of ties, of limits, and of doubles that rounding in two steps would get wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"

/* Returns the value of a floating-point number of 8 or 16 bits, by the definition of its format. `magnitude` has the
 * bits without the sign. */
static double value_of(unsigned magnitude, int mantissa, int bias)
{
    const int exponent = (int)(magnitude >> mantissa);
    const double fraction = (double)(magnitude & ((1u << mantissa) - 1)) / (double)(1u << mantissa);
    return exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias);
}

struct format {
    attn_dtype dtype;
    int bits, mantissa, bias;
    unsigned largest; /* bit pattern of the largest finite number */
    bool infinity;
};
static const struct format formats[] = {
    { ATTN_F16, 16, 10, 15, 0x7bff, true },
    { ATTN_BF16, 16, 7, 127, 0x7f7f, true },
    { ATTN_F8E4M3, 8, 3, 7, 0x7e, false },
};

union element {
    uint32_t any;
    uint16_t half;
    uint8_t byte;
};

static double widen(const struct format *f, unsigned code)
{
    const union element x = { .any = code };
    return attn_load(f->dtype, &x, 0);
}

static unsigned narrow(const struct format *f, double x)
{
    union element code = { .any = 0 };
    attn_store(f->dtype, &code, 0, x);
    return f->bits == 16 ? code.half : code.byte;
}

static void test_every_pattern_widens_exactly_and_comes_back(void **state)
{
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(formats); n++) {
        const struct format *f = &formats[n];
        const unsigned sign = 1u << (f->bits - 1);
        for (unsigned code = 0; code < sign * 2; code++) {
            const unsigned magnitude = code & ~sign;
            const double x = widen(f, code);
            if (magnitude > f->largest && !(f->infinity && magnitude == f->largest + 1)) {
                assert_true(isnan(x));
                assert_true(isnan(widen(f, narrow(f, x))));
                continue;
            }
            if (magnitude > f->largest) assert_true(isinf(x));
            else assert_true(fabs(x) == value_of(magnitude, f->mantissa, f->bias));
            assert_true(!signbit(x) == !(code & sign));
            if (narrow(f, x) != code)
                fail_msg("%s: %g comes back as %#x, not %#x", attn_dtype_name(f->dtype), x, narrow(f, x), code);
        }
    }
}

static void test_narrowing_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(formats); n++) {
        const struct format *f = &formats[n];
        for (unsigned code = 0; code < f->largest; code++) {
            const double low = value_of(code, f->mantissa, f->bias), high = value_of(code + 1, f->mantissa, f->bias);
            /* The midpoint of two numbers needs one more bit than the format has, and double has many more. */
            const double tie = low + (high - low) / 2;
            const unsigned even = code & 1 ? code + 1 : code, sign = 1u << (f->bits - 1);
            assert_int_equal(narrow(f, tie), even);
            assert_int_equal(narrow(f, -tie), even | sign);
            assert_int_equal(narrow(f, nextafter(tie, 0)), code);
            assert_int_equal(narrow(f, nextafter(tie, INFINITY)), code + 1);
        }
    }
}

static void test_the_ends_of_the_range(void **state)
{
    (void)state;
    assert_int_equal(attn_f16_from_double(65519.999), 0x7bff);
    assert_int_equal(attn_f16_from_double(65520), 0x7c00);
    assert_int_equal(attn_f16_from_double(-1e300), 0xfc00);
    assert_int_equal(attn_f16_from_double(0x1p-25), 0);
    assert_int_equal(attn_f16_from_double(0x1.8p-25), 1);
    assert_int_equal(attn_bf16_from_double(3.4e38), 0x7f80);
    assert_int_equal(attn_bf16_from_double(-INFINITY), 0xff80);
    assert_int_equal(attn_e4m3_from_double(448), 0x7e);
    assert_int_equal(attn_e4m3_from_double(1000), 0x7e);
    assert_int_equal(attn_e4m3_from_double(-INFINITY), 0xfe);
    assert_int_equal(attn_e4m3_from_double(NAN), 0x7f);
    assert_int_equal(attn_e4m3_from_double(0x1p-10), 0);
    assert_int_equal(attn_e4m3_from_double(0x1.1p-10), 1);
    assert_int_equal(attn_e4m3_from_double(-0.0), 0x80);
    assert_int_equal(attn_f16_from_double(-0.0), 0x8000);
    assert_int_equal(attn_f16_from_double(5e-324), 0);
}

static void test_bf16_from_float_and_from_double_agree(void **state)
{
    struct rng r = { 5 };
    (void)state;
    for (int n = 0; n < 2000000; n++) {
        const float x = attn_f32_from_bits((uint32_t)rng_next(&r));
        if (isnan(x)) assert_true(isnan(attn_bf16_to_f32(attn_bf16_from_f32(x))));
        else if (attn_bf16_from_f32(x) != attn_bf16_from_double(x))
            fail_msg("%a: %#x and %#x", (double)x, attn_bf16_from_f32(x), attn_bf16_from_double(x));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_pattern_widens_exactly_and_comes_back),
        cmocka_unit_test(test_narrowing_rounds_to_nearest_even),
        cmocka_unit_test(test_the_ends_of_the_range),
        cmocka_unit_test(test_bf16_from_float_and_from_double_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
