/* compute.c: attention in float64, as defined or with a mistake (variation.h). All scores of a row are in memory at
 * once, so that a mistake of a kernel's loop over tiles of keys can be computed in a few lines.
 *
 * A hidden pair (query, key) has a score of -inf and a weight of 0. Where an input is not finite, hidden pairs are left
 * out of all products, because 0 times NaN is NaN. lse is stored as two doubles: the largest score, and lse minus this
 * score. In one double, a score of 1e38 would leave no bits for the difference. */
#include "kernels/judge/compute.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/judge/compute_internal.h"

#define DOUBLES(n) (((n) + 7) / 8 * 8)

/* ---- The memory of a thread -------------------------------------------------------------------------------------- */

/* Reserves an array of `a` times `b` doubles at offset *used of `memory`, and adds its bytes to *used. If `memory` is
 * NULL, the function only counts the bytes. */
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

/* Returns the largest number of keys that a row can see. Some mistakes (variation.h) let a row see more keys than it
 * should; these keys count too. */
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
    c->D = compute_padded(d.D);
    c->Dv = compute_padded(d.Dv);
    c->keys = compute_padded(c->most_keys);
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

/* ---- Loading keys, values and queries ---------------------------------------------------------------------------- */

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

/* Returns sequence b as a kernel with the variation's mistake reads it. The mistake may round up the number of keys
 * (whole_keys), or take all packed sequences for one (one_sequence). */
static attn_sequence sequence_of(const variation *v, int64_t b)
{
    attn_sequence s = attn_sequence_of(&v->g, v->one_sequence ? 0 : b);
    if (v->whole_keys > 0)
        s.Sk = attn_min64(attn_tiles(s.Sk, v->whole_keys) * v->whole_keys, attn_room_of(v->g.cu_k, v->g.dims.Sk, b));
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
    c->lo = 0, c->hi = c->s.Sk;
    c->shift = v->padding_kept && !v->one_sequence && c->p->seqlens_k.rank
                   ? ((const int32_t *)c->p->seqlens_k.data)[b] - c->s.Sk
                   : 0;
    bool finite = true;
    for (int64_t j = 0; j < c->s.Sk; j++) {
        double row[ATTN_MAX_HEAD_DIM];
        const int64_t line = c->s.k_start + j;
        const int64_t at = attn_key_at(&v->g, k, b, hk, line), at_value = attn_key_at(&v->g, values, b, hk, line);
        for (int64_t i = 0; i < d->D; i++) row[i] = k_scale * attn_load(k->dtype, k->data, at + i * v->k_column);
        compute_round_operand(v, false, row, d->D);
        finite = finite && are_finite(row, d->D);
        for (int64_t i = 0; i < d->D; i++) c->KT[i * c->keys + j] = row[i];
        if (backward) memcpy(c->K + j * c->D, row, (size_t)d->D * sizeof *row);
        for (int64_t e = 0; e < d->Dv; e++)
            c->V[j * c->Dv + e] = v_scale * attn_load(values->dtype, values->data, at_value + e * v->v_column);
        compute_round_operand(v, true, c->V + j * c->Dv, d->Dv);
        finite = finite && are_finite(c->V + j * c->Dv, d->Dv);
    }
    c->strange = !finite;
    if (!backward) return;
    transpose(c->V, c->s.Sk, d->Dv, c->Dv, c->VT, c->keys);
    memset(c->dK, 0, (size_t)(c->s.Sk * c->D) * sizeof *c->dK);
    memset(c->dV, 0, (size_t)(c->s.Sk * c->Dv) * sizeof *c->dV);
}

/* ---- The forward of a tile --------------------------------------------------------------------------------------- */

int64_t compute_row_of(const variation *v, const struct compute_rows *rows, int64_t n)
{
    return rows->first + n + (v->one_sequence && v->g.cu_q ? v->g.cu_q[rows->b] : 0);
}

bool compute_sees(const struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const int64_t first = compute_row_of(v, rows, 0);
    return compute_keys_of(c, v, first).lo < c->hi && compute_keys_of(c, v, first + rows->count - 1).hi > c->lo;
}

void compute_load_existing(struct compute *c, const variation *v, const struct compute_rows *rows,
                           const attn_view *view, int64_t column, double factor, int64_t columns, int64_t ld,
                           double *to)
{
    const int64_t first = compute_row_of(v, rows, 0), count = attn_clamp64(c->s.Sq - first, 0, rows->count);
    memset(to, 0, (size_t)(rows->count * ld) * sizeof *to);
    load_rows(view, column, factor, rows->b, rows->h, c->s.q_start + first, count, columns, ld, to);
    if (!are_finite(to, rows->count * ld)) c->strange = true;
}

void compute_load_queries(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const attn_dims *const d = &v->g.dims;
    const double q_scale = scale_of(v, ATTN_T_q_scale, rows->b, variation_head_of(v, rows->h));
    compute_load_existing(c, v, rows, &v->g.view[ATTN_T_q], v->q_column, q_scale, d->D, c->D, c->Q);
    compute_round_operand(v, false, c->Q, rows->count * c->D);
}

void compute_tile_scores(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const int64_t count = rows->count, columns = compute_padded(c->hi - c->lo), D = v->g.dims.D;
    const double *const KT = c->KT + c->lo;
    double *const z = c->z + c->lo;
    compute_load_queries(c, v, rows);
    for (int64_t r = 0; r < count; r++) memset(z + r * c->keys, 0, (size_t)columns * sizeof *z);
    if (v->rounding == ROUND_SUMS)
        compute_rounded_product(c, v, count, columns, D, c->Q, c->D, KT, c->keys, z, c->keys);
    else c->products->in_double(count, columns, D, c->Q, c->D, 1, KT, c->keys, z, c->keys);
    for (int64_t r = 0; r < count; r++) {
        const int64_t i = compute_row_of(v, rows, r);
        compute_scores(c, v, rows->b, rows->h, i, r);
        compute_dropout(c, v, rows->b, rows->h, i, c->M + r * c->keys);
    }
}

void compute_rows(struct compute *c, const variation *v, const struct compute_rows *rows)
{
    const attn_dims *const d = &v->g.dims;
    const int64_t count = rows->count;
    compute_tile_scores(c, v, rows);
    for (int64_t r = 0; r < count; r++) {
        compute_softmax(c, v, rows->h, compute_row_of(v, rows, r), r);
        double *const P = c->P + r * c->keys, *const M = c->M + r * c->keys;
        for (int64_t j = 0; j < c->s.Sk; j++) P[j] *= M[j];
    }
    memset(c->out, 0, (size_t)(count * c->Dv) * sizeof *c->out);
    if (variation_rounds_sums(v) && !c->strange)
        compute_rounded_product(c, v, count, compute_padded(d->Dv), c->s.Sk, c->P, c->keys, c->V, c->Dv, c->out, c->Dv);
    else compute_times_keys(c, count, d->Dv, c->P, c->V, c->Dv, c->out);
    for (int64_t r = 0; r < count; r++) {
        const bool empty = c->top[r] == -INFINITY && compute_row_of(v, rows, r) < c->s.Sq;
        for (int64_t e = 0; e < d->Dv; e++) {
            double *const x = &c->out[r * c->Dv + e];
            if (empty && v->empty_out != EMPTY_RIGHT) *x = v->empty_out == EMPTY_NAN ? NAN : INFINITY;
            if (v->rounding == CUT_RESULTS) *x = compute_cut(v->round_dtype, *x);
        }
        c->lse[r] *= v->lse_factor;
    }
}
