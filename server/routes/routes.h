/* routes.h: the table of URLs. A new endpoint is a row in routes.c, its handler and its test. */
#ifndef ROUTES_H
#define ROUTES_H

#include "server/routes/route.h"

/* Looks for a path in the table, on a port (PORT_MAIN, PORT_METRICS). */
struct route_match routes_find(unsigned port, const char *path, const char *method);

/* The hint for a client that seems to look for the attention routes. */
#define ROUTES_WHERE_TO "q, k and v go to POST /v1/attention/forward"

/* What else there is to say to one who asked for a path that is not there: ", did you mean /v1/info?"; "": nothing.
 * Returns `text`. */
enum { ROUTES_HINT_BYTES = 128 };
const char *routes_hint(unsigned port, const char *path, char text[ROUTES_HINT_BYTES]);

/* What decodes a body of this content type (NULL or empty: none was named), of a route that has `bodies`;
 * NULL: nothing. */
const struct route_body *routes_body(const struct route *route, const char *content_type);
/* The content types of its bodies: "application/json". Returns `text`. */
/* How the answer to such a body is written: as Accept (NULL: not given) likes best of what the route has, and in doubt
 * as the body is. In the first format where Accept has none of them, for an answer is better than no answer. */
const struct route_body *routes_answer(const struct route *route, const struct route_body *body, const char *accept);
const char *routes_media(const struct route *route, char *text, size_t capacity);

/* The whole table: for the OpenAPI document, and for tests. */
const struct route *routes_all(int *count);

#endif
