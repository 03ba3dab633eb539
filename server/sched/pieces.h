/* pieces.h: work for libuv's threads, a piece of some ten milliseconds at a time.
 *
 * Checks of large bodies, and verification, are cut into pieces. The next piece is that of the flow which has used
 * least time (base/flow.h), so that a client with a hundred of them keeps another client's waiting for one piece and
 * not for a hundred. Each piece is charged to its flow.
 *
 * All functions are the loop's. */
#ifndef PIECES_H
#define PIECES_H

#include <uv.h>

#include "server/base/flow.h"

struct queue;

struct piece {
    uv_work_t uv;
    struct flow *flow; /* its owner holds it; NULL: nobody's */
    enum flow_work work;
    void (*run)(struct piece *piece);                    /* on one of libuv's threads */
    void (*after)(struct piece *piece, int64_t took_ns); /* on the loop; it may add the piece again, or free it */
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
/* Runs it when its turn comes. flow, work, run and after are filled in. */
void pieces_add(struct pieces *pieces, struct piece *piece);

#endif
