/* exchange.h: one exchange of HTTP: how a request arrived and how its answer is sent. Its struct request says what must
 * be computed. An exchange belongs to its HTTP thread; the loop and the devices see only the request. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <microhttpd.h>

#include "server/base/peer.h"
#include "server/base/unpack.h"
#include "server/work/request.h"

struct connection;
struct http_server;
struct route_body;

/* The step that the HTTP thread has reached. libmicrohttpd calls one function for every event with similar arguments:
 * the call after a resume looks the same as the call at the end of the body. */
enum exchange_step {
    STEP_HEAD,   /* the headers have arrived and are not checked yet */
    STEP_DECODE, /* the body goes to the parser */
    /* the body is read and dropped: the request was refused, or the route takes no body */
    STEP_DISCARD,
    STEP_WAIT,   /* the connection is suspended; the next call means that an answer is ready */
    STEP_ANSWER, /* the answer has been queued */
};

struct exchange {
    struct request request; /* first member, so that exchange_of() can convert */
    struct http_server *http;
    struct MHD_Connection *mhd;
    struct connection *connection;
    unsigned methods;               /* methods that the path allows: bits of enum route_method */
    char trace_id[33], span_id[17]; /* the ids in the header traceparent; empty: none */
    char peer[PEER_BYTES];          /* the client's address, as trusted proxies report it */
    const char *method, *path;      /* libmicrohttpd's memory, valid until the request is completed */
    enum exchange_step step;
    const struct route_body *body; /* how the body is read; NULL: it is dropped */
    int64_t json_bytes;            /* Inference-Header-Content-Length; -1: not given */
    enum unpack_coding coding;     /* Content-Encoding of the body */
    struct unpacker *unpacker;     /* NULL: the body is not compressed, or is dropped */
    uint64_t received_bytes;       /* bytes of the body as they were sent */
    size_t expected_bytes;         /* staging memory for the announced length; 0: no length was announced */
    bool bad_line;                 /* the request line is malformed */
    bool has_query;                /* the target contains '?' */
    bool cors;                     /* the page that sent the request may read the answer */
    bool preflight;                /* the request is an OPTIONS request of CORS, from a page of an allowed origin */
    bool done;                     /* the route's handler has finished its work */
    int http_status;               /* status of the answer; 0: none yet */
    uint64_t sent_bytes;           /* bytes of the answer's body */
};

/* Makes an exchange; NULL: out of memory. End it with exchange_drop_body() and then request_free(). */
struct exchange *exchange_new(struct http_server *http, struct MHD_Connection *mhd);

static inline struct exchange *exchange_of(const struct request *request)
{
    return (struct exchange *)request;
}

/* Frees the unpacker and calls request_drop_body(). */
void exchange_drop_body(struct request *request);

#endif
