/* finish.h: work between a job's run on a device and its answer. There are five kinds of work. For a check, a judge
 * compares the client's results with exact ones. For `verify`, rows are recomputed in float64. Outputs are written to
 * shared memory. For `observe`, pairs and tiles are counted. If an answer has many numbers as text (`encoding`: array),
 * the answer's length is measured, because the length is sent before the text.
 *
 * This work may take seconds. It is done in pieces of some milliseconds on libuv's threads, which alternate with pieces
 * of other jobs' work. If the request stops waiting, the work ends with the piece that runs. */
#ifndef FINISH_H
#define FINISH_H

#include "server/sched/pieces.h"
#include "server/work/job.h"
#include "server/work/request.h"

/* The check of one item (problem of a body). In a check, the client gives results and asks what is wrong with them; a
 * judge compares them with exact results. */
struct judging {
    int item;
    judge *judge; /* the judge that compares the given results with the truth (exact results); NULL: none is open */
    int64_t began_ns, until_ns;
    int64_t worked_ns;
    bool hurried;
};

struct finishing;

struct finishing {
    struct piece piece;
    struct job *job; /* the job; the finishing work holds a reference to it */
    char id[REQUEST_ID_BYTES];
    bool cancelled; /* true: the main thread has cancelled the work, so no further piece will run */
    void (*done)(void *context, struct finishing *finishing);
    void *context;

    /* While a piece of the work runs, only the thread that runs it uses the members below. Between two pieces, the main
     * thread uses them. */
    int item; /* index of the item (problem) that is being verified */
    attn_verifier *verifier;
    int64_t judge_until_ns; /* time at which the judge of a check must stop looking for mistakes in the given results */
    struct judging judging;
    int counted; /* index of the item (problem) whose pairs of a query and a key are being counted */
    attn_problem count_of;
    attn_counter *counter;
    proto_encoder *encoder; /* encoder of the answer, whose length is being measured */
    bool complete;
    int64_t wrote_ns; /* duration of writing the outputs to shared memory */
    /* the reason why the answer has no encoder, or why some outputs were not written to shared memory */
    attn_error error;
};

/* True if the job needs any of the work described at the top of this file, such as verification. */
bool finish_is_wanted(const struct job *job);

/* Returns the truth (exact results in float64) of an item (problem) of a check, or NULL if no device has computed
 * it. */
const attn_truth *finish_truth(const struct job *job, int item);

/* Prepares the work that a job needs after its run (verification and the like). The main thread calls done(context,
 * finishing) once: when all work is done or, after a cancellation, when the running piece is done. NULL: out of
 * memory. */
struct finishing *finish_new(struct job *job, const char *id, void (*done)(void *context, struct finishing *finishing),
                             void *context);
void finish_start(struct finishing *finishing, struct pieces *pieces);
void finish_free(struct finishing *finishing);

#endif
