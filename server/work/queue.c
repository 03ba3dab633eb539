/* queue.c: serves the flow (one access token's or one connection's work) that has used the least time first, and joins
 * small jobs of one kind in a batch.
 *
 * Start-time fair queueing: a flow's virtual time is the time that it has used, plus the time by which it was set
 * ahead. A flow that begins to wait is set ahead to the virtual time of the flow served last, so that an idle flow
 * saves up no time. Only flows that have a job which may be sent to the device now count for the next batch. It begins
 * with the first such job of the flow with the least virtual time.
 *
 * A batch consists of jobs that already wait: a free device takes them at once, and under load batches grow. While the
 * CPU runs short batches, a second batch is sent to it only when the second batch is full or has waited for some time
 * (device_can_wait()). A batch is bounded in problems (max_batch) and in work (QUEUE_BATCH_FLOPS). Forming a batch
 * examines at most QUEUE_SCAN_MAX jobs, and passes over at most QUEUE_PASS_MAX jobs that cannot be sent now. */
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

/* Adds one to *count and returns true, unless *count has reached `limit`. */
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
    if (caller_is_anonymous(caller)) caller = NULL;
    if (caller && !count_up(&caller->places[place], share)) return refuse(queue, place, share, err);
    if (count_up(&queue->places[place].count, limit)) return ATTN_OK;
    if (caller) atomic_fetch_sub_explicit(&caller->places[place], 1, memory_order_relaxed);
    return refuse(queue, place, limit, err);
}

void queue_leave(struct queue *queue, enum caller_place place, struct caller *caller)
{
    const int count = atomic_fetch_sub_explicit(&queue->places[place].count, 1, memory_order_relaxed);
    assert(count > 0);
    if (caller_is_anonymous(caller)) return;
    const int own = atomic_fetch_sub_explicit(&caller->places[place], 1, memory_order_relaxed);
    assert(own > 0);
    (void)count, (void)own;
}

attn_status queue_look(const struct queue *queue, enum caller_place place, const struct caller *caller, attn_error *err)
{
    const int limit = queue->places[place].limit, share = (int)caller_share(caller, limit);
    if (!caller_is_anonymous(caller) && atomic_load_explicit(&caller->places[place], memory_order_relaxed) >= share)
        return refuse(queue, place, share, err);
    if (atomic_load_explicit(&queue->places[place].count, memory_order_relaxed) >= limit)
        return refuse(queue, place, limit, err);
    return ATTN_OK;
}

int queue_retry_after_s(const struct queue *queue, int devices)
{
    /* The main thread may change seconds_per_job at any time. This does no harm, because the result is only an
     * estimate. */
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

/* Returns the job's flow (the account of one client), or the queue's flow `nobody` if the job has none. */
static struct flow *flow_of(struct queue *queue, const struct job *job)
{
    return job->flow ? job->flow : &queue->nobody;
}

/* Publishes the number of waiting jobs and of their bytes for other threads. Must be called after each change of the
 * queue. */
static void publish(struct queue *queue)
{
    atomic_store_explicit(&queue->waiting, queue->count, memory_order_relaxed);
    atomic_store_explicit(&queue->waiting_bytes, queue->bytes, memory_order_relaxed);
}

struct list {
    struct job **first, **last;
    /* True: the list links one client's jobs by their member in_flow. False: it links all jobs by their member
     * in_queue. */
    bool of_flow;
};

static struct list all_jobs(struct queue *queue)
{
    return (struct list){ &queue->first, &queue->last, false };
}
static struct list jobs_of(struct flow *flow)
{
    return (struct list){ &flow->first, &flow->last, true };
}

static struct job_links *links(const struct list *list, struct job *job)
{
    return list->of_flow ? &job->in_flow : &job->in_queue;
}

static void put_before(const struct list *list, struct job *job, struct job *next)
{
    struct job *const previous = next ? links(list, next)->previous : *list->last;
    *links(list, job) = (struct job_links){ next, previous };
    *(previous ? &links(list, previous)->next : list->first) = job;
    *(next ? &links(list, next)->previous : list->last) = job;
}

static void take_out(const struct list *list, struct job *job)
{
    const struct job_links own = *links(list, job);
    *(own.previous ? &links(list, own.previous)->next : list->first) = own.next;
    *(own.next ? &links(list, own.next)->previous : list->last) = own.previous;
    *links(list, job) = (struct job_links){ NULL, NULL };
}

/* Swaps two jobs of the list, in which `other` comes before `job`. */
static void change_places(const struct list *list, struct job *job, struct job *other)
{
    struct job *const behind = links(list, job)->next;
    take_out(list, job);
    put_before(list, job, other);
    take_out(list, other);
    put_before(list, other, behind);
}

/* Moves the last job of the queue ahead of less urgent jobs of the same account. Jobs swap places, so jobs of other
 * accounts keep their positions. Jobs with a cache transaction are not moved, because they must run in order of
 * arrival. */
static void move_forward(struct queue *queue, struct job *job)
{
    const struct list all = all_jobs(queue), own = jobs_of(flow_of(queue, job));
    int looks = 0;
    for (struct job *other = job->in_queue.previous, *earlier; other && looks < QUEUE_SCAN_MAX;
         other = earlier, looks++) {
        earlier = other->in_queue.previous;
        if (other->caller != job->caller || other->transaction) continue;
        if (other->priority <= job->priority) break;
        change_places(&all, job, other);
        if (flow_of(queue, other) == flow_of(queue, job)) change_places(&own, job, other);
        /* begin_transactions() walks back from the end of the queue and stops at the first job that is marked as
         * scanned. A job that moves towards the end must lose this mark, or the walk would end at it. */
        other->scanned = false;
    }
}

/* ---- Flows: which client is next --------------------------------------------------------------------------------- */

static int64_t virtual_ns(const struct flow *flow, int64_t now_ns)
{
    return atomic_load_explicit(&flow->used_ns, memory_order_relaxed) + flow->ahead_ns + flow->running * now_ns -
           flow->running_since_ns;
}

int64_t queue_flow_ns(const struct queue *queue, const struct flow *flow, int64_t now_ns)
{
    return virtual_ns(flow ? flow : &queue->nobody, now_ns);
}

void queue_flow_joins(struct queue *queue, struct flow *flow, int64_t now_ns)
{
    if (flow == NULL) flow = &queue->nobody;
    const int64_t behind_ns = queue->virtual_ns - virtual_ns(flow, now_ns);
    if (behind_ns > 0) flow->ahead_ns += behind_ns;
}

void queue_flow_served(struct queue *queue, const struct flow *flow)
{
    const struct flow *const own = flow ? flow : &queue->nobody;
    const int64_t served_ns = atomic_load_explicit(&own->used_ns, memory_order_relaxed) + own->ahead_ns;
    if (served_ns > queue->virtual_ns) queue->virtual_ns = served_ns;
}

static void list_flow(struct queue *queue, struct flow *flow)
{
    flow->previous = queue->last_flow;
    flow->next = NULL;
    *(queue->last_flow ? &queue->last_flow->next : &queue->first_flow) = flow;
    queue->last_flow = flow;
    queue->flows++;
}

static void unlist_flow(struct queue *queue, struct flow *flow)
{
    *(flow->previous ? &flow->previous->next : &queue->first_flow) = flow->next;
    *(flow->next ? &flow->next->previous : &queue->last_flow) = flow->previous;
    flow->previous = flow->next = NULL;
    queue->flows--;
}

void queue_flow_runs(struct flow *flow, int64_t left_ns)
{
    if (flow == NULL) return;
    flow->running++;
    flow->running_since_ns += left_ns;
}

void queue_flow_ran(struct flow *flow, int64_t left_ns)
{
    if (flow == NULL) return;
    assert(flow->running > 0);
    flow->running--;
    flow->running_since_ns -= left_ns;
}

/* ---- Adding jobs to the queue and taking them out ---------------------------------------------------------------- */

void queue_push(struct queue *queue, struct job *job, int64_t now_ns)
{
    struct flow *const flow = flow_of(queue, job);
    const struct list all = all_jobs(queue), own = jobs_of(flow);
    assert(job->in_queue.next == NULL && job->in_queue.previous == NULL && queue->first != job);
    job->queued_ns = now_ns;
    put_before(&all, job, NULL);
    put_before(&own, job, NULL);
    queue_flow_joins(queue, flow, now_ns);
    if (flow->waiting++ == 0) list_flow(queue, flow);
    if (job->transaction == NULL) move_forward(queue, job);
    queue->count++;
    queue->bytes += (int64_t)job->tensor_bytes;
    publish(queue);
}

void queue_remove(struct queue *queue, struct job *job)
{
    struct flow *const flow = flow_of(queue, job);
    const struct list all = all_jobs(queue), own = jobs_of(flow);
    assert(job->in_queue.previous ? job->in_queue.previous->in_queue.next == job : queue->first == job);
    assert(job->in_queue.next ? job->in_queue.next->in_queue.previous == job : queue->last == job);
    take_out(&all, job);
    take_out(&own, job);
    if (--flow->waiting == 0) unlist_flow(queue, flow);
    queue->count--;
    queue->bytes -= (int64_t)job->tensor_bytes;
    assert(queue->count >= 0 && queue->bytes >= 0 && (queue->count == 0) == (queue->first == NULL));
    assert((queue->flows == 0) == (queue->first == NULL) && (flow->waiting == 0) == (flow->first == NULL));
    publish(queue);
}

static bool may_leave(struct job *job, int device)
{
    return !job->blocked && job_part_for(job, device) != NULL;
}

static double most_flops(const struct job *leader)
{
    return leader->memory_bound ? QUEUE_BATCH_STEP_FLOPS : QUEUE_BATCH_FLOPS;
}

/* Returns the first job of the flow (client) that may be sent to the device now, or NULL. Examines at most `most`
 * jobs. */
static struct job *first_that_may_leave(const struct flow *flow, int device, int64_t most)
{
    struct job *job = flow->first;
    while (job && !may_leave(job, device)) job = --most > 0 ? job->in_flow.next : NULL;
    return job;
}

/* True if job `a` goes to a device before job `b`; a_ns and b_ns are the virtual times of their flows (clients).
 * Priorities count only within one account. */
static bool goes_first(const struct job *a, int64_t a_ns, const struct job *b, int64_t b_ns)
{
    if (a->caller == b->caller && a->priority != b->priority) return a->priority < b->priority;
    return a_ns != b_ns ? a_ns < b_ns : a->queued_ns < b->queued_ns;
}

/* Returns the first job of the device's next batch; NULL: no job can be sent to the device now. */
static struct job *next_leader(struct queue *queue, const struct queue_taker *taker, int64_t now_ns)
{
    struct job *best = NULL;
    int64_t best_ns = 0;
    const int64_t most = QUEUE_PASS_MAX / (queue->flows > 0 ? queue->flows : 1) + 1;
    for (struct flow *flow = queue->first_flow; flow; flow = flow->next) {
        struct job *const job = first_that_may_leave(flow, taker->device, most);
        if (job == NULL || (taker->has_room && !taker->has_room(taker->context, job))) continue;
        const int64_t at_ns = virtual_ns(flow, now_ns);
        if (best && !goes_first(job, at_ns, best, best_ns)) continue;
        best = job;
        best_ns = at_ns;
    }
    return best;
}

int queue_take(struct queue *queue, const struct queue_taker *taker, int64_t now_ns, struct job **jobs,
               int64_t *wait_ns)
{
    int count = 0, scanned = 0;
    *wait_ns = 0;
    struct job *const leader = next_leader(queue, taker, now_ns);
    if (leader == NULL) return 0;
    const job_kind kind = leader->kind;
    double flops = leader->flops;
    jobs[count++] = leader;
    if (kind != 0)
        for (struct job *job = queue->first; job && count < queue->max_batch && scanned < QUEUE_SCAN_MAX;
             job = job->in_queue.next, scanned++) {
            if (job == leader || job->kind != kind || flops + job->flops > most_flops(leader) ||
                !may_leave(job, taker->device))
                continue;
            flops += job->flops;
            jobs[count++] = job;
        }
    const int64_t age = now_ns - leader->queued_ns;
    if (kind != 0 && count < queue->max_batch && age < queue->window_ns) {
        *wait_ns = queue->window_ns - age;
        return 0;
    }
    assert(count <= queue->max_batch);
    queue_flow_served(queue, leader->flow);
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
