/* connections.h: the open connections, and how long each may stay in each phase.
 *
 * libmicrohttpd's time-out is about inactivity: it never cuts a client that sends or reads one byte now and then. So
 * every connection records its phase and when that phase began, and a sweep in the loop cuts those that are too slow.
 *
 * The sweep also finds clients that left in the middle of a request. When recv() returns less than it has room for,
 * libmicrohttpd (0.9.75, 1.0.1) waits for the next event of edge-triggered epoll. If the FIN arrived together with the
 * last bytes, no such event comes. */
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

/* Each phase: its id, and its label in logs.
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
    /* The web server's socket. This code never closes it. It only shuts it down, and only while it is in the table. */
    int fd;
    bool plain;            /* not TLS: a fixed answer may be written to the socket */
    char peer[PEER_BYTES]; /* address of the socket's other end */
    _Atomic bool known;    /* a request on this connection has shown one of the tokens */
    _Atomic int phase;
    _Atomic int64_t since_ms;
    /* bytes of the body or the answer that were received or sent since the phase began */
    _Atomic uint64_t progress_bytes;
    /* Content type of a refusal on this connection, a constant; NULL: no request line has arrived. */
    _Atomic(const char *) error_media;
    struct connection *previous, *next;
    uint64_t inode; /* inode of the socket: shows whether fd is still the same socket */
    _Atomic int
        /* Two counters that count this connection from connections_add() to connections_remove(); may be NULL. */
        *tallies[2];
    /* A reference, on a server without tokens. NULL: no request on this connection has computed yet. */
    struct flow *flow;
    /* The request that is being received or answered, NULL between two requests. Used by the HTTP thread only. */
    struct request *request;
    /* The request was refused while more of it may come. Used by the HTTP thread only. */
    bool sending;
    /* A counter of connections that were cut to make room and are not removed yet; NULL: this one was not cut for
     * that. */
    _Atomic int *leaving;

    /* The sweep's own notes: the state that it saw last, when it first saw this state, and whether it checked the
     * socket since. */
    int seen_phase;
    uint64_t seen_bytes;
    int64_t seen_ms, seen_since_ms;
    bool asked;
};

/* The most time that each phase may take. */
struct connection_limits {
    int64_t head_ms;  /* OPENED, HEAD: the whole phase */
    int64_t idle_ms;  /* IDLE: the whole phase */
    int64_t stall_ms; /* BODY: from one byte to the next */
    int64_t
        /* BODY, SEND: this, and 1 ms more for each KiB that moved; so at least about 1 MiB/s in the long run */
        transfer_ms;
};

/* The most connections that one search lists. A search takes 0.1 ms, and new connections come in bursts. */
enum { CONNECTIONS_OLD = 64 };

struct connections {
    pthread_mutex_t lock;
    struct connection *first;
    struct connection **by_fd; /* [capacity], indexed by descriptor */
    int capacity;
    struct connection_totals totals;
    /* Time when a request last began while the server drains; 0: no request has begun. */
    _Atomic int64_t used_ms;
    struct lingering linger; /* sockets of ended connections whose last answer is not delivered yet */

    /* Used by connections_make_room(): connections counted by `old_tally` that may be closed. The last in the list is
     * closed first. Each is checked again before it is closed. */
    struct {
        int fd;
        int rank;
        int64_t since_ms;
    } old[CONNECTIONS_OLD];
    int old_count;
    const _Atomic int *old_tally;
    /* Time of the last search if it found no connection that may be closed; 0: it found some. */
    int64_t looked_ms;
};

void connections_init(struct connections *connections);
void connections_clear(struct connections *connections);

/* Adds an accepted socket before the web server gets it. Call this on the thread that accepts. The socket is counted in
 * `connections` and in both tallies until it is removed. NULL: out of memory, close the socket. */
struct connection *connections_add(struct connections *connections, int fd, bool plain, _Atomic int *tally,
                                   _Atomic int *other_tally);
/* Call this when the web server starts to serve a socket. Returns the socket's connection. */
struct connection *connections_take(struct connections *connections, int fd);
/* Returns the connection of this socket, or NULL if there is none. Call this on the HTTP thread that serves the
 * connection, because only that thread ends it. */
struct connection *connections_find(struct connections *connections, int fd);
/* Removes and frees a connection that the web server has ended or never took. Its fd must still be open. If the web
 * server closes a socket without a report, for lack of memory, the next sweep finds it, or the next socket of the same
 * number does. */
void connections_remove(struct connections *connections, struct connection *connection);

/* Counts a request's memory when it begins (more = 1) or ends (-1). Call this on the web server's thread. */
void connections_count_request(struct connections *connections, int more);

/* Moves the connection to the phase. Call this on the web server's thread. False: the connection has been cut, and the
 * caller must stop its work. */
bool connection_enter(struct connection *connection, enum connection_phase phase);
void connection_progress(struct connection *connection, uint64_t bytes);

/* Is a connection in this phase too slow? A function of its arguments only, for tests. */
bool connection_expired(enum connection_phase phase, int64_t since_ms, uint64_t progress_bytes, int64_t now_ms,
                        const struct connection_limits *limits);

/* Shorter limits that apply while the server drains. */
struct connection_drain_limits {
    int64_t silent_ms;      /* OPENED, IDLE: neither this connection nor any other has sent anything for this time */
    int64_t stalled_ms;     /* HEAD, BODY, SEND: no byte moved for this time */
    int64_t quiet_since_ms; /* time since which no connection has sent anything */
};

/* Cuts connections that are too slow and, with `drain_limits` (may be NULL), those that delay the end of draining. A
 * plain connection that was sending is answered 408 first. Returns the number of connections that were cut. */
int connections_sweep(struct connections *connections, int64_t now_ms, const struct connection_limits *limits,
                      const struct connection_drain_limits *drain_limits);
/* Cuts one of the connections that `tally` counts, to make room for another. Among candidates of equal rank, the one
 * that has been in its phase longest goes first. A connection is idle between two requests, and while its head is not
 * complete. Without `tokens` only idle connections are candidates. With `tokens` there is an order. Idle connections
 * that never showed a token go first. Second go connections without a token that have been sending a refused body, or
 * not fetching an answer, for CONNECTION_STRANGER_MS. All other idle connections go last. No other request is cut.
 * False: there is no candidate. *leaving counts the connection until it is removed. */
bool connections_make_room(struct connections *connections, const _Atomic int *tally, _Atomic int *leaving, bool tokens,
                           int64_t now_ms);

/* Writes the problem document of `error` directly to the socket and shuts the socket down. This serves for errors that
 * libmicrohttpd cannot answer, such as 408 and 413 in the middle of a body, or answers badly. request_id: NULL makes a
 * new one. */
void connection_cut_with(struct connection *connection, proto_error error, const char *request_id);

#endif
