/* verify.h: two checks in float64. The first checks the lse that a client gives with a backward or an observe
 * (statistics of probabilities). The second serves the member `verify` of a body: it recomputes rows of a forward's
 * `out` after the kernel, and the answer reports their errors.
 *
 * If a device recomputes rows, it recomputes all of them (device/truth.c). Otherwise the CPU recomputes rows in pieces,
 * on libuv's threads (sched/finish.h), and its work is bounded. A device may also compute the exact results with which
 * a judge compares a client's results. */
#ifndef VERIFY_H
#define VERIFY_H

#include "server/base/limits.h"
#include "server/work/job.h"

/* Decides whether the CPU or a device verifies the outputs of an item (problem). The CPU verifies if the request wants
 * only some rows and verify_check() permits these. Otherwise a device verifies (job->truths), if devices can compute in
 * float64. If they cannot, the CPU verifies if verify_check() permits all rows. *left is the number of multiply-adds
 * that the CPU may still do for this body.
 *
 * UNSUPPORTED: the item is not a forward whose answer contains `out`, or no device can verify it and the work exceeds
 * the CPU's limits. INVALID: the tensors are in the memory of a GPU that cannot verify. */
attn_status verify_prepare(struct job *job, int index, const attn_capabilities *can, int64_t *left, attn_error *err);

/* Checks that the CPU may verify item number `index` of the job: the item is a forward with `out`, its tensors are in
 * host memory, and the work is within the CPU's limits. Subtracts the work from *left, the number of multiply-adds that
 * the CPU may still do for this body. verify_prepare() explains the errors. */
attn_status verify_check(const struct job *job, int index, int64_t *left, attn_error *err);

/* Decides whether a device computes the exact results (truth, in float64) for a check (job->truths). Returns how many
 * bytes these results take in the memory of the outputs; 0: the judge (the code on the CPU that compares the results)
 * computes them itself, but only for some rows if the problem is large. The result is 0 if devices do not compute exact
 * results, if only a GPU can read the tensors, or if judge_wants() returns 0. */
size_t verify_prepare_check(struct job *job, int index, const attn_capabilities *can);
/* Sets the addresses of the exact results with which the client's results are compared. They lie in the memory of the
 * outputs, from *at on; *at becomes the end of these results. */
void verify_place_checks(struct job *job, char **at);
/* Makes the judge on the CPU (kernels/judge/judge.h), and no device, compute the exact results for all checks of the
 * body. Call this before the job is queued. */
void verify_drop_checks(struct job *job);

/* Writes the verification result of an item (problem), from the differences that a device has found between its outputs
 * and the exact outputs. Returns false if the device does not compute exact outputs, or was not told to compute them
 * for this item. */
bool verify_found_truth(const struct job *job, int index, proto_verification *verification);

/* Checks the lse that the client gives with a backward or an observe (statistics of probabilities), before the request
 * runs. INVALID: this lse cannot belong to the scores (attn_check_lse()). If only a device can read q or k, this
 * function only chooses some rows (job->lse). The device then computes the lse of these rows, and verify_found_lse()
 * compares the given lse with it. */
attn_status verify_lse(struct job *job, int index, attn_error *err);
attn_status verify_found_lse(const struct job *job, attn_error *err);

#endif
