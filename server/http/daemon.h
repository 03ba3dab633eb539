/* daemon.h: the libmicrohttpd side: connections come in, requests go to the loop and come back as answers. */
#ifndef DAEMON_H
#define DAEMON_H

#include <sys/socket.h>

#include "server/work/request.h"
#include "server/work/server.h"
#include "server/http/workers.h"

/* A web server on sockets that others accept: one for the main addresses, one for --metrics-listen. */
struct port {
    struct server *server;
    struct workers workers;
    unsigned kind; /* PORT_MAIN or PORT_METRICS */
    bool plain;    /* not TLS */
    int most;      /* connections that may be open */
    _Atomic int open;
    char *cert, *key; /* PEM texts, owned */
};

/* Starts the threads. Fills *err with one clear line. */
attn_status daemon_open(struct port *port, struct server *server, unsigned kind, attn_error *err);
/* No connection may be suspended. Cuts what is left. */
void daemon_close(struct port *port);

/* Takes over `fd`, an accepted, non-blocking socket. False: there is no memory for it, and `fd` is still the caller's.
 * Not more than port->most. */
bool daemon_add(struct port *port, int fd, const struct sockaddr *address, socklen_t length);

/* From the loop, now and then: its threads are held on their cores or let go (workers.h). */
void daemon_balance(struct port *port, int64_t now_ms);
void daemon_let_go(struct port *port); /* for good */

/* From the loop, with a request that is its own: the connection goes on, the request is the HTTP thread's again. */
void daemon_resume(struct request *request);

#endif
