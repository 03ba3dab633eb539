/* decode.c: attention of a few query rows over many keys, such as one decoded token with its group of heads.
 *
 * K and V are read as they lie in memory, by dots() and axpys() of simd.h, because packing them would cost more than
 * the products. Memory bandwidth bounds the speed. Long sequences are split into spans of keys (struct flash_sequence),
 * so that all cores read; flash_forward_merge_item() merges the spans' results in order.
 *
 * In the layout bshd (batch, sequence, head, dim) the heads of a key lie side by side. Prefetchers do not follow code
 * that reads one head at a time, which halves the speed. One item (unit of parallel work) therefore computes a bundle
 * of heads together, STEP keys at a time. A head's result does not depend on the bundle. Hidden keys are never read. */
#include <math.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"

enum {
    /* number of keys whose scores are computed together; these scores stay in the L1 cache; a multiple of FLASH_UNIT */
    KEYS = 256,
    /* number of keys for which one head is computed before the next head of the bundle is; a multiple of the number of
     * keys that dots() and axpys() process together */
    STEP = 16,
};

/* One key/value head of a bundle. A bundle is a group of heads that one item (unit of parallel work) computes
 * together. */
struct head {
    struct flash_tile t;
    struct visible_block block;
    /* whether the head sees any of the KEYS keys whose scores are being computed; if not, `block` is not valid */
    bool seen;
    float *Q, *S, *O, *m, *l;
};

struct scratch {
    int64_t ldq, lds, ldo;
    struct head *heads;
    /* Q, S, O, m and l have FLASH_BUNDLE_ROWS rows, for all heads of a bundle (heads that are computed together).
     * rescale, inverse and drop have FLASH_DOT_ROWS rows, for one head at a time. */
    float *Q, *S, *O, *m, *l, *rescale, *inverse, *drop;
    char *keys; /* memory in which STEP rows of k or v are collected if they lie in several pages */
    struct flash_limits limits;
};

static struct scratch scratch_of(const struct flash *f, struct flash_arena *arena)
{
    struct scratch scratch;
    scratch.ldq = simd_ld(f->g.dims.D, 4);
    scratch.ldo = simd_ld(f->g.dims.Dv, 4);
    scratch.lds = simd_ld(KEYS, 4);
    scratch.heads = flash_take(arena, FLASH_BUNDLE_ROWS, sizeof *scratch.heads);
    scratch.Q = flash_take(arena, FLASH_BUNDLE_ROWS * scratch.ldq, 4);
    scratch.S = flash_take(arena, (FLASH_BUNDLE_ROWS + SIMD_A_ROWS) * scratch.lds, 4);
    scratch.O = flash_take(arena, FLASH_BUNDLE_ROWS * scratch.ldo, 4);
    scratch.m = flash_take(arena, FLASH_BUNDLE_ROWS, 4);
    scratch.l = flash_take(arena, FLASH_BUNDLE_ROWS, 4);
    scratch.rescale = flash_take(arena, FLASH_DOT_ROWS, 4);
    scratch.inverse = flash_take(arena, FLASH_DOT_ROWS, 4);
    scratch.drop = f->dropout ? flash_take(arena, FLASH_DOT_ROWS * scratch.lds, 4) : NULL;
    scratch.keys = f->g.page_table ? flash_take(arena, STEP, attn_max64(f->g.dims.D, f->g.dims.Dv) * 4) : NULL;
    flash_scores_take_limits(f, arena, FLASH_DOT_ROWS, KEYS, &scratch.limits);
    flash_scratch_end(f, arena);
    return scratch;
}

int64_t flash_decode_scratch(const struct flash *f)
{
    struct flash_arena arena = { 0 };
    scratch_of(f, &arena);
    return arena.used;
}

static void open_head(const struct flash *f, const struct scratch *scratch, struct head *head, int index, int64_t b,
                      int64_t hk)
{
    const attn_view *q = &f->g.view[ATTN_T_q];
    head->t = flash_tile_of(f, b, hk, 0);
    const struct flash_tile *t = &head->t;
    const int row = index * t->rows;
    head->Q = scratch->Q + row * scratch->ldq;
    head->S = scratch->S + row * scratch->lds;
    head->O = scratch->O + row * scratch->ldo;
    head->m = scratch->m + row;
    head->l = scratch->l + row;
    for (int r = 0; r < t->rows; r++) {
        f->simd->load(f->g.dims.D, flash_at(q, b, t->h + r / t->n, t->seq->s.q_start + r % t->n), q->dtype,
                      head->Q + r * scratch->ldq);
        head->m[r] = -INFINITY;
        head->l[r] = 0;
    }
    memset(head->O, 0, (size_t)(t->rows * scratch->ldo) * sizeof *head->O);
}

/* Returns the number of keys that the head sees among STEP keys, the first of which is key `from`. `from` counts from
 * the first of the KEYS keys whose scores are computed together. *first becomes the column of key `from` in
 * head->block. */
static int columns(const struct head *head, int from, int *first)
{
    const int end = (int)attn_min64(from + STEP, head->block.c0 + head->block.cols);
    *first = from - head->block.c0;
    return head->seen && *first >= 0 && end > from ? end - from : 0;
}

void flash_decode(const struct flash *f, int64_t b, int64_t rest, char *memory)
{
    const struct flash_sequence *seq = &f->seq[b];
    struct flash_arena arena = { .base = memory };
    struct scratch scratch = scratch_of(f, &arena);
    const attn_view *k = &f->g.view[ATTN_T_k], *v = &f->g.view[ATTN_T_v];
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    const int64_t bundles = attn_tiles(f->g.dims.Hk, seq->bundle), hk0 = rest % bundles * seq->bundle,
                  split = rest / bundles;
    const int heads = (int)attn_min64(seq->bundle, f->g.dims.Hk - hk0);
    assert(split < seq->splits && heads * f->g.group * seq->s.Sq <= FLASH_BUNDLE_ROWS);
    for (int n = 0; n < heads; n++) open_head(f, &scratch, &scratch.heads[n], n, b, hk0 + n);

    /* the range of keys is taken from the first head's tile: causal mask, window and lengths give all heads of the
     * bundle the same range */
    const struct flash_tile *any = &scratch.heads[0].t;
    const int64_t lo = attn_max64(any->keys.lo, split * seq->span),
                  hi = attn_min64(any->keys.hi, (split + 1) * seq->span);
    for (int64_t j0 = lo / KEYS * KEYS; j0 < hi && !attn_is_cancelled(f->cancel); j0 += KEYS) {
        const int64_t j1 = attn_min64(j0 + KEYS, hi), first = seq->s.k_start + j0;
        int at;
        for (int n = 0; n < heads; n++)
            scratch.heads[n].seen = flash_visible_block(f, &scratch.heads[n].t, j0, j1, &scratch.heads[n].block);
        for (int key = 0; key < j1 - j0; key += STEP)
            for (int n = 0; n < heads; n++) {
                const struct head *head = &scratch.heads[n];
                const int count = columns(head, key, &at);
                if (count == 0) continue;
                const struct flash_keys K = flash_keys_at(f, k, b, hk0 + n, first + key, count, STEP, D, scratch.keys);
                f->simd->dots(head->t.rows, count, D, head->Q, scratch.ldq, K.rows, k->dtype, K.stride, head->S + at,
                              scratch.lds);
            }
        for (int n = 0; n < heads; n++) {
            const struct head *head = &scratch.heads[n];
            if (!head->seen) continue;
            const bool wild = f->may_overflow &&
                              !f->simd->all_finite(head->t.rows, head->block.cols, head->S, scratch.lds);
            const float c = flash_scores(f, &head->t, j0, &head->block, head->S, scratch.lds, NULL, &scratch.limits,
                                         wild);
            if (f->dropout) flash_drop(f, &head->t, j0, &head->block, scratch.drop, scratch.lds);
            if (f->simd->f32.softmax(head->t.rows, head->block.cols, head->S, scratch.lds, c, head->m, head->l,
                                     scratch.rescale, head->S, scratch.lds, scratch.drop, SIMD_EXP2_LEAST))
                for (int r = 0; r < head->t.rows; r++)
                    for (int d = 0; d < Dv; d++) head->O[r * scratch.ldo + d] *= scratch.rescale[r];
        }
        for (int key = 0; key < j1 - j0; key += STEP)
            for (int n = 0; n < heads; n++) {
                const struct head *head = &scratch.heads[n];
                const int count = columns(head, key, &at);
                if (count == 0) continue;
                const struct flash_keys V = flash_keys_at(f, v, b, hk0 + n, first + key, count, STEP, Dv, scratch.keys);
                f->simd->axpys(head->t.rows, count, Dv, head->S + at, scratch.lds, V.rows, v->dtype, V.stride, head->O,
                               scratch.ldo);
            }
    }
    for (int n = 0; n < heads; n++) {
        const struct head *head = &scratch.heads[n];
        flash_row_end_part(f, &head->t, split, head->O, scratch.ldo, head->m, head->l, scratch.inverse, true);
    }
}
