/* heartbeat.c: a table with one entry per thread. The entry holds the time at which the thread's present piece of work
 * began. */
#include "server/base/heartbeat.h"

#include <stdatomic.h>
#include <stddef.h>

#include "server/base/clock.h"

enum { LINE = 64 };

/* The entry of one thread in the table. Each entry fills a cache line, so that threads do not slow each other down. */
struct place {
    /* time at which the thread began its present piece of work; 0: the thread is idle */
    _Alignas(LINE) _Atomic int64_t since_ms;
    _Atomic int kind;
};

static struct place places[HEARTBEAT_THREADS];
static _Atomic int taken;
static _Thread_local struct place *own;
static _Atomic int64_t limits_ms[HEARTBEAT_KINDS] = {
#define X(id, label, name, limit_ms) limit_ms,
    HEARTBEAT_MAP(X)
#undef X
};

const char *heartbeat_label(enum heartbeat_kind kind)
{
    static const char *const labels[] = {
#define X(id, label, name, limit_ms) label,
        HEARTBEAT_MAP(X)
#undef X
    };
    return labels[kind];
}

const char *heartbeat_name(enum heartbeat_kind kind)
{
    static const char *const names[] = {
#define X(id, label, name, limit_ms) name,
        HEARTBEAT_MAP(X)
#undef X
    };
    return names[kind];
}

void heartbeat_busy(enum heartbeat_kind kind)
{
    if (own == NULL) {
        /* Threads without an entry stop here. If each of their calls increased `taken`, it would overflow. */
        if (atomic_load_explicit(&taken, memory_order_relaxed) >= HEARTBEAT_THREADS) return;
        const int index = atomic_fetch_add(&taken, 1);
        if (index >= HEARTBEAT_THREADS) return;
        own = &places[index];
        atomic_store_explicit(&own->kind, kind, memory_order_relaxed);
    }
    atomic_store_explicit(&own->since_ms, clock_ms(), memory_order_release);
}

void heartbeat_idle(void)
{
    if (own) atomic_store_explicit(&own->since_ms, 0, memory_order_release);
}

void heartbeat_set_limit(enum heartbeat_kind kind, int64_t ms)
{
    atomic_store(&limits_ms[kind], ms);
}

int64_t heartbeat_longest_ms(enum heartbeat_kind kind, int64_t now_ms)
{
    int64_t longest = 0;
    const int count = atomic_load(&taken) < HEARTBEAT_THREADS ? atomic_load(&taken) : HEARTBEAT_THREADS;
    for (int i = 0; i < count; i++) {
        const int64_t since = atomic_load_explicit(&places[i].since_ms, memory_order_acquire);
        if (since == 0 || atomic_load_explicit(&places[i].kind, memory_order_relaxed) != (int)kind) continue;
        if (now_ms - since > longest) longest = now_ms - since;
    }
    return longest;
}

enum heartbeat_kind heartbeat_stuck(int64_t now_ms, int64_t *busy_ms)
{
    for (int kind = 0; kind < HEARTBEAT_KINDS; kind++) {
        *busy_ms = heartbeat_longest_ms((enum heartbeat_kind)kind, now_ms);
        if (*busy_ms > atomic_load(&limits_ms[kind])) return (enum heartbeat_kind)kind;
    }
    return HEARTBEAT_KINDS;
}
