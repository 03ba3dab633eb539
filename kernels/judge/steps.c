/* steps.c: the steps of a pass. A pass goes over the tiles of queries of whole key/value heads, or over units (tiles of
 * queries and tiles of keys).
 *
 * dk and dv of a tile of keys are sums over all queries that see these keys. The weights P of a query depend on its
 * lse, and dS depends on its delta, the sum of dout * out. There are three cases:
 *
 * If the mistake that the pass computes does not change out and lse, both are taken from the truth (float64 results).
 * Only the scores of the tile's own keys are then computed.
 *
 * If the mistake changes out or lse, the scores of all keys are computed for each query. This is as much work as a
 * forward of all query heads that read these keys.
 *
 * An emulated kernel (one whose roundings are imitated) gets out and lse of the truth, rounded to the dtypes in which a
 * kernel stores them. In a real kernel, a score and lse have nearly the same float32 error, so most of it cancels in
 * score - lse. The lse of the truth has no such error. In a float32 problem the emulated dv may therefore have errors
 * up to about three times those of an emulation of the whole head. */
#include <string.h>

#include "kernels/judge/emulate.h"
#include "kernels/judge/state.h"

/* Adds to dk and dv of a tile of keys what the queries of tile t contribute. The keys must have been loaded. */
static void add_queries(struct judge *j, const struct key_tile *keys, const struct tile *t)
{
    struct pass *const pass = &j->pass;
    struct frame *const f = pass->frame;
    struct compute *const c = &f->c;
    const int64_t h = variation_member_of(&pass->v, t->hk, t->n);
    const struct compute_rows rows = { t->b, h, t->first, t->count };
    const struct compute_sums none = { 0 };
    pass_take_keys(j, t->b, variation_head_of(&pass->v, h));
    const int64_t lo = attn_min64(keys->first, c->s.Sk), hi = attn_min64(keys->first + keys->count, c->s.Sk);
    if (pass->inner == 0) {
        memset(c->dK + lo * c->D, 0, (size_t)((hi - lo) * c->D) * sizeof *c->dK);
        memset(c->dV + lo * c->Dv, 0, (size_t)((hi - lo) * c->Dv) * sizeof *c->dV);
    }
    if (lo == hi) return;
    c->lo = lo, c->hi = hi;
    if (!compute_sees(c, &pass->v, &rows)) return;
    if (pass->emulation >= 0) {
        emulate_tile_scores(c, &pass->v, &rows, f->scratch);
        pass_take_right_forward(j, &rows, pass_kept_row(f, t, h));
        emulate_round_rows(c, rows.count);
        emulate_gradients(c, &pass->v, &rows, &none, COMPUTE_DK_DV, f->scratch);
        return;
    }
    if (pass->right_forward) {
        compute_tile_scores(c, &pass->v, &rows);
        pass_take_right_forward(j, &rows, pass_kept_row(f, t, h));
    } else {
        c->lo = 0, c->hi = c->s.Sk;
        compute_rows(c, &pass->v, &rows);
        c->lo = lo, c->hi = hi;
    }
    compute_gradients(c, &pass->v, &rows, &none, COMPUTE_DK_DV);
}

/* Computes the next tile of queries for a tile of keys. The order of the tiles of queries depends on the kernel whose
 * roundings are imitated. Returns true when all tiles of queries are done. */
static bool step_keys(struct judge *j, const struct key_tile *keys)
{
    struct pass *const pass = &j->pass;
    const bool backwards = pass->emulation >= 0 && pass->emulation % 2;
    if (keys->tiles == 0) {
        pass_settle_unread(j, keys);
        return true;
    }
    const int64_t n = backwards ? keys->tiles - 1 - pass->inner : pass->inner;
    add_queries(j, keys, &pass->frame->tiles[keys->tile + n]);
    if (++pass->inner < keys->tiles) return false;
    pass->inner = 0;
    pass_settle_keys(j, keys->b, keys->hk, keys->first, keys->count, keys->line);
    return true;
}

/* Does the next step of the work of a unit (a tile of queries or of keys). Returns true if the unit is done. */
static bool step_unit(struct judge *j, int64_t unit)
{
    struct pass *const pass = &j->pass;
    struct frame *const f = pass->frame;
    const bool of_keys = unit >= f->count;
    if (pass->converts) {
        if (of_keys) pass_convert_keys(j, unit - f->count);
        else pass_convert_rows(j, unit);
        return true;
    }
    if (of_keys) return step_keys(j, &f->key_tiles[unit - f->count]);
    pass_compute_tile(j, &f->tiles[unit], COMPUTE_DQ);
    return true;
}

/* Stores, compares or converts dk and dv of a tile of keys that no query reads, in a pass over all tiles. */
static void step_unread(struct judge *j, int64_t key_tile)
{
    struct pass *const pass = &j->pass;
    if (pass->converts) pass_convert_keys(j, key_tile);
    /* if the mistake mixes sequences (one_sequence), pass_settle_head() has handled this tile already */
    else if (!pass->v.one_sequence) pass_settle_unread(j, &pass->frame->key_tiles[key_tile]);
}

/* Does the work of tile n, in a pass that goes over tiles of queries. After the last tile of a key/value head, it also
 * stores or compares the head's dk and dv. */
static void step_tile(struct judge *j, int64_t n)
{
    struct pass *const pass = &j->pass;
    const struct frame *const f = pass->frame;
    const struct tile *const t = &f->tiles[n];
    const bool more = n + 1 < f->count, backward = f->p.op == ATTN_OP_BACKWARD;
    const bool same_keys = more && t[1].hk == t->hk && (t[1].b == t->b || pass->v.one_sequence);
    const bool same_head = more && t[1].hk == t->hk && t[1].b == t->b;
    if (!pass->converts) {
        pass_compute_tile(j, t, COMPUTE_ALL);
        if (backward && !same_keys) pass_settle_head(j, t);
        return;
    }
    pass_convert_rows(j, n);
    if (same_head) return;
    for (int64_t k = t->keys; k < f->key_count && f->key_tiles[k].hk == t->hk && f->key_tiles[k].b == t->b; k++)
        pass_convert_keys(j, k);
}

bool pass_step(struct judge *j)
{
    struct pass *const pass = &j->pass;
    if (pass->at < pass->count) {
        const int64_t n = pass->list ? pass->list[pass->at] : pass->at;
        const struct frame *const f = pass->frame;
        if (pass->by_units) pass->at += step_unit(j, n);
        else if (n < f->count) step_tile(j, n), pass->at++;
        else step_unread(j, f->read_count + n - f->count), pass->at++;
    }
    if (pass->at < pass->count) return false;
    pass_settle_sums(j);
    j->in_pass = false;
    return true;
}
