/* row_end.c: computes the results of a tile of query rows after the tile's last key. From the sums O, m and l of the
 * online softmax it makes out and lse, or a partial result if the tile's keys are split. */
#include <math.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"

/* number of rows for which one call of close() (simd.h) computes lse and the factor of O */
enum { CLOSE_ROWS = 64 };

/* Adds the sink to the row's sum l. Computes lse2 (lse in base 2) and `inverse`, by which O must be multiplied: 1 / l
 * times dropout's factor. For a row that sees no key, inverse is 0, and lse2 is the sink in base 2, or -inf without a
 * sink. */
static void close_row(const struct flash *f, int64_t h, float m, float l, float *inverse, double *lse2)
{
    float factor = 1;
    double top = m;
    if (f->p->sinks.rank) {
        const double sink = *(const float *)flash_at(&f->g.view[ATTN_T_sinks], 0, h, 0) * M_LOG2E;
        if (sink > -INFINITY && m == m) {
            top = sink > m ? sink : m;
            factor = m > -INFINITY ? (float)exp2(m - top) : 0.0f;
            l = (float)(l * (double)factor + exp2(sink - top));
        }
    }
    *inverse = l == 0 ? 0.0f : factor / l * f->drop_scale;
    *lse2 = l == 0 ? -INFINITY : top + log2f(l);
}

/* Returns whether row r of a tile must be computed in double, because its scores or its O exceed the range of
 * float32. */
static bool is_strange(const struct flash *f, const struct flash_tile *t, int r, float m, float l, const float *O,
                       bool large)
{
    if (flash_is_strange(f, t, r, m, l)) return true;
    large &= !(m == -INFINITY && l == 0); /* a row that sees no key has no sum P V that could overflow */
    bool finite = true;
    for (int64_t d = 0; large && d < f->g.dims.Dv; d++) finite &= isfinite(O[d]) != 0;
    return !finite;
}

/* Ends a row in which all keys have the same score. O is the sum of the keys' rows of V, and l the number of keys.
 * Writes the row's out to `row`. Returns false, and does not write to `row`, if the scores may differ or O is not
 * finite. */
static bool finish_alike(const struct flash *f, const struct flash_tile *t, int r, float l, const float *O,
                         struct flash_strange *found, double *row)
{
    const int64_t Dv = f->g.dims.Dv, keys = flash_exact_alike(f, t->b, t->h + r / t->n, t->i0 + r % t->n, found);
    if (keys == 0 || l != (float)keys || !f->simd->all_finite(1, (int)Dv, O, 0)) return false;
    double factor = exp(found->z - found->lse.top - found->lse.rest) * f->drop_scale;
    if (f->p->v_scale.rank) factor *= *(const float *)flash_at(&f->g.view[ATTN_T_v_scale], t->b, t->hk, 0);
    for (int64_t d = 0; d < Dv; d++) row[d] = O[d] * factor;
    return true;
}

/* Ends row r of a tile if the row must be computed in double (is_strange()). Writes out and lse; in a backward it
 * writes delta, and lse2 or f->strange. */
static void finish_strange(const struct flash *f, const struct flash_tile *t, int r, float l, const float *O)
{
    const attn_view *out = &f->g.view[ATTN_T_out], *lse = &f->g.view[ATTN_T_lse], *dlse = &f->g.view[ATTN_T_dlse];
    const int64_t h = t->h + r / t->n, i = t->i0 + r % t->n, line = t->seq->s.q_start + i, Dv = f->g.dims.Dv;
    double row[ATTN_MAX_HEAD_DIM], delta = 0;
    struct flash_strange found;
    if (!finish_alike(f, t, r, l, O, &found, row))
        found = (struct flash_strange){ .lse = flash_exact_row(f, t->b, h, i, row), .kind = FLASH_EXACT };
    if (f->backward) {
        float rounded[ATTN_MAX_HEAD_DIM];
        flash_load_dout(f, t->b, h, line, rounded);
        for (int64_t d = 0; d < Dv; d++) delta += row[d] * rounded[d];
        if (f->p->dlse.rank) delta -= *(const float *)flash_at(dlse, t->b, h, line);
        f->delta[t->row0 + r] = (float)delta;
        flash_keep_lse(f, t->row0 + r, found);
        return;
    }
    if (f->p->lse.rank) *(float *)flash_at(lse, t->b, h, line) = (float)(found.lse.top + found.lse.rest);
    for (int64_t d = 0; f->p->out.rank && d < Dv; d++) attn_store(out->dtype, flash_at(out, t->b, h, line), d, row[d]);
}

void flash_row_end(const struct flash *f, const struct flash_tile *t, const float *O, int64_t ldo, const float *m,
                   const float *l, float *inverse, bool large)
{
    const attn_view *out = &f->g.view[ATTN_T_out], *lse = &f->g.view[ATTN_T_lse];
    const attn_view *dlse = &f->g.view[ATTN_T_dlse];
    const int Dv = (int)f->g.dims.Dv;
    const int64_t first = t->seq->s.q_start + t->i0;
    float v_scale = 1;
    if (f->p->v_scale.rank) v_scale = *(const float *)flash_at(&f->g.view[ATTN_T_v_scale], t->b, t->hk, 0);
    for (int head = 0; head < t->heads; head++) {
        const int r0 = head * t->n;
        const int64_t h = t->h + head;
        /* computes rowsum(dO * O), the first term of delta, from rows of O that are not yet divided by l */
        if (f->backward) flash_deltas(f, t->b, h, first, t->n, O + r0 * ldo, ATTN_F32, ldo, f->delta + t->row0 + r0);
        float *const to = f->p->lse.rank ? flash_at(lse, t->b, h, first) : NULL;
        const bool plain = !f->backward && !f->p->sinks.rank;
        bool strange = large;
        for (int r = r0; plain && r < r0 + t->n; r += CLOSE_ROWS) {
            const int n = (int)attn_min64(CLOSE_ROWS, r0 + t->n - r);
            float rows[CLOSE_ROWS];
            strange |= !f->simd->close(n, m + r, l + r, inverse + r, rows);
            for (int i = 0; f->dropout && i < n; i++) inverse[r + i] *= f->drop_scale;
            for (int i = 0; to && i < n; i++) to[(r - r0 + i) * lse->row] = rows[i];
        }
        for (int r = r0; !plain && r < r0 + t->n; r++) {
            double lse2;
            close_row(f, h, m[r], l[r], &inverse[r], &lse2);
            strange |= !(fabsf(m[r]) < SIMD_SCORE_MOST && l[r] < INFINITY);
            if (f->backward) {
                float *delta = &f->delta[t->row0 + r];
                *delta = inverse[r] == 0 ? 0.0f : *delta * inverse[r];
                if (f->p->dlse.rank) *delta -= *(const float *)flash_at(dlse, t->b, h, first + r - r0);
                const bool holds = fabs(lse2) < ATTN_LSE_MOST * M_LOG2E;
                /* for a row that sees no key, lse2 is INFINITY instead of -INFINITY, so that gradient() computes P =
                 * 0 */
                f->lse2[t->row0 + r] = lse2 == -INFINITY ? INFINITY : holds ? (float)lse2 : NAN;
                strange |= !holds;
            } else if (to) {
                to[(r - r0) * lse->row] = (float)(lse2 * M_LN2);
            }
        }
        if (!f->backward && f->p->out.rank)
            f->simd->store(t->n, Dv, O + r0 * ldo, ldo, v_scale, inverse + r0, flash_at(out, t->b, h, first),
                           out->dtype, out->row);
        for (int r = r0; strange && r < r0 + t->n && !attn_is_cancelled(f->cancel); r++)
            if (is_strange(f, t, r, m[r], l[r], O + r * ldo, large) || (f->backward && isnan(f->lse2[t->row0 + r])))
                finish_strange(f, t, r, l[r], O + r * ldo);
    }
}

int64_t flash_row_end_part_row(const struct flash_tile *t, int64_t split)
{
    const struct flash_sequence *seq = t->seq;
    if (seq->path == FLASH_DOTS) return seq->parts0 + (t->hk * seq->splits + split) * seq->part_rows;
    return seq->parts0 + (t->row0 - seq->rows0) * seq->splits + split * simd_round_up(t->rows, FLASH_UNIT);
}

void flash_row_end_part(const struct flash *f, const struct flash_tile *t, int64_t split, float *O, int64_t ldo,
                        float *m, float *l, float *inverse, bool large)
{
    if (t->seq->splits == 1) {
        flash_row_end(f, t, O, ldo, m, l, inverse, large);
        return;
    }
    const int64_t row = flash_row_end_part_row(t, split), Dv = f->g.dims.Dv;
    assert(row + t->rows <= t->seq->parts0 + f->g.dims.Hk * t->seq->splits * t->seq->part_rows);
    memcpy(f->part_m + row, m, (size_t)t->rows * sizeof *m);
    memcpy(f->part_l + row, l, (size_t)t->rows * sizeof *l);
    for (int r = 0; r < t->rows; r++) memcpy(f->part_O + (row + r) * Dv, O + r * ldo, (size_t)Dv * sizeof *O);
}
