/* simd_pairs.h: operands of the compute type bf16, written with the functions of a simd_v*.h and the names below.
 * simd_bf16.c (W = 32) and simd_neon_bf16.c (W = 8) define these names before they include this file:
 *
 *   vh, W = 2 V_LANES                     a vector of W bf16 numbers
 *   vh_zero(), vh_load_n(p, n)            the first n <= W numbers at p, 0 in the other lanes
 *   vh_store(p, x), vh_store_half(p, x, high)
 *   vh_of(low, high)                      two vf (vectors of f32) rounded to nearest even
 *   vh_zip(a, b, high)                    elements of the low (high) half of a, each followed by that of b
 *   vh_halves(x)                          the two halves of x, zipped in the same way
 *   vh_as_f(x), vh_of_f(x)                the pairs as lanes of a vf, for v_transpose(), and back
 *   vh_flags, vh_flag(x, most, flags)     marks the elements whose bits without the sign are above `most`
 *   vh_flagged(flags)
 *
 * Numbers are stored in pairs along k (the axis over which a product sums), because one instruction adds two (or four)
 * products along k to a lane. The operands:
 *
 *   A    has rows along k, so that the two numbers of a pair are neighbours in memory
 *   B    has the two numbers of a pair in one 32-bit lane, and 32 lanes (columns) in a line of the panel:
 *
 *            line k/2 of a panel:   X[k][0] X[k+1][0] | X[k][1] X[k+1][1] | ... | X[k][31] X[k+1][31]
 *
 * pack_b (B = X) interleaves two rows of X; pack_bt (B = X^T) transposes X in units of 32 bits; pack_at (A = X^T)
 * interleaves, then transposes. k is padded to a multiple of W. */

enum { K_MULTIPLE = W, TAME_BITS = (127 + 58) << 7 /* TAME_BITS: the number SIMD_TAME as bits of a bf16 number */ };

/* ---- The format in which simd_tiles.h stores the matrices that a product multiplies ------------------------------ */

#define OPERAND uint16_t
enum { STEP = 2, PAD_ROWS = K_MULTIPLE };

/* V_LANES columns of two adjacent rows of a matrix operand, in one vector: the low half holds the first row. */
struct pair {
    vh rows;
};

VEC void put_row(uint16_t *A, int64_t lda, const vf *x, int n)
{
    (void)lda, (void)n; /* all of x is stored, because x holds zeros from n on, which pad the row */
    vh_store(A, vh_of(x[0], x[1]));
}

VEC int64_t pair_offset(int r, int column)
{
    return (int64_t)(r / 2) * 2 * SIMD_PANEL + 2 * column;
}

VEC struct pair make_pair(vf x0, vf x1)
{
    return (struct pair){ vh_of(x0, x1) };
}

VEC void put_pair_a(uint16_t *A, int64_t lda, struct pair p, int n, int rows)
{
    (void)n;
    vh_store_half(A, p.rows, false);
    if (rows == 2) vh_store_half(A + lda, p.rows, true);
}

VEC void put_pair_b(uint16_t *B, int64_t ldb, struct pair p, int rows)
{
    /* A row of a panel of B holds two neighbouring rows of the matrix, which are a pair. If the pair's second row does
     * not exist, p.rows holds zeros in its place. */
    (void)ldb, (void)rows;
    vh_store(B, vh_halves(p.rows));
}

#include "kernels/cpu/simd_tiles.h"

/* ---- Packing rows of tensors as operands ------------------------------------------------------------------------- */

/* Loads elements c to c + W - 1 of a row as bf16. Elements from `cols` on, and rows that do not exist, are 0. *bad
 * marks infinities, NaN and elements whose absolute value is SIMD_TAME or more. */
VEC vh get_bf16(const void *X, attn_dtype dtype, int64_t stride, int rows, int cols, int r, int c, vh_flags *bad)
{
    const int n = cols - c < W ? cols - c : W;
    if (r >= rows || n <= 0) return vh_zero();
    const void *row = simd_row(X, dtype, stride, r);
    vh x;
    if (dtype == ATTN_BF16) {
        x = vh_load_n((const uint16_t *)row + c, n);
    } else {
        const vf low = v_get_n(row, dtype, c, n < V_LANES ? n : V_LANES);
        const vf high = v_get_n(row, dtype, c + V_LANES, n < V_LANES ? 0 : n - V_LANES);
        x = vh_of(low, high);
    }
    *bad = vh_flag(x, TAME_BITS - 1, *bad);
    return x;
}

static bool pack_a(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    vh_flags bad = { 0 };
    for (int r = 0; r < rows; r++) {
        uint16_t *a = (uint16_t *)A + r * lda;
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < cols; c += W) vh_store(a + c, get_bf16(X, dtype, stride, rows, cols, r, c, &bad));
    }
    return !vh_flagged(bad);
}

static bool pack_b(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    vh_flags bad = { 0 };
    for (int r = 0; r < simd_round_up(rows, K_MULTIPLE); r += 2) {
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < simd_round_up(cols, SIMD_PANEL); c += W) {
            const vh x0 = get_bf16(X, dtype, stride, rows, cols, r, c, &bad);
            const vh x1 = get_bf16(X, dtype, stride, rows, cols, r + 1, c, &bad);
            uint16_t *b = (uint16_t *)B + c / SIMD_PANEL * ldb + pair_offset(r, c % SIMD_PANEL);
            vh_store(b, vh_zip(x0, x1, false));
            vh_store(b + W, vh_zip(x0, x1, true));
        }
    }
    return !vh_flagged(bad);
}

static bool pack_bt(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb)
{
    const int ahead = simd_ahead(dtype, stride, rows);
    vh_flags bad = { 0 };
    vf t[V_LANES];
    for (int r = 0; r < simd_round_up(rows, SIMD_PANEL); r += V_LANES) {
        simd_ask_ahead(X, dtype, stride, cols, r, ahead);
        for (int c = 0; c < cols; c += W) {
            for (int i = 0; i < V_LANES; i++) t[i] = vh_as_f(get_bf16(X, dtype, stride, rows, cols, r + i, c, &bad));
            v_transpose(t);
            uint16_t *b = (uint16_t *)B + r / SIMD_PANEL * ldb + pair_offset(c, r % SIMD_PANEL);
            for (int i = 0; i < V_LANES; i++) vh_store(b + i * 2 * SIMD_PANEL, vh_of_f(t[i]));
        }
    }
    return !vh_flagged(bad);
}

static bool pack_at(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda)
{
    vh_flags bad = { 0 };
    vf t[2][V_LANES];
    for (int r = 0; r < rows; r += W) {
        for (int c = 0; c < cols; c += W) {
            for (int i = 0; i < V_LANES; i++) {
                const vh x0 = get_bf16(X, dtype, stride, rows, cols, r + 2 * i, c, &bad);
                const vh x1 = get_bf16(X, dtype, stride, rows, cols, r + 2 * i + 1, c, &bad);
                t[0][i] = vh_as_f(vh_zip(x0, x1, false));
                t[1][i] = vh_as_f(vh_zip(x0, x1, true));
            }
            v_transpose(t[0]);
            v_transpose(t[1]);
            for (int i = 0; i < W && c + i < cols; i++)
                vh_store((uint16_t *)A + (c + i) * lda + r, vh_of_f(t[i / V_LANES][i % V_LANES]));
        }
    }
    return !vh_flagged(bad);
}
