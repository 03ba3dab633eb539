/* routes.h: the table of routes (URLs). A new endpoint is a row in routes.c, its handler and its test. */
#ifndef ROUTES_H
#define ROUTES_H

#include "server/routes/route.h"

/* Looks in the table of routes for the row of this path and method on `port` (PORT_MAIN, PORT_METRICS). */
struct route_match routes_find(unsigned port, const char *path, const char *method);

/* The hint for a client that seems to look for the attention routes. */
#define ROUTES_WHERE_TO "q, k and v go to POST /v1/attention/forward"

enum { ROUTES_HINT_BYTES = 128 };
/* Writes a hint for a path that does not exist: ", did you mean /v1/info?", or "" if there is no hint. Returns
 * `text`. */
const char *routes_hint(unsigned port, const char *path, char text[ROUTES_HINT_BYTES]);

/* Returns the whole table of routes, for the OpenAPI document and for tests. */
const struct route *routes_all(int *count);

#endif
