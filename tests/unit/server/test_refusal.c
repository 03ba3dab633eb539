/* test_refusal.c: tests of answers that bypass the web server. Sending them must never block. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../testing.h"
#include "server/http/refusal.h"

static void received(int fd, char *text, size_t capacity)
{
    const ssize_t count = recv(fd, text, capacity - 1, MSG_DONTWAIT);
    text[count > 0 ? count : 0] = '\0';
}

static void test_a_refusal_is_a_whole_answer(void **state)
{
    int fds[2];
    char text[4096], wanted[4096];
    static const char body[] =
        "{\"type\":\"urn:attnd:unavailable\",\"title\":\"The server cannot take this now\",\"status\":503,"
        "\"code\":\"unavailable\",\"request_id\":\"abc\",\"detail\":\"too many connections\",\"error\":\"too many "
        "connections\"}";
    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    refusal_send(fds[0], PROTO_E_UNAVAILABLE, "too many connections", "abc", NULL);
    received(fds[1], text, sizeof text);
    snprintf(wanted, sizeof wanted,
             "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nContent-Length: %zu\r\n"
             "Connection: close\r\nX-Request-Id: abc\r\nRetry-After: 1\r\n\r\n%s",
             strlen(body), body);
    assert_string_equal(text, wanted);
    close(fds[0]);
    close(fds[1]);
}

static void test_every_error_fits_and_has_its_reason(void **state)
{
    static const struct {
        proto_error error;
        const char *line;
    } cases[] = {
        { PROTO_E_INVALID_FRAMING, "HTTP/1.1 400 Bad Request\r\n" },
        { PROTO_E_REQUEST_TIMEOUT, "HTTP/1.1 408 Request Timeout\r\n" },
        { PROTO_E_TOO_LARGE, "HTTP/1.1 413 Content Too Large\r\n" },
        { PROTO_E_TARGET_TOO_LONG, "HTTP/1.1 414 URI Too Long\r\n" },
        { PROTO_E_HEAD_TOO_LARGE, "HTTP/1.1 431 Request Header Fields Too Large\r\n" },
    };
    char detail[5000], id[129];
    (void)state;
    memset(detail, '\x01', sizeof detail - 1);
    detail[sizeof detail - 1] = '\0';
    memset(id, 'x', sizeof id - 1);
    id[sizeof id - 1] = '\0';
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        int fds[2];
        char text[4096];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        refusal_send(fds[0], cases[i].error, detail, id, "application/json");
        received(fds[1], text, sizeof text);
        assert_memory_equal(text, cases[i].line, strlen(cases[i].line));
        assert_non_null(strstr(text, "\r\n\r\n{\"type\":"));
        assert_string_equal(text + strlen(text) - 2, "\"}");
        assert_null(strstr(text, "Retry-After"));
        assert_non_null(strstr(text, "\r\nContent-Type: application/json\r\n"));
        close(fds[0]);
        close(fds[1]);
    }
}

static void test_nobody_waits_for_a_client_that_does_not_read(void **state)
{
    int fds[2];
    char zeros[4096] = { 0 };
    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    while (send(fds[0], zeros, sizeof zeros, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) continue;
    assert_true(errno == EAGAIN || errno == EWOULDBLOCK);
    refusal_send(fds[0], PROTO_E_UNAVAILABLE, NULL, NULL, NULL);
    close(fds[1]);
    /* If the client has closed its connection, sending must not raise SIGPIPE. */
    refusal_send(fds[0], PROTO_E_UNAVAILABLE, NULL, NULL, NULL);
    close(fds[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_refusal_is_a_whole_answer),
        cmocka_unit_test(test_every_error_fits_and_has_its_reason),
        cmocka_unit_test(test_nobody_waits_for_a_client_that_does_not_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
