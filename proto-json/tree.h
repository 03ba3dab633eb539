/* tree.h: cJSON trees of JSON that clients sent. A tree is made from the scanner's output, which is a body's JSON
 * without tensor values (scan.h). cJSON_String is a client's string, cJSON_Raw is a client's number as it was written,
 * and cJSON_Number is the index of an extracted value. */
#ifndef TREE_H
#define TREE_H

#include <cjson/cJSON.h>

#include "proto.h"
#include "text/text.h"

/* ---- Memory of trees --------------------------------------------------------------------------------------------- */

/* Memory for trees that are freed together; it begins as a zeroed struct. Between tree_enter() and tree_leave() the
 * thread's calls of cJSON, tree_parse() and tree_of_text() allocate from it, and cJSON_Delete() does nothing. A thread
 * enters one memory at a time. */
struct tree_block;
struct tree_memory {
    struct tree_block *last;
    size_t used; /* number of bytes used in the newest block */
};
void tree_enter(struct tree_memory *memory);
void tree_leave(void);
/* frees all trees in `memory`, which is empty afterwards */
void tree_forget(struct tree_memory *memory);

/* Parses a rest (a body's JSON without tensor values, scan.h) of `bytes` characters into a tree. The thread must have
 * entered a tree_memory. NULL: out of memory. */
cJSON *tree_parse(const char *rest, size_t bytes);
/* Parses the JSON in a client's string into a tree. *value stays NULL if the string is not JSON. *values counts the
 * values read so far. Returns TOO_LARGE if there are more than limits->values, or another limit is exceeded. The thread
 * must have entered a tree_memory. */
attn_status tree_of_text(const char *text, const proto_limits *limits, int *values, cJSON **value);

/* ---- Reading values of a tree ------------------------------------------------------------------------------------ */

/* upper bound on sizes, offsets and times in bodies: a double holds every integer up to 2^53 exactly */
#define TREE_INTEGER_MAX (INT64_C(1) << 53)

const char *tree_string(const cJSON *value); /* Returns the client's string; NULL: the value is not a string */
/* Returns the text of the client's number; NULL: the value is not a number. */
const char *tree_number(const cJSON *value);
/* Returns whether the value is an integer literal from `minimum` to `maximum`: no fraction (not 1.0), no exponent, not
 * -0. */
bool tree_integer(const cJSON *value, int64_t minimum, int64_t maximum, int64_t *integer);

enum { TREE_QUOTE_BYTES = 48 };
/* Writes the client's value into `quote`, shortened, for an error message, and returns `quote`. */
const char *tree_describe(const cJSON *value, char quote[TREE_QUOTE_BYTES]);

/* ---- Hints and messages about members' names --------------------------------------------------------------------- */

enum { TREE_SUGGESTION_BYTES = 160 };
/* Writes a hint about an unknown word, from suggestions.c or with the most similar known name; "": none. */
const char *tree_suggestion(const char *place, const struct text_nearest *best, char suggestion[TREE_SUGGESTION_BYTES]);

typedef char tree_member[sizeof((attn_error *)0)->member];
/* Writes to `out` the JSON pointer (RFC 6901) "/name", or "/outer/name" if `outer` is not NULL, and returns `out`. It
 * is shortened if it is too long. */
const char *tree_pointer(tree_member out, const char *outer, const char *name);

enum { TREE_NAME_BYTES = 48 }; /* a longer member name from a body is shortened in error messages */

/* Makes the error for a name that is not a member of `outer` (NULL: of the body). `listed` names the members of
 * `outer`, or says where they are listed. */
attn_status tree_unknown(const char *place, const char *outer, const struct text_nearest *best, const char *listed,
                         attn_error *err);
/* Returns whether an earlier member of the object has the same name. */
bool tree_repeated(const cJSON *object, const cJSON *member);
attn_status tree_twice(const char *outer, const char *name, attn_error *err);

#endif
