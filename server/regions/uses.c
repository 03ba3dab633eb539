/* uses.c: the tensors of a request that lie in regions (memory that clients registered), inputs before outputs. There
 * are three kinds. The CPU copies most tensors, with pread() and pwrite() in pieces: if a client truncates its object,
 * such a call returns an error, but a read of mapped memory would raise SIGBUS. A GPU copies large tensors from or to
 * pinned pages. Kernels use tensors in a GPU's memory in place. */
#include "server/regions/internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text/text.h"
#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/base/metrics.h"

/* ---- Finding and releasing the regions that a request uses ------------------------------------------------------- */

static void point(attn_error *err, bool output, int index, const char *parameter)
{
    if (err)
        snprintf(err->member, sizeof err->member, "/%s/%d/parameters/%s", output ? "outputs" : "inputs", index,
                 parameter);
}

/* Returns a reference to the region's pin (pages that a driver holds for copies by devices) if it is valid. Otherwise
 * requests a new one and returns NULL. To be called with the lock held. */
static struct pin *begin_copies(struct region *region)
{
    if (region->pin && region_is_intact(region)) {
        region->pin->references++;
        return region->pin;
    }
    region_ask_for_pin(region);
    return NULL;
}

static attn_status begin_use(struct regions *regions, const struct caller *caller, const proto_shared *shared,
                             struct region_use *use, attn_error *err)
{
    int64_t end;
    struct pin *pin = NULL;
    const char *const name = attn_tensors[shared->id].name;
    *use = (struct region_use){
        .id = shared->id, .output = shared->output, .index = shared->index, .bytes = shared->bytes
    };
    pthread_mutex_lock(&regions->lock);
    const int i = regions_find(regions, caller, shared->region);
    if (i >= 0) {
        use->region = regions->table[i].region;
        use->region->references++;
        if (shared->kernels_only && shared->bytes >= REGIONS_PINNED_TENSOR) pin = begin_copies(use->region);
        use->pin = pin;
    }
    pthread_mutex_unlock(&regions->lock);
    if (use->region == NULL) {
        attn_fail(err, ATTN_NOT_FOUND, NULL, "%s: there is no region '%.*s'", name, (int)text_cut(shared->region, 64),
                  shared->region);
        point(err, shared->output, shared->index, "shared_memory_region");
        return ATTN_NOT_FOUND;
    }
    if (__builtin_add_overflow(shared->offset, shared->bytes, &end) || end > use->region->bytes) {
        attn_fail(err, ATTN_INVALID, NULL,
                  "%s: shared_memory_offset %lld and shared_memory_byte_size %lld go past the end of the region "
                  "'%.*s', which "
                  "has %lld bytes",
                  name, (long long)shared->offset, (long long)shared->bytes, (int)text_cut(shared->region, 64),
                  shared->region, (long long)use->region->bytes);
        point(err, shared->output, shared->index,
              shared->offset < use->region->bytes ? "shared_memory_byte_size" : "shared_memory_offset");
        return ATTN_INVALID;
    }
    use->offset = use->region->offset + shared->offset;
    if (use->region->kind == REGION_CUDA) use->in_place = use->region->memory + use->offset;
    if (pin) use->pinned = pin->memory + shared->offset;
    return ATTN_OK;
}

/* Checks that a tensor may lie in a GPU's memory, and that it is on the same GPU as the earlier tensors of the
 * request. */
static attn_status begin_in_place(struct region_uses *uses, const struct region_use *use, attn_error *err)
{
    const char *const name = attn_tensors[use->id].name;
    const struct region *const region = use->region;
    if (!use->output && !proto_may_lie_on_device(use->id))
        attn_fail(
            err, ATTN_INVALID, NULL,
            "%s: cannot lie in the memory of a GPU, its values are checked first; send it in the body or in system "
            "shared memory",
            name);
    else if (uses->home >= 0 && uses->home != region->number)
        attn_fail(
            err, ATTN_INVALID, NULL,
            "%s: the region '%.*s' is in the memory of device %lld, another tensor in that of a different one; all "
            "must be of one",
            name, (int)text_cut(region->name, 64), region->name, (long long)region->id);
    else {
        uses->home = region->number;
        if (use->output) uses->elsewhere |= UINT64_C(1) << use->id;
        return ATTN_OK;
    }
    point(err, use->output, use->index, "shared_memory_region");
    return ATTN_INVALID;
}

attn_status region_uses_new(struct regions *regions, const struct caller *caller, const proto_shared *shared, int count,
                            struct region_uses **uses, attn_error *err)
{
    struct region_uses *made = calloc(1, sizeof *made + (size_t)count * sizeof made->list[0]);
    attn_status status = ATTN_OK;
    *uses = NULL;
    if (made == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    made->home = -1;
    for (; made->count < count && status == ATTN_OK; made->count++) {
        struct region_use *const use = &made->list[made->count];
        status = begin_use(regions, caller, &shared[made->count], use, err);
        if (use->in_place) {
            status = begin_in_place(made, use, err);
            continue;
        }
        made->writes |= use->output;
        if (use->pinned) {
            made->pinned_bytes += use->bytes;
            if (use->output) made->elsewhere |= UINT64_C(1) << use->id;
            continue;
        }
        /* no overflow: a tensor is not longer than its region, and PROTO_HEADER_BYTES bounds the number of tensors */
        *(use->output ? &made->output_bytes : &made->input_bytes) += use->bytes;
    }
    if (status == ATTN_OK) *uses = made;
    else region_uses_free(made);
    return status;
}

static void release(struct region_use *use)
{
    if (use->region == NULL) return;
    struct regions *const regions = use->region->regions;
    pthread_mutex_lock(&regions->lock);
    region_let_pin_go(use->pin);
    region_let_go(use->region);
    pthread_mutex_unlock(&regions->lock);
}

void region_uses_free(struct region_uses *uses)
{
    if (uses == NULL) return;
    for (int i = 0; i < uses->count; i++) release(&uses->list[i]);
    free(uses);
}

void region_uses_drop_inputs(struct region_uses **held)
{
    struct region_uses *const uses = *held;
    int kept = 0;
    if (uses == NULL) return;
    for (int i = 0; i < uses->count; i++) {
        if (uses->list[i].output || uses->list[i].in_place || uses->list[i].pinned) uses->list[kept++] = uses->list[i];
        else release(&uses->list[i]);
    }
    uses->count = kept;
    uses->input_bytes = 0;
    if (kept > 0) return;
    region_uses_free(uses);
    *held = NULL;
}

void region_uses_place(struct region_uses *uses, const proto_shared *shared)
{
    for (int i = 0; i < uses->count; i++)
        if (!uses->list[i].output && !uses->list[i].in_place && !uses->list[i].pinned)
            uses->list[i].memory = shared[i].to;
    uses->placed = true;
}

/* ---- Checks of the outputs when the shapes of the tensors are known ---------------------------------------------- */

static bool overlap(const char *a, int64_t a_bytes, const char *b, int64_t b_bytes)
{
    return a_bytes > 0 && b_bytes > 0 && (uintptr_t)a < (uintptr_t)b + (uint64_t)b_bytes &&
           (uintptr_t)b < (uintptr_t)a + (uint64_t)a_bytes;
}

/* True if an output has bytes in common with another tensor of the request. Inputs that the server has already copied
 * do not count. */
static bool collide(const struct region_use *output, const struct region_use *other)
{
    if ((output->in_place != NULL) != (other->in_place != NULL)) return false;
    if (output->in_place) return overlap(output->in_place, output->bytes, other->in_place, other->bytes);
    return other->output && region_is_same_object(other->region, output->region) &&
           other->offset < output->offset + output->bytes && output->offset < other->offset + other->bytes;
}

/* Checks that an output overlaps no input and no earlier output. */
static attn_status bind_output(const struct region_uses *uses, struct region_use *use, const attn_tensor *t,
                               attn_error *err)
{
    const int64_t room = use->bytes;
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &use->bytes) || use->bytes > room) {
        attn_fail(err, ATTN_INVALID, NULL, "%s: has %lld bytes, shared_memory_byte_size is %lld",
                  attn_tensors[use->id].name, (long long)use->bytes, (long long)room);
        point(err, true, use->index, "shared_memory_byte_size");
        return ATTN_INVALID;
    }
    for (const struct region_use *other = uses->list; other < use; other++) {
        if (!collide(use, other)) continue;
        attn_fail(err, ATTN_INVALID, NULL, "%s: would be written over %s, in the region '%.*s'",
                  attn_tensors[use->id].name, attn_tensors[other->id].name, (int)text_cut(use->region->name, 64),
                  use->region->name);
        point(err, true, use->index, "shared_memory_offset");
        return ATTN_INVALID;
    }
    return ATTN_OK;
}

static attn_status check_alignment(const struct region_use *use, attn_dtype dtype, size_t alignment, attn_error *err)
{
    const size_t element = attn_dtype_bytes(dtype), unit = element > alignment ? element : alignment;
    if ((uintptr_t)use->in_place % unit == 0) return ATTN_OK;
    attn_fail(err, ATTN_INVALID, NULL,
              "%s: shared_memory_offset is %lld, must be a multiple of %zu in the memory of a GPU",
              attn_tensors[use->id].name, (long long)use->offset, unit);
    point(err, use->output, use->index, "shared_memory_offset");
    return ATTN_INVALID;
}

attn_status region_uses_bind(struct region_uses *uses, attn_problem *problem, size_t alignment, attn_error *err)
{
    uses->output_bytes = 0;
    for (int i = 0; i < uses->count; i++) {
        struct region_use *const use = &uses->list[i];
        attn_tensor *const t = &problem->tensor[use->id];
        attn_status status = use->in_place ? check_alignment(use, t->dtype, alignment, err) : ATTN_OK;
        if (status == ATTN_OK && use->output) status = bind_output(uses, use, t, err);
        if (status != ATTN_OK) return status;
        if (!use->output) continue;
        if (use->in_place || use->pinned) t->data = use->in_place ? use->in_place : use->pinned;
        else use->memory = t->data, uses->output_bytes += use->bytes;
    }
    return ATTN_OK;
}

/* ---- Reading inputs from regions, and writing outputs to them ---------------------------------------------------- */

/* Makes an error about a region's shared memory object. If `error` is 0, the object is shorter than at its
 * registration. Otherwise `error` is an errno value. */
static attn_status broken(const struct region_use *use, int error, attn_error *err)
{
    const char *const name = attn_tensors[use->id].name;
    const int length = (int)text_cut(use->region->name, 64);
    attn_status status;
    if (error == 0)
        status = attn_fail(
            err, ATTN_INVALID, NULL,
            "%s: the shared memory of the region '%.*s' has become shorter than it was when it was registered", name,
            length, use->region->name);
    else if (error == ENOSPC || error == ENOMEM)
        status = attn_fail(err, ATTN_NO_MEMORY, NULL, "%s: there is no memory for the pages of the region '%.*s'", name,
                           length, use->region->name);
    else if (error == EPERM || error == EFBIG)
        status = attn_fail(err, ATTN_INVALID, NULL, "%s: the region '%.*s' cannot be written: %s", name, length,
                           use->region->name, error == EPERM ? "it is sealed" : "the system's limit on file sizes");
    else
        status = attn_fail(err, ATTN_INTERNAL, NULL, "%s: the region '%.*s': %s", name, length, use->region->name,
                           strerror(error));
    point(err, use->output, use->index, "shared_memory_region");
    return status;
}

static size_t next_piece(const struct region_use *use)
{
    const int64_t left = use->bytes - use->done;
    return left < REGIONS_PIECE_BYTES ? (size_t)left : (size_t)REGIONS_PIECE_BYTES;
}

static attn_status read_piece(struct region_use *use, attn_error *err)
{
    const ssize_t count = pread(use->region->fd, use->memory + use->done, next_piece(use), use->offset + use->done);
    if (count < 0 && errno == EINTR) return ATTN_OK;
    if (count <= 0) return broken(use, count < 0 ? errno : 0, err);
    use->done += count;
    metrics_add(METRIC_REGION_BYTES_MOVED, "read", NULL, (double)count);
    return ATTN_OK;
}

/* Writes one piece of an output to shared memory. pwrite() would extend an object that has become shorter, so its size
 * is tested first. If the client truncates the object between the two calls, pwrite() extends it by one piece at
 * most. */
static attn_status write_piece(struct region_use *use, attn_error *err)
{
    const size_t bytes = next_piece(use);
    struct stat st;
    if (fstat(use->region->fd, &st) != 0) return broken(use, errno, err);
    if (st.st_size < use->offset + use->done + (int64_t)bytes) return broken(use, 0, err);
    region_note_write(use->region, true);
    const ssize_t count = pwrite(use->region->fd, use->memory + use->done, bytes, use->offset + use->done);
    const int error = errno;
    region_note_write(use->region, false);
    errno = error;
    if (count < 0 && errno == EINTR) return ATTN_OK;
    if (count <= 0) return broken(use, count < 0 ? errno : EIO, err);
    use->done += count;
    metrics_add(METRIC_REGION_BYTES_MOVED, "written", NULL, (double)count);
    return ATTN_OK;
}

/* Records that a device copies the tensor. Returns an error if the client's shared object has become too short for
 * it. */
static attn_status note_copies(struct region_use *use, attn_error *err)
{
    struct stat st;
    if (use->done == use->bytes) return ATTN_OK;
    if (fstat(use->region->fd, &st) != 0) return broken(use, errno, err);
    if (st.st_size < use->offset + use->bytes) return broken(use, 0, err);
    use->done = use->bytes;
    metrics_add(METRIC_REGION_BYTES_MOVED, "device", NULL, (double)use->bytes);
    return ATTN_OK;
}

static attn_status move(struct region_uses *uses, bool outputs, int64_t until_ns, bool *done, attn_error *err)
{
    *done = false;
    for (int i = 0; i < uses->count; i++) {
        struct region_use *const use = &uses->list[i];
        if (use->output != outputs || use->in_place) continue;
        if (use->pinned) {
            const attn_status status = note_copies(use, err);
            if (status != ATTN_OK) return status;
            continue;
        }
        while (use->done < use->bytes) {
            const attn_status status = (outputs ? write_piece : read_piece)(use, err);
            if (status != ATTN_OK) return status;
            if (clock_ns() >= until_ns) return ATTN_OK;
        }
    }
    *done = true;
    return ATTN_OK;
}

attn_status region_uses_read(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err)
{
    return move(uses, false, until_ns, done, err);
}

attn_status region_uses_write(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err)
{
    return move(uses, true, until_ns, done, err);
}
