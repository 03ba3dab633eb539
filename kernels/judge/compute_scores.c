/* compute_scores.c: scores, dropout and softmax of rows of queries. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/judge/compute_internal.h"
#include "kernels/philox.h"

/* ---- The scores of a row ----------------------------------------------------------------------------------------- */

attn_range compute_keys_of(const struct compute *c, const variation *v, int64_t i)
{
    const attn_sequence *const s = &c->s;
    const int64_t aligned = i + attn_align(&v->g, s) + (v->g.top_left ? 0 : c->shift),
                  right = v->g.right + v->more_right;
    attn_range keys;
    keys.lo = attn_clamp64(aligned - v->g.left, 0, s->Sk);
    keys.hi = attn_clamp64(aligned + right + 1, keys.lo, s->Sk);
    return keys;
}

/* Returns the keys that a kernel skips for row i because of the mistake v->drop: one tile, or none. `keys` are the keys
 * that causal and window let row i see. */
static attn_range dropped_of(const variation *v, const attn_sequence *s, attn_range keys)
{
    attn_range out = { 0, 0 };
    const int64_t tile = v->tile;
    switch (v->drop) {
    case DROP_NOTHING: return out;
    case DROP_LAST: out.lo = s->Sk > 0 ? (s->Sk - 1) / tile * tile : 0, out.hi = s->Sk; return out;
    case DROP_FIRST: out.hi = tile; return out;
    case DROP_LAST_SEEN: out.lo = keys.hi > 0 ? (keys.hi - 1) / tile * tile : 0, out.hi = s->Sk; return out;
    case DROP_FIRST_SEEN: out.hi = (keys.lo / tile + 1) * tile; return out;
    }
    return out;
}

/* Sets z to -inf for each of `keys` that keep_mask, bias or FlashMask hides from row i. */
static void hide_masked(const struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, attn_range keys,
                        double *z)
{
    const attn_geometry *const g = &v->g;
    const attn_view *const keep = &g->view[ATTN_T_keep_mask], *const bias = &g->view[ATTN_T_bias],
                           *const rows = &g->view[ATTN_T_mask_startend_rows];
    if (keep->data) {
        const int64_t from = attn_keep_from(g, &c->s), at = attn_at(keep, b, h, i);
        for (int64_t j = attn_max64(keys.lo, from); j < keys.hi; j++)
            if ((attn_load(keep->dtype, keep->data, at + j - from) == 0) != v->keep_inverted) z[j] = -INFINITY;
    }
    if (bias->data) {
        const int64_t at = attn_at(bias, b, h, i);
        for (int64_t j = keys.lo; j < keys.hi; j++)
            if (attn_load(bias->dtype, bias->data, at + j) == -INFINITY) z[j] = -INFINITY;
    }
    if (rows->data)
        for (int64_t j = keys.lo; j < keys.hi; j++) {
            const int32_t *const bounds = (const int32_t *)rows->data + attn_at(rows, b, h / g->mask_group, j);
            if (attn_mask_hides(attn_mask_of(bounds, g->mask_bounds, g->causal, g->dims.Sq), i) !=
                (v->keep_inverted && !keep->data))
                z[j] = -INFINITY;
        }
}

static double saturated(double z)
{
    return z > FLT_MAX ? FLT_MAX : z < -FLT_MAX ? -FLT_MAX : z;
}

/* Returns the score of a query and a key whose product q.k is `dot`. *slope becomes the derivative of softcap at this
 * score. */
static double score(const variation *v, double dot, double bias, double distance, double *slope)
{
    const double cap = v->g.softcap, scale = v->g.scale;
    *slope = 1;
    if (v->rounding == ROUND_SCORES) dot = compute_rounded(v->round_dtype, dot);
    if (v->bias_first) dot += bias;
    double s = v->softcap_first ? dot : scale * dot;
    if (v->rounding == ROUND_SCALED_SCORES) s = compute_rounded(v->round_dtype, s);
    if (cap > 0) {
        const double t = tanh(s / cap);
        *slope = 1 - t * t;
        s = cap * t;
    }
    if (v->softcap_first) s *= scale;
    if (!v->bias_first) s += bias;
    s -= distance;
    if (v->rounding == ROUND_FINAL_SCORES) s = compute_rounded(v->round_dtype, s);
    return saturated(s);
}

void compute_scores(struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, int64_t r)
{
    const attn_geometry *const g = &v->g;
    const attn_view *const bias = &g->view[ATTN_T_bias], *const slopes = &g->view[ATTN_T_alibi_slopes];
    const bool backward = c->p->op == ATTN_OP_BACKWARD;
    const bool plain = !bias->data && !slopes->data && !(g->softcap > 0) && v->rounding != ROUND_SCORES &&
                       v->rounding != ROUND_SCALED_SCORES && v->rounding != ROUND_FINAL_SCORES;
    double *const z = c->z + r * c->keys, *const slope = backward ? c->slope + r * c->keys : NULL, unused;
    const attn_range seen = i < c->s.Sq ? compute_keys_of(c, v, i) : (attn_range){ 0, 0 };
    const int64_t lo = attn_clamp64(seen.lo, c->lo, c->hi);
    const attn_range keys = { lo, attn_clamp64(seen.hi, lo, c->hi) };
    const int64_t bias_at = bias->data ? attn_at(bias, b, h, i) : 0;
    const double alibi = slopes->data
                             ? v->alibi_factor * attn_load(slopes->dtype, slopes->data, attn_at(slopes, b, h, 0))
                             : 0;
    const int64_t corner = i + (v->alibi_corner ? 0 : c->s.Sk - c->s.Sq + c->shift);
    for (int64_t j = c->lo; j < keys.lo; j++) z[j] = -INFINITY;
    for (int64_t j = keys.hi; j < c->lo + compute_padded(c->hi - c->lo); j++) z[j] = -INFINITY;
    if (plain)
        for (int64_t j = keys.lo; j < keys.hi; j++) z[j] = saturated(g->scale * z[j]);
    else
        for (int64_t j = keys.lo; j < keys.hi; j++) {
            const double add = bias->data ? v->bias_factor * attn_load(bias->dtype, bias->data, bias_at + j) : 0;
            z[j] = score(v, z[j], add, alibi * fabs((double)(corner - j)), slope ? slope + j : &unused);
        }
    if (plain && slope)
        for (int64_t j = keys.lo; j < keys.hi; j++) slope[j] = 1;
    hide_masked(c, v, b, h, i, keys, z);
    if (v->drop != DROP_NOTHING) {
        const attn_range gone = dropped_of(v, &c->s, seen);
        for (int64_t j = attn_max64(gone.lo, c->lo); j < attn_min64(gone.hi, c->hi); j++) z[j] = -INFINITY;
    }
}

void compute_dropout(const struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, double *M)
{
    const uint32_t threshold = attn_dropout_threshold(v->dropout_p);
    const int64_t head = b * v->g.dims.H + h;
    const double once = 1 / (1 - v->dropout_p);
    const double kept = v->dropout == DROPOUT_UNSCALED ? 1 : v->dropout == DROPOUT_SCALED_TWICE ? once * once : once;
    if (v->dropout_p == 0 || v->dropout == DROPOUT_MISSING) {
        for (int64_t j = c->lo; j < c->hi; j++) M[j] = 1;
        return;
    }
    if (v->dropout == DROPOUT_TRANSPOSED) {
        for (int64_t j = c->lo; j < c->hi; j++) M[j] = attn_dropout_keep(v->seed, head, j, i, threshold) ? kept : 0;
        return;
    }
    for (int64_t group = c->lo / 8; group * 8 < c->hi; group++) {
        const attn_philox words = attn_dropout_words(v->seed, head, i, group);
        for (int half = 0; half < 8 && group * 8 + half < c->hi; half++)
            M[group * 8 + half] = attn_dropout_half(words, half) >= threshold ? kept : 0;
    }
}

double compute_sink(const variation *v, int64_t h)
{
    const attn_view *const sinks = &v->g.view[ATTN_T_sinks];
    return sinks->data ? attn_load(sinks->dtype, sinks->data, attn_at(sinks, 0, h, 0)) : -INFINITY;
}

/* ---- The softmax of a row ---------------------------------------------------------------------------------------- */

/* Returns the largest of `from` and the scores of keys lo to hi - 1, or NaN if one of these scores is NaN. */
static double largest(const double *z, int64_t lo, int64_t hi, double from)
{
    double top = from;
    for (int64_t j = lo; j < hi; j++) top = z[j] > top || isnan(z[j]) ? z[j] : top;
    return top;
}

static double exponentials(const double *z, int64_t lo, int64_t hi, double top, double *e)
{
    double sum = 0;
    for (int64_t j = lo; j < hi; j++) sum += e[j] = z[j] == -INFINITY ? 0 : exp(z[j] - top);
    return sum;
}

/* Computes the softmax weights P of a row with the mistake that running sums are not rescaled when a tile of keys
 * raises the row's maximum. variation.softmax says which sums are not rescaled. On entry, P has exp(z - top), where
 * `top` is the maximum of the whole row, and `sum` is the sum of P. */
static double not_rescaled(const struct compute *c, const variation *v, int64_t h, const double *z, double sum,
                           double *P)
{
    const int64_t tiles = attn_tiles(c->s.Sk, v->tile);
    double running = -INFINITY, other = 0;
    for (int64_t n = 0; n < tiles; n++) {
        const int64_t t = v->backwards ? tiles - 1 - n : n, lo = t * v->tile, hi = attn_min64(lo + v->tile, c->s.Sk);
        running = largest(z, lo, hi, running);
        for (int64_t j = lo; j < hi; j++) {
            const double e = z[j] == -INFINITY ? 0 : exp(z[j] - running);
            other += e;
            if (v->softmax != SOFTMAX_SUM_NOT_RESCALED) P[j] = e;
        }
    }
    if (compute_sink(v, h) > -INFINITY) other += v->sink_weight * exp(compute_sink(v, h) - running);
    return v->softmax == SOFTMAX_OUT_NOT_RESCALED ? sum : other;
}

/* Computes the mistake SOFTMAX_SPLITS_UNWEIGHTED: sets P to the weights that result if a kernel splits the keys and
 * averages the outs of the splits without weighting each out by its lse. */
static void unweighted(const struct compute *c, const variation *v, const double *z, double *P)
{
    const int64_t keys = attn_max64(1, attn_tiles(c->s.Sk, v->tile));
    int64_t seen = 0;
    for (int64_t lo = 0; lo < c->s.Sk; lo += keys) {
        const int64_t hi = attn_min64(lo + keys, c->s.Sk);
        const double top = largest(z, lo, hi, -INFINITY), sum = top == -INFINITY ? 0 : exponentials(z, lo, hi, top, P);
        if (top == -INFINITY) memset(P + lo, 0, (size_t)(hi - lo) * sizeof *P);
        else seen++;
        for (int64_t j = lo; j < hi && sum > 0; j++) P[j] /= sum;
    }
    const int64_t splits = v->over_all ? v->tile : seen;
    for (int64_t j = 0; j < c->s.Sk && splits > 0; j++) P[j] /= (double)splits;
}

/* Returns how many padding keys row i sees if the kernel has the mistake variation.tail: it counts the padding of the
 * last tile as keys of score 0. */
static int64_t tail_of(const struct compute *c, const variation *v, int64_t i)
{
    if (v->tail == 0 || c->s.Sk % v->tail == 0) return 0;
    const int64_t padding = v->tail - c->s.Sk % v->tail,
                  reach = i + attn_align(&v->g, &c->s) + v->g.right + 1 - c->s.Sk;
    return v->tail_is_hidden ? attn_clamp64(reach, 0, padding) : padding;
}

void compute_softmax(struct compute *c, const variation *v, int64_t h, int64_t i, int64_t r)
{
    const double *const z = c->z + r * c->keys;
    double *const P = c->P + r * c->keys;
    const double sink = compute_sink(v, h);
    const int64_t Sk = c->s.Sk, tail = i < c->s.Sq ? tail_of(c, v, i) : 0;
    const double seen = largest(z, 0, Sk, -INFINITY);
    double top = seen;
    if (v->sink_weight > 0 && sink > top) top = sink;
    if (tail > 0 && top < 0) top = 0;
    c->top[r] = top, c->rest[r] = 0;
    if (top == -INFINITY || i >= c->s.Sq) {
        memset(P, 0, (size_t)Sk * sizeof *P);
        c->top[r] = c->lse[r] = -INFINITY;
        if (i < c->s.Sq && v->empty_lse != EMPTY_RIGHT) c->lse[r] = v->empty_lse == EMPTY_NAN ? NAN : INFINITY;
        return;
    }
    double sum = exponentials(z, 0, Sk, top, P);
    if (sink > -INFINITY && v->sink_weight > 0) sum += v->sink_weight * exp(sink - top);
    if (tail > 0) sum += (double)tail * exp(0 - top);
    const double right = sum;
    if (v->softmax >= SOFTMAX_OUT_NOT_RESCALED && v->softmax <= SOFTMAX_NONE_RESCALED)
        sum = not_rescaled(c, v, h, z, sum, P);
    if (v->rounding == CUT_P)
        for (int64_t j = 0; j < Sk; j++) P[j] = compute_cut(v->round_dtype, P[j]);
    if (v->rounding == ROUND_TF32_ALL || v->rounding == CUT_TF32_ALL) compute_round_operand(v, true, P, Sk);
    if (v->softmax == SOFTMAX_SPLITS_UNWEIGHTED) unweighted(c, v, z, P);
    else {
        const double divisor = v->softmax == SOFTMAX_NOT_NORMALIZED ? 1 : v->softmax == SOFTMAX_RAW ? exp(-top) : sum;
        for (int64_t j = 0; j < Sk; j++) P[j] /= divisor;
    }
    c->rest[r] = log(v->softmax == SOFTMAX_OUT_NOT_RESCALED ? right : sum);
    c->lse[r] = (v->lse_without_max ? 0 : top) + c->rest[r];
}
