/* job.h: a job is the computation of one request: its problems, the memory of their tensors, and the results.
 *
 * A kernel that runs on a GPU is never interrupted: a batch that no request waits for ends between two launches, and on
 * the CPU between two tiles (devices.h). So a job outlives its request when the client leaves or the deadline passes
 * while the job is with a device. A job also outlives its request when a forward is saved for a backward. Each job has
 * a reference count: the request, the device that runs the job, and each context (saved forward) hold one reference.
 *
 *   RECEIVING   an HTTP thread makes the job (job_new) and places the outputs (prepare_job)
 *   QUEUED      the main thread owns the job
 *   RUNNING     the device owns the job, and writes results and timing
 *   later       the encoder and contexts only read the job */
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

/* A range of a job's host memory that is copied as a whole: to the device before the kernels, or back after them. The
 * CPU needs no copies. */
struct job_region {
    char *memory;
    size_t bytes;
};

/* Small jobs with the same job_kind may run together in one batch. A job of kind 0 always runs alone. */
typedef uint64_t job_kind;
#define JOB_KIND_APPEND ((job_kind)1 << 51)

struct job_links {
    struct job *next, *previous;
};

/* What a device needs to compute the exact results (float64) of an item (problem), see attn_truth_some(). With `verify`
 * the device compares `out` with the exact `out`, which stays on the device. In a check the exact results go to the
 * judge on the CPU, which compares the client's results with them. */
struct job_truth {
    bool wanted;
    uint64_t results; /* for a check: the tensors whose exact values are computed, as bits of attn_tensor_id */
    /* for a check: the addresses, in the memory of the job's outputs, to which the device writes the exact results */
    attn_truth to;
    size_t bytes; /* size of the exact results (float64) in bytes */
    size_t workspace_bytes;
    double seconds; /* expected time */
};

/* The way in which a job is cut into parts (device/cut.c). A part has some key/value heads of the job's only problem
 * and their query heads, or some rows of its batch, or some of its queries. */
enum job_way { JOB_WHOLE, JOB_BY_HEADS, JOB_BY_BATCH, JOB_BY_QUERIES, JOB_WAYS };

/* What one part of a cut job computes: a range of heads, batch rows or queries, and the share of the job's work. */
struct job_range {
    int64_t first, end; /* the range of heads, batch rows or queries: from `first` to end - 1 */
    double share;
};

/* The part of a job that one device computes. The parts of a job form a list. Almost every job has one part, which is
 * the whole job. A job that takes long may be cut into several parts, which are all sent to devices at the same time.
 *
 * 1. A part is sent to a device once. If the job has gradients that are sums over queries, each part is sent to its
 *    device once more when all parts are back. It then adds up a share of these gradients.
 * 2. A job is over when all its parts are back. The job may then be made a single part again, and queued as a whole.
 * 3. A job succeeded if the kernels of all parts ran. Otherwise the job's error is the first error in the list of parts
 *    that is not CANCELLED. When one part fails, the server cancels the others, so CANCELLED is never the cause. */
struct job_part {
    struct job_part *next; /* next part of the same job; NULL: this is the last part */
    struct job *job;
    int device; /* number of the only device that can compute this part of the job; -1: any device can */
    enum job_way way;
    int number;             /* position of the part in the job's list of parts, from 0 on */
    struct job_range range; /* the part's heads, batch rows or queries; { 0, 0, 1 }: the part is the whole job */
    /* true: the part has computed its own queries, and is sent to its device once more, to add up a share of the
     * gradients that are sums over all queries */
    bool adds;

    /* Only the main thread uses the members from here down to handed_over. */
    struct batch *batch; /* the batch that contains this part of the job; NULL: the part is in no batch */
    bool left;           /* true: this part of the job has been sent to a device in a batch */
    /* the inline slot (a stream for HTTP threads) on which an HTTP thread left the part running (INLINE_LATE); NULL:
     * none */
    struct inline_slot *handed_over;

    /* The thread that computes the part (the device's, or an HTTP thread) writes the members below. The main thread
     * reads them when the part's batch is back. */
    bool ran;         /* true: the part's kernels ran and did not fail */
    attn_error error; /* the reason why this part of the job did not run */
    /* memory of device `sums_on` for the gradients that are sums over all queries (device/sums.c), if the job is cut by
     * queries; NULL: none */
    void *sums;
    struct device *sums_on;
    struct job_part *next_kept; /* next part that has gradient sums in the memory of device `sums_on`; that device's
                                 * lock protects this member */
    int index;                  /* for a part of a cut job: the backend's number of the device that computed the part */
    const char *kernel;         /* for a part of a cut job: the name of the kernel that computed the part */
    /* for a part of a cut job whose `out` is verified: whether the device has compared the part's out with exact
     * results, and the differences that the device found */
    bool truth_known;
    attn_truth_distance truth_found[ATTN_TRUTH_RESULTS];
};

/* True if the part has only some heads, batch rows or queries of a problem. */
static inline bool job_part_is_cut(const struct job_part *part)
{
    return part->way != JOB_WHOLE;
}

struct job {
    atomic_int references;
    struct staging_pool *staging;
    /* `inputs`: the block of staging memory (memory for tensors) that holds the inputs as the parser wrote them, and
     * behind them the outputs. `spare`: a second block, for outputs that did not fit into the first one. */
    struct staging_block *inputs, *spare;
    /* The number of parts of a job that is cut by queries and has gradients that are sums over queries (device/sums.c).
     * 0: the job has no such gradients, or is not cut by queries. */
    int sum_parts;
    proto_call *call;
    proto_result *results; /* the results: an array of call->count elements */
    /* An array of call->count plans (chosen kernels), one for each problem (job_problem()). prepare_job() makes the
     * plans for the first device, and each device adapts them to its own addresses (batch_plan()). */
    attn_plan *plans;
    int runnable; /* number of items (problems) without an error that a device must compute */
    double flops; /* floating-point operations of the items (problems) that a device computes */
    /* bytes of all tensors that a device reads and writes for its items (problems), including the keys and values that
     * it reads in cache pages (attn_cost) */
    double bytes;
    /* seconds that a device is expected to take for all items (problems) that it computes (attn_cost_of()) */
    double seconds;
    /* the value that `seconds` would have if the scores of all rows exceeded the range of float32 */
    double worst_seconds;
    /* what dominates the time of the costliest item, as a text from attn_cost; "": the matrix products with q, k and
     * v */
    const char *because;
    /* bytes of the job's blocks of staging memory (memory for tensors); the queue sums them over all waiting jobs */
    size_t tensor_bytes;
    job_kind kind;
    /* number of bytes of `inputs` that hold input tensors; an answer that fits into them may overwrite them */
    size_t inputs_used;
    struct job_region outputs; /* memory of all output tensors, one after the other */
    struct contexts *contexts;
    struct caller *caller; /* the account (access token) to which the job is charged; the job holds a reference to it */
    /* the flow (client) to which the job's device time is charged; the job holds a reference to it; NULL: none */
    struct flow *flow;
    int64_t priority; /* priority among the waiting jobs of one account: a job with 1 is sent to a device before a
                       * job with 2 */
    /* For each item (problem): a reference to the job of the context (saved forward) that the item uses; NULL: it uses
     * none. The array is NULL if no item uses a context. */
    struct job **saved;
    struct region_uses
        /* outputs that must be written to memory shared with the client, and tensors that the client has put into a
         * GPU's memory; NULL: none */
        *shared;
    /* The rows of the client's lse that a device must check, because the CPU cannot read q or k. NULL: none */
    attn_lse_look *lse;
    /* address, in the memory of the outputs, for the values that the device computes to check the client's lse (member
     * `lse`) */
    void *lse_found;
    /* An array of call->count elements: what a device needs to verify each item's `out`, or to compute the exact
     * results for a check. NULL: the job needs neither. If it is not NULL, the job runs alone in its batch. */
    struct job_truth *truths;
    /* seconds that a device is expected to take for computing exact outputs (`truths`); the member `seconds` includes
     * them */
    double truth_seconds;
    /* An array of call->count elements, which lies in the memory of the outputs. The device writes the differences
     * between each item's outputs and the exact outputs (float64) to this array. */
    attn_truth_distance (*truth_found)[ATTN_TRUTH_RESULTS];
    /* true: the device has computed the exact results (float64) that `truths` describes; false: it could not */
    bool truth_known;
    bool wants_verify, wants_save, wants_count;
    /* true: the request is a check, in which a judge on the CPU compares the client's results with exact results
     * (sched/finish.h); a device may compute the exact results */
    bool wants_judge;
    /* true: the answer contains many numbers as text. The length of this text is measured in pieces before the answer
     * is encoded. */
    bool wants_measure;
    /* true: the job has taken or reserved contexts (saved forwards), so its owner must call contexts_finish_job() */
    bool holds_contexts;
    struct caches *caches; /* the table of the caches that the request names */
    /* the transaction in which the job reads or extends caches (transaction.h); NULL: none */
    struct job_transaction *transaction;
    struct staging_block *tables; /* memory of the transaction's page tables while the transaction runs */
    size_t tables_used;           /* number of bytes of `tables` in use */
    /* true: on a GPU the job spends its time on reading memory and not on arithmetic, so a batch may have many such
     * jobs */
    bool memory_bound;
    /* number of contexts (saved forwards) that have a reference to this job; contexts.c changes it under its lock */
    int context_count;

    /* Only the main thread uses the members from here down to given_up. */
    struct request *request;     /* the request that waits for the job; NULL: no client waits any more */
    struct finishing *finishing; /* the job's work after its run, such as verification; NULL: none */
    int parts_out;               /* number of parts that were sent to devices and are not back yet */
    /* links in two lists: all waiting jobs, and the waiting jobs of this job's flow (client) */
    struct job_links in_queue, in_flow;
    int64_t queued_ns;
    bool blocked; /* true if the job's cache transaction cannot begin yet: the job must then stay in the queue */
    bool scanned; /* true: the main thread has tried at least once to begin the job's cache transaction */
    /* true: no client wants the job's result; the job keeps its request until the batch ends, because a device uses
     * the client's memory */
    bool given_up;

    int batch_jobs; /* number of jobs in the batch in which the job runs; 0: the job runs alone on an HTTP thread */
    bool follows;   /* true: another job of the same KServe model is before this job in the batch */
    /* time of the part that took longest so far; the answer reports the stages of this part (batch_note_times()) */
    int64_t longest_ns;

    struct job_part part;        /* the first part of the job */
    struct job_part *more_parts; /* an array with the job's other parts; NULL: there are none */
};

/* Returns the problem of an item of the body, or NULL if the item has failed or computes nothing. */
static inline attn_problem *job_problem(const struct job *job, int item)
{
    proto_item *const it = &job->call->items[item];
    return it->error.status == ATTN_OK && proto_operations[job->call->op].computes ? &it->problem : NULL;
}

/* Makes a job that owns `inputs` (which may be NULL) and `call`. Returns NULL when out of memory; the caller then still
 * owns `inputs` and `call`. */
struct job *job_new(struct staging_pool *staging, struct contexts *contexts, struct caller *caller,
                    struct staging_block *inputs, proto_call *call);
struct job *job_hold(struct job *job);
/* Releases a reference to the job, which is freed with the last one; does nothing for NULL. If holds_contexts is set,
 * call contexts_finish_job() before the last release. */
void job_release(struct job *job);

/* Returns the first part of the job that has not been sent to a device yet and that this device can compute. NULL:
 * there is none. */
struct job_part *job_part_for(struct job *job, int device);
/* Records that the part is being sent to a device in this batch. The batch gets a reference to the part's job. Returns
 * the part. */
struct job_part *job_part_leaves(struct job_part *part, struct batch *batch);
/* Cuts a job into `count` parts, at least 2. The job must have one problem, and must not have been sent to a device.
 * Returns false if memory runs out; the job is then unchanged. */
bool job_cut(struct job *job, enum job_way way, int count, const struct job_range *ranges);
/* Makes a cut job a single part again, so that one device can compute the whole job. Call this when no device has a
 * part of the job. */
void job_join(struct job *job);
static inline bool job_is_cut(const struct job *job)
{
    return job_part_is_cut(&job->part);
}
int job_parts(const struct job *job); /* returns the number of the job's parts */
/* True if the job is cut and other devices should compute it again. This is so if some parts did not run because their
 * devices were lost, and all other parts ran or were cancelled. Call this when all parts are back. */
bool job_lost_devices(const struct job *job);
/* True if a part has not been sent to a device yet and only this device can compute it. */
bool job_needs_device(const struct job *job, int device);
/* True if all parts of the job ran. Call this when all parts are back from their devices. */
bool job_ran(const struct job *job);
const attn_error *job_error(const struct job *job); /* returns the first error of a job that did not run */

/* Frees the memory of the job's tensors early. Call this when nobody reads the tensors any more, and the caller has the
 * only reference to the job. */
void job_release_memory(struct job *job);

#endif
