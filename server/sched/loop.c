/* loop.c: the main thread. It owns every request between the end of its body and its answer.
 *
 *   on_message    a request has arrived: deadline, queue          a batch has come back: results, answers
 *   on_check      once a turn, after all messages: batches leave for devices that have room
 *   on_deadline   one timer for all deadlines (deadlines.c)
 *   on_tick       while something waits: hang-up watches for those that have waited long enough
 *   on_sweep      connections that are too slow; memory and contexts that are too old; the steps of a drain
 *
 * A suspended connection has no eyes, so whoever waits longer than LOOP_WATCH_AFTER_MS gets a uv_poll for UV_DISCONNECT.
 * Most requests are answered before that and cost no system call here. A client that shuts down its sending side
 * counts as gone.
 *
 * Stopping (SIGTERM or SIGINT):
 *
 *   SERVING --signal--> DRAINING: readiness says 503, the listeners take their backlog and close, every answer says
 * Connection: close
 *           --nothing open, or --drain-ms passed, or a second signal--> STOPPING: what waits is answered 503, nothing new is
 * suspended
 *           --nothing suspended, and nothing open or LOOP_STOP_MS passed--> over
 *
 * When the last usable device fails: readiness says 503, then STOPPING, and loop_run() returns 70.
 *
 * Invariants
 * 1. Every request in the list `suspended` is in CHECKING, QUEUED, RUNNING or FINISHING, and every such request is in it.
 * 2. A watch is closed before its connection is resumed: afterwards the descriptor may be somebody else's.
 * 3. loop_run() returns only when no connection is suspended and none can become so. */
#include "server/sched/loop.h"

#include <assert.h>
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/work/caches.h"
#include "server/work/contexts.h"
#include "server/work/prepare.h"
#include "server/work/steps.h"
#include "server/work/regions.h"
#include "server/device/devices.h"
#include "server/sched/check.h"
#include "server/sched/finish.h"
#include "server/base/heartbeat.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/base/signals.h"

enum stage { SERVING, DRAINING, STOPPING };

struct hangup_watch {
    uv_poll_t poll;
    struct request *request;
};

struct loop {
    uv_loop_t uv;
    struct server *server;
    struct mailbox box;
    uv_check_t check;
    uv_prepare_t prepare;
    uv_timer_t deadline_timer, tick_timer, sweep_timer;
    uv_poll_t window_poll;
    int window_fd; /* timerfd: libuv's timers count milliseconds, --batch-window-us does not */
    uv_async_t signalled;
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

    struct loop_front front;
    enum stage stage;
    int64_t stage_since_ms;
    int exit_status;
    int most_open; /* connections, since memory was last given back */
};

/* ---- Suspended requests ------------------------------------------------------------------------------------------ */

/* Invariant 1: in a state in which its connection is suspended. */
static bool is_suspended(const struct request *request)
{
    return request->state == REQUEST_CHECKING || request->state == REQUEST_QUEUED ||
           request->state == REQUEST_RUNNING || request->state == REQUEST_FINISHING;
}

static void list_add(struct loop *loop, struct request *request)
{
    assert(is_suspended(request) && request->next == NULL && request->previous == NULL && loop->newest != request);
    request->next = NULL;
    request->previous = loop->newest;
    *(loop->newest ? &loop->newest->next : &loop->oldest) = request;
    loop->newest = request;
    if (loop->unwatched == NULL) loop->unwatched = request;
    if (!uv_is_active((uv_handle_t *)&loop->tick_timer))
        uv_timer_start(&loop->tick_timer, loop->tick_timer.timer_cb, LOOP_TICK_MS, LOOP_TICK_MS);
}

static void list_remove(struct loop *loop, struct request *request)
{
    assert(is_suspended(request));
    assert(request->previous ? request->previous->next == request : loop->oldest == request);
    assert(request->next ? request->next->previous == request : loop->newest == request);
    if (loop->unwatched == request) loop->unwatched = request->next;
    *(request->previous ? &request->previous->next : &loop->oldest) = request->next;
    *(request->next ? &request->next->previous : &loop->newest) = request->previous;
    request->next = request->previous = NULL;
}

static void on_watch_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void watch_stop(struct request *request)
{
    struct hangup_watch *watch = request->watch;
    if (watch == NULL) return;
    request->watch = NULL;
    watch->poll.data = watch;
    uv_poll_stop(&watch->poll);
    uv_close((uv_handle_t *)&watch->poll, on_watch_closed);
}

/* The request is done with the loop, whatever became of it: its connection goes on. */
static void hand_back(struct loop *loop, struct request *request)
{
    deadlines_remove(&loop->deadlines, &request->deadline);
    list_remove(loop, request);
    watch_stop(request);
    assert(request->watch == NULL && request->deadline.place == 0 && !request->held);
    loop->front.resume(request);
}

/* Kernels, or copies of a GPU, read and write the memory of its client, so he gets no answer before they are done. */
static bool is_used_in_place(const struct job *job)
{
    return job->shared && (job->shared->home >= 0 || job->shared->pinned_bytes > 0);
}

/* Nobody wants the result of a request that is held while its batch runs. */
static void give_up(struct request *request)
{
    struct job *job = request->job;
    assert(request->held && job->batch && job->batch->waiting > 0);
    if (job->given_up) return;
    job->given_up = true;
    if (--job->batch->waiting == 0) attn_cancel(&job->batch->cancel);
}

/* The same of one that is not handed back yet: soon over, on_checked(), on_finished() or batch_done() does it. */
static void end_held(struct request *request)
{
    if (request->state == REQUEST_FINISHING) request->job->finishing->cancelled = true;
    if (request->state == REQUEST_RUNNING) give_up(request);
}

/* The device does not answer any more, or the server ends: no end of the batch is waited for. */
static void let_go_of_device(struct request *request)
{
    if (request->state == REQUEST_RUNNING) request->held = false;
}

/* Takes a waiting request away from its job, wherever that is. The job's memory is free at once if it was queued; if it
 * runs, when it comes back. */
static void detach(struct loop *loop, struct request *request)
{
    struct job *job = request->job;
    assert(job->request == request);
    assert(job->batch == NULL || (request->state == REQUEST_RUNNING && (job->given_up || job->batch->waiting > 0)));
    if (request->state == REQUEST_QUEUED) {
        queue_remove(&loop->server->queue, job);
        loop->queue_changed = true;
        loop->steps_changed |= job->step != NULL;
        step_end(job, false); /* of one that runs: when the device is done */
    }
    prepare_finish_contexts(job, false); /* a device may still read what it uses: it is only read, and stays leased */
    if (job->batch && !job->given_up && --job->batch->waiting == 0)
        attn_cancel(&job->batch->cancel); /* it would compute for nobody */
    job->batch = NULL;
    if (job->finishing) job->finishing->cancelled = true;
    job->request = NULL;
    request->job = NULL;
    job_release(job);
}

static void cancel(struct loop *loop, struct request *request, proto_error error, const char *reason)
{
    request_fail(request, error, NULL, "%s", reason);
    if (request->held) {
        end_held(request);
        deadlines_remove(&loop->deadlines, &request->deadline);
        return;
    }
    detach(loop, request);
    hand_back(loop, request);
}

static void on_hangup(uv_poll_t *poll, int status, int events)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct hangup_watch *watch = (struct hangup_watch *)poll; /* its first member */
    struct request *request = watch->request;
    struct loop *loop = poll->loop->data;
    if (status == 0 && !(events & UV_DISCONNECT)) return;
    metrics_add(METRIC_CANCELLED, request_state_label(request->state), NULL, 1);
    request->gone = true;
    if (request->held) {
        end_held(request);
        watch_stop(request);
        return;
    }
    detach(loop, request);
    hand_back(loop, request);
}

static void watch_start(struct loop *loop, struct request *request)
{
    struct hangup_watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL) return; /* unwatched, it is found out when it is answered */
    watch->request = request;
    if (uv_poll_init(&loop->uv, &watch->poll, request->socket) != 0) {
        free(watch);
        return;
    }
    request->watch = watch;
    if (uv_poll_start(&watch->poll, UV_DISCONNECT, on_hangup) != 0) watch_stop(request);
}

static void on_tick(uv_timer_t *timer)
{
    struct loop *loop = timer->loop->data;
    const int64_t until_ns = clock_ns() - LOOP_WATCH_AFTER_MS * CLOCK_NS_PER_MS;
    while (loop->unwatched && loop->unwatched->times.received_ns <= until_ns) {
        struct request *request = loop->unwatched;
        loop->unwatched = request->next;
        watch_start(loop, request);
    }
    if (loop->oldest == NULL) uv_timer_stop(timer);
}

/* ---- Deadlines --------------------------------------------------------------------------------------------------- */

static void on_deadline(uv_timer_t *timer);

static void arm_deadline(struct loop *loop)
{
    const struct deadline *next = deadlines_next(&loop->deadlines);
    if (next == NULL) {
        uv_timer_stop(&loop->deadline_timer);
        return;
    }
    const int64_t wait_ms = (next->at_ns - clock_ns()) / CLOCK_NS_PER_MS + 1;
    uv_timer_start(&loop->deadline_timer, on_deadline, wait_ms > 0 ? (uint64_t)wait_ms : 0, 0);
}

static void on_deadline(uv_timer_t *timer)
{
    struct loop *loop = timer->loop->data;
    struct deadline *next;
    const int64_t now = clock_ns();
    while ((next = deadlines_next(&loop->deadlines)) && next->at_ns <= now) {
        struct request *request = (struct request *)((char *)next - offsetof(struct request, deadline));
        cancel(loop, request, PROTO_E_DEADLINE,
               request->state == REQUEST_QUEUED ? "the deadline passed while the request waited for a device"
                                                : "the deadline passed while the request was running");
    }
    arm_deadline(loop);
}

/* ---- Steps on caches --------------------------------------------------------------------------------------------- */

static void enqueue(struct loop *loop, struct job *job)
{
    queue_push(&loop->server->queue, job, clock_ns());
    loop->queue_changed = true;
    loop->steps_arrived |= job->waits;
}

/* Of a step whose request fails, whatever it fails of, the caches are as they were. */
static void end_step(struct loop *loop, struct job *job, bool commit)
{
    if (job->step == NULL) return;
    step_end(job, commit);
    loop->queue_changed = loop->steps_changed = true;
}

/* Steps that can begin do, from the oldest on: from then on their jobs may leave. Where no step has ended since all were looked at,
 * those that have come are looked at alone: a step may have a thousand caches, and there may be hundreds that wait. */
static void begin_steps(struct loop *loop)
{
    struct job *job = loop->server->queue.first, *next;
    const bool all = loop->steps_changed;
    loop->steps_changed = loop->steps_arrived = false;
    if (all) loop->scan++;
    else if (loop->scan_cut) return; /* they come after others that have not been looked at either */
    else
        for (job = loop->server->queue.last; job && job->previous && !job->previous->looked;) job = job->previous;
    for (int64_t rows = 0; job && rows < QUEUE_STEP_ROWS; job = next) {
        attn_error err = { 0 };
        bool wait = false;
        next = job->next;
        job->looked = true;
        if (!job->waits) continue;
        rows += job->call->items[0].cache_count;
        if (step_begin(job, loop->scan, &wait, &err) == ATTN_OK) continue;
        struct request *request = job->request;
        request_fail_status(request, &err);
        detach(loop, request);
        hand_back(loop, request);
    }
    loop->scan_cut = job != NULL;
}

/* ---- Batches out ------------------------------------------------------------------------------------------------- */

static void arm_window(struct loop *loop, int64_t wait_ns)
{
    const struct itimerspec when = { .it_value = { wait_ns / CLOCK_NS_PER_S, wait_ns % CLOCK_NS_PER_S } };
    (void)timerfd_settime(loop->window_fd, 0, &when, NULL);
}

/* What KServe's statistics say of batches, each job of a model knows of its own. */
static void mark_batch(struct batch *batch)
{
    for (int i = 0; i < batch->count; i++) {
        struct job *job = batch->jobs[i];
        job->batch_jobs = batch->count;
        job->follows = false; /* it may have been in another batch, which failed */
        for (int before = 0; job->call->model && before < i && !job->follows; before++)
            job->follows = batch->jobs[before]->call->model == job->call->model;
    }
}

/* Sends batches to devices while there are both. */
static void dispatch(struct loop *loop)
{
    struct server *server = loop->server;
    struct device *device;
    unsigned passed_over = 0;
    if (loop->steps_changed || loop->steps_arrived) begin_steps(loop);
    while (server->queue.count > 0 && (device = devices_pick(server->devices, passed_over)) != NULL) {
        int64_t wait_ns;
        if (device_can_wait(device) && queue_may_grow(&server->queue)) break;
        const int64_t now = clock_ns();
        const int count = queue_take(&server->queue, device_number(device), now, loop->batch_jobs, &wait_ns);
        if (count == 0) { /* what waits is for another device, or for others to come */
            if (wait_ns > 0) arm_window(loop, wait_ns);
            passed_over |= 1u << device_number(device);
            continue;
        }
        struct batch *batch = calloc(1, sizeof *batch + (size_t)count * sizeof batch->jobs[0]);
        for (int i = 0; i < count; i++) {
            struct job *job = loop->batch_jobs[i];
            struct request *request = job->request;
            if (batch == NULL) { /* the queue has forgotten it, detach() must not take it out again */
                end_step(loop, job, false);
                request_move(request, REQUEST_RUNNING);
                cancel(loop, request, PROTO_E_OUT_OF_MEMORY, "no memory for a batch");
                continue;
            }
            request_move(request, REQUEST_RUNNING);
            request->held = is_used_in_place(job);
            batch->jobs[i] = job_hold(job);
            batch->flops += job->flops;
            batch->waiting++;
            job->batch = batch;
        }
        if (batch == NULL) break;
        batch->count = count;
        mark_batch(batch);
        metrics_observe(METRIC_BATCH_SIZE, NULL, count);
        devices_submit(server->devices, batch, device);
    }
}

static void on_window(uv_poll_t *poll, int status, int events)
{
    struct loop *loop = poll->loop->data;
    uint64_t expirations;
    (void)status;
    (void)events;
    (void)!read(loop->window_fd, &expirations, sizeof expirations);
    loop->queue_changed = true;
}

/* Callbacks for sockets and messages run inside uv's poll and say themselves that a piece of work begins; timers run
 * between the two below. */
static void on_prepare(uv_prepare_t *prepare)
{
    (void)prepare;
    heartbeat_idle();
}

static void on_check(uv_check_t *check)
{
    struct loop *loop = check->loop->data;
    heartbeat_busy(HEARTBEAT_LOOP);
    if (!loop->queue_changed) return;
    loop->queue_changed = false;
    arm_deadline(loop);
    dispatch(loop);
}

/* ---- Batches back ------------------------------------------------------------------------------------------------ */

/* The job is done, and its request is answered: well, or with what became of it while it was finished. */
static void finish_request(struct loop *loop, struct job *job)
{
    prepare_finish_contexts(job, !job->request->failed && !job->request->gone);
    hand_back(loop, job->request);
}

static void on_finished(void *context, struct finishing *finishing)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct loop *loop = context;
    struct job *job = finishing->job;
    struct request *request = job->request;
    assert(loop->finishing > 0 && job->finishing == finishing);
    loop->finishing--;
    const bool failed = finishing->error.status != ATTN_OK;
    end_step(loop, job, request != NULL && !request->failed && !request->gone && !failed);
    job->finishing = NULL;
    region_uses_free(job->shared); /* nothing is written any more */
    job->shared = NULL;
    if (request != NULL) {
        const proto_call *call = job->call;
        request->held = false;
        request->encoder = finishing->encoder; /* the request's now */
        finishing->encoder = NULL;
        request->times.encode_ns += finishing->wrote_ns;
        if (failed) request_fail_in_job(request, &finishing->error);
        else if (!call->envelope && call->items[0].error.status != ATTN_OK)
            request_fail_in_job(request, &call->items[0].error);
    }
    finish_free(finishing); /* and its reference, as in batch_done() */
    if (request != NULL) finish_request(loop, job);
}

static void finish(struct loop *loop, struct job *job)
{
    job->finishing = finish_new(job, job->request->id, on_finished, loop);
    if (job->finishing == NULL) {
        end_step(loop, job, false);
        cancel(loop, job->request, PROTO_E_OUT_OF_MEMORY, "no memory to finish the answer");
        return;
    }
    request_move(job->request, REQUEST_FINISHING);
    /* Once it is answered its shared memory is the client's alone. */
    job->request->held = job->shared && job->shared->writes;
    loop->finishing++;
    finish_start(job->finishing, &loop->uv);
}

static void cancel_waiting(struct loop *loop);

/* The device is beyond repair inside this process. The others go on; without any the server is not ready from now
 * on, and whoever called this answers those that he has to answer and then calls end_if_failed(). */
static void device_failed(struct loop *loop, struct device *device, const char *text)
{
    if (!device_disable(device)) return;
    log_event(LOG_ERROR, NULL, "device_failed", "device=%s text=" LOG_Q, device_name(device), text);
    caches_lose(loop->server->caches, device_number(device));
    /* What only that device can compute does not wait for its deadline. */
    for (struct request *request = loop->oldest, *next; request; request = next) {
        next = request->next;
        if (request->state == REQUEST_QUEUED && request->job->home == device_number(device))
            cancel(loop, request, PROTO_E_UNAVAILABLE, text);
    }
    if (devices_usable(loop->server->devices) || loop->stage == STOPPING) return;
    atomic_store(&loop->server->phase, SERVER_FAILED);
    loop->exit_status = 70;
    signals_end_within(LOOP_STOP_MS + SIGNALS_GRACE_MS, loop->exit_status);
}

static void end_if_failed(struct loop *loop)
{
    if (loop->exit_status != 0) cancel_waiting(loop);
}

/* A device that does not finish what it was given. Those who wait for it are answered; the jobs stay with it, for
 * it may still write into their memory. */
static void look_at_devices(struct loop *loop)
{
    struct device *device;
    bool overdue;
    while ((device = devices_to_disable(loop->server->devices, &overdue)) != NULL) {
        char text[128];
        snprintf(text, sizeof text, overdue ? "%.40s did not finish in the time it may take" : "%.40s was lost",
                 device_name(device));
        device_failed(loop, device, text);
        metrics_add(METRIC_DEVICE_ERRORS, device_name(device), overdue ? "OVERDUE" : "DEVICE_LOST", 1);
        for (struct batch *batch = device_batches(device); batch; batch = batch->next)
            for (int i = 0; i < batch->count; i++)
                if (batch->jobs[i]->request) {
                    let_go_of_device(batch->jobs[i]->request);
                    cancel(loop, batch->jobs[i]->request, PROTO_E_UNAVAILABLE, text);
                }
        loop->queue_changed = true;
    }
    end_if_failed(loop);
}

static void batch_done(struct loop *loop, struct batch *batch)
{
    struct server *server = loop->server;
    struct device *device = batch->device;
    int waiting = 0;

    devices_collect(server->devices, batch);
    batch_count(batch, batch->jobs[0]);
    /* When a batch fails all of it does, for the same reason. */
    if (!batch->jobs[0]->ran && batch->jobs[0]->error.status == ATTN_DEVICE_LOST)
        device_failed(loop, device, batch->jobs[0]->error.text);
    if (batch->waiting > 0)
        queue_learn(&server->queue, batch->count, (double)(batch->ended_ns - batch->started_ns) / 1e9);
    for (int i = 0; i < batch->count; i++) {
        struct job *job = batch->jobs[i];
        struct request *request = job->request;
        assert(job->batch == (request ? batch : NULL)); /* whoever stopped waiting for it took it out */
        const bool waited = request != NULL && !job->given_up;
        waiting += waited;
        job->batch = NULL;
        const bool finishes = job->ran && waited && finish_is_wanted(job);
        if (!finishes) end_step(loop, job, job->ran && waited);
        /* The batch's reference goes first: whoever answers may then see that the job is all his, and reuse its
         * memory. The request has its own. */
        job_release(job);
        if (request != NULL) {
            request->held = false;
            if (!job->ran) {
                request_fail_in_job(request, &job->error);
                prepare_finish_contexts(job, false);
                hand_back(loop, request);
            } else {
                batch_note_times(batch, job);
                if (finishes) finish(loop, job);
                else finish_request(loop, job);
            }
        }
    }
    assert(waiting == batch->waiting);
    free(batch);
    loop->queue_changed = true;
    end_if_failed(loop);
}

/* ---- Messages ---------------------------------------------------------------------------------------------------- */

/* A body that takes long to check. */
struct checking {
    uv_work_t work;
    struct request *request; /* stays the loop's meanwhile, and is not handed back */
    struct check_result result;
    bool complete;
};

static void check_work(uv_work_t *work)
{
    struct checking *checking = (struct checking *)work; /* its first member */
    request_set_role(ROLE_DEVICE);
    checking->complete = check_piece(checking->request, &checking->result, clock_ns() + FINISH_PIECE_NS);
}

static const char homeless[] = "the device that alone can compute this has failed";

/* It is in the queue, for a device that has failed since it was looked for. */
static bool is_homeless(const struct loop *loop, const struct job *job)
{
    return job->home >= 0 && !devices_is_usable(loop->server->devices, job->home);
}

static void on_checked(uv_work_t *work, int status)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct checking *checking = (struct checking *)work;
    struct loop *loop = work->loop->data;
    struct request *request = checking->request;
    (void)status;
    assert(loop->finishing > 0 && request->held && request->state == REQUEST_CHECKING);
    if (!checking->complete && !request->failed && !request->gone) { /* the next piece */
        if (uv_queue_work(&loop->uv, &checking->work, check_work, on_checked) != 0) abort();
        return;
    }
    loop->finishing--;
    request->held = false;
    deadlines_remove(&loop->deadlines, &request->deadline);
    check_apply(request, &checking->result);
    free(checking);
    if (!request->failed && !request->gone && request->job->runnable > 0) {
        request->job->request = request;
        request_move(request, REQUEST_QUEUED);
        enqueue(loop, request->job);
        if (is_homeless(loop, request->job)) cancel(loop, request, PROTO_E_UNAVAILABLE, homeless);
        else if (!deadlines_add(&loop->deadlines, &request->deadline))
            cancel(loop, request, PROTO_E_OUT_OF_MEMORY, "no memory for a deadline");
        return;
    }
    if (request->job) prepare_finish_contexts(request->job, false);
    request_drop_body(request); /* its slot, and what a decoder that failed still holds */
    hand_back(loop, request);
}

static void check(struct loop *loop, struct request *request)
{
    struct checking *checking = loop->stage == STOPPING ? NULL : calloc(1, sizeof *checking);
    if (checking == NULL || !deadlines_add(&loop->deadlines, &request->deadline)) {
        if (loop->stage == STOPPING) request_fail(request, PROTO_E_DRAINING, NULL, "the server is stopping");
        else request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory to check the request");
        free(checking);
        request_drop_body(request);
        hand_back(loop, request);
        return;
    }
    checking->request = request;
    request->held = true;
    loop->finishing++;
    /* It fails only without a function to call. */
    if (uv_queue_work(&loop->uv, &checking->work, check_work, on_checked) != 0) abort();
}

/* An HTTP thread has put its job on a device, where it takes longer than was thought: from here on it is a batch like others.
 * False: the request is answered. */
static bool take_late(struct loop *loop, struct request *request)
{
    struct job *job = request->job;
    struct batch *batch = calloc(1, sizeof *batch + sizeof batch->jobs[0]);
    if (batch == NULL) { /* its memory is free when the device is done with it */
        devices_settle(job);
        cancel(loop, request, PROTO_E_OUT_OF_MEMORY, "no memory for a batch");
        return false;
    }
    job->queued_ns = clock_ns();
    batch->jobs[0] = job_hold(job);
    batch->flops = job->flops;
    batch->count = batch->waiting = 1;
    job->batch = batch;
    request->held = is_used_in_place(job);
    mark_batch(batch);
    metrics_observe(METRIC_BATCH_SIZE, NULL, 1);
    devices_submit_late(loop->server->devices, batch);
    loop->queue_changed = true; /* there is a deadline to be kept */
    return true;
}

static void request_arrived(struct loop *loop, struct request *request)
{
    list_add(loop, request);
    if (request->state == REQUEST_CHECKING) {
        check(loop, request);
        return;
    }
    if (request->job->late) {
        if (!take_late(loop, request)) return;
    } else enqueue(loop, request->job);
    if (loop->stage == STOPPING) {
        let_go_of_device(request);
        cancel(loop, request, PROTO_E_DRAINING, "the server is stopping");
        return;
    }
    if (request->state == REQUEST_QUEUED && is_homeless(loop, request->job))
        cancel(loop, request, PROTO_E_UNAVAILABLE, homeless);
    else if (!deadlines_add(&loop->deadlines, &request->deadline))
        cancel(loop, request, PROTO_E_OUT_OF_MEMORY, "no memory for a deadline");
}

static void on_message(void *context, struct message *message)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    switch (message->kind) {
    case LOOP_REQUEST:
        request_arrived(context, (struct request *)message);
        break; /* the message is the first member of both */
    case LOOP_BATCH: batch_done(context, (struct batch *)message); break;
    default: assert(0 && "a message of no kind");
    }
}

void loop_post(struct loop *loop, struct request *request)
{
    request->message.kind = LOOP_REQUEST;
    mailbox_post(&loop->box, &request->message);
}

/* ---- Stopping ---------------------------------------------------------------------------------------------------- */

static void enter_stage(struct loop *loop, enum stage stage)
{
    loop->stage = stage;
    loop->stage_since_ms = clock_ms();
}

static int open_connections(const struct loop *loop)
{
    return loop->front.connections(loop->front.context);
}

/* The address of --metrics-listen stays open while what was accepted is finished: a drain can be watched, and
 * probed. */
static void drain(struct loop *loop)
{
    int ready = SERVER_READY;
    /* First: once answers say that their connection ends, clients open new ones, and one whose handshake meets the
     * close is reset. */
    loop->front.drain(loop->front.context);
    enter_stage(loop, DRAINING);
    atomic_compare_exchange_strong(&loop->server->phase, &ready, SERVER_DRAINING);
    atomic_store(&loop->server->drain_since_ms, loop->stage_since_ms);
    log_event(LOG_INFO, NULL, "draining", "connections=%d waiting=%d", open_connections(loop),
              atomic_load(&loop->server->suspended));
}

/* Everything that waits is answered now. Requests that are on their way to the mailbox find stopping set, or arrive
 * and are answered in request_arrived(). */
static void cancel_waiting(struct loop *loop)
{
    if (loop->stage == STOPPING) return;
    if (loop->stage == SERVING) drain(loop);
    enter_stage(loop, STOPPING);
    loop->front.close_metrics(loop->front.context);
    atomic_store(&loop->server->stopping, true);
    int cut = 0;
    for (struct request *request = loop->oldest, *next; request; request = next, cut++) {
        next = request->next;
        let_go_of_device(request);
        if (loop->exit_status != 0) cancel(loop, request, PROTO_E_UNAVAILABLE, "no device is usable");
        else cancel(loop, request, PROTO_E_DRAINING, "the server is stopping");
    }
    if (cut > 0) log_event(LOG_WARN, NULL, "stopping", "unanswered=%d", cut);
}

/* The next step of a drain, if its time has come. */
static void advance(struct loop *loop, int64_t now_ms)
{
    struct server *server = loop->server;
    const int open = open_connections(loop);
    if (loop->stage == DRAINING && (open == 0 || now_ms - loop->stage_since_ms >= server->config->drain_ms))
        cancel_waiting(loop);
    if (loop->stage != STOPPING || atomic_load(&server->suspended) > 0) return;
    if (open > 0 && now_ms - loop->stage_since_ms < LOOP_STOP_MS) return;
    uv_stop(&loop->uv);
}

/* What connections and their requests took from malloc, glibc keeps for the next ones. After a crowd has left, it
 * is given back. (libmicrohttpd's 80 KiB of each connection are mapped, and go back by themselves.) */
static void give_back_memory(struct loop *loop)
{
    const int open = open_connections(loop);
    if (open > loop->most_open) loop->most_open = open;
    if (loop->most_open < LOOP_CROWD || open > loop->most_open / 4) return;
    loop->most_open = open;
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

static void on_sweep(uv_timer_t *timer)
{
    struct loop *loop = timer->loop->data;
    struct server *server = loop->server;
    const int64_t now_ms = clock_ms();

    loop->front.sweep(loop->front.context, now_ms, loop->stage != SERVING);
    if (!server->pinned) staging_trim(server->staging, now_ms, STAGING_WARM_MS);
    contexts_expire(server->contexts, now_ms);
    caches_expire(server->caches, now_ms);
    give_back_memory(loop);
    look_at_devices(loop);
    double seconds;
    const int jobs = devices_learn(server->devices, &seconds);
    if (jobs > 0) queue_learn(&server->queue, jobs, seconds);
    if (loop->stage != SERVING) advance(loop, now_ms);
}

static void on_signalled(uv_async_t *async)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct loop *loop = async->loop->data;
    if (atomic_exchange(&loop->reloads, 0) > 0) loop->front.reload(loop->front.context);
    for (int stops = atomic_exchange(&loop->stops, 0); stops > 0; stops--) {
        log_event(LOG_INFO, NULL, "signal", "stage=%s", loop->stage == SERVING ? "serving" : "draining");
        if (loop->stage == SERVING) {
            drain(loop);
            advance(loop, clock_ms());
        } else cancel_waiting(loop);
    }
}

void loop_signal(struct loop *loop, int number)
{
    atomic_fetch_add(number == SIGHUP ? &loop->reloads : &loop->stops, 1);
    uv_async_send(&loop->signalled);
}

/* ---- Open, run, close -------------------------------------------------------------------------------------------- */

static void must(int error, const char *what)
{
    if (error == 0) return;
    fprintf(stderr, "attnd: %s: %s\n", what, uv_strerror(error));
    abort();
}

struct loop *loop_open(struct server *server)
{
    struct loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL) {
        fprintf(stderr, "attnd: out of memory for an event loop of %zu bytes\n", sizeof *loop);
        abort();
    }
    must(uv_loop_init(&loop->uv), "event loop");
    loop->uv.data = loop;
    loop->scan = 1;
    loop->server = server;
    must(mailbox_open(&loop->box, &loop->uv, on_message, loop), "mailbox");
    must(uv_check_init(&loop->uv, &loop->check), "event loop");
    must(uv_check_start(&loop->check, on_check), "event loop");
    must(uv_prepare_init(&loop->uv, &loop->prepare), "event loop");
    must(uv_prepare_start(&loop->prepare, on_prepare), "event loop");
    must(uv_timer_init(&loop->uv, &loop->deadline_timer), "event loop");
    must(uv_timer_init(&loop->uv, &loop->tick_timer), "event loop");
    must(uv_timer_start(&loop->tick_timer, on_tick, LOOP_TICK_MS, LOOP_TICK_MS), "event loop");
    must(uv_timer_init(&loop->uv, &loop->sweep_timer), "event loop");
    loop->window_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    must(loop->window_fd < 0 ? -errno : 0, "timerfd");
    must(uv_poll_init(&loop->uv, &loop->window_poll, loop->window_fd), "timerfd");
    must(uv_poll_start(&loop->window_poll, UV_READABLE, on_window), "timerfd");
    must(uv_async_init(&loop->uv, &loop->signalled, on_signalled), "signals");
    return loop;
}

struct mailbox *loop_mailbox(struct loop *loop)
{
    return &loop->box;
}
uv_loop_t *loop_uv(struct loop *loop)
{
    return &loop->uv;
}

int loop_run(struct loop *loop, const struct loop_front *front)
{
    request_set_role(ROLE_LOOP);
    loop->front = *front;
    /* Not before: a server whose start fails closes the loop, which turns once more, without devices and staging
     * memory. */
    must(uv_timer_start(&loop->sweep_timer, on_sweep, LOOP_SWEEP_MS, LOOP_SWEEP_MS), "event loop");
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    assert(loop->stage == STOPPING && loop->oldest == NULL); /* invariant 3 */
    return loop->exit_status;
}

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

void loop_close(struct loop *loop)
{
    /* What is being finished ends with the piece that runs, for nobody waits for it; watches end; messages of batches that came back late are handled by nobody but freed here. */
    while (loop->finishing > 0) uv_run(&loop->uv, UV_RUN_ONCE);
    uv_run(&loop->uv, UV_RUN_NOWAIT);
    pthread_mutex_destroy(&loop->box.lock);
    uv_walk(&loop->uv, close_handle, NULL);
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    uv_loop_close(&loop->uv);
    close(loop->window_fd);
    deadlines_clear(&loop->deadlines);
    free(loop);
}
