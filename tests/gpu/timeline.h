/* timeline.h: what overlap.c computes from the times of several requests on a GPU. tests/unit/gpu/test_timeline.c tests
 * these functions without a GPU.
 *
 * Each request has a stream of its own and ATTN_MARKS marks: begun, copied in, computed, copied out. All times are
 * microseconds after the first request's first mark. A stage is the time between two marks. Within this time the
 * request may have waited, because another request used the same copy engine or the chip. stage_began() leaves this
 * wait out. */
#ifndef TIMELINE_H
#define TIMELINE_H

#include "kernels/attention.h"

enum { STAGE_IN, STAGE_KERNEL, STAGE_OUT, STAGES };

struct times {
    double at[ATTN_MARKS];
};

/* Returns the time at which the work of a stage began, after any wait. A stage waits for the stage before it in its own
 * stream, and for the same stage of earlier requests: a large kernel uses the whole chip, and copies of one direction
 * share an engine. */
static inline double stage_began(const struct times *t, int request, int stage)
{
    double at = t[request].at[stage];
    for (int other = 0; other < request; other++)
        if (t[other].at[stage + 1] > at) at = t[other].at[stage + 1];
    return at;
}

/* Returns which fraction of a copy's time overlapped a kernel or an opposite copy of another request. `stage` is
 * STAGE_IN or STAGE_OUT; of all copies in this direction, the largest fraction counts. It is a fraction of the copy's
 * time in this run, not of the time that a copy takes alone, because other programs may have slowed down either run.
 * Opposite copies count, because no kernel may be able to run during a copy to the device that takes longer than the
 * kernels. */
static inline double share_beside_others(const struct times *t, int count, int stage)
{
    const int opposite = stage == STAGE_IN ? STAGE_OUT : STAGE_IN;
    double largest = 0;
    for (int i = 0; i < count; i++) {
        const double begin = stage_began(t, i, stage), end = t[i].at[stage + 1];
        double covered = 0, at = begin;
        /* Adds up the time from `begin` to `end` during which another request's kernel or opposite copy runs. If one
         * runs at `at`, `at` moves to its end. Otherwise `at` moves to the beginning of the next one. */
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

/* Replaces each stage's time in `least` by the stage's time in `round`, if `least` has no time for the stage yet, or a
 * longer time than `round`. Both are times of one request, which runs several times. A longer time was disturbed by
 * other work on the machine. */
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
