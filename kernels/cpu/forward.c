/* forward.c: O = softmax(scores) V and the log-sum-exp, for one row tile at a time. FlashAttention-2
 * (arXiv:2307.08691), Algorithm 1. For each row tile, the code goes over the key tiles that some row of the tile sees:
 *
 *     S = Q K^T          product        cut to the columns that some row sees (diagonal, window, hidden FlashMask
 *                                       blocks)
 *     scores             masks, softcap, bias, ALiBi; nothing at all for a tile in the middle of a plain problem
 *     m, l, P = softmax  online: rescale = exp2(m_old - m_new)
 *     O = rescale O + P V
 *
 * At the end out = O / l and lse = (m + log2 l) ln 2. Scores and m are in base 2.
 *
 * A block that causal or a window cuts is computed in strips of a few rows, each against the columns that one of its
 * rows sees. Hidden pairs add 0 to sums, so strips do not change the bits.
 *
 * FLASH_PREPARE packs K and V once where several row tiles use them. Where a sequence has one row tile per head, a key
 * tile is packed only when the row tile is multiplied with it.
 *
 * A hidden key must have no effect, but P = 0 times NaN would be NaN. V is therefore packed with 0 in place of NaN and
 * infinity. add_nonfinite() adds the values left out to `nonfinite_sums`, for exactly the rows that see them, and these
 * sums are added to O at the end. A NaN in K makes scores NaN, and hidden scores are overwritten. */
#include <math.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"
#include "kernels/merge.h"

/* ---- The scratch memory of a worker ------------------------------------------------------------------------------ */

struct scratch {
    int64_t q_lda, lds, ldp, ldo;
    char *Qa, *P, *kv;
    float *S, *drop, *O, *nonfinite_sums;
    float *m, *l, *rescale, *inverse;
    float *clean; /* memory in which packing replaces NaN and infinity by 0, in FLASH_UNIT rows of f32 */
    char *keys;   /* memory in which FLASH_UNIT rows of k or v are collected if they lie in several pages */
    char *gathered;
    struct flash_limits limits;
};

static struct scratch scratch_of(const struct flash *f, struct flash_arena *arena)
{
    const struct simd_type *t = f->forward_type;
    const int64_t D = f->g.dims.D, Dv = f->g.dims.Dv;
    struct scratch scratch;
    scratch.q_lda = simd_lda(f->type, D);
    scratch.lds = simd_ld(f->BN, 4);
    scratch.ldo = simd_ld(Dv, 4);
    scratch.Qa = flash_take(arena, simd_a_bytes(f->type, f->BM, scratch.q_lda), 1);
    scratch.S = flash_take(arena, simd_round_up(f->BM, SIMD_A_ROWS) * scratch.lds, 4);
    scratch.ldp = t->dtype == ATTN_F32 ? scratch.lds : simd_lda(t, f->BN);
    scratch.P = t->dtype == ATTN_F32 ? (char *)scratch.S : flash_take(arena, simd_a_bytes(t, f->BM, scratch.ldp), 1);
    scratch.O = flash_take(arena, f->BM * scratch.ldo, 4);
    scratch.m = flash_take(arena, f->BM, 4);
    scratch.l = flash_take(arena, f->BM, 4);
    scratch.rescale = flash_take(arena, f->BM, 4);
    scratch.inverse = flash_take(arena, f->BM, 4);
    flash_scores_take_limits(f, arena, f->BM, f->BN, &scratch.limits);
    scratch.kv = flash_take(arena, f->BN, f->kv_key_bytes);
    scratch.gathered = flash_take(arena, f->BM, D * (int64_t)attn_dtype_bytes(f->p->q.dtype));
    scratch.clean = flash_take(arena, FLASH_UNIT, Dv * 4);
    scratch.keys = f->g.page_table ? flash_take(arena, FLASH_UNIT, attn_max64(D, Dv) * 4) : NULL;
    scratch.drop = f->dropout ? flash_take(arena, f->BM * scratch.lds, 4) : NULL;
    /* the last array in the scratch memory, because most problems never touch it */
    scratch.nonfinite_sums = flash_take(arena, f->BM * scratch.ldo, 4);
    flash_scratch_end(f, arena);
    return scratch;
}

int64_t flash_forward_scratch(const struct flash *f)
{
    struct flash_arena arena = { 0 };
    scratch_of(f, &arena);
    return arena.used;
}

/* ---- Phase FLASH_PREPARE: packing K and V ------------------------------------------------------------------------ */

/* Packs keys j0 to j0 + n - 1 for matrix products: stores K^T at `kv`, and V behind it. Returns which unusual numbers
 * (huge, infinite or NaN) K and V contain, as bits of enum flash_values. */
static int pack_keys(const struct flash *f, const struct flash_sequence *seq, int64_t b, int64_t hk, int64_t j0, int n,
                     char *kv, const struct scratch *scratch)
{
    const struct simd_type *t = f->forward_type, *score_t = f->type;
    const attn_view *k = &f->g.view[ATTN_T_k], *v = &f->g.view[ATTN_T_v];
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    const int64_t first = seq->s.k_start + j0, es = simd_element_bytes(t), ldk = simd_ldb(score_t, D),
                  ldv = simd_ldb(t, n);
    char *const values = kv + simd_b_bytes(score_t, n, ldk);
    struct flash_keys part;
    int found = FLASH_TAME;
    for (int at = 0; at < n; at += part.count) {
        part = flash_keys_at(f, k, b, hk, first + at, n - at, FLASH_UNIT, D, scratch->keys);
        if (!score_t->pack_bt(part.count, D, part.rows, k->dtype, part.stride,
                              kv + at / SIMD_PANEL * ldk * simd_element_bytes(score_t), ldk))
            found |= f->may_overflow ? FLASH_WILD : FLASH_TAME;
    }
    for (int at = 0; at < n; at += part.count) {
        part = flash_keys_at(f, v, b, hk, first + at, n - at, FLASH_UNIT, Dv, scratch->keys);
        found |= flash_pack_clean_b(f, t, part.count, Dv, part.rows, v->dtype, part.stride,
                                    values + (int64_t)at * SIMD_PANEL * es, ldv, scratch->clean);
    }
    return found;
}

static void summarise_mask(const struct flash *f, int64_t b, int64_t m)
{
    const attn_view *bounds = &f->g.view[ATTN_T_mask_startend_rows];
    const int64_t Sk = f->seq[b].s.Sk;
    for (int64_t block = 0; block < f->mask_blocks; block++) {
        attn_mask_extremes e = attn_mask_extremes_init();
        for (int64_t j = block * FLASH_MASK_BLOCK; j < attn_min64((block + 1) * FLASH_MASK_BLOCK, Sk); j++)
            attn_mask_extremes_add(
                &e, attn_mask_of(flash_at(bounds, b, m, j), f->g.mask_bounds, f->g.causal, f->g.dims.Sq));
        f->extremes[(b * f->mask_heads + m) * f->mask_blocks + block] = e;
    }
}

void flash_forward_prepare_item(const struct flash *f, char *memory, int64_t item)
{
    if (item < f->B * f->mask_heads) {
        summarise_mask(f, item / f->mask_heads, item % f->mask_heads);
        return;
    }
    item -= f->B * f->mask_heads;
    const int64_t b = FLASH_FIND(f, packs0, item);
    const struct flash_sequence *seq = &f->seq[b];
    const int64_t tiles = attn_tiles(seq->s.Sk, f->BN), rest = item - seq->packs0;
    const int64_t hk = rest / tiles, j0 = rest % tiles * f->BN;
    const int n = (int)attn_min64(f->BN, seq->s.Sk - j0);
    assert(rest >= 0 && hk < f->g.dims.Hk && n > 0);
    struct flash_arena arena = { .base = memory };
    const struct scratch scratch = scratch_of(f, &arena);
    char *kv = f->kv + (seq->keys0 + hk * simd_round_up(seq->s.Sk, FLASH_UNIT) + j0) * f->kv_key_bytes;
    f->kv_values[item] = (uint8_t)pack_keys(f, seq, b, hk, j0, n, kv, &scratch);
}

/* ---- Phase FLASH_FORWARD: out and lse of a tile of rows ---------------------------------------------------------- */

/* Returns a strip: a new tile that consists of rows r0 to r0 + n - 1 of a row tile with one head. */
static struct flash_tile strip_of(const struct flash *f, const struct flash_tile *t, int r0, int n)
{
    struct flash_tile strip = *t;
    strip.i0 += r0;
    strip.row0 += r0;
    strip.n = strip.rows = n;
    strip.keys = attn_keys_of_rows(&f->g, &t->seq->s, strip.i0, strip.i0 + n);
    strip.all = attn_keys_of_all_rows(&f->g, &t->seq->s, strip.i0, strip.i0 + n);
    return strip;
}

/* Packing replaces NaN and infinity in V by 0. This function adds the replaced values of each key to `nonfinite_sums`
 * of the rows whose score for the key is not hidden. */
static void add_nonfinite(const struct flash *f, const struct flash_tile *t, int64_t j, int cols, const float *S,
                          int64_t lds, float *nonfinite_sums, int64_t ldo, float *line)
{
    const attn_view *v = &f->g.view[ATTN_T_v];
    const int Dv = (int)f->g.dims.Dv;
    for (int c = 0; c < cols; c++) {
        f->simd->load(Dv, flash_key_at(f, v, t->b, t->hk, t->seq->s.k_start + j + c), v->dtype, line);
        for (int d = 0; d < Dv; d++)
            if (!isfinite(line[d]))
                for (int r = 0; r < t->rows; r++)
                    if (S[r * lds + c] != -INFINITY) nonfinite_sums[r * ldo + d] += line[d];
    }
}

void flash_forward_item(const struct flash *f, char *memory, int64_t item)
{
    const struct simd_type *type = f->forward_type, *score_type = f->type;
    const int64_t b = FLASH_FIND(f, items0, item);
    const struct flash_sequence *seq = &f->seq[b];
    const int64_t each = seq->tiles * seq->splits, rest = item - seq->items0;
    assert(rest >= 0 && rest < attn_tiles(f->g.dims.Hk, seq->bundle) * each);
    if (seq->path == FLASH_DOTS) {
        flash_decode(f, b, rest, memory);
        return;
    }
    /* The last queries come first: with a causal mask they see the most keys, so their items (units of parallel work)
     * take longest. A long item that started last would keep all other threads waiting. */
    const int64_t hk = rest / each, index = seq->tiles - 1 - rest % each / seq->splits,
                  split = rest % each % seq->splits;
    const struct flash_tile t = flash_tile_of(f, b, hk, index);
    struct flash_arena arena = { .base = memory };
    struct scratch scratch = scratch_of(f, &arena);
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    const int64_t es = simd_element_bytes(type), score_es = simd_element_bytes(score_type),
                  ldk = simd_ldb(score_type, D);

    int64_t q_stride;
    const void *q = flash_gather(&t, &f->g.view[ATTN_T_q], D, scratch.gathered, &q_stride);
    const bool wild_q = !score_type->pack_a(t.rows, D, q, f->p->q.dtype, q_stride, scratch.Qa, scratch.q_lda) &&
                        f->may_overflow;
    for (int r = 0; r < t.rows; r++) scratch.m[r] = -INFINITY, scratch.l[r] = 0;

    bool started = false, nonfinite_sums = false, large = false;
    const int64_t lo = attn_max64(t.keys.lo, split * seq->span), hi = attn_min64(t.keys.hi, (split + 1) * seq->span);
    for (int64_t j0 = lo / f->BN * f->BN; j0 < hi && !attn_is_cancelled(f->cancel); j0 += f->BN) {
        const int n = (int)attn_min64(f->BN, seq->s.Sk - j0);
        struct visible_block block;
        if (!flash_visible_block(f, &t, j0, attn_min64(j0 + n, hi), &block)) continue;

        /* addresses in packed memory where the block begins: its first column of K^T, and its first row of V */
        const char *K, *V;
        int64_t ldv;
        int values;
        if (seq->packs) {
            const char *kv = f->kv + (seq->keys0 + hk * simd_round_up(seq->s.Sk, FLASH_UNIT) + j0) * f->kv_key_bytes;
            K = kv + block.c0 / SIMD_PANEL * ldk * score_es;
            V = kv + simd_b_bytes(score_type, n, ldk) + (int64_t)block.c0 * SIMD_PANEL * es;
            ldv = simd_ldb(type, n);
            values = f->kv_values[seq->packs0 + hk * attn_tiles(seq->s.Sk, f->BN) + j0 / f->BN];
        } else {
            values = pack_keys(f, seq, b, hk, j0 + block.c0, block.cols, scratch.kv, &scratch);
            K = scratch.kv;
            V = scratch.kv + simd_b_bytes(score_type, block.cols, ldk);
            ldv = simd_ldb(type, block.cols);
        }

        const bool nonfinite = values & FLASH_UNREAL, wild = wild_q || (values & FLASH_WILD);
        large |= values & FLASH_LARGE;
        if (nonfinite && !nonfinite_sums)
            memset(scratch.nonfinite_sums, 0, (size_t)(t.rows * scratch.ldo) * sizeof *scratch.nonfinite_sums);
        nonfinite_sums |= nonfinite;

        const int height = block.ranged && t.heads == 1 && type->strip > 0 ? type->strip : t.rows;
        for (int r0 = 0; r0 < t.rows; r0 += height) {
            struct flash_tile strip = t;
            struct visible_block part = block;
            float *O = scratch.O + r0 * scratch.ldo;
            if (height < t.rows) {
                strip = strip_of(f, &t, r0, (int)attn_min64(height, t.rows - r0));
                if (!flash_visible_block(f, &strip, j0, attn_min64(j0 + n, hi), &part)) {
                    if (!started) memset(O, 0, (size_t)(strip.rows * scratch.ldo) * sizeof *O);
                    continue;
                }
            }
            /* this strip (a few rows of the tile) does not need the block's first `skipped` columns */
            const int64_t skipped = part.c0 - block.c0;
            score_type->gemm(strip.rows, part.cols, D, scratch.Qa + r0 * scratch.q_lda * score_es, scratch.q_lda,
                             K + skipped / SIMD_PANEL * ldk * score_es, ldk, scratch.S, scratch.lds, false, NULL);
            const float c = flash_scores(f, &strip, j0, &part, scratch.S, scratch.lds, NULL, &scratch.limits, wild);
            if (nonfinite)
                add_nonfinite(f, &strip, j0 + part.c0, part.cols, scratch.S, scratch.lds,
                              scratch.nonfinite_sums + r0 * scratch.ldo, scratch.ldo, scratch.clean);
            if (f->dropout) flash_drop(f, &strip, j0, &part, scratch.drop, scratch.lds);
            const bool rescaled = type->softmax(strip.rows, part.cols, scratch.S, scratch.lds, c, scratch.m + r0,
                                                scratch.l + r0, scratch.rescale, scratch.P, scratch.ldp, scratch.drop,
                                                flash_least(values));
            type->gemm(strip.rows, Dv, part.cols, scratch.P, scratch.ldp, V + skipped * SIMD_PANEL * es, ldv, O,
                       scratch.ldo, started, started && rescaled ? scratch.rescale : NULL);
        }
        started = true;
    }
    if (!started) memset(scratch.O, 0, (size_t)(t.rows * scratch.ldo) * sizeof *scratch.O);
    for (int r = 0; nonfinite_sums && r < t.rows; r++)
        for (int d = 0; d < Dv; d++) scratch.O[r * scratch.ldo + d] += scratch.nonfinite_sums[r * scratch.ldo + d];
    flash_row_end_part(f, &t, split, scratch.O, scratch.ldo, scratch.m, scratch.l, scratch.inverse, large);
}

/* ---- Phase FLASH_MERGE: results over parts of the keys become one result ----------------------------------------- */

void flash_forward_merge_item(const struct flash *f, char *memory, int64_t item)
{
    const int64_t b = FLASH_FIND(f, tiles0, item);
    const struct flash_sequence *seq = &f->seq[b];
    if (seq->splits == 1) return;
    const int64_t rest = item - seq->tiles0, Dv = f->g.dims.Dv;
    const struct flash_tile t = flash_tile_of(f, b, rest / seq->tiles, rest % seq->tiles);
    struct flash_arena arena = { .base = memory };
    struct scratch scratch = scratch_of(f, &arena);
    for (int r = 0; r < t.rows; r++) {
        float *O = scratch.O + r * scratch.ldo, m = -INFINITY, l = 0;
        for (int64_t split = 0; split < seq->splits; split++) {
            m = attn_merge_top(m, f->part_m[flash_row_end_part_row(&t, split) + r]);
        }
        memset(O, 0, (size_t)Dv * sizeof *O);
        for (int64_t split = 0; split < seq->splits; split++) {
            const int64_t row = flash_row_end_part_row(&t, split) + r;
            /* the row sees no key of this span of keys */
            if (f->part_m[row] == -INFINITY && f->part_l[row] == 0) continue;
            const float weight = exp2f(f->part_m[row] - m);
            l += weight * f->part_l[row];
            attn_merge_add(O, weight, f->part_O + row * Dv, Dv);
        }
        scratch.m[r] = m;
        scratch.l[r] = l;
    }
    flash_row_end(f, &t, scratch.O, scratch.ldo, scratch.m, scratch.l, scratch.inverse, true);
}
