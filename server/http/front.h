/* front.h: everything that holds connections, as one thing that the loop can drain: the web servers, the addresses they
 * listen on, the table of connections, the tokens. */
#ifndef FRONT_H
#define FRONT_H

#include "server/http/mhd.h"
#include "server/http/listen.h"
#include "server/http/connections.h"
#include "server/sched/loop.h"

struct front {
    struct server *server;
    struct connections connections;
    struct http_server main_http, metrics_http; /* the second only with --metrics-listen */
    struct listener *listeners;                 /* main.c's: open sockets, those of --listen first */
    int listener_count;
    struct loop_watch *linger_watch;
    unsigned sweeps;
    int retiring; /* of them, through which connections may still come */
};

/* The listeners are open, and belong to the front from here on. */
void front_init(struct front *front, struct server *server, struct listener *listeners, int count);
/* Starts the web servers' threads; nothing is accepted yet. */
attn_status front_open(struct front *front, attn_error *err);
/* Accepts, in the loop. */
attn_status front_start(struct front *front, attn_error *err);
/* The functions of the front that the loop may call. */
struct loop_front front_for_loop(struct front *front);
/* Stops accepting, and cuts all open connections. None may be suspended. May be called after a failed start. */
void front_close(struct front *front);
void front_clear(struct front *front); /* after front_close() and the end of the loop */

#endif
