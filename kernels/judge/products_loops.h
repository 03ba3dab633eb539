/* products_loops.h: the loops of products.h, compiled for the instructions of the file that includes this one. That
 * file defines how many bytes a register has (PRODUCTS_BYTES) and how many rows of C are computed at a time
 * (PRODUCTS_ROWS). */
#include "kernels/judge/products.h"

#include <string.h>

typedef double wide_double __attribute__((vector_size(PRODUCTS_BYTES)));
typedef float wide_float __attribute__((vector_size(PRODUCTS_BYTES)));

/* gcc keeps an array in registers only if the loops over the array are unrolled, so a pragma unrolls them; clang
 * unrolls them by itself. */
#if defined(__clang__)
#define PRODUCTS_UNROLL
#else
#define PRODUCTS_UNROLL _Pragma("GCC unroll 8")
#endif

/* Defines a function that computes rows 0 to ROWS - 1 of C, one register of columns at a time. */
#define PRODUCTS_STRIP(name, real, wide, ROWS)                                                                  \
    static inline __attribute__((always_inline)) void name(int64_t n, int64_t k, const real *A, int64_t row,    \
                                                           int64_t column, const real *B, int64_t ldb, real *C, \
                                                           int64_t ldc)                                         \
    {                                                                                                           \
        const int64_t lanes = (int64_t)(sizeof(wide) / sizeof(real));                                           \
        for (int64_t j = 0; j < n; j += lanes) {                                                                \
            wide sum[ROWS];                                                                                     \
            PRODUCTS_UNROLL for (int r = 0; r < ROWS; r++) memcpy(&sum[r], C + r * ldc + j, sizeof(wide));      \
            for (int64_t t = 0; t < k; t++) {                                                                   \
                wide b;                                                                                         \
                memcpy(&b, B + t * ldb + j, sizeof b);                                                          \
                PRODUCTS_UNROLL for (int r = 0; r < ROWS; r++) sum[r] += A[r * row + t * column] * b;           \
            }                                                                                                   \
            PRODUCTS_UNROLL for (int r = 0; r < ROWS; r++) memcpy(C + r * ldc + j, &sum[r], sizeof(wide));      \
        }                                                                                                       \
    }

#define PRODUCTS_OF(name, strip, real)                                                                           \
    static void name(int64_t m, int64_t n, int64_t k, const real *A, int64_t row, int64_t column, const real *B, \
                     int64_t ldb, real *C, int64_t ldc)                                                          \
    {                                                                                                            \
        int64_t i = 0;                                                                                           \
        for (; i + PRODUCTS_ROWS <= m; i += PRODUCTS_ROWS)                                                       \
            strip##_many(n, k, A + i * row, row, column, B, ldb, C + i * ldc, ldc);                              \
        for (; i < m; i++) strip##_one(n, k, A + i * row, row, column, B, ldb, C + i * ldc, ldc);                \
    }

PRODUCTS_STRIP(double_many, double, wide_double, PRODUCTS_ROWS)
PRODUCTS_STRIP(double_one, double, wide_double, 1)
PRODUCTS_STRIP(float_many, float, wide_float, PRODUCTS_ROWS)
PRODUCTS_STRIP(float_one, float, wide_float, 1)
PRODUCTS_OF(in_double, double, double)
PRODUCTS_OF(in_float, float, float)
