/* flow.c: makes and releases flows (each is the account of one client's device time), and charges time to them. */
#include "server/base/flow.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "server/base/metrics.h"

static const char *const labels[FLOW_WORK_COUNT] = {
#define X(id, label, meaning) label,
    FLOW_WORK_MAP(X)
#undef X
};

struct flow *flow_new(const char *name)
{
    struct flow *flow = calloc(1, sizeof *flow);
    if (flow == NULL) return NULL;
    atomic_init(&flow->references, 1);
    snprintf(flow->name, sizeof flow->name, "%s", name);
    return flow;
}

struct flow *flow_hold(struct flow *flow)
{
    if (flow) atomic_fetch_add_explicit(&flow->references, 1, memory_order_relaxed);
    return flow;
}

void flow_release(struct flow *flow)
{
    if (flow == NULL || atomic_fetch_sub_explicit(&flow->references, 1, memory_order_acq_rel) != 1) return;
    assert(flow->waiting == 0 && flow->running == 0);
    free(flow);
}

void flow_charge(struct flow *flow, enum flow_work work, int64_t ns)
{
    if (flow == NULL || ns <= 0) return;
    atomic_fetch_add_explicit(&flow->used_ns, ns, memory_order_relaxed);
    metrics_add(METRIC_FLOW_SECONDS, flow->name, labels[work], (double)ns / 1e9);
}
