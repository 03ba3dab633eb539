/* prepare.h: completes the job of a decoded request body, so that a device can run it. */
#ifndef PREPARE_H
#define PREPARE_H

#include "server/work/job.h"

/* Does all work between decoding and queueing: finds the contexts (saved forwards) that the job uses, allocates memory
 * for outputs, chooses the kernels, and estimates the work. If item i (a problem of the body) fails, its error is in
 * call->items[i].error. For a body with one problem, prepare_job() also returns this error. Errors of the whole job:
 * BUSY (there is no memory for the outputs now), TOO_LARGE (the device with the most memory, `largest`, can never
 * give the job the memory that it needs). */
attn_status prepare_job(struct job *job, const attn_capabilities *can, const attn_device_info *largest,
                        attn_error *err);

/* Makes a more exact estimate of the time of a job that may take long. The estimate uses the values of the tensors
 * (attn_cost_closer()), which prepare_job() does not read. Does nothing for jobs that take little time. */
void prepare_look_closer(struct job *job, const attn_device_info *largest);

#endif
