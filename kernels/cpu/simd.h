/* simd.h: the vector functions of the CPU backend: small packed matrix products, softmax steps, exp2, conversions.
 *
 * The algorithms (forward.c, backward.c, decode.c) are written once. They call vector functions through a table, struct
 * simd. Each instruction set has a table, made by a file of its own. simd_get() returns the best table that this
 * processor can run:
 *
 *     name      file             f32 products     bf16 products
 *     portable  simd_portable.c  plain C          none: bf16 inputs are computed as f32
 *     avx2      simd_avx2.c      AVX2 and FMA     none
 *     avx512    simd_avx512.c    AVX-512          none
 *     bf16      simd_bf16.c      AVX-512          AVX-512 BF16 dot products, f32 sums
 *     amx       simd_amx.c       AMX tiles        AMX tiles, f32 sums; f32 and f16 as sums of bf16 numbers
 *                                                 (simd_split.h)
 *     neon      simd_neon.c      NEON (arm64)     none
 *     neon_bf16 simd_neon_bf16.c NEON             BFMMLA, f32 sums
 *
 * A compute type (struct simd_type) says how the operands of products are stored: f32, or bf16 with sums in f32. All
 * else (scores, softmax, gradients of scores, accumulators) is f32 with either type, so one algorithm serves both:
 *
 *     const struct simd *simd = simd_get();
 *     const struct simd_type *t = simd_type_for(simd, dtype);
 *
 * Invariants
 *
 * 1. A row of a result depends on that row's operands alone: not on m, on other rows, or on how rows are split among
 *    threads. Sums along k have one fixed order for each (table, type, k). The same holds for softmax rows (cols
 *    fixes the order) and for the dot and axpy kernels.
 * 2. Packed operands are padded with exact zeros, so padding never changes a sum and never makes a NaN.
 * 3. A score of -inf gives P = 0 exactly, and a score of NaN gives NaN. A P below 2^SIMD_EXP2_LEAST or
 *    2^SIMD_EXP2_LEAST_TAME is 0.
 * 4. No function here allocates memory or writes outside the stated sizes.
 *
 * Sizes are int. Strides (ld...) are int64_t and count elements. Every size may be 0; the function then does
 * nothing. Buffers are 64-byte aligned where this header calls them operands; other pointers have the alignment of
 * their elements.
 *
 * Operands
 *
 * A product is C[m][n] (f32, row-major, ldc) = or += A[m][k] B[k][n]. Each operand has one form per compute type:
 *
 *   A form: rows.    A[i][kk] at i * lda + kk; columns k .. pad_k(k) - 1 are zero. lda >= pad_k(k), a multiple of 64
 *                    bytes. Rows up to the next multiple of SIMD_A_ROWS must be readable (their contents do not
 *                    matter): simd_a_bytes() counts them.
 *   B form: panels of SIMD_PANEL = 32 columns, each holding all k:
 *                    f32   B[kk][j] at (j / 32) * ldb + kk * 32 + j % 32
 *                    bf16  B[kk][j] at (j / 32) * ldb + (kk / 2) * 64 + (j % 32) * 2 + kk % 2      pairs along k (VNNI)
 *                    Rows k .. pad_k(k) - 1 and columns n .. 32 * ceil(n / 32) - 1 are zero. ldb is the distance
 *                    between panels, >= 32 * pad_k(k): simd_ldb(t, k) when the panels have no gaps.
 *
 * pad_k(k) rounds up to t->k_multiple (1 for f32; for bf16 32, and 8 on arm64). A part of an operand is an operand too.
 * Columns j0 and later of B (j0 a multiple of 32) start at B + (j0 / 32) * ldb. Rows kk0 and later of B (kk0 a multiple
 * of 32) start at B + kk0 * 32, with B's own ldb. Rows i0 and later of A start at A + i0 * lda. Several threads can
 * therefore pack a whole head of K and V once, and products read it tile by tile.
 *
 * The packing functions make operands from X, rows of a strided tensor of any floating dtype ([rows][cols], last
 * axis contiguous):
 *
 *   pack_a   A = X     [rows][cols]      pack_b   B = X    k = rows, n = cols
 *   pack_at  A = X^T   [cols][rows]      pack_bt  B = X^T  k = cols, n = rows
 *
 * The next table shows which form serves which product. Queries are the rows of every tile, so that forward and
 * backward apply masks, bias and dropout in the same way. i: a tile of BM queries, j: a tile of BN keys.
 *
 *   product                        m    n    k    A                       B
 *   S        = Q   K^T             BM   BN   D    pack_a(Q)               pack_bt(K)
 *   O       += P   V               BM   Dv   BN   P from softmax()        pack_b(V)
 *   dP       = dO  V^T             BM   BN   Dv   pack_a(dO)              pack_bt(V)
 *   dQ      += dS  K               BM   D    BN   dS_a from gradient()    pack_b(K)
 *   dV^T    += dO^T P              Dv   BN   BM   pack_at(dO)             P_b from gradient()
 *   dK^T    += Q^T dS              D    BN   BM   pack_at(Q)              dS_b from gradient()
 *
 * dV^T and dK^T are accumulated transposed ([Dv][ld], [D][ld], columns are keys), and store_t() stores them. Packs
 * of Q and dO (a, at) belong to the query tile, packs of K (bt, b) and V (bt) to the key tile. f32 products need no
 * packed A where the tensor itself has the A form: float32, dense in its last axis, with 64-byte aligned rows.
 *
 * Tile sizes: every size works; multiples of 32 waste nothing. The panel of B (32 columns, k deep) stays in L1 while it
 * is multiplied with all rows of A; the rest stays in L2. Choose lda and ldc with simd_ld(): rows at a distance of a
 * power of two would compete for the same cache sets. */
#ifndef ATTN_CPU_SIMD_H
#define ATTN_CPU_SIMD_H

#include "kernels/attention.h"

enum {
    SIMD_PANEL = 32, /* number of columns of a panel; in a product A B, the matrix B is stored in panels */
    /* in a product A B, the memory of A must be readable up to the next multiple of this number of rows */
    SIMD_A_ROWS = 16,
};

/* A number whose absolute value is below SIMD_TAME cannot cause an overflow: sums of 2^63 such numbers are finite.
 * Partial sums of a dot product of up to ATTN_MAX_HEAD_DIM pairs of such numbers are finite too: 2^58 * 2^58 * 2^10 =
 * 2^126. */
#define SIMD_TAME 0x1p58f
/* If the largest score of a row (in base 2) is below this number, no score of the row has overflowed. */
#define SIMD_SCORE_MOST 0x1p126f

/* exp2(x) is 0 for x below -126, because processors compute subnormal numbers (below 2^-126) slowly. A probability
 * below 2^-110 is 0 if all numbers by which it is multiplied are below SIMD_TAME (2^58): its product with an ordinary
 * value is often subnormal, and its product with 2^58 is 2^-52, too small to change a float32 sum near 1. */
#define SIMD_EXP2_LEAST      (-126.0f)
#define SIMD_EXP2_LEAST_TAME (-110.0f)

enum { SIMD_DROPS = 128 }; /* number of keys for which drop() draws random bits */

/* The options and masks of scores, for the function score() of struct simd. */
struct simd_score {
    float scale;   /* s = scale * S is the score before other options, in natural logarithms (not in base 2); S is the
                    * product q . k */
    float softcap; /* above 0: scores become softcap * tanh(s / softcap), where s is scale * S; 0: no softcap */

    /* NULL, or the address of the bias of element (0, 0). Row r of the bias starts at r * bias_stride; a bias_stride of
     * 0 means one bias row for all rows. */
    const void *bias;
    attn_dtype bias_dtype;
    int64_t bias_stride;

    float slope; /* slope of ALiBi, which adds -slope * |distance + r - c| to row r, column c; 0: no ALiBi */
    /* ALiBi's distance i + Sk - Sq - j for element (0, 0) of the tile; distances above 2^24 are rounded to the nearest
     * float */
    int64_t distance;

    /* address of element (0, 0) of keep_mask, where 0 hides a key; NULL: no mask. Row r starts at r * keep_stride */
    const uint8_t *keep;
    int64_t keep_stride;

    /* row r sees columns lo[r] to hi[r] - 1, which may be none; both NULL: every row sees all columns */
    const int *lo, *hi;

    /* the rows (queries) from which FlashMask hides each column (key): column c is hidden from row r if hide_lo[x][c]
     * <= row0 + r < hide_hi[x][c], for x = 0 or 1. NULL: no FlashMask */
    const int32_t *hide_lo[2], *hide_hi[2];
    int32_t row0;

    /* NULL, or an array [rows][ld of S] to which score() writes the derivative of softcap, 1 - tanh^2(s / softcap), for
     * gradient(); without softcap it writes 1 */
    float *cap;
};

/* Arguments and results of gradient(), which computes the gradient of the scores of one tile. S, dP, cap, drop and dZ
 * are [rows][ld]. P_b, dS_a and dS_b are operands of matrix products, each with its own distance between rows. */
struct simd_gradient {
    int rows, cols;
    int64_t ld;      /* distance between rows, in elements, of S, dP, cap, drop and dZ */
    const float *S;  /* products q . k, or the scores that score() has made from them */
    const float *dP; /* the product dO V^T, not yet multiplied by dropout's factors */
    float c;         /* P = exp2(c * S - lse2): c is scale * log2(e) if S are products q . k, and 1 after score() */
    float least;     /* P below 2^least is 0: SIMD_EXP2_LEAST, or SIMD_EXP2_LEAST_TAME if q, k, v and dO are tame */
    /* lse * log2(e) of each of the `rows` rows; +INFINITY for a row that sees no key, so that P is 0 */
    const float *lse2;
    const float *delta; /* delta of each of the `rows` rows: rowsum(dO * O) - dlse */
    const float *cap;   /* NULL, or the derivatives of softcap that score() wrote to its `cap` */
    /* 1 for each (query, key) pair that dropout keeps, 0 for each pair that it drops; NULL: no dropout */
    const float *drop;
    float drop_scale; /* dropout multiplies P by M = drop_scale * drop */

    /* Results of gradient(); each pointer may be NULL. With M = drop_scale * drop: dZ = P * (M * dP - delta), and dS =
     * dZ * cap. Where P is 0, dZ and dS are 0 even if dP is NaN. */
    void *P_b; /* P * drop as the matrix B of a product A B (dV^T = dO^T P): a row per query, a column per key */
    int64_t P_ldb;
    void *dS_a; /* dS as the matrix A of a product A B (dQ = dS K): a row per query, a column per key */
    int64_t dS_lda;
    void *dS_b; /* dS as the matrix B of a product A B (dK^T = Q^T dS): a row per query, a column per key */
    int64_t dS_ldb;
    float *dZ; /* dZ in f32, for the gradients of bias and slopes; may be the memory of S or dP */
};

/* A compute type: the format in which operands of matrix products are stored, and the functions that read and write
 * operands. */
struct simd_type {
    attn_dtype dtype; /* dtype in which the numbers of an operand (a matrix of a product) are stored: ATTN_F32 or
                       * ATTN_BF16 */
    /* the size k of a product (columns of A, rows of B) is padded to a multiple of k_multiple, with zeros */
    int k_multiple;
    int parts; /* number of bf16 parts that add up to one element (simd_split.h); 1: elements are not split */
    /* number of rows of a strip: forward.c cuts tiles on the causal diagonal into strips; 0: tiles are not cut, because
     * gemm() needs whole tiles */
    int strip;

    /* The pack functions make operands from X, which is [rows][cols] of any floating dtype with rows `stride` elements
     * apart. Numbers are rounded to nearest even. Each function returns true if the absolute value of every element is
     * below SIMD_TAME. If it returns false, the caller must handle all other elements: sums of large numbers may
     * overflow, and NaN or infinity times the P = 0 of a hidden key would be NaN. */
    bool (*pack_a)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda);
    bool (*pack_at)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *A, int64_t lda);
    bool (*pack_b)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb);
    bool (*pack_bt)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *B, int64_t ldb);

    /* Computes a matrix product:
     * C = A B                           add false (C is not read)
     * C = C + A B                       add true, rescale NULL
     * C[r] = rescale[r] C[r] + A[r] B   add true; a rescale of 0 keeps NaN in C, so C must begin as zeros or with add
     *                                   false
     * Only the m x n elements of C are written. A and B may not overlap C. */
    void (*gemm)(int m, int n, int k, const void *A, int64_t lda, const void *B, int64_t ldb, float *C, int64_t ldc,
                 bool add, const float *rescale);

    /* One step of the online softmax (FlashAttention-2, Algorithm 1, lines 9 and 10) for each row of S [rows][lds], in
     * base 2: z = c * S, c = scale * log2(e) of any sign, or 1 after score().
     *   m[r]       running maximum of z; starts as -INFINITY
     *   l[r]       running sum of exp2(z - m); starts as 0
     *   rescale[r] written: exp2(m_old - m_new), by which the caller multiplies O[r]. It is 1 where the maximum stays,
     *              and 0 where m_old is -INFINITY and m_new is not.
     *   P          written: exp2(z - m_new) as an operand A with m = rows and k = cols. For f32, P may be the memory
     *              of S, with ldp = lds.
     *   drop       NULL, or an array in the layout of S, by which P is multiplied. It holds 0 and 1 only, because
     *              another factor would be rounded together with P. l sums P before rounding and before drop.
     *   least      P below 2^least is 0: SIMD_EXP2_LEAST, or SIMD_EXP2_LEAST_TAME if all values are below SIMD_TAME
     * Returns whether any rescale is not 1. If all are 1, pass NULL as `rescale` to gemm().
     * After the last step, lse is (m + log2 l) * ln 2, and the caller divides O by l. A row with m = -INFINITY has seen
     * no key. With c <= 0, S must not hold infinities, because they would change sign: call score() for masked
     * tiles. */
    bool (*softmax)(int rows, int cols, const float *S, int64_t lds, float c, float *m, float *l, float *rescale,
                    void *P, int64_t ldp, const float *drop, float least);

    void (*gradient)(const struct simd_gradient *g);
};

struct simd {
    const char *name; /* "avx512" */
    struct simd_type f32;
    /* format in which bf16 inputs of matrix products are stored; NULL: bf16 inputs are computed as f32 */
    const struct simd_type *bf16;
    /* format in which float16 inputs of matrix products are stored: each number as the sum of two bf16 numbers; NULL:
     * float16 is computed as f32 */
    const struct simd_type *half;
    /* format in which float32 inputs of matrix products are stored: each number as the sum of three bf16 numbers; NULL:
     * products of f32 are at least as fast */
    const struct simd_type *single;

    /* Computes the scores of one tile in place, [rows][lds]: S becomes z = log2(e) * (softcap(scale * S) + bias +
     * alibi). An element that a mask hides becomes -inf (a hidden S may be NaN); any other element is at least
     * -FLT_MAX. Call softmax() and gradient() with c = 1 afterwards. */
    void (*score)(int rows, int cols, float *S, int64_t lds, const struct simd_score *how);

    /* Applies a causal mask or window to a tile of scores. Tiles with other options need score(). Row r sees columns
     * lo[r] to hi[r] - 1, and S becomes -inf in all other columns; 0 <= lo[r] <= hi[r] <= cols. Visible elements of
     * S stay products q . k. Call softmax() and gradient() afterwards with the factor c = scale * log2(e), which
     * must be above 0. */
    void (*hide)(int rows, int cols, float *S, int64_t lds, const int *lo, const int *hi);

    /* Two functions for decode: a few query rows against rows of K and V as they lie in memory. Memory bandwidth bounds
     * the speed of both functions.
     *
     *   dots:  S[r][j] = q[r] . K[j]            for r < nq and j < n; q is [nq][ldq] in f32
     *   axpys: O[r] += sum_j P[r][j] V[j]       in the order of j; where P[r][j] is 0, V[j] may be NaN */
    void (*dots)(int nq, int n, int d, const float *q, int64_t ldq, const void *K, attn_dtype dtype, int64_t stride,
                 float *S, int64_t lds);
    void (*axpys)(int nq, int n, int d, const float *P, int64_t ldp, const void *V, attn_dtype dtype, int64_t stride,
                  float *O, int64_t ldo);

    /* Computes S[j] = q . K[j] in double, with exact products, for each j < n. exact.c uses it for rows whose scores or
     * sums exceed the range of float32. */
    void (*dots_exact)(int n, int d, const float *q, const void *K, attn_dtype dtype, int64_t stride, double *S);

    bool (*all_finite)(int rows, int cols, const float *S, int64_t lds);

    /* Returns the largest |X[r][c]|; infinity where some element is not finite. */
    float (*most)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride);

    /* Computes y[r] = sum_c X[r][c] Y[r][c], for X and Y of any floating dtype. The backward computes delta by this
     * function, from dO and O. */
    void (*row_dots)(int rows, int cols, const void *X, attn_dtype x_dtype, int64_t x_stride, const void *Y,
                     attn_dtype y_dtype, int64_t y_stride, float *y);

    /* load() converts n numbers of any floating dtype to f32, exactly. save() converts f32 to any floating dtype, to
     * nearest even (e4m3 saturates, and NaN stays NaN). */
    void (*load)(int64_t n, const void *from, attn_dtype dtype, float *to);
    void (*save)(int64_t n, const float *from, void *to, attn_dtype dtype);

    /* Stores results: Y[r][c] = X[r][c] * scale * row_scale[r] in Y's dtype, with rows of Y `stride` elements apart. If
     * `row_scale` is NULL, its factors are 1. A row_scale of 0 (for a row that saw no key) writes zeros even if X holds
     * NaN. store_t() reads X transposed: X[c][r] in place of X[r][c]. */
    void (*store)(int rows, int cols, const float *X, int64_t ldx, float scale, const float *row_scale, void *Y,
                  attn_dtype dtype, int64_t stride);
    void (*store_t)(int rows, int cols, const float *X, int64_t ldx, float scale, const float *row_scale, void *Y,
                    attn_dtype dtype, int64_t stride);

    /* Ends n rows of softmax(): inverse[r] = 1 / l[r], lse[r] = (m[r] + log2 l[r]) ln 2. A row with l[r] = 0 has
     * seen no key: its inverse becomes 0 and its lse -inf. l is 0, at least 1, infinite or NaN; the error of lse is
     * less than 3e-7 times (|m| + log2 l). Returns whether every |m| is below SIMD_SCORE_MOST and every l finite. */
    bool (*close)(int n, const float *m, const float *l, float *inverse, float *lse);

    /* Computes y[i] = exp2(x[i]), the exponential of softmax, with a relative error below 2e-7. exp2(0) is exactly 1.
     * The result is 0 for -inf and for x below SIMD_EXP2_LEAST, and NaN for NaN. y may be x. */
    void (*exp2)(int64_t n, const float *x, float *y);

    /* Draws the random bits of dropout (philox.h) for query i and the SIMD_DROPS keys from key 8 * `group` on. Writes
     * 1 for each key that dropout keeps, otherwise 0. */
    void (*drop)(uint64_t seed, int64_t head_index, int64_t i, int64_t group, uint32_t threshold,
                 float kept[SIMD_DROPS]);

    /* Updates the running maximum, sum and entropy of each row by the scores z = c * S in base 2, with c > 0; c is 1
     * after score().
     *   m[r]  running maximum of z; starts as -INFINITY
     *   l[r]  running sum of exp2(z - m); starts as 0
     *   e[r]  running sum of exp2(z - m) (z - m); starts as 0. At the end of the row the entropy is log2 l - e / l. */
    void (*observe)(int rows, int cols, const float *S, int64_t lds, float c, float *m, float *l, float *e);

    /* Turns scores into probabilities in place: S[r][j] = exp2(c * S[r][j] - m[r]) * inverse[r], where c times S is the
     * score in base 2. The result is 0 where S is -inf and m is not NaN, and in all of a row whose m is
     * INFINITY. */
    void (*weigh)(int rows, int cols, float *S, int64_t lds, float c, const float *m, const float *inverse);

    /* Computes sums[j] = S[0][j] + S[1][j] + ... in the order of the rows. */
    void (*add_rows)(int rows, int cols, const float *S, int64_t lds, float *sums);

    /* Gives the tile registers of AMX back to the operating system. A thread may call leave() when it will not compute
     * for a while. The next gemm() takes the registers again. */
    void (*leave)(void);
};

/* Returns the best table for this processor. The environment variable ATTN_CPU_ISA may choose a slower table: portable,
 * avx2, avx512, bf16 or amx, and on arm64 neon or neon_bf16. Other values are ignored. The first call reads the
 * variable. Thread-safe. */
const struct simd *simd_get(void);

/* Returns the table named `name`; NULL if this build or this processor does not have it. */
const struct simd *simd_find(const char *name);

/* The names of all tables of this build, the slowest first, with NULL at the end. */
extern const char *const simd_names[];

/* Returns the compute type (format of operands of products) for inputs of a dtype. */
static inline const struct simd_type *simd_type_for(const struct simd *simd, attn_dtype dtype)
{
    const struct simd_type *t = dtype == ATTN_BF16  ? simd->bf16
                                : dtype == ATTN_F16 ? simd->half
                                : dtype == ATTN_F32 ? simd->single
                                                    : NULL;
    return t ? t : &simd->f32;
}

static inline int64_t simd_round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static inline int64_t simd_element_bytes(const struct simd_type *t)
{
    return t->dtype == ATTN_F32 ? 4 : 2;
}

/* Returns a suitable distance between rows of n elements, counted in elements: an odd multiple of 64 bytes, so that
 * rows are spread over all cache sets. */
static inline int64_t simd_ld(int64_t n, int64_t element_bytes)
{
    int64_t lines = (simd_round_up(n, 32) * element_bytes + 63) / 64;
    return (lines | 1) * 64 / element_bytes;
}

/* In a product A B, A is stored in rows, and B in panels of 32 columns. simd_lda() returns the distance between rows of
 * A, and simd_ldb() the distance between panels of B. Where elements have several parts (simd_split.h), the parts
 * follow each other in a row or panel: part p of the element at x is at x + p * ld / parts. */
static inline int64_t simd_lda(const struct simd_type *t, int64_t k)
{
    return simd_ld(k, simd_element_bytes(t)) * t->parts;
}
static inline int64_t simd_ldb(const struct simd_type *t, int64_t k)
{
    return SIMD_PANEL * simd_round_up(k, t->k_multiple) * t->parts;
}

/* Bytes of the operands of a product A B. simd_a_bytes() returns the bytes of A, which has m rows. simd_b_bytes()
 * returns the bytes of B, which has n columns in panels that are ldb apart. The operands are tiles or one head, so the
 * sizes cannot overflow. */
static inline int64_t simd_a_bytes(const struct simd_type *t, int64_t m, int64_t lda)
{
    return simd_round_up(m, SIMD_A_ROWS) * lda * simd_element_bytes(t);
}

static inline int64_t simd_b_bytes(const struct simd_type *t, int64_t n, int64_t ldb)
{
    return (n + SIMD_PANEL - 1) / SIMD_PANEL * ldb * simd_element_bytes(t);
}

#endif
