/* ptx.cuh: the product of small matrices of doubles on tensor cores, from compute capability 8.0 on.
 *
 * With g = lane / 4 and q = lane % 4, a lane holds (PTX ISA 9.0, 9.7.14.5.11):
 *   A [16, 16]  a[2 m + r]: row g + 8 r, column 4 m + q        m 0 to 3, r 0 and 1
 *   B [16, 8]   b[m]: row 4 m + q, column g
 *   C [16, 8]   c[2 r + e]: row g + 8 r, column 2 q + e        e 0 and 1 */
#ifndef ATTN_TRUTH_PTX_CUH
#define ATTN_TRUTH_PTX_CUH

#include "kernels/cuda/common/args.cuh"

/* Computes C += A B on tensor cores, in double. Before compute capability 9.0, the instruction exists only for 8 x 8 x
 * 4. PTX ISA 9.0, 9.7.14.5.14. */
DEVICE void mma_f64(double (&c)[4], const double (&a)[8], const double (&b)[4])
{
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, "
        "{%12,%13,%14,%15}, {%0,%1,%2,%3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
          "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                : "+d"(c[2 * r]), "+d"(c[2 * r + 1])
                : "d"(a[2 * m + r]), "d"(b[m]));
#endif
}

#endif
