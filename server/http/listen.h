/* listen.h: the sockets that attnd listens on. They are ours, not libmicrohttpd's: accepting in the loop makes the
 * connection limit an answer (503) instead of a silence, never spins when descriptors run out, and lets a
 * supervisor keep the sockets while a server is replaced. */
#ifndef LISTEN_H
#define LISTEN_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention.h"

struct http_server;
struct loop;
struct loop_watch;
struct server;

/* An open socket and where it listens. */
struct listener {
    int fd;
    bool is_unix;
    char address[160];        /* as it came out: "127.0.0.1:40123", "unix:/run/attnd.sock" */
    char path[108];           /* of a unix socket that we made: removed at the end; empty otherwise */
    struct loop_watch *watch; /* NULL: nothing is accepted */
    bool adopted;             /* another process (the supervisor) holds the socket too */
    int64_t retired_ms;       /* time at which it was retired; 0: it is not retired */
    struct server *server;
    struct http_server *http;
};

/* Binds and listens on "127.0.0.1:8080", "[::1]:0", "localhost:8080" or "unix:/run/attnd.sock", non-blocking and
 * close-on-exec. A unix socket on which no process listens any more is replaced. INVALID with one clear line otherwise,
 * which begins with `option`, such as "--listen". */
attn_status listener_open(struct listener *listener, const char *option, const char *where, attn_error *err);
/* Takes over a socket that another process (the supervisor) has opened. */
attn_status listener_adopt(struct listener *listener, int fd, attn_error *err);
void listener_close(struct listener *listener); /* stops accepting; removes a unix socket that we made */

/* Accepts in the loop, for `port`. */
attn_status listener_start(struct listener *listener, struct loop *loop, struct server *server,
                           struct http_server *http, attn_error *err);
/* True if only this machine can reach the listener. */
bool listener_is_local(const struct listener *listener);
/* "http://127.0.0.1:8080/", for a browser on this machine; "" for a unix socket. Returns `text`. */
enum { LISTENER_URL_BYTES = 192 };
const char *listener_url(const struct listener *listener, bool tls, char text[LISTENER_URL_BYTES]);
/* From here on new clients are refused, as if nobody listened, and those whose handshake is under way are let in. It
 * cannot be undone, and is so for every process that has this socket. */
void listener_hide(struct listener *listener);
/* The first step of its end: it is hidden. One that cannot be is stopped at once. */
void listener_retire(struct listener *listener);
/* It is retired, and a handshake that was under way then may not have ended yet. */
bool listener_is_retiring(const struct listener *listener, int64_t now_ms);
/* Takes what is in the backlog, then stops. */
void listener_stop(struct listener *listener);

#endif
