/* loop.h: the main thread and its event loop (libuv). The main thread does scheduling, deadlines, hang-ups of clients,
 * signals and the drain (it finishes accepted requests before the server stops). */
#ifndef LOOP_H
#define LOOP_H

#include "server/base/limits.h"
#include "server/work/request.h"
#include "server/work/server.h"

struct loop;

/* Kinds of messages in the main thread's mailbox: a request, or a batch that has come back from a device. */
enum loop_message { LOOP_REQUEST, LOOP_BATCH };

/* main.c calls the functions loop_open() and loop_mailbox() in this order. */
struct loop *loop_open(struct server *server);   /* makes the event loop; aborts if the system refuses what it needs */
struct mailbox *loop_mailbox(struct loop *loop); /* returns the mailbox to which devices post finished batches */

struct loop_watch;
/* Watches a descriptor: whenever it can be read, the main thread calls on_readable(context). Call this on the main
 * thread. The caller still owns the descriptor. INTERNAL: libuv refuses the descriptor; *err has libuv's text. */
attn_status loop_watch(struct loop *loop, int fd, void (*on_readable)(void *context), void *context,
                       struct loop_watch **watch, attn_error *err);
/* Ends a watch: on_readable() is not called any more, and the descriptor may be closed. loop_close() ends the watches
 * that are left. */
void loop_unwatch(struct loop_watch *watch);

/* The functions of server/http/frontend.c that the main thread calls. `context` is passed to each function that has a
 * parameter of this name. */
struct loop_frontend {
    void *context;
    /* resumes the request's connection; the HTTP thread owns the request from now on */
    void (*resume)(struct request *request);
    /* returns the number of open connections; while the server drains (finishes requests before it stops), listeners
     * that may still accept connections count too */
    int (*connections)(void *context);
    void (*sweep)(void *context, int64_t now_ms, bool draining); /* cuts connections that are too slow */
    void (*reload)(void *context); /* does what the signal SIGHUP requests: reads the token file again */
    /* Stops accepting connections, because the server drains (finishes its requests, then stops). --metrics-listen
     * still accepts them, so that the drain can be watched and probed. */
    void (*drain)(void *context);
    void (*close_metrics)(void *context); /* stops accepting connections on --metrics-listen too */
};

/* Serves requests until a signal ends the server. Returns the exit status: 0 after a drain (accepted requests were
 * finished), 70 when the last device failed. Afterwards no connection is suspended, so the web servers can be
 * closed. */
int loop_run(struct loop *loop, const struct loop_frontend *frontend);

/* Handles a signal. SIGTERM and SIGINT stop the server; the second such signal stops it without waiting. SIGHUP makes
 * it read the access tokens again. Any thread may call this after loop_open(). A signal that arrives before loop_run()
 * is handled when loop_run() begins. */
void loop_signal(struct loop *loop, int number);

/* Frees the event loop. Call this after the web servers and the devices are closed. */
void loop_close(struct loop *loop);

/* Gives a request whose connection is suspended to the main thread, which owns it from now on. An HTTP thread calls
 * this. */
void loop_post(struct loop *loop, struct request *request);
/* Tells the main thread that a cache transaction on an HTTP thread has ended, because queued requests may wait for its
 * caches. */
void loop_note_step_end(struct loop *loop);

#endif
