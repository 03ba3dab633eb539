/* state.h: the state of a judge (a check of a caller's results), which the files of this folder share. judge.h says
 * what a judge does.
 *
 *   judge.c        opens and closes a judge, and leads it through the phases of its work
 *   units.c        chooses the tiles of a large problem that are also computed with the roundings of correct kernels
 *   pass.c         computes tiles with one mistake, or with imitated roundings, and sums up differences
 *   steps.c        the order in which a pass (a run over tiles) takes its tiles; computes a tile of keys
 *   verdict.c      decides limits and the verdict
 *   search.c       chooses which mistakes are tested, on which tiles, in which order
 *   candidate.c    tests one mistake or two at once, and says what they explain
 *   where.c        finds the elements with the largest errors, and where a tensor is wrong
 *   report.c       writes a judge_result
 *
 * Arrays of length FRAME_TENSORS have one element for each result, in the order of frame_tensors[]. */
#ifndef JUDGE_STATE_H
#define JUDGE_STATE_H

#include "kernels/judge/effort.h"
#include "kernels/judge/frame.h"
#include "kernels/judge/hypotheses.h"

enum {
    /* the largest number of candidates (single mistakes and pairs of mistakes) that a judge tests */
    CANDIDATES = 2048,
    PAIR_FIRSTS = 5,    /* largest number of mistakes tried as the first mistake of a pair */
    PAIR_SECONDS = 300, /* largest number of mistakes tried as the second mistake of a pair */
    CONFIRMED = 8,      /* the largest number of explanations that are tested on all tiles */
    WORST_UNITS = 8,    /* number of units (tiles) with the largest errors that a judge remembers for each result */
};

/* A unit is the smallest part of a problem that a pass can compute separately: a tile of queries, or in a backward also
 * a tile of keys. A tile of queries gives out, lse and dq of its rows. A tile of keys gives dk and dv of its keys,
 * which are sums over the queries of all query heads that read these keys. The number of a unit is the index of the
 * tile of queries in frame.tiles, or frame.count plus the index of the tile of keys in frame.key_tiles. */

/* The phases of the judge's work on a caller's results, in order; see judge.c. */
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

/* A mistake: `row` is its row in hypotheses[], the table of mistakes, and `variant` the number of one of its
 * variants. */
struct mistake {
    int row, variant;
    bool alone; /* whether only the backward has the mistake, while the forward (out and lse) is correct */
};

/* A candidate: one mistake, or two at once, whose results the judge compares with the caller's. */
struct candidate {
    /* the candidate's mistakes; if second.row < 0, the candidate is a single mistake */
    struct mistake first, second;
    /* differences between the caller's results and the results of a kernel with the candidate's mistakes */
    struct difference left[FRAME_TENSORS];
    /* differences between the results of a kernel with the candidate's mistake and the truth (float64 results);
     * computed only for mistakes that make random errors (of_size) */
    struct difference size[FRAME_TENSORS];
    /* How well the candidate explains the error; the lowest score is the best. A mistake with score 0 explains nothing
     * of the error. */
    double score;
    /* set of the wrong tensors that the candidate (mistake or pair) explains: bit n stands for frame_tensors[n] */
    unsigned explains;
    /* whether the candidate's mistakes would make a tensor wrong, although this tensor is correct in the caller's
     * results */
    bool breaks;
    /* whether PHASE_CONFIRM has tested the candidate (one assumed mistake, or two assumed together) on all tiles, or
     * has found that no such test is needed */
    bool confirmed;
    /* whether the differences in `left` are from all tiles of the problem; if not, they are from the sample only (the
     * tiles on which a mistake is tested first) */
    bool whole;
};

struct worst_units {
    int count;
    int64_t unit[WORST_UNITS]; /* numbers of the units (tiles) with the largest errors, the largest error first */
    double error[WORST_UNITS];
};

/* A pass is a run over tiles of a frame (a problem cut into tiles). It computes the tiles with one variation (a
 * mistake, or none), and sums up how far its results are from the caller's results or from the truth (float64
 * results). */
struct pass {
    variation v;
    struct frame *frame;
    /* The tiles over which the pass goes; NULL: all tiles. If by_units is true, a number n < frame->count stands
     * for frame->tiles[n] (queries), and frame->count + n for frame->key_tiles[n] (keys). If not, all numbers are
     * indices in frame->tiles. */
    const int64_t *list;
    /* Whether `list` may have tiles of keys, and not only tiles of queries. If not, in a backward the list has all
     * tiles of queries of some key/value heads, because dk and dv are compared after a head's last tile. */
    bool by_units;
    /* count: number of tiles (or units) that the pass goes over; at: number of tiles (or units) done so far */
    int64_t count, at;
    int64_t inner; /* if the present unit is a tile of keys: number of tiles of queries that are done for it */
    int64_t hk, b; /* the key/value head hk and the sequence b whose keys are loaded; -1: none */
    /* whether the pass changes the stored truth (float64 results) as its mistake would, and does not compute
     * attention */
    bool converts;
    /* whether only the backward has the mistake, so that the pass takes out and lse from the truth (float64 results) */
    bool alone;
    /* whether out and lse are taken from the truth (float64 results) and not computed, because the mistake does not
     * change them; emulations of tiles of keys always take them from the truth */
    bool right_forward;
    /* index in emulations[] of the correct kernel whose roundings the pass imitates; -1: the pass computes without
     * roundings */
    int emulation;
    /* whether the pass compares its results with the truth (float64 results) and not with the caller's results */
    bool against_truth;
    /* whether the pass also sums up the differences between its results and the truth (float64 results), in `size` */
    bool sizes;
    bool sums; /* whether the pass goes over all tiles, so that its sums dbias, dsinks and dslopes are complete */
    struct difference found[FRAME_TENSORS]; /* sums of the differences that the pass measures, over the tiles done so
                                             * far: its results compared with the caller's, or with the truth if
                                             * against_truth is set */
    struct difference size[FRAME_TENSORS];
};

struct judge {
    struct hypothesis_facts facts;
    attn_problem p; /* the caller's problem, without the results that the caller sent for it */
    attn_tensor results[ATTN_TENSOR_COUNT];
    uint64_t given; /* set of the results that the caller sent: one bit for each attn_tensor_id */
    struct frame frame;
    /* the problem cut into tiles a second time: `other` reads all tensors with heads and rows exchanged */
    struct frame other;
    bool has_other;
    /* whether the float64 results in `truth` are in memory of the caller, because a device has computed them */
    bool borrows_truth;
    double time_s;
    struct truth truth;
    /* dbias, dsinks and dslopes of the present pass (a run over tiles), which stores no other results */
    struct truth some;
    int64_t sum_elements[FRAME_TENSORS]; /* number of elements of dbias, dsinks and dslopes; 0 for the other results */

    enum phase phase;
    struct pass pass;
    bool in_pass;
    int index;

    struct worst_units worst[FRAME_TENSORS];
    /* the tiles (of queries or of keys, as unit numbers) that are also computed with the roundings of correct kernels;
     * NULL: all tiles */
    int64_t *emulated;
    int64_t emulated_count;
    /* Differences between the truth (float64 results) and results with the roundings of a correct kernel. Several
     * correct kernels are imitated; for each tensor, the one with the largest difference counts. */
    struct difference noise[FRAME_TENSORS];
    struct difference now[FRAME_TENSORS]; /* differences between the caller's results and the truth (float64 results) */
    /* differences between the caller's results and the truth (float64 results), only on the tiles on which mistakes are
     * tested first (`sample`) */
    struct difference now_sample[FRAME_TENSORS];
    double largest[FRAME_TENSORS]; /* largest absolute value of each tensor in the truth (float64 results) */
    /* largest error that comes from rounding the truth (float64 results) to the result's dtype */
    double once[FRAME_TENSORS];
    double largest_score; /* largest finite |lse| in the truth (float64 results) */
    judge_tensor tensor[FRAME_TENSORS];
    judge_verdict verdict;
    unsigned wrong; /* set of the tensors whose errors exceed their limits: bit n stands for frame_tensors[n] */

    /* The tiles on which mistakes are tested first. If units_are_sampled() is true, these are tiles of queries or of
     * keys, as unit numbers. Otherwise they are indices of tiles of queries. */
    int64_t *sample;
    int64_t sample_count;
    /* The tiles (of queries or of keys, as unit numbers) of the frame `other` on which mistakes are tested first. NULL:
     * all its tiles. `other` is the problem read with heads and rows exchanged. */
    int64_t *other_sample;
    int64_t other_count;
    struct mistake trying; /* the single mistake that is being tested */
    /* whether a variant of the mistake `trying` was not tested, because its test would take too long */
    bool left_out;
    struct candidate *candidates;
    /* candidate_count: number of tested candidates (single mistakes and pairs); singles: how many of these are single
     * mistakes, which come first */
    int candidate_count, singles;
    /* indices of the single mistakes from which pairs are made: `firsts` for the first mistake of a pair, `seconds` for
     * the second */
    int firsts[PAIR_FIRSTS], first_count, seconds[PAIR_SECONDS], second_count;
    int confirm[CONFIRMED], confirm_count; /* indices of the candidates (mistakes or pairs) that PHASE_CONFIRM tests on
                                            * all tiles */
    bool tried[HYPOTHESES_MOST];           /* tried[n]: whether all variants of row n of hypotheses[] were tested */
};

static inline bool state_is_given(const struct judge *j, attn_tensor_id id)
{
    return j->given >> id & 1;
}

/* pass_begin() begins a pass: a run over tiles that computes the variation `v` (attention with a mistake, or without).
 * `list` has the indices of the `count` tiles; NULL: all tiles. If units_are_sampled() is true, `list` has unit numbers
 * (of tiles of queries or of keys) instead. pass_step() computes the next tile, and returns true when no tile is
 * left. */
void pass_begin(struct judge *j, struct frame *frame, const variation *v, const int64_t *list, int64_t count);
bool pass_step(struct judge *j);

/* Functions of pass.c that steps.c calls. Comments in pass.c explain them. */
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

/* Sets the judge's members `verdict`, `wrong` and `tensor`, by the differences that PHASE_COMPARE and PHASE_EMULATE
 * found. */
void verdict_decide(struct judge *j);

/* Changes *v so that compute.c computes attention with the mistake. Writes to `words` what distinguishes the mistake's
 * variant. Returns false if the mistake does not apply to the problem. */
bool candidate_change(const struct judge *j, const struct mistake *m, variation *v, char words[HYPOTHESIS_WORDS]);
/* candidate_begin() begins the pass (a run over tiles) that tests a candidate: one assumed mistake, or two assumed
 * together. The pass goes over the sample (the tiles on which candidates are tested first), or over all tiles if
 * `whole` is true. If units_are_sampled() is true, it always goes over the sample, and `whole` allows it more work on
 * tiles of keys. The function returns false if the candidate does not apply to the problem, or takes too long.
 * candidate_end() stores what the pass has found. */
bool candidate_begin(struct judge *j, const struct candidate *c, bool whole);
void candidate_end(struct judge *j, struct candidate *c);
/* Returns whether some tested candidate (one assumed mistake, or two assumed together) explains all wrong tensors by
 * itself. A candidate need not explain dk and dv if its test did not compare them. */
bool candidate_is_complete(const struct judge *j);
/* Returns whether the candidate (one assumed mistake, or two assumed together) explains more than a fifth of the error
 * of at least one wrong tensor. */
bool candidate_removes_some(const struct judge *j, const struct candidate *c);
/* Returns whether the test of this candidate (one assumed mistake, or two assumed together) left out dk and dv. A test
 * on a sample of tiles leaves them out if computing out and lse of whole heads would take too long. */
bool candidate_lacks_keys(const struct judge *j, const struct candidate *c);
/* Returns whether the answer to the caller reports this tested candidate (one assumed mistake, or two assumed together)
 * as an explanation. */
bool candidate_is_explanation(const struct judge *j, const struct candidate *c);
/* Returns the set of tensors for which a candidate with one mistake explains most of the error: bit n stands for
 * frame_tensors[n]. 0: the mistake is not among the causes of the error. */
unsigned candidate_part(const struct judge *j, const struct candidate *c);

/* Functions of units.c, for units (tiles of queries or of keys).
 *   units_choose_emulated()  chooses the tiles in which correct kernels are emulated, by the errors that PHASE_COMPARE
 *                            found. If memory runs out, all tiles are emulated
 *   units_are_given()        returns whether the caller sent a result that tiles of this kind compute: out, lse or dq
 *                            in tiles of queries, dk or dv in tiles of keys
 *   units_add()              adds a unit unless the list has it, and returns the new length
 *   units_spread()           adds `wanted` evenly spread units of one kind. It leaves out tiles of keys that no query
 *                            reads, and units that are in the list from index `from` on
 *   units_sort()             puts tiles of queries before tiles of keys */
enum unit_kind { UNIT_QUERIES, UNIT_KEYS, UNIT_KINDS };
void units_choose_emulated(struct judge *j);
void units_note(struct worst_units *worst, int64_t unit, double error);
bool units_are_given(const struct judge *j, enum unit_kind kind);
int64_t units_add(int64_t unit, int64_t *list, int64_t count);
int64_t units_spread(const struct frame *f, enum unit_kind kind, int64_t wanted, int64_t *list, int64_t from,
                     int64_t count);
void units_sort(int64_t *list, int64_t count);
static inline int64_t units_room(const struct frame *f)
{
    return f->count + f->key_count + 1;
}
/* Returns in which tiles frame_tensors[which] is computed: out, lse and dq in tiles of queries, dk and dv in tiles of
 * keys. */
static inline enum unit_kind units_kind_of(int which)
{
    return which < FRAME_ROW_TENSORS ? UNIT_QUERIES : UNIT_KEYS;
}
/* Returns whether the judge tests mistakes on some of the tiles only, because a pass over all tiles takes too long. */
static inline bool units_are_sampled(const struct judge *j)
{
    return j->emulated != NULL;
}

/* Functions of search.c. search_next_single() begins the test of the next single mistake. search_next_pair() begins the
 * test of the next two mistakes together. Both return false if no test is left. */
void search_choose_sample(struct judge *j);
bool search_next_single(struct judge *j);
void search_choose_pairs(struct judge *j);
bool search_next_pair(struct judge *j);
void search_choose_confirmed(struct judge *j);

/* Finds the elements with the largest errors, and in which batch rows, heads, queries, keys and columns wrong elements
 * are. Fills the members `worst` and `place` of *result, and the member `wrong` of each tensor in *result. */
void where_find(const struct frame *f, const struct truth *t, const attn_tensor *results, uint64_t given,
                judge_result *result);

#endif
