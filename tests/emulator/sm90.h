/* sm90.h: the asynchronous instructions of Hopper (sm_90a) on the emulator: mbarriers, TMA, wgmma, setmaxnreg.
 *
 * tests/emulator/kernels/cuda/sm90/layer/ptx.cuh has the wrappers that the kernels call. Each wrapper calls one
 * function of this file. On the hardware, the copy engine and the tensor cores work while threads run. In the emulator,
 * each thread block has a queue of such work, and the scheduler carries out some of it now and then. An operation
 * happens between a first and a last moment. A kernel may rely only on what it has waited for, so half of the
 * operations happen at the last moment:
 *
 *   operation    first moment                                 last moment
 *   TMA load     its issue                                    a thread waits for it and no thread can go on
 *   TMA store    its issue                                    a thread waits for it and no thread can go on, or the
 *                                                             thread that issued it ends
 *   product      its issue by all 4 warps. In a quarter of    a thread waits for its group and no thread can go on
 *                the products, each warp's rows may be
 *                computed as soon as that warp issues it
 *
 * An operation reads its source when it happens: a load reads global memory, a product or a store reads shared
 * memory. A source that is overwritten too early therefore changes the result. The sums of a product are written when
 * the kernel waits for the product. Until then the registers of the sums hold a signalling NaN: a read gives NaN, and
 * the wait reports a write or an arithmetic operation, because either changes the bits.
 *
 * Errors that the emulator reports:
 *
 *   mbarrier     The mbarrier is not initialised, is initialised twice, or its word is overwritten. It gets more
 *                arrivals than its count. Expected and arrived bytes differ when the block ends. The copy engine uses
 *                it without fence_mbarrier_init since its initialisation.
 *   TMA          A shared address is not a multiple of 128, a box leaves the block's memory, or a map was never
 *                encoded. A load writes to memory that another load is to fill, or that a store or a product in flight
 *                may still read. A block ends while a load is in flight.
 *   wgmma        Threads of a warpgroup issue different instructions. A load is still to fill an operand. A descriptor
 *                has a base offset, or bits that mean nothing. Sums are touched in flight, or shared by products of
 *                different shapes. Registers of A change in flight. Registers are used without wgmma_fence since the
 *                last wait. A block ends with products that were not waited for, or that not all warps issued.
 *   proxies      A product, a load or a store uses memory that an ordinary store wrote, without
 *                fence_proxy_async_shared after that store. An ordinary access touches memory to which a load is in
 *                flight. An ordinary store writes to memory that a TMA store in flight, or a product in flight of the
 *                same warpgroup, reads.
 *   setmaxnreg   A count is not a multiple of 8 from 24 to 256. A request for more registers than there are is a
 *                deadlock.
 *   maps         A tensor map that the driver would refuse is refused with CUDA_ERROR_INVALID_VALUE.
 *
 * Arithmetic: products of 16-bit types are added in float32, one after the other, each sum rounded to nearest (the
 * tensor core truncates). Sums of e4m3 products keep 14 significant bits, as measured on the hardware: each step of 32
 * products truncates every product, and the sum so far, at 2^-13 of the largest. ATTN_EMULATOR_E4M3=exact switches
 * this truncation off, so that a wrong layout can be told from a loss of bits.
 *
 * The emulator does not model which thread executed a fence: a fence of any thread counts. Each kernel starts after the
 * previous one has ended, so there is no programmatic dependent launch. The emulator does not model memory order
 * between threads, clusters and multicast, operands without swizzle or with a base offset, boxes narrower than their
 * swizzle, interleaved and im2col maps, or time.
 *
 * All functions of this file run on the one operating system thread that runs the block. */
#ifndef EMULATOR_SM90_H
#define EMULATOR_SM90_H

#include <cuda.h>
#include <stdint.h>

namespace emu {

/* ---- mbarrier: `bar` is the address of an 8-byte word in shared memory ------------------------------------------- */

void mbarrier_init(uint32_t bar, uint32_t count);
void mbarrier_fence_init();
void mbarrier_arrive(uint32_t bar, uint32_t expected_bytes = 0);
void mbarrier_wait(uint32_t bar, uint32_t parity);

/* ---- TMA: `at` has one coordinate for each dimension of the map, the innermost first ----------------------------- */

void tma_check_map(const CUtensorMap *map);
void tma_load(uint32_t to, const CUtensorMap *map, const int *at, int rank, uint32_t bar);
void tma_store(const CUtensorMap *map, const int *at, int rank, uint32_t from);
/* Copies of contiguous bytes (bulk copies), which need no tensor map. They go from global to shared memory or from
 * shared to global memory, or add floats to global memory. */
void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar);
void bulk_store(void *to, uint32_t from, uint32_t bytes);
void bulk_add(float *to, uint32_t from, uint32_t bytes);
void bulk_commit();
void bulk_wait(int groups_left);

/* Orders the stores to shared memory that came before this fence, so that products and TMA see them. */
void fence_proxy_async();

/* ---- wgmma: tensor core products of a warpgroup ------------------------------------------------------------------ */

enum wgmma_type { WGMMA_BF16, WGMMA_F16, WGMMA_E4M3 };

/* One thread's share of the wgmma product d[64 x N] = (accumulate ? d : 0) + A B. */
struct wgmma_operation {
    wgmma_type type;
    int N;
    float *d;                    /* this thread's N / 2 registers of the result d */
    const uint32_t *A_registers; /* this thread's 4 registers of A; NULL: A is in shared memory */
    uint64_t A, B;               /* descriptors */
    bool accumulate;
    bool A_mn, B_mn; /* Whether the operand is MN-major: consecutive elements in memory differ in m or n, not in k. */
};

void wgmma_issue(const wgmma_operation &x);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups_left);

/* ---- setmaxnreg: registers that warps release and take ----------------------------------------------------------- */

void setmaxnreg(int registers, bool increase);

/* ---- Instructions that never wait -------------------------------------------------------------------------------- */

void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]);
void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4]);

/* Packs four floats as float8_e4m3 into a word, x0 in the lowest byte. Numbers above 448 become 448. */
uint32_t pack_e4m3(float x0, float x1, float x2, float x3);

} // namespace emu

/* For tests only. emu_tma_loads() returns the number of TMA loads so far. After emu_refuse_maps(1), the driver refuses
 * tensor maps. */
extern "C" unsigned long emu_tma_loads();
extern "C" void emu_refuse_maps(int refuse);

/* The function that cudaGetDriverEntryPointByVersion returns for "cuTensorMapEncodeTiled". */
extern "C" CUresult emu_cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                               void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                                               const cuuint32_t *box, const cuuint32_t *element_strides,
                                               CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                               CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

#endif
