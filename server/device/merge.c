/* merge.c: merges equal small problems of a batch into one, and runs small cache transactions without copies.
 *
 * A GPU computes a small problem in some 5 us, but a copy in, a launch and a copy out cost the GPU's thread 20 us. So
 * problems of a batch that differ only in their data become one problem, whose batch size B is the sum of the problems'
 * batch sizes:
 *
 *     staging memory          device memory                          staging memory
 *       job 0: q k v            q q q | k k k | v v v                  job 0: out
 *       job 1: q k v   moves    one problem: out out out     moves     job 1: out
 *       job 2: q k v   ---->                                 ---->     job 2: out
 *
 * A kernel makes the moves (attn_moves()), on devices that can read and write staging memory: three launches serve all
 * jobs. Each answer is equal to the bit to the answer of a job that runs alone, because no kernel's arithmetic depends
 * on B. Only in a backward without `deterministic` may the last bits differ, as they may between any two runs. If the
 * larger B would lead to another kernel, the problems are not merged.
 *
 * The keys and values of a decode transaction are in the pages of the pool, which all transactions of a device share.
 * Keys and values are therefore not merged, but queries and tables are. The moves also copy new keys and values to
 * their pages. */
#include "server/device/internal.h"

#include <stdlib.h>
#include <string.h>

#include "server/work/transaction.h"

/* Tensors that can be merged along their first axis, the batch. Problems with dropout are not merged, because the
 * elements that dropout drops depend on the index of the batch row. */
#define T(name) ((uint64_t)1 << ATTN_T_##name)
static const uint64_t MERGEABLE = T(q) | T(k) | T(v) | T(out) | T(lse) | T(dout) | T(dlse) | T(dq) | T(dk) | T(dv);
/* For merged cache transactions: the tensors in TABLES are concatenated, and those in POOL stay in the pages of the
 * caches. */
static const uint64_t TABLES = T(page_table) | T(seqlens_k) | T(k_scale) | T(v_scale), POOL = T(k) | T(v);
#undef T

static bool is_of(uint64_t tensors, int id)
{
    return tensors >> id & 1;
}

static int64_t bytes_of(const attn_tensor *t)
{
    int64_t bytes = 0;
    /* cannot fail, because attn_check() has checked the shape */
    (void)attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes);
    return bytes;
}

static bool lies_in(const attn_tensor *t, const char *memory, size_t bytes)
{
    const char *const data = t->data;
    return memory && data >= memory && data < memory + bytes;
}

/* True if a tensor can be merged: it is contiguous, lies in the job's own memory, and has a size that keeps the next
 * tensor in the merged memory aligned. */
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
    if (job->kind == 0 || job->call->count != 1 || job->saved || job->shared || job_problem(job, 0) == NULL)
        return false;
    const attn_problem *p = job_problem(job, 0);
    if (job->inputs_used + job->tables_used + job->outputs.bytes > MERGE_BYTES) return false;
    if (p->dropout_p != 0 || p->q.dtype == ATTN_F8E4M3 || p->prefix_keys) return false;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (p->tensor[id].rank == 0 || (job->transaction && is_of(TABLES | POOL, id))) continue;
        if (!is_of(MERGEABLE, id) || !tensor_fits(job, &p->tensor[id])) return false;
    }
    return true;
}

/* True if the tensors `a` and `b` allow their two problems to be merged. `paged` is true if the problems belong to
 * cache transactions. */
static bool same_tensor(const attn_tensor *a, const attn_tensor *b, int id, bool paged)
{
    if (a->rank != b->rank) return false;
    if (a->rank == 0) return true;
    /* page tables may differ in the length of their rows: the merged table has rows as long as the longest */
    const size_t axes = paged && id == ATTN_T_page_table ? 1 : (size_t)a->rank;
    if (paged && is_of(POOL, id) &&
        (a->data != b->data || memcmp(a->stride, b->stride, (size_t)a->rank * sizeof a->stride[0]) != 0))
        return false;
    return a->dtype == b->dtype && memcmp(a->shape, b->shape, axes * sizeof a->shape[0]) == 0;
}

static bool equal(const struct job *one, const struct job *other)
{
    const attn_problem *const a = job_problem(one, 0), *const b = job_problem(other, 0);
    if ((one->transaction != NULL) != (other->transaction != NULL)) return false;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (!same_tensor(&a->tensor[id], &b->tensor[id], id, one->transaction != NULL)) return false;
#define X(name, id, least, most, rule, meaning) \
    if (a->name != b->name) return false;
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    return a->op == b->op && a->layout == b->layout && a->alignment == b->alignment && a->has_scale == b->has_scale &&
           (!a->has_scale || a->scale == b->scale) && a->causal == b->causal && a->window_left == b->window_left &&
           a->window_right == b->window_right && a->deterministic == b->deterministic;
}

/* Returns the merged problem of the job `leader` and of the jobs that join it. Its tensors have no addresses yet,
 * except those in the pool of cache pages. */
static attn_problem widened(const struct slot *slot, int leader)
{
    const struct batch *const batch = slot->batch;
    const bool paged = batch_job(batch, leader)->transaction != NULL;
    attn_problem wide = *job_problem(batch_job(batch, leader), 0);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (wide.tensor[id].rank > 0 && !(paged && is_of(POOL, id))) wide.tensor[id].shape[0] *= slot->members[leader];
    for (int j = leader; j < batch->count && paged; j++) {
        const int64_t pages = job_problem(batch_job(batch, j), 0)
                                  ? job_problem(batch_job(batch, j), 0)->page_table.shape[1]
                                  : 0;
        if (slot->leader[j] == leader && pages > wide.page_table.shape[1]) wide.page_table.shape[1] = pages;
    }
    if (paged) wide.page_table.stride[0] = wide.page_table.shape[1];
    return wide;
}

/* True if the merged problem would run on the same kernel as its separate problems. For this choice only the alignment
 * of addresses counts, so the merged tensors need no memory yet. */
static bool same_kernel(const struct device *device, const struct slot *slot, int leader)
{
    /* no overflow, because MERGE_BYTES and CONFIG_MAX_BATCH bound the sizes */
    const attn_problem wide = widened(slot, leader);
    const struct job *const job = batch_job(slot->batch, leader);
    const attn_capabilities *const can = attn_device_capabilities(device->handle);
    attn_plan alone, together;
    attn_error ignored;
    return batch_plan(can, job, 0, job_problem(job, 0), &alone, &ignored) == ATTN_OK &&
           attn_plan_make(can, &wide, &together, &ignored) == ATTN_OK && alone.kernel == together.kernel;
}

/* Undoes a merge: each job then runs as a problem of its own. */
static void part(struct slot *slot, int leader)
{
    for (int j = leader; j < slot->batch->count; j++) {
        if (slot->leader[j] != leader) continue;
        slot->leader[j] = (int16_t)j;
        slot->members[j] = 1;
        slot->place[j] = 0;
        slot->moved[j] = false;
    }
}

void merge_find(const struct device *device, struct slot *slot)
{
    const struct batch *batch = slot->batch;
    const bool able = !device->info.unified && device->info.reads_staging;
    for (int j = 0; j < batch->count; j++) {
        slot->leader[j] = (int16_t)j;
        slot->members[j] = 1;
        slot->place[j] = 0;
        slot->moved[j] = able && !job_part_is_cut(batch->parts[j]) && fits(batch_job(batch, j));
    }
    for (int j = 0; j < batch->count; j++) {
        if (slot->leader[j] != j || !slot->moved[j]) continue;
        for (int k = j + 1; k < batch->count; k++)
            if (slot->leader[k] == k && slot->moved[k] && equal(batch_job(batch, j), batch_job(batch, k)))
                slot->leader[k] = (int16_t)j, slot->place[k] = slot->members[j]++;
        if (slot->members[j] == 1) slot->moved[j] = batch_job(batch, j)->transaction != NULL;
        else if (!same_kernel(device, slot, j)) part(slot, j);
    }
}

static size_t aligned(size_t bytes)
{
    return (bytes + MERGE_LINE - 1) / MERGE_LINE * MERGE_LINE;
}

attn_status merge_take(struct device *device, struct slot *slot, int leader, attn_problem *wide, attn_error *err)
{
    /* in a cache transaction k and v stay in the pages of the caches */
    const uint64_t there = batch_job(slot->batch, leader)->transaction ? POOL : 0;
    size_t bytes = 0;
    void *memory;
    *wide = widened(slot, leader);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (wide->tensor[id].rank > 0 && !is_of(there, id)) bytes += aligned((size_t)bytes_of(&wide->tensor[id]));
    const attn_status status = memory_take(device, slot, bytes, &memory, err);
    if (status != ATTN_OK) return status;
    char *at = memory;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (wide->tensor[id].rank == 0 || is_of(there, id)) continue;
        wide->tensor[id].data = at;
        at += aligned((size_t)bytes_of(&wide->tensor[id]));
    }
    return ATTN_OK;
}

/* Appends to slot->moves the copies of one tensor between a job and the merged problem: to the job if `out` is true,
 * and otherwise from it. If the rows of the merged tensor are farther apart than those of the job's tensor, each row
 * needs a copy of its own. */
static void add_moves(struct slot *slot, int64_t *count, const attn_tensor *t, const attn_tensor *whole, int place,
                      bool out)
{
    const int64_t rows = t->shape[0], row_bytes = whole->stride[0] * (int64_t)attn_dtype_bytes(t->dtype);
    const bool together = t->stride[0] == whole->stride[0];
    const size_t bytes = (size_t)bytes_of(t) / (together ? 1 : (size_t)rows);
    for (int64_t row = 0; row < (together ? 1 : rows); row++) {
        char *const there = (char *)whole->data + (place * rows + row) * row_bytes;
        char *const here = (char *)t->data + (size_t)row * bytes;
        slot->moves[(*count)++] = (attn_move){ out ? here : there, out ? there : here, bytes };
    }
}

/* Appends the copies that job `j` needs to slot->moves: copies of its outputs if `out` is true, and otherwise of its
 * inputs. *count is the number of entries of slot->moves. */
static attn_status add_job(struct slot *slot, int j, bool out, int64_t *count, attn_error *err)
{
    const struct job *const job = batch_job(slot->batch, j);
    const attn_problem *const p = job_problem(job, 0), *const wide = &slot->problems[slot->problem[j]];
    const attn_move *of_step;
    const int64_t steps = out ? 0 : transaction_moves(job, &of_step),
                  rows = job->transaction ? p->page_table.shape[0] : 0;
    const attn_status status = memory_reserve_moves(slot, *count + steps + ATTN_TENSOR_COUNT + rows, err);
    if (status != ATTN_OK) return status;
    for (int64_t i = 0; i < steps; i++) slot->moves[(*count)++] = of_step[i];
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *t = &p->tensor[id];
        if (t->rank == 0 || (job->transaction && is_of(POOL, id))) continue;
        if (lies_in(t, job->outputs.memory, job->outputs.bytes) == out)
            add_moves(slot, count, t, &wide->tensor[id], slot->place[j], out);
    }
    return ATTN_OK;
}

attn_status merge_move(struct slot *slot, bool out, attn_error *err)
{
    int64_t count = 0;
    for (int j = 0; j < slot->batch->count; j++) {
        if (!slot->moved[j]) continue;
        const attn_status status = add_job(slot, j, out, &count, err);
        if (status != ATTN_OK) return status;
    }
    return count == 0 ? ATTN_OK : attn_moves(slot->stream, slot->moves, count, err);
}
