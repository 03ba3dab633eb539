/* devices.c: batches through devices.
 *
 *   loop --submit--> inbox --> slot 0: stream, batch: copy in | run | copy out --> done? --> mailbox of the loop
 *                              slot 1: ...                    (as many as attn_device_info.streams)
 *
 * A unified device (the CPU) computes in the staging memory itself: nothing is copied, and its thread simply waits
 * for the stream. For a device with memory of its own, each region of a job (its inputs, the contexts it uses, its
 * outputs) is mirrored by one block of device memory, copied in one piece, and the tensors' pointers are moved from
 * the region to the mirror.
 *
 * Inline slots are for small problems of the CPU: as many as HTTP threads, each a device of one thread with a stream and a
 * workspace. Whoever wants one takes that of its core's number, so that the workspace is likely in that core's
 * cache, or the next that is free.
 *
 *   HTTP thread: body complete --> inline slot free? --> run --> answer            (else: posted to the loop, as above)
 *
 * Invariants
 * 1. attn_device and its streams are used by the device's thread alone, but for descriptions and plans.
 * Those of an inline slot are used by the thread that set its `taken`.
 * 2. A batch that was submitted comes back exactly once, whatever happens; each of its jobs then has ran == true,
 * or an error.
 * 3. No more batches are with a device than it has streams, and two at least: one waits, so that the device is
 * never idle between two.
 * 4. While the device's thread is in a call that may never return, due_ns says until when it may be: the loop
 * watches. */
#include "server/device/devices.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto-json/text.h"
#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/work/request.h"

enum {
    LEAST_HEAD_DIM = 64, /* kernels compute whole tiles: smaller heads cost as much */
    LINE = 64,           /* of the cache */
};
#define NEVER INT64_MAX

struct mirror {
    struct job_region host;
    char *device;
    bool copy; /* the device shall have what the host has */
};

/* One batch in flight. */
struct slot {
    attn_stream *stream;
    struct batch *batch; /* NULL: free */
    int64_t due_ns;      /* when it should be over */
    int64_t worst_ns;    /* what its work takes at the very slowest */
    attn_problem *problems;
    attn_plan *plans;          /* of the problems */
    int room, count, launched; /* there is room for, of both; of this batch; of those, on the stream */
    void *workspace;
    size_t workspace_bytes;
    struct mirror *mirrors;
    int mirror_count, mirror_room;
};

struct device {
    attn_device *handle;
    attn_device_info info;
    struct mailbox *box;
    int message_kind;
    pthread_t thread;
    bool joined;

    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct message *first, **last; /* batches submitted, not yet on a stream */
    bool stop, stopped;

    int slot_count;
    struct slot slots[DEVICE_MAX_STREAMS];
    struct batch *held; /* there was no memory for it while others ran */
    bool held_may_run;  /* one of them is over */
    int64_t watchdog_ns;
    _Atomic int64_t due_ns; /* the first of the slots'; NEVER: nothing runs, or nobody watches */

    /* The loop's. */
    int outstanding;
    double flops;
    bool disabled;
    struct batch *batches;
    _Atomic int requests; /* for /v1/info */
    _Atomic bool usable;
};

/* A way of its own through the CPU for one thread at a time. */
struct inline_slot {
    _Alignas(LINE) atomic_flag taken;
    attn_device *handle;
    attn_stream *stream;
    void *workspace;
    size_t workspace_bytes;
};

struct devices {
    int count;
    struct device *device[CONFIG_MAX_DEVICES];
    int inline_count; /* 0: the devices are not this machine's processor */
    struct inline_slot *inline_slots;
    _Atomic int inline_jobs;   /* since devices_learn() last took them, */
    _Atomic int64_t inline_ns; /* and what they took */
};

/* ---- The device's thread: memory --------------------------------------------------------------------------------- */

static void drop_mirrors(struct device *device, struct slot *slot)
{
    for (int i = 0; i < slot->mirror_count; i++) attn_device_free(device->handle, slot->mirrors[i].device);
    slot->mirror_count = 0;
}

/* Device memory for a region, to be copied there if `copy`. A region that has a mirror already keeps it. */
static attn_status mirror(struct device *device, struct slot *slot, struct job_region host, bool copy, attn_error *err)
{
    void *memory = NULL;
    attn_status status;
    if (host.bytes == 0) return ATTN_OK;
    for (int i = 0; i < slot->mirror_count; i++)
        if (slot->mirrors[i].host.memory == host.memory) return ATTN_OK;
    if (slot->mirror_count == slot->mirror_room) {
        const int room = slot->mirror_room ? 2 * slot->mirror_room : 64;
        struct mirror *wider = realloc(slot->mirrors, (size_t)room * sizeof *wider);
        if (wider == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
        slot->mirrors = wider;
        slot->mirror_room = room;
    }
    status = attn_device_alloc(device->handle, host.bytes, &memory, err);
    if (status != ATTN_OK) return status;
    slot->mirrors[slot->mirror_count++] = (struct mirror){ host, memory, copy };
    return ATTN_OK;
}

/* A host address inside a mirrored region, as the device knows it. */
static void *to_device(const struct slot *slot, void *address)
{
    for (int i = 0; i < slot->mirror_count; i++) {
        const struct mirror *m = &slot->mirrors[i];
        if ((char *)address >= m->host.memory && (char *)address < m->host.memory + m->host.bytes)
            return m->device + ((char *)address - m->host.memory);
    }
    return address; /* only of tensors without elements */
}

static attn_status take_mirrors(struct device *device, struct slot *slot, struct job *job, attn_error *err)
{
    attn_status status = ATTN_OK;
    if (job->inputs)
        status = mirror(device, slot, (struct job_region){ job->inputs->memory, job->inputs_used }, true, err);
    for (int i = 0; status == ATTN_OK && job->saved && i < job->call->count; i++) {
        struct job *saved = job->saved[i];
        if (saved == NULL || job->call->items[i].error.status != ATTN_OK) continue;
        status = mirror(device, slot, (struct job_region){ saved->inputs->memory, saved->inputs_used }, true, err);
        if (status == ATTN_OK) status = mirror(device, slot, saved->outputs, true, err);
    }
    return status == ATTN_OK ? mirror(device, slot, job->outputs, false, err) : status;
}

static attn_status copy_in(struct slot *slot, attn_error *err)
{
    attn_status status = ATTN_OK;
    for (int i = 0; i < slot->mirror_count && status == ATTN_OK; i++) {
        const struct mirror *m = &slot->mirrors[i];
        if (m->copy) status = attn_copy(slot->stream, m->device, m->host.memory, m->host.bytes, ATTN_TO_DEVICE, err);
    }
    return status;
}

static attn_status copy_out(struct device *device, struct slot *slot, struct job *job, attn_error *err)
{
    (void)device;
    if (job->outputs.bytes == 0) return ATTN_OK;
    return attn_copy(slot->stream, job->outputs.memory, to_device(slot, job->outputs.memory), job->outputs.bytes,
                     ATTN_FROM_DEVICE, err);
}

/* ---- The device's thread: how long it may take ------------------------------------------------------------------- */

/* The operations of a job as kernels do them, in tiles: small heads are padded. */
static double padded_flops(const struct job *job)
{
    double waste = 1;
    for (int i = 0; i < job->call->count; i++) {
        const attn_dims d = attn_dims_of(&job->call->items[i].problem);
        const double real = (double)(d.D + d.Dv), padded = (double)((d.D > LEAST_HEAD_DIM ? d.D : LEAST_HEAD_DIM) +
                                                                    (d.Dv > LEAST_HEAD_DIM ? d.Dv : LEAST_HEAD_DIM));
        if (real > 0 && padded / real > waste) waste = padded / real;
    }
    return job->flops * waste;
}

static int64_t worst_ns(const struct batch *batch)
{
    double flops = 0;
    for (int j = 0; j < batch->count; j++) flops += padded_flops(batch->jobs[j]);
    const double seconds = flops / DEVICE_SLOWEST_FLOPS, most = 1e9; /* thirty years */
    return (int64_t)((seconds < most ? seconds : most) * 1e9);
}

/* The earliest of what runs, for the loop to look at. */
static void publish_due(struct device *device)
{
    int64_t due = NEVER;
    for (int s = 0; s < device->slot_count; s++)
        if (device->slots[s].batch && device->slots[s].due_ns < due) due = device->slots[s].due_ns;
    atomic_store(&device->due_ns, due);
}

/* A batch begins. The batches of a device share it, so each may have to wait for all of the others. */
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

/* ---- The device's thread: one batch ------------------------------------------------------------------------------ */

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

static void drop_workspace(attn_device *handle, void **workspace, size_t *workspace_bytes)
{
    attn_device_free(handle, *workspace);
    *workspace = NULL;
    *workspace_bytes = 0;
}

/* At least `bytes` of workspace; what it held is lost when it grows. */
static attn_status grow_workspace(attn_device *handle, size_t bytes, void **workspace, size_t *workspace_bytes,
                                  attn_error *err)
{
    if (bytes <= *workspace_bytes) return ATTN_OK;
    drop_workspace(handle, workspace, workspace_bytes);
    const attn_status status = attn_device_alloc(handle, bytes, workspace, err);
    if (status == ATTN_OK) *workspace_bytes = bytes;
    return status;
}

static attn_status reserve_workspace(struct device *device, struct slot *slot, int count, attn_error *err)
{
    size_t bytes = 0;
    for (int at = 0; at < count; at += DEVICE_MAX_RUN) {
        size_t part;
        const attn_status status = attn_workspace(
            device->handle, slot->plans + at, count - at < DEVICE_MAX_RUN ? count - at : DEVICE_MAX_RUN, &part, err);
        if (status != ATTN_OK) return status;
        if (part > bytes) bytes = part;
    }
    return grow_workspace(device->handle, bytes, &slot->workspace, &slot->workspace_bytes, err);
}

/* "cpu avx512bf16": the device and the kernel that computed a result. */
static void name_backend(proto_result *result, const struct device *device, const char *kernel)
{
    char *at = stpcpy(result->backend, device->info.name);
    *at++ = ' ';
    const size_t room = sizeof result->backend - (size_t)(at - result->backend), length = strnlen(kernel, room - 1);
    memcpy(at, kernel, length);
    at[length] = '\0';
}

/* The batch's problems, with the addresses that the device knows. Returns how many. */
static int gather(struct device *device, struct slot *slot)
{
    int count = 0;
    for (int j = 0; j < slot->batch->count; j++) {
        const struct job *job = slot->batch->jobs[j];
        for (int i = 0; i < job->call->count; i++) {
            if (job->call->items[i].error.status != ATTN_OK) continue;
            attn_problem *p = &slot->problems[count++];
            *p = job->call->items[i].problem;
            for (int id = 0; id < ATTN_TENSOR_COUNT && !device->info.unified; id++)
                if (p->tensor[id].rank > 0) p->tensor[id].data = to_device(slot, p->tensor[id].data);
        }
    }
    return count;
}

/* Which kernel computes each of them. Devices differ: that prepare_job() found one on another says nothing of this. */
static attn_status plan_all(struct device *device, struct slot *slot, attn_error *err)
{
    int n = 0;
    for (int j = 0; j < slot->batch->count; j++) {
        const struct job *job = slot->batch->jobs[j];
        for (int i = 0; i < job->call->count; i++) {
            if (job->call->items[i].error.status != ATTN_OK) continue;
            const attn_status status = attn_plan_make(device->handle, &slot->problems[n], &slot->plans[n], err);
            if (status != ATTN_OK) return status;
            name_backend(&job->results[i], device, slot->plans[n++].kernel->name);
        }
    }
    return ATTN_OK;
}

/* How many problems go on the stream at a time. All of them, unless that is work for seconds: what is on the stream of a GPU
 * cannot be called back. */
static int group_of(const struct device *device, const struct slot *slot)
{
    const double share = slot->batch->flops > DEVICE_GROUP_FLOPS ? DEVICE_GROUP_FLOPS / slot->batch->flops : 1;
    const double group = device->info.unified ? DEVICE_MAX_RUN : share * slot->count;
    const int left = slot->count - slot->launched;
    const int most = group < 1 ? 1 : group > DEVICE_MAX_RUN ? DEVICE_MAX_RUN : (int)group;
    return left < most ? left : most;
}

/* The next problems of the batch, and after the last of them what follows. */
static attn_status launch_group(struct device *device, struct slot *slot, attn_error *err)
{
    struct batch *batch = slot->batch;
    const int count = group_of(device, slot);
    attn_status status = attn_run(slot->stream, slot->plans + slot->launched, count, slot->workspace, err);
    slot->launched += count;
    if (status != ATTN_OK || slot->launched < slot->count) return status;
    status = attn_stream_mark(slot->stream, 2, err);
    if (!device->info.unified)
        for (int j = 0; j < batch->count && status == ATTN_OK; j++)
            status = copy_out(device, slot, batch->jobs[j], err);
    return status == ATTN_OK ? attn_stream_mark(slot->stream, 3, err) : status;
}

/* Puts everything on the stream, or the first group of it. On an error the stream may hold part of it: the caller waits
 * for that before it frees anything. */
static attn_status launch(struct device *device, struct slot *slot, attn_error *err)
{
    struct batch *batch = slot->batch;
    attn_status status = ATTN_OK;
    int count = 0;

    for (int j = 0; j < batch->count; j++) count += batch->jobs[j]->runnable;
    if ((status = reserve_problems(slot, count, err)) != ATTN_OK) return status;
    for (int j = 0; j < batch->count && !device->info.unified && status == ATTN_OK; j++)
        status = take_mirrors(device, slot, batch->jobs[j], err);
    if (status != ATTN_OK) return status;
    count = gather(device, slot);
    if ((status = plan_all(device, slot, err)) != ATTN_OK) return status;
    if ((status = reserve_workspace(device, slot, count, err)) != ATTN_OK) return status;

    if ((status = attn_stream_mark(slot->stream, 0, err)) != ATTN_OK) return status;
    if ((status = copy_in(slot, err)) != ATTN_OK) return status;
    if ((status = attn_stream_mark(slot->stream, 1, err)) != ATTN_OK) return status;
    slot->count = count;
    slot->launched = 0;
    do status = launch_group(device, slot, err);
    while (status == ATTN_OK && device->info.unified && slot->launched < count);
    return status;
}

/* The batch is over, well or not: give its memory back and report. */
static void finish_batch(struct device *device, struct slot *slot, attn_status status, const attn_error *err)
{
    struct batch *batch = slot->batch;
    assert(request_role() == ROLE_DEVICE && batch->device == device);
    assert(status == ATTN_OK ? slot->launched == slot->count : err->status == status); /* invariant 2: one of the two */
    batch->ended_ns = clock_ns();
    if (status == ATTN_OK) {
        batch->copy_in_us = device->info.unified ? 0 : attn_stream_elapsed_us(slot->stream, 0, 1);
        batch->compute_us = attn_stream_elapsed_us(slot->stream, 1, 2);
        batch->copy_out_us = device->info.unified ? 0 : attn_stream_elapsed_us(slot->stream, 2, 3);
    }
    for (int j = 0; j < batch->count; j++) {
        batch->jobs[j]->ran = status == ATTN_OK;
        if (status != ATTN_OK) batch->jobs[j]->error = *err;
    }
    drop_mirrors(device, slot);
    if (slot->workspace_bytes > DEVICE_WORKSPACE_KEEP)
        drop_workspace(device->handle, &slot->workspace, &slot->workspace_bytes);
    attn_stream_heed(slot->stream, NULL);
    slot->batch = NULL;
    device->held_may_run = true;
    unwatch(device);
    mailbox_post(device->box, &batch->message);
}

/* The scratch memory that idle slots keep. Returns whether there was any. */
static bool give_back_workspaces(struct device *device)
{
    bool any = false;
    for (int s = 0; s < device->slot_count; s++) {
        struct slot *slot = &device->slots[s];
        if (slot->batch || slot->workspace == NULL) continue;
        drop_workspace(device->handle, &slot->workspace, &slot->workspace_bytes);
        any = true;
    }
    return any;
}

static int busy_slots(const struct device *device)
{
    int count = 0;
    for (int s = 0; s < device->slot_count; s++) count += device->slots[s].batch != NULL;
    return count;
}

/* launch(), or nothing on the stream and nothing allocated. */
static attn_status try_launch(struct device *device, struct slot *slot, attn_error *err)
{
    attn_error late;
    attn_status status = launch(device, slot, err);
    if (status == ATTN_OK) return status;
    /* What was put on the stream before the error still uses the buffers; and it may have failed for good. */
    if (attn_stream_wait(slot->stream, &late) == ATTN_DEVICE_LOST && status != ATTN_DEVICE_LOST) {
        status = ATTN_DEVICE_LOST;
        *err = late;
    }
    drop_mirrors(device, slot);
    return status;
}

static void start(struct device *device, struct slot *slot, struct batch *batch)
{
    attn_error err = { 0 };
    assert(request_role() == ROLE_DEVICE && slot->batch == NULL && slot->mirror_count == 0);
    slot->batch = batch;
    batch->started_ns = clock_ns();
    attn_stream_heed(slot->stream, &batch->cancel);
    watch(device, slot);
    attn_status status = try_launch(device, slot, &err);
    if (status == ATTN_NO_MEMORY && give_back_workspaces(device)) status = try_launch(device, slot, &err);
    if (status == ATTN_OK) return;
    if (status == ATTN_NO_MEMORY && busy_slots(device) > 1) { /* when they are over there is more */
        attn_stream_heed(slot->stream, NULL);
        slot->batch = NULL;
        device->held = batch;
        device->held_may_run = false;
        unwatch(device);
        return;
    }
    finish_batch(device, slot, status, &err);
}

/* Concludes batches whose stream is done. `wait`: for one of them at least. Returns whether there was one. */
static bool poll_slots(struct device *device, bool wait)
{
    bool any = false;
    for (int s = 0; s < device->slot_count; s++) {
        struct slot *slot = &device->slots[s];
        attn_error err = { 0 };
        bool done = false;
        if (slot->batch == NULL) continue;
        attn_status status;
        if (wait && !any) {
            status = attn_stream_wait(slot->stream, &err);
            done = true;
        } else status = attn_stream_done(slot->stream, &done, &err);
        if (status == ATTN_OK && !done) continue;
        if (status == ATTN_OK && slot->launched < slot->count) {
            attn_error late;
            status = launch_group(device, slot, &err);
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

static struct slot *free_slot(struct device *device)
{
    for (int s = 0; s < device->slot_count; s++)
        if (device->slots[s].batch == NULL) return &device->slots[s];
    return NULL;
}

static void *device_main(void *argument)
{
    struct device *device = argument;
    request_set_role(ROLE_DEVICE);
    for (;;) {
        struct slot *slot = free_slot(device);
        struct batch *batch = NULL;
        const bool busy = busy_slots(device) > 0;

        pthread_mutex_lock(&device->lock);
        while (!busy && device->held == NULL && device->first == NULL && !device->stop)
            pthread_cond_wait(&device->wake, &device->lock);
        if (device->held) { /* it is the next, or the small ones behind it would never let it have its memory */
            if (slot && device->held_may_run) {
                batch = device->held;
                device->held = NULL;
            }
        } else if (slot && device->first) {
            batch = (struct batch *)device->first; /* the message is its first member */
            device->first = batch->message.next;
            if (device->first == NULL) device->last = &device->first;
        }
        const bool stop = device->stop && batch == NULL && device->held == NULL && !busy;
        pthread_mutex_unlock(&device->lock);

        if (stop) break;
        if (batch) {
            batch->message.next = NULL;
            heartbeat_busy(HEARTBEAT_DEVICE);
            start(device, slot, batch);
            heartbeat_idle();
            continue;
        }
        heartbeat_busy(HEARTBEAT_DEVICE);
        const bool moved = poll_slots(device, device->info.unified);
        heartbeat_idle();
        if (moved) continue;
        /* A batch is on its way. New work is looked for in between. */
        const struct timespec pause = { 0, atomic_load(&device->usable) ? DEVICE_POLL_NS : DEVICE_LOST_POLL_NS };
        nanosleep(&pause, NULL);
    }
    pthread_mutex_lock(&device->lock);
    device->stopped = true;
    pthread_cond_broadcast(&device->wake);
    pthread_mutex_unlock(&device->lock);
    return NULL;
}

/* ---- What a batch leaves behind ---------------------------------------------------------------------------------- */

void batch_count(const struct batch *batch, const struct job *first)
{
    const char *device = batch->device->info.name;
    metrics_add(METRIC_DEVICE_BATCHES, device, NULL, 1);
    if (first->ran) {
        const char *op = first->call->items[0].problem.op == ATTN_OP_FORWARD ? "forward" : "backward";
        metrics_add(METRIC_KERNEL_SECONDS, device, op, batch->compute_us / 1e6);
        metrics_add(METRIC_FLOPS, device, op, batch->flops);
        return;
    }
    if (first->error.status == ATTN_CANCELLED) return; /* those who left are counted where they left */
    metrics_add(METRIC_DEVICE_ERRORS, device, attn_status_name(first->error.status), 1);
    if (first->error.status != ATTN_DEVICE_LOST) /* which the loop tells, once */
        log_event(LOG_WARN, NULL, "batch_failed", "device=%s requests=%d text=" LOG_Q, device, batch->count,
                  first->error.text);
}

void batch_note_times(const struct batch *batch, struct job *job)
{
    const double queue_us = (double)(batch->started_ns - job->queued_ns) / 1e3;
    for (int i = 0; i < job->call->count; i++) {
        double *us = job->results[i].timing_us;
        us[PROTO_STAGE_queue] = queue_us;
        us[PROTO_STAGE_copy_in] = batch->copy_in_us;
        us[PROTO_STAGE_compute] = batch->compute_us;
        us[PROTO_STAGE_copy_out] = batch->copy_out_us;
    }
    metrics_observe(METRIC_STAGE_SECONDS, "queue", queue_us / 1e6);
    metrics_observe(METRIC_STAGE_SECONDS, "compute", batch->compute_us / 1e6);
    if (batch->copy_in_us > 0) metrics_observe(METRIC_STAGE_SECONDS, "copy_in", batch->copy_in_us / 1e6);
    if (batch->copy_out_us > 0) metrics_observe(METRIC_STAGE_SECONDS, "copy_out", batch->copy_out_us / 1e6);
}

/* ---- Inline slots: the HTTP threads' side ------------------------------------------------------------------------------- */

static attn_status open_inline_slots(struct devices *devices, const struct config *config, attn_error *err)
{
    const attn_device_options options = { .threads = 1, .memory_bytes = config->device_bytes };
    const int count = config->http_threads;
    if (strcmp(devices->device[0]->info.backend, "cpu") != 0) return ATTN_OK;
    devices->inline_slots = aligned_alloc(LINE, (size_t)count * sizeof *devices->inline_slots);
    if (devices->inline_slots == NULL)
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "--http-threads: no memory for %d", count);
    for (; devices->inline_count < count; devices->inline_count++) {
        struct inline_slot *inline_slot = &devices->inline_slots[devices->inline_count];
        attn_status status;
        *inline_slot = (struct inline_slot){ .taken = ATOMIC_FLAG_INIT };
        if ((status = attn_device_open("cpu", 0, &options, &inline_slot->handle, err)) != ATTN_OK) return status;
        if ((status = attn_stream_open(inline_slot->handle, &inline_slot->stream, err)) != ATTN_OK) {
            attn_device_close(inline_slot->handle);
            return status;
        }
    }
    return ATTN_OK;
}

static void close_inline_slots(struct devices *devices)
{
    for (int i = 0; i < devices->inline_count; i++) {
        struct inline_slot *inline_slot = &devices->inline_slots[i];
        attn_device_free(inline_slot->handle, inline_slot->workspace);
        attn_stream_close(inline_slot->stream);
        attn_device_close(inline_slot->handle);
    }
    free(devices->inline_slots);
}

/* That of this core, or the next that is free: a thread that was interrupted in the middle of its problem still has
 * its own.
 * */
static struct inline_slot *take_inline_slot(struct devices *devices)
{
    const int core = sched_getcpu(), first = core > 0 ? core % devices->inline_count : 0;
    for (int i = 0; i < devices->inline_count; i++) {
        struct inline_slot *inline_slot = &devices->inline_slots[(first + i) % devices->inline_count];
        if (!atomic_flag_test_and_set_explicit(&inline_slot->taken, memory_order_acquire)) return inline_slot;
    }
    return NULL;
}

static void give_inline_slot_back(struct inline_slot *inline_slot)
{
    if (inline_slot->workspace_bytes > INLINE_KEEP)
        drop_workspace(inline_slot->handle, &inline_slot->workspace, &inline_slot->workspace_bytes);
    atomic_flag_clear_explicit(&inline_slot->taken, memory_order_release);
}

static bool fits_inline(const struct job *job)
{
    if (job->kind == 0 || job->wants_verify || job->wants_measure || job->wants_save || job->saved) return false;
    const attn_dims d = attn_dims_of(&job->call->items[0].problem);
    return d.H <= INLINE_HEADS && d.B <= INLINE_HEADS && d.B * d.H <= INLINE_HEADS && padded_flops(job) <= INLINE_FLOPS;
}

bool devices_inline(const struct devices *devices)
{
    return devices->inline_count > 0;
}

bool devices_run_here(struct devices *devices, struct job *job)
{
    attn_error err = { 0 };
    struct inline_slot *inline_slot;
    size_t bytes;
    if (devices->inline_count == 0 || !fits_inline(job) || (inline_slot = take_inline_slot(devices)) == NULL)
        return false;

    struct device *device = devices->device[0];
    attn_plan plan;
    if (attn_plan_make(inline_slot->handle, &job->call->items[0].problem, &plan, &err) != ATTN_OK ||
        attn_workspace(inline_slot->handle, &plan, 1, &bytes, &err) != ATTN_OK ||
        grow_workspace(inline_slot->handle, bytes, &inline_slot->workspace, &inline_slot->workspace_bytes, &err) !=
            ATTN_OK) {
        give_inline_slot_back(inline_slot); /* the device waits for memory, an inline slot does not */
        return false;
    }
    struct batch batch = { .device = device, .count = 1, .flops = job->flops }; /* started when queued: both 0 */
    atomic_fetch_add_explicit(&device->requests, 1, memory_order_relaxed);
    const int64_t began_ns =
        clock_thread_ns(); /* there are more HTTP threads than cores: of them, time goes by for others */
    job->ran = attn_run(inline_slot->stream, &plan, 1, inline_slot->workspace, &err) == ATTN_OK;
    const int64_t took_ns = clock_thread_ns() - began_ns;
    give_inline_slot_back(inline_slot);
    atomic_fetch_sub_explicit(&device->requests, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&devices->inline_jobs, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&devices->inline_ns, took_ns, memory_order_relaxed);
    batch.compute_us = (double)took_ns / 1e3;
    if (job->ran) {
        name_backend(&job->results[0], device, plan.kernel->name);
        batch_note_times(&batch, job);
    } else job->error = err;
    metrics_observe(METRIC_BATCH_SIZE, NULL, 1);
    batch_count(&batch, job);
    return true;
}

int devices_learn(struct devices *devices, double *seconds)
{
    *seconds = (double)atomic_exchange_explicit(&devices->inline_ns, 0, memory_order_relaxed) / 1e9;
    return atomic_exchange_explicit(&devices->inline_jobs, 0, memory_order_relaxed);
}

/* ---- Open and close ---------------------------------------------------------------------------------------------- */

static void device_free(struct device *device)
{
    assert(device->outstanding == 0 && device->batches == NULL && device->first == NULL && device->held == NULL);
    for (int s = 0; s < device->slot_count; s++) {
        assert(device->slots[s].batch == NULL && device->slots[s].mirror_count == 0);
        attn_device_free(device->handle, device->slots[s].workspace);
        attn_stream_close(device->slots[s].stream);
        free(device->slots[s].problems);
        free(device->slots[s].plans);
        free(device->slots[s].mirrors);
    }
    attn_device_close(device->handle);
    pthread_cond_destroy(&device->wake);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static attn_status device_open(const struct config *config, const char *backend, int index, struct mailbox *box,
                               int message_kind, struct devices *devices, attn_error *err)
{
    const attn_device_options options = { .threads = config->cpu_threads, .memory_bytes = config->device_bytes };
    attn_status status;
    if (devices->count == CONFIG_MAX_DEVICES)
        return attn_fail(err, ATTN_TOO_LARGE, NULL, "--devices: more than %d devices", CONFIG_MAX_DEVICES);
    struct device *device = calloc(1, sizeof *device);
    if (device == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "--devices: out of memory");
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&device->lock, NULL);
    pthread_cond_init(&device->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    device->last = &device->first;
    device->box = box;
    device->message_kind = message_kind;
    status = attn_device_open(backend, index, &options, &device->handle, err);
    if (status != ATTN_OK) goto fail;
    attn_device_describe(device->handle, &device->info);
    /* Large problems may well take minutes on a CPU, and it cannot be lost. */
    device->watchdog_ns = device->info.unified ? NEVER : config->watchdog_ms * CLOCK_NS_PER_MS;
    atomic_store(&device->due_ns, NEVER);
    const int streams = device->info.streams < 1                    ? 1
                        : device->info.streams > DEVICE_MAX_STREAMS ? DEVICE_MAX_STREAMS
                                                                    : device->info.streams;
    while (device->slot_count < streams) {
        status = attn_stream_open(device->handle, &device->slots[device->slot_count].stream, err);
        if (status != ATTN_OK) goto fail;
        device->slot_count++;
    }
    atomic_store(&device->usable, true);
    const int error = pthread_create(&device->thread, NULL, device_main, device);
    if (error != 0) {
        status = attn_fail(err, ATTN_DEVICE, NULL, "--devices: no thread for %s: %s", device->info.name,
                           strerror(error));
        goto fail;
    }
    devices->device[devices->count++] = device;
    static const attn_status to_count[] = { ATTN_DEVICE, ATTN_DEVICE_LOST, ATTN_NO_MEMORY };
    metrics_add(METRIC_DEVICE_BATCHES, device->info.name, NULL, 0); /* on the page from the start, for rates */
    for (int i = 0; i < 3; i++) metrics_add(METRIC_DEVICE_ERRORS, device->info.name, attn_status_name(to_count[i]), 0);
    log_event(LOG_INFO, NULL, "device", "name=%s backend=%s streams=%d description=\"%s\"", device->info.name,
              device->info.backend, device->slot_count, device->info.description);
    return ATTN_OK;
fail:
    device_free(device);
    return status;
}

/* The backend of this build whose devices --devices numbers. NULL: it was built for the CPU alone. */
static const char *gpu_backend(void)
{
    for (const char *const *name = attn_backends(); *name; name++)
        if (strcmp(*name, "cpu") != 0 && strcmp(*name, "reference") != 0) return *name;
    return NULL;
}

attn_status devices_open(const struct config *config, struct mailbox *box, int message_kind, struct devices **out,
                         attn_error *err)
{
    const char *gpu = gpu_backend();
    struct devices *devices = calloc(1, sizeof *devices);
    attn_status status = ATTN_OK;
    if (devices == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "--devices: out of memory");
    const char *wanted = config->devices;
    const bool numbers = *wanted >= '0' && *wanted <= '9';
    const int gpus = gpu ? attn_device_count(gpu) : 0;
    if (gpus == 0 && (numbers || strcmp(wanted, "all") == 0)) {
        status = attn_fail(err, ATTN_NOT_FOUND, NULL, "--devices: '%.100s' wants GPUs, and %s", wanted,
                           gpu ? "there is none here" : "this program was built without CUDA");
    } else if (strcmp(wanted, "auto") == 0 || strcmp(wanted, "all") == 0) {
        for (int i = 0; i < gpus && status == ATTN_OK; i++)
            status = device_open(config, gpu, i, box, message_kind, devices, err);
        if (gpus == 0) status = device_open(config, "cpu", 0, box, message_kind, devices, err);
    } else if (numbers) {
        for (const char *at = wanted; *at && status == ATTN_OK; at += *at == ',') {
            uint64_t index = 0;
            at = text_read_number(at, &index); /* config.c has checked it */
            assert(at != NULL && index < CONFIG_MAX_DEVICES);
            if (index >= (uint64_t)gpus)
                status = attn_fail(err, ATTN_NOT_FOUND, NULL, "--devices: there is no GPU %d, there %s %d", (int)index,
                                   gpus == 1 ? "is" : "are", gpus);
            else status = device_open(config, gpu, (int)index, box, message_kind, devices, err);
        }
    } else status = device_open(config, wanted, 0, box, message_kind, devices, err);
    if (status == ATTN_OK) status = open_inline_slots(devices, config, err);
    if (status != ATTN_OK) {
        devices_stop(devices, DEVICE_STOP_MS);
        devices_close(devices);
        return status;
    }
    *out = devices;
    return ATTN_OK;
}

bool devices_stop(struct devices *devices, int64_t wait_ms)
{
    const int64_t until_ns = clock_ns() + wait_ms * CLOCK_NS_PER_MS;
    bool all = true;
    for (int i = 0; i < devices->count; i++) {
        struct device *device = devices->device[i];
        const struct timespec until = { until_ns / CLOCK_NS_PER_S, until_ns % CLOCK_NS_PER_S };
        int error = 0;
        pthread_mutex_lock(&device->lock);
        device->stop = true;
        pthread_cond_broadcast(&device->wake);
        while (!device->stopped && error == 0) error = pthread_cond_timedwait(&device->wake, &device->lock, &until);
        const bool stopped = device->stopped;
        pthread_mutex_unlock(&device->lock);
        if (stopped && !device->joined) pthread_join(device->thread, NULL); /* it is about to return */
        device->joined = stopped;
        all &= stopped;
    }
    return all;
}

void devices_close(struct devices *devices)
{
    if (devices == NULL) return;
    for (int i = 0; i < devices->count; i++) {
        if (!devices->device[i]->joined) pthread_join(devices->device[i]->thread, NULL);
        device_free(devices->device[i]);
    }
    close_inline_slots(devices);
    free(devices);
}

/* ---- The loop's side --------------------------------------------------------------------------------------------- */

int devices_count(const struct devices *devices)
{
    return devices->count;
}
const attn_device *devices_any(const struct devices *devices)
{
    return devices->device[0]->handle;
}
const attn_device_info *devices_largest(const struct devices *devices)
{
    const attn_device_info *largest = &devices->device[0]->info;
    for (int i = 1; i < devices->count; i++)
        if (devices->device[i]->info.memory_limit > largest->memory_limit) largest = &devices->device[i]->info;
    return largest;
}
const char *device_name(const struct device *device)
{
    return device->info.name;
}

/* All devices have one backend, so memory of any of them serves all. One that was lost gives none. */
static void *map_staging(void *context, size_t bytes)
{
    const struct devices *devices = context;
    attn_error ignored;
    void *memory = NULL;
    for (int i = 0; i < devices->count && memory == NULL; i++)
        if (atomic_load(&devices->device[i]->usable))
            (void)attn_staging_alloc(devices->device[i]->handle, bytes, &memory, &ignored);
    return memory;
}

static void unmap_staging(void *context, void *memory, size_t bytes)
{
    const struct devices *devices = context;
    attn_staging_free(devices->device[0]->handle, memory, bytes);
}

bool devices_staging(struct devices *devices, struct staging_source *source)
{
    if (devices->device[0]->info.unified) return false;
    *source = (struct staging_source){ map_staging, unmap_staging, NULL, devices };
    return true;
}

bool devices_usable(const struct devices *devices)
{
    for (int i = 0; i < devices->count; i++)
        if (atomic_load(&devices->device[i]->usable)) return true;
    return false;
}

void devices_describe(struct devices *devices, struct device_state *states)
{
    for (int i = 0; i < devices->count; i++) {
        states[i].device = devices->device[i]->handle;
        attn_device_describe(devices->device[i]->handle, &states[i].info);
        states[i].usable = atomic_load(&devices->device[i]->usable);
        states[i].running_requests = atomic_load(&devices->device[i]->requests);
    }
}

/* The sums of one job's problems, over the fastest device. Scores that FlashMask hides may be skipped, so they are not
 * counted; to see which, its rows are read, which is only worth it where the answer matters. */
double devices_least_seconds(const struct devices *devices, const struct job *job)
{
    const double unimportant_s = 0.05;
    double seconds = 0;
    for (int closer = 0; closer < 2; closer++) {
        double flops = 0, scores = 0, fastest_flops = 0, fastest_scores = 0;
        for (int i = 0; i < job->call->count; i++) {
            const attn_problem *p = &job->call->items[i].problem;
            if (job->call->items[i].error.status != ATTN_OK) continue;
            const attn_dims d = attn_dims_of(p);
            const double each = 2 * (double)(d.D + d.Dv) * (p->op == ATTN_OP_BACKWARD ? 2.5 : 1);
            const double own = closer ? attn_scores(p) : attn_flops(p) / each;
            scores += own;
            flops += own * each;
        }
        for (int i = 0; i < devices->count; i++) {
            const attn_device_info *info = &devices->device[i]->info;
            if (info->fastest_flops > fastest_flops) fastest_flops = info->fastest_flops;
            if (info->fastest_scores > fastest_scores) fastest_scores = info->fastest_scores;
        }
        const double by_flops = flops / fastest_flops, by_scores = scores / fastest_scores;
        seconds = by_flops > by_scores ? by_flops : by_scores;
        if (seconds < unimportant_s) break;
    }
    return seconds;
}

/* Invariant 3. */
static int most_batches(const struct device *device)
{
    return device->slot_count > 2 ? device->slot_count : 2;
}

struct device *devices_pick(struct devices *devices)
{
    struct device *best = NULL;
    for (int i = 0; i < devices->count; i++) {
        struct device *device = devices->device[i];
        if (device->disabled || device->outstanding >= most_batches(device)) continue;
        if (best == NULL || device->flops < best->flops) best = device;
    }
    return best;
}

bool device_can_wait(const struct device *device)
{
    return device->info.unified && device->outstanding > 0;
}

void devices_submit(struct devices *devices, struct batch *batch, struct device *device)
{
    (void)devices;
    assert(batch->count > 0 && batch->device == NULL && device->outstanding < most_batches(device));
    batch->device = device;
    batch->previous = NULL;
    batch->next = device->batches;
    if (batch->next) batch->next->previous = batch;
    device->batches = batch;
    batch->message.kind = device->message_kind;
    batch->message.next = NULL;
    device->outstanding++;
    device->flops += batch->flops;
    atomic_fetch_add(&device->requests, batch->count);
    pthread_mutex_lock(&device->lock);
    *device->last = &batch->message;
    device->last = &batch->message.next;
    pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->lock);
}

void devices_collect(struct devices *devices, struct batch *batch)
{
    struct device *device = batch->device;
    (void)devices;
    assert(batch->previous ? batch->previous->next == batch
                           : device->batches == batch); /* it has not come back before */
    assert(device->outstanding > 0 && atomic_load(&device->requests) >= batch->count);
    for (int i = 0; i < batch->count; i++) assert(batch->jobs[i]->ran == (batch->jobs[i]->error.status == ATTN_OK));
    *(batch->previous ? &batch->previous->next : &device->batches) = batch->next;
    if (batch->next) batch->next->previous = batch->previous;
    device->outstanding--;
    device->flops -= batch->flops;
    if (device->outstanding == 0) device->flops = 0; /* rounding does not pile up */
    atomic_fetch_sub(&device->requests, batch->count);
}

bool device_disable(struct device *device)
{
    if (device->disabled) return false;
    device->disabled = true;
    atomic_store(&device->usable, false);
    return true;
}

struct device *devices_overdue(const struct devices *devices)
{
    const int64_t now_ns = clock_ns();
    for (int i = 0; i < devices->count; i++)
        if (!devices->device[i]->disabled && atomic_load(&devices->device[i]->due_ns) < now_ns)
            return devices->device[i];
    return NULL;
}

struct batch *device_batches(const struct device *device)
{
    return device->batches;
}
