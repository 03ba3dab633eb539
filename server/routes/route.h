/* route.h: the columns of the table of routes, and how a path and a method find their row. routes/routes.c has the
 * rows.
 *
 * A pattern is a path, "/v1/info", or has parameters, "/v1/caches/{id}/append". A parameter is a whole segment of the
 * path, of 1 to ROUTE_PARAMETER_BYTES bytes. Before a path is compared, its percent-escapes except %2F and %00 are
 * resolved, and its query is cut off. A slash at the end begins an empty segment, which no pattern has. If several
 * patterns fit a path, the server chooses the pattern that has a fixed text where they first differ. A path is found
 * even if no row has the request's method, so that a 405 answer can list the methods of the path. */
#ifndef ROUTE_H
#define ROUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/work/request.h"

/* The HTTP methods of routes. Columns: id, text in the Allow header, name in the OpenAPI document. A route with GET
 * also answers HEAD. With --cors-origin every route also answers OPTIONS (mhd.c). */
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

/* Bits for the ports on which a route is offered: the main ports, and the port of --metrics-listen. */
enum { PORT_MAIN = 1, PORT_METRICS = 2 };

enum { ROUTE_PARAMETER_BYTES = 128, ROUTE_ALLOW_BYTES = 32 };

struct route_body {
    /* Content type, such as "application/json". NULL ends the list. A body without a content type is read by the first
     * row. */
    const char *media;
    const char *const
        /* Content types that are read like `media` but are not documented. "*" stands for any type. NULL ends the list.
         * The pointer to the list may itself be NULL: there are none. */
        *also;
    const proto_format *format;
    /* JSON schema of the body and of the answer, with ' in place of "; NULL: the route's row names the schemas */
    const char *schema;
};

struct route_parameter {
    const char *name, *description, *example;
};

/* The texts that the OpenAPI document has about one route. If the route belongs to an operation, summary, description
 * and answer are NULL, because the row of proto_operations[] has them. */
struct route_doc {
    const char *tag, *summary, *description;
    const char *answer, *media,
        /* Description, content type and schema of a successful answer. The schema is JSON with ' in place of ". All
         * three are NULL if the answer is empty. */
        *schema;
    int status;       /* status of a successful answer; 0: 200 */
    const char *body; /* name of the body's schema in components/schemas, such as "ForwardRequest" */
    struct route_parameter parameters[REQUEST_PARAMETERS];
    uint64_t errors; /* errors of this route beside those of all routes, as bits: ROUTE_ERROR(NOT_FOUND) | ... */
    bool plain_503;  /* Whether an answer 503 may be a line of plain text instead of a JSON problem document. */
};

#define ROUTE_ERROR(id) (UINT64_C(1) << PROTO_E_##id)

/* The command-line option that the server needs to offer the route. ROUTE_ALWAYS: none. */
enum route_shm { ROUTE_ALWAYS, ROUTE_ALLOW_SHM, ROUTE_ALLOW_CUDA_SHM };

struct route {
    enum route_method method;
    const char *path;
    const char *endpoint; /* label in /metrics and the log */
    unsigned ports;
    /* ports (PORT_MAIN, PORT_METRICS) on which the route requires a token, if the server has tokens */
    unsigned token;
    bool quiet; /* Whether requests are logged only at level debug. Set for health probes, which arrive every second. */
    /* Whether the first parameter of the path is the name of a model and the second its version (routes/kserve.h). */
    bool model;
    /* Whether the OpenAPI document leaves the route out: a second path of another route, or a route that only refuses
     * what the server does not support. */
    bool hidden;
    /* command-line option without which the route is missing on the server and in the OpenAPI document */
    enum route_shm shm;

    /* The formats of the body, for a route whose bodies contain tensors. Such a route also has an operation, unless the
     * path names a model. The body may have up to --max-body-bytes. */
    const struct route_body *bodies; /* formats of the body; NULL: the body has no tensors and is dropped */
    bool optional_body;              /* whether the body may be left out; only for a route without tensors */
    /* Whether the body, of up to HTTP_KEPT_BODY_BYTES, is kept as text for the handler (request->text). Only for a
     * route without tensors. */
    bool keeps_body;
    /* Whether the handler changes nothing. If there is no memory for the answer, the client of such a route gets 503.
     * On other routes the connection is closed without an answer. */
    bool only_reads;
    proto_op op;
    /* The handler, for routes without tensors and for operations that no device runs (proto_is_run()). It fills in the
     * answer, or fails the request (request_fail()). request->parameters has the parameters of the path. For an
     * operation, request->job->call is the decoded body, in which each item (problem) has its own error. Any HTTP
     * thread may call the handler. */
    void (*answer)(struct request *request, struct answer *answer);

    struct route_doc doc;
};

/* Returns the row of proto_operations[] for the route. Returns NULL if the route has no operation, or if its path names
 * a model. */
static inline const proto_operation *route_operation(const struct route *route)
{
    return route->bodies && !route->model ? &proto_operations[route->op] : NULL;
}

struct route_match {
    /* The route with this path and method. If there is none, the first route with this path. NULL: no route has this
     * path. */
    const struct route *route;
    bool answers;     /* whether `route` has the request's method, and not only its path */
    unsigned methods; /* the methods that routes with this path have, as bits of enum route_method */
    /* values of the path's parameters; they point into the path */
    struct slice parameters[REQUEST_PARAMETERS];
};

/* Looks among `count` rows (routes) for the one that serves this path and method on `port` (PORT_MAIN,
 * PORT_METRICS). */
struct route_match route_find(const struct route *rows, int count, unsigned port, const char *path, const char *method);

/* Returns, as a hint, the pattern without parameters that is most similar to a path. A pattern is similar to a path if
 * the only differences are a few letters, upper and lower case, or a slash at the end. It is also similar if both have
 * the same last segment. Returns NULL if no pattern is similar. */
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
/* Returns the row of route->bodies whose format the answer gets. This is `body`, the format of the request, unless the
 * header Accept prefers another one. Accept may be NULL. If it allows no row, the first row is returned. */
const struct route_body *route_answer(const struct route *route, const struct route_body *body, const char *accept);
/* Writes the content types of the route's bodies, such as "application/json or application/x-safetensors". Returns
 * `text`. */
const char *route_media(const struct route *route, char *text, size_t capacity);

/* A reference to a schema of the OpenAPI document, as a value of the member `schema` of a route. */
#define ROUTE_SCHEMA(name) "{'$ref':'#/components/schemas/" name "'}"

#endif
