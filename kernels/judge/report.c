/* report.c: writes what a judge has found out about a caller's results into a judge_result. */
#include "kernels/judge/state.h"

#include <math.h>
#include <stdio.h>

static void put_sentence(const struct judge *j, const struct mistake *m, char *text, size_t room)
{
    variation ignored = variation_of(&j->frame.p);
    char words[HYPOTHESIS_WORDS];
    const bool applies = candidate_change(j, m, &ignored, words);
    snprintf(text, room, "%s%s%s%s%s", hypotheses[m->row].says, m->alone ? " in the backward" : "",
             applies && *words ? " (" : "", words, *words ? ")" : "");
}

static judge_explanation explanation_of(const struct judge *j, const struct candidate *c, bool partly)
{
    const unsigned explains = partly ? candidate_part(j, c) : c->explains;
    judge_explanation e = { .partly = partly, .code = hypotheses[c->first.row].code };
    char first[JUDGE_TEXT / 2 - 8], second[JUDGE_TEXT / 2 - 8];
    double least = INFINITY;
    put_sentence(j, &c->first, first, sizeof first);
    snprintf(e.detail, sizeof e.detail, "%s%s", partly ? "partly, beside other mistakes: " : "", first);
    snprintf(e.fix, sizeof e.fix, "%s", hypotheses[c->first.row].fix);
    if (c->second.row >= 0) {
        e.and_code = hypotheses[c->second.row].code;
        put_sentence(j, &c->second, second, sizeof second);
        snprintf(e.detail, sizeof e.detail, "%s, and %s", first, second);
        snprintf(e.fix, sizeof e.fix, "%s; %s", hypotheses[c->first.row].fix, hypotheses[c->second.row].fix);
    }
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const bool of_pattern = explains == 0 && state_is_given(j, frame_tensors[which]) && which != 1;
        if (!(explains >> which & 1) && !of_pattern) continue;
        const struct difference *const now = c->whole ? &j->now[which] : &j->now_sample[which];
        const double share = difference_worst(&c->left[which]) / fmax(difference_worst(now), 1e-300);
        if (c->left[which].count == 0) continue;
        e.tensors |= UINT64_C(1) << frame_tensors[which];
        if (share >= least && e.tensors != UINT64_C(1) << frame_tensors[which]) continue;
        least = share;
        e.now = difference_worst(now);
        e.if_so = difference_worst(&c->left[which]);
    }
    return e;
}

/* Returns whether `list` has a candidate with the same mistakes as candidate c (one mistake or two). The order of two
 * mistakes and the variants of a mistake do not matter. */
static bool is_listed(const struct judge *j, const int *list, int count, const struct candidate *c)
{
    for (int n = 0; n < count; n++) {
        const struct candidate *const other = &j->candidates[list[n]];
        if (other->first.row == c->first.row && other->second.row == c->second.row) return true;
        if (c->second.row >= 0 && other->first.row == c->second.row && other->second.row == c->first.row) return true;
    }
    return false;
}

/* Returns the index of the best candidate (one or two assumed mistakes) that explains the caller's errors and is not in
 * `list` yet; -1 if there is none. Of two candidates with about equal scores, the one that was tested first counts as
 * better. */
static int best_left(const struct judge *j, const int *list, int count)
{
    enum { NONE = -1 };
    int best = NONE;
    for (int n = 0; n < j->candidate_count; n++) {
        const struct candidate *const c = &j->candidates[n];
        if (!candidate_is_explanation(j, c) || is_listed(j, list, count, c)) continue;
        if (best == NONE || c->score < j->candidates[best].score - 0.1) best = n;
    }
    return best;
}

/* Returns the index of the single mistake that explains the largest part of the caller's error; -1 if no mistake
 * explains any part. Call this function if no candidate (one or two assumed mistakes) explains the whole error. */
static int best_part(const struct judge *j)
{
    int best = -1;
    for (int n = 0; n < j->candidate_count; n++)
        if (candidate_part(j, &j->candidates[n]) != 0 &&
            (best < 0 || j->candidates[n].score < j->candidates[best].score))
            best = n;
    return best;
}

static void report_tensors(const struct judge *j, judge_result *result)
{
    for (int which = 0; which < FRAME_TENSORS; which++)
        if (state_is_given(j, frame_tensors[which])) result->tensor[frame_tensors[which]] = j->tensor[which];
}

void judge_report(judge *j, judge_result *result)
{
    int list[JUDGE_EXPLANATIONS], count = 0, best;
    *result = (judge_result){ .verdict = j->verdict, .op = j->p.op, .given = j->given };
    result->rows_checked = j->frame.rows;
    result->rows_of = j->frame.all_rows;
    result->rows_emulated = j->emulated ? 0 : j->frame.rows;
    for (int64_t n = 0; n < j->emulated_count && j->emulated[n] < j->frame.count; n++)
        result->rows_emulated += j->frame.tiles[j->emulated[n]].count;
    report_tensors(j, result);
    if (judge_has_verdict(j)) where_find(&j->frame, &j->truth, j->results, j->given, result);
    while (count < JUDGE_EXPLANATIONS && (best = best_left(j, list, count)) >= 0) {
        result->explanation[count] = explanation_of(j, &j->candidates[best], false);
        list[count++] = best;
    }
    if (count == 0 && j->phase == PHASE_DONE && (best = best_part(j)) >= 0)
        result->explanation[count++] = explanation_of(j, &j->candidates[best], true);
    result->explanation_count = count;
    for (int row = 0; row < hypotheses_count && j->verdict == JUDGE_MISMATCH; row++) {
        variation ignored = variation_of(&j->frame.p);
        char words[HYPOTHESIS_WORDS];
        bool applies = false;
        for (int n = 0; n < hypotheses[row].variants && !applies; n++) {
            ignored = variation_of(&j->frame.p);
            applies = hypotheses[row].apply(&j->facts, n, &ignored, words);
        }
        if (applies && !j->tried[row]) result->not_tried[result->not_tried_count++] = hypotheses[row].code;
    }
}
