/* text.h: writes and reads text: a builder that never writes past its end, numbers, UTF-8, similarity of names.
 *
 * Code for JSON bodies, log lines and options uses this folder, so it depends on no other folder.
 *
 * Functions that must be fast are inline. Only text_put_double() depends on the locale, and the program always runs in
 * the C locale. */
#ifndef TEXT_H
#define TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- Building texts ---------------------------------------------------------------------------------------------- */

typedef enum text_failure { TEXT_FINE, TEXT_FULL, TEXT_NO_MEMORY } text_failure;

/* A text under construction, in a buffer of the caller or in memory that grows. A piece that would exceed `limit`, or
 * for which there is no memory, is left out as a whole. Nothing is added after such a failure, so a text never has a
 * gap, and one check of `failure` at the end is enough. at[used] is always NUL, with two exceptions: `at` is NULL in a
 * growing text that never got memory, and a buffer of 0 bytes has no NUL. */
struct text {
    char *at;
    size_t used; /* length of the text in bytes, without the NUL */
    size_t size; /* bytes of memory at `at`; after a failure, equal to `used`, so that nothing more fits */
    size_t limit;
    bool grows; /* whether the text owns its memory */
    text_failure failure;
};

struct text text_in(char *buffer, size_t capacity); /* `capacity` includes the NUL */
/* a text in memory from malloc(), up to `limit` bytes without the NUL */
struct text text_growing(size_t limit);

/* Hands the memory of a growing text to the caller, who frees it. After a failure the function frees it and returns
 * NULL. */
char *text_take(struct text *t, size_t *length);
void text_free(struct text *t);

/* For text_put(): makes room for `count` more bytes and the NUL. Returns false if the limit is exceeded or memory
 * runs out. */
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

/* Appends `string` as the text between the quotes of a JSON string, in at most `room` bytes. Bytes that are not UTF-8
 * become '?'. Characters and escapes are never split. */
void text_put_json(struct text *t, const char *string, size_t room);

/* ---- Writing and reading numbers --------------------------------------------------------------------------------- */

enum { TEXT_DIGITS = 20 }; /* number of decimal digits of 2^64 - 1 */

/* Writes x in decimal, in at most TEXT_DIGITS bytes. The last digit is at end[-1]. Returns the address of the first
 * digit. */
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

/* Appends x < 1000 with leading zeros, such as 007. */
static inline void text_put_three(struct text *t, unsigned x)
{
    const char digits[3] = { (char)('0' + x / 100 % 10), (char)('0' + x / 10 % 10), (char)('0' + x % 10) };
    text_put(t, digits, 3);
}

/* Appends nanoseconds as milliseconds, such as 12.345. `ns` is not negative. */
static inline void text_put_ms(struct text *t, int64_t ns)
{
    const uint64_t us = ns > 0 ? (uint64_t)ns / 1000 : 0;
    text_put_number(t, us / 1000);
    text_put_char(t, '.');
    text_put_three(t, (unsigned)(us % 1000));
}

/* Appends a finite x with 15, 16 or 17 digits: the fewest that read back as the same double. */
void text_put_double(struct text *t, double x);

/* Reads the decimal number at `text`, and returns the address behind it; NULL: no digit, or more than 64 bits. */
const char *text_read_number(const char *text, uint64_t *x);

/* Returns whether `text` is a decimal number of at most `most`, without sign or spaces, and sets *x to it. */
bool text_is_number(const char *text, uint64_t most, uint64_t *x);

/* text_hash() returns the FNV-1a hash of a text, or of the first `most` bytes of a longer text. To hash a text in
 * pieces, pass TEXT_HASH_BEGIN as `hash` for the first piece, and the last result for each further piece. Use this hash
 * only for names that the program chooses: a client could choose many names with the same hash. */
#define TEXT_HASH_BEGIN 2166136261u
static inline uint32_t text_hash(uint32_t hash, const char *text, size_t most)
{
    for (size_t i = 0; i < most && text[i] != '\0'; i++) hash = (hash ^ (unsigned char)text[i]) * 16777619u;
    return hash;
}

/* Returns the value of the digit; -1: `c` is not a hexadecimal digit. */
static inline int text_hex_digit(unsigned char c)
{
    const unsigned char lower = c | 0x20;
    return c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* Returns how many bytes from `p` to `end` need no escape in a JSON string: printable ASCII other than the quote and
 * the backslash. A byte of `odd` has its top bit set if the byte at the same place in the text is not one of these. */
static inline size_t text_plain_run(const char *p, const char *end)
{
    const char *const begin = p;
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = 0x80 * ones;
    while (end - p >= 8) {
        uint64_t word, quote, backslash, odd;
        memcpy(&word, p, 8);
        quote = word ^ '"' * ones;
        backslash = word ^ '\\' * ones;
        /* the borrow of a subtraction may mark a later byte wrongly, which only ends the fast loop early */
        odd = (word | (word - 0x20 * ones) | (quote - ones) | (backslash - ones)) & tops;
        if (odd) break;
        p += 8;
    }
    while (p < end && (unsigned char)*p >= 0x20 && (unsigned char)*p < 0x80 && *p != '"' && *p != '\\') p++;
    return (size_t)(p - begin);
}

/* ---- Characters in UTF-8 ----------------------------------------------------------------------------------------- */

/* Returns how many bytes must follow a first byte that is not ASCII (RFC 3629, section 4); 0: no character begins with
 * it. The next byte must be from *low to *high, and further bytes from 0x80 to 0xbf. */
static inline int text_utf8_more(unsigned char first, unsigned char *low, unsigned char *high)
{
    *low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    *high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    return first < 0xc2 || first > 0xf4 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
}

/* Returns the length in bytes of the character at `text`, which ends with NUL. 0: `text` is empty, or its bytes are not
 * UTF-8. */
size_t text_character(const char *text);

/* Returns how many bytes of the UTF-8 `text` to keep: as many as possible, up to `room`, without splitting a
 * character. */
size_t text_cut(const char *text, size_t room);

/* ---- Finding the known name that is nearest to an unknown one ---------------------------------------------------- */

/* A search for the known name that is most similar to an unknown one. Before the search, set .unknown, and set
 * .distance to the largest number of typing mistakes that is allowed, plus one. */
struct text_nearest {
    const char *unknown;
    const char *name; /* the most similar name; NULL: none is similar enough */
    int distance;
};

void text_consider(struct text_nearest *nearest, const char *name);

/* Returns whether `word` is one of `words`, which have single spaces between them; case is ignored. */
bool text_is_among(const char *words, const char *word);
/* Returns whether `word` is one of `words`; case, underscores, hyphens and spaces in a word are ignored. */
bool text_has_word(const char *words, const char *word);

/* Returns the number of typing mistakes that turn `a` into `b`: a letter too many, missing, wrong, or swapped with its
 * neighbour; case is ignored. TEXT_FAR: a name is longer than TEXT_NAME_BYTES. */
enum { TEXT_NAME_BYTES = 32, TEXT_FAR = 99 };
int text_distance(const char *a, const char *b);

#endif
