/* scores.cuh: the steps between q, k, v and O that all kernels of this folder share. A warp's 16 x N scores are the
 * accumulators of mma.m16n8k16: element e of block n of a lane is row e / 2 * 8 + lane / 4, column n * 8 + lane % 4 * 2
 * + e % 2. In forward, decode and dq, rows are queries and columns keys; in dkdv (S^T) rows are keys and columns
 * queries. In the order of a kernel's loop:
 *
 * scores: S = A B^T
 * change_scores: applies options (softcap, bias, masks, ...); rows go through shared memory, so that one small loop
 * treats every element
 * hide_outside: hides pairs by causal and window, in registers
 * largest_of_row, exponents_of_row: the two halves of a step of the online softmax
 * kept_of, drop: dropout
 * to_operand: converts P to an operand
 * accumulate: O += P V; accumulate_turned: O^T += V^T P^T */
#ifndef ATTN_SM80_SCORES_CUH
#define ATTN_SM80_SCORES_CUH

#include "kernels/cuda/common/rows.cuh"
#include "tile.cuh"

/* ---- Matrix products --------------------------------------------------------------------------------------------- */

/* Computes S += A B^T over D channels, for MT blocks of 16 rows of A and NT blocks of 8 rows of B. rows_of_a(fragment,
 * mt, kk) loads channels 16 kk .. 16 kk + 15 of block mt of A. rows_of_b(fragment, nt, kk) loads the same channels of
 * blocks nt and nt + 1 of B. */
template <typename T, int D, int MT, int NT, typename A, typename B>
DEVICE void scores(float (&S)[MT][NT][4], A rows_of_a, B rows_of_b)
{
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++) rows_of_a(a[mt], mt, kk);
#pragma unroll
        for (int nt = 0; nt < NT; nt += 2) {
            uint32_t b[4];
            rows_of_b(b, nt, kk);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma<T>(S[mt][nt], a[mt], b[0], b[1]);
                mma<T>(S[mt][nt + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

template <typename T, int NT> DEVICE void to_operand(uint32_t (&a)[4], const float (&c)[NT][4], int kk)
{
#pragma unroll
    for (int e = 0; e < 4; e++) a[e] = pack<T>(c[kk * 2 + e / 2][e % 2 * 2], c[kk * 2 + e / 2][e % 2 * 2 + 1]);
}

/* Computes O += P B, where B is a tile in shared memory. columns_of_b(fragment, dt, kk) loads rows 16 kk .. 16 kk + 15
 * of column blocks dt and dt + 1. */
template <typename T, int MT, int NT, int DT, typename B>
DEVICE void accumulate(float (&O)[MT][DT][4], const float (&P)[MT][NT][4], B columns_of_b)
{
#pragma unroll
    for (int kk = 0; kk < NT / 2; kk++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++) to_operand<T>(a[mt], P[mt], kk);
#pragma unroll
        for (int dt = 0; dt < DT; dt += 2) {
            uint32_t b[4];
            columns_of_b(b, dt, kk);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma<T>(O[mt][dt], a[mt], b[0], b[1]);
                mma<T>(O[mt][dt + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

/* to_turned_operand() converts P in registers to the operand B of a product. accumulate_turned() computes O^T += V^T
 * P^T for at most 8 rows of O; columns_of_a(fragment, dt, kk) loads columns 16 dt .. 16 dt + 15 of rows 16 kk .. 16 kk
 * + 15 of V. */
template <typename T, int NT> DEVICE void to_turned_operand(uint32_t (&b)[2], const float (&P)[NT][4], int kk)
{
#pragma unroll
    for (int e = 0; e < 2; e++) b[e] = pack<T>(P[kk * 2 + e][0], P[kk * 2 + e][1]);
}
template <typename T, int NT, int DT, typename A>
DEVICE void accumulate_turned(float (&O)[DT][4], const float (&P)[NT][4], A columns_of_a)
{
#pragma unroll
    for (int kk = 0; kk < NT / 2; kk++) {
        uint32_t b[2];
        to_turned_operand<T>(b, P, kk);
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            uint32_t a[4];
            columns_of_a(a, dt, kk);
            mma<T>(O[dt], a, b[0], b[1]);
        }
    }
}

/* ---- Masks and options of scores --------------------------------------------------------------------------------- */

/* Sets to -inf the scores of a row that lie outside columns lo to hi - 1. Columns are counted from this lane's first
 * column. */
template <int NT> DEVICE void hide_outside(float (&S)[NT][4], int half, int lo, int hi)
{
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (nt * 8 + e < lo || nt * 8 + e >= hi) S[nt][half * 2 + e] = -CUDART_INF_F;
}

/* Sets to -inf the scores of the pairs that causal, window and lengths hide. The rows of S are queries; `i` is the
 * lane's upper row, `key` its first column. */
template <int NT> DEVICE void hide_keys(float (&S)[NT][4], const limits &limit, int i, int key)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
        hide_outside(S, half, i + half * 8 + limit.lo - key, min(i + half * 8 + limit.hi, limit.Sk) - key);
}

/* Sets to -inf the scores of the pairs that causal and window hide. The rows of S are keys; `j` is the lane's upper
 * row, `i` its first column. Query i sees keys i + lo to i + hi - 1 (struct limits), so key j is seen by the queries i
 * with j - hi < i <= j - lo. */
template <int NT> DEVICE void hide_queries(float (&S)[NT][4], const limits &limit, int j, int i)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = j + half * 8;
        hide_outside(S, half, key < limit.Sk ? key - limit.hi - i + 1 : NT * 8 + 1, key - limit.lo - i + 1);
    }
}

/* Returns the score of query i and key `key` with all options, in base 2; -inf if the query does not exist or does not
 * see the key. */
DEVICE float score_log2(const cuda_args &a, const head_args &x, const limits &limit, bool exists, int i, int key,
                        float dot, float *derivative)
{
    const bool sees = exists && key >= i + limit.lo && key < i + limit.hi && key < limit.Sk &&
                      visible_by_mask(a, x, i, key);
    return sees ? in_base_2(score(a, x, i, key, dot, derivative)) : -CUDART_INF_F;
}

template <int LINE> DEVICE float (&lines_of(void *memory))[16][LINE]
{
    return *reinterpret_cast<float(*)[16][LINE]>(memory);
}

/* Replaces every element of S by change(row, column, score). Elements pass through shared memory (`line`), so that
 * neighbouring lanes read neighbouring elements of masks and biases. Keys are the rows of S if ROWS_FIRST is true,
 * otherwise the columns. */
template <bool ROWS_FIRST, int NT, int LINE, typename F>
DEVICE void change_scores(float (&S)[NT][4], float (&line)[16][LINE], int lane, F change)
{
    static_assert(LINE % 2 == 0, "pairs");
    const int N = NT * 8;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float2 *)&line[half * 8 + lane / 4][nt * 8 + lane % 4 * 2] = make_float2(S[nt][half * 2],
                                                                                       S[nt][half * 2 + 1]);
    __syncwarp();
#pragma unroll 1
    for (int n = lane; n < 16 * N; n += 32) {
        const int r = ROWS_FIRST ? n % 16 : n / N, c = ROWS_FIRST ? n / 16 : n % N;
        change(r, c, line[r][c]);
    }
    __syncwarp();
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) S[nt][e] = line[e / 2 * 8 + lane / 4][nt * 8 + lane % 4 * 2 + e % 2];
    __syncwarp();
}

/* ---- Online softmax ---------------------------------------------------------------------------------------------- */

/* Returns the largest score of a row, in all four lanes that have scores of the row. */
template <int NT> DEVICE float largest_of_row(const float (&S)[NT][4], int half)
{
    float top = -CUDART_INF_F;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) top = fmaxf(top, fmaxf(S[nt][half * 2], S[nt][half * 2 + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    return fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
}

template <int NT> DEVICE float exponents_of_row(float (&S)[NT][4], int half, float c, float offset)
{
    float sum = 0;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &s = S[nt][half * 2 + e];
            s = exp2_fast(fmaf(s, c, offset));
            sum += s;
        }
    return sum;
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

/* Returns a bit for each of the keys 8 * eighth to 8 * eighth + 7: 1 if dropout keeps the pair with query i. One call
 * of Philox decides all eight. `head` is b * H + h. */
DEVICE uint32_t kept_of(const cuda_args &a, int64_t head, int64_t i, int64_t eighth)
{
    const attn_philox words = attn_dropout_words(a.seed, head, i, eighth);
    uint32_t bits = 0;
    for (int e = 0; e < 8; e++) bits |= (attn_dropout_half(words, e) >= a.drop_below ? 1u : 0u) << e;
    return bits;
}

/* Multiplies elements of S (rows are queries) that dropout keeps by `scale`, and sets the others to 0. draw(row, block)
 * returns kept_of() for a block of eight keys; `kept` is shared memory for 16 * NT of these results. Call this function
 * after the row's sum l is computed, because dropout does not change lse. */
template <int NT, typename F> DEVICE void drop(float (&S)[NT][4], uint32_t *kept, float scale, int lane, F draw)
{
#pragma unroll 1
    for (int n = lane; n < 16 * NT; n += 32) kept[n] = draw(n / NT, n % NT);
    __syncwarp();
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            S[nt][e] *= kept[(e / 2 * 8 + lane / 4) * NT + nt] >> (lane % 4 * 2 + e % 2) & 1 ? scale : 0;
    __syncwarp();
}

/* ---- Transposed scores S^T, whose rows are keys ------------------------------------------------------------------ */

/* Shared memory for options. For each pair of a warp's 16 keys and BM queries, it has the score, 1 - tanh^2 (the
 * derivative of softcap), and a bit that says whether dropout keeps the pair. */
template <int BM> struct staged_queries {
    float z[16][BM + 2];
    float cap[16][BM + 2];
    uint8_t kept[BM][2];
};

/* Applies all options to the scores of keys from j0 on and queries from i0 on (Sq queries exist), and computes which
 * pairs dropout keeps. Before the call, S times `unit` is q.k. After the call, S is log2(P) + `bits`. `lse2` must be
 * the lse in base 2, minus `bits`. */
template <int BM, int NT>
DEVICE void apply_options(float (&S)[NT][4], staged_queries<BM> &st, const cuda_args &a, const saved &s,
                          const head_args &x, const limits &limit, int Sq, int i0, int j0, float unit,
                          const float *lse2, float bits, int lane)
{
    change_scores<true>(S, st.z, lane, [&](int r, int query, float &z) {
        float derivative = 1;
        z = score_log2(a, x, limit, i0 + query < Sq, i0 + query, j0 + r, z * unit, &derivative);
        z = exponent_of(a, s, x, i0 + query, z, lse2[query]);
        if (lse2[query] != lse2[query]) z += bits;
        st.cap[r][query] = derivative;
    });
    if (a.drop_below)
#pragma unroll 1
        for (int m = lane; m < 2 * BM; m += 32)
            st.kept[m / 2][m % 2] = (uint8_t)kept_of(a, dropout_head(a, x.b, x.h), i0 + m / 2, j0 / 8 + m % 2);
    __syncwarp();
}

/* Sets to -inf the scores of the pairs that causal and window hide. Does nothing if all pairs of the warp are
 * visible. */
template <int BM, int NT>
DEVICE void hide_hidden_queries(float (&S)[NT][4], const limits &limit, int Sk, int i0, int j0, int lane)
{
    const bool free = j0 >= i0 + BM - 1 + limit.lo && j0 + 15 < i0 + limit.hi && j0 + 15 < Sk;
    if (!free) hide_queries(S, limit, j0 + lane / 4, i0 + lane % 4 * 2);
}

#endif
