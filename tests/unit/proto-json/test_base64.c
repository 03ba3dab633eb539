/* test_base64.c: compares every variant of the base64 code with the definition: expected_stop() and expected_bytes(),
 * which follow the RFC without a state machine. Every buffer ends at a page without access rights, so that an access
 * one byte too far crashes. */
#include "proto-json/base64.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof(a)[0])

enum { LONGEST = 200, ROOM = 1 << 16 };

/* ---- Memory that ends at a page without access rights ------------------------------------------------------------ */

struct walled {
    uint8_t *end;
};

static struct walled walled_new(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *base = mmap(NULL, ROOM + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + ROOM, page, PROT_NONE) != 0) abort();
    return (struct walled){ base + ROOM };
}

/* Returns the address of the last `bytes` bytes before the page without access rights. */
static void *before(struct walled w, size_t bytes)
{
    return w.end - bytes;
}

static struct walled text_wall, out_wall, bytes_wall;

static int set_up(void **state)
{
    (void)state;
    text_wall = walled_new();
    out_wall = walled_new();
    bytes_wall = walled_new();
    return 0;
}

/* ---- A second, simple implementation of base64 ------------------------------------------------------------------- */

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static int value_of(char c)
{
    const char *at = c ? strchr(letters, c) : NULL;
    return at ? (int)(at - letters) : -1;
}

/* Returns the offset of the first character that is not valid at its place. */
static size_t expected_stop(const char *text, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bool padded = i > 0 && text[i - 1] == '=';
        if (padded && !(i % 4 == 3 && text[i] == '=')) return i;
        if (padded || value_of(text[i]) >= 0) continue;
        if (text[i] != '=' || i % 4 < 2) return i;
        if (value_of(text[i - 1]) & (i % 4 == 2 ? 15 : 3)) return i;
    }
    return count;
}

/* Decodes the complete groups of four characters. Returns the number of decoded bytes. */
static size_t expected_bytes(const char *text, size_t count, uint8_t *out)
{
    size_t written = 0;
    for (size_t i = 0; i + 4 <= count; i += 4) {
        unsigned bits = 0;
        for (size_t j = 0; j < 4; j++) bits = bits << 6 | (unsigned)(text[i + j] == '=' ? 0 : value_of(text[i + j]));
        size_t bytes = text[i + 2] == '=' ? 1 : text[i + 3] == '=' ? 2 : 3;
        for (size_t j = 0; j < bytes; j++) out[written++] = (uint8_t)(bits >> (16 - 8 * j));
    }
    return written;
}

static void plain_encode(const uint8_t *bytes, size_t count, char *text)
{
    for (size_t i = 0; i < count; i += 3, text += 4) {
        unsigned left = (unsigned)(count - i), b1 = left > 1 ? bytes[i + 1] : 0, b2 = left > 2 ? bytes[i + 2] : 0;
        unsigned bits = (unsigned)bytes[i] << 16 | b1 << 8 | b2;
        for (int j = 0; j < 4; j++) text[j] = letters[bits >> (18 - 6 * j) & 63];
        if (left < 3) text[3] = '=';
        if (left < 2) text[2] = '=';
    }
}

static uint64_t random_state = 88172645463325252u;
static uint64_t next_random(void) /* xorshift64 */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}

/* Decodes one piece of a text. Both the piece and the output end at a page without access rights. */
static size_t decode_piece(base64_decoder *d, const char *piece, size_t count, uint8_t *result, size_t *result_bytes)
{
    char *text = before(text_wall, count);
    uint8_t *out = before(out_wall, BASE64_DECODED_MAX(count));
    memcpy(text, piece, count);
    size_t written = SIZE_MAX, taken = base64_decode_until(d, text, count, out, &written);
    memcpy(result + *result_bytes, out, written);
    *result_bytes += written;
    return taken;
}

/* Decodes a text in two pieces. Compares four results with the definition: where decoding stopped, the decoder's
 * offset, the decoded bytes, and what base64_finish() returns. */
static void check_split(const char *text, size_t count, size_t split)
{
    uint8_t want[LONGEST * 3], got[LONGEST * 3];
    size_t stop = expected_stop(text, count), want_bytes = expected_bytes(text, stop, want), got_bytes = 0;
    base64_decoder d = { 0 };
    size_t taken = decode_piece(&d, text, split, got, &got_bytes);
    if (taken == split) taken += decode_piece(&d, text + split, count - split, got, &got_bytes);
    if (taken != stop || d.offset != stop || got_bytes != want_bytes || memcmp(got, want, want_bytes) != 0)
        fail_msg("'%.*s' split at %zu: stopped at %zu (offset %llu), %zu bytes; expected %zu, %zu bytes", (int)count,
                 text, split, taken, (unsigned long long)d.offset, got_bytes, stop, want_bytes);
    assert_int_equal(base64_finish(&d), stop % 4 == 0);
}

/* ---- The tests, which run for every variant of the base64 code --------------------------------------------------- */

#define EACH_VARIANT(name) for (const char *const *name = base64_variants(); *name && base64_use(*name); name++)

static void test_the_vectors_of_the_rfc(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *text;
    } cases[] = {
        { "", "" },
        { "f", "Zg==" },
        { "fo", "Zm8=" },
        { "foo", "Zm9v" },
        { "foob", "Zm9vYg==" },
        { "fooba", "Zm9vYmE=" },
        { "foobar", "Zm9vYmFy" },
    };
    EACH_VARIANT(name)
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[16] = "";
        base64_encode((const uint8_t *)cases[i].bytes, strlen(cases[i].bytes), text);
        assert_string_equal(text, cases[i].text);
        check_split(text, strlen(text), 0);
    }
    assert_true(base64_use(NULL));
}

static void test_every_length_comes_back_through_every_split(void **state)
{
    (void)state;
    EACH_VARIANT(name)
    for (size_t bytes = 0; bytes <= LONGEST; bytes++) {
        size_t chars = BASE64_ENCODED(bytes);
        char want[LONGEST * 2], *text = before(text_wall, chars);
        uint8_t *source = before(bytes_wall, bytes);
        for (size_t i = 0; i < bytes; i++) source[i] = (uint8_t)next_random();
        plain_encode(source, bytes, want);
        memset(text - 64, 0x55, chars + 64);
        base64_encode(source, bytes, text);
        assert_memory_equal(text, want, chars);
        for (size_t i = 1; i <= 64; i++) assert_int_equal(text[-(int)i], 0x55);
        for (size_t split = 0; split <= chars; split++) check_split(want, chars, split);
    }
    assert_true(base64_use(NULL));
}

static void test_every_group_of_bytes_is_encoded_right(void **state)
{
    (void)state;
    enum { BLOCK = 48 * 16 };
    uint8_t bytes[BLOCK], back[BASE64_DECODED_MAX(BLOCK / 3 * 4)];
    char text[BLOCK / 3 * 4], want[BLOCK / 3 * 4];
    EACH_VARIANT(name)
    /* One in 17 of all groups of three bytes is tested; the others need the same arithmetic. */
    for (uint32_t group = 0; group < 1u << 24; group += BLOCK / 3 * 17) {
        for (uint32_t i = 0; i < BLOCK / 3; i++) {
            uint32_t g = (group + i) & 0xFFFFFF;
            bytes[3 * i] = (uint8_t)(g >> 16), bytes[3 * i + 1] = (uint8_t)(g >> 8), bytes[3 * i + 2] = (uint8_t)g;
        }
        base64_encode(bytes, BLOCK, text);
        plain_encode(bytes, BLOCK, want);
        assert_memory_equal(text, want, sizeof text);
        base64_decoder d = { 0 };
        size_t written = 0;
        assert_true(base64_decode(&d, text, sizeof text, back, &written));
        assert_int_equal(written, BLOCK);
        assert_memory_equal(back, bytes, BLOCK);
    }
    assert_true(base64_use(NULL));
}

static void test_every_wrong_byte_at_every_position_is_found_there(void **state)
{
    (void)state;
    /* The lengths are in characters; 400 reaches the unrolled loops. */
    static const size_t lengths[] = { 100, 400 };
    EACH_VARIANT(name)
    for (size_t l = 0; l < ARRAY_SIZE(lengths); l++) {
        size_t chars = lengths[l];
        char text[400];
        for (size_t i = 0; i < chars; i++) text[i] = letters[next_random() % 64];
        for (size_t at = 0; at < chars; at++) {
            char good = text[at];
            for (int c = 0; c < 256; c++) {
                text[at] = (char)c;
                bool foreign = value_of((char)c) < 0;
                if (!foreign && l > 0) continue;
                check_split(text, chars, 0);
                if (foreign && !(c == '=' && at % 4 >= 2)) assert_int_equal(expected_stop(text, chars), at);
            }
            text[at] = good;
        }
    }
    assert_true(base64_use(NULL));
}

static void test_padding_is_strict(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t stop;
        bool complete;
        const char *reason;
    } cases[] = {
        { "QQ==", 4, true, NULL },
        { "QUE=", 4, true, NULL },
        { "Q", 1, false, NULL },
        { "QQ", 2, false, NULL },
        { "QQ=", 3, false, NULL },
        { "QUE", 3, false, NULL },
        { "=", 0, true, "padding where a group of four has not two characters yet" },
        { "Q=", 1, false, "padding where a group of four has not two characters yet" },
        { "QR==", 2, false, "padding after a character whose unused bits are not zero" },
        { "QUF=", 3, false, "padding after a character whose unused bits are not zero" },
        { "QQ=A", 3, false, "a second '=' must follow the first" },
        { "QQ==QQ==", 4, true, "nothing may follow the padding" },
        { "QUE==", 4, true, "nothing may follow the padding" },
        { "QQ===", 4, true, "nothing may follow the padding" },
        { "QUFB=", 4, true, "padding where a group of four has not two characters yet" },
        { "QUFB QUFB", 4, true, "not a character of the base64 alphabet (RFC 4648 section 4)" },
        { "QU-B", 2, false, "not a character of the base64 alphabet (RFC 4648 section 4)" },
        { "QU_B", 2, false, "not a character of the base64 alphabet (RFC 4648 section 4)" },
        { "QUFB\n", 4, true, "not a character of the base64 alphabet (RFC 4648 section 4)" },
        { "QUFB\xC3\xA9", 4, true, "not a character of the base64 alphabet (RFC 4648 section 4)" },
    };
    EACH_VARIANT(name)
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        uint8_t out[BASE64_DECODED_MAX(16)];
        size_t count = strlen(cases[i].text), written;
        base64_decoder d = { 0 };
        bool fine = base64_decode(&d, cases[i].text, count, out, &written);
        assert_int_equal(fine, cases[i].stop == count);
        assert_int_equal(d.offset, cases[i].stop);
        assert_int_equal(base64_finish(&d), cases[i].complete);
        if (!fine) assert_string_equal(base64_reason(&d, cases[i].text[cases[i].stop]), cases[i].reason);
        for (size_t split = 0; split <= count; split++) check_split(cases[i].text, count, split);
    }
    assert_true(base64_use(NULL));
}

static void test_random_texts_of_likely_characters_agree(void **state)
{
    (void)state;
    static const char likely[] = "AAAAQQgwBCDabcxyz019+/+/+/==\"\\ -_";
    for (int i = 0; i < 20000; i++) {
        char text[LONGEST];
        size_t count = next_random() % LONGEST, split = next_random() % (count + 1), errors = next_random() % 3;
        for (size_t j = 0; j < count; j++) text[j] = letters[next_random() % 64];
        for (size_t j = 0; j < errors && count; j++)
            text[next_random() % count] = likely[next_random() % (sizeof likely - 1)];
        EACH_VARIANT(name) check_split(text, count, split);
    }
    assert_true(base64_use(NULL));
}

static void test_a_stopped_stream_goes_on_with_another_character(void **state)
{
    (void)state;
    /* The JSON scanner stops decoding at a backslash, decodes the escaped '/', and continues after it. */
    EACH_VARIANT(name)
    {
        static const char left[] = "QU",
                          right[] = "BQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB\"}";
        uint8_t out[3][BASE64_DECODED_MAX(sizeof right)], want[256], got[256];
        size_t bytes[3];
        base64_decoder d = { 0 };
        char whole[256];
        size_t chars = (size_t)snprintf(whole, sizeof whole, "%s/%.*s", left, (int)sizeof right - 3, right);
        assert_int_equal(base64_decode_until(&d, "QU\\/", 4, out[0], &bytes[0]), 2);
        assert_true(base64_decode(&d, "/", 1, out[1], &bytes[1]));
        assert_int_equal(base64_decode_until(&d, right, sizeof right - 1, out[2], &bytes[2]), sizeof right - 3);
        assert_true(base64_finish(&d));
        size_t total = 0;
        for (int i = 0; i < 3; i++) memcpy(got + total, out[i], bytes[i]), total += bytes[i];
        assert_int_equal(total, expected_bytes(whole, chars, want));
        assert_memory_equal(got, want, total);
        assert_int_equal(d.offset, chars);
    }
    assert_true(base64_use(NULL));
}

static void test_a_stream_that_is_far_along_decodes_the_same(void **state)
{
    (void)state;
    /* A text of this length is decoded with stores of whole cache lines that bypass the caches. The output begins at
     * every offset within a line. */
    enum { CHARS = 5000 };
    static char text[CHARS];
    static uint8_t want[CHARS];
    for (size_t i = 0; i < CHARS; i++) text[i] = letters[next_random() % 64];
    EACH_VARIANT(name)
    for (size_t into_line = 0; into_line < 64; into_line++)
        for (int errors = 0; errors < 4; errors++) {
            size_t count = CHARS - into_line % 7, at = next_random() % count;
            /* Half of the cases have the wrong character near an end of the text, where the decoder's loops begin or
             * end. */
            if (errors < 2) at = (next_random() % 300 + (size_t)errors * (count - 300)) % count;
            char good = text[at];
            if (errors < 3) text[at] = '"';
            char *piece = before(text_wall, count);
            uint8_t *out = before(out_wall, BASE64_DECODED_MAX(count) + into_line);
            memcpy(piece, text, count);
            base64_decoder d = { .offset = UINT64_C(1) << 40 };
            size_t written, taken = base64_decode_until(&d, piece, count, out, &written);
            size_t stop = errors < 3 ? at : count;
            assert_int_equal(taken, stop);
            assert_int_equal(d.offset, (UINT64_C(1) << 40) + stop);
            assert_int_equal(written, stop / 4 * 3);
            assert_int_equal(expected_bytes(text, stop, want), written);
            assert_memory_equal(out, want, written);
            text[at] = good;
        }
    assert_true(base64_use(NULL));
}

static void test_the_head_of_a_text_is_known_wherever_it_stopped(void **state)
{
    static const char text[] = "data+/0123456789";
    (void)state;
    for (size_t taken = 0; taken <= sizeof text - 1; taken++)
        for (size_t split = 0; split <= taken; split++) {
            uint8_t bytes[BASE64_DECODED_MAX(sizeof text)];
            char head[BASE64_HEAD + 1];
            base64_decoder d = { 0 };
            size_t first, second;
            assert_true(base64_decode(&d, text, split, bytes, &first));
            assert_true(base64_decode(&d, text + split, taken - split, bytes + first, &second));
            base64_head(&d, bytes, first + second, head);
            assert_int_equal(strlen(head), taken < BASE64_HEAD ? taken : BASE64_HEAD);
            assert_memory_equal(head, text, strlen(head));
        }
}

static void test_variants_are_found_by_name(void **state)
{
    (void)state;
    const char *const *names = base64_variants();
    size_t count = 0;
    while (names[count]) count++;
    assert_true(count >= 1);
    assert_string_equal(names[count - 1], "scalar");
    assert_false(base64_use("no such variant"));
    assert_true(base64_use(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_variants_are_found_by_name),
        cmocka_unit_test(test_the_vectors_of_the_rfc),
        cmocka_unit_test(test_padding_is_strict),
        cmocka_unit_test(test_every_length_comes_back_through_every_split),
        cmocka_unit_test(test_every_group_of_bytes_is_encoded_right),
        cmocka_unit_test(test_every_wrong_byte_at_every_position_is_found_there),
        cmocka_unit_test(test_random_texts_of_likely_characters_agree),
        cmocka_unit_test(test_a_stream_that_is_far_along_decodes_the_same),
        cmocka_unit_test(test_a_stopped_stream_goes_on_with_another_character),
        cmocka_unit_test(test_the_head_of_a_text_is_known_wherever_it_stopped),
    };
    return cmocka_run_group_tests_name("base64", tests, set_up, NULL);
}
