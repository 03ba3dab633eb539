/* verify_lse.h: sums a row's exp(score) in float64, with the given options and with others, on host and device.
 * verify_lse.c explains what the sums are for. */
#ifndef ATTN_VERIFY_LSE_H
#define ATTN_VERIFY_LSE_H

/* score.h tests this macro, so a file must include verify_lse.h before it includes score.h */
#define ATTN_SCORES_IN_DOUBLE

#include <float.h>
#include <math.h>

#include "attention.h"
#include "score.h"
#include "tiles.h"

/* The options that a client may have left out when it computed lse: one bit each. */
enum lse_part {
    /* LSE_PLACES stands for causal and window, the masks that depend on the positions of query and key */
    LSE_PLACES = 1,
    LSE_KEEP = 2,
    LSE_ROWS = 4,
    LSE_BIAS = 8,
    LSE_ALIBI = 16,
    LSE_SOFTCAP = 32,
    LSE_SINKS = 64,
    LSE_MASKS = LSE_PLACES | LSE_KEEP | LSE_ROWS | LSE_BIAS,
};

/* One way in which a client may have computed the scores: with the options as given, with some of them left out, or
 * with another scale. */
typedef struct lse_variant {
    double scale;
    unsigned without; /* set of the options that this variant leaves out: bits of enum lse_part */
    bool applies;     /* whether this variant is tested; it is not if an earlier variant gives the same scores */
} lse_variant;

typedef struct lse_variants {
    /* The ways in which the client may have computed lse. list[0] is the correct way, which leaves out no option of the
     * problem. */
    lse_variant list[ATTN_LSE_VARIANTS];
} lse_variants;

/* Two sums over the keys of a row, relative to the row's largest score `top`. `sum` is the sum of exp(z - top).
 * `size` is the same sum, with each term multiplied by the key's sqrt(sum_d (q_d k_d)^2). */
typedef struct lse_sum {
    double top, sum, size;
} lse_sum;

ATTN_HD lse_sum lse_sum_init(void)
{
    const lse_sum none = { -INFINITY, 0, 0 };
    return none;
}

/* Adds `other` to *s. Both are sums of exponentials of one row, over different keys. Infinite numbers and NaN make the
 * whole sum NaN; an empty sum adds nothing. */
ATTN_HD void lse_sum_join(lse_sum *s, lse_sum other)
{
    if (other.sum == 0) return;
    if (!(s->top >= other.top)) { /* the condition is also true where either sum's `top` is NaN */
        const lse_sum lower = *s;
        *s = other;
        other = lower;
    }
    const double weight = other.sum == 0 ? 0 : exp(other.top - s->top);
    s->sum += other.sum * weight;
    s->size += other.size * weight;
}

ATTN_HD void lse_sum_add(lse_sum *s, double z, double size)
{
    const lse_sum one = { z, z == z ? 1 : NAN, size };
    lse_sum_join(s, one);
}

ATTN_HD double lse_of(const lse_sum *s)
{
    return s->sum == 0 ? -INFINITY : s->top + log(s->sum);
}

ATTN_HD double lse_size_of(const lse_sum *s)
{
    return s->sum > 0 ? s->size / s->sum : 0;
}

/* Returns whether the masks let the query of `row` see key j. Masks in the set `without` are ignored. */
ATTN_HD bool lse_sees(const attn_geometry *g, const attn_sequence *s, const attn_lse_row *row, int64_t j,
                      unsigned without)
{
    const attn_view *const keep = &g->view[ATTN_T_keep_mask], *const bias = &g->view[ATTN_T_bias],
                           *const rows = &g->view[ATTN_T_mask_startend_rows];
    if (!(without & LSE_PLACES)) {
        const attn_range keys = attn_keys_of(g, s, row->i);
        if (j < keys.lo || j >= keys.hi) return false;
    }
    if (keep->data && !(without & LSE_KEEP)) {
        const int64_t column = j - attn_keep_from(g, s);
        if (column >= 0 && attn_load(keep->dtype, keep->data, attn_at(keep, row->b, row->h, row->i) + column) == 0)
            return false;
    }
    if (bias->data && !(without & LSE_BIAS) &&
        attn_load(bias->dtype, bias->data, attn_at(bias, row->b, row->h, row->i) + j) == -INFINITY)
        return false;
    if (rows->data && !(without & LSE_ROWS)) {
        const int32_t *const bounds = (const int32_t *)rows->data + attn_at(rows, row->b, row->h / g->mask_group, j);
        if (attn_mask_hides(attn_mask_of(bounds, g->mask_bounds, g->causal, g->dims.Sq), row->i)) return false;
    }
    return true;
}

/* Returns the product of the float8 scales of q and k for a row, by which q . k is multiplied; 1 where no scale is
 * given. */
ATTN_HD double lse_factor(const attn_geometry *g, const attn_lse_row *row)
{
    const attn_view *const q = &g->view[ATTN_T_q_scale], *const k = &g->view[ATTN_T_k_scale];
    const int64_t hk = row->h / g->group;
    return (q->data ? attn_load(q->dtype, q->data, attn_at(q, row->b, hk, 0)) : 1) *
           (k->data ? attn_load(k->dtype, k->data, attn_at(k, row->b, hk, 0)) : 1);
}

/* Returns the score z of a visible (query, key) pair from `dot` (q . k), computed as `variant` says. */
ATTN_HD double lse_score(const attn_geometry *g, const attn_score_options *options, const attn_sequence *s,
                         const attn_lse_row *row, int64_t j, double dot, const lse_variant *variant)
{
    const attn_view *const bias = &g->view[ATTN_T_bias], *const slopes = &g->view[ATTN_T_alibi_slopes];
    double derivative;
    double z = variant->scale * dot;
    if (!(variant->without & LSE_SOFTCAP)) z = attn_score_of(options, s, row->i, j, z, &derivative);
    if (bias->data && !(variant->without & LSE_BIAS))
        z += attn_load(bias->dtype, bias->data, attn_at(bias, row->b, row->h, row->i) + j);
    if (slopes->data && !(variant->without & LSE_ALIBI))
        z -= attn_load(slopes->dtype, slopes->data, attn_at(slopes, row->b, row->h, 0)) *
             fabs((double)(row->i + s->Sk - s->Sq - j));
    /* a NaN makes both comparisons false, and is returned */
    return z > FLT_MAX ? FLT_MAX : z < -FLT_MAX ? -FLT_MAX : z;
}

/* Adds the sink to the sum over all keys of a row. A sink of -inf adds nothing. */
ATTN_HD void lse_add_sink(const attn_geometry *g, const attn_lse_row *row, const lse_variant *variant, lse_sum *s)
{
    const attn_view *const sinks = &g->view[ATTN_T_sinks];
    if (!sinks->data || (variant->without & LSE_SINKS)) return;
    const double sink = attn_load(sinks->dtype, sinks->data, attn_at(sinks, 0, row->h, 0));
    if (sink != -INFINITY) lse_sum_add(s, sink, 0);
}

/* kernels/verify_lse.c */
#ifdef __cplusplus
extern "C" {
#endif

/* Returns the ways (variants) in which the client of a checked problem may have computed lse. The function reads no
 * memory of tensors. */
lse_variants lse_variants_of(const attn_problem *p);
/* For each row in `look` and each variant (way to compute the scores), computes lse and writes it to `found`. All
 * memory is on the host. The fake device of tests calls this function in place of a GPU's kernel. */
void lse_sum_rows(const attn_problem *p, const attn_lse_look *look, double *found);

#ifdef __cplusplus
}
#endif

#endif
