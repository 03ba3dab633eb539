/* kv_pipeline.cuh: how the warps of a block of the forward kernels pass data to each other.
 *
 *   work  a work tile (BM queries of one head), and each consumer's part of it, from the warp that hands out work
 *   Q     64 rows for each consumer, which releases them after their product with the last keys
 *   K, V  two rings of tiles, which continue from one work tile to the next; K is requested one tile ahead of V
 *
 * The template parameter SM is the block's shared memory, with the members Q[C], K[STAGES], V[STAGES], `bars`,
 * `work` and parts[C]. */
#ifndef ATTN_SM90_KV_PIPELINE_CUH
#define ATTN_SM90_KV_PIPELINE_CUH

#include <type_traits>

#include "kernels/cuda/sm90/layer/pipeline.cuh"
#include "kernels/cuda/sm90/layer/scheduler.cuh"

/* ---- What all warps of a block use ------------------------------------------------------------------------------- */

struct kv_maps {
    CUtensorMap Q, K, V;
};

template <int C, int STAGES> struct kv_barriers {
    barrier_pairs<C> Q;
    barrier_pairs<STAGES> K, V;
    barrier_pairs<1> work;

    /* Initialises the barriers. The thread that calls this must call fence_mbarrier_init() afterwards. */
    DEVICE void init()
    {
        init_pairs(Q, 1);
        init_pairs(K, C);
        init_pairs(V, C);
        /* readers of a work tile: each warp of the consumers, and the warp that loads tiles */
        init_pairs(work, C * 4 + 1);
    }
};

DEVICE void prefetch_maps(const kv_maps &maps)
{
    prefetch_tensormap(&maps.Q);
    prefetch_tensormap(&maps.K);
    prefetch_tensormap(&maps.V);
}

/* Lets the GPU start the stream's next kernel early, and waits until the previous kernel has ended. All threads must
 * call this after one of them has initialised the barriers. */
DEVICE void begin_block()
{
    __syncthreads();
    launch_dependents();
    wait_for_prerequisites();
}

/* ---- The warp that hands out work -------------------------------------------------------------------------------- */

/* Publishes the work tile in sm.work and sm.parts. One lane of the warp calls this. */
template <class SM> DEVICE void announce_work(SM &sm)
{
    mbarrier_arrive(smem_addr(&sm.bars.work.full[0]));
}

/* Waits until all readers have released sm.work. All lanes of the warp must call this. */
template <class SM> DEVICE void await_readers(SM &sm, ring<1> &at)
{
    mbarrier_sleep(smem_addr(&sm.bars.work.empty[0]), at.phase);
    __syncwarp(); /* without this barrier, a slow lane could miss a phase of the mbarrier at the next call */
    at.next();
}

/* ---- The thread that loads tiles --------------------------------------------------------------------------------- */

/* Waits until the next work tile is published, and returns it. Its member i0 may be a command such as STOP. */
template <class SM> DEVICE const auto &await_work(SM &sm, const ring<1> &at)
{
    mbarrier_sleep(smem_addr(&sm.bars.work.full[0]), at.phase);
    return sm.work;
}

/* Releases sm.work. The thread that loads tiles calls this when it needs the next work tile. */
template <class SM> DEVICE void release_work(SM &sm)
{
    mbarrier_arrive(smem_addr(&sm.bars.work.empty[0]));
}

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

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

template <class SM, int C, int STAGES> struct kv_consumer : consumer<C> {
    SM &sm;
    ring<STAGES> k, v;
    ring<1> q, at;

    DEVICE kv_consumer(SM &sm_, int w) : consumer<C>(w), sm(sm_) {}

    /* Waits for the next work tile x, and calls read(x, y), where y is what this consumer computes of x. If read()
     * returns false, the caller must call release_work() later. */
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

    /* Waits for Q without moving on in the ring of buffers; await_Q() must be called later. */
    DEVICE void look_for_Q() { mbarrier_wait(smem_addr(&sm.bars.Q.full[this->w]), q.phase); }
    DEVICE void await_Q()
    {
        look_for_Q();
        q.next();
    }
    DEVICE void await_K() { await_full(sm.bars.K, k); }
    DEVICE void await_V() { await_full(sm.bars.V, v); }

    /* Releases the buffer of K after a product Q K^T. `last`: this was the work tile's last such product, so Q is
     * released too. */
    DEVICE void release_K(bool last)
    {
        this->release(sm.bars.K, k);
        if (last) release_Q();
        k.next();
    }
    /* Releases the buffer of K, and also Q if `last`. With LATE, this function does not release K: the caller does so
     * later, and then moves on in the ring of buffers. */
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

    DEVICE void pass_K()
    {
        this->pass_turn();
        this->pass(sm.bars.K, k);
    }
    DEVICE void pass_V() { this->pass(sm.bars.V, v); }

    /* Releases the next `count` (at most MOST) tiles of keys, which this warpgroup does not need. A loop that ends at
     * `count` would cost 2 to 4 % of the time, because ptxas would keep descriptors in registers of each thread. */
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

    /* Releases Q, K and V of a work tile in which this warpgroup computes nothing. */
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

/* Calls step(j, MASKED, BY_BITS) for tile j, then for tile below(j) and so on, down to tile `first`. MASKED and BY_BITS
 * are types that hold a bool, so that each combination is compiled as a loop of its own. MASKED: some keys may be
 * hidden; false for tiles below tile `free` if FREE_LOOP is true. BY_BITS: high() has returned true; always false
 * unless HIGH_LOOP is true. */
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
