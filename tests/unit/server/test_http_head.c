/* test_http_head.c: tests of request heads that a proxy and the server could understand differently, and of the parsers
 * of header values. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "server/http/http_head.h"
#include "server/routes/media.h"

/* Returns whether a request with these headers is accepted. In `head`, '|' separates the headers. */
static bool sound(struct http_head *f, const char *version, const char *head)
{
    static char text[512]; /* http_head keeps pointers into this text */
    strcpy(text, head);
    http_head_begin(f, version);
    for (char *at = text, *next; at && *at; at = next) {
        next = strchr(at, '|');
        if (next) *next++ = '\0';
        char *value = strchr(at, ':');
        *value++ = '\0';
        http_head_header(f, at, strlen(at), value, strlen(value));
    }
    return http_head_end(f);
}

static void test_doubtful_heads_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *version, *head, *fault;
    } cases[] = {
        { "HTTP/1.1", "Host:x", "" },
        { "HTTP/1.0", "", "" },
        { "HTTP/1.1", "Accept:a|Accept:b|Host:x", "" },
        { "HTTP/1.1", "Host:x|Transfer-Encoding:chunked ", "Transfer-Encoding must be chunked" },
        { "HTTP/1.1", "Host:x|Content-Length:5 ", "Content-Length must be decimal digits" },
        { "HTTP/1.1", "", "Host is missing" },
        { "HTTP/1.1", "Host:x|host:y", "Host is given twice" },
        { "HTTP/1.1", "Host:x|Content-Length:5|content-length:5", "Content-Length is given twice" },
        { "HTTP/1.1", "Host:x|Transfer-Encoding:chunked|Transfer-Encoding:chunked",
          "Transfer-Encoding is given twice" },
        { "HTTP/1.1", "Host:x|Authorization:a|Authorization:b", "Authorization is given twice" },
        { "HTTP/1.1", "Host:x|Origin:a|Origin:b", "Origin is given twice" },
        { "HTTP/1.1", "Host:x|Content-Length:5|Transfer-Encoding:chunked",
          "Content-Length and Transfer-Encoding are both given" },
        { "HTTP/1.1", "Host:x|Transfer-Encoding:gzip, chunked", "Transfer-Encoding must be chunked" },
        { "HTTP/1.1", "Host:x|Transfer-Encoding:", "Transfer-Encoding must be chunked" },
        { "HTTP/1.0", "Transfer-Encoding:chunked", "HTTP/1.0 has no Transfer-Encoding" },
        { "HTTP/1.1", "Host:x|Content-Length :5", "byte 14 of a header name is 0x20, which cannot stand there" },
        { "HTTP/1.1", "Host:x|a(b:5", "byte 1 of a header name is 0x28, which cannot stand there" },
        { "HTTP/1.1", "Host:x|\xc3\xa9:5", "byte 0 of a header name is 0xc3, which cannot stand there" },
        { "HTTP/1.1", "Host:x|:5", "a header has no name" },
        { "HTTP/1.1", "Host:x|A:b\001", "a header value contains the control character 0x01" },
        { "HTTP/1.1", "Host:x|A:b\r", "a header value contains the control character 0x0d" },
        { "HTTP/1.1", "Host:x|A:b\tc", "" },
        { "HTTP/1.1", "Host:x|Content-Length:", "Content-Length is empty" },
        { "HTTP/1.1", "Host:x|Content-Length:+5", "Content-Length must be decimal digits" },
        { "HTTP/1.1", "Host:x|Content-Length:0x5", "Content-Length must be decimal digits" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct http_head f;
        assert_int_equal(sound(&f, cases[i].version, cases[i].head), cases[i].fault[0] == '\0');
        assert_string_equal(f.fault, cases[i].fault);
    }
}

static void test_values(void **state)
{
    struct http_head f;
    (void)state;
    assert_true(sound(&f, "HTTP/1.1",
                      "Host:x \t|Accept:a |Accept:b\t|Accept:|Authorization:Bearer t|X-Request-Id: |"
                      "traceparent:1|traceparent:2"));
    assert_string_equal(f.value[HEADER_HOST], "x");
    assert_string_equal(f.value[HEADER_ACCEPT], "a, b, ");
    assert_string_equal(f.value[HEADER_AUTHORIZATION], "Bearer t");
    assert_string_equal(f.value[HEADER_REQUEST_ID], "");
    assert_string_equal(f.value[HEADER_TRACEPARENT], "1");
    assert_null(f.value[HEADER_ORIGIN]);

    static char value[HTTP_CONNECTION_BYTES + 1];
    http_head_begin(&f, "HTTP/1.1");
    memset(value, 'x', sizeof value - 2);
    strcpy(value + sizeof value - 2, " ");
    /* The value ends in white space, so it is copied. The copy fills the room for copies exactly. */
    http_head_header(&f, "Host", 4, value, sizeof value - 1);
    assert_int_equal(strlen(f.value[HEADER_HOST]), HTTP_CONNECTION_BYTES - 1);
    /* This value ends in white space, so it needs a copy, but the room for copies is full. */
    http_head_header(&f, "Authorization", 13, "a ", 2);
    assert_false(http_head_end(&f));
    assert_string_equal(f.fault, "Authorization is too long");
}

static void test_a_list_in_one_line_may_be_long_and_one_in_several_may_not(void **state)
{
    struct http_head f;
    char text[HTTP_HEAD_LIST_BYTES];
    (void)state;
    for (int end = 0; end < 2; end++) {
        http_head_begin(&f, "HTTP/1.0");
        memset(text, 'x', sizeof text);
        text[sizeof text - 1] = '\0';
        http_head_header(&f, "Accept", 6, text, sizeof text - 1);
        assert_true(http_head_end(&f));
        strcpy(text + sizeof text - 4, end ? " " : "");
        http_head_begin(&f, "HTTP/1.0");
        http_head_header(&f, "Accept", 6, text, sizeof text - 4 + (size_t)end);
        http_head_header(&f, "Accept", 6, "y ", 1 + (size_t)end);
        assert_true(http_head_end(&f));
        assert_int_equal(strlen(f.value[HEADER_ACCEPT]), HTTP_HEAD_LIST_BYTES - 1);
        http_head_header(&f, "Accept", 6, "", 0);
        assert_false(http_head_end(&f));
        assert_string_equal(f.fault, "Accept has several lines of more than 2048 bytes in all");
    }
}

static void test_methods(void **state)
{
    (void)state;
    assert_true(http_head_is_method("GET") && http_head_is_method("x-y!"));
    assert_false(http_head_is_method("") || http_head_is_method("GET\001") || http_head_is_method("A\xff") ||
                 http_head_is_method("A\"B"));
}

static void test_lengths(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t length;
    } cases[] = {
        { "0", 0 },
        { "007", 7 },
        { "18446744073709551615", UINT64_MAX },
        { "18446744073709551616", UINT64_MAX },
        { "99999999999999999999999999999999", UINT64_MAX },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char head[100] = "Host:x|Content-Length:";
        struct http_head f;
        assert_true(sound(&f, "HTTP/1.1", strcat(head, cases[i].text)));
        assert_true(f.has_length && f.length == cases[i].length);
        assert_int_equal(http_head_has_body(&f), cases[i].length > 0);
    }
}

static void test_a_content_type_is_a_media_type_in_any_case_and_parameters(void **state)
{
    (void)state;
    static const struct {
        const char *type;
        bool json;
    } cases[] = {
        { "", false },
        { "application/json", true },
        { "Application/JSON", true },
        { "application/json; charset=utf-8", true },
        { "application/json ;x=y", true },
        { "application/x-www-form-urlencoded", false },
        { "application/jsonp", false },
        { "application", false },
        { "text/json", false },
        { "multipart/form-data; boundary=x", false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(media_is(cases[i].type, "application/json"), cases[i].json);
}

static void test_what_accept_wants(void **state)
{
    (void)state;
    static const struct {
        const char *accept;
        /* the preferred type: 1: application/json; -1: application/x-b; 0: both are accepted equally */
        int json;
        bool none;
    } cases[] = {
        { NULL, 0, false },
        { "", 0, false },
        { " ", 0, false },
        { "*/*", 0, false },
        { "application/*", 0, false },
        { "application/json", 1, false },
        { "Application/X-B", -1, false },
        { "application/x-b;v=1", -1, false },
        { "application/json, application/x-b", 0, false },
        { "application/json, */*", 1, false },
        { "text/html,application/*;q=0.9, application/x-b ; q=0.8", 1, false },
        { "application/json;q=0.5,application/x-b;q=0.501", -1, false },
        { "application/json;q=1.0,application/x-b;Q=0.999", 1, false },
        { "*/*;q=0.1, application/x-b;q=0", 1, false },
        { "application/json;q=0, */*", -1, false },
        { "application/json;q=x, */*", 1, false },
        { "application/json;q=7;q=, */*", 1, false },
        { "application/json;q=1.9, application/x-b", 0, false },
        { ",,application/x-b,,", -1, false },
        { "text/html", 0, true },
        { "*/*;q=0", 0, true },
        { "application", 0, true },
        { "application/jsonp, application/x-bb;q=1", 0, true },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int json = media_accepts(cases[i].accept, "application/json");
        const int other = media_accepts(cases[i].accept, "application/x-b");
        if ((json > other) - (json < other) != cases[i].json || (json + other == 0) != cases[i].none)
            fail_msg("'%s': %d and %d", cases[i].accept ? cases[i].accept : "NULL", json, other);
    }
}

static void test_a_page_is_of_this_server_where_host_and_port_are_the_same(void **state)
{
    static const struct {
        const char *origin, *host;
        bool same;
    } cases[] = {
        { "http://localhost:8080", "localhost:8080", true },
        { "HTTP://LocalHost:8080", "localhost:8080", true },
        { "http://localhost", "localhost", true },
        { "http://localhost", "localhost:80", true },
        { "http://localhost:80", "localhost", true },
        { "https://example.org", "example.org:443", true },
        /* The origin is https if a proxy speaks TLS in front of the server. */
        { "https://example.org", "example.org", true },
        { "http://[::1]:8080", "[::1]:8080", true },
        { "http://localhost:8081", "localhost:8080", false },
        { "http://localhost", "localhost:8080", false },
        { "https://example.org", "example.org:80", false },
        { "http://example.org", "example.org:443", false },
        { "http://localhost.example.org:8080", "localhost:8080", false },
        { "http://localhos:8080", "localhost:8080", false },
        { "http://127.0.0.1:8080", "localhost:8080", false },
        { "null", "null", false },
        { "", "", false },
        { "http://", "", false },
        { "http://:80", "", false },
        { "file://", "", false },
        { "localhost:8080", "localhost:8080", false },
        { "chrome-extension://localhost:8080", "localhost:8080", false },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (http_head_same_origin(cases[i].origin, cases[i].host) != cases[i].same)
            fail_msg("%s at %s", cases[i].origin, cases[i].host);
}

static void test_request_ids(void **state)
{
    (void)state;
    char longest[130];
    memset(longest, 'a', sizeof longest);
    longest[128] = '\0';
    assert_true(http_head_is_request_id(longest));
    longest[128] = 'a', longest[129] = '\0';
    assert_false(http_head_is_request_id(longest));
    assert_true(http_head_is_request_id("A-z.0_9"));
    assert_false(http_head_is_request_id(NULL));
    assert_false(http_head_is_request_id(""));
    assert_false(http_head_is_request_id("a b"));
    assert_false(http_head_is_request_id("a/b"));
    assert_false(http_head_is_request_id("\xc3\xa9"));
}

static void test_traceparent(void **state)
{
    (void)state;
    char trace[33], span[17];
    assert_true(http_head_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", trace, span));
    assert_string_equal(trace, "0af7651916cd43dd8448eb211c80319c");
    assert_string_equal(span, "b7ad6b7169203331");
    static const char *const bad[] = {
        "",
        "00",
        "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1",
        "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_false(http_head_traceparent(bad[i], trace, span));
}

static void test_targets(void **state)
{
    (void)state;
    assert_true(http_head_is_target("/livez?x=%00"));
    assert_false(http_head_is_target("/a b"));
    assert_false(http_head_is_target("/a\tb"));
    assert_false(http_head_is_target("/a\001"));
}

static void test_escapes_that_would_change_the_target_stay(void **state)
{
    (void)state;
    static const struct {
        const char *text, *is;
    } cases[] = {
        { "/livez", "/livez" },
        { "/%6civez", "/livez" },
        { "/%6Civez", "/livez" },
        { "/livez%00x", "/livez%00x" },
        { "/v1%2fattention%2Fforward", "/v1%2fattention%2Fforward" },
        { "/%252f", "/%2f" }, /* decoded once */
        { "/%", "/%" },
        { "/%6", "/%6" },
        { "/%6g%zz", "/%6g%zz" },
        { "/%%36c", "/%6c" },
        { "/%ff", "/\xff" },
        { "", "" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[64];
        strcpy(text, cases[i].text);
        const size_t length = http_head_unescape(text);
        assert_string_equal(text, cases[i].is);
        assert_int_equal(length, strlen(cases[i].is));
    }
}

static void test_the_path_of_a_target_in_absolute_form(void **state)
{
    (void)state;
    assert_string_equal(http_head_path("/livez"), "/livez");
    assert_string_equal(http_head_path("http://host:80/livez"), "/livez");
    assert_string_equal(http_head_path("HTTPS://host/a/b"), "/a/b");
    assert_string_equal(http_head_path("http://host"), "/");
    assert_string_equal(http_head_path("http:/livez"), "http:/livez");
    assert_string_equal(http_head_path("*"), "*");
    assert_string_equal(http_head_path(""), "");
}

static void test_arguments_are_counted(void **state)
{
    (void)state;
    assert_int_equal(http_head_arguments("/"), 0);
    assert_int_equal(http_head_arguments("/&"), 0);
    assert_int_equal(http_head_arguments("/?"), 1);
    assert_int_equal(http_head_arguments("/?a=1&b&&c=?"), 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_doubtful_heads_are_refused_by_name),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_a_list_in_one_line_may_be_long_and_one_in_several_may_not),
        cmocka_unit_test(test_methods),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_a_content_type_is_a_media_type_in_any_case_and_parameters),
        cmocka_unit_test(test_what_accept_wants),
        cmocka_unit_test(test_a_page_is_of_this_server_where_host_and_port_are_the_same),
        cmocka_unit_test(test_request_ids),
        cmocka_unit_test(test_traceparent),
        cmocka_unit_test(test_targets),
        cmocka_unit_test(test_escapes_that_would_change_the_target_stay),
        cmocka_unit_test(test_the_path_of_a_target_in_absolute_form),
        cmocka_unit_test(test_arguments_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
