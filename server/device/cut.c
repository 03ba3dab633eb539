/* cut.c: cuts a problem that takes long into parts, which several devices compute.
 *
 * There are three ways to cut a problem. The server uses the first way in this list that gives each device a part. If
 * no way does, heads or batch rows are cut into fewer parts.
 *
 *   by heads     A part computes some key/value heads and their query heads (attn_part_of()).
 *   by batch     A part computes some rows of the batch.
 *   by queries   A part computes some queries, with all keys and values (attn_queries_of()). Under a causal mask the
 *                parts have different numbers of queries, and about equally many pairs of a query and a key.
 *
 * All parts run the kernel that the whole problem would run, so their results are equal, to the bit, to those of one
 * device. If a problem is cut by queries, gradients that are sums over queries, such as dk, are added up (sums.c).
 *
 * Some problems are not cut, or not in every way, because their answers could differ:
 *
 *   a gradient that is a sum over all heads        not by heads, because the sums of parts would be rounded differently
 *   a gradient that is a sum over the batch        not by batch, for the same reason
 *   an option that counts queries                  not by queries (attn_queries_divide())
 *   caches, tensors in a GPU's memory              not cut, because only one device has them
 *   a part would be computed by another kernel     not cut: a kernel may take some sizes or addresses and not others
 *   devices of different kinds                     do not share a problem: their kernels may round differently */
#include "server/device/internal.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* ---- Whether a job may be cut, and in which way ------------------------------------------------------------------ */

static bool is_contiguous(const attn_tensor *t)
{
    const attn_tensor whole = attn_tensor_make(t->data, t->dtype, t->rank, t->shape);
    return memcmp(whole.stride, t->stride, (size_t)t->rank * sizeof t->stride[0]) == 0;
}

/* True if the job is a single problem that several devices may share. */
static bool has_parts(const struct job *job)
{
    const attn_problem *const p = job->call->count == 1 ? job_problem(job, 0) : NULL;
    if (p == NULL || job->transaction || job->lse || job->part.device >= 0 || job->wants_judge ||
        proto_operations[job->call->op].merges || attn_is_empty(p))
        return false;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (parts_use(p, id) && !is_contiguous(&p->tensor[id])) return false;
    return true;
}

/* Returns into how many parts the problem can be cut by batch rows. Returns 1 if the problem is packed, or if a
 * gradient is a sum over batch rows. */
static int64_t batch_rows_of(const attn_problem *p, const attn_dims *d)
{
    const bool shares_bias = p->dbias.rank > 0 && p->dbias.shape[0] == 1;
    return d->packed || shares_bias || p->dsinks.rank > 0 || p->dalibi_slopes.rank == 1 ? 1 : d->B;
}

static int64_t most_of(const attn_problem *p, enum job_way way)
{
    const attn_dims d = attn_dims_of(p);
    switch (way) {
    case JOB_BY_HEADS: return p->dbias.rank > 0 && p->dbias.shape[1] == 1 ? 1 : d.Hk;
    case JOB_BY_BATCH: return batch_rows_of(p, &d);
    case JOB_BY_QUERIES: return attn_queries_divide(p) ? d.Sq / ATTN_QUERY_UNIT : 1;
    default: return 1;
    }
}

/* Chooses how `count` devices share the problem: by heads, batch rows or queries. If `sums` is true, the problem may be
 * cut by queries even if gradients must be added up over the parts. */
static enum job_way way_of(const attn_problem *p, int count, bool sums)
{
    const int64_t heads = most_of(p, JOB_BY_HEADS), rows = most_of(p, JOB_BY_BATCH);
    if (heads >= count) return JOB_BY_HEADS;
    if (rows >= count) return JOB_BY_BATCH;
    if (most_of(p, JOB_BY_QUERIES) >= count && (sums || !sums_are_needed(p))) return JOB_BY_QUERIES;
    return heads == 1 && rows == 1 ? JOB_WHOLE : heads >= rows ? JOB_BY_HEADS : JOB_BY_BATCH;
}

/* Divides the problem into at most `most` parts with about equal work, and returns their number. */
static int divide(const attn_problem *p, enum job_way way, int most, struct job_range ranges[CONFIG_MAX_DEVICES])
{
    const int64_t all = most_of(p, way);
    int64_t ends[CONFIG_MAX_DEVICES];
    double shares[CONFIG_MAX_DEVICES];
    int count = all < most ? (int)all : most;
    if (count < 2) return 1;
    if (way == JOB_BY_QUERIES) {
        if (!attn_queries_share(p, count, ends, shares)) return 1;
        for (int n = 0; n < count; n++) ranges[n] = (struct job_range){ n > 0 ? ends[n - 1] : 0, ends[n], shares[n] };
        return count;
    }
    /* Size of the largest part, in heads or batch rows. The job is cut into as few parts of at most this size as hold
     * all heads or rows. These may be fewer than `count`, and with more parts the largest part would be no smaller. */
    const int64_t largest = (all + count - 1) / count;
    count = (int)((all + largest - 1) / largest);
    for (int n = 0; n < count; n++) {
        const int64_t first = all * n / count, end = all * (n + 1) / count;
        ranges[n] = (struct job_range){ first, end, (double)(end - first) / (double)all };
    }
    return count;
}

static bool have_same_kernels(const attn_capabilities *a, const attn_capabilities *b)
{
    if (a->backend != b->backend || a->kernel_count != b->kernel_count) return false;
    for (int n = 0; n < a->kernel_count; n++) {
        const attn_kernel *const k = a->kernels[n], *const l = b->kernels[n];
        if (strcmp(k->name, l->name) != 0 || k->op != l->op || k->dtypes != l->dtypes || k->head_dim != l->head_dim ||
            k->features != l->features)
            return false;
    }
    return true;
}

/* True if the two devices compute results with equal bits: the devices and their kernels are of the same kind. */
static bool are_alike(const struct device *a, const struct device *b)
{
    const attn_device_info *const i = &a->info, *const j = &b->info;
    return have_same_kernels(attn_device_capabilities(a->handle), attn_device_capabilities(b->handle)) &&
           i->unified == j->unified && i->units == j->units && i->fastest_flops == j->fastest_flops &&
           i->peak_flops == j->peak_flops && i->peak_bytes == j->peak_bytes;
}

/* Gives the tensors of `p`, a copy of a problem, contiguous strides and aligned addresses, like those that they will
 * have on a device. The choice of a kernel depends on the strides and the addresses. */
static void place_for_plan(attn_problem *p)
{
    const uintptr_t apart = 4096;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *const t = &p->tensor[id];
        if (t->rank > 0)
            *t = attn_tensor_make(t->data ? (void *)(apart * (uintptr_t)(id + 1)) : NULL, t->dtype, t->rank, t->shape);
    }
}

static bool plan_on(const struct device *device, attn_problem *p, attn_plan *plan)
{
    attn_error ignored;
    if (!device->info.unified) place_for_plan(p);
    return attn_plan_make(attn_device_capabilities(device->handle), p, plan, &ignored) == ATTN_OK;
}

/* True if the kernel that computes the whole problem also computes each part. */
static bool same_kernel(const struct device *device, const attn_problem *whole, enum job_way way, int count,
                        const struct job_range *ranges)
{
    attn_problem all = *whole;
    attn_plan together, alone;
    if (!plan_on(device, &all, &together)) return false;
    for (int n = 0; n < count; n++) {
        attn_problem part = parts_of(whole, way, &ranges[n]);
        if (way == JOB_BY_QUERIES) sums_as_float(&part);
        if (!plan_on(device, &part, &alone) || alone.kernel != together.kernel || alone.variant != together.variant)
            return false;
    }
    return true;
}

/* ---- Gradients that are sums over the parts ---------------------------------------------------------------------- */

static bool takes_long(const struct devices *devices, const struct job *job)
{
    const double above_s = (double)devices->split_above_ms / 1e3;
    return above_s > 0 && job->seconds > above_s && devices->count > 1;
}

/* Returns true if the partial gradients of all parts (sums over their queries, such as dk) fit into half of each
 * device's memory. The job has `parts` parts, which `able` devices compute. */
static bool have_memory(const struct devices *devices, const attn_problem *p, int parts, int able)
{
    const int64_t bytes = sums_bytes(p, parts) * ((parts + able - 1) / able);
    for (int i = 0; i < devices->count; i++)
        if (bytes > devices->device[i]->info.memory_limit / 2) return false;
    return true;
}

/* Decides whether the job is cut by queries into parts whose gradients are added up, and into how many parts. The
 * number of parts must not depend on the devices' load, so that gradients have the same bits each time. */
void cut_prepare(const struct devices *devices, struct job *job)
{
    struct job_range ranges[CONFIG_MAX_DEVICES];
    const int count = devices->count;
    if (!takes_long(devices, job) || !has_parts(job)) return;
    const attn_problem *const whole = job_problem(job, 0);
    if (!sums_are_needed(whole) || way_of(whole, count, true) != JOB_BY_QUERIES) return;
    for (int i = 1; i < count; i++)
        if (!are_alike(devices->device[0], devices->device[i])) return;
    if (!have_memory(devices, whole, count, count) || divide(whole, JOB_BY_QUERIES, count, ranges) != count ||
        !same_kernel(devices->device[0], whole, JOB_BY_QUERIES, count, ranges))
        return;
    job->sum_parts = count;
    job->kind = 0; /* 0: the job never shares a batch with another job */
}

/* ---- Choosing the devices, and cutting the job ------------------------------------------------------------------- */

/* Inserts a device into the list `over`, which is sorted by the work that each device has, the least first. over[0],
 * the device that was chosen first, stays where it is. */
static void insert(struct device **over, int count, struct device *device)
{
    int place = count;
    for (; place > 1 && over[place - 1]->flops > device->flops; place--) over[place] = over[place - 1];
    over[place] = device;
}

int cut_most_parts(const struct devices *devices, const struct job *job)
{
    struct job_range ranges[CONFIG_MAX_DEVICES];
    if (job->sum_parts > 0) return job->sum_parts;
    if (!takes_long(devices, job) || !has_parts(job)) return 1;
    const attn_problem *const whole = job_problem(job, 0);
    return divide(whole, way_of(whole, devices->count, false), devices->count, ranges);
}

/* Writes the devices that may compute parts of the job to `over`, and returns their number. They are `first`, and all
 * devices that have room for a batch and compute results with the same bits as `first`. *wait_ns is reduced to the time
 * until a device without room may have room. */
static int list_devices(const struct devices *devices, struct device *first, const struct job *job, int64_t now_ns,
                        int64_t *wait_ns, struct device *over[CONFIG_MAX_DEVICES])
{
    int count = 1;
    over[0] = first;
    for (int i = 0; i < devices->count; i++) {
        struct device *const device = devices->device[i];
        if (device == first || device->disabled || !are_alike(first, device) ||
            !device_has_room(device, job, now_ns, wait_ns))
            continue;
        insert(over, count++, device);
    }
    return count;
}

bool cut_may_leave(const struct devices *devices, struct device *first, const struct job *job, int64_t now_ns,
                   int64_t *wait_ns)
{
    struct device *over[CONFIG_MAX_DEVICES];
    int usable = 0;
    if (job->sum_parts == 0) return true;
    for (int i = 0; i < devices->count; i++) usable += !devices->device[i]->disabled;
    const attn_problem *const whole = job_problem(job, 0);
    /* if even all usable devices together lack the memory for the sums, the job does not wait for more devices */
    return !have_memory(devices, whole, job->sum_parts, usable) ||
           have_memory(devices, whole, job->sum_parts, list_devices(devices, first, job, now_ns, wait_ns, over));
}

/* Cuts a job by queries into job->sum_parts parts, whose gradients are added up later. If there are fewer devices, some
 * get several parts. */
static int cut_with_sums(struct job *job, int devices, struct device *over[CONFIG_MAX_DEVICES])
{
    struct job_range ranges[CONFIG_MAX_DEVICES];
    for (int n = devices; n < job->sum_parts; n++) over[n] = over[n - devices];
    const int count = divide(job_problem(job, 0), JOB_BY_QUERIES, job->sum_parts, ranges);
    assert(count == job->sum_parts);
    return job_cut(job, JOB_BY_QUERIES, count, ranges) ? count : 0;
}

int cut_over_devices(struct devices *devices, struct device *first, struct job *job, int64_t now_ns,
                     struct device *over[CONFIG_MAX_DEVICES])
{
    struct job_range ranges[CONFIG_MAX_DEVICES];
    int64_t ignored_ns = 0;
    over[0] = first;
    if (cut_most_parts(devices, job) == 1) return 1;
    const attn_problem *const whole = job_problem(job, 0);
    const int able = list_devices(devices, first, job, now_ns, &ignored_ns, over);
    if (job->sum_parts > 0 && !have_memory(devices, whole, job->sum_parts, able)) {
        job->sum_parts = 0;
        return 1;
    }
    if (job->sum_parts > 0) return cut_with_sums(job, able, over);
    const enum job_way way = way_of(whole, able, false);
    const int count = divide(whole, way, able, ranges);
    if (count < 2) return 1;
    return same_kernel(first, whole, way, count, ranges) && job_cut(job, way, count, ranges) ? count : 1;
}

/* ---- What the answer says about the parts ------------------------------------------------------------------------ */

/* Appends the next range of device numbers above `after`, such as "0-3", to the text. Returns the last number of the
 * range, or -1 if there is no range. */
static int put_devices(const struct job *job, int after, char *text, size_t room)
{
    int first = -1, last;
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (part->index > after && (first < 0 || part->index < first)) first = part->index;
    if (first < 0) return -1;
    last = first;
    /* begins again at the first part, because the parts are not sorted by device number */
    for (const struct job_part *part = &job->part; part;)
        if (part->index == last + 1) last++, part = &job->part;
        else part = part->next;
    const size_t used = strlen(text);
    const char *const comma = after < 0 ? "" : ",";
    if (last > first) snprintf(text + used, room - used, "%s%d-%d", comma, first, last);
    else snprintf(text + used, room - used, "%s%d", comma, first);
    return last;
}

void cut_name_backend(const struct devices *devices, struct job *job)
{
    static const char *const ways[JOB_WAYS] = { "", "heads", "batch", "queries" };
    char numbers[48] = "";
    proto_result *const result = &job->results[0];
    for (int last = -1; (last = put_devices(job, last, numbers, sizeof numbers)) >= 0;) continue;
    snprintf(result->backend, sizeof result->backend, "%s:%s %s by %s", devices->device[0]->info.backend, numbers,
             job->part.kernel, ways[job->part.way]);
}

void cut_join_truths(struct job *job)
{
    if (job->truths == NULL) return;
    attn_truth_distance *const found = job->truth_found[0];
    memset(found, 0, sizeof job->truth_found[0]);
    job->truth_known = true;
    for (const struct job_part *part = &job->part; part; part = part->next) {
        job->truth_known &= part->truth_known;
        for (int n = 0; n < ATTN_TRUTH_RESULTS; n++) {
            const attn_truth_distance *const own = &part->truth_found[n];
            if (own->max_abs > found[n].max_abs) found[n].max_abs = own->max_abs;
            if (own->largest > found[n].largest) found[n].largest = own->largest;
        }
    }
}
