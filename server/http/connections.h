/* connections.h: the open connections, and how long each may stay in each phase.
 *
 * libmicrohttpd's time-out is about inactivity: it never cuts a client that sends or reads one byte now and then. Every
 * connection therefore records its phase and when that phase began, and a sweep on the main thread cuts connections
 * that are too slow.
 *
 * The sweep also finds clients that closed their connection in the middle of a request. When recv() returns less than
 * it has room for, libmicrohttpd (0.9.75, 1.0.1) waits for the next event of edge-triggered epoll. If the client's FIN
 * (the end of its bytes) arrived together with its last bytes, no further event comes, so libmicrohttpd does not notice
 * that the client has left. */
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
    /* The web server's socket. The code of connections.c never closes this socket. It only shuts the socket down, and
     * only while the connection is in the table. */
    int fd;
    bool plain;            /* true: the connection is not TLS, so a fixed answer may be written to the socket */
    char peer[PEER_BYTES]; /* address of the socket's other end */
    _Atomic bool known;    /* true: a request on this connection has shown one of the tokens */
    _Atomic int phase;
    _Atomic int64_t since_ms;
    /* bytes of the body or the answer that were received or sent since the present phase began */
    _Atomic uint64_t progress_bytes;
    /* Content type that an error answer would have if it were sent on this connection now (a string constant). NULL: no
     * request line has arrived. */
    _Atomic(const char *) error_media;
    struct connection *previous, *next;
    uint64_t inode; /* inode of the socket: shows whether fd is still the same socket */
    _Atomic int
        /* Two counters of connections, one of this connection's HTTP thread and one of its web server. Both include the
         * connection from connections_add() to connections_remove(). A pointer may be NULL. */
        *tallies[2];
    /* On a server without tokens, a reference to the flow (account) to which the device time of this connection's
     * requests is charged. NULL: no request on this connection has computed yet. */
    struct flow *flow;
    /* The request that is being received or answered; NULL between two requests. Only the HTTP thread uses it. */
    struct request *request;
    /* True: the request was refused, and its client may still be sending it. The socket then lingers after the
     * connection (LINGER_DROP). Only the HTTP thread uses this member. */
    bool sending;
    /* A counter of connections that were cut to make room for others. It includes this connection until this connection
     * is removed. NULL: this connection was not cut for that reason. */
    _Atomic int *leaving;

    /* What the last sweep over all connections saw: the connection's state, the time since which the state has not
     * changed, and whether the socket was checked since that time. */
    int seen_phase;
    uint64_t seen_bytes;
    int64_t seen_ms, seen_since_ms;
    bool asked;
};

/* The longest time that a connection may stay in each phase. */
struct connection_limits {
    int64_t head_ms;  /* longest time in phase OPENED or HEAD */
    int64_t idle_ms;  /* longest time in phase IDLE */
    int64_t stall_ms; /* longest time between two bytes in phase BODY */
    int64_t
        /* Longest time in phase BODY or SEND. The limit grows by 1 ms for each KiB that was received or sent, so a
         * transfer at 1 MiB/s or more never exceeds it. */
        transfer_ms;
};

/* A search for connections that may be closed lists at most this many connections. A search takes 0.1 ms. New
 * connections come in bursts, so one list serves for many new connections. */
enum { CONNECTIONS_OLD = 64 };

struct connections {
    pthread_mutex_t lock;
    struct connection *first;
    struct connection **by_fd; /* [capacity] connections, indexed by the descriptor of their socket */
    int capacity;
    struct connection_totals totals;
    /* The last time at which a request began while the server drains (finishes requests before it stops). 0: no request
     * has begun since the drain began. */
    _Atomic int64_t used_ms;
    struct lingering linger; /* sockets of ended connections whose last answer is not delivered yet */

    /* Connections counted by `old_tally` that connections_make_room() may close. The last connection in the list is
     * closed first. Each connection is checked again before it is closed. */
    struct {
        int fd;
        int rank;
        int64_t since_ms;
    } old[CONNECTIONS_OLD];
    int old_count;
    const _Atomic int *old_tally;
    /* the time of the last search, if it found no connection that may be closed; otherwise 0 */
    int64_t looked_ms;
};

void connections_init(struct connections *connections);
void connections_clear(struct connections *connections);

/* Adds an accepted socket to the table before the web server gets it. Call this on the thread that accepts connections.
 * Until the socket is removed, it counts in `connections`, *tally and *other_tally. Returns NULL when out of memory:
 * the caller must close the socket. */
struct connection *connections_add(struct connections *connections, int fd, bool plain, _Atomic int *tally,
                                   _Atomic int *other_tally);
/* Call this when the web server starts to serve a socket. Returns the socket's connection. */
struct connection *connections_take(struct connections *connections, int fd);
/* Returns the connection of this socket, or NULL if there is none. Call this on the HTTP thread that serves the
 * connection, because only that thread ends it. */
struct connection *connections_find(struct connections *connections, int fd);
/* Removes and frees a connection that the web server has ended or never accepted. The connection's descriptor must
 * still be open. If the web server lacks memory, it closes a socket without a report. The next sweep then removes the
 * socket's connection. If a new socket gets the same descriptor number earlier, connections_add() removes it. */
void connections_remove(struct connections *connections, struct connection *connection);

/* Counts the memory of a request: when it begins (`more` is 1), the memory is added, and when it ends (`more` is -1),
 * the memory is subtracted. Call this on the web server's thread. */
void connections_count_request(struct connections *connections, int more);

/* Moves the connection to the phase. Call this on the web server's thread. Returns false if the connection has been
 * cut; the caller must then stop its work. */
bool connection_enter(struct connection *connection, enum connection_phase phase);
void connection_progress(struct connection *connection, uint64_t bytes);

/* True if a connection in this phase is too slow. The result depends only on the arguments, so that tests can choose
 * the times. */
bool connection_expired(enum connection_phase phase, int64_t since_ms, uint64_t progress_bytes, int64_t now_ms,
                        const struct connection_limits *limits);

/* Time limits of connections that apply, in addition to struct connection_limits, while the server drains (before it
 * stops). */
struct connection_drain_limits {
    /* a connection in phase OPENED or IDLE may be cut once no connection has sent anything for this time */
    int64_t silent_ms;
    /* in phases OPENED, HEAD, BODY and SEND: the longest time for which a connection may transfer no byte */
    int64_t stalled_ms;
    int64_t quiet_since_ms; /* the last time at which any client sent something, on any connection */
};

/* Cuts connections that are too slow. If `drain_limits` is not NULL, the server drains (finishes its requests before it
 * stops), and connections that delay the end of the drain are cut too. A plain (not TLS) client that was sending is
 * answered 408 first. Returns the number of connections that were cut. */
int connections_sweep(struct connections *connections, int64_t now_ms, const struct connection_limits *limits,
                      const struct connection_drain_limits *drain_limits);
/* Cuts one of the connections that `tally` counts, to make room for a new one. A connection counts as idle between two
 * requests, and while the head of a request is incomplete. If requests on this port need no token (`tokens` is false),
 * only idle connections may be cut. If they need one, the order is:
 *   1. idle connections that never showed a token
 *   2. other connections that never showed a token, if they have been sending a refused body, or not fetching an
 *   answer, for CONNECTION_STRANGER_MS
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
