/* internal.h: types and functions that the files of this folder share. The public header is devices.h.
 *
 *   devices.c   functions for the main thread: opens, closes and describes devices, and submits batches
 *   thread.c    a device's threads: batches on its streams, and when they should be over
 *   memory.c    device memory of a batch: mirrors of its jobs' staging memory, and scratch memory
 *   truth.c     verifies outputs in float64 on the device that made them; computes exact results for checks
 *   merge.c     makes one problem of equal small problems; runs small cache transactions without copies
 *   cut.c       cuts a problem that takes long into parts for several devices, by heads, batch rows or queries
 *   parts.c     a part of a cut problem on its device
 *   sums.c      adds up gradients that are sums over all queries, such as dk, over the parts of a cut problem
 *   inline.c    inline slots: small problems that HTTP threads compute or put on a GPU
 *   batch.c     a batch's work, results, times and metrics */
#ifndef DEVICE_INTERNAL_H
#define DEVICE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "kernels/queries.h"
#include "server/base/limits.h"
#include "server/device/devices.h"

enum { LINE = 64 }; /* size of the processor's cache line in bytes */
#define NEVER INT64_MAX

/* Returns the size in bytes of a contiguous tensor, rounded up to a multiple of MERGE_LINE. The tensor's shape must
 * have been checked. */
static inline size_t lines_of(const attn_tensor *t)
{
    int64_t bytes = 0;
    /* attn_shape_bytes() cannot fail here, because the tensor was checked before */
    (void)attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes);
    return ((size_t)bytes + MERGE_LINE - 1) / MERGE_LINE * MERGE_LINE;
}

struct mirror {
    struct job_region host;
    char *device;
    bool copy; /* true: before the kernels run, the bytes of the host's memory must be copied to this device memory */
};

/* A place for one batch that runs on a device: a stream, and the memory that belongs to the batch. */
struct slot {
    attn_stream *stream;
    struct batch *batch; /* the batch that runs in this slot; NULL: the slot is free */
    int64_t due_ns;      /* time at which the batch should be over, for the watchdog */
    /* how many nanoseconds the batch would take at DEVICE_SLOWEST_FLOPS, the slowest rate that the watchdog accepts */
    int64_t worst_ns;
    attn_problem *problems;
    attn_plan *plans; /* one plan (chosen kernel) for each element of `problems` */
    /* room: size of the arrays. count: number of problems of this batch. launched: number of the batch's problems whose
     * kernels are on the stream. */
    int room, count, launched;
    /* estimated time in seconds of the kernels that the batch has on the stream; 0: none, or not known */
    double queued_s;
    /* true: another long batch of the same flow (client) has its turn, so no more kernels of this batch may be put on
     * the stream now */
    bool blocked;
    /* Time when kernels were last put on the stream. Before the first kernels it is the time when the batch began. */
    int64_t piece_ns;
    int64_t step; /* the step of attn_run_some() at which a long problem continues */
    /* the first step that attn_run_some() computes for this batch: 0, or ATTN_EVERY_ROW if the batch runs again because
     * kernels have skipped rows (with scores beyond float32's range) */
    int64_t first_step;
    /* The exact outputs (truths, in float64) of the batch's items (problems) are computed one item after the other.
     * truths_left: number of items whose truth is not on the stream yet. truth_item: index of the first of these items.
     * truth_step: the next step of that item (truth.c). */
    int truths_left, truth_item;
    int64_t truth_step;
    bool truth_began; /* true: the first step of computing the current item's truth (exact outputs) is on the stream */
    void *truth_out;  /* device memory for the exact `out` (in float64) of one item (problem) */
    /* device memory for the differences between the outputs of one part of a cut job and the exact outputs */
    attn_truth_distance *truth_distances;
    int64_t began_ns;    /* time when the batch's first event was put on the stream */
    int64_t launched_ns; /* time when the batch's first kernels were put on the stream */
    void *workspace;
    size_t workspace_bytes;
    attn_move *moves; /* the moves (copies by a kernel) of a job's cache transaction, with device addresses */
    int64_t move_room;
    struct mirror *mirrors;
    /* indices of the mirrors that are copies of host memory, in the order of their host addresses */
    int *regions;
    int mirror_count, mirror_room, region_count;

    /* The arrays below have one element for each job of the batch. */
    /* Small problems of a batch are merged into one, under one of their jobs, the leader. leader[j] is the number of
     * job j's leader. It is j if job j is not merged, or is the leader itself. */
    int16_t leader[CONFIG_MAX_BATCH];
    /* for each leader of a merged problem: the number of jobs in the problem, the leader included */
    int16_t members[CONFIG_MAX_BATCH];
    int16_t place[CONFIG_MAX_BATCH]; /* position of each job in its merged problem */
    /* for each job: true if a kernel copies the job's tensors to and from its leader's merged problem, so the job has
     * no device memory of its own */
    bool moved[CONFIG_MAX_BATCH];
    int problem[CONFIG_MAX_BATCH]; /* index in `problems` of each job's first problem */
};

/* A thread of a device. Only this thread puts batches into its slots (streams) and takes them out. */
struct device_thread {
    struct device *device;
    pthread_t thread;
    struct slot *slots;
    int slot_count;
};

struct device {
    attn_device *handle;
    attn_device_info info;
    int number;         /* the server's number of the device: its index in struct devices */
    void *cache_memory; /* device memory for the pages of KV caches; NULL: the device has none */
    struct mailbox *box;
    int message_kind;
    int thread_count;
    struct device_thread threads[DEVICE_MAX_STREAMS];
    bool joined;
    int streams; /* number of slots (places for running batches) that one flow (client) may use */
    /* number of all slots (places for running batches), including those for guests (batches of flows that have no other
     * batch on the device) */
    int slot_count;
    struct slot slots[DEVICE_MAX_STREAMS];

    /* The lock protects the members from here down to `over`. It also protects the members `batch` and `started_ns` of
     * each slot. */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct message *first, **last; /* submitted batches that are not on a stream yet (the inbox) */
    bool stop;
    int threads_ended;
    /* The batch that is held back because it lacked device memory while other batches ran, or while gradient sums of
     * other jobs occupied device memory. NULL: no batch is held back. */
    struct batch *held;
    /* true: memory has been freed since `held` was set, so the held batch may be tried again */
    bool held_may_run;
    /* The parts of jobs that have sums of gradients (sums.c) in this device's memory, linked by next_kept. Parts whose
     * memory may never be freed, because a device hangs, are not in the list. */
    struct job_part *kept;
    unsigned over; /* number of times that memory was freed: a batch ended, or the main thread freed gradient sums */

    int64_t watchdog_ns;
    /* The earliest of the times by which the running batches should be over, for the watchdog. NEVER: no batch runs, or
     * the device is not watched. */
    _Atomic int64_t due_ns;

    /* The main thread uses the members below; other threads read only the atomic ones among them. */
    int outstanding;
    double flops;
    bool disabled;
    struct batch *batches;
    _Atomic int requests;        /* number of requests on the device, for /v1/info */
    _Atomic int inline_requests; /* number of the requests on the device that HTTP threads run in inline slots
                                  * (streams for HTTP threads) */
    _Atomic bool usable;
    _Atomic bool lost; /* true: a thread that does not belong to the device has noted that the device is lost */
};

/* A stream of a device on which HTTP threads run small jobs. One thread uses it at a time. */
struct inline_slot {
    _Alignas(LINE) atomic_flag taken;
    struct device *device;
    /* on the CPU: a device handle that only this stream uses; on a GPU: the handle that the device's thread uses too */
    attn_device *handle;
    struct slot slot; /* the stream, scratch memory and batch of the inline slot */
};

struct devices {
    int count;
    struct device *device[CONFIG_MAX_DEVICES];
    int64_t split_above_ms; /* --split-above-ms */
    /* number of inline slots (streams on which HTTP threads run small jobs). 0: the devices are GPUs that cannot read
     * staging memory (host memory for tensors). */
    int inline_count;
    struct inline_slot *inline_slots;
    _Atomic int inline_jobs;   /* number of jobs that HTTP threads have run since the last call of inline_learn() */
    _Atomic int64_t inline_ns; /* time in nanoseconds that HTTP threads took for the jobs counted in inline_jobs */
};

/* ---- Functions that thread.c defines ----------------------------------------------------------------------------- */

/* The main function of a device's thread; the argument is its struct device_thread. The function returns when
 * device->stop is set and no work is left. */
void *device_main(void *argument);

/* ---- Functions of memory.c; a device's thread calls them, or the thread that has taken an inline slot ------------ */

/* A mirror is device memory for the copy of a region of host memory. Makes mirrors for all regions that the job's
 * problems use and that have none yet. */
attn_status memory_take_mirrors(struct device *device, struct slot *slot, struct job *job, attn_error *err);
void memory_drop_mirrors(struct device *device, struct slot *slot);
/* Allocates device memory for the batch in the slot. memory_drop_mirrors() frees this memory. */
attn_status memory_take(struct device *device, struct slot *slot, size_t bytes, void **memory, attn_error *err);

/* Sets the device addresses of those tensors of the job that lie in clients' pinned memory (pages that a driver holds).
 * Call memory_take_mirrors() first. */
void memory_place_pinned(const struct job *job, attn_problem *problem);
/* memory_address() translates a host address to the address of its copy on the device. The host address must be in a
 * region that has a mirror (device copy). memory_place() does this for all tensors of a problem. */
void *memory_address(const struct slot *slot, void *address);
void memory_place(const struct slot *slot, attn_problem *problem);
/* memory_copy_in() puts copies on the slot's stream, from host memory to its copies (mirrors) on the device.
 * memory_copy_out() puts copies on the stream that bring a job's outputs back to the host. */
attn_status memory_copy_in(struct slot *slot, attn_error *err);
attn_status memory_copy_out(struct device *device, struct slot *slot, struct job *job, attn_error *err);
/* Puts copies on the slot's stream. They write the new keys and values of a job's cache transaction to their pages. */
attn_status memory_move(struct device *device, struct slot *slot, const struct job *job, attn_error *err);
/* Does the work of memory_copy_in() and memory_move() in one launch of a kernel. The device must be able to read
 * staging memory (host memory for tensors). */
attn_status memory_move_in(struct slot *slot, const struct job *job, attn_error *err);
/* Makes room for `count` moves in all in the array slot->moves. A move is a copy that a kernel makes. */
attn_status memory_reserve_moves(struct slot *slot, int64_t count, attn_error *err);
/* Makes the workspace (scratch memory of kernels) at least `bytes` large. The contents of a workspace are lost when
 * it grows. */
attn_status memory_grow_workspace(attn_device *handle, size_t bytes, void **workspace, size_t *workspace_bytes,
                                  attn_error *err);
void memory_drop_workspace(attn_device *handle, void **workspace, size_t *workspace_bytes);
/* Frees everything that a slot (a stream and memory for one running batch) of this device has. */
void memory_close_slot(attn_device *handle, struct slot *slot);

/* ---- Functions of merge.c; a device's thread calls them -------------------------------------------------------- */

/* Decides which jobs of the slot's batch are merged into one problem, and for which jobs a kernel makes the copies.
 * Sets the slot's arrays leader, members, place and moved. */
void merge_find(const struct device *device, struct slot *slot);

/* Makes the merged problem of a job (the leader) and of the jobs that join it. The merged tensors lie in newly
 * allocated device memory. */
attn_status merge_take(struct device *device, struct slot *slot, int leader, attn_problem *wide, attn_error *err);

/* Puts a copy kernel on the slot's stream, for those jobs whose `moved` is true. If `out` is false, it copies inputs to
 * the device, and new keys and values to their pages. If `out` is true, it copies outputs to the host. */
attn_status merge_move(struct slot *slot, bool out, attn_error *err);

/* ---- Functions of parts.c, for a part of a cut job; a device's thread calls them -------------------------------- */

/* Returns a problem that consists of some heads, batch rows or queries of `whole`. Its tensors are views of the tensors
 * of `whole`. */
attn_problem parts_of(const attn_problem *whole, enum job_way way, const struct job_range *range);
/* True if the problem reads or writes this tensor when it runs. */
bool parts_use(const attn_problem *p, int id);
/* Makes the problem that a part of a cut job computes. On a device with its own memory, the function allocates device
 * memory for the tensors. */
attn_status parts_take(struct device *device, struct slot *slot, struct job_part *part, attn_problem *problem,
                       attn_error *err);
/* Puts copies on the slot's stream. If `out` is false, they copy the part's inputs to the device. If `out` is true,
 * they copy the part's results to the host. `there` is the part's problem on the device. */
attn_status parts_copy(struct slot *slot, const struct job_part *part, const attn_problem *there, bool out,
                       attn_error *err);

/* ---- Functions that sums.c defines ------------------------------------------------------------------------------- */

/* True if some outputs of the problem are sums over its queries, such as dk and dv. If the job is cut by queries, each
 * part then needs memory on its device for its own sums. */
bool sums_are_needed(const attn_problem *p);
/* Returns the bytes of device memory that each part needs for gradients that are sums over queries, if the problem is
 * cut into `parts` parts. */
int64_t sums_bytes(const attn_problem *p, int parts);
/* Allocates the part's memory for sums on the device. Those outputs of the part's problem that are sums over queries
 * then lie in this memory. Does nothing if the problem has no such outputs. */
attn_status sums_take(struct device *device, struct job_part *part, attn_problem *problem, attn_error *err);
/* Frees the memory that a part of a job has for sums of gradients. Does nothing if there is none. No other part may be
 * reading this memory. */
void sums_drop(struct job_part *part);
/* True if job `a` is older than job `b`. Of two different jobs, one is always older. */
bool sums_older(const struct job *a, const struct job *b);
/* True if a batch that lacks device memory may wait until gradient sums of other jobs (sums.c) are freed. A batch that
 * has such sums itself waits only for older jobs, so that no two jobs wait for each other. Call this with the device's
 * lock held. */
bool sums_will_be_freed(const struct device *device, const struct batch *batch);
/* Puts the work that adds up the part's share (a range of elements of each gradient) on a stream of the part's device.
 * There are three steps: copies from the other devices, kernels that add up, and copies of the results to the host. The
 * events 0 to 3 are recorded before, between and after these steps. */
attn_status sums_launch(attn_stream *stream, const struct job_part *part, attn_error *err);
/* Sets the dtype float32 for the outputs that are sums over queries, because the parts of a cut job compute these
 * outputs in float32. */
void sums_as_float(attn_problem *problem);

/* ---- Functions of truth.c; a device's thread calls them ---------------------------------------------------------- */

/* Reserves memory for the truths (exact outputs in float64) of the slot's batch, and sets truths_left. truths_left
 * becomes 0 if the job needs no truth, or if the device cannot compute it. */
attn_status truth_reserve(struct device *device, struct slot *slot, attn_error *err);
/* Estimates the device time, in seconds, of the work that the next truth_launch() puts on the stream. */
double truth_piece_seconds(const struct slot *slot);
/* Puts the next steps of computing the truth (exact outputs in float64) on the stream. All earlier work on the stream
 * must be done. Call this while truths_left is above 0. */
attn_status truth_launch(struct device *device, struct slot *slot, attn_error *err);

/* ---- Functions that inline.c defines ----------------------------------------------------------------------------- */

/* Opens inline slots (streams on which HTTP threads run small jobs), one for each HTTP thread, if the devices are the
 * CPU or can read staging memory (host memory for tensors). Otherwise it opens none. */
attn_status inline_open(struct devices *devices, const struct config *config, attn_error *err);
void inline_close(struct devices *devices);
/* Lets a device's thread take over a late job: one that an HTTP thread started, and that takes longer than expected. */
void inline_adopt(struct slot *slot, struct job_part *part);

/* ---- Functions that batch.c defines ------------------------------------------------------------------------------ */

/* Returns the floating-point operations that kernels really carry out for a part of a job (the computation of one
 * request). Kernels compute whole tiles, so a small head dimension counts as padded to a tile. */
double batch_padded_flops(const struct job_part *part);
/* Plans `problem`, that is, chooses its kernel. `problem` is an item's problem with this device's addresses. The
 * function adapts the plan that prepare_job() made. A problem of a cache transaction gets a new plan, because its page
 * tables are known only now. */
attn_status batch_plan(const attn_capabilities *can, const struct job *job, int item, const attn_problem *problem,
                       attn_plan *plan, attn_error *err);
/* A summary of the batches that run on a device when a guest wants to begin. A guest is a batch whose flow (client) has
 * no other batch on the device. batch_guest_sees() adds a batch to the summary. */
struct guest_others {
    int count;
    const struct flow *flow; /* flow (client) of the batch that was added to the summary last */
    bool several_flows;
    int64_t oldest_ns, youngest_ns; /* times at which the oldest and the youngest batch in this summary began */
};
void batch_guest_sees(struct guest_others *others, const struct flow *flow, int64_t since_ns);
/* Returns how many nanoseconds a guest (a batch whose client has no other batch on the device) must still wait. The
 * guest's work is expected to take `seconds`. 0 or less: the guest may begin. others->count must be at least 1. */
int64_t batch_guest_wait_ns(const struct guest_others *others, double seconds, int64_t now_ns);

/* Writes the `backend` of a result: the names of the device and the kernel, such as "cpu avx512bf16". */
void batch_name_backend(proto_result *result, const struct device *device, const char *kernel);

#endif
