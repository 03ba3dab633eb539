/* loop.h: the main thread: scheduling, deadlines, hang-ups, signals, drain. */
#ifndef LOOP_H
#define LOOP_H

#include "server/base/limits.h"
#include "server/work/request.h"
#include "server/work/server.h"

struct loop;

/* What arrives in the loop's mailbox. */
enum loop_message { LOOP_REQUEST, LOOP_BATCH };

/* The parts in the order in which main.c needs them. */
struct loop *loop_open(struct server *server);   /* aborts when the system refuses the essentials */
struct mailbox *loop_mailbox(struct loop *loop); /* for devices */

/* A descriptor that the loop watches. On the loop's thread only: while the descriptor can be read, the loop calls
 * on_readable(context). The descriptor stays the caller's. INTERNAL: libuv refuses it, and the text is libuv's. */
struct loop_watch;
attn_status loop_watch(struct loop *loop, int fd, void (*on_readable)(void *context), void *context,
                       struct loop_watch **watch, attn_error *err);
/* Nothing is called from here on, and the descriptor may be closed. loop_close() ends the watches that are left. */
void loop_unwatch(struct loop_watch *watch);

/* The side that holds the connections, as the loop knows it: these functions and nothing else (server/http/front.c has
 * them). All are called on the loop's thread, with `context` where they take one. */
struct loop_front {
    void *context;
    void (*resume)(struct request *request); /* its connection goes on; from here on it is the HTTP thread's */
    int (*connections)(void *context); /* accepted and not yet closed, and ways by which more may come while draining */
    void (*sweep)(void *context, int64_t now_ms, bool draining); /* cuts those that are too slow */
    void (*reload)(void *context);                               /* what SIGHUP asks for */
    void (*drain)(void *context); /* stops accepting, but for --metrics-listen: a drain can be watched, and probed */
    void (*close_metrics)(void *context); /* stops accepting there too */
};

/* Serves until a signal says otherwise; returns the exit status: 0 after a drain, 70 when the last device failed.
 * Afterwards no connection is suspended and the web servers can be closed. */
int loop_run(struct loop *loop, const struct loop_front *front);

/* SIGTERM or SIGINT: stop; again: wait for nothing. SIGHUP: read the tokens again. From any thread, from loop_open()
 * on; what comes before loop_run() is done then. */
void loop_signal(struct loop *loop, int number);

/* After the daemons and devices are closed. */
void loop_close(struct loop *loop);

/* From an HTTP thread: a request in QUEUED whose connection is suspended. It belongs to the loop from here on. */
void loop_post(struct loop *loop, struct request *request);
/* From an HTTP thread: a step on caches that it ran itself has ended; requests that are QUEUED may wait for that. */
void loop_note_step_end(struct loop *loop);

#endif
