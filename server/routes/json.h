/* json.h: JSON written as text, for documents whose shape the program knows. (What clients send is read by
 * proto-json/.) Not cJSON's tree: it holds every number as a double, to which 18446744073709551615 is another number,
 * and its memory may fail at each of some hundred calls, where here one look at the end is enough.
 *
 * A format is JSON with ' for ", so that C needs no backslashes:
 *     json_put(&j, "{'name':'%s','bytes':%lld}", name, bytes);
 * A text of the format cannot hold an apostrophe therefore; what %s inserts may hold anything and is escaped. */
#ifndef ROUTES_JSON_H
#define ROUTES_JSON_H

#include "text/text.h"

struct json { /* start with = {0}; after a failure (out of memory) every call does nothing */
    struct text text;
};

/* Only %s, %d, %lld and %g. %g writes what reads back as the same double, and null for NaN and infinity. */
void json_put(struct json *j, const char *format, ...) __attribute__((format(printf, 2, 3)));

void json_constant(struct json *j, const char *text); /* ' becomes ", the rest stays as it is */
void json_raw(struct json *j, const char *text);      /* as it is */
void json_comma(struct json *j);                      /* a comma, unless the object or array has just been opened */

void json_name(struct json *j, const char *name); /* one more string in an array */

/* Gives the NUL-ended text away, for free(); NULL after a failure. */
char *json_take(struct json *j, size_t *length);

#endif
