/* heads.c: a part of a cut job on its device. The part is some heads of a problem (cut.c).
 *
 * A unified device (the CPU) computes in staging memory, through views of the heads. A device with its own memory has
 * new memory for each tensor of the part. The part's heads are rows of the whole tensor, at equal distances, so one
 * copy of rows serves a tensor (attn_copy_rows()). A tensor without an axis of heads is copied as a whole. */
#include "server/device/internal.h"

attn_problem heads_of(const attn_problem *whole, int64_t first, int64_t end)
{
    return attn_part_of(whole, &(attn_part){ 0, attn_dims_of(whole).B, first, end - first });
}

bool heads_use(const attn_problem *p, int id)
{
    return p->tensor[id].rank > 0 && (attn_reads(p, (attn_tensor_id)id) || attn_writes(p, (attn_tensor_id)id));
}

static attn_problem part_of(const struct job_part *part)
{
    return heads_of(job_problem(part->job, 0), part->heads[0], part->heads[1]);
}

static size_t bytes_of(const attn_tensor *t)
{
    int64_t bytes = 0;
    /* cannot fail: attn_check() has checked the shape of the whole tensor */
    (void)attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes);
    return (size_t)bytes;
}

static size_t aligned(size_t bytes)
{
    return (bytes + MERGE_LINE - 1) / MERGE_LINE * MERGE_LINE;
}

attn_status heads_take(struct device *device, struct slot *slot, const struct job_part *part, attn_problem *problem,
                       attn_error *err)
{
    size_t bytes = 0;
    void *memory;
    *problem = part_of(part);
    if (device->info.unified) return ATTN_OK;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (heads_use(problem, id)) bytes += aligned(bytes_of(&problem->tensor[id]));
    const attn_status status = memory_take(device, slot, bytes, &memory, err);
    if (status != ATTN_OK) return status;
    char *at = memory;
    /* prefix_keys (numbers of keys that caches share) only saves time, so a part of a cut job does without it */
    problem->prefix_keys = NULL;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *const t = &problem->tensor[id];
        if (!heads_use(problem, id)) {
            t->rank = 0; /* the part's computation does not use this tensor, so the device gets no copy of it */
            continue;
        }
        *t = attn_tensor_make(at, t->dtype, t->rank, t->shape);
        at += aligned(bytes_of(t));
    }
    return ATTN_OK;
}

/* Describes the copy of a tensor between `host`, a view of some heads of `whole`, and `there`, which is contiguous. */
static attn_rows rows_of(const attn_tensor *whole, const attn_tensor *host, const attn_tensor *there, bool out)
{
    int axis = 0;
    size_t rows = 1;
    while (axis < host->rank && host->shape[axis] == whole->shape[axis]) rows *= (size_t)host->shape[axis++];
    if (axis == host->rank) rows = 1; /* a tensor without an axis of heads is one row */
    const size_t width = rows > 0 ? bytes_of(there) / rows : 0, all = rows > 0 ? bytes_of(whole) / rows : 0;
    return out ? (attn_rows){ host->data, there->data, all, width, width, rows }
               : (attn_rows){ there->data, host->data, width, all, width, rows };
}

attn_status heads_copy(struct slot *slot, const struct job_part *part, const attn_problem *there, bool out,
                       attn_error *err)
{
    const attn_problem *const whole = job_problem(part->job, 0);
    const attn_problem host = part_of(part);
    attn_status status = ATTN_OK;
    for (int id = 0; id < ATTN_TENSOR_COUNT && status == ATTN_OK; id++) {
        if (!heads_use(&host, id) || attn_writes(&host, (attn_tensor_id)id) != out) continue;
        const attn_rows rows = rows_of(&whole->tensor[id], &host.tensor[id], &there->tensor[id], out);
        status = attn_copy_rows(slot->stream, &rows, out ? ATTN_FROM_DEVICE : ATTN_TO_DEVICE, err);
    }
    return status;
}
