/* wide.cuh: code that wide_forward.cu and wide_backward.cu share. They compute any head size, and read a chunk of
 * columns of a tile at a time.
 *
 * T is the type of the tensors: __half, __nv_bfloat16 or float. Tensor cores multiply float32 numbers as sums of two
 * TF32 numbers (11 bits each): x = hi + lo, and x y = hi hi' + hi lo' + lo hi'. The error of a product is about 2^-22
 * of it. Tensor cores truncate when they add. So each of their sums begins at 0 and has the products of only 32 columns
 * of q and k, or of one tile of keys; an ordinary addition, which rounds, adds it to the running sum. */
#ifndef ATTN_SM80_WIDE_CUH
#define ATTN_SM80_WIDE_CUH

#include "scores.cuh"

namespace {

enum { COLUMNS = 256 }; /* number of columns of a result that a block computes */

DEVICE attn_view columns_from(attn_view view, int first)
{
    const int bytes = view.dtype == ATTN_F32 ? 4 : view.dtype == ATTN_F8E4M3 ? 1 : 2;
    if (view.data) view.data = (char *)view.data + (int64_t)first * bytes;
    return view;
}

template <typename T> constexpr bool is_float = sizeof(T) == 4;
/* number of 16-bit words of an element */
template <typename T> constexpr int WORDS = sizeof(T) / 2;

/* ---- Products of float32 numbers --------------------------------------------------------------------------------- */

/* Splits x into hi + lo, two TF32 numbers. */
DEVICE void split_tf32(uint32_t &hi, uint32_t &lo, float x)
{
    hi = tf32_of(x);
    lo = tf32_of(x - __uint_as_float(hi));
}
template <int N> DEVICE void split_tf32(uint32_t (&hi)[N], uint32_t (&lo)[N], const uint32_t (&x)[N])
{
#pragma unroll
    for (int n = 0; n < N; n++) split_tf32(hi[n], lo[n], __uint_as_float(x[n]));
}

/* Tensor cores add the products of this many columns of q and k, beginning at 0; an ordinary addition then adds their
 * sum to the score. */
enum { SUMMED = 32 };

/* The part of add_chunk() (below) for float32. */
template <int CHUNK, bool TURNED, int NT>
DEVICE void add_float_chunk(float (&S)[1][NT][4], uint32_t start, uint32_t tileA, uint32_t tileB, int first)
{
    const int lane = threadIdx.x % 32, WIDTH = CHUNK * WORDS<float>, STEPS = SUMMED / 8;
    const uint32_t down = start + lane_down<WIDTH>(lane), across = start + lane_across<WIDTH>(lane);
#pragma unroll
    for (int part = 0; part < CHUNK / SUMMED; part++) {
        float sum[NT][4] = {}, small[NT][4] = {}; /* small: the sum of products in which one factor is a `lo` */
#pragma unroll
        for (int kk = part * STEPS; kk < (part + 1) * STEPS; kk++) {
            uint32_t a[4], ah[4], al[4];
            a_rows_of<WIDTH>(a, down, tileA, first, kk * 16);
            split_tf32(ah, al, a);
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                uint32_t b[4], bh[4], bl[4];
                b_rows_of<WIDTH>(b, across, tileB, nt * 8, kk * 16);
                split_tf32(bh, bl, b);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    if (TURNED) mma_tf32(small[nt + n], al, bh[n * 2], bh[n * 2 + 1]);
                    else mma_tf32(small[nt + n], ah, bl[n * 2], bl[n * 2 + 1]);
                    mma_tf32(sum[nt + n], ah, bh[n * 2], bh[n * 2 + 1]);
                    if (TURNED) mma_tf32(small[nt + n], ah, bl[n * 2], bl[n * 2 + 1]);
                    else mma_tf32(small[nt + n], al, bh[n * 2], bh[n * 2 + 1]);
                }
            }
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[0][nt][e] += sum[nt][e] + small[nt][e];
    }
}

/* Computes O += P B for float32. B is a tile of COLUMNS columns at offset `tile` in shared memory. A step multiplies
 * eight rows of B in the order 0, 2, 4, 6, 1, 3, 5, 7, because that is how registers hold P. */
template <int NT, int DT> DEVICE void accumulate_floats(float (&O)[1][DT][4], const float (&P)[1][NT][4], uint32_t tile)
{
    static_assert(DT * 8 == COLUMNS, "all columns");
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    uint32_t ah[NT][4], al[NT][4];
#pragma unroll
    for (int kk = 0; kk < NT; kk++)
#pragma unroll
        for (int e = 0; e < 4; e++) split_tf32(ah[kk][e], al[kk][e], P[0][kk][e % 2 * 2 + e / 2]);
    const float *const B = (const float *)(&block_memory<char>() + tile);
#pragma unroll
    for (int dt = 0; dt < DT; dt++) {
        float sum[4] = {}, small[4] = {};
        const int column = dt * 8 + g;
#pragma unroll
        for (int kk = 0; kk < NT; kk++) {
            uint32_t bh[2], bl[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = kk * 8 + 2 * q + e;
                split_tf32(bh[e], bl[e], B[row * COLUMNS + (column / 4 ^ row % 8) * 4 + column % 4]);
            }
            mma_tf32(small, ah[kk], bl[0], bl[1]);
            mma_tf32(sum, ah[kk], bh[0], bh[1]);
            mma_tf32(small, al[kk], bh[0], bh[1]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) O[0][dt][e] += sum[e] + small[e];
    }
}

/* ---- Products of 16-bit numbers ---------------------------------------------------------------------------------- */

/* The part of add_chunk() (below) for 16-bit numbers. */
template <typename T, int CHUNK, int MT, int NT>
DEVICE void add_short_chunk(float (&S)[MT][NT][4], uint32_t start, uint32_t tileA, uint32_t tileB, int first,
                            int channels)
{
    const int lane = threadIdx.x % 32;
    const uint32_t down = start + lane_down<CHUNK>(lane), across = start + lane_across<CHUNK>(lane);
    const auto rows_of_a = [&](uint32_t(&f)[4], int mt, int kk) {
        a_rows_of<CHUNK>(f, down, tileA, first + mt * 16, kk * 16);
    };
    const auto rows_of_b = [&](uint32_t(&f)[4], int nt, int kk) {
        b_rows_of<CHUNK>(f, across, tileB, nt * 8, kk * 16);
    };
    if (channels > CHUNK / 2) scores<T, CHUNK>(S, rows_of_a, rows_of_b);
    else scores<T, CHUNK / 2>(S, rows_of_a, rows_of_b);
}

/* ---- Products of either type ------------------------------------------------------------------------------------- */

/* Computes S += A B^T over a chunk of CHUNK channels, of which `channels` exist. tileA and tileB are offsets in shared
 * memory; the warp's rows of A begin at row `first`. If TURNED, A and B have changed places, for S^T. Float32 products
 * are then added in the same order as for S, so that the sums have the same bits. */
template <typename T, int CHUNK, bool TURNED = false, int MT, int NT>
DEVICE void add_chunk(float (&S)[MT][NT][4], uint32_t start, uint32_t tileA, uint32_t tileB, int first, int channels)
{
    if constexpr (is_float<T>) add_float_chunk<CHUNK, TURNED>(S, start, tileA, tileB, first);
    else add_short_chunk<T, CHUNK>(S, start, tileA, tileB, first, channels);
}

/* Computes O += P B, where B is a tile of COLUMNS columns at offset `tile` in shared memory. */
template <typename T, int MT, int NT, int DT>
DEVICE void add_product(float (&O)[MT][DT][4], const float (&P)[MT][NT][4], uint32_t start, uint32_t tile)
{
    if constexpr (is_float<T>) accumulate_floats(O, P, tile);
    else {
        const uint32_t down = start + lane_down<COLUMNS>(threadIdx.x % 32);
        accumulate<T>(O, P,
                      [&](uint32_t(&f)[4], int dt, int kk) { b_columns_of<COLUMNS>(f, down, tile, dt * 8, kk * 16); });
    }
}

/* Writes a block's COLUMNS columns of a result, from `column0` on (`width` of them exist), to rows from `line` on. A
 * warp writes its own `count` rows through `staged`, shared memory of COLUMNS / 2 floats for each row of the block. */
template <typename T, int MT, int DT>
DEVICE void store_columns(const attn_view &result, int64_t b, int64_t h, int64_t line, int count, int column0,
                          int width, const float (&O)[MT][DT][4], void *staged)
{
    const int HALF = COLUMNS / 2, lane = threadIdx.x % 32, mine = threadIdx.x / 32 * MT * 16;
    /* `pieces` must be the same for all warps of the block; otherwise a warp could overwrite rows that another warp has
     * stored */
    bool pieces = false;
    if constexpr (!is_float<T>) pieces = in_pieces<T>(columns_from(result, column0), b, h, line, width);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        if (part * HALF >= width) break;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int dt = 0; dt < HALF / 8; dt++) {
                    const float(&o)[4] = O[mt][part * (HALF / 8) + dt];
                    const int r = mine + mt * 16 + half * 8 + lane / 4, d = dt * 8 + lane % 4 * 2;
                    if constexpr (is_float<T>)
                        *(float2 *)((float *)staged + r * HALF + d) = make_float2(o[half * 2], o[half * 2 + 1]);
                    else stage_pair<T, HALF>(staged, pieces, r, d, o[half * 2], o[half * 2 + 1]);
                }
        __syncwarp();
        store_rows<HALF, 32>(columns_from(result, column0 + part * HALF), b, h, line, mine, count,
                             min(width - part * HALF, HALF), staged, pieces, lane);
        __syncwarp();
    }
}

} // namespace

#endif
