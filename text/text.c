#include "text/text.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

enum { FIRST_BYTES = 1024 }; /* first size of a growing text; it doubles whenever it is too small */

/* ---- Building texts ---------------------------------------------------------------------------------------------- */

struct text text_in(char *buffer, size_t capacity)
{
    if (capacity > 0) buffer[0] = '\0';
    return (struct text){ .at = buffer, .size = capacity, .limit = capacity > 0 ? capacity - 1 : 0 };
}

struct text text_growing(size_t limit)
{
    /* below this limit, doubling cannot overflow */
    assert(limit < SIZE_MAX / 4);
    return (struct text){ .limit = limit, .grows = true };
}

static bool give_up(struct text *t, text_failure failure)
{
    t->failure = failure;
    t->size = t->used;
    return false;
}

bool text_make_room(struct text *t, size_t count)
{
    if (t->failure != TEXT_FINE) return false;
    if (!t->grows || count > t->limit - t->used) return give_up(t, TEXT_FULL);
    size_t size = t->size < FIRST_BYTES / 2 ? FIRST_BYTES : 2 * t->size;
    if (size <= t->used + count) size = t->used + count + 1;
    if (size > t->limit + 1) size = t->limit + 1;
    char *at = realloc(t->at, size);
    if (at == NULL) return give_up(t, TEXT_NO_MEMORY);
    t->at = at;
    t->size = size;
    return true;
}

char *text_take(struct text *t, size_t *length)
{
    assert(t->grows);
    text_put(t, "", 0); /* even an empty text has memory for its NUL */
    if (t->failure != TEXT_FINE) {
        text_free(t);
        return NULL;
    }
    char *const at = t->at;
    *length = t->used;
    *t = text_growing(t->limit);
    return at;
}

void text_free(struct text *t)
{
    assert(t->grows);
    free(t->at);
    *t = text_growing(t->limit);
}

void text_printf(struct text *t, const char *format, ...)
{
    for (int tries = 0; tries < 2; tries++) {
        const size_t room = t->size - t->used;
        va_list args;
        va_start(args, format);
        const int length = vsnprintf(room > 0 ? t->at + t->used : NULL, room, format, args);
        va_end(args);
        if (length >= 0 && (size_t)length < room) {
            t->used += (size_t)length;
            return;
        }
        /* Removes the characters that vsnprintf() wrote before it ran out of room. */
        if (room > 0) t->at[t->used] = '\0';
        if (length < 0) {
            give_up(t, TEXT_NO_MEMORY);
            return;
        }
        if (!text_make_room(t, (size_t)length)) return;
    }
}

/* Returns how many of the first `room` bytes come before one that needs an escape in a JSON string. */
static size_t plain_bytes(const char *string, size_t room)
{
    size_t count = 0;
    while (count < room && string[count] >= 0x20 && string[count] < 0x7f && string[count] != '"' &&
           string[count] != '\\')
        count++;
    return count;
}

void text_put_json(struct text *t, const char *string, size_t room)
{
    static const char hex[] = "0123456789abcdef";
    for (;;) {
        const size_t plain = plain_bytes(string, room);
        text_put(t, string, plain);
        room -= plain;
        string += plain;
        if (*string == '\0' || room == 0) return;

        const unsigned char c = (unsigned char)*string;
        const size_t bytes = text_character(string);
        const char escaped[] = { '\\', (char)c }, code[] = { '\\', 'u', '0', '0', hex[c >> 4], hex[c & 15] };
        const char *form = string;
        size_t length = bytes;
        if (c == '"' || c == '\\') form = escaped, length = sizeof escaped;
        else if (c < 0x20 || c == 0x7f) form = code, length = sizeof code;
        else if (bytes == 0) form = "?", length = 1;
        if (length > room) return;
        text_put(t, form, length);
        room -= length;
        string += bytes > 0 ? bytes : 1;
    }
}

/* ---- Writing and reading numbers --------------------------------------------------------------------------------- */

void text_put_double(struct text *t, double x)
{
    char digits[32];
    assert(isfinite(x));
    for (int count = 15; count <= 17; count++) {
        snprintf(digits, sizeof digits, "%.*g", count, x);
        if (strtod(digits, NULL) == x) break;
    }
    text_put_string(t, digits);
}

const char *text_read_number(const char *text, uint64_t *x)
{
    const char *at = text;
    uint64_t value = 0;
    for (; *at >= '0' && *at <= '9'; at++)
        if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value))
            return NULL;
    if (at == text) return NULL;
    *x = value;
    return at;
}

bool text_is_number(const char *text, uint64_t most, uint64_t *x)
{
    uint64_t value;
    const char *end = text_read_number(text, &value);
    if (end == NULL || *end != '\0' || value > most) return false;
    *x = value;
    return true;
}

/* ---- Characters in UTF-8 ----------------------------------------------------------------------------------------- */

size_t text_character(const char *text)
{
    const unsigned char *const bytes = (const unsigned char *)text;
    unsigned char low, high;
    if (bytes[0] < 0x80) return bytes[0] != '\0';
    const int more = text_utf8_more(bytes[0], &low, &high);
    for (int i = 1; i <= more; i++, low = 0x80, high = 0xbf) /* the loop ends at a NUL, which is below `low` */
        if (bytes[i] < low || bytes[i] > high) return 0;
    return more > 0 ? 1 + (size_t)more : 0;
}

size_t text_cut(const char *text, size_t room)
{
    size_t length = strnlen(text, room);
    if (text[length] == '\0') return length;
    while (length > 0 && ((unsigned char)text[length] & 0xc0) == 0x80) length--;
    return length;
}

/* ---- Finding the known name that is nearest to an unknown one ---------------------------------------------------- */

bool text_is_among(const char *words, const char *word)
{
    const size_t length = strlen(word);
    for (const char *at = words; *at != '\0'; at += *at == ' ') {
        const size_t one = strcspn(at, " ");
        if (one == length && strncasecmp(at, word, one) == 0) return true;
        at += one;
    }
    return false;
}

static char small(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c | 0x20) : c;
}

/* Skips characters between the words of a name, such as _ and -: cu_seqlens_q and "cu seqlens q" are the same name. */
static const char *behind_joints(const char *at, const char *end)
{
    while (at < end && (*at == '_' || *at == '-' || *at == ' ')) at++;
    return at;
}

/* Returns whether a and b are the same name, ignoring case and characters between words. */
static bool is_same_name(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    const char *const a_end = a + a_bytes, *const b_end = b + b_bytes;
    size_t letters = 0;
    for (;; a++, b++, letters++) {
        a = behind_joints(a, a_end), b = behind_joints(b, b_end);
        if (a == a_end || b == b_end) return a == a_end && b == b_end && letters > 0;
        if (small(*a) != small(*b)) return false;
    }
}

bool text_has_word(const char *words, const char *word)
{
    const size_t length = strlen(word);
    for (const char *at = words; *at != '\0'; at += *at == ' ') {
        const size_t one = strcspn(at, " ");
        if (is_same_name(at, one, word, length)) return true;
        at += one;
    }
    return false;
}

int text_distance(const char *a, const char *b)
{
    const size_t n = strnlen(a, TEXT_NAME_BYTES + 1), m = strnlen(b, TEXT_NAME_BYTES + 1);
    /* A table has the distance (number of typing mistakes) between each prefix of `a` and each prefix of `b`. These are
     * three of its rows. */
    int rows[3][TEXT_NAME_BYTES + 1];
    if (n > TEXT_NAME_BYTES || m > TEXT_NAME_BYTES) return TEXT_FAR;
    for (size_t j = 0; j <= m; j++) rows[0][j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        int *const row = rows[i % 3];
        const int *const above = rows[(i + 2) % 3], *const two_above = rows[(i + 1) % 3];
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int best = above[j - 1] + (small(a[i - 1]) != small(b[j - 1]));
            if (above[j] + 1 < best) best = above[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            if (i > 1 && j > 1 && small(a[i - 1]) == small(b[j - 2]) && small(a[i - 2]) == small(b[j - 1]) &&
                two_above[j - 2] + 1 < best)
                best = two_above[j - 2] + 1;
            row[j] = best;
        }
    }
    return rows[n % 3][m];
}

void text_consider(struct text_nearest *nearest, const char *name)
{
    const bool same = is_same_name(nearest->unknown, strlen(nearest->unknown), name, strlen(name));
    const int distance = same ? 0 : text_distance(nearest->unknown, name);
    if (distance >= nearest->distance || 3 * distance > (int)strlen(name))
        return; /* `name` differs from the unknown name in too many letters for its length */
    nearest->name = name;
    nearest->distance = distance;
}
