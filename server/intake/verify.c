/* verify.c: decides whether a device or the CPU verifies rows of a forward's `out`. It limits the CPU's work for
 * verifying, and for checking an lse (log-sum-exp of each row). */
#include "server/intake/verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "server/regions/regions.h"

/* alignment in bytes of each exact result (in float64) that a device computes to check a client's results */
enum { VERIFY_ALIGNMENT = 64 };

attn_status verify_check(const struct job *job, int index, int64_t *left, attn_error *err)
{
    const proto_item *const item = &job->call->items[index];
    const attn_problem *const p = &item->problem;
    if (p->op != ATTN_OP_FORWARD || p->out.rank == 0)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify", "verify: only the out of a forward can be verified");
    if (job->shared && job->shared->home >= 0)
        return attn_fail(
            err, ATTN_INVALID, "/verify",
            "verify: cannot be asked for where tensors are in the memory of a GPU that computes nothing in "
            "float64; send them in the body or in system shared memory");
    const attn_dims d = attn_dims_of(p);
    const int64_t total = attn_rows_that_exist(p);
    const int64_t rows = item->verify_rows < 0 || item->verify_rows > total ? total : item->verify_rows;
    /* preparing a head for verification costs as much as verifying one row */
    const int64_t heads = d.B * d.H;
    int64_t head, work;
    if (__builtin_mul_overflow(d.Sk, d.D + d.Dv, &head) || head > VERIFY_MAX_HEAD_ELEMENTS)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify",
                         "verify: Sk * (D + Dv) is %lld, at most %lld can be verified", (long long)d.Sk * (d.D + d.Dv),
                         (long long)VERIFY_MAX_HEAD_ELEMENTS);
    if (__builtin_mul_overflow(rows, head, &work) || work > VERIFY_MAX_MULTIPLY_ADDS)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify", "verify: at most %lld of the %lld rows can be verified here",
                         (long long)(VERIFY_MAX_MULTIPLY_ADDS / head), (long long)total);
    /* cannot overflow, because neither factor exceeds 2^30 */
    work += (rows < heads ? rows : heads) * head;
    if (work > *left && *left < VERIFY_MAX_MULTIPLY_ADDS)
        return attn_fail(
            err, ATTN_UNSUPPORTED, "/verify",
            "verify: takes %lld multiply-adds, and the problems before it leave %lld of the %lld of a body",
            (long long)work, (long long)*left, (long long)VERIFY_MAX_MULTIPLY_ADDS);
    *left = work > *left ? 0 : *left - work;
    return ATTN_OK;
}

/* Determines how much time and memory a device needs to compute the exact outputs (float64) of an item (problem).
 * Returns false if devices cannot compute them, or if there is nothing to compute. */
static bool devices_verify(const proto_item *item, const attn_capabilities *can, struct job_truth *truth)
{
    const attn_problem *const p = &item->problem;
    attn_truth_cost cost;
    attn_error ignored;
    int64_t elements;
    if (attn_is_empty(p) || attn_dims_of(p).Sk == 0 || attn_rows_that_exist(p) == 0) return false;
    if (!attn_shape_elements(p->out.rank, p->out.shape, &elements) || elements > INT64_MAX / (int64_t)sizeof(double))
        return false;
    if (attn_truth_need(can, p, &cost, &ignored) != ATTN_OK) return false;
    *truth = (struct job_truth){ .wanted = true,
                                 .bytes = (size_t)elements * sizeof(double),
                                 .workspace_bytes = cost.workspace_bytes,
                                 .seconds = cost.seconds };
    return true;
}

static attn_status add_truth(struct job *job, int index, const struct job_truth *truth, attn_error *err)
{
    if (job->truths == NULL) job->truths = calloc((size_t)job->call->count, sizeof *job->truths);
    if (job->truths == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    job->truths[index] = *truth;
    job->truth_seconds += truth->seconds;
    return ATTN_OK;
}

attn_status verify_prepare(struct job *job, int index, const attn_capabilities *can, int64_t *left, attn_error *err)
{
    const proto_item *const item = &job->call->items[index];
    const bool all = item->verify_rows < 0 || item->verify_rows >= attn_rows_that_exist(&item->problem);
    const int64_t before = *left;
    struct job_truth truth;
    const attn_status status = verify_check(job, index, left, err);
    if (item->problem.op != ATTN_OP_FORWARD || item->problem.out.rank == 0 || (status == ATTN_OK && !all) ||
        !devices_verify(item, can, &truth))
        return status;
    *left = before;
    if (add_truth(job, index, &truth, err) != ATTN_OK) return ATTN_NO_MEMORY;
    if (err) *err = (attn_error){ 0 };
    return ATTN_OK;
}

/* Returns the size in bytes of the exact values (float64) of one result, rounded up to the alignment; 0 if the exact
 * values are not wanted. */
static size_t truth_bytes(const attn_problem *p, uint64_t results, attn_tensor_id id)
{
    const size_t bytes = results >> id & 1 ? (size_t)judge_elements(p, id) * sizeof(double) : 0;
    return (bytes + VERIFY_ALIGNMENT - 1) / VERIFY_ALIGNMENT * VERIFY_ALIGNMENT;
}

size_t verify_prepare_check(struct job *job, int index, const attn_capabilities *can)
{
    const proto_item *const item = &job->call->items[index];
    const attn_problem *const p = &item->problem;
    attn_truth_cost cost;
    attn_error ignored;
    if (job->shared && job->shared->pinned_bytes > 0) return 0;
    if (!attn_has_truth(can)) return 0;
    struct job_truth truth = { .wanted = true, .results = judge_wants(p, item->results) };
    if (truth.results == 0 || attn_truth_need(can, p, &cost, &ignored) != ATTN_OK) return 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) truth.bytes += truth_bytes(p, truth.results, (attn_tensor_id)id);
    truth.workspace_bytes = cost.workspace_bytes;
    truth.seconds = cost.seconds;
    return add_truth(job, index, &truth, &ignored) == ATTN_OK ? truth.bytes : 0;
}

void verify_place_checks(struct job *job, char **at)
{
    for (int i = 0; job->truths && i < job->call->count; i++) {
        struct job_truth *const truth = &job->truths[i];
        const struct {
            attn_tensor_id id;
            double **to;
        } results[] = { { ATTN_T_out, &truth->to.out },
                        { ATTN_T_lse, &truth->to.lse },
                        { ATTN_T_dq, &truth->to.dq },
                        { ATTN_T_dk, &truth->to.dk },
                        { ATTN_T_dv, &truth->to.dv } };
        for (size_t n = 0; n < sizeof results / sizeof *results && truth->wanted; n++) {
            const size_t bytes = truth_bytes(&job->call->items[i].problem, truth->results, results[n].id);
            if (bytes > 0) *results[n].to = (double *)(void *)*at;
            *at += bytes;
        }
    }
}

void verify_drop_checks(struct job *job)
{
    job->seconds -= job->truth_seconds;
    job->worst_seconds -= job->truth_seconds;
    job->truth_seconds = 0;
    free(job->truths);
    job->truths = NULL;
}

bool verify_found_truth(const struct job *job, int index, proto_verification *verification)
{
    if (job->wants_judge || job->truths == NULL || !job->truths[index].wanted || !job->truth_known) return false;
    const attn_truth_distance *const out = &job->truth_found[index][0];
    const double relative = out->largest > 0 ? out->max_abs / out->largest : INFINITY;
    *verification = (proto_verification){ .max_abs = out->max_abs,
                                          .relative = out->max_abs == 0 ? 0 : relative,
                                          .rows = attn_rows_that_exist(&job->call->items[index].problem) };
    return true;
}

/* True if only devices can read the tensor: it is in a GPU's memory, or in shared memory that only a GPU may copy. (If
 * a client truncated its shared memory, reading it here would end the process by SIGBUS.) */
static bool only_devices_read(const struct job *job, attn_tensor_id id)
{
    for (int i = 0; job->shared && i < job->shared->count; i++) {
        const struct region_use *const use = &job->shared->list[i];
        if (use->id == id && !use->output) return use->in_place || use->pinned;
    }
    return false;
}

attn_status verify_lse(struct job *job, int index, attn_error *err)
{
    const proto_item *const item = &job->call->items[index];
    const attn_problem *const p = &item->problem;
    const int64_t share = VERIFY_LSE_MULTIPLY_ADDS / job->call->count;
    const int64_t of_bytes = VERIFY_LSE_PER_BYTE * (int64_t)job->inputs_used / job->call->count;
    if (p->lse.rank == 0 || !attn_reads(p, ATTN_T_lse)) return ATTN_OK;
    /* The server itself computed the lse of a context (saved forward), so that lse needs no check. The keys of a cache
     * transaction (request that uses KV caches) are unknown until it begins, so its lse cannot be checked here. */
    if (item->context[0] || job->transaction) return ATTN_OK;
    if (!only_devices_read(job, ATTN_T_q) && !only_devices_read(job, ATTN_T_k))
        return attn_check_lse(p, of_bytes < share ? of_bytes : share, err);
    job->lse = malloc(sizeof *job->lse);
    if (job->lse == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    attn_lse_choose(p, share, job->lse);
    if (job->lse->count > 0) return ATTN_OK;
    free(job->lse);
    job->lse = NULL;
    return ATTN_OK;
}

attn_status verify_found_lse(const struct job *job, attn_error *err)
{
    memcpy(job->lse->found, job->lse_found, sizeof job->lse->found);
    return attn_lse_judge(&job->call->items[0].problem, job->lse, err);
}
