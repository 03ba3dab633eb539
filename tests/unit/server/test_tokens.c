/* The token file, and who is let in. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/http/tokens.h"

static char path[] = "/tmp/attnd-test-tokens-XXXXXX";

static void write_file(const char *text)
{
    FILE *file = fopen(path, "w");
    fputs(text, file);
    fclose(file);
}

static int make_file(void **state)
{
    (void)state;
    const int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    return fd < 0;
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

static void test_only_whole_tokens_are_let_in(void **state)
{
    (void)state;
    char why[200];
    write_file("# people\nfirst-token\n\n  second  \r\n#third\n");
    struct tokens *t = tokens_open(path, why, sizeof why);
    assert_non_null(t);
    static const struct {
        const char *authorization;
        bool allowed;
    } cases[] = {
        { "Bearer first-token", true },
        { "bearer   second", true },
        { "Bearer first-toke", false },
        { "Bearer first-token2", false },
        { "Bearer #third", false },
        { "Bearer third", false },
        { "Bearer ", false },
        { "Bearer", false },
        { "Basic first-token", false },
        { "first-token", false },
        { NULL, false },
        { "", false },
        { "Bearer # people", false },
        { "Bearer first-token ", false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(tokens_allow(t, cases[i].authorization), cases[i].allowed);
    char longest[TOKEN_MAX_BYTES + 20] = "Bearer ";
    memset(longest + 7, 'x', TOKEN_MAX_BYTES + 1);
    assert_false(tokens_allow(t, longest));
    tokens_close(t);
}

static void test_a_bad_file_is_refused_in_one_line(void **state)
{
    (void)state;
    char why[300], want[300], text[400];
    static const struct {
        const char *text, *says;
    } cases[] = {
        { "", "no token in it" },
        { "# nothing\n\n", "no token in it" },
        { "good\nbad token\n", "line 2 contains a space" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(cases[i].text);
        assert_null(tokens_open(path, why, sizeof why));
        snprintf(want, sizeof want, "--token-file %s: %s", path, cases[i].says);
        assert_string_equal(why, want);
    }
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    write_file(text);
    assert_null(tokens_open(path, why, sizeof why));
    snprintf(want, sizeof want, "--token-file %s: line 1 is longer than 256 bytes", path);
    assert_string_equal(why, want);
    assert_null(tokens_open("/nonexistent/tokens", why, sizeof why));
    assert_string_equal(why, "--token-file /nonexistent/tokens: No such file or directory");
}

static void test_a_reload_is_all_or_nothing(void **state)
{
    (void)state;
    char why[300];
    write_file("old\n");
    struct tokens *t = tokens_open(path, why, sizeof why);
    write_file("# empty\n");
    assert_false(tokens_reload(t, why, sizeof why));
    assert_true(tokens_allow(t, "Bearer old"));
    write_file("new\n");
    assert_true(tokens_reload(t, why, sizeof why));
    assert_false(tokens_allow(t, "Bearer old"));
    assert_true(tokens_allow(t, "Bearer new"));
    tokens_close(t);
}

static void test_many_tokens(void **state)
{
    (void)state;
    char why[300], header[64];
    FILE *file = fopen(path, "w");
    for (int i = 0; i < TOKEN_MAX_COUNT; i++) fprintf(file, "token-%d\n", i);
    fclose(file);
    struct tokens *t = tokens_open(path, why, sizeof why);
    assert_non_null(t);
    for (int i = 0; i < TOKEN_MAX_COUNT; i += 511) {
        snprintf(header, sizeof header, "Bearer token-%d", i);
        assert_true(tokens_allow(t, header));
    }
    assert_false(tokens_allow(t, "Bearer token-4096"));
    tokens_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_only_whole_tokens_are_let_in),
        cmocka_unit_test(test_a_bad_file_is_refused_in_one_line),
        cmocka_unit_test(test_a_reload_is_all_or_nothing),
        cmocka_unit_test(test_many_tokens),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
