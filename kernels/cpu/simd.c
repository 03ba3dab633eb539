/* simd.c: chooses which table of vector functions (struct simd) this processor runs. Each table needs all instructions
 * that the tables before it need.
 *
 * x86-64: a processor may have instructions whose registers the operating system does not save; the instruction XGETBV
 * returns which registers the system saves. A process must also request AMX (simd_amx_permit). arm64: every processor
 * has NEON; the operating system reports whether this one has bf16 products. */
#include "kernels/cpu/simd.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/simd_variants.h"

#if SIMD_X86
#include <cpuid.h>

/* Masks of bits in the register XCR0. A set bit means that the operating system saves certain registers. XCR0_AVX
 * covers the SSE and AVX registers, XCR0_AVX512 the opmask and ZMM registers, and XCR0_AMX the configuration and data
 * of AMX tiles. */
enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xe0, XCR0_AMX = 0x60000 };

/* bits of register EDX of CPUID leaf 7 */
enum { AMX_BF16 = 1 << 22, AVX512_FP16 = 1 << 23, AMX_TILE = 1 << 24 };

static uint64_t os_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has(uint32_t reg, uint32_t mask)
{
    return (reg & mask) == mask;
}

static int best(void)
{
    uint32_t a, b, c, d, b7 = 0, c7 = 0, d7 = 0, a71 = 0;
    int level = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return level;
    /* the bits of FMA, OSXSAVE, AVX and F16C */
    if (!has(c, 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29)) return level;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return level;
    if (a >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    const uint64_t xcr0 = os_state();
    /* bit 5 is AVX2, bit 8 is BMI2 */
    if ((xcr0 & XCR0_AVX) != XCR0_AVX || !has(b7, 1u << 5 | 1u << 8)) return level;
    level = 1;
    /* the bits of AVX512 F, DQ, BW, VL and VBMI */
    if ((xcr0 & XCR0_AVX512) != XCR0_AVX512 || !has(b7, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) || !has(c7, 1u << 1))
        return level;
    level = 2;
    /* AVX512_BF16 */
    if (!has(a71, 1u << 5)) return level;
    level = 3;
    if ((xcr0 & XCR0_AMX) != XCR0_AMX || !has(d7, AMX_BF16 | AMX_TILE) || !simd_amx_permit()) return level;
    return 4;
}

/* Returns the index of the fastest table up to `level`. Intel's processors with AMX execute VDPBF16PS (bf16 products
 * without AMX) slowly: a core of Sapphire Rapids reaches 106 GFLOP/s with it, and 175 GFLOP/s with f32 products. Such a
 * processor is therefore faster with f32 if a process may not use AMX. A virtual machine may hide AMX, so AVX512_FP16
 * identifies these processors too. */
static int preferred(int level)
{
    uint32_t a, b, c, d;
    if (level != 3 || !__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx) return level;
    const bool slow = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (AMX_BF16 | AVX512_FP16));
    return slow ? 2 : level;
}

/* The tables bf16 and amx have the functions of the table avx512 and additional compute types. assemble() fills them in
 * before the first use. */
static struct simd with_bf16, with_amx;
static struct simd_type amx_type, half_type, single_type;

static void assemble(void)
{
    with_bf16 = with_amx = simd_avx512;
    with_bf16.name = "bf16";
    with_bf16.bf16 = &simd_bf16_type;
    with_amx.name = "amx";
    with_amx.bf16 = &amx_type;
    with_amx.leave = simd_amx_leave;
    amx_type = simd_bf16_type;
    amx_type.gemm = simd_amx_gemm;
    amx_type.strip = 0;
    half_type = simd_half_type;
    half_type.gemm = simd_amx_gemm2;
    with_amx.half = &half_type;
    single_type = simd_single_type;
    single_type.gemm = simd_amx_gemm3;
    with_amx.single = &single_type;
}

static const struct simd *const tables[] = { &simd_portable, &simd_avx2, &simd_avx512, &with_bf16, &with_amx };
const char *const simd_names[] = { "portable", "avx2", "avx512", "bf16", "amx", NULL };
#elif SIMD_ARM64
#include <sys/auxv.h>

#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)
#endif

static int best(void)
{
    return getauxval(AT_HWCAP2) & HWCAP2_BF16 ? 2 : 1;
}

static int preferred(int level)
{
    return level;
}

/* the table neon_bf16: a copy of the table neon, with the compute type bf16 (for operands of matrix products) added */
static struct simd with_bf16;

static void assemble(void)
{
    with_bf16 = simd_neon;
    with_bf16.name = "neon_bf16";
    with_bf16.bf16 = &simd_neon_bf16_type;
}

static const struct simd *const tables[] = { &simd_portable, &simd_neon, &with_bf16 };
const char *const simd_names[] = { "portable", "neon", "neon_bf16", NULL };
#else
static int best(void)
{
    return 0;
}
static int preferred(int level)
{
    return level;
}
static void assemble(void) {}
static const struct simd *const tables[] = { &simd_portable };
const char *const simd_names[] = { "portable", NULL };
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* Indices into the list of tables (instruction sets): `supported` is the best table that this processor can run, and
 * `chosen` is the table in use. */
static int supported, chosen;

static void choose(void)
{
    const char *limit = getenv("ATTN_CPU_ISA");
    supported = best();
    chosen = preferred(supported);
    assemble();
    for (int i = 0; limit && i <= supported; i++)
        if (strcmp(limit, simd_names[i]) == 0) chosen = i;
}

const struct simd *simd_get(void)
{
    pthread_once(&once, choose);
    return tables[chosen];
}

const struct simd *simd_find(const char *name)
{
    pthread_once(&once, choose);
    for (int i = 0; i <= supported; i++)
        if (strcmp(name, simd_names[i]) == 0) return tables[i];
    return NULL;
}
