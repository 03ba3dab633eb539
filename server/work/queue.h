/* queue.h: the jobs that wait for a device, and the admission of requests.
 *
 * Admission (any thread): a request takes a slot of the kind CALLER_RECEIVING from its headers to its last byte. After
 * that it has a slot of the kind CALLER_WAITING until it is sent to a device or ends. The number of slots of each kind
 * is bounded, so clients that send slowly do not keep other clients' requests from being computed. Only the main thread
 * uses the functions for jobs. This file uses no sockets and no timers. */
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
        _Atomic int count; /* number of slots of this kind (places in the queue) that requests have taken */
        int limit;         /* upper bound of `count`: how many slots of this kind (places in the queue) there are */
    } places[CALLER_PLACES];

    /* Only the main thread uses the members of the queue from here down to `bytes`. */
    int max_batch;
    int64_t window_ns;
    /* list of all waiting jobs, linked by in_queue. They are in order of arrival, but an urgent job may stand ahead of
     * less urgent jobs of its account. */
    struct job *first, *last;
    int count;
    struct flow *first_flow, *last_flow; /* list of the flows (clients) that have waiting jobs */
    int flows;
    struct flow nobody; /* the flow that all jobs without a flow of their own share; flows get fair shares of device
                         * time */
    int64_t virtual_ns; /* virtual time (see queue.c) of the flow (client) that was served last */
    int64_t bytes;
    double seconds_per_job; /* moving average of the seconds that a job takes on a device, for the header Retry-After */
    _Atomic int64_t waiting, waiting_bytes; /* copies for other threads: the number of waiting jobs, and the sum of
                                             * their bytes */
};

void queue_init(struct queue *queue, int max_receiving, int depth, int max_batch, int64_t window_ns);

/* ---- Admission of requests; any thread may call these functions -------------------------------------------------- */

/* Takes a slot of the queue for a request. Errors, with the text for the client: BUSY (no slot is free), QUOTA (the
 * account has used up its share of the slots). */
attn_status queue_enter(struct queue *queue, enum caller_place place, struct caller *caller, attn_error *err);
void queue_leave(struct queue *queue, enum caller_place place, struct caller *caller);
/* Tests whether a request could take a slot of the queue now. The server calls this after the headers of a request, so
 * that a client whose request is refused need not send its body. */
attn_status queue_look(const struct queue *queue, enum caller_place place, const struct caller *caller,
                       attn_error *err);
/* Returns the time in seconds, 1 to 30, after which a refused client should try again: the waiting work divided by the
 * recent rate of work. */
int queue_retry_after_s(const struct queue *queue, int devices);

/* Reports how many jobs wait for a device, and how many bytes their tensors have. */
void queue_waiting(const struct queue *queue, int64_t *jobs, int64_t *bytes);

/* ---- Jobs that wait; only the main thread calls these functions -------------------------------------------------- */

/* Adds the job at the end of the queue. A job without a cache transaction then moves ahead of less urgent jobs of its
 * account, past at most QUEUE_SCAN_MAX jobs. The caller of this function ensures that the job holds a reference to its
 * flow (client) while it waits. */
void queue_push(struct queue *queue, struct job *job, int64_t now_ns);
void queue_remove(struct queue *queue, struct job *job);

/* Says for which device queue_take() chooses a batch. has_room() tells whether a batch that begins with the job `job`
 * may be sent to the device now. If has_room is NULL, any batch may be sent. */
struct queue_taker {
    int device; /* the device's number */
    bool (*has_room)(void *context, const struct job *job);
    void *context;
};

/* Takes the next batch for a device out of the queue: a first job (the leader, see queue.c), and jobs that may run
 * together with it, at most `max_batch` problems. Writes the jobs to jobs[], an array of max_batch entries, and returns
 * the number of jobs. The option --batch-window-us sets a time for which the leader may wait for more jobs. During this
 * time the function returns 0 while the batch is not full, and *wait_ns is the remaining time. Otherwise *wait_ns is
 * 0. */
int queue_take(struct queue *queue, const struct queue_taker *taker, int64_t now_ns, struct job **jobs,
               int64_t *wait_ns);

/* Returns the flow's virtual time (see queue.c). NULL stands for the flow that all jobs without a flow of their own
 * share. */
int64_t queue_flow_ns(const struct queue *queue, const struct flow *flow, int64_t now_ns);
/* Call this when work of the flow (client) begins to wait. If the flow's virtual time is less than the queue's, it is
 * raised to the queue's. So an idle flow saves up no time. */
void queue_flow_joins(struct queue *queue, struct flow *flow, int64_t now_ns);
/* Call this when work of the flow (one client's work) leaves the queue to be computed. The function raises the queue's
 * virtual time to the flow's virtual time (see queue.c), if that is larger. Work of the flow that still runs is not
 * counted. */
void queue_flow_served(struct queue *queue, const struct flow *flow);

/* Call queue_flow_runs() when a batch was sent to a device at the time left_ns, and queue_flow_ran() when the batch is
 * back. `flow` is the flow of the batch's first job, or NULL. */
void queue_flow_runs(struct flow *flow, int64_t left_ns);
void queue_flow_ran(struct flow *flow, int64_t left_ns);

/* True if the next batch is not full yet, so that it could get more jobs by waiting. */
bool queue_may_grow(const struct queue *queue);

/* Updates the average seconds_per_job: a batch of `jobs` jobs has taken `seconds` on its device. */
void queue_learn(struct queue *queue, int jobs, double seconds);

#endif
