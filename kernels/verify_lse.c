/* verify_lse.c: checks whether the lse that a client sends with a backward or an observe belongs to its scores.
 *
 * Kernels compute P = exp(z - lse). An lse in base 2, or of other scores, gives wrong results and causes no error. The
 * P of a row sum to 1. They sum to less if k has only a part of the keys and lse is that of all keys (ring attention).
 * Therefore a few rows are summed in double, and the lse is refused in two cases:
 *
 *   1. the P of a row, with the P of the sink, sum to more than 1;
 *   2. one conversion makes the lse of every row correct: lse was computed in base 2, with another scale, or without a
 *      mask. The message names the conversion.
 *
 * If k has only a part of the keys, lse might look like case 2 by chance. At least ENOUGH_ROWS rows must therefore fit
 * the conversion, and no row may contradict it. Each row's lse changes by some number in the conversion. The largest
 * and the smallest of these numbers must differ by more than 2 * APART tolerances.
 *
 * Tolerances of lse. The client may have rounded q and k after it computed lse. u = 2^-10 (bfloat16: 2^-8, float8:
 * 2^-3) is the relative error of a product whose two factors were rounded. The size of a key is |scale| sqrt(sum_d (q_d
 * k_d)^2). The size of a row is the mean of its keys' sizes, weighted by P.
 *   refused as more than 1    2^-9  + u sqrt(D) size, which allows for D errors of the same sign; u is at least 2^-8
 *   taken for equal           2^-10 + u size, which allows for independent errors, the usual case
 * To both tolerances, 2^-21 of lse is added, because lse is a float32 that was summed from other numbers. With softcap,
 * 2^-11 of the softcap is added too: the error of the GPUs' instruction tanh.approx.
 *
 * A hash of the sizes picks the rows, so the same request always gets the same answer. A row is not checked where it
 * has NaN, or where its lse is infinite or at least ATTN_LSE_MOST: the kernels then compute lse from the scores. */
#include "verify_lse.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend.h"

enum {
    /* number of rows that are checked first; if the lse of all these rows is correct, no other row is read */
    FIRST_ROWS = 4,
    /* in a large problem one row of every ROWS_SHARE rows is checked, but at most ATTN_LSE_ROWS rows in all */
    ROWS_SHARE = 128,
    /* a conversion (such as base 2) counts as found if the lse of at least this many rows fit it */
    ENOUGH_ROWS = 4,
    KEY_MULTIPLY_ADDS = 32 /* cost of the exponential and the masks for one key, in multiply-adds */
};

#define LOOSE 0x1p-9
#define TIGHT 0x1p-10
/* Two values of lse for one row count as different if they differ by more than APART times the row's tolerance. If the
 * difference of one row is compared with that of another row, this limit is twice as large. */
#define APART 4

/* ---- The variants: options that a client may have left out ------------------------------------------------------- */

/* The ways in which the client may have computed lse (variants). Each row of the table has words for messages, and the
 * options that the client may have left out. The first row leaves out nothing. Its scores also show whether lse is in
 * base 2. */
static const struct {
    const char *with;
    unsigned without;
} table[ATTN_LSE_VARIANTS] = {
    { "", 0 },
    { "scale 1/sqrt(Dv)", 0 },
    { "scale 1", 0 },
    { "the square of scale", 0 },
    { "no causal and no window", LSE_PLACES },
    { "no keep_mask", LSE_KEEP },
    { "no mask_startend_rows", LSE_ROWS },
    { "no bias", LSE_BIAS },
    { "no alibi_slopes", LSE_ALIBI },
    { "no softcap", LSE_SOFTCAP },
    { "no sinks", LSE_SINKS },
    { "no mask at all", LSE_MASKS },
};

static unsigned parts_of(const attn_problem *p)
{
    return (p->causal || p->window_left >= 0 || p->window_right >= 0 ? LSE_PLACES : 0u) |
           (p->keep_mask.rank ? LSE_KEEP : 0u) | (p->mask_startend_rows.rank ? LSE_ROWS : 0u) |
           (p->bias.rank ? LSE_BIAS : 0u) | (p->alibi_slopes.rank ? LSE_ALIBI : 0u) |
           (p->softcap > 0 ? LSE_SOFTCAP : 0u) | (p->sinks.rank ? LSE_SINKS : 0u);
}

static bool is_same_scale(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fabs(a);
}

lse_variants lse_variants_of(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    const unsigned parts = parts_of(p), masks = parts & LSE_MASKS;
    const double scales[] = { g.scale, 1 / sqrt((double)g.dims.Dv), 1, g.scale * g.scale };
    const int scale_count = sizeof scales / sizeof *scales;
    lse_variants all;
    for (int v = 0; v < ATTN_LSE_VARIANTS; v++) {
        const unsigned without = table[v].without;
        all.list[v] = (lse_variant){ .scale = v < scale_count ? scales[v] : g.scale, .without = without };
        all.list[v].applies = v == 0 || (parts & without) != 0;
        /* A problem with only one mask has a variant that leaves out this mask. Leaving out all masks would give the
         * same lse, so that variant applies only to problems with several masks. */
        if (without == LSE_MASKS) all.list[v].applies = (masks & (masks - 1)) != 0;
        if (v == 0 || v >= scale_count) continue;
        all.list[v].applies = fabs(scales[v]) <= FLT_MAX;
        for (int before = 0; before < v; before++) all.list[v].applies &= !is_same_scale(scales[before], scales[v]);
    }
    return all;
}

/* ---- Which rows are checked -------------------------------------------------------------------------------------- */

/* Returns the next number of SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t hash(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t hash_of(const attn_geometry *g)
{
    const int64_t sizes[] = { g->dims.B, g->dims.H, g->dims.Hk, g->dims.Sq, g->dims.Sk, g->dims.D, g->dims.Dv };
    uint64_t state = 0;
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) state = hash(state ^ (uint64_t)sizes[n]);
    return state;
}

/* Returns the row with number `index`. Rows are numbered by batch row, then by head, then by query, so the queries of
 * one head follow each other. */
static attn_lse_row row_at(const attn_geometry *g, int64_t index)
{
    const attn_dims *const d = &g->dims;
    attn_lse_row row = { .b = 0, .h = index / d->Sq % d->H, .i = index % d->Sq };
    if (!d->packed) row.b = index / d->Sq / d->H;
    else {
        int64_t low = 0, high = d->B; /* invariant of the binary search: cu_q[low] <= i < cu_q[high] */
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (g->cu_q[middle] <= row.i) low = middle;
            else high = middle;
        }
        row.b = low;
        row.i -= g->cu_q[low];
    }
    return row;
}

/* Returns the cost in multiply-adds of computing the lse of a row. If `whole` is true, keys that causal and window hide
 * count too. */
static int64_t cost_of(const attn_geometry *g, const attn_lse_row *row, bool whole)
{
    const attn_sequence s = attn_sequence_of(g, row->b);
    const attn_range keys = attn_keys_of(g, &s, row->i);
    return (whole ? s.Sk : keys.hi - keys.lo) * (g->dims.D + KEY_MULTIPLY_ADDS);
}

void attn_lse_choose(const attn_problem *p, int64_t multiply_adds, attn_lse_look *look)
{
    const attn_geometry g = attn_geometry_of(p);
    const int64_t total = (g.dims.packed ? 1 : g.dims.B) * g.dims.H * g.dims.Sq;
    const int64_t count = attn_min64(total, ATTN_LSE_ROWS);
    uint64_t state = hash_of(&g);
    *look = (attn_lse_look){ 0 };
    for (int64_t n = 0; n < count; n++) {
        const int64_t first = n * (total / count), end = n + 1 == count ? total : first + total / count;
        state = hash(state);
        attn_lse_row row = row_at(&g, first + (int64_t)(state % (uint64_t)(end - first)));
        const attn_sequence s = attn_sequence_of(&g, row.b);
        if (s.Sq == 0) continue;
        row.i %= s.Sq; /* if the row is past the sequence's end, another query of the sequence is taken */
        const int64_t cost = cost_of(&g, &row, false);
        if (cost > multiply_adds) continue;
        multiply_adds -= cost;
        look->row[look->count] = row;
        look->row[look->count++].lse = attn_load(ATTN_F32, p->lse.data,
                                                 attn_at(&g.view[ATTN_T_lse], row.b, row.h, s.q_start + row.i));
    }
    /* Shuffles the list of rows. The rows at the beginning of the list are checked first, and must come from all parts
     * of the problem. */
    for (int n = 0; n < look->count; n++) {
        const int other = n + (int)((state = hash(state)) % (uint64_t)(look->count - n));
        const attn_lse_row row = look->row[n];
        look->row[n] = look->row[other];
        look->row[other] = row;
    }
}

/* ---- Computing lse of rows from tensors in host memory ----------------------------------------------------------- */

struct reader {
    const attn_problem *p;
    attn_geometry g;
    attn_score_options options;
    lse_variants variants;
    double q[ATTN_MAX_HEAD_DIM];
    float k[ATTN_MAX_HEAD_DIM];
};

/* number of elements that an inner loop computes; its fixed length lets the compiler vectorise the loop */
enum { AT_ONCE = 8 };

/* Converts a float16 to float32 without branches. If the bits are shifted to where float32 has exponent and fraction,
 * they are a float32 of 2^-112 times the number. This holds for subnormals too. */
static float widen_half(uint16_t bits)
{
    const uint32_t magnitude = bits & 0x7fffu, infinite = magnitude >= 0x7c00u ? 0x7f800000u : 0;
    const float x = attn_f32_from_bits(magnitude << 13) * 0x1p112f;
    return attn_f32_from_bits(attn_f32_bits(x) | infinite | (uint32_t)(bits & 0x8000u) << 16);
}

static void read_halves(const uint16_t *from, int64_t D, float *to)
{
    int64_t d = 0;
    for (; d + AT_ONCE <= D; d += AT_ONCE)
        for (int n = 0; n < AT_ONCE; n++) to[d + n] = widen_half(from[d + n]);
    for (; d < D; d++) to[d] = widen_half(from[d]);
}

static void read_brain_halves(const uint16_t *from, int64_t D, float *to)
{
    int64_t d = 0;
    for (; d + AT_ONCE <= D; d += AT_ONCE)
        for (int n = 0; n < AT_ONCE; n++) to[d + n] = attn_bf16_to_f32(from[d + n]);
    for (; d < D; d++) to[d] = attn_bf16_to_f32(from[d]);
}

static void read_key(struct reader *r, const attn_lse_row *row, int64_t line)
{
    const attn_view *const view = &r->g.view[ATTN_T_k];
    const int64_t at = attn_key_at(&r->g, view, row->b, row->h / r->g.group, line), D = r->g.dims.D;
    if (view->dtype == ATTN_F16) read_halves((const uint16_t *)view->data + at, D, r->k);
    else if (view->dtype == ATTN_BF16) read_brain_halves((const uint16_t *)view->data + at, D, r->k);
    else if (view->dtype == ATTN_F32) memcpy(r->k, (const float *)view->data + at, (size_t)D * sizeof *r->k);
    else
        for (int64_t d = 0; d < D; d++) r->k[d] = (float)attn_load(view->dtype, view->data, at + d);
}

/* Returns q . k. *size becomes the square root of the sum of the squared products q_d k_d. */
static double dot_of(const struct reader *r, double *size)
{
    double dot[AT_ONCE] = { 0 }, squares[AT_ONCE] = { 0 };
    int64_t d = 0;
    for (; d + AT_ONCE <= r->g.dims.D; d += AT_ONCE)
        for (int n = 0; n < AT_ONCE; n++) {
            const double x = r->q[d + n] * r->k[d + n];
            dot[n] += x;
            squares[n] += x * x;
        }
    for (; d < r->g.dims.D; d++) {
        const double x = r->q[d] * r->k[d];
        dot[0] += x;
        squares[0] += x * x;
    }
    for (int half = AT_ONCE / 2; half > 0; half /= 2)
        for (int n = 0; n < half; n++) dot[n] += dot[n + half], squares[n] += squares[n + half];
    *size = sqrt(squares[0]);
    return dot[0];
}

/* Computes the lse of one row by each variant (way to compute the scores) whose bit is set in `which`, and writes it to
 * found[]. The entries of all other variants become NaN. */
static void read_row(struct reader *r, const attn_lse_row *row, unsigned which, double found[ATTN_LSE_NUMBERS])
{
    const attn_sequence s = attn_sequence_of(&r->g, row->b);
    const attn_view *const q = &r->g.view[ATTN_T_q];
    const attn_range seen = attn_keys_of(&r->g, &s, row->i);
    lse_sum sums[ATTN_LSE_VARIANTS];
    const double factor = lse_factor(&r->g, row);
    int64_t from = seen.lo, to = seen.hi;
    for (int v = 0; v < ATTN_LSE_VARIANTS; v++) {
        sums[v] = lse_sum_init();
        if ((which >> v & 1) && (r->variants.list[v].without & LSE_PLACES)) from = 0, to = s.Sk;
    }
    for (int64_t d = 0; d < r->g.dims.D; d++)
        r->q[d] = factor * attn_load(q->dtype, q->data, attn_at(q, row->b, row->h, s.q_start + row->i) + d);
    for (int64_t j = from; j < to; j++) {
        double dot = 0, size = 0;
        /* reads k only if some variant (way to compute the scores) sees the key, because a hidden key may hold NaN */
        bool read = false;
        for (int v = 0; v < ATTN_LSE_VARIANTS; v++) {
            const lse_variant *const variant = &r->variants.list[v];
            if (!(which >> v & 1) || !lse_sees(&r->g, &s, row, j, variant->without)) continue;
            if (!read) read_key(r, row, s.k_start + j), dot = dot_of(r, &size), read = true;
            lse_sum_add(&sums[v], lse_score(&r->g, &r->options, &s, row, j, dot, variant), size);
        }
    }
    for (int v = 0; v < ATTN_LSE_VARIANTS; v++) {
        lse_add_sink(&r->g, row, &r->variants.list[v], &sums[v]);
        found[v] = which >> v & 1 ? lse_of(&sums[v]) : NAN;
    }
    found[ATTN_LSE_VARIANTS] = lse_size_of(&sums[0]);
}

/* ---- Which variant explains the client's lse --------------------------------------------------------------------- */

struct tolerances {
    double loose, tight;
};

/* Returns whether the check can use this row. It cannot if the row has NaN, or if its lse is so large that it does not
 * determine the row's sum. */
static bool is_told(const attn_lse_row *row, const double *found)
{
    return fabs(row->lse) < ATTN_LSE_MOST && !isnan(found[0]);
}

/* Returns the relative error of a product of an element of q and an element of k. It is not 0, because the client may
 * have rounded q and k after it computed lse. */
static double unit_of(const attn_problem *p)
{
    if (p->q.dtype == ATTN_F8E4M3 || p->k.dtype == ATTN_F8E4M3) return 0x1p-3;
    return p->q.dtype == ATTN_BF16 ? 0x1p-8 : 0x1p-10;
}

/* Returns two tolerances for the difference between the given lse of a row and a computed lse. Up to `tight` the two
 * count as equal. If the given lse is smaller by more than `loose`, it is refused. `loose` allows for a client that
 * computes lse from q and k rounded to bfloat16, and sends q and k as they were before rounding. */
static struct tolerances tolerances_of(const attn_problem *p, const attn_lse_row *row, double scale, double size)
{
    const double u = unit_of(p), D = (double)attn_dims_of(p).D, u_loose = fmax(u, 0x1p-8);
    const double added = 0x1p-21 * fabs(row->lse) + (p->softcap > 0 ? 0x1p-11 * p->softcap : 0);
    size *= fabs(scale);
    return (struct tolerances){ LOOSE + u_loose * sqrt(D) * size + added, TIGHT + u * size + added };
}

static bool is_too_much(const attn_problem *p, const lse_variants *all, const attn_lse_row *row, const double *found)
{
    const double size = found[ATTN_LSE_VARIANTS];
    return is_told(row, found) && found[0] - row->lse > tolerances_of(p, row, all->list[0].scale, size).loose;
}

enum says { NOTHING, YES, NO };

/* Compares the row's given lse with the lse by variant v (a way to compute the scores). Returns YES if they agree, NO
 * if not, and NOTHING if this row cannot decide. v == ATTN_LSE_VARIANTS stands for an lse in base 2. *apart becomes the
 * difference between the lse by variant v and the lse by the options as given. */
static enum says says(const attn_problem *p, const lse_variants *all, const attn_lse_row *row, const double *found,
                      int v, double *apart)
{
    const bool base_2 = v == ATTN_LSE_VARIANTS;
    const double wanted = base_2 ? found[0] / M_LN2 : found[v], scale = all->list[base_2 ? 0 : v].scale;
    if (!is_told(row, found)) return NOTHING;
    const struct tolerances of_v = tolerances_of(p, row, scale, found[ATTN_LSE_VARIANTS]);
    const struct tolerances given = tolerances_of(p, row, all->list[0].scale, found[ATTN_LSE_VARIANTS]);
    const double tight = fmax(of_v.tight, given.tight);
    const bool fits = fabs(row->lse - wanted) <= of_v.tight;
    /* The difference is limited to -1000 to 1000. Without the limit it is infinite if the given masks hide all keys
     * from the row. */
    *apart = fmin(fmax(wanted - found[0], -1e3), 1e3);
    if (fabs(*apart) > APART * tight) return fits ? YES : NO;
    return fits || fabs(row->lse - found[0]) <= given.loose ? NOTHING : NO;
}

/* Returns the variant of the scores (way to compute them) that explains the lse: enough rows fit it, and no row
 * contradicts it. ATTN_LSE_VARIANTS stands for an lse in base 2; 0: no variant explains the lse. *at becomes the index
 * of a row that fits the variant. */
static int explanation(const attn_problem *p, const lse_variants *all, const attn_lse_look *look, bool refused, int *at)
{
    for (int n = 0; n < ATTN_LSE_VARIANTS; n++) {
        /* variant 0 (the options as given) cannot explain a wrong lse, so n == 0 stands for base 2 */
        const int v = n == 0 ? ATTN_LSE_VARIANTS : n;
        double least = INFINITY, most = -INFINITY, tolerance = 0;
        int yes = 0;
        bool no = v < ATTN_LSE_VARIANTS && !all->list[v].applies;
        for (int r = 0; r < look->count && !no; r++) {
            double apart = 0;
            const enum says said = says(p, all, &look->row[r], look->found[r], v, &apart);
            no = said == NO;
            if (said != YES) continue;
            if (yes++ == 0) *at = r;
            least = fmin(least, apart), most = fmax(most, apart);
            tolerance = fmax(tolerance, tolerances_of(p, &look->row[r], all->list[v % ATTN_LSE_VARIANTS].scale,
                                                      look->found[r][ATTN_LSE_VARIANTS])
                                            .tight);
        }
        if (!no && yes >= (refused ? 1 : ENOUGH_ROWS) && (refused || most - least > 2 * APART * tolerance)) return v;
    }
    return 0;
}

enum { INDEX_BYTES = 80 };

static const char *index_of(const attn_problem *p, const attn_lse_row *row, char text[INDEX_BYTES])
{
    const attn_geometry g = attn_geometry_of(p);
    if (g.dims.packed)
        snprintf(text, INDEX_BYTES, "[%lld, %lld]", (long long)row->h, (long long)(g.cu_q[row->b] + row->i));
    else snprintf(text, INDEX_BYTES, "[%lld, %lld, %lld]", (long long)row->b, (long long)row->h, (long long)row->i);
    return text;
}

attn_status attn_lse_judge(const attn_problem *p, const attn_lse_look *look, attn_error *err)
{
    const lse_variants all = lse_variants_of(p);
    char index[INDEX_BYTES], how[160] = "", value[40] = "";
    bool refused = false;
    int at = 0, said_by = 0;
    for (int r = 0; r < look->count && !refused; r++)
        if (is_too_much(p, &all, &look->row[r], look->found[r])) refused = true, at = r;
    const int v = explanation(p, &all, look, refused, &said_by);
    if (!refused && v == 0) return ATTN_OK;
    if (!refused) at = said_by;
    if (v == ATTN_LSE_VARIANTS)
        snprintf(how, sizeof how,
                 "; your lse is in base 2: multiply it by 0.6931472, for the natural logarithm is wanted");
    else if (v > 0) {
        if (all.list[v].without == 0) snprintf(value, sizeof value, ", %.9g", all.list[v].scale);
        snprintf(how, sizeof how, "; your lse was computed with %s%s: send the options of that forward", table[v].with,
                 value);
    }
    return attn_fail(err, ATTN_INVALID, "/lse",
                     "lse: %s is %.9g, with which the probabilities of the row%s sum to %.4g, must be %s%s",
                     index_of(p, &look->row[at], index), look->row[at].lse, p->sinks.rank ? " and of its sink" : "",
                     exp(fmin(look->found[at][0] - look->row[at].lse, 700)), refused ? "at most 1" : "1", how);
}

/* Computes lse of rows 0 to `first` - 1 of the list, with the options as given. Returns whether the client's lse is
 * correct in all of these rows. */
static bool first_are_right(struct reader *r, attn_lse_look *look, int first)
{
    int right = 0;
    for (int n = 0; n < first; n++) {
        const attn_lse_row *const row = &look->row[n];
        read_row(r, row, 1, look->found[n]);
        const struct tolerances t = tolerances_of(r->p, row, r->g.scale, look->found[n][ATTN_LSE_VARIANTS]);
        right += !is_told(row, look->found[n]) || fabs(look->found[n][0] - row->lse) <= t.loose;
    }
    return right == first;
}

/* Computes lse of each row by every variant of the scores (way to compute them) that no earlier row has ruled out. If k
 * is only a part of the keys, the first row rules out all variants, and no further rows are read. */
static void read_variants(struct reader *r, attn_lse_look *look, int first, int64_t multiply_adds)
{
    enum { BASE_2 = 1u << ATTN_LSE_VARIANTS };
    unsigned which = BASE_2, places = 0;
    for (int v = 0; v < ATTN_LSE_VARIANTS; v++) {
        if (r->variants.list[v].applies) which |= 1u << v;
        if (r->variants.list[v].without & LSE_PLACES) places |= 1u << v;
    }
    for (int n = 0; n < look->count; n++) {
        const attn_lse_row *const row = &look->row[n];
        if (which == 1 && n < first) continue;
        if (cost_of(&r->g, row, true) > multiply_adds) which &= ~places;
        const int64_t cost = cost_of(&r->g, row, (which & places) != 0);
        if (which == 1 || cost > multiply_adds) {
            look->count = n;
            return;
        }
        multiply_adds -= cost;
        read_row(r, row, which, look->found[n]);
        for (int v = 1; v <= ATTN_LSE_VARIANTS; v++) {
            double apart;
            if ((which >> v & 1) && says(r->p, &r->variants, row, look->found[n], v, &apart) == NO) which &= ~(1u << v);
        }
    }
}

static struct reader reader_of(const attn_problem *p)
{
    struct reader r = { .p = p, .g = attn_geometry_of(p), .variants = lse_variants_of(p) };
    r.options = attn_score_options_of(&r.g);
    return r;
}

void lse_sum_rows(const attn_problem *p, const attn_lse_look *look, double *found)
{
    struct reader r = reader_of(p);
    unsigned which = 0;
    for (int v = 0; v < ATTN_LSE_VARIANTS; v++) which |= r.variants.list[v].applies ? 1u << v : 0;
    for (int n = 0; n < look->count; n++) read_row(&r, &look->row[n], which, found + (size_t)n * ATTN_LSE_NUMBERS);
}

attn_status attn_lse_start(attn_stream *stream, const attn_problem *p, const attn_lse_look *look, void *found,
                           attn_error *err)
{
    const attn_backend *const backend = stream->device->backend;
    if (backend->sum_lse) return backend->sum_lse(stream, p, look, found, err);
    return attn_fail(err, ATTN_UNSUPPORTED, "/lse", "lse: %s sums up no rows", backend->name);
}

attn_status attn_check_lse(const attn_problem *p, int64_t multiply_adds, attn_error *err)
{
    struct reader r = reader_of(p);
    const attn_dims *const d = &r.g.dims;
    const int64_t total = (d->packed ? 1 : d->B) * d->H * d->Sq;
    attn_lse_look look;
    attn_lse_choose(p, multiply_adds, &look);
    const int first = (int)attn_min64(look.count, attn_clamp64(total / ROWS_SHARE, FIRST_ROWS, ATTN_LSE_ROWS));
    if (first_are_right(&r, &look, first)) return ATTN_OK;
    read_variants(&r, &look, first, multiply_adds);
    return attn_lse_judge(p, &look, err);
}
