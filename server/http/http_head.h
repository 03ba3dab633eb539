/* http_head.h: tests whether the head of an HTTP message is unambiguous. libmicrohttpd 0.9.75 accepts heads that a
 * proxy in front of it may read differently. Such a head has, for example, two lengths, or a length and chunks, or a
 * space before a colon. Attackers use such differences for request smuggling. An ambiguous head is therefore refused
 * here with 400 and the connection is closed, before any other code looks at the request. This file uses no sockets:
 * its caller passes in one header after the other.
 *
 *   struct http_head f;
 *   http_head_begin(&f, "HTTP/1.1");
 *   http_head_header(&f, name, name_length, value, value_length);   // call it for each header
 *   if (!http_head_end(&f)) answer 400 with f.fault, close
 *   f.value[HEADER_EXPECT] ...                                    // NULL where not given */
#ifndef HTTP_HEAD_H
#define HTTP_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/base/limits.h"

/* The headers that attnd reads: id, name, and one of these rules:
 *  FRAMING   the header may occur once. libmicrohttpd 0.9.75 keeps white space after the value as a part of the value,
 *            so with 0.9.75 a value with such white space is refused; 1.0.1 removes the white space
 *  ONCE      the header may occur once
 *  FIRST     if the header occurs several times, the first value counts
 *  LIST      if the header occurs several times, its values are joined in their order, with commas (RFC 9110, 5.3)
 * Under the last three rules, white space after the value is not a part of it (RFC 9110, 5.5). */
#define HEADER_MAP(X)                                            \
    X(CONTENT_LENGTH, "Content-Length", FRAMING)                 \
    X(TRANSFER_ENCODING, "Transfer-Encoding", FRAMING)           \
    X(HOST, "Host", ONCE)                                        \
    X(AUTHORIZATION, "Authorization", ONCE)                      \
    X(CONTENT_TYPE, "Content-Type", ONCE)                        \
    X(CONTENT_ENCODING, "Content-Encoding", ONCE)                \
    X(EXPECT, "Expect", ONCE)                                    \
    X(INFERENCE_HEADER, "Inference-Header-Content-Length", ONCE) \
    X(REQUEST_ID, "X-Request-Id", FIRST)                         \
    X(TIMEOUT, "X-Request-Timeout-Ms", ONCE)                     \
    X(TRACEPARENT, "traceparent", FIRST)                         \
    X(ORIGIN, "Origin", ONCE)                                    \
    X(ACCEPT, "Accept", LIST)

enum header_id {
#define X(id, name, rule) HEADER_##id,
    HEADER_MAP(X)
#undef X
        HEADER_COUNT
};

/* Largest size in bytes of the joined value of a header that comes in several lines. A value in one line may be as
 * long as the head. */
enum { HTTP_HEAD_LIST_BYTES = 2048 };

struct http_head {
    /* The value of each header, ending with NUL, in the caller's memory or in `room`; NULL: not given. */
    const char *value[HEADER_COUNT];
    bool http10;
    bool chunked;
    bool has_length;
    uint64_t length;
    char fault[128]; /* what is wrong with the head; empty: nothing so far */
    size_t used;
    char list[HTTP_HEAD_LIST_BYTES];  /* joined values of LIST headers that came in several lines */
    char room[HTTP_CONNECTION_BYTES]; /* copies of values that had white space after them */
};

void http_head_begin(struct http_head *head, const char *version);
/* Adds one header. `value` may be NULL (the header has no value). `name` and `value` must end with NUL, although their
 * lengths are given too. */
void http_head_header(struct http_head *head, const char *name, size_t name_length, const char *value,
                      size_t value_length);
bool http_head_end(struct http_head *head);
/* Records a fault that the caller found, unless an earlier fault is recorded already. */
void http_head_fault(struct http_head *head, const char *fault);
/* True if this request method consists only of characters that a method may have (RFC 9110, 9.1). */
bool http_head_is_method(const char *method);
/* True if the request target (the text between the method and the version) has no spaces and no control characters. */
bool http_head_is_target(const char *target);

/* Resolves the percent-escapes of a target in place and returns its new length. The escapes of '/' and NUL stay as they
 * are: a resolved '/' would separate two segments of the path, and a NUL would end the text. */
size_t http_head_unescape(char *text);
/* Returns the path of a target. The path of "http://host/path" (RFC 9112, 3.2.2) begins after the host. For any other
 * target, the whole target is the path. */
const char *http_head_path(const char *target);
size_t http_head_arguments(const char *target);

static inline bool http_head_has_body(const struct http_head *f)
{
    return f->chunked || (f->has_length && f->length > 0);
}

/* True if this Origin (RFC 6454) names the same server as the header Host. Host and port must be equal, but the default
 * port of the origin's scheme may be left out. The Origin "null" is equal to no Host. */
bool http_head_same_origin(const char *origin, const char *host);

/* True if the text is an id of the form [A-Za-z0-9._-]{1,128}. */
bool http_head_is_request_id(const char *text);
/* Copies the trace id and the span id of a header traceparent, 00-<32 hex>-<16 hex>-<2 hex>, each with a NUL. Returns
 * false if the header is malformed or an id is all zeros. */
bool http_head_traceparent(const char *text, char trace_id[33], char span_id[17]);

#endif
