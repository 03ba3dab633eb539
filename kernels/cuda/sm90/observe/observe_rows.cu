/* observe_rows.cu: the pass of an observe (statistics of attention weights) over the rows, by wgmma. For each row it
 * computes the largest score m, l = sum exp2(z - m) and e = sum exp2(z - m) (z - m), where z are the row's scores in
 * base 2.
 *
 * A block has 128 queries, 64 for each of its two consumer warpgroups, which take turns with their products. A separate
 * warp fills a ring of tiles of keys. Each lane has its own m, l and e for its keys of a row. At the end of a chunk of
 * keys the lanes' sums are merged, and the chunks are merged in order. */
#include "kernels/cuda/sm90/observe/observe.h"
#include "kernels/cuda/sm90/observe/observe_tiles.cuh"

namespace {

template <int D_> struct rows_shape {
    static const int D = D_, C = 2, BM = 64 * C, CHUNKS = D / 64, THREADS = 128 * C + 32;
    static const int STAGES = D == 64 ? 4 : D == 192 ? 3 : 2;
    static const int BLOCKS = D <= 128 ? 2 : 1;
    static_assert(BM == SM90_OBSERVE_ROWS, "what observe.cu plans for");
};

/* The tiles of keys for a consumer's 64 rows. Each of the tiles [seen.first, seen.last) has a key that at least one of
 * these rows sees. All rows see all keys of the tiles [free.first, free.last). The struct is in shared memory, because
 * registers are scarce. */
struct rows_part {
    key_band band;
    key_tiles seen, free;
};

DEVICE rows_part rows_part_of(const key_band &band, int row0, int Sq)
{
    rows_part y = { band, key_tiles_of<BN>(band, row0, min(row0 + 64, Sq)), {} };
    y.free.first = (max(row0 + 63 + band.lo, 0) + BN - 1) / BN;
    y.free.last = max(min(row0 + band.hi, band.Sk), 0) / BN;
    if (row0 >= Sq) y.seen.last = y.seen.first;
    return y;
}

template <class X> struct rows_memory {
    alignas(1024) uint16_t Q[X::C][64 * 64 * X::CHUNKS];
    alignas(1024) uint16_t K[X::STAGES][BN * 64 * X::CHUNKS];
    /* [row]: over the chunks of OBSERVE_CHUNK keys visited so far, the largest score (x), the sums l and e relative to
     * it (y, z), and 1 (w), as in observed_parts */
    float4 row[X::BM];
    rows_part parts[X::C];
    struct {
        barrier_pairs<X::C> Q;
        barrier_pairs<X::STAGES> K;
    } bars;

    DEVICE void init()
    {
        init_pairs(bars.Q, 1);
        init_pairs(bars.K, X::C);
    }
};

/* The tiles of keys that a block computes: those of the tiles `first` to `last` - 1 that lie in the block's chunks. A
 * chunk has OBSERVE_CHUNK keys, and the block has every `blocks`-th chunk, from chunk `number` on. */
struct own_tiles {
    int first, last, number, blocks;

    /* Returns the first tile of keys, from tile n on, that this block computes. There is none if the result is not
     * below `last`. */
    DEVICE int from(int n) const
    {
        const int of_chunk = OBSERVE_CHUNK / BN;
        if (blocks == 1 || n >= last) return n;
        const int off = (n / of_chunk + blocks - number) % blocks;
        return off == 0 ? n : (n / of_chunk + blocks - off) * of_chunk;
    }
};

/* Updates the largest score and the sums of the thread's two rows by the scores S of a tile. If `bounded`, scores may
 * be -inf (hidden pairs); their exponents are replaced by -1000, because 0 * -inf would be NaN. */
template <int SUMS> DEVICE void add_tile(const float (&S)[BN / 2], lane_row (&rows)[2], float scale_log2, bool bounded)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        lane_row &row = rows[half];
        float top[2] = { S[half * 2], S[half * 2 + 1] };
#pragma unroll
        for (int n = 1; n < BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) top[e] = max_or_nan(top[e], S[n * 4 + half * 2 + e]);
        const float most = max_or_nan(top[0], top[1]);
        row.most = max_or_nan(row.most, most);
        if (!SUMS) continue;
        const float y = __fmul_rn(most, scale_log2);
        if (y > row.m + 8) {
            const float scale = exp2_fast(row.m - y);
            row.e = scale == 0 ? 0 : scale * (row.e + (row.m - y) * row.l);
            row.l *= scale;
            row.m = y;
        }
        /* m is -inf if the row has seen no key yet; -inf - -inf would be NaN */
        const float base = row.m == -CUDART_INF_F ? 0 : row.m;
        float l[2] = { 0, 0 }, sum[2] = { 0, 0 };
        const auto add = [&](auto may_be_hidden) {
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float exponent = fmaf(S[n * 4 + half * 2 + e], scale_log2, -base);
                    if (may_be_hidden.value) exponent = max_or_nan(exponent, -1000);
                    const float p = exp2_fast(exponent);
                    l[e] += p;
                    if (SUMS > 1) sum[e] = fmaf(p, exponent, sum[e]);
                }
        };
        if (SUMS > 1 && bounded) add(std::true_type());
        else add(std::false_type());
        row.l += l[0] + l[1];
        row.e += sum[0] + sum[1];
    }
}

template <class X>
DEVICE void load_rows(rows_memory<X> &sm, const cuda_args &a, const qk_maps &maps, const tile_place &place,
                      const own_tiles &tiles)
{
    const head_args &x = place.x;
    const int b = tensor_batch(a.g, x.b), k_start = (int)x.s.k_start, hk = (int)x.hk;
    ring<X::STAGES> at;
    for (int w = 0; w < X::C; w++)
        load_tile<64, X::CHUNKS, 64>(smem_addr(sm.Q[w]), &maps.Q,
                                     { 0, (int)x.s.q_start + place.i0 + w * 64, (int)x.h, b },
                                     smem_addr(&sm.bars.Q.full[w]));
#pragma unroll 1
    for (int n = tiles.from(tiles.first); n < tiles.last; n = tiles.from(n + 1)) {
        sleep_until_empty(sm.bars.K, at);
        fill_stage<BN, X::CHUNKS, 64>(sm.bars.K, at, smem_addr(sm.K[at.stage]), &maps.K,
                                      { 0, k_start + n * BN, hk, b });
        at.next();
    }
}

template <typename T, class X, int SUMS>
DEVICE void sum_rows(rows_memory<X> &sm, const cuda_args &a, const tile_place &place, const own_tiles &tiles, int w,
                     float scale_log2, const observed_parts &parts)
{
    const int of_chunk = OBSERVE_CHUNK / BN;
    const consumer<X::C> me(w);
    const head_args &x = place.x;
    const int Sq = (int)x.s.Sq, i0 = place.i0 + w * 64 + me.warp * 16 + me.lane / 4;
    const rows_part &part = sm.parts[w];
    const bool alone = parts.blocks == 1, first_lane = me.lane % 4 == 0;
    float4 *const sums = &sm.row[w * 64 + me.warp * 16 + me.lane / 4];
    const int64_t at = lse_at(a, x, i0);
    lane_row rows[2] = { no_keys(), no_keys() };
    ring<X::STAGES> k;
    if (first_lane) sums[0] = sums[8] = make_float4(-CUDART_INF_F, 0, 0, 1);
    if (me.leader) sm.parts[w] = rows_part_of(band_of(a.g, x.s), place.i0 + w * 64, Sq);
    me.meet();

    me.begin_turns();
    mbarrier_wait(smem_addr(&sm.bars.Q.full[w]), 0);
#pragma unroll 1
    for (int n = tiles.from(tiles.first), after; n < tiles.last; n = after) {
        after = tiles.from(n + 1);
        if (__any_sync(0xffffffff, n >= part.seen.first && n < part.seen.last)) {
            float S[BN / 2];
            await_full(sm.bars.K, k);
            me.await_turn();
            multiply<T, BN, X::D / 16>(S, k_major<64>{ smem_addr(sm.Q[w]) }, k_major<BN>{ smem_addr(sm.K[k.stage]) });
            me.next_turn();
            retire<0>(S);
            me.release(sm.bars.K, k);
            k.next();
            const bool bounded = n < part.free.first || n >= part.free.last;
            if (bounded) mask<BN>(S, part.band, i0, n * BN, me.lane);
            add_tile<SUMS>(S, rows, scale_log2, bounded);
        } else {
            me.pass_turn();
            me.pass(sm.bars.K, k);
        }
        if (after < tiles.last && after / of_chunk == n / of_chunk) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 chunk = whole_row<false>(rows[half], scale_log2);
            if (first_lane) sums[half * 8] = merged<false>(sums[half * 8], chunk, scale_log2);
            if (first_lane && !alone && i0 + half * 8 < Sq)
                parts.part[n / of_chunk * parts.rows + at + half * 8] = chunk;
            rows[half] = no_keys();
        }
    }
    me.end_turns();
    if (!alone || !first_lane) return;
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (i0 + half * 8 < Sq) parts.part[at + half * 8] = sums[half * 8];
}

/* Computes for each row the largest score m, l = sum exp2(z - m), and e = sum exp2(z - m) (z - m), where z are its
 * scores in base 2. SUMS: 0: only m; 1: m and l; 2: m, l and e. */
template <typename T, class X, int SUMS>
__global__ void __launch_bounds__(X::THREADS, X::BLOCKS)
    observe_rows_wgmma(const __grid_constant__ cuda_args a, const __grid_constant__ qk_maps maps, float scale_log2,
                       const __grid_constant__ observed_parts parts)
{
    rows_memory<X> &sm = block_memory<rows_memory<X>>();
    int number;
    const int tile = shared_tile(a, parts.blocks, &number);
    const tile_place place = tile_place_of<X::BM>(a, gridDim.x - 1 + a.first_tile - tile);
    if (!place.exists) return;
    const key_tiles keys = key_tiles_of<BN>(band_of(a.g, place.x.s), place.i0,
                                            (int)attn_min64(place.i0 + X::BM, place.x.s.Sq));
    const own_tiles tiles = { keys.first, keys.last, number, parts.blocks };
    begin_observe(maps, sm);
    const int wg = warpgroup_index();
    if (wg < X::C) sum_rows<T, X, SUMS>(sm, a, place, tiles, wg, scale_log2, parts);
    else if (threadIdx.x == X::C * 128) load_rows<X>(sm, a, maps, place, tiles);
}

template <typename T, int D>
cudaError_t launch_rows(const cuda_chip *chip, const cuda_args &a, const observed_parts &parts, int sums,
                        cudaStream_t stream)
{
    typedef rows_shape<D> X;
    static_assert((sizeof(rows_memory<X>) + 1024) * X::BLOCKS <= 228 << 10, "what a multiprocessor has");
    qk_maps maps;
    if (!make_maps(a.g, maps)) return cudaErrorInvalidValue;
    const float scale_log2 = (float)a.g.scale * LOG2E;
    const auto launch = [&](auto of) {
        return launch_share<observe_rows_wgmma<T, X, decltype(of)::value>>(chip, a, tile_grid(a.g, X::BM), parts.blocks,
                                                                           X::THREADS, sizeof(rows_memory<X>), stream,
                                                                           maps, scale_log2, parts);
    };
    return sums == 0   ? launch(std::integral_constant<int, 0>())
           : sums == 1 ? launch(std::integral_constant<int, 1>())
                       : launch(std::integral_constant<int, 2>());
}

} // namespace

cudaError_t sm90_rows_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                           const observed_parts &parts, int sums, cudaStream_t stream)
{
    return with_head_size(a.g.dims.D, [&](auto size) {
        const int D = decltype(size)::value;
        return plan->problem->q.dtype == ATTN_BF16 ? launch_rows<__nv_bfloat16, D>(chip, a, parts, sums, stream)
                                                   : launch_rows<compiled_half, D>(chip, a, parts, sums, stream);
    });
}
