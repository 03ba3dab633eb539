/* sums.c: the gradients that are sums over all queries, such as dk and dv, of a job that is cut by queries.
 *
 *     device 0   sums over the queries of part 0:  [ share 0 | share 1 | share 2 ]     + --> share 0 of dk --> host
 *     device 1   sums over the queries of part 1:  [ share 0 | share 1 | share 2 ]     + --> share 1 of dk --> host
 *     device 2   sums over the queries of part 2:  [ share 0 | share 1 | share 2 ]     + --> share 2 of dk --> host
 *
 * Each part of the job sums these gradients over its own queries, in float32. The sums are in memory of the part's
 * device, which is kept until the job is over. When all parts are back, each part is sent to its device once more, to
 * add up one share of the elements. For this, the device copies the other parts' sums of this share from the other
 * devices. It adds them in float32, in the order of the parts, and rounds each result once to the dtype of the
 * gradient. All devices copy and add at the same time.
 *
 * Which queries a part has depends on the problem and on the number of devices of the server, and not on the devices'
 * load. The same request therefore gets the same bits each time. */
#include "server/device/internal.h"

#include <assert.h>

/* Unit, in elements, in which a gradient is divided into shares; a share is the elements that one part adds up. Each
 * share begins at a multiple of this unit, and so at a multiple of 16 bytes in each dtype. */
enum { SHARE_UNIT = 64 };

static_assert(CONFIG_MAX_DEVICES <= (int)ATTN_SUM_PARTS, "a job may have more parts than a sum");

/* An output that is a sum over queries. The offsets are in bytes, from the start of the memory that a part of a job has
 * for such sums. */
struct output {
    int id;
    int64_t elements;
    size_t own; /* offset of the part's float32 sums over its own queries */
    /* Offset of the memory for the other parts' float32 sums over the elements that this part adds up. It has
     * slot_bytes bytes for each other part. */
    size_t received;
    size_t slot_bytes;
    size_t result; /* offset of the results of this part's share (the elements that it adds up) */
    size_t end;    /* end of this output's memory */
};

/* Returns a float32 tensor at `memory` for the sums of an output over a part's own queries. */
static attn_tensor partial_of(const attn_tensor *result, void *memory)
{
    return attn_tensor_make(memory, ATTN_F32, result->rank, result->shape);
}

/* Sets *o to the next output after o->id (-1 at first) that is a sum over queries. `parts` is the number of parts into
 * which the problem is cut. Returns false if there is no such output. */
static bool next_output(const attn_problem *p, int parts, struct output *o)
{
    do o->id++;
    while (o->id < ATTN_TENSOR_COUNT && !attn_is_sum_of_queries(p, (attn_tensor_id)o->id));
    if (o->id == ATTN_TENSOR_COUNT) return false;
    const attn_tensor *const result = &p->tensor[o->id];
    /* cannot fail, because the tensor was checked before */
    (void)attn_shape_elements(result->rank, result->shape, &o->elements);
    const attn_tensor own = partial_of(result, NULL);
    /* `most` is an upper bound on the elements of one part's share. The last share also has the elements at the end
     * that do not fill a unit of SHARE_UNIT elements. */
    const int64_t units = o->elements / SHARE_UNIT;
    const int64_t most = (units + parts - 1) / parts * SHARE_UNIT + o->elements % SHARE_UNIT;
    const attn_tensor slot = attn_tensor_make(NULL, ATTN_F32, 1, &most);
    o->own = o->end;
    o->received = o->own + lines_of(&own);
    o->slot_bytes = lines_of(&slot);
    o->result = o->received + (size_t)(parts - 1) * o->slot_bytes;
    o->end = o->result + o->slot_bytes;
    return true;
}

/* Returns the first element of share `number` (the elements that one part adds up). If `number` is `parts`, returns the
 * end of the last share. */
static int64_t share_begin(const struct output *o, int parts, int number)
{
    return number == parts ? o->elements : o->elements / SHARE_UNIT * number / parts * SHARE_UNIT;
}

bool sums_are_needed(const attn_problem *p)
{
    struct output o = { .id = -1 };
    return next_output(p, 1, &o);
}

int64_t sums_bytes(const attn_problem *p, int parts)
{
    struct output o = { .id = -1 };
    while (next_output(p, parts, &o)) continue;
    return (int64_t)o.end;
}

void sums_as_float(attn_problem *problem)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (attn_is_sum_of_queries(problem, (attn_tensor_id)id)) problem->tensor[id].dtype = ATTN_F32;
}

/* ---- Memory for a part's gradients, which are sums over the part's queries --------------------------------------- */

attn_status sums_take(struct device *device, struct job_part *part, attn_problem *problem, attn_error *err)
{
    const attn_problem *const whole = job_problem(part->job, 0);
    const int parts = part->job->sum_parts;
    struct output o = { .id = -1 };
    if (parts == 0) return ATTN_OK;
    assert(part->sums == NULL);
    const attn_status status = attn_device_alloc(device->handle, (size_t)sums_bytes(whole, parts), &part->sums, err);
    if (status != ATTN_OK) return status;
    part->sums_on = device;
    pthread_mutex_lock(&device->lock);
    part->next_kept = device->kept;
    device->kept = part;
    pthread_mutex_unlock(&device->lock);
    while (next_output(whole, parts, &o))
        problem->tensor[o.id] = partial_of(&whole->tensor[o.id], (char *)part->sums + o.own);
    return ATTN_OK;
}

static void unlist(struct job_part *part)
{
    struct device *const device = part->sums_on;
    pthread_mutex_lock(&device->lock);
    struct job_part **link = &device->kept;
    while (*link && *link != part) link = &(*link)->next_kept;
    if (*link) *link = part->next_kept;
    pthread_mutex_unlock(&device->lock);
}

/* Lets the device's thread try the held batch (one that lacked memory) again. */
static void wake_held(struct device *device)
{
    pthread_mutex_lock(&device->lock);
    device->held_may_run = true;
    device->over++;
    if (device->held) pthread_cond_broadcast(&device->wake);
    pthread_mutex_unlock(&device->lock);
}

void sums_drop(struct job_part *part)
{
    if (part->sums == NULL) return;
    attn_device_free(part->sums_on->handle, part->sums);
    unlist(part);
    part->sums = NULL;
}

void sums_free_part(struct job_part *part)
{
    if (part->sums == NULL) return;
    sums_drop(part);
    wake_held(part->sums_on);
}

void sums_free(struct job *job)
{
    for (struct job_part *part = &job->part; part; part = part->next) sums_free_part(part);
}

void sums_lose(struct job *job)
{
    if (!job->part.adds) return;
    for (struct job_part *part = &job->part; part; part = part->next) {
        if (part->sums == NULL) continue;
        unlist(part);
        wake_held(part->sums_on);
    }
}

bool sums_older(const struct job *a, const struct job *b)
{
    return a->queued_ns != b->queued_ns ? a->queued_ns < b->queued_ns : (uintptr_t)a < (uintptr_t)b;
}

bool sums_will_be_freed(const struct device *device, const struct batch *batch)
{
    const struct job *const job = batch_job(batch, 0);
    for (const struct job_part *kept = device->kept; kept; kept = kept->next_kept)
        if (kept->job != job && (job->sum_parts == 0 || sums_older(kept->job, job))) return true;
    return false;
}

/* ---- Adding up a share of the gradients -------------------------------------------------------------------------- */

bool sums_begin(struct job *job)
{
    if (job->sum_parts == 0 || job->part.adds) return false;
    for (struct job_part *part = &job->part; part; part = part->next) {
        if (!part->sums_on->disabled) continue;
        part->ran = false;
        attn_fail(&part->error, ATTN_DEVICE_LOST, NULL, "%s was lost with a part of the gradients",
                  part->sums_on->info.name);
        return false;
    }
    for (struct job_part *part = &job->part; part; part = part->next) {
        part->adds = true;
        part->left = part->ran = false;
        part->device = part->sums_on->number;
    }
    return true;
}

/* Returns the address at which the device of part `own` finds the sums of part `other`, from element `first` on. If
 * `other` is on another device, this is the address to which copy_shares() copies these sums. */
static char *numbers_of(const struct output *o, const struct job_part *own, const struct job_part *other, int64_t first)
{
    if (other->sums_on == own->sums_on) return (char *)other->sums + o->own + (size_t)first * sizeof(float);
    const int slot = other->number - (other->number > own->number);
    return (char *)own->sums + o->received + (size_t)slot * o->slot_bytes;
}

static const struct job_part *next_around(const struct job_part *part)
{
    return part->next ? part->next : &part->job->part;
}

/* A problem is divided into parts, and each part adds up a share of the elements. This enqueues copies of all other
 * parts' partial sums for the share of `own`, from the devices that computed them. The copies begin with the device of
 * the next part, so that at first no two parts read from the same device. */
static attn_status copy_shares(attn_stream *stream, const struct job_part *own, const struct output *o, int64_t first,
                               int64_t end, attn_error *err)
{
    attn_status status = ATTN_OK;
    for (const struct job_part *other = next_around(own); other != own && status == ATTN_OK; other = next_around(other))
        if (other->sums_on != own->sums_on)
            status = attn_copy_peer(stream, numbers_of(o, own, other, first), other->sums_on->handle,
                                    (char *)other->sums + o->own + (size_t)first * sizeof(float),
                                    (size_t)(end - first) * sizeof(float), err);
    return status;
}

static attn_status add_share(attn_stream *stream, const struct job_part *own, const struct output *o, int64_t first,
                             int64_t end, attn_error *err)
{
    const struct job *const job = own->job;
    attn_sum sum = { .to = (char *)own->sums + o->result,
                     .dtype = job_problem(job, 0)->tensor[o->id].dtype,
                     .count = job->sum_parts,
                     .elements = end - first };
    for (const struct job_part *part = &job->part; part; part = part->next)
        sum.parts[part->number] = (const float *)numbers_of(o, own, part, first);
    return attn_sum_parts(stream, &sum, err);
}

static attn_status copy_out(attn_stream *stream, const struct job_part *own, const struct output *o, int64_t first,
                            int64_t end, attn_error *err)
{
    const attn_tensor *const result = &job_problem(own->job, 0)->tensor[o->id];
    const size_t bytes = attn_dtype_bytes(result->dtype);
    return attn_copy(stream, (char *)result->data + (size_t)first * bytes, (char *)own->sums + o->result,
                     (size_t)(end - first) * bytes, ATTN_FROM_DEVICE, err);
}

attn_status sums_launch(attn_stream *stream, const struct job_part *part, attn_error *err)
{
    typedef attn_status step(attn_stream *, const struct job_part *, const struct output *, int64_t, int64_t,
                             attn_error *);
    static step *const steps[] = { copy_shares, add_share, copy_out };
    const attn_problem *const whole = job_problem(part->job, 0);
    const int parts = part->job->sum_parts;
    attn_status status = attn_stream_mark(stream, 0, err);
    for (int n = 0; n < 3 && status == ATTN_OK; n++) {
        struct output o = { .id = -1 };
        while (status == ATTN_OK && next_output(whole, parts, &o))
            status = steps[n](stream, part, &o, share_begin(&o, parts, part->number),
                              share_begin(&o, parts, part->number + 1), err);
        if (status == ATTN_OK) status = attn_stream_mark(stream, n + 1, err);
    }
    return status;
}
