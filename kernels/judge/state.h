/* state.h: the state of a judge, which its files share. judge.h says what a judge does.
 *
 *   judge.c        opens and closes a judge; the phases of its work
 *   units.c        which part of a large problem is emulated, if a device has computed the truth
 *   pass.c         computes tiles with one variation or emulation, and sums up differences
 *   steps.c        the order in which a pass takes its tiles, and the computation of a tile of keys
 *   verdict.c      errors, limits and verdict
 *   search.c       which mistakes are tested, on which tiles, in which order
 *   candidate.c    tests one mistake or two at once, and says what they explain
 *   where.c        the worst elements, and where the wrong elements are
 *   report.c       writes a judge_result
 *
 * Arrays of length FRAME_TENSORS have one element for each result, in the order of frame_tensors[]. */
#ifndef JUDGE_STATE_H
#define JUDGE_STATE_H

#include "kernels/judge/effort.h"
#include "kernels/judge/frame.h"
#include "kernels/judge/hypotheses.h"

enum {
    CANDIDATES = 2048,  /* the largest number of candidates (mistakes or pairs) of a judge */
    PAIR_FIRSTS = 5,    /* the largest number of mistakes that may be the first of a pair */
    PAIR_SECONDS = 300, /* the largest number of mistakes that may be the second of a pair */
    CONFIRMED = 8,      /* the largest number of explanations that are tested on all tiles */
    WORST_UNITS = 8, /* for each result, the number of units (those with the largest errors) that a judge remembers */
};

/* A unit is the least part of a problem whose results a pass can compute by itself: a tile of queries, or in a backward
 * also a tile of keys. A tile of queries gives out, lse and dq of its rows. A tile of keys gives its dk and dv, which
 * are sums over all tiles of queries of the group of heads. The number of a unit is the index of the tile of queries in
 * frame.tiles, or frame.count plus the index of the tile of keys in frame.key_tiles. */

/* The phases of a judge's work, in order. judge.c explains each of them. */
enum phase {
    PHASE_TRUTH,
    PHASE_COMPARE,
    PHASE_EMULATE,
    PHASE_SAMPLE,
    PHASE_SINGLES,
    PHASE_PAIRS,
    PHASE_CONFIRM,
    PHASE_DONE
};

/* A mistake: a row of hypotheses[], and the number of one of its variants. */
struct mistake {
    int row, variant;
    bool alone; /* true: only the backward has the mistake; out and lse are right */
};

/* One mistake, or two at once, that is tested against the caller's results. */
struct candidate {
    /* the mistakes of the candidate; if second.row < 0, the candidate is a single mistake */
    struct mistake first, second;
    /* differences between the caller's results and those of a kernel with the candidate's mistakes */
    struct difference left[FRAME_TENSORS];
    /* for mistakes that make random errors (of_size): differences between results with the mistake and the truth
     * (float64 results) */
    struct difference size[FRAME_TENSORS];
    /* Explanations are ordered by score, lowest (best) first. A score of 0 means that the mistake explains nothing of
     * the error. */
    double score;
    unsigned explains; /* the wrong tensors that the candidate explains; bit n is result n of frame_tensors[] */
    bool breaks;       /* true: the candidate's mistakes would change a tensor that the caller has right */
    /* true: the candidate was tested on all tiles in PHASE_CONFIRM, or need not be tested on all tiles */
    bool confirmed;
    /* true: `left` is over all tiles of the problem; false: `left` is over the sample (the tiles on which a mistake is
     * tested first) */
    bool whole;
};

/* The units in which one result has its largest errors. */
struct worst_units {
    int count;
    int64_t unit[WORST_UNITS]; /* numbers of the units, in descending order of error */
    double error[WORST_UNITS];
};

/* A pass computes tiles of a frame (a problem cut into tiles) with one variation, and sums up their differences. */
struct pass {
    variation v;
    struct frame *frame;
    const int64_t *list; /* indices of the tiles of the pass, or numbers of its units; NULL: all tiles */
    /* true: `list` has numbers of units. false: the pass goes over tiles of queries, and `list` has whole key/value
     * heads if the problem is a backward, because dk and dv of a head are settled after the head's last tile. Without a
     * list, the pass then goes over the tiles of keys that no query reads. */
    bool by_units;
    int64_t count, at; /* count: number of tiles or units of the pass; at: number of those that are done */
    int64_t inner;     /* if the unit is a tile of keys: the number of tiles of queries that are done for it */
    int64_t hk, b;     /* the key/value head and the sequence whose keys are loaded; -1: none */
    /* true: the pass changes numbers of the stored truth (float64 results) and does not compute attention again */
    bool converts;
    bool alone; /* true: only the backward has the variation; out and lse are those of the truth (float64 results) */
    /* true: the variation has the out and lse of the truth (float64 results), which makes a tile of keys little work.
     * Emulations of tiles of keys always take out and lse from the truth. */
    bool right_forward;
    /* index of the emulated kernel whose roundings the pass imitates; -1: the pass computes without roundings */
    int emulation;
    bool against_truth; /* true: the pass compares with the truth (float64 results), not with the caller's results */
    /* true: the pass also sums up the differences between its results and the truth (float64 results), in `size` */
    bool sizes;
    bool sums; /* true: the pass goes over all tiles, so that its sums dbias, dsinks and dslopes are complete */
    struct difference found[FRAME_TENSORS]; /* sums of the differences over the tiles that have been computed */
    struct difference size[FRAME_TENSORS]; /* differences between this pass's results and the truth (float64 results) */
};

struct judge {
    struct hypothesis_facts facts;
    attn_problem p; /* the caller's problem, without the caller's results */
    attn_tensor results[ATTN_TENSOR_COUNT];
    uint64_t given; /* the results that the caller sent: bits of attn_tensor_id */
    struct frame frame;
    /* the problem a second time, cut into tiles of a frame that reads it with heads and rows exchanged */
    struct frame other;
    bool has_other;
    bool borrows_truth; /* true: the memory of `truth` is the caller's, and a device filled it */
    double time_s;      /* the time in seconds that the judge should take in all */
    struct truth truth;
    struct truth some; /* dbias, dsinks and dslopes of the running pass; the pass stores no other results */
    int64_t sum_elements[FRAME_TENSORS]; /* number of elements of dbias, dsinks and dslopes; 0 for other results */

    enum phase phase;
    struct pass pass;
    bool in_pass;
    int index; /* index of the running pass among the passes of its phase */

    struct worst_units worst[FRAME_TENSORS]; /* for each of the caller's results: the units with the largest errors */
    /* numbers of the units in which right kernels are emulated; NULL: all tiles. The list exists only if a device has
     * computed the truth (float64 results) and emulating all tiles would take too long. */
    int64_t *emulated;
    int64_t emulated_count;
    /* differences between an emulated right kernel and the truth (float64 results), for the emulation with the largest
     * differences */
    struct difference noise[FRAME_TENSORS];
    struct difference now[FRAME_TENSORS]; /* differences between the caller's results and the truth (float64 results) */
    /* differences between the caller's results and the truth (float64 results), on the tiles of `sample` */
    struct difference now_sample[FRAME_TENSORS];
    double largest[FRAME_TENSORS]; /* largest absolute value of each tensor in the truth (float64 results) */
    double once[FRAME_TENSORS];    /* largest error of rounding the truth (float64) once to the result's dtype */
    double largest_score;          /* largest finite absolute value of the lse in the truth (float64 results) */
    judge_tensor tensor[FRAME_TENSORS];
    judge_verdict verdict;
    unsigned wrong; /* the tensors whose errors exceed their limits; bit n is result n of frame_tensors[] */

    /* indices of the tiles on which mistakes are tested first, or numbers of units if units_are_sampled() */
    int64_t *sample;
    int64_t sample_count;
    /* numbers of the units of `other` on which mistakes are tested first; NULL: all tiles of `other` */
    int64_t *other_sample;
    int64_t other_count;
    struct mistake trying; /* the mistake that is being tested alone (not in a pair) */
    bool left_out;         /* true: a variant of `trying` was not tested, because the test would take too long */
    struct candidate *candidates;
    int candidate_count, singles; /* candidates 0 to singles - 1 are single mistakes; the other candidates are pairs */
    /* indices of the single mistakes that may be the first or the second mistake of a pair */
    int firsts[PAIR_FIRSTS], first_count, seconds[PAIR_SECONDS], second_count;
    int confirm[CONFIRMED], confirm_count; /* indices of the candidates that PHASE_CONFIRM tests on all tiles */
    bool tried[HYPOTHESES_MOST];           /* for each row of hypotheses[]: whether all of its variants were tested */
};

static inline bool state_is_given(const struct judge *j, attn_tensor_id id)
{
    return j->given >> id & 1;
}

/* pass_begin() begins a pass over the tiles (or units, if units_are_sampled()) list[0] to list[count - 1], or over all
 * tiles if `list` is NULL. pass_step() does the work of the next tile, and returns true when the pass has no more
 * tiles. */
void pass_begin(struct judge *j, struct frame *frame, const variation *v, const int64_t *list, int64_t count);
bool pass_step(struct judge *j);

/* Functions of pass.c that steps.c calls. They are explained where they are defined. */
int64_t pass_kept_row(const struct frame *f, const struct tile *t, int64_t h);
void pass_take_keys(struct judge *j, int64_t b, int64_t hk);
void pass_take_right_forward(struct judge *j, const struct compute_rows *rows, int64_t kept);
void pass_settle_keys(struct judge *j, int64_t b, int64_t hk, int64_t first, int64_t count, int64_t kept);
void pass_settle_head(struct judge *j, const struct tile *t);
void pass_settle_unread(struct judge *j, const struct key_tile *t);
void pass_settle_sums(struct judge *j);
void pass_compute_tile(struct judge *j, const struct tile *t, enum compute_wanted wanted);
void pass_convert_rows(struct judge *j, int64_t tile);
void pass_convert_keys(struct judge *j, int64_t key_tile);

/* Fills verdict, wrong and tensor[] of the judge from the differences of PHASE_COMPARE and PHASE_EMULATE. */
void verdict_decide(struct judge *j);

/* Applies a mistake to *v, and writes what distinguishes the mistake's variant to `words`. Returns false if the mistake
 * does not apply to the problem. */
bool candidate_change(const struct judge *j, const struct mistake *m, variation *v, char words[HYPOTHESIS_WORDS]);
/* candidate_begin() begins the pass that tests a candidate (a mistake or pair), on all tiles (whole) or on the sample
 * (the tiles on which mistakes are tested first). If units_are_sampled(), the pass always goes over the sample, and
 * `whole` means that it also goes over tiles of keys that are much work. The function returns false if the candidate
 * does not apply to the problem, or takes too long. candidate_end() stores what that pass has found. */
bool candidate_begin(struct judge *j, const struct candidate *c, bool whole);
void candidate_end(struct judge *j, struct candidate *c);
/* Returns whether some tested mistake or pair explains all wrong tensors by itself. */
bool candidate_is_complete(const struct judge *j);
/* Returns whether the candidate (a mistake or pair) explains more than a fifth of the error of at least one wrong
 * tensor. */
bool candidate_removes_some(const struct judge *j, const struct candidate *c);
/* Returns whether a judge with a sample of units could not compare dk and dv with this candidate's, because computing
 * out and lse of the whole head for it is much work. */
bool candidate_lacks_keys(const struct judge *j, const struct candidate *c);
/* Returns whether the judge reports this tested mistake or pair as an explanation. */
bool candidate_is_explanation(const struct judge *j, const struct candidate *c);
/* Returns, as bits, the tensors whose error is for the most part explained by a candidate with one mistake. 0: the
 * mistake is not among the causes of the error. */
unsigned candidate_part(const struct judge *j, const struct candidate *c);

/* Functions of units.c. units_choose_emulated() sets `emulated` from the differences of PHASE_COMPARE. Without memory
 * for the list, all tiles are emulated. units_add() adds a unit to a list that does not have it yet, and returns the
 * list's new length. units_spread() adds `wanted` units that are evenly spread over the tiles of queries, or over the
 * tiles of keys that queries read. units_are_given() returns whether the caller sent a result of such units.
 * units_room() returns the length that a list of units of a frame may have. Lists are sorted by units_sort(), so that
 * tiles of queries come before tiles of keys, and the tiles of a head follow each other. */
enum unit_kind { UNIT_QUERIES, UNIT_KEYS, UNIT_KINDS };
void units_choose_emulated(struct judge *j);
void units_note(struct worst_units *worst, int64_t unit, double error);
bool units_are_given(const struct judge *j, enum unit_kind kind);
int64_t units_add(int64_t unit, int64_t *list, int64_t count);
int64_t units_spread(const struct frame *f, enum unit_kind kind, int64_t wanted, int64_t *list, int64_t count);
void units_sort(int64_t *list, int64_t count);
static inline int64_t units_room(const struct frame *f)
{
    return f->count + f->key_count + 1;
}
/* Returns the kind of units in which errors of result `which` of frame_tensors[] are noted. */
static inline enum unit_kind units_kind_of(int which)
{
    return which < FRAME_ROW_TENSORS ? UNIT_QUERIES : UNIT_KEYS;
}
/* Returns whether the judge tests mistakes on some of the tiles only, because a pass over all tiles takes too long. */
static inline bool units_are_sampled(const struct judge *j)
{
    return j->emulated != NULL;
}

/* Functions of search.c. search_next_single() and search_next_pair() begin the test of the next single mistake or pair;
 * they return false if none is left. */
void search_choose_sample(struct judge *j);
bool search_next_single(struct judge *j);
void search_choose_pairs(struct judge *j);
bool search_next_pair(struct judge *j);
void search_choose_confirmed(struct judge *j);

/* Fills the members `worst` and `place` of *result, and the member `wrong` of each tensor in *result. */
void where_find(const struct frame *f, const struct truth *t, const attn_tensor *results, uint64_t given,
                judge_result *result);

#endif
