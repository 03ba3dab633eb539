/* check_truth.c: computes exact results on a GPU for `attnd check`. */
#include "server/check_truth.h"

#include <stdlib.h>
#include <string.h>

#include "text/text.h"

enum { RESULTS = 5, BLOCKS = ATTN_TENSOR_COUNT + RESULTS + 1 };

struct gpu {
    attn_device *device;
    attn_stream *stream;
    void *blocks[BLOCKS];
    int count;
};

static attn_status open_gpu(struct gpu *gpu, const char *backend, int index, attn_error *err)
{
    const attn_status status = attn_device_open(backend, index, NULL, &gpu->device, err);
    return status == ATTN_OK ? attn_stream_open(gpu->device, &gpu->stream, err) : status;
}

static void close_gpu(struct gpu *gpu)
{
    if (gpu->stream) attn_stream_close(gpu->stream);
    for (int n = 0; n < gpu->count; n++) attn_device_free(gpu->device, gpu->blocks[n]);
    attn_device_close(gpu->device);
}

static attn_status take(struct gpu *gpu, size_t bytes, void **memory, attn_error *err)
{
    const attn_status status = attn_device_alloc(gpu->device, bytes > 0 ? bytes : 1, memory, err);
    if (status == ATTN_OK) gpu->blocks[gpu->count++] = *memory;
    return status;
}

/* Copies a problem's tensors to the GPU, and sets their addresses there. */
static attn_status copy_in(struct gpu *gpu, attn_problem *p, attn_error *err)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *const t = &p->tensor[id];
        const void *const host = t->data;
        int64_t bytes;
        if (t->rank == 0) continue;
        if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes))
            return attn_fail(err, ATTN_TOO_LARGE, "", "%s: its size does not fit in 64 bits", attn_tensors[id].name);
        attn_status status = take(gpu, (size_t)bytes, &t->data, err);
        if (status == ATTN_OK && bytes > 0)
            status = attn_copy(gpu->stream, t->data, host, (size_t)bytes, ATTN_TO_DEVICE, err);
        if (status != ATTN_OK) return status;
    }
    return ATTN_OK;
}

/* Lists the arrays of exact results (float64), in an order that is the same for host memory and GPU memory. */
static void list_results(attn_truth *truth, double **list[RESULTS], attn_tensor_id ids[RESULTS])
{
    double **const all[RESULTS] = { &truth->out, &truth->lse, &truth->dq, &truth->dk, &truth->dv };
    static const attn_tensor_id named[RESULTS] = { ATTN_T_out, ATTN_T_lse, ATTN_T_dq, ATTN_T_dk, ATTN_T_dv };
    memcpy(list, all, sizeof all);
    memcpy(ids, named, sizeof named);
}

static attn_status compute(struct gpu *gpu, const proto_item *item, uint64_t wants, struct check_truth *truth,
                           attn_error *err)
{
    attn_problem p = item->problem;
    attn_truth there = { 0 };
    attn_truth_cost cost;
    double **host[RESULTS], **device[RESULTS], *at;
    attn_tensor_id ids[RESULTS];
    int64_t total = 0, step = 0;
    void *workspace;
    attn_status status = attn_truth_need(attn_device_capabilities(gpu->device), &p, &cost, err);
    list_results(&there, device, ids);
    list_results(&truth->results, host, ids);
    for (int n = 0; n < RESULTS; n++) total += wants >> ids[n] & 1 ? judge_elements(&p, ids[n]) : 0;
    at = truth->memory = malloc((size_t)total * sizeof *at);
    if (!at) return attn_fail(err, ATTN_NO_MEMORY, "", "out of memory");
    for (int n = 0; n < RESULTS && status == ATTN_OK; n++) {
        void *memory;
        if (!(wants >> ids[n] & 1)) continue;
        const int64_t elements = judge_elements(&p, ids[n]);
        status = take(gpu, (size_t)elements * sizeof *at, &memory, err);
        *device[n] = memory, *host[n] = at, at += elements;
    }
    if (status == ATTN_OK) status = take(gpu, cost.workspace_bytes, &workspace, err);
    if (status == ATTN_OK) status = copy_in(gpu, &p, err);
    while (status == ATTN_OK && step != ATTN_NO_MORE_STEPS) {
        status = attn_truth_some(gpu->stream, &p, &there, workspace, &step, err);
        if (status == ATTN_OK) status = attn_stream_wait(gpu->stream, err);
    }
    for (int n = 0; n < RESULTS && status == ATTN_OK; n++)
        if (wants >> ids[n] & 1)
            status = attn_copy(gpu->stream, *host[n], *device[n], (size_t)judge_elements(&p, ids[n]) * sizeof *at,
                               ATTN_FROM_DEVICE, err);
    return status == ATTN_OK ? attn_stream_wait(gpu->stream, err) : status;
}

/* Returns the name of this build's GPU backend, or NULL if the build supports only the CPU. */
static const char *gpu_backend(void)
{
    for (const char *const *name = attn_backends(); *name; name++)
        if (attn_is_gpu(*name)) return *name;
    return NULL;
}

attn_status check_truth_compute(const char *devices, const proto_item *item, struct check_truth *truth, bool *computed,
                                attn_error *err)
{
    const char *const backend = gpu_backend();
    const int gpus = backend ? attn_device_count(backend) : 0;
    const bool any = strcmp(devices, "auto") == 0;
    struct gpu gpu = { 0 };
    uint64_t index = 0;
    *computed = false;
    *truth = (struct check_truth){ 0 };
    if (strcmp(devices, "cpu") == 0 || (any && gpus == 0)) return ATTN_OK;
    const char *const end = any ? "" : text_read_number(devices, &index);
    if (!end || *end != '\0')
        return attn_fail(err, ATTN_INVALID, "", "--devices: '%.100s' is not auto, cpu or the number of a GPU", devices);
    if (index >= (uint64_t)gpus)
        return attn_fail(err, ATTN_INVALID, "", "--devices: there is no GPU %.20s, there %s %d", devices,
                         gpus == 1 ? "is" : "are", gpus);
    const uint64_t wants = judge_wants(&item->problem, item->results);
    if (wants == 0) return ATTN_OK;
    attn_status status = open_gpu(&gpu, backend, (int)index, err);
    if (status == ATTN_OK) status = compute(&gpu, item, wants, truth, err);
    close_gpu(&gpu);
    *computed = status == ATTN_OK;
    return any ? ATTN_OK : status;
}

void check_truth_free(struct check_truth *truth)
{
    free(truth->memory);
    truth->memory = NULL;
}
