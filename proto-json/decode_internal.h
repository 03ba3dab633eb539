/* decode_internal.h: what the files that give names their meaning share; proto.h is what others see.
 *
 *   decode.c           problems, and the body: a single problem or an envelope of several
 *   decode_options.c   the table of options, and the value of each type
 *   decode_tensors.c   a member that is a tensor: its shape, dtype and where its numbers lie; what is said of values
 *                      that are not what they should be
 *
 * Each may call those below it. */
#ifndef DECODE_INTERNAL_H
#define DECODE_INTERNAL_H

#include <cjson/cJSON.h>

#include "proto.h"
#include "scan.h"
#include "tree.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The end of the caller's memory, behind what was lifted: for tensors that are made here. */
struct decode_room {
    uint8_t *at;
    size_t left;
};

/* What all steps of one body share. */
struct decode_reader {
    proto_op op;
    const scan_lift *lifts;
    int lift_count;
    uint8_t *memory;
    bool sequence; /* stands in the place of caches */
    struct decode_room *room;
};

/* ---- decode_tensors.c -------------------------------------------------------------------------------------------- */

/* The member of this name: its shape and dtype, and where in `memory` its numbers lie. */
attn_status decode_tensor(const struct decode_reader *r, attn_tensor_id id, const cJSON *value, attn_tensor *t,
                          attn_error *err);

/* Upper bound on what a problem's members need of decode_room, in a body with so many bytes of tensors. */
size_t decode_room_of(const cJSON *problem, size_t bytes);

/* Packed queries and keys [B, Sk, Hk, D]: makes cu_seqlens_k, where each row of keys starts. */
void decode_starts_of_keys(const struct decode_reader *r, attn_problem *p);

/* For a reader, before the bytes arrive: is the size that a body says of a tensor's bytes what its shape and dtype
 * need? `what`: how it calls that size. A shape that cannot be is not looked at: decode_tensor() refuses it. */
attn_status decode_size(attn_tensor_id id, const cJSON *of_shape, const proto_dtype *dtype, const char *what,
                        int64_t size, const char *pointer, attn_error *err);

/* What else there is to say of a value that should be a number, true or false, an array: "" where nothing is. */
const char *decode_value_cure(const cJSON *value);

/* The same of one that should be an integer, and is not optional. */
const char *decode_integer_cure(const cJSON *value);

/* What to write in the place of a dtype that the tensor cannot have; of an output nothing can be converted. */
const char *decode_dtype_cure(attn_tensor_id id, bool given, const cJSON *value, char cure[TREE_CURE_BYTES]);

/* ---- decode_options.c -------------------------------------------------------------------------------------------- */

/* The member of the row's name, to its place in the item. */
attn_status decode_option(const struct decode_reader *r, const proto_option *o, const cJSON *value, proto_item *item,
                          attn_error *err);

#endif
