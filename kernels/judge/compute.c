/* compute.c: attention in float64 as a variation says. See compute.h.
 *
 * Memory has all scores of a row at once. A mistake in a kernel's loop over tiles therefore takes a few lines here.
 *
 * Invariants
 * 1. With variation_of() the results are those of kernels/README.md; tests compare them with the textbook loops of
 *    kernels/cpu/reference.c.
 * 2. A hidden pair has a score of -inf and a weight of 0. Where a number of the tile is not finite, hidden pairs are
 *    left out of all products, because 0 times NaN is NaN.
 * 3. lse is stored as two numbers, the maximum and the rest, because a double of 1e38 has no digit for the rest. */
#include "kernels/judge/compute.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/philox.h"

#define DOUBLES(n) (((n) + 7) / 8 * 8)

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

static int64_t padded(int64_t n)
{
    const int64_t width = PRODUCTS_WIDTH;
    return (n + width - 1) / width * width + (n == 0 ? width : 0);
}

/* Lays out `a` times `b` doubles at *used in `memory` and advances *used. With memory NULL it only counts the bytes. */
static void take(char *memory, int64_t *used, double **piece, int64_t a, int64_t b)
{
    *piece = memory ? (double *)(void *)(memory + *used) : NULL;
    *used += (DOUBLES(a * b) + 8) * (int64_t)sizeof(double);
}

static int64_t lay_out(struct compute *c, char *memory)
{
    const bool backward = c->p->op == ATTN_OP_BACKWARD;
    const int64_t lines = c->most_keys + 1, more = backward ? lines : 0, tile = c->tile,
                  more_tile = backward ? tile : 0;
    int64_t used = 0;
    take(memory, &used, &c->KT, c->D, c->keys);
    take(memory, &used, &c->V, lines, c->Dv);
    take(memory, &used, &c->K, more, c->D);
    take(memory, &used, &c->VT, backward ? c->Dv : 0, c->keys);
    take(memory, &used, &c->dK, more, c->D);
    take(memory, &used, &c->dV, more, c->Dv);
    take(memory, &used, &c->z, tile, c->keys);
    take(memory, &used, &c->P, tile, c->keys);
    take(memory, &used, &c->M, tile, c->keys);
    take(memory, &used, &c->slope, more_tile, c->keys);
    take(memory, &used, &c->dP, more_tile, c->keys);
    take(memory, &used, &c->Q, tile, c->D);
    take(memory, &used, &c->dO, more_tile, c->Dv);
    take(memory, &used, &c->out, tile, c->Dv);
    take(memory, &used, &c->dq, more_tile, c->D);
    take(memory, &used, &c->lse, tile, 1);
    take(memory, &used, &c->top, tile, 1);
    take(memory, &used, &c->rest, tile, 1);
    take(memory, &used, &c->delta, tile, 1);
    return used;
}

/* Returns the largest number of keys that a row can see under any variation. */
static int64_t keys_of_problem(const attn_problem *p, const attn_dims *d)
{
    const attn_geometry g = attn_geometry_of(p);
    int64_t most = 0;
    if (!attn_keys_are_packed(d)) return d->Sk;
    if (d->total_k <= COMPUTE_MIXED_KEYS) return d->total_k;
    for (int64_t b = 0; b < d->B; b++) most = attn_max64(most, attn_room_of(g.cu_k, d->Sk, b));
    return most;
}

static void size_up(struct compute *c, const attn_problem *p, int64_t tile)
{
    const attn_dims d = attn_dims_of(p);
    *c = (struct compute){ .products = products_best(), .p = p, .tile = tile };
    c->most_keys = keys_of_problem(p, &d);
    c->D = padded(d.D);
    c->Dv = padded(d.Dv);
    c->keys = padded(c->most_keys);
}

int64_t compute_bytes(const attn_problem *p, int64_t tile)
{
    struct compute c;
    size_up(&c, p, tile);
    return lay_out(&c, NULL) + PRODUCTS_ALIGNMENT;
}

bool compute_open(struct compute *c, const attn_problem *p, int64_t tile)
{
    size_up(c, p, tile);
    const int64_t bytes = lay_out(c, NULL);
    c->memory = aligned_alloc(PRODUCTS_ALIGNMENT, (size_t)bytes);
    if (c->memory == NULL) return false;
    memset(c->memory, 0, (size_t)bytes);
    lay_out(c, c->memory);
    return true;
}

void compute_close(struct compute *c)
{
    free(c->memory);
    c->memory = NULL;
}

/* ---- The right variation ----------------------------------------------------------------------------------------- */

variation variation_of(const attn_problem *p)
{
    variation v = { .g = attn_geometry_of(p), .q_column = 1, .k_column = 1, .v_column = 1 };
    v.bias_factor = v.alibi_factor = v.lse_factor = v.dq_factor = v.dk_factor = v.sink_weight = 1;
    v.dropout_p = p->dropout_p;
    v.seed = p->seed;
    v.only_member = -1;
    return v;
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

double compute_rounded(attn_dtype dtype, double x)
{
    switch (dtype) {
    case ATTN_F32: return (float)x;
    case ATTN_F16: return attn_f16_to_f32(attn_f16_from_double(x));
    case ATTN_BF16: return attn_bf16_to_f32(attn_bf16_from_double(x));
    case ATTN_F8E4M3: return attn_e4m3_to_f32(attn_e4m3_from_double(x));
    default: return x;
    }
}

/* Rounds x towards 0 to a number with as many bits as the dtype has. */
static double cut(attn_dtype dtype, double x)
{
    static const int bits[ATTN_DTYPE_COUNT] = { [ATTN_F32] = 23, [ATTN_F16] = 10, [ATTN_BF16] = 7, [ATTN_F8E4M3] = 3 };
    uint64_t word;
    memcpy(&word, &x, sizeof word);
    if (!isfinite(x)) return x;
    word &= ~((UINT64_C(1) << (52 - bits[dtype])) - 1);
    memcpy(&x, &word, sizeof x);
    return x;
}

/* Rounds x to 10 bits behind the point, as TF32 has. cuts: rounds towards 0, not to the nearest. */
static double to_tf32(double x, bool cuts)
{
    uint64_t word;
    if (!isfinite(x)) return x;
    memcpy(&word, &x, sizeof word);
    if (!cuts) word += UINT64_C(1) << 41;
    word &= ~((UINT64_C(1) << 42) - 1);
    memcpy(&x, &word, sizeof x);
    return x;
}

static void round_operand(const variation *v, bool of_values, double *x, int64_t count)
{
    const bool all = v->rounding == ROUND_TF32_ALL || v->rounding == CUT_TF32_ALL;
    const bool cuts = v->rounding == CUT_TF32 || v->rounding == CUT_TF32_ALL;
    if (!all && (of_values || (v->rounding != ROUND_TF32 && v->rounding != CUT_TF32))) return;
    for (int64_t n = 0; n < count; n++) x[n] = to_tf32(x[n], cuts);
}

/* ---- Loading ----------------------------------------------------------------------------------------------------- */

static void load_rows(const attn_view *view, int64_t column, double factor, int64_t b, int64_t h, int64_t row,
                      int64_t count, int64_t columns, int64_t ld, double *to)
{
    for (int64_t r = 0; r < count; r++) {
        const int64_t at = attn_at(view, b, h, row + r);
        for (int64_t d = 0; d < columns; d++)
            to[r * ld + d] = factor * attn_load(view->dtype, view->data, at + d * column);
    }
}

static double scale_of(const variation *v, attn_tensor_id id, int64_t b, int64_t hk)
{
    const attn_view *const view = &v->g.view[id];
    return view->data ? attn_load(view->dtype, view->data, attn_at(view, b, hk, 0)) : 1;
}

/* Returns sequence b, or the one sequence of all packed rows where the variation mixes sequences. */
static attn_sequence sequence_of(const variation *v, int64_t b)
{
    attn_sequence s = attn_sequence_of(&v->g, v->one_sequence ? 0 : b);
    if (v->one_sequence) s = (attn_sequence){ 0, 0, v->g.dims.total_q, v->g.dims.total_k };
    return s;
}

static bool are_finite(const double *x, int64_t count)
{
    double sum = 0;
    for (int64_t n = 0; n < count; n++) sum += x[n] - x[n];
    return sum == 0;
}

static void transpose(const double *from, int64_t rows, int64_t columns, int64_t ld, double *to, int64_t ld_to)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < columns; d++) to[d * ld_to + r] = from[r * ld + d];
}

void compute_keys(struct compute *c, const variation *v, int64_t b, int64_t hk)
{
    const attn_dims *const d = &v->g.dims;
    const bool backward = c->p->op == ATTN_OP_BACKWARD;
    const double k_scale = scale_of(v, ATTN_T_k_scale, b, hk), v_scale = scale_of(v, ATTN_T_v_scale, b, hk);
    const attn_view *const k = &v->g.view[ATTN_T_k], *const values = &v->g.view[ATTN_T_v];
    c->b = b, c->hk = hk;
    c->s = sequence_of(v, b);
    c->shift = v->padding_kept && c->p->seqlens_k.rank ? ((const int32_t *)c->p->seqlens_k.data)[b] - c->s.Sk : 0;
    bool finite = true;
    for (int64_t j = 0; j < c->s.Sk; j++) {
        double row[ATTN_MAX_HEAD_DIM];
        const int64_t line = c->s.k_start + j;
        const int64_t at = attn_key_at(&v->g, k, b, hk, line), at_value = attn_key_at(&v->g, values, b, hk, line);
        for (int64_t i = 0; i < d->D; i++) row[i] = k_scale * attn_load(k->dtype, k->data, at + i * v->k_column);
        round_operand(v, false, row, d->D);
        finite = finite && are_finite(row, d->D);
        for (int64_t i = 0; i < d->D; i++) c->KT[i * c->keys + j] = row[i];
        if (backward) memcpy(c->K + j * c->D, row, (size_t)d->D * sizeof *row);
        for (int64_t e = 0; e < d->Dv; e++)
            c->V[j * c->Dv + e] = v_scale * attn_load(values->dtype, values->data, at_value + e * v->v_column);
        round_operand(v, true, c->V + j * c->Dv, d->Dv);
        finite = finite && are_finite(c->V + j * c->Dv, d->Dv);
    }
    c->strange = !finite;
    if (!backward) return;
    transpose(c->V, c->s.Sk, d->Dv, c->Dv, c->VT, c->keys);
    memset(c->dK, 0, (size_t)(c->s.Sk * c->D) * sizeof *c->dK);
    memset(c->dV, 0, (size_t)(c->s.Sk * c->Dv) * sizeof *c->dV);
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* Computes C += A B (by_key: C += transposed A B) and skips hidden pairs. A pair is hidden where its score c->z is
 * -inf. */
static void product_seen(const struct compute *c, int64_t rows, int64_t n, const double *A, bool by_key,
                         const double *B, int64_t ldb, double *C, int64_t ldc)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < c->s.Sk; j++) {
            const double weight = A[r * c->keys + j];
            const double *const from = by_key ? B + r * ldb : B + j * ldb;
            double *const to = by_key ? C + j * ldc : C + r * ldc;
            if (c->z[r * c->keys + j] == -INFINITY) continue;
            for (int64_t e = 0; e < n; e++) to[e] += weight * from[e];
        }
}

/* Computes C[rows, n] += A[rows, Sk] B[Sk, n]. */
static void times_keys(const struct compute *c, int64_t rows, int64_t n, const double *A, const double *B, int64_t ldb,
                       double *C)
{
    if (c->strange) product_seen(c, rows, n, A, false, B, ldb, C, ldb);
    else c->products->in_double(rows, padded(n), c->s.Sk, A, c->keys, 1, B, ldb, C, ldb);
}

/* Computes C[Sk, n] += transposed A[rows, Sk] B[rows, n]. */
static void add_to_keys(const struct compute *c, int64_t rows, int64_t n, const double *A, const double *B, int64_t ldb,
                        double *C)
{
    if (c->strange) product_seen(c, rows, n, A, true, B, ldb, C, ldb);
    else c->products->in_double(c->s.Sk, padded(n), rows, A, 1, c->keys, B, ldb, C, ldb);
}

/* Computes C += A B, and rounds C to round_dtype after every `tile` terms of a sum. */
static void rounded_product(const struct compute *c, const variation *v, int64_t m, int64_t n, int64_t k,
                            const double *A, int64_t row, const double *B, int64_t ldb, double *C, int64_t ldc)
{
    const int64_t terms = v->tile;
    for (int64_t t = 0; t < k; t += terms) {
        c->products->in_double(m, n, attn_min64(terms, k - t), A + t, row, 1, B + t * ldb, ldb, C, ldc);
        for (int64_t r = 0; r < m; r++)
            for (int64_t e = 0; e < n; e++) C[r * ldc + e] = compute_rounded(v->round_dtype, C[r * ldc + e]);
    }
}

static void round_all(attn_dtype dtype, double *x, int64_t count)
{
    for (int64_t n = 0; n < count; n++) x[n] = compute_rounded(dtype, x[n]);
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* Returns the keys that causal and window let row i see. */
static attn_range keys_of(const struct compute *c, const variation *v, int64_t i)
{
    const attn_sequence *const s = &c->s;
    const int64_t aligned = i + attn_align(&v->g, s) + (v->g.top_left ? 0 : c->shift),
                  right = v->g.right + v->more_right;
    attn_range keys;
    keys.lo = attn_clamp64(aligned - v->g.left, 0, s->Sk);
    keys.hi = attn_clamp64(aligned + right + 1, keys.lo, s->Sk);
    return keys;
}

/* Returns the keys [lo, hi) that row i does not see because the variation drops a tile. `keys`: the keys that causal
 * and window let the row see. */
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

/* Returns the score of a pair whose q.k is `dot`. *slope: the derivative of the score by scale q.k. */
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
    const attn_range keys = i < c->s.Sq ? keys_of(c, v, i) : (attn_range){ 0, 0 };
    const int64_t bias_at = bias->data ? attn_at(bias, b, h, i) : 0;
    const double alibi = slopes->data
                             ? v->alibi_factor * attn_load(slopes->dtype, slopes->data, attn_at(slopes, b, h, 0))
                             : 0;
    const int64_t corner = i + (v->alibi_corner ? 0 : c->s.Sk - c->s.Sq + c->shift);
    for (int64_t j = 0; j < keys.lo; j++) z[j] = -INFINITY;
    for (int64_t j = keys.hi; j < padded(c->s.Sk); j++) z[j] = -INFINITY;
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
        const attn_range gone = dropped_of(v, &c->s, keys);
        for (int64_t j = gone.lo; j < attn_min64(gone.hi, c->s.Sk); j++) z[j] = -INFINITY;
    }
}

bool compute_dropout(const struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, double *M)
{
    const uint32_t threshold = attn_dropout_threshold(v->dropout_p);
    const int64_t head = b * v->g.dims.H + h;
    const double once = 1 / (1 - v->dropout_p);
    const double kept = v->dropout == DROPOUT_UNSCALED ? 1 : v->dropout == DROPOUT_SCALED_TWICE ? once * once : once;
    if (v->dropout_p == 0 || v->dropout == DROPOUT_MISSING) return false;
    if (v->dropout == DROPOUT_TRANSPOSED) {
        for (int64_t j = 0; j < c->s.Sk; j++) M[j] = attn_dropout_keep(v->seed, head, j, i, threshold) ? kept : 0;
        return true;
    }
    for (int64_t group = 0; group * 8 < c->s.Sk; group++) {
        const attn_philox words = attn_dropout_words(v->seed, head, i, group);
        for (int half = 0; half < 8 && group * 8 + half < c->s.Sk; half++)
            M[group * 8 + half] = attn_dropout_half(words, half) >= threshold ? kept : 0;
    }
    return true;
}

double compute_sink(const variation *v, int64_t h)
{
    const attn_view *const sinks = &v->g.view[ATTN_T_sinks];
    return sinks->data ? attn_load(sinks->dtype, sinks->data, attn_at(sinks, 0, h, 0)) : -INFINITY;
}

/* ---- Softmax ----------------------------------------------------------------------------------------------------- */

/* Returns the largest of `from` and the scores of keys [lo, hi), or NaN where one of them is NaN. */
static double largest(const double *z, int64_t lo, int64_t hi, double from)
{
    double top = from;
    for (int64_t j = lo; j < hi; j++) top = z[j] > top || isnan(z[j]) ? z[j] : top;
    return top;
}

/* Sets e to exp(z - top) for keys [lo, hi), and to 0 for hidden keys. Returns the sum of e. */
static double exponentials(const double *z, int64_t lo, int64_t hi, double top, double *e)
{
    double sum = 0;
    for (int64_t j = lo; j < hi; j++) sum += e[j] = z[j] == -INFINITY ? 0 : exp(z[j] - top);
    return sum;
}

/* Computes the weights of a row whose tiles are not rescaled, and returns the sum that out is divided by. On entry P
 * has exp(z - top) for the final top, and `sum` is its sum. */
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

/* Computes the weights of a row whose splits are averaged without weights. */
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

/* Returns the number of padding keys of the last tile that count as keys of score 0 for row i. */
static int64_t tail_of(const struct compute *c, const variation *v, int64_t i)
{
    if (v->tail == 0 || c->s.Sk % v->tail == 0) return 0;
    const int64_t padding = v->tail - c->s.Sk % v->tail,
                  reach = i + attn_align(&v->g, &c->s) + v->g.right + 1 - c->s.Sk;
    return v->tail_is_hidden ? attn_clamp64(reach, 0, padding) : padding;
}

/* Computes P, top, rest and lse of row i from its scores, which are row r of c->z. */
static void softmax(struct compute *c, const variation *v, int64_t h, int64_t i, int64_t r)
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
        for (int64_t j = 0; j < Sk; j++) P[j] = cut(c->p->q.dtype, P[j]);
    if (v->rounding == ROUND_TF32_ALL || v->rounding == CUT_TF32_ALL) round_operand(v, true, P, Sk);
    if (v->softmax == SOFTMAX_SPLITS_UNWEIGHTED) unweighted(c, v, z, P);
    else {
        const double divisor = v->softmax == SOFTMAX_NOT_NORMALIZED ? 1 : v->softmax == SOFTMAX_RAW ? exp(-top) : sum;
        for (int64_t j = 0; j < Sk; j++) P[j] /= divisor;
    }
    c->rest[r] = log(v->softmax == SOFTMAX_OUT_NOT_RESCALED ? right : sum);
    c->lse[r] = (v->lse_without_max ? 0 : top) + c->rest[r];
}

/* ---- Forward ----------------------------------------------------------------------------------------------------- */

/* Returns the row of the sequence that is row `n` of a tile. */
static int64_t row_of(const variation *v, const struct compute_rows *rows, int64_t n)
{
    return rows->first + n + (v->one_sequence && v->g.cu_q ? v->g.cu_q[rows->b] : 0);
}

/* Loads the tile's rows of q or dout. Rows that do not exist become 0. */
static void load_existing(struct compute *c, const variation *v, const struct compute_rows *rows, const attn_view *view,
                          int64_t column, double factor, int64_t columns, int64_t ld, double *to)
{
    const int64_t first = row_of(v, rows, 0), count = attn_clamp64(c->s.Sq - first, 0, rows->count);
    memset(to, 0, (size_t)(rows->count * ld) * sizeof *to);
    load_rows(view, column, factor, rows->b, rows->h, c->s.q_start + first, count, columns, ld, to);
    if (!are_finite(to, rows->count * ld)) c->strange = true;
}

void compute_load_queries(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const attn_dims *const d = &v->g.dims;
    const double q_scale = scale_of(v, ATTN_T_q_scale, rows->b, variation_head_of(v, rows->h));
    load_existing(c, v, rows, &v->g.view[ATTN_T_q], v->q_column, q_scale, d->D, c->D, c->Q);
    round_operand(v, false, c->Q, rows->count * c->D);
}

void compute_rows(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const attn_dims *const d = &v->g.dims;
    const int64_t count = rows->count, columns = padded(c->s.Sk);
    compute_load_queries(c, v, rows);
    for (int64_t r = 0; r < count; r++) memset(c->z + r * c->keys, 0, (size_t)columns * sizeof *c->z);
    if (v->rounding == ROUND_SUMS)
        rounded_product(c, v, count, columns, d->D, c->Q, c->D, c->KT, c->keys, c->z, c->keys);
    else c->products->in_double(count, columns, d->D, c->Q, c->D, 1, c->KT, c->keys, c->z, c->keys);
    for (int64_t r = 0; r < count; r++) {
        const int64_t i = row_of(v, rows, r);
        compute_scores(c, v, rows->b, rows->h, i, r);
        softmax(c, v, rows->h, i, r);
        double *const P = c->P + r * c->keys, *const M = c->M + r * c->keys;
        if (!compute_dropout(c, v, rows->b, rows->h, i, M))
            for (int64_t j = 0; j < c->s.Sk; j++) M[j] = 1;
        else
            for (int64_t j = 0; j < c->s.Sk; j++) P[j] *= M[j];
    }
    memset(c->out, 0, (size_t)(count * c->Dv) * sizeof *c->out);
    if (v->rounding == ROUND_SUMS && !c->strange)
        rounded_product(c, v, count, padded(d->Dv), c->s.Sk, c->P, c->keys, c->V, c->Dv, c->out, c->Dv);
    else times_keys(c, count, d->Dv, c->P, c->V, c->Dv, c->out);
    for (int64_t r = 0; r < count; r++) {
        const bool empty = c->top[r] == -INFINITY && row_of(v, rows, r) < c->s.Sq;
        for (int64_t e = 0; e < d->Dv; e++) {
            double *const x = &c->out[r * c->Dv + e];
            if (empty && v->empty_out != EMPTY_RIGHT) *x = v->empty_out == EMPTY_NAN ? NAN : INFINITY;
            if (v->rounding == CUT_OUT && c->p->out.rank) *x = cut(c->p->out.dtype, *x);
        }
        c->lse[r] *= v->lse_factor;
    }
}

/* ---- Backward ---------------------------------------------------------------------------------------------------- */

/* Computes P of row r without dropout from the two parts of its lse. P is 0 for hidden keys. */
static void probabilities(struct compute *c, int64_t r, double top, double rest)
{
    const double *const z = c->z + r * c->keys;
    double *const P = c->P + r * c->keys;
    for (int64_t j = 0; j < c->s.Sk; j++) P[j] = z[j] == -INFINITY || top == -INFINITY ? 0 : exp(z[j] - top - rest);
}

/* Adds row r's part of dbias, dslopes and dsinks. dZ: the gradient of the row's scores. */
static void add_sums(const struct compute *c, const variation *v, const struct compute_sums *sums, int64_t b, int64_t h,
                     int64_t i, int64_t r, const double *dZ)
{
    const attn_geometry *const g = &v->g;
    if (sums->dbias) {
        double *const to = sums->dbias + attn_at(&g->view[ATTN_T_dbias], b, h, i);
        for (int64_t j = 0; j < c->s.Sk; j++) to[j] += dZ[j];
    }
    if (sums->dslopes) {
        const int64_t corner = i + (v->alibi_corner ? 0 : c->s.Sk - c->s.Sq + c->shift);
        double sum = 0;
        for (int64_t j = 0; j < c->s.Sk; j++) sum += dZ[j] == 0 ? 0 : dZ[j] * fabs((double)(corner - j));
        sums->dslopes[attn_at(&g->view[ATTN_T_dalibi_slopes], b, h, 0)] -= v->alibi_factor * sum;
    }
    if (sums->dsinks && c->top[r] != -INFINITY)
        sums->dsinks[h] -= v->sink_weight * exp(compute_sink(v, h) - c->top[r] - c->rest[r]) * c->delta[r];
}

/* Turns P into the weights that dv takes (with dropout), and dP into dS. */
void compute_row_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                           const struct compute_sums *sums, int64_t r)
{
    const attn_dims *const d = &v->g.dims;
    const attn_view *const dlse = &v->g.view[ATTN_T_dlse];
    const int64_t i = row_of(v, rows, r);
    double *const P = c->P + r * c->keys, *const M = c->M + r * c->keys, *const dP = c->dP + r * c->keys,
                  *const slope = c->slope + r * c->keys, *const z = c->z + r * c->keys;
    double delta = 0;
    probabilities(c, r, c->top[r], c->rest[r]);
    for (int64_t e = 0; e < d->Dv && !v->no_delta; e++) delta += c->dO[r * c->Dv + e] * c->out[r * c->Dv + e];
    if (i < c->s.Sq && dlse->data && !v->no_dlse)
        delta -= attn_load(dlse->dtype, dlse->data, attn_at(dlse, rows->b, rows->h, c->s.q_start + i));
    c->delta[r] = delta;
    for (int64_t j = 0; j < c->s.Sk; j++) {
        const bool hidden = z[j] == -INFINITY || c->top[r] == -INFINITY;
        dP[j] = hidden ? 0 : P[j] * (M[j] * dP[j] - delta);
    }
    add_sums(c, v, sums, rows->b, rows->h, i, r, dP);
    for (int64_t j = 0; j < c->s.Sk; j++) {
        if (!v->no_softcap_derivative && dP[j] != 0) dP[j] *= slope[j];
        P[j] *= M[j];
    }
    if (v->dv_unnormalized && c->top[r] != -INFINITY) {
        const double factor = exp(c->rest[r]);
        for (int64_t j = 0; j < c->s.Sk; j++) P[j] *= factor;
    }
}

/* Returns the only tile of keys that counts in dq of row i. */
static attn_range only_tile(const struct compute *c, const variation *v, int64_t i)
{
    const int64_t tile = v->only_last_tile, rows = v->only_last_rows;
    const int64_t from = rows > 0 ? i / rows * rows : 0;
    const attn_range first = keys_of(c, v, from), last = keys_of(c, v, attn_min64(from + rows, c->s.Sq) - 1);
    attn_range keys = { rows > 0 ? first.lo : 0, rows > 0 ? attn_max64(first.lo, last.hi) : c->s.Sk };
    if (v->backwards) return (attn_range){ keys.lo / tile * tile, attn_min64((keys.lo / tile + 1) * tile, c->s.Sk) };
    keys.lo = keys.hi > 0 ? (keys.hi - 1) / tile * tile : 0;
    keys.hi = attn_min64(keys.lo + tile, c->s.Sk);
    return keys;
}

/* Computes dq of the rows from dS, which is in c->dP. */
static void gradient_of_queries(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const attn_dims *const d = &v->g.dims;
    const int64_t count = rows->count;
    double *const some = c->M; /* dropout's factors are no longer used */
    memset(c->dq, 0, (size_t)(count * c->D) * sizeof *c->dq);
    if (v->only_last_tile > 0) {
        memset(some, 0, (size_t)(count * c->keys) * sizeof *some);
        for (int64_t r = 0; r < count; r++) {
            const attn_range keys = only_tile(c, v, row_of(v, rows, r));
            for (int64_t j = keys.lo; j < keys.hi; j++) some[r * c->keys + j] = c->dP[r * c->keys + j];
        }
    }
    if (v->rounding == ROUND_SUMS && !c->strange)
        rounded_product(c, v, count, padded(d->D), c->s.Sk, c->dP, c->keys, c->K, c->D, c->dq, c->D);
    else times_keys(c, count, d->D, v->only_last_tile > 0 ? some : c->dP, c->K, c->D, c->dq);
    for (int64_t n = 0; n < count * c->D; n++) c->dq[n] *= v->g.scale * v->dq_factor;
}

void compute_load_gradients(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    load_existing(c, v, rows, &v->g.view[ATTN_T_dout], 1, 1, v->g.dims.Dv, c->Dv, c->dO);
    round_operand(v, true, c->dO, rows->count * c->Dv);
}

void compute_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums)
{
    const attn_dims *const d = &v->g.dims;
    const int64_t count = rows->count, columns = padded(c->s.Sk), member = rows->h % v->g.group;
    compute_load_gradients(c, v, rows);
    for (int64_t r = 0; r < count; r++) memset(c->dP + r * c->keys, 0, (size_t)columns * sizeof *c->dP);
    c->products->in_double(count, columns, d->Dv, c->dO, c->Dv, 1, c->VT, c->keys, c->dP, c->keys);
    for (int64_t r = 0; r < count; r++) {
        compute_row_gradients(c, v, rows, sums, r);
        round_operand(v, true, c->P + r * c->keys, c->s.Sk);
        round_operand(v, true, c->dP + r * c->keys, c->s.Sk);
    }
    if (v->only_member < 0 || v->only_member == member) {
        add_to_keys(c, count, d->Dv, c->P, c->dO, c->Dv, c->dV);
        for (int64_t n = 0; n < count * c->D; n++) c->Q[n] *= v->g.scale * v->dk_factor;
        add_to_keys(c, count, d->D, c->dP, c->Q, c->D, c->dK);
        if (v->rounding == ROUND_SUMS) {
            round_all(v->round_dtype, c->dK, c->s.Sk * c->D);
            round_all(v->round_dtype, c->dV, c->s.Sk * c->Dv);
        }
    }
    gradient_of_queries(c, v, rows);
}
