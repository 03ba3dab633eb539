/* plain.c: two simple devices. Each runs a computation whose code is written to be read, not to be fast.
 *
 *     device       computes by    why
 *     reference    reference.c    every option, one row at a time: it defines what is correct
 *     paper        paper.c        FlashAttention-2 as in its paper; the best place to begin reading the kernels
 *
 * Memory comes from malloc(). One thread computes, and a call returns when its work is done. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/cpu/plain.h"
#include "kernels/cpu/reference.h"

/* ---- What differs between the devices `reference` and `paper` ---------------------------------------------------- */

struct plain {
    const attn_backend *backend;
    const char *description;
    attn_status (*run)(const attn_problem *p, const int *cancel, attn_error *err);
    attn_kernel kernels[ATTN_OP_COUNT + 1]; /* the list of the device's kernels; it ends with an entry without a name */
};

static attn_status run_reference(const attn_problem *p, const int *cancel, attn_error *err)
{
    return reference_run(p, NULL, cancel, err);
}

/* The features that paper.c supports. Each query head has a key/value head of its own, all rows of the batch have the
 * same length, and only causal masks and windows are allowed. */
#define PAPER_FEATURES                                                                                            \
    (ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v) | ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(lse) | \
     ATTN_TENSOR_BIT(dout) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) |                    \
     ATTN_OPTION_BIT(CAUSAL) | ATTN_OPTION_BIT(WINDOW) | ATTN_OPTION_BIT(TOP_LEFT) | ATTN_OPTION_BIT(SCALE) |     \
     ATTN_OPTION_BIT(DETERMINISTIC) | ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(DOUT_DTYPE))

/* clang-format off: each row of the table is a line */
static const struct plain plains[] = {
    { &attn_backend_reference,
      "textbook loops in double, one thread",
      run_reference,
      { { "double", ATTN_OP_FORWARD, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, ATTN_EVERYTHING, true },
        { "double", ATTN_OP_BACKWARD, ATTN_DTYPES_BACKWARD, ATTN_MAX_HEAD_DIM, ATTN_ALL_SCORES, true },
        { "double", ATTN_OP_OBSERVE, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, ATTN_EVERYTHING, true } } },
    { &attn_backend_paper,
      "FlashAttention-2 as in its paper, in double, one thread",
      paper_run,
      { { "flash2", ATTN_OP_FORWARD, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, PAPER_FEATURES, true },
        { "flash2", ATTN_OP_BACKWARD, ATTN_DTYPES_BACKWARD, ATTN_MAX_HEAD_DIM, PAPER_FEATURES, true } } },
};
/* clang-format on */

static const struct plain *plain_of(const attn_device *device)
{
    return device->backend == plains[0].backend ? &plains[0] : &plains[1];
}

/* ---- Code that the devices `reference` and `paper` share --------------------------------------------------------- */

struct plain_stream {
    attn_stream base;
    struct timespec marks[ATTN_MARKS];
};

static int count_devices(void)
{
    return 1;
}

static attn_status open_plain(const attn_backend *backend, int index, attn_device **device, attn_error *err)
{
    *device = calloc(1, sizeof **device);
    if (!*device) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory for a device");
    (*device)->backend = backend;
    (*device)->index = index;
    attn_capabilities *const can = &(*device)->can;
    for (const attn_kernel *one = plain_of(*device)->kernels; one->name; one++) can->kernels[can->kernel_count++] = one;
    return ATTN_OK;
}

static attn_status open_reference(int index, const attn_device_options *options, attn_device **device, attn_error *err)
{
    (void)options;
    return open_plain(&attn_backend_reference, index, device, err);
}

static attn_status open_paper(int index, const attn_device_options *options, attn_device **device, attn_error *err)
{
    (void)options;
    return open_plain(&attn_backend_paper, index, device, err);
}

static void close_device(attn_device *device)
{
    free(device);
}

static void describe(const attn_device *device, attn_device_info *info)
{
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    info->backend = device->backend->name;
    strcpy(info->name, device->backend->name);
    strcpy(info->description, plain_of(device)->description);
    /* an upper bound on the speed of the devices of this file, which compute one double at a time on one thread */
    info->fastest_flops = 1e10;
    info->fastest_scores = 1e9;
    info->units = 1;
    info->unified = true;
    info->streams = 1;
    info->memory_total = info->memory_limit = pages > 0 && page > 0 ? (int64_t)pages * page : 0;
}

static attn_status allocate(attn_device *device, size_t bytes, void **memory, attn_error *err)
{
    const size_t line = 64;
    (void)device;
    *memory = bytes > SIZE_MAX - line ? NULL
                                      : aligned_alloc(line, bytes < line ? line : (bytes + line - 1) / line * line);
    return *memory ? ATTN_OK : attn_fail(err, ATTN_NO_MEMORY, "", "no memory for %zu bytes", bytes);
}

static void release(attn_device *device, void *memory)
{
    (void)device, free(memory);
}

static void release_staging(attn_device *device, void *memory, size_t bytes)
{
    (void)device, (void)bytes, free(memory);
}

static attn_status workspace(const attn_capabilities *can, const attn_plan *plans, int count, size_t *bytes,
                             attn_error *err)
{
    (void)can, (void)plans, (void)count, (void)err;
    *bytes = 0;
    return ATTN_OK;
}

static attn_status open_stream(attn_device *device, attn_stream **stream, attn_error *err)
{
    struct plain_stream *s = calloc(1, sizeof *s);
    if (!s) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory for a stream");
    s->base.device = device;
    *stream = &s->base;
    return ATTN_OK;
}

static void close_stream(attn_stream *stream)
{
    free(stream);
}

static attn_status copy(attn_stream *stream, void *to, const void *from, size_t bytes, attn_direction direction,
                        attn_error *err)
{
    (void)stream, (void)direction, (void)err;
    memmove(to, from, bytes);
    return ATTN_OK;
}

static attn_status moves(attn_stream *stream, const attn_move *list, int64_t count, attn_error *err)
{
    (void)stream, (void)err;
    for (int64_t i = 0; i < count; i++)
        if (list[i].from) memcpy(list[i].to, list[i].from, list[i].bytes);
        else memset(list[i].to, 0, list[i].bytes);
    return ATTN_OK;
}

static attn_status sum(attn_stream *stream, const attn_sum *parts, attn_error *err)
{
    (void)stream, (void)err;
    attn_sum_all(parts);
    return ATTN_OK;
}

static attn_status merge(attn_stream *stream, const attn_merge_plan *plan, attn_error *err)
{
    (void)stream, (void)err;
    attn_merge_all(plan);
    return ATTN_OK;
}

static attn_status run(attn_stream *stream, const attn_plan *plans, int count, void *memory, attn_error *err)
{
    attn_status status = ATTN_OK;
    (void)memory;
    for (int n = 0; n < count && status == ATTN_OK; n++) {
        attn_fill_padding(plans[n].problem);
        status = plain_of(stream->device)->run(plans[n].problem, stream->cancel, err);
    }
    return status;
}

static attn_status mark(attn_stream *stream, int slot, attn_error *err)
{
    (void)err;
    clock_gettime(CLOCK_MONOTONIC, &((struct plain_stream *)stream)->marks[slot]);
    return ATTN_OK;
}

static double elapsed_us(attn_stream *stream, int from_slot, int to_slot)
{
    const struct timespec *from = &((struct plain_stream *)stream)->marks[from_slot];
    const struct timespec *to = &((struct plain_stream *)stream)->marks[to_slot];
    return (double)(to->tv_sec - from->tv_sec) * 1e6 + (double)(to->tv_nsec - from->tv_nsec) * 1e-3;
}

static attn_status done(attn_stream *stream, bool *is_done, attn_error *err)
{
    (void)stream, (void)err;
    *is_done = true;
    return ATTN_OK;
}

static attn_status wait_stream(attn_stream *stream, attn_error *err)
{
    (void)stream, (void)err;
    return ATTN_OK;
}

/* clang-format off, because each row of the table is a function */
#define PLAIN(named, opener)                                                                                          \
    {                                                                                                                 \
        .name = named, .count = count_devices, .open = opener, .close = close_device, .describe = describe,           \
        .device_alloc = allocate, .device_free = release, .staging_alloc = allocate, .staging_free = release_staging, \
        .workspace = workspace, .stream_open = open_stream, .stream_close = close_stream, .copy = copy,               \
        .moves = moves, .sum = sum, .run = run, .merge = merge, .mark = mark, .elapsed_us = elapsed_us, .done = done, \
        .wait = wait_stream,                                                                                          \
    }
/* clang-format on */

const attn_backend attn_backend_reference = PLAIN("reference", open_reference);
const attn_backend attn_backend_paper = PLAIN("paper", open_paper);
