/* exact.c: rows whose numbers leave what vectors of float32 can work with, one by one, in double.
 *
 * Everywhere else scores are kept in base 2 and float32, where a score of 2.4e38 has become infinite, and O is a sum of
 * P V that is divided at the end, where the sum of a few values of 1e38 has. Such rows are seldom, so nothing in the
 * loops looks for them: finish() (forward.c) and load_statistics() (backward.c) see them by their maximum, their sum,
 * their lse or their O. This file then computes the row anew from the tensors, by the definition (kernels/README.md), a
 * key after the other.
 *
 * lse is kept in two parts, for beside a score of 1e38 a double has lost the logarithm of a sum, and P = exp(z - lse)
 * would be 1 for each key. A backward keeps them by row (flash.exact), with NaN in lse2 as the mark. */
#include <float.h>
#include <math.h>

#include "kernels/cpu/flash.h"
#include "kernels/philox.h"
#include "kernels/score.h"

enum { LANES = 8 }; /* sums of a dot product beside each other, for the compiler's vectors */

/* A query of one head. */
struct row {
    const struct flash *f;
    const attn_sequence *s;
    int64_t b, h, hk, i;
    attn_range keys;
    double scale, slope;
    attn_score_options options;
    float q[ATTN_MAX_HEAD_DIM];
};

static void open_row(struct row *row, const struct flash *f, int64_t b, int64_t h, int64_t i)
{
    const attn_view *q = &f->g.view[ATTN_T_q];
    row->f = f;
    row->s = &f->seq[b].s;
    row->b = b, row->h = h, row->hk = h / f->g.group, row->i = i;
    row->keys = attn_keys_of(&f->g, row->s, i);
    row->scale = flash_scale(f, b, row->hk);
    row->options = attn_score_options_of(&f->g);
    row->slope = f->p->alibi_slopes.rank ? *(const float *)flash_at(&f->g.view[ATTN_T_alibi_slopes], b, h, 0) : 0;
    f->simd->load(f->g.dims.D, flash_at(q, b, h, row->s->q_start + i), q->dtype, row->q);
}

static double bias_of(const struct row *row, int64_t j)
{
    const attn_view *bias = &row->f->g.view[ATTN_T_bias];
    return attn_load(bias->dtype, flash_at(bias, row->b, row->h, row->i), j);
}

/* Does the query see key j? */
static bool sees(const struct row *row, int64_t j)
{
    const struct flash *f = row->f;
    const attn_view *keep = &f->g.view[ATTN_T_keep_mask], *bounds = &f->g.view[ATTN_T_mask_startend_rows];
    if (j < row->keys.lo || j >= row->keys.hi) return false;
    const int64_t column = j - attn_keep_from(&f->g, row->s);
    if (f->p->keep_mask.rank && column >= 0 && !((const uint8_t *)flash_at(keep, row->b, row->h, row->i))[column])
        return false;
    if (f->p->bias.rank && bias_of(row, j) == -INFINITY) return false;
    return !f->mask_heads || !attn_mask_hides(attn_mask_of(flash_at(bounds, row->b, row->h / f->g.mask_group, j),
                                                           f->g.mask_bounds, f->g.causal, row->s->Sq),
                                              row->i);
}

/* z of a key that is seen. *derivative: of z by scale q.k, see score.h. */
static double score_of(const struct row *row, int64_t j, double *derivative)
{
    const struct flash *f = row->f;
    const attn_view *k = &f->g.view[ATTN_T_k];
    const int64_t D = f->g.dims.D;
    float key[ATTN_MAX_HEAD_DIM];
    double sum[LANES] = { 0 }, z = 0;
    f->simd->load(D, flash_key_at(f, k, row->b, row->hk, row->s->k_start + j), k->dtype, key);
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES)
        for (int n = 0; n < LANES; n++) sum[n] += (double)row->q[d + n] * key[d + n];
    for (; d < D; d++) z += (double)row->q[d] * key[d];
    for (int n = 0; n < LANES; n++) z += sum[n];
    z = attn_score_of(&row->options, row->s, row->i, j, z * row->scale, derivative);
    if (f->p->bias.rank) z += bias_of(row, j);
    z -= row->slope * fabs((double)(row->i + row->s->Sk - row->s->Sq - j));
    return z > FLT_MAX ? FLT_MAX : z < -FLT_MAX ? -FLT_MAX : z; /* NaN stays */
}

struct flash_lse flash_exact_row(const struct flash *f, int64_t b, int64_t h, int64_t i, double *out)
{
    const attn_view *v = &f->g.view[ATTN_T_v];
    const int64_t Dv = f->g.dims.Dv;
    struct row row;
    float value[ATTN_MAX_HEAD_DIM];
    double top = f->p->sinks.rank ? *(const float *)flash_at(&f->g.view[ATTN_T_sinks], 0, h, 0) : -INFINITY;
    double sum = top > -INFINITY ? 1 : 0, derivative;
    open_row(&row, f, b, h, i);
    for (int64_t d = 0; d < Dv; d++) out[d] = 0;
    for (int64_t j = row.keys.lo; j < row.keys.hi; j++) {
        if (!sees(&row, j)) continue;
        const double z = score_of(&row, j, &derivative);
        if (z != z) { /* all of the row is NaN, whatever comes */
            for (int64_t d = 0; d < Dv; d++) out[d] = NAN;
            return (struct flash_lse){ NAN, 0 };
        }
        if (z > top) {
            const double rescale = top > -INFINITY ? exp(top - z) : 0;
            sum *= rescale;
            for (int64_t d = 0; d < Dv; d++) out[d] *= rescale;
            top = z;
        }
        double P = exp(z - top);
        sum += P;
        if (f->dropout)
            P = attn_dropout_keep(f->p->seed, b * f->g.dims.H + h, i, j, f->drop_threshold) ? P / (1 - f->p->dropout_p)
                                                                                            : 0;
        f->simd->load(Dv, flash_key_at(f, v, b, row.hk, row.s->k_start + j), v->dtype, value);
        for (int64_t d = 0; d < Dv; d++) out[d] += P * value[d];
    }
    const double v_scale = f->p->v_scale.rank ? *(const float *)flash_at(&f->g.view[ATTN_T_v_scale], b, row.hk, 0) : 1;
    for (int64_t d = 0; d < Dv; d++) out[d] = sum > 0 ? out[d] / sum * v_scale : 0;
    return (struct flash_lse){ top, sum > 0 ? log(sum) : 0 };
}

void flash_exact_scores(const struct flash *f, const struct flash_tile *t, int r, int64_t j, int cols,
                        struct flash_lse lse, double c, float *S, float *cap)
{
    struct row row;
    open_row(&row, f, t->b, t->h + r / t->n, t->i0 + r % t->n);
    for (int x = 0; x < cols; x++) {
        double derivative = 1;
        S[x] = sees(&row, j + x) ? (float)((score_of(&row, j + x, &derivative) - lse.top - lse.rest) / c) : -INFINITY;
        if (cap) cap[x] = (float)derivative;
    }
}
