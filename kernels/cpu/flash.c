/* flash.c: code that all phases use: tiles of a problem, dropout, packing of rows for matrix products. */
#include "kernels/cpu/flash.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"

/* ---- Scratch memory ---------------------------------------------------------------------------------------------- */

void *flash_take(struct flash_arena *arena, int64_t count, int64_t bytes)
{
    int64_t size, start = arena->used;
    if (__builtin_mul_overflow(count, bytes, &size) || __builtin_add_overflow(size, 63, &size) ||
        __builtin_add_overflow(start, size & ~INT64_C(63), &arena->used)) {
        arena->used = INT64_MAX;
        return NULL;
    }
    return arena->base ? arena->base + start : NULL;
}

/* ---- Where a tile lies, and which keys it sees ------------------------------------------------------------------- */

int64_t flash_find(const struct flash *f, size_t field, int64_t item)
{
    int64_t low = 0, high = f->B;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        int64_t first;
        memcpy(&first, (const char *)&f->seq[middle] + field, sizeof first);
        if (first <= item) low = middle;
        else high = middle;
    }
    assert(f->B > 0 && item >= 0);
    return low;
}

struct flash_tile flash_tile_of(const struct flash *f, int64_t b, int64_t hk, int64_t index)
{
    const struct flash_sequence *seq = &f->seq[b];
    struct flash_tile t = { .seq = seq, .b = b, .hk = hk, .index = index };
    assert(hk >= 0 && hk < f->g.dims.Hk && index >= 0 && index < seq->tiles);
    if (seq->heads == 1 && seq->s.Sq > 0) {
        const int64_t blocks = attn_tiles(seq->s.Sq, f->BM), g = index / blocks;
        t.h = hk * f->g.group + g;
        t.i0 = index % blocks * f->BM;
        t.heads = 1;
        t.n = (int)attn_min64(f->BM, seq->s.Sq - t.i0);
        t.row0 = g * simd_round_up(seq->s.Sq, FLASH_UNIT) + t.i0;
    } else {
        const int64_t g = index * seq->heads;
        t.h = hk * f->g.group + g;
        t.heads = (int)attn_min64(seq->heads, f->g.group - g);
        t.n = (int)seq->s.Sq;
        t.row0 = index * simd_round_up(seq->heads * seq->s.Sq, FLASH_UNIT);
    }
    t.row0 += seq->rows0 + hk * seq->rows;
    t.rows = t.heads * t.n;
    assert(t.rows > 0 && t.rows <= f->BM && t.row0 % FLASH_UNIT == 0);
    assert(t.row0 + t.rows <= seq->rows0 + (hk + 1) * seq->rows);
    t.keys = attn_keys_of_rows(&f->g, &seq->s, t.i0, t.i0 + t.n);
    t.all = attn_keys_of_all_rows(&f->g, &seq->s, t.i0, t.i0 + t.n);
    return t;
}

int64_t flash_row_of(const struct flash *f, int64_t b, int64_t h, int64_t i)
{
    const struct flash_sequence *seq = &f->seq[b];
    const int64_t hk = h / f->g.group, g = h % f->g.group;
    const int64_t row = seq->heads == 1 ? g * simd_round_up(seq->s.Sq, FLASH_UNIT) + i
                                        : g / seq->heads * simd_round_up(seq->heads * seq->s.Sq, FLASH_UNIT) +
                                              g % seq->heads * seq->s.Sq + i;
    return seq->rows0 + hk * seq->rows + row;
}

bool flash_visible_block(const struct flash *f, const struct flash_tile *t, int64_t j0, int64_t j1,
                         struct visible_block *block)
{
    int64_t lo = attn_max64(t->keys.lo, j0), hi = attn_min64(t->keys.hi, j1);
    assert(j0 % FLASH_UNIT == 0);
    if (lo >= hi) return false;
    block->masked = false;
    if (f->mask_heads) {
        const int64_t first = lo / FLASH_MASK_BLOCK, last = (hi - 1) / FLASH_MASK_BLOCK;
        const int64_t m0 = t->h / f->g.mask_group, m1 = (t->h + t->heads - 1) / f->g.mask_group;
        int64_t seen_first = -1, seen_last = -1, hidden = 0;
        for (int64_t part = first; part <= last; part++) {
            bool seen = false, partial = false;
            for (int64_t m = m0; m <= m1; m++) {
                const attn_mask_extremes *e = &f->extremes[(t->b * f->mask_heads + m) * f->mask_blocks + part];
                const attn_tile_kind kind = attn_mask_classify(e, t->i0, t->i0 + t->n);
                seen |= kind != ATTN_TILE_HIDDEN;
                partial |= kind != ATTN_TILE_FREE;
            }
            if (seen && seen_first < 0) seen_first = part;
            if (seen) seen_last = part;
            /* block->masked may become true although FlashMask hides nothing from the tile. The test of FlashMask then
             * costs time, but changes no result. */
            if (seen_first >= 0 && partial) block->masked = true;
            hidden += !seen;
        }
        if (seen_first < 0) return false;
        if (hidden) {
            lo = attn_max64(lo, seen_first * FLASH_MASK_BLOCK);
            hi = attn_min64(hi, (seen_last + 1) * FLASH_MASK_BLOCK);
        }
    }
    block->c0 = (int)((lo - j0) / FLASH_UNIT * FLASH_UNIT);
    block->cols = (int)(hi - j0) - block->c0;
    assert(block->c0 >= 0 && block->cols > 0 && j0 + block->c0 + block->cols <= j1);
    block->ranged = j0 + block->c0 < t->all.lo || hi > t->all.hi;
    /* The block's first column c0 is rounded down to a multiple of FLASH_UNIT. The block may therefore begin with
     * columns that FlashMask hides but causal, window and lengths do not. FlashMask must then be tested. */
    if (f->mask_heads && j0 + block->c0 < lo) block->masked = true;
    return true;
}

double flash_scale(const struct flash *f, int64_t b, int64_t hk)
{
    double scale = f->g.scale;
    if (f->p->q_scale.rank) scale *= *(const float *)flash_at(&f->g.view[ATTN_T_q_scale], b, hk, 0);
    if (f->p->k_scale.rank) scale *= *(const float *)flash_at(&f->g.view[ATTN_T_k_scale], b, hk, 0);
    return scale;
}

/* ---- Which pairs dropout keeps ----------------------------------------------------------------------------------- */

static void drop(const struct flash *f, int64_t head_index, int64_t i, int64_t group, float kept[SIMD_DROPS])
{
    f->simd->drop(f->p->seed, head_index, i, group, f->drop_threshold, kept);
}

void flash_drop(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                float *kept, int64_t ld)
{
    /* j is a multiple of 8, because dropout draws the random bits of 8 keys together */
    const int64_t j = j0 + block->c0;
    float m[SIMD_DROPS];
    for (int r = 0; r < t->rows; r++) {
        const int64_t head_index = attn_dropout_head(f->p, f->g.dims.H, t->b, t->h + r / t->n), i = t->i0 + r % t->n;
        for (int c = 0; c < block->cols; c += SIMD_DROPS) {
            drop(f, head_index, i, (j + c) / 8, m);
            memcpy(kept + r * ld + c, m,
                   (size_t)(block->cols - c < SIMD_DROPS ? block->cols - c : SIMD_DROPS) * sizeof *m);
        }
    }
}

void flash_drop_row(const struct flash *f, int64_t b, int64_t h, int64_t i, int64_t j, int n, float *kept)
{
    static_assert(FLASH_MASK_BLOCK + 7 <= SIMD_DROPS, "keys of a row that are drawn at once");
    float m[SIMD_DROPS];
    drop(f, attn_dropout_head(f->p, f->g.dims.H, b, h), i, j / 8, m);
    memcpy(kept, m + j % 8, (size_t)n * sizeof *m);
}

/* ---- Packing rows of tensors as operands of products ------------------------------------------------------------- */

const void *flash_gather(const struct flash_tile *t, const attn_view *view, int cols, void *scratch, int64_t *stride)
{
    const int64_t es = (int64_t)attn_dtype_bytes(view->dtype), first = t->seq->s.q_start + t->i0;
    if (t->heads == 1) {
        *stride = view->row;
        return flash_at(view, t->b, t->h, first);
    }
    *stride = cols;
    for (int r = 0; r < t->rows; r++)
        memcpy((char *)scratch + r * cols * es, flash_at(view, t->b, t->h + r / t->n, first + r % t->n),
               (size_t)(cols * es));
    return scratch;
}

struct flash_keys flash_keys_of_pages(const struct flash *f, const attn_view *view, int64_t b, int64_t hk, int64_t line,
                                      int most, int unit, int cols, void *scratch)
{
    const int64_t together = attn_keys_in_a_row(&f->g, line), es = (int64_t)attn_dtype_bytes(view->dtype);
    if (together >= attn_min64(most, unit)) {
        const int64_t count = together >= most ? most : together / unit * unit;
        return (struct flash_keys){ flash_key_at(f, view, b, hk, line), view->row, (int)count };
    }
    const int count = most < unit ? most : unit;
    /* cols is 0 for v in an observe (statistics of probabilities), which has no v */
    for (int r = 0; r < count && cols > 0; r++)
        memcpy((char *)scratch + r * cols * es, flash_key_at(f, view, b, hk, line + r), (size_t)(cols * es));
    return (struct flash_keys){ scratch, cols, count };
}

static bool rounds_dout(const struct flash *f)
{
    return f->type->dtype == ATTN_BF16 && f->type->parts == 1 && f->p->dout.dtype != ATTN_BF16;
}

void flash_load_dout(const struct flash *f, int64_t b, int64_t h, int64_t line, float *row)
{
    const attn_view *dout = &f->g.view[ATTN_T_dout];
    uint16_t rounded[ATTN_MAX_HEAD_DIM];
    f->simd->load(f->g.dims.Dv, flash_at(dout, b, h, line), dout->dtype, row);
    if (!rounds_dout(f)) return;
    f->simd->save(f->g.dims.Dv, row, rounded, ATTN_BF16);
    f->simd->load(f->g.dims.Dv, rounded, ATTN_BF16, row);
}

void flash_deltas(const struct flash *f, int64_t b, int64_t h, int64_t first, int n, const void *O, attn_dtype dtype,
                  int64_t stride, float *delta)
{
    const attn_view *dout = &f->g.view[ATTN_T_dout];
    const int Dv = (int)f->g.dims.Dv;
    if (!rounds_dout(f)) {
        f->simd->row_dots(n, Dv, O, dtype, stride, flash_at(dout, b, h, first), dout->dtype, dout->row, delta);
        return;
    }
    for (int r = 0; r < n; r++) {
        float row[ATTN_MAX_HEAD_DIM];
        flash_load_dout(f, b, h, first + r, row);
        f->simd->row_dots(1, Dv, (const char *)O + r * stride * (int64_t)attn_dtype_bytes(dtype), dtype, stride, row,
                          ATTN_F32, Dv, delta + r);
    }
}

/* Converts FLASH_UNIT rows to f32, replaces NaN and infinity by 0, and packs the result. Returns which unusual numbers
 * (huge, infinite or NaN) the rows contained, as bits of enum flash_values. */
static int pack_clean_unit(const struct flash *f, flash_pack pack, int rows, int cols, const void *X, attn_dtype dtype,
                           int64_t stride, void *operand, int64_t ld, float *scratch)
{
    int found = FLASH_TAME;
    for (int r = 0; r < rows; r++) {
        f->simd->load(cols, (const char *)X + r * stride * (int64_t)attn_dtype_bytes(dtype), dtype, scratch + r * cols);
        for (int c = 0; c < cols; c++)
            if (!isfinite(scratch[r * cols + c])) scratch[r * cols + c] = 0, found |= FLASH_UNREAL;
    }
    if (!pack(rows, cols, scratch, ATTN_F32, cols, operand, ld)) found |= FLASH_LARGE;
    return found;
}

int flash_pack_clean_b(const struct flash *f, const struct simd_type *type, int rows, int cols, const void *X,
                       attn_dtype dtype, int64_t stride, void *B, int64_t ldb, float *scratch)
{
    int found = FLASH_TAME;
    if (type->pack_b(rows, cols, X, dtype, stride, B, ldb)) return found;
    const int64_t es = simd_element_bytes(type);
    for (int r = 0; r < rows; r += FLASH_UNIT)
        found |= pack_clean_unit(f, type->pack_b, (int)attn_min64(FLASH_UNIT, rows - r), cols,
                                 (const char *)X + r * stride * (int64_t)attn_dtype_bytes(dtype), dtype, stride,
                                 (char *)B + (int64_t)r * SIMD_PANEL * es, ldb, scratch);
    return found;
}

int flash_pack_clean_at(const struct flash *f, int rows, int cols, const void *X, attn_dtype dtype, int64_t stride,
                        void *A, int64_t lda, float *scratch)
{
    int found = FLASH_TAME;
    if (f->type->pack_at(rows, cols, X, dtype, stride, A, lda)) return found;
    const int64_t es = simd_element_bytes(f->type);
    for (int r = 0; r < rows; r += FLASH_UNIT)
        found |= pack_clean_unit(f, f->type->pack_at, (int)attn_min64(FLASH_UNIT, rows - r), cols,
                                 (const char *)X + r * stride * (int64_t)attn_dtype_bytes(dtype), dtype, stride,
                                 (char *)A + r * es, lda, scratch);
    return found;
}
