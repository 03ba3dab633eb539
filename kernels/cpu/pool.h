/* pool.h: the threads of the CPU backend, and one way to use them: a parallel loop.
 *
 *   struct pool *pool;
 *   pool_open(0, NULL, &pool, &err);              // one thread per core
 *   struct pool_part part;
 *   pool_begin(pool, &part, owner, cancel);       // this thread computes now, for `owner`
 *   pool_run(pool, tiles, forward_tile, &job);    // calls forward_tile(&job, worker, 0 .. tiles - 1), each once
 *   spent_ns = pool_end(pool, &part);
 *   pool_close(pool);
 *
 * Threads take items (iterations of the loop) in increasing order from an atomic counter. Which thread runs an item is
 * a matter of chance, so no result may depend on it. `worker`, the number of the thread, only selects scratch memory.
 *
 * Several threads may call the pool at the same time. A thread that calls pool_begin() computes in place of one of the
 * pool's workers, which stops after its current item. The number of computing threads thus stays at the size of the
 * pool, unless there are more callers than that. Two problems on two cores have one core each.
 *
 * An owner is a pointer that stands for one client of the pool. Owners share the threads equally: a free worker helps
 * the owner with the fewest threads. If an owner has more than its share, its calling thread pauses between two items
 * until a thread is free. Each owner keeps at least one thread. If there are more owners than threads, the operating
 * system divides the cores. */
#ifndef ATTN_CPU_POOL_H
#define ATTN_CPU_POOL_H

#include "kernels/attention.h"

struct pool;

/* A function that computes one item (iteration) of a parallel loop. `worker` is the number of the thread: 0 for the
 * thread that called pool_run(), and at most pool_threads() - 1. Two threads in one loop never have the same number. */
typedef void (*pool_task)(void *context, int worker, int64_t item);

/* Opens a pool of `threads` threads. The calling thread is one of them, and threads - 1 are started. 0 means one thread
 * for each core that this process may use. A started thread calls `idle` (NULL: nothing) before it sleeps. Errors:
 * DEVICE when the system cannot start a thread, NO_MEMORY. */
attn_status pool_open(int threads, void (*idle)(void), struct pool **pool, attn_error *err);
void pool_close(struct pool *pool); /* closes a pool, on which no loop may be running; does nothing if `pool` is NULL */
int pool_threads(const struct pool *pool);

/* One use of a pool, from pool_begin() to pool_end(). Only pool.c reads the fields, under the pool's lock. */
struct pool_part {
    struct pool_part *next;
    struct pool_part *outer; /* the pool_part that the same thread began earlier and has not ended; NULL: none */
    /* pointer that stands for the client of the pool (its owner); it is only compared with other pointers, never
     * dereferenced */
    const void *owner;
    /* the caller's cancel flag, or NULL; a thread that pauses in favour of other clients of the pool goes on when this
     * flag is set */
    const int *cancel;
    int computing;
    int64_t began_ns, paused_ns, helped_ns;
};

/* Call pool_begin() before the parallel loops of a problem and pool_end() after them, so that the calling thread counts
 * among the threads that compute. The caller provides the memory of the pool_part. If a thread has begun several
 * pool_parts, it must end the newest first. pool_end() returns the nanoseconds that all threads together computed for
 * the pool_part. */
void pool_begin(struct pool *pool, struct pool_part *part, const void *owner, const int *cancel);
int64_t pool_end(struct pool *pool, struct pool_part *part);

/* Runs task(context, worker, i) for every i in [0, items) and returns when all items are done. The calling thread also
 * computes items; if there is only one item, it works alone. Several threads may call the function at the same time;
 * their loops run side by side. A loop belongs to the pool_part that its thread has begun; a loop without a pool_part
 * has no owner. Do not call this function from inside a task. A task may wait for a task with a smaller index in the
 * same loop, because a running thread has already taken that task. It must never wait for a task with a larger
 * index. */
void pool_run(struct pool *pool, int64_t items, pool_task task, void *context);

/* Call this function again and again in a loop that waits inside a task. Each call makes the processor pause, and every
 * POOL_YIELD_EVERY-th call (pool.c) also yields the processor to another thread. */
void pool_breathe(unsigned *spins);

#endif
