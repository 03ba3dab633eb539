/* decode.cu: forward of few queries over many keys: decoding, speculation, short questions to a long context.
 *
 * There is nothing to reuse but K and V themselves, so time is the reading of K and V, once. Hence:
 *
 *   All query heads of a key/value head and all queries of a sequence are the rows of one tile ("packed GQA"): row r is query r / G of
 *   head r % G of the group. A sequence of at most DECODE_ROWS rows is decoded here; any other is some other kernel's.
 *   A sequence's keys are cut into splits, a block each. A block leaves O (not divided), m and l of its split in the workspace, and
 *   combine_splits() adds them up in the order of the keys (Flash-Decoding, Dao et al. 2023; FlashAttention-2, arXiv:2307.08691,
 *   section 3.2). A sequence of one split is written at once.
 *   Splits are added up by split groups of SPLIT_GROUP neighbours, then the groups. Where a batch gives blocks enough, a block takes all of one, split
 *   after split, and leaves their sum: the same additions in the same order, and fewer partial results.
 *
 * A block is four warps, and holds tiles of BN keys in a ring, K and V by turns:
 *
 *     load Q, K[0];  load V[0];  load K[1]                       one group of copies a slot
 *     for j = 0 .. :  wait K[j];  load V[j+1]                    SLOTS - 1 groups are always on their way
 *                     S = Q K[j]^T;  mask;  m, l, P = softmax_step(S)
 *                     wait V[j];  load K[j+2];  O = rescale O + P V[j]
 *     add up the warps' O, in order
 *
 * Up to 16 rows: each warp takes a part of the tile's keys for all rows, with m, l and O of its own. Up to 64: each
 * warp takes 16 of the rows for all keys. Three blocks fit on a multiprocessor of Hopper, so that one that begins
 * or ends does not leave the memory idle. K and V are the first to leave the L2, so that the partial results stay
 * in it.
 *
 * Sequences of a batch that share a prefix (decode_places.cuh) have it read once for several of them: decode_stacks() comes
 * first and computes such splits for the rows of all, one below the other, each row as it would be alone; decode_splits()
 * leaves them out.
 *
 * Answers depend on the problem alone: where the splits are follows from the keys that the sequence's queries see
 * and from its number of rows (split_keys()), never from the batch or the device. A packed problem may hold
 * sequences of either kind; then the other kernel runs first and leaves out those that are decoded here
 * (cuda_chip::decode_rows).
 *
 * Keys and values in float8 stay that in shared memory, so their tiles cost half the reading (float8.cuh): a form of its own, which
 * computes P V in float16. What has options takes the other form, where the loader widens them one by one.
 *
 * As in forward.cu there is a form with options, and a block whose result is not finite goes over its split once
 * more with zeros for the values that are not, then computes one by one the rows that see one. */
#include <atomic>
#include <type_traits>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/simple/rows.cuh"
#include "decode.h"
#include "decode_places.cuh"
#include "float8.cuh"

namespace {

/* ---- Tiles ------------------------------------------------------------------------------------------------------- */

enum { WARPS = 4, THREADS = 32 * WARPS };

/* How keys and values lie in shared memory: as T, which anything becomes, or as float8, which becomes T in registers
 * (float8.cuh). */
enum keys_as { KEYS_AS_T, KEYS_AS_FLOAT8 };

/* Rows of several sequences over the same keys (decode_stacks()): tiles of 16. */
enum { STACK_TILES = 2 };

/* WM warps share the rows, WK the keys of a tile, WD the columns of V. A tile of float8 has twice the keys, or the ring twice
 * the slots. */
template <int D_, bool WIDE, bool SCORE_MODS_, bool PAGED_, keys_as AS, int STACK = 1> struct shape {
    static const int D = D_, WM = WIDE ? 4 : STACK, WD = D == 256 && !WIDE ? 2 : 1, WK = WIDE ? 1 : WARPS / WD;
    static const int THREADS = 32 * WM * WK * WD;
    static const bool STACKED = STACK > 1; /* 16 rows and four warps, STACK times */
    static const bool SCORE_MODS = SCORE_MODS_, PAGED = PAGED_, FLOAT8 = AS == KEYS_AS_FLOAT8;
    static const bool MORE_KEYS = FLOAT8 && !WIDE && D >= 128;
    static const int BM = 16 * WM,
                     BN = (D == 256           ? 32
                           : D == 64 && !WIDE ? 128
                                              : 64) *
                          (MORE_KEYS ? 2 : 1),
                     KW = BN / WK;
    static const int SLOTS = (!WIDE ? 4 : D == 64 ? 6 : 3) * (FLOAT8 && !MORE_KEYS ? 2 : 1);
    static const int WIDTH = FLOAT8 ? D / 2 : D; /* of a row of the ring, in 16 bits */
};

/* Splits that are added up together; rows that a block may have which takes a whole split group (its sums lie in shared
 * memory beside the ring). */
enum { SPLIT_GROUP = 4, SPLIT_GROUP_ROWS = 8 };

/* Blocks of a multiprocessor, which bounds registers. Before compute capability 9.0 shared memory holds two at most. */
#if __CUDA_ARCH__ >= 900
template <int D, bool SCORE_MODS> constexpr int blocks_of = D == 256 || SCORE_MODS ? 2 : 3;
#else
template <int D, bool SCORE_MODS> constexpr int blocks_of = 2;
#endif

template <class X> struct shared {
    struct tiles {
        alignas(128) uint16_t Q[X::BM * X::D];
        alignas(128) uint16_t ring[X::SLOTS][X::BN * X::WIDTH];
        float S[X::SCORE_MODS ? WARPS : 1][16]
               [X::SCORE_MODS ? X::KW + 4 : 1]; /* scores on their way through the options */
    };
    union { /* the sums come when all tiles have gone */
        tiles tile;
        float O[X::WK][X::BM][X::D + 4];
    };
    float m[X::WK][X::BM], l[X::WK][X::BM];      /* of a warp; then m is the factor of its O */
    float top[X::BM], sum[X::BM];                /* of the block */
    float split_group_O[SPLIT_GROUP_ROWS][X::D]; /* the splits of a split group so far */
    float2 split_group_ml[SPLIT_GROUP_ROWS];
    int i[X::BM], h[X::BM]; /* which query a row is, and which head */
    float slope[X::BM];
};

/* ---- One row of one split ---------------------------------------------------------------------------------------- */

/* Keys [first, last) for query i by one warp, skipping hidden ones (see rows.cuh). Written is only what the tensor
 * cores cannot give: a result that is not finite, or of huge scores. */
__device__ __noinline__ void repair_row(const cuda_args &a, const head_args &x, int64_t i, int64_t first, int64_t last,
                                        float *O, float2 *ml)
{
    const attn_geometry &g = a.g;
    float q[CHANNELS], o[CHANNELS] = {}, k[CHANNELS], v[CHANNELS], derivative, m = -CUDART_INF_F, l = 0;
    load_row(g.view[ATTN_T_q], x.b, x.h, x.s.q_start + i, g.dims.D, q);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    for (int64_t j = attn_max64(keys.lo, first); j < attn_min64(keys.hi, last); j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_key(g, g.view[ATTN_T_k], x.b, x.hk, x.s.k_start + j, g.dims.D, k);
        const float z = score(a, x, i, j, dot(q, k), &derivative);
        const float m_new = z > m || z != z ? z : m;
        const float rescale = m == -CUDART_INF_F ? 0 : expf(m - m_new), e = expf(z - m_new),
                    kept = e * dropout(a, x, i, j);
        load_key(g, g.view[ATTN_T_v], x.b, x.hk, x.s.k_start + j, g.dims.Dv, v);
        l = l * rescale + e;
        for (int c = 0; c < CHANNELS; c++) o[c] = o[c] * rescale + kept * v[c];
        m = m_new;
    }
    bool finite = l - l == 0 && (m == -CUDART_INF_F || fabsf(m) < SCORE_MOST);
    for (int c = 0; c < CHANNELS; c++) finite &= o[c] - o[c] == 0;
    if (__all_sync(0xffffffff, finite)) return;
    for (int c = 0; c < CHANNELS; c++)
        if (c * 32 + threadIdx.x % 32 < g.dims.Dv) O[c * 32 + threadIdx.x % 32] = o[c];
    if (threadIdx.x % 32 == 0) *ml = make_float2(m == -CUDART_INF_F ? m : in_base_2(m), l);
}

/* ---- A split ----------------------------------------------------------------------------------------------------- */

/* Q's rows in shared memory, zeros past the last. */
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

/* The same in the order that scores_of_float8() wants; of a negative scale with the other sign, of a scale of 0 as zeros
 * (but for what is not finite, whose row is computed after all). */
template <typename T, int D, int BM>
DEVICE void load_permuted_queries(uint16_t *to, const cuda_args &a, const group_place &place)
{
    const attn_view &q = a.g.view[ATTN_T_q];
    const int group = (int)a.g.group, columns = (int)a.g.dims.D;
    const uint32_t sign = place.x.scale < 0 ? 0x80008000 : 0;
#pragma unroll 1
    for (int n = threadIdx.x; n < BM * (D / 8); n += THREADS) {
        const int r = n / (D / 8), c = n % (D / 8), i = r / group;
        uint32_t word[4] = {};
        if (r < place.rows && c * 8 < columns) {
            const int64_t line = attn_at(&q, place.x.b, place.x.h + (r - i * group), place.x.s.q_start + i) + c * 8;
            const uint16_t *from = (const uint16_t *)q.data + line;
            if (q.dtype != ATTN_F8E4M3 && columns % 8 == 0 && (uint64_t)from % 16 == 0) {
                const uint4 piece = *(const uint4 *)from;
                word[0] = piece.x, word[1] = piece.y, word[2] = piece.z, word[3] = piece.w;
            } else {
#pragma unroll
                for (int e = 0; e < 8; e++)
                    if (c * 8 + e < columns)
                        word[e / 2] |= (uint32_t)(q.dtype == ATTN_F8E4M3
                                                      ? widened<T>(((const uint8_t *)q.data)[line + e])
                                                      : from[e])
                                       << e % 2 * 16;
            }
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            if (place.x.scale == 0) {
                if (!not_finite<T>((uint16_t)word[w])) word[w] &= 0xffff0000;
                if (!not_finite<T>((uint16_t)(word[w] >> 16))) word[w] &= 0xffff;
            }
            const int there = permuted_word(c % 2 * 4 + w);
            *(uint32_t *)(to + at<D>(r, c / 2 * 2 + there / 4) + there % 4 * 2) = word[w] ^ sign;
        }
    }
}

/* The block's O of row r, channels d to d + 3: its warps' sums, each times its factor. */
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

/* Adds a split to those of its split group before it. The last leaves the sum in the workspace, in row `to`, the first
 * split's. `saved` is the split's own row there, which holds it if it was computed twice. */
template <class X>
DEVICE void add_to_split_group(shared<X> &sm, const plan &p, int rows, bool from_workspace, int64_t saved, bool first,
                               bool last, int64_t to)
{
    const int D = X::D;
    auto split_ml = [&](int r) { return from_workspace ? p.ml[saved + r] : make_float2(sm.top[r], sm.sum[r]); };
    auto split_group_ml = [&](int r) { return first ? make_float2(-CUDART_INF_F, 0) : sm.split_group_ml[r]; };
    __syncthreads(); /* rows that were repaired are in the workspace */
    for (int n = threadIdx.x; n < rows * (D / 4); n += THREADS) {
        const int r = n / (D / 4), d = n % (D / 4) * 4;
        const float4 next = from_workspace ? *(const float4 *)&p.O[(saved + r) * D + d] : sum_of_warps(sm, r, d);
        const float4 before = first ? make_float4(0, 0, 0, 0) : *(const float4 *)&sm.split_group_O[r][d];
        const float4 sum = fold(split_group_ml(r).x, split_ml(r).x)(before, next);
        *(float4 *)(last ? &p.O[(to + r) * D + d] : &sm.split_group_O[r][d]) = sum;
    }
    __syncthreads(); /* all have read m, and the ring is free for the next split */
    if ((int)threadIdx.x < rows) {
        const int r = threadIdx.x;
        const float2 before = split_group_ml(r), next = split_ml(r);
        const fold f(before.x, next.x);
        *(last ? &p.ml[to + r] : &sm.split_group_ml[r]) = make_float2(f.m, f(before.y, next.y));
    }
}

DEVICE bool is_finite(const float4 &o)
{
    return o.x - o.x == 0 && o.y - o.y == 0 && o.z - o.z == 0 && o.w - o.w == 0;
}

/* A stack: the rows of `sequences` sequences from place's on. What is not finite is left to decode_splits(). */
template <typename T, class X>
DEVICE void split(const cuda_args &a, const plan &p, const group_place &place, int index, char *memory,
                  int sequences = 1)
{
    const int THREADS = X::THREADS;
    const int D = X::D, BM = X::BM, BN = X::BN, KW = X::KW, WK = X::WK, SLOTS = X::SLOTS;
    const int NT = KW / 8, DT = D / 8 / X::WD;
    shared<X> &sm = *reinterpret_cast<shared<X> *>(memory);
    const attn_geometry &g = a.g;
    const head_args &x = place.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = (int)g.group,
              rows = X::STACKED ? place.rows * sequences : place.rows;
    const int m0 = warp / (WK * X::WD) * 16, k0 = warp / X::WD % WK * KW,
              d0 = warp % X::WD * (D / X::WD); /* this warp's rows, keys, columns */
    const bool idle = m0 >= rows;
    const limits limit = limits_of(g, x.s);
    const attn_range open = attn_keys_of_all_rows(&g, &x.s, 0, x.s.Sq); /* keys that need no causal or window test */
    const int first_key = place.first + index * place.length;
    const int last_key = (int)attn_min64((int64_t)first_key + place.length, place.last);
    const int first = first_key / BN, last = (int)attn_tiles(last_key, BN), steps = 2 * (last - first);
    typedef typename std::conditional<X::FLOAT8, uint8_t, T>::type stored;
    typedef typename std::conditional<X::FLOAT8, uint8_t, T>::type stored;
    key_loader<stored, D, X::THREADS, !X::STACKED, X::PAGED> K(g, g.view[ATTN_T_k], x.b, x.hk, x.s.k_start, x.s.Sk,
                                                               g.dims.D);
    key_loader<stored, D, X::THREADS, !X::STACKED, X::PAGED> V(g, g.view[ATTN_T_v], x.b, x.hk, x.s.k_start, x.s.Sk,
                                                               g.dims.Dv);
    const bool single = !X::STACKED && place.splits == 1, takes_split_groups = !X::STACKED && p.splits_per_block > 1;
    const float c = X::SCORE_MODS               ? 1
                    : X::FLOAT8 && x.scale == 0 ? 1
                    : X::FLOAT8                 ? fabsf(x.scale) * LOG2E
                                                : x.scale * LOG2E;

    for (int r = threadIdx.x; r < BM; r += THREADS) {
        const int own = X::STACKED ? r % place.rows : r;
        sm.i[r] = own / group;
        sm.h[r] = (int)x.h + own % group;
        sm.slope[r] = X::SCORE_MODS && r < rows && g.view[ATTN_T_alibi_slopes].data
                          ? head_args_of(a, x.b, sm.h[r]).slope
                          : 0;
    }
    bool clean = false; /* second time over: V without infinities and NaN */
again:
    float O[1][DT][4] = {}, m[2] = { -CUDART_INF_F, -CUDART_INF_F }, l[2] = {};

    /* The ring. Step 2 j is K[j], step 2 j + 1 is V[j]. */
    int filled = 0, slot = 0, into = 0;
    const auto fill = [&](bool value) {
        if (filled < steps) {
            if (value) V.template load<BN>(sm.tile.ring[into], (first + filled / 2) * BN);
            else K.template load<BN>(sm.tile.ring[into], (first + filled / 2) * BN);
        }
        cp_async_commit();
        filled++;
        into = into + 1 == SLOTS ? 0 : into + 1;
    };
    if (!X::FLOAT8) load_queries<X>(sm.tile.Q, a, place, sequences);
#pragma unroll
    for (int n = 0; n < SLOTS - 1; n++) fill(n % 2);
    if (X::FLOAT8) load_permuted_queries<T, D, BM>(sm.tile.Q, a, place);

    for (int j = first; j < last; j++) {
        cp_async_wait<SLOTS - 2>();
        __syncthreads(); /* K[j] is here, and nobody reads the slot before it any more */
        fill((SLOTS - 1) % 2);

        float S[1][NT][4] = {};
        const uint16_t *tile = sm.tile.ring[slot];
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        if (!idle) {
            const auto rows_of_k = [&](uint32_t(&f)[4], int nt, int kk) {
                b_rows<X::WIDTH>(f, tile, k0 + nt * 8, kk * 16, lane);
            };
            if constexpr (X::FLOAT8)
                scores_of_float8<T, D>(
                    S[0], [&](uint32_t(&f)[4], int kk) { a_rows<D>(f, sm.tile.Q, m0, kk * 16, lane); }, rows_of_k);
            else
                scores<T, D>(
                    S, [&](uint32_t(&f)[4], int, int kk) { a_rows<D>(f, sm.tile.Q, m0, kk * 16, lane); }, rows_of_k);
            const int column = j * BN + k0; /* this warp's first key */
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
                for (int half = 0; half < 2; half++) {
                    const int i = sm.i[m0 + half * 8 + lane / 4], at = column + lane % 4 * 2;
                    hide_outside(S[0], half, i + limit.lo - at, min(i + limit.hi, limit.Sk) - at);
                }
            }

            /* One step of the online softmax; S becomes P. */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float m_new = fmaxf(m[half], largest_of_row(S[0], half) * c); /* m is in base 2 */
                const float base = m_new == -CUDART_INF_F ? 0 : m_new; /* nothing seen yet: -inf - -inf would be NaN */
                const float rescale = exp2_fast(m[half] - base);
                const float sum = exponents_of_row(S[0], half, c, -base);
                l[half] = l[half] * rescale + sum;
                m[half] = m_new;
#pragma unroll
                for (int dt = 0; dt < DT; dt++) {
                    O[0][dt][half * 2] *= rescale;
                    O[0][dt][half * 2 + 1] *= rescale;
                }
            }
            if (X::SCORE_MODS && a.drop_below)
                drop(S[0], reinterpret_cast<uint32_t *>(&sm.tile.S[X::SCORE_MODS ? warp : 0]), a.drop_scale, lane,
                     [&](int row, int eighth) {
                         const int r = m0 + row;
                         return kept_of(a, x.b * g.dims.H + sm.h[r], sm.i[r], column / 8 + eighth);
                     });
        }

        cp_async_wait<SLOTS - 2>();
        __syncthreads(); /* V[j] is here, and nobody reads K[j] any more */
        uint16_t *values = sm.tile.ring[slot];
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        fill(SLOTS % 2);
        if (clean) {
            if constexpr (X::FLOAT8) {
                uint8_t *bytes = (uint8_t *)values;
                for (int n = threadIdx.x; n < BN * D; n += THREADS)
                    if ((bytes[n] & 0x7f) == 0x7f) bytes[n] = 0;
            } else {
                for (int n = threadIdx.x; n < BN * D; n += THREADS)
                    if (not_finite<T>(values[n])) values[n] = 0;
            }
            __syncthreads();
        }

        if (!idle) {
            if constexpr (X::FLOAT8)
                accumulate_float8(O[0], S[0], [&](uint32_t(&f)[4], int u, int kk) {
                    b_columns<X::WIDTH>(f, values, d0 / 2 + u * 16, k0 + kk * 16, lane);
                });
            else
                accumulate<T>(O, S, [&](uint32_t(&f)[4], int dt, int kk) {
                    b_columns<D>(f, values, d0 + dt * 8, k0 + kk * 16, lane);
                });
        }
    }

    /* The warps' sums, side by side in shared memory. */
    cp_async_wait<0>();
    __syncthreads();
    const int wk = warp / X::WD % WK;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = m0 + half * 8 + lane / 4;
        l[half] += __shfl_xor_sync(0xffffffff, l[half], 1);
        l[half] += __shfl_xor_sync(0xffffffff, l[half], 2);
        if (r >= rows) continue;
        if (lane % 4 == 0 && d0 == 0) {
            sm.m[wk][r] = m[half];
            sm.l[wk][r] = l[half];
        }
        if constexpr (X::FLOAT8) {
#pragma unroll
            for (int n = 0; n < DT / 2; n++)
                *(float4 *)&sm.O[wk][r][d0 + n * 16 + lane % 4 * 4] = four_channels(O[0], n, half);
        } else {
#pragma unroll
            for (int dt = 0; dt < DT; dt++)
                *(float2 *)&sm.O[wk][r][d0 + dt * 8 + lane % 4 * 2] = make_float2(O[0][dt][half * 2],
                                                                                  O[0][dt][half * 2 + 1]);
        }
    }
    __syncthreads();
    const int64_t saved = place.saved + (int64_t)index * place.rows;
    const int64_t each = X::STACKED ? g.dims.Hk * p.splits * place.rows : 0; /* from one sequence's to the next one's */
    const auto saved_row = [&](int r) {
        return X::STACKED ? saved + r / place.rows * each + r % place.rows : saved + r;
    };
    if ((int)threadIdx.x < rows) {
        const int r = threadIdx.x;
        const float sink = single ? sink_in_base_2(sink_of(a, sm.h[r]))
                                  : -CUDART_INF_F; /* else combine_splits() adds it, once */
        float top = sink, sum;
        for (int w = 0; w < WK; w++) top = fmaxf(top, sm.m[w][r]);
        const float base = top == -CUDART_INF_F ? 0 : top;
        sum = exp2_fast(sink - base);
        for (int w = 0; w < WK; w++) {
            const float factor = exp2_fast(sm.m[w][r] - base);
            sum += factor * sm.l[w][r];
            sm.m[w][r] = factor;
        }
        sm.top[r] = top;
        sm.sum[r] = sum;
        if (!single && (clean || !takes_split_groups)) p.ml[saved_row(r)] = make_float2(top, sum);
        const attn_view &lse = g.view[ATTN_T_lse];
        if (single && lse.data)
            ((float *)lse.data)[attn_at(&lse, x.b, sm.h[r], x.s.q_start + sm.i[r])] = sum == 0 ? -CUDART_INF_F
                                                                                               : top * LN2 + logf(sum);
    }
    __syncthreads();

    /* To the workspace, or divided to out. */
    const attn_view &out = g.view[ATTN_T_out];
    bool finite = true;
    uint32_t not_finite_of = 0; /* of a stack: a bit a sequence */
    for (int n = threadIdx.x; n < rows * (D / 4); n += THREADS) {
        const int r = n / (D / 4), d = n % (D / 4) * 4;
        const float4 o = sum_of_warps(sm, r, d);
        const float sum = sm.sum[r], top = sm.top[r];
        const bool ok = (top == -CUDART_INF_F || fabsf(top) < SCORE_MOST) && sum - sum == 0 && is_finite(o);
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
        return; /* all have read m */
    }
    if (clean) {
        __syncthreads();
        for (int r = warp; r < rows; r += WARPS) {
            const head_args y = head_args_of(a, x.b, sm.h[r]);
            if (single) forward_row(a, y, sm.i[r], out, nullptr, true);
            else repair_row(a, y, sm.i[r], first_key, last_key, p.O + (saved + r) * D, p.ml + saved + r);
        }
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

template <int D, bool SCORE_MODS, keys_as AS> constexpr size_t shared_bytes()
{
    const size_t narrow = sizeof(shared<shape<D, false, SCORE_MODS, false, AS>>),
                 wide = sizeof(shared<shape<D, true, SCORE_MODS, false, AS>>);
    return narrow > wide ? narrow : wide;
}

template <typename T, int D, bool SCORE_MODS, bool PAGED, keys_as AS>
__global__ void __launch_bounds__(THREADS, (blocks_of<D, SCORE_MODS>))
    decode_splits(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    static_assert(shared_bytes<D, SCORE_MODS, AS>() <= 99 * 1024, "what every GPU from compute capability 8.0 on has");
    extern __shared__ __align__(128) char memory[];
    launch_dependents(); /* combine_splits() may come when the last block has begun */
    const int Hk = (int)a.g.dims.Hk, slot = (int)(blockIdx.x / Hk), hk = (int)(blockIdx.x % Hk);
    int b, index;
    if (a.g.dims.packed) {
        b = sequence_of_tile(a.g.cu_k, a.g.dims.B, p.unit, p.extra, slot);
        index = slot - (a.g.cu_k[b] / p.unit + p.extra * b);
    } else {
        const int slots = (p.splits + p.splits_per_block - 1) / p.splits_per_block;
        b = slot / slots;
        index = slot % slots * p.splits_per_block;
    }
    const group_place place = group_place_of(a, p, b, hk);
    if (place.rows == 0) return;
    if constexpr (PAGED && !SCORE_MODS && AS == KEYS_AS_T)
        if (p.stack && index < place.splits &&
            (shares_split(a, p, b, hk, index) || shares_split(a, p, b + 1, hk, index)) &&
            p.ml[place.saved + (int64_t)index * place.rows].y == p.ml[place.saved + (int64_t)index * place.rows].y)
            return; /* decode_stacks() was here, and found nothing that is not finite */
    const int end = min(index + p.splits_per_block, place.splits);
    if (place.rows <= NARROW)
#pragma unroll 1
        for (; index < end; index++) split<T, shape<D, false, SCORE_MODS, PAGED, AS>>(a, p, place, index, memory);
    else if (index < end) split<T, shape<D, true, SCORE_MODS, PAGED, AS>>(a, p, place, index, memory);
}

/* ---- Combine ----------------------------------------------------------------------------------------------------- */

enum { COMBINE_WARPS = 8, COMBINE_THREADS = 32 * COMBINE_WARPS };

/* The sum over a block's threads, which all of them get. */
DEVICE float block_sum(float x, float (&parts)[COMBINE_WARPS])
{
    x = warp_sum(x);
    __syncthreads(); /* nobody reads the last sum's parts any more */
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < COMBINE_WARPS; w++) sum += parts[w];
    return sum;
}

/* forward_row() of rows.cuh by a block, of which a thread has one channel. It is written out here, for a kernel that calls a function has a
 * stack, and then begins later. */
DEVICE void forward_row_by_block(const cuda_args &a, const head_args &x, int64_t i, float (&parts)[COMBINE_WARPS])
{
    static_assert(COMBINE_THREADS >= TILE_HEAD_DIM, "a channel a thread");
    const attn_geometry &g = a.g;
    const attn_view &q = g.view[ATTN_T_q], &k = g.view[ATTN_T_k], &v = g.view[ATTN_T_v], &out = g.view[ATTN_T_out],
                    &lse = g.view[ATTN_T_lse];
    const int d = (int)threadIdx.x;
    const bool has_q = d < g.dims.D, has_v = d < g.dims.Dv;
    const float of_q = has_q ? load_float(q.dtype, q.data, attn_at(&q, x.b, x.h, x.s.q_start + i) + d) : 0;
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    float unit = 1, o, m, l;
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) { /* the second where sums of values overflow, in smaller units */
        o = 0;
        m = sink_of(a, x.h), l = m == -CUDART_INF_F ? 0 : 1;
#pragma unroll 1
        for (int64_t j = keys.lo; j < keys.hi; j++) {
            if (!visible_by_mask(a, x, i, j)) continue;
            const float of_k = has_q ? load_float(k.dtype, k.data, attn_key_at(&g, &k, x.b, x.hk, x.s.k_start + j) + d)
                                     : 0;
            const float of_v = has_v ? load_float(v.dtype, v.data, attn_key_at(&g, &v, x.b, x.hk, x.s.k_start + j) + d)
                                     : 0;
            float derivative;
            const float z = score(a, x, i, j, block_sum(of_q * of_k, parts), &derivative),
                        m_new = z > m || z != z ? z : m;
            const float rescale = m == -CUDART_INF_F ? 0 : expf(m - m_new), p = expf(z - m_new);
            l = l * rescale + p;
            const float kept = !a.drop_below || kept_of(a, x.b * g.dims.H + x.h, i, j / 8) >> (j % 8) & 1 ? a.drop_scale
                                                                                                          : 0;
            o = o * rescale + p * kept * unit * of_v;
            m = m_new;
        }
        if (turn == 1 || __syncthreads_and(l - l == 0 && o - o == 0)) break;
        unit = 1.0f / (1ll << 40);
    }
    if (has_v && out.data)
        store_float(out.dtype, out.data, attn_at(&out, x.b, x.h, x.s.q_start + i) + d,
                    l == 0      ? 0
                    : unit == 1 ? o * (x.v_scale / l)
                                : o / l / unit * x.v_scale);
    if (d == 0 && lse.data)
        ((float *)lse.data)[attn_at(&lse, x.b, x.h, x.s.q_start + i)] = l == 0 ? -CUDART_INF_F : m + logf(l);
}

/* out and lse of rows blockIdx.y, blockIdx.y + gridDim.y, ... of one key/value head of a sequence. Each warp adds
 * up every eighth split group, asking for m, l and O together, then the block adds up the warps: always in the
 * same order. A lane has D / 32 neighbouring channels. Rows of huge scores, and those whose sums overflow, are computed one by one
 * after all.
 *
 * A block begins as soon as one of decode_splits() leaves a multiprocessor, so it may want no more registers than that
 * had. */
template <int D>
__global__ void __launch_bounds__(COMBINE_THREADS, D == 64    ? 4
                                                   : D == 128 ? 3
                                                              : 2)
    combine_splits(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    const int C = D / 32;
    __shared__ float part[COMBINE_WARPS][D];
    __shared__ float2 parts_ml[COMBINE_WARPS];
    __shared__ float parts_sum[COMBINE_WARPS];
    __shared__ head_args of_head; /* of a row that is computed after all: here it costs no registers */
    const attn_geometry &g = a.g;
    const int Hk = (int)g.dims.Hk, b = (int)(blockIdx.x / Hk), hk = (int)(blockIdx.x % Hk), group = (int)g.group;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const group_place place = group_place_of(a, p, b, hk);
    const head_args &x = place.x;
    const int rows = place.rows, splits = place.splits;
    wait_for_prerequisites(); /* every block: this kernel must not end before decode_splits, for the next one waits for this one alone */
    if (rows == 0 || splits == 1) return;
    uint32_t repair = 0; /* a bit a row: at most DECODE_ROWS / 4 */
    for (int r = blockIdx.y; r < rows; r += gridDim.y) {
        const int i = r / group, h = (int)x.h + r % group;
        const float2 *ml = p.ml + place.saved + r;
        const float *O = p.O + (place.saved + r) * D + lane * C;
        const float sink = sink_in_base_2(sink_of(a, h));
        const int each = p.splits_per_block > 1 ? 1 : SPLIT_GROUP; /* partial results of a split group */
        float m = -CUDART_INF_F, l = 0, o[C] = {};
        for (int s = warp * SPLIT_GROUP; s < splits; s += COMBINE_WARPS * SPLIT_GROUP) {
            const int count = min(each, splits - s);
            float2 ml_of[SPLIT_GROUP];
            float O_of[SPLIT_GROUP][C], m_group = -CUDART_INF_F, l_group = 0, o_group[C] = {};
#pragma unroll
            for (int n = 0; n < SPLIT_GROUP; n++) {
                if (n >= count) break;
                ml_of[n] = ml[(int64_t)(s + n) * rows];
#pragma unroll
                for (int e = 0; e < C; e += 2) {
                    const float2 two = *(const float2 *)(O + (int64_t)(s + n) * rows * D + e);
                    O_of[n][e] = two.x, O_of[n][e + 1] = two.y;
                }
            }
#pragma unroll
            for (int n = 0; n < SPLIT_GROUP; n++) {
                if (n >= count) break;
                const fold f(m_group, ml_of[n].x);
                m_group = f.m, l_group = f(l_group, ml_of[n].y);
#pragma unroll
                for (int e = 0; e < C; e++) o_group[e] = f(o_group[e], O_of[n][e]);
            }
            const fold f(m, m_group);
            m = f.m, l = f(l, l_group);
#pragma unroll
            for (int e = 0; e < C; e++) o[e] = f(o[e], o_group[e]);
        }
#pragma unroll
        for (int e = 0; e < C; e++) part[warp][lane * C + e] = o[e];
        if (lane == 0) parts_ml[warp] = make_float2(m, l);
        __syncthreads();
        float top = sink;
        for (int w = 0; w < COMBINE_WARPS; w++) top = fmaxf(top, parts_ml[w].x);
        const float base = top == -CUDART_INF_F ? 0 : top;
        float sum = exp2_fast(sink - base), factors[COMBINE_WARPS]; /* the sink joins the sum once */
#pragma unroll
        for (int w = 0; w < COMBINE_WARPS; w++) {
            factors[w] = exp2_fast(parts_ml[w].x - base);
            sum += factors[w] * parts_ml[w].y;
        }
        const float factor = sum == 0 ? 0 : x.v_scale / sum;
        const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse];
        bool finite = sum - sum == 0 && (top == -CUDART_INF_F || fabsf(top) < SCORE_MOST);
        for (int d = threadIdx.x; d < g.dims.Dv && out.data; d += COMBINE_THREADS) {
            float value = 0;
#pragma unroll
            for (int w = 0; w < COMBINE_WARPS; w++) value += factors[w] * part[w][d];
            finite &= value - value == 0;
            store_float(out.dtype, out.data, attn_at(&out, x.b, h, x.s.q_start + i) + d, value * factor);
        }
        if (threadIdx.x == 0 && lse.data)
            ((float *)lse.data)[attn_at(&lse, x.b, h, x.s.q_start + i)] = sum == 0 ? -CUDART_INF_F
                                                                                   : top * LN2 + logf(sum);
        repair |= (uint32_t)(__syncthreads_or(!finite) != 0) << (r / gridDim.y); /* and part is free for the next row */
    }
    for (int r = blockIdx.y; repair; r += gridDim.y, repair >>= 1)
        if (repair & 1) {
            __syncthreads(); /* nobody reads the last row's `of_head` any more */
            if (threadIdx.x == 0) of_head = head_args_of(a, b, x.h + r % group);
            __syncthreads();
            forward_row_by_block(a, of_head, r / group, parts_sum);
        }
}

/* ---- Several sequences over one prefix --------------------------------------------------------------------------- */

template <int D> using stack_shape = shape<D, false, false, true, KEYS_AS_T, STACK_TILES>;

/* Split `index` of one key/value head, for all runs of two and more sequences of a stack that share it. Blocks of the same
 * keys are neighbours, so that what one reads another finds in the L2. A sequence whose result is not finite has NaN for m
 * and l of its first row: decode_splits(), which comes next, computes it as any other. */
template <typename T, int D>
__global__ void __launch_bounds__(stack_shape<D>::THREADS, D == 256 ? 1 : 2)
    decode_stacks(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    typedef stack_shape<D> X;
    static_assert(sizeof(shared<X>) <= 99 * 1024, "what every GPU from compute capability 8.0 on has");
    extern __shared__ __align__(128) char memory[];
    const int B = (int)a.g.dims.B, Hk = (int)a.g.dims.Hk, stacks = (B + p.stack - 1) / p.stack;
    const int first = (int)(blockIdx.x % stacks) * p.stack, hk = (int)(blockIdx.x / stacks % Hk),
              index = (int)(blockIdx.x / stacks / Hk), lane = threadIdx.x % 32;
    uint32_t shares = __ballot_sync(0xffffffff, lane < p.stack && shares_split(a, p, first + lane, hk, index));
    while (shares) { /* a run begins before its first bit */
        const int begin = __ffs(shares) - 2, length = __ffs(~(shares >> (begin + 1))); /* and ends at the next zero */
        split<T, X>(a, p, group_place_of(a, p, first + begin, hk), index, memory, length);
        shares &= ~0u << (begin + length - 1) << 1;
        __syncthreads();
    }
}

/* ---- Launchers --------------------------------------------------------------------------------------------------- */

int class_of(const attn_dims &d)
{
    const int64_t D = attn_max64(d.D, d.Dv);
    return D <= 64 ? 64 : D <= 128 ? 128 : 256;
}

/* The whole launch: the plan, blocks, bytes of workspace. */
struct launch_plan {
    plan p;
    int64_t blocks;
    unsigned combine_rows; /* blockIdx.y of combine_splits() */
    int64_t rows;          /* of the workspace; 0: no sequence has more than one split */
};

launch_plan launch_plan_of(const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    launch_plan y = {};
    y.p.splits_per_block = 1;
    if (d.packed) {
        const int64_t short_slots = d.total_k / 128 + d.B, long_slots = d.total_k / 1024 + 17 * d.B;
        y.p.unit = short_slots <= long_slots ? 128 : 1024;
        y.p.extra = short_slots <= long_slots ? 1 : 17;
        y.p.head_rows = d.total_k / KEYS_A_ROW;
        y.blocks = attn_min64(short_slots, long_slots) * d.Hk;
        y.rows = most_splits(d.total_k, false) > 1 ? y.p.head_rows * d.Hk : 0;
        y.combine_rows = 4; /* at least DECODE_ROWS / 32: see combine_splits() */
    } else {
        const int64_t rows = d.Sq * g.group;
        const int64_t keys = attn_min64(d.Sk,
                                        g.left + g.right + d.Sq + SPLIT_ALIGN); /* what the queries may see together */
        const int64_t splits = most_splits(keys, rows > NARROW);
        y.p.splits = (int)splits;
        y.blocks = d.B * splits * d.Hk;
        y.rows = splits > 1 ? d.B * d.Hk * splits * rows : 0;
        y.combine_rows = (unsigned)rows;
    }
    return y;
}

/* What a function needs to be told or asked once a device. */
enum { DEVICES = 64 };
struct once {
    std::atomic<int> state[DEVICES]; /* 0: not yet; 1; 2: may be launched as a programmatic dependent */
};

/* More shared memory for decode_splits; may combine_splits overlap? It may where its code was made for compute
 * capability 9.0. */
template <typename Main, typename Combine>
cudaError_t prepare(once &known, Main *main, Combine *combine, size_t bytes, bool *overlap)
{
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code != cudaSuccess) return code;
    int state = device < DEVICES ? known.state[device].load() : 0;
    if (state == 0) {
        cudaFuncAttributes attributes;
        code = cudaFuncSetAttribute(main, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, combine);
        if (code != cudaSuccess) return code;
        state = attributes.ptxVersion >= 90 ? 2 : 1;
        if (device < DEVICES) known.state[device].store(state);
    }
    *overlap = state == 2;
    return cudaSuccess;
}

template <typename T, int D> cudaError_t launch_stacks(const cuda_args &a, const launch_plan &y, cudaStream_t stream)
{
    static once known;
    const size_t bytes = sizeof(shared<stack_shape<D>>);
    bool overlap = false;
    const cudaError_t code = prepare(known, decode_stacks<T, D>, combine_splits<D>, bytes, &overlap);
    if (code != cudaSuccess) return code;
    const int64_t blocks = attn_tiles(a.g.dims.B, y.p.stack) * a.g.dims.Hk * y.p.splits; /* fewer than y.blocks */
    decode_stacks<T, D><<<(unsigned)blocks, stack_shape<D>::THREADS, bytes, stream>>>(a, y.p);
    return cudaPeekAtLastError();
}

template <typename T, int D, bool SCORE_MODS, bool PAGED, keys_as AS>
cudaError_t launch(const cuda_args &a, const launch_plan &y, cudaStream_t stream)
{
    static once known;
    const size_t bytes = shared_bytes<D, SCORE_MODS, AS>();
    bool overlap = false;
    if constexpr (PAGED && !SCORE_MODS && AS == KEYS_AS_T)
        if (y.p.stack) {
            const cudaError_t stacked = launch_stacks<T, D>(a, y, stream);
            if (stacked != cudaSuccess) return stacked;
        }
    cudaError_t code = prepare(known, decode_splits<T, D, SCORE_MODS, PAGED, AS>, combine_splits<D>, bytes, &overlap);
    if (code != cudaSuccess) return code;
    decode_splits<T, D, SCORE_MODS, PAGED, AS><<<(unsigned)y.blocks, THREADS, bytes, stream>>>(a, y.p);
    code = cudaPeekAtLastError();
    if (code != cudaSuccess || y.rows == 0) return code;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(a.g.dims.B * a.g.dims.Hk), y.combine_rows);
    config.blockDim = dim3(COMBINE_THREADS);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, combine_splits<D>, a, y.p);
}

/* The form for float8 keys knows scales of any size: see load_permuted_queries(). */
bool has_float8_form(const attn_plan *of)
{
    const uint64_t features = PLAIN_FEATURES | ATTN_TENSOR_BIT(q_scale) | ATTN_TENSOR_BIT(k_scale);
    return of->problem->k.dtype == ATTN_F8E4M3 && !(of->features & ~features);
}

template <typename T, int D, bool PAGED>
cudaError_t launch_form(const cuda_args &a, const launch_plan &y, const attn_plan *of, cudaStream_t stream)
{
    if (has_float8_form(of)) return launch<T, D, false, PAGED, KEYS_AS_FLOAT8>(a, y, stream);
    return has_options(of) ? launch<T, D, true, PAGED, KEYS_AS_T>(a, y, stream)
                           : launch<T, D, false, PAGED, KEYS_AS_T>(a, y, stream);
}

template <typename T, bool PAGED>
cudaError_t launch_for(const cuda_args &a, const launch_plan &y, const attn_plan *of, cudaStream_t stream)
{
    const int D = class_of(a.g.dims);
    if (D == 64) return launch_form<T, 64, PAGED>(a, y, of, stream);
    return D == 128 ? launch_form<T, 128, PAGED>(a, y, of, stream) : launch_form<T, 256, PAGED>(a, y, of, stream);
}

/* A block takes a split group where that leaves FULL blocks for each place on a multiprocessor. The bits of the answer
 * are the same. */
const int FULL = 4, PLACES = 3;

void let_blocks_walk(launch_plan &y, const cuda_chip *chip, const attn_dims &d, int64_t rows)
{
    const int64_t blocks = d.B * d.Hk * attn_tiles(y.p.splits, SPLIT_GROUP);
    if (d.packed || y.p.splits == 1 || rows > SPLIT_GROUP_ROWS ||
        blocks < (int64_t)FULL * PLACES * chip->multiprocessors)
        return;
    y.p.splits_per_block = SPLIT_GROUP;
    y.blocks = blocks;
}

size_t workspace_of(const attn_geometry &g)
{
    return (size_t)launch_plan_of(g).rows * ((size_t)class_of(g.dims) * sizeof(float) + sizeof(float2));
}

bool plan_decode(const cuda_chip *, attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    plan->workspace_bytes = workspace_of(g);
    return !g.dims.packed && g.dims.Sq * g.group <= DECODE_ROWS && decode_fits(g);
}

} // namespace

/* Where a grid counts the blocks. */
bool decode_fits(const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    return g.group <= DECODE_ROWS && launch_plan_of(g).blocks <= INT32_MAX && d.B * d.Hk <= INT32_MAX;
}

size_t decode_workspace(const attn_geometry &g)
{
    return (workspace_of(g) + 1023) / 1024 * 1024;
}

cudaError_t decode_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    const cuda_args a = cuda_args_of(plan);
    launch_plan y = launch_plan_of(a.g);
    if (y.blocks == 0 || a.g.dims.Sq == 0) return cudaSuccess;
    const int64_t rows = a.g.dims.Sq * a.g.group;
    if (a.g.prefix_keys && !a.g.dims.packed && rows <= NARROW && y.p.splits > 1 && !has_options(plan) &&
        plan->problem->k.dtype != ATTN_F8E4M3)
        y.p.stack = (int)attn_min64(32, STACK_TILES * 16 / rows);
    else let_blocks_walk(y, chip, a.g.dims, rows);
    if (y.rows) {
        y.p.O = (float *)workspace;
        y.p.ml = (float2 *)(y.p.O + y.rows * class_of(a.g.dims));
    }
    if (plan->problem->q.dtype == ATTN_BF16)
        return has_pages(plan) ? launch_for<__nv_bfloat16, true>(a, y, plan, stream)
                               : launch_for<__nv_bfloat16, false>(a, y, plan, stream);
    return has_pages(plan) ? launch_for<__half, true>(a, y, plan, stream)
                           : launch_for<__half, false>(a, y, plan, stream);
}

extern const cuda_kernel decode_forward = {
    { "decode", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3), TILE_HEAD_DIM,
      ATTN_ALL_SCORES | ATTN_KEY_FEATURES, true },
    80,
    ANY_COMPUTE,
    plan_decode,
    decode_launch,
};
