/* connections.h: the open connections, and how long each may stay in each phase.
 *
 * libmicrohttpd's time-out never cuts a client that sends or reads one byte now and then. Every connection therefore
 * records its phase and when that phase began, and a sweep on the main thread cuts connections that are too slow.
 *
 * The sweep also finds clients that left in the middle of a request. With edge-triggered epoll, libmicrohttpd (0.9.75,
 * 1.0.1) does not notice a FIN that arrived together with the client's last bytes. */
#ifndef CONNECTIONS_H
#define CONNECTIONS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto-json/proto.h"
#include "server/base/peer.h"
#include "server/http/lingering_close.h"
#include "server/work/server.h"

/* The phases of a connection. One entry for each phase: its id, and its label in logs.
 *
 *   ADDED     accepted, and the web server has not begun to serve it
 *   OPENED    connected, and no request line has arrived
 *   HEAD      a request line has arrived, and the head is not complete
 *   BODY      the client sends a body
 *   WORK      the client waits for the server
 *   SEND      the client receives an answer
 *   IDLE      nothing happens, between two requests
 *   CUT       the server has shut the socket down */
/* clang-format off */
#define CONNECTION_PHASE_MAP(X)                                                                           \
    X(ADDED, "added") X(OPENED, "opened") X(HEAD, "head") X(BODY, "body") X(WORK, "work") X(SEND, "send") \
    X(IDLE, "idle") X(CUT, "cut")
/* clang-format on */

enum connection_phase {
#define X(id, label) CONNECTION_##id,
    CONNECTION_PHASE_MAP(X)
#undef X
        CONNECTION_PHASE_COUNT
};

struct flow;

struct connection {
    /* The web server's socket. Functions of connections.c may shut it down while the connection is in the table. Only
     * the web server closes it. */
    int fd;
    bool plain; /* whether the client uses no TLS; if so, a fixed answer may be written directly to the socket */
    char peer[PEER_BYTES];
    _Atomic bool known; /* whether a request on this connection has shown a valid token */
    _Atomic int phase;
    _Atomic int64_t since_ms;
    /* bytes of the body or the answer that were transferred since the present phase began */
    _Atomic uint64_t progress_bytes;
    /* content type of an error answer on this connection (a string constant); NULL: no request line has arrived */
    _Atomic(const char *) error_media;
    struct connection *previous, *next;
    uint64_t inode; /* inode of the socket; it shows whether fd is still the same socket */
    _Atomic int
        /* the two counters that count this connection: the HTTP thread's and the web server's; NULL: no counter */
        *tallies[2];
    /* On a server without tokens: the account (flow) that is charged for the device time of this connection's requests.
     * The connection holds a reference to it. NULL: no request has computed yet. */
    struct flow *flow;
    /* The request that is being received or answered. NULL between two requests. Only the HTTP thread uses this. */
    struct request *request;
    /* Whether the client may still be sending a request that was refused. If so, the socket is kept open for a time
     * after the connection has ended (LINGER_DROP). Only the HTTP thread uses this. */
    bool sending;
    /* Counter of the connections that were cut to make room for others and are not removed yet. NULL: this connection
     * was not cut for that reason. */
    _Atomic int *leaving;

    /* What the last sweep saw: the connection's state (its phase and transferred bytes), since when this state is
     * unchanged, and whether has_left() has checked the socket since then. */
    int seen_phase;
    uint64_t seen_bytes;
    int64_t seen_ms, seen_since_ms;
    bool asked;
};

struct connection_limits {
    int64_t head_ms;  /* longest time in phase OPENED or HEAD */
    int64_t idle_ms;  /* longest time in phase IDLE */
    int64_t stall_ms; /* longest time between two bytes in phase BODY */
    int64_t
        /* longest time in phase BODY or SEND; each KiB that was received or sent adds 1 ms to it */
        transfer_ms;
};

/* Largest number of connections that one search lists as candidates for closing. One search takes 0.1 ms, and its list
 * is used for many new connections. */
enum { CONNECTIONS_OLD = 64 };

struct connections {
    pthread_mutex_t lock;
    struct connection *first;
    struct connection **by_fd; /* [capacity] connections, indexed by the descriptor of their socket */
    int capacity;
    struct connection_totals totals;
    /* last time at which a request began while the server drains (finishes requests before it stops); 0: none */
    _Atomic int64_t used_ms;
    struct lingering linger; /* sockets of ended connections whose last answer is not delivered yet */

    /* Connections that connections_make_room() may close, sorted so that the last one is closed first. Before the
     * function closes a connection, it checks again that the connection may be closed. */
    struct {
        int fd;
        int rank;
        int64_t since_ms;
    } old[CONNECTIONS_OLD];
    int old_count;
    const _Atomic int *old_tally;
    /* time of the last search if it found no connection to close; otherwise 0 */
    int64_t looked_ms;
};

void connections_init(struct connections *connections);
void connections_clear(struct connections *connections);

/* Adds an accepted socket to the table before the web server gets it. Call this on the thread that accepts connections.
 * Until the socket is removed, it counts in `connections`, *tally and *other_tally. Returns NULL when out of memory:
 * the caller must close the socket. */
struct connection *connections_add(struct connections *connections, int fd, bool plain, _Atomic int *tally,
                                   _Atomic int *other_tally);
struct connection *connections_take(struct connections *connections, int fd);
/* Returns the connection of this socket, or NULL. Call this on the HTTP thread that serves the connection, because only
 * that thread ends it. */
struct connection *connections_find(struct connections *connections, int fd);
/* Removes and frees a connection that the web server has ended or never accepted. The connection's descriptor must
 * still be open. */
void connections_remove(struct connections *connections, struct connection *connection);

/* Call this with `more` 1 when a request begins, to add the request's memory to the total. Call it with `more` -1 when
 * the request ends, to subtract that memory. Call this on the web server's thread. */
void connections_count_request(struct connections *connections, int more);

/* Moves the connection to the phase. Call this on the web server's thread. Returns false if the connection has been
 * cut; the caller must then stop its work. */
bool connection_enter(struct connection *connection, enum connection_phase phase);
void connection_progress(struct connection *connection, uint64_t bytes);

/* True if a connection in this phase is too slow. The result depends only on the arguments, so that tests can choose
 * the times. */
bool connection_expired(enum connection_phase phase, int64_t since_ms, uint64_t progress_bytes, int64_t now_ms,
                        const struct connection_limits *limits);

/* Time limits that apply, in addition to struct connection_limits, while the server drains (before it stops). */
struct connection_drain_limits {
    /* a connection in phase OPENED or IDLE may be cut once no client has sent anything for this time */
    int64_t silent_ms;
    /* longest time without a transferred byte in phases OPENED, HEAD, BODY and SEND */
    int64_t stalled_ms;
    int64_t quiet_since_ms; /* last time at which any client sent something */
};

/* Cuts connections that are too slow. `drain_limits` is NULL unless the server drains (finishes its requests before it
 * stops). During a drain, connections that delay its end are cut too. A plain (not TLS) client that was sending is
 * answered 408 before the cut. Returns the number of connections that were cut. */
int connections_sweep(struct connections *connections, int64_t now_ms, const struct connection_limits *limits,
                      const struct connection_drain_limits *drain_limits);
/* Cuts one of the connections that `tally` counts, to make room for a new one. A connection counts as idle between two
 * requests, and while the head of a request is incomplete. If requests on this port need no token (`tokens` is false),
 * only connections that have been idle for CONNECTION_BETWEEN_MS may be cut. If requests need a token, the order is:
 *   1. idle connections that never showed a token
 *   2. other connections that never showed a token, if they have been sending a refused body, or fetching an
 *      answer, for CONNECTION_STRANGER_MS
 *   3. all other connections that have been idle for CONNECTION_BETWEEN_MS
 * Among equal candidates, the one that has been in its phase longest is cut. Returns false if there is no candidate.
 * *leaving counts the connection until it is removed. */
bool connections_make_room(struct connections *connections, const _Atomic int *tally, _Atomic int *leaving, bool tokens,
                           int64_t now_ms);

/* Writes the problem document of `error` directly to the socket and shuts the socket down. Use this function for errors
 * that libmicrohttpd answers badly or not at all, such as 408 and 413 in the middle of a body. If request_id is NULL, a
 * new id is made. */
void connection_cut_with(struct connection *connection, proto_error error, const char *request_id);

#endif
