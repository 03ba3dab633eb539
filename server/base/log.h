/* log.h: one line per event, as text or JSON. Logging never blocks a request, and a full disk never stops the server.
 * All functions are thread-safe. Lines are queued (1 MiB) and written by a thread of the log, so a crash may lose the
 * last lines. Before log_open() and after log_close() lines are written directly, as text. A forked child starts as if
 * log_open() had not been called.
 *
 *     2026-11-20T18:48:03.123Z INFO req=ab12 done status=200 ms=1.5
 *     {"time":"2026-11-20T18:48:03.123Z","level":"info","request_id":"ab12","event":"done","status":200,"ms":1.5}
 *
 * At most 20 WARN or ERROR lines of one event are written per second. A line `repeated of=<event> lines=<n>`, once per
 * second, says how many were left out. */
#ifndef LOG_H
#define LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "server/base/limits.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

void log_open(const char *format, const char *level); /* opens the log on stderr; `format` is "text" or "json" */
void log_close(void); /* writes all queued lines; if standard error is stuck, waits at most one second */
bool log_enabled(enum log_level level);

/* Logs an event. Example: log_event(LOG_INFO, request_id, "done", "status=%d ms=%.1f", 200, 1.5). `request_id` may be
 * NULL. The formatted text is key=value pairs, separated by spaces. A value with spaces must be quoted with LOG_Q:
 * "client=" LOG_Q is "client=\"%s\"". In JSON each pair becomes a member; unquoted numbers, true and false keep their
 * type. Pairs are cut at LOG_PAIRS_BYTES including the NUL, and control characters in them become spaces. */
#define LOG_Q "\"%s\""
void log_event(enum log_level level, const char *request_id, const char *event, const char *pairs, ...)
    __attribute__((format(printf, 4, 5)));

/* Logs an event whose key=value pairs are formatted already, and are shorter than LOG_PAIRS_BYTES. Use this for events
 * that happen once per request. */
void log_pairs(enum log_level level, const char *request_id, const char *event, const char *pairs);

enum { LOG_CLEAN_BYTES = LOG_CLEAN_INPUT_BYTES * 4 + 4 };
/* Makes a string from a client fit for a quoted value (LOG_Q). `"` and `\` become \" and \\. Control characters,
 * characters that break lines or change the direction of text, and bytes that are not UTF-8 become \xNN. Input beyond
 * LOG_CLEAN_INPUT_BYTES is replaced by "...". A buffer of LOG_CLEAN_BYTES is always enough. A NULL string counts as "".
 * Returns `buffer`. */
const char *log_clean(char *buffer, unsigned long capacity, const char *client_string);

uint64_t log_dropped(void); /* number of lines lost because standard error was full or closed */

#endif
