/* linger.c: see linger.h. A socket is in the table exactly as long as the table's descriptor of it is open. */
#include "server/http/linger.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/base/clock.h"
#include "server/base/limits.h"

void linger_init(struct lingering *linger)
{
    pthread_mutex_init(&linger->lock, NULL);
    linger->count = 0;
}

/* At most `pieces` of LINGER_DROP_BYTES. False: the client has closed its side, or the connection is broken. */
static bool drop_unread(int fd, int pieces)
{
    char dropped[LINGER_DROP_BYTES];
    ssize_t count = 1;
    for (int i = 0; i < pieces && count > 0; i++) count = recv(fd, dropped, sizeof dropped, MSG_DONTWAIT);
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

static bool is_delivered(int fd)
{
    int bytes = 0;
    return ioctl(fd, SIOCOUTQ, &bytes) != 0 || bytes == 0;
}

/* Under the lock. */
static void close_at(struct lingering *linger, int i)
{
    close(linger->sockets[i].fd);
    linger->count--;
    memmove(&linger->sockets[i], &linger->sockets[i + 1], (size_t)(linger->count - i) * sizeof linger->sockets[0]);
}

void linger_clear(struct lingering *linger)
{
    while (linger->count > 0) {
        (void)drop_unread(linger->sockets[linger->count - 1].fd, LINGER_DROP_PIECES);
        close_at(linger, linger->count - 1);
    }
    pthread_mutex_destroy(&linger->lock);
}

/* After shutdown() for reading the system announces no room any more, whatever is read: a client that is waiting for
 * some, to send the rest of its body, would wait for ever. A reset ends that, and the answer is there already. */
static void reset_on_close(int fd)
{
    const struct linger at_once = { .l_onoff = 1, .l_linger = 0 };
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

/* May it be closed, now that it is prepared for that? A cut one reads as ended whatever its client does: of that only
 * the delivery counts. */
static bool may_close(int fd, bool cut, int pieces)
{
    const bool open = drop_unread(fd, pieces), delivered = is_delivered(fd);
    if (cut && delivered) reset_on_close(fd);
    return delivered || (!open && !cut);
}

void linger_on(struct lingering *linger, int fd, bool cut)
{
    if (may_close(fd, cut, LINGER_DROP_PIECES)) return;
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return; /* no descriptor left: the end of the answer is in luck's hands */
    shutdown(own, SHUT_WR);
    pthread_mutex_lock(&linger->lock);
    if (linger->count == LINGER_MOST) close_at(linger, 0);
    linger->sockets[linger->count].fd = own;
    linger->sockets[linger->count].cut = cut;
    linger->sockets[linger->count++].until_ms = clock_ms() + LINGER_MS;
    pthread_mutex_unlock(&linger->lock);
}

void linger_sweep(struct lingering *linger, int64_t now_ms)
{
    pthread_mutex_lock(&linger->lock);
    /* The fewer there are, the more of each: one that sends much is not to wait for LINGER_MS. */
    const int share = linger->count > 0 ? LINGER_SWEEP_PIECES / linger->count : 0,
              pieces = share < LINGER_DROP_PIECES ? share : LINGER_DROP_PIECES;
    for (int i = linger->count - 1; i >= 0; i--)
        if (may_close(linger->sockets[i].fd, linger->sockets[i].cut, pieces) || now_ms >= linger->sockets[i].until_ms)
            close_at(linger, i);
    pthread_mutex_unlock(&linger->lock);
}
