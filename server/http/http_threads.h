/* http_threads.h: the HTTP threads: which of them takes a connection, and when each stays on one core.
 *
 * An HTTP thread is a libmicrohttpd daemon of one thread, so that the thread can be chosen.
 *
 * Where the processor is the device, most of a small request's time goes to memory: socket buffers, the decoded
 * tensors, the workspace. They stay in one core's cache when the connection is served on the core on which its
 * packets arrive, which the kernel tells (SO_INCOMING_CPU): a client on the same machine then shares the core with
 * its own requests, and a network card with its queue's. So threads belong to cores, as many to each, and a
 * connection goes to the least busy one of its core.
 *
 * But a thread that may not leave its core waits where it could run elsewhere. So threads are held on their cores
 * only while there is a load and it is even, by the requests of the last moments: a single client, whose packets
 * all arrive on one core, is served by the threads of that core wherever the scheduler puts them; and when a core
 * is taken by others, its threads fall behind and all are let go. And a core must have as many threads as there are
 * cores, for a single client's connections may be all on them: 16 threads are enough for 4 cores (15, for 3), and
 * on larger machines connections go to the least busy thread of all. */
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
    int core;                       /* index into threads.cpu; 0 where threads do not belong to cores */
    _Atomic int connections;        /* number of open connections assigned to this thread */
    _Alignas(64) _Atomic pid_t tid; /* thread id of the daemon's thread; 0: it has not run yet */
    _Atomic uint32_t requests;      /* number of requests completed; wraps */
    uint32_t seen;                  /* value of `requests` at the last http_threads_balance() */
    bool pinned;                    /* may run on its core only */
};

struct http_threads {
    int count;
    struct http_thread *list;
    int cores; /* that threads belong to, as many to each; 0: to none */
    int *cpu;  /* [cores] */
    cpu_set_t all;
    bool spills; /* connections go to the least busy thread of all, until those of one core are not busier any more */
    bool held;
    int uneven; /* looks in a row that found the held load uneven */
    int64_t since_ms, free_until_ms;
};

/* `count` threads without daemons. They belong to the n cores that this process may run on if `count` is a multiple
 * of n and at least n * n, and `cores` (what its quota allows) is no less than n. False when out of memory. */
bool http_threads_init(struct http_threads *threads, struct http_server *http, int count, int cores);
void http_threads_clear(struct http_threads *threads); /* their daemons have ended */

/* Returns the HTTP thread that shall serve this socket. Call it on the thread that accepts. */
struct http_thread *http_threads_pick(struct http_threads *threads, int fd);
/* The same for a core (an index; -1: any). Its threads are given a few connections more than others, then the
 * others as many: two threads of a client that connect one after the other from one core, before the scheduler
 * parts them, are parted here. */
struct http_thread *http_threads_pick_on(struct http_threads *threads, int core);

/* Pins the threads to their cores or unpins them. The loop calls this periodically. A thread whose affinity was
 * changed from outside (taskset) is left alone. */
void http_threads_balance(struct http_threads *threads, int64_t now_ms);
void http_threads_unpin(struct http_threads *threads);

/* By an HTTP thread: one more of its requests is with the loop, or one less; *all: how many are, of all threads. While
 * one is that went there a moment ago, and few are, the thread's core is kept awake for its end
 * (base/polling_sleep.h). */
void http_threads_await(int more, const _Atomic int *all);
/* Call this on an HTTP thread before it sends an answer while no other request waits. The client may send its next
 * request at once, and http_threads_wait() polls for it for HTTP_EXPECT_NS instead of sleeping. */
void http_threads_expect(void);

/* An HTTP thread's epoll_wait(). It polls first if http_threads_await() or http_threads_expect() announced an event. */
int http_threads_wait(int epfd, struct epoll_event *events, int most, int timeout_ms);

/* What http_threads_balance() goes by: the requests of each core in `ms` milliseconds. Those that are held may differ
 * by a factor of 4 and be half as busy, others by 2: nothing flaps at the border. */
enum http_threads_load { HTTP_THREADS_IDLE, HTTP_THREADS_UNEVEN, HTTP_THREADS_EVEN };
enum http_threads_load http_threads_load(const uint32_t *requests, int cores, int64_t ms, bool held);

#endif
