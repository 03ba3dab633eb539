/* listen.c: listens on sockets and accepts connections.
 *
 * A client whose connection cannot be accepted gets a 503 with Retry-After if possible. At the limit on connections,
 * the server makes room: it closes a connection that is idle or that never showed a token.
 *
 * The kernel completes handshakes until the socket is closed, and close() resets the connections in the backlog, whose
 * clients may have sent requests. listener_hide() therefore makes the kernel refuse new handshakes before the listener
 * is closed. */
#include "server/http/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/http/mhd.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/base/peer.h"
#include "server/http/connections.h"
#include "server/http/refusal.h"
#include "server/routes/routes.h"
#include "server/sched/loop.h"
#include "server/work/server.h"

/* A spare descriptor, closed when no other is free, so that one client can be accepted and refused. Otherwise the
 * backlog would keep waking the main thread. Only the main thread uses it. */
static int spare_fd = -1;

/* ---- Opening and closing listening sockets ----------------------------------------------------------------------- */

static void describe(struct listener *listener)
{
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    char host[INET6_ADDRSTRLEN];
    memset(&address, 0, sizeof address);
    if (getsockname(listener->fd, (struct sockaddr *)&address, &length) != 0) return;
    if (address.ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)&address;
        snprintf(listener->address, sizeof listener->address, "%s:%d",
                 inet_ntop(AF_INET, &in->sin_addr, host, sizeof host), ntohs(in->sin_port));
    } else if (address.ss_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)&address;
        snprintf(listener->address, sizeof listener->address, "[%s]:%d",
                 inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof host), ntohs(in6->sin6_port));
    } else if (address.ss_family == AF_UNIX) {
        listener->is_unix = true;
        snprintf(listener->address, sizeof listener->address, "unix:%.107s",
                 ((const struct sockaddr_un *)&address)->sun_path);
    }
}

static bool is_alive(const struct sockaddr_un *address)
{
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const bool alive = fd >= 0 &&
                       (connect(fd, (const struct sockaddr *)address, sizeof *address) == 0 || errno == EAGAIN);
    if (fd >= 0) close(fd);
    return alive;
}

static attn_status open_unix(struct listener *listener, const char *option, const char *where, attn_error *err)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    struct stat sb;
    const char *path = where + strlen("unix:");
    if (*path == '\0' || strlen(path) >= sizeof address.sun_path)
        return attn_fail(err, ATTN_INVALID, NULL, "%s %s: the path must have 1 to %zu bytes", option, where,
                         sizeof address.sun_path - 1);
    strcpy(address.sun_path, path);
    if (lstat(path, &sb) == 0) {
        if (!S_ISSOCK(sb.st_mode))
            return attn_fail(err, ATTN_INVALID, NULL, "%s %s: there is a file of that name", option, where);
        if (is_alive(&address))
            return attn_fail(err, ATTN_INVALID, NULL,
                             "%s %s: address already in use: another process accepts connections there", option, where);
        unlink(path);
    }
    listener->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* creates the socket's file with access for owner and group only; umask() is safe here, because no other thread
     * runs yet */
    const mode_t before = umask(0117);
    const int bound = listener->fd < 0 ? -1 : bind(listener->fd, (const struct sockaddr *)&address, sizeof address);
    umask(before);
    if (bound != 0) return attn_fail(err, ATTN_INVALID, NULL, "%s %s: %s", option, where, strerror(errno));
    strcpy(listener->path, path);
    if (listen(listener->fd, LISTEN_BACKLOG) != 0)
        return attn_fail(err, ATTN_INVALID, NULL, "%s %s: %s", option, where, strerror(errno));
    return ATTN_OK;
}

static attn_status open_tcp(struct listener *listener, const char *option, const char *where, attn_error *err)
{
    char host[256];
    const char *colon = strrchr(where, ':');
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE }, *found = NULL;
    attn_status status;
    const int on = 1;
    if (colon == NULL || (size_t)(colon - where) >= sizeof host)
        return attn_fail(err, ATTN_INVALID, NULL, "%s %s: must be ADDR:PORT or unix:PATH", option, where);
    const bool bracketed = where[0] == '[' && colon[-1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(colon - where) - 2 * bracketed, where + bracketed);
    const int error = getaddrinfo(*host ? host : NULL, colon + 1, &hints, &found);
    if (error != 0) return attn_fail(err, ATTN_INVALID, NULL, "%s %s: %s", option, where, gai_strerror(error));
    listener->fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd >= 0) {
        (void)setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        /* [::] means IPv6 only, so that another listener can use 0.0.0.0 with the same port */
        if (found->ai_family == AF_INET6) (void)setsockopt(listener->fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    }
    if (listener->fd < 0 || bind(listener->fd, found->ai_addr, found->ai_addrlen) != 0 ||
        listen(listener->fd, LISTEN_BACKLOG) != 0)
        status = attn_fail(err, ATTN_INVALID, NULL, "%s %s: %s", option, where, strerror(errno));
    else status = ATTN_OK;
    freeaddrinfo(found);
    return status;
}

attn_status listener_open(struct listener *listener, const char *option, const char *where, attn_error *err)
{
    *listener = (struct listener){ .fd = -1 };
    const attn_status status = strncmp(where, "unix:", 5) == 0 ? open_unix(listener, option, where, err)
                                                               : open_tcp(listener, option, where, err);
    if (status == ATTN_OK) describe(listener);
    else listener_close(listener);
    return status;
}

attn_status listener_adopt(struct listener *listener, int fd, attn_error *err)
{
    int listening = 0;
    socklen_t length = sizeof listening;
    *listener = (struct listener){ .fd = fd, .adopted = true };
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || !listening)
        return attn_fail(err, ATTN_INVALID, NULL, "descriptor %d is no listening socket", fd);
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    describe(listener);
    return ATTN_OK;
}

static void unlink_path(struct listener *listener)
{
    if (listener->path[0]) unlink(listener->path);
    listener->path[0] = '\0';
}

void listener_close(struct listener *listener)
{
    listener_stop(listener);
    if (listener->fd >= 0) close(listener->fd);
    listener->fd = -1;
    unlink_path(listener);
}

bool listener_is_local(const struct listener *listener)
{
    return listener->is_unix || strncmp(listener->address, "127.", 4) == 0 ||
           strncmp(listener->address, "[::1]:", 6) == 0;
}

const char *listener_url(const struct listener *listener, bool tls, char text[LISTENER_URL_BYTES])
{
    static const struct {
        /* browsers cannot connect to the wildcard address `any`, so the URL has the loopback address `here` */
        const char *any, *here;
    } hosts[] = { { "0.0.0.0:", "127.0.0.1:" }, { "[::]:", "[::1]:" } };
    const char *host = "", *rest = listener->address;
    *text = '\0';
    if (listener->is_unix) return text;
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        if (strncmp(rest, hosts[i].any, strlen(hosts[i].any)) == 0) host = hosts[i].here, rest += strlen(hosts[i].any);
    snprintf(text, LISTENER_URL_BYTES, "%s://%s%s/", tls ? "https" : "http", host, rest);
    return text;
}

/* ---- Accepting connections --------------------------------------------------------------------------------------- */

/* Refuses an accepted socket with 503. Unread bytes are dropped first, because close() would otherwise send a reset,
 * which could overtake the answer. */
static void refuse(struct http_server *http, int fd)
{
    metrics_add(METRIC_REJECTED, "connections", NULL, 1);
    if (http->plain) {
        refusal_send(fd, PROTO_E_UNAVAILABLE, "too many connections", NULL, NULL);
        lingering_close_on(&http->server->connections->linger, fd, LINGER_DROP);
    }
    close(fd);
}

static void set_options(const struct listener *listener, int fd)
{
    const int on = 1, idle = LISTEN_KEEPALIVE_S, timeout = LISTEN_USER_TIMEOUT_MS;
    if (listener->is_unix) return;
    /* errors are ignored, because the connection works without these socket options */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout);
}

/* Accepts one client with the spare descriptor, when no others are left, and refuses it. Returns false if that
 * fails. */
static bool refuse_with_spare(struct listener *listener)
{
    if (spare_fd < 0) return false;
    close(spare_fd);
    struct sockaddr_storage address = { .ss_family = AF_UNSPEC };
    socklen_t length = sizeof address;
    char peer[PEER_BYTES];
    const int fd = accept4(listener->fd, (struct sockaddr *)&address, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) refuse(listener->http, fd);
    spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    log_event(LOG_WARN, NULL, "refused", "reason=descriptors connections=%d peer=%s",
              atomic_load(&listener->http->open), peer_text((struct sockaddr *)&address, peer));
    return fd >= 0;
}

/* True if there is room for one more connection, if necessary after closing an open one. */
static bool has_room(struct http_server *http)
{
    const int leaving = atomic_load(&http->leaving);
    if (atomic_load(&http->open) - leaving < http->most) return true;
    if (leaving >= CONNECTION_LEAVING) return false;
    if (!connections_make_room(http->server->connections, &http->open, &http->leaving,
                               http->kind == PORT_MAIN && http->server->tokens != NULL, clock_ms()))
        return false;
    metrics_add(METRIC_MADE_ROOM, NULL, NULL, 1);
    return true;
}

static void accept_some(struct listener *listener, int limit)
{
    struct http_server *http = listener->http;
    for (int i = 0; i < limit; i++) {
        struct sockaddr_storage address;
        socklen_t length = sizeof address;
        const int fd = accept4(listener->fd, (struct sockaddr *)&address, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            /* the client has left already */
            if (errno == ECONNABORTED || errno == EINTR) continue;
            if ((errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) &&
                refuse_with_spare(listener))
                continue;
            return;
        }
        if (!has_room(http)) {
            char peer[PEER_BYTES];
            refuse(http, fd);
            log_event(LOG_WARN, NULL, "refused", "reason=%s connections=%d peer=%s",
                      http->kind == PORT_MAIN ? "max_connections" : "metrics_connections", atomic_load(&http->open),
                      peer_text((struct sockaddr *)&address, peer));
            continue;
        }
        set_options(listener, fd);
        if (!mhd_add(http, fd, (struct sockaddr *)&address, length)) refuse(http, fd);
    }
}

static void on_readable(void *listener)
{
    accept_some(listener, LISTEN_ACCEPT_BURST);
}

attn_status listener_start(struct listener *listener, struct loop *loop, struct server *server,
                           struct http_server *http, attn_error *err)
{
    if (spare_fd < 0) spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    listener->server = server;
    listener->http = http;
    attn_error why;
    if (loop_watch(loop, listener->fd, on_readable, listener, &listener->watch, &why) != ATTN_OK)
        return attn_fail(err, ATTN_INTERNAL, NULL, "%s: %s", listener->address, why.text);
    log_event(LOG_INFO, NULL, "listening", "address=%s", listener->address);
    if (http->kind == PORT_MAIN && !listener_is_local(listener) && server->tokens == NULL)
        log_event(
            LOG_WARN, NULL, "open_to_all",
            "address=%s text=\"whoever reaches this address may compute here; --token-file asks for a token, --listen "
            "127.0.0.1:PORT keeps it to this machine\"",
            listener->address);
    return ATTN_OK;
}

enum { NOWHERE = INT_MAX }; /* number of a network interface that does not exist */

void listener_hide(struct listener *listener)
{
    const int nowhere = NOWHERE;
    unlink_path(listener);
    /* Binds the socket to an interface that does not exist, so that the kernel refuses new SYN packets but completes
     * handshakes. This needs Linux 5.7; without it, a few clients may be accepted and then reset. */
    if (!listener->is_unix && listener->fd >= 0)
        (void)setsockopt(listener->fd, SOL_SOCKET, SO_BINDTOIFINDEX, &nowhere, sizeof nowhere);
}

static bool is_hidden(const struct listener *listener)
{
    int where = 0;
    socklen_t length = sizeof where;
    return getsockopt(listener->fd, SOL_SOCKET, SO_BINDTOIFINDEX, &where, &length) == 0 && where == NOWHERE;
}

void listener_retire(struct listener *listener)
{
    if (listener->watch == NULL) return;
    /* a supervisor that opened the socket calls listener_hide() itself, or passes the socket to another server */
    if (!listener->adopted) listener_hide(listener);
    listener->retired_ms = clock_ms();
    if (listener->is_unix || !is_hidden(listener)) listener_stop(listener);
}

bool listener_is_retiring(const struct listener *listener, int64_t now_ms)
{
    const int64_t door_ms = listener_is_local(listener) ? LISTEN_DOOR_LOCAL_MS : LISTEN_DOOR_MS;
    return listener->watch != NULL && listener->retired_ms > 0 && now_ms - listener->retired_ms < door_ms;
}

void listener_stop(struct listener *listener)
{
    if (listener->watch == NULL) return;
    /* accepts the clients in the backlog, whose handshakes are complete */
    accept_some(listener, LISTEN_BACKLOG);
    loop_unwatch(listener->watch);
    listener->watch = NULL;
    /* If the listener stayed open, the kernel would accept clients during the drain (finishing requests before the
     * stop). At the end, it would reset their connections. */
    close(listener->fd);
    listener->fd = -1;
}
