/* products_avx512.c: the products for AVX-512: 8 rows of one register. */
#if defined(__AVX512F__)
#define PRODUCTS_BYTES 64
#define PRODUCTS_ROWS  8
#include "kernels/judge/products_loops.h"

const struct products products_avx512 = { "avx512", in_double, in_float };
#endif
