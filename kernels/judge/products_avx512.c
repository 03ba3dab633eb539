/* products_avx512.c: the products for AVX-512. They compute 8 rows of one register (64 bytes) at a time. */
#if defined(__AVX512F__)
#define PRODUCTS_BYTES 64
#define PRODUCTS_ROWS  8
#include "kernels/judge/products_loops.h"

const struct products products_avx512 = { "avx512", in_double, in_float };
#endif
