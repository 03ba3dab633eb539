/* lingering_close.c: keeps sockets open for a short time after their connections have ended; see lingering_close.h. A
 * table has a duplicate descriptor of each socket. */
#include "server/http/lingering_close.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/base/clock.h"
#include "server/base/limits.h"

void lingering_close_init(struct lingering *linger)
{
    pthread_mutex_init(&linger->lock, NULL);
    linger->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    linger->count = 0;
    lingering_close_limit(linger, LINGER_MOST, 0, 0);
}

void lingering_close_limit(struct lingering *linger, int most, int64_t drop_bytes, int64_t drop_ms)
{
    struct rlimit files;
    const bool limited = getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur <= INT_MAX;
    linger->end_fd = limited ? (int)files.rlim_cur - LINGER_SPARE_FILES : INT_MAX;
    linger->most = most;
    linger->drop_bytes = drop_bytes;
    linger->drop_ms = drop_ms;
}

/* Reads and drops at most `pieces` pieces of LINGER_DROP_BYTES, and subtracts their bytes from *left_bytes. Returns
 * false if the client has closed its side or the connection is broken. */
static bool drop_unread(int fd, int pieces, int64_t *left_bytes)
{
    char dropped[LINGER_DROP_BYTES];
    ssize_t count = 1;
    for (int i = 0; i < pieces && count > 0; i++) {
        count = recv(fd, dropped, sizeof dropped, MSG_DONTWAIT | MSG_TRUNC);
        if (count > 0) *left_bytes -= count;
    }
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

static bool is_delivered(int fd)
{
    int bytes = 0;
    return ioctl(fd, SIOCOUTQ, &bytes) != 0 || bytes == 0;
}

/* Closes kept socket i and removes it from the table. Call this with the lock held. */
static void close_at(struct lingering *linger, int i)
{
    const int fd = linger->sockets[i].fd;
    /* close() alone would not remove the socket from the epoll set while the web server has another descriptor of it */
    (void)epoll_ctl(linger->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
    close(fd);
    linger->count--;
    memmove(&linger->sockets[i], &linger->sockets[i + 1], (size_t)(linger->count - i) * sizeof linger->sockets[0]);
}

void lingering_close_clear(struct lingering *linger)
{
    while (linger->count > 0) {
        int64_t left = 0;
        (void)drop_unread(linger->sockets[linger->count - 1].fd, LINGER_DROP_PIECES, &left);
        close_at(linger, linger->count - 1);
    }
    if (linger->epoll_fd >= 0) close(linger->epoll_fd);
    pthread_mutex_destroy(&linger->lock);
}

/* Makes close() reset a socket that was shut down for reading. The receive window of such a socket never grows again,
 * so without a reset a client that still sends its body would wait for ever. */
static void reset_on_close(int fd)
{
    const struct linger at_once = { .l_onoff = 1, .l_linger = 0 };
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

/* Drops the bytes that the client has sent. Returns whether the socket may be closed. If the socket was shut down for
 * reading (LINGER_CUT), recv() reports the end of the data even if the client still sends. Such a socket may be closed
 * when the answer is delivered. */
static bool may_close(int fd, enum lingering_close_why why, int pieces, int64_t *left_bytes)
{
    const bool open = drop_unread(fd, pieces, left_bytes), delivered = is_delivered(fd);
    if (why == LINGER_CUT && delivered) reset_on_close(fd);
    if (why == LINGER_DROP) return !open || *left_bytes <= 0;
    return delivered || (!open && why != LINGER_CUT);
}

void lingering_close_on(struct lingering *linger, int fd, enum lingering_close_why why)
{
    int64_t left_bytes = linger->drop_bytes;
    if (why == LINGER_DROP && linger->drop_bytes == 0) why = LINGER_DELIVER;
    if (may_close(fd, why, LINGER_DROP_PIECES, &left_bytes)) return;
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    /* Descriptors from end_fd on are reserved for connections. If no smaller one is free, the socket is closed at once,
     * and the client may not receive the end of the answer. */
    if (own < 0 || own >= linger->end_fd) {
        if (own >= 0) close(own);
        return;
    }
    shutdown(own, SHUT_WR);
    struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP, .data.fd = own };
    pthread_mutex_lock(&linger->lock);
    if (linger->count == linger->most) close_at(linger, 0);
    const int i = linger->count++;
    linger->sockets[i].fd = own;
    linger->sockets[i].why = why;
    linger->sockets[i].until_ms = clock_ms() + (why == LINGER_DROP ? linger->drop_ms : LINGER_MS);
    linger->sockets[i].left_bytes = left_bytes;
    if (why != LINGER_CUT) (void)epoll_ctl(linger->epoll_fd, EPOLL_CTL_ADD, own, &event);
    pthread_mutex_unlock(&linger->lock);
}

/* Drops received bytes of socket i, and returns whether it may be closed. `of` is the number of sockets that this round
 * looks at: the fewer there are, the more bytes are dropped from each. Call this with the lock held. */
static bool look_at(struct lingering *linger, int i, int of)
{
    const int share = LINGER_SWEEP_PIECES / of, pieces = share < LINGER_DROP_PIECES ? share : LINGER_DROP_PIECES;
    return may_close(linger->sockets[i].fd, linger->sockets[i].why, pieces > 0 ? pieces : 1,
                     &linger->sockets[i].left_bytes);
}

void lingering_close_drop(struct lingering *linger)
{
    struct epoll_event events[LINGER_EVENTS];
    pthread_mutex_lock(&linger->lock);
    const int count = epoll_wait(linger->epoll_fd, events, LINGER_EVENTS, 0);
    for (int e = 0; e < count; e++)
        for (int i = 0; i < linger->count; i++)
            if (linger->sockets[i].fd == events[e].data.fd) {
                if (look_at(linger, i, count)) close_at(linger, i);
                break;
            }
    pthread_mutex_unlock(&linger->lock);
}

void lingering_close_sweep(struct lingering *linger, int64_t now_ms)
{
    pthread_mutex_lock(&linger->lock);
    for (int i = linger->count - 1; i >= 0; i--)
        if (look_at(linger, i, linger->count) || now_ms >= linger->sockets[i].until_ms) close_at(linger, i);
    pthread_mutex_unlock(&linger->lock);
}
