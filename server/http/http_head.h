/* http_head.h: is the head of this HTTP message unambiguous? libmicrohttpd 0.9.75 accepts much that a proxy in frontend
 * may read differently (two lengths, a length and chunks, a space before the colon): request smuggling. What is
 * doubtful is refused here with 400 and the connection is closed, before anything else looks at the request. No
 * sockets: a head is fed header by header.
 *
 *   struct http_head f;
 *   http_head_begin(&f, "HTTP/1.1");
 *   http_head_header(&f, name, name_length, value, value_length);   // each of them
 *   if (!http_head_end(&f)) answer 400 with f.fault, close
 *   f.value[HEADER_EXPECT] ...                                    // NULL where not given
 * */
#ifndef HTTP_HEAD_H
#define HTTP_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/base/limits.h"

/* The headers that attnd reads. id, name, and a rule:
 *   FRAMING   a second one is refused. libmicrohttpd 0.9.75 takes white space behind the value for a part of it, so a
 *             value with such white space is refused there; 1.0.1 takes the white space away
 *   ONCE      a second one is refused
 *   FIRST     of several the first counts
 *   LIST      several are one, in their order, with commas (RFC 9110, 5.3)
 * In the last three, white space behind the value is no part of it (RFC 9110, 5.5). */
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

enum { HTTP_HEAD_LIST_BYTES = 2048 }; /* of a list in several lines; a list in one line may be as long as a head */

struct http_head {
    const char *value[HEADER_COUNT]; /* NUL-ended: borrowed, or in `room`; NULL where not given */
    bool http10;
    bool chunked;
    bool has_length;
    uint64_t length;                  /* Content-Length */
    char fault[128];                  /* what is wrong; empty: nothing so far */
    size_t used;                      /* of room */
    char list[HTTP_HEAD_LIST_BYTES];  /* the lines of the one LIST */
    char room[HTTP_CONNECTION_BYTES]; /* for values with white space behind them */
};

void http_head_begin(struct http_head *head, const char *version);
/* value may be NULL (none). Both strings are NUL-ended as well. */
void http_head_header(struct http_head *head, const char *name, size_t name_length, const char *value,
                      size_t value_length);
bool http_head_end(struct http_head *head);
/* Records a fault that the caller found. If there is a fault already, that one stays. */
void http_head_fault(struct http_head *head, const char *fault);
/* A token (RFC 9110, 9.1). */
bool http_head_is_method(const char *method);
/* No spaces and no control characters below them: what stands between method and version. */
bool http_head_is_target(const char *target);

/* Resolves the percent-escapes of a target in place and returns its new length. Those of '/' and NUL stay as they
 * are: resolved, the first would be taken for a separator and the second for the end,
 * and the target for another one. */
size_t http_head_unescape(char *text);
/* The path of a target: of "http://host/path" (RFC 9112, 3.2.2) what follows the host, else all of it. */
const char *http_head_path(const char *target);
/* Returns the number of arguments in the query of a target. */
size_t http_head_arguments(const char *target);

static inline bool http_head_has_body(const struct http_head *f)
{
    return f->chunked || (f->has_length && f->length > 0);
}

/* Is a page of this Origin (RFC 6454) one of the server that Host names? Host and port must be the same; a port that
 * the scheme of the origin has by default may be left out. "null" is nobody's. */
bool http_head_same_origin(const char *origin, const char *host);

/* [A-Za-z0-9._-]{1,128} */
bool http_head_is_request_id(const char *text);
/* 00-<32 hex>-<16 hex>-<2 hex>, no all-zero ids. Copies both ids, NUL-ended. */
bool http_head_traceparent(const char *text, char trace_id[33], char span_id[17]);

#endif
