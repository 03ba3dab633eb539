/* transaction.h: the cache transaction of a request whose keys and values are in caches (decode, append), and the
 * problem that a device computes for it.
 *
 *   transaction_prepare()  by the thread that prepares the job: checks the caches, completes and checks the problem
 *   transaction_begin()    by the main thread, repeated until it begins: puts page tables into staging memory
 *   transaction_end()      by the main thread, after the device: commits or not, even if no request waits any more
 *   transaction_free()     when the job is freed
 *
 * An HTTP thread that runs the job itself calls transaction_begin() and transaction_end() (device/inline.c). */
#ifndef TRANSACTION_H
#define TRANSACTION_H

#include "server/work/job.h"

/* Prepares the cache transaction of a request. The request must have one problem, in which no error was found. For an
 * append, the URL names the only cache. */
attn_status transaction_prepare(struct job *job, attn_error *err);
/* Begins the transaction. caches_begin() in caches.h explains `scan`, *wait and the errors. */
attn_status transaction_begin(struct job *job, uint64_t scan, bool *wait, attn_error *err);
void transaction_end(struct job *job, bool commit);
/* True between a transaction_begin() that succeeded and transaction_end(). False for a job without a transaction. */
bool transaction_has_begun(const struct job *job);
/* True once the new keys and values are in the caches. From then on no error may be answered, because clients take an
 * error to mean that nothing has changed. */
bool transaction_is_committed(const struct job *job);
void transaction_free(struct job *job);

/* Returns how many bytes of keys and values a device will read. A page that several forks share counts once for each of
 * them. */
int64_t transaction_bytes(const struct job *job);

/* Returns how many copies the device makes before it computes, and sets *moves to the array of these copies. */
int64_t transaction_moves(const struct job *job, const attn_move **moves);

#endif
