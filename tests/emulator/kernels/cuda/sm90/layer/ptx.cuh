/* ptx.cuh: replaces kernels/cuda/sm90/layer/ptx.cuh in emulator builds: the same functions and arguments, carried out
 * by the emulator. The include path finds this file first.
 *
 * tests/emulator/sm90.h describes the asynchronous instructions, and tests/emulator/emulator.h describes what all
 * kernels share. */
#ifndef ATTN_SM90_PTX_CUH
#define ATTN_SM90_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernels/cuda/common/args.cuh"
#include "kernels/cuda/sm90/layer/copies.cuh"
#include "tests/emulator/sm80.h"
#include "tests/emulator/sm90.h"

DEVICE uint32_t smem_addr(const void *p)
{
    return emu::shared_address(p);
}

DEVICE uint32_t memory_anew()
{
    return smem_addr(&block_memory<char>());
}

/* Returns the index of the calling thread's warpgroup in its thread block. */
DEVICE int warpgroup_index()
{
    return __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
}

DEVICE uint32_t thread_anew()
{
    return (uint32_t)emu::thread();
}

/* ---- Loads, stores and atomics in global memory ------------------------------------------------------------------ */

DEVICE void store_release(uint32_t *to, uint32_t x)
{
    *to = x;
}
DEVICE uint32_t load_acquire(const uint32_t *from)
{
    emu::yield(); /* a loop that polls a barrier must let other fibers (CUDA threads) run */
    return *from;
}
DEVICE void wait_until_equal(const uint32_t *from, uint32_t x, unsigned = 20)
{
    emu::wait_until([&] { return *from == x; }, "another block to write a word");
}
DEVICE void add_release(uint32_t *to, uint32_t x)
{
    *to += x;
}
DEVICE uint32_t claim_acquire(uint32_t *word)
{
    const uint32_t x = *word;
    if (x == 0) *word = 1;
    return x;
}
DEVICE void repair_begins()
{
    emu::repair_begins();
}
DEVICE float4 load_4(const float *from)
{
    return *(const float4 *)from;
}
DEVICE int claim(int *counter)
{
    return atomicAdd(counter, 1);
}
DEVICE void cp_async_16(uint32_t to, const void *from, bool valid)
{
    emu::cp_async(to, from, valid);
}
DEVICE void cp_async_8(uint32_t to, const void *from)
{
    emu::cp_async(to, from, true, 8);
}
DEVICE void cp_async_wait_all()
{
    emu::cp_async_commit();
    emu::cp_async_wait(0);
}

/* The emulator ignores cache policies, so any value will do. */
DEVICE uint64_t evict_first()
{
    return 0;
}

/* ---- Registers and named barriers of warps with different tasks -------------------------------------------------- */

template <int REGISTERS> DEVICE void setmaxnreg_inc()
{
    emu::setmaxnreg(REGISTERS, true);
}
template <int REGISTERS> DEVICE void setmaxnreg_dec()
{
    emu::setmaxnreg(REGISTERS, false);
}

DEVICE void named_barrier_sync(int id, int threads)
{
    emu::barrier_sync(id, threads);
}
DEVICE bool named_barrier_all(int id, int threads, bool x)
{
    return emu::barrier_all(id, threads, x);
}
DEVICE void named_barrier_arrive(int id, int threads)
{
    emu::barrier_arrive(id, threads);
}

/* ---- Programmatic dependent launch ------------------------------------------------------------------------------- */

/* does nothing: the emulator starts a kernel only after the previous kernel has ended */
DEVICE void launch_dependents() {}
DEVICE void wait_for_prerequisites() {}

/* ---- Moves between registers and shared memory, conversions, arithmetic ------------------------------------------ */

DEVICE void stmatrix_x4(uint32_t row, const uint32_t (&r)[4])
{
    emu::stmatrix_x4(row, r);
}
DEVICE void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4])
{
    emu::stmatrix_x4_trans(row, r);
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row)
{
    emu::ldmatrix_x4_trans(r, row);
}

DEVICE void store_16(void *to, uint4 x)
{
    *(uint4 *)to = x;
}

template <int N, int M> DEVICE void copy_words(uint32_t (&to)[N][M], const uint32_t (&from)[N][M])
{
    memcpy(to, from, sizeof to);
}

/* Packs two floats into a register of two 16-bit elements, `low` in the low half. */
template <typename T> DEVICE uint32_t pack(float low, float high);
template <> DEVICE uint32_t pack<__half>(float low, float high)
{
    return emu::pack_f16(low, high);
}
template <> DEVICE uint32_t pack<__nv_bfloat16>(float low, float high)
{
    return emu::pack_bf16(low, high);
}

template <typename T> DEVICE float2 unpack(uint32_t r);
template <> DEVICE float2 unpack<__half>(uint32_t r)
{
    return make_float2(attn_f16_to_f32((uint16_t)r), attn_f16_to_f32((uint16_t)(r >> 16)));
}
template <> DEVICE float2 unpack<__nv_bfloat16>(uint32_t r)
{
    return make_float2(attn_bf16_to_f32((uint16_t)r), attn_bf16_to_f32((uint16_t)(r >> 16)));
}

DEVICE uint32_t widen_e4m3(uint8_t low, uint8_t high)
{
    return pack<__nv_bfloat16>(attn_e4m3_to_f32(low), attn_e4m3_to_f32(high));
}

DEVICE uint32_t pack_e4m3(float x0, float x1, float x2, float x3)
{
    return emu::pack_e4m3(x0, x1, x2, x3);
}

DEVICE void compute_before_wait(float) {}

DEVICE float exp2_fast(float x)
{
    return emu::exp2_fast(x);
}

DEVICE float largest_by_bits(float x, float y, float z)
{
    return __int_as_float(max(max(__float_as_int(x), __float_as_int(y)), __float_as_int(z)));
}

/* ---- Tensor-core products (wgmma) -------------------------------------------------------------------------------- */

DEVICE uint64_t wgmma_descriptor(uint32_t address, uint32_t lbo, uint32_t sbo)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(lbo >> 4) << 16 | (uint64_t)(sbo >> 4) << 32 |
           (uint64_t)1 << 62;
}

DEVICE void wgmma_fence()
{
    emu::wgmma_fence();
}
DEVICE void wgmma_commit()
{
    emu::wgmma_commit();
}
template <int N> DEVICE void wgmma_wait()
{
    emu::wgmma_wait(N);
}

template <typename T, int N> DEVICE void opaque(T (&)[N]) {}
template <int N> DEVICE void undefine(float (&d)[N])
{
    /* A product in flight has not written its registers yet, so they get NaN. Code that reads the registers before the
     * wait then computes NaN. */
    for (float &x : d) x = NAN;
}
DEVICE uint32_t opaque(uint32_t x)
{
    return x;
}
DEVICE uint32_t kept(uint32_t x)
{
    return x;
}

struct e4m3 {
    uint8_t bits;
};

template <typename T> const emu::wgmma_type type_of = emu::WGMMA_E4M3;
template <> inline const emu::wgmma_type type_of<__nv_bfloat16> = emu::WGMMA_BF16;
template <> inline const emu::wgmma_type type_of<__half> = emu::WGMMA_F16;

/* The two forms of a wgmma product. ss: both operands are K-major in shared memory. rs: A is in registers, and B is in
 * shared memory. B is then MN-major, except for e4m3. */
template <typename T, int N> struct wgmma {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "what there is");
    static DEVICE void ss(float (&d)[N / 2], uint64_t A, uint64_t B, int accumulate)
    {
        emu::wgmma_issue({ type_of<T>, N, d, nullptr, A, B, accumulate != 0, false, false });
    }
    static DEVICE void rs(float (&d)[N / 2], const uint32_t (&A)[4], uint64_t B, int accumulate)
    {
        emu::wgmma_issue({ type_of<T>, N, d, A, 0, B, accumulate != 0, false, sizeof(T) == 2 });
    }
};

template <typename T, int N, int A_MN, int B_MN> struct wgmma_mn {
    static DEVICE void ss(float (&d)[N / 2], uint64_t A, uint64_t B, int accumulate)
    {
        emu::wgmma_issue({ type_of<T>, N, d, nullptr, A, B, accumulate != 0, A_MN != 0, B_MN != 0 });
    }
    static DEVICE void rs(float (&d)[N / 2], const uint32_t (&A)[4], uint64_t B, int accumulate)
    {
        static_assert(!A_MN && !B_MN, "K-major");
        emu::wgmma_issue({ type_of<T>, N, d, A, 0, B, accumulate != 0, false, false });
    }
};

#endif
