/* kv_pipeline.cuh: how the warps of the forward kernels' block pass data to each other.
 *
 *   work  a tile of work and each consumer's part of it, from the warp that hands out work to all others
 *   Q     64 rows for each consumer, released after the last keys were multiplied
 *   K, V  a ring each, which continues from one tile of work to the next. K is requested one tile of keys ahead of V,
 *         because a consumer issues S = Q K^T of a tile before O += P V of the tile above it.
 *
 * SM is the block's shared memory: tiles Q[C], K[STAGES], V[STAGES], `bars`, `work` and parts[C]. */
#ifndef ATTN_SM90_KV_PIPELINE_CUH
#define ATTN_SM90_KV_PIPELINE_CUH

#include <type_traits>

#include "kernels/cuda/sm90/layer/pipeline.cuh"
#include "kernels/cuda/sm90/layer/scheduler.cuh"

/* ---- The block --------------------------------------------------------------------------------------------------- */

struct kv_maps {
    CUtensorMap Q, K, V;
};

template <int C, int STAGES> struct kv_barriers {
    barrier_pairs<C> Q;
    barrier_pairs<STAGES> K, V;
    barrier_pairs<1> work;

    /* Initialises the barriers. One thread calls it, then fence_mbarrier_init(). */
    DEVICE void init()
    {
        init_pairs(Q, 1);
        init_pairs(K, C);
        init_pairs(V, C);
        init_pairs(work, C * 4 + 1); /* readers: the consumers' warps and the loader */
    }
};

DEVICE void prefetch_maps(const kv_maps &maps)
{
    prefetch_tensormap(&maps.Q);
    prefetch_tensormap(&maps.K);
    prefetch_tensormap(&maps.V);
}

/* All threads call it, after one has initialised the barriers. It lets the GPU prepare the stream's
 * next kernel, which waits for this kernel's end. It also waits for the previous kernel's end,
 * because that one may have written this kernel's inputs. */
DEVICE void begin_block()
{
    __syncthreads();
    launch_dependents();
    wait_for_prerequisites();
}

/* ---- The warp that hands out work -------------------------------------------------------------------------------- */

/* Publishes sm.work and sm.parts, after they are written. One lane of the warp calls it. */
template <class SM> DEVICE void announce_work(SM &sm)
{
    mbarrier_arrive(smem_addr(&sm.bars.work.full[0]));
}

/* Waits until all readers have read the work and the next is needed. The whole warp calls it. */
template <class SM> DEVICE void await_readers(SM &sm, ring<1> &at)
{
    mbarrier_sleep(smem_addr(&sm.bars.work.empty[0]), at.phase);
    __syncwarp(); /* keeps every lane in the same phase of the barrier */
    at.next();
}

/* ---- The loader -------------------------------------------------------------------------------------------------- */

/* Waits for the next tile of work, or for the end of the work. */
template <class SM> DEVICE const auto &await_work(SM &sm, const ring<1> &at)
{
    mbarrier_sleep(smem_addr(&sm.bars.work.full[0]), at.phase);
    return sm.work;
}

/* The loading thread calls it after it has read sm.work, when it needs the next tile of work. */
template <class SM> DEVICE void release_work(SM &sm)
{
    mbarrier_arrive(smem_addr(&sm.bars.work.empty[0]));
}

/* Loads Q of all consumers, from `row` on. */
template <int C, int CHUNKS, int COLUMNS, class SM>
DEVICE void load_Q(SM &sm, const CUtensorMap *map, int row, int h, int b, ring<1> &at)
{
#pragma unroll 1
    for (int n = 0; n < C; n++) {
        mbarrier_sleep(smem_addr(&sm.bars.Q.empty[n]), at.phase ^ 1);
        load_tile<64, CHUNKS, COLUMNS>(smem_addr(sm.Q[n]), map, { 0, row + n * 64, h, b },
                                       smem_addr(&sm.bars.Q.full[n]));
    }
    at.next();
}

/* ---- A consumer -------------------------------------------------------------------------------------------------- */

template <class SM, int C, int STAGES> struct kv_consumer : consumer<C> {
    SM &sm;
    ring<STAGES> k, v;
    ring<1> q, at;

    DEVICE kv_consumer(SM &sm_, int w) : consumer<C>(w), sm(sm_) {}

    /* Takes the next tile of work. read(x, y) copies what is needed from it and from this consumer's part y, and
     * returns whether the next may be handed out. If not, release_work() does that later. */
    template <class F> DEVICE void take(F read)
    {
        await_full(sm.bars.work, at);
        const bool done = read(sm.work, sm.parts[this->w]);
        at.next();
        if (done) release_work();
    }
    DEVICE void release_work()
    {
        __syncwarp();
        if (this->lane == 0) mbarrier_arrive(smem_addr(&sm.bars.work.empty[0]));
    }

    /* Waits for Q without advancing its ring. await_Q() must follow. */
    DEVICE void look_for_Q() { mbarrier_wait(smem_addr(&sm.bars.Q.full[this->w]), q.phase); }
    DEVICE void await_Q()
    {
        look_for_Q();
        q.next();
    }
    DEVICE void await_K() { await_full(sm.bars.K, k); }
    DEVICE void await_V() { await_full(sm.bars.V, v); }

    /* Releases K, and also Q if this was its last product in the tile of work. */
    DEVICE void release_K(bool last)
    {
        this->release(sm.bars.K, k);
        if (last) release_Q();
        k.next();
    }
    /* LATE: releases only Q; the caller releases K later and advances the ring itself. */
    template <bool LATE> DEVICE void release_K(bool last)
    {
        if (!LATE) release_K(last);
        else if (last) release_Q();
    }
    DEVICE void release_Q() { this->release(sm.bars.Q.empty[this->w]); }
    DEVICE void release_V()
    {
        this->release(sm.bars.V, v);
        v.next();
    }

    /* Releases tiles of K that this warpgroup does not multiply. */
    DEVICE void pass_K()
    {
        this->pass_turn();
        this->pass(sm.bars.K, k);
    }
    DEVICE void pass_V() { this->pass(sm.bars.V, v); }

    /* Releases the first `count` tiles of a tile of work, at most MOST. This is not a loop: after a loop whose end is a
     * number from memory, ptxas treats nothing as warp-uniform. It would then keep stages and descriptors in registers
     * of each thread, which costs 2 to 4 %. */
    template <int MOST> DEVICE void pass_K(int count)
    {
#pragma unroll
        for (int n = 0; n < MOST; n++)
            if (n < count) pass_K();
    }
    template <int MOST> DEVICE void pass_V(int count)
    {
#pragma unroll
        for (int n = 0; n < MOST; n++)
            if (n < count) pass_V();
    }

    /* Releases all tiles of a tile of work, whose keys are tiles [first, last). */
    DEVICE void pass_work(int first, int last)
    {
        await_Q();
        this->meet();
        this->release(sm.bars.Q.empty[this->w]);
#pragma unroll 1
        for (int j = last - 1; j >= first; j--) {
            pass_K();
            if (j < last - 1) pass_V();
        }
        pass_V();
    }
};

/* Calls step(j, MASKED, BY_BITS) for tile j, then below(j), and so on down to `first`. MASKED (a type): some keys may
 * be hidden; with FREE_LOOP this is false for tiles below `free`. BY_BITS (a type): all rows of the warpgroup have seen
 * such a high score that maxima may be found by bits. HIGH_LOOP: BY_BITS may be used. high() is called until it returns
 * true, which then stays true. Each combination has a loop of its own. */
template <bool FREE_LOOP, bool HIGH_LOOP, class BELOW, class STEP, class HIGH>
DEVICE void walk_down(int j, int free, int first, const BELOW &below, const STEP &step, const HIGH &high)
{
    typedef std::integral_constant<bool, !FREE_LOOP> later;
    if (FREE_LOOP)
#pragma unroll 1
        for (; j >= max(first, free); j = below(j)) step(j, std::true_type(), std::false_type());
    if (j < first) return;
    bool by_bits = HIGH_LOOP && high();
#pragma unroll 1
    for (; j >= first && !by_bits; j = below(j)) {
        step(j, later(), std::false_type());
        if (HIGH_LOOP) by_bits = high();
    }
    if (HIGH_LOOP)
#pragma unroll 1
        for (; j >= first; j = below(j)) step(j, later(), std::true_type());
}

#endif
