/* parse_internal.h: shared types and functions of the four files that turn a body's tree into problems.
 *
 *   parse.c           problems, and the body: a single problem or an envelope of several
 *   parse_options.c   the table of options, and how a value of each type is read
 *   parse_parts.c     parts of a merge: a list, or a member for each tensor
 *   parse_tensors.c   a member that is a tensor: its shape, its dtype, the place of its numbers; hints for wrong values
 *
 * Each file may call those below it in this list. */
#ifndef PARSE_INTERNAL_H
#define PARSE_INTERNAL_H

#include <cjson/cJSON.h>

#include "proto.h"
#include "scan.h"
#include "tree.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The unused end of the caller's memory. The parser puts its own tensors there, such as a tensor that it makes from a
 * single number. */
struct parse_room {
    uint8_t *at;
    size_t left;
};

struct parse_reader {
    proto_op op;
    const scan_extract *extracts;
    int extract_count;
    uint8_t *memory;
    bool sequence; /* whether KServe's parameter `sequence_id` names the cache */
    /* for a merge request (of results over different keys): one more than the index of the last part whose gradient the
     * body asks for; 0: the body asks for no gradients */
    int gradients;
    struct parse_room *room;
};

/* ---- Functions that parse_tensors.c defines --------------------------------------------------------------------- */

/* Reads the member with the tensor's name: its shape, its dtype, and where in `memory` its numbers lie. */
attn_status parse_tensor(const struct parse_reader *r, attn_tensor_id id, const cJSON *value, attn_tensor *t,
                         attn_error *err);

/* The parser makes some tensors itself (see parse_room). Returns an upper bound on the bytes that these tensors take
 * for one problem. `bytes` is the size of the tensors in the body. */
size_t parse_room_of(const cJSON *problem, size_t bytes);

/* Makes cu_seqlens_k, the start of each sequence's keys, for packed queries with keys [B, Sk, Hk, D]. */
void parse_starts_of_keys(const struct parse_reader *r, attn_problem *p);

/* Checks the size in bytes that a body gives for a tensor: it must fit the tensor's shape and dtype. `what` is the
 * format's name for the size. An impossible shape is no error here, because parse_tensor() refuses it later. */
attn_status parse_size(attn_tensor_id id, const cJSON *of_shape, const proto_dtype *dtype, const char *what,
                       int64_t size, const char *pointer, attn_error *err);

/* Returns a hint for a value that should be a number, a bool or an array; "": there is no hint. */
const char *parse_value_suggestion(const cJSON *value);

/* Returns a hint for a value that should be an integer and cannot be left out; "": there is no hint. */
const char *parse_integer_suggestion(const cJSON *value);

/* Returns a hint for a wrong dtype: what to write instead, or how to convert the values. `given`: true for an input,
 * false for an output. */
const char *parse_dtype_suggestion(attn_tensor_id id, bool given, const cJSON *value,
                                   char suggestion[TREE_SUGGESTION_BYTES]);

/* ---- Functions that parse_parts.c defines ----------------------------------------------------------------------- */

/* Reads the member `parts`, the list of a merge's parts, into item->parts. */
attn_status parse_parts(const struct parse_reader *r, const cJSON *value, proto_item *item, attn_error *err);

/* Returns whether the name is that of a tensor of a merge's part, such as parts.3.out. */
bool parse_parts_has(const char *name);
/* Reads a tensor that belongs to one part (partial result) of a merge. The tensor is the member `member` of `object`,
 * and parse_parts_has() must have accepted its name. */
attn_status parse_parts_named(const struct parse_reader *r, const cJSON *object, const cJSON *member, proto_item *item,
                              attn_error *err);

/* Checks a merge whose members have all been read, converts the lse of its parts (partial results) to natural
 * logarithms, and prepares its outputs. */
attn_status parse_parts_done(const struct parse_reader *r, proto_item *item, attn_error *err);

/* Puts a prefix such as "parts.3." before the text of an error, where 3 is the index of a merge's part. */
void parse_parts_name(int number, attn_error *err);

/* ---- Functions that parse_options.c defines --------------------------------------------------------------------- */

/* Reads the value of the option `o` into the item (one problem of the body). */
attn_status parse_option(const struct parse_reader *r, const proto_option *o, const cJSON *value, proto_item *item,
                         attn_error *err);

#endif
