/* truth.c: compares the outputs of a job with their truth in float64, on the device that made them (`verify`).
 *
 * A job with such items is alone in its batch. Computing the truth begins when all kernels of the job are done and its
 * outputs are on their way to the host:
 *
 *   kernels | outputs to the host | truth of item 0 in steps | compare | truth of item 1 ... | distances to the host
 *
 * Each call of truth_launch() puts some 25 ms of work on the stream, as launch_group() does with kernels. Between two
 * calls, other flows (clients) have their turn, and a job that nobody waits for ends.
 *
 * All items use the same memory for their truth, one after the other. Their distances lie among the outputs.
 *
 * Each part of a cut job is compared on its own device. The distances of a part are copied to the part, and those of
 * the job are the largest of its parts (cut_join_truths()). */
#include "server/device/internal.h"

#include <assert.h>

#include "server/base/clock.h"

static struct job *job_of(const struct slot *slot)
{
    return batch_job(slot->batch, 0);
}

/* Returns the part of a cut job that runs in the slot, or NULL if the whole job runs there. */
static struct job_part *cut_part_of(const struct slot *slot)
{
    struct job_part *const part = slot->batch->parts[0];
    return job_part_is_cut(part) ? part : NULL;
}

static bool is_wanted(const struct job *job, int item)
{
    return job->truths[item].wanted && job_problem(job, item) != NULL;
}

/* Goes on to the next item whose truth is wanted, beginning with number `item`. */
static void go_to(struct slot *slot, int item)
{
    const struct job *const job = job_of(slot);
    while (item < job->call->count && !is_wanted(job, item)) item++;
    slot->truth_item = item;
    slot->truth_step = 0;
}

/* Returns the item's problem with the device's addresses. gather() has put all problems of the job into
 * slot->problems. */
static const attn_problem *problem_of(const struct slot *slot, int item)
{
    int n = slot->problem[0];
    for (int i = 0; i < item; i++) n += job_problem(job_of(slot), i) != NULL;
    return &slot->problems[n];
}

/* Finds the memory for the truth of an item, or of the item's part that runs in the slot. The index tensors that are
 * read for this are in host memory. */
static attn_status need_of(const struct device *device, const struct slot *slot, int item, size_t *out_bytes,
                           size_t *workspace_bytes, attn_error *err)
{
    const struct job *const job = job_of(slot);
    const struct job_part *const part = cut_part_of(slot);
    attn_truth_cost cost;
    const attn_problem p = part ? parts_of(job_problem(job, item), part->way, &part->range) : *job_problem(job, item);
    const attn_status status = attn_truth_need(attn_device_capabilities(device->handle), &p, &cost, err);
    if (status != ATTN_OK) return status;
    if (cost.workspace_bytes > *workspace_bytes) *workspace_bytes = cost.workspace_bytes;
    /* a part's truth is not larger than that of the whole item */
    if (job->truths[item].out_bytes > *out_bytes) *out_bytes = job->truths[item].out_bytes;
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
        if (status == ATTN_UNSUPPORTED) return ATTN_OK; /* the CPU verifies instead, in sched/finish.c */
        if (status != ATTN_OK) return status;
    }
    attn_status status = memory_grow_workspace(device->handle, workspace_bytes, &slot->workspace,
                                               &slot->workspace_bytes, err);
    if (status == ATTN_OK) status = memory_take(device, slot, out_bytes, &slot->truth_out, err);
    if (status == ATTN_OK && cut_part_of(slot)) status = take_distances(device, slot, err);
    if (status != ATTN_OK) return status;
    for (int i = 0; i < job->call->count; i++) slot->truths_left += is_wanted(job, i);
    go_to(slot, 0);
    return ATTN_OK;
}

double truth_piece_seconds(const struct slot *slot)
{
    const double seconds = job_of(slot)->truths[slot->truth_item].seconds;
    return seconds < DEVICE_PIECE_SECONDS ? seconds : DEVICE_PIECE_SECONDS;
}

/* Puts the work on the stream that follows the last item's truth: the distances go to the host. */
static attn_status close_truths(struct slot *slot, attn_error *err)
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
    return attn_copy(slot->stream, job->truth_found, memory_address(slot, job->truth_found),
                     (size_t)job->call->count * sizeof *job->truth_found, ATTN_FROM_DEVICE, err);
}

attn_status truth_launch(struct slot *slot, attn_error *err)
{
    struct job *const job = job_of(slot);
    const attn_problem *const p = problem_of(slot, slot->truth_item);
    const attn_truth to = { .out = slot->truth_out };
    attn_status status = ATTN_OK;
    slot->queued_s = truth_piece_seconds(slot);
    if (!slot->truth_began) status = attn_stream_mark(slot->stream, 0, err);
    slot->truth_began = true;
    if (status == ATTN_OK) status = attn_truth_some(slot->stream, p, &to, slot->workspace, &slot->truth_step, err);
    slot->piece_ns = clock_ns();
    if (status != ATTN_OK || slot->truth_step != ATTN_NO_MORE_STEPS) return status;
    attn_truth_distance *const distances = cut_part_of(slot) ? slot->truth_distances
                                                             : memory_address(slot, job->truth_found[slot->truth_item]);
    status = attn_truth_compare(slot->stream, p, &to, distances, err);
    if (status != ATTN_OK) return status;
    go_to(slot, slot->truth_item + 1);
    return --slot->truths_left == 0 ? close_truths(slot, err) : ATTN_OK;
}
