/* sums.c: the gradients that are sums over all queries, such as dk and dv, of a job that is cut by queries.
 *
 *     part 0: dk of its queries      dv      |  part 1: dk  dv  |  ...  |  rounded dk, dv
 *     float32, each tensor at a multiple of MERGE_LINE bytes            |  only for outputs in clients' pinned memory
 *
 * Each part computes these gradients of its own queries in float32, and they are copied to the job's memory for sums.
 * When all parts are back, the sums of the parts are added in the order of the parts, in float32, and rounded once to
 * the dtype of the result. Which queries a part has depends on the problem and on the number of devices of the server,
 * and not on their load. The same request therefore gets the same bits each time.
 *
 * A client may truncate a shared object while its pages are pinned, and the CPU's write there would raise SIGBUS. Sums
 * that a client wants in pinned memory are therefore written to the job's memory, and copied like results in memory
 * that is not pinned. */
#include "server/device/internal.h"

#include <assert.h>
#include <math.h>

#include "kernels/dtype.h"
#include "server/base/caller.h"
#include "server/regions/regions.h"

/* Returns the tensor in which a part of a job sums up an output over its own queries. */
static attn_tensor partial_of(const attn_tensor *result, void *memory)
{
    return attn_tensor_make(memory, ATTN_F32, result->rank, result->shape);
}

/* Returns the bytes of one part's sums; 0: no output of the problem is a sum over queries. */
static size_t part_bytes(const attn_problem *p)
{
    size_t bytes = 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (attn_is_sum_of_queries(p, (attn_tensor_id)id)) {
            const attn_tensor sums = partial_of(&p->tensor[id], NULL);
            bytes += lines_of(&sums);
        }
    return bytes;
}

bool sums_are_needed(const attn_problem *p)
{
    return part_bytes(p) > 0;
}

/* True if the CPU may not write this output, because it lies in a client's pinned memory. */
static bool is_pinned_sum(const struct job *job, const struct region_use *use)
{
    return use->output && use->pinned && attn_is_sum_of_queries(job_problem(job, 0), use->id);
}

/* Returns how many bytes a job may use for the sums of its parts: half of the staging memory that its own tensors leave
 * to its caller. Otherwise one request could need more memory than its caller can ever get. */
static size_t most_bytes(const struct job *job)
{
    const int64_t share = caller_share(job->caller, staging_limit_bytes(job->staging)),
                  left = share - (int64_t)job->tensor_bytes;
    return left > 0 ? (size_t)left / 2 : 0;
}

attn_status sums_reserve(struct job *job, int count, attn_error *err)
{
    attn_problem *const p = job_problem(job, 0);
    struct region_uses *const uses = job->shared;
    size_t bytes = (size_t)count * part_bytes(p);
    char *at;
    assert(job->sums == NULL && bytes > 0);
    for (int i = 0; uses && i < uses->count; i++)
        if (is_pinned_sum(job, &uses->list[i])) bytes += lines_of(&p->tensor[uses->list[i].id]);
    if (bytes > most_bytes(job))
        return attn_fail(err, ATTN_TOO_LARGE, NULL, "%zu bytes of sums are needed, too many for --staging-bytes",
                         bytes);
    const attn_status status = staging_lease(job->staging, job->caller, bytes, &job->sums, err);
    if (status != ATTN_OK) return status;
    at = (char *)job->sums->memory + (size_t)count * part_bytes(p);
    for (int i = 0; uses && i < uses->count; i++) {
        struct region_use *const use = &uses->list[i];
        if (!is_pinned_sum(job, use)) continue;
        use->pinned = NULL;
        use->memory = p->tensor[use->id].data = at;
        at += lines_of(&p->tensor[use->id]);
    }
    job->sum_parts = count;
    job->tensor_bytes += job->sums->bytes;
    job->kind = 0; /* the job runs in parts, and never in a batch with others */
    return ATTN_OK;
}

void sums_place(const struct job_part *part, attn_problem *problem)
{
    const attn_problem *const whole = job_problem(part->job, 0);
    if (part->job->sums == NULL) return;
    char *at = (char *)part->job->sums->memory + (size_t)part->number * part_bytes(whole);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (!attn_is_sum_of_queries(whole, (attn_tensor_id)id)) continue;
        problem->tensor[id] = partial_of(&whole->tensor[id], at);
        at += lines_of(&problem->tensor[id]);
    }
}

void sums_as_float(attn_problem *problem)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (attn_is_sum_of_queries(problem, (attn_tensor_id)id)) problem->tensor[id].dtype = ATTN_F32;
}

static int64_t elements_of(const attn_tensor *t)
{
    int64_t elements = 0;
    /* attn_shape_elements() cannot fail here, because the tensor was checked before */
    (void)attn_shape_elements(t->rank, t->shape, &elements);
    return elements;
}

int64_t sums_elements(const struct job *job)
{
    const attn_problem *const p = job_problem(job, 0);
    int64_t elements = 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (attn_is_sum_of_queries(p, (attn_tensor_id)id)) elements += elements_of(&p->tensor[id]);
    return elements;
}

/* Elements that are added at a time. Loops with this constant count become vector instructions. */
enum { BLOCK = 1024 };

static void add_block(float *restrict sums, const float *restrict more)
{
    for (int n = 0; n < BLOCK; n++) sums[n] += more[n];
}

/* Rounds as attn_bf16_from_f32() does, without a branch. */
static void round_bf16(uint16_t *restrict to, const float *restrict sums)
{
    for (int n = 0; n < BLOCK; n++) {
        const uint32_t bits = attn_f32_bits(sums[n]), nan = 0x7fc0u | (bits >> 16 & 0x8000u);
        const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        to[n] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

/* Rounds as attn_f16_from_f32() does, to the nearest number and in a tie to the even one, without a branch. The sign is
 * put back at the end. */
static void round_f16(uint16_t *restrict to, const float *restrict sums)
{
    const uint32_t infinity = 0x7f800000u;
    /* float32 bits of 65536, the first number that is too large, and of 2^-14, the smallest normal number of float16 */
    const uint32_t too_large = 0x47800000u, normal = 0x38800000u;
    for (int n = 0; n < BLOCK; n++) {
        const uint32_t bits = attn_f32_bits(sums[n]), size = bits & 0x7fffffffu;
        /* Adding 0.5 rounds a small number to a multiple of 2^-24, the distance of float16's subnormal numbers. */
        const uint32_t small = attn_f32_bits(fabsf(sums[n]) + 0.5f) - 0x3f000000u;
        /* The exponent's bias changes from 127 to 15. A carry of the rounding may reach the exponent. */
        const uint32_t usual = (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13;
        const uint32_t finite = size < normal ? small : usual;
        const uint32_t code = size >= too_large ? 0x7c00u : finite;
        to[n] = (uint16_t)(size > infinity ? 0x7e00u : code | (bits >> 16 & 0x8000u));
    }
}

/* Rounds `count` sums, at most BLOCK, to the result's dtype and writes them to the result from element `at` on. `sums`
 * has room for BLOCK elements. */
static void store(const attn_tensor *t, int64_t at, const float *sums, int count)
{
    uint16_t rounded[BLOCK];
    if (t->dtype == ATTN_F32) {
        memcpy((float *)t->data + at, sums, (size_t)count * sizeof *sums);
        return;
    }
    if (t->dtype == ATTN_BF16) round_bf16(rounded, sums);
    else round_f16(rounded, sums);
    memcpy((uint16_t *)t->data + at, rounded, (size_t)count * sizeof *rounded);
}

/* Adds up elements `at` to end - 1 of one output over all parts of the job. `memory`: the first part's sums for this
 * output. */
static void add(const attn_tensor *result, const char *memory, size_t part_bytes, int parts, int64_t at, int64_t end)
{
    float sums[BLOCK] = { 0 }, last[BLOCK] = { 0 };
    for (; at < end; at += BLOCK) {
        const int count = end - at < BLOCK ? (int)(end - at) : BLOCK;
        memcpy(sums, (const float *)memory + at, (size_t)count * sizeof *sums);
        for (int part = 1; part < parts; part++) {
            const float *const more = (const float *)(memory + (size_t)part * part_bytes) + at;
            if (count < BLOCK) memcpy(last, more, (size_t)count * sizeof *last);
            add_block(sums, count < BLOCK ? last : more);
        }
        store(result, at, sums, count);
    }
}

void sums_add(const struct job *job, int64_t first, int64_t end)
{
    const attn_problem *const p = job_problem(job, 0);
    const char *memory = job->sums->memory;
    int64_t before = 0; /* number of elements of all outputs in front of the present output */
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *const t = &p->tensor[id];
        if (!attn_is_sum_of_queries(p, (attn_tensor_id)id)) continue;
        const attn_tensor sums = partial_of(t, NULL);
        const int64_t elements = elements_of(t);
        const int64_t from = first > before ? first - before : 0,
                      to = end - before < elements ? end - before : elements;
        if (from < to) add(t, memory, part_bytes(p), job->sum_parts, from, to);
        memory += lines_of(&sums);
        before += elements;
    }
}
