/* device.h: CUDA C++'s keywords and device functions, written for the host's compiler. Every translated kernel source
 * includes this file first. */
#ifndef ATTN_EMULATOR_DEVICE_H
#define ATTN_EMULATOR_DEVICE_H

#include <math.h>
#include <stdlib.h>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cudaTypedefs.h>

#include "tests/emulator/emulator.h"

/* All CUDA headers are included above this line. Everything below is compiled as device code for the compute capability
 * EMULATED_ARCH. */
#define __CUDA_ARCH__ EMULATED_ARCH
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__ static
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __forceinline__
#define __forceinline__ inline
#define __noinline__    __attribute__((noinline))
#define __log2f         log2f /* the C library has a function __log2f, so CUDA's is renamed */

#define threadIdx (emu::self->index)
#define blockIdx  (emu::block_index())

static inline void __syncthreads()
{
    emu::sync_block();
}
static inline bool __syncthreads_or(bool x)
{
    return emu::sync_block_or(x);
}
static inline bool __syncthreads_and(bool x)
{
    return !emu::sync_block_or(!x);
}

/* ---- Functions that all lanes of a warp must call together ------------------------------------------------------- */

namespace emu {

inline void whole_warp(uint32_t mask, const char *what)
{
    if (mask != 0xffffffff) fail("%s with the mask %08x: only whole warps are emulated", what, mask);
}

template <class T> struct shuffled {
    T x, from_lane;
    int lane;
};
template <class T> UNWATCHED T shuffle(const char *name, T x, int from)
{
    shuffled<T> mine = { x, x, from & 31 };
    warp<shuffled<T>>(name, mine, [](shuffled<T> *const *all) UNWATCHED {
        for (int n = 0; n < 32; n++) all[n]->from_lane = all[all[n]->lane]->x;
    });
    return mine.from_lane;
}

/* Combines the lanes' values with `how`; every lane gets the result over all lanes. */
template <class T> UNWATCHED T reduce(const char *name, T x, T (*how)(T, T))
{
    struct value {
        T x;
        T (*how)(T, T);
    } mine = { x, how };
    warp<value>(name, mine, [](value *const *all) UNWATCHED {
        T sum = all[0]->x;
        for (int n = 1; n < 32; n++) sum = all[0]->how(sum, all[n]->x);
        for (int n = 0; n < 32; n++) all[n]->x = sum;
    });
    return mine.x;
}
inline uint32_t either(uint32_t x, uint32_t y)
{
    return x | y;
}
template <class T> T larger(T x, T y)
{
    return x > y ? x : y;
}
template <class T> T smaller(T x, T y)
{
    return x < y ? x : y;
}

} // namespace emu

static inline void __syncwarp(uint32_t mask = 0xffffffff)
{
    emu::whole_warp(mask, "__syncwarp");
    emu::sync_warp();
}
template <class T> T __ldg(const T *from)
{
    return *from;
}
template <class T> T __shfl_sync(uint32_t mask, T x, int from)
{
    emu::whole_warp(mask, "__shfl_sync");
    return emu::shuffle("__shfl_sync", x, from);
}
template <class T> T __shfl_up_sync(uint32_t mask, T x, unsigned by)
{
    emu::whole_warp(mask, "__shfl_up_sync");
    return emu::shuffle("__shfl_up_sync", x, emu::lane() < (int)by ? emu::lane() : emu::lane() - (int)by);
}
template <class T> T __shfl_xor_sync(uint32_t mask, T x, int with)
{
    emu::whole_warp(mask, "__shfl_xor_sync");
    return emu::shuffle("__shfl_xor_sync", x, emu::lane() ^ with);
}
static inline uint32_t __ballot_sync(uint32_t mask, bool x)
{
    emu::whole_warp(mask, "__ballot_sync");
    return emu::reduce<uint32_t>("__ballot_sync", (uint32_t)x << emu::lane(), emu::either);
}
static inline bool __any_sync(uint32_t mask, bool x)
{
    return __ballot_sync(mask, x) != 0;
}
static inline bool __all_sync(uint32_t mask, bool x)
{
    return __ballot_sync(mask, x) == 0xffffffff;
}
template <class T> T __reduce_max_sync(uint32_t mask, T x)
{
    emu::whole_warp(mask, "__reduce_max_sync");
    return emu::reduce<T>("__reduce_max_sync", x, emu::larger<T>);
}
template <class T> T __reduce_min_sync(uint32_t mask, T x)
{
    emu::whole_warp(mask, "__reduce_min_sync");
    return emu::reduce<T>("__reduce_min_sync", x, emu::smaller<T>);
}

/* ---- Functions of a single thread -------------------------------------------------------------------------------- */

static inline size_t __cvta_generic_to_shared(const void *p)
{
    return emu::shared_address(p);
}

/* a plain addition is atomic here, because one fiber (CUDA thread) of the emulator runs at a time */
template <class T> T atomicAdd(T *to, T x)
{
    const T before = *to;
    *to = before + x;
    return before;
}
template <class T> T atomicMax(T *to, T x)
{
    const T before = *to;
    if (x > before) *to = x;
    return before;
}
/* The race check does not watch atomicOr, because warps may legally change the same word between two barriers. */
template <class T> __attribute__((no_sanitize("thread"))) T atomicOr(T *to, T x)
{
    const T before = *to;
    *to = before | x;
    return before;
}

static inline int min(int x, int y)
{
    return x < y ? x : y;
}
static inline int max(int x, int y)
{
    return x > y ? x : y;
}
static inline float __uint_as_float(uint32_t x)
{
    return emu::bits<float>(x);
}
static inline float __int_as_float(int x)
{
    return emu::bits<float>(x);
}
static inline long long __double_as_longlong(double x)
{
    return emu::bits<long long>(x);
}
static inline int __float_as_int(float x)
{
    return emu::bits<int>(x);
}
static inline uint32_t __float_as_uint(float x)
{
    return emu::bits<uint32_t>(x);
}
static inline int __clz(uint32_t x)
{
    return x ? __builtin_clz(x) : 32;
}
static inline int __ffs(uint32_t x)
{
    return __builtin_ffs((int)x);
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which)
{
    const uint64_t bytes = (uint64_t)y << 32 | x;
    uint32_t z = 0;
    for (int n = 0; n < 4; n++) z |= (uint32_t)(bytes >> (which >> n * 4 & 7) * 8 & 0xff) << n * 8;
    return z;
}
static inline void __nanosleep(unsigned)
{
    emu::yield();
}
static inline float __fdividef(float x, float y)
{
    return x / y;
}
/* The host's compiler is told not to make fused multiply-adds (-ffp-contract=off), so each operation below rounds
 * once. */
static inline float __fadd_rn(float x, float y)
{
    return x + y;
}
static inline float __fsub_rn(float x, float y)
{
    return x - y;
}
static inline float __fmul_rn(float x, float y)
{
    return x * y;
}

namespace emu {
/* ex2.approx.ftz. */
inline float exp2_fast(float x)
{
    if (fabsf(x) < 1.17549435e-38f) x = 0;
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0 : y;
}
} // namespace emu

/* ---- Templates of the CUDA runtime that only nvcc declares, for symbols and kernels ------------------------------ */

template <class T> cudaError_t cudaGetSymbolAddress(void **to, const T &symbol)
{
    *to = (void *)&symbol;
    return cudaSuccess;
}
template <class... P> cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute what, int value)
{
    return cudaFuncSetAttribute((const void *)kernel, what, value);
}
template <class... P> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, void (*kernel)(P...))
{
    return cudaFuncGetAttributes(to, (const void *)kernel);
}

#endif
