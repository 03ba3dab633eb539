/* ptx.cuh: wrappers for the instructions of compute capability 8.0 that the kernels of this folder use, one
 * instruction each. Numbers such as 9.7.9.16 are sections of the PTX ISA.
 *
 * Fragments are those of mma.m16n8k16 (PTX ISA 9.0, 9.7.14.5.8), with g = lane / 4 and q = lane % 4:
 *   A (16 x 16)  a0: row g, columns 2q and 2q+1   a1: row g+8   a2: row g, columns + 8   a3: row g+8, columns + 8
 *   B (16 x 8)   b0: rows 2q and 2q+1, column g   b1: rows + 8
 *   C (16 x 8)   c0 c1: row g, columns 2q and 2q+1   c2 c3: row g+8 */
#ifndef ATTN_SM80_PTX_CUH
#define ATTN_SM80_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernels/cuda/common/args.cuh"

DEVICE uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Copies 16 bytes from global to shared memory, past the L1 cache. If `valid` is false, reads nothing and writes zeros.
 * PTX ISA 9.7.9.25.3.1. */
DEVICE void cp_async_16(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
/* Returns a cache policy for data that is read once: the L2 cache evicts it first. PTX ISA 9.7.9.16. The instruction is
 * volatile; otherwise the compiler would keep its result in two registers throughout a loop. */
DEVICE uint64_t evict_first()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void cp_async_16(uint32_t to, const void *from, bool valid, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}
DEVICE void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits for this thread's copies, except those of the newest N groups. */
template <int N> DEVICE void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#if __CUDA_ARCH__ >= 900
/* Adds four floats to four 16-byte aligned floats in global memory; each addition is atomic. PTX ISA 9.7.13.7. */
DEVICE void red_add_4(float *to, const float (&x)[4])
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

#endif

/* Writes four zeros to a 16-byte aligned address by one instruction; for an assignment the compiler would use two. */
DEVICE void zero_4(float *to)
{
    asm volatile("st.global.v4.f32 [%0], {%1,%1,%1,%1};" ::"l"(to), "f"(0.f) : "memory");
}

/* Waits until all THREADS threads (a multiple of 32) have reached barrier ID (1 to 15; __syncthreads() uses 0). PTX ISA
 * 9.7.13.1. */
template <int ID, int THREADS> DEVICE void barrier()
{
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

/* Loads four 8 x 8 blocks of 16-bit elements from shared memory; lane l gives the address of row l % 8 of block l / 8.
 * PTX ISA 9.7.14.5.15. */
DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

/* Computes C += A B on tensor cores: A is 16 x 16, B 16 x 8, and sums are float32. PTX ISA 9.7.14.5.14. */
template <typename T> DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> DEVICE void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Rounds x to TF32: float32 with 10 fraction bits. PTX ISA 9.7.9.21. */
DEVICE uint32_t tf32_of(float x)
{
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
/* Computes C += A B on tensor cores: A is 16 x 8, B 8 x 8, in TF32, and sums are float32. PTX ISA 9.7.14.5.14.
 *   A  a0: row g, column q   a1: row g+8   a2: row g, column q+4   a3: row g+8, column q+4
 *   B  b0: row q, column g   b1: row q+4 */
DEVICE void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Packs two floats as 16-bit elements; `low` is the lower half. */
template <typename T> DEVICE uint32_t pack(float low, float high);
template <> DEVICE uint32_t pack<__half>(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <> DEVICE uint32_t pack<__nv_bfloat16>(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* floats_of_halves() converts two float16 numbers to floats; multiply_halves() multiplies the two float16 numbers of x
 * by those of y. PTX ISA 9.7.4.4. */
DEVICE float2 floats_of_halves(uint32_t x)
{
    return __half22float2(*reinterpret_cast<const __half2 *>(&x));
}
DEVICE uint32_t multiply_halves(uint32_t x, uint32_t y)
{
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
#if __CUDA_ARCH__ >= 890
/* Converts bytes 2 PAIR and 2 PAIR + 1 from float8_e4m3 to float16 (low and high half). PTX ISA 9.7.9.21. */
template <int PAIR> DEVICE uint32_t halves_of_e4m3(uint32_t bytes)
{
    uint32_t r;
    if (PAIR == 0)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
            : "=r"(r)
            : "r"(bytes));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
            : "=r"(r)
            : "r"(bytes));
    return r;
}
#endif

template <typename T> DEVICE float dot_pair(uint32_t x, uint32_t y, float sum);
template <> DEVICE float dot_pair<__half>(uint32_t x, uint32_t y, float sum)
{
    const float2 u = __half22float2(*reinterpret_cast<const __half2 *>(&x)),
                 v = __half22float2(*reinterpret_cast<const __half2 *>(&y));
    return fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
}
template <> DEVICE float dot_pair<__nv_bfloat16>(uint32_t x, uint32_t y, float sum)
{
    return fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16),
                fmaf(__uint_as_float(x & 0xffff0000), __uint_as_float(y & 0xffff0000), sum));
}

/* Returns 2^x, computed by the GPU's unit for exponentials; 2^-inf is 0. PTX ISA 9.7.3.21. */
DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns the larger of two numbers; NaN if one of them is NaN. PTX ISA 9.7.3.12. */
DEVICE float max_or_nan(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

/* ---- Programmatic dependent launch (PTX ISA 9.7.13.13) ----------------------------------------------------------- */

/* Allows the stream's next kernel to start when every block has called this function, if the next kernel was launched
 * as a programmatic dependent launch. Does nothing before compute capability 9.0. */
DEVICE void launch_dependents()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Waits until the stream's previous kernel has ended and its writes are visible. Does nothing before compute capability
 * 9.0, where kernels do not overlap. */
DEVICE void wait_for_prerequisites()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
