/* mhd.h: the libmicrohttpd side of the server: connections arrive, requests go to the loop and return as answers. */
#ifndef MHD_H
#define MHD_H

#include <sys/socket.h>

#include "server/http/exchange.h"
#include "server/work/server.h"
#include "server/http/http_threads.h"

/* A web server for sockets that the listeners accept: one for the main addresses, one for --metrics-listen. */
struct http_server {
    struct server *server;
    struct http_threads threads;
    unsigned kind; /* PORT_MAIN or PORT_METRICS */
    bool plain;    /* the port does not use TLS */
    int most;      /* the most connections that may be open */
    _Atomic int open;
    _Atomic int leaving; /* connections that were cut to make room for others and are not removed yet */
    char *cert, *key;    /* PEM texts, owned by this struct */
};

/* Starts the threads. On an error *err gets one line of text. */
attn_status mhd_open(struct http_server *http, struct server *server, unsigned kind, attn_error *err);
/* Stops the threads and cuts all open connections. The caller ensures that no connection is suspended. */
void mhd_close(struct http_server *http);

/* Takes over `fd`, an accepted, non-blocking socket. False: there is no memory for it, and the caller still owns `fd`.
 * The caller ensures that at most http->most connections are open. */
bool mhd_add(struct http_server *http, int fd, const struct sockaddr *address, socklen_t length);

/* Pins the threads to their cores or unpins them (http_threads.h). The loop calls this periodically. */
void mhd_balance(struct http_server *http, int64_t now_ms);
void mhd_unpin(struct http_server *http); /* unpins the threads for ever */

/* Resumes the connection of a request. Only the loop may call this, while it owns the request; the HTTP thread owns it
 * afterwards. */
void mhd_resume(struct request *request);

#endif
