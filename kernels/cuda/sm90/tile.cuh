/* tile.cuh: what the Hopper kernels do with tiles, most of it checked by tests/gpu/blocks.cu: walk a ring of
 * stages, multiply tiles of 16 bits, find operands of 8 bits, make P an operand, mask scores, store rows of O. */
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

/* ---- Products. X: head dims D and DV, BN keys a tile ------------------------------------------------------------- */

/* S[0 .. N) = Q K^T for 64 rows and the first N keys of the tile. */
template <typename T, class X, int N> DEVICE void scores(float (&S)[N / 2], uint32_t Q, uint32_t K)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < X::D / 16; k++)
        wgmma<T, N>::ss(S, wgmma_descriptor(Q + k / 4 * 8192 + k % 4 * 32, 16, 1024),
                        wgmma_descriptor(K + k / 4 * X::BN * 128 + k % 4 * 32, 16, 1024), k > 0);
    wgmma_commit();
}

/* O += P V for 64 rows. */
template <typename T, class X>
DEVICE void accumulate(float (&O)[X::DV / 2], const uint32_t (&P)[X::BN / 16][4], uint32_t V)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < X::BN / 16; k++)
        wgmma<T, X::DV>::rs(O, P[k], wgmma_descriptor(V + k * 2048, X::BN * 128, 1024), 1);
    wgmma_commit();
}

/* Descriptor of an operand, K-major: rows of 128 bytes. Step k of 32 bytes is further by step<ROWS>(k), ROWS rows a
 * chunk. */
DEVICE uint64_t operand(uint32_t address)
{
    return wgmma_descriptor(address, 16, 1024);
}
template <int ROWS> DEVICE uint32_t step(int k)
{
    return (k / 4 * ROWS * 128 + k % 4 * 32) >> 4;
}

/* P as the next product's operand, in 16 bits. */
template <typename T, int N, int M> DEVICE void to_operand(uint32_t (&P)[M][4], const float (&S)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}

/* The same of float8_e4m3: of each 32 keys, 4 registers of 4. The order of V^T's keys is turn_step's. */
template <int N> DEVICE void to_operand_8(uint32_t (&P)[N / 32][4], const float (&S)[N / 2])
{
#pragma unroll
    for (int k = 0; k < N / 32; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float *const s = S + k * 16 + r / 2 * 8 + r % 2 * 2;
            P[k][r] = pack_e4m3(s[0], s[1], s[4], s[5]);
        }
}

/* -inf where the thread's rows i0 (registers 0 1 4 5 ...) and i0 + 8 do not see keys j0 .. ; row i sees [i + lo,
 * min(i + hi, Sk)). */
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

/* ---- O ----------------------------------------------------------------------------------------------------------- */

/* A warp's 16 rows of O to memory through shared memory of its own, whole rows at a time. The 16-byte piece c of
 * row r lies at c ^ (r & 7). */
template <typename T, int D>
DEVICE void store_rows(T *rows, int64_t stride, int count, int Dv, const float (&O)[D / 2], uint16_t *staging, int lane)
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
    const int STEP = 32 % PIECES == 0
                         ? 32 / PIECES
                         : 0; /* rows that a warp stores at a time, where a lane's piece is always the same */
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
