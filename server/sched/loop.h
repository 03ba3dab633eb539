/* loop.h: the main thread: scheduling, deadlines, hang-ups, signals, drain. */
#ifndef LOOP_H
#define LOOP_H

#include "server/http/listen.h"
#include "server/work/request.h"
#include "server/work/server.h"

struct loop;

enum { LOOP_HURRY_MS = 2000 }; /* after a drain, for the last answers to leave */

/* What arrives in the loop's mailbox. */
enum loop_message { LOOP_REQUEST, LOOP_BATCH };

/* The parts in the order in which main.c needs them. */
struct loop *loop_open(struct server *server);   /* aborts when the system refuses the essentials */
struct mailbox *loop_mailbox(struct loop *loop); /* for devices */
uv_loop_t *loop_uv(struct loop *loop);

/* Accepts on these and serves until a signal says otherwise; returns the exit status: 0 after a drain, 70 when the
 * last device failed. `listeners` are stopped when draining starts. Afterwards no connection is suspended and the
 * daemons can be closed. */
int loop_run(struct loop *loop, struct listener *listeners, int listener_count);

/* SIGTERM or SIGINT: stop; again: hurry. SIGHUP: read the tokens again. From any thread, from loop_open() on; what comes
 * before loop_run() is done then. */
void loop_signal(struct loop *loop, int number);

/* After the daemons and devices are closed. */
void loop_close(struct loop *loop);

/* From an HTTP thread: a request in QUEUED whose connection is suspended. It belongs to the loop from here on. */
void loop_post(struct loop *loop, struct request *request);

#endif
