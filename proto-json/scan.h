/* scan.h: the incremental scanner. It takes a JSON body in pieces of any size, and produces a rest and
 * extracted tensor values.
 *
 * The value of every member named `data`, a string or an array, is extracted: it is decoded at once into memory
 * that the caller provides, and the rest has its index instead. All else is copied. In the rest
 *     a number is the index of an extracted value in scan_extracts()
 *     a string begins with SCAN_STRING (then the client's string follows) or SCAN_NUMBER (then the digits of a number
 *     as the client wrote them). Integers of 64 bits thus stay exact, and no client can forge an extracted value:
 *
 *     {"q": {"shape": [2, 3], "dtype": "float16", "data": "AAEC..."}, "causal": true}
 *     {"q":{"shape":["n2","n3"],"dtype":"sfloat16","data":0},"causal":true}
 *
 * The scanner alone decides what is JSON: RFC 8259 to the letter, valid UTF-8, no NUL (not even \u0000), no
 * lone surrogates, no byte order mark, nothing after the value. Text that breaks this fails the body, with
 * the byte offset. Faults inside an extracted value (not base64, not a number) are noted in its scan_extract,
 * because its problem may be one of many. decode.c gives the rest its meaning. */
#ifndef SCAN_H
#define SCAN_H

#include "proto.h"

#define SCAN_STRING 's'
#define SCAN_NUMBER 'n'

/* What a value was in the body: base64 text, an array of numbers, or plain bytes. */
typedef enum scan_kind { SCAN_BASE64, SCAN_ARRAY, SCAN_BYTES } scan_kind;

enum { SCAN_ALIGNMENT = 64 }; /* alignment of every extracted value in the caller's memory */
#define SCAN_ALIGNED(offset) (((offset) + SCAN_ALIGNMENT - 1) / SCAN_ALIGNMENT * SCAN_ALIGNMENT)

/* Why a value could not be decoded. Its scan_extract has `reason` and the details. */
typedef enum scan_fault {
    SCAN_FINE,
    SCAN_BASE64_CHARACTER, /* the character at `position` of the text cannot stand there */
    SCAN_BASE64_ENDS,      /* the text ends after `position` characters, inside a group of four */
    SCAN_ARRAY_TEXT,       /* byte `at` of the body is not a number of that dtype, or the nesting is uneven */
    SCAN_ARRAY_ELEMENT,    /* element `position` does not fit the dtype, which stood behind the array */
} scan_fault;

/* One extracted value. */
typedef struct scan_extract {
    scan_kind kind;
    bool typed; /* an array: its elements are in `dtype`; false: they are double, because the dtype stood behind it */
    attn_dtype dtype;
    size_t offset; /* of the value in the caller's memory, a multiple of 64 */
    void *device;  /* address in a device's memory, which the host cannot read; NULL: it lies in the caller's
                    * memory */
    size_t bytes;
    int64_t elements; /* of an array */
    int rank;         /* of an array: the depth of its nesting, 1 for a flat one */
    int64_t shape[ATTN_MAX_RANK];
    scan_fault fault;
    uint64_t position;
    uint64_t at;        /* byte of the body */
    const char *reason; /* static text */
} scan_extract;

typedef struct scan scan;

/* Makes a scanner; `limits` and `memory` are copied. NULL when out of memory. */
scan *scan_new(const proto_limits *limits, const proto_memory *memory);
/* A scanner for JSON without tensor values, which extracts nothing. Its first byte is byte `at` of the body. */
scan *scan_new_plain(const proto_limits *limits, uint64_t at);
/* A scanner for JSON as KServe's clients write it. The dtype of `data` is called `datatype`. Inside `data`,
 * NaN, infinities, true and false (for bool) stand without quotes. */
scan *scan_new_kserve(const proto_limits *limits, const proto_memory *memory);
void scan_free(scan *s); /* NULL is fine */

/* Takes the next piece of the body. After an error every further call returns that error. */
attn_status scan_feed(scan *s, const void *bytes, size_t count, attn_error *err);
/* Call this when the body is complete. INVALID where its value is not complete. */
attn_status scan_finish(scan *s, attn_error *err);

/* The rest, NUL-ended, and the extracted values. Valid from scan_finish() to scan_free(). */
const char *scan_rest(const scan *s, size_t *length);
int scan_values(const scan *s); /* of the rest */
/* Bytes that the rest and the list of extracted values occupy now. May be called at any time. */
size_t scan_held_bytes(const scan *s);
const scan_extract *scan_extracts(const scan *s, int *count);
void *scan_memory(const scan *s, size_t *bytes); /* address of the caller's memory; *bytes is how much of it
                                                  * is in use */

/* The caller's memory, and how much of it grow() has provided. */
struct scan_room {
    proto_memory memory;
    uint8_t *base;
    size_t have; /* bytes that grow() gave */
};

/* The scanner owns it. After scan_finish() more bytes may be put into it. */
struct scan_room *scan_room(scan *s);

/* Makes room for `bytes` behind the first `used` bytes; all of them may move. */
attn_status scan_make_room(struct scan_room *room, size_t used, size_t bytes, attn_error *err);
/* Copies the next bytes of an extracted value that stands in the body as `size` plain bytes. It takes as many of
 * the `count` bytes as the value still lacks. */
attn_status scan_take(struct scan_room *room, scan_extract *extract, uint64_t size, const void *bytes, size_t count,
                      size_t *taken, attn_error *err);

#endif
