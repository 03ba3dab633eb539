/* tma.cuh: loads of tiles by TMA, the unit of Hopper GPUs that copies boxes of a tensor to and from shared memory. The
 * host makes the tensor maps; one thread issues the loads.
 *
 * A tile lies in shared memory as chunks of 128 bytes of columns, one after the other. A chunk has rows of 128 bytes,
 * with the 128-byte swizzle: the 16-byte piece c of row r is stored as piece c ^ (r & 7) of that row. Elements past the
 * end of the tensor arrive as zeros. */
#ifndef ATTN_SM90_TMA_CUH
#define ATTN_SM90_TMA_CUH

#include <cudaTypedefs.h>
#include <atomic>

#include "kernels/cuda/sm90/layer/copies.cuh"

/* ---- Functions of the host: tensor maps -------------------------------------------------------------------------- */

/* A tensor [B, H, rows, columns] with contiguous columns. Strides are in elements; an axis of size 1 may have stride
 * 0. */
struct tma_tensor {
    const void *data;
    CUtensorMapDataType type;
    int element;
    int64_t B, H, rows, columns, batch, head, row;
};

/* Number of batch rows, and of query and key rows, of a problem's tensors. A packed problem has one batch row, which
 * holds the rows of all sequences. */
struct extent {
    int64_t B, rows_q, rows_k;
};
static inline extent extent_of(const attn_dims &d)
{
    if (d.packed) return { 1, d.total_q, d.total_k };
    return { d.B, d.Sq, d.Sk };
}

static inline tma_tensor tma_tensor_of(const attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t columns)
{
    const CUtensorMapDataType type = view.dtype == ATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return { view.data, type, 2, B, H, rows, columns, view.batch, view.head, view.row };
}

static inline tma_tensor tma_bytes_of(const void *data, int64_t B, int64_t H, int64_t rows, int64_t columns,
                                      int64_t batch, int64_t head, int64_t row)
{
    return { data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, B, H, rows, columns, batch, head, row };
}

/* Returns whether two things are true: TMA can load the tensor, and accesses of 16 bytes to its rows are aligned.
 * `unit`: number of elements in 16 bytes. */
static inline bool tma_walkable(const attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t columns, int unit)
{
    if ((view.batch == 0 && B > 1) || (view.head == 0 && H > 1) || (view.row == 0 && rows > 1))
        return false; /* TMA cannot load a broadcast axis (stride 0, size above 1) */
    return (uint64_t)view.data % 16 == 0 && columns % unit == 0 && view.row % unit == 0 && view.head % unit == 0 &&
           view.batch % unit == 0;
}

/* Returns the driver's function that makes tensor maps, or NULL. Several threads may make the first call at the same
 * time. */
inline PFN_cuTensorMapEncodeTiled_v12000 tma_encoder()
{
    static std::atomic<PFN_cuTensorMapEncodeTiled_v12000> known;
    PFN_cuTensorMapEncodeTiled_v12000 encode = known.load(std::memory_order_relaxed);
    if (encode) return encode;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess)
        return nullptr;
    known.store(encode, std::memory_order_relaxed);
    return encode;
}

/* Makes a tensor map. One load copies box_bytes bytes (128, or 64 with a 64-byte swizzle) of each of box_rows rows,
 * from box_heads heads. `promotion`: number of bytes that the L2 fetches from memory when some of them are wanted. */
static inline bool tma_map(CUtensorMap *map, const tma_tensor &t, int box_rows, int box_bytes = 128,
                           CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B, int box_heads = 1)
{
    const PFN_cuTensorMapEncodeTiled_v12000 encode = tma_encoder();
    if (!encode) return false;
    const uint64_t dims[4] = { (uint64_t)t.columns, (uint64_t)t.rows, (uint64_t)t.H, (uint64_t)t.B };
    const uint64_t line = (uint64_t)(t.columns * t.element + 15) / 16 * 16;
    const auto bytes = [&](int64_t stride) { return stride ? (uint64_t)(stride * t.element) : line; };
    const uint64_t strides[3] = { bytes(t.row), bytes(t.head), bytes(t.batch) };
    const uint32_t box[4] = { (uint32_t)(box_bytes / t.element), (uint32_t)box_rows, (uint32_t)box_heads, 1 },
                   ones[4] = { 1, 1, 1, 1 };
    return encode(map, t.type, 4, (void *)t.data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* ---- Functions of the device: loads and stores of tiles ---------------------------------------------------------- */

/* The coordinates of a tile's first element. */
struct tma_place {
    int column, row, h, b;
};

/* Issues the load of a tile of ROWS rows and CHUNKS chunks of COLUMNS columns; in shared memory the chunks are PITCH
 * rows apart. The tile's bytes count towards barrier `bar`, together with `more` bytes that the caller loads. */
template <int ROWS, int CHUNKS, int COLUMNS, int PITCH = ROWS>
DEVICE void load_tile(uint32_t to, const CUtensorMap *map, const tma_place &from, uint32_t bar, uint32_t more = 0)
{
    mbarrier_arrive_expect_tx(bar, ROWS * CHUNKS * 128 + more);
    for (int c = 0; c < CHUNKS; c++)
        tma_load_4d(to + c * PITCH * 128, map, from.column + c * COLUMNS, from.row, from.h, from.b, bar);
}

/* Stores a tile to the tensor, without rows and columns outside the tensor. The store belongs to the thread's bulk
 * group (see bulk_wait()). If ordinary instructions wrote the tile to shared memory, fence_proxy_async_shared() must be
 * called before. */
template <int ROWS, int CHUNKS, int COLUMNS>
DEVICE void store_tile(uint32_t from, const CUtensorMap *map, const tma_place &to)
{
    for (int c = 0; c < CHUNKS; c++)
        tma_store_4d(map, to.column + c * COLUMNS, to.row, to.h, to.b, from + c * ROWS * 128);
    bulk_commit();
}

template <int CHUNKS, int COLUMNS> DEVICE void prefetch_tile(const CUtensorMap *map, const tma_place &from)
{
    for (int c = 0; c < CHUNKS; c++) tma_prefetch_4d(map, from.column + c * COLUMNS, from.row, from.h, from.b);
}

#endif
