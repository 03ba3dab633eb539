/* tile.cuh: tiles of rows in shared memory, and the interval of keys that a row sees, for the kernels of this folder.
 *
 * A tile is rows of D 16-bit elements in pieces of 16 bytes; piece c of row r lies at c ^ (r % 8), so that neither copies nor ldmatrix meet a
 * bank twice. The four ways a fragment is read from one (mma.m16n8k16, see ptx.cuh):
 *
 *   a_rows     A, rows of the tile are m          b_rows   B, rows of the tile are n     (Q K^T: both)
 *   a_columns  A, columns of the tile are m       b_columns B, rows of the tile are k    (P V: V by columns) */
#ifndef ATTN_SM80_TILE_CUH
#define ATTN_SM80_TILE_CUH

#include "ptx.cuh"

/* Where piece (16 bytes) c of row r lies, in elements. */
template <int D> DEVICE int at(int r, int c) { return r * D + (c ^ (r & 7)) * 8; }

/* Copies tiles of one head's rows to shared memory. A thread copies piece c of rows r, r + STEP, ... of every tile; Where STEP
 * is a multiple of 8 its place in the swizzle is the same in each. */
template <int D, int THREADS> struct loader {
    static const int PIECES = D / 8, STEP = THREADS / PIECES;
    const char *data;   /* of this thread's piece in row r of the sequence; of the row itself where copies do not fit */
    int64_t row_bytes;
    int rows;           /* of the sequence: those from here on are zeros */
    int columns;
    bool pieces;        /* every row starts on 16 bytes, and columns fill whole pieces */
    bool eight_bit;

    DEVICE loader(const attn_view &view, int64_t b, int64_t h, int64_t line, int64_t count, int64_t width)
    {
        const int bytes = view.dtype == ATTN_F8E4M3 ? 1 : 2;
        data = (const char *)view.data + attn_at(&view, b, h, line) * bytes;
        row_bytes = view.row * bytes;
        rows = (int)count;
        columns = (int)width;
        eight_bit = bytes == 1;
        pieces = bytes == 2 && width % 8 == 0 && row_bytes % 16 == 0 && (uint64_t)data % 16 == 0;
        if (pieces) data += threadIdx.x / PIECES * row_bytes + threadIdx.x % PIECES * 16;
    }

    /* Rows [first, first + ROWS); those past the sequence and columns past the tensor are zeros. float8 becomes float16, which
     * holds each of its values. */
    template <int ROWS> DEVICE void load(uint16_t *to, int first) const
    {
        if (pieces) {
            const int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
            const bool column = c * 8 < columns;
            const char *from = data + first * row_bytes;
            const uint32_t there = smem_addr(to + at<D>(r, c));
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++)
                cp_async_16(STEP % 8 == 0 ? there + n * STEP * D * 2 : smem_addr(to + at<D>(r + n * STEP, c)), from + n * STEP * row_bytes, column && first + r + n * STEP < rows);
            return;
        }
#pragma unroll 1
        for (int n = threadIdx.x; n < ROWS * D; n += THREADS) {
            const int r = n / D, d = n % D;
            uint16_t x = 0;
            if (first + r < rows && d < columns) {
                const char *line = data + (first + r) * row_bytes;
                x = eight_bit ? __half_as_ushort(__float2half_rn(attn_e4m3_to_f32(((const uint8_t *)line)[d]))) : ((const uint16_t *)line)[d];
            }
            to[at<D>(r, d / 8) + d % 8] = x;
        }
    }
};

template <typename T> constexpr int exponent_mask = 0x7f80; /* bfloat16 */
template <> constexpr int exponent_mask<__half> = 0x7c00;
template <typename T> DEVICE bool not_finite(uint16_t x) { return (x & 0x7fff) >= exponent_mask<T>; }

/* Causal and window as 32-bit limits: query i (of the sequence) sees keys [max(0, i + lo), min(Sk, i + hi)). */
struct limits {
    int lo, hi, Sk;
};

DEVICE limits limits_of(const attn_geometry &g, const attn_sequence &s)
{
    const int64_t far = INT64_C(1) << 30, align = attn_align(&g, &s); /* lengths are below 2^31, so far decides nothing that matters */
    return limits{ (int)attn_clamp64(align - g.left, -far, far), (int)attn_clamp64(align + g.right + 1, -far, far), (int)s.Sk };
}

/* Fragments. `tile` has rows of D elements; lane is threadIdx.x % 32.
 * a_rows: rows m .. m + 15, elements k .. k + 15.          b_rows: rows n .. n + 15, elements k .. k + 15; {b0 b1} of n and of n + 8.
 * a_columns: elements m .. m + 15 of rows k .. k + 15.     b_columns: elements n .. n + 15 of rows k .. k + 15; likewise. */
template <int D> DEVICE void a_rows(uint32_t (&a)[4], const uint16_t *tile, int m, int k, int lane)
{
    ldmatrix_x4(a, smem_addr(tile + at<D>(m + lane % 16, k / 8 + lane / 16)));
}
template <int D> DEVICE void b_rows(uint32_t (&b)[4], const uint16_t *tile, int n, int k, int lane)
{
    ldmatrix_x4(b, smem_addr(tile + at<D>(n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2)));
}
template <int D> DEVICE void a_columns(uint32_t (&a)[4], const uint16_t *tile, int m, int k, int lane)
{
    ldmatrix_x4_trans(a, smem_addr(tile + at<D>(k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2)));
}
template <int D> DEVICE void b_columns(uint32_t (&b)[4], const uint16_t *tile, int n, int k, int lane)
{
    ldmatrix_x4_trans(b, smem_addr(tile + at<D>(k + lane % 8 + lane / 8 % 2 * 8, n / 8 + lane / 16)));
}

#endif
