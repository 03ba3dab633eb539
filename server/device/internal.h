/* internal.h: what the files of this folder share; devices.h is what others see.
 *
 *   devices.c   opens, closes, describes, and gives batches to devices: the loop's side
 *   thread.c    a device's threads: batches on its streams, and until when they should be over
 *   memory.c    device memory of a batch: mirrors of what its jobs have in staging memory, and scratch memory
 *   merge.c     equal small problems of a batch leave as one problem, small steps on caches without copies
 *   inline.c    inline slots: small problems, computed or put on a GPU by the HTTP thread that received them
 *   batch.c     what a batch is worth and leaves behind: results, times, metrics */
#ifndef DEVICE_INTERNAL_H
#define DEVICE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/base/limits.h"
#include "server/device/devices.h"

enum { LINE = 64 }; /* of the cache */
#define NEVER INT64_MAX

struct mirror {
    struct job_region host;
    char *device;
    bool copy; /* the device shall have what the host has */
};

/* One batch in flight. */
struct slot {
    attn_stream *stream;
    struct batch *batch; /* NULL: free */
    int64_t due_ns;      /* when it should be over */
    int64_t worst_ns;    /* what its work takes at the very slowest */
    attn_problem *problems;
    attn_plan *plans;          /* of the problems */
    int room, count, launched; /* there is room for, of both; of this batch; of those, on the stream */
    bool queued;               /* some of the batch may be on the stream */
    int64_t step;              /* where attn_run_some() of the next problems goes on */
    int64_t first_step;        /* where it begins: 0, or ATTN_EVERY_ROW */
    int64_t began_ns;          /* when the first mark of the batch had been put on the stream, */
    int64_t launched_ns;       /* and its first kernels */
    void *workspace;
    size_t workspace_bytes;
    attn_move *moves; /* of a job, with the addresses that the device knows */
    int64_t move_room;
    struct mirror *mirrors;
    int *regions; /* numbers of the mirrors of regions, in the order of the regions' addresses */
    int mirror_count, mirror_room, region_count;

    /* By the batch's jobs: */
    int16_t leader[CONFIG_MAX_BATCH];  /* the job whose problem it joins; its own number: none */
    int16_t members[CONFIG_MAX_BATCH]; /* of a leader: jobs that its problem serves, itself with them */
    int16_t place[CONFIG_MAX_BATCH];   /* of the job's numbers among those of the members */
    bool moved[CONFIG_MAX_BATCH];      /* moves bring its tensors to the leader's problem and back: no mirrors */
    int problem[CONFIG_MAX_BATCH];     /* the first of its problems, in `problems` */
};

/* A thread of a device, and the slots that it alone fills and empties. */
struct device_thread {
    struct device *device;
    pthread_t thread;
    struct slot *slots;
    int slot_count;
};

struct device {
    attn_device *handle;
    attn_device_info info;
    int number;         /* in struct devices */
    void *cache_memory; /* the pages of KV caches; NULL: none */
    struct mailbox *box;
    int message_kind;
    int thread_count;
    struct device_thread threads[DEVICE_MAX_STREAMS];
    bool joined;
    int streams;    /* batches that one flow may have on slots */
    int slot_count; /* with the slots for guests */
    struct slot slots[DEVICE_MAX_STREAMS];

    pthread_mutex_t lock; /* of what follows, and of slots' `batch` and its started_ns */
    pthread_cond_t wake;
    struct message *first, **last; /* batches submitted, not yet on a stream */
    bool stop;
    int threads_ended;
    struct batch *held; /* there was no memory for it while others ran */
    bool held_may_run;  /* one of them is over */
    unsigned over;      /* batches that are */

    int64_t watchdog_ns;
    _Atomic int64_t due_ns; /* the first of the slots'; NEVER: nothing runs, or nobody watches */

    /* The loop's. */
    int outstanding;
    double flops;
    bool disabled;
    struct batch *batches;
    _Atomic int requests;        /* for /v1/info */
    _Atomic int inline_requests; /* of them, those of inline slots */
    _Atomic bool usable;
    _Atomic bool lost; /* noted by a thread that is not its own */
};

/* A way of its own through a device for one thread at a time. */
struct inline_slot {
    _Alignas(LINE) atomic_flag taken;
    struct device *device;
    attn_device *handle; /* of the CPU one of its own, of a GPU the device's */
    struct slot slot;    /* its stream and workspace */
};

struct devices {
    int count;
    struct device *device[CONFIG_MAX_DEVICES];
    int inline_count; /* 0: the devices are neither this machine's processor nor read staging memory */
    struct inline_slot *inline_slots;
    _Atomic int inline_jobs;   /* since inline_learn() last took them, */
    _Atomic int64_t inline_ns; /* and what they took */
};

/* ---- thread.c ---------------------------------------------------------------------------------------------------- */

/* A thread of a device; the argument is its struct device_thread.
 * Ends when device->stop is set and it has nothing to run. */
void *device_main(void *argument);

/* ---- memory.c: on a device's thread, or that which has taken an inline slot ------------------------------------- */

/* Device memory for everything that a job's problems read and write. A region that has a mirror already keeps it. */
attn_status memory_take_mirrors(struct device *device, struct slot *slot, struct job *job, attn_error *err);
void memory_drop_mirrors(struct device *device, struct slot *slot);
/* Device memory until memory_drop_mirrors(). */
attn_status memory_take(struct device *device, struct slot *slot, size_t bytes, void **memory, attn_error *err);

/* The addresses of a job's tensors that lie in pinned memory of a client, after memory_take_mirrors(). */
void memory_place_pinned(const struct job *job, attn_problem *problem);
/* A host address inside a mirrored region, as the device knows it; and all of a problem's. */
void *memory_address(const struct slot *slot, void *address);
void memory_place(const struct slot *slot, attn_problem *problem);
/* Put the copies of the slot's mirrors, and of a job's outputs, on the slot's stream. */
attn_status memory_copy_in(struct slot *slot, attn_error *err);
attn_status memory_copy_out(struct device *device, struct slot *slot, struct job *job, attn_error *err);
/* Puts the moves of a job's step on the slot's stream: its new keys and values go to their pages. */
attn_status memory_move(struct device *device, struct slot *slot, const struct job *job, attn_error *err);
/* The copies of the slot's mirrors and the moves of a job's step as one, for a device that reads staging memory. */
attn_status memory_move_in(struct slot *slot, const struct job *job, attn_error *err);
/* Room for so many moves in all. */
attn_status memory_reserve_moves(struct slot *slot, int64_t count, attn_error *err);
/* Scratch memory of at least `bytes`; what it held is lost when it grows. */
attn_status memory_grow_workspace(attn_device *handle, size_t bytes, void **workspace, size_t *workspace_bytes,
                                  attn_error *err);
void memory_drop_workspace(attn_device *handle, void **workspace, size_t *workspace_bytes);
/* Gives back all that a slot of this device has. */
void memory_close_slot(attn_device *handle, struct slot *slot);

/* ---- merge.c: on a device's thread ----------------------------------------------------------------------------- */

/* Which jobs of the slot's batch are to be one problem, and which are moved: fills leader, members, place and moved. */
void merge_find(const struct device *device, struct slot *slot);

/* The one problem of a leader that is moved and those who follow it, in device memory that is taken for it. */
attn_status merge_take(struct device *device, struct slot *slot, int leader, attn_problem *wide, attn_error *err);

/* Puts the moves on the slot's stream that bring the inputs of jobs that are moved to the device, new keys and values
 * of a step to their pages, or (`out`) outputs back. */
attn_status merge_move(struct slot *slot, bool out, attn_error *err);

/* ---- inline.c ---------------------------------------------------------------------------------------------------- */

/* As many as HTTP threads, where the devices are this machine's processor or read staging memory; else none. */
attn_status inline_open(struct devices *devices, const struct config *config, attn_error *err);
void inline_close(struct devices *devices);
/* On a device's thread: what an inline slot left on its stream is from here on the slot's. */
void inline_adopt(struct slot *slot, struct job_part *part);

/* ---- batch.c ----------------------------------------------------------------------------------------------------- */

/* The operations of a job as kernels do them, in tiles: small heads are padded. */
double batch_padded_flops(const struct job *job);
/* What guest_sees() has been told of the batches beside which a guest would run. */
struct guest_others {
    int count;
    const struct flow *flow; /* of one of them */
    bool several_flows;
    int64_t oldest_ns, youngest_ns; /* when the first and the last of them began */
};
void guest_sees(struct guest_others *others, const struct flow *flow, int64_t since_ns);
/* How long a guest of so many expected seconds has to wait; 0 or less: it may begin. others->count is 1 or more. */
int64_t guest_wait_ns(const struct guest_others *others, double seconds, int64_t now_ns);

/* "cpu avx512bf16": the device and the kernel that computed a result. */
void batch_name_backend(proto_result *result, const struct device *device, const char *kernel);

#endif
