/* pieces.c: the order in which libuv's threads work for clients. libuv runs its work in order of arrival, but clients
 * should take turns. So libuv gets only as many pieces of work as it has threads, and all other pieces wait in a list
 * of this file. --queue-depth limits the length of the list. A search of 1024 pieces takes microseconds. */
#include "server/sched/pieces.h"

#include <assert.h>
#include <stdlib.h>

#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/limits.h"
#include "server/work/queue.h"

static void give_to_libuv(struct pieces *pieces);

static void run(uv_work_t *uv)
{
    struct piece *piece = (struct piece *)uv; /* a valid cast: `uv` is the struct's first member */
    const int64_t began_ns = clock_ns();
    piece->run(piece);
    piece->took_ns = clock_ns() - began_ns;
}

static void after(uv_work_t *uv, int status)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct piece *piece = (struct piece *)uv;
    struct pieces *pieces = piece->pieces;
    (void)status;
    assert(pieces->running > 0);
    pieces->running--;
    flow_charge(piece->flow, piece->work, piece->took_ns);
    piece->after(piece);
    give_to_libuv(pieces);
}

/* Removes and returns the oldest piece of the flow (client) that has used the least time. */
static struct piece *take_next(struct pieces *pieces)
{
    struct piece **best = &pieces->first;
    const int64_t now_ns = clock_ns();
    for (struct piece **link = &pieces->first; *link; link = &(*link)->next)
        if (queue_flow_ns(pieces->queue, (*link)->flow, now_ns) < queue_flow_ns(pieces->queue, (*best)->flow, now_ns))
            best = link;
    struct piece *piece = *best;
    queue_flow_served(pieces->queue, piece->flow);
    *best = piece->next;
    if (*best == NULL) pieces->last = best;
    return piece;
}

static void give_to_libuv(struct pieces *pieces)
{
    while (pieces->first && pieces->running < PIECES_AT_ONCE) {
        struct piece *piece = take_next(pieces);
        pieces->running++;
        /* uv_queue_work() fails only if it gets no function */
        if (uv_queue_work(pieces->loop, &piece->uv, run, after) != 0) abort();
    }
}

void pieces_init(struct pieces *pieces, uv_loop_t *loop, struct queue *queue)
{
    *pieces = (struct pieces){ .loop = loop, .queue = queue };
    pieces->last = &pieces->first;
}

void pieces_add(struct pieces *pieces, struct piece *piece)
{
    piece->pieces = pieces;
    piece->next = NULL;
    queue_flow_joins(pieces->queue, piece->flow, clock_ns());
    *pieces->last = piece;
    pieces->last = &piece->next;
    give_to_libuv(pieces);
}
