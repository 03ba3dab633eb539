/* heartbeat.h: records since when each thread has been busy with its present piece of work. A thread that serves
 * others may be busy for some milliseconds at a time. One that is busy for seconds is stuck, and /readyz reports it.
 *
 * There is no thread that watches, since it could hang too: a probe or /metrics looks at all threads when it is
 * requested. A thread takes an entry of the table with its first piece of work and keeps it until the process ends.
 * Threads beyond the first HEARTBEAT_THREADS are not watched. */
#ifndef HEARTBEAT_H
#define HEARTBEAT_H

#include <stdint.h>

#include "server/base/limits.h"

/* id, label in /metrics, name in /readyz, limit in ms. A device's thread waits for its device: its
 * limit is the longest time of a run (heartbeat_set_limit()). The limit of other threads is far beyond
 * what a busy machine explains. */
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

/* Call this when the calling thread begins a piece of work, or goes on to another one. */
void heartbeat_busy(enum heartbeat_kind kind);
/* Call this when the calling thread has finished its work and begins to wait. */
void heartbeat_idle(void);

/* Sets how long threads of this kind may be busy with one piece of work. */
void heartbeat_set_limit(enum heartbeat_kind kind, int64_t ms);
/* The longest time for which any thread of this kind has been busy; 0 if all of them wait. Any thread may call it. */
int64_t heartbeat_longest_ms(enum heartbeat_kind kind, int64_t now_ms);
/* Returns a kind that has a thread beyond its limit, and in *busy_ms for how long; HEARTBEAT_KINDS
 * if there is none. */
enum heartbeat_kind heartbeat_stuck(int64_t now_ms, int64_t *busy_ms);

#endif
