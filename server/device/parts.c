/* parts.c: prepares a part of a cut job on its device. A part is some heads, batch rows or queries of a problem
 * (cut.c). The CPU computes in staging memory (host memory for tensors): the part's tensors are views of the whole
 * tensors. On a GPU, each tensor of the part gets device memory. The part's rows are at equal distances in the whole
 * tensor, so one call of attn_copy_rows() copies them. Gradients that are sums over all queries stay on the device
 * until they are added up (sums.c). */
#include "server/device/internal.h"

attn_problem parts_of(const attn_problem *whole, enum job_way way, const struct job_range *range)
{
    const attn_dims d = attn_dims_of(whole);
    const int64_t count = range->end - range->first;
    if (way == JOB_BY_QUERIES) return attn_queries_of(whole, range->first, range->end);
    return attn_part_of(whole, way == JOB_BY_BATCH ? &(attn_part){ range->first, count, 0, d.Hk }
                                                   : &(attn_part){ 0, d.B, range->first, count });
}

bool parts_use(const attn_problem *p, int id)
{
    return p->tensor[id].rank > 0 && (attn_reads(p, (attn_tensor_id)id) || attn_writes(p, (attn_tensor_id)id));
}

static attn_problem part_of(const struct job_part *part)
{
    return parts_of(job_problem(part->job, 0), part->way, &part->range);
}

/* True if the device has its own copy of this tensor of the part. */
static bool has_copy(const struct job_part *part, const attn_problem *problem, int id)
{
    const bool sum = part->way == JOB_BY_QUERIES && attn_is_sum_of_queries(problem, (attn_tensor_id)id);
    return parts_use(problem, id) && !sum;
}

attn_status parts_take(struct device *device, struct slot *slot, struct job_part *part, attn_problem *problem,
                       attn_error *err)
{
    size_t bytes = 0;
    void *memory;
    *problem = part_of(part);
    if (device->info.unified) return ATTN_OK;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (has_copy(part, problem, id)) bytes += lines_of(&problem->tensor[id]);
    const attn_status status = memory_take(device, slot, bytes, &memory, err);
    if (status != ATTN_OK) return status;
    char *at = memory;
    /* not copied to the device, because prefix_keys only saves time and never changes results */
    problem->prefix_keys = NULL;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *const t = &problem->tensor[id];
        if (!parts_use(problem, id)) t->rank = 0;
        if (!has_copy(part, problem, id)) continue;
        *t = attn_tensor_make(at, t->dtype, t->rank, t->shape);
        at += lines_of(t);
    }
    return sums_take(device, part, problem, err);
}

/* Describes the copy of one tensor of a part: to the host if `out` is true, and otherwise to the device. `host` is a
 * view of some rows of `whole`, and `there` is the contiguous tensor on the device. */
static attn_rows rows_of(const attn_tensor *whole, const attn_tensor *host, const attn_tensor *there, bool out)
{
    int axis = 0;
    int64_t rows = 1, width = 0, all = 0;
    while (axis < host->rank && host->shape[axis] == whole->shape[axis]) rows *= host->shape[axis++];
    if (axis == host->rank) rows = 1; /* the whole tensor is copied as one row */
    (void)attn_shape_bytes(there->dtype, there->rank, there->shape, &width);
    (void)attn_shape_bytes(whole->dtype, whole->rank, whole->shape, &all);
    width = rows > 0 ? width / rows : 0;
    all = rows > 0 ? all / rows : 0;
    const size_t count = (size_t)rows, host_pitch = (size_t)all, pitch = (size_t)width;
    return out ? (attn_rows){ host->data, there->data, host_pitch, pitch, pitch, count }
               : (attn_rows){ there->data, host->data, pitch, host_pitch, pitch, count };
}

attn_status parts_copy(struct slot *slot, const struct job_part *part, const attn_problem *there, bool out,
                       attn_error *err)
{
    const attn_problem *const whole = job_problem(part->job, 0);
    const attn_problem host = part_of(part);
    attn_status status = ATTN_OK;
    for (int id = 0; id < ATTN_TENSOR_COUNT && status == ATTN_OK; id++) {
        if (!has_copy(part, &host, id) || attn_writes(&host, (attn_tensor_id)id) != out) continue;
        const attn_rows rows = rows_of(&whole->tensor[id], &host.tensor[id], &there->tensor[id], out);
        status = attn_copy_rows(slot->stream, &rows, out ? ATTN_FROM_DEVICE : ATTN_TO_DEVICE, err);
    }
    return status;
}
