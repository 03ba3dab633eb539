/* truth.c: computes the results of a problem in float64, for tests. */
#include "kernels/fake/truth.h"

#include <math.h>
#include <string.h>

#include "kernels/judge/frame.h"

int64_t fake_truth_rows(const attn_dims *d, bool keys)
{
    const bool packed = keys ? attn_keys_are_packed(d) : d->packed;
    return keys ? d->Hk * (packed ? d->total_k : d->B * d->Sk) : d->H * (packed ? d->total_q : d->B * d->Sq);
}

int64_t fake_truth_row(const attn_dims *d, const attn_sequence *s, bool keys, int64_t b, int64_t h)
{
    if (keys) return attn_keys_are_packed(d) ? h * d->total_k + s->k_start : (b * d->Hk + h) * d->Sk;
    return d->packed ? h * d->total_q + s->q_start : (b * d->H + h) * d->Sq;
}

static void clear(const attn_dims *d, const attn_truth *to)
{
    const int64_t queries = fake_truth_rows(d, false), keys = fake_truth_rows(d, true);
    if (to->out) memset(to->out, 0, (size_t)(queries * d->Dv) * sizeof *to->out);
    for (int64_t n = 0; n < queries && to->lse; n++) to->lse[n] = -INFINITY;
    if (to->dq) memset(to->dq, 0, (size_t)(queries * d->D) * sizeof *to->dq);
    if (to->dk) memset(to->dk, 0, (size_t)(keys * d->D) * sizeof *to->dk);
    if (to->dv) memset(to->dv, 0, (size_t)(keys * d->Dv) * sizeof *to->dv);
}

static void store(double *to, int64_t columns, int64_t row, int64_t count, const double *from, int64_t ld)
{
    for (int64_t r = 0; r < count && to; r++)
        memcpy(to + (row + r) * columns, from + r * ld, (size_t)columns * sizeof *to);
}

static void take(const double *from, int64_t columns, int64_t row, int64_t count, double *to, int64_t ld)
{
    for (int64_t r = 0; r < count && from; r++)
        memcpy(to + r * ld, from + (row + r) * columns, (size_t)columns * sizeof *to);
}

bool fake_truth_of_head(const attn_problem *p, int64_t head, const attn_truth *to)
{
    attn_problem bare = *p;
    bare.out = bare.lse = (attn_tensor){ 0 };
    const variation v = variation_of(&bare);
    const attn_dims *const d = &v.g.dims;
    const int64_t b = head / d->H, h = head % d->H, hk = variation_head_of(&v, h);
    const attn_sequence s = attn_sequence_of(&v.g, b);
    const int64_t first = fake_truth_row(d, &s, false, b, h), first_key = fake_truth_row(d, &s, true, b, hk);
    struct compute c;
    if (head == 0) clear(d, to);
    if (!compute_open(&c, &bare, frame_tile_rows(&bare))) return false;
    compute_keys(&c, &v, b, hk);
    /* dk and dv are sums over the query heads of a group, so the sums of the group's earlier heads are loaded here */
    if (bare.op == ATTN_OP_BACKWARD) {
        take(to->dk, d->D, first_key, s.Sk, c.dK, c.D);
        take(to->dv, d->Dv, first_key, s.Sk, c.dV, c.Dv);
    }
    for (int64_t i = 0; i < s.Sq; i += c.tile) {
        const struct compute_rows rows = { b, h, i, attn_min64(c.tile, s.Sq - i) };
        compute_rows(&c, &v, &rows);
        store(to->out, d->Dv, first + i, rows.count, c.out, c.Dv);
        store(to->lse, 1, first + i, rows.count, c.lse, 1);
        if (bare.op != ATTN_OP_BACKWARD) continue;
        compute_gradients(&c, &v, &rows, &(struct compute_sums){ 0 }, COMPUTE_ALL);
        store(to->dq, d->D, first + i, rows.count, c.dq, c.D);
    }
    if (bare.op == ATTN_OP_BACKWARD) {
        store(to->dk, d->D, first_key, s.Sk, c.dK, c.D);
        store(to->dv, d->Dv, first_key, s.Sk, c.dV, c.Dv);
    }
    compute_close(&c);
    return true;
}
