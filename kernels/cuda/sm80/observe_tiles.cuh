/* observe_tiles.cuh: code that the kernels of an observe (statistics of attention weights) on tensor cores share. A
 * block owns BM rows of q (for key_mass: of k), which stay in registers as fragments, and visits tiles of BN rows of k
 * (or q). There are two buffers for tiles, so a tile takes only one barrier, and the next tile is copied while products
 * are computed. scores.cuh explains which elements of S a lane has. */
#ifndef ATTN_SM80_OBSERVE_TILES_CUH
#define ATTN_SM80_OBSERVE_TILES_CUH

#include "forward_steps.cuh"
#include "observe_common.cuh"
#include "seen_tiles.cuh"

namespace {

/* With options (softcap, bias, masks, ...), and for head sizes above 128, a warp computes only 16 rows, because
 * registers are scarce. */
template <int D, bool SCORE_MODS_> struct shape {
    static const bool SCORE_MODS = SCORE_MODS_;
    static const int WARPS = D > 128 ? 8 : 4, THREADS = 32 * WARPS, BN = 64, MT = D > 128 || SCORE_MODS ? 1 : 2,
                     BM = 16 * MT * WARPS,
                     BLOCKS = D > 128      ? 1
                              : SCORE_MODS ? 3
                                           : 2;
};

template <int D, bool SCORE_MODS> struct stages {
    typedef shape<D, SCORE_MODS> Shape;
    /* memory for two tiles; at first it holds the block's own rows */
    alignas(1024) uint16_t tile[2][Shape::BN * D];
    static_assert(Shape::BM <= 2 * Shape::BN, "the own rows fit");
};

template <typename T_, int D_, bool SCORE_MODS_, bool PAGED_> struct variant {
    typedef T_ T;
    static const int D = D_;
    static const bool SCORE_MODS = SCORE_MODS_, PAGED = PAGED_;
    typedef shape<D, SCORE_MODS> Shape;
};

template <bool SCORE_MODS, typename T, int D, typename F> auto with_pages(const attn_plan *plan, F visit)
{
    return has_pages(plan) ? visit(variant<T, D, SCORE_MODS, true>()) : visit(variant<T, D, SCORE_MODS, false>());
}
template <bool SCORE_MODS, typename T, typename F> auto with_width(const attn_plan *plan, F visit)
{
    const int64_t D = plan->geometry.dims.D;
    return D <= 64    ? with_pages<SCORE_MODS, T, 64>(plan, visit)
           : D <= 128 ? with_pages<SCORE_MODS, T, 128>(plan, visit)
                      : with_pages<SCORE_MODS, T, 256>(plan, visit);
}
template <bool SCORE_MODS, typename F> auto with_options(const attn_plan *plan, F visit)
{
    return plan->problem->q.dtype == ATTN_BF16 ? with_width<SCORE_MODS, __nv_bfloat16>(plan, visit)
                                               : with_width<SCORE_MODS, __half>(plan, visit);
}
template <typename F> auto with_variant(const attn_plan *plan, F visit)
{
    return has_options(plan) ? with_options<true>(plan, visit) : with_options<false>(plan, visit);
}

template <int D, class Shape> DEVICE void take_rows(uint32_t (&own)[Shape::MT][D / 16][4], uint32_t down)
{
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int mt = 0; mt < Shape::MT; mt++)
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) a_rows_of<D>(own[mt][kk], down, 0, (warp * Shape::MT + mt) * 16, kk * 16);
}

/* Computes the scores of the tiles `tile`, next(tile), ... below `end`, and calls visit(S, tile, after, stage) for
 * each: S are the scores, `after` is the next tile, and `stage` the index of the buffer that holds the tile. load(to,
 * tile) begins to copy a tile; arrive() waits for the copy and is a barrier of the block. */
template <typename T, int D, class Shape, class LOAD, class ARRIVE, class NEXT, class VISIT>
DEVICE void for_tiles(uint16_t (&tiles)[2][Shape::BN * D], const uint32_t (&own)[Shape::MT][D / 16][4], int tile,
                      int end, LOAD load, ARRIVE arrive, NEXT next, VISIT visit)
{
    const uint32_t across = kept(smem_addr(tiles) + lane_across<D>(threadIdx.x % 32));
    if (tile < end) load(tiles[0], tile);
    cp_async_commit();
    for (int stage = 0; tile < end; stage ^= 1) {
        const int after = next(tile);
        cp_async_wait<0>();
        arrive(); /* now the tile has arrived for all threads, and no thread reads the previous tile */
        if (after < end) load(tiles[stage ^ 1], after);
        cp_async_commit();
        float S[Shape::MT][Shape::BN / 8][4] = {};
        scores<T, D>(
            S,
            [&](uint32_t(&f)[4], int mt, int kk) {
#pragma unroll
                for (int e = 0; e < 4; e++) f[e] = own[mt][kk][e];
            },
            [&](uint32_t(&f)[4], int nt, int kk) {
                b_rows_of<D>(f, across, (uint32_t)(stage * sizeof tiles[0]), nt * 8, kk * 16);
            });
        visit(S, tile, after, stage);
        tile = after;
    }
    cp_async_wait<0>();
}

DEVICE float visible_score(const cuda_args &a, const head_args &x, const limits &limit, int i, int key, float dot)
{
    float derivative;
    const bool sees = i < x.s.Sq && key >= i + limit.lo && key < i + limit.hi && key < limit.Sk &&
                      visible_by_mask(a, x, i, key);
    return sees ? score(a, x, i, key, dot, &derivative) : -CUDART_INF_F;
}

/* Applies masks and options (softcap, bias, ...) to S, the scores of the block's queries q0, q0 + 1, ... (its rows) and
 * of the keys of tile number `tile` (its columns). Without options, the function only sets to -inf the scores of pairs
 * that causal, window or lengths hide; if `bounded` is false, it does nothing. */
template <class Shape, int NT>
DEVICE void finish_scores(float (&S)[Shape::MT][NT][4], scores_on_their_way<Shape> &way, const cuda_args &a,
                          const head_args &x, const limits &limit, int q0, int tile, bool bounded)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (Shape::SCORE_MODS) {
        change_scores<false>(S[0], lines_of<Shape::BN + 4>(&way.S[warp * 16]), lane, [&](int r, int c, float &s) {
            s = visible_score(a, x, limit, q0 + warp * 16 + r, tile * Shape::BN + c, s);
        });
    } else if (bounded) {
#pragma unroll
        for (int mt = 0; mt < Shape::MT; mt++)
            hide_keys(S[mt], limit, q0 + (warp * Shape::MT + mt) * 16 + lane / 4, tile * Shape::BN + lane % 4 * 2);
    }
}

/* Returns an element of S as a score in base 2, minus the row's `base`. */
template <bool SCORE_MODS> DEVICE float exponent(float s, float scale_log2, float base)
{
    return SCORE_MODS ? in_base_2(s) - base : fmaf(s, scale_log2, -base);
}

/* The tiles of keys that queries [q0, q1) see. Each of the tiles [first, last) has a key that at least one of these
 * queries sees. In the tiles [free_first, free_last), all of these queries see all keys. */
struct key_range {
    int first, last, free_first, free_last;
};
template <int BN> DEVICE key_range keys_seen(const limits &limit, int q0, int q1)
{
    key_range r;
    r.first = min(max(q0 + limit.lo, 0), limit.Sk) / BN;
    r.last = (max(min(q1 - 1 + limit.hi, limit.Sk), 0) + BN - 1) / BN;
    r.free_first = (max(q1 - 1 + limit.lo, 0) + BN - 1) / BN;
    r.free_last = max(min(q0 + limit.hi, limit.Sk), 0) / BN;
    return r;
}

} // namespace

#endif
