/* pieces.h: work for libuv's threads, in pieces of some ten milliseconds.
 *
 * Checks of large bodies, and verification, are cut into pieces. The next piece to run belongs to the flow (client,
 * base/flow.h) that has used the least time. So a client waits for at most one piece of each other client, however many
 * pieces the others have. The time of a piece is charged to its flow.
 *
 * Call all functions on the main thread. */
#ifndef PIECES_H
#define PIECES_H

#include <uv.h>

#include "server/base/flow.h"

struct queue;

struct piece {
    uv_work_t uv;
    /* the flow (client) to which the time is charged; the piece's owner holds the reference to it; NULL: no flow */
    struct flow *flow;
    enum flow_work work;
    void (*run)(struct piece *piece); /* does the work; called on one of libuv's threads */
    /* the main thread calls after() when run() has ended; after() may add the piece again or free it */
    void (*after)(struct piece *piece);
    struct pieces *pieces;
    struct piece *next;
    int64_t took_ns;
};

struct pieces {
    uv_loop_t *loop;
    struct queue *queue; /* the queue of jobs, which knows the virtual time of each flow (client) */
    struct piece *first, **last;
    int running; /* number of pieces that were given to libuv and have not ended */
};

void pieces_init(struct pieces *pieces, uv_loop_t *loop, struct queue *queue);
/* Runs the piece on one of libuv's threads when it is the turn of its flow (client). The caller sets the members flow,
 * work, run and after before this call. */
void pieces_add(struct pieces *pieces, struct piece *piece);

#endif
