/* routes.h: the table of URLs. A new endpoint is a row in routes.c, its handler and its test. */
#ifndef ROUTES_H
#define ROUTES_H

#include "server/api/route.h"

/* Looks for a path in the table, on a port (PORT_MAIN, PORT_METRICS). */
struct route_match routes_find(unsigned port, const char *path, const char *method);

/* What decodes a body of this content type (NULL or empty: none was named), of a route that has `bodies`; NULL: nothing. */
const struct route_body *routes_body(const struct route *route, const char *content_type);
/* The content types of its bodies: "application/json". Returns `text`. */
const char *routes_media(const struct route *route, char *text, size_t capacity);

/* The whole table: for the OpenAPI document, and for tests. */
const struct route *routes_all(int *count);

#endif
