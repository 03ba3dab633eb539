/* simd_f32.h: the format in which simd_tiles.h stores f32 operands of matrix products. The code uses the vector
 * functions that every simd_v*.h defines. */

#define OPERAND float
enum { STEP = 1, PAD_ROWS = 0 };

struct pair {
    vf row0, row1;
};

VEC void put_row(float *A, int64_t lda, const vf *x, int n)
{
    (void)lda;
    if (n == V_LANES) v_store(A, x[0]);
    else v_store_n(A, x[0], n);
}

VEC int64_t pair_offset(int r, int column)
{
    return (int64_t)r * SIMD_PANEL + column;
}

VEC struct pair make_pair(vf x0, vf x1)
{
    return (struct pair){ x0, x1 };
}

VEC void put_pair_a(float *A, int64_t lda, struct pair p, int n, int rows)
{
    put_row(A, lda, &p.row0, n);
    if (rows == 2) put_row(A + lda, lda, &p.row1, n);
}

VEC void put_pair_b(float *B, int64_t ldb, struct pair p, int rows)
{
    (void)ldb;
    v_store(B, p.row0);
    if (rows == 2) v_store(B + SIMD_PANEL, p.row1);
}
