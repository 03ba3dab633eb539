/* flow.h: a share of the devices' time. Each token has one; without tokens, each connection has one.
 *
 * A device takes its next job from the flow that has used the least time lately (work/queue.c, start-time fair
 * queueing). A thread that works for a request charges its time to the request's flow.
 *
 * A flow is counted by references, because jobs outlive connections and tokens. */
#ifndef FLOW_H
#define FLOW_H

#include <stdatomic.h>
#include <stdint.h>

#include "server/base/limits.h"

struct job;

/* id, label in /metrics, the kind of work that took the time */
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
    char name[METRICS_LABEL_BYTES]; /* name in /metrics: the token's name, or "everybody" without tokens */
    _Atomic int64_t used_ns;        /* time charged to this flow since it was made, on devices and CPU threads */

    /* Only the loop's thread (queue.c) uses the members below. */
    int64_t ahead_ns;         /* used_ns + ahead_ns is the flow's virtual time */
    int running;              /* batches on devices whose first job belongs to this flow */
    int64_t running_since_ns; /* sum of the start times of these batches */
    int waiting; /* number of jobs in the list below; while it is 0 the flow is not in the queue's list of flows */
    struct job *first, *last; /* jobs that wait, linked by in_flow */
    struct flow *previous, *next;
};

/* Returns a flow with one reference, or NULL when out of memory. A long `name` is cut. */
struct flow *flow_new(const char *name);
struct flow *flow_hold(struct flow *flow); /* NULL is fine */
void flow_release(struct flow *flow);      /* NULL is fine */

/* Charges `ns` of work to the flow and counts it in /metrics. With NULL only /metrics counts it. Any thread. */
void flow_charge(struct flow *flow, enum flow_work work, int64_t ns);

#endif
