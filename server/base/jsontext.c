/* jsontext.c: a growing text, and a printf for JSON.
 *
 * Invariants
 * 1. Inserted strings are valid JSON inside their quotes: quotes, backslashes and control characters are escaped,
 * bytes that are not ASCII pass (the strings here are the program's own UTF-8).
 * 2. at[used] is NUL whenever at is not NULL. */
#include "server/base/jsontext.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void put_bytes(struct json *j, const char *bytes, size_t count)
{
    if (j->failed) return;
    if (count >= j->capacity - j->used) {
        const size_t capacity = 2 * j->capacity + count + 1024;
        char *at = realloc(j->at, capacity);
        if (at == NULL) {
            j->failed = true;
            return;
        }
        j->at = at;
        j->capacity = capacity;
    }
    memcpy(j->at + j->used, bytes, count);
    j->used += count;
    j->at[j->used] = '\0';
}

static void put_escaped(struct json *j, const char *string)
{
    for (; *string; string++) {
        const size_t plain = strcspn(string,
                                     "\"\\\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13"
                                     "\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f");
        put_bytes(j, string, plain);
        string += plain;
        if (*string == '\0') return;
        char escape[8];
        if (*string == '"' || *string == '\\') snprintf(escape, sizeof escape, "\\%c", *string);
        else snprintf(escape, sizeof escape, "\\u%04x", (unsigned char)*string);
        put_bytes(j, escape, strlen(escape));
    }
}

static void put_number(struct json *j, double value)
{
    char text[40] = "null";
    for (int digits = 6; isfinite(value) && digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    put_bytes(j, text, strlen(text));
}

void json_put(struct json *j, const char *format, ...)
{
    va_list args;
    char number[24];
    va_start(args, format);
    for (const char *f = format; *f;) {
        const size_t plain = strcspn(f, "'%");
        put_bytes(j, f, plain);
        f += plain;
        if (*f == '\'') {
            put_bytes(j, "\"", 1);
            f++;
        } else if (strncmp(f, "%s", 2) == 0) {
            put_escaped(j, va_arg(args, const char *));
            f += 2;
        } else if (strncmp(f, "%d", 2) == 0) {
            snprintf(number, sizeof number, "%d", va_arg(args, int));
            put_bytes(j, number, strlen(number));
            f += 2;
        } else if (strncmp(f, "%lld", 4) == 0) {
            snprintf(number, sizeof number, "%lld", va_arg(args, long long));
            put_bytes(j, number, strlen(number));
            f += 4;
        } else if (strncmp(f, "%g", 2) == 0) {
            put_number(j, va_arg(args, double));
            f += 2;
        } else if (*f == '%') abort(); /* a format of this program that no test has run */
    }
    va_end(args);
}

void json_constant(struct json *j, const char *text)
{
    for (; *text; text++) put_bytes(j, *text == '\'' ? "\"" : text, 1);
}

void json_raw(struct json *j, const char *text)
{
    put_bytes(j, text, strlen(text));
}

void json_comma(struct json *j)
{
    if (!j->failed && j->used > 0 && j->at[j->used - 1] != '{' && j->at[j->used - 1] != '[') put_bytes(j, ",", 1);
}

char *json_take(struct json *j, size_t *length)
{
    if (j->failed) {
        free(j->at);
        return NULL;
    }
    *length = j->used;
    return j->at;
}
