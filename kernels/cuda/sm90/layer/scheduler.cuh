/* scheduler.cuh: the work tiles of a kernel (BM queries of one head each), the order in which blocks claim them from a
 * counter, and which tiles of keys their rows see.
 *
 * Without a mask, work tiles are claimed head after head. With a mask, the longest work tiles of a section come first,
 * so that the last ones are short. A section is a group of heads whose K and V fit into the L2 cache together. */
#ifndef ATTN_SM90_SCHEDULER_CUH
#define ATTN_SM90_SCHEDULER_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"

const int FAR = 1 << 29;           /* Lengths of sequences are below FAR, so a window of FAR keys hides no key. */
const int64_t L2_SHARE = 32 << 20; /* bytes of the L2 cache (50 or 60 MB) that K and V may take */
const int LEAST_BM = 128;          /* the smallest number of queries in a work tile of any shape */
/* number of short work tiles (with few keys) at the end of an ending_order: two for each of 132 multiprocessors */
const int LAST_TILES = 264;

/* ---- The order of work tiles ------------------------------------------------------------------------------------- */

struct tile_order {
    int tiles;
    int per_head;
    int heads;
    int section;    /* number of heads in a section (heads whose work tiles are ordered together) */
    int first, end; /* this launch computes work tiles `first` to `end` - 1 */
};

/* Plans a tile_order. head_bytes: bytes of K and V that a query head reads. uneven: some work tiles take longer than
 * others. share: the most bytes of K and V of a section (a group of heads whose work tiles are claimed together). */
static inline tile_order tile_order_of(int64_t per_head, int64_t heads, int64_t head_bytes, bool uneven,
                                       int64_t share = L2_SHARE)
{
    tile_order x;
    x.per_head = (int)per_head;
    x.heads = (int)heads;
    x.tiles = x.end = x.per_head * x.heads;
    x.first = 0;
    x.section = 1;
    if (uneven)
        while (x.section < x.heads && x.section * 2 * head_bytes <= share) x.section *= 2;
    return x;
}

static inline void take_share(const cuda_chip *chip, tile_order &x)
{
    const tile_range tiles = share_of(chip, x.tiles);
    x.first = (int)tiles.first, x.end = (int)tiles.end;
}

struct head_tile {
    int head, tile; /* `tile` is counted backwards, from the head's last work tile */
};

/* Returns the head and the tile with number t in the order. The last rows of a head come first, because they see most
 * keys under a causal mask. */
DEVICE head_tile head_tile_of(const tile_order &x, int t)
{
    const int in_section = x.section * x.per_head, s = t / in_section, r = t - s * in_section;
    const int heads = min(x.section, x.heads - s * x.section), tile = r / heads;
    return { s * x.section + r - tile * heads, tile };
}

/* A tile_order that ends with short work tiles, which have few keys. These are the `short_tiles` shortest work tiles of
 * each of the heads `last_heads` and above. */
struct ending_order : tile_order {
    int last_heads;
    int short_tiles;
};

/* Plans an ending_order that ends with about at_end short work tiles (with few keys). short_tiles: number of short work
 * tiles of a head, or 0 if all work tiles take the same time. */
static inline ending_order ending_order_of(int64_t per_head, int64_t heads, int64_t head_bytes, int64_t short_tiles,
                                           int at_end, int64_t share)
{
    const bool uneven = short_tiles > 0;
    ending_order x;
    (tile_order &)x = tile_order_of(per_head, heads, head_bytes, uneven, share);
    x.last_heads = x.heads, x.short_tiles = (int)attn_min64(short_tiles, per_head);
    if (!uneven) return x;
    const int64_t held = L2_SHARE / attn_max64(head_bytes, 1),
                  most = attn_max64(attn_min64(attn_tiles(at_end, x.short_tiles), held), x.section);
    x.last_heads = (int)(x.heads - attn_min64(most, x.heads)) / x.section * x.section;
    return x;
}

DEVICE head_tile head_tile_of(const ending_order &x, int t)
{
    /* The order has three parts: the work tiles of all heads except the last heads, then the long and then the short
     * work tiles of the last heads. */
    tile_order part = x;
    int head = 0, tile = 0; /* first head and first tile of the part of the order that t belongs to */
    part.heads = x.last_heads;
    if (t >= part.heads * part.per_head) {
        t -= part.heads * part.per_head, head = x.last_heads;
        part.heads = x.heads - x.last_heads, part.per_head -= x.short_tiles;
        if (t >= part.heads * part.per_head) {
            t -= part.heads * part.per_head, tile = part.per_head;
            part.per_head = x.short_tiles, part.section = part.heads;
        }
    }
    const head_tile at = head_tile_of(part, t);
    return { head + at.head, tile + at.tile };
}

/* Plans an ending_order for a forward with BM queries per work tile. rows: keys per head. row_bytes: bytes of K and V
 * per key. uneven: work tiles differ in their number of keys. */
static inline ending_order forward_order_of(const attn_geometry &g, int64_t per_head, int64_t heads, int64_t rows,
                                            int64_t row_bytes, int BM, bool uneven, int64_t share)
{
    const int64_t seen = attn_min64(rows, attn_min64(g.left, FAR) + attn_min64(g.right, FAR) + BM);
    return ending_order_of(per_head, heads, seen * row_bytes / g.group, uneven ? attn_tiles(seen, BM) : 0, LAST_TILES,
                           share);
}

/* first_tile() returns the number of the block's first work tile, which needs no claim. claim_tile() returns the number
 * of the next one to all lanes of the warp; the lane whose `scheduler` is true claims it from the counter. */
DEVICE int first_tile(const tile_order &x)
{
    return x.first + (int)blockIdx.x;
}
DEVICE int claim_tile(const tile_order &x, int t, int *counter, bool scheduler)
{
    if (scheduler) t = x.first + (int)gridDim.x + atomicAdd(counter, 1);
    return __shfl_sync(0xffffffff, t, 0);
}

/* ---- Which keys each row sees ------------------------------------------------------------------------------------ */

/* Which keys the rows of a sequence see: row i sees keys i + lo to min(i + hi, Sk) - 1. */
struct key_band {
    int lo, hi, Sk;
};

/* Returns the band of keys that rows see. Row i is at the position of key i + align, and sees `left` keys before that
 * key and `right` keys after it. */
ATTN_HD key_band key_band_of(int align, int left, int right, int Sk)
{
    return { align - left, align + right + 1, Sk };
}

struct key_tiles {
    int first, last; /* tiles of keys `first` to `last` - 1 */
};

/* Returns the tiles of BN keys that at least one of the rows `begin` to `end` - 1 sees. */
template <int BN> DEVICE key_tiles key_tiles_of(const key_band &band, int begin, int end)
{
    const int lo = max(min(begin + band.lo, band.Sk), 0), hi = max(min(end - 1 + band.hi, band.Sk), lo);
    const int first = lo / BN;
    return { first, hi > lo ? (hi + BN - 1) / BN : first };
}

/* The part of a work tile that one consumer computes. Its 64 rows see all keys of tiles [free_first, free_last), and no
 * key of tile last_visible or of later tiles. Tile last_visible - 1 is the last tile that they see. few_keys is 1 if
 * they see none of its keys but the first FEW, otherwise 0. If the consumer has no rows or the work tile has no keys,
 * last_visible is the work tile's first tile of keys. */
struct __align__(16) warpgroup_tile
{
    int free_first, free_last, last_visible, few_keys;
};

/* Returns the part of a work tile that one consumer computes. The consumer's 64 rows begin at row0. Sq: number of rows
 * of the sequence. Row r belongs to query r >> shift. FEW: see warpgroup_tile::few_keys. */
template <int BN, int FEW = BN>
DEVICE warpgroup_tile warpgroup_tile_of(const key_band &band, int row0, int Sq, int first, int last, int shift = 0)
{
    const int query = row0 >> shift, last_query = (row0 + 63) >> shift;
    const int end = max(min(last_query + band.hi, band.Sk), 1);
    warpgroup_tile y;
    y.free_first = (max(last_query + band.lo, 0) + BN - 1) / BN;
    y.free_last = max(min(query + band.hi, band.Sk), 0) / BN;
    y.last_visible = max(min((end + BN - 1) / BN, last), first + 1);
    if (row0 >= Sq || first >= last) y.last_visible = first;
    y.few_keys = end - (y.last_visible - 1) * BN <= FEW;
    return y;
}

/* ---- The counters from which blocks claim work tiles ------------------------------------------------------------- */

namespace {

/* A counter has two words: the number of work tiles claimed, and the number of blocks that have ended. Both are 0
 * between kernels. Each stream has its own counter (cuda_chip.counter). */

/* Every block must call this at its end. The last block resets the counter for the stream's next kernel. */
DEVICE void leave_counter(int *counter)
{
    if (atomicAdd(counter + 1, 1) == (int)gridDim.x - 1) counter[0] = counter[1] = 0;
}

} // namespace

#endif
