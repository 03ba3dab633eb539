/* forward.cu: flash attention forward for Hopper: TMA, wgmma, warp specialisation.
 *
 * The grid is one block a multiprocessor; each works through tiles of BM queries of one head. One warpgroup
 * produces: a warp hands out tiles of work, a thread of another lets the copy engine fill a ring of K and V tiles,
 * which runs on from one tile of work to the next. The others consume: each owns 64 of the rows and holds their O
 * in registers (FlashAttention-3, arXiv:2407.08608, Algorithm 1):
 *
 *     producer                                   consumer
 *       K[n-1], Q                                  S = Q K[n-1]^T;  mask;  P = softmax_step(S)
 *       for j = n-2 .. 0: K[j], V[j+1]             for j = n-2 .. 0:
 *       V[0]                                           issue S' = Q K[j]^T,  O += P V[j+1]
 *                                                      wait S';  mask;  softmax_step(S')       under the second product
 *                                                      wait O;   P = S';  O *= rescale
 *                                                  O += P V[0];  out = O / l,  lse = m scale + ln l
 *
 * Turns: the warpgroups issue their products one after the other (named barriers), so that one's softmax runs under
 * another's products; the turns go on from one tile of work to the next, and one that has no product for a tile of
 * keys passes its turn. A stage of the ring is handed over by a pair of barriers; one thread of a warpgroup arrives
 * when its product has retired, for then all four warps have waited for the stage. Where there is no product, the
 * warpgroup meets at a barrier first: a warp that still waited could miss the phase. A warpgroup whose rows are all
 * past the end (the last of three, at most lengths) multiplies nothing.
 *
 * Rescaling: a row's reference m moves only when its maximum grows by more than 2^8 over it, which is seldom; P is
 * then at most 2^8. Each row decides for itself, so its bits do not depend on its neighbours; a warp skips the
 * products with 1 if all its rows keep their m.
 *
 * Shared memory holds tiles as chunks of 64 columns, rows of 128 bytes, as TMA writes them with the 128-byte
 * swizzle; what lies past the end of a tensor arrives as zeros, which makes head dims of any multiple of 8 and
 * lengths of any size the same case.
 *
 * Order of work: tiles are claimed from a counter; a block claims when its last keys are being loaded, for an
 * earlier claim would keep work from blocks that are free sooner. Without a mask, head after head. With one, tiles
 * differ in length: the longest first, over as many heads as L2 holds. O leaves through shared memory of its own, a
 * warp's whole rows at a time, or where there is no room straight from registers, so that Q's memory is free for
 * the next tile. The kernel is made ready while the one before it in the stream ends (programmatic dependent
 * launch).
 *
 * Short sequences: a tile of work has few tiles of keys, and its first scores, first softmax and output are in line
 * with nothing else of their warpgroup. More warpgroups with narrower tiles (BN = 64) fill that time and waste less
 * of a causal diagonal; longer sequences do better with fewer, wider ones.
 *
 * Options (softcap, ALiBi, FlashMask, float8) are instantiations of their own. FlashMask: tile_extremes looks at
 * the bounds of each tile of keys first; the warp that hands out work makes of them a list of the tiles that its
 * rows see, and the others are neither loaded nor multiplied. float8: widen makes bfloat16 of q, k and v first;
 * their scales join the scores' scale and the last division.
 *
 * A NaN or infinity in V of a key that some rows see and others do not meets P = 0 inside the product. So a warp
 * whose result is not finite leaves a mark, and its block goes over the tile once more at its end, with zeros for
 * such values, which gives rows that do not see them the very bits that they would have had. repair_rows then
 * computes those that do, one by one.
 *
 * Packed, K and V past the end of a sequence belong to its neighbour: such scores are masked, and such rows of V
 * made zero in shared memory.
 *
 * What a row's bits depend on: BN and the order of the tiles, both fixed by the head dim, the options, the masks
 * and the sequence's own Sk. */
#include <atomic>

#include "encode.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/simple/rows.cuh"
#include "kernels/cuda/sm80/decode.h"
#include "tile.cuh"

namespace {

/* ---- Shapes ------------------------------------------------------------------------------------------------------ */

/* An instantiation: head dims up to D of q and k and DV of v; C consumers of 64 rows; BN keys a tile; stages of the
 * ring; registers of a producer's and of a consumer's thread (C + 1 warpgroups share 65536). */
template <int D_, int C_, int BN_, int STAGES_, int DV_ = D_, bool OPTIONS_ = false> struct shape {
    static const int D = D_, C = C_, DV = DV_, BN = BN_, STAGES = STAGES_, BM = 64 * C, THREADS = 128 * (C + 1);
    static const bool OPTIONS = OPTIONS_;
    static const int CHUNKS = (D + 63) / 64, CHUNKS_V = (DV + 63) / 64; /* of 64 columns, in shared memory */
    static const int PRODUCER = C == 2 ? 40 : 32, CONSUMER = C == 2 ? 232 : C == 3 ? 160 : 112;
    /* O has room in shared memory, beside Q, K and V. */
    static const bool STAGES_OUT = ((C * 64 + STAGES * BN) * CHUNKS + (STAGES * BN + C * 64) * CHUNKS_V) * 128 <=
                                   220 << 10;
    static const bool TRIMS = BN == 128; /* a warpgroup that sees at most half of its last tile computes half of it */
};
typedef shape<64, 4, 64, 4> shape_64_short;
typedef shape<64, 3, 128, 4> shape_64;
typedef shape<96, 2, 128, 2> shape_96;
typedef shape<128, 3, 64, 3> shape_128;
typedef shape<128, 2, 176, 2> shape_128_wide;
typedef shape<192, 2, 112, 2> shape_192;
typedef shape<192, 2, 128, 2, 128> shape_192_128;
typedef shape<256, 2, 64, 2> shape_256_short;
typedef shape<256, 2, 80, 2> shape_256;
typedef shape<64, 2, 128, 4, 64, true> shape_64_options;
typedef shape<128, 2, 128, 2, 128, true> shape_128_options;
typedef shape<256, 2, 64, 2, 256, true> shape_256_options; /* BN = 80 spills registers */

/* A tile of work: rows [i0, i0 + BM) of head h of sequence b against key tiles [first, last). clean: for the second
 * time, V without infinities and NaN. */
struct __align__(16) work
{
    int b, h, i0, first;
    int last, Sq, Sk, align;
    int q_start, k_start, index, clean;
    int list, unused[3]; /* FlashMask: which of the two lists of tiles */
};

/* What one consumer makes of it. Tiles [free_first, free_last) are open to all its rows; those from mine on hold
 * nothing for them; narrow: nor does the second half of tile mine - 1. Where there are no such rows, or no tiles,
 * mine is first. */
struct __align__(16) part
{
    int free_first, free_last, mine, narrow;
};

enum {
    REPORT = -1,
    STOP = -2,
    SKIP = -3
}; /* in i0: say when all before is written; the end; not a tile of this launch */

/* What the options make of a head. */
struct head_options {
    float cap, slope; /* as in the plan; in units of scores */
    float factor;     /* what scores are multiplied by first */
};

/* FlashMask: of the tiles of keys of a tile of work, a bit each: is it seen; is it seen in part. */
enum { MOST_TILES = 4096 };
struct tile_bits {
    uint32_t some[MOST_TILES / 32], part[MOST_TILES / 32];
};

enum { WORKS = 1 }; /* tiles of work handed out ahead */

/* What instantiations with options have beside: the tiles seen, one list in use and one ahead. */
template <bool OPTIONS> struct seen_tiles {
    DEVICE tile_bits *list(int) { return nullptr; }
};
template <> struct seen_tiles<true> {
    tile_bits lists[2];
    DEVICE tile_bits *list(int n) { return lists + n; }
};

template <class X> struct shared : seen_tiles<X::OPTIONS> {
    alignas(1024) uint16_t Q[X::C][64 * 64 * X::CHUNKS]; /* D / 64 chunks of 64 rows of 64, a consumer */
    alignas(1024) uint16_t K[X::STAGES][X::BN * 64 * X::CHUNKS];
    alignas(1024) uint16_t V[X::STAGES][X::BN * 64 * X::CHUNKS_V];
    alignas(128) uint16_t out[X::STAGES_OUT ? X::C * 64 * 64 * X::CHUNKS_V : 8]; /* 16 rows a warp */
    work works[WORKS];
    part parts[WORKS][X::C];
    work kept[X::OPTIONS ? X::C * 4 : 1]; /* a warp's own, where registers are short: its work, its head's options */
    head_options heads[X::OPTIONS ? X::C * 4 : 1];
    int redo;      /* some result was not finite */
    int raw_stage; /* the stage of V that the cleaner is to clean; negative: it may go */
    alignas(8) uint64_t full_Q[X::C], empty_Q[X::C], full_K[X::STAGES], full_V[X::STAGES], empty_K[X::STAGES],
        empty_V[X::STAGES];
    uint64_t full_W[WORKS], empty_W[WORKS], idle, raw_V;
};

/* ---- The plan: a problem in 32 bits ------------------------------------------------------------------------------ */

struct plan {
    int tiles;           /* all of them; packed: some have no rows */
    int per_head, heads; /* tiles of rows of a head; heads of the batch */
    int section;         /* heads that are walked together, so that their K and V stay in L2 */
    int B, H, group, Sq, Sk, Dv;
    int left, right; /* window, at most FAR */
    int top_left;
    float c, slack; /* c = log2(e) * what scores are multiplied by, scale or softcap, > 0; slack: see softmax_step */
    const int32_t *cu_q, *cu_k, *seqlens_k;
    float cap;              /* softcap: scores become tanh(s scale / softcap) = 1 - 2 / (1 + 2^(s cap)); 0 without */
    const float *scales[3]; /* of float8 q, k and v, by batch row and key/value head; NULL: 1 */
    int64_t scale_batch[3], scale_head[3];
    const float *slopes; /* ALiBi */
    int64_t slope_batch, slope_head;
    float per_slope;       /* 1 / (what a score is multiplied by) */
    const int32_t *bounds; /* FlashMask: bounds_n a key, for groups of mask_group heads; extremes: of each tile's */
    const attn_mask_extremes *extremes;
    int64_t bounds_batch, bounds_head, bounds_row;
    int bounds_n, mask_group, key_tiles;
    bool causal;
    const float *sinks;
    int64_t sink_stride;
    void *out;
    float *lse;
    int64_t out_batch, out_head, out_row, lse_batch, lse_head, lse_row;
    uint8_t *dirty;        /* a byte a warp and tile: its result was not finite */
    int least_Sk, most_Sk; /* packed, or seqlens_k: only sequences of such lengths, see launch_for */
    int decode_rows;       /* packed: only sequences of more rows than this, see cuda_chip */
    int *counter;          /* next tile less gridDim.x; blocks that have ended */
};

const int FAR = 1 << 29; /* lengths are below it */

/* Tile t: sections of heads; in each the last rows, which see most under a causal mask, first; heads fastest. */
template <int BM, int BN> DEVICE work work_of(const plan &p, int t)
{
    work x;
    x.index = t;
    x.clean = x.list = 0;
    const int in_section = p.section * p.per_head, s = t / in_section, r = t - s * in_section;
    const int heads = min(p.section, p.heads - s * p.section), rank = r / heads,
              head = s * p.section + r - rank * heads;
    int tile = p.per_head - 1 - rank, first = 0;
    x.b = head / p.H;
    x.h = head - x.b * p.H;
    x.q_start = x.k_start = 0;
    x.Sq = p.Sq;
    x.Sk = p.Sk;
    if (p.cu_q) { /* sequence b owns the tiles from cu_q[b] / BM + b on */
        int low = 0, high = p.B;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (p.cu_q[middle] / BM + middle <= tile) low = middle;
            else high = middle;
        }
        x.b = low;
        x.q_start = p.cu_q[low];
        x.k_start = p.cu_k[low];
        x.Sq = p.cu_q[low + 1] - x.q_start;
        x.Sk = p.cu_k[low + 1] - x.k_start;
        first = x.q_start / BM + low;
    } else if (p.seqlens_k) {
        x.Sk = p.seqlens_k[x.b];
    }
    x.align = p.top_left ? 0 : x.Sk - x.Sq;
    x.i0 = (tile - first) * BM;
    const int end = min(x.i0 + BM, x.Sq), lo = max(min(x.i0 + x.align - p.left, x.Sk), 0);
    const int hi = max(min(end + x.align + p.right, x.Sk), lo);
    x.first = lo / BN;
    x.last = hi > lo && x.i0 < x.Sq ? (hi + BN - 1) / BN : x.first;
    if (x.i0 >= x.Sq || x.Sk < p.least_Sk || x.Sk > p.most_Sk || (int64_t)x.Sq * p.group <= p.decode_rows) x.i0 = SKIP;
    return x;
}

template <class X> DEVICE part part_of(const plan &p, const work &x, int w)
{
    const int BN = X::BN, row0 = x.i0 + w * 64, lo = x.align - p.left, hi = x.align + p.right + 1;
    const int end = max(min(row0 + 63 + hi, x.Sk), 1);
    part y;
    y.free_first = (max(row0 + 63 + lo, 0) + BN - 1) / BN;
    y.free_last = max(min(row0 + hi, x.Sk), 0) / BN;
    y.mine = max(min((end + BN - 1) / BN, x.last), x.first + 1);
    if (X::OPTIONS && p.bounds) y.mine = x.last;
    else if (row0 >= x.Sq || x.first >= x.last) y.mine = x.first;
    y.narrow = X::TRIMS && !(X::OPTIONS && p.bounds) && end - (y.mine - 1) * BN <= BN / 2;
    return y;
}

/* The next tile of keys below j that is to be looked at, or first - 1; first itself is one. */
template <class X> DEVICE int tile_below(const plan &p, const tile_bits *seen, int j, int first)
{
    if (!X::OPTIONS || !p.bounds || j <= first) return j - 1;
    int n = (j - 1) / 32;
    uint32_t bits = seen->some[n] & (0xffffffff >> (31 - (j - 1) % 32));
    while (!bits) bits = seen->some[--n];
    return n * 32 + 31 - __clz(bits);
}

/* Which tiles of keys the FlashMask leaves of a tile of work: fills `seen`, narrows [first, last). A warp does it. */
template <class X> DEVICE void look_at_mask(const plan &p, work &x, tile_bits &seen)
{
    const attn_mask_extremes *const extremes = p.extremes +
                                               ((int64_t)x.b * (p.H / p.mask_group) + x.h / p.mask_group) * p.key_tiles;
    const int lane = threadIdx.x % 32, end = min(x.i0 + X::BM, x.Sq);
    int first = x.last, last = x.first;
    for (int n = x.first / 32; n * 32 < x.last; n++) {
        const int j = n * 32 + lane;
        attn_tile_kind kind = ATTN_TILE_HIDDEN;
        if (j >= x.first && j < x.last) kind = attn_mask_classify(&extremes[j], x.i0, end);
        const uint32_t some = __ballot_sync(0xffffffff, kind != ATTN_TILE_HIDDEN),
                       part = __ballot_sync(0xffffffff, kind == ATTN_TILE_PARTIAL);
        if (some) first = min(first, n * 32 + __ffs(some) - 1), last = n * 32 + 32 - __clz(some);
        if (lane == 0) seen.some[n] = some, seen.part[n] = part;
    }
    x.last = max(last, x.first);
    x.first = min(first, x.last);
    __syncwarp();
}

DEVICE float scale_of(const plan &p, int n, const work &x)
{
    return p.scales[n] ? p.scales[n][x.b * p.scale_batch[n] + x.h / p.group * p.scale_head[n]] : 1;
}

const float LEAST_C = 1e-30f; /* what scores are multiplied by is not 0: -inf times it would be NaN */

/* Sets c and slack too, where q and k have scales. Such a scale may be 0, negative or tiny. It joins c where it
 * can; scores that change their sign, or meet a slope, which divided by it might be infinite, are multiplied. */
DEVICE head_options options_of(const plan &p, const work &x, float &c, float &slack)
{
    const float scale = scale_of(p, 0, x) * scale_of(p, 1, x);
    head_options y;
    y.cap = p.cap * scale;
    y.factor = 1;
    y.slope = p.slopes ? p.slopes[x.b * p.slope_batch + x.h * p.slope_head] * p.per_slope : 0;
    c = p.c, slack = p.slack;
    if (p.cap == 0 && (p.scales[0] || p.scales[1])) {
        if (scale < 0 || y.slope != 0) y.factor = scale;
        else c = fmaxf(c * scale, LEAST_C), slack = 8 / c;
    }
    return y;
}

/* Softcap, ALiBi and FlashMask, for the thread's rows i0 and i0 + 8. */
template <int N>
DEVICE void apply_options(float (&S)[N / 2], const plan &p, const work &x, const head_options &y, const tile_bits *seen,
                          int i0, int j, int j0, int lane)
{
    static_assert(N <= 128, "hidden has 32 bits");
    if (y.factor != 1)
#pragma unroll
        for (int i = 0; i < N / 2; i++) S[i] *= y.factor;
    if (p.cap != 0)
#pragma unroll
        for (int i = 0; i < N / 2; i++) S[i] = 1 - __fdividef(2, 1 + exp2_fast(S[i] * y.cap));
    const int column = j0 + lane % 4 * 2;
    if (y.slope != 0)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float distance = (float)(i0 + half * 8 + x.Sk - x.Sq - column);
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    S[n * 4 + half * 2 + e] = fmaf(-y.slope, fabsf(distance - (float)(n * 8 + e)),
                                                   S[n * 4 + half * 2 + e]);
        }
    if (p.bounds && seen->part[j / 32] >> j % 32 & 1) {
        const int32_t *const bounds = p.bounds + x.b * p.bounds_batch + x.h / p.mask_group * p.bounds_head;
        uint32_t hidden[2] = { 0,
                               0 }; /* a bit a score: a rolled loop, for the bounds want registers that are not there */
#pragma unroll 1
        for (int n = 0; n < N / 4; n++) {
            const attn_mask m = attn_mask_of(bounds + min(column + n / 2 * 8 + n % 2, x.Sk - 1) * p.bounds_row,
                                             p.bounds_n, p.causal, x.Sq);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = i0 + half * 8;
                hidden[half] |= (uint32_t)((i >= m.lts && i < m.lte) || (i >= m.uts && i < m.ute)) << n;
            }
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            if (hidden[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) S[i] = -CUDART_INF_F;
    }
}

/* ---- Consumer's steps -------------------------------------------------------------------------------------------- */

/* Reference of the exponentials (of raw scores: the maximum, or less by at most `slack`) and this lane's part of
 * the sum, for the thread's two rows. */
struct softmax {
    float m[2], l[2];
};

/* S becomes P; rescale gets the factors of O; a maximum that grows by no more than slack = 8 / c leaves all as it is.
 * Two chains a row, even and odd columns, for the pipeline's sake. */
template <int N> DEVICE void softmax_step(float (&S)[N / 2], softmax &x, float (&rescale)[2], float c, float slack)
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
        if (m <= x.m[half] + slack) m = x.m[half];
        base[half] = m == -CUDART_INF_F ? 0 : __fmul_rn(m, c); /* nothing seen yet: -inf - -inf would be NaN */
        rescale[half] = exp2_fast(
            __fsub_rn(__fmul_rn(x.m[half], c), base[half])); /* rounded alike: exactly 1 where m stays */
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

/* Zeros for what is not finite in a tile; a warp does it. */
template <typename T, int COUNT> DEVICE void clean_tile(uint16_t *tile)
{
    const uint32_t exponent = pack<T>(1, 1) == 0x3c003c00 ? 0x7c00 : 0x7f80; /* of float16 or bfloat16 */
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

/* Four lanes' 4x4 words, transposed: lane q of a quad gets word q of lanes 0 .. 3. */
DEVICE void transpose_quad(uint32_t (&a)[4], int q)
{
#pragma unroll
    for (int step = 1; step <= 2; step++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int low = step == 1 ? 2 * n : n, high = low + step;
            const bool upper = q & step;
            const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? a[low] : a[high], step);
            if (upper) a[low] = other;
            else a[high] = other;
        }
}

/* A warp's 16 rows of O, scaled, to memory: 16 bytes a lane, straight from registers. (Through shared memory:
 * tile.cuh.) */
template <typename T, int D>
DEVICE void store_rows(T *rows, int64_t stride, int count, int Dv, const float (&O)[D / 2], int lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = lane / 4 + half * 8;
#pragma unroll
        for (int n = 0; n < D / 8; n += 4) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) r[e] = pack<T>(O[(n + e) * 4 + half * 2], O[(n + e) * 4 + half * 2 + 1]);
            transpose_quad(r, lane % 4);
            const int column = (n + lane % 4) * 8;
            if (i < count && column < Dv) *(uint4 *)(rows + i * stride + column) = make_uint4(r[0], r[1], r[2], r[3]);
        }
    }
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

enum { TURN_BARRIER = 2, GROUP_BARRIER = 6 }; /* named barriers, one a consumer from each on */

template <typename T, class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    forward_tiles(const __grid_constant__ plan p, const __grid_constant__ CUtensorMap map_Q,
                  const __grid_constant__ CUtensorMap map_K, const __grid_constant__ CUtensorMap map_V)
{
    const int DV = X::DV, BM = X::BM, BN = X::BN, STAGES = X::STAGES, C = X::C;
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
        for (int s = 0; s < WORKS; s++) {
            mbarrier_init(smem_addr(&sm.full_W[s]), 1);
            mbarrier_init(smem_addr(&sm.empty_W[s]), C * 4 + 1);
        }
        mbarrier_init(smem_addr(&sm.idle), C * 4);
        mbarrier_init(smem_addr(&sm.raw_V), 1);
        sm.redo = 0;
        fence_mbarrier_init();
    }
    __syncthreads();
    launch_dependents();      /* repair_rows may be made ready: it waits for our end */
    wait_for_prerequisites(); /* the kernel before may have written what we read */

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x / 32 == 1) { /* a warp hands out work; lane 0 tells */
            const bool teller = threadIdx.x == 32;
            ring<WORKS> w;
            int list = 0;
            auto give = [&](work x) {
                if (X::OPTIONS && p.bounds && x.first < x.last) {
                    x.list = list ^= 1;
                    look_at_mask<X>(p, x, *sm.list(list));
                }
                if (teller) {
                    sm.works[w.stage] = x;
                    for (int n = 0; n < C; n++) sm.parts[w.stage][n] = part_of<X>(p, x, n);
                    mbarrier_arrive(smem_addr(&sm.full_W[w.stage]));
                }
                mbarrier_wait(smem_addr(&sm.empty_W[w.stage]), w.phase);
                __syncwarp(); /* nobody may fall a phase behind */
                w.next();
            };
            for (int t = blockIdx.x; t < p.tiles;) {
                const work x = work_of<BM, BN>(p, t);
                if (x.i0 != SKIP) give(x);
                else if (teller)
                    for (int n = 0; n < 4 * C; n++) p.dirty[t * (4 * C) + n] = 0;
                if (teller) t = (int)gridDim.x + atomicAdd(p.counter, 1);
                t = __shfl_sync(0xffffffff, t, 0);
            }
            work x = {};
            x.i0 = REPORT;
            give(x);
            mbarrier_wait(smem_addr(&sm.idle), 0);
            for (int t = 0; *(volatile int *)&sm.redo && t < p.tiles;
                 t++) { /* once more what this block found not finite */
                bool ours = false;
                for (int n = 0; n < 4 * C; n++)
                    ours |= ((volatile uint8_t *)p.dirty)[t * (4 * C) + n] == blockIdx.x + 1;
                if (!__any_sync(0xffffffff, ours))
                    continue; /* one answer for the warp: another block may be writing its own */
                x = work_of<BM, BN>(p, t);
                if (x.i0 == SKIP) continue; /* an old flag: the block that has this tile has not cleared it yet */
                x.clean = 1;
                give(x);
            }
            x.i0 = STOP;
            if (teller) {
                sm.works[w.stage] = x;
                mbarrier_arrive(smem_addr(&sm.full_W[w.stage]));
                if (atomicAdd(p.counter + 1, 1) ==
                    (int)gridDim.x - 1) { /* the last block: for the stream's next kernel */
                    p.counter[0] = 0;
                    p.counter[1] = 0;
                }
            }
        } else if (threadIdx.x == 0) { /* keeps the ring full */
            ring<STAGES> k, v;
            ring<WORKS> w;
            uint32_t phase_Q = 1;
            for (;; w.next()) {
                mbarrier_wait(smem_addr(&sm.full_W[w.stage]), w.phase);
                const work &x = sm.works[w.stage];
                const int first = x.first, last = x.last, i0 = x.i0, h = x.h, hk = h / p.group, b = p.cu_q ? 0 : x.b;
                const int q_start = x.q_start, k_start = x.k_start;
                if (i0 == STOP) break;
                const int list = X::OPTIONS ? x.list : 0;
                const bool clean = x.clean, late = first + 1 < last;
                /* The next work is claimed when all but the last tiles are asked for. */
                if (!late) mbarrier_arrive(smem_addr(&sm.empty_W[w.stage]));
                if (first >= last) continue;
                auto load = [&](const CUtensorMap *map, int chunks, uint16_t *to, uint64_t *full, uint64_t *empty,
                                ring<STAGES> &at, int j) {
                    mbarrier_wait(smem_addr(empty + at.stage), at.phase ^ 1);
                    const uint32_t bar = full ? smem_addr(full + at.stage) : smem_addr(&sm.raw_V);
                    const uint32_t there = smem_addr(to) + at.stage * BN * chunks * 128;
                    mbarrier_arrive_expect_tx(bar, BN * chunks * 128);
                    for (int c = 0; c < chunks; c++)
                        tma_load_4d(there + c * BN * 128, map, c * 64, k_start + j * BN, hk, b, bar);
                    at.next();
                };
                auto load_K = [&](int j) { load(&map_K, X::CHUNKS, sm.K[0], sm.full_K, sm.empty_K, k, j); };
                auto load_V = [&](int j) {
                    if (!clean) {
                        load(&map_V, X::CHUNKS_V, sm.V[0], sm.full_V, sm.empty_V, v, j);
                        return;
                    }
                    const uint32_t done = smem_addr(sm.full_V + v.stage), phase = v.phase;
                    sm.raw_stage = v.stage;
                    load(&map_V, X::CHUNKS_V, sm.V[0], nullptr, sm.empty_V, v, j);
                    mbarrier_wait(done, phase);
                };
                load_K(last - 1);
                for (int n = 0; n < C; n++) {
                    const uint32_t bar = smem_addr(&sm.full_Q[n]);
                    mbarrier_wait(smem_addr(&sm.empty_Q[n]), phase_Q);
                    mbarrier_arrive_expect_tx(bar, 64 * X::CHUNKS * 128);
                    for (int c = 0; c < X::CHUNKS; c++)
                        tma_load_4d(smem_addr(sm.Q[n]) + c * 8192, &map_Q, c * 64, q_start + i0 + n * 64, h, b, bar);
                }
                phase_Q ^= 1;
                int above = last - 1;
                for (int j = tile_below<X>(p, sm.list(list), above, first); j >= first;
                     above = j, j = tile_below<X>(p, sm.list(list), j, first)) {
                    if (late && j == first) mbarrier_arrive(smem_addr(&sm.empty_W[w.stage]));
                    load_K(j);
                    load_V(above);
                }
                load_V(first);
            }
            sm.raw_stage = -1;
            mbarrier_arrive(smem_addr(&sm.raw_V));
        } else if (threadIdx.x / 32 == 2) { /* cleans tiles of V, for the second time over */
            for (uint32_t phase = 0;; phase ^= 1) {
                mbarrier_wait(smem_addr(&sm.raw_V), phase);
                const int stage = *(volatile int *)&sm.raw_stage;
                if (stage < 0) break;
                clean_tile<T, BN * 64 * X::CHUNKS_V>(sm.V[stage]);
                if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&sm.full_V[stage]));
            }
        }
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        const int w = wg - 1, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        const bool leader = threadIdx.x % 128 == 0;
        const uint32_t Q = smem_addr(sm.Q[w]);
        float c = p.c, slack = p.slack;
        ring<STAGES> k, v;
        ring<WORKS> next;
        uint32_t phase_Q = 0;
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

        for (;;) {
            int order;
            work x;
            part y;
#pragma unroll 1
            do {
                mbarrier_wait(smem_addr(&sm.full_W[next.stage]), next.phase);
                x = sm.works[next.stage];
                y = sm.parts[next.stage][w];
                __syncwarp();
                if (lane == 0) {
                    if (X::OPTIONS) sm.kept[w * 4 + warp] = x;
                    mbarrier_arrive(smem_addr(&sm.empty_W[next.stage]));
                }
                if (X::OPTIONS) __syncwarp();
                next.next();
                order = x.i0;
                if (order == REPORT && lane == 0) mbarrier_arrive(smem_addr(&sm.idle));
            } while (order == REPORT);
            if (order < 0) break;

            const int row0 = x.i0 + w * 64, i0 = row0 + warp * 16 + lane / 4;
            const int lo = x.align - p.left, hi = x.align + p.right + 1;
            float O[DV / 2], rescale[2];
            softmax state = { { -CUDART_INF_F, -CUDART_INF_F }, { 0, 0 } };
#pragma unroll
            for (int i = 0; i < DV / 2; i++) O[i] = 0;

            if (x.first < y.mine) {
                const int free_first = y.free_first, free_last = y.free_last, mine = y.mine;
                const bool narrow = X::TRIMS && y.narrow;
                float S[BN / 2];
                uint32_t P[BN / 16][4];

                const tile_bits *const seen = sm.list(x.list);
                if constexpr (X::OPTIONS) {
                    const head_options options = options_of(p, x, c, slack);
                    if (lane == 0) sm.heads[w * 4 + warp] = options;
                    __syncwarp();
                }
                mbarrier_wait(smem_addr(&sm.full_Q[w]), phase_Q);
                phase_Q ^= 1;
                for (int j = x.last - 1; j >= mine; j--) pass_K(); /* not for these rows */
                mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                const int j_first = mine - 1;
                if (X::TRIMS && narrow) {
                    float half[X::TRIMS ? BN / 4 : 32];
                    await_turn();
                    scores<T, X, X::TRIMS ? BN / 2 : 64>(half, Q, smem_addr(sm.K[k.stage]));
                    next_turn();
                    wgmma_wait<0>();
                    pin(half);
                    release(sm.empty_K[k.stage]);
                    if (j_first == x.first && leader) mbarrier_arrive(smem_addr(&sm.empty_Q[w]));
                    if constexpr (X::OPTIONS)
                        apply_options<X::TRIMS ? BN / 2 : 64>(half, p, sm.kept[w * 4 + warp], sm.heads[w * 4 + warp],
                                                              seen, i0, j_first, j_first * BN, lane);
                    mask<X::TRIMS ? BN / 2 : 64>(half, lo, hi, x.Sk, i0, j_first * BN, lane);
                    softmax_step<X::TRIMS ? BN / 2 : 64>(half, state, rescale, c, slack);
#pragma unroll
                    for (int i = 0; i < BN / 16; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) P[i][e] = 0;
                    to_operand<T, X::TRIMS ? BN / 2 : 64>(P, half);
                } else {
                    await_turn();
                    scores<T, X, BN>(S, Q, smem_addr(sm.K[k.stage]));
                    next_turn();
                    wgmma_wait<0>();
                    pin(S);
                    release(sm.empty_K[k.stage]);
                    if (j_first == x.first && leader) mbarrier_arrive(smem_addr(&sm.empty_Q[w]));
                    if constexpr (X::OPTIONS)
                        apply_options<BN>(S, p, sm.kept[w * 4 + warp], sm.heads[w * 4 + warp], seen, i0, j_first,
                                          j_first * BN, lane);
                    if (j_first < free_first || j_first >= free_last) mask<BN>(S, lo, hi, x.Sk, i0, j_first * BN, lane);
                    softmax_step<BN>(S, state, rescale, c, slack);
                    to_operand<T, BN>(P, S);
                }
                k.next();

                for (int j = x.last - 1; j >= mine; j--) pass_V();
                if ((p.cu_q || p.seqlens_k) && j_first == (x.Sk - 1) / BN &&
                    x.Sk % BN) { /* V past the end is not ours: zeros */
                    mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                    const int rows = BN - x.Sk % BN, per_chunk = rows * 8; /* 16-byte pieces */
                    for (int n = threadIdx.x % 128; n < X::CHUNKS_V * per_chunk; n += 128) {
                        const int chunk = n / per_chunk, at = n % per_chunk;
                        ((uint4 *)(sm.V[v.stage] + chunk * BN * 64 + x.Sk % BN * 64))[at] = make_uint4(0, 0, 0, 0);
                    }
                    fence_proxy_async_shared();
                    named_barrier_sync(GROUP_BARRIER + w, 128);
                }

                for (int j = tile_below<X>(p, seen, j_first, x.first); j >= x.first;
                     j = tile_below<X>(p, seen, j, x.first)) {
                    mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                    await_turn();
                    scores<T, X, BN>(S, Q, smem_addr(sm.K[k.stage]));
                    mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                    accumulate<T, X>(O, P, smem_addr(sm.V[v.stage]));
                    next_turn();
                    wgmma_wait<1>();
                    pin(S);
                    release(sm.empty_K[k.stage]);
                    if (j == x.first && leader) mbarrier_arrive(smem_addr(&sm.empty_Q[w]));
                    k.next();
                    if constexpr (X::OPTIONS)
                        apply_options<BN>(S, p, sm.kept[w * 4 + warp], sm.heads[w * 4 + warp], seen, i0, j, j * BN,
                                          lane);
                    if (j < free_first || j >= free_last) mask<BN>(S, lo, hi, x.Sk, i0, j * BN, lane);
                    softmax_step<BN>(S, state, rescale, c, slack);
                    wgmma_wait<0>();
                    pin(O);
                    release(sm.empty_V[v.stage]);
                    v.next();
                    to_operand<T, BN>(P, S);
                    if (__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
                        for (int i = 0; i < DV / 2; i++) O[i] *= rescale[i / 2 % 2];
                    }
                }
                mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                accumulate<T, X>(O, P, smem_addr(sm.V[v.stage]));
                wgmma_wait<0>();
                pin(O);
                release(sm.empty_V[v.stage]);
                v.next();
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

            const work &z = X::OPTIONS ? sm.kept[w * 4 + warp] : x;
            /* out = O / l, lse = m scale + ln l; the sink joins the denominator here. */
            const float sink = p.sinks ? sink_in_base_2(p.sinks[z.h * p.sink_stride]) : -CUDART_INF_F;
            bool finite = true;
            float factor[2], top[2];
#pragma unroll
            for (int distance = 1; distance <= 2; distance++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    state.l[half] += __shfl_xor_sync(0xffffffff, state.l[half], distance);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &l = state.l[half], keep = 1;
                top[half] = __fmul_rn(state.m[half], c); /* c > 0: -inf stays */
                if (sink != -CUDART_INF_F) {
                    const float both = fmaxf(top[half], sink);
                    keep = exp2_fast(top[half] - both);
                    l = l * keep + exp2_fast(sink - both);
                    top[half] = both;
                }
                factor[half] = l == 0 ? 0 : __fdividef(keep, l) * (X::OPTIONS ? scale_of(p, 2, z) : 1);
                finite &= l - l == 0 && (top[half] == -CUDART_INF_F || fabsf(top[half]) < SCORE_MOST);
            }
            if (lane % 4 == 0 && p.lse) {
                float *const lse = p.lse + z.b * p.lse_batch + z.h * p.lse_head + (z.q_start + i0) * p.lse_row;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (i0 + half * 8 < z.Sq)
                        lse[half * 8 * p.lse_row] = state.l[half] == 0 ? -CUDART_INF_F
                                                                       : (top[half] + __log2f(state.l[half])) * LN2;
            }
            float zero[4] = { 0, 0, 0, 0 }; /* or NaN; four chains for the pipeline's sake */
#pragma unroll
            for (int i = 0; i < DV / 2; i++) {
                O[i] *= factor[i / 2 % 2];
                zero[i % 4] = fmaf(O[i], 0, zero[i % 4]);
            }
            finite &= zero[0] + zero[1] + zero[2] + zero[3] == 0;
            const bool any = __any_sync(0xffffffff, !finite);
            if (lane == 0 && !z.clean) {
                p.dirty[z.index * (4 * C) + w * 4 + warp] = any ? blockIdx.x + 1 : 0;
                if (any) *(volatile int *)&sm.redo = 1; /* as other warps may: the same value */
            }
            if (p.out) {
                T *const rows = (T *)p.out + z.b * p.out_batch + z.h * p.out_head +
                                (z.q_start + row0 + warp * 16) * p.out_row;
                const int count = z.Sq - row0 - warp * 16; /* of rows that exist, if less than 16 */
                uint16_t *const staging = sm.out + (X::STAGES_OUT ? (w * 4 + warp) * 16 * 64 * X::CHUNKS_V : 0);
                if (X::STAGES_OUT) store_rows<T, DV>(rows, p.out_row, count, p.Dv, O, staging, lane);
                else store_rows<T, DV>(rows, p.out_row, count, p.Dv, O, lane);
            }
        }
        if (w == 0) await_turn(); /* so that no arrival is left over */
    }
}

/* Rows that see what is not finite, one by one, among those of the warps that said so. A byte a warp: 16 rows. */
template <int BM>
__global__ void __launch_bounds__(128) repair_rows(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    const int WARPS = BM / 16;
    const int flags = p.tiles * WARPS;
    launch_dependents(); /* the stream's next kernel, if it waits for our end */
    wait_for_prerequisites();
    for (int base = (blockIdx.x * 4 + threadIdx.x / 32) * 32; base < flags; base += gridDim.x * 128) {
        const int mine = base + threadIdx.x % 32;
        unsigned set = __ballot_sync(0xffffffff, mine < flags && p.dirty[mine]);
        for (; set; set &= set - 1) {
            const int n = base + __ffs(set) - 1;
            const work w = work_of<BM, 128>(p, n / WARPS);
            const head_args x = head_args_of(a, w.b, w.h);
            const int i0 = w.i0 + n % WARPS * 16;
            for (int i = i0; i < i0 + 16 && i < w.Sq; i++) forward_row(a, x, i, a.g.view[ATTN_T_out], nullptr, true);
        }
    }
}

/* float8_e4m3 to bfloat16, which holds all its values: [B, H, rows, D] of a view to the same, dense but for rows of
 * `pitch` elements. 8 a thread. */
__global__ void __launch_bounds__(256)
    widen(const __grid_constant__ attn_view from, uint16_t *to, int64_t B, int H, int64_t rows, int D, int pitch)
{
    const int pieces = pitch / 8;
    for (int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x; at < B * rows * H * pieces;
         at += gridDim.x * (int64_t)256) {
        const int64_t line = at / pieces, b = line / (rows * H), r = line - b * (rows * H);
        const int d = (int)(at - line * pieces) * 8, h = (int)(r % H);
        const uint8_t *const source = (const uint8_t *)from.data + attn_at(&from, b, h, r / H) + d;
        uint8_t x[8];
        if ((uint64_t)source % 8 == 0 && d + 8 <= D) *(uint2 *)x = *(const uint2 *)source;
        else
            for (int n = 0; n < 8; n++) x[n] = d + n < D ? source[n] : 0;
        uint32_t y[4];
        for (int n = 0; n < 4; n++) y[n] = widen_e4m3(x[2 * n], x[2 * n + 1]);
        *(uint4 *)(to + at * 8) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

/* FlashMask: the extremes of the bounds of each tile of keys, by a warp. */
template <int BN>
__global__ void __launch_bounds__(128) tile_extremes(const __grid_constant__ plan p, attn_mask_extremes *extremes)
{
    const int heads = p.H / p.mask_group, lane = threadIdx.x % 32;
    for (int64_t at = (int64_t)blockIdx.x * 4 + threadIdx.x / 32; at < (int64_t)p.B * heads * p.key_tiles;
         at += (int64_t)gridDim.x * 4) {
        const int tile = (int)(at % p.key_tiles), head = (int)(at / p.key_tiles);
        const int32_t *const bounds = p.bounds + head / heads * p.bounds_batch + head % heads * p.bounds_head;
        attn_mask_extremes e = attn_mask_extremes_init();
        for (int j = tile * BN + lane; j < min(tile * BN + BN, p.Sk); j += 32)
            attn_mask_extremes_add(&e, attn_mask_of(bounds + j * p.bounds_row, p.bounds_n, p.causal, p.Sq));
        attn_mask_extremes all;
        all.min.lts = __reduce_min_sync(0xffffffff, e.min.lts), all.max.lts = __reduce_max_sync(0xffffffff, e.max.lts);
        all.min.lte = __reduce_min_sync(0xffffffff, e.min.lte), all.max.lte = __reduce_max_sync(0xffffffff, e.max.lte);
        all.min.uts = __reduce_min_sync(0xffffffff, e.min.uts), all.max.uts = __reduce_max_sync(0xffffffff, e.max.uts);
        all.min.ute = __reduce_min_sync(0xffffffff, e.min.ute), all.max.ute = __reduce_max_sync(0xffffffff, e.max.ute);
        if (lane == 0) extremes[at] = all;
    }
}

/* ---- Launcher ---------------------------------------------------------------------------------------------------- */

/* Of rows of D elements of 16 bits that TMA is to read: whole pieces of 16 bytes. */
int64_t pitch_of(int64_t D)
{
    return (D + 7) / 8 * 8;
}

/* A map over [B, H, rows, columns] of a view, in boxes of 64 columns. Axes of size 1 may have stride 0, which a map
 * may not. */
bool map_of(CUtensorMap *map, const attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t columns, int box_rows)
{
    const tensor_map_encoder encode = encoder();
    if (!encode) return false;
    const uint64_t dims[4] = { (uint64_t)columns, (uint64_t)rows, (uint64_t)H, (uint64_t)B };
    const auto bytes = [&](int64_t stride) { return (uint64_t)(stride ? stride : pitch_of(columns)) * 2; };
    const uint64_t strides[3] = { bytes(view.row), bytes(view.head), bytes(view.batch) };
    const uint32_t box[4] = { 64, (uint32_t)box_rows, 1, 1 }, ones[4] = { 1, 1, 1, 1 };
    return encode(map, view.dtype == ATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                  view.data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Can TMA walk it? */
bool walkable(const attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t columns)
{
    if ((view.batch == 0 && B > 1) || (view.head == 0 && H > 1) || (view.row == 0 && rows > 1))
        return false; /* broadcast */
    return (uint64_t)view.data % 16 == 0 && columns % 8 == 0 && view.row % 8 == 0 && view.head % 8 == 0 &&
           view.batch % 8 == 0;
}

const int64_t L2_SHARE = 32 << 20; /* of the 50 or 60 MB, for K and V */

/* Tiles of rows of a head. */
int64_t per_head_of(const attn_dims &d, int BM)
{
    return d.packed ? d.total_q / BM + d.B : attn_tiles(d.Sq, BM);
}

const double MOST_SOFTCAP = 64; /* 1 - 2 / (1 + e^2x) is good to 1.2e-7 of the cap, and lse is to be to 2e-5 */
const int EXACT = 1 << 24;      /* floats count exactly so far: distances of ALiBi */

const int LEAST_BN = 64, LEAST_BM = 128, HEADER = 128; /* bytes before the flags: the counter */

/* Scratch: the counter; a flag a warp and tile; for FlashMask the extremes of each tile of keys; of float8, q, k
 * and v as bfloat16. */
struct layout {
    int64_t extremes, wide[3], bytes; /* where they begin */
};

layout layout_of(const attn_problem *p, const attn_dims &d)
{
    const int64_t B = d.packed ? 1 : d.B, rows = d.packed ? d.total_q : d.Sq, keys = d.packed ? d.total_k : d.Sk;
    const bool narrow = p->q.dtype == ATTN_F8E4M3;
    const int64_t wide[3] = { rows * d.H * pitch_of(d.D), keys * d.Hk * pitch_of(d.D), keys * d.Hk * pitch_of(d.Dv) };
    layout x;
    x.extremes = HEADER + (B * d.H * (per_head_of(d, LEAST_BM) + 1) * 12 + 127) / 128 * 128;
    x.bytes = x.extremes;
    if (p->mask_startend_rows.rank)
        x.bytes += (B * d.H * attn_tiles(d.Sk, LEAST_BN) * (int64_t)sizeof(attn_mask_extremes) + 127) / 128 * 128;
    for (int n = 0; n < 3; n++) {
        x.wide[n] = x.bytes;
        if (narrow) x.bytes += (B * wide[n] * 2 + 127) / 128 * 128;
    }
    return x;
}

bool plan_forward(const cuda_chip *, attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const int64_t B = d.packed ? 1 : d.B, rows = d.packed ? d.total_q : d.Sq, keys = d.packed ? d.total_k : d.Sk;
    if (rows <= 0 || keys <= 0 || d.B <= 0 || d.H <= 0 || rows >= FAR || keys >= FAR) return false;
    if (B * d.H * (per_head_of(d, LEAST_BM) + 1) * 12 >= INT32_MAX) return false; /* tiles are counted in 32 bits */
    if (p->softcap > 0 && (p->softcap > MOST_SOFTCAP || p->softcap < 1e-6 || g.scale / p->softcap > 1e30)) return false;
    if (p->alibi_slopes.rank && (rows >= EXACT || keys >= EXACT)) return false;
    if (p->mask_startend_rows.rank && (d.packed || attn_tiles(keys, LEAST_BN) > MOST_TILES)) return false;
    if (p->out.rank && !walkable(g.view[ATTN_T_out], B, d.H, rows, d.Dv)) return false;
    if (p->q.dtype != ATTN_F8E4M3 &&
        (!walkable(g.view[ATTN_T_q], B, d.H, rows, d.D) || !walkable(g.view[ATTN_T_k], B, d.Hk, keys, d.D) ||
         !walkable(g.view[ATTN_T_v], B, d.Hk, keys, d.Dv)))
        return false;
    plan->workspace_bytes = (size_t)layout_of(p, d).bytes;
    return true;
}

/* Counters of tiles, two words each, zero between kernels: a stream keeps the one that it first got, so that no two
 * kernels that run at once share one and none has to be cleared beforehand. NULL: all are taken. */
enum { COUNTERS = 64, COUNTER_WORDS = 32 /* a cache line */ };
__device__ int counters[COUNTERS * COUNTER_WORDS];

int *counter_of(cudaStream_t stream)
{
    static std::atomic<cudaStream_t> owners[COUNTERS];
    static thread_local int device_known = -1;
    static thread_local int *base;
    int device;
    if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
    if (device != device_known) {
        if (cudaGetSymbolAddress((void **)&base, counters) != cudaSuccess) return nullptr;
        device_known = device;
    }
    if (!stream) return nullptr;
    for (int n = 0; n < COUNTERS; n++) {
        cudaStream_t owner = owners[n].load();
        if (!owner && owners[n].compare_exchange_strong(owner, stream)) return base + n * COUNTER_WORDS;
        if (owner == stream) return base + n * COUNTER_WORDS;
    }
    return nullptr;
}

/* A run. `read` is `given` with q, k and v as forward_tiles is to read them. */
struct job_of_run {
    const cuda_chip *chip;
    cudaStream_t stream;
    cuda_args given, read;
    char *memory;
    layout place;
};

template <typename T, class X> cudaError_t launch(const job_of_run &job, int least_Sk = 0, int most_Sk = INT32_MAX)
{
    const attn_geometry &g = job.read.g;
    const cudaStream_t stream = job.stream;
    const attn_dims &d = g.dims;
    const int64_t B = d.packed ? 1 : d.B, rows_q = d.packed ? d.total_q : d.Sq, rows_k = d.packed ? d.total_k : d.Sk;
    CUtensorMap Q, K, V;
    if (!map_of(&Q, g.view[ATTN_T_q], B, d.H, rows_q, d.D, 64) ||
        !map_of(&K, g.view[ATTN_T_k], B, d.Hk, rows_k, d.D, X::BN) ||
        !map_of(&V, g.view[ATTN_T_v], B, d.Hk, rows_k, d.Dv, X::BN))
        return cudaErrorInvalidValue;
    const cudaError_t allowed = allow_shared<forward_tiles<T, X>>(sizeof(shared<X>));
    if (allowed != cudaSuccess) return allowed;
    const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse], &sinks = g.view[ATTN_T_sinks];
    plan p;
    p.per_head = (int)per_head_of(d, X::BM);
    p.heads = (int)(B * d.H);
    p.tiles = p.per_head * p.heads;
    /* Under a mask, tiles differ in length: long ones first, over as many heads as L2 holds. Else head after head. */
    const attn_view &bounds = g.view[ATTN_T_mask_startend_rows], &slopes = g.view[ATTN_T_alibi_slopes];
    const bool uneven = g.right < rows_k || g.left < rows_q || d.packed || g.seqlens_k || bounds.data;
    p.section = 1;
    if (uneven) {
        const int64_t head_bytes = rows_k * (d.D + d.Dv) * 2 / g.group;
        while (p.section < p.heads && p.section * 2 * head_bytes <= L2_SHARE) p.section *= 2;
    }
    p.B = (int)d.B, p.H = (int)d.H, p.group = (int)g.group, p.Sq = (int)d.Sq, p.Sk = (int)d.Sk, p.Dv = (int)d.Dv;
    p.left = (int)attn_min64(g.left, FAR), p.right = (int)attn_min64(g.right, FAR);
    p.top_left = g.top_left;
    const float unit = (float)(g.softcap > 0 ? g.softcap : g.scale); /* of the scores that softmax_step sees */
    p.c = unit * LOG2E, p.slack = 8 / p.c;
    p.cap = g.softcap > 0 ? (float)(2 * g.scale / g.softcap) * LOG2E : 0;
    p.slopes = (const float *)slopes.data, p.slope_batch = slopes.batch, p.slope_head = slopes.head;
    p.per_slope = 1 / unit;
    p.bounds = (const int32_t *)bounds.data;
    p.bounds_batch = bounds.batch, p.bounds_head = bounds.head, p.bounds_row = bounds.row;
    p.bounds_n = g.mask_bounds, p.mask_group = (int)g.mask_group, p.causal = g.causal;
    p.key_tiles = (int)attn_tiles(d.Sk, X::BN);
    p.extremes = (const attn_mask_extremes *)(job.memory + job.place.extremes);
    static const attn_tensor_id scales[3] = { ATTN_T_q_scale, ATTN_T_k_scale, ATTN_T_v_scale };
    for (int n = 0; n < 3; n++) {
        const attn_view &view = g.view[scales[n]];
        p.scales[n] = (const float *)view.data, p.scale_batch[n] = view.batch, p.scale_head[n] = view.head;
    }
    p.cu_q = g.cu_q, p.cu_k = g.cu_k, p.seqlens_k = g.seqlens_k;
    p.sinks = (const float *)sinks.data, p.sink_stride = sinks.head;
    p.out = out.data, p.lse = (float *)lse.data;
    p.out_batch = out.batch, p.out_head = out.head, p.out_row = out.row;
    p.lse_batch = lse.batch, p.lse_head = lse.head, p.lse_row = lse.row;
    p.least_Sk = least_Sk, p.most_Sk = most_Sk;
    p.decode_rows = job.read.decode_rows;
    p.dirty = (uint8_t *)job.memory + HEADER;
    p.counter = counter_of(stream);
    if (!p.counter) {
        p.counter = (int *)job.memory;
        const cudaError_t code = cudaMemsetAsync(job.memory, 0, HEADER, stream);
        if (code != cudaSuccess) return code;
    }
    const int blocks = p.tiles < job.chip->multiprocessors ? p.tiles : job.chip->multiprocessors;
    if (X::OPTIONS && p.bounds) {
        const int warps = (int)(d.B * (d.H / g.mask_group)) * p.key_tiles;
        tile_extremes<X::BN><<<(unsigned)attn_min64(attn_tiles(warps, 4), 1 << 20), 128, 0, stream>>>(
            p, (attn_mask_extremes *)p.extremes);
    }
    cudaLaunchAttribute overlap; /* a kernel is made ready while the one before it runs, and waits itself */
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(X::THREADS);
    config.dynamicSmemBytes = sizeof(shared<X>);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    const cudaError_t code = cudaLaunchKernelEx(&config, forward_tiles<T, X>, p, Q, K, V);
    if (code != cudaSuccess) return code;
    config.gridDim = dim3((unsigned)job.chip->multiprocessors);
    config.blockDim = dim3(128);
    config.dynamicSmemBytes = 0;
    return cudaLaunchKernelEx(&config, repair_rows<X::BM>, job.given, p);
}

/* Sequences of fewer than `keys` keys by one shape, the others by another: their own length decides, for bits
 * depend on BN. */
template <typename T, class SHORT, class LONG> cudaError_t launch_by_length(const job_of_run &job, int keys)
{
    const attn_geometry &g = job.read.g;
    if (!g.cu_k && !g.seqlens_k) return g.dims.Sk < keys ? launch<T, SHORT>(job) : launch<T, LONG>(job);
    const cudaError_t code = launch<T, SHORT>(job, 0, keys - 1);
    return code != cudaSuccess || g.dims.Sk < keys ? code : launch<T, LONG>(job, keys);
}

template <typename T> cudaError_t launch_with_options(const job_of_run &job)
{
    const int64_t D = attn_max64(job.read.g.dims.D, job.read.g.dims.Dv);
    return D <= 64    ? launch<T, shape_64_options>(job)
           : D <= 128 ? launch<T, shape_128_options>(job)
                      : launch<T, shape_256_options>(job);
}

/* Which shape: by head dims, masks and a sequence's own length, never by how many others there are. */
template <typename T> cudaError_t launch_for(const job_of_run &job)
{
    const attn_geometry &g = job.read.g;
    const int64_t Dv = g.dims.Dv, D = attn_max64(g.dims.D, Dv);
    const bool window = g.left < ATTN_UNBOUNDED, open = !window && g.right >= ATTN_UNBOUNDED;
    if (g.softcap > 0 || g.view[ATTN_T_alibi_slopes].data || g.view[ATTN_T_mask_startend_rows].data)
        return launch_with_options<T>(job);
    if (D <= 64) return window ? launch<T, shape_64>(job) : launch_by_length<T, shape_64_short, shape_64>(job, 1025);
    if (D <= 96) return launch<T, shape_96>(job);
    if (D <= 128)
        return window ? launch<T, shape_128>(job)
                      : launch_by_length<T, shape_128, shape_128_wide>(job, open ? 3584 : 6144);
    if (D <= 192) return Dv <= 128 ? launch<T, shape_192_128>(job) : launch<T, shape_192>(job);
    return open ? launch<T, shape_256>(job) : launch_by_length<T, shape_256_short, shape_256>(job, 1025);
}

/* q, k and v as bfloat16, in scratch. */
cudaError_t widen_all(job_of_run &job)
{
    attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    static const attn_tensor_id tensors[3] = { ATTN_T_q, ATTN_T_k, ATTN_T_v };
    const int64_t B = d.packed ? 1 : d.B;
    for (int n = 0; n < 3; n++) {
        attn_view &view = g.view[tensors[n]];
        const int64_t H = n ? d.Hk : d.H, D = n == 2 ? d.Dv : d.D,
                      rows = n          ? (d.packed ? d.total_k : d.Sk)
                             : d.packed ? d.total_q
                                        : d.Sq;
        const int64_t pitch = pitch_of(D), blocks = attn_tiles(B * rows * H * (pitch / 8), 256);
        uint16_t *const to = (uint16_t *)(job.memory + job.place.wide[n]);
        widen<<<(unsigned)attn_min64(blocks, job.chip->multiprocessors * 16), 256, 0, job.stream>>>(
            view, to, B, (int)H, rows, (int)D, (int)pitch);
        const cudaError_t code = cudaPeekAtLastError();
        if (code != cudaSuccess) return code;
        view.data = to;
        view.dtype = ATTN_BF16;
        view.head = pitch, view.row = H * pitch, view.batch = d.packed ? 0 : rows * H * pitch;
    }
    return cudaSuccess;
}

cudaError_t launch_forward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const attn_dtype dtype = plan->problem->q.dtype;
    job_of_run job;
    job.chip = chip, job.stream = stream, job.memory = (char *)memory;
    job.given = cuda_args_of(plan);
    job.given.decode_rows = chip->decode_rows;
    job.read = job.given;
    job.place = layout_of(plan->problem, job.given.g.dims);
    if (dtype == ATTN_F8E4M3) {
        const cudaError_t code = widen_all(job);
        return code != cudaSuccess ? code : launch_with_options<__nv_bfloat16>(job);
    }
    return dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(job) : launch_for<__half>(job);
}

const uint32_t DTYPES = ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3);
const uint64_t FEATURES = BASIC_FEATURES | LENGTH_FEATURES | ATTN_OPTION_BIT(SOFTCAP) | ATTN_TENSOR_BIT(alibi_slopes) |
                          ATTN_TENSOR_BIT(mask_startend_rows) | ATTN_TENSOR_BIT(q_scale) | ATTN_TENSOR_BIT(k_scale) |
                          ATTN_TENSOR_BIT(v_scale);

} // namespace

extern const cuda_kernel sm90_forward = {
    { "sm90", ATTN_OP_FORWARD, DTYPES, ATTN_MAX_HEAD_DIM, FEATURES }, 90, 90, plan_forward, launch_forward,
};
extern const cuda_kernel sm90_packed_forward = {
    { "sm90+decode", ATTN_OP_FORWARD, DTYPES, ATTN_MAX_HEAD_DIM, FEATURES },
    90,
    90,
    plan_with_decode<sm90_forward>,
    launch_with_decode<sm90_forward>,
};
