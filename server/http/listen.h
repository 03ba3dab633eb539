/* listen.h: the sockets that attnd listens on. attnd accepts connections itself, in the loop, instead of libmicrohttpd.
 * So a client over the connection limit gets 503 and not silence, the server does not spin when descriptors run out,
 * and a supervisor can keep the sockets while a server is replaced. */
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
    char address[160];        /* the actual address: "127.0.0.1:40123", "unix:/run/attnd.sock" */
    char path[108];           /* path of a unix socket that attnd made, to be removed at the end; empty: none */
    struct loop_watch *watch; /* NULL: no connections are accepted */
    bool adopted;             /* another process (the supervisor) holds the socket too */
    int64_t retired_ms;       /* time at which the listener was retired; 0: it is not retired */
    struct server *server;
    struct http_server *http;
};

/* Binds and listens on "127.0.0.1:8080", "[::1]:0", "localhost:8080" or "unix:/run/attnd.sock", non-blocking and
 * close-on-exec. A unix socket on which no process listens any more is replaced. On an error it returns INVALID with
 * one line of text, which begins with `option`, such as "--listen". */
attn_status listener_open(struct listener *listener, const char *option, const char *where, attn_error *err);
/* Takes over a socket that another process (the supervisor) has opened. */
attn_status listener_adopt(struct listener *listener, int fd, attn_error *err);
void listener_close(struct listener *listener); /* stops accepting; removes a unix socket that attnd made */

/* Starts to accept connections in the loop, for the web server `http`. */
attn_status listener_start(struct listener *listener, struct loop *loop, struct server *server,
                           struct http_server *http, attn_error *err);
/* True if only this machine can reach the listener. */
bool listener_is_local(const struct listener *listener);
/* Returns `text`: "http://127.0.0.1:8080/", for a browser on this machine, or "" for a unix socket. */
enum { LISTENER_URL_BYTES = 192 };
const char *listener_url(const struct listener *listener, bool tls, char text[LISTENER_URL_BYTES]);
/* From this call on the kernel refuses new clients, as if no process listened, but completes handshakes under way. This
 * cannot be undone, and applies to every process that has this socket. */
void listener_hide(struct listener *listener);
/* Calls listener_hide(), so that the last handshakes can end before listener_stop(). Where the kernel still takes new
 * clients after that, and for a unix socket, it stops the listener at once. */
void listener_retire(struct listener *listener);
/* True while the listener is retired and a handshake from before may still be under way. */
bool listener_is_retiring(const struct listener *listener, int64_t now_ms);
/* Accepts the connections in the backlog, then stops the listener. */
void listener_stop(struct listener *listener);

#endif
