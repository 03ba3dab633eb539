/* test_heartbeat.c: tests that the server finds threads that spend too long on one request or event. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/base/clock.h"
#include "server/base/heartbeat.h"

static void *work_once(void *kind)
{
    heartbeat_busy(*(enum heartbeat_kind *)kind);
    return NULL;
}

static void test_a_thread_that_stays_at_its_work_is_named_by_its_kind(void **state)
{
    enum heartbeat_kind kind = HEARTBEAT_LOOP;
    pthread_t thread;
    int64_t busy_ms;
    (void)state;
    assert_int_equal(heartbeat_stuck(clock_ms(), &busy_ms), HEARTBEAT_KINDS);
    pthread_create(&thread, NULL, work_once, &kind);
    pthread_join(thread, NULL);
    const int64_t now = clock_ms();
    assert_int_equal(heartbeat_stuck(now, &busy_ms), HEARTBEAT_KINDS);
    assert_int_equal(heartbeat_stuck(now + HEARTBEAT_LIMIT_MS + 1, &busy_ms), HEARTBEAT_LOOP);
    assert_true(busy_ms > HEARTBEAT_LIMIT_MS);
    assert_int_equal(heartbeat_longest_ms(HEARTBEAT_HTTP, now + HEARTBEAT_LIMIT_MS), 0);
    heartbeat_set_limit(HEARTBEAT_LOOP, INT64_MAX);
    assert_int_equal(heartbeat_stuck(now + HEARTBEAT_LIMIT_MS + 1, &busy_ms), HEARTBEAT_KINDS);
}

static void test_a_thread_that_waits_for_work_is_never_stuck(void **state)
{
    int64_t busy_ms;
    (void)state;
    heartbeat_busy(HEARTBEAT_HTTP);
    assert_int_equal(heartbeat_stuck(clock_ms() + HEARTBEAT_LIMIT_MS + 1, &busy_ms), HEARTBEAT_HTTP);
    /* The thread begins its next request, so the time of the previous one no longer counts. */
    heartbeat_busy(HEARTBEAT_HTTP);
    assert_int_equal(heartbeat_stuck(clock_ms(), &busy_ms), HEARTBEAT_KINDS);
    heartbeat_idle();
    assert_int_equal(heartbeat_longest_ms(HEARTBEAT_HTTP, clock_ms() + HEARTBEAT_LIMIT_MS + 1), 0);
}

static void test_more_threads_than_places_do_no_harm(void **state)
{
    enum heartbeat_kind kind = HEARTBEAT_DEVICE;
    (void)state;
    for (int i = 0; i < HEARTBEAT_THREADS + 8; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, work_once, &kind);
        pthread_join(thread, NULL);
    }
    assert_true(heartbeat_longest_ms(HEARTBEAT_DEVICE, clock_ms() + 100) >= 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_thread_that_stays_at_its_work_is_named_by_its_kind),
        cmocka_unit_test(test_a_thread_that_waits_for_work_is_never_stuck),
        cmocka_unit_test(test_more_threads_than_places_do_no_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
