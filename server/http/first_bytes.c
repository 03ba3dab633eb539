/* first_bytes.c: looks at the first bytes of connections; see first_bytes.h.
 *
 * libmicrohttpd and GnuTLS do not report bytes that they could not understand. Their calls of recv() are bound to the
 * recv() of this file. */
/* fortified headers define an inline recv(), which would conflict with the one here */
#undef _FORTIFY_SOURCE
#include "server/http/first_bytes.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>

#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/base/peer.h"

enum { PLAIN = 1, TLS = 2, BEGINS = 4 };

/* For each socket, indexed by its descriptor: the protocol of its port (PLAIN or TLS), plus the flag BEGINS until the
 * first bytes arrive. */
static _Atomic uint8_t state_of[FIRST_BYTES_SOCKETS];
static _Thread_local int last_fd = -1; /* the socket on which this thread received bytes last */

enum first_bytes first_bytes_of(const void *bytes, size_t count, bool tls)
{
    static const char preface[] = "PRI * HTTP/2";
    const uint8_t *const b = bytes;
    size_t letters = 0;
    if (count >= 3 && memcmp(b, preface, count < sizeof preface - 1 ? count : sizeof preface - 1) == 0)
        return FIRST_BYTES_HTTP2;
    if (!tls) return count >= 2 && b[0] == 0x16 && b[1] == 0x03 ? FIRST_BYTES_TLS : FIRST_BYTES_NOTHING;
    while (letters < count && b[letters] >= 'A' && b[letters] <= 'Z') letters++;
    return letters >= 3 ? FIRST_BYTES_PLAIN : FIRST_BYTES_NOTHING;
}

void first_bytes_expect(int fd, bool tls)
{
    if (fd >= 0 && fd < FIRST_BYTES_SOCKETS) atomic_store(&state_of[fd], BEGINS | (tls ? TLS : PLAIN));
}

bool first_bytes_is_due(struct first_bytes_turn *turn, int64_t now_ms, uint64_t *count)
{
    *count = ++turn->left_out;
    if (turn->next_ms != 0 && now_ms < turn->next_ms) return false;
    *turn = (struct first_bytes_turn){ now_ms + FIRST_BYTES_LOG_MS, 0 };
    return true;
}

static void tell(enum first_bytes what, int fd)
{
    static const char *const reasons[FIRST_BYTES_COUNT] = {
#define X(id, reason) reason,
        FIRST_BYTES_MAP(X)
#undef X
    };
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct first_bytes_turn turns[FIRST_BYTES_COUNT];
    struct sockaddr_storage address = { .ss_family = AF_UNSPEC };
    socklen_t length = sizeof address;
    char peer[PEER_BYTES];
    uint64_t count;
    pthread_mutex_lock(&lock);
    const bool due = first_bytes_is_due(&turns[what], clock_ms(), &count);
    pthread_mutex_unlock(&lock);
    if (!due) return;
    (void)getpeername(fd, (struct sockaddr *)&address, &length);
    log_event(LOG_WARN, NULL, "wrong_protocol", "peer=%s connections=%llu reason=" LOG_Q,
              peer_text((const struct sockaddr *)&address, peer), (unsigned long long)count, reasons[what]);
}

void first_bytes_tell_in_tls(void)
{
    if (last_fd >= 0 && atomic_load(&state_of[last_fd]) == TLS) tell(FIRST_BYTES_HTTP2, last_fd);
}

/* Replaces libc's recv() in the whole process, including its libraries. */
ssize_t recv(int fd, void *bytes, size_t capacity, int flags)
{
    const ssize_t count = recvfrom(fd, bytes, capacity, flags, NULL, NULL);
    if (count > 0 && fd < FIRST_BYTES_SOCKETS && !(flags & MSG_PEEK)) {
        const uint8_t state = atomic_load_explicit(&state_of[fd], memory_order_relaxed);
        last_fd = fd;
        if (state & BEGINS) {
            const bool tls = state & TLS;
            const enum first_bytes what = first_bytes_of(bytes, (size_t)count, tls);
            atomic_store_explicit(&state_of[fd], tls ? TLS : PLAIN, memory_order_relaxed);
            if (what != FIRST_BYTES_NOTHING) tell(what, fd);
        }
    }
    return count;
}
