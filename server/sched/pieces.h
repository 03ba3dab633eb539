/* pieces.h: work that libuv's threads do in pieces of some ten milliseconds, such as checks of large bodies. The next
 * piece always belongs to the flow (client, base/flow.h) that has used the least time. A client thus waits for at most
 * one piece of each other client. Only the main thread calls these functions. */
#ifndef PIECES_H
#define PIECES_H

#include <uv.h>

#include "server/base/flow.h"

struct queue;

struct piece {
    uv_work_t uv;
    /* The flow (client) that is charged for the time of the work. The piece's owner holds a reference to the flow.
     * NULL: none. */
    struct flow *flow;
    enum flow_work work;
    void (*run)(struct piece *piece); /* does the work, on one of libuv's threads */
    /* Called on the main thread after run() has ended. May add the piece again or free it. */
    void (*after)(struct piece *piece);
    struct pieces *pieces;
    struct piece *next;
    int64_t took_ns;
};

struct pieces {
    uv_loop_t *loop;
    struct queue *queue; /* the queue of jobs, which has the virtual time of each flow (client) */
    struct piece *first, **last;
    int running; /* number of pieces of work that libuv runs or has queued */
};

void pieces_init(struct pieces *pieces, uv_loop_t *loop, struct queue *queue);
/* Queues a piece of work, which one of libuv's threads runs when its client (flow) is next. The caller sets flow, work,
 * run and after. */
void pieces_add(struct pieces *pieces, struct piece *piece);

#endif
