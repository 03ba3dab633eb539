/* wide_backward.cu: the backward for head sizes above those of backward.cu, up to ATTN_MAX_HEAD_DIM. The shared memory
 * and registers of a block are the same for all head sizes. A block computes ROWS rows and COLUMNS columns of one
 * gradient. A block of dq visits the tiles of TILE keys that its queries see. A block of dk or dv visits the tiles of
 * TILE queries that see its keys, for every query head of the group. There are two buffers: while a product reads one,
 * copies fill the other.
 *
 * dq: S += Q K^T and dP += dO V^T (chunk by chunk of channels), P = exp(S - lse), dS = P (dP - delta), dq += dS K
 * dk: the same with S^T and dP^T, dk += dS^T Q
 * dv: S^T += K Q^T, P = exp(S - lse), dv += P^T dO
 *
 * wide.cuh explains how float32 is multiplied.
 *
 * For every COLUMNS columns, a different block computes S and dP again. Compared with the usual five matrix products,
 * this takes 2.6 times as many multiplications at D = Dv = 512, and 4.6 times at 1024. Blocks share no sums, so all
 * gradients are deterministic. Rows whose result is not finite are only marked, as in wide_forward.cu; later launches
 * compute them. */
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/simple/simple.h"
#include "backward_common.cuh"
#include "option_gradients.h"
#include "seen_tiles.cuh"
#include "wide.cuh"

namespace {

enum gradient { DQ, DK, DV };
enum { ROWS = 128, WARPS = ROWS / 16, THREADS = 32 * WARPS };

/* TILE: number of keys or queries of a tile that a block visits. CHUNK: number of columns of q, k, v or dout that a
 * block loads at a time. */
template <typename T_> struct shape {
    typedef T_ T;
    /* the type that determines the layout of tiles in shared memory; both 16-bit types have the layout of __half
     * (tile_row) */
    typedef std::conditional_t<is_float<T>, float, __half> stored;
    static const int TILE = is_float<T> ? 32 : 64, CHUNK = is_float<T> ? 32 : 64;
};

template <class X> union stage {
    struct {
        /* a chunk of columns: `own` for the block's rows, `other` for the rows of the tile that the block visits */
        uint16_t own[ROWS * X::CHUNK * WORDS<typename X::T>], other[X::TILE * X::CHUNK * WORDS<typename X::T>];
    } chunk;
    uint16_t columns[X::TILE * COLUMNS * WORDS<typename X::T>];
};

/* Shared memory for a warp's 16 queries x TILE keys. `z` has scores, to which options are applied, and later P. `cap`
 * has 1 - tanh^2 (the derivative of softcap). `kept` has a bit for each pair that dropout keeps. */
template <int TILE> struct staged_keys {
    float z[16][TILE + 2], cap[16][TILE + 2], lse2[16];
    uint32_t kept[16][TILE / 8];
};
template <int TILE> struct parked {
    float z[16][TILE + 2];
};

struct block_place {
    attn_sequence s;
    limits limit;
    /* `h`: the query head of the current tile; a block that computes dk or dv visits all query heads of key/value head
     * `hk` */
    int b, h, hk;
    int row0;
    int rows;
    int column0;
    /* The rounds of the block's loop have the numbers `begin` to `end` - 1. In each round the block visits one tile of
     * keys (for dq), or one tile of queries of one head (for dk and dv; head after head). */
    int begin, end;
    /* only for blocks that compute dk and dv: index of the first tile of queries in each head, and number of tiles */
    int first_tile, tiles;
    head_args head;
};

template <class X, gradient G, bool SCORE_MODS> struct shared {
    alignas(1024) stage<X> stages[2];
    std::conditional_t<SCORE_MODS, std::conditional_t<G == DQ, staged_keys<X::TILE>, staged_queries<X::TILE>>,
                       parked<X::TILE>>
        options[WARPS];
    /* lse and delta of the queries of the current tile; only blocks that compute dk or dv use this member */
    row_values values;
    /* float32 only: for each query of the tile that sees only one key, the factor by which P may differ from its true
     * value 1 (one_key_of()); for other queries, 0 */
    static const bool FLOATS = is_float<typename X::T>;
    float one_key[FLOATS ? X::TILE : 1];
    block_place place;
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
};

/* ---- Which rows, keys and columns a block computes --------------------------------------------------------------- */

/* Finds the block's rows and columns of dq. Blocks of the same queries have successive numbers, so that they find their
 * common keys in the L2 cache. */
template <int TILE>
DEVICE void find_queries_of_block(const cuda_args &a, const limits &whole, int column_blocks, block_place &p)
{
    const int n = (int)(gridDim.x - 1 - blockIdx.x);
    const uint3 block = make_uint3(gridDim.x - 1 - n / column_blocks, blockIdx.y, blockIdx.z);
    const row_place place = row_place_of<ROWS>(a, whole, block);
    p.column0 = n % column_blocks * COLUMNS;
    p.s = attn_sequence_of(&a.g, place.b);
    p.limit = place.limit;
    p.b = place.b, p.h = place.h, p.hk = place.hk;
    p.row0 = place.i0;
    p.rows = place.exists ? min(place.Sq - place.i0, (int)ROWS) : 0;
    const int end = max(min(place.i0 + p.rows - 1 + p.limit.hi, p.limit.Sk), 0);
    p.begin = min(max(place.i0 + p.limit.lo, 0), p.limit.Sk) / TILE;
    p.end = (end + TILE - 1) / TILE;
    p.first_tile = p.tiles = 0;
}

/* Finds the block's rows and columns of dk or dv. Blocks of the same keys have successive numbers, so that they find
 * their common queries in the L2 cache. */
template <int TILE>
DEVICE void find_keys_of_block(const cuda_args &a, const limits &whole, int column_blocks, block_place &p)
{
    key_place place = key_place_of<ROWS>(a, whole, make_uint3(blockIdx.x / column_blocks, blockIdx.y, blockIdx.z));
    find_queries<ROWS, TILE>(place);
    p.column0 = (int)(blockIdx.x % column_blocks) * COLUMNS;
    p.s = place.s;
    p.limit = place.limit;
    p.b = place.b, p.hk = place.hk, p.h = p.hk * (int)a.g.group;
    p.row0 = place.j0;
    p.rows = place.rows;
    p.first_tile = place.first, p.tiles = place.last - place.first;
    p.begin = 0;
    p.end = place.rows > 0 ? p.tiles * (int)a.g.group : 0;
}

/* For the tile that the block visits in round n of its loop, tile_row() returns the first row, and head_of_round() the
 * query head. */
template <gradient G, int TILE> DEVICE int tile_row(const block_place &p, int n)
{
    return (G == DQ ? n : p.first_tile + n % p.tiles) * TILE;
}
template <gradient G> DEVICE int head_of_round(const cuda_args &a, const block_place &p, int n)
{
    return G == DQ ? p.h : p.hk * (int)a.g.group + n / p.tiles;
}

/* Returns the first round (tile of keys or queries) after round n that has a visible pair. */
template <bool SCORE_MODS, class SEEN> DEVICE int round_after(const SEEN &seen, int n, int end)
{
    if constexpr (SCORE_MODS) return seen_tile_above(seen, n, end);
    else return n + 1;
}

/* ---- Loading tiles to shared memory ------------------------------------------------------------------------------ */

template <class X, int COUNT, int WIDTH>
DEVICE void load_rows(const cuda_args &a, const block_place &p, attn_tensor_id id, int h, int row, int column,
                      uint16_t *to)
{
    const bool of_keys = id == ATTN_T_k || id == ATTN_T_v;
    const int64_t width = (id == ATTN_T_q || id == ATTN_T_k ? a.g.dims.D : a.g.dims.Dv) - column;
    const attn_view view = columns_from(a.g.view[id], column);
    const loader<WIDTH, THREADS, false, typename X::stored> from(
        view, p.b, of_keys ? p.hk : h, of_keys ? p.s.k_start : p.s.q_start, of_keys ? p.s.Sk : p.s.Sq, width);
    from.template load<COUNT>(to, row);
}

/* Begins to copy a chunk of columns of the tile that the block visits in round n of its loop. If VALUES is true, the
 * chunk is from dout and v, otherwise from q and k. */
template <class X, gradient G, bool VALUES>
DEVICE void load_chunk(const cuda_args &a, const block_place &p, stage<X> &to, int n, int chunk)
{
    const int TILE = X::TILE, CHUNK = X::CHUNK;
    const attn_tensor_id queries = VALUES ? ATTN_T_dout : ATTN_T_q, keys = VALUES ? ATTN_T_v : ATTN_T_k;
    const int h = head_of_round<G>(a, p, n);
    load_rows<X, ROWS, CHUNK>(a, p, G == DQ ? queries : keys, h, p.row0, chunk * CHUNK, to.chunk.own);
    load_rows<X, TILE, CHUNK>(a, p, G == DQ ? keys : queries, h, tile_row<G, TILE>(p, n), chunk * CHUNK,
                              to.chunk.other);
    cp_async_commit();
}

/* Begins to copy the block's columns of k, q or dout. In round n of the block's loop, the last product multiplies them
 * by dS or P. */
template <class X, gradient G> DEVICE void load_columns(const cuda_args &a, const block_place &p, stage<X> &to, int n)
{
    const attn_tensor_id id = G == DQ ? ATTN_T_k : G == DK ? ATTN_T_q : ATTN_T_dout;
    load_rows<X, X::TILE, COLUMNS>(a, p, id, head_of_round<G>(a, p, n), tile_row<G, X::TILE>(p, n), p.column0,
                                   to.columns);
    cp_async_commit();
}

/* Returns 0 or, if the query at `at` sees only one key, the factor by which its P may differ from its true value 1. */
DEVICE float one_key_of(const saved &s, int64_t at)
{
    return s.rest[at] == ONE_KEY ? expf(one_key_slack(s.lse[at])) : 0;
}

/* Loads lse and delta of the queries of the tile that the block visits in round n of its loop, and the arguments for
 * options of the tile's head. */
template <gradient G, int TILE, class Shared>
DEVICE void load_round(const cuda_args &a, const saved &s, Shared &sm, int n)
{
    block_place &p = sm.place;
    const int h = head_of_round<G>(a, p, n), i = tile_row<G, TILE>(p, n) + (int)threadIdx.x;
    if (threadIdx.x < TILE) {
        const bool exists = i < p.s.Sq;
        const int64_t at = p.b * a.lse_batch + h * a.lse_head + p.s.q_start + i;
        sm.values.lse2[threadIdx.x] = lse_in_base_2(exists ? s.lse[at] : -CUDART_INF_F);
        sm.values.delta[threadIdx.x] = exists ? s.delta[at] : 0;
        if (Shared::FLOATS) sm.one_key[threadIdx.x] = exists ? one_key_of(s, at) : 0;
    }
    if (threadIdx.x == THREADS - 1) p.h = h, p.head = head_args_of(a, p.b, h);
}

/* ---- Computing P and dS ------------------------------------------------------------------------------------------ */

/* lse and delta of the queries whose dq this thread computes, and in float32 the results of one_key_of() for these
 * queries. Blocks that compute dk or dv do not use the struct. */
template <gradient G> struct row_numbers {
    float lse2[G == DQ ? 2 : 1], delta[G == DQ ? 2 : 1], one_key[G == DQ ? 2 : 1];
};

/* Returns P of element e of the lane's accumulator block nt, or exactly 1 if the query sees only one key and P is as
 * near to 1 as rounding allows. */
template <gradient G, class Shared>
DEVICE float of_one_key(const Shared &sm, const row_numbers<G> &own, int nt, int e, float p)
{
    const float slack = G == DQ ? own.one_key[G == DQ ? e / 2 : 0] : sm.one_key[nt * 8 + threadIdx.x % 4 * 2 + e % 2];
    return p * slack >= 1 && p <= slack ? 1 : p;
}

/* Returns lse in base 2 (x) and delta (y) of one query: the query of element e of the lane's accumulator block nt. */
template <gradient G, class Shared> DEVICE float2 numbers_of(const Shared &sm, const row_numbers<G> &own, int nt, int e)
{
    if constexpr (G == DQ) return make_float2(own.lse2[e / 2], own.delta[e / 2]);
    const int query = nt * 8 + threadIdx.x % 4 * 2 + e % 2;
    return make_float2(sm.values.lse2[query], sm.values.delta[query]);
}

/* For one pair of a query and a key, returns dropout's factor (x) and the derivative of softcap, 1 - tanh^2 (y). */
template <gradient G, bool SCORE_MODS, class Shared>
DEVICE float2 factors_of(const cuda_args &a, const Shared &sm, int nt, int e)
{
    float2 factors = make_float2(1, 1);
    if constexpr (SCORE_MODS) {
        const auto &st = sm.options[threadIdx.x / 32];
        const int row = e / 2 * 8 + threadIdx.x % 32 / 4, column = nt * 8 + threadIdx.x % 4 * 2 + e % 2;
        bool kept = true;
        if constexpr (G == DQ) kept = !a.drop_below || (st.kept[row][nt] >> column % 8 & 1);
        else kept = !a.drop_below || (st.kept[column][row / 8] >> row % 8 & 1);
        factors = make_float2(kept ? a.drop_below ? a.drop_scale : 1 : 0, st.cap[row][column]);
    }
    return factors;
}

/* Turns the scores S of the tile of round n (iteration of the block's loop) into probabilities P: applies masks and
 * options, then computes 2^(S - lse). */
template <gradient G, bool SCORE_MODS, int NT, class Shared>
DEVICE void scores_to_p(float (&S)[NT][4], const cuda_args &a, const saved &s, Shared &sm, const row_numbers<G> &own,
                        int n, float scale_log2)
{
    const block_place &p = sm.place;
    const int TILE = NT * 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = p.row0 + warp * 16, tile0 = tile_row<G, TILE>(p, n);
    if constexpr (SCORE_MODS && G == DQ) {
        auto &st = sm.options[warp];
        change_scores<false>(S, st.z, lane, [&](int r, int column, float &z) {
            const int i = row0 + r, key = tile0 + column;
            float derivative = 1;
            z = score_log2(a, p.head, p.limit, i < p.s.Sq, i, key, z, &derivative);
            z = exponent_of(a, s, p.head, i, z, st.lse2[r]);
            st.cap[r][column] = derivative;
        });
        if (a.drop_below)
#pragma unroll 1
            for (int m = lane; m < 16 * NT; m += 32)
                st.kept[m / NT][m % NT] = kept_of(a, dropout_head(a, p.b, p.h), row0 + m / NT, tile0 / 8 + m % NT);
        __syncwarp();
    } else if constexpr (SCORE_MODS) {
        apply_options(S, sm.options[warp], a, s, p.head, p.limit, (int)p.s.Sq, tile0, row0, 1, sm.values.lse2, 0, lane);
    } else if constexpr (G == DQ) {
        hide_keys(S, p.limit, row0 + lane / 4, tile0 + lane % 4 * 2);
    } else {
        hide_hidden_queries<TILE>(S, p.limit, p.limit.Sk, tile0, row0, lane);
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float lse2 = numbers_of<G>(sm, own, nt, e).x;
            S[nt][e] = exp2_fast(SCORE_MODS ? S[nt][e] : fmaf(S[nt][e], scale_log2, -lse2));
            if constexpr (Shared::FLOATS) S[nt][e] = of_one_key<G>(sm, own, nt, e, S[nt][e]);
            if (G == DV) S[nt][e] *= factors_of<G, SCORE_MODS>(a, sm, nt, e).x;
        }
}

/* park() writes P to shared memory, to free registers. to_ds() reads it back and turns dP into dS. */
template <int NT, class Shared> DEVICE void park(Shared &sm, float (&P)[NT][4])
{
    auto &z = sm.options[threadIdx.x / 32].z;
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            z[row + e / 2 * 8][nt * 8 + column + e % 2] = P[nt][e];
            P[nt][e] = 0;
        }
}
template <gradient G, bool SCORE_MODS, int NT, class Shared>
DEVICE void to_ds(float (&dP)[NT][4], const cuda_args &a, const Shared &sm, const row_numbers<G> &own)
{
    const auto &z = sm.options[threadIdx.x / 32].z;
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 factors = factors_of<G, SCORE_MODS>(a, sm, nt, e);
            const float p = z[row + e / 2 * 8][nt * 8 + column + e % 2], delta = numbers_of<G>(sm, own, nt, e).y;
            dP[nt][e] = p * (dP[nt][e] * factors.x - delta) * factors.y;
        }
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <typename T, gradient G, bool SCORE_MODS>
__global__ void __launch_bounds__(THREADS, 1)
    gradient_columns(const __grid_constant__ cuda_args a, const __grid_constant__ saved s, limits whole,
                     float scale_log2, int column_blocks)
{
    typedef shape<T> X;
    typedef shared<X, G, SCORE_MODS> Shared;
    const int TILE = X::TILE, CHUNK = X::CHUNK, NT = TILE / 8, DT = COLUMNS / 8;
    static_assert(sizeof(stage<X>) % 1024 == 0, "fragments' swizzle");
    static_assert(2 * sizeof(stage<X>) >= sizeof(float) * ROWS * COLUMNS / 2, "results are staged");
    Shared &sm = block_memory<Shared>();
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, D = (int)g.dims.D, Dv = (int)g.dims.Dv;
    block_place &p = sm.place;
    if (threadIdx.x == 0) {
        if (G == DQ) find_queries_of_block<TILE>(a, whole, column_blocks, p);
        else find_keys_of_block<TILE>(a, whole, column_blocks, p);
        p.head = head_args_of(a, p.b, p.h);
    }
    __syncthreads();
    if (p.rows <= 0) return;
    const int end = p.end;
    if constexpr (SCORE_MODS) {
        if (G == DQ) list_seen_keys<TILE, THREADS>(a, p.b, p.h, p.row0, p.row0 + p.rows, p.begin, end, sm.seen);
        else
            list_seen_rounds<TILE, THREADS>(a, p.b, p.hk, p.row0, min(p.row0 + ROWS, (int)p.s.Sk), p.first_tile,
                                            p.tiles, sm.seen);
    }
    row_numbers<G> own = {};
    if constexpr (G == DQ)
        for (int half = 0; half < 2; half++) {
            const int i = p.row0 + warp * 16 + half * 8 + lane / 4;
            own.lse2[half] = lse_in_base_2(i < p.s.Sq ? s.lse[lse_at(a, p.head, i)] : -CUDART_INF_F);
            own.delta[half] = i < p.s.Sq ? s.delta[lse_at(a, p.head, i)] : 0;
            if (Shared::FLOATS) own.one_key[half] = i < p.s.Sq ? one_key_of(s, lse_at(a, p.head, i)) : 0;
            if constexpr (SCORE_MODS)
                if (lane % 4 == 0) sm.options[warp].lse2[half * 8 + lane / 4] = own.lse2[half];
        }

    const uint32_t start = smem_addr(&sm);
    float sums[1][DT][4] = {};
    /* `at`: the buffer (0 or 1) that is read next */
    int n = round_after<SCORE_MODS>(sm.seen, p.begin - 1, end), at = 0;
    if (n < end) load_chunk<X, G, false>(a, p, sm.stages[at], n, 0);
    while (n < end) {
        const auto multiply_next = [&](float(&S)[1][NT][4], int channels) {
            const uint32_t own_rows = at * (uint32_t)sizeof(stage<X>);
            add_chunk<T, CHUNK, G != DQ>(S, start, own_rows, own_rows + ROWS * CHUNK * (uint32_t)sizeof(T), warp * 16,
                                         channels);
            at ^= 1;
        };
        if (G != DQ) load_round<G, TILE>(a, s, sm, n);
        float S[1][NT][4] = {};
#pragma unroll 1
        for (int d = 0; d < D; d += CHUNK) {
            cp_async_wait<0>();
            /* after this barrier the chunk is in buffer `at`, and no thread reads the other buffer */
            __syncthreads();
            if (d + CHUNK < D) load_chunk<X, G, false>(a, p, sm.stages[at ^ 1], n, d / CHUNK + 1);
            else if (G != DV) load_chunk<X, G, true>(a, p, sm.stages[at ^ 1], n, 0);
            else load_columns<X, G>(a, p, sm.stages[at ^ 1], n);
            multiply_next(S, D - d);
        }
        scores_to_p<G, SCORE_MODS>(S[0], a, s, sm, own, n, scale_log2);
        if (G != DV) {
            park(sm, S[0]);
#pragma unroll 1
            for (int d = 0; d < Dv; d += CHUNK) {
                cp_async_wait<0>();
                __syncthreads();
                if (d + CHUNK < Dv) load_chunk<X, G, true>(a, p, sm.stages[at ^ 1], n, d / CHUNK + 1);
                else load_columns<X, G>(a, p, sm.stages[at ^ 1], n);
                multiply_next(S, Dv - d);
            }
            to_ds<G, SCORE_MODS>(S[0], a, sm, own);
        }
        cp_async_wait<0>();
        /* after this barrier the columns of load_columns() are in buffer `at`, and no thread uses the other buffer or
         * the queries' lse and delta */
        __syncthreads();
        n = round_after<SCORE_MODS>(sm.seen, n, end);
        if (n < end) load_chunk<X, G, false>(a, p, sm.stages[at ^ 1], n, 0);
        add_product<T>(sums, S, start, at * (uint32_t)sizeof(stage<X>));
        at ^= 1;
    }

    const bool finite = scale_block(sums, G == DV ? 1 : (float)g.scale);
    /* after this barrier no thread reads the chunks in shared memory, so results may overwrite them */
    const bool poisoned = __syncthreads_or(!finite);
    const attn_view &result = g.view[G == DQ ? ATTN_T_dq : G == DK ? ATTN_T_dk : ATTN_T_dv];
    const int64_t line = (G == DQ ? p.s.q_start : p.s.k_start) + p.row0;
    store_columns<T>(result, p.b, G == DQ ? p.h : p.hk, line, (int)attn_clamp64(p.rows - warp * 16, 0, 16), p.column0,
                     min((G == DV ? Dv : D) - p.column0, (int)COLUMNS), sums, sm.stages);
    if (!poisoned) return;
    for (int r = (int)threadIdx.x; r < p.rows; r += THREADS) {
        if (G == DQ) a.rows_later[lse_at(a, p.head, p.row0 + r)] = 1;
        else a.keys_later[((g.dims.packed ? 0 : p.b * g.dims.Hk) + p.hk) * g.dims.Sk + line + r] = 1;
        *a.rows_found = 1;
    }
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

/* In the workspace, a header of MARKS_HEAD bytes lies before the marks of rows. A mark is one byte; it is not 0 if a
 * later launch must compute the row. */
enum { MARKS_HEAD = 16 };

size_t mark_bytes(const attn_dims &d)
{
    return (size_t)(MARKS_HEAD + query_rows(d) + key_rows(d));
}

template <typename T, gradient G, bool SCORE_MODS>
cudaError_t launch_gradient(const cuda_chip *chip, cuda_args a, const saved &s, cudaStream_t stream)
{
    typedef shared<shape<T>, G, SCORE_MODS> Shared;
    const attn_dims &d = a.g.dims;
    if (!a.g.view[G == DQ ? ATTN_T_dq : G == DK ? ATTN_T_dk : ATTN_T_dv].data) return cudaSuccess;
    dim3 grid = G == DQ    ? tile_grid(a.g, ROWS)
                : d.packed ? dim3((unsigned)(d.total_k / ROWS + d.B), (unsigned)d.Hk)
                           : dim3((unsigned)attn_tiles(d.Sk, ROWS), (unsigned)d.Hk, (unsigned)d.B);
    const int column_blocks = (int)attn_tiles(G == DV ? d.Dv : d.D, COLUMNS);
    take_share(chip, a, grid);
    grid.x *= (unsigned)column_blocks;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    const cudaError_t code = allow_shared<gradient_columns<T, G, SCORE_MODS>>(sizeof(Shared));
    if (code != cudaSuccess) return code;
    gradient_columns<T, G, SCORE_MODS><<<grid, THREADS, sizeof(Shared), stream>>>(
        a, s, limits_of_whole(a.g), (float)a.g.scale * LOG2E, column_blocks);
    return cudaPeekAtLastError();
}

template <typename T, bool SCORE_MODS>
cudaError_t launch_all(const cuda_chip *chip, const cuda_args &a, const saved &s, cudaStream_t stream)
{
    cudaError_t code = launch_gradient<T, DQ, SCORE_MODS>(chip, a, s, stream);
    if (code == cudaSuccess) code = launch_gradient<T, DK, SCORE_MODS>(chip, a, s, stream);
    if (code == cudaSuccess) code = launch_gradient<T, DV, SCORE_MODS>(chip, a, s, stream);
    return code;
}

template <typename T>
cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, const saved &s, bool options, cudaStream_t stream)
{
    return options ? launch_all<T, true>(chip, a, s, stream) : launch_all<T, false>(chip, a, s, stream);
}

/* Returns the most bytes of shared memory that a block needs. */
template <typename T> constexpr size_t shared_bytes(bool options)
{
    typedef shape<T> X;
    if (!options) return sizeof(shared<X, DK, false>);
    return sizeof(shared<X, DK, true>) > sizeof(shared<X, DQ, true>) ? sizeof(shared<X, DK, true>)
                                                                     : sizeof(shared<X, DQ, true>);
}

bool plan(const cuda_chip *chip, attn_plan *plan)
{
    const bool options = has_options(plan);
    const size_t bytes = plan->problem->q.dtype == ATTN_F32 ? shared_bytes<float>(options)
                                                            : shared_bytes<__half>(options);
    if (!tile_grid_fits(plan->geometry.dims) || bytes > (size_t)chip->shared_bytes) return false;
    const size_t others = backward_bytes(chip, plan, false);
    plan->workspace_bytes = others + mark_bytes(plan->geometry.dims);
    return others > 0;
}

/* In the workspace, the marks of rows (one byte per row that a later launch must compute) lie behind the memory of
 * begin_backward(). */
cudaError_t launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const attn_dims &d = plan->geometry.dims;
    const bool own = !chip->rows_later;
    backward_run run = {};
    cudaError_t code = begin_backward(chip, stream, plan, false, memory, &run);
    if (code != cudaSuccess) return code;
    cuda_args &a = run.args;
    if (own) {
        a.rows_found = (uint8_t *)memory + plan->workspace_bytes - mark_bytes(d);
        a.rows_later = a.rows_found + MARKS_HEAD;
        a.keys_later = a.rows_later + query_rows(d);
    }
    const auto before = [&](const cuda_chip *part) {
        cuda_args now = a;
        if (!is_first_share(part)) return cudaSuccess;
        /* If the marks lie in this backward's own workspace (`own`), no later launch computes the two numbers (lse and
         * rest of struct saved) that stand for a huge lse. rows_later is therefore NULL in this call, so that
         * simple_delta() computes the two numbers at once. */
        if (own) now.rows_later = nullptr;
        simple_delta(now, run.scratch.s, true, stream);
        return own ? cudaMemsetAsync(a.rows_found, 0, mark_bytes(d), stream) : cudaSuccess;
    };
    const auto tiles = [&](const cuda_chip *part) {
        const saved &s = run.scratch.s;
        const attn_dtype dtype = plan->problem->q.dtype;
        const bool options = has_options(plan);
        const cudaError_t launched = dtype == ATTN_F32    ? launch_for<float>(part, a, s, options, stream)
                                     : dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(part, a, s, options, stream)
                                                          : launch_for<__half>(part, a, s, options, stream);
        if (launched == cudaSuccess && own && is_last_share(part)) simple_marked_gradients(chip, a, s, stream);
        return launched;
    };
    code = in_shares_after(chip, 0, before, tile_seconds(chip, plan), tiles);
    if (code != cudaSuccess) return code;
    if (!own) simple_gradients_left(chip, plan, a, run.scratch.s, stream);
    if (plan->problem->q.dtype != ATTN_F32)
        return option_gradients(chip, stream, plan, a, run.scratch.s, run.gradients);
    simple_gradients(chip, plan->problem, a, run.scratch.s, stream);
    return cudaPeekAtLastError();
}

} // namespace

extern const cuda_kernel wide_backward = {
    { "generic", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), ATTN_MAX_HEAD_DIM,
      ATTN_ALL_SCORES & ~ATTN_OPTION_BIT(DOUT_DTYPE) },
    80,
    ANY_COMPUTE,
    plan,
    launch,
};
extern const cuda_kernel f32_wide_backward = {
    { "generic", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F32), ATTN_MAX_HEAD_DIM,
      ATTN_ALL_SCORES & ~ATTN_OPTION_BIT(DOUT_DTYPE) },
    80,
    ANY_COMPUTE,
    plan,
    launch,
};
