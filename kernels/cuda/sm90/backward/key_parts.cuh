/* key_parts.cuh: the division of tiles of keys into parts, so that small problems use all multiprocessors.
 *
 * Without parts, one block computes dK and dV of a tile of keys: it goes over all tiles of queries of all query heads
 * of the group. A problem with few sequences and few key/value heads has fewer tiles of keys than the GPU has
 * multiprocessors. Its work for a tile of keys is therefore divided among several blocks: each has some of the query
 * heads of the group, or one head and a range of its tiles of queries. Each block stores its terms of dK and dV in
 * float32, and the kernel sum_parts adds them up in the order of the parts.
 *
 * The number of parts depends on the number of sequences and heads, so the last bits of dk and dv do too. A problem
 * with the option `deterministic` has no parts. */
#ifndef ATTN_SM90_BACKWARD_KEY_PARTS_CUH
#define ATTN_SM90_BACKWARD_KEY_PARTS_CUH

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/rows.cuh"
#include "kernels/cuda/sm90/layer/epilogue.cuh"
#include "kernels/cuda/sm90/layer/masks.cuh"
#include "kernels/cuda/sm90/layer/tma.cuh"

namespace {

/* How a tile of keys is divided into parts. A part has some of the group's query heads and one range of the tiles of
 * queries. Parts are numbered in this order: all ranges of the first query heads, then all ranges of the next query
 * heads, and so on. */
struct key_parts {
    int heads;          /* number of parts, all of the same size, into which the group's query heads are divided */
    int log2_of_ranges; /* the tiles of queries are divided into 2^log2_of_ranges ranges */
    __host__ __device__ int count() const { return heads << log2_of_ranges; }
};

/* The number of tiles of keys, and their work. By these, the number of parts of a tile of keys is chosen. */
struct key_work {
    int64_t tiles; /* number of tiles of keys */
    /* number of tiles of queries of a query head that see a tile of keys: the largest (most), and the mean (all) */
    int64_t most, all;
    int64_t bytes;  /* bytes of the float32 terms of dK and dV of all keys, for one part */
    int most_parts; /* the largest number of parts whose terms fit in MOST_TERMS bytes */
};

const int64_t MOST_TERMS = 512 << 20; /* the most bytes that a problem's terms of dK and dV may take */

const double ROUND_US = 2;    /* time of a round (a tile of keys times a tile of queries), in microseconds */
const double TILE_ROUNDS = 2; /* time for the beginning and the end of a part, in rounds */
/* time of the kernel sum_parts in microseconds, apart from the time for reading terms */
const double SUM_US = 3;
const double SUM_BYTES_PER_US = 1e6; /* bytes that sum_parts reads per microsecond */
/* a larger number of parts is chosen only if its time is below this share of the least time so far */
const double LEAST_GAIN = 0.95;

/* Returns the expected time of the blocks of keys and of sum_parts, in microseconds. */
double time_of_parts(const key_work &x, int64_t group, const key_parts &parts, int multiprocessors)
{
    const double n = parts.count(), longest = (double)(x.most * group) / n + TILE_ROUNDS,
                 mean = (double)(x.all * group) / n + TILE_ROUNDS, blocks = (double)x.tiles * n;
    const double rounds = x.most == x.all ? (double)attn_tiles((int64_t)blocks, multiprocessors) * longest
                                          : fmax(longest, blocks * mean / multiprocessors);
    return rounds * ROUND_US + (n > 1 ? SUM_US + n * (double)x.bytes / SUM_BYTES_PER_US : 0);
}

/* Returns the division into parts with which the blocks of keys and sum_parts are expected to take the least time. */
key_parts best_parts(const key_work &x, int64_t group, int multiprocessors)
{
    key_parts best = { 1, 0 };
    double least = time_of_parts(x, group, best, multiprocessors);
    const auto consider = [&](const key_parts &parts) {
        if (parts.count() > x.most_parts) return;
        const double time = time_of_parts(x, group, parts, multiprocessors);
        if (time < least * LEAST_GAIN) best = parts, least = time;
    };
    for (int heads = 2; heads <= group; heads++)
        if (group % heads == 0) consider({ heads, 0 });
    for (int n = 1; x.most >> n > 0; n++) consider({ (int)group, n });
    return best;
}

/* Returns whether tiles of keys may have parts. If a long problem is computed piece by piece (attn_part_of()), its
 * tiles of keys have none: a piece must not need more memory than the whole problem. */
bool may_have_parts(const attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    return !p->deterministic && !p->dropout_heads && (p->dk.rank || p->dv.rank);
}

/* Returns the bytes of memory for the terms of dK and dV of all parts; 0 if there is one part. */
int64_t terms_bytes(const attn_plan *plan, const key_parts &parts)
{
    const attn_dims &d = plan->geometry.dims;
    const extent e = extent_of(d);
    if (parts.count() == 1) return 0;
    return parts.count() * e.B * d.Hk * e.rows_k * (d.D + d.Dv) * (int64_t)sizeof(float);
}

/* Returns how the tiles of keys of a problem are divided into parts. `keys` and `queries`: the sizes of the tiles of
 * keys and of queries. `heads`: number of key/value heads that one launch computes, counted over all batch rows. */
key_parts key_parts_of(const cuda_chip *chip, const attn_plan *plan, int keys, int queries, int64_t heads)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    if (!may_have_parts(plan)) return { 1, 0 };
    const extent e = extent_of(d);
    const int64_t sequences = d.packed ? d.B : 1, rows_q = attn_tiles(e.rows_q, sequences),
                  rows_k = attn_tiles(e.rows_k, sequences), left = attn_min64(g.left, FAR),
                  right = attn_min64(g.right, FAR), seen = attn_min64(rows_q, left + right + keys);
    key_work x;
    x.tiles = attn_tiles(rows_k, keys) * sequences * heads;
    x.most = attn_tiles(seen, queries);
    /* under a causal mask, the tiles of keys see half of the queries on average */
    x.all = right < rows_k && left >= rows_q ? (x.most + 1) / 2 : x.most;
    x.bytes = heads * e.rows_k * (d.D + d.Dv) * (int64_t)sizeof(float);
    x.most_parts = (int)attn_min64(MOST_TERMS / attn_max64(terms_bytes(plan, { 2, 0 }) / 2, 1), INT32_MAX);
    return best_parts(x, g.group, chip->multiprocessors);
}

/* ---- The terms of the parts, and their sums ---------------------------------------------------------------------- */

/* Returns the view to which the blocks of keys write dk or dv if tiles of keys have parts: the float32 terms [B, Hk *
 * parts, Sk, width] at `data`. */
attn_view terms_view(const attn_dims &d, const key_parts &parts, float *data, int64_t width)
{
    const extent e = extent_of(d);
    attn_view x = {};
    x.data = data;
    x.dtype = ATTN_F32;
    x.row = width;
    x.head = e.rows_k * width;
    x.batch = d.packed ? 0 : x.head * d.Hk * parts.count();
    return x;
}

struct parts_sum {
    attn_view dk, dv; /* the terms; NULL: the gradient is not wanted */
    int parts;
    saved s;
};

/* Makes the blocks of keys store their terms of dk and dv at `memory`: replaces the views of dk and dv in `a` by views
 * of the terms. `sum` gets the same views, from which sum_parts reads the terms. */
void divide_keys(cuda_args &a, const key_parts &parts, float *memory, const saved &s, parts_sum &sum)
{
    const attn_dims &d = a.g.dims;
    const extent e = extent_of(d);
    sum = { terms_view(d, parts, memory, d.D),
            terms_view(d, parts, memory + parts.count() * e.B * d.Hk * e.rows_k * d.D, d.Dv), parts.count(), s };
    if (!a.g.view[ATTN_T_dk].data) sum.dk.data = nullptr;
    if (!a.g.view[ATTN_T_dv].data) sum.dv.data = nullptr;
    a.g.view[ATTN_T_dk] = sum.dk;
    a.g.view[ATTN_T_dv] = sum.dv;
}

/* Adds up the terms of eight columns of a key, in the order of the parts. */
DEVICE void add_terms(float (&y)[8], const attn_view &terms, int64_t at, int parts)
{
    const int TOGETHER = 4; /* number of parts whose terms are loaded before the first one is added */
    const float *from = (const float *)terms.data + at;
#pragma unroll
    for (int e = 0; e < 8; e++) y[e] = 0;
    for (int first = 0; first < parts; first += TOGETHER, from += TOGETHER * terms.head) {
        float4 next[TOGETHER][2] = {};
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
            if (first + n < parts)
#pragma unroll
                for (int e = 0; e < 2; e++) next[n][e] = *(const float4 *)(from + n * terms.head + e * 4);
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
#pragma unroll
            for (int e = 0; e < 8; e += 4) {
                const float4 &x = next[n][e / 4];
                y[e] += x.x, y[e + 1] += x.y, y[e + 2] += x.z, y[e + 3] += x.w;
            }
    }
}

template <typename T> DEVICE void store_eight(const attn_view &to, int64_t at, const float (&y)[8])
{
    if (to.dtype == ATTN_F32) {
        float *const data = (float *)to.data + at;
        *(float4 *)data = make_float4(y[0], y[1], y[2], y[3]);
        *(float4 *)(data + 4) = make_float4(y[4], y[5], y[6], y[7]);
    } else
        store_16((uint16_t *)to.data + at,
                 make_uint4(pack<T>(y[0], y[1]), pack<T>(y[2], y[3]), pack<T>(y[4], y[5]), pack<T>(y[6], y[7])));
}

enum { SUM_WARPS = 4 }; /* warps per block of sum_parts */

/* Writes dk and dv: a warp adds up the terms of a key, eight columns per lane. `a` has the views of dk and dv
 * themselves, not of their terms. A key whose sums are not finite is recomputed. */
template <typename T>
__global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_parts(const __grid_constant__ cuda_args a, const __grid_constant__ parts_sum p)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    const int64_t rows = d.Sk * d.Hk * (d.packed ? 1 : d.B), step = (int64_t)gridDim.x * SUM_WARPS;
    const int lane = threadIdx.x % 32, of_k = p.dk.data ? (int)d.D / 8 : 0,
              all = of_k + (p.dv.data ? (int)d.Dv / 8 : 0);
    wait_for_prerequisites();
    for (int64_t n = blockIdx.x * SUM_WARPS + threadIdx.x / 32; n < rows; n += step) {
        const int64_t line = n % d.Sk, head = n / d.Sk, hk = d.packed ? head : head % d.Hk,
                      b = d.packed ? sequence_at(g.cu_k, d.B, line) : head / d.Hk;
        const attn_sequence s = attn_sequence_of(&g, b);
        if (d.packed && (line < s.k_start || line >= s.k_start + s.Sk)) continue;
        bool finite = true;
        for (int c = lane; c < all; c += 32) {
            const bool of_dk = c < of_k;
            const attn_view &terms = of_dk ? p.dk : p.dv, &to = g.view[of_dk ? ATTN_T_dk : ATTN_T_dv];
            const int64_t batch = d.packed ? 0 : b, column = (of_dk ? c : c - of_k) * 8;
            float y[8];
            add_terms(y, terms, attn_at(&terms, batch, hk * p.parts, line) + column, p.parts);
#pragma unroll
            for (int e = 0; e < 8; e++) finite &= y[e] - y[e] == 0;
            store_eight<T>(to, attn_at(&to, batch, hk, line) + column, y);
        }
        if (__all_sync(0xffffffff, finite)) continue;
        /* dkdv_row() overwrites what other lanes have written above, so their writes must come first */
        __syncwarp();
        repair_begins();
        dkdv_row(a, p.s, b, hk, line - s.k_start);
    }
}

template <typename T>
cudaError_t launch_sum(const cuda_chip *chip, cudaStream_t stream, const cuda_args &a, const parts_sum &p)
{
    const int64_t blocks = attn_min64(attn_tiles(key_rows(a.g.dims), SUM_WARPS), chip->multiprocessors * 64);
    return launch_dependent(sum_parts<T>, blocks, 32 * SUM_WARPS, 0, stream, a, p);
}

} // namespace

#endif
