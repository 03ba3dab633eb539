/* test_tokens.c: tests of the token file: how the server reads it, and which tokens it accepts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/base/flow.h"
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

static bool allows(struct tokens *tokens, const char *authorization)
{
    struct caller *caller = tokens_find(tokens, authorization);
    const bool found = caller != NULL;
    caller_release(caller);
    return found;
}

static void test_only_whole_tokens_are_let_in(void **state)
{
    (void)state;
    char why[200];
    write_file("# people\nfirst-token\n\n  second  \r\n#third\n");
    struct tokens *t = tokens_open(path, 50, why, sizeof why);
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
        assert_int_equal(allows(t, cases[i].authorization), cases[i].allowed);
    char longest[TOKEN_MAX_BYTES + 20] = "Bearer ";
    memset(longest + 7, 'x', TOKEN_MAX_BYTES + 1);
    assert_false(allows(t, longest));
    tokens_close(t);
}

static void test_a_comment_behind_a_token_names_it(void **state)
{
    (void)state;
    static const struct {
        const char *authorization, *name;
    } cases[] = {
        { "Bearer first", "team a" },       { "Bearer second", "line 4" }, { "Bearer with#hash", "line 5" },
        { "Bearer third#", "the third #" }, { "Bearer fourth", "line 7" },
    };
    char why[200];
    write_file("# people\nfirst # team a \n\nsecond\nwith#hash\nthird#\t#the third # \nfourth #\n");
    struct tokens *t = tokens_open(path, 50, why, sizeof why);
    assert_non_null(t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct caller *caller = tokens_find(t, cases[i].authorization);
        assert_non_null(caller);
        assert_string_equal(caller->flow->name, cases[i].name);
        caller_release(caller);
    }
    tokens_close(t);
}

static void test_a_name_is_utf8_whatever_the_comment_is(void **state)
{
    (void)state;
    char why[200];
    write_file("first # caf\xe9 \xc3\xa9\xe2\x82\nsecond # "
               "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9"
               "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9"
               "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\n");
    struct tokens *t = tokens_open(path, 50, why, sizeof why);
    assert_non_null(t);
    struct caller *first = tokens_find(t, "Bearer first"), *second = tokens_find(t, "Bearer second");
    assert_string_equal(first->flow->name, "caf? \xc3\xa9??");
    /* A name may have 63 bytes, so 31 characters of 2 bytes fit. */
    assert_int_equal(strlen(second->flow->name), 62);
    caller_release(first);
    caller_release(second);
    tokens_close(t);
}

#define NOT_ASCII "; a token is of visible ASCII characters, for it stands in a header"

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
        { "good\n\x1f\x8b\b\n", "line 2 contains the byte 0x1f" NOT_ASCII },
        { "\xef\xbb\xbfgood\n", "line 1 contains the byte 0xef" NOT_ASCII },
        { "good\ng\xc3\xb6\xc3\xb6", "line 2 contains the byte 0xc3" NOT_ASCII },
        { "good\x7f", "line 1 contains the byte 0x7f" NOT_ASCII },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(cases[i].text);
        assert_null(tokens_open(path, 50, why, sizeof why));
        snprintf(want, sizeof want, "--token-file %s: %s", path, cases[i].says);
        assert_string_equal(why, want);
    }
    FILE *file = fopen(path, "w");
    fwrite("good\nwith\0in it\n", 1, 16, file);
    fclose(file);
    assert_null(tokens_open(path, 50, why, sizeof why));
    snprintf(want, sizeof want, "--token-file %s: line 2 contains %s", path, "a space");
    assert_string_equal(why, want);
    file = fopen(path, "w");
    fwrite("good\nwith\0init", 1, 14, file);
    fclose(file);
    assert_null(tokens_open(path, 50, why, sizeof why));
    snprintf(want, sizeof want, "--token-file %s: line 2 contains the byte 0x00%s", path, NOT_ASCII);
    assert_string_equal(why, want);
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    write_file(text);
    assert_null(tokens_open(path, 50, why, sizeof why));
    snprintf(want, sizeof want, "--token-file %s: line 1 is longer than 256 bytes", path);
    assert_string_equal(why, want);
    assert_null(tokens_open("/nonexistent/tokens", 50, why, sizeof why));
    assert_string_equal(why, "--token-file /nonexistent/tokens: No such file or directory");
}

static void test_a_reload_is_all_or_nothing(void **state)
{
    (void)state;
    char why[300];
    write_file("old\n");
    struct tokens *t = tokens_open(path, 50, why, sizeof why);
    write_file("# empty\n");
    assert_false(tokens_reload(t, why, sizeof why));
    assert_true(allows(t, "Bearer old"));
    write_file("new\n");
    assert_true(tokens_reload(t, why, sizeof why));
    assert_false(allows(t, "Bearer old"));
    assert_true(allows(t, "Bearer new"));
    tokens_close(t);
}

static void test_many_tokens(void **state)
{
    (void)state;
    char why[300], header[64];
    FILE *file = fopen(path, "w");
    for (int i = 0; i < TOKEN_MAX_COUNT; i++) fprintf(file, "token-%d\n", i);
    fclose(file);
    struct tokens *t = tokens_open(path, 50, why, sizeof why);
    assert_non_null(t);
    for (int i = 0; i < TOKEN_MAX_COUNT; i += 511) {
        snprintf(header, sizeof header, "Bearer token-%d", i);
        assert_true(allows(t, header));
    }
    assert_false(allows(t, "Bearer token-4096"));
    tokens_close(t);
}

/* `authorization` is the Authorization header of a caller, and `bound` is the limit of a resource. Returns how much of
 * the resource this caller may use. */
static int64_t share_of(struct tokens *tokens, const char *authorization, int64_t bound)
{
    struct caller *caller = tokens_find(tokens, authorization);
    assert_non_null(caller);
    const int64_t share = caller_share(caller, bound);
    caller_release(caller);
    return share;
}

static void test_each_token_has_an_account_that_survives_a_reload(void **state)
{
    (void)state;
    char why[300];
    write_file("a\nb\na\n");
    struct tokens *t = tokens_open(path, 50, why, sizeof why);
    struct caller *a = tokens_find(t, "Bearer a"), *b = tokens_find(t, "Bearer b");
    assert_ptr_not_equal(a, b);
    write_file("c\nb\n");
    assert_true(tokens_reload(t, why, sizeof why));
    struct caller *again = tokens_find(t, "Bearer b"), *c = tokens_find(t, "Bearer c");
    assert_ptr_equal(again, b);
    /* Token `a` is no longer in the file, but a request still holds its account, so token `c` must get another
     * account. */
    assert_ptr_not_equal(c, a);
    assert_null(tokens_find(t, "Bearer a"));
    caller_release(a);
    caller_release(b);
    caller_release(c);
    caller_release(again);
    tokens_close(t);
}

static void test_a_token_has_a_share_while_there_are_others(void **state)
{
    (void)state;
    char why[300];
    write_file("a\na\n");
    struct tokens *t = tokens_open(path, 30, why, sizeof why);
    assert_int_equal(share_of(t, "Bearer a", 1000), 1000);
    write_file("a\nb\n");
    assert_true(tokens_reload(t, why, sizeof why));
    assert_int_equal(share_of(t, "Bearer a", 1000), 300);
    assert_int_equal(share_of(t, "Bearer b", 199), 59);
    assert_int_equal(share_of(t, "Bearer b", 1), 1);
    assert_true(share_of(t, "Bearer b", INT64_MAX) > INT64_MAX / 4);
    write_file("b\n");
    assert_true(tokens_reload(t, why, sizeof why));
    assert_int_equal(share_of(t, "Bearer b", 1000), 1000);
    tokens_close(t);
}

static void test_what_is_wrong_is_said_without_the_secret(void **state)
{
    (void)state;
    assert_string_equal(tokens_fault(NULL), "no Authorization came");
    assert_string_equal(tokens_fault("secret"), "Authorization has no scheme in front of the token");
    assert_string_equal(tokens_fault("Basic c2VjcmV0"), "Authorization has another scheme than Bearer");
    assert_string_equal(tokens_fault("bearer secret"), "the token is not one of those in --token-file");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_only_whole_tokens_are_let_in),
        cmocka_unit_test(test_a_comment_behind_a_token_names_it),
        cmocka_unit_test(test_a_name_is_utf8_whatever_the_comment_is),
        cmocka_unit_test(test_a_bad_file_is_refused_in_one_line),
        cmocka_unit_test(test_a_reload_is_all_or_nothing),
        cmocka_unit_test(test_many_tokens),
        cmocka_unit_test(test_what_is_wrong_is_said_without_the_secret),
        cmocka_unit_test(test_each_token_has_an_account_that_survives_a_reload),
        cmocka_unit_test(test_a_token_has_a_share_while_there_are_others),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
