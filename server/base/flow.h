/* flow.h: a flow records how much device time one client has used, so that clients get equal shares. Each token has a
 * flow; on a server without tokens, each connection has one.
 *
 * A device takes its next job from the flow that has used the least time lately (work/queue.c, start-time fair
 * queueing). A thread that works for a request charges its time to the request's flow.
 *
 * A flow has a reference count, because jobs outlive connections and tokens. */
#ifndef FLOW_H
#define FLOW_H

#include <stdatomic.h>
#include <stdint.h>

#include "server/base/limits.h"

struct job;

/* One row for each kind of work: its id, its label in /metrics, and what took the time. */
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
    char name[METRICS_LABEL_BYTES]; /* name of the flow in /metrics: the token's name, or "everybody" without tokens */
    _Atomic int64_t used_ns;

    /* Only the main thread (queue.c) uses the members below. */
    /* Start-time fair queueing orders flows by their virtual time: used_ns + ahead_ns, plus the time that the flow's
     * running batches have taken so far. ahead_ns grows when a flow joins the queue after a pause, so that the pause
     * gives it no advantage. */
    int64_t ahead_ns;
    int running; /* number of running batches whose first job (request) belongs to this flow (client) */
    /* Sum of the start times of the batches that `running` counts. The sum of their running times is therefore
     * `running` * now minus this sum. */
    int64_t running_since_ns;
    int waiting; /* number of this client's waiting jobs (requests); 0: the flow is not in the queue's list of flows */
    struct job *first, *last; /* this client's waiting jobs (requests), linked by their member in_flow */
    struct flow *previous, *next;
};

/* Makes a flow (the account of one client's device time) with one reference. A `name` that is too long is cut. Returns
 * NULL when out of memory. */
struct flow *flow_new(const char *name);
struct flow *flow_hold(struct flow *flow);
void flow_release(struct flow *flow);

/* Charges `ns` nanoseconds of work to the flow (client), and adds this time to the totals in /metrics. If `flow` is
 * NULL, the time is only added to the totals. Any thread may call this. */
void flow_charge(struct flow *flow, enum flow_work work, int64_t ns);

#endif
