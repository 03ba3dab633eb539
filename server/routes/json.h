/* json.h: writes JSON as text, for documents whose structure the program knows. (proto-json/ reads the JSON of
 * clients.) cJSON's tree does not suffice here, for two reasons. cJSON stores every number as a double, which cannot
 * hold 18446744073709551615. With cJSON, a document takes some hundred memory allocations, each of which may fail. With
 * this file, one check at the end is enough.
 *
 * A format is JSON with ' in place of ", so that C needs no backslashes:
 *     json_put(&j, "{'name':'%s','bytes':%lld}", name, bytes);
 * The format itself therefore cannot contain an apostrophe. A string that %s inserts may contain anything, and is
 * escaped. */
#ifndef ROUTES_JSON_H
#define ROUTES_JSON_H

#include "text/text.h"

struct json { /* Initialise this with = {0}. After a failure (out of memory) every call does nothing. */
    struct text text;
};

/* Appends formatted text. The format may contain only %s, %d, %lld and %g. %g writes a number that reads back as the
 * same double, and null for NaN and infinity. */
void json_put(struct json *j, const char *format, ...) __attribute__((format(printf, 2, 3)));

void json_constant(struct json *j, const char *text); /* Appends the text with every ' replaced by ". */
void json_raw(struct json *j, const char *text);
void json_comma(struct json *j); /* appends a comma, unless the object or array has just been opened */

void json_name(struct json *j, const char *name);

/* Returns the text, followed by a NUL, which the caller frees. Returns NULL if an earlier call has failed. */
char *json_take(struct json *j, size_t *length);

#endif
