/* test_http_threads.c: tests which HTTP thread gets a new connection, and when threads are pinned to their cores. */
#include "server/http/http_threads.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/base/clock.h"

static int allowed_cores(void)
{
    cpu_set_t set;
    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
    return CPU_COUNT(&set);
}

static void test_threads_belong_to_cores_when_each_has_enough(void **state)
{
    (void)state;
    const int n = allowed_cores();
    const struct {
        int count, cores, want;
    } cases[] = {
        { n * n, n, n > 1 ? n : 0 }, { 2 * n * n, n, n > 1 ? n : 0 }, { n * n + n, 2 * n, n > 1 ? n : 0 },
        { n * n + 1, n, 0 },         { n * (n - 1), n, 0 },           { n * n, n - 1, 0 }, /* a quota */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct http_threads threads;
        if (cases[i].count == 0 || (n == 1 && cases[i].count > 1)) continue;
        assert_true(http_threads_init(&threads, NULL, cases[i].count, cases[i].cores));
        if (threads.cores != cases[i].want)
            fail_msg("%d threads, %d cores: belong to %d, not %d", cases[i].count, cases[i].cores, threads.cores,
                     cases[i].want);
        int each[CPU_SETSIZE] = { 0 };
        for (int w = 0; threads.cores > 0 && w < threads.count; w++) each[threads.list[w].core]++;
        for (int core = 0; core < threads.cores; core++) assert_int_equal(each[core], cases[i].count / n);
        http_threads_clear(&threads);
    }
}

static void test_a_connection_goes_to_the_least_busy_thread(void **state)
{
    (void)state;
    struct http_threads threads;
    assert_true(http_threads_init(&threads, NULL, 3, 1));
    assert_int_equal(threads.cores, 0);
    int given[3] = { 0 };
    for (int i = 0; i < 30; i++) {
        struct http_thread *thread = http_threads_pick(&threads, -1);
        atomic_fetch_add(&thread->connections, 1);
        given[thread - threads.list]++;
    }
    for (int i = 0; i < 3; i++) assert_int_equal(given[i], 10);
    atomic_fetch_sub(&threads.list[1].connections, 2);
    assert_ptr_equal(http_threads_pick(&threads, -1), &threads.list[1]);
    http_threads_clear(&threads);
}

static void test_a_core_with_a_lead_gives_to_the_others(void **state)
{
    (void)state;
    struct http_threads threads;
    assert_true(http_threads_init(&threads, NULL, 6, 1));
    threads.cores = 2;
    for (int i = 0; i < 6; i++) threads.list[i].core = i % 2;
    int given[2] = { 0 };
    for (int i = 0; i < 48; i++) {
        struct http_thread *thread = http_threads_pick_on(&threads, 0);
        atomic_fetch_add(&thread->connections, 1);
        given[thread->core]++;
        /* Each core has 3 threads with up to 4 connections each. Connections therefore go to core 0 and to the other
         * core in turn, in blocks of 12. */
        const int blocks = i / 12, in_block = i % 12 + 1;
        assert_int_equal(given[blocks % 2], blocks / 2 * 12 + in_block);
    }
    for (int i = 0; i < 6; i++) assert_int_equal(threads.list[i].connections, 8);
    for (int i = 0; i < 12; i++) {
        struct http_thread *thread = http_threads_pick_on(&threads, i % 2);
        assert_int_equal(thread->core, i % 2);
        atomic_fetch_add(&thread->connections, 1);
    }
    threads.cores = 0;
    http_threads_clear(&threads);
}

static void test_load(void **state)
{
    (void)state;
    static const struct {
        uint32_t requests[3];
        int cores;
        int64_t ms;
        bool held;
        enum http_threads_load want;
    } cases[] = {
        { { 0, 0 }, 2, 200, false, HTTP_THREADS_IDLE },
        /* Below 1000 requests per second the server counts as idle. If threads are pinned to cores (`held`), the limit
         * is 500 requests per second. */
        { { 100, 99 }, 2, 200, false, HTTP_THREADS_IDLE },
        { { 100, 99 }, 2, 200, true, HTTP_THREADS_EVEN },
        { { 50, 49 }, 2, 200, true, HTTP_THREADS_IDLE },
        { { 100, 100 }, 2, 200, false, HTTP_THREADS_EVEN },
        { { 100, 100 }, 2, 0, false, HTTP_THREADS_IDLE },
        { { 2000, 1000 }, 2, 200, false, HTTP_THREADS_EVEN },
        { { 2001, 1000 }, 2, 200, false, HTTP_THREADS_UNEVEN },
        { { 1000, 4000 }, 2, 200, true, HTTP_THREADS_EVEN },
        { { 1000, 4001 }, 2, 200, true, HTTP_THREADS_UNEVEN },
        { { 5000, 0 }, 2, 200, false, HTTP_THREADS_UNEVEN },
        { { 3000, 2000, 1600 }, 3, 200, false, HTTP_THREADS_EVEN },
        { { UINT32_MAX, UINT32_MAX }, 2, 200, true, HTTP_THREADS_EVEN },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (http_threads_load(cases[i].requests, cases[i].cores, cases[i].ms, cases[i].held) != cases[i].want)
            fail_msg("case %zu is not %d", i, cases[i].want);
}

static pthread_barrier_t began, may_end;

static void *idle_thread(void *argument)
{
    struct http_thread *thread = argument;
    atomic_store(&thread->tid, gettid());
    pthread_barrier_wait(&began);
    pthread_barrier_wait(&may_end);
    return NULL;
}

static int cores_of(const struct http_thread *thread)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    assert_int_equal(sched_getaffinity(atomic_load(&thread->tid), sizeof set, &set), 0);
    return CPU_COUNT(&set);
}

/* Pretends that in 200 ms each thread of core 0 completed `first` requests, and each other thread `others`, and lets
 * the server react. */
static void look(struct http_threads *threads, int64_t *now_ms, uint32_t first, uint32_t others)
{
    for (int i = 0; i < threads->count; i++)
        atomic_fetch_add(&threads->list[i].requests, threads->list[i].core == 0 ? first : others);
    http_threads_balance(threads, *now_ms += 200);
}

static void test_threads_are_held_while_the_load_is_even(void **state)
{
    (void)state;
    const int n = allowed_cores(), count = n * n;
    struct http_threads threads;
    int64_t now_ms = 1000;
    /* With one core nothing is pinned; above 16 cores the test would make hundreds of threads. */
    if (n == 1 || n > 16) skip();
    assert_true(http_threads_init(&threads, NULL, count, n));
    pthread_t posix[256];
    pthread_barrier_init(&began, NULL, (unsigned)count + 1);
    pthread_barrier_init(&may_end, NULL, (unsigned)count + 1);
    for (int i = 0; i < count; i++) assert_int_equal(pthread_create(&posix[i], NULL, idle_thread, &threads.list[i]), 0);
    pthread_barrier_wait(&began);

    look(&threads, &now_ms, 0, 0);
    for (int i = 0; i < count; i++) assert_int_equal(cores_of(&threads.list[i]), n);
    look(&threads, &now_ms, 1000, 900);
    for (int i = 0; i < count; i++) {
        cpu_set_t set;
        assert_int_equal(sched_getaffinity(atomic_load(&threads.list[i].tid), sizeof set, &set), 0);
        assert_int_equal(CPU_COUNT(&set), 1);
        assert_true(CPU_ISSET(threads.cpu[threads.list[i].core], &set));
    }
    /* After 50 ms it is too early to measure the load again. */
    http_threads_balance(&threads, now_ms + 50);
    assert_int_equal(cores_of(&threads.list[0]), 1);
    look(&threads, &now_ms, 1000, 100); /* the load is uneven only once, so threads stay pinned */
    look(&threads, &now_ms, 1000, 100);
    assert_int_equal(cores_of(&threads.list[0]), 1);
    look(&threads, &now_ms, 1000, 900);
    for (int i = 0; i < 3; i++) look(&threads, &now_ms, 1000, 100);
    for (int i = 0; i < count; i++) assert_int_equal(cores_of(&threads.list[i]), n);
    look(&threads, &now_ms, 1000, 900);
    assert_int_equal(cores_of(&threads.list[0]), n);
    now_ms += 2000;
    look(&threads, &now_ms, 1000, 900);
    assert_int_equal(cores_of(&threads.list[0]), 1);
    /* Without requests, the server no longer pins threads to cores. */
    look(&threads, &now_ms, 0, 0);
    assert_int_equal(cores_of(&threads.list[0]), n);
    look(&threads, &now_ms, 1000, 900);
    assert_int_equal(cores_of(&threads.list[0]), 1);

    pthread_barrier_wait(&may_end);
    for (int i = 0; i < count; i++) pthread_join(posix[i], NULL);
    http_threads_clear(&threads);
}

static void *write_later(void *fd)
{
    usleep(2000);
    assert_int_equal(write(*(int *)fd, &(uint64_t){ 1 }, 8), 8);
    return NULL;
}

/* A thread that waits for an event polls at first, and then sleeps for at most the given time. It must get the event in
 * either phase. */
static void test_who_is_expected_may_come_or_not(void **state)
{
    (void)state;
    const int set = epoll_create1(0);
    int events = eventfd(0, 0);
    struct epoll_event event = { .events = EPOLLIN };
    pthread_t writer;
    assert_int_equal(epoll_ctl(set, EPOLL_CTL_ADD, events, &event), 0);
    http_threads_expect();
    assert_int_equal(epoll_wait(set, &event, 1, 0), 0);
    const int64_t began_ns = clock_ns();
    assert_int_equal(epoll_wait(set, &event, 1, 5), 0);
    assert_true(clock_ns() - began_ns >= 5000000);
    http_threads_expect();
    assert_int_equal(pthread_create(&writer, NULL, write_later, &events), 0);
    assert_int_equal(epoll_wait(set, &event, 1, 60000), 1);
    http_threads_expect();
    assert_int_equal(epoll_wait(set, &event, 1, 60000), 1);
    pthread_join(writer, NULL);
    close(events);
    close(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_belong_to_cores_when_each_has_enough),
        cmocka_unit_test(test_a_connection_goes_to_the_least_busy_thread),
        cmocka_unit_test(test_a_core_with_a_lead_gives_to_the_others),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_threads_are_held_while_the_load_is_even),
        cmocka_unit_test(test_who_is_expected_may_come_or_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
