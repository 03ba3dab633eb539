/* http_head.c: tests whether the head of an HTTP message is unambiguous: RFC 9110 section 5.6.2 (tokens), RFC 9112
 * sections 6.1 to 6.3.
 *
 * libmicrohttpd 0.9.75 uses the first of two Content-Lengths, prefers a Transfer-Encoding to a Content-Length, ignores
 * "Content-Length : 5", and reads a body with an unknown Transfer-Encoding until the connection ends. 1.0.1 enforces
 * some of the rules. This file cannot check what libmicrohttpd hides: 0.9.75 cuts a value at a NUL, and in both
 * versions a bare LF ends a line. */
#include "server/http/http_head.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "text/text.h"
#include "server/base/limits.h"

enum rule { FRAMING, ONCE, FIRST, LIST };

static const struct {
    const char *name;
    size_t length;
    enum rule rule;
} headers[HEADER_COUNT] = {
#define X(id, name, rule) { name, sizeof name - 1, rule },
    HEADER_MAP(X)
#undef X
};

/* True for a character that a token of HTTP, such as a header's name, may contain (RFC 9110, 5.6.2). */
static bool is_token_char(unsigned char c)
{
    if (c >= '0' && c <= '9') return true;
    if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') return true;
    return c != 0 && strchr("!#$%&'*+-.^_`|~", c) != NULL;
}

void http_head_begin(struct http_head *head, const char *version)
{
    memset(head, 0, offsetof(struct http_head, list));
    head->http10 = strcmp(version, "HTTP/1.0") == 0;
}

/* Copies the value of header i, without the white space after it, into `room`, which is as large as the largest
 * head. */
static void keep(struct http_head *f, int i, const char *value, size_t length)
{
    if (length >= sizeof f->room - f->used) {
        snprintf(f->fault, sizeof f->fault, "%s is too long", headers[i].name);
        return;
    }
    f->value[i] = memcpy(f->room + f->used, value, length);
    f->room[f->used + length] = '\0';
    f->used += length + 1;
}

static void join(struct http_head *f, int i, const char *value, size_t length)
{
    const int before = f->value[i] == f->list ? (int)strlen(f->list)
                                              : snprintf(f->list, sizeof f->list, "%s", f->value[i]);
    if (before + sizeof ", " + length > sizeof f->list) {
        snprintf(f->fault, sizeof f->fault, "%s has several lines of more than %d bytes in all", headers[i].name,
                 HTTP_HEAD_LIST_BYTES);
        return;
    }
    snprintf(f->list + before, sizeof f->list - (size_t)before, ", %.*s", (int)length, value);
    f->value[i] = f->list;
}

void http_head_header(struct http_head *f, const char *name, size_t name_length, const char *value, size_t value_length)
{
    if (f->fault[0]) return;
    if (name_length == 0) {
        snprintf(f->fault, sizeof f->fault, "a header has no name");
        return;
    }
    for (size_t i = 0; i < name_length; i++)
        if (!is_token_char((unsigned char)name[i])) {
            snprintf(f->fault, sizeof f->fault, "byte %zu of a header name is 0x%02x, which cannot stand there", i,
                     (unsigned char)name[i]);
            return;
        }
    for (size_t i = 0; i < value_length; i++) {
        const unsigned char c = (unsigned char)value[i];
        if ((c < 0x20 && c != '\t') || c == 0x7f) {
            snprintf(f->fault, sizeof f->fault, "a header value contains the control character 0x%02x", c);
            return;
        }
    }
    for (int i = 0; i < HEADER_COUNT; i++) {
        if (headers[i].length != name_length || strncasecmp(headers[i].name, name, name_length) != 0) continue;
        const enum rule rule = headers[i].rule;
        size_t length = value_length;
        if (f->value[i] && (rule == FRAMING || rule == ONCE)) {
            snprintf(f->fault, sizeof f->fault, "%s is given twice", headers[i].name);
            return;
        }
        if (f->value[i] && rule == FIRST) return;
        while (rule != FRAMING && length > 0 && (value[length - 1] == ' ' || value[length - 1] == '\t')) length--;
        if (f->value[i]) join(f, i, value ? value : "", length);
        else if (length < value_length) keep(f, i, value, length);
        else f->value[i] = value ? value : "";
        return;
    }
}

void http_head_fault(struct http_head *f, const char *fault)
{
    if (f->fault[0] == '\0') snprintf(f->fault, sizeof f->fault, "%s", fault);
}

bool http_head_is_method(const char *method)
{
    for (const char *c = method; *c; c++)
        if (!is_token_char((unsigned char)*c)) return false;
    return *method != '\0';
}

bool http_head_is_target(const char *target)
{
    for (; *target; target++)
        if ((unsigned char)*target <= ' ') return false;
    return true;
}

size_t http_head_unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from; from++) {
        const int high = from[0] == '%' ? text_hex_digit((unsigned char)from[1]) : -1;
        const int low = high >= 0 ? text_hex_digit((unsigned char)from[2]) : -1;
        const int byte = low >= 0 ? 16 * high + low : -1;
        if (byte <= 0 || byte == '/') *to++ = *from;
        else {
            *to++ = (char)byte;
            from += 2;
        }
    }
    *to = '\0';
    return (size_t)(to - text);
}

const char *http_head_path(const char *target)
{
    const size_t scheme = strncasecmp(target, "http://", 7) == 0 ? 7 : strncasecmp(target, "https://", 8) == 0 ? 8 : 0;
    if (scheme == 0) return target;
    const char *path = strchr(target + scheme, '/');
    return path ? path : "/";
}

size_t http_head_arguments(const char *target)
{
    const char *query = strchr(target, '?');
    size_t count = query != NULL;
    for (; query && *query; query++) count += *query == '&';
    return count;
}

bool http_head_end(struct http_head *f)
{
    const char *length = f->value[HEADER_CONTENT_LENGTH], *encoding = f->value[HEADER_TRANSFER_ENCODING];
    if (f->fault[0]) return false;
    if (!f->http10 && f->value[HEADER_HOST] == NULL) {
        snprintf(f->fault, sizeof f->fault, "Host is missing");
        return false;
    }
    if (length && encoding) {
        snprintf(f->fault, sizeof f->fault, "Content-Length and Transfer-Encoding are both given");
        return false;
    }
    if (encoding) {
        if (strcasecmp(encoding, "chunked") != 0) {
            snprintf(f->fault, sizeof f->fault, "Transfer-Encoding must be chunked");
            return false;
        }
        if (f->http10) {
            snprintf(f->fault, sizeof f->fault, "HTTP/1.0 has no Transfer-Encoding");
            return false;
        }
        f->chunked = true;
    }
    if (length) {
        uint64_t value;
        if (!*length) http_head_fault(f, "Content-Length is empty");
        else if (length[strspn(length, "0123456789")] != '\0')
            http_head_fault(f, "Content-Length must be decimal digits");
        /* more digits than fit in 64 bits: counts as the largest 64-bit number, which is over any limit */
        else if (text_read_number(length, &value) == NULL) value = UINT64_MAX;
        if (f->fault[0]) return false;
        f->has_length = true;
        f->length = value;
    }
    return true;
}

/* Returns the length of the text. If the text ends with `port`, such as ":443", this ending does not count. */
static size_t without_port(const char *text, const char *port)
{
    const size_t length = strlen(text), tail = strlen(port);
    return length > tail && strcmp(text + length - tail, port) == 0 ? length - tail : length;
}

bool http_head_same_origin(const char *origin, const char *host)
{
    static const struct {
        const char *scheme, *port;
    } schemes[] = { { "http://", ":80" }, { "https://", ":443" } };
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
        const size_t scheme = strlen(schemes[i].scheme);
        if (strncasecmp(origin, schemes[i].scheme, scheme) != 0) continue;
        const size_t length = without_port(origin + scheme, schemes[i].port);
        return length > 0 && length == without_port(host, schemes[i].port) &&
               strncasecmp(origin + scheme, host, length) == 0;
    }
    return false;
}

bool http_head_is_request_id(const char *text)
{
    size_t length = 0;
    if (text == NULL) return false;
    for (; text[length]; length++)
        if (length == REQUEST_ID_BYTES - 1 || !(isalnum((unsigned char)text[length]) || strchr("._-", text[length])))
            return false;
    return length > 0;
}

static bool is_hex_id(const char *text, int count)
{
    bool zero = true;
    for (int i = 0; i < count; i++) {
        if (!((text[i] >= '0' && text[i] <= '9') || (text[i] >= 'a' && text[i] <= 'f'))) return false;
        if (text[i] != '0') zero = false;
    }
    return !zero;
}

bool http_head_traceparent(const char *text, char trace_id[33], char span_id[17])
{
    if (text == NULL || strlen(text) != 55 || text[2] != '-' || text[35] != '-' || text[52] != '-') return false;
    if (strncmp(text, "00", 2) != 0 || !isxdigit((unsigned char)text[53]) || !isxdigit((unsigned char)text[54]))
        return false;
    if (!is_hex_id(text + 3, 32) || !is_hex_id(text + 36, 16)) return false;
    memcpy(trace_id, text + 3, 32);
    trace_id[32] = '\0';
    memcpy(span_id, text + 36, 16);
    span_id[16] = '\0';
    return true;
}
