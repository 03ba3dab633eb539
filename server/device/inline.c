/* inline.c: inline slots. An inline slot is a stream on which an HTTP thread runs small problems itself, without waking
 * another thread. There are as many slots as HTTP threads. A thread takes the slot with its core's number, because that
 * slot's scratch memory is probably in the core's cache.
 *
 * On the CPU each slot is a device with one thread. On a GPU the kernel reads and writes staging memory, or a client's
 * registered GPU memory, in place, so one launch is enough. A GPU is used this way only while it has no batches:
 * otherwise the thread would wait for a whole batch, and busy GPUs run merged batches faster (merge.c).
 *
 * A job that has not ended in INLINE_WAIT_NS (a cache transaction: INLINE_STEP_WAIT_NS) is late. The device's thread
 * then takes it over like any batch, by devices_submit_late() and inline_adopt(). Until then no thread uses the slot's
 * stream, unless inline_settle() waits for the end of the job. The memory of a late job stays allocated until its
 * kernel has ended. */
#include "server/device/inline.h"
#include "server/device/internal.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/clock.h"
#include "server/base/flow.h"
#include "server/base/metrics.h"
#include "server/regions/regions.h"
#include "server/work/request.h"
#include "server/work/transaction.h"

/* Opens the next inline slot (a stream for HTTP threads). Several GPUs get slots in turn. */
static attn_status open_slot(struct devices *devices, const struct config *config, struct inline_slot *inline_slot,
                             attn_error *err)
{
    const attn_device_options options = { .threads = 1, .memory_bytes = config->device_bytes };
    struct device *device = devices->device[devices->inline_count % devices->count];
    attn_status status = ATTN_OK;
    *inline_slot = (struct inline_slot){ .taken = ATOMIC_FLAG_INIT, .device = device, .handle = device->handle };
    if (device->info.unified) status = attn_device_open("cpu", 0, &options, &inline_slot->handle, err);
    if (status != ATTN_OK) return status;
    status = attn_stream_open(inline_slot->handle, &inline_slot->slot.stream, err);
    if (status != ATTN_OK && device->info.unified) attn_device_close(inline_slot->handle);
    return status;
}

attn_status inline_open(struct devices *devices, const struct config *config, attn_error *err)
{
    const int count = config->http_threads;
    const attn_device_info *info = &devices->device[0]->info;
    if (strcmp(info->backend, "cpu") != 0 && !info->reads_staging) return ATTN_OK;
    devices->inline_slots = aligned_alloc(LINE, (size_t)count * sizeof *devices->inline_slots);
    if (devices->inline_slots == NULL)
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "--http-threads: no memory for %d", count);
    for (; devices->inline_count < count; devices->inline_count++) {
        const attn_status status = open_slot(devices, config, &devices->inline_slots[devices->inline_count], err);
        if (status != ATTN_OK) return status;
    }
    return ATTN_OK;
}

void inline_close(struct devices *devices)
{
    for (int i = 0; i < devices->inline_count; i++) {
        struct inline_slot *inline_slot = &devices->inline_slots[i];
        memory_close_slot(inline_slot->handle, &inline_slot->slot);
        if (inline_slot->device->info.unified) attn_device_close(inline_slot->handle);
    }
    free(devices->inline_slots);
}

/* Takes the inline slot (a stream for HTTP threads) with this core's number, or the next free one. If only one device
 * can compute the job, `only` is its number, and the slot must belong to it; otherwise `only` is -1. NULL: no such slot
 * is free. */
static struct inline_slot *take_inline_slot(struct devices *devices, int only)
{
    const int core = sched_getcpu(), first = core > 0 ? core % devices->inline_count : 0;
    for (int i = 0; i < devices->inline_count; i++) {
        struct inline_slot *inline_slot = &devices->inline_slots[(first + i) % devices->inline_count];
        if (only >= 0 && inline_slot->device->number != only) continue;
        if (!atomic_flag_test_and_set_explicit(&inline_slot->taken, memory_order_acquire)) return inline_slot;
    }
    return NULL;
}

static void give_inline_slot_back(struct inline_slot *inline_slot)
{
    memory_drop_mirrors(inline_slot->device, &inline_slot->slot);
    if (inline_slot->slot.workspace_bytes > INLINE_KEEP)
        memory_drop_workspace(inline_slot->handle, &inline_slot->slot.workspace, &inline_slot->slot.workspace_bytes);
    atomic_flag_clear_explicit(&inline_slot->taken, memory_order_release);
}

/* True if the job is small and none of its tensors must be copied, because all of them lie in a range of a GPU's memory
 * that a client has registered. */
static bool is_on_device(const struct job *job)
{
    return job->shared && job->inputs_used == 0 && job->outputs.bytes == 0 && job->flops <= INLINE_DEVICE_FLOPS;
}

static bool fits_inline(const struct job *job)
{
    /* a job with tensors in a client's pinned host memory does not run inline, because these tensors must be copied
     * first */
    if (job->shared && job->shared->pinned_bytes > 0) return false;
    if (job->wants_judge || job->wants_verify || job->wants_measure || job->wants_save || job->saved) return false;
    if (job->call->count != 1) return false;
    if (job->transaction)
        return job_problem(job, 0) && is_on_device(job) && transaction_bytes(job) <= INLINE_STEP_BYTES;
    return job->kind != 0 || is_on_device(job);
}

static bool fits_processor(const struct job *job)
{
    const attn_dims d = attn_dims_of(&job->call->items[0].problem);
    return d.H <= INLINE_HEADS && d.B <= INLINE_HEADS && d.B * d.H <= INLINE_HEADS &&
           batch_padded_flops(&job->part) <= INLINE_FLOPS;
}

/* True if the GPU seems free for the job now. A cache transaction also needs an empty queue, because it must not
 * overtake queued transactions that wait for the same caches. */
static bool is_free_for(const struct device *device, const struct job *job)
{
    if (!atomic_load(&device->usable)) return false;
    if (job->transaction) return atomic_load(&device->requests) == 0 && request_count(REQUEST_QUEUED) == 0;
    return atomic_load(&device->requests) <= atomic_load(&device->inline_requests);
}

static bool fits_gpu(const struct device *device, const struct job *job, const attn_plan *plan)
{
    return (is_on_device(job) || (plan->kernel->in_place && job->inputs_used + job->outputs.bytes <= INLINE_BYTES)) &&
           is_free_for(device, job);
}

bool inline_near(const struct devices *devices)
{
    return devices->inline_count > 0 && devices->device[0]->info.unified;
}

/* Polls the stream until its work has ended, until an error, or until the time until_ns. */
static attn_status look(attn_stream *stream, int64_t until_ns, bool *done, attn_error *err)
{
    attn_error none;
    attn_status status = ATTN_OK;
    const bool notes = attn_stream_note(stream, &none) == ATTN_OK;
    int64_t now_ns = clock_ns(),
            /* ask_ns: time of the next call of the driver. Some GPUs write to host memory at the end of the work; for
             * these, most polls read only that memory. The driver is still called once per INLINE_ASK_NS, because only
             * the driver reports errors. */
        ask_ns = notes ? now_ns + INLINE_ASK_NS : now_ns;
    *done = false;
    while (status == ATTN_OK && !*done) {
        if (notes && (*done = attn_stream_noted(stream))) break;
        now_ns = clock_ns();
        if (now_ns < ask_ns && now_ns < until_ns) continue;
        status = attn_stream_done(stream, done, err);
        if (now_ns >= until_ns) break;
        ask_ns = notes ? now_ns + INLINE_ASK_NS : now_ns;
    }
    return status;
}

/* Begins the job's cache transaction, and sets *placed to the job's problem with device addresses. Returns false if the
 * job cannot run on this inline slot. Even if the result is false, the transaction may have begun
 * (transaction_has_begun()). */
static bool take_step(struct inline_slot *inline_slot, struct job *job, attn_problem *placed)
{
    /* the error text is not needed: the main thread will try what fails here, get the same error and report it */
    attn_error ignored;
    bool wait = false;
    if (!is_free_for(inline_slot->device, job) || transaction_begin(job, 0, &wait, &ignored) != ATTN_OK || wait ||
        memory_take_mirrors(inline_slot->device, &inline_slot->slot, job, &ignored) != ATTN_OK)
        return false;
    *placed = *job_problem(job, 0);
    memory_place(&inline_slot->slot, placed);
    return true;
}

/* Prepares a job to run now: its cache transaction, its plan (choice of kernel) and scratch memory. The plan of a cache
 * transaction refers to *placed. Returns false if the job cannot run on this inline slot. Even if the result is false,
 * the transaction may have begun. */
static bool make_ready(struct inline_slot *inline_slot, struct job *job, attn_problem *placed, attn_plan *plan)
{
    const struct device *const device = inline_slot->device;
    attn_device *const handle = inline_slot->handle;
    struct slot *const slot = &inline_slot->slot;
    const attn_problem *const problem = job->transaction ? placed : &job->call->items[0].problem;
    const attn_capabilities *const can = attn_device_capabilities(handle);
    /* the error text is not needed: the main thread will try what fails here, get the same error and report it */
    attn_error ignored;
    size_t bytes;
    return (!job->transaction || take_step(inline_slot, job, placed)) &&
           batch_plan(can, job, 0, problem, plan, &ignored) == ATTN_OK &&
           (device->info.unified || fits_gpu(device, job, plan)) &&
           attn_workspace(can, plan, 1, &bytes, &ignored) == ATTN_OK &&
           memory_grow_workspace(handle, bytes, &slot->workspace, &slot->workspace_bytes, &ignored) == ATTN_OK;
}

/* Reads the clock that measures how long a job takes. For a GPU this is real time. For the CPU, where HTTP threads
 * share the cores, this is the processor time of the calling thread. */
static int64_t work_clock_ns(const struct device *device)
{
    return device->info.unified ? clock_thread_ns() : clock_ns();
}

/* Runs a job on the stream of its inline slot. Sets *done to whether the job has ended. On a GPU, launched_ns becomes
 * the time at which all work was on the stream. */
static attn_status compute(struct inline_slot *inline_slot, const struct job *job, const attn_plan *plan, bool *done,
                           attn_error *err)
{
    struct slot *slot = &inline_slot->slot;
    const int64_t until_ns = clock_ns() + (job->transaction ? INLINE_STEP_WAIT_NS : INLINE_WAIT_NS);
    attn_error other;
    attn_status status = job->transaction ? memory_move_in(slot, job, err) : ATTN_OK;
    *done = true;
    if (status == ATTN_OK) status = attn_run(slot->stream, plan, 1, slot->workspace, err);
    if (inline_slot->device->info.unified) return status;
    slot->launched_ns = clock_ns();
    if (status == ATTN_OK) status = look(slot->stream, until_ns, done, err);
    /* waits, because after an error some work may still run on the stream */
    else (void)attn_stream_wait(slot->stream, &other);
    if (status != ATTN_OK) *done = true;
    return status;
}

/* Counts the requests that run on the device through inline slots (streams for HTTP threads): `by` is 1 at the start,
 * -1 at the end. */
static void count_on_device(struct device *device, int by)
{
    atomic_fetch_add_explicit(&device->inline_requests, by, memory_order_relaxed);
    atomic_fetch_add_explicit(&device->requests, by, memory_order_relaxed);
}

static void note_end(struct devices *devices, struct job *job, struct batch *batch, int64_t took_ns, attn_status status,
                     const attn_error *err)
{
    atomic_fetch_add_explicit(&devices->inline_jobs, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&devices->inline_ns, took_ns, memory_order_relaxed);
    job->part.ran = status == ATTN_OK;
    flow_charge(job->flow, FLOW_DEVICE, took_ns);
    batch->compute_us = (double)took_ns / 1e3;
    if (job->part.ran) {
        batch_note_times(batch, job);
        batch_observe_times(job);
    } else job->part.error = *err;
    metrics_observe(METRIC_BATCH_SIZE, NULL, 1);
    batch_count(batch, &job->part);
}

/* Runs a job on an inline slot (a stream for HTTP threads) that this thread has taken. make_ready() must have
 * succeeded. */
static enum inline_outcome run(struct devices *devices, struct inline_slot *inline_slot, struct job *job,
                               const attn_plan *plan)
{
    struct device *const device = inline_slot->device;
    /* A batch of this job alone, for the functions that record results and times. left_ns and started_ns stay 0, so no
     * waiting time is recorded. */
    struct batch batch = { .device = device, .count = 1, .flops = job->flops, .bytes = job->bytes };
    attn_error err = { 0 };
    bool done;
    batch_name_backend(&job->results[0], device, plan->kernel->name);
    count_on_device(device, 1);
    const int64_t began_ns = work_clock_ns(device);
    const attn_status status = compute(inline_slot, job, plan, &done, &err);
    const int64_t took_ns = work_clock_ns(device) - began_ns;
    count_on_device(device, -1);
    if (!done) {
        job->part.handed_over = inline_slot;
        return INLINE_LATE;
    }
    if (!device->info.unified) batch.launch_us = (double)(inline_slot->slot.launched_ns - began_ns) / 1e3;
    give_inline_slot_back(inline_slot);
    if (status == ATTN_DEVICE_LOST) {
        job->part.device = device->number;
        return INLINE_LOST;
    }
    note_end(devices, job, &batch, took_ns, status, &err);
    return INLINE_DONE;
}

enum inline_outcome inline_run(struct devices *devices, struct job *job)
{
    struct inline_slot *inline_slot;
    if (devices->inline_count == 0 || !fits_inline(job) || (inline_near(devices) && !fits_processor(job)) ||
        (inline_slot = take_inline_slot(devices, job->part.device)) == NULL)
        return INLINE_NOT;
    attn_problem placed;
    attn_plan plan;
    if (make_ready(inline_slot, job, &placed, &plan)) return run(devices, inline_slot, job, &plan);
    /* The job cannot run on this slot, for example because the GPU is busy or memory is short. An HTTP thread must not
     * wait until this changes, so the caller queues the job. */
    give_inline_slot_back(inline_slot);
    return transaction_has_begun(job) ? INLINE_BEGAN : INLINE_NOT;
}

void inline_settle(struct job *job)
{
    attn_error ignored;
    for (struct job_part *part = &job->part; part; part = part->next) {
        if (part->handed_over == NULL) continue;
        (void)attn_stream_wait(part->handed_over->slot.stream, &ignored);
        give_inline_slot_back(part->handed_over);
        part->handed_over = NULL;
    }
}

void inline_adopt(struct slot *slot, struct job_part *part)
{
    struct inline_slot *inline_slot = part->handed_over;
    struct slot idle = *slot;
    *slot = inline_slot->slot;
    slot->batch = idle.batch;
    slot->due_ns = idle.due_ns;
    slot->worst_ns = idle.worst_ns;
    slot->count = slot->launched = 1;
    idle.batch = NULL;
    inline_slot->slot = idle;
    part->handed_over = NULL;
    give_inline_slot_back(inline_slot);
}

int inline_learn(struct devices *devices, double *seconds)
{
    *seconds = (double)atomic_exchange_explicit(&devices->inline_ns, 0, memory_order_relaxed) / 1e9;
    return atomic_exchange_explicit(&devices->inline_jobs, 0, memory_order_relaxed);
}
