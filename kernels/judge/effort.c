/* effort.c: estimates how long the work of a judge takes. */
#include "kernels/judge/effort.h"

#include "kernels/judge/frame.h"

/* Number of multiply-adds in double that one thread computes per second: EFFORT_RATE with the vector instructions of
 * products_avx2.c and products_avx512.c, EFFORT_RATE_PORTABLE with plain C. */
#define EFFORT_RATE          8e9
#define EFFORT_RATE_PORTABLE 2e9
/* The time of emulating one correct kernel (imitating its roundings) divided by the time of computing the truth
 * (float64 results). */
#define EFFORT_EMULATION 2.5

double effort_rate(void)
{
    return products_best() == &products_portable ? EFFORT_RATE_PORTABLE : EFFORT_RATE;
}

int effort_emulations(const attn_problem *p)
{
    return frame_multiply_adds(p) <= EFFORT_SMALL ? EFFORT_EMULATIONS : EFFORT_EMULATIONS_LARGE;
}

double effort_of_emulations(int count)
{
    return EFFORT_EMULATION * count;
}
