/* observe_mass.cu: computes key_mass, the sum of each key's probabilities over the queries, on tensor cores. A block
 * computes the sums of some keys, for one query head, and visits tiles of queries in ascending order. S^T has a row for
 * each key, so a lane adds up P of its keys in registers: float32 within a tile, double over tiles. */
#include "observe_tiles.cuh"

namespace {

template <int D, bool SCORE_MODS> struct shared {
    typedef shape<D, SCORE_MODS> Shape;
    stages<D, SCORE_MODS> tiles;
    /* `base` (x) and `inverse` (y) of each query of a tile (see tile_rows); x is INFINITY if all P of the query are
     * 0 */
    float2 end[2][Shape::BN];
    float S[SCORE_MODS ? Shape::BM : 1][SCORE_MODS ? Shape::BN + 2 : 1];
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
};

struct key_place {
    int64_t b;
    int j0;
};

template <int BM> DEVICE key_place key_place_of(const cuda_args &a)
{
    const attn_dims &d = a.g.dims;
    int64_t b = blockIdx.z;
    int tile = a.first_tile + (int)blockIdx.x;
    if (attn_keys_are_packed(&d)) {
        b = sequence_of_tile(a.g.cu_k, d.B, BM, 1, tile);
        tile -= a.g.cu_k[b] / BM + (int)b;
    }
    return { b, tile * BM };
}

/* Sets the scores of queries with a base of INFINITY to -inf, so that P is 0 and not NaN. (Such queries have only P of
 * 0, or tensor cores cannot compute them.) */
template <int MT, int NT> DEVICE void hide_queries_without_base(float (&S)[MT][NT][4], const float2 *end)
{
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (end[nt * 8 + threadIdx.x % 4 * 2 + e].x < CUDART_INF_F) continue;
#pragma unroll
            for (int mt = 0; mt < MT; mt++) S[mt][nt][e] = S[mt][nt][2 + e] = -CUDART_INF_F;
        }
}

template <class V>
__global__ void __launch_bounds__(V::Shape::THREADS, V::Shape::BLOCKS)
    mass_of_tiles(const __grid_constant__ cuda_args a, float scale_log2, const __grid_constant__ tile_rows rows)
{
    typedef typename V::T T;
    typedef typename V::Shape Shape;
    const int D = V::D, BM = Shape::BM, BN = Shape::BN, MT = Shape::MT, THREADS = Shape::THREADS;
    const bool SCORE_MODS = V::SCORE_MODS;
    typedef shared<V::D, V::SCORE_MODS> memory;
    memory &sm = block_memory<memory>();
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const key_place place = key_place_of<BM>(a);
    const head_args x = head_args_of(a, place.b, blockIdx.y);
    const limits limit = limits_of(g, x.s);
    const bool packed = attn_keys_are_packed(&g.dims);
    const int j0 = place.j0,
              shown = !packed && g.observe.shown_keys > 0 ? (int)attn_min64(g.observe.shown_keys, limit.Sk) : limit.Sk;
    if (j0 >= shown) return;
    const int j1 = min(j0 + BM, limit.Sk), Sq = (int)x.s.Sq;
    /* Each of the queries i0 to i1 - 1 sees one of the block's keys. If key_mass_rows is set, only the last
     * key_mass_rows queries of the sequence count. */
    const int64_t last_rows = g.observe.key_mass_rows > 0 ? g.observe.key_mass_rows : Sq;
    const int i0 = (int)attn_max64(attn_rows_of(&g, &x.s, j0).lo, Sq - last_rows),
              i1 = (int)attn_rows_of(&g, &x.s, j1 - 1).hi, first = i0 / BN, last = i0 < i1 ? (i1 + BN - 1) / BN : 0;
    key_loader<T, D, THREADS, false, V::PAGED> K(g, g.view[ATTN_T_k], x.b, x.hk, x.s.k_start, limit.Sk, g.dims.D);
    const loader<D, THREADS> Q(g.view[ATTN_T_q], x.b, x.h, x.s.q_start, Sq, g.dims.D);
    K.template load<BM>(sm.tiles.tile[0], j0);
    cp_async_commit();
    if constexpr (V::SCORE_MODS)
        list_seen_tiles<THREADS>(a, (int)x.b, first, last, sm.seen, [&](int n) {
            return pair_tile{ (int)x.h, n * BN, min(n * BN + BN, Sq), j0, j1 };
        });
    uint32_t own[MT][D / 16][4];
    cp_async_wait<0>();
    __syncthreads();
    take_rows<D, Shape>(own, smem_addr(&sm) + lane_down<D>(lane));
    __syncthreads();

    const auto from = [&](int n) {
        if constexpr (V::SCORE_MODS) return seen_tile_above(sm.seen, n - 1, last);
        else return n;
    };
    /* returns `base` (x) and `inverse` (y) of query t of tile n, where t is the calling thread (t < BN) */
    const auto end_of = [&](int n) {
        const int i = n * BN + threadIdx.x;
        if (threadIdx.x >= BN || i < i0 || i >= i1) return make_float2(CUDART_INF_F, 0);
        return rows.end[lse_at(a, x, i)];
    };
    const int begin = from(first);
    float2 end = make_float2(0, 0);
    /* whether this kernel leaves out P of some query of the tile, because that query lies outside the block's queries
     * or tensor cores cannot compute it */
    bool skips = false;
    double total[MT][2] = {};
    if (begin < last) {
        end = end_of(begin);
        if (threadIdx.x < BN) sm.end[0][threadIdx.x] = end;
    }
    for_tiles<T, D, Shape>(
        sm.tiles.tile, own, begin, last,
        [&](uint16_t(&to)[BN * D], int n) {
            Q.template load<BN>(to, n * BN);
            if (n != begin) end = end_of(n);
        },
        [&] { skips = __syncthreads_or(threadIdx.x < BN && end.x == CUDART_INF_F); },
        [&](int n) { return from(n + 1); },
        [&](float(&S)[MT][BN / 8][4], int n, int after, int stage) {
            if (SCORE_MODS) {
                change_scores<true>(S[0], lines_of<BN + 2>(sm.S[warp * 16]), lane, [&](int r, int c, float &s) {
                    s = visible_score(a, x, limit, n * BN + c, j0 + warp * 16 + r, s);
                });
            } else {
                const int i = n * BN;
                const bool free = j0 >= i + BN - 1 + limit.lo && j0 + BM - 1 < i + limit.hi && j0 + BM <= limit.Sk;
#pragma unroll
                for (int mt = 0; mt < MT && !free; mt++)
                    hide_queries(S[mt], limit, j0 + (warp * MT + mt) * 16 + lane / 4, i + lane % 4 * 2);
            }
            if (skips) hide_queries_without_base(S, sm.end[stage]);
            float sum[MT][2] = {};
#pragma unroll
            for (int nt = 0; nt < BN / 8; nt++) {
                const float4 two = *(const float4 *)&sm.end[stage][nt * 8 + lane % 4 * 2];
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float base = e % 2 ? two.z : two.x, inverse = e % 2 ? two.w : two.y;
                        const float p = exp2_fast(exponent<SCORE_MODS>(S[mt][nt][e], scale_log2, base));
                        sum[mt][e / 2] = fmaf(p, inverse, sum[mt][e / 2]);
                    }
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int half = 0; half < 2; half++) total[mt][half] += (double)sum[mt][half];
            if (after < last && threadIdx.x < BN) sm.end[stage ^ 1][threadIdx.x] = end;
        });
    const attn_view &view = g.view[ATTN_T_key_mass];
    for_own_rows<Shape>([&](int mt, int half, int r) {
        double sum = total[mt][half];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (lane % 4 == 0 && j0 + r < shown)
            ((float *)view.data)[attn_at(&view, x.b, x.h, 0) + x.s.k_start + j0 + r] = (float)sum;
    });
}

} // namespace

cudaError_t observe_mass_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                              cudaStream_t stream)
{
    return with_variant(plan, [&](auto v) {
        typedef decltype(v) V;
        const attn_dims &d = a.g.dims;
        const int BM = V::Shape::BM;
        const dim3 grid = attn_keys_are_packed(&d) ? dim3((unsigned)(d.Sk / BM + d.B), (unsigned)d.H)
                                                   : dim3((unsigned)attn_tiles(d.Sk, BM), (unsigned)d.H, (unsigned)d.B);
        return launch_share<mass_of_tiles<V>>(chip, a, grid, 1, V::Shape::THREADS, sizeof(shared<V::D, V::SCORE_MODS>),
                                              stream, (float)a.g.scale * LOG2E, rows);
    });
}

size_t observe_mass_shared(const attn_plan *plan)
{
    return with_variant(plan, [](auto v) { return sizeof(shared<decltype(v)::D, decltype(v)::SCORE_MODS>); });
}
