/* units.c: chooses the tiles that a judge computes with the roundings of correct kernels (emulates), if a device has
 * computed the truth (float64 results) of all rows.
 *
 * A device computes the truth in milliseconds, but emulating correct kernels takes the judge five times as long as
 * computing the truth would. Therefore the judge emulates only some units of a large problem (a unit is a tile of
 * queries, or in a backward also a tile of keys). Half of these units are those in which the caller's results are
 * farthest from the truth. If the caller's kernel is correct, its largest errors are there, and so are those of an
 * emulation. The other half are evenly spread. */
#include <math.h>
#include <stdlib.h>

#include "kernels/judge/state.h"

/* The least number of tiles of queries, and of tiles of keys, that a judge computes with the roundings of correct
 * kernels. A backward has a smaller number, because it needs tiles of both kinds and takes longer for each. */
enum { LEAST_UNITS = 8, LEAST_UNITS_BACKWARD = 6 };

/* Bound, in multiply-adds, on the work of computing tiles of one kind (of queries or of keys) with the roundings of one
 * correct kernel. A judge computes as many tiles as this bound allows, but at least LEAST_UNITS. */
#define EMULATED_MULTIPLY_ADDS ((double)(INT64_C(1) << 31))

/* Inserts a unit (a tile) with its error into a list of the units with the largest errors. If the list already has the
 * unit, the larger of its two errors is kept. */
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

bool units_are_given(const struct judge *j, enum unit_kind kind)
{
    bool given = false;
    for (int which = 0; which < FRAME_KEY_TENSORS; which++)
        given |= units_kind_of(which) == kind && state_is_given(j, frame_tensors[which]);
    return given;
}

int64_t units_add(int64_t unit, int64_t *list, int64_t count)
{
    for (int64_t n = 0; n < count; n++)
        if (list[n] == unit) return count;
    list[count] = unit;
    return count + 1;
}

/* The added units ascend, so they differ from each other. Each is therefore compared only with the units that the list
 * had before. */
int64_t units_spread(const struct frame *f, enum unit_kind kind, int64_t wanted, int64_t *list, int64_t from,
                     int64_t count)
{
    const int64_t first = kind == UNIT_KEYS ? f->count : 0, units = kind == UNIT_KEYS ? f->read_count : f->count;
    const int64_t before = count;
    wanted = attn_min64(wanted, units);
    for (int64_t n = 0; n < wanted; n++) {
        const int64_t unit = first + (wanted == 1 ? 0 : n * (units - 1) / (wanted - 1));
        bool listed = false;
        for (int64_t m = from; m < before; m++) listed |= list[m] == unit;
        if (!listed) list[count++] = unit;
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

/* Adds `wanted` units (tiles) of one kind to the list `emulated`, which has `count` units so far. Returns the new
 * count. */
static int64_t choose_kind(const struct judge *j, enum unit_kind kind, int64_t wanted, int64_t count)
{
    const int64_t before = count;
    for (int rank = 0; rank < WORST_UNITS; rank++)
        for (int which = 0; which < FRAME_KEY_TENSORS; which++) {
            const struct worst_units *const worst = &j->worst[which];
            if (units_kind_of(which) == kind && rank < worst->count && count - before < wanted / 2)
                count = units_add(worst->unit[rank], j->emulated, count);
        }
    return units_spread(&j->frame, kind, wanted - (count - before), j->emulated, before, count);
}

void units_choose_emulated(struct judge *j)
{
    const struct frame *const f = &j->frame;
    const double all = frame_multiply_adds(&j->p), third = j->time_s / 3 * effort_rate();
    const double affordable = fmin(EMULATED_MULTIPLY_ADDS, third / effort_of_emulations(effort_emulations(&j->p)));
    const int64_t units[UNIT_KINDS] = { f->count, f->read_count };
    const int64_t least = j->p.op == ATTN_OP_BACKWARD ? LEAST_UNITS_BACKWARD : LEAST_UNITS;
    if (!j->borrows_truth || all <= affordable || (f->count <= least && f->read_count <= least)) return;
    j->emulated = calloc((size_t)units_room(f), sizeof *j->emulated);
    if (!j->emulated) return;
    for (int kind = 0; kind < UNIT_KINDS; kind++) {
        if (!units_are_given(j, (enum unit_kind)kind)) continue;
        const double share = affordable / all * (double)units[kind];
        const int64_t wanted = attn_min64(units[kind], attn_max64((int64_t)share, least));
        j->emulated_count = choose_kind(j, (enum unit_kind)kind, wanted, j->emulated_count);
    }
    units_sort(j->emulated, j->emulated_count);
}
