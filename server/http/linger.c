/* linger.c: see linger.h. A socket is in the table exactly as long as the table's descriptor of it is open. */
#include "server/http/linger.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdbool.h>
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

/* False: the connection has closed its side, or the connection is broken. */
static bool drop_unread(int fd)
{
    char dropped[LINGER_DROP_BYTES];
    ssize_t count = 1;
    for (int i = 0; i < LINGER_DROP_PIECES && count > 0; i++) count = recv(fd, dropped, sizeof dropped, MSG_DONTWAIT);
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
        (void)drop_unread(linger->sockets[linger->count - 1].fd);
        close_at(linger, linger->count - 1);
    }
    pthread_mutex_destroy(&linger->lock);
}

void linger_on(struct lingering *linger, int fd)
{
    if (!drop_unread(fd) || is_delivered(fd)) return;
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return; /* no descriptor left: the end of the answer is in luck's hands */
    shutdown(own, SHUT_WR);
    pthread_mutex_lock(&linger->lock);
    if (linger->count == LINGER_MOST) close_at(linger, 0);
    linger->sockets[linger->count].fd = own;
    linger->sockets[linger->count++].until_ms = clock_ms() + LINGER_MS;
    pthread_mutex_unlock(&linger->lock);
}

void linger_sweep(struct lingering *linger, int64_t now_ms)
{
    pthread_mutex_lock(&linger->lock);
    for (int i = linger->count - 1; i >= 0; i--)
        if (!drop_unread(linger->sockets[i].fd) || is_delivered(linger->sockets[i].fd) ||
            now_ms >= linger->sockets[i].until_ms)
            close_at(linger, i);
    pthread_mutex_unlock(&linger->lock);
}
