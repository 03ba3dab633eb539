/* simd_variants.h: declares the functions and tables that simd.c chooses from. x86-64 and arm64 have different tables.
 * In a build for x86-64 the files for arm64 compile to nothing, and in a build for arm64 the files for x86-64 do. Any
 * other processor has only the portable table. */
#ifndef ATTN_CPU_SIMD_VARIANTS_H
#define ATTN_CPU_SIMD_VARIANTS_H

#include "kernels/cpu/simd.h"

extern const struct simd simd_portable;

#if defined(__x86_64__)
#define SIMD_X86 1
extern const struct simd simd_avx2;
extern const struct simd simd_avx512;
extern const struct simd_type simd_bf16_type;

/* Products of matrices in AMX tiles, for operands of one, two and three bf16 parts. The table "amx" uses these
 * products and simd_amx_leave(). Its other functions are those of simd_bf16_type, simd_half_type and
 * simd_single_type. */
void simd_amx_gemm(int m, int n, int k, const void *A, int64_t lda, const void *B, int64_t ldb, float *C, int64_t ldc,
                   bool add, const float *rescale);
void simd_amx_gemm2(int m, int n, int k, const void *A, int64_t lda, const void *B, int64_t ldb, float *C, int64_t ldc,
                    bool add, const float *rescale);
void simd_amx_gemm3(int m, int n, int k, const void *A, int64_t lda, const void *B, int64_t ldb, float *C, int64_t ldc,
                    bool add, const float *rescale);
extern const struct simd_type simd_half_type, simd_single_type;
void simd_amx_leave(void);

/* Requests the right to use AMX tiles in this process from the operating system. Returns false if the system
 * refuses. */
bool simd_amx_permit(void);
#else
#define SIMD_X86 0
#endif

#if defined(__aarch64__)
#define SIMD_ARM64 1
extern const struct simd simd_neon;
extern const struct simd_type simd_neon_bf16_type;
#else
#define SIMD_ARM64 0
#endif

#endif
