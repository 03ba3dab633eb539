/* judge.h: what is wrong with a caller's results?
 *
 * A judge computes a problem in float64 and holds a caller's results against it. Where they are wrong, it tests
 * the mistakes of hypotheses.c: it computes what a kernel with that mistake gives, and looks whether the results
 * are that.
 *
 *   judge_open()      sizes up the problem and chooses rows
 *   judge_step()      some milliseconds of work; true: complete
 *   judge_report()    what is known; call it at any time after the first step
 *   judge_close()
 *
 * One thread at a time uses a judge. It borrows the problem and the results, which are in host memory. */
#ifndef JUDGE_JUDGE_H
#define JUDGE_JUDGE_H

#include "kernels/attention.h"

typedef struct judge judge;

enum { JUDGE_WORST = 8, JUDGE_WHERE = 8, JUDGE_EXPLANATIONS = 8, JUDGE_CODES = 80, JUDGE_TEXT = 320 };

/* id, wire name: of a tensor, and of all together. */
#define JUDGE_VERDICT_MAP(X)                                                                \
    X(MATCH, "match")       /* not farther than twice the rounding to the result's dtype */ \
    X(ROUNDING, "rounding") /* as far as a right kernel of the dtype may be */              \
    X(MISMATCH, "mismatch")
typedef enum judge_verdict {
#define X(id, name) JUDGE_##id,
    JUDGE_VERDICT_MAP(X)
#undef X
} judge_verdict;
const char *judge_verdict_name(judge_verdict verdict);

/* Of one of the caller's tensors.
 *   max_abs    largest difference; infinity where one side is not finite and the other differs from it
 *   relative   max_abs over the largest finite absolute value of the truth
 *   explained  max_abs of a right kernel of the dtype
 *   limit      what is accepted: kernels/README.md
 *   wrong      elements beyond the limit, of the `of` that were compared
 *   nan        how many of the caller's numbers are NaN where the truth is not */
typedef struct judge_tensor {
    judge_verdict verdict;
    double max_abs, relative, explained, limit;
    int64_t wrong, of, nan;
} judge_tensor;

typedef struct judge_element {
    attn_tensor_id id;
    int rank;
    int64_t index[ATTN_MAX_RANK]; /* in the tensor as it was sent */
    double got, want;
} judge_element;

typedef struct judge_place {
    attn_tensor_id id;
    char what[JUDGE_TEXT]; /* "queries 128 to 255 of every head" */
    int64_t wrong, of_wrong;
} judge_place;

/* A mistake that explains the difference. now, if_so: max_abs of the tensor that it explains best, as it is, and
 * against what a kernel with the mistake gives. */
typedef struct judge_explanation {
    const char *code, *and_code; /* and_code: a second mistake at once; NULL: none */
    char detail[JUDGE_TEXT], fix[JUDGE_TEXT];
    uint64_t tensors; /* that it explains: bits of attn_tensor_id */
    double now, if_so;
} judge_explanation;

typedef struct judge_result {
    judge_verdict verdict;
    attn_op op;
    uint64_t given; /* bits of attn_tensor_id */
    judge_tensor tensor[ATTN_TENSOR_COUNT];
    int worst_count, place_count, explanation_count, not_tried_count;
    judge_element worst[JUDGE_WORST];
    judge_place place[JUDGE_WHERE];
    judge_explanation explanation[JUDGE_EXPLANATIONS];
    const char *not_tried[JUDGE_CODES];
    int64_t rows_checked, rows_of; /* query rows of all heads */
} judge_result;

/* The results that may be judged, bits of attn_tensor_id. */
#define JUDGE_RESULTS                                                                                                \
    (ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) | \
     ATTN_TENSOR_BIT(dsinks) | ATTN_TENSOR_BIT(dbias) | ATTN_TENSOR_BIT(dalibi_slopes))

/* Has each of the results as many elements as the problem's result? INVALID names the member. */
attn_status judge_check(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT], attn_error *err);
/* Bytes of memory that judge_open() takes for this problem and time; INT64_MAX: more than a judge may have. */
int64_t judge_bytes(const attn_problem *problem, double seconds);

/* `problem` has passed attn_check() without its results; its op says whether gradients are computed. results[id]
 * are the caller's, C-contiguous, rank 0 where not given; at least one is. A result may have the shape of another
 * layout: it needs the right number of elements alone. `seconds` is the time that all of it should take: rows are
 * chosen so that the truth takes a third of it. Errors: INVALID (a result's size; the member is named), TOO_LARGE
 * (not even a part can be computed in memory of JUDGE_BYTES), NO_MEMORY. */
attn_status judge_open(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT], double seconds,
                       judge **opened, attn_error *err);
bool judge_step(judge *j);
/* Half of the time is over: where the truth of all chosen rows is not known yet, the judge makes do with those
 * that are. */
void judge_hurry(judge *j);
/* Are errors and verdict known? Explanations may still be missing. */
bool judge_has_verdict(const judge *j);
void judge_report(judge *j, judge_result *result);
void judge_close(judge *j); /* NULL is fine */

/* Expected seconds of the truth and its roundings for all rows, and of all hypotheses. */
typedef struct judge_cost {
    double truth, all;
} judge_cost;
judge_cost judge_cost_of(const attn_problem *problem);

/* The codes of hypotheses.c; NULL past the last. */
const char *judge_code(int index);

#endif
