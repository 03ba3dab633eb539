/* exchange.h: an exchange is one request and its answer over HTTP. The struct has what HTTP needs: how the request
 * arrived and how its answer is sent. Its member `request` says what must be computed. An exchange belongs to its HTTP
 * thread; the main thread and the devices see only the request. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <microhttpd.h>

#include "server/base/peer.h"
#include "server/base/unpack.h"
#include "server/work/request.h"

struct connection;
struct http_server;
struct route_body;

/* The step of a request that its HTTP thread has reached. The thread must remember the step, because libmicrohttpd
 * calls one function for every event. The call after a suspended connection is resumed has the same arguments as the
 * call at the end of the body. */
enum exchange_step {
    STEP_HEAD,   /* the headers have arrived, but are not checked yet */
    STEP_DECODE, /* the bytes of the body go to the parser */
    /* the bytes of the body are dropped, because the request was refused or the route has no body */
    STEP_DISCARD,
    STEP_WAIT,   /* the connection is suspended; libmicrohttpd's next call means that the answer is ready */
    STEP_ANSWER, /* the answer has been queued */
};

struct exchange {
    struct request request; /* must be the first member, because exchange_of() converts a pointer to it */
    struct http_server *http;
    struct MHD_Connection *mhd;
    struct connection *connection;
    unsigned methods; /* the methods that the table of routes has for the path: bits of enum route_method */
    /* the trace id and the span id in the header traceparent; empty: the request has no such header */
    char trace_id[33], span_id[17];
    char peer[PEER_BYTES]; /* the client's address, as trusted proxies report it */
    /* method and path of the request, in libmicrohttpd's memory, valid until the request is completed */
    const char *method, *path;
    enum exchange_step step;
    const struct route_body *body; /* the row of the route for the format of the body; NULL: the body is dropped */
    /* value of the header Inference-Header-Content-Length (how many bytes of the body are JSON); -1: not given */
    int64_t json_bytes;
    enum unpack_coding coding; /* the Content-Encoding (compression) of the body */
    struct unpacker *unpacker; /* unpacks a compressed body; NULL: the body is not compressed, or is dropped */
    uint64_t received_bytes;   /* number of bytes of the body that have arrived, before unpacking */
    /* bytes of staging memory (memory for tensors) that a body of the announced length needs; 0: no length was
     * announced */
    size_t expected_bytes;
    bool bad_line;  /* true: the request line is malformed, so the request is refused */
    bool has_query; /* true: the request's target contains '?' */
    bool cors;      /* true: a browser may show the answer to the page that sent the request (CORS) */
    /* true: the request is a CORS preflight, an OPTIONS request from a page of an allowed origin */
    bool preflight;
    bool done;           /* true: the route's handler has changed something, so a failure must not be answered by an
                          * error */
    int http_status;     /* status of the answer; 0: there is no answer yet */
    uint64_t sent_bytes; /* number of bytes in the answer's body */
};

/* Makes an exchange. Returns NULL when out of memory. Free it with exchange_drop_body() and then request_free(). */
struct exchange *exchange_new(struct http_server *http, struct MHD_Connection *mhd);

static inline struct exchange *exchange_of(const struct request *request)
{
    return (struct exchange *)request;
}

/* Frees the unpacker and calls request_drop_body(). */
void exchange_drop_body(struct request *request);

#endif
