/* tile.cuh: what the Hopper kernels of both kinds do alike with tiles: walk a ring of stages, store rows of O. */
#ifndef ATTN_SM90_TILE_CUH
#define ATTN_SM90_TILE_CUH

#include "ptx.cuh"

/* Place in a ring: stage and phase. */
template <int STAGES> struct ring {
    int stage = 0;
    uint32_t phase = 0;
    DEVICE void next()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

/* A warp's 16 rows of O to memory through shared memory of its own, whole rows at a time. The 16-byte piece c of row r lies at c ^ (r & 7). */
template <typename T, int D> DEVICE void store_rows(T *rows, int64_t stride, int count, int Dv, const float (&O)[D / 2], uint16_t *staging, int lane)
{
    const int PIECES = D / 8, PITCH = (D + 63) / 64 * 8; /* of a row, in pieces; pieces stay among their 8 */
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) r[e] = pack<T>(O[n * 8 + e * 2], O[n * 8 + e * 2 + 1]);
        const int i = lane % 16, piece = 2 * n + lane / 16;
        stmatrix_x4(smem_addr(staging + (i * PITCH + (piece ^ (i & 7))) * 8), r);
    }
    __syncwarp();
    const int STEP = 32 % PIECES == 0 ? 32 / PIECES : 0; /* rows that a warp stores at a time, where a lane's piece is always the same */
    auto word_of = [&](int i, int piece) { return *(const uint4 *)(staging + (i * PITCH + (piece ^ (i & 7))) * 8); };
    if (STEP) {
        const int i = lane / PIECES, piece = lane % PIECES;
        const int rows_left = piece * 8 < Dv ? count - i : 0;
        T *to = rows + i * stride + piece * 8;
        uint4 words[D / 16]; /* all asked for before the first is stored */
#pragma unroll
        for (int n = 0; n < D / 16; n++) words[n] = word_of(i + n * STEP, piece);
#pragma unroll
        for (int n = 0; n < D / 16; n++, to += STEP * stride)
            if (n * STEP < rows_left) store_16(to, words[n]);
    } else {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            const int at = n * 32 + lane, i = at / PIECES, piece = at % PIECES;
            const uint4 word = word_of(i, piece);
            if (i < count && piece * 8 < Dv) store_16(rows + i * stride + piece * 8, word);
        }
    }
}

#endif
