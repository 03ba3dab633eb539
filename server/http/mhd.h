/* mhd.h: the part of the server that uses libmicrohttpd. */
#ifndef MHD_H
#define MHD_H

#include <sys/socket.h>

#include "server/http/exchange.h"
#include "server/work/server.h"
#include "server/http/http_threads.h"

/* A web server, which gets its sockets from listeners. attnd has one for the main addresses, and one for
 * --metrics-listen. */
struct http_server {
    struct server *server;
    struct http_threads threads;
    unsigned kind; /* PORT_MAIN (the main addresses) or PORT_METRICS (--metrics-listen) */
    bool plain;    /* whether the port serves plain HTTP, without TLS */
    int most;
    _Atomic int open;
    _Atomic int leaving; /* number of connections that were cut to make room for others and are not removed yet */
    char *cert, *key;    /* texts of the certificate and its key in PEM form, owned by this struct */
};

/* Starts the HTTP threads of a web server. On an error *err gets one line of text. */
attn_status mhd_open(struct http_server *http, struct server *server, unsigned kind, attn_error *err);
/* Stops the HTTP threads and cuts all open connections. The caller must ensure that no connection is suspended. */
void mhd_close(struct http_server *http);

/* Gives `fd`, an accepted, non-blocking socket, to an HTTP thread. Returns false if there is no memory; the caller
 * still owns `fd` in that case. The caller must ensure that at most http->most connections are open. */
bool mhd_add(struct http_server *http, int fd, const struct sockaddr *address, socklen_t length);

/* Pins the HTTP threads to their cores or unpins them (http_threads.h). The main thread calls this periodically. */
void mhd_balance(struct http_server *http, int64_t now_ms);
void mhd_unpin(struct http_server *http); /* unpins the HTTP threads from their cores until the process ends */

/* Resumes the connection of a request. Only the main thread may call this, while it owns the request. From this call on
 * the HTTP thread owns the request. */
void mhd_resume(struct request *request);

#endif
