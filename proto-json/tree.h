/* tree.h: cJSON's trees of what clients sent: their memory, their values, and what is said of a value or a name that
 * cannot stand there. A tree is made of a skeleton (scan.h). In it cJSON_String is a client's string, cJSON_Raw is
 * a client's number as it was written, and cJSON_Number is the index of a lifted value. */
#ifndef TREE_H
#define TREE_H

#include <cjson/cJSON.h>

#include "proto.h"
#include "text/text.h"

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* Memory of trees that are read once and forgotten together. Between tree_enter() and tree_leave() the thread's calls
 * of cJSON, tree_parse() and tree_of_text() allocate in it, and cJSON_Delete() does nothing. One memory may be entered
 * at a time. Zeros are an empty memory. */
struct tree_block;
struct tree_memory {
    struct tree_block *last;
    size_t used; /* of the last block */
};
void tree_enter(struct tree_memory *memory);
void tree_leave(void);
void tree_forget(struct tree_memory *memory); /* frees all trees that were made in it; it is empty then */

/* The tree of a skeleton of `bytes` characters. A memory must be entered. NULL: out of memory, the only failure. */
cJSON *tree_parse(const char *skeleton, size_t bytes);
/* The tree of JSON that stands in a string of the client's. *value stays NULL where the string is no JSON. *values
 * counts what has been read of limits->values. TOO_LARGE: that limit is passed, or another one. A memory must be
 * entered. */
attn_status tree_of_text(const char *text, const proto_limits *limits, int *values, cJSON **value);

/* ---- Values ------------------------------------------------------------------------------------------------------ */

#define TREE_INTEGER_MAX (INT64_C(1) << 53) /* beyond it other programs' JSON numbers are not exact */

const char *tree_string(const cJSON *value); /* the client's string, or NULL where the value is none */
const char *tree_number(const cJSON *value); /* the client's number as it was written, or NULL */
/* An integer literal within the limits: no fraction, no exponent, no -0 (1.0 is refused too). */
bool tree_integer(const cJSON *value, int64_t minimum, int64_t maximum, int64_t *integer);

/* The value in a message: itself where it is short. Returns `quote`. */
enum { TREE_QUOTE_BYTES = 48 };
const char *tree_describe(const cJSON *value, char quote[TREE_QUOTE_BYTES]);

/* ---- Names ------------------------------------------------------------------------------------------------------- */

/* What to write in the place of a word, behind a message: a habit, or the name that is most like it; "" for neither. */
enum { TREE_CURE_BYTES = 160 };
const char *tree_cure(const char *place, const struct text_nearest *best, char cure[TREE_CURE_BYTES]);

/* A pointer of one or two steps into a problem, RFC 6901: ~ and / in names are escaped. Cut at a character's end.
 * Returns `out`. */
typedef char tree_member[sizeof((attn_error *)0)->member];
const char *tree_pointer(tree_member out, const char *outer, const char *name);

enum { TREE_NAME_BYTES = 48 }; /* of a client's name in a message */

/* A name that `outer` (NULL: the body) does not have. `place` is that of a habit. `listed` has the names that `outer`
 * has, or says where these are listed. */
attn_status tree_unknown(const char *place, const char *outer, const struct text_nearest *best, const char *listed,
                         attn_error *err);
/* Was this name seen in the object before? And then: */
bool tree_repeated(const cJSON *object, const cJSON *member);
attn_status tree_twice(const char *outer, const char *name, attn_error *err);

#endif
