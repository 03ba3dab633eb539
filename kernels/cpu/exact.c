/* exact.c: computes, in double, rows whose numbers exceed the range of float32.
 *
 * Such rows are rare, so the other kernels of this folder compute in float32 and do not test each score.
 * flash_row_end() (row_end.c) and load_statistics() (backward.c) recognise such a row by its maximum, sum, lse or O.
 * The code below then computes the row again from the tensors, by the definition (kernels/README.md).
 *
 * Rows of equal scores. A mask may have the most negative number in place of -inf. If every key of a row has that bias,
 * q . k is lost in the addition, and all scores are equal. O is then correct and only lse is wrong. flash_exact_alike()
 * recognises the row by its bias alone.
 *
 * Products that overflow. A product q . k may exceed the range of float32 while scale q . k is within it. Elements
 * below SIMD_TAME in absolute value cannot make a product overflow; packing tests whether there are larger ones. If so,
 * flash_scores() tests for products that are not finite, and flash_exact_mend_scores() computes their scores again.
 *
 * lse is stored in two parts, the largest score and the rest. If the score is 1e38, one double cannot hold both: the
 * rest would be rounded away, and P = exp(z - lse) would be 1 for each key. */
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"
#include "kernels/score.h"

enum {
    /* Number of keys whose scores are computed together. The keys of a row are divided into groups at the multiples of
     * KEYS, so the first and the last group may have fewer keys. */
    KEYS = FLASH_MASK_BLOCK,
    /* If a sum of P V over KEYS keys overflows, the sum is computed again with P divided by 2^SHARE_BITS, and is then
     * finite. */
    SHARE_BITS = 24,
};

/* A row of the score matrix: one query of one query head, and the range of keys that it may see. */
struct row {
    const struct flash *f;
    const attn_sequence *s;
    int64_t b, h, hk, i;
    attn_range keys;
    double scale, slope;
    attn_score_options options;
    float q[ATTN_MAX_HEAD_DIM];
};

/* Up to KEYS keys of a row, j to j + n - 1, with their masks, bias and scores. */
struct keys {
    int64_t j;
    int n, seen;
    uint8_t sees[KEYS];
    float bias[KEYS];
    /* score of each visible key, and the derivative of the score with respect to scale q . k (score.h) */
    double z[KEYS], slope[KEYS];
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

static double sink_of(const struct flash *f, int64_t h)
{
    return f->p->sinks.rank ? *(const float *)flash_at(&f->g.view[ATTN_T_sinks], 0, h, 0) : -INFINITY;
}

/* ---- Which keys a row sees --------------------------------------------------------------------------------------- */

static bool mask_hides(const struct row *row, int64_t j)
{
    const struct flash *f = row->f;
    const int32_t *bounds = flash_at(&f->g.view[ATTN_T_mask_startend_rows], row->b, row->h / f->g.mask_group, j);
    return attn_mask_hides(attn_mask_of(bounds, f->g.mask_bounds, f->g.causal, row->s->Sq), row->i);
}

/* Returns whether masks and bias let the row see key j. The caller must already have tested causal, window and
 * lengths. */
static bool sees(const struct row *row, int64_t j)
{
    const struct flash *f = row->f;
    const attn_view *keep = &f->g.view[ATTN_T_keep_mask], *bias = &f->g.view[ATTN_T_bias];
    const int64_t column = j - attn_keep_from(&f->g, row->s);
    if (f->p->keep_mask.rank && column >= 0 && !((const uint8_t *)flash_at(keep, row->b, row->h, row->i))[column])
        return false;
    if (f->p->bias.rank && attn_load(bias->dtype, flash_at(bias, row->b, row->h, row->i), j) == -INFINITY) return false;
    return !f->mask_heads || !mask_hides(row, j);
}

static void look_at_mask(const struct row *row, struct keys *at)
{
    const struct flash *f = row->f;
    const int64_t head = row->b * f->mask_heads + row->h / f->g.mask_group;
    const attn_tile_kind kind = attn_mask_classify(&f->extremes[head * f->mask_blocks + at->j / KEYS], row->i,
                                                   row->i + 1);
    if (kind == ATTN_TILE_FREE) return;
    if (kind == ATTN_TILE_HIDDEN) memset(at->sees, 0, sizeof at->sees);
    for (int x = 0; kind != ATTN_TILE_HIDDEN && x < at->n; x++) at->sees[x] &= !mask_hides(row, at->j + x);
}

/* Finds out which keys the row sees among the keys from j to the next multiple of KEYS, or to `end` if `end` comes
 * first. Writes to *at: j, n (the number of keys tested), `sees`, `seen` and `bias`. The elements of `sees` from n on
 * become 0. */
static void look(const struct row *row, int64_t j, int64_t end, struct keys *at)
{
    const struct flash *f = row->f;
    const attn_view *keep = &f->g.view[ATTN_T_keep_mask], *bias = &f->g.view[ATTN_T_bias];
    at->j = j;
    at->n = (int)attn_min64(KEYS - j % KEYS, end - j);
    const int lo = (int)attn_clamp64(row->keys.lo - j, 0, at->n), hi = (int)attn_clamp64(row->keys.hi - j, lo, at->n);
    memset(at->sees, 0, sizeof at->sees);
    memset(at->sees + lo, 1, (size_t)(hi - lo));
    if (f->p->keep_mask.rank) {
        uint8_t kept[KEYS];
        const int64_t from = attn_keep_from(&f->g, row->s);
        const int before = (int)attn_clamp64(from - j, 0, at->n);
        memset(kept, 1, sizeof kept);
        if (before < at->n)
            memcpy(kept + before, (const uint8_t *)flash_at(keep, row->b, row->h, row->i) + (j + before - from),
                   (size_t)(at->n - before));
        for (int x = 0; x < KEYS; x++) /* the loop has a fixed length, so that the compiler vectorises it */
            at->sees[x] &= kept[x] != 0;
    }
    if (f->p->bias.rank) {
        const char *from = flash_at(bias, row->b, row->h, row->i);
        f->simd->load(at->n, from + j * (int64_t)attn_dtype_bytes(bias->dtype), bias->dtype, at->bias);
        for (int x = 0; x < KEYS; x++) at->sees[x] &= at->bias[x] != -INFINITY;
    }
    if (f->mask_heads) look_at_mask(row, at);
    at->seen = 0;
    for (int x = 0; x < KEYS; x++) at->seen += at->sees[x];
}

bool flash_exact_sees_one_key(const struct flash *f, const struct flash_tile *t, int r)
{
    struct row row;
    struct keys at;
    int64_t seen = 0;
    row.f = f;
    row.s = &t->seq->s;
    row.b = t->b, row.h = t->h + r / t->n, row.i = t->i0 + r % t->n;
    row.keys = attn_keys_of(&f->g, row.s, row.i);
    const int64_t range = row.keys.hi - row.keys.lo;
    if (range <= 1 || (!f->p->keep_mask.rank && !f->p->bias.rank && !f->mask_heads)) return range == 1;
    /* Two keys near the row's own position are tested first, because most rows see them. */
    const int64_t own = attn_clamp64(row.i + attn_align(&f->g, row.s), row.keys.lo + 1, row.keys.hi - 1);
    if (sees(&row, own) && sees(&row, own - 1)) return false;
    for (int64_t j = row.keys.lo; j < row.keys.hi && seen < 2; j += at.n) {
        look(&row, j, row.keys.hi, &at);
        seen += at.seen;
    }
    return seen == 1;
}

/* ---- Rows whose scores are all equal ----------------------------------------------------------------------------- */

/* Returns the largest absolute value in k (if `which` is 0) or in v (if `which` is 1) of a key/value head; infinity if
 * a number is not finite. The first call computes the result and stores it for later calls. */
static float most_of(const struct flash *f, int64_t b, int64_t hk, int which)
{
    const attn_view *view = &f->g.view[which ? ATTN_T_v : ATTN_T_k];
    const attn_sequence *s = &f->seq[b].s;
    _Atomic float *known = &f->most[2 * (b * f->g.dims.Hk + hk) + which];
    float most = atomic_load_explicit(known, memory_order_relaxed);
    if (most >= 0) return most;
    most = 0;
    struct flash_keys part;
    for (int64_t j = 0; j < s->Sk; j += part.count) {
        part = flash_keys_at(f, view, b, hk, s->k_start + j, (int)(s->Sk - j), 1, 0, NULL);
        most = fmaxf(most, f->simd->most(part.count, (int)(which ? f->g.dims.Dv : f->g.dims.D), part.rows, view->dtype,
                                         part.stride));
    }
    atomic_store_explicit(known, most, memory_order_relaxed);
    return most;
}

static double saturated(double z)
{
    /* both comparisons are false for NaN, which is therefore returned as it is */
    return z > FLT_MAX ? FLT_MAX : z < -FLT_MAX ? -FLT_MAX : z;
}

int64_t flash_exact_alike(const struct flash *f, int64_t b, int64_t h, int64_t i, struct flash_strange *found)
{
    struct row row;
    struct keys at;
    int64_t seen = 0;
    float bias = 0, size = 0;
    if (!f->p->bias.rank) return 0;
    open_row(&row, f, b, h, i);
    for (int64_t j = row.keys.lo; j < row.keys.hi; j += at.n) {
        int others = 0;
        look(&row, j, row.keys.hi, &at);
        for (int x = 0; seen == 0 && x < at.n; x++)
            if (at.sees[x]) {
                bias = at.bias[x];
                break;
            }
        for (int x = 0; x < KEYS; x++) others += at.sees[x] & (at.bias[x] != bias);
        if (others) return 0;
        seen += at.seen;
    }
    if (seen == 0) return 0;
    for (int64_t d = 0; d < f->g.dims.D; d++) size += fabsf(row.q[d]);
    double most = fabs(row.scale) * size * most_of(f, b, row.hk, 0);
    if (row.options.softcap > 0) most = fmin(most, row.options.softcap);
    most += fabs(row.slope) * (double)(row.s->Sq + row.s->Sk);
    /* `most` is an upper bound on the size of what q . k and ALiBi add to the bias. If this is less than half a unit in
     * the last place of the bias as a double, all scores equal the bias. */
    if (!(most < 0x1p-55 * fabsf(bias))) return 0;
    const double sink = sink_of(f, h), z = saturated(bias), top = fmax(z, sink);
    const double sum = (double)seen * exp(z - top) + (sink > -INFINITY ? exp(sink - top) : 0);
    *found = (struct flash_strange){ .kind = FLASH_ALIKE, .z = z, .lse = { top, log(sum) } };
    return seen;
}

/* ---- Scores in double -------------------------------------------------------------------------------------------- */

static void score_keys(const struct row *row, struct keys *at, int x0, int x1)
{
    const struct flash *f = row->f;
    const attn_view *k = &f->g.view[ATTN_T_k];
    struct flash_keys part;
    for (int x = x0; x < x1; x += part.count) {
        part = flash_keys_at(f, k, row->b, row->hk, row->s->k_start + at->j + x, x1 - x, 1, 0, NULL);
        f->simd->dots_exact(part.count, (int)f->g.dims.D, row->q, part.rows, k->dtype, part.stride, at->z + x);
    }
    for (int x = x0; x < x1; x++) {
        const int64_t j = at->j + x;
        double z = attn_score_of(&row->options, row->s, row->i, j, at->z[x] * row->scale, &at->slope[x]);
        if (f->p->bias.rank) z += at->bias[x];
        if (row->slope != 0) z -= row->slope * fabs((double)(row->i + row->s->Sk - row->s->Sq - j));
        at->z[x] = saturated(z);
    }
}

/* Computes out += P V over the keys; P is 0 for a key that the row does not see. A visible key's row of V is used even
 * where P is 0, because it may contain NaN. `real`: V of this head contains no NaN and no infinity, so rows of V with P
 * = 0 may be skipped. */
static void add_values(const struct row *row, const struct keys *at, float *P, bool real, double *out)
{
    const struct flash *f = row->f;
    const attn_view *v = &f->g.view[ATTN_T_v];
    const int Dv = (int)f->g.dims.Dv;
    float O[ATTN_MAX_HEAD_DIM];
    double share = 1;
    for (bool finite = false; !finite;) {
        struct flash_keys part;
        memset(O, 0, (size_t)Dv * sizeof *O);
        for (int x = 0; x < at->n; x += part.count) {
            part = flash_keys_at(f, v, row->b, row->hk, row->s->k_start + at->j + x, at->n - x, 1, 0, NULL);
            f->simd->axpys(1, part.count, Dv, P + x, KEYS, part.rows, v->dtype, part.stride, O, 0);
        }
        finite = share > 1 || f->simd->all_finite(1, Dv, O, 0);
        if (finite) break;
        share = 1 << SHARE_BITS;
        for (int x = 0; x < at->n; x++) P[x] *= 1.0f / (1 << SHARE_BITS);
    }
    for (int d = 0; d < Dv; d++) out[d] += O[d] * share;
    for (int x = 0; !real && x < at->n; x++) {
        if (!at->sees[x] || P[x] != 0) continue;
        f->simd->load(Dv, flash_key_at(f, v, row->b, row->hk, row->s->k_start + at->j + x), v->dtype, O);
        for (int d = 0; d < Dv; d++) out[d] += 0 * O[d];
    }
}

struct flash_lse flash_exact_row(const struct flash *f, int64_t b, int64_t h, int64_t i, double *out)
{
    const int64_t Dv = f->g.dims.Dv;
    struct row row;
    struct keys at;
    double top = sink_of(f, h), sum = top > -INFINITY ? 1 : 0;
    open_row(&row, f, b, h, i);
    const bool real = out && most_of(f, b, row.hk, 1) < INFINITY;
    for (int64_t d = 0; out && d < Dv; d++) out[d] = 0;
    for (int64_t j = row.keys.lo; j < row.keys.hi; j += at.n) {
        float P[KEYS], drop[KEYS];
        double most = top, nan = 0;
        look(&row, j, row.keys.hi, &at);
        if (at.seen == 0) continue;
        score_keys(&row, &at, 0, at.n);
        for (int x = 0; x < at.n; x++) {
            if (!at.sees[x]) continue;
            most = at.z[x] > most ? at.z[x] : most;
            nan += at.z[x] * 0;
        }
        if (nan != nan) { /* true if some score is NaN: the row's result is then NaN, whatever the other keys are */
            for (int64_t d = 0; out && d < Dv; d++) out[d] = NAN;
            return (struct flash_lse){ NAN, 0 };
        }
        if (most > top) {
            const double rescale = top > -INFINITY ? exp(top - most) : 0;
            sum *= rescale;
            for (int64_t d = 0; out && d < Dv; d++) out[d] *= rescale;
            top = most;
        }
        for (int x = 0; x < at.n; x++) P[x] = at.sees[x] ? (float)((at.z[x] - top) * M_LOG2E) : -INFINITY;
        f->simd->exp2(at.n, P, P);
        for (int x = 0; x < at.n; x++) sum += P[x];
        if (!out) continue;
        if (f->dropout) {
            flash_drop_row(f, b, h, i, j, at.n, drop);
            for (int x = 0; x < at.n; x++) P[x] *= drop[x];
        }
        add_values(&row, &at, P, real, out);
    }
    const double v_scale = f->p->v_scale.rank ? *(const float *)flash_at(&f->g.view[ATTN_T_v_scale], b, row.hk, 0) : 1;
    for (int64_t d = 0; out && d < Dv; d++) out[d] = sum > 0 ? out[d] / sum * v_scale * f->drop_scale : 0;
    return (struct flash_lse){ top, sum > 0 ? log(sum) : 0 };
}

void flash_exact_sums(const struct flash *f, int64_t b, int64_t h, int64_t i, double *m, double *l, double *e,
                      struct flash_top *top)
{
    struct row row;
    struct keys at;
    *m = -INFINITY, *l = *e = 0;
    open_row(&row, f, b, h, i);
    for (int64_t j = row.keys.lo; j < row.keys.hi; j += at.n) {
        double most = *m, nan = 0;
        look(&row, j, row.keys.hi, &at);
        if (at.seen == 0) continue;
        score_keys(&row, &at, 0, at.n);
        for (int x = 0; x < at.n; x++) {
            if (!at.sees[x]) continue;
            most = at.z[x] > most ? at.z[x] : most;
            nan += at.z[x] * 0;
        }
        if (nan != nan) {
            *m = NAN;
            return;
        }
        if (*l > 0 && most > *m) {
            const double by = *m - most, rescale = exp(by);
            *e = rescale > 0 ? rescale * (*e + by * *l) : 0;
            *l *= rescale;
        }
        *m = most;
        for (int x = 0; x < at.n; x++) {
            if (!at.sees[x]) continue;
            const double by = at.z[x] - most, P = exp(by);
            *l += P;
            if (P > 0) *e += P * by;
            if (top && at.z[x] > flash_top_least(top)) flash_top_add(top, at.z[x], (int32_t)(j + x));
        }
    }
}

void flash_exact_scores(const struct flash *f, const struct flash_tile *t, int r, int64_t j, int cols,
                        struct flash_lse lse, double c, float *S, float *cap)
{
    struct row row;
    struct keys at;
    open_row(&row, f, t->b, t->h + r / t->n, t->i0 + r % t->n);
    for (int first = 0; first < cols; first += at.n) {
        look(&row, j + first, j + cols, &at);
        if (at.seen) score_keys(&row, &at, 0, at.n);
        for (int x = 0; x < at.n; x++)
            S[first + x] = at.sees[x] ? (float)((at.z[x] - lse.top - lse.rest) / c) : -INFINITY;
        for (int x = 0; cap && x < at.n; x++) cap[first + x] = at.sees[x] ? (float)at.slope[x] : 0;
    }
}

void flash_exact_mend_scores(const struct flash *f, const struct flash_tile *t, int64_t j, int cols, float *S,
                             int64_t lds, float *cap)
{
    struct row row;
    struct keys at;
    for (int r = 0; r < t->rows; r++) {
        float *s = S + r * lds;
        bool open = false;
        for (int first = 0; first < cols; first += at.n) {
            int x0 = KEYS, x1 = 0;
            at.n = (int)attn_min64(KEYS - (j + first) % KEYS, cols - first);
            for (int x = 0; x < at.n; x++)
                if (s[first + x] != s[first + x]) x0 = x < x0 ? x : x0, x1 = x + 1;
            if (x0 >= x1) continue;
            if (!open) open_row(&row, f, t->b, t->h + r / t->n, t->i0 + r % t->n);
            open = true;
            look(&row, j + first, j + cols, &at);
            score_keys(&row, &at, x0, x1);
            for (int x = x0; x < x1; x++) {
                if (s[first + x] == s[first + x]) continue;
                s[first + x] = at.z[x] < -FLT_MAX / M_LOG2E ? -FLT_MAX : (float)(at.z[x] * M_LOG2E);
                if (cap) cap[r * lds + first + x] = (float)at.slope[x];
            }
        }
    }
}
