/* reference.c: textbook loops in double, with every option. Their results define what is correct. The loops follow the
 * definitions of kernels/README.md line by line: no tiles, no online softmax. The backend "reference" runs them on one
 * thread (plain.c). The backend "cpu" runs them as the kernel "double", for problems that its fast kernels do not
 * support.
 *
 * A pair (i, j) that a mask hides is never used, so a NaN there has no effect. A visible pair is used even where its P
 * is 0. A row that sees nothing has out = 0, lse = -inf (with a sink: lse = sink) and gradients of 0. Each result is
 * rounded once, when it is stored. All sums run in one fixed order. lse is held in two parts: the row's maximum, and
 * the logarithm of the sum of exp(score - maximum). One double would lose this logarithm beside a score of 1e38. */
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/reference.h"
#include "kernels/dtype.h"
#include "kernels/philox.h"
#include "kernels/score.h"
#include "kernels/tiles.h"

/* ---- One row of a problem: its scores and results ---------------------------------------------------------------- */

/* The state that the loops of this file share. Arrays of a row have Sk elements, and hold numbers only for keys j with
 * sees[j]. */
struct reference {
    const attn_problem *p;
    attn_geometry g;
    attn_score_options options;
    /* dropout drops an element of P if the element's random bits (philox.h) are below this number */
    uint32_t threshold;

    int64_t b, h, hk;
    attn_sequence s;

    double *K, *V;      /* K [Sk, D] and V [Sk, Dv] of key/value head hk */
    double *dK, *dV;    /* gradients of K and V in a backward, summed over the query heads of the group */
    double *q, *dq;     /* row i of q and of dq, D numbers each; row i is the row that is being computed */
    double *out, *dout; /* row i of out and of dout, Dv numbers each */
    bool *sees;
    double *z, *derivative, *P; /* score z of each key, the derivative of z with respect to scale q . k, and P */
    /* the outputs key_mass and map of head h, in an observe (statistics of probabilities) */
    double *mass, *map;
    struct seen {
        /* In an observe (statistics of probabilities): `most` is the largest row_max of the rows of head h, and
         * `entropy` is the sum of their entropies. */
        double most, entropy;
        int64_t rows; /* number of rows of head h that see at least one key */
    } seen;
    /* gradients that are sums over all broadcast axes; NULL where not requested */
    double *dbias, *dsinks, *dslopes;
};

static double load(const struct reference *r, attn_tensor_id id, int64_t head, int64_t row, int64_t column)
{
    const attn_view *view = &r->g.view[id];
    return attn_load(view->dtype, view->data, attn_at(view, r->b, head, row) + column);
}

static double load_key(const struct reference *r, attn_tensor_id id, int64_t j, int64_t column)
{
    const attn_view *view = &r->g.view[id];
    return attn_load(view->dtype, view->data, attn_key_at(&r->g, view, r->b, r->hk, r->s.k_start + j) + column);
}

static void store(const struct reference *r, attn_tensor_id id, int64_t head, int64_t row, int64_t column, double x)
{
    const attn_view *view = &r->g.view[id];
    if (view->data) attn_store(view->dtype, view->data, attn_at(view, r->b, head, row) + column, x);
}

static bool given(const struct reference *r, attn_tensor_id id)
{
    return r->p->tensor[id].rank > 0;
}

/* Returns the scale of a float8 tensor for this key/value head; 1 if no scale is given. `id` is the tensor with the
 * scales, such as k_scale. */
static double scale_of(const struct reference *r, attn_tensor_id id)
{
    return given(r, id) ? load(r, id, r->hk, 0, 0) : 1;
}

/* Returns whether query i sees key j. `keys` is the range of keys that causal mask and window let the query see; the
 * function tests keep_mask, bias and FlashMask. */
static bool sees(const struct reference *r, attn_range keys, int64_t i, int64_t j)
{
    if (j < keys.lo || j >= keys.hi) return false;
    const int64_t column = j - attn_keep_from(&r->g, &r->s);
    if (given(r, ATTN_T_keep_mask) && column >= 0 && load(r, ATTN_T_keep_mask, r->h, i, column) == 0) return false;
    if (given(r, ATTN_T_bias) && load(r, ATTN_T_bias, r->h, i, j) == -INFINITY) return false;
    if (given(r, ATTN_T_mask_startend_rows)) {
        const attn_view *view = &r->g.view[ATTN_T_mask_startend_rows];
        const int32_t *bounds = (const int32_t *)view->data + attn_at(view, r->b, r->h / r->g.mask_group, j);
        if (attn_mask_hides(attn_mask_of(bounds, r->g.mask_bounds, r->g.causal, r->g.dims.Sq), i)) return false;
    }
    return true;
}

/* Returns ALiBi's distance |i + Sk - Sq - j|, which is 0 for the last query and the last key. This holds whether causal
 * masks are aligned top left or bottom right. */
static double distance(const struct reference *r, int64_t i, int64_t j)
{
    return fabs((double)(i + r->s.Sk - r->s.Sq - j));
}

/* Returns M_ij, the factor by which dropout multiplies P_ij: 0 or 1 / (1 - dropout_p). */
static double dropout(const struct reference *r, int64_t i, int64_t j)
{
    if (r->p->dropout_p == 0) return 1;
    return attn_dropout_keep(r->p->seed, attn_dropout_head(r->p, r->g.dims.H, r->b, r->h), i, j, r->threshold)
               ? 1 / (1 - r->p->dropout_p)
               : 0;
}

/* Limits a score to the range of float32. NaN stays NaN. */
static double saturated(double z)
{
    return z > FLT_MAX ? FLT_MAX : z < -FLT_MAX ? -FLT_MAX : z;
}

static void score_row(struct reference *r, int64_t i)
{
    const attn_range keys = attn_keys_of(&r->g, &r->s, i);
    const int64_t D = r->g.dims.D;
    const double q_scale = scale_of(r, ATTN_T_q_scale);
    for (int64_t d = 0; d < D; d++) r->q[d] = q_scale * load(r, ATTN_T_q, r->h, r->s.q_start + i, d);
    for (int64_t j = 0; j < r->s.Sk; j++) {
        double s = 0;
        if (!(r->sees[j] = sees(r, keys, i, j))) continue;
        for (int64_t d = 0; d < D; d++) s += r->q[d] * r->K[j * D + d];
        s = attn_score_of(&r->options, &r->s, i, j, s * r->g.scale, &r->derivative[j]);
        if (given(r, ATTN_T_bias)) s += load(r, ATTN_T_bias, r->h, i, j);
        if (given(r, ATTN_T_alibi_slopes)) s -= load(r, ATTN_T_alibi_slopes, r->h, 0, 0) * distance(r, i, j);
        r->z[j] = saturated(s);
    }
}

/* lse = top + rest. top is the maximum of the row's scores and the sink, and rest is ln(sum_j exp(z_j - top) + exp(sink
 * - top)). NaN anywhere in the row makes lse NaN. Without a sink, a row that sees no key has an lse of -inf. */
struct lse {
    double top, rest;
};

static struct lse lse_of_row(const struct reference *r)
{
    const bool sink = given(r, ATTN_T_sinks);
    double m = sink ? load(r, ATTN_T_sinks, r->h, 0, 0) : -INFINITY, sum = 0;
    const double sink_logit = m;
    for (int64_t j = 0; j < r->s.Sk; j++) {
        if (!r->sees[j]) continue;
        /* NaN is tested here, because fmax() below ignores it */
        if (isnan(r->z[j])) return (struct lse){ NAN, 0 };
        m = fmax(m, r->z[j]);
    }
    /* -inf - -inf below would give NaN */
    if (m == -INFINITY) return (struct lse){ -INFINITY, 0 };
    for (int64_t j = 0; j < r->s.Sk; j++)
        if (r->sees[j]) sum += exp(r->z[j] - m);
    if (sink) sum += exp(sink_logit - m);
    return (struct lse){ m, log(sum) };
}

/* Returns the lse that a backward was given. An lse of ATTN_LSE_MOST or more is too coarse (its last bit is worth 2),
 * so it is computed again from the scores. If the row sees only one key, and the given lse equals the key's score up to
 * rounding, the function returns the score itself, so that P is exactly 1. */
static struct lse given_lse_of_row(const struct reference *r, int64_t row)
{
    const double lse = load(r, ATTN_T_lse, r->h, row, 0);
    int64_t seen = 0, key = 0;
    if (!(fabs(lse) < ATTN_LSE_MOST) && lse != -INFINITY && !isnan(lse)) return lse_of_row(r);
    for (int64_t j = 0; j < r->s.Sk; j++)
        if (r->sees[j]) seen++, key = j;
    if (seen == 1 && fabs(r->z[key] - lse) <= ATTN_LSE_SLACK * fabs(lse)) return (struct lse){ r->z[key], 0 };
    return (struct lse){ lse, 0 };
}

static void probabilities_of_row(struct reference *r, struct lse lse)
{
    for (int64_t j = 0; j < r->s.Sk; j++)
        if (r->sees[j]) r->P[j] = lse.top == -INFINITY ? 0 : exp(r->z[j] - lse.top - lse.rest);
}

static void output_of_row(struct reference *r, int64_t i)
{
    const int64_t Dv = r->g.dims.Dv;
    for (int64_t e = 0; e < Dv; e++) r->out[e] = 0;
    for (int64_t j = 0; j < r->s.Sk; j++) {
        if (!r->sees[j]) continue;
        const double weight = r->P[j] * dropout(r, i, j);
        for (int64_t e = 0; e < Dv; e++) r->out[e] += weight * r->V[j * Dv + e];
    }
}

static void forward_row(struct reference *r, int64_t i)
{
    score_row(r, i);
    const struct lse lse = lse_of_row(r);
    probabilities_of_row(r, lse);
    output_of_row(r, i);
    for (int64_t e = 0; e < r->g.dims.Dv; e++) store(r, ATTN_T_out, r->h, r->s.q_start + i, e, r->out[e]);
    store(r, ATTN_T_lse, r->h, r->s.q_start + i, 0, lse.top + lse.rest);
}

/* Adds the contribution of row i to every gradient:
 *     delta = dout . out - dlse        dP_j = M_j (dout . v_j)        dZ_j = P_j (dP_j - delta)
 *     dS_j = dZ_j derivative_j
 * dq is a sum of dS_j k_j, dk a sum of dS_j q, and dv a sum of P_j M_j dout. dbias and dslopes are sums of dZ_j. dsinks
 * is minus the sum of delta times the sink's probability. */
static void backward_row(struct reference *r, int64_t i)
{
    const int64_t D = r->g.dims.D, Dv = r->g.dims.Dv, row = r->s.q_start + i;
    const attn_view *bias = &r->g.view[ATTN_T_dbias];
    struct lse lse;
    double delta = 0;

    score_row(r, i);
    lse = given(r, ATTN_T_lse) ? given_lse_of_row(r, row) : lse_of_row(r);
    probabilities_of_row(r, lse);
    if (!given(r, ATTN_T_out)) output_of_row(r, i);
    else
        for (int64_t e = 0; e < Dv; e++) r->out[e] = load(r, ATTN_T_out, r->h, row, e);
    for (int64_t e = 0; e < Dv; e++) {
        r->dout[e] = load(r, ATTN_T_dout, r->h, row, e);
        delta += r->dout[e] * r->out[e];
    }
    if (given(r, ATTN_T_dlse)) delta -= load(r, ATTN_T_dlse, r->h, row, 0);

    for (int64_t d = 0; d < D; d++) r->dq[d] = 0;
    for (int64_t j = 0; j < r->s.Sk; j++) {
        double dP = 0, dZ, dS;
        const double M = dropout(r, i, j);
        if (!r->sees[j] || lse.top == -INFINITY) continue;
        for (int64_t e = 0; e < Dv; e++) {
            dP += r->dout[e] * r->V[j * Dv + e];
            r->dV[j * Dv + e] += r->P[j] * M * r->dout[e];
        }
        dZ = r->P[j] * (M * dP - delta);
        dS = dZ * r->derivative[j];
        for (int64_t d = 0; d < D; d++) {
            r->dq[d] += r->g.scale * dS * r->K[j * D + d];
            r->dK[j * D + d] += r->g.scale * dS * r->q[d];
        }
        if (r->dbias) r->dbias[attn_at(bias, r->b, r->h, i) + j] += dZ;
        if (r->dslopes) r->dslopes[attn_at(&r->g.view[ATTN_T_dalibi_slopes], r->b, r->h, 0)] -= dZ * distance(r, i, j);
    }
    if (r->dsinks && lse.top != -INFINITY)
        r->dsinks[r->h] -= exp(load(r, ATTN_T_sinks, r->h, 0, 0) - lse.top - lse.rest) * delta;
    for (int64_t d = 0; d < D; d++) store(r, ATTN_T_dq, r->h, row, d, r->dq[d]);
}

/* ---- One row of an observe --------------------------------------------------------------------------------------- */

/* Writes the outputs top_keys and top_weights of row i of an observe. Repeatedly finds the key with the largest score
 * and removes it from r->sees. */
static void top_of_row(struct reference *r, int64_t row, bool nan)
{
    const attn_view *const keys = &r->g.view[ATTN_T_top_keys];
    for (int64_t n = 0; n < r->g.observe.top; n++) {
        int64_t best = -1;
        for (int64_t j = 0; !nan && j < r->s.Sk; j++)
            if (r->sees[j] && (best < 0 || r->z[j] > r->z[best])) best = j;
        if (keys->data) ((int32_t *)keys->data)[attn_at(keys, r->b, r->h, row) + n] = (int32_t)best;
        store(r, ATTN_T_top_weights, r->h, row, n, nan ? NAN : best < 0 ? 0 : r->P[best]);
        if (best >= 0) r->sees[best] = false;
    }
}

/* Adds row i to `weights` and `map`, two outputs of an observe (statistics of probabilities) that show only some
 * queries and keys. */
static void region_of_row(struct reference *r, int64_t i)
{
    const attn_observe *const o = &r->g.observe;
    const int64_t rows = o->rows[1] - o->rows[0], keys = o->keys[1] - o->keys[0];
    if ((r->g.dims.packed && r->b != o->sequence) || i < o->rows[0] || i >= o->rows[1]) return;
    for (int64_t j = o->keys[0]; j < attn_min64(o->keys[1], r->s.Sk); j++) {
        if (!r->sees[j]) continue;
        store(r, ATTN_T_weights, r->h, i - o->rows[0], j - o->keys[0], r->P[j]);
        if (r->map)
            r->map[(i - o->rows[0]) * o->map[0] / rows * o->map[1] + (j - o->keys[0]) * o->map[1] / keys] += r->P[j];
    }
}

/* Returns a row's lse for an observe (statistics of probabilities): the lse that the caller gave, or else the lse of
 * the row's scores. */
static struct lse observed_lse_of_row(const struct reference *r, int64_t row)
{
    const double lse = r->g.observe.given_lse ? load(r, ATTN_T_lse, r->h, row, 0) : NAN;
    const bool says_nothing = fabs(lse) >= ATTN_LSE_MOST && lse != -INFINITY;
    return r->g.observe.given_lse && !says_nothing ? (struct lse){ lse, 0 } : lse_of_row(r);
}

static void observe_row(struct reference *r, int64_t i)
{
    const int64_t row = r->s.q_start + i, mass_rows = r->g.observe.key_mass_rows;
    double most = -INFINITY, entropy = 0;
    bool sees_some = false, nan = false;
    score_row(r, i);
    const struct lse lse = observed_lse_of_row(r, row);
    probabilities_of_row(r, lse);
    for (int64_t j = 0; j < r->s.Sk; j++) {
        if (!r->sees[j]) continue;
        sees_some = true;
        nan |= isnan(r->P[j]);
        most = fmax(most, r->z[j]);
        if (r->P[j] > 0) entropy -= r->P[j] * (r->z[j] - lse.top - lse.rest);
        if (r->mass && (mass_rows == 0 || i >= r->s.Sq - mass_rows)) r->mass[j] += r->P[j];
    }
    region_of_row(r, i);
    if (given(r, ATTN_T_sinks) && sees_some && lse.top > -INFINITY) {
        const double z = load(r, ATTN_T_sinks, r->h, 0, 0) - lse.top - lse.rest;
        if (exp(z) > 0) entropy -= exp(z) * z;
    }
    if (nan) most = entropy = NAN;
    store(r, ATTN_T_row_max, r->h, row, 0, most);
    store(r, ATTN_T_entropy, r->h, row, 0, entropy);
    if (!r->g.observe.given_lse) store(r, ATTN_T_lse, r->h, row, 0, lse.top + lse.rest);
    top_of_row(r, row, nan);
    if (!sees_some) return;
    r->seen.most = isnan(most) || isnan(r->seen.most) ? NAN : fmax(r->seen.most, most);
    r->seen.entropy += entropy;
    r->seen.rows++;
}

static void begin_observing_head(struct reference *r)
{
    const attn_observe *const o = &r->g.observe;
    r->seen = (struct seen){ .most = -INFINITY };
    if (r->mass) memset(r->mass, 0, (size_t)r->s.Sk * sizeof *r->mass);
    if (r->map) memset(r->map, 0, (size_t)(o->map[0] * o->map[1]) * sizeof *r->map);
}

static void store_observed_head(struct reference *r)
{
    const attn_observe *const o = &r->g.observe;
    const bool region = !r->g.dims.packed || r->b == o->sequence;
    store(r, ATTN_T_max_logit, r->h, 0, 0, r->seen.most);
    store(r, ATTN_T_mean_entropy, r->h, 0, 0, r->seen.rows > 0 ? r->seen.entropy / (double)r->seen.rows : 0);
    for (int64_t j = 0; r->mass && j < r->s.Sk; j++) store(r, ATTN_T_key_mass, r->h, 0, r->s.k_start + j, r->mass[j]);
    for (int64_t u = 0; r->map && region && u < o->map[0]; u++)
        for (int64_t v = 0; v < o->map[1]; v++) store(r, ATTN_T_map, r->h, u, v, r->map[u * o->map[1] + v]);
}

/* ---- One head: loading it, and storing its gradients ------------------------------------------------------------- */

/* Loads K and V of sequence b, head hk. The function reads neither keys that do not exist (past seqlens_k) nor pages
 * that hold no key. */
static void load_head(struct reference *r)
{
    const double k_scale = scale_of(r, ATTN_T_k_scale), v_scale = scale_of(r, ATTN_T_v_scale);
    const int64_t D = r->g.dims.D, Dv = r->g.dims.Dv;
    for (int64_t j = 0; j < r->s.Sk; j++) {
        for (int64_t d = 0; d < D; d++) r->K[j * D + d] = k_scale * load_key(r, ATTN_T_k, j, d);
        for (int64_t e = 0; e < Dv; e++) r->V[j * Dv + e] = v_scale * load_key(r, ATTN_T_v, j, e);
    }
}

/* Stores dk and dv of the current head. If k and v are not packed, rows of dk and dv past seqlens_k become 0. */
static void store_head_gradients(struct reference *r)
{
    const int64_t D = r->g.dims.D, Dv = r->g.dims.Dv, rows = r->g.dims.packed ? r->s.Sk : r->g.dims.Sk;
    for (int64_t j = 0; j < rows; j++) {
        for (int64_t d = 0; d < D; d++)
            store(r, ATTN_T_dk, r->hk, r->s.k_start + j, d, j < r->s.Sk ? r->dK[j * D + d] : 0);
        for (int64_t e = 0; e < Dv; e++)
            store(r, ATTN_T_dv, r->hk, r->s.k_start + j, e, j < r->s.Sk ? r->dV[j * Dv + e] : 0);
    }
}

/* Stores a gradient that is a sum over batch rows, after all batch rows have been added. `from` has the sums in double,
 * at the same offsets as the elements of the tensor. */
static void store_sums(const attn_problem *p, attn_tensor_id id, const double *from)
{
    const attn_tensor *t = &p->tensor[id];
    int64_t index[ATTN_MAX_RANK] = { 0 }, elements;
    if (!from || !attn_shape_elements(t->rank, t->shape, &elements)) return;
    for (int64_t n = 0; n < elements; n++) {
        int64_t offset = 0;
        for (int a = 0; a < t->rank; a++) offset += index[a] * (t->shape[a] == 1 ? 0 : t->stride[a]);
        attn_store(t->dtype, t->data, offset, from[offset]);
        for (int a = t->rank - 1; a >= 0 && ++index[a] == t->shape[a]; a--) index[a] = 0;
    }
}

/* ---- Memory for a problem's numbers in double -------------------------------------------------------------------- */

/* Allocates a * b elements of `bytes` bytes each, all 0. Returns false if memory runs out or the size overflows. */
static bool zeros(void *pointer, int64_t a, int64_t b, size_t bytes)
{
    int64_t n;
    void *memory;
    if (__builtin_mul_overflow(a, b, &n) || n < 0) return false;
    memory = calloc((size_t)n + 1, bytes); /* the + 1 avoids calloc(0), which may return NULL */
    memcpy(pointer, &memory, sizeof memory);
    return memory != NULL;
}

/* Returns the number of elements of memory from the first to the last element of a tensor, gaps between elements
 * included. */
static int64_t extent(const attn_tensor *t)
{
    int64_t n = 1;
    for (int a = 0; a < t->rank; a++) {
        if (t->shape[a] == 0) return 0;
        n += (t->shape[a] - 1) * t->stride[a];
    }
    return n;
}

/* Allocates memory for one head of the problem and for the requested gradients that are sums over heads or batch rows.
 * Returns false if memory runs out. */
static bool open_reference(struct reference *r, const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    const attn_dims *d = &g.dims;
    const bool backward = p->op == ATTN_OP_BACKWARD, observe = p->op == ATTN_OP_OBSERVE;
    *r = (struct reference){ .p = p, .g = g, .options = attn_score_options_of(&g) };
    r->threshold = attn_dropout_threshold(p->dropout_p);
    return zeros(&r->K, d->Sk, d->D, sizeof *r->K) && zeros(&r->V, d->Sk, d->Dv, sizeof *r->V) &&
           zeros(&r->dK, backward ? d->Sk : 0, d->D, sizeof *r->dK) &&
           zeros(&r->dV, backward ? d->Sk : 0, d->Dv, sizeof *r->dV) && zeros(&r->q, 1, d->D, sizeof *r->q) &&
           zeros(&r->dq, 1, d->D, sizeof *r->dq) && zeros(&r->out, 1, d->Dv, sizeof *r->out) &&
           zeros(&r->dout, 1, d->Dv, sizeof *r->dout) && zeros(&r->sees, 1, d->Sk, sizeof *r->sees) &&
           zeros(&r->z, 1, d->Sk, sizeof *r->z) && zeros(&r->derivative, 1, d->Sk, sizeof *r->derivative) &&
           zeros(&r->P, 1, d->Sk, sizeof *r->P) &&
           (!observe || !p->key_mass.rank || zeros(&r->mass, 1, d->Sk, sizeof *r->mass)) &&
           (!observe || !p->map.rank || zeros(&r->map, g.observe.map[0], g.observe.map[1], sizeof *r->map)) &&
           (!backward || !p->dbias.rank || zeros(&r->dbias, 1, extent(&p->dbias), sizeof *r->dbias)) &&
           (!backward || !p->dsinks.rank || zeros(&r->dsinks, 1, d->H, sizeof *r->dsinks)) &&
           (!backward || !p->dalibi_slopes.rank ||
            zeros(&r->dslopes, 1, extent(&p->dalibi_slopes), sizeof *r->dslopes));
}

static void close_reference(struct reference *r)
{
    free(r->K), free(r->V), free(r->dK), free(r->dV), free(r->q), free(r->dq), free(r->out), free(r->dout);
    free(r->sees), free(r->z), free(r->derivative), free(r->P), free(r->dbias), free(r->dsinks), free(r->dslopes);
    free(r->mass), free(r->map);
}

/* ---- All heads of a problem -------------------------------------------------------------------------------------- */

static attn_status run_head(struct reference *r, int64_t b, int64_t hk, const int *cancel)
{
    const attn_dims *d = &r->g.dims;
    const bool backward = r->p->op == ATTN_OP_BACKWARD, observe = r->p->op == ATTN_OP_OBSERVE;
    r->b = b, r->hk = hk;
    r->s = attn_sequence_of(&r->g, b);
    load_head(r);
    if (backward) {
        memset(r->dK, 0, (size_t)(r->s.Sk * d->D) * sizeof *r->dK);
        memset(r->dV, 0, (size_t)(r->s.Sk * d->Dv) * sizeof *r->dV);
    }
    for (r->h = hk * r->g.group; r->h < (hk + 1) * r->g.group; r->h++) {
        if (observe) begin_observing_head(r);
        for (int64_t i = 0; i < r->s.Sq; i++) {
            if (attn_is_cancelled(cancel)) return ATTN_CANCELLED;
            if (observe) observe_row(r, i);
            else backward ? backward_row(r, i) : forward_row(r, i);
        }
        if (observe) store_observed_head(r);
    }
    if (backward) store_head_gradients(r);
    return ATTN_OK;
}

/* The key/value heads of all sequences, divided into stretches (consecutive heads), which threads compute side by
 * side. */
struct stretches {
    const attn_problem *p;
    const int *cancel;
    /* number of key/value heads: `Hk` in one sequence, `heads` in all sequences, `each` in one stretch (heads computed
     * by one thread) */
    int64_t Hk, heads, each;
    _Atomic int status;
};

static void run_stretch(void *context, int worker, int64_t item)
{
    struct stretches *all = context;
    struct reference r;
    (void)worker;
    if (atomic_load(&all->status) != ATTN_OK) return;
    attn_status status = open_reference(&r, all->p) ? ATTN_OK : ATTN_NO_MEMORY;
    const int64_t end = attn_min64(all->heads, (item + 1) * all->each);
    for (int64_t n = item * all->each; n < end && status == ATTN_OK; n++)
        status = run_head(&r, n / all->Hk, n % all->Hk, all->cancel);
    if (status == ATTN_OK) {
        store_sums(all->p, ATTN_T_dbias, r.dbias);
        store_sums(all->p, ATTN_T_dsinks, r.dsinks);
        store_sums(all->p, ATTN_T_dalibi_slopes, r.dslopes);
    } else atomic_store(&all->status, (int)status);
    close_reference(&r);
}

/* The number of stretches (consecutive heads) per thread: several, so that all threads end at about the same time. */
enum { STRETCHES = 4 };

attn_status reference_run(const attn_problem *p, struct pool *pool, const int *cancel, attn_error *err)
{
    const attn_dims d = attn_dims_of(p);
    const bool sums = p->dbias.rank || p->dsinks.rank || p->dalibi_slopes.rank;
    struct stretches all = { .p = p, .cancel = cancel, .Hk = d.Hk, .heads = d.B * d.Hk };
    all.each = all.heads;
    if (pool && !sums) all.each = attn_max64(1, attn_tiles(all.heads, STRETCHES * pool_threads(pool)));
    if (all.each == all.heads) run_stretch(&all, 0, 0);
    else pool_run(pool, attn_tiles(all.heads, all.each), run_stretch, &all);
    switch (atomic_load(&all.status)) {
    case ATTN_OK: return ATTN_OK;
    case ATTN_CANCELLED: return attn_given_up(err);
    default:
        return attn_fail(err, ATTN_NO_MEMORY, "", "no memory for a problem in double with %lld keys", (long long)d.Sk);
    }
}
