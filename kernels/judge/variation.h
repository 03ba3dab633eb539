/* variation.h: attention as it is defined, or with a mistake.
 *
 * A struct variation says how attention is computed: correctly, or with a mistake that kernels make. variation_of()
 * sets the members so that compute.c computes the correct results. A hypothesis of hypotheses.c changes some members,
 * so that compute.c computes what a kernel with this mistake would give. For two mistakes at once, two hypotheses
 * change the same struct. */
#ifndef JUDGE_VARIATION_H
#define JUDGE_VARIATION_H

#include "kernels/attention.h"
#include "kernels/tiles.h"

/* Which key/value head query head h reads: the correct one, or a wrong one by mistake. */
enum variation_heads {
    /* query head h reads key/value head h / G (G: query heads per key/value head), which is correct */
    HEADS_IN_GROUPS,
    HEADS_INTERLEAVED, /* query head h reads key/value head h mod Hk (Hk: number of key/value heads) */
    /* query head h reads key/value head Hk - 1 - h / G: the Hk key/value heads are in reverse order, and G query heads
     * read each */
    HEADS_REVERSED,
};

/* The tile of keys that a kernel skips by mistake when it computes a row. */
enum variation_drop {
    DROP_NOTHING,
    DROP_LAST,      /* the row does not see the last tile of the sequence's keys */
    DROP_FIRST,     /* the row does not see the first tile of the sequence's keys */
    DROP_LAST_SEEN, /* the row does not see the last tile of those keys that the causal mask and the window allow */
    DROP_FIRST_SEEN,
};

/* Mistakes that kernels make when they compute the softmax tile by tile. */
enum variation_softmax {
    SOFTMAX_RIGHT,
    /* a row's out so far is not rescaled when a tile of keys raises the row's maximum score */
    SOFTMAX_OUT_NOT_RESCALED,
    /* a row's sum of exponentials so far is not rescaled when a tile of keys raises the row's maximum */
    SOFTMAX_SUM_NOT_RESCALED,
    /* neither a row's out so far nor its sum of exponentials so far is rescaled when a tile of keys raises the row's
     * maximum */
    SOFTMAX_NONE_RESCALED,
    /* the kernel splits the keys and averages the outs of the splits without weighting them */
    SOFTMAX_SPLITS_UNWEIGHTED,
    SOFTMAX_NOT_NORMALIZED, /* out is not divided by the sum of exp(z - max) */
    SOFTMAX_RAW,            /* exponentials are exp(z) without the row's maximum, and out is not divided by their
                                * sum */
};

enum variation_empty { EMPTY_RIGHT, EMPTY_INFINITE, EMPTY_NAN };

/* The numbers that a kernel rounds by mistake. */
enum variation_rounding {
    ROUND_NOTHING,
    ROUND_SCORES,        /* q.k is rounded to round_dtype */
    ROUND_SCALED_SCORES, /* scale * q.k is rounded to round_dtype */
    ROUND_FINAL_SCORES,  /* the score after bias and ALiBi is rounded to round_dtype */
    ROUND_SUMS,          /* sums of q.k, of P V and of gradients are rounded to round_dtype after every `tile` terms */
    /* sums of P V and of gradients are rounded to round_dtype after every `tile` terms, but sums of q.k, and thus lse,
     * are exact */
    ROUND_SUMS_BUT_QK,
    ROUND_TF32,     /* q and k are rounded to 10 mantissa bits */
    ROUND_TF32_ALL, /* q, k, P and v are rounded to 10 mantissa bits */
    CUT_TF32,       /* q and k are rounded towards 0 to 10 mantissa bits */
    CUT_TF32_ALL,
    CUT_RESULTS, /* out, dq, dk and dv are rounded towards 0 to round_dtype */
    CUT_P,       /* P is rounded towards 0 to round_dtype */
};

enum variation_dropout {
    DROPOUT_RIGHT,
    DROPOUT_MISSING,      /* dropout drops no probability */
    DROPOUT_UNSCALED,     /* kept probabilities are not divided by 1 - dropout_p */
    DROPOUT_SCALED_TWICE, /* kept probabilities are divided by 1 - dropout_p twice */
    DROPOUT_TRANSPOSED,   /* whether element (i, j) is dropped depends on the random number of element (j, i) */
};

typedef struct variation {
    attn_geometry g;                      /* addresses and strides of the tensors, scale, softcap and masks, as the
                                           * kernel with the mistake uses them */
    int64_t q_column, k_column, v_column; /* distance between neighbouring columns of q, of k and of v, in elements */

    /* Two mistakes in the order of operations. softcap_first: whether softcap is applied to q.k before the scale.
     * bias_first: whether the bias is added to q.k before the scale. */
    bool softcap_first, bias_first;
    double bias_factor, alibi_factor;
    bool alibi_corner; /* whether ALiBi's distance is |i - j|, as if the first query stood at the first key */

    /* how many keys each row sees beyond the last key that causal and window allow; negative: how many fewer */
    int64_t more_right;
    bool keep_inverted, one_sequence;
    /* above 0: rows see keys as if the sequence's number of keys were rounded up to a multiple of this number; 0: no
     * rounding */
    int64_t whole_keys;
    /* whether rows see padding keys behind seqlens_k, while causal and window count from the true number of keys */
    bool padding_kept;
    enum variation_heads heads;
    enum variation_drop drop;
    enum variation_softmax softmax;
    /* with SOFTMAX_SPLITS_UNWEIGHTED: number of splits of the keys; with ROUND_SUMS and ROUND_SUMS_BUT_QK: number of
     * terms between two roundings of a sum; otherwise: number of keys in a tile */
    int64_t tile;
    bool backwards; /* whether the kernel goes from the last tile of keys to the first */
    /* with SOFTMAX_SPLITS_UNWEIGHTED: whether the kernel averages over all splits of the keys, even those in which the
     * row sees no key */
    bool over_all;
    /* Above 0: number of keys in a tile of a kernel that counts the padding of its last tile as keys of score 0. 0: the
     * padding does not count, as is correct. */
    int64_t tail;
    bool tail_is_hidden; /* whether causal masking also applies to the padding that `tail` counts as keys */
    double sink_weight;
    enum variation_empty empty_out, empty_lse;
    double lse_factor;
    bool lse_without_max;
    enum variation_rounding rounding;
    attn_dtype round_dtype;

    enum variation_dropout dropout;
    double dropout_p;
    uint64_t seed;

    bool backward_alone; /* whether only the backward has the mistake, while out and lse are correct */
    bool no_delta, no_dlse, no_softcap_derivative, dv_unnormalized;
    double dq_factor, dk_factor;
    /* the only query head of a group from which dk and dv are computed, as an index in the group; -1: all query heads
     * of the group, as is correct */
    int64_t only_member;
    /* Above 0: number of keys in a tile of a kernel whose dq is a sum over only the last tile of keys that it visits.
     * 0: dq is a sum over all keys, as is correct. */
    int64_t only_last_tile;
    /* 0: only_last_tile means the last tile of all keys of the sequence. Above 0: it means the last tile of the keys
     * that a block of this many query rows sees. */
    int64_t only_last_rows;

    /* set of the caller's tensors that are read with heads and rows exchanged: one bit for each attn_tensor_id */
    uint64_t swapped;
    /* whether all tensors of the problem are read with heads and rows exchanged */
    bool swapped_problem;
} variation;

/* Returns whether the variation has a mistake that rounds partial sums. A kernel computes out and gradients from these
 * sums. */
static inline bool variation_rounds_sums(const variation *v)
{
    return v->rounding == ROUND_SUMS || v->rounding == ROUND_SUMS_BUT_QK;
}

/* Returns the variation that has no mistake, so that compute.c computes the correct results. */
variation variation_of(const attn_problem *p);

/* variation_head_of() returns the key/value head that query head h reads. variation_member_of() returns the n-th of the
 * query heads that read key/value head hk. */
static inline int64_t variation_head_of(const variation *v, int64_t h)
{
    const attn_dims *const d = &v->g.dims;
    return v->heads == HEADS_INTERLEAVED ? h % d->Hk
           : v->heads == HEADS_REVERSED  ? d->Hk - 1 - h / v->g.group
                                         : h / v->g.group;
}

static inline int64_t variation_member_of(const variation *v, int64_t hk, int64_t n)
{
    const attn_dims *const d = &v->g.dims;
    return v->heads == HEADS_INTERLEAVED ? n * d->Hk + hk
           : v->heads == HEADS_REVERSED  ? (d->Hk - 1 - hk) * v->g.group + n
                                         : hk * v->g.group + n;
}

#endif
