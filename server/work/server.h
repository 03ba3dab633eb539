/* server.h: what every part of the daemon shares: one struct, filled in by main.c in order and emptied in reverse. */
#ifndef SERVER_H
#define SERVER_H

#include <stdatomic.h>
#include <stdint.h>

#include "proto-json/proto.h"
#include "server/base/caller.h"
#include "server/base/config.h"
#include "server/work/queue.h"

struct staging_pool;
struct caches;
struct contexts;
struct devices;
struct regions;
struct loop;
struct connections;
struct tokens;

/* id, state as /v1/info and /readyz say it */
#define SERVER_PHASE_MAP(X) X(STARTING, "starting") X(READY, "ready") X(DRAINING, "draining") X(FAILED, "failed")
enum server_phase {
#define X(id, label) SERVER_##id,
    SERVER_PHASE_MAP(X)
#undef X
        SERVER_PHASE_COUNT
};

/* What all open connections add up to. */
struct connection_totals {
    _Atomic int count;
    _Atomic int64_t bytes; /* memory of the connections and of their requests, without tensors */
};

struct server {
    const struct config *config;
    proto_limits limits;
    int64_t started_ms;
    _Atomic int phase;              /* enum server_phase */
    _Atomic int64_t drain_since_ms; /* 0: it does not drain */
    _Atomic bool stopping;          /* nothing may be suspended any more */
    _Atomic int suspended;          /* connections that are suspended, or about to be */

    struct staging_pool *staging;
    bool pinned; /* its memory is pinned for a device */
    struct contexts *contexts;
    struct caches *caches;
    struct regions *regions; /* NULL: there is no shared memory */
    struct tokens *tokens;   /* NULL: everybody may, */
    struct caller everybody; /* on one account */
    struct queue queue;
    struct devices *devices;
    struct connections *connections;
    const struct connection_totals *open_connections; /* of `connections` */
    struct loop *loop;
    const char *web_library, *loop_library; /* versions of libmicrohttpd and libuv, by front_init() and loop_open() */
};

const char *server_phase_label(int phase);

#endif
