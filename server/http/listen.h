/* listen.h: the sockets on which attnd listens. attnd, and not libmicrohttpd, accepts the connections. A client over
 * the connection limit therefore gets a 503. The server does not spin when file descriptors run out. A supervisor can
 * keep the sockets while a server is replaced. */
#ifndef LISTEN_H
#define LISTEN_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention.h"

struct http_server;
struct loop;
struct loop_watch;
struct server;

struct listener {
    int fd;
    bool is_unix;
    char address[160];        /* the address on which the socket listens: "127.0.0.1:40123", "unix:/run/attnd.sock" */
    char path[108];           /* path of a unix socket that attnd made, to be removed at the end; empty: none */
    struct loop_watch *watch; /* tells the main thread when clients connect; NULL: no connections are accepted */
    /* whether the supervisor opened the socket; the supervisor then has a descriptor of it too */
    bool adopted;
    /* time of listener_retire(); 0: it was not called */
    int64_t retired_ms;
    struct server *server;
    struct http_server *http;
};

/* Binds and listens on "127.0.0.1:8080", "[::1]:0", "localhost:8080" or "unix:/run/attnd.sock". The socket is
 * non-blocking and close-on-exec. A file of a unix socket on which no process listens any more is replaced. Error:
 * INVALID, with a line of text that begins with `option`, such as "--listen". */
attn_status listener_open(struct listener *listener, const char *option, const char *where, attn_error *err);
/* Takes over a socket that another process (the supervisor) has opened. */
attn_status listener_adopt(struct listener *listener, int fd, attn_error *err);
/* stops accepting connections; removes the file of a unix socket that attnd made */
void listener_close(struct listener *listener);

/* Starts to accept connections on the main thread, for the web server `http`. */
attn_status listener_start(struct listener *listener, struct loop *loop, struct server *server,
                           struct http_server *http, attn_error *err);
/* True if only clients on this machine can reach the listener. */
bool listener_is_local(const struct listener *listener);
enum { LISTENER_URL_BYTES = 192 };
/* Writes the URL for a browser on this machine, "http://127.0.0.1:8080/", or "" for a unix socket. Returns `text`. */
const char *listener_url(const struct listener *listener, bool tls, char text[LISTENER_URL_BYTES]);
/* Makes the kernel refuse new clients, as if no process listened, but complete handshakes that have begun. This cannot
 * be undone, and applies to every process that has this socket. */
void listener_hide(struct listener *listener);
/* Stops new handshakes by listener_hide(), unless a supervisor does that. Handshakes that have begun may end before
 * listener_stop(). A unix socket is stopped at once, and so is a listener whose new clients the kernel still
 * accepts. */
void listener_retire(struct listener *listener);
/* True for a retired listener while a handshake that began before listener_retire() may be incomplete. */
bool listener_is_retiring(const struct listener *listener, int64_t now_ms);
/* Accepts the connections in the backlog, then stops the listener. */
void listener_stop(struct listener *listener);

#endif
