/* test_polling_sleep.c: tests that a nap (a short sleep between polls) ends when an event comes or its time is over. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/base/clock.h"
#include "server/base/polling_sleep.h"

static void test_a_wait_in_naps_ends_with_an_event_or_at_its_end(void **state)
{
    (void)state;
    const int set = epoll_create1(0), events = eventfd(0, 0);
    struct epoll_event event = { .events = EPOLLIN };
    assert_int_equal(epoll_ctl(set, EPOLL_CTL_ADD, events, &event), 0);
    const int64_t until_ns = clock_ns() + 3000000;
    polling_sleep_until(set, until_ns);
    assert_true(clock_ns() >= until_ns);
    polling_sleep_until(set, clock_ns() - 1);
    assert_int_equal(write(events, &(uint64_t){ 1 }, 8), 8);
    polling_sleep_until(set, INT64_MAX);
    /* The sleep must leave the event in the set. */
    assert_int_equal(epoll_wait(set, &event, 1, 0), 1);
    close(events);
    close(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_a_wait_in_naps_ends_with_an_event_or_at_its_end) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
