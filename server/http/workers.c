/* workers.c: HTTP threads and cores. See workers.h. */
#include "server/http/workers.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/base/log.h"

enum {
    PERIOD_MS = 200,   /* between two looks */
    LEAST_RATE = 1000, /* requests a second, for whose sake threads are held */
    UNEVEN_LOOKS = 3,  /* the clients' threads move, too */
    FREE_MS = 2000,    /* nobody is held again for so long after the load was uneven */
    MOST_LEAD = 4,     /* connections that each worker of a core may have more than another */
    MOST_CORES = CPU_SETSIZE,
};

bool workers_init(struct workers *workers, struct port *port, int count, int cores)
{
    *workers = (struct workers){ .count = count };
    const int allowed = sched_getaffinity(0, sizeof workers->all, &workers->all) == 0 ? CPU_COUNT(&workers->all) : 0;
    workers->list = aligned_alloc(_Alignof(struct worker), (size_t)count * sizeof *workers->list);
    if (workers->list == NULL) return false;
    memset(workers->list, 0, (size_t)count * sizeof *workers->list);
    /* Below a quota processes share all cores of the machine, and must not all hold on to the first ones. */
    if (allowed > 1 && allowed <= cores && count % allowed == 0 && count / allowed >= allowed) {
        workers->cpu = calloc((size_t)allowed, sizeof *workers->cpu);
        if (workers->cpu == NULL) {
            workers_clear(workers);
            return false;
        }
        for (int cpu = 0; cpu < MOST_CORES && workers->cores < allowed; cpu++)
            if (CPU_ISSET(cpu, &workers->all)) workers->cpu[workers->cores++] = cpu;
    }
    for (int i = 0; i < count; i++) {
        workers->list[i].port = port;
        workers->list[i].core = workers->cores > 0 ? i % workers->cores : 0;
    }
    return true;
}

void workers_clear(struct workers *workers)
{
    free(workers->list);
    free(workers->cpu);
    *workers = (struct workers){ 0 };
}

/* The index of the core where the last packet of the socket arrived; -1 when it is none of ours. */
static int core_of(const struct workers *workers, int fd)
{
    int cpu = -1;
    socklen_t length = sizeof cpu;
    if (workers->cores == 0 || getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &cpu, &length) != 0) return -1;
    for (int i = 0; i < workers->cores; i++)
        if (workers->cpu[i] == cpu) return i;
    return -1;
}

static int connections_of(const struct worker *worker)
{
    return atomic_load_explicit(&worker->connections, memory_order_relaxed);
}

/* The least busy worker of a core, or of all (core -1). */
static struct worker *least_busy(const struct workers *workers, int core)
{
    struct worker *best = NULL;
    for (int i = 0; i < workers->count; i++) {
        struct worker *worker = &workers->list[i];
        if (core >= 0 && worker->core != core) continue;
        if (best == NULL || connections_of(worker) < connections_of(best)) best = worker;
    }
    return best;
}

struct worker *workers_pick_on(struct workers *workers, int core)
{
    struct worker *any = least_busy(workers, -1), *near = least_busy(workers, core);
    const int lead = connections_of(near) - connections_of(any);
    if (core < 0) return any;
    if (lead >= MOST_LEAD) workers->spills = true;
    if (lead == 0) workers->spills = false;
    return workers->spills ? any : near;
}

struct worker *workers_pick(struct workers *workers, int fd)
{
    return workers_pick_on(workers, core_of(workers, fd));
}

enum workers_load workers_load(const uint32_t *requests, int cores, int64_t ms, bool held)
{
    uint64_t sum = 0, least = UINT64_MAX, most = 0;
    for (int i = 0; i < cores; i++) {
        sum += requests[i];
        if (requests[i] < least) least = requests[i];
        if (requests[i] > most) most = requests[i];
    }
    if (ms <= 0 || sum * 1000 < (uint64_t)LEAST_RATE / (held ? 2 : 1) * (uint64_t)ms) return WORKERS_IDLE;
    return most <= (held ? 4 : 2) * least ? WORKERS_EVEN : WORKERS_UNEVEN;
}

/* Refused or changed by somebody else, a thread stays as it is. */
static void pin(const struct workers *workers, struct worker *worker, bool pinned)
{
    const pid_t tid = atomic_load_explicit(&worker->tid, memory_order_relaxed);
    cpu_set_t is, one;
    if (tid == 0 || worker->pinned == pinned) return;
    CPU_ZERO(&is);
    CPU_ZERO(&one);
    CPU_SET(workers->cpu[worker->core], &one);
    const cpu_set_t *from = pinned ? &workers->all : &one, *to = pinned ? &one : &workers->all;
    if (sched_getaffinity(tid, sizeof is, &is) == 0 && CPU_EQUAL(&is, from) &&
        sched_setaffinity(tid, sizeof *to, to) == 0)
        worker->pinned = pinned;
    if (!pinned) worker->pinned = false;
}

static void hold(struct workers *workers, bool held)
{
    for (int i = 0; i < workers->count; i++) pin(workers, &workers->list[i], held);
    if (workers->held == held) return;
    workers->held = held;
    log_event(LOG_DEBUG, NULL, held ? "threads_held" : "threads_free", "threads=%d cores=%d", workers->count,
              workers->cores);
}

void workers_let_go(struct workers *workers)
{
    if (workers->held) hold(workers, false);
}

void workers_balance(struct workers *workers, int64_t now_ms)
{
    uint32_t requests[MOST_CORES] = { 0 };
    const int64_t ms = now_ms - workers->since_ms;
    if (workers->cores == 0 || ms < PERIOD_MS) return;
    for (int i = 0; i < workers->count; i++) {
        struct worker *worker = &workers->list[i];
        const uint32_t total = atomic_load_explicit(&worker->requests, memory_order_relaxed);
        requests[worker->core] += total - worker->seen;
        worker->seen = total;
    }
    workers->since_ms = now_ms;
    const enum workers_load load = workers_load(requests, workers->cores, ms, workers->held);
    workers->uneven = workers->held && load == WORKERS_UNEVEN ? workers->uneven + 1 : 0;
    if (workers->held && (load == WORKERS_IDLE || workers->uneven == UNEVEN_LOOKS)) {
        hold(workers, false);
        if (load == WORKERS_UNEVEN) workers->free_until_ms = now_ms + FREE_MS;
    } else if (workers->held || (load == WORKERS_EVEN && now_ms >= workers->free_until_ms))
        hold(workers, true); /* also threads that had nothing to do before */
}
