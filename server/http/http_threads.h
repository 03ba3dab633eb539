/* http_threads.h: decides which HTTP thread serves a connection, and when each thread is pinned to one core. Each HTTP
 * thread is a libmicrohttpd daemon with one thread.
 *
 * If the CPU is the device, a small request spends most of its time on accesses to memory. This memory stays in one
 * core's cache if the connection's packets arrive on the core that also runs its HTTP thread. Each core therefore has
 * the same number of threads, and a connection goes to the least busy thread of the core on which its packets arrive
 * (SO_INCOMING_CPU).
 *
 * A pinned thread may have to wait for its core while other cores are idle. Threads are therefore pinned only while
 * there are many requests, spread evenly across cores.
 *
 * A core needs at least as many threads as there are cores, because one core may get all connections of a client: 4
 * cores need 16 threads. With fewer threads, no thread belongs to a core. */
#ifndef HTTP_THREADS_H
#define HTTP_THREADS_H

#include <microhttpd.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/types.h>

struct http_server;

struct http_thread {
    struct http_server *http;
    struct MHD_Daemon *daemon;
    int core; /* index in threads.cpu; 0 if threads do not belong to cores */
    _Atomic int connections;
    _Alignas(64) _Atomic pid_t tid; /* the thread's id; 0: it has not run yet */
    _Atomic uint32_t requests;      /* requests that the thread has completed, modulo 2^32 */
    uint32_t seen;                  /* value of `requests` at the last call of http_threads_balance() */
    bool pinned;
};

struct http_threads {
    int count;
    struct http_thread *list;
    int cores; /* number of cores that have threads; 0: threads do not belong to cores */
    int *cpu;  /* [cores]: the kernel's numbers of the cores that have threads */
    cpu_set_t all;
    /* Whether a new connection goes to the least busy thread of all cores, and not to a thread of the client's core.
     * Set when the threads of the client's core are much busier, cleared when they are no busier than others. */
    bool spills;
    bool held;
    int uneven; /* number of successive periods in which the load of the pinned threads was uneven */
    int64_t since_ms, free_until_ms;
};

/* Makes `count` threads, which have no libmicrohttpd daemon yet. Let n be the number of cores in this process's
 * affinity mask. Each thread is assigned to one core under two conditions: `count` is a multiple of n and at least n
 * squared, and the CPU quota allows all n cores (`cores` >= n). Otherwise no thread is assigned to a core. Returns
 * false when out of memory. */
bool http_threads_init(struct http_threads *threads, struct http_server *http, int count, int cores);
/* frees the memory for all threads; call it after their libmicrohttpd daemons have ended */
void http_threads_clear(struct http_threads *threads);

/* Returns the HTTP thread that must serve this socket. Call this on the thread that accepts connections. */
struct http_thread *http_threads_pick(struct http_threads *threads, int fd);
/* Returns the HTTP thread for a connection whose packets arrive on this core (an index; -1: any core). Usually this is
 * the least busy thread of this core. If that thread has MOST_LEAD connections more than the least busy thread of all
 * cores, new connections go to the least busy thread of all cores, until both threads have equally many connections. */
struct http_thread *http_threads_pick_on(struct http_threads *threads, int core);

/* Pins the threads to their cores or unpins them, according to the load. The main thread calls this periodically. A
 * thread whose affinity was changed from outside (taskset) stays as it is. */
void http_threads_balance(struct http_threads *threads, int64_t now_ms);
void http_threads_unpin(struct http_threads *threads);

/* Call this on an HTTP thread in two cases: with `more` 1 when it hands a request to the main thread, and with `more`
 * -1 when the request comes back. *all is the number of requests that all HTTP threads have handed over. While *all is
 * small, the thread polls for a moment before it sleeps, which keeps its core awake (base/polling_sleep.h). */
void http_threads_await(int more, const _Atomic int *all);
/* Call this on an HTTP thread before it sends an answer, if no other request waits. The next http_threads_wait() then
 * polls for up to HTTP_EXPECT_NS, because the client's next request may arrive soon. */
void http_threads_expect(void);

/* Replaces epoll_wait() on an HTTP thread. If http_threads_await() or http_threads_expect() announced an event, the
 * function polls for a while before it sleeps. */
int http_threads_wait(int epfd, struct epoll_event *events, int most, int timeout_ms);

enum http_threads_load { HTTP_THREADS_IDLE, HTTP_THREADS_UNEVEN, HTTP_THREADS_EVEN };
/* Classifies the load by the number of requests that each core had in `ms` milliseconds. The load is idle below
 * LEAST_RATE requests per second. It is even if the cores differ by at most a factor of 2. If the threads are pinned
 * already (`held`), the limits are looser: half of LEAST_RATE, and a factor of 4. */
enum http_threads_load http_threads_load(const uint32_t *requests, int cores, int64_t ms, bool held);

#endif
