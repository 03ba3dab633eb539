/* pipeline.cuh: how the warps of a block pass tiles to each other.
 *
 *  ring   Stages (buffers in shared memory) are filled one after the other, again and again. The barrier `full` of a
 *         stage completes when its tile has arrived, and `empty` when all readers have released it.
 *  turns  The consumer warpgroups issue their products one after the other, so that the softmax of one runs during the
 *         products of another. A warpgroup without a product passes its turn.
 *
 * If no product of a warpgroup reads a stage, its four warps must meet before one thread releases the stage (see
 * pass()). Otherwise a warp that still waits for the stage could miss the barrier's phase. */
#ifndef ATTN_SM90_PIPELINE_CUH
#define ATTN_SM90_PIPELINE_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"
#include "kernels/cuda/sm90/layer/tma.cuh"

/* ---- Pairs of barriers, `full` and `empty`, for each buffer ------------------------------------------------------ */

template <int STAGES> struct barrier_pairs {
    uint64_t full[STAGES], empty[STAGES];
};

/* Initialises the barriers of a ring. A stage (buffer) is free again when `readers` threads have arrived at its barrier
 * `empty`. One thread calls this; fence_mbarrier_init() and a barrier of the whole block must follow. */
template <int STAGES> DEVICE void init_pairs(barrier_pairs<STAGES> &pairs, int readers)
{
    for (int s = 0; s < STAGES; s++) {
        mbarrier_init(smem_addr(&pairs.full[s]), 1);
        mbarrier_init(smem_addr(&pairs.empty[s]), readers);
    }
}

/* ---- Rings of buffers -------------------------------------------------------------------------------------------- */

/* A position in a ring: the buffer (stage), and the phase of its barriers. The warp that fills the ring and each reader
 * have their own position. */
template <int STAGES> struct ring {
    int stage = 0;
    uint32_t phase = 0;
    DEVICE void next()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    DEVICE void back()
    {
        if (--stage < 0) stage = STAGES - 1, phase ^= 1;
    }
};

template <int STAGES> DEVICE void await_empty(barrier_pairs<STAGES> &pairs, const ring<STAGES> &at)
{
    mbarrier_wait(smem_addr(&pairs.empty[at.stage]), at.phase ^ 1);
}
template <int STAGES> DEVICE void sleep_until_empty(barrier_pairs<STAGES> &pairs, const ring<STAGES> &at)
{
    mbarrier_sleep(smem_addr(&pairs.empty[at.stage]), at.phase ^ 1);
}
template <int STAGES> DEVICE void await_full(barrier_pairs<STAGES> &pairs, const ring<STAGES> &at)
{
    mbarrier_wait(smem_addr(&pairs.full[at.stage]), at.phase);
}

/* Waits until the stage (buffer) at this position is free, and starts to load a tile into it. The tile's bytes count
 * towards the stage's barrier `full`, or towards `other` if it is given. */
template <int ROWS, int CHUNKS, int COLUMNS, int PITCH = ROWS, int STAGES>
DEVICE void fill_stage(barrier_pairs<STAGES> &pairs, const ring<STAGES> &at, uint32_t to, const CUtensorMap *map,
                       const tma_place &from, uint64_t *other = nullptr)
{
    await_empty(pairs, at);
    load_tile<ROWS, CHUNKS, COLUMNS, PITCH>(to, map, from, smem_addr(other ? other : &pairs.full[at.stage]));
}

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

/* Numbers of named barriers. Each is the first of a set that has one barrier per consumer warpgroup. */
enum { ORDER_BARRIER = 2, GROUP_BARRIER = 6 };

/* The position of a thread in its block, and the barriers of the thread's warpgroup. The block has C consumer
 * warpgroups. */
template <int C> struct consumer {
    int w, warp, lane; /* w: index of the warpgroup among the consumers; warp: index of the warp in its warpgroup */
    bool leader;       /* whether this thread arrives at barriers for its whole warpgroup */

    DEVICE explicit consumer(int w_)
        : w(w_), warp(threadIdx.x % 128 / 32), lane(threadIdx.x % 32), leader(threadIdx.x % 128 == 0)
    {
    }

    DEVICE void await_turn() const { named_barrier_sync(ORDER_BARRIER + w, 256); }
    DEVICE void next_turn() const { named_barrier_arrive(ORDER_BARRIER + (w + 1 == C ? 0 : w + 1), 256); }
    DEVICE void pass_turn() const
    {
        await_turn();
        next_turn();
    }
    /* A turn is the right to issue products; consumer 0 has the first turn. begin_turns() must be called before the
     * first turn, and end_turns() after the last one, so that no arrival is left over at a barrier. */
    DEVICE void begin_turns() const
    {
        if (w == C - 1) next_turn();
    }
    DEVICE void end_turns() const
    {
        if (w == 0) await_turn();
    }

    DEVICE void meet() const { named_barrier_sync(GROUP_BARRIER + w, 128); }
    /* Makes the warpgroup's threads wait for each other, and returns whether x is true in all of them. The vote tells
     * ptxas that all lanes get the same result. */
    DEVICE bool meet_all(bool x) const { return __any_sync(0xffffffff, named_barrier_all(GROUP_BARRIER + w, 128, x)); }

    DEVICE void release(uint64_t &empty) const
    {
        if (leader) mbarrier_arrive(smem_addr(&empty));
    }
    template <int STAGES> DEVICE void release(barrier_pairs<STAGES> &pairs, const ring<STAGES> &at) const
    {
        release(pairs.empty[at.stage]);
    }

    /* Releases a stage (buffer) of a ring that no product of this warpgroup reads. The warps meet first, so that none
     * still waits for the stage. */
    template <int STAGES> DEVICE void pass(barrier_pairs<STAGES> &pairs, ring<STAGES> &at) const
    {
        await_full(pairs, at);
        meet();
        release(pairs, at);
        at.next();
    }
};

#endif
