/* effort.h: estimates how long the work of a judge (a check of a caller's results) takes on one thread. */
#ifndef JUDGE_EFFORT_H
#define JUDGE_EFFORT_H

#include "kernels/attention.h"

enum {
    /* A pass (a run over a problem's tiles) with at most this many multiply-adds goes over all tiles. A pass with more
     * may leave out tiles. */
    EFFORT_SMALL = 1 << 24,
    /* number of correct kernels whose roundings the judge imitates for a small problem (at most EFFORT_SMALL
     * multiply-adds) */
    EFFORT_EMULATIONS = 6,
    /* number of correct kernels whose roundings the judge imitates for a problem of more than EFFORT_SMALL
     * multiply-adds */
    EFFORT_EMULATIONS_LARGE = 2,
};

double effort_rate(void);
/* Returns how many correct kernels the judge imitates, with their roundings, for this problem. */
int effort_emulations(const attn_problem *p);
/* Returns how long emulating `count` correct kernels (imitating their roundings) takes, divided by the time of the
 * truth (float64 results). */
double effort_of_emulations(int count);

#endif
