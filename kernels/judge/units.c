/* units.c: where a judge emulates right kernels if a device has computed the truth (float64 results) of all rows. See
 * state.h.
 *
 * A device computes the truth in milliseconds, but emulating right kernels takes the judge five times as long as
 * computing the truth would. Therefore the judge emulates only some units of a large problem (a unit is a tile of
 * queries, or in a backward a key/value head of a sequence). Half of these units are those in which the caller's
 * results are farthest from the truth: a right kernel has its largest errors there, and the emulations have errors of
 * the same size there. The other half are evenly spread. The choice depends on the problem and the results, and on the
 * judge's time only if this time is short. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/judge/state.h"

/* The least number of units that are emulated. A backward has fewer, because a unit of a backward takes longer. */
enum { LEAST_UNITS = 8, LEAST_UNITS_BACKWARD = 4 };

/* A judge emulates as many units as take this many multiply-adds to emulate once, but at least LEAST_UNITS. */
#define EMULATED_MULTIPLY_ADDS ((double)(INT64_C(1) << 31))
/* The largest number of multiply-adds of a unit in a backward: four such units take about five seconds to emulate. */
#define UNIT_MULTIPLY_ADDS ((double)(INT64_C(1) << 31))

/* Returns whether tile n is the first one of a unit. */
static bool begins_unit(const struct frame *f, int64_t n)
{
    const struct tile *const t = &f->tiles[n];
    return f->p.op != ATTN_OP_BACKWARD || n == 0 || t[-1].hk != t->hk || t[-1].b != t->b;
}

bool units_are_affordable(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    const double all = frame_multiply_adds(p);
    double most = 0, pairs = 0;
    /* in a forward every unit is one tile, which never takes long to emulate */
    if (p->op != ATTN_OP_BACKWARD) return true;
    for (int64_t b = 0; b < g.dims.B; b++) {
        const double own = (double)attn_room_of(g.cu_q, g.dims.Sq, b) * (double)attn_sequence_of(&g, b).Sk;
        pairs += own;
        most = fmax(most, own);
    }
    return pairs == 0 || all * most / pairs / (double)attn_max64(1, g.dims.Hk) <= UNIT_MULTIPLY_ADDS;
}

/* Inserts a unit with its error into a list of the units with the largest errors. If the unit is in the list already,
 * the list keeps the larger of its two errors. */
void units_note(struct worst_units *worst, int64_t unit, double error)
{
    int at;
    if (error == 0) return;
    for (at = 0; at < worst->count && worst->unit[at] != unit; at++) continue;
    if (at < worst->count && worst->error[at] >= error) return;
    if (at == WORST_UNITS) {
        if (worst->error[--at] >= error) return;
    } else if (at == worst->count) worst->count++;
    for (; at > 0 && worst->error[at - 1] < error; at--)
        worst->unit[at] = worst->unit[at - 1], worst->error[at] = worst->error[at - 1];
    worst->unit[at] = unit, worst->error[at] = error;
}

int64_t units_add(const struct frame *f, int64_t unit, int64_t *list, int64_t count)
{
    for (int64_t n = 0; n < count; n++)
        if (list[n] == unit) return count;
    do list[count++] = unit++;
    while (unit < f->count && !begins_unit(f, unit));
    return count;
}

static int64_t number_of_units(const struct frame *f)
{
    int64_t units = 0;
    for (int64_t n = 0; n < f->count; n++) units += begins_unit(f, n);
    return units;
}

int64_t units_spread(const struct frame *f, int64_t wanted, int64_t *list, int64_t count)
{
    const int64_t units = number_of_units(f);
    int64_t unit = 0, chosen = 0;
    wanted = attn_min64(wanted, units);
    for (int64_t n = 0; n < f->count && chosen < wanted; n++) {
        if (!begins_unit(f, n)) continue;
        if (unit++ < (wanted == 1 ? 0 : chosen * (units - 1) / (wanted - 1))) continue;
        count = units_add(f, n, list, count);
        chosen++;
    }
    return count;
}

static int ascending(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

void units_sort(int64_t *list, int64_t count)
{
    qsort(list, (size_t)count, sizeof *list, ascending);
}

void units_choose_emulated(struct judge *j)
{
    const struct frame *const f = &j->frame;
    const double all = frame_multiply_adds(&j->p), third = j->time_s / 3 * effort_rate();
    const double affordable = fmin(EMULATED_MULTIPLY_ADDS, third / effort_of_emulations(effort_emulations(&j->p)));
    const int64_t units = number_of_units(f), least = j->p.op == ATTN_OP_BACKWARD ? LEAST_UNITS_BACKWARD : LEAST_UNITS;
    if (!j->borrows_truth || all <= affordable || units <= least) return;
    j->emulated = calloc((size_t)f->count + 1, sizeof *j->emulated);
    if (!j->emulated) return;
    const int64_t wanted = attn_clamp64((int64_t)(affordable / all * (double)units), least, units);
    int64_t count = 0, chosen = 0;
    for (int rank = 0; rank < WORST_UNITS; rank++)
        for (int which = 0; which < FRAME_TENSORS; which++) {
            const struct worst_units *const worst = &j->worst[which];
            if (rank >= worst->count || chosen >= wanted / 2) continue;
            const int64_t before = count;
            count = units_add(f, worst->unit[rank], j->emulated, count);
            chosen += count > before;
        }
    count = units_spread(f, wanted - chosen, j->emulated, count);
    units_sort(j->emulated, count);
    j->emulated_count = count;
}
