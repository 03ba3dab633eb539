/* backend.h: the table of functions that a backend provides. dispatch.c checks arguments, chooses a kernel and calls
 * the function in the table of the device's backend.
 *
 * A backend embeds attn_device and attn_stream as the first member of its own structs:
 *     struct cpu_device { attn_device base; struct pool *pool; ... };
 * The functions need not check their arguments, and every problem that they get has passed attn_check(). */
#ifndef ATTN_BACKEND_H
#define ATTN_BACKEND_H

#include "attention.h"
#include "merge.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attn_backend attn_backend;

struct attn_device {
    const attn_backend *backend;
    int index;
    attn_capabilities can; /* a backend's open() fills in every member of `can` except `backend` */
};

struct attn_stream {
    attn_device *device;
    /* address of the cancel flag of the stream's work; NULL until attn_stream_heed() sets it */
    const int *cancel;
    const void *owner; /* owner of the stream's work; NULL until attn_stream_serve() sets it */
    /* time in nanoseconds, summed over the host's threads, that they have computed for the stream since
     * attn_stream_serve(); only backends that compute on the host's threads count it */
    int64_t spent_ns;
};

/* Returns whether the caller has cancelled the work. A backend's run() calls this between pieces of work of a few
 * milliseconds, and stops if the result is true. `cancel` may be NULL. */
static inline bool attn_is_cancelled(const int *cancel)
{
    return cancel && __atomic_load_n(cancel, __ATOMIC_RELAXED) != 0;
}

static inline attn_status attn_given_up(attn_error *err)
{
    return attn_fail(err, ATTN_CANCELLED, "", "given up: nobody waits for it any more");
}

/* The functions of a backend. attention.h documents them under longer names: copy() as attn_copy(), mark() as
 * attn_stream_mark(), and so on. */
struct attn_backend {
    const char *name;
    /* Whether the backend's devices are not the host's processor. The server's option --devices numbers such
     * devices. */
    bool is_gpu;
    int (*count)(void);
    attn_status (*open)(int index, const attn_device_options *options, attn_device **device, attn_error *err);
    void (*close)(attn_device *device);
    void (*describe)(const attn_device *device, attn_device_info *info);
    attn_status (*device_alloc)(attn_device *device, size_t bytes, void **memory, attn_error *err);
    void (*device_free)(attn_device *device, void *memory);
    attn_status (*staging_alloc)(attn_device *device, size_t bytes, void **memory, attn_error *err);
    void (*staging_free)(attn_device *device, void *memory, size_t bytes);
    /* Decides whether plan->kernel can compute a problem. The function is called only if the kernel's attn_kernel
     * allows the problem's dtype, head sizes and features. If the kernel can compute it, the function fills in the
     * plan's other members and returns true. NULL: every kernel computes all problems that its attn_kernel allows, and
     * plans need no geometry. */
    bool (*plan)(const attn_capabilities *can, attn_plan *plan);
    attn_status (*workspace)(const attn_capabilities *can, const attn_plan *plans, int count, size_t *bytes,
                             attn_error *err);
    attn_status (*stream_open)(attn_device *device, attn_stream **stream, attn_error *err);
    void (*stream_close)(attn_stream *stream);
    attn_status (*copy)(attn_stream *stream, void *to, const void *from, size_t bytes, attn_direction direction,
                        attn_error *err);
    /* Copies rows of equal length. dispatch.c does not call it for 0 rows, nor for rows without gaps between them.
     * NULL: dispatch.c calls copy() for each row. */
    attn_status (*copy_rows)(attn_stream *stream, const attn_rows *rows, attn_direction direction, attn_error *err);
    attn_status (*moves)(attn_stream *stream, const attn_move *moves, int64_t count, attn_error *err);
    /* Copies from the memory of another device. Not called for 0 bytes. NULL: the backend never has a second device. */
    attn_status (*copy_peer)(attn_stream *stream, void *to, const attn_device *source, const void *from, size_t bytes,
                             attn_error *err);
    /* never called for a sum without elements */
    attn_status (*sum)(attn_stream *stream, const attn_sum *sum, attn_error *err);
    attn_status (*run)(attn_stream *stream, const attn_plan *plans, int count, void *workspace, attn_error *err);
    /* never called for a merge that has no rows */
    attn_status (*merge)(attn_stream *stream, const attn_merge_plan *plan, attn_error *err);
    attn_status (*mark)(attn_stream *stream, int slot, attn_error *err);
    double (*elapsed_us)(attn_stream *stream, int from_slot, int to_slot);
    attn_status (*done)(attn_stream *stream, bool *done, attn_error *err);
    attn_status (*wait)(attn_stream *stream, attn_error *err);
    /* returns the time from a mark (time stamp) on one stream to a mark on another; NULL if the backend cannot measure
     * it */
    double (*between_us)(attn_stream *from, int from_slot, attn_stream *to, int to_slot);
    /* may be NULL; attn_stream_note() then returns ATTN_UNSUPPORTED */
    attn_status (*note)(attn_stream *stream, attn_error *err);
    bool (*noted)(const attn_stream *stream);
    /* import and release_import are NULL where processes cannot share memory of the backend's devices */
    attn_status (*import)(attn_device *device, const uint8_t *handle, size_t bytes, void **memory, attn_error *err);
    void (*release_import)(attn_device *device, void *memory);
    /* `pin` and `unpin` are NULL if the backend cannot pin host memory */
    attn_status (*pin)(attn_device *device, void *memory, size_t bytes, attn_error *err);
    void (*unpin)(attn_device *device, void *memory);
    /* Computes on the device what attn_lse_judge() needs: the numbers of attn_lse_look.found for each row in `look`.
     * NULL: the host computes them. */
    attn_status (*sum_lse)(attn_stream *stream, const attn_problem *problem, const attn_lse_look *look, double *found,
                           attn_error *err);
    /* Queues some 25 ms of the work of a run (see attn_run_some()). Not called for empty problems. NULL: run() returns
     * only when everything is computed, so there is no work to queue. */
    attn_status (*run_some)(attn_stream *stream, const attn_plan *plans, int count, void *workspace, int64_t *step,
                            attn_error *err);
    /* returns whether run_some() has left out rows that are slow to compute; NULL: run_some() computes all rows */
    bool (*left_rows)(attn_stream *stream);
    /* The functions that compute attn_truth (float64 results). All are NULL if the backend computes no truth. truth()
     * always gets a workspace, and is never called on a cancelled stream. */
    attn_status (*truth_need)(const attn_capabilities *can, const attn_problem *problem, attn_truth_cost *cost,
                              attn_error *err);
    attn_status (*truth)(attn_stream *stream, const attn_problem *problem, const attn_truth *results, void *workspace,
                         int64_t *step, attn_error *err);
    attn_status (*truth_compare)(attn_stream *stream, const attn_problem *problem, const attn_truth *truth,
                                 attn_truth_distance *distances, attn_error *err);
};

/* Returns whether *kernel lists the problem's dtype, head sizes and features as supported. Even then the kernel may
 * refuse the problem, in its backend's function plan(). */
bool attn_kernel_takes(const attn_kernel *kernel, const attn_problem *problem, uint64_t features);

/* Does what attn_plan_make() does, but with the given features. Tests pass a feature that no kernel supports. */
attn_status attn_plan_for(const attn_capabilities *can, const attn_problem *problem, uint64_t features, attn_plan *plan,
                          attn_error *err);

/* Returns whether cost.c has rates for this kernel. Only tests call this function. */
bool attn_cost_knows(const char *kernel, attn_op op, attn_dtype dtype);

/* Fills, on the host, the parts of results that kernels do not write. In padding rows (behind seqlens_q, or between
 * packed sequences) lse becomes -inf, and all other results become 0. All outputs of an observe (statistics of
 * probabilities) are filled completely, top_keys with -1. */
void attn_fill_padding(const attn_problem *p);

/* Does the work of attn_sum_parts() on the host, in the calling thread. */
void attn_sum_all(const attn_sum *sum);

/* The backends of the build, one table of functions each. dispatch.c lists them in order of preference. */
/* kernels/cpu/reference.c: textbook loops in double, whose results define what is correct */
extern const attn_backend attn_backend_reference;
/* kernels/cpu/paper.c: FlashAttention-2 written as in its paper, for people who read the code */
extern const attn_backend attn_backend_paper;
/* the backend "cpu" (kernels/cpu/cpu.c): FlashAttention on all cores of the processor */
extern const attn_backend attn_backend_cpu;
extern const attn_backend attn_backend_cuda; /* kernels/cuda/common/device.cu: GPUs; only in builds with ATTN_CUDA */
extern const attn_backend
    /* kernels/fake/fake.c: a device that fails in the ways that a test asks for; only in builds with ATTN_FAKE */
    attn_backend_fake;

#ifdef __cplusplus
}
#endif
#endif
