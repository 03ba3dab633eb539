/* job.h: a job is the computation of one request: its problems, the memory of their tensors, and the results. It may
 * outlive its request: a running kernel on a GPU is not interrupted when the client leaves, and a saved forward waits
 * for its backward. The request, the device that runs the job, and each context (saved forward) hold one reference.
 *
 * An HTTP thread makes the job (job_new) and places the outputs (prepare_job). Then the main thread owns it, and then
 * the device's thread, which writes results and times. After that, the job is only read. */
#ifndef JOB_H
#define JOB_H

#include <stdatomic.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/base/staging.h"

struct batch;
struct caller;
struct device;
struct finishing;
struct flow;
struct inline_slot;
struct caches;
struct contexts;
struct job_transaction;
struct region_uses;
struct request;

/* A range of a job's host memory that is copied as a whole, to the device or back. */
struct job_region {
    char *memory;
    size_t bytes;
};

/* Small jobs of the same kind may share a batch. A job of kind 0 always runs alone. */
typedef uint64_t job_kind;
#define JOB_KIND_APPEND ((job_kind)1 << 51)

struct job_links {
    struct job *next, *previous;
};

/* What a device needs to compute the exact results (float64) of an item (problem) by attn_truth_some(). For the option
 * `verify`, the device compares `out` with the exact results. For a check, the exact results go to the judge on the
 * CPU. */
struct job_truth {
    bool wanted;
    uint64_t results; /* the tensors that a check wants, as bits of attn_tensor_id */
    /* Addresses in the memory of the job's outputs to which the device writes the exact results; only for a check. */
    attn_truth to;
    size_t bytes;
    size_t workspace_bytes;
    double seconds; /* time in seconds that a device is expected to take for the exact results */
};

/* How a job is cut into parts (device/cut.c): by key/value heads with their query heads, by rows of the batch, or by
 * queries. */
enum job_way { JOB_WHOLE, JOB_BY_HEADS, JOB_BY_BATCH, JOB_BY_QUERIES, JOB_WAYS };

/* What one device computes when several devices share a job: some heads, batch rows or queries. `share` is their
 * fraction of the job's work. */
struct job_range {
    int64_t first, end; /* the range is the heads, batch rows or queries from `first` to end - 1 */
    double share;
};

/* The part of a job that one device computes. Almost every job has only one part, which is the whole job.
 *
 * A part is sent to a device once. If gradients are sums over queries, every part is sent a second time, when all parts
 * are back, to add up a share of these gradients. A job ends when all its parts are back. But if devices failed, the
 * job may become a single part again and be queued again. If one part fails, the other parts are cancelled, so the
 * job's error is the first error that is not CANCELLED. */
struct job_part {
    struct job_part *next;
    struct job *job;
    int device; /* number of the only device that can compute the part; -1: any device can */
    enum job_way way;
    int number;
    /* the heads, batch rows or queries that the part computes, and their share of the job's work; { 0, 0, 1 } if the
     * part is the whole job */
    struct job_range range;
    /* Whether the part is with a device for the second time. If so, it adds up a share of the gradients that are sums
     * over all queries. */
    bool adds;

    /* Only the main thread uses the members from here to handed_over. */
    struct batch *batch; /* the batch that the part is in; NULL: none */
    bool left;           /* whether the part has been sent to a device */
    /* The stream on which the part still runs, if an HTTP thread started it and did not wait (INLINE_LATE). NULL:
     * none. */
    struct inline_slot *handed_over;

    /* The thread that computes the part writes the members below; the main thread reads them when the batch is back. */
    bool ran;         /* whether the part's kernels ran without an error */
    attn_error error; /* why the part failed, if `ran` is false */
    /* device memory (on `sums_on`) for the part's gradients that are sums over queries; they stay there until they are
     * added up (device/sums.c); NULL: none */
    void *sums;
    struct device *sums_on;
    /* next part in the list `kept` of the device `sums_on`, which has the parts with sums on that device; the device's
     * lock protects the list */
    struct job_part *next_kept;
    /* number of the device that computes the part, as the backend counts devices */
    int index;
    const char *kernel; /* name of the kernel that computed the part; set only if several devices share the job */
    /* Whether the device has compared the part's `out` with exact results, and the differences that it found. Set only
     * for `verify`, if several devices share the job. */
    bool truth_known;
    attn_truth_distance truth_found[ATTN_TRUTH_RESULTS];
};

static inline bool job_part_is_cut(const struct job_part *part)
{
    return part->way != JOB_WHOLE;
}

struct job {
    atomic_int references;
    struct staging_pool *staging;
    /* `inputs` is the staging memory with the input tensors, followed by the outputs if there is room. `spare` is a
     * second block, for outputs that did not fit. */
    struct staging_block *inputs, *spare;
    /* Number of parts, if the job is cut by queries and has gradients that are sums over queries: each part has some of
     * the queries, so the parts' sums must be added up. 0: nothing must be added up. */
    int sum_parts;
    proto_call *call;
    proto_result *results; /* results of the problems, an array of call->count elements */
    /* Plans (chosen kernels) of the call->count problems. prepare_job() makes them for the first device, and each
     * device adapts them to its own addresses (batch_plan()). */
    attn_plan *plans;
    int runnable; /* number of problems (items) that have no error and that a device must compute */
    double flops; /* floating-point operations of the items (problems) that a device computes */
    /* bytes that a device reads and writes for all items, including keys and values in cache pages (attn_cost) */
    double bytes;
    /* time in seconds that a device is expected to take for all items (attn_cost_of()) */
    double seconds;
    /* what `seconds` would be if the scores of all rows exceeded the range of float32 */
    double worst_seconds;
    /* What dominates the time of the costliest problem (item), as a text from attn_cost. "" means the matrix products
     * with q, k and v. */
    const char *because;
    /* bytes of the job's staging memory (memory for tensors) */
    size_t tensor_bytes;
    job_kind kind;
    /* number of bytes of `inputs` that input tensors use; a short answer may overwrite them */
    size_t inputs_used;
    struct job_region outputs; /* memory of all output tensors, which lie one after the other */
    struct contexts *contexts;
    struct caller *caller; /* the account (access token) that is charged; the job holds a reference */
    /* The flow (client) that is charged for device time. The job holds a reference to it. NULL: none. */
    struct flow *flow;
    int64_t priority; /* urgency among the waiting jobs of one account: jobs with 1 are sent before jobs with 2 */
    /* For each item (problem), a reference to the job of the context (saved forward) that it uses, or NULL. The array
     * is NULL if no item uses one. */
    struct job **saved;
    struct region_uses
        /* tensors in memory of the client: outputs in shared memory, and any tensors in GPU memory; NULL: none */
        *shared;
    /* The rows of the client's lse that a device must recompute and compare, because the CPU cannot read q or k. NULL:
     * none. */
    attn_lse_look *lse;
    /* memory for the values with which the device checks the client's lse */
    void *lse_found;
    /* For each problem (item), what a device needs for exact results (`verify`, checks). NULL: the job needs none. A
     * job with such an array is alone in its batch. */
    struct job_truth *truths;
    /* expected time, in seconds, in which the device computes exact results (`truths`); `seconds` includes it */
    double truth_seconds;
    /* For each item, the differences between its outputs and the exact ones (float64). The device writes them into the
     * memory of the outputs. */
    attn_truth_distance (*truth_found)[ATTN_TRUTH_RESULTS];
    /* Whether the device has computed the exact results (float64), which it may be unable to do. */
    bool truth_known;
    bool wants_verify, wants_save, wants_count;
    /* Whether the request is a check: a judge on the CPU compares the client's results with exact ones
     * (sched/finish.h). */
    bool wants_judge;
    /* Whether the answer has so many numbers as text that their length is computed in pieces before the answer is
     * encoded. */
    bool wants_measure;
    /* Whether the job has taken or reserved contexts (saved forwards). If so, contexts_finish_job() must be called. */
    bool holds_contexts;
    struct caches *caches;
    /* the transaction that reads or extends caches (transaction.h); NULL: none */
    struct job_transaction *transaction;
    struct staging_block *tables; /* staging memory for the page tables of the running cache transaction */
    size_t tables_used;
    /* Whether memory, not arithmetic, limits the job's speed on a GPU. A batch may have many such jobs. */
    bool memory_bound;
    /* how many contexts (saved forwards) have a reference to this job; protected by the lock of contexts.c */
    int context_count;

    /* Only the main thread uses the members from here to given_up. */
    struct request *request;     /* the request that waits for the job; NULL: its client no longer waits */
    struct finishing *finishing; /* work after the run, such as verification; NULL: none */
    int parts_out;               /* number of the job's parts that were sent to devices and are not back yet */
    /* links in the list of all waiting jobs, and in the list of the waiting jobs of the same flow (client) */
    struct job_links in_queue, in_flow;
    int64_t queued_ns;
    bool blocked; /* whether the job waits because its cache transaction cannot begin yet */
    bool scanned; /* whether the main thread has already tried to begin the cache transaction */
    /* Whether no client wants the result any more although the job still runs, because a device uses the client's
     * memory. */
    bool given_up;

    int batch_jobs; /* number of jobs in this job's batch; 0: it runs alone on an HTTP thread */
    bool follows;   /* whether an earlier job of the batch has the same KServe model */
    /* longest device time of a part so far; the answer reports the stages of that part (batch_note_times()) */
    int64_t longest_ns;

    struct job_part part;
    struct job_part *more_parts; /* the job's other parts; NULL: none */
};

/* Returns the problem of an item, or NULL if the item has failed or computes nothing. */
static inline attn_problem *job_problem(const struct job *job, int item)
{
    proto_item *const it = &job->call->items[item];
    return it->error.status == ATTN_OK && proto_operations[job->call->op].computes ? &it->problem : NULL;
}

/* Makes a job that owns `inputs` (which may be NULL) and `call`. NULL: out of memory; the caller still owns them. */
struct job *job_new(struct staging_pool *staging, struct contexts *contexts, struct caller *caller,
                    struct staging_block *inputs, proto_call *call);
struct job *job_hold(struct job *job);
/* Releases a reference to the job, and frees the job with the last reference. Does nothing for NULL. If holds_contexts
 * is set, contexts_finish_job() must be called first. */
void job_release(struct job *job);

/* Returns the first part of the job that was not sent to a device yet and that this device can compute; NULL: none. */
struct job_part *job_part_for(struct job *job, int device);
/* Records that the part is sent to a device in this batch. The batch gets a reference to the job. Returns `part`. */
struct job_part *job_part_leaves(struct job_part *part, struct batch *batch);
/* Cuts a job with one problem, not yet sent to a device, into `count` >= 2 parts. False: out of memory; the job is
 * unchanged. */
bool job_cut(struct job *job, enum job_way way, int count, const struct job_range *ranges);
/* Makes a cut job whole again: it gets a single part. No device may have one of its parts. */
void job_join(struct job *job);
static inline bool job_is_cut(const struct job *job)
{
    return job_part_is_cut(&job->part);
}
int job_parts(const struct job *job);
/* True if a job that several devices share should be computed again. This is so if some of these devices failed, and
 * all other parts ran or were cancelled. All parts must be back from their devices. */
bool job_lost_devices(const struct job *job);
/* True if only this device can compute a part that was not sent yet. */
bool job_needs_device(const struct job *job, int device);
/* True if all parts of the job ran. All must be back from their devices. */
bool job_ran(const struct job *job);
/* the first error of a job that did not run; CANCELLED only if no part has another error */
const attn_error *job_error(const struct job *job);

/* Frees the memory of the job's tensors early. The caller must have the only reference to the job. */
void job_release_memory(struct job *job);

#endif
