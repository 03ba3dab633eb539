/* frame.c: cuts a problem into tiles, and finds the caller's numbers for each tile. */
#include "kernels/judge/frame.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/judge/emulate.h"

const attn_tensor_id frame_tensors[FRAME_TENSORS] = { ATTN_T_out, ATTN_T_lse,   ATTN_T_dq,     ATTN_T_dk,
                                                      ATTN_T_dv,  ATTN_T_dbias, ATTN_T_dsinks, ATTN_T_dalibi_slopes };

/* ---- Sizes of tiles and of results ------------------------------------------------------------------------------- */

enum {
    EXPONENTIAL = 100, /* cost of one exponential, in multiply-adds */
    TILE_ROWS = 64,    /* the largest number of query rows of a tile */
    TILE_PAIRS =
        /* A tile has at most this many (query, key) pairs, because five arrays have a double for each pair. */
    1 << 19,
};

int64_t frame_tile_rows(const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    const int64_t keys = attn_max64(1, d.packed && d.total_k <= COMPUTE_MIXED_KEYS ? d.total_k : d.Sk);
    return attn_clamp64(TILE_PAIRS / keys, 1, TILE_ROWS);
}

/* Returns the largest number of keys in a tile of keys. It is chosen so that a tile of keys takes about as much work as
 * a tile of queries. The result is a multiple of PRODUCTS_WIDTH. */
static int64_t key_tile_keys(const attn_geometry *g)
{
    int64_t rows = 1;
    for (int64_t b = 0; b < g->dims.B; b++) rows = attn_max64(rows, attn_room_of(g->cu_q, g->dims.Sq, b) * g->group);
    return attn_clamp64(TILE_PAIRS / rows / PRODUCTS_WIDTH, 1, TILE_ROWS / PRODUCTS_WIDTH) * PRODUCTS_WIDTH;
}

static int64_t row_room(const attn_geometry *g, int64_t b)
{
    return attn_room_of(g->cu_q, g->dims.Sq, b);
}

static int64_t key_room(const attn_geometry *g, int64_t b)
{
    return attn_room_of(g->cu_k, g->dims.Sk, b);
}

int64_t frame_key_room(const struct frame *f, int64_t b)
{
    return key_room(&f->g, b);
}

int64_t frame_first_row(const struct frame *f, int64_t b)
{
    return f->g.cu_q ? f->g.cu_q[b] : 0;
}

int64_t frame_first_key(const struct frame *f, int64_t b)
{
    return f->g.cu_k ? f->g.cu_k[b] : 0;
}

int64_t frame_elements(const attn_problem *p, attn_tensor_id id)
{
    attn_tensor t;
    attn_error ignored;
    int64_t elements;
    const attn_dtype dtype = p->q.dtype == ATTN_F8E4M3 ? ATTN_BF16 : p->q.dtype;
    attn_problem of = *p;
    if (attn_tensors[id].role == ATTN_ROLE_OUT)
        /* A judge compares out and lse of a backward too, although they are inputs of a backward. Their sizes are
         * therefore those of a forward's results. */
        of.op = ATTN_OP_FORWARD;
    if (attn_output(&of, id, dtype, &t, &ignored) != ATTN_OK || !attn_shape_elements(t.rank, t.shape, &elements))
        return 0;
    return elements;
}

double frame_multiply_adds(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    double pairs = 0;
    for (int64_t b = 0; b < g.dims.B; b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        pairs += (double)attn_room_of(g.cu_q, g.dims.Sq, b) * (double)s.Sk;
    }
    const double each = (double)(g.dims.D + g.dims.Dv) * (p->op == ATTN_OP_BACKWARD ? 2.5 : 1) + EXPONENTIAL;
    return pairs * (double)g.dims.H * each;
}

double frame_forward_multiply_adds(const struct frame *f, const struct key_tile *keys)
{
    const double rows = (double)row_room(&f->g, keys->b) * (double)f->g.group;
    return rows * (double)attn_sequence_of(&f->g, keys->b).Sk * (double)(f->g.dims.D + f->g.dims.Dv + EXPONENTIAL);
}

/* ---- Cutting a problem into tiles -------------------------------------------------------------------------------- */

/* Returns a pseudo-random number from 0 to 1. It depends only on the problem's sizes and on n. */
static double chance(const attn_dims *d, int64_t n)
{
    uint64_t x = (uint64_t)n * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)(d->Sq * 31 + d->Sk * 7 + d->H * 3 + d->D);
    x ^= x >> 30, x *= UINT64_C(0xbf58476d1ce4e5b9), x ^= x >> 27, x *= UINT64_C(0x94d049bb133111eb), x ^= x >> 31;
    return (double)(x >> 11) * 0x1p-53;
}

/* Returns whether tile `t` is chosen for the check. In a backward, whole key/value heads are chosen. In a forward, the
 * first and the last tile of a head are chosen before the head's other tiles. */
static bool is_chosen(const attn_problem *p, const attn_dims *d, double share, const struct tile *t, int64_t room,
                      int64_t size)
{
    const bool backward = p->op == ATTN_OP_BACKWARD;
    const int64_t group = t->b * d->Hk + t->hk;
    if (share >= 1) return true;
    if (backward) return group == 0 || chance(d, group) < share;
    const int64_t tiles = attn_tiles(room, size), n = t->first / size;
    const bool edge = n == 0 || n == tiles - 1;
    /* The first and the last tile of a head are chosen before others. `edges` is their share of the head's tiles. */
    const double edges = tiles > 2 ? 2.0 / (double)tiles : 1;
    const double own = share <= edges ? (edge ? share / edges : 0) : edge ? 1 : (share - edges) / (1 - edges);
    const int64_t head = t->b * d->H + t->hk * (d->H / d->Hk) + t->n;
    return (head == 0 && n == 0) || chance(d, head * tiles + n) < own;
}

/* Returns the index of the first row of tile t in attn_truth (kernels/attention.h), the float64 results that a device
 * computes. */
static int64_t row_as_device(const struct frame *f, const struct tile *t)
{
    const attn_dims *const d = &f->g.dims;
    const int64_t h = t->hk * f->g.group + t->n;
    return (d->packed ? h * d->total_q + frame_first_row(f, t->b) : (t->b * d->H + h) * d->Sq) + t->first;
}

/* Returns the index of the first key of head hk in sequence b, in the arrays dk and dv of struct truth (float64
 * results). If a device computes these arrays (f->as_device), keys have the order of attn_truth. If the judge computes
 * them, keys have the order in which they are cut into tiles. The index is then f->lines, the number of keys that have
 * been cut before. */
static int64_t line_of(const struct frame *f, int64_t b, int64_t hk)
{
    const attn_dims *const d = &f->g.dims;
    if (!f->as_device) return f->lines;
    return attn_keys_are_packed(d) ? hk * d->total_k + frame_first_key(f, b) : (b * d->Hk + hk) * d->Sk;
}

/* Cuts the keys of head hk in sequence b into tiles of `size` keys, counts these tiles, and adds the keys to f->lines.
 * If f->key_tiles has memory, the function stores the tiles there. `tile` is the index of the first tile of queries
 * that reads these keys. */
static void cut_keys(struct frame *f, int64_t b, int64_t hk, int64_t tile, int64_t size)
{
    const int64_t room = key_room(&f->g, b), line = line_of(f, b, hk);
    for (int64_t first = 0; first < room; first += size) {
        const struct key_tile t = { b, hk, first, attn_min64(size, room - first), line + first, tile, f->count - tile };
        if (f->key_tiles) f->key_tiles[f->key_count] = t;
        f->key_count++;
    }
    f->lines += room;
}

/* Cuts the keys of those sequences that have no queries into tiles of `size` keys. */
static void cut_unread_keys(struct frame *f, int64_t size)
{
    for (int64_t hk = 0; hk < f->g.dims.Hk; hk++)
        for (int64_t b = 0; b < f->g.dims.B; b++)
            if (row_room(&f->g, b) == 0) cut_keys(f, b, hk, f->count, size);
}

/* Visits all tiles of the problem and counts the chosen ones. If f->tiles and f->key_tiles are not NULL, the function
 * stores the chosen tiles there. */
static void cut(struct frame *f, const attn_problem *p, double share)
{
    const attn_dims *const d = &f->g.dims;
    const int64_t size = frame_tile_rows(p), key_size = key_tile_keys(&f->g);
    f->count = f->key_count = f->rows = f->lines = f->all_rows = 0;
    f->whole = true;
    for (int64_t hk = 0; hk < d->Hk; hk++)
        for (int64_t b = 0; b < d->B; b++) {
            const int64_t room = row_room(&f->g, b), before = f->count;
            const int64_t line = line_of(f, b, hk);
            for (int64_t n = 0; n < f->g.group; n++) {
                f->all_rows += room;
                for (int64_t first = 0; first < room; first += size) {
                    struct tile t = { b, hk, n, first, attn_min64(size, room - first), f->rows, line, f->key_count };
                    if (!is_chosen(p, d, share, &t, room, size)) {
                        f->whole = false;
                        continue;
                    }
                    const int64_t head = b * d->H + hk * f->g.group + n;
                    if (f->as_device) t.row = row_as_device(f, &t);
                    if (f->row_of_head && first == 0) f->row_of_head[head] = t.row;
                    if (f->tiles) f->tiles[f->count] = t;
                    f->count++;
                    f->rows += t.count;
                }
            }
            if (p->op == ATTN_OP_BACKWARD && f->count > before) cut_keys(f, b, hk, before, key_size);
        }
    f->read_count = f->key_count;
    if (p->op == ATTN_OP_BACKWARD) cut_unread_keys(f, key_size);
}

/* ---- Reading the caller's tensors -------------------------------------------------------------------------------- */

/* Returns the strides of a contiguous tensor. `heads_first` is true if the axis of heads comes before the axis of
 * rows. */
static struct reading reading_of(const attn_tensor *t, int64_t heads, int64_t rows, int64_t columns, bool heads_first)
{
    struct reading r = { t->data, t->dtype, heads * rows * columns, 0, 0, 1 };
    r.head = heads_first ? rows * columns : columns;
    r.row = heads_first ? columns : heads * columns;
    return r;
}

static void find_readings(struct frame *f, const attn_tensor *results)
{
    const attn_dims *const d = &f->g.dims;
    const bool heads_first = f->p.layout == ATTN_BHSD && !d->packed;
    const int64_t q = d->packed ? d->total_q : d->Sq, k = attn_keys_are_packed(d) ? d->total_k : d->Sk;
    for (int swapped = 0; swapped < 2; swapped++) {
        f->reading[ATTN_T_out][swapped] = reading_of(&results[ATTN_T_out], d->H, q, d->Dv, heads_first != swapped);
        f->reading[ATTN_T_lse][swapped] = reading_of(&results[ATTN_T_lse], d->H, q, 1, !swapped);
        f->reading[ATTN_T_dq][swapped] = reading_of(&results[ATTN_T_dq], d->H, q, d->D, heads_first != swapped);
        f->reading[ATTN_T_dk][swapped] = reading_of(&results[ATTN_T_dk], d->Hk, k, d->D, heads_first != swapped);
        f->reading[ATTN_T_dv][swapped] = reading_of(&results[ATTN_T_dv], d->Hk, k, d->Dv, heads_first != swapped);
    }
}

double frame_got(const struct frame *f, attn_tensor_id id, bool swapped, int64_t b, int64_t h, int64_t row,
                 int64_t column, int64_t *at)
{
    const struct reading *const r = &f->reading[id][swapped];
    *at = (f->g.dims.packed ? 0 : b * r->batch) + h * r->head + row * r->row + column * r->column;
    return attn_load(r->dtype, r->data, *at);
}

/* ---- Opening and closing a frame (a problem cut into tiles), and differences ------------------------------------- */

/* Adds the tensors dbias, dsinks and dalibi_slopes to the problem, because attn_geometry_of() takes the strides of
 * these gradients from them. */
static void add_sums(attn_problem *p)
{
    static const attn_tensor_id sums[] = { ATTN_T_dbias, ATTN_T_dsinks, ATTN_T_dalibi_slopes };
    attn_error ignored;
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        if (attn_output(p, sums[i], p->q.dtype, &p->tensor[sums[i]], &ignored) != ATTN_OK) p->tensor[sums[i]].rank = 0;
}

static void prepare(struct frame *f, const attn_problem *p)
{
    *f = (struct frame){ .p = *p };
    if (p->op == ATTN_OP_BACKWARD) add_sums(&f->p);
    f->p.out = f->p.lse = (attn_tensor){ 0 };
    f->g = attn_geometry_of(&f->p);
}

int64_t frame_bytes(const attn_problem *p, double share, bool with_truth)
{
    struct frame f;
    prepare(&f, p);
    cut(&f, p, share);
    const attn_dims *const d = &f.g.dims;
    const bool backward = p->op == ATTN_OP_BACKWARD;
    const double numbers = (double)f.rows * (double)(d->Dv + 1 + (backward ? d->D : 0)) +
                           (double)f.lines * (double)(d->D + d->Dv);
    const double bytes = (with_truth ? numbers * 8 : 0) + (double)f.count * sizeof(struct tile) +
                         (double)f.key_count * sizeof(struct key_tile) +
                         2.5 * (double)compute_bytes(p, frame_tile_rows(p));
    return bytes > 1e18 ? INT64_MAX : (int64_t)bytes;
}

bool frame_open(struct frame *f, const attn_problem *p, const attn_tensor *results, double share, bool as_device)
{
    prepare(f, p);
    f->as_device = as_device;
    cut(f, p, share);
    f->tiles = calloc((size_t)f->count + 1, sizeof *f->tiles);
    f->key_tiles = calloc((size_t)f->key_count + 1, sizeof *f->key_tiles);
    f->row_of_head = malloc(((size_t)(f->g.dims.B * f->g.dims.H) + 1) * sizeof *f->row_of_head);
    if (!f->tiles || !f->key_tiles || !f->row_of_head) return false;
    for (int64_t n = 0; n < f->g.dims.B * f->g.dims.H; n++) f->row_of_head[n] = -1;
    cut(f, p, share);
    find_readings(f, results);
    f->p.out = results[ATTN_T_out]; /* only the dtype of p.out is used */
    if (!compute_open(&f->c, &f->p, frame_tile_rows(p))) return false;
    const size_t bytes = (size_t)emulate_floats(&f->c) * sizeof *f->scratch;
    f->scratch = aligned_alloc(PRODUCTS_ALIGNMENT,
                               (bytes + PRODUCTS_ALIGNMENT - 1) / PRODUCTS_ALIGNMENT * PRODUCTS_ALIGNMENT);
    return f->scratch != NULL;
}

void frame_close(struct frame *f)
{
    compute_close(&f->c);
    free(f->tiles);
    free(f->key_tiles);
    free(f->row_of_head);
    free(f->scratch);
    f->tiles = NULL, f->key_tiles = NULL, f->row_of_head = NULL, f->scratch = NULL;
}

double *frame_kept(const struct truth *t, attn_tensor_id id)
{
    switch ((int)id) {
    case ATTN_T_out: return t->out;
    case ATTN_T_lse: return t->lse;
    case ATTN_T_dq: return t->dq;
    case ATTN_T_dk: return t->dk;
    case ATTN_T_dv: return t->dv;
    case ATTN_T_dbias: return t->dbias;
    case ATTN_T_dsinks: return t->dsinks;
    default: return t->dslopes;
    }
}

int64_t frame_columns(const struct frame *f, attn_tensor_id id)
{
    switch ((int)id) {
    case ATTN_T_out:
    case ATTN_T_dv: return f->g.dims.Dv;
    case ATTN_T_dq:
    case ATTN_T_dk: return f->g.dims.D;
    default: return 1;
    }
}

void difference_add(struct difference *d, double got, double want)
{
    d->count++;
    if (got == want || (isnan(got) && isnan(want))) return;
    const double error = fabs(got - want);
    if (!isfinite(error)) {
        d->bad++;
        return;
    }
    if (error > d->most) d->most = error;
    d->sum += error;
    d->squares += error * error;
}

void difference_join(struct difference *d, const struct difference *more)
{
    if (more->most > d->most) d->most = more->most;
    d->sum += more->sum;
    d->squares += more->squares;
    d->count += more->count;
    d->bad += more->bad;
}

double difference_worst(const struct difference *d)
{
    return d->bad > 0 ? INFINITY : d->most;
}

double difference_mean(const struct difference *d)
{
    return d->count > 0 ? d->sum / (double)d->count : 0;
}
