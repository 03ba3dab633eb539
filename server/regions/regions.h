/* regions.h: regions, which are memory that clients have registered (Triton's shared memory extensions; --allow-shm,
 * --allow-cuda-shm). Tensors in regions need not go through the socket. Thread-safe.
 *
 * A region is a range of an object of /dev/shm, or an allocation in a GPU's memory, with a name that its client chose.
 * A region belongs to the access token whose client registered it. A region holds a descriptor of the object, or the
 * opened GPU memory. It therefore stays valid for running requests when the client unlinks the object or unregisters
 * the region.
 *
 *     POST .../register -> regions_register()    adds the region to the table
 *     body complete     -> region_uses_new()     finds and holds all regions that the request names
 *     CHECKING          -> region_uses_read()    copies inputs to staging memory, each byte once
 *                          region_uses_bind()    checks that the outputs fit
 *     RUNNING                                    kernels use tensors in a GPU's memory in place
 *     FINISHING         -> region_uses_write()   writes the outputs
 *                          region_uses_free()
 *
 * The client may truncate, rewrite or unlink its object at any time. The CPU therefore never reads a mapping of the
 * object, because a page that was cut off would raise SIGBUS. The CPU uses pread() and pwrite(), in pieces, on threads
 * that keep no other request waiting.
 *
 * Large tensors that only kernels read or write are copied by the GPU itself from or to "pinned" pages. The driver maps
 * and holds these pages, so the pages remain when the object is truncated. The object's modification time tells whether
 * the pages still belong to the object: it changes when the object is truncated, when a hole is made, and at the first
 * write to a mapped page. Without a valid pin, the CPU copies the tensors.
 *
 * A GPU uses tensors in its own memory in place. The CPU does not read these tensors, so only tensors whose values need
 * no check may lie there (proto_may_lie_on_device()). The client must not change them until the kernels are done.
 *
 * The last user of a region does not close the region, because that may take long. close() of an unlinked object frees
 * all its pages, which takes seconds for some gigabytes. Closing a GPU's memory may wait for all work on the GPU. The
 * table has a thread of its own that closes regions. */
#ifndef REGIONS_H
#define REGIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto-json/proto.h"
#include "server/base/caller.h"
#include "server/base/limits.h"

/* Kinds of regions: id, label in /metrics. An account can use a name for one region only, whatever its kind. */
#define REGION_KIND_MAP(X) \
    X(SYSTEM, "system")    \
    X(CUDA, "cuda")
enum region_kind {
#define X(id, label) REGION_##id,
    REGION_KIND_MAP(X)
#undef X
        REGION_KIND_COUNT
};
const char *region_kind_label(enum region_kind kind);

struct regions;

/* Makes an empty table, for shared memory objects whose key (name) begins with one of the prefixes (--allow-shm). The
 * array of prefixes must outlive the table. Aborts when out of memory. */
struct regions *regions_new(const char *const *prefixes, int prefix_count);
/* Lets GPUs copy large tensors directly from and to regions. The driver of `device` pins at most most_bytes of all
 * regions together. Call this before the first registration. The device must stay open until regions_free(). */
void regions_pin_for(struct regions *regions, attn_device *device, int64_t most_bytes);
void regions_free(
    /* Frees the table. Call this before the devices are closed, and when no request uses a region. Does nothing for
     * NULL. */
    struct regions *regions);

/* ---- The table of registered regions ----------------------------------------------------------------------------- */

/* Registers a region of a shared memory object, which must be long enough. On failure returns false, and sets *error
 * and *why; why->member is the JSON pointer of the wrong member of the request's body. */
bool regions_register(struct regions *regions, struct caller *caller, const char *name, const proto_region *wanted,
                      proto_error *error, attn_error *why);
/* Registers memory of a GPU as a region. The device must stay open until regions_free(). `number` is the server's
 * number of the device. Opening the memory in the driver takes about 0.1 ms. */
bool regions_register_cuda(struct regions *regions, struct caller *caller, const char *name,
                           const proto_cuda_region *wanted, attn_device *device, int number, proto_error *error,
                           attn_error *why);
/* Unregisters the account's region of this kind and name (NULL: all of this kind), and returns their number. Requests
 * that use them continue. */
int regions_unregister(struct regions *regions, enum region_kind kind, const struct caller *caller, const char *name);
/* Unregisters all regions of accounts that is_known() rejects: their access tokens were removed. */
void regions_forget(struct regions *regions, bool (*is_known)(void *context, const struct caller *caller),
                    void *context);

struct region_facts {
    const char *name, *key;
    int64_t offset, bytes;
    int64_t device_id; /* a GPU's number, as given at registration */
};
/* Calls visit() for each region of this kind and account (and of this name, unless it is NULL). Returns the number of
 * calls. visit() must not call functions of this header. */
int regions_visit(struct regions *regions, enum region_kind kind, const struct caller *caller, const char *name,
                  void (*visit)(void *context, const struct region_facts *facts), void *context);
void regions_count(struct regions *regions, enum region_kind kind, int *count, int64_t *bytes);
int64_t regions_pinned_bytes(struct regions *regions);

/* ---- The tensors of a request that lie in regions ---------------------------------------------------------------- */

struct region;

/* One tensor of a request that lies in a region (memory that a client registered). */
struct region_use {
    /* this struct holds a reference to the region */
    struct region *region;
    attn_tensor_id id;
    bool output;
    int index;      /* index among the inputs or outputs of the body */
    int64_t offset; /* offset of the tensor in the shared memory object */
    /* size of the tensor in bytes; for an output, the size of its buffer until region_uses_bind() sets the tensor's
     * size */
    int64_t bytes;
    int64_t done;
    char *memory; /* the server's copy of the tensor */
    /* address in a GPU's memory, where kernels use the tensor; NULL: the tensor is copied */
    char *in_place;
    /* address in pages that a driver holds (pinned) and a device copies; NULL: the CPU copies */
    char *pinned;
    /* the pin (pages that a driver holds) to which the pages at `pinned` belong; this struct holds a reference to it */
    struct pin *pin;
    void *mirror; /* device memory with a copy of the region while a batch runs; only the device's thread uses it */
};

/* All tensors of a request that lie in regions (memory that clients registered). The request owns the list first, and
 * its job later. */
struct region_uses {
    int64_t input_bytes, output_bytes;
    /* bytes that devices copy from and to pinned pages; an output counts with the size of its buffer */
    int64_t pinned_bytes;
    bool placed;
    bool writes; /* whether the CPU copies some outputs to regions */
    int home;    /* number of the GPU whose memory holds some of the tensors; -1: no GPU */
    /* set of the outputs that have no staging memory; bit i stands for the tensor with attn_tensor_id i */
    uint64_t elsewhere;
    int count;
    struct region_use list[];
};

/* Finds all regions that a body names. NOT_FOUND: a region is unknown, or belongs to another account. INVALID: a range
 * goes past its region's end, a tensor may not lie in a GPU's memory, or tensors lie in memory of two GPUs. NO_MEMORY:
 * out of memory. */
attn_status region_uses_new(struct regions *regions, const struct caller *caller, const proto_shared *shared, int count,
                            struct region_uses **uses, attn_error *err);
void region_uses_free(struct region_uses *uses);
/* Removes from the list the inputs that the CPU has copied. Inputs in pinned pages or in a GPU's memory stay in it.
 * *uses may be NULL, and becomes NULL if the list is empty. */
void region_uses_drop_inputs(struct region_uses **uses);

/* Sets the addresses to which inputs are copied: the input of list element i is copied to shared[i].to. */
void region_uses_place(struct region_uses *uses, const proto_shared *shared);
/* Returns the total size in bytes of all inputs that the CPU or a device copies. */
static inline uint64_t region_uses_input_bytes(const struct region_uses *uses)
{
    uint64_t bytes = (uint64_t)uses->input_bytes;
    for (int i = 0; i < uses->count; i++)
        if (uses->list[i].pinned && !uses->list[i].output) bytes += (uint64_t)uses->list[i].bytes;
    return bytes;
}

/* Call this twice. The first call is made when the problem's shapes are known. It checks that the outputs fit into
 * their regions, and sets the addresses of outputs in pinned memory or in a GPU's memory. The second call is made when
 * outputs in staging memory have addresses. It records what must be copied. INVALID: an output does not fit, or
 * overlaps another output or an input in a GPU's memory; or a tensor in a GPU's memory is not aligned to its elements
 * or to `alignment`. */
attn_status region_uses_bind(struct region_uses *uses, attn_problem *problem, size_t alignment, attn_error *err);

/* region_uses_read() copies the inputs to the server's memory, and region_uses_write() copies the outputs to the
 * clients' regions. Both stop at the time until_ns; call them again until *done is true. INVALID: the shared memory
 * object has become shorter; NO_MEMORY: the system has no pages for it; INTERNAL: any other error. */
attn_status region_uses_read(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err);
attn_status region_uses_write(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err);

#endif
