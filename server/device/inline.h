/* inline.h: small problems, which the HTTP thread that received them computes itself, or puts on a GPU. No other thread
 * is woken for them. devices.h has what the devices do for the loop. */
#ifndef INLINE_H
#define INLINE_H

#include "server/device/devices.h"

/* What inline_run() did with a job, which fields of the job it set, and what the caller does next. A step on
 * caches that has begun is ended with step_end(), whatever becomes of the job. */
enum run_here {
    RUN_HERE_NOT,   /* Nothing happened. The job is to be queued. */
    RUN_HERE_BEGAN, /* The job's step on caches has begun, and nothing runs. The job is to be queued. */
    RUN_HERE_DONE,  /* The job is over: job->ran, or job->error says why not. Its times and metrics are noted. */
    RUN_HERE_LATE, /* The job runs on in job->part.late. It goes to the loop, which calls devices_submit_late(). A caller
                     * that cannot hand the job over calls inline_settle(). */
    RUN_HERE_LOST, /* The device was lost, and job->part.device is its number. The job is to be queued: it meets the same
                     * error on that device, and so the loop learns of the loss. */
};

/* Computes a small job in the calling thread, or puts it on a GPU that has nothing else to do and looks for its end.
 * On this machine's own processor the tensors are in this core's cache and nothing is handed over
 * (tests/load/README.md, rung 3). A kernel on a GPU reads and writes tensors where they are: in staging memory, or in
 * the client's region of the GPU's memory. A job that is large, that verifies, or that uses or makes a context is never
 * taken. The function never waits for another thread, nor longer than INLINE_WAIT_NS (INLINE_STEP_WAIT_NS). */
enum run_here inline_run(struct devices *devices, struct job *job);
/* Waits for a job that is late, however long it takes; afterwards its memory is nobody's but the job's.
 * Others: nothing. */
void inline_settle(struct job *job);
bool inline_near(
    const struct devices *devices); /* the processor itself computes inline: threads belong near their clients */
/* How many jobs were computed so since the last call, and the processor time they took. Any thread. */
int inline_learn(struct devices *devices, double *seconds);

#endif
