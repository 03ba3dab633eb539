/* finish.h: work between a job's run and its answer. Results are judged (a check), rows are recomputed in float64
 * (`verify`), outputs are written to shared memory, and the text of many numbers (`encoding`: array) is measured,
 * because its length is sent first.
 *
 * A client may request seconds of this work. It is done in pieces of some milliseconds on libuv's threads, in turn
 * with pieces of other jobs. If the request stops waiting, it ends with the piece that runs. */
#ifndef FINISH_H
#define FINISH_H

#include "server/sched/pieces.h"
#include "server/work/job.h"
#include "server/work/request.h"

/* The judgement of one item. */
struct judging {
    int item;
    judge *judge; /* NULL: none is open */
    int64_t began_ns, until_ns;
    int64_t worked_ns;
    bool hurried;
};

struct finishing {
    struct piece piece;
    struct job *job; /* a reference to the job */
    char id[REQUEST_ID_BYTES];
    bool cancelled; /* set by the loop: no piece follows */
    void (*done)(void *context, struct finishing *finishing);
    void *context;

    /* The thread that runs a piece uses these; in between, the loop. */
    int item; /* the item being verified */
    attn_verifier *verifier;
    int64_t judge_until_ns; /* a check: when it stops */
    struct judging judging;
    proto_encoder *encoder; /* encoder of the answer, whose length is being measured */
    bool complete;
    int64_t wrote_ns; /* duration of writing to shared memory */
    attn_error error; /* why there is no encoder, or why outputs are not all written */
};

/* True if the job needs any of this work. */
bool finish_is_wanted(const struct job *job);

/* Makes the work of a job. The loop calls done(context, it) once: when all is done, or after the piece in which it
 * was cancelled. NULL when out of memory. */
struct finishing *finish_new(struct job *job, const char *id, void (*done)(void *context, struct finishing *finishing),
                             void *context);
void finish_start(struct finishing *finishing, struct pieces *pieces);
void finish_free(struct finishing *finishing);

#endif
