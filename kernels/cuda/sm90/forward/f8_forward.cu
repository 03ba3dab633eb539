/* f8_forward.cu: flash attention forward of float8_e4m3fn for Hopper, with products of e4m3 (FlashAttention-3,
 * arXiv:2407.08608, 3.3). The block has the structure of forward_tiles.cuh. Products of e4m3 need five more things:
 *
 *   V        wgmma takes no MN-major operands of 8 bits, so two warps of the producer write V^T to scratch
 *            (transpose_v.cuh).
 *   P        V^T has the keys in the order in which the accumulators' registers hold P, so that P can be an operand.
 *   range    e4m3 reaches from 2^-9 to 448. P is exactly 2^SHIFT = 256 where a row's score is its maximum, so that P of
 *            the key with the largest weight is not rounded.
 *   sums     An e4m3 product keeps 14 bits of its sums. After every PROMOTED keys, O is therefore added in float32 to
 *            sums in shared memory, and the next product starts from 0.
 *   scores   With 14 bits, a score has an error of about 2^-13 of its largest product, too much for lse
 *            (kernels/README.md, "Accuracy"). If lse is wanted, q and k are therefore converted to bfloat16.
 *
 * When a block has no more work, it recomputes rows of work tiles whose V had a NaN, rows whose result is not finite,
 * and rows with huge scores (repair_own_rows).
 *
 * If lse is wanted, few rows over many keys are left to forward.cu, which splits their keys. Without lse, a batch of
 * such sequences would be up to 1.8 times slower there.
 *
 * A row's bits depend on BN, PROMOTED and the order of the tiles. All of these are fixed by the head size, the masks,
 * Sk and whether lse is wanted. */
#include "kernels/cuda/sm90/layer/epilogue.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/forward/kv_pipeline.cuh"
#include "kernels/cuda/sm90/layer/masks.cuh"
#include "kernels/cuda/sm90/layer/products.cuh"
#include "kernels/cuda/sm90/layer/score_mods.cuh"
#include "kernels/cuda/sm90/forward/split_rule.h"
#include "kernels/cuda/sm90/forward/transpose_v.cuh"
#include "kernels/cuda/sm90/forward/widen.cuh"

namespace {

typedef __nv_bfloat16 bf16;

/* ---- Shapes of kernel instances; the table at the end of this file says which problem takes which shape ---------- */

/* PROMOTED: after at most so many keys, O is added to sums in shared memory, because an e4m3 product loses up to 2^-13
 * of its sum with each step of 32 keys. PROMOTED_COUNTED: the same number for shapes whose product P V also computes l
 * (the sum of P). SHIFT: P is 2^SHIFT where a row's score is its maximum. Measured errors: kernels/MEASUREMENTS.md
 * (float8 forward: changes 22, 25). */
enum { SHIFT = 8, PROMOTED = 672, PROMOTED_COUNTED = 896 };

/* D: the largest head size. C: number of consumers, with 64 rows each. BN: keys per tile. STAGES: number of buffers in
 * each ring of tiles. T: the type in which q and k are multiplied. */
template <int D_, int C_, int BN_, int STAGES_, typename T_ = e4m3, bool SHORT_ENDS_ = false> struct shape {
    typedef T_ T;
    /* Whether the kernel saves time at both ends of a work tile's keys: in the last tile of keys it computes only
     * visible keys, and it ends the softmax while the last product P V runs. This gains most if a work tile has few
     * tiles of keys, or if these tiles are wide. */
    static const bool SHORT_ENDS = SHORT_ENDS_;
    static const int D = D_, C = C_, BN = BN_, STAGES = STAGES_, BM = 64 * C, THREADS = 128 * (C + 1);
    static const bool WIDE = sizeof(T) == 2;
    static const bool HELPS = SHORT_ENDS && D == 256;
    /* The most bytes of K and V in a section (a group of heads whose work tiles are claimed together). The number is
     * small, so that V^T (the transpose of V) of the first section is ready soon. */
    static const int64_t SECTION = (HELPS ? 16 : 8) << 20;
    /* number of chunks of 128 bytes in a row of q or k (CHUNKS), and in a row of V^T (CHUNKS_V) */
    static const int ROW_BYTES = D * (int)sizeof(T), CHUNKS = (ROW_BYTES + 127) / 128, CHUNKS_V = (BN + 127) / 128;
    /* whether a consumer's thread gets as many registers as possible */
    static const bool LARGE = D == 256 || BN == 224;
    static const int PRODUCER = C == 3 ? 32 : LARGE ? 24 : 40, CONSUMER = C == 3 ? 160 : LARGE ? 240 : 232;
    /* whether the product P V also computes l, the sum of P, in 8 additional columns of O (see counted()) */
    static const bool COUNTS = D == 128 && !WIDE;
    static const int COLUMNS = D + (COUNTS ? 8 : 0);
    /* number of tiles of keys after which O is added to sums in shared memory */
    static const int PROMOTE = (COUNTS ? PROMOTED_COUNTED : PROMOTED) / BN;
    /* The most tiles of keys that a consumer skips at the end of a work tile's keys. Its rows see none of these keys,
     * but rows of other consumers do. */
    static const int MOST_PASSED = (BM - 64 + BN - 1) / BN;
    /* whether the wait for O += P V, and the rescaling of O, come in the middle of the next tile's softmax */
    static const bool EARLY = D == 128 && !WIDE;
    /* whether the softmax finds maxima by largest_by_bits() (integer comparisons); D = 256 lacks registers for it */
    static const bool BY_BITS = D < 256;
    /* Whether O is set to zero and all products add to it. Otherwise the first product overwrites O, which is faster
     * except for BN = 224. */
    static const bool ZEROS = BN == 224;
    /* Number of chains of dependent operations in which the softmax finds the second row's maximum, if EARLY is true.
     * With 224 keys one chain takes too long. */
    static const int CHAINS = BN == 224 ? 2 : 1;
    /* Number of steps in which a warp transposes a unit of V (128 keys by 64 channels). With more steps, the warp's
     * buffer in shared memory is smaller. */
    static const int STEPS = D == 256 ? 8 : 1;
    /* whether the sums of O in shared memory are floats; otherwise they are bfloat16, because floats do not fit */
    static const bool FLOAT_SUMS = D <= 128;
    static const int SUM_WORDS = FLOAT_SUMS ? 4 : 2;
};

/* A work tile: rows i0 to i0 + BM - 1 of head h of batch row b. They see tiles of keys `first` to `last` - 1. */
struct __align__(16) work_tile
{
    int b, h, i0, first;
    /* negative: 1 if q_scale times k_scale is negative; the kernel then changes the sign of all scores */
    int last, index, negative;
    /* c: log2(e) * scale * |q_scale * k_scale|, above 0. sink: the head's sink times log2(e), or -inf if it has
     * none. */
    float c, v_scale, sink;
    int unused[2];
};

enum { STOP = -1 }; /* value of work_tile::i0: there is no more work */

/* A warp's sums of O over many tiles of keys. At the end of a work tile the warp's 16 rows of out pass through this
 * memory. */
template <class X> struct sum_words {
    uint32_t O[X::D / 8][32 * X::SUM_WORDS];
    /* [r]: x and y: the sums l of rows r and r + 8; z and w: the maxima that were subtracted from the scores of rows r
     * and r + 8 */
    float4 rows[X::COUNTS ? 8 : 1];
};

template <class X> struct shared {
    alignas(1024) uint8_t Q[X::C][64 * 128 * X::CHUNKS];
    alignas(1024) uint8_t K[X::STAGES][X::BN * 128 * X::CHUNKS];
    /* V^T: rows are channels, columns are keys */
    alignas(1024) uint8_t V[X::STAGES][X::COLUMNS * 128 * X::CHUNKS_V];
    alignas(128) sum_words<X> sums[X::C * 4];
    transpose_memory<X::STEPS> transpose;
    work_tile work;
    warpgroup_tile parts[X::C];
    kv_barriers<X::C, X::STAGES> bars;
    unit helped_units[X::HELPS ? X::C * 4 : 1]; /* [consumer warp]: the unit of V (128 keys by 64 channels) that it
                                                 * transposes in help_to_transpose() */
    int newest[X::C * 4]; /* [consumer warp]: newest work tile with a repair_note (rows to recompute); -1: none */
};

/* ---- The plan: the numbers of a problem that the kernel reads, in 32 bits ---------------------------------------- */

/* Which of a warp's 16 rows must be recomputed at the end of the block. In `rows`, for i from 0 to 7, bit 4 i is set if
 * row i has huge scores, and bit 4 i + 1 if row i + 8 has huge scores. */
struct repair_note {
    uint32_t rows;
    int before; /* the previous work tile for which this warp wrote a repair_note; -1: none */
};
/* bit of repair_note::rows: a result was not finite, so each of the 16 rows must be checked */
enum { LOOK = 4 };
/* bit of repair_note::rows: V had a NaN, in whose place V^T has a zero. It is not known whether the 16 rows see the key
 * of the NaN. */
enum { V_NAN = 8 };

struct plan {
    ending_order order;
    int H, group, Sq;
    key_band band;
    float c; /* log2(e) * scale, without the scales of q and k */
    input_scales scales;
    results to;
    transpose_plan transpose;
    repair_note *notes; /* [work tile][warp]: rows to recompute; written only if there is such a row */
    /* number of work tiles that blocks have claimed; a block's first work tile needs no claim */
    int *counter;
};

/* Returns work tile number t. add_factors() sets the members that depend on scales and sinks. */
template <class X> DEVICE work_tile work_tile_of(const plan &p, int t)
{
    work_tile x = {};
    x.index = t;
    const head_tile place = head_tile_of(p.order, t);
    x.b = place.head / p.H;
    x.h = place.head - x.b * p.H;
    x.i0 = (p.order.per_head - 1 - place.tile) * X::BM;
    const key_tiles keys = key_tiles_of<X::BN>(p.band, x.i0, min(x.i0 + X::BM, p.Sq));
    x.first = keys.first, x.last = keys.last;
    return x;
}

DEVICE void add_factors(const plan &p, work_tile &x)
{
    const int hk = x.h / p.group;
    const float scale = input_scale(p.scales, SCALE_Q, x.b, hk) * input_scale(p.scales, SCALE_K, x.b, hk);
    x.negative = scale < 0;
    x.c = fmaxf(p.c * fabsf(scale), LEAST_C);
    x.v_scale = input_scale(p.scales, SCALE_V, x.b, hk);
    x.sink = sink_log2(p.to, x.h);
}

/* ---- The warps that load tiles and hand out work (producer) ------------------------------------------------------ */

/* Claims work tiles and passes them to the block's other warps. One warp runs this. */
template <class X> DEVICE void hand_out_work(const plan &p, shared<X> &sm)
{
    const bool scheduler = threadIdx.x % 32 == 0;
    ring<1> at;
    for (int t = first_tile(p.order); t < p.order.end; t = claim_tile(p.order, t, p.counter, scheduler)) {
        if (scheduler) {
            work_tile &x = sm.work;
            x = work_tile_of<X>(p, t);
            add_factors(p, x);
#pragma unroll 1
            for (int n = 0; n < X::C; n++)
                sm.parts[n] = warpgroup_tile_of<X::BN>(p.band, x.i0 + n * 64, p.Sq, x.first, x.last);
            announce_work(sm);
        }
        await_readers(sm, at);
    }
    if (scheduler) {
        sm.work.i0 = STOP;
        announce_work(sm);
    }
}

/* The warp that fills the rings of K and V. Lane 0 issues the loads; all lanes check whether V^T is ready. */
template <class X> struct tile_loader {
    static const int BN = X::BN;
    const plan &p;
    shared<X> &sm;
    const kv_maps &maps;
    const bool loader = threadIdx.x == 0;
    ring<X::STAGES> k, v;
    ring<1> q, at;

    DEVICE void load_K(int j, int hk, int b)
    {
        if (loader) {
            sleep_until_empty(sm.bars.K, k);
            fill_stage<BN, X::CHUNKS, 128>(sm.bars.K, k, smem_addr(sm.K[k.stage]), &maps.K, { 0, j * BN, hk, b });
        }
        k.next();
    }

    /* Waits until tile j of V^T (the transpose of V) has been written, and loads it. `ready` is the number of a block
     * of 128 keys: V^T of this block, and of the work tile's later blocks, is known to be written. */
    DEVICE void load_V(int j, int hk, int b, int &ready)
    {
        if (j * BN / KEYS < ready) ready = await_units(p.transpose, b * p.transpose.Hk + hk, j * BN / KEYS, ready);
        if (loader) {
            sleep_until_empty(sm.bars.V, v);
            fill_stage<X::D, X::CHUNKS_V, 128, X::COLUMNS>(sm.bars.V, v, smem_addr(sm.V[v.stage]), &maps.V,
                                                           { j * BN, 0, hk, b });
        }
        v.next();
    }

    DEVICE void run()
    {
        for (;; at.next()) {
            const auto &x = await_work(sm, at);
            const int first = x.first, last = x.last, i0 = x.i0, h = x.h, hk = h / p.group, b = x.b;
            __syncwarp(); /* all lanes have read the work tile, so lane 0 may release it */
            if (i0 == STOP) break;
            /* Whether the work tile has at least two tiles of keys. If so, it is released only when its last tile of
             * keys is left to load. The release lets the block claim the next work tile. */
            const bool late = first + 1 < last;
            if (loader && !late) release_work(sm);
            if (first >= last) continue;
            int ready = key_blocks_below(p.transpose, last * BN);
            load_K(last - 1, hk, b);
            if (loader) load_Q<X::C, X::CHUNKS, 128>(sm, &maps.Q, i0, h, b, q);
#pragma unroll 1
            for (int j = last - 2; j >= first; j--) {
                if (loader && late && j == first) release_work(sm);
                load_K(j, hk, b);
                load_V(j + 1, hk, b, ready);
            }
            load_V(first, hk, b, ready);
        }
    }
};

/* ---- A warpgroup that multiplies (consumer), and its sums of O in shared memory ---------------------------------- */

DEVICE float low_bf16(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}
DEVICE float high_bf16(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000);
}

/* Values of 8 additional columns of V. With them, the product P V also computes l, the sum of P. Small P then lose the
 * same bits in O as in l, which makes out = O / l more exact. l is the mean of two sums, one with the value 1 and one
 * with 1.75 (divided by 1.75). This had the smallest error of the values tried (kernels/MEASUREMENTS.md, changes to the
 * float8 forward). */
enum { ONES = 0x38383838, SEVEN_QUARTERS = 0x3e3e3e3e }; /* words of four equal e4m3 numbers, 1 or 1.75 */
DEVICE float2 counted(const float *sums)
{
    return make_float2(0.5f * sums[0] + 0.5f / 1.75f * sums[1], 0.5f * sums[2] + 0.5f / 1.75f * sums[3]);
}

/* A warp's sums of O over many tiles of keys, in shared memory. A new work tile multiplies the old sums by 0, so they
 * must always be finite. */
template <class X> struct promoted_sums {
    typedef sum_words<X> words;
    /* factors by which the sums in shared memory must still be multiplied, for the thread's two rows */
    float left[2] = { 0, 0 };

    DEVICE static void clear(words &sums, int lane)
    {
#pragma unroll
        for (int n = 0; n < X::D / 8; n++)
            if constexpr (X::FLOAT_SUMS) ((float4 *)sums.O[n])[lane] = make_float4(0, 0, 0, 0);
            else ((uint2 *)sums.O[n])[lane] = make_uint2(0, 0);
    }

    /* Begins a work tile: sets l to 0 and the maxima to -inf in shared memory, if the product P V computes l. */
    DEVICE static void begin(words &sums, int lane)
    {
        if (X::COUNTS) ((float *)sums.rows)[lane] = lane & 2 ? -CUDART_INF_F : 0;
        __syncwarp();
    }

    DEVICE void rescale(const float (&factor)[2])
    {
        if (!X::COUNTS) left[0] *= factor[0], left[1] *= factor[1];
    }

    /* Returns l of the sums in shared memory, for the thread's two rows. Sets `left`, the factors by which these sums
     * must be multiplied before their use. If COUNTS is false (the product P V does not compute l), returns 0 and sets
     * nothing. */
    DEVICE float2 find_left(const words &sums, const softmax &state, float c, int lane)
    {
        if (!X::COUNTS) return {};
        const float4 x = sums.rows[lane / 4];
        left[0] = x.z == -CUDART_INF_F ? 0 : exp2_fast((x.z - state.m[0]) * c);
        left[1] = x.w == -CUDART_INF_F ? 0 : exp2_fast((x.w - state.m[1]) * c);
        return { x.x, x.y };
    }

    /* Adds O to the sums in shared memory. With ZEROS, O is then multiplied by 0, because ptxas would use more
     * registers to set it to the constant 0. */
    DEVICE void promote(words &sums, float (&O)[X::COLUMNS / 2], const softmax &state, float c, int lane)
    {
        const float2 l = find_left(sums, state, c, lane);
#pragma unroll
        for (int n = 0; n < X::D / 8; n++) {
            float *const o = O + n * 4;
            if constexpr (X::FLOAT_SUMS) {
                float4 &at = ((float4 *)sums.O[n])[lane];
                const float4 x = at;
                at = make_float4(fmaf(x.x, left[0], o[0]), fmaf(x.y, left[0], o[1]), fmaf(x.z, left[1], o[2]),
                                 fmaf(x.w, left[1], o[3]));
            } else {
                uint2 &at = ((uint2 *)sums.O[n])[lane];
                const uint2 x = at;
                at = make_uint2(pack<bf16>(fmaf(low_bf16(x.x), left[0], o[0]), fmaf(high_bf16(x.x), left[0], o[1])),
                                pack<bf16>(fmaf(low_bf16(x.y), left[1], o[2]), fmaf(high_bf16(x.y), left[1], o[3])));
            }
        }
        if constexpr (X::COUNTS) {
            const float2 more = counted(O + X::D / 2);
            const float ls[2] = { fmaf(l.x, left[0], more.x), fmaf(l.y, left[1], more.y) };
            const float mine = lane & 2 ? (lane & 1 ? state.m[1] : state.m[0]) : lane & 1 ? ls[1] : ls[0];
            __syncwarp(); /* all lanes have read l in shared memory, which may now be overwritten */
            ((float *)sums.rows)[lane] = mine;
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < X::COLUMNS / 2; i++)
            if (X::ZEROS) O[i] *= 0;
        left[0] = left[1] = 1;
    }

    DEVICE void add_to(float (&O)[X::COLUMNS / 2], float (&l)[2], const words &sums, const softmax &state, float c,
                       int lane)
    {
        const float2 before = find_left(sums, state, c, lane);
#pragma unroll
        for (int n = 0; n < X::D / 8; n++) {
            float x[4];
            if constexpr (X::FLOAT_SUMS) {
                *(float4 *)x = ((const float4 *)sums.O[n])[lane];
            } else {
                const uint2 pairs = ((const uint2 *)sums.O[n])[lane];
                x[0] = low_bf16(pairs.x), x[1] = high_bf16(pairs.x);
                x[2] = low_bf16(pairs.y), x[3] = high_bf16(pairs.y);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) O[n * 4 + e] = fmaf(x[e], left[e / 2], O[n * 4 + e]);
        }
        if (X::COUNTS) l[0] = fmaf(before.x, left[0], l[0]), l[1] = fmaf(before.y, left[1], l[1]);
    }
};

/* The largest |m c| that this kernel can compute (m: a row's largest score; c converts scores to base 2). A larger one
 * is rounded so coarsely that P may exceed 448, the largest e4m3 number. */
const float BASE_MOST = 1 << 23;

/* The results of a work tile's softmax: the factors for the thread's two rows of O, bits of repair_note::rows, and
 * whether the sums are finite. */
struct tile_end {
    float factor[2];
    uint32_t rows;
    bool finite;
};

template <class X> struct attention {
    static const int D = X::D, BN = X::BN;
    const plan &p;
    shared<X> &sm;
    kv_consumer<shared<X>, X::C, X::STAGES> me;
    const k_major_described<64> Q;

    DEVICE attention(const plan &p_, shared<X> &sm_, int w) : p(p_), sm(sm_), me(sm_, w), Q(smem_addr(sm_.Q[w])) {}

    DEVICE k_major_described<BN> K() const { return k_major_described<BN>(smem_addr(sm.K[me.k.stage])); }
    DEVICE k_major_described<X::COLUMNS> V() const
    {
        return k_major_described<X::COLUMNS>(smem_addr(sm.V[me.v.stage]));
    }

    DEVICE int warp_index() const { return me.w * 4 + me.warp; }
    DEVICE int row_of(const work_tile &x) const { return x.i0 + me.w * 64 + me.warp * 16 + me.lane / 4; }

    /* Turns S, the products q.k with the first N keys of tile j, into P. CAREFUL: some keys may be hidden, or scores
     * must change their sign. If SHORT_ENDS is true and N > 128, all rows see the first 64 keys, so these are not
     * masked on the right. */
    template <int N, bool CAREFUL, bool BY_BITS, class F>
    DEVICE void scores_to_P(float (&S)[N / 2], const work_tile &x, const warpgroup_tile &y, int i0, int j,
                            softmax &state, float (&rescale)[2], F midway)
    {
        if (CAREFUL && x.negative)
#pragma unroll
            for (int i = 0; i < N / 2; i++) S[i] = -S[i];
        if (CAREFUL && X::SHORT_ENDS) {
            const int seen_by_all = min(x.i0 + me.w * 64 + p.band.hi, p.band.Sk) - j * BN;
            if (j < y.free_first) mask<N>(S, p.band, i0, j * BN, me.lane);
            else if (seen_by_all < N) mask<N, true, (N > 128) ? 64 : 0>(S, p.band, i0, j * BN, me.lane);
        } else if (CAREFUL && (j < y.free_first || j >= y.free_last)) {
            mask<N>(S, p.band, i0, j * BN, me.lane);
        }
        const shifted_reference<SHIFT> reference = { x.c };
        if (X::EARLY)
            softmax_step_early<N, CAREFUL, X::CHAINS, BY_BITS, !X::COUNTS>(S, state, rescale, reference, midway);
        else softmax_step<N, BY_BITS>(S, state, rescale, reference);
    }

    /* Computes P of the first N keys of the last tile that this warpgroup's rows see. This tile is computed first. */
    template <int N>
    DEVICE void first_tile(uint32_t (&P)[BN / 32][4], const work_tile &x, const warpgroup_tile &y, softmax &state)
    {
        const int j = y.last_visible - 1;
        float S[N / 2], rescale[2];
        me.await_turn();
        multiply<typename X::T, N, X::ROW_BYTES / 32>(S, Q, K());
        me.next_turn();
        retire<0>(S);
        me.release_K(j == x.first);
        scores_to_P<N, true, false>(S, x, y, row_of(x), j, state, rescale, [](float) {});
        to_operand_8<N>(P, S);
    }

    /* Releases the buffer of K during the softmax. ptxas does not move the wait for O to a place before this release.
     * The condition is always true, because `sum` is never negative, but ptxas cannot know that. */
    DEVICE void release_K_late(float sum, float c)
    {
        if (me.leader && !(sum < -c)) mbarrier_arrive(smem_addr(&sm.bars.K.empty[me.k.stage]));
        me.k.next();
    }

    DEVICE void retire_O(float (&O)[X::COLUMNS / 2])
    {
        retire<0>(O);
        me.release_V();
    }

    /* Computes O = P V over the tiles of keys that this warpgroup's rows see. If SHORT_ENDS is true, it also calls
     * rows_to_repair() and, unless the products P V compute l, end_softmax(). */
    DEVICE void attend(float (&O)[X::COLUMNS / 2], softmax &state, const work_tile &x, const warpgroup_tile &y,
                       tile_end &end)
    {
        const int first = x.first, i0 = row_of(x);
        auto &sums = sm.sums[warp_index()];
        promoted_sums<X> promoted;
        float S[BN / 2], rescale[2];
        uint32_t P[BN / 32][4];

        /* promotes(j): whether O is added to the sums in shared memory after the softmax of tile j. `many`: whether
         * this ever happens in this work tile; always true with ZEROS. */
        const auto promotes = [](int j) { return (j + 1) % X::PROMOTE == 0; };
        const bool many = X::ZEROS || (y.last_visible - 1) / X::PROMOTE > first / X::PROMOTE;
        if (many) promoted.begin(sums, me.lane);
        me.await_Q();
        me.template pass_K<X::MOST_PASSED>(x.last - y.last_visible);
        me.await_K();
        /* number of keys of the tile that is computed first, up to the last key that this warpgroup's rows see */
        const int seen = min(x.i0 + me.w * 64 + 63 + p.band.hi, p.band.Sk) - (y.last_visible - 1) * BN;
        if (X::SHORT_ENDS && seen <= 64) first_tile<X::SHORT_ENDS ? 64 : BN>(P, x, y, state);
        else if (X::SHORT_ENDS && BN > 128 && seen <= 128) first_tile<X::SHORT_ENDS ? 128 : BN>(P, x, y, state);
        else first_tile<BN>(P, x, y, state);
        me.template pass_V<X::MOST_PASSED>(x.last - y.last_visible);

        const auto step = [&](int j, auto careful, auto by_bits) {
            me.await_K();
            me.await_turn();
            multiply<typename X::T, BN, X::ROW_BYTES / 32>(S, Q, K());
            me.await_V();
            /* This product adds P V of tile j + 1. P of tile j is not computed yet. */
            multiply_add<e4m3, X::COLUMNS, BN / 32>(O, P, V(), X::ZEROS || !promotes(j + 1));
            me.next_turn();
            retire<1>(S);
            me.template release_K<X::EARLY>(j == first);
            scores_to_P<BN, careful.value, by_bits.value>(S, x, y, i0, j, state, rescale, [&](float sum) {
                release_K_late(sum, x.c);
                retire_O(O);
            });
            if (X::EARLY) {
                /* Rows are multiplied even if their factor is 1. To skip this, the warp would have to vote, and the
                 * vote would wait for the last exponentials. */
                multiply_rows(O, rescale);
                promoted.rescale(rescale);
            } else {
                compute_before_wait(state.l[0] + state.l[1]);
                retire_O(O);
                if (rescale_rows(O, rescale)) promoted.rescale(rescale);
            }
            to_operand_8<BN>(P, S);
            if (promotes(j)) promoted.promote(sums, O, state, x.c, me.lane);
        };
        /* Whether all tiles are computed by the slower code, which masks scores and changes their sign. It is needed if
         * the product of the scales is negative, or if a window hides keys of the first tile from some row. */
        const bool none_free = x.negative || y.free_first > first;
        walk_down<X::EARLY, X::BY_BITS>(
            y.last_visible - 2, none_free ? first : y.free_last, first, [](int j) { return j - 1; }, step,
            [&] { return me.meet_all(is_high(state, shifted_reference<SHIFT>{ x.c })); });
        me.await_V();
        multiply_add<e4m3, X::COLUMNS, BN / 32>(O, P, V(), X::ZEROS || !promotes(first));
        if (X::SHORT_ENDS) end.rows = rows_to_repair(state, x);
        if (X::SHORT_ENDS && !X::COUNTS) end_softmax(end, state, x);
        retire<0>(O);
        me.release_V();
        if constexpr (X::COUNTS) {
            const float2 l = counted(O + D / 2);
            state.l[0] = l.x, state.l[1] = l.y;
        }
        if (many) promoted.add_to(O, state.l, sums, state, x.c, me.lane);
    }

    /* Returns bits of repair_note::rows: those of rows with huge scores, and V_NAN if V had a NaN. */
    DEVICE uint32_t rows_to_repair(const softmax &state, const work_tile &x) const
    {
        const shifted_reference<SHIFT> reference = { x.c };
        uint32_t rows = had_any_nan(p.transpose) ? V_NAN : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float base = reference.base(state.m[half]);
            const bool huge = base != -CUDART_INF_F && !(fabsf(base) < BASE_MOST);
            rows |= (__ballot_sync(0xffffffff, huge) & 0x11111111) << half;
        }
        return rows;
    }

    /* Stores lse = ln(2^base l) of the thread's two rows, where 2^base is the divisor of a row's exponentials. Stores
     * in y the factors for O and whether l is finite. With COUNTS, the products P V compute l, so this function must
     * be called after the last of them. */
    DEVICE void end_softmax(tile_end &y, softmax &state, const work_tile &x)
    {
        const row_ends ends = end_rows<X::COUNTS>(state, shifted_reference<SHIFT>{ x.c }, x.sink, x.v_scale);
        store_lse(p.to, x.b, x.h, 0, row_of(x), p.Sq, state, ends, me.lane);
        y.factor[0] = ends.factor[0], y.factor[1] = ends.factor[1];
        y.finite = state.l[0] - state.l[0] == 0 && state.l[1] - state.l[1] == 0;
    }

    /* Stores out = O / l. Writes a repair_note if some of the warp's rows must be computed again. */
    DEVICE void finish(float (&O)[X::COLUMNS / 2], const tile_end &end, const work_tile &x)
    {
        const int warp_row = x.i0 + me.w * 64 + me.warp * 16;
        float(&out)[D / 2] = *(float(*)[D / 2]) & O;
        const bool finite = finish_rows(out, end.factor) && end.finite;
        const bool any = __any_sync(0xffffffff, !finite);
        const uint32_t rows = end.rows | (any ? LOOK : 0);
        if (rows && me.lane == 0) {
            p.notes[x.index * (4 * X::C) + warp_index()] = { rows, sm.newest[warp_index()] };
            sm.newest[warp_index()] = x.index;
        }
        __syncwarp(); /* all lanes have read the warp's sums in shared memory, which out may now overwrite */
        if (p.to.out) {
            store_rows<bf16, D>(out_row<bf16>(p.to, x.b, x.h, warp_row), p.to.out_row, p.Sq - warp_row, p.to.Dv, out,
                                (uint16_t *)sm.sums[warp_index()].O, me.lane);
            __syncwarp();
        }
        if (any) promoted_sums<X>::clear(sm.sums[warp_index()], me.lane);
    }

    DEVICE void run()
    {
        promoted_sums<X>::clear(sm.sums[warp_index()], me.lane);
        me.begin_turns();
        for (;;) {
            work_tile x;
            warpgroup_tile y;
            me.take([&](const work_tile &work, const warpgroup_tile &part) {
                x = work, y = part;
                return true;
            });
            /* a vote shows to ptxas that all lanes take the same branch (see repair_own_rows()) */
            if (__any_sync(0xffffffff, x.i0 == STOP)) break;
            float O[X::COLUMNS / 2];
            softmax state;
#pragma unroll
            for (int i = 0; i < X::COLUMNS / 2; i++) O[i] = 0;
            tile_end end;
            const bool attends = x.first < y.last_visible;
            if (attends) attend(O, state, x, y, end);
            else if (x.first < x.last) me.pass_work(x.first, x.last);
            if (!X::SHORT_ENDS || !attends) end.rows = rows_to_repair(state, x);
            if (!X::SHORT_ENDS || X::COUNTS || !attends) end_softmax(end, state, x);
            finish(O, end, x);
        }
        me.end_turns();
    }
};

/* ---- Recomputing rows, and helping to transpose V ---------------------------------------------------------------- */

/* Recomputes the rows of this warp's repair_notes one by one. It is not inlined, and the loop over work tiles ends by a
 * vote. Otherwise ptxas would keep the descriptors of operands in registers of each thread (and not in uniform
 * registers) in the loop over keys. */
template <class X> static __device__ __noinline__ void repair_own_rows(const plan &p, const cuda_args &a)
{
    const int warp = threadIdx.x / 32 - 4;
    repair_note note;
    for (int t = block_memory<shared<X>>().newest[warp]; t >= 0; t = note.before) {
        const work_tile w = work_tile_of<X>(p, t);
        const head_args x = head_args_of(a, w.b, w.h);
        note = p.notes[t * (4 * X::C) + warp];
        const bool look = note.rows & LOOK ||
                          (note.rows & V_NAN && had_nan(p.transpose, w.b * (int64_t)p.transpose.Hk + w.h / p.group,
                                                        w.first * X::BN, w.last * X::BN));
        for (int r = 0; r < 16; r++) {
            const int i = w.i0 + warp * 16 + r;
            const bool huge = note.rows >> (r % 8 * 4 + r / 8) & 1;
            if (i < p.Sq && (huge || look))
                forward_row(a, x, i, a.g.view[ATTN_T_out], nullptr, huge ? EVERY_ROW : UNSOUND_ROWS);
        }
    }
}

/* Lets each consumer warp transpose one unit of V (128 keys by 64 channels) before its other work. At head size 256
 * with a mask, the two warps that only transpose V are too slow alone. */
template <class X> struct helper_memory {
    shared<X> &sm;
    static DEVICE uint32_t index() { return thread_anew() / 32 - 4; }
    DEVICE uint32_t own_staging() const { return smem_addr(sm.sums[index()].O); }
    DEVICE unit &own_unit(int) { return sm.helped_units[index()]; }
};
template <class X> DEVICE void help_to_transpose(const plan &p, shared<X> &sm)
{
    helper_memory<X> memory = { sm };
    static_assert(!X::HELPS || sizeof(sum_words<X>) >= sizeof(sm.transpose.staging[0]), "room for V");
    transposer<X::STEPS, helper_memory<X>>{ p.transpose, memory }.make_one();
}

/* ---- The kernels ------------------------------------------------------------------------------------------------- */

template <class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    forward_tiles(const __grid_constant__ plan p, const __grid_constant__ kv_maps maps,
                  const __grid_constant__ cuda_args a)
{
    static_assert(sizeof(shared<X>) <= 227 << 10, "what a block may have");
    shared<X> &sm = block_memory<shared<X>>();
    const int wg = warpgroup_index();

    if (threadIdx.x == 0) {
        prefetch_maps(maps);
        sm.bars.init();
        fence_mbarrier_init();
    }
    if (threadIdx.x < X::C * 4) sm.newest[threadIdx.x] = -1;
    if (X::COUNTS) { /* fill in the 8 rows of V^T (columns of V) that compute l; a row has 32 words per chunk */
        for (int i = threadIdx.x; i < X::STAGES * X::CHUNKS_V * 256; i += X::THREADS) {
            uint8_t *const chunk = sm.V[0] + i / 256 * (X::COLUMNS * 128);
            ((uint32_t *)(chunk + X::D * 128))[i % 256] = i / 32 % 2 ? SEVEN_QUARTERS : ONES;
        }
        fence_proxy_async_shared();
    }
    begin_block();

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        const int role = threadIdx.x / 32;
        if (role == 0) tile_loader<X>{ p, sm, maps }.run();
        else if (role == 1) hand_out_work(p, sm);
        else transposer<X::STEPS, transpose_memory<X::STEPS>>{ p.transpose, sm.transpose }.run();
    } else {
        if (X::HELPS && p.transpose.in_haste) help_to_transpose(p, sm);
        setmaxnreg_inc<X::CONSUMER>();
        attention<X>(p, sm, wg - 1).run();
        __syncwarp();
        if (__any_sync(0xffffffff, sm.newest[threadIdx.x / 32 - 4] >= 0)) repair_own_rows<X>(p, a);
    }
}

/* Sets the words at the beginning of the scratch memory (counters, and which parts of V^T are ready) to 0, before
 * forward_tiles. Each thread writes 16 bytes. */
__global__ void __launch_bounds__(256) begin_run(uint4 *words, int64_t count)
{
    launch_dependents();
    /* the stream's previous kernel may still use this scratch memory */
    wait_for_prerequisites();
    const int64_t n = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (n < count) words[n] = make_uint4(0, 0, 0, 0);
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

struct run_counters {
    /* numbers of the next work tile, and of the next unit of V^T (128 keys by 64 channels), that a warp will claim */
    int tile, unit;
    uint32_t any_nan;
    int unused[29];
};

/* Where in scratch memory each part begins. The parts are counters, words that say which units of V^T are ready, a
 * repair_note per work tile and warp, V^T, and q and k converted to bfloat16. */
struct layout {
    /* offsets in bytes from the beginning of the scratch memory, and its size (`bytes`) */
    int64_t notes, V, wide[2], bytes;
};

layout layout_of(const attn_dims &d, bool wide)
{
    const auto lines = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    layout x;
    x.notes = sizeof(run_counters) + lines(transpose_units(d) * (int64_t)sizeof(uint32_t));
    x.V = x.notes + lines(d.B * d.H * attn_tiles(d.Sq, LEAST_BM) * 12 * (int64_t)sizeof(repair_note));
    x.wide[0] = x.V + d.B * d.Hk * d.Dv * attn_tiles(d.Sk, KEYS) * KEYS;
    x.wide[1] = x.wide[0] + (wide ? lines(d.B * d.Sq * d.H * d.D * 2) : 0);
    x.bytes = x.wide[1] + (wide ? lines(d.B * d.Sk * d.Hk * d.D * 2) : 0);
    return x;
}

struct f8_job {
    const cuda_chip *chip;
    cudaStream_t stream;
    cuda_args given;
    char *memory;
    layout place;
};

transpose_plan make_transpose_plan(const f8_job &job, int section, int sweep_rows)
{
    const attn_geometry &g = job.given.g;
    const attn_dims &d = g.dims;
    const attn_view &v = g.view[ATTN_T_v];
    run_counters *const counters = (run_counters *)job.memory;
    transpose_plan x;
    x.V = (const uint8_t *)v.data, x.batch = v.batch, x.head = v.head, x.row = v.row, x.sweep = sweep_rows * v.row;
    x.pitch = attn_tiles(d.Sk, KEYS) * KEYS;
    x.to = (uint8_t *)job.memory + job.place.V, x.to_head = d.Dv * x.pitch;
    x.marks = (uint32_t *)(counters + 1);
    x.Hk = (int)d.Hk, x.Sk = (int)d.Sk, x.Dv = (int)d.Dv;
    x.key_blocks = (int)attn_tiles(d.Sk, KEYS), x.channel_blocks = (int)attn_tiles(d.Dv, CHANNELS_V);
    x.units = (int)transpose_units(d);
    x.order = tile_order_of(x.key_blocks, d.B * d.Hk, 0, false);
    x.order.section = (int)attn_max64(attn_min64(section, job.chip->multiprocessors) / g.group, 1);
    x.in_haste = x.order.section * x.key_blocks * x.channel_blocks > TRANSPOSERS * job.chip->multiprocessors;
    x.next_unit = &counters->unit, x.any_nan = &counters->any_nan;
    return x;
}

plan make_plan(const f8_job &job, int BM, int row_bytes, int sweep_rows, int64_t section)
{
    const attn_geometry &g = job.given.g;
    const attn_dims &d = g.dims;
    plan p;
    const bool uneven = g.right < d.Sk || g.left < d.Sq;
    p.order = forward_order_of(g, attn_tiles(d.Sq, BM), d.B * d.H, d.Sk, row_bytes + d.Dv, BM, uneven, section);
    p.H = (int)d.H, p.group = (int)g.group, p.Sq = (int)d.Sq;
    p.band = key_band_of(g.top_left ? 0 : (int)(d.Sk - d.Sq), (int)attn_min64(g.left, FAR),
                         (int)attn_min64(g.right, FAR), (int)d.Sk);
    p.c = (float)g.scale * LOG2E;
    p.scales = input_scales_of(g);
    p.to = results_of(g);
    p.transpose = make_transpose_plan(job, p.order.section, sweep_rows);
    p.notes = (repair_note *)(job.memory + job.place.notes);
    p.counter = &((run_counters *)job.memory)->tile;
    take_share(job.chip, p.order);
    return p;
}

template <class X> cudaError_t make_maps(const f8_job &job, const plan &p, kv_maps &maps)
{
    const attn_geometry &g = job.given.g;
    const attn_dims &d = g.dims;
    attn_view q = g.view[ATTN_T_q], k = g.view[ATTN_T_k];
    if (X::WIDE) {
        const int chips = job.chip->multiprocessors;
        cudaError_t code = widen_view<16>(q, d.B, d.H, d.Sq, d.D, d.D, job.memory + job.place.wide[0], chips,
                                          job.stream);
        if (code == cudaSuccess)
            code = widen_view<16>(k, d.B, d.Hk, d.Sk, d.D, d.D, job.memory + job.place.wide[1], chips, job.stream);
        if (code != cudaSuccess) return code;
    }
    const int64_t w = (int64_t)sizeof(typename X::T);
    const auto rows = [&](const attn_view &x, int64_t H, int64_t S) {
        return tma_bytes_of(x.data, d.B, H, S, d.D * w, x.batch * w, x.head * w, x.row * w);
    };
    const transpose_plan &t = p.transpose;
    const tma_tensor values = tma_bytes_of(t.to, d.B, d.Hk, d.Dv, t.pitch, d.Hk * t.to_head, t.to_head, t.pitch);
    const bool made = tma_map(&maps.Q, rows(q, d.H, d.Sq), 64) && tma_map(&maps.K, rows(k, d.Hk, d.Sk), X::BN) &&
                      tma_map(&maps.V, values, X::D);
    return made ? cudaSuccess : cudaErrorInvalidValue;
}

template <class X> cudaError_t launch(const f8_job &job)
{
    const plan p = make_plan(job, X::BM, (int)job.given.g.dims.D * (int)sizeof(typename X::T),
                             transpose_step_shape<X::STEPS>::SWEEP, X::SECTION);
    kv_maps maps;
    cudaError_t code = make_maps<X>(job, p, maps);
    if (code == cudaSuccess) code = allow_shared<forward_tiles<X>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;
    const int64_t words = job.place.notes / (int64_t)sizeof(uint4);
    code = launch_dependent(begin_run, attn_tiles(words, 256), 256, 0, job.stream, (uint4 *)job.memory, words);
    if (code != cudaSuccess) return code;
    /* More blocks than work tiles may be launched: a block that gets no work tile still helps, because two of its warps
     * transpose V. */
    const int64_t blocks = attn_max64(p.order.end - p.order.first, (p.transpose.units + 1) / 2);
    return launch_dependent(forward_tiles<X>, attn_min64(blocks, job.chip->multiprocessors), X::THREADS,
                            sizeof(shared<X>), job.stream, p, maps, job.given);
}

/* A problem takes the first shape that has at least the problem's head sizes, and that is meant for its number of keys
 * (at least least_Sk, or least_masked_Sk with a mask). If lse is wanted, only shapes that convert q and k to bfloat16
 * are used. */
struct shape_row {
    int D;
    bool wide;
    int least_Sk, least_masked_Sk;
    cudaError_t (*launch)(const f8_job &);
};
template <class X> constexpr shape_row row(int least_Sk, int least_masked_Sk)
{
    return { X::D, X::WIDE, least_Sk, least_masked_Sk, launch<X> };
}
const int NEVER = FAR;
/* clang-format off */
const shape_row shapes[] = {
    /* D: largest head size; C: consumers; BN: keys per tile; stages: buffers of a ring; q and k: the type in which they
     * are multiplied; short: shape::SHORT_ENDS
     *        D    C  BN stages q and k, short   least number of keys without a mask, with a mask */
    row<shape<64,  3, 160, 3>>                  (4096, 4096),
    row<shape<64,  3, 128, 4>>                  (0, 0),
    row<shape<64,  3, 128, 4, bf16>>            (0, 0),
    row<shape<128, 2, 224, 2, e4m3, true>>      (1024, 4096),
    row<shape<128, 3, 96,  3>>                  (NEVER, 2048),
    row<shape<128, 2, 128, 3>>                  (0, NEVER),
    row<shape<128, 2, 128, 3, e4m3, true>>      (NEVER, 0),
    row<shape<128, 2, 128, 2, bf16>>            (0, 0),
    row<shape<256, 2, 128, 2>>                  (0, 2048),
    row<shape<256, 2, 128, 2, e4m3, true>>      (NEVER, 0),
};
/* clang-format on */

const shape_row *shape_of(const attn_problem *p, bool masked)
{
    const attn_dims d = attn_dims_of(p);
    for (const shape_row &x : shapes)
        if (x.D >= d.D && x.D >= d.Dv && x.wide == (p->lse.rank != 0) &&
            d.Sk >= (masked ? x.least_masked_Sk : x.least_Sk))
            return &x;
    return nullptr;
}

bool plan_forward(const cuda_chip *chip, attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const shape_row *const x = shape_of(plan->problem, g.right < d.Sk || g.left < d.Sq);
    if (!x || d.Sq <= 0 || d.Sk <= 0 || d.B <= 0 || d.H <= 0 || d.Sq >= FAR || d.Sk >= FAR) return false;
    if (d.B * d.H * attn_tiles(d.Sq, LEAST_BM) * 12 >= INT32_MAX) return false; /* work tiles are counted in 32 bits */
    if (transpose_units(d) >= INT32_MAX || (x->wide && splits_float8(chip, plan))) return false;
    if (plan->problem->out.rank && !tma_walkable(g.view[ATTN_T_out], d.B, d.H, d.Sq, d.Dv, 8)) return false;
    plan->variant = x;
    plan->workspace_bytes = (size_t)layout_of(d, x->wide).bytes;
    return tma_walkable(g.view[ATTN_T_q], d.B, d.H, d.Sq, d.D, 16) &&
           tma_walkable(g.view[ATTN_T_k], d.B, d.Hk, d.Sk, d.D, 16) &&
           tma_walkable(g.view[ATTN_T_v], d.B, d.Hk, d.Sk, d.Dv, 16);
}

cudaError_t launch_forward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const shape_row *const x = (const shape_row *)plan->variant;
    f8_job job;
    job.chip = chip, job.stream = stream, job.memory = (char *)memory;
    job.given = cuda_args_of(chip, plan);
    job.place = layout_of(job.given.g.dims, x->wide);
    return x->launch(job);
}

} // namespace

extern const cuda_kernel sm90_f8_forward = {
    { "sm90_f8", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F8E4M3), TILE_HEAD_DIM,
      BASIC_FEATURES | ATTN_TENSOR_BIT(q_scale) | ATTN_TENSOR_BIT(k_scale) | ATTN_TENSOR_BIT(v_scale) },
    90,
    90,
    plan_forward,
    launch_forward,
    true,
};
