/* forward_tiles.cuh: flash attention forward for Hopper (FlashAttention-3, arXiv:2407.08608, Algorithm 1), with TMA,
 * wgmma and warp specialisation. README.md has the schedule. forward.cu and forward_pairs.cu have the tile shapes.
 *
 * One block per multiprocessor computes one work tile (BM queries of one head) after the other. One warpgroup is the
 * producer: it claims work tiles from a counter, and TMA fills a ring of K tiles and a ring of V tiles. The others are
 * consumers: each owns 64 of the rows and has their O in registers. They take turns to issue products.
 *
 * Elements past the end of a tensor arrive as zeros (tma.cuh). In packed tensors, the scores of keys past the end of a
 * sequence are masked, and their rows of V are set to zero in shared memory.
 *
 * P = 0 times a NaN or infinity in V is NaN, even in rows that do not see the key. A block therefore computes work
 * tiles with such results again at its end, with zeros in place of NaN and infinity. Rows that see these values are
 * then computed one by one (repair_own_rows).
 *
 * A row's bits depend on BN and the order of the tiles. Both are fixed by the head size, the options, the masks and the
 * sequence's own Sk. Where keys are split, the bits also depend on the length of the splits (split_rule.h). */
#ifndef ATTN_SM90_FORWARD_TILES_CUH
#define ATTN_SM90_FORWARD_TILES_CUH

#include "kernels/cuda/sm90/forward/forward_plan.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/forward/kv_pipeline.cuh"
#include "kernels/cuda/sm90/forward/splits.cuh"
#include "kernels/cuda/sm90/layer/products.cuh"

namespace {

/* ---- Shapes of kernel instances, and shared memory --------------------------------------------------------------- */

/* PLAIN: no options. WINDOWED: for masks that hide the first keys of a row. WITH_OPTIONS: for the options of
 * score_mods.cuh. WITH_PAIRS: for those options, and for bias, keep_mask and dropout (pairs.cuh). WITHOUT_BIAS: like
 * WITH_PAIRS, but without a bias, which takes registers. */
enum variant { PLAIN, WINDOWED, WITH_OPTIONS, WITHOUT_BIAS, WITH_PAIRS };

/* D: the largest head size of q and k. C: number of consumers, with 64 rows each. BN: keys per tile. STAGES: number of
 * buffers in each ring of tiles. DV: the largest head size of v. PRODUCER and CONSUMER are registers per thread (the C
 * + 1 warpgroups of a block share 65536). SPLITS: the instance computes sequences whose keys are split, and a work tile
 * has only a split (a part) of the keys that its rows see. */
template <int D_, int C_, int BN_, int STAGES_, int DV_ = D_, variant VARIANT = PLAIN, bool SPLITS_ = false>
struct shape {
    typedef shape<D_, C_, BN_, STAGES_, DV_, VARIANT, true> split_shape;
    static const int D = D_, C = C_, DV = DV_, BN = BN_, STAGES = STAGES_, BM = 64 * C, THREADS = 128 * (C + 1);
    static const bool BIAS = VARIANT == WITH_PAIRS, PAIRS = VARIANT == WITHOUT_BIAS || BIAS;
    static const bool SCORE_MODS = VARIANT == WITH_OPTIONS || PAIRS;
    static const bool SPLITS = SPLITS_;
    /* Whether a consumer may skip tiles at the beginning of a work tile's keys. With a window, its own rows may see
     * none of these keys, although rows of other consumers do. */
    static const bool PASSES_FIRST = VARIANT == WINDOWED;
    static const int CHUNKS = (D + 63) / 64, CHUNKS_V = (DV + 63) / 64;
    static const int PRODUCER = C == 2 ? 40 : 32, CONSUMER = C == 2 ? 232 : C == 3 ? 160 : 112;
    /* whether shared memory has room for O beside Q, K and V */
    static const bool STAGES_OUT = !SPLITS &&
                                   ((C * 64 + STAGES * BN) * CHUNKS + (STAGES * BN + C * 64) * CHUNKS_V) * 128 <=
                                       220 << 10;
    static const bool LOW_WORDS =
        /* Whether the kernel keeps only the low words of operands' descriptors in registers. At other head sizes than
         * 128 and 192, the kernel would be 1 to 4 % slower with only the low words. */
        D == 128 || D == 192;
    /* whether the wait for the product O += P V comes after the softmax (see release_K_late()) */
    static const bool LATE_WAIT = D == 128 || D == 192;
    /* A warpgroup's rows may see only the first keys of a tile. If they see at most FEW_KEYS keys of the last tile that
     * they see, only the scores of its first FEW_KEYS keys are computed. */
    static const int FEW_KEYS = PAIRS ? BN : BN == 128 ? 64 : BN == 80 ? 48 : BN;
    /* The argument IN_TURN of softmax_step(). 0: both rows' maxima are searched together. 1: the second row's search
     * waits for the first row's maximum. 2: it also waits for the first exponential. */
    static const int IN_TURN = D != 128 ? 0 : BN == 128 && !SCORE_MODS ? 2 : 1;
    /* whether the softmax finds maxima by largest_by_bits() (integer comparisons); shapes for which this is false lack
     * a register for it */
    static const bool BY_BITS = D < 256 && !SCORE_MODS;
    /* Whether the first product of the next work tile is issued right after the last one of the present work tile. It
     * then runs while the output is written. */
    static const bool BEGINS_EARLY = D == 96 || D == 192 || (D != 128 && SCORE_MODS && !PAIRS);
    /* The most tiles of keys that a consumer skips at either end of a work tile's keys. Its rows see none of these
     * keys, but rows of other consumers do. */
    static const int MOST_PASSED = (BM - 64 + BN - 1) / BN;
};

template <class X>
using plan_of = std::conditional_t<X::PAIRS, pair_plan, std::conditional_t<X::SPLITS, split_plan, plan>>;

template <class X> DEVICE bool lists_tiles(const plan_of<X> &p)
{
    if constexpr (X::PAIRS) return p.mask.bounds || p.kept.words;
    else return X::SCORE_MODS && p.mask.bounds;
}

/* Number of work tiles whose descriptions are in shared memory: one that a consumer still reads, the next one, and one
 * that is published meanwhile. The newest one is also in shared::work, because ptxas treats only values read from a
 * fixed address as equal in all lanes. */
const int RECENT = 3;
template <int C> struct recent_work {
    work_tile work;
    warpgroup_tile parts[C];
};

/* Two lists of visible tiles of keys, for the present work tile and for the next. Only kernel instances with options
 * have them. */
template <bool SCORE_MODS> struct tile_lists {
    DEVICE tile_bits *list(int) { return nullptr; }
};
template <> struct tile_lists<true> {
    tile_bits lists[2];
    DEVICE tile_bits *list(int n) { return lists + n; }
};

template <class X> struct shared : tile_lists<X::SCORE_MODS> {
    alignas(1024) uint16_t Q[X::C][64 * 64 * X::CHUNKS]; /* Q per consumer: CHUNKS chunks of 64 rows of 64 numbers */
    alignas(1024) uint16_t K[X::STAGES][X::BN * 64 * X::CHUNKS];
    alignas(1024) uint16_t V[X::STAGES][X::BN * 64 * X::CHUNKS_V];
    /* O on its way to global memory: 16 rows for each consumer warp */
    alignas(1024) uint16_t out[X::STAGES_OUT ? X::C * 64 * 64 * X::CHUNKS_V : 8];
    work_tile work; /* the newest work tile, and the tiles of keys that each consumer computes */
    warpgroup_tile parts[X::C];
    recent_work<X::C> recent[RECENT];
    head_mods heads[X::SCORE_MODS ? X::C * 4 : 1];
    int any_nonfinite;
    /* The block's newest work tile, or -1 if it has none. From it, plan::before leads to the block's earlier work
     * tiles. */
    int newest;
    /* the buffer of V that zero_nonfinite_tiles() must clean next; negative: there is no more work */
    int raw_stage;
    kv_barriers<X::C, X::STAGES> bars;
    uint64_t idle, raw_V;

    /* Initialises the barriers. One thread of the block calls this first. */
    DEVICE void init()
    {
        any_nonfinite = 0;
        bars.init();
        mbarrier_init(smem_addr(&idle), X::C * 4);
        mbarrier_init(smem_addr(&raw_V), 1);
        fence_mbarrier_init();
    }
};

/* Returns the shift that gives the query of a row of a work tile: row r belongs to query r >> shift. */
template <class X> DEVICE int shift_of(const plan_of<X> &p)
{
    if constexpr (X::SPLITS) return p.shift;
    else return 0;
}

/* Returns the tiles of keys that consumer w computes in work tile x, without regard to the list of visible tiles. */
template <class X> DEVICE warpgroup_tile part_of(const plan_of<X> &p, const work_tile &x, int w)
{
    warpgroup_tile y = warpgroup_tile_of<X::BN, X::FEW_KEYS>(band_of(p, x), x.i0 + w * 64, x.Sq, x.first, x.last,
                                                             shift_of<X>(p));
    if (lists_tiles<X>(p)) y.last_visible = x.last, y.few_keys = 0;
    return y;
}

/* Returns the next tile of keys below tile j that must be computed, or first - 1 if there is none. Tile `first` is
 * always computed, even if it is not in the list `seen`. */
template <class X> DEVICE int tile_below(const plan_of<X> &p, const tile_bits *seen, int j, int first)
{
    return !lists_tiles<X>(p) || j <= first ? j - 1 : listed_tile_below(seen, j);
}

/* ---- The warps that load tiles and hand out work (producer) ------------------------------------------------------ */

DEVICE int tile_before(const plan &p, int t)
{
    return *(volatile int *)(p.before + t);
}

template <class X> DEVICE work_tile tile_at(const plan_of<X> &p, int t)
{
    if constexpr (X::SPLITS) return split_tile_of<X::BM, X::BN>(p, t);
    else return work_tile_of<X::BM, X::BN>(p, t);
}

/* The warp that hands out work tiles. At the end it hands out again the work tiles whose results were not finite. */
template <class X> struct work_scheduler {
    const plan_of<X> &p;
    shared<X> &sm;
    const bool scheduler = threadIdx.x % 32 == 0;
    ring<1> at;
    ring<RECENT> recent;
    int list = 0;

    DEVICE void give(work_tile x)
    {
        if (lists_tiles<X>(p) && x.first < x.last) {
            x.list = list ^= 1;
            key_tiles tiles = { x.first, x.last };
            const int end = min(x.i0 + X::BM, x.Sq);
            if constexpr (X::PAIRS) list_visible_tiles(p.mask, p.kept, x.b, x.h, p.H, x.i0, end, tiles, *sm.list(list));
            else list_visible_tiles(p.mask, x.b, x.h, p.H, x.i0, end, tiles, *sm.list(list));
            x.first = tiles.first, x.last = tiles.last;
        }
        if (scheduler) {
            sm.work = sm.recent[recent.stage].work = x;
            for (int n = 0; n < X::C; n++) sm.parts[n] = sm.recent[recent.stage].parts[n] = part_of<X>(p, x, n);
            announce_work(sm);
        }
        recent.next();
        await_readers(sm, at);
    }

    DEVICE void give_order(int order)
    {
        work_tile x = {};
        x.i0 = order;
        give(x);
    }

    DEVICE bool was_nonfinite(int t) const
    {
        bool any = false;
        for (int n = 0; n < 4 * X::C; n++) any |= ((volatile uint8_t *)p.nonfinite)[t * (4 * X::C) + n];
        return __any_sync(0xffffffff, any);
    }

    /* Hands out work tile x or, with X::SPLITS, each split of x that this block computes, as a work tile of its own. */
    DEVICE void give_all(work_tile x)
    {
        if constexpr (!X::SPLITS) give(x);
        else for_splits(p, x, [&](const work_tile &part) { give(part); });
    }

    DEVICE void run()
    {
        int newest = -1;
        for (int t = first_tile(p.order); t < p.order.end; t = claim_tile(p.order, t, p.counter, scheduler)) {
            const work_tile x = tile_at<X>(p, t);
            if (x.i0 == SKIP) continue;
            if (scheduler) p.before[t] = newest;
            newest = t;
            give_all(x);
        }
        give_order(REPORT);
        mbarrier_sleep(smem_addr(&sm.idle), 0);
        for (int t = *(volatile int *)&sm.any_nonfinite ? newest : -1; t >= 0; t = tile_before(p, t)) {
            if (!was_nonfinite(t)) continue;
            work_tile x = tile_at<X>(p, t);
            x.nonfinite_to_zero = 1;
            give_all(x);
        }
        if (!scheduler) return;
        sm.newest = newest;
        sm.work.i0 = STOP;
        announce_work(sm);
        leave_counter(p.counter);
    }
};

/* The thread that fills the rings of K and V. It begins with the next work tile while consumers still compute the
 * present one. */
template <class X> struct tile_loader {
    const plan_of<X> &p;
    shared<X> &sm;
    const kv_maps &maps;
    ring<X::STAGES> k, v;
    ring<1> q, at;

    DEVICE void load_K(const tma_place &from)
    {
        sleep_until_empty(sm.bars.K, k);
        fill_stage<X::BN, X::CHUNKS, 64>(sm.bars.K, k, smem_addr(sm.K[k.stage]), &maps.K, from);
        k.next();
    }

    /* Loads a tile of V. With nonfinite_to_zero, zero_nonfinite_tiles() cleans the tile before consumers read it. */
    DEVICE void load_V(const tma_place &from, bool nonfinite_to_zero)
    {
        if (nonfinite_to_zero) sm.raw_stage = v.stage;
        sleep_until_empty(sm.bars.V, v);
        fill_stage<X::BN, X::CHUNKS_V, 64>(sm.bars.V, v, smem_addr(sm.V[v.stage]), &maps.V, from,
                                           nonfinite_to_zero ? &sm.raw_V : nullptr);
        if (nonfinite_to_zero) await_full(sm.bars.V, v);
        v.next();
    }

    /* Loads Q where a work tile has rows of several heads. The tensor map then has two axes of Q swapped: its rows are
     * the heads of Q, and its heads are the queries. */
    DEVICE void load_Q_of_group(const split_plan &plan, int i0, int q_start, int h, int b)
    {
#pragma unroll 1
        for (int n = 0; n < X::C; n++) {
            mbarrier_sleep(smem_addr(&sm.bars.Q.empty[n]), q.phase ^ 1);
            load_tile<64, X::CHUNKS, 64>(smem_addr(sm.Q[n]), &maps.Q,
                                         { 0, h, q_start + ((i0 + n * 64) >> plan.shift), b },
                                         smem_addr(&sm.bars.Q.full[n]));
        }
        q.next();
    }

    DEVICE void run()
    {
        for (;; at.next()) {
            const work_tile &x = await_work(sm, at);
            const int first = x.first, last = x.last, i0 = x.i0, h = x.h, hk = h / p.group, b = p.cu_q ? 0 : x.b;
            const int q_start = x.q_start, k_start = x.k_start;
            if (i0 == STOP) break;
            const tile_bits *const seen = sm.list(X::SCORE_MODS ? x.list : 0);
            const bool nonfinite_to_zero = x.nonfinite_to_zero, late = first + 1 < last;
            /* The work tile is released when only its last tile of keys is left to load. If it has at most one tile of
             * keys, it is released at once. The release lets the block claim the next work tile. */
            if (!late) release_work(sm);
            if (first >= last) continue;
            const auto tile = [&](int j) { return tma_place{ 0, k_start + j * X::BN, hk, b }; };
            load_K(tile(last - 1));
            if constexpr (X::SPLITS) load_Q_of_group(p, i0, q_start, h, b);
            else load_Q<X::C, X::CHUNKS, 64>(sm, &maps.Q, q_start + i0, h, b, q);
            int above = last - 1;
#pragma unroll 1
            for (int j = tile_below<X>(p, seen, above, first); j >= first;
                 above = j, j = tile_below<X>(p, seen, j, first)) {
                if (late && j == first) release_work(sm);
                load_K(tile(j));
                load_V(tile(above), nonfinite_to_zero);
            }
            load_V(tile(first), nonfinite_to_zero);
        }
        sm.raw_stage = -1;
        mbarrier_arrive(smem_addr(&sm.raw_V));
    }
};

/* Replaces each infinity and NaN in a tile of V by zero. All lanes of the warp must call this. */
template <typename T, int COUNT> DEVICE void zero_nonfinite(uint16_t *tile)
{
    /* the exponent's bits, which are all 1 in infinities and NaN */
    const uint32_t exponent = pack<T>(1, 1) == 0x3c003c00 ? 0x7c00 : 0x7f80;
#pragma unroll 4
    for (int n = threadIdx.x % 32; n < COUNT / 2; n += 32) {
        const uint32_t pair = ((const uint32_t *)tile)[n];
        uint32_t kept = pair;
        if ((pair & exponent) == exponent) kept &= 0xffff0000;
        if ((pair >> 16 & exponent) == exponent) kept &= 0xffff;
        if (kept != pair) ((uint32_t *)tile)[n] = kept;
    }
    fence_proxy_async_shared();
    __syncwarp();
}

/* Replaces infinities and NaN by zeros in all tiles of V for which load_V() asks for it. One warp runs this. */
template <typename T, class X> DEVICE void zero_nonfinite_tiles(shared<X> &sm)
{
    for (uint32_t phase = 0;; phase ^= 1) {
        mbarrier_sleep(smem_addr(&sm.raw_V), phase);
        const int stage = *(volatile int *)&sm.raw_stage;
        if (stage < 0) break;
        zero_nonfinite<T, X::BN * 64 * X::CHUNKS_V>(sm.V[stage]);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&sm.bars.V.full[stage]));
    }
}

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

struct thread_tile {
    int slot; /* index in sm.recent */
    work_tile x;
    warpgroup_tile y;
    int i0; /* the thread's rows are i0 and i0 + 8 */
    key_band band;
};

/* The results of a work tile's softmax: the factors for the thread's two rows of O, and whether scores and sums are
 * finite. */
struct tile_end {
    float factor[2];
    bool finite;
};

/* The operands Q, K and V. With LOW_WORDS, low words of descriptors are kept; otherwise descriptors are made from
 * addresses at each use. */
template <class X, bool LOW_WORDS = X::LOW_WORDS> struct operands {
    shared<X> &sm;
    const k_major<64> Q;
    DEVICE operands(shared<X> &sm_, int w) : sm(sm_), Q{ smem_addr(sm_.Q[w]) } {}
    DEVICE k_major<X::BN> K(int stage) const { return { smem_addr(sm.K[stage]) }; }
    DEVICE mn_major<X::BN> V(int stage) const { return { smem_addr(sm.V[stage]) }; }
};
template <class X> struct operands<X, true> {
    const k_major_low<64> Q;
    const k_major_low<X::BN> first_K;
    const mn_major_low<X::BN> first_V;
    DEVICE operands(shared<X> &sm, int w)
        : Q(smem_addr(sm.Q[w])), first_K(smem_addr(sm.K[0])), first_V(smem_addr(sm.V[0]))
    {
    }
    DEVICE auto K(int stage) const { return stage_of<sizeof(shared<X>::K[0])>(first_K, stage); }
    DEVICE auto V(int stage) const { return stage_of<sizeof(shared<X>::V[0])>(first_V, stage); }
};

/* The bias, keep_mask's bits and dropout's random bits for a tile of keys. Bias and keep_mask's bits are loaded one
 * tile ahead. */
template <class X, bool PAIRS = X::PAIRS> struct pair_values {
};
template <class X> struct pair_values<X, true> {
    uint32_t bias[X::BIAS ? X::BN / 2 : 1];
    uint2 kept[2];
    uint32_t drawn[2];
    int next = -1; /* the tile of keys to compute next; -1: none */
    bool partly;   /* whether FlashMask or keep_mask hides some pairs of the present tile */
};

template <typename T, class X> struct attention {
    static const int BN = X::BN, DV = X::DV;
    const plan_of<X> &p;
    const CUtensorMap &out;
    shared<X> &sm;
    kv_consumer<shared<X>, X::C, X::STAGES> me;
    ring<RECENT> recent;
    const operands<X> operand;
    std::conditional_t<X::PAIRS, exact_reference, lazy_reference> reference;

    DEVICE attention(const plan_of<X> &p_, const CUtensorMap &out_, shared<X> &sm_, int w)
        : p(p_), out(out_), sm(sm_), me(sm_, w), operand(sm_, w), reference{ p_.reference.c, p_.reference.slack }
    {
    }

    DEVICE auto K() const { return operand.K(me.k.stage); }
    DEVICE auto V() const { return operand.V(me.v.stage); }

    DEVICE int warp_index() const { return me.w * 4 + me.warp; }
    DEVICE int lane() const { return me.lane; }

    /* Returns x, which must be the same in all lanes. The vote shows this to ptxas, which would otherwise keep
     * descriptors in registers of each thread. */
    static DEVICE bool warp_uniform(bool x) { return __any_sync(0xffffffff, x); }

    /* The next work tile, or a command to the consumers (REPORT or STOP). */
    struct next_work {
        int slot;
        /* work_tile::i0: the first row, or a negative command (REPORT or STOP) */
        int order;
        int passed; /* number of tiles, at the end of the work tile's keys, that this warpgroup's rows do not see */
        bool loads; /* whether the work tile has keys */
        bool sees;  /* whether this warpgroup's rows see some of the keys that are loaded */
    };
    DEVICE next_work take()
    {
        next_work next;
        me.take([&](const work_tile &x, const warpgroup_tile &y) {
            next = { recent.stage, x.i0, x.last - y.last_visible, warp_uniform(x.i0 >= 0 && x.first < x.last),
                     warp_uniform(x.i0 >= 0 && x.first < y.last_visible) };
            return warp_uniform(next.loads);
        });
        recent.next();
        return next;
    }
    DEVICE thread_tile tile_of(const next_work &work) const
    {
        thread_tile t;
        t.slot = work.slot, t.x = sm.recent[work.slot].work, t.y = sm.recent[work.slot].parts[me.w];
        t.i0 = t.x.i0 + warp_index() * 16 + lane() / 4;
        t.band = band_of(p, t.x);
        return t;
    }

    /* Kernel instances with options read the work tile from shared memory at each use, to save registers. */
    DEVICE const work_tile &work_of(const thread_tile &t) const { return X::SCORE_MODS ? sm.recent[t.slot].work : t.x; }

    /* Sets rows of V past the end of the sequence to zero, in the buffer that is read next. */
    DEVICE void zero_past_end(const work_tile &x)
    {
        me.await_V();
        /* per_chunk: number of 16-byte pieces to set to zero in each chunk of 128 bytes of columns */
        const int rows = BN - x.Sk % BN, per_chunk = rows * 8;
        for (int n = threadIdx.x % 128; n < X::CHUNKS_V * per_chunk; n += 128) {
            const int chunk = n / per_chunk, piece = n % per_chunk;
            ((uint4 *)(sm.V[me.v.stage] + chunk * BN * 64 + x.Sk % BN * 64))[piece] = make_uint4(0, 0, 0, 0);
        }
        fence_proxy_async_shared();
        me.meet();
    }

    DEVICE void ask_for_kept(pair_values<X> &values, const thread_tile &t, int j) const
    {
        if constexpr (X::PAIRS) {
            if (!p.kept.words || j < 0) return;
            const work_tile &x = work_of(t);
#pragma unroll
            for (int half = 0; half < 2; half++)
                values.kept[half] = kept_words(p.kept, x.b, x.h, min(t.i0 + half * 8, x.Sq - 1), j, lane());
        }
    }
    DEVICE void ask_for_bias(pair_values<X> &values, const thread_tile &t, int j) const
    {
        if constexpr (X::BIAS) {
            if (!p.bias.data || j < 0) return;
            const work_tile &x = work_of(t);
            const char *const head = p.bias.data + x.b * p.bias.batch + x.h * p.bias.head +
                                     lane() % 4 * (p.bias.dtype == ATTN_F32 ? 8 : 4);
            const char *const rows[2] = { head + min(t.i0, x.Sq - 1) * p.bias.row,
                                          head + min(t.i0 + 8, x.Sq - 1) * p.bias.row };
            load_bias<BN>(values.bias, p.bias, rows, j * BN, lane());
        }
    }
    /* Determines which tile of keys follows tile j, whether some pairs of tile j are hidden, and which pairs dropout
     * keeps. */
    DEVICE void look_at_pairs(pair_values<X> &values, const thread_tile &t, const tile_bits *seen, int j) const
    {
        if constexpr (X::PAIRS) {
            values.next = j > t.x.first ? tile_below<X>(p, seen, j, t.x.first) : -1;
            values.partly = lists_tiles<X>(p) && (seen->part[j / 32] >> j % 32 & 1);
            if (!p.dropout.drops) return;
            const work_tile &x = work_of(t);
            const uint32_t head = (uint32_t)(p.dropout.first + x.b * p.dropout.batch + x.h);
            draw<BN>(values.drawn, p.dropout, head, t.i0, j * BN, lane());
        }
    }

    /* Turns S, the products q.k with the first N keys of tile j, into P. MASKED: some of these keys may be hidden.
     * BY_BITS and midway: see softmax_step(). */
    template <int N, bool MASKED, bool BY_BITS, class F>
    DEVICE void scores_to_P(float (&S)[N / 2], const thread_tile &t, const tile_bits *seen, int j, softmax &state,
                            float (&rescale)[2], pair_values<X> &values, F midway)
    {
        if constexpr (X::PAIRS) {
            const auto add = [&] {
                if constexpr (X::BIAS)
                    if (p.bias.data) add_bias<N>(S, values.bias, p.bias.dtype, p.unit);
                ask_for_bias(values, t, values.next);
            };
            if (p.mods.cap != 0 || p.mods.slopes)
                modify_scores<N>(S, p.mods, sm.heads[warp_index()], work_of(t), t.i0, j * BN, lane(), add);
            else add();
            if (values.partly) {
                if (p.kept.words) hide_by_words<N>(S, values.kept, lane());
                if (p.mask.bounds) hide_by_bounds<N>(S, p.mask, work_of(t), t.i0, j * BN, lane());
            }
        } else if constexpr (X::SCORE_MODS) {
            const work_tile &x = work_of(t);
            modify_scores<N>(S, p.mods, sm.heads[warp_index()], x, t.i0, j * BN, lane(), [] {});
            if (p.mask.bounds && seen->part[j / 32] >> j % 32 & 1)
                hide_by_bounds<N>(S, p.mask, x, t.i0, j * BN, lane());
        }
        if (MASKED && (N < BN || j < t.y.free_first || j >= t.y.free_last)) {
            mask<N>(S, t.band, t.i0, j * BN, lane(), shift_of<X>(p));
        }
        softmax_step<N, X::IN_TURN, BY_BITS>(S, state, rescale, reference, midway);
        if constexpr (X::PAIRS)
            if (p.dropout.drops) drop<N>(S, values.drawn, lane());
    }

    /* Releases the buffer of K in the middle of the softmax, if LATE_WAIT is true. ptxas moves the wait for the product
     * O += P V up to the nearest release before it, so the release must be late. The condition always holds (a sum is
     * never below -slack), but ptxas cannot know that. */
    DEVICE void release_K_late(float sum)
    {
        if (X::LATE_WAIT && me.leader && !(sum < -reference.slack))
            mbarrier_arrive(smem_addr(&sm.bars.K.empty[me.k.stage]));
    }

    /* Releases the last `passed` tiles of keys, which this warpgroup's rows do not see, and waits for Q and for the
     * first tile to compute. */
    DEVICE void await_first(int passed)
    {
        me.await_Q();
        me.template pass_K<X::MOST_PASSED>(passed);
        me.await_K();
    }

    /* Issues S = Q K^T for the first N keys of the first tile that is computed. The caller must call retire() before it
     * reads S. */
    template <int N> DEVICE void multiply_first(float (&S)[N / 2])
    {
        me.await_turn();
        multiply<T, N, X::D / 16>(S, operand.Q, K());
        me.next_turn();
    }

    /* Issues the first product S = Q K^T of the next work tile, if BEGINS_EARLY is true. It does so even if this
     * warpgroup's rows see no keys, because ptxas would wait at once for a product in a branch. Nothing overwrites the
     * operands until this warpgroup releases `work`. */
    DEVICE void begin(float (&S)[BN / 2], const next_work &work)
    {
        if (warp_uniform(work.sees)) {
            await_first(work.passed);
            me.await_turn();
        } else if (warp_uniform(work.loads)) {
            me.look_for_Q();
            me.await_K();
        }
        undefine(S);
        multiply<T, BN, X::D / 16>(S, operand.Q, K());
        if (warp_uniform(work.sees)) me.next_turn();
    }

    /* Computes P of the first N keys of the last tile that this warpgroup's rows see. `all` has this tile's scores, if
     * BEGINS_EARLY is true: begin() has computed them. */
    template <int N>
    DEVICE void first_tile(uint32_t (&P)[BN / 16][4], float (&all)[BN / 2], const thread_tile &t, const tile_bits *seen,
                           softmax &state, pair_values<X> &values)
    {
        const int j = t.y.last_visible - 1;
        float S[N / 2], rescale[2];
        if (X::BEGINS_EARLY) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) S[i] = all[i];
        } else {
            multiply_first<N>(S);
            look_at_pairs(values, t, seen, j);
            retire<0>(S);
        }
        me.release_K(j == (X::PASSES_FIRST ? first_visible(t) : t.x.first));
        scores_to_P<N, true, false>(S, t, seen, j, state, rescale, values, [](float) {});
        if (N < BN) {
#pragma unroll
            for (int i = 0; i < BN / 16; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) P[i][e] = 0;
        }
        to_operand<T, N>(P, S);
    }

    /* Return the first tile of keys that some row of the block (first_of_block) or of this warpgroup (first_visible)
     * sees. Each is computed at each use, to save registers. */
    DEVICE int first_of_block(const thread_tile &t) const
    {
        return key_tiles_of<BN>(t.band, t.x.i0, t.x.i0).first;
    }
    DEVICE int first_visible(const thread_tile &t) const
    {
        return min(key_tiles_of<BN>(t.band, t.x.i0 + me.w * 64, t.x.i0).first, t.y.last_visible - 1);
    }

    /* Returns how many tiles at the beginning of the work tile's keys this warpgroup skips. Other warpgroups need these
     * tiles. */
    DEVICE int first_passed(const thread_tile &t) const
    {
        return X::PASSES_FIRST ? first_visible(t) - first_of_block(t) : 0;
    }

    /* Adds P V to O for the tiles of keys that this warpgroup's rows see, except the tile that is computed last. `P`
     * gets P of that last tile, and the caller must add its P V. `begun` has the scores of the tile that is computed
     * first, if BEGINS_EARLY is true. */
    DEVICE void attend(float (&O)[DV / 2], uint32_t (&P)[BN / 16][4], float (&begun)[BN / 2], softmax &state,
                       const thread_tile &t)
    {
        const int first = X::PASSES_FIRST ? first_visible(t) : t.x.first, last = t.x.last,
                  last_visible = t.y.last_visible;
        const tile_bits *const seen = sm.list(t.x.list);
        const auto below = [&](int j) { return tile_below<X>(p, seen, j, first); };
        float S[BN / 2], rescale[2];
        pair_values<X> values;
        const auto next_tile = [&](int j) {
            if constexpr (X::PAIRS) return values.next;
            else return below(j);
        };

        if constexpr (X::SCORE_MODS) begin_head(t.x);
        ask_for_kept(values, t, last_visible - 1);
        ask_for_bias(values, t, last_visible - 1);
        if (X::BEGINS_EARLY) retire<0>(begun);
        else await_first(last - last_visible);
        if (X::FEW_KEYS < BN && t.y.few_keys) first_tile<X::FEW_KEYS>(P, begun, t, seen, state, values);
        else first_tile<BN>(P, begun, t, seen, state, values);
        ask_for_kept(values, t, next_tile(last_visible - 1));
        me.template pass_V<X::MOST_PASSED>(last - last_visible);
        if ((p.cu_q || p.seqlens_k) && last_visible - 1 == (t.x.Sk - 1) / BN && t.x.Sk % BN) zero_past_end(t.x);

        const auto step = [&](int j, auto masked, auto by_bits) {
            me.await_K();
            me.await_turn();
            multiply<T, BN, X::D / 16>(S, operand.Q, K());
            me.await_V();
            /* this product adds P V of the tile that was computed before tile j */
            multiply_add<T, DV, BN / 16>(O, P, V());
            me.next_turn();
            look_at_pairs(values, t, seen, j);
            retire<1>(S);
            me.template release_K<X::LATE_WAIT>(j == first);
            scores_to_P<BN, masked.value, by_bits.value>(S, t, seen, j, state, rescale, values,
                                                         [&](float sum) { release_K_late(sum); });
            if (X::LATE_WAIT) me.k.next();
            retire<0>(O);
            me.release_V();
            to_operand<T, BN>(P, S);
            rescale_rows(O, rescale);
            if constexpr (X::PAIRS) ask_for_kept(values, t, values.next);
        };
        walk_down<false, X::BY_BITS>(next_tile(last_visible - 1), t.y.free_last, first, next_tile, step,
                                     [&] { return me.meet_all(is_high(state, reference)); });
        me.await_V();
    }

    DEVICE void begin_head(const work_tile &x)
    {
        if constexpr (X::PAIRS) {
            lazy_reference unscaled = p.reference;
            const head_mods head = head_mods_of(p.mods, x.b, x.h, 1, false, unscaled);
            if (lane() == 0) sm.heads[warp_index()] = head;
            __syncwarp();
        } else {
            const int hk = x.h / p.group;
            const float scale = input_scale(p.scales, SCALE_Q, x.b, hk) * input_scale(p.scales, SCALE_K, x.b, hk);
            reference = p.reference;
            const head_mods head = head_mods_of(p.mods, x.b, x.h, scale,
                                                p.scales.data[SCALE_Q] || p.scales.data[SCALE_K], reference);
            if (lane() == 0) sm.heads[warp_index()] = head;
            __syncwarp();
        }
    }

    /* Returns whether row i, whose largest score is -inf, sees keys. All its q.k are then below the range of float32.
     * Returns false if FlashMask, keep_mask or a bias may be the reason for -inf. */
    DEVICE bool has_lost_keys(const work_tile &x, int i) const
    {
        if (std::is_same<T, __half>::value || p.mask.bounds || i >= x.Sq) return false;
        if constexpr (X::PAIRS)
            if (p.kept.words || p.bias.data) return false;
        const key_band band = band_of(p, x);
        const int query = i >> shift_of<X>(p);
        if (X::SPLITS) return max(query + band.lo, x.first * BN) < min(min(query + band.hi, band.Sk), x.last * BN);
        return max(query + band.lo, 0) < min(query + band.hi, band.Sk);
    }

    /* Does the same as end_softmax(), for shapes in which a bias may make scores huge (see exact_reference). */
    DEVICE tile_end end_softmax_of_pairs(softmax &state, const thread_tile &t, const work_tile &x)
    {
        const float sink = p.to.sinks ? p.to.sinks[x.h * p.to.sink_stride] : -CUDART_INF_F;
        const row_ends ends = end_rows(state, largest_in_base_2{ p.largest_unit }, sink_in_base_2(sink),
                                       p.dropout.scale);
        tile_end y = { { ends.factor[0], ends.factor[1] }, true };
#pragma unroll
        for (int half = 0; half < 2; half++)
            y.finite &= state.l[half] - state.l[half] == 0 && is_sound_score<true>(ends.top[half]) &&
                        (ends.top[half] != -CUDART_INF_F || !has_lost_keys(x, t.i0 + half * 8));
        store_lse<true>(p.to, x.b, x.h, x.q_start, t.i0, x.Sq, state, ends, lane());
        return y;
    }

    /* Stores lse = m scale + ln l, and returns the factors for O. This function does not read O, so it can run during
     * the last product P V. */
    DEVICE tile_end end_softmax(softmax &state, const thread_tile &t)
    {
        const work_tile &x = work_of(t);
        if constexpr (X::PAIRS) return end_softmax_of_pairs(state, t, x);
        const float v_scale = X::SCORE_MODS ? input_scale(p.scales, SCALE_V, x.b, x.h / p.group) : 1;
        const row_ends ends = end_rows(state, reference, sink_log2(p.to, x.h), v_scale);
        tile_end y = { { ends.factor[0], ends.factor[1] }, true };
#pragma unroll
        for (int half = 0; half < 2; half++)
            y.finite &= state.l[half] - state.l[half] == 0 &&
                        (ends.top[half] == -CUDART_INF_F ? !has_lost_keys(x, t.i0 + half * 8)
                                                         : fabsf(ends.top[half]) < SCORE_MOST);
        store_lse(p.to, x.b, x.h, x.q_start, t.i0, x.Sq, state, ends, lane());
        return y;
    }

    DEVICE split_end end_split(softmax &state, const thread_tile &t)
    {
        row_ends ends;
        if constexpr (X::PAIRS) ends = end_rows(state, largest_in_base_2{ p.largest_unit }, -CUDART_INF_F, 1);
        else ends = end_rows(state, reference, -CUDART_INF_F, 1);
        split_end y = { { ends.top[0], ends.top[1] }, { state.l[0], state.l[1] }, true };
#pragma unroll
        for (int half = 0; half < 2; half++)
            y.finite &= y.l[half] - y.l[half] == 0 && is_sound_score<X::PAIRS>(y.top[half]) &&
                        (y.top[half] != -CUDART_INF_F || !has_lost_keys(work_of(t), t.i0 + half * 8));
        return y;
    }

    DEVICE auto end_work(softmax &state, const thread_tile &t)
    {
        if constexpr (X::SPLITS) return end_split(state, t);
        else return end_softmax(state, t);
    }

    /* Stores out = O / l. Sets flags if out, a score or a sum is not finite, so that the rows are recomputed later. */
    DEVICE void finish(float (&O)[DV / 2], const tile_end &end, const thread_tile &t)
    {
        const work_tile &x = work_of(t);
        const bool finite = finish_rows(O, end.factor) && end.finite;
        const bool any = __any_sync(0xffffffff, !finite);
        if (lane() == 0 && !x.nonfinite_to_zero) {
            p.nonfinite[x.index * (4 * X::C) + warp_index()] = any;
            /* several warps may write the same value */
            if (any) *(volatile int *)&sm.any_nonfinite = 1;
        }
        if (!p.to.out) return;
        /* the first of the warp's 16 rows, and how many rows the sequence has from that row on */
        const int row = t.i0 - lane() / 4, count = x.Sq - row;
        T *const rows = out_row<T>(p.to, x.b, x.h, x.q_start + row);
        uint16_t *const staging = sm.out + (X::STAGES_OUT ? warp_index() * 16 * 64 * X::CHUNKS_V : 0);
        if (!X::STAGES_OUT) store_rows<T, DV>(rows, p.to.out_row, count, p.to.Dv, O, lane());
        else copy_rows(O, x, row, count, rows, staging);
    }

    /* Stores the sums of a split (a part of the keys). If this block computes all splits of its rows, it first adds the
     * sums of earlier splits, and after the last split it stores the results. */
    DEVICE void finish(float (&O)[DV / 2], split_end end, const thread_tile &t)
    {
        const work_tile &x = work_of(t);
        const int slot = p.in_turn ? (int)blockIdx.x : x.index, at = slot * (4 * X::C) + warp_index();
        bool finite = end.finite && is_finite(O);
        split_sums<DV> sums{ p, at, lane() };
        if (p.in_turn && x.split > 0) sums.add_before(O, end);
        if (!p.in_turn || x.split + 1 < x.splits) sums.store(O, end);
        else finite &= store_split_rows<T, DV>(p, x, t.i0, 0, O, end, lane());
        const bool any = __any_sync(0xffffffff, !finite);
        if (lane() == 0 && !x.nonfinite_to_zero) {
            if (!p.in_turn || x.split == 0 || any) p.nonfinite[x.index * (4 * X::C) + warp_index()] = any;
            if (any) *(volatile int *)&sm.any_nonfinite = 1;
        }
    }

    /* Stores the 16 rows of a warp by TMA, or by ordinary stores if rows past the end of the sequence belong to another
     * sequence or to padding. */
    DEVICE void copy_rows(const float (&O)[DV / 2], const work_tile &x, int row, int count, T *rows, uint16_t *staging)
    {
        if (lane() == 0) bulk_wait_read<0>();
        __syncwarp();
        stage_rows<T, DV>(O, staging, lane(), place_in_chunks);
        if (warp_uniform(p.ends_of_queries && count < 16)) {
            __syncwarp();
            store_staged<T, DV>(rows, p.to.out_row, count, p.to.Dv, staging, lane());
        } else {
            fence_proxy_async_shared();
            __syncwarp();
            if (lane() == 0)
                store_tile<16, X::CHUNKS_V, 64>(smem_addr(staging), &out,
                                                { 0, x.q_start + row, x.h, p.cu_q ? 0 : x.b });
        }
    }
    DEVICE void await_copies()
    {
        if (!X::STAGES_OUT) return;
        if (lane() == 0) bulk_wait<0>();
        __syncwarp();
    }

    /* Moves `work` on to the first work tile in which this warpgroup's rows see keys, and stores the results of the
     * work tiles that it skips. Returns false if no work tile is left. */
    DEVICE bool pass_unseen(next_work &work)
    {
#pragma unroll 1
        while (warp_uniform(!work.sees)) {
            if (warp_uniform(work.order == STOP)) return false;
            if (warp_uniform(work.order == REPORT)) {
                await_copies();
                if (lane() == 0) mbarrier_arrive(smem_addr(&sm.idle));
            } else {
                const thread_tile t = tile_of(work);
                if (t.x.first < t.x.last) me.pass_work(t.x.first, t.x.last);
                float O[DV / 2];
                softmax state;
#pragma unroll
                for (int i = 0; i < DV / 2; i++) O[i] = 0;
                finish(O, end_work(state, t), t);
            }
            if (warp_uniform(!work.loads)) me.release_work();
            work = take();
        }
        return true;
    }

    DEVICE void compute_all()
    {
        float S[BN / 2]; /* the scores of the first tile of keys of the next work tile, if BEGINS_EARLY is true */
        next_work work = take();
        if (!pass_unseen(work)) return;
        if (X::BEGINS_EARLY) begin(S, work);
#pragma unroll 1
        for (;;) {
            float O[DV / 2];
            uint32_t P[BN / 16][4];
            softmax state;
#pragma unroll
            for (int i = 0; i < DV / 2; i++) O[i] = 0;
            const next_work now = work;
            attend(O, P, S, state, tile_of(now));
            multiply_add<T, DV, BN / 16>(O, P, V());
            const int passed = first_passed(tile_of(now));
            if (X::PASSES_FIRST) me.template pass_K<X::MOST_PASSED>(passed);
            /* end_work() does not need O, so it runs during the product P V of the last tile */
            const auto end = end_work(state, tile_of(now));
            if (X::BEGINS_EARLY) {
                work = take();
                begin(S, work);
            }
            retire<X::BEGINS_EARLY>(O);
            me.release_V();
            if (X::PASSES_FIRST) me.template pass_V<X::MOST_PASSED>(passed);
            finish(O, end, tile_of(now));
            if (!X::BEGINS_EARLY) work = take();
            if (warp_uniform(work.sees)) continue;
            if (X::BEGINS_EARLY) retire<0>(S);
            if (!pass_unseen(work)) return;
            if (X::BEGINS_EARLY) begin(S, work);
        }
    }

    DEVICE void run()
    {
        me.begin_turns();
        compute_all();
        me.end_turns();
        await_copies();
    }
};

/* Recomputes, one by one, rows that tensor cores cannot compute, in the work tiles that this warp has flagged. All
 * flags and plan::before have been written when STOP is published. The function is not inlined, so that the loop over
 * keys keeps its uniform registers. */
template <class X> static __device__ __noinline__ void repair_own_rows(const plan_of<X> &p, const cuda_args &a)
{
    /* number of channels per lane; a single maximum for all shapes would make ptxas spill registers in shapes with
     * small heads */
    constexpr int channels = (X::D > X::DV ? X::D : X::DV) / 32;
    const int warp = threadIdx.x / 32 - 4, newest = block_memory<shared<X>>().newest;
    repair_begins();
    for (int t = newest; t >= 0; t = tile_before(p, t)) {
        if (!((volatile uint8_t *)p.nonfinite)[t * (4 * X::C) + warp]) continue;
        const work_tile w = tile_at<X>(p, t);
        if constexpr (X::SPLITS) {
            for (int n = 0; n < 16; n++) repair_split_row<channels>(p, a, w, w.i0 + warp * 16 + n);
            continue;
        }
        const head_args x = head_args_of(a, w.b, w.h);
        const int i0 = w.i0 + warp * 16;
        for (int i = i0; i < i0 + 16 && i < w.Sq; i++)
            forward_row<channels>(a, x, i, a.g.view[ATTN_T_out], nullptr,
                                  X::PAIRS ? UNSOUND_ROWS_BUT_HUGE : UNSOUND_ROWS);
    }
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <typename T, class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    forward_tiles(const __grid_constant__ plan_of<X> p, const __grid_constant__ kv_maps maps,
                  const __grid_constant__ CUtensorMap out, const __grid_constant__ cuda_args a)
{
    static_assert(sizeof(shared<X>) <= 227 << 10, "what a block may have");
    shared<X> &sm = block_memory<shared<X>>();
    const int wg = warpgroup_index();

    if (threadIdx.x == 0) {
        prefetch_maps(maps);
        sm.init();
    }
    begin_block();

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x / 32 == 1) work_scheduler<X>{ p, sm }.run();
        else if (threadIdx.x == 0) tile_loader<X>{ p, sm, maps }.run();
        else if (threadIdx.x / 32 == 2) zero_nonfinite_tiles<T>(sm);
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        attention<T, X>(p, out, sm, wg - 1).run();
        if constexpr (X::SPLITS)
            if (!p.in_turn) return; /* merge_splits() recomputes rows that are not finite */
        if (__any_sync(0xffffffff, *(volatile int *)&sm.any_nonfinite)) repair_own_rows<X>(p, a);
    }
}

/* ---- Functions of the host that launch the kernel ---------------------------------------------------------------- */

/* Makes the plan of a launch, and launches the kernels that prepare keep_mask and FlashMask. */
template <class X> cudaError_t begin_plan(const forward_job &job, plan_of<X> &p)
{
    const attn_geometry &g = job.read.g;
    make_plan(job, X::BM, X::BN, p);
    if constexpr (X::PAIRS) {
        make_pair_plan(job, X::BN, p);
        if (is_first_share(job.chip)) {
            const cudaError_t code = make_kept_bits<X::BN>(g, p.kept, job.stream);
            if (code != cudaSuccess) return code;
        }
    }
    if (!X::SCORE_MODS || !p.mask.bounds) return cudaSuccess;
    const int warps = (int)(g.dims.B * (g.dims.H / g.mask_group)) * p.mask.key_tiles;
    tile_extremes<X::BN><<<(unsigned)attn_min64(attn_tiles(warps, 4), 1 << 20), 128, 0, job.stream>>>(
        p.mask, p.B, p.H, p.Sq, p.Sk, (attn_mask_extremes *)p.mask.extremes);
    return cudaPeekAtLastError();
}

template <typename T, class X> cudaError_t launch(const forward_job &job, int least_Sk, int most_Sk)
{
    static_assert(4 * X::C <= MOST_WARPS && X::BM >= LEAST_BM, "what layout_of has room for");
    const attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    kv_maps maps;
    CUtensorMap out = {};
    if (!tma_map(&maps.Q, tma_tensor_of(g.view[ATTN_T_q], e.B, d.H, e.rows_q, d.D), 64) ||
        !tma_map(&maps.K, tma_tensor_of(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D), X::BN) ||
        !tma_map(&maps.V, tma_tensor_of(g.view[ATTN_T_v], e.B, d.Hk, e.rows_k, d.Dv), X::BN) ||
        (g.view[ATTN_T_out].data && !tma_map(&out, tma_tensor_of(g.view[ATTN_T_out], e.B, d.H, e.rows_q, d.Dv), 16)))
        return cudaErrorInvalidValue;
    plan_of<X> p;
    cudaError_t code = allow_shared<forward_tiles<T, X>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;
    code = begin_plan<X>(job, p);
    if (code != cudaSuccess) return code;
    p.least_Sk = least_Sk, p.most_Sk = most_Sk;
    take_share(job.chip, p.order);
    if (p.order.first == p.order.end) return cudaSuccess;
    return launch_dependent(forward_tiles<T, X>, attn_min64(p.order.end - p.order.first, job.chip->multiprocessors),
                            X::THREADS, sizeof(shared<X>), job.stream, p, maps, out, job.given);
}

} // namespace

#endif
