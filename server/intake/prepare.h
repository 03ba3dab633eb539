/* prepare.h: from a decoded body to a job that a device can run. */
#ifndef PREPARE_H
#define PREPARE_H

#include "server/work/job.h"

/* Everything that happens between decoding and queueing: contexts are resolved, outputs placed, kernels looked up,
 * work counted. An item that fails keeps its error in results[i] (an envelope answers it there); returns that error
 * when the body is no envelope, or what befell the whole job (BUSY: no memory for the outputs; TOO_LARGE: more than
 * `largest`, the device with the most memory, will ever have for it). */
attn_status prepare_job(struct job *job, const attn_device *device, const attn_device_info *largest, attn_error *err);

/* Estimates the work of a job that may take long once more, by values of its tensors (attn_cost_closer()), which
 * prepare_job() does not read. Does nothing for other jobs. */
void prepare_look_closer(struct job *job, const attn_device *device, const attn_device_info *largest);

#endif
