/* openapi.h: GET /openapi.json, the OpenAPI 3.1 document of all routes. */
#ifndef OPENAPI_H
#define OPENAPI_H

#include <stddef.h>

#include "proto-json/proto.h"
#include "server/base/config.h"
#include "server/routes/route.h"

/* Writes the OpenAPI document of these routes. Returns a text of *length bytes, followed by a NUL, which the caller
 * frees. Returns NULL when out of memory. Any thread may call this function, which keeps no state. */
char *openapi_write(const struct config *config, const proto_limits *limits, const struct route *routes,
                    int route_count, size_t *length);

#endif
