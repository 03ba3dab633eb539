/* f8_forward.cu: flash attention forward of float8_e4m3fn for Hopper, with products of e4m3.
 *
 * forward.cu's shape: one block a multiprocessor, tiles of work handed out by a warp, a thread that lets the copy engine fill a ring of K and V
 * tiles, C consumers of 64 rows that take turns with their products, each with its softmax under its own and the others' products. What is
 * different is what e4m3 products want (FlashAttention-3, arXiv:2407.08608, 3.3):
 *
 *   V        wgmma has no MN-major operands of 8 bits, so V must lie as V^T: prepare() writes it to scratch, once a run.
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
 * A NaN in V would reach, as 0 * NaN, rows that do not see it. prepare() writes zeros in its place and leaves a mark for its block of keys; the
 * rows of tiles of work that touch a marked block, and those whose result is not finite, are looked at once more by repair_rows, which
 * computes what they really see. (float8_e4m3fn has no infinities.) It also computes rows whose scores are so large that P would leave its range.
 *
 * Shapes that turn V themselves (TURNS) need no prepare(): two warps of the producer transpose each tile as it comes, for every tile of rows
 * anew. That saves reading and writing V once, which counts where Sq is short, and costs shared memory's time, which counts where it is long.
 *
 * What a row's bits depend on: BN, PROMOTED and the order of the tiles, all fixed by head dim, masks, Sk and whether lse is wanted. */
#include <cudaTypedefs.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/simple/rows.cuh"
#include "ptx.cuh"

namespace {

/* ---- Shapes ------------------------------------------------------------------------------------------------------------------------ */

enum { SHIFT = 8, PROMOTED = 768 };

/* An instantiation: head dims up to D; C consumers of 64 rows; BN keys a tile; stages of the ring; the type that q and k are multiplied in; TURNS:
 * tiles of V are transposed as they come, not once beforehand. */
template <int D_, int C_, int BN_, int STAGES_, typename T_ = e4m3, bool TURNS_ = false> struct shape {
    typedef T_ T;
    static const bool TURNS = TURNS_;
    static const int D = D_, C = C_, BN = BN_, STAGES = STAGES_, BM = 64 * C, THREADS = 128 * (C + 1);
    /* Chunks of 128 bytes, a row of shared memory: of a row of q or k; of the keys of a row of V^T. */
    static const int ROW_BYTES = D * (int)sizeof(T), CHUNKS = (ROW_BYTES + 127) / 128, CHUNKS_V = (BN + 127) / 128;
    static const int PRODUCER = C == 3 ? 32 : D == 256 ? 24 : 40, CONSUMER = C == 3 ? 160 : D == 256 ? 240 : 232;
    static const int PROMOTE = PROMOTED / BN; /* tiles from one promotion to the next */
    /* The sums of a thread are D / 2 numbers, floats where there is room for them and bfloat16 where there is not. */
    static const bool FLOAT_SUMS = D <= 128;
    static const int SUM_WORDS = FLOAT_SUMS ? 4 : 2; /* of 4 numbers */
};

/* A tile of work: rows [i0, i0 + BM) of head h of batch row b against tiles of keys [first, last). */
struct __align__(16) work {
    int b, h, i0, first;
    int last, index, tainted, negative; /* some V that it reads had a NaN; scores are to change their sign */
    float c, v_scale, sink;             /* log2(e) * what scores are multiplied by, > 0; base 2, -inf without */
    int unused;
};

/* What one consumer makes of it. Tiles [free_first, free_last) are open to all its rows; those from mine on hold nothing for them. */
struct __align__(16) part {
    int free_first, free_last, mine, unused;
};

enum { STOP = -1 }; /* in i0: the end */

/* What shapes that transpose V themselves have beside: V as it is, and of each tile of V^T and each warp that made it: were there NaN? */
enum { TURNERS = 2, RAW_STAGES = 2 }; /* warps; of the ring of V */
template <class X, bool TURNS = X::TURNS> struct turning {
};
template <class X> struct turning<X, true> {
    static const int CHUNKS = (X::D + 127) / 128; /* of a row of V */
    alignas(1024) uint8_t raw[RAW_STAGES][X::BN * 128 * CHUNKS];
    uint32_t nan[X::STAGES][TURNERS];
    uint64_t full_R[RAW_STAGES], empty_R[RAW_STAGES];
};

template <class X> struct shared : turning<X> {
    alignas(1024) uint8_t Q[X::C][64 * 128 * X::CHUNKS];
    alignas(1024) uint8_t K[X::STAGES][X::BN * 128 * X::CHUNKS];
    alignas(1024) uint8_t V[X::STAGES][X::D * 128 * X::CHUNKS_V]; /* rows are head dims, in a row are keys */
    alignas(128) uint32_t sums[X::C * 4][X::D / 8][32 * X::SUM_WORDS]; /* a warp's; in the end its 16 rows of out */
    work next;
    part parts[X::C];
    alignas(8) uint64_t full_Q[X::C], empty_Q[X::C], full_K[X::STAGES], full_V[X::STAGES], empty_K[X::STAGES], empty_V[X::STAGES];
    uint64_t full_W, empty_W;
};

/* Place in a ring: stage and phase. */
template <int STAGES> struct ring {
    int stage = 0;
    uint32_t phase = 0;
    DEVICE void next()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

/* ---- The plan: a problem in 32 bits -------------------------------------------------------------------------------------------- */

struct plan {
    int tiles;               /* all of them */
    int per_head, heads;     /* tiles of rows of a head; heads of the batch */
    int section;             /* heads that are walked together, so that their K and V stay in L2 */
    int H, Hk, group, Sq, Sk, Dv;
    int left, right, align;  /* row i sees keys [i + align - left, i + align + right] */
    float c;                 /* log2(e) * scale */
    const float *scales[3];  /* of q, k and v, by batch row and key/value head; NULL: 1 */
    int64_t scale_batch[3], scale_head[3];
    const float *sinks;
    int64_t sink_stride;
    void *out;
    float *lse;
    int64_t out_batch, out_head, out_row, lse_batch, lse_head, lse_row;
    uint32_t *dirty;         /* a word a warp and tile, for repair_rows: see there */
    const uint8_t *marks;    /* of V: a byte a block of KEYS keys and CHANNELS_V channels, channels fastest: had it a NaN? NULL with TURNS */
    int key_blocks, channel_blocks;
    int *counter;            /* next tile less gridDim.x; NULL: a block takes every gridDim.x-th */
};

const int FAR = 1 << 29; /* lengths are below it */

enum { KEYS = 128, CHANNELS_V = 64 }; /* of V, a block of prepare */

DEVICE float scale_of(const plan &p, int n, const work &x)
{
    return p.scales[n] ? p.scales[n][x.b * p.scale_batch[n] + x.h / p.group * p.scale_head[n]] : 1;
}

/* Tile t, but for its factors: sections of heads; in each the last rows, which see most under a causal mask, first; heads fastest. */
template <class X> DEVICE work work_of(const plan &p, int t)
{
    const int BM = X::BM, BN = X::BN;
    work x = {};
    x.index = t;
    const int in_section = p.section * p.per_head, s = t / in_section, r = t - s * in_section;
    const int heads = min(p.section, p.heads - s * p.section), rank = r / heads, head = s * p.section + r - rank * heads;
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
    x.sink = p.sinks ? p.sinks[x.h * p.sink_stride] * LOG2E : -CUDART_INF_F;
}

/* Is there a mark on V of a tile's keys? A warp asks. */
template <class X> DEVICE bool is_tainted(const plan &p, const work &x)
{
    if (X::TURNS) return false; /* it will be seen when V is transposed */
    const uint8_t *const marks = p.marks + (int64_t)(x.b * p.Hk + x.h / p.group) * p.key_blocks * p.channel_blocks;
    const int first = x.first * X::BN / KEYS, last = min((x.last * X::BN + KEYS - 1) / KEYS, p.key_blocks);
    bool tainted = false;
#pragma unroll 1
    for (int n = first * p.channel_blocks + threadIdx.x % 32; n < last * p.channel_blocks; n += 32) tainted |= marks[n];
    return __any_sync(0xffffffff, tainted);
}

template <class X> DEVICE part part_of(const plan &p, const work &x, int w)
{
    const int BN = X::BN, row0 = x.i0 + w * 64, lo = p.align - p.left, hi = p.align + p.right + 1;
    const int end = max(min(row0 + 63 + hi, p.Sk), 1);
    part y;
    y.free_first = (max(row0 + 63 + lo, 0) + BN - 1) / BN;
    y.free_last = max(min(row0 + hi, p.Sk), 0) / BN;
    y.mine = max(min((end + BN - 1) / BN, x.last), x.first + 1);
    y.unused = 0;
    return y;
}

/* ---- V to V^T --------------------------------------------------------------------------------------------------------------------- */

/* The bytes of a word that are NaN become 0; were there any? */
DEVICE bool without_nan(uint32_t &word)
{
    const uint32_t nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080; /* a NaN is all ones below the sign */
    word &= ~(nan | (nan - (nan >> 7)));
    return nan != 0;
}

/* A tile of V to the same of V^T: a warp's share, the blocks of 16 channels first, first + TURNERS ... A block's even channels become rows 0 to 7
 * of 16 and its odd ones rows 8 to 15, so that 8 lanes write to all banks; store_rows puts them right. Was there a NaN? */
template <class X> DEVICE bool turn_tile(uint32_t to, uint32_t from, int first)
{
    const int lane = threadIdx.x % 32, t = lane / 8, r = lane % 8;
    bool nan = false;
    for (int d = first; d < X::D / 16; d += TURNERS)
#pragma unroll 2
        for (int k = 0; k < X::BN / 32; k++) { /* 16 channels of 32 keys */
            uint32_t v[4]; /* of 8 keys: bytes are channels 2g and 2g + 1 of key 2q, then of key 2q + 1 */
            ldmatrix_x4_trans(v, from + d / 8 * X::BN * 128 + (32 * k + lane) * 128 + ((d % 8 ^ r) << 4));
            uint32_t marks = 0; /* a NaN is all ones below the sign: 1 more is a carry */
#pragma unroll
            for (int n = 0; n < 4; n++) marks |= (v[n] & 0x7f7f7f7f) + 0x01010101;
            if (__any_sync(0xffffffff, marks & 0x80808080)) {
                nan = true;
                for (int n = 0; n < 4; n++) without_nan(v[n]);
            }
            const uint32_t turned[4] = { __byte_perm(v[0], v[1], 0x6420), __byte_perm(v[0], v[1], 0x7531), __byte_perm(v[2], v[3], 0x6420),
                                         __byte_perm(v[2], v[3], 0x7531) };
            const int row = 16 * d + t % 2 * 8 + r, piece = 2 * k + t / 2;
            stmatrix_x4(to + piece / 8 * X::D * 128 + row * 128 + ((piece % 8 ^ r) << 4), turned);
        }
    return nan;
}

/* ---- Consumer's steps --------------------------------------------------------------------------------------------------------- */

/* Descriptor of an operand, K-major: rows of 128 bytes. Step k of 32 bytes is further by step<ROWS>(k), ROWS rows a chunk. */
DEVICE uint64_t operand(uint32_t address) { return wgmma_descriptor(address, 16, 1024); }
template <int ROWS> DEVICE uint32_t step(int k) { return (k / 4 * ROWS * 128 + k % 4 * 32) >> 4; }

/* S = Q K^T for 64 rows and a tile of keys. */
template <class X> DEVICE void scores(float (&S)[X::BN / 2], uint64_t Q, uint64_t K)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < X::ROW_BYTES / 32; k++) wgmma<typename X::T, X::BN>::ss(S, Q + step<64>(k), K + step<X::BN>(k), k > 0);
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

/* -inf where the thread's rows i0 (registers 0 1 4 5 ...) and i0 + 8 do not see keys j0 .. ; row i sees [i + lo, min(i + hi, Sk)). */
template <int N> DEVICE void mask(float (&S)[N / 2], int lo_limit, int hi_limit, int Sk, int i0, int j0, int lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = i0 + half * 8, column = j0 + lane % 4 * 2;
        const int lo = i + lo_limit - column, hi = min(i + hi_limit, Sk) - column;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e < lo || n * 8 + e >= hi) S[n * 4 + half * 2 + e] = -CUDART_INF_F;
    }
}

/* Maximum of the raw scores so far and this lane's part of the sum, for the thread's two rows. */
struct softmax {
    float m[2], l[2];
};

/* log2 of what a row's exponentials are divided by. */
DEVICE float base_of(float m, float c) { return __fsub_rn(__fmul_rn(m, c), SHIFT); /* rounded alike everywhere */ }

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

/* P as the product's operand: of each 32 keys, 4 registers of 4. The order of V^T's keys is prepare's. */
template <int N> DEVICE void to_operand(uint32_t (&P)[N / 32][4], const float (&S)[N / 2])
{
#pragma unroll
    for (int k = 0; k < N / 32; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float *const s = S + k * 16 + r / 2 * 8 + r % 2 * 2;
            P[k][r] = pack_e4m3(s[0], s[1], s[4], s[5]);
        }
}

DEVICE float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }

/* O joins the warp's sums, of which `kept` is what is left after the rescaling since the last time, and begins anew. */
template <class X> DEVICE void promote(float (&O)[X::D / 2], uint32_t (*sums)[32 * X::SUM_WORDS], float (&kept)[2], bool first, int lane)
{
#pragma unroll
    for (int n = 0; n < X::D / 8; n++) {
        float *const o = O + n * 4;
        if constexpr (X::FLOAT_SUMS) {
            float4 &at = ((float4 *)sums[n])[lane];
            const float4 x = first ? make_float4(0, 0, 0, 0) : at;
            at = make_float4(fmaf(x.x, kept[0], o[0]), fmaf(x.y, kept[0], o[1]), fmaf(x.z, kept[1], o[2]), fmaf(x.w, kept[1], o[3]));
        } else {
            uint2 &at = ((uint2 *)sums[n])[lane];
            const uint2 x = first ? make_uint2(0, 0) : at;
            at = make_uint2(pack<__nv_bfloat16>(fmaf(low_bf16(x.x), kept[0], o[0]), fmaf(high_bf16(x.x), kept[0], o[1])),
                            pack<__nv_bfloat16>(fmaf(low_bf16(x.y), kept[1], o[2]), fmaf(high_bf16(x.y), kept[1], o[3])));
        }
#pragma unroll
        for (int e = 0; e < 4; e++) o[e] = 0;
    }
    kept[0] = kept[1] = 1;
}

/* The sums join O. */
template <class X> DEVICE void add_sums(float (&O)[X::D / 2], const uint32_t (*sums)[32 * X::SUM_WORDS], const float (&kept)[2], int lane)
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

/* A warp's 16 rows of O to memory, through shared memory of its own, whole rows at a time. The 16-byte piece c of row r lies at c ^ (r & 7).
 * TURNED: the accumulator's columns are turn_tile's rows. */
template <int D, bool TURNED>
DEVICE void store_rows(uint16_t *rows, int64_t stride, int count, int Dv, const float (&O)[D / 2], uint16_t *staging, int lane)
{
    const int PIECES = D / 8; /* of a row */
    __syncwarp();             /* the warp's sums are read */
    if (TURNED) {
#pragma unroll
        for (int n = 0; n < D / 16; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) { /* the lane has 4 neighbours of a row */
                const float *const even = O + n * 8 + half * 2, *const odd = even + 4;
                const int i = lane / 4 + half * 8, piece = 2 * n + lane % 4 / 2;
                const uint2 word = make_uint2(pack<__nv_bfloat16>(even[0], odd[0]), pack<__nv_bfloat16>(even[1], odd[1]));
                *(uint2 *)(staging + (i * PIECES + (piece ^ (i & 7))) * 8 + lane % 2 * 4) = word;
            }
    } else {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) r[e] = pack<__nv_bfloat16>(O[n * 8 + e * 2], O[n * 8 + e * 2 + 1]);
            const int i = lane % 16, piece = 2 * n + lane / 16;
            stmatrix_x4(smem_addr(staging + (i * PIECES + (piece ^ (i & 7))) * 8), r);
        }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        const int at = n * 32 + lane, i = at / PIECES, piece = at % PIECES;
        const uint4 word = *(const uint4 *)(staging + (i * PIECES + (piece ^ (i & 7))) * 8);
        if (i < count && piece * 8 < Dv) *(uint4 *)(rows + i * stride + piece * 8) = word;
    }
    __syncwarp();
}

/* ---- The kernel ------------------------------------------------------------------------------------------------------------------- */

enum { TURN_BARRIER = 2, GROUP_BARRIER = 6 }; /* named barriers, one a consumer from each on */
enum { LOOK = 4 };                            /* a bit of dirty */
const float BASE_MOST = 1 << 23;              /* beyond it m c is rounded so much that P may pass 448 */

template <class X>
__global__ void __launch_bounds__(X::THREADS, 1) forward_tiles(const __grid_constant__ plan p, const __grid_constant__ CUtensorMap map_Q,
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
            mbarrier_init(smem_addr(&sm.full_V[s]), X::TURNS ? TURNERS : 1);
            mbarrier_init(smem_addr(&sm.empty_K[s]), C);
            mbarrier_init(smem_addr(&sm.empty_V[s]), C);
        }
        mbarrier_init(smem_addr(&sm.full_W), 1);
        mbarrier_init(smem_addr(&sm.empty_W), C * 4 + 1 + (X::TURNS ? TURNERS : 0));
        if constexpr (X::TURNS)
            for (int s = 0; s < RAW_STAGES; s++) {
                mbarrier_init(smem_addr(&sm.full_R[s]), 1);
                mbarrier_init(smem_addr(&sm.empty_R[s]), TURNERS);
            }
        fence_mbarrier_init();
    }
    __syncthreads();
    launch_dependents();      /* repair_rows may be made ready: it waits for our end */
    wait_for_prerequisites(); /* prepare's results */

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x / 32 == 1) { /* a warp hands out work; lane 0 tells */
            const bool teller = threadIdx.x == 32;
            uint32_t phase = 0;
            for (int t = blockIdx.x; t < p.tiles; phase ^= 1) {
                const work x = work_of<X>(p, t);
                const bool tainted = is_tainted<X>(p, x);
                if (teller) {
                    sm.next = x;
                    sm.next.tainted = tainted;
                    add_factors(p, sm.next);
#pragma unroll 1
                    for (int n = 0; n < C; n++) sm.parts[n] = part_of<X>(p, sm.next, n);
                    mbarrier_arrive(smem_addr(&sm.full_W));
                }
                mbarrier_wait(smem_addr(&sm.empty_W), phase);
                __syncwarp(); /* nobody may fall a phase behind */
                if (teller) t = (int)gridDim.x + (p.counter ? atomicAdd(p.counter, 1) : sm.next.index); /* t itself is not kept: few registers */
                t = __shfl_sync(0xffffffff, t, 0);
            }
            if (teller) {
                sm.next.i0 = STOP;
                mbarrier_arrive(smem_addr(&sm.full_W));
            }
        } else if (threadIdx.x == 0) { /* keeps the ring full */
            ring<STAGES> k;
            ring<X::TURNS ? (int)RAW_STAGES : STAGES> v; /* of what is loaded: V^T, or V */
            uint32_t phase_W = 0, phase_Q = 1;
            for (;; phase_W ^= 1) {
                mbarrier_wait(smem_addr(&sm.full_W), phase_W);
                const work &x = sm.next;
                const int first = x.first, last = x.last, i0 = x.i0, h = x.h, hk = h / p.group, b = x.b;
                if (i0 == STOP) break;
                /* The next work is claimed when all but the last tiles are asked for; known beforehand, at once. */
                const bool late = p.counter && first + 1 < last;
                if (!late) mbarrier_arrive(smem_addr(&sm.empty_W));
                if (first >= last) continue;
                auto load_K = [&](int j) {
                    const uint32_t bar = smem_addr(&sm.full_K[k.stage]);
                    mbarrier_wait(smem_addr(&sm.empty_K[k.stage]), k.phase ^ 1);
                    mbarrier_arrive_expect_tx(bar, sizeof sm.K[0]);
                    for (int c = 0; c < X::CHUNKS; c++) tma_load_4d(smem_addr(sm.K[k.stage]) + c * BN * 128, &map_K, c * 128, j * BN, hk, b, bar);
                    k.next();
                };
                auto load_V = [&](int j) {
                    if constexpr (X::TURNS) {
                        const uint32_t bar = smem_addr(&sm.full_R[v.stage]);
                        mbarrier_wait(smem_addr(&sm.empty_R[v.stage]), v.phase ^ 1);
                        mbarrier_arrive_expect_tx(bar, sizeof sm.raw[0]);
                        for (int c = 0; c < turning<X>::CHUNKS; c++)
                            tma_load_4d(smem_addr(sm.raw[v.stage]) + c * BN * 128, &map_V, c * 128, j * BN, hk, b, bar);
                    } else {
                        const uint32_t bar = smem_addr(&sm.full_V[v.stage]);
                        mbarrier_wait(smem_addr(&sm.empty_V[v.stage]), v.phase ^ 1);
                        mbarrier_arrive_expect_tx(bar, sizeof sm.V[0]);
                        for (int c = 0; c < X::CHUNKS_V; c++)
                            tma_load_4d(smem_addr(sm.V[v.stage]) + c * D * 128, &map_V, j * BN + c * 128, 0, hk, b, bar);
                    }
                    v.next();
                };
                load_K(last - 1);
                for (int n = 0; n < C; n++) {
                    const uint32_t bar = smem_addr(&sm.full_Q[n]);
                    mbarrier_wait(smem_addr(&sm.empty_Q[n]), phase_Q);
                    mbarrier_arrive_expect_tx(bar, sizeof sm.Q[0]);
                    for (int c = 0; c < X::CHUNKS; c++) tma_load_4d(smem_addr(sm.Q[n]) + c * 8192, &map_Q, c * 128, i0 + n * 64, h, b, bar);
                }
                phase_Q ^= 1;
#pragma unroll 1
                for (int j = last - 2; j >= first; j--) {
                    if (late && j == first) mbarrier_arrive(smem_addr(&sm.empty_W));
                    load_K(j);
                    load_V(j + 1);
                }
                load_V(first);
            }
        } else if (X::TURNS && threadIdx.x / 32 >= 2) { /* transpose V */
            if constexpr (X::TURNS) {
                const int turner = threadIdx.x / 32 - 2;
                const bool speaker = threadIdx.x % 32 == 0;
                ring<RAW_STAGES> raw;
                ring<STAGES> v;
                for (uint32_t phase_W = 0;; phase_W ^= 1) {
                    mbarrier_wait(smem_addr(&sm.full_W), phase_W);
                    int left = sm.next.last - sm.next.first;
                    const bool stop = sm.next.i0 == STOP;
                    __syncwarp();
                    if (speaker) mbarrier_arrive(smem_addr(&sm.empty_W));
                    if (stop) break;
#pragma unroll 1
                    for (; left > 0; left--) {
                        mbarrier_wait(smem_addr(&sm.full_R[raw.stage]), raw.phase);
                        mbarrier_wait(smem_addr(&sm.empty_V[v.stage]), v.phase ^ 1);
                        const bool nan = turn_tile<X>(smem_addr(sm.V[v.stage]), smem_addr(sm.raw[raw.stage]), turner);
                        fence_proxy_async_shared();
                        __syncwarp();
                        if (speaker) {
                            sm.nan[v.stage][turner] = nan;
                            mbarrier_arrive(smem_addr(&sm.full_V[v.stage]));
                            mbarrier_arrive(smem_addr(&sm.empty_R[raw.stage]));
                        }
                        raw.next();
                        v.next();
                    }
                }
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
        auto await_turn = [&] {
            named_barrier_sync(TURN_BARRIER + w, 256);
        };
        auto next_turn = [&] {
            named_barrier_arrive(TURN_BARRIER + (w + 1 == C ? 0 : w + 1), 256);
        };
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
            bool promoted = false, tainted = x.tainted;
            softmax state = { { -CUDART_INF_F, -CUDART_INF_F }, { 0, 0 } };
#pragma unroll
            for (int i = 0; i < D / 2; i++) O[i] = 0;

            if (x.first < x.last) {
                float S[BN / 2];
                uint32_t P[BN / 32][4];
                auto await_V = [&] {
                    mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                    if constexpr (X::TURNS)
                        for (int n = 0; n < TURNERS; n++) tainted |= sm.nan[v.stage][n];
                };
                auto softmax_of = [&](int j) {
                    if (x.negative)
#pragma unroll
                        for (int i = 0; i < BN / 2; i++) S[i] = -S[i];
                    if (j < y.free_first || j >= y.free_last) mask<BN>(S, lo, hi, p.Sk, i0, j * BN, lane);
                    softmax_step<BN>(S, state, rescale, x.c);
                };

                mbarrier_wait(smem_addr(&sm.full_Q[w]), phase_Q);
                phase_Q ^= 1;
                for (int j = x.last - 1; j >= y.mine; j--) { /* not for these rows */
                    await_turn();
                    next_turn();
                    mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                    named_barrier_sync(GROUP_BARRIER + w, 128); /* a warp that still waited could miss the phase once the stage is filled anew */
                    release(sm.empty_K[k.stage]);
                    k.next();
                }
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
                to_operand<BN>(P, S);
                for (int j = x.last - 1; j >= y.mine; j--) {
                    await_V();
                    named_barrier_sync(GROUP_BARRIER + w, 128);
                    release(sm.empty_V[v.stage]);
                    v.next();
                }

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
                    to_operand<BN>(P, S);
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
            }

            /* out = O / l, lse = ln of 2^base l; the sink joins the denominator here. */
            bool finite = true, huge[2];
            float factor[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &l = state.l[half];
                l += __shfl_xor_sync(0xffffffff, l, 1);
                l += __shfl_xor_sync(0xffffffff, l, 2);
                float top = base_of(state.m[half], x.c), keep = 1; /* c > 0: -inf stays */
                huge[half] = top != -CUDART_INF_F && !(fabsf(top) < BASE_MOST);
                if (x.sink != -CUDART_INF_F) {
                    const float both = fmaxf(top, x.sink);
                    keep = exp2_fast(top - both);
                    l = l * keep + exp2_fast(x.sink - both);
                    top = both;
                }
                factor[half] = l == 0 ? 0 : __fdividef(keep, l) * x.v_scale;
                finite &= l - l == 0;
                const int i = i0 + half * 8;
                if (lane % 4 == 0 && i < p.Sq && p.lse)
                    p.lse[x.b * p.lse_batch + x.h * p.lse_head + i * p.lse_row] = l == 0 ? -CUDART_INF_F : (top + __log2f(l)) * LN2;
            }
            float zero[4] = { 0, 0, 0, 0 }; /* or NaN; four chains for the pipeline's sake */
#pragma unroll
            for (int i = 0; i < D / 2; i++) {
                O[i] *= factor[i / 2 % 2];
                zero[i % 4] = fmaf(O[i], 0, zero[i % 4]);
            }
            finite &= zero[0] + zero[1] + zero[2] + zero[3] == 0;
            const bool any = __any_sync(0xffffffff, !finite);
            const uint32_t huge_rows = (__ballot_sync(0xffffffff, huge[0]) & 0x11111111) | (__ballot_sync(0xffffffff, huge[1]) & 0x11111111) << 1;
            if (lane == 0) p.dirty[x.index * (4 * C) + w * 4 + warp] = huge_rows | (any || tainted ? LOOK : 0);
            if (p.out) {
                uint16_t *const rows = (uint16_t *)p.out + x.b * p.out_batch + x.h * p.out_head + (row0 + warp * 16) * p.out_row;
                store_rows<D, X::TURNS>(rows, p.out_row, p.Sq - row0 - warp * 16, p.Dv, O, (uint16_t *)sums, lane);
            }
        }
        if (w == 0) await_turn(); /* so that no arrival is left over */
    }
}

/* Rows that forward_tiles cannot compute, one by one. A word a warp of 16 rows: bit 4 i is row i's, bit 4 i + 1 row i + 8's: its scores are
 * huge; LOOK: there was a NaN, and rows that see one are to be found. */
template <class X> __global__ void __launch_bounds__(128) repair_rows(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    const int WARPS = X::BM / 16, flags = p.tiles * WARPS;
    wait_for_prerequisites();
    for (int base = (blockIdx.x * 4 + threadIdx.x / 32) * 32; base < flags; base += gridDim.x * 128) {
        const int mine = base + threadIdx.x % 32;
        unsigned set = __ballot_sync(0xffffffff, mine < flags && p.dirty[mine]);
        for (; set; set &= set - 1) {
            const int n = base + __ffs(set) - 1;
            const uint32_t word = p.dirty[n];
            const work w = work_of<X>(p, n / WARPS);
            const head_args x = head_args_of(a, w.b, w.h);
            for (int r = 0; r < 16; r++) {
                const int i = w.i0 + n % WARPS * 16 + r;
                const bool huge = word >> (r % 8 * 4 + r / 8) & 1;
                if (i < p.Sq && (huge || word & LOOK)) forward_row(a, x, i, a.g.view[ATTN_T_out], nullptr, !huge);
            }
        }
    }
}

/* ---- Before it ------------------------------------------------------------------------------------------------------------------- */

/* V^T, dense [B, Hk, Dv, pitch], the keys of each 16 in the order that P has in registers; a block turns KEYS x CHANNELS_V. Keys past the end
 * are zeros. Block 0 sets the counter of tiles to 0. */
__global__ void __launch_bounds__(128) prepare(const __grid_constant__ attn_view from, uint8_t *to, uint8_t *marks, int *counter, int Hk, int Sk,
                                               int Dv, int pitch)
{
    const int GROUP = 16 * 16 + 4; /* words of 16 keys x 64 channels, and 4 that spread the groups over the banks */
    __shared__ alignas(16) uint32_t keys[KEYS / 16 * GROUP];
    const int channel_blocks = (Dv + CHANNELS_V - 1) / CHANNELS_V, key_blocks = pitch / KEYS, line = blockIdx.x / channel_blocks;
    const int channel0 = blockIdx.x % channel_blocks * CHANNELS_V, key0 = line % key_blocks * KEYS, head = line / key_blocks;
    const uint8_t *const source = (const uint8_t *)from.data + attn_at(&from, head / Hk, head % Hk, 0);
    bool tainted = false;
    launch_dependents(); /* forward_tiles may be made ready: it waits for our end */
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
#pragma unroll
    for (int n = 0; n < 4; n++) { /* 16 channels of a key */
        const int key = n * 32 + threadIdx.x / 4, piece = threadIdx.x % 4, channel = channel0 + piece * 16;
        uint4 word = make_uint4(0, 0, 0, 0);
        if (key0 + key < Sk && channel < Dv) word = *(const uint4 *)(source + (key0 + key) * from.row + channel);
        tainted |= without_nan(word.x) | without_nan(word.y) | without_nan(word.z) | without_nan(word.w);
        *(uint4 *)(keys + key / 16 * GROUP + key % 16 * 16 + piece * 4) = word;
    }
    const bool any = __syncthreads_or(tainted);
    if (threadIdx.x == 0) marks[blockIdx.x] = any;

    /* A thread turns 16 keys x 4 channels. */
    const int u = threadIdx.x % 8, d = threadIdx.x / 8;
    uint32_t turned[4][4]; /* [channel][quarter of the 16 places] */
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const uint32_t *const at = keys + u * GROUP + d;
        const uint32_t a = at[(2 * q) * 16], b = at[(2 * q + 1) * 16], c = at[(2 * q + 8) * 16], e = at[(2 * q + 9) * 16];
        const uint32_t ab0 = __byte_perm(a, b, 0x5140), ab2 = __byte_perm(a, b, 0x7362); /* channels 0 0 1 1, and 2 2 3 3 */
        const uint32_t ce0 = __byte_perm(c, e, 0x5140), ce2 = __byte_perm(c, e, 0x7362);
        turned[0][q] = __byte_perm(ab0, ce0, 0x5410), turned[1][q] = __byte_perm(ab0, ce0, 0x7632);
        turned[2][q] = __byte_perm(ab2, ce2, 0x5410), turned[3][q] = __byte_perm(ab2, ce2, 0x7632);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int channel = channel0 + d * 4 + n;
        const uint4 word = make_uint4(turned[n][0], turned[n][1], turned[n][2], turned[n][3]);
        if (channel < Dv) *(uint4 *)(to + ((int64_t)head * Dv + channel) * pitch + key0 + u * 16) = word;
    }
}

/* q or k as bfloat16, which holds all values of float8_e4m3fn: a view [B, H, rows, D] to dense [B, rows, H, D]. 16 numbers a thread. */
__global__ void __launch_bounds__(256) widen(const __grid_constant__ attn_view from, uint16_t *to, int64_t B, int H, int64_t rows, int D)
{
    const int pieces = D / 16;
    for (int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x; at < B * rows * H * pieces; at += gridDim.x * (int64_t)256) {
        const int64_t line = at / pieces, b = line / (rows * H), r = line - b * (rows * H);
        const uint4 narrow = *(const uint4 *)((const uint8_t *)from.data + attn_at(&from, b, r % H, r / H) + (at - line * pieces) * 16);
        const uint8_t *const x = (const uint8_t *)&narrow;
        uint32_t y[8];
#pragma unroll
        for (int n = 0; n < 8; n++) y[n] = widen_e4m3(x[2 * n], x[2 * n + 1]);
        ((uint4 *)to)[at * 2] = make_uint4(y[0], y[1], y[2], y[3]);
        ((uint4 *)to)[at * 2 + 1] = make_uint4(y[4], y[5], y[6], y[7]);
    }
}

/* ---- Launcher --------------------------------------------------------------------------------------------------------------------- */

/* A matrix of bytes a head, as a map wants it: strides in bytes. */
struct matrix {
    const void *data;
    int64_t B, H, rows, columns, batch, head, row;
};

/* A map over [B, H, rows, columns], in boxes of 128 columns. Axes of size 1 may have stride 0, which a map may not. */
bool map_of(CUtensorMap *map, const matrix &m, int box_rows)
{
    static PFN_cuTensorMapEncodeTiled_v12000 encode;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        void **const to = (void **)&encode;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", to, 12000, cudaEnableDefault, &found) != cudaSuccess) return false;
    }
    const uint64_t dims[4] = { (uint64_t)m.columns, (uint64_t)m.rows, (uint64_t)m.H, (uint64_t)m.B };
    const uint64_t strides[3] = { (uint64_t)(m.row ? m.row : m.columns), (uint64_t)(m.head ? m.head : m.columns),
                                  (uint64_t)(m.batch ? m.batch : m.columns) };
    const uint32_t box[4] = { 128, (uint32_t)box_rows, 1, 1 }, ones[4] = { 1, 1, 1, 1 };
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)m.data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Can TMA walk it, and 16-byte accesses? `unit`: elements of 16 bytes. */
bool walkable(const attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t columns, int unit)
{
    if ((view.batch == 0 && B > 1) || (view.head == 0 && H > 1) || (view.row == 0 && rows > 1)) return false; /* broadcast */
    return (uint64_t)view.data % 16 == 0 && columns % unit == 0 && view.row % unit == 0 && view.head % unit == 0 && view.batch % unit == 0;
}

const int64_t L2_SHARE = 32 << 20; /* of the 50 or 60 MB, for K and V */
const int LEAST_BM = 128, HEADER = 128; /* bytes before the flags: the counter */

/* Scratch: the counter; a word a warp and tile; V's marks; V^T; q and k as bfloat16. */
struct layout {
    int64_t marks, V, wide[2], bytes; /* where they begin */
};

int64_t pitch_of(const attn_dims &d) { return attn_tiles(d.Sk, KEYS) * KEYS; }

layout layout_of(const attn_dims &d, bool wide)
{
    const auto lines = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    layout x;
    x.marks = HEADER + lines(d.B * d.H * attn_tiles(d.Sq, LEAST_BM) * 12 * (int64_t)sizeof(uint32_t));
    x.V = x.marks + lines(d.B * d.Hk * attn_tiles(d.Sk, KEYS) * attn_tiles(d.Dv, CHANNELS_V));
    x.wide[0] = x.V + d.B * d.Hk * d.Dv * pitch_of(d);
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
    const int64_t pitch = pitch_of(d);
    matrix Q = { q.data, d.B, d.H, d.Sq, d.D, q.batch, q.head, q.row }, K = { k.data, d.B, d.Hk, d.Sk, d.D, k.batch, k.head, k.row };
    const matrix V = X::TURNS ? matrix{ v.data, d.B, d.Hk, d.Sk, d.Dv, v.batch, v.head, v.row } :
                                matrix{ job.memory + job.place.V, d.B, d.Hk, d.Dv, pitch, d.Hk * d.Dv * pitch, d.Dv * pitch, pitch };
    if (sizeof(typename X::T) == 2) {
        const auto widened = [&](const attn_view &view, matrix &m, int n) {
            const int64_t blocks = attn_tiles(m.B * m.rows * m.H * (d.D / 16), 256);
            uint16_t *const to = (uint16_t *)(job.memory + job.place.wide[n]);
            widen<<<(unsigned)attn_min64(blocks, job.chip->multiprocessors * 16), 256, 0, job.stream>>>(view, to, m.B, (int)m.H, m.rows, (int)d.D);
            m.data = to;
            m.columns = m.head = d.D * 2, m.row = m.H * m.head, m.batch = m.rows * m.row;
            return cudaPeekAtLastError();
        };
        cudaError_t code = widened(q, Q, 0);
        if (code == cudaSuccess) code = widened(k, K, 1);
        if (code != cudaSuccess) return code;
    }
    CUtensorMap map_Q, map_K, map_V;
    if (!map_of(&map_Q, Q, 64) || !map_of(&map_K, K, X::BN) || !map_of(&map_V, V, X::TURNS ? X::BN : X::D)) return cudaErrorInvalidValue;
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
    p.dirty = (uint32_t *)(job.memory + HEADER);
    p.marks = X::TURNS ? nullptr : (const uint8_t *)job.memory + job.place.marks;
    p.key_blocks = (int)(pitch / KEYS), p.channel_blocks = (int)attn_tiles(d.Dv, CHANNELS_V);
    int *const counter = (int *)job.memory;
    p.counter = uneven ? counter : nullptr;

    if (!X::TURNS) {
        const unsigned blocks = (unsigned)(d.B * d.Hk * p.key_blocks * p.channel_blocks);
        prepare<<<blocks, 128, 0, job.stream>>>(v, (uint8_t *)job.memory + job.place.V, (uint8_t *)p.marks, counter, (int)d.Hk, (int)d.Sk, (int)d.Dv,
                                                (int)pitch);
        code = cudaPeekAtLastError();
    } else if (uneven) {
        code = cudaMemsetAsync(counter, 0, HEADER, job.stream);
    }
    if (code != cudaSuccess) return code;
    cudaLaunchAttribute overlap; /* a kernel is made ready while the one before it runs, and waits itself */
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(p.tiles < job.chip->multiprocessors ? p.tiles : job.chip->multiprocessors));
    config.blockDim = dim3(X::THREADS);
    config.dynamicSmemBytes = sizeof(shared<X>);
    config.stream = job.stream;
    config.attrs = &overlap;
    config.numAttrs = X::TURNS ? 0 : 1;
    code = cudaLaunchKernelEx(&config, forward_tiles<X>, p, map_Q, map_K, map_V);
    if (code != cudaSuccess) return code;
    config.gridDim = dim3((unsigned)job.chip->multiprocessors);
    config.blockDim = dim3(128);
    config.dynamicSmemBytes = 0;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, repair_rows<X>, job.given, p);
}

/* The shapes, rows x keys of a tile. A problem takes the first that is wide enough, with q and k widened where lse is wanted; ATTN_F8_SHAPE=name
 * takes the one of that name instead, lse or not: to time the others. */
struct shape_row {
    int D;
    bool wide;
    const char *name;
    cudaError_t (*launch)(const job_of_run &);
};
typedef __nv_bfloat16 bf16;
/* clang-format off: a row is a line */
const shape_row shapes[] = {
    { 64,  false, "192x128",       launch<shape<64, 3, 128, 4>> },
    { 64,  false, "192x128-turns", launch<shape<64, 3, 128, 3, e4m3, true>> },
    { 64,  false, "192x160",       launch<shape<64, 3, 160, 3>> },
    { 64,  false, "128x224",       launch<shape<64, 2, 224, 2>> },
    { 64,  true,  "192x128-wide",  launch<shape<64, 3, 128, 4, bf16>> },
    { 128, false, "128x128",       launch<shape<128, 2, 128, 3>> },
    { 128, false, "128x128-turns", launch<shape<128, 2, 128, 2, e4m3, true>> },
    { 128, false, "128x192",       launch<shape<128, 2, 192, 2>> },
    { 128, false, "128x224",       launch<shape<128, 2, 224, 2>> },
    { 128, false, "192x64",        launch<shape<128, 3, 64, 3>> },
    { 128, false, "192x96",        launch<shape<128, 3, 96, 3>> },
    { 128, false, "192x96-turns",  launch<shape<128, 3, 96, 2, e4m3, true>> },
    { 128, true,  "128x128-wide",  launch<shape<128, 2, 128, 2, bf16>> },
    { 256, false, "128x128",       launch<shape<256, 2, 128, 2>> },
    { 256, false, "128x96",        launch<shape<256, 2, 96, 2>> },
};
/* clang-format on */

const char NAME[] = "sm90_f8";

/* NULL: none. */
const shape_row *shape_of(const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    const char *const wanted = getenv("ATTN_F8_SHAPE");
    const shape_row *found = nullptr;
    for (const shape_row &x : shapes) {
        if (x.D < d.D || x.D < d.Dv) continue;
        if (wanted && strcmp(wanted, x.name) == 0) return &x;
        if (!found && x.wide == (p->lse.rank != 0)) found = &x;
    }
    return found;
}

bool covers(const cuda_chip *chip, const attn_problem *p)
{
    /* It has not run on a GPU yet: compiled, and run on the emulator of tests/emulator alone. So it takes only what asks for it by name;
     * once it has passed on an H200, this condition goes. */
    const char *const family = getenv("ATTN_CUDA_FAMILY");
    if (!family || strcmp(family, NAME) != 0) return false;

    const attn_geometry g = attn_geometry_of(p);
    const attn_dims &d = g.dims;
    if (chip->major != 9 || chip->minor != 0 || p->q.dtype != ATTN_F8E4M3 || d.packed || !shape_of(p)) return false;
    if (d.Sq <= 0 || d.Sk <= 0 || d.B <= 0 || d.H <= 0 || d.Sq >= FAR || d.Sk >= FAR) return false;
    if (d.B * d.H * attn_tiles(d.Sq, LEAST_BM) * 12 >= INT32_MAX) return false; /* tiles are counted in 32 bits, and blocks of V */
    if (d.B * d.Hk * attn_tiles(d.Sk, KEYS) * attn_tiles(d.Dv, CHANNELS_V) >= INT32_MAX) return false;
    if (p->seqlens_k.rank || p->bias.rank || p->keep_mask.rank || p->mask_startend_rows.rank || p->alibi_slopes.rank) return false;
    if (p->softcap != 0 || p->dropout_p != 0 || !is_plain_scale(g.scale)) return false;
    if (p->out.rank && (p->out.dtype != ATTN_BF16 || !walkable(g.view[ATTN_T_out], d.B, d.H, d.Sq, d.Dv, 8))) return false;
    return walkable(g.view[ATTN_T_q], d.B, d.H, d.Sq, d.D, 16) && walkable(g.view[ATTN_T_k], d.B, d.Hk, d.Sk, d.D, 16)
           && walkable(g.view[ATTN_T_v], d.B, d.Hk, d.Sk, d.Dv, 16);
}

size_t workspace(const cuda_chip *, const attn_problem *p) { return (size_t)layout_of(attn_dims_of(p), shape_of(p)->wide).bytes; }

cudaError_t run(const cuda_chip *chip, cudaStream_t stream, const attn_problem *p, void *memory)
{
    const shape_row *const x = shape_of(p);
    job_of_run job;
    job.chip = chip, job.stream = stream, job.memory = (char *)memory;
    job.given = cuda_args_of(p);
    job.place = layout_of(job.given.g.dims, x->wide);
    return x->launch(job);
}

} // namespace

extern const cuda_kernel sm90_f8_forward = { NAME, ATTN_OP_FORWARD, 90, covers, workspace, run };
