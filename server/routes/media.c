/* media.c: media types of bodies and answers, after RFC 9110 sections 8.3.1 and 12.5.1. */
#include "server/routes/media.h"

#include <string.h>
#include <strings.h>

bool media_is(const char *text, const char *type)
{
    const size_t length = strlen(type);
    if (strncasecmp(text, type, length) != 0) return false;
    text += length;
    while (*text == ' ' || *text == '\t') text++;
    return *text == '\0' || *text == ';';
}

/* Returns the weight q of one element of an Accept header, from `at` to `end`, in thousandths; 1000 if it has no valid
 * q. */
static int weight_of(const char *at, const char *end)
{
    int weight = 1000;
    while ((at = memchr(at, ';', (size_t)(end - at))) != NULL) {
        do at++;
        while (at < end && (*at == ' ' || *at == '\t'));
        if (end - at < 3 || (at[0] | 0x20) != 'q' || at[1] != '=' || (at[2] != '0' && at[2] != '1')) continue;
        weight = (at[2] - '0') * 1000;
        if (at + 3 < end && at[3] == '.')
            for (int i = 4, unit = 100; at + i < end && at[i] >= '0' && at[i] <= '9' && unit > 0; i++, unit /= 10)
                weight += (at[i] - '0') * unit;
    }
    return weight > 1000 ? 1000 : weight;
}

/* Returns how closely an element of an Accept header matches the media type: 3 if it is the type's full name, 2 for
 * "application/" with a star, 1 for two stars with a slash between them, 0 for no match. */
static int names(const char *at, const char *end, const char *type)
{
    const char *const slash = strchr(type, '/');
    const size_t major = slash ? (size_t)(slash - type) + 1 : 0;
    size_t length = 0;
    while (at + length < end && !strchr("; \t", at[length])) length++;
    if (length == strlen(type) && strncasecmp(at, type, length) == 0) return 3;
    if (length == major + 1 && at[major] == '*' && strncasecmp(at, type, major) == 0) return 2;
    return length == 3 && strncmp(at, "*/*", 3) == 0;
}

int media_accepts(const char *accept, const char *type)
{
    enum { BY_NAME = 3 };
    int best = 0, weight = 0;
    if (accept == NULL) accept = "";
    while (*accept == ' ' || *accept == '\t') accept++;
    if (*accept == '\0') accept = "*/*";
    for (const char *end; *accept; accept = *end ? end + 1 : end) {
        accept += strspn(accept, " \t");
        end = accept + strcspn(accept, ",");
        const int how = names(accept, end, type);
        if (how > best) best = how, weight = weight_of(accept, end);
    }
    return weight == 0 ? 0 : weight * (BY_NAME + 1) + best;
}
