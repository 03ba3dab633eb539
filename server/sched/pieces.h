/* pieces.h: work for libuv's threads, in pieces of some ten milliseconds.
 *
 * Checks of large bodies, and verification, are cut into pieces. The flow that has used the least time (base/flow.h)
 * runs the next piece. So a piece of one client waits for at most one piece of another client, even if that client has
 * a hundred. Each piece is charged to its flow.
 *
 * Call all functions on the loop's thread. */
#ifndef PIECES_H
#define PIECES_H

#include <uv.h>

#include "server/base/flow.h"

struct queue;

struct piece {
    uv_work_t uv;
    struct flow *flow; /* the owner of the piece holds the reference; NULL: no flow */
    enum flow_work work;
    void (*run)(struct piece *piece);   /* called on one of libuv's threads */
    void (*after)(struct piece *piece); /* called by the loop; it may add the piece again, or free it */
    struct pieces *pieces;
    struct piece *next;
    int64_t took_ns;
};

struct pieces {
    uv_loop_t *loop;
    struct queue *queue; /* knows the virtual time of each flow */
    struct piece *first, **last;
    int running; /* number of pieces that libuv has */
};

void pieces_init(struct pieces *pieces, uv_loop_t *loop, struct queue *queue);
/* Runs the piece when its flow is next. Set the members flow, work, run and after before. */
void pieces_add(struct pieces *pieces, struct piece *piece);

#endif
