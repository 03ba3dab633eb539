/* prepare.c: turns a decoded request body into a job that a device can run. The tensors lie in one block, and in a
 * second one only if the outputs are larger than expected:
 *
 *   inputs:  | q | k | v | ... as decoded ...  | out | lse |  free  |
 *            0                                 inputs_used         bytes
 *   spare:   | out | lse | ... when they do not fit after the inputs
 *
 * Every tensor starts on a 64-byte boundary. All outputs are contiguous, and so are all inputs, so that a device copies
 * all inputs at once, and all outputs at once. If the client wants an output in GPU memory that it has registered, the
 * output lies there. */
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
#include "server/work/transaction.h"
#include "server/intake/verify.h"

enum { ALIGNMENT = 64, MOVE_ALIGNMENT = 4 /* MOVE_ALIGNMENT: byte alignment of copies within a device's memory */ };

/* Returns output number `number` of one item (a problem of the body), or NULL if this output needs no memory. A forward
 * with `save` needs memory for outputs that the answer does not contain. */
static attn_tensor *output_of(proto_item *item, uint64_t elsewhere, int number)
{
    if (number < ATTN_TENSOR_COUNT && (elsewhere >> number & 1)) return NULL;
    if (number >= ATTN_TENSOR_COUNT || item->parts) return proto_item_result(item, number);
    if (!attn_writes(&item->problem, (attn_tensor_id)number)) return NULL;
    return item->problem.tensor[number].rank > 0 ? &item->problem.tensor[number] : NULL;
}

static bool uses_before(const struct job *job, int index)
{
    const proto_item *const items = job->call->items;
    for (int i = 0; i < index; i++)
        if (job->saved[i] && strcmp(items[i].context, items[index].context) == 0) return true;
    return false;
}

/* Completes the backward of a saved forward (context) with the forward's tensors and options. */
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
    /* the context (a saved forward) can be used only once, and an earlier problem of this request uses it */
    if (status == ATTN_IN_USE && uses_before(job, index))
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
    /* the error is in the tensors of this backward, because the saved ones were checked with the forward */
    if (status != ATTN_OK) {
        contexts_finish(job->contexts, item->context, false);
        job_release(saved);
        return status;
    }
    job->saved[index] = saved;
    job->holds_contexts = true;
    return ATTN_OK;
}

static void give_context_back(struct job *job, int index)
{
    if (job->saved == NULL || job->saved[index] == NULL) return;
    contexts_finish(job->contexts, job->call->items[index].context, false);
    job_release(job->saved[index]);
    job->saved[index] = NULL;
}

/* Adds the outputs that a context (saved forward) needs, `out` and `lse`, if the request does not ask for them. */
static attn_status complete_saved_outputs(proto_item *item, attn_error *err)
{
    static const attn_tensor_id needed[] = { ATTN_T_out, ATTN_T_lse };
    attn_status status = ATTN_OK;
    for (size_t i = 0; i < sizeof needed / sizeof *needed && status == ATTN_OK; i++)
        if (item->problem.tensor[needed[i]].rank == 0)
            status = attn_output(&item->problem, needed[i], item->result_dtype, &item->problem.tensor[needed[i]], err);
    return status;
}

/* Refuses `save` for a forward whose backward no kernel could compute. Masks are not examined, because reading their
 * values again would be slow. */
static attn_status check_save(const proto_item *item, const attn_capabilities *can, attn_error *err)
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
    /* the outputs have no memory yet, and the check only needs addresses that are not NULL */
    backward.out.data = backward.lse.data = backward.q.data;
    backward.dout = backward.out;
    attn_status status = attn_check(&backward, &why);
    if (status == ATTN_OK) status = attn_plan_make(can, &backward, &plan, &why);
    if (status == ATTN_OK) return ATTN_OK;
    return attn_fail(err, status, "/save", "save: no backward can use it; %s", why.text);
}

/* Draws a seed for a forward with dropout whose client gave no seed, so that each call drops different elements. The
 * seed is below 2^53, so that JSON readers that store numbers as doubles do not change it. */
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

/* Sets the addresses of the tensors in clients' registered memory (regions). If tensors are in a GPU's memory, two
 * things are refused: `save`, because the client may change the tensors later, and a check of results, because the CPU
 * cannot read the tensors. */
static attn_status bind_regions(struct job *job, proto_item *item, attn_error *err)
{
    struct region_uses *const uses = job->shared;
    if (uses == NULL) return ATTN_OK;
    if (uses->home >= 0 && item->save)
        return attn_fail(
            err, ATTN_INVALID, "/save",
            "save: cannot be true where tensors are in the memory of a GPU, for that is the client's again "
            "after the request; send them in the body or in system shared memory");
    if (uses->home >= 0 && job->wants_judge)
        return attn_fail(
            err, ATTN_INVALID, NULL,
            "a check cannot read tensors in the memory of a GPU; send them in the body or in system shared "
            "memory");
    if (uses->home >= 0 && uses->home != job->part.device)
        return attn_fail(err, ATTN_INVALID, NULL,
                         "the caches are in the memory of another device than the regions of shared memory");
    return region_uses_bind(uses, &item->problem, job->transaction ? MOVE_ALIGNMENT : 1, err);
}

static uint64_t elsewhere_of(const struct job *job)
{
    return job->shared ? job->shared->elsewhere : 0;
}

/* Adds to *bytes the sizes of an item's (problem's) outputs, each rounded up to the alignment. Outputs in the set
 * `elsewhere` are left out. */
static attn_status count_outputs(proto_item *item, uint64_t elsewhere, size_t *bytes, attn_error *err)
{
    for (int n = 0, end = proto_item_results_end(item); n < end; n++) {
        const attn_tensor *t = output_of(item, elsewhere, n);
        char name[PROTO_NAME_BYTES];
        int64_t size;
        if (t == NULL) continue;
        if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &size) ||
            __builtin_add_overflow(*bytes, (size_t)size, bytes) ||
            __builtin_add_overflow(*bytes, (size_t)ALIGNMENT - 1, bytes))
            return attn_fail(err, ATTN_TOO_LARGE, NULL, "%s: its size does not fit in 64 bits",
                             proto_tensor_name(n, true, name));
        *bytes = *bytes / ALIGNMENT * ALIGNMENT;
    }
    return ATTN_OK;
}

static int64_t count_numbers(proto_item *item)
{
    int64_t sum = 0;
    for (int n = 0, end = proto_item_results_end(item); n < end; n++) {
        const attn_tensor *const t = proto_item_result(item, n);
        int64_t elements;
        if (t && attn_shape_elements(t->rank, t->shape, &elements)) sum += elements;
    }
    return sum;
}

static void place_outputs(proto_item *item, uint64_t elsewhere, char **at)
{
    for (int n = 0, end = proto_item_results_end(item); n < end; n++) {
        attn_tensor *const t = output_of(item, elsewhere, n);
        int64_t size;
        if (t == NULL) continue;
        t->data = *at;
        if (attn_shape_bytes(t->dtype, t->rank, t->shape, &size))
            *at += ((size_t)size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
}

static bool is_better_alone(const struct job *job)
{
    return job->memory_bound && job->flops > PREPARE_ALONE_FLOPS &&
           (job->shared || job->inputs_used + job->outputs.bytes > MERGE_BYTES);
}

static job_kind kind_of(const struct job *job)
{
    const double most = job->memory_bound ? PREPARE_STEP_FLOPS : PREPARE_SMALL_FLOPS;
    if (job->call->count != 1 || job->flops > most || job->tensor_bytes > PREPARE_SMALL_BYTES) return 0;
    if (is_better_alone(job) || job->wants_judge || job->truths || proto_operations[job->call->op].merges) return 0;
    if (job_problem(job, 0) == NULL) return JOB_KIND_APPEND;
    const attn_problem *p = &job->call->items[0].problem;
    if (p->op == ATTN_OP_OBSERVE) return 0;
    const attn_dims d = attn_dims_of(p);
    if (d.H > 0xfff || d.Hk > 0xfff) return 0;
    return 1 | (job_kind)p->op << 1 | (job_kind)p->q.dtype << 2 | (job_kind)d.D << 6 | (job_kind)d.Dv << 16 |
           (job_kind)d.H << 26 | (job_kind)d.Hk << 38 | (job_kind)(job->transaction != NULL) << 50;
}

static attn_status workspace_of(const struct job *job, const attn_capabilities *can, size_t *bytes, attn_error *err)
{
    const int all = job->call->count;
    int count = 0;
    if (all == 1) return attn_workspace(can, job->plans, job_problem(job, 0) != NULL, bytes, err);
    attn_plan *const plans = malloc((size_t)all * sizeof *plans);
    if (plans == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory for %d problems", all);
    for (int i = 0; i < all; i++)
        if (job_problem(job, i)) plans[count++] = job->plans[i];
    const attn_status status = attn_workspace(can, plans, count, bytes, err);
    free(plans);
    return status;
}

/* Returns how many bytes of device memory a job needs for the scratch memory of kernels (`workspace`) and for exact
 * outputs in float64. Items (problems) are verified one after the other, so only the largest exact output counts. Exact
 * results for comparison with a client's results lie in the memory of the outputs, and do not count. */
static size_t truth_memory(const struct job *job, size_t workspace)
{
    size_t out = 0;
    for (int i = 0; job->truths && i < job->call->count; i++) {
        const struct job_truth *const truth = &job->truths[i];
        if (truth->bytes > out && !job->wants_judge) out = truth->bytes;
        if (truth->workspace_bytes > workspace) workspace = truth->workspace_bytes;
    }
    return workspace + out;
}

/* Refuses a job that needs more memory than the largest device has. A device with its own memory needs copies of the
 * job's tensors; every device needs scratch memory. */
static attn_status check_fits(const struct job *job, const attn_capabilities *can, const attn_device_info *largest,
                              attn_error *err)
{
    size_t bytes = 0;
    attn_status status;
    const bool needs_none = job->runnable == 0 || (job->wants_judge && !job->truths);
    if (needs_none || (job->kind != 0 && largest->memory_limit >= PREPARE_SMALL_DEVICE)) return ATTN_OK;
    if ((status = workspace_of(job, can, &bytes, err)) != ATTN_OK) return status;
    bytes = truth_memory(job, bytes);
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

/* Adds the cost of one problem to the job. *most is the time in seconds of the costliest problem so far. */
static void add_cost(struct job *job, const attn_cost *cost, double *most)
{
    job->flops += cost->flops;
    job->bytes += cost->bytes;
    job->seconds += cost->seconds;
    job->worst_seconds += cost->worst;
    if (cost->seconds <= *most) return;
    *most = cost->seconds;
    job->because = cost->because;
}

/* If a device computes exact outputs (float64) of an item (problem), adds the time for this to the job's cost. */
static void add_truth(struct job *job, int index, double *most)
{
    if (job->truths == NULL || !job->truths[index].wanted) return;
    const double seconds = job->truths[index].seconds;
    const attn_cost cost = { .seconds = seconds, .worst = seconds, .because = "verify" };
    add_cost(job, &cost, most);
}

/* In a check request, the client's results are compared with exact ones (float64). Decides whether a device computes
 * the exact results, and adds the check's cost to the job. Returns the size in bytes of these exact results, which lie
 * in the memory of the outputs; 0: no device computes them. The comparison on the CPU costs at most PREPARE_JUDGE_S,
 * because it checks only some rows if time is short. */
static size_t add_judge(struct job *job, int index, const attn_capabilities *can)
{
    const size_t bytes = verify_prepare_check(job, index, can);
    const double seconds = judge_cost_of(&job->call->items[index].problem).truth;
    job->seconds += seconds < PREPARE_JUDGE_S ? seconds : PREPARE_JUDGE_S;
    if (job->truths && job->truths[index].wanted) job->seconds += job->truths[index].seconds;
    job->worst_seconds = job->seconds;
    return bytes;
}

/* Adds to the job's cost the time for counting the query-key pairs of an item (problem); see attn_counter. */
static void add_count(struct job *job, const proto_item *item)
{
    const double step_s = 1e-9;
    const double seconds = item->counts ? attn_count_work(&item->problem, proto_tile(item)) * step_s : 0;
    job->seconds += seconds;
    job->worst_seconds += seconds;
}

static attn_status check_count(struct job *job, const proto_item *item, attn_error *err)
{
    attn_counter *counter;
    if (!item->counts) return ATTN_OK;
    const attn_status status = attn_counter_open(&item->problem, proto_tile(item), &counter, err);
    if (status != ATTN_OK) return status;
    (void)attn_counter_close(counter);
    job->wants_count = true;
    return ATTN_OK;
}

static int64_t priority_of(const proto_call *call)
{
    int64_t first = PROTO_PRIORITY_USUAL;
    for (int i = 0; i < call->count; i++) {
        const int64_t own = call->items[i].priority > 0 ? call->items[i].priority : PROTO_PRIORITY_USUAL;
        if (i == 0 || own < first) first = own;
    }
    return first;
}

/* Returns a bit mask of the tensors that are in this process's own memory and that no other thread or process writes
 * now. */
static uint64_t readable_of(const struct job *job)
{
    if (job->transaction || (job->shared && (job->shared->home >= 0 || job->shared->pinned_bytes > 0))) return 0;
    return ATTN_EVERYTHING;
}

void prepare_look_closer(struct job *job, const attn_device_info *largest)
{
    const uint64_t draw = (uint64_t)clock_ns();
    double costliest = 0;
    if (job->wants_judge) return;
    const bool looks = job->worst_seconds > PREPARE_STRANGE_S && job->worst_seconds > PREPARE_STRANGE * job->seconds;
    if ((job->seconds < PREPARE_CLOSER_S && !looks) || proto_operations[job->call->op].merges) return;
    job->flops = job->bytes = job->seconds = job->worst_seconds = 0;
    for (int i = 0; i < job->call->count; i++) {
        if (job_problem(job, i) == NULL) continue;
        const attn_cost cost = attn_cost_closer(largest, &job->plans[i], looks ? readable_of(job) : 0,
                                                draw + (uint64_t)i);
        add_cost(job, &cost, &costliest);
        add_truth(job, i, &costliest);
        add_count(job, &job->call->items[i]);
    }
}

/* A device may compute numbers besides the results, to check the lse of a backward or to verify a forward's outputs (no
 * job has both). Returns how many bytes of the outputs' memory these numbers take. */
static size_t found_bytes(const struct job *job)
{
    size_t bytes = 0;
    assert(job->lse == NULL || job->truths == NULL);
    if (job->wants_judge) return 0;
    if (job->lse) bytes = sizeof job->lse->found;
    else if (job->truths) bytes = (size_t)job->call->count * sizeof *job->truth_found;
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Takes *bytes bytes of memory for the outputs: after the inputs in their block, or in a second block. If there is no
 * memory for the exact results of a check, sets *bytes to 0. The CPU then computes the exact results later
 * (kernels/judge/judge.h). */
static attn_status take_outputs(struct job *job, size_t *bytes, char **at, attn_error *err)
{
    /* inputs and outputs share no cache line, because threads write outputs while others read inputs */
    const size_t used = (job->call->memory_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    *at = NULL;
    if (*bytes == 0) return ATTN_OK;
    if (job->inputs && used <= job->inputs->bytes && *bytes <= job->inputs->bytes - used) {
        *at = (char *)job->inputs->memory + used;
        return ATTN_OK;
    }
    const attn_status status = staging_lease(job->staging, job->caller, *bytes, &job->spare, err);
    if (status == ATTN_OK) *at = job->spare->memory;
    if (status == ATTN_OK || !job->wants_judge) return status;
    verify_drop_checks(job);
    *bytes = 0;
    return ATTN_OK;
}

attn_status prepare_job(struct job *job, const attn_capabilities *can, const attn_device_info *largest, attn_error *err)
{
    proto_call *call = job->call;
    const proto_operation *const operation = &proto_operations[call->op];
    size_t bytes = 0;
    int saves = 0;
    int64_t verify_left = VERIFY_MAX_MULTIPLY_ADDS, numbers = 0;
    double costliest = 0;
    attn_status status;

    job->because = "";
    job->wants_judge = operation->judges;
    job->plans = malloc((size_t)call->count * sizeof *job->plans);
    if (job->plans == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory for %d problems", call->count);
    for (int i = 0; i < call->count; i++) {
        proto_item *item = &call->items[i];
        attn_error *error = &item->error;
        if (error->status == ATTN_OK && item->context[0]) resolve_context(job, i, error);
        if (error->status == ATTN_OK && proto_uses_caches(call->op, item))
            error->status = transaction_prepare(job, error);
        if (error->status == ATTN_OK) bind_regions(job, item, error);
        if (error->status == ATTN_OK && operation->op == ATTN_OP_FORWARD) draw_seed(item, error);
        if (error->status == ATTN_OK && item->save) complete_saved_outputs(item, error);
        if (job_problem(job, i)) attn_plan_make(can, &item->problem, &job->plans[i], error);
        if (error->status == ATTN_OK) verify_lse(job, i, error);
        if (error->status == ATTN_OK && item->save) check_save(item, can, error);
        if (error->status == ATTN_OK) check_count(job, item, error);
        if (error->status == ATTN_OK && item->verify_rows != 0) verify_prepare(job, i, can, &verify_left, error);
        if (error->status == ATTN_OK) count_outputs(item, elsewhere_of(job), &bytes, error);
        if (error->status != ATTN_OK) {
            give_context_back(job, i);
            /* the failed request would have started a new sequence of this name; a later request must not continue the
             * old one */
            if (call->sequence.start) caches_end_sequence(job->caches, job->caller, call->sequence.id);
            if (!call->envelope) {
                if (err) *err = *error;
                return error->status;
            }
            continue;
        }
        job->runnable += proto_is_run(operation);
        if (job_problem(job, i) || operation->merges) {
            const attn_merge_problem merge = operation->merges ? proto_item_merge(item) : (attn_merge_problem){ 0 };
            const attn_cost cost = operation->merges ? attn_merge_cost(largest, &merge)
                                                     : attn_cost_of(largest, &job->plans[i]);
            add_cost(job, &cost, &costliest);
            add_truth(job, i, &costliest);
            add_count(job, item);
        } else if (operation->judges) bytes += add_judge(job, i, can);
        job->wants_verify |= item->verify_rows != 0 || job->lse != NULL;
        if (proto_writes_numbers(call, item)) numbers += count_numbers(item);
        saves += item->save;
    }

    bytes += found_bytes(job); /* found_bytes() returns at most 100 KB, so the sum cannot overflow */
    char *at = NULL;
    if ((status = take_outputs(job, &bytes, &at, err)) != ATTN_OK) return status;
    job->outputs = (struct job_region){ at, bytes };
    for (int i = 0; i < call->count; i++)
        if (call->items[i].error.status == ATTN_OK) place_outputs(&call->items[i], elsewhere_of(job), &at);
    if (job->wants_judge) verify_place_checks(job, &at);
    else if (job->lse) job->lse_found = at;
    else if (job->truths) job->truth_found = (void *)at;
    at += found_bytes(job);
    assert(bytes == 0 || at == job->outputs.memory + bytes);
    if (job->shared && call->items[0].error.status == ATTN_OK &&
        /* cannot fail, because an earlier call with the same arguments has succeeded */
        (status = bind_regions(job, &call->items[0], err)) != ATTN_OK)
        return status;
    job->tensor_bytes = (job->inputs ? job->inputs->bytes : 0) + (job->spare ? job->spare->bytes : 0);
    job->memory_bound = job->transaction && !largest->unified;
    job->kind = kind_of(job);
    job->priority = priority_of(call);
    job->wants_measure = numbers > PREPARE_MEASURE_AT_ONCE;
    status = check_fits(job, can, largest, err);
    if (status != ATTN_OK && !job->wants_judge) return status;
    if (status != ATTN_OK) verify_drop_checks(job);

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
