/* regions.h: regions of memory that clients have registered, so that tensors need not go through the socket (Triton's
 * shared memory extensions; --allow-shm, --allow-cuda-shm). Thread-safe.
 *
 * A region is a range of an object of /dev/shm, or an allocation in a GPU's memory, under a name that its client chose.
 * It belongs to the token that registered it; nobody else sees it. It holds a descriptor, or the memory open, so it
 * lives on when the client unlinks the object or unregisters the region while a request uses it.
 *
 *     POST .../register -> regions_register()                                           the table has it
 *     body complete     -> region_uses_new()     finds all that the request names, and keeps it
 *     CHECKING          -> region_uses_read()    inputs, into staging memory: each byte once
 *                          region_uses_bind()    outputs are known: do they fit?
 *     RUNNING                                    what is in a GPU's memory is read and written there, by the kernels
 *     FINISHING         -> region_uses_write()   outputs
 *                          region_uses_free()
 *
 * The object is the client's, who may truncate, rewrite or unlink it at any moment. So no processor looks into a
 * mapping of it (a page that was cut off would be SIGBUS): it is read and written with pread and pwrite, in pieces,
 * where no thread that serves others waits for it; what was read is checked in the copy and never read again.
 *
 * A GPU copies large tensors that nobody but kernels reads from there, and to there, itself ("pinned"): the pages are
 * mapped for the driver, which holds them, so that they live on when the object is cut off. Whether they still are the
 * object's pages, its time of modification says: whoever truncates it, or makes a hole, changes that, and who writes
 * through a mapping does so once a page. A region is pinned after its registration was answered, with holes filled, and
 * again after it was modified, within bounds (limits.h); until then, and where anything of this is not so,
 * all is copied as above.
 *
 * A GPU's memory is used in place, by that GPU. No processor reads it, so only tensors whose values nobody checks may
 * lie there (proto_may_lie_on_device()). Until the kernels are done with it, its client must leave it alone.
 *
 * Nothing is closed by whoever lets go of it last: of an object that was unlinked, close() frees all pages, which takes
 * seconds for some gigabytes, and closing a GPU's memory may wait for all that runs there.
 * The table has a thread that does this alone. */
#ifndef REGIONS_H
#define REGIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto-json/proto.h"
#include "server/base/caller.h"
#include "server/base/limits.h"

/* id, label in /metrics. All kinds share their names. */
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

/* Keys begin with one of the prefixes (--allow-shm), which stay the caller's. Aborts when out of memory. */
struct regions *regions_new(const char *const *prefixes, int prefix_count);
/* Large tensors are copied by this device, which stays open until regions_free(), and by others; of regions of so many
 * bytes together. Before the first registration. */
void regions_pin_for(struct regions *regions, attn_device *device, int64_t most_bytes);
void regions_free(
    struct regions *regions); /* NULL is fine; nobody may use a region any more; before the devices close */

/* ---- The table --------------------------------------------------------------------------------------------------- */

/* False: because of *error, told in `why`, whose member is a pointer into the body. The bytes must be there already. */
bool regions_register(struct regions *regions, struct caller *caller, const char *name, const proto_region *wanted,
                      proto_error *error, attn_error *why);
/* The same of memory of a device, which must stay open until regions_free(); `number` is the server's. Opening it takes
 * the driver some 0.1 ms. */
bool regions_register_cuda(struct regions *regions, struct caller *caller, const char *name,
                           const proto_cuda_region *wanted, attn_device *device, int number, proto_error *error,
                           attn_error *why);
/* How many of that kind were there: one or none; of all of the caller's with name NULL.
 * Requests that use them go on. */
int regions_unregister(struct regions *regions, enum region_kind kind, const struct caller *caller, const char *name);
/* The same of all regions of callers who are known no more. */
void regions_forget(struct regions *regions, bool (*is_known)(void *context, const struct caller *caller),
                    void *context);

/* Calls visit() with each of the caller's regions of a kind (name NULL), or the one of that name; returns how many.
 * visit() may not call anything here. */
struct region_facts {
    const char *name, *key;
    int64_t offset, bytes;
    int64_t device_id; /* CUDA: as it was registered */
};
int regions_visit(struct regions *regions, enum region_kind kind, const struct caller *caller, const char *name,
                  void (*visit)(void *context, const struct region_facts *facts), void *context);
void regions_count(struct regions *regions, enum region_kind kind, int *count, int64_t *bytes);
int64_t regions_pinned_bytes(struct regions *regions);

/* ---- What a request uses ----------------------------------------------------------------------------------------- */

struct region;

/* A tensor of a request in a region. */
struct region_use {
    struct region *region; /* a reference */
    attn_tensor_id id;
    bool output;
    int index;       /* in the body's inputs or outputs, for pointers */
    int64_t offset;  /* in the object */
    int64_t bytes;   /* of an output: the room for it, until region_uses_bind() */
    int64_t done;    /* of them */
    char *memory;    /* staging memory: where they go, or come from */
    char *in_place;  /* the address in a GPU's memory; NULL: it is copied */
    char *pinned;    /* where devices copy it from, or to; NULL: they do not */
    struct pin *pin; /* of that: a reference */
    void *mirror;    /* of that, while a batch runs: the device's copy. Its thread's */
};

/* They belong to who owns the request, and then its job. */
struct region_uses {
    int64_t input_bytes, output_bytes; /* of what the processor copies */
    int64_t pinned_bytes;              /* of what devices do; outputs as long as their room */
    bool placed;                       /* `memory` of inputs is there */
    bool writes;                       /* there are outputs that are copied */
    int home;                          /* number of the device in whose memory the others are; -1: there are none */
    uint64_t elsewhere;                /* which outputs need no staging memory: bits of attn_tensor_id */
    int count;
    struct region_use list[];
};

/* All that a body refers to. Errors: NOT_FOUND (unknown, or another caller's), INVALID (past the end; in a GPU's memory
 * what may not lie there, or in that of two), NO_MEMORY. */
attn_status region_uses_new(struct regions *regions, const struct caller *caller, const proto_shared *shared, int count,
                            struct region_uses **uses, attn_error *err);
void region_uses_free(struct region_uses *uses); /* NULL is fine */
/* Inputs have been read; those in a GPU's memory, and pinned ones, stay. *uses is NULL afterwards where nothing is
 * left; it may be before. */
void region_uses_drop_inputs(struct region_uses **uses);

/* Where the inputs go: shared[i].to, of the same list. */
void region_uses_place(struct region_uses *uses, const proto_shared *shared);
/* Of all inputs that are copied, by whomever. */
static inline uint64_t region_uses_input_bytes(const struct region_uses *uses)
{
    uint64_t bytes = (uint64_t)uses->input_bytes;
    for (int i = 0; i < uses->count; i++)
        if (uses->list[i].pinned && !uses->list[i].output) bytes += (uint64_t)uses->list[i].bytes;
    return bytes;
}

/* The problem has its shapes: do its outputs fit? Those in a GPU's memory, and pinned ones, get their addresses. Again
 * when the others have theirs: where they will come from. INVALID: one does not fit, or two overlap; in a GPU's memory,
 * one lies over an input, or a tensor is not aligned to its elements, or to `alignment`. */
attn_status region_uses_bind(struct region_uses *uses, attn_problem *problem, size_t alignment, attn_error *err);

/* Reads on, or writes on, until all is done (*done) or the time is over. INVALID: the object has become shorter;
 * NO_MEMORY: there are no pages for it; INTERNAL. */
attn_status region_uses_read(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err);
attn_status region_uses_write(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err);

#endif
