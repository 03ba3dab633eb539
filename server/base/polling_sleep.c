/* polling_sleep.c: polls with short sleeps; see polling_sleep.h. */
#include "server/base/polling_sleep.h"

#include <poll.h>
#include <stddef.h>

#include "server/base/clock.h"
#include "server/base/limits.h"

void polling_sleep_until(int epoll_fd, int64_t until_ns)
{
    struct pollfd fd = { .fd = epoll_fd, .events = POLLIN };
    const struct timespec nap = { 0, NAP_NS };
    while (clock_ns() < until_ns && ppoll(&fd, 1, &nap, NULL) == 0) continue;
}
