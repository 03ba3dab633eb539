/* openapi.h: GET /openapi.json, the OpenAPI 3.1 document of all routes. */
#ifndef OPENAPI_H
#define OPENAPI_H

#include <stddef.h>

#include "proto-json/proto.h"
#include "server/base/config.h"
#include "server/routes/route.h"

/* The document of these routes: malloc'ed and NUL-ended, *length bytes without the NUL, the caller frees it; NULL when
 * out of memory. It keeps no state, and any thread may call it. */
char *openapi_write(const struct config *config, const proto_limits *limits, const struct route *routes,
                    int route_count, size_t *length);

#endif
