/* sm90.h: the asynchronous instructions of Hopper (sm_90a) on the emulator: mbarriers, TMA, wgmma, setmaxnreg.
 *
 * kernels/cuda/sm90/layer/ptx.cuh beside this file has the wrappers that the kernels call; each calls one function from
 * here. What the hardware does on its own while threads go on (the copy engine, the tensor cores) is a queue of
 * work of the block, of which the scheduler has a piece done now and then. A program may rely only on what it has
 * waited for, so the worst time is chosen:
 *
 *   operation    may happen from              until                                          half of them
 *   TMA load     its issue                    a thread waits for it and no thread can go on  not before that
 *   TMA store    its issue                    the same, or its thread ends                   not before that
 *   product      the issue by all 4 warps;    the same, for the wait that covers its group   not before that
 *                a quarter of them: by each
 *                warp, for the warp's rows
 *
 * Sources are read then: global memory by a load, shared memory by a product or a store. So what is overwritten too
 * early shows in the result. Sums are written at the wait; until then their registers hold a signalling NaN: who
 * reads one gets NaN, and who writes one or reckons with it changes its bits, which the wait sees.
 *
 * What is an error, and says so:
 *
 *   mbarrier     not initialised, initialised twice, its word overwritten; more arrivals than its count; bytes that do
 *                not balance when the block ends; used by the copy engine without fence_mbarrier_init since its
 *                initialisation
 *   TMA          a shared address that is no multiple of 128, a box that leaves the block's memory, a map that nobody
 *                encoded; a load to memory that another is to fill, or that a store or a product in flight may still
 *                read; a block that ends under a load
 *   wgmma        threads of a warpgroup that issue different instructions; operands that a load is still to fill; an
 *                odd descriptor; sums touched in flight, or shared by products of different shapes; A's registers
 *                changed in flight; no wgmma_fence since the last wait before registers are used; a block that ends
 *                with products that were not waited for or not issued by all
 *   proxies      a product, a load or a store where an ordinary store wrote and no fence_proxy_async_shared followed;
 *                an ordinary access where a load is under way, and an ordinary store where a TMA store, or a product of
 *                the same warpgroup, is
 *   setmaxnreg   a count that is no multiple of 8 in 24 .. 256; more registers than there are is a deadlock
 *   maps         what the driver refuses is refused with CUDA_ERROR_INVALID_VALUE
 *
 * The arithmetic: products of 16-bit types are summed in float32, one after the other, rounded to nearest (the
 * tensor core truncates). Those of e4m3 keep 14 significant bits, as measured: each step of 32 cuts every product,
 * and what was there, at 2^-13 of the largest (ATTN_EMULATOR_E4M3=exact: not, to tell a wrong layout from it).
 *
 * Not modelled: whose fence it is (any thread's will do); memory order between threads; clusters and multicast;
 * operands without swizzle or with a base offset; boxes narrower than their swizzle; interleaved and im2col maps;
 * programmatic dependent launch, which is launch after the end of the kernel before; time.
 *
 * Everything of this file runs on the one thread of the operating system that runs the block. */
#ifndef EMULATOR_SM90_H
#define EMULATOR_SM90_H

#include <cuda.h>
#include <stdint.h>

namespace emu {

/* ---- mbarrier: `bar` is the shared address of an 8-byte word ----------------------------------------------------- */

void mbarrier_init(uint32_t bar, uint32_t count);
void mbarrier_fence_init();
void mbarrier_arrive(uint32_t bar, uint32_t expected_bytes = 0);
void mbarrier_wait(uint32_t bar, uint32_t parity);

/* ---- TMA: `at` has a coordinate a dimension of the map, the innermost first -------------------------------------- */

void tma_check_map(const CUtensorMap *map);
void tma_load(uint32_t to, const CUtensorMap *map, const int *at, int rank, uint32_t bar);
void tma_store(const CUtensorMap *map, const int *at, int rank, uint32_t from);
/* Copies bytes without a tensor map: from global memory, to global memory, or adding floats to those there. */
void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar);
void bulk_store(void *to, uint32_t from, uint32_t bytes);
void bulk_add(float *to, uint32_t from, uint32_t bytes);
void bulk_commit();
void bulk_wait(int groups_left);

/* Ordinary stores to shared memory before this fence become visible to products and TMA. */
void fence_proxy_async();

/* ---- wgmma ------------------------------------------------------------------------------------------------------- */

enum wgmma_type { WGMMA_BF16, WGMMA_F16, WGMMA_E4M3 };

/* One thread's share of d[64 x N] = (accumulate ? d : 0) + A B. */
struct wgmma_operation {
    wgmma_type type;
    int N;
    float *d;                    /* N / 2 accumulators of this thread */
    const uint32_t *A_registers; /* 4 registers of this thread; NULL: A is in shared memory */
    uint64_t A, B;               /* descriptors */
    bool accumulate;
    bool A_mn, B_mn; /* the operand is MN-major: its k axis runs along the rows */
};

void wgmma_issue(const wgmma_operation &x);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups_left);

/* ---- Registers --------------------------------------------------------------------------------------------------- */

void setmaxnreg(int registers, bool increase);

/* ---- What does not wait ------------------------------------------------------------------------------------------ */

void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]);
void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4]);

/* Packs four float8_e4m3, x0 in the lowest byte. Numbers above 448 become 448. */
uint32_t pack_e4m3(float x0, float x1, float x2, float x3);

} // namespace emu

/* For tests: the number of loads by the copy engine so far; and a switch that makes the driver refuse tensor maps. */
extern "C" unsigned long emu_tma_loads();
extern "C" void emu_refuse_maps(int refuse);

/* The function that cudaGetDriverEntryPointByVersion returns for "cuTensorMapEncodeTiled". */
extern "C" CUresult emu_cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                               void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                                               const cuuint32_t *box, const cuuint32_t *element_strides,
                                               CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                               CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

#endif
