/* finish.h: what is left to do for a job that has run, before it can be answered: rows are recomputed in float64
 * (`verify`), outputs are written into shared memory, and the text of many numbers (`encoding`: array) is measured, for
 * its length is sent before it.
 *
 * All of it takes seconds where a client wants that. So it is done in pieces of some milliseconds on libuv's threads,
 * one piece of a job after a piece of another, and ends with the piece that runs when nobody waits any more. */
#ifndef FINISH_H
#define FINISH_H

#include "server/sched/pieces.h"
#include "server/work/job.h"
#include "server/work/request.h"

struct finishing {
    struct piece piece;
    struct job *job; /* a reference */
    char id[REQUEST_ID_BYTES];
    bool cancelled; /* the loop's: no piece follows */
    void (*done)(void *context, struct finishing *finishing);
    void *context;

    /* Of the thread that does a piece; the loop's in between. */
    int item; /* to verify */
    attn_verifier *verifier;
    proto_encoder *encoder; /* being measured */
    bool complete;
    int64_t wrote_ns; /* duration: of writing into shared memory */
    attn_error error; /* why there is no encoder, or not all is written */
};

/* Is there anything to do? */
bool finish_is_wanted(const struct job *job);

/* done(context, it) is called once, by the loop: when all is done, or after the piece in which it was cancelled. NULL
 * when out of memory. */
struct finishing *finish_new(struct job *job, const char *id, void (*done)(void *context, struct finishing *finishing),
                             void *context);
void finish_start(struct finishing *finishing, struct pieces *pieces);
void finish_free(struct finishing *finishing);

#endif
