/* test_healthcheck.c: tests `attnd healthcheck` with servers that answer, answer wrongly, hang, or do not exist. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "server/healthcheck.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* A server for one connection: it reads a request, sends `answer` and closes the connection. */
struct connection {
    int listener, port;
    char path[64];      /* path of a Unix socket; empty: the server listens on TCP */
    const char *answer; /* NULL: the server stays silent until the client leaves */
    size_t answer_bytes;
    char request[2048];
    pthread_t thread;
};

static void *serve(void *context)
{
    struct connection *p = context;
    const int fd = accept(p->listener, NULL, NULL);
    if (fd < 0) return NULL;
    const ssize_t n = read(fd, p->request, sizeof p->request - 1);
    p->request[n > 0 ? n : 0] = '\0';
    if (p->answer != NULL) {
        if (send(fd, p->answer, p->answer_bytes, MSG_NOSIGNAL) < 0) perror("send");
        shutdown(fd, SHUT_WR);
    }
    char rest[256];
    while (read(fd, rest, sizeof rest) > 0) continue;
    close(fd);
    return NULL;
}

static void connection_open_bytes(struct connection *p, int family, const char *answer, size_t bytes)
{
    struct sockaddr_storage address = { .ss_family = (sa_family_t)family };
    socklen_t length = sizeof(struct sockaddr_in);
    memset(p, 0, sizeof *p);
    p->answer = answer;
    p->answer_bytes = bytes;
    if (family == AF_INET) ((struct sockaddr_in *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (family == AF_INET6) {
        ((struct sockaddr_in6 *)&address)->sin6_addr = in6addr_loopback;
        length = sizeof(struct sockaddr_in6);
    }
    if (family == AF_UNIX) {
        snprintf(p->path, sizeof p->path, "/tmp/test_healthcheck_%d.sock", (int)getpid());
        unlink(p->path);
        strcpy(((struct sockaddr_un *)&address)->sun_path, p->path);
        length = sizeof(struct sockaddr_un);
    }
    p->listener = socket(family, SOCK_STREAM, 0);
    assert_true(p->listener >= 0);
    assert_int_equal(bind(p->listener, (struct sockaddr *)&address, length), 0);
    assert_int_equal(listen(p->listener, 1), 0);
    getsockname(p->listener, (struct sockaddr *)&address, &length);
    p->port = ntohs(family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
                                       : ((struct sockaddr_in *)&address)->sin_port);
    assert_int_equal(pthread_create(&p->thread, NULL, serve, p), 0);
}

static void connection_open(struct connection *p, int family, const char *answer)
{
    connection_open_bytes(p, family, answer, answer ? strlen(answer) : 0);
}

static void connection_close(struct connection *p)
{
    shutdown(p->listener, SHUT_RDWR);
    pthread_join(p->thread, NULL);
    close(p->listener);
    if (p->path[0]) unlink(p->path);
}

static int run(const char *argument, char said[1024])
{
    char name[] = "healthcheck", copy[512];
    char *argv[] = { name, copy, NULL };
    int ends[2], saved[2] = { dup(1), dup(2) };
    snprintf(copy, sizeof copy, "%s", argument ? argument : "");
    fflush(stdout);
    fflush(stderr);
    assert_int_equal(pipe(ends), 0);
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    close(ends[1]);
    const int status = healthcheck_main(argument ? 2 : 1, argv);
    fflush(stdout);
    fflush(stderr);
    dup2(saved[0], 1);
    dup2(saved[1], 2);
    close(saved[0]);
    close(saved[1]);
    const ssize_t n = read(ends[0], said, 1023);
    said[n > 0 ? n : 0] = '\0';
    close(ends[0]);
    return status;
}

static int no_environment(void **state)
{
    (void)state;
    unsetenv("ATTND_LISTEN");
    unsetenv("ATTND_TLS_CERT");
    return 0;
}

static void test_the_answer_decides(void **state)
{
    (void)state;
    static const struct {
        const char *answer;
        int status;
        const char *says;
    } cases[] = {
        { "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n", 0, " answered 200\n" },
        { "HTTP/1.0 204 No Content\r\n\r\n", 0, " answered 204\n" },
        { "HTTP/1.1 503 Service Unavailable\r\n\r\ndraining\n", 1, " answered 503\n" },
        { "HTTP/1.1 301 Moved\r\n\r\n", 1, " answered 301\n" },
        { "HTTP/1.1 401 Unauthorized\r\n\r\n", 1, " answered 401\n" },
        { "", 1, ": the connection was closed without an answer\n" },
        { "HTTP/1.1 200", 1, ": the answer is not HTTP\n" },
        { "SSH-2.0-OpenSSH_9.2\r\n", 1, ": the answer is not HTTP\n" },
        { "HTTP/2 200\r\n", 1, ": the answer is not HTTP\n" },
        { "HTTP/1.1 2\r\n", 1, ": the answer is not HTTP\n" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct connection p;
        char url[64], said[1024], want[256];
        connection_open(&p, AF_INET, cases[i].answer);
        snprintf(url, sizeof url, "http://127.0.0.1:%d", p.port);
        const int status = run(url, said);
        connection_close(&p);
        snprintf(want, sizeof want, "%shealthy: %s/readyz%s", cases[i].status ? "un" : "", url, cases[i].says);
        assert_string_equal(said, want);
        assert_int_equal(status, cases[i].status);
        char request[256];
        snprintf(
            request, sizeof request,
            "GET /readyz HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: attnd-healthcheck\r\nConnection: close\r\n\r\n",
            p.port);
        assert_string_equal(p.request, request);
    }
}

static void test_an_address_is_asked_as_listen_takes_it(void **state)
{
    (void)state;
    struct connection p;
    char text[160], said[1024];
    connection_open(&p, AF_UNIX, "HTTP/1.1 200 OK\r\n\r\n");
    snprintf(text, sizeof text, "unix:%s", p.path);
    assert_int_equal(run(text, said), 0);
    connection_close(&p);

    connection_open(&p, AF_INET, "HTTP/1.1 200 OK\r\n\r\n");
    snprintf(text, sizeof text, "127.0.0.1:%d/livez", p.port);
    assert_int_equal(run(text, said), 0);
    assert_int_equal(strncmp(p.request, "GET /livez HTTP/1.1\r\n", 21), 0);
    connection_close(&p);
}

static void test_ipv6_has_its_brackets(void **state)
{
    (void)state;
    const int probe = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 loopback = { .sin6_family = AF_INET6, .sin6_addr = in6addr_loopback };
    const bool has_v6 = probe >= 0 && bind(probe, (struct sockaddr *)&loopback, sizeof loopback) == 0;
    if (probe >= 0) close(probe);
    if (!has_v6) skip();
    struct connection p;
    char text[160], said[1024];
    connection_open(&p, AF_INET6, "HTTP/1.1 200 OK\r\n\r\n");
    snprintf(text, sizeof text, "[::]:%d", p.port); /* The command connects to loopback for a wildcard address. */
    assert_int_equal(run(text, said), 0);
    assert_non_null(strstr(p.request, "\r\nHost: [::1]:"));
    assert_non_null(strstr(said, "http://[::1]:"));
    connection_close(&p);
}

static void test_the_environment_says_where(void **state)
{
    (void)state;
    struct connection p;
    char text[160], said[1024];
    connection_open(&p, AF_INET, "HTTP/1.1 200 OK\r\n\r\n");
    snprintf(text, sizeof text, "0.0.0.0:%d,unix:/nowhere", p.port);
    setenv("ATTND_LISTEN", text, 1);
    assert_int_equal(run(NULL, said), 0);
    connection_close(&p);
    setenv("ATTND_LISTEN", "nonsense", 1);
    assert_int_equal(run(NULL, said), 64);
    assert_string_equal(said, "attnd healthcheck: ATTND_LISTEN: 'nonsense' is not an address\n");
}

static void test_nobody_there_is_unhealthy(void **state)
{
    (void)state;
    char said[1024];
    assert_int_equal(run("unix:/no/such.sock", said), 1);
    assert_string_equal(said, "unhealthy: unix:/no/such.sock /readyz: No such file or directory\n");
    assert_int_equal(run("http://127.0.0.1:1/", said), 1);
    assert_string_equal(said, "unhealthy: http://127.0.0.1:1/readyz: Connection refused\n");
}

static void test_a_bad_argument_is_said_to_be_one(void **state)
{
    (void)state;
    static const char *const cases[] = { "",
                                         "localhost",
                                         "ftp://localhost:80",
                                         "http://",
                                         "http://:80",
                                         "localhost:",
                                         "localhost:x",
                                         "localhost:99999",
                                         "http://localhost:80/a b",
                                         "http://[::1:80",
                                         "http://localhost:80?x",
                                         "unix:",
                                         "http://localhost:80/\r\nX: y" };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char said[1024], want[1024];
        snprintf(want, sizeof want,
                 "attnd healthcheck: '%s' is not http://HOST[:PORT][/PATH], HOST:PORT or unix:PATH\n", cases[i]);
        assert_int_equal(run(cases[i], said), 64);
        assert_string_equal(said, want);
    }
    char said[1024];
    assert_int_equal(run("--help", said), 0);
    assert_int_equal(strncmp(said, "Usage: attnd healthcheck", 24), 0);
}

static void test_tls_is_recognised_by_its_records(void **state)
{
    (void)state;
    static const struct {
        const char *answer;
        size_t bytes;
        int status;
    } cases[] = {
        { "\x15\x03\x03\x00\x02\x02\x28", 7, 0 }, /* a TLS alert: the handshake failed */
        { "\x16\x03\x03\x00\x0a\x02", 6, 0 },     /* a TLS handshake record whose length byte is a line feed */
        { "HTTP/1.1 400 Bad Request\r\n\r\n", 28, 1 },
        { "", 0, 1 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct connection p;
        char url[64], said[1024];
        connection_open_bytes(&p, AF_INET, cases[i].answer, cases[i].bytes);
        snprintf(url, sizeof url, "https://127.0.0.1:%d/", p.port);
        const int status = run(url, said);
        connection_close(&p);
        print_message("%s", said);
        assert_int_equal(status, cases[i].status);
    }
}

static void test_silence_ends_after_five_seconds(void **state)
{
    (void)state;
    struct connection p;
    struct timespec begin, end;
    char url[64], said[1024], want[256];
    connection_open(&p, AF_INET, NULL);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/readyz", p.port);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    const int status = run(url, said);
    clock_gettime(CLOCK_MONOTONIC, &end);
    connection_close(&p);
    snprintf(want, sizeof want, "unhealthy: %s: no answer within 5 s\n", url);
    assert_string_equal(said, want);
    assert_int_equal(status, 1);
    const double took = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
    assert_true(took > 4.9 && took < 8);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, no_environment, no_environment)
    const struct CMUnitTest tests[] = {
        TEST(test_the_answer_decides),
        TEST(test_an_address_is_asked_as_listen_takes_it),
        TEST(test_ipv6_has_its_brackets),
        TEST(test_the_environment_says_where),
        TEST(test_nobody_there_is_unhealthy),
        TEST(test_a_bad_argument_is_said_to_be_one),
        TEST(test_tls_is_recognised_by_its_records),
        TEST(test_silence_ends_after_five_seconds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
