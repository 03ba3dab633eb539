/* server.h: the struct that all parts of the daemon share. main.c fills it in at the start, and empties it in reverse
 * order at the end. */
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

/* The phases of the server: id, name in /v1/info and /readyz. */
#define SERVER_PHASE_MAP(X) X(STARTING, "starting") X(READY, "ready") X(DRAINING, "draining") X(FAILED, "failed")
enum server_phase {
#define X(id, label) SERVER_##id,
    SERVER_PHASE_MAP(X)
#undef X
        SERVER_PHASE_COUNT
};

struct connection_totals {
    _Atomic int count;
    _Atomic int64_t bytes; /* bytes of memory that connections and requests use, without tensors */
};

struct server {
    const struct config *config;
    proto_limits limits;
    int64_t started_ms;
    _Atomic int phase; /* enum server_phase */
    /* when the drain (finishing accepted requests before the end) began; 0: not draining */
    _Atomic int64_t drain_since_ms;
    _Atomic bool stopping; /* whether the server stops, so that no connection may be suspended any more */
    _Atomic int suspended;

    struct staging_pool *staging;
    /* Whether the staging memory is page-locked by a driver, so that devices can copy from and to it. */
    bool pinned;
    struct contexts *contexts;
    struct caches *caches;
    struct regions *regions; /* regions (shared memory that clients have registered); NULL: not offered */
    struct tokens *tokens;   /* access tokens; NULL: clients need none */
    struct caller everybody; /* the account of all clients without access tokens */
    struct queue queue;
    struct devices *devices;
    struct connections *connections;
    const struct connection_totals *open_connections;
    struct loop *loop;
    /* the versions of libmicrohttpd (set by frontend_init()) and of libuv (set by loop_open()) */
    const char *web_library, *loop_library;
};

const char *server_phase_label(int phase);

#endif
