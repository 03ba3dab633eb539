/* split.cuh: float32 on tensor cores that multiply 16-bit numbers. A float32 number, multiplied by a power of two that
 * brings it into float16's range, is the sum of two float16 numbers with 11 of its bits each:
 *
 * x 2^e = hi + lo / 2048, hi = f16(x 2^e), lo = f16((x 2^e - hi) 2048)
 * sum_k x_k y_k = 2^-(ex + ey) ( sum hi hi' + (sum hi lo' + sum lo hi') / 2048 )
 *
 * Three float16 products make one float32 product; lo lo' is too small to matter. Because float16 has a small range,
 * every 128 rows of one head of one sequence (a tile) share an exponent e, which brings the largest number between 2^7
 * and 2^15. e is a multiple of 8, so that the bits of a row seldom depend on the other rows.
 *
 * For a number of at least 2^-21 of the tile's largest number, the error of hi + lo is at most 2^-22 of the number
 * itself. For a smaller number, the error is at most 2^-42 of the tile's largest number. If all numbers of a row,
 * except zeros, are below 2^-22 of the tile's largest, the tile is `wide`: results that depend on it are computed row
 * by row in float32 (rows.cuh).
 *
 * Largest errors against float64, divided by the largest value (lse: not divided), for N(0, 1), lengths 1024 to 4096, D
 * 64 to 256, causal and not: out 1.2e-6, lse 1e-6, dq 1.9e-6, dk 1.5e-6, dv 1.3e-6; with q three times as large: out
 * 9e-7, lse 5e-6, dq 1.4e-6, dk 1.2e-6, dv 1.2e-6. Sums in float32 have about the same error. (One NVIDIA H200,
 * 2026-11-20.)
 *
 * Tensor cores truncate when they add, so over thousands of additions the errors would add up. They therefore add only
 * the products of one tile, from 0 on; a rounded multiply-add adds this sum to the running sum.
 *
 * Tensors are stored as "planes": tiles of [2][128][D] float16 (hi, then lo), with zeros beyond the last row and
 * column. NaN and infinity become NaN in hi and 0 in lo, and do not count for the largest number. */
#ifndef ATTN_SM80_SPLIT_CUH
#define ATTN_SM80_SPLIT_CUH

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/rows.cuh"
#include "scores.cuh"

enum { SPLIT_ROWS = 128 };
const float LO_UNIT = 1.0f / 2048;

struct split_stats {
    int exponent;
    int wide;
    float top;
    float norm; /* the largest Euclidean norm of the tile's rows, times 2^exponent */
};

/* The planes (float16 parts hi and lo) of a tensor. A head has `tiles` tiles of 128 rows; in a packed problem, sequence
 * b has the tiles from number start / 128 + b on, where `start` is its first row. */
struct split_planes {
    uint16_t *data;
    split_stats *stats;
    int64_t tiles;
    int heads, width;
    int queries; /* 1: the tensor's rows are queries; 0: they are keys */
    /* 1: sequences are packed, and in each head the tiles of all sequences follow each other; 0: not packed */
    int packed;
};

DEVICE int64_t split_tile_of(const split_planes &p, int64_t b, int64_t h, int64_t start)
{
    return p.packed ? h * p.tiles + start / SPLIT_ROWS + b : (b * p.heads + h) * p.tiles;
}

/* ---- Functions of the host --------------------------------------------------------------------------------------- */

static inline int split_class(const attn_dims &d)
{
    const int64_t D = attn_max64(d.D, d.Dv);
    return D <= 64 ? 64 : D <= 128 ? 128 : 256;
}

static inline size_t split_align(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Lays out the planes (float16 parts hi and lo) of tensor `id` at `memory`, and sets *bytes to their size. If `memory`
 * is NULL, it only sets *bytes. */
static inline split_planes split_planes_of(const attn_dims &d, attn_tensor_id id, void *memory, size_t *bytes)
{
    split_planes p;
    p.queries = id == ATTN_T_q || id == ATTN_T_dout;
    p.heads = (int)(p.queries ? d.H : d.Hk);
    p.width = (int)(id == ATTN_T_q || id == ATTN_T_k ? d.D : d.Dv);
    p.packed = p.queries ? d.packed : attn_keys_are_packed(&d);
    p.tiles = p.packed ? (p.queries ? d.total_q : d.total_k) / SPLIT_ROWS + d.B
                       : attn_tiles(p.queries ? d.Sq : d.Sk, SPLIT_ROWS);
    const size_t tiles = (size_t)p.tiles * (size_t)p.heads * (size_t)(p.packed ? 1 : d.B),
                 stats = split_align(tiles * sizeof(split_stats));
    p.stats = (split_stats *)memory;
    p.data = (uint16_t *)((char *)memory + stats);
    *bytes = stats + tiles * 2 * SPLIT_ROWS * (size_t)split_class(d) * sizeof(uint16_t);
    return p;
}

/* Splits `count` (at most 4) float32 tensors into float16 numbers hi and lo: tensor ids[n] is written to planes[n] (in
 * f32_split.cu). */
cudaError_t split_tensors(const cuda_args &a, const split_planes *planes, const attn_tensor_id *ids, int count,
                          cudaStream_t stream);

/* ---- Functions of the device ------------------------------------------------------------------------------------- */

/* Returns 2^e; |e| must be at most 126. */
DEVICE float power_of_two(int e)
{
    return __int_as_float((e + 127) << 23);
}

/* Copies rows `row` to `row` + ROWS - 1 of a tile to shared memory: high halves to to[0 .. ROWS * D), followed by the
 * low halves. `tile` points to the tile's high halves, which its low halves follow. */
template <int D, int ROWS, int THREADS> DEVICE void load_planes(uint16_t *to, const uint16_t *tile, int row)
{
    const int PIECES = D / 8, STEP = THREADS / PIECES;
    const int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
    const uint16_t *from = tile + (row + r) * D + c * 8;
    const uint32_t there = smem_addr(to + at<D>(r, c));
#pragma unroll
    for (int plane = 0; plane < 2; plane++)
#pragma unroll
        for (int n = 0; n < ROWS / STEP; n++)
            cp_async_16(STEP % 8 == 0 ? there + (plane * ROWS + n * STEP) * D * 2
                                      : smem_addr(to + plane * ROWS * D + at<D>(r + n * STEP, c)),
                        from + plane * SPLIT_ROWS * D + n * STEP * D, true);
}

/* Splits two numbers below 65504 in magnitude into hi + lo / LO. LO is 2048 for tiles in memory, 1 for operands in
 * registers. */
template <int LO> DEVICE void split_pair(uint32_t &hi, uint32_t &lo, float x, float y)
{
    hi = pack<__half>(x, y);
    const float2 there = __half22float2(*reinterpret_cast<const __half2 *>(&hi));
    lo = pack<__half>((x - there.x) * LO, (y - there.y) * LO);
}

/* Splits 16 rows x N columns of a matrix product into float16 operands hi and lo, whose sum is the product. */
template <int N>
DEVICE void split_fragments(uint32_t (&ah)[N / 16][4], uint32_t (&al)[N / 16][4], const float (&S)[N / 8][4])
{
#pragma unroll
    for (int nt = 0; nt < N / 8; nt++) {
        const int kk = nt / 2, n = nt % 2 * 2;
        split_pair<1>(ah[kk][n], al[kk][n], S[nt][0], S[nt][1]);
        split_pair<1>(ah[kk][n + 1], al[kk][n + 1], S[nt][2], S[nt][3]);
    }
}

/* by_16() and by_8() return the address in a tile from which a lane loads a fragment (operand of mma.sync) by ldmatrix.
 * Piece c (16 bytes) of row r is stored as piece c ^ (r % 8), and tiles are 1024-byte aligned. The address of piece
 * 2 n + c is therefore the address of piece c, exclusive-or 32 n, and a lane keeps one address per tile.
 *
 * by_16  row lane % 16, piece lane / 16: for A by rows, and for B by columns with ldmatrix.trans
 * by_8   row lane % 8 + 8 (lane / 16), piece lane / 8 % 2: for B by rows, and for A by columns with ldmatrix.trans */
template <int D> DEVICE uint32_t by_16(const uint16_t *tile, int lane)
{
    return smem_addr(tile + at<D>(lane % 16, lane / 16));
}
template <int D> DEVICE uint32_t by_8(const uint16_t *tile, int lane)
{
    return smem_addr(tile + at<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2));
}

/* Hides the value of x from the compiler, which would otherwise compute values from x before a loop and keep them all
 * in registers. */
DEVICE void opaque(uint32_t &x)
{
    asm volatile("" : "+r"(x));
}

/* Computes S = A B^T over D channels, for 16 MT rows of A and N rows of B. Both are stored in shared memory as float16
 * parts hi and lo. Small products (hi times lo) are summed separately, because tensor cores truncate when they add.
 * A_ROWS: number of rows of A in shared memory. */
template <int D, int MT, int N, int A_ROWS, bool TURNED = false>
DEVICE void multiply_rows(float (&S)[MT][N / 8][4], uint32_t a, uint32_t b)
{
    float rest[MT][N / 8][4] = {};
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < N / 8; nt++) S[mt][nt][0] = S[mt][nt][1] = S[mt][nt][2] = S[mt][nt][3] = 0;
    constexpr int STEPS = D == 64 || (D == 128 && MT == 1) ? 4 : 2;
#pragma unroll STEPS
    for (int kk = 0; kk < D / 16; kk++) {
        uint32_t ah[MT][4], al[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            ldmatrix_x4(ah[mt], (a ^ kk * 32) + mt * 32 * D);
            ldmatrix_x4(al[mt], (a ^ kk * 32) + mt * 32 * D + A_ROWS * 2 * D);
        }
#pragma unroll
        for (int nt = 0; nt < N / 8; nt += 2) {
            uint32_t bh[4], bl[4];
            ldmatrix_x4(bh, (b ^ kk * 32) + nt * 16 * D);
            ldmatrix_x4(bl, (b ^ kk * 32) + nt * 16 * D + N * 2 * D);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 2; n++)
                    if (TURNED) mma<__half>(rest[mt][nt + n], al[mt], bh[n * 2], bh[n * 2 + 1]);
                    else mma<__half>(rest[mt][nt + n], ah[mt], bl[n * 2], bl[n * 2 + 1]);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 2; n++) mma<__half>(S[mt][nt + n], ah[mt], bh[n * 2], bh[n * 2 + 1]);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 2; n++)
                    if (TURNED) mma<__half>(rest[mt][nt + n], ah[mt], bl[n * 2], bl[n * 2 + 1]);
                    else mma<__half>(rest[mt][nt + n], al[mt], bh[n * 2], bh[n * 2 + 1]);
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < N / 8; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[mt][nt][e] = fmaf(rest[mt][nt][e], LO_UNIT, S[mt][nt][e]);
}

/* Computes sum += A B, where B has 16 rows and PAIRS times 16 columns. A is in registers as hi + lo. B is in shared
 * memory as planes hi' and lo', PLANE bytes apart, and is read by columns from address b on. lo' is multiplied by hi /
 * 2048, because plane lo' holds 2048 times the low part of B. */
template <int MT, int PAIRS, int PLANE>
DEVICE void multiply_columns(float (&sum)[MT][2 * PAIRS][4], const uint32_t (&ah)[MT][4], const uint32_t (&al)[MT][4],
                             uint32_t b, int pair, int offset)
{
    uint32_t bh[PAIRS][4], bl[PAIRS][4], as[MT][4];
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        ldmatrix_x4_trans(bl[n], (b ^ (pair + n) * 32) + offset + PLANE);
        ldmatrix_x4_trans(bh[n], (b ^ (pair + n) * 32) + offset);
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const __half2 small = __hmul2(*reinterpret_cast<const __half2 *>(&ah[mt][e]), __float2half2_rn(LO_UNIT));
            as[mt][e] = *reinterpret_cast<const uint32_t *>(&small);
        }
#pragma unroll
    for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
        for (int mt = 0; mt < MT; mt++) mma<__half>(sum[mt][n], as[mt], bl[n / 2][n % 2 * 2], bl[n / 2][n % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
        for (int mt = 0; mt < MT; mt++) mma<__half>(sum[mt][n], al[mt], bh[n / 2][n % 2 * 2], bh[n / 2][n % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
        for (int mt = 0; mt < MT; mt++) mma<__half>(sum[mt][n], ah[mt], bh[n / 2][n % 2 * 2], bh[n / 2][n % 2 * 2 + 1]);
}

/* Loads ROWS rows of a float32 tensor to a warp's registers, D / 32 columns per lane. Elements outside the tensor are
 * 0. `pages` is the problem if the tensor is paged keys or values (page_table), otherwise NULL. */
template <int D, int ROWS>
DEVICE void load_rows(float (&x)[ROWS][D / 32], const attn_view &view, int64_t b, int64_t h, int64_t start,
                      int64_t first, int64_t count, int width, const attn_geometry *pages = nullptr)
{
    const int V = D / 32, lane = threadIdx.x % 32;
    const float *const data = (const float *)view.data + (pages ? h * view.head : attn_at(&view, b, h, start)) +
                              lane * V;
    const bool vectors = width % V == 0 && view.row % V == 0 && (!pages || view.batch % V == 0) &&
                         (uint64_t)data % (4 * V) == 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const bool looked_up = pages && first + r < count;
        const float *from = data + (looked_up ? attn_key_at(pages, &view, b, 0, first + r) : (first + r) * view.row);
#pragma unroll
        for (int v = 0; v < V; v++) x[r][v] = 0;
        if (first + r >= count) continue;
        if (!vectors) {
#pragma unroll
            for (int v = 0; v < V; v++)
                if (lane * V + v < width) x[r][v] = from[v];
        } else if (lane * V < width) {
            if (V == 2) {
                const float2 two = *(const float2 *)from;
                x[r][0] = two.x, x[r][1] = two.y;
            } else {
#pragma unroll
                for (int v = 0; v < V; v += 4) {
                    const float4 four = *(const float4 *)(from + v);
                    x[r][v] = four.x, x[r][v + 1] = four.y, x[r][(v + 2) % V] = four.z, x[r][(v + 3) % V] = four.w;
                }
            }
        }
    }
}

DEVICE bool is_number(float x)
{
    return x - x == 0;
}

/* Finds the largest magnitude of each row. `top` becomes the largest of these magnitudes, `least` the smallest that is
 * not 0 (+inf if all are 0). */
template <int V, int ROWS> DEVICE void range_of_rows(const float (&x)[ROWS][V], float &top, float &least)
{
    top = 0, least = CUDART_INF_F;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float most = 0;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (is_number(x[r][v])) most = fmaxf(most, fabsf(x[r][v]));
        /* among floats that are not negative, the largest also has the largest bits as an integer */
        most = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(most)));
        top = fmaxf(top, most);
        if (most > 0) least = fminf(least, most);
    }
}

/* Returns the exponent e of a tile whose largest magnitude is `top`: a multiple of 8, at most 120. top * 2^e is below
 * 2^15. Unless e is 120 or top is 0, top * 2^e is at least 2^7. */
DEVICE int exponent_of(float top)
{
    const int E = (int)(__float_as_uint(top) >> 23) - 127;
    return top == 0 ? 0 : min((14 - E >> 3) * 8, 120);
}

DEVICE bool is_wide(float top, float least)
{
    return least < top * (1.0f / (1 << 22));
}

/* Multiplies V numbers of a row, which one lane holds, by `factor`, and splits each product into two float16 numbers:
 * the high halves go to `to`, the low halves to `to` + `plane`. Returns the sum of the squared products. */
template <int V> DEVICE float split_row(uint16_t *to, int plane, const float (&x)[V], float factor)
{
    uint32_t hi[V / 2], lo[V / 2];
    float square = 0;
#pragma unroll
    for (int v = 0; v < V; v += 2) {
        const bool keep0 = is_number(x[v]), keep1 = is_number(x[v + 1]);
        const float y0 = keep0 ? x[v] * factor : 0, y1 = keep1 ? x[v + 1] * factor : 0;
        square += y0 * y0 + y1 * y1;
        split_pair<2048>(hi[v / 2], lo[v / 2], y0, y1);
        hi[v / 2] |= (keep0 ? 0 : 0x7fff) | (keep1 ? 0 : 0x7fff0000);
    }
    if (V == 2) {
        *(uint32_t *)to = hi[0];
        *(uint32_t *)(to + plane) = lo[0];
    } else if (V == 4) {
        *(uint2 *)to = make_uint2(hi[0], hi[V / 2 - 1]);
        *(uint2 *)(to + plane) = make_uint2(lo[0], lo[V / 2 - 1]);
    } else {
        *(uint4 *)to = make_uint4(hi[0], hi[1 % (V / 2)], hi[2 % (V / 2)], hi[3 % (V / 2)]);
        *(uint4 *)(to + plane) = make_uint4(lo[0], lo[1 % (V / 2)], lo[2 % (V / 2)], lo[3 % (V / 2)]);
    }
    return square;
}

/* Returns whether any of tiles `first` to `last` - 1 is wide (has a row whose numbers are all too small for the tile's
 * exponent). All threads of the block call it. */
DEVICE bool any_wide(const split_stats *stats, int first, int last)
{
    bool wide = false;
    for (int t = first + (int)threadIdx.x; t < last; t += (int)blockDim.x) wide |= stats[t].wide != 0;
    return __syncthreads_or(wide);
}

#endif
