/* queue.c: first come, first served, with small jobs of one kind leaving together.
 *
 * A batch is what waits, not what might come: when a device is free it takes what is there. Under load the jobs
 * that arrive while it works are its next batch, so batches grow by themselves as the load does, and an idle server
 * answers at once. A CPU that is busy is not sent a second batch until that is full: the longer it waits here, the
 * more it holds.
 *
 * Invariants
 * 1. The oldest job that this device may have is in the next batch: nobody is overtaken for ever. (One that waits for a
 * step on its cache does so for a job that runs.)
 * 2. A batch is bounded in problems (max_batch) and in work (QUEUE_BATCH_FLOPS), and finding it looks at most at
 * QUEUE_SCAN_MAX jobs. Those that cannot leave now, hundreds perhaps that wait for one cache, keep nobody behind them:
 * QUEUE_PASS_MAX are passed over.
 * 3. places count requests, in whatever thread they are; count and bytes are those in the list. */
#include "server/work/queue.h"

#include <assert.h>
#include <string.h>

#include "server/base/limits.h"

void queue_init(struct queue *queue, int max_receiving, int depth, int max_batch, int64_t window_ns)
{
    memset(queue, 0, sizeof *queue);
    queue->places[CALLER_RECEIVING].limit = max_receiving;
    queue->places[CALLER_WAITING].limit = depth;
    queue->max_batch = max_batch;
    queue->window_ns = window_ns;
}

/* Counts one more, unless there are `limit`. */
static bool count_up(_Atomic int *count, int limit)
{
    int now = atomic_load_explicit(count, memory_order_relaxed);
    do {
        if (now >= limit) return false;
    } while (!atomic_compare_exchange_weak_explicit(count, &now, now + 1, memory_order_relaxed, memory_order_relaxed));
    return true;
}

static attn_status refuse(const struct queue *queue, enum caller_place place, int share, attn_error *err)
{
    static const struct {
        const char *doing, *option;
    } of[CALLER_PLACES] = { { "are being received", "--max-receiving" }, { "are waiting", "--queue-depth" } };
    if (share < queue->places[place].limit)
        return attn_fail(err, ATTN_QUOTA, NULL, "%d requests of this token %s already (%s, --token-share)", share,
                         of[place].doing, of[place].option);
    return attn_fail(err, ATTN_BUSY, NULL, "%d requests %s already (%s)", queue->places[place].limit, of[place].doing,
                     of[place].option);
}

attn_status queue_enter(struct queue *queue, enum caller_place place, struct caller *caller, attn_error *err)
{
    const int limit = queue->places[place].limit, share = (int)caller_share(caller, limit);
    if (caller_is_everybody(caller)) caller = NULL;
    if (caller && !count_up(&caller->places[place], share)) return refuse(queue, place, share, err);
    if (count_up(&queue->places[place].count, limit)) return ATTN_OK;
    if (caller) atomic_fetch_sub_explicit(&caller->places[place], 1, memory_order_relaxed);
    return refuse(queue, place, limit, err);
}

void queue_leave(struct queue *queue, enum caller_place place, struct caller *caller)
{
    const int count = atomic_fetch_sub_explicit(&queue->places[place].count, 1, memory_order_relaxed);
    assert(count > 0);
    if (caller_is_everybody(caller)) return;
    const int own = atomic_fetch_sub_explicit(&caller->places[place], 1, memory_order_relaxed);
    assert(own > 0);
    (void)count, (void)own;
}

attn_status queue_look(const struct queue *queue, enum caller_place place, const struct caller *caller, attn_error *err)
{
    const int limit = queue->places[place].limit, share = (int)caller_share(caller, limit);
    if (!caller_is_everybody(caller) && atomic_load_explicit(&caller->places[place], memory_order_relaxed) >= share)
        return refuse(queue, place, share, err);
    if (atomic_load_explicit(&queue->places[place].count, memory_order_relaxed) >= limit)
        return refuse(queue, place, limit, err);
    return ATTN_OK;
}

int queue_retry_after_s(const struct queue *queue, int devices)
{
    /* seconds_per_job is read without synchronisation other than this: it is a hint. */
    double seconds_per_job;
    __atomic_load(&queue->seconds_per_job, &seconds_per_job, __ATOMIC_RELAXED);
    const double wait = seconds_per_job *
                        atomic_load_explicit(&queue->places[CALLER_WAITING].count, memory_order_relaxed) /
                        (devices > 0 ? devices : 1);
    return wait < 1 ? 1 : wait > QUEUE_RETRY_MAX_S ? QUEUE_RETRY_MAX_S : (int)(wait + 0.999);
}

void queue_waiting(const struct queue *queue, int64_t *jobs, int64_t *bytes)
{
    *jobs = atomic_load_explicit(&queue->waiting, memory_order_relaxed);
    *bytes = atomic_load_explicit(&queue->waiting_bytes, memory_order_relaxed);
}

/* The list has changed: other threads read these two. */
static void publish(struct queue *queue)
{
    atomic_store_explicit(&queue->waiting, queue->count, memory_order_relaxed);
    atomic_store_explicit(&queue->waiting_bytes, queue->bytes, memory_order_relaxed);
}

/* next: NULL: at the end. */
static void put_before(struct queue *queue, struct job *job, struct job *next)
{
    struct job *const previous = next ? next->previous : queue->last;
    job->next = next;
    job->previous = previous;
    *(previous ? &previous->next : &queue->first) = job;
    *(next ? &next->previous : &queue->last) = job;
}

static void take_out(struct queue *queue, struct job *job)
{
    *(job->previous ? &job->previous->next : &queue->first) = job->next;
    *(job->next ? &job->next->previous : &queue->last) = job->previous;
    job->next = job->previous = NULL;
}

/* The last job changes places with its caller's that are less urgent, from behind, so that the places of all callers
 * stay what they were. Steps on caches stay where they are: they are carried out in their order. */
static void move_forward(struct queue *queue, struct job *job)
{
    int looks = 0;
    for (struct job *other = job->previous, *earlier; other && looks < QUEUE_SCAN_MAX; other = earlier, looks++) {
        earlier = other->previous;
        if (other->caller != job->caller || other->step) continue;
        if (other->priority <= job->priority) break;
        struct job *const behind = job->next;
        take_out(queue, job);
        put_before(queue, job, other);
        take_out(queue, other);
        put_before(queue, other, behind);
        other->looked = false; /* who looks for new ones from the end on must not stop at it */
    }
}

void queue_push(struct queue *queue, struct job *job, int64_t now_ns)
{
    assert(job->next == NULL && job->previous == NULL && queue->first != job);
    job->queued_ns = now_ns;
    put_before(queue, job, NULL);
    if (job->step == NULL) move_forward(queue, job);
    queue->count++;
    queue->bytes += (int64_t)job->tensor_bytes;
    publish(queue);
}

void queue_remove(struct queue *queue, struct job *job)
{
    assert(job->previous ? job->previous->next == job : queue->first == job);
    assert(job->next ? job->next->previous == job : queue->last == job);
    take_out(queue, job);
    queue->count--;
    queue->bytes -= (int64_t)job->tensor_bytes;
    assert(queue->count >= 0 && queue->bytes >= 0 && (queue->count == 0) == (queue->first == NULL));
    publish(queue);
}

static bool may_leave(const struct job *job, int device)
{
    return !job->waits && (job->home < 0 || job->home == device);
}

static double most_flops(const struct job *first)
{
    return first->wide ? QUEUE_BATCH_STEP_FLOPS : QUEUE_BATCH_FLOPS;
}

int queue_take(struct queue *queue, int device, int64_t now_ns, struct job **jobs, int64_t *wait_ns)
{
    int count = 0, scanned = 0, passed = 0;
    double flops = 0;
    struct job *first = queue->first;
    *wait_ns = 0;
    while (first && !may_leave(first, device) && ++passed < QUEUE_PASS_MAX) first = first->next;
    if (first == NULL || !may_leave(first, device)) return 0;
    const job_kind kind = first->kind;
    jobs[count++] = first;
    flops = first->flops;
    if (kind != 0)
        for (struct job *job = first->next; job && count < queue->max_batch && scanned < QUEUE_SCAN_MAX;
             job = job->next, scanned++) {
            if (job->kind != kind || flops + job->flops > most_flops(first) || !may_leave(job, device)) continue;
            flops += job->flops;
            jobs[count++] = job;
        }
    const int64_t age = now_ns - first->queued_ns;
    if (kind != 0 && count < queue->max_batch && age < queue->window_ns) {
        *wait_ns = queue->window_ns - age;
        return 0;
    }
    assert(count <= queue->max_batch);
    for (int i = 0; i < count; i++) queue_remove(queue, jobs[i]);
    return count;
}

bool queue_may_grow(const struct queue *queue)
{
    return queue->first && queue->first->kind != 0 && queue->count < queue->max_batch;
}

void queue_learn(struct queue *queue, int jobs, double seconds)
{
    double one = seconds / jobs, average = queue->seconds_per_job;
    average = average == 0 ? one : average + 0.1 * (one - average);
    __atomic_store(&queue->seconds_per_job, &average, __ATOMIC_RELAXED);
}
