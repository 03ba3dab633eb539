/* test_text.c: tests every limit and every failure of text.c. It includes text.c, so that it can make allocations
 * fail. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../testing.h"

static bool memory_is_short;
static void *short_realloc(void *at, size_t bytes)
{
    return memory_is_short ? NULL : realloc(at, bytes);
}
#define realloc short_realloc
#include "text/text.c"
#undef realloc

/* ---- Tests of building texts ------------------------------------------------------------------------------------- */

static void test_a_buffer_holds_its_bytes_and_a_nul_and_not_one_more(void **state)
{
    char buffer[9] = "########";
    struct text t = text_in(buffer, 8);
    (void)state;
    assert_string_equal(buffer, "");
    text_put(&t, "abcd", 4);
    text_put_string(&t, "ef");
    text_put_char(&t, 'g');
    assert_int_equal(t.failure, TEXT_FINE);
    assert_int_equal(t.used, 7);
    assert_string_equal(t.at, "abcdefg");
    text_put_char(&t, 'h');
    assert_int_equal(t.failure, TEXT_FULL);
    assert_int_equal(t.used, 7);
    assert_string_equal(t.at, "abcdefg");
    assert_int_equal(buffer[8], '\0');
}

static void test_nothing_follows_a_piece_that_did_not_fit(void **state)
{
    char buffer[8];
    struct text t = text_in(buffer, sizeof buffer);
    (void)state;
    text_put_string(&t, "abc");
    text_put_string(&t, "12345");
    text_put_char(&t, 'd'); /* would fit */
    text_put(&t, "", 0);
    text_printf(&t, "%d", 1);
    text_put_number(&t, 1);
    text_put_ms(&t, 1);
    text_put_three(&t, 1);
    text_put_double(&t, 1);
    text_put_json(&t, "e", 9);
    assert_int_equal(t.failure, TEXT_FULL);
    assert_string_equal(t.at, "abc");
    assert_int_equal(t.used, 3);
}

static void test_a_buffer_of_no_bytes_is_full_and_not_touched(void **state)
{
    char byte = '#';
    struct text t = text_in(&byte, 0), none = text_in(NULL, 0);
    (void)state;
    text_put(&t, "", 0);
    text_printf(&t, "%s", "");
    text_printf(&none, "x");
    assert_int_equal(t.failure, TEXT_FULL);
    assert_int_equal(none.failure, TEXT_FULL);
    assert_int_equal(byte, '#');
}

static void test_printf_is_whole_or_not_at_all(void **state)
{
    char buffer[8];
    struct text t = text_in(buffer, sizeof buffer);
    (void)state;
    text_printf(&t, "%d-%s", 12, "abcd");
    assert_int_equal(t.failure, TEXT_FINE);
    assert_string_equal(t.at, "12-abcd");
    t = text_in(buffer, sizeof buffer);
    text_put_string(&t, "ab");
    text_printf(&t, "%d", 123456);
    assert_int_equal(t.failure, TEXT_FULL);
    assert_string_equal(t.at, "ab");
    assert_int_equal(t.used, 2);
}

static void test_a_growing_text_grows_to_its_limit(void **state)
{
    static const size_t limits[] = { 0, 1, 1023, 1024, 1025, 5000, 100000 };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(limits); i++)
        for (size_t piece = 1; piece <= 1000; piece += 333) {
            struct text t = text_growing(limits[i]);
            char bytes[1000];
            size_t length = 99, wanted = limits[i] / piece * piece;
            memset(bytes, 'x', sizeof bytes);
            while (t.used < wanted) text_put(&t, bytes, piece);
            assert_int_equal(t.failure, TEXT_FINE);
            assert_int_equal(t.used, wanted);
            assert_true(t.size <= limits[i] + 1);
            if (wanted > 0) assert_int_equal(strlen(t.at), wanted);
            text_put(&t, bytes, piece);
            assert_int_equal(t.failure, TEXT_FULL);
            assert_int_equal(t.used, wanted);
            assert_null(text_take(&t, &length));
            assert_int_equal(t.used, 0);
            assert_int_equal(t.failure, TEXT_FINE); /* usable again */
        }
}

static void test_what_was_built_is_given_away(void **state)
{
    struct text t = text_growing(4000);
    size_t length = 99;
    char *taken = text_take(&t, &length);
    (void)state;
    assert_string_equal(taken, "");
    assert_int_equal(length, 0);
    free(taken);
    for (int i = 0; i < 1000; i++) text_printf(&t, "%03d,", i);
    taken = text_take(&t, &length);
    assert_int_equal(length, 4000);
    assert_int_equal(strlen(taken), 4000);
    assert_memory_equal(taken + 2000, "500,501,", 8);
    free(taken);
    text_put_string(&t, "left behind");
    text_free(&t);
    assert_null(t.at);
    text_free(&t);
}

static void test_a_text_without_memory_says_so_and_stays_as_it_is(void **state)
{
    struct text t = text_growing(100000);
    size_t length;
    (void)state;
    memory_is_short = true;
    text_put_string(&t, "x");
    assert_int_equal(t.failure, TEXT_NO_MEMORY);
    assert_null(t.at);
    assert_null(text_take(&t, &length));
    memory_is_short = false;
    text_put_string(&t, "fits the first piece of memory");
    memory_is_short = true;
    for (int i = 0; i < 100; i++) text_printf(&t, "%0100d", i);
    assert_int_equal(t.failure, TEXT_NO_MEMORY);
    assert_int_equal(t.used, 30 + 900);
    assert_int_equal(strlen(t.at), t.used);
    memory_is_short = false;
    text_put_string(&t, "too late");
    assert_int_equal(t.used, 30 + 900);
    assert_null(text_take(&t, &length));
}

static void test_strings_in_json_are_escaped_and_are_utf8(void **state)
{
    static const struct {
        const char *string, *json;
        size_t room;
    } cases[] = {
        { "plain", "plain", 99 },
        { "a\"b\\c/", "a\\\"b\\\\c/", 99 },
        { "\x01\n\x1f\x7f", "\\u0001\\u000a\\u001f\\u007f", 99 },
        { "\u00e9\u20ac\U0001f600", "\u00e9\u20ac\U0001f600", 99 },
        { "a\x80z\xc3", "a?z?", 99 },
        { "\xed\xa0\x80", "???", 99 }, /* a surrogate */
        { "abc", "ab", 2 },
        { "a\u20ac", "a", 3 }, /* a text is not cut inside a character */
        { "a\u20ac", "a\u20ac", 4 },
        { "ab\"", "ab", 3 }, /* a text is not cut inside an escape */
        { "ab\n", "ab", 7 },
        { "x", "", 0 },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char buffer[64];
        struct text t = text_in(buffer, sizeof buffer);
        text_put_json(&t, cases[i].string, cases[i].room);
        assert_string_equal(buffer, cases[i].json);
        assert_int_equal(t.failure, TEXT_FINE);
    }
}

/* ---- Tests of numbers in texts ----------------------------------------------------------------------------------- */

static void test_whole_numbers_are_those_of_printf(void **state)
{
    static const uint64_t numbers[] = { 0, 7, 10, 999, 1000, 131248, 4294967296, UINT64_MAX };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        char got[TEXT_DIGITS + 1], want[32];
        struct text t = text_in(got, sizeof got);
        text_put_number(&t, numbers[i]);
        snprintf(want, sizeof want, "%" PRIu64, numbers[i]);
        assert_string_equal(got, want);
    }
}

static void test_three_digits_are_three(void **state)
{
    (void)state;
    for (unsigned x = 0; x < 1000; x++) {
        char got[8], want[8];
        struct text t = text_in(got, sizeof got);
        text_put_three(&t, x);
        snprintf(want, sizeof want, "%03u", x);
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
        char got[32];
        struct text t = text_in(got, sizeof got);
        text_put_ms(&t, cases[i].ns);
        assert_string_equal(got, cases[i].text);
    }
}

static void test_doubles_read_back_as_themselves(void **state)
{
    static const struct {
        double x;
        const char *text;
    } cases[] = {
        { 0, "0" },
        { 3, "3" },
        { -0.25, "-0.25" },
        { 0.1, "0.1" },
        { 1e6, "1000000" },
        { 1099511627776, "1099511627776" },
        { 1e22, "1e+22" },
        { 0.0001, "0.0001" },
        { 13.1072, "13.1072" },
        { 0.1 + 0.2, "0.30000000000000004" },
        { DBL_MAX, "1.7976931348623157e+308" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char got[32];
        struct text t = text_in(got, sizeof got);
        text_put_double(&t, cases[i].x);
        assert_string_equal(got, cases[i].text);
    }
    struct rng r = { 7 };
    for (int i = 0; i < 20000; i++) {
        char got[32];
        struct text t = text_in(got, sizeof got);
        const double x = ldexp(rng_normal(&r), (int)(rng_next(&r) % 2000) - 1000);
        text_put_double(&t, x);
        assert_true(strtod(got, NULL) == x);
    }
}

static void test_decimal_digits_are_read_up_to_64_bits(void **state)
{
    static const struct {
        const char *text;
        bool good;
        uint64_t x;
        const char *rest;
    } cases[] = {
        { "0", true, 0, "" },
        { "007", true, 7, "" },
        { "12K", true, 12, "K" },
        { "1,2", true, 1, ",2" },
        { "18446744073709551615", true, UINT64_MAX, "" },
        { "18446744073709551616", false, 0, NULL },
        { "99999999999999999999999999", false, 0, NULL },
        { "", false, 0, NULL },
        { "-1", false, 0, NULL },
        { "+1", false, 0, NULL },
        { " 1", false, 0, NULL },
        { "x", false, 0, NULL },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        uint64_t x = 4711;
        const char *rest = text_read_number(cases[i].text, &x);
        if (!cases[i].good) {
            assert_null(rest);
            assert_int_equal(x, 4711);
            continue;
        }
        assert_string_equal(rest, cases[i].rest);
        assert_int_equal(x, cases[i].x);
    }
}

static void test_a_number_is_all_digits_and_at_most_so_much(void **state)
{
    static const struct {
        const char *text;
        uint64_t most;
        bool good;
    } cases[] = {
        { "0", 0, true },
        { "1", 0, false },
        { "65535", 65535, true },
        { "65536", 65535, false },
        { "9223372036854775807", INT64_MAX, true },
        { "9223372036854775808", INT64_MAX, false },
        { "18446744073709551615", UINT64_MAX, true },
        { "12 ", 99, false },
        { "1.0", 99, false },
        { "1e3", 9999, false },
        { "0x10", 99, false },
        { "1180591620717411303424", UINT64_MAX, false },
        { "0060000", 60000, true },
        { "+1", 99, false },
        { " 1", 99, false },
        { "", 99, false },
        { "-0", 99, false },
        { "\xd9\xa3", 99, false },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        uint64_t x = 4711;
        assert_int_equal(text_is_number(cases[i].text, cases[i].most, &x), cases[i].good);
        if (!cases[i].good) assert_int_equal(x, 4711);
    }
}

static void test_hexadecimal_digits(void **state)
{
    (void)state;
    for (int c = 0; c < 256; c++) {
        static const char digits[] = "0123456789abcdef0123456789ABCDEF";
        const char *at = c != 0 ? strchr(digits, c) : NULL;
        assert_int_equal(text_hex_digit((unsigned char)c), at != NULL ? (at - digits) % 16 : -1);
    }
}

/* ---- Tests of characters in UTF-8 -------------------------------------------------------------------------------- */

/* Encodes a code point by RFC 3629, independently of text.c. */
static size_t encode(uint32_t code, char bytes[5])
{
    memset(bytes, 0, 5);
    if (code < 0x80) {
        bytes[0] = (char)code;
        return 1;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const unsigned char first[] = { 0, 0xc0, 0xe0, 0xf0 };
    for (int i = more; i > 0; i--, code >>= 6) bytes[i] = (char)(0x80 | (code & 0x3f));
    bytes[0] = (char)(first[more] | code);
    return 1 + (size_t)more;
}

static void test_every_code_point_is_a_character_but_for_surrogates(void **state)
{
    char bytes[5];
    (void)state;
    for (uint32_t code = 1; code <= 0x10ffff; code++) {
        const size_t length = encode(code, bytes);
        assert_int_equal(text_character(bytes), code >= 0xd800 && code <= 0xdfff ? 0 : length);
    }
    assert_int_equal(text_character(""), 0);
    encode(0x110000, bytes);
    assert_int_equal(text_character(bytes), 0);
}

static void test_what_is_no_character_is_none(void **state)
{
    static const char *const cases[] = {
        "\x80",
        "\xbf",
        "\xc0\xaf",
        "\xc1\xbf",
        "\xc2",
        "\xc2z",
        "\xe0\x9f\xbf",
        "\xe0\xa0",
        "\xe2\x82z",
        "\xed\xa0\x80",
        "\xef\xbf\xc0",
        "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80",
        "\xf0\x9f\x98",
        "\xf5\x80\x80\x80",
        "\xff",
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) assert_int_equal(text_character(cases[i]), 0);
}

static void test_a_cut_leaves_no_character_in_two(void **state)
{
    static const struct {
        const char *text;
        size_t room, length;
    } cases[] = {
        { "abc", 3, 3 },      { "abc", 4, 3 },      { "abc", 2, 2 }, { "a\u20acb", 4, 4 },   { "a\u20acb", 3, 1 },
        { "a\u20acb", 2, 1 }, { "a\u20acb", 1, 1 }, { "", 0, 0 },    { "\U0001f600", 3, 0 }, { "x", 0, 0 },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        assert_int_equal(text_cut(cases[i].text, cases[i].room), cases[i].length);
}

/* ---- Tests of hints for unknown names ---------------------------------------------------------------------------- */

static void test_mistakes_of_typing_are_counted(void **state)
{
    static const char long_name[] = "a_name_of_thirty_three_characters";
    static const struct {
        const char *a, *b;
        int distance;
    } cases[] = {
        { "", "", 0 },
        { "scale", "scale", 0 },
        { "", "abc", 3 },
        { "scal", "scale", 1 },
        { "scalle", "scale", 1 },
        { "scape", "scale", 1 },
        { "sacle", "scale", 1 },
        { "casual", "causal", 1 },
        { "lisetn", "listen", 1 },
        { "Causal", "causal", 0 },
        { "TOP_LFET", "top_left", 1 },
        { "kitten", "sitting", 3 },
        { "abcd", "badc", 2 },
        { long_name + 1, "x", 32 },
        { long_name, long_name, TEXT_FAR },
        { "x", long_name, TEXT_FAR },
    };
    (void)state;
    assert_int_equal(strlen(long_name), TEXT_NAME_BYTES + 1);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_int_equal(text_distance(cases[i].a, cases[i].b), cases[i].distance);
        assert_int_equal(text_distance(cases[i].b, cases[i].a), cases[i].distance);
    }
}

static void test_the_nearest_name_is_near_enough_or_none(void **state)
{
    static const char *const names[] = { "q", "k", "scale", "causal", "keep_mask" };
    static const struct {
        const char *unknown, *name;
    } cases[] = {
        { "casual", "causal" },
        { "key_mask", "keep_mask" },
        { "scales", "scale" },
        /* "x" differs from "q" by one letter, but names without a common letter are not similar. */
        { "x", NULL },
        { "softcap", NULL },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct text_nearest nearest = { cases[i].unknown, NULL, 3 };
        for (size_t n = 0; n < ARRAY_SIZE(names); n++) text_consider(&nearest, names[n]);
        if (cases[i].name == NULL) assert_null(nearest.name);
        else assert_string_equal(nearest.name, cases[i].name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_buffer_holds_its_bytes_and_a_nul_and_not_one_more),
        cmocka_unit_test(test_nothing_follows_a_piece_that_did_not_fit),
        cmocka_unit_test(test_a_buffer_of_no_bytes_is_full_and_not_touched),
        cmocka_unit_test(test_printf_is_whole_or_not_at_all),
        cmocka_unit_test(test_a_growing_text_grows_to_its_limit),
        cmocka_unit_test(test_what_was_built_is_given_away),
        cmocka_unit_test(test_a_text_without_memory_says_so_and_stays_as_it_is),
        cmocka_unit_test(test_strings_in_json_are_escaped_and_are_utf8),
        cmocka_unit_test(test_whole_numbers_are_those_of_printf),
        cmocka_unit_test(test_three_digits_are_three),
        cmocka_unit_test(test_milliseconds_have_three_decimals_and_are_never_negative),
        cmocka_unit_test(test_doubles_read_back_as_themselves),
        cmocka_unit_test(test_decimal_digits_are_read_up_to_64_bits),
        cmocka_unit_test(test_a_number_is_all_digits_and_at_most_so_much),
        cmocka_unit_test(test_hexadecimal_digits),
        cmocka_unit_test(test_every_code_point_is_a_character_but_for_surrogates),
        cmocka_unit_test(test_what_is_no_character_is_none),
        cmocka_unit_test(test_a_cut_leaves_no_character_in_two),
        cmocka_unit_test(test_mistakes_of_typing_are_counted),
        cmocka_unit_test(test_the_nearest_name_is_near_enough_or_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
