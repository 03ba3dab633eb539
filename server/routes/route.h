/* route.h: the columns of the table of routes, and how a path and a method find their row.
 *
 * routes/routes.c has the rows. mhd.c and answer.c use the rows to serve requests, and openapi.c describes them, so a
 * new endpoint is a row, a handler and a test.
 *
 * A pattern is a path, "/v1/info", or has parameters, "/v1/caches/{id}/append". A parameter is a whole segment of the
 * path, of 1 to ROUTE_PARAMETER_BYTES bytes. Before a path is compared, its percent-escapes are resolved and its query
 * is cut off. The escapes %2F and %00 are not resolved (http_head_unescape()), so every slash separates segments. A
 * slash at the end begins an empty segment, which no pattern has. If several patterns fit a path, the server chooses
 * the pattern that has a fixed text where the patterns first differ. A path is found even if no row has the request's
 * method, so that a 405 answer can list the methods of the path. */
#ifndef ROUTE_H
#define ROUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/work/request.h"

/* One entry for each method: its id, its part of the Allow header, its name in the OpenAPI document. Rows with GET
 * answer HEAD too. With --cors-origin every row answers OPTIONS (mhd.c). */
#define ROUTE_METHOD_MAP(X)    \
    X(GET, "GET, HEAD", "get") \
    X(POST, "POST", "post")    \
    X(DELETE, "DELETE", "delete")

enum route_method {
#define X(id, allow, name) ROUTE_##id,
    ROUTE_METHOD_MAP(X)
#undef X
        ROUTE_METHOD_COUNT
};

/* The ports that offer a route: the main ports, or the port of --metrics-listen. */
enum { PORT_MAIN = 1, PORT_METRICS = 2 };

enum { ROUTE_PARAMETER_BYTES = 128, ROUTE_ALLOW_BYTES = 32 };

/* A content type of bodies and of answers. */
struct route_body {
    /* content type such as "application/json"; NULL ends the list. The first row also reads a body without a content
     * type. */
    const char *media;
    const char *const
        /* A list of further content types that are read like `media` but are not documented. "*" stands for any
         * type, and NULL ends the list. NULL: there is no list. */
        *also;
    const proto_format *format;
    /* The JSON schema of the body and of the answer, with ' in place of ". NULL: the route's row names the schemas. */
    const char *schema;
};

/* A parameter of a route's pattern, as the OpenAPI document describes it. */
struct route_parameter {
    const char *name, *description, *example;
};

/* The texts that the OpenAPI document has about one route. Texts that are the same for all routes, or that openapi.c
 * derives from other columns, are not here. If the route belongs to an operation, summary, description and answer are
 * NULL, because the row of proto_operations[] has them. */
struct route_doc {
    const char *tag, *summary, *description;
    const char *answer, *media,
        /* Texts about the successful answer: its description, its content type, and its schema (JSON with ' in place of
         * "). All are NULL if the answer is empty. */
        *schema;
    int status;       /* status of a successful answer; 0: 200 */
    const char *body; /* name of the body's schema in components/schemas, such as "ForwardRequest" */
    /* the parameters of the path, in the order in which the pattern has them */
    struct route_parameter parameters[REQUEST_PARAMETERS];
    uint64_t errors; /* errors of this route that not all routes have: ROUTE_ERROR(NOT_FOUND) | ... */
    bool plain_503;  /* true: an answer 503 of this route may be a line of text instead of a problem document */
};

#define ROUTE_ERROR(id) (UINT64_C(1) << PROTO_E_##id)

/* The option that the operator must set, so that the server offers the route. */
enum route_shm { ROUTE_ALWAYS, ROUTE_ALLOW_SHM, ROUTE_ALLOW_CUDA_SHM };

struct route {
    enum route_method method;
    const char *path;     /* the pattern of the route's paths */
    const char *endpoint; /* label in /metrics and the log; aliases of a path share one label */
    unsigned ports;
    /* the ports (PORT_MAIN, PORT_METRICS) on which a request of this route must have a token, if the server has
     * tokens */
    unsigned token;
    bool quiet; /* true: requests of this route are logged only at level debug, because probes send them every second */
    /* true: the first parameter of the path is the name of a model, and the second its version (routes/kserve.h) */
    bool model;
    /* true: the route is not in the OpenAPI document, because it is another spelling of a route, or only tells clients
     * that the server does not support something */
    bool hidden;
    /* The command-line option with which the server offers the route. Without this option, the route is missing on the
     * server and in the OpenAPI document. */
    enum route_shm shm;

    /* These members are for a route whose bodies contain tensors: the formats of the body, and the operation. The body
     * may have up to --max-body-bytes. If the path names a model, the model determines the operation. */
    const struct route_body *bodies; /* formats of the body; NULL: the route has no tensors, and its body is dropped */
    bool optional_body;              /* only for a route without tensors; true: the body may be left out */
    /* Only for a route without tensors. If true, the body is kept for the handler (request->text), up to
     * HTTP_KEPT_BODY_BYTES. */
    bool keeps_body;
    /* true: the handler changes nothing, even if its method is not GET. If there is no memory for the answer of this
     * route, the client gets 503 and may repeat the request. On other routes the connection is then closed without an
     * answer. */
    bool only_reads;
    proto_op op;
    /* The handler, for routes without tensors and for operations that no device runs (proto_is_run()). It fills in the
     * answer, or fails the request (request_fail()). request->parameters has the parameters of the path. The decoded
     * body of an operation is request->job->call, where each item (problem) has its own error. Any HTTP thread may call
     * the handler. */
    void (*answer)(struct request *request, struct answer *answer);

    struct route_doc doc;
};

/* Returns the row of proto_operations[] for the route. Returns NULL if the route has no operation, or if its path names
 * a model. */
static inline const proto_operation *route_operation(const struct route *route)
{
    return route->bodies && !route->model ? &proto_operations[route->op] : NULL;
}

/* The result of a search for a path and a method. */
struct route_match {
    /* The row with this path and method. If no row has the method, this is the first row with the path. NULL: the path
     * does not exist. */
    const struct route *route;
    bool answers;     /* true: the row `route` has the request's method, and not only its path */
    unsigned methods; /* the methods of all rows with this path: bits of enum route_method */
    /* the parameters of the path, which point into the memory of the path */
    struct slice parameters[REQUEST_PARAMETERS];
};

/* Looks among `count` rows (routes) for the one that serves this path and method on `port` (PORT_MAIN,
 * PORT_METRICS). */
struct route_match route_find(const struct route *rows, int count, unsigned port, const char *path, const char *method);

/* Returns, as a hint, the pattern without parameters that is most similar to a path. A pattern is similar to a path
 * if they differ in a few letters, in upper and lower case or in a slash at the end, or have the last segment in
 * common. Returns NULL if no pattern is similar. */
const char *route_nearest(const struct route *rows, int count, unsigned port, const char *path);

/* Returns the content type of error answers at this path: application/json for KServe's clients, otherwise
 * application/problem+json. The path may have a query. The returned text is a constant. */
const char *route_error_media(const char *path);

/* Writes the value of the Allow header for these methods, such as "GET, HEAD, DELETE". Returns `text`. */
const char *route_allow(unsigned methods, char text[ROUTE_ALLOW_BYTES]);
/* Returns a method's name in the OpenAPI document, such as "get". */
const char *route_method_name(enum route_method method);

/* Returns the row of route->bodies that decodes a body of this content type, or NULL if there is none. The content type
 * may be NULL or empty, if the client named none. */
const struct route_body *route_body(const struct route *route, const char *content_type);
/* Returns the row of route->bodies (formats) for the answer. `body` is the row that decoded the request's body. It is
 * returned unless the header Accept (NULL: not given) prefers another row. If Accept allows none of the rows, the first
 * row is returned: the client gets a format that it did not ask for, and no error. */
const struct route_body *route_answer(const struct route *route, const struct route_body *body, const char *accept);
/* Writes the content types of the route's bodies, such as "application/json or application/x-safetensors". Returns
 * `text`. */
const char *route_media(const struct route *route, char *text, size_t capacity);

/* A reference to a schema of the OpenAPI document, as a value of the member `schema` of a route. */
#define ROUTE_SCHEMA(name) "{'$ref':'#/components/schemas/" name "'}"

#endif
