/* steps.cuh: scores, products and softmax of a tile of 32 columns, for truth.cu. */
#ifndef ATTN_TRUTH_STEPS_CUH
#define ATTN_TRUTH_STEPS_CUH

#include "kernels/cuda/truth/ptx.cuh"
#include "kernels/cuda/truth/rows.cuh"

namespace {

/* ---- Scores: masks and options ----------------------------------------------------------------------------------- */

/* Shared memory for the scores of a warp's 16 rows, while options (softcap, bias, masks) are applied. */
struct exchange {
    /* slope: the derivative of the score. It is never negative, so its sign bit can say whether dropout drops the pair
     * (1: yes). */
    double z[16][COLUMNS + 2], slope[16][COLUMNS + 2];
};

struct truth_memory {
    float stage[STAGES][COLUMNS * Z_LINE];
    exchange warp[WARPS];
};
static_assert((ROWS + COLUMNS) * LINE <= COLUMNS * Z_LINE, "a chunk of X and Y fits a stage");
static_assert(sizeof(truth_memory) <= 99 * 1024, "fits a block of every chip from 8.0 on");

/* A lane's numbers of a warp's 16 rows of a tile: x[n][2 r + e] is in row lane / 4 + 8 r, column 8 n + 2 (lane % 4) +
 * e. */
typedef double fragment[N_TILES][4];

DEVICE int row_of(int e)
{
    return threadIdx.x % 32 / 4 + e / 2 * 8;
}
DEVICE int column_of(int n, int e)
{
    return 8 * n + threadIdx.x % 4 * 2 + e % 2;
}

/* Calls visit(n, e) for each number in a lane's fragment: element e of block n (8 columns of the tile). */
template <typename F> DEVICE void for_each(F visit)
{
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) visit(n, e);
}

DEVICE double saturated_double(double z)
{
    /* comparisons with NaN are false, so NaN stays NaN */
    return z > FLT_MAX ? FLT_MAX : z < -FLT_MAX ? -FLT_MAX : z;
}

DEVICE bool is_hidden(double p)
{
    return p == 0 && signbit(p);
}

/* Turns q.k in ex.z into scores with every option; hidden pairs get -inf. */
template <bool BY_KEYS>
DEVICE void apply_options(const truth_args &t, const head_args &x, double scale, exchange &ex, int row0, int column0)
{
    const cuda_args &a = t.a;
    const int64_t column = column0 + threadIdx.x % 32;
    for (int r = 0; r < 16; r++) {
        const int64_t row = row0 + r, i = BY_KEYS ? column : row, j = BY_KEYS ? row : column;
        const bool exists = i < x.s.Sq && j < x.s.Sk;
        double z = -INFINITY, slope = 1;
        if (exists && visible(a, x, i, j)) {
            z = attn_score_of(&t.scores, &x.s, i, j, scale * ex.z[r][threadIdx.x % 32], &slope);
            z = saturated_double(with_bias(a, x, i, j, z));
            slope = fabs(slope);
            if (a.drop_below && !attn_dropout_keep(a.seed, dropout_head(a, x.b, x.h), i, j, a.drop_below))
                slope = -slope;
        }
        ex.z[r][threadIdx.x % 32] = z;
        ex.slope[r][threadIdx.x % 32] = slope;
    }
}

/* ---- Products of a warp, in float64 ------------------------------------------------------------------------------ */

/* Adds X Y^T to `c`, summed over one chunk of channels. A warp multiplies its 16 rows of X by all rows of Y. */
DEVICE void add_scores(fragment &c, const float *x, const float *y)
{
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    x += (threadIdx.x / 32 * 16 + g) * LINE + q;
    y += g * LINE + q;
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        double a[8];
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) a[2 * m + r] = (double)x[8 * r * LINE + k + 4 * m];
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            double b[4];
#pragma unroll
            for (int m = 0; m < 4; m++) b[m] = (double)y[8 * n * LINE + k + 4 * m];
            mma_f64(c[n], a, b);
        }
    }
}

typedef double result_fragment[N_WIDTH][4];

/* Adds P Z to `result`. With g = lane / 4 and q = lane % 4, p[n][2 r + e] belongs to row g + 8 r and column 8 n + 2 q +
 * e of operand A = P; rows of Z are loaded in the order of A's columns. */
DEVICE void add_product(result_fragment &result, const fragment &p, const float *z, int width)
{
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    z += 2 * q * Z_LINE + g;
#pragma unroll
    for (int k = 0; k < N_TILES; k += 2) {
        double a[8];
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) a[2 * m + r] = p[k + m / 2][2 * r + m % 2];
#pragma unroll
        for (int n = 0; n < N_WIDTH; n++) {
            double b[4];
            if (8 * n >= width) break;
#pragma unroll
            for (int m = 0; m < 4; m++) b[m] = (double)z[(8 * (k + m / 2) + m % 2) * Z_LINE + 8 * n];
            mma_f64(result[n], a, b);
        }
    }
}

/* Adds P Z to `result` if Z has a NaN or an infinity. Hidden pairs are skipped, because 0 times NaN is NaN. */
DEVICE void add_strange_product(result_fragment &result, const fragment &p, const float *z, int width)
{
    const int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll 1
            for (int from = 0; from < 4; from++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const double weight = __shfl_sync(0xffffffff, p[n][2 * r + e], lane - q + from);
                    const float *const row = z + (8 * n + 2 * from + e) * Z_LINE + 2 * q;
                    if (is_hidden(weight)) continue;
#pragma unroll
                    for (int m = 0; m < N_WIDTH; m++) {
                        if (8 * m >= width) break;
                        result[m][2 * r] += weight * (double)row[8 * m];
                        result[m][2 * r + 1] += weight * (double)row[8 * m + 1];
                    }
                }
}

/* ---- The softmax of rows ----------------------------------------------------------------------------------------- */

/* Returns the larger of two numbers, or NaN if one of them is NaN. */
DEVICE double larger(double m, double z)
{
    return z > m || z != z ? z : m;
}
DEVICE double largest_of_quad(double m)
{
    m = larger(m, __shfl_xor_sync(0xffffffff, m, 1));
    return larger(m, __shfl_xor_sync(0xffffffff, m, 2));
}
template <typename T> DEVICE T sum_of_quad(T x)
{
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

/* The online softmax of a row. Four lanes share a row, and all four have its maximum m. The sum l, the number of
 * visible pairs (`seen`) and `seen_z` count only the lane's own columns. */
struct online_row {
    double m, l, seen_z; /* seen_z: the sum of the scores of visible keys */
    int seen;
};

/* Returns the state before the first tile. Only one of the row's four lanes begins with the sink's exponential, because
 * their l are added up at the end. */
DEVICE online_row first_of_row(double sink)
{
    return { sink, sink == -INFINITY || threadIdx.x % 4 != 0 ? 0.0 : 1.0, 0, 0 };
}

/* Updates the maximum m with the scores z, and replaces z by exp(z - m). Returns the factor by which earlier sums must
 * be multiplied. */
template <int R> DEVICE double softmax_step(online_row &row, fragment &z)
{
    double m = -INFINITY;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const double x = z[n][2 * R + e];
            m = larger(m, x);
            if (x == -INFINITY) continue;
            row.seen++;
            row.seen_z += x;
        }
    const double before = row.m;
    row.m = larger(before, largest_of_quad(m));
    const double rescale = before == -INFINITY ? 1 : exp(before - row.m);
    row.l *= rescale;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            double &x = z[n][2 * R + e];
            x = x == -INFINITY ? -0.0 : exp(x - row.m);
            row.l += x;
        }
    return rescale;
}

} // namespace

#endif
