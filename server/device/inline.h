/* inline.h: lets an HTTP thread compute a small problem that it received, or put it on a GPU, so that no other thread
 * has to wake. devices.h has the functions by which the main thread uses devices. */
#ifndef INLINE_H
#define INLINE_H

#include "server/device/devices.h"

/* What inline_run() did, and what the caller must do next. A cache transaction that has begun must be ended with
 * transaction_end(), whatever the outcome. */
enum inline_outcome {
    INLINE_NOT,   /* The HTTP thread did nothing with the job. The caller must queue the job. */
    INLINE_BEGAN, /* The job's cache transaction has begun, but nothing runs. The caller must queue the job. */
    INLINE_DONE,  /* The job has ended: its part has run, or has an error. Its times and metrics are recorded. */
    /* The job still runs on the inline slot (a stream for HTTP threads) job->part.handed_over. The caller must post it
     * to the main thread, which calls devices_submit_late(). If that is impossible, the caller must call
     * inline_settle(). */
    INLINE_LATE,
    /* The device job->part.device was lost. The caller must queue the job: the job then fails on that device with the
     * same error, which tells the main thread. */
    INLINE_LOST,
};

/* Runs a small job in the calling HTTP thread (on the CPU), or puts it on an idle GPU and polls for its end. On the CPU
 * this is fast, because the tensors are in this core's cache and no other thread must wake (measured in
 * tests/load/README.md). A GPU's kernel uses tensors in place: in staging memory (host memory), or in the client's
 * registered range of the GPU's memory. The function refuses jobs that are large, that verify, or that use or make a
 * context (a saved forward). It waits for no other thread, and for a GPU at most INLINE_WAIT_NS (INLINE_STEP_WAIT_NS
 * for a cache transaction). */
enum inline_outcome inline_run(struct devices *devices, struct job *job);
/* Waits for a late job (an HTTP thread left it running: INLINE_LATE), however long it takes. Afterwards no device uses
 * the job's memory. Does nothing for other jobs. */
void inline_settle(struct job *job);
/* True if HTTP threads compute small jobs on the CPU. HTTP threads should then run on the cores near their clients. */
bool inline_near(const struct devices *devices);
/* Returns how many jobs HTTP threads have computed themselves, in inline slots (inline.c), since the last call of this
 * function, and sets *seconds to the processor time that they took. Any thread may call this. */
int inline_learn(struct devices *devices, double *seconds);

#endif
