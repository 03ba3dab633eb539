/* wide.cuh: code that wide_forward.cu and wide_backward.cu share. They compute any head size, and read a chunk of
 * columns of a tile at a time. */
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

/* Computes S += A B^T over a chunk of CHUNK channels, of which `channels` exist. tileA and tileB are offsets in shared
 * memory; the warp's rows of A begin at row `first`. */
template <typename T, int CHUNK, int MT, int NT>
DEVICE void add_chunk(float (&S)[MT][NT][4], uint32_t start, uint32_t tileA, uint32_t tileB, int first, int channels)
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

/* Writes a block's COLUMNS columns of a result, from `column0` on (`width` of them exist), to rows from `line` on. A
 * warp writes its own `count` rows through `staged`, shared memory of COLUMNS / 2 floats for each row of the block. */
template <typename T, int MT, int DT>
DEVICE void store_columns(const attn_view &result, int64_t b, int64_t h, int64_t line, int count, int column0,
                          int width, const float (&O)[MT][DT][4], void *staged)
{
    const int HALF = COLUMNS / 2, lane = threadIdx.x % 32, mine = threadIdx.x / 32 * MT * 16;
    /* `pieces` must be the same for all warps of the block; otherwise a warp could overwrite rows that another warp has
     * stored */
    const bool pieces = in_pieces<T>(columns_from(result, column0), b, h, line, width);
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
                    stage_pair<T, HALF>(staged, pieces, mine + mt * 16 + half * 8 + lane / 4, dt * 8 + lane % 4 * 2,
                                        o[half * 2], o[half * 2 + 1]);
                }
        __syncwarp();
        store_rows<HALF, 32>(columns_from(result, column0 + part * HALF), b, h, line, mine, count,
                             min(width - part * HALF, HALF), staged, pieces, lane);
        __syncwarp();
    }
}

} // namespace

#endif
