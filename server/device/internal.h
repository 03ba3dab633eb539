/* internal.h: types and functions that the files of this folder share. The public header is devices.h.
 *
 *   devices.c   the loop's side: opens, closes and describes devices, and submits batches
 *   thread.c    a device's threads: batches on its streams, and when they should be over
 *   memory.c    device memory of a batch: mirrors of its jobs' staging memory, and scratch memory
 *   truth.c     verifies outputs in float64 on the device that made them; computes the truth of checks
 *   merge.c     makes one problem of equal small problems; small cache transactions without copies
 *   cut.c       cuts a problem that takes long over several devices, by groups of heads, batch rows or queries
 *   parts.c     a part of such a problem on its device
 *   sums.c      adds up the gradients of parts by queries that are sums over all queries
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

/* Returns the bytes that a checked tensor takes if it is contiguous, rounded up to a multiple of MERGE_LINE. */
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
    bool copy; /* true: the host's bytes must be copied to the device before the kernels run */
};

/* A place on a device, with a stream, for one batch that runs. */
struct slot {
    attn_stream *stream;
    struct batch *batch; /* the batch that runs in the slot; NULL: the slot is free */
    int64_t due_ns;      /* time at which the batch should be over, for the watchdog */
    int64_t worst_ns;    /* time that the batch's work would take at the slowest rate, DEVICE_SLOWEST_FLOPS */
    attn_problem *problems;
    attn_plan *plans; /* one plan for each of `problems` */
    /* room: number of problems for which the arrays have room; count: number of problems of this batch; launched:
     * number of these problems whose kernels are on the stream. */
    int room, count, launched;
    /* estimated seconds of the kernels that the batch has on the stream; 0: no kernels are known to be on the stream */
    double queued_s;
    /* true: the batch must wait for the turn of its flow (client) before more kernels are put on the stream */
    bool blocked;
    /* Time when kernels were last put on the stream. Before the first kernels it is the time when the batch began. */
    int64_t piece_ns;
    int64_t step; /* the step of attn_run_some() at which a long problem continues */
    /* first step of attn_run_some() for this batch: 0, or ATTN_EVERY_ROW if the batch runs again for rows that were
     * skipped */
    int64_t first_step;
    /* truths_left: number of items whose truth (outputs recomputed in float64) is not on the stream yet; truth_item:
     * index of the first of these items; truth_step: next step of computing its truth (truth.c). */
    int truths_left, truth_item;
    int64_t truth_step;
    bool truth_began; /* true: the first step of computing the truth (float64) is on the stream */
    void *truth_out;  /* device memory for the truth (the values in float64) of an item's out */
    /* device memory for the distances of a cut part's outputs from their truth */
    attn_truth_distance *truth_distances;
    int64_t began_ns;    /* time when the batch's first mark (event) was on the stream */
    int64_t launched_ns; /* time when the batch's first kernels were on the stream */
    void *workspace;
    size_t workspace_bytes;
    attn_move *moves; /* the moves (copies) of a job's cache transaction, with device addresses */
    int64_t move_room;
    struct mirror *mirrors;
    /* indices of the mirrors (device copies) of regions of host memory, sorted by the regions' addresses */
    int *regions;
    int mirror_count, mirror_room, region_count;

    /* The arrays below are indexed by the batch's jobs. */
    /* Number of the job (the leader) whose merged problem this job joins, or its own number if it joins none. */
    int16_t leader[CONFIG_MAX_BATCH];
    /* for the leader of a merged problem: number of jobs in this problem, the leader included */
    int16_t members[CONFIG_MAX_BATCH];
    int16_t place[CONFIG_MAX_BATCH]; /* the job's position among the members of its merged problem */
    /* [job]: true if a kernel copies the job's tensors to the merged problem of its leader and back; the job then
     * has no device memory of its own */
    bool moved[CONFIG_MAX_BATCH];
    int problem[CONFIG_MAX_BATCH]; /* index of the job's first problem in the slot's array `problems` */
};

/* A thread of a device. Only this thread fills and empties its slots. */
struct device_thread {
    struct device *device;
    pthread_t thread;
    struct slot *slots;
    int slot_count;
};

struct device {
    attn_device *handle;
    attn_device_info info;
    int number;         /* number of the device in struct devices */
    void *cache_memory; /* memory for the pages of KV caches; NULL: the device has none */
    struct mailbox *box;
    int message_kind;
    int thread_count;
    struct device_thread threads[DEVICE_MAX_STREAMS];
    bool joined;
    int streams; /* number of slots (places for running batches) that one flow (client) may use */
    /* number of all slots, also those for guests (batches of flows that have no other batch on the device) */
    int slot_count;
    struct slot slots[DEVICE_MAX_STREAMS];

    /* Protects the members down to `over`, and the members `batch` and started_ns of each slot. */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct message *first, **last; /* submitted batches that are not on a stream yet (the inbox) */
    bool stop;
    int threads_ended;
    /* The batch that is held back, because there was too little device memory for it while other batches ran, or while
     * the device had sums of other jobs. NULL: none. */
    struct batch *held;
    /* true: memory has been freed since `held` was set, so the held batch may be tried again */
    bool held_may_run;
    /* The parts whose memory for sums (sums.c) is on this device, linked by next_kept. Parts whose memory may never be
     * freed, because a device hangs, are not in the list. */
    struct job_part *kept;
    unsigned over; /* number of batches that have ended, plus the number of times that the loop has freed sums */

    int64_t watchdog_ns;
    /* The earliest time at which a batch of the slots should be over. NEVER: no batch runs, or the device is not
     * watched. */
    _Atomic int64_t due_ns;

    /* The loop uses the members below; other threads read only the atomic ones among them. */
    int outstanding;
    double flops;
    bool disabled;
    struct batch *batches;
    _Atomic int requests;        /* number of requests on the device, for /v1/info */
    _Atomic int inline_requests; /* number of the requests on the device that HTTP threads run in inline slots */
    _Atomic bool usable;
    _Atomic bool lost; /* true: a thread that does not belong to the device has noted that the device is lost */
};

/* A stream of a device for HTTP threads, used by one of them at a time. */
struct inline_slot {
    _Alignas(LINE) atomic_flag taken;
    struct device *device;
    /* on the CPU: a device handle for this slot alone; on a GPU: the handle that the device's thread uses too */
    attn_device *handle;
    struct slot slot; /* the stream, workspace and batch of the inline slot */
};

struct devices {
    int count;
    struct device *device[CONFIG_MAX_DEVICES];
    int64_t split_above_ms; /* --split-above-ms */
    /* number of inline slots, through which HTTP threads run jobs; 0: the devices are not the CPU, and cannot read
     * staging memory */
    int inline_count;
    struct inline_slot *inline_slots;
    _Atomic int inline_jobs;   /* number of jobs that HTTP threads have run since the last call of inline_learn() */
    _Atomic int64_t inline_ns; /* time in nanoseconds that HTTP threads took for the jobs counted in inline_jobs */
};

/* ---- Functions that thread.c defines ----------------------------------------------------------------------------- */

/* The main function of a device's thread; the argument is its struct device_thread. The function ends when device->stop
 * is set and no work is left. */
void *device_main(void *argument);

/* ---- Functions of memory.c; a device's thread calls them, or the thread that has taken an inline slot ------------ */

/* Allocates device memory (mirrors) for all regions of host memory that a job's problems use. A region that has a
 * mirror keeps it. */
attn_status memory_take_mirrors(struct device *device, struct slot *slot, struct job *job, attn_error *err);
void memory_drop_mirrors(struct device *device, struct slot *slot);
/* Allocates device memory that exists until memory_drop_mirrors() is called for the slot. */
attn_status memory_take(struct device *device, struct slot *slot, size_t bytes, void **memory, attn_error *err);

/* Sets the device addresses of the job's tensors that lie in clients' pinned memory. Call memory_take_mirrors()
 * before. */
void memory_place_pinned(const struct job *job, attn_problem *problem);
/* Translates a host address in a mirrored region to the address of its copy on the device. memory_place() does this for
 * all tensors of a problem. */
void *memory_address(const struct slot *slot, void *address);
void memory_place(const struct slot *slot, attn_problem *problem);
/* memory_copy_in() puts copies on the slot's stream that fill the slot's mirrors (device memory for regions of host
 * memory). memory_copy_out() puts copies on the stream that bring a job's outputs to the host. */
attn_status memory_copy_in(struct slot *slot, attn_error *err);
attn_status memory_copy_out(struct device *device, struct slot *slot, struct job *job, attn_error *err);
/* Puts the moves (copies) of a job's cache transaction on the slot's stream: new keys and values go to their pages. */
attn_status memory_move(struct device *device, struct slot *slot, const struct job *job, attn_error *err);
/* Fills the slot's mirrors (device memory for regions of host memory) and makes the moves (copies) of a cache
 * transaction, all in one launch of a kernel. The device must be able to read staging memory. */
attn_status memory_move_in(struct slot *slot, const struct job *job, attn_error *err);
/* Makes room in the slot for `count` moves (copies that a kernel makes) in all. */
attn_status memory_reserve_moves(struct slot *slot, int64_t count, attn_error *err);
/* Makes the workspace (scratch memory of kernels) at least `bytes` large. The contents of a workspace are lost when
 * it grows. */
attn_status memory_grow_workspace(attn_device *handle, size_t bytes, void **workspace, size_t *workspace_bytes,
                                  attn_error *err);
void memory_drop_workspace(attn_device *handle, void **workspace, size_t *workspace_bytes);
/* Frees everything that a slot of this device has. */
void memory_close_slot(attn_device *handle, struct slot *slot);

/* ---- Functions of merge.c; a device's thread calls them -------------------------------------------------------- */

/* Decides which jobs of the slot's batch are merged into one problem, and which jobs are moved (copied by kernels).
 * Sets leader, members, place and moved. */
void merge_find(const struct device *device, struct slot *slot);

/* Makes the merged problem of a leader (the job whose number names the problem) and the jobs that join it, in newly
 * allocated device memory. */
attn_status merge_take(struct device *device, struct slot *slot, int leader, attn_problem *wide, attn_error *err);

/* Puts on the slot's stream the moves (copies by a kernel) of all jobs that are copied by moves: inputs to the device,
 * new keys and values to their pages. With `out`: the moves that copy outputs back to the host. */
attn_status merge_move(struct slot *slot, bool out, attn_error *err);

/* ---- Functions of parts.c, for a part of a cut job; a device's thread calls them -------------------------------- */

/* Returns a problem that consists of some heads, batch rows or queries of `whole`. Its tensors are views of the
 * tensors of `whole`. */
attn_problem parts_of(const attn_problem *whole, enum job_way way, const struct job_range *range);
/* True if the tensor is read or written when the problem runs. */
bool parts_use(const attn_problem *p, int id);
/* Makes the part's problem. On a device with its own memory, the tensors get new memory there. */
attn_status parts_take(struct device *device, struct slot *slot, struct job_part *part, attn_problem *problem,
                       attn_error *err);
/* Puts the copies of the part's inputs on the slot's stream, or with `out` the copies of the part's results to the
 * host. `there` is the part's problem on the device. */
attn_status parts_copy(struct slot *slot, const struct job_part *part, const attn_problem *there, bool out,
                       attn_error *err);

/* ---- Functions that sums.c defines ------------------------------------------------------------------------------- */

/* True if some outputs of the problem are sums over its queries. If the problem's job is cut by queries, each part
 * needs memory on its device for its own sums. */
bool sums_are_needed(const attn_problem *p);
/* Returns the bytes of device memory that each part needs for its sums, if the problem is cut into `parts` parts. */
int64_t sums_bytes(const attn_problem *p, int parts);
/* Allocates the part's memory for sums on the device, and lets those outputs of the part's problem lie in it that are
 * sums over queries. Does nothing if the part's job has none. */
attn_status sums_take(struct device *device, struct job_part *part, attn_problem *problem, attn_error *err);
/* Frees the part's memory for sums; does nothing if there is none. No other part may be reading this memory. */
void sums_drop(struct job_part *part);
/* True if job a came before job b. No two jobs came at the same time in this order. */
bool sums_older(const struct job *a, const struct job *b);
/* True if a batch that lacks memory may wait for sums of other jobs on the device. A part that has sums itself waits
 * only for sums of older jobs, so that no two jobs wait for each other. Call this with the device's lock held. */
bool sums_will_be_freed(const struct device *device, const struct batch *batch);
/* Puts on the stream, which belongs to the part's device: copies of the part's share from the other devices, the sums,
 * and copies of the results to the host. Puts the marks 0 to 3 before, between and after them. */
attn_status sums_launch(attn_stream *stream, const struct job_part *part, attn_error *err);
/* Sets the dtype float32 for the outputs that are sums over queries, as parts of a cut job compute them. */
void sums_as_float(attn_problem *problem);

/* ---- Functions of truth.c; a device's thread calls them ---------------------------------------------------------- */

/* Reserves memory for the truths (outputs recomputed in float64) of the slot's batch, and sets truths_left. truths_left
 * becomes 0 if the job wants no truth or the device computes none. */
attn_status truth_reserve(struct device *device, struct slot *slot, attn_error *err);
/* Estimates the device time, in seconds, of the work that the next truth_launch() puts on the stream. */
double truth_piece_seconds(const struct slot *slot);
/* Puts the next steps of computing the truth on the stream. All earlier work on the stream must be done. Call this
 * while truths_left is above 0. */
attn_status truth_launch(struct device *device, struct slot *slot, attn_error *err);

/* ---- Functions that inline.c defines ----------------------------------------------------------------------------- */

/* Opens as many inline slots (streams for HTTP threads that run small jobs themselves) as there are HTTP threads, if
 * the devices are the CPU or can read staging memory. Otherwise it opens none. */
attn_status inline_open(struct devices *devices, const struct config *config, attn_error *err);
void inline_close(struct devices *devices);
/* Lets a device's thread take over a late job, which an HTTP thread has left running on the stream of an inline
 * slot. */
void inline_adopt(struct slot *slot, struct job_part *part);

/* ---- Functions that batch.c defines ------------------------------------------------------------------------------ */

/* Returns the floating-point operations that kernels really carry out for a part of a job. Kernels compute whole tiles,
 * so small heads count with their padding. */
double batch_padded_flops(const struct job_part *part);
/* Plans `problem`, the problem of an item with this device's addresses. The plan of prepare_job() is adapted. A
 * problem of a cache transaction is planned anew, because its page tables are known only now. */
attn_status batch_plan(const attn_capabilities *can, const struct job *job, int item, const attn_problem *problem,
                       attn_plan *plan, attn_error *err);
/* A summary of the batches that already run on a device when a guest wants to begin. A guest is the batch of a flow
 * (client) that has no other batch on the device. batch_guest_sees() adds a batch to the summary. */
struct guest_others {
    int count;
    const struct flow *flow; /* flow (client) of the batch that was added to the summary last */
    bool several_flows;
    int64_t oldest_ns, youngest_ns; /* times at which the oldest and the youngest batch in this summary began */
};
void batch_guest_sees(struct guest_others *others, const struct flow *flow, int64_t since_ns);
/* Returns how many nanoseconds a guest (see struct guest_others) must still wait if its work is expected to take
 * `seconds`; 0 or less: it may begin. others->count must be at least 1. */
int64_t batch_guest_wait_ns(const struct guest_others *others, double seconds, int64_t now_ns);

/* Writes the device and the kernel of a result as its backend, such as "cpu avx512bf16". */
void batch_name_backend(proto_result *result, const struct device *device, const char *kernel);

#endif
