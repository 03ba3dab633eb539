/* wide_tiles.cuh: flash attention forward for Hopper with head sizes above 256. README.md has the schedule.
 *
 * A work tile is 64 queries of one head, and DVC boxes of 64 columns of their out. Each of two consumer warpgroups
 * accumulates half of these columns. The left-hand consumer computes the scores of every second tile of 64 keys,
 * beginning with the first one that is visited, and the right-hand consumer those of the other tiles. Each passes its P
 * to the other, so that the softmax of one runs during products of the other. If `out` has more columns than a work
 * tile has, several work tiles have the same queries, and each of them computes their scores. With few rows over many
 * keys, a work tile has only a split (a part) of the keys, and may have rows of several heads (splits.cuh).
 *
 * Each consumer has its own ring of boxes (64 keys and 64 columns): K of its own tiles, and its columns of V of all
 * tiles. A thread has the same rows and keys in both consumers, so P passes from thread to thread through one buffer. A
 * consumer reads P of the other before it writes its own.
 *
 * Rows that tensor cores cannot compute (results that are not finite, huge scores) are recomputed by the next kernel.
 *
 * A row's bits depend on the shape, the options and its sequence's own lengths. */
#ifndef ATTN_SM90_WIDE_TILES_CUH
#define ATTN_SM90_WIDE_TILES_CUH

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/forward/splits.cuh"
#include "kernels/cuda/sm90/layer/pipeline.cuh"
#include "kernels/cuda/sm90/layer/products.cuh"

namespace {

/* ---- Shapes of kernel instances, and shared memory --------------------------------------------------------------- */

/* BM: queries per work tile; BN: keys per tile; BOX: elements of a box of 64 keys (or queries) and 64 columns */
enum { BM = 64, BN = 64, BOX = 64 * 64 };
/* THREADS: threads per block. PRODUCER, CONSUMER: registers per thread of the producer warpgroup, and of a consumer
 * warpgroup. */
enum { THREADS = 384, PRODUCER = 24, CONSUMER = 240 };
enum { LEFT, RIGHT };

/* The named barriers. P_READY: eight barriers, at each of which a warp of one consumer meets the same warp of the
 * other. ENDED: both consumers meet. MEET: the warps of one consumer meet. TURN: the right-hand consumer may begin its
 * scores. */
enum { P_READY = 1, ENDED = 9, MEET = 10, TURN = 12 };

/* DC: number of boxes of 64 columns of q and k. DVC: number of boxes of 64 columns of out per work tile. SPLITS: the
 * instance computes sequences whose keys are split (splits.cuh). */
template <int DC_, int DVC_, bool SCORE_MODS_, bool SPLITS_> struct wide_shape {
    static const int DC = DC_, DVC = DVC_;
    static const bool SCORE_MODS = SCORE_MODS_, SPLITS = SPLITS_;
    static const int STAGES = ((227 << 10) - (DC * BOX * 2 + (14 << 10))) / (2 * BOX * 2);
    /* number of boxes of `out` that the left-hand consumer computes; the right-hand consumer computes at most as
     * many */
    static const int MOST_BOXES = (DVC + 1) / 2;
    /* number of Q's last boxes (64 columns each) that consumers keep in registers, to save bandwidth of shared
     * memory */
    static const int KEPT = MOST_BOXES > 3 ? 2 : SCORE_MODS ? 3 : 4;
    /* Whether the right-hand consumer begins its scores only when the left-hand consumer has issued box TURN_BOX of its
     * own scores. With more than 8 boxes of K per tile this is slower. */
    static const bool TAKES_TURNS = DC <= 8;
    static const int TURN_BOX = 3;
};

/* What a thread of one consumer passes to the thread with the same number in the other consumer, for each tile of
 * keys. */
struct passed {
    uint4 P[BN / 16][128];
    /* for the thread's two rows: the references, which were subtracted from scores (x and y), and the rescale factors
     * (z and w) */
    float4 rows[128];
};

struct wide_work {
    work_tile x;
    warpgroup_tile y;
    int column0; /* the first column of out that the work tile computes */
    int number;  /* number of the work tile; several work tiles may compute columns of the same queries */
};

template <bool SCORE_MODS> struct wide_lists {
    DEVICE tile_bits *list(int) { return nullptr; }
};
template <> struct wide_lists<true> {
    tile_bits lists[2];
    DEVICE tile_bits *list(int n) { return lists + n; }
};

template <class X> struct shared : wide_lists<X::SCORE_MODS> {
    alignas(1024) uint16_t Q[X::DC][BOX];
    alignas(1024) uint16_t ring[2][X::STAGES][BOX]; /* [consumer][buffer]: boxes of K and V */
    alignas(16) passed P;
    /* [buffer of the work tile][consumer][thread]: sums l of P in the thread's two rows (x, y) */
    float2 l[2][2][128];
    wide_work work[2];
    struct {
        barrier_pairs<X::STAGES> ring[2];
        barrier_pairs<1> Q;
        barrier_pairs<2> work;
        /* completes when a work tile's last keys begin to be loaded; then the next work tile is claimed */
        uint64_t wanted;
    } bars;

    /* Initialises the barriers. One thread of the block calls this first. */
    DEVICE void init()
    {
        for (int w = 0; w < 2; w++) init_pairs(bars.ring[w], 1);
        init_pairs(bars.Q, 2);
        init_pairs(bars.work, 4); /* readers: two threads that load tiles, and two consumers */
        mbarrier_init(smem_addr(&bars.wanted), 1);
        fence_mbarrier_init();
    }
};

struct wide_maps {
    CUtensorMap Q, K, V;
};

/* The parameters of the kernel. Each tile of queries has `column_blocks` work tiles, which compute different columns of
 * `out`. */
struct wide_plan : split_plan {
    /* marks: a byte for each row, set if a later launch must recompute the row. found: a byte, set if there is such a
     * row. (They are cuda_args::rows_later and rows_found.) If `marks` is NULL, there is no later launch, and
     * plan::nonfinite has flags of such rows. */
    uint8_t *marks, *found;
    int64_t mark_batch, mark_head;
};

/* number of flags (bytes) of a work tile in plan::nonfinite, indexed by consumer and warp */
enum { FLAGS = 2 * 4 };

template <class X> DEVICE int shift_of(const wide_plan &p)
{
    return X::SPLITS ? p.shift : 0;
}

/* Marks row i of a work tile, if it exists, so that a later launch computes it. */
DEVICE void mark_row(const wide_plan &p, int shift, const work_tile &t, int i)
{
    if (i >= t.Sq) return;
    const int h = t.h + (i & ((1 << shift) - 1));
    p.marks[t.b * p.mark_batch + h * p.mark_head + t.q_start + (i >> shift)] = 1 + UNSOUND_ROWS;
    *p.found = 1; /* other warps may write the same value */
}

template <class X> struct key_walk {
    const tile_bits *seen; /* the list of visible tiles; NULL: all are visible */
    int first;

    DEVICE key_walk(const plan &p, shared<X> &sm, int slot, int first_)
        : seen(X::SCORE_MODS && p.mask.bounds ? sm.list(slot) : nullptr), first(first_)
    {
    }
    /* Returns the tile of keys that is visited after tile j, or a negative number. j must not be negative. */
    DEVICE int next(int j) const
    {
        if (j <= first) return -1;
        return X::SCORE_MODS && seen ? listed_tile_below(seen, j) : j - 1;
    }
};

/* ---- The warps that load tiles and hand out work (producer) ------------------------------------------------------ */

/* The warp that hands out work tiles. It claims the next work tile when the last keys of the present one begin to be
 * loaded. If it claimed earlier, it would take work from blocks that are free sooner. */
template <class X> DEVICE void schedule(const wide_plan &p, shared<X> &sm)
{
    const bool scheduler = threadIdx.x % 32 == 0;
    ring<2> at;
    uint32_t wanted = 0;
    const int end = p.order.end * p.column_blocks;
    int t = p.order.first * p.column_blocks + (int)blockIdx.x;
    const auto publish = [&](const wide_work &y) {
        if (scheduler) {
            sm.work[at.stage] = y;
            mbarrier_arrive(smem_addr(&sm.bars.work.full[at.stage]));
        }
        at.next();
    };
    const auto give = [&](work_tile x) {
        wide_work y;
        sleep_until_empty(sm.bars.work, at);
        __syncwarp();
        if (X::SCORE_MODS && p.mask.bounds && x.first < x.last) {
            key_tiles tiles = { x.first, x.last };
            list_visible_tiles(p.mask, x.b, x.h, p.H, x.i0, min(x.i0 + BM, x.Sq), tiles, *sm.list(at.stage));
            x.first = tiles.first, x.last = tiles.last;
        }
        y.x = x;
        y.y = warpgroup_tile_of<BN>(band_of(p, x), x.i0, x.Sq, x.first, x.last, shift_of<X>(p));
        y.column0 = t % p.column_blocks * (X::DVC * 64);
        y.number = t;
        publish(y);
        mbarrier_sleep(smem_addr(&sm.bars.wanted), wanted);
        __syncwarp();
        wanted ^= 1;
    };
    while (t < end) {
        if constexpr (X::SPLITS) {
            const work_tile x = split_tile_of<BM, BN>(p, t / p.column_blocks);
            if (x.i0 != SKIP) for_splits(p, x, give);
        } else {
            const work_tile x = work_tile_of<BM, BN>(p, t / p.column_blocks);
            if (x.i0 != SKIP) give(x);
        }
        if (scheduler) t = p.order.first * p.column_blocks + (int)gridDim.x + atomicAdd(p.counter, 1);
        t = __shfl_sync(0xffffffff, t, 0);
    }
    sleep_until_empty(sm.bars.work, at);
    __syncwarp();
    wide_work stop = {};
    stop.x.i0 = STOP;
    publish(stop);
    if (scheduler) leave_counter(p.counter);
}

/* The thread that fills the ring of consumer W. The left-hand consumer's thread also loads Q. */
template <class X, int W> struct box_loader {
    const wide_plan &p;
    shared<X> &sm;
    const wide_maps &maps;
    ring<X::STAGES> at;
    ring<1> q;
    ring<2> work;

    DEVICE void load_box(const CUtensorMap *map, int column, int row, int h, int b)
    {
        sleep_until_empty(sm.bars.ring[W], at);
        load_tile<BN, 1, 64>(smem_addr(sm.ring[W][at.stage]), map, { column, row, h, b },
                             smem_addr(&sm.bars.ring[W].full[at.stage]));
        at.next();
    }
    DEVICE void load_Q(const work_tile &x)
    {
        sleep_until_empty(sm.bars.Q, q);
        const int row = x.q_start + (x.i0 >> shift_of<X>(p)), b = p.cu_q ? 0 : x.b;
        /* where keys are split, the tensor map has two axes of Q swapped: its rows are the heads of Q, and its heads
         * are the queries */
        const tma_place from = X::SPLITS ? tma_place{ 0, x.h, row, b } : tma_place{ 0, row, x.h, b };
        load_tile<BM, X::DC, 64>(smem_addr(sm.Q), &maps.Q, from, smem_addr(&sm.bars.Q.full[0]));
        q.next();
    }
    DEVICE void load_keys(const wide_work &y, int slot)
    {
        const int hk = y.x.h / p.group, b = p.cu_q ? 0 : y.x.b, start = y.x.k_start;
        const int column0 = y.column0 + (W == LEFT ? 0 : X::MOST_BOXES * 64);
        const key_walk<X> walk(p, sm, slot, y.x.first);
        const auto load_K = [&](int j) {
#pragma unroll 1
            for (int c = 0; c < X::DC; c++) load_box(&maps.K, c * 64, start + j * BN, hk, b);
        };
        const auto load_V = [&](int j) {
#pragma unroll 1
            for (int c = 0; c < (W == LEFT ? X::MOST_BOXES : X::DVC - X::MOST_BOXES); c++)
                load_box(&maps.V, column0 + c * 64, start + j * BN, hk, b);
        };
        for (int j0 = y.x.last - 1; j0 >= 0;) {
            const int j1 = walk.next(j0), j2 = j1 < 0 ? -1 : walk.next(j1);
            if (W == LEFT && j2 < 0) mbarrier_arrive(smem_addr(&sm.bars.wanted));
            if (W == LEFT) load_K(j0);
            else if (j1 >= 0) load_K(j1);
            load_V(j0);
            if (j1 >= 0) load_V(j1);
            j0 = j2;
        }
    }
    DEVICE void run()
    {
        for (;; work.next()) {
            mbarrier_sleep(smem_addr(&sm.bars.work.full[work.stage]), work.phase);
            const wide_work &y = sm.work[work.stage];
            if (y.x.i0 == STOP) return;
            if (y.x.first < y.x.last) {
                if (W == LEFT) load_Q(y.x);
                load_keys(y, work.stage);
            } else if (W == LEFT) mbarrier_arrive(smem_addr(&sm.bars.wanted));
            mbarrier_arrive(smem_addr(&sm.bars.work.empty[work.stage]));
        }
    }
};

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

template <typename T, class X, int W> struct wide_consumer {
    static const int BOXES = W == LEFT ? X::MOST_BOXES : X::DVC - X::MOST_BOXES;
    static const int KEPT = X::KEPT;
    const wide_plan &p;
    shared<X> &sm;
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    ring<X::STAGES> at;
    ring<1> q;
    ring<2> work;
    key_band band;
    int i0; /* the thread's rows are i0 and i0 + 8 */
    int free_first, free_last;
    head_mods head;
    softmax x; /* x.l sums P only over the tiles whose scores this consumer computes */
    uint32_t kept[KEPT * 4][4];

    DEVICE wide_consumer(const wide_plan &p_, shared<X> &sm_) : p(p_), sm(sm_) {}

    /* Returns the address of a buffer in shared memory. It is computed at each call, to save registers. */
    DEVICE uint32_t address(const uint16_t *of) const
    {
        return memory_anew() + (uint32_t)((const char *)of - (const char *)&sm);
    }
    DEVICE void meet() const { named_barrier_sync(MEET + W, 128); }
    DEVICE void await_box() const { mbarrier_wait(smem_addr(&sm.bars.ring[W].full[at.stage]), at.phase); }

    /* Releases `count` buffers of the ring. The first of them is `distance` buffers before the present one. */
    DEVICE void release(int count, int distance) const
    {
        if (thread >= count) return;
        int stage = at.stage - distance + thread;
        if (stage < 0) stage += X::STAGES;
        mbarrier_arrive(smem_addr(&sm.bars.ring[W].empty[stage]));
    }

    /* ---- Computing scores ---------------------------------------------------------------------------------------- */

    DEVICE void keep_queries()
    {
        const int row = warp * 16 + lane / 4;
#pragma unroll
        for (int k = 0; k < KEPT * 4; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = row + e % 2 * 8, piece = k % 4 * 2 + e / 2;
                kept[k][e] = *(const uint32_t *)(sm.Q[X::DC - KEPT + k / 4] + (r * 8 + (piece ^ (r & 7))) * 8 +
                                                 lane % 4 * 2);
            }
    }

    /* Issues S += Q K^T for box c of K, which is in the next buffer of the ring. */
    template <int c> DEVICE void score_box(float (&S)[BN / 2])
    {
        await_box();
        const k_major_low<64> Q(address(sm.Q[0]));
        const auto K = stage_of<BOX * 2>(k_major_low<64>(address(sm.ring[W][0])), at.stage);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int step = (c - (X::DC - KEPT)) * 4 + k, accumulate = c > 0 || k > 0;
            if (step < 0) wgmma<T, BN>::ss(S, Q.step(c * 4 + k), K.step(k), accumulate);
            else wgmma_mn<T, BN, 0, 0>::rs(S, kept[step < 0 ? 0 : step], K.step(k), accumulate);
        }
        wgmma_commit();
        at.next();
    }
    template <int c> DEVICE void score_boxes(float (&S)[BN / 2], bool passes)
    {
        score_box<c>(S);
        wgmma_wait<1>();
        release(1, 2);
        if (X::TAKES_TURNS && c == X::TURN_BOX && passes) named_barrier_arrive(TURN, 256);
        if constexpr (c + 1 < X::DC) score_boxes<c + 1>(S, passes);
    }
    /* Issues the scores of all boxes of K (64 columns each) but the first, and waits for them. `passes`: after box
     * TURN_BOX the right-hand consumer may begin its scores. */
    DEVICE void finish_scores(float (&S)[BN / 2], bool passes)
    {
        score_boxes<1>(S, passes);
        retire<0>(S);
        release(1, 1);
    }
    DEVICE void score(float (&S)[BN / 2], bool passes)
    {
        score_box<0>(S);
        finish_scores(S, passes);
    }
    /* Computes the scores of the next tile of keys. Meanwhile the previous product O += P V may still run; when it is
     * complete, the buffer of its last V is released. */
    DEVICE void score_behind(float (&S)[BN / 2], float (&O)[BOXES][32], bool passes)
    {
        score_box<0>(S);
        retire_values<1>(O);
        finish_scores(S, passes);
    }
    DEVICE void score_in_turn(float (&S)[BN / 2])
    {
        if (X::TAKES_TURNS) named_barrier_sync(TURN, 256);
        score(S, false);
    }

    /* ---- Computing P from scores --------------------------------------------------------------------------------- */

    /* Turns the scores S of tile j into P, and writes P to shared memory for the other consumer. */
    DEVICE void exponentiate(uint32_t (&P)[BN / 16][4], float (&S)[BN / 2], float (&rescale)[2], const work_tile &t,
                             const key_walk<X> &walk, int j)
    {
        if constexpr (X::SCORE_MODS) {
            modify_scores<BN>(S, p.mods, head, t, i0, j * BN, lane, [] {});
            if (walk.seen && walk.seen->part[j / 32] >> j % 32 & 1) hide_by_bounds<BN>(S, p.mask, t, i0, j * BN, lane);
        }
        if (j < free_first || j >= free_last) mask<BN>(S, band, i0, j * BN, lane, shift_of<X>(p));
        softmax_step<BN>(S, x, rescale, p.reference);
        to_operand<T, BN>(P, S);
        give(P, rescale);
    }
    DEVICE void give(const uint32_t (&P)[BN / 16][4], const float (&rescale)[2]) const
    {
#pragma unroll
        for (int k = 0; k < BN / 16; k++) sm.P.P[k][thread] = make_uint4(P[k][0], P[k][1], P[k][2], P[k][3]);
        sm.P.rows[thread] = make_float4(x.m[0], x.m[1], rescale[0], rescale[1]);
        named_barrier_arrive(P_READY + W * 4 + warp, 64);
    }
    /* Reads P, the references (the numbers subtracted from scores) and the rescale factors that the other consumer has
     * written. */
    DEVICE void take(uint32_t (&P)[BN / 16][4], float (&rescale)[2])
    {
        named_barrier_sync(P_READY + (1 - W) * 4 + warp, 64);
#pragma unroll
        for (int k = 0; k < BN / 16; k++) {
            const uint4 words = sm.P.P[k][thread];
            P[k][0] = words.x, P[k][1] = words.y, P[k][2] = words.z, P[k][3] = words.w;
        }
        const float4 rows = sm.P.rows[thread];
        x.m[0] = rows.x, x.m[1] = rows.y, rescale[0] = rows.z, rescale[1] = rows.w;
#pragma unroll
        for (int half = 0; half < 2; half++) x.l[half] *= rescale[half];
    }

    /* ---- O += P V ------------------------------------------------------------------------------------------------ */

    /* Sets rows of V past the end of the sequence to zero, in the next BOXES buffers of the ring. */
    DEVICE void clear_tail(const work_tile &t)
    {
        ring<X::STAGES> box = at;
#pragma unroll
        for (int c = 0; c < BOXES; c++, box.next()) {
            mbarrier_wait(smem_addr(&sm.bars.ring[W].full[box.stage]), box.phase);
            for (int n = thread; n < (BN - t.Sk % BN) * 8; n += 128)
                ((uint4 *)(sm.ring[W][box.stage] + t.Sk % BN * 64))[n] = make_uint4(0, 0, 0, 0);
        }
        fence_proxy_async_shared();
        meet();
    }

    /* Multiplies O by rescale, and issues O += P V for tile j. With EARLY, also releases each buffer of V, except the
     * last, after its product. */
    template <bool EARLY = true>
    DEVICE void multiply_values(float (&O)[BOXES][32], const uint32_t (&P)[BN / 16][4], const float (&rescale)[2],
                                const work_tile &t, int j)
    {
        if (__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1))
#pragma unroll
            for (int c = 0; c < BOXES; c++) multiply_rows(O[c], rescale);
        if ((p.cu_q || p.seqlens_k) && j == (t.Sk - 1) / BN && t.Sk % BN) clear_tail(t);
#pragma unroll
        for (int c = 0; c < BOXES; c++) {
            await_box();
            const auto V = stage_of<BOX * 2>(mn_major_low<64>(address(sm.ring[W][0])), at.stage);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BN / 16; k++) wgmma<T, 64>::rs(O[c], P[k], V.step(k), 1);
            at.next();
            if (EARLY || c + 1 == BOXES) wgmma_commit();
            if (EARLY && c > 0) {
                wgmma_wait<1>();
                release(1, 2);
            }
        }
    }
    /* Waits for O += P V, and releases the buffers of V that multiply_values() has not released. LATER: number of
     * products issued afterwards, which may still run. */
    template <int LATER, bool EARLY = true> DEVICE void retire_values(float (&O)[BOXES][32])
    {
        wgmma_wait<LATER>();
#pragma unroll
        for (int c = 0; c < BOXES; c++) opaque(O[c]);
        if (EARLY) release(1, 1 + LATER);
        else release(BOXES, BOXES + LATER);
    }

    /* ---- Computing a work tile ----------------------------------------------------------------------------------- */

    DEVICE void release_Q() const
    {
        if (thread == 0) mbarrier_arrive(smem_addr(&sm.bars.Q.empty[0]));
    }

    DEVICE void attend_left(float (&O)[BOXES][32], const work_tile &t, const key_walk<X> &walk, int j0)
    {
        float S[BN / 2], rescale[2];
        uint32_t P[BN / 16][4];
        int j1 = walk.next(j0);
        score(S, j1 >= 0);
#pragma unroll 1
        for (;;) {
            const int j2 = j1 < 0 ? -1 : walk.next(j1);
            if (j2 < 0) release_Q();
            exponentiate(P, S, rescale, t, walk, j0);
            multiply_values(O, P, rescale, t, j0);
            retire_values<0>(O);
            if (j1 < 0) return;
            take(P, rescale);
            multiply_values(O, P, rescale, t, j1);
            if (j2 < 0) {
                retire_values<0>(O);
                return;
            }
            j0 = j2, j1 = walk.next(j2);
            score_behind(S, O, j1 >= 0);
        }
    }
    DEVICE void attend_right(float (&O)[BOXES][32], const work_tile &t, const key_walk<X> &walk, int j0)
    {
        float S[BN / 2], rescale[2];
        uint32_t P[BN / 16][4];
        int j1 = walk.next(j0);
        if (j1 < 0) {
            /* All warps must have read Q (keep_queries()) before it is released. Here no product makes the warps wait
             * for each other, so they meet at a barrier. */
            meet();
            release_Q();
        } else {
            score_in_turn(S);
#pragma unroll 1
            for (;;) {
                const int j2 = walk.next(j1), j3 = j2 < 0 ? -1 : walk.next(j2);
                if (j3 < 0) release_Q();
                take(P, rescale);
                multiply_values<false>(O, P, rescale, t, j0);
                /* P of this consumer's own tile j1. It needs registers of its own, because a running product still
                 * reads P of tile j0. */
                uint32_t own[BN / 16][4];
                exponentiate(own, S, rescale, t, walk, j1);
                retire_values<0, false>(O);
                multiply_values(O, own, rescale, t, j1);
                retire_values<0>(O);
                j0 = j2, j1 = j3;
                if (j3 < 0) break;
                score_in_turn(S);
            }
        }
        if (j0 < 0) return;
        take(P, rescale);
        multiply_values(O, P, rescale, t, j0);
        retire_values<0>(O);
    }

    /* Returns whether row i, whose largest score is -inf, sees keys. All its q.k are then below the range of float32.
     * Returns false if FlashMask may be the reason for -inf. */
    DEVICE bool has_lost_keys(const work_tile &t, int i) const
    {
        if (std::is_same<T, __half>::value || p.mask.bounds || i >= t.Sq) return false;
        if (!X::SPLITS) return max(i + band.lo, 0) < min(i + band.hi, band.Sk);
        const int query = i >> p.shift;
        return max(query + band.lo, t.first * BN) < min(min(query + band.hi, band.Sk), t.last * BN);
    }

    /* Reports to a later kernel which rows tensor cores could not compute; sound[n] is false if row n of the thread's
     * two rows is such a row. Each such row gets a mark. If `marks` is NULL, each warp with such a row sets its
     * flag. */
    DEVICE void report(bool (&sound)[2], const work_tile &t, int number) const
    {
        const bool any = __any_sync(0xffffffff, !sound[0] || !sound[1]);
        if (!p.marks) {
            /* if a work tile computes several splits, the flag of an earlier split must stay set */
            const bool keeps = X::SPLITS && p.in_turn && t.split > 0;
            if (lane == 0 && (any || !keeps)) p.nonfinite[number * FLAGS + W * 4 + warp] = any;
        } else if (any) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const unsigned unsound = __ballot_sync(0xffffffff, !sound[half]);
                if (lane % 4 == 0 && unsound >> lane & 15) mark_row(p, shift_of<X>(p), t, i0 + half * 8);
            }
        }
    }

    /* Adds the sums l of both consumers. */
    DEVICE void add_sums()
    {
        float2(&l)[2][128] = sm.l[work.stage];
        l[W][thread] = make_float2(x.l[0], x.l[1]);
        named_barrier_sync(ENDED, 256);
        x.l[0] = l[LEFT][thread].x + l[RIGHT][thread].x;
        x.l[1] = l[LEFT][thread].y + l[RIGHT][thread].y;
    }

    /* Returns whether tensor cores could compute row `half` of the thread's two rows: its sum and O are finite, and its
     * scores are not huge. zero: 0 if the thread's numbers of O are finite, otherwise NaN. */
    DEVICE bool is_sound(const row_ends &ends, float zero, const work_tile &t, int half) const
    {
        return zero == 0 && x.l[half] - x.l[half] == 0 &&
               (ends.top[half] == -CUDART_INF_F ? !has_lost_keys(t, i0 + half * 8)
                                                : fabsf(ends.top[half]) < SCORE_MOST);
    }

    /* Stores the sums of a split (a part of the keys). If this block computes all splits of its rows, it first adds the
     * sums of earlier splits, and after the last split it stores the results. */
    DEVICE void finish_split(float (&boxes)[BOXES][32], const work_tile &t, int column0, int number)
    {
        float(&O)[BOXES * 32] = (float(&)[BOXES * 32]) boxes;
        const int slot = p.in_turn ? (int)blockIdx.x : number, first = W == LEFT ? 0 : X::MOST_BOXES * 64;
        float4 *const sums = p.sums + (((int64_t)slot * 4 + warp) * (X::DVC * 8) + first / 8) * 32 + lane,
                      *const rows = p.of_row + ((int64_t)slot * 4 + warp) * 64 + lane;
        const bool adds = p.in_turn && t.split > 0;
        /* The splits of a work tile use two places of `rows` by turns. The consumers wait for each other in add_sums()
         * of each split, so neither stores to a place that the other consumer still reads. */
        add_sums();
        const row_ends ends = end_rows(x, p.reference, -CUDART_INF_F, 1);
        split_end end = { { ends.top[0], ends.top[1] }, { x.l[0], x.l[1] }, true };
        const float zero = is_finite(O) ? 0 : CUDART_NAN_F;
        bool sound[2] = { is_sound(ends, zero, t, 0), is_sound(ends, zero, t, 1) };
        if (adds)
            add_split(
                rows[(t.split - 1) % 2 * 32], [&](int n) { return sums[n * 32]; }, O, end);
        if (p.in_turn && t.split + 1 == t.splits) {
            if (!store_split_rows<T, BOXES * 64>(p, t, i0, column0 + first, O, end, lane)) sound[0] = sound[1] = false;
        } else {
            if (W == LEFT)
                rows[p.in_turn ? t.split % 2 * 32 : 0] = make_float4(end.top[0], end.l[0], end.top[1], end.l[1]);
#pragma unroll
            for (int n = 0; n < BOXES * 8; n++)
                sums[n * 32] = make_float4(O[n * 4], O[n * 4 + 1], O[n * 4 + 2], O[n * 4 + 3]);
        }
        report(sound, t, number);
    }

    DEVICE void finish(float (&O)[BOXES][32], const work_tile &t, int column0, int number)
    {
        if constexpr (X::SPLITS) return finish_split(O, t, column0, number);
        add_sums();
        const row_ends ends = end_rows(x, p.reference, sink_log2(p.to, t.h), 1);
        if (W == LEFT && column0 == 0) store_lse(p.to, t.b, t.h, t.q_start, i0, t.Sq, x, ends, lane);
        float zero[2] = { 0, 0 }; /* 0, or NaN if one of the thread's numbers in this row is not finite */
#pragma unroll
        for (int c = 0; c < BOXES; c++)
#pragma unroll
            for (int i = 0; i < 32; i++) {
                O[c][i] *= ends.factor[i / 2 % 2];
                zero[i / 2 % 2] = fmaf(O[c][i], 0, zero[i / 2 % 2]);
            }
        bool sound[2] = { is_sound(ends, zero[0], t, 0), is_sound(ends, zero[1], t, 1) };
        report(sound, t, number);
        if (!p.to.out) return;
        const int row = i0 - lane / 4;
        T *const rows = out_row<T>(p.to, t.b, t.h, t.q_start + row);
        column0 += W == LEFT ? 0 : X::MOST_BOXES * 64;
#pragma unroll
        for (int c = 0; c < BOXES; c++)
            store_rows<T, 64>(rows + column0 + c * 64, p.to.out_row, t.Sq - row, p.to.Dv - column0 - c * 64, O[c],
                              lane);
    }

    DEVICE void run()
    {
#pragma unroll 1
        for (;; work.next()) {
            mbarrier_wait(smem_addr(&sm.bars.work.full[work.stage]), work.phase);
            const wide_work &y = sm.work[work.stage];
            const work_tile &t = y.x;
            if (t.i0 == STOP) return;
            band = band_of(p, t);
            i0 = t.i0 + warp * 16 + lane / 4;
            free_first = y.y.free_first, free_last = y.y.free_last;
            x = softmax();
            float O[BOXES][32];
#pragma unroll
            for (int c = 0; c < BOXES; c++)
#pragma unroll
                for (int i = 0; i < 32; i++) O[c][i] = 0;
            if (t.first < t.last) {
                if constexpr (X::SCORE_MODS) {
                    lazy_reference unscaled = p.reference;
                    head = head_mods_of(p.mods, t.b, t.h, 1, false, unscaled);
                }
                const key_walk<X> walk(p, sm, work.stage, t.first);
                mbarrier_wait(smem_addr(&sm.bars.Q.full[0]), q.phase);
                q.next();
                keep_queries();
                if (W == LEFT) attend_left(O, t, walk, t.last - 1);
                else attend_right(O, t, walk, t.last - 1);
            }
            finish(O, t, y.column0, y.number);
            meet();
            if (thread == 0) mbarrier_arrive(smem_addr(&sm.bars.work.empty[work.stage]));
        }
    }
};

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <typename T, class X>
__global__ void __launch_bounds__(THREADS, 1)
    wide_tiles(const __grid_constant__ wide_plan p, const __grid_constant__ wide_maps maps)
{
    static_assert(sizeof(shared<X>) <= 227 << 10, "what a block may have");
    shared<X> &sm = block_memory<shared<X>>();
    const int w = warpgroup_index();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&maps.Q);
        prefetch_tensormap(&maps.K);
        prefetch_tensormap(&maps.V);
        sm.init();
    }
    __syncthreads();
    launch_dependents();
    wait_for_prerequisites();
    if (w == 2) {
        setmaxnreg_dec<PRODUCER>();
        const int warp = threadIdx.x / 32 - 8;
        if (warp == 0) schedule(p, sm);
        else if (warp == 1 && threadIdx.x % 32 == 0) box_loader<X, LEFT>{ p, sm, maps }.run();
        else if (warp == 2 && threadIdx.x % 32 == 0) box_loader<X, RIGHT>{ p, sm, maps }.run();
        return;
    }
    setmaxnreg_inc<CONSUMER>();
    if (w == LEFT) wide_consumer<T, X, LEFT>(p, sm).run();
    else wide_consumer<T, X, RIGHT>(p, sm).run();
}

template <bool SPLITS>
__global__ void __launch_bounds__(128)
    repair_wide(const __grid_constant__ wide_plan p, const __grid_constant__ cuda_args a)
{
    const auto tile_of = [&](int n) {
        if constexpr (SPLITS) return split_rows_of<BM, BN>(p, n / 4);
        else return work_tile_of<BM, BN>(p, p.order.first + n / 4);
    };
    const auto flag = [&](int n) {
        const int first = (SPLITS ? n / 4 * p.most : p.order.first + n / 4) * p.column_blocks;
        uint32_t any = 0;
        for (int c = 0; c < p.column_blocks * 2; c++) any |= p.nonfinite[first * FLAGS + c * 4 + n % 4];
        return any && tile_of(n).i0 != SKIP; /* a skipped work tile has no valid flags */
    };
    wait_for_prerequisites();
    const int tiles = SPLITS ? p.order.tiles / p.most : p.order.end - p.order.first;
    for_flagged_warps(tiles * 4, flag, [&](int n, uint32_t) {
        const work_tile t = tile_of(n);
        if (SPLITS) {
            repair_begins();
            for (int r = 0; r < 16; r++) repair_split_row<ATTN_MAX_HEAD_DIM / 32>(p, a, t, t.i0 + n % 4 * 16 + r);
            return;
        }
        const head_args x = head_args_of(a, t.b, t.h);
        const int i0 = t.i0 + n % 4 * 16;
        repair_begins();
        for (int i = i0; i < i0 + 16 && i < t.Sq; i++)
            forward_row<ATTN_MAX_HEAD_DIM / 32>(a, x, i, a.g.view[ATTN_T_out], nullptr, UNSOUND_ROWS);
    });
}

/* Adds the results of splits (parts of the keys), and reports to repair_wide() or to a later launch which rows tensor
 * cores could not compute. */
template <typename T, int DVC>
__global__ void __launch_bounds__(DVC * 64) merge_wide(const __grid_constant__ wide_plan p)
{
    const auto leave = [&](const work_tile &t, int row, int64_t tile) {
        if (!p.marks) p.nonfinite[tile * FLAGS + row % BM / 16] = 1;
        else
            for (int i = row; i < row + 16; i++) mark_row(p, p.shift, t, i);
    };
    merge_splits_of_rows<T, BM, BN, FLAGS, DVC * 64, 64>(p, p.column_blocks, !p.marks,
                                                         [&](const work_tile &t, int row, int64_t tile) {
                                                             if (threadIdx.x == 0) leave(t, row, tile);
                                                         });
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

template <class X> int column_blocks_of(const attn_dims &d)
{
    return (int)attn_tiles(d.Dv, X::DVC * 64);
}

/* Launches the kernel wide_tiles for the plan p, whose order of work tiles is complete. */
template <typename T, class X>
cudaError_t launch_tiles(const forward_job &job, const tma_tensor &queries, int rows, int heads, wide_plan &p)
{
    const attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    wide_maps maps;
    if (!tma_map(&maps.Q, queries, rows, 128, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, heads) ||
        !tma_map(&maps.K, tma_tensor_of(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D), BN) ||
        !tma_map(&maps.V, tma_tensor_of(g.view[ATTN_T_v], e.B, d.Hk, e.rows_k, d.Dv), BN))
        return cudaErrorInvalidValue;
    const cudaError_t code = allow_shared<wide_tiles<T, X>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;
    take_share(job.chip, p.order);
    if (p.order.first == p.order.end) return cudaSuccess;
    if (X::SCORE_MODS && p.mask.bounds) {
        const int warps = (int)(d.B * (d.H / g.mask_group)) * p.mask.key_tiles;
        tile_extremes<BN><<<(unsigned)attn_min64(attn_tiles(warps, 4), 1 << 20), 128, 0, job.stream>>>(
            p.mask, p.B, p.H, p.Sq, p.Sk, (attn_mask_extremes *)p.mask.extremes);
    }
    return launch_dependent(wide_tiles<T, X>,
                            attn_min64((p.order.end - p.order.first) * p.column_blocks, job.chip->multiprocessors),
                            THREADS, sizeof(shared<X>), job.stream, p, maps);
}

template <bool SPLITS> cudaError_t launch_repair(const forward_job &job, int64_t tiles, const wide_plan &p)
{
    if (p.marks) return cudaSuccess;
    return launch_dependent(repair_wide<SPLITS>, attn_min64(attn_tiles(tiles * 4, 128), 1024), 128, 0, job.stream, p,
                            job.given);
}

wide_plan begin_plan(const forward_job &job, int column_blocks)
{
    wide_plan p;
    make_plan(job, BM, BN, p);
    p.least_Sk = 0, p.most_Sk = INT32_MAX;
    p.column_blocks = column_blocks;
    p.marks = job.given.rows_later, p.found = job.given.rows_found;
    p.nonfinite = (uint8_t *)job.memory;
    p.mark_batch = job.given.lse_batch, p.mark_head = job.given.lse_head;
    return p;
}

/* Launches the forward of the sequences whose keys are split by the rule job.splits. */
template <typename T, class X> cudaError_t launch_splits(const forward_job &job)
{
    const attn_geometry &g = job.read.g;
    const int column_blocks = column_blocks_of<X>(g.dims);
    const split_layout y = split_layout_of(job.chip, job.splits, g.dims, X::DVC * 64, column_blocks);
    const int64_t rows = y.per_head * y.heads;
    wide_plan p = begin_plan(job, column_blocks);
    make_split_plan(job.splits, y, job.split_memory, p);
    cudaError_t code = launch_tiles<T, X>(job, queries_by_head(g), 1 << p.shift, BM >> p.shift, p);
    if (code != cudaSuccess || !is_last_share(job.chip)) return code;
    if (!y.in_turn)
        code = launch_dependent(merge_wide<T, X::DVC>, rows * (BM / 16) * column_blocks, X::DVC * 64, 0, job.stream, p);
    return code == cudaSuccess ? launch_repair<true>(job, rows, p) : code;
}

/* Launches the forward of the sequences whose keys are split if X::SPLITS is true, otherwise the forward of the other
 * sequences. */
template <typename T, class X> cudaError_t launch(const forward_job &job)
{
    if constexpr (X::SPLITS) return launch_splits<T, X>(job);
    const attn_geometry &g = job.read.g;
    const extent e = extent_of(g.dims);
    wide_plan p = begin_plan(job, column_blocks_of<X>(g.dims));
    const cudaError_t code = launch_tiles<T, X>(job, tma_tensor_of(g.view[ATTN_T_q], e.B, g.dims.H, e.rows_q, g.dims.D),
                                                BM, 1, p);
    if (code != cudaSuccess || p.order.first == p.order.end) return code;
    return launch_repair<false>(job, p.order.end - p.order.first, p);
}

} // namespace

#endif
