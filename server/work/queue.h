/* queue.h: the jobs that wait for a device, and who may join them.
 *
 * Admission (any thread): a request has a place among those that are received from its headers to its last byte, and
 * then one among those that wait, until it leaves for a device or ends otherwise. Each has a bound of its own: whoever
 * sends slowly keeps nobody from being computed. Waiting and batching are the loop's alone. No sockets, no timers. */
#ifndef QUEUE_H
#define QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/base/caller.h"
#include "server/base/flow.h"
#include "server/work/job.h"

struct queue {
    struct {
        _Atomic int count; /* requests that have such a place */
        int limit;         /* how many there may be */
    } places[CALLER_PLACES];

    /* The loop's. */
    int max_batch;
    int64_t window_ns;
    struct job *first, *last; /* linked by in_queue, in order of arrival but for priority */
    int count;
    struct flow *first_flow, *last_flow; /* those with jobs that wait */
    int flows;
    struct flow nobody; /* the flow of jobs without one */
    int64_t virtual_ns; /* of the flow that was served last */
    int64_t bytes;
    double seconds_per_job;                 /* moving average of what a job costs a device; for Retry-After */
    _Atomic int64_t waiting, waiting_bytes; /* count and bytes for other threads */
};

void queue_init(struct queue *queue, int max_receiving, int depth, int max_batch, int64_t window_ns);

/* ---- Admission: any thread --------------------------------------------------------------------------------------- */

/* Errors, with what goes to the client: BUSY (all places are taken), QUOTA (the caller's share of them is). */
attn_status queue_enter(struct queue *queue, enum caller_place place, struct caller *caller, attn_error *err);
void queue_leave(struct queue *queue, enum caller_place place, struct caller *caller);
/* Could a request enter now? For the headers: who would be refused after its body need not send it. */
attn_status queue_look(const struct queue *queue, enum caller_place place, const struct caller *caller,
                       attn_error *err);
/* Whole seconds after which a refused client may come back, 1 to 30: what waits, divided by the recent rate. */
int queue_retry_after_s(const struct queue *queue, int devices);

/* Jobs that wait for a device, and their tensors' bytes. */
void queue_waiting(const struct queue *queue, int64_t *jobs, int64_t *bytes);

/* ---- Waiting: the loop ------------------------------------------------------------------------------------------- */

/* Adds the job at the end. A job without a step on caches then moves before less urgent jobs of its caller, past at
 * most QUEUE_SCAN_MAX jobs. The job must hold its flow while it waits here. */
void queue_push(struct queue *queue, struct job *job, int64_t now_ns);
void queue_remove(struct queue *queue, struct job *job);

/* The device that a batch is taken for. has_room: may a batch that this job leads leave for it now? NULL: any may. */
struct queue_taker {
    int device; /* its number */
    bool (*has_room)(void *context, const struct job *job);
    void *context;
};

/* The next batch for a device: the job that leads it (queue.c says which), and others that may run with it, at most
 * `max_batch` problems. Fills jobs[] (room for max_batch) and returns how many. With a window, none
 * while the first has waited less than that and the batch is not full: *wait_ns then says how long that will be,
 * and is 0 otherwise. */
int queue_take(struct queue *queue, const struct queue_taker *taker, int64_t now_ns, struct job **jobs,
               int64_t *wait_ns);

/* The flow's virtual time (queue.c), for other lists that choose by it. NULL: the flow of jobs that have none. */
int64_t queue_flow_ns(const struct queue *queue, const struct flow *flow, int64_t now_ns);
/* Work of the flow begins to wait: a flow behind the virtual time of the flow that was served last is set to it. */
void queue_flow_joins(struct queue *queue, struct flow *flow, int64_t now_ns);
/* Work of the flow leaves: the queue's virtual time grows to what the flow has used, without what still runs. */
void queue_flow_served(struct queue *queue, const struct flow *flow);

/* A batch that this flow leads has left for a device at this time (runs), and is back (ran). NULL does nothing. */
void queue_flow_runs(struct flow *flow, int64_t left_ns);
void queue_flow_ran(struct flow *flow, int64_t left_ns);

/* Could the next batch still gain members by waiting? */
bool queue_may_grow(const struct queue *queue);

/* A batch of `jobs` took `seconds` on its device. */
void queue_learn(struct queue *queue, int jobs, double seconds);

#endif
