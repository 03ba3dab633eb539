/* queue.h: the jobs that wait for a device (only the main thread uses them), and the admission of requests (any
 * thread). From its headers to its last byte, a request has a place of the kind CALLER_RECEIVING. Then it has a place
 * of the kind CALLER_WAITING, until it is sent to a device or ends. Each kind has a bounded number of places, so
 * clients that send slowly do not keep others from being computed. */
#ifndef QUEUE_H
#define QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/base/caller.h"
#include "server/base/flow.h"
#include "server/work/job.h"

struct queue {
    /* For each kind of place (CALLER_RECEIVING, CALLER_WAITING): how many requests have a place, and how many may have
     * one. */
    struct {
        _Atomic int count;
        int limit;
    } places[CALLER_PLACES];

    /* Only the main thread uses the members from here down to `bytes`. */
    int max_batch;
    int64_t window_ns;
    /* All waiting jobs in order of arrival, except that an urgent job may be ahead of less urgent jobs of its
     * account. */
    struct job *first, *last;
    int count;
    struct flow *first_flow, *last_flow; /* the flows (clients) with waiting jobs */
    int flows;
    struct flow nobody; /* the flow of all jobs without a flow (client) of their own */
    /* largest virtual time (see queue.c) that a flow (client) had when its work left the queue, without its running
     * work */
    int64_t virtual_ns;
    int64_t bytes;
    double seconds_per_job; /* average time per job in recent batches, for the header Retry-After */
    /* number of waiting jobs and the bytes of their tensors, for readers on other threads */
    _Atomic int64_t waiting, waiting_bytes;
};

void queue_init(struct queue *queue, int max_receiving, int depth, int max_batch, int64_t window_ns);

/* ---- Admission of requests; any thread may call these functions -------------------------------------------------- */

/* Takes a place in the queue for a request. Errors, with the text for the client: BUSY (none is free), QUOTA (the
 * account has used up its share). */
attn_status queue_enter(struct queue *queue, enum caller_place place, struct caller *caller, attn_error *err);
void queue_leave(struct queue *queue, enum caller_place place, struct caller *caller);
/* Tests whether a request could take a place in the queue now. Called after the headers, so that the client of a
 * refused request need not send its body. */
attn_status queue_look(const struct queue *queue, enum caller_place place, const struct caller *caller,
                       attn_error *err);
/* Returns after how many seconds, 1 to 30, a refused client should try again: the waiting work divided by the recent
 * rate of work. */
int queue_retry_after_s(const struct queue *queue, int devices);

/* Sets *jobs to the number of jobs that wait for a device, and *bytes to the size of their tensors. */
void queue_waiting(const struct queue *queue, int64_t *jobs, int64_t *bytes);

/* ---- Jobs that wait; only the main thread calls these functions -------------------------------------------------- */

/* Adds the job at the end of the queue. A job without a cache transaction then moves ahead of less urgent jobs of its
 * account, past at most QUEUE_SCAN_MAX jobs. The caller ensures that the job holds a reference to its flow (client)
 * while it waits. */
void queue_push(struct queue *queue, struct job *job, int64_t now_ns);
void queue_remove(struct queue *queue, struct job *job);

/* The device for which queue_take() chooses a batch. has_room() returns whether a batch that begins with `job` may be
 * sent to it now. If has_room is NULL, every batch may be sent. */
struct queue_taker {
    int device;
    bool (*has_room)(void *context, const struct job *job);
    void *context;
};

/* Takes the next batch for a device out of the queue: at most `max_batch` problems that may run together. Writes the
 * jobs to jobs[], of max_batch entries, and returns their number. With --batch-window-us, returns 0 while the batch may
 * wait for more jobs, and sets *wait_ns to the remaining time. In all other cases *wait_ns becomes 0. */
int queue_take(struct queue *queue, const struct queue_taker *taker, int64_t now_ns, struct job **jobs,
               int64_t *wait_ns);

/* Returns the virtual time (see queue.c) of a flow (client). If `flow` is NULL, returns that of the queue's flow
 * `nobody`, which has all jobs without a client. */
int64_t queue_flow_ns(const struct queue *queue, const struct flow *flow, int64_t now_ns);
/* Called when work of the flow (client) begins to wait: raises the flow's virtual time to the queue's, so that an idle
 * flow saves up no time. */
void queue_flow_joins(struct queue *queue, struct flow *flow, int64_t now_ns);
/* Called when work of the flow (client) leaves the queue: raises the queue's virtual time to the flow's virtual time
 * (see queue.c). Here the flow's virtual time does not include running work. */
void queue_flow_served(struct queue *queue, const struct flow *flow);

/* A running batch counts in the virtual time of `flow`, from the time left_ns at which it was sent to a device. `flow`
 * is the flow of the batch's first job, or NULL. queue_flow_runs() is called when the batch has been sent, and
 * queue_flow_ran() when it has come back. */
void queue_flow_runs(struct flow *flow, int64_t left_ns);
void queue_flow_ran(struct flow *flow, int64_t left_ns);

/* True if the next batch could have more jobs if it was sent later. */
bool queue_may_grow(const struct queue *queue);

/* Updates the average seconds_per_job after a batch of `jobs` jobs has taken `seconds`. */
void queue_learn(struct queue *queue, int jobs, double seconds);

#endif
