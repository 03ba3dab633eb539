/* loop_internal.h: types and functions that the files of the main thread share. Only the main thread uses them. The
 * public header is loop.h.
 *
 *   waiting.c   the requests whose connections are suspended: their list, hang-ups, deadlines, and how each leaves
 *   stop.c      the stages of stopping
 *   batches.c   begins cache transactions, sends batches to devices and takes them back
 *   loop.c      an iteration: messages, bodies that take long to check, sweeps, signals; open, run, close
 *
 * Each of these files calls only functions of the files above it in this list. */
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
    /* timerfd that counts the microseconds of --batch-window-us, because libuv's timers count milliseconds */
    int window_fd;
    uv_async_t signalled, step_ended;
    uv_work_t first_work;       /* a first, empty piece of work, which makes libuv start its threads */
    _Atomic int stops, reloads; /* numbers of signals to stop, and of signals to reload, that are not handled yet */

    struct deadlines deadlines;
    struct request *oldest, *newest; /* list of all requests whose connections are suspended */
    /* the oldest request without a hang-up watch (which tells when the client leaves); newer requests have none
     * either */
    struct request *unwatched;
    bool queue_changed;
    /* true: a cache transaction has ended or was dropped, so the main thread must examine all waiting transactions
     * again */
    bool transactions_changed;
    /* true: a job with a cache transaction has arrived that begin_transactions() has not examined yet */
    bool transactions_arrived;
    bool scan_cut; /* true: the last examination of waiting transactions ended before the end of the queue */
    uint64_t scan; /* sequence number of the last examination of all waiting transactions */
    struct job *batch_jobs[CONFIG_MAX_BATCH];
    int finishing;
    struct pieces pieces;
    /* Until this time the main thread polls instead of sleeping, because the last batch on a GPU will end soon
     * (base/polling_sleep.h). */
    int64_t awake_until_ns;

    struct loop_frontend frontend;
    struct loop_watch *watches; /* list of all watches that loop_watch() made */
    enum loop_stage stage;
    int64_t stage_since_ms;
    int exit_status;
    int most_open; /* the most connections that were open at once since memory was last returned to the system */
};

uv_loop_t *loop_uv(struct loop *loop);

/* ---- Functions that waiting.c defines ---------------------------------------------------------------------------- */

/* Adds a request whose connection is suspended to the list of waiting requests. */
void waiting_add(struct loop *loop, struct request *request);
/* Ends the main thread's work on the request, whatever its outcome, and resumes the request's connection. */
void waiting_hand_back(struct loop *loop, struct request *request);
/* Separates a waiting request from its job. The memory of a queued job is freed at once. The memory of a running job is
 * freed when the device returns the job. */
void waiting_detach(struct loop *loop, struct request *request);
/* Answers the request with this error. If the request is held (a device or a thread uses its client's memory), the
 * answer is sent when that use has ended. */
void waiting_cancel(struct loop *loop, struct request *request, proto_error error, const char *reason);
/* Call this if a device has failed or the server ends. A held request (one whose client's memory a device uses) can
 * then be answered although the device has not finished with that memory. */
void waiting_let_go_of_device(struct request *request);
/* True if a device uses the client's memory in place, so the client gets no answer before the device is done. */
bool waiting_is_used_in_place(const struct job *job);
/* Sets the main thread's timer to the next deadline. */
void waiting_arm_deadline(struct loop *loop);
/* Starts hang-up watches on the connections of all requests that have waited for LOOP_WATCH_AFTER_MS. A watch tells
 * when the client closes its connection. */
void waiting_tick(uv_timer_t *timer);

/* ---- Functions that stop.c defines ------------------------------------------------------------------------------- */

int stop_open_connections(const struct loop *loop);
/* Begins a drain (the server finishes accepted requests, then stops). --metrics-listen stays open during the drain, so
 * that it can be watched and probed. */
void stop_drain(struct loop *loop);
/* Answers all waiting requests now. A request that an HTTP thread is just about to post is not among them. Either the
 * HTTP thread sees `stopping` and answers it, or request_arrived() answers it later. */
void stop_waiting(struct loop *loop);
/* Goes on to the next stage of stopping the server if the current stage is over. */
void stop_advance(struct loop *loop, int64_t now_ms);

/* ---- Functions that batches.c defines ---------------------------------------------------------------------------- */

/* Puts the job into the queue of jobs that wait for a device. */
void batches_enqueue(struct loop *loop, struct job *job);
/* Puts the job into the queue of jobs that wait for a device. A check is not queued if no device computes exact results
 * for it. The CPU then starts the comparison at once. False: out of memory; the request has been answered. */
bool batches_begin(struct loop *loop, struct job *job);
/* Sends batches to devices while jobs wait and devices have room. */
void batches_dispatch(struct loop *loop);
/* Sets `batch_jobs` and `follows` of each job in the batch, which KServe's statistics of batches need. */
void batches_mark(struct batch *batch);
/* libuv calls this when the time of --batch-window-us is over. */
void batches_window(uv_poll_t *poll, int status, int events);
/* Handles a batch that has come back from a device. */
void batches_done(struct loop *loop, struct batch *batch);
/* Disables devices that do not finish their batches in time, and answers the requests on these devices. The jobs stay
 * with the device, because the device may still write to the jobs' memory. */
void batches_look_at_devices(struct loop *loop);

#endif
