/* cpu.c: the backend "cpu", FlashAttention on all cores. This file implements devices, their memory, streams and time
 * stamps.
 *
 * A device owns one pool of threads. A call on a stream returns when its work is done, because the calling thread takes
 * part in the work. Device memory and staging memory (for copies to and from a device) are both plain memory of the
 * host, and share one limit. Each block of memory is preceded by 64 bytes that hold its size. No workspace is used by
 * two runs at the same time. */
#include <assert.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/reference.h"
#include "kernels/machine.h"

enum {
    HEADER_BYTES = 64,
    /* size of the operating system's huge pages; a block of memory of at least twice this size is put into huge pages,
     * which saves page faults and TLB misses */
    HUGE_PAGE_BYTES = 2 << 20,
    /* number of batches of problems that are computed at the same time, each on its own thread; a core without work in
     * one of the two batches helps with the other batch */
    STREAMS = 2,
};

/* Upper bounds on the speed of one thread, by instruction set (simd.h). `flops`, in floating point operations per
 * second, is three times the speed of the fastest core measured so far (kernels/MEASUREMENTS.md, "The CPU kernels").
 * For arm64 it is three times the peak of a core with four vector units at 3.5 GHz. FASTEST_SCORES is in scores per
 * second: softmax takes half a clock cycle per score on the widest vectors. */
static const struct {
    const char *name;
    double flops;
    /* Floating point operations of a core per clock: two per multiply-add, times the lanes of a vector, times the
     * multiply-add units. AMX multiplies tiles of 16 x 32 and 32 x 16 numbers in 16 clocks. */
    int a_clock;
} fastest[] = { { "amx", 3e12, 1024 }, { "bf16", 8e11, 128 },        { "avx512", 6e11, 64 }, { "avx2", 3e11, 32 },
                { "neon", 4e11, 32 },  { "neon_bf16", 1.5e12, 128 }, { "portable", 1e11, 8 } };
#define FASTEST_SCORES 1e10

struct cpu_device {
    attn_device base;
    struct pool *pool;
    const struct simd *simd;
    /* the fast kernels, one for each operation (forward, backward, observe); FLASH_FEATURES says which problems they
     * compute */
    attn_kernel fast[ATTN_OP_COUNT];
    struct facts {
        const struct simd *simd;
        int64_t threads;
    } facts; /* attn_capabilities.facts points to this struct */
    int64_t memory_total, memory_limit;
    double hertz;
    _Atomic int64_t memory_used;
};

struct cpu_stream {
    attn_stream base;
    struct timespec marks[ATTN_MARKS];
};

/* The kernel "double" computes every checked problem, whatever its tensors and options, but slowly (reference.h). */
static const attn_kernel general[ATTN_OP_COUNT] = {
    { "double", ATTN_OP_FORWARD, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, ATTN_EVERYTHING, true },
    { "double", ATTN_OP_BACKWARD, ATTN_DTYPES_BACKWARD, ATTN_MAX_HEAD_DIM, ATTN_ALL_SCORES, true },
    { "double", ATTN_OP_OBSERVE, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, ATTN_EVERYTHING, true },
};

static bool is_general(const attn_plan *plan)
{
    return plan->kernel == &general[plan->kernel->op];
}

/* ---- Memory of the device ---------------------------------------------------------------------------------------- */

static attn_status device_alloc(attn_device *base, size_t bytes, void **memory, attn_error *err)
{
    struct cpu_device *device = (struct cpu_device *)base;
    const size_t most = SIZE_MAX / 2;
    const size_t alignment = bytes >= 2 * (size_t)HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : HEADER_BYTES;
    *memory = NULL;
    if (bytes > most || (int64_t)bytes > device->memory_limit)
        return attn_fail(err, ATTN_NO_MEMORY, "", "cpu: %zu bytes are over the limit of %lld", bytes,
                         (long long)device->memory_limit);
    const size_t total = (bytes + HEADER_BYTES + alignment - 1) / alignment * alignment;
    const int64_t used = atomic_fetch_add(&device->memory_used, (int64_t)total) + (int64_t)total;
    char *block = used <= device->memory_limit ? aligned_alloc(alignment, total) : NULL;
    if (!block) {
        atomic_fetch_sub(&device->memory_used, (int64_t)total);
        return attn_fail(err, ATTN_NO_MEMORY, "", "cpu: no memory for %zu bytes: %lld of %lld are in use", bytes,
                         (long long)(used - (int64_t)total), (long long)device->memory_limit);
    }
#ifdef MADV_HUGEPAGE
    /* if madvise() fails, the work is only slower */
    if (alignment == HUGE_PAGE_BYTES) madvise(block, total, MADV_HUGEPAGE);
#endif
    memcpy(block, &total, sizeof total);
    *memory = block + HEADER_BYTES;
    return ATTN_OK;
}

static void device_free(attn_device *base, void *memory)
{
    struct cpu_device *device = (struct cpu_device *)base;
    char *block = (char *)memory - HEADER_BYTES;
    size_t total;
    memcpy(&total, block, sizeof total);
    const int64_t used = atomic_fetch_sub(&device->memory_used, (int64_t)total);
    assert(used >= (int64_t)total);
    (void)used;
    free(block);
}

static void staging_free(attn_device *device, void *memory, size_t bytes)
{
    (void)bytes;
    device_free(device, memory);
}

/* ---- Opening and describing the device --------------------------------------------------------------------------- */

static int count_devices(void)
{
    return 1;
}

static attn_status open_device(int index, const attn_device_options *options, attn_device **out, attn_error *err)
{
    struct cpu_device *device = calloc(1, sizeof *device);
    struct attn_machine machine;
    *out = NULL;
    if (!device) return attn_fail(err, ATTN_NO_MEMORY, "", "cpu: no memory for a device");
    device->base.backend = &attn_backend_cpu;
    device->base.index = index;
    device->simd = simd_get();
    for (int op = ATTN_OP_FORWARD; op < ATTN_OP_COUNT; op++)
        device->fast[op] = (attn_kernel){ device->simd->name,
                                          (attn_op)op,
                                          general[op].dtypes,
                                          general[op].head_dim,
                                          FLASH_FEATURES & general[op].features,
                                          true };
    attn_machine_look("", &machine);
    device->memory_total = machine.memory_bytes;
    device->hertz = machine.hertz;
    device->memory_limit = options->memory_bytes > 0 ? options->memory_bytes : device->memory_total / 4 * 3;
    const attn_status status = pool_open(options->threads, device->simd->leave, &device->pool, err);
    if (status != ATTN_OK) {
        free(device);
        return status;
    }
    device->facts = (struct facts){ device->simd, pool_threads(device->pool) };
    attn_capabilities *const can = &device->base.can;
    for (int op = 0; op < ATTN_OP_COUNT; op++) {
        can->kernels[op] = &device->fast[op];
        can->kernels[op + ATTN_OP_COUNT] = &general[op];
    }
    can->kernel_count = 2 * ATTN_OP_COUNT;
    can->facts = &device->facts;
    can->facts_bytes = sizeof device->facts;
    *out = &device->base;
    return ATTN_OK;
}

static void close_device(attn_device *base)
{
    struct cpu_device *device = (struct cpu_device *)base;
    pool_close(device->pool);
    free(device);
}

static void describe(const attn_device *base, attn_device_info *info)
{
    const struct cpu_device *device = (const struct cpu_device *)base;
    const int threads = pool_threads(device->pool);
    info->backend = "cpu";
    snprintf(info->name, sizeof info->name, "cpu");
    snprintf(info->description, sizeof info->description, "%d thread%s, %s, %lld GiB", threads, threads == 1 ? "" : "s",
             device->simd->name, (long long)(device->memory_total >> 30));
    for (size_t i = 0; i < sizeof fastest / sizeof *fastest; i++) {
        if (strcmp(fastest[i].name, device->simd->name) != 0) continue;
        info->fastest_flops = fastest[i].flops * threads;
        info->peak_flops = device->hertz * fastest[i].a_clock * threads;
        if (device->hertz > 0)
            snprintf(info->peak_from, sizeof info->peak_from, "%d threads, %d operations a clock (%s), %.2f GHz",
                     threads, fastest[i].a_clock, fastest[i].name, device->hertz / 1e9);
    }
    info->fastest_scores = FASTEST_SCORES * threads;
    info->units = threads;
    info->unified = true;
    info->streams = threads < STREAMS ? threads : STREAMS;
    info->memory_total = device->memory_total;
    info->memory_limit = device->memory_limit;
    info->memory_used = atomic_load(&((struct cpu_device *)base)->memory_used);
}

/* Returns how many consecutive plans, from number `first` on, the fast kernels (FlashAttention) compute together as
 * one run; 0 if plan `first` needs the kernel "double". */
static int flash_stretch(const attn_plan *plans, int count, int first)
{
    int n = 0;
    while (first + n < count && !is_general(&plans[first + n])) n++;
    return n;
}

/* Computes the bytes of workspace that all plans together need. Consecutive plans form runs, which use one workspace in
 * turn, so the result is the maximum over the runs. The kernel "double" needs no workspace. */
static attn_status workspace_bytes(const attn_capabilities *can, const attn_plan *plans, int count, size_t *bytes,
                                   attn_error *err)
{
    const struct facts *const facts = can->facts;
    attn_status status = ATTN_OK;
    *bytes = 0;
    for (int first = 0, n; first < count && status == ATTN_OK; first += n > 0 ? n : 1) {
        size_t part = 0;
        n = flash_stretch(plans, count, first);
        if (n > 0) status = flash_run_bytes(facts->simd, (int)facts->threads, plans + first, n, &part, err);
        if (part > *bytes) *bytes = part;
    }
    return status;
}

/* ---- Streams, and the work on them ------------------------------------------------------------------------------- */

static attn_status stream_open(attn_device *device, attn_stream **out, attn_error *err)
{
    struct cpu_stream *stream = calloc(1, sizeof *stream);
    *out = NULL;
    if (!stream) return attn_fail(err, ATTN_NO_MEMORY, "", "cpu: no memory for a stream");
    stream->base.device = device;
    *out = &stream->base;
    return ATTN_OK;
}

static void stream_close(attn_stream *stream)
{
    free(stream);
}

static attn_status copy(attn_stream *stream, void *to, const void *from, size_t bytes, attn_direction direction,
                        attn_error *err)
{
    (void)stream, (void)direction, (void)err;
    /* `to` and `from` may be the same memory */
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

static attn_status run_flash(attn_stream *stream, const attn_plan *plans, int count, void *workspace, attn_error *err)
{
    struct cpu_device *device = (struct cpu_device *)stream->device;
    void *own = NULL;
    if (!workspace) {
        size_t bytes;
        attn_status status = flash_run_bytes_exact(device->simd, pool_threads(device->pool), plans, count, &bytes, err);
        if (status == ATTN_OK) status = device_alloc(&device->base, bytes, &own, err);
        if (status != ATTN_OK) return status;
        workspace = own;
    }
    const bool all = flash_run(device->simd, device->pool, plans, count, workspace, stream->cancel);
    if (own) device_free(&device->base, own);
    return all ? ATTN_OK : attn_given_up(err);
}

static attn_status run(attn_stream *stream, const attn_plan *plans, int count, void *workspace, attn_error *err)
{
    struct cpu_device *device = (struct cpu_device *)stream->device;
    struct pool_part part;
    attn_status status = ATTN_OK;
    for (int n = 0; n < count; n++) attn_fill_padding(plans[n].problem);
    pool_begin(device->pool, &part, stream->owner, stream->cancel);
    for (int first = 0, n; first < count && status == ATTN_OK; first += n > 0 ? n : 1) {
        n = flash_stretch(plans, count, first);
        status = n > 0 ? run_flash(stream, plans + first, n, workspace, err)
                       : reference_run(plans[first].problem, device->pool, stream->cancel, err);
    }
    stream->spent_ns += pool_end(device->pool, &part);
    return status;
}

static attn_status sum(attn_stream *stream, const attn_sum *parts, attn_error *err)
{
    (void)stream, (void)err;
    attn_sum_all(parts);
    return ATTN_OK;
}

enum { MERGED_ROWS = 64 }; /* number of rows of a merge that one item (unit of parallel work) computes */

struct merging {
    const attn_merge_plan *plan;
    const int *cancel;
};

static void merge_item(void *context, int worker, int64_t item)
{
    const struct merging *merging = context;
    const int64_t first = item * MERGED_ROWS;
    (void)worker;
    if (attn_is_cancelled(merging->cancel)) return;
    attn_merge_rows(merging->plan, first, attn_min64(first + MERGED_ROWS, attn_merge_count(merging->plan)));
}

static void merge_sink(void *context, int worker, int64_t h)
{
    const struct merging *merging = context;
    (void)worker;
    if (!attn_is_cancelled(merging->cancel)) attn_merge_sink(merging->plan, h);
}

static attn_status merge(attn_stream *stream, const attn_merge_plan *plan, attn_error *err)
{
    struct cpu_device *device = (struct cpu_device *)stream->device;
    struct pool_part part;
    struct merging merging = { plan, stream->cancel };
    pool_begin(device->pool, &part, stream->owner, stream->cancel);
    pool_run(device->pool, attn_tiles(attn_merge_count(plan), MERGED_ROWS), merge_item, &merging);
    if (plan->dsinks) pool_run(device->pool, plan->H, merge_sink, &merging);
    stream->spent_ns += pool_end(device->pool, &part);
    return attn_is_cancelled(stream->cancel) ? attn_given_up(err) : ATTN_OK;
}

static attn_status mark(attn_stream *base, int slot, attn_error *err)
{
    (void)err;
    clock_gettime(CLOCK_MONOTONIC, &((struct cpu_stream *)base)->marks[slot]);
    return ATTN_OK;
}

static double elapsed_us(attn_stream *base, int from_slot, int to_slot)
{
    const struct timespec *a = &((struct cpu_stream *)base)->marks[from_slot],
                          *b = &((struct cpu_stream *)base)->marks[to_slot];
    return (double)(b->tv_sec - a->tv_sec) * 1e6 + (double)(b->tv_nsec - a->tv_nsec) / 1e3;
}

static attn_status done(attn_stream *stream, bool *is_done, attn_error *err)
{
    (void)stream, (void)err;
    *is_done = true;
    return ATTN_OK;
}

static attn_status wait_for_stream(attn_stream *stream, attn_error *err)
{
    (void)stream, (void)err;
    return ATTN_OK;
}

const attn_backend attn_backend_cpu = {
    .name = "cpu",
    .count = count_devices,
    .open = open_device,
    .close = close_device,
    .describe = describe,
    .device_alloc = device_alloc,
    .device_free = device_free,
    .staging_alloc = device_alloc,
    .staging_free = staging_free,
    .workspace = workspace_bytes,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .copy = copy,
    .moves = moves,
    .sum = sum,
    .run = run,
    .merge = merge,
    .mark = mark,
    .elapsed_us = elapsed_us,
    .done = done,
    .wait = wait_for_stream,
};
