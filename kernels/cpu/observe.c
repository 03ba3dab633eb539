/* observe.c: statistics of probabilities (attention.h, attn_observe): maxima, entropies, sums of probabilities. A
 * probability P = exp(z - lse) needs its row's lse, so there are three phases:
 *
 *   FLASH_FORWARD   An item (unit of parallel work) goes over all keys for one row tile. It writes row_max, lse,
 *                   entropy and top_keys, and stores the numbers that turn a score into a probability.
 *   FLASH_KEYS      An item goes over all row tiles for a chunk of keys, and computes key_mass and weights of these
 *                   keys. Other items go over all row tiles for a few columns of the output map.
 *   FLASH_FINISH    An item computes max_logit and mean_entropy of a head.
 *
 * Each of the first two phases computes the scores itself, so no array of Sq x Sk exists. All sums are in the order of
 * rows and keys, so the bits do not depend on the threads.
 *
 * The entropy of a row, -sum P ln P, is computed as ln l - e / l with e = sum exp(z - m) (z - m). Neither ln l nor -e /
 * l is negative, so no digits cancel.
 *
 * Rows whose numbers exceed the range of float32 are computed in double (exact.c). They are marked by NaN in row_base,
 * and `strange` holds their lse. */
#include <math.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"

enum { MAP_COLUMNS = FLASH_MAP_COLUMNS };

/* Rows r0 to r1 - 1 of a tile. All of them belong to head h, and to row u of the output `map`. */
struct group {
    int64_t h, u;
    int r0, r1;
};

struct scratch {
    int64_t q_lda, lds;
    char *Qa, *kv, *keys, *gathered;
    float *S, *m, *l, *e, *inverse, *sums;
    /* sums for the output `key_mass` of one head, one for each key in the chunk that is being computed */
    double *mass;
    double *cells; /* cells of the output `map`: MAP_COLUMNS cells for each group of rows of a tile (struct group) */
    struct group *groups;
    struct flash_top *top; /* [rows] */
    struct flash_limits limits;
};

static struct scratch scratch_of(const struct flash *f, struct flash_arena *arena)
{
    const int64_t D = f->g.dims.D;
    struct scratch s = { .q_lda = simd_lda(f->type, D), .lds = simd_ld(f->BN, 4) };
    s.Qa = flash_take(arena, simd_a_bytes(f->type, f->BM, s.q_lda), 1);
    s.S = flash_take(arena, simd_round_up(f->BM, SIMD_A_ROWS) * s.lds, 4);
    s.m = flash_take(arena, f->BM, 4);
    s.l = flash_take(arena, f->BM, 4);
    s.e = flash_take(arena, f->BM, 4);
    s.inverse = flash_take(arena, f->BM, 4);
    s.sums = flash_take(arena, f->BN, 4);
    s.mass = flash_take(arena, f->BN, 8);
    s.cells = f->p->map.rank ? flash_take(arena, f->BM, MAP_COLUMNS * 8) : NULL;
    s.groups = flash_take(arena, f->BM, sizeof *s.groups);
    s.top = f->g.observe.top > 0 ? flash_take(arena, f->BM, sizeof *s.top) : NULL;
    flash_scores_take_limits(f, arena, f->BM, f->BN, &s.limits);
    s.kv = flash_take(arena, f->BN, f->kv_key_bytes);
    s.gathered = flash_take(arena, f->BM, D * (int64_t)attn_dtype_bytes(f->p->q.dtype));
    s.keys = f->g.page_table ? flash_take(arena, FLASH_UNIT, D * 4) : NULL;
    flash_scratch_end(f, arena);
    return s;
}

int64_t flash_observe_scratch(const struct flash *f)
{
    struct flash_arena arena = { 0 };
    scratch_of(f, &arena);
    return arena.used;
}

/* ---- Scores of a tile -------------------------------------------------------------------------------------------- */

/* Packs Q of the row tile. Returns whether products of these queries with keys may overflow. */
static bool pack_queries(const struct flash *f, const struct flash_tile *t, const struct scratch *s)
{
    int64_t stride;
    const void *q = flash_gather(t, &f->g.view[ATTN_T_q], (int)f->g.dims.D, s->gathered, &stride);
    return !f->type->pack_a(t->rows, (int)f->g.dims.D, q, f->p->q.dtype, stride, s->Qa, s->q_lda) && f->may_overflow;
}

/* Packs K^T of keys j to j + n - 1. Returns whether products of queries with these keys may overflow. */
static bool pack_keys(const struct flash *f, const struct flash_tile *t, int64_t j, int n, const struct scratch *s)
{
    const attn_view *k = &f->g.view[ATTN_T_k];
    const int D = (int)f->g.dims.D;
    const int64_t first = t->seq->s.k_start + j, ldk = simd_ldb(f->type, D);
    struct flash_keys part;
    bool tame = true;
    for (int at = 0; at < n; at += part.count) {
        part = flash_keys_at(f, k, t->b, t->hk, first + at, n - at, FLASH_UNIT, D, s->keys);
        tame &= f->type->pack_bt(part.count, D, part.rows, k->dtype, part.stride,
                                 s->kv + at / SIMD_PANEL * ldk * simd_element_bytes(f->type), ldk);
    }
    return !tame && f->may_overflow;
}

/* Computes the scores of a row tile and keys j0 to j1 - 1, which lie in one key tile. *block becomes the range of these
 * keys that the row tile sees. S times *c are the scores in base 2. Returns false if the row tile sees none of the
 * keys. */
static bool score_block(const struct flash *f, const struct flash_tile *t, int64_t j0, int64_t j1, bool wild,
                        const struct scratch *s, struct visible_block *block, float *c)
{
    const struct flash_sequence *seq = t->seq;
    const int D = (int)f->g.dims.D;
    const int64_t ldk = simd_ldb(f->type, D), es = simd_element_bytes(f->type);
    if (!flash_visible_block(f, t, j0, j1, block)) return false;
    const char *K = s->kv;
    if (seq->packs) {
        const int64_t j = j0 + block->c0, first = j / f->BN * f->BN;
        const int64_t tile = seq->packs0 + t->hk * attn_tiles(seq->s.Sk, f->BN) + j / f->BN;
        K = f->kv + (seq->keys0 + t->hk * simd_round_up(seq->s.Sk, FLASH_UNIT) + first) * f->kv_key_bytes +
            (j - first) / SIMD_PANEL * ldk * es;
        wild |= f->kv_values[tile] & FLASH_WILD;
    } else {
        wild |= pack_keys(f, t, j0 + block->c0, block->cols, s);
    }
    f->type->gemm(t->rows, block->cols, D, s->Qa, s->q_lda, K, ldk, s->S, s->lds, false, NULL);
    *c = flash_scores(f, t, j0, block, s->S, s->lds, NULL, &s->limits, wild);
    return true;
}

/* Computes the scores of a row tile and of keys j0 to j1 - 1 with score_block(), and turns them into probabilities.
 * Returns false if the row tile sees none of these keys. */
static bool weigh_block(const struct flash *f, const struct flash_tile *t, int64_t j0, int64_t j1, bool wild,
                        const struct scratch *s, struct visible_block *block)
{
    float c;
    if (!score_block(f, t, j0, j1, wild, s, block, &c)) return false;
    for (int r = 0; r < t->rows; r++) {
        s->m[r] = f->row_base[t->row0 + r];
        s->inverse[r] = f->row_inverse[t->row0 + r];
        if (s->m[r] == s->m[r]) continue;
        flash_exact_scores(f, t, r, j0 + block->c0, block->cols, f->strange[t->row0 + r].lse, c * M_LN2,
                           s->S + r * s->lds, NULL);
        s->m[r] = 0;
    }
    f->simd->weigh(t->rows, block->cols, s->S, s->lds, c, s->m, s->inverse);
    return true;
}

/* ---- Phase FLASH_FORWARD: the results that each row has ---------------------------------------------------------- */

static void begin_top(const struct flash *f, const struct scratch *s, int rows)
{
    for (int r = 0; s->top && r < rows; r++) s->top[r] = (struct flash_top){ .most = (int)f->g.observe.top };
}

/* Adds the scores of a block to each row's list of its largest scores. Keys come in ascending order, so of two keys
 * with equal scores the key with the smaller index stays first. */
static void add_to_top(const struct flash_tile *t, int64_t j, int cols, float c, const struct scratch *s)
{
    for (int r = 0; s->top && r < t->rows; r++) {
        const float *row = s->S + r * s->lds;
        for (int x = 0; x < cols; x++) {
            const float z = row[x] * c;
            if (z > flash_top_least(&s->top[r])) flash_top_add(&s->top[r], z, (int32_t)(j + x));
        }
    }
}

/* Three numbers from a row's scores z, in natural logarithms: the largest score m, l = sum exp(z - m), and e = sum
 * exp(z - m) (z - m). m is -inf where the row sees no key, NaN where a score is NaN. */
struct row_sums {
    double m, l, e;
};

/* Returns the lse of a row, sink included: the caller's lse if given, or else the lse computed from the row's sums. */
static struct flash_lse lse_of(const struct flash *f, double sink, double given, const struct row_sums *row)
{
    const bool says_nothing = fabs(given) >= ATTN_LSE_MOST && given != -INFINITY;
    if (f->g.observe.given_lse && !says_nothing) return (struct flash_lse){ given, 0 };
    if (row->m != row->m) return (struct flash_lse){ NAN, 0 };
    const double top = row->m > sink ? row->m : sink;
    if (top == -INFINITY) return (struct flash_lse){ -INFINITY, 0 };
    const double keys = row->m > -INFINITY ? row->l * exp(row->m - top) : 0;
    return (struct flash_lse){ top, log(keys + (sink > -INFINITY ? exp(sink - top) : 0)) };
}

static double entropy_of(double sink, struct flash_lse lse, const struct row_sums *row)
{
    double entropy = 0;
    if (row->m == -INFINITY || lse.top == -INFINITY) return 0;
    const double from = row->m - lse.top - lse.rest; /* the natural logarithm of the row's largest probability */
    entropy = exp(from) * (-from * row->l - row->e);
    const double z = sink > -INFINITY ? sink - lse.top - lse.rest : -INFINITY;
    return exp(z) > 0 ? entropy - exp(z) * z : entropy;
}

static void store_float(const attn_view *view, int64_t b, int64_t h, int64_t row, double x)
{
    if (view->data) *(float *)flash_at(view, b, h, row) = (float)x;
}

static void store_top(const struct flash *f, const struct flash_tile *t, int64_t h, int64_t line, bool nan,
                      struct flash_lse lse, const struct flash_top *top)
{
    const attn_view *keys = &f->g.view[ATTN_T_top_keys], *weights = &f->g.view[ATTN_T_top_weights];
    int32_t *const to = keys->data ? flash_at(keys, t->b, h, line) : NULL;
    float *const w = weights->data ? flash_at(weights, t->b, h, line) : NULL;
    for (int n = 0; n < top->most; n++) {
        const bool there = !nan && n < top->count;
        const double P = there && lse.top > -INFINITY ? exp(top->z[n] - lse.top - lse.rest) : 0;
        if (to) to[n] = there ? top->key[n] : -1;
        if (w) w[n] = nan ? NAN : (float)P;
    }
}

/* Writes the outputs of row r of a tile. Stores the numbers with which weigh_block() will turn the row's scores into
 * probabilities. `base`: the row's largest score in base 2, or NaN if the row is computed in double. `top`: the row's
 * largest scores, in natural logarithms; NULL: not wanted. */
static void end_row(const struct flash *f, const struct flash_tile *t, int r, float base, const struct row_sums *row,
                    const struct flash_top *top)
{
    /* up to this exponent, exp() and its product with a probability are within the range of float32 */
    enum { FAR = 64 };
    const attn_view *given = &f->g.view[ATTN_T_lse];
    const int64_t h = t->h + r / t->n, line = t->seq->s.q_start + t->i0 + r % t->n, at = t->row0 + r;
    const double sink = f->p->sinks.rank ? *(const float *)flash_at(&f->g.view[ATTN_T_sinks], 0, h, 0) : -INFINITY;
    const double their_lse = f->g.observe.given_lse ? *(const float *)flash_at(given, t->b, h, line) : NAN;
    const struct flash_lse lse = lse_of(f, sink, their_lse, row);
    const bool nan = isnan(row->m) || (isnan(lse.top) && row->m > -INFINITY);
    const double most = nan ? NAN : row->m, entropy = nan ? NAN : entropy_of(sink, lse, row);
    store_float(&f->g.view[ATTN_T_row_max], t->b, h, line, most);
    store_float(&f->g.view[ATTN_T_entropy], t->b, h, line, entropy);
    if (!f->g.observe.given_lse) store_float(given, t->b, h, line, lse.top + lse.rest);
    if (top) store_top(f, t, h, line, nan, lse, top);
    f->row_most[at] = (float)most;
    f->row_entropy[at] = (float)entropy;
    f->strange[at].lse = nan ? (struct flash_lse){ NAN, 0 } : lse;
    f->row_inverse[at] = 1;
    f->row_base[at] = base;
    const double from = row->m - lse.top - lse.rest;
    if (row->m == -INFINITY || lse.top == -INFINITY) f->row_base[at] = INFINITY;
    else if (nan) f->row_base[at] = NAN;
    else if (base == base && from > FAR) f->row_base[at] = (float)((lse.top + lse.rest) * M_LOG2E);
    else if (base == base) f->row_inverse[at] = (float)exp(from);
}

static void end_strange_row(const struct flash *f, const struct flash_tile *t, int r, struct flash_top *top)
{
    struct row_sums row;
    if (top) *top = (struct flash_top){ .most = top->most };
    flash_exact_sums(f, t->b, t->h + r / t->n, t->i0 + r % t->n, &row.m, &row.l, &row.e, top);
    end_row(f, t, r, NAN, &row, top);
}

/* Returns true if the phase FLASH_FORWARD need not compute scores: lse is given, and no wanted output needs sums over
 * the scores. */
static bool is_known(const struct flash *f)
{
    return f->g.observe.given_lse && !f->p->row_max.rank && !f->p->entropy.rank && !f->p->max_logit.rank &&
           !f->p->mean_entropy.rank && f->g.observe.top == 0;
}

static void take_given_lse(const struct flash *f, const struct flash_tile *t)
{
    for (int r = 0; r < t->rows; r++) {
        const float lse = *(const float *)flash_at(&f->g.view[ATTN_T_lse], t->b, t->h + r / t->n,
                                                   t->seq->s.q_start + t->i0 + r % t->n);
        f->row_base[t->row0 + r] = lse == -INFINITY ? INFINITY : (float)(lse * M_LOG2E);
        f->row_inverse[t->row0 + r] = 1;
        if (lse != -INFINITY && !(fabsf(lse) < ATTN_LSE_MOST)) end_strange_row(f, t, r, NULL);
    }
}

void flash_observe_rows_item(const struct flash *f, char *memory, int64_t item)
{
    const int64_t b = FLASH_FIND(f, tiles0, item);
    const struct flash_sequence *seq = &f->seq[b];
    const int64_t rest = item - seq->tiles0;
    const struct flash_tile t = flash_tile_of(f, b, rest / seq->tiles, seq->tiles - 1 - rest % seq->tiles);
    struct flash_arena arena = { .base = memory };
    struct scratch s = scratch_of(f, &arena);
    struct visible_block block;
    float c;
    if (is_known(f)) {
        take_given_lse(f, &t);
        return;
    }
    const bool wild = pack_queries(f, &t, &s);
    for (int r = 0; r < t.rows; r++) s.m[r] = -INFINITY, s.l[r] = s.e[r] = 0;
    begin_top(f, &s, t.rows);
    for (int64_t j0 = t.keys.lo / f->BN * f->BN; j0 < t.keys.hi && !attn_is_cancelled(f->cancel); j0 += f->BN) {
        if (!score_block(f, &t, j0, attn_min64(j0 + f->BN, seq->s.Sk), wild, &s, &block, &c)) continue;
        f->simd->observe(t.rows, block.cols, s.S, s.lds, c, s.m, s.l, s.e);
        add_to_top(&t, j0 + block.c0, block.cols, c, &s);
    }
    for (int r = 0; r < t.rows && !attn_is_cancelled(f->cancel); r++) {
        const struct row_sums row = { s.m[r] * M_LN2, s.l[r], s.e[r] * M_LN2 };
        struct flash_top *const top = s.top ? &s.top[r] : NULL;
        if (flash_is_strange(f, &t, r, s.m[r], s.l[r])) {
            end_strange_row(f, &t, r, top);
            continue;
        }
        for (int n = 0; top && n < top->count; n++) top->z[n] *= M_LN2;
        end_row(f, &t, r, s.m[r], &row, top);
    }
}

/* ---- Phase FLASH_KEYS: the outputs key_mass and weights ---------------------------------------------------------- */

/* Returns the rows of a tile that belong to the tile's head number `head` and whose queries are `first` to `end` -
 * 1. */
static attn_range rows_among(const struct flash_tile *t, int head, int64_t first, int64_t end)
{
    attn_range rows;
    rows.lo = head * t->n + attn_clamp64(first - t->i0, 0, t->n);
    rows.hi = attn_max64(rows.lo, head * t->n + attn_clamp64(end - t->i0, 0, t->n));
    return rows;
}

static void store_mass(const struct flash *f, int64_t b, int64_t h, int64_t line, int n, double *mass)
{
    float *const to = h >= 0 ? flash_at(&f->g.view[ATTN_T_key_mass], b, h, 0) : NULL;
    for (int x = 0; x < n; x++) {
        if (to) to[line + x] = (float)mass[x];
        mass[x] = 0;
    }
}

/* Writes the probabilities of a row tile and keys j to j + cols - 1 to the output `weights`. Queries and keys that the
 * caller did not ask for are left out. */
static void store_weights(const struct flash *f, const struct flash_tile *t, int64_t j, int cols,
                          const struct scratch *s)
{
    const attn_observe *const o = &f->g.observe;
    const int lo = (int)attn_clamp64(o->keys[0] - j, 0, cols), hi = (int)attn_clamp64(o->keys[1] - j, lo, cols);
    for (int head = 0; head < t->heads && lo < hi; head++) {
        const attn_range rows = rows_among(t, head, o->rows[0], o->rows[1]);
        for (int64_t r = rows.lo; r < rows.hi; r++) {
            float *const to = flash_at(&f->g.view[ATTN_T_weights], t->b, t->h + head, t->i0 + r % t->n - o->rows[0]);
            memcpy(to + (j + lo - o->keys[0]), s->S + r * s->lds + lo, (size_t)(hi - lo) * sizeof *to);
        }
    }
}

/* Returns whether the outputs `weights` and `map` show sequence b. In a packed problem they show only the sequence
 * with the number observe.sequence. */
static bool in_region(const struct flash *f, int64_t b)
{
    return !f->g.dims.packed || b == f->g.observe.sequence;
}

static void chunk_item(const struct flash *f, char *memory, int64_t item)
{
    const attn_observe *const o = &f->g.observe;
    const int64_t b = FLASH_FIND(f, chunks0, item);
    const struct flash_sequence *seq = &f->seq[b];
    const int64_t chunks = attn_tiles(f->g.dims.packed ? seq->s.Sk : f->g.dims.Sk, f->Bk), rest = item - seq->chunks0;
    const int64_t hk = rest / chunks, j0 = rest % chunks * f->Bk, j1 = attn_min64(j0 + f->Bk, seq->s.Sk);
    const bool weights = f->p->weights.rank && in_region(f, b) && o->keys[0] < j1 && o->keys[1] > j0;
    const bool mass = f->p->key_mass.rank > 0;
    const int64_t first = mass && o->key_mass_rows > 0 ? attn_max64(0, seq->s.Sq - o->key_mass_rows) : 0;
    const int shown = (int)attn_clamp64((attn_keys_are_packed(&f->g.dims) ? seq->s.Sk : f->shown_keys) - j0, 0,
                                        attn_max64(0, j1 - j0));
    struct flash_arena arena = { .base = memory };
    struct scratch s = scratch_of(f, &arena);
    int64_t h = -1;
    if (j0 >= j1) return;
    memset(s.mass, 0, (size_t)(j1 - j0) * sizeof *s.mass);
    for (int64_t index = 0; index < seq->tiles && !attn_is_cancelled(f->cancel); index++) {
        const struct flash_tile t = flash_tile_of(f, b, hk, index);
        const bool adds = mass && t.i0 + t.n > first, shows = weights && t.i0 < o->rows[1] && t.i0 + t.n > o->rows[0];
        struct visible_block block;
        if (!adds && !shows) continue;
        if (!weigh_block(f, &t, j0, j1, pack_queries(f, &t, &s), &s, &block)) continue;
        if (shows) store_weights(f, &t, j0 + block.c0, block.cols, &s);
        for (int head = 0; head < t.heads && adds; head++) {
            const attn_range rows = rows_among(&t, head, first, seq->s.Sq);
            if (t.h + head != h) store_mass(f, b, h, seq->s.k_start + j0, shown, s.mass), h = t.h + head;
            f->simd->add_rows((int)(rows.hi - rows.lo), block.cols, s.S + rows.lo * s.lds, s.lds, s.sums);
            for (int x = 0; x < block.cols; x++) s.mass[block.c0 + x] += s.sums[x];
        }
    }
    if (mass) store_mass(f, b, h, seq->s.k_start + j0, shown, s.mass);
}

/* ---- Phase FLASH_KEYS: the output map ---------------------------------------------------------------------------- */

/* Divides `size` queries evenly among the `cells` rows of the output `map`, or `size` keys among its `cells` columns.
 * Returns the first query (or key) in cell number `cell`. If that cell is empty, returns the first query (or key) of
 * the next cell that is not empty. */
static int64_t first_of_cell(int64_t cell, int64_t cells, int64_t size)
{
    return attn_tiles(cell * size, cells);
}

/* Divides the rows of a tile into groups. All rows of a group belong to one head, and their probabilities are added to
 * one row of the output `map`. Returns the number of groups. */
static int group_rows(const struct flash *f, const struct flash_tile *t, struct group *groups)
{
    const attn_observe *const o = &f->g.observe;
    const int64_t size = o->rows[1] - o->rows[0];
    int count = 0;
    for (int head = 0; head < t->heads; head++) {
        const attn_range rows = rows_among(t, head, o->rows[0], o->rows[1]);
        for (int64_t r = rows.lo; r < rows.hi;) {
            const int64_t i = t->i0 + r % t->n - o->rows[0], u = i * o->map[0] / size;
            const int64_t end = attn_min64(rows.hi, r + first_of_cell(u + 1, o->map[0], size) - i);
            groups[count++] = (struct group){ t->h + head, u, (int)r, (int)end };
            r = end;
        }
    }
    return count;
}

/* The first `cols` elements of `sums` belong to keys j to j + cols - 1. Adds each element to the cell of the output
 * `map` in which its key lies. cells[0] is the cell in column v0 of `map`. */
static void add_to_cells(const attn_observe *o, int64_t j, int cols, const float *sums, int64_t v0, double *cells)
{
    const int64_t size = o->keys[1] - o->keys[0];
    for (int x = 0; x < cols;) {
        const int64_t key = j + x - o->keys[0], v = key * o->map[1] / size;
        const int end = (int)attn_min64(cols, x + first_of_cell(v + 1, o->map[1], size) - key);
        double sum = 0;
        for (; x < end; x++) sum += sums[x];
        cells[v - v0] += sum;
    }
}

/* Sums for part of one row of the output map: the columns that one item (unit of parallel work) computes. Several row
 * tiles may add to the same row of the map, so the sums are kept from one row tile to the next. */
struct carry {
    int64_t h, u;
    double cells[MAP_COLUMNS];
};

static void store_carry(const struct flash *f, int64_t b, int64_t v0, int columns, const struct carry *carry)
{
    if (carry->h < 0) return;
    float *const to = flash_at(&f->g.view[ATTN_T_map], b, carry->h, carry->u);
    for (int v = 0; v < columns; v++) to[v0 + v] = (float)carry->cells[v];
}

static void map_item(const struct flash *f, char *memory, int64_t item)
{
    const attn_observe *const o = &f->g.observe;
    const int64_t spans = attn_tiles(o->map[1], MAP_COLUMNS), each = f->g.dims.Hk * spans;
    const int64_t b = f->g.dims.packed ? o->sequence : item / each, hk = item % each / spans;
    const int64_t v0 = item % spans * MAP_COLUMNS, size = o->keys[1] - o->keys[0];
    const int columns = (int)attn_min64(MAP_COLUMNS, o->map[1] - v0);
    const struct flash_sequence *seq = &f->seq[b];
    const int64_t k0 = o->keys[0] + first_of_cell(v0, o->map[1], size);
    const int64_t k1 = attn_min64(seq->s.Sk, o->keys[0] + first_of_cell(v0 + columns, o->map[1], size));
    struct flash_arena arena = { .base = memory };
    struct scratch s = scratch_of(f, &arena);
    struct carry carry = { .h = -1 };
    for (int64_t index = 0; index < seq->tiles && k0 < k1; index++) {
        const struct flash_tile t = flash_tile_of(f, b, hk, index);
        const int groups = group_rows(f, &t, s.groups);
        if (groups == 0) continue;
        const bool wild = pack_queries(f, &t, &s);
        memset(s.cells, 0, (size_t)(groups * MAP_COLUMNS) * sizeof *s.cells);
        for (int64_t j0 = k0 / FLASH_UNIT * FLASH_UNIT, j1; j0 < k1; j0 = j1) {
            struct visible_block block;
            if (attn_is_cancelled(f->cancel)) return;
            j1 = attn_min64((j0 / f->BN + 1) * f->BN, k1);
            if (!weigh_block(f, &t, j0, j1, wild, &s, &block)) continue;
            const int64_t j = j0 + block.c0, from = attn_max64(j, k0);
            const int skip = (int)(from - j), cols = block.cols - skip;
            for (int n = 0; n < groups && cols > 0; n++) {
                const struct group *const g = &s.groups[n];
                f->simd->add_rows(g->r1 - g->r0, cols, s.S + g->r0 * s.lds + skip, s.lds, s.sums);
                add_to_cells(o, from, cols, s.sums, v0, s.cells + n * MAP_COLUMNS);
            }
        }
        for (int n = 0; n < groups; n++) {
            const struct group *const g = &s.groups[n];
            if (g->h != carry.h || g->u != carry.u) {
                store_carry(f, b, v0, columns, &carry);
                carry = (struct carry){ .h = g->h, .u = g->u };
            }
            for (int v = 0; v < columns; v++) carry.cells[v] += s.cells[n * MAP_COLUMNS + v];
        }
    }
    store_carry(f, b, v0, columns, &carry);
}

void flash_observe_keys_item(const struct flash *f, char *memory, int64_t item)
{
    if (item < f->observe_chunks) chunk_item(f, memory, item);
    else map_item(f, memory, item - f->observe_chunks);
}

/* ---- Phase FLASH_FINISH: results over all rows of a head --------------------------------------------------------- */

void flash_observe_finish_item(const struct flash *f, char *memory, int64_t item)
{
    const int64_t b = item / f->g.dims.H, h = item % f->g.dims.H;
    float most = -INFINITY;
    double entropy = 0;
    int64_t rows = 0;
    (void)memory;
    for (int64_t i = 0; i < f->seq[b].s.Sq; i++) {
        const int64_t row = flash_row_of(f, b, h, i);
        if (f->row_most[row] == -INFINITY) continue;
        rows++;
        entropy += f->row_entropy[row];
        if (!(f->row_most[row] <= most)) most = most == most ? f->row_most[row] : most;
    }
    store_float(&f->g.view[ATTN_T_max_logit], b, h, 0, most);
    store_float(&f->g.view[ATTN_T_mean_entropy], b, h, 0, rows > 0 ? entropy / (double)rows : 0);
}
