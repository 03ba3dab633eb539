/* test_unpack.c: tests of compressed bodies: the result does not depend on how a body is split, each fault has a
 * message, and limits are exact. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <zlib.h>

#include "../testing.h"
#include "server/base/limits.h"
#include "server/base/unpack.h"

enum { WINDOW = 15, GZIP = 16 };

static char *packed(enum unpack_coding coding, const char *bytes, size_t count, size_t *size)
{
    z_stream z = { 0 };
    assert_int_equal(deflateInit2(&z, 9, Z_DEFLATED, coding == UNPACK_GZIP ? WINDOW + GZIP : WINDOW, 8, 0), Z_OK);
    const size_t most = deflateBound(&z, count);
    char *const to = malloc(most);
    z.next_in = (z_const Bytef *)bytes;
    z.avail_in = (uInt)count;
    z.next_out = (Bytef *)to;
    z.avail_out = (uInt)most;
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    *size = most - z.avail_out;
    deflateEnd(&z);
    return to;
}

/* Unpacks a compressed body that arrives in pieces of `part` bytes. *out becomes the length of the result. If `want`
 * is given, the result must equal it. */
static attn_status unpack_all(enum unpack_coding coding, uint64_t limit, const char *body, size_t count, size_t part,
                              const char *want, uint64_t *out, attn_error *err)
{
    struct unpacker *u = unpack_new(coding, limit);
    attn_status status = ATTN_OK;
    *out = 0;
    assert_non_null(u);
    for (size_t at = 0; at < count && status == ATTN_OK; at += part) {
        const char *bytes = body + at, *piece;
        size_t left = count - at < part ? count - at : part, size;
        do {
            status = unpack_next(u, &bytes, &left, &piece, &size, err);
            assert_true(size <= UNPACK_PIECE_BYTES);
            if (status == ATTN_OK && want) assert_memory_equal(piece, want + *out, size);
            *out += size;
        } while (status == ATTN_OK && size > 0);
        if (status == ATTN_OK) assert_int_equal(left, 0);
        else assert_int_equal(size, 0);
    }
    if (status == ATTN_OK) status = unpack_finish(u, err);
    if (status != ATTN_OK) {
        const char *bytes = body, *piece;
        size_t left = count, size;
        attn_error again = { 0 };
        assert_int_equal(unpack_next(u, &bytes, &left, &piece, &size, &again), status);
        assert_string_equal(again.text, err->text);
        assert_int_equal(unpack_finish(u, &again), status);
    }
    unpack_free(u);
    return status;
}

static const size_t parts[] = { 1, 2, 7, 1000, SIZE_MAX / 2 };

static void test_what_was_compressed_comes_out_however_it_is_split(void **state)
{
    enum { BYTES = 200000 };
    static char text[BYTES];
    (void)state;
    for (size_t i = 0; i < BYTES; i++) text[i] = (char)(i < BYTES / 2 ? 0 : i * 2654435761u >> 20);
    for (int coding = UNPACK_GZIP; coding <= UNPACK_DEFLATE; coding++)
        for (size_t count = 0; count <= BYTES; count += BYTES / 4) {
            size_t size;
            char *const body = packed((enum unpack_coding)coding, text, count, &size);
            for (size_t p = 0; p < ARRAY_SIZE(parts); p++) {
                attn_error err = { 0 };
                uint64_t out;
                assert_int_equal(unpack_all((enum unpack_coding)coding, count, body, size, parts[p], text, &out, &err),
                                 ATTN_OK);
                assert_int_equal(out, count);
            }
            free(body);
        }
}

static void test_a_body_without_a_byte_is_not_this_file_s_to_refuse(void **state)
{
    attn_error err = { 0 };
    uint64_t out;
    (void)state;
    assert_int_equal(unpack_all(UNPACK_GZIP, 10, "", 0, 1, NULL, &out, &err), ATTN_OK);
}

/* Each case changes one byte of the compressed form of "hello", shortens the form, or appends to it. */
static void test_every_fault_is_named_and_is_the_same_however_it_is_split(void **state)
{
    static const struct {
        enum unpack_coding coding;
        /* at: index of the byte to change (-1: the last); to: its new value (negative: no change) */
        int at, to;
        int cut;
        const char *more, *says;
    } cases[] = {
        { UNPACK_GZIP, 0, 'x', 0, "",
          "Content-Encoding is gzip, but the body does not begin with 1f 8b, as gzip does" },
        { UNPACK_GZIP, 0, '{', 0, "",
          "Content-Encoding is gzip, but the body does not begin with 1f 8b, as gzip does, it begins like JSON: was it "
          "compressed?" },
        { UNPACK_DEFLATE, 0, 'y', 0, "",
          "Content-Encoding is deflate, but the body does not begin like zlib's format (RFC 1950), which deflate means "
          "in HTTP" },
        { UNPACK_GZIP, 2, 7, 0, "",
          "the body is no sound gzip: behind 0 bytes that it unpacks to, unknown compression method" },
        { UNPACK_GZIP, 10, 0x07, 0, "",
          "the body is no sound gzip: behind 0 bytes that it unpacks to, invalid block type" },
        { UNPACK_GZIP, -8, 1, 0, "",
          "the body is no sound gzip: behind 5 bytes that it unpacks to, the checksum at its end is of other bytes "
          "(was "
          "it changed on its way?)" },
        { UNPACK_GZIP, -4, 1, 0, "",
          "the body is no sound gzip: behind 5 bytes that it unpacks to, the length at its end is another one (was it "
          "changed on its way?)" },
        { UNPACK_DEFLATE, -1, 1, 0, "",
          "the body is no sound deflate: behind 5 bytes that it unpacks to, the checksum at its end is of other bytes "
          "(was it changed on its way?)" },
        { UNPACK_GZIP, 0, -1, 1, "",
          "the body ends inside its gzip stream, after 24 bytes that unpack to 5 (was it cut off?)" },
        { UNPACK_DEFLATE, 0, -1, 4, "",
          "the body ends inside its deflate stream, after 9 bytes that unpack to 5 (was it cut off?)" },
        { UNPACK_GZIP, 0, -1, 24, "",
          "the body ends inside its gzip stream, after 1 bytes that unpack to 0 (was it cut off?)" },
        { UNPACK_GZIP, 0, -1, 0, "z", "the body goes on behind byte 25, where its gzip stream ends" },
        { UNPACK_GZIP, 0, -1, 0, "\x1f\x8b\x08",
          "the body goes on behind byte 25, where its gzip stream ends; a second gzip member is not taken" },
        { UNPACK_DEFLATE, 0, -1, 0, "\x1f", "the body goes on behind byte 13, where its deflate stream ends" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        size_t size;
        char *const made = packed(cases[i].coding, "hello", 5, &size), body[64];
        if (cases[i].to >= 0) made[cases[i].at < 0 ? (int)size + cases[i].at : cases[i].at] = (char)cases[i].to;
        size -= (size_t)cases[i].cut;
        memcpy(body, made, size);
        memcpy(body + size, cases[i].more, strlen(cases[i].more));
        size += strlen(cases[i].more);
        for (size_t p = 0; p < ARRAY_SIZE(parts); p++) {
            attn_error err = { 0 };
            uint64_t out;
            assert_int_equal(unpack_all(cases[i].coding, 1000, body, size, parts[p], "hello", &out, &err),
                             ATTN_INVALID);
            assert_string_equal(err.text, cases[i].says);
        }
        free(made);
    }
}

static void test_a_zlib_stream_that_wants_a_dictionary_is_refused(void **state)
{
    /* These bytes set the FDICT bit of RFC 1950, which asks for a preset dictionary. */
    static const char body[] = { 0x78, (char)0xbb, 1, 2, 3, 4, 5, 6 };
    attn_error err = { 0 };
    uint64_t out;
    (void)state;
    assert_int_equal(unpack_all(UNPACK_DEFLATE, 10, body, sizeof body, 1, NULL, &out, &err), ATTN_INVALID);
    assert_string_equal(err.text, "the body is no sound deflate: behind 0 bytes that it unpacks to, it wants a "
                                  "dictionary, and there is none");
}

/* All bytes up to the limit are unpacked, because a JSON error in them is reported before the error about the limit. */
static void test_the_limit_of_what_a_body_unpacks_to_is_kept_to_the_byte(void **state)
{
    enum { LIMIT = UNPACK_PIECE_BYTES + 5 };
    static const char zeros[LIMIT + 1];
    (void)state;
    for (int over = 0; over <= 1; over++) {
        size_t size;
        char *const body = packed(UNPACK_GZIP, zeros, LIMIT + (size_t)over, &size);
        for (size_t p = 0; p < ARRAY_SIZE(parts); p++) {
            attn_error err = { 0 };
            uint64_t out;
            assert_int_equal(unpack_all(UNPACK_GZIP, LIMIT, body, size, parts[p], zeros, &out, &err),
                             over ? ATTN_TOO_LARGE : ATTN_OK);
            assert_int_equal(out, LIMIT);
            if (over)
                assert_string_equal(err.text, "the body unpacks to more than 32773 bytes, the limit (the server's "
                                              "--max-body-bytes)");
        }
        free(body);
    }
}

static void test_a_thousand_to_one_is_taken_up_to_64_mib(void **state)
{
    const size_t bytes[] = { UNPACK_FREE_BYTES, UNPACK_FREE_BYTES + 1 };
    char *const zeros = calloc(1, bytes[1]);
    (void)state;
    assert_non_null(zeros);
    for (int i = 0; i < 2; i++) {
        size_t size;
        attn_error err = { 0 };
        uint64_t out;
        char *const body = packed(UNPACK_DEFLATE, zeros, bytes[i], &size);
        assert_int_equal(unpack_all(UNPACK_DEFLATE, UINT64_MAX, body, size, size, NULL, &out, &err),
                         i ? ATTN_TOO_LARGE : ATTN_OK);
        if (i)
            assert_string_equal(err.text, "the body unpacks to more than 256 times its bytes, and to more than 64 MiB; "
                                          "send it uncompressed");
        free(body);
    }
    free(zeros);
}

static void test_names_of_codings(void **state)
{
    static const struct {
        const char *text;
        int coding; /* -1: none */
    } cases[] = { { NULL, UNPACK_NOTHING },
                  { "", UNPACK_NOTHING },
                  { "identity", UNPACK_NOTHING },
                  { "gzip", UNPACK_GZIP },
                  { "GZIP", UNPACK_GZIP },
                  { "x-gzip", UNPACK_GZIP },
                  { "deflate", UNPACK_DEFLATE },
                  { "br", -1 },
                  { "gzip, deflate", -1 },
                  { "gzip;q=1", -1 },
                  { "gzi", -1 },
                  { "gzip ", UNPACK_GZIP },
                  { ", gzip,", UNPACK_GZIP },
                  { " ,\t, deflate , ,", UNPACK_DEFLATE },
                  { ",", UNPACK_NOTHING },
                  { ",gzip,,gzip", -1 },
                  { "gzip gzip", -1 },
                  { ", br", -1 } };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        enum unpack_coding coding;
        const bool known = unpack_coding_of(cases[i].text, &coding);
        assert_int_equal(known ? (int)coding : -1, cases[i].coding);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_was_compressed_comes_out_however_it_is_split),
        cmocka_unit_test(test_a_body_without_a_byte_is_not_this_file_s_to_refuse),
        cmocka_unit_test(test_every_fault_is_named_and_is_the_same_however_it_is_split),
        cmocka_unit_test(test_a_zlib_stream_that_wants_a_dictionary_is_refused),
        cmocka_unit_test(test_the_limit_of_what_a_body_unpacks_to_is_kept_to_the_byte),
        cmocka_unit_test(test_a_thousand_to_one_is_taken_up_to_64_mib),
        cmocka_unit_test(test_names_of_codings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
