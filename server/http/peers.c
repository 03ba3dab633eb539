/* peers.c: the table of connections and the sweep over it.
 *
 * Three parties touch a peer: the web server's thread that owns the connection (phase, progress), the sweep in the
 * loop, and the end of the connection. Invariants:
 * 1. A peer is removed in libmicrohttpd's CLOSED notification, while its fd is still open, under the table's lock.
 * The sweep holds that lock: it can never shut down a number that belongs to somebody else by now.
 * 2. The sweep cuts by compare-and-swap from the phase it has judged to CUT. Whoever loses that race yields: a
 * request whose body was completed in the same moment is served, or its thread sees CUT and stops; never both.
 * 3. since_ms is stored before phase: a reader that sees the new phase sees its time too.
 * 4. A peer is in the table, and counted, from before libmicrohttpd gets its socket until that is closed, whatever
 * becomes of it in between: libmicrohttpd tells of the connections that it began with, but closes one for which it has
 * no memory without a word. Such a peer stays ADDED while its number stands for nothing or for something else. */
#include "server/http/peers.h"

#include <assert.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/work/request.h"
#include "server/http/refusal.h"
#include "server/http/tcp.h"

void peers_init(struct peers *peers)
{
    pthread_mutex_init(&peers->lock, NULL);
    peers->first = NULL;
    peers->by_fd = NULL;
    peers->capacity = 0;
    atomic_init(&peers->count, 0);
    linger_init(&peers->linger);
}

void peers_clear(struct peers *peers)
{
    while (peers->first) peers_remove(peers, peers->first);
    assert(atomic_load(&peers->count) == 0);
    free(peers->by_fd);
    linger_clear(&peers->linger);
    pthread_mutex_destroy(&peers->lock);
}

/* What is open under this number; 0: nothing. */
static uint64_t inode_of(int fd)
{
    struct stat sb;
    return fstat(fd, &sb) == 0 && S_ISSOCK(sb.st_mode) ? sb.st_ino : 0;
}

/* Under the lock. Room for descriptors up to `fd`; they are the lowest that are free, so there are about as many as
 * connections. */
static bool reserve(struct peers *peers, int fd)
{
    int capacity = peers->capacity > 0 ? peers->capacity : 256;
    while (capacity <= fd)
        if (__builtin_mul_overflow(capacity, 2, &capacity)) return false;
    if (capacity == peers->capacity) return true;
    struct peer **by_fd = realloc(peers->by_fd, (size_t)capacity * sizeof(struct peer *));
    if (by_fd == NULL) return false;
    memset(by_fd + peers->capacity, 0, (size_t)(capacity - peers->capacity) * sizeof(struct peer *));
    peers->by_fd = by_fd;
    peers->capacity = capacity;
    return true;
}

/* Under the lock. */
static void drop(struct peers *peers, struct peer *peer)
{
    assert(peers->by_fd[peer->fd] == peer); /* invariant 4: it is in the table, once */
    assert(peer->previous ? peer->previous->next == peer : peers->first == peer);
    *(peer->previous ? &peer->previous->next : &peers->first) = peer->next;
    if (peer->next) peer->next->previous = peer->previous;
    peers->by_fd[peer->fd] = NULL;
    for (int i = 0; i < 2; i++)
        if (peer->tallies[i]) atomic_fetch_sub_explicit(peer->tallies[i], 1, memory_order_relaxed);
    atomic_fetch_sub(&peers->count, 1);
    free(peer);
}

/* Under the lock. The web server has closed it without having begun with it. */
static void drop_lost(struct peers *peers, struct peer *peer)
{
    drop(peers, peer);
    metrics_add(METRIC_REJECTED, "connections", NULL, 1);
    log_event(LOG_WARN, NULL, "refused", "reason=memory connections=%d", atomic_load(&peers->count));
}

struct peer *peers_add(struct peers *peers, int fd, bool plain, _Atomic int *tally, _Atomic int *other_tally)
{
    struct peer *peer = calloc(1, sizeof *peer);
    if (peer == NULL) return NULL;
    peer->fd = fd;
    peer->plain = plain;
    peer->inode = inode_of(fd);
    peer->tallies[0] = tally;
    peer->tallies[1] = other_tally;
    atomic_init(&peer->phase, PEER_ADDED);
    atomic_init(&peer->since_ms, clock_ms());
    pthread_mutex_lock(&peers->lock);
    if (!reserve(peers, fd)) {
        pthread_mutex_unlock(&peers->lock);
        free(peer);
        return NULL;
    }
    if (peers->by_fd[fd]) drop_lost(peers, peers->by_fd[fd]); /* its number would not be given again before it ended */
    peers->by_fd[fd] = peer;
    peer->next = peers->first;
    if (peer->next) peer->next->previous = peer;
    peers->first = peer;
    for (int i = 0; i < 2; i++)
        if (peer->tallies[i]) atomic_fetch_add_explicit(peer->tallies[i], 1, memory_order_relaxed);
    atomic_fetch_add(&peers->count, 1);
    pthread_mutex_unlock(&peers->lock);
    return peer;
}

struct peer *peers_take(struct peers *peers, int fd)
{
    pthread_mutex_lock(&peers->lock);
    struct peer *peer = fd < peers->capacity ? peers->by_fd[fd] : NULL;
    pthread_mutex_unlock(&peers->lock);
    if (peer) (void)peer_enter(peer, PEER_OPENED); /* it may have been cut already */
    return peer;
}

void peers_remove(struct peers *peers, struct peer *peer)
{
    pthread_mutex_lock(&peers->lock);
    drop(peers, peer);
    pthread_mutex_unlock(&peers->lock);
}

bool peer_enter(struct peer *peer, enum peer_phase phase)
{
    int seen = atomic_load_explicit(&peer->phase, memory_order_acquire);
    if (seen == PEER_CUT) return false;
    if (seen == (int)phase) return true;
    atomic_store_explicit(&peer->progress_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&peer->since_ms, clock_ms(), memory_order_relaxed);
    return atomic_compare_exchange_strong_explicit(&peer->phase, &seen, phase, memory_order_acq_rel,
                                                   memory_order_acquire);
}

void peer_progress(struct peer *peer, uint64_t bytes)
{
    atomic_store_explicit(&peer->progress_bytes, bytes, memory_order_relaxed);
}

bool peer_expired(enum peer_phase phase, int64_t since_ms, uint64_t progress_bytes, int64_t now_ms,
                  const struct peer_limits *limits)
{
    const int64_t elapsed = now_ms - since_ms;
    switch (phase) {
    case PEER_OPENED:
    case PEER_HEAD: return elapsed > limits->head_ms;
    case PEER_IDLE: return elapsed > limits->idle_ms;
    case PEER_BODY:
    case PEER_SEND: return elapsed - (int64_t)(progress_bytes / PEER_BYTES_PER_MS) > limits->transfer_ms;
    default: return false; /* WORK has a deadline of its own; CUT is done */
    }
}

static bool has_unread(const struct peer *peer)
{
    int unread = 0;
    return ioctl(peer->fd, FIONREAD, &unread) == 0 && unread > 0;
}

/* Has this peer sent nothing that we have not read? For a connection that never spoke the kernel knows; where it
 * does not (a unix socket), the answer is no, and the head's deadline decides. */
static bool is_silent(const struct peer *peer, enum peer_phase phase)
{
    if (has_unread(peer)) return false;
    return phase == PEER_IDLE || tcp_is_mute(peer->fd);
}

void peer_cut_with(struct peer *peer, proto_error error, const char *request_id)
{
    atomic_store(&peer->phase, PEER_CUT);
    if (peer->plain) refusal_send(peer->fd, error, NULL, request_id);
    shutdown(peer->fd, SHUT_RDWR);
}

/* Has anything changed since the last sweep? */
static bool has_moved(struct peer *peer, int phase, int64_t since_ms, uint64_t bytes, int64_t now_ms)
{
    if (phase == peer->seen_phase && bytes == peer->seen_bytes && since_ms == peer->seen_since_ms && peer->seen_ms != 0)
        return false;
    peer->seen_phase = phase;
    peer->seen_bytes = bytes;
    peer->seen_since_ms = since_ms;
    peer->seen_ms = now_ms;
    peer->asked = false;
    return true;
}

/* Whoever stands still where he should send may have left with his last bytes. One look is enough: a FIN that comes
 * later is an edge of its own. Only for phases in which nothing can follow that we would still answer. */
static bool has_left(struct peer *peer, int phase)
{
    struct pollfd poll_fd = { .fd = peer->fd, .events = POLLRDHUP };
    int unread = 0;
    if (peer->asked || (phase != PEER_OPENED && phase != PEER_HEAD && phase != PEER_BODY && phase != PEER_IDLE))
        return false;
    peer->asked = true;
    if (poll(&poll_fd, 1, 0) <= 0 || !(poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR))) return false;
    return ioctl(peer->fd, FIONREAD, &unread) != 0 || unread == 0;
}

/* Does this peer, which has not moved lately, hold up a drain? */
static bool is_tiresome(const struct peer *peer, int phase, int64_t since_ms, int64_t now_ms,
                        const struct peer_patience *patience)
{
    const bool stalled = now_ms - peer->seen_ms >= patience->stalled_ms;
    switch (phase) {
    case PEER_OPENED: return now_ms - since_ms >= patience->silent_ms && (stalled || is_silent(peer, PEER_OPENED));
    case PEER_IDLE: return now_ms - since_ms >= patience->silent_ms && is_silent(peer, PEER_IDLE);
    case PEER_HEAD:
    case PEER_BODY:
    case PEER_SEND: return stalled;
    default: return false;
    }
}

int peers_sweep(struct peers *peers, int64_t now_ms, const struct peer_limits *limits,
                const struct peer_patience *patience)
{
    int cut = 0;
    pthread_mutex_lock(&peers->lock);
    for (struct peer *peer = peers->first, *next; peer; peer = next) {
        next = peer->next;
        int phase = atomic_load_explicit(&peer->phase, memory_order_acquire);
        const int64_t since = atomic_load_explicit(&peer->since_ms, memory_order_relaxed);
        const uint64_t bytes = atomic_load_explicit(&peer->progress_bytes, memory_order_relaxed);
        const bool moved = has_moved(peer, phase, since, bytes, now_ms);
        if (phase == PEER_ADDED) {
            if (!moved && inode_of(peer->fd) != peer->inode) drop_lost(peers, peer);
            continue;
        }
        /* What was sent and not read is our delay. */
        const bool stalled = phase == PEER_BODY && !moved && now_ms - peer->seen_ms > limits->stall_ms &&
                             !has_unread(peer);
        const bool expired = stalled || peer_expired((enum peer_phase)phase, since, bytes, now_ms, limits);
        const bool tiresome = patience && !moved && is_tiresome(peer, phase, since, now_ms, patience);
        const bool sending = phase == PEER_OPENED || phase == PEER_HEAD || phase == PEER_BODY;
        if (!moved && has_left(peer, phase)) {
            shutdown(peer->fd, SHUT_RDWR); /* an edge: the web server sees the end now */
            continue;
        }
        if (!expired && !tiresome) continue;
        if (!atomic_compare_exchange_strong(&peer->phase, &phase, PEER_CUT)) continue;
        if (sending && peer->plain && !(tiresome && phase == PEER_OPENED))
            refusal_send(peer->fd, PROTO_E_REQUEST_TIMEOUT, NULL, NULL);
        shutdown(peer->fd, SHUT_RDWR);
        cut++;
    }
    pthread_mutex_unlock(&peers->lock);
    return cut;
}

void peers_cut_all(struct peers *peers)
{
    pthread_mutex_lock(&peers->lock);
    for (struct peer *peer = peers->first; peer; peer = peer->next) {
        if (inode_of(peer->fd) != peer->inode) continue; /* invariant 4: the number is not its own any more */
        atomic_store(&peer->phase, PEER_CUT);
        shutdown(peer->fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&peers->lock);
}
