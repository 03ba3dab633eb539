/* lingering_close.h: sockets whose last answer is still on its way when their connection ends, or whose
 * client still sends.
 *
 * The problem: a socket that is closed answers whatever its client sends afterwards, or has sent and nobody has read,
 * with a reset, and the system then throws away what it had not yet delivered: the end of the last answer. A client may
 * well send more behind its last request: the next one in a pipe after one of HTTP/1.0,
 * or the rest of a body after a 413.
 *
 * The idea (RFC 9112, section 9.6): such a socket stays open a little longer, shut down for writing; what arrives is
 * dropped; it is closed as soon as everything has been delivered or the client has closed too, at the latest after
 * LINGER_MS. Only a socket with undelivered bytes comes here, so a fast client costs one system call.
 *
 * Many clients send all of a request before they read anything. Where a request was refused before all of it had come
 * (LINGER_DROP), the delivery of its answer does not end the wait. What arrives is dropped until the client closes its
 * side, or for --discard-ms, or until --discard-bytes have come. The loop drops bytes as fast as they come. No thread
 * and no connection's place waits for them. */
#ifndef LINGERING_CLOSE_H
#define LINGERING_CLOSE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/base/limits.h"

enum lingering_close_why {
    LINGER_DELIVER, /* the end of the answer is to be delivered */
    LINGER_DROP,    /* as DELIVER, and what the client still sends is to be dropped */
    LINGER_CUT,     /* as DELIVER, but the socket was shut down for reading too: see reset_on_close() */
};

struct lingering {
    pthread_mutex_t lock;
    int epoll_fd; /* readable when one of the sockets is, those that were cut excepted; -1: there is no epoll_fd */
    int most;     /* sockets, at most LINGER_MOST */
    int end_fd;   /* from this number on, descriptors are for connections alone */
    int64_t drop_bytes, drop_ms;
    int count;
    struct {
        int fd;
        enum lingering_close_why why;
        int64_t until_ms;
        int64_t left_bytes; /* number of bytes that may still be dropped before the socket is closed */
    } sockets[LINGER_MOST]; /* in order of arrival */
};

void lingering_close_init(struct lingering *linger);
/* Sets the limits. Without this call they are LINGER_MOST sockets, and only bytes that are there are dropped. */
void lingering_close_limit(struct lingering *linger, int most, int64_t drop_bytes, int64_t drop_ms);
/* Closes all sockets that still linger. */
void lingering_close_clear(struct lingering *linger);

/* Call this from any thread, when all is written to `fd` and before its owner closes it. It drops what is unread. Where
 * something is undelivered, or may still come, it keeps the socket, by a descriptor of its own, until it is time. */
void lingering_close_on(struct lingering *linger, int fd, enum lingering_close_why why);
/* Drops the bytes that have arrived. The loop calls this when epoll_fd is readable. */
void lingering_close_drop(struct lingering *linger);
/* Closes the sockets whose time is over. The loop calls this periodically. */
void lingering_close_sweep(struct lingering *linger, int64_t now_ms);

#endif
