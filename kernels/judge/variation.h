/* variation.h: attention as it is defined, or with one thing done otherwise.
 *
 * A mistake that kernels make is data here: a struct variation. With all members as variation_of() sets them,
 * compute.c computes what is right. A hypothesis of hypotheses.c changes some members, and compute.c computes what
 * a kernel with that mistake would give. Two mistakes at once are two changes of one struct. */
#ifndef JUDGE_VARIATION_H
#define JUDGE_VARIATION_H

#include "kernels/attention.h"
#include "kernels/tiles.h"

/* Which key/value head query head h reads. */
enum variation_heads {
    HEADS_IN_GROUPS,   /* h / G, which is right */
    HEADS_INTERLEAVED, /* h mod Hk */
    HEADS_REVERSED,    /* Hk - 1 - h / G */
};

/* The tile of keys that a row wrongly does not see. */
enum variation_drop {
    DROP_NOTHING,
    DROP_LAST,      /* the last tile of the sequence's keys */
    DROP_FIRST,     /* the first tile of the sequence's keys */
    DROP_LAST_SEEN, /* the last tile that causal and window let the row see */
    DROP_FIRST_SEEN,
};

/* The mistake of a softmax that is computed tile by tile. */
enum variation_softmax {
    SOFTMAX_RIGHT,
    SOFTMAX_OUT_NOT_RESCALED,  /* the row of out is not rescaled where the maximum grows */
    SOFTMAX_SUM_NOT_RESCALED,  /* the sum is not rescaled where the maximum grows */
    SOFTMAX_NONE_RESCALED,     /* neither out nor the sum is rescaled */
    SOFTMAX_SPLITS_UNWEIGHTED, /* the results of splits of the keys are averaged */
    SOFTMAX_NOT_NORMALIZED,    /* out is not divided by the sum of exp(z - max) */
    SOFTMAX_RAW,               /* out is not divided by the sum of exp(z) */
};

enum variation_empty { EMPTY_RIGHT, EMPTY_INFINITE, EMPTY_NAN };

/* The number that is rounded although exact arithmetic would not round it. */
enum variation_rounding {
    ROUND_NOTHING,
    ROUND_SCORES,        /* q.k is rounded to round_dtype */
    ROUND_SCALED_SCORES, /* scale q.k is rounded to round_dtype */
    ROUND_FINAL_SCORES,  /* the score after bias and ALiBi is rounded to round_dtype */
    ROUND_SUMS,          /* sums of q.k, P V and of gradients are rounded to round_dtype after every `tile` terms */
    ROUND_SUMS_BUT_QK,   /* as ROUND_SUMS, but q.k is exact, and so is lse */
    ROUND_TF32,          /* q and k are rounded to 10 bits behind the point */
    ROUND_TF32_ALL,      /* q, k, P and v are rounded to 10 bits behind the point */
    CUT_TF32,            /* q and k are cut to 10 bits behind the point */
    CUT_TF32_ALL,
    CUT_RESULTS, /* out, dq, dk and dv are cut to round_dtype */
    CUT_P,       /* P is cut to round_dtype */
};

enum variation_dropout {
    DROPOUT_RIGHT,
    DROPOUT_MISSING,      /* nothing is dropped */
    DROPOUT_UNSCALED,     /* kept elements are not divided by 1 - p */
    DROPOUT_SCALED_TWICE, /* kept elements are divided by 1 - p twice */
    DROPOUT_TRANSPOSED,   /* element (j, i) decides about (i, j) */
};

typedef struct variation {
    attn_geometry g; /* places of the tensors, scale, softcap, and the masks that hide pairs of a query and a key */
    int64_t q_column, k_column, v_column; /* distance of neighbouring columns of q, k and v, in elements */

    bool softcap_first, bias_first; /* softcap, or bias, is applied to q.k before the scale */
    double bias_factor, alibi_factor;
    bool alibi_corner; /* ALiBi's distance is |i - j|, as if the first query stood at the first key */

    int64_t more_right; /* keys that each row sees beyond the last one that causal and window allow */
    bool keep_inverted, one_sequence;
    int64_t whole_keys; /* the keys of a sequence are rounded up to a multiple of this number; 0: they are not */
    bool padding_kept;  /* rows see keys behind seqlens_k, while causal and window count from the true length */
    enum variation_heads heads;
    enum variation_drop drop;
    enum variation_softmax softmax;
    int64_t tile;        /* keys of a tile; number of splits of the keys; or terms of a sum between two roundings */
    bool backwards;      /* the kernel goes from the last tile to the first */
    bool over_all;       /* with SOFTMAX_SPLITS_UNWEIGHTED: splits of which the row sees no key count in the average */
    int64_t tail;        /* the last tile of so many keys has padding keys of score 0; 0: no padding counts */
    bool tail_is_hidden; /* causal hides the padding keys of `tail` as it hides keys */
    double sink_weight;
    enum variation_empty empty_out, empty_lse;
    double lse_factor;
    bool lse_without_max;
    enum variation_rounding rounding;
    attn_dtype round_dtype;

    enum variation_dropout dropout;
    double dropout_p;
    uint64_t seed;

    bool backward_alone; /* the mistake is in the backward; out and lse are right */
    bool no_delta, no_dlse, no_softcap_derivative, dv_unnormalized;
    double dq_factor, dk_factor;
    int64_t only_member;    /* dk and dv have the part of only this query head of a group; -1: they have all parts */
    int64_t only_last_tile; /* dq has the part of only the last tile of so many keys; 0: it has all parts */
    int64_t only_last_rows; /* that tile is the last one that any of so many rows sees; 0: it is the sequence's last */

    uint64_t swapped;     /* the caller's tensors (bits of attn_tensor_id) that are read in the other layout */
    bool swapped_problem; /* the problem is read in the other layout: attention runs over the heads */
} variation;

/* Does the variation round the sums that make out and gradients? */
static inline bool variation_rounds_sums(const variation *v)
{
    return v->rounding == ROUND_SUMS || v->rounding == ROUND_SUMS_BUT_QK;
}

/* Returns the variation without a mistake. */
variation variation_of(const attn_problem *p);

/* variation_head_of() returns the key/value head that query head h reads. variation_member_of() returns the n-th query
 * head that reads key/value head hk. */
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
