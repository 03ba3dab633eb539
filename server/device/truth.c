/* truth.c: computes the truth of a job's problems, which is their exact results, in float64. For `verify`, the device
 * compares its outputs with their truth. A check of a client's results runs no kernels: its output is the truth.
 *
 * A job with `verify` or a check is alone in its batch. Computing the truth begins when all kernels of the job are done
 * and its outputs are on their way to the host:
 *
 *   kernels | outputs to the host | truth of item 0 in steps | compare | truth of item 1 ... | distances to the host
 *   check:                          truth of item 0 in steps           | truth of item 1 ... | truths to the host
 *
 * Each call of truth_launch() puts some 25 ms of work on the stream, as launch_group() does with kernels. Between two
 * calls, other flows (clients) have their turn, and a job that nobody waits for ends.
 *
 * With `verify`, all items use the same memory for their truth, one after the other. The distances of the outputs from
 * their truth are in the memory of the outputs. In a check, the truth itself is in the memory of the outputs.
 *
 * Each part of a cut job is compared on its own device. A part keeps its own distances, and the job's distances are the
 * largest of its parts (cut_join_truths()). A check is not cut. */
#include "server/device/internal.h"

#include <assert.h>

#include "server/base/clock.h"

static struct job *job_of(const struct slot *slot)
{
    return batch_job(slot->batch, 0);
}

/* Returns the part of a cut job that runs in the slot (on its stream), or NULL if a whole job runs there. */
static struct job_part *cut_part_of(const struct slot *slot)
{
    struct job_part *const part = slot->batch->parts[0];
    return job_part_is_cut(part) ? part : NULL;
}

static bool is_wanted(const struct job *job, int item)
{
    return job->truths[item].wanted && job->call->items[item].error.status == ATTN_OK;
}

/* Finds the first item (problem), from number `item` on, whose exact outputs (in float64) are wanted. It becomes the
 * slot's current item. */
static void go_to(struct slot *slot, int item)
{
    const struct job *const job = job_of(slot);
    while (item < job->call->count && !is_wanted(job, item)) item++;
    slot->truth_item = item;
    slot->truth_step = 0;
}

/* Returns the problem of an item with the device's addresses. If the job is cut over devices, returns the problem of
 * the part that runs in this slot. */
static attn_problem problem_of(const struct slot *slot, int item)
{
    if (cut_part_of(slot)) return slot->problems[0];
    attn_problem p = job_of(slot)->call->items[item].problem;
    memory_place(slot, &p);
    memory_place_pinned(job_of(slot), &p);
    return p;
}

/* Returns the device addresses for the truth (exact outputs in float64) of an item (problem). */
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

/* Determines how much memory is needed to compute the truth (exact outputs in float64) of an item. If the job is cut,
 * this is for the part that runs in this slot. *out_bytes becomes the size of the truth, and *workspace_bytes the size
 * of the scratch memory. */
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
    /* enough for a part of a cut problem too, because its exact results are not larger than the whole problem's */
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
        /* the device cannot verify this output, so the CPU does it in sched/finish.c */
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

/* Puts on the stream the work that follows the last item's truth (exact outputs). For `verify`, the differences between
 * outputs and truth are copied to the host. For a check, the truth itself is copied. */
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
