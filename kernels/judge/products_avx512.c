/* products_avx512.c: the products of products.h for AVX-512. A block of C has 8 rows, and one register (64 bytes) holds
 * a row. */
#if defined(__AVX512F__)
#define PRODUCTS_BYTES 64
#define PRODUCTS_ROWS  8
#include "kernels/judge/products_loops.h"

const struct products products_avx512 = { "avx512", in_double, in_float };
#endif
