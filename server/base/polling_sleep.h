/* polling_sleep.h: waits for an event that will come soon, on a core that stays awake.
 *
 * A core that has been idle for long is in a deep sleep state and takes 0.1 ms or more to wake. After an idle time
 * below 0.1 ms it takes only a few microseconds. A thread that simply sleeps until a 1 ms kernel ends therefore notices
 * the end 0.1 ms late. Here the thread sleeps for only NAP_NS nanoseconds at a time, and looks for the event after each
 * sleep, for at most NAPS_NS in all. This polling takes some 5 % of the core's time. In the rest of the time the core
 * can run other threads (tests/load/README.md). */
#ifndef POLLING_SLEEP_H
#define POLLING_SLEEP_H

#include <stdint.h>

/* Returns when the epoll instance has events, or when clock_ns() has reached until_ns. */
void polling_sleep_until(int epoll_fd, int64_t until_ns);

#endif
