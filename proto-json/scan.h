/* scan.h: the incremental scanner. A JSON body goes in, in pieces of any size; out come a skeleton and lifted
 * tensor values.
 *
 * The value of every member named `data`, be it a string or an array, is lifted: decoded at once into memory that
 * the caller provides, and replaced in the skeleton by its number. All else is copied. In the skeleton
 *     a number is a lifted value: an index into scan_lifts()
 *     a string begins with SCAN_STRING (then the client's string follows) or SCAN_NUMBER (then the digits of a number
 *     as the client wrote them), so that integers of 64 bits stay exact and no client can forge a lifted value:
 *
 *     {"q": {"shape": [2, 3], "dtype": "float16", "data": "AAEC..."}, "causal": true}
 *     {"q":{"shape":["n2","n3"],"dtype":"sfloat16","data":0},"causal":true}
 *
 * The scanner alone decides what is JSON: RFC 8259 to the letter, valid UTF-8, no NUL (not even \u0000), no lone
 * surrogates, no byte order mark, nothing after the value. Breaking that fails the body, with the byte offset in
 * the text. Faults inside a lifted value (not base64, not a number) are noted in its scan_lift, for the problem it
 * belongs to may be one of many. What a skeleton means is decode.c's business. */
#ifndef SCAN_H
#define SCAN_H

#include "proto.h"

#define SCAN_STRING 's'
#define SCAN_NUMBER 'n'

/* How it came: text that was decoded, or bytes as they are. */
typedef enum scan_kind { SCAN_BASE64, SCAN_ARRAY, SCAN_BYTES } scan_kind;

enum { SCAN_ALIGNMENT = 64 }; /* of every lifted value in the caller's memory */
#define SCAN_ALIGNED(offset) (((offset) + SCAN_ALIGNMENT - 1) / SCAN_ALIGNMENT * SCAN_ALIGNMENT)

/* Why a value could not be decoded. `reason` and the rest are in its scan_lift. */
typedef enum scan_fault {
    SCAN_FINE,
    SCAN_BASE64_CHARACTER, /* the character at `position` of the text cannot stand there */
    SCAN_BASE64_ENDS,      /* the text ends after `position` characters, inside a group of four */
    SCAN_ARRAY_TEXT,       /* byte `at` of the body is no number of that dtype, or nested unevenly */
    SCAN_ARRAY_ELEMENT,    /* element `position` does not fit the dtype, which came after the array */
} scan_fault;

/* One lifted value. */
typedef struct scan_lift {
    scan_kind kind;
    bool typed; /* an array: its elements are in `dtype`; else they are double, for the dtype was not known yet */
    attn_dtype dtype;
    size_t offset; /* in the caller's memory, a multiple of 64 */
    void *device;  /* it lies there, and cannot be read; NULL: it lies in the caller's memory */
    size_t bytes;
    int64_t elements; /* of an array */
    int rank;         /* of an array: its nesting, 1 is flat */
    int64_t shape[ATTN_MAX_RANK];
    scan_fault fault;
    uint64_t position;
    uint64_t at;        /* byte of the body */
    const char *reason; /* static text */
} scan_lift;

typedef struct scan scan;

/* Both are copied. NULL when out of memory. */
scan *scan_new(const proto_limits *limits, const proto_memory *memory);
/* For JSON without tensor values: nothing is lifted. Its first byte is byte `at` of the body. */
scan *scan_new_plain(const proto_limits *limits, uint64_t at);
/* For KServe's JSON, as its clients write it: the dtype of `data` is called `datatype`, and inside `data` what is not
 * finite, and true and false of bools, stand without quotes. */
scan *scan_new_kserve(const proto_limits *limits, const proto_memory *memory);
void scan_free(scan *s); /* NULL is fine */

/* The next piece. After an error every further call returns that error. */
attn_status scan_feed(scan *s, const void *bytes, size_t count, attn_error *err);
/* The body is complete: INVALID where the value is not. */
attn_status scan_finish(scan *s, attn_error *err);

/* After scan_finish(), until scan_free(): the skeleton, NUL-ended, and the lifted values. */
const char *scan_skeleton(const scan *s, size_t *length);
int scan_values(const scan *s); /* of the skeleton */
/* Bytes that the skeleton and the list of lifted values take now. May be called at any time. */
size_t scan_held_bytes(const scan *s);
const scan_lift *scan_lifts(const scan *s, int *count);
void *scan_memory(const scan *s, size_t *bytes); /* where the caller's memory is, and how much of it is in use */

/* The caller's memory, as far as it was asked for. */
struct scan_room {
    proto_memory memory;
    uint8_t *base;
    size_t have; /* bytes that grow() gave */
};

/* The scanner's: after scan_finish() it may be filled further. */
struct scan_room *scan_room(scan *s);

/* Makes room for `bytes` behind the first `used`, which may move. */
attn_status scan_make_room(struct scan_room *room, size_t used, size_t bytes, attn_error *err);
/* Copies the next bytes of a lifted value that stands in the body as it is, and has `size` of them: as many of the
 * `count` as it lacks. */
attn_status scan_take(struct scan_room *room, scan_lift *lift, uint64_t size, const void *bytes, size_t count,
                      size_t *taken, attn_error *err);

#endif
