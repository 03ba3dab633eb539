/* connections.h: the open connections, and how long each may take for what it is doing.
 *
 * libmicrohttpd's time-out is about inactivity: a client that sends or reads one byte now and then is never cut. So
 * every connection notes its phase and when that began, and a sweep in the loop cuts those that are too slow.
 *
 * The sweep also finds clients that left in the middle of a request. libmicrohttpd (0.9.75, 1.0.1) takes a short read
 * for the end of what there is, and waits for the next edge of epoll. When the FIN came together with the last bytes,
 * no edge comes. */
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

/* id, label in logs. What the connection is doing in each:
 *
 *   ADDED     it is accepted, and the web server has not begun with it
 *   OPENED    it is connected, and the first head is not complete
 *   HEAD      it sends a head, whose request line has arrived
 *   BODY      it sends a body
 *   WORK      it waits for the server
 *   SEND      it receives an answer
 *   IDLE      nothing, between two requests
 *   CUT       nothing: the server has shut its socket down */
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
    int fd;                /* the web server's: never closed here, only shut down, and only while it is in the table */
    bool plain;            /* not TLS: a fixed answer may be written to the socket */
    char peer[PEER_BYTES]; /* the socket's other end */
    _Atomic bool known;    /* a request on it has shown one of the tokens */
    _Atomic int phase;
    _Atomic int64_t since_ms;
    _Atomic uint64_t progress_bytes;   /* bytes of the body or the answer that moved since the phase began */
    _Atomic(const char *) error_media; /* content type of a refusal, a constant; NULL: no request line has arrived */
    struct connection *previous, *next;
    uint64_t inode; /* of the socket: whether fd is still this one */
    _Atomic int
        *tallies[2]; /* counters of others that count it from connections_add() to connections_remove(); may be NULL */
    struct flow *flow;       /* a reference, on a server without tokens; NULL: no request has computed on it yet */
    struct request *request; /* the web server's thread: what is received or answered on it, NULL between two */
    bool sending;            /* the web server's thread: its request was refused, and more of it may come */
    _Atomic int *leaving;    /* counts it from its cut to make room to its removal; NULL: it was not cut for that */

    /* Used by the sweep: the state it last saw, when it saw that first, and whether it checked the socket since. */
    int seen_phase;
    uint64_t seen_bytes;
    int64_t seen_ms, seen_since_ms;
    bool asked;
};

/* How long each phase may take. */
struct connection_limits {
    int64_t head_ms;  /* OPENED, HEAD: all of it */
    int64_t idle_ms;  /* IDLE: all of it */
    int64_t stall_ms; /* BODY: from one byte to the next */
    int64_t
        transfer_ms; /* BODY, SEND: this and 1 ms for each KiB that moved, that is at least 1 MiB/s in the long run */
};

/* Most connections to close that one search finds: a search takes 0.1 ms, and new connections come in bursts. */
enum { CONNECTIONS_OLD = 64 };

struct connections {
    pthread_mutex_t lock;
    struct connection *first;
    struct connection **by_fd; /* [capacity], by descriptor */
    int capacity;
    struct connection_totals totals;
    _Atomic int64_t used_ms; /* when a request last began on one of them, while draining; 0: none has */
    struct lingering linger; /* their sockets, where the end of an answer is still on its way */

    /* connections_make_room()'s: connections of `old_tally` that may be closed; the first to go is the last in the
     * list. Each is checked again before it is closed. */
    struct {
        int fd;
        int rank;
        int64_t since_ms;
    } old[CONNECTIONS_OLD];
    int old_count;
    const _Atomic int *old_tally;
    int64_t looked_ms; /* time of the last search, if it found none to close; 0: it found some */
};

void connections_init(struct connections *connections);
void connections_clear(struct connections *connections);

/* An accepted socket that the web server is about to be given; from the thread that accepts. It is counted in
 * `connections` and in both tallies until it is removed. NULL when out of memory: close it. */
struct connection *connections_add(struct connections *connections, int fd, bool plain, _Atomic int *tally,
                                   _Atomic int *other_tally);
/* Call this when the web server starts to serve a socket. Returns the socket's connection. */
struct connection *connections_take(struct connections *connections, int fd);
/* The connection of this socket; NULL: none. Call it on the connection's own thread, which alone ends it. */
struct connection *connections_find(struct connections *connections, int fd);
/* The web server is done with it, and its fd is still open; or never took it. Frees it. A socket that the web server
 * closes without a word (it had no memory for it) is found by the next sweep, or when its number comes again. */
void connections_remove(struct connections *connections, struct connection *connection);

/* Counts a request's memory when it begins (more = 1) or ends (-1). Call this on the web server's thread. */
void connections_count_request(struct connections *connections, int more);

/* Call this on the web server's thread. False: the connection has been cut, and the caller must stop its work. */
bool connection_enter(struct connection *connection, enum connection_phase phase);
void connection_progress(struct connection *connection, uint64_t bytes);

/* Is this connection too slow? Pure, for tests. */
bool connection_expired(enum connection_phase phase, int64_t since_ms, uint64_t progress_bytes, int64_t now_ms,
                        const struct connection_limits *limits);

/* Shorter limits that apply while the server drains. */
struct connection_drain_limits {
    int64_t silent_ms;      /* OPENED, IDLE: neither this nor any other connection sent anything for this time */
    int64_t stalled_ms;     /* HEAD, BODY, SEND: no byte moved for this time */
    int64_t quiet_since_ms; /* time since which no connection has sent anything */
};

/* Cuts connections that are too slow and, with `drain_limits` (may be NULL), those that delay the end of draining. A
 * plain connection that was sending is answered 408 first. Returns the number of connections that were cut. */
int connections_sweep(struct connections *connections, int64_t now_ms, const struct connection_limits *limits,
                      const struct connection_drain_limits *drain_limits);
/* Cuts one of the connections that `tally` counts, to make room for another: the one that has been idle for longest. A
 * connection is idle between two requests, and while its head is not complete. With `tokens` there is an order. Idle
 * connections that never showed a token go first. Second go those of them that have sent a refused body, or not fetched
 * an answer, for CONNECTION_STRANGER_MS. All other idle ones go last. No other request under way is cut. False: none
 * can go. *leaving counts the connection until it is removed. */
bool connections_make_room(struct connections *connections, const _Atomic int *tally, _Atomic int *leaving, bool tokens,
                           int64_t now_ms);

/* Writes the problem document of `error` to the socket, past the web server, and shuts it down. For what libmicrohttpd
 * cannot answer: 408 and 413 in the middle of a body; and for what it answers badly. request_id: NULL makes one. */
void connection_cut_with(struct connection *connection, proto_error error, const char *request_id);

#endif
