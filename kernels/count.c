/* count.c: attn_counter, which counts the pairs that masks let through, and the tiles that a kernel may skip.
 *
 * Batch rows and heads with the same masks are counted once, as one plane. Causal, window and lengths are counted by a
 * closed form. FlashMask is counted key by key: up to three intervals of rows see a key. keep_mask and bias are counted
 * element by element. A band is as many rows as a tile has. One call of attn_counter_step() counts at most STEP_WORK
 * keys, elements or bands. If a single row or a single block of keys has more, the call counts this one row or
 * block. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "dtype.h"
#include "tiles.h"

enum { STEP_WORK = 1 << 15 };
#define MOST_WORK ((double)(INT64_C(1) << 32)) /* some seconds */

enum way { BY_FORMULA, BY_KEYS, BY_ELEMENTS };

struct attn_counter {
    const attn_problem *p;
    attn_geometry g;
    enum way way;
    bool tiled;
    /* numbers of rows and keys of a tile; if the caller wants no tile counts, a tile is a whole sequence */
    int64_t tile[2];
    /* The counter goes over planes_b * heads planes. A plane is one batch row and head, and stands for all others with
     * equal masks. */
    int64_t planes_b, heads;
    /* number of (batch row, head) pairs with the same masks that a counted plane stands for */
    double each;

    /* `plane`: the plane (batch row and head) that is being counted. `next`: where the next step goes on, as the index
     * of a band (group of rows), of a block of keys, or of a row. */
    int64_t plane, next;
    attn_sequence s;
    /* Numbers of visible (query, key) pairs. A band is a group of tile[0] rows, and a block is tile[1] keys. With
     * keep_mask or bias (BY_ELEMENTS), counts[n] is the number of pairs of the present band with block n. With
     * FlashMask (BY_KEYS), rows see a key in up to three intervals. counts[0] + ... + counts[n] is then a number of
     * pairs of band n with keys of the present block: it counts each key with an interval that begins before band n and
     * ends after it. */
    int64_t *counts;
    attn_counts found;
};

static enum way way_of(const attn_problem *p)
{
    return p->keep_mask.rank || p->bias.rank ? BY_ELEMENTS : p->mask_startend_rows.rank ? BY_KEYS : BY_FORMULA;
}

static bool varies(const attn_tensor *t, int axis)
{
    return t->rank > 0 && t->shape[axis] > 1;
}

static struct attn_counter counter_of(const attn_problem *p, const int64_t tile[2])
{
    struct attn_counter c = { .p = p, .g = attn_geometry_of(p), .way = way_of(p), .tiled = tile != NULL };
    const attn_dims *d = &c.g.dims;
    const bool lengths = c.g.cu_q || c.g.seqlens_q || c.g.seqlens_k;
    const bool batch = lengths || p->mask_startend_rows.rank || varies(&p->keep_mask, 0) || varies(&p->bias, 0);
    c.planes_b = batch ? d->B : attn_min64(d->B, 1);
    c.heads = varies(&p->keep_mask, 1) || varies(&p->bias, 1) ? d->H
              : p->mask_startend_rows.rank                    ? p->mask_startend_rows.shape[1]
                                                              : 1;
    c.each = (batch ? 1.0 : (double)d->B) * ((double)d->H / (double)c.heads);
    c.tile[0] = tile ? tile[0] : attn_max64(d->Sq, 1);
    c.tile[1] = tile ? tile[1] : c.way == BY_KEYS ? STEP_WORK : attn_max64(d->Sk, 1);
    return c;
}

double attn_count_work(const attn_problem *p, const int64_t tile[2])
{
    const struct attn_counter c = counter_of(p, tile);
    const double planes = (double)c.planes_b * (double)c.heads, Sq = (double)c.g.dims.Sq, Sk = (double)c.g.dims.Sk;
    const double bands = ceil(Sq / (double)c.tile[0]), blocks = ceil(Sk / (double)c.tile[1]);
    switch (c.way) {
    case BY_FORMULA: return planes + (c.tiled ? planes * bands : 0);
    case BY_KEYS: return planes * (Sk + bands * blocks);
    default: return planes * (Sq * Sk + bands * blocks);
    }
}

attn_status attn_counter_open(const attn_problem *p, const int64_t tile[2], attn_counter **counter, attn_error *err)
{
    const double work = attn_count_work(p, tile);
    *counter = NULL;
    if (work > MOST_WORK)
        return attn_fail(err, ATTN_TOO_LARGE, tile ? "/tile_size" : "/observe",
                         "observe: counting pairs and tiles here takes %.3g steps, at most %.3g are taken%s", work,
                         MOST_WORK, tile ? "; larger tiles take fewer" : "");
    struct attn_counter *const c = calloc(1, sizeof *c);
    if (!c) return attn_fail(err, ATTN_NO_MEMORY, "/observe", "no memory to count pairs");
    *c = counter_of(p, tile);
    const int64_t most = c->way == BY_KEYS ? attn_tiles(c->g.dims.Sq, c->tile[0])
                                           : attn_tiles(c->g.dims.Sk, c->tile[1]);
    c->counts = calloc((size_t)most + 2, sizeof *c->counts);
    if (!c->counts) {
        free(c);
        return attn_fail(err, ATTN_NO_MEMORY, "/observe", "no memory to count %lld tiles", (long long)most);
    }
    if (c->planes_b > 0) c->s = attn_sequence_of(&c->g, 0);
    *counter = c;
    return ATTN_OK;
}

attn_counts attn_counter_close(attn_counter *c)
{
    const attn_counts found = c->found;
    free(c->counts);
    free(c);
    return found;
}

/* Counts a tile with `pairs` (query, key) pairs, of which the masks let `seen` through. */
static void add_tile(struct attn_counter *c, int64_t seen, int64_t pairs)
{
    double *const kind = seen == 0 ? &c->found.skipped : seen == pairs ? &c->found.whole : &c->found.partial;
    *kind += c->each;
    c->found.pairs += (double)seen * c->each;
}

/* ---- Counting pairs by a formula: causal, window, lengths -------------------------------------------------------- */

/* Counts the tiles of bands c->next to end - 1. A band is a group of tile[0] rows. */
static void count_bands(struct attn_counter *c, int64_t end)
{
    const int64_t bk = c->tile[1], blocks = attn_tiles(c->s.Sk, bk);
    for (; c->next < end; c->next++) {
        const int64_t r0 = c->next * c->tile[0], r1 = attn_min64(r0 + c->tile[0], c->s.Sq);
        const attn_range any = attn_keys_of_rows(&c->g, &c->s, r0, r1),
                         all = attn_keys_of_all_rows(&c->g, &c->s, r0, r1);
        const int64_t visited = any.lo < any.hi ? (any.hi - 1) / bk - any.lo / bk + 1 : 0;
        const int64_t last = all.hi == c->s.Sk ? blocks : all.hi / bk;
        const int64_t whole = all.lo < all.hi ? attn_max64(0, last - attn_tiles(all.lo, bk)) : 0;
        c->found.skipped += (double)(blocks - visited) * c->each;
        c->found.whole += (double)whole * c->each;
        c->found.partial += (double)(visited - whole) * c->each;
    }
}

static bool step_by_formula(struct attn_counter *c)
{
    const int64_t bands = c->tiled ? attn_tiles(c->s.Sq, c->tile[0]) : 0;
    if (c->next == 0) c->found.pairs += (double)attn_pairs_of(&c->g, &c->s) * c->each;
    count_bands(c, attn_min64(bands, c->next + STEP_WORK));
    return c->next == bands;
}

/* ---- Counting pairs key by key: FlashMask ------------------------------------------------------------------------ */

/* Rows lo to hi - 1 see one key. For each band (group of tile[0] rows), the function adds how many of these rows the
 * band has. The numbers of the first and the last of these bands go to `parts`. In the bands between them, all rows see
 * the key; the numbers of these bands go to c->counts, as differences between neighbouring bands. */
static void add_rows(struct attn_counter *c, int64_t lo, int64_t hi, int64_t *parts)
{
    const int64_t b = c->tile[0];
    if (lo >= hi) return;
    const int64_t first = lo / b, last = (hi - 1) / b;
    if (first == last) {
        parts[first] += hi - lo;
        return;
    }
    parts[first] += (first + 1) * b - lo;
    parts[last] += hi - last * b;
    if (first + 1 < last) c->counts[first + 1] += b, c->counts[last] -= b;
}

static attn_status count_block(struct attn_counter *c)
{
    const attn_view *const bounds = &c->g.view[ATTN_T_mask_startend_rows];
    const int64_t j0 = c->next * c->tile[1], j1 = attn_min64(j0 + c->tile[1], c->s.Sk);
    const int64_t bands = attn_tiles(c->s.Sq, c->tile[0]), b = c->plane / c->heads, head = c->plane % c->heads;
    /* number of query heads that share these FlashMask bounds, so that their pairs are counted together */
    const int64_t group = c->g.dims.H / c->heads;
    int64_t *const parts = calloc((size_t)bands + 1, sizeof *parts), whole = 0;
    if (!parts) return ATTN_NO_MEMORY;
    memset(c->counts, 0, (size_t)(bands + 1) * sizeof *c->counts);
    for (int64_t j = j0; j < j1; j++) {
        const int32_t *const column = (const int32_t *)bounds->data +
                                      attn_at(bounds, b, head * group / c->g.mask_group, j);
        const attn_mask m = attn_mask_of(column, c->g.mask_bounds, c->g.causal, c->g.dims.Sq);
        const attn_range rows = attn_rows_of(&c->g, &c->s, j);
        /* The two intervals of query rows from which FlashMask hides the key, in ascending order and without overlap.
         * All other rows see the key. */
        attn_range one = { attn_clamp64(m.lts, rows.lo, rows.hi), attn_clamp64(m.lte, rows.lo, rows.hi) };
        attn_range two = { attn_clamp64(m.uts, rows.lo, rows.hi), attn_clamp64(m.ute, rows.lo, rows.hi) };
        if (one.lo >= one.hi) one.lo = one.hi = rows.lo;
        if (two.lo >= two.hi) two.lo = two.hi = rows.lo;
        const attn_range first = one.lo <= two.lo ? one : two, second = one.lo <= two.lo ? two : one;
        add_rows(c, rows.lo, first.lo, parts);
        add_rows(c, first.hi, second.lo, parts);
        add_rows(c, attn_max64(first.hi, second.hi), rows.hi, parts);
    }
    for (int64_t n = 0; n < bands; n++) {
        const int64_t r1 = attn_min64((n + 1) * c->tile[0], c->s.Sq);
        whole += c->counts[n];
        add_tile(c, whole + parts[n], (r1 - n * c->tile[0]) * (j1 - j0));
    }
    free(parts);
    return ATTN_OK;
}

static bool step_by_keys(struct attn_counter *c)
{
    const int64_t blocks = c->s.Sq > 0 ? attn_tiles(c->s.Sk, c->tile[1]) : 0;
    const int64_t each = c->tile[1] + attn_tiles(c->s.Sq, c->tile[0]);
    const int64_t end = attn_min64(blocks, c->next + attn_max64(1, STEP_WORK / each));
    for (; c->next < end; c->next++)
        if (count_block(c) != ATTN_OK) {
            c->found.status = ATTN_NO_MEMORY;
            return true;
        }
    return c->next >= blocks;
}

/* ---- Counting pairs one by one: keep_mask, bias ------------------------------------------------------------------ */

static void count_row(struct attn_counter *c, int64_t b, int64_t h, int64_t i)
{
    const attn_view *const keep = &c->g.view[ATTN_T_keep_mask], *const bias = &c->g.view[ATTN_T_bias];
    const attn_view *const bounds = &c->g.view[ATTN_T_mask_startend_rows];
    const attn_range keys = attn_keys_of(&c->g, &c->s, i);
    const int64_t from = attn_keep_from(&c->g, &c->s);
    const uint8_t *const kept = keep->data ? (const uint8_t *)keep->data + attn_at(keep, b, h, i) : NULL;
    for (int64_t j = keys.lo, end; j < keys.hi; j = end) {
        int64_t seen = 0;
        end = attn_min64(keys.hi, (j / c->tile[1] + 1) * c->tile[1]);
        int64_t *const count = &c->counts[j / c->tile[1]];
        for (; j < end; j++) {
            if (kept && j >= from && !kept[j - from]) continue;
            if (bias->data && attn_load(bias->dtype, bias->data, attn_at(bias, b, h, i) + j) == -INFINITY) continue;
            if (bounds->data) {
                const int32_t *const column = (const int32_t *)bounds->data +
                                              attn_at(bounds, b, h / c->g.mask_group, j);
                const attn_mask m = attn_mask_of(column, c->g.mask_bounds, c->g.causal, c->g.dims.Sq);
                if (attn_mask_hides(m, i)) continue;
            }
            seen++;
        }
        *count += seen;
    }
}

static bool step_by_elements(struct attn_counter *c)
{
    const int64_t b = c->plane / c->heads, head = c->plane % c->heads, group = c->g.dims.H / c->heads;
    const int64_t blocks = attn_tiles(c->s.Sk, c->tile[1]), rows = attn_max64(1, STEP_WORK / attn_max64(1, c->s.Sk));
    for (const int64_t end = attn_min64(c->s.Sq, c->next + rows); c->next < end;) {
        const int64_t i = c->next++, r0 = i / c->tile[0] * c->tile[0], r1 = attn_min64(r0 + c->tile[0], c->s.Sq);
        count_row(c, b, head * group, i);
        for (int64_t n = 0; i + 1 == r1 && n < blocks; n++) {
            add_tile(c, c->counts[n], (r1 - r0) * (attn_min64((n + 1) * c->tile[1], c->s.Sk) - n * c->tile[1]));
            c->counts[n] = 0;
        }
    }
    return c->next >= c->s.Sq;
}

bool attn_counter_step(attn_counter *c)
{
    if (c->plane >= c->planes_b * c->heads || c->found.status != ATTN_OK) return true;
    const bool over = c->way == BY_FORMULA ? step_by_formula(c)
                      : c->way == BY_KEYS  ? step_by_keys(c)
                                           : step_by_elements(c);
    if (!over) return false;
    c->next = 0;
    if (++c->plane == c->planes_b * c->heads) return true;
    c->s = attn_sequence_of(&c->g, c->plane / c->heads);
    return c->found.status != ATTN_OK;
}
