/* thread.c: a device's threads. Each thread takes batches from the device's inbox and puts them on the streams of its
 * slots, one batch in each slot. It posts finished batches to the main thread.
 *
 * Only one thread uses a stream: a device's thread, or for an inline slot an HTTP thread. A submitted batch comes back
 * exactly once, whatever happens; each of its jobs then has ran == true, or an error. Some calls of the thread may
 * never return. During such a call, due_ns is the time by which it should return, and the main thread watches that
 * time. */
#include "server/device/internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/work/request.h"

/* ---- How long a batch may take ----------------------------------------------------------------------------------- */

static int64_t worst_ns(const struct batch *batch)
{
    double seconds = 0;
    for (int j = 0; j < batch->count; j++)
        seconds += batch_padded_flops(batch->parts[j]) / DEVICE_SLOWEST_FLOPS +
                   batch_job(batch, j)->truth_seconds * DEVICE_TRUTH_SLOWEST;
    const double most = 1e9; /* upper bound in seconds (thirty years), so that the time in nanoseconds fits 64 bits */
    return (int64_t)((seconds < most ? seconds : most) * 1e9);
}

/* Sets the device's due_ns, which the watchdog reads, to the earliest due_ns of its slots. */
static void publish_due(struct device *device)
{
    int64_t due = NEVER;
    for (int s = 0; s < device->slot_count; s++)
        if (device->slots[s].batch && device->slots[s].due_ns < due) due = device->slots[s].due_ns;
    atomic_store(&device->due_ns, due);
}

/* Sets the watchdog's deadline for a batch that begins now. The deadline leaves time for all other batches on the
 * device. */
static void watch(struct device *device, struct slot *slot)
{
    int64_t others_ns = 0;
    if (device->watchdog_ns == NEVER) return;
    slot->worst_ns = worst_ns(slot->batch);
    for (int s = 0; s < device->slot_count; s++) {
        struct slot *other = &device->slots[s];
        if (other->batch == NULL || other == slot) continue;
        others_ns += other->worst_ns;
        other->due_ns += slot->worst_ns;
    }
    slot->due_ns = clock_ns() + device->watchdog_ns + slot->worst_ns + others_ns;
    publish_due(device);
}

static void unwatch(struct device *device)
{
    if (device->watchdog_ns != NEVER) publish_due(device);
}

/* ---- Running one batch ------------------------------------------------------------------------------------------- */

static attn_status reserve_problems(struct slot *slot, int count, attn_error *err)
{
    if (count <= slot->room) return ATTN_OK;
    attn_problem *problems = realloc(slot->problems, (size_t)count * sizeof *problems);
    if (problems != NULL) slot->problems = problems;
    attn_plan *plans = realloc(slot->plans, (size_t)count * sizeof *plans);
    if (plans != NULL) slot->plans = plans;
    if (problems == NULL || plans == NULL)
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory for %d problems", count);
    slot->room = count;
    return ATTN_OK;
}

static attn_status reserve_workspace(struct device *device, struct slot *slot, int count, attn_error *err)
{
    size_t bytes = 0;
    for (int at = 0; at < count; at += DEVICE_MAX_RUN) {
        size_t part;
        const int some = count - at < DEVICE_MAX_RUN ? count - at : DEVICE_MAX_RUN;
        const attn_status status = attn_workspace(attn_device_capabilities(device->handle), slot->plans + at, some,
                                                  &part, err);
        if (status != ATTN_OK) return status;
        if (part > bytes) bytes = part;
    }
    return memory_grow_workspace(device->handle, bytes, &slot->workspace, &slot->workspace_bytes, err);
}

/* Collects the batch's problems, with device addresses, in slot->problems; *gathered becomes their number. */
static attn_status gather(struct device *device, struct slot *slot, int *gathered, attn_error *err)
{
    int count = 0;
    for (int j = 0; j < slot->batch->count; j++) {
        struct job_part *const part = slot->batch->parts[j];
        const struct job *job = part->job;
        slot->problem[j] = count;
        if (job_part_is_cut(part)) {
            const attn_status status = parts_take(device, slot, part, &slot->problems[count++], err);
            if (status != ATTN_OK) return status;
            continue;
        }
        if (slot->leader[j] != j) {
            /* job j is merged with an earlier job of the batch, its leader, and so has the leader's problem */
            slot->problem[j] = slot->problem[slot->leader[j]];
            continue;
        }
        if (slot->moved[j]) {
            const attn_status status = merge_take(device, slot, j, &slot->problems[count++], err);
            if (status != ATTN_OK) return status;
            continue;
        }
        for (int i = 0; i < job->call->count; i++) {
            if (job_problem(job, i) == NULL) continue;
            attn_problem *p = &slot->problems[count++];
            *p = *job_problem(job, i);
            if (!device->info.unified) memory_place(slot, p);
            if (!device->info.unified) memory_place_pinned(job, p);
        }
    }
    *gathered = count;
    return ATTN_OK;
}

static attn_status plan_part(const attn_capabilities *can, struct job_part *part, const attn_problem *problem,
                             attn_plan *plan, attn_error *err)
{
    const attn_status status = attn_plan_make(can, problem, plan, err);
    if (status == ATTN_OK) part->kernel = plan->kernel->name;
    return status;
}

/* Chooses the kernels for all problems of the batch. The choice depends on the problems' addresses on this device. */
static attn_status plan_all(struct device *device, struct slot *slot, attn_error *err)
{
    const attn_capabilities *const can = attn_device_capabilities(device->handle);
    int n = 0;
    for (int j = 0; j < slot->batch->count; j++) {
        const struct job *job = batch_job(slot->batch, j);
        if (job_part_is_cut(slot->batch->parts[j])) {
            const attn_status status = plan_part(can, slot->batch->parts[j], &slot->problems[n], &slot->plans[n], err);
            if (status != ATTN_OK) return status;
            n++;
            continue;
        }
        if (slot->leader[j] != j) {
            batch_name_backend(&job->results[0], device, slot->plans[slot->problem[j]].kernel->name);
            continue;
        }
        for (int i = 0; i < job->call->count; i++) {
            if (job->call->items[i].error.status != ATTN_OK) continue;
            if (job_problem(job, i) == NULL) {
                batch_name_backend(&job->results[i], device, "");
                continue;
            }
            const attn_status status = slot->moved[j]
                                           ? attn_plan_make(can, &slot->problems[n], &slot->plans[n], err)
                                           : batch_plan(can, job, i, &slot->problems[n], &slot->plans[n], err);
            if (status != ATTN_OK) return status;
            batch_name_backend(&job->results[i], device, slot->plans[n++].kernel->name);
        }
    }
    return ATTN_OK;
}

static bool kernels_are_launched(const struct slot *slot)
{
    return slot->launched == slot->count;
}

static bool all_is_launched(const struct slot *slot)
{
    return kernels_are_launched(slot) && slot->truths_left == 0;
}

/* Returns how many of the batch's problems are put on the stream at a time. The number is small, because work on a
 * GPU's stream cannot be cancelled. A long problem takes several calls, in steps (attn_run_some()). */
static int group_of(const struct device *device, const struct slot *slot)
{
    const double share = slot->batch->flops > DEVICE_GROUP_FLOPS ? DEVICE_GROUP_FLOPS / slot->batch->flops : 1;
    const double group = device->info.unified ? DEVICE_MAX_RUN : share * slot->count;
    const int left = slot->count - slot->launched;
    const int most = group < 1 ? 1 : group > DEVICE_MAX_RUN ? DEVICE_MAX_RUN : (int)group;
    return left < most ? left : most;
}

/* Estimates, in seconds, the device time of the batch's next work on the stream. */
static double piece_seconds(const struct slot *slot)
{
    if (kernels_are_launched(slot) && slot->truths_left > 0) return truth_piece_seconds(slot);
    const bool first = slot->launched == 0 && slot->step == 0;
    const double seconds = slot->batch->seconds;
    return first && seconds < DEVICE_PIECE_SECONDS ? seconds : DEVICE_PIECE_SECONDS;
}

/* True if the batch must not launch kernels now, so that batches of other flows (clients) are not delayed. It waits if
 * another batch of its own flow waits too, and has waited longer. If kernels of its flow are on the device already, it
 * also waits while another flow has a batch there, or if the flow's kernels together would take more than
 * DEVICE_FLOW_SECONDS. */
static bool waits_for_turn(const struct device *device, const struct slot *slot)
{
    const double own_s = piece_seconds(slot);
    double queued_s = 0;
    bool others = false;
    if (device->info.unified || own_s < DEVICE_SHORT_SECONDS) return false;
    /* a cancelled batch has no reason to wait, because it launches no more kernels */
    if (__atomic_load_n(&slot->batch->cancel, __ATOMIC_RELAXED) != 0) return false;
    for (int s = 0; s < device->slot_count; s++) {
        const struct slot *other = &device->slots[s];
        if (other == slot || other->batch == NULL) continue;
        if (other->batch->flow != slot->batch->flow) {
            others = true;
            continue;
        }
        if (other->blocked && other->piece_ns < slot->piece_ns) return true;
        queued_s += other->queued_s;
    }
    return queued_s > 0 && (others || queued_s + own_s > DEVICE_FLOW_SECONDS);
}

/* Enqueues the next problems of the batch, or the next steps of one problem. After the last problem, it also enqueues
 * the work that follows the kernels. */
static attn_status launch_group(struct device *device, struct slot *slot, attn_error *err)
{
    struct batch *batch = slot->batch;
    const int count = group_of(device, slot);
    const bool begins = slot->launched == 0 && slot->step == 0;
    attn_status status = ATTN_OK;
    slot->queued_s = piece_seconds(slot);
    slot->blocked = false;
    if (count > 0)
        status = attn_run_some(slot->stream, slot->plans + slot->launched, count, slot->workspace, &slot->step, err);
    slot->piece_ns = clock_ns();
    if (begins) slot->launched_ns = slot->piece_ns;
    if (status == ATTN_OK && count > 0 && slot->step != ATTN_NO_MORE_STEPS) return status;
    slot->step = slot->first_step;
    slot->launched += count;
    if (status != ATTN_OK || slot->launched < slot->count) return status;
    status = attn_stream_mark(slot->stream, 2, err);
    if (status == ATTN_OK) status = merge_move(slot, true, err);
    for (int j = 0; j < batch->count && !device->info.unified && status == ATTN_OK; j++)
        if (job_part_is_cut(batch->parts[j]))
            status = parts_copy(slot, batch->parts[j], &slot->problems[slot->problem[j]], true, err);
        /* the outputs of a check are exact results, which are computed and copied later */
        else if (!slot->moved[j] && !batch_job(batch, j)->wants_judge)
            status = memory_copy_out(device, slot, batch_job(batch, j), err);
    return status == ATTN_OK ? attn_stream_mark(slot->stream, 3, err) : status;
}

/* Returns a copy of `host`, a partial result (out and lse over some of the keys), with the device's addresses. */
static attn_result result_on_device(const struct slot *slot, const attn_result *host)
{
    attn_result result = *host;
    result.out.data = memory_address(slot, result.out.data);
    result.lse.data = memory_address(slot, result.lse.data);
    return result;
}

/* Enqueues the merges of the batch, which combine results over several parts of the keys. */
static attn_status merge_parts(const struct device *device, struct slot *slot, attn_error *err)
{
    attn_result lists[2 * ATTN_MERGE_PARTS];
    attn_status status = ATTN_OK;
    for (int j = 0; j < slot->batch->count; j++) {
        const struct job *job = batch_job(slot->batch, j);
        for (int i = 0; i < job->call->count && status == ATTN_OK; i++) {
            const proto_item *const item = &job->call->items[i];
            if (item->error.status != ATTN_OK || item->parts == NULL) continue;
            proto_item here = *item;
            if (!device->info.unified) memory_place(slot, &here.problem);
            attn_merge_problem m = proto_item_merge(&here);
            const int count = m.gradients ? 2 * m.count : m.count;
            for (int p = 0; p < count && !device->info.unified; p++)
                lists[p] = result_on_device(slot, &item->parts->at[p]);
            if (!device->info.unified) m.parts = lists;
            if (!device->info.unified && m.gradients) m.gradients = lists + m.count;
            status = attn_merge(slot->stream, &m, err);
        }
    }
    return status;
}

/* Enqueues kernels that compute the lse of some rows. They are for jobs whose client has sent an lse that only the
 * device can check. */
static attn_status sum_lse(struct slot *slot, attn_error *err)
{
    attn_status status = ATTN_OK;
    for (int j = 0; j < slot->batch->count && status == ATTN_OK; j++) {
        const struct job *job = batch_job(slot->batch, j);
        if (job->lse)
            status = attn_lse_start(slot->stream, &slot->problems[slot->problem[j]], job->lse,
                                    memory_address(slot, job->lse_found), err);
    }
    return status;
}

static attn_status launch_sums(struct slot *slot, attn_error *err)
{
    slot->count = slot->launched = 0;
    slot->step = slot->first_step = 0;
    slot->piece_ns = slot->began_ns = clock_ns();
    /* clears the stream's flag for skipped rows (with scores beyond float32's range), which a failed batch may have
     * set */
    (void)attn_stream_left_rows(slot->stream);
    const attn_status status = sums_launch(slot->stream, slot->batch->parts[0], err);
    slot->launched_ns = clock_ns();
    return status;
}

/* Puts the whole batch, or its first group of problems, on the stream. After an error, some of this work may be on the
 * stream. The caller must then wait for that work before the caller frees the batch's memory. */
static attn_status launch(struct device *device, struct slot *slot, attn_error *err)
{
    struct batch *batch = slot->batch;
    attn_status status = ATTN_OK;
    int count = 0;

    if (batch_adds(batch)) return launch_sums(slot, err);
    for (int j = 0; j < batch->count; j++) count += batch_job(batch, j)->runnable;
    if ((status = reserve_problems(slot, count, err)) != ATTN_OK) return status;
    merge_find(device, slot);
    for (int j = 0; j < batch->count && !device->info.unified && status == ATTN_OK; j++)
        if (!slot->moved[j] && !job_part_is_cut(batch->parts[j]))
            status = memory_take_mirrors(device, slot, batch_job(batch, j), err);
    if (status != ATTN_OK) return status;
    if ((status = gather(device, slot, &count, err)) != ATTN_OK) return status;
    if ((status = plan_all(device, slot, err)) != ATTN_OK) return status;
    if ((status = reserve_workspace(device, slot, count, err)) != ATTN_OK) return status;
    if ((status = truth_reserve(device, slot, err)) != ATTN_OK) return status;

    if ((status = attn_stream_mark(slot->stream, 0, err)) != ATTN_OK) return status;
    slot->began_ns = clock_ns();
    if ((status = memory_copy_in(slot, err)) != ATTN_OK || (status = merge_move(slot, false, err)) != ATTN_OK)
        return status;
    for (int j = 0; j < batch->count && !device->info.unified && status == ATTN_OK; j++)
        if (job_part_is_cut(batch->parts[j]))
            status = parts_copy(slot, batch->parts[j], &slot->problems[slot->problem[j]], false, err);
    if (status != ATTN_OK) return status;
    if ((status = attn_stream_mark(slot->stream, 1, err)) != ATTN_OK) return status;
    for (int j = 0; j < batch->count; j++)
        if (!slot->moved[j] && (status = memory_move(device, slot, batch_job(batch, j), err)) != ATTN_OK) return status;
    if ((status = sum_lse(slot, err)) != ATTN_OK) return status;
    if ((status = merge_parts(device, slot, err)) != ATTN_OK) return status;
    slot->count = count;
    slot->launched = 0;
    slot->step = slot->first_step = 0;
    slot->piece_ns = slot->began_ns;
    /* clears the stream's flag for skipped rows (with scores beyond float32's range), which a failed batch may have
     * set */
    (void)attn_stream_left_rows(slot->stream);
    slot->blocked = count > 0 && waits_for_turn(device, slot);
    if (slot->blocked) return ATTN_OK; /* the batch waits for its turn; poll_slots() launches the rest later */
    do status = launch_group(device, slot, err);
    while (status == ATTN_OK && device->info.unified && slot->launched < count);
    return status;
}

/* Records how long each stage of the batch took. launch_us estimates how long the GPU was idle after the copies,
 * because its kernels were not on the stream yet. */
static void note_stages(const struct device *device, const struct slot *slot)
{
    struct batch *batch = slot->batch;
    /* an HTTP thread launched this batch without events between the stages, so only the total time is known */
    if (batch->adopted) {
        batch->compute_us = (double)(batch->ended_ns - batch->started_ns) / 1e3;
        return;
    }
    batch->prepare_us = (double)(slot->began_ns - batch->started_ns) / 1e3;
    batch->compute_us = attn_stream_elapsed_us(slot->stream, 1, 2);
    if (device->info.unified) return;
    batch->copy_in_us = attn_stream_elapsed_us(slot->stream, 0, 1);
    batch->copy_out_us = attn_stream_elapsed_us(slot->stream, 2, 3);
    const double stood_us = (double)(slot->launched_ns - slot->began_ns) / 1e3 - batch->copy_in_us;
    batch->launch_us = stood_us < 0 ? 0 : stood_us < batch->compute_us ? stood_us : batch->compute_us;
}

/* Frees the gradient sums of a failed batch. But if the batch adds up gradients of several parts, other devices may
 * still read its sums, so the main thread frees these sums later. */
static void drop_sums(const struct batch *batch)
{
    for (int j = 0; j < batch->count && !batch_adds(batch); j++) sums_drop(batch->parts[j]);
}

/* Ends a batch, failed or not: frees its device memory and posts it to the main thread. */
static void finish_batch(struct device *device, struct slot *slot, attn_status status, const attn_error *err)
{
    struct batch *batch = slot->batch;
    assert(request_role() == ROLE_DEVICE && batch->device == device);
    assert(status == ATTN_OK ? all_is_launched(slot) : err->status == status);
    batch->ended_ns = clock_ns();
    if (status == ATTN_OK && slot->truth_began) batch->truth_us = attn_stream_elapsed_us(slot->stream, 0, 1);
    else if (status == ATTN_OK) note_stages(device, slot);
    batch->charged_ns = attn_stream_spent_ns(slot->stream);
    if (batch->charged_ns == 0 && status == ATTN_OK)
        batch->charged_ns = (int64_t)((batch->compute_us + batch->truth_us) * 1e3);
    if (batch->charged_ns == 0) batch->charged_ns = batch->ended_ns - batch->started_ns;
    for (int j = 0; j < batch->count; j++) {
        batch->parts[j]->ran = status == ATTN_OK;
        if (status != ATTN_OK) batch->parts[j]->error = *err;
    }
    if (status != ATTN_OK) drop_sums(batch);
    memory_drop_mirrors(device, slot);
    if (slot->workspace_bytes > DEVICE_WORKSPACE_KEEP)
        memory_drop_workspace(device->handle, &slot->workspace, &slot->workspace_bytes);
    attn_stream_heed(slot->stream, NULL);
    pthread_mutex_lock(&device->lock);
    slot->batch = NULL;
    device->held_may_run = true;
    device->over++;
    /* the ended batch has freed memory, so the thread tries the held batch again */
    if (device->held) pthread_cond_broadcast(&device->wake);
    pthread_mutex_unlock(&device->lock);
    unwatch(device);
    mailbox_post(device->box, &batch->message);
}

/* When the stream has done all earlier work of the batch, puts the batch's next work on the stream. The times of the
 * kernels are read from their events first, because the computation of exact outputs uses the same events. */
static attn_status launch_more(struct device *device, struct slot *slot, attn_error *err)
{
    if (!kernels_are_launched(slot)) return launch_group(device, slot, err);
    if (!slot->truth_began) note_stages(device, slot);
    slot->blocked = false;
    return truth_launch(device, slot, err);
}

/* Frees the scratch memory of all slots (streams) that run no batch. Returns false if there was no such memory. */
static bool give_back_workspaces(struct device *device)
{
    bool any = false;
    pthread_mutex_lock(&device->lock);
    for (int s = 0; s < device->slot_count; s++) {
        struct slot *slot = &device->slots[s];
        if (slot->batch || slot->workspace == NULL) continue;
        memory_drop_workspace(device->handle, &slot->workspace, &slot->workspace_bytes);
        any = true;
    }
    pthread_mutex_unlock(&device->lock);
    return any;
}

static int busy_slots(const struct slot *slots, int slot_count)
{
    int count = 0;
    for (int s = 0; s < slot_count; s++) count += slots[s].batch != NULL;
    return count;
}

/* Puts the batch on the stream by launch(). After an error, waits for the work on the stream and frees the batch's
 * memory. */
static attn_status try_launch(struct device *device, struct slot *slot, attn_error *err)
{
    attn_error late;
    attn_status status = launch(device, slot, err);
    if (status == ATTN_OK) return status;
    /* waits, because earlier work on the stream still uses the batch's memory; waiting also shows whether the device is
     * lost */
    if (attn_stream_wait(slot->stream, &late) == ATTN_DEVICE_LOST && status != ATTN_DEVICE_LOST) {
        status = ATTN_DEVICE_LOST;
        *err = late;
    }
    drop_sums(slot->batch);
    memory_drop_mirrors(device, slot);
    return status;
}

static unsigned batches_over(struct device *device)
{
    pthread_mutex_lock(&device->lock);
    const unsigned over = device->over;
    pthread_mutex_unlock(&device->lock);
    return over;
}

/* Puts the held batch (one that lacked memory) back, at the front of the queue of submitted batches. To be called with
 * the device's lock held. */
static void put_back_held(struct device *device)
{
    struct batch *const batch = device->held;
    batch->held_ns = 0;
    batch->message.next = device->first;
    if (device->first == NULL) device->last = &batch->message.next;
    device->first = &batch->message;
    device->held = NULL;
}

/* Handles a lack of device memory for the batch in the slot. `over` is the value that device->over (how often memory
 * was freed) had before the batch was tried. Returns true if the batch is held back until the memory of other batches
 * or of gradient sums is freed. A batch that adds up gradients is never held back, because its own sums are freed only
 * after it. */
static bool hold(struct device *device, struct slot *slot, unsigned over)
{
    struct batch *const batch = slot->batch;
    if (batch_adds(batch)) return false;
    attn_stream_heed(slot->stream, NULL);
    pthread_mutex_lock(&device->lock);
    const bool waits = busy_slots(device->slots, device->slot_count) > 1 ||
                       (!device->stop && sums_will_be_freed(device, batch));
    if (waits) {
        if (device->held) put_back_held(device);
        if (batch->held_ns == 0) batch->held_ns = clock_ns();
        device->held = batch;
        device->held_may_run = device->over != over;
        slot->batch = NULL;
    }
    pthread_mutex_unlock(&device->lock);
    if (waits) unwatch(device);
    return waits;
}

static void start(struct device *device, struct slot *slot)
{
    struct batch *batch = slot->batch;
    attn_error err = { 0 };
    attn_status status;
    unsigned over;
    assert(request_role() == ROLE_DEVICE && slot->mirror_count == 0);
    watch(device, slot);
    if (batch->adopted) {
        inline_adopt(slot, batch->parts[0]);
        return;
    }
    do {
        over = batches_over(device);
        attn_stream_heed(slot->stream, &batch->cancel);
        attn_stream_serve(slot->stream, batch->flow);
        status = try_launch(device, slot, &err);
        if (status == ATTN_NO_MEMORY && give_back_workspaces(device)) status = try_launch(device, slot, &err);
        if (status == ATTN_OK || (status == ATTN_NO_MEMORY && hold(device, slot, over))) return;
    } while (status == ATTN_NO_MEMORY && batches_over(device) != over);
    finish_batch(device, slot, status, &err);
}

/* Ends the batches whose work is done, and puts the next work of all other batches on their streams. Returns true if a
 * batch ended. If `wait` is true, first waits until the stream of one batch has done its work. */
static bool poll_slots(struct device_thread *thread, bool wait)
{
    struct device *const device = thread->device;
    bool any = false;
    for (int s = 0; s < thread->slot_count; s++) {
        struct slot *slot = &thread->slots[s];
        attn_error err = { 0 };
        bool done = false;
        if (slot->batch == NULL) continue;
        attn_status status;
        if (wait && !any) {
            status = attn_stream_wait(slot->stream, &err);
            done = true;
        } else status = attn_stream_done(slot->stream, &done, &err);
        if (status == ATTN_OK && !done) continue;
        slot->queued_s = 0;
        if (status == ATTN_OK && kernels_are_launched(slot) && attn_stream_left_rows(slot->stream)) {
            slot->launched = 0;
            slot->step = slot->first_step = ATTN_EVERY_ROW;
        }
        if (status == ATTN_OK && !all_is_launched(slot)) {
            attn_error late;
            slot->blocked = waits_for_turn(device, slot);
            if (slot->blocked) continue;
            status = launch_more(device, slot, &err);
            if (status == ATTN_OK) continue;
            if (attn_stream_wait(slot->stream, &late) == ATTN_DEVICE_LOST) {
                status = ATTN_DEVICE_LOST;
                err = late;
            }
        }
        finish_batch(device, slot, status, &err);
        any = true;
    }
    return any;
}

static struct slot *free_slot(const struct device_thread *thread)
{
    for (int s = 0; s < thread->slot_count; s++)
        if (thread->slots[s].batch == NULL) return &thread->slots[s];
    return NULL;
}

/* True if a batch of this thread has run only a short time: most batches are short, so it will probably end soon. */
static bool ends_soon(const struct device_thread *thread)
{
    int64_t youngest_ns = 0;
    for (int s = 0; s < thread->slot_count; s++) {
        const struct batch *batch = thread->slots[s].batch;
        if (batch && batch->started_ns > youngest_ns) youngest_ns = batch->started_ns;
    }
    return clock_ns() - youngest_ns < DEVICE_SPIN_NS;
}

/* Tells whether the batch may begin in a slot (on a stream) now: see invariants 1 and 2 in devices.c. If not, *until_ns
 * is reduced to the time from which the batch may begin. *flow_has becomes the number of batches of the same flow
 * (client) in slots. To be called with the lock held. */
static bool may_begin(const struct device *device, const struct batch *batch, int64_t now_ns, int *flow_has,
                      int64_t *until_ns)
{
    struct guest_others others = { 0 };
    int own = 0;
    for (int s = 0; s < device->slot_count; s++) {
        const struct batch *other = device->slots[s].batch;
        if (other == NULL) continue;
        own += other->flow == batch->flow;
        batch_guest_sees(&others, other->flow, other->started_ns);
    }
    *flow_has = own;
    if (others.count < device->streams || batch->adopted) return true;
    if (own > 0 || others.count == device->slot_count) return false;
    const int64_t wait_ns = batch_guest_wait_ns(&others, batch->seconds, now_ns);
    if (wait_ns > 0 && now_ns + wait_ns < *until_ns) *until_ns = now_ns + wait_ns;
    return wait_ns <= 0;
}

static struct batch *next_sums(const struct device *device)
{
    for (struct message *message = device->first; message; message = message->next)
        /* a valid cast: `message` is the batch's first member */
        if (batch_adds((struct batch *)message)) return (struct batch *)message;
    return NULL;
}

/* Returns a submitted batch that may overtake the batch device->held, which waits for device memory; NULL: none. Only
 * parts of jobs with gradient sums may overtake: the held batch may wait until such a job has run all its parts and
 * frees its sums. If the held batch is itself a part of such a job, the job of the overtaking part must be older than
 * its job. If it is not, the job of the overtaking part must have been queued before the batch was held. Jobs thus wait
 * only for older jobs and cannot deadlock. To be called with the lock held. */
static struct batch *next_past_held(const struct device *device)
{
    const struct batch *const held = device->held;
    for (struct message *message = device->first; message; message = message->next) {
        struct batch *const batch = (struct batch *)message; /* a valid cast: `message` is the batch's first member */
        const struct job *const job = batch_job(batch, 0), *const other = batch_job(held, 0);
        if (job->sum_parts == 0) continue;
        if (other->sum_parts > 0 ? sums_older(job, other) : job->queued_ns < held->held_ns) return batch;
    }
    return NULL;
}

/* Returns the batch to begin next, or NULL. *until_ns becomes the time at which a batch may begin (NEVER: unknown). A
 * batch that adds up gradients comes first, because it soon frees memory. The held batch (one that lacked memory) comes
 * second, because small batches would otherwise always take the memory that it waits for. Then comes a batch of the
 * flow (client) with the fewest batches on streams. To be called with the lock held. */
static struct batch *next_batch(const struct device *device, int64_t *until_ns)
{
    struct batch *const sums = next_sums(device);
    *until_ns = NEVER;
    if (sums) return sums;
    if (device->held) return device->held_may_run ? device->held : next_past_held(device);
    if (device->first == NULL) return NULL;
    const int64_t now_ns = clock_ns();
    struct batch *best = NULL;
    int fewest = 0;
    for (struct message *message = device->first; message; message = message->next) {
        struct batch *const batch = (struct batch *)message; /* a valid cast: `message` is the batch's first member */
        int flow_has;
        if (!may_begin(device, batch, now_ns, &flow_has, until_ns) || (best && flow_has >= fewest)) continue;
        best = batch;
        fewest = flow_has;
    }
    return best;
}

/* Moves a submitted batch to the slot (a stream). To be called with the device's lock held. */
static void take_batch(struct device *device, struct slot *slot, struct batch *batch)
{
    slot->batch = batch;
    slot->truths_left = 0;
    slot->truth_began = false;
    slot->queued_s = 0;
    slot->blocked = false;
    batch->started_ns = clock_ns();
    if (device->held == batch) {
        device->held = NULL;
        return;
    }
    struct message **link = &device->first;
    while (*link != &batch->message) link = &(*link)->next;
    *link = batch->message.next;
    if (*link == NULL) device->last = link;
    batch->message.next = NULL;
    /* wakes another thread of the device, which takes the remaining batches */
    if (device->first) pthread_cond_signal(&device->wake);
}

/* Waits until a batch is submitted or until_ns has come. To be called with the device's lock held. */
static void wait_for_work(struct device *device, int64_t until_ns)
{
    const struct timespec at = { until_ns / CLOCK_NS_PER_S, until_ns % CLOCK_NS_PER_S };
    if (until_ns == NEVER) pthread_cond_wait(&device->wake, &device->lock);
    else pthread_cond_timedwait(&device->wake, &device->lock, &at);
}

void *device_main(void *argument)
{
    struct device_thread *thread = argument;
    struct device *device = thread->device;
    request_set_role(ROLE_DEVICE);
    /* sets the shortest timer slack: with Linux's default, each pause would be 50 us longer */
    (void)prctl(PR_SET_TIMERSLACK, 1UL);
    for (;;) {
        struct slot *slot = free_slot(thread);
        const bool busy = busy_slots(thread->slots, thread->slot_count) > 0;

        struct batch *next;
        int64_t until_ns;
        pthread_mutex_lock(&device->lock);
        while ((next = next_batch(device, &until_ns)) == NULL && !busy &&
               (device->held || !device->stop || until_ns != NEVER))
            wait_for_work(device, until_ns);
        const bool begins = slot && next;
        if (begins) take_batch(device, slot, next);
        pthread_mutex_unlock(&device->lock);

        if (!busy && !begins) break;
        heartbeat_busy(HEARTBEAT_DEVICE);
        if (begins) start(device, slot);
        const bool moved = begins || poll_slots(thread, device->info.unified);
        heartbeat_idle();
        if (moved || ends_soon(thread)) continue;
        /* the pause between two looks at the thread's streams and at new work */
        const struct timespec pause = { 0, atomic_load(&device->usable) ? DEVICE_POLL_NS : DEVICE_LOST_POLL_NS };
        nanosleep(&pause, NULL);
    }
    pthread_mutex_lock(&device->lock);
    device->threads_ended++;
    pthread_cond_broadcast(&device->wake);
    pthread_mutex_unlock(&device->lock);
    return NULL;
}
