/* server.h: the struct that all parts of the daemon share. main.c fills in its members when the server starts, and
 * empties them in reverse order when it stops. */
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

/* The phases of the server. Each row: id, name in /v1/info and /readyz. */
#define SERVER_PHASE_MAP(X) X(STARTING, "starting") X(READY, "ready") X(DRAINING, "draining") X(FAILED, "failed")
enum server_phase {
#define X(id, label) SERVER_##id,
    SERVER_PHASE_MAP(X)
#undef X
        SERVER_PHASE_COUNT
};

/* Totals over all open connections of clients. */
struct connection_totals {
    _Atomic int count;
    _Atomic int64_t bytes; /* bytes of memory of the connections and their requests, without tensors */
};

struct server {
    const struct config *config;
    proto_limits limits;
    int64_t started_ms;
    _Atomic int phase; /* the phase of the server, a value of enum server_phase */
    /* time at which the drain began (the server finishes requests, then stops); 0: the server is not draining */
    _Atomic int64_t drain_since_ms;
    _Atomic bool stopping; /* true: the server stops, so no connection may be suspended any more */
    _Atomic int suspended; /* number of connections that are suspended or about to be suspended */

    struct staging_pool *staging;
    /* true: a driver holds the pages of the staging memory (pinned), so that devices can copy from and to it */
    bool pinned;
    struct contexts *contexts;
    struct caches *caches;
    struct regions *regions; /* table of clients' shared memory; NULL: shared memory is not offered */
    struct tokens *tokens;   /* the clients' access tokens; NULL: clients need no token */
    struct caller everybody; /* the account to which all clients without access tokens are charged */
    struct queue queue;
    struct devices *devices;
    struct connections *connections;
    const struct connection_totals *open_connections; /* totals over all open connections */
    struct loop *loop;
    /* Versions of libmicrohttpd and libuv, set by frontend_init() and loop_open(). */
    const char *web_library, *loop_library;
};

const char *server_phase_label(int phase);

#endif
