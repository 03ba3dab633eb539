/* heartbeat.h: since when each thread has been at its present piece of work. No thread that serves others may be at one
 * for longer than some milliseconds; one that is for seconds is stuck, and /readyz says so.
 *
 * Nobody has to watch: whoever asks (a probe, /metrics) looks at all threads, so there is no thread that could hang
 * with those that it watches. A thread takes a place in the table with its first piece of work and keeps it to the end
 * of the process; beyond HEARTBEAT_THREADS of them the rest is not looked at. */
#ifndef HEARTBEAT_H
#define HEARTBEAT_H

#include <stdint.h>

#include "server/base/limits.h"

/* id, label in /metrics, as /readyz calls it, limit in ms. A device's thread waits for its device, so its limit is what
 * a run may take (heartbeat_set_limit()); the others' is far beyond what a busy machine explains. */
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

/* The calling thread begins a piece of work, or another one. */
void heartbeat_busy(enum heartbeat_kind kind);
/* It has ended; the thread waits for what comes next. */
void heartbeat_idle(void);

/* From here on threads of this kind may be at one piece of work for so long. */
void heartbeat_set_limit(enum heartbeat_kind kind, int64_t ms);
/* How long the thread of this kind that has been at its piece of work for longest has been; 0: none is. Any thread. */
int64_t heartbeat_longest_ms(enum heartbeat_kind kind, int64_t now_ms);
/* A kind of which a thread is beyond its limit, HEARTBEAT_KINDS: none is. *busy_ms: since when. */
enum heartbeat_kind heartbeat_stuck(int64_t now_ms, int64_t *busy_ms);

#endif
