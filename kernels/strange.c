/* strange.c: estimates which share of a problem lies in strange rows (rows whose numbers exceed the range of
 * float32). */
#include "kernels/strange.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/simd.h"
#include "kernels/score.h"

enum {
    /* Largest number of rows that are sampled. A sample of 64 rows may miss slow rows if only 1 row in 64 is slow. The
     * problem then takes up to three times as long as estimated. */
    MOST_ROWS = 64,
    LEAST_ROWS = 8,
    /* cost of finding a key in memory (some 16 ns), as a number of elements of k that are read in the same time */
    KEY_NUMBERS = 16,
    /* Largest number of elements of k that are read for all sampled rows together (about a millisecond of work). At
     * least LEAST_ROWS rows are sampled, even if they exceed this limit. */
    NUMBERS = 1 << 19,
    /* largest number of elements of k that are read for one row. If the row's keys have more, only evenly spaced keys
     * are read, beginning with a random key. */
    ROW_NUMBERS = 1 << 19,
    /* largest number of keys that are tested for one row if only their bias and slopes are read, and not k */
    ROW_KEYS = 1 << 16,
    /* The number of queries in the smallest tile of any kernel. A kernel decides for a whole tile whether its rows may
     * have huge scores, by the largest absolute value of q in the tile. */
    TILE = 64,
};

struct look {
    const attn_problem *p;
    attn_geometry g;
    attn_score_options options;
    double most, cheap_from;
    /* A row is slow to compute if D * scale * largest |q| * largest |k| is at least this number
     * (attn_strange_limits.bound_from). Infinity: this product makes no row slow. */
    double bound_from;
    bool gradients;
    double bound; /* upper bound on |scale q . k|, after softcap */
    /* whether q . k need not be computed, because it is so small that only bias and slopes can make a row's scores
     * exceed the range of float32 */
    bool bounded;
};

struct row {
    int64_t b, h, i;
    attn_sequence s;
    uint64_t draw; /* a random number that decides which of the row's keys are read */
};

enum kind { ORDINARY, CHEAP, COSTLY };

/* ---- The largest absolute values of tensors, and bounds on products ---------------------------------------------- */

static double most_of_dtype(attn_dtype dtype)
{
    return dtype == ATTN_F16 ? 65504 : dtype == ATTN_F8E4M3 ? 448 : FLT_MAX;
}

/* Defines a function that finds the largest absolute value of n numbers of one, two or four bytes, by comparing bit
 * patterns in vectors of 16 bytes. Without the sign bit, bit patterns have the order of absolute values, and those of
 * NaN are above all others. */
#define MOST_BITS(name, type, mask)                                                              \
    static uint32_t name(const char *from, int64_t n)                                            \
    {                                                                                            \
        typedef type vector __attribute__((vector_size(16)));                                    \
        enum { LANES = 16 / sizeof(type) };                                                      \
        vector most = { 0 };                                                                     \
        uint32_t all = 0;                                                                        \
        int64_t at = 0;                                                                          \
        for (; at + LANES <= n; at += LANES) {                                                   \
            vector x;                                                                            \
            memcpy(&x, from + at * (int64_t)sizeof(type), sizeof x);                             \
            x &= mask;                                                                           \
            const vector larger = (vector)(x > most);                                            \
            most = (x & larger) | (most & ~larger);                                              \
        }                                                                                        \
        for (; at < n; at++) {                                                                   \
            type x;                                                                              \
            memcpy(&x, from + at * (int64_t)sizeof(type), sizeof x);                             \
            all = (uint32_t)(x & mask) > all ? (uint32_t)(x & mask) : all;                       \
        }                                                                                        \
        for (int l = 0; l < LANES; l++) all = (uint32_t)most[l] > all ? (uint32_t)most[l] : all; \
        return all;                                                                              \
    }
MOST_BITS(most_bits_1, int8_t, 0x7f)
MOST_BITS(most_bits_2, int16_t, 0x7fff)
MOST_BITS(most_bits_4, int32_t, 0x7fffffff)

static uint32_t most_bits(const char *from, attn_dtype dtype, int64_t n)
{
    switch (attn_dtype_bytes(dtype)) {
    case 1: return most_bits_1(from, n);
    case 2: return most_bits_2(from, n);
    default: return most_bits_4(from, n);
    }
}

/* Returns the largest |x| of a tensor of rank 3 or 4; infinity if some number of the tensor is not finite. */
static double most_of(const attn_tensor *t)
{
    const int64_t element = (int64_t)attn_dtype_bytes(t->dtype), columns = t->shape[t->rank - 1];
    const int64_t outer = t->rank == 4 ? t->shape[0] : 1, rows = t->shape[t->rank - 3], heads = t->shape[t->rank - 2];
    const int64_t *stride = t->stride + t->rank - 3;
    /* whether the last two axes of the tensor are contiguous in memory, so that one call reads both */
    const bool together = stride[1] == columns;
    uint32_t most = 0, bits;
    for (int64_t a = 0; a < outer; a++)
        for (int64_t b = 0; b < rows; b++)
            for (int64_t c = 0; c < (together ? 1 : heads); c++) {
                const int64_t at = (t->rank == 4 ? a * t->stride[0] : 0) + b * stride[0] + c * stride[1];
                bits = most_bits((const char *)t->data + at * element, t->dtype, together ? heads * columns : columns);
                most = bits > most ? bits : most;
            }
    char number[4];
    const uint16_t two = (uint16_t)most;
    const uint8_t one = (uint8_t)most;
    memcpy(number, element == 4 ? (const void *)&most : element == 2 ? (const void *)&two : &one, (size_t)element);
    const double result = attn_load(t->dtype, number, 0);
    return isfinite(result) ? result : INFINITY;
}

static double most_of_floats(const attn_tensor *t, double otherwise)
{
    double most = 0;
    if (t->rank == 0) return otherwise;
    const int64_t last = t->shape[t->rank - 1], rows = t->rank == 2 ? t->shape[0] : 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < last; n++)
            most = fmax(most, fabs((double)((const float *)t->data)[(t->rank == 2 ? r * t->stride[0] : 0) + n]));
    return most;
}

/* Returns the bound on |scale q . k|, before softcap, if all elements of q and k have absolute values of at most `q`
 * and `k`. */
static double product_most(const struct look *look, double q, double k)
{
    const double dot = q * k * (double)look->g.dims.D;
    const double scale = fabs(look->g.scale) * most_of_floats(&look->p->q_scale, 1) *
                         most_of_floats(&look->p->k_scale, 1);
    /* a partial sum of q . k may be infinite in float32, even if the scaled score is within range */
    if (!(dot < FLT_MAX)) return INFINITY;
    return scale * dot;
}

static double capped(const struct look *look, double product)
{
    return look->g.softcap > 0 && product < INFINITY ? fmin(product, look->g.softcap) : product;
}

/* Computes an upper bound on |scale * q . k|. The first bound comes from the largest numbers of the dtypes of q and k.
 * If it is too large and no lse is given, the largest elements of q and k give a second bound. The function sets the
 * members of *look that depend on the bound. */
static void bound_products(struct look *look, const attn_strange_limits *limits, bool given_lse)
{
    const attn_problem *p = look->p;
    double product = product_most(look, most_of_dtype(p->q.dtype), most_of_dtype(p->k.dtype));
    if (!(capped(look, product) < look->most / 2) && !given_lse)
        product = product_most(look, most_of(&p->q), most_of(&p->k));
    const bool floats = p->q.dtype == ATTN_F32 && p->k.dtype == ATTN_F32;
    const bool reaches = limits->bound_from > 0 && floats && !given_lse && !(product < limits->bound_from);
    look->bound = given_lse ? 0 : capped(look, product);
    look->bound_from = reaches ? limits->bound_from : INFINITY;
    look->bounded = look->bound < look->most / 2 && !look->gradients;
}

/* ---- Deciding whether a row is ordinary, cheap or costly --------------------------------------------------------- */

static const void *at(const attn_view *view, const struct row *row, int64_t h, int64_t line)
{
    return (const char *)view->data + attn_at(view, row->b, h, line) * (int64_t)attn_dtype_bytes(view->dtype);
}

static double number(const attn_view *view, const struct row *row, int64_t h, int64_t line, int64_t column)
{
    return attn_load(view->dtype, at(view, row, h, line), column);
}

/* Returns whether keep_mask and FlashMask let the row see key j. The caller must already have tested causal, window and
 * lengths. */
static bool sees(const struct look *look, const struct row *row, int64_t j)
{
    const attn_geometry *g = &look->g;
    const attn_view *keep = &g->view[ATTN_T_keep_mask], *bounds = &g->view[ATTN_T_mask_startend_rows];
    const int64_t column = j - attn_keep_from(g, &row->s);
    if (keep->data && column >= 0 && ((const uint8_t *)at(keep, row, row->h, row->i))[column] == 0) return false;
    if (!bounds->data) return true;
    const int32_t *column_bounds = at(bounds, row, row->h / g->mask_group, j);
    return !attn_mask_hides(attn_mask_of(column_bounds, g->mask_bounds, g->causal, g->dims.Sq), row->i);
}

/* Returns the row's score of key j before bias and ALiBi slopes are added. Returns NaN where q . k exceeds the range of
 * float32, because float32 kernels cannot compute such a score. */
static double product(const struct look *look, const struct row *row, const float *q, int64_t j)
{
    const attn_geometry *g = &look->g;
    const attn_view *k = &g->view[ATTN_T_k];
    const int64_t hk = row->h / g->group, D = g->dims.D;
    const char *from = (const char *)k->data +
                       attn_key_at(g, k, row->b, hk, row->s.k_start + j) * (int64_t)attn_dtype_bytes(k->dtype);
    float key[ATTN_MAX_HEAD_DIM];
    double sum = 0, scale = g->scale, derivative;
    simd_get()->load(D, from, k->dtype, key);
    for (int64_t d = 0; d < D; d++) sum += (double)q[d] * key[d];
    if (!(fabs(sum) < FLT_MAX)) return NAN;
    if (g->view[ATTN_T_q_scale].data) scale *= number(&g->view[ATTN_T_q_scale], row, hk, 0, 0);
    if (g->view[ATTN_T_k_scale].data) scale *= number(&g->view[ATTN_T_k_scale], row, hk, 0, 0);
    return attn_score_of(&look->options, &row->s, row->i, j, sum * scale, &derivative);
}

/* Returns the row's score of key j, which the row sees; NaN if product() returns NaN. If look->bounded is true, q . k
 * is left out: the result is the sum of bias and slopes only. */
static double score(const struct look *look, const struct row *row, const float *q, int64_t j)
{
    const attn_view *bias = &look->g.view[ATTN_T_bias], *slopes = &look->g.view[ATTN_T_alibi_slopes];
    const double slope = slopes->data ? number(slopes, row, row->h, 0, 0) : 0;
    double z = bias->data ? number(bias, row, row->h, row->i, j) : 0;
    if (z == -INFINITY) return z;
    if (!look->bounded) z += product(look, row, q, j);
    if (slope != 0) z -= slope * fabs((double)(row->i + row->s.Sk - row->s.Sq - j));
    return isnan(z) ? z : fmax(-FLT_MAX, fmin(FLT_MAX, z));
}

/* Returns the absolute value of the factor by which q . k is multiplied: |scale| times the float8 scales of q and k for
 * the row's key/value head. */
static double scale_of(const struct look *look, const struct row *row)
{
    const attn_geometry *g = &look->g;
    const int64_t hk = row->h / g->group;
    double scale = fabs(g->scale);
    if (g->view[ATTN_T_q_scale].data) scale *= number(&g->view[ATTN_T_q_scale], row, hk, 0, 0);
    if (g->view[ATTN_T_k_scale].data) scale *= number(&g->view[ATTN_T_k_scale], row, hk, 0, 0);
    return scale;
}

/* Returns the step from one key that is read to the next. It is 1 (every key is read) if the row has few keys. */
static int64_t step_of(const struct look *look, attn_range keys)
{
    return look->bounded ? attn_tiles(keys.hi - keys.lo, ROW_KEYS)
                         : attn_tiles((keys.hi - keys.lo) * (KEY_NUMBERS + look->g.dims.D), ROW_NUMBERS);
}

static const char *key_line(const struct look *look, const struct row *row, const attn_view *view, int64_t j)
{
    const int64_t line = attn_key_at(&look->g, view, row->b, row->h / look->g.group, row->s.k_start + j);
    return (const char *)view->data + line * (int64_t)attn_dtype_bytes(view->dtype);
}

/* Returns whether a row of a float32 problem may have scores of look->bound_from or more. The estimate is D * scale,
 * times the largest |q| in the row's tile, times the largest |k| of the keys that the row sees. */
static bool reaches_bound(const struct look *look, const struct row *row, attn_range keys)
{
    const attn_view *q = &look->g.view[ATTN_T_q], *k = &look->g.view[ATTN_T_k];
    const int64_t first = row->i / TILE * TILE, step = step_of(look, keys), D = look->g.dims.D;
    uint32_t q_bits = 0, k_bits = 0;
    float q_most, k_most;
    for (int64_t i = first; i < first + TILE && i < row->s.Sq; i++) {
        const uint32_t bits = most_bits_4(at(q, row, row->h, row->s.q_start + i), D);
        q_bits = bits > q_bits ? bits : q_bits;
    }
    for (int64_t j = keys.lo + (int64_t)(row->draw % (uint64_t)step); j < keys.hi; j += step) {
        const uint32_t bits = most_bits_4(key_line(look, row, k, j), D);
        k_bits = bits > k_bits ? bits : k_bits;
    }
    memcpy(&q_most, &q_bits, sizeof q_most);
    memcpy(&k_most, &k_bits, sizeof k_most);
    return !((double)q_most * k_most * (double)D * scale_of(look, row) < look->bound_from);
}

/* Returns whether an element of the row's dq may exceed FLT_MAX / 2. The caller has found huge scores in the row. The
 * softmax of huge scores is 0, except for the keys whose score is `largest`, so only these keys are read. The limit is
 * half of FLT_MAX, because dq of a neighbouring row may be twice as large. */
static bool gradient_leaves(const struct look *look, const struct row *row, attn_range keys, const float *q,
                            double largest)
{
    const attn_geometry *g = &look->g;
    const attn_view *dout = &g->view[ATTN_T_dout], *k = &g->view[ATTN_T_k], *v = &g->view[ATTN_T_v];
    const int64_t step = step_of(look, keys), D = g->dims.D, Dv = g->dims.Dv;
    double n = 0, sum = 0, most = 0, keys_sum[ATTN_MAX_HEAD_DIM] = { 0 }, products[ATTN_MAX_HEAD_DIM] = { 0 };
    float d_out[ATTN_MAX_HEAD_DIM], line[ATTN_MAX_HEAD_DIM];
    simd_get()->load(Dv, at(dout, row, row->h, row->s.q_start + row->i), dout->dtype, d_out);
    for (int64_t j = keys.lo + (int64_t)(row->draw % (uint64_t)step); j < keys.hi; j += step) {
        if (!sees(look, row, j) || score(look, row, q, j) != largest) continue;
        double dp = 0;
        simd_get()->load(Dv, key_line(look, row, v, j), v->dtype, line);
        for (int64_t d = 0; d < Dv; d++) dp += (double)d_out[d] * line[d];
        simd_get()->load(D, key_line(look, row, k, j), k->dtype, line);
        for (int64_t d = 0; d < D; d++) keys_sum[d] += line[d], products[d] += dp * line[d];
        n++;
        sum += dp;
    }
    for (int64_t d = 0; d < D; d++) most = fmax(most, fabs(products[d] - sum / n * keys_sum[d]) / n);
    return !(2 * most * scale_of(look, row) < FLT_MAX);
}

/* Classifies a row by the scores of its keys as ordinary, cheap or costly to compute (explained in strange.h). If the
 * row has many keys, only a sample of them is read. */
static enum kind kind_by_scores(const struct look *look, const struct row *row, attn_range keys)
{
    const attn_view *q = &look->g.view[ATTN_T_q];
    const double most = look->bounded ? look->most - look->bound : look->most;
    const int64_t step = step_of(look, keys);
    double least = INFINITY, largest = -INFINITY;
    float query[ATTN_MAX_HEAD_DIM];
    if (!look->bounded) simd_get()->load(look->g.dims.D, at(q, row, row->h, row->s.q_start + row->i), q->dtype, query);
    for (int64_t j = keys.lo + (int64_t)(row->draw % (uint64_t)step); j < keys.hi; j += step) {
        if (!sees(look, row, j)) continue;
        const double z = score(look, row, query, j);
        if (z == -INFINITY) continue; /* a bias of -inf hides the key */
        if (isnan(z)) return COSTLY;
        least = fmin(least, z);
        largest = fmax(largest, z);
    }
    if (largest == -INFINITY || fabs(largest) < most) return ORDINARY;
    if (fabs(largest) >= look->cheap_from)
        return look->gradients && gradient_leaves(look, row, keys, query, largest) ? COSTLY : CHEAP;
    /* If biases are so large that q . k cannot change the scores, a row whose biases are equal has equal scores.
     * Kernels recognise such a row by its biases and compute it fast. */
    return least == largest && look->g.view[ATTN_T_bias].data && look->bounded ? CHEAP : COSTLY;
}

static enum kind kind_of(const struct look *look, const struct row *row, attn_range keys)
{
    const attn_view *lse = &look->g.view[ATTN_T_lse];
    if (look->bound_from < INFINITY && reaches_bound(look, row, keys)) return COSTLY;
    if (look->p->op != ATTN_OP_BACKWARD || !lse->data) return kind_by_scores(look, row, keys);
    const double given = number(lse, row, row->h, row->s.q_start + row->i, 0);
    if (fabs(given) < look->most || given == -INFINITY) return ORDINARY;
    if (fabs(given) >= look->cheap_from && !look->gradients) return CHEAP;
    return kind_by_scores(look, row, keys) == CHEAP ? CHEAP : COSTLY;
}

/* ---- Looking at a sample of rows --------------------------------------------------------------------------------- */

/* Returns the next random number of SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static int64_t sequence_at(const attn_geometry *g, int64_t line)
{
    int64_t low = 0, high = g->dims.B;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (g->cu_q[middle] <= line) low = middle;
        else high = middle;
    }
    return low;
}

static struct row row_at(const attn_geometry *g, int64_t n, uint64_t draw)
{
    const int64_t lines = g->dims.packed ? g->dims.total_q : g->dims.B * g->dims.Sq, line = n % lines;
    struct row row = { .h = n / lines, .draw = draw };
    row.b = g->dims.packed ? sequence_at(g, line) : line / g->dims.Sq;
    row.s = attn_sequence_of(g, row.b);
    row.i = g->dims.packed ? line - row.s.q_start : line % g->dims.Sq;
    return row;
}

static attn_strange shares(const struct look *look, uint64_t draw)
{
    const attn_dims *d = &look->g.dims;
    const int64_t rows = d->H * (d->packed ? d->total_q : d->B * d->Sq);
    const int64_t wanted = look->bounded
                               ? MOST_ROWS
                               : attn_clamp64(NUMBERS / (d->Sk * (KEY_NUMBERS + d->D)), LEAST_ROWS, MOST_ROWS);
    const int64_t count = attn_min64(rows, wanted);
    double all = 0, of[COSTLY + 1] = { 0 };
    /* divides all rows into `count` groups of equal size (the last group also has the remainder), and reads one row of
     * each */
    for (int64_t n = 0; n < count; n++) {
        const int64_t first = rows / count * n, length = n + 1 < count ? rows / count : rows - first;
        const int64_t picked = first + (int64_t)(next(&draw) % (uint64_t)length);
        const struct row row = row_at(&look->g, picked, next(&draw));
        const attn_range keys = attn_keys_of(&look->g, &row.s, row.i);
        if (row.i >= row.s.Sq || keys.lo >= keys.hi) continue;
        all += (double)(keys.hi - keys.lo);
        of[kind_of(look, &row, keys)] += (double)(keys.hi - keys.lo);
    }
    if (all == 0) return (attn_strange){ 0, 0 };
    return (attn_strange){ .cheap = of[CHEAP] / all, .costly = of[COSTLY] / all };
}

attn_strange attn_strange_of(const attn_problem *p, const attn_strange_limits *limits, uint64_t readable, uint64_t draw)
{
    const double most = limits->from;
    struct look look = { .p = p, .g = attn_geometry_of(p), .most = most, .cheap_from = limits->cheap_from };
    const attn_dims *d = &look.g.dims;
    const uint64_t needed = ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | (p->v.rank ? ATTN_TENSOR_BIT(v) : 0) |
                            (p->lse.rank && p->op == ATTN_OP_BACKWARD ? ATTN_TENSOR_BIT(lse) : 0);
    const bool given_lse = needed & ATTN_TENSOR_BIT(lse);
    /* an observe operation (statistics of probabilities) has no v, so no sum of values can overflow there */
    double numbers = p->v.rank ? most_of_dtype(p->v.dtype) : 0;
    if ((readable & needed) != needed || attn_is_empty(p) || d->Sk == 0 || d->D == 0) return (attn_strange){ 0, 0 };
    look.options = attn_score_options_of(&look.g);
    look.gradients = limits->gradients && p->op == ATTN_OP_BACKWARD && (readable & ATTN_TENSOR_BIT(dout));
    bound_products(&look, limits, given_lse);
    if (numbers * (double)d->Sk >= FLT_MAX && !given_lse) numbers = most_of(&p->v);
    if (numbers * (double)d->Sk >= FLT_MAX && !given_lse)
        /* sums of P V may be infinite in float32, so every row counts as costly (slow to compute) */
        return (attn_strange){ 0, 1 };
    const double slopes = most_of_floats(&p->alibi_slopes, 0) * (double)(d->Sq + d->Sk);
    const bool ordinary = look.bounded && p->bias.rank == 0 && look.bound + slopes < most;
    if (ordinary && !given_lse && look.bound_from == INFINITY) return (attn_strange){ 0, 0 };
    return shares(&look, draw);
}
