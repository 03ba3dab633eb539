/* lingering_close.h: keeps a socket open for a short time after its connection has ended, while its last answer is not
 * delivered or its client still sends.
 *
 * If a socket is closed while it has unread bytes, or if bytes arrive after that, the kernel sends a reset. The reset
 * discards the undelivered end of the answer. The socket is therefore only shut down for writing, and arriving bytes
 * are dropped (RFC 9112, section 9.6). It is closed when everything is delivered or the client has closed too, and at
 * the latest after LINGER_MS.
 *
 * Many clients send all of a request before they read. After the refusal of an incomplete request (LINGER_DROP), bytes
 * are therefore dropped until the client closes its side, --discard-ms have passed, or --discard-bytes have arrived. No
 * thread waits for these sockets, and they do not count as connections. */
#ifndef LINGERING_CLOSE_H
#define LINGERING_CLOSE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/base/limits.h"

enum lingering_close_why {
    LINGER_DELIVER, /* the socket stays open until the answer has been delivered or the client has closed its side */
    /* the socket stays open, and bytes are dropped, until the client closes its side or a limit is reached */
    LINGER_DROP,
    /* The socket stays open until the answer has been delivered, even if the client seems to have closed its side. The
     * socket was shut down for reading, so recv() reports the end of the data in any case. When the answer has been
     * delivered, reset_on_close() is called. */
    LINGER_CUT,
};

struct lingering {
    pthread_mutex_t lock;
    /* Epoll set of the kept sockets that are open for reading. It is readable when bytes have arrived. -1: none. */
    int epoll_fd;
    int most; /* largest number of sockets that may be kept open, at most LINGER_MOST */
    /* descriptors from this number on are reserved for connections; kept sockets have lower numbers */
    int end_fd;
    int64_t drop_bytes, drop_ms;
    int count;
    struct {
        int fd;
        enum lingering_close_why why;
        int64_t until_ms;
        int64_t left_bytes; /* bytes that may still be dropped before the socket is closed */
    } sockets[LINGER_MOST];
};

void lingering_close_init(struct lingering *linger);
/* Sets the limits on kept sockets. Without this call, at most LINGER_MOST sockets are kept, and only bytes that have
 * already arrived are dropped. */
void lingering_close_limit(struct lingering *linger, int most, int64_t drop_bytes, int64_t drop_ms);
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
