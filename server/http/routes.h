/* routes.h: the table of URLs. A new route is a new row in routes.c. */
#ifndef ROUTES_H
#define ROUTES_H

#include <stdbool.h>

#include "kernels/attention.h"
#include "server/api/info.h"
#include "server/work/request.h"

/* Methods of a row. GET rows answer HEAD too; with --cors-origin every row answers OPTIONS (daemon.c). */
enum route_method { ROUTE_GET, ROUTE_POST };

/* Which ports offer it: the main ones, --metrics-listen. */
enum { PORT_MAIN = 1, PORT_METRICS = 2 };

struct route {
    const char *path;
    enum route_method method;
    const char *endpoint;      /* label in /metrics and the log: aliases share one */
    enum info_route_kind kind; /* for the OpenAPI document */
    unsigned ports;
    bool token; /* wants one where tokens are configured */
    bool quiet; /* logged at debug: probes come every second */
    bool body;  /* tensors: its body is decoded, up to --max-body-bytes; others read and drop theirs */
    attn_op op; /* of those with a body */
    /* Of those without: fills the answer. May be called from any HTTP thread. */
    void (*answer)(struct server *server, struct answer *answer);
};

/* The row of a path, as exactly that string, on a port (PORT_MAIN, PORT_METRICS); NULL: none. */
const struct route *routes_find(const char *path, unsigned port);
/* "GET, HEAD": what the Allow header of a row says. */
const char *route_allow(const struct route *route);
/* Does the row answer this method? */
bool route_allows(const struct route *route, const char *method);

/* The whole table, for tests. */
const struct route *routes_all(int *count);

#endif
