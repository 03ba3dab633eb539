/* info.h: what attnd says about itself at GET /v1/info. The answer is written from the program's own tables: config
 * options, ATTN_TENSOR_MAP, ATTN_DTYPE_MAP, the option table of proto.h, PROTO_ERROR_MAP, the kernels. */
#ifndef INFO_H
#define INFO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/base/config.h"
#include "server/device/devices.h"
#include "server/work/request.h"

/* A snapshot of the server for one answer. Its pointers must be valid until info_write() returns. */
struct info_facts {
    const struct config *config;
    const proto_limits *limits;
    const char *state; /* the server's phase: "starting", "ready", "draining" or "failed" */
    const char *web_library, *loop_library;
    double uptime_s;
    const struct device_state *devices;
    int device_count;
    int64_t queue_requests, queue_bytes; /* number of requests that wait for a device, and the bytes of their tensors */
    int64_t connections;
    int64_t inflight_requests;
    int64_t staging_used_bytes;
    int64_t kv_bytes;
};

/* Writes the body of GET /v1/info. Returns a text of *length bytes, followed by a NUL, which the caller frees. Returns
 * NULL when out of memory. Any thread may call this function, which keeps no state. */
char *info_write(const struct info_facts *facts, size_t *length);

/* Answers GET /v1/info: gathers the facts and writes them. Any thread may call it. */
void info_answer(struct request *request, struct answer *answer);

#endif
