/* test_connections.c: tests which connections are too slow, and what the server sends before it closes one. The test
 * uses socket pairs without a web server. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/base/clock.h"
#include "server/http/connections.h"

static const struct connection_limits limits = {
    .head_ms = 10000, .idle_ms = 75000, .stall_ms = 5000, .transfer_ms = 30000
};

static void test_how_long_each_phase_may_take(void **state)
{
    (void)state;
    static const struct {
        enum connection_phase phase;
        uint64_t bytes;
        int64_t elapsed_ms;
        bool expired;
    } cases[] = {
        { CONNECTION_OPENED, 0, 10000, false },        { CONNECTION_OPENED, 0, 10001, true },
        { CONNECTION_HEAD, 0, 10001, true },           { CONNECTION_IDLE, 0, 75000, false },
        { CONNECTION_IDLE, 0, 75001, true },           { CONNECTION_BODY, 0, 30000, false },
        { CONNECTION_BODY, 0, 30001, true },           { CONNECTION_BODY, 1024 * 1000, 31000, false },
        { CONNECTION_BODY, 1024 * 1000, 31001, true }, { CONNECTION_SEND, 5000 * 31, 31000, true },
        { CONNECTION_WORK, 0, 1000000, false },        { CONNECTION_CUT, 0, 1000000, false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(connection_expired(cases[i].phase, 5, cases[i].bytes, 5 + cases[i].elapsed_ms, &limits),
                         cases[i].expired);
}

struct pair {
    struct connections connections;
    struct connection *connection;
    int client;
};

static void open_pair(struct pair *p, bool plain)
{
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    connections_init(&p->connections);
    assert_non_null(connections_add(&p->connections, fds[0], plain, NULL, NULL));
    p->connection = connections_take(&p->connections, fds[0]);
    p->client = fds[1];
}

static void close_pair(struct pair *p)
{
    const int fd = p->connection->fd;
    close(p->client);
    connections_remove(&p->connections, p->connection);
    connections_clear(&p->connections);
    close(fd);
}

static void test_a_slow_body_hears_408_and_its_thread_learns_that_it_was_cut(void **state)
{
    (void)state;
    struct pair p;
    char text[1024] = "";
    open_pair(&p, true);
    assert_true(connection_enter(p.connection, CONNECTION_BODY));
    assert_int_equal(connections_sweep(&p.connections, clock_ms(), &limits, NULL), 0);
    assert_int_equal(connections_sweep(&p.connections, clock_ms() + 40000, &limits, NULL), 1);
    assert_true(recv(p.client, text, sizeof text - 1, 0) > 0);
    assert_memory_equal(text, "HTTP/1.1 408 Request Timeout\r\n", 30);
    assert_non_null(strstr(text, "\"code\":\"request-timeout\""));
    assert_int_equal(recv(p.client, text, sizeof text, 0), 0);
    assert_false(connection_enter(p.connection, CONNECTION_WORK));
    assert_int_equal(connections_sweep(&p.connections, clock_ms() + 80000, &limits, NULL), 0);
    close_pair(&p);
}

static void test_nothing_is_written_into_tls(void **state)
{
    (void)state;
    struct pair p;
    char text[64];
    open_pair(&p, false);
    assert_int_equal(connections_sweep(&p.connections, clock_ms() + 40000, &limits, NULL), 1);
    assert_int_equal(recv(p.client, text, sizeof text, 0), 0);
    close_pair(&p);
}

static void test_a_body_that_stands_still_is_cut_and_one_that_waits_for_us_is_not(void **state)
{
    (void)state;
    struct pair p;
    char text[64];
    int64_t now = clock_ms();
    open_pair(&p, true);
    assert_true(connection_enter(p.connection, CONNECTION_BODY));
    assert_int_equal(connections_sweep(&p.connections, now, &limits, NULL), 0);
    assert_int_equal(connections_sweep(&p.connections, now + 5000, &limits, NULL), 0);
    connection_progress(p.connection, 1);
    assert_int_equal(connections_sweep(&p.connections, now += 5001, &limits, NULL), 0);
    assert_int_equal(send(p.client, "x", 1, 0), 1);
    assert_int_equal(connections_sweep(&p.connections, now + 6000, &limits, NULL), 0);
    assert_int_equal(recv(p.connection->fd, text, sizeof text, 0), 1);
    assert_int_equal(connections_sweep(&p.connections, now + 6000, &limits, NULL), 1);
    assert_true(recv(p.client, text, sizeof text, 0) > 0);
    assert_memory_equal(text, "HTTP/1.1 408 ", 13);
    close_pair(&p);
}

static void test_a_request_that_was_sent_and_not_read_is_not_late(void **state)
{
    (void)state;
    static const enum connection_phase phases[] = { CONNECTION_OPENED, CONNECTION_HEAD, CONNECTION_IDLE };
    for (size_t i = 0; i < sizeof phases / sizeof *phases; i++) {
        struct pair p;
        char text[64];
        open_pair(&p, true);
        assert_true(connection_enter(p.connection, phases[i]));
        assert_int_equal(send(p.client, "GET / HTTP/1.1\r\n", 16, 0), 16);
        assert_int_equal(connections_sweep(&p.connections, clock_ms() + 80000, &limits, NULL), 0);
        assert_int_equal(recv(p.connection->fd, text, sizeof text, 0), 16);
        assert_int_equal(connections_sweep(&p.connections, clock_ms() + 80000, &limits, NULL), 1);
        close_pair(&p);
    }
}

/* Without memory for a connection, libmicrohttpd closes the socket and does not tell the server, which must notice. */
static void test_a_socket_that_the_web_server_closed_without_a_word_is_not_counted_for_ever(void **state)
{
    (void)state;
    struct connections connections;
    _Atomic int thread = 0, http = 0;
    int fds[4];
    connections_init(&connections);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    assert_non_null(connections_add(&connections, fds[0], true, &thread, &http));
    assert_int_equal(atomic_load(&connections.totals.count) + thread + http, 3);
    for (int i = 0; i < 3; i++) connections_sweep(&connections, clock_ms() + i * 100000, &limits, NULL);
    /* The server may notice a closed socket only at a later check of all connections. */
    assert_int_equal(atomic_load(&connections.totals.count), 1);

    close(fds[0]);
    for (int i = 0; i < 2; i++) connections_sweep(&connections, clock_ms() + 300000, &limits, NULL);
    assert_int_equal(atomic_load(&connections.totals.count) + thread + http, 0);

    assert_int_equal(dup2(fds[1], fds[0]), fds[0]);
    assert_non_null(connections_add(&connections, fds[0], true, &thread, &http));
    close(fds[0]);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds + 2), 0);
    assert_int_equal(fds[2], fds[0]);
    assert_non_null(connections_add(&connections, fds[2], true, &thread, &http));
    assert_int_equal(atomic_load(&connections.totals.count) + thread + http, 3);
    close(fds[2]);
    close(fds[3]);
    assert_int_equal(dup2(STDERR_FILENO, fds[0]), fds[0]);
    for (int i = 0; i < 2; i++) connections_sweep(&connections, clock_ms() + 400000, &limits, NULL);
    assert_int_equal(atomic_load(&connections.totals.count) + thread + http, 0);
    assert_null(connections.first);
    close(fds[0]);
    close(fds[1]);
    connections_clear(&connections);
}

static void test_a_thousand_descriptors_find_their_peers(void **state)
{
    (void)state;
    enum { MANY = 1000, FIRST = 100 };
    struct connections connections;
    struct connection *added[MANY];
    connections_init(&connections);
    for (int i = 0; i < MANY; i++)
        assert_non_null(added[i] = connections_add(&connections, FIRST + i, true, NULL, NULL));
    for (int i = 0; i < MANY; i += 3) connections_remove(&connections, added[i]);
    for (int i = 0; i < MANY; i++) assert_ptr_equal(connections_take(&connections, FIRST + i), i % 3 ? added[i] : NULL);
    assert_null(connections_take(&connections, 1 << 20));
    connections_clear(&connections);
}

/* libmicrohttpd 0.9.75 may not notice that a client sends bytes and closes at once. The server must. */
static void test_a_client_that_left_in_the_middle_of_a_body_is_found(void **state)
{
    (void)state;
    struct pair p;
    char text[64];
    open_pair(&p, true);
    assert_true(connection_enter(p.connection, CONNECTION_BODY));
    assert_int_equal(send(p.client, "bytes", 5, 0), 5);
    shutdown(p.client, SHUT_WR);
    for (int i = 0; i < 3; i++) connections_sweep(&p.connections, clock_ms(), &limits, NULL);
    assert_int_equal(recv(p.client, text, sizeof text, MSG_DONTWAIT), -1);
    assert_int_equal(recv(p.connection->fd, text, sizeof text, 0), 5);
    connection_progress(p.connection, 5);
    for (int i = 0; i < 2; i++) connections_sweep(&p.connections, clock_ms(), &limits, NULL);
    assert_int_equal(recv(p.client, text, sizeof text, MSG_DONTWAIT), 0);
    close_pair(&p);
}

static void test_a_drain_waits_for_who_moves_and_not_for_who_stands_still(void **state)
{
    (void)state;
    static const struct connection_drain_limits drain_limits = { .silent_ms = 500, .stalled_ms = 2000 };
    struct pair p;
    open_pair(&p, true);
    int64_t now = clock_ms();
    assert_true(connection_enter(p.connection, CONNECTION_BODY));
    /* In normal operation two bytes per second are too slow. During a drain, only silent connections are closed. */
    for (int i = 1; i < 50; i++) {
        connection_progress(p.connection, (uint64_t)i);
        assert_int_equal(connections_sweep(&p.connections, now + i * 500, &limits, &drain_limits), 0);
    }
    now += 49 * 500;
    assert_int_equal(connections_sweep(&p.connections, now + 1900, &limits, &drain_limits), 0);
    assert_int_equal(connections_sweep(&p.connections, now + 2000, &limits, &drain_limits), 1);
    close_pair(&p);

    open_pair(&p, true);
    assert_true(connection_enter(p.connection, CONNECTION_IDLE));
    now = clock_ms();
    assert_int_equal(connections_sweep(&p.connections, now, &limits, &drain_limits), 0);
    assert_int_equal(connections_sweep(&p.connections, now + 400, &limits, &drain_limits), 0);
    assert_int_equal(connections_sweep(&p.connections, now + 600, &limits, &drain_limits), 1);
    close_pair(&p);
}

/* During a drain (the server is about to end), idle connections stay open as long as any of them gets requests. */
static void test_a_drain_closes_silent_connections_when_nobody_says_anything_any_more(void **state)
{
    (void)state;
    static const enum connection_phase silent[] = { CONNECTION_OPENED, CONNECTION_IDLE };
    for (size_t i = 0; i < sizeof silent / sizeof *silent; i++) {
        struct connection_drain_limits drain_limits = { .silent_ms = 500, .stalled_ms = 2000 };
        struct pair p;
        open_pair(&p, true);
        assert_true(connection_enter(p.connection, silent[i]));
        const int64_t now = clock_ms();
        /* quiet_since_ms is the last time at which any client sent something. As long as other clients send requests,
         * the drain must not close this silent connection. */
        for (int ms = 0; ms <= 5000; ms += 400) {
            drain_limits.quiet_since_ms = now + ms;
            assert_int_equal(connections_sweep(&p.connections, now + ms, &limits, &drain_limits), 0);
            assert_int_equal(connections_sweep(&p.connections, now + ms + 399, &limits, &drain_limits), 0);
        }
        assert_int_equal(connections_sweep(&p.connections, drain_limits.quiet_since_ms + 500, &limits, &drain_limits),
                         1);
        close_pair(&p);
    }
}

enum { CROWD = 3 * CONNECTIONS_OLD };

/* Returns the index of the connection that was closed since the last call, or -1. */
static int cut_now(struct connection *const *crowd, bool *gone)
{
    for (int i = 0; i < CROWD; i++)
        if (!gone[i] && atomic_load(&crowd[i]->phase) == CONNECTION_CUT) {
            gone[i] = true;
            return i;
        }
    return -1;
}

/* To make room for a new connection, the server closes connections without a token first, and of these the oldest
 * first. */
static void test_room_is_made_by_strangers_first_and_then_by_age(void **state)
{
    (void)state;
    struct connections connections;
    struct connection *crowd[CROWD];
    int ends[CROWD][2], order = 0, last_age = INT_MAX;
    bool gone[CROWD] = { false }, known_went = false;
    _Atomic int open = 0, leaving = 0;
    const int64_t now = clock_ms() + 1000000;
    connections_init(&connections);
    for (int i = 0; i < CROWD; i++) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends[i]), 0);
        assert_non_null(connections_add(&connections, ends[i][0], false, NULL, &open));
        crowd[i] = connections_take(&connections, ends[i][0]);
        assert_true(connection_enter(crowd[i], i % 7 == 0 ? CONNECTION_WORK : CONNECTION_IDLE));
        atomic_store(&crowd[i]->known, i % 3 == 0);
        atomic_store(&crowd[i]->since_ms, now - 1000 - i * 31 % CROWD);
    }
    while (connections_make_room(&connections, &open, &leaving, true, now)) {
        const int i = cut_now(crowd, gone), age = i * 31 % CROWD;
        assert_true(i >= 0 && i % 7 != 0);
        if (i % 3 == 0 && !known_went) known_went = true, last_age = INT_MAX;
        assert_int_equal(i % 3 == 0, known_went);
        assert_true(age < last_age);
        last_age = age;
        assert_int_equal(atomic_load(&leaving), ++order);
    }
    assert_int_equal(order, CROWD - (CROWD + 6) / 7);
    for (int i = 0; i < CROWD; i++) {
        connections_remove(&connections, crowd[i]);
        close(ends[i][0]);
        close(ends[i][1]);
    }
    assert_int_equal(atomic_load(&leaving), 0);
    connections_clear(&connections);
}

static void test_a_connection_with_an_unread_request_makes_no_room(void **state)
{
    (void)state;
    struct connections connections;
    int ends[2];
    _Atomic int open = 0, leaving = 0;
    const int64_t now = clock_ms() + 1000;
    connections_init(&connections);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    assert_non_null(connections_add(&connections, ends[0], false, NULL, &open));
    struct connection *connection = connections_take(&connections, ends[0]);
    assert_true(connection_enter(connection, CONNECTION_IDLE));
    assert_int_equal(write(ends[1], "G", 1), 1);
    assert_false(connections_make_room(&connections, &open, &leaving, false, now));
    assert_int_equal(atomic_load(&connection->phase), CONNECTION_IDLE);
    connections_remove(&connections, connection);
    connections_clear(&connections);
    close(ends[0]);
    close(ends[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_how_long_each_phase_may_take),
        cmocka_unit_test(test_a_slow_body_hears_408_and_its_thread_learns_that_it_was_cut),
        cmocka_unit_test(test_nothing_is_written_into_tls),
        cmocka_unit_test(test_a_body_that_stands_still_is_cut_and_one_that_waits_for_us_is_not),
        cmocka_unit_test(test_a_request_that_was_sent_and_not_read_is_not_late),
        cmocka_unit_test(test_a_socket_that_the_web_server_closed_without_a_word_is_not_counted_for_ever),
        cmocka_unit_test(test_a_thousand_descriptors_find_their_peers),
        cmocka_unit_test(test_a_client_that_left_in_the_middle_of_a_body_is_found),
        cmocka_unit_test(test_a_drain_waits_for_who_moves_and_not_for_who_stands_still),
        cmocka_unit_test(test_a_drain_closes_silent_connections_when_nobody_says_anything_any_more),
        cmocka_unit_test(test_room_is_made_by_strangers_first_and_then_by_age),
        cmocka_unit_test(test_a_connection_with_an_unread_request_makes_no_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
