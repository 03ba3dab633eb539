/* backward_256_kept.cuh: dQ of head sizes from 129 to 256 where backward_keys (backward_256.cu) has stored dS. A block
 * owns 128 queries of a head, 64 for each of its two consumers, and goes over the tiles of 64 keys that its queries
 * see. Each tile of keys comes with two tiles of dS, one per consumer.
 *
 *     dQ += dS K    both operands from shared memory; dS^T is used as it is stored, M-major
 *
 * A consumer skips tiles of keys that none of its queries sees: no dS is stored for them. */
#ifndef ATTN_SM90_BACKWARD_256_KEPT_CUH
#define ATTN_SM90_BACKWARD_256_KEPT_CUH

#include "kernels/cuda/sm90/backward/backward_256_dq.cuh"

namespace {

template <class X> struct shared_kept {
    alignas(1024) uint16_t K[X::STAGES_KEPT][X::BN * X::D];
    alignas(1024) uint16_t dS[X::STAGES_KEPT][2][KEPT_TILE];
    barrier_pairs<X::STAGES_KEPT> bars;
    query_place place;
    key_tiles own[2]; /* [w]: the tiles of keys that consumer w sees */
};

DEVICE key_tiles own_tiles_of(const query_place &x, int w)
{
    const int row0 = x.i0 + w * QUERY_TILE;
    if (row0 >= x.Sq) return { x.keys.first, x.keys.first };
    return key_tiles_of<KEYS>(x.band, row0, min(row0 + QUERY_TILE, x.Sq));
}
DEVICE bool holds(const key_tiles &x, int tile)
{
    return x.first <= tile && tile < x.last;
}

template <class X>
DEVICE void load_kept(shared_kept<X> &sm, const cuda_args &a, const plan &p, const maps &m, const query_place &x)
{
    const int head = x.b * (int)a.g.dims.H + x.h - p.part * p.queries.heads, BYTES = KEPT_TILE * 2;
    const key_tiles own[2] = { sm.own[0], sm.own[1] };
    tma_place keys = { 0, x.keys.first * X::BN, x.hk, x.b };
    ring<X::STAGES_KEPT> at;
#pragma unroll 1
    for (int tile = x.keys.first; tile < x.keys.last; tile++, keys.row += X::BN, at.next()) {
        const uint32_t bar = smem_addr(&sm.bars.full[at.stage]);
        await_empty(sm.bars, at);
        load_tile<X::BN, X::CHUNKS, 64>(smem_addr(sm.K[at.stage]), &m.K, keys, bar,
                                        (holds(own[0], tile) + holds(own[1], tile)) * BYTES);
#pragma unroll
        for (int w = 0; w < 2; w++)
            if (holds(own[w], tile))
                bulk_load(smem_addr(sm.dS[at.stage][w]), p.kept.at(head, x.band, x.i0 / QUERY_TILE + w, tile), BYTES,
                          bar);
    }
}

template <typename T, class X> struct sums_of_kept {
    static const int BM = X::BM, BN = X::BN;
    const cuda_args &a;
    const plan &p;
    shared_kept<X> &sm;
    const query_place &x;
    consumer<2> me;
    ring<X::STAGES_KEPT> at;
    int tile;
    const mn_major_low<BM> first_dS;
    const mn_major_low<BN> first_K;

    DEVICE sums_of_kept(const cuda_args &a_, const plan &p_, shared_kept<X> &sm_, const query_place &x_, int w)
        : a(a_), p(p_), sm(sm_), x(x_), me(w), tile(x_.keys.first), first_dS(smem_addr(sm_.dS[0][w])),
          first_K(smem_addr(sm_.K))
    {
    }

    DEVICE void await_tile()
    {
        await_full(sm.bars, at);
        if (a.g.seqlens_k && (tile + 1) * BN > x.band.Sk)
            zero_rows<BN, X::CHUNKS>(sm.K[at.stage], x.band.Sk - tile * BN);
    }
    DEVICE void pass_until(int end)
    {
#pragma unroll 1
        for (; tile < end; tile++, at.next()) {
            await_tile();
            me.meet();
            me.release(sm.bars, at);
        }
    }

    DEVICE void issue(float (&dQ)[X::D / 2])
    {
        const auto dS = stage_of<sizeof sm.dS[0]>(first_dS, at.stage);
        const auto K = stage_of<sizeof sm.K[0]>(first_K, at.stage);
        await_tile();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BN / 16; k++) wgmma_mn<T, X::D, 1, 1>::ss(dQ, dS.step(k), K.step(k), 1);
        wgmma_commit();
    }

    DEVICE void finish(float (&dQ)[X::D / 2], int t)
    {
        const float scale[2] = { p.scale, p.scale };
        const int row = x.i0 + me.w * BM + me.warp * 16;
        const attn_view &dq = a.g.view[ATTN_T_dq];
        const bool any = __any_sync(0xffffffff, !finish_rows(dQ, scale));
        if (me.lane == 0) p.nonfinite_queries[t * 8 + me.w * 4 + me.warp] = any;
        store_gradient<T, X::D>(dq, attn_at(&dq, x.b, x.h, row), x.Sq - row, (int)a.g.dims.D, dQ, me.lane);
    }

    DEVICE void run(int t)
    {
        const key_tiles own = sm.own[me.w];
        float dQ[X::D / 2];
#pragma unroll
        for (int i = 0; i < X::D / 2; i++) dQ[i] = 0;
        pass_until(min(own.first, x.keys.last));
        if (own.first < own.last) {
            issue(dQ);
            tile++;
#pragma unroll 1
            for (; tile < own.last; tile++) {
                const ring<X::STAGES_KEPT> before = at;
                at.next();
                issue(dQ);
                wgmma_wait<1>();
                me.release(sm.bars, before);
            }
            retire<0>(dQ);
            me.release(sm.bars, at);
            at.next();
        }
        pass_until(x.keys.last);
        finish(dQ, t);
    }
};

template <typename T, class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    queries_of_kept(const __grid_constant__ cuda_args a, const __grid_constant__ plan p, const __grid_constant__ maps m)
{
    static_assert(sizeof(shared_kept<X>) <= 227 << 10, "what a block may have");
    shared_kept<X> &sm = block_memory<shared_kept<X>>();
    const int wg = warpgroup_index(), t = p.part * p.queries.tiles + (int)blockIdx.x;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&m.K);
        init_pairs(sm.bars, 2);
        fence_mbarrier_init();
    }
    if (threadIdx.x == 32) {
        sm.place = query_place_of(a, p, t);
        for (int w = 0; w < 2; w++) sm.own[w] = own_tiles_of(sm.place, w);
    }
    __syncthreads();
    wait_for_prerequisites();
    const query_place &x = sm.place;

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x == 0) load_kept<X>(sm, a, p, m, x);
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        sums_of_kept<T, X>(a, p, sm, x, wg - 1).run(t);
    }
}

} // namespace

#endif
