/* polling_sleep.h: waits for an event that will come soon, on a core that stays awake.
 *
 * A core that has been idle for long is in a deep sleep state and takes 0.1 ms or more to wake. After an idle time
 * below 0.1 ms it takes only a few microseconds. The thread therefore sleeps for only NAP_NS nanoseconds at a time and
 * polls after each sleep, for at most NAPS_NS in all. This takes some 5 % of the core's time. */
#ifndef POLLING_SLEEP_H
#define POLLING_SLEEP_H

#include <stdint.h>

/* Returns when the epoll instance has events, or when clock_ns() has reached until_ns. */
void polling_sleep_until(int epoll_fd, int64_t until_ns);

#endif
