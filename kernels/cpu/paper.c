/* paper.c: FlashAttention-2 line by line. Read this file first.
 *
 * forward() is Algorithm 1 and backward() is Algorithm 2 of Tri Dao, "FlashAttention-2: Faster Attention with Better
 * Parallelism and Work Partitioning" (arXiv:2307.08691). Names are the paper's. The number behind a statement is the
 * paper's line. All faster kernels of this project compute the same steps in another order.
 *
 *     S = scale Q K^T    P = softmax(S), row by row    O = P V    L = ln of the softmax's denominator
 *
 *             K_1  K_2  ..  K_Tc          Q is cut into Tr blocks of Br rows, K and V into Tc blocks of Bc rows.
 *       Q_1  S_11 S_12  ..  S_1Tc  O_1    S is never in memory as a whole. One block of Br x Bc is enough, because a
 *       Q_2  S_21 S_22  ..  S_2Tc  O_2    row's maximum m and its sum l can be corrected when the next block comes.
 *
 * On a GPU the matrices lie in its large memory, HBM, and a block is loaded into a small, fast memory, SRAM. Here both
 * are ordinary memory, so a block is a pointer to its first row. All numbers are doubles.
 *
 * Three rules are not in the paper. A pair that a causal mask or a window hides has S = -inf, and its K and V are not
 * used, because they may be NaN. A row that sees no key gets O = 0 and L = -inf. A score above FLT_MAX counts
 * as FLT_MAX, and one below -FLT_MAX as -FLT_MAX.
 *
 * plain.c makes the device "paper" from this file. PAPER_FEATURES of plain.c lists what the device computes. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/backend.h"
#include "kernels/cpu/plain.h"
#include "kernels/tiles.h"

enum { Br = 16, Bc = 16 };

struct head {
    attn_geometry g;
    attn_sequence s;
    int64_t b, h;
    const int *cancel;
    /* N: number of queries; M: number of keys; d: columns of Q and K; dv: columns of V and O */
    int64_t N, M, d, dv;
    double *Q, *K, *V, *O, *L;     /* shapes: Q [N, d], K [M, d], V [M, dv], O [N, dv], L [N] */
    double *dO, *D, *dQ, *dK, *dV; /* shapes: dO [N, dv], D [N], dQ [N, d], dK [M, d], dV [M, dv] */
    double S[Br][Bc];
};

static double dot(const double *x, const double *y, int64_t n)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++) sum += x[k] * y[k];
    return sum;
}
static void add(double *y, double a, const double *x, int64_t n)
{
    for (int64_t k = 0; k < n; k++) y[k] += a * x[k];
}

/* Computes the block S_ij = scale Q_i K_j^T. Row r of the block is query i + r, column c is key j + c. */
static void scores(struct head *a, int64_t i, int64_t j, int64_t rows, int64_t columns)
{
    for (int64_t r = 0; r < rows; r++) {
        const attn_range keys = attn_keys_of(&a->g, &a->s, i + r);
        for (int64_t c = 0; c < columns; c++) {
            const double s = a->g.scale * dot(a->Q + (i + r) * a->d, a->K + (j + c) * a->d, a->d);
            const bool sees = j + c >= keys.lo && j + c < keys.hi;
            a->S[r][c] = !sees ? -INFINITY : s > FLT_MAX ? FLT_MAX : s < -FLT_MAX ? -FLT_MAX : s;
        }
    }
}

static void forward(struct head *a)
{
    /* lines 1, 3 and 4 of Algorithm 1 (FlashAttention): the loop over blocks of queries */
    for (int64_t i = 0; i < a->N && !attn_is_cancelled(a->cancel); i += Br) {
        const int64_t rows = attn_min64(Br, a->N - i);
        double m[Br], l[Br];
        for (int64_t r = 0; r < rows; r++) {
            m[r] = -INFINITY, l[r] = 0;                                        /* 5 */
            for (int64_t x = 0; x < a->dv; x++) a->O[(i + r) * a->dv + x] = 0; /* 5 */
        }
        for (int64_t j = 0; j < a->M; j += Bc) { /* 6, 7 */
            const int64_t columns = attn_min64(Bc, a->M - j);
            scores(a, i, j, rows, columns); /* 8 */
            for (int64_t r = 0; r < rows; r++) {
                double *O = a->O + (i + r) * a->dv, most = m[r];
                /* fmax() would ignore a NaN, but a NaN score has to make the row NaN */
                for (int64_t c = 0; c < columns; c++)
                    if (a->S[r][c] > most || isnan(a->S[r][c])) most = a->S[r][c]; /* 9 */
                /* the row has seen no key yet, and exp(-inf - -inf) would be NaN */
                if (most == -INFINITY) continue;
                const double correction = exp(m[r] - most);
                m[r] = most, l[r] *= correction;
                for (int64_t x = 0; x < a->dv; x++) O[x] *= correction; /* 10 */
                for (int64_t c = 0; c < columns; c++) {
                    if (a->S[r][c] == -INFINITY) continue;
                    /* line 9 of Algorithm 1; P is not divided by the row's sum until the end */
                    const double P = exp(a->S[r][c] - most);
                    l[r] += P;                                /* 9 */
                    add(O, P, a->V + (j + c) * a->dv, a->dv); /* 10 */
                }
            }
        } /* 11 */
        for (int64_t r = 0; r < rows; r++) {
            if (m[r] == -INFINITY) l[r] = 1;
            for (int64_t x = 0; x < a->dv; x++) a->O[(i + r) * a->dv + x] /= l[r]; /* 12, 14 */
            a->L[i + r] = m[r] + log(l[r]);                                        /* 13, 15 */
        }
    } /* 16 */
}

static void backward(struct head *a)
{
    const double scale = a->g.scale;
    for (int64_t n = 0; n < a->N; n++) /* 4 */
        a->D[n] = dot(a->dO + n * a->dv, a->O + n * a->dv, a->dv);
    /* lines 5 and 6 of Algorithm 2: the loop over blocks of keys; dQ, dK and dV begin as zeros (lines 3 and 7) */
    for (int64_t j = 0; j < a->M && !attn_is_cancelled(a->cancel); j += Bc) {
        const int64_t columns = attn_min64(Bc, a->M - j);
        for (int64_t i = 0; i < a->N; i += Br) { /* 8, 9 */
            const int64_t rows = attn_min64(Br, a->N - i);
            scores(a, i, j, rows, columns); /* 10 */
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < columns; c++) {
                    const double *Q = a->Q + (i + r) * a->d, *dO = a->dO + (i + r) * a->dv;
                    const double *K = a->K + (j + c) * a->d, *V = a->V + (j + c) * a->dv, L = a->L[i + r];
                    if (a->S[r][c] == -INFINITY || L == -INFINITY) continue;
                    const double P = exp(a->S[r][c] - L);             /* 11 */
                    add(a->dV + (j + c) * a->dv, P, dO, a->dv);       /* 12 */
                    const double dP = dot(dO, V, a->dv);              /* 13 */
                    const double dS = P * (dP - a->D[i + r]);         /* 14 */
                    add(a->dQ + (i + r) * a->d, scale * dS, K, a->d); /* 15 */
                    add(a->dK + (j + c) * a->d, scale * dS, Q, a->d); /* 16 */
                }
        } /* 17 */
    }     /* 18, 19 */
}

/* ---- Tensors to matrices, and back ------------------------------------------------------------------------------- */

/* Copies one head of a tensor to a new matrix of doubles, or fills the matrix with zeros if the tensor is not given.
 * Returns NULL if memory runs out. */
static double *load(const struct head *a, attn_tensor_id id, int64_t rows, int64_t columns)
{
    const attn_view *view = &a->g.view[id];
    /* the + 1 avoids calloc(0), which may return NULL */
    double *matrix = calloc((size_t)(rows * columns) + 1, sizeof *matrix);
    for (int64_t n = 0; matrix && view->data && n < rows * columns; n++)
        matrix[n] = attn_load(view->dtype, view->data, attn_at(view, a->b, a->h, n / columns) + n % columns);
    return matrix;
}

static void store(const struct head *a, attn_tensor_id id, int64_t rows, int64_t columns, const double *matrix)
{
    const attn_view *view = &a->g.view[id];
    for (int64_t n = 0; view->data && n < rows * columns; n++)
        attn_store(view->dtype, view->data, attn_at(view, a->b, a->h, n / columns) + n % columns, matrix[n]);
}

static bool load_all(struct head *a)
{
    return (a->Q = load(a, ATTN_T_q, a->N, a->d)) && (a->K = load(a, ATTN_T_k, a->M, a->d)) &&
           (a->V = load(a, ATTN_T_v, a->M, a->dv)) && (a->O = load(a, ATTN_T_out, a->N, a->dv)) &&
           (a->L = load(a, ATTN_T_lse, a->N, 1)) && (a->dO = load(a, ATTN_T_dout, a->N, a->dv)) &&
           (a->D = calloc((size_t)a->N + 1, sizeof *a->D)) &&
           (a->dQ = calloc((size_t)(a->N * a->d) + 1, sizeof *a->dQ)) &&
           (a->dK = calloc((size_t)(a->M * a->d) + 1, sizeof *a->dK)) &&
           (a->dV = calloc((size_t)(a->M * a->dv) + 1, sizeof *a->dV));
}

static void free_all(struct head *a)
{
    free(a->Q), free(a->K), free(a->V), free(a->O), free(a->L);
    free(a->dO), free(a->D), free(a->dQ), free(a->dK), free(a->dV);
}

/* Runs Algorithm 1 to compute lse (L) anew where the absolute value of the given lse is ATTN_LSE_MOST or more. The last
 * bit of such an lse is worth 2, so it is too coarse to contain the logarithm of the sum. */
static bool renew_lost_lse(struct head *a)
{
    struct head own = *a;
    own.O = load(a, ATTN_T_out, a->N, a->dv), own.L = load(a, ATTN_T_lse, a->N, 1);
    const bool memory = own.O && own.L;
    if (memory) forward(&own);
    for (int64_t n = 0; memory && n < a->N; n++)
        if (isfinite(a->L[n]) && fabs(a->L[n]) >= ATTN_LSE_MOST) a->L[n] = own.L[n];
    free(own.O), free(own.L);
    return memory;
}

attn_status paper_run(const attn_problem *p, const int *cancel, attn_error *err)
{
    const attn_geometry g = attn_geometry_of(p);
    const bool is_forward = p->op == ATTN_OP_FORWARD;
    attn_status status = ATTN_OK;
    for (int64_t n = 0; n < g.dims.B * g.dims.H && status == ATTN_OK; n++) {
        struct head a = {
            .g = g, .cancel = cancel, .b = n / g.dims.H, .h = n % g.dims.H, .d = g.dims.D, .dv = g.dims.Dv
        };
        a.s = attn_sequence_of(&g, a.b);
        a.N = a.s.Sq, a.M = a.s.Sk;
        if (load_all(&a) && (is_forward || p->lse.rank == 0 || renew_lost_lse(&a))) {
            if (is_forward || p->lse.rank == 0) forward(&a);
            if (!is_forward) backward(&a);
            if (attn_is_cancelled(cancel)) status = attn_given_up(err);
            if (is_forward) store(&a, ATTN_T_out, a.N, a.dv, a.O), store(&a, ATTN_T_lse, a.N, 1, a.L);
            store(&a, ATTN_T_dq, a.N, a.d, a.dQ), store(&a, ATTN_T_dk, a.M, a.d, a.dK);
            store(&a, ATTN_T_dv, a.M, a.dv, a.dV);
        } else
            status = attn_fail(err, ATTN_NO_MEMORY, "", "no memory for the matrices of a head of %lld keys",
                               (long long)a.M);
        free_all(&a);
    }
    return status;
}
