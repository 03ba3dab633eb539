/* text.h: text, written and read: a builder that never writes past its end, numbers, UTF-8, likeness of names.
 *
 * It lies here, below the server, because requests and answers need it as much as log lines and options do. Only what
 * one place needs stands in that place: the incremental reader of numbers (numbers.h), the scanner's state inside a
 * character that a piece of the body cuts (scan.c), a header's own grammar (server/http/http_head.h).
 *
 * What must be quick is inline: an answer has two dozen integers, a log line five, and printf() takes longer over them
 * than base64 over a small tensor. Nothing here depends on the locale but text_put_double(), and the program never
 * leaves that of C. */
#ifndef TEXT_H
#define TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- Building ---------------------------------------------------------------------------------------------------- */

typedef enum text_failure { TEXT_FINE, TEXT_FULL, TEXT_NO_MEMORY } text_failure;

/* A text that is being built, in a buffer of the caller's or in memory that grows. A piece that would make it longer
 * than `limit`, or for which there is no memory, is left out whole; from then on nothing is added, so that a text never
 * has a hole, and one look at `failure` at the end is enough. at[used] is NUL all the time, after a failure too; only a
 * growing text that has never had a piece, or never memory, has at == NULL, and a buffer of 0 bytes has no NUL. */
struct text {
    char *at;
    size_t used;  /* bytes, without the NUL */
    size_t size;  /* of the memory at `at`; after a failure `used`, which lets the next piece find out */
    size_t limit; /* `used` is never more */
    bool grows;   /* the memory is its own */
    text_failure failure;
};

struct text text_in(char *buffer, size_t capacity); /* capacity counts the NUL */
struct text text_growing(size_t limit);             /* limit does not; from malloc() */

/* Gives the memory of a growing text away, for free(); NULL after a failure, when all of it is freed. */
char *text_take(struct text *t, size_t *length);
void text_free(struct text *t); /* of a growing text; leaves it empty */

/* Makes room for `count` bytes and the NUL, or fails. Of text_put() alone. */
bool text_make_room(struct text *t, size_t count);

static inline void text_put(struct text *t, const char *bytes, size_t count)
{
    if (count >= t->size - t->used && !text_make_room(t, count)) return;
    memcpy(t->at + t->used, bytes, count);
    t->used += count;
    t->at[t->used] = '\0';
}

static inline void text_put_string(struct text *t, const char *string)
{
    text_put(t, string, strlen(string));
}

static inline void text_put_char(struct text *t, char c)
{
    text_put(t, &c, 1);
}

void text_printf(struct text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The inside of a JSON string: quotes, backslashes and control characters escaped, bytes that are not UTF-8 as '?'. At
 * most `room` bytes, cut between characters and escapes. */
void text_put_json(struct text *t, const char *string, size_t room);

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

enum { TEXT_DIGITS = 20 }; /* of 2^64 - 1 */

/* x in decimal, ending before `end`; the beginning is returned. TEXT_DIGITS must be free there. */
static inline char *text_digits_before(char *end, uint64_t x)
{
    do *--end = (char)('0' + x % 10);
    while ((x /= 10) != 0);
    return end;
}

static inline void text_put_number(struct text *t, uint64_t x)
{
    char digits[TEXT_DIGITS], *const end = digits + TEXT_DIGITS, *const begin = text_digits_before(end, x);
    text_put(t, begin, (size_t)(end - begin));
}

/* x, below 1000, with leading zeros: 007 */
static inline void text_put_three(struct text *t, unsigned x)
{
    const char digits[3] = { (char)('0' + x / 100 % 10), (char)('0' + x / 10 % 10), (char)('0' + x % 10) };
    text_put(t, digits, 3);
}

/* Nanoseconds as milliseconds: 12.345; nothing is negative. */
static inline void text_put_ms(struct text *t, int64_t ns)
{
    const uint64_t us = ns > 0 ? (uint64_t)ns / 1000 : 0;
    text_put_number(t, us / 1000);
    text_put_char(t, '.');
    text_put_three(t, (unsigned)(us % 1000));
}

/* 3 as 3, 0.25 as 0.25: the fewest of 15, 16 or 17 digits that read back as the same double, which is finite. */
void text_put_double(struct text *t, double x);

/* Reads the decimal digits at `text`. What follows them; NULL where there is none, or more than 64 bits hold. */
const char *text_read_number(const char *text, uint64_t *x);

/* Is all of `text` decimal digits, and the number at most `most`? If not, *x stays. No sign, no spaces. */
bool text_is_number(const char *text, uint64_t most, uint64_t *x);

/* FNV-1a of the text, but at most its first `most` bytes. A first piece begins with TEXT_HASH_BEGIN, and a next one
 * with the hash of those before it. For names that the program chooses: a client could choose names of one hash. */
#define TEXT_HASH_BEGIN 2166136261u
static inline uint32_t text_hash(uint32_t hash, const char *text, size_t most)
{
    for (size_t i = 0; i < most && text[i] != '\0'; i++) hash = (hash ^ (unsigned char)text[i]) * 16777619u;
    return hash;
}

/* The value of a hexadecimal digit, or -1. */
static inline int text_hex_digit(unsigned char c)
{
    const unsigned char lower = c | 0x20;
    return c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* How many bytes from `p` on, before `end`, stand for themselves in a JSON string: printable ASCII but for the quote
 * and the backslash. Eight at a time: in each byte of `odd` the top bit is set where it is one of the others. */
static inline size_t text_plain_run(const char *p, const char *end)
{
    const char *const begin = p;
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = 0x80 * ones;
    while (end - p >= 8) {
        uint64_t word, quote, backslash, odd;
        memcpy(&word, p, 8);
        quote = word ^ '"' * ones;
        backslash = word ^ '\\' * ones;
        /* x - 1 borrows into the top bit where x is 0; a false alarm behind a true one only ends the fast part
         * early. */
        odd = (word | (word - 0x20 * ones) | (quote - ones) | (backslash - ones)) & tops;
        if (odd) break;
        p += 8;
    }
    while (p < end && (unsigned char)*p >= 0x20 && (unsigned char)*p < 0x80 && *p != '"' && *p != '\\') p++;
    return (size_t)(p - begin);
}

/* ---- UTF-8 ------------------------------------------------------------------------------------------------------- */

/* How many bytes must follow one that is not ASCII, the next one from *low to *high and further ones from 0x80 to 0xbf
 * (RFC 3629, section 4: no overlong forms, no surrogates, nothing above U+10FFFF). 0: no character begins with it. */
static inline int text_utf8_more(unsigned char first, unsigned char *low, unsigned char *high)
{
    *low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    *high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    return first < 0xc2 || first > 0xf4 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
}

/* Bytes of the character at `text`, which a NUL ends; 0 where there is none: at that NUL, and where it is no UTF-8. */
size_t text_character(const char *text);

/* How many of the first `room` bytes of `text`, which is UTF-8, leave no character cut in two. */
size_t text_cut(const char *text, size_t room);

/* ---- Names that nobody knows ------------------------------------------------------------------------------------- */

/* The known name that is most like an unknown one. Start with .unknown,
 * and .distance one above what is still like it. */
struct text_nearest {
    const char *unknown;
    const char *name; /* NULL: none is like it */
    int distance;
};

void text_consider(struct text_nearest *nearest, const char *name);

/* Is `word` one of `words`, which have single spaces between them? Capital letters count as small ones. */
bool text_is_among(const char *words, const char *word);
/* The same, but underscores, hyphens and spaces inside a word do not count either: cuSeqlensQ is cu_seqlens_q. */
bool text_has_word(const char *words, const char *word);

/* Mistakes of typing that make one name of the other: a letter too many, missing, wrong, or swapped with its neighbour;
 * capital ones count as small ones.
 * TEXT_FAR where one of the names is longer than TEXT_NAME_BYTES. */
enum { TEXT_NAME_BYTES = 32, TEXT_FAR = 99 };
int text_distance(const char *a, const char *b);

#endif
