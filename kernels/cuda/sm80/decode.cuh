/* decode.cuh: how a block of decode.cu computes attention over its splits (a split is a part of a sequence's keys). The
 * template parameter RING is the class that copies tiles of keys and values to shared memory: copies_by_threads
 * (cp.async, any strides and options, from compute capability 8.0 on) or copies_by_engine (TMA, sm90/decode/decode.cu).
 * Results have the same bits with both classes.
 *
 * RING<T, X> is a block's ring buffer of tiles, alternately of K and of V; X is the shape of the block. Its members
 * are:
 * kept: the part of the ring's state that lasts longer than one split
 * begin(queries): requests the first tiles, and calls queries(), which writes Q to shared memory
 * next<VALUES>(): waits until the next tile (of V if VALUES, otherwise of K) and Q have arrived, and returns the tile
 * clear_tail(tile, j): sets the rows of tile j past the end of the sequence to 0, if the copies have not done so
 * changed(): a thread that has written to a tile's memory calls it before a barrier of the block, so that TMA may
 * overwrite this memory
 * release(): a warp calls it when it has read the tile
 * FEW_ADDRESSES: 1 if registers are scarce, so that a lane keeps few addresses of fragments in registers
 * end(): the block calls it when it has read all tiles */
#ifndef ATTN_SM80_DECODE_CUH
#define ATTN_SM80_DECODE_CUH

#include <type_traits>

#include "decode_places.cuh"
#include "float8.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/rows.cuh"

namespace {

/* ---- The shapes of blocks and their tiles ------------------------------------------------------------------------ */

enum { WARPS = 4, THREADS = 32 * WARPS };

/* How tiles of keys and values are stored in shared memory. KEYS_AS_T: as the 16-bit type T, to which the loader
 * converts float8. KEYS_AS_FLOAT8: as float8, which the kernel converts in registers (float8.cuh). */
enum keys_as { KEYS_AS_T, KEYS_AS_FLOAT8 };

/* A block of decode_stacks() computes this many tiles of 16 rows. The rows belong to several sequences that see the
 * same keys. */
enum { STACK_TILES = 2 };

/* Above head size 256, the warps of a block divide the channels of the head: each warp multiplies WARP_CHANNELS of
 * them. */
enum { WARP_CHANNELS = 128 };

/* The shape of a block: how its warps divide the rows (WM), the keys of a tile (WK) and the columns of V (WD), and how
 * large its tiles are. With float8 keys, a tile has twice as many keys as with 16-bit keys, or the ring has twice as
 * many tiles. If FEW, the block has at most 8 rows, and computes the transposed O^T = V^T P^T. If WIDE_HEAD, each warp
 * multiplies some of the channels (see add_up_scores()). */
template <int D_, bool WIDE, bool SCORE_MODS_, bool PAGED_, keys_as AS, int STACK = 1, bool FEW_ = false> struct shape {
    static const bool FEW = FEW_;
    static const bool WIDE_HEAD = D_ > TILE_HEAD_DIM;
    static_assert(!WIDE_HEAD || (!WIDE && STACK == 1 && AS == KEYS_AS_T), "the only form of wide heads");
    static const int D = D_, WM = WIDE ? 4 : STACK,
                     WD = WIDE_HEAD           ? D / WARP_CHANNELS
                          : D == 256 && !WIDE ? 2
                                              : 1,
                     WK = WIDE || WIDE_HEAD ? 1 : WARPS / WD;
    static const int THREADS = 32 * WM * WK * WD;
    static const bool STACKED = STACK > 1; /* whether the block's STACK tiles of 16 rows belong to several sequences */
    static const bool SCORE_MODS = SCORE_MODS_, PAGED = PAGED_, FLOAT8 = AS == KEYS_AS_FLOAT8;
    static const bool MORE_KEYS = FLOAT8 && !WIDE && D >= 128;
    static const int BM = FEW ? (int)FEW_ROWS : 16 * WM,
                     BN = (WIDE_HEAD          ? 16
                           : D == 256         ? 32
                           : D == 64 && !WIDE ? 128
                                              : 64) *
                          (MORE_KEYS ? 2 : 1),
                     KW = BN / WK;
    static const int SLOTS = (WIDE_HEAD ? 5 : !WIDE ? 4 : D == 64 ? 6 : 3) * (FLOAT8 && !MORE_KEYS ? 2 : 1);
    static const int WIDTH = FLOAT8 ? D / 2 : D; /* number of 16-bit words in a row of a tile of K or V */
};

/* The shape of a block with more than NARROW rows, for head sizes up to 256. Above head size 256 there are no such
 * blocks, and this is the shape of a block with up to NARROW rows. */
template <int D, bool SCORE_MODS, bool PAGED, keys_as AS>
using many_rows_shape = shape<D, (D <= TILE_HEAD_DIM), SCORE_MODS, PAGED, AS>;

template <int D> using stack_shape = shape<D, false, false, true, KEYS_AS_T, STACK_TILES>;

template <int D, bool PAGED, keys_as AS> using few_shape = shape<D, false, false, PAGED, AS, 1, true>;

/* The partial results of each group of SPLIT_GROUP splits (parts of a sequence's keys) are added up first, to one
 * partial result per group. A block computes all splits of a group only if it has at most SPLIT_GROUP_ROWS rows,
 * because the group's sums take shared memory beside the ring of tiles. */
enum { SPLIT_GROUP = 4, SPLIT_GROUP_ROWS = 8 };

/* Number of blocks per multiprocessor. More blocks leave each thread fewer registers. Before compute capability 9.0,
 * shared memory has room for two blocks (above head size 256, for one). */
#if __CUDA_ARCH__ >= 900
template <int D, bool SCORE_MODS> constexpr int blocks_of = D == 1024 ? 1 : D >= 256 || SCORE_MODS ? 2 : 3;
#else
template <int D, bool SCORE_MODS> constexpr int blocks_of = D > TILE_HEAD_DIM ? 1 : 2;
#endif

template <int D> constexpr int threads_of = shape<D, false, false, false, KEYS_AS_T>::THREADS;

/* The scores that each warp has computed from its own channels: for each block of 8 keys, the four accumulators of each
 * lane. Used only for head sizes above 256. */
template <class X> struct scores_of_warps {
    float4 of_lane[X::WIDE_HEAD ? X::WD : 1][X::WIDE_HEAD ? X::KW / 8 : 1][X::WIDE_HEAD ? 32 : 1];
};

template <class X> struct shared {
    struct tiles {
        alignas(128) uint16_t Q[X::BM * X::D];
        alignas(128) uint16_t ring[X::SLOTS][X::BN * X::WIDTH];
        float S[X::SCORE_MODS ? X::THREADS / 32 : 1][16]
               /* each warp's scores, while options (softcap, bias, masks) are applied */
               [X::SCORE_MODS ? X::KW + 4 : 1];
        /* two arrays, because slow warps may still read one tile's scores while other warps write the next tile's */
        scores_of_warps<X> scores[X::WIDE_HEAD ? 2 : 1];
    };
    union { /* O overwrites the tiles of keys and values after the last of them has been read */
        tiles tile;
        float O[X::WK][X::BM][X::D + 4];
    };
    /* m: each row's largest score (base 2) over the keys of one warp; l: each row's sum of exponentials. At the end, m
     * is overwritten by the factor by which the warp's O is multiplied. */
    float m[X::WK][X::BM], l[X::WK][X::BM];
    float top[X::BM], sum[X::BM];
    /* the sum of O over those splits of the current group (of SPLIT_GROUP splits) that the block has already computed;
     * unused for wide heads */
    float split_group_O[X::WIDE_HEAD ? 1 : (int)SPLIT_GROUP_ROWS][X::WIDE_HEAD ? 4 : X::D];
    float2 split_group_ml[SPLIT_GROUP_ROWS];
    int i[X::BM], h[X::BM];
    float slope[X::BM];
    /* for float8 keys: the factor that converts a row's scores to base 2 */
    float factor[X::FLOAT8 ? X::BM : 1];
};

/* ---- Computing one row of a split alone -------------------------------------------------------------------------- */

/* Computes the partial result of query i over the keys `first` to `last` - 1 without tensor cores. Writes this result
 * to O and ml only if it is not finite or if a score is huge, because tensor cores compute all other results. The whole
 * warp calls this function; a lane has N channels. */
template <int N>
__device__ __noinline__ void repair_row(const cuda_args &a, const head_args &x, int64_t i, int64_t first, int64_t last,
                                        float *O, float2 *ml)
{
    const attn_geometry &g = a.g;
    float q[N], o[N] = {}, k[N], v[N], derivative, m = -CUDART_INF_F, l = 0;
    load_row(g.view[ATTN_T_q], x.b, x.h, x.s.q_start + i, g.dims.D, q);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    for (int64_t j = attn_max64(keys.lo, first); j < attn_min64(keys.hi, last); j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_key(g, g.view[ATTN_T_k], x.b, x.hk, x.s.k_start + j, g.dims.D, k);
        const float z = score_of_rows(a, x, i, j, q, k, &derivative);
        const float m_new = z > m || z != z ? z : m;
        const float rescale = m == -CUDART_INF_F ? 0 : expf(m - m_new), e = expf(z - m_new),
                    kept = e * dropout(a, x, i, j);
        load_key(g, g.view[ATTN_T_v], x.b, x.hk, x.s.k_start + j, g.dims.Dv, v);
        l = l * rescale + e;
        for (int c = 0; c < N; c++) o[c] = o[c] * rescale + kept * v[c];
        m = m_new;
    }
    bool finite = l - l == 0 && is_sound_score<false>(m);
    for (int c = 0; c < N; c++) finite &= o[c] - o[c] == 0;
    if (__all_sync(0xffffffff, finite)) return;
    for (int c = 0; c < N; c++)
        if (c * 32 + threadIdx.x % 32 < g.dims.Dv) O[c * 32 + threadIdx.x % 32] = o[c];
    if (threadIdx.x % 32 == 0) *ml = make_float2(m == -CUDART_INF_F ? m : in_base_2(m), l);
}

/* ---- The ring of tiles ------------------------------------------------------------------------------------------- */

struct split_place {
    /* the split (a part of a sequence's keys) has the keys `first` to `last` - 1; `first` is a multiple of BN (keys per
     * tile) */
    int first, last;
    /* tiles: index of the split's first tile of keys; steps: number of tiles of K and of V to load, counted together */
    int tiles, steps;
};

template <class X> DEVICE split_place split_place_of(const group_place &place, int index)
{
    split_place y;
    y.first = place.first + index * place.length;
    y.last = place.last - y.first < place.length ? place.last : y.first + place.length;
    y.tiles = (int)((uint32_t)y.first / X::BN);
    y.steps = 2 * ((int)(((uint32_t)y.last + X::BN - 1) / X::BN) - y.tiles);
    return y;
}

/* Loads the ring's tiles with cp.async. Step 2 j loads K[j], and step 2 j + 1 loads V[j]. */
template <typename T, class X> struct copies_by_threads {
    static const int CHUNK = X::WIDTH, SLOTS = X::SLOTS;
    enum { FEW_ADDRESSES = 0 };
    typedef shared<X> memory;
    struct kept {};
    typedef typename std::conditional<X::FLOAT8, uint8_t, T>::type stored;
    key_loader<stored, X::D, X::THREADS, !X::STACKED, X::PAGED> K, V;
    memory &sm;
    const int tiles, steps;
    int filled, slot, into;

    DEVICE copies_by_threads(kept &, memory &sm_, const cuda_args &a, const head_args &x, const split_place &keys)
        : K(a.g, a.g.view[ATTN_T_k], x.b, x.hk, x.s.k_start, x.s.Sk, a.g.dims.D),
          V(a.g, a.g.view[ATTN_T_v], x.b, x.hk, x.s.k_start, x.s.Sk, a.g.dims.Dv), sm(sm_), tiles(keys.tiles),
          steps(keys.steps)
    {
    }

    template <bool VALUES> DEVICE void fill()
    {
        if (filled < steps) {
            if (VALUES) V.template load<X::BN>(sm.tile.ring[into], (tiles + filled / 2) * X::BN);
            else K.template load<X::BN>(sm.tile.ring[into], (tiles + filled / 2) * X::BN);
        }
        cp_async_commit();
        filled++;
        into = into + 1 == SLOTS ? 0 : into + 1;
    }

    template <class F> DEVICE void begin(F queries)
    {
        filled = slot = into = 0;
        if (!X::FLOAT8) queries();
#pragma unroll
        for (int n = 0; n < SLOTS - 1; n++) {
            if (n % 2) fill<true>();
            else fill<false>();
        }
        if (X::FLOAT8) queries();
    }

    template <bool VALUES> DEVICE uint16_t *next()
    {
        cp_async_wait<SLOTS - 2>();
        /* after this barrier the tile has arrived for all threads, and no thread reads the previous tile */
        __syncthreads();
        uint16_t *const tile = sm.tile.ring[slot];
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        fill<(SLOTS - 1) % 2 != VALUES>();
        return tile;
    }

    DEVICE void clear_tail(uint16_t *, int) const {}
    DEVICE void changed() const {}
    DEVICE void release() const {}
    DEVICE void end() const
    {
        cp_async_wait<0>();
        __syncthreads();
    }
};

/* The functions below load fragments of a tile of Q, K or V. A tile is stored in chunks of CHUNK columns, one after the
 * other (tile.cuh). `chunk` is the chunk's offset in elements. If FEW_ADDRESSES, a lane keeps one address in a
 * register, and computes other addresses from it with one instruction each. */
template <int D, bool FEW_ADDRESSES>
DEVICE void queries_of(uint32_t (&a)[4], const uint16_t *tile, int m, int k, int lane)
{
    if constexpr (FEW_ADDRESSES) a_rows<D>(a, smem_addr(tile), m, k, lane);
    else a_rows<D>(a, tile, m, k, lane);
}
/* Loads operand A for 8 rows of Q; the operand's rows 8 to 15 are copies of rows 0 to 7. */
template <int D> DEVICE void few_queries_of(uint32_t (&a)[4], const uint16_t *tile, int k, int lane)
{
    ldmatrix_x4(a, smem_addr(tile) + lane % 8 * (D * 2) + (((lane / 16 ^ lane % 8) * 16) ^ (k * 2)));
}
template <int WIDTH, int CHUNK, int ROWS, bool FEW_ADDRESSES>
DEVICE void keys_of(uint32_t (&b)[4], const uint16_t *tile, int n, int k, int lane)
{
    const int chunk = k / CHUNK * (ROWS * CHUNK);
    if constexpr (FEW_ADDRESSES && CHUNK >= 64) b_rows<CHUNK>(b, smem_addr(tile) + chunk * 2, n, k % CHUNK, lane);
    else b_rows<CHUNK>(b, tile + chunk, n, k % CHUNK, lane);
}
template <int WIDTH, int CHUNK, int ROWS, bool FEW_ADDRESSES>
DEVICE void values_of(uint32_t (&b)[4], const uint16_t *tile, int first, int n, int k, int lane)
{
    const int chunk = CHUNK == WIDTH ? 0 : (first / CHUNK + n / CHUNK) * (ROWS * CHUNK),
              column = CHUNK == WIDTH ? first + n : n % CHUNK;
    if constexpr (FEW_ADDRESSES && CHUNK >= 64) b_columns<CHUNK>(b, smem_addr(tile) + chunk * 2, column, k, lane);
    else b_columns<CHUNK>(b, tile + chunk, column, k, lane);
}

/* Loads V^T as operand A: columns m .. m + 15 of V, and 16 rows from k on. */
template <int WIDTH, int CHUNK, int ROWS>
DEVICE void turned_values_of(uint32_t (&a)[4], const uint16_t *tile, int first, int m, int k, int lane)
{
    const int chunk = CHUNK == WIDTH ? 0 : (first / CHUNK + m / CHUNK) * (ROWS * CHUNK),
              column = CHUNK == WIDTH ? first + m : m % CHUNK;
    if constexpr (CHUNK >= 64) a_columns<CHUNK>(a, smem_addr(tile) + chunk * 2, column, k, lane);
    else a_columns<CHUNK>(a, tile + chunk, column, k, lane);
}

/* ---- The computation of a split ---------------------------------------------------------------------------------- */

template <class X> DEVICE void load_queries(uint16_t *to, const cuda_args &a, const group_place &place, int sequences)
{
    const int D = X::D, BM = X::BM;
    const attn_view &q = a.g.view[ATTN_T_q];
    const int group = (int)a.g.group, columns = (int)a.g.dims.D;
    for (int n = threadIdx.x; n < BM * (D / 8); n += X::THREADS) {
        const int r = n / (D / 8), c = n % (D / 8), sequence = X::STACKED ? r / place.rows : 0,
                  own = r - sequence * place.rows, i = own / group;
        const bool inside = X::STACKED ? sequence < sequences : r < place.rows;
        const int64_t line =
            inside ? attn_at(&q, place.x.b + sequence, place.x.h + (own - i * group), place.x.s.q_start + i) + c * 8
                   : 0;
        const uint16_t *from = (const uint16_t *)q.data + line;
        if (q.dtype != ATTN_F8E4M3 && columns % 8 == 0 && (uint64_t)from % 16 == 0) {
            cp_async_16(smem_addr(to + at<D>(r, c)), from, inside && c * 8 < columns);
            continue;
        }
#pragma unroll 1
        for (int e = 0; e < 8; e++) {
            uint16_t x = 0;
            if (inside && c * 8 + e < columns)
                x = q.dtype == ATTN_F8E4M3 ? __half_as_ushort(__float2half_rn(load_float(q.dtype, q.data, line + e)))
                                           : from[e];
            to[at<D>(r, c) + e] = x;
        }
    }
}

/* Multiplies eight bfloat16 numbers of a row by a power of two, and converts them to float16. The power makes the row's
 * largest number 2^14 or more. `factor` is divided by the same power. LANES lanes share a row. Infinities and NaN stay.
 * Returns false if the conversion is not exact: if a number is 2^31 times smaller than the largest, or if `factor`
 * leaves float32's range. */
template <int LANES> DEVICE bool scaled_halves_of(uint32_t (&word)[4], float &factor)
{
    uint32_t most = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) most = max(most, max(word[w] & 0x7fff, word[w] >> 16 & 0x7fff));
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, step));
    const int exponent = (int)(most >> 7), power = most == 0 || exponent == 255 ? 0 : 141 - max(exponent, 1);
    /* 2^power may exceed the range of a float, so it is split into two factors */
    const int half = power / 2, rest = power - half;
    const float up = __int_as_float((127 + half) << 23), up_more = __int_as_float((127 + rest) << 23);
    factor = factor * __int_as_float((127 - half) << 23) * __int_as_float((127 - rest) << 23);
    bool exact = factor > 0 && factor < CUDART_INF_F;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float low = __uint_as_float(word[w] << 16), high = __uint_as_float(word[w] & 0xffff0000);
        const float2 want = make_float2(low * up * up_more, high * up * up_more);
        word[w] = pack<__half>(want.x, want.y);
        const float2 got = floats_of_halves(word[w]);
        exact &= exponent == 255 ||
                 (got.x == want.x && got.y == want.y && (got.x == 0) == (low == 0) && (got.y == 0) == (high == 0));
    }
    return exact;
}

/* Loads Q for float8 keys, in the order of channels that scores_of_float8() needs. Q becomes float16, because
 * converting float8 keys to float16 takes a third of the instructions that bfloat16 takes. If T is bfloat16, sm.factor
 * gets for each row the factor that converts its scores to base 2. Returns false if such a Q cannot be converted
 * exactly: Q then stays bfloat16, and the factor of all rows is `c`. A negative scale changes the sign of Q; a scale of
 * 0 makes its finite numbers 0. */
template <typename T, class X>
DEVICE bool load_permuted_queries(shared<X> &sm, const cuda_args &a, const group_place &place, float c)
{
    const int D = X::D, BM = X::BM, PIECES = D / 8;
    const bool SCALED = !std::is_same<T, __half>::value;
    static_assert(BM * PIECES % THREADS == 0, "whole warps");
    const attn_view &q = a.g.view[ATTN_T_q];
    const int group = (int)a.g.group, columns = (int)a.g.dims.D;
    const uint32_t sign = place.x.scale < 0 ? 0x80008000 : 0;
    bool exact = true;
    for (bool halves = true;; halves = false) {
#pragma unroll 1
        for (int n = threadIdx.x; n < BM * PIECES; n += THREADS) {
            const int r = n / PIECES, p = n % PIECES, i = r / group;
            uint32_t word[4] = {};
            if (r < place.rows && p * 8 < columns) {
                const int64_t line = attn_at(&q, place.x.b, place.x.h + (r - i * group), place.x.s.q_start + i) + p * 8;
                const uint16_t *from = (const uint16_t *)q.data + line;
                if (q.dtype != ATTN_F8E4M3 && columns % 8 == 0 && (uint64_t)from % 16 == 0) {
                    const uint4 piece = *(const uint4 *)from;
                    word[0] = piece.x, word[1] = piece.y, word[2] = piece.z, word[3] = piece.w;
                } else {
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        if (p * 8 + e < columns)
                            word[e / 2] |= (uint32_t)(q.dtype == ATTN_F8E4M3
                                                          ? widened<T>(((const uint8_t *)q.data)[line + e])
                                                          : from[e])
                                           << e % 2 * 16;
                }
            }
            if (place.x.scale == 0) {
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    if (!not_finite<T>((uint16_t)word[w])) word[w] &= 0xffff0000;
                    if (!not_finite<T>((uint16_t)(word[w] >> 16))) word[w] &= 0xffff;
                }
            }
            if constexpr (SCALED)
                if (halves) {
                    float factor = c;
                    exact &= scaled_halves_of<PIECES>(word, factor);
                    if (p == 0) sm.factor[r] = factor;
                }
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const int there = permuted_word(p % 2 * 4 + w);
                *(uint32_t *)(sm.tile.Q + at<D>(r, p / 2 * 2 + there / 4) + there % 4 * 2) = word[w] ^ sign;
            }
        }
        if (!SCALED || !halves || !__syncthreads_or(!exact)) return halves;
    }
}

/* Returns channels d to d + 3 of row r of O: the sum of the warps' O, each times the warp's factor. */
template <class X> DEVICE float4 sum_of_warps(const shared<X> &sm, int r, int d)
{
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < X::WK; w++) {
        const float4 part = *(const float4 *)&sm.O[w][r][d];
        const float factor = sm.m[w][r];
        o = make_float4(fmaf(factor, part.x, o.x), fmaf(factor, part.y, o.y), fmaf(factor, part.z, o.z),
                        fmaf(factor, part.w, o.w));
    }
    return o;
}

/* Returns the maximum m (x) and the sum l (y) of row r over all warps. Replaces each warp's m by the factor by which
 * the warp's O must be multiplied. */
template <class X> DEVICE float2 add_up_row(shared<X> &sm, int r, float sink)
{
    float top = sink, sum;
    for (int w = 0; w < X::WK; w++) top = fmaxf(top, sm.m[w][r]);
    const float base = top == -CUDART_INF_F ? 0 : top;
    sum = exp2_fast(sink - base);
    for (int w = 0; w < X::WK; w++) {
        const float factor = exp2_fast(sm.m[w][r] - base);
        sum += factor * sm.l[w][r];
        sm.m[w][r] = factor;
    }
    sm.top[r] = top;
    sm.sum[r] = sum;
    return make_float2(top, sum);
}

DEVICE bool is_finite(const float4 &o)
{
    return o.x - o.x == 0 && o.y - o.y == 0 && o.z - o.z == 0 && o.w - o.w == 0;
}

/* Stores a split's partial result (O, m, l), of at most 8 rows, in the workspace from row `saved` on. Each thread
 * computes its own sums, so no barrier is needed. Returns false if a sum is not finite, or if scores are huge. */
template <class X> DEVICE bool save_sums(const shared<X> &sm, const plan &p, int64_t saved, int rows)
{
    const int D = X::D;
    bool finite = true;
    for (int n = threadIdx.x; n < rows * (D / 4); n += THREADS) {
        const int r = n / (D / 4), d = n % (D / 4) * 4;
        float top = -CUDART_INF_F, sum = 0;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < X::WK; w++) top = fmaxf(top, sm.m[w][r]);
        const float base = top == -CUDART_INF_F ? 0 : top;
#pragma unroll
        for (int w = 0; w < X::WK; w++) {
            const float4 part = *(const float4 *)&sm.O[w][r][d];
            const float factor = exp2_fast(sm.m[w][r] - base);
            sum += factor * sm.l[w][r];
            o = make_float4(fmaf(factor, part.x, o.x), fmaf(factor, part.y, o.y), fmaf(factor, part.z, o.z),
                            fmaf(factor, part.w, o.w));
        }
        *(float4 *)&p.O[(saved + r) * D + d] = o;
        if (d == 0) p.ml[saved + r] = make_float2(top, sum);
        finite &= is_sound_score<false>(top) && sum - sum == 0 && is_finite(o);
    }
    return finite;
}

/* Adds a split's partial result to the sum of the earlier splits of its group; the group's last split stores the sum in
 * row `to` of the workspace. `from_workspace`: the partial result is in the workspace, from row `saved` on, because it
 * was computed a second time; otherwise it is in shared memory. */
template <class X>
DEVICE void add_to_split_group(shared<X> &sm, const plan &p, int rows, bool from_workspace, int64_t saved, bool first,
                               bool last, int64_t to)
{
    const int D = X::D;
    auto split_ml = [&](int r) { return from_workspace ? p.ml[saved + r] : make_float2(sm.top[r], sm.sum[r]); };
    auto split_group_ml = [&](int r) { return first ? make_float2(-CUDART_INF_F, 0) : sm.split_group_ml[r]; };
    __syncthreads(); /* after this barrier the workspace has the rows that repair_row() wrote */
    for (int n = threadIdx.x; n < rows * (D / 4); n += X::THREADS) {
        const int r = n / (D / 4), d = n % (D / 4) * 4;
        const float4 next = from_workspace ? *(const float4 *)&p.O[(saved + r) * D + d] : sum_of_warps(sm, r, d);
        const float4 before = first ? make_float4(0, 0, 0, 0) : *(const float4 *)&sm.split_group_O[r][d];
        const float4 sum = fold(split_group_ml(r).x, split_ml(r).x)(before, next);
        *(float4 *)(last ? &p.O[(to + r) * D + d] : &sm.split_group_O[r][d]) = sum;
    }
    /* after this barrier all threads have read the earlier m and l of the group, which are overwritten below, and the O
     * of the warps, which the next tiles overwrite */
    __syncthreads();
    if ((int)threadIdx.x < rows) {
        const int r = threadIdx.x;
        const float2 before = split_group_ml(r), next = split_ml(r);
        const fold f(before.x, next.x);
        *(last ? &p.ml[to + r] : &sm.split_group_ml[r]) = make_float2(f.m, f(before.y, next.y));
    }
}

template <class X> DEVICE void name_rows(shared<X> &sm, const cuda_args &a, const group_place &place, int rows)
{
    const int group = (int)a.g.group;
    for (int r = threadIdx.x; r < X::BM; r += X::THREADS) {
        const int own = X::STACKED ? r % place.rows : r;
        sm.i[r] = own / group;
        sm.h[r] = (int)place.x.h + own % group;
        sm.slope[r] = X::SCORE_MODS && r < rows && a.g.view[ATTN_T_alibi_slopes].data
                          ? head_args_of(a, place.x.b, sm.h[r]).slope
                          : 0;
    }
}

template <typename T, class X> DEVICE void clear_values(uint16_t *values)
{
    uint8_t *const bytes = (uint8_t *)values;
    for (int n = threadIdx.x; n < X::BN * X::D; n += X::THREADS)
        if constexpr (X::FLOAT8) {
            if ((bytes[n] & 0x7f) == 0x7f) bytes[n] = 0;
        } else {
            if (not_finite<T>(values[n])) values[n] = 0;
        }
}

template <int DT> DEVICE void multiply_rows(float (&O)[DT][4], const float (&by)[2])
{
#pragma unroll
    for (int dt = 0; dt < DT; dt++)
#pragma unroll
        for (int e = 0; e < 4; e++) O[dt][e] *= by[e / 2];
}

template <int DT> DEVICE void multiply_row(float (&O)[DT][4], int half, float by)
{
#pragma unroll
    for (int dt = 0; dt < DT; dt++) {
        O[dt][half * 2] *= by;
        O[dt][half * 2 + 1] *= by;
    }
}

/* Multiplies each row of O by its own factor. The warp holds O^T (transposed), and lane 4 r passes the factor of row
 * r. */
template <int DT> DEVICE void multiply_turned_rows(float (&O)[DT][4], float by)
{
    const int t = threadIdx.x % 4;
    const float by_row[2] = { __shfl_sync(0xffffffff, by, t * 8), __shfl_sync(0xffffffff, by, t * 8 + 4) };
#pragma unroll
    for (int dt = 0; dt < DT; dt++)
#pragma unroll
        for (int e = 0; e < 4; e++) O[dt][e] *= by_row[e % 2];
}

/* Writes a warp's O^T to shared memory. With t = lane % 4, a lane has rows 2 t and 2 t + 1. Of every 16 channels it has
 * two: lane / 4 and lane / 4 + 8, or with float8 keys lane / 4 * 2 and lane / 4 * 2 + 1. */
template <class X, int DT>
DEVICE void share_turned_sums(shared<X> &sm, const float (&O)[DT][4], int d0, int wk, int rows)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int r = lane % 4 * 2 + e;
        if (r >= rows) continue;
#pragma unroll
        for (int dt = 0; dt < DT; dt += X::FLOAT8 ? 2 : 1)
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                if constexpr (X::FLOAT8)
                    *(float2 *)&sm.O[wk][r][d0 + dt * 16 + lower * 16 + lane / 4 * 2] = make_float2(
                        O[dt][lower * 2 + e], O[dt + 1][lower * 2 + e]);
                else sm.O[wk][r][d0 + dt * 16 + lower * 8 + lane / 4] = O[dt][lower * 2 + e];
            }
    }
}

/* Writes the warp's O, m and l (summed over its lanes) to shared memory, as partial sum number `wk` of the block. The
 * warp has the rows from m0 on and the columns from d0 on. */
template <class X, int DT>
DEVICE void share_sums(shared<X> &sm, const float (&O)[DT][4], const float (&m)[2], float (&l)[2], int m0, int d0,
                       int wk, int rows)
{
    const int lane = threadIdx.x % 32;
    if constexpr (X::FEW) share_turned_sums(sm, O, d0, wk, rows);
#pragma unroll
    for (int half = 0; half < (X::FEW ? 1 : 2); half++) {
        const int r = m0 + half * 8 + lane / 4;
        l[half] += __shfl_xor_sync(0xffffffff, l[half], 1);
        l[half] += __shfl_xor_sync(0xffffffff, l[half], 2);
        if (r >= rows) continue;
        if (lane % 4 == 0 && d0 == 0) {
            sm.m[wk][r] = m[half];
            sm.l[wk][r] = l[half];
        }
        if constexpr (X::FEW) continue;
        else if constexpr (X::FLOAT8) {
#pragma unroll
            for (int n = 0; n < DT / 2; n++)
                *(float4 *)&sm.O[wk][r][d0 + n * 16 + lane % 4 * 4] = four_channels(O, n, half);
        } else {
#pragma unroll
            for (int dt = 0; dt < DT; dt++)
                *(float2 *)&sm.O[wk][r][d0 + dt * 8 + lane % 4 * 2] = make_float2(O[dt][half * 2], O[dt][half * 2 + 1]);
        }
    }
}

DEVICE void wait_and_let_begin()
{
    wait_for_prerequisites();
    /* wait_for_prerequisites() must come first, because launch_dependents() lets combine_splits() start, which reads
     * lengths that the previous kernel writes. */
    launch_dependents();
}

/* Adds up the scores S that each warp has computed from its channels, in the order of the warps. Two consecutive tiles
 * need different `sums`, because a slow warp may still read the earlier tile's. */
template <class X, int NT> DEVICE void add_up_scores(float (&S)[NT][4], scores_of_warps<X> &sums)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) sums.of_lane[warp][nt][lane] = make_float4(S[nt][0], S[nt][1], S[nt][2], S[nt][3]);
    __syncthreads();
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        float4 sum = sums.of_lane[0][nt][lane];
#pragma unroll
        for (int w = 1; w < X::WD; w++) {
            const float4 more = sums.of_lane[w][nt][lane];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        S[nt][0] = sum.x, S[nt][1] = sum.y, S[nt][2] = sum.z, S[nt][3] = sum.w;
    }
}

/* Computes O += P V with the rows of one tile of V from row k0 on, for the columns of O from column d0 on. */
template <typename T, class X, int CHUNK, bool FEW_ADDRESSES, int DT, int NT>
DEVICE void add_values(float (&O)[DT][4], const float (&P)[NT][4], const uint16_t *values, int d0, int k0, int lane)
{
    const int BN = X::BN, first = X::FLOAT8 ? d0 / 2 : d0;
    const auto turned = [&](uint32_t(&f)[4], int dt, int kk) {
        turned_values_of<X::WIDTH, CHUNK, BN>(f, values, first, dt * 16, k0 + kk * 16, lane);
    };
    const auto columns = [&](uint32_t(&f)[4], int n, int kk) {
        values_of<X::WIDTH, CHUNK, BN, FEW_ADDRESSES>(f, values, first, n * (X::FLOAT8 ? 16 : 8), k0 + kk * 16, lane);
    };
    if constexpr (X::FEW && X::FLOAT8) accumulate_turned_float8(O, P, turned);
    else if constexpr (X::FEW) accumulate_turned<T>(O, P, turned);
    else if constexpr (X::FLOAT8) accumulate_float8(O, P, columns);
    else accumulate<T>(*(float(*)[1][DT][4]) & O, *(const float(*)[1][NT][4]) & P, columns);
}

/* Recomputes some rows of a split, one row per warp: rows whose result is not finite, and rows whose scores are huge.
 * `saved` is the number of the split's first row in the workspace. */
template <class X>
DEVICE void repair_rows(const shared<X> &sm, const cuda_args &a, const plan &p, const group_place &place,
                        const split_place &keys, int64_t saved)
{
    const int N = X::WIDE_HEAD ? X::D / 32 : (int)CHANNELS;
    const attn_view &out = a.g.view[ATTN_T_out];
    for (int r = threadIdx.x / 32; r < place.rows; r += X::THREADS / 32) {
        const head_args y = head_args_of(a, place.x.b, sm.h[r]);
        if (place.splits == 1)
            forward_row<N>(a, y, sm.i[r], out, nullptr, X::SCORE_MODS ? UNSOUND_ROWS_BUT_HUGE : UNSOUND_ROWS);
        else repair_row<N>(a, y, sm.i[r], keys.first, keys.last, p.O + (saved + r) * X::D, p.ml + saved + r);
    }
}

/* Computes attention over the keys of split number `index` of one key/value head. Writes `out` if the sequence has one
 * split, otherwise partial results. If a result is not finite, this function repeats the split with zeros in place of
 * infinities and NaN of V. If X::STACKED, the rows belong to `sequences` neighbouring sequences from `place` on, and
 * decode_splits() repeats splits that are not finite. */
template <typename T, class X, template <typename, class> class RING>
DEVICE void split(const cuda_args &a, const plan &p, const group_place &place, int index, char *memory,
                  typename RING<T, X>::kept &kept, int sequences = 1)
{
    const int THREADS = X::THREADS;
    const int D = X::D, BN = X::BN, KW = X::KW, WK = X::WK, CHUNK = RING<T, X>::CHUNK;
    const int NT = KW / 8, DT = D / (X::FEW ? 16 : 8) / X::WD, HALVES = X::FEW ? 1 : 2;
    const bool FEW_ADDRESSES = RING<T, X>::FEW_ADDRESSES && WK > 1 && !X::STACKED;
    /* whether a lane's two rows of O are rescaled in one loop */
    const bool RESCALE_AT_ONCE = X::STACKED || X::WIDE_HEAD;
    typename RING<T, X>::memory &sm = *reinterpret_cast<typename RING<T, X>::memory *>(memory);
    const attn_geometry &g = a.g;
    const head_args &x = place.x;
    const split_place keys = split_place_of<X>(place, index);
    RING<T, X> ring(kept, sm, a, x, keys);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = X::STACKED ? place.rows * sequences : place.rows;
    const int m0 = warp / (WK * X::WD) * 16, k0 = warp / X::WD % WK * KW, d0 = warp % X::WD * (D / X::WD);
    const bool idle = m0 >= rows;
    const int CHANNELS_OF_WARP = X::WIDE_HEAD ? D / X::WD : D, c0 = X::WIDE_HEAD ? d0 : 0;
    limits limit;
    attn_range open; /* the keys that all rows see; they need no causal or window test */
    const auto prepare_rows = [&] {
        limit = limits_of(g, x.s);
        open = attn_keys_of_all_rows(&g, &x.s, 0, x.s.Sq);
        name_rows(sm, a, place, rows);
    };
    const bool single = !X::STACKED && place.splits == 1,
               takes_split_groups = !X::STACKED && !X::WIDE_HEAD && p.splits_per_block > 1;
    const float c = X::SCORE_MODS               ? 1
                    : X::FLOAT8 && x.scale == 0 ? 1
                    : X::FLOAT8                 ? fabsf(x.scale) * LOG2E
                                                : x.scale * LOG2E;

    bool halves = true; /* only used with float8 keys: whether Q is float16; if not, Q has type T */
    const auto load_rows = [&] {
        if (X::FEW) prepare_rows();
        if constexpr (X::FLOAT8) halves = load_permuted_queries<T, X>(sm, a, place, c);
        else load_queries<X>(sm.tile.Q, a, place, sequences);
    };
    if (!X::FEW) prepare_rows();
    bool clean = false; /* whether this is the loop's second pass, in which zeros replace infinities and NaN of V */
again:
    float O[1][DT][4] = {}, m[2] = { -CUDART_INF_F, -CUDART_INF_F }, l[2] = {};

    ring.begin(load_rows);
    if (X::FEW && p.ahead) wait_and_let_begin();
    float c_of[2] = { c, c }; /* factors that convert the scores of the lane's two rows to base 2 */
    if constexpr (X::FLOAT8 && !std::is_same<T, __half>::value)
        if (halves)
#pragma unroll
            for (int half = 0; half < HALVES; half++) c_of[half] = sm.factor[m0 + half * 8 + lane / 4];
    for (int j = keys.tiles, end = keys.tiles + keys.steps / 2; j < end; j++) {
        uint16_t *const tile = ring.template next<false>();
        ring.clear_tail(tile, j);
        float S[1][NT][4] = {};
        if (!idle) {
            const auto rows_of_k = [&](uint32_t(&f)[4], int nt, int kk) {
                keys_of<X::WIDTH, CHUNK, BN, FEW_ADDRESSES>(f, tile + c0 * (CHUNK == X::WIDTH ? 1 : BN), k0 + nt * 8,
                                                            kk * 16, lane);
            };
            const auto of_q = [&](uint32_t(&f)[4], int kk) {
                if constexpr (X::FEW) few_queries_of<D>(f, sm.tile.Q, kk * 16, lane);
                else queries_of<D, FEW_ADDRESSES>(f, sm.tile.Q + c0, m0, kk * 16, lane);
            };
            if constexpr (X::FLOAT8) {
                if (halves) scores_of_float8<__half, D>(S[0], of_q, rows_of_k);
                else scores_of_float8<T, D>(S[0], of_q, rows_of_k);
            } else
                scores<T, CHANNELS_OF_WARP>(
                    S, [&](uint32_t(&f)[4], int, int kk) { of_q(f, kk); }, rows_of_k);
            if constexpr (X::WIDE_HEAD) add_up_scores<X>(S[0], sm.tile.scores[j % 2]);
            const int column = j * BN + k0;
            if (X::SCORE_MODS) {
                head_args y = x;
                change_scores<false>(S[0], lines_of<KW + 4>(&sm.tile.S[X::SCORE_MODS ? warp : 0]), lane,
                                     [&](int row, int c, float &s) {
                                         const int r = m0 + row, i = sm.i[r], key = column + c;
                                         float derivative;
                                         y.h = sm.h[r];
                                         y.slope = sm.slope[r];
                                         s = score_log2(a, y, limit, r < rows, i, key, s, &derivative);
                                     });
            } else if (!X::STACKED && (j * BN < open.lo || (int64_t)(j + 1) * BN > open.hi)) {
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    const int i = sm.i[m0 + half * 8 + lane / 4], at = column + lane % 4 * 2;
                    hide_outside(S[0], half, i + limit.lo - at, min(i + limit.hi, limit.Sk) - at);
                }
            }

            float rescale[2];
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                /* m is -inf until the row has seen a key; -inf - -inf would be NaN */
                const float m_new = fmaxf(m[half], largest_of_row(S[0], half) * c_of[half]);
                const float base = m_new == -CUDART_INF_F ? 0 : m_new;
                rescale[half] = exp2_fast(m[half] - base);
                const float sum = exponents_of_row(S[0], half, c_of[half], -base);
                l[half] = l[half] * rescale[half] + sum;
                m[half] = m_new;
                if (!X::FEW && !RESCALE_AT_ONCE && !(X::FLOAT8 && __all_sync(0xffffffff, rescale[half] == 1)))
                    multiply_row(O[0], half, rescale[half]);
            }
            if constexpr (X::FEW) {
                if (!__all_sync(0xffffffff, rescale[0] == 1)) multiply_turned_rows(O[0], rescale[0]);
            } else if (RESCALE_AT_ONCE && !__all_sync(0xffffffff, rescale[0] == 1 && rescale[1] == 1))
                multiply_rows(O[0], rescale);
            if (X::SCORE_MODS && a.drop_below)
                drop(S[0], reinterpret_cast<uint32_t *>(&sm.tile.S[X::SCORE_MODS ? warp : 0]), a.drop_scale, lane,
                     [&](int row, int eighth) {
                         const int r = m0 + row;
                         return kept_of(a, dropout_head(a, x.b, sm.h[r]), sm.i[r], column / 8 + eighth);
                     });
        }

        ring.release();
        uint16_t *const values = ring.template next<true>();
        ring.clear_tail(values, j);
        if (clean) {
            clear_values<T, X>(values);
            ring.changed();
            __syncthreads();
        }

        if (!idle) add_values<T, X, CHUNK, FEW_ADDRESSES>(O[0], S[0], values, d0, k0, lane);
        ring.release();
    }

    ring.end();
    share_sums<X>(sm, O[0], m, l, m0, d0, warp / X::WD % WK, rows);
    ring.changed();
    __syncthreads();
    const int64_t saved = place.saved + (int64_t)index * place.rows;
    /* number of workspace rows from one sequence's partial results to the next sequence's */
    const int64_t each = X::STACKED ? g.dims.Hk * p.splits * place.rows : 0;
    const auto saved_row = [&](int r) {
        return X::STACKED ? saved + r / place.rows * each + r % place.rows : saved + r;
    };
    if constexpr (X::FEW)
        if (!single && !clean && !takes_split_groups) {
            if (!__syncthreads_or(!save_sums(sm, p, saved, rows))) return;
            clean = true;
            goto again;
        }
    if ((int)threadIdx.x < rows) {
        const int r = threadIdx.x;
        /* if the sequence has several splits (parts of its keys), combine_splits() adds the sink */
        const float sink = single ? sink_in_base_2(sink_of(a, sm.h[r])) : -CUDART_INF_F;
        const float2 ml = add_up_row(sm, r, sink);
        if (!single && (clean || !takes_split_groups)) p.ml[saved_row(r)] = ml;
        const attn_view &lse = g.view[ATTN_T_lse];
        if (single && lse.data)
            ((float *)lse.data)[attn_at(&lse, x.b, sm.h[r], x.s.q_start + sm.i[r])] = lse_of_sum(ml.x, ml.y);
    }
    __syncthreads();

    const attn_view &out = g.view[ATTN_T_out];
    bool finite = true;
    /* bit n: a result of sequence n of the stack (sequences that are computed together) is not finite */
    uint32_t not_finite_of = 0;
    for (int n = threadIdx.x; n < rows * (D / 4); n += THREADS) {
        const int r = n / (D / 4), d = n % (D / 4) * 4;
        const float4 o = sum_of_warps(sm, r, d);
        const float sum = sm.sum[r], top = sm.top[r];
        const bool ok = is_sound_score<X::SCORE_MODS>(top) && sum - sum == 0 && is_finite(o) &&
                        (X::SCORE_MODS || !single || top != -CUDART_INF_F || !sees_keys(g, x.s, sm.i[r]));
        finite &= ok;
        if (X::STACKED && !ok) not_finite_of |= 1u << r / place.rows;
        if (!single) {
            if (clean || !takes_split_groups) *(float4 *)&p.O[saved_row(r) * D + d] = o;
        } else if (out.data) {
            const float factor = sum == 0 ? 0 : x.v_scale / sum, value[4] = { o.x, o.y, o.z, o.w };
            const int64_t to = attn_at(&out, x.b, sm.h[r], x.s.q_start + sm.i[r]) + d;
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (d + e < g.dims.Dv) store_float(out.dtype, out.data, to + e, value[e] * factor);
        }
    }
    if constexpr (X::STACKED) {
        if (__syncthreads_or(!finite))
            for (int n = 0; n < sequences; n++)
                if (__syncthreads_or(not_finite_of >> n & 1) && threadIdx.x == 0)
                    p.ml[saved + n * each] = make_float2(CUDART_NAN_F, CUDART_NAN_F);
        /* all threads have passed a barrier since they read m, so the caller may overwrite m without another barrier */
        return;
    }
    if (clean) {
        __syncthreads();
        repair_rows(sm, a, p, place, keys, saved);
    } else if (__syncthreads_or(!finite)) {
        clean = true;
        goto again;
    }
    if (takes_split_groups && !single) {
        const int rank = index % SPLIT_GROUP;
        add_to_split_group(sm, p, rows, clean, saved, rank == 0, rank == SPLIT_GROUP - 1 || index == place.splits - 1,
                           saved - (int64_t)rank * rows);
    }
}

template <typename T, int D, bool SCORE_MODS, keys_as AS, template <typename, class> class RING>
constexpr size_t shared_bytes()
{
    const size_t narrow = sizeof(typename RING<T, shape<D, false, SCORE_MODS, false, AS>>::memory),
                 wide = sizeof(typename RING<T, many_rows_shape<D, SCORE_MODS, false, AS>>::memory);
    return narrow > wide ? narrow : wide;
}

/* The code of a block of decode_stacks(): computes split number `index` of one key/value head for a stack (sequences
 * whose common keys are read once). Neighbouring sequences that share the split are computed together. If the result of
 * a sequence is not finite, the sum l of its first row becomes NaN, and decode_splits() computes the split again for
 * this sequence. */
template <typename T, class X, template <typename, class> class RING, class KEPT>
DEVICE void walk_stack(const cuda_args &a, const plan &p, char *memory, KEPT kept)
{
    const int B = (int)a.g.dims.B, Hk = (int)a.g.dims.Hk, stacks = (B + p.stack - 1) / p.stack;
    const int first = (int)(blockIdx.x % stacks) * p.stack, hk = (int)(blockIdx.x / stacks % Hk),
              index = (int)(blockIdx.x / stacks / Hk), lane = threadIdx.x % 32;
    uint32_t shares = __ballot_sync(0xffffffff, lane < p.stack && splits_shared(a, p, first + lane, hk).has(index));
    while (shares) { /* bit s of `shares` is 1 if sequences `first` + s and `first` + s - 1 share the split */
        /* a run of n 1-bits stands for n + 1 neighbouring sequences, because each bit says that two neighbours share
         * the split */
        const int begin = __ffs(shares) - 2, length = __ffs(~(shares >> (begin + 1)));
        split<T, X, RING>(a, p, group_place_of(a, p, first + begin, hk), index, memory, kept, length);
        shares &= ~0u << (begin + length - 1) << 1;
        __syncthreads();
    }
}

inline int64_t blocks_of_stacks(const attn_dims &d, const plan &p)
{
    return attn_tiles(d.B, p.stack) * d.Hk * p.splits;
}

inline dim3 grid_of_splits(const attn_dims &d, const plan &p, int64_t blocks)
{
    return p.few ? dim3((unsigned)d.Hk, (unsigned)p.walkers, (unsigned)d.B) : dim3((unsigned)blocks);
}

/* The code of a block of decode_splits(): computes the block's splits (parts of a sequence's keys). */
template <typename T, int D, bool SCORE_MODS, bool PAGED, keys_as AS, template <typename, class> class RING,
          class KEPT_NARROW, class KEPT_WIDE>
DEVICE void walk_splits(const cuda_args &a, const plan &p, char *memory, KEPT_NARROW narrow, KEPT_WIDE wide)
{
    const bool STACKS = PAGED && !SCORE_MODS && AS == KEYS_AS_T && D <= TILE_HEAD_DIM;
    const int Hk = (int)a.g.dims.Hk, slot = (int)(blockIdx.x / Hk), hk = (int)(blockIdx.x % Hk);
    int b, index;
    if (!p.early) wait_for_prerequisites();
    if (a.g.dims.packed) {
        b = sequence_of_tile(a.g.cu_k, a.g.dims.B, p.unit, p.extra, slot);
        index = slot - (a.g.cu_k[b] / p.unit + p.extra * b);
    } else {
        b = slot / p.walkers;
        index = slot % p.walkers * p.splits_per_block;
    }
    const group_place place = group_place_of(a, p, b, hk);
    wait_and_let_begin();
    if (place.rows == 0) return;
    int end = min(index + p.splits_per_block, place.splits), step = 1;
    /* Splits that decode_stacks() has computed. `before`: splits that this sequence shares with the previous sequence
     * of the batch; `after`: splits that it shares with the next one. */
    split_range before = {}, after = {};
    if constexpr (STACKS)
        if (p.stack) {
            before = splits_shared(a, p, b, hk), after = splits_shared(a, p, b + 1, hk);
            end = place.splits, step = p.walkers;
        }
    if (place.rows <= NARROW)
#pragma unroll 1
        for (; index < end; index += step) {
            /* find the block's next split that decode_stacks() has not computed; the warp tests 32 splits at a time */
            if constexpr (STACKS)
                if (p.stack) {
                    const int lane = threadIdx.x % 32, own = index + lane * step;
                    bool done = own >= end;
                    if (before.has(own) || after.has(own)) {
                        const float sum = p.ml[place.saved + (int64_t)own * place.rows].y;
                        done = sum == sum; /* the sum l is NaN if decode_stacks() could not compute the split */
                    }
                    const uint32_t left = __ballot_sync(0xffffffff, !done);
                    index += (left ? __ffs(left) - 1 : 31) * step;
                    if (!left) continue;
                    /* after this barrier no thread reads the sums of the previous split */
                    __syncthreads();
                }
            split<T, shape<D, false, SCORE_MODS, PAGED, AS>, RING>(a, p, place, index, memory, narrow);
        }
    else if constexpr (D <= TILE_HEAD_DIM)
        if (index < end) split<T, many_rows_shape<D, SCORE_MODS, PAGED, AS>, RING>(a, p, place, index, memory, wide);
}

/* The code of a block of decode_few(): computes splits of at most 8 rows. If p.ahead is true, the stream's previous
 * kernel writes nothing that this kernel reads. The block then begins to copy keys at once, and waits for the previous
 * kernel only before it writes (in split()). */
template <typename T, int D, bool PAGED, keys_as AS, template <typename, class> class RING, class KEPT>
DEVICE void walk_few(const cuda_args &a, const plan &p, char *memory, KEPT kept)
{
    int index = (int)blockIdx.y * p.splits_per_block;
    if (!p.early && !p.ahead) wait_for_prerequisites();
    const group_place place = few_place_of(a, p, (int)blockIdx.z, (int)blockIdx.x);
    if (!p.ahead || index >= place.splits) wait_and_let_begin();
    const int end = min(index + p.splits_per_block, place.splits);
#pragma unroll 1
    for (; index < end; index++) split<T, few_shape<D, PAGED, AS>, RING>(a, p, place, index, memory, kept);
}

} // namespace

#endif
