/* test_scan.c: tests which texts are JSON, and which JSON remains after the scanner has extracted values, however a
 * body is split. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "codec.h"
#include "proto-json/scan.h"

/* ---- Functions that the tests share ------------------------------------------------------------------------------ */

struct scanned {
    struct moving_memory memory;
    scan *s;
    attn_status status;
    attn_error err;
};

static void scanned_clear(struct scanned *r)
{
    scan_free(r->s);
    free(r->memory.base);
    memset(r, 0, sizeof *r);
}

static void scan_begin(struct scanned *r, const proto_limits *limits)
{
    const proto_limits standard = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, &r->memory };
    r->s = scan_new(limits ? limits : &standard, &memory);
    assert_non_null(r->s);
}

/* Scans one piece, from memory of exactly its size. */
static void scan_piece(struct scanned *r, const char *bytes, size_t count)
{
    char *copy = malloc(count ? count : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, count);
    if (r->status == ATTN_OK) r->status = scan_feed(r->s, copy, count, &r->err);
    free(copy);
}

static void scan_end(struct scanned *r)
{
    if (r->status == ATTN_OK) r->status = scan_finish(r->s, &r->err);
}

static void scan_split(struct scanned *r, const proto_limits *limits, const char *body, size_t bytes, size_t first,
                       size_t second)
{
    scan_begin(r, limits);
    scan_piece(r, body, first);
    scan_piece(r, body + first, second - first);
    scan_piece(r, body + second, bytes - second);
    scan_end(r);
}

static void scan_bytes(struct scanned *r, const char *body, size_t bytes)
{
    scan_begin(r, NULL);
    for (size_t i = 0; i < bytes; i++) scan_piece(r, body + i, 1);
    scan_end(r);
}

/* Returns a scanner's result as text: status, message, remaining JSON, extracted values with their bytes. The caller
 * frees it. */
static char *scanned_text(const struct scanned *r)
{
    char *text = NULL;
    size_t bytes = 0, length, used;
    int count;
    FILE *f = open_memstream(&text, &bytes);
    assert_non_null(f);
    if (r->status != ATTN_OK) {
        fprintf(f, "%s [%s] %s", attn_status_name(r->err.status), r->err.member, r->err.text);
    } else {
        const char *rest = scan_rest(r->s, &length);
        const scan_extract *extracts = scan_extracts(r->s, &count);
        const unsigned char *memory = scan_memory(r->s, &used);
        assert_int_equal(strlen(rest), length);
        fprintf(f, "%s", rest);
        for (int i = 0; i < count; i++) {
            const scan_extract *l = &extracts[i];
            fprintf(f, "\n%d ", i);
            switch (l->fault) {
            case SCAN_FINE: break;
            case SCAN_BASE64_CHARACTER:
                fprintf(f, "base64 %llu, byte %llu: %s", (unsigned long long)l->position, (unsigned long long)l->at,
                        l->reason);
                continue;
            case SCAN_BASE64_ENDS:
                fprintf(f, "ends after %llu: %s", (unsigned long long)l->position, l->reason);
                continue;
            case SCAN_ARRAY_TEXT: fprintf(f, "array byte %llu: %s", (unsigned long long)l->at, l->reason); continue;
            case SCAN_ARRAY_ELEMENT:
                fprintf(f, "element %llu: %s", (unsigned long long)l->position, l->reason);
                continue;
            }
            if (l->kind == SCAN_ARRAY) {
                fprintf(f, "%s %lld [", l->typed ? attn_dtype_name(l->dtype) : "untyped", (long long)l->elements);
                for (int a = 0; a < l->rank; a++) fprintf(f, "%s%lld", a ? "," : "", (long long)l->shape[a]);
                fprintf(f, "] ");
            }
            fprintf(f, "@%zu ", l->offset);
            assert_true(l->offset % 64 == 0 && l->offset + l->bytes <= used);
            for (size_t b = 0; b < l->bytes; b++) fprintf(f, "%02x", memory[l->offset + b]);
        }
    }
    fclose(f);
    return text;
}

/* number of wrong results; a test goes through its whole table before it fails */
static int differences;

static int no_differences(void **state)
{
    (void)state;
    const int found = differences;
    differences = 0;
    return found ? -1 : 0;
}

/* Checks that scanning the body gives `says`, whether whole, byte by byte, or split in two at any position. */
static void check_at(const char *file, int line, const char *body, size_t bytes, const char *says)
{
    bool same = true;
    for (size_t split = 0; split <= bytes + 1 && same; split++) {
        struct scanned r = { 0 };
        char *text;
        if (split <= bytes) scan_split(&r, NULL, body, bytes, split, bytes);
        else scan_bytes(&r, body, bytes);
        text = scanned_text(&r);
        same = !strcmp(text, says);
        if (!same)
            print_error("%s:%d, body split at %zu of %zu:\n  says  %s\n  must  %s\n", file, line, split, bytes, text,
                        says);
        free(text);
        scanned_clear(&r);
    }
    differences += !same;
}
#define check(body, says) check_at(__FILE__, __LINE__, body, strlen(body), says)

/* ---- Tests of bodies that are not JSON --------------------------------------------------------------------------- */

static void test_what_is_no_json_is_refused_with_its_byte(void **state)
{
    static const struct {
        const char *body, *says;
    } cases[] = {
        { "", "the body is empty, expected a JSON object with q, k and v" },
        { " \n", "the body is empty, expected a JSON object with q, k and v" },
        { "{", "not JSON: the body ends after 1 bytes, before the value is complete (was it cut off?)" },
        { "{\"q", "not JSON: the body ends after 3 bytes, before the value is complete (was it cut off?)" },
        { "{\"q\":{\"data\":\"AAAA",
          "not JSON: the body ends after 18 bytes, before the value is complete (was it cut off?)" },
        { "{\"q\":{\"data\":[1,2",
          "not JSON: the body ends after 17 bytes, before the value is complete (was it cut off?)" },
        { "tru", "not JSON: the body ends after 3 bytes, before the value is complete (was it cut off?)" },
        { "{} x", "not JSON at byte 3: expected nothing after the value, found 'x'" },
        { "{}{}", "not JSON at byte 2: expected nothing after the value, found '{' (several problems go into one "
                  "{\"requests\": [...]})" },
        { "\xef\xbb\xbf{}",
          "not JSON at byte 0: expected a value, found byte 0xef (a byte order mark? Send UTF-8 without one)" },
        { "/* q */{}",
          "not JSON at byte 0: expected a value, found '/' (JSON has no comments, and no fractions such as 1/8)" },
        { "{\"a\":1 // one\n}",
          "not JSON at byte 7: expected ',' or '}', found '/' (JSON has no comments, and no fractions such as 1/8)" },
        { "{\"scale\":NaN}", "not JSON at byte 9: expected a value, found 'N' (JSON has no NaN or Infinity; inside "
                             "`data` write them as strings; for None leave the member out)" },
        { "{\"scale\":Infinity}", "not JSON at byte 9: expected a value, found 'I' (JSON has no NaN or Infinity; "
                                  "inside `data` write them as strings)" },
        { "{\"scale\":-Infinity}", "not JSON at byte 10: expected a digit, found 'I' (JSON has no NaN or Infinity; "
                                   "inside `data` write them as strings)" },
        { "{\"a\":1,}", "not JSON at byte 7: expected a member's name in quotes, found '}' (a comma too many?)" },
        { "{,}", "not JSON at byte 1: expected a member's name in quotes or '}', found ',' (a comma too many?)" },
        { "[1,]", "not JSON at byte 3: expected a value, found ']' (a comma too many?)" },
        { "[,1]", "not JSON at byte 1: expected a value or ']', found ',' (a comma too many?)" },
        { "[1 2]", "not JSON at byte 3: expected ',' or ']', found '2'" },
        { "[1}", "not JSON at byte 2: expected ',' or ']', found '}'" },
        { "{\"a\":1]", "not JSON at byte 6: expected ',' or '}', found ']'" },
        { "{\"a\" 1}", "not JSON at byte 5: expected ':', found '1'" },
        { "{\"a\":}", "not JSON at byte 5: expected a value, found '}' (a comma too many?)" },
        { "{a:1}", "not JSON at byte 1: expected a member's name in quotes or '}', found 'a'" },
        { "{'a':1}", "not JSON at byte 1: expected a member's name in quotes or '}', found ''' (strings stand in "
                     "double quotes, as json.dumps() writes them)" },
        { "\f{}", "not JSON at byte 0: expected a value, found byte 0x0c" },
        { "q=1&k=2", "not JSON at byte 0: expected a value, found 'q' (form fields or a file's name? Send JSON: "
                     "requests.post(url, json=...), curl --data-binary @FILE)" },
        /* literals */
        { "[tru]", "not JSON at byte 4: expected true, false or null, found ']'" },
        { "[True]",
          "not JSON at byte 1: expected a value or ']', found 'T' (JSON writes true and false, as json.dumps() does)" },
        { "[nul\"]", "not JSON at byte 4: expected true, false or null, found '\"'" },
        { "False",
          "not JSON at byte 0: expected a value, found 'F' (JSON writes true and false, as json.dumps() does)" },
        { "[truee]", "not JSON at byte 5: expected ',' or ']', found 'e'" },
        /* numbers */
        { "[007]", "byte 1: a number may not begin with 0 and another digit" },
        { "[-01]", "byte 2: a number may not begin with 0 and another digit" },
        { "[1.]", "not JSON at byte 3: expected a digit, found ']'" },
        { "[.5]", "not JSON at byte 1: expected a value or ']', found '.' (a digit stands before the point)" },
        { "[+1]", "not JSON at byte 1: expected a value or ']', found '+' (a number has no plus sign)" },
        { "[-]", "not JSON at byte 2: expected a digit, found ']'" },
        { "[1e]", "not JSON at byte 3: expected a digit, found ']'" },
        { "[1e+]", "not JSON at byte 4: expected a digit, found ']'" },
        { "[1.5.5]", "not JSON at byte 4: expected ',' or ']', found '.'" },
        { "[0x10]", "not JSON at byte 2: expected ',' or ']', found 'x'" },
        { "1.", "not JSON: the body ends after 2 bytes, before the value is complete (was it cut off?)" },
        /* strings */
        { "[\"a\nb\"]", "not JSON at byte 3: control character 0x0a inside a string" },
        { "[\"\t\"]", "not JSON at byte 2: control character 0x09 inside a string" },
        { "[\"\\u0000\"]", "byte 7: \\u0000 is not accepted (bytes are sent in base64)" },
        { "[\"\\x\"]", "not JSON at byte 3: expected one of \"\\/bfnrtu after a backslash, found 'x'" },
        { "[\"\\u12g4\"]", "not JSON at byte 6: expected a hexadecimal digit, found 'g'" },
        { "[\"\\ud800\"]", "not JSON at byte 8: expected the second half of a surrogate pair, found '\"'" },
        { "[\"\\ud800\\n\"]", "not JSON at byte 9: expected the second half of a surrogate pair, found 'n'" },
        { "[\"\\ud800\\u0041\"]", "byte 13: the second half of a surrogate pair must be \\udc00 to \\udfff" },
        { "[\"\\udc00\"]", "byte 7: a surrogate without its first half" },
        { "[\"\xff\"]", "byte 2: invalid UTF-8" },
        { "[\"\x80\"]", "byte 2: invalid UTF-8" },
        { "[\"\xc0\xaf\"]", "byte 2: invalid UTF-8" },         /* overlong */
        { "[\"\xe0\x80\xaf\"]", "byte 3: invalid UTF-8" },     /* overlong */
        { "[\"\xed\xa0\x80\"]", "byte 3: invalid UTF-8" },     /* a surrogate */
        { "[\"\xf0\x80\x80\x80\"]", "byte 3: invalid UTF-8" }, /* overlong */
        { "[\"\xf4\x90\x80\x80\"]", "byte 3: invalid UTF-8" }, /* past U+10FFFF */
        { "[\"\xe2\x82\"]", "byte 4: invalid UTF-8" },         /* cut short */
        { "[\"\xc3\"]", "byte 3: invalid UTF-8" },
        /* The error is inside an extracted string or array, or after it. */
        { "{\"data\":\"AA\nAA\"}",
          "not JSON at byte 11: control character 0x0a inside a string (a line break in base64? "
          "`base64 -w0` writes none)" },
        { "{\"data\":\"AA\x01\"}", "not JSON at byte 11: control character 0x01 inside a string" },
        { "{\"data\":\"AA\\q\"}", "not JSON at byte 12: expected one of \"\\/bfnrtu after a backslash, found 'q'" },
        { "{\"data\":\"A_\xff\"}", "byte 11: invalid UTF-8" },
        { "{\"data\":[1,,2]}", "not JSON at byte 11: expected a value, found ',' (a comma too many?)" },
        { "{\"data\":[1,2,]}", "not JSON at byte 13: expected a value, found ']' (a comma too many?)" },
        { "{\"data\":[01]}", "byte 9: a number may not begin with 0 and another digit" },
        { "{\"data\":[1 2]}", "not JSON at byte 11: expected ',' or ']', found '2'" },
        { "{\"data\":[1.5.2]}", "not JSON at byte 12: expected ',' or ']', found '.'" },
        { "{\"data\":[[1],[2,3}]}", "not JSON at byte 17: expected ',' or ']', found '}'" },
        { "{\"data\":[NaN]}", "not JSON at byte 9: expected a value or ']', found 'N' (JSON has no NaN or Infinity; "
                              "inside `data` write them as strings; for None leave the member out)" },
        { "{\"data\":[\"NaN\",\"x\",1.]}", "not JSON at byte 21: expected a digit, found ']'" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char says[400];
        size_t bytes = strlen(cases[i].body);
        snprintf(says, sizeof says, "INVALID [] %s", cases[i].says);
        check_at(__FILE__, (int)i, cases[i].body, bytes, says);
    }
    check_at(__FILE__, __LINE__, "{\"a\0b\":1}", 9,
             "INVALID [] not JSON at byte 3: control character 0x00 inside a string");
    check_at(__FILE__, __LINE__, "{}\0", 3,
             "INVALID [] not JSON at byte 2: expected nothing after the value, found byte 0x00");
}

/* ---- Tests of the scanner's limits ------------------------------------------------------------------------------- */

/* Returns `text` repeated `times` times, between `before` and `after`. */
static char *repeated(const char *before, const char *text, size_t times, const char *after)
{
    const size_t length = strlen(text);
    char *all = malloc(strlen(before) + times * length + strlen(after) + 1), *p = all;
    assert_non_null(all);
    p = stpcpy(p, before);
    for (size_t i = 0; i < times; i++) p = stpcpy(p, text);
    strcpy(p, after);
    return all;
}

#define TOO_DEEP "byte 32: nested deeper than 32"
#define TOO_WIDE                                                                                          \
    "byte 321: an object of more than 64 members (of a typed array of JavaScript send Array.from(x), or " \
    "Buffer.from(x.buffer).toString('base64'))"
#define TOO_MUCH  "the members other than tensor data take more than 1048576 bytes"
#define TOO_LARGE "the tensors take more than 100 bytes"
#define NO_TENSORS                                                                                                   \
    "more than 131072 values outside tensor data; a tensor is {\"shape\": ..., \"dtype\": ..., \"data\": ...}, and " \
    "its numbers go into \"data\""

static void test_every_limit_holds(void **state)
{
    static const struct {
        const char *before, *text;
        size_t times;
        const char *after;
        attn_status status;
        const char *says;
    } cases[] = {
        { "", "[", 32, "]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]", ATTN_OK, "" },
        { "", "[", 33, "", ATTN_INVALID, TOO_DEEP },
        { "", "[", 1000000, "", ATTN_INVALID, TOO_DEEP },
        { "{", "\"\":0,", 63, "\"a\":0}", ATTN_OK, "" },
        { "{", "\"\":0,", 64, "\"a\":0}", ATTN_INVALID, TOO_WIDE },
        { "{", "\"\":0,", 100000, "\"a\":0}", ATTN_INVALID, TOO_WIDE },
        { "{\"a\":\"", "x", 2000000, "\"}", ATTN_TOO_LARGE, TOO_MUCH },
        { "[", "0,", 140000, "0]", ATTN_TOO_LARGE, NO_TENSORS },
        { "{\"data\":\"", "AAAA", 33, "\"}", ATTN_OK, "" },
        { "{\"data\":\"", "AAAA", 34, "\"}", ATTN_TOO_LARGE, TOO_LARGE },
        { "{\"dtype\":\"float32\",\"data\":[", "1,", 25, "1]}", ATTN_TOO_LARGE, TOO_LARGE },
    };
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    (void)state;
    limits.tensor_bytes = 100;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct scanned r = { 0 };
        char *body = repeated(cases[i].before, cases[i].text, cases[i].times, cases[i].after);
        scan_split(&r, &limits, body, strlen(body), 0, strlen(body) / 2);
        if (r.status != cases[i].status) print_error("case %zu: %s\n", i, r.err.text);
        assert_int_equal(r.status, cases[i].status);
        if (r.status != ATTN_OK) {
            assert_string_equal(r.err.text, cases[i].says);
            assert_int_equal(scan_feed(r.s, "1", 1, &r.err), cases[i].status); /* and again */
            assert_string_equal(r.err.text, cases[i].says);
        }
        free(body);
        scanned_clear(&r);
    }
}

static void test_memory_that_runs_out_fails_with_its_own_words(void **state)
{
    struct scanned r = { .memory = { .limit = 8192 } };
    char *body = repeated("{\"data\":\"", "AAAA", 4000, "\"}");
    (void)state;
    scan_split(&r, NULL, body, strlen(body), 100, 10000);
    assert_int_equal(r.status, ATTN_TOO_LARGE);
    assert_string_equal(r.err.text, "the test's memory ends at 8192 bytes");
    free(body);
    scanned_clear(&r);
}

/* The array is smaller under ThreadSanitizer, which checks every byte each time that the growing memory is copied. */
#ifdef __SANITIZE_THREAD__
enum { LARGE_ARRAY = 1 << 20 };
#else
enum { LARGE_ARRAY = 16 << 20 };
#endif

/* While a large array is scanned, memory is needed for its elements only, not for its text. */
static void test_a_large_array_costs_its_elements(void **state)
{
    struct scanned r = { 0 };
    const size_t times = LARGE_ARRAY;
    char *body = repeated("{\"dtype\":\"float16\",\"data\":[", "0,", times, "0]}");
    size_t length, used;
    int count;
    (void)state;
    scan_split(&r, NULL, body, strlen(body), times / 16, times / 16 * 20);
    assert_int_equal(r.status, ATTN_OK);
    assert_string_equal(scan_rest(r.s, &length), "{\"dtype\":\"sfloat16\",\"data\":0}");
    assert_int_equal(scan_extracts(r.s, &count)[0].elements, times + 1);
    scan_memory(r.s, &used);
    assert_int_equal(used, 2 * (times + 1));
    assert_true(r.memory.bytes <= used + (1 << 18));
    free(body);
    scanned_clear(&r);
}

/* ---- Tests of the JSON without its data members, and of the extracted values ------------------------------------- */

static void test_the_skeleton_keeps_everything_but_data(void **state)
{
    (void)state;
    check(" { } ", "{}");
    check("[ ]", "[]");
    check("17", "\"n17\"");
    check("\"\"", "\"s\"");
    check(" null ", "null");
    check("{\"a\" : [ 1 , -0.5e+10 , true,false , null, \"x\" ] , \"b\":{ } }",
          "{\"a\":[\"n1\",\"n-0.5e+10\",true,false,null,\"sx\"],\"b\":{}}");
    check("{\"s\":18446744073709551615}", "{\"s\":\"n18446744073709551615\"}");
    check("[0,-0,0.0,0e0,1E5,1e-5,12345678901234567890123]",
          "[\"n0\",\"n-0\",\"n0.0\",\"n0e0\",\"n1E5\",\"n1e-5\",\"n12345678901234567890123\"]");
    check("[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00\"]",
          "[\"s\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00\"]");
    check("[\"\x7f \xc3\xa9 \xe2\x82\xac \xef\xbf\xbf \xf0\x9f\x98\x80 \xf4\x8f\xbf\xbf\"]",
          "[\"s\x7f \xc3\xa9 \xe2\x82\xac \xef\xbf\xbf \xf0\x9f\x98\x80 \xf4\x8f\xbf\xbf\"]");
    /* The first and last characters of 2, 3 and 4 bytes of UTF-8, and those next to the surrogates, are valid. */
    check("[\"\xc2\x80\xdf\xbf \xe0\xa0\x80\xe0\xbf\xbf\xe1\x80\x80\xec\xbf\xbf \xed\x80\x80\xed\x9f\xbf \xee\x80\x80 "
          "\xf0\x90\x80\x80\xf3\x80\x80\x80\xf4\x80\x80\x80\"]",
          "[\"s\xc2\x80\xdf\xbf \xe0\xa0\x80\xe0\xbf\xbf\xe1\x80\x80\xec\xbf\xbf \xed\x80\x80\xed\x9f\xbf \xee\x80\x80 "
          "\xf0\x90\x80\x80\xf3\x80\x80\x80\xf4\x80\x80\x80\"]");
    check("[\"\\ud83d\\ude00\\u00e9\\uD83D\\uDE00\\uD7FF\\uE000\"]",
          "[\"s\\ud83d\\ude00\\u00e9\\uD83D\\uDE00\\uD7FF\\uE000\"]");
    check("[\"a string that is longer than eight bytes, and than a word\"]",
          "[\"sa string that is longer than eight bytes, and than a word\"]");
}

static void test_data_is_lifted_whatever_surrounds_it(void **state)
{
    (void)state;
    check("{\"q\":{\"data\":\"AAEC\"}}", "{\"q\":{\"data\":0}}\n0 @0 000102");
    check("{\"data\":\"\"}", "{\"data\":0}\n0 @0 ");
    check("{\"data\":\"AAE=\",\"x\":\"y\"}", "{\"data\":0,\"x\":\"sy\"}\n0 @0 0001");
    check("[{\"data\":\"AA==\"},{\"data\":\"AQ==\"},\"AA==\"]",
          "[{\"data\":0},{\"data\":1},\"sAA==\"]\n0 @0 00\n1 @64 01");
    check("{\"data\":\"\\/\\/\\u002b\\u002B\"}", "{\"data\":0}\n0 @0 ffffbe");
    check("{\"data\":\"\\/A\\/\\/\\/\\/A\\/\\/\\/\\/\\/AA==\"}", "{\"data\":0}\n0 @0 fc0ffffff03fffffff00");
    check("{\"data\":\"AA==\\/\"}", "{\"data\":0}\n0 base64 4, byte 14: nothing may follow the padding");
    check("{\"data\":\"A\\u0041\\u003d=\"}", "{\"data\":0}\n0 @0 00");
    check("{\"\\u0064at\\u0061\":\"AAEC\"}", "{\"\\u0064at\\u0061\":0}\n0 @0 000102");
    /* Only members that are named "data", and are strings or arrays, are extracted. */
    check("{\"dat\":\"AA\",\"dataa\":\"AA\",\"DATA\":\"AA\",\"d\":\"data\"}",
          "{\"dat\":\"sAA\",\"dataa\":\"sAA\",\"DATA\":\"sAA\",\"d\":\"sdata\"}");
    check("{\"data\":5,\"a\":{\"data\":null},\"b\":{\"data\":{\"data\":\"AAEC\"}}}",
          "{\"data\":\"n5\",\"a\":{\"data\":null},\"b\":{\"data\":{\"data\":0}}}\n0 @0 000102");
    check("[{\"data\":{}},\"AAEC\",[1]]", "[{\"data\":{}},\"sAAEC\",[\"n1\"]]");
}

static void test_a_fault_in_base64_is_noted_and_the_rest_is_read(void **state)
{
    (void)state;
    check(
        "{\"data\":\"AA*A\",\"b\":1}",
        "{\"data\":0,\"b\":\"n1\"}\n0 base64 2, byte 11: not a character of the base64 alphabet (RFC 4648 section 4)");
    check("{\"data\":\"AAAA\\nAAAA\"}",
          "{\"data\":0}\n0 base64 4, byte 14: a line break; `base64 -w0` and base64.b64encode() write none");
    check("{\"data\":\"AA\\\"AA\"}",
          "{\"data\":0}\n0 base64 2, byte 12: not a character of the base64 alphabet (RFC 4648 section 4)");
    check("{\"data\":\"AA\\\\AA\"}",
          "{\"data\":0}\n0 base64 2, byte 12: not a character of the base64 alphabet (RFC 4648 section 4)");
    check("{\"data\":\"AA\\u20acA\"}",
          "{\"data\":0}\n0 base64 2, byte 16: not a character of the base64 alphabet (RFC 4648 section 4)");
    check("{\"data\":\"AA\xe2\x82\xac\"}",
          "{\"data\":0}\n0 base64 2, byte 11: not a character of the base64 alphabet (RFC 4648 section 4)");
    check("{\"data\":\"AA AA\"}",
          "{\"data\":0}\n0 base64 2, byte 11: white space; write it without (forms and URLs turn '+' into a space)");
    check("{\"data\":\"AA-_\"}", "{\"data\":0}\n0 base64 2, byte 11: the URL alphabet; '+' and '/' are wanted, as "
                                 "base64.b64encode() writes them");
    check("{\"data\":\"A\"}", "{\"data\":0}\n0 ends after 1: a character or more is missing");
    check("{\"data\":\"AAAAA\"}", "{\"data\":0}\n0 ends after 5: a character or more is missing");
    check("{\"data\":\"AA\"}", "{\"data\":0}\n0 ends after 2: '=' at the end fills it to a multiple of four");
    check("{\"data\":\"AA=\"}", "{\"data\":0}\n0 ends after 3: a second '=' is missing");
    check("{\"data\":\"A=AA\"}",
          "{\"data\":0}\n0 base64 1, byte 10: padding where a group of four has not two characters yet");
    check("{\"data\":\"AA==AAAA\"}", "{\"data\":0}\n0 base64 4, byte 13: nothing may follow the padding");
    check("{\"data\":\"AA=A\"}", "{\"data\":0}\n0 base64 3, byte 12: a second '=' must follow the first");
    check("{\"data\":\"AB==\"}",
          "{\"data\":0}\n0 base64 2, byte 11: padding after a character whose unused bits are not zero");
    /* After a value was refused, the next value is stored at the address of the refused value. */
    check("[{\"data\":\"AAEC*\"},{\"data\":\"AQ==\"}]",
          "[{\"data\":0},{\"data\":1}]\n0 base64 4, byte 14: not a character of the base64 alphabet (RFC 4648 section "
          "4)\n1 @0 01");
}

/* If data is in another form than base64, such as a Python b'...', the error must name the form. The text may begin
 * in an earlier piece. */
static void test_text_that_is_written_otherwise_is_recognised(void **state)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        { "data:;base64,AAAA", "base64 4, byte 13: a data URI; send only what is behind the comma" },
        { "dota:AAAA", "base64 4, byte 13: not a character of the base64 alphabet (RFC 4648 section 4)" },
        { "b'AAAA'", "base64 1, byte 10: a Python b'...'; send base64.b64encode(x.tobytes()).decode()" },
        { "b\\\"AAAA\\\"", "base64 1, byte 11: a Python b'...'; send base64.b64encode(x.tobytes()).decode()" },
        { "bb'AAAA'", "base64 2, byte 11: not a character of the base64 alphabet (RFC 4648 section 4)" },
        { "[1, 2]", "base64 0, byte 9: numbers as text; send the array without the quotes" },
        { "1.5,2", "base64 1, byte 10: numbers as text; send the array without the quotes" },
        { "tensor([1])", "base64 6, byte 15: the print of an array; send x.tolist() without quotes, or "
                         "base64.b64encode(x.tobytes()).decode()" },
        { "array([1])", "base64 5, byte 14: the print of an array; send x.tolist() without quotes, or "
                        "base64.b64encode(x.tobytes()).decode()" },
        { "AA%3D", "base64 2, byte 11: percent-encoding; send base64 as it is" },
        { "AA==\\n", "base64 4, byte 14: a line break; `base64 -w0` and base64.b64encode() write none" },
        { "AAAA\\r\\nAAAA", "base64 4, byte 14: a line break; `base64 -w0` and base64.b64encode() write none" },
        /* Hexadecimal of this length is also base64. parse.c later refuses it, because its length does not fit the
         * shape. */
        { "00000000803f", "@0 d34d34d34d34f34ddf" },
        { "0x0000803f0000004", "ends after 17: this is hexadecimal, base64 is wanted: "
                               "base64.b64encode(x.tobytes()).decode()" },
        { "0000803f00000040ab", "ends after 18: this is hexadecimal, base64 is wanted: "
                                "base64.b64encode(x.tobytes()).decode()" },
        { "AAAAAAAAAAAAAAAAAA", "ends after 18: '=' at the end fills it to a multiple of four" }, /* zeros */
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char body[128], says[256];
        snprintf(body, sizeof body, "{\"data\":\"%s\"}", cases[i].text);
        snprintf(says, sizeof says, "{\"data\":0}\n0 %s", cases[i].says);
        check(body, says);
    }
}

static void test_arrays_are_read_in_their_dtype(void **state)
{
    (void)state;
    check("{\"dtype\":\"float32\",\"data\":[1,2]}",
          "{\"dtype\":\"sfloat32\",\"data\":0}\n0 float32 2 [2] @0 0000803f00000040");
    check("{\"dtype\":\"int32\",\"data\":[[-1],[2]]}",
          "{\"dtype\":\"sint32\",\"data\":0}\n0 int32 2 [2,1] @0 ffffffff02000000");
    check("{\"dtype\":\"bfloat16\",\"data\":[\"NaN\",\"Infinity\",\"-Infinity\",-0]}",
          "{\"dtype\":\"sbfloat16\",\"data\":0}\n0 bfloat16 4 [4] @0 c07f807f80ff0080");
    /* The dtype may come after the data. The text is rounded only once: a second rounding would give another
     * float16. */
    check("{\"data\":[1,2.5],\"dtype\":\"float16\",\"c\":0}",
          "{\"data\":0,\"dtype\":\"sfloat16\",\"c\":\"n0\"}\n0 float16 2 [2] @0 003c0041");
    check("{\"data\":[1.00048828125000000000001],\"dtype\":\"float16\"}",
          "{\"data\":0,\"dtype\":\"sfloat16\"}\n0 float16 1 [1] @0 013c");
    check("{\"dtype\":\"float16\",\"data\":[1.00048828125000000000001]}",
          "{\"dtype\":\"sfloat16\",\"data\":0}\n0 float16 1 [1] @0 013c");
    check("{\"data\":[1],\"dt\\u0079pe\":\"u\\u0038\"}",
          "{\"data\":0,\"dt\\u0079pe\":\"su\\u0038\"}\n0 uint8 1 [1] @0 01");
    check("[{\"data\":[1,2,3],\"dtype\":\"uint8\"},{\"dtype\":\"uint8\",\"data\":[4]}]",
          "[{\"data\":0,\"dtype\":\"suint8\"},{\"dtype\":\"suint8\",\"data\":1}]\n0 uint8 3 [3] @0 010203\n1 uint8 1 "
          "[1] @64 04");
    check("{\"data\":[1]}", "{\"data\":0}\n0 untyped 1 [1] @0 000000000000f03f");
    check("{\"data\":[1],\"dtype\":\"float17\"}",
          "{\"data\":0,\"dtype\":\"sfloat17\"}\n0 untyped 1 [1] @0 000000000000f03f");
    check("{\"data\":[ ],\"dtype\":\"float32\"}", "{\"data\":0,\"dtype\":\"sfloat32\"}\n0 float32 0 [0] @0 ");
    check("{\"data\":[ [ ] , [ ] ],\"dtype\":\"float32\"}",
          "{\"data\":0,\"dtype\":\"sfloat32\"}\n0 float32 0 [2,0] @0 ");
    check("{\"data\":[ 1\n,\t2\r, 3 ] , \"dtype\":\"uint8\"}",
          "{\"data\":0,\"dtype\":\"suint8\"}\n0 uint8 3 [3] @0 010203");
}

static void test_a_fault_in_an_array_is_noted_and_the_rest_is_read(void **state)
{
    (void)state;
    check("{\"dtype\":\"uint8\",\"data\":[1,256,3],\"b\":1}",
          "{\"dtype\":\"suint8\",\"data\":0,\"b\":\"n1\"}\n0 array byte 27: the number is out of the range of uint8");
    check("{\"dtype\":\"uint8\",\"data\":[1,2.5,3]}",
          "{\"dtype\":\"suint8\",\"data\":0}\n0 array byte 28: an integer without point or exponent is expected");
    check("{\"data\":[1,2.5,3],\"dtype\":\"uint8\"}",
          "{\"data\":0,\"dtype\":\"suint8\"}\n0 element 1: an integer without point or exponent is expected");
    check("{\"dtype\":\"float16\",\"data\":[1,1e6]}",
          "{\"dtype\":\"sfloat16\",\"data\":0}\n0 array byte 29: the number is out of the range of float16 "
          "(\"Infinity\" and \"-Infinity\" are taken)");
    check("{\"data\":[1,1e6],\"dtype\":\"float16\"}",
          "{\"data\":0,\"dtype\":\"sfloat16\"}\n0 element 1: the number is out of the range of float16 (\"Infinity\" "
          "and \"-Infinity\" are taken)");
    check("{\"data\":[1,\"x\"],\"b\":[{\"data\":\"AA==\"}]}",
          "{\"data\":0,\"b\":[{\"data\":1}]}\n0 array byte 12: a string here is \"NaN\", \"Infinity\" or "
          "\"-Infinity\", numbers stand without quotes\n1 @0 00");
    check("{\"data\":[1,\"N\\u0061N\",[\"]\",{\"data\":\"**\"}]],\"b\":{\"data\":[]}}",
          "{\"data\":0,\"b\":{\"data\":1}}\n0 array byte 13: a string here is \"NaN\", \"Infinity\" or "
          "\"-Infinity\", numbers stand without quotes\n1 untyped 0 [0] @0 ");
    check("{\"data\":[[1,2],[3]],\"b\":1}",
          "{\"data\":0,\"b\":\"n1\"}\n0 array byte 17: this array is shorter than the ones before it");
    check("{\"data\":[[1],[2,3]],\"b\":1}",
          "{\"data\":0,\"b\":\"n1\"}\n0 array byte 16: this array is longer than the ones before it");
    check("{\"data\":[[1],2],\"b\":1}",
          "{\"data\":0,\"b\":\"n1\"}\n0 array byte 13: an array is expected, for the elements before are arrays");
    check("{\"data\":[1,[2]],\"b\":1}",
          "{\"data\":0,\"b\":\"n1\"}\n0 array byte 11: this array is nested deeper than the ones before it");
    check("{\"data\":[[[[[1]]]]],\"b\":1}",
          "{\"data\":0,\"b\":\"n1\"}\n0 array byte 12: arrays are nested deeper than 4");
    check("{\"data\":[true,{\"a\":[]},null],\"b\":1}",
          "{\"data\":0,\"b\":\"n1\"}\n0 array byte 9: a number is expected, 1 and 0 for true and false");
    check("{\"data\":[1 , null],\"b\":1}",
          "{\"data\":0,\"b\":\"n1\"}\n0 array byte 13: null is no number; \"NaN\" stands for one that is missing");
}

static void test_a_long_body_gives_the_same_in_three_pieces(void **state)
{
    static const char body[] = "{\"requests\":[{\"q\":{\"shape\":[1,2],\"data\":\"AAECAwQF\\/"
                               "\\u002b==\",\"dtype\":\"float16\"},\"s\":\"\\ud83d\\ude00\xe2\x82\xac\"},"
                               "{\"k\":{\"data\":[[1.5e0,\"NaN\"],[-2,\"-Infinity\"]],\"dtype\":\"bfloat16\"},\"seed\":"
                               "123},[{\"data\":[1,[2]]},null]]}";
    struct scanned whole = { 0 };
    char *must;
    (void)state;
    scan_split(&whole, NULL, body, sizeof body - 1, 0, 0);
    must = scanned_text(&whole);
    for (size_t first = 0; first < sizeof body; first++)
        for (size_t second = first; second < sizeof body; second++) {
            struct scanned r = { 0 };
            char *text;
            scan_split(&r, NULL, body, sizeof body - 1, first, second);
            text = scanned_text(&r);
            assert_string_equal(text, must);
            free(text);
            scanned_clear(&r);
        }
    free(must);
    scanned_clear(&whole);
}

#define TEST(name) cmocka_unit_test_teardown(name, no_differences)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_what_is_no_json_is_refused_with_its_byte),
        TEST(test_every_limit_holds),
        TEST(test_memory_that_runs_out_fails_with_its_own_words),
        TEST(test_a_large_array_costs_its_elements),
        TEST(test_the_skeleton_keeps_everything_but_data),
        TEST(test_data_is_lifted_whatever_surrounds_it),
        TEST(test_a_fault_in_base64_is_noted_and_the_rest_is_read),
        TEST(test_text_that_is_written_otherwise_is_recognised),
        TEST(test_arrays_are_read_in_their_dtype),
        TEST(test_a_fault_in_an_array_is_noted_and_the_rest_is_read),
        TEST(test_a_long_body_gives_the_same_in_three_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
