/* log.h: one line per event, request id first; text or JSON; never blocks a request, never dies of a full disk.
 * Thread-safe. Lines are queued (1 MiB) and written by a thread of the log's own, so a line of a process that
 * crashes may be lost. Before log_open() and after log_close() lines are written directly, as text. A forked child
 * starts as if log_open() had not been called.
 *
 *     2026-11-20T18:48:03.123Z INFO req=ab12 done status=200 ms=1.5
 *     {"time":"2026-11-20T18:48:03.123Z","level":"info","request_id":"ab12","event":"done","status":200,"ms":1.5}
 *
 * WARN and ERROR lines of one event are written at most 20 times per second; what is left out is told once per second
 * by a line `repeated of=<event> lines=<n>`. */
#ifndef LOG_H
#define LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "server/base/limits.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

void log_open(const char *format, const char *level); /* "text" or "json"; lines go to stderr */
void log_close(void);                                 /* writes what waits; gives a sink that is stuck one second */
bool log_enabled(enum log_level level);

/* log_event(LOG_INFO, request_id, "done", "status=%d ms=%.1f", 200, 1.5): request_id may be NULL. The text after
 * the format is key=value pairs separated by spaces; values with spaces are quoted with LOG_Q: "client=" LOG_Q,
 * which is "client=\"%s\"". In JSON each pair becomes a member; numbers, true and false stay what they are unless
 * quoted. Pairs are cut at LOG_PAIRS_BYTES with their NUL; control characters in them become spaces. */
#define LOG_Q "\"%s\""
void log_event(enum log_level level, const char *request_id, const char *event, const char *pairs, ...)
    __attribute__((format(printf, 4, 5)));

/* The same with the pairs already written, below LOG_PAIRS_BYTES of them, for what is logged once per request. */
void log_pairs(enum log_level level, const char *request_id, const char *event, const char *pairs);

/* A string that a client sent, made fit for a value in LOG_Q. `"` and `\` are written as \" and \\. Control characters,
 * characters that break lines or turn their direction, and bytes that are not UTF-8 are written as \xNN. Input beyond
 * LOG_CLEAN_INPUT_BYTES is cut, with "..." in its place. Returns buffer; LOG_CLEAN_BYTES are always enough. NULL counts
 * as "". */
enum { LOG_CLEAN_BYTES = LOG_CLEAN_INPUT_BYTES * 4 + 4 };
const char *log_clean(char *buffer, unsigned long capacity, const char *client_string);

uint64_t log_dropped(void); /* lines lost because the sink was full or gone */

#endif
