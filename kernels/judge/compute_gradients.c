/* compute_gradients.c: the backward of a tile of queries. */
#include <math.h>
#include <string.h>

#include "kernels/judge/compute_internal.h"

static void round_all(attn_dtype dtype, double *x, int64_t count)
{
    for (int64_t n = 0; n < count; n++) x[n] = compute_rounded(dtype, x[n]);
}

/* Rounds x to float32 if c->in_float is set. This imitates kernels that store x in float32 between two steps. */
static double kept(const struct compute *c, double x)
{
    return c->in_float ? (float)x : x;
}

/* Computes the weights P of row r, before dropout, from the row's lse = top + rest. P is 0 for hidden (masked) keys. */
static void probabilities(struct compute *c, int64_t r, double top, double rest)
{
    const double *const z = c->z + r * c->keys;
    double *const P = c->P + r * c->keys;
    for (int64_t j = c->lo; j < c->hi; j++)
        P[j] = z[j] == -INFINITY || top == -INFINITY ? 0 : kept(c, exp(kept(c, z[j] - top) - rest));
}

/* Adds what row r contributes to dbias, dslopes and dsinks. `dZ` is the gradient with respect to the row's scores. */
static void add_sums(const struct compute *c, const variation *v, const struct compute_sums *sums, int64_t b, int64_t h,
                     int64_t i, int64_t r, const double *dZ)
{
    const attn_geometry *const g = &v->g;
    if (sums->dbias) {
        double *const to = sums->dbias + attn_at(&g->view[ATTN_T_dbias], b, h, i);
        for (int64_t j = c->lo; j < c->hi; j++) to[j] = kept(c, to[j] + dZ[j]);
    }
    if (sums->dslopes) {
        const int64_t corner = i + (v->alibi_corner ? 0 : c->s.Sk - c->s.Sq + c->shift);
        double sum = 0;
        for (int64_t j = c->lo; j < c->hi; j++)
            if (dZ[j] != 0) sum = kept(c, sum + dZ[j] * fabs((double)(corner - j)));
        double *const to = &sums->dslopes[attn_at(&g->view[ATTN_T_dalibi_slopes], b, h, 0)];
        *to = kept(c, *to - v->alibi_factor * sum);
    }
    if (sums->dsinks && c->top[r] != -INFINITY) {
        const double weight = kept(c, exp(compute_sink(v, h) - c->top[r] - c->rest[r]));
        sums->dsinks[h] = kept(c, sums->dsinks[h] - v->sink_weight * weight * c->delta[r]);
    }
}

void compute_row_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                           const struct compute_sums *sums, int64_t r)
{
    const attn_dims *const d = &v->g.dims;
    const attn_view *const dlse = &v->g.view[ATTN_T_dlse];
    const int64_t i = compute_row_of(v, rows, r);
    double *const P = c->P + r * c->keys, *const M = c->M + r * c->keys, *const dP = c->dP + r * c->keys,
                  *const slope = c->slope + r * c->keys, *const z = c->z + r * c->keys;
    double delta = 0;
    probabilities(c, r, c->top[r], c->rest[r]);
    /* In a row that sees one key, delta = sum dO * out equals dP. A kernel rounds the two differently, so their
     * difference is not exactly 0. An emulation (in_float) imitates this: it adds up delta from the last term to the
     * first. */
    for (int64_t n = 0; n < d->Dv && !v->no_delta; n++) {
        const int64_t e = r * c->Dv + (c->in_float ? d->Dv - 1 - n : n);
        delta = kept(c, delta + c->dO[e] * c->out[e]);
    }
    if (i < c->s.Sq && dlse->data && !v->no_dlse)
        delta -= attn_load(dlse->dtype, dlse->data, attn_at(dlse, rows->b, rows->h, c->s.q_start + i));
    c->delta[r] = delta = kept(c, delta);
    for (int64_t j = c->lo; j < c->hi; j++) {
        const bool hidden = z[j] == -INFINITY || c->top[r] == -INFINITY;
        dP[j] = hidden ? 0 : kept(c, P[j] * kept(c, M[j] * dP[j] - delta));
    }
    add_sums(c, v, sums, rows->b, rows->h, i, r, dP);
    for (int64_t j = c->lo; j < c->hi; j++) {
        if (!v->no_softcap_derivative && dP[j] != 0) dP[j] *= slope[j];
        P[j] *= M[j];
    }
    if (v->dv_unnormalized && c->top[r] != -INFINITY) {
        const double factor = exp(c->rest[r]);
        for (int64_t j = c->lo; j < c->hi; j++) P[j] *= factor;
    }
}

/* Returns the tile of keys over which a kernel with the mistake `only_last_tile` sums dq of row i. */
static attn_range only_tile(const struct compute *c, const variation *v, int64_t i)
{
    const int64_t tile = v->only_last_tile, rows = v->only_last_rows;
    const int64_t from = rows > 0 ? i / rows * rows : 0;
    const attn_range first = compute_keys_of(c, v, from),
                     last = compute_keys_of(c, v, attn_min64(from + rows, c->s.Sq) - 1);
    attn_range keys = { rows > 0 ? first.lo : 0, rows > 0 ? attn_max64(first.lo, last.hi) : c->s.Sk };
    if (v->backwards) return (attn_range){ keys.lo / tile * tile, attn_min64((keys.lo / tile + 1) * tile, c->s.Sk) };
    keys.lo = keys.hi > 0 ? (keys.hi - 1) / tile * tile : 0;
    keys.hi = attn_min64(keys.lo + tile, c->s.Sk);
    return keys;
}

static void gradient_of_queries(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const attn_dims *const d = &v->g.dims;
    const int64_t count = rows->count;
    double *const some = c->M; /* scratch memory: the dropout factors in this array are no longer needed */
    memset(c->dq, 0, (size_t)(count * c->D) * sizeof *c->dq);
    if (v->only_last_tile > 0) {
        memset(some, 0, (size_t)(count * c->keys) * sizeof *some);
        for (int64_t r = 0; r < count; r++) {
            const attn_range keys = only_tile(c, v, compute_row_of(v, rows, r));
            for (int64_t j = keys.lo; j < keys.hi; j++) some[r * c->keys + j] = c->dP[r * c->keys + j];
        }
    }
    if (variation_rounds_sums(v) && !c->strange)
        compute_rounded_product(c, v, count, compute_padded(d->D), c->s.Sk, c->dP, c->keys, c->K, c->D, c->dq, c->D);
    else compute_times_keys(c, count, d->D, v->only_last_tile > 0 ? some : c->dP, c->K, c->D, c->dq);
    for (int64_t n = 0; n < count * c->D; n++) c->dq[n] *= v->g.scale * v->dq_factor;
    if (v->rounding == CUT_RESULTS)
        for (int64_t n = 0; n < count * c->D; n++) c->dq[n] = compute_cut(v->round_dtype, c->dq[n]);
}

void compute_load_gradients(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    compute_load_existing(c, v, rows, &v->g.view[ATTN_T_dout], 1, 1, v->g.dims.Dv, c->Dv, c->dO);
    compute_round_operand(v, true, c->dO, rows->count * c->Dv);
}

void compute_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums, enum compute_wanted wanted)
{
    const attn_dims *const d = &v->g.dims;
    const int64_t count = rows->count, some = c->hi - c->lo, member = rows->h % v->g.group;
    const bool counts = v->only_member < 0 || v->only_member == member;
    double *const P = c->P + c->lo, *const dP = c->dP + c->lo;
    compute_load_gradients(c, v, rows);
    for (int64_t r = 0; r < count; r++) memset(dP + r * c->keys, 0, (size_t)compute_padded(some) * sizeof *dP);
    c->products->in_double(count, compute_padded(some), d->Dv, c->dO, c->Dv, 1, c->VT + c->lo, c->keys, dP, c->keys);
    for (int64_t r = 0; r < count; r++) {
        compute_row_gradients(c, v, rows, sums, r);
        compute_round_operand(v, true, P + r * c->keys, some);
        compute_round_operand(v, true, dP + r * c->keys, some);
    }
    if (wanted & COMPUTE_DK_DV && counts) {
        compute_add_to_keys(c, count, d->Dv, c->P, c->dO, c->Dv, c->dV);
        for (int64_t n = 0; n < count * c->D; n++) c->Q[n] *= v->g.scale * v->dk_factor;
        compute_add_to_keys(c, count, d->D, c->dP, c->Q, c->D, c->dK);
        if (variation_rounds_sums(v)) {
            round_all(v->round_dtype, c->dK + c->lo * c->D, some * c->D);
            round_all(v->round_dtype, c->dV + c->lo * c->Dv, some * c->Dv);
        }
    }
    if (wanted & COMPUTE_DQ) gradient_of_queries(c, v, rows);
}
