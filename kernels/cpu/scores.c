/* scores.c: turns the products of a tile of queries and keys into scores, with all masks and options. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/flash.h"

void flash_scores_take_limits(const struct flash *f, struct flash_arena *arena, int rows, int cols,
                              struct flash_limits *limits)
{
    limits->keep = f->g.keep_tail >= 0 ? flash_take(arena, rows, cols) : NULL;
    limits->lo = flash_take(arena, rows, sizeof *limits->lo);
    limits->hi = flash_take(arena, rows, sizeof *limits->hi);
    for (int x = 0; x < 4; x++) limits->hide[x] = flash_take(arena, cols, sizeof **limits->hide);
}

/* Lets how->keep point to the elements of keep_mask for the rows of head h and keys j to j + cols - 1. If keep_mask
 * covers only the last keys of the sequence, the keys before these are not masked. */
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
    /* the keys that each row sees, as columns lo to hi - 1 counted from key j; the range moves one column to the right
     * with each row */
    if (block->ranged) {
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
    /* 0 times infinity is NaN: infinite products become NaN here, so that flash_exact_mend_scores() finds and
     * recomputes them */
    for (int r = 0; wild && r < t->rows; r++)
        for (int x = 0; x < cols; x++) S[r * lds + x] += 0 * S[r * lds + x];
    if (f->plain && !wild && c >= FLT_MIN &&
        /* If scores have no options but a positive scale, S keeps the products q . k, and softmax() multiplies them by
         * c. Hidden elements of S are -inf, and stay -inf because c is positive. */
        c <= FLT_MAX) {
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
    if (wild) flash_exact_mend_scores(f, t, j, cols, S, lds, cap);
    return 1;
}
