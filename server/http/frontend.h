/* frontend.h: one object for the part of the server that holds connections: the web servers, the listening sockets, the
 * table of connections and the tokens. The main thread can drain the frontend, which means to finish its requests
 * before the server stops. */
#ifndef FRONTEND_H
#define FRONTEND_H

#include "server/http/mhd.h"
#include "server/http/listen.h"
#include "server/http/connections.h"
#include "server/sched/loop.h"

struct frontend {
    struct server *server;
    struct connections connections;
    /* metrics_http: the web server for --metrics-listen; unused without that option */
    struct http_server main_http, metrics_http;
    struct listener *listeners; /* open listening sockets, those of --listen first; main.c owns them */
    int listener_count;
    struct loop_watch *lingering_close_watch;
    unsigned sweeps;
    /* number of listeners through which clients may still connect while the server drains (before it stops) */
    int retiring;
};

/* Initialises the frontend, which uses the listeners until frontend_close(). The listeners must be open. */
void frontend_init(struct frontend *frontend, struct server *server, struct listener *listeners, int count);
/* Starts the threads of the web servers. The threads get no connections before frontend_start(). */
attn_status frontend_open(struct frontend *frontend, attn_error *err);
attn_status frontend_start(struct frontend *frontend, attn_error *err);
struct loop_frontend frontend_for_loop(struct frontend *frontend);
/* Stops accepting connections, and cuts all open connections. No connection may be suspended at this time. Call this
 * also after a failed start. */
void frontend_close(struct frontend *frontend);
/* frees the frontend; call it after frontend_close() and the end of the event loop */
void frontend_clear(struct frontend *frontend);

#endif
