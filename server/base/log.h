/* log.h: one line per event, as text or JSON. Logging never blocks a request, and a full disk never stops the server.
 * Thread-safe. Lines are queued (1 MiB) and written by a thread of the log, so a crash may lose the last lines. Before
 * log_open() and after log_close() lines are written directly, as text. A forked child starts as if log_open() had not
 * been called.
 *
 *     2026-11-20T18:48:03.123Z INFO req=ab12 done status=200 ms=1.5
 *     {"time":"2026-11-20T18:48:03.123Z","level":"info","request_id":"ab12","event":"done","status":200,"ms":1.5}
 *
 * WARN and ERROR lines of one event are written at most 20 times per second. The number of lines left out is written
 * once per second, as `repeated of=<event> lines=<n>`. */
#ifndef LOG_H
#define LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "server/base/limits.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

void log_open(const char *format, const char *level); /* "text" or "json"; lines go to stderr */
void log_close(void); /* writes all queued lines; waits at most one second for a sink that is stuck */
bool log_enabled(enum log_level level);

/* log_event(LOG_INFO, request_id, "done", "status=%d ms=%.1f", 200, 1.5): request_id may be NULL. The formatted text
 * is key=value pairs, separated by spaces. Quote values that have spaces with LOG_Q: "client=" LOG_Q, which is
 * "client=\"%s\"". In JSON each pair becomes a member; unquoted numbers, true and false keep their type. Pairs are cut
 * at LOG_PAIRS_BYTES including the NUL, and control characters in them become spaces. */
#define LOG_Q "\"%s\""
void log_event(enum log_level level, const char *request_id, const char *event, const char *pairs, ...)
    __attribute__((format(printf, 4, 5)));

/* Logs an event with formatted pairs, shorter than LOG_PAIRS_BYTES. For events that happen once per request. */
void log_pairs(enum log_level level, const char *request_id, const char *event, const char *pairs);

/* Makes a string that a client sent fit for a value in LOG_Q. `"` and `\` become \" and \\. Control characters,
 * characters that break lines or change the direction of text, and bytes that are not UTF-8 become \xNN. Input
 * beyond LOG_CLEAN_INPUT_BYTES is replaced by "...". A buffer of LOG_CLEAN_BYTES is always enough. NULL counts
 * as "". Returns `buffer`. */
enum { LOG_CLEAN_BYTES = LOG_CLEAN_INPUT_BYTES * 4 + 4 };
const char *log_clean(char *buffer, unsigned long capacity, const char *client_string);

uint64_t log_dropped(void); /* lines lost because the sink was full or closed */

#endif
