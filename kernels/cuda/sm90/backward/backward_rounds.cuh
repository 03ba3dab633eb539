/* backward_rounds.cuh: parts of the kernel in backward_tiles.cuh: its shapes, its plan (parameters), its shared memory,
 * and the warps of the producer, which load tiles and send dQ. Several query heads share the block's keys, and a round
 * is one tile of queries of one of these heads. */
#ifndef ATTN_SM90_BACKWARD_ROUNDS_CUH
#define ATTN_SM90_BACKWARD_ROUNDS_CUH

#include "kernels/cuda/sm90/backward/backward.cuh"
#include "kernels/cuda/sm90/layer/pairs.cuh"
#include "kernels/cuda/sm90/layer/score_mods.cuh"

namespace {

/* ---- Shapes of kernel instances ---------------------------------------------------------------------------------- */

/* The variants of the kernel. Each computes only some options, because code for options costs registers. */
enum variant {
    PLAIN,
    CAPPED /* softcap, and no other option */,
    WITH_OPTIONS,
    WITHOUT_BIAS, /* all options, including keep_mask and dropout (pairs.cuh), but no bias */
    WITH_BIAS     /* all options, including bias, keep_mask and dropout, but no softcap */
};

/* The shape of a kernel instance for head sizes up to D, with BM queries per tile. Some variants keep more numbers in
 * shared memory until dS is computed, and therefore have one buffer less for Q or for dS. */
template <int D_, int BM_, variant VARIANT_> struct shape {
    static const variant VARIANT = VARIANT_;
    static const bool BIAS = VARIANT == WITH_BIAS, PAIRS = VARIANT == WITHOUT_BIAS || BIAS,
                      OPTIONS = VARIANT == WITH_OPTIONS || PAIRS;
    static const int D = D_, BM = BM_, BN = 128, STAGES_Q = D == 128 && !OPTIONS ? 3 : 2, STAGES_DO = 2,
                     STAGES_DS = D == 64 && OPTIONS ? 2 : 3;
    /* whether the words of keep_mask for the next tile of queries are copied to shared memory in advance; at D = 64
     * shared memory has no room for them */
    static const bool COPIES_KEPT = PAIRS && D == 128;
    static const int CHUNKS = D / 64, CHUNKS_V = CHUNKS, THREADS = 384;
    static const int UNITS = BM / QUERY_TILE;
    /* number of channels of dQ that a consumer computes at a time, for 64 queries */
    static const int DQ_COLUMNS = D / (2 / UNITS);
    /* registers per thread of the producer warpgroup, and of a consumer warpgroup */
    static const int PRODUCER = 24, CONSUMER = 240;
    static const bool TURNS =
        /* Whether the two consumers compute their exponentials by turns. At D = 64 this is faster. */
        VARIANT == CAPPED || (D == 64 && !OPTIONS);
    /* Number of parts in which dV of a tile of queries is computed, one part after the other. Most variants have two
     * parts at D = 64, because registers are scarce. */
    static const int DV_PARTS = D == 64 && VARIANT != CAPPED ? 2 : 1;
    static const bool S_BEFORE_DK = D != 64 && VARIANT == PLAIN;
    /* whether a consumer skips a tile of queries that sees none of the consumer's keys */
    static const bool PASSES = BM == 64 && !OPTIONS;
};

enum { NO_ROWS = -1 }; /* a value of block_place::rows, which says that there are no more tiles of keys */
/* a value of plan.begun: the first block has stored its term of dQ, so other blocks may add theirs */
enum { PART_THERE = 2 };
/* number of threads that meet at a barrier to hand over dQ: a consumer (128) and the warp that sends its dQ (32) */
enum { HANDING = 128 + 32 };

/* Numbers of the named barriers. DQ_FULL and DQ_FREE are two barriers each, one per consumer. */
enum { END_BARRIER = 1, DQ_FULL = 8, DQ_FREE = 10, DS_FREE = 13 };

/* ---- The plan (parameters of the kernel), and shared memory ------------------------------------------------------ */

struct plan {
    /* The order in which blocks claim tiles of keys. If a tile of keys has parts (key_parts.cuh), each part of a
     * key/value head counts as a head of its own. In packed problems some tiles have no rows. */
    tile_order order;
    key_parts tile_parts;
    int group;    /* number of query heads of a part of a tile of keys (key_parts.cuh) */
    int *counter; /* number of tiles of keys that blocks have claimed */
    backward_scratch scratch;
    float scale, c; /* the scale of the scores, and c = log2(e) * scale; both are > 0 */
    /* [tile of keys][warp]: 0, or 1 + the number of the block that must recompute the warp's keys */
    uint16_t *nonfinite;
    /* [group of `group` query heads]: number of units (UNIT_ROWS queries of one head) whose delta and lse are
     * computed */
    uint32_t *prepared;
    /* number of units (UNIT_ROWS queries of one head): units: of all heads; units_of_head: of a group of `group` query
     * heads */
    int units, units_of_head;
    /* whether `out` has the dtype of dO, and its rows can be read in pieces of 16 bytes (rows of dO always can) */
    bool out_in_pieces;
    /* [tile of 64 queries][consumer]: whether the sum of dQ has a term yet or, with `deterministic`, how many (struct
     * sender lists the values); NULL: dQ is not wanted */
    uint32_t *begun;
    /* [group of `group` query heads]: number of terms that have been added to dQ so far. Each tile of keys (or part of
     * it) adds two terms, one per consumer. */
    uint32_t *done;
    /* number of units (UNIT_ROWS queries of one head) that warps have claimed; a warp computes dQ of the units that it
     * claims */
    int *claimed;
    /* whether this launch writes dQ: true if dQ is wanted and no later launch computes tiles of keys */
    bool makes_dq;
    /* whether blocks take the tiles of keys of a head from the last to the first, and add to dQ in this order; set by
     * the option `deterministic` */
    bool in_order;
    /* whether the first block that has a term of dQ for a query tile stores it as the tile's sum; later blocks add
     * their terms to this sum */
    bool claims;
    /* whether prepare_ahead has set the sums of dQ to zero; if so, even the first block adds to them */
    bool zeros;
    score_mods mods; /* constants of softcap, and ALiBi slopes times log2(e), because scores are in base 2 */
    float cap;       /* softcap times log2(e); tanh times this factor is the score in base 2 */
    near_tanh near_0;
    flash_mask mask;
    int mask_heads;
};

struct pair_plan : plan {
    pair_bias bias;
    kept_columns kept;
    pair_dropout dropout;
    float per_scale;
};
template <class X> using plan_of = std::conditional_t<X::PAIRS, pair_plan, plan>;

struct round_record {
    int tile, h;
    bool more;
    bool bounded;     /* whether FlashMask hides some pairs of the tile of queries with the block's keys */
    bool partly_kept; /* whether keep_mask hides some pairs of the tile of queries with the block's keys */
    float slope;      /* the head's ALiBi slope times log2(e); 0: no ALiBi */
};

template <class X> struct shared {
    /* one buffer has K and the other has V; they are swapped at each new tile of keys */
    alignas(1024) uint16_t keys[2][X::BN * X::D];
    alignas(1024) uint16_t Q[X::STAGES_Q][X::BM * X::D];
    alignas(1024) uint16_t dO[X::STAGES_DO][X::BM * X::D];
    alignas(1024) uint16_t
        /* dS, with queries as rows and a chunk of 64 keys per consumer; at the end dK and dV pass through this
         * memory */
        dS[X::STAGES_DS][X::BM * X::BN];
    /* dQ of each consumer, in the order of the float32 sums in global memory (fragment_at()) */
    alignas(128) float dQ[2][QUERY_TILE * X::DQ_COLUMNS];
    alignas(16) row_values values[X::STAGES_Q][X::UNITS];
    uint32_t stash[X::OPTIONS ? X::BM / 4 : 1]
                  [X::OPTIONS ? CONSUMERS : 1]; /* P times softcap's derivative, kept until dS is computed; one column
                                                 * per thread */
    /* keep_mask's bits of each key for the tile's even queries (x) and odd queries (y) */
    uint2 kept[X::COPIES_KEPT ? X::BN : 1];
    round_record rounds[X::OPTIONS ? X::STAGES_Q : 1];
    barrier_pairs<X::STAGES_Q> bars_Q;
    barrier_pairs<X::STAGES_DO> bars_dO;
    int any_nonfinite; /* 1 if a dK or dV of this block is not finite */
    uint64_t K_full, K_empty, V_full, V_empty, loaded, dS_full[X::STAGES_DS];
    barrier_pairs<2> bars_work;
    block_place work[2]; /* the current and the next tile of keys */
    block_place place;
};

DEVICE head_tile keys_of(const plan &p, int t)
{
    head_tile at = head_tile_of(p.order, t);
    if (p.in_order) at.tile = p.order.per_head - 1 - at.tile;
    return at;
}

/* ---- The order of a block's rounds (tiles of queries) ------------------------------------------------------------ */

/* Shortens x's range of query tiles: removes tiles at both ends that FlashMask hides in all query heads of x. */
template <class X> DEVICE void trim_by_mask(block_place &x, const plan &p)
{
    if (!p.mask.bounds || x.first >= x.last) return;
    const int from = x.h / p.mask.group, to = (x.h + p.group - 1) / p.mask.group;
    int first = x.last, last = x.first;
    for (int h = from; h <= to; h++) {
        const attn_mask_extremes e =
            p.mask.extremes[((int64_t)x.b * p.mask_heads + h) * p.mask.key_tiles + x.j0 / X::BN];
        /* rows `begin` to `end` - 1 include all query rows that FlashMask leaves visible */
        int begin = x.first * X::BM, end = min(x.last * X::BM, x.Sq);
#pragma unroll
        /* FlashMask hides two intervals of rows. One of them may reach the end of the range only after the other one
         * has shortened the range. The loop therefore tests both intervals twice. */
        for (int n = 0; n < 2; n++) {
            if (e.max.lts <= begin && e.min.lte > begin) begin = min(e.min.lte, end);
            if (e.max.uts <= begin && e.min.ute > begin) begin = min(e.min.ute, end);
            if (e.min.lte >= end && e.max.lts < end) end = max(e.max.lts, begin);
            if (e.min.ute >= end && e.max.uts < end) end = max(e.max.uts, begin);
        }
        if (begin >= end) continue;
        first = min(first, begin / X::BM);
        last = max(last, (end + X::BM - 1) / X::BM);
    }
    x.first = min(first, x.last);
    x.last = max(last, x.first);
}

/* Visits the rounds of a block (tiles of queries of each head), except those that FlashMask or keep_mask hides
 * completely. */
template <class X> struct round_walk {
    const plan_of<X> &p;
    const block_place &x;
    const int end;
    int h, tile; /* query head and tile of queries of the current round; h == end: all rounds are done */
    bool bounded, partly_kept;

    DEVICE round_walk(const plan_of<X> &p_, const block_place &x_)
        : p(p_), x(x_), end(x_.h + p_.group), h(x_.h), tile(x_.begin), bounded(false), partly_kept(false)
    {
        if (x.first == x.last) h = end;
        else if (is_hidden()) next();
    }
    DEVICE bool there() const { return h < end; }
    DEVICE void next()
    {
        do {
            if (++tile == x.last) tile = x.first;
            if (tile == x.begin) h++;
        } while (h < end && is_hidden());
    }
    DEVICE bool is_hidden()
    {
        if constexpr (X::PAIRS)
            if (p.kept.words) {
                const int some = kinds_of(p.kept, x.b, h, x.j0, tile * X::UNITS, X::UNITS);
                partly_kept = some & SOME_HIDDEN;
                /* A tile in which keep_mask hides all pairs is skipped, but not with `deterministic`. With that option,
                 * blocks count the additions of dQ to each tile of queries, so none may be left out. */
                if (!(some & SOME_SEEN) && !p.in_order) return true;
            }
        if (!X::OPTIONS || !p.mask.bounds) return false;
        const attn_mask_extremes e =
            p.mask.extremes[((int64_t)x.b * p.mask_heads + h / p.mask.group) * p.mask.key_tiles + x.j0 / X::BN];
        const attn_tile_kind kind = attn_mask_classify(&e, tile * X::BM, min((tile + 1) * X::BM, x.Sq));
        bounded = kind != ATTN_TILE_FREE;
        return kind == ATTN_TILE_HIDDEN;
    }
};

/* ---- The warps that load tiles and send dQ (producer) ------------------------------------------------------------ */

/* plan::done counts the terms that have been added to dQ of x's query heads. This function adds `terms` to that
 * counter. It is also called for tiles of keys without rows, because the counter must reach the number of all tiles. */
DEVICE void count_done(const plan &p, const block_place &x, uint32_t terms)
{
    if (p.begun) add_release(p.done + x.head, terms);
}

DEVICE tma_place keys_at(const block_place &x, const cuda_args &a)
{
    return { 0, (int)x.s.k_start + x.j0, x.hk, a.g.dims.packed ? 0 : x.b };
}

/* One thread claims tiles of keys and publishes them in shared memory. rows = NO_ROWS says that no tile is left. The
 * thread claims a tile only after it has issued all loads of the previous tile, because blocks wait for each other's dQ
 * in the order of claims. */
template <class X> struct scheduler {
    const cuda_args &a;
    const plan_of<X> &p;
    shared<X> &sm;
    const maps &m;

    DEVICE void run()
    {
        ring<2> at;
        uint32_t phase = 0;
        for (int t; (t = p.order.first + atomicAdd(p.counter, 1)) < p.order.end;) {
            block_place &x = sm.work[at.stage];
            await_empty(sm.bars_work, at);
            find(x, t);
            if (x.rows == 0) {
                count_done(p, x, 2);
                continue;
            }
            mbarrier_arrive(smem_addr(&sm.bars_work.full[at.stage]));
            /* prefetch K and V into the L2 cache; at D = 128 this gains nothing */
            if (X::D == 64) {
                prefetch_tile<X::CHUNKS, 64>(&m.K, keys_at(x, a));
                prefetch_tile<X::CHUNKS, 64>(&m.V, keys_at(x, a));
            }
            at.next();
            mbarrier_wait(smem_addr(&sm.loaded), phase);
            phase ^= 1;
        }
        await_empty(sm.bars_work, at);
        sm.work[at.stage].rows = NO_ROWS;
        mbarrier_arrive(smem_addr(&sm.bars_work.full[at.stage]));
        leave_counter(p.counter);
    }

    DEVICE bool hides_tiles() const
    {
        if constexpr (X::PAIRS) return p.mask.bounds || p.kept.words;
        else return X::OPTIONS && p.mask.bounds;
    }

    DEVICE void find(block_place &x, int t)
    {
        /* Variants with options never get problems with padding (backward.cu), because the code for padding costs
         * registers. */
        find_key_place<X, !X::OPTIONS>(x, a, p.tile_parts, p.group, keys_of(p, t));
        x.t = t;
        if (hides_tiles()) trim_by_mask<X>(x, p);
        const bool from_first = x.first == 0;
        take_part(x, p.tile_parts);
        if (hides_tiles() && !round_walk<X>(p, x).there()) x.last = x.first;
        /* The blocks of a head begin at different query tiles. Otherwise all of them would wait for the first block to
         * store its dQ of the same queries. */
        if (from_first && x.last > x.first && !p.in_order) x.begin = x.first + x.j0 / X::BM % x.tiles();
    }
};

/* One thread loads K and V of each tile of keys. It also keeps the rings of Q and dO full, even while the block goes on
 * to the next tile of keys. */
template <class X> struct loader {
    const cuda_args &a;
    const plan_of<X> &p;
    shared<X> &sm;
    const maps &m;
    ring<X::STAGES_Q> q = {};
    ring<X::STAGES_DO> o = {};
    uint32_t phase = 0; /* parity of the phase for which the thread waits next at the barriers of K and V */

    DEVICE void run()
    {
        for (ring<2> at;; at.next()) {
            await_full(sm.bars_work, at);
            const block_place &x = sm.work[at.stage];
            if (x.rows == NO_ROWS) return;
            load(x);
            mbarrier_arrive(smem_addr(&sm.bars_work.empty[at.stage]));
            mbarrier_arrive(smem_addr(&sm.loaded));
        }
    }

    DEVICE void load(const block_place &x)
    {
        if (x.first == x.last) return;
        wait_until_equal(p.prepared + x.head, p.units_of_head);
        fence_proxy_async_global();
        const uint32_t before = phase;
        for (round_walk<X> at(p, x); at.there();) {
            const int h = at.h, tile = at.tile;
            if (X::OPTIONS) {
                const bool bounded = at.bounded, partly_kept = at.partly_kept;
                at.next();
                await_empty(sm.bars_Q, q);
                sm.rounds[q.stage] = { tile, h, at.there(), bounded, partly_kept, slope_of(x.b, h) };
            }
            load_Q<X>(sm, a, p.scratch, m, x, q, h, tile);
            load_dO<X>(sm, a, m, x, o, h, tile);
            if (phase == before) load_keys(x);
            q.next();
            o.next();
            if (!X::OPTIONS) at.next();
        }
    }

    DEVICE void load_keys(const block_place &x)
    {
        const tma_place keys = keys_at(x, a);
        mbarrier_wait(smem_addr(&sm.V_empty), phase ^ 1);
        load_tile<X::BN, X::CHUNKS, 64>(smem_addr(sm.keys[phase]), &m.K, keys, smem_addr(&sm.K_full));
        mbarrier_wait(smem_addr(&sm.K_empty), phase ^ 1);
        load_tile<X::BN, X::CHUNKS, 64>(smem_addr(sm.keys[phase ^ 1]), &m.V, keys, smem_addr(&sm.V_full));
        phase ^= 1;
    }

    DEVICE float slope_of(int b, int h) const
    {
        const score_mods &mods = p.mods;
        return mods.slopes ? mods.slopes[b * mods.slope_batch + h * mods.slope_head] * mods.per_slope : 0;
    }
};

/* One warp per consumer sends the consumer's terms of dQ to the sums in global memory, where TMA adds them. A word of
 * p.begun is 0 if no block has come yet, 1 while the first block stores its term, and PART_THERE when other blocks may
 * add. With `deterministic` the word counts the additions, and each block waits for its turn. There is no deadlock: a
 * block waits only for tiles that running blocks have claimed earlier. */
template <class X> struct sender {
    const cuda_args &a;
    const plan_of<X> &p;
    shared<X> &sm;
    const int w;

    DEVICE void run()
    {
        const bool sends = threadIdx.x % 32 == 0;
#pragma unroll 1
        for (ring<2> at;; at.next()) {
            await_full(sm.bars_work, at);
            const block_place &x = sm.work[at.stage];
            if (x.rows == NO_ROWS) break;
            send(x, sends);
            __syncwarp();
            if (sends) mbarrier_arrive(smem_addr(&sm.bars_work.empty[at.stage]));
        }
        /* These copies (TMA) must have read shared memory before this block ends, because another block may then get
         * that memory. */
        if (sends) bulk_wait_read<0>();
    }

    DEVICE void send(const block_place &x, bool sends)
    {
        /* index of the word of p.begun that this thread must set to `becomes` before other blocks go on; -1: none */
        int unended = -1;
        uint32_t becomes = 0;
#pragma unroll 1
        for (round_walk<X> at(p, x); at.there(); at.next()) {
            /* At D = 64, a consumer computes dQ of its own 64 queries with all channels. At D = 128, it computes dQ of
             * the tile's 64 queries with 64 of the channels. */
            const int unit = X::UNITS == 2 ? at.tile * 2 + w : at.tile;
            const bool adds = sends && unit * QUERY_TILE < x.Sq && p.begun;
            const int place = (int)query_tile(a, x.s, x.b, at.h, unit);
            uint32_t before = 0;
            /* the consumer may overwrite its previous dQ only when TMA has read it */
            if (sends) bulk_wait_read<0>();
            __syncwarp();
            named_barrier_arrive(DQ_FREE + w, HANDING);
            end_turn(unended, becomes);
            if (adds) {
                if (p.in_order) before = x.template after<X>(at.tile);
                else if (p.claims) before = claim_acquire(word(place));
                if (p.in_order || before == 1) wait_until_equal(word(place), p.in_order ? before : PART_THERE);
                fence_proxy_async_global();
                if (p.in_order || (p.claims && before == 0)) unended = place;
                becomes = p.in_order ? before + 1 : PART_THERE;
            }
            __syncwarp();
            named_barrier_sync(DQ_FULL + w, HANDING);
            if (adds) add(p.scratch.sums + (int64_t)place * (QUERY_TILE * X::D), before == 0 && !p.zeros);
        }
        end_turn(unended, becomes);
        if (!sends) return;
        bulk_wait<0>();
        count_done(p, x, 1);
    }

    DEVICE void add(float *to, bool stores) const
    {
        const int PIECES = X::UNITS == 2 ? 1 : 2, FLOATS = QUERY_TILE * X::DQ_COLUMNS / PIECES;
        for (int n = 0; n < PIECES; n++) {
            float *const piece = to + (PIECES == 1 ? 0 : fragment_at<X::D>(n * 32, w * X::DQ_COLUMNS));
            const uint32_t from = smem_addr(sm.dQ[w] + n * FLOATS);
            if (stores) bulk_store(piece, from, FLOATS * 4);
            else bulk_add(piece, from, FLOATS * 4);
        }
        bulk_commit();
    }

    DEVICE void end_turn(int &place, uint32_t becomes) const
    {
        if (place < 0) return;
        bulk_wait<0>();
        store_release(word(place), becomes);
        place = -1;
    }
    DEVICE uint32_t *word(int place) const
    {
        return p.begun + place * 2 + w;
    }
};

} // namespace

#endif
