/* inline.h: lets an HTTP thread compute a small problem, or put it on a GPU, so that no other thread has to wake. */
#ifndef INLINE_H
#define INLINE_H

#include "server/device/devices.h"

/* What inline_run() did, and what the caller must do next. A cache transaction that has begun must be ended with
 * transaction_end() in any case. */
enum inline_outcome {
    INLINE_NOT,   /* inline_run() did nothing; the caller must queue the job */
    INLINE_BEGAN, /* the job's cache transaction has begun, but nothing runs; the caller must queue the job */
    INLINE_DONE,  /* the job has ended or failed, and its times and metrics are recorded */
    /* The job still runs on the inline slot (a stream for HTTP threads) job->part.handed_over. The caller must post it
     * to the main thread, which calls devices_submit_late(), or else call inline_settle(). */
    INLINE_LATE,
    /* The device job->part.device was lost. The caller must queue the job. The job then fails on that device, and the
     * main thread learns that the device was lost. */
    INLINE_LOST,
};

/* Runs a small job in the calling HTTP thread (on the CPU), or puts it on an idle GPU and polls for its end. A GPU's
 * kernel uses tensors in place, in staging memory or in a client's registered GPU memory. Refuses jobs that are large,
 * that verify, or that use or make a context (a saved forward). Waits for no other thread, and for a GPU at most
 * INLINE_WAIT_NS (INLINE_STEP_WAIT_NS for a cache transaction). */
enum inline_outcome inline_run(struct devices *devices, struct job *job);
/* Waits for the end of a late job (INLINE_LATE), however long it takes. Does nothing for other jobs. */
void inline_settle(struct job *job);
/* True if the device is the CPU and HTTP threads compute small jobs on it. If so, HTTP threads should run on the cores
 * on which their clients' packets arrive. */
bool inline_near(const struct devices *devices);
/* Returns how many jobs HTTP threads have computed themselves since the last call. Sets *seconds to the time that these
 * jobs took: processor time on the CPU, elapsed time on a GPU. Any thread may call this. */
int inline_learn(struct devices *devices, double *seconds);

#endif
