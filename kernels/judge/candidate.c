/* candidate.c: tests candidates (one assumed mistake, or two at once) and decides which errors they explain.
 *
 * A mistake explains a wrong tensor if the caller's tensor agrees with the tensor that a kernel with this mistake
 * computes. The error is the caller's difference from the truth (float64 results), and the rest is the caller's
 * difference from that kernel. The two tensors agree if the largest rest is within the limit, and the root mean square
 * of the rest is at most 0.7 times that of the error. If the largest rest is above the limit, they agree only if the
 * largest and the mean rest are at most a tenth of the largest and the mean error. A difference is infinite if one of
 * the two numbers is NaN or infinite, unless both are NaN or both are the same infinity. At most a tenth of the
 * infinite errors may remain. If there are infinite errors, and no finite error is above the limit, the finite rest
 * must only stay within the limit. The largest error of a correct tensor may grow up to its limit, or to three times
 * its size. If it grows more, the mistake explains nothing.
 *
 * Explanations are ordered by score, the lowest first. The score is the sum over the wrong tensors of log(a / b), where
 * a is the caller's difference from the results of a kernel with the mistake, and b the caller's difference from the
 * truth. Each of these differences is a root mean square, plus the root mean square of a correct kernel's roundings. */
#include "kernels/judge/state.h"

#include <math.h>
#include <string.h>

enum { LSE = 1 }; /* index of lse in frame_tensors[] */

/* The results that have one row for each query, as bits of attn_tensor_id. */
#define ROW_RESULTS (ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(dq))

/* A mistake of precision explains the caller's errors if the caller's results are nearer to the mistake's results than
 * to the truth (float64 results): their mean difference from the mistake's results must be less than JUDGE_PATTERN
 * times their mean difference from the truth. */
#define JUDGE_PATTERN 0.5
/* A mistake counts as one of several causes of an error under two conditions. First, the error of some wrong tensor
 * other than lse shrinks to at most JUDGE_PART of its size if the mistake is assumed. Second, no wrong tensor's error
 * grows to more than JUDGE_NOT_WORSE times its size. */
#define JUDGE_PART      0.2
#define JUDGE_NOT_WORSE 1.05
/* The judge reports a pair of mistakes only if the pair's score (lower is better) is lower than the score of each of
 * its mistakes alone, by more than this number. */
#define JUDGE_PAIR_GAIN 1.1
/* Limits, in multiply-adds, on the work of testing a mistake on tiles of keys. If the mistake changes out or lse, the
 * forward of a head must be computed again for each tile of keys. JUDGE_KEYS_CONFIRMED is the limit for the test of the
 * best explanation (in PHASE_CONFIRM), JUDGE_KEYS_TESTED the limit for all other tests. */
#define JUDGE_KEYS_TESTED    ((double)(INT64_C(1) << 29))
#define JUDGE_KEYS_CONFIRMED ((double)(INT64_C(1) << 36))

/* ---- Testing a candidate ----------------------------------------------------------------------------------------- */

static double root_mean_square(const struct judge *j, int which, const struct difference *d)
{
    const double bad = 10 * j->largest[which] + 1;
    if (d->count == 0) return 0;
    return sqrt((d->squares + (double)d->bad * bad * bad) / (double)d->count);
}

/* Returns whether a mistake explains the errors of tensor `which`. `now`: the caller's differences from the truth
 * (float64 results). `left`: the caller's differences from the results of a kernel with the mistake. */
static bool explains(const struct judge *j, int which, const struct difference *now, const struct difference *left)
{
    if (left->bad > now->bad / 10) return false;
    const bool tenth = left->most <= now->most / 10 && difference_mean(left) <= difference_mean(now) / 10;
    if (now->bad > 0 && now->most <= j->tensor[which].limit)
        return left->most <= fmax(j->tensor[which].limit, now->most);
    if (left->most <= j->tensor[which].limit)
        return root_mean_square(j, which, left) <= 0.7 * root_mean_square(j, which, now);
    return tenth;
}

static void weigh(const struct judge *j, struct candidate *c)
{
    const struct difference *const now = c->whole ? j->now : j->now_sample;
    c->score = 0;
    c->explains = 0;
    c->breaks = false;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        if (!state_is_given(j, frame_tensors[which]) || c->left[which].count == 0) continue;
        const double noise = root_mean_square(j, which, &j->noise[which]) + 1e-300;
        if (j->wrong >> which & 1) {
            c->score += log((root_mean_square(j, which, &c->left[which]) + noise) /
                            (root_mean_square(j, which, &now[which]) + noise));
            if (now[which].count > 0 && explains(j, which, &now[which], &c->left[which])) c->explains |= 1u << which;
        } else if (difference_worst(&c->left[which]) > fmax(j->tensor[which].limit, 3 * difference_worst(&now[which])))
            c->breaks = true;
    }
}

bool candidate_change(const struct judge *j, const struct mistake *m, variation *v, char words[HYPOTHESIS_WORDS])
{
    *words = '\0';
    return hypotheses[m->row].apply(&j->facts, m->variant, v, words);
}

/* Sets *v so that compute.c computes problem p with the candidate's one or two mistakes. Returns false if a mistake
 * does not apply to the problem, or if the two exclude each other. */
static bool vary(const struct judge *j, const struct candidate *c, const attn_problem *p, variation *v)
{
    char words[HYPOTHESIS_WORDS];
    *v = variation_of(p);
    if (!candidate_change(j, &c->first, v, words)) return false;
    if (c->second.row < 0) return true;
    return !(hypotheses[c->first.row].misread & hypotheses[c->second.row].misread) &&
           candidate_change(j, &c->second, v, words);
}

static bool forward_is_right(const struct mistake *m)
{
    return m->alone || m->row < 0 || hypotheses[m->row].of_backward;
}

/* Returns how many units (tiles) of `list` the test of a candidate computes, counted from the beginning of the list.
 * The list has tiles of queries, then tiles of keys. If the forwards that the tiles of keys need take more than `most`
 * multiply-adds, only the tiles of queries are tested. */
static int64_t tested_of(const struct frame *f, const int64_t *list, int64_t count, double most)
{
    int64_t queries = 0;
    double work = 0;
    for (int64_t n = 0; n < count; n++) {
        if (list[n] < f->count) queries++;
        else work += frame_forward_multiply_adds(f, &f->key_tiles[list[n] - f->count]);
    }
    return work > most ? queries : count;
}

bool candidate_begin(struct judge *j, const struct candidate *c, bool whole)
{
    variation v;
    if (!vary(j, c, &j->frame.p, &v)) return false;
    struct frame *frame = &j->frame;
    const bool sampled = units_are_sampled(j);
    const double most = whole ? JUDGE_KEYS_CONFIRMED : JUDGE_KEYS_TESTED;
    if (v.swapped_problem) {
        if (!j->has_other) return false;
        frame = &j->other;
        if (!vary(j, c, &frame->p, &v)) return false;
        whole = true;
    }
    if (j->sample_count == j->frame.count) whole = true;
    if (v.one_sequence && j->p.op == ATTN_OP_BACKWARD) {
        if (sampled) return j->left_out = true, false;
        whole = true;
    }
    const bool in_other = frame == &j->other,
               right = !in_other && forward_is_right(&c->first) && forward_is_right(&c->second);
    const bool converts = hypotheses[c->first.row].converts &&
                          (c->second.row < 0 || hypotheses[c->second.row].converts);
    const int64_t *const sample = in_other ? j->other_sample : j->sample;
    int64_t count = in_other ? j->other_count : j->sample_count;
    if (sampled && !right && !converts) count = tested_of(frame, sample, count, most);
    if (sampled && count < (in_other ? j->other_count : j->sample_count) && !(j->given & ROW_RESULTS))
        return j->left_out = true, false;
    pass_begin(j, frame, &v, whole && !sampled ? NULL : sample, count);
    j->pass.alone = c->first.alone || c->second.alone;
    j->pass.right_forward = right;
    j->pass.sizes = hypotheses[c->first.row].of_size;
    j->pass.converts = converts;
    return true;
}

void candidate_end(struct judge *j, struct candidate *c)
{
    memcpy(c->left, j->pass.found, sizeof c->left);
    memcpy(c->size, j->pass.size, sizeof c->size);
    c->whole = j->pass.list == NULL;
    weigh(j, c);
}

/* ---- What the test of a candidate (one assumed mistake, or two assumed together) shows --------------------------- */

bool candidate_lacks_keys(const struct judge *j, const struct candidate *c)
{
    return units_are_sampled(j) && j->given & (ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv)) && c->left[3].count == 0 &&
           c->left[4].count == 0;
}

bool candidate_is_complete(const struct judge *j)
{
    for (int n = 0; n < j->candidate_count; n++) {
        const struct candidate *const c = &j->candidates[n];
        const unsigned keys = candidate_lacks_keys(j, c) ? 1u << 3 | 1u << 4 : 0;
        if (!c->breaks && c->explains != 0 && (c->explains | keys) == (j->wrong | keys)) return true;
    }
    return false;
}

bool candidate_removes_some(const struct judge *j, const struct candidate *c)
{
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const struct difference *const now = c->whole ? &j->now[which] : &j->now_sample[which], *const left =
                                                                                                    &c->left[which];
        if (!(j->wrong >> which & 1) || left->count == 0 || now->count == 0 || left->bad > now->bad) continue;
        if (left->bad < now->bad * 4 / 5 || left->most < 0.8 * now->most ||
            difference_mean(left) < 0.8 * difference_mean(now) ||
            root_mean_square(j, which, left) < 0.8 * root_mean_square(j, which, now))
            return true;
    }
    return false;
}

/* Returns the better (lower) of the two scores that the mistakes of a pair have when each is tested alone. */
static double better_single(const struct judge *j, const struct candidate *pair)
{
    double best = 0;
    for (int n = 0; n < j->singles; n++) {
        const struct mistake *const m = &j->candidates[n].first;
        const bool one = m->row == pair->first.row && m->variant == pair->first.variant &&
                         m->alone == pair->first.alone;
        const bool other = m->row == pair->second.row && m->variant == pair->second.variant &&
                           m->alone == pair->second.alone;
        if ((one || other) && j->candidates[n].score < best) best = j->candidates[n].score;
    }
    return best;
}

/* Returns whether the mistake's errors in one tensor are about as large as the caller's. Their root mean squares may
 * differ by a factor of less than 1.5, and their ratios of mean to root mean square by a factor of less than 1.25. */
static bool has_size(const struct judge *j, int which, const struct candidate *c, const struct difference *now)
{
    const double rms = root_mean_square(j, which, now), of = root_mean_square(j, which, &c->size[which]);
    const double spread = rms > 0 ? difference_mean(now) / rms : 0,
                 of_spread = of > 0 ? difference_mean(&c->size[which]) / of : 0;
    return now->bad == 0 && rms > 4 * root_mean_square(j, which, &j->noise[which]) && of > rms / 1.5 &&
           of < rms * 1.5 && spread > of_spread / 1.25 && spread < of_spread * 1.25;
}

/* Returns whether the candidate's mistake makes errors as large as the caller's in each wrong tensor, and only small
 * errors in the tensors that are correct. */
static bool explains_by_size(const struct judge *j, const struct candidate *c)
{
    bool any = false;
    /* A mistake that makes random errors is not an explanation if lse is wrong too, because other mistakes are then
     * likelier. In a float32 forward it is an explanation only if the caller gave lse. */
    if (j->wrong >> LSE & 1) return false;
    if (j->p.q.dtype == ATTN_F32 && j->p.op == ATTN_OP_FORWARD && !state_is_given(j, ATTN_T_lse)) return false;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        if (!state_is_given(j, frame_tensors[which]) || c->size[which].count == 0) continue;
        if (j->wrong >> which & 1) {
            if (!has_size(j, which, c, c->whole ? &j->now[which] : &j->now_sample[which])) return false;
            any = true;
        } else if (difference_worst(&c->size[which]) > 2 * j->tensor[which].limit) return false;
    }
    return any;
}

/* Returns whether the candidate's mistake explains most of the mean error of some tensor other than lse, even a tensor
 * that is within its limit. */
static bool explains_by_pattern(const struct judge *j, const struct candidate *c)
{
    if (c->breaks) return false;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const struct difference *const now = c->whole ? &j->now[which] : &j->now_sample[which], *const left =
                                                                                                    &c->left[which];
        if (!state_is_given(j, frame_tensors[which]) || left->count == 0 || frame_tensors[which] == ATTN_T_lse)
            continue;
        if (now->bad == 0 && left->bad == 0 && difference_mean(now) > 0 &&
            difference_mean(left) < JUDGE_PATTERN * difference_mean(now))
            return true;
    }
    return false;
}

static bool explains_all(const struct judge *j, const struct candidate *c)
{
    for (int which = 0; which < FRAME_TENSORS; which++)
        if ((j->wrong & ~c->explains) >> which & 1 && c->left[which].count > 0) return false;
    return true;
}

/* A pair of mistakes must explain all wrong tensors. So many pairs are tested that a pair which explains only some of
 * the tensors usually fits by chance. */
bool candidate_is_explanation(const struct judge *j, const struct candidate *c)
{
    const struct hypothesis *const h = &hypotheses[c->first.row];
    if (h->of_size && c->second.row < 0) return explains_by_size(j, c);
    if (h->of_pattern && c->second.row < 0) return explains_by_pattern(j, c);
    if (c->breaks || c->explains == 0) return false;
    return c->second.row < 0 || (explains_all(j, c) && c->score < better_single(j, c) - JUDGE_PAIR_GAIN);
}

unsigned candidate_part(const struct judge *j, const struct candidate *c)
{
    const struct hypothesis *const h = &hypotheses[c->first.row];
    unsigned removed = 0;
    if (c->second.row >= 0 || h->of_size || h->of_pattern || c->breaks) return 0;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const struct difference *const left = &c->left[which], *const now = c->whole ? &j->now[which]
                                                                                     : &j->now_sample[which];
        if (!(j->wrong >> which & 1) || left->count == 0 || now->count == 0) continue;
        const double before = root_mean_square(j, which, now), after = root_mean_square(j, which, left);
        if (after > JUDGE_NOT_WORSE * before || left->bad > now->bad) return 0;
        /* lse is not taken as evidence, because many mistakes happen to bring a wrong lse nearer to the correct one */
        if (which != LSE && after <= JUDGE_PART * before && difference_mean(left) <= JUDGE_PART * difference_mean(now))
            removed |= 1u << which;
    }
    return removed;
}
