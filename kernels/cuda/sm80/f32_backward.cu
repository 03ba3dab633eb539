/* f32_backward.cu: flash attention backward for float32 on tensor cores by mma.sync, from compute capability 8.0 on:
 * FlashAttention-2 (arXiv:2307.08691), Algorithm 2, with transposed scores, as in backward.cu. A float32 number is
 * stored as two float16 numbers, and three float16 products make one float32 product (split.cuh).
 *
 * A block owns BN keys of one key/value head, whose K and V stay in shared memory. It visits, in tiles of BM queries,
 * all queries that see one of these keys. A warp owns 16 keys. There is only one buffer for Q and dO.
 *
 * Registers hold 2^15 P, so that small P stay within float16's range. dS is multiplied by a power of two that brings
 * its upper bound near 2^14. The bound is |dS_ij| <= |dO_i| |v_j| + |delta_i|, where |x| is the largest norm of a row
 * of the tile.
 *
 * dQ is added to float32 sums in any order. With `deterministic` a second kernel computes dQ by query tiles instead
 * (f32_dq.cuh). A tile is wide if it has a row whose numbers are all too small for the tile's exponent (split.cuh).
 * rows.cuh computes tiles whose result is not finite, or depends on a wide tile. */
#include <stddef.h>

#include "kernels/cuda/simple/simple.h"
#include "f32_dq.cuh"
#include "recompute.h"
#include "seen_tiles.cuh"

extern const cuda_kernel f32_forward;
cudaError_t f32_forward_parts(const cuda_chip *chip, cuda_args a, const split_planes &k, const split_planes &v,
                              cudaStream_t stream);

namespace {

/* Number of keys per block (one warp for each 16), of queries per tile, and of blocks per multiprocessor, for head
 * sizes up to D. */
template <int D, bool SCORE_MODS> struct tile;
template <> struct tile<64, false> {
    static const int BN = 64, BM = 64, BLOCKS = 2;
};
template <> struct tile<64, true> {
    static const int BN = 64, BM = 64, BLOCKS = 1;
};
template <> struct tile<128, false> {
    static const int BN = 128, BM = 64, BLOCKS = 1;
};
template <> struct tile<128, true> {
    static const int BN = 64, BM = 64, BLOCKS = 1;
};
template <bool SCORE_MODS> struct tile<256, SCORE_MODS> {
    static const int BN = 64, BM = 32, BLOCKS = 1;
};

enum part { DK = 1, DV = 2 };
/* number of elements in a row of dS in shared memory: eight pieces of 16 bytes, even if BM (queries per tile) is
 * smaller */
enum { DS_ROW = 64 };

template <int D, bool SCORE_MODS> struct shared {
    static const int BN = tile<D, SCORE_MODS>::BN, BM = tile<D, SCORE_MODS>::BM;
    /* K is stored as two float16 numbers for each float32 number: first all high halves (plane hi), then all low halves
     * (plane lo) */
    alignas(1024) uint16_t K[2 * BN * D];
    alignas(1024) uint16_t V[2 * BN * D];
    alignas(1024) uint16_t Q[2 * BM * D];
    alignas(1024) uint16_t dO[2 * BM * D];
    /* dS^T (transposed): a row is a key, a column a query */
    alignas(1024) uint16_t dS[2 * BN * DS_ROW];
    float lse2[BM], delta[BM];
    /* for a query that sees only one key, the factor by which P may differ from its true value 1 (see of_one_key());
     * for other queries, 0 */
    float one_key[BM];
    staged_queries<BM> options[SCORE_MODS ? BN / 16 : 1];
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
};

/* Returns the bytes of shared memory that a block needs. Without options (softcap, bias, masks, ...), the last members
 * of the struct (`options`, `seen`) take no memory. */
template <int D, bool SCORE_MODS> constexpr size_t shared_bytes()
{
    typedef shared<D, SCORE_MODS> Shared;
    return SCORE_MODS ? sizeof(Shared) : offsetof(Shared, options);
}

/* ---- The kernel that computes dK, dV and the sums of dQ ---------------------------------------------------------- */

/* Returns the number of tiles of BM queries that see at least one of the keys j0 to j0 + BN - 1. `first` becomes the
 * first of these tiles. */
template <int BN, int BM>
DEVICE int query_tiles_of(const attn_geometry &g, const attn_sequence &sequence, int j0, int &first)
{
    if (j0 >= sequence.Sk) return 0;
    const attn_range lowest = attn_rows_of(&g, &sequence, j0),
                     highest = attn_rows_of(&g, &sequence, attn_min64(j0 + BN, sequence.Sk) - 1);
    first = (int)(lowest.lo / BM);
    return max((int)attn_tiles(highest.hi, BM) - first, 0);
}

/* Multiplies x by `factor`. Returns whether all products are finite. */
template <int DT> DEVICE bool scale_sums(float (&x)[DT][4], float factor)
{
    bool is_finite = true;
#pragma unroll
    for (int dt = 0; dt < DT; dt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[dt][e] *= factor;
            is_finite &= x[dt][e] - x[dt][e] == 0;
        }
    return is_finite;
}

template <int BN, int KK>
DEVICE void stage_ds(uint16_t *dS, const uint32_t (&hi)[KK][4], const uint32_t (&lo)[KK][4], int warp, int lane)
{
#pragma unroll
    for (int nt = 0; nt < KK * 2; nt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint16_t *const to = dS + at<DS_ROW>(warp * 16 + half * 8 + lane / 4, nt) + lane % 4 * 2;
            *(uint32_t *)to = hi[nt / 2][nt % 2 * 2 + half];
            *(uint32_t *)(to + BN * DS_ROW) = lo[nt / 2][nt % 2 * 2 + half];
        }
}

/* Computes this block's part of dQ for one query tile: dS K, summed over the block's keys. Adds it to the tile's
 * float32 sums of dQ (`sums`). Each warp has 16 queries and some columns. */
template <int D, bool SCORE_MODS>
DEVICE void add_dq(shared<D, SCORE_MODS> &sm, float *sums, float dq_unit, int warp, int lane)
{
    const int BN = shared<D, SCORE_MODS>::BN, BM = shared<D, SCORE_MODS>::BM, WARPS = BN / 16;
    const int GROUPS = BM / 16, SHARES = WARPS / GROUPS, COLUMNS = D / SHARES, CHUNK = COLUMNS < 64 ? COLUMNS : 64;
    float *const to = sums + (warp % GROUPS) * 16 * D + lane;
    uint32_t s_at = by_8<DS_ROW>(sm.dS, lane) ^ (warp % GROUPS * 32), k_columns_at = by_16<D>(sm.K, lane);
#pragma unroll 1
    for (int column = warp / GROUPS * COLUMNS; column < (warp / GROUPS + 1) * COLUMNS; column += CHUNK) {
        float dQ[1][CHUNK / 8][4] = {};
        opaque(s_at);
        opaque(k_columns_at);
#pragma unroll 2
        for (int kk = 0; kk < BN / 16; kk++) {
            uint32_t sh[1][4], sl[1][4];
            ldmatrix_x4_trans(sh[0], s_at + kk * 32 * DS_ROW);
            ldmatrix_x4_trans(sl[0], s_at + kk * 32 * DS_ROW + BN * 2 * DS_ROW);
            multiply_columns<1, CHUNK / 16, BN * 2 * D>(dQ, sh, sl, k_columns_at, column / 16, kk * 32 * D);
        }
#pragma unroll
        for (int dt = 0; dt < CHUNK / 8; dt++)
#pragma unroll
            for (int e = 0; e < 4; e++) atomicAdd(to + ((column / 8 + dt) * 4 + e) * 32, dQ[0][dt][e] * dq_unit);
    }
}

template <int DT>
DEVICE void store_keys(const attn_view &view, const float (&x)[DT][4], int b, int hk, int64_t start, int first, int end,
                       int width, int lane)
{
    if (!view.data) return;
    float *const to = (float *)view.data + attn_at(&view, b, hk, start);
    const bool pairs = starts_on_pairs(view, to, width);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t j = first + half * 8 + lane / 4;
        if (j >= end) continue;
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            store_two(to + j * view.row, dt * 8 + lane % 4 * 2, width, pairs, x[dt][half * 2], x[dt][half * 2 + 1]);
    }
}

/* A round (iteration of the block's loop) computes one tile of queries: tiles `first` to `first` + `tiles` - 1 of query
 * head h, then the same tiles of head h + 1, ... */
struct query_round {
    int n, h, row_tile;
};
struct query_rounds {
    int h, first, tiles;

    DEVICE query_round after(query_round r) const
    {
        r.n++;
        if (++r.row_tile == first + tiles) r.h++, r.row_tile = first;
        return r;
    }
    DEVICE query_round listed(int n) const { return { n, h + n / max(tiles, 1), first + n % max(tiles, 1) }; }
};

template <int D, bool SCORE_MODS, int PARTS>
__global__ void __launch_bounds__(tile<D, SCORE_MODS>::BN * 2, tile<D, SCORE_MODS>::BLOCKS)
    f32_dkdv_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ backward_planes planes, saved s,
                   float *sums)
{
    typedef shared<D, SCORE_MODS> Shared;
    const int BN = Shared::BN, BM = Shared::BM, WARPS = BN / 16, THREADS = 32 * WARPS, NT = BM / 8, DT = D / 8;
    Shared &sm = block_memory<Shared>();
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    /* In a packed problem, key tiles are numbered across all sequences: those of sequence b have the numbers from
     * cu_k[b] / BN + b on. */
    const int key_tile = a.first_tile + (int)blockIdx.x;
    int b = blockIdx.z, j0 = key_tile * BN;
    if (g.dims.packed) {
        b = sequence_of_tile(g.cu_k, g.dims.B, BN, 1, key_tile);
        j0 = (key_tile - (g.cu_k[b] / BN + b)) * BN;
    }
    const int hk = blockIdx.y;
    const attn_sequence sequence = attn_sequence_of(&g, b);
    /* number of rows of dk to write; rows past the length in seqlens_k become zeros */
    const int Sk_all = g.dims.packed ? (int)sequence.Sk : (int)g.dims.Sk;
    if (j0 >= Sk_all) return;
    const int Sk = (int)sequence.Sk, Sq = (int)sequence.Sq;
    const limits limit = limits_of(g, sequence);
    int first = 0;
    const int tiles = query_tiles_of<BN, BM>(g, sequence, j0, first), rounds = tiles * (int)g.group;

    /* k_tile is also the index of the tile of V, because K and V have the same tiles */
    const int64_t k_tile = split_tile_of(planes.k, b, hk, sequence.k_start) + j0 / SPLIT_ROWS;
    load_planes<D, BN, THREADS>(sm.K, planes.k.data + k_tile * 2 * SPLIT_ROWS * D, j0 % SPLIT_ROWS);
    load_planes<D, BN, THREADS>(sm.V, planes.v.data + k_tile * 2 * SPLIT_ROWS * D, j0 % SPLIT_ROWS);
    const split_stats k_stats = planes.k.stats[k_tile], v_stats = planes.v.stats[k_tile];

    if constexpr (SCORE_MODS) list_seen_rounds<BM, THREADS>(a, b, hk, j0, min(j0 + BN, Sk), first, tiles, sm.seen);
    const query_rounds all = { hk * (int)g.group, first, tiles };
    const auto after = [&](query_round r) {
        if constexpr (SCORE_MODS) return all.listed(seen_tile_above(sm.seen, r.n, rounds));
        else return all.after(r);
    };
    query_round now = SCORE_MODS ? after({ -1 }) : query_round{ 0, all.h, first };
    auto query_tile = [&](int h, int row_tile) {
        return split_tile_of(planes.q, b, h, sequence.q_start) + row_tile * BM / SPLIT_ROWS;
    };
    bool has_one_key = false; /* whether this thread has loaded lse and delta of a query that sees exactly one key */
    auto fetch = [&](int h, int row_tile) {
        const int64_t from = query_tile(h, row_tile) * 2 * SPLIT_ROWS * D;
        const int i0 = row_tile * BM;
        load_planes<D, BM, THREADS>(sm.Q, planes.q.data + from, i0 % SPLIT_ROWS);
        load_planes<D, BM, THREADS>(sm.dO, planes.dout.data + from, i0 % SPLIT_ROWS);
        cp_async_commit();
        /* a query that does not exist or sees no key gets an lse of +inf, which makes its P 0 */
        if (threadIdx.x < BM) {
            const int i = i0 + (int)threadIdx.x;
            const int64_t at = b * a.lse_batch + h * a.lse_head + sequence.q_start + i;
            const float lse = i < Sq ? s.lse[at] : -CUDART_INF_F;
            sm.lse2[threadIdx.x] = lse_in_base_2(lse) - P_BITS;
            sm.delta[threadIdx.x] = i < Sq ? s.delta[at] : 0;
            has_one_key = i < Sq && s.rest[at] == ONE_KEY;
            sm.one_key[threadIdx.x] = has_one_key ? expf(one_key_slack(lse)) : 0;
        }
    };
    if (now.n < rounds) fetch(now.h, now.row_tile);
    cp_async_commit();

    /* shared memory addresses of this lane's operands: K and V by rows; Q and dO by rows for S and dP, and by columns
     * for dK and dV */
    uint32_t k_at = by_16<D>(sm.K, lane) + warp * 32 * D, v_at = by_16<D>(sm.V, lane) + warp * 32 * D,
             q_at = by_8<D>(sm.Q, lane), o_at = by_8<D>(sm.dO, lane);
    uint32_t q_columns_at = by_16<D>(sm.Q, lane), o_columns_at = by_16<D>(sm.dO, lane);

    float dK[DT][4] = {}, dV[DT][4] = {};
    const float scale_log2 = (float)g.scale * LOG2E, drop_scale = SCORE_MODS && a.drop_below ? a.drop_scale : 1;
    const bool want_dq = (PARTS & DK) && sums;
    bool wide = k_stats.wide || v_stats.wide;

    for (query_round next; now.n < rounds; now = next) {
        const int h = now.h, i0 = now.row_tile * BM;
        const int64_t at = query_tile(h, now.row_tile);
        next = after(now);
        const split_stats q_stats = planes.q.stats[at], o_stats = planes.dout.stats[at];
        wide |= q_stats.wide != 0;
        cp_async_wait<0>();
        /* after this barrier the tile's queries have arrived, and no thread reads dS of the previous tile */
        const bool any_one_key = __syncthreads_or(has_one_key);

        /* S^T = K Q^T */
        float rows_of_S[1][NT][4], (&S)[NT][4] = rows_of_S[0];
        opaque(k_at);
        opaque(q_at);
        multiply_rows<D, 1, BM, BN, true>(rows_of_S, k_at, q_at);

        /* element e of a thread's n-th block of accumulators belongs to query i0 + 8 n + 2 (lane % 4) + e % 2 and key
         * j0 + 16 warp + 8 (e / 2) + lane / 4 */
        const float unit = power_of_two(-q_stats.exponent) * power_of_two(-k_stats.exponent);
        /* the factor c must not be 0, because 0 * -inf (a hidden key) is NaN */
        const float c = fmaxf(scale_log2 * unit, 1.2e-38f);
        if (SCORE_MODS) {
            const head_args x = head_args_of(a, b, h);
            apply_options(S, sm.options[warp], a, s, x, limit, Sq, i0, j0 + warp * 16, unit, sm.lse2, P_BITS, lane);
        } else hide_hidden_queries<BM>(S, limit, Sk, i0, j0 + warp * 16, lane);

        /* P is stored as 2^P_BITS exp(S - lse), so that small P stay within float16's range */
        float top_delta = 0;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float2 lse2 = *(const float2 *)&sm.lse2[nt * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[nt][e] = exp2_fast(SCORE_MODS ? S[nt][e] : fmaf(S[nt][e], c, -(e % 2 ? lse2.y : lse2.x)));
        }
        if (any_one_key) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) S[nt][e] = of_one_key(S[nt][e], sm.one_key[nt * 8 + lane % 4 * 2 + e % 2]);
        }
        uint32_t ah[NT / 2][4], al[NT / 2][4];

        /* dV += P^T dO */
        if (PARTS & DV) {
            const float dv_unit = power_of_two(-o_stats.exponent) * P_UNIT;
            if (SCORE_MODS && a.drop_below) {
                const staged_queries<BM> &st = sm.options[warp];
                float kept[NT][4];
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        /* P, or 0 if dropout drops the pair; the factor drop_scale is applied to dV at the end */
                        kept[nt][e] = st.kept[nt * 8 + lane % 4 * 2 + e % 2][e / 2] >> (lane / 4) & 1 ? S[nt][e] : 0;
                split_fragments<BM>(ah, al, kept);
            } else split_fragments<BM>(ah, al, S);
            opaque(o_columns_at);
            add_products_of_columns<D, BM>(dV, ah, al, o_columns_at, dv_unit);
        }

        if (PARTS & DK) {
            /* dP^T = V dO^T */
            float rows_of_dP[1][NT][4], (&dP)[NT][4] = rows_of_dP[0];
            opaque(v_at);
            opaque(o_at);
            multiply_rows<D, 1, BM, BN>(rows_of_dP, v_at, o_at);

            /* dS = P (dP - delta), times 2^exponent to fit in float16's range */
            for (int r = lane; r < BM; r += 32) top_delta = fmaxf(top_delta, fabsf(sm.delta[r]));
            top_delta = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(top_delta)));
            const float o_unit = power_of_two(-o_stats.exponent), v_unit = power_of_two(-v_stats.exponent);
            const int exponent = exponent_for(o_stats.norm * o_unit * (v_stats.norm * v_unit) * drop_scale + top_delta);
            const float to_ds = power_of_two(exponent) * P_UNIT, dp_unit = o_unit * v_unit * drop_scale * to_ds;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                const float2 delta = *(const float2 *)&sm.delta[nt * 8 + lane % 4 * 2];
                const float delta0 = delta.x * to_ds, delta1 = delta.y * to_ds;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float factor = dp_unit, cap = 1;
                    if (SCORE_MODS) {
                        const staged_queries<BM> &st = sm.options[warp];
                        const int query = nt * 8 + lane % 4 * 2 + e % 2;
                        if (a.drop_below && !(st.kept[query][e / 2] >> (lane / 4) & 1)) factor = 0;
                        cap = st.cap[e / 2 * 8 + lane / 4][query];
                    }
                    dP[nt][e] = S[nt][e] * fmaf(dP[nt][e], factor, -(e % 2 ? delta1 : delta0)) * cap;
                }
            }

            /* dK += dS^T Q; dS^T also goes to shared memory, for dQ */
            const float q_unit = power_of_two(-exponent) * power_of_two(-q_stats.exponent);
            split_fragments<BM>(ah, al, dP);
            if (want_dq) stage_ds<BN>(sm.dS, ah, al, warp, lane);
            opaque(q_columns_at);
            add_products_of_columns<D, BM>(dK, ah, al, q_columns_at, q_unit);

            __syncthreads(); /* after this barrier dS is complete, and no thread reads Q and dO */
            if (next.n < rounds) fetch(next.h, next.row_tile);

            if (want_dq) {
                const head_args x = head_args_of(a, b, h);
                add_dq(sm, sums_of<D, BM>(sums, a, x, i0 / BM),
                       power_of_two(-exponent) * power_of_two(-k_stats.exponent), warp, lane);
            }
        } else {
            __syncthreads(); /* after this barrier no thread reads Q and dO */
            if (next.n < rounds) fetch(next.h, next.row_tile);
        }
    }
    cp_async_wait<0>();

    bool is_finite = true;
    if (PARTS & DK) is_finite &= scale_sums(dK, (float)g.scale);
    if (PARTS & DV) is_finite &= scale_sums(dV, drop_scale);
    if (PARTS & DK)
        store_keys(g.view[ATTN_T_dk], dK, b, hk, sequence.k_start, j0 + warp * 16, Sk_all, (int)g.dims.D, lane);
    if (PARTS & DV)
        store_keys(g.view[ATTN_T_dv], dV, b, hk, sequence.k_start, j0 + warp * 16, Sk_all, (int)g.dims.Dv, lane);
    if (__syncthreads_or(!is_finite || wide))
        for (int r = warp; r < BN && j0 + r < Sk_all; r += WARPS) dkdv_row(a, s, b, hk, j0 + r);
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

int query_tile_rows(int D)
{
    return D == 256 ? tile<256, false>::BM : tile<64, false>::BM;
}
static_assert(tile<64, false>::BM == tile<128, false>::BM && tile<128, true>::BM == tile<128, false>::BM &&
                  tile<64, true>::BM == tile<64, false>::BM,
              "one layout of the sums of dQ");

const attn_tensor_id split_ids[] = { ATTN_T_q, ATTN_T_k, ATTN_T_v, ATTN_T_dout };

/* The parts of the workspace, in this order: lse and delta; float32 sums of dQ; the float16 halves (planes hi and lo)
 * of q, k, v and dout. If the client gave no out and lse, three more parts follow: out, lse, and the workspace of the
 * forward that computes them. */
struct parts {
    size_t rows, sums, planes, out, lse, forward, total;
};

size_t lay_out(const attn_dims &d, void *memory, split_planes (&planes)[4])
{
    size_t total = 0;
    for (int n = 0; n < 4; n++) {
        size_t bytes;
        planes[n] = split_planes_of(d, split_ids[n], (char *)memory + total, &bytes);
        total += split_align(bytes);
    }
    return total;
}

parts parts_of(const attn_plan *plan, size_t forward)
{
    const attn_geometry &g = plan->geometry;
    const attn_problem *p = plan->problem;
    const attn_dims &d = g.dims;
    const int BM = query_tile_rows(split_class(d));
    const dim3 grid = tile_grid(g, BM);
    split_planes planes[4];
    parts w;
    w.rows = split_align(saved_floats(plan) * sizeof(float));
    w.sums = p->deterministic || !p->dq.rank
                 ? 0
                 : split_align((size_t)grid.x * grid.y * grid.z * BM * split_class(d) * sizeof(float));
    w.planes = lay_out(d, nullptr, planes);
    w.out = p->out.rank ? 0 : split_align(recomputed_out_bytes(d));
    w.lse = p->out.rank ? 0 : split_align(recomputed_lse_bytes(d));
    w.forward = forward;
    w.total = w.rows + w.sums + w.planes + w.out + w.lse + w.forward;
    return w;
}

template <int D, bool SCORE_MODS, int PARTS>
cudaError_t launch_dkdv(const cuda_chip *chip, cuda_args a, const backward_planes &planes, const saved &s, float *sums,
                        cudaStream_t stream)
{
    const attn_dims &d = a.g.dims;
    const int BN = tile<D, SCORE_MODS>::BN;
    const size_t bytes = shared_bytes<D, SCORE_MODS>();
    dim3 grid = d.packed ? dim3((unsigned)(d.total_k / BN + d.B), (unsigned)d.Hk)
                         : dim3((unsigned)attn_tiles(d.Sk, BN), (unsigned)d.Hk, (unsigned)d.B);
    take_share(chip, a, grid);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    const cudaError_t code = allow_shared<f32_dkdv_tiles<D, SCORE_MODS, PARTS>>(bytes);
    if (code == cudaSuccess) f32_dkdv_tiles<D, SCORE_MODS, PARTS><<<grid, BN * 2, bytes, stream>>>(a, planes, s, sums);
    return code;
}

template <int D, bool SCORE_MODS>
cudaError_t launch_variant(const cuda_chip *chip, cuda_args a, const backward_planes &planes, const saved &s,
                           float *sums, cudaStream_t stream)
{
    const int BM = tile<D, SCORE_MODS>::BM;
    const bool dq = a.g.view[ATTN_T_dq].data != nullptr;
    cudaError_t code = cudaSuccess;
    if constexpr (D <= 128) code = launch_dkdv<D, SCORE_MODS, DK | DV>(chip, a, planes, s, sums, stream);
    else {
        code = launch_dkdv<D, SCORE_MODS, DK>(chip, a, planes, s, sums, stream);
        if (code == cudaSuccess) code = launch_dkdv<D, SCORE_MODS, DV>(chip, a, planes, s, nullptr, stream);
    }
    dim3 grid = tile_grid(a.g, sums ? BM : (int)DQ_BM);
    if (!sums) take_share(chip, a, grid);
    else if (!is_last_share(chip)) return code;
    if (code == cudaSuccess && dq && grid.x && grid.y && grid.z) {
        if (sums) f32_finish_dq<D, BM><<<grid, 128, 0, stream>>>(a, planes, s, sums);
        else {
            const size_t bytes = sizeof(shared_dq<D, SCORE_MODS>);
            code = allow_shared<f32_dq_tiles<D, SCORE_MODS>>(bytes);
            if (code == cudaSuccess) f32_dq_tiles<D, SCORE_MODS><<<grid, DQ_BM * 2, bytes, stream>>>(a, planes, s);
        }
    }
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

template <int D>
cudaError_t launch_width(const cuda_chip *chip, const cuda_args &a, const backward_planes &planes, const saved &s,
                         float *sums, bool options, cudaStream_t stream)
{
    return options ? launch_variant<D, true>(chip, a, planes, s, sums, stream)
                   : launch_variant<D, false>(chip, a, planes, s, sums, stream);
}

template <int D, bool SCORE_MODS> size_t most_shared(bool deterministic)
{
    const size_t dkdv = shared_bytes<D, SCORE_MODS>(), dq = deterministic ? sizeof(shared_dq<D, SCORE_MODS>) : 0;
    return dkdv > dq ? dkdv : dq;
}

template <int D> size_t most_shared(bool options, bool deterministic)
{
    return options ? most_shared<D, true>(deterministic) : most_shared<D, false>(deterministic);
}

bool plan(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    const int D = split_class(d);
    const bool options = has_options(plan), deterministic = plan->problem->deterministic;
    const size_t bytes = D == 64    ? most_shared<64>(options, deterministic)
                         : D == 128 ? most_shared<128>(options, deterministic)
                                    : most_shared<256>(options, deterministic);
    recomputed_forward forward;
    forward.plan.workspace_bytes = 0;
    if (!tile_grid_fits(d) || bytes > (size_t)chip->shared_bytes) return false;
    if (!plan->problem->out.rank && !plan_recomputed(&forward, f32_forward, chip, plan, nullptr, nullptr)) return false;
    plan->workspace_bytes = parts_of(plan, forward.plan.workspace_bytes).total;
    return true;
}

cudaError_t prepare_tiles(const cuda_chip *chip, const cuda_args &a, const backward_planes &planes, const saved &s,
                          float *sums, size_t sums_bytes, cudaStream_t stream)
{
    const split_planes list[] = { planes.q, planes.k, planes.v, planes.dout };
    cudaError_t code = cudaSuccess;
    if (is_first_share(chip)) {
        simple_delta(a, s, true, stream);
        code = split_tensors(a, list, split_ids, 4, stream);
        if (code == cudaSuccess && sums) code = cudaMemsetAsync(sums, 0, sums_bytes, stream);
    }
    return code == cudaSuccess && a.part_lse ? f32_forward_parts(chip, a, planes.k, planes.v, stream) : code;
}

cudaError_t launch_tiles(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                         const backward_planes &planes, const saved &s, float *sums, cudaStream_t stream)
{
    switch (split_class(a.g.dims)) {
    case 64: return launch_width<64>(chip, a, planes, s, sums, has_options(plan), stream);
    case 128: return launch_width<128>(chip, a, planes, s, sums, has_options(plan), stream);
    default: return launch_width<256>(chip, a, planes, s, sums, has_options(plan), stream);
    }
}

cudaError_t launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const parts w = parts_of(plan, 0);
    cuda_args a = cuda_args_of(chip, plan);
    char *at = (char *)memory;
    split_planes planes[4];
    saved s;
    cudaError_t code = cudaSuccess;
    lay_out_saved(&s, a.g.dims, at);
    at += w.rows;
    float *const sums = w.sums ? (float *)at : nullptr;
    at += w.sums;
    lay_out(a.g.dims, at, planes);
    at += w.planes;
    if (!plan->problem->out.rank) {
        recomputed_forward forward;
        if (!plan_recomputed(&forward, f32_forward, chip, plan, at, at + w.out)) return cudaErrorInvalidConfiguration;
        code = in_shares(chip, tile_seconds(chip, &forward.plan), [&](const cuda_chip *part) {
            return f32_forward.launch(part, stream, &forward.plan, at + w.out + w.lse);
        });
        simple_rows_left(chip, &forward.plan, stream);
        a.g.view[ATTN_T_out] = forward.plan.geometry.view[ATTN_T_out];
        a.g.view[ATTN_T_lse] = forward.plan.geometry.view[ATTN_T_lse];
    }
    s.out = a.g.view[ATTN_T_out];
    if (parts_by_tiles(plan)) a.part_lse = s.lse, a.part_rest = s.rest;
    const backward_planes all = { planes[0], planes[1], planes[2], planes[3] };
    const double seconds = tile_seconds(chip, plan);
    if (code == cudaSuccess)
        code = in_shares_after(
            chip, a.part_lse ? seconds : 0,
            [&](const cuda_chip *part) { return prepare_tiles(part, a, all, s, sums, w.sums, stream); }, seconds,
            [&](const cuda_chip *part) { return launch_tiles(part, a, plan, all, s, sums, stream); });
    if (code != cudaSuccess) return code;
    simple_gradients_left(chip, plan, a, s, stream);
    simple_gradients(chip, plan->problem, a, s, stream);
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

} // namespace

extern const cuda_kernel f32_backward = {
    { "generic", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F32), TILE_HEAD_DIM, ATTN_ALL_SCORES & ~ATTN_OPTION_BIT(DOUT_DTYPE) },
    80,
    ANY_COMPUTE,
    plan,
    launch,
};
