/* hypotheses.h: mistakes that kernels make, in one table. search.c tests them against a caller's results.
 *
 * A hypothesis is one possible mistake, written as a change of a struct variation. Some hypotheses have several
 * variants (tile sizes, splits, seeds). Hypotheses are tested in the order of the table: the most frequent mistakes
 * come first. */
#ifndef JUDGE_HYPOTHESES_H
#define JUDGE_HYPOTHESES_H

#include "kernels/judge/variation.h"

/* The facts about a problem that decide whether and how a mistake applies to it. The functions of hypotheses.c read
 * them. */
struct hypothesis_facts {
    const attn_problem *p;
    attn_geometry g;
    uint64_t given; /* set of the results that the caller sent: one bit for each attn_tensor_id */
    /* `backward`: whether gradients are computed. `mixes`: whether a row of scores has room for the keys of all packed
     * sequences together. Mistakes that mix sequences need this room. */
    bool backward, mixes;
    int64_t most_q, most_k; /* the largest number of queries, and the largest number of keys, that a sequence has */
    /* whether some sequence has fewer keys than rows of k and v, so that padding keys follow its keys */
    bool has_gaps;
    bool uneven;    /* whether some sequence has different numbers of queries and keys */
    bool has_empty; /* whether some query may see no key at all */
};

enum { HYPOTHESIS_WORDS = 64 };

struct hypothesis {
    const char *code;
    /* whether the mistake only changes finished results; its test then changes the stored truth (float64 results) and
     * does not compute attention again */
    bool converts;
    /* Whether the mistake changes scores. In a backward such a mistake is tested twice: in forward and backward
     * together, and in the gradients alone, with correct out and lse. */
    bool of_scores;
    /* whether a kernel with this mistake computes out and lse correctly, so that only its gradients are wrong */
    bool of_backward;
    /* whether the mistake makes small errors and is therefore tested even if all results are within their limits */
    bool of_pattern;
    /* Whether the mistake makes random errors, for example by adding numbers in a different order. Such errors are
     * compared with the caller's by size only, not number by number. */
    bool of_size;
    /* The tensors (bits of attn_tensor_id) that the mistake reads at wrong addresses. Two such mistakes in one tensor
     * are never tested together, because reads could pass its end. */
    uint64_t misread;
    int variants;
    /* Changes *v so that it describes attention with variant n of the mistake. Returns false if the variant does not
     * apply, or changes nothing. The function writes to `words` what distinguishes the variant, such as "tiles of 64
     * keys", or leaves it empty. */
    bool (*apply)(const struct hypothesis_facts *f, int n, variation *v, char words[HYPOTHESIS_WORDS]);
    const char *says; /* a sentence that says what is wrong with the caller's results, without a full stop */
    const char *fix;
};

enum { HYPOTHESES_MOST = 80 }; /* the largest number of rows of hypotheses[], the table of mistakes */
extern const struct hypothesis hypotheses[];
extern const int hypotheses_count;

#endif
