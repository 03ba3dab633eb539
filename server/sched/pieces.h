/* pieces.h: work for libuv's threads, a piece of some ten milliseconds at a time.
 *
 * Checks of large bodies, and verification, are cut into pieces. The flow that has used the least time (base/flow.h)
 * has the next turn. A client's piece therefore waits for one piece of a client that has a hundred, not for all.
 * Each piece is charged to its flow.
 *
 * All functions are the loop's. */
#ifndef PIECES_H
#define PIECES_H

#include <uv.h>

#include "server/base/flow.h"

struct queue;

struct piece {
    uv_work_t uv;
    struct flow *flow; /* the piece's owner holds the reference; NULL: no flow */
    enum flow_work work;
    void (*run)(struct piece *piece);   /* on one of libuv's threads */
    void (*after)(struct piece *piece); /* on the loop; it may add the piece again, or free it */
    struct pieces *pieces;
    struct piece *next;
    int64_t took_ns;
};

struct pieces {
    uv_loop_t *loop;
    struct queue *queue; /* keeps the flows' virtual time */
    struct piece *first, **last;
    int running; /* with libuv */
};

void pieces_init(struct pieces *pieces, uv_loop_t *loop, struct queue *queue);
/* Runs the piece when its turn comes. The caller has set flow, work, run and after. */
void pieces_add(struct pieces *pieces, struct piece *piece);

#endif
