/* finish.h: work after a job has run on a device and before its answer is sent. A check compares the client's results
 * with exact ones. `verify` recomputes rows in float64. Outputs are written to shared memory. `observe` counts pairs
 * and tiles. The length of the numbers as text is computed, because the answer's length is sent first.
 *
 * The work may take seconds, so libuv's threads do it in pieces of some milliseconds. If the client leaves, the work
 * ends after the current piece. */
#ifndef FINISH_H
#define FINISH_H

#include "server/sched/pieces.h"
#include "server/work/job.h"
#include "server/work/request.h"

/* The check of one item (problem): a judge compares the client's results with exact ones. */
struct judging {
    int item;
    judge *judge;
    int64_t began_ns, until_ns;
    int64_t worked_ns;
    bool hurried;
};

struct finishing;

struct finishing {
    struct piece piece;
    struct job *job; /* the job whose results this work finishes; the work holds a reference to the job */
    char id[REQUEST_ID_BYTES];
    bool cancelled; /* whether the work ends after the current piece */
    void (*done)(void *context, struct finishing *finishing);
    void *context;

    /* Only the thread that runs a piece of the work uses the members below. Between two pieces, only the main thread
     * does. */
    int item; /* index of the item (problem) being verified */
    attn_verifier *verifier;
    int64_t judge_until_ns; /* time at which a judge must stop comparing */
    struct judging judging;
    int counted; /* index of the item (problem) whose pairs of a query and a key are being counted */
    attn_problem count_of;
    attn_counter *counter;
    proto_encoder *encoder; /* encoder that computes the length of the answer */
    bool complete;
    int64_t wrote_ns;
    /* why the answer has no encoder, or some outputs were not written to shared memory */
    attn_error error;
};

bool finish_is_wanted(const struct job *job);

/* Returns the exact results (float64) of an item (problem) of a check, or NULL if no device has computed them. */
const attn_truth *finish_truth(const struct job *job, int item);

/* Prepares the work that a job needs after its run on a device. The main thread later calls done(context, finishing)
 * once: when all work is done or, if the work was cancelled, when the piece that runs at that time has ended. NULL: out
 * of memory. */
struct finishing *finish_new(struct job *job, const char *id, void (*done)(void *context, struct finishing *finishing),
                             void *context);
void finish_start(struct finishing *finishing, struct pieces *pieces);
void finish_free(struct finishing *finishing);

#endif
