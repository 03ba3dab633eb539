/* decode.c: a few query rows over many keys: one decoded token, its group of heads, a handful of speculated tokens.
 *
 * Such a row tile reads each key and value once and does little with them, so packing would cost more than the products. Here
 * K and V are read as they lie in memory (dots, axpys), all rows of the tile at each key; the bound is the reading:
 * (D + Dv) * bytes of an element * keys, at the memory's speed. Long sequences are split into spans of keys (struct flash_sequence), so
 * that all cores read, and merged in order by flash_merge_item().
 *
 * Hidden keys are never looked at: axpys() skips a V whose P is 0. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/flash.h"

enum { KEYS = 256 }; /* scored at a time: their scores stay in L1, a multiple of FLASH_UNIT */

struct room {
    int64_t ldq, lds, ldo;
    float *Q, *S, *O, *m, *l, *rescale, *inverse, *drop;
    struct flash_limits limits;
};

static struct room room_of(const struct flash *f, struct flash_arena *arena, int rows)
{
    struct room room;
    room.ldq = simd_ld(f->g.dims.D, 4);
    room.ldo = simd_ld(f->g.dims.Dv, 4);
    room.lds = simd_ld(KEYS, 4);
    room.Q = flash_take(arena, rows * room.ldq, 4);
    room.S = flash_take(arena, simd_round_up(rows, SIMD_A_ROWS) * room.lds, 4);
    room.O = flash_take(arena, rows * room.ldo, 4);
    room.m = flash_take(arena, rows, 4);
    room.l = flash_take(arena, rows, 4);
    room.rescale = flash_take(arena, rows, 4);
    room.inverse = flash_take(arena, rows, 4);
    room.drop = flash_take(arena, rows * room.lds, 4);
    flash_take_limits(arena, rows, KEYS, &room.limits);
    return room;
}

int64_t flash_decode_scratch(const struct flash *f)
{
    struct flash_arena arena = { 0 };
    room_of(f, &arena, f->Br);
    return arena.used;
}

void flash_decode(const struct flash *f, const struct flash_tile *t, int64_t split, char *scratch)
{
    struct flash_arena arena = { .base = scratch };
    struct room room = room_of(f, &arena, f->Br);
    const struct flash_sequence *seq = t->seq;
    const attn_view *q = &f->g.view[ATTN_T_q], *k = &f->g.view[ATTN_T_k], *v = &f->g.view[ATTN_T_v];
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    for (int r = 0; r < t->rows; r++) {
        f->simd->load(D, flash_at(q, t->b, t->h + r / t->n, seq->s.q_start + t->i0 + r % t->n), q->dtype, room.Q + r * room.ldq);
        room.m[r] = -INFINITY;
        room.l[r] = 0;
    }
    memset(room.O, 0, (size_t)(t->rows * room.ldo) * sizeof *room.O);

    const int64_t lo = attn_max64(t->keys.lo, split * seq->span), hi = attn_min64(t->keys.hi, (split + 1) * seq->span);
    for (int64_t j0 = lo / KEYS * KEYS; j0 < hi; j0 += KEYS) {
        struct flash_cell cell;
        if (!flash_cell_of(f, t, j0, attn_min64(j0 + KEYS, hi), &cell)) continue;
        const int64_t first = seq->s.k_start + j0 + cell.c0;
        f->simd->dots(t->rows, cell.cols, D, room.Q, room.ldq, flash_at(k, t->b, t->hk, first), k->dtype, k->row, room.S, room.lds);
        const float c = flash_scores(f, t, j0, &cell, room.S, room.lds, NULL, &room.limits);
        if (f->dropout) flash_drop(f, t, j0, &cell, room.drop, room.lds);
        const bool rescaled = f->simd->f32.softmax(t->rows, cell.cols, room.S, room.lds, c, room.m, room.l, room.rescale, room.S,
                                                   room.lds, f->dropout ? room.drop : NULL);
        for (int r = 0; rescaled && r < t->rows; r++)
            for (int d = 0; d < Dv; d++) room.O[r * room.ldo + d] *= room.rescale[r];
        f->simd->axpys(t->rows, cell.cols, Dv, room.S, room.lds, flash_at(v, t->b, t->hk, first), v->dtype, v->row, room.O, room.ldo);
    }
    flash_part(f, t, split, room.O, room.ldo, room.m, room.l, room.inverse);
}
