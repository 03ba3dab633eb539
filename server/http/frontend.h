/* frontend.h: everything that holds connections, as one thing that the loop can drain: the web servers, the addresses
 * they listen on, the table of connections, the tokens. */
#ifndef FRONTEND_H
#define FRONTEND_H

#include "server/http/mhd.h"
#include "server/http/listen.h"
#include "server/http/connections.h"
#include "server/sched/loop.h"

struct frontend {
    struct server *server;
    struct connections connections;
    struct http_server main_http, metrics_http; /* the second only with --metrics-listen */
    struct listener *listeners;                 /* main.c's: open sockets, those of --listen first */
    int listener_count;
    struct loop_watch *lingering_close_watch;
    unsigned sweeps;
    int retiring; /* of them, through which connections may still come */
};

/* The listeners are open, and belong to the front from here on. */
void frontend_init(struct frontend *frontend, struct server *server, struct listener *listeners, int count);
/* Starts the web servers' threads; nothing is accepted yet. */
attn_status frontend_open(struct frontend *frontend, attn_error *err);
/* Accepts, in the loop. */
attn_status frontend_start(struct frontend *frontend, attn_error *err);
/* The functions of the front that the loop may call. */
struct loop_frontend frontend_for_loop(struct frontend *frontend);
/* Stops accepting, and cuts all open connections. None may be suspended. May be called after a failed start. */
void frontend_close(struct frontend *frontend);
void frontend_clear(struct frontend *frontend); /* after frontend_close() and the end of the loop */

#endif
