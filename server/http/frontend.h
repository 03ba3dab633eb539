/* frontend.h: the part that holds connections, as one object that the loop can drain: the web servers, the listening
 * sockets, the table of connections, the tokens. */
#ifndef FRONTEND_H
#define FRONTEND_H

#include "server/http/mhd.h"
#include "server/http/listen.h"
#include "server/http/connections.h"
#include "server/sched/loop.h"

struct frontend {
    struct server *server;
    struct connections connections;
    struct http_server main_http, metrics_http; /* metrics_http is used only with --metrics-listen */
    struct listener *listeners;                 /* owned by main.c: open sockets, those of --listen first */
    int listener_count;
    struct loop_watch *lingering_close_watch;
    unsigned sweeps;
    int retiring; /* the number of listeners through which clients may still connect while draining */
};

/* Takes over the listeners, which must be open, until frontend_close(). */
void frontend_init(struct frontend *frontend, struct server *server, struct listener *listeners, int count);
/* Starts the web servers' threads. No connection is accepted yet. */
attn_status frontend_open(struct frontend *frontend, attn_error *err);
/* Starts to accept connections in the loop. */
attn_status frontend_start(struct frontend *frontend, attn_error *err);
/* Returns the functions of the frontend that the loop may call. */
struct loop_frontend frontend_for_loop(struct frontend *frontend);
/* Stops accepting, and cuts all open connections. No connection may be suspended. This may be called after a failed
 * start. */
void frontend_close(struct frontend *frontend);
void frontend_clear(struct frontend *frontend); /* call it after frontend_close() and the end of the loop */

#endif
