/* backward.c: gradients, computed for a chunk of keys at a time. FlashAttention-2 (arXiv:2307.08691), Algorithm 2, made
 * deterministic.
 *
 * The phase FLASH_ROWS packs Q and dO of every row tile and computes delta = rowsum(dO O) - dlse. In the phase
 * FLASH_KEYS, each item (unit of parallel work) owns a chunk of Bk keys of one key/value head. For each row tile that
 * sees the chunk, of all query heads of the group, it computes:
 *
 *     S = Q K^T, dP = dO V^T                      products
 *     P = exp2(scores - lse2), dZ = P (M dP - delta), dS = dZ (1 - tanh^2)
 *     dV += (P kept)^T dO,  dK += dS^T Q          into the chunk's own sums, stored transposed
 *     dQ += dS K                                  into the row tile's sum, which all chunks share
 *
 * M holds dropout's factors. P kept is P with 0 for the pairs that dropout drops.
 *
 * A chunk adds to dQ of a row tile only after all chunks before it, so the bits of dQ do not depend on timing. Each
 * chunk publishes how many row tiles it has finished (struct flash_progress). Threads take items in order, so a chunk
 * that others wait for is always running.
 *
 * Where bias is broadcast over batch rows or over heads of several groups, one item computes the chunk for all of these
 * heads and batch rows (a class), because they share elements of dbias.
 *
 * Q, K and dO are packed with 0 in place of NaN and infinity, so that a hidden pair still adds 0. The values of dO that
 * packing left out are added to dV through `nonfinite_sums`. finite_lse() makes sure that a row whose lse is NaN does
 * not make hidden pairs NaN. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/flash.h"

struct scratch {
    /* distances between rows, in elements: ld for matrices [rows][keys], ldt for the sums [channel][keys], dS_lda for
     * dS as the matrix A of a product A B (simd.h) */
    int64_t ld, ldt, dS_lda;
    float *S, *dP, *cap, *drop;
    char *P_b, *dS_a, *dS_b;
    char *Kt, *Kb, *Vt;
    float *dKt, *dVt;
    float *lse2; /* lse of each row of the tile in base 2 (multiplied by log2(e)) */
    /* queries in f32, [FLASH_DOT_ROWS][few_ld], for sequences with few query rows (FLASH_DOTS) */
    float *few;
    int64_t few_ld;
    struct flash_limits limits;
    float *clean; /* memory in which packing replaces NaN and infinity by 0, for FLASH_UNIT rows of f32 */
    /* scratch memory for a tile of q or dout: its rows are copied here if they belong to several heads (GQA) */
    char *gathered;
    /* array [Dv][keys]: for each key, the sums of the NaN and infinite elements of dO that packing replaced by 0, over
     * the rows that see the key */
    float *nonfinite_sums;
};

static struct scratch scratch_of(const struct flash *f, struct flash_arena *arena)
{
    const struct simd_type *t = f->type;
    const int64_t D = f->g.dims.D, Dv = f->g.dims.Dv, widest = attn_max64(D, Dv);
    const int64_t tile = simd_round_up(f->BM, SIMD_A_ROWS) * simd_ld(f->Bk, 4);
    struct scratch scratch;
    scratch.ld = scratch.ldt = simd_ld(f->Bk, 4);
    scratch.dS_lda = simd_lda(t, f->Bk);
    scratch.S = flash_take(arena, tile, 4);
    scratch.dP = flash_take(arena, tile, 4);
    scratch.P_b = flash_take(arena, simd_b_bytes(t, f->Bk, simd_ldb(t, f->BM)), 1);
    scratch.dS_b = flash_take(arena, simd_b_bytes(t, f->Bk, simd_ldb(t, f->BM)), 1);
    scratch.dS_a = flash_take(arena, simd_a_bytes(t, f->BM, scratch.dS_lda), 1);
    scratch.Kt = flash_take(arena, simd_b_bytes(t, f->Bk, simd_ldb(t, D)), 1);
    scratch.Kb = flash_take(arena, simd_b_bytes(t, D, simd_ldb(t, f->Bk)), 1);
    scratch.Vt = flash_take(arena, simd_b_bytes(t, f->Bk, simd_ldb(t, Dv)), 1);
    scratch.dKt = flash_take(arena, D * scratch.ldt, 4);
    scratch.dVt = flash_take(arena, Dv * scratch.ldt, 4);
    scratch.lse2 = flash_take(arena, f->BM, 4);
    scratch.few_ld = simd_ld(D, 4);
    scratch.few = flash_take(arena, FLASH_DOT_ROWS * scratch.few_ld, 4);
    flash_scores_take_limits(f, arena, f->BM, f->Bk, &scratch.limits);
    scratch.cap = f->g.softcap > 0 ? flash_take(arena, tile, 4) : NULL;
    scratch.drop = f->dropout ? flash_take(arena, tile, 4) : NULL;
    scratch.clean = flash_take(arena, FLASH_UNIT, widest * 4);
    scratch.gathered = flash_take(arena, f->BM, widest * 4);
    scratch.nonfinite_sums = flash_take(arena, Dv * scratch.ldt, 4);
    flash_scratch_end(f, arena);
    return scratch;
}

int64_t flash_backward_scratch(const struct flash *f)
{
    struct flash_arena arena = { 0 };
    scratch_of(f, &arena);
    return arena.used;
}

/* Returns whether dq, dk, dbias or dalibi_slopes is wanted. These outputs need dS, the gradient of the scores. */
static bool wants_dS(const struct flash *f)
{
    return f->p->dq.rank || f->p->dk.rank || f->p->dbias.rank || f->p->dalibi_slopes.rank;
}

/* ---- Phase FLASH_ROWS: values of each row that the backward needs ------------------------------------------------ */

static void zero_dbias_slice(const struct flash *f, int64_t slice)
{
    const attn_tensor *dbias = &f->p->dbias;
    const int64_t block = slice % f->dbias_blocks, each = attn_tiles(dbias->shape[2], f->dbias_blocks);
    const int64_t h = slice / f->dbias_blocks % dbias->shape[1], b = slice / f->dbias_blocks / dbias->shape[1];
    for (int64_t i = block * each; i < attn_min64((block + 1) * each, dbias->shape[2]); i++)
        memset(flash_at(&f->g.view[ATTN_T_dbias], b, h, i), 0, (size_t)dbias->shape[3] * sizeof(float));
}

/* Stores the lse of row r for the backward. `given` is the lse that the client sent: NaN, or a number of at least
 * ATTN_LSE_MOST in size. NaN stays NaN. In float32, a number of this size is too coarse to contain the logarithm of the
 * row's sum of exponentials. lse is then computed again from the scores. */
static void keep_lse_anew(const struct flash *f, const struct flash_tile *t, int r, float given)
{
    const int64_t h = t->h + r / t->n, i = t->i0 + r % t->n;
    struct flash_strange found = { .lse = { NAN, 0 }, .kind = FLASH_EXACT };
    /* the cancel flag is tested before the computation below, which may take long */
    if (attn_is_cancelled(f->cancel)) return;
    if (given == given && flash_exact_alike(f, t->b, h, i, &found) == 0)
        found.lse = flash_exact_row(f, t->b, h, i, NULL);
    flash_keep_lse(f, t->row0 + r, found);
}

/* Returns true if every row of the tile certainly sees at least two keys, by causal, window, lengths and FlashMask. It
 * does not test each row, so false means "unknown". */
static bool sees_several_keys(const struct flash *f, const struct flash_tile *t)
{
    struct visible_block block;
    if (f->p->keep_mask.rank || f->p->bias.rank || t->all.hi - t->all.lo < 2) return false;
    if (!f->mask_heads) return true;
    const int64_t own = attn_clamp64(t->i0 + attn_align(&f->g, &t->seq->s), t->all.lo, t->all.hi - 1);
    const int64_t j0 = own / FLASH_MASK_BLOCK * FLASH_MASK_BLOCK, j1 = attn_min64(j0 + FLASH_MASK_BLOCK, t->all.hi);
    return j1 - attn_max64(j0, t->all.lo) > 1 && flash_visible_block(f, t, j0, j1, &block) && !block.masked;
}

/* Marks the rows of a tile that see exactly one key. P of such a row must be 1, but the rounding of lse makes
 * exp2(score - lse) differ from 1. */
static void mark_single_rows(const struct flash *f, const struct flash_tile *t)
{
    if (sees_several_keys(f, t)) return;
    for (int r = 0; r < t->rows; r++) {
        float *lse2 = &f->lse2[t->row0 + r];
        if (!isfinite(*lse2) || !flash_exact_sees_one_key(f, t, r)) continue;
        f->strange[t->row0 + r] = (struct flash_strange){ .lse = { *lse2 * M_LN2, 0 }, .kind = FLASH_SINGLE };
        *lse2 = NAN;
    }
}

static void load_statistics(const struct flash *f, const struct flash_tile *t)
{
    const attn_view *out = &f->g.view[ATTN_T_out], *lse = &f->g.view[ATTN_T_lse];
    const attn_view *dlse = &f->g.view[ATTN_T_dlse];
    const int64_t first = t->seq->s.q_start + t->i0;
    for (int head = 0; head < t->heads; head++) {
        const int64_t h = t->h + head, row = t->row0 + (int64_t)head * t->n;
        flash_deltas(f, t->b, h, first, t->n, flash_at(out, t->b, h, first), out->dtype, out->row, f->delta + row);
        for (int r = 0; r < t->n; r++) {
            const float x = *(const float *)flash_at(lse, t->b, h, first + r);
            f->lse2[row + r] = x == -INFINITY ? INFINITY : (float)(x * M_LOG2E);
            if (!(fabsf(x) < ATTN_LSE_MOST) && x != -INFINITY) keep_lse_anew(f, t, head * t->n + r, x);
            if (x == -INFINITY) f->delta[row + r] = 0;
            if (f->p->dlse.rank) f->delta[row + r] -= *(const float *)flash_at(dlse, t->b, h, first + r);
        }
    }
}

void flash_backward_rows_item(const struct flash *f, char *memory, int64_t item)
{
    if (item >= f->tiles_all) {
        zero_dbias_slice(f, item - f->tiles_all);
        return;
    }
    const int64_t b = FLASH_FIND(f, tiles0, item), rest = item - f->seq[b].tiles0;
    const struct flash_tile t = flash_tile_of(f, b, rest / f->seq[b].tiles, rest % f->seq[b].tiles);
    struct flash_arena arena = { .base = memory };
    struct scratch scratch = scratch_of(f, &arena);
    const struct simd_type *type = f->type;
    const int64_t es = simd_element_bytes(type), lda = simd_lda(type, t.rows);
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    int64_t stride;
    const void *rows = flash_gather(&t, &f->g.view[ATTN_T_q], D, scratch.gathered, &stride);
    int found = FLASH_TAME;
    if (!type->pack_a(t.rows, D, rows, f->p->q.dtype, stride, f->Qa + t.row0 * f->q_lda * es, f->q_lda) &&
        f->may_overflow)
        found = FLASH_WILD;
    /* which unusual numbers (huge, infinite or NaN) the tile's rows of Q and dO contain: later, dS is multiplied by Q,
     * and P by dO */
    int large = FLASH_TAME;
    if (f->p->dk.rank)
        large |= flash_pack_clean_at(f, t.rows, D, rows, f->p->q.dtype, stride,
                                     f->Qat + t.row0 / FLASH_UNIT * f->q_unit_bytes, lda, scratch.clean);
    rows = flash_gather(&t, &f->g.view[ATTN_T_dout], Dv, scratch.gathered, &stride);
    if (wants_dS(f) &&
        !type->pack_a(t.rows, Dv, rows, f->p->dout.dtype, stride, f->dOa + t.row0 * f->do_lda * es, f->do_lda))
        large |= FLASH_LARGE;
    if (f->p->dv.rank) {
        const int values = flash_pack_clean_at(f, t.rows, Dv, rows, f->p->dout.dtype, stride,
                                               f->dOat + t.row0 / FLASH_UNIT * f->do_unit_bytes, lda, scratch.clean);
        found |= values & FLASH_UNREAL;
        large |= values;
    }
    if (large) found |= FLASH_LARGE;
    f->row_values[t.row0 / FLASH_UNIT] = (uint8_t)found;
    if (!f->recompute) load_statistics(f, &t);
    mark_single_rows(f, &t);
    if (f->dQ) memset(f->dQ + t.row0 * f->dq_ld, 0, (size_t)(t.rows * f->dq_ld) * sizeof *f->dQ);
}

/* ---- Phase FLASH_KEYS: the gradients, chunk of keys by chunk of keys --------------------------------------------- */

/* Waits until every chunk of keys before `chunk` has added its part to dQ of row tile number `index` (a tile of query
 * rows). All chunks whose number is lower than *below have finished all row tiles, so the function does not test them.
 * It raises *below if it can. */
static void wait_for_turn(const struct flash *f, struct flash_progress *head, int64_t chunk, int64_t index,
                          int64_t *below)
{
    for (int64_t c = *below; c < chunk; c++) {
        unsigned spins = 0;
        int64_t tile;
        while ((tile = atomic_load_explicit(&head[c].tile, memory_order_acquire)) <= index) {
            /* after a cancel, the chunk of keys that this thread waits for may never be computed */
            if (attn_is_cancelled(f->cancel)) return;
            pool_breathe(&spins);
        }
        if (tile == INT64_MAX && c == *below) *below = c + 1;
    }
}

/* Packing replaces elements of dO that are NaN or infinite by 0. This function adds these elements to `nonfinite_sums`,
 * for each key that the element's row sees. */
static void add_nonfinite(const struct flash *f, const struct flash_tile *t, const struct visible_block *block,
                          const struct scratch *scratch)
{
    const attn_view *dout = &f->g.view[ATTN_T_dout];
    const int Dv = (int)f->g.dims.Dv;
    for (int r = 0; r < t->rows; r++) {
        if (f->lse2[t->row0 + r] == INFINITY) continue;
        f->simd->load(Dv, flash_at(dout, t->b, t->h + r / t->n, t->seq->s.q_start + t->i0 + r % t->n), dout->dtype,
                      scratch->clean);
        for (int d = 0; d < Dv; d++)
            if (!isfinite(scratch->clean[d]))
                for (int c = 0; c < block->cols; c++)
                    if (scratch->S[r * scratch->ld + c] != -INFINITY)
                        scratch->nonfinite_sums[d * scratch->ldt + block->c0 + c] += scratch->clean[d];
    }
}

static void add_dbias(const struct flash *f, const struct flash_tile *t, int64_t j, int cols, const float *dZ,
                      int64_t ld)
{
    const attn_view *dbias = &f->g.view[ATTN_T_dbias];
    for (int r = 0; r < t->rows; r++) {
        float *to = (float *)flash_at(dbias, t->b, t->h + r / t->n, t->i0 + r % t->n) + j;
        for (int c = 0; c < cols; c++) to[c] += dZ[r * ld + c];
    }
}

/* A block of queries and keys adds -sum dZ |i + Sk - Sq - j| to dalibi_slopes. The function computes this sum for each
 * query head of the tile and adds it to the head's sum in `sums`. */
static void add_dslopes(const struct flash *f, const struct flash_tile *t, int64_t j, int cols, const float *dZ,
                        int64_t ld, double *sums)
{
    for (int r = 0; r < t->rows; r++) {
        const int64_t distance = t->i0 + r % t->n + t->seq->s.Sk - t->seq->s.Sq - j;
        double sum = 0;
        for (int c = 0; c < cols; c++) sum += dZ[r * ld + c] * fabs((double)(distance - c));
        sums[(t->h + r / t->n) % f->g.group * f->chunks] -= sum;
    }
}

static void zero_rows(const struct flash *f, attn_tensor_id id, int64_t b, int64_t hk, int64_t first, int64_t rows,
                      int64_t cols)
{
    const attn_view *view = &f->g.view[id];
    for (int64_t j = first; j < first + rows; j++)
        memset(flash_at(view, b, hk, j), 0, (size_t)cols * attn_dtype_bytes(view->dtype));
}

/* Prepares S for a row that sees only one key, so that the key's P is exactly 1. If the row's lse equals the key's
 * score up to rounding, the function sets the score in S to 0. It returns 0 as the row's lse2 (lse in base 2). If lse
 * and score differ by more, the function first computes the score again in double, because the terms of the dot product
 * may have cancelled. */
static float single_score(const struct flash *f, const struct flash_tile *t, int r, int64_t j, int cols,
                          struct flash_lse lse, float c, float *S, float *cap)
{
    const float lse2 = (float)(lse.top * M_LOG2E), slack = ATTN_LSE_SLACK * fabsf(lse2);
    int x = 0;
    while (x < cols && S[x] == -INFINITY) x++;
    if (x == cols) return lse2; /* the only key that the row sees is not in this block of keys */
    if (!(fabsf(c * S[x] - lse2) <= slack)) {
        if (c == 0) return lse2;
        flash_exact_scores(f, t, r, j, cols, lse, c * M_LN2, S, cap);
        if (!(fabsf(c * S[x]) <= slack)) return 0;
    }
    S[x] = 0;
    return 0;
}

/* Computes scores S of a row whose P cannot be computed in float32; the row's lse is in f->strange. Returns the lse2
 * (lse in base 2) that gradient() must use with these scores. If lse is NaN, the function makes the visible scores NaN
 * and returns 0, because an lse2 of NaN would make hidden pairs NaN too. */
static float strange_scores(const struct flash *f, const struct flash_tile *t, int r, int64_t j,
                            const struct visible_block *block, float c, float *S, float *cap)
{
    const struct flash_strange *strange = &f->strange[t->row0 + r];
    const struct flash_lse lse = strange->lse;
    switch (strange->kind) {
    case FLASH_ALIKE:
        for (int x = 0; x < block->cols; x++) S[x] = S[x] == -INFINITY ? -INFINITY : 0;
        return (float)((lse.top - strange->z + lse.rest) * M_LOG2E);
    case FLASH_SINGLE: return single_score(f, t, r, j, block->cols, lse, c, S, cap);
    case FLASH_EXACT: break;
    }
    if (lse.top == lse.top) flash_exact_scores(f, t, r, j, block->cols, lse, c * M_LN2, S, cap);
    else
        for (int x = 0; x < block->cols; x++)
            if (S[x] != -INFINITY) S[x] = NAN;
    return 0;
}

/* Returns the address of the lse2 (lse in base 2) of a tile's rows for gradient(). If f->lse2 has no NaN for these
 * rows, this is an address in f->lse2. Otherwise it is a copy in `scratch`: the function computes lse2 from f->strange
 * for each row with NaN, and replaces the row's scores in S. c is the factor that flash_scores() returned for the
 * block. */
static const float *finite_lse(const struct flash *f, const struct flash_tile *t, int64_t j,
                               const struct visible_block *block, float c, const struct scratch *scratch)
{
    const float *lse2 = f->lse2 + t->row0;
    bool any = false;
    for (int r = 0; r < t->rows; r++) any |= lse2[r] != lse2[r];
    if (!any) return lse2;
    for (int r = 0; r < t->rows; r++) {
        const bool marked = lse2[r] != lse2[r];
        scratch->lse2[r] = !marked ? lse2[r]
                                   : strange_scores(f, t, r, j, block, c, scratch->S + r * scratch->ld,
                                                    scratch->cap ? scratch->cap + r * scratch->ld : NULL);
    }
    return scratch->lse2;
}

/* A chunk: up to f->Bk keys of one key/value head, from key j0 of its sequence on. */
struct chunk {
    int64_t b, hk, index, j0;
    int64_t first; /* index of the chunk's first key along the axis of keys of k and v */
    int n;         /* number of the chunk's keys that exist */
    /* whether the chunk's keys have been packed; they are packed when the first query that sees one of them is found */
    bool packed;
    bool wild;  /* true: some keys of the chunk are infinite, NaN or so large that products with them may overflow */
    int values; /* which unusual numbers (huge, NaN) K and V of the chunk contain: bits of enum flash_values */
    bool nonfinite_sums; /* true: scratch->nonfinite_sums (the NaN and infinite elements of dO) must be added to dv */
};

static void pack_chunk(const struct flash *f, struct chunk *at, const struct scratch *scratch)
{
    const struct simd_type *type = f->type;
    const attn_view *k = &f->g.view[ATTN_T_k], *v = &f->g.view[ATTN_T_v];
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    const void *k_rows = flash_at(k, at->b, at->hk, at->first);
    at->packed = true;
    if (f->seq[at->b].path == FLASH_TILES)
        at->wild = !type->pack_bt(at->n, D, k_rows, k->dtype, k->row, scratch->Kt, simd_ldb(type, D)) &&
                   f->may_overflow;
    at->values = FLASH_TAME;
    if (f->dQ)
        at->values |= flash_pack_clean_b(f, type, at->n, D, k_rows, k->dtype, k->row, scratch->Kb,
                                         simd_ldb(type, at->n), scratch->clean);
    if (wants_dS(f) && !type->pack_bt(at->n, Dv, flash_at(v, at->b, at->hk, at->first), v->dtype, v->row, scratch->Vt,
                                      simd_ldb(type, Dv)))
        at->values |= FLASH_LARGE;
    memset(scratch->dKt, 0, (size_t)(D * scratch->ldt) * sizeof *scratch->dKt);
    memset(scratch->dVt, 0, (size_t)(Dv * scratch->ldt) * sizeof *scratch->dVt);
}

/* Computes S = Q K^T of a tile of query rows and a block of keys. Each product is summed in the same order as in the
 * forward, because the forward's lse is subtracted from these scores. Returns true if some products may be infinite or
 * NaN although the scores are finite. */
static bool multiply_scores(const struct flash *f, const struct chunk *at, const struct flash_tile *t,
                            const struct visible_block *block, const struct scratch *scratch)
{
    const struct simd_type *type = f->type;
    const attn_view *q = &f->g.view[ATTN_T_q], *k = &f->g.view[ATTN_T_k];
    const int D = (int)f->g.dims.D;
    const int64_t es = simd_element_bytes(type), ldk = simd_ldb(type, D);
    if (t->seq->path == FLASH_TILES) {
        type->gemm(t->rows, block->cols, D, f->Qa + t->row0 * f->q_lda * es, f->q_lda,
                   scratch->Kt + block->c0 / SIMD_PANEL * ldk * es, ldk, scratch->S, scratch->ld, false, NULL);
        return at->wild || (f->row_values[t->row0 / FLASH_UNIT] & FLASH_WILD);
    }
    for (int r = 0; r < t->rows; r++)
        f->simd->load(D, flash_at(q, t->b, t->h + r / t->n, t->seq->s.q_start + r % t->n), q->dtype,
                      scratch->few + r * scratch->few_ld);
    f->simd->dots(t->rows, block->cols, D, scratch->few, scratch->few_ld,
                  flash_at(k, at->b, at->hk, at->first + block->c0), k->dtype, k->row, scratch->S, scratch->ld);
    return f->may_overflow && !f->simd->all_finite(t->rows, block->cols, scratch->S, scratch->ld);
}

/* Stores dk and dv of a chunk of keys. Keys that no query sees, and keys past seqlens_k, get gradients of 0. */
static void store_chunk(const struct flash *f, const struct chunk *at, const struct scratch *scratch)
{
    const attn_view *dk = &f->g.view[ATTN_T_dk], *dv = &f->g.view[ATTN_T_dv];
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    const int64_t length = f->g.dims.packed ? f->seq[at->b].s.Sk : f->g.dims.Sk;
    const int64_t rows = attn_min64(f->Bk, length - at->j0), live = at->packed ? at->n : 0;
    if (f->p->dk.rank) zero_rows(f, ATTN_T_dk, at->b, at->hk, at->first + live, rows - live, D);
    if (f->p->dv.rank) zero_rows(f, ATTN_T_dv, at->b, at->hk, at->first + live, rows - live, Dv);
    if (!at->packed) return;
    for (int d = 0; at->nonfinite_sums && d < Dv; d++)
        for (int c = 0; c < at->n; c++)
            scratch->dVt[d * scratch->ldt + c] += scratch->nonfinite_sums[d * scratch->ldt + c];
    if (f->p->dk.rank)
        f->simd->store_t(at->n, D, scratch->dKt, scratch->ldt, (float)f->g.scale, NULL,
                         flash_at(dk, at->b, at->hk, at->first), dk->dtype, dk->row);
    if (f->p->dv.rank)
        f->simd->store_t(at->n, Dv, scratch->dVt, scratch->ldt, f->drop_scale, NULL,
                         flash_at(dv, at->b, at->hk, at->first), dv->dtype, dv->row);
}

static void compute_chunk(const struct flash *f, int64_t b, int64_t hk, int64_t chunk, char *memory)
{
    const struct flash_sequence *seq = &f->seq[b];
    const struct simd_type *type = f->type;
    const int D = (int)f->g.dims.D, Dv = (int)f->g.dims.Dv;
    const bool dS = wants_dS(f), dZ = f->p->dbias.rank || f->p->dalibi_slopes.rank;
    const int64_t es = simd_element_bytes(type), j0 = chunk * f->Bk;
    const int64_t chunks = attn_tiles(f->g.dims.packed ? seq->s.Sk : f->g.dims.Sk, f->Bk);
    struct flash_progress *head = f->progress + seq->chunks0 + hk * chunks;
    double *slopes = f->slope_parts ? f->slope_parts + (b * f->g.dims.H + hk * f->g.group) * f->chunks + chunk : NULL;
    struct flash_arena arena = { .base = memory };
    struct scratch scratch = scratch_of(f, &arena);

    for (int64_t g = 0; slopes && g < f->g.group; g++) slopes[g * f->chunks] = 0;
    struct chunk at = { .b = b,
                        .hk = hk,
                        .index = chunk,
                        .j0 = j0,
                        .first = seq->s.k_start + j0,
                        .n = (int)attn_clamp64(seq->s.Sk - j0, 0, f->Bk) };
    const int n = at.n;
    const int64_t ldkb = simd_ldb(type, n), ldv = simd_ldb(type, Dv);
    int64_t below = 0, published = 0;
    for (int64_t index = 0; n > 0 && index < seq->tiles && !attn_is_cancelled(f->cancel); index++) {
        const struct flash_tile t = flash_tile_of(f, b, hk, index);
        struct visible_block block;
        if (!flash_visible_block(f, &t, j0, j0 + n, &block)) continue;
        /* the chunk's keys are packed for the first tile of queries that sees the chunk; if no query sees it, they are
         * never packed */
        if (!at.packed) pack_chunk(f, &at, &scratch);
        /* No query of the row tiles before `index` sees this chunk of keys. Other chunks that add to dQ of these tiles
         * need not wait for this chunk. */
        if (f->dQ && index > published) {
            atomic_store_explicit(&head[chunk].tile, index, memory_order_release);
            published = index;
        }

        const int64_t ldb = simd_ldb(type, t.rows), lda = simd_lda(type, t.rows);
        const bool wild = multiply_scores(f, &at, &t, &block, &scratch);
        if (dS)
            type->gemm(t.rows, block.cols, Dv, f->dOa + t.row0 * f->do_lda * es, f->do_lda,
                       scratch.Vt + block.c0 / SIMD_PANEL * ldv * es, ldv, scratch.dP, scratch.ld, false, NULL);
        const float c = flash_scores(f, &t, j0, &block, scratch.S, scratch.ld, scratch.cap, &scratch.limits, wild);
        if (f->dropout) flash_drop(f, &t, j0, &block, scratch.drop, scratch.ld);
        if (f->row_values[t.row0 / FLASH_UNIT] & FLASH_UNREAL) {
            if (!at.nonfinite_sums)
                memset(scratch.nonfinite_sums, 0, (size_t)(Dv * scratch.ldt) * sizeof *scratch.nonfinite_sums);
            at.nonfinite_sums = true;
            add_nonfinite(f, &t, &block, &scratch);
        }
        const struct simd_gradient gradient = {
            .rows = t.rows,
            .cols = block.cols,
            .ld = scratch.ld,
            .S = scratch.S,
            .dP = dS ? scratch.dP : scratch.S,
            .c = c,
            .least = flash_least(at.values | f->row_values[t.row0 / FLASH_UNIT]),
            .lse2 = finite_lse(f, &t, j0 + block.c0, &block, c, &scratch),
            .delta = f->delta + t.row0,
            .cap = scratch.cap,
            .drop = scratch.drop,
            .drop_scale = f->drop_scale,
            .P_b = f->p->dv.rank ? scratch.P_b : NULL,
            .P_ldb = ldb,
            .dS_a = f->dQ ? scratch.dS_a : NULL,
            .dS_lda = scratch.dS_lda,
            .dS_b = f->p->dk.rank ? scratch.dS_b : NULL,
            .dS_ldb = ldb,
            .dZ = dZ ? scratch.dP : NULL,
        };
        type->gradient(&gradient);
        if (f->p->dv.rank)
            type->gemm(Dv, block.cols, t.rows, f->dOat + t.row0 / FLASH_UNIT * f->do_unit_bytes, lda, scratch.P_b, ldb,
                       scratch.dVt + block.c0, scratch.ldt, true, NULL);
        if (f->p->dk.rank)
            type->gemm(D, block.cols, t.rows, f->Qat + t.row0 / FLASH_UNIT * f->q_unit_bytes, lda, scratch.dS_b, ldb,
                       scratch.dKt + block.c0, scratch.ldt, true, NULL);
        if (f->p->dbias.rank) add_dbias(f, &t, j0 + block.c0, block.cols, scratch.dP, scratch.ld);
        if (slopes) add_dslopes(f, &t, j0 + block.c0, block.cols, scratch.dP, scratch.ld, slopes);
        if (f->dQ) {
            wait_for_turn(f, head, chunk, index, &below);
            type->gemm(t.rows, D, block.cols, scratch.dS_a, scratch.dS_lda,
                       scratch.Kb + (int64_t)block.c0 * SIMD_PANEL * es, ldkb, f->dQ + t.row0 * f->dq_ld, f->dq_ld,
                       true, NULL);
            published = index + 1;
            atomic_store_explicit(&head[chunk].tile, published, memory_order_release);
        }
    }
    if (f->dQ) atomic_store_explicit(&head[chunk].tile, INT64_MAX, memory_order_release);
    store_chunk(f, &at, &scratch);
}

void flash_backward_keys_item(const struct flash *f, char *memory, int64_t item)
{
    if (f->dbias_classes == 0) {
        /* Items (units of parallel work) are ordered by chunk, then by head. Threads then mostly compute different
         * heads and need not wait for each other. */
        const int64_t b = FLASH_FIND(f, chunks0, item), rest = item - f->seq[b].chunks0;
        compute_chunk(f, b, rest % f->g.dims.Hk, rest / f->g.dims.Hk, memory);
        return;
    }
    const bool all_heads = f->p->bias.shape[1] != f->g.dims.H, all_rows = f->p->bias.shape[0] != f->B;
    const int64_t chunk = item / f->dbias_classes, class = item % f->dbias_classes;
    const int64_t heads = all_heads ? 1 : f->g.dims.Hk;
    const int64_t b0 = all_rows ? 0 : class / heads, b1 = all_rows ? f->B : b0 + 1;
    const int64_t h0 = all_heads ? 0 : class % heads, h1 = all_heads ? f->g.dims.Hk : h0 + 1;
    for (int64_t b = b0; b < b1; b++)
        for (int64_t hk = h0; hk < h1; hk++) compute_chunk(f, b, hk, chunk, memory);
}

/* ---- Phase FLASH_FINISH: dsinks and dalibi_slopes ---------------------------------------------------------------- */

static double dsink_of(const struct flash *f, int64_t h)
{
    const double sink = *(const float *)flash_at(&f->g.view[ATTN_T_sinks], 0, h, 0);
    double sum = 0;
    if (sink == -INFINITY) return 0;
    for (int64_t b = 0; b < f->B; b++)
        for (int64_t i = 0; i < f->seq[b].s.Sq; i++) {
            const int64_t row = flash_row_of(f, b, h, i);
            const float lse2 = f->lse2[row];
            const struct flash_lse *exact = &f->strange[row].lse;
            if (lse2 != lse2) sum -= exp(sink - exact->top - exact->rest) * f->delta[row];
            else if (lse2 != INFINITY) sum -= exp2(sink * M_LOG2E - lse2) * f->delta[row];
        }
    return sum;
}

static double dslope_of(const struct flash *f, int64_t b, int64_t h)
{
    double sum = 0;
    for (int64_t chunk = 0; chunk < attn_tiles(f->seq[b].s.Sk, f->Bk); chunk++)
        sum += f->slope_parts[(b * f->g.dims.H + h) * f->chunks + chunk];
    return sum;
}

void flash_backward_finish_item(const struct flash *f, char *memory, int64_t item)
{
    (void)memory;
    const int64_t tiles = f->dQ ? f->tiles_all : 0;
    if (item < tiles) {
        const int64_t b = FLASH_FIND(f, tiles0, item), rest = item - f->seq[b].tiles0;
        const struct flash_tile t = flash_tile_of(f, b, rest / f->seq[b].tiles, rest % f->seq[b].tiles);
        const attn_view *dq = &f->g.view[ATTN_T_dq];
        for (int head = 0; head < t.heads; head++)
            f->simd->store(t.n, (int)f->g.dims.D, f->dQ + (t.row0 + (int64_t)head * t.n) * f->dq_ld, f->dq_ld,
                           (float)f->g.scale, NULL, flash_at(dq, b, t.h + head, t.seq->s.q_start + t.i0), dq->dtype,
                           dq->row);
        return;
    }
    const int64_t h = item - tiles;
    const attn_view *dsinks = &f->g.view[ATTN_T_dsinks], *dslopes = &f->g.view[ATTN_T_dalibi_slopes];
    if (f->p->dsinks.rank) *(float *)flash_at(dsinks, 0, h, 0) = (float)dsink_of(f, h);
    if (f->p->dalibi_slopes.rank == 1) {
        double sum = 0;
        for (int64_t b = 0; b < f->B; b++) sum += dslope_of(f, b, h);
        *(float *)flash_at(dslopes, 0, h, 0) = (float)sum;
    } else if (f->p->dalibi_slopes.rank == 2) {
        for (int64_t b = 0; b < f->B; b++) *(float *)flash_at(dslopes, b, h, 0) = (float)dslope_of(f, b, h);
    }
}
