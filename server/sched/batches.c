/* batches.c: begins cache transactions, sends jobs to devices in batches, and takes batches back.
 *
 *   batches_enqueue()    a job begins to wait
 *   batches_dispatch()   once per iteration of the loop, after all messages: sends batches to devices that have room
 *   batches_done()       takes a batch back, stores its results and answers its requests
 *
 * A batch comes back exactly once. If a request stops waiting (its client left, or its deadline passed), its job runs
 * on without it. When no request waits for any job of a batch any more, the batch is cancelled.
 *
 * A job that takes long may be cut into parts, which several devices compute in batches of their own. All parts of a
 * job are sent to their devices at the same time, and the job ends when its last part is back. If one part fails, the
 * other parts are cancelled. */
#include "server/sched/loop_internal.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/base/signals.h"
#include "server/device/devices.h"
#include "server/sched/finish.h"
#include "server/caches/caches.h"
#include "server/intake/prepare.h"
#include "server/work/contexts.h"
#include "server/regions/regions.h"
#include "server/work/transaction.h"

/* ---- Beginning and ending cache transactions --------------------------------------------------------------------- */

void batches_enqueue(struct loop *loop, struct job *job)
{
    queue_push(&loop->server->queue, job, clock_ns());
    loop->queue_changed = true;
    loop->transactions_arrived |= job->blocked;
}

/* Ends a job's cache transaction. If `commit` is true, the caches keep what the job appended. Otherwise they are as
 * they were before the transaction. */
static void end_step(struct loop *loop, struct job *job, bool commit)
{
    if (job->transaction == NULL) return;
    transaction_end(job, commit);
    loop->queue_changed = loop->transactions_changed = true;
}

/* Begins the waiting cache transactions that can begin, the oldest first. If no transaction has ended since the last
 * complete search of the queue, only new transactions are tried. */
static void begin_transactions(struct loop *loop)
{
    struct job *job = loop->server->queue.first, *next;
    const bool all = loop->transactions_changed;
    loop->transactions_changed = loop->transactions_arrived = false;
    if (all) loop->scan++;
    /* Begins no transaction now: the last search stopped before it had reached all older transactions, and those must
     * begin before new ones. */
    else if (loop->scan_cut) return;
    else
        for (job = loop->server->queue.last; job && job->in_queue.previous && !job->in_queue.previous->scanned;)
            job = job->in_queue.previous;
    for (int64_t rows = 0; job && rows < QUEUE_STEP_ROWS; job = next) {
        attn_error err = { 0 };
        bool wait = false;
        next = job->in_queue.next;
        job->scanned = true;
        if (!job->blocked) continue;
        rows += job->call->items[0].cache_count;
        if (transaction_begin(job, loop->scan, &wait, &err) == ATTN_OK) continue;
        struct request *request = job->request;
        request_fail_status(request, &err);
        waiting_detach(loop, request);
        waiting_hand_back(loop, request);
    }
    loop->scan_cut = job != NULL;
}

/* ---- Sending batches to devices ---------------------------------------------------------------------------------- */

static void arm_window(struct loop *loop, int64_t wait_ns)
{
    const struct itimerspec when = { .it_value = { wait_ns / CLOCK_NS_PER_S, wait_ns % CLOCK_NS_PER_S } };
    (void)timerfd_settime(loop->window_fd, 0, &when, NULL);
}

void batches_mark(struct batch *batch)
{
    for (int i = 0; i < batch->count; i++) {
        struct job *job = batch_job(batch, i);
        job->batch_jobs = batch->count;
        job->follows = false; /* overwrites the value from an earlier batch in which the job failed */
        for (int before = 0; job->call->model && before < i && !job->follows; before++)
            job->follows = batch_job(batch, before)->call->model == job->call->model;
    }
}

struct asked {
    const struct devices *devices;
    struct device *device;
    int64_t now_ns, wait_ns;
};

static bool has_room(void *context, const struct job *job)
{
    struct asked *const asked = context;
    return device_has_room(asked->device, job, asked->now_ns, &asked->wait_ns) &&
           cut_may_leave(asked->devices, asked->device, job, asked->now_ns, &asked->wait_ns);
}

/* Makes a batch and submits it to the device. From each job it takes the first part that this device can compute.
 * False: out of memory. */
static bool send_batch(struct loop *loop, struct device *device, struct job *const *jobs, int count)
{
    struct batch *batch = calloc(1, sizeof *batch + (size_t)count * sizeof batch->parts[0]);
    if (batch == NULL) return false;
    for (int i = 0; i < count; i++) {
        struct job_part *const part = job_part_leaves(job_part_for(jobs[i], device_number(device)), batch);
        batch->parts[i] = part;
        if (part->adds) continue; /* adding up gradients is short, and its operations are not counted */
        batch->flops += jobs[i]->flops * part->range.share;
        batch->bytes += jobs[i]->bytes * part->range.share;
        batch->seconds += jobs[i]->seconds * part->range.share;
    }
    batch->count = batch->waiting = count;
    batch->flow = jobs[0]->flow;
    batches_mark(batch);
    devices_submit(loop->server->devices, batch, device);
    queue_flow_runs(jobs[0]->flow, batch->left_ns);
    return true;
}

/* Sends jobs that were just taken from the queue to a device in one batch. A single long job may be divided among
 * several devices. False: out of memory; the requests have been answered. */
static bool send_all(struct loop *loop, struct device *device, struct job *const *jobs, int count, int64_t now_ns)
{
    struct device *over[CONFIG_MAX_DEVICES] = { device };
    const int parts = count == 1 ? cut_over_devices(loop->server->devices, device, jobs[0], now_ns, over) : 1;
    bool sent = parts > 0;
    for (int i = 0; i < count; i++) {
        request_move(jobs[i]->request, REQUEST_RUNNING);
        jobs[i]->request->held = waiting_is_used_in_place(jobs[i]);
    }
    for (int n = 0; n < parts && sent; n++) sent = send_batch(loop, over[n], jobs, count);
    if (sent) metrics_observe(METRIC_BATCH_SIZE, NULL, count);
    for (int i = 0; i < count && !sent; i++) {
        /* There was no memory to send the job to all devices. If some of its parts were sent, they are cancelled. In
         * that case the answer waits until these parts end, because devices may use the client's memory. */
        jobs[i]->request->held &= jobs[i]->parts_out > 0;
        if (jobs[i]->parts_out == 0) end_step(loop, jobs[i], false);
        waiting_cancel(loop, jobs[i]->request, PROTO_E_OUT_OF_MEMORY, "no memory for a batch");
    }
    return sent;
}

void batches_dispatch(struct loop *loop)
{
    struct server *server = loop->server;
    struct device *device;
    uint64_t passed_over = 0;
    if (loop->transactions_changed || loop->transactions_arrived) begin_transactions(loop);
    while (server->queue.count > 0 && (device = devices_pick(server->devices, passed_over)) != NULL) {
        int64_t wait_ns;
        struct asked asked = { server->devices, device, .now_ns = clock_ns(), .wait_ns = INT64_MAX };
        if (queue_may_grow(&server->queue) && device_can_wait(device, asked.now_ns, &wait_ns)) {
            arm_window(loop, wait_ns);
            break;
        }
        const struct queue_taker taker = { device_number(device), has_room, &asked };
        const int count = queue_take(&server->queue, &taker, asked.now_ns, loop->batch_jobs, &wait_ns);
        /* nothing can be sent to this device now: every job waits for another device, for room, or for others to join
         * its batch */
        if (count == 0) {
            if (wait_ns == 0 && asked.wait_ns < INT64_MAX) wait_ns = asked.wait_ns;
            if (wait_ns > 0) arm_window(loop, wait_ns);
            passed_over |= UINT64_C(1) << device_number(device);
            continue;
        }
        if (!send_all(loop, device, loop->batch_jobs, count, asked.now_ns)) break;
        loop->awake_until_ns = clock_ns() + NAPS_NS;
    }
}

void batches_window(uv_poll_t *poll, int status, int events)
{
    struct loop *loop = poll->loop->data;
    uint64_t expirations;
    (void)status;
    (void)events;
    (void)!read(loop->window_fd, &expirations, sizeof expirations);
    loop->queue_changed = true;
}

/* ---- Handling batches that come back ----------------------------------------------------------------------------- */

/* Hands the request of a finished job back to its HTTP thread, for an answer with the results or an error. */
static void finish_request(struct loop *loop, struct job *job)
{
    /* The contexts (saved forwards) of a failed request are released now. Otherwise answer.c does this when the answer
     * is sent. */
    if (job->request->failed || job->request->gone) contexts_finish_job(job, false);
    waiting_hand_back(loop, job->request);
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
    region_uses_free(job->shared);
    job->shared = NULL;
    if (request != NULL) {
        const proto_call *call = job->call;
        request->held = false;
        request->encoder = finishing->encoder;
        finishing->encoder = NULL;
        request->times.encode_ns += finishing->wrote_ns;
        if (failed) request_fail_in_job(request, &finishing->error);
        else if (!call->envelope && call->items[0].error.status != ATTN_OK)
            request_fail_in_job(request, &call->items[0].error);
    } else contexts_finish_job(job, false);
    /* Releases a reference to the job. The answer may reuse the job's memory only if there is no other reference. */
    finish_free(finishing);
    if (request != NULL) finish_request(loop, job);
}

/* Starts the work between a job's run on a device and its answer (finish.h). Comparing a client's results with exact
 * ones stops at the time judge_until_ns. False: out of memory; the request has been answered. */
static bool finish(struct loop *loop, struct job *job, int64_t judge_until_ns)
{
    job->finishing = finish_new(job, job->request->id, on_finished, loop);
    if (job->finishing == NULL) {
        end_step(loop, job, false);
        waiting_cancel(loop, job->request, PROTO_E_OUT_OF_MEMORY, "no memory to finish the answer");
        return false;
    }
    job->finishing->judge_until_ns = judge_until_ns;
    request_move(job->request, REQUEST_FINISHING);
    /* The answer must wait until all outputs are in the client's shared memory, because the client may reuse this
     * memory after the answer. */
    job->request->held = job->shared && job->shared->writes;
    loop->finishing++;
    finish_start(job->finishing, &loop->pieces);
    return true;
}

/* Returns how many bytes of memory the checks of a request need. The checks run one after the other, so this is the
 * memory of the check that needs most. */
static int64_t judges_bytes(const struct job *job, double seconds)
{
    int64_t most = 0;
    for (int i = 0; i < job->call->count; i++) {
        const proto_item *const item = &job->call->items[i];
        const int64_t bytes = item->error.status == ATTN_OK
                                  ? judge_bytes(&item->problem, finish_truth(job, i) != NULL, seconds)
                                  : 0;
        /* INT64_MAX means that judge_open() will refuse this check */
        if (bytes > most && bytes != INT64_MAX) most = bytes;
    }
    return most;
}

/* Starts comparing the client's results of a check with exact ones, which a device may have computed. False: out of
 * memory; the request has been answered. */
static bool start_judge(struct loop *loop, struct job *job)
{
    struct request *const request = job->request;
    const int64_t now_ns = clock_ns(), left_ns = request->deadline.at_ns - now_ns;
    const int64_t most_ns = loop->server->config->max_seconds * CLOCK_NS_PER_S;
    int64_t time_ns = left_ns - left_ns / 10 - JUDGE_MARGIN_MS * CLOCK_NS_PER_MS;
    attn_error err = { 0 };
    if (time_ns > most_ns) time_ns = most_ns;
    if (time_ns < left_ns / 2) time_ns = left_ns / 2;
    if (request_count_bytes(request, (size_t)judges_bytes(job, (double)time_ns / 1e9), &err) != ATTN_OK) {
        request_fail_status(request, &err);
        job->request = NULL;
        request->job = NULL;
        job_release(job);
        waiting_hand_back(loop, request);
        return false;
    }
    return finish(loop, job, now_ns + time_ns);
}

bool batches_begin(struct loop *loop, struct job *job)
{
    if (!job->wants_judge || job->truths) {
        batches_enqueue(loop, job);
        return true;
    }
    job->queued_ns = clock_ns();
    job->part.ran = true;
    request_move(job->request, REQUEST_RUNNING);
    return start_judge(loop, job);
}

/* Disables a device that failed. If no device is left, the server is no longer ready. The caller answers the device's
 * requests and then calls end_if_failed(). */
static void device_failed(struct loop *loop, struct device *device, const char *text)
{
    if (!device_disable(device)) return;
    log_event(LOG_ERROR, NULL, "device_failed", "device=%s text=" LOG_Q, device_name(device), text);
    caches_lose(loop->server->caches, device_number(device));
    /* Waiting jobs that only this device could compute fail now, and not at their deadlines. */
    for (struct request *request = loop->oldest, *next; request; request = next) {
        next = request->next;
        if (request->state == REQUEST_QUEUED && job_needs_device(request->job, device_number(device)))
            waiting_cancel(loop, request, PROTO_E_UNAVAILABLE, text);
    }
    if (devices_usable(loop->server->devices) || loop->stage == STOPPING) return;
    atomic_store(&loop->server->phase, SERVER_FAILED);
    loop->exit_status = 70;
    signals_end_within(LOOP_STOP_MS + SIGNALS_GRACE_MS, loop->exit_status);
}

static void end_if_failed(struct loop *loop)
{
    if (loop->exit_status != 0) stop_waiting(loop);
}

void batches_look_at_devices(struct loop *loop)
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
            for (int i = 0; i < batch->count; i++) {
                if (batch_job(batch, i)->request) {
                    waiting_let_go_of_device(batch_job(batch, i)->request);
                    waiting_cancel(loop, batch_job(batch, i)->request, PROTO_E_UNAVAILABLE, text);
                }
                sums_lose(batch_job(batch, i));
            }
        loop->queue_changed = true;
    }
    end_if_failed(loop);
}

/* Charges the batch's device time to the flows (clients) of its jobs, in proportion to their operations. */
static void charge(const struct batch *batch)
{
    for (int i = 0; i < batch->count; i++) {
        const double flops = batch_job(batch, i)->flops * batch->parts[i]->range.share,
                     part = batch->flops > 0 ? flops / batch->flops : 1.0 / batch->count;
        flow_charge(batch_job(batch, i)->flow, FLOW_DEVICE, (int64_t)(part * (double)batch->charged_ns));
    }
}

static void cancel_other_parts(const struct job *job)
{
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (part->batch) attn_cancel(&part->batch->cancel);
}

/* Sends each part of a job to its device once more, if all parts ran and some of the job's gradients are sums over
 * queries, which must be added up. Returns true if a part was sent, so that the job is not over. */
static bool add_up(struct loop *loop, struct job *job)
{
    if (!job_ran(job) || !sums_begin(job)) return false;
    for (struct job_part *part = &job->part; part; part = part->next) {
        if (send_batch(loop, part->sums_on, &job, 1)) continue;
        attn_fail(&part->error, ATTN_NO_MEMORY, NULL, "no memory for a batch");
        cancel_other_parts(job);
        break;
    }
    return job->parts_out > 0;
}

/* Puts a job back into the queue, so that other devices compute it, if a device failed while it computed a part of the
 * job. Returns false if no other device is usable or the queue is full. The request then gets the failed device's
 * error. */
static bool compute_again(struct loop *loop, struct job *job)
{
    struct request *const request = job->request;
    attn_error ignored;
    if (!job_lost_devices(job) || !devices_usable(loop->server->devices) || loop->stage == STOPPING ||
        request_enter(request, CALLER_WAITING, &ignored) != ATTN_OK)
        return false;
    const int64_t queued_ns = job->queued_ns;
    log_event(LOG_WARN, request->id, "computed_again", "text=" LOG_Q, job_error(job)->text);
    request->held = false;
    request_move(request, REQUEST_QUEUED);
    job_join(job);
    batches_enqueue(loop, job);
    /* keeps the time at which the job was first queued, because the answer reports the waiting time since then */
    job->queued_ns = queued_ns;
    return true;
}

void batches_done(struct loop *loop, struct batch *batch)
{
    struct server *server = loop->server;
    struct device *device = batch->device;
    int waiting = 0;

    devices_collect(server->devices, batch);
    batch_count(batch, batch->parts[0]);
    queue_flow_ran(batch_job(batch, 0)->flow, batch->left_ns);
    charge(batch);
    /* If the batch failed, all its parts have the same error, so the first part's error will do. */
    if (!batch->parts[0]->ran && batch->parts[0]->error.status == ATTN_DEVICE_LOST)
        device_failed(loop, device, batch->parts[0]->error.text);
    if (batch->waiting > 0 && !batch_adds(batch))
        queue_learn(&server->queue, batch->count,
                    (double)(batch->ended_ns - batch->started_ns) / 1e9 / batch->parts[0]->range.share);
    for (int i = 0; i < batch->count; i++) {
        struct job_part *part = batch->parts[i];
        struct job *job = part->job;
        struct request *request = job->request;
        /* if the client has left, waiting_detach() has removed the job from its batches */
        assert(part->batch == (request ? batch : NULL));
        const bool waited = request != NULL && !job->given_up;
        waiting += waited;
        part->batch = NULL;
        /* A part that adds up gradients copies sums from other devices. If one of these devices is lost before the
         * copy, the part gets the status CANCELLED, although nobody has cancelled its batch. */
        if (waited && part->adds && part->error.status == ATTN_CANCELLED && batch->cancel == 0)
            part->error.status = ATTN_DEVICE_LOST;
        if (!waited && !part->adds) sums_free_part(part);
        if (!part->ran) cancel_other_parts(job);
        else if (!part->adds) batch_note_times(batch, job);
        /* The job is not over if devices still compute other parts, or if its parts were sent once more to add up
         * gradients. */
        if (--job->parts_out > 0 || (waited && add_up(loop, job))) {
            job_release(job);
            continue;
        }
        sums_free(job);
        if (waited && compute_again(loop, job)) {
            job_release(job);
            continue;
        }
        const bool finishes = job_ran(job) && waited && finish_is_wanted(job);
        if (!finishes) end_step(loop, job, job_ran(job) && waited);
        /* The answer may reuse the job's memory only if there is no other reference to the job, so the reference of
         * this part is released first. */
        job_release(job);
        if (request != NULL) {
            request->held = false;
            if (!job_ran(job)) {
                request_fail_in_job(request, job_error(job));
                contexts_finish_job(job, false);
                waiting_hand_back(loop, request);
            } else {
                batch_observe_times(job);
                if (job_is_cut(job)) {
                    cut_name_backend(server->devices, job);
                    cut_join_truths(job);
                }
                if (finishes && job->wants_judge) (void)start_judge(loop, job);
                else if (finishes) (void)finish(loop, job, 0);
                else finish_request(loop, job);
            }
        }
    }
    assert(waiting == batch->waiting);
    free(batch);
    loop->queue_changed = true;
    end_if_failed(loop);
}
