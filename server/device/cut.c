/* cut.c: cuts a problem that takes long over several devices, by groups of heads.
 *
 *     one problem: q k v of 8 heads          device 0: heads 0 to 3          out of 8 heads
 *     in staging memory            copies    device 1: heads 4 to 7  copies  in staging memory
 *                                  ---->                             ---->
 *
 * A part computes some key/value heads and their query heads (attn_part_of(), heads.c). No number of one head depends
 * on another head, and all parts run the kernel that the whole problem would run. The answer therefore has the bits of
 * one device. A device with its own memory gets only its heads. Tensors without heads, such as lengths and masks, go to
 * each device.
 *
 * A problem is not cut where its answer could differ or nothing would be gained:
 *
 *   a gradient of a bias that all heads share      it is a sum over all heads
 *   caches, tensors in a GPU's memory              only one device has them
 *   a part would be computed by another kernel     a kernel may take some strides or addresses and not others
 *   devices of different kinds                     their kernels may round differently
 *   a device verifies it                           the device compares the results of all heads with its truth
 *   one key/value head                             there is nothing to cut */
#include "server/device/internal.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* ---- May it be cut? ---------------------------------------------------------------------------------------------- */

static bool is_contiguous(const attn_tensor *t)
{
    const attn_tensor whole = attn_tensor_make(t->data, t->dtype, t->rank, t->shape);
    return memcmp(whole.stride, t->stride, (size_t)t->rank * sizeof t->stride[0]) == 0;
}

/* True if the job is one problem whose groups of heads different devices can compute. */
static bool has_parts(const struct job *job)
{
    const attn_problem *const p = job->call->count == 1 ? job_problem(job, 0) : NULL;
    if (p == NULL || p->op == ATTN_OP_OBSERVE || job->transaction || job->lse || job->truths || job->part.device >= 0 ||
        job->wants_judge || proto_operations[job->call->op].merges || attn_is_empty(p))
        return false;
    if (p->dbias.rank > 0 && p->dbias.shape[1] == 1) return false;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (heads_use(p, id) && !is_contiguous(&p->tensor[id])) return false;
    return true;
}

/* True if the two devices take the same problems and compute them with the same kernels. */
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

/* True if the two devices compute results that are equal to the bit: they have the same kernels and are of one kind. */
static bool are_alike(const struct device *a, const struct device *b)
{
    const attn_device_info *const i = &a->info, *const j = &b->info;
    return have_same_kernels(attn_device_capabilities(a->handle), attn_device_capabilities(b->handle)) &&
           i->unified == j->unified && i->units == j->units && i->fastest_flops == j->fastest_flops &&
           i->peak_flops == j->peak_flops && i->peak_bytes == j->peak_bytes;
}

/* Makes the tensors of a problem contiguous, with the addresses of a device's memory in so far as plans depend on them:
 * aligned, and different for different tensors. */
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

/* True if the kernel of the whole problem also computes each part, when the problem is cut into `count` parts. */
static bool same_kernel(const struct device *device, const attn_problem *whole, int count, int64_t Hk)
{
    attn_problem all = *whole;
    attn_plan together, alone;
    if (!plan_on(device, &all, &together)) return false;
    for (int n = 0; n < count; n++) {
        attn_problem part = heads_of(whole, Hk * n / count, Hk * (n + 1) / count);
        if (!plan_on(device, &part, &alone) || alone.kernel != together.kernel || alone.variant != together.variant)
            return false;
    }
    return true;
}

/* ---- Over which devices? ----------------------------------------------------------------------------------------- */

/* Inserts the device into the list, which is sorted by work, behind those with at most as much work. over[0] stays
 * first. */
static void insert(struct device **over, int count, struct device *device)
{
    int place = count;
    for (; place > 1 && over[place - 1]->flops > device->flops; place--) over[place] = over[place - 1];
    over[place] = device;
}

int cut_most_parts(const struct devices *devices, const struct job *job)
{
    const double above_s = (double)devices->split_above_ms / 1e3;
    if (above_s == 0 || job->seconds <= above_s || devices->count == 1 || !has_parts(job)) return 1;
    const int64_t Hk = attn_dims_of(job_problem(job, 0)).Hk;
    return Hk < devices->count ? (int)Hk : devices->count;
}

int cut_over_devices(struct devices *devices, struct device *first, struct job *job, int64_t now_ns,
                     struct device *over[CONFIG_MAX_DEVICES])
{
    int count = 1;
    over[0] = first;
    if (cut_most_parts(devices, job) == 1) return 1;
    const attn_problem *const whole = job_problem(job, 0);
    const int64_t Hk = attn_dims_of(whole).Hk;
    for (int i = 0; i < devices->count; i++) {
        struct device *const device = devices->device[i];
        int64_t ignored_ns = 0;
        if (device == first || device->disabled || !are_alike(first, device) ||
            !device_has_room(device, job, now_ns, &ignored_ns))
            continue;
        insert(over, count++, device);
    }
    if (count > Hk) count = (int)Hk;
    if (count < 2) return 1;
    /* number of key/value heads of the largest part; more devices that do not make this part smaller would save no
     * time */
    const int64_t most = (Hk + count - 1) / count;
    count = (int)((Hk + most - 1) / most);
    return same_kernel(first, whole, count, Hk) && job_cut(job, count, Hk) ? count : 1;
}

/* ---- The answer -------------------------------------------------------------------------------------------------- */

/* Appends the number of the device of a part that follows `after`, with those that follow it without a gap: "0-3".
 * Returns the last number, or -1 if no device follows. */
static int put_devices(const struct job *job, int after, char *text, size_t room)
{
    int first = -1, last;
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (part->index > after && (first < 0 || part->index < first)) first = part->index;
    if (first < 0) return -1;
    last = first;
    for (const struct job_part *part = &job->part; part;)
        /* searches the list from its start, because its order is not that of the devices' numbers */
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
    char numbers[48] = "";
    proto_result *const result = &job->results[0];
    for (int last = -1; (last = put_devices(job, last, numbers, sizeof numbers)) >= 0;) continue;
    snprintf(result->backend, sizeof result->backend, "%s:%s %s by heads", devices->device[0]->info.backend, numbers,
             job->part.kernel);
}
