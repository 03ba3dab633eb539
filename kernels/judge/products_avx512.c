/* products_avx512.c: compiles the matrix products of products.h for AVX-512. They compute 8 rows of C at a time, with
 * one register (64 bytes) for each row. */
#if defined(__AVX512F__)
#define PRODUCTS_BYTES 64
#define PRODUCTS_ROWS  8
#include "kernels/judge/products_loops.h"

const struct products products_avx512 = { "avx512", in_double, in_float };
#endif
