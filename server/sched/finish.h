/* finish.h: what is left to do for a job that has run, before it can be answered: rows are recomputed in float64 (`verify`),
 * and the text of many numbers (`encoding`: array) is measured, for its length is sent before it.
 *
 * Both take seconds where a client wants that. So they are done in pieces of some milliseconds on libuv's threads, one piece
 * of a job after a piece of another, and end with the piece that runs when nobody waits any more. */
#ifndef FINISH_H
#define FINISH_H

#include <uv.h>

#include "server/work/job.h"
#include "server/work/request.h"

struct finishing {
    uv_work_t work;
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
    attn_error error; /* why there is no encoder */
};

/* done(context, it) is called once, by the loop: when all is done, or after the piece in which it was cancelled. NULL when
 * out of memory. */
struct finishing *finish_new(struct job *job, const char *id, void (*done)(void *context, struct finishing *finishing),
                             void *context);
void finish_start(struct finishing *finishing, uv_loop_t *uv);
void finish_free(struct finishing *finishing);

#endif
