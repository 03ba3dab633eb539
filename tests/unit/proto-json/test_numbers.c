/* test_numbers.c: tests of arrays of numbers, read from text and written to text. Expected values come from the C
 * library's strtof and strtod, which round correctly, and from exact decimal expansions of midpoints between two
 * numbers. */
#include "proto-json/numbers.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof(a)[0])

enum { MOST = 512 };

struct result {
    numbers_status status;
    numbers_reader reader;
    uint64_t values[MOST];
};

/* Reads a text in pieces of `first` and then of `piece` characters. Each call of numbers_read() may write `room`
 * elements. */
static void read_in_pieces(const char *text, size_t count, numbers_type type, size_t first, size_t piece, size_t room,
                           struct result *result)
{
    size_t bytes = numbers_bytes(type);
    numbers_begin(&result->reader, type);
    memset(result->values, 0xEE, sizeof result->values);
    result->status = NUMBERS_MORE;
    for (size_t at = 0, now = first; at < count || now == first; at += now, now = piece) {
        if (now > count - at) now = count - at;
        /* The block has exactly the piece's size, so that AddressSanitizer reports a read beyond it. */
        char *exact = malloc(now + 1);
        memcpy(exact, text + at, now);
        char *shrunk = realloc(exact, now ? now : 1);
        size_t used = 0;
        do {
            size_t taken, written, before = result->reader.elements;
            result->status = numbers_read(&result->reader, shrunk + used, now - used,
                                          (uint8_t *)result->values + before * bytes,
                                          room < MOST - before ? room : MOST - before, &taken, &written);
            assert_int_equal(result->reader.elements, before + written);
            used += taken;
            if (result->status == NUMBERS_MORE) assert_int_equal(used, now);
        } while (result->status == NUMBERS_FULL && room > 0 && result->reader.elements < MOST);
        free(shrunk);
        if (result->status != NUMBERS_MORE) {
            if (result->status == NUMBERS_DONE) assert_int_equal(result->reader.offset, at + used);
            return;
        }
        if (at + now >= count) return;
    }
}

static void read_whole(const char *text, numbers_type type, struct result *result)
{
    read_in_pieces(text, strlen(text), type, strlen(text), 1, MOST, result);
}

static uint32_t code_at(const struct result *r, size_t index)
{
    uint32_t code = 0;
    size_t bytes = numbers_bytes(r->reader.type);
    memcpy(&code, (const uint8_t *)r->values + index * bytes, bytes < 4 ? bytes : 4);
    return code;
}

static bool read_one(const char *number, numbers_type type, uint32_t *code)
{
    char text[2048];
    struct result r;
    snprintf(text, sizeof text, "[%s]", number);
    read_whole(text, type, &r);
    if (r.status != NUMBERS_DONE || r.reader.elements != 1) return false;
    *code = code_at(&r, 0);
    return true;
}

static uint64_t random_state = 88172645463325252u;
static uint64_t next_random(void) /* xorshift64 */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}

/* ---- Tests of reading arrays of numbers -------------------------------------------------------------------------- */

struct refusal {
    numbers_type type;
    const char *text;
    uint64_t offset;
    const char *says;
};

#define EXPECT_WORDS   "a string here is \"NaN\", \"Infinity\" or \"-Infinity\", numbers stand without quotes"
#define EXPECT_FIRST   "a number, an array or ']' is expected"
#define EXPECT_NUMBER  "a number or an array is expected"
#define EXPECT_COMMA   "',' or ']' is expected"
#define EXPECT_BIT     "a number is expected, 1 and 0 for true and false"
#define EXPECT_INTEGER "an integer without point or exponent is expected"
#define TOO_SHORT      "this array is shorter than the ones before it"
#define TOO_LONG       "this array is longer than the ones before it"
#define TOO_DEEP       "this array is nested deeper than the ones before it"
#define NO_ARRAY       "an array is expected, for the elements before are arrays"
#define OUT_OF(dtype)  "the number is out of the range of " dtype
#define INFINITE       " (\"Infinity\" and \"-Infinity\" are taken)"
#define QUOTE_IT       "what is not finite is written as a string: \"NaN\", \"Infinity\" or \"-Infinity\""

static const struct refusal refusals[] = {
    { NUMBERS_F32, "5", 0, "an array of numbers is expected" },
    { NUMBERS_F32, " {}", 1, "an array of numbers is expected" },
    { NUMBERS_F32, "[x]", 1, EXPECT_FIRST },
    { NUMBERS_F32, "[,1]", 1, EXPECT_FIRST },
    { NUMBERS_F32, "[1,]", 3, EXPECT_NUMBER },
    { NUMBERS_F32, "[1,,2]", 3, EXPECT_NUMBER },
    { NUMBERS_F32, "[1 2]", 3, EXPECT_COMMA },
    { NUMBERS_F32, "[1}", 2, EXPECT_COMMA },
    { NUMBERS_F32, "[1,null]", 3, "null is no number; \"NaN\" stands for one that is missing" },
    { NUMBERS_U8, "[true]", 1, EXPECT_BIT },
    { NUMBERS_U8, "[1,false]", 3, EXPECT_BIT },
    { NUMBERS_F32, "[1,None]", 3, QUOTE_IT },
    { NUMBERS_F32, "[1,x]", 3, EXPECT_NUMBER },
    { NUMBERS_F32, "[1,true]", 3, EXPECT_BIT },
    { NUMBERS_F32, "[1,{}]", 3, EXPECT_NUMBER },
    { NUMBERS_F32, "[1,\f2]", 3, EXPECT_NUMBER },
    { NUMBERS_F32, "[1,/**/2]", 3, EXPECT_NUMBER },
    { NUMBERS_F32, "[007]", 2, "no digit may follow a leading zero" },
    { NUMBERS_F32, "[-00]", 3, "no digit may follow a leading zero" },
    { NUMBERS_F32, "[1.]", 3, "a digit must follow the decimal point" },
    { NUMBERS_F32, "[1.e5]", 3, "a digit must follow the decimal point" },
    { NUMBERS_F32, "[.5]", 1, EXPECT_FIRST },
    { NUMBERS_F32, "[+1]", 1, EXPECT_FIRST },
    { NUMBERS_F32, "[--1]", 2, "a digit must follow the minus sign" },
    { NUMBERS_F32, "[-]", 2, "a digit must follow the minus sign" },
    { NUMBERS_F32, "[-Infinity]", 2, "a digit must follow the minus sign" },
    { NUMBERS_F32, "[1e]", 3, "a digit or a sign must follow the e of an exponent" },
    { NUMBERS_F32, "[1e+]", 4, "a digit must follow the sign of an exponent" },
    { NUMBERS_F32, "[1E-.5]", 4, "a digit must follow the sign of an exponent" },
    { NUMBERS_F32, "[1.5.2]", 4, EXPECT_COMMA },
    { NUMBERS_F32, "[1e5.2]", 4, EXPECT_COMMA },
    { NUMBERS_F32, "[1-2]", 2, EXPECT_COMMA },
    { NUMBERS_F32, "[0x10]", 2, EXPECT_COMMA },
    { NUMBERS_F32, "[1f]", 2, EXPECT_COMMA },
    { NUMBERS_F32, "[1_000]", 2, EXPECT_COMMA },
    { NUMBERS_F32, "[NaN]", 1, QUOTE_IT },
    { NUMBERS_F32, "[1, Infinity]", 4, QUOTE_IT },
    { NUMBERS_F32, "[\"nan\"]", 2, EXPECT_WORDS },
    { NUMBERS_F32, "[\"NaN \"]", 5, EXPECT_WORDS },
    { NUMBERS_F32, "[\"Nan\"]", 4, EXPECT_WORDS },
    { NUMBERS_F32, "[\"Inf\"]", 5, EXPECT_WORDS },
    { NUMBERS_F32, "[\"+Infinity\"]", 2, EXPECT_WORDS },
    { NUMBERS_F32, "[\"-NaN\"]", 3, EXPECT_WORDS },
    { NUMBERS_F32, "[\"\"]", 2, EXPECT_WORDS },
    { NUMBERS_F32, "[\"1\"]", 2, EXPECT_WORDS },
    { NUMBERS_F32, "[\"\\u004eaN\"]", 2, EXPECT_WORDS },
    /* nesting */
    { NUMBERS_F32, "[1,[2]]", 3, TOO_DEEP },
    { NUMBERS_F32, "[[1],2]", 5, NO_ARRAY },
    { NUMBERS_F32, "[[1],\"NaN\"]", 5, NO_ARRAY },
    { NUMBERS_F32, "[[],2]", 4, NO_ARRAY },
    { NUMBERS_F32, "[[1,2],[3]]", 9, TOO_SHORT },
    { NUMBERS_F32, "[[1,2],[3,4,5]]", 12, TOO_LONG },
    { NUMBERS_F32, "[[1],[]]", 6, TOO_SHORT },
    { NUMBERS_F32, "[[],[1]]", 5, TOO_LONG },
    { NUMBERS_F32, "[[],[[]]]", 5, TOO_DEEP },
    { NUMBERS_F32, "[[[1]],[]]", 8, TOO_SHORT },
    { NUMBERS_F32, "[[[1],[2]],[[3],[4],[5]]]", 20, TOO_LONG },
    { NUMBERS_F32, "[[[1],[2]],[[3],[4,5]]]", 19, TOO_LONG },
    { NUMBERS_F32, "[[[[[1]]]]]", 4, "arrays are nested deeper than 4" },
    /* The number is out of range, and the reported offset is that of its first character. */
    { NUMBERS_F32, "[0, 3.4028236e38]", 4, OUT_OF("float32") INFINITE },
    { NUMBERS_F32, "[-1e39]", 1, OUT_OF("float32") INFINITE },
    { NUMBERS_F32, "[1e999999999999999999999]", 1, OUT_OF("float32") INFINITE },
    { NUMBERS_F16, "[65520]", 1, OUT_OF("float16") INFINITE },
    { NUMBERS_BF16, "[3.3962e38]", 1, OUT_OF("bfloat16") INFINITE },
    { NUMBERS_F8E4M3, "[464.000001]", 1, OUT_OF("float8_e4m3fn") },
    { NUMBERS_F8E4M3, "[1,\"Infinity\"]", 3, "float8_e4m3fn has no infinity" },
    { NUMBERS_UNTYPED, "[-3.4028236e38]", 1, OUT_OF("every dtype") INFINITE },
    { NUMBERS_I32, "[2147483648]", 1, OUT_OF("int32") },
    { NUMBERS_I32, "[-2147483649]", 1, OUT_OF("int32") },
    { NUMBERS_I32, "[4294967296]", 1, OUT_OF("int32") },
    { NUMBERS_I32, "[18446744073709551616]", 1, OUT_OF("int32") },
    { NUMBERS_I32, "[100000000000000000000000000000000000000000]", 1, OUT_OF("int32") },
    { NUMBERS_I32, "[1.0]", 2, EXPECT_INTEGER },
    { NUMBERS_I32, "[1.]", 2, EXPECT_INTEGER },
    { NUMBERS_I32, "[1e3]", 2, EXPECT_INTEGER },
    { NUMBERS_I32, "[0E0]", 2, EXPECT_INTEGER },
    { NUMBERS_I32, "[7, \"NaN\"]", 4, EXPECT_INTEGER },
    { NUMBERS_U8, "[255,256]", 5, OUT_OF("uint8") },
    { NUMBERS_U8, "[-1]", 1, OUT_OF("uint8") },
    { NUMBERS_U8, "[0.5]", 2, EXPECT_INTEGER },
};

static void test_what_is_wrong_is_named_where_it_is_in_whatever_pieces(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(refusals); i++) {
        const struct refusal *c = &refusals[i];
        size_t count = strlen(c->text);
        for (size_t first = 0; first <= count; first++)
            for (size_t piece = 1; piece <= 3; piece++)
                for (size_t room = 1; room <= 2; room++) {
                    struct result r;
                    read_in_pieces(c->text, count, c->type, first, piece, room, &r);
                    if (r.status != NUMBERS_BAD || r.reader.offset != c->offset || strcmp(r.reader.error, c->says) != 0)
                        fail_msg("%s, split at %zu: status %d, offset %llu, '%s'; expected offset %llu, '%s'", c->text,
                                 first, r.status, (unsigned long long)r.reader.offset,
                                 r.reader.error ? r.reader.error : "", (unsigned long long)c->offset, c->says);
                    size_t taken = 9, written = 9;
                    assert_int_equal(numbers_read(&r.reader, "1", 1, r.values, 1, &taken, &written),
                                     NUMBERS_BAD); /* for good */
                    assert_int_equal(taken + written, 0);
                    assert_int_equal(r.reader.offset, c->offset);
                }
    }
}

static void test_nesting_implies_a_shape_in_whatever_pieces(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int rank;
        int64_t shape[4];
        uint64_t elements;
    } cases[] = {
        { "[]", 1, { 0 }, 0 },
        { " [ ]x", 1, { 0 }, 0 },
        { "[1]", 1, { 1 }, 1 },
        { "[ 1 ,\n2 ,\t3\r]", 1, { 3 }, 3 },
        { "[[]]", 2, { 1, 0 }, 0 },
        { "[[],[]]", 2, { 2, 0 }, 0 },
        { "[[[]],[[]],[[]]]", 3, { 3, 1, 0 }, 0 },
        { "[[1,2],[3,4],[5,6]],", 2, { 3, 2 }, 6 },
        { "[[[1],[2]],[[3],[4]],[[5],[6]]]", 3, { 3, 2, 1 }, 6 },
        { "[[[[1,-2.5e0,3]]],[[[4,5,6]]]]}", 4, { 2, 1, 1, 3 }, 6 },
        { "[\"NaN\", \"Infinity\" ,\"-Infinity\",-0.0]", 1, { 4 }, 4 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        size_t count = strlen(cases[i].text);
        struct result whole, split;
        read_whole(cases[i].text, NUMBERS_F32, &whole);
        assert_int_equal(whole.status, NUMBERS_DONE);
        assert_int_equal(whole.reader.rank, cases[i].rank);
        assert_int_equal(whole.reader.elements, cases[i].elements);
        for (int d = 0; d < cases[i].rank; d++) assert_int_equal(whole.reader.shape[d], cases[i].shape[d]);
        for (size_t first = 0; first <= count; first++)
            for (size_t piece = 1; piece <= 4; piece++)
                for (size_t room = 1; room <= 3; room++) {
                    read_in_pieces(cases[i].text, count, NUMBERS_F32, first, piece, room, &split);
                    assert_int_equal(split.status, NUMBERS_DONE);
                    assert_int_equal(split.reader.offset, whole.reader.offset);
                    assert_int_equal(split.reader.rank, whole.reader.rank);
                    assert_memory_equal(split.reader.shape, whole.reader.shape, sizeof whole.reader.shape);
                    assert_memory_equal(split.values, whole.values, sizeof whole.values);
                }
    }
}

static void test_an_unfinished_array_wants_more(void **state)
{
    (void)state;
    static const char *const cases[] = { "",    " ",    "[",   "[1",    "[1,",    "[-",   "[1.",
                                         "[1e", "[1e-", "[\"", "[\"Na", "[\"NaN", "[[1]", "[[1]," };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct result r;
        read_whole(cases[i], NUMBERS_F16, &r);
        assert_int_equal(r.status, NUMBERS_MORE);
        assert_int_equal(r.reader.offset, strlen(cases[i]));
    }
}

static void test_without_room_nothing_is_lost(void **state)
{
    (void)state;
    numbers_reader r;
    numbers_begin(&r, NUMBERS_I32);
    int32_t out[2] = { -1, -1 };
    size_t taken, written;
    const char *text = "[10,20]";
    assert_int_equal(numbers_read(&r, text, 7, out, 0, &taken, &written), NUMBERS_FULL);
    assert_int_equal(taken, 1);
    assert_int_equal(written, 0);
    assert_int_equal(numbers_read(&r, text + 1, 6, out, 1, &taken, &written), NUMBERS_FULL);
    assert_int_equal(taken, 3);
    assert_int_equal(written, 1);
    /* The first piece ends after the 2 of the number 20. The second piece completes the number, but the second call has
     * no room for it. */
    assert_int_equal(numbers_read(&r, "2", 1, out + 1, 1, &taken, &written), NUMBERS_MORE);
    assert_int_equal(numbers_read(&r, "0]", 2, out + 1, 0, &taken, &written), NUMBERS_FULL);
    assert_int_equal(taken, 1);
    assert_int_equal(numbers_read(&r, "]", 1, out + 1, 1, &taken, &written), NUMBERS_DONE);
    assert_int_equal(out[0], 10);
    assert_int_equal(out[1], 20);
    assert_int_equal(r.offset, 7);
}

static void test_a_long_array_needs_no_memory_of_its_own(void **state)
{
    (void)state;
    enum { PIECE = 65536, PIECES = 512 };
    static char piece[PIECE];
    static uint16_t out[PIECE / 2 + 1];
    for (size_t i = 0; i < PIECE; i++) piece[i] = i % 2 ? ',' : '0';
    numbers_reader r;
    size_t taken, written;
    numbers_begin(&r, NUMBERS_F16);
    assert_int_equal(numbers_read(&r, "[", 1, out, 0, &taken, &written), NUMBERS_MORE);
    for (int i = 0; i < PIECES; i++) {
        assert_int_equal(numbers_read(&r, piece, PIECE, out, ARRAY_SIZE(out), &taken, &written), NUMBERS_MORE);
        assert_int_equal(written, PIECE / 2);
    }
    assert_int_equal(numbers_read(&r, "0]", 2, out, 1, &taken, &written), NUMBERS_DONE);
    assert_int_equal(r.elements, (uint64_t)PIECE / 2 * PIECES + 1);
    assert_int_equal(r.shape[0], r.elements);
}

static void test_a_number_is_at_most_768_characters_long(void **state)
{
    (void)state;
    char text[1024] = "[0.";
    struct result r;
    size_t end = 1 + NUMBERS_CHARS;
    memset(text + 3, '7', end - 3);
    strcpy(text + end, "]");
    for (size_t split = 0; split <= end; split += 11) {
        read_in_pieces(text, end + 1, NUMBERS_F32, split, 100, 1, &r);
        assert_int_equal(r.status, NUMBERS_DONE);
        assert_int_equal(code_at(&r, 0), 0x3F471C72); /* 7/9 */
    }
    strcpy(text + end, "7]");
    for (size_t split = 0; split <= end; split += 11) {
        read_in_pieces(text, end + 2, NUMBERS_F32, split, 100, 1, &r);
        assert_int_equal(r.status, NUMBERS_BAD);
        assert_int_equal(r.reader.offset, end);
        assert_string_equal(r.reader.error, "the number is longer than 768 characters");
    }
}

static void test_integers_are_exact_to_their_ends(void **state)
{
    (void)state;
    static const struct {
        numbers_type type;
        const char *text;
        int64_t value;
    } cases[] = {
        { NUMBERS_I32, "0", 0 },   { NUMBERS_I32, "-0", 0 },   { NUMBERS_I32, "2147483647", INT32_MAX },
        { NUMBERS_I32, "-1", -1 }, { NUMBERS_U8, "255", 255 }, { NUMBERS_I32, "-2147483648", INT32_MIN },
        { NUMBERS_U8, "-0", 0 },   { NUMBERS_U8, "1", 1 },     { NUMBERS_I32, "16777217", 16777217 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        uint32_t code;
        assert_true(read_one(cases[i].text, cases[i].type, &code));
        assert_int_equal(code, (uint32_t)cases[i].value);
    }
}

/* ---- Tests of rounding in numbers that are read, and of words such as NaN ---------------------------------------- */

static const struct narrow_format {
    numbers_type type;
    int fraction_bits, bias;
    uint32_t largest, codes;
    bool infinity;
} narrow_formats[] = {
    { NUMBERS_F16, 10, 15, 0x7BFF, 0x8000, true },
    { NUMBERS_BF16, 7, 127, 0x7F7F, 0x8000, true },
    { NUMBERS_F8E4M3, 3, 7, 0x7E, 0x80, false },
};

static double value_of(const struct narrow_format *f, uint32_t code)
{
    int exponent = (int)(code >> f->fraction_bits), fraction = (int)(code & ((1u << f->fraction_bits) - 1));
    if (exponent == 0) return ldexp(fraction, 1 - f->bias - f->fraction_bits);
    return ldexp(fraction + (1 << f->fraction_bits), exponent - f->bias - f->fraction_bits);
}

/* Writes a number just below x > 0: the decimal expansion of x with its last digit decremented, and then nines. */
static void text_below(double x, char *text, size_t size)
{
    snprintf(text, size, "%.220f", x);
    char *last = text + strlen(text) - 1;
    for (; *last == '0' || *last == '.'; last--)
        if (*last == '0') *last = '9';
    --*last;
    if (text[0] == '0' && text[1] != '.') memmove(text, text + 1, strlen(text));
}

static void text_above(double x, char *text, size_t size)
{
    snprintf(text, size, "%.220f1", x);
}

static void check_code(const char *text, numbers_type type, bool fits, uint32_t want)
{
    uint32_t code = 0xDEAD;
    bool got = read_one(text, type, &code);
    if (got != fits || (fits && code != want))
        fail_msg("type %d: %s is %#x (%d), expected %#x (%d)", type, text, code, got, want, fits);

    char array[1024];
    struct result r;
    uint64_t element;
    snprintf(array, sizeof array, "[%s]", text);
    read_whole(array, NUMBERS_UNTYPED, &r);
    if (r.status == NUMBERS_BAD) {
        assert_false(fits);
        return;
    }
    assert_int_equal(numbers_convert(&r.reader, (const double *)(const void *)r.values, type, r.values, &element),
                     fits);
    if (!fits) return;
    r.reader.type = type;
    if (code_at(&r, 0) != want)
        fail_msg("type %d: %s, untyped first, is %#x, expected %#x", type, text, code_at(&r, 0), want);
}

static void test_midpoints_of_narrow_formats_round_right(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(narrow_formats); i++) {
        const struct narrow_format *f = &narrow_formats[i];
        uint32_t stride = f->codes > 256 ? 23 : 1;
        for (uint32_t code = 0; code <= f->largest;
             code = code < f->largest && code + stride > f->largest ? f->largest : code + stride) {
            char text[512];
            double middle = (value_of(f, code) + value_of(f, code + 1)) / 2;
            /* fits: whether the dtype's number after this one is finite. If it is infinite, texts from the midpoint on
             * must be refused. */
            bool fits = code < f->largest;
            snprintf(text, sizeof text, "%.220f", middle);
            check_code(text, f->type, fits || code % 2 == 0, code % 2 ? code + 1 : code);
            text_below(middle, text, sizeof text);
            check_code(text, f->type, true, code);
            text_above(middle, text, sizeof text);
            check_code(text, f->type, fits, code + 1);
        }
    }
}

static void test_midpoints_of_float32_round_right(void **state)
{
    (void)state;
    static const uint32_t ends[] = { 0,          1,          2,          0x007FFFFE, 0x007FFFFF, 0x00800000,
                                     0x3F7FFFFF, 0x3F800000, 0x7F7FFFFD, 0x7F7FFFFE, 0x7F7FFFFF };
    for (size_t i = 0; i < 3000 + ARRAY_SIZE(ends); i++) {
        uint32_t code = i < ARRAY_SIZE(ends) ? ends[i] : (uint32_t)(next_random() % 0x7F7FFFFF);
        float low, high;
        memcpy(&low, &code, 4);
        uint32_t next = code + 1;
        memcpy(&high, &next, 4);
        bool fits = code < 0x7F7FFFFF;
        double middle = fits ? ((double)low + (double)high) / 2 : 0x1.ffffffp127;
        char text[512];
        snprintf(text, sizeof text, "%.220f", middle);
        check_code(text, NUMBERS_F32, fits, code % 2 ? code + 1 : code);
        text_below(middle, text, sizeof text);
        check_code(text, NUMBERS_F32, true, code);
        text_above(middle, text, sizeof text);
        check_code(text, NUMBERS_F32, fits, code + 1);
        snprintf(text, sizeof text, "%.9e", middle);
        float want = strtof(text, NULL);
        memcpy(&code, &want, 4);
        check_code(text, NUMBERS_F32, isfinite(want), code);
    }
}

static void test_random_decimals_agree_with_strtof(void **state)
{
    (void)state;
    for (int i = 0; i < 300000; i++) {
        char text[128];
        int at = 0, digits = 1 + (int)(next_random() % (i % 10 == 0 ? 40 : 20)), point = (int)(next_random() % 24);
        if (next_random() % 2) text[at++] = '-';
        text[at++] = (char)('1' + next_random() % 9);
        for (int d = 1; d < digits; d++) {
            if (d == point) text[at++] = '.';
            text[at++] = (char)('0' + (next_random() % 4 ? next_random() % 10 : 0));
        }
        text[at] = '\0';
        if (next_random() % 3) snprintf(text + at, sizeof text - (size_t)at, "e%d", (int)(next_random() % 110) - 70);
        float want = strtof(text, NULL);
        uint32_t code, want_code;
        memcpy(&want_code, &want, 4);
        bool got = read_one(text, NUMBERS_F32, &code);
        if (got != (bool)isfinite(want) || (got && code != want_code))
            fail_msg("%s: %#x, expected %#x", text, code, want_code);
    }
}

static void test_bare_words_are_read_where_they_are_let(void **state)
{
    (void)state;
    static const struct {
        /* `type` is NUMBERS_UNTYPED if the numbers are read before their dtype is known; they are then converted to
         * `becomes` */
        numbers_type type, becomes;
        const char *text, *error;
        uint32_t want; /* bit pattern of the second element */
    } cases[] = {
        { NUMBERS_F32, NUMBERS_F32, "[1,NaN]", NULL, 0x7FC00000 },
        { NUMBERS_F32, NUMBERS_F32, "[1, Infinity ]", NULL, 0x7F800000 },
        { NUMBERS_F16, NUMBERS_F16, "[1,-Infinity,2]", NULL, 0xFC00 },
        { NUMBERS_UNTYPED, NUMBERS_BF16, "[1,-Infinity]", NULL, 0xFF80 },
        { NUMBERS_F32, NUMBERS_F32, "[1,\"NaN\"]", NULL, 0x7FC00000 },
        { NUMBERS_U8, NUMBERS_U8, "[false,true]", NULL, 1 },
        { NUMBERS_U8, NUMBERS_U8, "[true,false]", NULL, 0 },
        { NUMBERS_UNTYPED, NUMBERS_U8, "[0,true]", NULL, 1 },
        { NUMBERS_UNTYPED, NUMBERS_F32, "[0,true]", "a number is expected, 1 and 0 for true and false", 0 },
        { NUMBERS_F32, NUMBERS_F32, "[0,true]", "a number is expected, 1 and 0 for true and false", 0 },
        { NUMBERS_I32, NUMBERS_I32, "[0,NaN]", "an integer without point or exponent is expected", 0 },
        { NUMBERS_U8, NUMBERS_U8, "[0,-Infinity]", "an integer without point or exponent is expected", 0 },
        { NUMBERS_F8E4M3, NUMBERS_F8E4M3, "[0,Infinity]", "float8_e4m3fn has no infinity", 0 },
        { NUMBERS_F32, NUMBERS_F32, "[0,Nan]",
          "a word here is NaN, Infinity or -Infinity, and of uint8 and bools true or false", 0 },
        { NUMBERS_F32, NUMBERS_F32, "[0,nan]", "null is no number; \"NaN\" stands for one that is missing", 0 },
        { NUMBERS_F32, NUMBERS_F32, "[0,NaN1]", "',' or ']' is expected", 0 },
        { NUMBERS_F32, NUMBERS_F32, "[0,-I]",
          "a word here is NaN, Infinity or -Infinity, and of uint8 and bools true or false", 0 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        for (size_t piece = 1; piece <= 20; piece++) {
            const size_t length = strlen(cases[i].text);
            numbers_reader r;
            uint64_t values[8] = { 0 }, element;
            numbers_status status = NUMBERS_MORE;
            numbers_begin(&r, cases[i].type);
            r.bare_words = true;
            for (size_t at = 0; at < length && status == NUMBERS_MORE; at += piece) {
                size_t taken, written;
                status = numbers_read(&r, cases[i].text + at, piece < length - at ? piece : length - at,
                                      (uint8_t *)values + r.elements * numbers_bytes(cases[i].type),
                                      8 - (size_t)r.elements, &taken, &written);
            }
            if (status == NUMBERS_DONE && cases[i].type == NUMBERS_UNTYPED &&
                !numbers_convert(&r, (const double *)(const void *)values, cases[i].becomes, values, &element))
                status = NUMBERS_BAD;
            if (cases[i].error) {
                assert_int_equal(status, NUMBERS_BAD);
                assert_string_equal(r.error, cases[i].error);
                continue;
            }
            uint32_t code = 0;
            assert_int_equal(status, NUMBERS_DONE);
            memcpy(&code, (uint8_t *)values + numbers_bytes(cases[i].becomes), numbers_bytes(cases[i].becomes));
            assert_int_equal(code, cases[i].want);
        }
}

static void test_small_and_odd_spellings(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        float value;
    } cases[] = {
        { "0", 0 },
        { "-0", -0.0f },
        { "-0.0", -0.0f },
        { "0e5", 0 },
        { "0.000e-999999999", 0 },
        { "-0e+99999999999", -0.0f },
        { "1e-400", 0 },
        { "-1e-46", -0.0f },
        { "1e-45", 0x1p-149f },
        { "1E+2", 100 },
        { "1e02", 100 },
        { "0.1e1", 1 },
        { "10000000000000000000000e-22", 1 },
        { "0.0000000000000000000000000000000001e34", 1 },
        { "3.4028235e38", 0x1.fffffep127f },
        { "340282356779733661637539395458142568447", 0x1.fffffep127f },
        { "1.17549435e-38", 0x1p-126f },
        { "0.1", 0.1f },
        { "123456789012345678901234567890", 123456789012345678901234567890.0f },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        uint32_t want;
        memcpy(&want, &cases[i].value, 4);
        check_code(cases[i].text, NUMBERS_F32, true, want);
    }
}

static void test_untyped_numbers_become_what_a_typed_reader_makes_of_them(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        numbers_type type;
        bool fits;
        uint64_t element;
        const char *says;
    } cases[] = {
        { "[1,2,-3]", NUMBERS_I32, true, 0, NULL },
        { "[0,255]", NUMBERS_U8, true, 0, NULL },
        { "[1,2.0,3]", NUMBERS_I32, false, 1, EXPECT_INTEGER },
        { "[1,2,1e1]", NUMBERS_I32, false, 2, EXPECT_INTEGER },
        { "[1,\"NaN\"]", NUMBERS_I32, false, 1, EXPECT_INTEGER },
        { "[1,2147483648,0.5]", NUMBERS_I32, false, 1, OUT_OF("int32") },
        { "[1,-1]", NUMBERS_U8, false, 1, OUT_OF("uint8") },
        { "[1,99999999999999999999999]", NUMBERS_I32, false, 1, OUT_OF("int32") },
        { "[1,65520]", NUMBERS_F16, false, 1, OUT_OF("float16") INFINITE },
        { "[1,\"-Infinity\"]", NUMBERS_F8E4M3, false, 1, "float8_e4m3fn has no infinity" },
        { "[1,\"NaN\",-0.0,0.1]", NUMBERS_F8E4M3, true, 0, NULL },
        { "[1,\"NaN\",\"-Infinity\",\"Infinity\",-0.0,0.1]", NUMBERS_BF16, true, 0, NULL },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct result untyped, typed;
        uint64_t element = 99, elements;
        read_whole(cases[i].text, NUMBERS_UNTYPED, &untyped);
        assert_int_equal(untyped.status, NUMBERS_DONE);
        elements = untyped.reader.elements;
        read_whole(cases[i].text, cases[i].type, &typed);
        const double *values = (const double *)(const void *)untyped.values;
        bool fits = numbers_convert(&untyped.reader, values, cases[i].type, untyped.values, &element);
        assert_int_equal(fits, cases[i].fits);
        assert_int_equal(fits, typed.status == NUMBERS_DONE);
        if (fits) {
            assert_memory_equal(untyped.values, typed.values, elements * numbers_bytes(cases[i].type));
        } else {
            assert_int_equal(element, cases[i].element);
            assert_string_equal(untyped.reader.error, cases[i].says);
            assert_string_equal(typed.reader.error, cases[i].says);
            assert_int_equal(typed.reader.elements, element);
        }
    }
}

/* ---- Tests of writing numbers ------------------------------------------------------------------------------------ */

/* Writes values as a JSON array, and returns its length. `text` needs room for count * (NUMBERS_TEXT_MAX + 1) + 2
 * bytes. */
static size_t put_array(attn_dtype dtype, const void *values, size_t count, char *text)
{
    char *end = text;
    *end++ = '[';
    for (size_t i = 0; i < count; i++) {
        if (i > 0) *end++ = ',';
        end += numbers_format(dtype, (const uint8_t *)values + i * attn_dtype_bytes(dtype), end);
    }
    *end++ = ']';
    return (size_t)(end - text);
}

static void test_texts_are_spelt_like_this(void **state)
{
    (void)state;
    static const struct {
        float value;
        const char *text;
    } cases[] = {
        { 0, "0" },
        { -0.0f, "-0.0" },
        { 1, "1" },
        { -1, "-1" },
        { 10, "10" },
        { 100, "100" },
        { 1000, "1000" },
        { 0.5f, "0.5" },
        { 0.1f, "0.1" },
        { -0.25f, "-0.25" },
        { 3.14159274f, "3.1415927" },
        { 1e-4f, "0.0001" },
        { 1e-5f, "1e-5" },
        { 1.5e-7f, "1.5e-7" },
        { 1e30f, "1e30" },
        { 16777216, "16777216" },
        { 123456789.0f, "123456790" },
        { 1e9f, "1e9" },
        { 0x1.fffffep127f, "3.4028235e38" },
        { 0x1p-149f, "1e-45" },
        { 0x1p-126f, "1.1754944e-38" },
        { 0.3f, "0.3" },
        { 12345.678f, "12345.678" },
        { 0x1p-149f * 3, "4e-45" },
        { NAN, "\"NaN\"" },
        { INFINITY, "\"Infinity\"" },
        { -INFINITY, "\"-Infinity\"" },
        { 8388608.5f, "8388608" },
        { 4194304.5f, "4194304.5" },
        { 33554432.0f, "33554432" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[NUMBERS_TEXT_MAX + 1] = "";
        text[numbers_format(ATTN_F32, &cases[i].value, text)] = '\0';
        assert_string_equal(text, cases[i].text);
    }
    static const uint16_t halves[] = { 0x7BFF, 0x3555, 0x0001, 0xFE00, 0xFC00 };
    static const int32_t integers[] = { 0, 7, -10, INT32_MAX, INT32_MIN };
    static const uint8_t bytes[] = { 0, 10, 255 }, eighths[] = { 0x7E, 0x01, 0x7F, 0xFF, 0x80 };
    static const struct {
        attn_dtype dtype;
        const void *values;
        size_t count;
        const char *text;
    } lists[] = {
        { ATTN_F16, halves, ARRAY_SIZE(halves), "[65500,0.3333,6e-8,\"NaN\",\"-Infinity\"]" },
        { ATTN_I32, integers, ARRAY_SIZE(integers), "[0,7,-10,2147483647,-2147483648]" },
        { ATTN_U8, bytes, ARRAY_SIZE(bytes), "[0,10,255]" },
        { ATTN_F8E4M3, eighths, ARRAY_SIZE(eighths), "[450,0.002,\"NaN\",\"NaN\",-0.0]" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        char text[ARRAY_SIZE(halves) * (NUMBERS_TEXT_MAX + 1) + 3];
        text[put_array(lists[i].dtype, lists[i].values, lists[i].count, text)] = '\0';
        assert_string_equal(text, lists[i].text);
    }
}

static void test_every_value_of_the_narrow_formats_comes_back_from_as_few_digits_as_can_be(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(narrow_formats); i++) {
        const struct narrow_format *f = &narrow_formats[i];
        for (uint32_t code = 0; code < 2 * f->codes; code++) {
            char text[NUMBERS_TEXT_MAX + 1];
            uint32_t back = 0xDEAD, magnitude = code & (f->codes - 1);
            size_t count = numbers_format((attn_dtype)f->type, &code, text);
            assert_true(count <= NUMBERS_TEXT_MAX);
            text[count] = '\0';
            assert_true(read_one(text, f->type, &back));
            bool nan = magnitude > (f->infinity ? f->largest + 1 : f->largest);
            if (nan) {
                assert_string_equal(text, "\"NaN\"");
                assert_true((back & (f->codes - 1)) > f->largest);
                continue;
            }
            if (back != code) fail_msg("type %d: %#x became %s, and that %#x", f->type, code, text, back);
            if (magnitude == 0 || magnitude > f->largest) continue;
            int digits = 0, zeros = 0;
            for (const char *t = text; *t && *t != 'e'; t++) {
                if (*t < '0' || *t > '9' || (digits == 0 && *t == '0')) continue;
                digits++;
                zeros = *t == '0' ? zeros + 1 : 0;
            }
            digits -= zeros;
            double value = value_of(f, magnitude);
            for (int fewer = 1; fewer < digits; fewer++) {
                char candidate[32];
                snprintf(candidate, sizeof candidate, "%.*e", fewer - 1, value);
                if (read_one(candidate, f->type, &back) && back == magnitude)
                    fail_msg("type %d: %#x became %s, but %s is enough", f->type, code, text, candidate);
            }
        }
    }
}

static void test_random_float32_come_back_bit_for_bit(void **state)
{
    (void)state;
    enum { VALUES = 1000000, BLOCK = 100 };
    static char text[BLOCK * (NUMBERS_TEXT_MAX + 1) + 2];
    for (size_t done = 0; done < VALUES; done += BLOCK) {
        uint32_t codes[BLOCK];
        for (size_t i = 0; i < BLOCK; i++) codes[i] = (uint32_t)next_random();
        const size_t count = put_array(ATTN_F32, codes, BLOCK, text);
        struct result r;
        read_in_pieces(text, count, NUMBERS_F32, next_random() % count, count, MOST, &r);
        assert_int_equal(r.status, NUMBERS_DONE);
        assert_int_equal(r.reader.elements, BLOCK);
        for (size_t i = 0; i < BLOCK; i++) {
            bool nan = (codes[i] & 0x7FFFFFFF) > 0x7F800000;
            if (nan ? (code_at(&r, i) & 0x7FFFFFFF) <= 0x7F800000 : code_at(&r, i) != codes[i])
                fail_msg("%#x came back as %#x", codes[i], code_at(&r, i));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_wrong_is_named_where_it_is_in_whatever_pieces),
        cmocka_unit_test(test_nesting_implies_a_shape_in_whatever_pieces),
        cmocka_unit_test(test_an_unfinished_array_wants_more),
        cmocka_unit_test(test_without_room_nothing_is_lost),
        cmocka_unit_test(test_a_long_array_needs_no_memory_of_its_own),
        cmocka_unit_test(test_a_number_is_at_most_768_characters_long),
        cmocka_unit_test(test_integers_are_exact_to_their_ends),
        cmocka_unit_test(test_small_and_odd_spellings),
        cmocka_unit_test(test_bare_words_are_read_where_they_are_let),
        cmocka_unit_test(test_midpoints_of_narrow_formats_round_right),
        cmocka_unit_test(test_midpoints_of_float32_round_right),
        cmocka_unit_test(test_random_decimals_agree_with_strtof),
        cmocka_unit_test(test_untyped_numbers_become_what_a_typed_reader_makes_of_them),
        cmocka_unit_test(test_texts_are_spelt_like_this),
        cmocka_unit_test(test_every_value_of_the_narrow_formats_comes_back_from_as_few_digits_as_can_be),
        cmocka_unit_test(test_random_float32_come_back_bit_for_bit),
    };
    return cmocka_run_group_tests_name("numbers", tests, NULL, NULL);
}
