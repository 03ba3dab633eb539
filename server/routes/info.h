/* info.h: what attnd says about itself: GET /v1/info and GET /openapi.json. Both are written from the program's own
 * tables (config options, ATTN_TENSOR_MAP, ATTN_DTYPE_MAP, the option table of proto.h,
 * PROTO_ERROR_MAP, the routes), so a new row there shows up here by itself.
 *
 * Every function returns a malloc'ed, NUL-ended body, *length bytes without the NUL, which the caller frees; NULL
 * when out of memory. They share no state and may be called from any thread. */
#ifndef INFO_H
#define INFO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/routes/route.h"
#include "server/base/config.h"
#include "server/device/devices.h"

/* ---- What others know -------------------------------------------------------------------------------------------- */

/* A snapshot that the core fills in for one answer. Pointers are borrowed for the call. */
struct info_facts {
    const struct config *config;
    const proto_limits *limits;
    const char *state;                      /* "starting", "ready", "draining", "failed" */
    const char *web_library, *loop_library; /* versions of libmicrohttpd and libuv */
    double uptime_s;
    const struct device_state *devices;
    int device_count;
    int64_t queue_requests, queue_bytes; /* waiting for a device */
    int64_t connections;
    int64_t inflight_requests; /* in any state */
    int64_t staging_used_bytes;
    int64_t kv_bytes; /* for the caches of all devices */
};

/* ---- Bodies ------------------------------------------------------------------------------------------------------ */

char *info_write(const struct info_facts *facts, size_t *length);            /* /v1/info: application/json */
char *openapi_write(const struct config *config, const proto_limits *limits, /* /openapi.json: application/json */
                    const struct route *routes, int route_count, size_t *length);

#endif
