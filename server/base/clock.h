/* clock.h: the clocks of the daemon. Deadlines and durations come from CLOCK_MONOTONIC: if the wall clock jumps, only
 * the time stamps of log lines jump with it. */
#ifndef CLOCK_H
#define CLOCK_H

#include <stdint.h>
#include <time.h>

#define CLOCK_NS_PER_MS INT64_C(1000000)
#define CLOCK_NS_PER_S  INT64_C(1000000000)

static inline int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * CLOCK_NS_PER_S + t.tv_nsec;
}

/* Returns the processor time of the calling thread. It needs a system call. */
static inline int64_t clock_thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * CLOCK_NS_PER_S + t.tv_nsec;
}

static inline int64_t clock_ms(void)
{
    return clock_ns() / CLOCK_NS_PER_MS;
}

#endif
