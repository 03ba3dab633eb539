/* linger.h: sockets whose last answer is still on its way when their connection ends.
 *
 * The problem: a socket that is closed answers whatever its client sends afterwards, or has sent and nobody has read,
 * with a reset, and the system then throws away what it had not yet delivered: the end of the last answer. A client may
 * well send more behind its last request: the next one in a pipe after one of HTTP/1.0,
 * or the rest of a body after a 413.
 *
 * The idea (RFC 9112, section 9.6): such a socket stays open a little longer, shut down for writing; what arrives is
 * dropped; it is closed as soon as everything has been delivered or the client has closed too, at the latest after
 * LINGER_MS. Only a socket with undelivered bytes comes here, so a fast client costs one system call. */
#ifndef LINGER_H
#define LINGER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/base/limits.h"

struct lingering {
    pthread_mutex_t lock;
    int count;
    struct {
        int fd;
        bool cut;
        int64_t until_ms;
    } sockets[LINGER_MOST]; /* by until_ms */
};

void linger_init(struct lingering *linger);
/* Closes what is left. */
void linger_clear(struct lingering *linger);

/* From any thread, before `fd` is closed by its owner, who has written all that he will: drops what is unread, and
 * where something is undelivered, keeps the socket (a descriptor of its own) until the sweep closes it. `cut`: it has
 * been shut down for reading too, see reset_on_close(). */
void linger_on(struct lingering *linger, int fd, bool cut);
/* From the loop, now and then: closes those whose time has come. */
void linger_sweep(struct lingering *linger, int64_t now_ms);

#endif
