/* scan.h: the scanner, which takes the bytes of a JSON body in pieces of any size. It extracts the values of tensors,
 * and produces "the rest": the body's JSON without these values.
 *
 * The scanner extracts the value of every member named `data`, which is a string (base64) or an array of numbers. It
 * decodes the value into memory that the caller provides. In the rest, the index of the extracted value replaces the
 * value. Everything else is copied to the rest, with the following changes:
 *
 *     a client's string gets the letter SCAN_STRING before its text
 *     a client's number becomes a string: the letter SCAN_NUMBER, and then the number as the client wrote it
 *
 * A number in the rest is therefore always an index in scan_extracts(), which no client can forge. Integers of 64 bits
 * stay exact. Example of a body and of its rest:
 *
 *     {"q": {"shape": [2, 3], "dtype": "float16", "data": "AAEC..."}, "causal": true}
 *     {"q":{"shape":["n2","n3"],"dtype":"sfloat16","data":0},"causal":true}
 *
 * The scanner accepts only strict JSON (RFC 8259): valid UTF-8, no NUL (not even \u0000), no lone surrogates, no byte
 * order mark, nothing after the value. If the text is not JSON, the whole body fails with an error that gives the byte
 * offset. An error inside an extracted value (not base64, not a number) does not fail the whole body. It is recorded in
 * the value's scan_extract, so that the other attention problems of the body are computed nevertheless. parse.c
 * interprets the rest. */
#ifndef SCAN_H
#define SCAN_H

#include "proto.h"

#define SCAN_STRING 's'
#define SCAN_NUMBER 'n'

typedef enum scan_kind { SCAN_BASE64, SCAN_ARRAY, SCAN_BYTES } scan_kind;

enum { SCAN_ALIGNMENT = 64 }; /* alignment of every extracted value in the caller's memory */
#define SCAN_ALIGNED(offset) (((offset) + SCAN_ALIGNMENT - 1) / SCAN_ALIGNMENT * SCAN_ALIGNMENT)

typedef enum scan_fault {
    SCAN_FINE,
    SCAN_BASE64_CHARACTER, /* the character at `position` of the base64 text is wrong */
    SCAN_BASE64_ENDS,      /* the base64 text ends after `position` characters, inside a group of four */
    SCAN_ARRAY_TEXT,       /* the array is wrong at byte `at`: not a number of the dtype, or uneven nesting */
    /* element `position` of the array does not fit the member `dtype`, which came after the array */
    SCAN_ARRAY_ELEMENT,
} scan_fault;

typedef struct scan_extract {
    scan_kind kind;
    /* For an array: whether its elements are stored in `dtype`. If not, they are stored as doubles, because the member
     * `dtype` came after the array. */
    bool typed;
    attn_dtype dtype;
    size_t offset; /* offset of the value in the caller's memory, a multiple of 64 */
    /* Address of the value in a device's memory, which the host cannot read. NULL: the value is in the caller's
     * memory. */
    void *device;
    size_t bytes;
    int64_t elements;
    int rank; /* depth of nesting of an array */
    int64_t shape[ATTN_MAX_RANK];
    scan_fault fault;
    uint64_t position;
    uint64_t at;
    const char *reason; /* static text */
} scan_extract;

typedef struct scan scan;

/* Makes a scanner, which copies `limits` and `memory`. Returns NULL if there is no memory for it. */
scan *scan_new(const proto_limits *limits, const proto_memory *memory);
/* Makes a scanner for JSON without tensor values, which begins at byte `at` of the body. */
scan *scan_new_plain(const proto_limits *limits, uint64_t at);
/* Makes a scanner for bodies of KServe's JSON protocol: a tensor's dtype is called `datatype`, and NaN, infinities,
 * true and false have no quotes in `data`. */
scan *scan_new_kserve(const proto_limits *limits, const proto_memory *memory);
void scan_free(scan *s);

/* Takes the next piece of the body. After an error every later call returns that error. */
attn_status scan_feed(scan *s, const void *bytes, size_t count, attn_error *err);
/* Ends the body. Returns INVALID if its JSON value is not complete. */
attn_status scan_finish(scan *s, attn_error *err);

/* Returns the rest: the body's JSON with an index in place of each extracted value. *length does not count the NUL at
 * its end. The rest and scan_extracts() are valid from scan_finish() to scan_free(). */
const char *scan_rest(const scan *s, size_t *length);
int scan_values(const scan *s); /* number of JSON values in the rest (the body without tensor values) */
/* Returns how many bytes the rest (the JSON without tensor values) and the list of extracted values occupy now. */
size_t scan_held_bytes(const scan *s);
const scan_extract *scan_extracts(const scan *s, int *count);
/* Returns the address of the caller's memory for extracted values, of which *bytes bytes are in use. */
void *scan_memory(const scan *s, size_t *bytes);

/* The caller's memory for extracted tensor values: its size, and how to make it larger. */
struct scan_room {
    proto_memory memory;
    uint8_t *base;
    size_t have; /* number of bytes that grow() has provided so far */
};

/* Returns the struct that describes the memory of extracted values. After scan_finish() the caller may put more bytes
 * into that memory. */
struct scan_room *scan_room(scan *s);

/* Makes room for `bytes` more bytes of extracted values, behind the first `used` bytes of the memory. The memory may
 * move. */
attn_status scan_make_room(struct scan_room *room, size_t used, size_t bytes, attn_error *err);
/* The body contains some values as plain bytes; `size` is the number of bytes of this value. Copies the value's next
 * bytes: as many of the `count` bytes as the value still needs. */
attn_status scan_take(struct scan_room *room, scan_extract *extract, uint64_t size, const void *bytes, size_t count,
                      size_t *taken, attn_error *err);

#endif
