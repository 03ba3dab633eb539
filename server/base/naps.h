/* naps.h: waiting for what will come soon, on a core that stays awake.
 *
 * A core that is idle for long sleeps deeply, and then takes 0.1 ms or more to wake; one that was idle for less than
 * some 0.1 ms takes a few microseconds. A kernel of a millisecond is therefore seen a tenth later by each thread that
 * sleeps until it ends. Such a thread looks up every NAP_NS instead, for NAPS_NS at most: that costs some 5 % of its
 * core, and the core serves others meanwhile (tests/load/README.md). */
#ifndef NAPS_H
#define NAPS_H

#include <stdint.h>

/* Returns when this epoll instance has events, or at until_ns (clock_ns()). */
void naps_until(int epoll_fd, int64_t until_ns);

#endif
