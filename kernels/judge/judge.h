/* judge.h: finds out what is wrong with a caller's results.
 *
 * A judge computes a problem in float64 and compares a caller's results with these exact results (the truth). If
 * results are wrong, the judge tests each mistake of hypotheses.c: it computes what a kernel with this mistake gives,
 * and compares the caller's results with these results.
 *
 *   judge_open()      estimates the work, and chooses as many rows as the judge has time to check; if a device has
 *                     computed the truth of all rows, the judge checks all rows
 *   judge_step()      does some milliseconds of work; returns true when the work is complete
 *   judge_report()    writes what is known; call it at any time after the first step
 *   judge_close()
 *
 * One thread at a time uses a judge. A judge borrows the problem and the results, which are in host memory. */
#ifndef JUDGE_JUDGE_H
#define JUDGE_JUDGE_H

#include "kernels/attention.h"

typedef struct judge judge;

enum { JUDGE_WORST = 8, JUDGE_WHERE = 8, JUDGE_EXPLANATIONS = 8, JUDGE_CODES = 80, JUDGE_TEXT = 320 };

/* The verdicts on one tensor or on all tensors together, from best to worst. Each row: id, name in JSON.
 *   MATCH      the largest error is at most twice the error of rounding float64 results to the dtype
 *   ROUNDING   the largest error is at most the `limit` of struct judge_tensor
 *   MISMATCH   the largest error is above `limit` */
#define JUDGE_VERDICT_MAP(X) \
    X(MATCH, "match")        \
    X(ROUNDING, "rounding")  \
    X(MISMATCH, "mismatch")
typedef enum judge_verdict {
#define X(id, name) JUDGE_##id,
    JUDGE_VERDICT_MAP(X)
#undef X
} judge_verdict;
const char *judge_verdict_name(judge_verdict verdict);

/* How far one of the caller's tensors is from the truth (the float64 results).
 *   max_abs    largest difference; infinity if a number or its truth is not finite and they are not equal
 *   relative   max_abs divided by the largest finite absolute value of the truth
 *   explained  the max_abs of a kernel without a mistake on this problem, which comes from roundings alone
 *   limit      the largest max_abs that is not a mismatch: see kernels/README.md
 *   wrong      number of elements whose difference exceeds `limit`; `of` is the number of compared elements
 *   nan        number of elements that are NaN where the truth is not */
typedef struct judge_tensor {
    judge_verdict verdict;
    double max_abs, relative, explained, limit;
    int64_t wrong, of, nan;
} judge_tensor;

typedef struct judge_element {
    attn_tensor_id id;
    int rank;
    int64_t index[ATTN_MAX_RANK]; /* index of the element, along the axes of the tensor as the caller sent it */
    double got, want;
} judge_element;

typedef struct judge_place {
    attn_tensor_id id;
    /* a sentence that says where wrong elements are, such as "queries 128 to 255 of every head" */
    char what[JUDGE_TEXT];
    int64_t wrong, of_wrong;
} judge_place;

/* A mistake that explains the errors. `now` and `if_so` are about the tensor that the mistake explains best: `now` is
 * the tensor's largest difference from the truth (float64 results). `if_so` is its largest difference from the results
 * of a kernel with the mistake. */
typedef struct judge_explanation {
    /* whether the mistake explains most of the error, but not all of it: the kernel must then have other mistakes
     * too */
    bool partly;
    const char *code, *and_code; /* code: short name of the mistake; and_code: short name of a second mistake that is
                                  * present at the same time, or NULL */
    char detail[JUDGE_TEXT], fix[JUDGE_TEXT];
    uint64_t tensors; /* set of the wrong tensors that the mistake explains: one bit for each attn_tensor_id */
    double now, if_so;
} judge_explanation;

typedef struct judge_result {
    judge_verdict verdict;
    attn_op op;
    uint64_t given; /* set of the results that the caller sent: one bit for each attn_tensor_id */
    judge_tensor tensor[ATTN_TENSOR_COUNT];
    int worst_count, place_count, explanation_count, not_tried_count;
    judge_element worst[JUDGE_WORST];
    judge_place place[JUDGE_WHERE];
    judge_explanation explanation[JUDGE_EXPLANATIONS];
    const char *not_tried[JUDGE_CODES];
    /* rows_checked: number of query rows, of all heads together, that were checked; rows_of: number of all query
     * rows */
    int64_t rows_checked, rows_of;
    /* number of query rows in which the roundings of correct kernels were imitated; judge_tensor.explained of out, lse
     * and dq comes from these rows */
    int64_t rows_emulated;
} judge_result;

/* The results that the judge can check, as bits of attn_tensor_id. */
#define JUDGE_RESULTS                                                                                                \
    (ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) | \
     ATTN_TENSOR_BIT(dsinks) | ATTN_TENSOR_BIT(dbias) | ATTN_TENSOR_BIT(dalibi_slopes))

/* Checks that each result that the caller sent has as many elements as the problem requires. If one does not, the error
 * INVALID names it. */
attn_status judge_check(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT], attn_error *err);

/* A device may compute the truth (float64 results) of all rows for a judge (a check of a caller's results), by
 * attn_truth_some(). judge_wants() returns the results that the device should compute, as bits of attn_tensor_id. It
 * returns 0 if the judge computes the truth itself: for a small problem, for results that no device computes (dbias,
 * dsinks, dalibi_slopes), and where the judge would need too much memory. judge_elements() returns the number of
 * doubles of one result. */
uint64_t judge_wants(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT]);
int64_t judge_elements(const attn_problem *problem, attn_tensor_id id);

/* Returns the bytes of memory that judge_open() takes for this problem and this time limit. `has_truth`: a device has
 * computed the float64 results. INT64_MAX: more than a judge may take. */
int64_t judge_bytes(const attn_problem *problem, bool has_truth, double seconds);

/* Opens a judge (a check of a caller's results).
 *   problem   has passed attn_check() without its results; its op says whether gradients are computed
 *   results   results[id] is the caller's tensor, C-contiguous, or has rank 0 if it is not given. At least one must be
 *             given. Only the number of elements is checked, so a result may have the shape of another layout
 *   truth     the float64 results of all rows that judge_wants() names, in host memory, which the judge borrows until
 *             judge_close(); NULL: the judge computes them
 *   seconds   the time that the judge should take in all. Without `truth`, the judge chooses as many rows as it can
 *             compute and emulate in a third of that time. With `truth`, it compares all rows, and emulates correct
 *             kernels in as many rows as it can in a third of that time
 * Errors: INVALID (a result's size; the member is named), TOO_LARGE (JUDGE_BYTES of memory do not suffice for any part
 * of the problem), NO_MEMORY. */
attn_status judge_open(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT],
                       const attn_truth *truth, double seconds, judge **opened, attn_error *err);
bool judge_step(judge *j);
/* Call this function if half of the judge's time is over and the truth (float64 results) is not complete. The judge
 * then checks only the rows whose float64 results it has computed. */
void judge_hurry(judge *j);
/* Returns whether the errors of the caller's results and the verdict are known. The search for explanations may still
 * go on. */
bool judge_has_verdict(const judge *j);
void judge_report(judge *j, judge_result *result);
void judge_close(judge *j); /* closes a judge; does nothing if `j` is NULL */

/* The estimated time in seconds of checking a caller's results. `truth` is the time for the float64 results of all rows
 * and for imitating the roundings of correct kernels. `all` is the time for testing all possible mistakes. */
typedef struct judge_cost {
    double truth, all;
} judge_cost;
judge_cost judge_cost_of(const attn_problem *problem);

/* Returns the code (a short name) of the mistake in row `index` of the table in hypotheses.c, or NULL past the last
 * row. */
const char *judge_code(int index);

#endif
