/* observe_rows.cu: computes for an observe, on tensor cores, each row's largest score m, l = sum exp2(z - m) and e =
 * sum exp2(z - m) (z - m), where z are the row's scores in base 2. If only maxima are requested, no exponential is
 * computed. A second kernel finds the largest scores (top_keys).
 *
 * Each lane has its own m, l and e over its own keys of a row, so lanes exchange no data in the loop. In the loop, m
 * may be up to 8 (base 2) below the lane's largest score, so that l and e are rescaled only once or twice. At the end
 * of a chunk of keys the lanes' sums are merged; then the sums of the chunks are merged, in order. */
#include "kernels/cuda/simple/observe_row.cuh"
#include "observe_tiles.cuh"

namespace {

template <int D, bool SCORE_MODS> struct shared {
    stages<D, SCORE_MODS> tiles;
    scores_on_their_way<shape<D, SCORE_MODS>> way;
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
    /* for each row, over the keys so far: x is the largest score; y and z are the sums l and e, relative to x; w is 1
     * (see observed_parts) */
    float4 row[shape<D, SCORE_MODS>::BM];
};

/* Adds a tile's scores to the maxima and sums of the thread's two rows; S is overwritten. The exponents of hidden pairs
 * are set to finite numbers: e is a sum of P times exponent, and 0 * -inf would be NaN. */
template <int SUMS, bool SCORE_MODS, int NT>
DEVICE void add_tile(float (&S)[NT][4], lane_row (&rows)[2], float scale_log2, bool bounded)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        lane_row &row = rows[half];
        float top = -CUDART_INF_F;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) top = max_or_nan(top, max_or_nan(S[nt][half * 2], S[nt][half * 2 + 1]));
        row.most = max_or_nan(row.most, top);
        if (!SUMS) continue;
        const float y = exponent<SCORE_MODS>(top, scale_log2, 0);
        if (y > row.m + 8) {
            const float scale = exp2_fast(row.m - y);
            row.e = scale == 0 ? 0 : scale * (row.e + (row.m - y) * row.l);
            row.l *= scale;
            row.m = y;
        }
        /* m is -inf until the row has seen a key; -inf - -inf would be NaN */
        const float base = row.m == -CUDART_INF_F ? 0 : row.m;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &s = S[nt][half * 2 + e];
                s = exponent<SCORE_MODS>(s, scale_log2, base);
            }
    }
    if (!SUMS) return;
    if (SCORE_MODS || bounded)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[nt][e] = max_or_nan(S[nt][e], -1000);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float l = 0, sum = 0;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float exponent = S[nt][half * 2 + e], p = exp2_fast(exponent);
                l += p;
                if (SUMS > 1) sum = fmaf(p, exponent, sum);
            }
        rows[half].l += l;
        rows[half].e += sum;
    }
}

/* SUMS is 0 for maxima only, 1 for maxima and the sums l, 2 for maxima and the sums l and e (observed_parts). */
template <class V, int SUMS>
__global__ void __launch_bounds__(V::Shape::THREADS, V::Shape::BLOCKS)
    rows_of_tiles(const __grid_constant__ cuda_args a, limits whole, float scale_log2,
                  const __grid_constant__ observed_parts parts)
{
    typedef typename V::T T;
    typedef typename V::Shape Shape;
    const int D = V::D, BM = Shape::BM, BN = Shape::BN, MT = Shape::MT, THREADS = Shape::THREADS;
    const bool SCORE_MODS = V::SCORE_MODS;
    typedef shared<V::D, V::SCORE_MODS> memory;
    memory &sm = block_memory<memory>();
    const attn_geometry &g = a.g;
    int number;
    const int tile = shared_tile(a, parts.blocks, &number), lane = threadIdx.x % 32;
    const row_place place = row_place_of<BM>(a, whole,
                                             make_uint3(gridDim.x - 1 + a.first_tile - tile, blockIdx.y, blockIdx.z));
    if (!place.exists) return;
    const loader<D, THREADS> Q(g.view[ATTN_T_q], place.b, place.h, place.q_start, place.Sq, g.dims.D);
    Q.template load<BM>(sm.tiles.tile[0], place.i0);
    cp_async_commit();
    const int q1 = min(place.i0 + BM, place.Sq);
    const limits limit = place.limit;
    const key_range keys = keys_seen<BN>(limit, place.i0, q1);
    if constexpr (V::SCORE_MODS)
        list_seen_keys<BN, THREADS>(a, place.b, place.h, place.i0, q1, keys.first, keys.last, sm.seen);
    key_loader<T, D, THREADS, false, V::PAGED> K(g, g.view[ATTN_T_k], place.b, place.hk, place.k_start, limit.Sk,
                                                 g.dims.D);
    const head_args x = head_args_of(a, place.b, place.h);
    const bool alone = parts.blocks == 1;
    for_own_rows<Shape>([&](int, int, int r) {
        if (lane % 4 == 0) sm.row[r] = make_float4(-CUDART_INF_F, 0, 0, 1);
    });
    uint32_t own[MT][D / 16][4];
    cp_async_wait<0>();
    __syncthreads();
    take_rows<D, Shape>(own, smem_addr(&sm) + lane_down<D>(lane));
    __syncthreads();

    lane_row rows[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) rows[mt][0] = rows[mt][1] = no_keys();
    const int of_chunk = OBSERVE_CHUNK / BN;
    /* Returns the first tile from tile n on that this block computes. If several blocks share the keys, this block has
     * every parts.blocks-th chunk of keys, from chunk `number` on. */
    const auto own_tile = [&](int n) {
        const int blocks = parts.blocks;
        for (;;) {
            if constexpr (V::SCORE_MODS) n = seen_tile_above(sm.seen, n - 1, keys.last);
            if (alone || n >= keys.last) return n;
            const int off = (n / of_chunk + blocks - number) % blocks;
            if (off == 0) return n;
            n = (n / of_chunk + blocks - off) * of_chunk;
        }
    };
    for_tiles<T, D, Shape>(
        sm.tiles.tile, own, own_tile(keys.first), keys.last,
        [&](uint16_t(&to)[BN * D], int n) { K.template load<BN>(to, n * BN); }, [] { __syncthreads(); },
        [&](int n) { return own_tile(n + 1); },
        [&](float(&S)[MT][BN / 8][4], int n, int after, int) {
            const bool bounded = n < keys.free_first || n >= keys.free_last;
            finish_scores<Shape>(S, sm.way, a, x, limit, place.i0, n, bounded);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) add_tile<SUMS, SCORE_MODS>(S[mt], rows[mt], scale_log2, bounded);
            if (after < keys.last && after / of_chunk == n / of_chunk) return;
            for_own_rows<Shape>([&](int mt, int half, int r) {
                const float4 chunk = whole_row<SCORE_MODS>(rows[mt][half], scale_log2);
                if (lane % 4 == 0) sm.row[r] = merged<SCORE_MODS>(sm.row[r], chunk, scale_log2);
                if (lane % 4 == 0 && !alone && place.i0 + r < place.Sq) {
                    const int64_t at = lse_at(a, x, place.i0 + r);
                    parts.part[n / of_chunk * parts.rows + at] = chunk;
                }
                rows[mt][half] = no_keys();
            });
        });
    if (alone)
        for_own_rows<Shape>([&](int, int, int r) {
            if (lane % 4 == 0 && place.i0 + r < place.Sq) parts.part[lse_at(a, x, place.i0 + r)] = sm.row[r];
        });
}

/* ---- The largest scores of a row --------------------------------------------------------------------------------- */

/* Shared memory of tops_of_tiles(). Behind this struct lie the top scores of each row of the block, and then the top
 * keys. */
template <int D> struct top_shared {
    shared<D, true> of_rows;
    /* the smallest score in each row's list of top scores, or -inf if the list is not full */
    float least[shape<D, true>::BM];
};

template <class V>
__global__ void __launch_bounds__(V::Shape::THREADS, 1)
    tops_of_tiles(const __grid_constant__ cuda_args a, limits whole, const __grid_constant__ observed_rows results)
{
    typedef typename V::T T;
    typedef typename V::Shape Shape;
    const int D = V::D, BM = Shape::BM, BN = Shape::BN, MT = Shape::MT, THREADS = Shape::THREADS;
    typedef top_shared<V::D> memory;
    memory &sm = block_memory<memory>();
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, most = (int)g.observe.top;
    const row_place place = row_place_of<BM>(a, whole, blockIdx);
    if (!place.exists) return;
    const loader<D, THREADS> Q(g.view[ATTN_T_q], place.b, place.h, place.q_start, place.Sq, g.dims.D);
    auto &tiles = sm.of_rows.tiles.tile;
    Q.template load<BM>(tiles[0], place.i0);
    cp_async_commit();
    const int q1 = min(place.i0 + BM, place.Sq);
    const limits limit = place.limit;
    const key_range keys = keys_seen<BN>(limit, place.i0, q1);
    list_seen_keys<BN, THREADS>(a, place.b, place.h, place.i0, q1, keys.first, keys.last, sm.of_rows.seen);
    key_loader<T, D, THREADS, false, V::PAGED> K(g, g.view[ATTN_T_k], place.b, place.hk, place.k_start, limit.Sk,
                                                 g.dims.D);
    const head_args x = head_args_of(a, place.b, place.h);
    float *const tops = (float *)(&sm + 1);
    int *const top_keys = (int *)(tops + BM * most);
    for (int n = threadIdx.x; n < BM * most; n += THREADS) tops[n] = -CUDART_INF_F, top_keys[n] = -1;
    if (threadIdx.x < BM) sm.least[threadIdx.x] = -CUDART_INF_F;
    uint32_t own[MT][D / 16][4];
    cp_async_wait<0>();
    __syncthreads();
    take_rows<D, Shape>(own, smem_addr(&sm) + lane_down<D>(lane));
    __syncthreads();
    const auto list_of = [&](int r) {
        top_list top;
        for (int slot = 0; slot < 2; slot++) {
            const int n = lane + 32 * slot;
            top.z[slot] = n < most ? tops[r * most + n] : -CUDART_INF_F;
            top.key[slot] = n < most ? top_keys[r * most + n] : -1;
        }
        return top;
    };
    for_tiles<T, D, Shape>(
        tiles, own, seen_tile_above(sm.of_rows.seen, keys.first - 1, keys.last), keys.last,
        [&](uint16_t(&to)[BN * D], int n) { K.template load<BN>(to, n * BN); }, [] { __syncthreads(); },
        [&](int n) { return seen_tile_above(sm.of_rows.seen, n, keys.last); },
        [&](float(&S)[MT][BN / 8][4], int n, int, int) {
            auto &line = lines_of<BN + 4>(&sm.of_rows.way.S[warp * 16]);
            finish_scores<Shape>(S, sm.of_rows.way, a, x, limit, place.i0, n, true);
            for (int r = 0; r < 16 && place.i0 + warp * 16 + r < place.Sq; r++) {
                const int row = warp * 16 + r;
                const float z0 = line[r][lane], z1 = line[r][lane + 32], least = sm.least[row];
                if (!__any_sync(ALL_LANES, z0 > least || z1 > least)) continue;
                top_list top = list_of(row);
                add_to_top(top, most, true, z0, (int64_t)n * BN);
                add_to_top(top, most, true, z1, (int64_t)n * BN + 32);
                for (int slot = 0; slot < 2; slot++)
                    if (lane + 32 * slot < most) {
                        tops[row * most + lane + 32 * slot] = top.z[slot];
                        top_keys[row * most + lane + 32 * slot] = top.key[slot];
                    }
                const float now = top_least(top, most);
                __syncwarp(); /* after this barrier all lanes have read sm.least[row] */
                if (lane == 0) sm.least[row] = now;
            }
            __syncwarp();
        });
    const attn_view &keys_view = g.view[ATTN_T_top_keys], &weights = g.view[ATTN_T_top_weights];
    for (int r = warp * 16; r < warp * 16 + 16 && place.i0 + r < place.Sq; r++) {
        const int64_t at = lse_at(a, x, place.i0 + r), line = x.s.q_start + place.i0 + r;
        /* tensor cores cannot compute this row; simple/observe.cu finds its top keys */
        if (results.strange[at]) continue;
        const top_list top = list_of(r);
        for (int slot = 0; slot < 2; slot++) {
            const int n = lane + 32 * slot;
            if (n >= most) continue;
            const bool there = top.key[slot] >= 0;
            if (keys_view.data) ((int32_t *)keys_view.data)[attn_at(&keys_view, x.b, x.h, line) + n] = top.key[slot];
            if (weights.data)
                ((float *)weights.data)[attn_at(&weights, x.b, x.h, line) + n] =
                    there ? exp2f(in_base_2(top.z[slot]) - results.base[at]) * results.inverse[at] : 0;
        }
    }
}

} // namespace

cudaError_t observe_rows_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                              const observed_parts &parts, int sums, cudaStream_t stream)
{
    return with_variant(plan, [&](auto v) {
        typedef decltype(v) V;
        const dim3 grid = tile_grid(a.g, V::Shape::BM);
        const size_t bytes = sizeof(shared<V::D, V::SCORE_MODS>);
        const limits whole = limits_of_whole(a.g);
        const float scale_log2 = (float)a.g.scale * LOG2E;
        const auto launch = [&](auto of) {
            return launch_share<rows_of_tiles<V, decltype(of)::value>>(chip, a, grid, parts.blocks, V::Shape::THREADS,
                                                                       bytes, stream, whole, scale_log2, parts);
        };
        return sums == 0   ? launch(std::integral_constant<int, 0>())
               : sums == 1 ? launch(std::integral_constant<int, 1>())
                           : launch(std::integral_constant<int, 2>());
    });
}

cudaError_t observe_top_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                             const observed_rows &rows, cudaStream_t stream)
{
    return with_options<true>(plan, [&](auto v) {
        typedef decltype(v) V;
        const size_t bytes = sizeof(top_shared<V::D>) + V::Shape::BM * ATTN_MAX_TOP * sizeof(int64_t);
        return launch_share<tops_of_tiles<V>>(chip, a, tile_grid(a.g, V::Shape::BM), 1, V::Shape::THREADS, bytes,
                                              stream, limits_of_whole(a.g), rows);
    });
}

int observe_block_rows(const attn_plan *plan)
{
    return with_variant(plan, [](auto v) { return (int)decltype(v)::Shape::BM; });
}

size_t observe_rows_shared(const attn_plan *plan)
{
    const bool top = plan->problem->top_keys.rank || plan->problem->top_weights.rank;
    if (top)
        return with_options<true>(plan, [](auto v) {
            typedef decltype(v) V;
            return sizeof(top_shared<V::D>) + V::Shape::BM * ATTN_MAX_TOP * sizeof(int64_t);
        });
    return with_variant(plan, [](auto v) { return sizeof(shared<decltype(v)::D, decltype(v)::SCORE_MODS>); });
}
