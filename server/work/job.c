/* job.c: counts references to a job, and frees the job's memory when the last one is released. */
#include "server/work/job.h"

#include <assert.h>
#include <stdlib.h>

#include "server/base/caller.h"
#include "server/base/flow.h"
#include "server/work/transaction.h"
#include "server/regions/regions.h"

struct job *job_new(struct staging_pool *staging, struct contexts *contexts, struct caller *caller,
                    struct staging_block *inputs, proto_call *call)
{
    struct job *job = calloc(1, sizeof *job);
    if (job == NULL) return NULL;
    job->results = calloc(call->count > 0 ? (size_t)call->count : 1,
                          /* at least one element, because a body may have no problems */
                          sizeof *job->results);
    if (job->results == NULL) {
        free(job);
        return NULL;
    }
    atomic_init(&job->references, 1);
    job->part.job = job;
    job->part.device = -1;
    job->part.range.share = 1;
    job->staging = staging;
    job->contexts = contexts;
    job->caller = caller_hold(caller);
    job->inputs = inputs;
    job->call = call;
    job->inputs_used = call->memory_bytes;
    return job;
}

struct job *job_hold(struct job *job)
{
    const int references = atomic_fetch_add_explicit(&job->references, 1, memory_order_relaxed);
    assert(references > 0);
    (void)references;
    return job;
}

struct job_part *job_part_for(struct job *job, int device)
{
    for (struct job_part *part = &job->part; part; part = part->next)
        if (!part->left && (part->device < 0 || part->device == device)) return part;
    return NULL;
}

struct job_part *job_part_leaves(struct job_part *part, struct batch *batch)
{
    assert(part != NULL && !part->left && part->batch == NULL);
    (void)job_hold(part->job);
    part->batch = batch;
    part->left = true;
    part->job->parts_out++;
    return part;
}

bool job_cut(struct job *job, enum job_way way, int count, const struct job_range *ranges)
{
    assert(count >= 2 && !job_is_cut(job) && !job->part.left && job->part.device < 0);
    job->more_parts = calloc((size_t)count - 1, sizeof *job->more_parts);
    if (job->more_parts == NULL) return false;
    struct job_part *part = &job->part;
    for (int n = 0; n < count; n++) {
        part->job = job;
        part->device = -1;
        part->way = way;
        part->number = n;
        part->range = ranges[n];
        part->next = n + 1 < count ? &job->more_parts[n] : NULL;
        part = part->next;
    }
    return true;
}

void job_join(struct job *job)
{
    assert(job->parts_out == 0 && job->part.sums == NULL);
    free(job->more_parts);
    job->more_parts = NULL;
    job->part = (struct job_part){ .job = job, .device = -1, .range.share = 1 };
    job->longest_ns = 0;
}

int job_parts(const struct job *job)
{
    int count = 0;
    for (const struct job_part *part = &job->part; part; part = part->next) count++;
    return count;
}

bool job_lost_devices(const struct job *job)
{
    bool lost = false;
    for (const struct job_part *part = &job->part; part; part = part->next) {
        lost |= part->error.status == ATTN_DEVICE_LOST;
        if (!part->ran && part->error.status != ATTN_DEVICE_LOST && part->error.status != ATTN_CANCELLED) return false;
    }
    return lost && job_is_cut(job);
}

bool job_needs_device(const struct job *job, int device)
{
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (!part->left && part->device == device) return true;
    return false;
}

bool job_ran(const struct job *job)
{
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (!part->ran) return false;
    return true;
}

const attn_error *job_error(const struct job *job)
{
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (part->error.status != ATTN_OK && part->error.status != ATTN_CANCELLED) return &part->error;
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (part->error.status != ATTN_OK) return &part->error;
    return &job->part.error;
}

void job_release_memory(struct job *job)
{
    assert(atomic_load(&job->references) <= 1);
    staging_release(job->staging, job->inputs);
    staging_release(job->staging, job->spare);
    staging_release(job->staging, job->tables);
    job->inputs = job->spare = job->tables = NULL;
}

void job_release(struct job *job)
{
    if (job == NULL || atomic_fetch_sub_explicit(&job->references, 1, memory_order_acq_rel) != 1) return;
    assert(!job->holds_contexts && job->context_count == 0 && job->part.sums == NULL);
    assert(job->parts_out == 0 && job->finishing == NULL && job->in_queue.next == NULL &&
           job->in_queue.previous == NULL);
    for (int i = 0; job->saved && i < job->call->count; i++) job_release(job->saved[i]);
    transaction_free(job);
    region_uses_free(job->shared);
    job_release_memory(job);
    flow_release(job->flow);
    caller_release(job->caller);
    free(job->more_parts);
    free(job->saved);
    free(job->plans);
    free(job->lse);
    free(job->truths);
    for (int i = 0; i < job->call->count; i++) free(job->results[i].report);
    free(job->results);
    proto_call_free(job->call);
    free(job);
}
