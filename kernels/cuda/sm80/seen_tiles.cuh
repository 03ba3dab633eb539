/* seen_tiles.cuh: a list of the tiles in which FlashMask and keep_mask leave a pair visible, one bit per tile. A block
 * skips the other tiles, which changes no bit of a result except the sign of a 0. Causal, window and lengths limit the
 * tiles to a range, which needs no list. */
#ifndef ATTN_SM80_SEEN_TILES_CUH
#define ATTN_SM80_SEEN_TILES_CUH

#include <type_traits>

#include "kernels/cuda/common/args.cuh"

/* number of bits of the list; tiles with higher numbers count as visible */
enum { SEEN_TILES = 4096 };
struct seen_tiles {
    uint32_t bits[SEEN_TILES / 32];
};

/* Returns whether a FlashMask may leave any of keys j0 to j1 - 1 visible to any of queries i0 to i1 - 1. The result is
 * never false if one of these pairs is visible. The whole warp calls it. */
DEVICE bool flash_mask_shows(const cuda_args &a, const head_args &x, int i0, int i1, int j0, int j1)
{
    const attn_view &view = a.g.view[ATTN_T_mask_startend_rows];
    const unsigned all = 0xffffffff;
    attn_mask_extremes e = attn_mask_extremes_init();
    for (int j = j0 + (int)(threadIdx.x % 32); j < j1; j += 32) {
        const int32_t *const bounds = (const int32_t *)view.data + attn_at(&view, x.b, x.h / a.g.mask_group, j);
        attn_mask_extremes_add(&e, attn_mask_of(bounds, a.g.mask_bounds, a.g.causal, x.s.Sq));
    }
    e.min.lts = __reduce_min_sync(all, e.min.lts), e.max.lts = __reduce_max_sync(all, e.max.lts);
    e.min.lte = __reduce_min_sync(all, e.min.lte), e.max.lte = __reduce_max_sync(all, e.max.lte);
    e.min.uts = __reduce_min_sync(all, e.min.uts), e.max.uts = __reduce_max_sync(all, e.max.uts);
    e.min.ute = __reduce_min_sync(all, e.min.ute), e.max.ute = __reduce_max_sync(all, e.max.ute);
    return attn_mask_classify(&e, i0, i1) != ATTN_TILE_HIDDEN;
}

/* Returns whether a keep_mask leaves any of keys [j0, j1) visible to any of queries [i0, i1). The search usually ends
 * at the first row, because in most tiles this row keeps a key. */
DEVICE bool keep_mask_shows(const cuda_args &a, const head_args &x, int i0, int i1, int j0, int j1)
{
    enum { TOGETHER = 8 }; /* number of rows of the mask that are loaded together, to hide latency */
    const attn_view &keep = a.g.view[ATTN_T_keep_mask];
    const int64_t from = attn_keep_from(&a.g, &x.s);
    /* keys before `from` have no column in keep_mask (keep_mask_at_end), so they are visible */
    if (j0 < from) return true;
    const uint8_t *row = (const uint8_t *)keep.data + attn_at(&keep, x.b, x.h, i0) + j0 - from + threadIdx.x % 32;
    for (int left = i1 - i0, rows = 1; left > 0; row += rows * keep.row, left -= rows, rows = TOGETHER) {
        uint32_t kept = 0;
        for (int j = (int)(threadIdx.x % 32); j < j1 - j0; j += 32)
#pragma unroll
            for (int n = 0; n < TOGETHER; n++)
                if (n < rows && n < left) kept |= row[n * keep.row + j - (int)(threadIdx.x % 32)];
        if (__any_sync(0xffffffff, kept)) return true;
    }
    return false;
}

struct pair_tile {
    int h, i0, i1, j0, j1;
};

/* Sets the bits of tiles `first` to `last` - 1 of sequence b; a bit is 0 only if FlashMask or keep_mask hides the whole
 * tile. place(n) returns tile n. All threads of the block call it. */
template <int THREADS, class PLACE>
DEVICE void list_seen_tiles(const cuda_args &a, int b, int first, int last, seen_tiles &seen, PLACE place)
{
    const bool bounds = a.g.view[ATTN_T_mask_startend_rows].data, keep = a.g.view[ATTN_T_keep_mask].data;
    if (last > SEEN_TILES) last = SEEN_TILES;
    for (int n = first / 32 + (int)threadIdx.x; n * 32 < last; n += THREADS) seen.bits[n] = bounds || keep ? 0 : ~0u;
    __syncthreads();
    for (int n = first + (int)threadIdx.x / 32; n < last && (bounds || keep); n += THREADS / 32) {
        const pair_tile t = place(n);
        const head_args x = head_args_of(a, b, t.h);
        const bool shows = (!bounds || flash_mask_shows(a, x, t.i0, t.i1, t.j0, t.j1)) &&
                           (!keep || keep_mask_shows(a, x, t.i0, t.i1, t.j0, t.j1));
        if (shows && threadIdx.x % 32 == 0) atomicOr(&seen.bits[n / 32], 1u << n % 32);
    }
    __syncthreads();
}

template <int BN, int THREADS>
static __device__ __noinline__ void list_seen_keys(const cuda_args &a, int b, int h, int i0, int i1, int first,
                                                   int last, seen_tiles &seen)
{
    const int Sk = (int)attn_sequence_of(&a.g, b).Sk;
    list_seen_tiles<THREADS>(a, b, first, last, seen, [&](int n) {
        return pair_tile{ h, i0, i1, n * BN, min(n * BN + BN, Sk) };
    });
}

/* Lists the rounds (tiles of BM queries) that see keys j0 to j1 - 1: tiles `first` to `first` + `tiles` - 1 of each
 * head of the group, head after head. */
template <int BM, int THREADS>
static __device__ __noinline__ void list_seen_rounds(const cuda_args &a, int b, int hk, int j0, int j1, int first,
                                                     int tiles, seen_tiles &seen)
{
    const int Sq = (int)attn_sequence_of(&a.g, b).Sq;
    list_seen_tiles<THREADS>(a, b, 0, tiles * (int)a.g.group, seen, [&](int n) {
        const int i0 = (first + n % tiles) * BM;
        return pair_tile{ hk * (int)a.g.group + n / tiles, i0, min(i0 + BM, Sq), j0, j1 };
    });
}

/* Returns the last visible tile before tile n, or `first` - 1 if there is none. */
DEVICE int seen_tile_below(const seen_tiles &seen, int n, int first)
{
    for (n--; n >= first && n < SEEN_TILES; n = n / 32 * 32 - 1) {
        const uint32_t bits = seen.bits[n / 32] << (31 - n % 32);
        if (bits) return max(n - __clz(bits), first - 1);
    }
    return max(n, first - 1);
}

/* Returns the first visible tile after tile n, or `end` if there is none. */
DEVICE int seen_tile_above(const seen_tiles &seen, int n, int end)
{
    for (n++; n < end && n < SEEN_TILES; n = n / 32 * 32 + 32) {
        const uint32_t bits = seen.bits[n / 32] >> n % 32;
        if (bits) return min(n + __ffs(bits) - 1, end);
    }
    return min(n, end);
}

/* last_tile() lists the visible tiles among the key tiles [first, last), and returns the last visible tile plus 1.
 * tile_below() returns the visible tile before n. If LISTED is false, all tiles count as visible. */
template <bool LISTED, int BN, int THREADS, class SEEN>
DEVICE int last_tile(const cuda_args &a, int b, int h, int i0, int i1, int first, int last, SEEN &seen)
{
    if constexpr (LISTED) {
        list_seen_keys<BN, THREADS>(a, b, h, i0, i1, first, last, seen);
        return seen_tile_below(seen, last, first) + 1;
    } else return last;
}

template <bool LISTED, class SEEN> DEVICE int tile_below(const SEEN &seen, int n, int first)
{
    if constexpr (LISTED) return seen_tile_below(seen, n, first);
    else return n - 1;
}

#endif
