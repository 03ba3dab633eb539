/* f8_forward.cu: flash attention forward of float8_e4m3fn for Hopper, with products of e4m3.
 *
 * forward.cu's shape: one block a multiprocessor, tiles of work handed out by a warp, a warp that lets the copy
 * engine fill a ring of K and V tiles, C consumers of 64 rows that take turns with their products, each with its
 * softmax under its own and the others' products. What is different is what e4m3 products want (FlashAttention-3,
 * arXiv:2407.08608, 3.3):
 *
 *   V        wgmma has no MN-major operands of 8 bits, so V must lie as V^T: the two warps of the producer that have nothing else to do write it
 *            to scratch, once a run, ahead of those that read it.
 *   P        a thread's accumulator holds columns 2q, 2q + 1 of each 8, but an A operand wants 4 neighbours. P stays where it is and V^T's
 *            keys are in the order that makes it right: place 16u + 4q + e holds key 16u + 8 (e / 2) + 2q + e % 2.
 *   range    e4m3 reaches from 2^-9 to 448. P is 2^SHIFT = 256 where a row's score is its maximum m: exactly, so that the key that weighs most
 *            is not rounded. (With forward.cu's m, which stays behind by up to a limit, it would be, and errors of out reach 4.3e-2 where
 *            4e-2 is allowed.) The factor leaves with the division by l, which is the sum of P before it is rounded.
 *   sums     an e4m3 product keeps 14 bits of its sums: what is below 2^-13 of the sum so far is lost, and 8192 equal keys would stop
 *            counting. So every PROMOTED keys O is added, in float, to sums in shared memory, and begins anew at 0.
 *   scores   for the same reason a score is off by about 2^-13 of its largest product, and lse by 1e-4 where scores are around 1: more than
 *            lse may be (kernels/README.md, "Accuracy"), while out is well within its limit. Where lse is wanted, q and k are therefore
 *            widened to bfloat16, which holds them exactly, and only P V is a product of e4m3.
 *
 * V^T comes in units of KEYS keys x CHANNELS_V channels of a head. A warp that has time claims the next one from a
 * counter, transposes it and sets the unit's mark; what loads V^T waits for the marks of its keys. Units are
 * claimed in the order in which tiles of work want them. Nothing is promised to a block beforehand, for it may
 * begin late (another kernel may have its multiprocessor): a unit that is claimed is finished by a warp that waits
 * for nobody, and one that is not will be by the waiting block's own warps, so nobody waits for ever. The stores
 * are ordinary ones and the loads the copy engine's: a fence between the two proxies on either side, around the
 * mark's release and acquire. begin_run(), a kernel before, sets marks and counters to 0; all three kernels of a
 * run, and the first of the next, are made ready while the one before runs, and wait for its end.
 *
 * A NaN in V would reach, as 0 * NaN, rows that do not see it. V^T has zeros in its place, and the unit's mark says
 * so; the rows of tiles of work that touch such a unit, and those whose result is not finite, are looked at once
 * more by repair_rows, which computes what they really see. (float8_e4m3fn has no infinities.) It also computes
 * rows whose scores are so large that P would leave its range.
 *
 * What a row's bits depend on: BN, PROMOTED and the order of the tiles, all fixed by head dim, masks, Sk and
 * whether lse is wanted. */
#include "encode.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/simple/rows.cuh"
#include "tile.cuh"

namespace {

typedef __nv_bfloat16 bf16;

/* ---- Shapes ------------------------------------------------------------------------------------------------------ */

enum { SHIFT = 8, PROMOTED = 768 };

/* An instantiation: head dims up to D; C consumers of 64 rows; BN keys a tile; stages of the ring; the type that q
 * and k are multiplied in. */
template <int D_, int C_, int BN_, int STAGES_, typename T_ = e4m3> struct shape {
    typedef T_ T;
    static const int D = D_, C = C_, BN = BN_, STAGES = STAGES_, BM = 64 * C, THREADS = 128 * (C + 1);
    /* Chunks of 128 bytes, a row of shared memory: of a row of q or k; of the keys of a row of V^T. */
    static const int ROW_BYTES = D * (int)sizeof(T), CHUNKS = (ROW_BYTES + 127) / 128, CHUNKS_V = (BN + 127) / 128;
    static const int PRODUCER = C == 3 ? 32 : D == 256 ? 24 : 40, CONSUMER = C == 3 ? 160 : D == 256 ? 240 : 232;
    static const int PROMOTE = PROMOTED / BN;  /* tiles from one promotion to the next */
    static const int STEPS = D == 256 ? 8 : 1; /* in which a unit of V^T is made: what shared memory has room for */
    /* The sums of a thread are D / 2 numbers, floats where there is room for them and bfloat16 where there is not. */
    static const bool FLOAT_SUMS = D <= 128;
    static const int SUM_WORDS = FLOAT_SUMS ? 4 : 2; /* of 4 numbers */
};

/* A tile of work: rows [i0, i0 + BM) of head h of batch row b against tiles of keys [first, last). */
struct __align__(16) work
{
    int b, h, i0, first;
    int last, index, negative; /* scores are to change their sign */
    float c, v_scale, sink;    /* log2(e) * what scores are multiplied by, > 0; base 2, -inf without */
    int unused[2];
};

/* What one consumer makes of it. Tiles [free_first, free_last) are open to all its rows; those from mine on hold
 * nothing for them; mine is first where there are no such rows, or no tiles. */
struct __align__(16) part
{
    int free_first, free_last, mine, unused;
};

enum { STOP = -1 }; /* in i0: the end */

enum { FIRST_TURNER = 2, TURNERS = 2, KEYS = 128, CHANNELS_V = 64 }; /* warps that make V^T; a unit of it */
enum { THERE = 1, THERE_CLEANED = 3 }; /* a unit's mark; 0: not yet. Cleaned: with zeros for NaN */

/* A unit of V^T: places in V, in V^T and among the marks; how many keys and channels there are from its first on.
 * keys == 0: none is left. */
struct unit {
    int64_t from, to;
    int mark;
    uint32_t found; /* what the mark is to be */
    int keys, channels;
};

template <class X> struct shared {
    alignas(1024) uint8_t Q[X::C][64 * 128 * X::CHUNKS];
    alignas(1024) uint8_t K[X::STAGES][X::BN * 128 * X::CHUNKS];
    alignas(1024) uint8_t V[X::STAGES][X::D * 128 * X::CHUNKS_V];        /* rows are head dims, in a row are keys */
    alignas(128) uint32_t sums[X::C * 4][X::D / 8][32 * X::SUM_WORDS];   /* a warp's; in the end its 16 rows of out */
    alignas(128) uint8_t staging[TURNERS][KEYS * CHANNELS_V / X::STEPS]; /* of V */
    unit units[TURNERS][2]; /* a warp's, and its next: there are few registers */
    work next;
    part parts[X::C];
    alignas(8) uint64_t full_Q[X::C], empty_Q[X::C], full_K[X::STAGES], full_V[X::STAGES], empty_K[X::STAGES],
        empty_V[X::STAGES];
    uint64_t full_W, empty_W;
};

/* ---- The plan: a problem in 32 bits ------------------------------------------------------------------------------ */

struct plan {
    int tiles;           /* all of them */
    int per_head, heads; /* tiles of rows of a head; heads of the batch */
    int section;         /* heads that are walked together, so that their K and V stay in L2 */
    int H, Hk, group, Sq, Sk, Dv;
    int left, right, align; /* row i sees keys [i + align - left, i + align + right] */
    float c;                /* log2(e) * scale */
    const float *scales[3]; /* of q, k and v, by batch row and key/value head; NULL: 1 */
    int64_t scale_batch[3], scale_head[3];
    const float *sinks;
    int64_t sink_stride;
    void *out;
    float *lse;
    int64_t out_batch, out_head, out_row, lse_batch, lse_head, lse_row;
    uint32_t *dirty; /* a word a warp and tile, for repair_rows: see there */
    int *counter;    /* next tile less gridDim.x */
    const uint8_t *V;
    int64_t V_batch, V_head, V_row, V_sweep; /* the last: the rows that a warp asks for at once */
    uint8_t *turned; /* V^T, dense [B, Hk, Dv, pitch], the keys of each 16 in the order that P has in registers */
    int64_t turned_head, pitch;
    uint32_t *marks; /* of its units, by head, block of keys, block of channels: is it there? With zeros for NaN? */
    int key_blocks, channel_blocks;
    int units, kv_heads;             /* of the batch */
    int unit_section, section_units; /* key/value heads that are turned together; their units */
    int *next_unit;
    uint32_t *any_nan; /* had any unit one? */
};

const int FAR = 1 << 29; /* lengths are below it */

DEVICE float scale_of(const plan &p, int n, const work &x)
{
    return p.scales[n] ? p.scales[n][x.b * p.scale_batch[n] + x.h / p.group * p.scale_head[n]] : 1;
}

/* Tile t, but for its factors: sections of heads; in each the last rows, which see most under a causal mask, first;
 * heads fastest. */
template <class X> DEVICE work work_of(const plan &p, int t)
{
    const int BM = X::BM, BN = X::BN;
    work x = {};
    x.index = t;
    const int in_section = p.section * p.per_head, s = t / in_section, r = t - s * in_section;
    const int heads = min(p.section, p.heads - s * p.section), rank = r / heads,
              head = s * p.section + r - rank * heads;
    x.b = head / p.H;
    x.h = head - x.b * p.H;
    x.i0 = (p.per_head - 1 - rank) * BM;
    const int end = min(x.i0 + BM, p.Sq), lo = max(min(x.i0 + p.align - p.left, p.Sk), 0);
    const int hi = max(min(end + p.align + p.right, p.Sk), lo);
    x.first = lo / BN;
    x.last = hi > lo ? (hi + BN - 1) / BN : x.first;
    return x;
}

DEVICE void add_factors(const plan &p, work &x)
{
    const float scale = scale_of(p, 0, x) * scale_of(p, 1, x);
    x.negative = scale < 0;
    x.c = fmaxf(p.c * fabsf(scale), 1e-30f); /* a scale of 0: all scores are equal, but -inf times 0 would be NaN */
    x.v_scale = scale_of(p, 2, x);
    x.sink = p.sinks ? sink_in_base_2(p.sinks[x.h * p.sink_stride]) : -CUDART_INF_F;
}

template <class X> DEVICE part part_of(const plan &p, const work &x, int w)
{
    const int BN = X::BN, row0 = x.i0 + w * 64, lo = p.align - p.left, hi = p.align + p.right + 1;
    const int end = max(min(row0 + 63 + hi, p.Sk), 1);
    part y;
    y.free_first = (max(row0 + 63 + lo, 0) + BN - 1) / BN;
    y.free_last = max(min(row0 + hi, p.Sk), 0) / BN;
    y.mine = row0 >= p.Sq || x.first >= x.last ? x.first : max(min((end + BN - 1) / BN, x.last), x.first + 1);
    y.unused = 0;
    return y;
}

/* ---- V to V^T ---------------------------------------------------------------------------------------------------- */

/* The bytes of a word that are NaN, all ones below the sign, become 0. */
DEVICE uint32_t without_nan(uint32_t word)
{
    const uint32_t nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
    return word & ~(nan | (nan - (nan >> 7)));
}

/* Unit n, in the order of work_of's tiles: sections of heads; in each the last keys first. */
DEVICE unit unit_of(const plan &p, int n)
{
    unit x = {};
    if (n >= p.units) return x;
    const int s = n / p.section_units, r = n - s * p.section_units;
    const int heads = min(p.unit_section, p.kv_heads - s * p.unit_section), line = r / p.channel_blocks,
              rank = line / heads;
    const int head = s * p.unit_section + line - rank * heads, b = head / p.Hk;
    const int block = p.key_blocks - 1 - rank, channels = r - line * p.channel_blocks, key0 = block * KEYS,
              channel0 = channels * CHANNELS_V;
    x.from = b * p.V_batch + (head - b * p.Hk) * p.V_head + key0 * p.V_row + channel0;
    x.to = head * p.turned_head + channel0 * p.pitch + key0;
    x.mark = (head * p.key_blocks + block) * p.channel_blocks + channels, x.found = THERE;
    x.keys = p.Sk - key0, x.channels = p.Dv - channel0;
    return x;
}

/* The calling warp's unit: its present one, or its next. */
template <class X> DEVICE unit &unit_at(shared<X> &sm, int which)
{
    return sm.units[thread_anew() / 32 - FIRST_TURNER][which];
}

/* What a step of a unit is: LINES keys of CELLS x 16 channels. A cell of 16 channels of a key lies in staging where
 * ldmatrix finds the 8 rows of a matrix, keys 16 i and 16 i + 1 from some on, in all banks. */
template <class X> struct turning {
    static const int LINES = X::STEPS == 1 ? KEYS : 64, CELLS = X::STEPS == 1 ? CHANNELS_V / 16 : 1, SWEEP = 32 / CELLS;
    static_assert(LINES * CELLS * 16 * X::STEPS == KEYS * CHANNELS_V, "all of the unit");
    static DEVICE int key_of(int step) { return X::STEPS == 1 ? 0 : step / 4 * LINES; }
    static DEVICE int channel_of(int step) { return X::STEPS == 1 ? 0 : step % 4 * 16; }
    static DEVICE uint32_t cell(uint32_t key, uint32_t n)
    {
        return 16 * ((key * CELLS + n) ^ (key / 16 % 4 * (CELLS == 1 ? 2 : 1)));
    }
};

/* A warp asks for V of a step; zeros past its end. */
template <class X> DEVICE void fetch_step(const plan &p, shared<X> &sm, int which, int step)
{
    typedef turning<X> T;
    const uint32_t thread = thread_anew(), lane = thread % 32;
    const int n = lane % T::CELLS, channel = T::channel_of(step) + n * 16;
    const unit &x = unit_at(sm, which);
    const uint32_t staging = smem_addr(sm.staging[thread / 32 - FIRST_TURNER]);
    const int keys = channel < x.channels ? x.keys - T::key_of(step) : 0; /* that there are */
    const uint8_t *from = p.V + x.from + (T::key_of(step) + lane / T::CELLS) * p.V_row + channel;
#pragma unroll(X::STEPS == 1 ? 4 : 1)
    for (int key = lane / T::CELLS; key < T::LINES; key += T::SWEEP, from += p.V_sweep)
        cp_async_16(staging + T::cell(key, n), from, key < keys);
    if (X::STEPS > 1 && step == 0) /* and for the other steps', as far as the L2 */
#pragma unroll 1
        for (int key = lane; key < min(x.keys, KEYS); key += 32) prefetch_L2(p.V + x.from + key * p.V_row);
}

/* A warp turns a step. Of 16 channels of 64 keys a lane gets, by matrices whose rows are chosen so, channels 2g and
 * 2g + 1 of keys 16 q to 16 q + 15, two keys a register: what it takes to make 16 neighbours of each of the two. */
template <class X> DEVICE void turn_step(const plan &p, shared<X> &sm, int which, int step)
{
    typedef turning<X> T;
    const uint32_t thread = thread_anew(), lane = thread % 32, row = lane % 8,
                   key = 16 * (row / 2) + 2 * (lane / 8) + row % 2;
    unit &x = unit_at(sm, which);
    const uint32_t staging = smem_addr(sm.staging[thread / 32 - FIRST_TURNER]);
    const int channels = x.channels - T::channel_of(step);
    uint8_t *to = p.turned + x.to + (T::channel_of(step) + lane / 4 * 2) * p.pitch + T::key_of(step) + lane % 4 * 16;
#pragma unroll 1
    for (int n = 0; n < T::CELLS && n * 16 < channels; n++, to += 16 * p.pitch)
#pragma unroll 1
        for (int first = 0; first < T::LINES; first += 64) {
            const uint32_t from = staging + T::cell(first + key, n);
            uint32_t v[4], w[4], sums = 0; /* v[m]: keys 2m and 2m + 1 of the lane's 16; w[m]: 8 further */
            ldmatrix_x4_trans(v, from);
            ldmatrix_x4_trans(w, from + 8 * T::CELLS * 16);
#pragma unroll
            for (int m = 0; m < 4; m++)
                sums |= ((v[m] & 0x7f7f7f7f) + 0x01010101) | ((w[m] & 0x7f7f7f7f) + 0x01010101); /* a NaN carries */
            if (__any_sync(0xffffffff, sums & 0x80808080)) {
                if (lane == 0) x.found = THERE_CLEANED;
                pin(v), pin(w); /* or eight sums would be kept for it */
#pragma unroll
                for (int m = 0; m < 4; m++) v[m] = without_nan(v[m]), w[m] = without_nan(w[m]);
            }
            *(uint4 *)(to + first) = make_uint4(__byte_perm(v[0], w[0], 0x6420), __byte_perm(v[1], w[1], 0x6420),
                                                __byte_perm(v[2], w[2], 0x6420), __byte_perm(v[3], w[3], 0x6420));
            *(uint4 *)(to + first +
                       p.pitch) = make_uint4(__byte_perm(v[0], w[0], 0x7531), __byte_perm(v[1], w[1], 0x7531),
                                             __byte_perm(v[2], w[2], 0x7531), __byte_perm(v[3], w[3], 0x7531));
        }
}

/* A warp tells that its stores of a unit are there. */
DEVICE void publish_unit(const plan &p, const unit &x)
{
    fence_proxy_async_global(); /* the lane's stores, for the copy engine */
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        if (x.found == THERE_CLEANED) *p.any_nan = 1;
        store_release(p.marks + x.mark, x.found);
    }
}

/* Waits until V^T of a key/value head's blocks of keys [wanted, ready) is there. Returns from which on it is known
 * to be. A warp asks, a lane a mark. */
DEVICE int await_units(const plan &p, int head, int wanted, int ready)
{
    while (ready > wanted) {
        const int below = ready * p.channel_blocks - 1 -
                          (int)(thread_anew() % 32); /* this lane's mark, of the head's */
        const bool missing = below >= 0 &&
                             load_acquire(p.marks + (head * p.key_blocks * p.channel_blocks + below)) == 0;
        const uint32_t any = __ballot_sync(0xffffffff, missing);
        ready -= (uint32_t)(any ? __ffs(any) - 1 : 32) / (uint32_t)p.channel_blocks;
    }
    __syncwarp();               /* what one lane has acquired is there for all */
    fence_proxy_async_global(); /* and for the copy engine */
    return ready;
}

/* Had V of a tile's keys a NaN? */
template <class X> DEVICE bool is_tainted(const plan &p, const work &x)
{
    const uint32_t *const marks = p.marks + (int64_t)(x.b * p.Hk + x.h / p.group) * p.key_blocks * p.channel_blocks;
    const int first = x.first * X::BN / KEYS, last = min((x.last * X::BN + KEYS - 1) / KEYS, p.key_blocks);
    bool tainted = false;
#pragma unroll 1
    for (int n = first * p.channel_blocks; n < last * p.channel_blocks; n++) tainted |= marks[n] == THERE_CLEANED;
    return tainted;
}

/* ---- Consumer's steps -------------------------------------------------------------------------------------------- */

/* S = Q K^T for 64 rows and a tile of keys. */
template <class X> DEVICE void scores(float (&S)[X::BN / 2], uint64_t Q, uint64_t K)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < X::ROW_BYTES / 32; k++)
        wgmma<typename X::T, X::BN>::ss(S, Q + step<64>(k), K + step<X::BN>(k), k > 0);
    wgmma_commit();
}

/* O += P V for 64 rows. */
template <class X> DEVICE void accumulate(float (&O)[X::D / 2], const uint32_t (&P)[X::BN / 32][4], uint64_t V)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < X::BN / 32; k++) wgmma<e4m3, X::D>::rs(O, P[k], V + step<X::D>(k), 1);
    wgmma_commit();
}

/* Maximum of the raw scores so far and this lane's part of the sum, for the thread's two rows. */
struct softmax {
    float m[2], l[2];
};

/* log2 of what a row's exponentials are divided by. */
DEVICE float base_of(float m, float c)
{
    return __fsub_rn(__fmul_rn(m, c), SHIFT); /* rounded alike everywhere */
}

/* S becomes P; rescale gets the factors of O: exactly 1 where the maximum stays.
 * Two chains a row, even and odd columns, for the pipeline's sake. */
template <int N> DEVICE void softmax_step(float (&S)[N / 2], softmax &x, float (&rescale)[2], float c)
{
    float top[4] = { S[0], S[1], S[2], S[3] }, base[2], sum[4] = { 0, 0, 0, 0 };
#pragma unroll
    for (int n = 1; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) top[e] = fmaxf(top[e], S[n * 4 + e]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m = fmaxf(x.m[half], fmaxf(top[half * 2], top[half * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
        base[half] = m == -CUDART_INF_F ? 0 : base_of(m, c); /* nothing seen yet: -inf - -inf would be NaN */
        rescale[half] = exp2_fast(__fsub_rn(base_of(x.m[half], c), base[half]));
        x.m[half] = m;
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float &s = S[n * 4 + e];
            s = exp2_fast(fmaf(s, c, -base[e / 2]));
            sum[e] += s;
        }
#pragma unroll
    for (int half = 0; half < 2; half++) x.l[half] = x.l[half] * rescale[half] + (sum[half * 2] + sum[half * 2 + 1]);
}

DEVICE float low_bf16(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}
DEVICE float high_bf16(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000);
}

/* O joins the warp's sums, of which `kept` is what is left after the rescaling since the last time, and begins anew. */
template <class X>
DEVICE void promote(float (&O)[X::D / 2], uint32_t (*sums)[32 * X::SUM_WORDS], float (&kept)[2], bool first, int lane)
{
#pragma unroll
    for (int n = 0; n < X::D / 8; n++) {
        float *const o = O + n * 4;
        if constexpr (X::FLOAT_SUMS) {
            float4 &at = ((float4 *)sums[n])[lane];
            const float4 x = first ? make_float4(0, 0, 0, 0) : at;
            at = make_float4(fmaf(x.x, kept[0], o[0]), fmaf(x.y, kept[0], o[1]), fmaf(x.z, kept[1], o[2]),
                             fmaf(x.w, kept[1], o[3]));
        } else {
            uint2 &at = ((uint2 *)sums[n])[lane];
            const uint2 x = first ? make_uint2(0, 0) : at;
            at = make_uint2(
                pack<__nv_bfloat16>(fmaf(low_bf16(x.x), kept[0], o[0]), fmaf(high_bf16(x.x), kept[0], o[1])),
                pack<__nv_bfloat16>(fmaf(low_bf16(x.y), kept[1], o[2]), fmaf(high_bf16(x.y), kept[1], o[3])));
        }
#pragma unroll
        for (int e = 0; e < 4; e++) o[e] = 0;
    }
    kept[0] = kept[1] = 1;
}

/* The sums join O. */
template <class X>
DEVICE void add_sums(float (&O)[X::D / 2], const uint32_t (*sums)[32 * X::SUM_WORDS], const float (&kept)[2], int lane)
{
#pragma unroll
    for (int n = 0; n < X::D / 8; n++) {
        float x[4];
        if constexpr (X::FLOAT_SUMS) {
            *(float4 *)x = ((const float4 *)sums[n])[lane];
        } else {
            const uint2 pairs = ((const uint2 *)sums[n])[lane];
            x[0] = low_bf16(pairs.x), x[1] = high_bf16(pairs.x), x[2] = low_bf16(pairs.y), x[3] = high_bf16(pairs.y);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) O[n * 4 + e] = fmaf(x[e], kept[e / 2], O[n * 4 + e]);
    }
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

enum { TURN_BARRIER = 2, GROUP_BARRIER = 6 }; /* named barriers, one a consumer from each on */
enum { LOOK = 4 };                            /* a bit of dirty */
const float BASE_MOST = 1 << 23;              /* beyond it m c is rounded so much that P may pass 448 */

template <class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    forward_tiles(const __grid_constant__ plan p, const __grid_constant__ CUtensorMap map_Q,
                  const __grid_constant__ CUtensorMap map_K, const __grid_constant__ CUtensorMap map_V)
{
    const int D = X::D, BN = X::BN, STAGES = X::STAGES, C = X::C;
    static_assert(sizeof(shared<X>) <= 227 << 10, "what a block may have");
    extern __shared__ __align__(1024) char memory[];
    shared<X> &sm = *reinterpret_cast<shared<X> *>(memory);
    const int wg = warpgroup_index();

    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_Q);
        prefetch_tensormap(&map_K);
        prefetch_tensormap(&map_V);
        for (int w = 0; w < C; w++) {
            mbarrier_init(smem_addr(&sm.full_Q[w]), 1);
            mbarrier_init(smem_addr(&sm.empty_Q[w]), 1);
        }
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(smem_addr(&sm.full_K[s]), 1);
            mbarrier_init(smem_addr(&sm.full_V[s]), 1);
            mbarrier_init(smem_addr(&sm.empty_K[s]), C);
            mbarrier_init(smem_addr(&sm.empty_V[s]), C);
        }
        mbarrier_init(smem_addr(&sm.full_W), 1);
        mbarrier_init(smem_addr(&sm.empty_W), C * 4 + 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    launch_dependents();      /* repair_rows may be made ready: it waits for our end */
    wait_for_prerequisites(); /* begin_run's zeros */

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        const int role = threadIdx.x / 32;
        if (role == 0) { /* keeps the ring full: lane 0 loads, all look whether V^T is there */
            const bool loader = threadIdx.x == 0;
            ring<STAGES> k, v;
            uint32_t phase_W = 0, phase_Q = 1;
            for (;; phase_W ^= 1) {
                mbarrier_wait(smem_addr(&sm.full_W), phase_W);
                const work &x = sm.next;
                const int first = x.first, last = x.last, i0 = x.i0, h = x.h, hk = h / p.group, b = x.b;
                __syncwarp(); /* all have read it */
                if (i0 == STOP) break;
                /* The next work is claimed when all but the last tiles are asked for. */
                const bool late = first + 1 < last;
                if (loader && !late) mbarrier_arrive(smem_addr(&sm.empty_W));
                if (first >= last) continue;
                int ready = min((last * BN + KEYS - 1) / KEYS,
                                p.key_blocks); /* V^T is known to be there from this block of keys on */
                auto load_K = [&](int j) {
                    if (loader) {
                        const uint32_t bar = smem_addr(&sm.full_K[k.stage]);
                        mbarrier_wait(smem_addr(&sm.empty_K[k.stage]), k.phase ^ 1);
                        mbarrier_arrive_expect_tx(bar, sizeof sm.K[0]);
                        for (int c = 0; c < X::CHUNKS; c++)
                            tma_load_4d(smem_addr(sm.K[k.stage]) + c * BN * 128, &map_K, c * 128, j * BN, hk, b, bar);
                    }
                    k.next();
                };
                auto load_V = [&](int j) {
                    if (j * BN / KEYS < ready) ready = await_units(p, b * p.Hk + hk, j * BN / KEYS, ready);
                    if (loader) {
                        const uint32_t bar = smem_addr(&sm.full_V[v.stage]);
                        mbarrier_wait(smem_addr(&sm.empty_V[v.stage]), v.phase ^ 1);
                        mbarrier_arrive_expect_tx(bar, sizeof sm.V[0]);
                        for (int c = 0; c < X::CHUNKS_V; c++)
                            tma_load_4d(smem_addr(sm.V[v.stage]) + c * D * 128, &map_V, j * BN + c * 128, 0, hk, b,
                                        bar);
                    }
                    v.next();
                };
                load_K(last - 1);
                if (loader)
#pragma unroll 1
                    for (int n = 0; n < C; n++) {
                        const uint32_t bar = smem_addr(&sm.full_Q[n]);
                        mbarrier_wait(smem_addr(&sm.empty_Q[n]), phase_Q);
                        mbarrier_arrive_expect_tx(bar, sizeof sm.Q[0]);
                        for (int c = 0; c < X::CHUNKS; c++)
                            tma_load_4d(smem_addr(sm.Q[n]) + c * 8192, &map_Q, c * 128, i0 + n * 64, h, b, bar);
                    }
                phase_Q ^= 1;
#pragma unroll 1
                for (int j = last - 2; j >= first; j--) {
                    if (loader && late && j == first) mbarrier_arrive(smem_addr(&sm.empty_W));
                    load_K(j);
                    load_V(j + 1);
                }
                load_V(first);
            }
        } else if (role == 1) { /* hands out work; lane 0 tells */
            const bool teller = threadIdx.x == 32;
            uint32_t phase = 0;
            for (int t = blockIdx.x; t < p.tiles; phase ^= 1) {
                if (teller) {
                    sm.next = work_of<X>(p, t);
                    add_factors(p, sm.next);
#pragma unroll 1
                    for (int n = 0; n < C; n++) sm.parts[n] = part_of<X>(p, sm.next, n);
                    mbarrier_arrive(smem_addr(&sm.full_W));
                }
                mbarrier_wait(smem_addr(&sm.empty_W), phase);
                __syncwarp(); /* nobody may fall a phase behind */
                if (teller) t = (int)gridDim.x + atomicAdd(p.counter, 1);
                t = __shfl_sync(0xffffffff, t, 0);
            }
            if (teller) {
                sm.next.i0 = STOP;
                mbarrier_arrive(smem_addr(&sm.full_W));
            }
        } else {                                        /* turn V as long as there is any left */
            const bool claimer = threadIdx.x % 32 == 0; /* describes units to its warp */
            if (claimer) unit_at(sm, 0) = unit_of(p, claim(p.next_unit));
            __syncwarp();
            if (unit_at(sm, 0).keys) fetch_step(p, sm, 0, 0);
            for (int n = 0; unit_at(sm, n).keys; n ^= 1) {
                const int claimed = claimer ? claim(p.next_unit) : 0; /* known by the time it is wanted */
#pragma unroll 1
                for (int step = 0; step < X::STEPS; step++) {
                    cp_async_wait_all();
                    __syncwarp();
                    turn_step(p, sm, n, step);
                    __syncwarp(); /* all have read it */
                    if (step + 1 < X::STEPS) fetch_step(p, sm, n, step + 1);
                }
                if (claimer) unit_at(sm, n ^ 1) = unit_of(p, claimed);
                __syncwarp();
                if (unit_at(sm, n ^ 1).keys) fetch_step(p, sm, n ^ 1, 0); /* on its way while the stores arrive */
                publish_unit(p, unit_at(sm, n));
            }
        }
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        const int w = wg - 1, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        const bool leader = threadIdx.x % 128 == 0;
        const uint64_t Q = operand(smem_addr(sm.Q[w]));
        auto *const sums = sm.sums[w * 4 + warp];
        ring<STAGES> k, v;
        uint32_t phase_W = 0, phase_Q = 0;
        auto release = [&](uint64_t &bar) {
            if (leader) mbarrier_arrive(smem_addr(&bar));
        };
        auto await_turn = [&] { named_barrier_sync(TURN_BARRIER + w, 256); };
        auto next_turn = [&] { named_barrier_arrive(TURN_BARRIER + (w + 1 == C ? 0 : w + 1), 256); };
        /* Stages that no product reads. A warp that still waited could miss the phase once the stage is filled anew. */
        auto pass_stage = [&](uint64_t *full, uint64_t *empty, ring<STAGES> &at) {
            mbarrier_wait(smem_addr(full + at.stage), at.phase);
            named_barrier_sync(GROUP_BARRIER + w, 128);
            release(empty[at.stage]);
            at.next();
        };
        auto pass_K = [&] {
            await_turn();
            next_turn();
            pass_stage(sm.full_K, sm.empty_K, k);
        };
        auto pass_V = [&] { pass_stage(sm.full_V, sm.empty_V, v); };
        if (w == C - 1) next_turn(); /* the first is consumer 0's */

        for (;; phase_W ^= 1) {
            mbarrier_wait(smem_addr(&sm.full_W), phase_W);
            const work x = sm.next;
            const part y = sm.parts[w];
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_addr(&sm.empty_W));
            if (x.i0 == STOP) break;

            const int row0 = x.i0 + w * 64, i0 = row0 + warp * 16 + lane / 4;
            const int lo = p.align - p.left, hi = p.align + p.right + 1;
            float O[D / 2], rescale[2], kept[2] = { 1, 1 };
            bool promoted = false;
            softmax state = { { -CUDART_INF_F, -CUDART_INF_F }, { 0, 0 } };
#pragma unroll
            for (int i = 0; i < D / 2; i++) O[i] = 0;

            if (x.first < y.mine) {
                float S[BN / 2];
                uint32_t P[BN / 32][4];
                auto await_V = [&] { mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase); };
                auto softmax_of = [&](int j) {
                    if (x.negative)
#pragma unroll
                        for (int i = 0; i < BN / 2; i++) S[i] = -S[i];
                    if (j < y.free_first || j >= y.free_last) mask<BN>(S, lo, hi, p.Sk, i0, j * BN, lane);
                    softmax_step<BN>(S, state, rescale, x.c);
                };

                mbarrier_wait(smem_addr(&sm.full_Q[w]), phase_Q);
                phase_Q ^= 1;
                for (int j = x.last - 1; j >= y.mine; j--) pass_K(); /* not for these rows */
                mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                await_turn();
                scores<X>(S, Q, operand(smem_addr(sm.K[k.stage])));
                next_turn();
                wgmma_wait<0>();
                pin(S);
                release(sm.empty_K[k.stage]);
                if (y.mine - 1 == x.first) release(sm.empty_Q[w]);
                k.next();
                softmax_of(y.mine - 1);
                to_operand_8<BN>(P, S);
                for (int j = x.last - 1; j >= y.mine; j--) pass_V();

                for (int j = y.mine - 2; j >= x.first; j--) {
                    mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                    await_turn();
                    scores<X>(S, Q, operand(smem_addr(sm.K[k.stage])));
                    await_V();
                    accumulate<X>(O, P, operand(smem_addr(sm.V[v.stage])));
                    next_turn();
                    wgmma_wait<1>();
                    pin(S);
                    release(sm.empty_K[k.stage]);
                    if (j == x.first) release(sm.empty_Q[w]);
                    k.next();
                    softmax_of(j);
                    compute_before_wait(state.l[0] + state.l[1]);
                    wgmma_wait<0>();
                    pin(O);
                    release(sm.empty_V[v.stage]);
                    v.next();
                    to_operand_8<BN>(P, S);
                    if ((j + 1) % X::PROMOTE == 0) {
                        promote<X>(O, sums, kept, !promoted, lane);
                        promoted = true;
                    }
                    if (__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
                        for (int i = 0; i < D / 2; i++) O[i] *= rescale[i / 2 % 2];
                        kept[0] *= rescale[0], kept[1] *= rescale[1];
                    }
                }
                await_V();
                accumulate<X>(O, P, operand(smem_addr(sm.V[v.stage])));
                wgmma_wait<0>();
                pin(O);
                release(sm.empty_V[v.stage]);
                v.next();
                if (promoted) add_sums<X>(O, sums, kept, lane);
            } else if (x.first < x.last) { /* none of these rows exists */
                mbarrier_wait(smem_addr(&sm.full_Q[w]), phase_Q);
                phase_Q ^= 1;
                named_barrier_sync(GROUP_BARRIER + w, 128);
                release(sm.empty_Q[w]);
#pragma unroll 1
                for (int j = x.last - 1; j >= x.first; j--) {
                    pass_K();
                    if (j < x.last - 1) pass_V();
                }
                pass_V();
            }

            /* out = O / l, lse = ln of 2^base l; the sink joins the denominator here. */
            bool finite = true, huge[2];
            float factor[2], top[2];
#pragma unroll
            for (int distance = 1; distance <= 2; distance++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    state.l[half] += __shfl_xor_sync(0xffffffff, state.l[half], distance);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &l = state.l[half], keep = 1;
                top[half] = base_of(state.m[half], x.c); /* c > 0: -inf stays */
                huge[half] = top[half] != -CUDART_INF_F && !(fabsf(top[half]) < BASE_MOST);
                if (x.sink != -CUDART_INF_F) {
                    const float both = fmaxf(top[half], x.sink);
                    keep = exp2_fast(top[half] - both);
                    l = l * keep + exp2_fast(x.sink - both);
                    top[half] = both;
                }
                factor[half] = l == 0 ? 0 : __fdividef(keep, l) * x.v_scale;
                finite &= l - l == 0;
            }
            if (lane % 4 == 0 && p.lse) {
                float *const lse = p.lse + x.b * p.lse_batch + x.h * p.lse_head + i0 * p.lse_row;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (i0 + half * 8 < p.Sq)
                        lse[half * 8 * p.lse_row] = state.l[half] == 0 ? -CUDART_INF_F
                                                                       : (top[half] + __log2f(state.l[half])) * LN2;
            }
            float zero[4] = { 0, 0, 0, 0 }; /* or NaN; four chains for the pipeline's sake */
#pragma unroll
            for (int i = 0; i < D / 2; i++) {
                O[i] *= factor[i / 2 % 2];
                zero[i % 4] = fmaf(O[i], 0, zero[i % 4]);
            }
            finite &= zero[0] + zero[1] + zero[2] + zero[3] == 0;
            const bool any = __any_sync(0xffffffff, !finite);
            const uint32_t huge_rows = (__ballot_sync(0xffffffff, huge[0]) & 0x11111111) |
                                       (__ballot_sync(0xffffffff, huge[1]) & 0x11111111) << 1;
            if (lane == 0) p.dirty[x.index * (4 * C) + w * 4 + warp] = huge_rows | (any ? LOOK : 0);
            if (p.out) {
                bf16 *const rows = (bf16 *)p.out + x.b * p.out_batch + x.h * p.out_head +
                                   (row0 + warp * 16) * p.out_row;
                __syncwarp(); /* the warp's sums are read */
                store_rows<bf16, D>(rows, p.out_row, p.Sq - row0 - warp * 16, p.Dv, O, (uint16_t *)sums, lane);
                __syncwarp();
            }
        }
        if (w == 0) await_turn(); /* so that no arrival is left over */
    }
}

/* Rows that forward_tiles cannot compute, one by one. A word a warp of 16 rows: bit 4 i is row i's, bit 4 i + 1 row
 * i + 8's: its scores are huge; LOOK: there was a NaN, and rows that see one are to be found, as in tiles of work
 * whose V had one. */
template <class X>
__global__ void __launch_bounds__(128) repair_rows(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    const int WARPS = X::BM / 16, flags = p.tiles * WARPS;
    launch_dependents(); /* the next run may be made ready: it waits for our end */
    wait_for_prerequisites();
    const bool any_nan = *p.any_nan;
    for (int base = (blockIdx.x * 4 + threadIdx.x / 32) * 32; base < flags; base += gridDim.x * 128) {
        const int mine = base + threadIdx.x % 32;
        const bool tainted = any_nan && mine < flags && is_tainted<X>(p, work_of<X>(p, mine / WARPS));
        const unsigned look = __ballot_sync(0xffffffff, tainted || (mine < flags && p.dirty[mine] & LOOK));
        unsigned set = __ballot_sync(0xffffffff, tainted || (mine < flags && p.dirty[mine]));
        for (; set; set &= set - 1) {
            const int bit = __ffs(set) - 1, n = base + bit;
            const uint32_t word = p.dirty[n];
            const work w = work_of<X>(p, n / WARPS);
            const head_args x = head_args_of(a, w.b, w.h);
            for (int r = 0; r < 16; r++) {
                const int i = w.i0 + n % WARPS * 16 + r;
                const bool huge = word >> (r % 8 * 4 + r / 8) & 1;
                if (i < p.Sq && (huge || look >> bit & 1)) forward_row(a, x, i, a.g.view[ATTN_T_out], nullptr, !huge);
            }
        }
    }
}

/* ---- Before it --------------------------------------------------------------------------------------------------- */

/* Sets the counters and marks to 0: 16 bytes a thread. */
__global__ void __launch_bounds__(256) begin_run(uint4 *words, int64_t count)
{
    launch_dependents();      /* forward_tiles may be made ready: it waits for our end */
    wait_for_prerequisites(); /* the run before may have the same scratch */
    const int64_t n = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (n < count) words[n] = make_uint4(0, 0, 0, 0);
}

/* q or k as bfloat16, which holds all values of float8_e4m3fn: a view [B, H, rows, D] to dense [B, rows, H, D]. 16
 * numbers a thread. */
__global__ void __launch_bounds__(256)
    widen(const __grid_constant__ attn_view from, uint16_t *to, int64_t B, int H, int64_t rows, int D)
{
    const int pieces = D / 16;
    for (int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x; at < B * rows * H * pieces;
         at += gridDim.x * (int64_t)256) {
        const int64_t line = at / pieces, b = line / (rows * H), r = line - b * (rows * H);
        const uint4 narrow = *(const uint4 *)((const uint8_t *)from.data + attn_at(&from, b, r % H, r / H) +
                                              (at - line * pieces) * 16);
        const uint8_t *const x = (const uint8_t *)&narrow;
        uint32_t y[8];
#pragma unroll
        for (int n = 0; n < 8; n++) y[n] = widen_e4m3(x[2 * n], x[2 * n + 1]);
        ((uint4 *)to)[at * 2] = make_uint4(y[0], y[1], y[2], y[3]);
        ((uint4 *)to)[at * 2 + 1] = make_uint4(y[4], y[5], y[6], y[7]);
    }
}

/* ---- Launcher ---------------------------------------------------------------------------------------------------- */

/* A matrix of bytes a head, as a map wants it: strides in bytes. */
struct matrix {
    const void *data;
    int64_t B, H, rows, columns, batch, head, row;
};

/* A map over [B, H, rows, columns], in boxes of 128 columns. Axes of size 1 may have stride 0, which a map may not. */
bool map_of(CUtensorMap *map, const matrix &m, int box_rows)
{
    const tensor_map_encoder encode = encoder();
    if (!encode) return false;
    const uint64_t dims[4] = { (uint64_t)m.columns, (uint64_t)m.rows, (uint64_t)m.H, (uint64_t)m.B };
    const uint64_t strides[3] = { (uint64_t)(m.row ? m.row : m.columns), (uint64_t)(m.head ? m.head : m.columns),
                                  (uint64_t)(m.batch ? m.batch : m.columns) };
    const uint32_t box[4] = { 128, (uint32_t)box_rows, 1, 1 }, ones[4] = { 1, 1, 1, 1 };
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)m.data, dims, strides, box, ones,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Can TMA walk it, and 16-byte accesses? `unit`: elements of 16 bytes. */
bool walkable(const attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t columns, int unit)
{
    if ((view.batch == 0 && B > 1) || (view.head == 0 && H > 1) || (view.row == 0 && rows > 1))
        return false; /* broadcast */
    return (uint64_t)view.data % 16 == 0 && columns % unit == 0 && view.row % unit == 0 && view.head % unit == 0 &&
           view.batch % unit == 0;
}

const int64_t L2_SHARE = 32 << 20; /* of the 50 or 60 MB, for K and V */
const int LEAST_BM = 128;

/* Scratch begins with the counters. */
struct counters {
    int tile, unit; /* see plan */
    uint32_t any_nan;
    int unused[29];
};

/* And goes on with the marks; a word a warp and tile; V^T; q and k as bfloat16. */
struct layout {
    int64_t dirty, V, wide[2], bytes; /* where they begin */
};

int64_t units_of(const attn_dims &d)
{
    return d.B * d.Hk * attn_tiles(d.Sk, KEYS) * attn_tiles(d.Dv, CHANNELS_V);
}

layout layout_of(const attn_dims &d, bool wide)
{
    const auto lines = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    layout x;
    x.dirty = sizeof(counters) + lines(units_of(d) * (int64_t)sizeof(uint32_t));
    x.V = x.dirty + lines(d.B * d.H * attn_tiles(d.Sq, LEAST_BM) * 12 * (int64_t)sizeof(uint32_t));
    x.wide[0] = x.V + d.B * d.Hk * d.Dv * attn_tiles(d.Sk, KEYS) * KEYS;
    x.wide[1] = x.wide[0] + (wide ? lines(d.B * d.Sq * d.H * d.D * 2) : 0);
    x.bytes = x.wide[1] + (wide ? lines(d.B * d.Sk * d.Hk * d.D * 2) : 0);
    return x;
}

/* A run: its plan, but for what depends on the shape. */
struct job_of_run {
    const cuda_chip *chip;
    cudaStream_t stream;
    cuda_args given;
    char *memory;
    layout place;
};

template <class X> cudaError_t launch(const job_of_run &job)
{
    const attn_geometry &g = job.given.g;
    const attn_dims &d = g.dims;
    const attn_view &q = g.view[ATTN_T_q], &k = g.view[ATTN_T_k], &v = g.view[ATTN_T_v];
    const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse], &sinks = g.view[ATTN_T_sinks];
    const int64_t key_blocks = attn_tiles(d.Sk, KEYS), pitch = key_blocks * KEYS;
    matrix Q = { q.data, d.B, d.H, d.Sq, d.D, q.batch, q.head, q.row },
           K = { k.data, d.B, d.Hk, d.Sk, d.D, k.batch, k.head, k.row };
    const matrix V = { job.memory + job.place.V, d.B, d.Hk, d.Dv, pitch, d.Hk * d.Dv * pitch, d.Dv * pitch, pitch };
    if (sizeof(typename X::T) == 2) {
        const auto widened = [&](const attn_view &view, matrix &m, int n) {
            const int64_t blocks = attn_tiles(m.B * m.rows * m.H * (d.D / 16), 256);
            uint16_t *const to = (uint16_t *)(job.memory + job.place.wide[n]);
            widen<<<(unsigned)attn_min64(blocks, job.chip->multiprocessors * 16), 256, 0, job.stream>>>(
                view, to, m.B, (int)m.H, m.rows, (int)d.D);
            m.data = to;
            m.columns = m.head = d.D * 2, m.row = m.H * m.head, m.batch = m.rows * m.row;
            return cudaPeekAtLastError();
        };
        cudaError_t code = widened(q, Q, 0);
        if (code == cudaSuccess) code = widened(k, K, 1);
        if (code != cudaSuccess) return code;
    }
    CUtensorMap map_Q, map_K, map_V;
    if (!map_of(&map_Q, Q, 64) || !map_of(&map_K, K, X::BN) || !map_of(&map_V, V, X::D)) return cudaErrorInvalidValue;
    cudaError_t code = allow_shared<forward_tiles<X>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;

    plan p;
    p.per_head = (int)attn_tiles(d.Sq, X::BM);
    p.heads = (int)(d.B * d.H);
    p.tiles = p.per_head * p.heads;
    /* Under a mask, tiles differ in length: long ones first, over as many heads as L2 holds. Else head after head. */
    const bool uneven = g.right < d.Sk || g.left < d.Sq;
    p.section = 1;
    if (uneven) {
        const int64_t head_bytes = d.Sk * (Q.columns + d.Dv) / g.group;
        while (p.section < p.heads && p.section * 2 * head_bytes <= L2_SHARE) p.section *= 2;
    }
    p.H = (int)d.H, p.Hk = (int)d.Hk, p.group = (int)g.group, p.Sq = (int)d.Sq, p.Sk = (int)d.Sk, p.Dv = (int)d.Dv;
    p.left = (int)attn_min64(g.left, FAR), p.right = (int)attn_min64(g.right, FAR);
    p.align = g.top_left ? 0 : p.Sk - p.Sq;
    p.c = (float)g.scale * LOG2E;
    static const attn_tensor_id scales[3] = { ATTN_T_q_scale, ATTN_T_k_scale, ATTN_T_v_scale };
    for (int n = 0; n < 3; n++) {
        const attn_view &view = g.view[scales[n]];
        p.scales[n] = (const float *)view.data, p.scale_batch[n] = view.batch, p.scale_head[n] = view.head;
    }
    p.sinks = (const float *)sinks.data, p.sink_stride = sinks.head;
    p.out = out.data, p.lse = (float *)lse.data;
    p.out_batch = out.batch, p.out_head = out.head, p.out_row = out.row;
    p.lse_batch = lse.batch, p.lse_head = lse.head, p.lse_row = lse.row;
    counters *const count = (counters *)job.memory;
    p.dirty = (uint32_t *)(job.memory + job.place.dirty);
    p.counter = &count->tile;
    p.V = (const uint8_t *)v.data, p.V_batch = v.batch, p.V_head = v.head, p.V_row = v.row,
    p.V_sweep = turning<X>::SWEEP * v.row;
    p.turned = (uint8_t *)V.data, p.turned_head = V.head, p.pitch = pitch;
    p.marks = (uint32_t *)(count + 1);
    p.key_blocks = (int)key_blocks, p.channel_blocks = (int)attn_tiles(d.Dv, CHANNELS_V);
    p.units = (int)units_of(d), p.kv_heads = (int)(d.B * d.Hk);
    p.unit_section = (int)attn_min64(p.section, job.chip->multiprocessors) /
                     p.group; /* the heads whose tiles are first */
    if (p.unit_section == 0) p.unit_section = 1;
    p.section_units = p.unit_section * p.key_blocks * p.channel_blocks;
    p.next_unit = &count->unit, p.any_nan = &count->any_nan;

    cudaLaunchAttribute overlap; /* a kernel is made ready while the one before it runs, and waits itself */
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.stream = job.stream;
    config.attrs = &overlap;
    config.numAttrs = 1;

    const int64_t words = job.place.dirty / (int64_t)sizeof(uint4);
    config.gridDim = dim3((unsigned)attn_tiles(words, 256));
    config.blockDim = dim3(256);
    code = cudaLaunchKernelEx(&config, begin_run, (uint4 *)job.memory, words);
    if (code != cudaSuccess) return code;
    /* Blocks without a tile of work turn V for those that have one. */
    config.gridDim = dim3(
        (unsigned)attn_min64(p.tiles > p.units / 2 ? p.tiles : (p.units + 1) / 2, job.chip->multiprocessors));
    config.blockDim = dim3(X::THREADS);
    config.dynamicSmemBytes = sizeof(shared<X>);
    code = cudaLaunchKernelEx(&config, forward_tiles<X>, p, map_Q, map_K, map_V);
    if (code != cudaSuccess) return code;
    config.gridDim = dim3((unsigned)job.chip->multiprocessors);
    config.blockDim = dim3(128);
    config.dynamicSmemBytes = 0;
    return cudaLaunchKernelEx(&config, repair_rows<X>, job.given, p);
}

/* The shapes. A problem takes the first that is wide enough and meant for as many keys, with q and k widened where
 * lse is wanted. */
struct shape_row {
    int D;
    bool wide;
    int least_Sk;
    cudaError_t (*launch)(const job_of_run &);
};
/* clang-format off: a row is a line */
const shape_row shapes[] = {
    { 64, false, 4096, launch<shape<64, 3, 160, 3>> },   { 64, false, 0, launch<shape<64, 3, 128, 4>> },
    { 64, true, 0, launch<shape<64, 3, 128, 4, bf16>> }, { 128, false, 2048, launch<shape<128, 3, 96, 3>> },
    { 128, false, 0, launch<shape<128, 2, 128, 3>> },    { 128, true, 0, launch<shape<128, 2, 128, 2, bf16>> },
    { 256, false, 0, launch<shape<256, 2, 128, 2>> },
};
/* clang-format on */

/* NULL: none. */
const shape_row *shape_of(const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    for (const shape_row &x : shapes)
        if (x.D >= d.D && x.D >= d.Dv && x.wide == (p->lse.rank != 0) && d.Sk >= x.least_Sk) return &x;
    return nullptr;
}

bool plan_forward(const cuda_chip *, attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const shape_row *const x = shape_of(p);
    if (!x || d.Sq <= 0 || d.Sk <= 0 || d.B <= 0 || d.H <= 0 || d.Sq >= FAR || d.Sk >= FAR) return false;
    if (d.B * d.H * attn_tiles(d.Sq, LEAST_BM) * 12 >= INT32_MAX)
        return false; /* tiles are counted in 32 bits, and units of V^T */
    if (units_of(d) >= INT32_MAX) return false;
    if (p->out.rank && !walkable(g.view[ATTN_T_out], d.B, d.H, d.Sq, d.Dv, 8)) return false;
    plan->form = x;
    plan->workspace_bytes = (size_t)layout_of(d, x->wide).bytes;
    return walkable(g.view[ATTN_T_q], d.B, d.H, d.Sq, d.D, 16) &&
           walkable(g.view[ATTN_T_k], d.B, d.Hk, d.Sk, d.D, 16) &&
           walkable(g.view[ATTN_T_v], d.B, d.Hk, d.Sk, d.Dv, 16);
}

cudaError_t launch_forward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const shape_row *const x = (const shape_row *)plan->form;
    job_of_run job;
    job.chip = chip, job.stream = stream, job.memory = (char *)memory;
    job.given = cuda_args_of(plan);
    job.place = layout_of(job.given.g.dims, x->wide);
    return x->launch(job);
}

} // namespace

extern const cuda_kernel sm90_f8_forward = {
    { "sm90_f8", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F8E4M3), ATTN_MAX_HEAD_DIM,
      BASIC_FEATURES | ATTN_TENSOR_BIT(q_scale) | ATTN_TENSOR_BIT(k_scale) | ATTN_TENSOR_BIT(v_scale) },
    90,
    90,
    plan_forward,
    launch_forward,
};
