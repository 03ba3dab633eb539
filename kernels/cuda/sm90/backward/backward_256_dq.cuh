/* backward_256_dq.cuh: the backward kernel for head sizes from 129 to 256 that computes dQ where dS was not stored, and
 * code that it shares with backward_256.cu and backward_256_kept.cuh.
 *
 * A block owns 128 queries of a head, 64 for each consumer, and goes over the tiles of 64 keys that its queries see:
 *
 *     dP = dO V^T    S = Q K^T
 *     P  = exp(S - lse)    dS = P (dP - delta)        in registers, which are the next product's operand
 *     dQ += dS K           issued with the next dP
 *
 * V and K arrive in one ring: first a tile of V, then the tile of K of the same keys. */
#ifndef ATTN_SM90_BACKWARD_256_DQ_CUH
#define ATTN_SM90_BACKWARD_256_DQ_CUH

#include "kernels/cuda/sm90/backward/backward.cuh"

namespace {

/* ---- Shapes of kernel instances, and the plan (their parameters) ------------------------------------------------- */

/* KEYS: keys per block of backward_keys. QUERIES: queries per block of backward_queries. */
const int KEYS = 64, QUERIES = 128;

template <int D_, int DV_> struct shape {
    static const int D = D_, DV = DV_, BM = QUERY_TILE, BN = KEYS, UNITS = 1, THREADS = 384;
    static const int CHUNKS = D / 64, CHUNKS_V = DV / 64;
    static const int STAGES = D == 256 ? 2 : 3, STAGES_Q = STAGES, STAGES_DO = STAGES, STAGES_P = 2;
    static const int STAGES_KV = D == 256 ? 3 : 5;
    static const int STAGES_KEPT = D == 256 ? 4 : 5;
    /* how many steps (16 channels each) of K or V a consumer keeps in registers for all tiles of queries */
    static const int HELD = 8;
    /* registers per thread of the producer warpgroup, and of a consumer warpgroup */
    static const int PRODUCER = 24, CONSUMER = 240;
};

/* A tile of dS in memory has 64 keys by 64 queries, with a row of 128 bytes per key, swizzled as by TMA (tma.cuh). The
 * n-th tile of queries of a head and the n-th from the end share memory for `width` tiles of dS. They share it
 * because, under a causal mask, one of these two tiles of queries sees few keys where the other one sees many. */
enum { KEPT_TILE = KEYS * QUERY_TILE };
struct kept_tiles {
    uint16_t *tiles; /* tiles of dS; NULL: dS is not stored, and dQ is computed from S and dP */
    int width, query_tiles;
    /* Returns the address of the tile of dS for a tile of queries and a tile of keys. `head` is the head's number among
     * the heads whose dS is in memory. */
    DEVICE uint16_t *at(int head, const key_band &band, int query_tile, int key_tile) const
    {
        const int pair = min(query_tile, query_tiles - 1 - query_tile);
        const int n = key_tile - max(min(query_tile * QUERY_TILE + band.lo, band.Sk), 0) / KEYS;
        return tiles +
               (int64_t)((head * ((query_tiles + 1) / 2) + pair) * width + (pair == query_tile ? n : width - 1 - n)) *
                   KEPT_TILE;
    }
};

/* Parameters of the kernels in this file; cuda_args has the others. The heads are computed in `parts` parts, one part
 * after the other. A tile of keys may be divided into parts too (tile_parts, see key_parts.cuh), and each of these sums
 * over `group` query heads. */
struct plan {
    /* The orders in which blocks take tiles of keys (or parts of these tiles) and tiles of queries, within one part of
     * the heads. In packed problems some tiles have no rows. */
    tile_order keys, queries;
    key_parts tile_parts;
    int group;
    int heads; /* number of groups of `group` query heads */
    int parts, part;
    kept_tiles kept;
    backward_scratch scratch;
    float scale, c; /* the scale of the scores, and c = log2(e) * scale; both are > 0 */
    /* One byte per warp, nonzero if the results of its 16 rows must be recomputed: nonfinite for tiles of keys,
     * nonfinite_queries for tiles of queries. */
    uint8_t *nonfinite, *nonfinite_queries;
};

/* Returns tile t in the order of all heads. The heads are computed in parts, one part after the other, and `order` is
 * the order of tiles within one part. The last part may have fewer heads than the others. */
DEVICE head_tile tile_of_parts(tile_order order, int heads, int t)
{
    const int part = t / order.tiles, before = part * order.heads;
    order.heads = min(order.heads, heads - before);
    head_tile at = head_tile_of(order, t - part * order.tiles);
    at.head += before;
    return at;
}

DEVICE void prefetch_maps(const maps &m)
{
    prefetch_tensormap(&m.Q);
    prefetch_tensormap(&m.K);
    prefetch_tensormap(&m.V);
    prefetch_tensormap(&m.dO);
}

/* ---- A block of queries ------------------------------------------------------------------------------------------ */

struct query_place {
    attn_sequence s;
    int b, h, hk, i0, Sq; /* i0 >= Sq means that the tile of queries has no rows */
    key_band band;
    key_tiles keys;
};

/* Returns tile t of queries. The last tiles of a head come first, because under a causal mask they see most keys. */
DEVICE query_place query_place_of(const cuda_args &a, const plan &p, int t)
{
    const attn_geometry &g = a.g;
    const head_tile at = tile_of_parts(p.queries, p.heads * p.group, t);
    query_place x;
    int tile = p.queries.per_head - 1 - at.tile;
    x.b = at.head / (int)g.dims.H;
    x.h = at.head - x.b * (int)g.dims.H;
    x.hk = x.h / (int)g.group;
    if (g.dims.packed) {
        x.b = sequence_of_tile(g.cu_q, g.dims.B, QUERIES, 1, tile);
        tile -= g.cu_q[x.b] / QUERIES + x.b;
    }
    x.s = attn_sequence_of(&g, x.b);
    x.i0 = tile * QUERIES;
    x.Sq = (int)x.s.Sq;
    x.band = band_of(g, x.s);
    x.keys = { 0, 0 };
    if (x.i0 < x.Sq) x.keys = key_tiles_of<KEYS>(x.band, x.i0, min(x.i0 + QUERIES, x.Sq));
    return x;
}

template <class X> struct shared_queries {
    /* Q of each consumer; at the end the consumer's dQ on its way to global memory */
    alignas(1024) uint16_t Q[2][X::BM * X::D];
    alignas(1024) uint16_t dO[2][X::BM * X::DV];
    alignas(1024) uint16_t KV[X::STAGES_KV][X::BN * X::D];
    barrier_pairs<X::STAGES_KV> bars;
    uint64_t Q_full[2], dO_full[2];
    query_place place;
};

/* ---- The thread that loads tiles (producer) ---------------------------------------------------------------------- */

template <class X, int CHUNKS, int SIZE>
DEVICE void load_queries(uint16_t (&to)[2][SIZE], uint64_t (&full)[2], const CUtensorMap *map, const tma_place &from)
{
    for (int w = 0; w < 2; w++)
        load_tile<X::BM, CHUNKS, 64>(smem_addr(to[w]), map, { 0, from.row + w * X::BM, from.h, from.b },
                                     smem_addr(&full[w]));
}

template <class X> DEVICE void load_keys(shared_queries<X> &sm, const cuda_args &a, const maps &m, const query_place &x)
{
    const int b = a.g.dims.packed ? 0 : x.b;
    const tma_place queries = { 0, (int)x.s.q_start + x.i0, x.h, b };
    tma_place keys = { 0, (int)x.s.k_start + x.keys.first * X::BN, x.hk, b };
    ring<X::STAGES_KV> at;
    bool begun = false;
#pragma unroll 1
    for (int tile = x.keys.first; tile < x.keys.last; tile++, keys.row += X::BN, begun = true) {
        if (!begun) load_queries<X, X::CHUNKS_V>(sm.dO, sm.dO_full, &m.dO, queries);
        fill_stage<X::BN, X::CHUNKS_V, 64>(sm.bars, at, smem_addr(sm.KV[at.stage]), &m.V, keys);
        at.next();
        if (!begun) load_queries<X, X::CHUNKS>(sm.Q, sm.Q_full, &m.Q, queries);
        fill_stage<X::BN, X::CHUNKS, 64>(sm.bars, at, smem_addr(sm.KV[at.stage]), &m.K, keys);
        at.next();
    }
}

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

/* Returns a copy that ptxas cannot recognise as a copy. ptxas then computes the operand's addresses at each use, and
 * does not keep them in registers. */
template <class OPERAND> DEVICE OPERAND made_anew(const OPERAND &x)
{
    OPERAND y = x;
    uint32_t low[1] = { x.low };
    opaque(low);
    y.low = low[0];
    return y;
}

template <typename T, class X> struct query_gradients {
    static const int BM = X::BM, BN = X::BN;
    typedef uint32_t operand[BN / 16][4];
    const cuda_args &a;
    const plan &p;
    shared_queries<X> &sm;
    const query_place &x;
    consumer<2> me;
    const int row0;
    ring<X::STAGES_KV> at; /* position of this warpgroup's newest tile in the ring of buffers for K and V */
    int tile;
    /* all rows of this warpgroup see all keys of tiles free_first to free_last - 1 */
    int free_first, free_last;
    float lse2[2], delta[2];
    const k_major_low<BM> Q, dO;
    const k_major_low<BN> first_KV;
    const mn_major_low<BN> first_K_down;

    DEVICE query_gradients(const cuda_args &a_, const plan &p_, shared_queries<X> &sm_, const query_place &x_, int w)
        : a(a_), p(p_), sm(sm_), x(x_), me(w), row0(x_.i0 + w * BM), tile(x_.keys.first), Q(smem_addr(sm_.Q[w])),
          dO(smem_addr(sm_.dO[w])), first_KV(smem_addr(sm_.KV)), first_K_down(smem_addr(sm_.KV))
    {
        const warpgroup_tile y = warpgroup_tile_of<BN>(x.band, row0, x.Sq, x.keys.first, x.keys.last);
        free_first = y.free_first, free_last = y.free_last;
        for (int half = 0; half < 2; half++) lse2[half] = CUDART_INF_F, delta[half] = 0;
        if (row0 >= x.Sq) return; /* rows past the end of the sequence have no lse and delta */
        const row_values &values = p.scratch.values[query_tile(a, x.s, x.b, x.h, row0 / QUERY_TILE)];
        for (int half = 0; half < 2; half++) {
            lse2[half] = values.lse2[me.warp * 16 + half * 8 + me.lane / 4];
            delta[half] = values.delta[me.warp * 16 + half * 8 + me.lane / 4];
        }
    }

    template <int CHUNKS> DEVICE void await_tile()
    {
        await_full(sm.bars, at);
        if (a.ends_of_keys && (tile + 1) * BN > x.band.Sk)
            zero_rows<BN, CHUNKS>(sm.KV[at.stage], x.band.Sk - tile * BN);
    }

    DEVICE void issue_dP(float (&dP)[BN / 2])
    {
        await_tile<X::CHUNKS_V>();
        multiply<T, BN, X::DV / 16>(dP, made_anew(dO), stage_of<sizeof sm.KV[0]>(first_KV, at.stage));
    }
    DEVICE void issue_S(float (&S)[BN / 2])
    {
        await_tile<X::CHUNKS>();
        multiply<T, BN, X::D / 16>(S, made_anew(Q), stage_of<sizeof sm.KV[0]>(first_KV, at.stage));
    }
    DEVICE void issue_dQ(float (&dQ)[X::D / 2], const operand &dS)
    {
        multiply_add<T, X::D, BN / 16>(dQ, dS, stage_of<sizeof sm.KV[0]>(first_K_down, at.stage));
    }
    /* Releases the buffer of the tile before the newest one, because no product reads that tile any more. */
    DEVICE void release_last() { me.release(sm.bars.empty[at.stage == 0 ? X::STAGES_KV - 1 : at.stage - 1]); }

    DEVICE void make_dS(operand &dS, float (&S)[BN / 2], const float (&dP)[BN / 2])
    {
        /* P is rounded to 16 bits as in the kernel backward_keys. dQ then has the same bits, whether it is computed
         * here or from the dS that backward_keys stores. */
        if (tile < free_first || tile >= free_last)
            mask<BN>(S, x.band, row0 + me.warp * 16 + me.lane / 4, tile * BN, me.lane);
#pragma unroll
        for (int n = 0; n < BN / 4; n++) {
            float *const s = S + n * 2;
            const int half = n % 2;
            for (int e = 0; e < 2; e++) s[e] = exp2_fast(fmaf(s[e], p.c, -lse2[half]));
            const float2 y = unpack<T>(pack<T>(s[0], s[1]));
            s[0] = y.x * (dP[n * 2] - delta[half]);
            s[1] = y.y * (dP[n * 2 + 1] - delta[half]);
        }
        to_operand<T, BN>(dS, S);
    }

    DEVICE void finish(float (&dQ)[X::D / 2], int t)
    {
        const float scale[2] = { p.scale, p.scale };
        const int row = row0 + me.warp * 16, count = x.Sq - row;
        const attn_view &dq = a.g.view[ATTN_T_dq];
        const bool any = __any_sync(0xffffffff, !finish_rows(dQ, scale));
        if (me.lane == 0) p.nonfinite_queries[t * 8 + me.w * 4 + me.warp] = any;
        store_gradient<T, X::D>(dq, attn_at(&dq, x.b, x.h, x.s.q_start + row), count, (int)a.g.dims.D, dQ,
                                sm.Q[me.w] + me.warp * 16 * X::D, me.lane);
    }

    DEVICE void run(int t)
    {
        float dQ[X::D / 2];
#pragma unroll
        for (int i = 0; i < X::D / 2; i++) dQ[i] = 0;
        if (x.keys.first < x.keys.last) {
            float S[BN / 2], dP[BN / 2];
            operand dS;
            mbarrier_wait(smem_addr(&sm.dO_full[me.w]), 0);
            issue_dP(dP);
            at.next();
            mbarrier_wait(smem_addr(&sm.Q_full[me.w]), 0);
            issue_S(S);
            retire<1>(dP);
            release_last();
            retire<0>(S);
            make_dS(dS, S, dP);
#pragma unroll 1
            while (tile + 1 < x.keys.last) {
                issue_dQ(dQ, dS);
                tile++;
                at.next();
                issue_dP(dP);
                /* wait for the product dQ, because the next S overwrites registers that this product reads */
                wgmma_wait<1>();
                release_last();
                at.next();
                issue_S(S);
                retire<1>(dP);
                release_last();
                retire<0>(S);
                make_dS(dS, S, dP);
            }
            issue_dQ(dQ, dS);
            retire<0>(dQ);
        }
        finish(dQ, t);
    }
};

/* ---- The kernels ------------------------------------------------------------------------------------------------- */

template <typename T, class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    backward_queries(const __grid_constant__ cuda_args a, const __grid_constant__ plan p,
                     const __grid_constant__ maps m)
{
    static_assert(sizeof(shared_queries<X>) <= 227 << 10, "what a block may have");
    static_assert(X::DV <= X::D, "a stage holds values too");
    shared_queries<X> &sm = block_memory<shared_queries<X>>();
    const int wg = warpgroup_index(), t = first_tile(p.queries);

    if (threadIdx.x == 0) {
        prefetch_maps(m);
        init_pairs(sm.bars, 2);
        for (int w = 0; w < 2; w++)
            mbarrier_init(smem_addr(&sm.Q_full[w]), 1), mbarrier_init(smem_addr(&sm.dO_full[w]), 1);
        fence_mbarrier_init();
    }
    if (threadIdx.x == 32) sm.place = query_place_of(a, p, t);
    __syncthreads();
    wait_for_prerequisites();
    const query_place &x = sm.place;
    if (x.i0 >= x.Sq) return;

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x == 0) load_keys<X>(sm, a, m, x);
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        query_gradients<T, X>(a, p, sm, x, wg - 1).run(t);
    }
}

template <class X>
__global__ void __launch_bounds__(128)
    repair_queries(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    launch_dependents();
    wait_for_prerequisites();
    for_flagged_warps(
        p.heads * p.group * p.queries.per_head * 8, [&](int n) { return p.nonfinite_queries[n]; },
        [&](int n, uint32_t) {
            const query_place x = query_place_of(a, p, n / 8);
            const head_args head = head_args_of(a, x.b, x.h);
            const int first = x.i0 + n % 8 * 16;
            for (int i = first; i < first + 16 && i < x.Sq; i++) dq_row(a, p.scratch.s, head, i);
        });
}

} // namespace

#endif
