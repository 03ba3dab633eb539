/* numbers.h: arrays of numbers, from JSON text and to JSON text, without a node per number.
 *
 * Reading. `data` of a tensor may be an array of numbers, flat or nested. The reader is given the text in pieces of
 * any size, from the outermost '[' on, and appends the elements, converted, to memory of the caller's. It holds no
 * more than the one number that a piece may end in, so that 32 MiB of "[0,0,0,..." need the room of their elements
 * and nothing else.
 *
 *   numbers_reader r;
 *   numbers_begin(&r, NUMBERS_F16);                     // or NUMBERS_UNTYPED while the dtype is not known
 *   for each piece:
 *     again: status = numbers_read(&r, text, count, out, room, &taken, &written);
 *       NUMBERS_MORE   all of it taken; give it the next piece
 *       NUMBERS_FULL   out has no room for the next element; go on with text + taken and more room
 *       NUMBERS_DONE   the outermost ']' was taken; what follows is text + taken.  r.rank, r.shape,
 *                      r.elements are final
 *       NUMBERS_BAD    r.error says why, r.offset where
 *
 * Grammar: strictly JSON's (RFC 8259), so that 007, 1., .5, +1, 1e, NaN are refused at the offending character. For
 * what JSON has no number for there are the strings "NaN", "Infinity" and "-Infinity", spelt just so, without
 * escapes.
 *
 * Values: the number of the dtype nearest to the decimal text, ties to even, whatever its length (up to
 * NUMBERS_CHARS). A number beyond the largest finite value after rounding is refused, not made infinite; so is
 * "Infinity" in float8_e4m3fn, which has none. int32 and uint8 take integer literals in range: 1.0 and 1e3 are
 * refused. -0 is zero there, and keeps its sign in a floating dtype. Nothing here looks at the locale.
 *
 * With bare_words, set after numbers_begin(), the words may also stand without quotes, as some programs write them
 * though JSON has none, and true and false stand for 1 and 0 in uint8.
 *
 * Shape: nesting must be regular: every array of one depth has the same number of elements. rank is the depth, at
 * most NUMBERS_RANK. A flat list has rank 1: the caller decides whether it may stand for another shape.
 *
 * Writing. As few digits as read back as the same value of its dtype, and of those the nearest to it. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include "kernels/attention.h"

enum {
    NUMBERS_RANK = ATTN_MAX_RANK, /* nesting */
    NUMBERS_CHARS = 768,          /* longest text of one number that is read; a longer one is refused */
    NUMBERS_TEXT_MAX = 24,        /* room for the text of one number written: at most 16 characters, stored in
                                   * larger chunks */
};

/* The type that elements are converted to: each attn_dtype, or float64 while the dtype is not known. */
typedef enum numbers_type {
#define X(id, ...) NUMBERS_##id = ATTN_##id,
    ATTN_DTYPE_MAP(X)
#undef X
        NUMBERS_UNTYPED = ATTN_DTYPE_COUNT
} numbers_type;

size_t numbers_bytes(numbers_type type); /* of one element */

typedef enum numbers_status { NUMBERS_MORE, NUMBERS_FULL, NUMBERS_DONE, NUMBERS_BAD } numbers_status;

typedef struct numbers_reader {
    /* For the caller to read. */
    uint64_t elements; /* appended so far */
    uint64_t offset;   /* characters taken; after NUMBERS_BAD the position of the fault */
    const char *error; /* static text that completes "at offset 17: "; NULL while all is well */
    bool bare_words;   /* the caller's to set */
    int rank;          /* after NUMBERS_DONE */
    int64_t shape[NUMBERS_RANK];

    /* The reader's own. */
    numbers_type type;
    int state;                   /* state of the grammar; numbers.c has the diagram */
    int depth;                   /* open brackets */
    int leaf_depth;              /* depth at which the elements are; 0: not known yet */
    int64_t count[NUMBERS_RANK]; /* elements of the open array of each depth */
    uint64_t token;              /* offset of the token that is being read */
    bool fractional;             /* some element was not an integer literal; the first such element is: */
    uint64_t fraction_element;
    bool truths; /* some element was true or false; the first such element is: */
    uint64_t truth_element;
    int word, held;               /* in a string: which word, and how much of it was read; in a number:
                                   * characters in text */
    char text[NUMBERS_CHARS + 1]; /* a number that two pieces share, and a comma behind it */
} numbers_reader;

void numbers_begin(numbers_reader *reader, numbers_type type);

/* Appends elements to `out`, which has room for `room` of them. `count` characters finish at most count / 2 + 1
 * elements. *taken: characters used up (all of them unless FULL, DONE or BAD). *written: elements appended. */
numbers_status numbers_read(numbers_reader *reader, const char *text, size_t count, void *out, size_t room,
                            size_t *taken, size_t *written);

/* After NUMBERS_BAD, for a caller that goes on with another grammar: the place of the bad token, and in
 * `token` the *length characters that were taken of it. The text after them is at text + taken. */
typedef enum numbers_place { NUMBERS_FIRST, NUMBERS_NEXT, NUMBERS_AFTER } numbers_place; /* behind '[', ',', a value */
numbers_place numbers_stopped(const numbers_reader *reader, char token[NUMBERS_CHARS], size_t *length);

/* Converts all elements of an untyped reader to `type`, when the dtype becomes known after NUMBERS_DONE.
 * `values` and `out` may be the same memory. The result is what a reader of that type would have appended: an
 * untyped reader rounds its float64 values in a way that loses nothing for a narrower type. Where a reader of
 * that type would have refused, it returns false; reader->error says why, and *element is the first bad
 * element. */
bool numbers_convert(numbers_reader *reader, const double *values, numbers_type type, void *out, uint64_t *element);

/* Writes the text of one value of the dtype, not NUL-ended, and returns its length. `text` must have room for
 * NUMBERS_TEXT_MAX characters. Whole numbers have no ".0", except that negative zero is -0.0. Numbers below
 * 0.0001 and from 10^9 on have an exponent (1.5e-7, 1e30). NaN and infinities become "NaN", "Infinity" and
 * "-Infinity", quotes included. */
size_t numbers_format(attn_dtype dtype, const void *value, char *text);

#endif
