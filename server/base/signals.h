/* signals.h: SIGTERM, SIGINT and SIGHUP, from the first moment of the program to its last,
 * and an end that comes in any case.
 *
 * The signals are blocked in all threads and waited for by one of their own. So none is lost and none kills while the
 * server starts: what arrives early is handled when there is somebody to handle it. And since that thread does nothing
 * else, it also watches the end: a process that was told to stop and has not ended in the time that its drain may take
 * ends itself with SIGNALS_STUCK, whatever its other threads do. */
#ifndef SIGNALS_H
#define SIGNALS_H

#include <stdbool.h>
#include <stdint.h>

enum { SIGNALS_STUCK = 71 }; /* exit status: told to stop, it did not end by itself */

/* First of all: threads and programs that are started from here on inherit it. */
void signals_block(void);

/* Calls notify(context, number) for each signal, in a thread of its own. After the first SIGTERM or SIGINT the process
 * has `first_ms` to end, after another one `again_ms`. False: no thread could be started. */
bool signals_start(void (*notify)(void *context, int number), void *context, int64_t first_ms, int64_t again_ms);
/* The process ends within that time, or with this status after it. Any thread. */
void signals_end_within(int64_t ms, int status);
/* notify() is not called any more. The clock of the end goes on. */
void signals_quiet(void);

#endif
