/* memory.c: device memory of a batch. A unified device (the CPU) computes in staging memory, without copies. On a
 * device with its own memory, each region of a job's host memory (inputs, outputs, or a saved forward) has a mirror:
 * one block of device memory, copied in one piece. Pointers of tensors are translated from the region to the mirror.
 * Tensors in clients' pinned host memory have a mirror each, because they may overlap. slot->regions lists mirrors by
 * host address for a binary search, because a batch may have thousands of regions. */
#include "server/device/internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "server/regions/regions.h"
#include "server/work/transaction.h"

void memory_drop_mirrors(struct device *device, struct slot *slot)
{
    for (int i = 0; i < slot->mirror_count; i++) attn_device_free(device->handle, slot->mirrors[i].device);
    slot->mirror_count = slot->region_count = 0;
}

static bool widen(struct slot *slot)
{
    const int room = slot->mirror_room ? 2 * slot->mirror_room : 64;
    struct mirror *const mirrors = realloc(slot->mirrors, (size_t)room * sizeof *mirrors);
    if (mirrors) slot->mirrors = mirrors;
    int *const regions = mirrors ? realloc(slot->regions, (size_t)room * sizeof *regions) : NULL;
    if (regions) slot->regions = regions;
    if (regions) slot->mirror_room = room;
    return regions != NULL;
}

static attn_status add_mirror(struct device *device, struct slot *slot, struct mirror one, size_t bytes, void **memory,
                              attn_error *err)
{
    if (slot->mirror_count == slot->mirror_room && !widen(slot))
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    const attn_status status = attn_device_alloc(device->handle, bytes, memory, err);
    if (status != ATTN_OK) return status;
    one.device = *memory;
    slot->mirrors[slot->mirror_count++] = one;
    return ATTN_OK;
}

static const struct mirror *region_at(const struct slot *slot, int place)
{
    return &slot->mirrors[slot->regions[place]];
}

/* Returns how many regions of host memory with a mirror (device copy) begin at or below this address. Only the last of
 * them may contain it. */
static int regions_up_to(const struct slot *slot, const char *address)
{
    int low = 0, high = slot->region_count;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (region_at(slot, middle)->host.memory <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Allocates a mirror (device memory) for a region of host memory, unless the region has one already. `copy` tells
 * whether the region's bytes must later be copied to the mirror. */
static attn_status mirror(struct device *device, struct slot *slot, struct job_region host, bool copy, attn_error *err)
{
    void *memory;
    if (host.bytes == 0) return ATTN_OK;
    const int place = regions_up_to(slot, host.memory);
    const struct mirror *const before = place > 0 ? region_at(slot, place - 1) : NULL;
    if (before && before->host.memory == host.memory) return ATTN_OK;
    assert(before == NULL || before->host.memory + before->host.bytes <= host.memory);
    assert(place == slot->region_count || host.memory + host.bytes <= region_at(slot, place)->host.memory);
    const attn_status status = add_mirror(device, slot, (struct mirror){ host, NULL, copy }, host.bytes, &memory, err);
    if (status != ATTN_OK) return status;
    memmove(slot->regions + place + 1, slot->regions + place,
            (size_t)(slot->region_count++ - place) * sizeof *slot->regions);
    slot->regions[place] = slot->mirror_count - 1;
    return ATTN_OK;
}

attn_status memory_take(struct device *device, struct slot *slot, size_t bytes, void **memory, attn_error *err)
{
    /* memory that mirrors no host memory is in slot->mirrors too, so that it is freed together with the mirrors */
    return add_mirror(device, slot, (struct mirror){ { NULL, 0 }, NULL, false }, bytes, memory, err);
}

void *memory_address(const struct slot *slot, void *address)
{
    const int count = regions_up_to(slot, address);
    const struct mirror *const m = count > 0 ? region_at(slot, count - 1) : NULL;
    if (m && (char *)address < m->host.memory + m->host.bytes) return m->device + ((char *)address - m->host.memory);
    /* not in a region with a mirror (device copy): the tensor has no elements, or is on the device already */
    return address;
}

void memory_place(const struct slot *slot, attn_problem *problem)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (problem->tensor[id].rank > 0) problem->tensor[id].data = memory_address(slot, problem->tensor[id].data);
    if (problem->prefix_keys) problem->prefix_keys = memory_address(slot, (void *)problem->prefix_keys);
}

static attn_status take_pinned(struct device *device, struct slot *slot, struct region_uses *uses, attn_error *err)
{
    attn_status status = ATTN_OK;
    for (int i = 0; uses && i < uses->count && status == ATTN_OK; i++) {
        struct region_use *const use = &uses->list[i];
        if (use->pinned == NULL) continue;
        const struct job_region host = { use->pinned, (size_t)use->bytes };
        status = add_mirror(device, slot, (struct mirror){ host, NULL, !use->output }, host.bytes, &use->mirror, err);
    }
    return status;
}

void memory_place_pinned(const struct job *job, attn_problem *problem)
{
    for (int i = 0; job->shared && i < job->shared->count; i++) {
        const struct region_use *const use = &job->shared->list[i];
        if (use->pinned) problem->tensor[use->id].data = use->mirror;
    }
}

attn_status memory_take_mirrors(struct device *device, struct slot *slot, struct job *job, attn_error *err)
{
    attn_status status = ATTN_OK;
    if (job->inputs)
        status = mirror(device, slot, (struct job_region){ job->inputs->memory, job->inputs_used }, true, err);
    for (int i = 0; status == ATTN_OK && job->saved && i < job->call->count; i++) {
        struct job *saved = job->saved[i];
        if (saved == NULL || job->call->items[i].error.status != ATTN_OK) continue;
        if (saved->inputs)
            status = mirror(device, slot, (struct job_region){ saved->inputs->memory, saved->inputs_used }, true, err);
        if (status == ATTN_OK) status = mirror(device, slot, saved->outputs, true, err);
    }
    if (status == ATTN_OK && job->tables)
        status = mirror(device, slot, (struct job_region){ job->tables->memory, job->tables_used }, true, err);
    if (status == ATTN_OK) status = take_pinned(device, slot, job->shared, err);
    return status == ATTN_OK ? mirror(device, slot, job->outputs, false, err) : status;
}

attn_status memory_copy_in(struct slot *slot, attn_error *err)
{
    attn_status status = ATTN_OK;
    for (int i = 0; i < slot->mirror_count && status == ATTN_OK; i++) {
        const struct mirror *m = &slot->mirrors[i];
        if (m->copy) status = attn_copy(slot->stream, m->device, m->host.memory, m->host.bytes, ATTN_TO_DEVICE, err);
    }
    return status;
}

attn_status memory_copy_out(struct device *device, struct slot *slot, struct job *job, attn_error *err)
{
    (void)device;
    attn_status status = ATTN_OK;
    for (int i = 0; job->shared && i < job->shared->count && status == ATTN_OK; i++) {
        const struct region_use *const use = &job->shared->list[i];
        if (use->pinned && use->output)
            status = attn_copy(slot->stream, use->pinned, use->mirror, (size_t)use->bytes, ATTN_FROM_DEVICE, err);
    }
    if (status != ATTN_OK || job->outputs.bytes == 0) return status;
    return attn_copy(slot->stream, job->outputs.memory, memory_address(slot, job->outputs.memory), job->outputs.bytes,
                     ATTN_FROM_DEVICE, err);
}

attn_status memory_reserve_moves(struct slot *slot, int64_t count, attn_error *err)
{
    if (count <= slot->move_room) return ATTN_OK;
    const int64_t room = 2 * count;
    attn_move *wider = realloc(slot->moves, (size_t)room * sizeof *wider);
    if (wider == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory for %lld moves", (long long)room);
    slot->moves = wider;
    slot->move_room = room;
    return ATTN_OK;
}

attn_status memory_move(struct device *device, struct slot *slot, const struct job *job, attn_error *err)
{
    const attn_move *moves;
    const int64_t count = transaction_moves(job, &moves);
    if (device->info.unified) return attn_moves(slot->stream, moves, count, err);
    const attn_status status = memory_reserve_moves(slot, count, err);
    if (status != ATTN_OK) return status;
    for (int64_t i = 0; i < count; i++) {
        slot->moves[i] = moves[i];
        if (moves[i].from) slot->moves[i].from = memory_address(slot, (void *)moves[i].from);
    }
    return attn_moves(slot->stream, slot->moves, count, err);
}

attn_status memory_move_in(struct slot *slot, const struct job *job, attn_error *err)
{
    const attn_move *of_step;
    const int64_t steps = transaction_moves(job, &of_step);
    int64_t count = 0;
    const attn_status status = memory_reserve_moves(slot, steps + slot->mirror_count, err);
    if (status != ATTN_OK) return status;
    for (int i = 0; i < slot->mirror_count; i++) {
        const struct mirror *m = &slot->mirrors[i];
        if (m->copy) slot->moves[count++] = (attn_move){ m->device, m->host.memory, m->host.bytes };
    }
    for (int64_t i = 0; i < steps; i++) slot->moves[count++] = of_step[i];
    return attn_moves(slot->stream, slot->moves, count, err);
}

void memory_drop_workspace(attn_device *handle, void **workspace, size_t *workspace_bytes)
{
    attn_device_free(handle, *workspace);
    *workspace = NULL;
    *workspace_bytes = 0;
}

attn_status memory_grow_workspace(attn_device *handle, size_t bytes, void **workspace, size_t *workspace_bytes,
                                  attn_error *err)
{
    if (bytes <= *workspace_bytes) return ATTN_OK;
    memory_drop_workspace(handle, workspace, workspace_bytes);
    const attn_status status = attn_device_alloc(handle, bytes, workspace, err);
    if (status == ATTN_OK) *workspace_bytes = bytes;
    return status;
}

void memory_close_slot(attn_device *handle, struct slot *slot)
{
    attn_device_free(handle, slot->workspace);
    attn_stream_close(slot->stream);
    free(slot->problems);
    free(slot->plans);
    free(slot->mirrors);
    free(slot->regions);
    free(slot->moves);
}
