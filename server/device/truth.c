/* truth.c: computes exact results in float64 on the device, for jobs with `verify` and for checks of a client's
 * results. Jobs of both kinds are alone in their batch. With `verify`, the exact results are computed after the job's
 * kernels, and the device compares its outputs with them. For a check, the exact results are the output, and no other
 * kernels run. Each call of truth_launch() enqueues about 25 ms of work, so that batches of other clients can run in
 * between. If a job is cut into parts for several devices, each device compares its own part. */
#include "server/device/internal.h"

#include <assert.h>

#include "server/base/clock.h"

static struct job *job_of(const struct slot *slot)
{
    return batch_job(slot->batch, 0);
}

/* Returns the part of a cut job that runs in the slot, or NULL for a whole job. */
static struct job_part *cut_part_of(const struct slot *slot)
{
    struct job_part *const part = slot->batch->parts[0];
    return job_part_is_cut(part) ? part : NULL;
}

static bool is_wanted(const struct job *job, int item)
{
    return job->truths[item].wanted && job->call->items[item].error.status == ATTN_OK;
}

/* Sets slot->truth_item to the first item (problem), from number `item` on, whose exact outputs are wanted. */
static void go_to(struct slot *slot, int item)
{
    const struct job *const job = job_of(slot);
    while (item < job->call->count && !is_wanted(job, item)) item++;
    slot->truth_item = item;
    slot->truth_step = 0;
}

/* Returns the problem of an item with the addresses of its tensors on the device. For a cut job, returns the problem of
 * the part in this slot. */
static attn_problem problem_of(const struct slot *slot, int item)
{
    if (cut_part_of(slot)) return slot->problems[0];
    attn_problem p = job_of(slot)->call->items[item].problem;
    memory_place(slot, &p);
    memory_place_pinned(job_of(slot), &p);
    return p;
}

static attn_truth place_of(const struct slot *slot, int item)
{
    const attn_truth *const host = &job_of(slot)->truths[item].to;
    if (!job_of(slot)->wants_judge) return (attn_truth){ .out = slot->truth_out };
    return (attn_truth){ .out = memory_address(slot, host->out),
                         .lse = memory_address(slot, host->lse),
                         .dq = memory_address(slot, host->dq),
                         .dk = memory_address(slot, host->dk),
                         .dv = memory_address(slot, host->dv) };
}

/* Computes how much memory the exact outputs of an item need: *out_bytes for the outputs, *workspace_bytes for scratch
 * memory. For a cut job, these are the exact outputs of the part in this slot. */
static attn_status need_of(const struct device *device, const struct slot *slot, int item, size_t *out_bytes,
                           size_t *workspace_bytes, attn_error *err)
{
    const struct job *const job = job_of(slot);
    const struct job_part *const part = cut_part_of(slot);
    const attn_problem *const whole = &job->call->items[item].problem;
    const attn_problem p = part ? parts_of(whole, part->way, &part->range) : *whole;
    attn_truth_cost cost;
    const attn_status status = attn_truth_need(attn_device_capabilities(device->handle), &p, &cost, err);
    if (status != ATTN_OK) return status;
    if (cost.workspace_bytes > *workspace_bytes) *workspace_bytes = cost.workspace_bytes;
    /* the memory that the whole problem needs is enough for a part of it */
    if (job->truths[item].bytes > *out_bytes && !job->wants_judge) *out_bytes = job->truths[item].bytes;
    return ATTN_OK;
}

static attn_status take_distances(struct device *device, struct slot *slot, attn_error *err)
{
    void *memory = NULL;
    const attn_status status = memory_take(device, slot, sizeof slot->batch->parts[0]->truth_found, &memory, err);
    slot->truth_distances = memory;
    return status;
}

attn_status truth_reserve(struct device *device, struct slot *slot, attn_error *err)
{
    struct job *const job = job_of(slot);
    size_t out_bytes = 0, workspace_bytes = 0;
    slot->truths_left = 0;
    if (job->truths == NULL) return ATTN_OK;
    assert(slot->batch->count == 1 && !device->info.unified);
    for (int i = 0; i < job->call->count; i++) {
        if (!is_wanted(job, i)) continue;
        const attn_status status = need_of(device, slot, i, &out_bytes, &workspace_bytes, err);
        /* the device cannot verify this output; the CPU verifies it later (sched/finish.c) */
        if (status == ATTN_UNSUPPORTED) return ATTN_OK;
        if (status != ATTN_OK) return status;
    }
    attn_status status = memory_grow_workspace(device->handle, workspace_bytes, &slot->workspace,
                                               &slot->workspace_bytes, err);
    if (status == ATTN_OK && out_bytes > 0) status = memory_take(device, slot, out_bytes, &slot->truth_out, err);
    if (status == ATTN_OK && cut_part_of(slot)) status = take_distances(device, slot, err);
    if (status != ATTN_OK) return status;
    for (int i = 0; i < job->call->count; i++) {
        if (!is_wanted(job, i)) continue;
        slot->truths_left++;
        if (job->wants_judge) batch_name_backend(&job->results[i], device, "float64");
    }
    go_to(slot, 0);
    return ATTN_OK;
}

double truth_piece_seconds(const struct slot *slot)
{
    const double seconds = job_of(slot)->truths[slot->truth_item].seconds;
    return seconds < DEVICE_PIECE_SECONDS ? seconds : DEVICE_PIECE_SECONDS;
}

/* Enqueues a copy to the host, when the computation of all exact outputs is enqueued. For the option `verify` it copies
 * the differences from the exact outputs. For a check of a client's results it copies the exact outputs themselves. */
static attn_status close_truths(struct device *device, struct slot *slot, attn_error *err)
{
    struct job *const job = job_of(slot);
    struct job_part *const part = cut_part_of(slot);
    const attn_status status = attn_stream_mark(slot->stream, 1, err);
    if (part) part->truth_known = true;
    else job->truth_known = true;
    if (status != ATTN_OK) return status;
    if (part)
        return attn_copy(slot->stream, part->truth_found, slot->truth_distances, sizeof part->truth_found,
                         ATTN_FROM_DEVICE, err);
    if (job->wants_judge) return memory_copy_out(device, slot, job, err);
    return attn_copy(slot->stream, job->truth_found, memory_address(slot, job->truth_found),
                     (size_t)job->call->count * sizeof *job->truth_found, ATTN_FROM_DEVICE, err);
}

attn_status truth_launch(struct device *device, struct slot *slot, attn_error *err)
{
    struct job *const job = job_of(slot);
    const attn_problem p = problem_of(slot, slot->truth_item);
    const attn_truth to = place_of(slot, slot->truth_item);
    attn_status status = ATTN_OK;
    slot->queued_s = truth_piece_seconds(slot);
    if (!slot->truth_began) status = attn_stream_mark(slot->stream, 0, err);
    slot->truth_began = true;
    if (status == ATTN_OK) status = attn_truth_some(slot->stream, &p, &to, slot->workspace, &slot->truth_step, err);
    slot->piece_ns = clock_ns();
    if (status != ATTN_OK || slot->truth_step != ATTN_NO_MORE_STEPS) return status;
    if (!job->wants_judge) {
        attn_truth_distance *const distances = cut_part_of(slot)
                                                   ? slot->truth_distances
                                                   : memory_address(slot, job->truth_found[slot->truth_item]);
        status = attn_truth_compare(slot->stream, &p, &to, distances, err);
    }
    if (status != ATTN_OK) return status;
    go_to(slot, slot->truth_item + 1);
    return --slot->truths_left == 0 ? close_truths(device, slot, err) : ATTN_OK;
}
