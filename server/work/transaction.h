/* transaction.h: requests whose keys and values are in caches (decode, append). A "step" is such a request's cache
 * transaction (struct cache_step, caches.h), with the problem that a device computes.
 *
 *   transaction_prepare()  thread that prepares the job  checks the caches; completes and checks the problem
 *   transaction_begin()    loop, until it begins         puts tables into staging memory and points the problem at them
 *   transaction_end()      loop, when the device is done commits or not, also when no request waits for it any more
 *                   (an HTTP thread that runs the job itself calls both: device/inline.c; no other step waits then)
 *   transaction_free()     with the job */
#ifndef TRANSACTION_H
#define TRANSACTION_H

#include "server/work/job.h"

/* For a call with one item without an error. For an append, `ids` is the cache in its path. */
attn_status transaction_prepare(struct job *job, attn_error *err);
/* Begins the transaction; see caches_begin(). */
attn_status transaction_begin(struct job *job, uint64_t scan, bool *wait, attn_error *err);
void transaction_end(struct job *job, bool commit);
/* True between a successful transaction_begin() and transaction_end(). False for a job without a transaction. */
bool transaction_has_begun(const struct job *job);
/* True once the new keys and values are in the caches. No error may be answered then, as it would deny that. */
bool transaction_is_committed(const struct job *job);
void transaction_free(struct job *job); /* does nothing for a job without a transaction */

/* Bytes of keys and values that a device will read, at the caches' present lengths. Shared pages
 * count for each fork. */
int64_t transaction_bytes(const struct job *job);

/* The copies that the device makes before it computes. Returns how many. */
int64_t transaction_moves(const struct job *job, const attn_move **moves);

#endif
