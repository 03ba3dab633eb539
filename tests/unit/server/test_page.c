/* test_page.c: tests that each page is complete, obeys its own security policy, and loads nothing from other
 * servers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/routes/page.h"

/* Computes SHA-256 (FIPS 180-4) of a text, in base64 as Content-Security-Policy wants it. */
static void sha256_base64(const char *text, size_t count, char out[48])
{
    static const uint32_t k[64] = { 0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
                                    0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
                                    0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
                                    0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
                                    0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
                                    0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
                                    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
                                    0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
                                    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
                                    0xc67178f2 };
    uint32_t h[8] = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };
    const size_t blocks = (count + 8) / 64 + 1;
    for (size_t b = 0; b < blocks; b++) {
        uint32_t w[64], s[8];
        /* SHA-256 pads a message with 0x80, zeros, and the message's length in bits. */
        for (size_t i = 0; i < 64; i++) {
            const size_t n = b * 64 + i;
            const uint8_t byte = n < count              ? (uint8_t)text[n]
                                 : n == count           ? 0x80
                                 : n >= blocks * 64 - 8 ? (uint8_t)((uint64_t)count * 8 >> 8 * (blocks * 64 - 1 - n))
                                                        : 0;
            w[i / 4] = (i % 4 ? w[i / 4] << 8 : 0) | byte;
        }
#define ROTATE(x, n) ((x) >> (n) | (x) << (32 - (n)))
        for (int i = 16; i < 64; i++)
            w[i] = (ROTATE(w[i - 2], 17) ^ ROTATE(w[i - 2], 19) ^ w[i - 2] >> 10) + w[i - 7] +
                   (ROTATE(w[i - 15], 7) ^ ROTATE(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 16];
        memcpy(s, h, sizeof s);
        for (int i = 0; i < 64; i++) {
            const uint32_t t1 = s[7] + (ROTATE(s[4], 6) ^ ROTATE(s[4], 11) ^ ROTATE(s[4], 25)) +
                                ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
            const uint32_t t2 = (ROTATE(s[0], 2) ^ ROTATE(s[0], 13) ^ ROTATE(s[0], 22)) +
                                ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof s[0]);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) h[i] += s[i];
#undef ROTATE
    }
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint8_t digest[33] = { 0 };
    for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(h[i / 4] >> (24 - 8 * (i % 4)));
    for (int i = 0; i < 11; i++) {
        const uint32_t group = (uint32_t)digest[3 * i] << 16 | (uint32_t)digest[3 * i + 1] << 8 | digest[3 * i + 2];
        for (int c = 0; c < 4; c++) out[4 * i + c] = alphabet[group >> (18 - 6 * c) & 63];
    }
    out[43] = '=';
    out[44] = '\0';
}

static char *page_text(enum page which)
{
    size_t length = 0;
    char *page = page_write(which, &length);
    assert_non_null(page);
    assert_int_equal(strlen(page), length);
    return page;
}

/* Checks that the page's Content-Security-Policy has the hash of its only style or script. */
static void check_policy(enum page which, const char *element)
{
    char open[16], shut[16], want[96], hash[48];
    char *page = page_text(which);
    snprintf(open, sizeof open, "<%s>", element);
    snprintf(shut, sizeof shut, "</%s>", element);
    const char *begin = strstr(page, open), *end = strstr(page, shut);
    assert_non_null(begin);
    assert_non_null(end);
    begin += strlen(open);
    sha256_base64(begin, (size_t)(end - begin), hash);
    snprintf(want, sizeof want, "%s-src 'sha256-%s'", element, hash);
    if (strstr(page_csp(which), want) == NULL) fail_msg("the policy of page %d must have: %s", (int)which, want);
    assert_null(strstr(end + 1, open));
    free(page);
}

static void test_sha256_is_that_of_fips_180(void **state)
{
    (void)state;
    char hash[48];
    sha256_base64("abc", 3, hash); /* the example of FIPS 180-2, appendix B.1 */
    assert_string_equal(hash, "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
}

static void test_the_policy_has_the_hash_of_the_style(void **state)
{
    (void)state;
    for (int which = 0; which < PAGE_COUNT; which++) check_policy((enum page)which, "style");
}

static void test_the_policy_has_the_hash_of_the_script(void **state)
{
    (void)state;
    for (int which = 0; which < PAGE_COUNT; which++) check_policy((enum page)which, "script");
}

static void check_needs_nothing(const char *page)
{
    assert_null(strstr(page, "src="));
    assert_null(strstr(page, "https:"));
    assert_null(strstr(page, "innerHTML"));
    assert_null(strstr(page, "style=")); /* the page's Content-Security-Policy forbids style attributes */
    for (const char *p = page; (p = strstr(p, "href=\"")) != NULL; p++)
        assert_true(p[6] == '/' || strncmp(p + 6, "data:,", 6) == 0);
    for (const char *p = page; (p = strstr(p, "byId('")) != NULL; p++) {
        char id[64];
        snprintf(id, sizeof id, "id=\"%.*s\"", (int)strcspn(p + 6, "'"), p + 6);
        if (strstr(page, id) == NULL) fail_msg("no element has %s", id);
    }
}

static void test_a_page_needs_nothing_from_elsewhere(void **state)
{
    (void)state;
    for (int which = 0; which < PAGE_COUNT; which++) {
        char *page = page_text((enum page)which);
        check_needs_nothing(page);
        free(page);
    }
}

static void test_a_page_is_whole_and_names_the_version(void **state)
{
    (void)state;
    for (int which = 0; which < PAGE_COUNT; which++) {
        char *page = page_text((enum page)which);
        assert_int_equal(strncmp(page, "<!DOCTYPE html>\n", 16), 0);
        assert_string_equal(page + strlen(page) - 8, "</html>\n");
        assert_non_null(strstr(page, "<span id=\"version\">" ATTND_VERSION "</span>"));
        for (const char *at = page; (at = strchr(at, '@')) != NULL; at++)
            /* No @PLACEHOLDER may be left in the page. (@media is no placeholder.) */
            assert_false(at[1] >= 'A' && at[1] <= 'Z');
        free(page);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sha256_is_that_of_fips_180),
        cmocka_unit_test(test_the_policy_has_the_hash_of_the_style),
        cmocka_unit_test(test_the_policy_has_the_hash_of_the_script),
        cmocka_unit_test(test_a_page_needs_nothing_from_elsewhere),
        cmocka_unit_test(test_a_page_is_whole_and_names_the_version),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
