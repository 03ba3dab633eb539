/* hypotheses.h: mistakes that kernels make, in one table. search.c tests them against a caller's results.
 *
 * A hypothesis is a change of a struct variation. Some have several variants (tile sizes, splits, seeds). The
 * order of the table is the order in which they are tested: those that people meet most come first. */
#ifndef JUDGE_HYPOTHESES_H
#define JUDGE_HYPOTHESES_H

#include "kernels/judge/variation.h"

/* What the functions of hypotheses may know of a problem. */
struct hypothesis_facts {
    const attn_problem *p;
    attn_geometry g;
    uint64_t given;         /* the caller's results, bits of attn_tensor_id */
    bool backward, mixes;   /* mixes: all sequences fit into one row of scores */
    int64_t most_q, most_k; /* lengths of the longest sequence */
    bool has_gaps;          /* a row has room for more keys than it has */
    bool uneven;            /* Sq and Sk of a sequence differ */
    bool has_empty;         /* a row may see no key */
};

enum { HYPOTHESIS_WORDS = 64 };

struct hypothesis {
    const char *code;
    bool converts;   /* the mistake changes results that the judge has already computed */
    bool of_scores;  /* the mistake may also be in the backward alone */
    bool of_pattern; /* the error may be within the limit; the hypothesis is tested even then */
    bool of_size;    /* the error depends on the order of sums, so only its size is compared */
    int variants;
    /* Changes *v as variant n says. False: this variant does not apply, or changes nothing. `words` gets what
     * distinguishes the variant ("tiles of 64 keys"), or stays empty. */
    bool (*apply)(const struct hypothesis_facts *f, int n, variation *v, char words[HYPOTHESIS_WORDS]);
    const char *says; /* a sentence about the caller's results, without its point */
    const char *fix;
};

enum { HYPOTHESES_MOST = 80, HYPOTHESES_FREQUENT = 26 }; /* the most rows; rows that people meet most */
extern const struct hypothesis hypotheses[];
extern const int hypotheses_count;

#endif
