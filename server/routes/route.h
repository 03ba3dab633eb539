/* route.h: what a row of the table of URLs says, and how a path and a method find theirs.
 *
 * The rows and the functions that answer them are in routes/routes.c. What serves a request (mhd.c, answer.c) and what
 * describes it (openapi.c) read the same rows, so a new endpoint is a row, its handler and its test.
 *
 * A pattern is a path, "/v1/info", or one with parameters, "/v1/caches/{id}/append". A parameter is a whole segment of
 * the path, of 1 to ROUTE_PARAMETER_BYTES bytes. A path is compared as it stands, percent-escapes resolved (but for
 * %2F and %00, see http_head_unescape(): so a slash always separates) and the query cut off: a slash at its end is one
 * more segment, an empty one, which no pattern has. Where several patterns fit, the one that has a literal where they
 * first differ is meant. A path is found for any method; a 405 lists the methods that it has. */
#ifndef ROUTE_H
#define ROUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/work/request.h"

/* id, what Allow says of it, its name in the OpenAPI document. GET rows answer HEAD too; with --cors-origin every row
 * answers OPTIONS (mhd.c). */
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

/* Which ports offer it: the main ones, --metrics-listen. */
enum { PORT_MAIN = 1, PORT_METRICS = 2 };

enum { ROUTE_PARAMETER_BYTES = 128, ROUTE_ALLOW_BYTES = 32 };

/* A content type of a body, and of an answer. */
struct route_body {
    const char *media; /* "application/json"; NULL ends a list. A body without a content type is of the first */
    const char *const
        *also; /* types that are taken for it, but are not documented, to a NULL: "*" is any; NULL: none */
    const proto_format *format;
    const char *schema; /* of both, JSON with ' for "; NULL: those that the route's row names */
};

/* A parameter of the pattern, for the OpenAPI document. */
struct route_parameter {
    const char *name, *description, *example;
};

/* What the OpenAPI document says of a route besides what follows from the rest of its row, or is said of every route:
 * that HEAD goes where GET does, the errors that any request may meet, and those of a body or of a token. The row of an
 * operation (proto_operations[]) has the summary, the description and the answer of its route: here they are NULL. */
struct route_doc {
    const char *tag, *summary, *description;
    const char *answer, *media,
        *schema;      /* of the 200 answer: what it is, its type, its schema (JSON with ' for "); NULL: it is empty */
    int status;       /* of it; 0: 200 */
    const char *body; /* schema of the body, of components/schemas: "ForwardRequest" */
    struct route_parameter parameters[REQUEST_PARAMETERS]; /* as the pattern has them */
    uint64_t errors;                                       /* ROUTE_ERROR(NOT_FOUND) | ...: its own */
    bool plain_503;                                        /* its 503 may be a line of text, no problem document */
};

#define ROUTE_ERROR(id) (UINT64_C(1) << PROTO_E_##id)

/* The option that must be set for a route to be offered. */
enum route_shm { ROUTE_ALWAYS, ROUTE_ALLOW_SHM, ROUTE_ALLOW_CUDA_SHM };

struct route {
    enum route_method method;
    const char *path;     /* the pattern */
    const char *endpoint; /* label in /metrics and the log: aliases share one */
    unsigned ports;
    unsigned token; /* the ports on which it wants one, where tokens are configured */
    bool quiet;     /* logged at debug: probes come every second */
    bool model;     /* the first parameter of its path is a model's name, the second its version (routes/kserve.h) */
    bool hidden;    /* the OpenAPI document leaves it out: another spelling, or what is not offered */
    enum route_shm shm; /* it is offered with that; without, the OpenAPI document leaves it out too */

    /* Of a route whose body is tensors, up to --max-body-bytes: what decodes it, and what it asks for. A model says the
     * latter itself. */
    const struct route_body *bodies; /* NULL: a body is read and dropped, */
    bool optional_body;              /* of those, it may be left out */
    bool keeps_body;                 /* or kept for the handler (request->text), up to HTTP_KEPT_BODY_BYTES */
    bool only_reads; /* the handler changes nothing, whatever its method: 503 where the answer finds no memory */
    proto_op op;
    /* Of the others, and of operations that no device runs (proto_is_run()): fills the answer, or fails the request
     * (request_fail). request->parameters holds those of the path; an operation's decoded body is request->job->call,
     * where each item has its own error. May be called from any HTTP thread. */
    void (*answer)(struct request *request, struct answer *answer);

    struct route_doc doc;
};

/* The row of the operation that the route is for. NULL: it is for none, or for a model of any. */
static inline const proto_operation *route_operation(const struct route *route)
{
    return route->bodies && !route->model ? &proto_operations[route->op] : NULL;
}

/* The result of a search for a path and a method. */
struct route_match {
    const struct route *route; /* NULL: there is no such path. Else the row, or without one for the method the first */
    bool answers;              /* true: the row has this method */
    unsigned methods;          /* of all rows of that path: bits of enum route_method */
    struct slice parameters[REQUEST_PARAMETERS]; /* of the path: borrowed from it */
};

/* Looks for a path among `count` rows, on a port (PORT_MAIN, PORT_METRICS). */
struct route_match route_find(const struct route *rows, int count, unsigned port, const char *path, const char *method);

/* The pattern, of those without parameters, that a path that fits none may have meant: but for capitals or a slash at
 * the end, with the same last segment, or with few mistakes of typing. NULL: none. */
const char *route_nearest(const struct route *rows, int count, unsigned port, const char *path);

/* The content type of a refusal at this path, with its query or without: KServe's clients get JSON, others a problem
 * document. A constant. */
const char *route_error_media(const char *path);

/* What the Allow header says of these methods: "GET, HEAD, DELETE". Returns `text`. */
const char *route_allow(unsigned methods, char text[ROUTE_ALLOW_BYTES]);
/* "get" */
const char *route_method_name(enum route_method method);

/* The row of `bodies` that decodes a body of this content type (NULL or empty: the client named none); NULL: none. */
const struct route_body *route_body(const struct route *route, const char *content_type);
/* The row of `bodies` that writes the answer to a body of the row `body`: the one that Accept (NULL: not given)
 * prefers, and `body` where Accept prefers none to it. Where Accept takes none of them, the first: the client gets an
 * answer that it did not ask for instead of an error. */
const struct route_body *route_answer(const struct route *route, const struct route_body *body, const char *accept);
/* The content types of the route's bodies: "application/json or application/x-safetensors". Returns `text`. */
const char *route_media(const struct route *route, char *text, size_t capacity);

/* A schema of the OpenAPI document, as `schema` of a row names it. */
#define ROUTE_SCHEMA(name) "{'$ref':'#/components/schemas/" name "'}"

#endif
