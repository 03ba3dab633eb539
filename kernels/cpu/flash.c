/* flash.c: what the phases share: the tiles of a problem, scores with all masks and options, operands. See flash.h. */
#include "kernels/cpu/flash.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/philox.h"

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

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

/* ---- Tiles ------------------------------------------------------------------------------------------------------- */

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

bool visible_block_of(const struct flash *f, const struct flash_tile *t, int64_t j0, int64_t j1,
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
            if (seen_first >= 0 && partial)
                block->masked = true; /* hidden parts after the last seen one may set it, too: harmless */
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
    /* Columns of the unit before lo that only the mask hid are looked at again. */
    if (f->mask_heads && j0 + block->c0 < lo) block->masked = true;
    return true;
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

double flash_scale(const struct flash *f, int64_t b, int64_t hk)
{
    double scale = f->g.scale;
    if (f->p->q_scale.rank) scale *= *(const float *)flash_at(&f->g.view[ATTN_T_q_scale], b, hk, 0);
    if (f->p->k_scale.rank) scale *= *(const float *)flash_at(&f->g.view[ATTN_T_k_scale], b, hk, 0);
    return scale;
}

void flash_take_limits(const struct flash *f, struct flash_arena *arena, int rows, int cols,
                       struct flash_limits *limits)
{
    limits->keep = f->g.keep_tail >= 0 ? flash_take(arena, rows, cols) : NULL;
    limits->lo = flash_take(arena, rows, sizeof *limits->lo);
    limits->hi = flash_take(arena, rows, sizeof *limits->hi);
    for (int x = 0; x < 4; x++) limits->hide[x] = flash_take(arena, cols, sizeof **limits->hide);
}

/* keep_mask of a head's rows and of keys j .. j + cols - 1, some of which may be before those that it is of. */
static void mask_block(const struct flash *f, const struct flash_tile *t, int64_t h, int64_t j, int cols,
                       const struct flash_limits *limits, struct simd_score *how)
{
    const attn_view *keep = &f->g.view[ATTN_T_keep_mask];
    const int64_t from = attn_keep_from(&f->g, &t->seq->s), kept = attn_clamp64(from - j, 0, cols);
    if (kept == cols) return;
    how->keep = (const uint8_t *)flash_at(keep, t->b, h, t->i0) + (j + kept - from);
    how->keep_stride = keep->row;
    if (kept == 0) return;
    for (int r = 0; r < t->n; r++) {
        uint8_t *const row = limits->keep + (int64_t)r * cols;
        memset(row, 1, (size_t)kept);
        memcpy(row + kept, how->keep + r * keep->row, (size_t)(cols - kept));
    }
    how->keep = limits->keep;
    how->keep_stride = cols;
}

float flash_scores(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                   float *S, int64_t lds, float *cap, const struct flash_limits *limits, bool wild)
{
    const double scale = flash_scale(f, t->b, t->hk);
    const int cols = block->cols;
    const int64_t j = j0 + block->c0;
    if (block->ranged) { /* attn_keys_of() of each row, less j: both ends move by one per row */
        const int64_t aligned = t->i0 + attn_align(&f->g, &t->seq->s) - j;
        const int lo = (int)attn_clamp64(aligned - f->g.left, INT32_MIN / 2, INT32_MAX / 2);
        const int hi = (int)attn_clamp64(aligned + f->g.right + 1, INT32_MIN / 2, INT32_MAX / 2);
        for (int r = 0; r < t->n; r++) {
            const int from = lo + r < 0 ? 0 : lo + r > cols ? cols : lo + r;
            limits->lo[r] = from;
            limits->hi[r] = hi + r < from ? from : hi + r > cols ? cols : hi + r;
        }
    }
    const float c = (float)(scale * M_LOG2E);
    for (int r = 0; wild && r < t->rows; r++) /* infinite becomes NaN, which every step keeps until it is mended */
        for (int x = 0; x < cols; x++) S[r * lds + x] += 0 * S[r * lds + x];
    if (f->plain && !wild && c >= FLT_MIN &&
        c <= FLT_MAX) { /* a hidden raw score may be -inf, for c times it is -inf too */
        for (int head = 0; block->ranged && head < t->heads; head++)
            f->simd->hide(t->n, cols, S + (int64_t)head * t->n * lds, lds, limits->lo, limits->hi);
        return c;
    }
    const attn_view *bias = &f->g.view[ATTN_T_bias];
    const attn_view *slopes = &f->g.view[ATTN_T_alibi_slopes], *bounds = &f->g.view[ATTN_T_mask_startend_rows];
    int64_t mask_head = -1;
    for (int head = 0; head < t->heads; head++) {
        const int64_t h = t->h + head;
        struct simd_score how = {
            .scale = (float)scale,
            .softcap = (float)f->g.softcap,
            .distance = t->i0 + t->seq->s.Sk - t->seq->s.Sq - j,
            .row0 = (int32_t)t->i0,
            .cap = cap ? cap + (int64_t)head * t->n * lds : NULL,
        };
        if (f->p->bias.rank) {
            how.bias = (char *)flash_at(bias, t->b, h, t->i0) + j * (int64_t)attn_dtype_bytes(bias->dtype);
            how.bias_dtype = bias->dtype;
            how.bias_stride = bias->row;
        }
        if (f->p->keep_mask.rank) mask_block(f, t, h, j, cols, limits, &how);
        if (f->p->alibi_slopes.rank) how.slope = *(const float *)flash_at(slopes, t->b, h, 0);
        if (block->ranged) how.lo = limits->lo, how.hi = limits->hi;
        if (block->masked) {
            if (h / f->g.mask_group != mask_head) {
                mask_head = h / f->g.mask_group;
                for (int x = 0; x < cols; x++) {
                    const attn_mask m = attn_mask_of(flash_at(bounds, t->b, mask_head, j + x), f->g.mask_bounds,
                                                     f->g.causal, t->seq->s.Sq);
                    limits->hide[0][x] = m.lts, limits->hide[1][x] = m.lte, limits->hide[2][x] = m.uts,
                    limits->hide[3][x] = m.ute;
                }
            }
            for (int x = 0; x < 2; x++) how.hide_lo[x] = limits->hide[2 * x], how.hide_hi[x] = limits->hide[2 * x + 1];
        }
        f->simd->score(t->n, cols, S + (int64_t)head * t->n * lds, lds, &how);
    }
    if (wild) flash_mend_scores(f, t, j, cols, S, lds, cap);
    return 1;
}

enum { GROUPS = 16 }; /* of 8 keys, drawn together */

/* attn_dropout_words() of GROUPS groups in a row, in loops that any compiler turns into vectors: five times as fast. */
static void draw(uint64_t seed, int64_t head_index, int64_t i, int64_t group, uint32_t word[4][GROUPS])
{
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int g = 0; g < GROUPS; g++) {
        word[0][g] = (uint32_t)(group + g);
        word[1][g] = (uint32_t)i;
        word[2][g] = (uint32_t)head_index;
        word[3][g] = 0;
    }
    for (int round = 0; round < 10; round++) {
        for (int g = 0; g < GROUPS; g++) {
            const uint64_t p0 = (uint64_t)0xd2511f53u * word[0][g], p1 = (uint64_t)0xcd9e8d57u * word[2][g];
            word[0][g] = (uint32_t)(p1 >> 32) ^ word[1][g] ^ key0;
            word[2][g] = (uint32_t)(p0 >> 32) ^ word[3][g] ^ key1;
            word[1][g] = (uint32_t)p1;
            word[3][g] = (uint32_t)p0;
        }
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

enum { HALVES = 8 * GROUPS };

/* M of HALVES keys from 8 * group on. */
static void drop(const struct flash *f, int64_t head_index, int64_t i, int64_t group, float M[HALVES])
{
    const uint32_t threshold = f->drop_threshold;
    uint32_t word[4][GROUPS], m[GROUPS][8], kept;
    memcpy(&kept, &f->drop_scale, sizeof kept);
    draw(f->p->seed, head_index, i, group, word);
    for (int w = 0; w < 4; w++)
        for (int g = 0; g < GROUPS; g++) { /* by masks: a branch would be guessed wrong as often as p is */
            m[g][2 * w] = kept & -(uint32_t)((word[w][g] & 0xffffu) >= threshold);
            m[g][2 * w + 1] = kept & -(uint32_t)(word[w][g] >> 16 >= threshold);
        }
    memcpy(M, m, sizeof m);
}

void flash_drop(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                float *M, int64_t ld)
{
    const int64_t j = j0 + block->c0; /* a multiple of FLASH_UNIT, so of the 8 halves of a call */
    float m[HALVES];
    for (int r = 0; r < t->rows; r++) {
        const int64_t head_index = t->b * f->g.dims.H + t->h + r / t->n, i = t->i0 + r % t->n;
        for (int c = 0; c < block->cols; c += HALVES) {
            drop(f, head_index, i, (j + c) / 8, m);
            memcpy(M + r * ld + c, m, (size_t)(block->cols - c < HALVES ? block->cols - c : HALVES) * sizeof *m);
        }
    }
}

void flash_drop_row(const struct flash *f, int64_t b, int64_t h, int64_t i, int64_t j, int n, float *M)
{
    static_assert(FLASH_MASK_BLOCK + 7 <= HALVES, "keys of a row that are drawn at once");
    float m[HALVES];
    drop(f, b * f->g.dims.H + h, i, j / 8, m);
    memcpy(M, m + j % 8, (size_t)n * sizeof *m);
}

/* ---- Operands ---------------------------------------------------------------------------------------------------- */

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
    for (int r = 0; r < count; r++)
        memcpy((char *)scratch + r * cols * es, flash_key_at(f, view, b, hk, line + r), (size_t)(cols * es));
    return (struct flash_keys){ scratch, cols, count };
}

/* Do the products of gradients round dout? */
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

/* Widens FLASH_UNIT rows, replaces what is not finite, and packs that. Returns enum flash_values. */
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
