/* masks.cuh: which scores of a tile are set to -inf: by a causal mask, a window, lengths of sequences, and FlashMask.
 * With FlashMask, a block lists the tiles of keys that its rows see; all other tiles are neither loaded nor
 * multiplied. */
#ifndef ATTN_SM90_MASKS_CUH
#define ATTN_SM90_MASKS_CUH

#include "kernels/cuda/sm90/layer/scheduler.cuh"

/* ---- Masks that let a row see a band of keys: causal, window, lengths -------------------------------------------- */

/* Sets a score of row i0 (registers 0 1 4 5 ...) or i0 + 8 to -inf if the row does not see the key. The tile's keys
 * begin at j0. RIGHT_ONLY: the mask hides no key on the left. FIRST: all rows see the first FIRST keys. Row r belongs
 * to query r >> shift. */
template <int N, bool RIGHT_ONLY = false, int FIRST = 0>
DEVICE void mask(float (&S)[N / 2], const key_band &band, int i0, int j0, int lane, int shift = 0)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = (i0 + half * 8) >> shift, column = j0 + lane % 4 * 2;
        const int lo = i + band.lo - column, hi = min(i + band.hi, band.Sk) - column;
#pragma unroll
        for (int n = FIRST / 8; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if ((!RIGHT_ONLY && n * 8 + e < lo) || n * 8 + e >= hi) S[n * 4 + half * 2 + e] = -CUDART_INF_F;
    }
}

/* ---- FlashMask --------------------------------------------------------------------------------------------------- */

/* A problem's FlashMask. If the problem has none, bounds is NULL. */
struct flash_mask {
    /* for each key, `n` row numbers at which the mask begins or ceases to hide the key; `group` query heads have the
     * same row numbers */
    const int32_t *bounds;
    int64_t batch, head, row;
    /* [head][tile of keys]: the smallest and the largest of the tile's bounds */
    const attn_mask_extremes *extremes;
    int n, group, key_tiles;
    bool causal;
};

static inline flash_mask flash_mask_of(const attn_geometry &g, int BN, void *extremes)
{
    const attn_view &bounds = g.view[ATTN_T_mask_startend_rows];
    flash_mask x;
    x.bounds = (const int32_t *)bounds.data;
    x.batch = bounds.batch, x.head = bounds.head, x.row = bounds.row;
    x.extremes = (const attn_mask_extremes *)extremes;
    x.n = g.mask_bounds, x.group = (int)g.mask_group, x.key_tiles = (int)attn_tiles(g.dims.Sk, BN);
    x.causal = g.causal;
    return x;
}

/* Two bits per tile of keys, for one work tile. `some`: some pair of a query and a key is visible. `part`: some but not
 * all pairs are visible. */
enum { MOST_KEY_TILES = 4096 };
struct tile_bits {
    uint32_t some[MOST_KEY_TILES / 32], part[MOST_KEY_TILES / 32];
};

/* Sets in `seen` the bits of the tiles of keys that are not hidden, and narrows `tiles` to the range of these tiles.
 * kind_of(j) must return the attn_tile_kind of tile j. All lanes of the warp must call this. */
template <class KIND> DEVICE void list_tiles(key_tiles &tiles, tile_bits &seen, KIND kind_of)
{
    const int lane = threadIdx.x % 32;
    int first = tiles.last, last = tiles.first;
    for (int n = tiles.first / 32; n * 32 < tiles.last; n++) {
        const int j = n * 32 + lane;
        attn_tile_kind kind = ATTN_TILE_HIDDEN;
        if (j >= tiles.first && j < tiles.last) kind = kind_of(j);
        const uint32_t some = __ballot_sync(0xffffffff, kind != ATTN_TILE_HIDDEN),
                       part = __ballot_sync(0xffffffff, kind == ATTN_TILE_PARTIAL);
        if (some) first = min(first, n * 32 + __ffs(some) - 1), last = n * 32 + 32 - __clz(some);
        if (lane == 0) seen.some[n] = some, seen.part[n] = part;
    }
    tiles.last = max(last, tiles.first);
    tiles.first = min(first, tiles.last);
    __syncwarp();
}

DEVICE const attn_mask_extremes *extremes_of(const flash_mask &mask, int b, int h, int H)
{
    return mask.extremes + ((int64_t)b * (H / mask.group) + h / mask.group) * mask.key_tiles;
}

/* Lists in `seen` the tiles of keys that FlashMask does not hide completely from rows `begin` to `end` - 1. All lanes
 * of the warp must call this. */
DEVICE void list_visible_tiles(const flash_mask &mask, int b, int h, int H, int begin, int end, key_tiles &tiles,
                               tile_bits &seen)
{
    const attn_mask_extremes *const extremes = extremes_of(mask, b, h, H);
    list_tiles(tiles, seen, [&](int j) { return attn_mask_classify(&extremes[j], begin, end); });
}

/* Returns the highest visible tile of keys below tile j. The list `seen` must have such a tile. */
DEVICE int listed_tile_below(const tile_bits *seen, int j)
{
    int n = (j - 1) / 32;
    uint32_t bits = seen->some[n] & (0xffffffff >> (31 - (j - 1) % 32));
    while (!bits) bits = seen->some[--n];
    return n * 32 + 31 - __clz(bits);
}

/* Sets scores to -inf where FlashMask hides a key from rows i0 and i0 + 8. The keys begin at j0. Of the work tile x,
 * the members b, h, Sq and Sk are read. TOGETHER: number of keys whose bounds are loaded at the same time. */
template <int N, int TOGETHER = 1, class WORK>
DEVICE void hide_by_bounds(float (&S)[N / 2], const flash_mask &mask, const WORK &x, int i0, int j0, int lane)
{
    static_assert(N <= 128, "hidden has 32 bits");
    const int32_t *const bounds = mask.bounds + x.b * mask.batch + x.h / mask.group * mask.head;
    const int column = j0 + lane % 4 * 2;
    /* One bit per score of each row; 1: hidden. The loop is not unrolled completely, because all bounds would then be
     * in registers at once. */
    uint32_t hidden[2] = { 0, 0 };
#pragma unroll TOGETHER
    for (int n = 0; n < N / 4; n++) {
        const attn_mask m = attn_mask_of(bounds + min(column + n / 2 * 8 + n % 2, x.Sk - 1) * mask.row, mask.n,
                                         mask.causal, x.Sq);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = i0 + half * 8;
            hidden[half] |= (uint32_t)((i >= m.lts && i < m.lte) || (i >= m.uts && i < m.ute)) << n;
        }
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (hidden[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) S[i] = -CUDART_INF_F;
}

/* Finds the smallest and the largest FlashMask bounds in each tile of BN keys. */
template <int BN>
__global__ void __launch_bounds__(128)
    tile_extremes(const __grid_constant__ flash_mask mask, int B, int H, int Sq, int Sk, attn_mask_extremes *extremes)
{
    const int heads = H / mask.group, lane = threadIdx.x % 32;
    for (int64_t at = (int64_t)blockIdx.x * 4 + threadIdx.x / 32; at < (int64_t)B * heads * mask.key_tiles;
         at += (int64_t)gridDim.x * 4) {
        const int tile = (int)(at % mask.key_tiles), head = (int)(at / mask.key_tiles);
        const int32_t *const bounds = mask.bounds + head / heads * mask.batch + head % heads * mask.head;
        attn_mask_extremes e = attn_mask_extremes_init();
        for (int j = tile * BN + lane; j < min(tile * BN + BN, Sk); j += 32)
            attn_mask_extremes_add(&e, attn_mask_of(bounds + j * mask.row, mask.n, mask.causal, Sq));
        attn_mask_extremes all;
        all.min.lts = __reduce_min_sync(0xffffffff, e.min.lts), all.max.lts = __reduce_max_sync(0xffffffff, e.max.lts);
        all.min.lte = __reduce_min_sync(0xffffffff, e.min.lte), all.max.lte = __reduce_max_sync(0xffffffff, e.max.lte);
        all.min.uts = __reduce_min_sync(0xffffffff, e.min.uts), all.max.uts = __reduce_max_sync(0xffffffff, e.max.uts);
        all.min.ute = __reduce_min_sync(0xffffffff, e.min.ute), all.max.ute = __reduce_max_sync(0xffffffff, e.max.ute);
        if (lane == 0) extremes[at] = all;
    }
}

#endif
