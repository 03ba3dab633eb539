/* kept.cuh: what the two kernels of the wide backward (wide_backward.cu) share: the parts of a problem, the
 * memory in which P and dS are kept, and the pipeline of a block.
 *
 *   row tile   ROWS queries of one query head. A key/value head has `query_tiles` row tiles for each query head of its
 *              group, one query head after the other.
 *   key tile   KEYS keys
 *   block      64 queries and 64 keys of P or of dS: 64 rows of 128 bytes with the 128-byte swizzle of tma.cuh, one row
 *              per query. A product uses a block K-major (dQ = dS K) or M-major (dV = P^T dO).
 *   part       the row tiles for which P and dS are in memory at the same time: row tiles of one or several key/value
 *              heads. The kernel scores_of_part computes P and dS of a part, and the kernel products_of_part multiplies
 *              them.
 *
 * Memory keeps P and dS of the key tiles that a row tile sees, from the first such key tile on. A pair of a row tile
 * and a key tile has 8 blocks of P and then 8 blocks of dS. Pairs that a mask hides have P = dS = 0 in memory. */
#ifndef ATTN_SM90_KEPT_CUH
#define ATTN_SM90_KEPT_CUH

#include "kernels/cuda/sm90/backward/backward.cuh"
#include "kernels/cuda/sm90/layer/pairs.cuh"
#include "kernels/cuda/sm90/layer/score_mods.cuh"

namespace {

enum { ROWS = 128, KEYS = 256, STEP = 64, BLOCK = STEP * STEP };
enum { KEEP_KEYS = 128 };
/* HALF_TILE: elements of P (or of dS) for a row tile and a key tile; TILE: elements of P and dS together */
enum { HALF_TILE = ROWS * KEYS, TILE = 2 * HALF_TILE };
enum { THREADS = 384, STAGES = 4 };
/* Number of pieces of work whose descriptions shared memory holds. The producer is at most STAGES buffers ahead of the
 * slower consumer, and each piece takes at least one buffer, so no description is overwritten too early. */
enum { WORKS = STAGES + 2 };

/* A part of the problem: the row tiles (128 queries each) `row` to row + rows - 1 of each of the key/value heads `head`
 * to head + heads - 1. Heads are counted over all batch rows. A part with only some row tiles of a head has one
 * head. */
struct kept_part {
    int head, heads, row, rows;
    bool first, last; /* whether this part contains the first, and the last, row tile of its heads */
};

struct kept_plan {
    kept_part part;
    uint16_t *kept;  /* P and dS of the part of the problem that is in memory: `width` times TILE elements for each row
                      * tile (128 queries) */
    float *sums;     /* float32 sums of dK and dV over the parts so far, if row tiles of a head are in several parts */
    int width;       /* the largest number of key tiles (256 keys each) that a row tile (128 queries) sees */
    int query_tiles; /* number of row tiles of a query head; in packed problems some row tiles have no rows */
    int key_blocks;  /* number of blocks of 128 keys of a key/value head; in packed problems some have no rows */
    int columns_D, columns_Dv; /* number of blocks of columns of dQ and dK (columns_D), and of dV (columns_Dv) */
    saved s;
    flash_mask mask;
    kept_bits keep;
    pair_bias bias;
    pair_dropout dropout;
    score_mods mods;
    float scale;
    int *counter;
};

struct kept_maps {
    CUtensorMap Q, K, V, dO;             /* for scores_of_part: a box has ROWS queries or KEYS keys */
    CUtensorMap Q_step, K_step, dO_step; /* for products_of_part: a box has STEP queries or keys */
};

/* ---- Row tiles (128 queries each), and which keys they see ------------------------------------------------------- */

struct row_tile {
    attn_sequence s;
    int b, h, hk, i0, Sq;
    key_band band;
    key_tiles keys;
};

/* Returns the index of sequence b's first row tile within a head. */
DEVICE int first_row_tile(const attn_geometry &g, int b)
{
    return g.dims.packed ? g.cu_q[b] / ROWS + b : 0;
}

DEVICE key_tiles keys_of_rows(const key_band &band, int i0, int Sq)
{
    if (i0 >= Sq) return { 0, 0 };
    return key_tiles_of<KEYS>(band, i0, min(i0 + ROWS, Sq));
}

/* Returns row tile `row` of key/value head `head`; the head is counted over all batch rows. */
DEVICE row_tile row_tile_of(const cuda_args &a, const kept_plan &p, int head, int row)
{
    const attn_geometry &g = a.g;
    const int Hk = (int)g.dims.Hk, member = row / p.query_tiles;
    int tile = row - member * p.query_tiles;
    row_tile x;
    x.b = head / Hk;
    x.hk = head - x.b * Hk;
    x.h = x.hk * (int)g.group + member;
    if (g.dims.packed) x.b = sequence_of_tile(g.cu_q, g.dims.B, ROWS, 1, tile);
    tile -= first_row_tile(g, x.b);
    x.s = attn_sequence_of(&g, x.b);
    x.i0 = tile * ROWS;
    x.Sq = (int)x.s.Sq;
    x.band = band_of(g, x.s);
    x.keys = keys_of_rows(x.band, x.i0, x.Sq);
    return x;
}

/* Returns whether FlashMask hides all, some or none of the pairs of the row tile (128 queries) and the key tile (256
 * keys). */
DEVICE attn_tile_kind mask_kind_of(const cuda_args &a, const kept_plan &p, int b, int h, int i0, int Sq, int key_tile)
{
    if (!p.mask.bounds) return ATTN_TILE_FREE;
    return attn_mask_classify(&extremes_of(p.mask, b, h, (int)a.g.dims.H)[key_tile], i0, min(i0 + ROWS, Sq));
}

/* Returns whether FlashMask and keep_mask may leave a pair of the row tile (128 queries) and the key tile (256 keys)
 * visible. */
DEVICE bool shows(const cuda_args &a, const kept_plan &p, int b, int h, int i0, int Sq, int key_tile)
{
    if (mask_kind_of(a, p, b, h, i0, Sq, key_tile) == ATTN_TILE_HIDDEN) return false;
    if (!p.keep.words) return true;
    int some = 0;
    for (int i = i0; i < min(i0 + ROWS, Sq); i += KIND_ROWS)
        for (int n = key_tile * (KEYS / KEEP_KEYS); n < min((key_tile + 1) * (KEYS / KEEP_KEYS), p.keep.tiles); n++)
            some |= kind_of(p.keep, b, h, i, n);
    return some & SOME_SEEN;
}

/* Returns the address of P of a row tile (128 queries) and a key tile (256 keys); dS follows. `head` is counted from
 * the part's first head, `first` is the first key tile that the row tile sees. */
DEVICE uint16_t *kept_at(const kept_plan &p, int head, int row, int first, int key_tile)
{
    return p.kept + (((int64_t)head * p.part.rows + row - p.part.row) * p.width + key_tile - first) * TILE;
}

/* ---- The pipeline of a block: shared memory and barriers --------------------------------------------------------- */

/* A block's shared memory. FIRST and SECOND: number of elements of the first and of the second operand in a buffer.
 * WORK: the type that describes a piece of work. The producer writes the description before it fills the first buffer
 * for this piece. */
template <int FIRST, int SECOND, class WORK> struct kept_shared {
    struct alignas(1024) stage {
        uint16_t first[FIRST], second[SECOND];
    } stages[STAGES];
    /* rows: number of rows of the second operand that exist; last: this is the last buffer of a piece of work */
    struct {
        int rows;
        bool last;
    } steps[STAGES];
    WORK works[WORKS];
    barrier_pairs<STAGES> bars;
};

template <class SHARED> DEVICE void begin_block(SHARED &sm)
{
    if (threadIdx.x == 0) {
        init_pairs(sm.bars, 2);
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_prerequisites();
}

} // namespace

#endif
