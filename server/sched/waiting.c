/* waiting.c: the requests whose connections are suspended: those in CHECKING, QUEUED, RUNNING and FINISHING.
 * libmicrohttpd does not watch a suspended connection, so after LOOP_WATCH_AFTER_MS a uv_poll watches it for
 * UV_DISCONNECT. A client that shuts down its sending side counts as gone. The watch is closed before the connection is
 * resumed, because another connection may use the same descriptor afterwards. A held request (one whose client's memory
 * a device or thread uses) stays in the list until that use has ended. */
#include "server/sched/loop_internal.h"

#include <assert.h>
#include <stdlib.h>

#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/metrics.h"
#include "server/device/devices.h"
#include "server/sched/finish.h"
#include "server/intake/prepare.h"
#include "server/work/contexts.h"
#include "server/regions/regions.h"
#include "server/work/transaction.h"

struct hangup_watch {
    uv_poll_t poll;
    struct request *request;
};

/* ---- Requests that are suspended until they are answered --------------------------------------------------------- */

static bool is_suspended(const struct request *request)
{
    return request->state == REQUEST_CHECKING || request->state == REQUEST_QUEUED ||
           request->state == REQUEST_RUNNING || request->state == REQUEST_FINISHING;
}

void waiting_add(struct loop *loop, struct request *request)
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

void waiting_hand_back(struct loop *loop, struct request *request)
{
    deadlines_remove(&loop->deadlines, &request->deadline);
    list_remove(loop, request);
    watch_stop(request);
    assert(request->watch == NULL && request->deadline.place == 0 && !request->held);
    loop->frontend.resume(request);
}

bool waiting_is_used_in_place(const struct job *job)
{
    return job->shared && (job->shared->home >= 0 || job->shared->pinned_bytes > 0);
}

/* Removes a job from its batches, because its client no longer waits. Cancels a batch if no client waits for any of its
 * jobs. Also frees the gradient sums of the job's finished parts, unless devices are already adding them up. */
static void leave_batches(struct job *job)
{
    for (struct job_part *part = &job->part; part; part = part->next) {
        if (part->batch == NULL && part->left && !part->adds) sums_free_part(part);
        if (part->batch == NULL) continue;
        assert(part->batch->waiting > 0);
        if (--part->batch->waiting == 0) attn_cancel(&part->batch->cancel);
    }
}

/* Records that no client waits for a held request (one whose client's memory a device uses). The job keeps a pointer to
 * its request until its batch ends. */
static void give_up(struct request *request)
{
    struct job *job = request->job;
    assert(request->held && job->parts_out > 0);
    if (job->given_up) return;
    job->given_up = true;
    leave_batches(job);
}

/* Cancels the work for a held request (one whose client's memory a device or thread still uses). When this work has
 * ended, on_checked(), on_finished() or batches_done() gives the request back to its HTTP thread. */
static void end_held(struct request *request)
{
    if (request->state == REQUEST_FINISHING) request->job->finishing->cancelled = true;
    if (request->state == REQUEST_RUNNING) give_up(request);
}

void waiting_let_go_of_device(struct request *request)
{
    if (request->state == REQUEST_RUNNING) request->held = false;
}

void waiting_detach(struct loop *loop, struct request *request)
{
    struct job *job = request->job;
    assert(job->request == request);
    assert(job->parts_out == 0 || request->state == REQUEST_RUNNING);
    if (request->state == REQUEST_QUEUED) {
        queue_remove(&loop->server->queue, job);
        loop->queue_changed = true;
        loop->transactions_changed |= job->transaction != NULL;
        /* the job is queued, so its cache transaction ends now; that of a running job ends when the device is done */
        transaction_end(job, false);
    }
    if (job->finishing)
        /* The thread that does the finishing work may still read the names of contexts (saved forwards), so
         * on_finished() ends their use later. */
        job->finishing->cancelled = true;
    /* Another backward may use the contexts (saved forwards) now, although a device may still read their memory. */
    else contexts_finish_job(job, false);
    if (!job->given_up) leave_batches(job);
    for (struct job_part *part = &job->part; part; part = part->next) part->batch = NULL;
    job->request = NULL;
    request->job = NULL;
    job_release(job);
}

void waiting_cancel(struct loop *loop, struct request *request, proto_error error, const char *reason)
{
    request_fail(request, error, NULL, "%s", reason);
    if (request->held) {
        end_held(request);
        deadlines_remove(&loop->deadlines, &request->deadline);
        return;
    }
    waiting_detach(loop, request);
    waiting_hand_back(loop, request);
}

static void on_hangup(uv_poll_t *poll, int status, int events)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct hangup_watch *watch = (struct hangup_watch *)poll; /* a valid cast: `poll` is the struct's first member */
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
    waiting_detach(loop, request);
    waiting_hand_back(loop, request);
}

static void watch_start(struct loop *loop, struct request *request)
{
    struct hangup_watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL) return; /* Without memory for a watch, a hang-up is noticed only when the answer is sent. */
    watch->request = request;
    if (uv_poll_init(&loop->uv, &watch->poll, request->socket) != 0) {
        free(watch);
        return;
    }
    request->watch = watch;
    if (uv_poll_start(&watch->poll, UV_DISCONNECT, on_hangup) != 0) watch_stop(request);
}

void waiting_tick(uv_timer_t *timer)
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

/* ---- Deadlines of requests --------------------------------------------------------------------------------------- */

static void on_deadline(uv_timer_t *timer);

void waiting_arm_deadline(struct loop *loop)
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
        waiting_cancel(loop, request, PROTO_E_DEADLINE,
                       request->state == REQUEST_QUEUED ? "the deadline passed while the request waited for a device"
                                                        : "the deadline passed while the request was running");
    }
    waiting_arm_deadline(loop);
}
