/* flow.h: a share of the devices' time. Each token has one; without tokens, each connection has one.
 *
 * Devices take the next job from the flow that has used the least time lately (work/queue.c, start-time fair queueing).
 * Every thread that works for a request charges the time to the request's flow.
 *
 * A flow is counted by references, because jobs outlive connections and tokens. */
#ifndef FLOW_H
#define FLOW_H

#include <stdatomic.h>
#include <stdint.h>

#include "server/base/limits.h"

struct job;

/* id, label in /metrics, what the time was spent on */
#define FLOW_WORK_MAP(X)                                                                            \
    X(DEVICE, "device", "kernels: a GPU's time, or the time of the processor's threads")            \
    X(CHECK, "check", "decoding and checking bodies, and reading their tensors from shared memory") \
    X(FINISH, "finish", "verification, writing to shared memory, measuring how long numbers are as text")
enum flow_work {
#define X(id, label, meaning) FLOW_##id,
    FLOW_WORK_MAP(X)
#undef X
        FLOW_WORK_COUNT
};

struct flow {
    atomic_int references;
    char name[METRICS_LABEL_BYTES]; /* in /metrics: the token's name, or "everybody" without tokens */
    _Atomic int64_t used_ns;        /* all time that was charged */

    /* The loop's: queue.c. */
    int64_t ahead_ns;         /* used_ns + ahead_ns is the flow's virtual time */
    int running;              /* batches on devices whose first job is this flow's */
    int64_t running_since_ns; /* sum of the times at which these batches left for their device */
    int waiting;              /* jobs in the list below; at 0 the flow is not in the queue's list of flows */
    struct job *first, *last; /* linked by in_flow */
    struct flow *previous, *next;
};

/* A flow with one reference. `name` is cut to fit. NULL when out of memory. */
struct flow *flow_new(const char *name);
struct flow *flow_hold(struct flow *flow); /* NULL is fine */
void flow_release(struct flow *flow);      /* NULL is fine */

/* Charges time that was spent for the flow and counts it in /metrics. NULL: for no flow. Any thread may call it. */
void flow_charge(struct flow *flow, enum flow_work work, int64_t ns);

#endif
