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
    uint64_t given;         /* the results that the caller gave: bits of attn_tensor_id */
    bool backward, mixes;   /* mixes: one row of scores has room for the keys of all packed sequences */
    int64_t most_q, most_k; /* queries and keys of the longest sequence */
    bool has_gaps;          /* a sequence has fewer keys than there is room for */
    bool uneven;            /* Sq and Sk of a sequence differ */
    bool has_empty;         /* some query may see no key */
};

enum { HYPOTHESIS_WORDS = 64 };

struct hypothesis {
    const char *code;
    bool converts;  /* the mistake changes finished results, so the test converts the truth instead of computing anew */
    bool of_scores; /* the mistake changes scores; a backward is also tested with it while out and lse stay right */
    bool of_pattern; /* the mistake makes small errors: it is tested even where all results are within their limits */
    bool of_size;    /* errors depend on the order of sums, so the test compares only how large they are */
    int variants;
    /* Changes *v as variant n says. False: this variant does not apply, or changes nothing. `words` gets what
     * distinguishes the variant ("tiles of 64 keys"), or stays empty. */
    bool (*apply)(const struct hypothesis_facts *f, int n, variation *v, char words[HYPOTHESIS_WORDS]);
    const char *says; /* a sentence about the caller's results, without its point */
    const char *fix;
};

enum { HYPOTHESES_MOST = 80 }; /* the most rows that the table may have */
extern const struct hypothesis hypotheses[];
extern const int hypotheses_count;

#endif
