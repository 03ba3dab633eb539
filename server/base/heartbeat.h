/* heartbeat.h: records since when each thread has been busy with its present piece of work. A healthy thread may be
 * busy for some milliseconds at a time. A thread that is busy for seconds is stuck, and /readyz reports it.
 *
 * A probe or /metrics looks at all threads when it is requested. Threads beyond the first HEARTBEAT_THREADS are not
 * watched. */
#ifndef HEARTBEAT_H
#define HEARTBEAT_H

#include <stdint.h>

#include "server/base/limits.h"

/* One row for each kind of thread: id, label in /metrics, name in /readyz, and the longest time for a piece of work in
 * ms. A device's thread waits for its device, so its limit is the longest time of a run (see heartbeat_set_limit()). */
#define HEARTBEAT_MAP(X)                                  \
    X(HTTP, "http", "an HTTP thread", HEARTBEAT_LIMIT_MS) \
    X(LOOP, "loop", "the loop", HEARTBEAT_LIMIT_MS)       \
    X(DEVICE, "device", "a device's thread", INT64_MAX)

enum heartbeat_kind {
#define X(id, label, name, limit_ms) HEARTBEAT_##id,
    HEARTBEAT_MAP(X)
#undef X
        HEARTBEAT_KINDS
};

const char *heartbeat_label(enum heartbeat_kind kind);
const char *heartbeat_name(enum heartbeat_kind kind);

/* Call this when the calling thread begins a piece of work, or goes on to the next piece. */
void heartbeat_busy(enum heartbeat_kind kind);
void heartbeat_idle(void);

void heartbeat_set_limit(enum heartbeat_kind kind, int64_t ms);
/* Returns the longest time in ms for which any thread of this kind has been busy with its present piece of work.
 * Returns 0 if all these threads wait for work. Any thread may call this. */
int64_t heartbeat_longest_ms(enum heartbeat_kind kind, int64_t now_ms);
/* If a thread has been busy beyond the limit of its kind, returns that kind, and the thread's busy time in *busy_ms.
 * Otherwise returns HEARTBEAT_KINDS. */
enum heartbeat_kind heartbeat_stuck(int64_t now_ms, int64_t *busy_ms);

#endif
