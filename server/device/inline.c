/* inline.c: inline slots, the HTTP threads' side of the devices.
 *
 * They are for small problems of the CPU: as many as HTTP threads, each a device of one thread with a stream and a
 * workspace. Whoever wants one takes that of its core's number, so that the workspace is likely in that core's
 * cache, or the next that is free.
 *
 *   HTTP thread: body complete --> inline slot free? --> run --> answer            (else: posted to the loop)
 *
 * Invariant: device and stream of an inline slot are used by the thread that set its `taken`. */
#include "server/device/internal.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/clock.h"
#include "server/base/metrics.h"

attn_status inline_open(struct devices *devices, const struct config *config, attn_error *err)
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

void inline_close(struct devices *devices)
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
        device_drop_workspace(inline_slot->handle, &inline_slot->workspace, &inline_slot->workspace_bytes);
    atomic_flag_clear_explicit(&inline_slot->taken, memory_order_release);
}

static bool fits_inline(const struct job *job)
{
    if (job->kind == 0 || job->step || job->wants_verify || job->wants_measure || job->wants_save || job->saved)
        return false;
    const attn_dims d = attn_dims_of(&job->call->items[0].problem);
    return d.H <= INLINE_HEADS && d.B <= INLINE_HEADS && d.B * d.H <= INLINE_HEADS &&
           batch_padded_flops(job) <= INLINE_FLOPS;
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
        device_grow_workspace(inline_slot->handle, bytes, &inline_slot->workspace, &inline_slot->workspace_bytes,
                              &err) != ATTN_OK) {
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
        batch_name_backend(&job->results[0], device, plan.kernel->name);
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
