/* run.c: lays out a run (the problems of one attn_run()) in memory and calls the phases in order. No other file calls
 * the phases.
 *
 * Arrays with an entry for each row of q (packed Q and dO, lse2, delta, dQ) all have the same order: key/value heads
 * follow each other inside a sequence, row tiles inside a key/value head, and each tile starts at a multiple of
 * FLASH_UNIT. The index of a row is
 *
 *     rows0 of the sequence + hk * rows + offset of the tile + row in the tile
 *
 * Keys have the same order in `kv`, where the number of keys of each sequence is rounded up to a multiple of
 * FLASH_UNIT. A key tile holds K^T and then V as matrices B of products (simd.h). */
#include "kernels/cpu/flash.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/philox.h"

/* ---- The sizes of tiles ------------------------------------------------------------------------------------------ */

/* Tile sizes, chosen by measurement (kernels/MEASUREMENTS.md, "The CPU kernels"), all multiples of FLASH_UNIT. A
 * forward has tiles of BM rows of q and BN keys; a backward has tiles of back_Br rows of q and chunks of Bk keys. A
 * problem gets the first entry of this table that fits its compute type and the larger of D and Dv. */
static const struct tile_sizes {
    /* the compute type (format of the operands of products): a number is the sum of `parts` stored numbers of the dtype
     * `element` (simd_split.h) */
    attn_dtype element;
    int parts, max_d;
    int BM, BN, back_Br, Bk;
} tile_sizes[] = {
    { ATTN_BF16, 1, 128, 64, 512, 128, 256 },
    { ATTN_BF16, 1, 256, 64, 256, 64, 256 },
    { ATTN_BF16, 1, ATTN_MAX_HEAD_DIM, 64, 128, 64, 128 },
    { ATTN_BF16, 2, 128, 64, 512, 128, 256 },
    { ATTN_BF16, 2, 256, 64, 256, 64, 128 },
    { ATTN_BF16, 2, ATTN_MAX_HEAD_DIM, 64, 128, 64, 128 },
    { ATTN_BF16, 3, 64, 64, 512, 64, 256 },
    { ATTN_BF16, 3, 128, 128, 256, 64, 256 },
    { ATTN_BF16, 3, 256, 128, 128, 64, 128 },
    { ATTN_BF16, 3, ATTN_MAX_HEAD_DIM, 64, 128, 64, 128 },
    { ATTN_F32, 1, 128, 64, 256, 64, 256 },
    { ATTN_F32, 1, 256, 64, 128, 64, 128 },
    { ATTN_F32, 1, ATTN_MAX_HEAD_DIM, 64, 128, 64, 128 },
};

enum {
    /* number of keys in a span; a multiple of every BN (keys of a tile). The keys of a row tile are split into spans,
     * which threads compute side by side. */
    SPLIT_KEYS = 2048,
    /* number of keys in a span if there are few query rows (the path FLASH_DOTS) */
    SPLIT_DOT_KEYS = 512,
    /* keys are split only in sequences with at most this many row tiles per head; a sequence with more tiles has work
     * for many threads anyway */
    SPLIT_TILES = 8,
    DBIAS_ROWS = 64, /* number of rows of dbias (gradient of bias) that one item (unit of work) sets to zero */
};

/* A run with fewer floating point operations than this takes at most 10 to 50 us. The calling thread computes it alone,
 * because waking another thread would take just as long. */
static const double small_flops = 6e6;

/* Sums over the sequences of a problem: numbers of tiles, rows and so on. They are exact if the lengths of the
 * sequences are known, and otherwise upper bounds. */
struct sums {
    int64_t tiles, rows, items, packs, keys, parts, chunks, longest_chunks;
};

/* Returns a + b * c, or INT64_MAX if the result overflows. flash_take() refuses to allocate INT64_MAX. */
static int64_t add_product(int64_t a, int64_t b, int64_t c)
{
    int64_t x;
    return __builtin_mul_overflow(b, c, &x) || __builtin_add_overflow(a, x, &x) ? INT64_MAX : x;
}

/* ---- The sequences of a problem, and their places in arrays ------------------------------------------------------ */

static void shape_sequence(const struct flash *f, struct flash_sequence *q)
{
    const int64_t Sq = q->s.Sq, Sk = q->s.Sk, G = f->g.group;
    q->heads = 1;
    q->tiles = q->rows = 0;
    if (Sq > f->BM / 2) {
        q->tiles = G * attn_tiles(Sq, f->BM);
        q->rows = G * simd_round_up(Sq, FLASH_UNIT);
    } else if (Sq > 0) {
        q->heads = (int)attn_min64(G, f->BM / Sq);
        q->tiles = attn_tiles(G, q->heads);
        q->rows = (q->tiles - 1) * simd_round_up(q->heads * Sq, FLASH_UNIT) +
                  simd_round_up((G - (q->tiles - 1) * q->heads) * Sq, FLASH_UNIT);
    }
    q->path = q->tiles == 1 && G * Sq <= FLASH_DOT_ROWS && !f->observe ? FLASH_DOTS : FLASH_TILES;
    q->packs = q->path == FLASH_TILES && q->tiles > 1;
    q->bundle = q->path == FLASH_DOTS ? f->bundle : 1;
    const int64_t span = q->path == FLASH_DOTS ? SPLIT_DOT_KEYS : SPLIT_KEYS;
    q->splits = q->tiles > 0 && q->tiles <= SPLIT_TILES && Sk >= 2 * span && !f->observe ? attn_tiles(Sk, span) : 1;
    q->span = q->splits > 1 ? span : attn_max64(Sk, 1);
    q->part_rows = q->splits == 1 ? 0 : q->path == FLASH_DOTS ? G * Sq : q->rows;
}

static int64_t chunks_of(const struct flash *f, const struct flash_sequence *q)
{
    /* If sequences are not packed (no cu_seqlens), chunks of keys cover all Sk rows of K, because a chunk writes
     * gradients of 0 for keys past seqlens_k. */
    return attn_tiles(f->g.dims.packed ? q->s.Sk : f->g.dims.Sk, f->Bk);
}

static void add_sequence(const struct flash *f, const struct flash_sequence *q, int64_t times, struct sums *to)
{
    const int64_t heads = f->g.dims.Hk, n = add_product(0, heads, times), chunks = chunks_of(f, q);
    to->tiles = add_product(to->tiles, n, q->tiles);
    to->rows = add_product(to->rows, n, q->rows);
    to->items = add_product(to->items, add_product(0, attn_tiles(heads, q->bundle), times), q->tiles * q->splits);
    to->packs = add_product(to->packs, n, q->packs ? attn_tiles(q->s.Sk, f->BN) : 0);
    to->keys = add_product(to->keys, n, q->packs ? simd_round_up(q->s.Sk, FLASH_UNIT) : 0);
    to->parts = add_product(to->parts, n, add_product(0, q->part_rows, q->splits));
    to->chunks = add_product(to->chunks, n, chunks);
    if (chunks > to->longest_chunks) to->longest_chunks = chunks;
}

/* Returns upper bounds on the members of struct sums. The bounds hold for all lengths of sequences. They are exact for
 * a problem that is not packed and has no seqlens.
 *
 * Let G be the number of query heads per key/value head, and BM the number of rows of a tile. A key/value head of a
 * sequence has at most 1 + 2 G Sq / BM row tiles. Rounding adds at most FLASH_UNIT - 1 rows to a tile. Keys are split
 * only in a sequence of at least 2 SPLIT_KEYS keys and at most SPLIT_TILES row tiles; it then has at most 3/2 Sk /
 * SPLIT_KEYS spans. On the path FLASH_DOTS, SPLIT_DOT_KEYS replaces SPLIT_KEYS. */
static struct sums bound_sums(const struct flash *f)
{
    struct sums sums = { 0 };
    const attn_dims *d = &f->g.dims;
    if (!d->packed && !f->g.seqlens_q) {
        struct flash_sequence q = { .s = { .Sq = d->Sq, .Sk = d->Sk } };
        shape_sequence(f, &q);
        add_sequence(f, &q, d->B, &sums);
        return sums;
    }
    const int64_t G = f->g.group, total_q = d->packed ? d->total_q : d->B * d->Sq,
                  total_k = d->packed ? d->total_k : d->B * d->Sk;
    const int64_t tiles = attn_min64(d->B, total_q) + add_product(0, 2 * G, total_q) / f->BM;
    const int64_t rows = add_product(add_product(0, G, total_q), FLASH_UNIT - 1, tiles);
    /* SPLIT_KEYS times an upper bound on the number of spans (runs of keys that one thread computes). All sequences
     * together have at most 3/2 total_k / SPLIT_KEYS spans. */
    const int64_t spans = total_k + total_k / 2;
    sums.tiles = add_product(0, d->Hk, tiles);
    sums.rows = add_product(0, d->Hk, rows);
    sums.packs = add_product(0, d->Hk, total_k / f->BN + d->B);
    sums.keys = add_product(0, d->Hk, total_k + (FLASH_UNIT - 1) * d->B);
    sums.parts = add_product(0, d->Hk,
                             add_product(0, attn_min64(rows, SPLIT_TILES * (int64_t)f->BM), spans / SPLIT_KEYS));
    sums.parts = add_product(sums.parts, d->Hk, add_product(0, FLASH_DOT_ROWS, spans / SPLIT_DOT_KEYS));
    sums.longest_chunks = attn_tiles(d->packed ? total_k : d->Sk, f->Bk);
    sums.chunks = add_product(0, d->Hk, total_k / f->Bk + d->B);
    return sums;
}

static struct sums place_sequences(struct flash *f, struct flash_sequence *seq)
{
    struct sums sums = { 0 };
    for (int64_t b = 0; b < f->B; b++) {
        struct flash_sequence q = { .s = attn_sequence_of(&f->g, b) };
        shape_sequence(f, &q);
        q.tiles0 = sums.tiles, q.rows0 = sums.rows, q.items0 = sums.items, q.packs0 = sums.packs;
        q.keys0 = sums.keys, q.parts0 = sums.parts, q.chunks0 = sums.chunks;
        add_sequence(f, &q, 1, &sums);
        if (seq) seq[b] = q;
    }
    return sums;
}

static bool within_bounds(const struct sums *sums, const struct flash *f)
{
    const struct sums most = bound_sums(f);
    return sums->tiles <= most.tiles && sums->rows <= most.rows && sums->packs <= most.packs &&
           sums->keys <= most.keys && sums->parts <= most.parts && sums->chunks <= most.chunks &&
           sums->longest_chunks <= most.longest_chunks;
}

/* ---- Planning a problem, and the memory that it needs ------------------------------------------------------------ */

/* Returns the compute type of a dtype: the format of the operands of products. Some types store a number in parts
 * (simd_split.h). Their products are faster than those of f32: 1.4 times with three parts, twice with two. But D and Dv
 * are padded to multiples of 32. If the padding would cost most of the time that the faster products save, the result
 * is f32. */
static const struct simd_type *type_of(const struct simd *simd, attn_dtype dtype, int64_t D, int64_t Dv, double scale)
{
    /* With a |scale| above 2^32, scores are within the range of float32 only if the products q . k are tiny. Products
     * in bf16 would flush tiny numbers to 0, so the products are computed in f32. */
    if (fabs(scale) > 0x1p32) return &simd->f32;
    /* e4m3 inputs are computed as bf16, which represents every e4m3 number exactly. */
    const struct simd_type *t = simd_type_for(simd, dtype == ATTN_F8E4M3 ? ATTN_BF16 : dtype);
    const int64_t padded = simd_round_up(D, SIMD_PANEL) + simd_round_up(Dv, SIMD_PANEL);
    const double slower = (double)padded / (double)(D + Dv);
    return slower > (t->parts == 3 ? 1.2 : t->parts == 2 ? 1.9 : INFINITY) ? &simd->f32 : t;
}

/* Returns whether the largest number of the dtype is so small that every dot product of two rows is finite. */
static bool fits_products(attn_dtype dtype)
{
    return dtype == ATTN_F16 || dtype == ATTN_F8E4M3;
}

static void resolve(const struct simd *simd, const attn_problem *p, struct flash *f)
{
    memset(f, 0, sizeof *f);
    f->p = p;
    f->simd = simd;
    f->g = attn_geometry_of(p);
    f->type = type_of(simd, p->q.dtype, f->g.dims.D, f->g.dims.Dv, f->g.scale);
    f->B = f->g.dims.B;
    f->backward = p->op == ATTN_OP_BACKWARD;
    f->observe = p->op == ATTN_OP_OBSERVE;
    f->recompute = f->backward && p->lse.rank == 0;
    f->forward_type = f->type;
    /* In the gradient of an ALiBi slope, each score's gradient is multiplied by a distance of hundreds of keys. This
     * magnifies errors of P V. P V is therefore computed with each P split into two bf16 numbers, as for float16. */
    if (f->recompute && p->alibi_slopes.rank && f->type->dtype == ATTN_BF16 && f->type->parts == 1)
        f->forward_type = type_of(simd, ATTN_F16, f->g.dims.D, f->g.dims.Dv, f->g.scale);
    f->plain = !(f->g.softcap > 0) && !p->bias.rank && !p->keep_mask.rank && !p->alibi_slopes.rank &&
               !p->mask_startend_rows.rank;
    f->may_overflow = !(fits_products(p->q.dtype) && fits_products(p->k.dtype));
    f->drop_threshold = attn_dropout_threshold(p->dropout_p);
    f->dropout = p->dropout_p > 0;
    f->drop_scale = (float)(1 / (1 - p->dropout_p));
    const int64_t d = attn_max64(f->g.dims.D, f->g.dims.Dv);
    for (size_t i = 0; i < sizeof tile_sizes / sizeof *tile_sizes; i++) {
        const struct tile_sizes *t = &tile_sizes[i];
        if (t->element != f->type->dtype || t->parts != f->type->parts || d > t->max_d) continue;
        f->BM = f->backward ? t->back_Br : t->BM;
        f->BN = t->BN;
        f->Bk = f->observe ? t->BN : t->Bk;
        break;
    }
    /* an entry of tile_sizes was found, because the last entries of that table fit every head size */
    assert(f->BM > 0);
    f->shown_keys = f->g.dims.page_size > 0 && f->g.observe.shown_keys > 0 ? f->g.observe.shown_keys : f->g.dims.Sk;
    /* If heads lie side by side in memory, one item (unit of parallel work) computes several heads together
     * (decode.c). */
    f->bundle = 1;
    if (f->g.view[ATTN_T_k].head < f->g.view[ATTN_T_k].row)
        f->bundle = FLASH_BUNDLE_ROWS / (int)attn_min64(FLASH_DOT_ROWS, attn_max64(1, f->g.group * f->g.dims.Sq));
    f->bundle = (int)attn_min64(f->bundle, f->g.dims.Hk);
    if (p->mask_startend_rows.rank) {
        f->mask_heads = p->mask_startend_rows.shape[1];
        f->mask_blocks = attn_tiles(f->g.dims.Sk, FLASH_MASK_BLOCK);
    }
    /* Several groups of heads, or several batch rows, may share one matrix of dbias. One item (unit of work) then
     * computes all of these groups or batch rows, one after the other (backward.c). */
    if (f->backward && p->dbias.rank) {
        const bool heads = p->bias.shape[1] != f->g.dims.H, batch = p->bias.shape[0] != f->g.dims.B;
        if ((heads && f->g.dims.Hk > 1) || (batch && f->B > 1))
            f->dbias_classes = (heads ? 1 : f->g.dims.Hk) * (batch ? attn_min64(f->B, 1) : f->B);
        f->dbias_blocks = attn_tiles(p->bias.shape[2], DBIAS_ROWS);
        f->dbias_slices = p->bias.shape[0] * p->bias.shape[1] * f->dbias_blocks;
    }
}

/* Divides the problem's part of the workspace among the problem's arrays. If the arena has no memory, cut() only adds
 * up the bytes of the arrays. */
static void cut(struct flash *f, const struct sums *sums, struct flash_arena *arena)
{
    const attn_dims *d = &f->g.dims;
    const struct simd_type *t = f->type, *forward_t = f->forward_type;
    const int64_t es = simd_element_bytes(t);
    f->seq = flash_take(arena, f->B, sizeof *f->seq);
    f->most = flash_take(arena, add_product(0, f->B, d->Hk), 2 * sizeof *f->most);
    const bool forward = !f->backward || f->recompute;
    if (forward) {
        f->kv_key_bytes = simd_round_up(d->D, t->k_multiple) * es * t->parts +
                          simd_round_up(d->Dv, SIMD_PANEL) * simd_element_bytes(forward_t) * forward_t->parts;
        f->kv = flash_take(arena, sums->keys, f->kv_key_bytes);
        f->kv_values = flash_take(arena, sums->packs, 1);
        f->part_O = flash_take(arena, sums->parts, d->Dv * 4);
        f->part_m = flash_take(arena, sums->parts, 4);
        f->part_l = flash_take(arena, sums->parts, 4);
    }
    if (f->observe) {
        f->row_base = flash_take(arena, sums->rows, 4);
        f->row_inverse = flash_take(arena, sums->rows, 4);
        f->row_most = flash_take(arena, sums->rows, 4);
        f->row_entropy = flash_take(arena, sums->rows, 4);
        f->strange = flash_take(arena, sums->rows, sizeof *f->strange);
    }
    if (f->mask_heads)
        f->extremes = flash_take(arena, f->B * f->mask_heads, f->mask_blocks * (int64_t)sizeof *f->extremes);
    if (f->backward) {
        f->q_lda = simd_lda(t, d->D);
        f->do_lda = simd_lda(t, d->Dv);
        /* simd_ld() adds at most 64 bytes to a row */
        f->q_unit_bytes = simd_round_up(d->D, SIMD_A_ROWS) * (FLASH_UNIT * es + 64) * t->parts;
        f->do_unit_bytes = simd_round_up(d->Dv, SIMD_A_ROWS) * (FLASH_UNIT * es + 64) * t->parts;
        f->dq_ld = simd_round_up(d->D, 16);
        f->Qa = flash_take(arena, sums->rows, f->q_lda * es);
        f->dOa = flash_take(arena, sums->rows, f->do_lda * es);
        f->Qat = flash_take(arena, sums->rows / FLASH_UNIT + 1, f->q_unit_bytes);
        f->dOat = flash_take(arena, sums->rows / FLASH_UNIT + 1, f->do_unit_bytes);
        f->row_values = flash_take(arena, sums->rows / FLASH_UNIT + 1, 1);
        f->lse2 = flash_take(arena, sums->rows, 4);
        f->delta = flash_take(arena, sums->rows, 4);
        f->strange = flash_take(arena, sums->rows, sizeof *f->strange);
        if (f->p->dq.rank) f->dQ = flash_take(arena, sums->rows, f->dq_ld * 4);
        f->chunks = sums->longest_chunks;
        f->progress = flash_take(arena, sums->chunks, sizeof *f->progress);
        if (f->p->dalibi_slopes.rank) f->slope_parts = flash_take(arena, add_product(0, f->B, d->H), f->chunks * 8);
    }
    f->tiles_all = sums->tiles;
    f->packs_all = sums->packs;
    f->chunks_all = sums->chunks;
    f->items[FLASH_PREPARE] = f->B * f->mask_heads + (forward ? sums->packs : 0);
    f->items[FLASH_FORWARD] = forward ? sums->items : 0;
    f->items[FLASH_MERGE] = forward && sums->parts > 0 ? sums->tiles : 0;
    if (f->observe) {
        const int64_t spans = f->p->map.rank ? attn_tiles(f->g.observe.map[1], FLASH_MAP_COLUMNS) : 0;
        f->observe_chunks = f->p->key_mass.rank || f->p->weights.rank ? sums->chunks : 0;
        f->items[FLASH_KEYS] = f->observe_chunks + (d->packed ? 1 : f->B) * d->Hk * spans;
        f->items[FLASH_FINISH] = f->p->max_logit.rank || f->p->mean_entropy.rank ? f->B * d->H : 0;
    }
    if (f->backward) {
        f->items[FLASH_ROWS] = sums->tiles + f->dbias_slices;
        f->items[FLASH_KEYS] = f->dbias_classes > 0 ? f->dbias_classes * f->chunks : sums->chunks;
        f->items[FLASH_FINISH] = (f->p->dq.rank ? sums->tiles : 0) +
                                 (f->p->dsinks.rank || f->p->dalibi_slopes.rank ? d->H : 0);
    }
}

static int64_t scratch_bytes(const struct flash *f)
{
    int64_t bytes = 0;
    if (!f->backward || f->recompute) {
        bytes = attn_max64(bytes, flash_forward_scratch(f));
        bytes = attn_max64(bytes, flash_decode_scratch(f));
    }
    if (f->backward) bytes = attn_max64(bytes, flash_backward_scratch(f));
    if (f->observe) bytes = attn_max64(bytes, flash_observe_scratch(f));
    return bytes;
}

static attn_status measure(const struct simd *simd, int threads, const attn_plan *plans, int count, bool exact,
                           size_t *bytes, attn_error *err)
{
    struct flash_arena arena = { 0 };
    struct flash f;
    int64_t scratch = 0;
    flash_take(&arena, count, sizeof f);
    for (int n = 0; n < count; n++) {
        resolve(simd, plans[n].problem, &f);
        const struct sums sums = exact ? place_sequences(&f, NULL) : bound_sums(&f);
        cut(&f, &sums, &arena);
        scratch = attn_max64(scratch, scratch_bytes(&f));
    }
    flash_take(&arena, threads, (scratch + 63) & ~INT64_C(63));
    if (arena.used == INT64_MAX)
        return attn_fail(err, ATTN_TOO_LARGE, "", "the workspace of this problem would be over 2^63 bytes");
    *bytes = (size_t)arena.used;
    return ATTN_OK;
}

attn_status flash_run_bytes(const struct simd *simd, int threads, const attn_plan *plans, int count, size_t *bytes,
                            attn_error *err)
{
    return measure(simd, threads, plans, count, false, bytes, err);
}

attn_status flash_run_bytes_exact(const struct simd *simd, int threads, const attn_plan *plans, int count,
                                  size_t *bytes, attn_error *err)
{
    return measure(simd, threads, plans, count, true, bytes, err);
}

/* ---- Running the phases, one after the other --------------------------------------------------------------------- */

typedef void (*phase_item)(const struct flash *f, char *scratch, int64_t item);

/* The functions that compute an item (unit of parallel work) of each phase, by operation. NULL: the operation has no
 * items in that phase. */
static const phase_item phase_items[ATTN_OP_COUNT][FLASH_PHASES] = {
    [ATTN_OP_FORWARD] = { [FLASH_PREPARE] = flash_forward_prepare_item,
                          [FLASH_FORWARD] = flash_forward_item,
                          [FLASH_MERGE] = flash_forward_merge_item },
    [ATTN_OP_BACKWARD] = { [FLASH_PREPARE] = flash_forward_prepare_item,
                           [FLASH_FORWARD] = flash_forward_item,
                           [FLASH_MERGE] = flash_forward_merge_item,
                           [FLASH_ROWS] = flash_backward_rows_item,
                           [FLASH_KEYS] = flash_backward_keys_item,
                           [FLASH_FINISH] = flash_backward_finish_item },
    [ATTN_OP_OBSERVE] = { [FLASH_PREPARE] = flash_forward_prepare_item,
                          [FLASH_FORWARD] = flash_observe_rows_item,
                          [FLASH_KEYS] = flash_observe_keys_item,
                          [FLASH_FINISH] = flash_observe_finish_item },
};

struct walk {
    const struct flash_run *run;
    enum flash_phase phase;
};

static void walk_item(void *context, int worker, int64_t item)
{
    const struct walk *walk = context;
    const struct flash_run *run = walk->run;
    /* after a cancel, the remaining items (units of parallel work) return at once */
    if (attn_is_cancelled(run->cancel)) return;
    /* finds the problem to which the item belongs: the last problem whose first item is not after this item */
    int low = 0, high = run->count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (run->problems[middle].first[walk->phase] <= item) low = middle;
        else high = middle;
    }
    const struct flash *f = &run->problems[low];
    phase_items[f->p->op][walk->phase](f, run->scratch + worker * run->scratch_bytes, item - f->first[walk->phase]);
}

bool flash_run(const struct simd *simd, struct pool *pool, const attn_plan *plans, int count, void *workspace,
               const int *cancel)
{
    struct flash_arena arena = { .base = workspace };
    struct flash_run run = { .simd = simd, .count = count, .cancel = cancel };
    double flops = 0;
    run.problems = flash_take(&arena, count, sizeof *run.problems);
    for (int n = 0; n < count; n++) {
        struct flash *f = &run.problems[n];
        resolve(simd, plans[n].problem, f);
        f->cancel = cancel;
        /* f->seq is filled before cut() runs, because cut() needs sums over the entries of f->seq. It is filled at the
         * start of the arena, which is the address that cut() will give it. */
        struct flash_arena ahead = arena;
        f->seq = flash_take(&ahead, f->B, sizeof *f->seq);
        const struct sums sums = place_sequences(f, f->seq);
        assert(within_bounds(&sums, f));
        cut(f, &sums, &arena);
        f->scratch_bytes = scratch_bytes(f);
        for (int64_t head = 0; head < 2 * f->B * f->g.dims.Hk; head++) atomic_init(&f->most[head], -1);
        for (int64_t c = 0; f->backward && c < f->chunks_all; c++) atomic_init(&f->progress[c].tile, 0);
        for (int phase = 0; phase < FLASH_PHASES; phase++) {
            f->first[phase] = run.items[phase];
            run.items[phase] += f->items[phase];
        }
        run.scratch_bytes = attn_max64(run.scratch_bytes, (f->scratch_bytes + 63) & ~INT64_C(63));
        flops += (double)sums.rows * (double)f->g.dims.Sk * 2 * (double)(f->g.dims.D + f->g.dims.Dv) *
                 (f->backward ? 2.5 : 1);
    }
    run.scratch = flash_take(&arena, pool_threads(pool), run.scratch_bytes);
    const bool small = flops < small_flops;
    for (int phase = 0; phase < FLASH_PHASES && !attn_is_cancelled(cancel); phase++) {
        struct walk walk = { &run, (enum flash_phase)phase };
        if (small)
            for (int64_t item = 0; item < run.items[phase]; item++) walk_item(&walk, 0, item);
        else pool_run(pool, run.items[phase], walk_item, &walk);
    }
    simd->leave();
    return !attn_is_cancelled(cancel);
}
