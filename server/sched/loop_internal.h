/* loop_internal.h: what the files of the main thread share; loop.h is what others see.
 * All of it is the loop's thread's.
 *
 *   waiting.c   the requests whose connections are suspended: their list, hang-ups, deadlines, and how each leaves
 *   stop.c      the stages of stopping
 *   batches.c   steps on caches begin, batches leave for devices and come back
 *   loop.c      the turn: messages, bodies that take long to check, sweeps, signals; open, run, close
 *
 * Each calls those above it alone. */
#ifndef LOOP_INTERNAL_H
#define LOOP_INTERNAL_H

#include <uv.h>

#include "server/base/deadlines.h"
#include "server/base/limits.h"
#include "server/base/mailbox.h"
#include "server/sched/loop.h"
#include "server/sched/pieces.h"

enum loop_stage { SERVING, DRAINING, STOPPING };

struct loop {
    uv_loop_t uv;
    struct server *server;
    struct mailbox box;
    uv_check_t check;
    uv_prepare_t prepare;
    uv_timer_t deadline_timer, tick_timer, sweep_timer;
    uv_poll_t window_poll;
    int window_fd; /* timerfd: libuv's timers count milliseconds, --batch-window-us does not */
    uv_async_t signalled, step_ended;
    uv_work_t first_work;       /* makes libuv start its threads */
    _Atomic int stops, reloads; /* signals that have not been looked at */

    struct deadlines deadlines;
    struct request *oldest, *newest; /* all requests whose connections are suspended */
    struct request *unwatched;       /* the oldest of them without a watch; those behind it have none either */
    bool queue_changed;
    bool steps_changed; /* a step has ended, or one that waited is gone */
    bool steps_arrived; /* one waits that has not been looked at */
    bool scan_cut;      /* the last look at all that wait did not reach the end of the queue */
    uint64_t scan;      /* number of that look */
    struct job *batch_jobs[CONFIG_MAX_BATCH];
    int finishing;
    struct pieces pieces;
    /* For the end of the last batch that left for a device with a processor of its own (base/naps.h). */
    int64_t awake_until_ns;

    struct loop_front front;
    struct loop_watch *watches; /* those of loop_watch() */
    enum loop_stage stage;
    int64_t stage_since_ms;
    int exit_status;
    int most_open; /* connections, since memory was last given back */
};

uv_loop_t *loop_uv(struct loop *loop);

/* ---- waiting.c --------------------------------------------------------------------------------------------------- */

/* Its connection is suspended from now on. */
void waiting_add(struct loop *loop, struct request *request);
/* The request is done with the loop, whatever became of it: its connection goes on. */
void waiting_hand_back(struct loop *loop, struct request *request);
/* Takes a waiting request away from its job, wherever that is. The job's memory is free at once if it was queued; if it
 * runs, when it comes back. */
void waiting_detach(struct loop *loop, struct request *request);
/* It is answered with this error; one that is held, when it is given back. */
void waiting_cancel(struct loop *loop, struct request *request, proto_error error, const char *reason);
/* The device does not answer any more, or the server ends: no end of the batch is waited for. */
void waiting_let_go_of_device(struct request *request);
/* Kernels, or copies of a GPU, read and write the memory of its client, so he gets no answer before they are done. */
bool waiting_is_used_in_place(const struct job *job);
/* For the next deadline. */
void waiting_arm_deadline(struct loop *loop);
/* Those that have waited long enough are watched for a hang-up. */
void waiting_tick(uv_timer_t *timer);

/* ---- stop.c ------------------------------------------------------------------------------------------------------ */

int stop_open_connections(const struct loop *loop);
/* The address of --metrics-listen stays open while what was accepted is finished: a drain can be watched, and
 * probed. */
void stop_drain(struct loop *loop);
/* Everything that waits is answered now. Requests that are on their way to the mailbox find stopping set, or arrive
 * and are answered in request_arrived(). */
void stop_waiting(struct loop *loop);
/* The next step of a drain, if its time has come. */
void stop_advance(struct loop *loop, int64_t now_ms);

/* ---- batches.c --------------------------------------------------------------------------------------------------- */

/* The job waits for a device. */
void batches_enqueue(struct loop *loop, struct job *job);
/* Sends batches to devices while there are both. */
void batches_dispatch(struct loop *loop);
/* What KServe's statistics say of batches, each job of a model knows of its own. */
void batches_mark(struct batch *batch);
/* --batch-window-us is over. */
void batches_window(uv_poll_t *poll, int status, int events);
/* A batch has come back. */
void batches_done(struct loop *loop, struct batch *batch);
/* A device that does not finish what it was given. Those who wait for it are answered; the jobs stay with it, for
 * it may still write into their memory. */
void batches_look_at_devices(struct loop *loop);

#endif
