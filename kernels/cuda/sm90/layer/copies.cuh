/* copies.cuh: wrappers for single instructions of TMA (the unit that copies boxes of tensors) and of the barriers
 * (mbarrier) at which threads wait for its copies. Code of sm80/ may include this file without sm90/layer/ptx.cuh. */
#ifndef ATTN_SM90_COPIES_CUH
#define ATTN_SM90_COPIES_CUH

#include <cuda.h>
#include <stdint.h>

#include "kernels/cuda/common/args.cuh"

/* ---- Barriers in shared memory (mbarrier), PTX ISA 9.7.13.15 ----------------------------------------------------- */

DEVICE void mbarrier_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

/* Makes initialised barriers visible to TMA, which arrives at them. */
DEVICE void fence_mbarrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Arrives once at the barrier, whose current phase then also waits for `bytes` bytes of asynchronous copies. */
DEVICE void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* Waits until phase `parity` of the barrier is complete. The data that the barrier tracks is visible afterwards. */
DEVICE void mbarrier_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* Does the same as mbarrier_wait(), but suspends the thread, for at most 10 ms at a time. It does not poll shared
 * memory, whose bandwidth wgmma needs. It is for threads without other work. */
DEVICE void mbarrier_sleep(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
                 "@!done bra again;\n}" ::"r"(bar),
                 "r"(parity), "r"(10000000)
                 : "memory");
}

/* ---- Loads and stores by TMA, PTX ISA 9.7.9.27 ------------------------------------------------------------------- */

DEVICE void prefetch_tensormap(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Loads a box (a block of elements, whose size is in the tensor map) from coordinates (c0..c3) to shared memory.
 * Elements out of bounds arrive as zeros. All bytes of the box count towards the barrier `bar`. */
DEVICE void tma_load_4d(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2, int c3, uint32_t bar)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
                 "{%2,%3,%4,%5}], [%6];" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar)
                 : "memory");
}
/* Prefetches the box (block of elements) at coordinates (c0..c3) into the L2 cache. PTX ISA 9.7.9.27.1.4. */
DEVICE void tma_prefetch_4d(const CUtensorMap *map, int c0, int c1, int c2, int c3)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3)
                 : "memory");
}

/* Does the same as the other tma_load_4d(), with a policy for the L2 cache (createpolicy, PTX ISA 9.7.9.16). */
DEVICE void tma_load_4d(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2, int c3, uint32_t bar,
                        uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2,%3,%4,%5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar), "l"(policy)
        : "memory");
}

/* Stores a box from shared memory to the tensor. Elements outside the tensor are dropped. The store joins this thread's
 * current bulk group (see bulk_wait()). */
DEVICE void tma_store_4d(const CUtensorMap *map, int c0, int c1, int c2, int c3, uint32_t from)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1,%2,%3,%4}], [%5];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(from)
                 : "memory");
}
/* Copies bytes from global to shared memory. The copied bytes count towards the barrier `bar`. PTX ISA 9.7.9.25.4.1. */
DEVICE void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
/* Copies bytes from shared to global memory. The copy joins this thread's current bulk group (see bulk_wait()). */
DEVICE void bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
/* Adds floats in shared memory to floats in global memory. Each float is added atomically, but not the whole range at
 * once. The operation joins the thread's current bulk group. PTX ISA 9.7.9.25.4.2. */
DEVICE void bulk_add(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
DEVICE void bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Waits until all but the newest N bulk groups of this thread have read their shared memory, which may then be
 * overwritten. */
template <int N> DEVICE void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* Waits until all but the newest N bulk groups of this thread are complete. Afterwards their writes are visible to this
 * thread. */
template <int N> DEVICE void bulk_wait()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/* Orders this thread's earlier ordinary accesses to shared memory before later accesses by the asynchronous proxy
 * (wgmma, TMA). */
DEVICE void fence_proxy_async_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Orders accesses to global memory by ordinary instructions and by the asynchronous proxy (TMA), in both directions. */
DEVICE void fence_proxy_async_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
/* Prefetches a cache line into the L2 cache. PTX ISA 9.7.9.16. */
DEVICE void prefetch_L2(const void *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

#endif
