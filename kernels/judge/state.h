/* state.h: the state of a judge, which its files share. judge.h says what a judge does.
 *
 *   judge.c        opens and closes a judge; the phases of its work
 *   pass.c         computes tiles with one variation or emulation, and sums up differences
 *   verdict.c      errors, limits and verdict
 *   search.c       which mistakes are tested, on which tiles, in which order
 *   candidate.c    tests one mistake or two at once, and says what they explain
 *   where.c        the worst elements, and where the wrong elements are
 *   report.c       writes a judge_result
 *
 * The arrays of length FRAME_TENSORS have one element for each result, in the order of frame_tensors[]. */
#ifndef JUDGE_STATE_H
#define JUDGE_STATE_H

#include "kernels/judge/frame.h"
#include "kernels/judge/hypotheses.h"

enum {
    EMULATIONS = 6,                /* number of emulations of a small problem */
    CANDIDATES = 2048,             /* the most candidates that a judge may have */
    PAIR_FIRSTS = 5,               /* the most mistakes that are the first of a pair */
    PAIR_SECONDS = 300,            /* the most mistakes that are the second of a pair */
    CONFIRMED = 8,                 /* the most explanations that are tested on all tiles */
    SMALL_MULTIPLY_ADDS = 1 << 24, /* a pass with at most so many multiply-adds takes all tiles, not a sample */
};

/* The phases of a judge's work, in their order. judge.c says what each does. */
enum phase {
    PHASE_TRUTH,
    PHASE_EMULATE,
    PHASE_COMPARE,
    PHASE_SAMPLE,
    PHASE_SINGLES,
    PHASE_PAIRS,
    PHASE_CONFIRM,
    PHASE_DONE
};

/* A mistake: a row of hypotheses[], and which variant of that row. */
struct mistake {
    int row, variant;
    bool alone; /* only the backward has the mistake */
};

/* A mistake, or two at once, that was tested against the caller's results. */
struct candidate {
    struct mistake first, second;          /* second.row < 0: the candidate is a single mistake */
    struct difference left[FRAME_TENSORS]; /* the caller's results against those of a kernel with the mistake */
    struct difference size[FRAME_TENSORS]; /* with of_size: results of a kernel with the mistake against the truth */
    double score;                          /* less is better; 0: the mistake leaves the error as it is */
    unsigned explains;                     /* the wrong tensors that the candidate explains: bit n is result n */
    bool breaks;                           /* a tensor that is right would be wrong with the mistake */
    bool confirmed;                        /* PHASE_CONFIRM is over for this candidate */
    bool whole;                            /* `left` was found on all tiles, not on the sample */
};

/* A pass computes tiles of a frame with one variation, and sums up their differences. */
struct pass {
    variation v;
    struct frame *frame;
    const int64_t *list; /* the tiles of the pass; NULL: all tiles */
    int64_t count, at;   /* number of tiles, and how many of them are done */
    int64_t hk, b;       /* the key/value head and the sequence whose keys are loaded; -1: none */
    bool converts;       /* the pass changes numbers of the truth instead of computing anew */
    bool alone;          /* only the backward is computed with the variation; out and lse are those of the truth */
    int emulation;       /* the number of the emulation that the pass computes; -1: it computes without roundings */
    bool against_truth;  /* the pass compares with the truth, not with the caller's results */
    bool sizes;          /* the pass also fills `size` */
    bool sums;           /* the pass takes all tiles, so dbias, dsinks and dslopes are complete */
    struct difference found[FRAME_TENSORS]; /* the differences of the tiles that are done */
    struct difference size[FRAME_TENSORS];  /* the differences of the pass's own numbers from the truth */
};

struct judge {
    struct hypothesis_facts facts;
    attn_problem p; /* the problem, without results */
    attn_tensor results[ATTN_TENSOR_COUNT];
    uint64_t given; /* the results that the caller gave: bits of attn_tensor_id */
    struct frame frame;
    struct frame other; /* the same problem, read in the other layout */
    bool has_other;
    struct truth truth;
    struct truth some;                   /* dbias, dsinks and dslopes of the present pass; no other tensors */
    int64_t sum_elements[FRAME_TENSORS]; /* number of elements of dbias, dsinks and dslopes; 0 for other results */

    enum phase phase;
    struct pass pass;
    bool in_pass;
    int index; /* number of the present pass in its phase */

    struct difference noise[FRAME_TENSORS]; /* right kernels against the truth: the emulation that is farthest off */
    struct difference now[FRAME_TENSORS];   /* the caller's results against the truth */
    struct difference now_sample[FRAME_TENSORS]; /* the same, on the tiles of the sample */
    double largest[FRAME_TENSORS];               /* largest absolute value of the truth */
    double once[FRAME_TENSORS];                  /* largest error of rounding the truth once to the result's dtype */
    double largest_score;                        /* largest absolute value of lse */
    judge_tensor tensor[FRAME_TENSORS];
    judge_verdict verdict;
    unsigned wrong; /* the tensors beyond their limit: bit n is result n */

    int64_t *sample; /* numbers of the tiles on which mistakes are tested first */
    int64_t sample_count;
    struct mistake trying; /* the single mistake that is tested now */
    struct candidate *candidates;
    int candidate_count, singles; /* candidates [0, singles) are single mistakes; those behind are pairs */
    int firsts[PAIR_FIRSTS], first_count, seconds[PAIR_SECONDS],
        second_count;                      /* candidates that are the first, or the second, mistake of pairs */
    int confirm[CONFIRMED], confirm_count; /* the candidates that PHASE_CONFIRM tests on all tiles */
    bool tried[HYPOTHESES_MOST];           /* all variants of this row of hypotheses[] were tested */
};

static inline bool state_is_given(const struct judge *j, attn_tensor_id id)
{
    return j->given >> id & 1;
}

/* pass_begin() begins a pass over the tiles list[0..count), or over all tiles if `list` is NULL. pass_step() does the
 * work of its next tile, and returns true when the pass is over. */
void pass_begin(struct judge *j, struct frame *frame, const variation *v, const int64_t *list, int64_t count);
bool pass_step(struct judge *j);

/* Fills verdict, wrong and tensor[] from the differences of PHASE_COMPARE. */
void verdict_decide(struct judge *j);

/* Applies a mistake to *v, and writes what distinguishes its variant to `words`. Returns false if the mistake does not
 * apply to the problem. */
bool candidate_change(const struct judge *j, const struct mistake *m, variation *v, char words[HYPOTHESIS_WORDS]);
/* candidate_begin() begins the pass that tests a candidate, on all tiles (whole) or on the sample. It returns false if
 * the candidate does not apply to the problem. candidate_end() stores what that pass has found. */
bool candidate_begin(struct judge *j, const struct candidate *c, bool whole);
void candidate_end(struct judge *j, struct candidate *c);
/* Does one candidate explain all tensors that are wrong? */
bool candidate_is_complete(const struct judge *j);
/* Does the mistake remove over a fifth of the error of a wrong tensor? */
bool candidate_removes_some(const struct judge *j, const struct candidate *c);
/* Does the candidate belong into the answer? */
bool candidate_is_explanation(const struct judge *j, const struct candidate *c);

/* search_next_single() and search_next_pair() begin the test of the next candidate. They return false if none is
 * left. */
void search_choose_sample(struct judge *j);
bool search_next_single(struct judge *j);
void search_choose_pairs(struct judge *j);
bool search_next_pair(struct judge *j);
void search_choose_confirmed(struct judge *j);

/* Fills worst, place and each tensor's `wrong` of *result. */
void where_find(const struct frame *f, const struct truth *t, const attn_tensor *results, uint64_t given,
                judge_result *result);

#endif
