/* json.c: a printf for JSON that appends to a growing text. Whatever bytes an inserted string contains, the text stays
 * valid JSON. */
#include "server/routes/json.h"

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>

#include "server/base/limits.h"

static struct text *text_of(struct json *j)
{
    if (j->text.limit == 0) j->text = text_growing(JSON_DOCUMENT_BYTES);
    return &j->text;
}

static void put_integer(struct text *t, long long x)
{
    if (x < 0) text_put_char(t, '-');
    text_put_number(t, x < 0 ? (uint64_t)0 - (uint64_t)x : (uint64_t)x);
}

static void put_number(struct text *t, double x)
{
    if (isfinite(x)) text_put_double(t, x);
    else text_put_string(t, "null");
}

void json_put(struct json *j, const char *format, ...)
{
    struct text *const t = text_of(j);
    va_list args;
    va_start(args, format);
    for (const char *f = format; *f;) {
        const size_t plain = strcspn(f, "'%");
        text_put(t, f, plain);
        f += plain;
        if (*f == '\'') {
            text_put_char(t, '"');
            f++;
        } else if (strncmp(f, "%s", 2) == 0) {
            text_put_json(t, va_arg(args, const char *), SIZE_MAX);
            f += 2;
        } else if (strncmp(f, "%d", 2) == 0) {
            put_integer(t, va_arg(args, int));
            f += 2;
        } else if (strncmp(f, "%lld", 4) == 0) {
            put_integer(t, va_arg(args, long long));
            f += 4;
        } else if (strncmp(f, "%g", 2) == 0) {
            put_number(t, va_arg(args, double));
            f += 2;
        } else if (*f == '%') abort();
    }
    va_end(args);
}

void json_constant(struct json *j, const char *text)
{
    for (; *text; text++) text_put_char(text_of(j), *text == '\'' ? '"' : *text);
}

void json_raw(struct json *j, const char *text)
{
    text_put_string(text_of(j), text);
}

void json_comma(struct json *j)
{
    const struct text *t = text_of(j);
    if (t->used > 0 && t->at[t->used - 1] != '{' && t->at[t->used - 1] != '[') text_put_char(&j->text, ',');
}

char *json_take(struct json *j, size_t *length)
{
    return text_take(text_of(j), length);
}

void json_name(struct json *j, const char *name)
{
    json_comma(j);
    json_put(j, "'%s'", name);
}
