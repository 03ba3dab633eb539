/* internal.h: what the files of this folder share. The public header is devices.h.
 *
 *   devices.c   the loop's side: opens, closes and describes devices, and submits batches
 *   thread.c    a device's threads: batches on its streams, and when they should be over
 *   memory.c    device memory of a batch: mirrors of its jobs' staging memory, and scratch memory
 *   merge.c     makes one problem of equal small problems; small cache transactions without copies
 *   inline.c    inline slots: small problems that HTTP threads compute or put on a GPU
 *   batch.c     a batch's work, results, times and metrics */
#ifndef DEVICE_INTERNAL_H
#define DEVICE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/base/limits.h"
#include "server/device/devices.h"

enum { LINE = 64 }; /* bytes of a cache line */
#define NEVER INT64_MAX

struct mirror {
    struct job_region host;
    char *device;
    bool copy; /* the host's bytes are copied to the device */
};

/* A place for one batch that runs. */
struct slot {
    attn_stream *stream;
    struct batch *batch; /* NULL: free */
    int64_t due_ns;      /* time at which it should be over */
    int64_t worst_ns;    /* time that its work takes at the slowest rate */
    attn_problem *problems;
    attn_plan *plans;          /* plans of the problems */
    int room, count, launched; /* room for problems and plans; number in this batch; number on the stream */
    double queued_s;           /* estimated seconds of its kernels on the stream; 0: none are known to be there */
    bool blocked;              /* its next kernels wait for the turn of their flow */
    int64_t piece_ns;          /* time when kernels were put on the stream last; before the first, when it began */
    int64_t step;              /* step of attn_run_some() at which the next problems continue */
    int64_t first_step;        /* step at which they begin: 0, or ATTN_EVERY_ROW */
    int64_t began_ns;          /* time when the batch's first mark was on the stream */
    int64_t launched_ns;       /* time when its first kernels were on the stream */
    void *workspace;
    size_t workspace_bytes;
    attn_move *moves; /* moves of a job, with device addresses */
    int64_t move_room;
    struct mirror *mirrors;
    int *regions; /* numbers of the mirrors of regions, sorted by the regions' addresses */
    int mirror_count, mirror_room, region_count;

    /* The arrays below are indexed by the batch's jobs. */
    int16_t leader[CONFIG_MAX_BATCH];  /* the job whose problem it joins; its own number if it joins none */
    int16_t members[CONFIG_MAX_BATCH]; /* of a leader: number of jobs in its problem, including itself */
    int16_t place[CONFIG_MAX_BATCH];   /* the job's position among the members */
    bool moved[CONFIG_MAX_BATCH];      /* moves bring its tensors to the leader's problem and back; it has no mirrors */
    int problem[CONFIG_MAX_BATCH];     /* index in `problems` of its first one */
};

/* A thread of a device. It alone fills and empties its slots. */
struct device_thread {
    struct device *device;
    pthread_t thread;
    struct slot *slots;
    int slot_count;
};

struct device {
    attn_device *handle;
    attn_device_info info;
    int number;         /* index in struct devices */
    void *cache_memory; /* memory of the pages of KV caches; NULL: none */
    struct mailbox *box;
    int message_kind;
    int thread_count;
    struct device_thread threads[DEVICE_MAX_STREAMS];
    bool joined;
    int streams;    /* slots that batches of one flow may use */
    int slot_count; /* number of slots, including those for guests */
    struct slot slots[DEVICE_MAX_STREAMS];

    pthread_mutex_t lock; /* protects the members down to `over`, and the slots' `batch` and its started_ns */
    pthread_cond_t wake;
    struct message *first, **last; /* submitted batches that are not on a stream yet */
    bool stop;
    int threads_ended;
    struct batch *held; /* a batch for which there was no memory while others ran */
    bool held_may_run;  /* another batch has ended since, so it may be tried again */
    unsigned over;      /* number of batches that have ended */

    int64_t watchdog_ns;
    _Atomic int64_t due_ns; /* earliest due_ns of the slots; NEVER: none runs, or the device is not watched */

    /* The loop uses these; other threads read only the atomic ones. */
    int outstanding;
    double flops;
    bool disabled;
    struct batch *batches;
    _Atomic int requests;        /* number of its requests, for /v1/info */
    _Atomic int inline_requests; /* how many of them are in inline slots */
    _Atomic bool usable;
    _Atomic bool lost; /* a thread other than the device's noted that it is lost */
};

/* A path through a device for one HTTP thread at a time. */
struct inline_slot {
    _Alignas(LINE) atomic_flag taken;
    struct device *device;
    attn_device *handle; /* on the CPU its own handle, on a GPU the device's */
    struct slot slot;    /* the stream and workspace of this path */
};

struct devices {
    int count;
    struct device *device[CONFIG_MAX_DEVICES];
    int inline_count; /* 0: the devices are not the CPU, and do not read staging memory */
    struct inline_slot *inline_slots;
    _Atomic int inline_jobs;   /* jobs since the last inline_learn() */
    _Atomic int64_t inline_ns; /* time that these jobs took */
};

/* ---- thread.c ---------------------------------------------------------------------------------------------------- */

/* The main function of a device's thread; the argument is its struct device_thread. It ends when device->stop is set
 * and it has nothing to run. */
void *device_main(void *argument);

/* ---- memory.c: on a device's thread, or on the thread that has taken an inline slot ------------------------------ */

/* Allocates device memory for all regions that a job's problems use. A region that has a mirror keeps it. */
attn_status memory_take_mirrors(struct device *device, struct slot *slot, struct job *job, attn_error *err);
void memory_drop_mirrors(struct device *device, struct slot *slot);
/* Allocates device memory that lives until memory_drop_mirrors(). */
attn_status memory_take(struct device *device, struct slot *slot, size_t bytes, void **memory, attn_error *err);

/* Sets the device addresses of the job's tensors in clients' pinned memory. Call memory_take_mirrors() before. */
void memory_place_pinned(const struct job *job, attn_problem *problem);
/* Translates a host address in a mirrored region to the device's; the next function does this for a whole problem. */
void *memory_address(const struct slot *slot, void *address);
void memory_place(const struct slot *slot, attn_problem *problem);
/* Put copies on the slot's stream: of its mirrors to the device, or of a job's outputs to the host. */
attn_status memory_copy_in(struct slot *slot, attn_error *err);
attn_status memory_copy_out(struct device *device, struct slot *slot, struct job *job, attn_error *err);
/* Puts the moves of a job's cache transaction on the slot's stream: new keys and values go to their pages. */
attn_status memory_move(struct device *device, struct slot *slot, const struct job *job, attn_error *err);
/* Combines the copies of the slot's mirrors and the moves of a cache transaction, on a device
 * that reads staging memory. */
attn_status memory_move_in(struct slot *slot, const struct job *job, attn_error *err);
/* Makes room for `count` moves in all. */
attn_status memory_reserve_moves(struct slot *slot, int64_t count, attn_error *err);
/* Provides scratch memory of at least `bytes`. Its contents are lost when it grows. */
attn_status memory_grow_workspace(attn_device *handle, size_t bytes, void **workspace, size_t *workspace_bytes,
                                  attn_error *err);
void memory_drop_workspace(attn_device *handle, void **workspace, size_t *workspace_bytes);
/* Frees all that a slot of this device has. */
void memory_close_slot(attn_device *handle, struct slot *slot);

/* ---- merge.c: on a device's thread ----------------------------------------------------------------------------- */

/* Decides which jobs of the slot's batch become one problem, and which are moved: fills
 * leader, members, place, moved. */
void merge_find(const struct device *device, struct slot *slot);

/* Makes the one problem of a moved leader and its members, in newly allocated device memory. */
attn_status merge_take(struct device *device, struct slot *slot, int leader, attn_problem *wide, attn_error *err);

/* Puts the moves of moved jobs on the slot's stream: their inputs to the device, and new keys and values to their
 * pages. `out`: moves their outputs back instead. */
attn_status merge_move(struct slot *slot, bool out, attn_error *err);

/* ---- inline.c ---------------------------------------------------------------------------------------------------- */

/* Opens as many slots as there are HTTP threads, if the devices are the CPU or read staging memory; else none. */
attn_status inline_open(struct devices *devices, const struct config *config, attn_error *err);
void inline_close(struct devices *devices);
/* A device's thread takes over the work that an inline slot left on its stream. */
void inline_adopt(struct slot *slot, struct job_part *part);

/* ---- batch.c ----------------------------------------------------------------------------------------------------- */

/* The operations of a job as kernels do them, in whole tiles: small heads count as padded. */
double batch_padded_flops(const struct job *job);
/* Plans `problem`, which is the problem of an item with this device's addresses. prepare_job() has planned it, unless
 * it belongs to a cache transaction, whose tables are known only now. */
attn_status batch_plan(const attn_capabilities *can, const struct job *job, int item, const attn_problem *problem,
                       attn_plan *plan, attn_error *err);
/* Summary of the batches beside which a guest would run; batch_guest_sees() adds one. */
struct guest_others {
    int count;
    const struct flow *flow; /* flow of one of the batches */
    bool several_flows;
    int64_t oldest_ns, youngest_ns; /* times when the first and the last batch began */
};
void batch_guest_sees(struct guest_others *others, const struct flow *flow, int64_t since_ns);
/* How long a guest of so many expected seconds must wait; 0 or less: it may begin. others->count must be at least 1. */
int64_t batch_guest_wait_ns(const struct guest_others *others, double seconds, int64_t now_ns);

/* Names the device and the kernel of a result: "cpu avx512bf16". */
void batch_name_backend(proto_result *result, const struct device *device, const char *kernel);

#endif
