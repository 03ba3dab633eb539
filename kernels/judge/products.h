/* products.h: products of small matrices, in double for exact results and in float for emulated kernels.
 *
 *   C[m, n] += A[m, k] B[k, n]
 *
 * A has strides, so that one function serves a matrix and its transpose. B and C have rows of `ldb` and `ldc` numbers.
 * n is a multiple of PRODUCTS_WIDTH, and rows of B and C begin at multiples of 64 bytes. The sum over k runs in order,
 * with one fused multiply-add per term where the processor has one. Any thread may call these functions. */
#ifndef JUDGE_PRODUCTS_H
#define JUDGE_PRODUCTS_H

#include <stdint.h>

enum { PRODUCTS_WIDTH = 16, PRODUCTS_ALIGNMENT = 64 };

struct products {
    const char *name;
    void (*in_double)(int64_t m, int64_t n, int64_t k, const double *A, int64_t row, int64_t column, const double *B,
                      int64_t ldb, double *C, int64_t ldc);
    void (*in_float)(int64_t m, int64_t n, int64_t k, const float *A, int64_t row, int64_t column, const float *B,
                     int64_t ldb, float *C, int64_t ldc);
};

/* Returns the matrix products that are fastest on this processor. */
const struct products *products_best(void);

/* Functions for products of matrices, by instruction set: products.c, products_avx2.c and products_avx512.c. */
extern const struct products products_portable, products_avx2, products_avx512;

#endif
