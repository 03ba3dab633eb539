/* connections.c: the table of connections, and the sweep with which the main thread cuts slow connections.
 *
 * Invariants
 * 1. libmicrohttpd's CLOSED notification removes a connection under the table's lock, while its fd is still open. The
 * sweep holds this lock, so it never shuts down a descriptor number that a new socket has taken over.
 * 2. The sweep cuts a connection by a compare-and-swap of its phase to CUT. If the HTTP thread changes the phase first,
 * the connection is not cut; otherwise the HTTP thread sees CUT and stops.
 * 3. since_ms is stored before phase, so a reader that sees the new phase also sees its time.
 * 4. If libmicrohttpd has no memory for a connection, it closes the socket without a report. The connection then stays
 * in the table in phase ADDED until its descriptor number is used again, or the sweep finds it. */
#include "server/http/connections.h"

#include <assert.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "server/base/clock.h"
#include "server/base/flow.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/http/exchange.h"
#include "server/http/refusal.h"
#include "server/http/tcp.h"

static const char *const labels[CONNECTION_PHASE_COUNT] = {
#define X(id, label) label,
    CONNECTION_PHASE_MAP(X)
#undef X
};

void connections_init(struct connections *connections)
{
    pthread_mutex_init(&connections->lock, NULL);
    connections->first = NULL;
    connections->by_fd = NULL;
    connections->capacity = 0;
    connections->old_count = 0;
    connections->old_tally = NULL;
    connections->looked_ms = 0;
    atomic_init(&connections->totals.count, 0);
    atomic_init(&connections->totals.bytes, 0);
    atomic_init(&connections->used_ms, 0);
    lingering_close_init(&connections->linger);
}

void connections_clear(struct connections *connections)
{
    while (connections->first) connections_remove(connections, connections->first);
    assert(atomic_load(&connections->totals.count) == 0 && atomic_load(&connections->totals.bytes) == 0);
    free(connections->by_fd);
    lingering_close_clear(&connections->linger);
    pthread_mutex_destroy(&connections->lock);
}

static uint64_t inode_of(int fd)
{
    struct stat sb;
    return fstat(fd, &sb) == 0 && S_ISSOCK(sb.st_mode) ? sb.st_ino : 0;
}

/* Makes room in the table for descriptor numbers up to `fd`. The kernel gives out the lowest free number, so the table
 * stays small. Call this with the lock held. */
static bool reserve(struct connections *connections, int fd)
{
    int capacity = connections->capacity > 0 ? connections->capacity : 256;
    while (capacity <= fd)
        if (__builtin_mul_overflow(capacity, 2, &capacity)) return false;
    if (capacity == connections->capacity) return true;
    struct connection **by_fd = realloc(connections->by_fd, (size_t)capacity * sizeof(struct connection *));
    if (by_fd == NULL) return false;
    memset(by_fd + connections->capacity, 0, (size_t)(capacity - connections->capacity) * sizeof(struct connection *));
    connections->by_fd = by_fd;
    connections->capacity = capacity;
    return true;
}

static int64_t open_bytes(const struct connection *connection)
{
    return HTTP_OPEN_BYTES + (connection->plain ? 0 : HTTP_TLS_BYTES);
}

void connections_count_request(struct connections *connections, int more)
{
    atomic_fetch_add_explicit(&connections->totals.bytes, more * (int64_t)HTTP_REQUEST_BYTES, memory_order_relaxed);
}

/* Removes a connection from the table and frees it. Call this with the lock held. */
static void drop(struct connections *connections, struct connection *connection)
{
    assert(connections->by_fd[connection->fd] == connection);
    assert(connection->previous ? connection->previous->next == connection : connections->first == connection);
    *(connection->previous ? &connection->previous->next : &connections->first) = connection->next;
    if (connection->next) connection->next->previous = connection->previous;
    connections->by_fd[connection->fd] = NULL;
    for (int i = 0; i < 2; i++)
        if (connection->tallies[i]) atomic_fetch_sub_explicit(connection->tallies[i], 1, memory_order_relaxed);
    if (connection->leaving) atomic_fetch_sub(connection->leaving, 1);
    atomic_fetch_sub(&connections->totals.count, 1);
    flow_release(connection->flow);
    atomic_fetch_sub(&connections->totals.bytes, open_bytes(connection));
    free(connection);
}

/* Drops a connection that the web server closed without serving it. Call this with the lock held. */
static void drop_lost(struct connections *connections, struct connection *connection)
{
    drop(connections, connection);
    metrics_add(METRIC_REJECTED, "connections", NULL, 1);
    log_event(LOG_WARN, NULL, "refused", "reason=memory connections=%d", atomic_load(&connections->totals.count));
}

struct connection *connections_add(struct connections *connections, int fd, bool plain, _Atomic int *tally,
                                   _Atomic int *other_tally)
{
    struct connection *connection = calloc(1, sizeof *connection);
    if (connection == NULL) return NULL;
    connection->fd = fd;
    connection->plain = plain;
    connection->inode = inode_of(fd);
    connection->tallies[0] = tally;
    connection->tallies[1] = other_tally;
    atomic_init(&connection->phase, CONNECTION_ADDED);
    atomic_init(&connection->since_ms, clock_ms());
    pthread_mutex_lock(&connections->lock);
    if (!reserve(connections, fd)) {
        pthread_mutex_unlock(&connections->lock);
        free(connection);
        return NULL;
    }
    /* libmicrohttpd has closed an older socket with this descriptor number without a report */
    if (connections->by_fd[fd]) drop_lost(connections, connections->by_fd[fd]);
    connections->by_fd[fd] = connection;
    connection->next = connections->first;
    if (connection->next) connection->next->previous = connection;
    connections->first = connection;
    for (int i = 0; i < 2; i++)
        if (connection->tallies[i]) atomic_fetch_add_explicit(connection->tallies[i], 1, memory_order_relaxed);
    atomic_fetch_add(&connections->totals.count, 1);
    atomic_fetch_add(&connections->totals.bytes, open_bytes(connection));
    pthread_mutex_unlock(&connections->lock);
    return connection;
}

struct connection *connections_find(struct connections *connections, int fd)
{
    pthread_mutex_lock(&connections->lock);
    struct connection *connection = fd >= 0 && fd < connections->capacity ? connections->by_fd[fd] : NULL;
    pthread_mutex_unlock(&connections->lock);
    return connection;
}

struct connection *connections_take(struct connections *connections, int fd)
{
    struct connection *connection = connections_find(connections, fd);
    /* the result false is ignored: it means that the connection was cut, which the HTTP thread notices later */
    if (connection) (void)connection_enter(connection, CONNECTION_OPENED);
    return connection;
}

void connections_remove(struct connections *connections, struct connection *connection)
{
    pthread_mutex_lock(&connections->lock);
    drop(connections, connection);
    pthread_mutex_unlock(&connections->lock);
}

bool connection_enter(struct connection *connection, enum connection_phase phase)
{
    int seen = atomic_load_explicit(&connection->phase, memory_order_acquire);
    if (seen == CONNECTION_CUT) return false;
    if (seen == (int)phase) return true;
    /* The three stores have a fixed order: since_ms, then progress_bytes, then phase. connections_sweep() loads phase
     * first and since_ms last. With another order, the sweep might combine an old since_ms with 0 bytes, and cut the
     * client as too slow. */
    atomic_store_explicit(&connection->since_ms, clock_ms(), memory_order_relaxed);
    atomic_store_explicit(&connection->progress_bytes, 0, memory_order_release);
    return atomic_compare_exchange_strong_explicit(&connection->phase, &seen, phase, memory_order_acq_rel,
                                                   memory_order_acquire);
}

void connection_progress(struct connection *connection, uint64_t bytes)
{
    atomic_store_explicit(&connection->progress_bytes, bytes, memory_order_relaxed);
}

bool connection_expired(enum connection_phase phase, int64_t since_ms, uint64_t progress_bytes, int64_t now_ms,
                        const struct connection_limits *limits)
{
    const int64_t elapsed = now_ms - since_ms;
    switch (phase) {
    case CONNECTION_OPENED:
    case CONNECTION_HEAD: return elapsed > limits->head_ms;
    case CONNECTION_IDLE: return elapsed > limits->idle_ms;
    case CONNECTION_BODY:
    case CONNECTION_SEND: return elapsed - (int64_t)(progress_bytes / CONNECTION_BYTES_PER_MS) > limits->transfer_ms;
    /* The remaining phases have no limit here. The request's deadline limits the time in CONNECTION_WORK. */
    default: return false;
    }
}

static bool has_unread(const struct connection *connection)
{
    int unread = 0;
    return ioctl(connection->fd, FIONREAD, &unread) == 0 && unread > 0;
}

/* True if the server has read all bytes that this client has sent, and no request is under way: the connection is
 * between two requests, or the client has never sent a byte. The kernel does not count the bytes that a unix socket
 * receives, so a unix socket is silent only between two requests. */
static bool is_silent(const struct connection *connection, enum connection_phase phase)
{
    if (has_unread(connection)) return false;
    return phase == CONNECTION_IDLE || tcp_is_mute(connection->fd);
}

void connection_cut_with(struct connection *connection, proto_error error, const char *request_id)
{
    atomic_store(&connection->phase, CONNECTION_CUT);
    if (connection->plain) refusal_send(connection->fd, error, NULL, request_id, atomic_load(&connection->error_media));
    shutdown(connection->fd, SHUT_RDWR);
}

/* True if anything has changed on this connection since the last sweep. Stores the state for the next sweep. */
static bool has_moved(struct connection *connection, int phase, int64_t since_ms, uint64_t bytes, int64_t now_ms)
{
    if (phase == connection->seen_phase && bytes == connection->seen_bytes && since_ms == connection->seen_since_ms &&
        connection->seen_ms != 0)
        return false;
    connection->seen_phase = phase;
    connection->seen_bytes = bytes;
    connection->seen_since_ms = since_ms;
    connection->seen_ms = now_ms;
    connection->asked = false;
    return true;
}

/* True if the client has closed its side while the server has no complete request to answer. epoll may not report a FIN
 * that arrives together with the last bytes, so the socket is checked here. One check is enough until something changes
 * on the connection, because a later FIN wakes epoll. */
static bool has_left(struct connection *connection, int phase)
{
    struct pollfd poll_fd = { .fd = connection->fd, .events = POLLRDHUP };
    int unread = 0;
    if (connection->asked || (phase != CONNECTION_OPENED && phase != CONNECTION_HEAD && phase != CONNECTION_BODY &&
                              phase != CONNECTION_IDLE))
        return false;
    connection->asked = true;
    if (poll(&poll_fd, 1, 0) <= 0 || !(poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR))) return false;
    return ioctl(connection->fd, FIONREAD, &unread) != 0 || unread == 0;
}

/* True if the connection makes no progress and delays the end of a drain (finishing requests before the server stops).
 * A load balancer may be sending a request on an idle connection. Idle connections are therefore closed only when no
 * connection has had a request for a while. */
static bool blocks_drain(const struct connection *connection, int phase, int64_t since_ms, int64_t now_ms,
                         const struct connection_drain_limits *drain_limits)
{
    const bool stalled = now_ms - connection->seen_ms >= drain_limits->stalled_ms;
    const bool quiet = now_ms - since_ms >= drain_limits->silent_ms &&
                       now_ms - drain_limits->quiet_since_ms >= drain_limits->silent_ms;
    switch (phase) {
    case CONNECTION_OPENED: return quiet && (stalled || is_silent(connection, CONNECTION_OPENED));
    case CONNECTION_IDLE: return quiet && is_silent(connection, CONNECTION_IDLE);
    case CONNECTION_HEAD:
    case CONNECTION_BODY:
    case CONNECTION_SEND: return stalled;
    default: return false;
    }
}

/* True if the client has taken too long for the present phase. If the server has not read all bytes from the client,
 * the server itself is late. In that case only the time limit of the whole body or answer counts. */
static bool is_overdue(const struct connection *connection, int phase, int64_t since_ms, uint64_t bytes, bool moved,
                       int64_t now_ms, const struct connection_limits *limits)
{
    const bool transfer = phase == CONNECTION_BODY || phase == CONNECTION_SEND;
    const bool late = connection_expired((enum connection_phase)phase, since_ms, bytes, now_ms, limits);
    const bool stalled = phase == CONNECTION_BODY && !moved && now_ms - connection->seen_ms > limits->stall_ms;
    return (late && transfer) || ((late || stalled) && !has_unread(connection));
}

int connections_sweep(struct connections *connections, int64_t now_ms, const struct connection_limits *limits,
                      const struct connection_drain_limits *drain_limits)
{
    int cut = 0;
    pthread_mutex_lock(&connections->lock);
    for (struct connection *connection = connections->first, *next; connection; connection = next) {
        next = connection->next;
        int phase = atomic_load_explicit(&connection->phase, memory_order_acquire);
        const uint64_t bytes = atomic_load_explicit(&connection->progress_bytes, memory_order_acquire);
        const int64_t since = atomic_load_explicit(&connection->since_ms, memory_order_relaxed);
        const bool moved = has_moved(connection, phase, since, bytes, now_ms);
        if (phase == CONNECTION_ADDED) {
            if (!moved && inode_of(connection->fd) != connection->inode) drop_lost(connections, connection);
            continue;
        }
        const bool expired = is_overdue(connection, phase, since, bytes, moved, now_ms, limits);
        const bool blocks = drain_limits && !moved && blocks_drain(connection, phase, since, now_ms, drain_limits);
        const bool sending = phase == CONNECTION_OPENED || phase == CONNECTION_HEAD || phase == CONNECTION_BODY;
        if (!moved && has_left(connection, phase)) {
            shutdown(connection->fd, SHUT_RDWR); /* wakes epoll, so that libmicrohttpd sees the end of the connection */
            continue;
        }
        if (!expired && !blocks) continue;
        if (!atomic_compare_exchange_strong(&connection->phase, &phase, CONNECTION_CUT)) continue;
        if (sending && connection->plain && !(blocks && phase == CONNECTION_OPENED))
            refusal_send(connection->fd, PROTO_E_REQUEST_TIMEOUT, NULL, NULL, atomic_load(&connection->error_media));
        shutdown(connection->fd, SHUT_RDWR);
        cut++;
    }
    pthread_mutex_unlock(&connections->lock);
    return cut;
}

/* ---- Closing idle connections to make room for a new one --------------------------------------------------------- */

/* Kinds of connections, in the order in which they are closed to make room. A connection that is MUST_STAY is not
 * closed. A stranger is a connection that has shown no token although the server has tokens. */
enum { MUST_STAY = -1, IDLE_STRANGER, SLOW_STRANGER, IDLE };

static int rank_of(const struct connection *connection, int phase, int64_t since_ms, bool tokens, int64_t now_ms)
{
    const bool stranger = tokens && !atomic_load_explicit(&connection->known, memory_order_relaxed);
    switch (phase) {
    case CONNECTION_OPENED:
    case CONNECTION_HEAD:
    case CONNECTION_IDLE:
        if (stranger) return IDLE_STRANGER;
        return now_ms - since_ms >= CONNECTION_BETWEEN_MS ? IDLE : MUST_STAY;
    /* the server drops the body of a client without a token, so the connection may be closed */
    case CONNECTION_BODY:
    /* a client without a token receives only a refusal or a public page, so the connection may be closed */
    case CONNECTION_SEND: return stranger && now_ms - since_ms >= CONNECTION_STRANGER_MS ? SLOW_STRANGER : MUST_STAY;
    default: return MUST_STAY;
    }
}

/* Fills the list `old` of connections that may be closed to make room; the last is closed first. Call this with the
 * lock held. */
static void look_for_old(struct connections *connections, const _Atomic int *tally, bool tokens, int64_t now_ms)
{
    connections->old_count = 0;
    connections->old_tally = tally;
    for (struct connection *connection = connections->first; connection; connection = connection->next) {
        const int phase = atomic_load_explicit(&connection->phase, memory_order_acquire);
        const int64_t since = atomic_load_explicit(&connection->since_ms, memory_order_relaxed);
        const int rank = rank_of(connection, phase, since, tokens, now_ms);
        int count = connections->old_count, at = count;
        if (rank == MUST_STAY || connection->tallies[1] != tally) continue;
        while (at > 0 && (connections->old[at - 1].rank < rank ||
                          (connections->old[at - 1].rank == rank && connections->old[at - 1].since_ms < since)))
            at--;
        /* the list is full: entry 0, which would be closed last, is dropped; but if the new entry would be closed even
         * later, the new entry is left out */
        if (count == CONNECTIONS_OLD) {
            if (at == 0) continue;
            memmove(&connections->old[0], &connections->old[1], (size_t)--at * sizeof connections->old[0]);
        } else {
            memmove(&connections->old[at + 1], &connections->old[at],
                    (size_t)(count - at) * sizeof connections->old[0]);
            connections->old_count++;
        }
        connections->old[at].fd = connection->fd;
        connections->old[at].rank = rank;
        connections->old[at].since_ms = since;
    }
    connections->looked_ms = connections->old_count == 0 ? now_ms : 0;
}

/* Cuts a connection that look_for_old() has put on the list. Returns false if the connection has changed since then.
 * Call this with the lock held. */
static bool cut_old(struct connections *connections, int fd, int rank, int64_t since_ms, bool tokens, int64_t now_ms,
                    _Atomic int *leaving)
{
    struct connection *connection = fd < connections->capacity ? connections->by_fd[fd] : NULL;
    if (connection == NULL || connection->tallies[1] != connections->old_tally) return false;
    int phase = atomic_load_explicit(&connection->phase, memory_order_acquire);
    const int64_t since = atomic_load_explicit(&connection->since_ms, memory_order_relaxed);
    if (since != since_ms || rank_of(connection, phase, since, tokens, now_ms) != rank) return false;
    /* not cut: the bytes that the server has not read may be the client's next request */
    if (rank != SLOW_STRANGER && has_unread(connection)) return false;
    if (!atomic_compare_exchange_strong(&connection->phase, &phase, CONNECTION_CUT)) return false;
    connection->leaving = leaving;
    atomic_fetch_add(leaving, 1);
    if (connection->plain && (phase == CONNECTION_HEAD || phase == CONNECTION_BODY))
        refusal_send(fd, PROTO_E_UNAVAILABLE, "too many connections", NULL, atomic_load(&connection->error_media));
    shutdown(fd, SHUT_RDWR);
    log_event(LOG_WARN, NULL, "made_room", "connections=%d phase=%s idle_ms=%lld token=%s peer=%s",
              atomic_load(&connections->totals.count), labels[phase], (long long)(now_ms - since),
              atomic_load(&connection->known) ? "yes" : "no", connection->peer);
    return true;
}

bool connections_make_room(struct connections *connections, const _Atomic int *tally, _Atomic int *leaving, bool tokens,
                           int64_t now_ms)
{
    bool done = false;
    pthread_mutex_lock(&connections->lock);
    if (connections->old_tally != tally) connections->old_count = 0;
    for (int looks = 0; looks < 2 && !done; looks++) {
        while (connections->old_count > 0 && !done) {
            const int last = --connections->old_count;
            done = cut_old(connections, connections->old[last].fd, connections->old[last].rank,
                           connections->old[last].since_ms, tokens, now_ms, leaving);
        }
        if (done || (connections->old_tally == tally && now_ms - connections->looked_ms < CONNECTION_LOOK_MS)) break;
        if (looks == 0) look_for_old(connections, tally, tokens, now_ms);
    }
    pthread_mutex_unlock(&connections->lock);
    return done;
}
