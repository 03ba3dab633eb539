/* prepare.h: from a decoded body to a job that a device can run, and the end of the contexts that it took part in. */
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

/* The contexts that the job makes, of each item without an error, can be taken and hold the job, whose kernels ran. */
void prepare_fill_contexts(struct job *job);
/* The end of the contexts that the job uses or makes, called by the owner of its request, who knows what became of it.
 * `answered`: the kernels ran and there is an answer that says so; of each item without an error, the context that it
 * used is gone and the one that it made can be taken. Otherwise what it used is given back and what it made, or would
 * have, is forgotten. Once is enough, further calls do nothing. */
void prepare_finish_contexts(struct job *job, bool answered);

#endif
