/* merge.c: equal small problems of a batch leave as one problem.
 *
 * A GPU computes a small problem in some 5 us, but a copy in, a launch and a copy out cost its thread 20. So problems of a batch
 * that differ in nothing but where their numbers lie become one, whose B is the sum of theirs:
 *
 *     staging memory          device memory                          staging memory
 *       job 0: q k v            q q q | k k k | v v v                  job 0: out
 *       job 1: q k v   moves    one problem: out out out     moves     job 1: out
 *       job 2: q k v   ---->                                 ---->     job 2: out
 *
 * The moves (attn_moves()) are a kernel's, which reads and writes staging memory, so this is for devices that can; three
 * launches serve all. Each answer is what it would be alone, to the bit, for no kernel's arithmetic depends on B; which kernel it
 * is does not either, and where it did nothing is merged. */
#include "server/device/internal.h"

#include <stdlib.h>
#include <string.h>

/* Tensors whose first axis is B and whose meaning does not depend on it. Dropout's does. */
#define T(name) ((uint64_t)1 << ATTN_T_##name)
static const uint64_t MERGEABLE = T(q) | T(k) | T(v) | T(out) | T(lse) | T(dout) | T(dlse) | T(dq) | T(dk) | T(dv);
#undef T

static int64_t bytes_of(const attn_tensor *t)
{
    int64_t bytes = 0;
    (void)attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes); /* it was checked */
    return bytes;
}

static bool lies_in(const attn_tensor *t, const char *memory, size_t bytes)
{
    const char *const data = t->data;
    return memory && data >= memory && data < memory + bytes;
}

/* One after the other they are as aligned as alone. */
static bool tensor_fits(const struct job *job, const attn_tensor *t)
{
    const attn_tensor whole = attn_tensor_make(t->data, t->dtype, t->rank, t->shape);
    if (memcmp(whole.stride, t->stride, (size_t)t->rank * sizeof t->stride[0]) != 0) return false;
    if (bytes_of(t) % MERGE_ALIGN != 0 || (uintptr_t)t->data % MERGE_ALIGN != 0) return false;
    return (job->inputs && lies_in(t, job->inputs->memory, job->inputs_used)) ||
           lies_in(t, job->outputs.memory, job->outputs.bytes);
}

static bool fits(const struct job *job)
{
    if (job->kind == 0 || job->call->count != 1 || job->step || job->saved || job_problem(job, 0) == NULL) return false;
    const attn_problem *p = job_problem(job, 0);
    if (job->inputs_used + job->outputs.bytes > MERGE_BYTES || p->dropout_p != 0 || p->q.dtype == ATTN_F8E4M3)
        return false;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (p->tensor[id].rank > 0 && (!(MERGEABLE >> id & 1) || !tensor_fits(job, &p->tensor[id]))) return false;
    return true;
}

static bool equal(const attn_problem *a, const attn_problem *b)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *x = &a->tensor[id], *y = &b->tensor[id];
        if (x->rank != y->rank) return false;
        if (x->rank == 0) continue;
        if (x->dtype != y->dtype || memcmp(x->shape, y->shape, (size_t)x->rank * sizeof x->shape[0]) != 0) return false;
    }
#define X(name, id, least, most, rule, meaning) \
    if (a->name != b->name) return false;
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    return a->op == b->op && a->layout == b->layout && a->alignment == b->alignment && a->has_scale == b->has_scale &&
           (!a->has_scale || a->scale == b->scale) && a->causal == b->causal && a->window_left == b->window_left &&
           a->window_right == b->window_right && a->deterministic == b->deterministic;
}

static attn_problem widened(const attn_problem *p, int members)
{
    attn_problem wide = *p;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (wide.tensor[id].rank > 0) wide.tensor[id].shape[0] *= members;
    return wide;
}

/* Does the same kernel take all of them? Their addresses are not looked at but for how they are aligned. */
static bool same_kernel(const struct device *device, const attn_problem *p, int members)
{
    const attn_problem wide = widened(p, members); /* MERGE_BYTES and CONFIG_MAX_BATCH keep its sizes small */
    attn_plan alone, together;
    attn_error ignored;
    return attn_plan_make(device->handle, p, &alone, &ignored) == ATTN_OK &&
           attn_plan_make(device->handle, &wide, &together, &ignored) == ATTN_OK && alone.kernel == together.kernel;
}

void merge_find(const struct device *device, struct slot *slot)
{
    const struct batch *batch = slot->batch;
    for (int j = 0; j < batch->count; j++) slot->leader[j] = (int16_t)j, slot->members[j] = 1, slot->place[j] = 0;
    if (device->info.unified || !device->info.reads_staging) return;
    for (int j = 0; j < batch->count; j++) slot->members[j] = fits(batch->jobs[j]);
    for (int j = 0; j < batch->count; j++) {
        if (slot->leader[j] != j || !slot->members[j]) continue;
        const attn_problem *p = job_problem(batch->jobs[j], 0);
        int members = 1;
        for (int k = j + 1; k < batch->count; k++)
            if (slot->leader[k] == k && slot->members[k] && equal(p, job_problem(batch->jobs[k], 0)))
                slot->leader[k] = (int16_t)j, slot->place[k] = (int16_t)members++;
        if (members > 1 && !same_kernel(device, p, members)) {
            for (int k = j + 1; k < batch->count; k++)
                if (slot->leader[k] == j) slot->leader[k] = (int16_t)k, slot->members[k] = 0, slot->place[k] = 0;
            members = 1;
        }
        slot->members[j] = (int16_t)members;
    }
    for (int j = 0; j < batch->count; j++)
        if (slot->leader[j] == j && slot->members[j] == 0) slot->members[j] = 1;
}

/* Room for `more` moves behind `count`. */
static attn_status reserve_moves(struct slot *slot, int64_t count, int64_t more, attn_error *err)
{
    if (count + more <= slot->move_room) return ATTN_OK;
    const int64_t room = 2 * (count + more);
    attn_move *wider = realloc(slot->moves, (size_t)room * sizeof *wider);
    if (wider == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory for %lld moves", (long long)room);
    slot->moves = wider;
    slot->move_room = room;
    return ATTN_OK;
}

static size_t aligned(size_t bytes)
{
    return (bytes + MERGE_LINE - 1) / MERGE_LINE * MERGE_LINE;
}

attn_status merge_take(struct device *device, struct slot *slot, int leader, attn_problem *wide, attn_error *err)
{
    const int members = slot->members[leader];
    size_t bytes = 0;
    void *memory;
    *wide = widened(job_problem(slot->batch->jobs[leader], 0), members);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (wide->tensor[id].rank > 0) bytes += aligned((size_t)bytes_of(&wide->tensor[id]));
    const attn_status status = device_take_memory(device, slot, bytes, &memory, err);
    if (status != ATTN_OK) return status;
    char *at = memory;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (wide->tensor[id].rank == 0) continue;
        wide->tensor[id].data = at;
        at += aligned((size_t)bytes_of(&wide->tensor[id]));
    }
    return ATTN_OK;
}

attn_status merge_move(struct slot *slot, bool out, attn_error *err)
{
    const struct batch *batch = slot->batch;
    int64_t count = 0;
    for (int j = 0; j < batch->count; j++) {
        if (slot->members[slot->leader[j]] < 2) continue;
        const struct job *job = batch->jobs[j];
        const attn_problem *p = job_problem(job, 0), *wide = &slot->problems[slot->problem[j]];
        const attn_status status = reserve_moves(slot, count, ATTN_TENSOR_COUNT, err);
        if (status != ATTN_OK) return status;
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            const attn_tensor *t = &p->tensor[id];
            if (t->rank == 0 || lies_in(t, job->outputs.memory, job->outputs.bytes) != out) continue;
            const size_t bytes = (size_t)bytes_of(t);
            char *const there = (char *)wide->tensor[id].data + bytes * (size_t)slot->place[j];
            slot->moves[count++] = (attn_move){ out ? t->data : there, out ? there : t->data, bytes };
        }
    }
    return count == 0 ? ATTN_OK : attn_moves(slot->stream, slot->moves, count, err);
}
