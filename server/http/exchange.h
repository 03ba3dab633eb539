/* exchange.h: an exchange is one request and its answer over HTTP. The struct has what HTTP needs: how the request
 * arrived and how its answer is sent. An exchange belongs to its HTTP thread; the main thread and the devices see only
 * the request. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <microhttpd.h>

#include "server/base/peer.h"
#include "server/base/unpack.h"
#include "server/work/request.h"

struct connection;
struct http_server;
struct route_body;

/* The step of a request that its HTTP thread has reached. libmicrohttpd calls the same function for every event of a
 * request. The call after a suspension even has the same arguments as the call at the end of the body. Only the step
 * distinguishes these calls. */
enum exchange_step {
    STEP_HEAD,
    STEP_DECODE,
    /* the bytes of the body are dropped: the request was refused or the route has no body */
    STEP_DISCARD,
    STEP_WAIT, /* the connection is suspended; at libmicrohttpd's next call the answer is ready */
    STEP_ANSWER,
};

struct exchange {
    struct request request; /* must be the first member, because exchange_of() casts a request to its exchange */
    struct http_server *http;
    struct MHD_Connection *mhd;
    struct connection *connection;
    unsigned methods; /* methods that the table of routes has for the path: bits of enum route_method */
    /* ids in the header traceparent; empty: none */
    char trace_id[33], span_id[17];
    char peer[PEER_BYTES]; /* the client's address; behind trusted proxies, the address that they report */
    /* strings in libmicrohttpd's memory, valid until the request is completed */
    const char *method, *path;
    enum exchange_step step;
    const struct route_body *body; /* row of route->bodies that decodes the body; NULL: the body is dropped */
    /* header Inference-Header-Content-Length: how many bytes of the body are JSON; -1: not given */
    int64_t json_bytes;
    enum unpack_coding coding;
    struct unpacker *unpacker; /* unpacks a compressed body; NULL: the body is not compressed, or is dropped */
    uint64_t received_bytes;   /* bytes of the body that have arrived, before unpacking */
    /* bytes of staging memory (memory for tensors) that the body probably needs; 0: unknown, because the body's length
     * was not announced */
    size_t expected_bytes;
    bool bad_line; /* whether the request line is malformed; the request is then refused */
    bool has_query;
    bool cors; /* whether a browser may show the answer to the page that sent the request (CORS) */
    /* whether the request is a CORS preflight, an OPTIONS request from a page of an allowed origin */
    bool preflight;
    /* Whether the handler has changed the server's state, such as a cache. If it has, no error answer is sent, because
     * it would wrongly say that nothing has changed. */
    bool done;
    int http_status; /* status of the answer; 0: there is no answer yet */
    uint64_t sent_bytes;
};

/* Makes an exchange. Returns NULL when out of memory. Free it with exchange_drop_body() and then request_free(). */
struct exchange *exchange_new(struct http_server *http, struct MHD_Connection *mhd);

static inline struct exchange *exchange_of(const struct request *request)
{
    return (struct exchange *)request;
}

void exchange_drop_body(struct request *request);

#endif
