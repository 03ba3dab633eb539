/* ptx.cuh: wrappers for the Hopper instructions (sm_90a) that the kernels of sm90/ use, one instruction each.
 *
 * Addresses of shared memory have 32 bits (smem_addr). A tensor map must be a grid-constant kernel parameter.
 * The wrapper of an instruction that orders memory has a "memory" clobber. Section numbers are those of PTX ISA
 * 9.0. */
#ifndef ATTN_SM90_PTX_CUH
#define ATTN_SM90_PTX_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernels/cuda/sm90/layer/copies.cuh"
#include "kernels/cuda/common/args.cuh"

DEVICE uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Returns the warpgroup's index in the block. The shuffle tells ptxas that all lanes have the same index, so that
 * descriptors made from it stay in uniform registers. */
DEVICE int warpgroup_index()
{
    return __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
}

/* Returns threadIdx.x, read at each call, so that values computed from it take no registers between two loops. */
DEVICE uint32_t thread_anew()
{
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* Returns the address of the block's dynamic shared memory (block_memory()), read at each call, so that descriptors
 * made from it stay in uniform registers. */
DEVICE uint32_t memory_anew()
{
    uint32_t address;
    asm volatile("mov.u32 %0, memory;" : "=r"(address));
    return address;
}

/* ---- Loads, stores and atomics in global memory ------------------------------------------------------------------ */

/* store_release() writes, and load_acquire() reads, a word by which one block signals other blocks. A thread that
 * acquires the stored value sees all earlier writes of the storing thread, and of threads that the storing thread had
 * met at a barrier before. PTX ISA 9.7.9.11, 9.7.9.8. */
DEVICE void store_release(uint32_t *to, uint32_t x)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
DEVICE uint32_t load_acquire(const uint32_t *from)
{
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
DEVICE void wait_until_equal(const uint32_t *from, uint32_t x, unsigned nap = 20)
{
    while (load_acquire(from) != x) __nanosleep(nap);
}
DEVICE void add_release(uint32_t *to, uint32_t x)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
/* Returns the word's value, and sets the word to 1 if that value is 0, in one atomic operation (acquire). */
DEVICE uint32_t claim_acquire(uint32_t *word)
{
    uint32_t x;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(x) : "l"(word) : "memory");
    return x;
}
/* Marks the beginning of a repair (rows computed one by one), which the GPU emulator of the tests can report as an
 * error. */
DEVICE void repair_begins() {}
/* Loads four floats from global memory, without the L1 cache. PTX ISA 9.7.9.8. */
DEVICE float4 load_4(const float *from)
{
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

/* Atomically adds 1 to the counter, and returns its old value, which must be below 2^31 - 1. atom.add would be slower:
 * ptxas sums it over the warp and waits for the result at once. PTX ISA 9.7.13.5. */
DEVICE int claim(int *counter)
{
    int x;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(x) : "l"(counter) : "memory");
    return x;
}

/* Copies 16 bytes from global to shared memory, without the L1 cache. If `valid` is false, writes zeros and reads
 * nothing. PTX ISA 9.7.9.25.3.1. */
DEVICE void cp_async_16(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void cp_async_8(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void cp_async_wait_all()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Returns a cache policy for data that is read only once: the L2 cache evicts such data before other data. PTX ISA
 * 9.7.9.16. */
DEVICE uint64_t evict_first()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* ---- Registers and named barriers of warps with different tasks -------------------------------------------------- */

template <int REGISTERS> DEVICE void setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> DEVICE void setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

DEVICE void named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* Waits at a barrier of `threads` threads. Returns whether x is true in all these threads. */
DEVICE bool named_barrier_all(int id, int threads, bool x)
{
    uint32_t all;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nbar.red.and.pred p, %1, %2, p;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(all)
                 : "r"(id), "r"(threads), "r"((uint32_t)x)
                 : "memory");
    return all;
}
DEVICE void named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- Programmatic dependent launch, PTX ISA 9.7.13.13 ------------------------------------------------------------ */

/* Allows the GPU to start the stream's next kernel as soon as every block has called this function, if the next kernel
 * was launched with programmatic dependent launch. */
DEVICE void launch_dependents()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/* Waits until the stream's previous kernel has ended and its writes are visible to this kernel. */
DEVICE void wait_for_prerequisites()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* ---- Moves between registers and shared memory, conversions, arithmetic ------------------------------------------ */

/* Stores four 8x8 blocks of 16-bit elements to shared memory. Lane l gives the address of row l % 8 of block l / 8. */
DEVICE void stmatrix_x4(uint32_t row, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Stores four 8x8 blocks of 16-bit elements to shared memory, each transposed. Lane l holds elements 2 (l % 4) and 2 (l
 * % 4) + 1 of column l / 4. */
DEVICE void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Loads four 8x8 blocks of 16-bit elements from shared memory, each transposed. Lane l gives the address of row l % 8
 * of block l / 8, and gets elements 2 (l % 4) and 2 (l % 4) + 1 of column l / 4 of each block. */
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

/* Stores 16 bytes to global memory in one instruction. The compiler would use four instructions for an assignment. */
DEVICE void store_16(void *to, uint4 x)
{
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

/* Copies words to new registers, because nothing may use the registers that a running product reads. */
template <int N, int M> DEVICE void copy_words(uint32_t (&to)[N][M], const uint32_t (&from)[N][M])
{
#pragma unroll
    for (int i = 0; i < N * M; i++) asm volatile("mov.b32 %0, %1;" : "=r"(to[i / M][i % M]) : "r"(from[i / M][i % M]));
}

/* Packs two floats into a register of two 16-bit elements. `low` goes to the low half. */
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
/* Unpacks the two 16-bit elements of a register as floats, the low element first. */
template <typename T> DEVICE float2 unpack(uint32_t r);
template <> DEVICE float2 unpack<__half>(uint32_t r)
{
    return __half22float2(*(__half2 *)&r);
}
template <> DEVICE float2 unpack<__nv_bfloat16>(uint32_t r)
{
    return make_float2(__uint_as_float(r << 16), __uint_as_float(r & 0xffff0000));
}
/* Converts two float8_e4m3 numbers to bfloat16 without rounding. `low` goes to the low half of the result. */
DEVICE uint32_t widen_e4m3(uint8_t low, uint8_t high)
{
    uint32_t r;
    const uint16_t pair = (uint16_t)(low | high << 8);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
    const float2 x = __half22float2(*(__half2 *)&r);
    return pack<__nv_bfloat16>(x.x, x.y);
}

/* Packs four floats into a register of four float8_e4m3 numbers, with x0 in the lowest byte. Values above 448 become
 * 448. */
DEVICE uint32_t pack_e4m3(float x0, float x1, float x2, float x3)
{
    uint32_t r;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(r)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return r;
}

DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns the largest of three floats, compared as integers in one instruction. Correct only if at least one is >= 0. A
 * NaN with sign bit 0 counts as larger than all numbers; a NaN with sign bit 1 is ignored. */
DEVICE float largest_by_bits(float x, float y, float z)
{
    return __int_as_float(__vimax3_s32(__float_as_int(x), __float_as_int(y), __float_as_int(z)));
}

/* ---- Tensor-core products (wgmma), PTX ISA 9.7.15 ---------------------------------------------------------------- */

/* Returns the descriptor of an operand in shared memory with the 128-byte swizzle. To move the operand's beginning by
 * n bytes, add n >> 4.
 *   lbo  MN-major operands: distance in bytes from one group of 64 elements of M or N to the next;
 *        K-major operands ignore it
 *   sbo  distance in bytes from one group of 8 rows to the next */
DEVICE uint64_t wgmma_descriptor(uint32_t address, uint32_t lbo, uint32_t sbo)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(lbo >> 4) << 16 | (uint64_t)(sbo >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Must be called before the first wgmma of a batch (the products of one commit) if other instructions have changed
 * registers that the batch uses. Otherwise wgmma might not see these changes. */
DEVICE void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until all but the newest N batches of products are complete. */
template <int N> DEVICE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Makes ptxas compute x before the next wait, by a branch that is never taken. ptxas moves a wait above arithmetic, but
 * not above a branch. x must be >= 0 or NaN. */
DEVICE void compute_before_wait(float x)
{
    if (x < 0) asm volatile("nanosleep.u32 0;" ::: "memory");
}

/* Makes the compiler treat d as changed by this call. The compiler can neither move a read of d above the call nor use
 * what it knows of d. */
template <int N> DEVICE void opaque(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> DEVICE void opaque(uint32_t (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

/* Declares that the contents of d are not needed any more. Otherwise d would stay in registers until the next product,
 * because wgmma reads d even if the product starts from 0. */
template <int N> DEVICE void undefine(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "=f"(d[i]));
}

/* Returns x in a register that ptxas must keep, instead of computing x again at each use. It is a shuffle in which each
 * lane gets its own x. */
DEVICE uint32_t kept(uint32_t x)
{
    return __shfl_sync(0xffffffff, x, threadIdx.x % 32);
}

/* Returns x, but hides from the compiler that the result equals x. The compiler must then compute again what depends on
 * the result, and keeps no values computed from x. */
DEVICE uint32_t opaque(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

#define F8(i)                                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define F4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F32(i) F8(i), F8(i + 8), F8(i + 16), F8(i + 24)
#define O24    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define O32                                                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%" \
    "30,%31"
#define O40  O32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define O48  O40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define O56  O48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define O64  O56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define O68  O64 ",%64,%65,%66,%67"
#define O80  O64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define O88  O64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
#define O96  O88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define O112 O96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define O128                                                                                                           \
    O96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%" \
        "118,%119,%120,"                                                                                               \
        "%121,%122,%123,%124,%125,%126,%127"
/* Calls the macro X for each number N of columns that a product may have. X gets N, the accumulators (first as text for
 * the instruction, then as operands), the numbers of the next six operands, and the arguments of WGMMA_N after X. */
#define WGMMA_N(X, ...)                                                                                  \
    X(48, O24, (F8(0), F8(8), F8(16)), 24, 25, 26, 27, 28, 29, __VA_ARGS__)                              \
    X(64, O32, (F32(0)), 32, 33, 34, 35, 36, 37, __VA_ARGS__)                                            \
    X(80, O40, (F32(0), F8(32)), 40, 41, 42, 43, 44, 45, __VA_ARGS__)                                    \
    X(96, O48, (F32(0), F8(32), F8(40)), 48, 49, 50, 51, 52, 53, __VA_ARGS__)                            \
    X(112, O56, (F32(0), F8(32), F8(40), F8(48)), 56, 57, 58, 59, 60, 61, __VA_ARGS__)                   \
    X(128, O64, (F32(0), F32(32)), 64, 65, 66, 67, 68, 69, __VA_ARGS__)                                  \
    X(136, O68, (F32(0), F32(32), F4(64)), 68, 69, 70, 71, 72, 73, __VA_ARGS__)                          \
    X(160, O80, (F32(0), F32(32), F8(64), F8(72)), 80, 81, 82, 83, 84, 85, __VA_ARGS__)                  \
    X(176, O88, (F32(0), F32(32), F8(64), F8(72), F8(80)), 88, 89, 90, 91, 92, 93, __VA_ARGS__)          \
    X(192, O96, (F32(0), F32(32), F32(64)), 96, 97, 98, 99, 100, 101, __VA_ARGS__)                       \
    X(224, O112, (F32(0), F32(32), F32(64), F8(96), F8(104)), 112, 113, 114, 115, 116, 117, __VA_ARGS__) \
    X(256, O128, (F32(0), F32(32), F32(64), F32(96)), 128, 129, 130, 131, 132, 133, __VA_ARGS__)
#define UNWRAP(...) __VA_ARGS__

struct e4m3 {
    uint8_t bits;
};

/* Issues d[64 x N] = (accumulate ? d : 0) + A B, with float32 sums. Register i of a thread is row 16 warp + lane / 4 +
 * 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2.
 *
 * 16-bit types: a step has 16 elements along k. ss: both operands are in shared memory, K-major. rs: A is in registers
 * (in the order of an accumulator's 16 columns), and B is MN-major (its k runs down the rows).
 *
 * float8_e4m3fn: a step has 32 elements along k, and both operands are K-major, in rs too. In rs, register r of a
 * thread holds elements k = 16 (r / 2) + 4 (lane % 4) and the next three, of row 16 warp + lane / 4 + 8 (r % 2) of A.
 * The sums have about 14 bits: each step truncates every product and the previous sum at 2^-13 of the largest of
 * them. */
template <typename T, int N> struct wgmma;
#define X(n, LIST, REGS, a, b, c, e, f, g, type, TYPES, SS, RS)                                                      \
    template <> struct wgmma<type, n> {                                                                              \
        static DEVICE void ss(float (&d)[n / 2], uint64_t A, uint64_t B, int accumulate)                             \
        {                                                                                                            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #n TYPES " {" LIST "}, %" #a ", %" #b ", p, " SS ";\n}" \
                         : UNWRAP REGS                                                                               \
                         : "l"(A), "l"(B), "r"(accumulate));                                                         \
        }                                                                                                            \
        static DEVICE void rs(float (&d)[n / 2], const uint32_t (&A)[4], uint64_t B, int accumulate)                 \
        {                                                                                                            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #n TYPES " {" LIST "}, {%" #a ",%" #b ",%" #c ",%" #e   \
                         "}, %" #f ", p, " RS ";\n}"                                                                 \
                         : UNWRAP REGS                                                                               \
                         : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(accumulate));                     \
        }                                                                                                            \
    };
WGMMA_N(X, __nv_bfloat16, "k16.f32.bf16.bf16", "1, 1, 0, 0", "1, 1, 1")
WGMMA_N(X, __half, "k16.f32.f16.f16", "1, 1, 0, 0", "1, 1, 1")
WGMMA_N(X, e4m3, "k32.f32.e4m3.e4m3", "1, 1", "1, 1")
#undef X

/* Products of 16-bit types; A_MN and B_MN say whether A and B are MN-major. ss: both operands are in shared memory. rs:
 * A is in registers, and B is K-major. */
template <typename T, int N, int A_MN, int B_MN> struct wgmma_mn;
#define X(n, LIST, REGS, a, b, c, e, f, g, type, TYPES)                                                              \
    template <int A_MN, int B_MN> struct wgmma_mn<type, n, A_MN, B_MN> {                                             \
        static DEVICE void ss(float (&d)[n / 2], uint64_t A, uint64_t B, int accumulate)                             \
        {                                                                                                            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #n TYPES " {" LIST "}, %" #a ", %" #b ", p, 1, 1, %" #e \
                         ", %" #f ";\n}"                                                                             \
                         : UNWRAP REGS                                                                               \
                         : "l"(A), "l"(B), "r"(accumulate), "n"(A_MN), "n"(B_MN));                                   \
        }                                                                                                            \
        static DEVICE void rs(float (&d)[n / 2], const uint32_t (&A)[4], uint64_t B, int accumulate)                 \
        {                                                                                                            \
            static_assert(!A_MN && !B_MN, "K-major");                                                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #n TYPES " {" LIST "}, {%" #a ",%" #b ",%" #c ",%" #e   \
                         "}, %" #f ", p, 1, 1, 0;\n}"                                                                \
                         : UNWRAP REGS                                                                               \
                         : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(accumulate));                     \
        }                                                                                                            \
    };
WGMMA_N(X, __nv_bfloat16, "k16.f32.bf16.bf16")
WGMMA_N(X, __half, "k16.f32.f16.f16")
#undef X

#endif
