/* pool.c: threads that sleep until a caller has a loop to run.
 *
 * Waking a sleeping thread costs 5 to 50 us, and the loops of a run follow each other without a pause. A thread without
 * work therefore polls for POOL_SPIN_US before it sleeps.
 *
 * A loop is a struct on its caller's stack, linked into the pool while it has items left. Caller and workers take items
 * from the loop's atomic counter. When another loop is linked, workers leave their loop after the current item. They go
 * to the owner (client of the pool, see pool.h) with the fewest threads, and there to the loop with the fewest threads.
 *
 * Invariants, all under `lock`:
 *   1. A worker adds 1 to loop.inside before it uses a loop, and subtracts 1 when it no longer uses it.
 *   2. The caller unlinks the loop before it waits for inside == 0, so no thread enters a loop whose memory is about to
 *      be reused.
 *   3. `posted` counts the loops that were ever linked; a polling worker reads it without the lock.
 *   4. `computing` is the number of threads that are between pool_begin() and pool_end() and do not pause, plus the
 *      number of workers inside a loop. A worker enters a loop only while `computing` is below `threads`. A thread that
 *      lowers `computing` wakes a worker if there is work.
 *   5. A pool_part is one caller's work from pool_begin() to pool_end(). Its own member `computing` counts those
 *      threads of invariant 4 that compute for this pool_part. A thread pauses only while the pool_parts of its owner
 *      together have more than max(1, threads / owners) threads, so every owner that has begun keeps a thread. */
#include "kernels/cpu/pool.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/backend.h"

enum {
    POOL_MAX_THREADS = 1024,
    /* microseconds for which a thread without work polls: longer than the gap between two loops of one attn_run(), but
     * short enough to cost little */
    POOL_SPIN_US = 20,
    /* while a thread polls: number of pause instructions between two reads of the clock, or between two yields of the
     * processor */
    POOL_YIELD_EVERY = 64,
    /* a paused thread tests at intervals of this many nanoseconds whether its own work was cancelled */
    POOL_PAUSE_NS = 10000000,
};

struct parallel_for {
    struct parallel_for *next_loop;
    atomic_int_fast64_t next; /* index of the first item (iteration of the loop) that no thread has taken yet */
    int64_t items;
    pool_task task;
    void *context;
    struct pool_part *part; /* the pool_part (its caller's use of the pool) to which the loop belongs; NULL: none */
    /* number of workers that are in this loop; written under the lock, read without it */
    atomic_int inside;
};

struct worker {
    struct pool *pool;
    pthread_t thread;
    int index;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t posted_cond; /* signalled when a loop was linked into the pool, or when the pool closes */
    /* signalled when a worker has left a loop, for which the loop's caller may be waiting */
    pthread_cond_t left_cond;
    pthread_cond_t turn_cond; /* signalled when a paused thread may compute again */
    struct parallel_for *loops;
    /* list of all pool_parts (uses of the pool) that have begun and not ended */
    struct pool_part *parts;
    atomic_uint posted;
    /* number of threads that are computing; workers start only while it is below `threads`; written under the lock,
     * read without it */
    atomic_int computing;
    bool closing;
    int sleeping; /* number of workers that sleep until posted_cond is signalled */
    int paused;   /* number of threads that pause until turn_cond is signalled */
    /* number of threads that should compute at a time: the threads that pool_open() started, and one caller of
     * pool_run() */
    int threads;
    void (*idle)(void);
    struct worker *workers;
};

/* the use of the pool (pool_part) that this thread began last and has not ended */
static _Thread_local struct pool_part *begun;

static int64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static int64_t now_us(void)
{
    return now_ns() / 1000;
}

static void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void pool_breathe(unsigned *spins)
{
    pause_cpu();
    if (++*spins % POOL_YIELD_EVERY == 0) sched_yield();
}

static bool take_item(struct parallel_for *loop, int worker)
{
    /* When no item is left, each thread may still increase `next` once. These few steps cannot overflow a 64-bit
     * counter. */
    const int64_t item = atomic_fetch_add_explicit(&loop->next, 1, memory_order_relaxed);
    if (item >= loop->items) return false;
    loop->task(loop->context, worker, item);
    return true;
}

/* Takes and computes items (iterations) of a loop on a worker thread, until no item is left. The worker stops earlier
 * if another loop has been posted. It also stops if more threads compute than the pool has: a calling thread has then
 * begun a loop of its own and needs this worker's core. */
static void help(struct pool *pool, struct parallel_for *loop, int worker, unsigned seen)
{
    while (take_item(loop, worker) && atomic_load_explicit(&pool->computing, memory_order_relaxed) <= pool->threads &&
           atomic_load_explicit(&pool->posted, memory_order_relaxed) == seen)
        continue;
}

/* Returns how many threads compute for the owner (client of the pool) of `part`. The caller must hold pool->lock. */
static int threads_of_owner(const struct pool *pool, const struct pool_part *part)
{
    int threads = 0;
    for (const struct pool_part *p = pool->parts; p; p = p->next) threads += p->owner == part->owner ? p->computing : 0;
    return threads;
}

/* Returns the number of owners (clients of the pool) that are using the pool. The caller must hold pool->lock. */
static int owners(const struct pool *pool)
{
    int count = 0;
    for (const struct pool_part *p = pool->parts; p; p = p->next) {
        const struct pool_part *other = pool->parts;
        while (other->owner != p->owner) other = other->next;
        /* true only for the first pool_part of each owner in the list, so that each owner is counted once */
        count += other == p;
    }
    return count;
}

/* Returns the loop that a worker should help to compute; NULL if threads have taken all items of all loops. The caller
 * must hold pool->lock. */
static struct parallel_for *loop_with_items(struct pool *pool)
{
    struct parallel_for *found = NULL;
    int fewest = INT_MAX, fewest_of_owner = INT_MAX;
    for (struct parallel_for *loop = pool->loops; loop; loop = loop->next_loop) {
        const int inside = atomic_load_explicit(&loop->inside, memory_order_relaxed);
        const int of_owner = loop->part ? threads_of_owner(pool, loop->part) : inside;
        if (of_owner > fewest_of_owner || (of_owner == fewest_of_owner && inside >= fewest) ||
            atomic_load_explicit(&loop->next, memory_order_relaxed) >= loop->items)
            continue;
        found = loop;
        fewest = inside;
        fewest_of_owner = of_owner;
    }
    return found;
}

/* Returns whether one more thread may start to compute. The caller must hold pool->lock. */
static bool has_room(struct pool *pool)
{
    return atomic_load_explicit(&pool->computing, memory_order_relaxed) < pool->threads;
}

/* Adds `change` to the number of threads that compute, both in the whole pool and in `part`. The caller must hold
 * pool->lock. */
static void count(struct pool *pool, struct pool_part *part, int change)
{
    atomic_fetch_add_explicit(&pool->computing, change, memory_order_relaxed);
    if (part) part->computing += change;
    if (change < 0 && pool->paused > 0) pthread_cond_broadcast(&pool->turn_cond);
}

/* Returns true if more threads compute than the pool has, and the owner of `part` (a client of the pool) has more of
 * them than its share: the number of the pool's threads divided by the number of owners, at least 1. Returns false if
 * there is only one owner. `own`: 1 if the calling thread is paused, so that it is counted here; otherwise 0. The
 * caller must hold pool->lock. */
static bool is_over_share(struct pool *pool, const struct pool_part *part, int own)
{
    const int all = owners(pool), share = pool->threads / all;
    if (all == 1 || atomic_load_explicit(&pool->computing, memory_order_relaxed) + own <= pool->threads) return false;
    return threads_of_owner(pool, part) + own > (share > 1 ? share : 1);
}

/* Called between two items of a loop. Pauses the calling thread as long as more threads compute than the pool has, and
 * the thread's owner (a client of the pool) has more than its equal share of the pool's threads. */
static void pause_for_others(struct pool *pool, struct pool_part *part)
{
    if (part == NULL || atomic_load_explicit(&pool->computing, memory_order_relaxed) <= pool->threads) return;
    pthread_mutex_lock(&pool->lock);
    if (is_over_share(pool, part, 0)) {
        const int64_t since_ns = now_ns();
        count(pool, part, -1);
        pool->paused++;
        do {
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_nsec += POOL_PAUSE_NS;
            until.tv_sec += until.tv_nsec / 1000000000;
            until.tv_nsec %= 1000000000;
            pthread_cond_timedwait(&pool->turn_cond, &pool->lock, &until);
        } while (is_over_share(pool, part, 1) && !attn_is_cancelled(part->cancel));
        pool->paused--;
        count(pool, part, 1);
        part->paused_ns += now_ns() - since_ns;
    }
    pthread_mutex_unlock(&pool->lock);
}

void pool_begin(struct pool *pool, struct pool_part *part, const void *owner, const int *cancel)
{
    *part = (struct pool_part){ .outer = begun, .owner = owner, .cancel = cancel, .began_ns = now_ns() };
    begun = part;
    pthread_mutex_lock(&pool->lock);
    part->next = pool->parts;
    pool->parts = part;
    count(pool, part, 1);
    pthread_mutex_unlock(&pool->lock);
}

int64_t pool_end(struct pool *pool, struct pool_part *part)
{
    assert(begun == part);
    begun = part->outer;
    pthread_mutex_lock(&pool->lock);
    struct pool_part **link = &pool->parts;
    while (*link != part) link = &(*link)->next;
    *link = part->next;
    count(pool, part, -1);
    assert(part->computing == 0);
    const bool wake = pool->sleeping > 0 && has_room(pool) && loop_with_items(pool) != NULL;
    pthread_mutex_unlock(&pool->lock);
    if (wake) pthread_cond_signal(&pool->posted_cond);
    return now_ns() - part->began_ns - part->paused_ns + part->helped_ns;
}

/* Polls for at most POOL_SPIN_US until a new loop appears. Returns whether one did. The caller must not hold
 * pool->lock. */
static bool spin_for_loop(struct pool *pool, unsigned seen)
{
    int64_t until = now_us() + POOL_SPIN_US;
    for (;;) {
        for (int n = 0; n < POOL_YIELD_EVERY; n++) {
            if (atomic_load_explicit(&pool->posted, memory_order_relaxed) != seen) return true;
            pause_cpu();
        }
        if (now_us() >= until) return false;
    }
}

static void *worker_main(void *argument)
{
    struct worker *self = argument;
    struct pool *pool = self->pool;
    bool spun = true;
    pthread_mutex_lock(&pool->lock);
    while (!pool->closing) {
        struct parallel_for *loop = has_room(pool) ? loop_with_items(pool) : NULL;
        if (loop) {
            const unsigned seen = atomic_load_explicit(&pool->posted, memory_order_relaxed);
            atomic_fetch_add_explicit(&loop->inside, 1, memory_order_relaxed);
            count(pool, loop->part, 1);
            pthread_mutex_unlock(&pool->lock);
            const int64_t since_ns = now_ns();
            help(pool, loop, self->index, seen);
            const int64_t helped_ns = now_ns() - since_ns;
            pthread_mutex_lock(&pool->lock);
            if (loop->part) loop->part->helped_ns += helped_ns;
            count(pool, loop->part, -1);
            if (atomic_fetch_sub_explicit(&loop->inside, 1, memory_order_release) == 1)
                pthread_cond_broadcast(&pool->left_cond);
            spun = false;
        } else if (!spun) {
            unsigned seen = atomic_load_explicit(&pool->posted, memory_order_relaxed);
            pthread_mutex_unlock(&pool->lock);
            if (!spin_for_loop(pool, seen) && pool->idle) pool->idle();
            pthread_mutex_lock(&pool->lock);
            spun = true;
        } else {
            pool->sleeping++;
            pthread_cond_wait(&pool->posted_cond, &pool->lock);
            pool->sleeping--;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void pool_run(struct pool *pool, int64_t items, pool_task task, void *context)
{
    if (items <= 1 || pool->threads == 1) {
        for (int64_t item = 0; item < items; item++) task(context, 0, item);
        return;
    }
    struct parallel_for loop = { .items = items, .task = task, .context = context, .part = begun };
    pthread_mutex_lock(&pool->lock);
    loop.next_loop = pool->loops;
    pool->loops = &loop;
    atomic_fetch_add_explicit(&pool->posted, 1, memory_order_relaxed);
    const int64_t room = pool->threads - atomic_load_explicit(&pool->computing, memory_order_relaxed);
    int64_t wanted = items - 1 < pool->sleeping ? items - 1 : pool->sleeping;
    bool everyone = wanted == pool->sleeping && wanted <= room;
    if (wanted > room) wanted = room;
    pthread_mutex_unlock(&pool->lock);
    if (everyone && wanted > 0) pthread_cond_broadcast(&pool->posted_cond);
    for (int64_t n = 0; !everyone && n < wanted; n++) pthread_cond_signal(&pool->posted_cond);

    while (take_item(&loop, 0)) pause_for_others(pool, loop.part);

    pthread_mutex_lock(&pool->lock);
    struct parallel_for **link = &pool->loops;
    while (*link != &loop) link = &(*link)->next_loop;
    *link = loop.next_loop;
    /* all items have been taken, or else this thread would have taken another one */
    assert(atomic_load_explicit(&loop.next, memory_order_relaxed) >= items);
    pthread_mutex_unlock(&pool->lock);
    /* Other threads may still be computing their last items, usually for a short time only. This thread therefore
     * polls before it sleeps. */
    int64_t until = now_us() + POOL_SPIN_US;
    while (atomic_load_explicit(&loop.inside, memory_order_acquire) != 0) {
        for (int n = 0; n < POOL_YIELD_EVERY && atomic_load_explicit(&loop.inside, memory_order_acquire) != 0; n++)
            pause_cpu();
        if (now_us() >= until) break;
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load_explicit(&loop.inside, memory_order_acquire) != 0)
        pthread_cond_wait(&pool->left_cond, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

static int cores_allowed(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

attn_status pool_open(int threads, void (*idle)(void), struct pool **out, attn_error *err)
{
    *out = NULL;
    if (threads <= 0) threads = cores_allowed();
    if (threads > POOL_MAX_THREADS) threads = POOL_MAX_THREADS;
    struct pool *pool = calloc(1, sizeof *pool);
    struct worker *workers = calloc((size_t)threads, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return attn_fail(err, ATTN_NO_MEMORY, "", "cpu: no memory for %d threads", threads);
    }
    pool->workers = workers;
    pool->idle = idle;
    pool->threads = 1;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->posted_cond, NULL);
    pthread_cond_init(&pool->left_cond, NULL);
    pthread_cond_init(&pool->turn_cond, NULL);
    for (int n = 1; n < threads; n++) {
        workers[n] = (struct worker){ .pool = pool, .index = n };
        int code = pthread_create(&workers[n].thread, NULL, worker_main, &workers[n]);
        if (code != 0) {
            pool_close(pool);
            return attn_fail(err, ATTN_DEVICE, "", "cpu: thread %d of %d could not be started: %s", n, threads,
                             strerror(code));
        }
        /* the lock is needed, because the threads that this loop has already started may read pool->threads */
        pthread_mutex_lock(&pool->lock);
        /* thread n is counted only after its start, because pool_close() joins threads 1 to pool->threads - 1 */
        pool->threads = n + 1;
        pthread_mutex_unlock(&pool->lock);
    }
    *out = pool;
    return ATTN_OK;
}

void pool_close(struct pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->posted_cond);
    pthread_mutex_unlock(&pool->lock);
    for (int n = 1; n < pool->threads; n++) pthread_join(pool->workers[n].thread, NULL);
    assert(pool->loops == NULL && pool->parts == NULL && pool->sleeping == 0 && pool->paused == 0);
    pthread_cond_destroy(&pool->turn_cond);
    pthread_cond_destroy(&pool->left_cond);
    pthread_cond_destroy(&pool->posted_cond);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int pool_threads(const struct pool *pool)
{
    return pool->threads;
}
