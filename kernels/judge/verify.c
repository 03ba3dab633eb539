/* verify.c: attn_verify() of kernels/attention.h, which compares some or all rows of a forward's out with float64
 * results.
 *
 * If all rows are compared, consecutive rows of a head are computed together as one tile, by compute.c. This takes as
 * long as computing the float64 results of a judge. Otherwise the compared rows are spread evenly and computed one by
 * one. */
#include <math.h>
#include <stdlib.h>

#include "kernels/judge/compute.h"
#include "kernels/judge/frame.h"

struct attn_verifier {
    struct compute c;
    attn_problem p;
    variation v;
    attn_verification found;
    /* total: number of query rows of the problem; n: number of rows verified so far; next: index of the next row to
     * verify, among all rows */
    int64_t total, n, next;
    /* b, h: batch row and head that contain row `next`; first: index of this head's first row among all rows */
    int64_t b, h, first;
    int64_t keys_b, keys_hk; /* sequence and key/value head whose keys are loaded; -1: none */
};

attn_status attn_verifier_open(const attn_problem *p, int64_t rows, attn_verifier **verifier, attn_error *err)
{
    const attn_dims d = attn_dims_of(p);
    const int64_t total = attn_rows_that_exist(p);
    *verifier = NULL;
    if (p->op != ATTN_OP_FORWARD || p->out.rank == 0)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify", "verify: only the out of a forward can be verified");
    attn_verifier *const v = calloc(1, sizeof *v);
    if (!v) return attn_fail(err, ATTN_NO_MEMORY, "/verify", "no memory to verify %lld keys", (long long)d.Sk);
    v->p = *p;
    v->v = variation_of(p);
    v->total = total;
    v->found.rows = rows < 0 || rows > total ? total : rows;
    v->keys_b = v->keys_hk = -1;
    if (!compute_open(&v->c, &v->p, frame_tile_rows(p))) {
        free(v);
        return attn_fail(err, ATTN_NO_MEMORY, "/verify", "no memory to verify %lld keys", (long long)d.Sk);
    }
    *verifier = v;
    return ATTN_OK;
}

/* Sets the members b, h and first to the head that contains row `next`, and returns the sequence of batch row b. A loop
 * over all heads is fast enough, because B * H has an upper bound. */
static attn_sequence go_to_head(attn_verifier *v)
{
    const attn_geometry *const g = &v->v.g;
    attn_sequence s = attn_sequence_of(g, v->b);
    while (v->next >= v->first + s.Sq) {
        v->first += s.Sq;
        if (++v->h < g->dims.H) continue;
        v->h = 0;
        s = attn_sequence_of(g, ++v->b);
    }
    return s;
}

/* Compares one row of the given out with float64 results: row i of the sequence with row r of the computed tile. Two
 * NaN, or two equal infinities, count as equal. */
static void compare_row(attn_verifier *v, const attn_sequence *s, int64_t i, int64_t r)
{
    const attn_view *const out = &v->v.g.view[ATTN_T_out];
    const int64_t at = attn_at(out, v->b, v->h, s->q_start + i);
    for (int64_t e = 0; e < v->v.g.dims.Dv; e++) {
        const double got = attn_load(out->dtype, out->data, at + e), want = v->c.out[r * v->c.Dv + e];
        const bool same = got == want || (isnan(got) && isnan(want));
        const double error = same ? 0 : isfinite(got) && isfinite(want) ? fabs(got - want) : INFINITY;
        v->found.max_abs = fmax(v->found.max_abs, error);
        if (isfinite(want)) v->found.largest = fmax(v->found.largest, fabs(want));
    }
}

bool attn_verifier_step(attn_verifier *v)
{
    if (v->n == v->found.rows) return true;
    const attn_sequence s = go_to_head(v);
    const int64_t hk = variation_head_of(&v->v, v->h), i = v->next - v->first;
    if (v->keys_b != v->b || v->keys_hk != hk) {
        compute_keys(&v->c, &v->v, v->b, hk);
        v->keys_b = v->b, v->keys_hk = hk;
        return false;
    }
    const bool all = v->found.rows == v->total;
    const struct compute_rows rows = { v->b, v->h, i, all ? attn_min64(v->c.tile, s.Sq - i) : 1 };
    compute_rows(&v->c, &v->v, &rows);
    for (int64_t r = 0; r < rows.count; r++) compare_row(v, &s, i + r, r);
    v->n += rows.count;
    v->next = v->total / v->found.rows * v->n + v->total % v->found.rows * v->n / v->found.rows;
    return v->n == v->found.rows;
}

attn_verification attn_verifier_close(attn_verifier *v)
{
    attn_verification found = v->found;
    found.relative = found.max_abs == 0 ? 0 : found.largest > 0 ? found.max_abs / found.largest : INFINITY;
    compute_close(&v->c);
    free(v);
    return found;
}

attn_status attn_verify(const attn_problem *p, int64_t rows, attn_verification *verification, attn_error *err)
{
    attn_verifier *verifier;
    const attn_status status = attn_verifier_open(p, rows, &verifier, err);
    if (status != ATTN_OK) return status;
    while (!attn_verifier_step(verifier)) {
    }
    *verification = attn_verifier_close(verifier);
    return ATTN_OK;
}
