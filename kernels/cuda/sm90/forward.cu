/* forward.cu: flash attention forward for Hopper: TMA, wgmma, warp specialisation.
 *
 * The grid is one block a multiprocessor; each works through tiles of BM queries of one head. One warpgroup produces: a thread hands out
 * tiles of work, another lets the copy engine fill a ring of K and V tiles, which runs on from one tile of work to the next. The
 * others consume: each owns 64 of the rows and holds their O in registers (FlashAttention-3, arXiv:2407.08608, Algorithm 1):
 *
 *     producer                                   consumer
 *       Q, K[n-1]                                  S = Q K[n-1]^T;  mask;  P = softmax_first(S)
 *       for j = n-2 .. 0: K[j], V[j+1]             for j = n-2 .. 0:
 *       V[0]                                           issue S' = Q K[j]^T,  O += P V[j+1]
 *                                                      wait S';  mask;  softmax_step(S')       under the second product
 *                                                      wait O;   P = S';  O *= rescale
 *                                                  O += P V[0];  out = O / l,  lse = m scale + ln l
 *
 * Turns: the warpgroups issue their products one after the other (named barriers), so that one's softmax runs under another's
 * products. A stage of the ring is handed over by a pair of barriers; one thread of a warpgroup arrives when its product has retired.
 *
 * Shared memory holds tiles as chunks of 64 columns, rows of 128 bytes, as TMA writes them with the 128-byte swizzle; what lies past the end
 * of a tensor arrives as zeros, which makes head dims of any multiple of 8 and lengths of any size the same case.
 *
 * Order of work: without a mask, head after head, tile n to block n % gridDim.x. With one, tiles differ in length: the longest first, over as
 * many heads as L2 holds, claimed from a counter; a block claims when its last keys are being loaded, for an earlier claim would keep work
 * from blocks that are free sooner. O leaves from registers, 16 bytes a lane, so that Q's memory is free for the next tile.
 *
 * A NaN or infinity in V of a key that some rows see and others do not meets P = 0 inside the product. So a warp whose result is not
 * finite leaves a mark, and its block goes over the tile once more at its end, with zeros for such values, which gives rows that do not
 * see them the very bits that they would have had. repair_rows then computes those that do, one by one.
 *
 * Packed, K and V past the end of a sequence belong to its neighbour: such scores are masked, and such rows of V made zero in shared memory.
 *
 * What a row's bits depend on: BN and the order of the tiles, both fixed by the head dim, the masks and the sequence's own Sk. */
#include <cudaTypedefs.h>
#include <atomic>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/simple/rows.cuh"
#include "ptx.cuh"

namespace {

/* ---- Shapes ------------------------------------------------------------------------------------------------------------------------ */

/* An instantiation: head dims up to D; C consumers of 64 rows; BN keys a tile; stages of the ring; registers of a producer's and of a
 * consumer's thread (C + 1 warpgroups share 65536). */
template <int D_, int C_, int BN_, int STAGES_> struct shape {
    static const int D = D_, C = C_, BN = BN_, STAGES = STAGES_, BM = 64 * C, THREADS = 128 * (C + 1);
    static const int PRODUCER = C == 3 ? 32 : 40, CONSUMER = C == 3 ? 160 : 232;
    static const bool TURNS = C > 1 && D <= 128;  /* the softmax share is small above */
    static const bool TRIMS = BN == 128;          /* a warpgroup that sees at most half of its last tile computes half of it */
};
typedef shape<64, 3, 128, 4> shape_64;
typedef shape<128, 2, 128, 2> shape_128;
typedef shape<128, 2, 176, 2> shape_128_wide;
typedef shape<256, 2, 80, 2> shape_256;

/* A tile of work: rows [i0, i0 + BM) of head h of sequence b against key tiles [first, last). clean: for the second time, V without
 * infinities and NaN. */
struct __align__(16) work {
    int b, h, i0, first;
    int last, Sq, Sk, align;
    int q_start, k_start, index, clean;
};

enum { REPORT = -1, STOP = -2, SKIP = -3 }; /* in i0: say when all before is written; the end; not a tile of this launch */

enum { WORKS = 1 }; /* tiles of work handed out ahead */

template <class X> struct shared {
    alignas(1024) uint16_t Q[X::BM * X::D]; /* D / 64 chunks of BM rows of 64 */
    alignas(1024) uint16_t K[X::STAGES][X::BN * X::D];
    alignas(1024) uint16_t V[X::STAGES][X::BN * X::D];
    work works[WORKS];
    int redo;      /* some result was not finite */
    int raw_stage; /* the stage of V that the cleaner is to clean; negative: it may go */
    alignas(8) uint64_t full_Q, empty_Q, full_K[X::STAGES], full_V[X::STAGES], empty_K[X::STAGES], empty_V[X::STAGES], full_W[WORKS], empty_W[WORKS], idle, raw_V;
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
    int tiles;               /* all of them; packed: some have no rows */
    int per_head, heads;     /* tiles of rows of a head; heads of the batch */
    int section;             /* heads that are walked together, so that their K and V stay in L2 */
    int B, H, group, Sq, Sk, Dv;
    int left, right;         /* window, at most FAR */
    int top_left;
    float scale, c;          /* c = scale * log2(e) > 0 */
    const int32_t *cu_q, *cu_k, *seqlens_k;
    const float *sinks;
    int64_t sink_stride;
    void *out;
    float *lse;
    int64_t out_batch, out_head, out_row, lse_batch, lse_head, lse_row;
    uint8_t *dirty;          /* a byte a warp and tile: its result was not finite */
    int least_Sk, most_Sk;   /* packed, or seqlens_k: only sequences of such lengths, see launch_for */
    int *counter;            /* next tile less gridDim.x; NULL: a block takes every gridDim.x-th */
};

const int FAR = 1 << 29; /* lengths are below it */

/* Tile t: sections of heads; in each the last rows, which see most under a causal mask, first; heads fastest. */
template <int BM, int BN> DEVICE work work_of(const plan &p, int t)
{
    work x;
    x.index = t;
    x.clean = 0;
    const int in_section = p.section * p.per_head, s = t / in_section, r = t - s * in_section;
    const int heads = min(p.section, p.heads - s * p.section), rank = r / heads, head = s * p.section + r - rank * heads;
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
    if (x.i0 >= x.Sq || x.Sk < p.least_Sk || x.Sk > p.most_Sk) x.i0 = SKIP;
    return x;
}

/* ---- Consumer's steps --------------------------------------------------------------------------------------------------------- */

/* S[0 .. N) = Q K^T for 64 rows and the first N keys of the tile. */
template <typename T, class X, int N> DEVICE void scores(float (&S)[N / 2], uint32_t Q, uint32_t K)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < X::D / 16; k++)
        wgmma<T, N>::ss(S, wgmma_descriptor(Q + k / 4 * X::BM * 128 + k % 4 * 32, 16, 1024), wgmma_descriptor(K + k / 4 * X::BN * 128 + k % 4 * 32, 16, 1024), k > 0);
    wgmma_commit();
}

/* O += P V for 64 rows. */
template <typename T, class X> DEVICE void accumulate(float (&O)[X::D / 2], const uint32_t (&P)[X::BN / 16][4], uint32_t V)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < X::BN / 16; k++) wgmma<T, X::D>::rs(O, P[k], wgmma_descriptor(V + k * 2048, X::BN * 128, 1024), 1);
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

/* Running maximum (of raw scores) and this lane's part of the sum, for the thread's two rows. */
struct softmax {
    float m[2], l[2];
};

/* S becomes P; rescale gets the factors of O. Two chains a row, even and odd columns, for the pipeline's sake. */
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
        base[half] = m == -CUDART_INF_F ? 0 : m * c; /* nothing seen yet: -inf - -inf would be NaN */
        rescale[half] = exp2_fast(fmaf(x.m[half], c, -base[half]));
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

template <typename T, int N, int M> DEVICE void to_operand(uint32_t (&P)[M][4], const float (&S)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
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

/* ---- The kernel ------------------------------------------------------------------------------------------------------------------- */

enum { TURN_BARRIER = 2, GROUP_BARRIER = 6 }; /* named barriers, one a consumer from each on */

template <typename T, class X>
__global__ void __launch_bounds__(X::THREADS, 1) forward_tiles(const __grid_constant__ plan p, const __grid_constant__ CUtensorMap map_Q,
                                                               const __grid_constant__ CUtensorMap map_K, const __grid_constant__ CUtensorMap map_V)
{
    const int D = X::D, BM = X::BM, BN = X::BN, STAGES = X::STAGES, C = X::C, CHUNKS = D / 64;
    extern __shared__ __align__(1024) char memory[];
    shared<X> &sm = *reinterpret_cast<shared<X> *>(memory);
    const int wg = warpgroup_index();

    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_Q);
        prefetch_tensormap(&map_K);
        prefetch_tensormap(&map_V);
        mbarrier_init(smem_addr(&sm.full_Q), 1);
        mbarrier_init(smem_addr(&sm.empty_Q), C);
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
    launch_dependents(); /* repair_rows may be made ready: it waits for our end */

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x == 32) { /* hands out work */
            ring<WORKS> w;
            auto give = [&](const work &x) {
                sm.works[w.stage] = x;
                mbarrier_arrive(smem_addr(&sm.full_W[w.stage]));
                mbarrier_wait(smem_addr(&sm.empty_W[w.stage]), w.phase);
                w.next();
            };
            for (int t = blockIdx.x; t < p.tiles;) {
                const work x = work_of<BM, BN>(p, t);
                if (x.i0 != SKIP) give(x);
                else
                    for (int n = 0; n < 4 * C; n++) p.dirty[t * (4 * C) + n] = 0;
                t = p.counter ? (int)gridDim.x + atomicAdd(p.counter, 1) : t + (int)gridDim.x;
            }
            work x = {};
            x.i0 = REPORT;
            give(x);
            mbarrier_wait(smem_addr(&sm.idle), 0);
            for (int t = 0; sm.redo && t < p.tiles; t++) { /* once more what this block found not finite */
                bool ours = false;
                for (int n = 0; n < 4 * C; n++) ours |= ((volatile uint8_t *)p.dirty)[t * (4 * C) + n] == blockIdx.x + 1;
                if (!ours) continue;
                x = work_of<BM, BN>(p, t);
                x.clean = 1;
                give(x);
            }
            x.i0 = STOP;
            sm.works[w.stage] = x;
            mbarrier_arrive(smem_addr(&sm.full_W[w.stage]));
            if (p.counter && atomicAdd(p.counter + 1, 1) == (int)gridDim.x - 1) { /* the last block: for the stream's next kernel */
                p.counter[0] = 0;
                p.counter[1] = 0;
            }
        } else if (threadIdx.x == 0) { /* keeps the ring full */
            ring<STAGES> k, v;
            ring<WORKS> w;
            uint32_t phase_Q = 1;
            for (;; w.next()) {
                mbarrier_wait(smem_addr(&sm.full_W[w.stage]), w.phase);
                const work &x = sm.works[w.stage];
                const int first = x.first, last = x.last, i0 = x.i0, h = x.h, hk = h / p.group, b = p.cu_q ? 0 : x.b, q_start = x.q_start, k_start = x.k_start;
                if (i0 == STOP) break;
                const bool clean = x.clean, late = p.counter && first + 1 < last;
                /* The next work is claimed when all but the last tiles are asked for; known beforehand, at once. */
                if (!late) mbarrier_arrive(smem_addr(&sm.empty_W[w.stage]));
                if (first >= last) continue;
                auto load = [&](const CUtensorMap *map, uint16_t *to, uint64_t *full, uint64_t *empty, ring<STAGES> &at, int j) {
                    mbarrier_wait(smem_addr(empty + at.stage), at.phase ^ 1);
                    const uint32_t bar = full ? smem_addr(full + at.stage) : smem_addr(&sm.raw_V), there = smem_addr(to) + at.stage * BN * D * 2;
                    mbarrier_arrive_expect_tx(bar, BN * D * 2);
                    for (int c = 0; c < CHUNKS; c++) tma_load_4d(there + c * BN * 128, map, c * 64, k_start + j * BN, hk, b, bar);
                    at.next();
                };
                auto load_V = [&](int j) {
                    if (!clean) {
                        load(&map_V, sm.V[0], sm.full_V, sm.empty_V, v, j);
                        return;
                    }
                    const uint32_t done = smem_addr(sm.full_V + v.stage), phase = v.phase;
                    sm.raw_stage = v.stage;
                    load(&map_V, sm.V[0], nullptr, sm.empty_V, v, j);
                    mbarrier_wait(done, phase);
                };
                load(&map_K, sm.K[0], sm.full_K, sm.empty_K, k, last - 1);
                mbarrier_wait(smem_addr(&sm.empty_Q), phase_Q);
                phase_Q ^= 1;
                mbarrier_arrive_expect_tx(smem_addr(&sm.full_Q), BM * D * 2);
                for (int c = 0; c < CHUNKS; c++) tma_load_4d(smem_addr(sm.Q) + c * BM * 128, &map_Q, c * 64, q_start + i0, h, b, smem_addr(&sm.full_Q));
                for (int j = last - 2; j >= first; j--) {
                    if (late && j == first) mbarrier_arrive(smem_addr(&sm.empty_W[w.stage]));
                    load(&map_K, sm.K[0], sm.full_K, sm.empty_K, k, j);
                    load_V(j + 1);
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
                clean_tile<T, BN * D>(sm.V[stage]);
                if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&sm.full_V[stage]));
            }
        }
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        const int w = wg - 1, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        const bool leader = threadIdx.x % 128 == 0;
        const uint32_t Q = smem_addr(sm.Q) + w * 64 * 128;
        const float c = p.c;
        ring<STAGES> k, v;
        ring<WORKS> next;
        uint32_t phase_Q = 0;

        for (;;) {
            int order;
            work x;
#pragma unroll 1
            do {
                mbarrier_wait(smem_addr(&sm.full_W[next.stage]), next.phase);
                x = sm.works[next.stage];
                __syncwarp();
                if (lane == 0) mbarrier_arrive(smem_addr(&sm.empty_W[next.stage]));
                next.next();
                order = x.i0;
                if (order == REPORT && lane == 0) mbarrier_arrive(smem_addr(&sm.idle));
            } while (order == REPORT);
            if (order < 0) break;

            const int row0 = x.i0 + w * 64, i0 = row0 + warp * 16 + lane / 4;
            const int lo = x.align - p.left, hi = x.align + p.right + 1;
            float O[D / 2], rescale[2];
            softmax state = { { -CUDART_INF_F, -CUDART_INF_F }, { 0, 0 } };
#pragma unroll
            for (int i = 0; i < D / 2; i++) O[i] = 0;

            if (x.first < x.last) {
                /* Tiles [free_first, free_last) are open to all 64 rows; those from mine on hold nothing for them. */
                const int free_first = (max(row0 + 63 + lo, 0) + BN - 1) / BN, free_last = max(min(row0 + hi, x.Sk), 0) / BN;
                const int end = max(min(row0 + 63 + hi, x.Sk), 1), mine = max(min((end + BN - 1) / BN, x.last), x.first + 1);
                const bool narrow = X::TRIMS && end - (mine - 1) * BN <= BN / 2;
                float S[BN / 2];
                uint32_t P[BN / 16][4];

                mbarrier_wait(smem_addr(&sm.full_Q), phase_Q);
                phase_Q ^= 1;
                for (int j = x.last - 1; j >= mine; j--) { /* not for these rows */
                    mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                    if (leader) mbarrier_arrive(smem_addr(&sm.empty_K[k.stage]));
                    k.next();
                }
                mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                const int j_first = mine - 1;
                if (X::TRIMS && narrow) {
                    float half[X::TRIMS ? BN / 4 : 32];
                    scores<T, X, X::TRIMS ? BN / 2 : 64>(half, Q, smem_addr(sm.K[k.stage]));
                    wgmma_wait<0>();
                    pin(half);
                    if (leader) mbarrier_arrive(smem_addr(&sm.empty_K[k.stage]));
                    if (j_first == x.first && leader) mbarrier_arrive(smem_addr(&sm.empty_Q));
                    mask<X::TRIMS ? BN / 2 : 64>(half, lo, hi, x.Sk, i0, j_first * BN, lane);
                    softmax_step<X::TRIMS ? BN / 2 : 64>(half, state, rescale, c);
#pragma unroll
                    for (int i = 0; i < BN / 16; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) P[i][e] = 0;
                    to_operand<T, X::TRIMS ? BN / 2 : 64>(P, half);
                } else {
                    scores<T, X, BN>(S, Q, smem_addr(sm.K[k.stage]));
                    wgmma_wait<0>();
                    pin(S);
                    if (leader) mbarrier_arrive(smem_addr(&sm.empty_K[k.stage]));
                    if (j_first == x.first && leader) mbarrier_arrive(smem_addr(&sm.empty_Q));
                    if (j_first < free_first || j_first >= free_last) mask<BN>(S, lo, hi, x.Sk, i0, j_first * BN, lane);
                    softmax_step<BN>(S, state, rescale, c);
                    to_operand<T, BN>(P, S);
                }
                k.next();

                if (X::TURNS && w == C - 1) named_barrier_arrive(TURN_BARRIER, 256); /* the first turn is consumer 0's */
                for (int j = x.last - 1; j >= mine; j--) {
                    if (X::TURNS) {
                        named_barrier_sync(TURN_BARRIER + w, 256);
                        named_barrier_arrive(TURN_BARRIER + (w + 1) % C, 256);
                    }
                    mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                    if (leader) mbarrier_arrive(smem_addr(&sm.empty_V[v.stage]));
                    v.next();
                }
                if ((p.cu_q || p.seqlens_k) && j_first == (x.Sk - 1) / BN && x.Sk % BN) { /* V past the end is not ours: zeros */
                    mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                    const int rows = BN - x.Sk % BN, per_chunk = rows * 8; /* 16-byte pieces */
                    for (int n = threadIdx.x % 128; n < CHUNKS * per_chunk; n += 128) {
                        const int chunk = n / per_chunk, at = n % per_chunk;
                        ((uint4 *)(sm.V[v.stage] + chunk * BN * 64 + x.Sk % BN * 64))[at] = make_uint4(0, 0, 0, 0);
                    }
                    fence_proxy_async_shared();
                    named_barrier_sync(GROUP_BARRIER + w, 128);
                }

                for (int j = j_first - 1; j >= x.first; j--) {
                    mbarrier_wait(smem_addr(&sm.full_K[k.stage]), k.phase);
                    if (X::TURNS) named_barrier_sync(TURN_BARRIER + w, 256);
                    scores<T, X, BN>(S, Q, smem_addr(sm.K[k.stage]));
                    mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                    accumulate<T, X>(O, P, smem_addr(sm.V[v.stage]));
                    if (X::TURNS) named_barrier_arrive(TURN_BARRIER + (w + 1) % C, 256);
                    wgmma_wait<1>();
                    pin(S);
                    if (leader) mbarrier_arrive(smem_addr(&sm.empty_K[k.stage]));
                    if (j == x.first && leader) mbarrier_arrive(smem_addr(&sm.empty_Q));
                    k.next();
                    if (j < free_first || j >= free_last) mask<BN>(S, lo, hi, x.Sk, i0, j * BN, lane);
                    softmax_step<BN>(S, state, rescale, c);
                    wgmma_wait<0>();
                    pin(O);
                    if (leader) mbarrier_arrive(smem_addr(&sm.empty_V[v.stage]));
                    v.next();
                    to_operand<T, BN>(P, S);
#pragma unroll
                    for (int i = 0; i < D / 2; i++) O[i] *= rescale[i / 2 % 2];
                }
                mbarrier_wait(smem_addr(&sm.full_V[v.stage]), v.phase);
                accumulate<T, X>(O, P, smem_addr(sm.V[v.stage]));
                wgmma_wait<0>();
                pin(O);
                if (leader) mbarrier_arrive(smem_addr(&sm.empty_V[v.stage]));
                v.next();
                if (X::TURNS && w == 0) named_barrier_sync(TURN_BARRIER, 256); /* the last turn's arrival, so that none is left over */
            }

            /* out = O / l, lse = m scale + ln l; the sink joins the denominator here. */
            const float sink = p.sinks ? p.sinks[x.h * p.sink_stride] * LOG2E : -CUDART_INF_F;
            bool finite = true;
            float factor[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &l = state.l[half];
                l += __shfl_xor_sync(0xffffffff, l, 1);
                l += __shfl_xor_sync(0xffffffff, l, 2);
                float top = state.m[half] == -CUDART_INF_F ? -CUDART_INF_F : state.m[half] * c, keep = 1;
                if (sink != -CUDART_INF_F) {
                    const float both = fmaxf(top, sink);
                    keep = exp2_fast(top - both);
                    l = l * keep + exp2_fast(sink - both);
                    top = both;
                }
                factor[half] = l == 0 ? 0 : keep / l;
                finite &= l - l == 0;
                const int i = i0 + half * 8;
                if (lane % 4 == 0 && i < x.Sq && p.lse)
                    p.lse[x.b * p.lse_batch + x.h * p.lse_head + (x.q_start + i) * p.lse_row] = l == 0 ? -CUDART_INF_F : top * LN2 + logf(l);
            }
#pragma unroll
            for (int i = 0; i < D / 2; i++) {
                O[i] *= factor[i / 2 % 2];
                finite &= O[i] - O[i] == 0;
            }
            const bool any = __any_sync(0xffffffff, !finite);
            if (lane == 0 && !x.clean) {
                p.dirty[x.index * (4 * C) + w * 4 + warp] = any ? blockIdx.x + 1 : 0;
                if (any) sm.redo = 1;
            }
            if (p.out) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int i = i0 + half * 8;
                    T *const row = (T *)p.out + x.b * p.out_batch + x.h * p.out_head + (x.q_start + i) * p.out_row;
#pragma unroll
                    for (int n = 0; n < D / 8; n += 4) {
                        uint32_t r[4];
#pragma unroll
                        for (int e = 0; e < 4; e++) r[e] = pack<T>(O[(n + e) * 4 + half * 2], O[(n + e) * 4 + half * 2 + 1]);
                        transpose_quad(r, lane % 4);
                        const int column = (n + lane % 4) * 8;
                        if (i < x.Sq && column < p.Dv) *(uint4 *)(row + column) = make_uint4(r[0], r[1], r[2], r[3]);
                    }
                }
            }
        }
    }
}

/* Rows that see what is not finite, one by one, among those of the warps that said so. A byte a warp: 16 rows. */
template <class X> __global__ void __launch_bounds__(128) repair_rows(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    const int flags = p.tiles * (4 * X::C);
    wait_for_prerequisites();
    for (int base = (blockIdx.x * 4 + threadIdx.x / 32) * 32; base < flags; base += gridDim.x * 128) {
        const int mine = base + threadIdx.x % 32;
        unsigned set = __ballot_sync(0xffffffff, mine < flags && p.dirty[mine]);
        for (; set; set &= set - 1) {
            const int n = base + __ffs(set) - 1;
            const work w = work_of<X::BM, X::BN>(p, n / (4 * X::C));
            const head_args x = head_args_of(a, w.b, w.h);
            const int i0 = w.i0 + n % (4 * X::C) * 16;
            for (int i = i0; i < i0 + 16 && i < w.Sq; i++) forward_row(a, x, i, a.g.view[ATTN_T_out], nullptr, true);
        }
    }
}

/* ---- Launcher --------------------------------------------------------------------------------------------------------------------- */

/* A map over [B, H, rows, columns] of a view, in boxes of 64 columns. Axes of size 1 may have stride 0, which a map may not. */
bool map_of(CUtensorMap *map, const attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t columns, int box_rows)
{
    static PFN_cuTensorMapEncodeTiled_v12000 encode;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault, &found) != cudaSuccess) return false;
    }
    const uint64_t dims[4] = { (uint64_t)columns, (uint64_t)rows, (uint64_t)H, (uint64_t)B };
    const uint64_t strides[3] = { (uint64_t)(view.row ? view.row : columns) * 2, (uint64_t)(view.head ? view.head : columns) * 2,
                                  (uint64_t)(view.batch ? view.batch : columns) * 2 };
    const uint32_t box[4] = { 64, (uint32_t)box_rows, 1, 1 }, ones[4] = { 1, 1, 1, 1 };
    return encode(map, view.dtype == ATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, view.data, dims, strides,
                  box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Can TMA walk it? */
bool walkable(const attn_view &view, int64_t columns)
{
    return (uint64_t)view.data % 16 == 0 && columns % 8 == 0 && view.row % 8 == 0 && view.head % 8 == 0 && view.batch % 8 == 0;
}

const int64_t L2_SHARE = 32 << 20; /* of the 50 or 60 MB, for K and V */

int class_of(const attn_dims &d)
{
    const int64_t D = attn_max64(d.D, d.Dv);
    return D <= 64 ? 64 : D <= 128 ? 128 : 256;
}

/* Tiles of rows of a head. */
int64_t per_head_of(const attn_dims &d, int BM) { return d.packed ? d.total_q / BM + d.B : attn_tiles(d.Sq, BM); }

const int LONG = 4096; /* keys */

const int LEAST_BM = 128, HEADER = 128; /* bytes before the flags: the counter */

size_t workspace(const cuda_chip *, const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    return HEADER + (size_t)((d.packed ? 1 : d.B) * d.H * (per_head_of(d, LEAST_BM) + 1) * 12);
}

bool covers(const cuda_chip *chip, const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    const attn_dims &d = g.dims;
    const int64_t rows = d.packed ? d.total_q : d.Sq;
    return chip->major == 9 && chip->minor == 0 && (p->q.dtype == ATTN_BF16 || p->q.dtype == ATTN_F16) && rows > 0 && d.B > 0 && d.H > 0
           && (d.packed ? d.total_k : d.Sk) > 0 && rows < FAR && (d.packed ? d.total_k : d.Sk) < FAR && workspace(chip, p) < INT32_MAX
           && (!p->out.rank || p->out.dtype == p->q.dtype) && g.scale > 0 && p->softcap == 0
           && !p->bias.rank && !p->alibi_slopes.rank && !p->keep_mask.rank && !p->mask_startend_rows.rank && p->dropout_p == 0
           && walkable(g.view[ATTN_T_q], d.D) && walkable(g.view[ATTN_T_k], d.D) && walkable(g.view[ATTN_T_v], d.Dv)
           && (!p->out.rank || walkable(g.view[ATTN_T_out], d.Dv));
}

/* Counters of tiles, two words each, zero between kernels: a stream keeps the one that it first got, so that no two kernels that run at
 * once share one and none has to be cleared beforehand. NULL: all are taken. */
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

template <typename T, class X>
cudaError_t launch(const cuda_chip *chip, const cuda_args &a, void *memory, cudaStream_t stream, int least_Sk = 0, int most_Sk = INT32_MAX)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const int64_t B = d.packed ? 1 : d.B, rows_q = d.packed ? d.total_q : d.Sq, rows_k = d.packed ? d.total_k : d.Sk;
    CUtensorMap Q, K, V;
    if (!map_of(&Q, g.view[ATTN_T_q], B, d.H, rows_q, d.D, X::BM) || !map_of(&K, g.view[ATTN_T_k], B, d.Hk, rows_k, d.D, X::BN)
        || !map_of(&V, g.view[ATTN_T_v], B, d.Hk, rows_k, d.Dv, X::BN))
        return cudaErrorInvalidValue;
    static bool sized; /* setting it twice does no harm */
    if (!sized) {
        const cudaError_t code = cudaFuncSetAttribute(forward_tiles<T, X>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(shared<X>));
        if (code != cudaSuccess) return code;
        sized = true;
    }
    const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse], &sinks = g.view[ATTN_T_sinks];
    plan p;
    p.per_head = (int)per_head_of(d, X::BM);
    p.heads = (int)(B * d.H);
    p.tiles = p.per_head * p.heads;
    /* Under a mask, tiles differ in length: long ones first, over as many heads as L2 holds. Else head after head. */
    const bool uneven = g.right < rows_k || d.packed || g.seqlens_k;
    p.section = 1;
    if (uneven) {
        const int64_t head_bytes = rows_k * (d.D + d.Dv) * 2 / g.group;
        while (p.section < p.heads && p.section * 2 * head_bytes <= L2_SHARE) p.section *= 2;
    }
    p.B = (int)d.B, p.H = (int)d.H, p.group = (int)g.group, p.Sq = (int)d.Sq, p.Sk = (int)d.Sk, p.Dv = (int)d.Dv;
    p.left = (int)attn_min64(g.left, FAR), p.right = (int)attn_min64(g.right, FAR);
    p.top_left = g.top_left;
    p.scale = (float)g.scale, p.c = p.scale * LOG2E;
    p.cu_q = g.cu_q, p.cu_k = g.cu_k, p.seqlens_k = g.seqlens_k;
    p.sinks = (const float *)sinks.data, p.sink_stride = sinks.head;
    p.out = out.data, p.lse = (float *)lse.data;
    p.out_batch = out.batch, p.out_head = out.head, p.out_row = out.row;
    p.lse_batch = lse.batch, p.lse_head = lse.head, p.lse_row = lse.row;
    p.least_Sk = least_Sk, p.most_Sk = most_Sk;
    p.dirty = (uint8_t *)memory + HEADER;
    p.counter = nullptr;
    if (uneven) {
        p.counter = counter_of(stream);
        if (!p.counter) {
            p.counter = (int *)memory;
            const cudaError_t code = cudaMemsetAsync(memory, 0, HEADER, stream);
            if (code != cudaSuccess) return code;
        }
    }
    const int blocks = p.tiles < chip->multiprocessors ? p.tiles : chip->multiprocessors;
    forward_tiles<T, X><<<blocks, X::THREADS, sizeof(shared<X>), stream>>>(p, Q, K, V);
    cudaError_t code = cudaPeekAtLastError();
    if (code != cudaSuccess) return code;
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)chip->multiprocessors);
    config.blockDim = dim3(128);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, repair_rows<X>, a, p);
}

template <typename T> cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, void *memory, cudaStream_t stream)
{
    const attn_geometry &g = a.g;
    const int D = class_of(g.dims);
    if (D == 64) return launch<T, shape_64>(chip, a, memory, stream);
    if (D == 256) return launch<T, shape_256>(chip, a, memory, stream);
    /* Wide tiles, except where a mask's edge would waste much of them: a sequence's own length decides. */
    if (g.left >= ATTN_UNBOUNDED && g.right >= ATTN_UNBOUNDED) return launch<T, shape_128_wide>(chip, a, memory, stream);
    if (!g.cu_k && !g.seqlens_k)
        return g.dims.Sk < LONG ? launch<T, shape_128>(chip, a, memory, stream) : launch<T, shape_128_wide>(chip, a, memory, stream);
    const cudaError_t code = launch<T, shape_128>(chip, a, memory, stream, 0, LONG - 1);
    return code != cudaSuccess || g.dims.Sk < LONG ? code : launch<T, shape_128_wide>(chip, a, memory, stream, LONG);
}

cudaError_t run(const cuda_chip *chip, cudaStream_t stream, const attn_problem *p, void *memory)
{
    const cuda_args a = cuda_args_of(p);
    return p->q.dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(chip, a, memory, stream) : launch_for<__half>(chip, a, memory, stream);
}

} // namespace

extern const cuda_kernel sm90_forward = { "sm90", ATTN_OP_FORWARD, 90, covers, workspace, run };
