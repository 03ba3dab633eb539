/* route.h: the columns of the table of URLs, and how a path and a method find their row.
 *
 * routes/routes.c has the rows. mhd.c and answer.c serve requests by them, and openapi.c describes them, so a new
 * endpoint is a row, a handler and a test.
 *
 * A pattern is a path, "/v1/info", or has parameters, "/v1/caches/{id}/append". A parameter is a whole segment of the
 * path, of 1 to ROUTE_PARAMETER_BYTES bytes. Before a path is compared, its percent-escapes are resolved and its query
 * is cut off. The escapes %2F and %00 stay (http_head_unescape()), so every slash separates segments. A slash at the
 * end begins an empty segment, which no pattern has. If several patterns fit, the one wins that has a literal where
 * they first differ. A path is found with any method; a 405 lists the methods that it has. */
#ifndef ROUTE_H
#define ROUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/work/request.h"

/* Each method: its id, its part of the Allow header, its name in the OpenAPI document. GET rows answer HEAD too; with
 * --cors-origin every row answers OPTIONS (mhd.c). */
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

/* The ports that offer a route: the main ones, or that of --metrics-listen. */
enum { PORT_MAIN = 1, PORT_METRICS = 2 };

enum { ROUTE_PARAMETER_BYTES = 128, ROUTE_ALLOW_BYTES = 32 };

/* A content type of bodies and of answers. */
struct route_body {
    /* "application/json"; NULL ends the list. The first row also reads a body without a content type. */
    const char *media;
    const char *const
        /* Undocumented content types that are read as this one, up to a NULL; "*" stands for any. NULL: there are
         * none. */
        *also;
    const proto_format *format;
    /* The schema of body and answer, JSON with ' for "; NULL: the route's row names the schemas. */
    const char *schema;
};

/* A parameter of the pattern, for the OpenAPI document. */
struct route_parameter {
    const char *name, *description, *example;
};

/* The OpenAPI document's texts about one route alone. The document derives the rest from other columns, or says the
 * same about all routes: HEAD, the errors of any request, and those of a body or of a token. For an operation, the row
 * of proto_operations[] has the summary, the description and the answer, and they are NULL here. */
struct route_doc {
    const char *tag, *summary, *description;
    const char *answer, *media,
        /* Texts about the successful answer: its description, its content type, and its schema (JSON with ' for "). All
         * are NULL if that answer is empty. */
        *schema;
    int status;       /* status of a successful answer; 0: 200 */
    const char *body; /* name of the body's schema in components/schemas: "ForwardRequest" */
    struct route_parameter parameters[REQUEST_PARAMETERS]; /* the parameters of the path, in the order of the pattern */
    uint64_t errors; /* errors of this route alone: ROUTE_ERROR(NOT_FOUND) | ... */
    bool plain_503;  /* a 503 of this route may be a line of text instead of a problem document */
};

#define ROUTE_ERROR(id) (UINT64_C(1) << PROTO_E_##id)

/* The option that must be set for a route to be offered. */
enum route_shm { ROUTE_ALWAYS, ROUTE_ALLOW_SHM, ROUTE_ALLOW_CUDA_SHM };

struct route {
    enum route_method method;
    const char *path;     /* the pattern of the route's paths */
    const char *endpoint; /* label in /metrics and the log; aliases of a path share one label */
    unsigned ports;
    unsigned token; /* the ports on which the route requires a token, if tokens are configured */
    bool quiet;     /* logged at level debug, because probes come every second */
    /* The first parameter of the path is a model's name, the second its version (routes/kserve.h). */
    bool model;
    bool hidden; /* the route is not in the OpenAPI document, because it is another spelling, or not offered */
    /* The option that offers the route. Without the option, the OpenAPI document leaves the route out too. */
    enum route_shm shm;

    /* For a route with tensors, whose body may have up to --max-body-bytes: the formats of the body, and the operation.
     * If the path names a model, the model determines the operation. */
    const struct route_body *bodies; /* NULL: the route has no tensors, and its body is dropped */
    bool optional_body;              /* a route without tensors: the body may be left out */
    /* A route without tensors: the body is kept for the handler (request->text), up to HTTP_KEPT_BODY_BYTES. */
    bool keeps_body;
    /* The handler changes nothing, even with a method other than GET. If there is no memory for its answer, the client
     * gets 503. */
    bool only_reads;
    proto_op op;
    /* For routes without tensors, and operations that no device runs (proto_is_run()): fills the answer, or fails the
     * request (request_fail). request->parameters has the parameters of the path. An operation's decoded body is
     * request->job->call, where each item has its own error. Any HTTP thread may call it. */
    void (*answer)(struct request *request, struct answer *answer);

    struct route_doc doc;
};

/* Returns the row of the route's operation. NULL: the route has none, or its path names a model. */
static inline const proto_operation *route_operation(const struct route *route)
{
    return route->bodies && !route->model ? &proto_operations[route->op] : NULL;
}

/* The result of a search for a path and a method. */
struct route_match {
    /* The row with this path and method, or the first row with this path if none has the method. NULL: the path does
     * not exist. */
    const struct route *route;
    bool answers;                                /* true: `route` has the method */
    unsigned methods;                            /* the methods of all rows with this path: bits of enum route_method */
    struct slice parameters[REQUEST_PARAMETERS]; /* the parameters of the path, in the memory of the path */
};

/* Looks for a path among `count` rows, on a port (PORT_MAIN, PORT_METRICS). */
struct route_match route_find(const struct route *rows, int count, unsigned port, const char *path, const char *method);

/* Returns the pattern without parameters that resembles a path most, for a hint. The two differ in a few letters, in
 * case or in a slash at the end, or have the same last segment. NULL: none is similar. */
const char *route_nearest(const struct route *rows, int count, unsigned port, const char *path);

/* Returns the content type of a refusal at this path, with or without its query: JSON for KServe's clients, else that
 * of a problem document. The text is a constant. */
const char *route_error_media(const char *path);

/* Writes the value of the Allow header for these methods: "GET, HEAD, DELETE". Returns `text`. */
const char *route_allow(unsigned methods, char text[ROUTE_ALLOW_BYTES]);
/* Returns a method's name in the OpenAPI document, such as "get". */
const char *route_method_name(enum route_method method);

/* Returns the row of `bodies` that decodes a body of this content type; NULL: there is none. The content type may be
 * NULL or empty if the client named none. */
const struct route_body *route_body(const struct route *route, const char *content_type);
/* Returns the row of `bodies` that writes the answer to a body that the row `body` decoded. It is the row that Accept
 * (NULL: not given) prefers, or `body` if Accept prefers no other. If Accept allows no row, it is the first: the client
 * gets an answer in a format that it did not ask for, instead of an error. */
const struct route_body *route_answer(const struct route *route, const struct route_body *body, const char *accept);
/* Writes the content types of the route's bodies: "application/json or application/x-safetensors". Returns `text`. */
const char *route_media(const struct route *route, char *text, size_t capacity);

/* A reference to a schema of the OpenAPI document, for `schema` of a row. */
#define ROUTE_SCHEMA(name) "{'$ref':'#/components/schemas/" name "'}"

#endif
