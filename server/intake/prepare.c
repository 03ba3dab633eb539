/* prepare.c: from a decoded body to something a device can run.
 *
 * Where the tensors lie (one block, leased at the headers; a second one only when the outputs are larger than was
 * expected):
 *
 *   inputs:  | q | k | v | ... as decoded ...  | out | lse |  free  |
 *            0                                 inputs_used         bytes
 *   spare:   | out | lse | ... when they do not fit behind the inputs
 *
 * Outputs in a client's region of a GPU's memory have their place there. Every tensor here starts on a 64-byte
 * boundary. All outputs lie in one piece, so that a device with memory of its own copies them back in one piece; the
 * same holds for the inputs. */
#include "server/intake/prepare.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/caches/caches.h"
#include "server/work/contexts.h"
#include "server/regions/regions.h"
#include "server/work/steps.h"
#include "server/intake/verify.h"

enum { ALIGNMENT = 64, MOVE_ALIGNMENT = 4 /* of attn_move */ };

static bool is_output(attn_tensor_id id, attn_op op)
{
    return attn_tensors[id].role == (op == ATTN_OP_FORWARD ? ATTN_ROLE_OUT : ATTN_ROLE_OUT_BACK);
}

/* Does an item before this one use the same context? */
static bool uses_before(const struct job *job, int index)
{
    const proto_item *const items = job->call->items;
    for (int i = 0; i < index; i++)
        if (job->saved[i] && strcmp(items[i].context, items[index].context) == 0) return true;
    return false;
}

/* A backward of something saved: everything but dout, dlse and the wanted gradients comes from there. */
static attn_status resolve_context(struct job *job, int index, attn_error *err)
{
    proto_item *item = &job->call->items[index];
    attn_problem given = item->problem;
    struct job *saved;
    int saved_index;
    attn_status status;

    if (job->saved == NULL) job->saved = calloc((size_t)job->call->count, sizeof *job->saved);
    if (job->saved == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    status = contexts_take(job->contexts, job->caller, item->context, clock_ms(), &saved, &saved_index, err);
    if (status == ATTN_IN_USE && uses_before(job, index)) /* an item of the same request, which will use it up */
        return attn_fail(err, ATTN_NOT_FOUND, "/context", "context: an item before this one uses it up");
    if (status != ATTN_OK) return status;

    attn_problem *p = &item->problem;
    *p = saved->call->items[saved_index].problem;
    p->op = ATTN_OP_BACKWARD;
    p->dout = given.dout;
    p->dlse = given.dlse;
    p->deterministic = given.deterministic;
    status = proto_item_outputs(item, err);
    if (status == ATTN_OK) status = attn_check(p, err);
    if (status != ATTN_OK) { /* it is the use that is bad, not what was saved */
        contexts_finish(job->contexts, item->context, false);
        job_release(saved);
        return status;
    }
    job->saved[index] = saved;
    job->holds_contexts = true;
    return ATTN_OK;
}

/* An item that was given a context and then refused does not use it. */
static void give_context_back(struct job *job, int index)
{
    if (job->saved == NULL || job->saved[index] == NULL) return;
    contexts_finish(job->contexts, job->call->items[index].context, false);
    job_release(job->saved[index]);
    job->saved[index] = NULL;
}

/* A context needs out and lse, whether or not they are sent back. */
static attn_status complete_saved_outputs(proto_item *item, attn_error *err)
{
    static const attn_tensor_id needed[] = { ATTN_T_out, ATTN_T_lse };
    attn_status status = ATTN_OK;
    for (size_t i = 0; i < sizeof needed / sizeof *needed && status == ATTN_OK; i++)
        if (item->problem.tensor[needed[i]].rank == 0)
            status = attn_output(&item->problem, needed[i], item->result_dtype, &item->problem.tensor[needed[i]], err);
    return status;
}

/* What no backward computes is not kept for one. Of the tensors only those are looked at that decide it: reading the
 * values of masks a second time would take long. */
static attn_status check_save(const proto_item *item, const attn_device *device, attn_error *err)
{
    static const attn_tensor_id decide[] = {
        ATTN_T_q,         ATTN_T_k,         ATTN_T_v,          ATTN_T_cu_seqlens_q, ATTN_T_cu_seqlens_k,
        ATTN_T_seqlens_q, ATTN_T_seqlens_k, ATTN_T_page_table, ATTN_T_out,          ATTN_T_lse
    };
    attn_problem backward = ATTN_PROBLEM_INIT;
    attn_error why = { 0 };
    attn_plan plan;
    backward.op = ATTN_OP_BACKWARD;
    backward.layout = item->problem.layout;
    for (size_t i = 0; i < sizeof decide / sizeof *decide; i++)
        backward.tensor[decide[i]] = item->problem.tensor[decide[i]];
    backward.out.data = backward.lse.data = backward.q.data; /* they have no memory yet, and are not read */
    backward.dout = backward.out;
    attn_status status = attn_check(&backward, &why);
    if (status == ATTN_OK) status = attn_plan_make(device, &backward, &plan, &why);
    if (status == ATTN_OK) return ATTN_OK;
    return attn_fail(err, status, "/save", "save: no backward can use it; %s", why.text);
}

/* Each forward with dropout and without a seed drops other elements, in every process. The seed is below 2^53, so that
 * readers of JSON that have only doubles keep it exactly. */
static attn_status draw_seed(proto_item *item, attn_error *err)
{
    enum { BITS = 53 };
    if (item->problem.dropout_p == 0 || item->has_seed) return ATTN_OK;
    if (getrandom(&item->problem.seed, sizeof item->problem.seed, 0) != (ssize_t)sizeof item->problem.seed)
        return attn_fail(err, ATTN_INTERNAL, NULL, "no random numbers for a seed: %s", strerror(errno));
    item->problem.seed >>= 64 - BITS;
    item->has_seed = true;
    return ATTN_OK;
}

/* What a request has in clients' regions, now that its shapes are known: of a body with one problem. What lies in a
 * GPU's memory is the client's again when the request is over, and no processor can read it. */
static attn_status bind_regions(struct job *job, proto_item *item, attn_error *err)
{
    struct region_uses *const uses = job->shared;
    if (uses == NULL) return ATTN_OK;
    if (uses->home >= 0 && item->save)
        return attn_fail(
            err, ATTN_INVALID, "/save",
            "save: cannot be true where tensors are in the memory of a GPU, for that is the client's again "
            "after the request; send them in the body or in system shared memory");
    if (uses->home >= 0 && item->verify_rows != 0)
        return attn_fail(
            err, ATTN_INVALID, "/verify",
            "verify: cannot be asked for where tensors are in the memory of a GPU, which only that can read; "
            "send them in the body or in system shared memory");
    if (uses->home >= 0 && uses->home != job->part.device)
        return attn_fail(err, ATTN_INVALID, NULL,
                         "the caches are in the memory of another device than the regions of shared memory");
    return region_uses_bind(uses, &item->problem, job->step ? MOVE_ALIGNMENT : 1, err);
}

/* Those that have their place in a client's memory. */
static uint64_t elsewhere_of(const struct job *job)
{
    return job->shared ? job->shared->elsewhere : 0;
}

/* Adds what the outputs of an item need, each rounded up to the alignment, but for those of `elsewhere`. */
static attn_status count_outputs(const proto_item *item, uint64_t elsewhere, size_t *bytes, attn_error *err)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *t = &item->problem.tensor[id];
        int64_t size;
        if (!is_output((attn_tensor_id)id, item->problem.op) || t->rank == 0 || (elsewhere >> id & 1)) continue;
        if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &size) ||
            __builtin_add_overflow(*bytes, (size_t)size, bytes) ||
            __builtin_add_overflow(*bytes, (size_t)ALIGNMENT - 1, bytes))
            return attn_fail(err, ATTN_TOO_LARGE, NULL, "%s: its size does not fit in 64 bits", attn_tensors[id].name);
        *bytes = *bytes / ALIGNMENT * ALIGNMENT;
    }
    return ATTN_OK;
}

/* What an answer writes as text. */
static int64_t count_numbers(const proto_item *item)
{
    int64_t sum = 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *t = &item->problem.tensor[id];
        int64_t elements;
        if ((item->outputs >> id & 1) && attn_shape_elements(t->rank, t->shape, &elements)) sum += elements;
    }
    return sum;
}

static void place_outputs(proto_item *item, uint64_t elsewhere, char **at)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *t = &item->problem.tensor[id];
        int64_t size;
        if (!is_output((attn_tensor_id)id, item->problem.op) || t->rank == 0 || (elsewhere >> id & 1)) continue;
        t->data = *at;
        if (attn_shape_bytes(t->dtype, t->rank, t->shape, &size))
            *at += ((size_t)size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
}

static bool is_better_alone(const struct job *job)
{
    return job->wide && job->flops > PREPARE_ALONE_FLOPS &&
           (job->shared || job->inputs_used + job->outputs.bytes > MERGE_BYTES);
}

static job_kind kind_of(const struct job *job)
{
    const double most = job->wide ? PREPARE_STEP_FLOPS : PREPARE_SMALL_FLOPS;
    if (job->call->count != 1 || job->flops > most || job->tensor_bytes > PREPARE_SMALL_BYTES) return 0;
    if (is_better_alone(job)) return 0;
    if (job_problem(job, 0) == NULL) return JOB_KIND_APPEND;
    const attn_problem *p = &job->call->items[0].problem;
    const attn_dims d = attn_dims_of(p);
    if (d.H > 0xfff || d.Hk > 0xfff) return 0;
    return 1 | (job_kind)p->op << 1 | (job_kind)p->q.dtype << 2 | (job_kind)d.D << 6 | (job_kind)d.Dv << 16 |
           (job_kind)d.H << 26 | (job_kind)d.Hk << 38 | (job_kind)(job->step != NULL) << 50;
}

/* Scratch memory of all problems that will run, as a device reserves it. */
static attn_status workspace_of(const struct job *job, const attn_device *device, size_t *bytes, attn_error *err)
{
    const proto_call *call = job->call;
    attn_plan one, *plans = job->runnable == 1 ? &one : malloc((size_t)job->runnable * sizeof *plans);
    attn_status status = ATTN_OK;
    int count = 0;
    if (plans == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory for %d problems", job->runnable);
    for (int i = 0; i < call->count && status == ATTN_OK; i++)
        if (job_problem(job, i)) status = attn_plan_make(device, job_problem(job, i), &plans[count++], err);
    if (status == ATTN_OK) status = attn_workspace(device, plans, count, bytes, err);
    if (plans != &one) free(plans);
    return status;
}

/* What no device has memory for, not even alone, is not to be tried again: memory.c mirrors the inputs, the outputs
 * and what contexts saved on a device with memory of its own, and every device needs scratch memory. */
static attn_status check_fits(const struct job *job, const attn_device *device, const attn_device_info *largest,
                              attn_error *err)
{
    size_t bytes = 0;
    attn_status status;
    if (job->runnable == 0 || (job->kind != 0 && largest->memory_limit >= PREPARE_SMALL_DEVICE)) return ATTN_OK;
    if ((status = workspace_of(job, device, &bytes, err)) != ATTN_OK) return status;
    if (!largest->unified) {
        bytes += job->inputs_used + job->outputs.bytes + (job->shared ? (size_t)job->shared->pinned_bytes : 0);
        for (int i = 0; job->saved && i < job->call->count; i++) {
            const struct job *saved = job->saved[i];
            for (int before = 0; saved && before < i; before++)
                if (job->saved[before] == saved) saved = NULL;
            if (saved) bytes += saved->inputs_used + saved->outputs.bytes;
        }
    }
    const int64_t limit = largest->memory_limit - (job->caches ? caches_held_bytes(job->caches) : 0);
    if ((int64_t)bytes <= limit) return ATTN_OK;
    return attn_fail(err, ATTN_TOO_LARGE, NULL,
                     "%zu bytes of device memory are needed for inputs, outputs and scratch memory, the limit is %lld "
                     "(--device-bytes)",
                     bytes, (long long)limit);
}

/* Adds the cost of a problem to the job's. *most: the seconds of the costliest problem so far. */
static void add_cost(struct job *job, const attn_cost *cost, double *most)
{
    job->flops += cost->flops;
    job->seconds += cost->seconds;
    job->worst_seconds += cost->worst;
    if (cost->seconds <= *most) return;
    *most = cost->seconds;
    job->because = cost->because;
}

/* Of a body with several problems that of the most urgent. */
static int64_t priority_of(const proto_call *call)
{
    int64_t first = PROTO_PRIORITY_USUAL;
    for (int i = 0; i < call->count; i++) {
        const int64_t own = call->items[i].priority > 0 ? call->items[i].priority : PROTO_PRIORITY_USUAL;
        if (i == 0 || own < first) first = own;
    }
    return first;
}

/* Tensors in this process's own memory, to which nothing else writes now. Caches and tensors in a GPU's memory are not
 * among them, nor tensors that a GPU copies from a client's pages. */
static uint64_t readable_of(const struct job *job)
{
    if (job->step || (job->shared && (job->shared->home >= 0 || job->shared->pinned_bytes > 0))) return 0;
    return ATTN_EVERYTHING;
}

void prepare_look_closer(struct job *job, const attn_device *device, const attn_device_info *largest)
{
    const uint64_t draw = (uint64_t)clock_ns();
    double costliest = 0;
    const bool looks = job->worst_seconds > PREPARE_STRANGE_S && job->worst_seconds > PREPARE_STRANGE * job->seconds;
    if (job->seconds < PREPARE_CLOSER_S && !looks) return;
    job->flops = job->seconds = job->worst_seconds = 0;
    for (int i = 0; i < job->call->count; i++) {
        const attn_problem *p = job_problem(job, i);
        attn_error ignored;
        attn_plan plan;
        if (p == NULL || attn_plan_make(device, p, &plan, &ignored) != ATTN_OK) continue;
        const attn_cost cost = attn_cost_closer(largest, &plan, looks ? readable_of(job) : 0, draw + (uint64_t)i);
        add_cost(job, &cost, &costliest);
    }
}

attn_status prepare_job(struct job *job, const attn_device *device, const attn_device_info *largest, attn_error *err)
{
    proto_call *call = job->call;
    const proto_operation *const operation = &proto_operations[call->op];
    size_t bytes = 0;
    int saves = 0;
    int64_t verify_left = VERIFY_MAX_MULTIPLY_ADDS, numbers = 0;
    double costliest = 0;
    attn_status status;

    job->because = "";
    for (int i = 0; i < call->count; i++) {
        proto_item *item = &call->items[i];
        attn_error *error = &item->error;
        if (error->status == ATTN_OK && item->context[0]) resolve_context(job, i, error);
        if (error->status == ATTN_OK && operation->takes_caches) error->status = step_prepare(job, error);
        if (error->status == ATTN_OK) bind_regions(job, item, error);
        if (error->status == ATTN_OK && operation->op == ATTN_OP_FORWARD) draw_seed(item, error);
        attn_plan plan; /* that there is one: the device that will run it makes its own */
        if (job_problem(job, i)) attn_plan_make(device, &item->problem, &plan, error);
        if (error->status == ATTN_OK) verify_lse(job, i, error);
        if (error->status == ATTN_OK && item->save) complete_saved_outputs(item, error);
        if (error->status == ATTN_OK && item->save) check_save(item, device, error);
        if (error->status == ATTN_OK && item->verify_rows != 0) verify_check(item, &verify_left, error);
        if (error->status == ATTN_OK) count_outputs(item, elsewhere_of(job), &bytes, error);
        if (error->status != ATTN_OK) {
            give_context_back(job, i);
            if (call->sequence.start) /* it has not started, and who goes on does not go on with one before it */
                caches_end_sequence(job->caches, job->caller, call->sequence.id);
            if (!call->envelope) {
                if (err) *err = *error;
                return error->status;
            }
            continue;
        }
        job->runnable += proto_is_run(operation);
        if (job_problem(job, i)) {
            const attn_cost cost = attn_cost_of(largest, &plan);
            add_cost(job, &cost, &costliest);
        }
        job->wants_verify |= item->verify_rows != 0 || job->lse != NULL;
        if (proto_writes_numbers(call, item)) numbers += count_numbers(item);
        saves += item->save;
    }

    /* The inputs' end is kept a line away from the outputs: threads of a device write there while others read here. */
    const size_t used = (call->memory_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const size_t found = job->lse ? (sizeof job->lse->found + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : 0;
    char *at = NULL;
    bytes += found; /* a few KB: no sum of sizes that fit comes near SIZE_MAX */
    if (bytes > 0) {
        if (job->inputs && used <= job->inputs->bytes && bytes <= job->inputs->bytes - used)
            at = (char *)job->inputs->memory + used;
        else {
            status = staging_lease(job->staging, job->caller, bytes, &job->spare, err);
            if (status != ATTN_OK) return status;
            at = job->spare->memory;
        }
    }
    job->outputs = (struct job_region){ at, bytes };
    for (int i = 0; i < call->count; i++)
        if (call->items[i].error.status == ATTN_OK) place_outputs(&call->items[i], elsewhere_of(job), &at);
    if (found > 0) job->lse_found = at, at += found;
    assert(bytes == 0 || at == job->outputs.memory + bytes);
    if (job->shared && call->items[0].error.status == ATTN_OK &&
        (status = bind_regions(job, &call->items[0], err)) != ATTN_OK) /* it was not the first time */
        return status;
    job->tensor_bytes = (job->inputs ? job->inputs->bytes : 0) + (job->spare ? job->spare->bytes : 0);
    job->wide = job->step && !largest->unified;
    job->kind = kind_of(job);
    job->priority = priority_of(call);
    job->wants_measure = numbers > PREPARE_MEASURE_AT_ONCE;
    if ((status = check_fits(job, device, largest, err)) != ATTN_OK) return status;

    if (saves == 0) return ATTN_OK;
    job->wants_save = true;
    for (int i = 0; i < call->count; i++) {
        attn_error *error = &call->items[i].error;
        if (error->status != ATTN_OK || !call->items[i].save) continue;
        status = contexts_reserve(job->contexts, job, i, error);
        job->holds_contexts |= status == ATTN_OK;
        if (status == ATTN_OK) continue;
        job->runnable--;
        if (!call->envelope) {
            if (err) *err = *error;
            return status;
        }
    }
    return ATTN_OK;
}
