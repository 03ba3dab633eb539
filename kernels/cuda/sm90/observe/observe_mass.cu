/* observe_mass.cu: the pass of an observe (statistics of attention weights) that computes key_mass, the sum of each
 * key's probabilities, by wgmma.
 *
 * A work tile is BN keys of one query head. Three consumer warpgroups share the tiles of 64 queries that see these
 * keys: consumer w has tiles w, w + 3, ... A separate warp loads keys and queries.
 *
 * A thread adds up P of its keys in float32. Every FOLD tiles, the sums of the eight lanes that have the same keys are
 * added up in double. At the end, the sums of the 12 warps are added up, in order. The order of additions depends on
 * the sequence alone, and so do the bits of a result. */
#include "kernels/cuda/sm90/observe/observe.h"
#include "kernels/cuda/sm90/observe/observe_tiles.cuh"

namespace {

const int BQ = 64;
/* number of tiles of queries whose P a consumer adds up in float32, before it adds the sums in double */
const int FOLD = 8;
const int SUMS_BARRIER = 10;

template <int D_> struct mass_shape {
    static const int D = D_, C = 3, CHUNKS = D / 64, THREADS = 128 * C + 32;
    static const int STAGES = D == 256 ? 1 : 2;
    static const int KEYS = D <= 128 ? 2 : 1; /* number of buffers in the ring of keys */
};

template <class X> struct mass_memory {
    alignas(1024) uint16_t K[X::KEYS][BN * 64 * X::CHUNKS];
    alignas(1024) uint16_t Q[X::C][X::STAGES][BQ * 64 * X::CHUNKS];
    float sums[2][X::C * 4][BN]; /* [work tile % 2][warp]: sums of the probabilities over the warp's queries */
    struct {
        barrier_pairs<X::KEYS> K;
        barrier_pairs<X::STAGES> Q[X::C];
    } bars;

    DEVICE void init()
    {
        init_pairs(bars.K, X::C);
        for (int w = 0; w < X::C; w++) init_pairs(bars.Q[w], 1);
    }
};

/* The work tiles of a problem: per_head tiles of keys for each of `heads` query heads of the whole batch. */
struct mass_order {
    int per_head, heads, first, end; /* this launch computes work tiles `first` to `end` - 1 */
    /* whether work tiles differ in length; if so, the longest come first: the tiles of the first keys */
    bool uneven;
};

/* Keys j0 to j1 - 1 of head x, and queries i0 to i1 - 1, which see at least one of these keys and count for
 * key_mass. */
struct mass_tile {
    head_args x;
    int j0, j1, shown; /* shown: keys below this number have an element in key_mass */
    int i0, i1;
    int first, count; /* the tiles of queries `first` to `first` + `count` - 1 see these keys */
};

DEVICE mass_tile mass_tile_of(const cuda_args &a, const mass_order &order, int t)
{
    const attn_geometry &g = a.g;
    const int head = order.uneven ? t % order.heads : t / order.per_head, H = (int)g.dims.H;
    int tile = order.uneven ? t / order.heads : t % order.per_head, b = head / H;
    if (g.dims.packed) {
        b = sequence_of_tile(g.cu_k, g.dims.B, BN, 1, tile);
        tile -= g.cu_k[b] / BN + b;
    }
    mass_tile k;
    k.x = head_args_of(a, b, head % H);
    const int Sk = (int)k.x.s.Sk, Sq = (int)k.x.s.Sq;
    k.j0 = tile * BN, k.j1 = min(k.j0 + BN, Sk);
    k.shown = !g.dims.packed && g.observe.shown_keys > 0 ? (int)attn_min64(g.observe.shown_keys, Sk) : Sk;
    k.i0 = k.i1 = k.first = k.count = 0;
    if (k.j0 >= k.shown) return k;
    const int64_t last_rows = g.observe.key_mass_rows > 0 ? g.observe.key_mass_rows : Sq;
    k.i0 = (int)attn_max64(attn_rows_of(&g, &k.x.s, k.j0).lo, Sq - last_rows);
    k.i1 = (int)attn_rows_of(&g, &k.x.s, k.j1 - 1).hi;
    k.first = k.i0 / BQ;
    k.count = k.i0 < k.i1 ? (k.i1 + BQ - 1) / BQ - k.first : 0;
    return k;
}

/* ---- The thread that loads tiles --------------------------------------------------------------------------------- */

template <class X>
DEVICE void load_mass(mass_memory<X> &sm, const cuda_args &a, const qk_maps &maps, const mass_order &order)
{
    ring<X::KEYS> keys;
    ring<X::STAGES> at[X::C];
#pragma unroll 1
    for (int t = order.first + (int)blockIdx.x; t < order.end; t += (int)gridDim.x) {
        const mass_tile k = mass_tile_of(a, order, t);
        if (k.count == 0) continue;
        const int b = tensor_batch(a.g, k.x.b), h = (int)k.x.h;
        const int row = (int)k.x.s.q_start + k.first * BQ;
        sleep_until_empty(sm.bars.K, keys);
        fill_stage<BN, X::CHUNKS, 64>(sm.bars.K, keys, smem_addr(sm.K[keys.stage]), &maps.K,
                                      { 0, (int)k.x.s.k_start + k.j0, (int)k.x.hk, b });
        keys.next();
#pragma unroll 1
        for (int n = 0; n < k.count; n += X::C)
#pragma unroll
            for (int w = 0; w < X::C; w++) {
                if (n + w >= k.count) continue;
                sleep_until_empty(sm.bars.Q[w], at[w]);
                fill_stage<BQ, X::CHUNKS, 64>(sm.bars.Q[w], at[w], smem_addr(sm.Q[w][at[w].stage]), &maps.Q,
                                              { 0, row + (n + w) * BQ, h, b });
                at[w].next();
            }
    }
}

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

/* `base` and `inverse` (struct tile_rows) of the thread's two rows. P is exp2(z - base) * inverse, where z is the score
 * in base 2. */
struct two_ends {
    float2 end[2];
};
DEVICE two_ends ends_of(const cuda_args &a, const mass_tile &k, const tile_rows &rows, int i)
{
    two_ends x;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = i + half * 8;
        x.end[half] = row >= k.i0 && row < k.i1 ? __ldg(rows.end + lse_at(a, k.x, row)) : make_float2(CUDART_INF_F, 0);
    }
    return x;
}

/* Adds P of the thread's two rows to the sums of its columns. A row whose base is INFINITY adds nothing. */
DEVICE void add_columns(float (&sum)[BN / 4], float (&S)[BN / 2], const two_ends &x, float scale_log2)
{
    const bool skips = x.end[0].x == CUDART_INF_F || x.end[1].x == CUDART_INF_F;
    if (__any_sync(0xffffffff, skips))
#pragma unroll
        for (int i = 0; i < BN / 2; i++)
            if (x.end[i / 2 % 2].x == CUDART_INF_F) S[i] = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
        const float2 &end = x.end[i / 2 % 2];
        float &to = sum[i / 4 * 2 + i % 2];
        to = fmaf(exp2_fast(fmaf(S[i], scale_log2, -end.x)), end.y, to);
    }
}

/* Two lanes whose numbers differ by COUNT have 2 COUNT sums each. Each lane keeps COUNT of them, and adds the other
 * lane's sums of the same columns. */
template <int COUNT> DEVICE void halve(float (&sum)[BN / 4], int lane)
{
    const bool upper = lane & COUNT;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const float given = upper ? sum[n] : sum[n + COUNT], mine = upper ? sum[n + COUNT] : sum[n];
        sum[n] = mine + __shfl_xor_sync(0xffffffff, given, COUNT);
    }
}

/* Adds the sums of the eight lanes that have the same columns to `total`, with four columns per lane
 * (column_of_fold()). `sum` becomes 0. */
DEVICE void fold(float (&sum)[BN / 4], double (&total)[4], int lane)
{
    halve<16>(sum, lane);
    halve<8>(sum, lane);
    halve<4>(sum, lane);
#pragma unroll
    for (int n = 0; n < 4; n++) total[n] += (double)sum[n];
#pragma unroll
    for (int n = 0; n < BN / 4; n++) sum[n] = 0;
}

DEVICE int column_of_fold(int lane, int n)
{
    const int at = lane / 4 * 4 + n;
    return at / 2 * 8 + lane % 4 * 2 + at % 2;
}

/* Writes the sums of the keys of a work tile (BN keys of one head), or zeros if `sums` is NULL. The first consumer
 * calls this. */
template <class X> DEVICE void store_mass(const cuda_args &a, const mass_tile &k, const float (*sums)[BN])
{
    const attn_view &view = a.g.view[ATTN_T_key_mass];
    const int column = threadIdx.x % 128, j = k.j0 + column;
    double sum = 0;
    if (j >= min(k.shown, k.j1)) return;
    for (int n = 0; sums && n < X::C * 4; n++) sum += (double)sums[n][column];
    ((float *)view.data)[attn_at(&view, k.x.b, k.x.h, 0) + k.x.s.k_start + j] = (float)sum;
}

template <typename T, class X>
DEVICE void sum_keys(mass_memory<X> &sm, const cuda_args &a, const mass_order &order, int w, float scale_log2,
                     const tile_rows &rows)
{
    const consumer<X::C> me(w);
    ring<X::KEYS> keys;
    ring<X::STAGES> q;
    int buffer = 0;
    me.begin_turns();
#pragma unroll 1
    for (int t = order.first + (int)blockIdx.x; t < order.end; t += (int)gridDim.x) {
        const mass_tile k = mass_tile_of(a, order, t);
        if (k.count == 0) {
            if (w == 0) store_mass<X>(a, k, nullptr);
            continue;
        }
        const key_band band = band_of(a.g, k.x.s);
        const int row = k.first * BQ + me.warp * 16 + me.lane / 4;
        float sum[BN / 4] = {};
        double total[4] = {};
        await_full(sm.bars.K, keys);
#pragma unroll 1
        for (int n = 0; n < k.count; n += X::C) {
            if (n + w < k.count) {
                const int i0 = (k.first + n + w) * BQ, i = row + (n + w) * BQ;
                float S[BN / 2];
                await_full(sm.bars.Q[w], q);
                me.await_turn();
                multiply<T, BN, X::D / 16>(S, k_major<BQ>{ smem_addr(sm.Q[w][q.stage]) },
                                           k_major<BN>{ smem_addr(sm.K[keys.stage]) });
                me.next_turn();
                const two_ends ends = ends_of(a, k, rows, i);
                retire<0>(S);
                me.release(sm.bars.Q[w], q);
                q.next();
                const bool free = k.j0 >= i0 + BQ - 1 + band.lo && k.j0 + BN <= min(i0 + band.hi, band.Sk);
                if (!free) mask<BN>(S, band, i, k.j0, me.lane);
                add_columns(sum, S, ends, scale_log2);
            } else {
                me.pass_turn();
            }
            if (n / X::C % FOLD == FOLD - 1) fold(sum, total, me.lane);
        }
        me.meet(); /* each warp must have seen the keys arrive before one thread releases their buffer */
        me.release(sm.bars.K, keys);
        keys.next();
        fold(sum, total, me.lane);
#pragma unroll
        for (int n = 0; n < 4; n++) sm.sums[buffer][w * 4 + me.warp][column_of_fold(me.lane, n)] = (float)total[n];
        named_barrier_sync(SUMS_BARRIER, 128 * X::C);
        if (w == 0) store_mass<X>(a, k, sm.sums[buffer]);
        /* The two buffers of `sums` are used in turn. The consumers write to this buffer again only after the next
         * SUMS_BARRIER, and warpgroup 0 has read the buffer (store_mass()) before it reaches that barrier. */
        buffer ^= 1;
    }
    me.end_turns();
}

template <typename T, class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    observe_mass_wgmma(const __grid_constant__ cuda_args a, const __grid_constant__ qk_maps maps,
                       const __grid_constant__ mass_order order, float scale_log2,
                       const __grid_constant__ tile_rows rows)
{
    mass_memory<X> &sm = block_memory<mass_memory<X>>();
    begin_observe(maps, sm);
    const int wg = warpgroup_index();
    if (wg < X::C) sum_keys<T, X>(sm, a, order, wg, scale_log2, rows);
    else if (threadIdx.x == X::C * 128) load_mass<X>(sm, a, maps, order);
}

template <typename T, int D>
cudaError_t launch_mass(const cuda_chip *chip, const cuda_args &a, const tile_rows &rows, cudaStream_t stream)
{
    typedef mass_shape<D> X;
    static_assert(sizeof(mass_memory<X>) <= 227 << 10, "what a block may have");
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    qk_maps maps;
    if (!make_maps(g, maps)) return cudaErrorInvalidValue;
    mass_order order;
    order.per_head = (int)(d.packed ? d.Sk / BN + d.B : attn_tiles(d.Sk, BN));
    order.heads = (int)(d.packed ? d.H : d.B * d.H);
    order.uneven = g.right < d.Sk || g.left < d.Sq || a.ends_of_queries || a.ends_of_keys;
    const tile_range share = share_of(chip, (int64_t)order.per_head * order.heads);
    order.first = (int)share.first, order.end = (int)share.end;
    if (order.first == order.end) return cudaSuccess;
    const cudaError_t code = allow_shared<observe_mass_wgmma<T, X>>(sizeof(mass_memory<X>));
    if (code != cudaSuccess) return code;
    const unsigned blocks = (unsigned)attn_min64(order.end - order.first, chip->multiprocessors);
    observe_mass_wgmma<T, X>
        <<<blocks, X::THREADS, sizeof(mass_memory<X>), stream>>>(a, maps, order, (float)g.scale * LOG2E, rows);
    return cudaPeekAtLastError();
}

} // namespace

cudaError_t sm90_mass_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                           cudaStream_t stream)
{
    return with_head_size(a.g.dims.D, [&](auto size) {
        const int D = decltype(size)::value;
        return plan->problem->q.dtype == ATTN_BF16 ? launch_mass<__nv_bfloat16, D>(chip, a, rows, stream)
                                                   : launch_mass<compiled_half, D>(chip, a, rows, stream);
    });
}
