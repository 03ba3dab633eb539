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

/* Keys that a row does not see though it should: one tile of them. */
enum variation_drop {
    DROP_NOTHING,
    DROP_LAST,      /* the last tile of the sequence */
    DROP_FIRST,     /* the first one */
    DROP_LAST_SEEN, /* the last tile of those that the row may see by its place */
    DROP_FIRST_SEEN,
};

/* What goes wrong in a softmax that is computed tile by tile. */
enum variation_softmax {
    SOFTMAX_RIGHT,
    SOFTMAX_OUT_NOT_RESCALED,  /* the row of out is not rescaled where the maximum grows */
    SOFTMAX_SUM_NOT_RESCALED,  /* the sum is not */
    SOFTMAX_NONE_RESCALED,     /* neither is */
    SOFTMAX_SPLITS_UNWEIGHTED, /* results of the splits are averaged */
    SOFTMAX_NOT_NORMALIZED,    /* out is not divided by the sum of exp(z - max) */
    SOFTMAX_RAW,               /* nor by that of exp(z) */
};

enum variation_empty { EMPTY_RIGHT, EMPTY_INFINITE, EMPTY_NAN };

/* How a number is rounded where exact arithmetic would not. */
enum variation_rounding {
    ROUND_NOTHING,
    ROUND_SCORES,        /* q.k to round_dtype */
    ROUND_SCALED_SCORES, /* scale q.k to it */
    ROUND_FINAL_SCORES,  /* the score after bias and ALiBi */
    ROUND_SUMS,          /* the sums of P V and of q.k to it after every `tile` terms */
    ROUND_TF32,          /* q and k to 10 bits behind the point */
    ROUND_TF32_ALL,      /* P and v too */
    CUT_TF32,            /* as ROUND_TF32, by cutting */
    CUT_TF32_ALL,
    CUT_OUT, /* results are cut to their dtype */
    CUT_P,   /* P is cut to q's dtype */
};

enum variation_dropout {
    DROPOUT_RIGHT,
    DROPOUT_MISSING,      /* nothing is dropped */
    DROPOUT_UNSCALED,     /* what is kept is not divided by 1 - p */
    DROPOUT_SCALED_TWICE, /* or twice */
    DROPOUT_TRANSPOSED,   /* element (j, i) decides about (i, j) */
};

typedef struct variation {
    attn_geometry g;                      /* where the tensors are, scale, softcap and what hides pairs */
    int64_t q_column, k_column, v_column; /* strides of the columns */

    bool softcap_first, bias_first; /* before the scale */
    double bias_factor, alibi_factor;
    bool alibi_corner; /* ALiBi counts from the other corner */

    int64_t more_right; /* added to the last key that causal lets a row see */
    bool keep_inverted, one_sequence;
    bool padding_kept; /* keys behind seqlens_k are seen, but places are counted without them */
    enum variation_heads heads;
    enum variation_drop drop;
    enum variation_softmax softmax;
    int64_t tile;        /* keys of a tile, number of splits, or terms of a sum */
    bool backwards;      /* tiles from the last to the first */
    bool over_all;       /* the average is over all splits, also those that the row does not see */
    int64_t tail;        /* keys of a tile whose padding counts as score 0; 0: none */
    bool tail_is_hidden; /* from rows that do not reach that far */
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
    int64_t only_member;    /* dk and dv of this query head of a group; -1: of all */
    int64_t only_last_tile; /* dq of the last tile of so many keys; 0: of all */
    int64_t only_last_rows; /* the last that any row of a tile of so many rows may see; 0: the last of the sequence */

    uint64_t swapped;     /* the caller's tensors (bits of attn_tensor_id) that are read in the other layout */
    bool swapped_problem; /* the whole problem is: attention runs over the heads */
} variation;

/* What is right. */
variation variation_of(const attn_problem *p);

/* The key/value head of a query head, and the n-th query head of a key/value head. */
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
