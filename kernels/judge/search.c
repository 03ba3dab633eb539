/* search.c: chooses which mistakes are tested, on which tiles, and in which order. */
#include "kernels/judge/state.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Choosing the tiles on which mistakes are tested ------------------------------------------------------------- */

/* Chooses the units (tiles of queries or of keys) on which mistakes are tested, if a pass over all units would take too
 * long (units.c). For each wrong result, the function chooses the unit with the largest error. It also chooses some
 * units that are evenly spread. */
static void choose_units(struct judge *j)
{
    const bool backward = j->p.op == ATTN_OP_BACKWARD;
    const int64_t most[UNIT_KINDS] = { backward ? 2 : 4, backward ? 1 : 0 };
    j->sample_count = 0;
    for (int kind = 0; kind <= backward; kind++) {
        const int64_t before = j->sample_count;
        if (!units_are_given(j, (enum unit_kind)kind)) continue;
        for (int which = 0; which < FRAME_KEY_TENSORS; which++)
            if (units_kind_of(which) == (enum unit_kind)kind && j->wrong >> which & 1 && j->worst[which].count > 0)
                j->sample_count = units_add(j->worst[which].unit[0], j->sample, j->sample_count);
        const int64_t spread = attn_max64(1, most[kind] - (j->sample_count - before));
        j->sample_count = units_spread(&j->frame, (enum unit_kind)kind, spread, j->sample, before, j->sample_count);
    }
    units_sort(j->sample, j->sample_count);
    if (!j->has_other) return;
    j->other_sample = calloc((size_t)units_room(&j->other), sizeof *j->other_sample);
    j->has_other = j->other_sample != NULL;
    for (int kind = 0; kind < UNIT_KINDS && j->has_other; kind++)
        if (units_are_given(j, (enum unit_kind)kind))
            j->other_count = units_spread(&j->other, (enum unit_kind)kind, most[kind], j->other_sample, j->other_count,
                                          j->other_count);
}

/* Chooses the tiles on which mistakes are tested: all tiles of a small problem, and all tiles if only dbias, dsinks or
 * dslopes are wrong. Otherwise it depends on the operation. In a forward the chosen tiles are evenly spread, and the
 * first and the last are among them. In a backward the chosen tiles are those of whole heads, from the first head on.
 * If units_are_sampled() is true, choose_units() chooses instead. */
void search_choose_sample(struct judge *j)
{
    const struct frame *const f = &j->frame;
    const double all = frame_multiply_adds(&j->p) * (double)f->rows / (double)attn_max64(1, f->all_rows);
    const bool sums_alone = (j->wrong & ~0x1fu) && !(j->wrong & 0x1fu);
    int64_t wanted = (int64_t)((double)f->count * EFFORT_SMALL / fmax(all, 1)) + 1;
    j->sample_count = 0;
    if (units_are_sampled(j)) {
        choose_units(j);
        return;
    }
    if (all <= EFFORT_SMALL || sums_alone) wanted = f->count;
    if (f->p.op != ATTN_OP_BACKWARD) {
        wanted = attn_clamp64(wanted, attn_min64(f->count, 4), f->count);
        for (int64_t n = 0; n < wanted; n++)
            j->sample[j->sample_count++] = wanted == 1 ? 0 : n * (f->count - 1) / (wanted - 1);
        return;
    }
    for (int64_t n = 0; n < f->count; n++) {
        const bool begins = n == 0 || f->tiles[n].hk != f->tiles[n - 1].hk || f->tiles[n].b != f->tiles[n - 1].b;
        if (begins && j->sample_count >= wanted) break;
        j->sample[j->sample_count++] = n;
    }
}

/* ---- Choosing the next single mistake to test -------------------------------------------------------------------- */

/* Returns whether a mistake should be tested. If all results are within their limits, only mistakes of precision are
 * tested. Mistakes that make random errors (of_size) take long to test, so they are tested only if some result is
 * beyond its limit and no other mistake explains the error. */
static bool is_worth_trying(const struct judge *j, const struct hypothesis *h)
{
    if (h->of_size) return j->verdict == JUDGE_MISMATCH && !candidate_is_complete(j);
    return j->verdict == JUDGE_MISMATCH || h->of_pattern;
}

bool search_next_single(struct judge *j)
{
    struct mistake *const m = &j->trying;
    const bool backward = j->p.op == ATTN_OP_BACKWARD;
    for (; m->row < hypotheses_count; *m = (struct mistake){ .row = m->row + 1 }, j->left_out = false) {
        const struct hypothesis *const h = &hypotheses[m->row];
        /* in a backward, a mistake that changes scores is tested twice: in forward and backward together, and in the
         * backward alone */
        const int copies = h->of_scores && backward ? 2 : 1;
        const bool worth = m->variant > 0 || is_worth_trying(j, h);
        for (; worth && m->variant < h->variants * copies; m->variant++) {
            const struct candidate c = { .first = { m->row, m->variant % h->variants, m->variant >= h->variants },
                                         .second = { .row = -1 } };
            if (j->candidate_count == CANDIDATES || !candidate_begin(j, &c, false)) continue;
            j->candidates[j->candidate_count] = c;
            return true;
        }
        j->tried[m->row] = !j->left_out;
    }
    return false;
}

/* ---- Choosing the next pair of mistakes to test ------------------------------------------------------------------ */

static int by_score(const struct judge *j, int a, int b)
{
    return j->candidates[a].score < j->candidates[b].score ? -1 : j->candidates[a].score > j->candidates[b].score;
}

/* Inserts a candidate (one assumed mistake, or two assumed together) into a list, sorted by score, of at most `most`
 * candidates. */
static void insert(const struct judge *j, int *list, int *count, int most, int candidate)
{
    int at = *count;
    if (at < most) ++*count;
    else if (by_score(j, candidate, list[--at]) >= 0) return;
    for (; at > 0 && by_score(j, candidate, list[at - 1]) < 0; at--) list[at] = list[at - 1];
    list[at] = candidate;
}

/* Chooses the mistakes from which pairs are made. The first mistake of a pair must explain a part of the error by
 * itself. The second may be any mistake, because the error of the first mistake may hide the effect of the second. */
void search_choose_pairs(struct judge *j)
{
    int best[HYPOTHESES_MOST];
    j->first_count = j->second_count = 0;
    memset(best, -1, sizeof best);
    for (int n = 0; n < j->singles; n++) {
        const struct candidate *const c = &j->candidates[n];
        int *const of_row = &best[c->first.row];
        if (candidate_removes_some(j, c) && (*of_row < 0 || by_score(j, n, *of_row) < 0)) *of_row = n;
    }
    for (int row = 0; row < hypotheses_count; row++)
        if (best[row] >= 0) insert(j, j->firsts, &j->first_count, PAIR_FIRSTS, best[row]);
    if (candidate_is_complete(j)) j->first_count = 0;
    for (int n = 0; n < j->singles && j->second_count < PAIR_SECONDS; n++)
        if (!hypotheses[j->candidates[n].first.row].of_pattern) j->seconds[j->second_count++] = n;
}

bool search_next_pair(struct judge *j)
{
    for (; j->index < j->first_count * j->second_count; j->index++) {
        const int a = j->firsts[j->index / j->second_count], b = j->seconds[j->index % j->second_count];
        const struct candidate c = { .first = j->candidates[a].first, .second = j->candidates[b].first };
        if (c.first.row == c.second.row || c.first.alone != c.second.alone) continue;
        if (j->candidate_count >= CANDIDATES || !candidate_begin(j, &c, false)) continue;
        j->candidates[j->candidate_count] = c;
        return true;
    }
    return false;
}

/* ---- Choosing the explanations that are tested on all tiles ------------------------------------------------------ */

void search_choose_confirmed(struct judge *j)
{
    j->confirm_count = 0;
    for (int n = 0; n < j->candidate_count; n++)
        if (candidate_is_explanation(j, &j->candidates[n])) insert(j, j->confirm, &j->confirm_count, CONFIRMED, n);
}
