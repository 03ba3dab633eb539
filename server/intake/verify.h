/* verify.h: two checks in float64. The first checks the lse that a backward or an observe is given. The second, for
 * the member `verify`, recomputes rows of a forward's out after the kernel, and the answer reports their errors. A
 * device that computes the truth recomputes all rows (device/truth.c). Otherwise the CPU does the work in pieces, on
 * libuv's threads (sched/finish.h). The CPU may be slow, so its work is bounded.
 *
 * A device may also compute the truth that the judge of a check compares results with. */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/base/limits.h"
#include "server/work/job.h"

/* Decides where an item is verified. A device verifies it (job->truths) if devices can compute its outputs in float64
 * and the request wants all rows, or more than the CPU may verify. Otherwise the CPU verifies the rows, but only if no
 * tensor is in a GPU's memory. *left is the part of VERIFY_MAX_MULTIPLY_ADDS that earlier problems of the body have
 * left; devices take nothing of it. UNSUPPORTED: the work exceeds the CPU's bounds and no device can do it, or the item
 * is not a forward whose answer contains out. INVALID: tensors are in the memory of a GPU that cannot verify. */
attn_status verify_prepare(struct job *job, int index, const attn_capabilities *can, int64_t *left, attn_error *err);

/* Checks that the CPU may verify an item of the job. verify_prepare() explains the limits, the errors and `left`. */
attn_status verify_check(const struct job *job, int index, int64_t *left, attn_error *err);

/* Decides whether a device computes the truth (results in float64) of a check (job->truths), and returns the bytes
 * among the outputs that the truth then takes. 0: the judge on the CPU computes the truth itself, of some rows if the
 * problem is large. Reasons: devices compute no truth, only a GPU reads the tensors, or judge_wants() returns 0. */
size_t verify_prepare_check(struct job *job, int index, const attn_capabilities *can);
/* Chooses addresses for the exact results of a body's checks, among the outputs, from *at on, and advances *at. */
void verify_place_checks(struct job *job, char **at);
/* Lets the judge on the CPU compute the truths of all checks of the body. Call this before the job is queued. */
void verify_drop_checks(struct job *job);

/* Turns the distances that a device found into the verification result of an item. False: the device computes no
 * truth (outputs in float64), or was not told to compute the truth of this item. */
bool verify_found_truth(const struct job *job, int index, proto_verification *verification);

/* Checks the lse that a backward or an observe is given, before it runs. INVALID: the lse cannot belong to the scores
 * (attn_check_lse()). If only a device can read q or k, this function only chooses some rows (job->lse). The device
 * then computes the lse of these rows, by which verify_found_lse() judges the given lse. */
attn_status verify_lse(struct job *job, int index, attn_error *err);
attn_status verify_found_lse(const struct job *job, attn_error *err);

#endif
