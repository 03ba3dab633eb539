/* dispatch.c: finds the backend that serves a call.
 *
 *   backends    the list of this build's backends, in order of preference
 *   kernels     each backend lists its kernels; a plan has the first kernel that takes the problem
 *   dispatch    functions of a few lines, which call the same function of the device's backend
 *
 * To add a backend, write a table of functions (backend.h) and add it to `backends`. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "attention.h"
#include "backend.h"
#include "tiles.h"

/* ---- Backends, and opening their devices ------------------------------------------------------------------------- */

/* The backends of this build, in order of preference. A server takes the first backend that has a device. It takes
 * "reference" and "paper" only if its option --devices names them. */
static const attn_backend *const backends[] = {
#ifdef ATTN_FAKE
    &attn_backend_fake,
#endif
#ifdef ATTN_CUDA
    &attn_backend_cuda,
#endif
    &attn_backend_cpu,  &attn_backend_reference, &attn_backend_paper,
};
enum { BACKENDS = sizeof backends / sizeof *backends };

const char *const *attn_backends(void)
{
    /* The names of `backends`, written out once more. The array is thus a constant, which is complete before any thread
     * starts. */
    static const char *const names[] = {
#ifdef ATTN_FAKE
        "fake",
#endif
#ifdef ATTN_CUDA
        "cuda",
#endif
        "cpu",  "reference", "paper", NULL,
    };
    static_assert(sizeof names / sizeof *names == BACKENDS + 1, "a backend without a name");
    return names;
}

static const attn_backend *backend_named(const char *name)
{
    for (int i = 0; i < BACKENDS; i++)
        if (!strcmp(name, backends[i]->name)) return backends[i];
    return NULL;
}

bool attn_is_gpu(const char *backend)
{
    const attn_backend *b = backend_named(backend);
    return b && b->is_gpu;
}

int attn_device_count(const char *backend)
{
    const attn_backend *b = backend_named(backend);
    return b ? b->count() : 0;
}

attn_status attn_device_open(const char *backend, int index, const attn_device_options *options, attn_device **device,
                             attn_error *err)
{
    static const attn_device_options defaults = { 0 };
    const attn_backend *b = backend_named(backend);
    int count;
    *device = NULL;
    if (!b) return attn_fail(err, ATTN_NOT_FOUND, "", "there is no backend '%s' in this build", backend);
    count = b->count();
    if (index < 0 || index >= count)
        return attn_fail(err, ATTN_NOT_FOUND, "", "backend %s has %d devices, there is no number %d", backend, count,
                         index);
    const attn_status status = b->open(index, options ? options : &defaults, device, err);
    if (status == ATTN_OK) (*device)->can.backend = b;
    return status;
}

void attn_device_close(attn_device *device)
{
    if (device) device->backend->close(device);
}

/* ---- Which kernel computes a problem ----------------------------------------------------------------------------- */

const attn_capabilities *attn_device_capabilities(const attn_device *device)
{
    return &device->can;
}

/* Returns ATTN_OK if some kernel of the problem's operation takes head sizes as large as those of the problem, and
 * otherwise an error. */
static attn_status head_size_fits(const attn_capabilities *can, const attn_problem *problem, const char *op,
                                  attn_error *err)
{
    const attn_dims d = attn_dims_of(problem);
    const attn_tensor_id id = d.D >= d.Dv ? ATTN_T_q : ATTN_T_v;
    const int axis = problem->tensor[id].rank - 1;
    const int64_t size = attn_max64(d.D, d.Dv);
    char member[32];
    int most = 0;
    for (int n = 0; n < can->kernel_count; n++)
        if (can->kernels[n]->op == problem->op && can->kernels[n]->head_dim > most) most = can->kernels[n]->head_dim;
    if (size <= most) return ATTN_OK;
    snprintf(member, sizeof member, "/%s/shape/%d", attn_tensors[id].name, axis);
    return attn_fail(err, ATTN_UNSUPPORTED, member, "%s: shape[%d] is %lld, no kernel of %s takes more than %d in %s",
                     attn_tensors[id].name, axis, (long long)size, can->backend->name, most, op);
}

/* Writes the error that no kernel computes the problem. The error names a head size that is too large for every kernel
 * of the operation, or else the first tensor or option that no kernel supports. If only the combination is not
 * supported, it names nothing. */
static attn_status no_kernel(const attn_capabilities *can, const attn_problem *problem, uint64_t features,
                             attn_error *err)
{
    static const char *const ops[ATTN_OP_COUNT] = { "a forward", "a backward", "an observe" };
    const char *op = ops[problem->op], *name = can->backend->name;
    uint64_t known = 0;
    int bit = 0;
    if (head_size_fits(can, problem, op, err) != ATTN_OK) return err->status;
    for (int n = 0; n < can->kernel_count; n++)
        if (can->kernels[n]->op == problem->op) known |= can->kernels[n]->features;
    if ((features & ~known) == 0)
        return attn_fail(err, ATTN_UNSUPPORTED, "", "%s: no kernel computes this %s of %s", name,
                         attn_op_name(problem->op), attn_dtype_name(problem->q.dtype));
    while (!(features & ~known & UINT64_C(1) << bit)) bit++;
    if (bit < ATTN_TENSOR_COUNT)
        return attn_fail(err, ATTN_UNSUPPORTED, attn_tensors[bit].name, "%s: no kernel of %s takes it in %s",
                         attn_tensors[bit].name, name, op);
    if (bit <= ATTN_OPTION_FIRST || bit >= ATTN_OPTION_END)
        return attn_fail(err, ATTN_UNSUPPORTED, "", "%s: no kernel takes what this %s asks for", name,
                         attn_op_name(problem->op));
    const attn_option_info *option = &attn_options[bit - ATTN_OPTION_FIRST - 1];
    return attn_fail(err, ATTN_UNSUPPORTED, option->wire, "no kernel of %s takes %s where %s", name, op,
                     option->meaning);
}

static uint64_t unaligned_of(const attn_problem *problem)
{
    uint64_t unaligned = 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (problem->tensor[id].rank && (uintptr_t)problem->tensor[id].data % 16 != 0) unaligned |= UINT64_C(1) << id;
    return unaligned;
}

attn_status attn_plan_for(const attn_capabilities *can, const attn_problem *problem, uint64_t features, attn_plan *plan,
                          attn_error *err)
{
    const attn_backend *backend = can->backend;
    plan->problem = problem;
    plan->can = can;
    plan->features = features;
    plan->workspace_bytes = 0;
    plan->variant = NULL;
    plan->unaligned = unaligned_of(problem);
    if (backend->plan) plan->geometry = attn_geometry_of(problem);
    for (int n = 0; n < can->kernel_count; n++) {
        plan->kernel = can->kernels[n];
        if (attn_kernel_takes(plan->kernel, problem, features) && (!backend->plan || backend->plan(can, plan)))
            return ATTN_OK;
    }
    return no_kernel(can, problem, features, err);
}

attn_status attn_plan_make(const attn_capabilities *can, const attn_problem *problem, attn_plan *plan, attn_error *err)
{
    return attn_plan_for(can, problem, attn_features(problem), plan, err);
}

static bool same_capabilities(const attn_capabilities *a, const attn_capabilities *b)
{
    return a == b || (a->backend == b->backend && a->kernel_count == b->kernel_count &&
                      memcmp(a->kernels, b->kernels, (size_t)a->kernel_count * sizeof *a->kernels) == 0 &&
                      a->facts_bytes == b->facts_bytes &&
                      (a->facts_bytes == 0 || memcmp(a->facts, b->facts, a->facts_bytes) == 0));
}

attn_status attn_plan_move(const attn_capabilities *can, const attn_plan *made, const attn_problem *problem,
                           attn_plan *plan, attn_error *err)
{
    if (!same_capabilities(can, made->can) || unaligned_of(problem) != made->unaligned)
        return attn_plan_for(can, problem, made->features, plan, err);
    *plan = *made;
    plan->problem = problem;
    plan->can = can;
    if (can->backend->plan) plan->geometry = attn_geometry_of(problem);
    return ATTN_OK;
}

/* ---- Functions that call the same function of the device's backend ----------------------------------------------- */

/* Finds the next group of adjacent problems that are not empty (a problem is empty if its outputs have no elements).
 * The search starts at *first, which becomes the index of the group's first problem. Returns the number of problems in
 * the group; 0 at the end. */
static int next_stretch(const attn_plan *plans, int count, int *first)
{
    int end;
    while (*first < count && attn_is_empty(plans[*first].problem)) ++*first;
    for (end = *first; end < count && !attn_is_empty(plans[end].problem);) end++;
    return end - *first;
}

void attn_device_describe(const attn_device *device, attn_device_info *info)
{
    memset(info, 0, sizeof *info);
    device->backend->describe(device, info);
    info->index = device->index;
}

attn_status attn_device_alloc(attn_device *device, size_t bytes, void **memory, attn_error *err)
{
    *memory = NULL;
    return device->backend->device_alloc(device, bytes, memory, err);
}

void attn_device_free(attn_device *device, void *memory)
{
    if (memory) device->backend->device_free(device, memory);
}

attn_status attn_staging_alloc(attn_device *device, size_t bytes, void **memory, attn_error *err)
{
    *memory = NULL;
    return device->backend->staging_alloc(device, bytes, memory, err);
}

void attn_staging_free(attn_device *device, void *memory, size_t bytes)
{
    if (memory) device->backend->staging_free(device, memory, bytes);
}

attn_status attn_device_import(attn_device *device, const uint8_t handle[ATTN_HANDLE_BYTES], size_t bytes,
                               void **memory, attn_error *err)
{
    *memory = NULL;
    if (!device->backend->import)
        return attn_fail(err, ATTN_UNSUPPORTED, "", "%s: no other process can lend memory of this device",
                         device->backend->name);
    return device->backend->import(device, handle, bytes, memory, err);
}

void attn_device_release_import(attn_device *device, void *memory)
{
    if (memory) device->backend->release_import(device, memory);
}

attn_status attn_host_pin(attn_device *device, void *memory, size_t bytes, attn_error *err)
{
    if (!device->backend->pin)
        return attn_fail(err, ATTN_UNSUPPORTED, "", "%s: memory of this machine cannot be pinned",
                         device->backend->name);
    return device->backend->pin(device, memory, bytes, err);
}

void attn_host_unpin(attn_device *device, void *memory)
{
    if (memory) device->backend->unpin(device, memory);
}

attn_status attn_workspace(const attn_capabilities *can, const attn_plan *plans, int count, size_t *bytes,
                           attn_error *err)
{
    *bytes = 0;
    for (int first = 0, n; (n = next_stretch(plans, count, &first)) > 0; first += n) {
        size_t part = 0;
        const attn_status status = can->backend->workspace(can, plans + first, n, &part, err);
        if (status != ATTN_OK) return status;
        /* the groups of problems run one after the other in one workspace */
        if (part > *bytes) *bytes = part;
    }
    return ATTN_OK;
}

attn_status attn_stream_open(attn_device *device, attn_stream **stream, attn_error *err)
{
    *stream = NULL;
    return device->backend->stream_open(device, stream, err);
}

void attn_stream_close(attn_stream *stream)
{
    if (stream) stream->device->backend->stream_close(stream);
}

attn_status attn_copy(attn_stream *stream, void *to, const void *from, size_t bytes, attn_direction direction,
                      attn_error *err)
{
    return bytes ? stream->device->backend->copy(stream, to, from, bytes, direction, err) : ATTN_OK;
}

attn_status attn_copy_rows(attn_stream *stream, const attn_rows *rows, attn_direction direction, attn_error *err)
{
    const attn_backend *backend = stream->device->backend;
    const bool together = rows->count == 1 || (rows->to_pitch == rows->width && rows->from_pitch == rows->width);
    attn_status status = ATTN_OK;
    assert(rows->count <= 1 || (rows->to_pitch >= rows->width && rows->from_pitch >= rows->width));
    if (together || rows->count == 0)
        return attn_copy(stream, rows->to, rows->from, rows->count * rows->width, direction, err);
    if (rows->width == 0) return ATTN_OK;
    if (backend->copy_rows) return backend->copy_rows(stream, rows, direction, err);
    for (size_t n = 0; n < rows->count && status == ATTN_OK; n++)
        status = backend->copy(stream, (char *)rows->to + n * rows->to_pitch,
                               (const char *)rows->from + n * rows->from_pitch, rows->width, direction, err);
    return status;
}

attn_status attn_moves(attn_stream *stream, const attn_move *moves, int64_t count, attn_error *err)
{
    return count > 0 ? stream->device->backend->moves(stream, moves, count, err) : ATTN_OK;
}

attn_status attn_copy_peer(attn_stream *stream, void *to, const attn_device *source, const void *from, size_t bytes,
                           attn_error *err)
{
    const attn_backend *backend = stream->device->backend;
    assert(source->backend == backend && source != stream->device);
    if (!backend->copy_peer)
        return attn_fail(err, ATTN_UNSUPPORTED, "", "%s: there is no second device to copy from", backend->name);
    return bytes ? backend->copy_peer(stream, to, source, from, bytes, err) : ATTN_OK;
}

attn_status attn_sum_parts(attn_stream *stream, const attn_sum *sum, attn_error *err)
{
    assert(sum->count >= 1 && sum->count <= ATTN_SUM_PARTS);
    assert(sum->dtype == ATTN_F32 || sum->dtype == ATTN_F16 || sum->dtype == ATTN_BF16);
    return sum->elements > 0 ? stream->device->backend->sum(stream, sum, err) : ATTN_OK;
}

/* Checks that each tensor that is read or written has memory. attn_check() accepts an output without memory. */
static attn_status check_memory(const attn_plan *plans, int count, attn_error *err)
{
    for (int n = 0; n < count; n++)
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            const attn_problem *p = plans[n].problem;
            const attn_tensor *t = &p->tensor[id];
            int64_t elements;
            if (t->rank == 0 || t->data) continue;
            if (!attn_reads(p, (attn_tensor_id)id) && !attn_writes(p, (attn_tensor_id)id)) continue;
            if (!attn_shape_elements(t->rank, t->shape, &elements) || elements > 0)
                return attn_fail(err, ATTN_INVALID, "", "%s: has no memory", attn_tensors[id].name);
        }
    return ATTN_OK;
}

attn_status attn_run(attn_stream *stream, const attn_plan *plans, int count, void *workspace, attn_error *err)
{
    const attn_status checked = check_memory(plans, count, err);
    if (checked != ATTN_OK) return checked;
    for (int first = 0, n; (n = next_stretch(plans, count, &first)) > 0; first += n) {
        if (attn_is_cancelled(stream->cancel)) return attn_given_up(err);
        const attn_status status = stream->device->backend->run(stream, plans + first, n, workspace, err);
        if (status != ATTN_OK) return status;
    }
    return ATTN_OK;
}

attn_status attn_run_some(attn_stream *stream, const attn_plan *plans, int count, void *workspace, int64_t *step,
                          attn_error *err)
{
    const attn_backend *backend = stream->device->backend;
    const attn_status status = check_memory(plans, count, err);
    if (status != ATTN_OK) return status;
    if (attn_is_cancelled(stream->cancel)) return attn_given_up(err);
    if (backend->run_some) return backend->run_some(stream, plans, count, workspace, step, err);
    *step = ATTN_NO_MORE_STEPS;
    return attn_run(stream, plans, count, workspace, err);
}

bool attn_stream_left_rows(attn_stream *stream)
{
    const attn_backend *backend = stream->device->backend;
    return backend->left_rows && backend->left_rows(stream);
}

static attn_status no_truth(const attn_backend *backend, attn_error *err)
{
    return attn_fail(err, ATTN_UNSUPPORTED, "", "%s devices compute nothing in float64", backend->name);
}

bool attn_has_truth(const attn_capabilities *can)
{
    return can->backend->truth_need != NULL;
}

attn_status attn_truth_need(const attn_capabilities *can, const attn_problem *problem, attn_truth_cost *cost,
                            attn_error *err)
{
    *cost = (attn_truth_cost){ 0 };
    return can->backend->truth_need ? can->backend->truth_need(can, problem, cost, err) : no_truth(can->backend, err);
}

attn_status attn_truth_some(attn_stream *stream, const attn_problem *problem, const attn_truth *results,
                            void *workspace, int64_t *step, attn_error *err)
{
    const attn_backend *backend = stream->device->backend;
    if (!backend->truth) return no_truth(backend, err);
    if (!workspace) return attn_fail(err, ATTN_INVALID, "", "the results in float64 need a workspace");
    if (attn_is_cancelled(stream->cancel)) return attn_given_up(err);
    return backend->truth(stream, problem, results, workspace, step, err);
}

attn_status attn_truth_compare(attn_stream *stream, const attn_problem *problem, const attn_truth *truth,
                               attn_truth_distance *distances, attn_error *err)
{
    const attn_backend *backend = stream->device->backend;
    if (!backend->truth_compare) return no_truth(backend, err);
    return backend->truth_compare(stream, problem, truth, distances, err);
}

void attn_stream_heed(attn_stream *stream, const int *cancel)
{
    stream->cancel = cancel;
}

void attn_stream_serve(attn_stream *stream, const void *owner)
{
    stream->owner = owner;
    stream->spent_ns = 0;
}

int64_t attn_stream_spent_ns(const attn_stream *stream)
{
    return stream->spent_ns;
}

void attn_cancel(int *cancel)
{
    __atomic_store_n(cancel, 1, __ATOMIC_RELAXED);
}

static attn_status run_one(attn_stream *stream, const attn_problem *problem, attn_op op, void *workspace,
                           attn_error *err)
{
    attn_problem p = *problem;
    attn_plan plan;
    p.op = op;
    const attn_status status = attn_plan_make(&stream->device->can, &p, &plan, err);
    return status == ATTN_OK ? attn_run(stream, &plan, 1, workspace, err) : status;
}

attn_status attn_forward(attn_stream *stream, const attn_problem *problem, void *workspace, attn_error *err)
{
    return run_one(stream, problem, ATTN_OP_FORWARD, workspace, err);
}

attn_status attn_backward(attn_stream *stream, const attn_problem *problem, void *workspace, attn_error *err)
{
    return run_one(stream, problem, ATTN_OP_BACKWARD, workspace, err);
}

attn_status attn_look(attn_stream *stream, const attn_problem *problem, void *workspace, attn_error *err)
{
    return run_one(stream, problem, ATTN_OP_OBSERVE, workspace, err);
}

attn_status attn_stream_mark(attn_stream *stream, int slot, attn_error *err)
{
    if (slot < 0 || slot >= ATTN_MARKS) return attn_fail(err, ATTN_INVALID, "", "there is no mark %d", slot);
    return stream->device->backend->mark(stream, slot, err);
}

double attn_stream_elapsed_us(attn_stream *stream, int from_slot, int to_slot)
{
    if (from_slot < 0 || from_slot >= ATTN_MARKS || to_slot < 0 || to_slot >= ATTN_MARKS) return 0;
    return stream->device->backend->elapsed_us(stream, from_slot, to_slot);
}

double attn_streams_between_us(attn_stream *from, int from_slot, attn_stream *to, int to_slot)
{
    const attn_backend *backend = from->device->backend;
    if (from_slot < 0 || from_slot >= ATTN_MARKS || to_slot < 0 || to_slot >= ATTN_MARKS) return NAN;
    return from->device == to->device && backend->between_us ? backend->between_us(from, from_slot, to, to_slot) : NAN;
}

attn_status attn_stream_done(attn_stream *stream, bool *done, attn_error *err)
{
    *done = false;
    return stream->device->backend->done(stream, done, err);
}

attn_status attn_stream_wait(attn_stream *stream, attn_error *err)
{
    return stream->device->backend->wait(stream, err);
}

attn_status attn_stream_note(attn_stream *stream, attn_error *err)
{
    const attn_backend *backend = stream->device->backend;
    return backend->note ? backend->note(stream, err)
                         : attn_fail(err, ATTN_UNSUPPORTED, "", "%s: streams take no notes", backend->name);
}

bool attn_stream_noted(const attn_stream *stream)
{
    return stream->device->backend->noted(stream);
}
