/* exchange.h: one exchange of HTTP: how a request came and how its answer goes. What it asks for is its struct request.
 * An exchange belongs to its HTTP thread; the loop and the devices see the request alone. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <microhttpd.h>

#include "server/base/peer.h"
#include "server/base/unpack.h"
#include "server/work/request.h"

struct connection;
struct http_server;
struct route_body;

/* Where the HTTP thread stands. libmicrohttpd calls one function for everything and its arguments look alike: the
 * call after a resume is the same as the one at the end of the body. */
enum exchange_step {
    STEP_HEAD,    /* the headers have arrived, nothing has been looked at */
    STEP_DECODE,  /* the body goes to the parser */
    STEP_DISCARD, /* the body is read and dropped: refused, or a route that wants none */
    STEP_WAIT,    /* suspended: the next call means that there is an answer */
    STEP_ANSWER,  /* the answer has been queued */
};

struct exchange {
    struct request request; /* first */
    struct http_server *http;
    struct MHD_Connection *mhd;
    struct connection *connection;
    unsigned methods;               /* methods that the path allows: bits of enum route_method */
    char trace_id[33], span_id[17]; /* of traceparent; empty: none */
    char peer[PEER_BYTES];          /* the client's address, as trusted proxies say it */
    const char *method, *path;      /* libmicrohttpd's, until the request is completed */
    enum exchange_step step;
    const struct route_body *body; /* how its body is read; NULL: it is dropped */
    int64_t json_bytes;            /* Inference-Header-Content-Length; -1: not given */
    enum unpack_coding coding;     /* of its body */
    struct unpacker *unpacker;     /* NULL: its body is not compressed, or dropped */
    uint64_t received_bytes;       /* of the body, as it was sent */
    size_t expected_bytes;         /* staging memory for the announced length; 0: no length was announced */
    bool bad_line;                 /* the request line is not one */
    bool has_query;                /* '?' stands in its target */
    bool cors;                     /* the page that asks may read the answer */
    bool preflight;                /* an OPTIONS request of CORS, from a page of an allowed origin */
    bool done;                     /* the route's handler has finished its work */
    int http_status;               /* of the answer; 0: none yet */
    uint64_t sent_bytes;           /* of its body */
};

/* NULL when out of memory. request_free() ends it, after exchange_drop_body(). */
struct exchange *exchange_new(struct http_server *http, struct MHD_Connection *mhd);

static inline struct exchange *exchange_of(const struct request *request)
{
    return (struct exchange *)request;
}

/* Ends the receiving side: the unpacker, and what request_drop_body() ends. */
void exchange_drop_body(struct request *request);

#endif
