/* emulate.c: attention with the roundings of a correct kernel.
 *
 * Products are in float32, summed in order. Each score is rounded once, and so is each exponential. P (after dropout)
 * and dS are rounded to q's dtype where that dtype has 16 bits or fewer. */
#include "kernels/judge/emulate.h"

#include <math.h>
#include <string.h>

#define LOG2E 1.44269504088896340736

/* The addresses in scratch memory of the arrays of an emulation (a kernel's computation with its roundings). */
struct places {
    float *KT, *V, *K, *VT, *Q, *dO, *z, *P, *acc, *dq, *more;
};

static int64_t more_of(const struct compute *c)
{
    return (c->most_keys + 1 > c->tile ? c->most_keys + 1 : c->tile) * (c->D > c->Dv ? c->D : c->Dv);
}

/* Divides `scratch` among the arrays of an emulation. If `floats` is not NULL, *floats becomes the number of floats
 * that the arrays take; `scratch` may then be NULL. */
static struct places places_of(const struct compute *c, float *scratch, int64_t *floats)
{
    const int64_t lines = c->most_keys + 1;
    struct places at;
    int64_t used = 0;
#define PLACE(name, count) at.name = scratch ? scratch + used : NULL, used += ((count) + 31) / 16 * 16
    PLACE(KT, c->D * c->keys);
    PLACE(V, lines * c->Dv);
    PLACE(K, lines * c->D);
    PLACE(VT, c->Dv * c->keys);
    PLACE(Q, c->tile * c->D);
    PLACE(dO, c->tile * c->Dv);
    PLACE(z, c->tile * c->keys);
    PLACE(P, c->tile * c->keys);
    PLACE(acc, c->tile * c->Dv);
    PLACE(dq, c->tile * c->D);
    PLACE(more, more_of(c));
#undef PLACE
    if (floats) *floats = used;
    return at;
}

int64_t emulate_floats(const struct compute *c)
{
    int64_t floats;
    (void)places_of(c, NULL, &floats);
    return floats + 16; /* 16 floats more than needed, so that the scratch memory can be aligned to 64 bytes */
}

static void narrow(const double *from, int64_t count, float *to)
{
    for (int64_t n = 0; n < count; n++) to[n] = (float)from[n];
}

void emulate_keys(const struct compute *c, float *scratch)
{
    const struct places at = places_of(c, scratch, NULL);
    narrow(c->KT, c->D * c->keys, at.KT);
    narrow(c->V, c->s.Sk * c->Dv, at.V);
    if (c->p->op != ATTN_OP_BACKWARD) return;
    narrow(c->K, c->s.Sk * c->D, at.K);
    narrow(c->VT, c->Dv * c->keys, at.VT);
}

/* Rounds a number of P or dS to q's dtype, as kernels do before a matrix product. If q is float8, kernels multiply P by
 * 256 before they round it, because small numbers would otherwise become 0. */
static float as_operand(const struct compute *c, double x)
{
    const attn_dtype dtype = c->p->q.dtype;
    if (dtype == ATTN_F32) return (float)x;
    if (dtype == ATTN_F8E4M3) return (float)(compute_rounded(dtype, x * 256) / 256);
    return (float)compute_rounded(dtype, (float)x);
}

void emulate_round(attn_dtype dtype, double *x, int64_t count)
{
    for (int64_t n = 0; n < count; n++) x[n] = compute_rounded(dtype, (float)x[n]);
}

/* Does a step of the online softmax: updates the maxima, sums and weights of `count` rows by one tile of keys, lo to hi
 * - 1. */
static void softmax_tile(struct compute *c, const struct places *at, int64_t count, int64_t lo, int64_t hi, float *sum)
{
    for (int64_t r = 0; r < count; r++) {
        const double *const z = c->z + r * c->keys;
        float *const P = at->P + r * c->keys;
        double top = c->top[r];
        for (int64_t j = lo; j < hi; j++) top = z[j] > top || isnan(z[j]) ? z[j] : top;
        const double base = top == -INFINITY ? 0 : top;
        const float rescale = (float)exp(c->top[r] - base);
        sum[r] *= rescale;
        for (int64_t e = 0; e < c->Dv; e++) at->acc[r * c->Dv + e] *= rescale;
        for (int64_t j = lo; j < hi; j++) {
            const float p = z[j] == -INFINITY ? 0 : (float)exp(z[j] - base);
            sum[r] += p;
            P[j] = as_operand(c, (double)p * c->M[r * c->keys + j]);
        }
        c->top[r] = top;
    }
}

/* Adds the sink to the maximum and the sum of each row. This imitates kernels that count the sink after the last tile
 * of keys. */
static void add_sink(struct compute *c, const struct places *at, int64_t exist, double sink, float *sum)
{
    for (int64_t r = 0; r < exist && sink > -INFINITY; r++) {
        const double top = sink > c->top[r] || isnan(sink) ? sink : c->top[r];
        const float rescale = (float)exp(c->top[r] - top);
        sum[r] = sum[r] * rescale + (float)exp(sink - top);
        for (int64_t e = 0; e < c->Dv; e++) at->acc[r * c->Dv + e] *= rescale;
        c->top[r] = top;
    }
}

static void add_tile(const struct compute *c, const struct places *at, int64_t count, int64_t lo, int64_t hi)
{
    if (!c->strange) {
        c->products->in_float(count, c->Dv, hi - lo, at->P + lo, c->keys, 1, at->V + lo * c->Dv, c->Dv, at->acc, c->Dv);
        return;
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = lo; j < hi; j++)
            if (c->z[r * c->keys + j] != -INFINITY)
                for (int64_t e = 0; e < c->Dv; e++)
                    at->acc[r * c->Dv + e] += at->P[r * c->keys + j] * at->V[j * c->Dv + e];
}

/* Computes out in the way of kernels that divide P by the row's sum before they round P. */
static void normalize_first(struct compute *c, const struct places *at, int64_t count, const float *sum)
{
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = 0; j < c->s.Sk; j++) {
            const double z = c->z[r * c->keys + j];
            const float p = z == -INFINITY || sum[r] == 0 ? 0 : (float)exp(z - c->top[r]) / sum[r];
            at->P[r * c->keys + j] = as_operand(c, (double)p * c->M[r * c->keys + j]);
        }
    memset(at->acc, 0, (size_t)(count * c->Dv) * sizeof *at->acc);
    add_tile(c, at, count, 0, c->s.Sk);
}

static attn_dtype out_dtype(const struct compute *c)
{
    if (c->p->out.rank) return c->p->out.dtype;
    return c->p->q.dtype == ATTN_F8E4M3 ? ATTN_BF16 : c->p->q.dtype;
}

static void finish_rows(struct compute *c, const struct emulation *e, const struct places *at, int64_t count,
                        const float *sum)
{
    const attn_dtype dtype = out_dtype(c);
    for (int64_t r = 0; r < count; r++) {
        const bool empty = c->top[r] == -INFINITY;
        c->rest[r] = empty ? 0 : logf(sum[r]);
        c->lse[r] = empty ? -INFINITY : (float)((float)c->top[r] + (float)c->rest[r]);
        for (int64_t k = 0; k < c->Dv; k++) {
            const float x = at->acc[r * c->Dv + k];
            c->out[r * c->Dv + k] = empty ? 0 : compute_rounded(dtype, e->normalized_first ? x : x / sum[r]);
        }
    }
}

void emulate_tile_scores(struct compute *c, const variation *v, const struct compute_rows *rows, float *scratch)
{
    const struct places at = places_of(c, scratch, NULL);
    const int64_t count = rows->count, columns = (c->hi - c->lo + 15) / 16 * 16;
    compute_load_queries(c, v, rows);
    narrow(c->Q, count * c->D, at.Q);
    for (int64_t r = 0; r < count; r++) memset(at.z + r * c->keys + c->lo, 0, (size_t)columns * sizeof *at.z);
    c->products->in_float(count, columns, v->g.dims.D, at.Q, c->D, 1, at.KT + c->lo, c->keys, at.z + c->lo, c->keys);
    for (int64_t r = 0; r < count; r++) {
        double *const z = c->z + r * c->keys;
        for (int64_t j = c->lo; j < c->hi; j++) z[j] = at.z[r * c->keys + j];
        compute_scores(c, v, rows->b, rows->h, rows->first + r, r);
        for (int64_t j = c->lo; j < c->hi; j++) z[j] = (float)z[j];
        compute_dropout(c, v, rows->b, rows->h, rows->first + r, c->M + r * c->keys);
    }
}

void emulate_round_rows(struct compute *c, int64_t count)
{
    emulate_round(out_dtype(c), c->out, count * c->Dv);
    emulate_round(ATTN_F32, c->lse, count);
}

void emulate_rows(struct compute *c, const struct emulation *e, const variation *v, const struct compute_rows *rows,
                  float *scratch)
{
    const struct places at = places_of(c, scratch, NULL);
    const int64_t count = rows->count, Sk = c->s.Sk, tiles = attn_tiles(Sk, e->tile);
    float *const sum = at.dq; /* the rows' sums use the memory of dq, which a forward does not need */
    emulate_tile_scores(c, v, rows, scratch);
    for (int64_t r = 0; r < count; r++) {
        const double sink = e->sink_last ? -INFINITY : compute_sink(v, rows->h);
        c->top[r] = rows->first + r < c->s.Sq ? sink : -INFINITY;
        sum[r] = c->top[r] > -INFINITY ? 1 : 0;
    }
    memset(at.acc, 0, (size_t)(count * c->Dv) * sizeof *at.acc);
    for (int64_t n = 0; n < tiles; n++) {
        const int64_t lo = (e->backwards ? tiles - 1 - n : n) * e->tile, hi = attn_min64(lo + e->tile, Sk);
        softmax_tile(c, &at, count, lo, hi, sum);
        if (!e->normalized_first) add_tile(c, &at, count, lo, hi);
    }
    if (e->sink_last) add_sink(c, &at, attn_clamp64(c->s.Sq - rows->first, 0, count), compute_sink(v, rows->h), sum);
    if (e->normalized_first) normalize_first(c, &at, count, sum);
    finish_rows(c, e, &at, count, sum);
}

/* Adds the product of P and B to C as a kernel does: the factors are rounded, and the sums are computed in float32. If
 * `by_key` is true, the product is that of compute_add_to_keys(), otherwise that of compute_times_keys(). */
static void add_rounded(struct compute *c, const struct places *at, int64_t m, int64_t n, int64_t k, int64_t row,
                        int64_t column, const float *B, int64_t ldb, double *C, bool by_key)
{
    const float *const P = at->P + c->lo;
    const double *const z = c->z + c->lo;
    memset(at->more, 0, (size_t)(m * ldb) * sizeof *at->more);
    if (!c->strange) c->products->in_float(m, n, k, P, row, column, B, ldb, at->more, ldb);
    else
        for (int64_t i = 0; i < m; i++)
            for (int64_t t = 0; t < k; t++)
                if (z[by_key ? t * c->keys + i : i * c->keys + t] != -INFINITY)
                    for (int64_t e = 0; e < n; e++) at->more[i * ldb + e] += P[i * row + t * column] * B[t * ldb + e];
    for (int64_t i = 0; i < m; i++)
        for (int64_t e = 0; e < n; e++) C[i * ldb + e] = (float)(C[i * ldb + e] + at->more[i * ldb + e]);
}

static void round_weights(const struct compute *c, const struct places *at, int64_t count, const double *from)
{
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = c->lo; j < c->hi; j++) at->P[r * c->keys + j] = as_operand(c, from[r * c->keys + j]);
}

void emulate_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums, enum compute_wanted wanted, float *scratch)
{
    const struct places at = places_of(c, scratch, NULL);
    const attn_dims *const d = &v->g.dims;
    const int64_t count = rows->count, some = c->hi - c->lo, columns = (some + 15) / 16 * 16;
    /* the row's lse in base 2, rounded to float32, as some kernels read it in their backward */
    for (int64_t r = 0; r < count; r++)
        if (fabs(c->lse[r]) < ATTN_LSE_MOST) c->top[r] = (float)((float)c->lse[r] * LOG2E) / LOG2E, c->rest[r] = 0;
    compute_load_gradients(c, v, rows);
    narrow(c->dO, count * c->Dv, at.dO);
    for (int64_t r = 0; r < count; r++) memset(at.z + r * c->keys + c->lo, 0, (size_t)columns * sizeof *at.z);
    c->products->in_float(count, columns, d->Dv, at.dO, c->Dv, 1, at.VT + c->lo, c->keys, at.z + c->lo, c->keys);
    for (int64_t r = 0; r < count; r++) {
        for (int64_t j = c->lo; j < c->hi; j++) c->dP[r * c->keys + j] = at.z[r * c->keys + j];
        c->in_float = true;
        compute_row_gradients(c, v, rows, sums, r);
        c->in_float = false;
    }
    if (wanted & COMPUTE_DK_DV) {
        round_weights(c, &at, count, c->P);
        add_rounded(c, &at, some, c->Dv, count, 1, c->keys, at.dO, c->Dv, c->dV + c->lo * c->Dv, true);
    }
    round_weights(c, &at, count, c->dP);
    if (wanted & COMPUTE_DK_DV) {
        for (int64_t n = 0; n < count * c->D; n++) at.Q[n] = (float)(c->Q[n] * v->g.scale);
        add_rounded(c, &at, some, c->D, count, 1, c->keys, at.Q, c->D, c->dK + c->lo * c->D, true);
    }
    if (!(wanted & COMPUTE_DQ)) return;
    memset(c->dq, 0, (size_t)(count * c->D) * sizeof *c->dq);
    add_rounded(c, &at, count, c->D, some, c->keys, 1, at.K + c->lo * c->D, c->D, c->dq, false);
    for (int64_t n = 0; n < count * c->D; n++) c->dq[n] = (float)(c->dq[n] * v->g.scale);
}
