/* timeline.h: what overlap.c computes from the times of several requests on a GPU. tests/unit/gpu/test_timeline.c tests
 * it without a GPU.
 *
 * Each request has a stream and ATTN_MARKS marks: begun, copied in, computed, copied out. Times are microseconds after
 * the first request's first mark. A stage is the time between two marks, including any wait for the copy engine or the
 * chip. */
#ifndef TIMELINE_H
#define TIMELINE_H

#include "kernels/attention.h"

enum { STAGE_IN, STAGE_KERNEL, STAGE_OUT, STAGES };

struct times {
    double at[ATTN_MARKS];
};

/* Returns the time at which a stage of a request (a copy or the kernel) began to work, after any wait. The stage waits
 * for the previous stage of its request, and for the same stage of all earlier requests. */
static inline double stage_began(const struct times *t, int request, int stage)
{
    double at = t[request].at[stage];
    for (int other = 0; other < request; other++)
        if (t[other].at[stage + 1] > at) at = t[other].at[stage + 1];
    return at;
}

/* Returns the largest fraction of a copy's time that overlapped a kernel of another request, or a copy of another
 * request in the opposite direction. `stage` is the direction of the copies, STAGE_IN or STAGE_OUT. The fraction is of
 * the copy's time in this run, because other programs may have slowed down the run of the request alone. Opposite
 * copies count, because no kernel is left to run beside a copy if copies take longer than kernels. */
static inline double share_beside_others(const struct times *t, int count, int stage)
{
    const int opposite = stage == STAGE_IN ? STAGE_OUT : STAGE_IN;
    double largest = 0;
    for (int i = 0; i < count; i++) {
        const double begin = stage_began(t, i, stage), end = t[i].at[stage + 1];
        double covered = 0, at = begin;
        /* Adds up the time during which a kernel of another request runs, or another request's copy in the opposite
         * direction. */
        while (at < end) {
            double until = at, next = end;
            for (int j = 0; j < count; j++)
                for (int n = 0; n < 2 && j != i; n++) {
                    const int other = n ? opposite : STAGE_KERNEL;
                    const double from = stage_began(t, j, other), to = t[j].at[other + 1];
                    if (from <= at && to > until) until = to;
                    if (from > at && to > from && from < next) next = from;
                }
            if (until > end) until = end;
            covered += until - at;
            at = until > at ? until : next;
        }
        if (end > begin && covered / (end - begin) > largest) largest = covered / (end - begin);
    }
    return largest;
}

/* Replaces each stage's time in `least` by the time in `round` if that is shorter. The request runs several times,
 * because other programs may slow down some of the runs. */
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
