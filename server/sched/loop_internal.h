/* loop_internal.h: types and functions that the files of the main thread share. Only the main thread uses them. The
 * public header is loop.h.
 *
 *   waiting.c   the list of requests whose connections are suspended, with their hang-ups and deadlines
 *   stop.c      the stages of stopping
 *   batches.c   begins cache transactions, sends batches to devices and takes them back
 *   loop.c      opens, runs and closes the event loop: messages, checks of large bodies, regular sweeps, signals
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
    /* timerfd for --batch-window-us, which is in microseconds; libuv's timers count milliseconds */
    int window_fd;
    uv_async_t signalled, step_ended;
    uv_work_t first_work;       /* does nothing, but makes libuv start its threads */
    _Atomic int stops, reloads; /* how many stop signals, and how many reload signals, were not handled yet */

    struct deadlines deadlines;
    struct request *oldest, *newest; /* first and last in the list of requests whose connections are suspended */
    /* the oldest request whose client is not yet watched for a hang-up; all newer requests are unwatched too */
    struct request *unwatched;
    bool queue_changed;
    /* Whether a cache transaction has ended, so that begin_transactions() must examine all waiting transactions
     * again. */
    bool transactions_changed;
    /* Whether a cache transaction has arrived that begin_transactions() has not examined yet. */
    bool transactions_arrived;
    bool scan_cut; /* whether the last search for transactions that can begin stopped before the end of the queue */
    uint64_t scan; /* number of the last search through all waiting cache transactions (`scan` of caches_begin()) */
    struct job *batch_jobs[CONFIG_MAX_BATCH];
    int finishing;
    struct pieces pieces;
    /* Until this time the main thread may poll instead of sleeping, because the batch that was sent last will probably
     * end soon (base/polling_sleep.h). It polls only while a batch is on a GPU and few requests are suspended. */
    int64_t awake_until_ns;

    struct loop_frontend frontend;
    struct loop_watch *watches;
    enum loop_stage stage;
    int64_t stage_since_ms;
    int exit_status;
    /* largest number of connections that were open at once since memory was last returned to the system */
    int most_open;
};

uv_loop_t *loop_uv(struct loop *loop);

/* ---- Functions that waiting.c defines ---------------------------------------------------------------------------- */

void waiting_add(struct loop *loop, struct request *request);
/* Ends the main thread's work on the request, and resumes its connection. */
void waiting_hand_back(struct loop *loop, struct request *request);
/* Separates a waiting request from its job. If the job is running, its memory is freed later, when the device returns
 * the job. */
void waiting_detach(struct loop *loop, struct request *request);
/* Answers the request with this error, but only after the last use of its client's memory by a device or a thread. */
void waiting_cancel(struct loop *loop, struct request *request, proto_error error, const char *reason);
/* Lets a request be answered although a device uses its client's memory, because the device has failed or the server
 * ends. */
void waiting_let_go_of_device(struct request *request);
/* True if a device uses the client's memory in place, so the client gets no answer before the device is done. */
bool waiting_is_used_in_place(const struct job *job);
void waiting_arm_deadline(struct loop *loop);
/* Called regularly by libuv. Starts to watch for hang-ups of those clients that have waited for LOOP_WATCH_AFTER_MS. */
void waiting_tick(uv_timer_t *timer);

/* ---- Functions that stop.c defines ------------------------------------------------------------------------------- */

int stop_open_connections(const struct loop *loop);
/* Begins a drain (accepted requests are finished, then the server stops). --metrics-listen stays open. */
void stop_drain(struct loop *loop);
/* Answers all waiting requests now. If an HTTP thread is just posting a request to the main thread, that request is
 * answered too: by the HTTP thread if it sees `stopping`, and otherwise by request_arrived(). */
void stop_waiting(struct loop *loop);
void stop_advance(struct loop *loop, int64_t now_ms);

/* ---- Functions that batches.c defines ---------------------------------------------------------------------------- */

void batches_enqueue(struct loop *loop, struct job *job);
/* Queues the job for a device. A check for which no device computes exact results is started at once on the CPU. False:
 * out of memory; the request has been answered. */
bool batches_begin(struct loop *loop, struct job *job);
void batches_dispatch(struct loop *loop);
/* Notes in each job how many jobs its batch has (`batch_jobs`), and whether an earlier job of the batch has the same
 * model (`follows`). KServe's statistics need this. */
void batches_mark(struct batch *batch);
/* libuv calls this when the time of --batch-window-us is over. */
void batches_window(uv_poll_t *poll, int status, int events);
void batches_done(struct loop *loop, struct batch *batch);
/* Disables devices that do not finish their batches in time, and answers their requests. The jobs stay with the device,
 * which may still write to their memory. */
void batches_look_at_devices(struct loop *loop);

#endif
