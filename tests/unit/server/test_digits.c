/* test_digits.c: numbers as text without printf: the same text that printf would write. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "../testing.h"
#include "server/base/digits.h"

static void test_whole_numbers(void **state)
{
    static const uint64_t numbers[] = { 0, 7, 10, 999, 1000, 131248, 4294967296, UINT64_MAX };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        char got[DIGITS_MAX + 1], want[32];
        *digits_put(got, numbers[i]) = '\0';
        snprintf(want, sizeof want, "%" PRIu64, numbers[i]);
        assert_string_equal(got, want);
    }
}

static void test_milliseconds_have_three_decimals_and_are_never_negative(void **state)
{
    static const struct {
        int64_t ns;
        const char *text;
    } cases[] = { { 0, "0.000" },
                  { 999, "0.000" },
                  { 1000, "0.001" },
                  { 12345678, "12.345" },
                  { 1000000000, "1000.000" },
                  { -5, "0.000" },
                  { INT64_MAX, "9223372036854.775" } };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char got[DIGITS_MAX + 1];
        *digits_put_ms(got, cases[i].ns) = '\0';
        assert_string_equal(got, cases[i].text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_numbers),
        cmocka_unit_test(test_milliseconds_have_three_decimals_and_are_never_negative),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
