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

enum { LINE = 64 };
#define NEVER INT64_MAX

/* Returns the size in bytes of a contiguous tensor with a checked shape, rounded up to a multiple of MERGE_LINE. */
static inline size_t lines_of(const attn_tensor *t)
{
    int64_t bytes = 0;
    /* cannot fail, because the tensor was checked before */
    (void)attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes);
    return ((size_t)bytes + MERGE_LINE - 1) / MERGE_LINE * MERGE_LINE;
}

struct mirror {
    struct job_region host;
    char *device;
    bool copy; /* whether the host memory must be copied to this device memory before the kernels run */
};

/* A place for one batch that runs on a device: a stream, and the memory that belongs to the batch. */
struct slot {
    attn_stream *stream;
    struct batch *batch;
    int64_t due_ns; /* time by which the batch should be over, for the watchdog */
    /* time that the batch would take at DEVICE_SLOWEST_FLOPS, the slowest rate that the watchdog accepts */
    int64_t worst_ns;
    attn_problem *problems;
    attn_plan *plans; /* one plan (chosen kernel) for each element of `problems` */
    /* room: number of elements of `problems` and `plans`. count: number of the batch's problems. launched: number of
     * problems whose kernels are on the stream. */
    int room, count, launched;
    /* estimated time in seconds of the batch's kernels that are on the stream; 0: no kernels, or the time is unknown */
    double queued_s;
    /* Whether the batch must wait before it launches more kernels, because other batches of the same client come first
     * (waits_for_turn() of thread.c). */
    bool blocked;
    /* Time of the last launch of kernels; before the first launch, the time when the batch began. */
    int64_t piece_ns;
    int64_t step; /* attn_run_some() launches a long problem in steps; this is the next step */
    /* First step of attn_run_some() for this batch. It is 0, or ATTN_EVERY_ROW if the batch runs again because kernels
     * have skipped rows with scores beyond float32's range. */
    int64_t first_step;
    /* Exact outputs (in float64) are computed for one item (problem) after another. truths_left: number of items whose
     * kernels for exact outputs are not all on the stream. truth_item: the first of these items. truth_step: the next
     * step of that item (truth.c). */
    int truths_left, truth_item;
    int64_t truth_step;
    bool truth_began; /* whether kernels for the batch's exact outputs have been put on the stream */
    void *truth_out;  /* device memory for the exact `out` (in float64) of one item (problem) */
    /* device memory for the differences between the batch's outputs and the exact outputs; only for a part of a cut
     * job */
    attn_truth_distance *truth_distances;
    int64_t began_ns;
    int64_t launched_ns;
    void *workspace;
    size_t workspace_bytes;
    attn_move *moves; /* copies that one kernel makes (attn_moves()), for merged problems and cache transactions */
    int64_t move_room;
    struct mirror *mirrors;
    /* indices in `mirrors` of the mirrors that are copies of host memory, sorted by host address */
    int *regions;
    int mirror_count, mirror_room, region_count;

    /* Each array below has one element for each job of the batch. */
    /* The problem of job j is merged into the problem of job leader[j]. leader[j] is j if job j is not merged, or if
     * other jobs are merged into it. */
    int16_t leader[CONFIG_MAX_BATCH];
    /* for each leader: the number of jobs in the merged problem, the leader included */
    int16_t members[CONFIG_MAX_BATCH];
    int16_t place[CONFIG_MAX_BATCH]; /* position of each job's problem in its merged problem */
    /* whether a kernel copies the job's tensors to and from the merged problem; if so, the job has no device memory of
     * its own */
    bool moved[CONFIG_MAX_BATCH];
    int problem[CONFIG_MAX_BATCH]; /* problem[j] is the index in `problems` of the first problem of job j */
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
    void *cache_memory; /* pages of KV caches; NULL: none */
    struct mailbox *box;
    int message_kind;
    int thread_count;
    struct device_thread threads[DEVICE_MAX_STREAMS];
    bool joined;
    int streams; /* number of slots that one flow (client) may use, and so the number of its running batches */
    /* number of slots; each slot can run one batch. Includes the slots for guests (batches of clients that have no
     * other batch on the device). */
    int slot_count;
    struct slot slots[DEVICE_MAX_STREAMS];

    /* The lock protects the members from here down to `over`, and `batch` and `started_ns` of each slot. */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct message *first, **last; /* the inbox: submitted batches that are not on a stream yet */
    bool stop;
    int threads_ended;
    /* The batch held back for lack of device memory, until other batches end or gradient sums of other jobs are freed;
     * NULL: none. */
    struct batch *held;
    /* whether memory has been freed since the batch `held` was held back */
    bool held_may_run;
    /* The parts of jobs with sums of gradients (sums.c) in this device's memory, linked by next_kept. Parts whose
     * memory may never be freed, because a device hangs, are not in the list. */
    struct job_part *kept;
    unsigned over; /* how often memory was freed: a batch ended, or the main thread freed gradient sums */

    int64_t watchdog_ns;
    /* Earliest time by which a running batch should be over, for the watchdog; NEVER: no batch runs, or the device is
     * not watched. */
    _Atomic int64_t due_ns;

    /* Only the main thread uses the members below; other threads read the atomic ones. */
    int outstanding;
    double flops;
    bool disabled;
    struct batch *batches;
    _Atomic int requests;        /* number of requests on the device, for /v1/info */
    _Atomic int inline_requests; /* number of the requests counted in `requests` that HTTP threads run themselves
                                  * (inline slots) */
    _Atomic bool usable;
    _Atomic bool lost; /* whether another part of the server has noted that the device is lost */
};

/* A stream of a device on which HTTP threads run small jobs, one thread at a time. */
struct inline_slot {
    _Alignas(LINE) atomic_flag taken;
    struct device *device;
    /* handle of the device: on the CPU, this stream has a handle of its own; on a GPU, it uses the handle of the
     * device's thread */
    attn_device *handle;
    struct slot slot;
};

struct devices {
    int count;
    struct device *device[CONFIG_MAX_DEVICES];
    int64_t split_above_ms; /* --split-above-ms */
    /* number of inline slots; 0: the devices are GPUs that cannot read staging memory (host memory for tensors) */
    int inline_count;
    struct inline_slot *inline_slots;
    _Atomic int inline_jobs;   /* number of jobs run by HTTP threads since the last inline_learn() */
    _Atomic int64_t inline_ns; /* time in nanoseconds that the jobs counted in inline_jobs took */
};

/* ---- Functions that thread.c defines ----------------------------------------------------------------------------- */

/* The main function of a device's thread; `argument` is its struct device_thread. Returns when device->stop is set and
 * no work is left. */
void *device_main(void *argument);

/* ---- Functions of memory.c; a device's thread calls them, or the thread that has taken an inline slot ------------ */

/* Makes a mirror (device memory for a copy of host memory) for each region of host memory that the job uses and that
 * has no mirror yet. */
attn_status memory_take_mirrors(struct device *device, struct slot *slot, struct job *job, attn_error *err);
void memory_drop_mirrors(struct device *device, struct slot *slot);
/* Allocates device memory for the batch in the slot. memory_drop_mirrors() frees it. */
attn_status memory_take(struct device *device, struct slot *slot, size_t bytes, void **memory, attn_error *err);

/* Sets the device addresses of the job's tensors in clients' pinned memory. Call memory_take_mirrors() first. */
void memory_place_pinned(const struct job *job, attn_problem *problem);
/* memory_address() translates an address in host memory that has a mirror (device copy) to the device. memory_place()
 * does this for all tensors of a problem. */
void *memory_address(const struct slot *slot, void *address);
void memory_place(const struct slot *slot, attn_problem *problem);
/* memory_copy_in() enqueues copies of host memory to its mirrors (device copies) on the slot's stream.
 * memory_copy_out() enqueues copies of a job's outputs to the host. */
attn_status memory_copy_in(struct slot *slot, attn_error *err);
attn_status memory_copy_out(struct device *device, struct slot *slot, struct job *job, attn_error *err);
/* Enqueues, on the slot's stream, the copies of a cache transaction's new keys and values to their pages. */
attn_status memory_move(struct device *device, struct slot *slot, const struct job *job, attn_error *err);
/* Does the work of memory_copy_in() and memory_move() in one launch, on a device that can read staging memory (host
 * memory). */
attn_status memory_move_in(struct slot *slot, const struct job *job, attn_error *err);
/* Makes room in the array slot->moves for `count` copies, which a kernel will make. */
attn_status memory_reserve_moves(struct slot *slot, int64_t count, attn_error *err);
/* Makes the scratch memory of kernels at least `bytes` large; its contents are lost when it grows. */
attn_status memory_grow_workspace(attn_device *handle, size_t bytes, void **workspace, size_t *workspace_bytes,
                                  attn_error *err);
void memory_drop_workspace(attn_device *handle, void **workspace, size_t *workspace_bytes);
void memory_close_slot(attn_device *handle, struct slot *slot);

/* ---- Functions of merge.c; a device's thread calls them -------------------------------------------------------- */

/* Decides which jobs of the batch are merged into one problem, and for which jobs a kernel makes the copies. Sets the
 * arrays leader, members, place and moved. */
void merge_find(const struct device *device, struct slot *slot);

/* Makes the merged problem of the job `leader` and of the jobs that join it, in new device memory. */
attn_status merge_take(struct device *device, struct slot *slot, int leader, attn_problem *wide, attn_error *err);

/* Enqueues a kernel on the slot's stream that makes the copies of all jobs j with moved[j]. If `out` is true, it copies
 * outputs to the host. Otherwise it copies inputs to the device, and new keys and values to their pages. */
attn_status merge_move(struct slot *slot, bool out, attn_error *err);

/* ---- Functions of parts.c, for a part of a cut job; a device's thread calls them -------------------------------- */

/* Returns the problem that computes only the heads, batch rows or queries in `range` of the problem `whole`. Its
 * tensors are views of the tensors of `whole`. */
attn_problem parts_of(const attn_problem *whole, enum job_way way, const struct job_range *range);
/* True if the problem reads or writes this tensor when it runs. */
bool parts_use(const attn_problem *p, int id);
/* Makes the problem of a part of a cut job. On a device with its own memory, also allocates device memory for the
 * problem's tensors. */
attn_status parts_take(struct device *device, struct slot *slot, struct job_part *part, attn_problem *problem,
                       attn_error *err);
/* Enqueues copies on the slot's stream. If `out` is true, the part's results are copied to the host. Otherwise the
 * part's inputs are copied to the device. `there` is the part's problem on the device. */
attn_status parts_copy(struct slot *slot, const struct job_part *part, const attn_problem *there, bool out,
                       attn_error *err);

/* ---- Functions that sums.c defines ------------------------------------------------------------------------------- */

/* True if some outputs are sums over queries, such as dk and dv. Each part of a job cut by queries then needs device
 * memory for its own sums. */
bool sums_are_needed(const attn_problem *p);
/* Returns the bytes of device memory that each of `parts` parts needs for gradients that are sums over queries. */
int64_t sums_bytes(const attn_problem *p, int parts);
/* Allocates the part's device memory for outputs that are sums over queries, and sets these outputs' addresses. */
attn_status sums_take(struct device *device, struct job_part *part, attn_problem *problem, attn_error *err);
/* Frees the memory for a part's sums of gradients, if any. No other part may be reading it. */
void sums_drop(struct job_part *part);
/* True if job `a` is older than job `b`. Of two different jobs, one is always older. */
bool sums_older(const struct job *a, const struct job *b);
/* True if a batch that lacks device memory may wait until gradient sums of other jobs (sums.c) are freed. A batch with
 * such sums of its own waits only for older jobs, so that no two jobs wait for each other. To be called with the
 * device's lock held. */
bool sums_will_be_freed(const struct device *device, const struct batch *batch);
/* Enqueues the work that adds up the part's share (a range of elements of each gradient) on a stream of its device:
 * copies from the other devices, kernels that add up, and copies to the host. The events 0 to 3 are recorded before,
 * between and after these steps. */
attn_status sums_launch(attn_stream *stream, const struct job_part *part, attn_error *err);
/* Sets the dtype of outputs that are sums over queries to float32, because the parts of a cut job compute these sums in
 * float32. */
void sums_as_float(attn_problem *problem);

/* ---- Functions of truth.c; a device's thread calls them ---------------------------------------------------------- */

/* Reserves memory for the exact outputs (in float64) of the slot's batch. Sets truths_left to the number of items whose
 * exact outputs must be computed: 0 if the job needs none, or if the device cannot compute them. */
attn_status truth_reserve(struct device *device, struct slot *slot, attn_error *err);
/* Estimates the device time, in seconds, of the next truth_launch(). */
double truth_piece_seconds(const struct slot *slot);
/* Enqueues the next part of the computation of exact outputs on the slot's stream. Call it while truths_left is above
 * 0, and only when all earlier work on the stream is done. */
attn_status truth_launch(struct device *device, struct slot *slot, attn_error *err);

/* ---- Functions that inline.c defines ----------------------------------------------------------------------------- */

/* Opens an inline slot (a stream for small jobs) for each HTTP thread. Does so only if the devices are the CPU or can
 * read staging memory (host memory). */
attn_status inline_open(struct devices *devices, const struct config *config, attn_error *err);
void inline_close(struct devices *devices);
/* Lets a device's thread take over a late job, which an HTTP thread started. */
void inline_adopt(struct slot *slot, struct job_part *part);

/* ---- Functions that batch.c defines ------------------------------------------------------------------------------ */

/* Returns the floating-point operations that kernels really carry out for a part of a job. A small head dimension
 * counts as padded to a tile. */
double batch_padded_flops(const struct job_part *part);
/* Chooses the kernel for `problem`, an item's problem with this device's addresses, by adapting the plan that
 * prepare_job() made. A cache transaction gets a new plan, because its page tables are known only now. */
attn_status batch_plan(const attn_capabilities *can, const struct job *job, int item, const attn_problem *problem,
                       attn_plan *plan, attn_error *err);
/* Summary of the batches that run on a device, for a guest that wants to begin (a batch whose client has no other batch
 * there). batch_guest_sees() adds one batch to the summary. */
struct guest_others {
    int count;
    const struct flow *flow; /* flow (client) of the last batch added */
    bool several_flows;
    int64_t oldest_ns, youngest_ns; /* start times of the oldest and of the youngest batch added */
};
void batch_guest_sees(struct guest_others *others, const struct flow *flow, int64_t since_ns);
/* Returns how many nanoseconds a guest must still wait; 0 or less: it may begin. A guest is a batch whose client has no
 * other batch on the device. This guest is expected to take `seconds` seconds. others->count must be at least 1. */
int64_t batch_guest_wait_ns(const struct guest_others *others, double seconds, int64_t now_ns);

/* Writes the `backend` of a result: the names of the device and the kernel, such as "cpu avx512bf16", or only "cpu" if
 * no kernel was needed. */
void batch_name_backend(proto_result *result, const struct device *device, const char *kernel);

#endif
