/* timeline.h: what overlap.c reads from the times of several requests on a GPU, without a GPU: tests/unit/gpu/test_timeline.c.
 *
 * Each request has a stream of its own and ATTN_MARKS marks: begun, copied in, computed, copied out. All times are microseconds
 * after the first request's first mark. A stage lies between two marks, but its stream may have waited there for an engine that
 * another request held: stage_began() takes that time off. */
#ifndef TIMELINE_H
#define TIMELINE_H

#include "kernels/attention.h"

enum { STAGE_IN, STAGE_KERNEL, STAGE_OUT, STAGES };

struct times {
    double at[ATTN_MARKS];
};

/* When a stage itself began: when what it has to wait for in its own stream was done and, since a large kernel has the whole
 * chip and copies of one direction share an engine, when the same stage of the requests before it was. */
static inline double stage_began(const struct times *t, int request, int stage)
{
    double at = t[request].at[stage];
    for (int other = 0; other < request; other++)
        if (t[other].at[stage + 1] > at) at = t[other].at[stage + 1];
    return at;
}

static inline double stage_took(const struct times *t, int request, int stage)
{
    return t[request].at[stage + 1] - stage_began(t, request, stage);
}

static inline double common_time(double a0, double a1, double b0, double b1)
{
    const double from = a0 > b0 ? a0 : b0, to = a1 < b1 ? a1 : b1;
    return to > from ? to - from : 0;
}

/* The largest share of a copy (stage STAGE_IN or STAGE_OUT) that ran beside the kernel of another request; from 0 to 1.
 *
 * The share is of what this very copy took. What a copy takes alone is no measure for it: that is another moment of a machine
 * that others use too, and where the copy alone was held up for a moment, every overlap looks too short beside it. */
static inline double share_beside_kernel(const struct times *t, int count, int stage)
{
    double largest = 0;
    for (int i = 0; i < count; i++) {
        const double took = stage_took(t, i, stage);
        if (took <= 0) continue;
        for (int j = 0; j < count; j++) {
            if (i == j) continue;
            const double both = common_time(stage_began(t, i, stage), t[i].at[stage + 1],
                                            stage_began(t, j, STAGE_KERNEL), t[j].at[STAGE_KERNEL + 1]);
            if (both / took > largest) largest = both / took;
        }
    }
    return largest;
}

/* Keeps in `least` the shortest that each stage of one request alone took in any round: the others were disturbed. */
static inline void keep_least(struct times *least, const struct times *round)
{
    double at = 0, kept[STAGES];
    for (int stage = 0; stage < STAGES; stage++) {
        const double before = least->at[stage + 1] - least->at[stage], now = round->at[stage + 1] - round->at[stage];
        kept[stage] = before == 0 || now < before ? now : before;
    }
    for (int stage = 0; stage < STAGES; stage++) {
        least->at[stage] = at;
        at += kept[stage];
    }
    least->at[STAGES] = at;
}

#endif
