/* products_avx2.c: compiles the matrix products of products.h for AVX2 and FMA. They compute 8 rows of C at a time,
 * with one register (32 bytes) for each row. */
#if defined(__AVX2__) && defined(__FMA__)
#define PRODUCTS_BYTES 32
#define PRODUCTS_ROWS  8
#include "kernels/judge/products_loops.h"

const struct products products_avx2 = { "avx2", in_double, in_float };
#endif
