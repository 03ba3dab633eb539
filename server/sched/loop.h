/* loop.h: the main thread and its event loop (libuv): scheduling, deadlines, hang-ups of clients, signals, and the
 * drain (accepted requests are finished before the server stops). */
#ifndef LOOP_H
#define LOOP_H

#include "server/base/limits.h"
#include "server/work/request.h"
#include "server/work/server.h"

struct loop;

/* Messages in the main thread's mailbox: a request, or a batch back from a device. */
enum loop_message { LOOP_REQUEST, LOOP_BATCH };

/* Opens the main thread's event loop. Aborts if the system refuses a resource. */
struct loop *loop_open(struct server *server);
struct mailbox *loop_mailbox(struct loop *loop); /* the mailbox to which devices post finished batches */

struct loop_watch;
/* Calls on_readable(context) on the main thread whenever the descriptor, which the caller still owns, can be read. To
 * be called on the main thread. Returns INTERNAL if libuv refuses the descriptor; *err then has libuv's text. */
attn_status loop_watch(struct loop *loop, int fd, void (*on_readable)(void *context), void *context,
                       struct loop_watch **watch, attn_error *err);
/* Ends the watch of a file descriptor, which may then be closed. loop_close() ends all watches that are left. */
void loop_unwatch(struct loop_watch *watch);

/* Functions of server/http/frontend.c that the main thread calls. */
struct loop_frontend {
    void *context;
    /* resumes the request's connection; the HTTP thread then owns the request */
    void (*resume)(struct request *request);
    /* Returns the number of open connections. While the server drains (finishes requests before it stops), listeners
     * that may still accept connections count too. */
    int (*connections)(void *context);
    void (*sweep)(void *context, int64_t now_ms, bool draining); /* closes connections that are idle or too slow */
    void (*reload)(void *context);                               /* reads the token file again (SIGHUP) */
    /* Stops accepting connections, except on --metrics-listen, so that the drain can be watched. */
    void (*drain)(void *context);
    void (*close_metrics)(void *context); /* stops accepting connections on --metrics-listen */
};

/* Serves requests until a signal ends the server. Returns the exit status: 0 after a drain (accepted requests were
 * finished), 70 when the last device failed. No connection is suspended afterwards. */
int loop_run(struct loop *loop, const struct loop_frontend *frontend);

/* Handles a signal, on any thread, after loop_open(). SIGTERM and SIGINT stop the server. A second such signal stops it
 * without waiting for requests. SIGHUP makes it read the access tokens again. */
void loop_signal(struct loop *loop, int number);

/* Frees the event loop. The web servers must be closed, and the threads of the devices must have ended. */
void loop_close(struct loop *loop);

/* Hands a request over to the main thread. Its connection must be suspended. HTTP threads call this. */
void loop_post(struct loop *loop, struct request *request);
/* Tells the main thread that an HTTP thread has ended a cache transaction. Queued requests may be waiting for its
 * caches. */
void loop_note_step_end(struct loop *loop);

#endif
