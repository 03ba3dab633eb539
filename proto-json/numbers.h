/* numbers.h: arrays of numbers, from JSON text and to JSON text, without a node per number.
 *
 * `data` of a tensor may be an array of numbers, flat or nested. The reader gets the text in pieces of any size, from
 * the outermost '[' on, and appends the converted elements to memory of the caller. Between two pieces it keeps at most
 * one number: the one that the end of a piece has cut.
 *
 *   numbers_reader r;
 *   numbers_begin(&r, NUMBERS_F16);                     // or NUMBERS_UNTYPED while the dtype is not known
 *   for each piece:
 *     again: status = numbers_read(&r, text, count, out, room, &taken, &written);
 *       NUMBERS_MORE   all of it taken; give it the next piece
 *       NUMBERS_FULL   out has no room for the next element; go on with text + taken and more room
 *       NUMBERS_DONE   the outermost ']' was taken; the text behind it is at text + taken.  r.rank, r.shape,
 *                      r.elements are final
 *       NUMBERS_BAD    r.error says why, r.offset where
 *
 * Grammar: strictly JSON's (RFC 8259), so 007, 1., .5, +1, 1e and NaN are refused at the first wrong character. Values
 * that JSON numbers cannot express are written as the strings "NaN", "Infinity" and "-Infinity", spelt exactly so,
 * without escapes.
 *
 * Values: an element is the number of the dtype nearest to the decimal text, ties to even, whatever the length of the
 * text (up to NUMBERS_CHARS). A number that rounds to more than the largest finite value is refused and not made
 * infinite. "Infinity" is refused in float8_e4m3fn, which has no infinity. int32 and uint8 take integer literals in
 * range; 1.0 and 1e3 are refused. -0 is zero in integers, and keeps its sign in a floating dtype. The result does not
 * depend on the locale.
 *
 * If the caller sets bare_words after numbers_begin(), NaN, Infinity and -Infinity may also stand without quotes. In
 * uint8, true and false are then read as 1 and 0.
 *
 * Shape: all arrays at one depth must have the same number of elements. rank is the depth, at most NUMBERS_RANK. A flat
 * list has rank 1; the caller decides whether it may stand for another shape.
 *
 * A value is written with the fewest digits that read back as the same value of its dtype. If several texts are equally
 * short, the one nearest to the value is written. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include "kernels/attention.h"

enum {
    NUMBERS_RANK = ATTN_MAX_RANK, /* deepest nesting of arrays */
    NUMBERS_CHARS = 768,          /* longest text of one number, in characters */
    /* Size of the buffer for the text of one number. The text has at most 16 characters, but the code writes eight
     * characters at a time. */
    NUMBERS_TEXT_MAX = 24,
};

/* The type to which numbers are converted: one of the attn_dtypes, or float64 (NUMBERS_UNTYPED) while the dtype is not
 * known. */
typedef enum numbers_type {
#define X(id, ...) NUMBERS_##id = ATTN_##id,
    ATTN_DTYPE_MAP(X)
#undef X
        NUMBERS_UNTYPED = ATTN_DTYPE_COUNT
} numbers_type;

size_t numbers_bytes(numbers_type type);

typedef enum numbers_status { NUMBERS_MORE, NUMBERS_FULL, NUMBERS_DONE, NUMBERS_BAD } numbers_status;

typedef struct numbers_reader {
    /* The caller may read the members below. */
    uint64_t elements;
    uint64_t offset; /* number of characters taken; after NUMBERS_BAD, the position of the error */
    /* static text that says what is wrong, to follow words such as "at offset 17: "; NULL: no error */
    const char *error;
    bool bare_words; /* whether NaN, infinities, true and false may stand without quotes; the caller sets it */
    int rank;        /* number of axes, after NUMBERS_DONE */
    int64_t shape[NUMBERS_RANK];

    /* Only the reader uses the members below. */
    numbers_type type;
    int state; /* state of the reader's state machine, which the diagram in numbers.c shows */
    int depth;
    int leaf_depth;              /* depth of the arrays that directly contain numbers; 0: not known yet */
    int64_t count[NUMBERS_RANK]; /* for each depth of nesting: how many elements of the open array were read so far */
    uint64_t token;              /* offset of the token (number or word) that is being read */
    /* whether some element is not written as an integer: it has a fraction or an exponent, or is NaN or infinite;
     * fraction_element is the index of the first such element */
    bool fractional;
    uint64_t fraction_element;
    /* whether some element is the word true or false; truth_element is the index of the first such element */
    bool truths;
    uint64_t truth_element;
    /* While a number is read, `text` holds its first `held` characters. While a word is read, `word` is its index in a
     * table of words, and `held` is the number of its characters read so far. */
    int word, held;
    /* text of a number whose beginning came in an earlier call, with room for a comma behind it */
    char text[NUMBERS_CHARS + 1];
} numbers_reader;

void numbers_begin(numbers_reader *reader, numbers_type type);

/* Reads the next `count` characters of the array's text, and appends the elements to `out`, which has room for `room`
 * elements. `count` characters contain at most count / 2 + 1 elements. *taken becomes the number of characters that
 * were read; it is less than `count` only if the result is FULL, DONE or BAD. *written becomes the number of appended
 * elements. */
numbers_status numbers_read(numbers_reader *reader, const char *text, size_t count, void *out, size_t room,
                            size_t *taken, size_t *written);

/* what precedes a token (number or word) in an array: '[', ',' or a value */
typedef enum numbers_place { NUMBERS_FIRST, NUMBERS_NEXT, NUMBERS_AFTER } numbers_place;
/* After NUMBERS_BAD, tells other code where to read on: at the bad token (number or word). Returns what precedes the
 * token. Copies to `token` the *length characters of the token that the reader has taken. The token's other characters
 * are at text + taken. */
numbers_place numbers_stopped(const numbers_reader *reader, char token[NUMBERS_CHARS], size_t *length);

/* Converts all elements of an untyped reader to `type` when the dtype becomes known, after NUMBERS_DONE. The result is
 * as if the reader had known the type from the start. `values` and `out` may be the same memory. Returns false if an
 * element does not fit the type; reader->error then says why, and *element is its index. */
bool numbers_convert(numbers_reader *reader, const double *values, numbers_type type, void *out, uint64_t *element);

/* Writes the text of one value of the dtype, not NUL-ended, and returns its length. `text` must have room for
 * NUMBERS_TEXT_MAX characters. Integers have no ".0", except that negative zero is -0.0. Numbers below 0.0001 and from
 * 10^9 on have an exponent (1.5e-7, 1e30). NaN and infinities become "NaN", "Infinity" and "-Infinity", quotes
 * included. */
size_t numbers_format(attn_dtype dtype, const void *value, char *text);

#endif
