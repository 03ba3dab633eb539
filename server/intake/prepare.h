/* prepare.h: makes a job from a decoded body, so that a device can run it. */
#ifndef PREPARE_H
#define PREPARE_H

#include "server/work/job.h"

/* Does all work between decoding and queueing: resolves contexts (saved forwards), places outputs, plans problems,
 * estimates work. If item i fails, its error is in call->items[i].error. An envelope, which holds several requests,
 * answers this error in the item's place. For any other body, prepare_job() returns the error. Errors of the whole
 * job: BUSY (no memory for the outputs), TOO_LARGE (more memory than `largest`, the device with the most memory,
 * will ever have for the job). */
attn_status prepare_job(struct job *job, const attn_capabilities *can, const attn_device_info *largest,
                        attn_error *err);

/* Makes a closer estimate of the time of a job that may take long, from the values of its tensors
 * (attn_cost_closer()), which prepare_job() does not read. Does nothing for jobs that take little time. */
void prepare_look_closer(struct job *job, const attn_device_info *largest);

#endif
