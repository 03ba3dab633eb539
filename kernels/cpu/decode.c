/* decode.c: a few query rows over many keys: one decoded token, its group of heads, a handful of speculated tokens.
 *
 * Such a row tile reads each key and value once and does little with them, so packing would cost more than the
 * products. Here K and V are read as they lie in memory (dots, axpys), all rows of the tile at each key; the bound
 * is the reading: (D + Dv) * bytes of an element * keys, at the memory's speed. Long sequences are split into spans
 * of keys (struct flash_sequence), so that all cores read, and merged in order by flash_merge_item().
 *
 * In layout bshd the heads of a key lie side by side. Read head by head, memory is read in pieces of D elements
 * with gaps between them, which no prefetcher follows: half the speed. So an item does a bundle of heads together:
 * it walks over KEYS keys in steps of STEP, and at each step over the heads. What is computed for each head, and in
 * which order, does not depend on the bundle.
 *
 * Hidden keys are never looked at: axpys() skips a V whose P is 0. */
#include <math.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"

enum {
    KEYS = 256, /* scored at a time: their scores stay in L1; a multiple of FLASH_UNIT */
    STEP =
        16, /* keys of one head before it is the next head's turn; a multiple of what dots() and axpys() do at a time */
};

/* One head of the bundle. */
struct lane {
    struct flash_tile t;
    struct flash_cell cell;
    bool seen; /* the cell exists */
    float *Q, *S, *O, *m, *l;
};

struct room {
    int64_t ldq, lds, ldo;
    struct lane *lanes;
    float *Q, *S, *O, *m, *l, *rescale, *inverse,
        *drop; /* the first four [FLASH_BUNDLE_ROWS][ld...], shared out to the lanes */
    struct flash_limits limits;
};

static struct room room_of(const struct flash *f, struct flash_arena *arena)
{
    struct room room;
    room.ldq = simd_ld(f->g.dims.D, 4);
    room.ldo = simd_ld(f->g.dims.Dv, 4);
    room.lds = simd_ld(KEYS, 4);
    room.lanes = flash_take(arena, FLASH_BUNDLE_ROWS, sizeof *room.lanes);
    room.Q = flash_take(arena, FLASH_BUNDLE_ROWS * room.ldq, 4);
    room.S = flash_take(arena, (FLASH_BUNDLE_ROWS + SIMD_A_ROWS) * room.lds, 4);
    room.O = flash_take(arena, FLASH_BUNDLE_ROWS * room.ldo, 4);
    room.m = flash_take(arena, FLASH_BUNDLE_ROWS, 4);
    room.l = flash_take(arena, FLASH_BUNDLE_ROWS, 4);
    room.rescale = flash_take(arena, FLASH_DOT_ROWS, 4);
    room.inverse = flash_take(arena, FLASH_DOT_ROWS, 4);
    room.drop = f->dropout ? flash_take(arena, FLASH_DOT_ROWS * room.lds, 4) : NULL;
    flash_take_limits(arena, FLASH_DOT_ROWS, KEYS, &room.limits);
    return room;
}

int64_t flash_decode_scratch(const struct flash *f)
{
    struct flash_arena arena = { 0 };
    room_of(f, &arena);
    return arena.used;
}

static void open_lane(const struct flash *f, const struct room *room, struct lane *lane, int index, int64_t b,
                      int64_t hk)
{
    const attn_view *q = &f->g.view[ATTN_T_q];
    lane->t = flash_tile_of(f, b, hk, 0);
    const struct flash_tile *t = &lane->t;
    const int row = index * t->rows;
    lane->Q = room->Q + row * room->ldq;
    lane->S = room->S + row * room->lds;
    lane->O = room->O + row * room->ldo;
    lane->m = room->m + row;
    lane->l = room->l + row;
    for (int r = 0; r < t->rows; r++) {
        f->simd->load(f->g.dims.D, flash_at(q, b, t->h + r / t->n, t->seq->s.q_start + r % t->n), q->dtype,
                      lane->Q + r * room->ldq);
        lane->m[r] = -INFINITY;
        lane->l[r] = 0;
    }
    memset(lane->O, 0, (size_t)(t->rows * room->ldo) * sizeof *lane->O);
}

/* Keys [from, from + STEP) of the block, as far as the lane's cell goes: their first column in the cell and their
 * number. */
static int columns(const struct lane *lane, int from, int *first)
{
    const int end = (int)attn_min64(from + STEP, lane->cell.c0 + lane->cell.cols);
    *first = from - lane->cell.c0;
    return lane->seen && *first >= 0 && end > from ? end - from : 0;
}

void flash_decode(const struct flash *f, int64_t b, int64_t rest, char *scratch)
{
    const struct flash_sequence *seq = &f->seq[b];
    struct flash_arena arena = { .base = scratch };
    struct room room = room_of(f, &arena);
    const attn_view *k = &f->g.view[ATTN_T_k], *v = &f->g.view[ATTN_T_v];
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    const int64_t bundles = attn_tiles(f->g.dims.Hk, seq->bundle), hk0 = rest % bundles * seq->bundle,
                  split = rest / bundles;
    const int lanes = (int)attn_min64(seq->bundle, f->g.dims.Hk - hk0);
    for (int n = 0; n < lanes; n++) open_lane(f, &room, &room.lanes[n], n, b, hk0 + n);

    const struct flash_tile *any = &room.lanes[0].t; /* causal, window and lengths are the same for all heads */
    const int64_t lo = attn_max64(any->keys.lo, split * seq->span),
                  hi = attn_min64(any->keys.hi, (split + 1) * seq->span);
    for (int64_t j0 = lo / KEYS * KEYS; j0 < hi && !attn_is_cancelled(f->cancel); j0 += KEYS) {
        const int64_t j1 = attn_min64(j0 + KEYS, hi), first = seq->s.k_start + j0;
        int at;
        for (int n = 0; n < lanes; n++)
            room.lanes[n].seen = flash_cell_of(f, &room.lanes[n].t, j0, j1, &room.lanes[n].cell);
        for (int key = 0; key < j1 - j0; key += STEP)
            for (int n = 0; n < lanes; n++) {
                const struct lane *lane = &room.lanes[n];
                const int count = columns(lane, key, &at);
                if (count > 0)
                    f->simd->dots(lane->t.rows, count, D, lane->Q, room.ldq, flash_at(k, b, hk0 + n, first + key),
                                  k->dtype, k->row, lane->S + at, room.lds);
            }
        for (int n = 0; n < lanes; n++) {
            const struct lane *lane = &room.lanes[n];
            if (!lane->seen) continue;
            const float c = flash_scores(f, &lane->t, j0, &lane->cell, lane->S, room.lds, NULL, &room.limits);
            if (f->dropout) flash_drop(f, &lane->t, j0, &lane->cell, room.drop, room.lds);
            if (f->simd->f32.softmax(lane->t.rows, lane->cell.cols, lane->S, room.lds, c, lane->m, lane->l,
                                     room.rescale, lane->S, room.lds, room.drop))
                for (int r = 0; r < lane->t.rows; r++)
                    for (int d = 0; d < Dv; d++) lane->O[r * room.ldo + d] *= room.rescale[r];
        }
        for (int key = 0; key < j1 - j0; key += STEP)
            for (int n = 0; n < lanes; n++) {
                const struct lane *lane = &room.lanes[n];
                const int count = columns(lane, key, &at);
                if (count > 0)
                    f->simd->axpys(lane->t.rows, count, Dv, lane->S + at, room.lds,
                                   flash_at(v, b, hk0 + n, first + key), v->dtype, v->row, lane->O, room.ldo);
            }
    }
    for (int n = 0; n < lanes; n++) {
        const struct lane *lane = &room.lanes[n];
        flash_part(f, &lane->t, split, lane->O, room.ldo, lane->m, lane->l, room.inverse, true);
    }
}
