/* lingering_close.h: keeps a socket open for a short time after its connection has ended, while its last answer is not
 * delivered or its client still sends.
 *
 * The problem: if a socket is closed while it has unread bytes, or bytes arrive after it was closed, the system sends a
 * reset. The reset discards data that is not delivered yet, such as the end of the last answer. Clients often do send
 * more bytes, such as the next request of a pipeline, or the rest of a body after a 413 answer.
 *
 * The idea (RFC 9112, section 9.6): the socket is shut down for writing but stays open a little longer, and arriving
 * bytes are dropped. The socket is closed as soon as everything has been delivered or the client has closed too, and at
 * the latest after LINGER_MS. Only a socket with undelivered bytes is kept, so a client that reads fast costs only one
 * system call.
 *
 * Many clients send all of a request before they read anything. If a request was refused before all of it had arrived
 * (LINGER_DROP), the delivery of its answer does not end the wait. Arriving bytes are dropped until the client closes
 * its side, --discard-ms have passed, or --discard-bytes have arrived. The main thread drops bytes as fast as they
 * arrive. No thread waits for these sockets, and they do not count as connections. */
#ifndef LINGERING_CLOSE_H
#define LINGERING_CLOSE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/base/limits.h"

enum lingering_close_why {
    LINGER_DELIVER, /* the socket stays open until the end of the answer has been delivered */
    /* even if the answer has been delivered, the socket stays open and bytes from the client are dropped, until the
     * client closes its side or a limit is reached */
    LINGER_DROP,
    /* the socket, which was also shut down for reading (see reset_on_close()), stays open until the answer has been
     * delivered */
    LINGER_CUT,
};

struct lingering {
    pthread_mutex_t lock;
    /* Descriptor of an epoll set of those kept sockets that are still open for reading. The descriptor is readable when
     * bytes have arrived on one of the sockets. -1: there is no set. */
    int epoll_fd;
    int most; /* the largest number of sockets that may be kept open at a time, at most LINGER_MOST */
    /* a socket is kept open only under a descriptor number below this one, because larger numbers are reserved for
     * connections */
    int end_fd;
    int64_t drop_bytes, drop_ms;
    int count;
    struct {
        int fd;
        enum lingering_close_why why;
        int64_t until_ms;
        int64_t left_bytes; /* number of bytes that may still be dropped before the socket is closed */
    } sockets[LINGER_MOST]; /* the sockets in lingering close, in order of arrival */
};

void lingering_close_init(struct lingering *linger);
/* Sets the limits on kept sockets. Without this call, at most LINGER_MOST sockets are kept, and only bytes that have
 * already arrived are dropped. */
void lingering_close_limit(struct lingering *linger, int most, int64_t drop_bytes, int64_t drop_ms);
/* Closes all sockets that are still in lingering close. */
void lingering_close_clear(struct lingering *linger);

/* Call this after everything was written to `fd` and before its owner closes it; any thread may call it. Drops
 * unread bytes. If the answer is not delivered yet, or more bytes may still arrive, keeps the socket open by a
 * duplicate descriptor. */
void lingering_close_on(struct lingering *linger, int fd, enum lingering_close_why why);
/* Drops bytes that have arrived on the sockets. The main thread calls this when epoll_fd is readable. */
void lingering_close_drop(struct lingering *linger);
/* Closes the sockets whose time is over or whose answers are delivered. The main thread calls this periodically. */
void lingering_close_sweep(struct lingering *linger, int64_t now_ms);

#endif
