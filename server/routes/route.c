/* route.c: finds the row of the table of routes for a path and a method. */
#include "server/routes/route.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "server/routes/media.h"
#include "text/text.h"

static_assert(PROTO_ERROR_COUNT <= 64, "struct route_doc has a bit for each");

static const struct {
    const char *allow, *name;
} methods[ROUTE_METHOD_COUNT] = {
#define X(id, allow, name) { allow, name },
    ROUTE_METHOD_MAP(X)
#undef X
};

#define X(id, allow, name) sizeof allow + 1 +
static_assert(ROUTE_METHOD_MAP(X) 0 <= ROUTE_ALLOW_BYTES, "all of them, with a comma and a space behind each");
#undef X

const char *route_method_name(enum route_method method)
{
    return methods[method].name;
}

const char *route_allow(unsigned bits, char text[ROUTE_ALLOW_BYTES])
{
    char *at = text;
    *at = '\0';
    for (int m = 0; m < ROUTE_METHOD_COUNT; m++)
        if (bits >> m & 1) at = stpcpy(stpcpy(at, at == text ? "" : ", "), methods[m].allow);
    return text;
}

/* Converts the name of a method, which is case-sensitive (RFC 9110, 9.1), to the table's method. HEAD becomes
 * ROUTE_GET, because rows with GET answer HEAD too. Returns false if no row has the method. */
static bool method_of(const char *name, enum route_method *method)
{
    static const struct {
        const char *name;
        enum route_method method;
    } names[] = { { "GET", ROUTE_GET }, { "HEAD", ROUTE_GET }, { "POST", ROUTE_POST }, { "DELETE", ROUTE_DELETE } };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i].name) == 0) {
            *method = names[i].method;
            return true;
        }
    return false;
}

const char *route_error_media(const char *path)
{
    return path && strncmp(path, "/v2", 3) == 0 && strchr("/?", path[3]) ? "application/json"
                                                                         : "application/problem+json";
}

/* Returns the first segment of a path as the value of a parameter. Its length is 0 if the segment is empty or too
 * long. */
static struct slice parameter_of(const char *path)
{
    size_t length = 0;
    while (path[length] != '\0' && path[length] != '/')
        if (++length > ROUTE_PARAMETER_BYTES) return (struct slice){ path, 0 };
    return (struct slice){ path, length };
}

static bool fits(const char *pattern, const char *path, struct slice parameters[REQUEST_PARAMETERS])
{
    int count = 0;
    while (*pattern != '\0') {
        if (*pattern != '{') {
            if (*pattern++ != *path++) return false;
            continue;
        }
        const struct slice parameter = parameter_of(path);
        if (parameter.length == 0) return false;
        assert(count < REQUEST_PARAMETERS);
        parameters[count++] = parameter;
        path += parameter.length;
        pattern += strcspn(pattern, "}") + 1;
    }
    return *path == '\0';
}

/* Returns whether pattern `a` fits a path more closely than pattern `b`. Both must fit it. Where the two first differ,
 * the closer one has fixed text, and the other has a parameter. */
static bool is_closer(const char *a, const char *b)
{
    for (; *a != '\0' && *a == *b; a++) b++;
    return *b == '{';
}

struct route_match route_find(const struct route *rows, int count, unsigned port, const char *path, const char *method)
{
    enum route_method wanted = ROUTE_METHOD_COUNT;
    struct route_match best = { 0 };
    (void)method_of(method, &wanted);
    for (const struct route *row = rows; row < rows + count; row++) {
        struct route_match match = { .route = row };
        if (!(row->ports & port) || !fits(row->path, path, match.parameters)) continue;
        if (best.route == NULL || is_closer(row->path, best.route->path)) best = match;
        else if (strcmp(row->path, best.route->path) != 0) continue;
        best.methods |= 1u << row->method;
        if (row->method == wanted) {
            best.route = row;
            best.answers = true;
        }
    }
    return best;
}

static struct slice last_segment(const char *path)
{
    size_t end = strlen(path), begin;
    while (end > 0 && path[end - 1] == '/') end--;
    for (begin = end; begin > 0 && path[begin - 1] != '/'; begin--) continue;
    return (struct slice){ path + begin, end - begin };
}

static bool same_segment(struct slice a, struct slice b)
{
    return a.length == b.length && a.length > 0 && strncasecmp(a.at, b.at, a.length) == 0;
}

static bool is_path(const struct route *row, unsigned port)
{
    return (row->ports & port) && strchr(row->path, '{') == NULL;
}

const char *route_nearest(const struct route *rows, int count, unsigned port, const char *path)
{
    struct text_nearest nearest = { path, NULL, 1 + (int)strnlen(path, TEXT_NAME_BYTES) / 4 };
    const struct slice last = last_segment(path);
    for (const struct route *row = rows; row < rows + count; row++)
        if (is_path(row, port)) text_consider(&nearest, row->path);
    for (const struct route *row = rows; row < rows + count && nearest.name == NULL; row++)
        if (is_path(row, port) && same_segment(last, last_segment(row->path))) nearest.name = row->path;
    return nearest.name;
}

const struct route_body *route_body(const struct route *route, const char *content_type)
{
    if (content_type == NULL || *content_type == '\0') return route->bodies;
    for (const struct route_body *body = route->bodies; body->media; body++) {
        if (media_is(content_type, body->media)) return body;
        for (const char *const *also = body->also; also && *also; also++)
            if (strcmp(*also, "*") == 0 || media_is(content_type, *also)) return body;
    }
    return NULL;
}

const struct route_body *route_answer(const struct route *route, const struct route_body *body, const char *accept)
{
    const struct route_body *best = body;
    int wanted = media_accepts(accept, body->media);
    for (const struct route_body *other = route->bodies; other->media; other++) {
        const int weight = media_accepts(accept, other->media);
        if (weight > wanted) best = other, wanted = weight;
    }
    return wanted > 0 ? best : route->bodies;
}

const char *route_media(const struct route *route, char *text, size_t capacity)
{
    size_t used = 0;
    *text = '\0';
    for (const struct route_body *body = route->bodies; body->media && used < capacity; body++)
        used += (size_t)snprintf(text + used, capacity - used, "%s%s", used > 0 ? " or " : "", body->media);
    return text;
}
