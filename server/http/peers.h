/* peers.h: the open connections, and how long each may take for what it is doing.
 *
 * libmicrohttpd's time-out is about inactivity: a client that sends or reads one byte now and then is never cut. So
 * every connection notes its phase and when that began, and a sweep in the loop cuts those that are too slow.
 *
 * The sweep also finds clients that left in the middle of a request: libmicrohttpd 0.9.75 takes a short read for
 * the end of what there is and waits for the next edge of epoll; when the FIN came together with the last bytes,
 * there is none. */
#ifndef PEERS_H
#define PEERS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto-json/proto.h"
#include "server/http/linger.h"

/* id, label in logs, what the peer is doing */
#define PEER_PHASE_MAP(X)                                               \
    X(ADDED, "added", "accepted, the web server has not begun with it") \
    X(OPENED, "opened", "connected, the first head is not complete")    \
    X(HEAD, "head", "sending a head, the request line has arrived")     \
    X(BODY, "body", "sending a body")                                   \
    X(WORK, "work", "waiting for us")                                   \
    X(SEND, "send", "receiving an answer")                              \
    X(IDLE, "idle", "between two requests")                             \
    X(CUT, "cut", "given up: its socket is shut down")

enum peer_phase {
#define X(id, label, meaning) PEER_##id,
    PEER_PHASE_MAP(X)
#undef X
        PEER_PHASE_COUNT
};

struct peer {
    int fd;     /* the web server's: never closed here, only shut down, and only while it is in the table */
    bool plain; /* not TLS: a fixed answer may be written to the socket */
    _Atomic int phase;
    _Atomic int64_t since_ms;
    _Atomic uint64_t progress_bytes; /* of the body or the answer, since the phase began */
    struct peer *previous, *next;
    uint64_t inode;          /* of the socket: whether fd is still this one */
    _Atomic int *tallies[2]; /* counters of others that count it from peers_add() to peers_remove(); may be NULL */
    struct request *request; /* the web server's thread: what is received or answered on it, NULL between two */

    /* The sweep's: what it saw, since when that has not changed, and whether it has asked the socket since. */
    int seen_phase;
    uint64_t seen_bytes;
    int64_t seen_ms, seen_since_ms;
    bool asked;
};

/* How long each phase may take. */
struct peer_limits {
    int64_t head_ms;  /* OPENED, HEAD: all of it */
    int64_t idle_ms;  /* IDLE: all of it */
    int64_t stall_ms; /* BODY: from one byte to the next */
    int64_t
        transfer_ms; /* BODY, SEND: this and 1 ms for each KiB that moved, that is at least 1 MiB/s in the long run */
};

struct peers {
    pthread_mutex_t lock;
    struct peer *first;
    struct peer **by_fd; /* [capacity], by descriptor */
    int capacity;
    _Atomic int count;
    struct lingering linger; /* their sockets, where the end of an answer is still on its way */
};

void peers_init(struct peers *peers);
void peers_clear(struct peers *peers);

/* An accepted socket that the web server is about to be given; from the thread that accepts. It is counted in `peers`
 * and in both tallies until it is removed. NULL when out of memory: close it. */
struct peer *peers_add(struct peers *peers, int fd, bool plain, _Atomic int *tally, _Atomic int *other_tally);
/* The web server begins with a socket. */
struct peer *peers_take(struct peers *peers, int fd);
/* The web server is done with it, and its fd is still open; or never took it. Frees it. A socket that the web server
 * closes without a word (it had no memory for it) is found by the next sweep, or when its number comes again. */
void peers_remove(struct peers *peers, struct peer *peer);

/* From the web server's thread. False when the peer has been cut: stop working for it. */
bool peer_enter(struct peer *peer, enum peer_phase phase);
void peer_progress(struct peer *peer, uint64_t bytes);

/* Is this peer too slow? Pure, for tests. */
bool peer_expired(enum peer_phase phase, int64_t since_ms, uint64_t progress_bytes, int64_t now_ms,
                  const struct peer_limits *limits);

/* While draining, patience is short. */
struct peer_patience {
    int64_t silent_ms;  /* OPENED, IDLE: has said nothing for so long */
    int64_t stalled_ms; /* HEAD, BODY, SEND: has not moved for so long */
};

/* Cuts those that are too slow, and with `patience` (may be NULL) those that hold up the end; a plain one that was
 * sending hears 408 first. Returns how many were cut. */
int peers_sweep(struct peers *peers, int64_t now_ms, const struct peer_limits *limits,
                const struct peer_patience *patience);
/* Cuts all, whatever they do. */
void peers_cut_all(struct peers *peers);

/* Writes the problem document of `error` to the socket, past the web server, and shuts it down. For what libmicrohttpd
 * cannot answer: 408 and 413 in the middle of a body; and for what it answers badly. request_id: NULL makes one. */
void peer_cut_with(struct peer *peer, proto_error error, const char *request_id);

#endif
