/* products_avx2.c: the products for AVX2 and FMA. They compute 8 rows of one register (32 bytes) at a time. */
#if defined(__AVX2__) && defined(__FMA__)
#define PRODUCTS_BYTES 32
#define PRODUCTS_ROWS  8
#include "kernels/judge/products_loops.h"

const struct products products_avx2 = { "avx2", in_double, in_float };
#endif
