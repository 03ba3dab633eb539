/* ptx.cuh: replaces kernels/cuda/sm80/ptx.cuh in emulator builds: the same functions, carried out by the emulator. */
#ifndef ATTN_SM80_PTX_CUH
#define ATTN_SM80_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernels/cuda/common/args.cuh"
#include "tests/emulator/sm80.h"

DEVICE uint32_t smem_addr(const void *p)
{
    return emu::shared_address(p);
}

DEVICE void cp_async_16(uint32_t to, const void *from, bool valid)
{
    emu::cp_async(to, from, valid);
}
DEVICE uint64_t evict_first()
{
    return 0;
}
DEVICE void cp_async_16(uint32_t to, const void *from, bool valid, uint64_t)
{
    emu::cp_async(to, from, valid);
}
DEVICE void cp_async_commit()
{
    emu::cp_async_commit();
}
template <int N> DEVICE void cp_async_wait()
{
    emu::cp_async_wait(N);
}

#if __CUDA_ARCH__ >= 900
DEVICE void red_add_4(float *to, const float (&x)[4])
{
    emu::check_global(to, 16, 16, "red.add.v4");
    for (int e = 0; e < 4; e++) to[e] += x[e];
}
#endif

DEVICE void zero_4(float *to)
{
    emu::check_global(to, 16, 16, "st.v4");
    for (int e = 0; e < 4; e++) to[e] = 0;
}

template <int ID, int THREADS> DEVICE void barrier()
{
    emu::barrier_sync(ID, THREADS);
}

DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row)
{
    emu::ldmatrix_x4(r, row);
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row)
{
    emu::ldmatrix_x4_trans(r, row);
}

template <typename T> DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> DEVICE void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    emu::mma_f16(c, a, b0, b1);
}
template <> DEVICE void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    emu::mma_bf16(c, a, b0, b1);
}

DEVICE uint32_t tf32_of(float x)
{
    return emu::tf32_of(x);
}
DEVICE void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    emu::mma_tf32(c, a, b0, b1);
}

template <typename T> DEVICE uint32_t pack(float low, float high);
template <> DEVICE uint32_t pack<__half>(float low, float high)
{
    return emu::pack_f16(low, high);
}
template <> DEVICE uint32_t pack<__nv_bfloat16>(float low, float high)
{
    return emu::pack_bf16(low, high);
}

DEVICE float2 floats_of_halves(uint32_t x)
{
    return make_float2(attn_f16_to_f32((uint16_t)x), attn_f16_to_f32((uint16_t)(x >> 16)));
}
DEVICE uint32_t multiply_halves(uint32_t x, uint32_t y)
{
    const float2 u = floats_of_halves(x), v = floats_of_halves(y);
    return emu::pack_f16(u.x * v.x, u.y * v.y);
}
#if __CUDA_ARCH__ >= 890
template <int PAIR> DEVICE uint32_t halves_of_e4m3(uint32_t bytes)
{
    const uint32_t pair = bytes >> PAIR * 16;
    return emu::pack_f16(attn_e4m3_to_f32((uint8_t)pair), attn_e4m3_to_f32((uint8_t)(pair >> 8)));
}
#endif

template <typename T> DEVICE float dot_pair(uint32_t x, uint32_t y, float sum);
template <> DEVICE float dot_pair<__half>(uint32_t x, uint32_t y, float sum)
{
    return fmaf(attn_f16_to_f32((uint16_t)x), attn_f16_to_f32((uint16_t)y),
                fmaf(attn_f16_to_f32((uint16_t)(x >> 16)), attn_f16_to_f32((uint16_t)(y >> 16)), sum));
}
template <> DEVICE float dot_pair<__nv_bfloat16>(uint32_t x, uint32_t y, float sum)
{
    return fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16),
                fmaf(__uint_as_float(x & 0xffff0000), __uint_as_float(y & 0xffff0000), sum));
}

DEVICE float exp2_fast(float x)
{
    return emu::exp2_fast(x);
}

DEVICE float max_or_nan(float x, float y)
{
    return x != x || y != y ? NAN : fmaxf(x, y);
}

/* does nothing: the emulator starts a kernel only after the previous kernel has ended */
DEVICE void launch_dependents() {}
DEVICE void wait_for_prerequisites() {}

#endif
