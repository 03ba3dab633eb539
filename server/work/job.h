/* job.h: what a request asks to have computed: the decoded problems, the memory their tensors lie in, and what came
 * of them.
 *
 * A job outlives its request when the client goes away or its deadline passes while a kernel runs (it is never
 * interrupted), and when a forward is saved for a backward. So it is counted by references: the request, the device
 * that runs it and each context hold one.
 *
 *   RECEIVING   http makes it (job_new), places the outputs (job_prepare)
 *   QUEUED      the loop's
 *   RUNNING     the device's: it writes results and timing
 *   after that  nobody writes: the encoder and contexts only read
 * */
#ifndef JOB_H
#define JOB_H

#include <stdatomic.h>

#include "kernels/attention.h"
#include "proto-json/proto.h"
#include "server/base/staging.h"

struct batch;
struct caller;
struct finishing;
struct flow;
struct inline_slot;
struct caches;
struct contexts;
struct job_step;
struct region_uses;
struct request;

/* Memory that a device which is not unified copies before or after the kernels, in one piece. */
struct job_region {
    char *memory;
    size_t bytes;
};

/* Problems that may leave as one batch have the same kind; 0: never joined. */
typedef uint64_t job_kind;
#define JOB_KIND_APPEND ((job_kind)1 << 51)

struct job_links {
    struct job *next, *previous;
};

/* What one device computes of a job. The parts of a job are a list, in which a part lives as long as its job. Every job
 * has one part today, because the queue forgets a job when its first part leaves.
 *
 * 1. A part leaves once, for a device that can compute it.
 * 2. A job is over when all its parts are back.
 * 3. A job ran when all its parts ran. Its error is that of the first part in the list that has one. */
struct job_part {
    struct job_part *next; /* of the same job; NULL: it is the last */
    struct job *job;
    int device; /* number of the only device that can compute it; -1: any can */

    /* The loop's. */
    struct batch *batch;      /* the batch that it runs in, while somebody waits for the job; NULL: none */
    bool left;                /* it left in a batch, and leaves no second time */
    struct inline_slot *late; /* an HTTP thread put it on a device, where it still runs (RUN_HERE_LATE) */

    /* The device's (or the HTTP thread's that computes it); the loop reads them when the batch has come back. */
    bool ran;         /* the kernels ran and did not fail: contexts in use are used up */
    attn_error error; /* otherwise, why */
};

struct job {
    atomic_int references;
    struct staging_pool *staging;
    struct staging_block *inputs,
        *spare; /* what the decoder filled (its rest may hold outputs); outputs that did not fit there */
    proto_call *call;
    proto_result *results; /* call->count of them */
    int runnable;          /* items without an error, for which a device has something to do */
    double flops;          /* of those */
    double seconds;        /* that a device is expected to take for the runnable items (attn_cost_of()) */
    double worst_seconds;  /* the same, if the scores of all rows leave float32 */
    const char *because;   /* the costliest part of the costliest item (attn_cost); "": products of q, k and v */
    size_t tensor_bytes;   /* what the queue counts: the blocks */
    job_kind kind;
    size_t inputs_used;        /* bytes of `inputs` that hold tensors: the answer of a small one is written over them */
    struct job_region outputs; /* all output tensors, one after the other */
    struct contexts *contexts;
    struct caller *caller; /* on whose account it runs: a reference */
    struct flow *flow;     /* a reference: the share of the devices' time that the job uses; NULL: none */
    int64_t priority;      /* 1 leaves before 2, among those of its caller */
    struct job **saved;    /* per item: the job whose context it uses (a reference is held), or NULL; NULL: none does */
    struct region_uses
        *shared; /* outputs that go into shared memory, and all that is in a GPU's; NULL: none do, or they are there */
    attn_lse_look *lse; /* rows that a device sums up for a backward whose q or k only it can read; NULL: none */
    void *lse_found;    /* where these sums arrive, among the outputs */
    bool wants_verify, wants_save;
    bool wants_measure;  /* so many numbers are written as text that their length is found out beforehand, in pieces */
    bool holds_contexts; /* taken or reserved: somebody must still call contexts_finish_job() */
    struct caches *caches;        /* where the caches are that it names */
    struct job_step *step;        /* what it does to them (steps.h); NULL: nothing */
    struct staging_block *tables; /* of the step, while it has begun, */
    size_t tables_used;           /* and how much of it */
    bool wide;                    /* it waits for a GPU's memory and not for its arithmetic: many go together */
    int context_count;            /* entries that pin this job: contexts.c's, under its lock */

    /* The loop's. */
    struct request *request;            /* NULL: nobody waits for it any more */
    struct finishing *finishing;        /* verification and the like after its run; NULL: nothing of that is going on */
    int parts_out;                      /* parts that are in batches and have not come back */
    struct job_links in_queue, in_flow; /* among all that wait, and among those of its flow */
    int64_t queued_ns;
    bool waits;    /* its step cannot begin yet: it may not leave the queue */
    bool looked;   /* it was asked whether it can */
    bool given_up; /* its request, which is held, waits for nothing but the end of its batch */

    int batch_jobs; /* of the batch in which it runs; 0: alone, on an HTTP thread */
    bool follows;   /* another job of the same model (KServe) stands before it there */

    struct job_part part; /* the first of the list */
};

/* What is computed for an item; NULL: it has failed, or there is nothing to compute. */
static inline attn_problem *job_problem(const struct job *job, int item)
{
    proto_item *const it = &job->call->items[item];
    return it->error.status == ATTN_OK && proto_operations[job->call->op].computes ? &it->problem : NULL;
}

/* Takes over `inputs` (may be NULL) and `call`. NULL when out of memory: both stay with whoever called then. */
struct job *job_new(struct staging_pool *staging, struct contexts *contexts, struct caller *caller,
                    struct staging_block *inputs, proto_call *call);
struct job *job_hold(struct job *job);
void job_release(struct job *job); /* NULL is fine. The last one: contexts_finish_job() was called, if need be */

/* The first part that has not left and that the device can compute; NULL: none. */
struct job_part *job_part_for(struct job *job, int device);
/* The part leaves in the batch, which gets a reference to its job. Returns the part. */
struct job_part *job_part_leaves(struct job_part *part, struct batch *batch);
/* A part that has not left can be computed by this device alone. */
bool job_needs_device(const struct job *job, int device);
/* When all parts are back. */
bool job_ran(const struct job *job);
const attn_error *job_error(const struct job *job); /* of a job that did not run */

/* Gives the tensors' memory back early: nobody will read them any more. Only while there is a single reference. */
void job_release_memory(struct job *job);

#endif
