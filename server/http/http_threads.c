/* http_threads.c: assigns connections to HTTP threads, and HTTP threads to cores; see http_threads.h. */
#include "server/http/http_threads.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/base/polling_sleep.h"

enum {
    PERIOD_MS = 200,   /* time between two decisions whether to pin threads to their cores */
    LEAST_RATE = 1000, /* requests per second from which on threads are pinned to their cores */
    /* Threads are unpinned after this many successive periods with an uneven load. A single such period may only mean
     * that a client's thread has moved to another core. */
    UNEVEN_LOOKS = 3,
    /* after an uneven load, threads stay unpinned for this many milliseconds */
    FREE_MS = 2000,
    /* If the least busy thread of a core has this many more connections than the least busy thread of all cores, new
     * connections go to the least busy thread of all cores. */
    MOST_LEAD = 4,
    MOST_CORES = CPU_SETSIZE,
};

bool http_threads_init(struct http_threads *threads, struct http_server *http, int count, int cores)
{
    *threads = (struct http_threads){ .count = count };
    const int allowed = sched_getaffinity(0, sizeof threads->all, &threads->all) == 0 ? CPU_COUNT(&threads->all) : 0;
    threads->list = aligned_alloc(_Alignof(struct http_thread), (size_t)count * sizeof *threads->list);
    if (threads->list == NULL) return false;
    memset(threads->list, 0, (size_t)count * sizeof *threads->list);
    /* threads are not pinned under a CPU quota: several processes may share the machine and pin theirs to the same
     * cores */
    if (allowed > 1 && allowed <= cores && count % allowed == 0 && count / allowed >= allowed) {
        threads->cpu = calloc((size_t)allowed, sizeof *threads->cpu);
        if (threads->cpu == NULL) {
            http_threads_clear(threads);
            return false;
        }
        for (int cpu = 0; cpu < MOST_CORES && threads->cores < allowed; cpu++)
            if (CPU_ISSET(cpu, &threads->all)) threads->cpu[threads->cores++] = cpu;
    }
    for (int i = 0; i < count; i++) {
        threads->list[i].http = http;
        threads->list[i].core = threads->cores > 0 ? i % threads->cores : 0;
    }
    return true;
}

void http_threads_clear(struct http_threads *threads)
{
    free(threads->list);
    free(threads->cpu);
    *threads = (struct http_threads){ 0 };
}

/* Returns the index (in threads.cpu) of the core where the socket's last packet arrived, or -1 if this core has no
 * threads. */
static int core_of(const struct http_threads *threads, int fd)
{
    int cpu = -1;
    socklen_t length = sizeof cpu;
    if (threads->cores == 0 || getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &cpu, &length) != 0) return -1;
    for (int i = 0; i < threads->cores; i++)
        if (threads->cpu[i] == cpu) return i;
    return -1;
}

static int connections_of(const struct http_thread *thread)
{
    return atomic_load_explicit(&thread->connections, memory_order_relaxed);
}

static struct http_thread *least_busy(const struct http_threads *threads, int core)
{
    struct http_thread *best = NULL;
    for (int i = 0; i < threads->count; i++) {
        struct http_thread *thread = &threads->list[i];
        if (core >= 0 && thread->core != core) continue;
        if (best == NULL || connections_of(thread) < connections_of(best)) best = thread;
    }
    return best;
}

struct http_thread *http_threads_pick_on(struct http_threads *threads, int core)
{
    struct http_thread *any = least_busy(threads, -1), *near = least_busy(threads, core);
    const int lead = connections_of(near) - connections_of(any);
    if (core < 0) return any;
    if (lead >= MOST_LEAD) threads->spills = true;
    if (lead == 0) threads->spills = false;
    return threads->spills ? any : near;
}

struct http_thread *http_threads_pick(struct http_threads *threads, int fd)
{
    return http_threads_pick_on(threads, core_of(threads, fd));
}

enum http_threads_load http_threads_load(const uint32_t *requests, int cores, int64_t ms, bool held)
{
    uint64_t sum = 0, least = UINT64_MAX, most = 0;
    for (int i = 0; i < cores; i++) {
        sum += requests[i];
        if (requests[i] < least) least = requests[i];
        if (requests[i] > most) most = requests[i];
    }
    if (ms <= 0 || sum * 1000 < (uint64_t)LEAST_RATE / (held ? 2 : 1) * (uint64_t)ms) return HTTP_THREADS_IDLE;
    return most <= (held ? 4 : 2) * least ? HTTP_THREADS_EVEN : HTTP_THREADS_UNEVEN;
}

/* Pins a thread to its core, or unpins it. Leaves the affinity alone if another program has changed it. */
static void pin(const struct http_threads *threads, struct http_thread *thread, bool pinned)
{
    const pid_t tid = atomic_load_explicit(&thread->tid, memory_order_relaxed);
    cpu_set_t is, one;
    if (tid == 0 || thread->pinned == pinned) return;
    CPU_ZERO(&is);
    CPU_ZERO(&one);
    CPU_SET(threads->cpu[thread->core], &one);
    const cpu_set_t *from = pinned ? &threads->all : &one, *to = pinned ? &one : &threads->all;
    if (sched_getaffinity(tid, sizeof is, &is) == 0 && CPU_EQUAL(&is, from) &&
        sched_setaffinity(tid, sizeof *to, to) == 0)
        thread->pinned = pinned;
    if (!pinned) thread->pinned = false;
}

static void hold(struct http_threads *threads, bool held)
{
    for (int i = 0; i < threads->count; i++) pin(threads, &threads->list[i], held);
    if (threads->held == held) return;
    threads->held = held;
    log_event(LOG_DEBUG, NULL, held ? "threads_held" : "threads_free", "threads=%d cores=%d", threads->count,
              threads->cores);
}

void http_threads_unpin(struct http_threads *threads)
{
    if (threads->held) hold(threads, false);
}

void http_threads_balance(struct http_threads *threads, int64_t now_ms)
{
    uint32_t requests[MOST_CORES] = { 0 };
    const int64_t ms = now_ms - threads->since_ms;
    if (threads->cores == 0 || ms < PERIOD_MS) return;
    for (int i = 0; i < threads->count; i++) {
        struct http_thread *thread = &threads->list[i];
        const uint32_t total = atomic_load_explicit(&thread->requests, memory_order_relaxed);
        requests[thread->core] += total - thread->seen;
        thread->seen = total;
    }
    threads->since_ms = now_ms;
    const enum http_threads_load load = http_threads_load(requests, threads->cores, ms, threads->held);
    threads->uneven = threads->held && load == HTTP_THREADS_UNEVEN ? threads->uneven + 1 : 0;
    if (threads->held && (load == HTTP_THREADS_IDLE || threads->uneven == UNEVEN_LOOKS)) {
        hold(threads, false);
        if (load == HTTP_THREADS_UNEVEN) threads->free_until_ms = now_ms + FREE_MS;
    } else if (threads->held || (load == HTTP_THREADS_EVEN && now_ms >= threads->free_until_ms))
        /* pins the threads again in each period: a thread can only be pinned after its first request, when its id
         * becomes known */
        hold(threads, true);
}

/* ---- How an HTTP thread waits for events ------------------------------------------------------------------------- */

static _Thread_local struct {
    /* number of requests that this HTTP thread has given to the main thread and not got back */
    int count;
    /* number of requests that all HTTP threads have given to the main thread and not got back */
    const _Atomic int *all;
    /* until this time the thread keeps its core awake by polling, because a request that it gave away may end soon */
    int64_t until_ns;
    int64_t expected_ns; /* time until which the client's next request is expected; 0: none */
} awaited;

void http_threads_await(int more, const _Atomic int *all)
{
    awaited.count += more;
    awaited.all = all;
    if (more > 0) awaited.until_ns = clock_ns() + NAPS_NS;
}

void http_threads_expect(void)
{
    awaited.expected_ns = clock_ns() + HTTP_EXPECT_NS;
}

/* Polls for events until expected_ns, because a client is about to receive its answer and may send its next request. */
static int expect(int epfd, struct epoll_event *events, int most)
{
    int count;
    do count = epoll_pwait(epfd, events, most, 0, NULL);
    while (count == 0 && clock_ns() < awaited.expected_ns);
    awaited.expected_ns = 0;
    return count;
}

static bool keeps_awake(void)
{
    return awaited.count > 0 && atomic_load_explicit(awaited.all, memory_order_relaxed) <= NAPS_MOST;
}

int http_threads_wait(int epfd, struct epoll_event *events, int most, int timeout_ms)
{
    if (timeout_ms != 0 && keeps_awake()) polling_sleep_until(epfd, awaited.until_ns);
    const int count = timeout_ms != 0 && awaited.expected_ns > 0 ? expect(epfd, events, most) : 0;
    return count == 0 ? epoll_pwait(epfd, events, most, timeout_ms, NULL) : count;
}
