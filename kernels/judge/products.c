/* products.c: matrix products in plain C for any processor, and products_best(), which chooses the fastest matrix
 * products for this processor. */
#define PRODUCTS_BYTES 16
#define PRODUCTS_ROWS  4
#include "kernels/judge/products_loops.h"

const struct products products_portable = { "portable", in_double, in_float };

const struct products *products_best(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
        return &products_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &products_avx2;
#endif
    return &products_portable;
}
