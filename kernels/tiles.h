/* tiles.h: where rows and keys lie in memory and which pairs are permitted, for host and device code.
 *
 * Every backend needs the same facts about a problem. These functions are the only source of them:
 *
 *   where is row i of head h?   attn_geometry_of() turns each tensor, whatever its layout or packing, into an
 *                               attn_view, which has strides for batch, head and row. A broadcast axis has stride 0.
 *   where is key j?             attn_key_at(): in a row of k and v, or in a slot of a page.
 *   how long is sequence b?     attn_sequence_of(): the start and length of its queries and keys, packed or not.
 *   how much room has b?        attn_room_of(): rows behind its length are padding, or a gap before sequence b + 1.
 *   which keys may i see?       attn_keys_of(): the interval [lo, hi) left by causal, window, alignment and lengths.
 *   which queries may see j?    attn_rows_of(): the interval of queries, for the gradients of k and v.
 *   can a tile be skipped?      attn_mask_classify(): FlashMask hides the tile wholly, not at all, or in part.
 *
 * Invariants:
 *   1. Row i of a sequence is row q_start + i of its tensor. If the tensor is packed, q_start says where the sequence
 *      begins, and the stride `batch` is 0. Otherwise q_start is 0. One expression gives the address in both cases.
 *   2. Alignment, ALiBi and dropout use the lengths and indices of the sequence, never those of the packed tensor.
 *   3. All lengths and indices are 64-bit. attn_check() keeps every axis below 2^31, so sums of two lengths and a
 *      window side (at most ATTN_UNBOUNDED) do not overflow. */
#ifndef ATTN_TILES_H
#define ATTN_TILES_H

#include "dtype.h"

/* An lse whose absolute value is this large or larger is too coarse: its last bit in float32 is worth 2, so exp(z -
 * lse) may be wrong by a factor of e. A backward that gets such an lse computes lse from the scores instead. */
#define ATTN_LSE_MOST 16777216.0f

/* If a row sees only one key, its lse equals the score of this key, except for rounding in float32. This is the largest
 * difference, relative to lse, at which the two count as equal. The forward rounds by up to 3e-7 of the value. Storing
 * lse rounds by half a unit in the last place, and so does the score that the backward computes. */
#define ATTN_LSE_SLACK 0x1p-20f

ATTN_HD int64_t attn_min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
ATTN_HD int64_t attn_max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns the head index that the random generator of dropout (philox.h) uses for query head h of batch row b: b * H +
 * h, where H is the number of query heads of `p`. If `p` is a part of a problem, dropout_first and dropout_heads of `p`
 * make it the index in the whole problem, so that the part drops the same pairs. */
static inline int64_t attn_dropout_head(const attn_problem *p, int64_t H, int64_t b, int64_t h)
{
    return p->dropout_first + b * (p->dropout_heads ? p->dropout_heads : H) + h;
}
ATTN_HD int64_t attn_clamp64(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Returns how many tiles of `tile` elements cover `count` elements. */
ATTN_HD int64_t attn_tiles(int64_t count, int64_t tile)
{
    return (count + tile - 1) / tile;
}

/* Returns floor(a / b) for b > 0. C's own division rounds a negative quotient towards zero. */
ATTN_HD int64_t attn_floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

/* ---- Addresses and indices of elements --------------------------------------------------------------------------- */

ATTN_HD int64_t attn_at(const attn_view *view, int64_t b, int64_t h, int64_t row)
{
    return b * view->batch + h * view->head + row * view->row;
}

/* Returns the offset, in elements, of a key's row in k or v, with or without pages (attn_at() is for the other
 * tensors). `line` is k_start + j for key j of the sequence. */
ATTN_HD int64_t attn_key_at(const attn_geometry *g, const attn_view *view, int64_t b, int64_t h, int64_t line)
{
    if (!g->page_table) return attn_at(view, b, h, line);
    /* `line` and the page size are below 2^31, so 32 bits hold them */
    const uint32_t size = (uint32_t)g->dims.page_size, page = (uint32_t)line / size;
    return attn_at(view, g->page_table[b * g->page_table_row + page], h, (uint32_t)line - page * size);
}

/* Returns how many rows of k and v, from `line` (k_start + j) on, lie at equal distances (the row stride) in memory. If
 * keys are in pages, these are the rows up to the end of the page. */
ATTN_HD int64_t attn_keys_in_a_row(const attn_geometry *g, int64_t line)
{
    return g->page_table ? g->dims.page_size - line % g->dims.page_size : INT64_MAX;
}

/* Returns whether the keys of all sequences lie in one packed tensor. (If keys are in pages, only queries can be
 * packed.) */
ATTN_HD bool attn_keys_are_packed(const attn_dims *d)
{
    return d->packed && d->page_size == 0;
}

/* The value of left or right where the window has no limit on that side. It is larger than the distance of any key from
 * any query. */
#define ATTN_UNBOUNDED (INT64_C(1) << 40)

/* Computes the geometry of `p` (sizes, addresses and strides). It reads only shapes and strides, and none of the
 * tensors' memory. */
#ifdef __cplusplus
extern "C"
#endif
    attn_geometry
    attn_geometry_of(const attn_problem *p);

/* ---- The lengths of sequences ------------------------------------------------------------------------------------ */

typedef struct attn_sequence {
    int64_t q_start, k_start; /* index of the sequence's first row in q and in k; 0 in a tensor that is not packed */
    int64_t Sq, Sk;
} attn_sequence;

/* Returns where sequence b begins and its lengths. It reads cu_seqlens or seqlens, so call it on the host or device
 * that can read their memory. */
ATTN_HD attn_sequence attn_sequence_of(const attn_geometry *g, int64_t b)
{
    attn_sequence s;
    s.q_start = g->cu_q ? g->cu_q[b] : 0;
    s.k_start = g->cu_k ? g->cu_k[b] : 0;
    s.Sq = g->seqlens_q ? g->seqlens_q[b] : g->cu_q ? g->cu_q[b + 1] - s.q_start : g->dims.Sq;
    s.Sk = g->seqlens_k ? g->seqlens_k[b] : g->cu_k ? g->cu_k[b + 1] - s.k_start : g->dims.Sk;
    return s;
}

/* Returns how many rows sequence b has, padding included. It reads `cu` (cu_seqlens), so call it on the host or device
 * that can read this memory. */
ATTN_HD int64_t attn_room_of(const int32_t *cu, int64_t all, int64_t b)
{
    return cu ? cu[b + 1] - cu[b] : all;
}

/* Returns whether the problem has rows whose results kernels do not write: padding queries, or padding keys of a packed
 * problem. Where keys are not packed, kernels themselves write zeros behind seqlens_k. */
ATTN_HD bool attn_has_padding(const attn_geometry *g)
{
    return g->seqlens_q || (g->seqlens_k && g->cu_k);
}

/* ---- Which pairs count: causal, window, alignment ---------------------------------------------------------------- */

typedef struct attn_range {
    int64_t lo, hi; /* a range of indices x with lo <= x < hi; the range is empty where lo == hi */
} attn_range;

/* Returns i' - i, where i' is the position of query i among the keys. The last query has the position of the last key.
 * If masks are aligned top left, the first query has the position of the first key instead. */
ATTN_HD int64_t attn_align(const attn_geometry *g, const attn_sequence *s)
{
    return g->top_left ? 0 : s->Sk - s->Sq;
}

/* Returns the range of keys j that causal, window and lengths let query i see: i' - left <= j <= i' + right and 0 <= j
 * < Sk, where i' = i + attn_align(). Neither end of the range decreases when i grows. */
ATTN_HD attn_range attn_keys_of(const attn_geometry *g, const attn_sequence *s, int64_t i)
{
    const int64_t aligned = i + attn_align(g, s);
    attn_range keys;
    keys.lo = attn_clamp64(aligned - g->left, 0, s->Sk);
    keys.hi = attn_clamp64(aligned + g->right + 1, keys.lo, s->Sk);
    return keys;
}

/* Returns the range of queries, inside [0, Sq), that may see key j under causal, window and lengths. */
ATTN_HD attn_range attn_rows_of(const attn_geometry *g, const attn_sequence *s, int64_t j)
{
    const int64_t aligned = j - attn_align(g, s);
    attn_range rows;
    rows.lo = attn_clamp64(aligned - g->right, 0, s->Sq);
    rows.hi = attn_clamp64(aligned + g->left + 1, rows.lo, s->Sq);
    return rows;
}

/* Returns the range of keys that at least one of the queries [r0, r1) may see. */
ATTN_HD attn_range attn_keys_of_rows(const attn_geometry *g, const attn_sequence *s, int64_t r0, int64_t r1)
{
    attn_range keys = { 0, 0 };
    if (r0 >= r1) return keys;
    keys.lo = attn_keys_of(g, s, r0).lo;
    keys.hi = attn_max64(keys.lo, attn_keys_of(g, s, r1 - 1).hi);
    return keys;
}

/* Returns the keys that every one of the queries [r0, r1) may see: a tile inside this range needs no causal or window
 * test. */
ATTN_HD attn_range attn_keys_of_all_rows(const attn_geometry *g, const attn_sequence *s, int64_t r0, int64_t r1)
{
    attn_range keys = { 0, 0 };
    if (r0 >= r1) return keys;
    keys.lo = attn_keys_of(g, s, r1 - 1).lo;
    keys.hi = attn_max64(keys.lo, attn_keys_of(g, s, r0).hi);
    return keys;
}

/* Returns the sum over i in [0, count) of clamp(i + first, 0, limit), in closed form. */
ATTN_HD int64_t attn_clamped_sum(int64_t first, int64_t count, int64_t limit)
{
    const int64_t rise = attn_clamp64(-first, 0, count); /* all terms of the sum with an index below `rise` are 0 */
    /* the terms of the sum from index `full` on are equal to `limit` */
    const int64_t full = attn_clamp64(limit - first, rise, count);
    /* the n terms with indices `rise` to `full` - 1 are start, start + 1, ... */
    const int64_t n = full - rise, start = first + rise;
    return n * start + (n > 0 ? (n % 2 ? n * ((n - 1) / 2) : n / 2 * (n - 1)) : 0) + (count - full) * limit;
}

/* Returns the number of (query, key) pairs of one head of a sequence that causal and window permit. */
ATTN_HD int64_t attn_pairs_of(const attn_geometry *g, const attn_sequence *s)
{
    const int64_t a = attn_align(g, s);
    return attn_clamped_sum(a + g->right + 1, s->Sq, s->Sk) - attn_clamped_sum(a - g->left, s->Sq, s->Sk);
}

/* ---- Which pairs count: keep_mask -------------------------------------------------------------------------------- */

/* Returns the index of the key to which column 0 of keep_mask belongs. keep_mask hides no earlier key. The index is
 * negative if keep_mask has more columns than the sequence has keys; columns without a key are not read. */
ATTN_HD int64_t attn_keep_from(const attn_geometry *g, const attn_sequence *s)
{
    return g->keep_tail < 0 ? 0 : s->Sk - g->keep_tail;
}

/* ---- Which pairs count: FlashMask -------------------------------------------------------------------------------- */

/* FlashMask hides a key from the queries in two intervals, [lts, lte) and [uts, ute). An interval is empty where start
 * >= end. */
typedef struct attn_mask {
    int32_t lts, lte, uts, ute;
} attn_mask;

/* Converts the n bounds that the client gave for a key (mask_startend_rows) to the intervals of an attn_mask. */
ATTN_HD attn_mask attn_mask_of(const int32_t *bounds, int n, bool causal, int64_t Sq)
{
    attn_mask m = { 0, 0, 0, 0 };
    m.lts = bounds[0];
    m.lte = (int32_t)Sq;
    if (n == 2 && causal) m.lte = bounds[1];
    if (n == 2 && !causal) m.ute = bounds[1];
    if (n == 4) m.lte = bounds[1], m.uts = bounds[2], m.ute = bounds[3];
    return m;
}

ATTN_HD bool attn_mask_hides(attn_mask m, int64_t i)
{
    return (i >= m.lts && i < m.lte) || (i >= m.uts && i < m.ute);
}

/* The smallest and the largest FlashMask bounds of several keys. */
typedef struct attn_mask_extremes {
    attn_mask min, max;
} attn_mask_extremes;

ATTN_HD attn_mask_extremes attn_mask_extremes_init(void)
{
    const attn_mask_extremes none = { { INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX }, { 0, 0, 0, 0 } };
    return none;
}

ATTN_HD void attn_mask_extremes_add(attn_mask_extremes *e, attn_mask m)
{
    if (m.lts < e->min.lts) e->min.lts = m.lts;
    if (m.lte < e->min.lte) e->min.lte = m.lte;
    if (m.uts < e->min.uts) e->min.uts = m.uts;
    if (m.ute < e->min.ute) e->min.ute = m.ute;
    if (m.lts > e->max.lts) e->max.lts = m.lts;
    if (m.lte > e->max.lte) e->max.lte = m.lte;
    if (m.uts > e->max.uts) e->max.uts = m.uts;
    if (m.ute > e->max.ute) e->max.ute = m.ute;
}

typedef enum attn_tile_kind {
    ATTN_TILE_FREE,    /* FlashMask hides nothing in the tile, so no element needs a test */
    ATTN_TILE_PARTIAL, /* FlashMask may hide a part of the tile, so every element needs attn_mask_hides() */
    ATTN_TILE_HIDDEN   /* FlashMask hides the whole tile, so it can be skipped */
} attn_tile_kind;

/* Classifies the tile of queries [r0, r1) and the keys whose smallest and largest bounds are in `e`. FREE and HIDDEN
 * are certain. PARTIAL is not certain: it is also returned if neither interval of the keys hides the whole tile, but
 * both together do. Such a tile is computed correctly, but more slowly than if it were skipped. */
ATTN_HD attn_tile_kind attn_mask_classify(const attn_mask_extremes *e, int64_t r0, int64_t r1)
{
    if ((r0 >= e->max.lts && r1 <= e->min.lte) || (r0 >= e->max.uts && r1 <= e->min.ute)) return ATTN_TILE_HIDDEN;
    if ((e->min.lts >= r1 || e->max.lte <= r0) && (e->min.uts >= r1 || e->max.ute <= r0)) return ATTN_TILE_FREE;
    return ATTN_TILE_PARTIAL;
}

#endif
