/* copies.cuh: replaces kernels/cuda/sm90/layer/copies.cuh in emulator builds: the same functions and arguments, carried
 * out by the emulator. The include path finds this file first. */
#ifndef ATTN_SM90_COPIES_CUH
#define ATTN_SM90_COPIES_CUH

#include <stdint.h>

#include "kernels/cuda/common/args.cuh"
#include "tests/emulator/sm90.h"

/* ---- Barriers in shared memory (mbarrier) ------------------------------------------------------------------------ */

DEVICE void mbarrier_init(uint32_t bar, uint32_t count)
{
    emu::mbarrier_init(bar, count);
}
DEVICE void fence_mbarrier_init()
{
    emu::mbarrier_fence_init();
}
DEVICE void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes)
{
    emu::mbarrier_arrive(bar, bytes);
}
DEVICE void mbarrier_arrive(uint32_t bar)
{
    emu::mbarrier_arrive(bar);
}
DEVICE void mbarrier_wait(uint32_t bar, uint32_t parity)
{
    emu::mbarrier_wait(bar, parity);
}

DEVICE void mbarrier_sleep(uint32_t bar, uint32_t parity)
{
    emu::mbarrier_wait(bar, parity);
}

/* ---- Loads and stores by the copy engine (TMA) ------------------------------------------------------------------- */

DEVICE void prefetch_tensormap(const CUtensorMap *map)
{
    emu::tma_check_map(map);
}

DEVICE void tma_load_4d(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2, int c3, uint32_t bar)
{
    const int at[4] = { c0, c1, c2, c3 };
    emu::tma_load(to, map, at, 4, bar);
}
DEVICE void tma_prefetch_4d(const CUtensorMap *, int, int, int, int) {}

/* The emulator ignores the last argument, a cache policy. */
DEVICE void tma_load_4d(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2, int c3, uint32_t bar, uint64_t)
{
    tma_load_4d(to, map, c0, c1, c2, c3, bar);
}

DEVICE void tma_store_4d(const CUtensorMap *map, int c0, int c1, int c2, int c3, uint32_t from)
{
    const int at[4] = { c0, c1, c2, c3 };
    emu::tma_store(map, at, 4, from);
}
DEVICE void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar)
{
    emu::bulk_load(to, from, bytes, bar);
}
DEVICE void bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    emu::bulk_store(to, from, bytes);
}
DEVICE void bulk_add(float *to, uint32_t from, uint32_t bytes)
{
    emu::bulk_add(to, from, bytes);
}
DEVICE void bulk_commit()
{
    emu::bulk_commit();
}
template <int N> DEVICE void bulk_wait_read()
{
    emu::bulk_wait(N);
}
template <int N> DEVICE void bulk_wait()
{
    emu::bulk_wait(N);
}

DEVICE void fence_proxy_async_shared()
{
    emu::fence_proxy_async();
}
/* does nothing: in the emulator stores to global memory are visible at once */
DEVICE void fence_proxy_async_global() {}
DEVICE void prefetch_L2(const void *from)
{
    emu::check_global(from, 1, 1, "a prefetch");
}

#endif
