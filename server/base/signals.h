/* signals.h: handles SIGTERM, SIGINT and SIGHUP, and makes sure that the program ends.
 *
 * The signals are blocked in all threads, and one thread waits for them. A signal that arrives while the server starts
 * stays pending until this thread runs. If a process that was told to stop does not end within its time limit, the
 * signal thread ends it with status SIGNALS_STUCK, even if all other threads hang. */
#ifndef SIGNALS_H
#define SIGNALS_H

#include <stdbool.h>
#include <stdint.h>

enum { SIGNALS_STUCK = 71 }; /* exit status of a process that was told to stop and did not end within its time */

/* Blocks the signals that the server handles. Call this first, because threads and programs that start later inherit
 * the blocked signals. */
void signals_block(void);

/* Starts a thread that calls notify(context, number) for each signal. After the first SIGTERM or SIGINT the process
 * has `first_ms` milliseconds to end, after the second one `again_ms`. Returns false if no thread could be started. */
bool signals_start(void (*notify)(void *context, int number), void *context, int64_t first_ms, int64_t again_ms);
/* Ends the process with exit status `status` if it has not ended by itself after `ms` milliseconds. Any thread may call
 * it. */
void signals_end_within(int64_t ms, int status);
/* From now on, signals no longer cause calls of notify() (the argument of signals_start()). The time limit for the end
 * of the process still applies. */
void signals_quiet(void);

#endif
