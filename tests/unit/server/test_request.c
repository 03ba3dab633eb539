/* test_request.c: tests of requests without a connection: which thread owns a request in which state, request ids, and
 * failures. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/http/answer.h"
#include "server/work/request.h"
#include "server/work/server.h"

static void test_the_owner_table(void **state)
{
    (void)state;
    static const char *const may[REQUEST_STATE_COUNT] = {
        /* An x means that the column's state may follow the row's. The columns are receiving, computing, checking,
         * queued, running, finishing, answering, freed. */
        [REQUEST_RECEIVING] = ".xx...xx", [REQUEST_COMPUTING] = "...xx.xx", [REQUEST_CHECKING] = "...x..x.",
        [REQUEST_QUEUED] = "....x.x.",    [REQUEST_RUNNING] = "...x.xx.",   [REQUEST_FINISHING] = "......x.",
        [REQUEST_ANSWERING] = ".......x", [REQUEST_FREED] = "........",
    };
    for (int from = 0; from < REQUEST_STATE_COUNT; from++)
        for (int to = 0; to < REQUEST_STATE_COUNT; to++)
            assert_int_equal(request_may_move((enum request_state)from, (enum request_state)to), may[from][to] == 'x');
}

/* Opens a server with room for two requests that are received, and for two that wait for a device. */
static void open_places(struct server *server)
{
    *server = (struct server){ .everybody = CALLER_EVERYBODY };
    queue_init(&server->queue, 2, 2, 1, 0);
}

static struct request *begin(struct server *server)
{
    attn_error err;
    struct request *r = request_new(server, sizeof(struct request));
    r->caller = caller_hold(&server->everybody);
    assert_int_equal(request_enter(r, CALLER_RECEIVING, &err), ATTN_OK);
    return r;
}

static int places(const struct server *server, enum caller_place place)
{
    return atomic_load(&server->queue.places[place].count);
}

static void test_a_place_is_held_exactly_in_the_states_that_have_one(void **state)
{
    (void)state;
    struct server server;
    attn_error err;
    open_places(&server);
    request_set_role(ROLE_HTTP);
    struct request *r = begin(&server);
    assert_int_equal(places(&server, CALLER_RECEIVING), 1);
    request_move(r, REQUEST_COMPUTING);
    assert_int_equal(places(&server, CALLER_RECEIVING), 0);
    assert_int_equal(request_enter(r, CALLER_WAITING, &err), ATTN_OK);
    request_move(r, REQUEST_QUEUED);
    assert_int_equal(places(&server, CALLER_WAITING), 1);
    request_set_role(ROLE_LOOP);
    request_move(r, REQUEST_RUNNING);
    assert_int_equal(places(&server, CALLER_WAITING), 0);
    request_move(r, REQUEST_ANSWERING);
    request_set_role(ROLE_HTTP);
    request_free(r);

    /* A request that begins to wait for a device no longer counts as received. */
    r = begin(&server);
    assert_int_equal(request_enter(r, CALLER_WAITING, &err), ATTN_OK);
    assert_int_equal(places(&server, CALLER_RECEIVING), 0);
    request_move(r, REQUEST_CHECKING);
    request_set_role(ROLE_LOOP);
    request_move(r, REQUEST_ANSWERING);
    assert_int_equal(places(&server, CALLER_WAITING), 0);
    request_set_role(ROLE_HTTP);
    request_free(r);

    r = begin(&server);
    request_free(r);
    assert_int_equal(places(&server, CALLER_RECEIVING), 0);
}

static void test_a_life_is_counted(void **state)
{
    (void)state;
    struct server server;
    attn_error err;
    open_places(&server);
    request_set_role(ROLE_HTTP);
    struct request *r = begin(&server);
    /* Until the server knows a request's route, it does not count the request as received, because the request may
     * have no tensors. */
    assert_int_equal(request_count(REQUEST_RECEIVING), 0);
    request_count_in(r);
    assert_int_equal(request_count(REQUEST_RECEIVING), 1);
    request_move(r, REQUEST_COMPUTING);
    assert_int_equal(request_count(REQUEST_COMPUTING), 1);
    assert_int_equal(request_enter(r, CALLER_WAITING, &err), ATTN_OK);
    request_move(r, REQUEST_QUEUED);
    request_set_role(ROLE_LOOP);
    request_move(r, REQUEST_RUNNING);
    assert_int_equal(request_count(REQUEST_QUEUED), 0);
    assert_int_equal(request_count(REQUEST_RUNNING), 1);
    request_move(r, REQUEST_ANSWERING);
    request_set_role(ROLE_HTTP);
    request_free(r);
    for (int s = 0; s < REQUEST_STATE_COUNT; s++) assert_int_equal(request_count((enum request_state)s), 0);
}

/* Only the thread that owns a request may move it to another state. In any other thread an assertion ends the process,
 * so the test tries it in a child process. */
static void test_only_the_owner_moves_it(void **state)
{
    (void)state;
    struct server server;
    attn_error err;
    open_places(&server);
    request_set_role(ROLE_HTTP);
    struct request *r = begin(&server);
    assert_int_equal(request_enter(r, CALLER_WAITING, &err), ATTN_OK);
    request_move(r, REQUEST_CHECKING);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        if (freopen("/dev/null", "w", stderr) == NULL) _exit(0);
        request_move(r, REQUEST_QUEUED);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    request_set_role(ROLE_LOOP);
    request_move(r, REQUEST_ANSWERING);
    request_set_role(ROLE_HTTP);
    request_free(r);
}

static void test_the_first_failure_stays(void **state)
{
    (void)state;
    struct request r = { 0 };
    request_fail(&r, PROTO_E_TOO_LARGE, "/q", "too %s", "large");
    request_fail(&r, PROTO_E_INTERNAL, NULL, "something else");
    assert_int_equal(r.error, PROTO_E_TOO_LARGE);
    assert_string_equal(r.why.text, "too large");
    assert_string_equal(r.why.member, "/q");
}

static void test_ids_are_16_digits_and_differ(void **state)
{
    (void)state;
    char a[REQUEST_ID_BYTES], b[REQUEST_ID_BYTES];
    request_make_id(a);
    for (int i = 0; i < 1000; i++) {
        request_make_id(b);
        assert_int_equal(strlen(b), 16);
        assert_int_equal(strspn(b, "0123456789abcdef"), 16);
        assert_string_not_equal(a, b);
    }
}

static void test_server_timing(void **state)
{
    (void)state;
    struct request r = { .times = { .recv_ns = 3765433, .decode_ns = 1234567, .encode_ns = 999 } };
    char text[1024];
    answer_server_timing(&r, text, sizeof text);
    assert_string_equal(text,
                        "recv;dur=3.765, decode;dur=1.234, queue;dur=0.000, prepare;dur=0.000, copy_in;dur=0.000, "
                        "launch;dur=0.000, compute;dur=0.000, copy_out;dur=0.000, "
                        "encode;dur=0.000");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_owner_table),
        cmocka_unit_test(test_a_place_is_held_exactly_in_the_states_that_have_one),
        cmocka_unit_test(test_a_life_is_counted),
        cmocka_unit_test(test_only_the_owner_moves_it),
        cmocka_unit_test(test_the_first_failure_stays),
        cmocka_unit_test(test_ids_are_16_digits_and_differ),
        cmocka_unit_test(test_server_timing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
